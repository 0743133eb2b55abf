"""A budget met exactly by two plans, where what a plan wins is linear and the budget one number.

Let `at(lam)` be a plan that maximises `won - lam cost`. It is a line `won + lam (1 - cost)` above
which the dual function lies nowhere and which it touches at lam. Left of the best multiplier plans
cost more than the budget, right of it less; a mixture of the two beside it that costs the budget is
the best plan of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from wassail.rounding import UNIT

Plan = TypeVar("Plan")
MOST_STEPS = 200  # of the search for the best multiplier


@dataclass(frozen=True)
class Line(Generic[Plan]):
    """A plan, what it wins, and what it costs in units of the budget."""

    won: float
    cost: float
    plan: Plan

    def value(self, multiplier: float) -> float:
        """Its line at a multiplier."""
        return self.won + multiplier * (1 - self.cost) if multiplier else self.won


@dataclass(frozen=True)
class Mixture(Generic[Plan]):
    """Two plans, the share of the first, and the multiplier where their lines meet."""

    first: Line[Plan]
    second: Line[Plan]
    share: float
    multiplier: float

    @property
    def won(self) -> float:
        """What both win together."""
        if self.share == 1:
            return self.first.won
        return self.share * self.first.won + (1 - self.share) * self.second.won

    @property
    def parts(self) -> list[tuple[float, Plan]]:
        """The plans and their shares."""
        return [(self.share, self.first.plan), (1 - self.share, self.second.plan)]


def mixture(at: Callable[[float], Line[Plan]], end: float) -> Mixture[Plan]:
    """The best mixture of two plans that costs no more than the budget.

    The lines of two plans meet nearer to the best multiplier, until the dual function is on both of
    them; every fourth step halves the exponent, so that none is slow.

    Args:
        at: a plan that maximises `won - lam cost`.
        end: a multiplier whose plan costs no more than the budget.
    """
    ends = [0.0, end]
    pair = [at(0.0), at(end)]
    if pair[0].cost <= 1 or end == 0:
        return Mixture(pair[0], pair[0], 1.0, 0.0)
    for step in range(MOST_STEPS):
        gap = pair[0].cost - pair[1].cost
        halving = step % 4 == 3 or not math.isfinite(gap)
        if halving:
            middle = math.sqrt(ends[1]) * math.sqrt(max(ends[0], 1e-12 * ends[1]))
        else:
            middle = (pair[0].won - pair[1].won) / gap
        if not ends[0] < middle < ends[1]:
            break
        new = at(middle)
        known = max(line.value(middle) for line in pair)
        size = max(abs(line.won) + middle * line.cost for line in (*pair, new))
        if not halving and new.value(middle) <= known + 2 * UNIT * size:
            break
        side = 0 if new.cost > 1 else 1
        ends[side] = middle
        pair[side] = new
    gap = pair[0].cost - pair[1].cost
    share = 0.0
    multiplier = ends[1]
    if math.isfinite(gap) and gap > 0:
        share = min(max((1 - pair[1].cost) / gap, 0.0), 1.0)
        multiplier = max((pair[0].won - pair[1].won) / gap, 0.0)
    return Mixture(pair[0], pair[1], share, multiplier)
