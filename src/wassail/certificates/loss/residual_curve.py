"""The worst expected error of a regression as a function of the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from wassail.certificates.bound import below
from wassail.certificates.loss.curve import LossCurve, budget_of, total_of
from wassail.certificates.loss.population import PopulationLoss
from wassail.certificates.loss.residual_cones import Cones
from wassail.certificates.loss.residual_stairs import Stairs
from wassail.errors import InputError
from wassail.rounding import UNIT
from wassail.specification import Specification
from wassail.threat import Number, box_at
from wassail.transport.distribution import Distribution


@dataclass(frozen=True, eq=False, repr=False)
class ResidualCurve(LossCurve):
    """A `LossCurve` of a regression: `loss_curve` makes it for the losses of errors.

    `y` is 0 for each sample, and a predicted class is 1 + the side of the error: of K outputs,
    those that are too high, then those that are too low. Where targets move, a sample is `(x, t)`,
    flat, with t the move of its target times its price.

    Args:
        targets: float64 `(N, K)`.
        quantile: of the pinball loss.
        delta: of the Huber loss.
        label_cost: price of moving a target by one unit; inf where they stay.
        margin: certified Lipschitz constant of the outputs.
        shift: how far executed outputs may be from exact ones.
        grows: whether the error is known to grow without bound.
        stairs: losses certified within radii of each sample's own; None where there are none.
        cones: lines in the distance above the loss of each sample; None where there are none.
    """

    targets: Tensor = field(kw_only=True)
    quantile: float = field(default=0.5, kw_only=True)
    delta: float = field(default=1.0, kw_only=True)
    label_cost: float = field(default=math.inf, kw_only=True)
    margin: float = field(default=math.inf, kw_only=True)
    shift: float = field(default=0.0, kw_only=True)
    grows: bool = field(default=False, kw_only=True)
    stairs: Stairs | None = field(default=None, kw_only=True)
    cones: Cones | None = field(default=None, kw_only=True)

    def __call__(self, eps: Number) -> tuple[float, float]:
        """`(lower, upper)` on the worst expected loss at `eps >= 0`: evaluated from below,
        certified and rounded up above. Both are infinite where the squared error is.
        """
        budget = budget_of(eps)
        if self.infinite and budget > 0:
            return math.inf, math.inf
        low, high = super().__call__(budget)
        high = min(high, self.by_lengths(budget))
        return below(low, high, "worst-case loss"), high

    def tops(self, eps: float, edge: Tensor) -> Tensor:
        """As `LossCurve.tops`, and by the stairs and the cones.

        Args:
            eps: radius.
            edge: 0 and the radii of the grid.
        """
        top = super().tops(eps, edge)
        if self.stairs is not None:
            top = torch.minimum(top, self.stairs.within(eps, self.slope))
        return top if self.cones is None else torch.minimum(top, self.cones.within(eps))

    def multipliers(self, eps: float) -> list[float]:
        """Those at which the price of order 1 is as steep as a cone, or steeper by rounding.

        Args:
            eps: budget.
        """
        rises = [] if self.cones is None or self.order > 1 else self.cones.rises.tolist()
        return [rise * eps * (1 + 2 * UNIT) for rise in rises]

    def peaks(
        self, eps: float, lam: float, edge: Tensor, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `LossCurve.peaks`, and by the stairs and the cones.

        Args:
            eps: budget.
            lam: multiplier, in units of the budget.
            edge: 0 and the radii of the grid.
            extra: what each sample pays before it moves.
        """
        found = [super().peaks(eps, lam, edge, extra)]
        if self.stairs is not None:
            radii, heights = self.stairs.radii, self.stairs.heights
            left, ceiling = heights[:, :-1], heights[:, 1:]
            ends = torch.cat([radii[:, 1:], torch.full_like(radii[:, :1], math.inf)], 1)
            lines = [(left, torch.full_like(left, self.slope))]
            found.append(self.peaks_of(eps, lam, radii, ends, ceiling, lines, extra))
        if self.cones is not None:
            start = torch.zeros(1, dtype=torch.float64)
            far, top = torch.full_like(start, math.inf), self.ceiling[:, -1:]
            found.append(self.peaks_of(eps, lam, start, far, top, self.cones.lines(), extra))
        value, price = found[0]
        for own, cost in found[1:]:
            value, price = torch.minimum(value, own), torch.where(own < value, cost, price)
        return value, price

    @property
    def infinite(self) -> bool:
        """Whether the worst case is infinite at every eps > 0: the squared error at orders below 2
        where the error grows without bound.

        A mass m at distance `eps / m` costs eps at order 1, and its share of the mean is of the
        order of `m (eps / m)^2`.
        """
        return self.loss == "squared" and self.order < 2 and self.grows

    def by_lengths(self, eps: float) -> float:
        """Minkowski's bound on the squared error at orders of at least 2, rounded up:
        `(sqrt(E_N e^2) + Lm eps)^2`; inf for other losses and orders.

        Args:
            eps: budget >= 0.
        """
        if self.loss != "squared" or self.order < 2 or self.margin == math.inf:
            return math.inf
        root = math.sqrt(total_of(self.mu, self.start)) + self.margin * eps + self.shift
        return root * root * (1 + 16 * UNIT)

    def population(
        self,
        confidence: Number = 0.95,
        eps: Sequence[Number] | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> PopulationLoss:
        """As `LossCurve.population`. The least value of these losses is 0.

        Args:
            confidence: of each side, between 0 and 1; default 0.95.
            eps: where the limits are computed; default None, at 0 and at the radii of the grid.
            low: the least value of the loss; default None, 0.
            high: the greatest value of the loss in the domain; must be given, since the targets of
                the population are not known.
        """
        self._known(high)
        return super().population(confidence, eps, 0.0 if low is None else low, high)

    def population_at(
        self,
        eps: Number,
        confidence: Number = 0.95,
        low: float | None = None,
        high: float | None = None,
    ) -> tuple[float, float]:
        """As `LossCurve.population_at`. The least value of these losses is 0.

        Args:
            eps: budget, chosen before the samples were seen.
            confidence: of each side, between 0 and 1; default 0.95.
            low: the least value of the loss; default None, 0.
            high: the greatest value of the loss in the domain; must be given, as in `population`.
        """
        self._known(high)
        return super().population_at(eps, confidence, 0.0 if low is None else low, high)

    def _known(self, high: float | None) -> None:
        if high is None:
            raise InputError(
                "the targets of the population are not known, and the loss depends on them: give "
                "high, a bound on the loss in the domain."
            )

    def atoms(self, eps: Number) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The distribution behind the lower side: inputs `(M, *shape)`, targets `(M, K)`, masses
        `(M,)` and the sample that each comes from `(M,)`. Where targets move the inputs are flat.

        Args:
            eps: budget >= 0, in units of the norm.
        """
        rows, choice, masses = self.plan(budget_of(eps))
        points = self.x[rows].clone()
        points[choice >= 0] = self.points[choice[choice >= 0]]
        if self.label_cost == math.inf:
            return points, self.targets[rows], masses, rows
        moved = points[:, -1:].double() / self.label_cost
        return points[:, :-1], self.targets[rows] + moved, masses, rows

    def witness(self, eps: Number) -> Distribution:
        """The distribution behind the lower side: inside `Omega_order(eps)`, its expected loss
        evaluated (`info["loss"]`). Its `verify` recomputes distances and cost.

        Args:
            eps: budget > 0, in units of the norm.
        """
        if self.label_cost < math.inf:
            raise InputError(
                "the distribution moves targets, which a Distribution does not hold: use "
                "curve.atoms(eps) for its inputs, targets and masses."
            )
        found = super().witness(eps)
        rows = self.plan(budget_of(eps))[0]
        y = self.targets[rows]
        eye = torch.eye(y.shape[1], dtype=torch.float64)
        rule = Specification(torch.cat([-eye, eye]), torch.cat([y, -y], 1), about=self.loss)
        threat = replace(found.threat, domain=box_at(self.domain, rows))
        return replace(found, specification=rule, threat=threat)
