"""The tracker of the best point so far."""

import torch

from wassail.attacks.best import Best


def test_only_better_points_are_kept() -> None:
    start = torch.zeros(3, 2)
    best = Best(start)
    best.offer(torch.ones(3, 2), torch.tensor([1.0, 2.0, 3.0]))
    better = best.offer(2 * torch.ones(2, 2), torch.tensor([5.0, 2.0]), torch.tensor([2, 1]))
    assert better.tolist() == [True, False]
    assert best.points[:, 0].tolist() == [1.0, 1.0, 2.0]
    assert best.value.tolist() == [1.0, 2.0, 5.0]
    assert not start.any()


def test_a_flip_is_kept_whatever_it_reaches_and_nan_is_not() -> None:
    best = Best(torch.zeros(2, 1), torch.tensor([4.0, 4.0]))
    value = torch.tensor([1.0, torch.nan])
    best.offer(torch.ones(2, 1), value, sure=torch.tensor([True, False]))
    assert best.points.flatten().tolist() == [1.0, 0.0]
    assert best.value.tolist() == [1.0, 4.0]


def test_some_of_the_samples_are_copies_and_values_are_not_rounded() -> None:
    best = Best(torch.zeros(3, 1))
    part = best[torch.tensor([2, 0])]
    exact = torch.tensor([1.0 + 2.0**-40, 0.5], dtype=torch.float64)
    part.offer(torch.ones(2, 1), exact)
    assert torch.equal(part.value, exact)
    assert not torch.isfinite(best.value).any()
    assert not best.points.any()
