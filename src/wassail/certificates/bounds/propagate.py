"""Bound propagation through a graph: intervals and linear bounds (CROWN) of piecewise-linear ones,
and bounds on the Jacobian.

Everything here is a sound upper bound in floating point: the rounding error of a chain of sums is
at most `gamma` times the same chain with absolute values (`gamma` = number of terms times 2^-52),
and that is what every bound is moved outward by.

Values go forward, `v = W z + b`, and a neuron that changes sides in the region lies between two
lines (Zhang et al. 2018, CROWN). Gradients go backward, `g = W^T (d g')` with `d` between the
slopes of the neuron, and `d g'` lies between two lines in `g'` in the same way (Zhang, Zhang &
Hsieh 2019, RecurJac; Shi et al. 2022). So a bound on a gradient is substituted FORWARD through the
network until it meets the head, as a bound on a value is substituted backward until it meets the
input. For the gradients a smooth activation is a neuron like any other: its derivative lies in a
range.

Long because the bounds on gradients start from those on values and use the same rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import assert_never

from wassail.certificates import clock
from wassail.certificates.bounds.ascent import Ascent
from wassail.certificates.graph.graph import (
    Affine,
    Curved,
    Graph,
    Input,
    Node,
    Op,
    Relu,
    Smooth,
)
from wassail.certificates.graph.maps import magnitude_map, rounding_map
from wassail.certificates.graph.region import Region
from wassail.rounding import UNIT, length, sized
from wassail.ties import firm, steep_below

Span: TypeAlias = "tuple[Tensor, Tensor]"  # lower and upper side, one shape
ROWS = 2**24  # numbers in one tensor of a pass: rows are handled in parts of about this size


def gamma(graph: Graph) -> float:
    """Relative rounding error of a pass through the whole graph: every term of every sum on the
    way, times 2^-52.
    """
    return graph.rounding + UNIT * (16 + sum(node_terms(node) for node in graph.nodes))


def node_terms(node: Node) -> int:
    """Most terms in one sum of a node, with room for its bias and the products."""
    return node.op.map.terms if isinstance(node.op, Affine) else 4 + len(node.inputs)


def derivative_span(op: Op, span: Span) -> Span:
    """The range of the derivative of a ReLU or an activation where its input has this range, shape
    of the span.

    A ReLU that keeps its side has one value.
    """
    low, high = span
    match op:
        case Smooth():
            return op.function.derivative_range(low, high)
        case Relu(slope):
            least = torch.where((low >= 0) & (high > 0), 1.0, slope)
            return least, torch.where(high <= 0, slope, 1.0)
        case Input() | Affine() | Curved():
            raise AssertionError("not a function of one number")
        case _:
            assert_never(op)


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where every neuron's input lies in a region: for each ReLU or activation node its span,
    of the node's shape.
    """

    graph: Graph
    region: Region
    spans: dict[int, Span]

    def derivative(self, i: int) -> Span:
        """The range of the derivative of the neurons of node i."""
        return derivative_span(self.graph.nodes[i].op, self.spans[i])

    def unstable(self, i: int) -> Tensor:
        """Which neurons of node i have more than one derivative, bool of the node's shape:
        ReLUs that may change sides.
        """
        if isinstance(self.graph.nodes[i].op, Smooth):
            low, high = self.derivative(i)
            return low < high
        low, high = self.spans[i]
        return (low < 0) & (high > 0)

    def states(self) -> dict[int, Tensor]:
        """For each ReLU node 1 where a neuron is always active, 0 where never, -1 where it may
        change sides.
        """
        return {
            i: torch.where(high <= 0, 0, torch.where(low >= 0, 1, -1))
            for i, (low, high) in self.spans.items()
        }

    @property
    def open(self) -> int:
        """How many neurons may change sides."""
        return sum(int(self.unstable(i).sum()) for i in self.spans)

    def _slope(self, i: int) -> Tensor:
        op = self.graph.nodes[i].op
        assert isinstance(op, Relu)
        return op.slope


