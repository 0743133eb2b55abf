"""APGD bisected to the nearest flip, and PDPGD: closed forms, conformance, exact budgets,
broken signs.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.attacks.apgd import _checkpoints, climb
from wassail.attacks.apgd_min import _goal, apgd_engine
from wassail.attacks.minimal.primal_dual import proximal
from wassail.attacks.minimal.run import find_flips
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pdpgd import pdpgd_engine
from wassail.errors import InputError
from wassail.geometry import inner, steepest, vector_norm
from wassail.losses import margin
from wassail.network import Network, Tape
from wassail.testing import LinearClassifier, check_attack, samples

INF = math.inf
NORMS = (1.0, 2.0, INF)
DOMAINS = (None, (0.0, 1.0))
QUICK: dict[str, Any] = {
    "step": 0.3,
    "fall": 0.1,
    "dual_step": 0.2,
}  # PDPGD for 100 steps instead of the authors' 500
ENGINES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "apgd": (apgd_engine, {}),
    "apgd-margin": (apgd_engine, {"loss": "margin", "steps": 10}),
    "apgd-targeted": (apgd_engine, {"loss": "targeted", "steps": 10}),
    "pdpgd": (pdpgd_engine, QUICK),
    "pdpgd-authors": (pdpgd_engine, {}),
}
# How much farther than the exact flip an engine may end on linear classifiers: the worst sample for
# two classes, where the rival is given, and the mean for several, where a loss that follows the
# largest logit need not find the nearest class.
WORST = {
    "apgd": 1.005,
    "apgd-margin": 1.005,
    "apgd-targeted": 1.005,
    "pdpgd": 1.15,
    "pdpgd-authors": 1.4,
}
MEAN = {
    "apgd": 1.05,
    "apgd-margin": 1.05,
    "apgd-targeted": 1.05,
    "pdpgd": 1.06,
    "pdpgd-authors": 1.2,
}


def problem(classes: int, n: int = 40, shape: tuple[int, ...] = (3, 2, 2)):
    model = LinearClassifier.random(classes, math.prod(shape), seed=classes)
    x, y = samples(n, shape, classes)
    y[4:] = model(x).argmax(1)[4:]  # mostly right
    return model, x, y


def find(name: str, model, x, y, norm, domain, passes=None, batch_size=None, **options):
    engine, chosen = ENGINES[name]
    return find_flips(
        engine,
        name,
        model,
        x,
        y,
        norm,
        domain,
        passes=passes,
        batch_size=batch_size,
        options={**chosen, **options},
    )


def check_distances(
    name: str, norm: float, domain, classes: int, passes: int | None = None
) -> None:
    model, x, y = problem(classes)
    exact = model.distances(x, y, norm, domain)
    flips = find(name, model, x, y, norm, domain, passes)
    assert (flips.distances >= exact - 1e-12).all()
    assert torch.equal(flips.distances == 0, exact == 0)
    assert torch.equal(flips.success, torch.isfinite(exact))
    factor = (flips.distances / exact)[torch.isfinite(exact) & (exact > 0)]
    assert factor.mean() <= MEAN[name]
    assert classes > 2 or factor.max() <= WORST[name]


@pytest.mark.slow_cases(
    "pdpgd-10-*-inf", "apgd-2-domain1-1.0", "apgd-2-domain1-2.0", "apgd-2-None-*"
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize(("name", "classes"), [("apgd", 2), ("apgd", 10), ("pdpgd", 10)])
def test_close_above_the_exact_distance(name: str, classes: int, norm: float, domain) -> None:
    check_distances(name, norm, domain, classes, 100 if name == "apgd" and classes > 2 else None)


@pytest.mark.slow_cases("pdpgd-inf", "pdpgd-authors-inf", "*-1.0")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["apgd-margin", "apgd-targeted", "pdpgd", "pdpgd-authors"])
def test_variants_are_close_above_the_exact_distance(name: str, norm: float) -> None:
    check_distances(name, norm, (0.0, 1.0), 4 if name == "apgd-targeted" else 2)


def attack(name: str, **keywords):
    def run(model, x, y, threat, batch_size=None):
        flips = find(
            name, model, x, y, threat.norm, threat.domain, batch_size=batch_size, **keywords
        )
        return ws.allocate(flips, threat.eps, threat.order)

    return run


@pytest.mark.slow_cases("pdpgd-inf", "pdpgd-1.0", "apgd-1.0", "apgd-2.0")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["apgd", "pdpgd"])
def test_conformance(name: str, norm: float) -> None:
    if (
        name == "pdpgd" and norm == 1
    ):  # with fewer steps it does not settle: the norm's pull outlasts them
        check_attack(
            attack(name, steps=40), norms=(norm,), orders=(1.0,), domains=(None,), classes=(2,)
        )
    else:
        check_attack(
            attack(name, passes=16),
            norms=(norm,),
            orders=(1.0,),
            domains=((0.0, 1.0),),
            classes=(4,),
        )


@pytest.mark.parametrize("name", ["apgd", "pdpgd"])
def test_a_wrong_sign_is_caught(name: str, monkeypatch) -> None:
    pull = Tape.pull  # every gradient comes from here
    monkeypatch.setattr(Tape, "pull", lambda *arguments, **options: -pull(*arguments, **options))
    with pytest.raises(AssertionError):
        check_distances(name, 2.0, (0.0, 1.0), 2)
    with pytest.raises(AssertionError):
        check_attack(attack(name, passes=20), norms=(INF,), orders=(INF,))


class Stubborn(nn.Module):
    """Ten classes, and class 0 wins everywhere: every sample spends all it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.stack([(x.flatten(1) ** 2).sum(1) * c for c in range(10)], 1)
        return z + 1e4 * nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10)


