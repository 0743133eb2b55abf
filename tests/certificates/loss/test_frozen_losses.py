"""Bounds on losses where some inputs cannot move, `low == high`: one of them, all but one, all.

They hold at points that leave those inputs alone, and are those of the network as a function of the
other inputs.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.rescaled import ALL, Case, case, random_graph
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Region
from wassail.certificates.graph.restrict import restricted
from wassail.certificates.loss import worst_case
from wassail.certificates.loss.certify import ClassSlopes
from wassail.certificates.loss.chords import ChordSearch, clean_above
from wassail.certificates.loss.growth import ends_of, growth_above
from wassail.certificates.loss.labels import Labels
from wassail.certificates.loss.recession import spans
from wassail.certificates.loss.samples import Samples
from wassail.certificates.loss.slopes import highest_loss
from wassail.certificates.relax.crown import margin_bounds
from wassail.errors import InputError
from wassail.losses import LIPSCHITZ

INF = math.inf
NORMS = (1.0, 2.0, INF)
LOSSES = ("margin", "cross_entropy")
DOUBLE = torch.float64
KINDS = [
    "shallow",
    "smooth",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("residual", "conv")),
]
RADII = [0.05, 0.2, 0.6]
Box = tuple[Tensor, Tensor]  # low and high `(n,)`


def some(n: int, seed: int) -> list[list[int]]:
    """One input, all but one, and all of n."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[:1], order[: n - 1], order]


def box(x: Tensor, held: list[int]) -> Box:
    """The unit box with some inputs held at their values in x `(n,)`."""
    low, high = torch.zeros_like(x), torch.ones_like(x)
    low[held], high[held] = x[held], x[held]
    return low, high


def inside(x: Tensor, domain: Box, norm: float, radius: float, seed: int) -> Tensor:
    """Points of one ball cut by the box, `(400, n)`, most of them at its rim."""
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(400, len(x), dtype=DOUBLE, generator=generator)
    d[::3] *= torch.rand(d[::3].shape, generator=generator) < 0.5
    d = torch.where(domain[0] < domain[1], d, 0.0)
    size = torch.linalg.vector_norm(d, norm, dim=1, keepdim=True).clamp(min=1e-12)
    return torch.minimum(torch.maximum(x + d / size * radius, domain[0]), domain[1])


def losses(graph: Graph, points: Tensor, label: int, loss: str) -> Tensor:
    z = graph.logits(points.reshape(-1, *graph.nodes[0].shape))
    return LIPSCHITZ[loss](z, torch.full((len(z),), label))


def parts(kind: str, norm: float) -> tuple[Graph, Case, Tensor, int]:
    """A random network, its one sample, flat, and its label."""
    graph = random_graph(kind, 5)
    given = case(graph, 5, norm, samples=1)
    return graph, given, given.x[0].flatten(), int(given.y)


def above(
    graph: Graph, x: Tensor, y: Tensor, norm: float, loss: str, domain: Box
) -> tuple[Any, ...]:
    """The certified side of a curve: start, grid, ceiling, left, rise, and the slope."""
    samples = Samples(graph, x, Labels(loss, y), norm, domain)
    found = growth_above(samples, RADII, 0, 0.0, lambda share: None)
    return found.start, found.grid, found.ceiling, found.left, found.rise, found.slope


@pytest.mark.few(2)
@pytest.mark.slow_cases("smooth-1.0-*", "smooth-inf-*")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_curves_of_losses(kind: str, norm: float, loss: str) -> None:
    """Ceilings, lines between two radii, the slope, and the highest loss of the whole box."""
    graph, given, x, label = parts(kind, norm)
    clean = float(losses(graph, x[None], label, loss))
    assert clean <= float(clean_above(graph, given.x, given.y, loss)) < clean + 1e-9
    for held in some(len(x), 5):
        domain = box(x, held)
        start, grid, ceiling, left, rise, slope = above(graph, given.x, given.y, norm, loss, domain)
        assert clean <= float(start) < clean + 1e-9
        for t, radius in enumerate(grid.tolist()):
            found = losses(graph, inside(x, domain, norm, radius, t), label, loss).max()
            assert found <= ceiling[0, t] + 1e-9 and found <= clean + slope * radius + 1e-9
            if t:
                line = left[0, t] + rise[0, t] * (radius - grid[t - 1])
                assert found <= line + 1e-9
        most = highest_loss(graph, [label], loss, domain)
        corners = inside(x, domain, INF, 1.0, 9)
        assert float(losses(graph, corners, label, loss).max()) <= float(most) + 1e-9
        if len(held) == len(x):
            assert float(ceiling.max()) < clean + 1e-9 and float(most) < clean + 1e-9
            assert slope == 0
            continue
        less, region = restricted(graph, Region.make(domain, len(x)))
        part = x[region.low.new_tensor([i not in held for i in range(len(x))]).bool()][None]
        same = above(less, part, given.y, norm, loss, (region.low, region.high))
        size = min(len(grid), len(same[1]))
        for ours, theirs in zip((ceiling, left), same[2:4]):
            assert torch.allclose(ours[:, :size], theirs[:, :size], rtol=0.03, atol=0.03)
        assert slope == pytest.approx(same[5], rel=0.03)


