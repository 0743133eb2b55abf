"""Transformers: what their modules are, how steep each one is, and the bound on the whole network
that these constants make.

`find` recognises self-attention in a graph: a softmax of products of two token-wise affine
functions of one node X, its result multiplied with a third. `Walk` goes through the graph with
Euclidean constants of the modules: linear maps by their norms, activations by their steepest slope
where they are used, LayerNorm by `1 / sqrt(variance + eps)` at the least variance there is,
attention by `attention.region_bound` or `global_bound`, and additions add. On R^n that is the
corollary's

    Lambda = L_head L_emb prod_h (1 + L_LN L_MHA) (1 + L_LN' L_FFN),

on a box or a ball the same with local constants. `corollary` reports both, the paper's constants
beside ours. Constants of deep networks overflow, so a walk counts in natural logarithms, rounded up
at every step.

Attention without a normalisation before it is not Lipschitz on R^n: its constant is infinite there
(THEORY 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from wassail.certificates.attention import castin, global_bound, heads, region_bound, spectral
from wassail.certificates.curves import Normalise, Product, Softmax, Span
from wassail.certificates.device import HOST
from wassail.certificates.jacobian import _step, one_region, ranges
from wassail.certificates.norms import map_norm, matrix_norm, steepest_slope
from wassail.certificates.propagate import derivative_span
from wassail.certificates.region import Region, Where
from wassail.certificates.structure import (
    Concat,
    Graph,
    Matrix,
    Node,
    Pick,
    Scale,
    Sum,
    rounding_map,
)
from wassail.network import Model
from wassail.records import Record
from wassail.rounding import sized
from wassail.threat import Number, dual, parse_norm, show

UP = 1e-12  # added to a logarithm at every step, which is off by less
WIDEST = (
    1024  # matrices of up to this many rows and columns are multiplied to see how they act together
)
MATRICES = 2**22  # numbers in the derivatives of all tokens of a node
ROOM = (
    2**25
    # numbers in the largest tensor of a region's attention bound; above it the bound on the ball is
    # taken
)
HIDDEN = -1e4  # scores below it are a mask
FLOAT32 = 38.5  # log10 of the largest number that float32 holds
# of the ascents
STARTS = 5
ROUNDS = 4
HOPELESS = 6.0  # a bound this many decades above what was found is called vacuous


# Attention in a graph.


@dataclass(frozen=True, eq=False)
class Attention:
    """Self-attention of H heads on the tokens of a node X: `sum_h W_h V_h X^T P_h^T` plus
    constants, see `attention`.

    source, scores, target: the nodes of X, of the softmax and of the result. a `(H, d, d)`, bias
    `(H, d)`, value `(H, k, d)`, out `(H, o, k)`, mask `(H, n, n)`. most `(3, H)`: for `A_h`, `V_h`
    and `W_h V_h` the products of the Frobenius norms of what they were multiplied from. axes: where
    the heads, queries and keys are in the shape of the softmax.
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


def _layout(graph: Graph, softmax: int) -> _Layout | None:
    nodes = graph.nodes
    i = graph.nodes[softmax].inputs[0]
    path = []
    while isinstance(nodes[i].map, Scale):
        path.append(nodes[i])
        i = nodes[i].inputs[0]
    before = nodes[i].curve
    after = _readers(graph, softmax)
    if (
        not isinstance(before, Product)
        or len(after) != 1
        or not isinstance(nodes[after[0]].curve, Product)
    ):
        return None
    shape = nodes[softmax].shape
    factor = torch.ones(shape, dtype=torch.float64)
    shift = torch.zeros(shape, dtype=torch.float64)
    for node in reversed(path):
        assert isinstance(node.map, Scale)
        factor = factor * node.map.factor
        shift = shift * node.map.factor
        shift = shift if node.bias is None else shift + node.bias
    (a, b, scores), (left, right) = _letters(before), nodes[i].inputs
    if scores[-1] in a:  # the keys' letter is the last one of the scores
        (a, b), (left, right) = (b, a), (right, left)
    batch = [c for c in scores if c in a and c in b]
    row = [c for c in scores if c in a and c not in b]
    inner = [c for c in a if c not in scores]
    result = after[0]
    second = nodes[result].curve
    assert isinstance(second, Product)
    (p, v, out), (first, value) = _letters(second), nodes[result].inputs
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
            _axes(a, batch, row, inner),
            _axes(b, batch, [scores[-1]], inner),
            _axes(v, heads_there, [p[-1]], free),
        ),
        _axes(scores, batch, row, [scores[-1]]),
        result,
        _axes(out, heads_there, [same[row[0]]], free),
        factor,
        shift,
    )


