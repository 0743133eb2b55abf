"""Concave envelopes of several points for each sample, and what a budget pays for."""

import math

import torch

from wassail.transport.allocation import spend
from wassail.transport.envelope import by_sample, envelope


def test_envelopes_in_closed_form_and_in_order() -> None:
    gain = torch.tensor(
        [[1.0, 3.0, 3.5, 2.0], [4.0, -math.inf, 5.0, -math.inf]], dtype=torch.float64
    )
    price = torch.tensor([[1.0, 2.0, 4.0, 3.0], [1.0, 1.0, 5.0, 9.0]], dtype=torch.float64)
    steps = envelope(gain, price)  # slopes 3/2 and 1/4; 4 and 1/4: the steepest first
    assert list(zip(steps.sample.tolist(), steps.to.tolist(), steps.price.tolist())) == [
        (1, 0, 1.0), (0, 1, 2.0), (0, 2, 2.0), (1, 2, 4.0),
    ]  # fmt: skip
    # Points on a line up to rounding: whatever the slopes round to, no sample's steps may change
    # places.
    generator = torch.Generator().manual_seed(0)
    price = torch.rand(200, 12, dtype=torch.float64, generator=generator).sort(1).values
    steps = envelope(0.3 * price, price)
    for i in range(200):
        assert (steps.to[steps.sample == i].diff() > 0).all()


def test_an_envelope_begins_where_the_sample_is() -> None:
    price = torch.tensor([[0.0, 1.0, 2.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    gain = torch.tensor([[0.0, 2.0, 2.5, 1.0, 3.9, 3.0]], dtype=torch.float64)
    for origin in (0.0, 7.0):
        start = torch.full((1,), origin, dtype=torch.float64)
        steps = envelope(gain + origin, price, start)
        assert steps.start.tolist() == [-1, 1] and steps.to.tolist() == [1, 4]
        torch.testing.assert_close(steps.slope, torch.tensor([2.0, 0.95], dtype=torch.float64))


def test_points_by_sample() -> None:
    place, known = by_sample(torch.tensor([2, 0, 2, 2]), 4)
    assert [row[real].tolist() for row, real in zip(place, known)] == [[1], [], [0, 2, 3], []]


def test_a_budget_pays_in_order() -> None:
    bill = torch.tensor([0.5, 0.0, 0.25, 1.0, 0.0, 3.0], dtype=torch.float64)
    assert spend(bill, 1.0).tolist() == [1, 1, 1, 0.25, 0, 0]
    assert spend(bill, 0.0).tolist() == [0] * 6
    assert spend(bill, 9.0).tolist() == [1] * 6
    assert spend(bill[:0], 1.0).tolist() == []
