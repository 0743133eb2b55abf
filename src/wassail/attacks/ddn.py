"""DDN, decoupled direction and norm, for l2 (Rony et al., CVPR 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from wassail.attacks.fmn import Look, adapt_radius, cosine, fitting
from wassail.attacks.minimal.tracker import Tracker
from wassail.errors import InputError
from wassail.geometry import clip, maximiser, steepest, vector_norm
from wassail.progress import Tick


def ddn_engine(tracker: Tracker, tick: Tick, *, steps: int = 100, gamma: float = 0.05) -> None:
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
    if tracker.norm != 2:
        raise InputError(
            f"DDN is for l2 and the norm is l{tracker.norm:g}: choose norm 2, or FMN, which is for "
            "all norms."
        )
    steps = fitting(tracker, steps)

    def move(k: int, look: Look) -> tuple[Tensor, Tensor]:
        if k == 0:
            slope = vector_norm(look.gradient, 2)
            radius = torch.where(slope > 0, look.gap(tracker) / slope, 1)
        else:
            radius = torch.where(look.flipped, 1 - gamma, 1 + gamma) * look.radius
        way = look.point - look.x + cosine(1.0, 0.01, k, steps) * maximiser(look.gradient, 2)
        box = tracker.box(look.rows)
        return radius, clip(look.x + steepest(look.x, way, 2, radius, box), box)

    adapt_radius(tracker, tick, steps, move)
