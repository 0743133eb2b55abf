"""How far an accuracy over `Omega_p(eps)` may be off because the data are a sample: the bootstrap.

An accuracy is a function of the N samples: the budget of the threat buys the nearest flips first
(THEORY 2a), or every flip carries a fixed share. The bootstrap draws N samples again and again and
recomputes it, allocation included. All draws of a block are done at once: the distances are sorted
once, and a draw only changes the masses that are summed up along them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.threat import Threat, parse_level
from wassail.transport.allocation import sample_weights

BLOCK = 2**19  # numbers held for one block of resamples: 4 MB each for a dozen arrays


def accuracy(
    mu: Tensor | None, wrong: Tensor, distances: Tensor, threat: Threat, share: float | None = None
) -> float:
    """The accuracy over a threat that known flips leave, in [0, 1]; NaN without samples.

    mu: sample weights `(N,)` or None; wrong: bool `(N,)`, misclassified to begin with; distances
    `(N,)`: of the flips, inf where there is none; share: None lets the budget buy the nearest flips
    first, as `transport.knapsack` does; a number is the weight `1/kappa` that every flip carries
    whatever its distance, `1 - sum_i mu_i (wrong_i or share * flipped_i)`.
    """
    rule = Rule.of(wrong, distances, threat, share)
    mass = sample_weights(mu, len(rule.keys))
    if not len(mass):
        return math.nan
    return float(rule.accuracies(counts_of(mass)[None, rule.order])[0])


def interval(
    mu: Tensor | None,
    wrong: Tensor,
    distances: Tensor,
    threat: Threat,
    share: float | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap confidence interval (percentiles over resampled samples) of `accuracy` with the
    same arguments.

    The allocation is run again in every resample. Where the percentiles are both 0, or both 1, the
    resamples know nothing about samples that were not drawn: there the other end is the exact
    binomial one (Clopper and Pearson) for N samples, so that no flip among 100 samples reads as
    96.4 .. 100 % and not as 100 .. 100 %.
    """
    return _percentiles(Rule.of(wrong, distances, threat, share), mu, level, resamples, seed)


