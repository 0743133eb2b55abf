"""Geometry of the ground norms r = 1, 2, inf: dual maximisers, projections, hyperplanes, operator
norms.

Everything is batched: tensors have shape `(N, *shape)` with any `*shape`, any memory format,
float32 or float64, and the answer keeps the shape and dtype. Nothing is written in place, so a
channels_last tensor cannot lose its result.

Four of the routines are one water-filling: spread a budget over coordinates at given rates until
each meets its cap,

    sum_i min(t rate_i, cap_i) = budget                                                    (`fill`).

The left side is concave and piecewise linear in `t`, so Newton's method from `t = budget / sum
rate` climbs to the root monotonically and ends after finitely many steps: the answer is exact, with
no bisection and no sort.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.device import blend, has_float64, host_waits, rows_to_compute, take
from wassail.errors import InputError
from wassail.plane_steps import clamped_step, greedy_step, soft_threshold
from wassail.threat import Domain, box_at, boxes_of, dual, fitted

Radius: TypeAlias = "float | Tensor"
ROUNDS = 8  # of water-filling between two questions of the host, on devices that it must wait for
PATIENCE = 12  # rounds of Newton's method before it is mixed with bisections
FEW = 32  # coordinates that an l1 step looks at first
MAX_SIGNS = 22  # the NP-hard operator norms enumerate 2^(MAX_SIGNS - 1) sign vectors at most


def column(values: Radius | Sequence[float], like: Tensor) -> Tensor:
    """Per-sample numbers or masks, `(N,)` or a scalar, shaped to broadcast against `like`, `(N,
    *shape)`, and on its device.
    """
    if isinstance(values, (int, float)):
        return torch.full((), values, dtype=like.dtype, device=like.device)
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=like.dtype)
    values = values.to(like.device) if values.dtype == torch.bool else values.to(like)
    return values.reshape(-1, *[1] * (like.ndim - 1)) if values.ndim else values


def vector_norm(v: Tensor, norm: float) -> Tensor:
    """`||v_i||_r`, shape `(N,)`, in the dtype of `v`."""
    flat = v.flatten(1)
    if norm == math.inf and flat.shape[1]:
        return flat.abs().amax(1)  # the same, 15 times faster on a CPU
    if norm == 1:
        return flat.abs().sum(1)  # 6 times faster, and its pairwise sums are nearer the truth
    length: Tensor = torch.linalg.vector_norm(flat, norm, dim=1)
    return length


def wide_norm(v: Tensor, norm: float) -> Tensor:
    """`||v_i||_r` over the last dimension in float64, whose squares cannot under- or overflow:
    `(..., n) -> (...)`.

    On the device of `v`, or on the CPU if that has no float64.
    """
    v = v if has_float64(v.device) else v.cpu()
    length: Tensor = torch.linalg.vector_norm(v, norm, dim=-1, dtype=torch.float64)
    return length


def distances(a: Tensor, b: Tensor, norm: float) -> Tensor:
    """`||a_i - b_i||_r` of stored points, shape `(N,)`, on the CPU in float64 (some
    accelerators have none).
    """
    return vector_norm(a.detach().cpu().double() - b.detach().cpu().double(), norm)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """`<a_i, b_i>`, shape `(N,)`."""
    return (a.flatten(1) * b.flatten(1)).sum(1)


def sides(domain: Domain, like: Tensor) -> tuple[Any, Any]:
    """Least and greatest values of a box: numbers, or tensors in the type of the points `like`."""
    known = boxes_of(domain)
    if known is not None:
        known = known.like(like)
        return known.low, known.high
    assert domain is not None
    return domain


def blocked(x: Tensor, direction: Tensor, domain: Domain) -> Tensor:
    """Which coordinates of `x` stand at the wall that `direction` pushes them against, bool,
    shape of `x`.
    """
    if domain is None:
        return torch.zeros_like(x, dtype=torch.bool)
    low, high = sides(domain, x)
    return torch.where(direction > 0, x >= high, x <= low)


def maximiser(g: Tensor, norm: float) -> Tensor:
    """Dual-norm maximiser `M_r(g) = argmax { <g, u> : ||u||_r <= 1 }`, shape of `g`; zero where `g`
    is zero.

    `sign(g)` for inf, `g / ||g||_2` for 2, `sign(g_m) e_m` at `m = argmax |g|` for 1 (paper, eq.
    Mr).
    """
    if norm == math.inf:
        return g.sign()
    if norm == 2:
        size = vector_norm(g, 2)
        odd = ~((size > 1e-10) & (size < 1e10))
        rows = rows_to_compute(odd)
        # Scaled by the size of their largest entry first, float32 gradients cannot under- or
        # overflow when squared.
        if len(rows):
            (part,) = take(rows, g)
            top = vector_norm(part, math.inf)
            # By a power of two: that rounds nothing, so the answer has the digits it would have
            # had without the scaling.
            top = torch.where(top > 0, top, 1).log2().floor().exp2()
            part = part / column(top, g)
            g = blend(odd, rows, part, g)
            size = blend(odd, rows, vector_norm(part, 2), size)
        return g / column(torch.where(size > 0, size, 1), g)
    flat = g.flatten(1)
    where = flat.abs().argmax(1, keepdim=True)
    return torch.zeros_like(flat).scatter(1, where, flat.gather(1, where).sign()).reshape(g.shape)


def room(x: Tensor, direction: Tensor, domain: Domain) -> Tensor:
    """How far each coordinate of `x` can move the way `direction` points before it leaves the
    box; shape of `x`.
    """
    if domain is None:
        return torch.full_like(direction, math.inf)
    low, high = sides(domain, x)
    if boxes_of(domain) is not None or not math.isfinite(high - low):
        return torch.where(direction > 0, high - x, x - low).clamp(min=0)
    return _room(x, direction.sign(), low, high)


def _room(x: Tensor, sign: Tensor, low: float, high: float) -> Tensor:
    """`room` in a finite box for directions of -1, 0 and 1."""
    # Weights of 0 and 1 choose exactly, and far faster than a mask on a CPU.
    below = x - low if low else x
    return torch.lerp(below, high - x, sign.clamp(min=0)).clamp_(min=0)


def steepest(x: Tensor, g: Tensor, norm: float, radius: Radius, domain: Domain = None) -> Tensor:
    """The step that raises `<g, .>` most: `argmax { <g, d> : ||d||_r <= radius, x + d in box }`,
    shape of `x`.

    Without a box this is `radius * M_r(g)`. With one, coordinates that meet a wall pass their share
    on to the others, so a walk never sticks at a saturated pixel. Exact for all three norms.
    """
    if domain is None:
        return column(radius, g) * maximiser(g, norm)
    return steepest_within(walls(x, domain), g, norm, radius)


def steepest_within(room: Walls, g: Tensor, norm: float, radius: Radius) -> Tensor:
    """`steepest` between known `walls`."""
    if room is None:
        return column(radius, g) * maximiser(g, norm)
    low = room[0].flatten(1)
    high = room[1].flatten(1)
    way = g.flatten(1)
    size = _per_row(radius, g)
    if norm == math.inf:
        step = torch.clamp(way.sign().mul_(size[:, None]), low, high)
    elif norm == 2:
        step = _cut_ray(way, low, high, size)
    else:
        step = _sparse(way, low[None], high[None], size[None], False)
    return step.reshape(g.shape)


def euclidean_step(x: Tensor, g: Tensor, length: Tensor, domain: Domain) -> Tensor:
    """A step of this Euclidean length `(N,)` along `g`, shape of `x`: what the box cuts off is
    given to the coordinates that move, in proportion.

    Nearly `steepest` for r = 2, in fewer operations: the share that a coordinate gets may take it
    out of the box. For points that are projected next.
    """
    step = maximiser(g, 2).mul_(column(length, g))
    if domain is None:
        return step
    moved = clip_(step.add_(x), domain).sub_(x)
    size = vector_norm(moved, 2)
    # Where a millionth or less is inside the box, there is nothing to give the rest to.
    return moved.mul_(column(torch.where(size > 1e-6 * length, length / size, 1.0), g))


def project(
    point: Tensor, center: Tensor, norm: float, radius: Radius, domain: Domain = None
) -> Tensor:
    """Euclidean projection of `point` onto `{ z in box : ||z - center||_r <= radius }`, shape of
    `point`.

    Exact for the intersection, not clip-after-project. The center must lie in the box. For r = 1 it
    is the sorted soft-threshold (Duchi et al. 2008), capped by the box; for r = 2 the box caps a
    shrunken ray; for inf both are boxes.
    """
    v = point - center
    if norm == math.inf:
        limit = column(radius, v)
        return clip_(torch.clamp(v, -limit, limit).add_(center), domain)
    inside = clip(point, domain)
    moved = inside - center
    limit = _per_row(radius, v)
    over = vector_norm(moved, norm) > limit
    rows = rows_to_compute(over)
    if not len(rows):
        return inside
    v, moved, center, limit = take(rows, v, moved, center, limit)
    if norm == 1:
        found = _shrunk(v, moved, limit)
    elif domain is None:
        found = v * column(limit / vector_norm(v, 2), v)
    else:
        # No coordinate of the answer is longer than `moved`, on whose side of 0 it stays.
        ends = moved.flatten(1)
        found = _cut_ray(v.flatten(1), ends.clamp(max=0), ends.clamp(min=0), limit)
        found = found.reshape(v.shape)
    box = box_at(fitted(domain, inside), rows)
    return blend(over, rows, clip_(found.add_(center), box), inside)


def clip(point: Tensor, domain: Domain) -> Tensor:
    """The nearest point of the box."""
    return point if domain is None else point.clamp(*sides(domain, point))


def clip_(point: Tensor, domain: Domain) -> Tensor:
    """`clip` in place, for a tensor of one's own."""
    return point if domain is None else point.clamp_(*sides(domain, point))


