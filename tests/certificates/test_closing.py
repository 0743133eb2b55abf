"""Closing the bracket from both sides: exact where the answer is known, never wider than before,
and the same whatever the batches.
"""

import importlib
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.devices import there
from wassail.certificates.prove.ladder import Attempt, Ladder
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.sandwich import Sandwich

INF = math.inf
module = importlib.import_module("wassail.certificates.prove.sandwich")
BOX = (0.0, 1.0)


def linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 3)).double()


def perceptron(sizes: tuple[int, ...] = (8, 160, 150, 4), seed: int = 1) -> nn.Sequential:
    """More neurons than are searched exactly; all classes occur."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    for p in model.parameters():
        p.data *= 2.0
    with torch.no_grad():
        model[-1].bias -= model(torch.rand(200, sizes[0])).mean(0)
    return model


def data(model: nn.Module, n: int, seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    like = next(model.parameters())
    x = torch.rand(n, size, generator=torch.Generator().manual_seed(seed)).to(like.dtype)
    with torch.no_grad():
        return x, model(x).argmax(1)


def test_radii_that_meet_the_flips_are_exact_on_larger_networks() -> None:
    """Some neurons that bend among many that never do: too many for an exact search."""
    model = perceptron((3, 310, 3))
    model[0].bias.data[6:] = 9.0
    with torch.no_grad():
        model[-1].bias -= model(torch.rand(200, 3)).mean(0)
    model = model.double()
    x, y = data(model, 4, size=3)
    near = ws.nearest(model, x, y, INF, passes=60).distances
    threat = ws.Threat(INF, 1, 0.9 * float(near.mean()), BOX)
    found = ws.sandwich(model, x, y, threat, effort=0.333)
    ratio = found.radii.values / found.flips.distances
    assert found.exact and found.gap < 1e-3
    assert ((ratio >= 0.999 * (1 - 1e-9)) & (ratio <= 1)).all()
    assert not ws.radii(model, x, y, INF, method="crown").exact.any()
    # Flips are those of the executed network: the exact one's distance is not known to 1e-9.
    other = ws.sandwich(model, x, y, threat, effort=0.333, arithmetic="exact", flips=found.flips)
    assert other.gap < 1e-3 and not other.radii.exact.any()


@pytest.mark.parametrize("norm", [1, 2, INF])
@pytest.mark.parametrize("order", [1, INF])
def test_a_linear_model_has_no_gap(norm: float, order: float) -> None:
    """The nearest flip is known in closed form, on both sides."""
    model = linear()
    x, y = data(model, 6, size=6)
    weight = model[0].weight.detach()
    z = model(x).detach()
    other = {1: INF, 2: 2, INF: 1}[norm]
    steep = torch.linalg.vector_norm(weight[y][:, None] - weight[None], other, dim=2)
    ratio = (z.gather(1, y[:, None]) - z) / steep.scatter(1, y[:, None], 1.0)
    true = ratio.scatter(1, y[:, None], INF).amin(1)
    eps = float(true.sort().values[2:4].mean())  # between two of them
    threat = ws.Threat(norm, order, eps, None)
    found = ws.sandwich(model, x, y, threat, effort=0.0333)
    assert found.gap <= (2e-3 if order < INF else 1e-12)
    exact = ws.risk_curve(found.flips, None, order).of_order(order)(threat.eps)[1]
    assert found.certified <= exact <= found.attacked + 1e-12
    assert torch.allclose(found.flips.distances, true, rtol=1e-4)
    values = found.radii.values
    if order < INF:
        assert torch.allclose(values, true, rtol=1e-4)
    else:  # only eps itself is asked for
        assert torch.equal(values >= eps, true > eps) and bool((values <= true).all())


def small() -> tuple[nn.Module, Tensor, Tensor]:
    model = perceptron()
    return (model, *data(model, 4))


def before(model: nn.Module, x: Tensor, y: Tensor, threat: ws.Threat) -> float:
    """The gap of the two sides on their own."""
    flips = ws.nearest(model, x, y, threat.norm, BOX, passes=300)
    radii = ws.radii(model, x, y, threat.norm, BOX, "crown", upper=flips.distances)
    return ws.risk_curve(flips, radii, threat.order).gap(threat.eps)


@pytest.mark.slow_cases("inf")
@pytest.mark.parametrize("order", [1.0, INF])
def test_the_bracket_shrinks_and_holds(order: float) -> None:
    model, x, y = small()
    flips = ws.nearest(model, x, y, passes=300)
    eps = float(flips.distances.median()) * (0.9 if order == INF else 0.4)
    threat = ws.Threat("inf", order, eps)
    told: list[tuple[float, float]] = []
    told_of = lambda a, b: told.append((a, b))  # noqa: E731
    found = ws.sandwich(model, x, y, threat, effort=0.13, progress=told_of)
    assert found.gap < before(model, x, y, threat) - 0.02
    assert told == [row[1:] for row in found.history]
    for (a, b), (c, d) in itertools.pairwise(told):
        assert c >= a and d <= b
    assert (found.certified, found.attacked) == told[-1]
    assert (found.radii.values <= found.flips.distances).all()
    # Every radius is proved again, and every flip is one.
    at = found.radii.values
    assert ws.verify(model, x, y, threat, at=at, time_limit=120).proved.all()
    assert (model(found.flips.points).argmax(1) != y)[found.flips.success].all()
    assert found.radii.proved_by is not None
    assert {"quadratic", "branch"} & set(found.radii.proved_by)


@pytest.mark.slow
def test_it_stops_at_the_gap_that_is_asked() -> None:
    model, x, y = small()
    threat = ws.Threat("inf", 1, 0.03)
    full = ws.sandwich(model, x, y, threat, effort=0.1)
    first = full.history[0][2] - full.history[0][1]
    wide = (first + full.gap) / 2
    found = ws.sandwich(model, x, y, threat, effort=0.1, gap=wide)
    assert full.gap < found.gap <= wide
    assert found.info["work"] < full.info["work"]
    assert found.history == full.history[: len(found.history)]


def test_the_same_answer_whatever_the_batches(tmp_path: Path) -> None:
    # The model's own logits differ in the last digits from batch to batch. In float32 an attack
    # may make a part in a thousand of them, so the model is one of float64.
    model, x, y = small()
    model = model.double()
    x = x.double()
    threat = ws.Threat("inf", 1, 0.03)
    one = ws.sandwich(model, x, y, threat, effort=0.01)
    two = ws.sandwich(model, x, y, threat, effort=0.01, batch_size=2)
    assert len(one.history) > 2 and one.info["attempts"] > 0
    assert torch.allclose(one.radii.values, two.radii.values, rtol=1e-9)
    assert torch.allclose(one.flips.distances, two.flips.distances, rtol=1e-9)
    assert [row[0] for row in one.history] == [row[0] for row in two.history]
    again = ws.sandwich(model, x, y, threat, effort=0.01)
    assert torch.equal(one.radii.values, again.radii.values) and one.history == again.history
    one.save(tmp_path / "s.safetensors")
    kept = Sandwich.load(tmp_path / "s.safetensors")
    assert (kept.certified, kept.attacked) == (one.certified, one.attacked)
    assert "accuracy at least" in repr(kept) and kept.radii.proved_by == one.radii.proved_by


@pytest.mark.slow
def test_it_goes_on_from_what_is_known() -> None:
    model, x, y = small()
    threat = ws.Threat("inf", 1, 0.03)
    first = ws.sandwich(model, x, y, threat, effort=0.0167)
    more = ws.sandwich(model, x, y, threat, effort=0.0333, flips=first.flips, start=first.radii)
    assert (more.radii.values >= first.radii.values).all()
    assert (more.flips.distances <= first.flips.distances).all()


def test_what_is_known_is_not_sought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With flips of all samples no first attack, with radii no first linear bounds."""
    model, x, y = small()
    threat = ws.Threat("inf", 1, 0.03)
    flips = ws.nearest(model, x, y, passes=20)
    start = ws.radii(model, x, y, method="crown", tolerance=0.5)
    attacked: list[int] = []
    attack = module.attacked

    def spy(model: nn.Module, x: Tensor, *rest: object, **more: object) -> ws.Flips:
        attacked.append(len(x))
        return attack(model, x, *rest, **more)

    def never(*given: object, **more: object) -> None:
        raise AssertionError("the radii are known")

    monkeypatch.setattr(module, "attacked", spy)
    monkeypatch.setattr(module, "radii", never)
    found = ws.sandwich(model, x, y, threat, effort=0, flips=flips, start=start)
    assert not attacked
    assert torch.equal(found.flips.distances, flips.distances)
    assert torch.equal(found.radii.values, start.values)
    lost = flips.distances.clone()
    lost[1] = INF
    ws.sandwich(model, x, y, threat, effort=0, flips=replace(flips, distances=lost), start=start)
    assert attacked == [1]
    with pytest.raises(ws.InputError, match="differ in norm"):
        ws.sandwich(model, x, y, ws.Threat(2, 1, 0.03), flips=flips, effort=0)
    with pytest.raises(ws.InputError, match="differ in norm"):
        ws.sandwich(model, x, y, ws.Threat(2, 1, 0.03), start=start, effort=0)


