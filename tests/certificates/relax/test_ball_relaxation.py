"""Balls and boxes together: sound for any multiplier, never looser than CROWN, tight where layers
do not stretch.
"""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.rescaled import NORMS, PIECEWISE, case, inside, random_graph
from support.rounding import MODES, rounded
from wassail.certificates.graph.reader import read
from wassail.certificates.relax import ball_margins as margins_of
from wassail.certificates.relax.ball_margins import ball_margins
from wassail.certificates.relax.ball_relaxation import BallLayer, BallRelaxation
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margin_bounds
from wassail.certificates.relax.lines import Lines
from wassail.certificates.relax.norms import Reach

INF = math.inf
BOX = (0.0, 1.0)
KINDS = list(PIECEWISE)


def least(lower: Tensor, y: Tensor) -> Tensor:
    return lower.scatter(1, y[:, None], INF).amin(1)


@pytest.mark.few(4)
@pytest.mark.slow_cases("max pooled-inf", "*-1.0", "* pooled-2.0", "joined-2.0")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_never_above_the_truth_and_never_below_crown(kind: str, norm: float) -> None:
    for seed in (0, 1):
        graph = random_graph(kind, seed)
        given = case(graph, seed, norm)
        known = torch.isfinite(given.flips)
        radius = torch.where(known, given.flips * (1 + 1e-6), 0.2)
        found = ball_margins(graph, given.x, given.y, radius, norm, BOX, 8, 2)
        assert not (least(found, given.y)[known] > 0).any()
        radius = torch.where(known, given.flips / 2, 0.1)
        found = ball_margins(graph, given.x, given.y, radius, norm, BOX, 8, 2)
        crown = margin_bounds(graph, given.x, given.y, radius, norm, BOX)
        assert (found >= crown - 1e-9 * (1 + crown.abs())).all()
        points = inside(given.x, radius, norm, 60, seed)
        for some in points:
            z = graph.logits(some)
            assert (z.gather(1, given.y[:, None]) - z >= found - 1e-9).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_stay_within_their_reach(kind: str, norm: float) -> None:
    graph = random_graph(kind, 3)
    given = case(graph, 3, norm)
    radius = torch.full((len(given.x),), 0.2, dtype=torch.float64)
    reach = Reach(graph, Balls.make(given.x, radius, norm, BOX)).run()
    here = graph.values(given.x)
    for some in inside(given.x, radius, norm, 30, 1):
        for i, there in enumerate(graph.values(some)):
            moved = torch.linalg.vector_norm((there - here[i]).flatten(1), dim=1)
            assert (moved <= reach.radius[i]).all()
            if i in reach.ranges:
                low, high = reach.ranges[i]
                assert ((there >= low) & (there <= high)).all()


