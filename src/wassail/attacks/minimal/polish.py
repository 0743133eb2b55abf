"""Climb the margin inside a ball that is smaller than the best flip's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.geometry import euclidean_step, project, room, steepest, vector_norm
from wassail.network import Tape
from wassail.threat import Domain

# By which share the ball of a polish is smaller than the best flip's: at first, at most, at least.
# At l1 steps overshoot, and flips are often several times too far.
SLACK = 0.05
MOST_SLACK = {1.0: 0.3, 2.0: 0.2, math.inf: 0.2}
LEAST_SLACK = 0.001
# Which share of the iterations, the last ones, takes Euclidean steps.
EUCLIDEAN = {1.0: 1.0, 2.0: 0.0, math.inf: 0.5}
# A sparse step moves this share of as many coordinates as the best flip changes, and at most some.
SPARSE = 1 / 3
MOST_COORDINATES = 64
MOMENTUM = 0.75


def climb(tracker: Tracker, tape: Tape, rows: Tensor, rivals: Tensor | None = None) -> Tensor:
    """The gradient of the margin, `max_{j != y} theta_j - theta_y`, or of `theta_j - theta_y` for
    rivals j `(m,)`, at a tape on these rows: `(m, *shape)`. 1 B each.
    """
    y = tracker.part(rows).y
    rival = tape.strongest(y) if rivals is None else rivals
    return tape.gradients(y, rival[:, None])[:, 0]


def learned(slack: Tensor, flip: Tensor, norm: float) -> Tensor:
    """The slack `(m,)` after a look: larger by half at a flip, bool `(m,)`, else half."""
    wider = (1.5 * slack).clamp(max=MOST_SLACK[norm])
    closer = (0.5 * slack).clamp(min=LEAST_SLACK)
    return torch.where(flip, wider, closer)


def falling(length: float, k: int, times: int) -> float:
    """The k-th of `times` step sizes, from `length` to a hundredth of it along half a cosine."""
    return length * (0.01 + 0.99 * (1 + math.cos(math.pi * k / times)) / 2)


def corner(radius: Tensor, x: Tensor) -> Tensor:
    """How far the corners of linf balls are in l2, `(m,)`."""
    return radius * math.sqrt(max(x.shape[1:].numel(), 1))


def polish(
    tracker: Tracker,
    rows: Tensor,
    times: int,
    slack: Tensor,
    *,
    start: Tensor | None = None,
    rivals: Tensor | None = None,
    euclidean: float | None = None,
    length: float = 0.3,
    sparse: bool = False,
) -> None:
    """Climb the margin inside a ball smaller than the best flip's; each flip makes the ball
    smaller. 1 F + 1 B each.

    The other way to look at the same problem (FMN, Pintor et al. 2021; bisected APGD): steps of the
    dual maximiser with momentum, exact projections, and a step size that falls from `length` to a
    hundredth of it, in units of the radius. Euclidean steps spread over more coordinates than those
    of l1, and leave weak coordinates inside the ball of linf. Each sample learns how much smaller
    the ball may be. So a flip that is far beyond the boundary comes back in a few steps, and one at
    the boundary is not lost.

    Args:
        tracker: the search.
        rows: samples `(m,)`; those without a flip are left out.
        times: iterations.
        slack: by which share the ball is smaller, one for every sample of the tracker, updated.
        start: points to begin with, `(m, *shape)`; default None, the best flips.
        rivals: classes to climb to `(m,)`; default None, the strongest at each point.
        euclidean: share of the iterations, at the end, with Euclidean steps; default None,
            `EUCLIDEAN` of the norm.
        length: first step, in radii.
        sparse: steps that move a few coordinates by the same amount, as those of APGD for l1
            (Croce & Hein 2021); default False.
    """
    straight = EUCLIDEAN[tracker.norm] if euclidean is None else euclidean
    current = tracker.points[rows] if start is None else start
    known = torch.isfinite(tracker.distance[rows]).nonzero()[:, 0]
    rivals = None if rivals is None else rivals[known]
    rows, current = take(known, rows, current)
    velocity = torch.zeros_like(current)
    for k in range(times):
        keep = tracker.affordable(rows, 2)
        rivals = None if rivals is None else rivals[keep]
        rows, current, velocity = take(keep, rows, current, velocity)
        if not rows.shape[0]:
            return
        part = tracker.part(rows)
        best, bound = take(rows, tracker.distance, slack)
        radius = (1 - bound) * best
        current = project(current, part.x, tracker.norm, radius, part.domain)
        tape, flip = tracker.tape(current, rows)
        slack.index_copy_(0, rows, learned(bound, flip, tracker.norm))
        w = climb(tracker, tape, rows, rivals)
        share = falling(length, k, times)
        if sparse:
            move = _sparse_step(tracker, rows, current, w, share * radius)
        elif k >= (1 - straight) * times:
            size = share * _euclidean(tracker, rows, radius)
            if tracker.norm == math.inf:  # as long as the corners: most coordinates meet walls
                move = steepest(current, w, 2.0, size, part.domain)
            else:
                move = euclidean_step(current, w, size, part.domain)
        else:
            move = steepest(current, w, tracker.norm, share * radius, part.domain)
        velocity = velocity.mul_(MOMENTUM).add_(move) if k else move
        current = current + velocity


def _sparse_step(
    tracker: Tracker, rows: Tensor, current: Tensor, w: Tensor, size: Tensor
) -> Tensor:
    """A step of l1 length `size` `(m,)` along the largest entries of `w` that have room, the same
    for each of them: shape of `current`. The best flip says how many.
    """
    part = tracker.part(rows)
    (points,) = take(rows, tracker.points)
    count = SPARSE * (points - part.x).abs().sign_().flatten(1).sum(1)
    return _along_largest(current, w, size, count, part.domain)


def _along_largest(x: Tensor, w: Tensor, size: Tensor, count: Tensor, domain: Domain) -> Tensor:
    """A step of l1 length `size` `(m,)` along the `count` `(m,)` largest entries of `w` that have
    room, the same for each of them: shape of `x`.
    """
    free = (w.abs() * room(x, w, domain).sign_()).flatten(1)
    top, where = free.topk(min(MOST_COORDINATES, free.shape[1]), dim=1)
    rank = torch.arange(top.shape[1], device=top.device)
    chosen = ((rank < count.clamp(min=1)[:, None]) & (top > 0)).to(top)
    each = chosen * (size / chosen.sum(1).clamp(min=1))[:, None]
    return torch.zeros_like(free).scatter(1, where, each).reshape(x.shape).mul_(w.sign())


def _euclidean(tracker: Tracker, rows: Tensor, radius: Tensor) -> Tensor:
    """The radius in units of l2, `(m,)`: how far the corners of an linf ball are, how far the best
    flip is in l1.
    """
    x = tracker.part(rows).x
    if tracker.norm == math.inf:
        return corner(radius, x)
    (points,) = take(rows, tracker.points)
    return vector_norm(points - x, 2.0)
