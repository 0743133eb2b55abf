"""The exact distance of each sample on small ReLU networks, as a rung of the ladder: it asks for no
radius, and ends with the distance itself or with what was proved when its budget was spent.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.radius_search import RadiusSearch
from wassail.certificates.prove.record import PUSHES
from wassail.certificates.search.frontier import Pool
from wassail.geometry import clip, column
from wassail.losses import predict

# Unstable neurons in the ball up to which "auto" does so: beyond them a search hardly ever ends.
EXACT_UP_TO_UNSTABLE = 64
# The ball of an exact search in executed arithmetic: how far beyond what is proved, and how often
# it may grow.
WIDER = 4.0
GROWTHS = 8


def decided_exactly(problem: Problem, radius: Tensor, work: float) -> tuple[Tensor, Tensor]:
    """Which samples an exact search proves at their radii, bool `(N,)`, and the operations that it
    took for each.

    Args:
        problem: of a small network.
        radius: float64 `(N,)`, on the CPU.
        work: operations that each sample may take.
    """
    proved = torch.zeros(len(problem), dtype=torch.bool)
    spent = torch.zeros(len(problem), dtype=torch.float64)
    for i in range(len(problem)):
        one = problem.take(torch.tensor([i]))
        within = float(radius[i])
        with clock.limited(None, work), suppress(clock.Late):
            before = clock.work_left()
            graph, columns = one.alone()
            slack = _of_columns(one.slack(radius[i : i + 1]), columns)
            where = (graph, one.x, one.y, one.norm, one.domain)
            found = nearest_flip(*where, slack=slack, within=within)
            proved[i] = bool(found.lower[0] >= within)
            if before < math.inf:
                spent[i] = before - clock.work_left()
    return proved, spent


def search_exactly(search: RadiusSearch, rows: Tensor, work: float, pool: Pool | None) -> None:
    """The exact distances of some samples of a search, one after the other; what is proved when a
    budget is spent is kept.

    Args:
        search: with what is proved of them.
        rows: places of the samples `(M,)`, on the CPU.
        work: operations that each may take.
        pool: shares the nodes of one sample.
    """
    if search.points is None:
        search.points = search.problem.x.double().cpu().clone()  # never the caller's own tensor
    for done, i in enumerate(rows.tolist()):
        search.report(done / len(rows))
        with clock.limited(clock.seconds_left() / (len(rows) - done), work):
            before = clock.work_left()
            with suppress(clock.Late):
                _search_one(search, i, pool)
            search.cut |= clock.out_of_time()
            if before < math.inf:
                search.work[i] += before - clock.work_left()


def _search_one(search: RadiusSearch, i: int, pool: Pool | None) -> None:
    """The distance of one sample.

    In executed arithmetic it is where exact margins meet the bound on the rounding error, which
    holds for one ball only. That is a few times what is proved, so that it holds the distance,
    and larger where it does not.
    """
    assert search.points is not None
    rows = torch.tensor([i])
    one = search.problem.take(rows)
    graph, columns = one.alone()
    where = (graph, one.x, one.y, one.norm, one.domain)
    flip = search.flip[rows]
    if one.graph.arithmetic == "exact":
        known = search.lower[rows]
        found = nearest_flip(*where, upper=flip, lower=known, workers=pool)
        search.lower[rows] = torch.maximum(known, found.lower)
        search.exact[rows] = found.exact
        search.points[rows] = found.points
        return
    whole = 1.01 * search.problem.farthest[rows]
    ball = WIDER * torch.maximum(search.lower, 1e-3 * search.first)[rows]
    ball = torch.minimum(torch.minimum(ball, whole), flip * (1 + 1e-6)).clamp(min=1e-300)
    for _ in range(GROWTHS):
        slack = _of_columns(one.slack(ball), columns)
        found = nearest_flip(*where, upper=flip, slack=slack, workers=pool)
        all_ = (ball >= whole) & (found.lower == math.inf)
        proved = torch.where(all_, math.inf, torch.minimum(found.lower, ball))
        search.lower[rows] = torch.maximum(search.lower[rows], proved)
        inside = found.upper < ball
        points, near = _flipped(one, found.points)
        search.exact[rows] = all_ | (inside & found.exact & near)
        kept = torch.where(column(inside & near, points), points, one.x.cpu().double())
        search.points[rows] = kept
        out = (found.lower >= ball) & ~all_ & (ball < torch.minimum(whole, flip))
        if not bool(out):
            return
        ball = torch.minimum(WIDER * ball, whole)


def _of_columns(values: Tensor | None, columns: Tensor) -> Tensor | None:
    """What belongs to the outputs that matter."""
    return None if values is None else values[:, columns]


def _flipped(problem: Problem, points: Tensor) -> tuple[Tensor, Tensor]:
    """Points moved outward until the exact network flips, and whether that took at most the last
    of `PUSHES`.
    """
    x = problem.x.cpu().double()
    best = points
    known = torch.zeros(len(x), dtype=torch.bool)
    for push in PUSHES:
        moved = x + (1 + push) * (points - x)
        moved = clip(moved, problem.domain)
        logits = problem.outputs(moved.to(problem.x.device)).cpu()
        wrong = predict(logits, problem.labels) != problem.labels
        best = torch.where(column(wrong & ~known, moved), moved, best)
        known = known | wrong
    return best, known
