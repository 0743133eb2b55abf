"""The knapsack where the weights of known groups may change within ranges (THEORY 12).

Let `m_i` be the mass of sample i that is wrong, `w_g` the weight of its group, `nu_i` its weight
within the group. The error of the worst weights is

    max { sum_i m_i : m_i <= w_g nu_i / alpha, sum_{i in g} m_i <= w_g, sum_i m_i c_i <= 1 }

over w in the ranges, with the costs `c_i = (d_i / eps)^p`. Its dual is one number:

    min_{lam >= 0} lam + max_w sum_g w_g h_g(lam),    h_g(lam) = sum_{i in g} k_i (1 - lam c_i)_+,

where `k_i` fills a group with its nearest samples, each up to `nu_i / alpha`, to the mass 1. The
maximum over w is greedy by `h_g`. Any lam is an upper bound on the error; two maximisers on both
sides of the best lam, mixed so that they cost 1, are a feasible plan that attains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.rounding import UNIT
from wassail.threat import Groups
from wassail.transport.mixture import Line, Mixture, mixture
from wassail.transport.side import area_under, floor_of

Array: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]
MOST_STEPS = 200  # of the search for all bends
MOST_NUMBERS = 4_000_000  # in one table of multipliers and groups


@dataclass(frozen=True)
class Lines:
    """Maximisers at several multipliers: what they win and cost, `(T,)`, the weights of the groups
    and how many samples of each they buy, `(T, G)`.
    """

    won: Array
    cost: Array
    weights: Array
    counts: Counts


class GroupedSide:
    """One side of a risk curve with groups; its methods are those of `Side`.

    Args:
        distances: float64 `(N,)`.
        mu: sample weights, float64 `(N,)`.
        order: Wasserstein order p.
        groups: of the N samples.
        certified: whether the distances are radii, whose curve may be rounded down only.
        share: alpha of each group, in (0, 1].
    """

    def __init__(
        self,
        distances: Tensor,
        mu: Tensor,
        order: float,
        groups: Groups,
        certified: bool = False,
        share: float = 1.0,
    ) -> None:
        self.order = order
        self.certified = certified
        self.empty = len(mu) == 0
        self.low = np.array(groups.low)
        self.span = np.array(groups.high) - self.low
        self.groups = groups
        self.rows: list[Counts] = []  # samples of each group, the nearest first
        self.near: list[Array] = []  # their distances
        self.held: list[Array] = []  # the mass of the first 0, 1, ... of them, at most 1
        everywhere = distances.numpy()
        weighed = mu.numpy()
        places = np.array(groups.places, dtype=np.int64)
        for place, name in enumerate(groups.names):
            mine = np.flatnonzero(places == place)
            total = math.fsum(weighed[mine].tolist())
            if not total > 0:
                raise InputError(
                    f"group {name!r} has samples of weight mu 0 only, so nothing is known about "
                    "it: leave them out, or give them weight."
                )
            mine = mine[np.isfinite(everywhere[mine]) & (weighed[mine] > 0)]
            mine = mine[np.argsort(everywhere[mine], kind="stable")]
            held = np.minimum(np.cumsum(weighed[mine]) / (total * share), 1.0)
            self.rows.append(mine)
            self.near.append(everywhere[mine])
            self.held.append(np.concatenate([[0.0], held]))
        # Of a sum of the masses of a group, and of a power of a rounded quotient.
        largest = max((len(row) for row in self.rows), default=0)
        power = 2 * order if math.isfinite(order) else 0.0
        self.slack = (2 * largest + 64 + power) * UNIT

    def accuracy(self, eps: float) -> float:
        """The accuracy at eps, to rounding."""
        return math.nan if self.empty else max(1 - self._error(eps), 0.0)

    def accuracies(self, eps: Tensor) -> Tensor:
        """The accuracy at several eps, `(T,)`, to rounding."""
        return torch.tensor([self.accuracy(e) for e in eps.tolist()], dtype=torch.float64)

    def _error(self, eps: float) -> float:
        if self.order == math.inf or eps == 0:
            return float(self._greedy(self._reached(eps)[None]).won[0])
        return self.plan(eps).won

    def _reached(self, eps: float) -> Array:
        """The mass of each group that can be wrong for no more than eps a sample, `(G,)`."""
        side: Literal["left", "right"] = "left" if self.certified and eps > 0 else "right"
        return np.array(
            [held[np.searchsorted(near, eps, side)] for near, held in zip(self.near, self.held)]
        )

    def proved(self, eps: float) -> float:
        """The accuracy at eps, rounded down: by weak duality, which no rounding of the multiplier
        can make false.
        """
        if self.empty:
            return math.nan
        if self.order == math.inf or eps == 0:
            return proved_by_weights(self.groups, (self._reached(eps) + self.slack).tolist())
        costs = self._costs(eps)
        best = self.plan(eps).multiplier
        return max(self._certified_at(costs, best), self._certified_at(costs, 0.0))

    def _certified_at(self, costs: list[Array], multiplier: float) -> float:
        """An accuracy that a multiplier proves."""
        wins = self._wins(costs, np.array([multiplier]))[0][0] + self.slack
        return proved_by_weights(self.groups, wins.tolist(), multiplier)

    def _costs(self, eps: float) -> list[Array]:
        """The costs of each group's samples in units of the budget."""
        with np.errstate(over="ignore"):
            return [(near / eps) ** self.order for near in self.near]

    def _wins(self, costs: list[Array], multipliers: Array) -> tuple[Array, Array, Counts]:
        """`h_g`, what it costs, and how many samples are bought, `(T, G)` each."""
        shape = (len(multipliers), len(costs))
        wins = np.zeros(shape)
        spent = np.zeros(shape)
        counts = np.zeros(shape, dtype=np.int64)
        with np.errstate(divide="ignore"):
            worth = 1 / multipliers
        for g, (cost, held) in enumerate(zip(costs, self.held)):
            count = np.searchsorted(cost, worth, "left")
            with np.errstate(over="ignore", invalid="ignore"):  # of what is out of reach
                paid = np.concatenate([[0.0], np.cumsum(np.diff(held) * cost)])
            counts[:, g] = count
            spent[:, g] = paid[count]
            free = multipliers == 0  # whatever it costs
            fee = np.where(free, 0.0, multipliers) * np.where(free, 0.0, spent[:, g])
            wins[:, g] = np.maximum(held[count] - fee, 0.0)
        return wins, spent, counts

    def _greedy(self, wins: Array, spent: Array | None = None) -> Lines:
        """The weights that win most, of equal ones the cheapest."""
        spent = np.zeros_like(wins) if spent is None else spent
        order = np.lexsort((spent, -wins), axis=-1)
        span = self.span[order]
        left = max(1 - float(self.low.sum()), 0.0)
        before = np.cumsum(span, 1) - span
        extra = np.clip(left - before, 0.0, span)
        weights = np.empty_like(wins)
        np.put_along_axis(weights, order, self.low[order] + extra, 1)
        won = (weights * wins).sum(1)
        cost = np.where(weights > 0, weights * spent, 0.0).sum(1)
        return Lines(won, cost, weights, np.zeros(wins.shape, dtype=np.int64))

    def _lines(self, costs: list[Array], multipliers: Array) -> Lines:
        """The maximisers at several multipliers: what they win is the mass that is wrong."""
        wins, spent, counts = self._wins(costs, multipliers)
        found = self._greedy(wins, spent)
        masses = np.stack([held[counts[:, g]] for g, held in enumerate(self.held)], 1)
        won = (found.weights * masses).sum(1)
        return Lines(won, found.cost, found.weights, counts)

    def plan(self, eps: float) -> Mixture[tuple[Array, Counts]]:
        """The weights of the groups and how many samples of each are bought, `(G,)` each, that win
        most for `eps > 0`.
        """
        costs = self._costs(eps)
        positive = [float(cost[cost > 0][0]) for cost in costs if (cost > 0).any()]

        def at(multiplier: float) -> Line[tuple[Array, Counts]]:
            found = self._lines(costs, np.array([multiplier]))
            plan = (found.weights[0], found.counts[0])
            return Line(float(found.won[0]), float(found.cost[0]), plan)

        return mixture(at, min(2 / min(positive), 1e300) if positive else 0.0)

    def masses(self, eps: float) -> tuple[Array, Array]:
        """What a plan moves of each sample, float64 `(N,)`, and the weights of the groups, `(G,)`.

        Args:
            eps: the budget, positive.
        """
        moved = np.zeros(len(self.groups))
        if self.order == math.inf:
            found = self._greedy(self._reached(eps)[None])
            counts = np.array([np.searchsorted(near, eps, "right") for near in self.near])
            parts = [(1.0, (found.weights[0], counts))]
        else:
            parts = self.plan(eps).parts
        weights = np.zeros(len(self.rows))
        for share, (held_by, bought) in parts:
            weights += share * held_by
            for g, first in enumerate(bought.tolist()):
                mass = np.diff(self.held[g])[:first]
                moved[self.rows[g][:first]] += share * held_by[g] * mass
        return moved, weights

    def breakpoints(self) -> tuple[Tensor, Tensor]:
        """The eps at which the curve bends, and the accuracy there: see `RiskCurve`."""
        if self.empty:
            zero = torch.zeros(1, dtype=torch.float64)
            return zero, zero / 0
        known = np.concatenate([np.zeros(1), *self.near])
        if self.order == math.inf:
            eps = np.unique(known)
            wins = np.stack(
                [held[np.searchsorted(n, eps, "right")] for n, held in zip(self.near, self.held)], 1
            )
            error = self._greedy(wins).won
        else:
            scale = float(known.max()) or 1.0
            cost, error = self._vertices(self._costs(scale))
            eps = scale * cost ** (1 / self.order)
        if self.certified:
            # A relative error of the cost moves the error by no more: it is concave and at most 1.
            error = error + self.slack
        last = np.append(eps[1:] > eps[:-1], True)  # of equal eps the lowest accuracy holds
        accuracy = np.clip(1 - error, 0.0, 1.0)[last]
        return torch.from_numpy(eps[last]), torch.from_numpy(accuracy)

    def _vertices(self, costs: list[Array]) -> tuple[Array, Array]:
        """The bends of the error over the budget: costs and errors, `(B,)` each, from cost 0 on.

        Every maximiser is a point of that curve. Between two multipliers whose lines meet on the
        dual function there is no other one.
        """
        every = np.concatenate(costs)
        every = np.unique(every[(every > 0) & np.isfinite(every)])
        multipliers = np.concatenate([[0.0], 1 / every[::-1]])
        if len(every):
            multipliers = np.append(multipliers, 2 / every[0])
        points = self._points(costs, multipliers)
        for _ in range(MOST_STEPS):
            cost, won = points[1:]
            gap = cost[:-1] - cost[1:]
            apart = gap > 1e-13 * np.maximum(cost[:-1], 1e-300)
            middle = (won[:-1] - won[1:])[apart] / gap[apart]
            inside = (middle > points[0][:-1][apart]) & (middle < points[0][1:][apart])
            line = won[:-1][apart] - middle * cost[:-1][apart]
            fresh = self._points(costs, middle[inside])
            above = fresh[2] - fresh[0] * fresh[1] > line[inside] + 1e-14
            if not above.any():
                break
            both = np.concatenate([points, fresh[:, above]], 1)
            points = both[:, np.unique(both[0], return_index=True)[1]]
        order = np.argsort(points[1], kind="stable")
        cost = points[1][order]
        won = np.maximum.accumulate(points[2][order])
        free = float(self._greedy(self._reached(0.0)[None]).won[0])
        return np.append(0.0, cost), np.append(free, np.maximum(won, free))

    def _points(self, costs: list[Array], multipliers: Array) -> Array:
        """Multipliers, and the costs and errors of their maximisers, `(3, T)`."""
        size = max(MOST_NUMBERS // max(len(costs), 1), 1)
        found = [np.zeros((2, 0))]
        for start in range(0, len(multipliers), size):
            lines = self._lines(costs, multipliers[start : start + size])
            found.append(np.stack([lines.cost, lines.won]))
        return np.concatenate([multipliers[None], np.concatenate(found, 1)])

    def inverse(self, level: float) -> float:
        """The smallest eps at which the accuracy falls to a level: see `RiskCurve`."""
        if self.empty:
            return math.nan
        eps, accuracy = (side.numpy() for side in self.breakpoints())
        low = accuracy <= level + max(1e-12, self.slack)
        if not low.any():
            return math.inf
        k = int(low.argmax())
        if k == 0 or self.order == math.inf:
            return float(eps[k])
        drop = (accuracy[k - 1] - level) / max(accuracy[k - 1] - accuracy[k], 1e-300)
        before = (eps[k - 1] / eps[k]) ** self.order
        part = before + min(max(drop, 0.0), 1.0) * (1 - before)
        return float(eps[k] * part ** (1 / self.order))

    def area(self, eps: float) -> float:
        """`int_0^eps accuracy`, to rounding."""
        return area_under(self, eps)


def worst_weights(groups: Groups, errors: Sequence[float]) -> float:
    """The error of the worst weights of groups with these errors, to rounding.

    Args:
        groups: with their ranges.
        errors: of each group, in the order of `groups.names`.
    """
    return float(1 - _left(groups, errors, Fraction(0)))


def proved_by_weights(
    groups: Groups, errors: Sequence[float | Fraction], spent: float = 0.0
) -> float:
    """An accuracy that holds for all weights of the groups, rounded down.

    Args:
        groups: with their ranges.
        errors: upper bounds on the error of each group.
        spent: what the error may be above their mean.
    """
    return floor_of(_left(groups, errors, Fraction(spent)))


def _left(groups: Groups, errors: Sequence[float | Fraction], spent: Fraction) -> Fraction:
    """One minus the error, in exact arithmetic. Ranges whose sums miss one by rounding count for
    what they are, and what no group takes counts as wrong.
    """
    error = spent
    left = 1 - sum(map(Fraction, groups.low), Fraction(0))
    for g in sorted(range(len(errors)), key=lambda g: -errors[g]):
        low = Fraction(groups.low[g])
        more = min(max(left, Fraction(0)), Fraction(groups.high[g]) - low)
        error += (low + more) * min(Fraction(errors[g]), Fraction(1))
        left -= more
    return 1 - error - max(left, Fraction(0))
