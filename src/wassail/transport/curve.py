"""Robust accuracy for every budget, from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
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
    Groups,
    Number,
    Threat,
    ceil_percent,
    floor_percent,
    number,
    parse_confidence,
    parse_label_cost,
    parse_level,
    parse_order,
    parse_subpopulation,
)
from wassail.transport import confidence as limits
from wassail.transport.allocation import groups_of, sample_weights
from wassail.transport.flips import Flips
from wassail.transport.grouped import GroupedSide, proved_by_weights, worst_weights
from wassail.transport.picture import plot_curve
from wassail.transport.side import Side, floor_of, stretch_of
from wassail.writing import rounded_down, rounded_up


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
        label_cost: price kappa of a changed label, in the units of the distances; inf (the
            default) for labels that cannot change.
        subpopulation: least share alpha of the samples that are there, in (0, 1]; 1 (the default)
            for all of them.
        groups: `Groups` of the samples, whose weights may change; None (the default) for none.
    """

    distances: Tensor
    radii: Tensor | None
    mu: Tensor
    order: float
    label_cost: float = field(default=math.inf, kw_only=True)
    subpopulation: float = field(default=1.0, kw_only=True)
    groups: Groups | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("distances", "radii", "mu"):
            values = getattr(self, name)
            if values is not None and not bool((values >= 0).all()):
                raise InputError(f"the {name} of a curve are numbers >= 0, and one of them is not.")

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
        on them. With groups each has a limit of its own, and they share the error: it needs draws
        that are independent within each group.

        Args:
            confidence: between 0 and 1 (default 0.95).
        """
        self._independent()
        confidence = parse_confidence(confidence)
        # One band for each group, or one for all samples; their errors sum to that of the curve.
        groups = self.groups
        count = 1 if groups is None else len(groups.names)
        places = torch.zeros(len(self.mu)) if groups is None else torch.tensor(groups.places)
        each = confidence if count == 1 else 1 - (1 - confidence) / count
        near, far, held, shifts = [], [], [], []
        for place in range(count):
            mine = places == place
            n = int(mine.sum())
            shift = min(limits.kolmogorov(n, each) + limits.SLACK, 1.0)
            near.append(_shifted(self.distances[mine], shift, nearest=True))
            if self.radii is not None:
                far.append(_shifted(self.radii[mine], shift, nearest=False))
            held += [place] * (n + 1)
            shifts.append(shift)
        distances, mu = (torch.cat(parts) for parts in zip(*near))
        radii, radii_mu = (torch.cat(parts) for parts in zip(*far)) if far else (None, None)
        if groups is not None:
            names = tuple(groups.names[place] for place in held)
            groups = Groups(names, groups.low, groups.high)
        return PopulationCurve(
            distances,
            radii,
            mu,
            self.order,
            radii_mu,
            confidence,
            len(self.mu),
            max(shifts),
            label_cost=self.label_cost,
            subpopulation=self.subpopulation,
            groups=groups,
        )

    def population_at(
        self,
        threat: Threat,
        confidence: Number = 0.95,
        pilot: CertifiedRadii | Tensor | None = None,
    ) -> tuple[float, float]:
        """`(certified, attacked)` accuracy of the population for one threat chosen beforehand.

        Order inf: exact binomial limits. Finite orders: the certified side is that of
        `population`, or with a pilot a sharper limit on a mean; the attacked side is a limit on a
        mean from 250 samples on, and that of `population` with fewer. Each side holds with this
        confidence, however the radii were made. The threat's order counts, not the curve's.

        Args:
            threat: one threat, in the norm and domain of the distances. Do not choose its eps
                by looking at the curve: use `population` then.
            confidence: between 0 and 1 (default 0.95).
            pilot: certified radii of OTHER samples of the population, found without those of the
                curve, `Radii` or a tensor `(M,)`: some hundred of them make the certified side
                sharper; default None.
        """
        n = self._independent()
        alpha = 1 - parse_confidence(confidence)
        if self.groups is not None:
            return self._groups_at(self.groups, threat, alpha, pilot is not None)
        shared = threat.order < math.inf
        price = None if pilot is None else _price(pilot, threat)
        share = self.subpopulation
        stretch, slack = stretch_of(share, threat.order)
        eps = threat.eps * stretch  # of all samples: see `Side`
        certified, attacked = 0.0, 1.0
        if shared and (n < limits.FEWEST or price is None):
            certified, attacked = self.of_order(threat.order).population(confidence)(threat.eps)
        if not shared or n >= limits.FEWEST:
            known = self.distances.clamp(max=self.label_cost).numpy()
            lower = limits.error_at_least(known, eps * (1 - slack), threat.order, alpha)
            attacked = max(1 - lower / share, 0.0)
        if self.radii is not None and not (shared and price is None):
            proved = self.radii.clamp(max=self._dearest).numpy()
            given = (proved, eps * (1 + slack), threat.order, alpha, price or math.inf)
            upper = Fraction(limits.error_at_most(*given)) / Fraction(share)
            certified = max(floor_of(1 - upper), 0.0)
        return certified, attacked

    def _groups_at(
        self, groups: Groups, threat: Threat, alpha: float, piloted: bool
    ) -> tuple[float, float]:
        """`population_at` with groups: the band, and at order inf exact limits of each group."""
        if piloted:
            raise InputError("a pilot is for curves without groups: leave one of the two out.")
        if threat.order < math.inf:
            return self.of_order(threat.order).population(1 - alpha)(threat.eps)
        places = torch.tensor(groups.places)
        each = alpha / len(groups.names)
        least: list[float] = []
        most: list[Fraction] = []
        for place in range(len(groups.names)):
            mine = places == place
            known = self.distances[mine].clamp(max=self.label_cost).numpy()
            given = (threat.eps, threat.order, each)
            least.append(limits.error_at_least(known, *given) / self.subpopulation)
            if self.radii is not None:
                proved = self.radii[mine].clamp(max=self._dearest).numpy()
                upper = limits.error_at_most(proved, *given, math.inf)
                most.append(Fraction(upper) / Fraction(self.subpopulation))
        attacked = 1 - worst_weights(groups, least)
        certified = proved_by_weights(groups, most) if most else 0.0
        return min(certified, attacked), attacked

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
        places = [0] * len(self.mu) if self.groups is None else self.groups.places
        if len(set(zip(places, self.mu.tolist()))) > len(set(places)):
            raise InputError(
                "the samples have different weights mu: a statement about the population needs "
                "independent samples of equal weight, so evaluate without mu."
            )
        return len(self.mu)

    @cached_property
    def _attacked(self) -> Side | GroupedSide:
        return self._made(self.distances, self.mu)

    @cached_property
    def _certified(self) -> Side | GroupedSide | None:
        return None if self.radii is None else self._made(self.radii, self.mu, certified=True)

    def _made(self, distances: Tensor, mu: Tensor, certified: bool = False) -> Side | GroupedSide:
        """One side: no move is dearer than a change of the label."""
        capped = distances.clamp(max=self._dearest if certified else self.label_cost)
        if self.groups is not None:
            also = (self.groups, certified, self.subpopulation)
            return GroupedSide(capped, mu, self.order, *also)
        return Side(capped, mu, self.order, certified, self.subpopulation)

    @property
    def _dearest(self) -> float:
        """What a radius protects from at most: a label that costs exactly eps may change."""
        return math.nextafter(self.label_cost, 0.0) if self.label_cost < math.inf else math.inf

    def _side(self, side: str) -> Side | GroupedSide:
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
            f"{self(0)[1]:.4f} at eps 0{self._also()}; "
        )
        half = self.inverse(0.5)
        if self.radii is None:
            return head + (
                f"attacked: at most 0.5 from eps {rounded_up(half, 4)} on; nothing certified)"
            )
        gap, where = self.largest_gap()
        return head + (
            "certified: at least 0.5 up to eps "
            f"{rounded_down(self.inverse(0.5, 'certified'), 4)}, attacked: at most 0.5 from eps "
            f"{rounded_up(half, 4)} on; largest gap {gap:.4f} at eps {where:.4g})"
        )

    def _repr_html_(self) -> str:
        drawn = picture(
            lambda: plot_curve(self).figure,  # type: ignore[arg-type, return-value]
            "certified and attacked accuracy against eps",
        )
        return card(self._title(), table(("eps", "certified", "attacked"), self._shown()), drawn)

    def _title(self) -> str:
        return f"Accuracy over Omega_{self.order:g}(eps), {len(self.mu)} samples{self._also()}"

    def _also(self) -> str:
        """What else may change, in words."""
        also = {"subpopulation": self.subpopulation, "groups": self.groups}
        return Threat(eps=1.0, label_cost=self.label_cost, **also).others  # type: ignore[arg-type]

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
        label_cost: price of a changed label; default inf.
        subpopulation: least share of the population that is there; default 1.
        groups: whose weights may change; default None.
    """

    radii_mu: Tensor | None
    confidence: float
    samples: int
    shift: float

    @cached_property
    def _certified(self) -> Side | GroupedSide | None:
        if self.radii is None or self.radii_mu is None:
            return None
        return self._made(self.radii, self.radii_mu, certified=True)

    def population(self, confidence: Number = 0.95) -> PopulationCurve:
        """Refused: this is the population's curve already.

        Args:
            confidence: not used; default 0.95.
        """
        raise InputError(
            "this curve is the population's already: call population on the curve of the samples."
        )

    def population_at(
        self,
        threat: Threat,
        confidence: Number = 0.95,
        pilot: CertifiedRadii | Tensor | None = None,
    ) -> tuple[float, float]:
        """Refused: this is the population's curve already.

        Args:
            threat: not used.
            confidence: not used; default 0.95.
            pilot: not used; default None.
        """
        raise InputError(
            "this curve is the population's already: call population_at on that of the samples."
        )

    def __repr__(self) -> str:
        head = f"PopulationCurve(order {self.order:g}, {self.samples} samples, "
        known = "nothing certified"
        if self.radii is not None:
            half = rounded_down(self.inverse(0.5, "certified"), 4)
            known = f"certified: at least 0.5 up to eps {half}"
        return head + (
            f"confidence {self.confidence:g} a side: {known}, attacked: at most 0.5 from eps "
            f"{rounded_up(self.inverse(0.5), 4)} on)"
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


def _price(pilot: CertifiedRadii | Tensor, threat: Threat) -> float:
    """The price that the radii of other samples choose for a threat."""
    given = pilot
    if not isinstance(given, Tensor):
        for name in ("norm", "domain"):
            check_equal(name, getattr(threat, name), getattr(given, name))
        given = given.values
    values = given.detach().cpu().double()
    if values.ndim != 1 or not len(values) or not bool((values >= 0).all()):
        raise InputError("the pilot must hold numbers >= 0, the radii of other samples.")
    return limits.price_of(values.numpy(), threat.eps, threat.order)


def risk_curve(
    flips: Flips,
    radii: CertifiedRadii | Tensor | None = None,
    order: Number = 1,
    mu: Tensor | None = None,
    *,
    label_cost: Number = math.inf,
    subpopulation: Number = 1,
    groups: Groups | None = None,
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
        label_cost: price kappa of a changed label, in the units of the distances: a share s of
            wrong labels is in reach at order 1 where `eps >= s kappa`; default inf, none changes.
        subpopulation: least share alpha of the population that is there: 0.8 lets up to a fifth
            be missing, whichever; default 1, all are there.
        groups: `Groups` of the samples, whose weights may be any in their ranges; default None.

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
    return RiskCurve(
        flips.distances,
        values,
        sample_weights(mu, len(flips)),
        parse_order(order),
        label_cost=parse_label_cost(label_cost),
        subpopulation=parse_subpopulation(subpopulation),
        groups=groups_of(groups, len(flips)),
    )


def below(radii: Tensor, distances: Tensor, size: int) -> Tensor:
    """The radii, at most the distances: what rounding may take from a distance is clipped, more
    than that is an error.

    radii, distances: float64 `(N,)`; size: coordinates of a sample, which bound the rounding of a
    distance.
    """
    if not bool((distances >= 0).all()):
        raise InputError("a distance of the flips is no number >= 0: make the flips anew.")
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
