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

`gradients` is for networks without curves. `g = W^T (d g')` with `d` between the slopes of the
neuron, and `d g'` lies between two lines in `g'`, as a neuron that changes sides does in its input
(RecurJac; Shi et al. 2022). So a bound on a gradient is substituted FORWARD through the network
until it meets the head, as a bound on a value is substituted backward until it meets the input. A
smooth activation is a neuron like any other: its derivative lies in a range. The rounding error of
a chain of sums is at most `ranges.gamma` times the same chain with absolute values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Scale, Sum, magnitude_map, rounding_map
from wassail.certificates.graph.matrix_norms import FEW_SIGNS, positive_norms
from wassail.certificates.graph.tangent import Tangent
from wassail.certificates.relax.backward import Walk
from wassail.certificates.relax.ranges import Bounds, Span, gamma
from wassail.geometry import operator_norm
from wassail.rounding import FAINT, UNIT, length, sized

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


_Sized: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # low, high, and what is rounded
ROWS = 2**24  # numbers in one tensor of a pass: rows are handled in parts of about this size


@dataclass(frozen=True, eq=False)
class Gradients:
    """Bounds on the gradients of `<head row, theta>` with respect to every neuron's output and to
    the input.

    rows `(m, K)`; spans: for each ReLU or activation node and the input (0), its span `(m,
    *shape)`; sizes: the same with absolute weights, what rounding errors are relative to.
    """

    bounds: Bounds
    rows: Tensor
    spans: dict[int, Span]
    sizes: dict[int, Tensor]

    def entries(self, tighten: bool = True) -> Span:
        """Bounds on every partial derivative, `(m, n)` each; tighten: substitute each of them
        through the network.
        """
        low, high = (_by_row(side) for side in self.spans[0])
        if tighten and self.bounds.open:
            better = _tightened(self, 0, torch.ones_like(low[0], dtype=torch.bool))
            low, high = (_by_row(side) for side in better)
        return low, high

    def norm(self, s: float, entries: Span) -> Tensor:
        """Upper bounds on `||gradient||_s`, `(m,)`: by the entries and, for s = 1 and 2, by one
        substitution of the whole sum.

        `|g|` and `g^2` are convex, so on a span they lie below their chords, and a sum of chords is
        linear in the gradient.
        """
        low, high = entries
        most = torch.maximum(low.abs(), high.abs())
        best = length(most, s, 1) * (1 + (most.shape[1] + 4) * UNIT)
        if s == math.inf or not self.bounds.open:
            return best
        width = torch.where(high > low, high - low, 1.0)
        if s == 1:
            slope = torch.where(high > low, (high.abs() - low.abs()) / width, low.sign()).clamp(
                -1, 1
            )
            shift = torch.maximum(high.abs() - slope * high, low.abs() - slope * low)
        else:
            slope = low + high
            shift = -low * high
        size = _by_row(self.sizes[0])
        scale = (slope.abs() * size).sum(1) + shift.abs().sum(1)
        chord = (
            self._substitute(0, slope[:, None, :])[:, 0] + shift.sum(1)
        ) + self._error() * scale
        # The root is one of the roundings that gamma counts beyond the sums, and `scale` is at
        # least the square of the norm.
        return torch.minimum(best, chord if s == 1 else chord.clamp(min=0).sqrt())

    def _error(self) -> float:
        return gamma(self.bounds.graph) * (len(self.bounds.spans) + 2)

    def _substitute(self, start: int, directions: Tensor, shared: bool = False) -> Tensor:
        """Upper bounds on `<t, gradient at node start>`: `(m, p, size) -> (m, p)`, before rounding.

        Forward from `start`: at a neuron, `t d g` lies below `t` times a line in `g`, the upper one
        where `t > 0`. shared: the same directions `(1, p, size)` for all rows, and their negatives
        after them, `(m, 2 p)`; until the first neuron they go through the network once.
        """
        graph = self.bounds.graph
        m = len(self.rows)
        p = directions.shape[1]
        value: dict[int, Tensor] = {start: directions.reshape(-1, *graph.nodes[start].shape)}
        constant: Tensor | float = 0.0
        last = len(graph.nodes) - 1
        uses = {
            j: i for i, node in enumerate(graph.nodes) for j in node.inputs
        }  # the last user wins
        for i in range(start + 1, last + 1):
            clock.look()
            node = graph.nodes[i]
            if not any(j in value for j in node.inputs):
                continue
            if node.map is None:
                if i not in self.spans:  # it leads nowhere
                    continue
                if shared:
                    value = {j: _fan(v, m) for j, v in value.items()}
                    p = 2 * p
                    shared = False
                value[i], shift = self._relaxed(i, value[node.inputs[0]], p)
                constant = constant + shift
            else:
                size = len(next(iter(value.values())))
                given = [
                    value[j] if j in value else directions.new_zeros(size, *graph.nodes[j].shape)
                    for j in node.inputs
                ]
                value[i] = node.map.forward(*given)
            for j in node.inputs:
                if uses[j] == i:  # not needed any more
                    value.pop(j, None)
        if shared:
            value = {j: _fan(v, m) for j, v in value.items()}
            p = 2 * p
        total = constant + (directions.new_zeros(m * p) if last not in value else 0.0)
        if last in value:
            total = (
                total + (value[last].reshape(m, p, -1) * self.rows[:, None, :]).sum(-1).flatten()
            )
        return torch.as_tensor(total).reshape(m, p)

    def _relaxed(self, i: int, t: Tensor, p: int) -> tuple[Tensor, Tensor]:
        """The step through the neurons of node i: new coefficients, and what is added to the
        constant.
        """
        (up, up_shift), (down, down_shift) = _gradient_lines(
            self.spans[i], self.bounds.derivative(i)
        )
        t = t.reshape(-1, p, *t.shape[1:])
        plus = t.clamp(min=0)
        minus = t - plus
        shift = (
            (plus * up_shift[:, None] + minus * down_shift[:, None])
            .reshape(*t.shape[:2], -1)
            .sum(2)
        )
        return (plus * up[:, None] + minus * down[:, None]).flatten(0, 1), shift.flatten()