@pytest.mark.slow_cases("pdpgd-inf", "apgd-2.0", "apgd-1.0")
@pytest.mark.filterwarnings("ignore:.*samples were not searched:wassail.errors.ModelWarning")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["apgd", "pdpgd"])
def test_budgets_are_kept_exactly(name: str, norm: float) -> None:
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(3, dtype=torch.int64)
    shares = []
    for passes in (1, 2, 5, 13, 60):
        for classes in (2, 10):
            model, a, b = problem(classes, 10, (7,))
            flips = find(name, model, a, b, norm, (0, 1), passes)
            spent = flips.forwards + flips.backwards
            wrong = flips.distances == 0
            assert (spent <= passes).all() and (spent[~wrong] >= min(passes, 2) - 1).all()
            assert (
                wrong.any()
                and (flips.forwards[wrong] == 1).all()
                and (flips.backwards[wrong] == (passes > 2)).all()  # the gradient at the sample
            )
            shares.append(flips.success[~wrong].double().mean().item())
        stuck = find(name, Stubborn(), x, zeros, norm, (0, 1), passes)
        spent = stuck.forwards + stuck.backwards
        assert not stuck.success.any() and (spent <= passes).all() and (spent >= passes - 1).all()
    assert shares[0] == 0 and shares[-1] == 1


@pytest.mark.parametrize("name", ["apgd", "pdpgd"])
def test_passes_without_a_budget(name: str) -> None:
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(3, dtype=torch.int64)
    flips = find(
        name,
        Stubborn(),
        x,
        zeros,
        2,
        (0, 1),
        **({"rounds": 3, "steps": 7} if name == "apgd" else {"steps": 20}),
    )
    forwards, backwards = (1 + 3 * 8, 1 + 3 * 7) if name == "apgd" else (1 + 20, 20)
    assert flips.forwards.tolist() == [forwards] * 3 and flips.backwards.tolist() == [backwards] * 3


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_apgd_reaches_the_worst_point_of_a_ball(norm: float, domain) -> None:
    """Fixed radii, one for each sample, on a linear classifier that they do not flip: the best
    loss is known.
    """
    model, x, _ = problem(2, 20)
    y = model(x).argmax(1)
    radius = 0.9 * model.distances(x, y, norm, domain).clamp(max=3.0)
    state = Tracker(Network(model, torch.arange(20)), x, y, norm, domain, None)
    rows = torch.arange(20).flip(0)
    best, flipped = climb(state, rows, x[rows], radius[rows], 40, _goal(state, "margin", None))
    length = vector_norm(best - x[rows], norm)
    assert not flipped.any() and (length <= radius[rows] * (1 + 1e-12)).all()
    assert domain is None or (best.min() >= 0 and best.max() <= 1)
    w = (model.weight[1 - y] - model.weight[y]).detach().reshape(x.shape)
    gain = inner(w, steepest(x, w, norm, radius, domain))[rows]
    reached = (margin(model(best), y[rows]) - margin(model(x), y)[rows]).detach()
    assert (reached <= gain + 1e-9).all() and (reached >= 0.98 * gain).all()
    assert (state.network.forwards == 1 + 41).all() and (state.network.backwards == 40).all()


