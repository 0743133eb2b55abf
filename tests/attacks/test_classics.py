"""FGSM, PGD, Carlini-Wagner, DeepFool and FAB as attacks: closed forms, the papers' iterates,
targets, passes, broken parts.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.attacks.cw import cw
from wassail.attacks.deepfool import deepfool
from wassail.attacks.fab import fab
from wassail.attacks.fgsm import fgsm
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pgd import pgd
from wassail.errors import InputError
from wassail.geometry import inner, plane_step, steepest, vector_norm
from wassail.losses import ASCENTS, ce_ascent, margin
from wassail.testing import LinearClassifier, check_attack, samples

INF = math.inf
NORMS = (1.0, 2.0, INF)
BOX = (0.0, 1.0)
SHAPE = (3, 2, 2)
QUICK: dict[str, Any] = {
    "searches": 3,
    "steps": 60,
    "rate": 0.1,
}  # enough of CW for linear classifiers in a box of 12 dimensions
# PGD turns from a random point toward the worst one by a constant angle a step: after 40 steps it
# is this near.
SHARES = {(2.0, True): 0.96, (1.0, True): 0.9}
each_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda r: f"l{r:g}")
each_domain = pytest.mark.parametrize("domain", [None, BOX], ids=["free", "box"])


def problem(classes: int, n: int = 30, shape: tuple[int, ...] = SHAPE):
    """A linear classifier in float64 and samples of which the first two are wrong."""
    model = LinearClassifier.random(classes, math.prod(shape), seed=classes)
    x, _ = samples(n, shape, classes)
    y = model(x).argmax(1)
    y[:2] = (y[:2] + 1) % classes
    return model, x, y


CONFORMING: dict[str, tuple[Any, ...]] = {  # attack, norms, orders, domains, classes
    "fgsm": (fgsm, NORMS, (1.0, INF), (None, BOX), (4,)),
    "fgsm-dlr": (partial(fgsm, loss="dlr"), (2.0,), (INF,), (BOX,), (2,)),
    "pgd": (partial(pgd, steps=4), NORMS, (1.0, 2.0), (None, BOX), (4,)),
    "pgd-clean-start": (
        partial(pgd, steps=4, loss="margin", random_start=False),
        NORMS,
        (INF,),
        (BOX,),
        (2,),
    ),
    "cw": (partial(cw, searches=2, steps=20, rate=0.3), (2.0,), (1.0,), (BOX,), (4,)),
    "deepfool": (deepfool, (1.0, INF), (2.0,), (BOX,), (4,)),
    "fab": (partial(fab, steps=3), (2.0,), (1.0,), (BOX,), (4,)),
    "fab-t": (partial(fab, steps=2, targets=3), (INF,), (INF,), (None,), (4,)),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CONFORMING)
def test_conformance(name: str) -> None:
    attack, norms, orders, domains, classes = CONFORMING[name]
    check_attack(attack, norms=norms, orders=orders, classes=classes, domains=domains)


# ---- closed forms
# --------------------------------------------------------------------------------------------------


def between(exact: torch.Tensor) -> float:
    """A radius in the middle of the widest gap among the middle third of the distances: nobody
    is on the edge.
    """
    some = exact[exact > 0].sort().values
    some = some[len(some) // 3 : -len(some) // 3]
    widest = some.diff().argmax()
    return float(some[widest] + some[widest + 1]) / 2


def check_worst_point(attack, norm: float, domain, share: float = 1.0) -> None:
    """In balls that flip some samples and not others: who flips is known, and so is the largest
    loss of the rest.
    """
    model, x, y = problem(2)
    exact = model.distances(x, y, norm, domain)
    eps = between(exact)
    result = attack(model, x, y, ws.Threat(norm, INF, eps, domain))
    assert (
        torch.equal(result.predicted != y, exact <= eps)
        and 0 < result.accuracy < result.clean_accuracy
    )
    assert (result.distances <= eps).all() and result.verify(model) and (result.weights == 1).all()
    w = (model.weight[1 - y] - model.weight[y]).detach().reshape(x.shape)
    gain = inner(w, steepest(x, w, norm, eps, domain))
    reached = (margin(model(result.points), y) - margin(model(x), y)).detach()
    left = result.predicted == y
    assert (reached <= gain + 1e-9).all() and (reached[left] >= share * gain[left] - 1e-9).all()


@each_norm
@each_domain
@pytest.mark.parametrize("loss", ["ce", "margin", "dlr"])
def test_fgsm_is_exact_for_two_classes(norm: float, domain, loss: str) -> None:
    check_worst_point(partial(fgsm, loss=loss), norm, domain)


@each_norm
@each_domain
@pytest.mark.parametrize("start", [True, False], ids=["random", "clean"])
def test_pgd_is_exact_for_two_classes(norm: float, domain, start: bool) -> None:
    check_worst_point(
        partial(pgd, random_start=start), norm, domain, SHARES.get((norm, start), 1 - 1e-9)
    )


def broken_ascent(z, y):
    value, weight = ce_ascent(z, y)
    return value, -weight


def test_broken_steps_projections_and_losses_are_caught(monkeypatch) -> None:
    broken = {
        "wassail.attacks.fgsm.steepest": (fgsm, lambda *a: -steepest(*a)),
        "wassail.attacks.fgsm.clip": (fgsm, lambda point, domain: point - 1e-3),
        "wassail.attacks.pgd.maximiser": (pgd, lambda g, norm: -g.sign()),
        "wassail.attacks.pgd.project": (pgd, lambda point, center, norm, radius, domain: center),
        "wassail.attacks.pgd.random_point": (
            partial(pgd, steps=1, step=1e-3),
            lambda tracker, rows, *_: tracker.x[rows],
        ),
    }
    for place, (attack, function) in broken.items():
        with monkeypatch.context() as patch:
            patch.setattr(place, function)
            with pytest.raises(AssertionError):
                check_worst_point(attack, INF, BOX)
    monkeypatch.setitem(ASCENTS, "ce", broken_ascent)
    for attack in (fgsm, pgd):
        with pytest.raises(AssertionError):
            check_worst_point(attack, 2.0, BOX)


def visited(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every batch of points that a tracker looks at with a graph, with their rows."""
    seen = []
    tape = Tracker.tape

    def spy(tracker, points, rows):
        seen.append((points.clone(), rows.clone()))
        return tape(tracker, points, rows)

    monkeypatch.setattr(Tracker, "tape", spy)
    return seen


