"""Balls of the three norms cut by a box, one for each sample: support functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates.device import HOST
from wassail.certificates.graph.support import fill_one
from wassail.certificates.relax.rows import Span, of_owner, of_owners, rounded_up, row_dot
from wassail.geometry import fill
from wassail.rounding import FLOOR, UNIT
from wassail.threat import Domain, boxes_of, dual
from wassail.ties import firm, loud


@dataclass(frozen=True, eq=False)
class Targets:
    """What the outputs of a network are for each of N samples, beside what the network says.

    Args:
        offsets: added to the outputs, float64 `(N, K)`; 0 for output 0, which is the label.
        matters: which outputs are rivals, bool `(N, K)`.
    """

    offsets: Tensor
    matters: Tensor

    def take(self, rows: Tensor) -> Targets:
        """Those of some samples."""
        return Targets(self.offsets[rows], self.matters[rows])


@dataclass(frozen=True, eq=False)
class Balls:
    """N regions `{x + d : ||d||_r <= radius, -below <= d <= above}`, flat, float64: x, below,
    above `(N, n)`, radius `(N,)`. targets: of a specification, None for labels.
    """

    x: Tensor
    radius: Tensor
    norm: float
    below: Tensor
    above: Tensor
    targets: Targets | None = field(default=None, kw_only=True)

    @classmethod
    def make(
        cls,
        x: Tensor,
        radius: Tensor,
        norm: float,
        domain: Domain,
        targets: Targets | None = None,
    ) -> Balls:
        """Around samples `(N, *shape)`, cut by a box or not. The room to the walls is rounded
        up.
        """
        flat = x.detach().double().flatten(1)
        walls: tuple[Any, Any] = domain if domain is not None else (-math.inf, math.inf)
        own = boxes_of(domain)
        if own is not None:
            sides = own.fit(x).flat()
            walls = (sides.low.to(flat.device), sides.high.to(flat.device))
        low, high = walls
        return cls(
            flat,
            radius.to(flat.device).double(),
            norm,
            *(torch.where(side > 0, rounded_up(side), 0.0) for side in (flat - low, high - flat)),
            targets=targets,
        )

    @property
    def box(self) -> Span:
        """The smallest box around each, as deviations `(N, n)`."""
        return -torch.minimum(self.below, self.radius[:, None]), torch.minimum(
            self.above, self.radius[:, None]
        )

    def take(self, rows: Tensor) -> Balls:
        """Those of some samples."""
        return replace(
            self,
            x=self.x[rows],
            radius=self.radius[rows],
            below=self.below[rows],
            above=self.above[rows],
            targets=None if self.targets is None else self.targets.take(rows),
        )

    def reordered(self, order: Tensor) -> Balls:
        """The same balls with their coordinates in another order."""
        return replace(
            self, x=self.x[:, order], below=self.below[:, order], above=self.above[:, order]
        )

    @cached_property
    def halves(self) -> Span:
        """Middle and half width of the box, as `row_dot` takes them: its roundings are paid for."""
        low, high = self.box
        middle = (low + high) / 2
        reach = (high - low) / 2
        return middle, reach + (middle.shape[1] + 8) * UNIT * (middle.abs() + reach)

    @cached_property
    def _near(self) -> Span:
        """The halves in float32, rounded anyhow."""
        middle, reach = self.halves
        return middle.float(), reach.float()

    @cached_property
    def _sides(self) -> Span:
        """How far down and up each coordinate goes, at least 0, in float32, rounded anyhow: finite
        without walls, too.
        """
        low, high = self.box
        return -low.float(), high.float()

    @cached_property
    def _ways(self) -> Span:
        """Infinite where the box leaves a way down, and a way up, else 0, `(N, n)` each."""
        down, up = (
            torch.where(side > 0, math.inf, 0.0).to(torch.float32)
            for side in (self.below, self.above)
        )
        return -down, up

    def across(self, a: Tensor, owner: Tensor, spent: bool = False) -> Span:
        """`<a, d>` lies in middle +- spread, `(R,)` each in float64, rounded up: by the box, or by
        the ball and its open ways.

        For screening, a in float32: walls that are near, but not touched by the sample, do not
        count for r = 1 and 2. spent: whether a may be written over.
        """
        if self.norm == math.inf:
            middle, reach = of_owners(self.halves, owner)
            spent = spent or a.dtype != torch.float64  # else it is a copy
            a = a.double()
            shift = row_dot(a, middle)
            return shift, row_dot(a.abs_() if spent and a.is_contiguous() else a.abs(), reach)
        low, high = (side.to(a.dtype) for side in of_owners(self._ways, owner))
        sides = (torch.clamp(a, low, high), torch.clamp(a, -high, -low))
        if self.norm == 1:
            top, bottom = (side.abs().amax(1).double() for side in sides)
        else:
            slack = 1 + (a.shape[1] + 8) * UNIT
            lost = a.shape[1] * FLOOR[torch.float64]  # squares that underflow
            top, bottom = ((side.double().square().sum(1) + lost).sqrt() * slack for side in sides)
        radius = self.radius[owner]
        top = radius * top
        bottom = radius * bottom
        return (top - bottom) / 2, (top + bottom) / 2 * (1 + 4 * UNIT)

    def reach(self, a: Tensor, owner: Tensor) -> Tensor:
        """`|<a, d>|` is at most this on ball `owner`, rounded up; quick: of the box only for r
        = inf. `(R, n) -> (R,)`.
        """
        slack = 1 + (a.shape[1] + 8) * UNIT
        if self.norm == math.inf:
            low, high = self.box
            return row_dot(a.abs(), of_owner(torch.maximum(-low, high), owner)) * slack
        return self.radius[owner] * rounding.length(a, dual(self.norm), 1) * slack

    def stretch(self, a: Tensor) -> Span:
        """`||A d - A d_mid||_2` over each ball is at most the second, rounded up, `(N, T, g, n) ->
        (N, T)`; first: `A d_mid`.

        d_mid: the middle of the box for r = inf, else 0. r = 2: the spectral norm. r = 1: the
        longest column. r = inf: `max ||B s||^2` over `|s| <= 1` is at most `tr(D) lambda_max(B D^-1
        B^T)` for every diagonal D > 0; here D has the lengths of the columns, which is exact for
        matrices of rank 1.
        """
        low, high = self.box
        open_ = ((self.below > 0) | (self.above > 0))[:, None, None]
        middle = ((low + high) / 2 if self.norm == math.inf else torch.zeros_like(low))[:, None]
        start = (a @ middle[..., None])[..., 0]
        width = (high - low)[:, None, None] / 2 if self.norm == math.inf else open_.double()
        b = a * width
        columns = rounding.length(b, 2, 2)
        radius = self.radius[:, None]
        slack = (b.shape[3] + b.shape[2] + 16) * 2 * UNIT
        if self.norm == 1:
            return start, radius * columns.amax(2) * (1 + slack)
        weight = (
            columns[:, :, None] if self.norm == math.inf else torch.ones_like(columns[:, :, None])
        )
        gram = torch.where(weight > 0, b / torch.where(weight > 0, weight, 1.0), 0.0) @ b.mT
        known = torch.isfinite(gram).flatten(2).all(2)  # not after an overflow
        gram = torch.where(known[:, :, None, None], gram, 0.0)
        trace = gram.diagonal(dim1=2, dim2=3).sum(2)
        lost = b.shape[2] * b.shape[3] * FLOOR[torch.float64]  # products that underflow
        # The trace is at least the largest eigenvalue: its slack pays for the square root and the
        # products after it, too.
        top = (
            torch.linalg.eigvalsh((gram + gram.mT) / 2)[..., -1].clamp(min=0) + slack * trace + lost
        )
        total = columns.sum(2) if self.norm == math.inf else radius.square()
        return start, torch.where(known, (total * top).sqrt(), math.inf)

    def support(self, a: Tensor, owner: Tensor) -> Tensor:
        """`sup <a, d>` over ball `owner` for an ascent, `(R, n) -> (R,)`: as `upper`, but rounded
        anyhow. It proves nothing. In linf it is summed in float32.
        """
        if self.norm != math.inf:
            return self.upper(a, owner)
        middle, reach = of_owners(self._near, owner)
        return row_dot(a, middle) + row_dot(a.abs(), reach)

    def worst(self, a: Tensor, owner: Tensor) -> Span:
        """`support`, and its gradient: the deviation that reaches it, `(R,)` and `(R, n)`; 0
        where a coefficient is 0 but for rounding (see `ties.firm`).
        """
        if self.norm == math.inf:
            middle, reach = of_owners(self._near, owner)
            positive, negative = loud(a)
            point = positive * (middle + reach)
            return self.support(a, owner), torch.addcmul(point, negative, middle - reach)
        if self.norm == 2:
            positive, negative = loud(a)
            down, up = of_owners(self._sides, owner)
            room = torch.addcmul(positive * up, negative, down)
            radius = self.radius[owner].to(a.dtype).expand(len(a))
            size = a.abs()
            point = _farthest(size, room, radius)
            return (size * point).sum(1, dtype=torch.float64), point * a.sign()
        with torch.enable_grad():
            leaf = a.detach().requires_grad_(True)
            value = self.upper(firm(leaf), owner)
            point = torch.autograd.grad(value.sum(), leaf)[0]
        return value.detach(), point

    def upper(self, a: Tensor, owner: Tensor, spent: bool = False) -> Tensor:
        """`sup <a, d>` over ball `owner` for rows `a` `(R, n)`: `(R,)` in float64, rounded up,
        exact up to that. spent: whether a may be written over.

        The box alone where r = inf. For r = 1 and 2 by weak duality, `min_lam lam radius + sum_i
        max { |a_i| t - lam t : 0 <= t <= room_i }` (squares for r = 2): any lam gives a bound, the
        one that fills the ball gives the value.
        """
        if self.norm == math.inf:
            middle, spread = self.across(a, owner, spent)  # spread: rounded up for both
            return middle + spread
        if self.norm == 2:
            return self.round_.upper(a, owner)
        a = a.double()
        radius = self.radius[owner].expand(len(a))
        above, below = of_owners((self.above, self.below), owner)
        room = torch.minimum(torch.where(a > 0, above, below), radius[:, None])
        return fill_one(a.abs(), room, radius) * (1 + (a.shape[1] + 8) * UNIT)

    @cached_property
    def round_(self) -> CutBalls:
        """The l2 balls, as `upper` takes them."""
        return CutBalls.make(self.below, self.above, self.radius)


@dataclass(frozen=True, eq=False)
class CutBalls:
    """M balls `{||d||_2 <= radius, -below <= d <= above}`, for `sup <a, d>`.

    An entry counts as near if a wall is closer to it than the radius, and leaves it some way. On
    the ball no other entry meets a wall that it does not touch from the start.

    low, high: infinite where an entry that is not near may go down or up, else 0, `(M, n)`; where:
    the near entries, `(M, k)`, filled up with others; counts: how many there are, `(M,)`; down, up:
    their room, `(M, k)`, 0 for those that fill up. On a device, which is not asked how many are
    near, all entries count as near.
    """

    radius: Tensor
    low: Tensor
    high: Tensor
    where: Tensor
    counts: Tensor
    down: Tensor
    up: Tensor

    @classmethod
    def make(cls, below: Tensor, above: Tensor, radius: Tensor) -> CutBalls:
        """Of the room to the walls, `(M, n)` each, and the radii, `(M,)`."""
        wide = radius[:, None]
        down = torch.minimum(below, wide)
        up = torch.minimum(above, wide)
        near = ((down > 0) & (down < wide)) | ((up > 0) & (up < wide))
        if near.device != HOST:
            near = torch.ones_like(near)
        low, high = (
            torch.where((side > 0) & ~near, math.inf, 0.0).to(torch.float32) for side in (down, up)
        )
        counts = near.sum(1)
        where, real = _places(near, counts)
        down, up = (torch.where(real, side.gather(1, where), 0.0) for side in (down, up))
        return cls(radius, -low, high, where, counts, down, up)

    def upper(self, a: Tensor, owner: Tensor) -> Tensor:
        """`sup <a, d>` over ball `owner` for rows `a` `(R, n)`: `(R,)` in float64, rounded up.

        With `s = |a|` and any t > 0 it is at most `r^2 / (2 t) + sum_i max { s_i d - d^2 / (2 t) }`
        over `0 <= d <= room_i`. Entries that are not near add `t s_i^2 / 2`, as if they had no
        wall.
        """
        low, high = of_owners((self.low, self.high), owner)
        rest = torch.clamp(a, low.to(a.dtype), high.to(a.dtype))
        squares = _squares(rest)
        s, room = self._near(a, owner)
        radius = self.radius[owner].expand(len(a))
        with torch.no_grad():
            t = filling_step(s, room, squares, radius)
        step = torch.minimum(s * t[:, None], room)
        gain = (step * torch.addcmul(s, step, (0.5 / t)[:, None], value=-1)).sum(1)
        # Not radius^2, which may underflow.
        value = (radius / t * radius + t * squares) / 2 + gain
        # Squares of rows as short as that, and products with such radii, may underflow.
        short = ~(squares + _squares(s) > SHORT_SQUARE) | (radius < SHORT_RADIUS)
        if short.device != HOST or bool(short.any()):
            movable = torch.cat([rest.double(), s], 1)
            value = torch.where(short, radius * rounding.length(movable, 2, 1), value)
        value = torch.where(radius > 0, value, radius * value)  # NaN after an overflow
        return value * (1 + (a.shape[1] + 16) * UNIT)

    def _near(self, a: Tensor, owner: Tensor) -> Span:
        """The magnitudes of the near entries in float64, 0 where they cannot move or only fill up,
        and how far each can go, `(R, k)`.
        """
        where, down, up = self.where, self.down, self.up
        if where.device == HOST:
            most = int(self.counts[owner].amax()) if len(owner) else 0
            where, down, up = where[:, :most], down[:, :most], up[:, :most]
        where, down, up = of_owners((where, down, up), owner)
        if where.shape[0] == 1:
            a = a.index_select(1, where[0]).double()
        else:
            a = a.gather(1, where).double()
        room = torch.where(a > 0, up, down)
        return torch.where(room > 0, a.abs(), 0.0), room


def _squares(rows: Tensor) -> Tensor:
    """The square of the length of each row, `(R,)` in float64; what underflows is lost."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return found.square()