class Curved(nn.Module):
    """Three classes with curved gaps; class 0 is far ahead, so that nothing flips."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.stack(
            [0 * x[:, 0], (7 * x).sin().sum(1), (5 * x[:, 0] * x[:, 1]).cos() - x[:, 2] ** 2], 1
        )
        return z + torch.tensor([50.0, 0.0, 0.0], dtype=x.dtype)


def plain_apgd(x: torch.Tensor, radius: float, norm: float, steps: int, checks: list[int]):
    """One sample `(n,)`, no box, as the paper's Algorithm 1 reads, from the sample: the
    iterates and the best of them.
    """

    def look(p):
        p = p.clone().requires_grad_(True)
        z = Curved()(p[None])[0]
        loss = z[1:].max() - z[0]
        return loss.item(), torch.autograd.grad(loss, p)[0]

    def ball(p):
        d = p - x
        return x + (
            d.clamp(-radius, radius)
            if norm == INF
            else d * min(1.0, radius / max(float(d.norm()), 1e-300))
        )

    size = 2 * radius
    points = [x]
    losses = [look(x)[0]]
    previous = x
    point = x
    g = look(x)[1]
    best = point
    best_loss = losses[0]
    best_g = g
    seen = -INF
    halved = True
    last = 0
    for k in range(steps):
        if k in checks:
            rises = sum(losses[i + 1] > losses[i] for i in range(last, k))
            halve = rises <= 0.75 * (k - last) or (not halved and seen >= best_loss)
            seen = best_loss
            halved = halve
            last = k
            if halve:
                size = size / 2
                point = best
                g = best_g
        u = ball(point + size * (g.sign() if norm == INF else g / g.norm()))
        following = u if k == 0 else ball(point + 0.75 * (u - point) + 0.25 * (point - previous))
        previous = point
        point = following
        loss, g = look(point)
        points.append(point)
        losses.append(loss)
        if loss > best_loss:
            best = point
            best_loss = loss
            best_g = g
    return torch.stack(points), best


@pytest.mark.parametrize("norm", [2.0, INF])
def test_apgd_is_the_papers(norm: float) -> None:
    """Iterate by iterate the algorithm of the paper, on a loss with many hills."""
    x = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    radius = torch.linspace(0.2, 1.0, 6, dtype=torch.float64)
    state = Tracker(
        Network(Curved(), torch.arange(6)), x, torch.zeros(6, dtype=torch.int64), norm, None, None
    )
    visited: list[Tensor] = []
    network: Any = state.network
    tape, logits = network.tape, network.logits
    network.tape = lambda points, rows: (visited.append(points), tape(points, rows))[1]
    network.logits = lambda points, rows: (visited.append(points), logits(points, rows))[1]
    best, flipped = climb(state, torch.arange(6), x, radius, 30, _goal(state, "margin", None))
    assert not flipped.any() and len(visited) == 31
    for i in range(6):
        points, top = plain_apgd(x[i], float(radius[i]), norm, 30, list(_checkpoints(30, norm)))
        assert torch.allclose(torch.stack([p[i] for p in visited]), points, atol=1e-9)
        assert torch.allclose(best[i], top, atol=1e-9)


def test_apgd_stops_at_a_flip() -> None:
    model, x, _ = problem(4, 20)
    y = model(x).argmax(1)
    radius = 1.5 * model.distances(x, y, 2.0, None)
    state = Tracker(Network(model, torch.arange(20)), x, y, 2.0, None, None)
    rows = torch.arange(20)
    _, flipped = climb(state, rows, x, radius, 20, _goal(state, "dlr", None))
    assert flipped.any() and torch.equal(flipped, torch.isfinite(state.distance))
    assert (state.distance[flipped] <= radius[flipped] * (1 + 1e-12)).all()
    # the start, then a look and a gradient for each step: two looks are enough on straight
    # boundaries
    assert (state.network.forwards[flipped] == state.network.backwards[flipped] + 1).all()
    assert state.network.backwards[flipped].min() == 2


def test_checkpoints_are_the_papers() -> None:
    assert list(_checkpoints(100, INF)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert list(_checkpoints(100, INF).values()) == [22, 19, 16, 13, 10, 7, 6, 6]
    assert list(_checkpoints(100, 1.0)) == list(range(4, 100, 4))


@pytest.mark.parametrize("norm", NORMS)
def test_proximal_operators(norm: float) -> None:
    v = torch.randn(20, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0, 6, 20, dtype=torch.float64)

    def value(z):
        return weight * vector_norm(z, norm) + vector_norm(z - v, 2) ** 2 / 2

    best = proximal(v, norm, weight)
    assert torch.allclose(best[0], v[0])
    for size in (1e-3, 0.1, 1.0):
        for seed in range(10):
            other = best + size * torch.randn(
                v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(seed)
            )
            assert (value(best) <= value(other) + 1e-12).all()
    assert (value(best) <= value(0.99 * best) + 1e-12).all() and (
        value(best) <= value(torch.zeros_like(v)) + 1e-12
    ).all()


class Flat(nn.Module):
    """No gradient at all where x_0 < 0.5, a linear classifier of two classes elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.where(x[:, 0] < 0.5, -1 + 0 * x[:, 0], x[:, 1] - 0.8)
        return torch.stack([torch.zeros_like(f), f], 1)


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [(1.0, torch.float32), (2.0, torch.float32), (2.0, torch.float64), (INF, torch.float32)],
)
@pytest.mark.parametrize("name", ["apgd", "pdpgd"])
def test_zero_gradients(name: str, norm: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.2, 0.3]], dtype=dtype)
    flips = find(name, Flat(), x, torch.tensor([0, 0]), norm, (0, 1), 100)
    assert torch.isfinite(flips.points).all() and flips.points.dtype == dtype
    assert flips.success.tolist() == [False, True] and 0.6 <= flips.distances[1] < 0.65


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["apgd", "pdpgd"])
def test_batch_sizes_do_not_matter(name: str, norm: float) -> None:
    model, x, y = problem(10, 12, (1, 9))
    one, other = (find(name, model, x, y, norm, (0, 1), 40, size) for size in (None, 5))
    assert torch.equal(one.points, other.points) and torch.equal(one.forwards, other.forwards)
    assert torch.equal(one.backwards, other.backwards) and one.success.any()


