"""Where a search begins beside the sample itself: random points, and rivals beyond the first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.geometry import clip, column, inner, plane_steps, project, vector_norm, walls
from wassail.losses import magnitude
from wassail.network import generators
from wassail.ties import LOGITS

CHASED = 3  # of many rivals
LOOKS = 8  # forward passes to estimate the gradients of all classes


def gaussian(x: Tensor, seed: int, number: int) -> Tensor:
    """Normal draws of the shape of `x`, keyed by (seed, the sample, number)."""
    draws = [
        torch.randn(x.shape[1:], dtype=x.dtype, generator=generator)
        for generator in generators(x, seed, number)
    ]
    return torch.stack(draws).to(x.device)


def scatter(hunt: Hunt, rows: Tensor, seed: int, number: int) -> Tensor:
    """A random start for each sample, near the sphere of its best flip, keyed by (seed, the
    sample, number).
    """
    x = hunt.x[rows]
    v = gaussian(x, seed, number)
    far = torch.where(torch.isfinite(hunt.distance[rows]), hunt.distance[rows], 1.0)
    v = v * column(far / vector_norm(v, hunt.norm).clamp(min=1e-12), v)
    best = torch.where(column(torch.isfinite(hunt.distance[rows]), x), hunt.points[rows], x)
    return project(best + v, x, hunt.norm, 1.5 * far, hunt.box(rows))


def steepness(hunt: Hunt, rows: Tensor, seed: int) -> Tensor:
    """How fast `theta_j - theta_y` changes around the samples, for all classes at once, `(m, K)`,
    in an arbitrary unit: its root mean square over random steps. `LOOKS` F each.
    """
    x = hunt.x[rows]
    y = hunt.y[rows, None]
    clean = hunt.clean[rows]
    known = torch.isfinite(hunt.distance[rows])
    width = hunt.width(rows)
    length = vector_norm(hunt.points[rows] - x, hunt.norm)
    length = torch.where(known & (length > 0), 0.25 * length, 0.1 * width)
    total = torch.zeros_like(clean)
    for look in range(LOOKS):
        v = gaussian(x, seed, 200 + look)
        v = v * column(length / vector_norm(v, hunt.norm).clamp(min=1e-12), v)
        z, _ = hunt.logits(clip(x + v, hunt.box(rows)), rows)
        change = (z - clean) - (z - clean).gather(1, y)
        total = total + (change / magnitude(clean)[:, None]).square()
    return total.sqrt() * magnitude(clean)[:, None]


def shortest(hunt: Hunt, rows: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
    """Of rivals `(m, J)` the `CHASED` with the shortest first steps, and where these lead: `(m, C)`
    and `(m, C, *shape)`. 1 F + J B each.

    One rival at a time: the steps of all of them at once would not fit into memory.
    """
    x = hunt.x[rows]
    y = hunt.y[rows, None]
    z = hunt.clean[rows]
    tape = hunt.network.tape(x, rows)
    every = torch.arange(len(rows), device=rows.device)
    need = hunt.network.need(z, rows, 4)
    count = rivals.shape[1]
    slots = min(CHASED, count)
    length = torch.full((len(rows), slots), math.inf, dtype=x.dtype, device=x.device)
    starts = x[:, None].repeat(1, slots, *[1] * (x.ndim - 1))
    chased = rivals[:, :slots].clone()
    for j in range(count):
        rival = rivals[:, j : j + 1]
        weight = torch.zeros_like(z).scatter(1, rival, 1.0).scatter(1, y, -1.0)
        w = tape.pull(weight, again=j < count - 1)
        gap = (z.gather(1, y) - z.gather(1, rival))[:, 0]
        room = walls(x[None], hunt.box(rows))
        step = plane_steps(room, w, (gap + need)[None], hunt.norm)[0]
        far = vector_norm(step, hunt.norm)
        far = torch.where(inner(w, step) < gap * (1 - 1e-4), math.inf, far)
        slot = length.argmax(1)
        better = far < length[every, slot] * (1 - LOGITS)
        length[every, slot] = torch.where(better, far, length[every, slot])
        chased[every, slot] = torch.where(better, rival[:, 0], chased[every, slot])
        kept = starts[every, slot]
        starts[every, slot] = torch.where(column(better, x), x + 1.02 * step, kept)
    return chased, starts
