"""A3 and A3-WDA: closed forms, the authors' schedule and directions, passes, invariance, broken
variants, a real network.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import wassail.attacks.a3 as module
from wassail.attacks.a3 import (
    BUDGET,
    NEVER,
    Aim,
    Hit,
    Tally,
    _draw,
    _Settings,
    a3,
    aim,
    cosine,
    easiest,
    schedule,
)
from wassail.errors import InputError
from wassail.geometry import vector_norm
from wassail.losses import predict
from wassail.network import Tape
from wassail.testing import LinearClassifier, check_attack, samples
from wassail.threat import Threat

INF = math.inf
NORMS = (1.0, 2.0, INF)
BOX = (0.0, 1.0)


def run(step: str, restarts: int):
    return lambda *arguments, **options: a3(*arguments, step=step, restarts=restarts, **options)


@pytest.mark.slow_cases("wda-1.0-domain4", "pgd-2.0-None", "wda-inf-None")
@pytest.mark.parametrize(
    ("step", "norm", "domain"),
    [
        ("pgd", INF, BOX),
        ("wda", INF, None),
        ("pgd", 2.0, None),
        ("wda", 2.0, BOX),
        ("wda", 1.0, BOX),
    ],
)
def test_conformance(step: str, norm: float, domain) -> None:
    check_attack(run(step, 2), norms=(norm,), orders=(1.0,), domains=(domain,), classes=(4,))


def check_reach(step: str, norm: float, domain, classes: int, restarts: int = 5) -> None:
    """On linear classifiers: what lies in the ball flips, up to 1 % of the radius, and nothing
    else does.
    """
    model, (x, _) = (
        LinearClassifier.random(classes, 12, seed=classes),
        samples(40, (3, 2, 2), classes),
    )
    y = model(x).argmax(1)
    exact = model.distances(x, y, norm, domain)
    eps = float(exact.median()) * 1.005
    result = a3(model, x, y, Threat(norm, INF, eps, domain), step=step, restarts=restarts)
    flipped = result.predicted != y
    assert flipped[exact <= 0.99 * eps].all() and not flipped[exact > eps].any()
    assert (result.distances <= eps).all() and result.verify(model)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [BOX, None])
@pytest.mark.parametrize("step", ["pgd", "wda"])
def test_flips_what_can_be_flipped(step: str, norm: float, domain) -> None:
    check_reach(step, norm, domain, 2, 3)


@pytest.mark.slow_cases("*-4", "*-10")
@pytest.mark.parametrize("classes", [3, 4, 10])
@pytest.mark.parametrize("step", ["pgd", "wda"])
def test_flips_with_several_classes(step: str, classes: int) -> None:
    check_reach(step, INF, BOX, classes)
    check_reach(step, 2.0, BOX, classes)


def broken_project(point, center, norm, radius, domain):
    return point if domain is None else point.clamp(*domain)


def half_project(point, center, norm, radius, domain):
    return center + 0.5 * (point - center) / (vector_norm(point - center, norm) / radius).clamp(
        min=1
    ).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("step", ["pgd", "wda"])
@pytest.mark.parametrize("norm", [2.0, INF])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("project", broken_project),
        ("project", half_project),
        ("strongest_rival", lambda z, y: z.scatter(1, y[:, None], INF).min(1)),
        (
            "predict",
            lambda z, y, tolerance=0.0: predict(
                z.scatter_add(1, y[:, None], -0.5 + 0 * z), y, tolerance
            ),
        ),
        ("cosine", lambda turn, steps: 1e-4),
    ],
    ids=["no projection", "half the ball", "weakest rival", "success too early", "step size"],
)
def test_broken_parts_are_caught(step: str, norm: float, name: str, wrong, monkeypatch) -> None:
    check_reach(step, norm, BOX, 4, 1)
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check_reach(step, norm, BOX, 4, 1)


@pytest.mark.parametrize("step", ["pgd", "wda"])
def test_a_wrong_sign_is_caught(step: str, monkeypatch) -> None:
    pull = Tape.pull
    monkeypatch.setattr(Tape, "pull", lambda *arguments, **options: -pull(*arguments, **options))
    with pytest.raises(AssertionError):
        check_reach(step, 2.0, BOX, 2, 3)
    with pytest.raises(AssertionError):
        check_attack(run(step, 1), norms=(INF,), orders=(INF,), domains=(BOX,), classes=(4,))


@pytest.mark.parametrize("name", ["steepest", "maximiser"])
def test_each_walk_has_its_own_step(name: str, monkeypatch) -> None:
    """A step of zero length stops the walk that uses it and no other."""
    monkeypatch.setattr(
        module, name, lambda *arguments: 0 * arguments[1 if name == "steepest" else 0]
    )
    hurt, other = ("wda", "pgd") if name == "steepest" else ("pgd", "wda")
    check_reach(other, 2.0, BOX, 2, 3)
    with pytest.raises(AssertionError):
        check_reach(hurt, 2.0, BOX, 2, 3)


# The authors' table: share, steps of ADI, steps of the ascent (theirs plus those of ADI), repeats.
PLANS = [
    (1, 0, 8, 1),
    (1, 7, 15, 1),
    (1, 7, 15, 1),
    (0.7, 7, 32, 1),
    (0.6, 7, 37, 1),
    (0.5, 7, 37, 1),
    (0.4, 7, 42, 1),
    (0.3, 7, 47, 1),
    (0.2, 7, 52, 1),
    (0.1, 7, 57, 1),
    (0.1, 7, 57, 4),
    (0.065, 7, 62, 4),
    (0.03, 7, 67, 50),
]
BIASED = [
    *PLANS[:3],
    (1, 10, 15, 10),
    (1, 15, 20, 1),
    (1, 15, 25, 1),
    (1, 10, 20, 1),
    (1, 10, 25, 1),
    (1, 10, 28, 1),
    (1, 10, 30, 1),
    (0.8, 10, 35, 5),
    (0.5, 10, 45, 5),
    (0.5, 10, 55, 20),
]


@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
def test_the_schedule_is_the_authors(classes: int) -> None:
    for biased, table, final in ((False, PLANS, 10), (True, BIASED, 11)):
        for restart, (share, adi, steps, repeats) in enumerate(table):
            if classes == 1000:
                steps = steps + 10
                repeats = {50: 32}.get(repeats, repeats + 1)
            plan = schedule(restart, biased, classes)
            assert (plan.share, plan.adi, plan.steps, plan.repeats) == (share, adi, steps, repeats)
            assert plan.final == (restart >= final)


def test_step_sizes() -> None:
    for steps, least in ((8, 0.1), (10, 0.1), (15, 0.001), (67, 0.001)):
        sizes = [cosine(turn, steps) for turn in range(steps)]
        assert sizes[0] == 1 and all(a > b > least for a, b in pairwise(sizes))
        assert (
            abs(cosine(steps + 1, steps) - least) < 1e-15
        )  # the cosine would end one step after the last
        assert (
            abs(cosine((steps + 1) // 2, steps) - (1 + least) / 2) < 1e-12 or steps % 2 == 0
        )  # half-way at half the time


@pytest.mark.parametrize(
    ("label", "rival", "low", "high", "push"),
    [
        (1.0, 2.0, -0.1, 0.5, 0.8),
        (1.0, -2.0, -0.1, 0.5, -0.8),
        (-1.0, -2.0, -0.5, 0.1, -0.8),
        (-1.0, 2.0, -0.5, 0.1, 0.8),
        (0.0, 0.0, -0.5, 0.1, 0.8),
    ],
)
def test_directions_follow_what_succeeded(
    label: float, rival: float, low: float, high: float, push: float
) -> None:
    tally = Tally(10, 0, [rival, 3.0, -3.0], [label, 0.5, -0.5])
    for restart in (2, 5, 9):
        assert aim(schedule(restart, False, 10), False, 10, tally) == Aim(low, high, push, 9)
    for restart in (10, 12):
        assert aim(schedule(restart, False, 10), False, 10, tally) == Aim(-0.8, 0.1, 0.8, 4)
        assert aim(schedule(restart, False, 100), False, 100, tally) == Aim(-8.0, 1.0, 8.0, 14)
        assert aim(schedule(restart, False, 1000), False, 1000, tally) == Aim(-80.0, 10.0, 80.0, 20)
    assert aim(schedule(4, False, 100), False, 100, tally) == Aim(-5.0, 1.0, 8.0, 14)
    assert aim(schedule(10, True, 10), True, 10, tally) == Aim(-0.1, 0.5, 0.8, 9)
    assert aim(schedule(11, True, 10), True, 10, tally) == Aim(0.0, 0.0, 0.8, 9)
    for classes in (2, 3, 4):
        law = aim(schedule(2, False, classes), False, classes, tally)
        assert law == Aim(low, high, push, classes - 1)


def test_what_the_tally_counts() -> None:
    tally = Tally(40)
    turn = torch.tensor([0, 1, 7, 8, NEVER])
    pushed = torch.arange(10.0).reshape(5, 2)
    hit = Hit(turn, pushed, pushed, pushed)
    tally.add(0, 0, hit)
    assert tally == Tally(40) and not tally.biased
    tally.add(1, 7, hit)
    assert tally == Tally(40, 2, [2.0, 4.0, 6.0], [3.0, 5.0, 7.0]) and tally.biased
    tally.add(2, 7, hit)
    assert tally.early == 4 and len(tally.rival) == 3
    assert not Tally(41, 2).biased and not Tally(0, 0).biased


@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
@pytest.mark.parametrize("norm", NORMS)
def test_draws(norm: float, classes: int) -> None:
    """Starts lie in ball and box; weights follow their law; rivals come in turn, the nearest
    first.
    """
    x, y = samples(30, (2, 8, 8), classes)
    settings = _Settings(Threat(norm, INF, 0.3), 0.3, "pgd", 0)
    reach = torch.rand(30, classes, dtype=torch.float64).scatter(1, y[:, None], -INF)
    start, weight = _draw(settings, x, y, reach, None, range(1, 2))
    assert weight.min() >= -1 and weight.max() <= 1 and (weight.mean(0).abs() < 0.6).all()
    law = Aim(-0.8, 0.1, 0.9, min(4, classes - 1))
    start, weight = _draw(settings, x, y, reach, law, range(5, 9))
    assert start.shape == (120, 2, 8, 8) and start.min() >= 0 and start.max() <= 1
    moved = vector_norm(start - x.repeat(4, 1, 1, 1), norm)
    assert (moved <= 0.3 * (1 + 1e-12)).all() and (moved > 0.1).all()
    at_label = weight.gather(1, y.repeat(4)[:, None])
    assert (
        at_label.min() >= -0.8
        and at_label.max() <= 0.1
        and at_label.min() < -0.7
        and at_label.max() > 0
    )
    order = reach.argsort(1, descending=True)
    for r, number in enumerate(range(5, 9)):
        mine = weight[30 * r : 30 * (r + 1)]
        rival = order[torch.arange(30), (number - 1) % law.rivals]
        assert (mine.gather(1, rival[:, None]) == 0.9).all()
        rest = mine.scatter(1, rival[:, None], 0.0).scatter(1, y[:, None], 0.0)
        assert rest.min() >= -1 and rest.max() <= 1
        alone = _draw(settings, x[7:8], y[7:8], reach[7:8], law, range(number, number + 1))
        assert torch.equal(alone[0][0], start[30 * r + 7]) and torch.equal(alone[1][0], mine[7])
    assert not torch.equal(start[:30], start[30:60])


def test_osd_keeps_the_easiest() -> None:
    standing = torch.ones(400, dtype=torch.bool)
    standing[::4] = False
    reach = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    best = reach.amax(1)
    for share in (1.0, 0.7, 0.065, 0.03):
        rows = easiest(standing, reach, share)
        assert len(rows) == int(share * 300) and standing[rows].all()
        left = standing.clone()
        left[rows] = False
        assert not left.any() or best[rows].min() >= best[left].max()
    assert len(easiest(standing, reach, 0.001)) == 4  # 1 % of all
    few = torch.arange(400) < 39  # less than a tenth stands: nobody is discarded
    assert easiest(few, reach, 0.03).tolist() == list(range(39))
    assert easiest(torch.arange(400) < 1, reach, 0.03).tolist() == [0] and not len(
        easiest(few & ~few, reach, 1.0)
    )
    same = torch.zeros(400, 5)
    assert (
        len(easiest(standing, same, 0.03)) == 300
    )  # ties: all of them, so their order cannot matter


class Late(nn.Module):
    """Right for the first calls, wrong in the first row of a batch from call number `calls` on."""

    def __init__(self, calls: float, classes: int = 3) -> None:
        super().__init__()
        # two calls check the model before the attack
        self.left = calls + 2
        self.classes = classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        z = (
            torch.arange(self.classes, dtype=x.dtype).expand(len(x), -1)
            * x.flatten(1).sum(1, keepdim=True)
            / 100
        )
        lead = torch.full((len(x),), 5.0)
        lead[0] = 5.0 if self.left >= 0 else -5.0
        return z + lead[:, None] * (torch.arange(self.classes) == 0)


@pytest.mark.parametrize("step", ["pgd", "wda"])
@pytest.mark.parametrize(
    ("calls", "forwards", "backwards"),
    [
        (1, 2, 1),  # the random start of restart 0
        (2, 3, 2),  # its first step
        (9, 10, 8),  # its last
        (10, 11, 9),  # the random start of restart 1
        (13, 14, 12),  # in its ADI
        (17, 18, 16),  # the end of its ADI
        (20, 21, 19),  # in its ascent
        (32, 33, 30),  # its last step
    ],
)
def test_success_is_tested_at_every_look(
    step: str, calls: int, forwards: int, backwards: int
) -> None:
    x = torch.full((1, 4), 0.5)
    y = torch.tensor([0])
    result = a3(Late(calls), x, y, Threat(INF, INF, 0.1), step=step)
    assert result.accuracy == 0 and (int(result.forwards), int(result.backwards)) == (
        forwards,
        backwards,
    )


def test_a_sample_that_flips_leaves_all_its_repeats() -> None:
    """Restart 10 has four repeats side by side. One flips at the fourth look: all four are in the
    batch of that look's gradient, no more.
    """
    before = 1 + sum(adi + steps + 1 for _, adi, steps, _ in PLANS[:10])
    x = torch.full((1, 4), 0.5)
    y = torch.tensor([0])
    result = a3(Late(before + 3), x, y, Threat(INF, INF, 0.1))
    assert result.accuracy == 0
    assert (
        int(result.forwards) == before + 4 * 4 and int(result.backwards) == before - 1 - 10 + 4 * 4
    )


def test_passes_of_a_sample_that_stands() -> None:
    x = torch.full((1, 4), 0.5)
    y = torch.tensor([0])
    spent = [repeats * (adi + steps) for _, adi, steps, repeats in PLANS]
    result = a3(Late(INF), x, y, Threat(INF, INF, 0.1))
    assert (
        sum(spent) == 4637 and sum(spent[:12]) == 937
    )  # one more repeat would exceed the budget of 1000
    assert int(result.backwards) == 937 <= BUDGET and int(result.forwards) == 1 + 937 + 18
    wrong = a3(Late(INF), x, y + 1, Threat(INF, INF, 0.1))
    assert int(wrong.forwards) == 1 and int(wrong.backwards) == 0 and wrong.cost == 0


def test_the_budget_is_that_of_the_samples_that_stand() -> None:
    """Nine samples flip in restart 0; the tenth may not spend the passes that they leave."""

    def model(x: torch.Tensor) -> torch.Tensor:
        z = torch.stack([x[:, 1] + 0.01, 1 - x[:, 1]], 1)
        return z + 5 * (x[:, :1] > 0.5) * torch.tensor([1.0, 0.0])

    x = torch.full((10, 2), 0.5)
    x[:, 0] = torch.linspace(0, 0.1, 10)
    x[3, 0] = 0.9
    result = a3(model, x, torch.zeros(10, dtype=torch.int64), Threat(INF, INF, 0.1))
    assert (
        result.accuracy == 0.1 and result.backwards.sum() <= BUDGET and result.backwards[3] == 937
    )


@pytest.mark.parametrize("step", ["pgd", "wda"])
def test_a_walk(step: str, monkeypatch) -> None:
    """What the gradients are of, how long the steps are, and when the rival is chosen, in
    restarts 0 and 1.
    """
    pulled = []
    sizes = []
    chosen = []
    pull = Tape.pull
    take = module._step
    choose = module.strongest_rival
    monkeypatch.setattr(
        Tape,
        "pull",
        lambda tape, weight, keep: pulled.append(weight[0]) or pull(tape, weight, keep),
    )
    monkeypatch.setattr(
        module, "_step", lambda *arguments: sizes.append(arguments[4]) or take(*arguments)
    )
    monkeypatch.setattr(
        module, "strongest_rival", lambda z, y: chosen.append(len(pulled)) or choose(z, y)
    )
    x = torch.full((1, 4), 0.5)
    y = torch.tensor([0])
    threat = Threat(INF, INF, 0.1)
    a3(Late(INF), x, y, threat, step=step, restarts=2, seed=3)
    radius = 0.1 * (1 - 1e-12)
    _, weight = _draw(
        _Settings(threat, radius, step, 3), x, y, torch.zeros(1, 3), None, range(1, 2)
    )
    margin = torch.tensor([-1.0, 0.0, 1.0])
    assert [w.tolist() for w in pulled] == [
        w.tolist() for w in [margin] * 8 + [weight[0]] * 7 + [margin] * 15
    ]
    shares = (
        [cosine(turn, 8) for turn in range(8)]
        + [1.0] * 7
        + [cosine(turn, 15) for turn in range(15)]
    )
    assert sizes == [radius * share for share in shares]
    assert chosen == ([0, 15] if step == "wda" else [*range(8), *range(15, 30)])


def test_the_reach_is_remembered(monkeypatch) -> None:
    """Between rounds the largest gap of any look is kept, rival by rival, and what is returned
    shows the best margin.
    """
    seen = []
    monkeypatch.setattr(
        module,
        "easiest",
        lambda standing, reach, share: (
            seen.append(reach.clone()) or easiest(standing, reach, share)
        ),
    )
    x = torch.rand(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = Hills()(x).argmax(1)
    result = a3(Hills(), x, y, Threat(2.0, INF, 0.16), restarts=5)
    assert (
        all((after >= before).all() for before, after in pairwise(seen))
        and (seen[-1] > seen[1]).any()
    )
    z = Hills()(x)
    first = (z - z.gather(1, y[:, None])).scatter(1, y[:, None], -INF)
    assert torch.equal(seen[0], first)
    stands = result.predicted == y
    reached = (
        (Hills()(result.points) - Hills()(result.points).gather(1, y[:, None]))
        .scatter(1, y[:, None], -INF)
        .amax(1)
    )
    assert stands.any() and torch.allclose(reached[stands], seen[-1].amax(1)[stands], atol=1e-6)


class Ladder(nn.Module):
    """Class 0 wins everywhere, by as much as the sample's first feature says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = 10 + 100 * x[:, 0].round(decimals=3).detach() + 1e-3 * x.sum(1)
        return torch.stack([lead, 0 * lead, 0 * lead - 1], 1)