def intervals(graph: Graph, region: Region) -> Bounds:
    """Interval arithmetic, one pass."""
    graph.refuse_smooth()
    low, high = region.box
    shape = graph.nodes[0].shape
    span: list[Span] = []
    spans: dict[int, Span] = {}
    slack = gamma(graph)
    for i, node in enumerate(graph.nodes):
        clock.check()
        given = [span[j] for j in node.inputs]
        match node.op:
            case Relu(slope):
                spans[i] = (given[0][0][0], given[0][1][0])
                # 0 times -inf is 0 here
                off = [torch.where(slope > 0, slope * s.clamp(max=0), 0.0) for s in given[0]]
                span.append((given[0][0].clamp(min=0) + off[0], given[0][1].clamp(min=0) + off[1]))
            case Affine() if region.bounded:
                span.append(_affine(node.op, given, slack))
            case Affine():  # nothing is bounded on R^n
                unknown = low.new_full((1, *node.shape), math.inf)
                span.append((-unknown, unknown))
            case Input():
                span.append((low.reshape(1, *shape), high.reshape(1, *shape)))
            case Smooth() | Curved():
                raise AssertionError("refused above")
            case _:
                assert_never(node.op)
    return Bounds(graph, region, spans)


def _affine(op: Affine, given: list[Span], slack: float) -> Span:
    """The range of an affine map of boxes; slack: relative rounding error."""
    middle = [(a + b) / 2 for a, b in given]
    radius = [(b - a) / 2 for a, b in given]
    centre = op.map.forward(*middle)
    reach = magnitude_map(op.map).forward(*radius)
    sizes = [torch.maximum(a.abs(), b.abs()) for a, b in given]
    error = slack * rounding_map(op.map).forward(*sizes)
    if op.bias is not None:
        centre = centre + op.bias
        error = error + slack * op.bias_size
    return centre - reach - error, centre + reach + error


def crown(graph: Graph, region: Region, steps: int = 0) -> Bounds:
    """Linear bounds on every neuron that intervals leave undecided, layer by layer, each with those
    before it.

    steps: of an ascent on the slopes of the lower lines, for each bound on its own (alpha-CROWN, Xu
    et al. 2021).
    """
    bounds = intervals(graph, region)
    if not region.bounded:
        return bounds
    size = magnitudes(graph, _farthest(region))
    error = gamma(graph) * (len(bounds.spans) + 2)
    for i in graph.relus:
        source = graph.nodes[i].inputs[0]
        low, high = (side.flatten() for side in bounds.spans[i])
        rows = ((low < 0) & (high > 0)).nonzero().flatten()
        if not len(rows) or source == 0:
            continue
        slack = error * size[source].flatten()[rows]
        unit = low.new_zeros(len(rows), len(low)).scatter(1, rows[:, None], 1.0)
        upper = substitute(bounds, source, unit, steps) + slack
        lower = -substitute(bounds, source, -unit, steps) - slack
        low = low.clone()
        high = high.clone()
        low[rows], high[rows] = torch.maximum(low[rows], lower), torch.minimum(high[rows], upper)
        shape = graph.nodes[i].shape
        bounds = replace(
            bounds, spans={**bounds.spans, i: (low.reshape(shape), high.reshape(shape))}
        )
    return bounds


def linear_upper(bounds: Bounds, node: int, rows: Tensor) -> Tensor:
    """Upper bounds on `<row, value of the node>` over the region, rounded outward: `(m, size)
    -> (m,)`.
    """
    size = magnitudes(bounds.graph, _farthest(bounds.region))[node].reshape(-1)
    error = gamma(bounds.graph) * (len(bounds.spans) + 2)
    return substitute(bounds, node, rows) + error * (rows.abs() @ size)