def _letters(product: Product) -> tuple[str, str, str]:
    left, out = product.equation.replace(" ", "").split("->")
    a, b = left.split(",")
    return a, b, out


def _axes(letters: str, *parts: Sequence[str]) -> _Axes:
    return _Axes(*(tuple(letters.index(c) for c in part) for part in parts))


def _readers(graph: Graph, i: int) -> list[int]:
    return [j for j, node in enumerate(graph.nodes) if i in node.inputs]


def _recognised(graph: Graph, softmax: int, layout: _Layout, outer: bool) -> Attention | None:
    """From the earliest common source of queries, keys and values that they are token-wise
    functions of.
    """
    above = [_above(graph, i) for i in layout.nodes]
    common = [i for i in above[0] if i in above[1] and i in above[2]]
    factor, shift = (layout.scores.split(t[None])[0] for t in (layout.factor, layout.shift))
    scale = factor.abs().amax((1, 2)) * factor.flatten(1).sum(1).sign()
    hidden = (factor == 0) & (shift <= HIDDEN)
    if not torch.equal(factor, torch.where(hidden, 0.0, scale[:, None, None].expand_as(factor))):
        return None
    mask = torch.where(hidden, -math.inf, shift)
    if hidden.all(-1).any():  # a token that sees nothing sees everything alike
        return None
    for source in common if outer else reversed(common):
        if outer and not _normalised(graph, source):
            continue
        parts = [
            _token_map(graph, path[: path.index(source)], source, axes)
            for path, axes in zip(above, layout.axes)
        ]
        if any(part is None or part[0].shape[0] != len(mask) for part in parts):
            continue
        (q, b_q, size_q), (k, _, size_k), (v, _, size_v) = (
            part for part in parts if part is not None
        )
        target, out, size_out = _projection(graph, layout, mask.shape[-1])
        c = scale[:, None, None]
        most = torch.stack([scale.abs() * size_q * size_k, size_v, size_out * size_v])
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
        x = x + node.bias if bias and node.bias is not None else x
    return x


