"""Where a search begins beside the sample itself: random points, and rivals beyond the first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.minimal.boundary_search import boundary_search
from wassail.attacks.minimal.first_steps import RIVALS, FirstSteps, steps_to_boundaries
from wassail.attacks.minimal.tracker import Tracker
from wassail.geometry import clip, column, inner, plane_steps, project, vector_norm, walls
from wassail.losses import magnitude
from wassail.network import generators
from wassail.ties import LOGITS, in_order, largest

SEARCHED = 3  # of many rivals
# Of the rivals seen from the best flip: how many are searched, how often, and how far their
# boundary may seem to be, in distances of the best flip.
SEEN = 2
SEEN_TIMES = 6
SEEN_REACH = 1.1
OWN_REACH = 0.95  # the same for the rival of that flip
MORE_RIVALS = 50  # with more than 11 classes: how many more get a gradient later
LOOKS = 8  # forward passes to estimate the gradients of all classes


def gaussian(x: Tensor, seed: int, number: int) -> Tensor:
    """Normal draws of the shape of `x`, keyed by (seed, the sample, number)."""
    draws = [
        torch.randn(x.shape[1:], dtype=x.dtype, generator=generator)
        for generator in generators(x, seed, number)
    ]
    return torch.stack(draws).to(x.device)


def near_best(tracker: Tracker, rows: Tensor, seed: int, number: int) -> Tensor:
    """A random start for each sample, near the sphere of its best flip, keyed by (seed, the
    sample, number).
    """
    x = tracker.x[rows]
    v = gaussian(x, seed, number)
    far = torch.where(torch.isfinite(tracker.distance[rows]), tracker.distance[rows], 1.0)
    v = v * column(far / vector_norm(v, tracker.norm).clamp(min=1e-12), v)
    best = torch.where(column(torch.isfinite(tracker.distance[rows]), x), tracker.points[rows], x)
    return project(best + v, x, tracker.norm, 1.5 * far, tracker.box(rows))


def steepness(tracker: Tracker, rows: Tensor, seed: int) -> Tensor:
    """How fast `theta_j - theta_y` changes around the samples, for all classes at once, `(m, K)`,
    in an arbitrary unit: its root mean square over random steps. `LOOKS` F each.
    """
    x = tracker.x[rows]
    y = tracker.y[rows, None]
    clean = tracker.clean[rows]
    known = torch.isfinite(tracker.distance[rows])
    width = tracker.width(rows)
    length = vector_norm(tracker.points[rows] - x, tracker.norm)
    length = torch.where(known & (length > 0), 0.25 * length, 0.1 * width)
    total = torch.zeros_like(clean)
    for look in range(LOOKS):
        v = gaussian(x, seed, 200 + look)
        v = v * column(length / vector_norm(v, tracker.norm).clamp(min=1e-12), v)
        z, _ = tracker.logits(clip(x + v, tracker.box(rows)), rows)
        change = (z - clean) - (z - clean).gather(1, y)
        total = total + (change / magnitude(clean)[:, None]).square()
    return total.sqrt() * magnitude(clean)[:, None]


def shortest(tracker: Tracker, rows: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
    """Of rivals `(m, J)` the `SEARCHED` with the shortest first steps, and where these lead:
    `(m, C)` and `(m, C, *shape)`. 1 F + J B each.

    One rival at a time: the steps of all of them at once would not fit into memory.
    """
    x = tracker.x[rows]
    y = tracker.y[rows, None]
    z = tracker.clean[rows]
    tape = tracker.network.tape(x, rows)
    every = torch.arange(len(rows), device=rows.device)
    need = tracker.network.need(z, rows, 4)
    count = rivals.shape[1]
    slots = min(SEARCHED, count)
    length = torch.full((len(rows), slots), math.inf, dtype=x.dtype, device=x.device)
    starts = x[:, None].repeat(1, slots, *[1] * (x.ndim - 1))
    found = rivals[:, :slots].clone()
    for j in range(count):
        rival = rivals[:, j : j + 1]
        weight = torch.zeros_like(z).scatter(1, rival, 1.0).scatter(1, y, -1.0)
        w = tape.pull(weight, again=j < count - 1)
        gap = (z.gather(1, y) - z.gather(1, rival))[:, 0]
        room = walls(x[None], tracker.box(rows))
        step = plane_steps(room, w, (gap + need)[None], tracker.norm)[0]
        far = vector_norm(step, tracker.norm)
        far = torch.where(inner(w, step) < gap * (1 - 1e-4), math.inf, far)
        slot = length.argmax(1)
        better = far < length[every, slot] * (1 - LOGITS)
        length[every, slot] = torch.where(better, far, length[every, slot])
        found[every, slot] = torch.where(better, rival[:, 0], found[every, slot])
        kept = starts[every, slot]
        starts[every, slot] = torch.where(column(better, x), x + 1.02 * step, kept)
    return found, starts


def beyond_rival(first: FirstSteps, turn: int) -> None:
    """Search from a point far beyond a rival's boundary."""
    tracker = first.tracker
    # Every second time the steps of linf: they only help to get going.
    wrongly = first.misled() & (turn % 2 == 1)
    led = wrongly.nonzero()[:, 0]
    kept = (~wrongly).nonzero()[:, 0]
    far = first.toward(turn % first.rivals.shape[1], 2.5)
    boundary_search(tracker, first.rows[kept], far[kept], 20)
    if len(led):
        boundary_search(tracker, first.rows[led], far[led], 20, aim=math.inf)
        tracker.shorten(first.rows[led], 4)


