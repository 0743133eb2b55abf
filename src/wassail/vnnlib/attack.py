"""Counterexamples by gradient: many starts in one batch, each for one clause of one box."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.vnnlib.unsafe import Group

STEPS = 30
FIRST = 0.25  # of a side: the first step
LEAST = 0.005  # and the last one
STARTS = 128  # of a clause on a box, where passes are cheap
LOOKED = 128  # points for each start on the sides of the box, of which it is the best
TOGETHER = 4096  # points in one batch
SHARE = 0.1  # of the effort


def attack(
    group: Group,
    accept: Callable[[Tensor], Tensor | None],
    work: float,
    seed: int,
    operations: float,
) -> Tensor | None:
    """A counterexample on the boxes of a group, or None.

    Every start goes down its clause's largest inequality by the sign of the gradient, in float32,
    with steps that shrink. Half of the starts are anywhere, half on sides of the box: the best of
    many points there, where a gradient may be 0 nearly everywhere else.

    Args:
        group: boxes and clauses, with one output for each clause.
        accept: given full points where a clause seems to hold, one that is a counterexample.
        work: operations that it may take.
        seed: of the random starts.
        operations: of one pass of one point.
    """
    boxes, sides = group.low.shape
    clauses = len(group.clauses)
    passes = work / (3 * operations * STEPS)
    starts = int(min(max(passes / (boxes * clauses), 1), STARTS))
    left = work - 3 * operations * STEPS * starts * boxes * clauses
    looked = int(min(max(left / (operations * starts * boxes * clauses), 1), LOOKED))
    model = copy.deepcopy(group.module).float()
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.cartesian_prod(torch.arange(boxes), torch.arange(clauses)).reshape(-1, 2)
    most = max(1, int(min(TOGETHER, passes, 3e8 / max(operations, 1))) // starts)
    for some in torch.split(pairs, most):
        clock.check()
        box, clause = some.repeat_interleave(starts, 0).T
        place = torch.rand(len(box), sides, generator=generator)
        on_sides = torch.arange(len(box)) % starts > starts // 2
        place[on_sides] = _best_sides(
            group, model, box[on_sides], clause[on_sides], generator, looked
        )
        place[::starts] = 0.5  # the first is the middle
        found = _descend(group, model, accept, box, clause, place)
        if found is not None:
            return found
    return None


def _best_sides(
    group: Group,
    model: torch.nn.Module,
    box: Tensor,
    clause: Tensor,
    generator: torch.Generator,
    looked: int,
) -> Tensor:
    """For each of some starts the best of so many points in the unit cube, of which a random share
    of the coordinates is at an end, `(m, n)`.
    """
    low, width = group.low[box].float(), (group.high - group.low)[box].float()
    best = torch.full((len(box),), -torch.inf)
    found = torch.zeros_like(low)
    for _ in range(looked if len(box) else 0):
        clock.look()
        place, chance = torch.rand(2, *low.shape, generator=generator)
        share = torch.rand(len(box), 1, generator=generator)
        place = torch.where(chance < share, place.round(), place)
        with torch.no_grad():
            value = model(low + width * place).gather(1, (clause + 1)[:, None])[:, 0]
        better = value > best
        best = torch.where(better, value, best)
        found = torch.where(better[:, None], place, found)
    return found


def _descend(
    group: Group,
    model: torch.nn.Module,
    accept: Callable[[Tensor], Tensor | None],
    box: Tensor,
    clause: Tensor,
    place: Tensor,
) -> Tensor | None:
    """Steps of one batch, `place` in the unit cube."""
    low, width = group.low[box], (group.high - group.low)[box]
    seen = 0
    for step in range(STEPS + 1):
        clock.look()
        u = (low + width * place.double()).clamp(low, group.high[box])
        leaf = u.float().requires_grad_(step < STEPS)
        with torch.enable_grad():
            z = model(leaf)
            excess = -z.gather(1, (clause + 1)[:, None])[:, 0]
        near = (z[:, 1:] >= 0).any(1).nonzero()[:, 0]
        if len(near) and (step % 10 == 0 or len(near) > 2 * seen):
            seen = len(near)
            depth = z[near, 1:].detach().amax(1)
            found = accept(group.full(u[near[depth.argsort(descending=True)]]))
            if found is not None:
                return found
        if step < STEPS:
            pull = torch.autograd.grad(excess.sum(), leaf)[0]
            size = FIRST * (LEAST / FIRST) ** (step / STEPS)
            place = (place - size * pull.sign()).clamp(0, 1)
    return None