@pytest.mark.slow_cases("inf-0.1", "1-4.0")
@pytest.mark.parametrize(("norm", "eps"), [("inf", 0.1), (2, 1.0), (1, 4.0)])
def test_nearer_than_wda_pp_on_digits(norm, eps: float) -> None:
    model, (x, y) = ws.zoo.load("digits-cnn-adv"), ws.zoo.data("digits")
    x = x[:12]
    y = y[:12]
    paper = ws.nearest(model, x, y, norm, method="wda++", eps=eps)
    for name, passes in (("apgd", 100), ("pdpgd", None)):
        flips = find(name, model, x, y, norm, (0, 1), passes)
        assert flips.success.all()
        assert flips.distances.mean() < (1.0 if name == "apgd" else 1.02) * paper.distances.mean()


def test_targets_and_options() -> None:
    model, x, y = problem(4, 10, (8,))
    ranks = [
        find("apgd-targeted", model, x, y, 2, (0, 1), 50, rank=rank).distances for rank in (2, 4, 9)
    ]
    assert not torch.equal(ranks[0], ranks[1]) and torch.equal(ranks[1], ranks[2])
    bad: list[tuple[str, dict[str, Any]]] = [
        ("apgd", {"rounds": 0}),
        ("apgd", {"steps": 0}),
        ("apgd", {"rank": 1}),
        ("apgd", {"loss": "drl"}),
        ("pdpgd", {"steps": 0}),
        ("pdpgd", {"step": -1.0}),
        ("pdpgd", {"ratio": 0.0}),
        ("pdpgd", {"inner": 0}),
    ]
    for name, options in bad:
        with pytest.raises(InputError):
            find(name, model, x, y, 2, (0, 1), **options)


def test_pdpgd_follows_the_width_of_the_box() -> None:
    model, x, y = problem(3, 10)
    wide = LinearClassifier(model.weight.detach() / 4, model.bias.detach())
    for norm in NORMS:
        one = find("pdpgd", model, x, y, norm, (0, 1), steps=20)
        other = find("pdpgd", wide, 4 * x, y, norm, (0, 4), steps=20)
        assert torch.allclose(4 * one.distances, other.distances, rtol=1e-3)


@pytest.mark.parametrize("name", ["apgd", "pdpgd"])
def test_known_flips_are_only_improved(name: str) -> None:
    model, x, y = problem(10, 20)
    engine, options = ENGINES[name]
    for first in ("apgd", "pdpgd-authors"):
        known = find(first, model, x, y, 1, (0, 1), 60)
        better = find_flips(
            engine, name, model, x, y, 1, (0, 1), passes=60, options=options, known=known
        )
        assert (better.distances <= known.distances).all() and (
            better.distances < known.distances
        ).any()