def check_balls(norm: float, domain, monkeypatch) -> None:
    model, x, y = problem(4)
    eps = 0.7 * float(model.distances(x, y, norm, domain)[2:].median())
    seen = visited(monkeypatch)
    pgd(model, x, y, ws.Threat(norm, INF, eps, domain), steps=6)
    assert len(seen) == 7
    for points, rows in seen:
        assert (vector_norm(points - x[rows], norm) <= eps * (1 + 1e-12)).all()
        assert domain is None or (points.min() >= 0 and points.max() <= 1)


@each_norm
@each_domain
def test_pgd_never_leaves_ball_and_box(norm: float, domain, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        check_balls(norm, domain, patch)
    monkeypatch.setattr("wassail.attacks.pgd.project", lambda point, *_: point)
    with pytest.raises(AssertionError):
        check_balls(norm, domain, monkeypatch)


def test_walls_take_no_share_of_a_step() -> None:
    """From a corner of the box, half of whose coordinates are pushed outside, one l2 step still
    has its full length.
    """
    model = LinearClassifier(
        torch.tensor([[0.0] * 8, [1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0, 3.0]]).double(),
        torch.tensor([9.0, 0]).double(),
    )
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]).double()
    y = torch.tensor([0])
    result = pgd(model, x, y, ws.Threat(2, INF, 0.3), steps=1, step=0.2, random_start=False)
    assert abs(float(result.distances) - 0.2) < 1e-9 and torch.equal(result.points[:, :4], x[:, :4])


def test_restarts_start_elsewhere(monkeypatch) -> None:
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(3, dtype=torch.int64)
    seen = visited(monkeypatch)
    for seed in (0, 1):
        pgd(Stubborn(), x, y, ws.Threat(2, INF, 0.1, None), steps=1, restarts=2, seed=seed)
    starts = torch.stack([points for points, _ in seen[::2]])
    assert starts.shape[0] == 4 and (torch.pdist(starts.flatten(1)) > 0.05).all()


