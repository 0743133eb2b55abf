"""Whether two models differ over a threat: a paired bootstrap and a sign-flip test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.notebook import card, pairs
from wassail.threat import Threat, floor_percent, parse_level, parse_threat
from wassail.transport.allocation import sample_weights
from wassail.transport.bootstrap import BLOCK, Rule, checked_resamples, counts_of, draws
from wassail.transport.confidence import lead_at_least

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation


@dataclass(frozen=True)
class Comparison:
    """Two runs on the same samples over one threat: the first's accuracy minus the second's.

    Args:
        difference: first accuracy minus the second, a fraction.
        interval: bootstrap confidence interval of the difference, both on the same resampled
            samples.
        p_value: two-sided: how often a difference this large comes up if the two are equally
            accurate.
        n: samples.
        threat: `Threat` they are compared over.
        accuracies: of the two, fractions.
        guaranteed: limits on the difference for the population, certified accuracy of one against
            attacked accuracy of the other, each at the level of the interval; a lower limit above 0
            proves that the first is better; -1 and 1: nothing is known.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    n: int
    threat: Threat
    accuracies: tuple[float, float]
    guaranteed: tuple[float, float] = (-1.0, 1.0)

    @property
    def ordering(self) -> str:
        """Which of the two is better on the population, if that is proved; else empty."""
        low, high = self.guaranteed
        if low > 0:
            return f"the first is better on all such inputs, by {floor_percent(low)} points or more"
        if high < 0:
            return (
                f"the second is better on all such inputs, by {floor_percent(-high)} points or more"
            )
        return ""

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return (
            f"{100 * self.accuracies[0]:.2f} % against {100 * self.accuracies[1]:.2f} % over "
            f"{self.threat}: difference {100 * self.difference:+.2f} points, interval [{low:+.2f}, "
            f"{high:+.2f}], p = {self.p_value:.2g}, {self.n} "
            f"samples{'; proved: ' if self.ordering else ''}{self.ordering}"
        )

    def _repr_html_(self) -> str:
        low, high = (100 * end for end in self.interval)
        rows = [
            ("first", f"{100 * self.accuracies[0]:.2f} %"),
            ("second", f"{100 * self.accuracies[1]:.2f} %"),
            ("difference", f"{100 * self.difference:+.2f} points"),
            ("interval", f"{low:+.2f} to {high:+.2f} points"),
            ("p-value", f"{self.p_value:.2g}"),
            ("proved", self.ordering or "no order"),
        ]
        return card(f"Two models over {self.threat}, {self.n} samples", pairs(rows))


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

    The interval is a paired bootstrap: every resample draws samples, not models. It is widened for
    what percentiles miss with few samples: intervals that promise 95 % then covered 94.5 to 99 % of
    400 repetitions for 50 to 500 samples (orders 1, 2 and inf), where bare percentiles covered 90
    to 97. The p-value is a paired sign-flip test. By duality the accuracy is a mean over samples,
    with u the distance at which the budget runs out,

        accuracy = sum_i mu_i h_i,    h_i = 1 - (eps/u)^p - max(0, 1 - (d_i/u)^p),

    and since u is optimal a small change of the data changes it at second order only: the h_i are
    independent contributions of the samples, and under the null hypothesis their differences
    between the two runs have mean zero. Their signs are flipped at random. At order inf the h_i are
    0 or 1 and this is McNemar's exact test; swapping whole samples between the runs would test for
    finite orders that the models are alike in everything, not only in their accuracy.

    Args:
        a: `Evaluation` of the first model.
        b: `Evaluation` of the second model, on the same samples.
        threat: `Threat` with the runs' norm and domain; order and eps are free.
        level: float, probability that the interval covers the difference; default 0.95.
        resamples: int, draws and sign flips; default 2000.
        seed: int of the draws; default 0.

    Returns:
        `Comparison`.
    """
    level = parse_level(level, "level")
    _check_pair(a, b, threat)
    wrong = [run.predicted != run.y for run in (a, b)]
    rules = [Rule.of(w, run.distances, threat, None) for w, run in zip(wrong, (a, b))]
    mass = sample_weights(a.mu, len(a.y))
    if not len(mass):
        return Comparison(math.nan, (math.nan, math.nan), math.nan, 0, threat, (math.nan, math.nan))
    first, second = (float(rule.accuracies(counts_of(mass)[None, rule.order])[0]) for rule in rules)
    found = []
    for counts in draws(mass, len(mass), checked_resamples(resamples), seed):
        ours, theirs = (rule.accuracies(counts.index_select(1, rule.order)) for rule in rules)
        found.append(ours - theirs)
    tail = (1 - level) / 2
    low, high = (
        torch.cat(found).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    )
    low, high = _widened(first - second, low, high, level, 1 / float((mass**2).sum()))
    p_value = _sign_flips(
        mass * (rules[0].contributions(mass) - rules[1].contributions(mass)), resamples, seed
    )
    return Comparison(
        first - second,
        (low, high),
        p_value,
        len(mass),
        threat,
        (first, second),
        (_lead(a, b, threat, level), -_lead(b, a, threat, level)),
    )


def _widened(
    center: float, low: float, high: float, level: float, samples: float
) -> tuple[float, float]:
    """Percentiles with Student's quantile in place of the normal one, the variance of a sample in
    place of that of its resamples, and one sample's weight on each side for what is discrete.
    """
    if not 0 < level < 1 or samples <= 1 or low == high:
        return low, high
    from scipy.stats import norm, t

    tail = 1 - (1 - level) / 2
    normal = float(norm.ppf(tail))
    if not 0 < normal < math.inf:  # a level so near 0 or 1 that it is one of them here
        return (low, high) if normal == 0 else (-1.0, 1.0)
    factor = float(t.ppf(tail, samples - 1)) / normal * math.sqrt(samples / (samples - 1))
    # Percentiles may both lie on one side of the center: they are never moved towards it.
    low = min(low, center - factor * (center - low)) - 1 / samples
    high = max(high, center + factor * (high - center)) + 1 / samples
    return max(low, -1.0), min(high, 1.0)


def _lead(a: Evaluation, b: Evaluation, threat: Threat, level: float) -> float:
    """A lower limit on how much better the first is on the population (THEORY 8), -1 if none."""
    curve = a.curve(threat.order)
    if curve.radii is None or not bool((curve.mu == curve.mu[0]).all()) or not 0 < level < 1:
        return -1.0
    ours = curve.radii.numpy()
    theirs = b.distances.numpy()
    found = lead_at_least(ours, theirs, threat.eps, threat.order, 1 - level)
    return max(found, -1.0)


def _sign_flips(values: Tensor, resamples: int, seed: int) -> float:
    """The p-value of `|sum_i v_i|` among sums with random signs; the observed one counts, so it
    is never 0. `(N,) -> ()`.
    """
    values = values[values != 0]
    if not len(values):
        return 1.0
    observed = float(values.sum().abs())
    generator = np.random.default_rng(seed)
    block = max(1, BLOCK // len(values))
    reached = 0
    for start in range(0, resamples, block):
        signs = (
            2.0
            * generator.integers(0, 2, (min(block, resamples - start), len(values)), dtype=np.int8)
            - 1.0
        )
        sums = torch.from_numpy(signs) @ values
        # Equal sums in another order round differently.
        reached += int((sums.abs() >= observed * (1 - 1e-9)).sum())
    return (1 + reached) / (1 + resamples)


def same_task(a: Evaluation, b: Evaluation) -> bool:
    """Whether right means the same in two runs on the same samples."""
    if a.criterion != b.criterion or a.targets is None or b.targets is None:
        return a.criterion == b.criterion
    return torch.equal(a.targets, b.targets)


def _check_pair(a: Evaluation, b: Evaluation, threat: Threat) -> None:
    """Refuse to compare what is not comparable."""
    parse_threat(threat, own=True)
    for run in (a, b):
        if not hasattr(run, "threats"):
            raise InputError(
                f"a run is a {type(run).__name__}: give two Evaluations, as ws.evaluate returns."
            )
    names = f"the runs of {a.name!r} and {b.name!r}"
    if a.ids != b.ids or not torch.equal(a.y, b.y) or not same_task(a, b):
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
                "threat with the run's norm and domain; its order and eps are free."
            )
