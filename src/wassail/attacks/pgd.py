"""PGD, projected gradient ascent from a random start (Madry et al., ICLR 2018, arXiv
1706.06083).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.best import Best
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import objective, pointwise
from wassail.attacks.pointwise import random_start as random_point
from wassail.device import take
from wassail.errors import InputError
from wassail.geometry import blocked, maximiser, project, steepest
from wassail.network import Model, Tape
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Domain, Threat
from wassail.transport.distribution import Distribution


def pgd(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    loss: str = "ce",
    steps: int = 40,
    step: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    target: Tensor | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """Fixed steps of steepest ascent on the loss, projected onto every sample's ball of radius eps
    and the box.

        x_{k+1} = Proj(x_k + step M_r(g_k)),   g_k = grad L(theta(x_k), y),   M_r(g) = argmax { <g,
        u> : ||u||_r <= 1 }:

    `sign(g)` for linf, `g / ||g||_2` for l2, for l1 the coordinate with the largest slope (and the
    next ones, where the box stops it). The projection onto ball and box together is exact. A sample
    that flips stops at once; one that does not keeps the best of its iterates by loss.

    Madry et al. (2018). Per restart and sample `steps + 1` F and `steps` B at most, after 1 F at
    the sample, which is the first of them where the start is not random.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        loss: "ce" (the default), "dlr" or "margin".
        steps: int, gradient steps of each run; default 40, as in the paper.
        step: float, length of a step in units of x; default None, the paper's `2.5 eps / steps`,
            with which every point of the ball can be reached from every other.
        restarts: int, runs from other random points, for samples still right; default 1.
        random_start: bool; False starts at the sample itself; default True.
        target: classes to be reached, integer tensor `(N,)`; default None, any wrong class; with
            targets their loss is lowered instead.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, keys the random draws together with each sample's content; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
    """
    options = {
        "loss": loss,
        "steps": steps,
        "step": step,
        "restarts": restarts,
        "random_start": random_start,
    }
    return pointwise(
        pgd_attack,
        "pgd",
        model,
        x,
        y,
        threat,
        target=target,
        mu=mu,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        graph=not random_start,
        options={**options, "seed": seed},
    )


def pgd_attack(
    tracker: Tracker,
    tick: Tick,
    *,
    loss: str = "ce",
    steps: int = 40,
    step: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    seed: int = 0,
) -> None:
    """`restarts` ascents of the samples that still stand; see `pgd`."""
    if min(steps, restarts) < 1:
        raise InputError(f"steps={steps}, restarts={restarts}: both must be at least 1.")
    if restarts > 1 and not random_start:
        raise InputError(
            "restarts without a random start would all be the same: use random_start=True or "
            "restarts=1."
        )
    size = 2.5 * tracker.radius / steps if step is None else step
    if not 0 < size < math.inf:
        raise InputError(
            f"step is {step!r}: give a positive step size, or None for 2.5 eps / steps."
        )
    goal, (norm, radius) = objective(tracker, loss), (tracker.norm, tracker.radius)
    # by loss, over all restarts
    best = Best(tracker.x, torch.full_like(tracker.clean[:, 0], -math.inf))
    for turn in range(restarts):
        rows = tracker.rows
        if not len(rows):
            if not random_start:
                tracker.execute_gradients(1, 1)
            break
        if random_start:
            tape, keep, rows, point = _look(
                tracker, random_point(tracker, rows, radius, seed, turn), rows
            )
        else:
            tape = tracker.start
            keep = rows
            point = tracker.x[rows]
        for k in range(steps + 1):
            value, weight = goal(tape.logits[keep], rows)
            best.offer(point, value, rows)
            if k == steps:
                break
            gradient = tape.pull(weight, keep)
            if not len(rows):
                break
            domain = tracker.box(rows)
            ahead = point + _step(point, gradient, norm, size, domain)
            tape, keep, rows, point = _look(
                tracker, project(ahead, tracker.x[rows], norm, radius, domain), rows
            )
            tick((turn + (k + 1) / steps) / restarts)
    rows = tracker.rows
    tracker.guess(rows, best.points[rows])


def _look(tracker: Tracker, point: Tensor, rows: Tensor) -> tuple[Tape, Tensor, Tensor, Tensor]:
    """Evaluate points of these samples: the tape, where it holds those that still stand, their
    rows and their points.
    """
    tape, _ = tracker.tape(point, rows)
    keep = tracker.unflipped(rows).nonzero()[:, 0]
    rows, point = take(keep, rows, point)
    return tape, keep, rows, point


def _step(point: Tensor, g: Tensor, norm: float, size: float, domain: Domain) -> Tensor:
    """The steepest step of length `size`, shape of `point`; it may leave the box, the projection
    brings it back.

    For l2 a coordinate at the wall that it is pushed against takes no share, for l1 the box stops
    the step.
    """
    if norm == 1:
        return steepest(point, g, norm, size, domain)
    if norm == 2 and domain is not None:
        g = g.masked_fill(blocked(point, g, domain), 0)
    return size * maximiser(g, norm)
