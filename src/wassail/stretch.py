"""How far to go along a direction inside a box: every coordinate stops at its own wall.

The step `clamp(t way, low, high)` grows with `t`. What it pays, `<price, step>` or its Euclidean
length, is concave and piecewise linear in `t`, or in its square: from `t` too small, Newton's
method climbs to the root monotonically and ends after finitely many rounds. The answer is exact,
with no bisection and no sort. Signed bounds need no mask and no sign: four operations on arrays of
the size of the step tell what it pays, three more how fast that grows.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from wassail.device import take, waits

ROUNDS = 8  # between two questions of the host, on devices that it must wait for
FEW = 0.4  # of the rows: when so few are unfinished, they go on alone


def stretch(
    way: Tensor, low: Tensor, high: Tensor, target: Tensor, t: Tensor, price: Tensor | None = None
) -> Tensor:
    """`clamp(t way, low, high)` that pays the target: `(N, n)`.

    It pays `<price, step>`, or its Euclidean length without a price. Where the walls are too near
    the step goes to all of them.

    Args:
        way: the direction `(N, n)`, entries of at most about 1.
        low: how far each coordinate may fall, `(N, n)`, none above 0.
        high: how far it may rise, `(N, n)`, none below 0.
        target: what to pay, `(N,)`; negative for a step against the direction.
        t: what would pay the target without walls, `(N,)`, of the sign of the target.
        price: of a unit of each coordinate, `(N, n)`, of the sign of the direction.
    """
    kind = torch.finfo(way.dtype)
    enough = 1 - 16 * kind.eps
    t = t.nan_to_num()  # a direction of zeros leads nowhere, and the largest number is far enough
    if price is None:
        t = t * (target > 16 * kind.tiny**0.5)  # shorter ones have no square
    alive = None
    for turn in itertools.count(1):
        raw = t[:, None] * way
        step = torch.clamp(raw, low, high)
        gain = step if price is None else price * step
        paid = _total(gain, price)
        going = paid / target < enough
        going = going if alive is None else going.logical_and_(alive)
        if not waits(way) or turn % ROUNDS == 0:
            unfinished = int(going.sum())
            if not unfinished:
                return step
            if unfinished < FEW * len(t) and not waits(way):
                rows = going.nonzero()[:, 0]
                some = take(rows, way, low, high, target, t)
                rest = None if price is None else price.index_select(0, rows)
                return step.index_copy_(0, rows, stretch(*some, rest))
        # Newton's step, from what the coordinates that are still free pay.
        free = _total(torch.eq(step, raw, out=raw).mul_(gain), price)
        if price is None:
            # Squares that underflow must not pass for nothing: by small steps they come to light.
            growth = (target.square() - paid.square()).div_(free.square()).add_(1).sqrt_()
            growth.clamp_(max=kind.max**0.25)
        else:
            growth = (target - paid).div_(free).abs_().add_(1)
        further = (t * growth).nan_to_num_()
        alive = further != t
        t = torch.where(going, further, t)
    raise AssertionError("unreachable")


def _total(gain: Tensor, price: Tensor | None) -> Tensor:
    """What the coordinates pay together, `(N,)`."""
    if price is not None:
        return gain.sum(1)
    length: Tensor = torch.linalg.vector_norm(gain, 2, dim=1)
    return length
