"""Intervals of an accuracy that cover as often as they say, for every number of samples.

An accuracy over `Omega_p(eps)` is a figure of N samples. How far the figure of all inputs may lie
from it is known without a bootstrap (THEORY 8): exact binomial limits where a sample is right or
wrong, limits on a mean where it may be partly lost, the limits of `RiskCurve.population_at` where a
budget is shared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.threat import Threat, parse_confidence
from wassail.transport.allocation import sample_weights
from wassail.transport.bootstrap import accuracy, interval
from wassail.transport.confidence import (
    mean_at_least,
    mean_at_most,
    proportion_at_least,
    proportion_at_most,
)
from wassail.transport.curve import RiskCurve


def guaranteed_interval(
    mu: Tensor | None,
    wrong: Tensor,
    distances: Tensor,
    threat: Threat,
    share: float | None = None,
    level: float = 0.95,
) -> tuple[float, float]:
    """An interval of `bootstrap.accuracy` with the same arguments: of the attack on all inputs.

    Samples of different weight are no independent draws: for them it is the bootstrap's.

    Args:
        mu: sample weights `(N,)`, or None for 1/N each.
        wrong: bool `(N,)`, misclassified to begin with.
        distances: of the flips, inf where there is none, `(N,)`.
        threat: what the accuracy is over.
        share: None lets the budget buy the nearest flips first; a number is the weight that every
            flip carries.
        level: probability that the interval covers the accuracy; 0.95 by default.
    """
    weights = sample_weights(mu, len(distances))
    if not len(weights):
        return math.nan, math.nan
    if not bool((weights == weights[0]).all()):
        return interval(mu, wrong, distances, threat, share, level)
    each = 1 - (1 - parse_confidence(level)) / 2  # of each side
    known = torch.where(wrong.cpu().bool(), 0.0, distances.cpu().double())
    if share is None and threat.order < math.inf:
        low, high = _shared(known, weights, threat, each)
    else:
        lost = known <= threat.eps if share is None else torch.isfinite(known)
        low, high = _fixed(known == 0, lost, 1.0 if share is None else share, each)
    here = accuracy(mu, wrong, distances, threat, share)
    return min(low, here), max(high, here)


def _shared(known: Tensor, mu: Tensor, threat: Threat, each: float) -> tuple[float, float]:
    """Limits where a budget buys the nearest flips: both sides of the curve of the flips."""
    return RiskCurve(known, known, mu, threat.order).population_at(threat, each)


def _fixed(wrong: Tensor, lost: Tensor, share: float, each: float) -> tuple[float, float]:
    """Limits where each sample that is lost loses the same share of its mass."""
    n = len(lost)
    if share in (0.0, 1.0):
        right = int((~wrong if share == 0 else ~(wrong | lost)).sum())
        return proportion_at_least(right, n, each), proportion_at_most(right, n, each)
    left = torch.where(wrong, 0.0, 1.0 - share * lost.double()).sum()[None].numpy()
    low = mean_at_least(left, n, 1 - each)
    return float(low[0]), float(mean_at_most(left, n, 1 - each)[0])
