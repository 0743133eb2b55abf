"""How far to go along a direction inside a box: every coordinate stops at its own wall.

Steps of l2 and linf (`stretch`), steps of l1 (`greedy`), and projections onto a ball of l1
(`shrink`), in few operations.

The step `clamp(t way, low, high)` grows with `t`. What it pays, `<price, step>` or its Euclidean
length, is concave and piecewise linear in `t`, or in its square: from `t` too small, Newton's
method climbs to the root monotonically and ends after finitely many rounds. The answer is exact,
with no bisection and no sort. Signed bounds need no mask and no sign: four operations on arrays of
the size of the step tell what it pays, three more how fast that grows.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from wassail.device import take, waits

ROUNDS = 8  # between two questions of the host, on devices that it must wait for
PATIENCE = 12  # rounds of Newton's method before it is mixed with bisections
FIRST = 16  # coordinates that an l1 step looks at first
BLOCK = 16  # coordinates of which only the largest is looked at first
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


def leading(size: Tensor, count: int) -> Tensor:
    """The places of the `count` largest entries of each row, largest first: `(N, n) -> (N, count)`.

    They lie in the `count` blocks with the largest maxima: these are found without a look at every
    entry, which is what takes the time on a CPU.
    """
    rows, n = size.shape
    blocks = n // BLOCK
    if n % BLOCK or blocks < 2 * count:
        return size.topk(count, dim=1).indices
    # A block is a column, so that its maximum is found for many of them at once.
    tops = size.reshape(rows, BLOCK, blocks).amax(1).topk(count, dim=1, sorted=False).indices
    step = torch.arange(0, n, blocks, device=size.device)
    places = (tops[:, None, :] + step[None, :, None]).flatten(1)
    return places.gather(1, size.gather(1, places).topk(count, dim=1).indices)


def greedy(
    way: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    budget: Tensor,
    priced: bool,
    order: Tensor | None = None,
    count: int = FIRST,
) -> Tensor:
    """A step that spends its budget on the largest entries of `way`, each up to its wall: `(N, n)`.

    Args:
        way: the direction `(N, n)`.
        low: how far each coordinate may fall, `(N, n)`; None without walls.
        high: how far it may rise.
        budget: what to spend, `(N,)`; negative for a step against the direction.
        priced: whether a unit of a coordinate costs `|way|`, and not 1.
        order: places of the largest entries, `(N, count)`, where they are known.
        count: how many entries to look at first: a budget rarely reaches far down the list.
    """
    count = min(count, way.shape[1])
    order = leading(way.abs(), count) if order is None else order
    some = way.gather(1, order).double()
    sense = some.sign().mul_(budget.sign()[:, None])
    money = budget.abs().double()[:, None]
    unit = some.abs() if priced else sense.abs()
    paid = unit > 0
    unit = torch.where(paid, unit, 1.0)
    if low is None or high is None:
        free = torch.where(paid, math.inf, 0.0).to(unit)
    else:
        free = torch.where(sense > 0, high.gather(1, order), -low.gather(1, order))
        free = torch.where(paid, free.double(), 0.0)
    amount = torch.minimum(free, money / unit)
    bill = amount * unit
    after = bill.cumsum(1)
    left = money - after + bill
    left = torch.where(left > 1e-13 * money, left, 0)  # rounding must not buy the next coordinate
    bought = torch.minimum(left / unit, amount).mul_(sense)
    step = torch.zeros_like(way).scatter_(1, order, bought.to(way.dtype))
    if count == way.shape[1]:
        return step
    more = (after[:, -1] < money[:, 0] * (1 - 1e-13)).nonzero()[:, 0]
    if not len(more):
        return step
    rest = way.index_select(0, more)
    money = budget.index_select(0, more)
    if low is None or high is None:
        found = greedy(rest, None, None, money, priced, None, 4 * count)
    else:
        found = _deeper(
            rest, low.index_select(0, more), high.index_select(0, more), money, priced, count
        )
    return step.index_copy_(0, more, found)


def _deeper(
    way: Tensor, low: Tensor, high: Tensor, budget: Tensor, priced: bool, count: int
) -> Tensor:
    """`greedy` where the first `count` entries were not enough."""
    most = greatest(way * budget.sign()[:, None], low, high)
    cost = (most * way if priced else most).abs().sum(1)
    # Where all of it is too little for the budget there is nothing to choose.
    rows = (cost >= (1 - 1e-3) * budget.abs()).nonzero()[:, 0]
    if len(rows):
        some = take(rows, way, low, high, budget)
        most.index_copy_(0, rows, greedy(*some, priced, None, 4 * count))
    return most


def greatest(way: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The step to the walls that the direction points at, shape of `way`."""
    side = way.sign()
    return torch.addcmul(high * side.clamp(min=0), low, side.clamp_(max=0), value=-1)


def shrink(size: Tensor, cap: Tensor, radius: Tensor) -> Tensor:
    """`min(max(size - tau, 0), cap)` whose sum is the radius, for sizes and caps `(N, n)` whose
    least sum is above it; `(N, n)`.

    The sum falls in tau and is piecewise linear: coordinate i starts to fall at `size_i - cap_i`
    and ends at `size_i`. Newton's method between two bounds; where it leaves them, and in every
    second round after `PATIENCE`, their middle. The first step is Newton's for the logarithm of the
    sum, which is nearer to a line. As in `stretch`, rows that are done leave on the CPU and change
    no more elsewhere.
    """
    kind = torch.finfo(size.dtype)
    low = torch.full_like(radius, kind.tiny)  # so that what is 0 does not count
    high = size.amax(1)
    return _shrink(size, cap, radius, torch.where(radius > 0, low, high), low, high, 0)


def _shrink(
    size: Tensor, cap: Tensor, radius: Tensor, tau: Tensor, low: Tensor, high: Tensor, turn: int
) -> Tensor:
    """`shrink` from a first tau, with bounds of the last one."""
    noise = 8 * torch.finfo(size.dtype).eps * radius
    zero = size.new_zeros(())
    alive = None
    while True:
        rest = size - tau[:, None]
        kept = torch.clamp(rest, zero, cap)
        total = kept.sum(1)
        excess = total - radius
        going = excess.abs() > noise
        going = going if alive is None else going.logical_and_(alive)
        if not waits(size) or turn % (2 * ROUNDS) == 2 * ROUNDS - 1:
            unfinished = int(going.sum())
            if not unfinished:
                return kept
            if unfinished < FEW * len(tau) and not waits(size):
                rows = going.nonzero()[:, 0]
                some = take(rows, size, cap, radius, tau, low, high)
                return kept.index_copy_(0, rows, _shrink(*some, turn))
        moving = torch.eq(kept, rest, out=rest).sum(1)
        above = excess > 0
        low = torch.where(above, tau, low)
        high = torch.where(above, high, tau)
        step = excess if turn else total * (total / radius).log_()
        newton = tau + step / moving
        fits = (newton >= low) & (newton <= high)
        if turn > PATIENCE and turn % 2:
            fits = fits & (newton == tau)
        following = torch.where(fits, newton, (low + high) / 2)
        alive = (following != tau) & (low < high)
        tau = torch.where(going, following, tau)
        turn += 1