def closing(radii: list[float], distances: list[float], eps: float) -> Any:
    """A bracket of order 1 over samples of equal weight."""
    n = len(radii)
    x = torch.rand(n, 6, dtype=torch.float64)
    mu = torch.full((n,), 1 / n, dtype=torch.float64)
    task = module._Closing(
        linear(), x, torch.zeros(n), ws.Threat(INF, 1, eps), mu, "auto", 0, None, lambda a, b: None
    )
    task.flips = SimpleNamespace(distances=torch.tensor(distances, dtype=torch.float64))
    task.growth = SimpleNamespace(lower=torch.tensor(radii, dtype=torch.float64))
    return task


def test_radii_below_the_budget_count_alike() -> None:
    """They add up to 0.25 of it: the price is that of the distances, and the largest counts."""
    task = closing([0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0], eps=1.0)
    assert task._price(task.lower) == 3.0  # 1/4 (1 + 2 + 3) is the first above 1
    won = task._won(task.lower, task.lower + 0.04)
    assert torch.allclose(won, torch.full_like(won, 0.04 / 3 / 4), rtol=1e-9)
    # Not beyond that price.
    won = task._won(task.lower, torch.full_like(task.lower, 5.0))
    assert torch.allclose(won, (1 - task.lower / 3) / 4, rtol=1e-9)


