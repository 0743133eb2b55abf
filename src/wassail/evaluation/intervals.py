"""How far an accuracy over `Omega_p(eps)` may be off because the data are a sample, and whether two
models differ.

An accuracy is a function of the N samples: the budget of the threat buys the nearest flips first
(THEORY 2a), or every flip carries a fixed share. The bootstrap draws N samples again and again and
recomputes it, allocation included. All draws of a block are done at once: the distances are sorted
once, and a draw only changes the masses that are summed up along them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.threat import Threat, parse_level
from wassail.transport.allocation import sample_weights

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

_BLOCK = (
    2**19
)  # numbers held for one block of resamples: 4 MB each for a dozen arrays, whatever N is


def accuracy(
    mu: Tensor | None, wrong: Tensor, distances: Tensor, threat: Threat, share: float | None = None
) -> float:
    """The accuracy over a threat that known flips leave, in [0, 1]; NaN without samples.

    mu: sample weights `(N,)` or None; wrong: bool `(N,)`, misclassified to begin with; distances
    `(N,)`: of the flips, inf where there is none; share: None lets the budget buy the nearest flips
    first, as `transport.knapsack` does; a number is the weight `1/kappa` that every flip carries
    whatever its distance, `1 - sum_i mu_i (wrong_i or share * flipped_i)`.
    """
    rule = _Rule.of(wrong, distances, threat, share)
    mass = sample_weights(mu, len(rule.keys))
    if not len(mass):
        return math.nan
    return float(rule.accuracies(_counts(mass)[None, rule.order])[0])


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
    level = parse_level(level, "level")
    rule = _Rule.of(wrong, distances, threat, share)
    weights = sample_weights(mu, len(rule.keys))
    if not len(weights):
        return math.nan, math.nan
    rule, mass = rule.grouped(weights)
    blocks = _draws(mass, len(weights), _checked(resamples), seed)
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
class Comparison:
    """Two runs on the same samples over one threat: the first's accuracy minus the second's.

    accuracies: of the two; interval: bootstrap confidence interval of the difference, both on the
    same resampled samples; p_value: two-sided, how often a difference this large comes up if the
    two are equally accurate; n: samples.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    n: int
    threat: Threat
    accuracies: tuple[float, float]

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return (
            f"{100 * self.accuracies[0]:.2f} % against {100 * self.accuracies[1]:.2f} % over "
            f"{self.threat}: difference "
            f"{100 * self.difference:+.2f} points, interval [{low:+.2f}, {high:+.2f}], p = "
            f"{self.p_value:.2g}, "
            f"{self.n} samples"
        )