def pull_inside(
    point: Tensor, center: Tensor, norm: float, radius: Radius, domain: Domain = None
) -> Tensor:
    """Scale `point` toward `center` until its float64 distance is at most `radius`.

    Projections are exact up to rounding, which can leave a stored float32 point outside by an ulp;
    a budget is a promise.
    """
    limit = (
        radius.cpu().double()
        if isinstance(radius, Tensor)
        else torch.full((), radius, dtype=torch.float64)
    )
    assert (limit >= 0).all(), "a radius is not negative"
    ulp = torch.finfo(point.dtype).eps
    given = point
    # where the lengths are: one wait instead of some for every try
    point = point.cpu()
    center = center.cpu()
    for tries in itertools.count():
        length = distances(point, center, norm)
        over = length > limit
        if not over.any():
            return given if tries == 0 else point.to(given.device)
        shrink = torch.where(over, limit / length * (1 - ulp * 2**tries), 1).clamp(min=0)
        moved = clip(center + column(shrink, point) * (point - center), domain)
        point = torch.where(column(over, point), moved, point)
    raise AssertionError("unreachable")


def plane_step(x: Tensor, w: Tensor, gap: Tensor, norm: float, domain: Domain = None) -> Tensor:
    """The shortest step to a hyperplane inside the box: `argmin { ||d||_r : <w, d> = gap, x + d in
    box }`, shape of `x`.

    `gap` has shape `(N,)`. Exact for r = 1 (greedy), 2 and inf (water-filling). Where the box does
    not reach the plane the step goes as far toward it as the box allows; where `w` is zero the step
    is zero.
    """
    room = walls(x, domain)
    rooms = None if room is None else (room[0][None], room[1][None])
    return plane_steps(rooms, w, gap[None], norm)[0]


