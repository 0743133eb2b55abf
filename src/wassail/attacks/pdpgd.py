"""PDPGD: primal-dual proximal gradient descent (Matyasko & Chau 2021, https://arxiv.org/abs/2106.01538)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.errors import InputError
from wassail.geometry import clip, column, project, vector_norm
from wassail.losses import margin, strongest_rival
from wassail.network import Tick

SEARCH = 10  # bisections of the nearest flip at the end


def pdpgd_engine(
    hunt: Hunt, tick: Tick, *, steps: int = 100, step: float = 0.1, ratio: float = 0.01, dual_step: float = 0.1, inner: int = 5
) -> None:
    """The nearest flip as a game: the point lowers a weighted sum of norm and loss, the weights favour whichever is unmet.

        min_d max_lambda  lambda_0 ||d||_r + lambda_1 softplus(max(margin, 0)),   margin = theta_y - max_j theta_j at x + d.

    The loss takes an Adam step, the norm a proximal one in Adam's metric H: the proximal operator of
    `lambda_0 / lambda_1 ||.||_r`, by `inner` steps of `z <- clip(prox(z + H / max H (d - z)))`. `log(lambda_1 / lambda_0)` goes
    up by `dual_step` while the point is right and down while it is wrong, from `-log ratio`, and acts through a running mean.
    `step` falls exponentially to a hundredth, `dual_step` linearly to a tenth; `steps` is cut to what the passes allow.

    A step is 1 F and, where the point is not a flip, 1 B: a flipped point has no loss to lower. 10 F to shorten the flip.
    """
    if steps < 1 or inner < 1 or not (step > 0 and dual_step > 0 and ratio > 0):
        raise InputError(f"steps {steps}, step {step}, ratio {ratio}, dual_step {dual_step}, inner {inner}: all must be positive.")
    if math.isfinite(hunt.passes):
        steps = max(1, min(steps, (int(hunt.passes) - 1 - SEARCH) // 2))
    rows, tape, flipped = hunt.rows, hunt.start, torch.zeros_like(hunt.wrong)
    place = rows  # of `rows` on the tape
    move, first, second = (torch.zeros_like(hunt.x[rows]) for _ in range(3))
    odds = torch.full_like(hunt.distance[rows], -math.log(ratio))  # log(lambda_1 / lambda_0)
    weight = odds.sigmoid()  # lambda_1, running mean; lambda_0 is 1 - lambda_1
    for k in range(steps):
        cost = torch.where(flipped[place], 1, 2) + torch.where(torch.isfinite(hunt.distance[rows]), SEARCH, 0)
        keep = hunt.left(rows) >= cost
        rows, place, move, first, second, odds, weight = (
            t[keep] for t in (rows, place, move, first, second, odds, weight)
        )
        if not len(rows):
            break
        gradient = torch.zeros_like(move)
        z, right = tape.logits[place], ~flipped[place]
        gap = -margin(z, hunt.y[rows])
        if right.any():
            rival = strongest_rival(z[right], hunt.y[rows[right]])[1]
            gradient[right] = -tape.gradients(hunt.y[rows[right]], rival[:, None], place[right])[:, 0]
            gradient = gradient * column(gap.sigmoid(), move)
        rate = step * 0.01 ** (k / steps)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
        scale = (second / (1 - 0.999 ** (k + 1))).sqrt() + 1e-8
        x = hunt.x[rows]
        target = clip(x + move - rate / (1 - 0.9 ** (k + 1)) * first / scale, hunt.domain) - x
        most = vector_norm(scale, math.inf)
        move = target
        for _ in range(inner):
            move = proximal(move + scale / column(most, x) * (target - move), hunt.norm, (1 - weight) / weight * rate / most)
            move = clip(x + move, hunt.domain) - x
        pull = dual_step * (1 - 0.9 * k / max(steps - 1, 1))
        odds = (odds + torch.where(right, pull, -pull)).clamp(math.log(1e-6), math.log(1e6))
        weight = 0.9 * weight + 0.1 * odds.sigmoid()
        tape, flipped = hunt.tape(x + move, rows)
        place = torch.arange(len(rows), device=x.device)
        tick((k + 1) / steps)
    hunt.shorten(hunt.rows, SEARCH)


def proximal(v: Tensor, norm: float, weight: Tensor) -> Tensor:
    """`argmin_z weight ||z||_r + ||z - v||_2^2 / 2`, shape of `v`, for weights `(N,)`.

    By Moreau `v - Proj(v)` onto the dual ball of radius `weight`: soft threshold for l1, shrinkage for l2.
    """
    if norm == 1:
        return v.sign() * (v.abs() - column(weight, v)).clamp(min=0)
    return v - project(v, torch.zeros_like(v), 2.0 if norm == 2 else 1.0, weight)