@pytest.mark.few(13)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", list(ALL))
def test_margins_of_samples_with_boxes_of_their_own(kind: str, norm: float) -> None:
    """On balls of one radius and of two, each sample with other inputs held."""
    graph = random_graph(kind, 3)
    given = case(graph, 3, norm)
    flat = given.x.flatten(1)
    n = flat.shape[1]
    for shift in range(3):
        boxes = [box(v, some(n, i)[(i + shift) % 3]) for i, v in enumerate(flat)]
        low, high = (torch.stack(sides) for sides in zip(*boxes))
        domain = (low, high)
        whole = margin_bounds(graph, given.x, given.y, 0.4, norm, domain, 0)
        labels = Labels("margin", given.y)
        samples = Samples(graph, given.x, labels, norm, domain)
        ends = ends_of(samples, 0.1, 0.4, 0)
        for i, (v, own, label) in enumerate(zip(flat, boxes, given.y.tolist())):
            for radius, bounds in ((0.1, [ends[1]]), (0.4, [whole, ends[0], ends[2]])):
                z = graph.logits(inside(v, own, norm, radius, i).reshape(-1, *graph.nodes[0].shape))
                gap = (z[:, label : label + 1] - z).amin(0)
                assert all((lower[i] <= gap + 1e-9).all() for lower in bounds)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["shallow", pytest.param("conv", marks=pytest.mark.slow)])
def test_worst_cases_refuse_the_box_and_hold_without_the_input(kind: str, norm: float) -> None:
    """Cells have an interior: a box that has none is refused, whatever is asked. The network on its
    free inputs has the worst case of the one on all of them.
    """
    graph, given, x, label = parts(kind, norm)
    network = graph.piecewise()
    eps = 0.2
    for held in some(len(x), 5):
        domain = box(x, held)
        where: dict[str, Any] = {"norm": norm, "domain": domain}
        asked: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (worst_case.worst_case_network, {"order": 1.0, "eps": eps}),
            (worst_case.anchor, {}),
            (worst_case.anchor_and_offset, {"lam": 1.0}),
        ]
        for ask, more in asked:
            with pytest.raises(InputError, match="empty interior"):
                ask(network, x[None], given.y, **where, **more)
        if len(held) == len(x):
            continue
        less, region = restricted(graph, Region.make(domain, len(x)))
        part = x[[i for i in range(len(x)) if i not in held]][None]
        where = {"norm": norm, "domain": (region.low, region.high)}
        for loss in LOSSES if kind == "conv" else LOSSES[:1]:  # cross entropy takes longer
            found = [
                worst_case.worst_case_network(
                    less.piecewise(), part, given.y, order=order, eps=eps, loss=loss, **where
                ).bound
                for order in (1.0, 2.0, INF)
            ]
            steepest = worst_case.anchor(less.piecewise(), part, given.y, loss=loss, **where)
            points = inside(x, domain, norm, eps, 3)
            seen = losses(graph, points, label, loss).max()
            clean = losses(graph, x[None], label, loss)[0]
            assert all(seen <= bound.upper + 1e-9 for bound in found)
            assert found[2].lower <= seen + 0.05 * (1 + abs(seen))
            assert seen - clean <= steepest.upper * eps + 1e-9


@pytest.mark.few(4)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("norm", NORMS)
def test_steepest_chords_of_smooth_networks(norm: float, loss: str) -> None:
    """Of two inputs one cannot move: the chords are those of the other."""
    graph, given, x, label = parts("smooth", norm)
    for held in some(2, 4):
        domain = box(x, held)
        search = ChordSearch(graph, given.x, given.y, norm, domain, loss, INF, None)
        upper = search.run()
        assert search.steepest <= upper
        if len(held) == 2:
            assert upper == 0
            continue
        for radius in (0.01, 0.1, 0.5):
            points = inside(x, domain, norm, radius, 1)
            gain = losses(graph, points, label, loss) - losses(graph, x[None], label, loss)
            far = torch.linalg.vector_norm(points - x, norm, dim=1)
            assert (gain <= upper * far + 1e-9).all()
        less, region = restricted(graph, Region.make(domain, 2))
        free = (region.low, region.high)
        part = x[[i for i in range(2) if i not in held]][None]
        alone = ChordSearch(less, part, given.y, norm, free, loss, INF, None)
        assert upper == pytest.approx(alone.run(), rel=0.02, abs=1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_slopes_of_certificates(kind: str, norm: float) -> None:
    """Slope of the margins, steepest chord, and the line that caps the loss."""
    graph, given, x, label = parts(kind, norm)
    for held in some(len(x), 2):
        domain = box(x, held)
        for loss in LOSSES:
            mu = torch.ones(1, dtype=DOUBLE)
            samples = Samples(graph, given.x, Labels(loss, given.y), norm, domain)
            work = ClassSlopes(samples, mu, 0)
            work.search(("anchor", "margin", "infinity"), lambda share: None)
            assert work.found["infinity"].upper == 0
            clean = losses(graph, x[None], label, loss)[0]
            for radius in (0.01, 0.1, 0.5):
                points = inside(x, domain, norm, radius, 1)
                value = losses(graph, points, label, loss)
                far = torch.linalg.vector_norm(points - x, norm, dim=1)
                slope = min(work.found[name].upper for name in ("anchor", "margin"))
                assert (value - clean <= slope * far + 1e-9).all()
                if work.line is not None:
                    assert (value <= work.line[0] * far + work.line[1] + 1e-9).all()
            if len(held) == len(x):
                assert work.found["margin"].upper == 0


@pytest.mark.parametrize("kind", list(ALL))
def test_intervals_of_values(kind: str) -> None:
    """Where the nodes lie on a box, as losses far away are bounded with."""
    graph, _, x, _ = parts(kind, 2.0)
    for held in some(len(x), 6):
        low, high = (side.reshape(1, *graph.nodes[0].shape) for side in box(x, held))
        points = inside(x, box(x, held), INF, 1.0, 2).reshape(-1, *graph.nodes[0].shape)
        z = graph.logits(points)
        bottom, top = spans(graph, (low, high))[-1]
        assert (bottom - 1e-9 <= z).all() and (z <= top + 1e-9).all()
        if len(held) == len(x):
            assert (top - bottom).max() < 1e-9