Walls: TypeAlias = "tuple[Tensor, Tensor] | None"


def walls(x: Tensor, domain: Domain) -> Walls:
    """How far each coordinate of `x` may fall and how far it may rise inside the box, both of the
    shape of `x`: at most 0, at least 0. None without a box.
    """
    if domain is None:
        return None
    low, high = sides(domain, x)
    return (low - x).clamp_(max=0), (high - x).clamp_(min=0)


def plane_steps(rooms: Walls, w: Tensor, gaps: Tensor, norm: float) -> Tensor:
    """`plane_step` from J points to planes of one normal, `(J, N, *shape)`, found together.

    Args:
        rooms: the `walls` of the points, each `(J, N, *shape)`.
        w: normals `(N, *shape)`.
        gaps: one for each of the points, `(J, N)`.
        norm: ground norm.
    """
    way = w.flatten(1)
    price = way
    if norm == 1:
        if rooms is not None:
            steps = _sparse(way, rooms[0].flatten(2), rooms[1].flatten(2), gaps, True)
            return steps.reshape(-1, *w.shape)
        way = maximiser(way, 1)
        total = inner(way, price)
    elif norm == math.inf:
        way = way.sign()
        total = price.abs().sum(1)
    else:
        unit = _unit(way)
        way = way * unit[:, None]
        price = way
        total = vector_norm(way, 2).square_()
        gaps = gaps * unit
    t = gaps / total
    if rooms is None:
        steps = t.nan_to_num_().unsqueeze(-1) * way
    else:
        steps = clamped_step(way, rooms[0].flatten(2), rooms[1].flatten(2), gaps, t, price)
    return steps.reshape(-1, *w.shape)


