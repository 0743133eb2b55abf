"""Climb the margin inside a ball that shrinks from far outside the best flip to below it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.minimal.polish import EUCLIDEAN, SLACK, climb, corner, falling, learned
from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.geometry import project, steepest, vector_norm

SHRINKS = 0.6  # share of the iterations in which the ball shrinks; the others polish


def shrinking_ball(
    tracker: Tracker,
    rows: Tensor,
    times: int,
    start: Tensor,
    *,
    wide: float = 2.0,
    length: float = 1.0,
    rivals: Tensor | None = None,
) -> None:
    """Climb the margin inside a ball that shrinks from `wide` times the best flip's to the best
    flip's, then polish on. 1 F + 1 B each.

    A climb inside a ball no larger than the best flip's ends at the nearest hill, which seldom
    flips. The wide ball leads deep into a rival's region first; as it shrinks, the point is drawn
    back through the thickest part of that region, and reaches other valleys than a search that
    stays inside or on the boundary. Steps have no momentum, and fall from `length` radii to a
    hundredth of it. In the last iterations the ball is smaller than the best flip's by a slack that
    each sample learns, as in `polish`.

    Args:
        tracker: the search.
        rows: samples `(m,)`; those without a flip are left out.
        times: iterations.
        start: points to begin with, `(m, *shape)`.
        wide: first radius, in distances of the best flip.
        length: first step, in radii.
        rivals: classes to climb to `(m,)`; default None, the strongest at each point.
    """
    known = torch.isfinite(tracker.distance[rows]).nonzero()[:, 0]
    rivals = None if rivals is None else rivals[known]
    rows, current = take(known, rows, start)
    slack = torch.full_like(tracker.distance[rows], SLACK)
    for k in range(times):
        keep = tracker.affordable(rows, 2)
        rivals = None if rivals is None else rivals[keep]
        rows, current, slack = take(keep, rows, current, slack)
        if not rows.shape[0]:
            return
        part = tracker.part(rows)
        best, points = take(rows, tracker.distance, tracker.points)
        left = 1 - k / (SHRINKS * times)
        share = wide**left if left > 0 else 1 - slack
        radius = share * best
        current = project(current, part.x, tracker.norm, radius, part.domain)
        tape, flip = tracker.tape(current, rows)
        if left <= 0:
            slack = learned(slack, flip, tracker.norm)
        w = climb(tracker, tape, rows, rivals)
        fall = falling(length, k, times)
        if k < (1 - EUCLIDEAN[tracker.norm]) * times:
            move = steepest(current, w, tracker.norm, fall * radius, part.domain)
        else:  # Euclidean: as far as the corners of an linf ball, or as the best flip
            inside = tracker.norm == math.inf
            far = corner(radius, part.x) if inside else vector_norm(points - part.x, 2.0) * share
            move = steepest(current, w, 2.0, fall * far, part.domain)
        current = current + move