def check_distances(
    attack, domain, most: float, mean: float, classes: int = 2, norm: float = 2.0
) -> None:
    model, x, y = problem(classes, 16)
    exact = model.distances(x, y, norm, domain)
    result = attack(model, x, y, ws.Threat(norm, 1, 0.1, domain))
    found = result.flips.distances
    assert (
        (found >= exact - 1e-9).all()
        and torch.equal(found == 0, exact == 0)
        and torch.isfinite(found).all()
    )
    factor = (found / exact)[exact > 0]
    assert factor.max() <= most and factor.mean() <= mean


@pytest.mark.slow_cases("free")
@each_domain
def test_cw_finds_the_exact_distance(domain) -> None:
    check_distances(partial(cw, steps=200, rate=0.02), domain, 1.03, 1.005)


def test_cw_finds_it_from_the_papers_first_c() -> None:
    """It spends three or four of the searches on the order of magnitude of c."""
    check_distances(partial(cw, steps=150, rate=0.02, c=0.001), None, 1.2, 1.03)


def test_cw_does_not_take_an_overshoot_for_a_success() -> None:
    """Adam's first step is longer than the way to the boundary: it flips, though c is far too
    small to hold it there.
    """
    model = LinearClassifier(
        torch.tensor([[0.0, 0.0], [1.0, 0.3]]).double(), torch.zeros(2).double()
    )
    x = torch.tensor([[-0.01, 0.0]]).double()
    y = torch.tensor([0])
    result = cw(model, x, y, ws.Threat(2, 1, 0.1, None), searches=6, steps=200, rate=0.02, c=2e-4)
    assert 1 <= float(result.distances / model.distances(x, y, 2.0, None)) <= 1.01


def test_cw_with_many_classes_is_close() -> None:
    check_distances(
        partial(cw, **QUICK), BOX, 2.0, 1.2, classes=10
    )  # the margin follows one rival, not always the nearest


def test_a_broken_cw_is_caught(monkeypatch) -> None:
    from wassail.attacks import cw as module

    away = module._to_box
    broken = {
        "_to_box": lambda w, x, domain: (
            away(w, x, domain)[0],
            -away(w, x, domain)[1],
        ),  # the derivative's sign
        "_gap": lambda tracker, goal, z, rows: (
            torch.ones(len(z), dtype=z.dtype),
            -goal(z, rows)[1],
        ),  # the penalty's sign
        "_to_line": lambda x, domain: torch.zeros_like(x),  # starts in the middle of the box
    }
    for name, function in broken.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, function)
            with pytest.raises(AssertionError):
                check_distances(partial(cw, **QUICK), BOX, 1.3, 1.04)
    check_distances(partial(cw, **QUICK), BOX, 1.3, 1.04)


@each_norm
def test_deepfool_is_exact_on_two_classes(norm: float, monkeypatch) -> None:
    check_distances(deepfool, None, 1.0001, 1.0001, norm=norm)
    check_distances(deepfool, BOX, 1.005, 1.001, norm=norm)
    monkeypatch.setattr(Tracker, "shorten", lambda *_: None)
    model, x, y = problem(2)
    found = deepfool(model, x, y, ws.Threat(norm, 1, 0.1, None), overshoot=0.1).flips.distances
    assert torch.allclose(found, 1.1 * model.distances(x, y, norm, None), rtol=1e-6)


@each_norm
@pytest.mark.parametrize("targets", [None, 9])
def test_fab_is_exact_on_linear_classifiers(norm: float, targets) -> None:
    check_distances(partial(fab, steps=4, targets=targets), BOX, 1.01, 1.002, classes=5, norm=norm)


# ---- the papers' iterates
# --------------------------------------------------------------------------------------------------


class Curved(nn.Module):
    """Three classes with curved gaps; `lead` is how far class 0 is ahead."""

    def __init__(self, lead: float) -> None:
        super().__init__()
        self.lead = lead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.stack(
            [
                0 * x[:, 0] + self.lead,
                (7 * x).sin().sum(1),
                (5 * x[:, 0] * x[:, 1]).cos() - x[:, 2] ** 2,
            ],
            1,
        )
        return z


