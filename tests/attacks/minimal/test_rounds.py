"""The rounds of our engine: each keeps to its passes and belongs to its samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.attacks.minimal.boundary_search import boundary_search
from wassail.attacks.minimal.first_steps import FirstSteps, first_steps
from wassail.attacks.minimal.polish import SLACK, polish
from wassail.attacks.minimal.primal_dual import primal_dual
from wassail.attacks.minimal.restarts import near_best
from wassail.attacks.minimal.run import Engine, find_flips
from wassail.attacks.minimal.schedule import LATER, LOGIT_SIZES, PLAN, Turn, run_round, scheduled
from wassail.attacks.minimal.shrinking_ball import shrinking_ball
from wassail.attacks.minimal.tracker import Tracker
from wassail.network import Tape
from wassail.progress import Tick
from wassail.testing import LinearClassifier, samples

NORMS = (1.0, 2.0, math.inf)
ROUNDS = [(norm, name) for norm in NORMS for name in sorted({*PLAN[norm], *LATER[norm]})]


def net(seed: int = 3, factor: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    last = nn.Linear(24, 5)
    with torch.no_grad():
        last.weight *= factor
        last.bias *= factor
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 24), nn.Tanh(), last).double()


def opened(name: str, turn: int = 0) -> Engine:
    """A poor flip of each sample, and one round after it."""

    def engine(state: Tracker, tick: Tick) -> None:
        state.anytime = True
        first = FirstSteps.of(state)
        if len(first.rows):
            boundary_search(state, first.rows, first.toward(0, 2.5), 3)
            run_round(first, Turn(name, turn, 7, 0))

    return engine


def data() -> tuple[Tensor, Tensor]:
    x, _ = samples(12, (3, 4), 5)
    return x, net()(x).argmax(1)


@pytest.mark.few(11)
@pytest.mark.slow_cases(
    "1.0-from random",
    "1.0-from half-way",
    "1.0-from sample",
    "1.0-polish",
    "1.0-shrinking ball",
    "inf-from random",
)
@pytest.mark.parametrize(("norm", "name"), ROUNDS)
def test_a_round_keeps_to_its_passes_and_belongs_to_its_samples(norm: float, name: str) -> None:
    x, y = data()
    whole = find_flips(opened(name, 1), name, net(), x, y, norm)
    last = int((whole.forwards + whole.backwards).max())
    fewer = max(last - 31, last // 2)
    cut = find_flips(opened(name, 1), name, net(), x, y, norm, passes=fewer)
    assert (cut.forwards + cut.backwards <= fewer).all()
    assert (cut.distances >= whole.distances).all()
    other = torch.arange(12).flip(0)
    again = find_flips(opened(name, 1), name, net(), x[other], y[other], norm, batch_size=5)
    assert torch.allclose(again.distances, whole.distances[other], rtol=1e-9)


def test_the_schedule_goes_on_for_ever_and_counts_the_turns_of_each_round() -> None:
    for norm in NORMS:
        names = [scheduled(norm, number) for number in range(60)]
        assert tuple(name for name, _ in names[: len(PLAN[norm])]) == PLAN[norm]
        assert names[len(PLAN[norm])][0] == LATER[norm][0]
        for name in {name for name, _ in names}:
            turns = [turn for other, turn in names if other == name]
            assert turns == list(range(len(turns)))


@pytest.mark.slow_cases("1.0", "2.0")
@pytest.mark.parametrize("norm", NORMS)
def test_more_passes_are_never_farther_through_all_rounds(norm: float) -> None:
    x, y = data()
    last = None
    for passes in (150, 310, 900):
        flips = ws.nearest(net(), x, y, norm, passes=passes)
        assert (flips.forwards + flips.backwards <= passes).all()
        assert last is None or (flips.distances <= last).all()
        last = flips.distances


def test_a_primal_dual_round_finds_the_nearest_flip_of_a_linear_classifier() -> None:
    """In l1, where it is sparse, and from no flip at all."""
    model = LinearClassifier.random(4, 12, seed=2)
    x, y = samples(30, (3, 4), 4)
    y = model(x).argmax(1)
    exact = model.distances(x, y, 1.0, (0.0, 1.0))

    def engine(state: Tracker, tick: Tick) -> None:
        primal_dual(state, state.rows, 200)
        state.shorten(state.rows, 8)

    found = find_flips(engine, "primal-dual", model, x, y, 1.0)
    reachable = torch.isfinite(exact)
    assert found.success[reachable].all()
    assert (found.distances[reachable] / exact[reachable]).median() < 1.1


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("size", LOGIT_SIZES)
def test_a_factor_on_the_logits_changes_no_primal_dual(factor: float, size: float) -> None:
    x, y = data()

    def engine(state: Tracker, tick: Tick) -> None:
        primal_dual(state, state.rows, 40, size)

    one = find_flips(engine, "primal-dual", net(), x, y, 1.0)
    other = find_flips(engine, "primal-dual", net(factor=factor), x, y, 1.0)
    assert one.success.any()
    assert torch.allclose(one.distances, other.distances, rtol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_a_polish_from_the_sample_goes_to_the_rival_it_is_given(norm: float) -> None:
    """The best flip is of the nearest rival and far away; the climb is to the second one."""
    model = LinearClassifier.random(4, 12, seed=2)
    x, _ = samples(30, (3, 4), 4)
    y = model(x).argmax(1)
    seen: list[tuple[Tensor, Tensor]] = []

    def engine(state: Tracker, tick: Tick) -> None:
        first = FirstSteps.of(state)
        state.distance[first.rows] = 1e3  # as if a flip were known, so far away that none is near
        given = first.rivals[:, 1]
        slack = torch.full_like(state.distance, SLACK)
        polish(state, first.rows, 1, slack, start=state.x[first.rows], rivals=given)
        seen.append((given, first.rows))

    calls: list[Tensor] = []
    real = Tape.pull

    def pull(tape: Tape, weight: Tensor, *others: Any, **options: Any) -> Tensor:
        calls.append(weight)
        return real(tape, weight, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "pull", pull)
        find_flips(engine, "polish", model, x, y, norm)
    given, rows = seen[0]
    assert torch.equal(calls[-1].argmax(1), given)
    assert torch.equal(calls[-1].argmin(1), y[rows])


def test_a_sparse_polish_moves_a_third_of_the_coordinates_of_the_best_flip() -> None:
    """From a flip that changes six coordinates its first step moves two, by the same amount."""
    w = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.4, 0.3]], dtype=torch.float64)
    model = LinearClassifier(torch.cat([-w, w]) / 2, torch.zeros(2, dtype=torch.float64))
    x = torch.full((1, 8), -0.1, dtype=torch.float64)
    y = torch.tensor([0])
    seen: list[Tensor] = []

    class Seen(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            seen.append(z.detach().clone())
            return model(z)

    def engine(state: Tracker, tick: Tick) -> None:
        best = x.clone()
        best[0, :6] += 0.6
        state.logits(best, state.rows)
        seen.clear()
        slack = torch.full_like(state.distance, SLACK)
        polish(state, state.rows, 2, slack, length=0.1, sparse=True)

    find_flips(engine, "sparse", Seen(), x, y, 1.0, None)
    first, second = seen[0] - x, seen[1] - x
    assert float(first.abs().sum()) == pytest.approx(0.95 * 3.6)
    # The ball shrinks as well: what was not moved is thresholded by as much, once.
    grown = (second - first)[0, :6]
    assert torch.allclose(grown[0], grown[1]) and (grown[:2] > grown[2] + 0.1).all()
    assert torch.allclose(grown[2:], grown[2].expand(4))


@pytest.mark.parametrize("norm", NORMS)
def test_a_shrinking_ball_comes_back_to_the_nearest_flip_of_a_linear_classifier(
    norm: float,
) -> None:
    """From a flip three times too far, which no shrinking ball would leave where it is."""
    model = LinearClassifier.random(4, 12, seed=2)
    x, _ = samples(30, (3, 4), 4)
    y = model(x).argmax(1)
    exact = model.distances(x, y, norm, None)

    def engine(state: Tracker, tick: Tick) -> None:
        rows, _, steps = first_steps(state)
        state.logits(state.x[rows] + 3 * steps[:, 0], rows)
        assert torch.allclose(state.distance, 3 * exact, rtol=1e-3)
        shrinking_ball(state, rows, 80, near_best(state, rows, 0, 1))

    found = find_flips(engine, "shrinking ball", model, x, y, norm, None)
    assert (found.distances / exact).median() < 1.02
    assert (found.forwards + found.backwards == 1 + 3 + 1 + 160).all()


@pytest.mark.slow_cases("1.0-*", "2.0-*")
@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("norm", NORMS)
def test_a_factor_on_the_logits_changes_no_shrinking_ball(factor: float, norm: float) -> None:
    x, y = data()
    for turn in (0, 1):
        one = find_flips(opened("shrinking ball", turn), "shrinking ball", net(), x, y, norm)
        other = find_flips(
            opened("shrinking ball", turn), "shrinking ball", net(factor=factor), x, y, norm
        )
        assert one.success.any()
        assert torch.equal(one.distances, other.distances)


@pytest.mark.parametrize("norm", NORMS)
def test_rivals_are_seen_from_a_flip_of_another_one(norm: float) -> None:
    """The only flip known is of the second rival: the first one is found in one look."""
    model = LinearClassifier.random(4, 12, seed=2)
    x, _ = samples(30, (3, 4), 4)
    y = model(x).argmax(1)
    exact = model.distances(x, y, norm, None)

    def engine(state: Tracker, tick: Tick) -> None:
        first = FirstSteps.of(state)
        state.logits(first.toward(1, 1.02), first.rows)
        run_round(first, Turn("rivals at flip", 0, 1, 0))

    found = find_flips(engine, "rivals", model, x, y, norm, None)
    second = find_flips(no_round, "second", model, x, y, norm, None)
    assert (second.distances > 1.1 * exact).any()
    near = second.distances > 1.03 * exact  # else the second rival's flip is the answer itself
    assert (found.distances[near] / exact[near]).max() < 1.05


def no_round(state: Tracker, tick: Tick) -> None:
    first = FirstSteps.of(state)
    state.logits(first.toward(1, 1.02), first.rows)