def perceptron(sizes: tuple[int, ...], seed: int, orthogonal: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layer = nn.Linear(a, b).double()
        if orthogonal:
            nn.init.orthogonal_(layer.weight)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_any_slopes_and_multipliers_prove_only_what_is_true() -> None:
    graph = read(perceptron((6, 12, 12, 4), 1), (6,))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 6, generator=generator, dtype=torch.float64)
    radius = torch.full((3,), 0.4, dtype=torch.float64)
    balls = Balls.make(x, radius, 2.0, None)
    reach = Reach(graph, balls).run()
    sweep = Sweep(graph, balls, 0, reach.ranges).run()
    spheres = BallRelaxation(sweep)
    last = len(graph.nodes) - 1
    owner = torch.tensor([0, 0, 1, 2])
    rows = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    points = inside(x, radius, 2.0, 300, 2)
    away = torch.stack([graph.logits(p) for p in points]) - graph.logits(x)
    true = (away[:, owner] * rows).sum(2).amax(0)
    layers = spheres._layers(sweep.exact, last, owner, {})
    assert spheres.balls.first_layer is not None and spheres.balls.quadratic
    signs = {i: torch.zeros(4, *layer.c.shape[1:], dtype=torch.int8) for i, layer in layers.items()}
    for turn in range(30):
        slopes = {}
        for i, layer in layers.items():
            shape = layer.free.shape
            up, down = (
                2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
                for _ in range(2)
            )
            lam = 12 * torch.rand(4, generator=generator, dtype=torch.float64) - 8
            slopes[i] = (up, down, lam)
        assert (spheres._claim(last, rows, owner, slopes, {}) >= true).all()
        # The points on one side of some kinks: the bounds with those sides hold for them.
        sides = {i: sign.clone() for i, sign in signs.items()}
        keep = torch.ones(len(points), 4, dtype=torch.bool)
        for i in sides:
            k = int(torch.randint(12, (1,), generator=generator))
            sides[i][:, k] = 1 if turn % 2 else -1
            value = torch.stack([graph.values(p)[graph.nodes[i].inputs[0]][:, k] for p in points])
            keep &= ((value > 0) == bool(turn % 2))[:, owner]
        moved = (away[:, owner] * rows).sum(2)
        best = torch.where(keep, moved, -INF).amax(0)
        assert (spheres._claim(last, rows, owner, slopes, sides) >= best).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_a_ball_moves_no_farther(kind: str) -> None:
    """The neurons that count, at the inputs of each layer of ReLUs."""
    graph = random_graph(kind, 4)
    given = case(graph, 4, 2.0)
    radius = torch.full((len(given.x),), 0.2, dtype=torch.float64)
    balls = Balls.make(given.x, radius, 2.0, BOX)
    reach = Reach(graph, balls).run()
    sweep = Sweep(graph, balls, 0, reach.ranges).run()
    links = BallRelaxation(sweep).balls
    here = graph.values(given.x)
    for some in inside(given.x, radius, 2.0, 30, 1):
        there = graph.values(some)
        for i, free in links.free.items():
            j = graph.nodes[i].inputs[0]
            moved = ((there[j] - here[j]) * free).flatten(1).norm(dim=1)
            assert (moved <= links.radius[i] * (1 + 1e-12)).all()
            if i in links.quadratic:
                link = links.quadratic[i]
                before = (there[link.source] - here[link.source]).flatten(1).norm(dim=1)
                most = link.square * before.square() + link.rest
                assert (moved.square() <= most * (1 + 1e-12)).all()