@pytest.mark.parametrize("norm", [2.0, INF])
def test_pgd_is_the_papers(norm: float, monkeypatch) -> None:
    """Iterate by iterate, with the cross entropy differentiated by torch, on a loss with many
    hills and no flip.
    """
    model = Curved(9.0)
    steps = 8
    eps = 0.5
    x = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(5, dtype=torch.int64)
    seen = visited(monkeypatch)
    result = pgd(model, x, y, ws.Threat(norm, INF, eps, None), steps=steps, seed=3)
    assert len(seen) == steps + 1
    point = seen[0][0]
    losses = []
    points = []
    assert torch.allclose(vector_norm(point - x, norm), torch.full((5,), eps).double(), rtol=1e-6)
    for k in range(steps + 1):
        assert torch.allclose(seen[k][0], point, atol=1e-9)
        leaf = point.clone().requires_grad_(True)
        loss = nn.functional.cross_entropy(model(leaf), y, reduction="none")
        (g,) = torch.autograd.grad(loss.sum(), leaf)
        losses.append(loss.detach())
        points.append(point)
        step = 2.5 * eps / steps * (g.sign() if norm == INF else g / g.norm(dim=1, keepdim=True))
        delta = point + step - x
        delta = (
            delta.clamp(-eps, eps)
            if norm == INF
            else delta * (eps / delta.norm(dim=1, keepdim=True)).clamp(max=1)
        )
        point = x + delta
    best = torch.stack(losses).argmax(0)
    assert (
        torch.allclose(result.points, torch.stack(points)[best, torch.arange(5)], atol=1e-9)
        and result.accuracy == 1
    )


def test_cw_is_the_papers(monkeypatch) -> None:
    """The iterates of one search are those of Adam on the paper's objective, differentiated by
    torch.
    """
    model = Curved(2.0)
    c = 0.3
    x = (
        torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.9
        + 0.05
    )
    x = x[model(x).argmax(1) == 0]
    y = torch.zeros(len(x), dtype=torch.int64)
    seen = visited(monkeypatch)
    result = cw(model, x, y, ws.Threat(2, INF, 0.5), searches=1, steps=9, rate=0.1, c=c)
    assert 0 < result.flips.success.sum() < len(x)  # iterates on both sides of the boundary
    w = torch.atanh((2 * x - 1) * (1 - 1e-6))
    mean = square = torch.zeros(())
    for k, (points, _) in enumerate(seen, 1):
        leaf = w.clone().requires_grad_(True)
        here = (torch.tanh(leaf) + 1) / 2
        z = model(here)
        loss = ((here - x) ** 2).sum(1) + c * (z[:, 0] - z[:, 1:].amax(1)).clamp(min=0)
        (g,) = torch.autograd.grad(loss.sum(), leaf)
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * g**2
        w = w - 0.1 * mean / (1 - 0.9**k) / ((square / (1 - 0.999**k)) ** 0.5 + 1e-8)
        assert torch.allclose((torch.tanh(w) + 1) / 2, points, atol=1e-6)
    assert len(seen) == 8  # the last look needs no gradient


def test_cw_follows_the_width_of_the_box() -> None:
    model, x, y = problem(3, 10)
    weight = model.weight.detach() / 4
    wide = LinearClassifier(weight, model.bias.detach() + weight.sum(1))
    one = cw(model, x, y, ws.Threat(2, 1, 0.1), **QUICK)
    other = cw(wide, 4 * x - 1, y, ws.Threat(2, 1, 0.4, (-1.0, 3.0)), **QUICK)
    assert torch.allclose(4 * one.flips.distances, other.flips.distances, rtol=1e-6)
    assert torch.allclose(one.weights, other.weights, rtol=1e-6)


# ---- targets
# --------------------------------------------------------------------------------------------------


