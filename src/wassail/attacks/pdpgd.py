"""PDPGD: primal-dual proximal gradient descent (Matyasko & Chau 2021, arXiv 2106.01538)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.device import take
from wassail.errors import InputError
from wassail.geometry import clip, column, project, vector_norm
from wassail.losses import magnitude, margin, strongest_rival
from wassail.progress import Tick

# A short game: step, how far it falls, dual step, ratio, turns of the proximal step.
SHORT = (0.3, 0.1, 0.2, 0.01, 5)
SEARCH = 10  # bisections of the nearest flip at the end
LOOK = 3  # passes that a look takes at most


def pdpgd_engine(
    hunt: Hunt,
    tick: Tick,
    *,
    steps: int = 100,
    step: float = 0.1,
    fall: float = 0.01,
    dual_step: float = 0.1,
    ratio: float = 0.01,
    inner: int = 5,
) -> None:
    """The nearest flip as a game: the point lowers a weighted sum of norm and loss, the weights
    rise on what is unmet.

        min_d max_lambda  lambda_0 ||d||_r + lambda_1 softplus(max(gap, 0)),   gap = theta_y -
        max_{j != y} theta_j at x + d.

    The loss takes an Adam step to `d'`, in shares of the box's width; the norm then a proximal step
    in Adam's metric H, by `inner` turns of `d <- clip(prox(d + H / max H (d' - d)))`. `log(lambda_1
    / lambda_0)` starts at `-log ratio`, rises by `dual_step` at a point that is right and falls by
    it at a flip; a running mean of the lambdas acts. `step` falls exponentially to `fall` times
    itself, `dual_step` linearly to a tenth. The defaults are the authors' for 500 steps; with 100
    `step=0.3, fall=0.1, dual_step=0.2` ends nearer (mean distance down 14 to 94 % on two image
    networks).

    1 F + 1 B a step; after a flip 1 F, and 1 F + 1 B more where the next point is none (a flip has
    no loss to lower); 10 F at the end. `steps` is cut to what the passes allow, so that the
    schedule is run to its end.
    """
    if steps < 1 or inner < 1 or not all(0 < v < math.inf for v in (step, fall, dual_step, ratio)):
        raise InputError(
            f"steps is {steps}, inner {inner}, step {step}, fall {fall}, dual_step {dual_step}, "
            f"ratio {ratio}: "
            "give positive numbers."
        )
    if math.isfinite(hunt.passes):  # about one step in two takes a gradient
        steps = min(steps, max(2 * int(hunt.passes) // 3, 1))
    rows = hunt.rows
    rows = rows[hunt.able(rows, 2)]
    game = Game(hunt, rows, steps, step, fall, dual_step, ratio, inner)
    if len(rows):
        game.begin(rows)
    else:
        hunt.ride(1, 2)
    for k in range(steps):
        if not len(rows):
            break
        point = game.move(k, rows)
        enough = hunt.left(rows) >= LOOK
        if k + 1 == steps:
            enough = torch.zeros_like(enough)
        end = (~enough & (hunt.left(rows) >= 1)).nonzero()[:, 0]
        if len(end):
            hunt.logits(point[end], rows[end])
        keep = enough.nonzero()[:, 0]
        rows, point = take(keep, rows, point)
        game.take(keep)
        game.look(rows, point)
        tick((k + 1) / steps)
    hunt.shorten(hunt.rows, SEARCH)


def duel(hunt: Hunt, rows: Tensor, times: int, size: float = 10.0) -> None:
    """The same game from the samples as a round of another search, with settings for a short one.

    1 F + 1 B an iteration; after a flip 1 F, and 1 F + 1 B more where the next point is none.

    Args:
        hunt: the search.
        rows: samples `(m,)`.
        times: iterations.
        size: largest logit at the sample after scaling, so that a factor on the logits changes
            nothing; the larger, the more the flip counts against the distance.
    """
    scale = magnitude(hunt.clean) / size
    game = Game(hunt, rows, times, *SHORT, torch.where(scale > 0, scale, 1.0))
    point = hunt.x[rows]
    for k in range(times):
        keep = hunt.able(rows, LOOK)
        rows, point = take(keep, rows, point)
        game.take(keep)
        if not len(rows):
            return
        game.look(rows, point)
        point = game.move(k, rows)


class Game:
    """Where m points stand in the game of `pdpgd_engine`.

    scale: what a logit of each sample of the hunt is divided by, `(n,)`, 1 by default;
    change: from the samples, `(m, *shape)`; mean, square: of the gradients, as Adam keeps them;
    odds: `log(lambda_1 / lambda_0)`; weight: lambda_1 of a pair that sums to 1; gradient: of the
    loss, 0 at a flip; flipped: which points are flips, bool `(m,)`.
    """

    def __init__(
        self,
        hunt: Hunt,
        rows: Tensor,
        steps: int,
        step: float,
        fall: float,
        dual_step: float,
        ratio: float,
        inner: int,
        scale: Tensor | None = None,
    ) -> None:
        self.hunt = hunt
        self.scale = torch.ones_like(hunt.distance) if scale is None else scale
        self.steps = steps
        self.step = step
        self.fall = fall
        self.dual_step = dual_step
        self.inner = inner
        self.change, self.mean, self.square = (torch.zeros_like(hunt.x[rows]) for _ in range(3))
        self.odds = torch.full_like(hunt.distance[rows], -math.log(ratio))
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
        hunt = self.hunt
        y = hunt.y[rows]
        z = hunt.clean[rows]
        uphill = hunt.start.gradients(y, strongest_rival(z, y)[1][:, None], rows)[:, 0]
        self.gradient = self._loss(rows, z, uphill)

    def look(self, rows: Tensor, point: Tensor) -> None:
        """Evaluate points `(m, *shape)` of these samples. `LOOK` passes at most.

        Flips come in series, and the graph of a pass that flips is of no use: those that flipped
        last time are looked at without one.
        """
        hunt = self.hunt
        again, fresh = (mask.nonzero()[:, 0] for mask in (self.flipped, ~self.flipped))
        self.gradient = torch.zeros_like(point)
        if len(again):
            _, flip = hunt.logits(point[again], rows[again])
            self._differentiate(rows, point, again[(~flip).nonzero()[:, 0]])
            self.flipped[again] = flip
        self._differentiate(rows, point, fresh)

    def _differentiate(self, rows: Tensor, point: Tensor, some: Tensor) -> None:
        """Flips and gradients at some places `(k,)` of the points. 1 F + 1 B each."""
        if not len(some):
            return
        hunt = self.hunt
        mine = rows[some]
        tape, flip = hunt.tape(point[some], mine)
        y = hunt.y[mine]
        uphill = tape.gradients(y, tape.strongest(y)[:, None])[:, 0]
        found = self._loss(mine, tape.logits, uphill)
        self.gradient[some] = torch.where(column(flip, found), 0.0, found)
        self.flipped[some] = flip

    def _loss(self, rows: Tensor, z: Tensor, uphill: Tensor) -> Tensor:
        """The gradient of the loss at logits `(k, K)` of these samples, from that of the margin."""
        scale = self.scale[rows]
        share = (-margin(z, self.hunt.y[rows]) / scale).sigmoid() / scale
        return -uphill * column(share, uphill)

    def move(self, k: int, rows: Tensor) -> Tensor:
        """The next points `(m, *shape)`, after iteration k.

        Args:
            k: iteration, from 0.
            rows: the samples `(m,)`.
        """
        hunt = self.hunt
        (x,) = take(rows, hunt.x)
        box = hunt.box(rows)
        width = hunt.width(rows)
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
            change = clip(x + proximal(change, hunt.norm, pull), box) - x
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