def test_radii_at_the_price_count_for_what_they_are_worth_together() -> None:
    """Four alike: to raise one of them is worth nothing at once."""
    task = closing([1.0, 1.0, 1.0, 1.0], [4.0, 4.0, 4.0, 4.0], eps=0.5)
    assert task._price(task.lower) == 1.0
    won = task._won(task.lower, task.lower + 0.1)
    assert torch.allclose(won, torch.full_like(won, 0.05 * 0.1 / 1.15 / 4), rtol=1e-9)
    # Below the price a step counts in full, and no farther than distances may.
    task.lower[0] = 0.5
    assert math.isclose(float(task._won(task.lower, task.lower + 0.1)[0]), 0.1 / 4, rel_tol=1e-9)
    task = closing([1.0, 1.0], [1.0, 1.0], eps=0.6)
    assert not task._won(task.lower, task.lower + 0.1).any()


def leaky() -> tuple[nn.Module, Tensor, Tensor]:
    """A network without quadratic bounds."""
    model = perceptron()
    model = nn.Sequential(*(nn.LeakyReLU(0.1) if isinstance(m, nn.ReLU) else m for m in model))
    return (model, *data(model, 3))


def test_no_radius_is_tried_beyond_one_that_failed_with_the_same_effort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prover that reaches a little farther with every effort."""
    model, x, y = leaky()
    flips = ws.nearest(model, x, y, passes=100)
    start = ws.radii(model, x, y, method="crown", upper=flips.distances)
    reach = start.values[:, None] * torch.tensor([1.1, 1.2, 1.25, 1.3, 1.32], dtype=torch.float64)
    failed: dict[tuple[int, int], float] = {}
    levels = set()

    def attempt(self: Ladder, rows: Tensor, radius: Tensor, level: int) -> Any:
        good = radius <= reach[rows, level]
        for i, r, proved in zip(rows.tolist(), radius.tolist(), good.tolist()):
            assert r < failed.get((i, level), INF)
            levels.add(level)
            if not proved:
                failed[i, level] = r
        by = ["branch" if g else "" for g in good]
        work = torch.full((len(rows),), 1e6, dtype=torch.float64)
        return SimpleNamespace(proved=good, by=by, points=x[rows].double(), work=work, domains=1)

    monkeypatch.setattr(Ladder, "attempt", attempt)
    threat = ws.Threat("inf", 1, 0.9 * float(flips.distances.mean()))
    found = ws.sandwich(model, x, y, threat, flips=flips, start=start, effort=0.333)
    assert levels == {0, 1, 2, 3, 4} and len(failed) >= 5
    assert (found.radii.values <= reach[:, -1]).all()
    assert (found.radii.values >= 0.95 * reach[:, 2]).all()


@pytest.mark.few(1)
@pytest.mark.parametrize(("norm", "levels"), [(2.0, 2), (INF, 4)])
def test_no_effort_proves_a_ball_with_a_flip(norm: float, levels: int) -> None:
    """With deeper balls and with better slopes; the more effort, the more is proved."""
    model, x, y = leaky()
    flips = ws.nearest(model, x, y, norm, passes=300)
    known = ws.radii(model, x, y, norm, method="crown", upper=flips.distances)
    problem = Problem.of(model, x, y, norm, BOX)
    rows = torch.arange(len(x))
    wide = flips.distances * (1 + 1e-6)
    near = 0.4 * known.values + 0.6 * flips.distances
    counts = []
    for level in range(levels):
        ladder = Ladder(problem)
        assert not ladder.attempt(rows, wide, level).proved.any()
        found: Attempt = ladder.attempt(rows, near, level)
        assert [bool(name) for name in found.by] == found.proved.tolist()
        assert (found.work > 0).all()
        counts.append(int(found.proved.sum()))
    assert counts == sorted(counts) and counts[0] < counts[-1]
    asked = ws.Threat(norm, 1, 0.1)
    sure = ws.verify(model, x, y, asked, at=near, time_limit=120)
    assert counts[-1] <= int(sure.proved.sum())


def test_with_a_time_limit_it_ends() -> None:
    model, x, y = small()
    found = ws.sandwich(model, x, y, ws.Threat(2, 1, 0.05), time_limit=1.0)
    assert found.gap >= 0 and found.info["seconds"] < 60


def test_the_candidate_of_a_proof_is_in_the_ball() -> None:
    """Where the bound is lowest, in the order of the inputs: on a linear network, the flip."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.rand(3, 2, 3, 3, dtype=torch.float64)
    y = model(x).argmax(1)
    for norm in (1.0, 2.0, INF):
        flips = ws.nearest(model, x, y, norm, None, passes=60)
        ladder = Ladder(Problem.of(model, x, y, norm, None))
        wide = flips.distances * 1.01
        found = ladder.attempt(torch.arange(3), wide, 0)
        assert not found.proved.any()
        moved = torch.linalg.vector_norm((found.points - x).flatten(1), norm, dim=1)
        assert torch.allclose(moved, wide, rtol=1e-9)
        assert (model(found.points).argmax(1) != y).all()


