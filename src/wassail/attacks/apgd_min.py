"""APGD (Croce & Hein 2020, https://arxiv.org/abs/2003.01690; l1: 2021, https://arxiv.org/abs/2103.01208) bisected to a nearest flip.

`apgd` climbs a loss inside a ball of a given radius for each sample; `apgd_engine` bisects that radius, per sample. Two things
differ from the reference, for the better: projections onto ball and box are exact, and a coordinate that stands at the wall it
is pushed against takes no share of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.errors import InputError, unknown
from wassail.geometry import column, maximiser, project, room, steepest, vector_norm
from wassail.losses import dlr, margin, strongest_rival
from wassail.network import Tick
from wassail.threat import Domain, dual

LOSSES = ("dlr", "margin", "targeted")
SEARCH = 10  # bisections of the nearest flip at the end

# Logits `(m, K)` of the samples `rows` `(m,)` -> the loss to raise, and the rival whose `theta_rival - theta_y` has its gradient.
# Only the direction counts, steps are normalised: so DLR's normaliser is constant, which saves it a second backward pass.
Objective: TypeAlias = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]


def apgd_engine(hunt: Hunt, tick: Tick, *, rounds: int = 10, steps: int = 20, loss: str = "dlr", rank: int = 2) -> None:
    """The nearest flip by bisection of APGD's radius, for each sample.

    Radii start at 1.5 times the first-order estimate `(theta_y - theta_j)(x) / ||grad (theta_y - theta_j)(x)||_s`, double
    until a round flips, then halve the bracket between the largest radius that failed and the nearest flip. A round starts
    at the nearest flip, or else the best point so far, projected onto its ball; the first at the steepest point of the ball.
    loss: "dlr", "margin" or "targeted", whose rival is the class with the `rank`-th largest clean logit (2: the runner-up).

    1 B for the estimate, then a round is `steps + 1` F and `steps` B at most and ends at a flip; 10 F to shorten the flip.
    """
    if rounds < 1 or steps < 1 or rank < 2:
        raise InputError(f"rounds is {rounds}, steps {steps}, rank {rank}: give at least 1, 1 and 2.")
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    objective = _objective(hunt, loss, rank)
    rows = hunt.rows
    rows = rows[hunt.afford(rows, 2)]  # a gradient without a pass to use it is wasted
    if not len(rows):
        return
    _, rival = objective(hunt.clean[rows], rows)
    gradient = hunt.start.gradients(hunt.y[rows], rival[:, None], rows)[:, 0]
    gap = hunt.clean[rows].gather(1, hunt.y[rows, None]) - hunt.clean[rows].gather(1, rival[:, None])
    radius = 1.5 * gap[:, 0] / vector_norm(gradient, dual(hunt.norm))
    able = torch.isfinite(radius)  # where the gradient is zero there is no direction to go
    rows, gradient, radius = rows[able], gradient[able], radius[able]
    limit = _reach(hunt, rows)
    low, radius = torch.zeros_like(radius), torch.minimum(radius, limit)
    point = hunt.x[rows] + steepest(hunt.x[rows], gradient, hunt.norm, radius, hunt.domain)
    for turn in range(rounds):
        known = torch.isfinite(hunt.distance[rows])
        point = _pick(known, hunt.points[rows], point)
        point = project(point, hunt.x[rows], hunt.norm, radius, hunt.domain)
        point, flipped = apgd(hunt, rows, point, radius, steps, objective, torch.where(known, SEARCH, 0))
        high = hunt.distance[rows]
        low = torch.where(flipped, low, radius)
        low = torch.where(low < high, low, 0.9 * high)  # a flip nearer than a radius that failed: look below it
        radius = torch.where(torch.isfinite(high), (low + high) / 2, torch.minimum(2 * radius, limit))
        tick((turn + 1) / rounds)
    hunt.shorten(hunt.rows, SEARCH)


def _objective(hunt: Hunt, loss: str, rank: int) -> Objective:
    if loss == "targeted":
        others = hunt.clean.scatter(1, hunt.y[:, None], -math.inf).argsort(1, descending=True)
        target = others[:, min(rank, hunt.clean.shape[1]) - 2]
        return lambda z, rows: (_targeted_dlr(z, hunt.y[rows], target[rows]), target[rows])
    value = dlr if loss == "dlr" else margin
    return lambda z, rows: (value(z, hunt.y[rows]), strongest_rival(z, hunt.y[rows])[1])


def _targeted_dlr(z: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """`(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2 + 1e-12)`, shape `(N,)`; without a fourth logit `z_t - z_y`."""
    gap = (z.gather(1, target[:, None]) - z.gather(1, y[:, None]))[:, 0]
    if z.shape[1] < 4:
        return gap
    top = z.topk(4, dim=1).values
    return gap / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)


def _reach(hunt: Hunt, rows: Tensor) -> Tensor:
    """The distance to the farthest point of the box, `(m,)`: a larger radius changes nothing."""
    x = hunt.x[rows]
    if hunt.domain is None:
        return torch.full_like(x.flatten(1)[:, 0], math.inf)
    return vector_norm(torch.maximum(hunt.domain[1] - x, x - hunt.domain[0]), hunt.norm)


@dataclass
class _Climb:
    """The samples still climbing: everything `(m,)` or `(m, *shape)`."""

    index: Tensor  # their places among the samples of the call
    point: Tensor
    previous: Tensor
    best: Tensor
    slope: Tensor  # gradient at `best`
    top: Tensor  # loss at `best`
    last: Tensor  # loss at the previous point
    size: Tensor  # step size
    ups: Tensor  # how often the loss rose since the last checkpoint
    seen: Tensor  # at the last checkpoint: `top`, or for l1 the number of coordinates that `best` moves
    halved: Tensor  # whether the last checkpoint cut the step size
    share: Tensor  # l1: share of the coordinates that a step moves

    def take(self, keep: Tensor) -> _Climb:
        return _Climb(*(getattr(self, field.name)[keep] for field in fields(self)))


def apgd(
    hunt: Hunt, rows: Tensor, start: Tensor, radius: Tensor, steps: int, objective: Objective, spare: Tensor
) -> tuple[Tensor, Tensor]:
    """APGD in balls of fixed radius: the best point by loss `(m, *shape)`, and which samples flipped, bool `(m,)`.

        u = Proj(x_k + size M_r(g_k)),   x_{k+1} = Proj(x_k + 0.75 (u - x_k) + 0.25 (x_k - x_{k-1})),

    size from `2 radius`; at checkpoints it is halved, back at the best point, if at most 3/4 of the steps since the last one
    raised the loss or if neither it was halved last time nor the best loss rose since. l1 has no momentum; its step goes along
    the signs of the largest entries of `g`, a fifth of them and then two thirds of what the best point moves, size from
    `radius`, back to it when the support shrank by 5 % and else a 1.5th, not below a tenth.

    rows: samples `(m,)`; start `(m, *shape)` in the balls; radius `(m,)`; spare: passes to leave to each, `(m,)`. A sample that
    flips stops there; the hunt has its flip. At most `steps + 1` F and `steps` B.
    """
    x, y, norm, domain = hunt.x[rows], hunt.y[rows], hunt.norm, hunt.domain
    best, flipped = start.clone(), torch.zeros(len(rows), dtype=torch.bool, device=x.device)
    zero = torch.zeros_like(radius)
    s = _Climb(
        torch.arange(len(rows), device=x.device), start, start, start, torch.zeros_like(start), top=zero - math.inf,
        last=zero + math.inf, size=radius if norm == 1 else 2 * radius, ups=zero, seen=zero - math.inf, halved=~flipped,
        share=zero + 0.2,
    )  # fmt: skip
    if norm == 1:
        s.seen = zero + x[0].numel() if len(x) else zero
    periods = _checkpoints(steps, norm)
    for step in range(steps + 1):
        s = s.take(hunt.left(rows[s.index]) >= 1 + spare[s.index])
        if not len(s.index):
            break
        tape, flip = hunt.tape(s.point, rows[s.index])
        value, rival = objective(tape.logits, rows[s.index])
        better = value > s.top
        s.top, s.best = torch.where(better, value, s.top), _pick(better, s.point, s.best)
        s.ups, s.last = s.ups + (value > s.last), value
        best[s.index], flipped[s.index] = s.best, flip
        keep = (~flip & (hunt.left(rows[s.index]) >= 2 + spare[s.index])).nonzero()[:, 0]
        if step == steps or not len(keep):
            break
        gradient = tape.gradients(y[s.index[keep]], rival[keep, None], keep)[:, 0]
        s = s.take(keep)
        s.slope = _pick(better[keep], gradient, s.slope)
        center, limit = x[s.index], radius[s.index]
        if step in periods:
            back = _shrink_l1(s, center, limit) if norm == 1 else _halve(s, periods[step])
            s.point, gradient = _pick(back, s.best, s.point), _pick(back, s.slope, gradient)
        ahead = s.point + column(s.size, x) * _direction(s.point, gradient, norm, domain, s.share)
        ahead = project(ahead, center, norm, limit, domain)
        if norm != 1 and step > 0:
            ahead = s.point + 0.75 * (ahead - s.point) + 0.25 * (s.point - s.previous)
            ahead = project(ahead, center, norm, limit, domain)
        s.previous, s.point = s.point, ahead
    return best, flipped


def _checkpoints(steps: int, norm: float) -> dict[int, int]:
    """After which steps the step size is looked at, and how many steps after the last time."""
    shares = (0.04, 0.0, 0.0) if norm == 1 else (0.22, 0.03, 0.06)
    period, shrink, least = (max(int(share * steps), 1) for share in shares)
    if norm == 1:
        shrink, least = 0, period
    at, found = period, {}
    while at < steps:
        found[at] = period
        period = max(period - shrink, least)
        at += period
    return found


def _halve(s: _Climb, period: int) -> Tensor:
    """Halve the step sizes that are too large; which samples go back to their best point, bool `(m,)`."""
    back = (s.ups <= 0.75 * period) | (~s.halved & (s.seen >= s.top))
    s.size, s.halved, s.seen, s.ups = torch.where(back, s.size / 2, s.size), back, s.top, torch.zeros_like(s.ups)
    return back


def _shrink_l1(s: _Climb, center: Tensor, radius: Tensor) -> Tensor:
    """The l1 rule for step size and sparsity; which samples go back to their best point, bool `(m,)`."""
    support = (s.best != center).flatten(1).sum(1).to(radius.dtype)
    back = support < 0.95 * s.seen
    s.size = torch.where(back, radius, torch.maximum(s.size / 1.5, radius / 10))
    s.seen, s.share = support, support / (1.5 * center[0].numel())
    return back


def _direction(point: Tensor, g: Tensor, norm: float, domain: Domain, share: Tensor) -> Tensor:
    """The direction of a step, of norm 1: `M_r(g)`, for l1 the signs of the largest `share` `(m,)` of the entries of `g`."""
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
