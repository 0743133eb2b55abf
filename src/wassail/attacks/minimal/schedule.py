"""Our own engine: which round follows which.

Rivals are ordered by the exact length of their first step from the clean sample, not by their
logits. On a linear classifier that first step is the answer: one forward pass and K - 1 gradients.
Then the opening, and rounds that each start somewhere else. The schedule never looks at the budget:
a smaller one only cuts it short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.attacks.minimal.boundary_search import boundary_search, refine
from wassail.attacks.minimal.first_steps import RIVALS, FirstSteps
from wassail.attacks.minimal.gradient_free import gradient_free
from wassail.attacks.minimal.opening import opening
from wassail.attacks.minimal.polish import SLACK, polish
from wassail.attacks.minimal.primal_dual import primal_dual
from wassail.attacks.minimal.restarts import beyond_rival, more_rivals, near_best, rivals_at_flip
from wassail.attacks.minimal.shrinking_ball import shrinking_ball
from wassail.attacks.minimal.tracker import Tracker
from wassail.progress import Tick

# The rounds after the opening, by name, and what is repeated after them:
# docs/lab-notes/nearest-built.md says how they were chosen.
PLAN = {
    1.0: (
        *("primal-dual", "shrinking ball", "polish", "from random", "primal-dual"),
        *("shrinking ball", "sparse", "from sample", "shrinking ball", "from random"),
        *("from half-way", "other rivals"),
    ),
    2.0: (
        *("shrinking ball", "shrinking ball", "from beyond", "shrinking ball", "polish"),
        *("shrinking ball", "from beyond", "other rivals"),
    ),
    math.inf: (
        *("euclidean", "rivals at flip", "shrinking ball", "from sample", "shrinking ball"),
        *("from random", "from sample", "other rivals", "from half-way"),
    ),
}
LATER = {
    1.0: (
        *("shrinking ball", "sparse", "from random", "primal-dual", "shrinking ball"),
        "from half-way",
    ),
    2.0: (
        *("shrinking ball", "from half-way", "shrinking ball", "from beyond", "shrinking ball"),
        "from random",
    ),
    math.inf: (
        *("euclidean", "shrinking ball", "from random", "from sample", "from half-way"),
        "shrinking ball",
    ),
}
# First radius, in distances of the best flip, and first step, in radii, of the shrinking balls.
BALLS = {
    1.0: ((2.0, 1.0), (2.0, 2.0), (3.0, 1.0)),
    2.0: ((2.0, 1.0), (2.0, 2.0), (3.0, 1.0)),
    math.inf: ((1.3, 1.0),),
}
LOGIT_SIZES = (10.0, 30.0, 3.0)  # what the logits are scaled to in the primal-dual rounds


@dataclass(frozen=True)
class Turn:
    """Which round it is.

    Args:
        name: in `ROUNDS`.
        before: how many rounds of this name came before.
        number: its place in the schedule; keys random starts.
        seed: keys them, too, together with each sample.
    """

    name: str
    before: int
    number: int
    seed: int


def boundary_search_engine(
    tracker: Tracker,
    tick: Tick,
    *,
    rounds: int = 4,
    seed: int = 0,
    begin: int = -1,
    topk: int = RIVALS,
) -> None:
    """Look for the nearest flip by rounds; every round adds to what is known, so more passes never
    hurt.

    Samples whose gradient is zero, or that have no flip after the opening, are searched without
    gradients, too.

    Args:
        tracker: the search.
        tick: takes the share that is done.
        rounds: rounds at most, the opening included.
        seed: keys random starts, together with each sample.
        begin: round to go on with, for a tracker that has flips of its own; negative: the opening
            comes first.
        topk: rivals whose gradient is taken at the sample, those with the largest logits; K - 1
            makes linear classifiers exact.
    """
    tracker.anytime = True
    first = FirstSteps.of(tracker, topk)
    rows = first.rows
    if not len(rows):
        return
    if begin < 0:
        opening(first, seed)
    for number in range(max(begin, 0), rounds - 1):
        if not len(tracker.affordable(rows, 1)):
            return
        tick(number / rounds)
        if len(first.flat):
            gradient_free(tracker, rows[first.flat], 60, seed, 103 + number)
        if number == 2:
            more_rivals(first, seed)
        name, before = scheduled(tracker.norm, number)
        run_round(first, Turn(name, before, number, seed))


def scheduled(norm: float, number: int) -> tuple[str, int]:
    """The round of this number, by name, and how many of that name come before it."""
    plan = PLAN[norm]
    while len(plan) <= number:
        plan = plan + LATER[norm]
    return plan[number], plan[:number].count(plan[number])


def run_round(first: FirstSteps, turn: Turn) -> None:
    """One round of the schedule."""
    ROUNDS[turn.name](first, turn)


def _polish(first: FirstSteps, turn: Turn) -> None:
    polish(first.tracker, first.rows, 40, first.slack)


def _euclidean(first: FirstSteps, turn: Turn) -> None:
    polish(first.tracker, first.rows, 40, first.slack, euclidean=1.0, length=1.0)


def _sparse(first: FirstSteps, turn: Turn) -> None:
    polish(first.tracker, first.rows, 40, _fresh_slack(first), length=1.0, sparse=True)


def _from_sample(first: FirstSteps, turn: Turn) -> None:
    """A polish to the strongest rival, later to the second one, the third, ..."""
    tracker, rows = first.tracker, first.rows
    rivals = first.ranked(turn.before) if turn.before else None
    polish(tracker, rows, 40, _fresh_slack(first), start=tracker.x[rows], rivals=rivals)


def _from_random(first: FirstSteps, turn: Turn) -> None:
    start = near_best(first.tracker, first.rows, turn.seed, turn.number)
    polish(first.tracker, first.rows, 40, _fresh_slack(first), start=start)


def _from_half_way(first: FirstSteps, turn: Turn) -> None:
    tracker, rows = first.tracker, first.rows
    start = (tracker.points[rows] + tracker.x[rows]) / 2
    polish(tracker, rows, 40, _fresh_slack(first), start=start)


def _fresh_slack(first: FirstSteps) -> Tensor:
    return torch.full_like(first.slack, SLACK)


def _shrinking_ball(first: FirstSteps, turn: Turn) -> None:
    """From a random point near the best flip; in turn with it from the sample to the next rival."""
    tracker, rows = first.tracker, first.rows
    odd = turn.before % 2 == 1
    start = tracker.x[rows] if odd else near_best(tracker, rows, turn.seed, turn.number)
    rivals = first.ranked((turn.before + 1) // 2) if odd else None
    settings = BALLS[tracker.norm]
    wide, length = settings[turn.before % len(settings)]
    shrinking_ball(tracker, rows, 40, start, wide=wide, length=length, rivals=rivals)


def _primal_dual(first: FirstSteps, turn: Turn) -> None:
    size = LOGIT_SIZES[turn.before % len(LOGIT_SIZES)]
    primal_dual(first.tracker, first.rows, 80, size)
    first.tracker.shorten(first.rows, 4)


def _from_beyond(first: FirstSteps, turn: Turn) -> None:
    beyond_rival(first, turn.before)
    refine(first.tracker, first.rows, 6)


def _rivals_at_flip(first: FirstSteps, turn: Turn) -> None:
    rivals_at_flip(first)


def _other_rivals(first: FirstSteps, turn: Turn) -> None:
    tracker, rows, rivals = first.tracker, first.rows, first.rivals
    for rank in range(2, rivals.shape[1]):
        boundary_search(tracker, rows, first.toward(rank, 1.02), 10, rivals[:, rank])
    refine(tracker, rows, 6)


Round: TypeAlias = Callable[[FirstSteps, Turn], None]
ROUNDS: dict[str, Round] = {
    "polish": _polish,
    "euclidean": _euclidean,
    "sparse": _sparse,
    "from sample": _from_sample,
    "from random": _from_random,
    "from half-way": _from_half_way,
    "shrinking ball": _shrinking_ball,
    "primal-dual": _primal_dual,
    "from beyond": _from_beyond,
    "rivals at flip": _rivals_at_flip,
    "other rivals": _other_rivals,
}
