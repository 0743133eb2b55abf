"""PDPGD: primal-dual proximal gradient descent (Matyasko & Chau 2021, arXiv 2106.01538)."""

from __future__ import annotations

import math

import torch

from wassail.attacks.minimal.primal_dual import LOOK, PrimalDual
from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.errors import InputError
from wassail.progress import Tick

SEARCH = 10  # bisections of the nearest flip at the end


def pdpgd_engine(
    tracker: Tracker,
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
    if math.isfinite(tracker.passes):  # about one step in two takes a gradient
        steps = min(steps, max(2 * int(tracker.passes) // 3, 1))
    rows = tracker.rows
    rows = rows[tracker.affordable(rows, 2)]
    game = PrimalDual(tracker, rows, steps, step, fall, dual_step, ratio, inner)
    if len(rows):
        game.begin(rows)
    else:
        tracker.execute_gradients(1, 2)
    for k in range(steps):
        if not len(rows):
            break
        point = game.move(k, rows)
        enough = tracker.passes_left(rows) >= LOOK
        if k + 1 == steps:
            enough = torch.zeros_like(enough)
        end = (~enough & (tracker.passes_left(rows) >= 1)).nonzero()[:, 0]
        if len(end):
            tracker.logits(point[end], rows[end])
        keep = enough.nonzero()[:, 0]
        rows, point = take(keep, rows, point)
        game.take(keep)
        game.look(rows, point)
        tick((k + 1) / steps)
    tracker.shorten(tracker.rows, SEARCH)
