"""Planes that enclose a function of several values, and interval arithmetic for them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.device import HOST
from wassail.certificates.graph.tangent import Enclosed, Tangent
from wassail.rounding import UNIT

Span: TypeAlias = "tuple[Tensor, Tensor]"


TINY = 1e-290  # what underflow may take from a sum
SMALL = 1e-30  # numbers of J below it are set to 0, so that none underflows in float32
LARGEST = 1e100  # beyond it squares may overflow: it counts as infinite
STEEPEST = 2.0  # largest u of softmax: where others are almost 0 the two terms of its rows cancel
# of the spread of J over the box that is taken to remain where the inputs depend on each other
SHARE = 0.25


class Plane(Protocol):
    """`f(c + d) - f(c)` lies within `J d + off +- far` for all d in the spans; J is a linear map of
    its own for each sample.

    This holds in exact arithmetic for the numbers of J in float64 and for `f(c)` as `value`
    computes it.
    """

    @property
    def off(self) -> Tensor:
        """`(N, *out)`, float64."""

    @property
    def far(self) -> Tensor:
        """`(N, *out)`, float64, >= 0, rounded up."""

    @property
    def terms(self) -> int:
        """An upper bound on the additions and multiplications that go into one entry of `J^T w`."""

    def transpose(self, w: Tensor, owner: Tensor) -> tuple[Tensor, ...]:
        """`J^T w`: w `(R, *out)` in the type of J, owner `(R,)` the sample of each row; `(R,
        *in)` for each input.
        """

    def forward(self, *d: Tensor) -> Tensor:
        """`J d`: `(N, *in)` in float64 for each input, to `(N, *out)`; off by at most `(terms + 4)
        UNIT reach(|d|)`.
        """

    def reach(self, *sizes: Tensor) -> Tensor:
        """`|J| sizes`, by the magnitudes of J's factors: `(N, *in)` in float64 for each input,
        >= 0, to `(N, *out)`.
        """

    def to(self, dtype: torch.dtype) -> Plane:
        """J's numbers in another type; off and far stay float64.

        An entry of J is a sum of products of at most two factors, each rounded: float32 changes `J
        d` by at most `2.01 * 2^-24 reach(|d|)`.
        """


class Extent(Protocol):
    """What is known of the deviations of a curve's inputs beyond their spans."""

    def length(self, k: int, axes: tuple[int, ...]) -> Tensor:
        """Bounds on the Euclidean norm of `d - middle of its span` of input k along some axes: `(N,
        *shape)`, length 1 there.
        """

    def along(self, k: int, direction: Tensor) -> Span:
        """The range of `<direction, d>` along the last axis of input k, `(N, *shape)` to `(N, ...,
        1)`.
        """


