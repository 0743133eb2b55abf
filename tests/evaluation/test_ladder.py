"""Passes that an evaluation chooses itself."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wassail as ws
from wassail.attacks.convergence import at_rest, shrinkage
from wassail.evaluation import ladder
from wassail.evaluation.ladder import LOOKS, MOST, RUNGS, Ladder, draw
from wassail.evaluation.reading import Reading
from wassail.evaluation.store.store import Store
from wassail.evaluation.work import Local
from wassail.transport.confidence import proportion_at_least

INF = math.inf
X, Y = ws.zoo.data("digits")
MLP = ws.zoo.load("digits-mlp")
THREAT = ws.Threat("inf", 1, 0.05)


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """Eight samples are drawn here, not a hundred: the runs are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "COUNT", 8)
        yield


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_shrinkage_is_of_the_mean_over_samples_with_a_flip() -> None:
    assert shrinkage(tensor(1, 3, INF), tensor(1, 2, 5)) == pytest.approx(0.25)
    assert shrinkage(tensor(INF), tensor(INF)) == 0 == shrinkage(tensor(), tensor())
    assert at_rest(tensor(1, INF), tensor(0.99, INF))
    assert not at_rest(tensor(1.0), tensor(0.97))
    assert not at_rest(tensor(1, INF), tensor(1, 50)), "a first flip is no rest"


def ladder_of(curve: dict[int, float], flips: int = 20) -> Ladder:
    return Ladder({passes: torch.full((flips,), far).double() for passes, far in curve.items()})


def test_the_decision_asks_for_what_it_needs_and_no_more() -> None:
    """The mean distance is 1 + 10 / passes: 6 % from 50 to 200 passes would be too much."""
    far = {passes: 1 + 10 / passes for passes in LOOKS}
    asked = []
    known: dict[int, float] = {}
    while (missing := ladder_of(known).top[1]) is not None:
        asked.append(missing)
        known[missing] = far[missing]
    # 25 to 100: 21 %; 50 to 200: 12.5 %; 100 to 400: 6.8 %; 200 to 800: 3.6 %; 400 to 1600: 1.8 %
    assert asked == [25, 100, 50, 200, 400, 800, 1600, 3200]
    assert ladder_of(known).passes == 1600
    assert ladder_of({25: 1.0}).top == (None, 100)
    assert ladder_of({25: 1.0, 100: 0.99}).top == (100, 200)
    assert ladder_of({}, 0).top == (None, 25)


def test_it_ends_at_the_most_passes_and_says_so() -> None:
    slow = {passes: passes**-0.1 for passes in LOOKS}
    found = ladder_of(slow)
    assert found.passes == MOST == RUNGS[-1] and found.top[1] is None
    chosen, left = found.findings()
    assert chosen.level == "warning" and "shrinks by 12.9 % from 800 to 3200" in chosen.text
    assert "--passes 12800" in chosen.text
    assert left.level == "note" and "20 of these 20 samples" in left.text
    slow |= {3200: 0.95 * slow[800]}
    assert ladder_of(slow).findings()[0].level == "note"


def test_what_is_left_is_a_lower_limit_for_every_choice_of_passes_at_once() -> None:
    now = torch.ones(100, dtype=torch.float64)
    later = now.clone()
    later[:30] = 0.98
    later[30:60] = 0.995
    now[99] = INF  # its first flip comes with the last look
    known = {25: now, 100: now, 200: later}
    _, left = Ladder(known).findings()
    least = proportion_at_least(31, 100, 1 - 0.05 / 6)
    assert f"at least {math.floor(1e4 * least) / 100:.2f} %" in left.text
    assert "bring 31 of these 100 samples" in left.text
    assert f"{(30 * 0.02 + 30 * 0.005 + 1):.1f} % nearer in the mean" in left.text
    none = Ladder({25: now, 100: now, 200: now}).findings()[1]
    assert none.level == "ok" and "at least 0.00 %" in none.text


def test_the_draw_belongs_to_the_samples() -> None:
    many = list(enumerate(X[:300]))
    first = draw(many, 0)
    assert len(first) == 8 and first == sorted(set(first))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1)).tolist()
    again = draw([(k, X[place]) for k, place in enumerate(order)], 0)
    assert sorted(order[place] for place in again) == first
    assert draw(many, 1) != first
    assert draw(many[:7], 0) == list(range(7)) and draw([], 0) == []


def run(folder: Path, chunk: int = 7, **options: Any) -> ws.Evaluation:
    return ws.evaluate(
        MLP,
        (X[:18], Y[:18]),
        THREAT,
        ("nearest",),
        passes="auto",
        out=folder,
        chunk=chunk,
        look=False,
        **options,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ws.Evaluation]:
    folder = tmp_path_factory.mktemp("auto") / "run"
    return folder, run(folder)


def test_a_run_takes_the_passes_that_the_drawn_samples_ask_for(whole) -> None:
    folder, found = whole
    reading = Reading(Store.open(folder))
    climbed = reading.ladder
    assert climbed is not None and len(reading.drawn) == 8
    x, y = X[reading.drawn], Y[reading.drawn]
    for passes, distances in climbed.known.items():
        alone = ws.nearest(MLP, x, y, "inf", passes=passes).distances
        assert torch.allclose(distances, alone, rtol=1e-4)
    assert climbed.passes is not None
    every = ws.nearest(MLP, X[:18], Y[:18], "inf", passes=climbed.passes).distances
    stored = reading.distances("attack@nearest")
    assert torch.allclose(stored, every, rtol=1e-4)
    spent = reading.column("attack@nearest", "forwards")
    assert int((spent + reading.column("attack@nearest", "backwards")).max()) <= climbed.passes
    assert (found.distances <= stored).all(), "the last look joins the pool"
    assert (found.distances[reading.drawn] <= climbed.known[2 * climbed.passes]).all()
    assert [f.name for f in found.findings if f.name in ("convergence", "left")] == [
        "convergence",
        "left",
    ]
    assert found.verify(MLP)


def test_chunks_change_neither_the_draw_nor_the_passes(whole, tmp_path) -> None:
    _, found = whole
    other = run(tmp_path / "other", chunk=18)
    assert [f.text for f in other.findings] == [f.text for f in found.findings]
    assert torch.allclose(other.distances, found.distances, rtol=1e-4)


class Stops(Local):
    """Stops like Ctrl-C after so many tasks."""

    def __init__(self, after: int) -> None:
        self.left = after

    def run(self, worker, tasks, tick):
        for result in super().run(worker, tasks, tick):
            yield result
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("after", [4, 9])
def test_a_run_that_was_stopped_ends_with_the_same_files(whole, tmp_path, after: int) -> None:
    folder, _ = whole
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", runner=Stops(after))
    run(tmp_path / "run", resume=True)
    ours, theirs = (
        {path.relative_to(base): path.read_bytes() for path in (base / "results").rglob("*.*")}
        for base in (folder, tmp_path / "run")
    )
    assert ours == theirs


def test_no_correct_sample_and_words_that_are_no_passes(tmp_path) -> None:
    none = ws.evaluate(MLP, (X[:3], (Y[:3] + 1) % 10), THREAT, ("nearest",), passes="auto")
    assert none.best[0].accuracy == 0
    with pytest.raises(ws.InputError, match='whole number, 1 or more, or "auto"'):
        ws.evaluate(MLP, (X[:3], Y[:3]), THREAT, ("nearest",), passes="many")
