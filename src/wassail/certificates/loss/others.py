"""The worst-case loss where labels change at a price and people are missing (THEORY 12).

With `psi_i(lam) = max_y' sup_x [loss(x, y') - lam (||x - x_i|| + kappa 1[y' != y_i])^p]` it is

    min_{lam >= 0, t} lam eps^p + t + (1/alpha) sum_i mu_i (psi_i(lam) - t)_+ ,

the mean of the worst share alpha (CVaR) of what the transport allows. A sample with another label
is one more sample that costs kappa to reach: the points and bounds of all such pairs are those of a
plain curve. Any lam and t give an upper bound; the lower side is a distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from wassail.certificates.bound import below
from wassail.certificates.loss.certificate import Certificate
from wassail.certificates.loss.curve import LossCurve
from wassail.certificates.loss.pairs import Pairs, worst_masses, worst_share
from wassail.errors import InputError
from wassail.rounding import UNIT
from wassail.threat import Number, parse_eps


@dataclass(frozen=True, eq=False, repr=False)
class OthersLossCurve(Pairs, LossCurve):
    """A `LossCurve` with labels that change and people that are missing: `loss_curve` makes it.

    The fields of a `LossCurve` are those of pairs: each sample with its own label, or with all K
    labels one after the other where labels may change.

    Args:
        true: labels of the samples, integer `(N,)`.
        weights: of the samples, float64 `(N,)`.
        label_cost: price kappa of a changed label.
        subpopulation: least share alpha of the population that is there.
    """

    true: Tensor = field(kw_only=True)
    weights: Tensor = field(kw_only=True)
    label_cost: float = field(default=math.inf, kw_only=True)
    subpopulation: float = field(default=1.0, kw_only=True)

    @classmethod
    def of(
        cls, pairs: LossCurve, y: Tensor, mu: Tensor, label_cost: float, subpopulation: float
    ) -> OthersLossCurve:
        """The curve of samples from that of their pairs.

        Args:
            pairs: curve of the samples with the labels that they may have.
            y: their own labels.
            mu: their weights.
            label_cost: price of a changed label.
            subpopulation: least share that is there.
        """
        known = {name: getattr(pairs, name) for name in pairs.__dataclass_fields__}
        return cls(
            **known,
            true=y,
            weights=mu,
            label_cost=label_cost,
            subpopulation=subpopulation,
        )

    def lower(self, eps: float) -> float:
        """As `LossCurve.lower`.

        Args:
            eps: budget >= 0.
        """
        return self.expected(eps)

    @property
    def empirical(self) -> float:
        """The expected loss on the samples themselves."""
        return math.fsum((self.weights * self.clean[self.own]).tolist())

    def population(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: limits for the population are known for accuracies with others, and for losses
        without them.
        """
        raise InputError(
            "limits for the population of a loss with label costs or subpopulations are not known: "
            "use ws.risk_curve(..., label_cost=, subpopulation=).population() for the accuracy."
        )

    population_at = population

    def slope_lines(self) -> list[tuple[float, float]]:
        """As `LossCurve.slope_lines`: by the steepest slope, at which no input moves."""
        if self.slope == math.inf:
            return []
        return [(self.slope, self.mean(self.reduced(self.slope) + self.lift))]

    @property
    def before(self) -> Tensor:
        """The price of each pair's label, `(M, 1)`."""
        return self.extra[:, None]

    def mean(self, values: Tensor) -> float:
        """The mean of the worst share of each sample's best pairs, rounded up.

        Args:
            values: of the pairs, `(M,)`.
        """
        return worst_share(self.weights, self.best(values)[0], self.subpopulation)

    def spent(self, values: Tensor, prices: Tensor) -> float:
        """What those pairs pay.

        Args:
            values: of the pairs, `(M,)`.
            prices: `(M,)`.
        """
        best, rows = self.best(values)
        return float((worst_masses(self.weights, best, self.subpopulation) * prices[rows]).sum())

    def at_rest(self) -> float:
        """The loss on the samples that are there, rounded up."""
        return worst_share(self.weights, self.start[self.own], self.subpopulation)

    def within(self, eps: float, edge: Tensor) -> Tensor:
        """The highest loss of each pair that its sample can afford with eps, rounded up, `(M,)`.

        Args:
            eps: radius.
            edge: 0 and the radii of the grid.
        """
        found = self.tops(eps, edge)
        left = torch.full_like(found, -math.inf)
        if self.label_cost <= eps:
            left = self.tops(math.nextafter(eps - self.label_cost, math.inf), edge)
        return torch.where(self.extra > 0, left, found)


