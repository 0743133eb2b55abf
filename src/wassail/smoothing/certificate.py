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
from wassail.smoothing.growth import Region, grouped, kumar, least_accuracy, shifted
from wassail.threat import Number, number, parse_confidence, parse_order
from wassail.transport import confidence as limits
from wassail.transport.curve import RiskCurve
from wassail.writing import rounded_down

NARROW = 1 - 1e-12  # radii end before the vote can be a tie
FIRST = 0.9  # of what may go wrong is for the first count, the rest for those that grow from it


@dataclass(frozen=True, eq=False)
class Smoothing(Record):
    """What is proved of a smoothed model, for the l2 norm on all of R^n.

    All statements hold together with the confidence: half of what may go wrong is given to the
    limits of the single samples, half to their mean. They also hold together with those of all
    other multiples of the first count of draws, so one may look, and then draw more.

    The vote answers with the class that has more than half of the probability under noise, and
    abstains where there is none; an abstention counts as an error. A tie of logits does too.

    Args:
        low: lower limits on the probability that the model is right under noise, float64 `(N,)`.
        high: upper limits, `(N,)`.
        mean: lower limit on the mean probability of the samples.
        hits: draws at which the model was right, int64 `(N,)`.
        draws: draws of each sample.
        sigma: standard deviation of the noise.
        confidence: of all statements together.
        first: draws of the first count, which `draws` is a multiple of; default None, all.
    """

    low: Tensor
    high: Tensor
    mean: float
    hits: Tensor
    draws: int
    sigma: float
    confidence: float
    first: int | None = None

    def __post_init__(self) -> None:
        check_counts(self.hits, self.draws, self.sigma, self.first)
        ordered = (self.low >= 0) & (self.low <= self.high) & (self.high <= 1)
        if not (bool(ordered.all()) and 0 <= self.mean <= 1):
            raise InputError("the limits are no probabilities: certify the votes again.")

    @property
    def radii(self) -> Tensor:
        """Certified l2 radii of the vote, `(N,)`; 0 where it may be wrong or abstain."""
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
        """The curve of the vote.

        Args:
            order: Wasserstein order, 1 to inf; default 1.
            distances: of points where the vote is proved wrong (`SmoothedAttack.flips`), `(N,)`;
                default None, none is known.
        """
        n = len(self.low)
        known = torch.full((n,), math.inf, dtype=torch.float64)
        # where no more than half is right the vote is wrong or abstains, and nothing has to move
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
        rates = np.array([int(self.hits.sum()) / self.draws])
        # The samples are drawn once, the votes may grow: only the second shares its part.
        half = alpha / 2 * share(self.draws, self.first)
        mean = float(limits.mean_at_least(rates, n, half)[0])
        region = shifted(self.low.numpy(), shift, mean)
        return least_accuracy(region, budget(eps), parse_order(order), self.sigma)

    @cached_property
    def _region(self) -> Region:
        n = len(self.low)
        if n == 0:
            raise InputError("there are no samples: a certificate needs some.")
        return grouped(self.low.numpy(), self.high.numpy(), self.mean)

    def __repr__(self) -> str:
        known = int((self.radii > 0).sum())
        return (
            f"Smoothing(sigma {self.sigma:g}, {len(self.low)} samples of {self.draws} draws, vote "
            f"certified right on {known}, mean probability at least {rounded_down(self.mean, 4)}, "
            f"confidence {self.confidence:g}; of the smoothed model)"
        )


def certificate(
    hits: Tensor, draws: int, sigma: float, confidence: Number, first: int | None = None
) -> Smoothing:
    """Limits that hold together, from counts: see `Smoothing`.

    Args:
        hits: draws at which the model was right, int64 `(N,)`.
        draws: independent draws of each sample.
        sigma: standard deviation of the noise.
        confidence: of all limits together.
        first: draws of the first count, before anything was looked at; default None, all.
    """
    level = parse_confidence(confidence)
    check_counts(hits, draws, sigma, first)
    alpha = (1 - level) * share(draws, first)
    n = len(hits)
    counts = hits.cpu().numpy().astype(np.float64)
    low, high = limits.proportions(counts, draws, alpha / (4 * max(n, 1)))
    mean = _mean(int(hits.sum()), n * draws, alpha / 2) if n else 0.0
    return Smoothing(
        torch.from_numpy(low), torch.from_numpy(high), mean, hits, draws, sigma, level, first
    )


def share(draws: int, first: int | None) -> float:
    """Which part of what may go wrong a count of draws is given.

    The parts of all multiples of the first count add up to 1. So whoever looks at a result and then
    draws more can still rely on the confidence: which of the counts is the last does not matter.

    Args:
        draws: a multiple of `first`.
        first: draws of the first count; None for all.
    """
    times = 1 if first is None else draws // first
    return FIRST if times == 1 else (1 - FIRST) / ((times - 1) * times)


def check_counts(hits: Tensor, draws: int, sigma: float, first: int | None) -> None:
    """Refuse counts that no vote can have given: they may come from a file.

    Args:
        hits: draws at which the model was right, `(N,)`.
        draws: draws of each sample.
        sigma: standard deviation of the noise.
        first: draws of the first count, or None.
    """
    whole = hits.ndim == 1 and hits.dtype == torch.int64
    if not whole or draws < 1 or bool(((hits < 0) | (hits > draws)).any()):
        raise InputError(f"the votes are no counts out of {draws} draws: vote again.")
    if not 0 < sigma < math.inf:
        raise InputError(f"the votes have sigma {sigma!r}, which is no noise: vote again.")
    if first is not None and (first < 1 or draws % first):
        raise InputError(
            f"the votes have {draws} draws and began with {first}: draw a multiple of these, so "
            "that the confidence holds whatever was looked at before."
        )


def budget(eps: Number) -> float:
    """A budget that may be 0."""
    value = number(eps, "eps")
    if not 0 <= value < math.inf:
        raise InputError(f"eps is {eps!r}: give a budget that is 0 or more, for example 0.25.")
    return value


def _mean(hits: int, draws: int, alpha: float) -> float:
    """A lower limit on the mean of several probabilities, each drawn equally often.

    Hoeffding (1956): a sum of independent events is at least c with at most the probability of the
    binomial with the same mean, for every c that is 1 or more above the expectation. So the
    binomial limit holds where it is at most (hits - 1) / draws.
    """
    low = float(limits.proportions(np.array([float(hits)]), draws, alpha)[0][0])
    return max(min(low, math.nextafter((hits - 1) / draws, 0.0)), 0.0)