def _places(marked: Tensor, counts: Tensor) -> Span:
    """The marked entries of each row `(M, n)`, counts `(M,)` of them: their places `(M, k)`, and
    which of these are real, the others fill up.
    """
    if marked.device != HOST:  # all of them
        where = torch.arange(marked.shape[1], device=marked.device).expand(marked.shape)
        return where, marked
    row, column = marked.nonzero().T
    most = int(counts.amax()) if len(counts) else 0
    rank = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    where = torch.zeros(len(marked), most, dtype=torch.int64)
    where[row, rank] = column
    return where, torch.arange(most) < counts[:, None]


SHORT_SQUARE = 2.0**-900
SHORT_RADIUS = 2.0**-400
LEVEL_ROUNDS = 6  # of the search for t, of which any value gives a bound
NEARLY = 2.0**-14  # of a ball: one more round from here fills it up to rounding
HIGHEST = 1e30  # where all walls together are nearer than the ball


def filling_step(s: Tensor, room: Tensor, squares: Tensor, radius: Tensor) -> Tensor:
    """The t with `sum_i min(t s_i, room_i)^2 = radius^2`, from below, `(R,)`; s: 0 where the room
    is; squares: the part of `sum_i s_i^2` that has no wall. By Newton's steps on t^2, in units of
    `radius / ||s||`, which is t where no wall is in the way; in float32, since every t gives a
    bound.
    """
    norm = (squares + _squares(s)).clamp(min=1e-300).sqrt()
    rate = (s * (1 / norm)[:, None]).float()
    cap = (room / torch.where(radius > 0, radius, 1.0)[:, None]).float()
    rest = (squares / norm.square()).float()
    level = torch.ones_like(rest)
    late = (rate - cap).amax(1) > 0 if s.shape[1] else torch.zeros_like(rest, dtype=torch.bool)
    if level.device == HOST:
        rows = late.nonzero()[:, 0]
        level[rows] = _climbed(rate[rows].square_(), cap[rows].square_(), rest[rows])
    else:  # which is not asked
        level = torch.where(late, _climbed(rate.square(), cap.square(), rest), level)
    return (level.double().sqrt() * radius / norm).clamp(1e-300, 1e300)