@pytest.mark.slow
def test_splits_prove_more_and_only_what_is_true() -> None:
    """Where a bound misses by little, a few domains prove it; flips are never proved."""
    model = perceptron((8, 24, 12, 3), 1, orthogonal=True)
    graph = read(model, (8,))
    x = torch.rand(8, 8, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    flips = ws.nearest(model, x, y, 2, None, passes=300).distances
    plain = least(ball_margins(graph, x, y, 0.85 * flips, 2.0, None, depth=0), y)
    split = least(ball_margins(graph, x, y, 0.85 * flips, 2.0, None), y)
    assert (split >= plain).all()
    assert int(((split > 0) & (plain <= 0)).sum()) >= 2
    beyond = ball_margins(graph, x, y, flips * (1 + 1e-6), 2.0, None)
    assert (least(beyond, y) <= 0).all()
    alone = least(ball_margins(graph, x[2:3], y[2:3], 0.85 * flips[2:3], 2.0, None), y[2:3])
    assert torch.allclose(alone, split[2:3], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_splits_in_small_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many domains there are, few are bounded at once, and all are."""
    model = perceptron((8, 24, 12, 3), 1, orthogonal=True)
    graph = read(model, (8,))
    x = torch.rand(8, 8, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    flips = ws.nearest(model, x, y, 2, None, passes=300).distances
    bound = BallRelaxation.bound
    asked: list[int] = []

    def watched(self: BallRelaxation, last: int, rows: Tensor, *rest: Any) -> Any:
        asked.append(len(rows))
        return bound(self, last, rows, *rest)

    monkeypatch.setattr(BallRelaxation, "bound", watched)
    where = (graph, x, y, 0.85 * flips, 2.0, None)
    whole = ball_margins(*where, inner=False)
    assert max(asked) > 2
    asked.clear()
    monkeypatch.setattr(margins_of, "DOMAINS", 1)
    monkeypatch.setattr(margins_of, "_together", lambda graph: 2)
    parts = ball_margins(*where, inner=False)
    assert asked and max(asked) <= 2
    # What is proved is the same. An ascent ends where its row is proved, so that bounds above 0
    # depend on how sums are rounded; the others do not.
    assert ((parts > 0) == (whole > 0)).all()
    open_ = whole <= 0
    assert torch.allclose(parts[open_], whole[open_], rtol=0, atol=1e-4 * float(whole.abs().max()))
    assert torch.equal(parts > 0, whole > 0)


@pytest.mark.slow
def test_layers_that_do_not_stretch_lose_little() -> None:
    """A network of orthogonal layers is 1-Lipschitz: no radius is below margin / sqrt 2."""
    model = perceptron((20, 40, 40, 40, 5), 0, orthogonal=True)
    x = torch.rand(6, 20, dtype=torch.float64)
    z = model(x).detach()
    y = z.argmax(1)
    top = z.topk(2).values
    simple = (top[:, 0] - top[:, 1]) / math.sqrt(2)
    crown = ws.radii(model, x, y, 2, None, "crown").values
    found = ws.radii(model, x, y, 2, None, "ball")
    assert found.method == "ball"
    assert (found.values >= 0.97 * simple).all()
    assert found.values.mean() > 1.2 * crown.mean()
    flips = ws.nearest(model, x, y, 2, None, passes=200).distances
    assert (found.values <= flips).all()


@pytest.mark.slow_cases("1", "2")
@pytest.mark.parametrize("norm", [1, 2])
def test_verify_and_radii_agree(norm: int) -> None:
    model = perceptron((8, 20, 20, 4), 3).float()
    x = torch.rand(2, 8)
    y = model(x).argmax(1)
    found = ws.radii(model, x, y, norm, BOX, "ball", tolerance=0.1).values
    assert (found >= ws.radii(model, x, y, norm, BOX, "crown", tolerance=0.1).values).all()
    threat = ws.Threat(norm, INF, 0.1, BOX)
    inner = ws.verify(model, x, y, threat, "ball", at=found * 0.999).proved
    assert inner.all()


def test_neurons_that_cannot_move_and_layers_of_zeros() -> None:
    """A neuron without weights and bias has its kink at both ends of its range."""
    model = perceptron((20, 40, 40, 40, 5), 0, orthogonal=True)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[:3] = 0
            layer.bias[:3] = 0
    graph = read(model, (20,))
    x = torch.rand(4, 20, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    crown = margin_bounds(graph, x, y, 0.6, 2.0, None)
    found = ball_margins(graph, x, y, 0.6, 2.0, None)
    assert torch.isfinite(found).all()
    assert (found > crown + 1e-6).any()
    for some in inside(x, torch.full((4,), 0.6, dtype=torch.float64), 2.0, 200, 0):
        z = graph.logits(some)
        assert (z.gather(1, y[:, None]) - z >= found - 1e-9).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slope", [0.0, 1 / 3, 1 - 2.0**-30])
def test_one_layer_in_every_rounding_mode(mode: str, slope: float) -> None:
    """The maxima of one layer with g near the slopes, where everything cancels: never below the
    exact values at points of the interval.
    """
    generator = torch.Generator().manual_seed(5)
    size = 8
    c, w, low, high = (
        torch.rand(1, size, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    c = 2 * c - 1
    w = 2 * w - 1
    low = -low
    # One neuron cannot move: its kink is at both ends of its range.
    c[0, 0] = 0.0
    low[0, 0] = 0.0
    high[0, 0] = 0.0
    zero = torch.zeros_like(c)
    flat = torch.tensor(slope, dtype=torch.float64)
    here = torch.where(c > 0, c, flat * c)
    line = Lines(zero, zero, zero, zero)
    free = torch.ones_like(c, dtype=torch.bool)
    rho = torch.ones(1, dtype=torch.float64)
    layer = BallLayer(line, free, c, here, low, high, flat, zero, rho)
    log_lam = torch.full((1,), -40.0, dtype=torch.float64)
    for sigma in (1.0, slope, (1 + slope) / 2):
        up = torch.full_like(w, sigma)
        with rounded(mode):
            g, total = layer.pull(w, up, up, log_lam, (size + 16) * 2.0**-52)
        exact = Fraction(0)
        for i in range(size):
            ends = [low[0, i], high[0, i], torch.clamp(-c[0, i], low[0, i], high[0, i])]
            ours = [Fraction(float(v)) for v in (w[0, i], g[0, i], c[0, i], here[0, i])]
            values = []
            for t in (Fraction(float(end)) for end in ends):
                v = ours[2] + t
                f = v if v > 0 else Fraction(slope) * v
                values.append(ours[0] * (f - ours[3]) - ours[1] * t)
            exact += max(values)
        assert Fraction(float(total)) >= exact - Fraction(float(log_lam.exp())) * size
