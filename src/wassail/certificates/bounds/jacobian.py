"""Bounds on the Jacobian of a network with smooth parts over a region.

Values go forward: `ranges` encloses every node by linear bounds (`linear.Sweep`) on bounded regions
and by intervals with infinite sides elsewhere. Gradients go backward: `adjoint` multiplies the
gradient of the head by the derivative of one node after the other in interval arithmetic, `J^T w =
W_1^T D_1 W_2^T D_2 ... w` with every `D` anywhere in its range. On a point it is the Jacobian
itself up to rounding, and on a box its width shrinks like the box (`pieces` makes use of it).
`tangents` has the same with first-order errors that go through the maps themselves instead of their
absolute values.

Rounding: every step is an enclosure of the exact image of the enclosure before it. A sum of n terms
is off by at most `(n + 4) 2^-52` times the sum of their magnitudes, and that is added to every
side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import assert_never

from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep
from wassail.certificates.bounds.propagate import Bounds, Span, derivative_span
from wassail.certificates.bounds.tangents import centred
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Node, Relu, Smooth
from wassail.certificates.graph.maps import Linear, Scale, Sum, rounding_map
from wassail.certificates.graph.matrix_norms import FEW_SIGNS, positive_norms
from wassail.certificates.graph.region import Region
from wassail.geometry import operator_norm
from wassail.rounding import FLOOR, UNIT, finite_size, outward

NUMBERS = 2**22  # in one tensor of a pass over many boxes


def one_region(region: Region) -> Balls:
    """A region as the only one of its kind; sides may be infinite. The room around its centre
    is rounded up.
    """
    x = region.centre[None]
    sides = [torch.where(side > 0, _up(side), 0.0) for side in (x - region.low, region.high - x)]
    if region.radius < math.inf:
        return Balls(x, x.new_tensor([region.radius]), region.norm, *sides)
    return boxed(x, *sides)


def boxed(x: Tensor, below: Tensor, above: Tensor) -> Balls:
    """The boxes `[x - below, x + above]`, `(N, n)` each; sides may be infinite."""
    return Balls(x, torch.maximum(below, above).amax(1), math.inf, below, above)


def ranges(graph: Graph, balls: Balls) -> dict[int, Span]:
    """Where the values of the nodes lie that a ReLU, an activation or a curve reads: `(N, *shape)`
    for each, rounded outward.

    By linear bounds where a region is bounded, by intervals with infinite sides where it is not.
    """
    low, high = balls.box
    if torch.isfinite(low).all() and torch.isfinite(high).all():
        return _swept(graph, balls)
    low = balls.x + low
    high = balls.x + high
    return _intervals(graph, outward(low, high, 2))


def _swept(graph: Graph, balls: Balls) -> dict[int, Span]:
    sweep = Sweep(graph, balls).run()
    found = {}
    for j in graph.read_by_others:
        c, (low, high) = sweep.centre[j], sweep.spans[j]
        slack = 2 * UNIT * (c.abs() + torch.maximum(-low, high))
        found[j] = c + low - slack, c + high + slack
    return found


@dataclass(frozen=True, eq=False)
class Rays:
    """N sets `{x = origin + t u : t >= start, u in a box}` that reach to infinity, cut by walls;
    flat, float64.

    origin, low, high `(n,)`: the walls; start `(N,)`; u: the box of directions, `(N, n)` each.
    """

    origin: Tensor
    low: Tensor
    high: Tensor
    start: Tensor
    u: Span

    def scaled(self) -> tuple[Span, Span]:
        """The range of `x` with its infinite sides, and that of `x / t`, `(N, n)` each, rounded
        outward.
        """
        (least, top), t = self.u, self.start[:, None]
        low = torch.where(least >= 0, self.origin + least * t, -math.inf)
        high = torch.where(top <= 0, self.origin + top * t, math.inf)
        slack = 4 * UNIT * (self.origin.abs() + torch.maximum(least.abs(), top.abs()) * t)
        x = torch.maximum(low - slack, self.low), torch.minimum(high + slack, self.high)
        shift = self.origin / t
        slack = slack / t
        return x, (least + shift.clamp(max=0) - slack, top + shift.clamp(min=0) + slack)

    def meet(self, v: Span, q: Span) -> tuple[Span, Span]:
        """Ranges of a value v and of `q = v / t`, each narrowed by the other: `v >= start q` if
        `q >= 0`.
        """
        t = self.start.reshape(-1, *[1] * (v[0].ndim - 1))
        (low, high), (least, top) = v, q
        low = torch.maximum(low, torch.where(least >= 0, least * t * (1 - 2 * UNIT), -math.inf))
        high = torch.minimum(high, torch.where(top <= 0, top * t * (1 - 2 * UNIT), math.inf))
        far = 1 + 2 * UNIT
        return (low, high), (
            torch.maximum(least, (low / t * far).clamp(max=0)),
            torch.minimum(top, (high / t * far).clamp(min=0)),
        )


def far_ranges(graph: Graph, rays: Rays) -> dict[int, Span]:
    """What `ranges` finds, far out: by intervals of every value v and of its part `q = v / t`,
    which stays finite.

    A map of v is the same map of q with its bias divided by t; an activation that is a ReLU up to a
    distance is one of q up to that distance over t. So the sign that a neuron takes along a ray is
    known from its q, and with it the limit of its slope.
    """
    shape = graph.nodes[0].shape
    x, part = (tuple(side.reshape(-1, *shape) for side in span) for span in rays.scaled())
    values: list[Span] = [(x[0], x[1])]
    parts: list[Span] = [(part[0], part[1])]
    for node in graph.nodes[1:]:
        v = [values[j] for j in node.inputs]
        q = [parts[j] for j in node.inputs]
        value = span_step(graph, node, v)
        t = rays.start.reshape(-1, *[1] * len(node.shape))
        scaled = _far_part(graph, node, q, t)
        if scaled is None:
            scaled = torch.full_like(value[0], -math.inf), torch.full_like(value[0], math.inf)
        value, scaled = rays.meet(value, scaled)
        values.append(value)
        parts.append(scaled)
    return {j: values[j] for j in graph.read_by_others}


def _far_part(graph: Graph, node: Node, q: list[Span], t: Tensor) -> Span | None:
    """The range of `v / t'` of one node over all `t' >= t`, from those of its inputs; None where
    nothing is known.
    """
    match node.op:
        case Affine(map_, shift):
            bias = t.new_zeros(()) if shift is None else shift / t
            low, high = affine_span(Affine(map_), q, graph.rounding)
            error = (graph.rounding + 4 * UNIT) * (
                node.op.bias_size / t + finite_size(low) + finite_size(high)
            )
            return low + bias.clamp(max=0) - error, high + bias.clamp(min=0) + error
        case Relu(slope):
            return _relu(q[0], slope)
        case Smooth():
            away = node.op.function.distance_to_relu / t
            least = q[0][0].clamp(min=0)
            low = least - away
            high = q[0][1].clamp(min=0) + away
            return low - 4 * UNIT * (away + finite_size(least)), high + 4 * UNIT * high
        case Curved() | Input():
            return None
        case _:
            assert_never(node.op)


def _intervals(graph: Graph, x: Span) -> dict[int, Span]:
    """Interval arithmetic from boxes `(N, n)`, sides infinite or not: a side is infinite only
    if such a one feeds it.
    """
    span: list[Span] = [
        (x[0].reshape(-1, *graph.nodes[0].shape), x[1].reshape(-1, *graph.nodes[0].shape))
    ]
    for node in graph.nodes[1:]:
        span.append(span_step(graph, node, [span[j] for j in node.inputs]))
    return {j: span[j] for j in graph.read_by_others}


def span_step(graph: Graph, node: Node, given: list[Span]) -> Span:
    """The range of one node from those of its inputs."""
    match node.op:
        case Affine():
            return affine_span(node.op, given, graph.rounding)
        case Relu(slope):
            return _relu(given[0], slope)
        case Smooth():
            return node.op.function.span(*given[0])
        case Curved(curve):
            return curve.span(*given)
        case Input():
            raise AssertionError("the input has no range of its own")
        case _:
            assert_never(node.op)


def _relu(span: Span, slope: Tensor) -> Span:
    low, high = (
        side.clamp(min=0) + torch.where(slope > 0, slope * side.clamp(max=0), 0.0) for side in span
    )
    return outward(low, high)


def affine_span(op: Affine, given: list[Span], rounding: float) -> Span:
    """`W+ low - W- high + b` and the other way round; infinite sides are followed on their own:
    W+ and W- cannot cancel.
    """
    map_ = op.map
    plus, minus = map_.signed()
    far = [(torch.isinf(a).double(), torch.isinf(b).double()) for a, b in given]
    near = [
        (torch.where(p > 0, 0.0, a), torch.where(q > 0, 0.0, b))
        for (a, b), (p, q) in zip(given, far)
    ]
    size = (
        rounding_map(map_).forward(*[torch.maximum(a.abs(), b.abs()) for a, b in near])
        + op.bias_size
    )
    error = (rounding + UNIT * (map_.terms + 4)) * size
    sides = []
    for k, sign in ((0, -1.0), (1, 1.0)):
        side, blown = plus.forward(*[v[k] for v in near]), plus.forward(*[v[k] for v in far])
        if minus is not None:
            side, blown = (
                side - minus.forward(*[v[1 - k] for v in near]),
                blown + minus.forward(*[v[1 - k] for v in far]),
            )
        side = side if op.bias is None else side + op.bias
        sides.append(torch.where(blown > 0, sign * math.inf, side + sign * error))
    return sides[0], sides[1]


def adjoint(graph: Graph, spans: Mapping[int, Span], rows: Tensor) -> Span:
    """The gradients of the logit combinations `rows` `(m, K)` over N regions: `(N, m, n)` each,
    rounded outward.

    spans: what `ranges` found. Interval arithmetic from the head to the input; infinite where an
    infinite value is multiplied.
    """
    count = len(next(iter(spans.values()))[0]) if spans else 1
    m = len(rows)
    last = len(graph.nodes) - 1
    head = (
        rows.to(graph.device)
        .double()
        .expand(count, m, -1)
        .reshape(count, m, *graph.nodes[last].shape)
    )
    span: dict[int, Span] = {last: (head, head)}
    for i in range(last, 0, -1):
        if i not in span:
            continue
        node = graph.nodes[i]
        g = span.pop(i)
        match node.op:
            case Affine(map_):
                parts = _pulled(map_, g, graph.rounding)
            case Curved(curve):
                parts = curve.adjoint(g, [spans[j] for j in node.inputs])
            case Relu() | Smooth():
                least, top = derivative_span(node.op, spans[node.inputs[0]])
                parts = (_times(g, (least[:, None], top[:, None])),)
            case Input():
                raise AssertionError("the input comes last")
            case _:
                assert_never(node.op)
        for j, part in zip(node.inputs, parts):
            if j in span:
                low = span[j][0] + part[0]
                high = span[j][1] + part[1]
                slack = UNIT * (low.abs() + high.abs())
                part = _nearest(low - slack, -math.inf), _nearest(high + slack, math.inf)
            span[j] = part
    low, high = span.get(0, (head.new_zeros(count, m, graph.inputs),) * 2)
    return low.reshape(count, m, -1), high.reshape(count, m, -1)


def _pulled(map_: Linear, g: Span, rounding: float) -> tuple[Span, ...]:
    """`W^T g` of gradients `(N, m, *shape)`: centre and radius; what an infinite entry feeds is
    infinite.
    """
    lead = g[0].shape[:2]
    low, high = (side.flatten(0, 1) for side in g)
    far = torch.isinf(low) | torch.isinf(high)
    low = torch.where(far, 0.0, low)
    high = torch.where(far, 0.0, high)
    size = map_.magnitude()
    blown = size.transpose(far.double()) if far.any() else None
    wide = rounding + UNIT * (map_.terms + 4)
    found = []
    for k, (centre, reach, much) in enumerate(
        zip(
            map_.transpose((low + high) / 2),
            size.transpose((high - low) / 2),
            rounding_map(map_).transpose(torch.maximum(low.abs(), high.abs())),
        )
    ):
        reach = reach + wide * much
        if blown is not None:
            reach = torch.where(blown[k] > 0, math.inf, reach)
        shape = (*lead, *centre.shape[1:])
        found.append(((centre - reach).reshape(shape), (centre + reach).reshape(shape)))
    return tuple(found)


def _times(g: Span, d: Span) -> Span:
    """The product of two intervals, rounded outward; 0 times infinity is 0: an infinite side
    stands for finite numbers.
    """
    products = [
        torch.nan_to_num(a * b, nan=0.0, posinf=math.inf, neginf=-math.inf) for a in g for b in d
    ]
    low = torch.minimum(
        torch.minimum(products[0], products[1]), torch.minimum(products[2], products[3])
    )
    high = torch.maximum(
        torch.maximum(products[0], products[1]), torch.maximum(products[2], products[3])
    )
    some = ((g[0] != 0) | (g[1] != 0)) & (
        (d[0] != 0) | (d[1] != 0)
    )  # else it is 0, and nothing underflows
    lost = torch.where(some, FLOOR[torch.float64], 0.0)
    return low - UNIT * finite_size(low) - lost, high + UNIT * finite_size(high) + lost


def _nearest(values: Tensor, side: float) -> Tensor:
    """A sum of opposite infinities is no bound."""
    return torch.nan_to_num(values, nan=side, posinf=math.inf, neginf=-math.inf)


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
    part = max(1, NUMBERS // (count * max(node.size for node in graph.nodes)))
    found = [adjoint(graph, spans, rows) for rows in torch.split(eye, part)]
    low = torch.cat([low for low, _ in found], 1)
    high = torch.cat([high for _, high in found], 1)
    if all(torch.isfinite(side).all() for span in spans.values() for side in span):
        least, top = centred(graph, spans, eye, tighten)
        low = torch.fmax(low, least)
        high = torch.fmin(high, top)
    return low, high


def smooth_bounds(graph: Graph, region: Region, spans: Mapping[int, Span]) -> Bounds:
    """The inputs of every ReLU and activation of a network without curves, for the substituted
    gradients of `propagate`.
    """
    inputs = {
        i: spans[node.inputs[0]]
        for i, node in enumerate(graph.nodes)
        if isinstance(node.op, Relu | Smooth)
    }
    return Bounds(graph, region, {i: (low[0], high[0]) for i, (low, high) in inputs.items()})


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
        if not isinstance(node.op, Smooth):
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


def _up(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, math.inf))
