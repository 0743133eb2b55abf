"""FMN, the fast minimum-norm attack (Pintor et al., NeurIPS 2021)."""

from __future__ import annotations

import math

import torch

from wassail.attacks.deepfool import gaps
from wassail.attacks.hunt import Hunt
from wassail.device import take
from wassail.geometry import maximiser, project, vector_norm
from wassail.losses import strongest_rival
from wassail.progress import Tick
from wassail.threat import dual

BISECTIONS = 10


def fmn_engine(
    hunt: Hunt, tick: Tick, *, steps: int = 100, alpha: float | None = None, gamma: float = 0.05
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
    alpha = (10.0 if hunt.norm == math.inf else 1.0) if alpha is None else alpha
    steps = fitting(hunt, steps)
    tape = hunt.start
    rows = hunt.rows
    point = hunt.x[rows]
    keep = rows
    radius = hunt.distance[rows]
    flipped = torch.zeros_like(rows, dtype=torch.bool)
    if not len(rows):
        hunt.ride(1, 2)
    for k in range(steps):
        can = hunt.able(rows, 2)  # the gradient here and the look at the next point
        rows, keep, point, radius, flipped = take(can, rows, keep, point, radius, flipped)
        if not len(rows):
            break
        x = hunt.x[rows]
        y = hunt.y[rows]
        z = tape.logits[keep]
        best = hunt.distance[rows]
        rival = strongest_rival(z, y)[1][:, None]
        g = tape.gradients(y, rival, keep)[:, 0]
        slope = vector_norm(g, dual(hunt.norm))
        ahead = gaps(hunt, z, rows, rival)[:, 0] / torch.where(slope > 0, slope, 1)
        c = cosine(gamma, 0.001, k, steps)
        outward = torch.where(
            torch.isfinite(best), (1 + c) * radius, vector_norm(point - x, hunt.norm) + ahead
        )
        radius = torch.where(flipped, torch.minimum((1 - c) * radius, best), outward)
        point = project(
            point + cosine(alpha, alpha / 100, k, steps) * maximiser(g, 2),
            x,
            hunt.norm,
            radius,
            hunt.box(rows),
        )
        tape, flipped = hunt.tape(point, rows)
        keep = torch.arange(len(rows), device=x.device)
        tick((k + 1) / steps)
    hunt.shorten(hunt.rows, BISECTIONS)


def cosine(start: float, end: float, k: int, steps: int) -> float:
    """The k-th of `steps` values that fall from `start` to `end` along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * k / max(steps - 1, 1))) / 2


def fitting(hunt: Hunt, steps: int) -> int:
    """As many of the steps, two passes each, as the budget has room for beside the clean pass and
    the shortening.

    The shortening gets a third of a small budget at most: without a flip it has nothing to do.
    """
    return int(min(steps, max((hunt.passes - 1 - min(BISECTIONS, hunt.passes / 3)) / 2, 1)))