class Curve(ABC):
    """A smooth function of one or two nodes, of tensors `(N, *shape)` in float64.

    keeps_gain: whether a scale after it is a part of it, and left in its place; lengthwise: whether
    `plane_on` asks how far inputs move.
    """

    keeps_gain: ClassVar[bool] = False
    lengthwise: ClassVar[bool] = False

    @abstractmethod
    def value(self, *v: Tensor) -> Tensor:
        """The function itself."""

    def output(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of its value for one sample; that of the input unless a curve says so."""
        return shapes[0]

    @abstractmethod
    def span(self, *spans: Span) -> Span:
        """The range of its values over ranges of the inputs, rounded outward; sides may be
        infinite.
        """

    @abstractmethod
    def plane(self, centres: Sequence[Tensor], spans: Sequence[Span]) -> Plane:
        """A linear bound around the centres; spans: of the deviations, low <= 0 <= high, finite."""

    def plane_on(self, centres: Sequence[Tensor], spans: Sequence[Span], extent: Extent) -> Plane:
        """The same with what is known beyond the spans, if that is of use."""
        return self.plane(centres, spans)

    @abstractmethod
    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The range of `J^T g`, rounded outward: g `(N, m, *out)`, spans: ranges of the inputs;
        `(N, m, *in)` for each.
        """

    def tangent(self, spans: Sequence[Span]) -> Tangent:
        """The derivative over ranges of the inputs, `(N, *in)` each: by `adjoint` alone unless a
        curve knows more.
        """
        return Enclosed(self, spans)

    def longest(self, shape: tuple[int, ...]) -> float:
        """How long its values of this shape can be along the last axis, in the Euclidean norm and
        whatever the input, not rounded; inf where nothing is known, as here.
        """
        return math.inf


def take_entries(values: Tensor, owner: Tensor) -> Tensor:
    """The values of each row's sample: owner `(R,)`, or `(1,)` if all rows are of one."""
    return values[owner]


def for_each(span: Span) -> Span:
    """For every row of a batch of gradients."""
    return span[0][:, None], span[1][:, None]


def flushed(values: Tensor) -> Tensor:
    """Numbers too small to matter become 0, so that they cannot underflow later."""
    return torch.where(values.abs() < SMALL, 0.0, values)


def halves_of(low: Tensor, high: Tensor) -> Span:
    """A point about in the middle, and the distance to the farther end, rounded up."""
    middle = (low + high) / 2
    return middle, torch.maximum(high - middle, middle - low) * (1 + UNIT)


def middle_of(c: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`z`, a point about in the middle of the box, `z - c`, and r with `|c + d - z| <= r` for
    all d in the span.

    `m` and the difference with it are off by half a unit of r each, since `|m| <= r` where 0 lies
    in the span. `1 + UNIT` adds at least a unit: it covers both, and what `m` adds is to spare.
    """
    z = c + (low + high) / 2
    m = z - c
    return z, m, torch.maximum(high - m, m - low) * (1 + UNIT) + UNIT * m.abs()


def end_points(c: Tensor, low: Tensor, high: Tensor) -> Span:
    """The values themselves, rounded outward."""
    slack = UNIT * (c.abs() + torch.maximum(-low, high))
    return c + low - slack, c + high + slack


def widened(low: Tensor, high: Tensor) -> Span:
    """The same ranges with infinity for what is beyond `LARGEST`."""
    low = torch.where(low < -LARGEST, -math.inf, low.clamp(max=LARGEST))
    return low, torch.where(high > LARGEST, math.inf, high.clamp(min=-LARGEST))


def squares(low: Tensor, high: Tensor) -> Span:
    """The range of squares, not rounded."""
    inner = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    return inner.square(), torch.maximum(low.abs(), high.abs()).square()


def mean_squares(low: Tensor, high: Tensor) -> Span:
    """The range of the mean square over the last axis, `(..., 1)` each, rounded outward."""
    least, most = (side.mean(-1, keepdim=True) for side in squares(low, high))
    slack = (low.shape[-1] + 4) * UNIT
    return least * (1 - slack), most * (1 + slack)


def outward(low: Tensor, high: Tensor, size: Tensor | None = None, terms: int = 1) -> Span:
    """Both sides moved by the rounding error of `terms` operations on magnitudes `size`, or on
    their own.
    """
    below, above = (low.abs(), high.abs()) if size is None else (size, size)
    return low - terms * UNIT * below - TINY, high + terms * UNIT * above + TINY


def interval_minus(a: Span, b: Span) -> Span:
    """`a - b` as intervals, not rounded."""
    return a[0] - b[1], a[1] - b[0]


def interval_product(a: Span, b: Span) -> Span:
    """The exact product of intervals, entry by entry, rounded outward; 0 times infinity is 0."""
    parts = [u * v for u in a for v in b]
    found = torch.stack(torch.broadcast_tensors(*parts))  # type: ignore[no-untyped-call]
    found = torch.where(found.isnan(), 0.0, found)
    return outward(found.amin(0), found.amax(0))


def all_but_own(values: Tensor) -> Tensor:
    """`sum_{k != j}` over the last axis from both ends: nothing cancels where the values have
    one sign.
    """
    inner = F.pad(values, (1, 0))[..., :-1].cumsum(-1)
    outer = F.pad(values, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)
    return inner + outer


def sum_of_others(span: Span) -> Span:
    """The interval of the sum of all other entries, rounded outward."""
    size = torch.maximum(span[0].abs(), span[1].abs()).sum(-1, keepdim=True)
    return outward(all_but_own(span[0]), all_but_own(span[1]), size, span[0].shape[-1] + 2)


def odds(low: Tensor, high: Tensor) -> Span:
    """The range of `s_j - log sum_{k != j} exp s_k` over a box, rounded outward; infinite where
    there is no other.
    """
    slack = (2 * low.shape[-1] + 16) * UNIT

    def side(own: Tensor, others: Tensor, sign: int) -> Tensor:
        top = torch.where(others.isinf(), -math.inf, others).amax(-1, keepdim=True)
        top = torch.where(top.isinf(), 0.0, top)  # numbers near 0 are the most accurate ones
        shifted = others - top
        own = own - top
        inner = F.pad(shifted, (1, 0), value=-math.inf)[..., :-1].logcumsumexp(-1)
        outer = F.pad(shifted, (0, 1), value=-math.inf)[..., 1:].flip(-1).logcumsumexp(-1).flip(-1)
        rest = torch.logaddexp(inner, outer)
        error = slack * (1 + own.abs() + torch.where(rest.isinf(), 0.0, rest.abs()))
        return torch.where(rest == -math.inf, math.inf, own - rest + sign * error)

    return side(low, high, -1), side(high, low, 1)


def jensen(p: Tensor, rest: Tensor, r: Tensor) -> Tensor:
    """The most that `log E exp(e - E e)` can be for `|e_k| <= r_k` under the weights `p_k / (1 -
    p_j)`, k != j.

    At most `g(x) = log((exp x - 1) / x) - 1 + x / (exp x - 1) <= x^2 / 8` with `x = 2 max r`: for a
    given range the worst distribution has two points. And at most `E (exp r - 1 - r)`, since `log y
    <= y - 1`: better where few entries are wide. A weight that underflows may still count at the
    other end of a wide box: none is 0 here.
    """
    x = 2 * r.amax(-1, keepdim=True)
    y = x.clamp(min=0.1)
    # 0.00125 at least: cancels little.
    sharp = y + (-torch.expm1(-y) / y).log() - 1 + y / torch.expm1(y)
    sharp = sharp * (1 + 2.0**-36)
    by_range = torch.where(x > 0.1, sharp, x.square() / 8)
    s = r.clamp(max=500)
    excess = torch.where(
        s < 0.01, s.square() / 2 * (1 + s / 3 + s.square() / 3), torch.expm1(s) - s
    )
    excess = torch.where(r > 500, math.inf, excess)
    by_weight = all_but_own((p + 1e-300) * excess) / rest * (1 + 2.0**-36)
    return torch.minimum(by_range * (1 + 4 * UNIT), by_weight)


def interval_sum(times: Callable[[Tensor, Tensor], Tensor], a: Span, b: Span, terms: int) -> Span:
    """A bilinear sum of intervals, of at most `terms` products each, rounded outward; 0 times
    infinity is 0.

    Twice, and the better taken: by signs, `a b <= max(a, 0) b + max(-a, 0) (-b)`, exact unless both
    cross 0; and by middles and half widths, exact where both are symmetric.
    """
    infinite = [(side[0] < -LARGEST) | (side[1] > LARGEST) for side in (a, b)]
    given = [tuple(torch.where(wide, 0.0, v) for v in side) for side, wide in zip((a, b), infinite)]
    (al, ah), (bl, bh) = given
    alp, ahp, blp, bhp = (side.clamp(min=0) for side in (al, ah, bl, bh))
    alm, ahm, blm, bhm = ((-side).clamp(min=0) for side in (al, ah, bl, bh))
    high = times(ahp, bhp) - times(alp, bhm) + times(alm, blm) - times(ahm, blp)
    low = times(alp, blp) - times(ahp, blm) - times(alm, bhp) + times(ahm, bhm)
    (ma, ra), (mb, rb) = halves_of(al, ah), halves_of(bl, bh)
    middle = times(ma, mb)
    radius = times(ma.abs(), rb) + times(ra, mb.abs() + rb)
    size = times(torch.maximum(al.abs(), ah.abs()), torch.maximum(bl.abs(), bh.abs()))
    low = torch.maximum(low, middle - radius)
    high = torch.minimum(high, middle + radius)
    low, high = outward(low, high, size, 4 * terms + 16)
    if low.device != HOST or infinite[0].any() or infinite[1].any():  # a device is not asked
        some = [wide | (side[0] != 0) | (side[1] != 0) for side, wide in zip((a, b), infinite)]
        first, second = (wide.double() for wide in infinite)
        hit = times(first, some[1].double()) + times(some[0].double(), second) > 0
        low = torch.where(hit, -math.inf, low)
        high = torch.where(hit, math.inf, high)
    return low, high
