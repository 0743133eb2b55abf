"""Climb the margin inside a ball that is smaller than the best flip's: a round of `chase`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.device import take
from wassail.geometry import project, room, steepest, vector_norm
from wassail.network import Tape
from wassail.threat import Domain

# By which share the ball of a squeeze is smaller than the best flip's: at first, at most, at least.
SLACK = 0.05
MOST_SLACK = 0.2
LEAST_SLACK = 0.001
# Which share of the iterations, the last ones, takes Euclidean steps.
STRAIGHT = {1.0: 1.0, 2.0: 0.0, math.inf: 0.5}
# A sparse step moves this share of as many coordinates as the best flip changes, and at most some.
SPARSE = 1 / 3
MOST_COORDINATES = 64


def climb(
    hunt: Hunt, tape: Tape, rows: Tensor, keep: Tensor | None, rivals: Tensor | None = None
) -> Tensor:
    """The gradient of the margin, `max_{j != y} theta_j - theta_y`, or of `theta_j - theta_y` for
    rivals j `(k,)`, at the places `keep` `(k,)` of a tape on these rows, None for all of them:
    `(k, *shape)`. 1 B each.
    """
    y = hunt.part(rows).y
    rival = tape.strongest(y)
    if keep is not None:
        y, rival = take(keep, y, rival)
    rival = rival if rivals is None else rivals
    return tape.gradients(y, rival[:, None], keep)[:, 0]


def squeeze(
    hunt: Hunt,
    rows: Tensor,
    times: int,
    slack: Tensor,
    *,
    start: Tensor | None = None,
    rivals: Tensor | None = None,
    straight: float | None = None,
    length: float = 0.3,
    sparse: bool = False,
) -> None:
    """Climb the margin inside a ball smaller than the best flip's; each flip makes the ball
    smaller. 1 F + 1 B each.

    The other way to look at the same problem (FMN, Pintor et al. 2021; bisected APGD): steps of the
    dual maximiser with momentum, exact projections, and a step size that falls from `length` to a
    hundredth of it, in units of the radius. Euclidean steps spread over more coordinates than those
    of l1, and leave weak coordinates inside the ball of linf.

    Each sample learns how much smaller the ball may be: a flip makes its slack grow by half, a miss
    halves it. So a flip that is far beyond the boundary comes back in a few steps, and one at the
    boundary is not lost.

    Args:
        hunt: the search.
        rows: samples `(m,)`; those without a flip are left out.
        times: iterations.
        slack: by which share the ball is smaller, one for every sample of the hunt, updated.
        start: points to begin with, `(m, *shape)`; default None, the best flips.
        rivals: classes to climb to `(m,)`; default None, the strongest at each point.
        straight: share of the iterations, at the end, with Euclidean steps; default None,
            `STRAIGHT` of the norm.
        length: first step, in radii.
        sparse: steps that move a few coordinates by the same amount, as those of APGD for l1
            (Croce & Hein 2021); default False.
    """
    straight = STRAIGHT[hunt.norm] if straight is None else straight
    current = hunt.points[rows] if start is None else start
    known = torch.isfinite(hunt.distance[rows]).nonzero()[:, 0]
    rivals = None if rivals is None else rivals[known]
    rows, current = take(known, rows, current)
    velocity = torch.zeros_like(current)
    for k in range(times):
        keep = hunt.able(rows, 2)
        rivals = None if rivals is None else rivals[keep]
        rows, current, velocity = take(keep, rows, current, velocity)
        if not rows.shape[0]:
            return
        x = hunt.part(rows).x
        known_at, bound = take(rows, hunt.distance, slack)
        radius = (1 - bound) * known_at
        current = project(current, x, hunt.norm, radius, hunt.box(rows))
        tape, flip = hunt.tape(current, rows)
        wider = (1.5 * bound).clamp(max=MOST_SLACK)
        closer = (0.5 * bound).clamp(min=LEAST_SLACK)
        slack.index_copy_(0, rows, torch.where(flip, wider, closer))
        w = climb(hunt, tape, rows, None, rivals)
        share = length * (0.01 + 0.99 * (1 + math.cos(math.pi * k / times)) / 2)
        if sparse:
            (points,) = take(rows, hunt.points)
            count = SPARSE * (points - x).abs().sign_().flatten(1).sum(1)
            move = _sparse_step(current, w, share * radius, count, hunt.box(rows))
        elif k >= (1 - straight) * times:
            size = share * _euclidean(hunt, rows, radius)
            move = steepest(current, w, 2.0, size, hunt.box(rows))
        else:
            move = steepest(current, w, hunt.norm, share * radius, hunt.box(rows))
        velocity = velocity.mul_(0.75).add_(move) if k else move
        current = current + velocity


def _sparse_step(x: Tensor, w: Tensor, size: Tensor, count: Tensor, domain: Domain) -> Tensor:
    """A step of l1 length `size` `(m,)` along the `count` `(m,)` largest entries of `w` that have
    room, the same for each of them: shape of `x`.
    """
    free = (w.abs() * room(x, w, domain).sign_()).flatten(1)
    top, where = free.topk(min(MOST_COORDINATES, free.shape[1]), dim=1)
    rank = torch.arange(top.shape[1], device=top.device)
    chosen = ((rank < count.clamp(min=1)[:, None]) & (top > 0)).to(top)
    each = chosen * (size / chosen.sum(1).clamp(min=1))[:, None]
    return torch.zeros_like(free).scatter(1, where, each).reshape(x.shape).mul_(w.sign())


def _euclidean(hunt: Hunt, rows: Tensor, radius: Tensor) -> Tensor:
    """The radius in units of l2, `(m,)`: how far the corners of an linf ball are, how far the best
    flip is in l1.
    """
    if hunt.norm == math.inf:
        return radius * math.sqrt(max(hunt.x[:1].numel(), 1))
    (points,) = take(rows, hunt.points)
    return vector_norm(points - hunt.part(rows).x, 2.0)