def substitute(bounds: Bounds, node: int, rows: Tensor, steps: int = 0) -> Tensor:
    """Upper bounds on `<row, value of the node>` over the region, `(m, size) -> (m,)`; the caller
    adds the rounding slack.

    Substituted backward to the input: a positive coefficient takes the neuron's upper line, a
    negative one its lower line.
    """
    graph = bounds.graph
    widest = max(n.size for n in graph.nodes[: node + 1])
    part = max(1, ROWS // widest)
    return torch.cat(
        [_optimised(bounds, node, rows[k : k + part], steps) for k in range(0, len(rows), part)]
    )


def _optimised(bounds: Bounds, last: int, rows: Tensor, steps: int) -> Tensor:
    """The best of `steps` choices of the lower lines: any slope between the neuron's two gives
    a bound, so all of them do.
    """
    clock.check()
    clock.spend((2 + 4 * steps) * len(rows) * bounds.graph.operations)
    alpha: dict[int, Tensor] = {}
    for i in bounds.spans:
        if i < last and bounds.unstable(i).any():
            start = _value_lines(bounds.spans[i], bounds._slope(i))[1][0]
            alpha[i] = start.expand(len(rows), *start.shape).clone()
    best = _substitute(bounds, last, rows)
    ascent = Ascent(list(alpha.values()))
    for step in range(1, steps + 1 if alpha else 1):
        clock.check()
        with torch.enable_grad():
            leaves = {i: a.detach().requires_grad_(True) for i, a in alpha.items()}
            value = _substitute(bounds, last, rows, leaves)
            if not value.requires_grad:  # no undecided neuron feeds this node
                break
            pulls = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
        for i, move in zip(alpha, ascent.moves(pulls)):
            if move is not None:
                least = torch.maximum(alpha[i] - 0.2 * 0.95**step * move, bounds._slope(i))
                alpha[i] = torch.minimum(least, alpha[i].new_ones(()))
        best = torch.minimum(best, _substitute(bounds, last, rows, alpha))
    return best


def _substitute(
    bounds: Bounds, last: int, rows: Tensor, alpha: Mapping[int, Tensor] | None = None
) -> Tensor:
    """alpha: slopes of the lower lines of undecided neurons, `(m, *shape)` for each ReLU node,
    instead of CROWN's choice.
    """
    graph = bounds.graph
    weight: dict[int, Tensor] = {last: rows.reshape(-1, *graph.nodes[last].shape)}
    constant = rows.new_zeros(len(rows), dtype=torch.float64)
    for i in range(last, 0, -1):
        if i not in weight:
            continue
        node = graph.nodes[i]
        w = weight.pop(i)
        match node.op:
            case Relu(slope):
                (up, up_shift), (down, _) = _value_lines(bounds.spans[i], slope)
                if alpha is not None and i in alpha:
                    down = torch.where(bounds.unstable(i), alpha[i], down)
                w = firm(w)
                plus = w.clamp(min=0)
                constant = constant + _rows(plus * up_shift).sum(1)
                _accumulate(weight, node.inputs[0], plus * up + (w - plus) * down)
            case Affine(map_, bias):
                if bias is not None:
                    constant = constant + _rows(w * bias).sum(1)
                for j, part in zip(node.inputs, map_.transpose(w)):
                    _accumulate(weight, j, part)
            case Input() | Smooth() | Curved():
                raise AssertionError("bounds are of piecewise-linear networks")
            case _:
                assert_never(node.op)
    if 0 not in weight:
        return constant
    return constant + bounds.region.upper(firm(_rows(weight[0])), cut=not weight[0].requires_grad)


def _value_lines(span: Span, slope: Tensor) -> tuple[Span, Span]:
    """The lines above and below `max(v, slope v)` on a span, each as (factor, shift); the lower
    one passes through 0.
    """
    low, high = span
    crossing = (low < 0) & (high > 0)
    width = torch.where(crossing, high - low, 1.0)
    up = torch.where(
        crossing, (high - slope * low) / width, torch.where((low >= 0) & (high > 0), 1.0, slope)
    )
    shift = torch.where(crossing, (slope * low - up * low).clamp(min=0), 0.0)
    down = torch.where(crossing, torch.where(steep_below(low, high), 1.0, slope), up)
    return (up, shift), (down, torch.zeros_like(down))


def magnitudes(graph: Graph, x: Tensor) -> list[Tensor]:
    """Every node at inputs `(m, ...)` with absolute weights, biases and inputs: what rounding
    errors are relative to.
    """
    found: list[Tensor] = []
    for node in graph.nodes:
        given = [found[j] for j in node.inputs]
        match node.op:
            case Relu():
                found.append(given[0])
            case Affine(map_):
                found.append(rounding_map(map_).forward(*given) + node.op.bias_size)
            case Input():
                found.append(x.double().abs().reshape(-1, *node.shape))
            case Smooth() | Curved():
                raise AssertionError("only for piecewise-linear networks")
            case _:
                assert_never(node.op)
    return found


def _farthest(region: Region) -> Tensor:
    low, high = region.box
    return torch.maximum(low.abs(), high.abs())


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
        low, high = (_rows(side) for side in self.spans[0])
        if tighten and self.bounds.open:
            better = _tightened(self, 0, torch.ones_like(low[0], dtype=torch.bool))
            low, high = (_rows(side) for side in better)
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
        size = _rows(self.sizes[0])
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

        Long because directions are shared until the first neuron, and values are dropped after
        their last use.

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
            node = graph.nodes[i]
            if not any(j in value for j in node.inputs):
                continue
            if not isinstance(node.op, Affine):
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
                value[i] = node.op.map.forward(*given)
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
    span: dict[int, Span] = {len(graph.nodes) - 1: (rows, rows)}
    size: dict[int, Tensor] = {len(graph.nodes) - 1: rows.abs()}
    found = Gradients(bounds, rows, {}, {})
    slack = gamma(graph)
    for i in range(len(graph.nodes) - 1, 0, -1):
        if i not in span:
            continue
        node, (low, high), most = graph.nodes[i], span.pop(i), size.pop(i)
        if not isinstance(node.op, Affine):
            found = replace(
                found, spans={**found.spans, i: (low, high)}, sizes={**found.sizes, i: most}
            )
            open_ = bounds.unstable(i)
            if tighten and open_.any() and not torch.equal(low, high):
                low, high = _tightened(found, i, open_.flatten())
                found = replace(found, spans={**found.spans, i: (low, high)})
            least, top = bounds.derivative(i)
            corners = torch.stack([low * least, low * top, high * least, high * top])
            # Lines through a range of slopes are shifted by up to its width.
            steep = torch.maximum(torch.maximum(least.abs(), top.abs()), top - least)
            _merge(
                span,
                size,
                node.inputs[0],
                (corners.amin(0), corners.amax(0)),
                sized(most) * sized(steep),
            )
            continue
        map_ = node.op.map
        absolute = magnitude_map(map_)
        for j, centre, reach, much in zip(
            node.inputs,
            map_.transpose((low + high) / 2),
            absolute.transpose((high - low) / 2),
            rounding_map(map_).transpose(most),
        ):
            error = slack * much
            _merge(span, size, j, (centre - reach - error, centre + reach + error), much)
    return replace(found, spans={**found.spans, 0: span[0]}, sizes={**found.sizes, 0: size[0]})


def _tightened(found: Gradients, i: int, wanted: Tensor) -> Span:
    """The span of the gradient at node i, its wanted entries (bool `(size,)`) bounded by
    substitution as well.
    """
    shape = found.spans[i][0].shape
    low, high = (_rows(side).clone() for side in found.spans[i])
    size = _rows(found.sizes[i])
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


def _rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)  # unlike flatten(1) also for single numbers


def _accumulate(store: dict[int, Tensor], key: int, value: Tensor) -> None:
    store[key] = store[key] + value if key in store else value


def _merge(
    span: dict[int, Span], size: dict[int, Tensor], key: int, sides: Span, much: Tensor
) -> None:
    if key in span:
        sides = (span[key][0] + sides[0], span[key][1] + sides[1])
        much = size[key] + much
    span[key], size[key] = sides, much
