"""Smooth functions that mix entries: products of two nodes, softmax and normalisation, for bound
propagation.

A curve knows its value, the range of its values over a box, a linear bound in deviations from a
sample (`Plane`), and the range of its transposed Jacobian applied to a gradient. The linear bounds
expand around the middle of the box, and bound the rest by what is exact in one variable:

- products: `(a + da)(b + db)` is bilinear, and what is left of it after the tangent plane in the
  middle is at most the product of the half widths (McCormick 1976).
- softmax: `p_j = sigma(s_j - lse_{k != j} s_k)`. The logistic function lies between two parallels
  to its chord, and the log-sum-exp above its tangent, by at most the largest `log E exp(e - E e)`
  over the box: Hoeffding's lemma (1963), sharp.
- normalisation: `y_i = c_i rho(q)`, a product of `c_i` and `rho(q) = (q + eps)^(-1/2)`, which is
  convex, with `q = mean c^2` above its own tangent by at most the mean of the squared half widths.

Where a constant is as good as the plane, because the box is wide, an entry's row of J is 0 and its
bound is the exact range.

Rounding. Sums of n terms are off by at most `n 2^-53` of their magnitudes, products by 2^-53
relatively; far takes all of this up, with room. exp is accurate to 2^-52, and where it is not 0 its
argument is at most 745 and rounded: softmax is off by `(3 n + 800) 2^-52` relatively.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.activations import ACTIVATIONS
from wassail.certificates.device import HOST
from wassail.errors import InputError

Span: TypeAlias = "tuple[Tensor, Tensor]"
U = 2.0**-52
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

    def reach(self, *sizes: Tensor) -> Tensor:
        """`|J| sizes`, by the magnitudes of J's factors: `(N, *in)` in float64 for each input,
        >= 0, to `(N, *out)`.
        """

    def to(self, dtype: torch.dtype) -> Plane:
        """J's numbers in another type; off and far stay float64.

        An entry of J is a sum of products of at most two factors, each rounded: float32 changes `J
        d` by at most `2.01 * 2^-24 reach(|d|)`.
        """


class Curve(Protocol):
    """A smooth function of one or two nodes, of tensors `(N, *shape)` in float64."""

    def value(self, *v: Tensor) -> Tensor:
        """The function itself."""

    def output(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of its value for one sample."""

    def span(self, *spans: Span) -> Span:
        """The range of its values over ranges of the inputs, rounded outward; sides may be
        infinite.
        """

    def plane(self, centres: Sequence[Tensor], spans: Sequence[Span]) -> Plane:
        """A linear bound around the centres; spans: of the deviations, low <= 0 <= high, finite."""

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The range of `J^T g`, rounded outward: g `(N, m, *out)`, spans: ranges of the inputs;
        `(N, m, *in)` for each.
        """


@dataclass(frozen=True)
class Product:
    """The einsum of two nodes for one sample, such as `"hik,hjk->hij"`.

    No letter occurs twice in one operand, and every letter of an operand occurs in the other one or
    after the arrow.
    """

    equation: str

    def __post_init__(self) -> None:
        a, b, out = self._letters
        parts = (a, b, out)
        if any(len(set(part)) < len(part) for part in parts) or not set(a) ^ set(b) <= set(
            out
        ) <= set(a + b):
            raise InputError(
                f"the product {self.equation!r} sums or repeats a letter of one operand: write "
                "it as two steps."
            )

    @cached_property
    def _letters(self) -> tuple[str, str, str]:
        left, out = self.equation.replace(" ", "").split("->")
        a, b = left.split(",")
        return a, b, out

    def _times(self, x: str, y: str, out: str, u: Tensor, v: Tensor, rows: str = "") -> Tensor:
        """The einsum `x, y -> out` for a batch; rows: a letter for a second batch axis of u and
        of the result.
        """
        batch = next(k for k in string.ascii_letters if k not in self.equation + rows)
        return torch.einsum(f"{batch}{rows}{x},{batch}{y}->{batch}{rows}{out}", u, v)

    @cached_property
    def _row(self) -> str:
        return next(k for k in reversed(string.ascii_letters) if k not in self.equation)

    def value(self, *v: Tensor) -> Tensor:
        """`(N, *a), (N, *b) -> (N, *out)`."""
        a, b, out = self._letters
        return self._times(a, b, out, v[0], v[1])

    def output(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the letters after the arrow."""
        sizes = self._sizes(*shapes)
        return tuple(sizes[k] for k in self._letters[2])

    def _sizes(self, *shapes: tuple[int, ...]) -> dict[str, int]:
        return dict(zip("".join(self._letters[:2]), shapes[0] + shapes[1]))

    def span(self, *spans: Span) -> Span:
        """Interval arithmetic; 0 times infinity is 0."""
        a, b, out = self._letters
        sizes = self._sizes(*(tuple(side.shape[1:]) for side, _ in spans))
        terms = math.prod(size for k, size in sizes.items() if k not in out)
        return _interval_sum(lambda u, v: self._times(a, b, out, u, v), spans[0], spans[1], terms)

    def summed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of each operand that are summed over: a row along them meets a row of the
        other operand.
        """
        a, b, out = self._letters
        return tuple(i for i, k in enumerate(a) if k not in out), tuple(
            i for i, k in enumerate(b) if k not in out
        )

    def plane(
        self, centres: Sequence[Tensor], spans: Sequence[Span], lengths: Sequence[Tensor] = ()
    ) -> Plane:
        """`(b + mb) da + (a + ma) db - ma mb`, m the middles of the spans, +- the product of their
        half widths.

        lengths: bounds on the Euclidean norms of the rows of `da - ma` and `db - mb` along the
        summed axes, which have length 1 there: `|<u, v>| <= |u| |v|`.
        """
        a, b, out = self._letters
        sizes = self._sizes(*(tuple(c.shape[1:]) for c in centres))
        terms = math.prod(size for k, size in sizes.items() if k not in out)
        middle, radius = zip(*(_halves(*span) for span in spans))
        first, second = (_flushed(c + m) for c, m in zip(centres, middle))
        most = max(math.prod(size for k, size in sizes.items() if k not in part) for part in (a, b))
        zero = first.new_zeros(())
        plane = _ProductPlane(self, first, second, zero, zero, most + 1)
        size = self.value(*(c.abs() for c in centres)) + self.value(*(m.abs() for m in middle))
        reach = [torch.maximum(-low, high) for low, high in spans]
        ones = [torch.full_like(v, SMALL) for v in reach]
        lost = self.value(ones[0], reach[1]) + self.value(
            reach[0], ones[1]
        )  # what `_flushed` drops, and more
        rest = self.value(*radius)
        if lengths:
            rest = torch.minimum(
                rest,
                self.value(*(v.expand_as(c) / math.sqrt(terms) for v, c in zip(lengths, centres))),
            )
        far = rest + U * ((terms + 4) * size + plane.reach(*reach)) + lost
        return replace(plane, off=-self.value(*middle), far=far * (1 + (terms + 8) * U) + TINY)

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The gradient at a factor is the einsum of g with the other factor, in interval
        arithmetic.
        """
        a, b, out = self._letters
        sizes = self._sizes(*(tuple(low.shape[1:]) for low, _ in spans))

        def at(own: str, other: str, span: Span) -> Span:
            terms = math.prod(size for k, size in sizes.items() if k not in own)
            return _interval_sum(
                lambda u, v: self._times(out, other, own, u, v, self._row), g, span, terms
            )

        return at(a, b, spans[1]), at(b, a, spans[0])