def _climbed(rate: Tensor, cap: Tensor, rest: Tensor) -> Tensor:
    """The level with `sum_i min(level rate_i, cap_i) + level rest = 1`, from 1 upward, `(R,)`. On
    the CPU a row that has come there is left alone.
    """
    found = level = torch.ones_like(rest)
    rows = torch.arange(len(rest), device=rest.device)
    for _ in range(LEVEL_ROUNDS):
        spent = torch.minimum(level[:, None] * rate, cap)
        left = (1 - spent.sum(1) - level * rest).clamp_(min=0)
        speed = (cap - spent).sign_().mul_(rate).sum(1) + rest
        level = torch.where(speed > 0, level + left / speed, HIGHEST).clamp(max=HIGHEST)
        found = found.scatter(0, rows, level)
        if found.device != HOST:
            continue
        going = ((left > NEARLY) & (level < HIGHEST)).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(rows):
            rows, level, rate, cap, rest = (v[going] for v in (rows, level, rate, cap, rest))
    return found


def _farthest(size: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """The maximiser for r = 2 up to rounding, `min(t size, room)`; nothing is proved by it."""
    free = size * room.sign()
    t = (radius / rounding.length(free, 2, 1).clamp(min=1e-30)).clamp(max=1e30)
    point = free * t[:, None]
    late = (point > room).any(1)
    if size.device == HOST and not bool(late.any()):
        return point
    top = free.amax(1, keepdim=True)
    unit = free / top.clamp(min=1e-30)
    t = fill(unit.square(), room.square(), radius.square(), ask=False).sqrt()[:, None]
    # The ball holds the whole box where t is infinite.
    point = torch.where(late[:, None], torch.minimum(unit * t.clamp(max=1e30), room), point)
    return torch.minimum(point, room)