def targeted_problem():
    """Four classes that all win somewhere, samples that are right, and the class after next as
    their target.
    """
    model = LinearClassifier(
        torch.eye(4, 12, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    )
    x = torch.rand(20, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = model(x).argmax(1)
    return model, x, y, (y + 2) % 4


TARGETED = {
    "fgsm": partial(fgsm, loss="margin"),
    "pgd": partial(pgd, steps=10),
    "pgd-dlr": partial(pgd, steps=10, loss="dlr", random_start=False),
    "cw": partial(cw, searches=6, steps=150, rate=0.03),
}


@pytest.mark.parametrize("name", TARGETED)
def test_targets_are_reached_and_nothing_else_counts(name: str) -> None:
    model, x, y, target = targeted_problem()
    threat = ws.Threat(2, INF, 3.0, None)
    result = TARGETED[name](model, x, y, threat, target=target)
    assert (result.predicted == target).all() and result.accuracy == 0 and result.verify(model)
    w = model.weight[target] - model.weight[y]
    nearest = vector_norm(
        plane_step(x, w.detach(), -inner(w, x).detach(), 2.0), 2
    )  # where the target draws level with the label
    assert (result.distances >= nearest - 1e-9).all()
    # A target that never wins: the label can be overtaken by others, and that is no success.
    never = LinearClassifier(
        torch.cat([model.weight.detach(), model.weight.detach()[:1]]),
        torch.tensor([0.0, 0, 0, 0, -1]).double(),
    )
    result = TARGETED[name](never, x, y, threat, target=torch.full_like(y, 4))
    assert not (result.predicted == 4).any()
    assert name != "cw" or (
        result.accuracy == 1 and torch.equal(result.points, x) and not result.flips.success.any()
    )


def test_targeted_cw_finds_the_nearest_point_of_the_target() -> None:
    """All logits of the rivals but the target's are out of reach, so the target's region is a
    half space.
    """
    model, x, y = problem(2, 16)
    more = LinearClassifier(
        torch.cat([model.weight.detach(), model.weight.detach()[:1]]),
        torch.cat([model.bias, model.bias[:1]]).detach(),
    )
    more.bias.data[2] -= 50
    exact = model.distances(x, y, 2.0, BOX)
    result = cw(more, x, y, ws.Threat(2, 1, 0.1), target=1 - y, searches=5, steps=200, rate=0.02)
    factor = (result.flips.distances / exact)[2:]
    assert factor.max() <= 1.03 and factor.min() >= 1 - 1e-9


# ---- passes
# --------------------------------------------------------------------------------------------------


class Stubborn(nn.Module):
    """Ten classes, and class 0 wins everywhere; it counts the rows it is shown."""

    rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        z = torch.stack([(x.flatten(1) ** 2).sum(1) * c for c in range(10)], 1)
        return z + 1e4 * nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10)


@pytest.mark.parametrize(
    ("attack", "forwards", "backwards", "riding"),
    [
        (fgsm, 1, 1, 1),
        (partial(pgd, steps=7), 1 + 8, 7, 0),
        (partial(pgd, steps=7, restarts=3), 1 + 3 * 8, 3 * 7, 0),
        (partial(pgd, steps=7, random_start=False), 1 + 7, 7, 1),
        (partial(cw, searches=3, steps=7), 1 + 3 * 7, 1 + 3 * 6, 1),
    ],
)
def test_passes_of_samples_that_never_flip(
    attack, forwards: int, backwards: int, riding: int
) -> None:
    """riding: gradients at the samples, which a sample that is wrong already has, too."""
    model = Stubborn()
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 0, 0, 1])
    result = attack(model, x, y, ws.Threat(2, INF, 0.1))
    assert result.forwards.tolist() == [forwards] * 3 + [1] and result.backwards.tolist() == [
        backwards
    ] * 3 + [riding]
    assert result.checks.tolist() == [1] * 4 and result.accuracy == 0.75
    assert model.rows == 4 * 2 + int(
        result.forwards.sum() + result.checks.sum()
    )  # the model's check looks at each twice


def test_pgd_stops_at_a_flip_and_restarts_only_the_rest() -> None:
    model, x, y = problem(4)
    eps = 0.9 * float(model.distances(x, y, 2.0, BOX)[2:].median())
    one, three = (
        pgd(model, x, y, ws.Threat(2, INF, eps), steps=10, restarts=r, loss="margin")
        for r in (1, 3)
    )
    right = torch.arange(30) >= 2
    flipped = one.predicted != y
    assert torch.equal(one.forwards[right & ~flipped], torch.full_like(y[right & ~flipped], 12))
    assert (one.forwards[flipped] < 12).all() and (
        one.backwards[flipped] == one.forwards[flipped] - 1
    ).all()
    assert (
        torch.equal(three.forwards[flipped], one.forwards[flipped])
        and three.accuracy <= one.accuracy
    )
    assert torch.equal(three.points[flipped], one.points[flipped])
    assert (three.forwards[right & ~flipped & (three.predicted == y)] == 1 + 3 * 11).all()
    lost = right & (three.predicted == y)
    assert (
        lost.any()
        and (margin(model(three.points), y) >= margin(model(one.points), y) - 1e-12)[lost].all()
    )