def more_rivals(first: FirstSteps, seed: int) -> None:
    """With many classes: the exact first step of `MORE_RIVALS` more rivals, of which the
    `SEARCHED` nearest are searched. `LOOKS` + 1 F and `MORE_RIVALS` B, and 20 passes for each that
    is searched.

    Half of them are those with the next largest logits, the others those that are nearest by an
    estimate of their gradients (`steepness`).
    """
    tracker = first.tracker
    count = min(MORE_RIVALS, tracker.clean.shape[1] - 1 - first.rivals.shape[1])
    places = tracker.affordable(first.rows, count + LOOKS + 1) if count > 0 else first.rows[:0]
    if not len(places):
        return
    rows = first.rows[places]
    y = tracker.y[rows, None]
    z = tracker.clean[rows]
    gap = z.gather(1, y) - z
    taken = torch.cat([first.rivals[places], y], 1)
    by_logit = largest((-gap).scatter(1, taken, -math.inf), (count + 1) // 2, band=LOGITS)
    taken = torch.cat([taken, by_logit], 1)
    near = steepness(tracker, rows, seed) / gap.clamp(min=torch.finfo(gap.dtype).tiny)
    by_slope = largest(near.scatter(1, taken, -math.inf), count // 2, band=LOGITS)
    rivals = torch.cat([by_logit, by_slope], 1)
    found, starts = shortest(tracker, rows, rivals)
    for k in range(found.shape[1]):
        boundary_search(tracker, rows, clip(starts[:, k], tracker.box(rows)), 10, found[:, k])


def rivals_at_flip(first: FirstSteps) -> None:
    """Search the rivals whose boundaries, linearised at the best flip, seem to be no farther than
    the best flip. 1 F and `RIVALS` B, and 12 passes for each that is searched.

    The gradients at the sample say little about boundaries far away from it. At the best flip, as
    far away as the answer, they say more.
    """
    tracker = first.tracker
    known = torch.isfinite(tracker.distance[first.rows]).nonzero()[:, 0]
    count = min(RIVALS, first.rivals.shape[1])
    places = known[tracker.affordable(first.rows[known], count + 1)]
    if not len(places):
        return
    rows = first.rows[places]
    rivals = first.rivals[places, :count]
    x, points = tracker.x[rows], tracker.points[rows]
    tape, _ = tracker.tape(points, rows)
    lengths, steps = steps_to_boundaries(tracker, rows, rivals, tape, away=points - x)
    # The rival of the flip itself is searched again only where it promises a much nearer flip.
    own = rivals == tape.strongest(tracker.y[rows])[:, None]
    reach = torch.where(own, OWN_REACH, SEEN_REACH) * tracker.distance[rows][:, None]
    lengths = lengths.masked_fill(lengths >= reach, math.inf)
    order = in_order(lengths, band=LOGITS)
    for rank in order[:, :SEEN].unbind(1):
        near = torch.isfinite(lengths.gather(1, rank[:, None])[:, 0]).nonzero()[:, 0]
        if len(near):
            some, mine = rows[near], rank[near]
            start = clip(x[near] + 1.02 * steps[mine, near], tracker.box(some))
            boundary_search(tracker, some, start, SEEN_TIMES, rivals[near, mine])
