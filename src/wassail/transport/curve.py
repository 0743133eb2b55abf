"""Robust accuracy for every budget, from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.records import Record, check_equal
from wassail.threat import Domain, Number, number, parse_level, parse_order
from wassail.transport.allocation import sample_weights
from wassail.transport.flips import Flips


@dataclass(frozen=True, eq=False, repr=False)
class RiskCurve(Record):
    """Robust accuracy over `Omega_order(eps)` as a function of eps, exact for the distances and
    radii it is made from.

    `curve(eps)` is the pair (certified, attacked): at least the first, at most the second. The
    error is piecewise linear in `eps^p`, with breakpoints at the sorted cumulative sums; nothing is
    attacked or certified again to draw it. Certified accuracy is rounded down: for the radii and
    weights as stored it is never above the true value, not even by rounding. distances, radii, mu:
    float64 `(N,)`; radii None if nothing is certified; order: p.
    """

    distances: Tensor
    radii: Tensor | None
    mu: Tensor
    order: float

    def __call__(self, eps: Number) -> tuple[float, float]:
        """`(certified, attacked)` accuracy at `eps >= 0`; certified is 0 when no radii were given.

        Sets are closed (THEORY 2a): at order inf a flip at exactly eps counts, and a radius of
        exactly eps protects.
        """
        value = self._budget(eps)
        attacked = self._attacked.accuracy(value)
        certified = self._certified.proved(value) if self._certified else 0.0
        return min(certified, attacked), attacked

    def gap(self, eps: Number) -> float:
        """`attacked - certified` at `eps >= 0`: how much is not known there."""
        certified, attacked = self(eps)
        return attacked - certified

    def largest_gap(self) -> tuple[float, float]:
        """The largest gap over all eps, and an eps where it is: a bend of one of the sides."""
        if not len(self.mu):
            return math.nan, math.nan
        sides = [self._attacked] + ([self._certified] if self._certified else [])
        bends = torch.cat([side.breakpoints()[0] for side in sides])
        if (
            self.order == math.inf
        ):  # a radius of exactly eps still protects: certified accuracy drops right after it
            bends = torch.cat([bends, torch.nextafter(bends, torch.full_like(bends, math.inf))])
        gaps = self._attacked.accuracies(bends)
        if self._certified:
            gaps = gaps - self._certified.accuracies(bends)
        eps = float(bends[gaps.argmax()])
        return self.gap(eps), eps

    def area(self, eps: Number) -> float:
        """The area between the two sides over [0, eps], `int_0^eps attacked - certified`, to
        rounding.
        """
        value = self._budget(eps)
        return self._attacked.area(value) - (
            self._certified.area(value) if self._certified else 0.0
        )

    def breakpoints(self, side: str = "attacked") -> tuple[Tensor, Tensor]:
        """The eps at which the curve bends, and the accuracy there; order inf: drops, and what to.
        float64 `(B,)` each.

        On the certified side both are rounded down: the accuracy is at least that much up to that
        eps.
        """
        return self._side(side).breakpoints()

    def inverse(self, accuracy: Number, side: str = "attacked") -> float:
        """The smallest eps at which the accuracy falls to a level, inf if it never does;
        certified: rounded down.
        """
        return self._side(side).inverse(parse_level(accuracy, "accuracy"))

    def plot(self, ax: Any = None, eps: Number | None = None, mark: Number | None = None) -> Any:
        """Both sides against eps from 0 to `eps`, the band between them filled, on matplotlib axes,
        which are returned.

        ax: where to draw (default: a new figure, `ax.figure.savefig(...)` writes it); mark: an eps
        to point out.
        """
        from wassail.transport.picture import plot_curve

        return plot_curve(
            self,
            ax,
            None if eps is None else self._budget(eps),
            None if mark is None else self._budget(mark),
        )

    @cached_property
    def _attacked(self) -> _Side:
        return _Side(self.distances, self.mu, self.order)

    @cached_property
    def _certified(self) -> _Side | None:
        return (
            None if self.radii is None else _Side(self.radii, self.mu, self.order, certified=True)
        )

    def _side(self, side: str) -> _Side:
        chosen = {"attacked": self._attacked, "certified": self._certified}.get(side)
        if chosen is None:
            raise InputError(
                f"the curve has no side {side!r}: choose 'attacked', or 'certified' if radii "
                "were given."
            )
        return chosen

    def _budget(self, eps: Number) -> float:
        value = number(eps, "eps")
        if value < 0:
            raise InputError(f"eps is {eps!r}: a curve is defined for eps >= 0.")
        return value

    def __repr__(self) -> str:
        head = (
            f"RiskCurve(order {self.order:g}, {len(self.mu)} samples: accuracy "
            f"{self(0)[1]:.4f} at eps 0; "
        )
        half = self.inverse(0.5)
        if self.radii is None:
            return head + f"attacked: at most 0.5 from eps {half:.4g} on; nothing certified)"
        gap, where = self.largest_gap()
        return head + (
            f"certified: at least 0.5 up to eps {self.inverse(0.5, 'certified'):.4g}, attacked: "
            "at most 0.5 from eps "
            f"{half:.4g} on; largest gap {gap:.4f} at eps {where:.4g})"
        )


class CertifiedRadii(Protocol):
    """What a risk curve needs of certified radii: `Radii` has it."""

    @property
    def values(self) -> Tensor:
        """The radii, float64 `(N,)`."""

    @property
    def norm(self) -> float:
        """The ground norm r they were certified for."""

    @property
    def domain(self) -> Domain:
        """The box they were certified in, or None."""


def risk_curve(
    flips: Flips,
    radii: CertifiedRadii | Tensor | None = None,
    order: Number = 1,
    mu: Tensor | None = None,
) -> RiskCurve:
    """The whole accuracy curve over eps for one order, from one set of flips and, if given,
    certified radii.

    radii: `Radii` for the same samples, norm and domain, or a tensor `(N,)` that is trusted to be.
    A radius above the distance of a flip of the same sample is a contradiction between an evaluated
    point and a proof, and an error.
    """
    values = None
    if radii is not None:
        if not isinstance(radii, Tensor):
            for name in ("norm", "domain"):
                check_equal(name, getattr(flips, name), getattr(radii, name))
            radii = radii.values
        values = torch.as_tensor(radii, dtype=torch.float64).cpu()
        if values.shape != flips.distances.shape or not (values >= 0).all():
            raise InputError(f"radii must hold {len(flips)} numbers >= 0, one for each sample.")
        values = below(values, flips.distances, flips.x[:1].numel())
    return RiskCurve(flips.distances, values, sample_weights(mu, len(flips)), parse_order(order))


def below(radii: Tensor, distances: Tensor, size: int) -> Tensor:
    """The radii, at most the distances: what rounding may take from a distance is clipped, more
    than that is an error.

    radii, distances: float64 `(N,)`; size: coordinates of a sample, which bound the rounding of a
    distance.
    """
    slack = (size + 4) * 2.0**-52
    wrong = (radii > distances * (1 + slack)).nonzero().flatten().tolist()
    if wrong:
        i = wrong[0]
        raise InputError(
            f"sample {i} has a certified radius {float(radii[i])!r} above the distance "
            f"{float(distances[i])!r} of its "
            f"evaluated flip ({len(wrong)} such samples): one of the two is wrong, so trust "
            "neither; check that both are for "
            "the same model, samples and precision, and report it if they are."
        )
    return torch.minimum(radii, distances)


class _Side:
    """One side of a risk curve: sorted distances, cumulative mass, and the eps at which each is
    paid in full.

    Cumulative costs are kept as logarithms, `log sum_i mu_i d_i^p`, so that no order over- or
    underflows. certified: the distances are radii, whose curve may be rounded down only.
    """

    def __init__(
        self, distances: Tensor, mu: Tensor, order: float, certified: bool = False
    ) -> None:
        keep = torch.isfinite(distances) & (mu > 0)
        self.d, where = distances[keep].sort(stable=True)
        self.mu = mu[keep][where]
        self.mass = torch.cat([torch.zeros(1, dtype=torch.float64), self.mu.cumsum(0)])
        self.order = order
        self.certified = certified
        self.total = float(mu.sum())
        self.least = -_sum_up((-mu).tolist())  # the total, rounded down
        self.empty = len(mu) == 0
        self.slack = (len(self.d) + 16) * 2.0**-52  # of a sum of all masses
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
        return (self.total - bought).clamp(min=0) / self.total

    def proved(self, eps: float) -> float:
        """The accuracy at eps, rounded down, so that it holds for the radii and masses as they
        are stored.
        """
        if self.empty:
            return math.nan
        return _floor(1 - Fraction(self._most(eps)) / Fraction(self.least))

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
        everything = _sum_up(self.mu.tolist())
        if k == len(self.d):
            return everything
        unit = float(self.d[k])
        part = float((eps / unit) ** self.order) + float(
            (self.mu[:k] * (1 - (self.d[:k] / unit) ** self.order)).sum()
        )
        slack = self.slack + 2 * self.order * 2.0**-52  # a rounded quotient, to the power p
        return min(part * (1 + slack) + slack * float(self.mass[k]) + 2.0**-1000, everything)

    def breakpoints(self) -> tuple[Tensor, Tensor]:
        accuracy = (self.total - self.mass).clamp(min=0) / self.total
        if self.certified:
            accuracy = (accuracy - self.slack).clamp(min=0)
        eps = torch.cat([torch.zeros(1, dtype=torch.float64), self.paid])
        last = torch.cat(
            [eps[1:] > eps[:-1], torch.ones(1, dtype=torch.bool)]
        )  # of equal eps the lowest accuracy holds
        return eps[last], accuracy[last]

    def inverse(self, level: float) -> float:
        if self.empty:
            return math.nan
        need = self.total * (1 - level)  # the error to be bought
        k = int(
            torch.searchsorted(self.mass, need - max(1e-12, self.slack), side="left")
        )  # first k samples that suffice
        if k == 0 or k > len(self.d):
            return 0.0 if k == 0 else math.inf
        if self.order == math.inf:
            return float(self.d[k - 1])
        spent = float(self.paid[k - 2]) if k > 1 else 0.0
        unit = float(self.d[k - 1])
        if unit == 0:
            return 0.0
        part = max(need - float(self.mass[k - 1]) - (self.slack if self.certified else 0.0), 0.0)
        eps = float(unit * ((spent / unit) ** self.order + part) ** (1 / self.order))
        return eps * (1 - self.slack) if self.certified else eps

    def area(self, eps: float) -> float:
        """`int_0^eps accuracy`: between two bends it is linear in `eps^p`, for order inf
        constant.
        """
        if self.empty or eps == 0:
            return math.nan if self.empty else 0.0
        ends = torch.tensor([0.0, eps], dtype=torch.float64)
        knots = torch.unique(torch.cat([ends, self.paid[(self.paid > 0) & (self.paid < eps)]]))
        a = knots[:-1]
        b = knots[1:]
        if self.order == math.inf:
            return float(((b - a) * self.accuracies((a + b) / 2)).sum())
        p = self.order
        t = a / b
        at = self.accuracies(knots)
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


def _floor(value: Fraction) -> float:
    """The largest float64 that is not above a number, and not below 0."""
    near = max(float(value), 0.0)
    return near if near == 0 or Fraction(near) <= value else math.nextafter(near, 0.0)
