"""Where a network has attention, found by its graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Pick, Scale, rounding_map
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import DEEP, Softmax


@dataclass(frozen=True, eq=False)
class Attention:
    """Self-attention of H heads on the tokens of a node X: `sum_h W_h V_h X^T P_h^T` plus
    constants, see `attention_bounds`.

    source, scores, target: the nodes of X, of the softmax and of the result. a `(H, d, d)`, bias
    `(H, d)`, value `(H, k, d)`, out `(H, o, k)`, mask `(H, n, n)`. most `(5, H)`: for `A_h`, `V_h`,
    `W_h V_h`, the bias and `W_h` the products of the Frobenius norms of what they were multiplied
    from, larger where sums have more terms than a token has entries. axes: where the heads, queries
    and keys are in the shape of the softmax.
    """

    source: int
    scores: int
    target: int
    a: Tensor
    bias: Tensor
    value: Tensor
    out: Tensor
    mask: Tensor
    most: Tensor
    axes: _Axes

    @property
    def tokens(self) -> int:
        """Their number."""
        return self.mask.shape[-1]


class _Axes(NamedTuple):
    """Where the axes of `(H, n, k)` are among those of a node; several make up one."""

    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    features: tuple[int, ...]

    def split(self, t: Tensor) -> Tensor:
        """`(m, *shape) -> (m, H, n, k)`."""
        sizes = [math.prod(t.shape[1 + i] for i in part) for part in self]
        return t.permute(0, *(1 + i for part in self for i in part)).reshape(len(t), *sizes)

    def join(self, t: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`(m, H, n, k) -> (m, *shape)`."""
        order = [i for part in self for i in part]
        back = sorted(range(len(order)), key=order.__getitem__)
        return t.reshape(len(t), *(shape[i] for i in order)).permute(0, *(1 + i for i in back))


@dataclass(frozen=True, eq=False)
class _Layout:
    """The products around a softmax: nodes of queries, keys and values with their axes, scores
    `factor <q, k> + shift`.
    """

    nodes: tuple[int, int, int]
    axes: tuple[_Axes, _Axes, _Axes]
    scores: _Axes
    result: int
    result_axes: _Axes
    factor: Tensor
    shift: Tensor
    hidden: Tensor


def find(graph: Graph, outer: bool = False) -> dict[int, Attention]:
    """The attentions of a graph, by their targets. X is the earliest node that queries, keys and
    values are functions of.

    For LayerNorm that is its `Normalise`, with gain and bias a part of A and V; outer: the output
    of the LayerNorm instead.
    """
    found = {}
    for i, node in enumerate(graph.nodes):
        layout = _layout(graph, i) if isinstance(node.curve, Softmax) else None
        attention = None if layout is None else _recognised(graph, i, layout, outer)
        if attention is not None:
            found[attention.target] = attention
    return found


