"""Intervals that cover as often as they say: closed forms, and by simulation."""

from __future__ import annotations

import math

import pytest
import torch

from wassail.threat import Threat
from wassail.transport.bootstrap import accuracy, interval
from wassail.transport.confidence import kolmogorov, proportion_at_least, proportion_at_most
from wassail.transport.guarantee import guaranteed_interval

INF = math.inf


def drawn(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponential distances, a tenth of them wrong to begin with, some without a flip."""
    generator = torch.Generator().manual_seed(seed)
    d = torch.empty(n, dtype=torch.float64).exponential_(generator=generator)
    kind = torch.rand(n, generator=generator)
    d[kind < 0.1] = 0.0
    d[kind > 0.8] = INF
    return d == 0, d


def test_right_or_wrong_is_binomial() -> None:
    wrong, d = drawn(80, 0)
    threat = Threat(2, INF, 0.4, None)
    right = int((d > 0.4).sum())
    assert guaranteed_interval(None, wrong, d, threat) == (
        proportion_at_least(right, 80, 0.975),
        proportion_at_most(right, 80, 0.975),
    )
    clean = guaranteed_interval(None, wrong, d, threat, share=0.0)
    assert clean[0] == proportion_at_least(int((~wrong).sum()), 80, 0.975)
    d[3] = 0.4  # a flip at exactly eps counts
    assert guaranteed_interval(None, wrong, d, threat)[0] <= proportion_at_least(right, 80, 0.975)


def test_a_shared_budget_has_the_band_and_few_samples_a_wide_one() -> None:
    wrong, d = drawn(100, 1)
    threat = Threat(2, 1, 0.1, None)
    here = accuracy(None, wrong, d, threat)
    low, high = guaranteed_interval(None, wrong, d, threat)
    assert here - low == pytest.approx(kolmogorov(100, 0.975), abs=1e-6)
    assert low < here < high <= 1
    narrow = guaranteed_interval(None, wrong, d, threat, level=0.5)
    assert low < narrow[0] < here


def test_weights_leave_it_to_the_bootstrap_and_nothing_to_nothing() -> None:
    wrong, d = drawn(30, 2)
    mu = torch.arange(1, 31).double()
    threat = Threat(2, 1, 0.1, None)
    assert guaranteed_interval(mu, wrong, d, threat) == interval(mu, wrong, d, threat)
    none = torch.zeros(0, dtype=torch.float64)
    assert all(math.isnan(end) for end in guaranteed_interval(None, none.bool(), none, threat))


@pytest.mark.few(4)
@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("order", [1.0, INF])
@pytest.mark.parametrize("n", [60, 400])
def test_coverage_is_at_least_what_is_said(n: int, order: float, share: float | None) -> None:
    """At a level of 0.8 the bootstrap's own coverage would be seen to fail at once."""
    threat = Threat(2, order, 0.2, None)
    wrong, every = drawn(200_000, 99)
    truth = accuracy(None, wrong, every, threat, share)
    covered = 0
    for seed in range(60):
        low, high = guaranteed_interval(None, *drawn(n, seed), threat, share, level=0.8)
        covered += low <= truth <= high
        assert low < high
    assert covered >= 42  # 0.8 of 60 minus two standard deviations
