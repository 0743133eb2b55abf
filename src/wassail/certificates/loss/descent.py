"""Cutting planes in the multiplier of the one-dimensional dual (THEORY 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from wassail.certificates.exact.programs import LIFT
from wassail.certificates.loss.penalty import Plan
from wassail.certificates.loss.problem import Problem

Best: TypeAlias = Callable[[], tuple[Plan, float, float]]
Dual: TypeAlias = Callable[[float, float], float]


def descend(
    problem: Problem,
    sides: tuple[Best, Dual],
    budget: tuple[float, float],
    start: tuple[float, float],
    tolerance: float,
) -> tuple[float, float, Plan]:
    """The least upper bound that multipliers give, the multiplier behind it, and a distribution.

    Args:
        problem: the samples, their cells and what is known of them.
        sides: the best distribution on the points that are known, with its loss and multiplier;
            and the dual at a multiplier, to a tolerance, without `lam eps^p`.
        budget: eps and the order p.
        start: an upper bound that is known, and its multiplier.
        tolerance: of the bracket, relative to the bound or to 1.
    """
    best, dual = sides
    eps, p = budget
    upper, behind = start
    if p == 1 and problem.unbounded:
        problem.add_far_points()
    # No certificates below the slope at infinity if p = 1, and in a box none below rounding: that
    # costs next to nothing there.
    flat = problem.flattest if p == 1 or not problem.unbounded else 0.0
    floor = max(1e-13 * problem.steepest, flat) * eps ** (1 - p)
    lam = floor if p == 1 else problem.steepest * eps ** (1 - p) / p
    tried = [lam]
    gap = math.inf
    widest = 2 * tolerance
    plan, low, _ = best()
    while True:
        goal = tolerance * max(1.0, abs(upper))
        # no finer than the bracket has use for
        fine = max(goal, (upper - low) / 2) / 4
        value = (1 + 2 * LIFT) * lam * eps**p + dual(lam, fine)
        if value < upper:
            upper = value
            behind = (1 + 2 * LIFT) * lam
        plan, low, lam = best()
        gap, before = upper - low, gap
        if goal < gap < math.inf:
            widest = max(widest, gap)
            problem.tell(0.25 + 0.75 * math.log(widest / gap) / math.log(widest / goal))
        if gap <= goal or problem.late():
            return upper, behind, plan
        # the points known do not use up the budget: look farther out
        if lam == 0 and p > 1 and problem.unbounded:
            lam = min(tried) / 4
        lam = max(lam, floor)
        if gap > 0.9 * before and any(math.isclose(lam, other, rel_tol=1e-13) for other in tried):
            return upper, behind, plan
        tried.append(lam)
