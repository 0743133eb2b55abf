"""The worst-case loss against the budget, from both sides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.bound import below
from wassail.certificates.loss.picture import draw_losses
from wassail.certificates.loss.population import PopulationLoss
from wassail.errors import InputError
from wassail.geometry import distances as distances_between
from wassail.network import versions
from wassail.notebook import card, picture, table
from wassail.records import Record
from wassail.rounding import UNIT
from wassail.threat import (
    Domain,
    Number,
    Threat,
    box_text,
    number,
    parse_confidence,
    parse_order,
)
from wassail.transport.allocation import spend
from wassail.transport.confidence import mean_at_least, mean_at_most, steps_down
from wassail.transport.distribution import Distribution
from wassail.transport.envelope import by_sample, envelope

HALVINGS = 70  # of the bracket of the multiplier, from 2^+-120 to rounding


@dataclass(frozen=True, eq=False, repr=False)
class LossCurve(Record):
    """The worst expected loss over `Omega_order(eps)` as a function of eps: `curve(eps)` is a pair
    `(lower, upper)`.

    Everything but `order` is the same for every order: see `of_order`. Between two radii of the
    grid, or beyond the last, the loss is certified to be at most `min(ceiling, left + rise (d -
    radius before))`, and at most `start + slope d` everywhere.

    Args:
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        mu: sample weights, float64 `(N,)`.
        norm: ground norm r.
        order: Wasserstein order p.
        loss: name of the loss.
        domain: box `(low, high)`, or None for R^n.
        clean: loss at the samples, `(N,)`.
        clean_predicted: class at the samples, `(N,)`.
        points: evaluated points `(M, *shape)`.
        root: index of the sample each point is reached from, `(M,)`.
        value: loss at the point, `(M,)`.
        distance: of the point from its sample, `(M,)`.
        predicted: class at the point, `(M,)`.
        start: `clean`, rounded up, `(N,)`.
        grid: radii `(T,)`.
        ceiling: certified loss between two radii, `(N, T + 1)`.
        left: certified loss at the radius before, `(N, T + 1)`.
        rise: certified growth from there, `(N, T + 1)`.
        slope: certified growth everywhere.
        info: seconds, settings, versions.
        line: `(lam, C)` of a certificate: the worst case is at most `C + lam eps`; or None.
        arithmetic: whether the curve is of the network as it is "executed", in its own
            floating-point type, or of the "exact" function.
        lift: how much higher the executed loss may be than the exact one, whose slope it is,
            anywhere in the domain.
    """

    x: Tensor
    y: Tensor
    mu: Tensor
    norm: float
    order: float
    loss: str
    domain: Domain
    clean: Tensor
    clean_predicted: Tensor
    points: Tensor
    root: Tensor
    value: Tensor
    distance: Tensor
    predicted: Tensor
    start: Tensor
    grid: Tensor
    ceiling: Tensor
    left: Tensor
    rise: Tensor
    slope: float
    info: Mapping[str, Any] = field(default_factory=dict)
    line: tuple[float, float] | None = None
    arithmetic: str = "exact"
    lift: float = 0.0

    def __call__(self, eps: Number) -> tuple[float, float]:
        """`(lower, upper)` on the worst expected loss at `eps >= 0`: evaluated from below,
        certified and rounded up above.
        """
        budget = budget_of(eps)
        high = self.upper(budget)
        return below(self.lower(budget), high, "worst-case loss"), high

    def lower(self, eps: float) -> float:
        """The lower side alone: the best distribution on the evaluated points.

        Args:
            eps: budget >= 0.
        """
        return self._expected(*self.plan(eps))

    def of_order(self, order: Number) -> LossCurve:
        """The curve of another Wasserstein order, from the same points and bounds: nothing is
        computed again.

        Args:
            order: Wasserstein order p, 1 to inf.
        """
        return replace(self, order=parse_order(order))

    def population(
        self,
        confidence: Number = 0.95,
        eps: Sequence[Number] | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> PopulationLoss:
        """Limits on the worst expected loss of the population at all eps at once (THEORY 8).

        Each limit has a share of the error probability, and the loss grows with eps in between.
        For statements about k orders at once give `1 - 0.05 / k`.

        Args:
            confidence: of each side, between 0 and 1; default 0.95.
            eps: where the limits are computed, chosen before the samples were seen; default None,
                at 0 and at the radii of the grid.
            low: see `population_at`.
            high: see `population_at`.
        """
        given = self.grid.tolist() if eps is None else [budget_of(value) for value in eps]
        places = sorted({0.0, *given})
        least, top = self._span(low, high)
        sure = parse_confidence(confidence)
        share = (1 - sure) / len(places)
        pairs = [self._limits(place, share, least, top) for place in places]
        lower = list(itertools.accumulate((pair[0] for pair in pairs), max))
        upper = list(itertools.accumulate((pair[1] for pair in reversed(pairs)), min))[::-1]
        return PopulationLoss(
            self.order,
            tuple(places),
            tuple(lower),
            tuple(upper),
            least,
            top,
            sure,
            len(self.mu),
        )

    def population_at(
        self,
        eps: Number,
        confidence: Number = 0.95,
        low: float | None = None,
        high: float | None = None,
    ) -> tuple[float, float]:
        """Limits on the worst expected loss of the population at one eps (THEORY 8).

        The upper one is certified: the best of some multipliers of the dual, each with a share of
        the error probability. The lower one is that of the evaluated points: all multipliers are
        refuted, each at the full level. Each holds with this confidence, however the bounds were
        made; the samples must be independent and of equal weight.

        Args:
            eps: budget, chosen before the samples were seen.
            confidence: of each side, between 0 and 1; default 0.95.
            low: the least value of the loss; 0 for cross entropy, must be given for others.
            high: the greatest value of the loss in the domain; by default its certified maximum on
                the box for the labels that occur, and the statement is for those labels.
        """
        least, top = self._span(low, high)
        return self._limits(budget_of(eps), 1 - parse_confidence(confidence), least, top)

    def _span(self, low: float | None, high: float | None) -> tuple[float, float]:
        """The least and the greatest value that the loss can have, or why they are not known."""
        if not bool((self.mu == self.mu[0]).all()):
            raise InputError("the samples have different weights mu: evaluate without mu.")
        if low is None and self.loss != "cross_entropy":
            raise InputError(f"give low, the least value that the loss {self.loss!r} can have.")
        least = 0.0 if low is None else float(low)
        top = float(self.ceiling[:, -1].max()) if high is None else float(high)
        if not least < top < math.inf or (high is None and self.domain is None):
            raise InputError("the loss has no known maximum here: give high, a bound on it.")
        return least, top

    def _limits(self, budget: float, alpha: float, least: float, top: float) -> tuple[float, float]:
        """Both limits at one budget, each wrong with probability alpha."""
        wide = top - least
        # More than the sums below lose: the price that is chosen is never above wide.
        lost = 8 * UNIT * (abs(least) + wide)
        n = len(self.mu)

        def shares(values: Tensor) -> Tensor:
            return ((values - least) / wide).clamp(0, 1)

        plans = self._evaluated(budget, wide)
        sums = torch.stack([shares(seen).sum() for _, seen in plans]).numpy()
        floors = mean_at_least(sums, n, alpha).tolist()
        lower = min(paid + least + wide * share for (paid, _), share in zip(plans, floors)) - lost
        edge = torch.cat([torch.zeros(1, dtype=torch.float64), self.grid])
        if budget == 0 or self.order == math.inf:
            seen = [(0.0, self.start if budget == 0 else self.tops(budget, edge))]
        else:
            # A bound on a sample may depend on the others, so no sample may choose the multiplier
            # of the others: each multiplier has a share of alpha.
            tries = [wide * step for step in steps_down(n)]
            seen = [(lam, self.peaks(budget, lam, edge)[0]) for lam in tries]
        total = torch.stack([shares(peaks).sum() for _, peaks in seen]).numpy()
        means = mean_at_most(total, n, alpha / len(seen)).tolist()
        upper = min(lam + least + wide * mean for (lam, _), mean in zip(seen, means)) + lost
        return lower, min(upper, top)

    def _evaluated(self, eps: float, wide: float) -> list[tuple[float, Tensor]]:
        """Cells of multipliers that cover `[0, inf)`: the lower end of each, and what each sample
        is worth at its upper end, `(N,)`.

        wide: the range of the loss, in whose units the multipliers are.
        """
        if not len(self.points) or eps == 0:
            return [(0.0, self.clean)]
        place, known = self._table
        value = torch.where(known, self.value[place], -math.inf)
        if self.order == math.inf:
            near = torch.where(self.distance[place] <= eps, value, -math.inf).amax(1)
            return [(0.0, torch.maximum(self.clean, near))]
        price = ((self.distance[place] / eps) ** self.order).clamp(max=1e200)
        ends = [wide * 2.0 ** (k / 4) for k in range(-60, 41)]
        worth = [torch.maximum(self.clean, (value - lam * price).amax(1)) for lam in ends]
        return [*zip([0.0, *ends[:-1]], worth), (ends[-1], self.clean)]

    @property
    def empirical(self) -> float:
        """The expected loss on the samples themselves."""
        return math.fsum((self.mu * self.clean).tolist())

    def witness(self, eps: Number) -> Distribution:
        """The distribution behind the lower side: inside `Omega_order(eps)`, its expected loss
        evaluated (`info["loss"]`).

        One sample may be split between two points; it then stands in the distribution twice, with
        the parts of its weight.

        Args:
            eps: budget > 0, in units of the norm.
        """
        threat = Threat(self.norm, self.order, budget_of(eps), self.domain)
        rows, choice, mu = self.plan(threat.eps)
        used = choice >= 0
        x = self.x[rows]
        points = x.clone()
        predicted = self.clean_predicted[rows].clone()
        points[used], predicted[used] = self.points[choice[used]], self.predicted[choice[used]]
        zero = torch.zeros(len(rows), dtype=torch.int64)
        info = {"loss": self._expected(rows, choice, mu), "versions": versions()}
        return Distribution(
            x,
            self.y[rows],
            points,
            used.double(),
            distances_between(points, x, self.norm),
            self.clean_predicted[rows],
            predicted,
            mu,
            zero,
            zero,
            zero,
            threat,
            "loss curve",
            "fixed",
            info,
        )

    def _expected(self, rows: Tensor, choice: Tensor, mu: Tensor) -> float:
        """The expected loss of a plan."""
        value = self.clean[rows].clone()
        value[choice >= 0] = self.value[choice[choice >= 0]]
        return math.fsum((mu * value).tolist())

    def plan(self, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """The best distribution on the evaluated points: samples, where each moves (-1: nowhere),
        masses; `(N,)` or `(N + 1,)`.

        Order inf: the highest point within eps of each sample. Finite orders: from the samples on,
        the steps of the concave envelopes in order of steepness while the budget lasts; the step
        that it cuts splits its sample.

        Args:
            eps: budget >= 0.
        """
        rows = torch.arange(len(self.y))
        none = torch.full_like(self.y, -1)
        if not len(self.points) or eps == 0:
            return rows, none, self.mu
        place, known = self._table
        gain = torch.where(known, self.value[place] - self.clean[:, None], -math.inf)
        if self.order == math.inf:
            best = torch.where(self.distance[place] <= eps, gain, -math.inf).max(1)
            return rows, torch.where(best.values > 0, place[rows, best.indices], -1), self.mu
        price = (
            self.distance[place] / eps
        ) ** self.order  # in units of the budget: no order can overflow where it matters
        step = envelope(gain, price)
        bill = self.mu[step.sample] * step.price
        share = spend(bill, 1 - 1e-12)
        done = int((share == 1).sum())
        last = torch.full_like(self.y, -1).scatter_reduce(
            0, step.sample[:done], torch.arange(done), "amax"
        )
        choice = torch.where(last >= 0, place[rows, step.to[last]], -1) if done else none
        if done == len(bill):
            return rows, choice, self.mu
        i = int(step.sample[done])
        mu = torch.cat([self.mu, share[done] * self.mu[i : i + 1]])
        mu[i] -= mu[-1]
        return (
            torch.cat([rows, rows[i : i + 1]]),
            torch.cat([choice, place[i, step.to[done]][None]]),
            mu,
        )

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """The points of each sample, `(N, P)`: indices, and which of them are real."""
        return by_sample(self.root, len(self.y))

    def upper(self, eps: float) -> float:
        """The upper side alone: the best of the growth of each sample, the steepest slope and the
        line of a certificate.

        `Omega_p(eps)` is a part of `Omega_1(eps)`, so what a line says of order 1 holds for every
        order.

        Args:
            eps: budget >= 0.
        """
        tops = (
            start + lam * eps + 4 * UNIT * (abs(start) + lam * eps)
            for lam, start in self.slope_lines()
        )
        return min(self._grown(eps), *tops, math.inf)

    def slope_lines(self) -> list[tuple[float, float]]:
        """Lines `C + lam eps` above the worst case, `(lam, C)` each."""
        lines = [] if self.line is None else [self.line]
        if self.slope < math.inf:
            lines.append((self.slope, total_of(self.mu, self.start)))
        return [(lam, start + self.lift) for lam, start in lines]

    def _grown(self, eps: float) -> float:
        """By the growth of each sample: order inf one by one, finite orders by the dual at a
        good multiplier.
        """
        if eps == 0:
            return self.at_rest()
        edge = torch.cat([torch.zeros(1, dtype=torch.float64), self.grid])
        if self.order == math.inf:
            return self.mean(self.within(eps, edge))
        low = -120.0
        high = 120.0
        best = self.mean(self.ceiling.amax(1))  # lam = 0
        # nothing is finite below the slope beyond the grid
        if self.domain is None and self.order == 1 and self.slope > 0:
            low = min(math.log2(self.slope * eps) + 1e-12, high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            value, spent = self.dual(eps, 2.0**middle, edge)
            low, high = (middle, high) if spent > 1 else (low, middle)
            best = min(best, value)
        more = [2.0**low, 2.0**high, *self.multipliers(eps)]
        return min(best, *(self.dual(eps, lam, edge)[0] for lam in more))

    def dual(self, eps: float, lam: float, edge: Tensor) -> tuple[float, float]:
        """`lam + sum_i mu_i max_d [G_i(d) - lam (d/eps)^p]`, rounded up, and the budget that its
        maximisers spend.

        Args:
            eps: budget.
            lam: multiplier, in units of the budget.
            edge: 0 and the radii of the grid.
        """
        values, prices = self.peaks(eps, lam, edge, self.before)
        return lam * (1 + 4 * UNIT) + self.mean(values), self.spent(values, prices)

    @property
    def before(self) -> Tensor | None:
        """What each row pays before it moves, `(N, 1)`; None for nothing."""
        return None

    def mean(self, values: Tensor) -> float:
        """The mean of what the rows can have, rounded up.

        Args:
            values: `(N,)`.
        """
        return total_of(self.mu, values)

    def spent(self, values: Tensor, prices: Tensor) -> float:
        """What the rows that count in that mean pay.

        Args:
            values: `(N,)`.
            prices: `(N,)`.
        """
        return float((self.mu * prices).sum())

    def at_rest(self) -> float:
        """The loss on the samples themselves, rounded up."""
        return total_of(self.mu, self.start)

    def within(self, eps: float, edge: Tensor) -> Tensor:
        """The highest loss of each row that it can afford with eps, rounded up, `(N,)`.

        Args:
            eps: radius.
            edge: 0 and the radii of the grid.
        """
        return self.tops(eps, edge)

    def multipliers(self, eps: float) -> list[float]:
        """Multipliers worth trying beside those of the search, in units of the budget.

        Args:
            eps: budget.
        """
        return []

    def tops(self, eps: float, edge: Tensor) -> Tensor:
        """The highest loss within eps of each sample, rounded up, `(N,)`.

        Args:
            eps: radius.
            edge: 0 and the radii of the grid.
        """
        t = int(torch.searchsorted(self.grid, eps))
        top = self.ceiling[:, t]
        for left, rise in self._lines(edge):
            line = left[:, t] + rise[:, t] * (eps - float(edge[t]))
            top = torch.minimum(top, line + 8 * UNIT * (left[:, t].abs() + line.abs()))
        return top

    def _lines(self, edge: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Two lines above the growth on each interval, left end and slope, `(N, T + 1)` each:
        of the ball, and the cone.
        """
        lines = [(self.left, self.rise)]
        if self.slope < math.inf:
            cone = self.start[:, None] + self.lift + self.slope * edge
            lines.append(
                (
                    cone + 4 * UNIT * (self.start[:, None].abs() + cone.abs()),
                    torch.full_like(cone, self.slope),
                )
            )
        return lines

    def peaks(
        self, eps: float, lam: float, edge: Tensor, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`max_d [G_i(d) - lam (d/eps)^p]` of each sample, rounded up, and its price, `(N,)` each.

        On each interval of the grid the maximum of a line, cut by the ceiling, minus a power; the
        smaller one of two lines.

        Args:
            eps: budget.
            lam: multiplier, in units of the budget.
            edge: 0 and the radii of the grid.
            extra: what each sample pays before it moves, `(N, 1)`, its price being `((d +
                extra)/eps)^p`; default None, nothing.
        """
        ends = torch.cat([self.grid, torch.full((1,), math.inf, dtype=torch.float64)])
        return self.peaks_of(eps, lam, edge, ends, self.ceiling, self._lines(edge), extra)

    def peaks_of(
        self,
        eps: float,
        lam: float,
        edge: Tensor,
        ends: Tensor,
        ceiling: Tensor,
        lines: list[tuple[Tensor, Tensor]],
        extra: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same by bounds on T intervals.

        Args:
            eps: budget.
            lam: multiplier, in units of the budget.
            edge: where the intervals begin, `(T,)` or `(N, T)`.
            ends: where they end.
            ceiling: the loss there is at most this, `(N, T)`.
            lines: left ends and slopes of lines above it, `(N, T)` each.
            extra: as in `peaks`.
        """
        p = self.order
        before = torch.zeros(1, dtype=torch.float64) if extra is None else extra
        peaks = []
        for left, rise in lines:
            free = (
                torch.where(rise * eps > lam, math.inf, 0.0)
                if p == 1
                else eps * (rise * eps / (p * lam)) ** (1 / (p - 1)) - before
            )
            corner = torch.where(rise > 0, edge + (ceiling - left).clamp(min=0) / rise, edge)
            end = torch.minimum(ends, corner)
            where = torch.maximum(edge, torch.minimum(free, end))
            top = torch.minimum(ceiling, left + rise * (where - edge))
            # any smaller price is sound, and this one does not overflow
            price = (((where + before) / eps) ** p).clamp(max=1e200)
            paid = lam * price
            peaks.append(
                (top - paid + (2 * p + 16) * UNIT * (top.abs() + paid + left.abs()), price)
            )
        value, price = peaks[0]
        for other, cost in peaks[1:]:
            value, price = torch.minimum(value, other), torch.where(other < value, cost, price)
        best = value.max(1)
        return best.values, price.gather(1, best.indices[:, None])[:, 0]

    def __repr__(self) -> str:
        box = box_text(self.domain)
        eps = float(self.grid[len(self.grid) // 2])
        low, high = self(eps)
        return (
            f"LossCurve({self.loss} on {len(self.y)} samples, order {self.order:g}, "
            f"l{self.norm:g}, {box}: "
            f"{self.empirical:.6g} at eps 0, between {low:.6g} and {high:.6g} at eps {eps:.4g})"
        )

    def _repr_html_(self) -> str:
        end = float(self.grid[-1])
        grid: list[float] = torch.linspace(0, end, 41, dtype=torch.float64).tolist()
        rows = []
        for eps in grid[::10]:
            low, high = self(eps)
            rows.append((f"{eps:.4g}", f"{low:.6g}", f"{high:.6g}"))
        title = (
            f"Worst {self.loss} loss over Omega_{self.order:g}(eps), {len(self.y)} samples, "
            f"l{self.norm:g}, {box_text(self.domain)}"
        )
        drawn = picture(
            lambda: draw_losses(self, grid), "lower and upper bound of the worst loss against eps"
        )
        return card(title, table(("eps", "at least", "at most"), rows), drawn)


def total_of(mu: Tensor, values: Tensor) -> float:
    """`sum_i mu_i values_i`, rounded up; a value of no weight does not count, not even inf."""
    values = torch.where(mu > 0, values, 0.0)
    return math.fsum((mu * values).tolist()) + 4 * UNIT * math.fsum((mu * values.abs()).tolist())


def budget_of(eps: Number) -> float:
    """A budget for a curve: finite, 0 or more.

    Args:
        eps: as it was given.
    """
    budget = number(eps, "eps")
    if not 0 <= budget < math.inf:
        raise InputError(f"eps is {eps!r}: a curve is defined for finite eps >= 0.")
    return budget
