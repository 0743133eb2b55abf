"""The shift between two samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import wassail as ws

INF = math.inf


def test_a_moved_sample_is_explained_by_its_move() -> None:
    """All points 0.3 to the right: with everybody there the move is the shift."""
    x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    found = ws.shift_between(x, x + 0.3, shares=[1.0, 0.5], repeats=3)
    assert math.isclose(found.eps[0], 0.3, abs_tol=1e-9)
    assert found.shares == (1.0, 0.5) and found.eps[1] < 0.3
    two = ws.shift_between(x, x + 0.3, order=2, shares=[1.0], repeats=3)
    assert math.isclose(two.eps[0], 0.3, abs_tol=1e-9)


def test_people_that_are_missing_cost_nothing() -> None:
    """Half of the people stay away: explained by a subpopulation of one half, at eps 0."""
    x = torch.arange(20, dtype=torch.float64)[:, None]
    found = ws.shift_between(x, x[:10], shares=[1.0, 0.75, 0.5], repeats=3)
    assert math.isclose(found.eps[2], 0.0, abs_tol=1e-12)
    assert found.eps[0] > found.eps[1] > 1
    # With all there, the ten largest have to come down: 10 each on average, of half the mass.
    assert math.isclose(found.eps[0], 5.0, abs_tol=1e-9)


def test_labels_stay_or_have_a_price() -> None:
    x = torch.zeros(10, 1, dtype=torch.float64)
    before = (x, torch.tensor([0] * 5 + [1] * 5))
    after = (x, torch.tensor([0] * 8 + [1] * 2))
    stays = ws.shift_between(before, after, shares=[1.0, 0.7, 0.5], repeats=3)
    # A share of 0.8 of class 0 needs at least 0.5 / 0.8 of the people to be away.
    assert stays.eps == (INF, INF, 0.0)
    changes = ws.shift_between(before, after, shares=[1.0, 0.5], label_cost=2, repeats=3)
    assert math.isclose(changes.eps[0], 0.6, abs_tol=1e-9) and changes.eps[1] == 0


def draw(seed: int, shift: float) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(shift, 1, (40, 3)))


def test_samples_of_one_distribution_are_apart_by_chance() -> None:
    """Of 40 pairs some are as rare as one in ten: 4 are expected, more than 10 in 1 of 600."""
    found = [
        ws.shift_between(draw(2 * k, 0), draw(2 * k + 1, 0), 2, shares=[1.0]) for k in range(40)
    ]
    assert sum(one.chance[0] <= 0.1 for one in found) <= 10
    assert all(0.5 < one.eps[0] / one.baseline[0] < 2 for one in found)


def test_a_real_shift_stands_out() -> None:
    far = ws.shift_between(draw(0, 0), draw(1, 3), 2, shares=[1.0, 0.8])
    assert far.chance == (0.05, 0.05)
    assert far.eps[0] > 2 * far.baseline[0]
    assert "not at distance 0" in str(far) and "subpopulation 0.8" in str(far)
    assert far == ws.shift_between(draw(0, 0), draw(1, 3), 2, shares=[1.0, 0.8])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": INF}, "order is inf"),
        ({"shares": [0]}, "subpopulation is 0"),
        ({"shares": []}, "no shares"),
        ({"label_cost": -1}, "label_cost is -1"),
        ({"after": torch.zeros(3, 5)}, "one of the shape|of one shape"),
        ({"after": (torch.zeros(3, 2), torch.zeros(3))}, "only one of the two has labels"),
        ({"after": "people"}, "no tensor"),
        ({"after": torch.zeros(0, 2)}, "one or more"),
        ({"most": 0}, "most is 0"),
    ],
)
def test_one_sentence_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    given = {"before": torch.zeros(3, 2), "after": torch.zeros(3, 2), **changes}
    with pytest.raises(ws.InputError, match=words):
        ws.shift_between(**given)


def test_high_orders_neither_underflow_nor_fall() -> None:
    """W_p grows with p, up to the bottleneck distance; fewer people are never farther."""
    rng = torch.Generator().manual_seed(0)
    before = torch.rand(20, 3, generator=rng, dtype=torch.float64)
    after = before + 0.01 * torch.rand(20, 3, generator=rng, dtype=torch.float64)
    last = 0.0
    for order in (1, 2, 20, 150, 200, 2000):
        found = ws.shift_between(before, after, "inf", order, shares=(1, 0.8), repeats=2)
        assert last <= found.eps[0] * (1 + 1e-9) <= 0.0101
        assert 0 < found.eps[1] <= found.eps[0] * (1 + 1e-6)
        last = found.eps[0]