def _token_map(
    graph: Graph, path: Sequence[int], source: int, axes: _Axes
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`(H, k, d)`, `(H, k)` and sizes `(H,)` if the path takes every token x to `W_h x + b_h`; None
    if it does not.

    The matrix is read off tokens that are all the same basis vector; that it is the same for every
    token, and that tokens do not mix, is checked on random ones. sizes: the Frobenius norms of the
    matrix of magnitudes.
    """
    shape = graph.nodes[source].shape
    n = math.prod(shape[:-1])
    d = shape[-1]
    basis = torch.eye(d, dtype=torch.float64)[:, None].expand(d, n, d)

    def through(x: Tensor, **how: bool) -> Tensor:
        return axes.split(_run(graph, path, x.reshape(-1, *shape), **how))

    start = through(torch.zeros(1, n, d, dtype=torch.float64), bias=True)[0]
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
    return weight, start[:, 0], torch.linalg.vector_norm(size, dim=(1, 2))


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


def _normalised(graph: Graph, i: int) -> bool:
    """Whether a node is a `Normalise`, or its gain and bias."""
    node = graph.nodes[i]
    return isinstance(node.curve, Normalise) or (
        isinstance(node.map, Scale) and isinstance(graph.nodes[node.inputs[0]].curve, Normalise)
    )


def radius(graph: Graph, i: int) -> float:
    """How long a normalised token can be: `sqrt(d)`, and `sqrt(d) max|g| + |b|` after gain and
    bias; inf for other nodes.
    """
    node = graph.nodes[i]
    if isinstance(node.curve, Normalise):
        return math.sqrt(node.shape[-1]) * (1 + UP)
    if not _normalised(graph, i):
        return math.inf
    assert isinstance(node.map, Scale)
    bias = torch.zeros(1) if node.bias is None else node.bias.expand(node.shape)
    return (
        math.sqrt(node.shape[-1]) * float(node.map.factor.abs().max())
        + float(bias.norm(dim=-1).max())
    ) * (1 + UP)


# The walk.


def everywhere(
    graph: Graph, region: Region, known: Mapping[int, Span] | None = None
) -> dict[int, Span]:
    """The range of every node over the region, `(1, *shape)` each, rounded outward; sides may be
    infinite.

    known: what `jacobian.ranges` found there, if it has been called already.
    """
    known = ranges(graph, one_region(region)) if known is None else known
    low, high = (side.reshape(1, *graph.nodes[0].shape) for side in region.box)
    far = torch.full_like(
        low, math.inf
    )  # a side of the box is a rounded sum: one number further out it is a bound
    found: dict[int, Span] = {0: (torch.nextafter(low, -far), torch.nextafter(high, far))}
    for i, node in enumerate(graph.nodes[1:], 1):
        low, high = _step(graph, node, [found[j] for j in node.inputs])
        if i in known:
            low = torch.maximum(low, known[i][0])
            high = torch.minimum(high, known[i][1])
        found[i] = low, high
    return found


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The derivative of a node by an earlier one, base, token by token: within centre +-
    radius, `(n, p, d)` each.
    """

    base: int
    centre: Tensor
    radius: Tensor

    @classmethod
    def start(cls, i: int, node: Node) -> _Tokens:
        """Of a node by itself."""
        n = math.prod(node.shape[:-1])
        d = node.shape[-1]
        return cls(
            i,
            torch.eye(d, dtype=torch.float64).expand(n, d, d),
            torch.zeros(n, d, d, dtype=torch.float64),
        )

    def norm(self) -> float:
        """An upper bound on its norm, the largest of the tokens'."""
        return float((spectral(self.centre) + spectral(self.radius)).max())

    def times(self, centre: Tensor, radius: Tensor) -> _Tokens:
        """Rows multiplied with numbers within centre +- radius, `(n, p)` each."""
        centre = centre[..., None]
        radius = radius[..., None]
        size = self.centre.abs() + self.radius
        return self.to(
            centre * self.centre,
            centre.abs() * self.radius + radius * size,
            (centre.abs() + radius) * size,
            1,
        )

    def to(self, centre: Tensor, radius: Tensor, size: Tensor, terms: int) -> _Tokens:
        """Another derivative by the same node; size: the magnitudes that sums of so many terms
        were made of.
        """
        return _Tokens(self.base, centre, radius + (terms + 8) * 2.0**-52 * size)


@dataclass(frozen=True, eq=False)
class Walk:
    """Euclidean constants of the steps of a graph over a region, and of what lies between two
    nodes.

    spans: the ranges of all nodes (`everywhere`); attentions: by their targets (`find`); close:
    whether the region is bounded, so that it pays to look at tokens one by one.
    """

    graph: Graph
    spans: Mapping[int, Span]
    attentions: Mapping[int, Attention]
    close: bool = False
    _known: dict[int, float] = field(default_factory=dict)

    @classmethod
    def make(cls, graph: Graph, region: Region, known: Mapping[int, Span] | None = None) -> Walk:
        """Over a region; known: as in `everywhere`. The ranges come from the graph's device,
        the walk is on the CPU.
        """
        spans = {
            i: (low.to(HOST), high.to(HOST))
            for i, (low, high) in everywhere(graph, region, known).items()
        }
        graph = graph.to(HOST)
        return cls(graph, spans, find(graph), region.bounded)

    def stretch(self, source: int, target: int) -> float:
        """The logarithm of a bound on the norm of the derivative of one node by another, everything
        else held fixed.

        Where tokens do not mix, the derivative of a node by an earlier one is a matrix for each of
        them, `tokens`, and its norm may be less than the product of the norms on the way: on small
        regions it is almost exact.
        """
        steps = {source: 0.0}
        tokens = {source: self._start(source)}
        for i in range(source + 1, target + 1):
            inputs = [j for j in self.graph.nodes[i].inputs if j in steps]
            if not inputs:
                continue
            steps[i] = self._over(i, steps) + UP * (1 + len(inputs))
            known = [tokens[j] for j in inputs]
            first = known[0]
            carried = None
            if first is not None and all(t is not None and t.base == first.base for t in known):
                carried = self._carry(i, [t for t in known if t is not None])
            if carried is None or not torch.isfinite(carried.radius).all():
                tokens[i] = self._start(i)
            else:
                tokens[i], steps[i] = (
                    carried,
                    min(steps[i], steps[carried.base] + _log(carried.norm()) + UP),
                )
        return steps.get(target, -math.inf)

    def _start(self, i: int) -> _Tokens | None:
        node = self.graph.nodes[i]
        few = len(node.shape) > 0 and node.size * node.shape[-1] <= MATRICES
        return _Tokens.start(i, node) if self.close and few else None

    def _carry(self, i: int, given: Sequence[_Tokens]) -> _Tokens | None:
        """The derivative of node i from those of its inputs by the same base; None if it mixes
        tokens.
        """
        node = self.graph.nodes[i]
        first = given[0]
        shape = node.shape
        before = self.graph.nodes[node.inputs[0]].shape
        n = len(first.centre)
        if not shape or math.prod(shape[:-1]) != n or node.size * first.centre.shape[-1] > MATRICES:
            return None
        if isinstance(node.map, Sum) and len(given) == len(node.inputs):
            centre, radius = (
                reduce(torch.add, parts) for parts in zip(*((g.centre, g.radius) for g in given))
            )
            return first.to(
                centre,
                radius,
                reduce(torch.add, [g.centre.abs() + g.radius for g in given]),
                len(given),
            )
        if isinstance(node.map, Matrix):
            w = node.map.weight
            most = sized(
                (w.abs() if node.map.most is None else node.map.most)
                @ sized(first.centre.abs() + first.radius)
            )
            return first.to(w @ first.centre, w.abs() @ first.radius, most, w.shape[1])
        if isinstance(node.map, Scale):
            factor = node.map.factor.expand(shape).reshape(n, -1)
            return first.times(factor, torch.zeros_like(factor))
        if isinstance(node.map, Pick):
            return first if node.map.source is None and before[-1] == shape[-1] else None
        if node.map is not None or isinstance(node.curve, Product | Softmax):
            return None
        span = self.spans[node.inputs[0]]
        if isinstance(node.curve, Normalise):
            return self._normalise(i, first)
        low, high = (side.reshape(n, -1) for side in derivative_span(node, span))
        return first.times((low + high) / 2, (high - low) / 2 * (1 + UP))

    def _normalise(self, i: int, given: _Tokens) -> _Tokens:
        """`rho (I - y y^T / d)`, y and rho in their ranges, times what is given."""
        node = self.graph.nodes[i]
        assert isinstance(node.curve, Normalise)
        n = len(given.centre)
        d = node.shape[-1]
        low, high = (side.reshape(n, d) for side in self.spans[node.inputs[0]])
        slack = 2.0**-50 * (d + 8)
        most = torch.maximum(low.abs(), high.abs()).square().mean(1) + node.curve.eps
        least = _nearest(low, high).square().mean(1) + node.curve.eps
        bottom = most.rsqrt() * (1 - slack)
        top = least.rsqrt() * (1 + slack)
        below, above = (side.reshape(n, d) for side in self.spans[i])
        y = ((above + below) / 2)[..., None]
        room = ((above - below) / 2 * (1 + UP))[..., None]
        size = given.centre.abs() + given.radius
        inner = y.mT @ given.centre
        inner_room = y.abs().mT @ given.radius + room.mT @ size
        through = y * inner / d
        through_room = (y.abs() * inner_room + room * (inner.abs() + inner_room)) / d
        much = size + (y.abs() + room) * ((y.abs() + room).mT @ size) / d
        rest = given.to(given.centre - through, given.radius + through_room, much, d)
        return rest.times(
            ((top + bottom) / 2)[:, None].expand(n, d), ((top - bottom) / 2)[:, None].expand(n, d)
        )

    def _over(self, i: int, steps: Mapping[int, float]) -> float:
        node = self.graph.nodes[i]
        given = [steps.get(j, -math.inf) for j in node.inputs]
        if isinstance(node.map, Sum):
            value = _added(given)
        elif isinstance(node.map, Concat):
            value = _added([2 * g for g in given]) / 2
        elif node.map is not None:
            value = min(
                (_times(steps[j], norm) for j, norm in self._linear(i) if j in steps),
                default=-math.inf,
            )
        elif isinstance(node.curve, Product):
            value = _added([_times(g, self._factor(i, k)) for k, g in enumerate(given)])
        else:
            value = _times(given[0], self._slope(i))
        attention = self.attentions.get(i)
        if attention is not None and attention.source in steps:
            value = self._either(value, _times(steps[attention.source], self._attention(attention)))
        return value

    def _either(self, steps: float, module: float) -> float:
        """Attention step by step or as one module: both hold."""
        return min(steps, module)

    def _linear(self, i: int) -> Iterator[tuple[int, float]]:
        """The norm of an affine node from its input, and of it together with the matrices and
        scales before it.
        """
        node = self.graph.nodes[i]
        assert node.map is not None
        j = node.inputs[0]
        yield j, _log(map_norm(node.map, 2, self.graph.nodes[j].shape, node.shape))
        matrix = _matrix(node)
        size = 0.0
        while matrix is not None:
            before = _matrix(self.graph.nodes[j])
            if before is None or max(*before.shape, *matrix.shape) > WIDEST:
                return
            size = float(
                torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(before)
            ) + size * float(before.norm())
            matrix = matrix @ before
            j = self.graph.nodes[j].inputs[0]
            yield j, _log(matrix_norm(matrix, 2, 2) + 2.0**-50 * (len(before) + 8) * size)

    def _factor(self, i: int, k: int) -> float:
        """The norm of a product as a map of its input k: that of the matrices that the other
        input is made of.
        """
        node = self.graph.nodes[i]
        assert isinstance(node.curve, Product)
        letters, (low, high) = _letters(node.curve), self.spans[node.inputs[1 - k]]
        mine = letters[k]
        other = letters[1 - k]
        out = letters[2]
        both = [c for c in other if c in mine and c in out]
        inner = [c for c in other if c not in out]
        axes = _axes(other, both, inner, [c for c in other if c not in mine])
        most = axes.split(torch.maximum(low.abs(), high.abs()))
        return _log(float(spectral(most).max())) if bool(torch.isfinite(most).all()) else math.inf

    def _slope(self, i: int) -> float:
        """A ReLU, an activation, a softmax or a normalisation, by the range of its input."""
        node = self.graph.nodes[i]
        span = self.spans[node.inputs[0]]
        if isinstance(
            node.curve, Softmax
        ):  # diag(p) - p p^T <= diag(p), and its norm is 1/2 at most
            return _log(min(0.5, float(self.spans[i][1].max())))
        if isinstance(node.curve, Normalise):
            low, high = span
            variance = float(_nearest(low, high).square().mean(-1).min()) * (
                1 - 2.0**-50 * (low.shape[-1] + 8)
            )
            return (
                -0.5 * math.log(node.curve.eps + variance)
                if node.curve.eps + variance > 0
                else math.inf
            )
        return _log(max(float(side.abs().max()) for side in derivative_span(node, span)))

    def _attention(self, attention: Attention) -> float:
        if attention.target not in self._known:
            self._known[attention.target] = _log(self._attention_bound(attention))
        return self._known[attention.target]

    def _attention_bound(self, attention: Attention) -> float:
        n = attention.tokens
        d = attention.a.shape[-1]
        reach = radius(self.graph, attention.source)
        low, high = (side.reshape(n, d) for side in self.spans[attention.source])
        chances = [attention.axes.split(side)[0] for side in self.spans[attention.scores]]
        wide = (
            not torch.isfinite(high - low).all()
            or n * n * d > ROOM
            or float((high - low).max()) >= reach
        )
        if not math.isfinite(reach):
            reach = float(
                torch.linalg.vector_norm(torch.maximum(low.abs(), high.abs()), dim=1).max()
            ) * (1 + UP)
        if not math.isfinite(reach):
            return math.inf

        def bound(h: int, v: Tensor, size: Tensor) -> float:
            a = attention.a[h]
            bias = attention.bias[h]
            mask = attention.mask[h]
            most = float(attention.most[0, h]), float(size[h])
            if wide:
                return global_bound(n, a, v, reach, bias, mask, most)
            return float(
                region_bound(
                    low, high, a, v, bias, mask, reach, (chances[0][h], chances[1][h]), most
                )
            )

        together = [
            bound(h, attention.out[h] @ v, attention.most[2]) for h, v in enumerate(attention.value)
        ]
        alone = [bound(h, v, attention.most[1]) for h, v in enumerate(attention.value)]
        return heads(together, alone, attention.out.transpose(0, 1).flatten(1))


@dataclass(frozen=True, eq=False)
class PaperWalk(Walk):
    """The paper's constants on R^n: norms of the layers one by one, LayerNorm `max|g| / sqrt(eps)`,
    attention by Castin et al.

    Heads add as `sum_h |W_h| Lip_h` (their Lemma 3.8). Tokens are those after the LayerNorm, with
    `R = sqrt(d) max|g| + |b|`.
    """

    @classmethod
    def make(
        cls, graph: Graph, region: Region, known: Mapping[int, Span] | None = None
    ) -> PaperWalk:
        """The same for every region."""
        graph = graph.to(HOST)
        return cls(
            graph, everywhere(graph, Region.make(None, graph.inputs)), find(graph, outer=True)
        )

    def _either(self, steps: float, module: float) -> float:
        return module

    def _linear(self, i: int) -> Iterator[tuple[int, float]]:
        return iter([next(super()._linear(i))])

    def _slope(self, i: int) -> float:
        node = self.graph.nodes[i]
        if isinstance(node.curve, Normalise):
            return -0.5 * math.log(node.curve.eps) if node.curve.eps > 0 else math.inf
        return (
            _log(steepest_slope(node.activation))
            if node.activation is not None
            else super()._slope(i)
        )

    def _attention_bound(self, attention: Attention) -> float:
        reach = radius(self.graph, attention.source)
        return math.fsum(
            float(spectral(w)) * castin(attention.tokens, a, v, reach, u)
            for w, a, v, u in zip(attention.out, attention.a, attention.value, attention.bias)
        )


def _nearest(low: Tensor, high: Tensor) -> Tensor:
    """The least magnitude between low and high."""
    return torch.where(low > 0, low, torch.where(high < 0, -high, 0.0))


def _matrix(node: Node) -> Tensor | None:
    """The matrix of a node that acts on the last axis; None for another."""
    if isinstance(node.map, Matrix):
        return node.map.weight
    if (
        isinstance(node.map, Scale)
        and math.prod(node.map.factor.shape[:-1]) == 1
        and node.shape[-1] <= WIDEST
    ):
        return torch.diag(node.map.factor.flatten().expand(node.shape[-1]))
    return None


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _times(a: float, b: float) -> float:
    """The logarithm of a product; 0 times infinity is 0: what does not depend on the input has
    no derivative.
    """
    return -math.inf if -math.inf in (a, b) else a + b


def _added(logs: Sequence[float]) -> float:
    """`log(exp(a) + exp(b) + ...)`."""
    top = max(logs)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(t - top) for t in logs))