def test_the_hard_samples_are_discarded() -> None:
    """The passes of every sample are those of the schedule: restart by restart for the easiest
    share.
    """
    x = torch.full((50, 3), 0.5)
    x[:, 0] = torch.linspace(0.1, 0.9, 50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    result = a3(Ladder(), x[order], torch.zeros(50, dtype=torch.int64), Threat(INF, INF, 1e-4))
    backwards = torch.zeros(50, dtype=torch.int64)
    for share, adi, steps, repeats in PLANS:
        backwards[: max(int(share * 50), 1)] += repeats * (adi + steps)
    assert result.accuracy == 1 and torch.equal(result.backwards, backwards[order])
    assert backwards.double().mean() < 0.4 * BUDGET


class Decoy(nn.Module):
    """The strongest rival has no gradient; the other is near, and random directions find it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.where(x[:, 1] > 0.5, 10 * x[:, 0] - 5, -100 + x[:, 0])
        return torch.stack([0 * near + 1, 0 * near + 0.5, near], 1)


def test_the_biased_plans(monkeypatch) -> None:
    """ADI alone fools this model wherever it can be fooled: the plans change after restart 2,
    and only here.
    """
    seen = []
    original = module.schedule
    monkeypatch.setattr(
        module, "schedule", lambda *arguments: seen.append(arguments[:2]) or original(*arguments)
    )
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.3
    x[20:, 1], x[:20, 1] = 0.05, 0.95  # the second half cannot be fooled
    result = a3(Decoy(), x, torch.zeros(40, dtype=torch.int64), Threat(INF, INF, 0.4))
    assert (
        result.accuracy == 0.5
        and (result.predicted[:20] == 2).all()
        and (result.predicted[20:] == 0).all()
    )
    assert seen == [(restart, restart > 2) for restart in range(13)]
    assert result.backwards.sum() <= BUDGET * 40
    seen.clear()
    a3(Ladder(), x, torch.zeros(40, dtype=torch.int64), Threat(INF, INF, 1e-4), restarts=5)
    assert seen == [(restart, False) for restart in range(5)]


class Hills(nn.Module):
    """Four classes with curved gaps, in sums that do not depend on the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = [(c * x).sin().sum(1) + (x * x.flip(1)).sum(1) / c for c in (3.0, 5.0, 8.0, 11.0)]
        return torch.stack(waves, 1)


@pytest.mark.slow_cases("wda-2.0-3")
@pytest.mark.parametrize(("step", "norm", "size"), [("wda", 2.0, 3), ("pgd", INF, 1)])
def test_batches_and_order_do_not_matter(step: str, norm: float, size: int) -> None:
    """Up to the restart whose repeats run side by side."""
    x = torch.rand(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = Hills()(x).argmax(1)
    threat = Threat(norm, INF, 0.16 if norm == 2 else 0.08)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    one = a3(Hills(), x, y, threat, step=step, restarts=11)
    other = a3(Hills(), x[order], y[order], threat, step=step, restarts=11, batch_size=size)
    assert 0 < one.accuracy < 1 and one.backwards.max() > 600
    assert torch.equal(one.points[order], other.points)
    assert torch.equal(one.forwards[order], other.forwards) and torch.equal(
        one.backwards[order], other.backwards
    )
    again = a3(Hills(), x, y, threat, step=step, seed=1, restarts=1)
    assert not torch.equal(one.points, again.points)


@pytest.mark.parametrize("classes", [2, 1000])
def test_few_and_many_classes(classes: int) -> None:
    check_reach("wda", INF, BOX, classes, 3)


def test_rivals_beyond_the_classes_are_not_asked_for() -> None:
    """All restarts, and so every law of the directions, with two and with four classes."""
    for classes in (2, 4):
        result = a3(
            Late(INF, classes),
            torch.full((1, 4), 0.5),
            torch.zeros(1, dtype=torch.int64),
            Threat(INF, INF, 0.1),
        )
        assert result.accuracy == 1 and 0 < result.distances[0] <= 0.1


class Nan(nn.Module):
    """No answer beyond x_0 = 0.6; the flips are below."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.where(x[:, 0] > 0.6, math.nan, x[:, 1] - 0.3 * x[:, 0] - 0.6)
        return torch.stack([torch.zeros_like(f), f], 1)


def test_a_model_without_an_answer_somewhere() -> None:
    """Many walks begin where there is no gradient; a later one finds the flip."""
    x = torch.rand(10, 3, generator=torch.Generator().manual_seed(0)) * 0.02 + torch.tensor(
        [0.55, 0.4, 0.0]
    )
    result = a3(Nan(), x, torch.zeros(10, dtype=torch.int64), Threat(INF, INF, 0.4))
    assert (
        torch.isfinite(result.points).all() and result.accuracy == 0 and result.backwards.max() > 8
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": "wdaa"}, "did you mean 'wda'"),
        ({"restarts": 0}, "give 1 to 13"),
        ({"restarts": 14}, "give 1 to 13"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    model, (x, y) = LinearClassifier.random(3, 4), samples(3, (4,), 3)
    with pytest.raises(InputError, match=words):
        a3(model, x, y, Threat(INF, INF, 0.1), **options)


def test_bad_data() -> None:
    model, (x, y) = LinearClassifier.random(3, 4), samples(3, (4,), 3)
    for broken in (
        lambda: (x * 255, y),
        lambda: (x, y[:2]),
        lambda: (x, y + 3),
        lambda: (x * math.nan, y),
    ):
        with pytest.raises(InputError):
            a3(model, *broken(), Threat(INF, INF, 0.1))


def test_what_is_recorded() -> None:
    model, (x, y) = LinearClassifier.random(3, 4), samples(6, (4,), 3)
    shares: list[float] = []
    result = a3(
        model, x, y, Threat(INF, 1.0, 0.1), step="wda", restarts=2, seed=5, progress=shares.append
    )
    assert (
        result.method == "a3-wda"
        and result.info["options"] == {"step": "wda", "restarts": 2}
        and result.info["seed"] == 5
    )
    assert (result.weights == 1).all() and shares == sorted(shares) and shares[-1] == 1


# network, norm, eps: how many of the 40 images from number 1000 on the original AutoAttack's
# APGD-CE and APGD-T leave right.
REFERENCE = {("mnist_madry_tiny", INF, 0.3): 32, ("mnist_madry_tiny", 2.0, 1.5): 27}


@pytest.mark.slow_cases("mnist_madry_tiny-l2")
@pytest.mark.parametrize("case", REFERENCE, ids=lambda c: f"{c[0]}-l{c[1]:g}")
def test_real_networks(zoo, case) -> None:
    name, norm, eps = case
    model, dataset = zoo.load(name)
    x, y = (t[1000:1040] for t in zoo.images(dataset, 1040))
    found = {
        step: a3(model, x, y, Threat(norm, INF, eps), step=step, restarts=7)
        for step in ("pgd", "wda")
    }
    for result in found.values():
        assert round(40 * result.accuracy) <= REFERENCE[case]
        assert result.verify(model, batch_size=16) and result.backwards.double().mean() < 150
    if norm == 2:  # MNIST stands at the walls of the box: a step that heeds them is worth far more
        assert found["wda"].accuracy < found["pgd"].accuracy - 0.05
