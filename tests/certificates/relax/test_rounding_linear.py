"""Bounds of linear functions and of networks, in every rounding mode, against exact values.

Where a bound is exact but for rounding, a missing rounding term shows: the bound falls on the wrong
side of the truth.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.exact import normal, perceptron, uniform, values
from support.rounding import MODES, Array, long, rounded
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.loss.recession import spans
from wassail.certificates.relax import ranges as ranges_module
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.jacobian import Gradients, adjoint, centred, gradients
from wassail.certificates.relax.ranges import (
    Bounds,
    Rays,
    bounds_on,
    far_ranges,
    intervals,
    one_region,
    ranges,
    upper_on,
)
from wassail.paper.transformer_constants import everywhere
from wassail.threat import Domain

INF = math.inf
NORMS = [1.0, 2.0, INF]
BOX: Domain = (0.0, 1.0)


def support_function(a: Array, below: Array, above: Array, radius: Array, norm: float) -> Array:
    """`max <a, d>` over `{||d||_r <= radius, -below <= d <= above}` from below: the value at a
    feasible point, `(R,)`.
    """
    room = np.minimum(np.where(a > 0, above, below), radius[:, None])
    size = np.abs(a)
    if norm == INF:
        return (size * room).sum(1)
    if norm == 1:
        order = np.argsort(-size, axis=1)
        size = np.take_along_axis(size, order, 1)
        room = np.take_along_axis(room, order, 1)
        before = np.concatenate([np.zeros_like(room[:, :1]), room.cumsum(1)[:, :-1]], 1)
        return (size * np.clip(radius[:, None] - before, 0, room)).sum(1) * (
            1 - np.longdouble(2) ** -60
        )
    low = np.zeros_like(radius)
    high = np.full_like(radius, 1e6)
    for _ in range(90):
        t = (low + high) / 2
        fits = (np.minimum(t[:, None] * size, room) ** 2).sum(1) <= radius**2
        low = np.where(fits, t, low)
        high = np.where(fits, high, t)
    return (size * np.minimum(low[:, None] * size, room)).sum(1) * (1 - np.longdouble(2) ** -60)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("domain", [BOX, None])
@pytest.mark.parametrize("norm", NORMS)
def test_linear_functions_on_balls(norm: float, domain: Domain, mode: str) -> None:
    """The true extremes of `<a, d>` over balls cut by a box: exact up to rounding, and never
    inside.
    """
    for n in (1, 2, 40):
        x = uniform(6, n, seed=n) * torch.tensor([1.0, 0.3, 1e-9, 1.0, 1.0, 1.0])[:, None]
        radius = torch.tensor([1e-3, 0.3, 0.1, 0.7, 3.0, 1.0 / 3], dtype=torch.float64)
        owner = torch.arange(60) % 6
        a = normal(60, n, seed=n + 1)
        single = a.float()
        with rounded(mode):
            balls = Balls.make(x, radius, norm, domain)
            upper = balls.upper(a, owner)
            reach = balls.reach(a, owner)
            middle, spread = balls.across(single, owner)
            regions = [Region.make(Ball(v, float(r), norm, domain), n) for v, r in zip(x, radius)]
            fixed = torch.empty_like(upper)
            loose = torch.empty_like(upper)
            for k, region in enumerate(regions):
                fixed[owner == k], loose[owner == k] = (
                    region.upper(a[owner == k]),
                    region.upper(a[owner == k], cut=False),
                )
            box = balls.box
            boxes = [region.box for region in regions]
        low, high = (0.0, 1.0) if domain else (-INF, INF)
        below = long(x) - np.longdouble(low)
        above = np.longdouble(high) - long(x)
        assert (long(box[1]) >= np.minimum(above, long(radius)[:, None])).all()
        assert (-long(box[0]) >= np.minimum(below, long(radius)[:, None])).all()
        for k, (bottom, top) in enumerate(boxes):
            assert (long(bottom) <= long(x)[k] - np.minimum(below[k], long(radius)[k])).all()
            assert (long(top) >= long(x)[k] + np.minimum(above[k], long(radius)[k])).all()
        sides = below[owner], above[owner], long(radius)[owner]
        truth = support_function(long(a), *sides, norm)
        assert (long(upper) >= truth).all() and (long(upper) - truth < 1e-12 * (1 + truth)).all()
        other = support_function(-long(a), *sides, norm)
        assert (long(reach) >= np.maximum(truth, other)).all()
        screened = support_function(long(single), *sides, norm)
        assert (long(middle) + long(spread) >= screened).all()
        assert (long(spread) - long(middle) >= support_function(-long(single), *sides, norm)).all()
        there = (long(a) * long(x)[owner]).sum(1)
        assert (long(fixed) >= there + truth).all() and (long(loose) >= there + truth).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", NORMS)
def test_linear_maps_on_balls(norm: float, mode: str) -> None:
    """`||A d||_2` over balls: of one row or of rank 1, where the bound is exact, and at the
    best of the corners.
    """
    for width, n in ((1, 7), (5, 7), (3, 30)):
        g = normal(width, 1, seed=n) * normal(1, n, seed=n + 1)  # rank 1
        x = torch.full((1, n), 0.5, dtype=torch.float64)
        radius = torch.tensor([1.0 / 3], dtype=torch.float64)
        with rounded(mode):
            balls = Balls.make(x, radius, norm, None)
            start, stretch = balls.stretch(g[None, None])
        column = np.sqrt((long(g) ** 2).sum(0))
        if norm == 1:
            truth = column.max() * long(radius)[0]
        else:
            row = np.abs(long(g[0]))
            longest = row.sum() if norm == INF else np.sqrt((row**2).sum())
            truth = longest * np.sqrt((long(g[:, 0]) ** 2).sum()) / row[0] * long(radius)[0]
        assert long(stretch)[0, 0] >= truth * (1 - 1e-18) and float(stretch[0, 0]) < float(
            truth
        ) * (1 + 1e-10)
        assert bool((start == 0).all())


def rising(sizes: list[int], seed: int, active: bool, shift: float = 0.0) -> Graph:
    """Weights >= 0, so that every node rises with every input; ReLUs that are all active, or
    some of each kind.
    """
    weights = [
        uniform(b, a, seed=seed + k) / a for k, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    biases = [
        normal(b, seed=seed + 50 + k) * 0.1 + (1.0 if active else -0.4) + shift
        for k, b in enumerate(sizes[1:])
    ]
    return perceptron(weights, biases)


def by_intervals(graph: Graph, region: Region) -> Bounds:
    """The inputs of the ReLUs by intervals alone."""
    low, high = region.box
    found = intervals(graph, (low[None], high[None]))
    spans = {i: found[graph.nodes[i].inputs[0]] for i in graph.relus}
    return Bounds(graph, region, {i: (low[0], high[0]) for i, (low, high) in spans.items()})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("active", [True, False])
def test_ranges_of_rising_networks(active: bool, mode: str) -> None:
    """Intervals of a network that rises are exact: its ends are its values at two corners."""
    for seed, sizes in ((0, [3, 4, 5, 3]), (1, [30, 20, 10, 2]), (2, [1, 1, 1, 1, 1, 2])):
        graph = rising(sizes, seed, active)
        x = uniform(2, sizes[0], seed=9)
        radius = torch.tensor([0.1, 1e-20], dtype=torch.float64)
        with rounded(mode):
            sweep = Sweep(graph, Balls.make(x, radius, INF, None)).run()
            proved = sweep.proved()
            again = Sweep(graph, Balls.make(x, radius / 2, INF, None), known=proved).run()
            fixed = [
                by_intervals(graph, Region.make(Ball(v, float(r), INF), sizes[0]))
                for v, r in zip(x, radius)
            ]
            tighter = [
                bounds_on(graph, Region.make(Ball(v, float(r), INF), sizes[0]))
                for v, r in zip(x, radius)
            ]
        for i in range(2):
            for share, found in ((1.0, sweep), (0.5, again)):
                step = np.longdouble(share) * long(radius)[i]
                ends = [values(graph, long(x)[i] + side * step) for side in (-1, 1)]
                here = values(graph, long(x)[i])
                for k in range(len(graph.nodes)):
                    low, high = (long(side)[i] for side in found.spans[k])
                    centre = long(found.centre[k])[i]
                    assert (centre + low <= ends[0][k]).all() and (
                        centre + high >= ends[1][k]
                    ).all(), (k, share)
                    assert (np.abs(here[k] - centre) < 1e-12).all()
            ends = [values(graph, long(x)[i] + side * long(radius)[i]) for side in (-1, 1)]
            for k, (low, high) in proved.items():
                assert (long(low)[i] <= ends[0][k]).all() and (long(high)[i] >= ends[1][k]).all()
            for bounds in (fixed[i], tighter[i]):
                for k, (low, high) in bounds.spans.items():
                    source = graph.nodes[k].inputs[0]
                    assert (long(low) <= ends[0][source]).all() and (
                        long(high) >= ends[1][source]
                    ).all()


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", NORMS)
def test_margins_of_networks_without_kinks(norm: float, mode: str) -> None:
    """Where all ReLUs are active the margins are linear, and linear bounds exact up to rounding."""
    for seed, sizes in ((0, [3, 4, 5, 3]), (1, [30, 20, 10, 2]), (2, [2, 2, 2, 2, 2, 2])):
        weights = [
            normal(b, a, seed=seed + k) / a for k, (a, b) in enumerate(itertools.pairwise(sizes))
        ]
        biases = []
        here = torch.full((sizes[0],), 0.5, dtype=torch.float64)
        for weight in weights:  # the hidden values are about 9 everywhere near the samples
            biases.append(9 - weight @ here)
            here = torch.full((len(weight),), 9.0, dtype=torch.float64)
        graph = perceptron(weights, biases)
        # The same with a neuron on each logit, which is about 0: paths cancel, so that intervals
        # alone do not say much.
        more = perceptron(
            [*weights, torch.eye(sizes[-1]).double()],
            [*biases[:-1], biases[-1] - 9, 0 * biases[-1]],
        )
        x = uniform(3, sizes[0], seed=9)
        radius = torch.tensor([0.1, 1.0 / 3, 1e-20], dtype=torch.float64)
        y = torch.tensor([0, 1, 0])
        with rounded(mode):
            sweep = Sweep(graph, Balls.make(x, radius, norm, None)).run()
            lower, base, a = margins(sweep, y)
            regions = [Region.make(Ball(v, float(r), norm), sizes[0]) for v, r in zip(x, radius)]
            rows = torch.eye(sizes[-1], dtype=torch.float64)
            above = [upper_on(graph, region, rows) for region in regions]
            slopes = [gradients(bounds_on(graph, region), rows) for region in regions]
            ends = [bounds_on(more, region).spans[len(graph.nodes)] for region in regions[:2]]
        total = long(weights[0])
        for weight in weights[1:]:
            total = long(weight) @ total
        for i in range(3):
            z = values(graph, long(x)[i])[-1]
            free = np.full((sizes[-1], sizes[0]), np.inf, dtype=np.longdouble)
            reach = np.repeat(long(radius)[i], sizes[-1])
            rise = support_function(total, free, free, reach, norm)
            assert (long(above[i]) >= z + rise).all()
            if i < 2:
                near = values(more, long(x)[i])[len(graph.nodes) - 1]
                assert (long(ends[i][0]) <= near - rise).all() and (
                    long(ends[i][1]) >= near + rise
                ).all()
            gap = total - total[int(y[i])]
            truth = z[int(y[i])] - z - support_function(gap, free, free, reach, norm)
            others = np.arange(sizes[-1]) != int(y[i])
            assert (long(lower)[i] <= truth)[others].all() and (truth - long(lower)[i] < 1e-10)[
                others
            ].all()
            one = values(graph, long(x)[i])[1]
            row = long(weights[0])
            wide = np.full(row.shape, np.inf, dtype=np.longdouble)
            swing = support_function(row, wide, wide, np.repeat(long(radius)[i], len(row)), norm)
            low, high = (long(side)[i] + long(sweep.centre[1])[i] for side in sweep.spans[1])
            assert (low <= one - swing).all() and (high >= one + swing).all()
            low, high = (long(side) for side in slopes[i].entries())
            assert (low <= total).all() and (high >= total).all() and (high - low < 1e-12).all()
            # The plane itself holds at the corner where it is lowest.
            corner = -np.sign(gap) * long(radius)[i] if norm == INF else np.zeros_like(gap)
            plane = long(base)[i] + (long(a)[i] * -corner).sum(1)
            assert (plane <= z[int(y[i])] - z + (gap * corner).sum(1))[others].all() or norm != INF


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_known_up_to_a_relative_error(mode: str) -> None:
    """`Graph.rounding`: every weight and bias may be off by that much, here all of them one way."""
    off = 1e-7
    sizes = [3, 5, 4, 3]
    graph = rising(sizes, 7, active=True)
    known = replace(graph, rounding=off)
    x = uniform(1, 3, seed=9)
    radius = torch.tensor([0.1], dtype=torch.float64)
    region = Region.make(Ball(x[0], 0.1, INF), 3)
    rows = torch.eye(3, dtype=torch.float64)
    with rounded(mode):
        sweep = Sweep(known, Balls.make(x, radius, INF, None)).run()
        two = Sweep(known, Balls.make(x, radius, 2.0, None)).run()
        constant, a, owner = sweep.bound(len(graph.nodes) - 1, rows, torch.zeros(3).long())
        upper = constant + sweep.inputs.upper(a, owner)
        fixed = by_intervals(known, region)
        substituted = upper_on(known, region, rows)
        partial = gradients(bounds_on(known, region), rows).entries()
        inner = ranges(known, one_region(region))
        low_high = adjoint(known, inner, rows), centred(known, inner, rows)
        everywhere = spans(known, (x - 0.1, x + 0.1))
    for side in (1 + off, 1 - off):
        true = replace(graph, nodes=tuple(_scaled(node, side) for node in graph.nodes))
        ends = [values(true, long(x)[0] + sign * long(radius)[0]) for sign in (-1, 1)]
        for k in range(len(graph.nodes)):
            low, high = (long(v)[0] + long(sweep.centre[k])[0] for v in sweep.spans[k])
            assert (low <= ends[0][k]).all() and (high >= ends[1][k]).all()
            low, high = (long(side)[0] for side in everywhere[k])
            assert (low <= ends[0][k] + 1e-15).all() and (high >= ends[1][k] - 1e-15).all()
        one = values(true, long(x)[0])[1]
        low, high = (long(v)[0] + long(two.centre[1])[0] for v in two.spans[1])
        weight = true.nodes[1].map.weight
        swing = np.sqrt((long(weight) ** 2).sum(1)) * long(radius)[0]
        assert (low <= one - swing).all() and (high >= one + swing).all()
        assert (long(upper) + long(sweep.centre[len(graph.nodes) - 1])[0] >= ends[1][-1]).all()
        assert (long(substituted) >= ends[1][-1]).all()
        for k, (low, high) in fixed.spans.items():
            source = graph.nodes[k].inputs[0]
            assert (long(low) <= ends[0][source]).all() and (long(high) >= ends[1][source]).all()
        total = long(true.nodes[1].map.weight)
        for k in (3, 5):
            total = long(true.nodes[k].map.weight) @ total
        for low, high in (partial, *((low[0], high[0]) for low, high in low_high)):
            assert (long(low) <= total).all() and (long(high) >= total).all()
        for k, (low, high) in inner.items():
            assert (long(low)[0] <= ends[0][k]).all() and (long(high)[0] >= ends[1][k]).all()


def _scaled(node: Node, factor: float) -> Node:
    if not isinstance(node.map, Matrix):
        return node
    bias = None if node.bias is None else node.bias * factor
    return replace(node, op=Affine(Matrix(node.map.weight * factor), bias))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("s", NORMS)
def test_lengths_of_gradients(s: float, mode: str) -> None:
    """Of entries that are known exactly."""
    entries = normal(30, 40, seed=11)
    found = SimpleNamespace(bounds=SimpleNamespace(open=0))
    with rounded(mode):
        length = Gradients.norm(found, s, (entries, entries))  # type: ignore[arg-type]
    size = np.abs(long(entries))
    truth = size.sum(1) if s == 1 else size.max(1) if s == INF else np.sqrt((size**2).sum(1))
    assert (long(length) >= truth * (1 - np.longdouble(2) ** -62)).all()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_beside_an_undecided_neuron_that_leads_nowhere(mode: str) -> None:
    """All other neurons are active: every partial derivative is one number, and substitution is
    exact but for its sums.
    """
    width = 40
    n = 5
    for seed in range(3):
        weights = [normal(width, n, seed=seed + 160), normal(2, width, seed=seed + 170)]
        x = uniform(n, seed=seed + 180)
        radius = 0.1
        weights[1][:, 0] = 0
        bias = torch.full((width,), 50.0, dtype=torch.float64)
        bias[0] = -(weights[0][0] @ x)
        graph = perceptron(weights, [bias, torch.zeros(2, dtype=torch.float64)])
        with rounded(mode):
            found = gradients(
                bounds_on(graph, Region.make(Ball(x, radius, INF, None), n)),
                torch.tensor([[-1.0, 1.0]]),
            )
            low, high = found.entries()
            lengths = {s: found.norm(s, (low - 1e-3, high + 1e-3)) for s in (1.0, 2.0)}
        assert found.bounds.open == 1
        exact = (long(weights[1])[1] - long(weights[1])[0]) @ long(weights[0])
        room = np.longdouble(2) ** -57
        assert (long(low)[0] <= exact + room).all() and (long(high)[0] >= exact - room).all()
        assert long(lengths[1.0])[0] >= np.abs(exact).sum() - room
        assert long(lengths[2.0])[0] >= np.sqrt((exact**2).sum()) - room


@pytest.mark.parametrize("mode", MODES)
def test_upper_bounds_on_rows_are_rounded_up(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given centre whose products cancel: what is left is the rounding of the products."""
    none = torch.zeros(2, dtype=torch.float64)
    for seed in range(20):
        centre = torch.tensor(np.random.default_rng(seed).uniform(0.5, 2, (1, 2)))
        rows = torch.stack([centre[0].flip(0), -centre[0].flip(0)]) * torch.tensor([1.0, -1.0])
        sweep = SimpleNamespace(
            bound=lambda *_: (none, none, none),
            centre={0: centre},
            inputs=SimpleNamespace(upper=lambda *_: none),
        )
        monkeypatch.setattr(ranges_module, "_priced", lambda graph, balls, sweep=sweep: sweep)
        monkeypatch.setattr(ranges_module, "one_region", lambda region: region)
        graph = SimpleNamespace(nodes=[SimpleNamespace(shape=(2,))], device=torch.device("cpu"))
        with rounded(mode):
            found = upper_on(graph, None, rows)  # type: ignore[arg-type]
        for row, value in zip(rows.tolist(), found.tolist()):
            exact = sum(Fraction(a) * Fraction(b) for a, b in zip(row, centre[0].tolist()))
            assert exact <= Fraction(value) and value < 1e-13


def test_values_count_the_error_of_the_weights() -> None:
    """At one point the range of a layer is as wide as its rounded weights make it."""
    point, row = torch.tensor([1.0, 2.0]).double(), torch.tensor([[3.0, -1.0]]).double()
    layer = Node((0,), (1,), "", Affine(Matrix(row)))
    nodes = (Node((), (2,), ""), layer, Node((1,), (1,), "", Relu(torch.zeros(()))))
    graph = Graph(nodes, rounding=2.0**-20)
    start, side = torch.ones(1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    far = far_ranges(graph, Rays(point, point, point, start, (-side, side)))[1]
    near = everywhere(graph, Region(point, point, point), {})[1]
    for low, high in (far, near):
        assert float(low) <= 1 - 5 * 2.0**-20 and 1 + 5 * 2.0**-20 <= float(high) < 1.001
