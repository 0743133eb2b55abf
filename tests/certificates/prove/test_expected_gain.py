"""What more branching is expected to bring, and that a search ends where that is nothing."""

import math
from typing import Any

import pytest
import torch

import wassail as ws
from wassail.certificates.prove.ladder import HOPE, Ladder, expected_gain
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.radius_search import Growth
from wassail.certificates.search.margins import Decided


def test_bounds_rise_as_the_logarithm_of_the_domains() -> None:
    """From -3 to -2 by 10 domains: HOPE times as much again by each power of 10 after that."""
    found = Decided(False, 10, -3.0, -2.0, None)
    for power in (1, 2, 3):
        reached = -3 + HOPE * power
        assert expected_gain(found, 2.0, 10.0**power) == pytest.approx(1 + reached / 2)
    assert expected_gain(found, 2.0, 5.0) == expected_gain(found, 2.0, 10.0)
    assert expected_gain(found, 2.0, math.inf) == expected_gain(found, 2.0, 1e9)


@pytest.mark.parametrize(
    "found",
    [
        Decided(True, 10, -3.0, -2.0, None),
        Decided(False, 10, -math.inf, -2.0, None),
        Decided(False, 10, -3.0, -math.inf, None),
        Decided(False, 0, -3.0, -2.0, None),
    ],
)
def test_nothing_is_expected_of_what_is_not_known(found: Decided) -> None:
    assert expected_gain(found, 1.0, 100.0) == math.inf


def test_bounds_that_fall_promise_what_the_first_one_says() -> None:
    assert expected_gain(Decided(False, 10, -2.0, -5.0, None), 1.0, 1e3) == -1.0


def test_branching_that_begins_as_well_as_linear_bounds_is_not_left_out() -> None:
    found = Decided(False, 10, -2.0, -1.99, None)
    assert expected_gain(found, 2.0, 1e3) == math.inf
    assert expected_gain(found, 1.0, 1e3) < 0


def growth(norm: float) -> Growth:
    model = ws.zoo.open_model("digits-cnn-adv").model
    x, y = ws.zoo.open_data("digits").read(0, 2)
    problem = Problem.of(model, x, y, norm, (0.0, 1.0))
    lower = torch.tensor([0.1, 0.1], dtype=torch.float64)
    return Growth(Ladder(problem), lower, torch.full_like(lower, math.inf))


def test_a_sample_ends_where_branching_is_not_expected_to_bring_anything() -> None:
    search = growth(1.0)
    last = len(search.ladder.levels)
    search.told(0, 0.108, False, math.inf, 0.1)
    assert search.level.tolist() == [last, 0], "0.8 % is expected: no level is left"
    search.told(1, 0.108, False, math.inf, 0.5)
    assert search.level.tolist() == [last, 0], "4 % are expected: a shorter step is"
    assert search.step[1] < search.first


def test_what_was_proved_on_the_way_counts() -> None:
    """A radius of 0.102 is expected of both: the second sample has it."""
    search = growth(1.0)
    search.told(1, 0.102, True, math.inf)
    for k in (0, 1):
        search.told(k, 0.108, False, math.inf, 0.25)
    assert search.level.tolist() == [0, len(search.ladder.levels)]


def test_balls_are_not_left_out() -> None:
    search = growth(2.0)
    search.told(0, 0.108, False, math.inf, -5.0)
    assert search.level[0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_a_radius_does_not_depend_on_the_batch(norm: float | str) -> None:
    model = ws.zoo.open_model("digits-mlp-adv").model
    x, y = ws.zoo.open_data("digits").read(0, 6)
    options: dict[str, Any] = {"norm": norm, "effort": 0.05, "arithmetic": "exact"}
    together = ws.radii(model, x, y, **options)
    alone = [ws.radii(model, x[k : k + 1], y[k : k + 1], **options) for k in range(6)]
    assert [float(one.values) for one in alone] == pytest.approx(together.values.tolist(), 1e-6)
    assert tuple(one.proved_by[0] for one in alone) == together.proved_by
