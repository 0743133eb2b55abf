"""What votes under noise prove, with one confidence for everything that is said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.records import Record
from wassail.smoothing.growth import Region, grouped, kumar, least_accuracy
from wassail.threat import Number, number, parse_confidence, parse_order
from wassail.transport import confidence as limits
from wassail.transport.curve import RiskCurve

NARROW = 1 - 1e-12  # radii end before the vote can be a tie


@dataclass(frozen=True, eq=False)
class Smoothing(Record):
    """What is proved of a smoothed model, for the l2 norm on all of R^n.

    All statements hold together with the confidence: half of what may go wrong is given to the
    limits of the single samples, half to their mean. An abstention counts as an error.

    Args:
        low: lower limits on the probability that the model is right under noise, float64 `(N,)`.
        high: upper limits, `(N,)`.
        mean: lower limit on the mean probability of the samples.
        hits: draws at which the model was right, int64 `(N,)`.
        draws: draws of each sample.
        sigma: standard deviation of the noise.
        confidence: of all statements together.
    """

    low: Tensor
    high: Tensor
    mean: float
    hits: Tensor
    draws: int
    sigma: float
    confidence: float

    @property
    def radii(self) -> Tensor:
        """Certified l2 radii of the majority vote, `(N,)`; 0 where it may be wrong."""
        from scipy.special import ndtri

        reach = self.sigma * np.asarray(ndtri(self.low.numpy())) * NARROW
        return torch.from_numpy(np.maximum(reach, 0.0))

    def accuracy(self, eps: Number, order: Number = 1) -> float:
        """The least accuracy of the randomised classifier over `Omega_order(eps)`.

        Never below `kumar(eps)`.

        Args:
            eps: budget >= 0 in the l2 norm.
            order: Wasserstein order, 1 to inf; default 1.
        """
        return least_accuracy(self._region, budget(eps), parse_order(order), self.sigma)

    def kumar(self, eps: Number) -> float:
        """The bound of Kumar, Levine and Feizi (2022) from the same votes, for comparison.

        Args:
            eps: budget >= 0 in the l2 norm, any order.
        """
        return kumar(self.mean, budget(eps), self.sigma)

    def curve(self, order: Number = 1, distances: Tensor | None = None) -> RiskCurve:
        """The curve of the majority vote.

        Args:
            order: Wasserstein order, 1 to inf; default 1.
            distances: of points where the vote is proved wrong (`SmoothedAttack.flips`), `(N,)`;
                default None, none is known.
        """
        n = len(self.low)
        known = torch.full((n,), math.inf, dtype=torch.float64)
        # where the model is wrong more often than not, nothing has to move
        known[self.high < 0.5] = 0.0
        if distances is not None:
            known = torch.minimum(known, distances.double())
        mu = torch.full((n,), 1 / max(n, 1), dtype=torch.float64)
        return RiskCurve(known, self.radii, mu, parse_order(order))

    def population(self, eps: Number, order: Number = 1, confidence: Number = 0.95) -> float:
        """The least accuracy of the randomised classifier for the population of the samples.

        For all eps and orders at once. The confidence is that of the statement in all: what the
        votes may get wrong is taken from it.

        Args:
            eps: budget >= 0 in the l2 norm.
            order: Wasserstein order, 1 to inf; default 1.
            confidence: between 0 and `self.confidence`; default 0.95.
        """
        alpha = 1 - parse_confidence(confidence) - (1 - self.confidence)
        if alpha <= 0:
            raise InputError(
                f"the votes were certified with confidence {self.confidence:g} and {confidence} is "
                "asked: certify the votes with a higher confidence."
            )
        n = len(self.low)
        shift = min(limits.kolmogorov(n, 1 - alpha / 2) + limits.SLACK, 1.0)
        share = _without_the_top(n, shift)
        low = np.append(np.sort(self.low.numpy()), 0.0)
        rates = self.hits.double().numpy() / self.draws
        mean = float(limits.mean_at_least(rates.sum(keepdims=True), n, alpha / 2)[0])
        region = grouped(low, np.ones_like(low), np.append(share, shift), mean)
        return least_accuracy(region, budget(eps), parse_order(order), self.sigma)

    @cached_property
    def _region(self) -> Region:
        n = len(self.low)
        if n == 0:
            raise InputError("there are no samples: a certificate needs some.")
        return grouped(self.low.numpy(), self.high.numpy(), np.full(n, 1 / n), self.mean)

    def __repr__(self) -> str:
        known = int((self.radii > 0).sum())
        return (
            f"Smoothing(sigma {self.sigma:g}, {len(self.low)} samples of {self.draws} draws, vote "
            f"certified right on {known}, mean probability at least {self.mean:.4f}, confidence "
            f"{self.confidence:g}; of the smoothed model)"
        )


def certificate(hits: Tensor, draws: int, sigma: float, confidence: Number) -> Smoothing:
    """Limits that hold together, from counts: see `Smoothing`.

    Args:
        hits: draws at which the model was right, int64 `(N,)`.
        draws: independent draws of each sample.
        sigma: standard deviation of the noise.
        confidence: of all limits together.
    """
    level = parse_confidence(confidence)
    n = len(hits)
    each = 1 - (1 - level) / (4 * max(n, 1))
    counts = [int(h) for h in hits]
    known = {h: proportion(h, draws, each) for h in set(counts)}
    low = torch.tensor([known[h][0] for h in counts], dtype=torch.float64)
    high = torch.tensor([known[h][1] for h in counts], dtype=torch.float64)
    mean = _mean(sum(counts), n * draws, 1 - (1 - level) / 2) if n else 0.0
    return Smoothing(low, high, mean, hits, draws, sigma, level)


def budget(eps: Number) -> float:
    """A budget that may be 0."""
    value = number(eps, "eps")
    if not 0 <= value < math.inf:
        raise InputError(f"eps is {eps!r}: give a budget that is 0 or more, for example 0.25.")
    return value


def proportion(hits: int, draws: int, confidence: float) -> tuple[float, float]:
    """Exact limits on one probability, each with this confidence."""
    low = limits.proportion_at_least(hits, draws, confidence)
    high = limits.proportion_at_most(hits, draws, confidence)
    return max(low, 0.0), min(high, 1.0)


def _mean(hits: int, draws: int, confidence: float) -> float:
    """A lower limit on the mean of several probabilities, each drawn equally often.

    Hoeffding (1956): a sum of independent events is at least c with at most the probability of the
    binomial with the same mean, for every c that is 1 or more above the expectation. So the
    binomial limit holds where it is at most (hits - 1) / draws.
    """
    low = limits.proportion_at_least(hits, draws, confidence)
    return max(min(low, (hits - 1) / draws), 0.0)


def _without_the_top(n: int, shift: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Shares of N sorted samples after the mass `shift` is taken from the largest."""
    ends = np.minimum(np.arange(1, n + 1) / n, 1 - shift)
    return np.maximum(np.diff(ends, prepend=0.0), 0.0)