@pytest.mark.filterwarnings("ignore:.*samples were not searched:wassail.errors.ModelWarning")
def test_cw_keeps_its_budget() -> None:
    shares = []
    for passes in (1, 2, 3, 12, 200):
        model, x, y = problem(10, 12, (7,))
        flips = ws.nearest(model, x, y, 2, method="cw", passes=passes)
        spent = flips.forwards + flips.backwards
        assert (
            (spent <= passes).all()
            and (spent[:2] == (2 if passes > 2 else 1)).all()
            and (spent[2:] >= min(passes, 3) - 1).all()
        )
        shares.append(flips.success[2:].double().mean().item())
        stuck = ws.nearest(
            Stubborn(),
            x,
            torch.zeros(12, dtype=torch.int64),
            2,
            method="cw",
            passes=passes,
            searches=50,
        )
        spent = stuck.forwards + stuck.backwards
        assert not stuck.success.any() and (spent <= passes).all() and (spent >= passes - 1).all()
    assert shares[0] == 0 and shares[-1] == 1


def test_cw_stops_searching_where_nothing_moves() -> None:
    """A zero gradient costs one backward pass; a loss that stalls ends a search after a tenth
    of its steps.
    """
    fixed = LinearClassifier(
        torch.zeros(3, 4, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.0]).double()
    )
    x = torch.rand(3, 4, dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.int64)
    result = cw(fixed, x, y, ws.Threat(2, 1, 0.1))
    assert result.forwards.tolist() == [1] * 3 and result.backwards.tolist() == [1] * 3
    model, x, y = problem(2)
    result = cw(model, x[:8], y[:8], ws.Threat(2, 1, 0.1), steps=500, searches=1, rate=0.05)
    assert result.forwards[2:].median() < 300


def test_cw_leaves_passes_to_shorten_its_flips(monkeypatch) -> None:
    left = []
    shorten = Tracker.shorten

    def spy(tracker, rows, times):
        left.append(tracker.passes_left(rows)[torch.isfinite(tracker.distance[rows])])
        shorten(tracker, rows, times)

    monkeypatch.setattr(Tracker, "shorten", spy)
    model, x, y = problem(10, 12, (7,))
    ws.nearest(model, x, y, 2, method="cw", passes=100, searches=99)
    assert (
        len(left[0]) > 5 and left[0].median() >= 10
    )  # all but those who flipped with their last passes


def test_options_reach_the_engines() -> None:
    model, x, y = problem(10, 12)
    threat = ws.Threat(2, 1, 0.1)
    few = deepfool(model, x, y, threat, topk=3)
    assert (
        torch.equal(few.backwards[2:], 3 * (few.forwards[2:] - 11))
        and (few.backwards[2:] >= 3).all()
    )
    assert deepfool(model, x, y, threat, steps=1).backwards.max() == 9
    for steps in (2, 5):
        assert (fab(model, x, y, threat, steps=steps).backwards[2:] == 9 * steps).all()
    assert (
        fab(model, x, y, threat, targets=2).method == "fab-t"
        and fab(model, x, y, threat, steps=1).method == "fab"
    )


# ---- any number of classes, any input
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 1000])
def test_any_number_of_classes(classes: int) -> None:
    model, x, y = problem(classes, 6, (20,))
    exact = model.distances(x, y, 2.0, BOX)
    for attack in (
        fgsm,
        partial(pgd, steps=5, loss="dlr"),
        partial(cw, **QUICK),
        deepfool,
        partial(fab, steps=3, targets=2),
    ):
        result = attack(model, x, y, ws.Threat(2, INF, 2 * float(exact.max())))
        assert (
            result.accuracy == 0
            and result.verify(model)
            and (result.distances >= exact - 1e-9).all()
        )