def fixed_interval(
    mu: Tensor | None,
    lost: Tensor,
    threat: Threat,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The interval of `interval` where each sample loses a given share of its accuracy.

    Args:
        mu: sample weights `(N,)`, or None for 1/N each.
        lost: the share of each sample that is classified wrongly, in [0, 1], `(N,)`.
        threat: what the shares were computed for.
        level: probability that the interval covers the accuracy; 0.95 by default.
        resamples: draws; 1000 by default.
        seed: of the draws; 0 by default.
    """
    keys, order = torch.as_tensor(lost, dtype=torch.float64).cpu().sort(stable=True)
    return _percentiles(Rule(keys, order, threat, True), mu, level, resamples, seed)


def _percentiles(
    rule: Rule, mu: Tensor | None, level: float, resamples: int, seed: int
) -> tuple[float, float]:
    level = parse_level(level, "level")
    weights = sample_weights(mu, len(rule.keys))
    if not len(weights):
        return math.nan, math.nan
    rule, mass = rule.grouped(weights)
    blocks = draws(mass, len(weights), checked_resamples(resamples), seed)
    found = torch.cat([rule.accuracies(counts) for counts in blocks])
    tail = (1 - level) / 2
    low, high = found.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    beyond = tail ** float((weights**2).sum())  # the exponent is 1/N for equal weights
    if low == 1:
        low = beyond
    elif high == 0:
        high = 1 - beyond
    return low, high


@dataclass(frozen=True)
class Rule:
    """How masses become an accuracy: `keys`, `(G,)` ascending, are the distances, or the shares
    lost if they are fixed.
    """

    keys: Tensor
    order: Tensor  # which sample each key belongs to
    threat: Threat
    fixed: bool

    @classmethod
    def of(cls, wrong: Tensor, distances: Tensor, threat: Threat, share: float | None) -> Rule:
        """The rule of `accuracy` with these arguments."""
        wrong = torch.as_tensor(wrong).cpu().bool()
        distances = torch.as_tensor(distances, dtype=torch.float64).cpu()
        if (
            distances.ndim != 1 or wrong.shape != distances.shape or not (distances >= 0).all()
        ):  # NaN fails too
            raise InputError(
                f"wrong has shape {tuple(wrong.shape)} and distances {tuple(distances.shape)}: "
                "give one flag and one number "
                ">= 0 a sample, inf where no flip is known."
            )
        distances = torch.where(wrong, 0.0, distances)
        if share is not None:
            keys = torch.where(
                wrong, 1.0, torch.isfinite(distances).double() * parse_level(share, "share")
            )
        elif threat.order == math.inf:
            keys = (distances <= threat.eps).double()
        else:
            keys = distances
        ascending, order = keys.sort(stable=True)
        return cls(ascending, order, threat, share is not None or threat.order == math.inf)

    def grouped(self, mu: Tensor) -> tuple[Rule, Tensor]:
        """The rule and the masses `(G,)` of samples that are drawn alike: a fixed share has at
        most three groups of them.
        """
        if not self.fixed:
            return self, mu[self.order]
        keys, group = torch.unique(self.keys, return_inverse=True)
        mass = torch.zeros_like(keys).index_add(0, group, mu[self.order])
        return Rule(keys, torch.arange(len(keys)), self.threat, True), mass

    def accuracies(self, masses: Tensor) -> Tensor:
        """The accuracy for every row of masses `(B, G)`, in the order of the keys and on any
        scale: `(B,)`.
        """
        total = masses.sum(1)
        if self.fixed:
            return ((masses * (1 - self.keys)).sum(1) / total).clamp(0, 1)
        masses = masses[:, : int(torch.isfinite(self.keys).sum())]
        # 0 times an infinite price would be NaN, and nothing so dear is ever bought
        price = ((self.keys[: masses.shape[1]] / self.threat.eps) ** self.threat.order).clamp(
            max=1e290
        )
        if not len(price):
            return torch.ones_like(total)
        paid = (masses * price).cumsum(1)
        mass = masses.cumsum(1)
        k = torch.searchsorted(paid, total[:, None], right=True)  # so many are bought in full
        at = k.clamp(max=len(price) - 1)
        before = (k - 1).clamp(min=0)
        spent, bought = (torch.where(k > 0, sums.gather(1, before), 0.0) for sums in (paid, mass))
        part = (total[:, None] - spent) / price[
            at
        ]  # less than its mass, or it would be bought in full
        bought = bought + torch.where(k < len(price), part, 0.0)
        return ((total - bought[:, 0]) / total).clamp(0, 1)

    def contributions(self, mu: Tensor) -> Tensor:
        """The h_i of `wassail.compare`, `(N,)` in the order of the samples: `sum_i mu_i h_i` is the
        accuracy.
        """
        if self.fixed:
            return torch.empty_like(self.keys).scatter(0, self.order, 1 - self.keys)
        price = (self.keys / self.threat.eps) ** self.threat.order
        mass = mu[self.order]
        paid = torch.where(mass > 0, mass * price, 0.0).cumsum(0)
        k = int(torch.searchsorted(paid, mass.sum(), right=True))
        limit = float(self.keys[k]) if k < len(self.keys) else math.inf
        if limit == math.inf:  # every known flip is paid for
            value = (self.keys == math.inf).double()
        else:
            gain = (1 - (self.keys / limit) ** self.threat.order).clamp(min=0)
            value = 1 - (self.threat.eps / limit) ** self.threat.order - gain
        return torch.empty_like(value).scatter(0, self.order, value)


def counts_of(mass: Tensor) -> Tensor:
    """Masses on a scale on which equal ones are whole numbers, so that 55 of 100 samples are
    0.55 exactly.
    """
    return mass / mass.max()


def draws(mass: Tensor, n: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each of G groups comes up among n draws with probabilities `mass` `(G,)`:
    blocks of float64 `(b, G)`.
    """
    generator = np.random.default_rng(seed)
    size = len(mass)
    even = size == n and bool((mass == mass[0]).all())
    block = max(1, BLOCK // size)
    chances = (mass / mass.sum()).numpy()
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        if even:  # nine times faster than a multinomial of N classes
            drawn = generator.integers(0, n, (rows, n)) + size * np.arange(rows)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size)
        else:
            counts = generator.multinomial(n, chances, rows)
        yield torch.from_numpy(counts).double()


def checked_resamples(resamples: int) -> int:
    """The number of resamples, or one sentence if there is none."""
    if resamples < 1:
        raise InputError(f"resamples is {resamples}: give a positive number, for example 1000.")
    return int(resamples)