def modules(graph: Graph, region: Region, known: Mapping[int, Span] | None = None) -> float:
    """An upper bound on `||J||_{2 -> 2}` of the logits over a region, by the constants of the
    modules; inf if it overflows.

    known: what `jacobian.ranges` found there, if it has been called already.
    """
    found = Walk.make(graph, region, known).stretch(0, len(graph.nodes) - 1)
    return math.exp(found) * (1 + 1e-12) if found < 709 else math.inf


# The corollary.


class Row(NamedTuple):
    """One module: block 0 for embedding and head, else the number of the block; constants on R^n,
    and on the domain.

    Ours have gain and bias of a LayerNorm as a part of the module after it.
    """

    block: int
    kind: str
    place: str
    paper: float
    ours: float
    local: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Corollary(Record):
    """The paper's bound for transformers with its constants, ours beside it, and the steepest point
    that was found.

    norm: r; domain: where `local` and `empirical` are taken; style: "pre-LN", "post-LN", "mixed" or
    "no LayerNorm"; inputs, outputs: n and K; rows: the modules; paper, ours, local: log10 of
    Lambda, a bound on `sup ||J||_{2 -> 2}`, with the paper's constants and ours on R^n, and with
    ours on the domain or by a walk over all of it (None if that is R^n); empirical: `||J||_{2 ->
    2}` at the steepest point found, which is the witness `(n,)`, and slope: the same for `2^(1/r)
    ||J||_{r -> s}`, lower bounds both.
    """

    norm: float
    domain: str
    style: str
    inputs: int
    outputs: int
    rows: tuple[Row, ...]
    paper: float
    ours: float
    local: float | None
    empirical: float
    slope: float
    witness: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(Row(*row) for row in self.rows))

    @property
    def conversion(self) -> float:
        """What takes Lambda to the paper's L for the norm r: `2^(1/r) (n K)^((1/2 - 1/r)_+)`."""
        return float(
            2 ** (1 / self.norm) * (self.inputs * self.outputs) ** max(0.0, 0.5 - 1 / self.norm)
        )

    @property
    def best(self) -> float:
        """log10 of the least of the bounds that hold on the domain."""
        return self.ours if self.local is None else min(self.ours, self.local)

    @property
    def decades(self) -> float:
        """log10 of `looseness`."""
        return self.best - math.log10(self.empirical) if self.empirical > 0 else math.inf

    @property
    def looseness(self) -> float:
        """That bound over the steepest slope found, both Euclidean; inf above every float64."""
        return 10**self.decades if self.decades < 308 else math.inf

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing: a million times what was found or more, or above
        every number of float32.
        """
        return self.decades >= HOPELESS or self.best >= FLOAT32

    @property
    def covered(self) -> bool:
        """Whether the corollary is about networks like this: Pre-LN only."""
        return self.style == "pre-LN"

    def __str__(self) -> str:
        domain = "" if self.local is None else f"{'on the domain':>15}"
        lines = [f"{'block':>5}  {'module':<13}{'paper':>11}{'ours':>11}{domain}"]
        for row in self.rows:
            local = "" if row.local is None else f"{row.local:>15.4g}"
            lines.append(
                f"{row.block or '':>5}  {row.kind:<13}{row.paper:>11.4g}{row.ours:>11.4g}{local} "
                f" {row.place}"
            )
        sides = [
            ("paper", self.paper),
            ("ours", self.ours),
            *([] if self.local is None else [("on the domain", self.local)]),
        ]
        lines.append("Lambda: " + ", ".join(f"{name} {_power(value)}" for name, value in sides))
        far = _power(self.decades)
        lines.append(
            f"steepest point found on {self.domain}: {self.empirical:.4g}, {far} times below the "
            "best of these"
        )
        extra = math.log10(self.conversion)
        lines.append(
            f"slope L for r = {show(self.norm)} (times {self.conversion:.4g}): at least "
            f"{self.slope:.4g}, "
            + ", ".join(f"{name} {_power(value + extra)}" for name, value in sides)
        )
        lines += [text for text, holds in self._remarks() if holds]
        return "\n".join(lines)

    def _remarks(self) -> list[tuple[str, bool]]:
        normed = any(row.kind == "LayerNorm" for row in self.rows)
        return [
            ("Ours have gain and bias of a LayerNorm as a part of the module after it.", normed),
            (
                "The bound is vacuous: a million times what was found, or above every number of "
                "float32.",
                self.vacuous,
            ),
            (
                f"The corollary is for Pre-LN, this network is {self.style}: a like product is "
                "shown.",
                not self.covered,
            ),
            (
                "Attention without a normalisation before it is not Lipschitz on R^n: bounds "
                "hold on boxes and balls only.",
                math.isinf(self.ours),
            ),
        ]


def _power(log: float) -> str:
    return "inf" if math.isinf(log) else f"{10**log:.4g}" if -4 < log < 6 else f"10^{log:.2f}"


class _Module(NamedTuple):
    """From where to where a constant is taken, in our walk and in the paper's; branch: of which
    residual sum, 0 for none.
    """

    branch: int
    block: int
    kind: str
    ours: tuple[int, int]
    paper: tuple[int, int]


def corollary(
    model: Model | Graph,
    norm: Number = 2,
    domain: Where = None,
    shape: Sequence[int] | None = None,
    seed: int = 0,
) -> Corollary:
    """`Lambda` of the paper's corollary, module by module, with its constants and with ours, beside
    what an ascent finds.

    domain: a box, a `Ball`, or None for R^n: where the local constants hold and the ascent
    searches; shape: of one sample.
    """
    from wassail.certificates.lipschitz import as_graph

    graph = as_graph(model, domain, shape)
    r = parse_norm(norm)
    region, whole = (Region.make(where, graph.inputs, graph.device) for where in (domain, None))
    walks: list[Walk] = [PaperWalk.make(graph, whole), Walk.make(graph, whole)]
    if region.low.isfinite().any() or region.high.isfinite().any() or region.bounded:
        walks.append(Walk.make(graph, region))
    style, parts = _modules(graph)
    logs = [
        [walk.stretch(*(part.paper if k == 0 else part.ours)) for part in parts]
        for k, walk in enumerate(walks)
    ]
    totals = [_lambda(parts, values) / math.log(10) + UP for values in logs]
    rows = tuple(
        Row(
            part.block,
            part.kind,
            graph.nodes[part.ours[1]].place,
            *map(_exp, values),
            *[None] * (3 - len(walks)),
        )
        for part, values in zip(parts, zip(*logs))
    )
    empirical, witness = _climb(graph, region, 2, seed)
    slope = 2 ** (1 / r) * (empirical if r == 2 else _climb(graph, region, r, seed)[0])
    local = (
        min(totals[2], walks[2].stretch(0, len(graph.nodes) - 1) / math.log(10) + UP)
        if len(walks) > 2
        else None
    )
    return Corollary(
        r,
        str(region),
        style,
        graph.inputs,
        graph.outputs,
        rows,
        totals[0],
        totals[1],
        local,
        empirical,
        slope,
        witness.cpu(),
    )


def _exp(log: float) -> float:
    return math.exp(log) if log < 709 else math.inf


def _lambda(parts: Sequence[_Module], logs: Sequence[float]) -> float:
    """`L_head L_emb prod_h (1 + ...)`, as a logarithm: modules outside of branches multiply, a
    branch is 1 plus its product.
    """
    branches: dict[int, float] = {}
    total = 0.0
    for part, value in zip(parts, logs):
        if part.branch:
            branches[part.branch] = _times(branches.get(part.branch, 0.0), value)
        else:
            total = _times(total, value)
    return _times(total, math.fsum(_added([0.0, value]) for value in branches.values()))


def _modules(graph: Graph) -> tuple[str, list[_Module]]:
    """The style of the network, and its modules in order: residual blocks, what is before,
    between and after them.
    """
    found: list[_Module] = []
    styles: set[str] = set()
    last = len(graph.nodes) - 1
    at = 0
    count = 0
    block = 0
    for start, end in pairwise([0, *_cuts(graph, 0, last)]):
        branch = _branch(graph, start, end)
        if branch is None:
            continue
        if start > at or not count:
            normed = any(isinstance(graph.nodes[i].curve, Normalise) for i in range(at, start))
            kind = "embedding" if not count else "LayerNorm" if normed else "between"
            found.append(_Module(0, block, kind, (at, start), (at, start)))
        norm = _norm_of(graph, start, branch)
        styles.add("post-LN" if norm is None else "pre-LN")
        attention = any(isinstance(graph.nodes[i].curve, Softmax) for i in range(start, end))
        count = count + 1
        block = block + (attention or not block)
        inner, outer = (start, start) if norm is None else norm
        if norm is not None:
            found.append(_Module(count, block, "LayerNorm", (start, inner), (start, outer)))
        found.append(
            _Module(
                count,
                block,
                "attention" if attention else "feed-forward",
                (inner, branch),
                (outer, branch),
            )
        )
        at = end
    found.append(_Module(0, 0, "head" if count else "network", (at, last), (at, last)))
    if not any(isinstance(node.curve, Normalise) for node in graph.nodes):
        return "no LayerNorm", found
    return styles.pop() if len(styles) == 1 else "mixed", found


def _cuts(graph: Graph, source: int, target: int) -> list[int]:
    """The nodes after source that every path from source to target goes through, target among
    them.
    """
    reached = {source}
    for i in range(source + 1, target + 1):
        if not _constant(graph.nodes[i]) and any(j in reached for j in graph.nodes[i].inputs):
            reached.add(i)
    needed = {target}
    for i in range(target, source, -1):
        if i in needed and i in reached:
            needed |= set(graph.nodes[i].inputs) & reached
    edges = [(j, i) for i in needed if i > source for j in graph.nodes[i].inputs if j in needed]
    return [c for c in sorted(needed) if c > source and not any(j < c < i for j, i in edges)]


def _constant(node: Node) -> bool:
    """Whether it is a bias alone, such as a class token."""
    return (
        isinstance(node.map, Pick)
        and node.map.source is not None
        and bool((node.map.source < 0).all())
    )


def _branch(graph: Graph, start: int, end: int) -> int | None:
    """The end of the branch of a residual block `start + branch(start)`; None for another step."""
    node = graph.nodes[end]
    if (
        not isinstance(node.map, Sum)
        or len(node.inputs) != 2
        or start not in node.inputs
        or node.inputs[0] == node.inputs[1]
    ):
        return None
    return node.inputs[1] if node.inputs[0] == start else node.inputs[0]


def _norm_of(graph: Graph, start: int, branch: int) -> tuple[int, int] | None:
    """The `Normalise` that a branch begins with, and the node of its gain and bias; None if it
    begins with something else.
    """
    stops = _cuts(graph, start, branch)
    for k, i in enumerate(stops):
        if isinstance(graph.nodes[i].curve, Normalise):
            after = stops[k + 1] if k + 1 < len(stops) else i
            return i, after if _normalised(graph, after) else i
        if graph.nodes[i].map is None:
            break
    return None


def _climb(graph: Graph, region: Region, r: float, seed: int) -> tuple[float, Tensor]:
    """The largest `||J||_{r -> s}` that ascents from random points find, and where; of several
    sizes if there is no end.
    """
    from wassail.certificates.lipschitz import ascend, jacobian_norms, jacobians

    generator = torch.Generator().manual_seed(seed)
    best = -1.0
    witness = region.centre
    for spread in (1.0,) if region.bounded else (0.1, 1.0, 10.0):
        x = torch.cat(
            [region.sample(STARTS, generator, spread), region.inside(_flattest(graph, region))]
        )
        for _ in range(ROUNDS):  # the steepest combination of logits is chosen anew in each
            x = ascend(graph, region, x, r, dual(r), None if region.bounded else spread)
            values = jacobian_norms(jacobians(graph, x), r, dual(r))
            top = int(values.argmax())
            if float(values[top]) > best:
                best = float(values[top])
                witness = x[top]
    return best * (1 - 1e-12), witness


def _flattest(graph: Graph, region: Region) -> Tensor:
    """`(1, n)`: where the first normalised tokens vary least, by least squares, since LayerNorm is
    steepest there.

    The centre of the region if these tokens are no affine function of the input, or if there are
    too many.
    """
    first = next((node.inputs[0] for node in graph.nodes if isinstance(node.curve, Normalise)), 0)
    before = Graph(graph.nodes[: first + 1])
    if (
        before.smooth
        or any(node.slope is not None for node in before.nodes)
        or before.inputs * before.outputs > ROOM
    ):
        return region.centre[None]
    shape = graph.nodes[0].shape
    n = graph.inputs
    start = before.logits(region.centre.reshape(1, *shape)).flatten()
    moves = (
        before.logits(
            (region.centre + torch.eye(n, dtype=torch.float64, device=start.device)).reshape(
                n, *shape
            )
        ).flatten(1)
        - start
    )
    # On the CPU, which has the solver for matrices without full rank.
    least: Tensor = torch.linalg.lstsq(moves.T.to(HOST), -start[:, None].to(HOST)).solution.T
    return region.centre + least.to(start.device)
