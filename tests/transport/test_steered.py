"""Limits for the population from radii that depend on all samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.transport import confidence as limits
from wassail.transport.curve import RiskCurve

INF = math.inf
SAMPLES = 1000
PLACES = np.random.default_rng(0).permutation(SAMPLES)
FIRST, REST = PLACES[:100], PLACES[100:]
ALPHA = 0.2


def atoms() -> tuple[float, float]:
    """Masses at distance 0 and 1, the rest never flips: 0 hits at price 1 and 1 hit at any higher
    price are both just too few, and both prices have the same bound, the error itself.
    """
    none = float(limits.mean_at_most(np.zeros(1), len(REST), ALPHA)[0]) + 1e-9
    one = float(limits.mean_at_most(np.ones(1), len(REST), ALPHA)[0]) + 1e-9
    return none, one - none


def curve(distances: np.ndarray, radii: np.ndarray, order: float = 1.0) -> RiskCurve:
    d = torch.from_numpy(distances)
    return RiskCurve(d, torch.from_numpy(radii), torch.full_like(d, 1 / len(d)), order)


def steered(first: tuple[int, int], rest: tuple[int, int]) -> RiskCurve:
    """So many samples at distance 0 and 1. One radius in a hundred is stopped early, where it
    makes the others look best.
    """
    distances = np.full(SAMPLES, INF)
    for places, (near, far) in ((FIRST, first), (REST, rest)):
        distances[places[:near]] = 0.0
        distances[places[near : near + far]] = 1.0
    radii = distances.copy()
    radii[FIRST[-1]] = 1e12 if rest[0] > 0 and sum(rest) <= 1 else 1.0
    return curve(distances, radii)


def test_a_limit_covers_however_the_radii_were_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "error_at_least", lambda *_: 0.0)  # slow, and not looked at
    zero, unit = atoms()
    threat = ws.Threat(2, 1, unit)  # at price 1 the budget costs as much as the second atom
    truth = 1 - zero - unit
    rng = np.random.default_rng(1)
    repetitions = 20_000
    masses = (zero, unit, 1 - zero - unit)
    counts = [rng.multinomial(len(part), masses, repetitions)[:, :2] for part in (FIRST, REST)]
    rows, often = np.unique(np.concatenate(counts, 1), axis=0, return_counts=True)
    missed = 0
    for (a, b, c, d), weight in zip(rows.tolist(), often.tolist()):
        missed += weight * (steered((a, b), (c, d)).population_at(threat, 1 - ALPHA)[0] > truth)
    spread = math.sqrt(ALPHA * (1 - ALPHA) / repetitions)
    assert missed / repetitions <= ALPHA + 3 * spread


@pytest.mark.slow_cases("2.0")
@pytest.mark.parametrize("order", [1.0, 2.0])
def test_radii_of_other_samples_choose_a_sharper_limit(order: float) -> None:
    """It covers with radii that are cut short where that costs the samples nothing."""
    rng = np.random.default_rng(2)
    levels = np.array([0.0, 0.05, 0.1, 0.3, 1.0, INF])
    masses = np.array([0.04, 0.02, 0.04, 0.2, 0.4, 0.3])
    eps = 0.02
    mass = torch.from_numpy(masses)
    truth = RiskCurve(torch.from_numpy(levels), torch.from_numpy(levels), mass, order)(eps)[0]
    threat = ws.Threat(2, order, eps)
    rounds = 1000
    held = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "error_at_least", lambda *_: 0.0)
        pilot = torch.from_numpy(rng.choice(levels, 100, p=masses))
        for _ in range(rounds):
            distances = rng.choice(levels, 300, p=masses)
            last = np.sort(distances)[int(0.4 * len(distances))]
            known = curve(distances, np.minimum(distances, max(last, 0.3)), order)
            low = known.population_at(threat, 0.8, pilot)[0]
            held += low <= truth + 1e-12
        assert low > known.population_at(threat, 0.8)[0]
    assert held / rounds >= 0.8 - 3 * math.sqrt(0.16 / rounds)


def test_without_a_pilot_the_certified_side_is_the_band() -> None:
    d = np.random.default_rng(3).gamma(2, 0.1, 600)
    known = curve(d, 0.9 * d)
    threat = ws.Threat(2, 1, 0.01)
    assert known.population_at(threat)[0] == known.population()(0.01)[0]


def test_a_pilot_of_another_norm_or_without_radii_is_refused() -> None:
    known = curve(np.ones(4), np.ones(4))
    other = ws.Radii(torch.ones(3).double(), torch.ones(3).bool(), "crown", INF, (0.0, 1.0))
    with pytest.raises(ws.InputError, match="norm"):
        known.population_at(ws.Threat(2, 1, 0.1), pilot=other)
    for bad in (torch.zeros(0), torch.tensor([-1.0]), torch.ones(2, 2)):
        with pytest.raises(ws.InputError, match="pilot must hold"):
            known.population_at(ws.Threat(2, 1, 0.1), pilot=bad)
