"""FMN, the fast minimum-norm attack (Pintor et al., NeurIPS 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.attacks.deepfool import gaps
from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.geometry import maximiser, project, vector_norm
from wassail.losses import strongest_rival
from wassail.progress import Tick
from wassail.threat import dual

BISECTIONS = 10


def fmn_engine(
    tracker: Tracker,
    tick: Tick,
    *,
    steps: int = 100,
    alpha: float | None = None,
    gamma: float = 0.05,
) -> None:
    """Ascend the margin inside a ball around the sample whose radius adapts to the boundary.

        radius <- min((1 - c) radius, nearest flip)   at a flip,
                  (1 + c) radius                      elsewhere, once there is a flip,
                  ||x_k - x||_r + gap / ||g||_s       before: where the linearised margin vanishes,
        x_{k+1} = argmin { ||z - (x_k + a g / ||g||_2)||_2 : ||z - x||_r <= radius, z in the box },

    with `g` the gradient of the margin `max_{j != y} theta_j - theta_y` at `x_k`, the step `a` on a
    cosine from alpha to alpha / 100 and `c` on one from gamma to 0.001. alpha: by default 1 for l1
    and l2, 10 for linf. The projection is exact, on the ball and the box at once. Where passes are
    limited the schedule is shortened to fit them.

    Passes: the clean one, then for each step 1 backward and 1 forward; 10 forward to shorten.
    """
    first = (10.0 if tracker.norm == math.inf else 1.0) if alpha is None else alpha
    steps = fitting(tracker, steps)
    norm = tracker.norm

    def move(k: int, look: Look) -> tuple[Tensor, Tensor]:
        best = tracker.distance[look.rows]
        slope = vector_norm(look.gradient, dual(norm))
        ahead = look.gap(tracker) / torch.where(slope > 0, slope, 1)
        c = cosine(gamma, 0.001, k, steps)
        before = vector_norm(look.point - look.x, norm) + ahead
        outward = torch.where(torch.isfinite(best), (1 + c) * look.radius, before)
        inward = torch.minimum((1 - c) * look.radius, best)
        radius = torch.where(look.flipped, inward, outward)
        climbed = look.point + cosine(first, first / 100, k, steps) * maximiser(look.gradient, 2)
        return radius, project(climbed, look.x, norm, radius, tracker.box(look.rows))

    adapt_radius(tracker, tick, steps, move)


@dataclass(frozen=True)
class Look:
    """What an iteration knows of n samples.

    rows `(n,)`, x `(n, *shape)`; point: the iterate, with logits z `(n, K)`, the strongest rival
    `(n, 1)` and the gradient of its margin; radius `(n,)`; flipped: whether the point is a flip.
    """

    rows: Tensor
    x: Tensor
    point: Tensor
    z: Tensor
    rival: Tensor
    gradient: Tensor
    radius: Tensor
    flipped: Tensor

    def gap(self, tracker: Tracker) -> Tensor:
        """By how much the margin has to rise for a flip, `(n,)`."""
        return gaps(tracker, self.z, self.rows, self.rival)[:, 0]


def adapt_radius(
    tracker: Tracker, tick: Tick, steps: int, move: Callable[[int, Look], tuple[Tensor, Tensor]]
) -> None:
    """The loop of FMN and DDN: `move` gives the next radius and the next point, which is looked at
    with a graph. 1 B and 1 F a step; then the flips are shortened.
    """
    tape = tracker.start
    rows = tracker.rows
    point = tracker.x[rows]
    keep = rows  # where the tape holds these samples
    radius = tracker.distance[rows]
    flipped = torch.zeros_like(rows, dtype=torch.bool)
    if not len(rows):
        tracker.execute_gradients(1, 2)
    for k in range(steps):
        can = tracker.affordable(rows, 2)  # the gradient here and the look at the next point
        rows, keep, point, radius, flipped = take(can, rows, keep, point, radius, flipped)
        if not len(rows):
            break
        y = tracker.y[rows]
        z = tape.logits[keep]
        rival = strongest_rival(z, y)[1][:, None]
        g = tape.gradients(y, rival, keep)[:, 0]
        look = Look(rows, tracker.x[rows], point, z, rival, g, radius, flipped)
        radius, point = move(k, look)
        tape, flipped = tracker.tape(point, rows)
        keep = torch.arange(len(rows), device=rows.device)
        tick((k + 1) / steps)
    tracker.shorten(tracker.rows, BISECTIONS)


def cosine(start: float, end: float, k: int, steps: int) -> float:
    """The k-th of `steps` values that fall from `start` to `end` along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * k / max(steps - 1, 1))) / 2


def fitting(tracker: Tracker, steps: int) -> int:
    """As many of the steps, two passes each, as the budget has room for beside the clean pass and
    the shortening.

    The shortening gets a third of a small budget at most: without a flip it has nothing to do.
    """
    return int(min(steps, max((tracker.passes - 1 - min(BISECTIONS, tracker.passes / 3)) / 2, 1)))
