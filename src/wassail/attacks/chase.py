"""Our own engine: linearise the boundary, aim between the nearest point of it and the clean sample,
learn how boldly.

The nearest misclassified point solves `min ||z - x||_r` over the box subject to `theta_j(z) >=
theta_y(z)` for some rival j. Around an iterate `x_k` a rival's boundary is the plane `<w, z> = <w,
x_k> - f`, with `f = (theta_j - theta_y)(x_k)` and `w` its gradient, and the shortest step to a
plane inside a box is known exactly for every norm (`plane_step`). Two such steps matter (Croce &
Hein 2020, FAB): `d1` from the iterate, which keeps to where the linearisation is true, and `d2`
from the clean sample, which is where the answer would be if it were true everywhere (HLRF of
structural reliability). We move to

    x_{k+1} = (1 - a)(base + eta d1) + a (x + eta d2),        base = x + beta (x_k - x) where x_k is
    a flip, else x_k.

FAB caps `a` at 0.1, lets it vanish near the boundary, and keeps `eta`; here each sample learns
both: a flip makes the next step bolder (`a` up, `eta` down), a miss makes it more careful and
pushes harder. One forward and one backward pass serve an iteration: flip test, linearisation and
the next step.

Rivals are ordered by the exact length of their first step from the clean sample, not by their
logits. On a linear classifier that first step is the answer: one forward pass and K - 1 gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.device import take
from wassail.geometry import clip, column, inner, plane_step, project, steepest, vector_norm
from wassail.losses import strongest_rival
from wassail.network import generators
from wassail.progress import Tick
from wassail.ties import LOGITS, in_order, largest

CROSS = {1.0: 2.0, 2.0: math.inf}  # whose steps to follow where a norm's own gradients mislead
RIVALS = (
    10  # gradients at the sample: all rivals up to 11 classes, else those with the largest logits
)


def chase_engine(
    hunt: Hunt, tick: Tick, *, rounds: int = 4, seed: int = 0, begin: int = -1, topk: int = RIVALS
) -> None:
    """Hunt for the nearest flip by rounds; every round adds to what is known, so more passes never
    hurt.

    Opening: the first-order step of every rival, the nearest one chased, then what the first result
    calls for, the second rival, a polish of the best flip (about 100 passes for ten classes). Then
    rounds, each from somewhere else: a squeeze of the best flip, a start far beyond a boundary, the
    other rivals, random starts. The schedule never looks at the budget: a smaller one only cuts it
    short. A hunt that goes on with flips of its own skips the opening's chases and the rounds
    before `begin`, if that is not negative.

    Gradients at a sample mislead where the flip is not nearly as far as they promise: networks
    trained for linf hide their l2 and l1 flips behind saturated units. Such samples are chased by
    the steps of another norm (`CROSS`), which spread over more coordinates, and shortened in their
    own.

    topk: rivals whose gradient is taken at the sample, those with the largest logits; K - 1 makes
    linear classifiers exact.
    """
    hunt.anytime = True
    rows, rivals, steps = first_steps(hunt, topk)
    if not len(rows):
        return
    x = hunt.x[rows]
    count = rivals.shape[1]
    every = torch.arange(len(rows), device=rows.device)

    def ahead(rank: int, factor: float) -> Tensor:
        return clip(x + factor * steps[every, rank], hunt.domain)

    def misled() -> Tensor:
        """Whether the flip known is much nearer or farther than the first step said, or, for
        l2, there is none.
        """
        ratio = hunt.distance[rows] / vector_norm(steps[:, 0], hunt.norm).clamp(min=1e-30)
        if hunt.norm == 1:  # a sparse step often fails to flip for honest reasons
            return (ratio < 0.7) | ((ratio > 3) & torch.isfinite(ratio))
        return ((ratio < 0.75) | (ratio > 1.5)) & (hunt.norm == 2)

    if begin < 0:
        hunt.guess(rows, ahead(0, 1.0))
        chase(hunt, rows, ahead(0, 1.0), 6 if hunt.norm in CROSS else 18, rivals[:, 0])
        hunt.shorten(rows, 3, 0.5 if hunt.norm in CROSS else 0.85)
        wrongly = misled()
        led = wrongly.nonzero()[:, 0]
        kept = (~wrongly).nonzero()[:, 0]
        if len(led):
            some = rows[led]
            chase(hunt, some, ahead(0, 1.02)[led], 14, rivals[led, 0], aim=CROSS[hunt.norm])
            hunt.shorten(some, 5)
            chase(hunt, some, hunt.points[some], 12)
            polish(hunt, some, 8)
        if hunt.norm in CROSS:  # the others go on from where they are
            some = rows[kept]
            begun = torch.isfinite(hunt.distance[some])
            on = torch.where(column(begun, x[kept]), hunt.points[some], ahead(0, 1.5)[kept])
            chase(hunt, some, on, 12, rivals[kept, 0])
        if count > 1:
            chase(hunt, rows, ahead(1, 1.02), 8, rivals[:, 1])
        polish(hunt, rows, 8)
    for number in range(max(begin, 0), rounds - 1):
        if not len(hunt.able(rows, 1)):
            return
        tick(number / rounds)
        if number == 2:
            for rank in range(2, count):
                chase(hunt, rows, ahead(rank, 1.02), 10, rivals[:, rank])
        elif number % 4 == 1:
            # For l1 another norm's steps come first, for l2 every second time: there they only help
            # to get going.
            wrongly = misled() & ((number // 4) % 2 == int(hunt.norm == 2))
            led = wrongly.nonzero()[:, 0]
            kept = (~wrongly).nonzero()[:, 0]
            far = ahead((number // 4) % count, 2.5)
            chase(hunt, rows[kept], far[kept], 20)
            if len(led):
                chase(hunt, rows[led], far[led], 20, aim=CROSS[hunt.norm])
                hunt.shorten(rows[led], 4)
        elif number % 4 == 3 and number > 3:
            chase(hunt, rows, scatter(hunt, rows, seed, number), 15)
        else:
            squeeze(hunt, rows, 40)
            continue  # it ends at the boundary: nothing to polish
        polish(hunt, rows, 6)


def first_steps(hunt: Hunt, topk: int = RIVALS) -> tuple[Tensor, Tensor, Tensor]:
    """Rivals by the length of the exact step to their linearised boundary, nearest first, and those
    steps.

    Returns rows `(m,)`, rivals `(m, J)`, steps `(m, J, *shape)`. One backward pass a rival, on the
    clean pass's graph.
    """
    count = min(topk, hunt.clean.shape[1] - 1)
    rows = hunt.rows
    rows = rows[hunt.able(rows, count)]
    z = hunt.clean[rows]
    y = hunt.y[rows]
    x = hunt.x[rows]
    rivals = largest(z.scatter(1, y[:, None], -math.inf), count, band=LOGITS)
    if not len(rows):
        return rows, rivals, x[:, None]
    w = hunt.start.gradients(y, rivals, rows).flatten(0, 1)
    gap = (z.gather(1, y[:, None]) - z.gather(1, rivals)).flatten()
    # A flip must be wrong by the tolerance.
    need = hunt.network.need(z, rows, 4).repeat_interleave(count)
    step = plane_step(x.repeat_interleave(count, 0), w, gap + need, hunt.norm, hunt.domain)
    length = vector_norm(step, hunt.norm)
    unreached = inner(w, step) < gap * (
        1 - 1e-4
    )  # the box ends before the plane: such rivals come last
    order = in_order(torch.where(unreached, math.inf, length).reshape(-1, count), band=LOGITS)
    every = torch.arange(len(rows), device=rows.device)[:, None]
    return rows, rivals.gather(1, order), step.reshape(-1, count, *x.shape[1:])[every, order]


def chase(
    hunt: Hunt,
    rows: Tensor,
    start: Tensor,
    times: int,
    rivals: Tensor | None = None,
    beta: float = 0.85,
    eta: float = 1.05,
    aim: float | None = None,
) -> None:
    """`times` iterations from `start`, on one rival each `(m,)`, or on the strongest at the
    iterate. 1 F + 1 B each.
    """
    aim = hunt.norm if aim is None else aim
    current = start
    bold = torch.full((len(rows),), 0.3, dtype=start.dtype, device=start.device)
    push = torch.full_like(bold, eta)
    for k in range(times):
        keep = hunt.able(rows, 2)
        if rivals is not None:
            (rivals,) = take(keep, rivals)
        rows, current, bold, push = take(keep, rows, current, bold, push)
        if not len(rows):
            return
        tape, flip = hunt.tape(current, rows)
        z = tape.logits
        y = hunt.y[rows]
        x = hunt.x[rows]
        rival = strongest_rival(z, y)[1] if rivals is None else rivals
        w = tape.gradients(y, rival[:, None], torch.arange(len(rows), device=rows.device))[:, 0]
        f = (z.gather(1, rival[:, None]) - z.gather(1, y[:, None]))[:, 0]
        if k:
            bold = torch.where(flip, (1.15 * bold).clamp(max=0.5), (0.8 * bold).clamp(min=0.1))
            push = torch.where(flip, 1 + 0.8 * (push - 1), (1 + 1.5 * (push - 1)).clamp(max=2.0))
        base = torch.where(column(flip, x), x + beta * (current - x), current)
        gaps = torch.cat([inner(w, current - base) - f, inner(w, current - x) - f])
        d1, d2 = plane_step(torch.cat([base, x]), torch.cat([w, w]), gaps, aim, hunt.domain).chunk(
            2
        )
        a = column(bold, x)
        eta_ = column(push, x)
        current = clip((1 - a) * (base + eta_ * d1) + a * (x + eta_ * d2), hunt.domain)


def polish(hunt: Hunt, rows: Tensor, times: int) -> None:
    """Shorten the best flip, chase on from it with small pushes, shorten again."""
    rows = rows[torch.isfinite(hunt.distance[rows]).nonzero()[:, 0]]
    hunt.shorten(rows, 3, 0.9)
    chase(hunt, rows, hunt.points[rows], times, None, 0.95, 1.02)
    hunt.shorten(rows, 4, 0.96)


def squeeze(
    hunt: Hunt, rows: Tensor, times: int, tight: float = 0.998, length: float = 0.3
) -> None:
    """Climb the margin inside a ball a little smaller than the best flip's; each flip makes the
    ball smaller. 1 F + 1 B each.

    The other way to look at the same problem (FMN, Pintor et al. 2021; bisected APGD): steps of the
    dual maximiser with momentum, exact projections, and a step size that falls from `length` to a
    hundredth of it, in units of the radius.
    """
    rows = rows[torch.isfinite(hunt.distance[rows]).nonzero()[:, 0]]
    current = hunt.points[rows]
    velocity = torch.zeros_like(current)
    for k in range(times):
        rows, current, velocity = take(hunt.able(rows, 2), rows, current, velocity)
        if not len(rows):
            return
        radius = tight * hunt.distance[rows]
        current = project(current, hunt.x[rows], hunt.norm, radius, hunt.domain)
        tape, _ = hunt.tape(current, rows)
        y = hunt.y[rows]
        rival = strongest_rival(tape.logits, y)[1]
        w = tape.gradients(y, rival[:, None], torch.arange(len(rows), device=rows.device))[:, 0]
        size = column(radius * length * (0.01 + 0.99 * (1 + math.cos(math.pi * k / times)) / 2), w)
        move = steepest(current, w, hunt.norm, size.flatten(), hunt.domain)
        velocity = 0.75 * velocity + move if k else move
        current = current + velocity


def scatter(hunt: Hunt, rows: Tensor, seed: int, number: int) -> Tensor:
    """A random start for each sample, near the sphere of its best flip, keyed by (seed, the
    sample, number).
    """
    x = hunt.x[rows]
    draws = [
        torch.randn(x.shape[1:], dtype=x.dtype, generator=generator)
        for generator in generators(x, seed, number)
    ]
    v = torch.stack(draws).to(x.device)
    far = torch.where(torch.isfinite(hunt.distance[rows]), hunt.distance[rows], 1.0)
    v = v * column(far / vector_norm(v, hunt.norm).clamp(min=1e-12), v)
    best = torch.where(column(torch.isfinite(hunt.distance[rows]), x), hunt.points[rows], x)
    return project(best + v, x, hunt.norm, 1.5 * far, hunt.domain)
