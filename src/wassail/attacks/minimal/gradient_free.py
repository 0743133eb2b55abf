"""A search for nearer flips that asks for no gradient: for samples where there is none, or where it
leads nowhere.

Quantised inputs, votes and saturated units have zero gradients at most points. What is left is to
look: at points far away for a first flip, and at random changes of the best flip inside a ball that
is a little smaller than its own (Square, Andriushchenko et al. 2020, with a radius that follows the
flips). Draws are keyed by the sample, so the results depend on nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.geometry import clip, column, project, sides
from wassail.losses import margin
from wassail.network import generators

SHARES = (0.3, 0.02)  # of the coordinates that one change covers, at first and at the end
GROWTH = 1.5  # of the slack after a flip
DECAY = 0.9  # of the slack after a miss
MOST_SLACK = 0.3
LEAST_SLACK = 0.001
WIDTH = 8  # random numbers for one change: its place, and a sign for up to six channels


def far_starts(tracker: Tracker, rows: Tensor, seed: int) -> None:
    """Look for any flip of samples that have none: the negative of the sample, noise, a uniform
    image, then bisect toward the sample. Up to 5 F, and 6 F for those that flip.
    """
    noise = _draws(tracker, rows, seed, 101, tracker.x[:1].numel()).reshape(tracker.x[rows].shape)
    x = tracker.x[rows]
    box = tracker.box(rows)
    low, high = (-1.0, 1.0) if box is None else sides(box, x)
    starts = [
        low + high - x,
        low + (high - low) * noise,
        *(torch.zeros_like(x) + side for side in (low, high, (low + high) / 2)),
    ]
    for start in starts:
        lost = torch.isinf(tracker.distance[rows]).nonzero()[:, 0]
        lost = lost[tracker.affordable(rows[lost], 1)]
        if not len(lost):
            break
        tracker.logits(clip(start[lost], tracker.box(rows[lost])), rows[lost])
    tracker.shorten(rows, 6)


def gradient_free(tracker: Tracker, rows: Tensor, times: int, seed: int, number: int) -> None:
    """Random changes of the best flip inside a ball smaller than its own. 1 F each.

    After each flip the next look is at the flip projected onto the smaller ball, which is a
    bisection; the looks after that are at changes of it, and what raises the margin is kept.

    Args:
        tracker: the search.
        rows: samples `(m,)`; those without a flip are left out.
        times: looks.
        seed: keys the draws, together with the sample and `number`.
        number: which of several searches this is.
    """
    rows = rows[torch.isfinite(tracker.distance[rows]).nonzero()[:, 0]]
    if not len(rows):
        return
    draws = _draws(tracker, rows, seed, number, times * WIDTH).reshape(len(rows), times, WIDTH)
    current = tracker.points[rows]
    slack = torch.full_like(tracker.distance[rows], 0.1)
    best = torch.full_like(slack, -math.inf)
    known = torch.zeros_like(rows, dtype=torch.bool)  # whether `best` is the margin at `current`
    for k in range(times):
        keep = tracker.affordable(rows, 1)
        rows, draws, current, slack, best, known = take(
            keep, rows, draws, current, slack, best, known
        )
        if not len(rows):
            return
        x = tracker.x[rows]
        radius = (1 - slack) * tracker.distance[rows]
        share = SHARES[1] + (SHARES[0] - SHARES[1]) * (1 - k / times) ** 2
        changed = _change(current, x, draws[:, k], share, tracker.norm, radius)
        point = torch.where(column(known, x), changed, current)
        point = project(point, x, tracker.norm, radius, tracker.box(rows))
        z, flip = tracker.logits(point, rows)
        value = margin(z, tracker.y[rows])
        accept = flip | ~known | (value >= best)
        current = torch.where(column(accept, x), point, current)
        best = torch.where(accept, value, best)
        grown = (GROWTH * slack).clamp(max=MOST_SLACK)
        slack = torch.where(flip, grown, torch.where(known, DECAY * slack, 0.5 * slack))
        slack = slack.clamp(min=LEAST_SLACK)
        known = ~flip


def _draws(tracker: Tracker, rows: Tensor, seed: int, number: int, count: int) -> Tensor:
    """Numbers in [0, 1), `(m, count)`, keyed by (seed, the sample, number)."""
    x = tracker.x[rows]
    drawn = [
        torch.rand(count, dtype=x.dtype, generator=generator)
        for generator in generators(x, seed, number)
    ]
    return torch.stack(drawn).to(x.device) if drawn else x.new_zeros(0, count)


def _change(
    current: Tensor, x: Tensor, draw: Tensor, share: float, norm: float, radius: Tensor
) -> Tensor:
    """The points `(m, *shape)` with a window of each changed: a square of an image, else a run of
    coordinates.

    linf: the window is put on the surface of the ball; l1 and l2: it is moved by half a radius.
    """
    shape = x.shape
    image = x.ndim == 4
    channels, height, width = shape[1:] if image else (1, 1, max(x[:1].numel(), 1))
    part = math.sqrt(share) if image else share
    tall = max(1, round(part * height)) if image else 1
    wide = max(1, round(part * width))
    top = (draw[:, 0] * (height - tall + 1)).floor()[:, None]
    left = (draw[:, 1] * (width - wide + 1)).floor()[:, None]
    line = torch.arange(height, device=x.device, dtype=x.dtype)[None]
    run = torch.arange(width, device=x.device, dtype=x.dtype)[None]
    rows = ((line >= top) & (line < top + tall)).to(x.dtype)
    columns = ((run >= left) & (run < left + wide)).to(x.dtype)
    window = rows[:, None, :, None] * columns[:, None, None, :]
    places = torch.arange(channels, device=x.device) % (WIDTH - 2) + 2
    sign = 2.0 * (draw[:, places] >= 0.5).to(x.dtype) - 1
    size = radius[:, None] * sign
    if norm != math.inf:
        size = 0.5 * size / (tall * wide * channels) ** (1 / norm)
    bump = (window * size[:, :, None, None]).reshape(shape)
    inside = (window.expand(-1, channels, -1, -1)).reshape(shape)
    if norm == math.inf:
        return current * (1 - inside) + (x + bump) * inside
    return current + bump
