"""DDN, decoupled direction and norm, for l2 (Rony et al., CVPR 2019)."""

from __future__ import annotations

import torch

from wassail.attacks.deepfool import gaps
from wassail.attacks.fmn import BISECTIONS, cosine, fitting
from wassail.attacks.hunt import Hunt
from wassail.device import take
from wassail.errors import InputError
from wassail.geometry import clip, maximiser, steepest, vector_norm
from wassail.losses import strongest_rival
from wassail.progress import Tick


def ddn_engine(hunt: Hunt, tick: Tick, *, steps: int = 100, gamma: float = 0.05) -> None:
    """Turn on a sphere around the sample toward a larger margin; shrink the sphere at each flip,
    let it grow elsewhere.

        radius  <- gap / ||g||_2 at first, where the linearised margin vanishes; then (1 - gamma)
        radius at a flip and
                   (1 + gamma) radius elsewhere,
        x_{k+1} =  x + t (x_k - x + a g / ||g||_2), clipped to the box, with the t that makes
        ||x_{k+1} - x||_2 = radius,

    with `g` the gradient of the margin `max_{j != y} theta_j - theta_y` at `x_k` and the step `a`
    on a cosine from 1 to 0.01. Three things differ from the paper: the first radius, which was 1;
    the margin instead of the cross entropy, whose gradient vanishes at confident samples; and no
    rounding to 8 bits. Where passes are limited the schedule is shortened to fit them.

    Passes: the clean one, then for each step 1 backward and 1 forward; 10 forward to shorten. Only
    for l2.
    """
    if hunt.norm != 2:
        raise InputError(
            f"DDN is for l2 and the norm is l{hunt.norm:g}: choose norm 2, or FMN, which is for "
            "all norms."
        )
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
        rival = strongest_rival(z, y)[1][:, None]
        g = tape.gradients(y, rival, keep)[:, 0]
        if k == 0:
            slope = vector_norm(g, 2)
            radius = torch.where(slope > 0, gaps(hunt, z, rows, rival)[:, 0] / slope, 1)
        else:
            radius = torch.where(flipped, 1 - gamma, 1 + gamma) * radius
        delta = point - x + cosine(1.0, 0.01, k, steps) * maximiser(g, 2)
        point = clip(x + steepest(x, delta, 2, radius, hunt.box(rows)), hunt.box(rows))
        tape, flipped = hunt.tape(point, rows)
        keep = torch.arange(len(rows), device=x.device)
        tick((k + 1) / steps)
    hunt.shorten(hunt.rows, BISECTIONS)
