"""How far to go along a direction inside a box: every coordinate stops at its own wall.

Steps of l2 and linf (`clamped_step`), steps of l1 (`greedy_step`), and projections onto a ball of
l1 (`soft_threshold`), in few operations: on a CPU it is their number that counts.

The step `clamp(t way, low, high)` grows with `t`. What it pays, `<price, step>` or its Euclidean
length, is concave and piecewise linear in `t`, or in its square: from `t` too small, Newton's
method climbs to the root monotonically and ends after finitely many rounds. The answer is exact,
with no bisection and no sort. Signed bounds need no mask and no sign: four operations on arrays of
the size of the step tell what it pays, three more how fast that grows.

Steps of one direction from J points are found together: their walls and targets have J as a first
dimension.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from wassail.device import host_waits, take

ROUNDS = 8  # between two questions of the host, on devices that it must wait for
PATIENCE = 10  # rounds of Newton's method before it is mixed with bisections
FIRST = 16  # coordinates that an l1 step looks at first
BLOCK = 16  # coordinates of which only the largest is looked at first
FEW = 0.4  # of the rows: when so few are unfinished, they go on alone


def clamped_step(
    way: Tensor,
    low: Tensor,
    high: Tensor,
    target: Tensor,
    t: Tensor,
    price: Tensor | None = None,
    first: bool = True,
) -> Tensor:
    """`clamp(t way, low, high)` that pays the target: `(J, N, n)`.

    It pays `<price, step>`, or its Euclidean length without a price. Where the walls are too near
    the step goes to all of them.

    Args:
        way: the direction `(N, n)`, entries of at most about 1.
        low: how far each coordinate may fall, `(J, N, n)`, none above 0.
        high: how far it may rise, `(J, N, n)`, none below 0.
        target: what to pay, `(J, N)`; negative for a step against the direction.
        t: what would pay the target without walls, `(J, N)`, of the sign of the target.
        price: of a unit of each coordinate, `(N, n)`, of the sign of the direction.
        first: whether no round was made; False for what is left of another call.
    """
    kind = torch.finfo(way.dtype)
    enough = _enough(way)
    if first:
        t = t.nan_to_num()  # of a direction of zeros; and the largest number is far enough
        if price is None:
            t = t * (target > 16 * kind.tiny**0.5)  # shorter ones have no square
    alive = None
    # Written again in every round, while they are in the cache.
    raw: Tensor | None = None
    step: Tensor | None = None
    gain: Tensor | None = None
    for turn in itertools.count(1):
        raw = torch.mul(t.unsqueeze(-1), way, out=raw)
        step = torch.clamp(raw, low, high, out=step)
        gain = step if price is None else torch.mul(price, step, out=gain)
        paid = _total(gain, price)
        going = paid / target < enough
        going = going if alive is None else going.logical_and_(alive)
        if not host_waits(way) or turn % ROUNDS == 0:
            unfinished = int(going.sum())
            if not unfinished:
                return step
            if unfinished < FEW * going.numel() and not host_waits(way):
                rest = _clamped_rest(going, way, low, high, target, t, price, first)
                step.flatten(0, 1).index_copy_(0, *rest)
                return step
        # Newton's step, from what the coordinates that are still free pay.
        free = _total(torch.eq(step, raw, out=raw).mul_(gain), price)
        if price is None:
            # Squares that underflow must not count as 0: small steps make them visible.
            growth = (target.square() - paid.square()).div_(free.square()).add_(1).sqrt_()
            growth.clamp_(max=kind.max**0.25)
        else:
            growth = (target - paid).div_(free).abs_().add_(1)
        further = growth.mul_(t).nan_to_num_()
        if turn > 1:
            alive = further != t
        t = torch.where(going, further, t)
    raise AssertionError("unreachable")


def _clamped_rest(
    going: Tensor,
    way: Tensor,
    low: Tensor,
    high: Tensor,
    target: Tensor,
    t: Tensor,
    price: Tensor | None,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """The steps that are still going `(J, N)`: their places among the `J N`, and they, `(k, n)`.

    first: whether to see first which of them end at their walls; Newton's method takes many rounds
    to find that out.
    """
    places = going.flatten().nonzero()[:, 0]
    owner = places if going.shape[0] == 1 else places % going.shape[1]
    way = way.index_select(0, owner)
    price = None if price is None else price.index_select(0, owner)
    low, high = (v.flatten(0, 1).index_select(0, places)[None] for v in (low, high))
    target, t = (v.flatten().index_select(0, places)[None] for v in (target, t))
    if not first:
        return places, clamped_step(way, low, high, target, t, price, False)[0]
    most = torch.copysign(torch.full_like(t, torch.finfo(t.dtype).max), t)
    step = torch.clamp(most.unsqueeze(-1) * way, low, high)
    paid = _total(step if price is None else price * step, price)
    going = paid / target >= _enough(t)
    some = int(going.sum())
    if some == going.numel():
        return places, clamped_step(way, low, high, target, t, price, False)[0]
    if some:
        step[0].index_copy_(0, *_clamped_rest(going, way, low, high, target, t, price, False))
    return places, step[0]


def _enough(like: Tensor) -> float:
    """The share of a target that is all of it up to rounding."""
    return 1 - 16 * torch.finfo(like.dtype).eps


def _total(gain: Tensor, price: Tensor | None) -> Tensor:
    """What the coordinates pay together, `(J, N)`."""
    if price is not None:
        return gain.sum(-1)
    length: Tensor = torch.linalg.vector_norm(gain, 2, dim=-1)
    return length


def largest_places(size: Tensor, count: int) -> Tensor:
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


def greedy_step(
    way: Tensor, low: Tensor, high: Tensor, budget: Tensor, priced: bool, count: int = FIRST
) -> Tensor:
    """A step that spends its budget on the largest entries of `way`, each up to its wall:
    `(J, N, n)`.

    Args:
        way: the direction `(N, n)`.
        low: how far each coordinate may fall, `(J, N, n)`.
        high: how far it may rise.
        budget: what to spend, `(J, N)`; negative for a step against the direction.
        priced: whether a unit of a coordinate costs `|way|`, and not 1.
        count: how many entries to look at first: a budget rarely reaches far down the list.
    """
    count = min(count, way.shape[1])
    order = largest_places(way.abs(), count)
    some = way.gather(1, order)
    order = order.expand(*budget.shape, count)
    side = some.sign() * budget.sign().unsqueeze(-1)
    ends = side.mul_(torch.finfo(way.dtype).max)
    most = torch.clamp(ends, low.gather(2, order), high.gather(2, order)).double()
    money = budget.abs().double().unsqueeze(-1)
    cost = (most * some if priced else most).abs()
    bill = torch.minimum(cost, money)
    after = bill.cumsum(-1)
    # A rounding error must not buy the next coordinate.
    left = (money * (1 - 1e-13) - after).add_(bill)
    bought = left.div_(cost).clamp_(0, 1).nan_to_num_().mul_(most).to(way.dtype)
    step = torch.zeros_like(low).scatter_(2, order, bought)
    if count == way.shape[1]:
        return step
    short = after[..., -1] < money[..., 0] * (1 - 1e-13)
    places = short.flatten().nonzero()[:, 0]
    if places.shape[0]:
        way = way.index_select(0, places % way.shape[0])
        low, high = (v.flatten(0, 1).index_select(0, places)[None] for v in (low, high))
        budget = budget.flatten().index_select(0, places)[None]
        deeper = _deeper(way, low, high, budget, priced, 4 * count)[0]
        step.flatten(0, 1).index_copy_(0, places, deeper)
    return step


def _deeper(
    way: Tensor, low: Tensor, high: Tensor, budget: Tensor, priced: bool, count: int
) -> Tensor:
    """`greedy_step` where few entries were not enough; J is 1."""
    ends = way.sign() * budget.sign().unsqueeze(-1)
    most = torch.clamp(ends.mul_(torch.finfo(way.dtype).max), low, high)
    # Where all there is is too little for the budget there is nothing to choose.
    cost = (most * way if priced else most).abs().sum(-1)
    rows = (cost >= (1 - 1e-3) * budget.abs())[0].nonzero()[:, 0]
    if rows.shape[0]:
        way, low, high = (v.index_select(-2, rows) for v in (way, low, high))
        found = greedy_step(way, low, high, budget.index_select(1, rows), priced, count)
        most.index_copy_(1, rows, found)
    return most


def soft_threshold(size: Tensor, cap: Tensor, radius: Tensor) -> Tensor:
    """`min(max(size - tau, 0), cap)` whose sum is the radius, for sizes and caps `(N, n)` whose
    least sum is above it; `(N, n)`.

    The sum falls in tau and is piecewise linear: coordinate i starts to fall at `size_i - cap_i`
    and ends at `size_i`. Newton's method, which needs no help where no cap is met; after `PATIENCE`
    rounds between two bounds, in turn with their middle. The first step is Newton's for the
    logarithm of the sum, which is nearer to a line. As in `clamped_step`, rows that are done leave
    on the CPU and change no more elsewhere.
    """
    high = size.amax(1)
    low = torch.full_like(high, torch.finfo(size.dtype).tiny)  # what is 0 does not count
    return _soft_threshold(size, cap, radius, torch.where(radius > 0, low, high), low, high, 0)


def _soft_threshold(
    size: Tensor, cap: Tensor, radius: Tensor, tau: Tensor, low: Tensor, high: Tensor, turn: int
) -> Tensor:
    """`soft_threshold` from a tau and between bounds that are known after so many rounds."""
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
        if not host_waits(size) or turn % (2 * ROUNDS) == 2 * ROUNDS - 1:
            unfinished = int(going.sum())
            if not unfinished:
                return kept
            if unfinished < FEW * tau.shape[0] and not host_waits(size):
                rows = going.nonzero()[:, 0]
                size, cap, radius, tau, low, high = take(rows, size, cap, radius, tau, low, high)
                rest = _soft_threshold(size, cap, radius, tau, low, high, turn)
                return kept.index_copy_(0, rows, rest)
        moving = torch.eq(kept, rest, out=rest).sum(1)
        step = excess if turn else total.mul_((total / radius).log_())
        newton = torch.clamp(step.div_(moving).add_(tau), low, high)
        if turn >= PATIENCE:
            above = total > radius
            low = torch.where(above, tau, low)
            high = torch.where(above, high, tau)
            # Both bounds have been tried, so that without a number between them there is no more.
            rests = newton == tau
            fits = (newton > low) & (newton < high) & (turn % 2 == 0)
            newton = torch.where(rests | fits, newton, (low + high) / 2)
            alive = (newton > low) & (newton < high)
        tau = torch.where(going, newton, tau)
        turn += 1
