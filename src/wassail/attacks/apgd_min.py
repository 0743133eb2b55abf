"""APGD (Croce & Hein 2020, arXiv 2003.01690; for l1 2021, arXiv 2103.01208) and its bisection to a nearest flip.

`apgd` raises a loss inside a ball of given radius around each sample; `apgd_engine` bisects the radius, per sample. Two things
differ from the reference, both for the better: projections onto ball and box together are exact, and a coordinate that
already stands at the wall it is pushed against takes no share of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.attacks.walk import top_rivals
from wassail.errors import InputError, unknown
from wassail.geometry import column, maximiser, project, room, steepest, vector_norm
from wassail.losses import dlr, margin, strongest_rival
from wassail.network import Tick
from wassail.threat import Domain, dual

LOSSES = ("dlr", "margin", "targeted")
QUICK, SEARCH = 5, 10  # bisections of a flip: after the round that found it, and at the end

# Logits `(m, K)` at points of the samples `rows` `(m,)` -> the loss to raise `(m,)`, and the rival class `(m,)` for which
# `theta_rival - theta_y` has the direction of its gradient. DLR's normaliser is taken as constant, to stay at one backward
# pass; what is left of it does not matter to the normalised steps, only to which point is the best.
Objective: TypeAlias = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]


def apgd_engine(hunt: Hunt, tick: Tick, *, rounds: int = 10, steps: int = 20, loss: str = "dlr", rank: int = 2) -> None:
    """The nearest flip by bisection of APGD's radius, for each sample.

    The radius starts at 1.5 times the first-order estimate `(theta_y - theta_j) / ||grad (theta_y - theta_j)||_s` at the
    sample, doubles until a round flips, then halves the bracket between the largest radius that failed and the nearest flip.
    A round starts at the nearest flip, projected onto its ball; before there is one, where the gradient at the sample points
    (going on from the best point of a ball that failed left one sample in six of an MNIST network unflipped).
    loss: "dlr", "margin" or "targeted", whose rival is the class with the `rank`-th largest clean logit (2: the runner-up).

    1 B for the estimate, `steps + 1` F and `steps` B a round at most, less where it flips, 5 F after a flip and 10 at the end.
    With few passes the rounds are shortened rather than left out.
    """
    if rounds < 1 or steps < 1 or rank < 2:
        raise InputError(f"rounds is {rounds}, steps is {steps}, rank is {rank}: give at least 1, 1 and 2.")
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    if math.isfinite(hunt.passes):
        steps = min(steps, max(int(hunt.passes) // (2 * rounds), 2))
    objective = _objective(hunt, loss, rank)
    rows = hunt.rows
    rows = rows[hunt.afford(rows, 2)]  # a gradient without a pass to use it would be wasted
    if not len(rows):
        return
    z, y = hunt.clean[rows], hunt.y[rows]
    rival = objective(z, rows)[1][:, None]
    gradient = hunt.start.gradients(y, rival, rows)[:, 0]
    gap = (z.gather(1, y[:, None]) - z.gather(1, rival))[:, 0]
    radius = (1.5 * gap / vector_norm(gradient.double(), dual(hunt.norm))).to(hunt.x.dtype)
    able = torch.isfinite(radius)  # where the gradient is zero there is no direction to go
    rows, gradient, x = rows[able], gradient[able], hunt.x[rows[able]]
    limit = _reach(x, hunt.norm, hunt.domain)
    radius, tried, low, best = torch.minimum(radius[able], limit), torch.zeros_like(limit), torch.zeros_like(limit), x
    radius = torch.where(radius < hunt.distance[rows], radius, hunt.distance[rows] / 2)  # a hunt may begin with flips
    for turn in range(rounds):
        keep = hunt.afford(rows, 1)
        rows, x, gradient, limit, radius, tried, low, best = (
            t[keep] for t in (rows, x, gradient, limit, radius, tried, low, best)
        )
        if not len(rows):
            break
        known = torch.isfinite(hunt.distance[rows])
        fresh = x + steepest(x, gradient, hunt.norm, radius, hunt.domain)
        start = _pick(known, hunt.points[rows], _pick(radius > tried, fresh, best))
        best, flipped = apgd(hunt, rows, project(start, x, hunt.norm, radius, hunt.domain), radius, steps, objective)
        hunt.shorten(rows[flipped], QUICK)
        high, tried = hunt.distance[rows], radius
        # A radius that failed before the first flip says little: that round had no flip to start from.
        low = torch.where(known & ~flipped, radius, low)
        low = torch.where(low < high, low, 0.9 * high)  # a flip nearer than a radius that failed: look below it
        radius = torch.where(torch.isfinite(high), (low + high) / 2, torch.minimum(2 * radius, limit))
        tick((turn + 1) / rounds)
    hunt.shorten(hunt.rows, SEARCH)


def _objective(hunt: Hunt, loss: str, rank: int) -> Objective:
    if loss == "targeted":
        target = top_rivals(hunt.clean, hunt.y, rank - 1)[:, -1]  # the weakest class if there are not that many
        return lambda z, rows: (_targeted_dlr(z, hunt.y[rows], target[rows]), target[rows])
    value = dlr if loss == "dlr" else margin
    return lambda z, rows: (value(z, hunt.y[rows]), strongest_rival(z, hunt.y[rows])[1])


def _targeted_dlr(z: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """`(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2 + 1e-12)`, shape `(N,)`; with fewer than four classes `z_t - z_y`."""
    gap = (z.gather(1, target[:, None]) - z.gather(1, y[:, None]))[:, 0]
    if z.shape[1] < 4:
        return gap
    top = z.topk(4, dim=1).values
    return gap / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)


def _reach(x: Tensor, norm: float, domain: Domain) -> Tensor:
    """The distance to the farthest point of the box, `(N,)`: a larger radius changes nothing."""
    if domain is None:
        return torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
    return vector_norm(torch.maximum(domain[1] - x, x - domain[0]), norm)


@dataclass
class _Climb:
    """The samples still climbing: every field is `(m,)` or `(m, *shape)`."""

    index: Tensor  # their places among the samples of the call
    point: Tensor
    previous: Tensor
    best: Tensor
    slope: Tensor  # gradient at `best`
    top: Tensor  # loss at `best`
    last: Tensor  # loss at `previous`
    size: Tensor  # step size
    rises: Tensor  # how often the loss rose since the last checkpoint
    seen: Tensor  # at the last checkpoint: `top`, or for l1 the number of coordinates that `best` moves
    halved: Tensor  # whether the last checkpoint cut the step size
    share: Tensor  # l1: share of the coordinates that a step moves

    def take(self, keep: Tensor) -> _Climb:
        return _Climb(*(getattr(self, field.name)[keep] for field in fields(self)))


def apgd(hunt: Hunt, rows: Tensor, start: Tensor, radius: Tensor, steps: int, objective: Objective) -> tuple[Tensor, Tensor]:
    """APGD in balls of fixed radius: the best point by loss `(m, *shape)`, and which samples flipped, bool `(m,)`.

        u = Proj(x_k + size M_r(g_k)),   x_{k+1} = Proj(x_k + 0.75 (u - x_k) + 0.25 (x_k - x_{k-1})),

    size from `2 radius`. At checkpoints it is halved and the climb goes back to its best point, if at most 3/4 of the steps
    since the last checkpoint raised the loss, or if the last one did not halve it and the best loss has not risen since.
    For l1 there is no momentum and the step follows the signs of the largest entries of `g`: two thirds as many as the
    coordinates that the best point moves (a fifth of all if the start is the sample). Its size starts at `radius`, is reset
    to it, back at the best point, when the best point became sparser by 5 %, else cut by 1.5, down to a tenth.

    rows: samples `(m,)`; start `(m, *shape)` and radius `(m,)`: the start must lie in the ball. A sample that flips stops at
    once; the hunt has the flip. `steps + 1` F and `steps` B at most; who runs out of passes stops.
    """
    x, norm, domain = hunt.x[rows], hunt.norm, hunt.domain
    best, flipped = start.clone(), torch.zeros(len(rows), dtype=torch.bool, device=x.device)
    zero, never = torch.zeros_like(radius), torch.full_like(radius, -math.inf)
    s = _Climb(
        torch.arange(len(rows), device=x.device), start, start, start, torch.zeros_like(start), never, -never, 2 * radius,
        zero, seen=never, halved=~flipped, share=zero,
    )  # fmt: skip
    if norm == 1:
        moved, everything = _support(start, x), max(x[:1].numel(), 1)
        s.size, s.seen = radius, torch.where(moved > 0, moved, everything)
        s.share = torch.where(moved > 0, moved / (1.5 * everything), 0.2)
    periods = _checkpoints(steps, norm)
    for step in range(steps + 1):
        s = s.take(hunt.afford(rows[s.index], 1))
        if not len(s.index):
            break
        tape, flip = hunt.tape(s.point, rows[s.index])
        value, rival = objective(tape.logits, rows[s.index])
        better = value > s.top
        s.top, s.best = torch.where(better, value, s.top), _pick(better, s.point, s.best)
        s.rises, s.last = s.rises + (value > s.last), value
        best[s.index], flipped[s.index] = s.best, flip
        keep = (~flip & hunt.afford(rows[s.index], 2)).nonzero()[:, 0]  # the gradient, and a look at where it leads
        if step == steps or not len(keep):
            break
        gradient = tape.gradients(hunt.y[rows[s.index[keep]]], rival[keep, None], keep)[:, 0]
        s = s.take(keep)
        s.slope = _pick(better[keep], gradient, s.slope)
        center, limit = x[s.index], radius[s.index]
        if step in periods:
            back = _check_l1(s, center, limit) if norm == 1 else _check(s, periods[step])
            s.point, gradient = _pick(back, s.best, s.point), _pick(back, s.slope, gradient)
        ahead = s.point + column(s.size, x) * _direction(s.point, gradient, norm, domain, s.share)
        ahead = project(ahead, center, norm, limit, domain)
        if norm != 1 and step > 0:
            ahead = s.point + 0.75 * (ahead - s.point) + 0.25 * (s.point - s.previous)
            ahead = project(ahead, center, norm, limit, domain)
        s.previous, s.point = s.point, ahead
    return best, flipped


def _checkpoints(steps: int, norm: float) -> dict[int, int]:
    """After which steps the step size is looked at, and how many steps that is after the last time."""
    if norm == 1:
        period = max(int(0.04 * steps), 1)
        return dict.fromkeys(range(period, steps, period), period)
    period, shrink, least = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    at, found = period, {}
    while at < steps:
        found[at] = period
        period = max(period - shrink, least)
        at += period
    return found


def _check(s: _Climb, period: int) -> Tensor:
    """Halve the step sizes that are too large; which samples go back to their best point, bool `(m,)`."""
    back = (s.rises <= 0.75 * period) | (~s.halved & (s.seen >= s.top))
    s.size, s.halved, s.seen, s.rises = torch.where(back, s.size / 2, s.size), back, s.top, torch.zeros_like(s.rises)
    return back


def _check_l1(s: _Climb, center: Tensor, radius: Tensor) -> Tensor:
    """The l1 rule for step size and sparsity; which samples go back to their best point, bool `(m,)`."""
    moved = _support(s.best, center)
    back = moved < 0.95 * s.seen
    s.size = torch.where(back, radius, torch.maximum(s.size / 1.5, radius / 10))
    s.seen, s.share = moved, moved / (1.5 * center[0].numel())
    return back


def _support(point: Tensor, center: Tensor) -> Tensor:
    """The number of coordinates that differ, `(m,)`."""
    return (point != center).flatten(1).sum(1).to(point.dtype)


def _direction(point: Tensor, g: Tensor, norm: float, domain: Domain, share: Tensor) -> Tensor:
    """A step of norm 1, shape of `point`: `M_r(g)`, for l1 the signs of the largest `share` `(m,)` of the entries of `g`."""
    g = torch.where(room(point, g, domain) > 0, g, 0)
    if norm != 1:
        return maximiser(g, norm)
    size = g.abs().flatten(1)
    count = (share * size.shape[1]).long().clamp(1, size.shape[1])
    least = size.topk(int(count.max()), dim=1).values.gather(1, count[:, None] - 1)
    sign = torch.where(size >= least, g.sign().flatten(1), 0)
    return (sign / sign.abs().sum(1, keepdim=True).clamp(min=1)).reshape(g.shape)


def _pick(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`yes` for the samples where `mask` `(m,)` holds, else `no`, both `(m, *shape)`."""
    return torch.where(mask.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)