@dataclass(frozen=True, eq=False)
class _ProductPlane:
    """`J (da, db) = einsum(da, second) + einsum(first, db)`."""

    product: Product
    first: Tensor
    second: Tensor
    off: Tensor
    far: Tensor
    terms: int

    def transpose(self, w: Tensor, owner: Tensor) -> tuple[Tensor, ...]:
        a, b, out = self.product._letters
        first = _take(self.first, owner)
        second = _take(self.second, owner)
        return self.product._times(out, b, a, w, second), self.product._times(out, a, b, w, first)

    def reach(self, *sizes: Tensor) -> Tensor:
        first = self.first.abs().double()
        second = self.second.abs().double()
        return self.product.value(sizes[0], second) + self.product.value(first, sizes[1])

    def to(self, dtype: torch.dtype) -> _ProductPlane:
        return replace(self, first=self.first.to(dtype), second=self.second.to(dtype))


@dataclass(frozen=True)
class Softmax:
    """`exp(s_j) / sum_k exp(s_k)` over the last axis."""

    def value(self, *v: Tensor) -> Tensor:
        """Same shape."""
        return torch.softmax(v[0], -1)

    def output(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Same shape."""
        return shapes[0]

    def span(self, *spans: Span) -> Span:
        """`p_j` rises in `s_j` and falls in the others: exact, `1 / (1 + sum_{k != j} exp(h_k -
        l_j))` and its mirror image.
        """
        low, high = (torch.sigmoid(side) for side in _odds(*spans[0]))
        return low * (1 - 4 * U), (high * (1 + 4 * U) + TINY).clamp(max=1)

    def plane(self, centres: Sequence[Tensor], spans: Sequence[Span]) -> Plane:
        """Rows `u_j (d_j - <p, d>)`, p the value in the middle z of the box; at a point `u = p`,
        the tangent.

        With `a_j = s_j - lse_{k != j} s_k`: `a_j(z + e) = a_j(z) + e_j - <p, e>_{k != j} / (1 -
        p_j) - gap`, and `sigma(a)` lies within `slope a + [lower, upper]` with the slope of its
        chord. So `u_j = slope / (1 - p_j)`.
        """
        (c,), ((low, high),) = centres, spans
        z, m, r = _middle(c, low, high)
        here = self.value(c)
        p = self.value(z)
        delta = (3 * c.shape[-1] + 800) * U
        rest = _others(p)
        kept = _flushed(p)
        bottom, top = _odds(*_ends(c, low, high))
        useful = (rest > SMALL) & (top - bottom < LARGEST)
        bottom, top = (torch.where(useful, side, 0.0) for side in (bottom, top))
        at = [torch.where(useful, side, 0.0) for side in _odds(z, z)]
        start = (at[0] + at[1]) / 2
        doubt = at[1] - at[0]
        rest = torch.where(useful, rest, 1.0)
        gap = _jensen(p, rest, r)
        u = _flushed((_chord(bottom, top) / rest).clamp(max=STEEPEST))
        slope = u * rest
        sigma = ACTIVATIONS["sigmoid"]
        (upper, above), (lower, below) = (
            sigma.touch(slope, bottom, top, side) for side in (True, False)
        )
        upper = sigma.value(upper) - slope * upper + above
        lower = sigma.value(lower) - slope * lower - below - slope * gap
        off = (
            (upper + lower) / 2 + slope * start - u * (m - (kept * m).sum(-1, keepdim=True)) - here
        )
        reach = r + m.abs() + (kept * (r + m.abs())).sum(-1, keepdim=True)
        far = (
            (upper - lower) / 2
            + slope * (doubt + delta * (top - bottom))
            + u * (delta * reach + SMALL * r.sum(-1, keepdim=True))
        )
        far = (
            far
            + delta * here
            + 8 * U * (upper.abs() + lower.abs() + slope * start.abs() + here)
            + TINY
        )
        spread = u * (rest * r + _others(kept * r))
        least, most = self.span(_ends(c, low, high))
        flat = (most - least) / 2 + delta * here + 4 * U
        better = useful & (far + SHARE * spread < flat)
        far = torch.where(better, far, flat)
        off = torch.where(better, off, (least + most) / 2 - here)
        u = torch.where(better, u, 0.0)
        return _RankOne(u, -u, kept, off, far)

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """`p_j ((1 - p_j) h_j - sum_{k != j} p_k h_k)` with `h = g - mean`, and `p_j (1 - p_j)`
        times a difference of g's.
        """
        low, high = p = _each(self.span(spans[0]))
        middle = (low + high) / 2
        mean = (middle * (g[0] + g[1])).sum(-1, keepdim=True) / (2 * middle.sum(-1, keepdim=True))
        mean = torch.where(mean.isfinite(), mean, 0.0)  # any number will do
        h = _outward(g[0] - mean, g[1] - mean, g[0].abs() + g[1].abs() + mean.abs(), 1)
        one = _outward(1 - high, 1 - low, torch.ones_like(low), 1)
        own = _outward(*_minus(_times(one, h), _sum_of_others(_times(p, h))))
        found = _times(p, own)
        # p (1 - p) is largest at 1/2, and a mean of the g's lies between them.
        ends = torch.stack(
            [low * (1 - low), high * (1 - high), torch.where((low < 0.5) & (high > 0.5), 0.25, 0.0)]
        )
        product = (
            (ends[:2].amin(0) * (1 - 4 * U) - 2 * U * high).clamp(min=0),
            ends.amax(0) * (1 + 4 * U) + 2 * U * high,
        )
        room = _outward(g[0] - g[1].amax(-1, keepdim=True), g[1] - g[0].amin(-1, keepdim=True))
        other = _times(product, room)
        return ((torch.maximum(found[0], other[0]), torch.minimum(found[1], other[1])),)


@dataclass(frozen=True)
class Normalise:
    """`c / sqrt(mean(c^2) + eps)` over the last axis: what LayerNorm does to centred values,
    and RMSNorm to any.
    """

    eps: float

    def value(self, *v: Tensor) -> Tensor:
        """Same shape."""
        return v[0] * (v[0].square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def output(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Same shape."""
        return shapes[0]

    def span(self, *spans: Span) -> Span:
        """`y_i` rises in `c_i`, and its magnitude falls in the magnitudes of the others: exact."""
        low, high = _widened(*spans[0])
        least, most = _squares(low, high)
        n = low.shape[-1]
        self._rates(*_mean_squares(low, high))
        near = _others(least) / n + self.eps
        away = _others(most) / n + self.eps

        def side(end: Tensor, outer: Tensor) -> Tensor:
            """`y_i` with `c_i` at one end, the others small where that makes it larger (outer)
            and large elsewhere.
            """
            value = end / (end.square() / n + torch.where(outer, near, away)).sqrt()
            return torch.where(end.isinf(), end.sign() * math.sqrt(n), value)

        bottom = side(low, low < 0)
        top = side(high, high > 0)
        return _outward(bottom, top, terms=n + 8)

    def direction(self, centre: Tensor, span: Span) -> Tensor:
        """`z / n`, z the middle of the box: who can bound `<z / n, d>` better than by the box
        tells `plane`.
        """
        return _middle(centre, *span)[0] / centre.shape[-1]

    def _rates(self, q: Tensor, top: Tensor) -> Span:
        """The range of `rho` for a range of the mean square, rounded outward."""
        q = q + self.eps
        top = top + self.eps
        if (
            q.device == HOST and not (q > 0).all()
        ):  # on a device it becomes infinity or NaN, which are no bounds
            raise InputError(
                "a LayerNorm or RMSNorm with eps=0 may divide by 0 here: give it a positive eps, "
                "or a smaller radius or domain."
            )
        return top.rsqrt() * (1 - 4 * U), q.rsqrt() * (1 + 4 * U)

    def plane(
        self,
        centres: Sequence[Tensor],
        spans: Sequence[Span],
        along: Span | None = None,
        length: Tensor | None = None,
    ) -> Plane:
        """Rows `rate d_i + 2 slope z_i <z, d> / n`, z the middle of the box; at a point `rho (d_i -
        y_i <y, d> / n)`.

        `rho` lies within `slope q + [lower, upper]` with the slope of its chord, `q(z + e) = q(z) +
        2 <z, e> / n + |e|^2 / n`, and `y_i = z_i rho + e_i rho`, where the last factor is taken to
        be the middle of its range, `rate`. along: a range of `<direction, d>`, `(N, ..., 1)`, if
        one is known that is better than the box's; length: a bound on the Euclidean norm of d minus
        the middle of its span, `(N, ..., 1)`.
        """
        (c,), ((low, high),) = centres, spans
        n = c.shape[-1]
        here = self.value(c)
        z, m, r = _middle(c, low, high)
        q = z.square().mean(-1, keepdim=True)
        excess = r.square().mean(-1, keepdim=True)
        if length is not None:  # the middle is rounded, and z with it
            excess = torch.minimum(
                excess,
                (length + U * math.sqrt(n) * (z.abs() + m.abs()).amax(-1, keepdim=True)).square()
                / n,
            )
        least, most = _mean_squares(*_ends(c, low, high))
        if along is not None:
            start = (z * m).mean(-1, keepdim=True)
            slack = (n + 16) * U * (q + excess + (z.abs() * (m.abs() + r)).mean(-1, keepdim=True))
            least = torch.maximum(least, q + 2 * (along[0] - start) - 4 * slack)
            most = torch.minimum(most, q + 2 * (along[1] - start) + excess + 4 * slack)
        rho = self._rates(least, most)
        rate, doubt = _halves(*rho)
        # The chord of q^(-1/2) between q = rho^-2 at its two ends; below it the tangent of the same
        # slope touches.
        slope = -rho[0] * rho[1] / (1 / rho[0] + 1 / rho[1])
        touch = (-2 * slope).pow(
            -1 / 3
        )  # the square root of where the derivative -q^(-3/2) / 2 is the slope
        lower = 1 / touch - slope * touch.square() + slope * excess
        upper = torch.maximum(*(side - slope / side.square() for side in rho))
        error = (n + 32) * U
        q = q + self.eps
        centre = (upper + lower) / 2 + slope * q
        width = (upper - lower) / 2
        width = width + error * (
            upper.abs() + lower.abs() - slope * (q + rho[0].square().reciprocal())
        )
        unit = _flushed(z * rate)
        gain = _flushed(2 / n * slope * z / rate)
        alpha = rate.expand_as(z)
        moved = rate * m + gain * (unit * m).sum(-1, keepdim=True)
        size = (
            rate * (m.abs() + r)
            + gain.abs() * (unit.abs() * (m.abs() + r)).sum(-1, keepdim=True)
            + here.abs()
        )
        far = z.abs() * width + r * doubt + error * (size + z.abs() * centre.abs())
        # What `_flushed` drops from the unit and from the gain.
        far = (
            far
            + SMALL
            * (gain.abs() * r.sum(-1, keepdim=True) + (unit.abs() * r).sum(-1, keepdim=True))
            + TINY
        )
        off = z * centre - moved - here
        spread = (alpha + gain * unit).abs() * r + gain.abs() * _others(unit.abs() * r)
        least, most = self.span(_ends(c, low, high))
        flat = (most - least) / 2 + error * here.abs() + TINY
        better = far + SHARE * spread < flat
        far = torch.where(better, far, flat)
        off = torch.where(better, off, (least + most) / 2 - here)
        return _RankOne(
            torch.where(better, alpha, 0.0), torch.where(better, gain, 0.0), unit, off, far
        )

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """`rho ((1 - y_i^2 / n) g_i - y_i sum_{k != i} y_k g_k / n)`, and at most `rho_max
        ||g||_2` in magnitude.
        """
        low, high = _widened(*spans[0])
        n = low.shape[-1]
        rho, y = _each(self._rates(*_mean_squares(low, high))), _each(self.span(spans[0]))
        least, most = _squares(*y)
        own = _outward((1 - most / n).clamp(min=0), 1 - least / n, torch.ones_like(least), 2)
        size = torch.maximum(g[0].abs(), g[1].abs())
        norm = size.square().sum(-1, keepdim=True).sqrt() * (1 + (n + 8) * U) + TINY
        low, high = _sum_of_others(_times(y, g))
        others = _times(y, _outward(low / n, high / n))
        found = _times(rho, _outward(*_minus(_times(own, g), others)))
        bound = rho[1] * norm * (1 + 4 * U)
        return ((torch.maximum(found[0], -bound), torch.minimum(found[1], bound)),)


@dataclass(frozen=True, eq=False)
class _RankOne:
    """`J d = alpha d + gain <unit, d>` over the last axis."""

    alpha: Tensor
    gain: Tensor
    unit: Tensor
    off: Tensor
    far: Tensor

    @property
    def terms(self) -> int:
        return self.unit.shape[-1] + 4

    def transpose(self, w: Tensor, owner: Tensor) -> tuple[Tensor, ...]:
        alpha, gain, unit = (_take(v, owner) for v in (self.alpha, self.gain, self.unit))
        return (torch.addcmul(alpha * w, unit, (gain * w).sum(-1, keepdim=True)),)

    def reach(self, *sizes: Tensor) -> Tensor:
        alpha, gain, unit = (v.abs().double() for v in (self.alpha, self.gain, self.unit))
        return alpha * sizes[0] + gain * (unit * sizes[0]).sum(-1, keepdim=True)

    def to(self, dtype: torch.dtype) -> _RankOne:
        return replace(
            self, alpha=self.alpha.to(dtype), gain=self.gain.to(dtype), unit=self.unit.to(dtype)
        )


def _take(values: Tensor, owner: Tensor) -> Tensor:
    """The values of each row's sample: owner `(R,)`, or `(1,)` if all rows are of one."""
    return values[owner]


def _each(span: Span) -> Span:
    """For every row of a batch of gradients."""
    return span[0][:, None], span[1][:, None]


def _flushed(values: Tensor) -> Tensor:
    return torch.where(values.abs() < SMALL, 0.0, values)


def _halves(low: Tensor, high: Tensor) -> Span:
    """A point about in the middle, and the distance to the farther end, rounded up."""
    middle = (low + high) / 2
    return middle, torch.maximum(high - middle, middle - low) * (1 + U)


def _middle(c: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`z`, a point about in the middle of the box, `z - c`, and r with `|c + d - z| <= r` for
    all d in the span.
    """
    z = c + (low + high) / 2
    m = z - c
    return z, m, torch.maximum(high - m, m - low) * (1 + U) + U * m.abs()


def _ends(c: Tensor, low: Tensor, high: Tensor) -> Span:
    """The values themselves, rounded outward."""
    slack = U * (c.abs() + torch.maximum(-low, high))
    return c + low - slack, c + high + slack


def _widened(low: Tensor, high: Tensor) -> Span:
    """The same ranges with infinity for what is beyond `LARGEST`."""
    low = torch.where(low < -LARGEST, -math.inf, low.clamp(max=LARGEST))
    return low, torch.where(high > LARGEST, math.inf, high.clamp(min=-LARGEST))


def _squares(low: Tensor, high: Tensor) -> Span:
    """The range of squares, not rounded."""
    inner = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    return inner.square(), torch.maximum(low.abs(), high.abs()).square()


def _mean_squares(low: Tensor, high: Tensor) -> Span:
    """The range of the mean square over the last axis, `(..., 1)` each, rounded outward."""
    least, most = (side.mean(-1, keepdim=True) for side in _squares(low, high))
    slack = (low.shape[-1] + 4) * U
    return least * (1 - slack), most * (1 + slack)


def _outward(low: Tensor, high: Tensor, size: Tensor | None = None, terms: int = 1) -> Span:
    """Both sides moved by the rounding error of `terms` operations on magnitudes `size`, or on
    their own.
    """
    below, above = (low.abs(), high.abs()) if size is None else (size, size)
    return low - terms * U * below - TINY, high + terms * U * above + TINY


def _minus(a: Span, b: Span) -> Span:
    return a[0] - b[1], a[1] - b[0]


def _times(a: Span, b: Span) -> Span:
    """The exact product of intervals, entry by entry, rounded outward; 0 times infinity is 0."""
    found = torch.stack(torch.broadcast_tensors(*(u * v for u in a for v in b)))  # type: ignore[no-untyped-call]
    found = torch.where(found.isnan(), 0.0, found)
    return _outward(found.amin(0), found.amax(0))


def _others(values: Tensor) -> Tensor:
    """`sum_{k != j}` over the last axis from both ends: nothing cancels where the values have
    one sign.
    """
    inner = F.pad(values, (1, 0))[..., :-1].cumsum(-1)
    outer = F.pad(values, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)
    return inner + outer


def _sum_of_others(span: Span) -> Span:
    size = torch.maximum(span[0].abs(), span[1].abs()).sum(-1, keepdim=True)
    return _outward(_others(span[0]), _others(span[1]), size, span[0].shape[-1] + 2)


def _odds(low: Tensor, high: Tensor) -> Span:
    """The range of `s_j - log sum_{k != j} exp s_k` over a box, rounded outward; infinite where
    there is no other.
    """
    slack = (2 * low.shape[-1] + 16) * U

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


def _jensen(p: Tensor, rest: Tensor, r: Tensor) -> Tensor:
    """The most that `log E exp(e - E e)` can be for `|e_k| <= r_k` under the weights `p_k / (1 -
    p_j)`, k != j.

    At most `g(x) = log((exp x - 1) / x) - 1 + x / (exp x - 1) <= x^2 / 8` with `x = 2 max r`: for a
    given range the worst distribution has two points. And at most `E (exp r - 1 - r)`, since `log y
    <= y - 1`: better where few entries are wide. A weight that underflows may still count at the
    other end of a wide box: none is 0 here.
    """
    x = 2 * r.amax(-1, keepdim=True)
    y = x.clamp(min=0.1)
    sharp = (y + (-torch.expm1(-y) / y).log() - 1 + y / torch.expm1(y)) * (
        1 + 2.0**-36
    )  # 0.00125 at least: cancels little
    by_range = torch.where(x > 0.1, sharp, x.square() / 8)
    s = r.clamp(max=500)
    excess = torch.where(
        s < 0.01, s.square() / 2 * (1 + s / 3 + s.square() / 3), torch.expm1(s) - s
    )
    excess = torch.where(r > 500, math.inf, excess)
    by_weight = _others((p + 1e-300) * excess) / rest * (1 + 2.0**-36)
    return torch.minimum(by_range * (1 + 4 * U), by_weight)


def _chord(bottom: Tensor, top: Tensor) -> Tensor:
    """The slope of the logistic function's chord: the one that parallel lines around a convex
    or concave piece have.
    """
    sigma = ACTIVATIONS["sigmoid"]
    wide = (
        top - bottom > 1e-5
    )  # below it a difference of values is less accurate than the derivative
    chord = (sigma.value(top) - sigma.value(bottom)) / torch.where(wide, top - bottom, 1.0)
    return torch.where(wide, chord, sigma.derivative((bottom + top) / 2))


def _interval_sum(times: Callable[[Tensor, Tensor], Tensor], a: Span, b: Span, terms: int) -> Span:
    """A bilinear sum of intervals, of at most `terms` products each, rounded outward; 0 times
    infinity is 0.

    Twice, and the better taken: by signs, `a b <= max(a, 0) b + max(-a, 0) (-b)`, exact unless both
    cross 0; and by middles and half widths, exact where both are symmetric.
    """
    infinite = [(side[0] < -LARGEST) | (side[1] > LARGEST) for side in (a, b)]
    given = [tuple(torch.where(wide, 0.0, v) for v in side) for side, wide in zip((a, b), infinite)]
    (al, ah), (bl, bh) = given
    alp = al.clamp(min=0)
    ahp = ah.clamp(min=0)
    alm = (-al).clamp(min=0)
    ahm = (-ah).clamp(min=0)
    blp = bl.clamp(min=0)
    bhp = bh.clamp(min=0)
    blm = (-bl).clamp(min=0)
    bhm = (-bh).clamp(min=0)
    high = times(ahp, bhp) - times(alp, bhm) + times(alm, blm) - times(ahm, blp)
    low = times(alp, blp) - times(ahp, blm) - times(alm, bhp) + times(ahm, bhm)
    (ma, ra), (mb, rb) = _halves(al, ah), _halves(bl, bh)
    middle = times(ma, mb)
    radius = times(ma.abs(), rb) + times(ra, mb.abs() + rb)
    size = times(torch.maximum(al.abs(), ah.abs()), torch.maximum(bl.abs(), bh.abs()))
    low = torch.maximum(low, middle - radius)
    high = torch.minimum(high, middle + radius)
    low, high = _outward(low, high, size, 4 * terms + 16)
    if low.device != HOST or infinite[0].any() or infinite[1].any():  # a device is not asked
        present = [
            (wide | (side[0] != 0) | (side[1] != 0)).double()
            for side, wide in zip((a, b), infinite)
        ]
        hit = times(infinite[0].double(), present[1]) + times(present[0], infinite[1].double()) > 0
        low = torch.where(hit, -math.inf, low)
        high = torch.where(hit, math.inf, high)
    return low, high
