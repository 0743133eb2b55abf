"""`max <a, d>` over a ball cut by a box, for r = 1 and 2: by weak duality, so that any multiplier
gives a bound.

Everywhere: size `(R, n)`, the magnitudes of a; room `(R, n)`, how far each entry of d can go in the
direction of a, at most the radius; radius `(R,)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates.device import HOST
from wassail.geometry import fill


def fill_one(size: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """The value for r = 1: the budget goes to the largest entries first, and the multiplier is the
    first entry that is not filled.

    A budget rarely reaches far down the list. On the CPU the first few entries are looked at first;
    a device sorts all of them at once, since it would have to be asked whether they were enough.
    Sums from the left give the same number for both.
    """
    if size.device != HOST:
        return _filled(size, room, radius, size.shape[1])[0]
    value = torch.empty_like(radius)
    rows = torch.arange(len(size))
    count = 16
    while len(rows):
        count = min(count, size.shape[1])
        value[rows], known = _filled(size[rows], room[rows], radius[rows], count)
        rows = rows[~known]
        count = 8 * count
    return value


def _filled(size: Tensor, room: Tensor, radius: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The value for r = 1 by the `count` largest entries of each row, and whether they are enough.

    With the filled entries' room F and gain S the dual value is `lam (radius - F) + S`: no term is
    negative, so it is off by less than n 2^-52 of itself.
    """
    large, order = size.topk(count, dim=1)
    free = room.gather(1, order)
    paid = free.cumsum(1)
    gain = (large * free).cumsum(1)
    place = (paid < radius[:, None]).sum(1, keepdim=True)  # entries that are filled
    lam = torch.where(place < count, large.gather(1, place.clamp(max=count - 1)), 0.0)
    before = (place - 1).clamp(min=0)
    spent, won = (torch.where(place > 0, v.gather(1, before), 0.0) for v in (paid, gain))
    known = (place < count) | (count == size.shape[1])
    return (lam * (radius[:, None] - spent) + won)[:, 0], known[:, 0]


def fill_two(size: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """The value for r = 2: `rho ||a||` unless a wall is in the way."""
    free = torch.where(room > 0, size, 0.0)
    value = rounding.length(free, 2, 1)
    t = radius / value.clamp(min=1e-300)
    value = value * radius
    # Where the ball's own maximiser leaves the box; the others are done.
    late = ((free * t[:, None]) > room).any(1)
    if size.device != HOST:  # it is not asked whether there are any
        return torch.where(late, _water(size, room, radius), value)
    if late.any():
        value[late] = _water(size[late], room[late], radius[late])
    return value


def _water(size: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """The value for r = 2: `d = min(t size, room)` with the t that fills the ball, and `lam = 1
    / (2 t)`.
    """
    top = size.amax(1, keepdim=True)
    # At most 1, so that squares do not overflow.
    unit = torch.where(room > 0, size / torch.where(top > 0, top, 1), 0.0)
    t = fill(unit.square(), room.square(), radius.square(), ask=False).sqrt()[:, None]
    lam = torch.where(torch.isfinite(t) & (t > 0), top / (2 * torch.where(t > 0, t, 1)), 0.0)
    # The maximum of |a| d - lam d^2 over 0 <= d <= room; with a multiplier of 0 the walls alone
    # hold.
    step = torch.where(
        lam > 0, torch.minimum(size / (2 * torch.where(lam > 0, lam, 1)), room), room
    )
    gain = (size * step - lam * step.square()).sum(1)
    return lam[:, 0] * radius * radius + gain  # not radius^2, which may underflow
