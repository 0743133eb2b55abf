"""The nearest flip as a game between a point and the weights of norm and loss (PDPGD, Matyasko &
Chau 2021, arXiv 2106.01538): a round of a longer search, and the moves of both players.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.geometry import clip, column, project, vector_norm
from wassail.losses import magnitude, margin, strongest_rival

# A short game: step, how far it falls, dual step, ratio, turns of the proximal step.
SHORT = (0.3, 0.1, 0.2, 0.01, 5)
LOOK = 3  # passes that a look takes at most


def primal_dual(tracker: Tracker, rows: Tensor, times: int, size: float = 10.0) -> None:
    """The game of `pdpgd_engine` from the samples, with settings for a short one.

    1 F + 1 B an iteration; after a flip 1 F, and 1 F + 1 B more where the next point is none.

    Args:
        tracker: the search.
        rows: samples `(m,)`.
        times: iterations.
        size: largest logit at the sample after scaling, so that a factor on the logits changes
            nothing; the larger, the more the flip counts against the distance.
    """
    scale = magnitude(tracker.clean) / size
    game = PrimalDual(tracker, rows, times, *SHORT, torch.where(scale > 0, scale, 1.0))
    point = tracker.x[rows]
    for k in range(times):
        keep = tracker.affordable(rows, LOOK)
        rows, point = take(keep, rows, point)
        game.take(keep)
        if not len(rows):
            return
        game.look(rows, point)
        point = game.move(k, rows)


class PrimalDual:
    """Where m points stand in the game of `pdpgd_engine`.

    scale: what a logit of each sample of the tracker is divided by, `(n,)`, 1 by default;
    change: from the samples, `(m, *shape)`; mean, square: of the gradients, as Adam keeps them;
    odds: `log(lambda_1 / lambda_0)`; weight: lambda_1 of a pair that sums to 1; gradient: of the
    loss, 0 at a flip; flipped: which points are flips, bool `(m,)`.
    """

    def __init__(
        self,
        tracker: Tracker,
        rows: Tensor,
        steps: int,
        step: float,
        fall: float,
        dual_step: float,
        ratio: float,
        inner: int,
        scale: Tensor | None = None,
    ) -> None:
        self.tracker = tracker
        self.scale = torch.ones_like(tracker.distance) if scale is None else scale
        self.steps = steps
        self.step = step
        self.fall = fall
        self.dual_step = dual_step
        self.inner = inner
        self.change, self.mean, self.square = (torch.zeros_like(tracker.x[rows]) for _ in range(3))
        self.odds = torch.full_like(tracker.distance[rows], -math.log(ratio))
        self.weight = self.odds.sigmoid()
        self.gradient = torch.zeros_like(self.change)
        self.flipped = torch.zeros_like(rows, dtype=torch.bool)

    def take(self, keep: Tensor) -> None:
        """Go on with the points at these places `(k,)`."""
        self.change, self.mean, self.square, self.odds, self.weight = take(
            keep, self.change, self.mean, self.square, self.odds, self.weight
        )
        self.gradient, self.flipped = take(keep, self.gradient, self.flipped)

    def begin(self, rows: Tensor) -> None:
        """Take the gradient at the samples `(m,)`, all of them right. 1 B each."""
        tracker = self.tracker
        y = tracker.y[rows]
        z = tracker.clean[rows]
        uphill = tracker.start.gradients(y, strongest_rival(z, y)[1][:, None], rows)[:, 0]
        self.gradient = self._loss(rows, z, uphill)

    def look(self, rows: Tensor, point: Tensor) -> None:
        """Evaluate points `(m, *shape)` of these samples. `LOOK` passes at most.

        Flips come in series, and the graph of a pass that flips is of no use: those that flipped
        last time are looked at without one.
        """
        tracker = self.tracker
        again, fresh = (mask.nonzero()[:, 0] for mask in (self.flipped, ~self.flipped))
        self.gradient = torch.zeros_like(point)
        if len(again):
            _, flip = tracker.logits(point[again], rows[again])
            self._differentiate(rows, point, again[(~flip).nonzero()[:, 0]])
            self.flipped[again] = flip
        self._differentiate(rows, point, fresh)

    def _differentiate(self, rows: Tensor, point: Tensor, some: Tensor) -> None:
        """Flips and gradients at some places `(k,)` of the points. 1 F + 1 B each."""
        if not len(some):
            return
        tracker = self.tracker
        mine = rows[some]
        tape, flip = tracker.tape(point[some], mine)
        y = tracker.y[mine]
        uphill = tape.gradients(y, tape.strongest(y)[:, None])[:, 0]
        found = self._loss(mine, tape.logits, uphill)
        self.gradient[some] = torch.where(column(flip, found), 0.0, found)
        self.flipped[some] = flip

    def _loss(self, rows: Tensor, z: Tensor, uphill: Tensor) -> Tensor:
        """The gradient of the loss at logits `(k, K)` of these samples, from that of the margin."""
        scale = self.scale[rows]
        share = (-margin(z, self.tracker.y[rows]) / scale).sigmoid() / scale
        return -uphill * column(share, uphill)

    def move(self, k: int, rows: Tensor) -> Tensor:
        """The next points `(m, *shape)`, after iteration k.

        Args:
            k: iteration, from 0.
            rows: the samples `(m,)`.
        """
        tracker = self.tracker
        (x,) = take(rows, tracker.x)
        box = tracker.box(rows)
        width = tracker.width(rows)
        width = column(width, x) if isinstance(width, Tensor) else width
        gradient = self.gradient
        rate = self.step * self.fall ** (k / self.steps)
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient.square()
        metric = (self.square / (1 - 0.999 ** (k + 1))).sqrt() + 1e-8
        step = width * rate / (1 - 0.9 ** (k + 1)) * self.mean / metric
        target = clip(x + self.change - step, box) - x
        most = vector_norm(metric, math.inf)
        change = target
        pull = (1 - self.weight) / self.weight * rate / most
        metric = metric.div_(column(most, x))
        for _ in range(self.inner):
            change = change + (target - change).mul_(metric)
            change = clip(x + proximal(change, tracker.norm, pull), box) - x
        self.change = change
        rise = self.dual_step * (1 - 0.9 * k / max(self.steps - 1, 1))
        odds = torch.where(self.flipped, self.odds - rise, self.odds + rise)
        self.odds = odds.clamp(math.log(1e-6), math.log(1e6))
        self.weight = 0.9 * self.weight + 0.1 * self.odds.sigmoid()
        return clip(x + change, box)


def proximal(v: Tensor, norm: float, weight: Tensor) -> Tensor:
    """`argmin_z weight ||z||_r + ||z - v||_2^2 / 2`, shape of `v`, for weights `(N,)`.

    By Moreau it is `v` less its projection onto the dual ball of radius `weight`; for l1 that is
    the soft threshold.
    """
    if norm == 1:
        limit = column(weight, v)
        return v - torch.maximum(torch.minimum(v, limit), -limit)
    return v - project(v, torch.zeros_like(v), 2.0 if norm == 2 else 1.0, weight)
