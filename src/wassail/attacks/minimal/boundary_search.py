"""Linearise the boundary, aim between the nearest point of it and the clean sample, learn how far:
the round that our engine is named after.

The nearest misclassified point solves `min ||z - x||_r` over the box subject to `theta_j(z) >=
theta_y(z)` for some rival j. Around an iterate `x_k` a rival's boundary is the plane `<w, z> = <w,
x_k> - f`, with `f = (theta_j - theta_y)(x_k)` and `w` its gradient, and the shortest step to a
plane inside a box is known exactly for every norm (`plane_step`). Two such steps matter (Croce &
Hein 2020, FAB): `d1` from the iterate, which keeps to where the linearisation is true, and `d2`
from the clean sample, which is where the answer would be if it were true everywhere (HLRF of
structural reliability). We move to

    x_{k+1} = (1 - a)(base + eta d1) + a (x + eta d2),        base = x + beta (x_k - x) where x_k is
    a flip, else x_k.

FAB caps `a` at 0.1, lets it vanish near the boundary, and keeps `eta`; here each sample learns
both: a flip makes the next step bolder (`a` up, `eta` down), a miss makes it more careful and
pushes harder. One forward and one backward pass serve an iteration: flip test, linearisation and
the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.geometry import clip_, column, inner, plane_steps


def boundary_search(
    tracker: Tracker,
    rows: Tensor,
    start: Tensor,
    times: int,
    rivals: Tensor | None = None,
    beta: float = 0.85,
    eta: float = 1.05,
    aim: float | None = None,
) -> None:
    """`times` iterations from `start`, on one rival each `(m,)`, or on the strongest at the
    iterate. 1 F + 1 B each.

    aim: the norm whose steps are made; default None, that of the search.
    """
    aim = tracker.norm if aim is None else aim
    current = start
    bold = torch.full((len(rows),), 0.3, dtype=start.dtype, device=start.device)  # a
    push = torch.full_like(bold, eta - 1)  # by which share a step goes beyond its plane
    for k in range(times):
        keep = tracker.affordable(rows, 2)
        rivals = None if rivals is None else take(keep, rivals)[0]
        rows, current, bold, push = take(keep, rows, current, bold, push)
        if not rows.shape[0]:
            return
        part = tracker.part(rows)
        away = current - part.x
        tape, flip = tracker.tape(current, rows, away)
        rival = tape.strongest(part.y) if rivals is None else rivals
        w = tape.gradients(part.y, rival[:, None])[:, 0]
        f = tape.leads(part.y, rivals)
        hit = flip.to(away)
        if k:
            bold = (bold * (0.8 + 0.35 * hit)).clamp_(0.1, 0.5)
            push = (push * (1.5 - 0.7 * hit)).clamp_(max=1.0)
        # From x + beta (current - x) where the iterate is a flip, else from the iterate.
        back = 1 - (1 - beta) * hit
        ahead = inner(w, away)
        gap = ahead - f
        gaps = torch.stack([torch.addcmul(gap, back, ahead, value=-1), gap])
        d1, d2 = plane_steps(part.two_walls(away, back), w, gaps, aim)
        beyond = 1 + push
        far = bold * beyond
        near = torch.addcmul(part.x, away, column((1 - bold) * back, away))
        near.addcmul_(d1, column(beyond - far, away)).addcmul_(d2, column(far, away))
        current = clip_(near, part.domain)


def refine(tracker: Tracker, rows: Tensor, times: int) -> None:
    """Shorten the best flip, search on from it with small pushes, shorten again."""
    rows = rows[torch.isfinite(tracker.distance[rows]).nonzero()[:, 0]]
    tracker.shorten(rows, 3, 0.9)
    boundary_search(tracker, rows, tracker.points[rows], times, None, 0.95, 1.02)
    tracker.shorten(rows, 4, 0.96)
