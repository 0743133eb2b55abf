"""Robust accuracy for every budget, from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from wassail.errors import InputError, instance
from wassail.notebook import card, picture, table
from wassail.records import Record, check_equal
from wassail.threat import (
    Domain,
    Number,
    Threat,
    ceil_percent,
    floor_percent,
    number,
    parse_confidence,
    parse_level,
    parse_order,
)
from wassail.transport import confidence as limits
from wassail.transport.allocation import sample_weights
from wassail.transport.flips import Flips
from wassail.transport.picture import plot_curve
from wassail.transport.side import Side, floor_of


@dataclass(frozen=True, eq=False, repr=False)
class RiskCurve(Record):
    """Robust accuracy over `Omega_order(eps)` as a function of eps, exact for the distances and
    radii it is made from.

    `curve(eps)` is the pair (certified, attacked): at least the first, at most the second. The
    error is piecewise linear in `eps^p`, with breakpoints at the sorted cumulative sums; nothing is
    attacked or certified again to draw it. Certified accuracy is rounded down: for the radii and
    weights as stored it is never above the true value, not even by rounding.

    Args:
        distances: of the nearest flips, float64 `(N,)`.
        radii: certified radii, float64 `(N,)`, or None if nothing is certified.
        mu: sample weights, float64 `(N,)`.
        order: Wasserstein order p, 1 to inf.
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
        """`attacked - certified` at `eps >= 0`: how much is not known there.

        Args:
            eps: budget >= 0.
        """
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

        Args:
            eps: budget >= 0, the end of the range.
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

        Args:
            side: "attacked" (the default) or "certified".
        """
        return self._side(side).breakpoints()

    def inverse(self, accuracy: Number, side: str = "attacked") -> float:
        """The smallest eps at which the accuracy falls to a level, inf if it never does; certified:
        rounded down.

        Args:
            accuracy: level as a fraction, in [0, 1].
            side: "attacked" (the default) or "certified".
        """
        return self._side(side).inverse(parse_level(accuracy, "accuracy"))

    def plot(self, ax: Any = None, eps: Number | None = None, mark: Number | None = None) -> Any:
        """Both sides against eps from 0 to `eps`, the band between them filled, on matplotlib axes,
        which are returned.

        Args:
            ax: matplotlib axes to draw on; default None, a new figure (`ax.figure.savefig(...)`
                writes it).
            eps: right end of the axis; default None, where the curve has come to rest.
            mark: an eps to point out; default None.
        """
        return plot_curve(
            self,
            ax,
            None if eps is None else self._budget(eps),
            None if mark is None else self._budget(mark),
        )

    def population(self, confidence: Number = 0.95) -> PopulationCurve:
        """The curve of the population that the samples were drawn from (THEORY 8).

        Each side holds with this confidence, for all eps and, by `of_order`, all orders at once;
        both sides together hold with confidence `2 confidence - 1`. It needs samples that are
        independent draws from one population, of equal weight, and a model that was not chosen
        on them.

        Args:
            confidence: between 0 and 1 (default 0.95).
        """
        n = self._independent()
        shift = min(limits.kolmogorov(n, confidence) + limits.SLACK, 1.0)
        near = _shifted(self.distances, shift, nearest=True)
        far = None if self.radii is None else _shifted(self.radii, shift, nearest=False)
        return PopulationCurve(
            near[0],
            None if far is None else far[0],
            near[1],
            self.order,
            None if far is None else far[1],
            parse_confidence(confidence),
            n,
            shift,
        )

    def population_at(self, threat: Threat, confidence: Number = 0.95) -> tuple[float, float]:
        """`(certified, attacked)` accuracy of the population for one threat chosen beforehand.

        Order inf: exact binomial limits. Finite orders: a limit on a mean of bounded numbers, from
        250 samples on; with fewer samples the band of `population` is sharper, and is what is
        returned. Each side holds with this confidence. The threat's order counts, not the curve's.

        Args:
            threat: one threat, in the norm and domain of the distances. Do not choose its eps
                by looking at the curve: use `population` then.
            confidence: between 0 and 1 (default 0.95).
        """
        n = self._independent()
        alpha = 1 - parse_confidence(confidence)
        if threat.order < math.inf and n < limits.FEWEST:
            return self.of_order(threat.order).population(confidence)(threat.eps)
        known = self.distances.numpy()
        lower = limits.error_at_least(known, threat.eps, threat.order, alpha)
        if self.radii is None:
            return 0.0, 1 - lower
        upper = limits.error_at_most(self.radii.numpy(), threat.eps, threat.order, alpha)
        return max(math.nextafter(1 - upper, 0.0), 0.0), 1 - lower

    def of_order(self, order: Number) -> RiskCurve:
        """The curve of another Wasserstein order, from the same distances and radii.

        Args:
            order: Wasserstein order p, 1 to inf.
        """
        return replace(self, order=parse_order(order))

    def _independent(self) -> int:
        """The number of samples, which must have equal weights."""
        if not len(self.mu):
            raise InputError("there are no samples: a statement about a population needs some.")
        if not bool((self.mu == self.mu[0]).all()):
            raise InputError(
                "the samples have different weights mu: a statement about the population needs "
                "independent samples of equal weight, so evaluate without mu."
            )
        return len(self.mu)

    @cached_property
    def _attacked(self) -> Side:
        return Side(self.distances, self.mu, self.order)

    @cached_property
    def _certified(self) -> Side | None:
        return None if self.radii is None else Side(self.radii, self.mu, self.order, certified=True)

    def _side(self, side: str) -> Side:
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

    def _repr_html_(self) -> str:
        drawn = picture(
            lambda: plot_curve(self).figure,  # type: ignore[arg-type, return-value]
            "certified and attacked accuracy against eps",
        )
        return card(self._title(), table(("eps", "certified", "attacked"), self._shown()), drawn)

    def _title(self) -> str:
        return f"Accuracy over Omega_{self.order:g}(eps), {len(self.mu)} samples"

    def _shown(self) -> list[tuple[str, str, str]]:
        """Both sides where the attacked accuracy has fallen to some shares of what it was."""
        if not len(self.mu):
            return []
        clean = self(0)[1]
        levels = [self.inverse(share * clean) for share in (1.0, 0.75, 0.5, 0.25)]
        rows = []
        for eps in dict.fromkeys(level for level in levels if math.isfinite(level)):
            low, high = self(eps)
            proved = "nothing" if self.radii is None else f"at least {floor_percent(low)} %"
            rows.append((f"{eps:.4g}", proved, f"at most {ceil_percent(high)} %"))
        return rows


@dataclass(frozen=True, eq=False, repr=False)
class PopulationCurve(RiskCurve):
    """A `RiskCurve` of the population behind the samples: `RiskCurve.population` makes it.

    Mass `shift` of the radii is moved from the largest to 0, and mass `shift` of the distances from
    the nearest to infinity (THEORY 8).

    Args:
        distances: of the nearest flips, float64 `(N,)`.
        radii: certified radii, float64 `(N,)`, or None if nothing is certified.
        mu: sample weights, float64 `(N,)`.
        order: Wasserstein order p, 1 to inf.
        radii_mu: masses of the radii, float64.
        confidence: of each side, in (0, 1).
        samples: int, how many there were.
        shift: mass that is moved, in [0, 1].
    """

    radii_mu: Tensor | None
    confidence: float
    samples: int
    shift: float

    @cached_property
    def _certified(self) -> Side | None:
        if self.radii is None or self.radii_mu is None:
            return None
        return Side(self.radii, self.radii_mu, self.order, certified=True)

    def population(self, confidence: Number = 0.95) -> PopulationCurve:
        """Refused: this is the population's curve already.

        Args:
            confidence: not used; default 0.95.
        """
        raise InputError(
            "this curve is the population's already: call population on the curve of the samples."
        )

    def population_at(self, threat: Threat, confidence: Number = 0.95) -> tuple[float, float]:
        """Refused: this is the population's curve already.

        Args:
            threat: not used.
            confidence: not used; default 0.95.
        """
        raise InputError(
            "this curve is the population's already: call population_at on that of the samples."
        )

    def __repr__(self) -> str:
        head = f"PopulationCurve(order {self.order:g}, {self.samples} samples, "
        known = "nothing certified"
        if self.radii is not None:
            known = f"certified: at least 0.5 up to eps {self.inverse(0.5, 'certified'):.4g}"
        return head + (
            f"confidence {self.confidence:g} a side: {known}, attacked: at most 0.5 from eps "
            f"{self.inverse(0.5):.4g} on)"
        )

    def _title(self) -> str:
        return (
            f"Accuracy of the population over Omega_{self.order:g}(eps), {self.samples} samples, "
            f"confidence {self.confidence:g} a side"
        )


def _shifted(values: Tensor, shift: float, nearest: bool) -> tuple[Tensor, Tensor]:
    """Distances and masses after moving mass `shift` from one end to the other, `(N + 1,)` each.

    nearest: from the nearest to infinity; else from the largest to 0. Each sample that keeps its
    mass has at least 1/N, the last one what is left of 1: the sum of all masses is at most 1,
    exactly, so that no rounding makes a budget smaller than it is.
    """
    n = len(values)
    each = math.nextafter(1 / n, math.inf)
    sorted_ = values.sort(descending=nearest).values
    whole = min(int((1 - shift) * n), n)  # samples that keep all their mass
    while whole and Fraction(shift) + whole * Fraction(each) > 1:
        whole -= 1
    mass = torch.zeros(n + 1, dtype=torch.float64)
    mass[0] = shift
    mass[1 : whole + 1] = each
    if whole < n:
        left = floor_of(1 - Fraction(shift) - whole * Fraction(each))
        mass[whole + 1] = min(left, each)
    end = torch.full((1,), math.inf if nearest else 0.0, dtype=torch.float64)
    return torch.cat([end, sorted_]), mass


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

    A radius above the distance of a flip of the same sample is a contradiction between an evaluated
    point and a proof, and an error.

    Args:
        flips: `Flips`, the attacked side.
        radii: `Radii` for the same samples, norm and domain, or a tensor `(N,)` that is trusted to
            be; default None, nothing is certified.
        order: Wasserstein order p, 1 to inf; default 1.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.

    Returns:
        `RiskCurve`: call it at any eps.
    """
    instance(flips, Flips, "the flips are", "as ws.nearest returns them")
    values = None
    if radii is not None:
        if not isinstance(radii, Tensor):
            if not hasattr(radii, "values"):
                raise InputError(
                    f"the radii are a {type(radii).__name__}: give what ws.radii returns."
                )
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