def gradients(bounds: Bounds, rows: Tensor, tighten: bool = True) -> Gradients:
    """Bounds on the gradients of the logit combinations `rows` `(m, K)` over the region of
    `bounds`.

    One pass from the head to the input in interval arithmetic; with `tighten` every undecided
    neuron's gradient is substituted forward to the head before it is used.
    """
    graph = bounds.graph
    rows = rows.to(graph.device).double()
    last = len(graph.nodes) - 1
    found = Gradients(bounds, rows, {}, {})
    slack = gamma(graph)
    walk = Walk(graph, {last: (rows, rows, rows.abs())}, _added)
    for i, node, (low, high, most) in walk.nodes(last):
        if node.map is not None:
            parts = zip(
                node.map.transpose((low + high) / 2),
                magnitude_map(node.map).transpose((high - low) / 2),
                rounding_map(node.map).transpose(most),
            )
            walk.give(node, (_around(*part, slack) for part in parts))
            continue
        found.spans[i] = (low, high)
        found.sizes[i] = most
        open_ = bounds.unstable(i)
        if tighten and open_.any() and not torch.equal(low, high):
            low, high = found.spans[i] = _tightened(found, i, open_.flatten())
        least, top = bounds.derivative(i)
        corners = torch.stack([low * least, low * top, high * least, high * top])
        # Lines through a range of slopes are shifted by up to its width.
        steep = torch.maximum(torch.maximum(least.abs(), top.abs()), top - least)
        walk.give(node, ((corners.amin(0), corners.amax(0), sized(most) * sized(steep)),))
    low, high, most = walk.weight[0]
    found.spans[0] = (low, high)
    found.sizes[0] = most
    return found


def _around(centre: Tensor, reach: Tensor, much: Tensor, slack: float) -> _Sized:
    """A range, and the size that its rounding errors are relative to."""
    error = slack * much
    return centre - reach - error, centre + reach + error, much


def _added(a: _Sized, b: _Sized) -> _Sized:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _tightened(found: Gradients, i: int, wanted: Tensor) -> Span:
    """The span of the gradient at node i, its wanted entries (bool `(size,)`) bounded by
    substitution as well.
    """
    shape = found.spans[i][0].shape
    low, high = (_by_row(side).clone() for side in found.spans[i])
    size = _by_row(found.sizes[i])
    graph = found.bounds.graph
    undecided = wanted & (low < high).any(0)
    where = undecided.nonzero().flatten()
    widest = max(n.size for n in graph.nodes[i:])
    part = max(1, ROWS // (2 * widest * len(low)))
    for k in range(0, len(where), part):
        clock.check()
        some = where[k : k + part]
        clock.spend(4 * len(low) * len(some) * graph.operations)
        unit = low.new_zeros(1, len(some), low.shape[1]).scatter(2, some[None, :, None], 1.0)
        top, bottom = torch.split(found._substitute(i, unit, shared=True), len(some), 1)
        slack = found._error() * size[:, some]
        high[:, some] = torch.minimum(high[:, some], top + slack)
        low[:, some] = torch.maximum(low[:, some], -bottom - slack)
    return low.reshape(shape), high.reshape(shape)


def _gradient_lines(span: Span, derivative: Span) -> tuple[Span, Span]:
    """The lines above and below `d g` for `d` in a range and `g` on a span, each as (factor,
    shift).
    """
    low, high = span
    least, top = derivative
    crossing = (low < 0) & (high > 0) & (least < top)
    width = torch.where(crossing, high - low, 1.0)
    above = torch.where(low >= 0, top, least)  # max(g least, g top) where the sign of g is known
    below = torch.where(low >= 0, least, top)
    up = torch.where(crossing, (top * high - least * low) / width, above)
    up_shift = torch.where(crossing, torch.maximum((least - up) * low, (top - up) * high), 0.0)
    down = torch.where(crossing, (least * high - top * low) / width, below)
    down_shift = torch.where(
        crossing, torch.minimum((top - down) * low, (least - down) * high), 0.0
    )
    return (up, up_shift), (down, down_shift)


def _fan(values: Tensor, m: int) -> Tensor:
    """Directions `(p, ...)` and their negatives for each of m rows: `(m 2 p, ...)`."""
    return torch.cat([values, -values]).expand(m, *[-1] * (values.ndim)).flatten(0, 1)


def _by_row(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)  # unlike flatten(1) also for single numbers