def compare(
    a: Evaluation,
    b: Evaluation,
    threat: Threat,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Which of two models is more accurate over a threat, from two runs on the same samples (all
    attacks pooled).

    The interval is a paired bootstrap: every resample draws samples, not models. The p-value is a
    paired sign-flip test. By duality the accuracy is a mean over samples, with u the distance at
    which the budget runs out,

        accuracy = sum_i mu_i h_i,    h_i = 1 - (eps/u)^p - max(0, 1 - (d_i/u)^p),

    and since u is optimal a small change of the data changes it at second order only: the h_i are
    independent contributions of the samples, and under the null hypothesis their differences
    between the two runs have mean zero. Their signs are flipped at random. At order inf the h_i are
    0 or 1 and this is McNemar's exact test; swapping whole samples between the runs would test for
    finite orders that the models are alike in everything, not only in their accuracy.
    """
    level = parse_level(level, "level")
    _check_pair(a, b, threat)
    wrong = [run.predicted != run.y for run in (a, b)]
    rules = [_Rule.of(w, run.distances, threat, None) for w, run in zip(wrong, (a, b))]
    mass = sample_weights(a.mu, len(a.y))
    if not len(mass):
        return Comparison(math.nan, (math.nan, math.nan), math.nan, 0, threat, (math.nan, math.nan))
    first, second = (float(rule.accuracies(_counts(mass)[None, rule.order])[0]) for rule in rules)
    found = []
    for counts in _draws(mass, len(mass), _checked(resamples), seed):
        ours, theirs = (rule.accuracies(counts.index_select(1, rule.order)) for rule in rules)
        found.append(ours - theirs)
    tail = (1 - level) / 2
    low, high = (
        torch.cat(found).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    )
    p_value = _sign_flips(
        mass * (rules[0].contributions(mass) - rules[1].contributions(mass)), resamples, seed
    )
    return Comparison(first - second, (low, high), p_value, len(mass), threat, (first, second))


@dataclass(frozen=True)
class _Rule:
    """How masses become an accuracy: `keys`, `(G,)` ascending, are the distances, or the shares
    lost if they are fixed.
    """

    keys: Tensor
    order: Tensor  # which sample each key belongs to
    threat: Threat
    fixed: bool

    @classmethod
    def of(cls, wrong: Tensor, distances: Tensor, threat: Threat, share: float | None) -> _Rule:
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

    def grouped(self, mu: Tensor) -> tuple[_Rule, Tensor]:
        """The rule and the masses `(G,)` of samples that are drawn alike: a fixed share has at
        most three groups of them.
        """
        if not self.fixed:
            return self, mu[self.order]
        keys, group = torch.unique(self.keys, return_inverse=True)
        mass = torch.zeros_like(keys).index_add(0, group, mu[self.order])
        return _Rule(keys, torch.arange(len(keys)), self.threat, True), mass

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
        """The h_i of `compare`, `(N,)` in the order of the samples: `sum_i mu_i h_i` is the
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


def _counts(mass: Tensor) -> Tensor:
    """Masses on a scale on which equal ones are whole numbers, so that 55 of 100 samples are
    0.55 exactly.
    """
    return mass / mass.max()


def _draws(mass: Tensor, n: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each of G groups comes up among n draws with probabilities `mass` `(G,)`:
    blocks of float64 `(b, G)`.
    """
    generator = np.random.default_rng(seed)
    size = len(mass)
    even = size == n and bool((mass == mass[0]).all())
    block = max(1, _BLOCK // size)
    chances = (mass / mass.sum()).numpy()
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        if even:  # nine times faster than a multinomial of N classes
            drawn = generator.integers(0, n, (rows, n)) + size * np.arange(rows)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size)
        else:
            counts = generator.multinomial(n, chances, rows)
        yield torch.from_numpy(counts).double()


def _sign_flips(values: Tensor, resamples: int, seed: int) -> float:
    """The p-value of `|sum_i v_i|` among sums with random signs; the observed one counts, so it
    is never 0. `(N,) -> ()`.
    """
    values = values[values != 0]
    if not len(values):
        return 1.0
    observed = float(values.sum().abs())
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // len(values))
    reached = 0
    for start in range(0, resamples, block):
        signs = (
            2.0
            * generator.integers(0, 2, (min(block, resamples - start), len(values)), dtype=np.int8)
            - 1.0
        )
        sums = torch.from_numpy(signs) @ values
        reached += int(
            (sums.abs() >= observed * (1 - 1e-9)).sum()
        )  # equal sums in another order round differently
    return (1 + reached) / (1 + resamples)


def _check_pair(a: Evaluation, b: Evaluation, threat: Threat) -> None:
    """Refuse to compare what is not comparable."""
    names = f"the runs of {a.name!r} and {b.name!r}"
    if a.ids != b.ids or not torch.equal(a.y, b.y):
        raise InputError(
            f"{names} are on different samples: compare runs with the same data, in the same order."
        )
    if not torch.equal(a.mu, b.mu):
        raise InputError(f"{names} weigh their samples differently: compare runs with the same mu.")
    for run in (a, b):
        ours = run.threats[0]
        if (ours.norm, ours.domain) != (threat.norm, threat.domain):
            raise InputError(
                f"the run of {run.name!r} is for {ours}, the comparison for {threat}: choose a "
                "threat with the run's norm and "
                "domain; its order and eps are free."
            )


def _checked(resamples: int) -> int:
    if resamples < 1:
        raise InputError(f"resamples is {resamples}: give a positive number, for example 1000.")
    return int(resamples)
