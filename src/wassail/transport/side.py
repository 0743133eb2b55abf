"""One side of a risk curve: the knapsack on sorted distances, for every budget at once."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail.rounding import UNIT

if TYPE_CHECKING:
    from wassail.transport.grouped import GroupedSide


def stretch_of(share: float, order: float) -> tuple[float, float]:
    """What a subpopulation of a share alpha makes of a budget, `alpha^(1/p)`, and what that and
    up to three operations with it may be off, relative: the quotient 1/p is rounded, too, and the
    power is as steep in it as its logarithm.
    """
    if share == 1 or order == math.inf:
        return 1.0, 0.0
    return share ** (1 / order), (8 + 2 * abs(math.log(share)) / order) * UNIT


class Side:
    """One side of a risk curve: sorted distances, cumulative mass, and the eps at which each is
    paid in full.

    Cumulative costs are kept as logarithms, `log sum_i mu_i d_i^p`, so that no order over- or
    underflows.

    A subpopulation of share alpha may weigh a sample up to `mu_i / alpha`. With `m_i = mu_i a_i /
    alpha` its knapsack is that of all samples at the budget `alpha^(1/p) eps`, and its error that
    one's over alpha, at most 1 (THEORY 12).

    Args:
        distances: float64 `(N,)`.
        mu: sample weights, float64 `(N,)`.
        order: Wasserstein order p.
        certified: whether the distances are radii, whose curve may be rounded down only.
        share: alpha, in (0, 1].
    """

    def __init__(
        self,
        distances: Tensor,
        mu: Tensor,
        order: float,
        certified: bool = False,
        share: float = 1.0,
    ) -> None:
        self.share = share
        self.stretch, self.ulp = stretch_of(share, order)
        keep = torch.isfinite(distances) & (mu > 0)
        self.d, where = distances[keep].sort(stable=True)
        self.mu = mu[keep][where]
        self.mass = torch.cat([torch.zeros(1, dtype=torch.float64), self.mu.cumsum(0)])
        self.order = order
        self.certified = certified
        self.total = float(mu.sum())
        self.least = -_sum_up((-mu).tolist())  # the total, rounded down
        self.empty = len(mu) == 0
        self.slack = (len(self.d) + 16) * UNIT  # of a sum of all masses
        if order == math.inf or not len(self.d):
            self.paid = self.d
        else:
            bill = self.mu.log() + order * self.d.log()
            total = bill.logcumsumexp(0)
            self.paid = (total / order).exp()
            # each term and each partial sum is off by its own size times 2^-52, and exp makes that
            # relative
            if certified:
                size = max(float(v.abs().nan_to_num(posinf=0.0).max()) for v in (bill, total))
                self.paid = self.paid * (1 - self.slack * (2 * size / order + 4))

    def accuracy(self, eps: float) -> float:
        """The accuracy at eps, to rounding."""
        return float(self.accuracies(torch.tensor([eps], dtype=torch.float64))[0])

    def accuracies(self, eps: Tensor) -> Tensor:
        """The accuracy at several eps, `(T,)`, to rounding."""
        if self.empty:
            return torch.full_like(eps, math.nan)
        eps = eps * self.stretch
        if self.order == math.inf:
            bought = self.mass[torch.searchsorted(self.d, eps, right=True)]
            if self.certified:
                bought = torch.where(eps > 0, self.mass[torch.searchsorted(self.d, eps)], bought)
        else:
            k = torch.searchsorted(self.paid, eps, right=True)
            bought = self.mass[k]
            if len(self.d):
                next_ = k.clamp(max=len(self.d) - 1)
                spent = torch.where(k > 0, self.paid[(k - 1).clamp(min=0)], 0.0)
                unit = self.d[next_]
                part = (eps / unit) ** self.order - (spent / unit) ** self.order
                bought = bought + torch.where(
                    k < len(self.d), torch.minimum(part, self.mu[next_]), 0.0
                )
        whole = self.total * self.share
        return (whole - bought).clamp(min=0) / whole

    def proved(self, eps: float) -> float:
        """The accuracy at eps, rounded down, so that it holds for the radii and masses as they
        are stored.
        """
        if self.empty:
            return math.nan
        eps = eps * self.stretch * (1 + self.ulp)
        return floor_of(1 - Fraction(self._most(eps)) / Fraction(self.least) / Fraction(self.share))

    @cached_property
    def everything(self) -> float:
        """The mass of all samples with a finite distance, rounded up."""
        return _sum_up(self.mu.tolist())

    def _most(self, eps: float) -> float:
        """An upper bound on the mass that can leave its radius.

        For finite p by weak duality, which no rounding of the multiplier can make false: for every
        u

            max { sum_i mu_i a_i : sum_i mu_i a_i r_i^p <= eps^p }  <=  (eps/u)^p + sum_{r_i < u}
            mu_i (1 - (r_i/u)^p),

        with equality where u is the radius at which the budget runs out.
        """
        if self.order == math.inf or eps == 0:
            return _sum_up(self.mu[: int(torch.searchsorted(self.d, eps, right=eps == 0))].tolist())
        k = int(torch.searchsorted(self.paid, eps, right=True))
        if k == len(self.d):
            return self.everything
        unit = float(self.d[k])
        part = float((eps / unit) ** self.order) + float(
            (self.mu[:k] * (1 - (self.d[:k] / unit) ** self.order)).sum()
        )
        slack = self.slack + 2 * self.order * UNIT  # a rounded quotient, to the power p
        # The budget pays for the first k samples, so `(eps/u)^p` is at least what they cost and
        # part at least their mass, to rounding: the first slack would be enough.
        return min(part * (1 + slack) + slack * float(self.mass[k]) + 2.0**-1000, self.everything)

    def breakpoints(self) -> tuple[Tensor, Tensor]:
        """The eps at which the curve bends, and the accuracy there: see `RiskCurve`."""
        whole = self.total * self.share
        accuracy = (whole - self.mass).clamp(min=0) / whole
        if self.certified:
            accuracy = (accuracy - self.slack / self.share).clamp(min=0)
        eps = torch.cat([torch.zeros(1, dtype=torch.float64), self._unstretched(self.paid)])
        # Of equal eps the lowest accuracy holds.
        last = torch.cat([eps[1:] > eps[:-1], torch.ones(1, dtype=torch.bool)])
        eps, accuracy = eps[last], accuracy[last]
        if self.share == 1:
            return eps, accuracy
        # Nothing is left from where the subpopulation is lost as a whole.
        left = accuracy > 0
        end = torch.tensor([self.inverse(0.0)], dtype=torch.float64)
        end = end[torch.isfinite(end)]
        return torch.cat([eps[left], end]), torch.cat([accuracy[left], torch.zeros_like(end)])

    def _unstretched(self, eps: Tensor) -> Tensor:
        """Budgets of the subpopulation from those of all samples; certified: rounded down."""
        down = 1 - self.ulp if self.certified else 1.0
        return torch.mul(eps, down / self.stretch)

    def inverse(self, level: float) -> float:
        """The smallest eps at which the accuracy falls to a level: see `RiskCurve`."""
        if self.empty:
            return math.nan
        need = self.total * self.share * (1 - level)  # the error to be bought
        k = int(
            torch.searchsorted(self.mass, need - max(1e-12, self.slack), side="left")
        )  # first k samples that suffice
        if k == 0 or k > len(self.d):
            return 0.0 if k == 0 else math.inf
        if self.order == math.inf:
            return float(self.d[k - 1])
        paid = torch.tensor(self._paid_by(k, need), dtype=torch.float64)
        return float(self._unstretched(paid))

    def _paid_by(self, k: int, need: float) -> float:
        """The budget of all samples that buys a mass, of which k samples are the first that
        suffice.
        """
        spent = float(self.paid[k - 2]) if k > 1 else 0.0
        unit = float(self.d[k - 1])
        if unit == 0:
            return 0.0
        part = max(need - float(self.mass[k - 1]) - (self.slack if self.certified else 0.0), 0.0)
        eps = float(unit * ((spent / unit) ** self.order + part) ** (1 / self.order))
        return eps * (1 - self.slack) if self.certified else eps

    def area(self, eps: float) -> float:
        """`int_0^eps accuracy`, to rounding."""
        return area_under(self, eps)


def area_under(side: Side | GroupedSide, eps: float) -> float:
    """`int_0^eps accuracy`: between two bends it is linear in `eps^p`, for order inf constant.

    Args:
        side: of a risk curve.
        eps: end of the range.
    """
    if side.empty or eps == 0:
        return math.nan if side.empty else 0.0
    ends = torch.tensor([0.0, eps], dtype=torch.float64)
    bends = side.breakpoints()[0]
    knots = torch.unique(torch.cat([ends, bends[(bends > 0) & (bends < eps)]]))
    a = knots[:-1]
    b = knots[1:]
    if side.order == math.inf:
        return float(((b - a) * side.accuracies((a + b) / 2)).sum())
    p = side.order
    t = a / b
    at = side.accuracies(knots)
    # int_a^b (e^p - a^p) / (b^p - a^p) de = b mean, between 0 and b - a
    mean = (1 - t ** (p + 1)) / (p + 1) - t**p * (1 - t)
    mean = torch.minimum((mean / (1 - t**p)).nan_to_num(0.0).clamp(min=0), 1 - t)
    return float(((b - a) * at[:-1] + (at[1:] - at[:-1]) * b * mean).sum())


def _sum_up(values: list[float]) -> float:
    """The sum, rounded up: `fsum` is the nearest number, and of what it leaves out it gives the
    sign exactly.
    """
    total = math.fsum(values)
    return total if math.fsum([*values, -total]) <= 0 else math.nextafter(total, math.inf)


def floor_of(value: Fraction) -> float:
    """The largest float64 that is not above a number, and not below 0."""
    near = max(float(value), 0.0)
    return near if near == 0 or Fraction(near) <= value else math.nextafter(near, 0.0)