@pytest.mark.device
def test_the_second_device() -> None:
    model, x, y = small()
    threat = ws.Threat("inf", 1, 0.03)
    found, _ = there(
        lambda m, a, b: ws.sandwich(m, a, b, threat, effort=0.0167), model, x[:2], y[:2]
    )
    here = ws.sandwich(model, x[:2], y[:2], threat, effort=0.0167)
    assert torch.equal(found.radii.values, here.radii.values)
    assert torch.equal(found.flips.distances, here.flips.distances)
    assert found.history == here.history


@pytest.mark.parametrize(
    ("word", "value", "match"),
    [
        ("gap", 1.5, "gap is 1.5"),
        ("gap", -0.1, "gap is -0.1"),
        ("time_limit", 0, "time_limit is 0"),
        ("effort", -1, "effort is -1"),
    ],
)
def test_bad_arguments(word: str, value: Any, match: str) -> None:
    model, x, y = small()
    with pytest.raises(ws.InputError, match=match):
        ws.sandwich(model, x, y, ws.Threat("inf", 1, 0.03), **{word: value})


@pytest.mark.slow
def test_an_evaluation_closes_to_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = small()
    threats = [ws.Threat("inf", 1, 0.03), ws.Threat("inf", INF, 0.03)]
    began: list[ws.Flips] = []
    closing = module.sandwich

    def spy(*given: Any, **more: Any) -> Sandwich:
        began.append(more["flips"])
        return closing(*given, **more)

    monkeypatch.setattr(module, "sandwich", spy)
    plain = ws.evaluate(model, (x, y), threats, ["nearest"], certify="crown", chunk=3)
    found = ws.evaluate(
        model, (x, y), threats, ["nearest"], certify="auto", gap=0.05, chunk=3, time_limit=60
    )
    # It begins with what the attacks of the run have found.
    assert torch.equal(began[0].distances, plain.flips().distances)
    for threat in threats:
        narrow = found.curve(threat.order).gap(threat.eps)
        wide = plain.curve(threat.order).gap(threat.eps)
        assert narrow <= max(0.05, wide)
    assert found.curve(1).gap(0.03) < plain.curve(1).gap(0.03)
    with pytest.raises(ws.InputError, match="together with certify"):
        ws.evaluate(model, (x, y), threats, ["nearest"], gap=0.05)
