"""Where the values of a network lie over regions: by linear bounds (`crown.Sweep`) on bounded ones,
by intervals with infinite sides elsewhere. And the network without the neurons that keep their side
there (`condensed`): what is left is small, so that bounds on it cost next to nothing.

Stable neurons are linear there, and products of linear maps are formed once, for all rows and
entries. Sums of products cancel, so each matrix also carries the same sum of magnitudes
(`Matrix.most`): what the rounding errors of both are relative to.

Rounding: every step is an enclosure of the exact image of the enclosure before it. A sum of n terms
is off by at most `(n + 4) 2^-52` times the sum of their magnitudes, and that is added to every
side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import (
    Affine,
    Curved,
    Graph,
    Input,
    Node,
    Relu,
    Smooth,
)
from wassail.certificates.graph.maps import Matrix, Sum, rounding_map
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.rows import rounded_up
from wassail.rounding import UNIT, finite_size, outward

Span: TypeAlias = "tuple[Tensor, Tensor]"  # lower and upper side, one shape


def gamma(graph: Graph) -> float:
    """Relative rounding error of a pass through the whole graph: every term of every sum on the
    way, times 2^-52.
    """
    return graph.rounding + UNIT * (16 + sum(node_terms(node) for node in graph.nodes))


def node_terms(node: Node) -> int:
    """Most terms in one sum of a node, with room for its bias and the products."""
    return node.map.terms if node.map is not None else 4 + len(node.inputs)


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
        return self.graph.nodes[i].derivative_range(*self.spans[i])

    def unstable(self, i: int) -> Tensor:
        """Which neurons of node i have more than one derivative, bool of the node's shape:
        ReLUs that may change sides.
        """
        if self.graph.nodes[i].activation is not None:
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


def one_region(region: Region) -> Balls:
    """A region as the only one of its kind; sides may be infinite. The room around its centre
    is rounded up.
    """
    x = region.centre[None]
    sides = [
        torch.where(side > 0, rounded_up(side), 0.0) for side in (x - region.low, region.high - x)
    ]
    if region.radius < math.inf:
        return Balls(x, x.new_tensor([region.radius]), region.norm, *sides)
    return boxed(x, *sides)


def boxed(x: Tensor, below: Tensor, above: Tensor) -> Balls:
    """The boxes `[x - below, x + above]`, `(N, n)` each; sides may be infinite."""
    return Balls(x, torch.maximum(below, above).amax(1), math.inf, below, above)


def bounds_on(graph: Graph, region: Region, steps: int = 0) -> Bounds:
    """Where the inputs of the ReLUs of a piecewise-linear network lie in a region; steps: of the
    ascent on the slopes of each bound's own lines.
    """
    balls = one_region(region)
    found = _priced(graph, balls, steps).proved() if region.bounded else ranges(graph, balls)
    spans = {i: found[graph.nodes[i].inputs[0]] for i in graph.relus}
    return Bounds(graph, region, {i: (low[0], high[0]) for i, (low, high) in spans.items()})


def upper_on(graph: Graph, region: Region, rows: Tensor) -> Tensor:
    """Upper bounds on `<row, output>` over a bounded region by linear bounds, rounded outward: `(m,
    K) -> (m,)`.
    """
    last = len(graph.nodes) - 1
    sweep = _priced(graph, one_region(region))
    rows = rows.to(graph.device).double()
    owner = torch.zeros(1, dtype=torch.int64, device=graph.device)
    constant, a, owner = sweep.bound(last, rows.reshape(-1, *graph.nodes[last].shape), owner)
    c = sweep.centre[last].reshape(1, -1)
    rise = constant + sweep.inputs.upper(a, owner)
    size = (rows.abs() * c.abs()).sum(1) + constant.abs() + rise.abs()
    return (rows * c).sum(1) + rise + (c.shape[1] + 8) * UNIT * size


def _priced(graph: Graph, balls: Balls, steps: int = 0) -> Sweep:
    """A sweep that the budget of work pays for."""
    sweep = Sweep(graph, balls, steps).run()
    clock.spend((2 + 4 * steps) * sweep.rows * graph.operations)
    return sweep


def ranges(graph: Graph, balls: Balls) -> dict[int, Span]:
    """Where the values of the nodes lie that a ReLU, an activation or a curve reads: `(N, *shape)`
    for each, rounded outward.

    By linear bounds where all regions are bounded, by intervals with infinite sides where one is
    not.
    """
    low, high = balls.box
    if torch.isfinite(low).all() and torch.isfinite(high).all():
        return Sweep(graph, balls).run().proved()
    return intervals(graph, outward(balls.x + low, balls.x + high, 2))


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
        value = node.span(v, graph.rounding)
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
            low, high = Affine(map_).span(q, graph.rounding)
            error = (graph.rounding + 4 * UNIT) * (
                node.op.bias_size / t + finite_size(low) + finite_size(high)
            )
            return low + bias.clamp(max=0) - error, high + bias.clamp(min=0) + error
        case Relu():
            return node.op.span(q)
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


def intervals(graph: Graph, x: Span) -> dict[int, Span]:
    """Interval arithmetic from boxes `(N, n)`, sides infinite or not: a side is infinite only
    if such a one feeds it.
    """
    span: list[Span] = [
        (x[0].reshape(-1, *graph.nodes[0].shape), x[1].reshape(-1, *graph.nodes[0].shape))
    ]
    for node in graph.nodes[1:]:
        span.append(node.span([span[j] for j in node.inputs], graph.rounding))
    return {j: span[j] for j in graph.read_by_others}


def smooth_bounds(graph: Graph, region: Region, spans: Mapping[int, Span]) -> Bounds:
    """The inputs of every ReLU and activation of a network without curves, for the substituted
    gradients of `jacobian`.
    """
    inputs = {
        i: spans[node.inputs[0]] for i, node in enumerate(graph.nodes) if node.act is not None
    }
    return Bounds(graph, region, {i: (low[0], high[0]) for i, (low, high) in inputs.items()})


NEURONS = 1500  # undecided neurons up to which it pays
SLOPE_STEPS = 12  # on the slopes of the lower lines, which cost little on what is left
MEMORY = 2**26  # numbers in the largest node while it is built


def condensed(bounds: Bounds) -> Bounds:
    """The same region and network with the stable neurons gone, or `bounds` itself where that would
    not pay.

    What is left is bounded again with optimised slopes, so some of it may turn out stable too.
    """
    graph = bounds.graph
    columns = graph.inputs + bounds.open + 1
    if (
        bounds.open > min(NEURONS, 0.7 * graph.neurons)
        or columns * max(node.size for node in graph.nodes) > MEMORY
    ):
        return bounds
    states = bounds.states()
    exact = graph.piecewise(states)
    size = graph.absolute().piecewise(states)
    # Every coefficient is off by at most gamma times its magnitude, like any other sum over paths
    # of the graph.
    small = replace(layered(exact, size), rounding=gamma(graph)).to(graph.device)
    return bounds_on(small, bounds.region, SLOPE_STEPS)


def layered(network: Piecewise, size: Piecewise) -> Graph:
    """A dense form as a graph: a matrix from the input and from every earlier layer into each
    layer and into the output.
    """
    nodes = [Node((), (network.inputs,), "the input")]
    blocks = network.blocks() if network.neurons else []
    active: list[int] = []

    def join(rows: Callable[[Piecewise], tuple[Tensor, Tensor, Tensor]]) -> int:
        """Add the sum of all maps into one layer; `rows` picks its rows of the coefficients of
        x and z, and its bias.
        """
        (x, z, bias), (x_size, z_size, bias_size) = rows(network), rows(size)
        sources = [
            (0, Matrix(x, x_size)),
            *((i, Matrix(z[:, b], z_size[:, b])) for i, b in zip(active, blocks)),
        ]
        parts = []
        for source, matrix in sources:
            if source == 0 or matrix.weight.any():
                nodes.append(Node((source,), (len(bias),), "the condensed network", Affine(matrix)))
                parts.append(len(nodes) - 1)
        nodes.append(
            Node(
                tuple(parts),
                (len(bias),),
                "the condensed network",
                Affine(Sum(len(parts)), bias, bias_most=bias_size),
            )
        )
        return len(nodes) - 1

    for block in blocks:
        before = join(lambda p, b=block: (p.A[b], p.B[b], p.c[b]))  # type: ignore[misc]
        nodes.append(
            Node(
                (before,), nodes[before].shape, "the condensed network", Relu(network.slope[block])
            )
        )
        active.append(len(nodes) - 1)
    join(lambda p: (p.C, p.D, p.e))
    return Graph(tuple(nodes))
