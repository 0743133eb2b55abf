"""Linear bounds and radii through attention, LayerNorm and gates."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from support.networks import Net, seeded
from support.transformers import CURVED, Vision
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.reader import read
from wassail.certificates.lipschitz.steepest import jacobians
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margin_bounds, margins
from wassail.certificates.relax.lines import InputExtent
from wassail.certificates.search.margins import branched
from wassail.threat import Domain, dual

INF = math.inf
NORMS = [1.0, 2.0, INF]
BOX: Domain = (0.0, 1.0)


def rectified() -> nn.Module:
    """Attention between ReLU layers, as in the vision transformers of the verification
    competition.
    """

    def forward(m: Net, x: Tensor) -> Tensor:
        y = x + F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))
        return m.head((y + m.down(m.up(y).relu())).mean(1))

    return Net(
        forward,
        q=nn.Linear(6, 6),
        k=nn.Linear(6, 6),
        v=nn.Linear(6, 6),
        up=nn.Linear(6, 14),
        down=nn.Linear(14, 6),
        head=nn.Linear(6, 3),
    )


MAKE = {name: (make, shape) for name, (make, shape, _) in CURVED.items()} | {
    "ReLU attention": (rectified, (4, 6))
}


@cache
def network(name: str) -> Graph:
    make, shape = MAKE[name]
    return read(seeded(make()).eval(), shape, smooth=True)


def inside(
    x: Tensor, radius: float, norm: float, domain: Domain, count: int, seed: int = 0
) -> Tensor:
    """Points of each sample's ball cut by the box, `(count, N, *shape)`: most of them on its
    boundary.
    """
    g = torch.Generator().manual_seed(seed)
    d = torch.randn(count, *x.shape, dtype=torch.float64, generator=g)
    if norm == INF:
        d = d.sign() * radius
    else:
        if norm == 1:
            d = d**5  # a few entries do most of it
        size = torch.linalg.vector_norm(d.flatten(2), norm, dim=2)
        d = d * (radius / size).reshape(count, len(x), *[1] * (x.ndim - 1))
    d[: count // 4] *= torch.rand(count // 4, *[1] * x.ndim, dtype=torch.float64, generator=g)
    points = x + d * (1 - 1e-12)
    return points if domain is None else points.clamp(*domain)


def margins_at(graph: Graph, points: Tensor, y: Tensor) -> Tensor:
    """`theta_y - theta_j` at `(count, N, *shape)`: `(count, N, K)`."""
    z = graph.logits(points.flatten(0, 1)).reshape(*points.shape[:2], -1)
    return z.gather(2, y.expand(len(z), -1)[:, :, None]) - z


@pytest.mark.few(5)
@pytest.mark.slow_cases("vision*", "*-1.0-*", "*-inf-*")
@pytest.mark.parametrize(("norm", "domain"), [(1.0, None), (2.0, BOX), (INF, BOX), (INF, None)])
@pytest.mark.parametrize("name", MAKE)
def test_values_stay_in_their_spans_and_margins_above_their_bounds(
    name: str, norm: float, domain: Domain
) -> None:
    graph = network(name)
    g = torch.Generator().manual_seed(1)
    x = torch.rand(2, *graph.nodes[0].shape, dtype=torch.float64, generator=g)
    y = graph.logits(x).argmax(1)
    for radius in (1e-6, 0.03, 0.5):
        balls = Balls.make(x, torch.full((2,), radius, dtype=torch.float64), norm, domain)
        sweep = Sweep(graph, balls).run()
        points = inside(x, radius, norm, domain, 60)
        for i, value in enumerate(graph.values(points.flatten(0, 1))):
            d = value.reshape(60, 2, *value.shape[1:]) - sweep.centre[i]
            low, high = sweep.spans[i]
            noise = 1e-13 * value.abs().amax()
            assert (d >= low - noise).all() and (d <= high + noise).all(), (
                f"node {i} leaves its span at radius {radius}"
            )
        lower = margin_bounds(graph, x, y, radius, norm, domain)
        assert (margins_at(graph, points, y) >= lower - 1e-12).all()


@pytest.mark.slow_cases("vision-*")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["pre-LN", "post-LN, batch second", "vision", "causal", "gate"])
def test_small_balls_are_bounded_to_first_order(name: str, norm: float) -> None:
    """The margin falls by radius times the dual norm of its gradient, and the bound by no more
    than that and a square.
    """
    graph = network(name)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, *graph.nodes[0].shape, dtype=torch.float64, generator=g)
    z = graph.logits(x)
    y = z.argmax(1)
    rows = jacobians(graph, x.flatten(1))
    slope = torch.linalg.vector_norm(rows[torch.arange(2), y][:, None] - rows, dual(norm), dim=2)
    losses = []
    for radius in (1e-3, 1e-4):
        fall = (z.gather(1, y[:, None]) - z) - margin_bounds(graph, x, y, radius, norm, None)
        assert (fall >= radius * slope * (1 - 0.05) - 1e-12).all(), (
            "the bound is above what the network does"
        )
        losses.append((fall - radius * slope).abs().amax() / (radius * slope.max()))
    assert losses[1] < 0.05 and losses[1] < 0.2 * losses[0] + 1e-6, (
        "what is lost is of second order"
    )


@pytest.mark.parametrize("norm", NORMS)
def test_how_far_a_matrix_stretches_a_ball(norm: float) -> None:
    g = torch.Generator().manual_seed(7)
    x = torch.rand(2, 8, dtype=torch.float64, generator=g)
    balls = Balls.make(x, torch.tensor([0.3, 2.0], dtype=torch.float64), norm, BOX)
    a = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=g)
    a[:, 1] = a[:, 1, :, :1] * a[:, 1, :1]  # of rank 1
    start, found = balls.stretch(a)
    low, high = balls.box
    if norm == INF:
        corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 8)
        d = low[:, None] + (high - low)[:, None] * corners
    else:
        d = inside(x, 1.0, norm, None, 4000).transpose(0, 1) - x[:, None]
        d = torch.minimum(
            torch.maximum(d * balls.radius[:, None, None], -balls.below[:, None]),
            balls.above[:, None],
        )
    true = torch.linalg.vector_norm(
        torch.einsum("ntgi,nmi->nmtg", a, d) - start[:, None], dim=3
    ).amax(1)
    assert (true <= found).all()
    if norm == INF:
        assert torch.allclose(true[:, 1], found[:, 1]) and (found < 1.3 * true).all()
    free = Balls.make(x, balls.radius, norm, None)
    if norm == 2:
        assert torch.allclose(
            free.stretch(a)[1], balls.radius[:, None] * torch.linalg.matrix_norm(a, 2)
        )
    if norm == 1:
        assert torch.allclose(free.stretch(a)[1], balls.radius[:, None] * a.norm(dim=2).amax(2))


@pytest.mark.few(4)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["pre-LN", "vision", "ReLU attention"])
def test_rows_are_no_longer_than_their_bound(
    name: str, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(name)
    seen: list[tuple[Any, ...]] = []

    def record(self: InputExtent, k: int, axes: tuple[int, ...]) -> Tensor:
        found = length(self, k, axes)
        j = self.node.inputs[k]
        low, high = self.sweep.spans[j]
        seen.append(
            (
                j,
                axes,
                (low + high) / 2,
                found,
                torch.linalg.vector_norm((high - low) / 2, dim=[k + 1 for k in axes]),
            )
        )
        return found

    length = InputExtent.length
    monkeypatch.setattr(InputExtent, "length", record)
    g = torch.Generator().manual_seed(8)
    x = torch.rand(2, *graph.nodes[0].shape, dtype=torch.float64, generator=g)
    radius = 0.05
    sweep = Sweep(
        graph, Balls.make(x, torch.full((2,), radius, dtype=torch.float64), norm, BOX)
    ).run()
    points = inside(x, radius, norm, BOX, 200)
    values = graph.values(points.flatten(0, 1))
    shorter = 0
    for j, axes, middle, found, box in seen:
        d = values[j].reshape(200, 2, *values[j].shape[1:]) - sweep.centre[j] - middle
        size = torch.linalg.vector_norm(d, dim=[k + 2 for k in axes], keepdim=True)
        assert (size <= found + 1e-13).all()
        shorter += int((found.flatten() < 0.9 * box.flatten()).sum())
    assert seen and shorter > 0 and not sweep.spreads


def test_the_bounds_of_a_sample_do_not_depend_on_its_batch() -> None:
    graph = network("vision")
    g = torch.Generator().manual_seed(3)
    x = torch.rand(5, *graph.nodes[0].shape, dtype=torch.float64, generator=g)
    y = torch.tensor([0, 1, 2, 0, 1])
    radius = torch.tensor([0.01, 0.02, 0.001, 0.03, 0.02], dtype=torch.float64)
    together = margin_bounds(graph, x, y, radius, INF, BOX)
    alone = torch.cat(
        [
            margin_bounds(graph, x[i : i + 1], y[i : i + 1], radius[i : i + 1], INF, BOX)
            for i in range(5)
        ]
    )
    assert torch.allclose(together, alone, rtol=1e-9, atol=1e-11)


def test_single_precision_planes_are_sound() -> None:
    """Rows in float32 through planes, at a radius where rounding is all that there is to bound."""
    graph = network("ReLU attention")
    g = torch.Generator().manual_seed(4)
    x = 30 * torch.randn(4, *graph.nodes[0].shape, dtype=torch.float64, generator=g)
    for radius in (1e-9, 1e-5, 0.1):
        sweep = Sweep(
            graph, Balls.make(x, torch.full((4,), radius, dtype=torch.float64), INF, None)
        ).run()
        points = inside(x, radius, INF, None, 60)
        last = len(graph.nodes) - 1
        eye = torch.eye(3).repeat(4, 1)
        owner = torch.arange(4).repeat_interleave(3)
        d = graph.logits(points.flatten(0, 1)).reshape(60, 4, 3) - sweep.centre[last]
        for kind in (sweep.fast, sweep.exact):
            constant, a, rows = sweep.substitute(kind, last, eye.to(kind.dtype), owner, False)
            upper = (constant + sweep.inputs.upper(a, rows)).reshape(4, 3)
            assert (d <= upper + 1e-13 * sweep.centre[last].abs().amax()).all()


def test_branching_on_relus_proves_more_than_linear_bounds() -> None:
    graph = network("ReLU attention")
    g = torch.Generator().manual_seed(6)
    x = torch.randn(6, *graph.nodes[0].shape, dtype=torch.float64, generator=g)[5:]
    y = graph.logits(x).argmax(1)
    radius = 1.05 * ws.radii(graph, x, y, INF, None, "crown").values
    sweep = Sweep(graph, Balls.make(x, radius, INF, None)).run()
    lower = margins(sweep, y)[0]
    rivals = int((lower[0] < 0).sum())
    found = branched(sweep, lower, [0], y, [200])[0]
    assert rivals and found.proved and found.count > rivals
    far = ws.nearest(graph.logits, x, y, INF, domain=None, passes=200).distances
    assert (radius <= far).all()
    sweep = Sweep(graph, Balls.make(x, 1.01 * far, INF, None)).run()
    found = branched(sweep, margins(sweep, y)[0], [0], y, [200])[0]
    assert not found.proved, "a ball with a flip inside cannot be proved"


@pytest.mark.parametrize("name", ["pre-LN", "ReLU attention", "gate"])
def test_overflows_prove_nothing_and_stop_nothing(name: str) -> None:
    graph = network(name)
    x = torch.rand(
        2, *graph.nodes[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    y = graph.logits(x).argmax(1)
    for norm in NORMS:
        for radius in (1e20, 1e60):
            lower = margin_bounds(graph, x, y, radius, norm, None)
            assert (
                not torch.isnan(lower).any()
                and (lower.scatter(1, y[:, None], INF).amin(1) < 0).all()
            )


def test_attention_without_a_row_to_attend_to_is_refused() -> None:
    mask = torch.zeros(3, 3)
    mask[0] = -INF
    model = Net(lambda m, x: m.a(((x @ x.mT) + mask).softmax(-1).flatten(1)), a=nn.Linear(9, 2))
    with pytest.raises(ws.InputError, match="all entries are masked"):
        read(seeded(model).float(), (3, 4), smooth=True)


@cache
@pytest.mark.parametrize("wide", [0.0, 1e3, 1e14, 1e22])
def test_planes_of_rows_with_entries_far_down(wide: float) -> None:
    """Masks by large numbers, whose rounding is wider than all scores: they add nothing where the
    others stay above them, and count where these may fall as far.
    """
    g = torch.Generator().manual_seed(3)
    count, size = 400, 5
    c = 3 * torch.randn(count, size, generator=g, dtype=torch.float64)
    c[:, 1] -= 40.0
    c[:, 0] = -1500.0 - 2 * wide
    r = torch.rand(count, size, generator=g, dtype=torch.float64)
    r[1::4, 2:] *= 30
    r[2::4, 1:] *= 3000  # others may fall below the mask
    r[3::4, 1] *= 3000
    r[:, 0] = wide
    curve = Softmax()
    plane = curve.plane([c], [(-r, r)])
    for k in range(200):
        d = r * (2 * torch.rand(count, size, generator=g, dtype=torch.float64) - 1)
        d = torch.where(torch.rand(count, 1, generator=g) < 0.5, r * d.sign(), d)
        apart = curve.value(c + d) - curve.value(c) - plane.forward(d) - plane.off
        assert (apart.abs() <= plane.far + 1e-15).all(), k
    assert plane.far[::4, 2:].max() < 0.6  # and they are no wider than without the mask
    bare = curve.plane([c[:, 1:]], [(-r[:, 1:], r[:, 1:])])
    assert torch.allclose(plane.far[::4, 1:], bare.far[::4], rtol=1e-3, atol=1e-12)


def digits(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    x, y = ws.zoo.data("digits")
    return ws.zoo.load("digits-vit-adv").double(), x[:count].double(), y[:count]


@pytest.mark.slow
@pytest.mark.parametrize("norm", [2, "inf"])
def test_radii_of_a_vision_transformer_lie_below_its_flips(norm: int | str) -> None:
    model, x, y = digits(2)
    radii = ws.radii(model, x, y, norm, tolerance=0.3)
    flips = ws.nearest(model, x, y, norm, passes=100)
    assert radii.method == "auto" and not radii.exact[radii.values > 0].any()
    assert (radii.values <= flips.distances).all()
    right = model(x).argmax(1) == y
    floor = 0.005 if norm == "inf" else 0.015
    assert (radii.values[right] > floor).all() and (radii.values[~right] == 0).all()
    curve = ws.risk_curve(flips, radii, order=1)
    certified, attacked = curve(0.002)
    assert 0 < certified <= attacked


def test_verify_at_one_eps() -> None:
    model, x, y = digits(2)
    small, large = (
        ws.verify(model, x, y, ws.Threat("inf", "inf", eps), method="crown").proved
        for eps in (0.004, 0.5)
    )
    assert torch.equal(small, model(x).argmax(1) == y) and not large.any()


def test_a_vision_library_s_block_from_the_public_side() -> None:
    model = seeded(Vision(True)).eval()
    g = torch.Generator().manual_seed(5)
    x = torch.rand(4, 1, 4, 4, dtype=torch.float64, generator=g)
    y = model(x).argmax(1)
    found = ws.radii(model, x, y, "inf")
    assert (found.values > 0).all()
    flips = ws.nearest(model, x, y, "inf", passes=100)
    assert (found.values <= flips.distances).all()
