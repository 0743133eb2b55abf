"""New data beside a pack: the shift, the guarantee there, the accuracy seen, and one answer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wassail as ws
from support.forged import network
from wassail.errors import FAILS, HOLDS, UNKNOWN, InputError
from wassail.evidence.recheck import AtShare, _answer, _fell, recheck


def draws(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed))
    return x, network()(x).argmax(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ws.Evaluation:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("made") / "run"
    kept: dict[str, Any] = {"certify": "crown", "passes": 20, "look": False, "out": out}
    return ws.evaluate(network(), draws(60, 3), ws.Threat("inf", 1, 0.03), ("nearest",), **kept)


def test_data_of_the_same_kind(run: ws.Evaluation) -> None:
    found = recheck(run, draws(60, 4), network())
    assert found.code == HOLDS and found.seen == (60, 60), found
    assert "\n" not in found.sentence and "100.00 % of 60" in found.sentence


def test_the_same_samples_are_at_distance_0(run: ws.Evaluation) -> None:
    found = recheck(run, draws(60, 3), network())
    row = found.rows[0]
    assert found.code == HOLDS and row.share == 1 and row.eps == pytest.approx(0, abs=1e-9)
    assert row.guarantee == pytest.approx(run.curve(1)(0)[0])


def test_a_large_shift_ends_it(run: ws.Evaluation) -> None:
    x, _ = draws(60, 4)
    moved = x * 0.3
    found = recheck(run, (moved, network()(moved).argmax(1)), network())
    assert found.code == FAILS, found
    wrong = (network()(x).argmax(1) + 1) % 3
    found = recheck(run, (x, wrong), network())
    assert found.code == FAILS and "less was seen" in found.sentence


def test_samples_outside_the_box_and_new_classes(run: ws.Evaluation) -> None:
    x, y = draws(20, 4)
    found = recheck(run, (x + 1, y), network())
    assert found.code == FAILS and "outside the box" in found.sentence
    found = recheck(run, (x, torch.full_like(y, 7)))
    assert found.code == FAILS and "class 7 is new" in found.sentence


def test_without_a_model_the_accuracy_is_not_seen(run: ws.Evaluation) -> None:
    found = recheck(run, draws(60, 4))
    assert found.seen is None and "was not seen" in found.sentence


def test_a_contradiction_is_no_answer(run: ws.Evaluation) -> None:
    """The same samples cannot be less accurate than what is certified at distance 0."""

    def other(x: Tensor) -> Tensor:
        z = network()(x)
        z[::4] = -z[::4]
        return z

    with pytest.raises(InputError, match="one of the two is wrong"):
        recheck(run, draws(60, 3), other)


def test_it_needs_a_guarantee_and_data_of_one_kind(run: ws.Evaluation, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"passes": 20, "look": False, "out": tmp_path / "run"}
    bare = ws.evaluate(network(), draws(10, 3), ws.Threat("inf", 1, 0.03), ("nearest",), **kept)
    with pytest.raises(InputError, match="proves nothing"):
        recheck(bare, draws(10, 4))
    with pytest.raises(InputError, match="of the same kind"):
        recheck(run, (torch.rand(10, 3), torch.zeros(10, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("guarantee", "chance", "at_best", "expected"),
    [
        (0.6, 0.01, 0.6, HOLDS),  # guaranteed as promised
        (0.2, 0.5, 0.2, HOLDS),  # no shift beyond chance
        (0.2, 0.01, 0.3, FAILS),  # too far, also without the baseline
        (0.2, 0.01, 0.7, UNKNOWN),  # the baseline may be all of it
    ],
)
def test_every_answer(guarantee: float, chance: float, at_best: float, expected: int) -> None:
    row = AtShare(1.0, 0.1, 0.01, 0.5, guarantee)
    alone = AtShare(1.0, 0.1, 0.05, chance, at_best)
    assert _answer((row,), 0.5, None, alone, [])[0] == expected
    assert _answer((row,), 0.5, (10, 100), alone, [])[0] == FAILS
    nothing = AtShare(1.0, math.inf, math.inf, 1.0, 0.0)
    assert _answer((nothing,), 0.5, None, alone, [])[0] == (
        HOLDS if chance == 0.5 else _alone(at_best)
    )


def test_a_fall_of_the_accuracy_is_a_shift(run: ws.Evaluation) -> None:
    """Where distances show no shift beyond chance, fewer right answers may."""
    assert not _fell(run, None) and not _fell(run, (59, 60)) and _fell(run, (45, 60))
    row = AtShare(1.0, 0.1, 0.05, 0.5, 0.2)
    alone = AtShare(1.0, 0.1, 0.05, 0.5, 0.7)
    assert _answer((row,), 0.5, (45, 60), alone, [])[0] == HOLDS
    assert _answer((row,), 0.5, (1, 1), alone, []) == (UNKNOWN, "These samples are too few to tell")
    code, said = _answer((row,), 0.5, (45, 60), alone, [], fell=True)
    assert code == UNKNOWN and "only the accuracy shows a shift" in said


def _alone(at_best: float) -> int:
    return FAILS if at_best < 0.5 else UNKNOWN