def _scores(graph: Graph, softmax: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """The node that the scores of a softmax are made of, and how: score k is `factor_k v + shift_k`
    with v the entry `source_k` of that node.
    """
    nodes = graph.nodes
    i = nodes[softmax].inputs[0]
    path = []
    while isinstance(nodes[i].map, Scale):
        path.append(nodes[i])
        i = nodes[i].inputs[0]
    shape = nodes[softmax].shape
    source = torch.arange(math.prod(shape))
    match nodes[i].map:
        case Pick(where) if where is not None and nodes[nodes[i].inputs[0]].shape == shape:
            source = where.cpu()
            i = nodes[i].inputs[0]
    factor = torch.ones(shape, dtype=torch.float64)
    shift = torch.zeros(shape, dtype=torch.float64)
    for node in reversed(path):
        assert isinstance(node.map, Scale)
        factor = factor * node.map.factor
        shift = shift * node.map.factor
        shift = shift if node.bias is None else shift + node.bias
    return i, factor, shift, source


def _layout(graph: Graph, softmax: int) -> _Layout | None:
    """How the attention around a softmax is laid out; None if it is another one."""
    nodes = graph.nodes
    i, factor, shift, source = _scores(graph, softmax)
    before = nodes[i].curve
    after = _readers(graph, softmax)
    second = nodes[after[0]].curve if len(after) == 1 else None
    if not isinstance(before, Product) or not isinstance(second, Product):
        return None
    hidden = (source != torch.arange(len(source))).reshape(shift.shape)
    if not _masks(source, shift.shape[-1], shift.flatten()):
        return None
    (a, b, scores), (left, right) = letters_of(before), nodes[i].inputs
    if scores[-1] in a:  # the keys' letter is the last one of the scores
        (a, b), (left, right) = (b, a), (right, left)
    batch = [c for c in scores if c in a and c in b]
    row = [c for c in scores if c in a and c not in b]
    inner = [c for c in a if c not in scores]
    result = after[0]
    (p, v, out), (first, value) = letters_of(second), nodes[result].inputs
    if first != softmax:
        (p, v), value = (v, p), first
    same = dict(zip(scores, p))
    heads_there = [same[c] for c in batch]
    free = [c for c in v if c not in p]
    fits = (
        scores[-1] in b
        and scores[-1] not in a
        and len(row) == 1
        and len(batch) + 2 == len(scores)
        and value != softmax
        and set(v) == {*heads_there, p[-1], *free}
        and set(out) == {*heads_there, same[row[0]], *free}
    )
    if not fits:
        return None
    return _Layout(
        (left, right, value),
        (
            axes_of(a, batch, row, inner),
            axes_of(b, batch, [scores[-1]], inner),
            axes_of(v, heads_there, [p[-1]], free),
        ),
        axes_of(scores, batch, row, [scores[-1]]),
        result,
        axes_of(out, heads_there, [same[row[0]]], free),
        factor,
        shift,
        hidden,
    )


def _masks(source: Tensor, width: int, shift: Tensor) -> bool:
    """Whether entries that come from another place are masked, as `operators/softmax.py` has them:
    copies of an entry of their own row that stays where it is, so far below it that their weight
    is 0.
    """
    own = torch.arange(len(source))
    hidden = source != own
    stays = bool((source >= 0).all()) and torch.equal(source[source], source)
    same = torch.equal(source // width, own // width)
    return stays and same and bool((shift[hidden] <= shift[source][hidden] - DEEP / 2).all())


def letters_of(product: Product) -> tuple[str, str, str]:
    """The letters of both factors and of the result."""
    left, out = product.equation.replace(" ", "").split("->")
    a, b = left.split(",")
    return a, b, out


def axes_of(letters: str, *parts: Sequence[str]) -> _Axes:
    """Where the letters of each part stand."""
    return _Axes(*(tuple(letters.index(c) for c in part) for part in parts))


def _readers(graph: Graph, i: int) -> list[int]:
    return [j for j, node in enumerate(graph.nodes) if i in node.inputs]


def _recognised(graph: Graph, softmax: int, layout: _Layout, outer: bool) -> Attention | None:
    """From the earliest common source of queries, keys and values that they are token-wise
    functions of.
    """
    above = [_above(graph, i) for i in layout.nodes]
    common = [i for i in above[0] if i in above[1] and i in above[2]]
    tables = (layout.factor, layout.shift, layout.hidden)
    factor, shift, hidden = (layout.scores.split(t[None])[0] for t in tables)
    scale = factor.abs().amax((1, 2)) * factor.flatten(1).sum(1).sign()
    if not torch.equal(factor, scale[:, None, None].expand_as(factor)):
        return None
    mask = torch.where(hidden, -math.inf, shift)
    if hidden.all(-1).any():  # a token that sees nothing sees everything alike
        return None
    for source in common if outer else reversed(common):
        if outer and not normalised(graph, source):
            continue
        parts = [
            _token_map(graph, path[: path.index(source)], source, axes)
            for path, axes in zip(above, layout.axes)
        ]
        if any(part is None or part[0].shape[0] != len(mask) for part in parts):
            continue
        (q, b_q, size_q, size_b), (k, _, size_k, _), (v, _, size_v, _) = (
            part for part in parts if part is not None
        )
        target, out, size_out = _projection(graph, layout, mask.shape[-1])
        c = scale[:, None, None]
        much = scale.abs() * size_k
        most = torch.stack([much * size_q, size_v, size_out * size_v, much * size_b, size_out])
        maps = [[graph.nodes[i].map for i in path[: path.index(source)]] for path in above]
        longest = max(sum(map_.fan_in for map_ in path if map_ is not None) for path in maps)
        most = most * max(1.0, (k.shape[1] + out.shape[2] + 2 * longest) / (4 * k.shape[2]))
        bias = (c * (k.mT @ b_q[..., None]))[..., 0]
        return Attention(
            source, softmax, target, c * (k.mT @ q), bias, v, out, mask, most, layout.scores
        )
    return None


def _above(graph: Graph, i: int) -> list[int]:
    """A node and the nodes it is an affine function of, one after the other up to the first
    that is none of a single node.
    """
    path = [i]
    while graph.nodes[path[-1]].map is not None and len(graph.nodes[path[-1]].inputs) == 1:
        path.append(graph.nodes[path[-1]].inputs[0])
    return path


def _run(
    graph: Graph, path: Sequence[int], x: Tensor, bias: bool = False, size: bool = False
) -> Tensor:
    """A batch through affine nodes, the last one first; without the biases, or by magnitudes."""
    for i in reversed(path):
        node = graph.nodes[i]
        assert node.map is not None
        x = (rounding_map(node.map) if size else node.map).forward(x)
        x = x + (node.bias_size if size else node.bias) if bias and node.bias is not None else x
    return x


def _token_map(
    graph: Graph, path: Sequence[int], source: int, axes: _Axes
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`(H, k, d)`, `(H, k)` and their sizes `(H,)` if the path takes every token x to `W_h x +
    b_h`; None if it does not.

    The matrix is read off tokens that are all the same basis vector; that it is the same for every
    token, and that tokens do not mix, is checked on random ones. sizes: the Frobenius norms of the
    magnitudes of the matrix, and of the bias.
    """
    shape = graph.nodes[source].shape
    n = math.prod(shape[:-1])
    d = shape[-1]
    basis = torch.eye(d, dtype=torch.float64)[:, None].expand(d, n, d)

    def through(x: Tensor, **how: bool) -> Tensor:
        return axes.split(_run(graph, path, x.reshape(-1, *shape), **how))

    nothing = torch.zeros(1, n, d, dtype=torch.float64)
    start = through(nothing, bias=True)[0]
    most = through(nothing, bias=True, size=True)[0, :, 0]
    if start.shape[1] != n or not torch.allclose(
        start, start[:, :1].expand_as(start), rtol=1e-12, atol=1e-300
    ):
        return None
    pieces = [through(part)[:, :, 0] for part in torch.split(basis, 64)]
    sizes = [through(part, size=True)[:, :, 0] for part in torch.split(basis, 64)]
    weight, size = (torch.cat(t).permute(1, 2, 0) for t in (pieces, sizes))
    x = torch.randn(2, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if not _close(through(x), torch.einsum("hkd,mnd->mhnk", weight, x)):
        return None
    sizes_of_both = torch.linalg.vector_norm(size, dim=(1, 2)), most.norm(dim=1)
    return weight, start[:, 0], *sizes_of_both


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: two linear maps that are not the same differ by more at a random
    point.
    """
    return a.shape == b.shape and bool(
        (a - b).abs().max() <= 1e-12 * b.abs().max().clamp(min=1e-300)
    )


def _projection(graph: Graph, layout: _Layout, n: int) -> tuple[int, Tensor, Tensor]:
    """The node after the output projection, `(H, o, k)` and sizes `(H,)`; the heads side by
    side where there is none.
    """
    path = [layout.result]
    while True:
        after = _readers(graph, path[-1])
        if (
            len(after) != 1
            or graph.nodes[after[0]].map is None
            or len(graph.nodes[after[0]].inputs) != 1
        ):
            break
        path.append(after[0])
    shape = graph.nodes[layout.result].shape
    sizes = layout.result_axes.split(torch.zeros(1, *shape)).shape
    count = sizes[1]
    width = sizes[3]
    basis = (
        torch.eye(count * width, dtype=torch.float64)
        .reshape(-1, count, 1, width)
        .expand(-1, count, n, width)
    )
    for end in range(len(path) - 1, 0, -1):
        target = graph.nodes[path[end]].shape
        if math.prod(target[:-1]) != n:
            continue

        def through(x: Tensor, end: int = end, **how: bool) -> Tensor:
            x = _run(graph, path[end:0:-1], layout.result_axes.join(x, shape), **how)
            return x.reshape(len(x), n, -1)

        pieces = [
            [through(part, size=flag)[:, 0] for part in torch.split(basis, 64)]
            for flag in (False, True)
        ]
        out, size = (torch.cat(t).reshape(count, width, -1).mT for t in pieces)
        x = torch.randn(
            2, count, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        if _close(through(x), torch.einsum("hok,mhnk->mno", out, x)):
            return path[end], out, torch.linalg.vector_norm(size, dim=(1, 2))
    out = torch.eye(count * width, dtype=torch.float64).reshape(count, width, -1).mT
    return layout.result, out, torch.full((count,), math.sqrt(width), dtype=torch.float64)


def normalised(graph: Graph, i: int) -> bool:
    """Whether a node is a `Normalise`, or its gain and bias."""
    node = graph.nodes[i]
    return isinstance(node.curve, Normalise) or (
        isinstance(node.map, Scale) and isinstance(graph.nodes[node.inputs[0]].curve, Normalise)
    )