def operator_norm(matrix: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """`||A||_{r -> s} = max { ||A u||_s : ||u||_r <= 1 }` of matrices `(..., m, n)`, shape `(...)`,
    in their dtype.

    Closed forms from r = 1 (longest column), to s = inf (longest row in the dual norm) and 2 -> 2
    (largest singular value). 2 -> 1, inf -> 2 and inf -> 1 are NP-hard: sign vectors of the smaller
    useful side are enumerated, up to 22 of them.
    """
    best: Tensor
    if norm_in == 1:
        best = torch.linalg.vector_norm(matrix, norm_out, dim=-2).amax(-1)
        return best
    if norm_out == math.inf:
        best = torch.linalg.vector_norm(matrix, dual(norm_in), dim=-1).amax(-1)
        return best
    if norm_in == norm_out == 2:
        best = torch.linalg.matrix_norm(matrix, 2)
        return best
    m, n = matrix.shape[-2:]
    # ||A||_{r -> 1} = max_sigma ||A^T sigma||_{r*} over the rows; by duality ||A||_{inf -> s} is
    # the same for A^T.
    by_rows = norm_out == 1 and (norm_in == 2 or m <= n)
    table, length = (matrix, dual(norm_in)) if by_rows else (matrix.mT, norm_out)
    k = table.shape[-2]
    if k > MAX_SIGNS:
        raise InputError(
            f"the {norm_in:g} -> {norm_out:g} norm of a {m} x {n} matrix needs 2^{k - 1} sign "
            "vectors: "
            f"at most {MAX_SIGNS} rows or columns can be enumerated."
        )
    best = torch.zeros(matrix.shape[:-2], dtype=matrix.dtype, device=matrix.device)
    powers = 2 ** torch.arange(k - 1, device=matrix.device)
    for start in range(
        0, 2 ** (k - 1), 4096
    ):  # the first sign is fixed: sigma and -sigma give the same length
        codes = torch.arange(start, min(start + 4096, 2 ** (k - 1)), device=matrix.device)
        signs = ((codes[:, None] & powers) == 0).to(matrix.dtype) * 2 - 1
        sums = table[..., :1, :] + signs @ table[..., 1:, :]
        best = torch.maximum(best, torch.linalg.vector_norm(sums, length, dim=-1).amax(-1))
    return best


def _per_row(radius: Radius, like: Tensor) -> Tensor:
    if not isinstance(radius, Tensor):
        return torch.full((len(like),), radius, dtype=like.dtype, device=like.device)
    return radius.to(like).expand(len(like))


def fill(rate: Tensor, cap: Tensor, target: Tensor, ask: bool = True) -> Tensor:
    """The `t` with `sum_i min(t rate_i, cap_i) = target`, `(N, n), (N, n), (N,) -> (N,)`; inf where
    the caps fall short.

    ask: False on a device that the host must wait for leaves rows as they are after `2 ROUNDS`
    rounds: below t, if that is not enough. For callers to whom any t will do.
    """
    return _fill(rate, cap, target, ask)[0]


def _fill(rate: Tensor, cap: Tensor, target: Tensor, ask: bool = True) -> tuple[Tensor, bool]:
    """`fill`, and whether the caps of some row fall short (False if that is not asked).

    On the CPU rows that are done leave. On another device `ROUNDS` rounds are made before the host
    asks whether all are done: a row that is done changes no more.
    """
    t = torch.zeros_like(target)
    going = target > 0
    rows = rows_to_compute(going)
    if not len(rows):
        return t, False
    rate, cap, target, going = take(rows, rate, cap, target, going)
    level = target / rate.sum(1)
    count = torch.full_like(level, -1)
    while True:
        for _ in range(ROUNDS * (1 if ask else 2) if host_waits(t) else 1):
            spent = torch.minimum(level[:, None] * rate, cap)
            open_ = (cap - spent).sign_()  # 1 or 0: as numbers they are faster than a mask
            left = open_.sum(1)
            speed = open_.mul_(rate).sum(1)
            # It only climbs; with nothing open, or nothing that moves, the caps fall short.
            gain = (target - spent.sum(1)).clamp_(min=0).div_(speed)
            moves = speed > 0
            level = torch.where(going, torch.where(moves, level + gain, math.inf), level)
            # Rows whose open set shrank go on; the others are done.
            going = (left != count).logical_and_(moves).logical_and_(going)
            count = left
        if host_waits(t):
            t = torch.where(target > 0, level, 0)
            if not ask:
                return t, False
            unfinished, short = torch.stack([going.any(), torch.isinf(t).any()]).tolist()
            if not unfinished:
                return t, short
            continue
        unfinished = int(going.sum())
        if unfinished < 0.7 * len(going):
            # To copy a few out of the way costs more than to carry them along.
            t.index_copy_(0, rows, level)
            if not unfinished:
                return t, bool(torch.isinf(t).any())
            kept = going.nonzero()[:, 0]
            rows, rate, cap, target, level, count, going = (
                v.index_select(0, kept) for v in (rows, rate, cap, target, level, count, going)
            )


def _unit(way: Tensor) -> Tensor:
    """What brings the largest entry of each row to 1, `(N,)`: then squares do not overflow, and
    what underflows does not count.
    """
    return 1 / way.abs().amax(1).clamp_(min=4 * torch.finfo(way.dtype).tiny)


def _cut_ray(way: Tensor, low: Tensor, high: Tensor, length: Tensor) -> Tensor:
    """`clamp(t way, low, high)` of these Euclidean lengths `(N,)`, or to all walls: `(N, n)`."""
    way = way * _unit(way)[:, None]
    return clamped_step(
        way, low[None], high[None], length[None], (length / vector_norm(way, 2))[None]
    )[0]


def _sparse(way: Tensor, low: Tensor, high: Tensor, budget: Tensor, priced: bool) -> Tensor:
    """`greedy_step`, on the CPU for devices without float64."""
    if has_float64(way.device):
        return greedy_step(way, low, high, budget, priced)
    return greedy_step(way.cpu(), low.cpu(), high.cpu(), budget.cpu(), priced).to(way.device)


def _shrunk(v: Tensor, moved: Tensor, radius: Tensor) -> Tensor:
    """`v` with its coordinates shortened by one length, none longer than in `moved`, so that its
    l1 length is the radius `(N,)`; shape of `v`.
    """
    size = v.abs().flatten(1)
    cap = moved.abs().flatten(1)
    size = size * cap.sign()  # what may not move has no share
    return soft_threshold(size, cap, radius).reshape(v.shape).mul_(v.sign())