@dataclass(frozen=True, eq=False, repr=False)
class OthersCertificate(Pairs, Certificate):
    """A `Certificate` with labels that change and people that are missing: `certify` makes it.

    The fields of a `Certificate` are those of pairs, as for `OthersLossCurve`; its slopes hold for
    every label that a sample may have.

    Args:
        true: labels of the samples, integer `(N,)`.
        weights: of the samples, float64 `(N,)`.
        clean: loss of the pairs where they are, `(M,)`.
        start: the same, rounded up, `(M,)`.
        value: loss at the evaluated points.
        label_cost: price kappa of a changed label.
        subpopulation: least share alpha of the population that is there.
    """

    true: Tensor = field(kw_only=True)
    weights: Tensor = field(kw_only=True)
    clean: Tensor = field(kw_only=True)
    start: Tensor = field(kw_only=True)
    label_cost: float = field(default=math.inf, kw_only=True)
    subpopulation: float = field(default=1.0, kw_only=True)

    value: Tensor = field(kw_only=True)

    order = 1.0

    @classmethod
    def of(
        cls,
        pairs: Certificate,
        y: Tensor,
        mu: Tensor,
        clean: Tensor,
        start: Tensor,
        label_cost: float,
        subpopulation: float,
    ) -> OthersCertificate:
        """The certificate of samples from that of their pairs.

        Args:
            pairs: certificate of the samples with the labels that they may have.
            y: their own labels.
            mu: their weights.
            clean: loss of the pairs where they are.
            start: the same, rounded up.
            label_cost: price of a changed label.
            subpopulation: least share that is there.
        """
        return cls(
            **{one.name: getattr(pairs, one.name) for one in fields(Certificate)},
            true=y,
            weights=mu,
            clean=clean,
            value=clean[pairs.root] + pairs.gain,
            start=start,
            label_cost=label_cost,
            subpopulation=subpopulation,
        )

    def bounds(self, eps: Number) -> tuple[float, float]:
        """`(lower, upper)` on the worst expected loss at a budget of order 1.

        Below: the evaluated witness, and on R^n what a vanishing mass gains far out. Above: any
        multiplier from the steepest slope on.

        Args:
            eps: budget > 0, in units of the norm.
        """
        budget = parse_eps(eps)
        low = self.expected(budget)
        if self.domain is None and self.infinity is not None:
            # That mass may come from a sample that is not there, and have any label.
            low = max(low, self.expected(0.0) + self.infinity.lower * budget)
        high = self.upper(budget)
        return below(low, high, "worst-case loss"), high

    def upper(self, eps: float) -> float:
        """The upper side alone.

        Args:
            eps: budget >= 0, in units of the norm.
        """
        slopes = [b.upper for b in (self.anchor, self.margin, self.paper) if b is not None]
        least = min(slopes, default=math.inf)
        if least == math.inf:
            return math.inf
        if self.label_cost == math.inf:
            return self._line(eps, least)
        spread = float(self.start.max() - self.start.min())
        low, high = least, least + spread / self.label_cost
        found = [self._line(eps, low), self._line(eps, high)]
        for _ in range(100):  # convex in the multiplier: thirds
            left, right = low + (high - low) / 3, high - (high - low) / 3
            a, b = self._line(eps, left), self._line(eps, right)
            low, high = (low, right) if a <= b else (left, high)
            found += [a, b]
        return min(found)

    def _line(self, eps: float, lam: float) -> float:
        """The dual at a multiplier no less than the slope: no input moves there."""
        top = worst_share(self.weights, self.best(self.reduced(lam))[0], self.subpopulation)
        return top + lam * eps + 4 * UNIT * (abs(top) + lam * eps)
