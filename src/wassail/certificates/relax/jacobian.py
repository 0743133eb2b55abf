"""Bounds on the Jacobian of a network with smooth parts over a region.

Values go forward (`ranges`). Gradients go backward: `adjoint` multiplies the gradient of the head
by the derivative of one node after the other in interval arithmetic, `J^T w = W_1^T D_1 W_2^T D_2
... w` with every `D` anywhere in its range. On a point it is the Jacobian itself up to rounding,
and on a box its width shrinks like the box (`pieces` makes use of it). Every step is an enclosure
of the exact image of the enclosure before it: a sum of n terms is off by at most `(n + 4) 2^-52`
times the sum of their magnitudes, and that is added to every side.

`centred` has the same as its value in the middle and a first-order error: tight where intervals are
not. Every node's derivative is a fixed linear map M and a remainder, `J_i(x)^T g = M_i^T g + r_i`.
So the gradient of the output at the input is that of the linear network of the M's, and each
remainder comes to it through the maps before its node:

    g(x) = M_1^T ... M_L^T w + sum_i T_i^T r_i,      T_i = M_{i-1} ... M_1,      |r_i| <= e_i,

which is a product of the maps themselves, and not of their absolute values as in interval
arithmetic: for a transformer the difference is a factor of many thousands. `e_i` is the width of
the derivative times the size of the gradient there, whose own error is of first order too and is
bounded by absolute values. (The same telescoping gives RecurJac's bounds, Zhang, Zhang & Hsieh
2019; here the maps are those of the middle, shared by all outputs, so that one pass of tangents
serves all.) A computed gradient differs from `M^T g` by a remainder as well, at most `c |M|^T |g|`
with c the number of terms times 2^-52, and the error of a computed tangent meets that of the
gradient, `c <|T|, |M|^T |error|>`: both belong to `e_i`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Scale, Sum
from wassail.certificates.graph.matrix_norms import FEW_SIGNS, positive_norms
from wassail.certificates.graph.tangent import Tangent
from wassail.certificates.relax.backward import Walk
from wassail.certificates.relax.ranges import Bounds, Span
from wassail.geometry import operator_norm
from wassail.rounding import FAINT, UNIT

NUMBERS = 2**24  # in one tensor of a pass
BOXED = 2**22  # the same over many boxes


@dataclass(frozen=True, eq=False)
class _Gradient:
    """What is known of a gradient at one node, `(N, m, *shape)` each: that of the linear network,
    the error of it that comes from the nodes above, and the part of the error that arises here.
    """

    value: Tensor
    error: Tensor
    rest: Tensor

    def plus(self, other: _Gradient) -> _Gradient:
        return _Gradient(self.value + other.value, self.error + other.error, self.rest + other.rest)


def head_rows(graph: Graph, spans: Mapping[int, Span], rows: Tensor) -> Tensor:
    """Combinations of the logits as gradients at the last node, for each of the N regions that
    spans has, `(m, K)` for all or `(N, m, K)`: `(N, m, *shape)`.
    """
    count = len(next(iter(spans.values()))[0]) if spans else 1
    if rows.ndim == 2:
        rows = rows.expand(count, len(rows), -1)
    head = rows.to(graph.device).double()
    return head.reshape(*head.shape[:2], *graph.nodes[-1].shape)


def centred(graph: Graph, spans: Mapping[int, Span], rows: Tensor, tighten: bool = False) -> Span:
    """Bounds on the gradients of the logit combinations `rows` `(m, K)` over N bounded regions,
    `(N, m, n)` each.

    spans: what `ranges.ranges` found, all finite. tighten: bound the error of the gradient at
    every curve and activation by tangents that start there as well, which is a pass for each of
    their entries.
    """
    last = len(graph.nodes) - 1
    head = head_rows(graph, spans, rows)
    none = torch.zeros_like(head)
    rest: dict[int, Tensor] = {}
    maps: dict[int, Tangent] = {}
    walk = Walk(graph, {last: _Gradient(head, none, none)}, _Gradient.plus)
    for i, node, g in walk.nodes(last):
        rest[i] = g.rest
        off = g.error + g.rest
        if tighten and node.map is None and i < last:
            off = torch.minimum(off, _gathered(graph, maps, rest, i).reshape(off.shape))
        given = [] if node.map is not None else [spans[j] for j in node.inputs]
        maps[i] = node.tangent(given, graph.rounding)
        walk.give(node, _through(graph, i, maps[i], g.value, off))
    if 0 not in walk.weight:  # the logits do not depend on the input
        return (head.new_zeros(*head.shape[:2], graph.inputs),) * 2
    start = walk.weight[0]
    rest[0] = start.rest
    centre = _rows(start.value)
    # Each `wide` has 8 units to spare, two of which are for these differences.
    radius = torch.minimum(_rows(start.error + start.rest), _gathered(graph, maps, rest, 0))
    return centre - radius, centre + radius


def _through(graph: Graph, i: int, by: Tangent, value: Tensor, off: Tensor) -> Iterator[_Gradient]:
    """What a gradient at node i, off by at most `off`, is at each of its inputs."""
    users = graph.users
    wide = (by.terms + 8 + len(users[i])) * UNIT
    parts = (by.transpose(value), by.reach(value.abs() + off), by.reach(off), by.spread(value, off))
    for j, part, much, moved, spread in zip(graph.nodes[i].inputs, *parts):
        rest = (wide + len(users[j]) * UNIT) * (much + FAINT) + spread * (1 + wide)
        yield _Gradient(part, moved * (1 + wide), rest)


def _gathered(
    graph: Graph, maps: Mapping[int, Tangent], rest: Mapping[int, Tensor], start: int
) -> Tensor:
    """`sum_i |T_i|^T e_i` with the tangents T that start at a node, `(N, m, size)`."""
    size = graph.nodes[start].size
    most = max(node.size for node in graph.nodes[start:])
    parts = torch.split(
        torch.arange(size, device=graph.device), max(1, NUMBERS // (len(rest[start]) * most))
    )
    return torch.cat([_carried(graph, maps, rest, start, part) for part in parts], 2)


def _carried(
    graph: Graph, maps: Mapping[int, Tangent], rest: Mapping[int, Tensor], start: int, where: Tensor
) -> Tensor:
    """The same for some entries of the node."""
    clock.check()
    clock.spend(2 * len(rest[start]) * len(where) * graph.operations)
    count = len(rest[start])
    k = len(where)
    unit = rest[start].new_zeros(k, graph.nodes[start].size).scatter(1, where[:, None], 1.0)
    tangent = {start: unit.expand(count, -1, -1).reshape(count, k, *graph.nodes[start].shape)}
    last_use = {j: i for i, node in enumerate(graph.nodes) for j in node.inputs}
    radius = _rows(rest[start])[:, :, where]
    for i in sorted(maps):
        clock.look()
        inputs = graph.nodes[i].inputs
        if not any(j in tangent for j in inputs):
            continue
        given = [
            tangent[j] if j in tangent else unit.new_zeros(count, k, *graph.nodes[j].shape)
            for j in inputs
        ]
        t = tangent[i] = maps[i].forward(*given)
        for j in inputs:
            if last_use[j] == i:
                tangent.pop(j, None)
        e = _rows(rest[i])
        if e.device != HOST or e.any():  # a device is not asked: nothing is added then
            radius = radius + e @ _rows(t).abs().mT * (1 + (e.shape[2] + 8 + len(maps)) * UNIT)
    return radius


def _rows(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:2], -1)  # unlike flatten(2) also for single numbers


def adjoint(graph: Graph, spans: Mapping[int, Span], rows: Tensor) -> Span:
    """The gradients of the logit combinations `rows` `(m, K)` over N regions: `(N, m, n)` each,
    rounded outward.

    spans: what `ranges` found. Interval arithmetic from the head to the input; infinite where an
    infinite value is multiplied.
    """
    head = head_rows(graph, spans, rows)
    last = len(graph.nodes) - 1
    walk = Walk(graph, {last: (head, head)}, _sum)
    for _, node, g in walk.nodes(last):
        given = [] if node.map is not None else [spans[j] for j in node.inputs]
        walk.give(node, node.adjoint(g, given, graph.rounding))
    low, high = walk.weight.get(0, (head.new_zeros(*head.shape[:2], graph.inputs),) * 2)
    return low.reshape(*head.shape[:2], -1), high.reshape(*head.shape[:2], -1)


def _sum(a: Span, b: Span) -> Span:
    """The sum of two intervals, rounded outward; a sum of opposite infinities is no bound."""
    low = a[0] + b[0]
    high = a[1] + b[1]
    slack = UNIT * (low.abs() + high.abs())
    return (
        torch.nan_to_num(low - slack, nan=-math.inf, posinf=math.inf, neginf=-math.inf),
        torch.nan_to_num(high + slack, nan=math.inf, posinf=math.inf, neginf=-math.inf),
    )


def entry_norms(low: Tensor, high: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """Upper bounds on `||J||_{r -> s}` of the matrices between two, `(N, m, n) -> (N,)`; infinite
    where an entry is.

    By the largest magnitudes, `|| max(|low|, |high|) ||`, which is exact for s = inf, and by
    `||middle|| + ||radius||`.
    """
    most = torch.maximum(low.abs(), high.abs())
    good = torch.isfinite(most).flatten(1).all(1)
    most = torch.where(good[:, None, None], most, 0.0)
    slack = (
        1 + 1e-12 + 4 * UNIT * (most.shape[1] + most.shape[2])
    )  # sums, and singular values to backward stability
    best = positive_norms(most, norm_in, norm_out) * slack
    _, m, n = most.shape
    hard = norm_in != 1 and not norm_in == norm_out == 2
    if norm_out != math.inf and (
        not hard or (m if norm_out == 1 and (norm_in == 2 or m <= n) else n) <= FEW_SIGNS
    ):
        middle = torch.where(good[:, None, None], (low + high) / 2, 0.0)
        radius = torch.where(good[:, None, None], (high - low) / 2, 0.0) + UNIT * most
        split = operator_norm(middle, norm_in, norm_out) + positive_norms(radius, norm_in, norm_out)
        best = torch.minimum(best, split * slack)
    return torch.where(good, best, math.inf)


def entries(graph: Graph, spans: Mapping[int, Span], tighten: bool = False) -> Span:
    """Every partial derivative over N regions, `(N, K, n)` each: by intervals and, on bounded
    regions, by tangents.
    """
    eye = torch.eye(graph.outputs, dtype=torch.float64, device=graph.device)
    count = len(next(iter(spans.values()))[0]) if spans else 1
    part = max(1, BOXED // (count * max(node.size for node in graph.nodes)))
    found = [adjoint(graph, spans, rows) for rows in torch.split(eye, part)]
    low = torch.cat([low for low, _ in found], 1)
    high = torch.cat([high for _, high in found], 1)
    if all(torch.isfinite(side).all() for span in spans.values() for side in span):
        least, top = centred(graph, spans, eye, tighten)
        low = torch.fmax(low, least)
        high = torch.fmin(high, top)
    return low, high


def secants(bounds: Bounds) -> Bounds:
    """A ReLU network among whose Jacobians are all those of a smooth one: `f' in [a, b]` is `a v +
    (b - a) relu(v)`, free.

    So what knows of a ReLU only that its slope lies in [0, 1], as the semidefinite bound does,
    holds for the smooth network.
    """
    nodes: list[Node] = []
    moved: list[int] = []  # where each node is now
    spans: dict[int, Span] = {}

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    for i, node in enumerate(bounds.graph.nodes):
        inputs = tuple(moved[j] for j in node.inputs)
        if node.activation is None:
            moved.append(add(replace(node, inputs=inputs)))
            if i in bounds.spans:
                spans[moved[i]] = bounds.spans[i]
            continue
        least, top = bounds.derivative(i)
        zero = torch.zeros_like(least)
        one = torch.ones_like(least)
        bend = add(Node(inputs, node.shape, node.place, Relu(zero.new_zeros(()))))
        spans[bend] = -one, one
        width = torch.nextafter(top - least, one * math.inf)
        moved.append(add(Node((bend,), node.shape, node.place, Affine(Scale(width)))))
        if least.any():
            straight = add(Node(inputs, node.shape, node.place, Affine(Scale(least))))
            moved[i] = add(Node((moved[i], straight), node.shape, node.place, Affine(Sum(2))))
    return Bounds(Graph(tuple(nodes), bounds.graph.rounding), bounds.region, spans)
