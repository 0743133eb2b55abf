"""Climb the margin inside a ball that shrinks from far outside the best flip to below it: a round
of `chase`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.attacks.squeeze import LEAST_SLACK, MOST_SLACK, SLACK, STRAIGHT, climb
from wassail.device import take
from wassail.geometry import project, steepest, vector_norm

SHRINKS = 0.6  # share of the iterations in which the ball shrinks; the others squeeze


def anneal(
    hunt: Hunt,
    rows: Tensor,
    times: int,
    start: Tensor,
    *,
    wide: float = 2.0,
    length: float = 1.0,
    rivals: Tensor | None = None,
) -> None:
    """Climb the margin inside a ball that shrinks from `wide` times the best flip's to the best
    flip's, then squeeze on. 1 F + 1 B each.

    A climb inside a ball no larger than the best flip's ends at the nearest hill, which seldom
    flips. The wide ball leads deep into a rival's region first; as it shrinks, the point is drawn
    back through the thickest part of that region, and reaches other valleys than a search that
    stays inside or on the boundary. Steps have no momentum, and fall from `length` radii to a
    hundredth of it. In the last iterations the ball is smaller than the best flip's by a slack that
    each sample learns, as in `squeeze`.

    Args:
        hunt: the search.
        rows: samples `(m,)`; those without a flip are left out.
        times: iterations.
        start: points to begin with, `(m, *shape)`.
        wide: first radius, in distances of the best flip.
        length: first step, in radii.
        rivals: classes to climb to `(m,)`; default None, the strongest at each point.
    """
    known = torch.isfinite(hunt.distance[rows]).nonzero()[:, 0]
    rivals = None if rivals is None else rivals[known]
    rows, current = take(known, rows, start)
    slack = torch.full_like(hunt.distance[rows], SLACK)
    for k in range(times):
        keep = hunt.able(rows, 2)
        rivals = None if rivals is None else rivals[keep]
        rows, current, slack = take(keep, rows, current, slack)
        if not rows.shape[0]:
            return
        x = hunt.part(rows).x
        best, points = take(rows, hunt.distance, hunt.points)
        left = 1 - k / (SHRINKS * times)
        share = wide**left if left > 0 else 1 - slack
        radius = share * best
        current = project(current, x, hunt.norm, radius, hunt.box(rows))
        tape, flip = hunt.tape(current, rows)
        if left <= 0:
            wider = (1.5 * slack).clamp(max=MOST_SLACK)
            slack = torch.where(flip, wider, (0.5 * slack).clamp(min=LEAST_SLACK))
        w = climb(hunt, tape, rows, None, rivals)
        fall = length * (0.01 + 0.99 * (1 + math.cos(math.pi * k / times)) / 2)
        if k < (1 - STRAIGHT[hunt.norm]) * times:
            move = steepest(current, w, hunt.norm, fall * radius, hunt.box(rows))
        else:  # Euclidean: as far as the corners of an linf ball, or as the best flip
            far = vector_norm(points - x, 2.0) * share
            if hunt.norm == math.inf:
                far = radius * math.sqrt(max(x[:1].numel(), 1))
            move = steepest(current, w, 2.0, fall * far, hunt.box(rows))
        current = current + move
