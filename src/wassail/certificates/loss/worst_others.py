"""The exact worst case of small networks where labels change at a price and people are missing
(THEORY 12): `worst_case` by the pairs of samples and labels.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.loss.pairs import ROOM, worst_masses, worst_share
from wassail.certificates.loss.penalty import FAR, Penalty
from wassail.certificates.loss.problem import Problem, WorstCase
from wassail.certificates.search.programs import LIFT
from wassail.geometry import distances
from wassail.rounding import UNIT
from wassail.transport.allocation import transport_cost
from wassail.transport.mixture import Line, Mixture, mixture

Plan: TypeAlias = "list[tuple[int, int, float]]"  # pair, its evaluated point, mass


class OthersProblem:
    """Samples with labels that change and people that are missing.

    Args:
        pairs: the problem of each sample with each label that it may have.
        y: labels of the samples, `(N,)`.
        mu: their weights, `(N,)`.
        label_cost: price of a changed label; inf, or order 1 or inf.
        share: least share that is there.
        order: Wasserstein order.
        eps: budget, positive.
    """

    def __init__(
        self,
        pairs: Problem,
        y: Tensor,
        mu: Tensor,
        label_cost: float,
        share: float,
        order: float,
        eps: float,
    ) -> None:
        self.pairs = pairs
        self.y = y
        self.mu = mu
        self.share = share
        self.order = order
        self.eps = eps
        self.size = len(pairs.clean) // len(y)
        other = pairs.y != y.repeat_interleave(self.size)
        self.extra = np.where(other.numpy(), label_cost, 0.0)

    def mean(self, values: np.ndarray) -> float:
        """The mean of the worst share of what the samples can have, from that of the pairs."""
        best = torch.from_numpy(values).reshape(len(self.y), self.size).amax(1)
        return worst_share(self.mu, best, self.share)

    def dual(self, lam: float, tolerance: float) -> float:
        """The dual at a multiplier from above, without `lam eps^p`; for order inf the bound."""
        values = np.full(len(self.extra), -math.inf)
        for row, extra in enumerate(self.extra.tolist()):
            if self.order == math.inf:
                if extra <= self.eps:
                    left = math.nextafter(self.eps - extra, math.inf) if extra else self.eps
                    values[row] = self.pairs.evaluate(row, Penalty(math.inf, left), tolerance)
            else:
                found = self.pairs.evaluate(row, Penalty(self.order, lam), tolerance)
                price = lam * extra if extra else 0.0  # the order is 1 where there is one
                values[row] = found - price + 2 * UNIT * (abs(found) + price)
        return self.mean(values)

    def slope_line(self) -> float:
        """By the steepest slope of all pairs: no input moves at that multiplier."""
        steep = self.pairs.steepest
        rest = self.pairs.clean + self.pairs.errors
        price = np.where(self.extra > 0, steep * np.minimum(self.extra, 1e300), 0.0)
        if steep == 0:
            price = np.where(np.isfinite(self.extra), 0.0, math.inf)
        top = self.mean(rest - price + 2 * UNIT * (np.abs(rest) + np.minimum(price, 1e300)))
        return top + steep * self.eps * (1 + LIFT) + 4 * UNIT * abs(top)

    def best(self) -> tuple[Plan, float, float]:
        """The best distribution on the evaluated points, its loss and its multiplier."""
        rows = [(r, at) for r, pool in enumerate(self.pairs.pools) for at in range(pool.size)]
        known = np.concatenate([pool.rows[:, :2] for pool in self.pairs.pools])
        owner = np.array([r // self.size for r, _ in rows])
        cost = known[:, 1] + self.extra[[r for r, _ in rows]]
        starts = np.searchsorted(owner, np.arange(len(self.y)))
        if self.order == math.inf:
            # The sum of a distance and a price is rounded.
            price = np.where(cost <= self.eps * (1 + 4 * UNIT), 0.0, math.inf)
        else:
            price = (cost / self.eps) ** self.order * (1 + ROOM)

        def at(multiplier: float) -> Line[tuple[np.ndarray, np.ndarray]]:
            with np.errstate(invalid="ignore"):
                worth = np.where(np.isfinite(price), known[:, 0] - multiplier * price, -math.inf)
            top = np.maximum.reduceat(worth, starts)
            first = np.flatnonzero(worth == top[owner])
            chosen = first[np.searchsorted(owner[first], np.arange(len(self.y)))]
            masses = worst_masses(self.mu, torch.from_numpy(top), self.share).numpy()
            won = math.fsum((masses * known[chosen, 0]).tolist())
            paid = math.fsum((masses * price[chosen]).tolist())
            return Line(won, paid, (chosen, masses))

        positive = price[(price > 0) & np.isfinite(price)]
        spread = float(known[:, 0].max() - known[:, 0].min())
        end = min(2 * spread / float(positive.min()) + 1.0, 1e300) if len(positive) else 0.0
        found: Mixture[tuple[np.ndarray, np.ndarray]] = mixture(at, end)
        masses: dict[int, float] = {}
        for share, (chosen, mass) in found.parts:
            for c, m in zip(chosen.tolist(), mass.tolist()):
                if share * m > 0:
                    masses[c] = masses.get(c, 0.0) + share * m
        plan = [(*rows[c], m) for c, m in sorted(masses.items())]
        lam = 0.0 if self.order == math.inf else found.multiplier / self.eps**self.order
        return plan, found.won, lam

    def _multipliers(self) -> tuple[float, float]:
        """The least multiplier that has certificates, and the one to begin with."""
        pairs, p = self.pairs, self.order
        if p == 1 and pairs.unbounded:
            pairs.add_far_points()
        least = max(1e-13 * pairs.steepest, pairs.flattest if p == 1 or not pairs.unbounded else 0)
        floor = least * self.eps ** (1 - p)
        return floor, floor if p == 1 else pairs.steepest * self.eps ** (1 - p) / p

    def solve(self, tolerance: float) -> WorstCase:
        """Cutting planes in the multiplier, as `worst_case_network` has them.

        Args:
            tolerance: of the bracket.
        """
        pairs, p, eps = self.pairs, self.order, self.eps
        upper = self.slope_line()
        if p == math.inf:
            upper = min(upper, self.dual(0.0, tolerance / 4))
            plan, _, _ = self.best()
            return self.report(plan, upper, math.nan)
        floor, lam = self._multipliers()
        best = math.nan
        tried = [lam]
        gap = math.inf
        plan, low, _ = self.best()
        while True:
            goal = tolerance * max(1.0, abs(upper))
            fine = max(goal, (upper - low) / 2) / 4
            value = (1 + 2 * LIFT) * lam * eps**p + self.dual(lam, fine)
            if value < upper:
                upper, best = value, (1 + 2 * LIFT) * lam
            plan, low, lam = self.best()
            gap, before = upper - low, gap
            if gap <= goal or pairs.late():
                return self.report(plan, upper, best)
            if lam == 0 and p > 1 and pairs.unbounded:
                lam = min(tried) / 4
            lam = max(lam, floor)
            if gap > 0.9 * before and any(math.isclose(lam, t, rel_tol=1e-13) for t in tried):
                return self.report(plan, upper, best)
            tried.append(lam)

    def report(self, plan: Plan, upper: float, lam: float) -> WorstCase:
        """The plan as tensors, everything recomputed from them."""
        pairs = self.pairs
        row = torch.tensor([r for r, _, _ in plan])
        masses = torch.tensor([mass for _, _, mass in plan], dtype=torch.float64)
        atoms = torch.from_numpy(np.array([pairs.pools[r].rows[at, 2:] for r, at, _ in plan]))
        losses = pairs.at(atoms, row)
        moved = distances(atoms, pairs.x[row], pairs.norm)
        lower = below(math.fsum((masses * losses).tolist()), upper, "worst-case loss")
        info = {
            **pairs.info,
            "cut": clock.out_of_time(),
            "order": self.order,
            "points": sum(pool.size for pool in pairs.pools),
        }
        paid = moved + torch.from_numpy(self.extra)[row]
        cost = transport_cost(masses, torch.ones_like(masses), paid, self.order)
        return WorstCase(
            Bound(lower, upper, "cells", None, info),
            lam,
            atoms,
            pairs.y[row],
            masses,
            row // self.size,
            cost,
            bool((moved >= FAR).any()),
        )