@pytest.mark.parametrize(
    "attack", [fgsm, pgd, partial(cw, searches=2, steps=20), deepfool, partial(fab, steps=4)]
)
def test_float32_and_batches_of_a_network(attack) -> None:
    model, (x, y) = ws.zoo.load("digits-cnn-adv"), ws.zoo.data("digits")
    x = x[:12]
    y = y[:12]
    one, other = (attack(model, x, y, ws.Threat(2, 1, 0.3), batch_size=size) for size in (None, 7))
    assert one.points.dtype == torch.float32 and one.verify(model, batch_size=3) and one.cost <= 0.3
    assert (
        torch.allclose(one.points, other.points, atol=1e-3)
        and abs(one.accuracy - other.accuracy) < 0.01
    )
    weighted = attack(model, x, y, ws.Threat(2, 1, 0.3), mu=torch.arange(12))
    assert torch.allclose(weighted.mu, torch.arange(12).double() / 66) and weighted.verify(model)


@pytest.mark.parametrize(
    ("attack", "options", "word"),
    [
        (fgsm, {"loss": "drl"}, "dlr"),
        (fgsm, {"target": torch.zeros(3)}, "class index"),
        (pgd, {"loss": "crossentropy"}, "known are"),
        (pgd, {"steps": 0}, "at least 1"),
        (pgd, {"restarts": 0}, "at least 1"),
        (pgd, {"step": -0.1}, "step size"),
        (pgd, {"step": math.nan}, "step size"),
        (pgd, {"restarts": 2, "random_start": False}, "random_start=True"),
        (pgd, {"target": torch.tensor([0, 1, 2])}, "own label"),
        (cw, {"searches": 0}, "search"),
        (cw, {"steps": 0}, "step"),
        (cw, {"rate": 0.0}, "rate"),
        (cw, {"c": 0.0}, "first c"),
        (cw, {"target": torch.tensor([0])}, "3 samples"),
        (fab, {"targets": 0}, "1 to 9"),
    ],
)
def test_bad_input(attack, options, word: str) -> None:
    model, x, _ = problem(3, 3)
    with pytest.raises(InputError, match=word):
        attack(model, x, torch.tensor([0, 1, 2]), ws.Threat(2, INF, 0.1), **options)


@pytest.mark.parametrize("norm", [1, INF])
def test_cw_is_for_l2(norm) -> None:
    model, x, y = problem(3, 3)
    with pytest.raises(InputError, match="choose norm 2, or FMN or FAB"):
        cw(model, x, y, ws.Threat(norm, INF, 0.1))
    with pytest.raises(InputError, match="choose norm 2, or FMN or FAB"):
        ws.nearest(model, x, y, norm, method="cw")


# ---- a real network
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("2.0-0.25")
@pytest.mark.parametrize(("norm", "eps"), [(INF, 2 / 255), (2.0, 0.25)])
def test_the_order_of_strength_on_a_real_network(zoo, norm: float, eps: float) -> None:
    model, dataset = zoo.load("cifar_cnn_a_adv")
    x, y = (t[1000:1030] for t in zoo.images(dataset, 1030))
    threat = ws.Threat(norm, INF, eps)
    step = fgsm(model, x, y, threat)
    climb = pgd(model, x, y, threat)
    found = {
        "boundary-search": ws.nearest(model, x, y, norm, passes=40),
        "deepfool": deepfool(model, x, y, threat, topk=3).flips,
    }
    if norm == 2:
        found["cw"] = cw(model, x, y, threat, searches=2, steps=60).flips
    best = ws.allocate(
        found["boundary-search"].merge(*found.values(), step.flips, climb.flips), eps, INF
    )
    assert best.accuracy <= climb.accuracy <= step.accuracy < step.clean_accuracy
    for result in (step, climb, best):
        assert result.verify(model, batch_size=17) and result.cost <= eps
    lost = climb.predicted == y  # the loss of those that stand is larger where PGD left them
    z = [
        margin(model(points), y).detach()[lost].mean() for points in (x, step.points, climb.points)
    ]
    assert z[0] < z[1] <= z[2] + 1e-3 and z[0] < z[2]
    if norm == 2:
        assert (
            found["cw"].success.all()
            and found["cw"].distances.mean() < 1.35 * found["boundary-search"].distances.mean()
        )
