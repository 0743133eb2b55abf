"""The first step of every sample: the exact way to the linearised boundary of each rival."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.attacks.minimal.polish import SLACK
from wassail.attacks.minimal.tracker import Tracker
from wassail.geometry import clip, inner, plane_steps, vector_norm, walls
from wassail.network import Tape
from wassail.ties import LOGITS, in_order, largest

RIVALS = 10  # gradients at the sample: all rivals up to 11 classes, else the largest logits


@dataclass
class FirstSteps:
    """What the gradients at m samples say, and what the rounds learn of these samples.

    Args:
        tracker: the search.
        rows: the samples `(m,)`.
        rivals: classes by the length of their first step, nearest first, `(m, J)`.
        steps: first steps `(m, J, *shape)`.
        slack: see `polish`; for every sample of the tracker.
        flat: places `(k,)` of samples whose gradients lead nowhere.
    """

    tracker: Tracker
    rows: Tensor
    rivals: Tensor
    steps: Tensor
    slack: Tensor
    flat: Tensor

    @classmethod
    def of(cls, tracker: Tracker, topk: int = RIVALS) -> FirstSteps:
        """Take the gradients of `topk` rivals at the samples that are worth attacking."""
        rows, rivals, steps = first_steps(tracker, topk)
        slack = torch.full_like(tracker.distance, SLACK)
        flat = (vector_norm(steps[:, 0], tracker.norm) == 0).nonzero()[:, 0]
        return cls(tracker, rows, rivals, steps, slack, flat)

    def toward(self, rank: int, factor: float) -> Tensor:
        """Points on the way to a rival, `(m, *shape)`, `factor` first steps from the samples."""
        ahead = self.tracker.x[self.rows] + factor * self.steps[:, rank]
        return clip(ahead, self.tracker.box(self.rows))

    def ranked(self, turn: int) -> Tensor:
        """The rival of this rank, `(m,)`; after the last one the first comes again."""
        return self.rivals[:, turn % self.rivals.shape[1]]

    def misled(self) -> Tensor:
        """Whether, for l2, the flip known is much nearer or farther than the first step said, or
        there is none; bool `(m,)`.
        """
        length = vector_norm(self.steps[:, 0], self.tracker.norm)
        ratio = self.tracker.distance[self.rows] / length.clamp(min=1e-30)
        return ((ratio < 0.75) | (ratio > 1.5)) & (self.tracker.norm == 2)


def first_steps(tracker: Tracker, topk: int = RIVALS) -> tuple[Tensor, Tensor, Tensor]:
    """Rivals by the length of the exact step to their linearised boundary, nearest first, and those
    steps.

    Returns rows `(m,)`, rivals `(m, J)`, steps `(m, J, *shape)`. One backward pass a rival, on the
    clean pass's graph.
    """
    count = min(topk, tracker.clean.shape[1] - 1)
    rows = tracker.rows
    rows = rows[tracker.affordable(rows, count)]
    z = tracker.clean[rows]
    y = tracker.y[rows, None]
    x = tracker.x[rows]
    rivals = largest(z.scatter(1, y, -math.inf), count, band=LOGITS)
    if not len(rows):
        tracker.execute_gradients(count, count)
        return rows, rivals, x[:, None]
    lengths, steps = steps_to_boundaries(tracker, rows, rivals, tracker.start, rows)
    order = in_order(lengths, band=LOGITS)
    every = torch.arange(len(rows), device=rows.device)[:, None]
    steps = steps.flatten(0, 1).index_select(0, (order * len(rows) + every).flatten())
    return rows, rivals.gather(1, order), steps.reshape(-1, count, *x.shape[1:])


def steps_to_boundaries(
    tracker: Tracker,
    rows: Tensor,
    rivals: Tensor,
    tape: Tape,
    keep: Tensor | None = None,
    away: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The shortest steps from these samples to the boundaries of rivals `(m, J)`, linearised where
    the tape looked: lengths `(m, J)`, inf where the box ends before, and steps
    `(J, m, *shape)`. J B.

    keep: the places of the samples on the tape, all by default. away: from the samples to where the
    tape looked, `(m, *shape)`; default None, it looked at the samples.
    """
    y = tracker.y[rows, None]
    z = tape.logits if keep is None else tape.logits[keep]
    need = tracker.network.need(z, rows, 4)  # a flip must be wrong by the tolerance
    gaps = z.gather(1, y) - z.gather(1, rivals)
    room = walls(tracker.x[rows][None], tracker.box(rows))
    last = rivals.shape[1] - 1
    found = []
    lengths = []
    # One rival at a time: what belongs to all of them does not fit into the cache.
    for j, gap in enumerate(gaps.unbind(1)):
        w = tape.gradients(y[:, 0], rivals[:, j : j + 1], keep, again=j < last)[:, 0]
        gap = gap if away is None else gap + inner(w, away)
        step = plane_steps(room, w, (gap + need)[None], tracker.norm)[0]
        unreached = inner(w, step) < gap * (1 - 1e-4)
        lengths.append(torch.where(unreached, math.inf, vector_norm(step, tracker.norm)))
        found.append(step)
    return torch.stack(lengths, 1), torch.stack(found)
