"""Normalised tokens: LayerNorm, RMSNorm, GroupNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.maps import Scale
from wassail.certificates.graph.operators.linear import linear
from wassail.certificates.graph.operators.registry import spelled
from wassail.certificates.graph.planes import (
    SHARE,
    SMALL,
    TINY,
    Curve,
    Extent,
    Plane,
    Span,
    all_but_own,
    end_points,
    flushed,
    for_each,
    halves_of,
    interval_minus,
    interval_product,
    mean_squares,
    middle_of,
    outward,
    squares,
    sum_of_others,
    take_entries,
    widened,
)
from wassail.certificates.graph.tangent import Tangent, last_sum, middle_and_width
from wassail.errors import InputError
from wassail.rounding import UNIT, length


@dataclass(frozen=True)
class Normalise(Curve):
    """`c / sqrt(mean(c^2) + eps)` over the last axis: what LayerNorm does to centred values,
    and RMSNorm to any.
    """

    keeps_gain: ClassVar[bool] = True
    lengthwise: ClassVar[bool] = True

    eps: float

    def value(self, *v: Tensor) -> Tensor:
        """Same shape."""
        return v[0] * (v[0].square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def longest(self, shape: tuple[int, ...]) -> float:
        """`sqrt(d)` for d entries: the mean of their squares is at most 1."""
        return math.sqrt(shape[-1])

    def span(self, *spans: Span) -> Span:
        """`y_i` rises in `c_i`, and its magnitude falls in the magnitudes of the others: exact."""
        low, high = widened(*spans[0])
        least, most = squares(low, high)
        n = low.shape[-1]
        self._rates(*mean_squares(low, high))
        near = all_but_own(least) / n + self.eps
        away = all_but_own(most) / n + self.eps

        def side(end: Tensor, outer: Tensor) -> Tensor:
            """`y_i` with `c_i` at one end, the others small where that makes it larger (outer)
            and large elsewhere.
            """
            value = end / (end.square() / n + torch.where(outer, near, away)).sqrt()
            return torch.where(end.isinf(), end.sign() * math.sqrt(n), value)

        bottom = side(low, low < 0)
        top = side(high, high > 0)
        return outward(bottom, top, terms=n + 8)

    def direction(self, centre: Tensor, span: Span) -> Tensor:
        """`z / n`, z the middle of the box: a range of `<z / n, d>` that is narrower than the box's
        makes `plane` better.
        """
        return middle_of(centre, *span)[0] / centre.shape[-1]

    def _rates(self, q: Tensor, top: Tensor) -> Span:
        """The range of `rho` for a range of the mean square, rounded outward.

        The sum, the root, its inverse and the product are off by less than 2 units. The others of
        the 8 are for products with `rho`.
        """
        q = q + self.eps
        top = top + self.eps
        # On a device it becomes infinity or NaN, which are no bounds.
        if q.device == HOST and not (q > 0).all():
            raise InputError(
                "a LayerNorm or RMSNorm with eps=0 may divide by 0 here: give it a positive eps, "
                "or a smaller radius or domain."
            )
        return top.rsqrt() * (1 - 8 * UNIT), q.rsqrt() * (1 + 8 * UNIT)

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

        Rounding. What goes through `rho` is `z_i` times sums of at most n + 16 terms of the sizes
        `|upper|`, `|lower|`, `|slope| q` and `|slope| excess`, where `excess <= rho[0]^-2`: `error`
        in the width is for them. So are the products `gain <unit, d>` and `gain <unit, m>`, which
        are below `|slope| |z_i| (q + excess)` since `2 a b <= a^2 + b^2` and `|m| <= r`, and what
        `flushed` drops from the unit. The rest is `rate` times at most r, rounded 8 times: `doubt`
        has 4 units to spare for that, from `_rates`.
        """
        (c,), (span,) = centres, spans
        n = c.shape[-1]
        here = self.value(c)
        z, m, r = middle_of(c, *span)
        q, excess, rho = self._around(c, span, along, length)
        rate, doubt = halves_of(*rho)
        slope, lower, upper = _chord(rho, excess)
        error = (n + 32) * UNIT
        q = q + self.eps
        centre = (upper + lower) / 2 + slope * q
        width = (upper - lower) / 2
        width = width + error * (
            upper.abs() + lower.abs() - slope * (q + rho[0].square().reciprocal())
        )
        unit = flushed(z * rate)
        gain = flushed(2 / n * slope * z / rate)
        alpha = rate.expand_as(z)
        moved = rate * m + gain * (unit * m).sum(-1, keepdim=True)
        far = z.abs() * width + r * doubt
        # What `flushed` drops from the gain.
        far = far + SMALL * (unit.abs() * r).sum(-1, keepdim=True) + TINY
        off = z * centre - moved - here
        spread = (alpha + gain * unit).abs() * r + gain.abs() * all_but_own(unit.abs() * r)
        least, most = self.span(end_points(c, *span))
        # `span` is wider by TINY on both sides.
        flat = (most - least) / 2 + error * (here.abs() + least.abs() + most.abs())
        better = far + SHARE * spread < flat
        far = torch.where(better, far, flat)
        off = torch.where(better, off, (least + most) / 2 - here)
        alpha, gain = (torch.where(better, v, 0.0) for v in (alpha, gain))
        return RankOne(alpha, gain, unit, off, far)

    def _around(
        self, c: Tensor, span: Span, along: Span | None, length: Tensor | None
    ) -> tuple[Tensor, Tensor, Span]:
        """`q(z)`, the most that `|e|^2 / n` is, and the range of `rho`: see `plane`.

        The middle is rounded, and z with it: by less than 2^-53 (q + excess), which `error` covers.
        """
        n = c.shape[-1]
        z, m, r = middle_of(c, *span)
        q = z.square().mean(-1, keepdim=True)
        excess = r.square().mean(-1, keepdim=True)
        if length is not None:
            rounded = UNIT * math.sqrt(n) * (z.abs() + m.abs()).amax(-1, keepdim=True)
            excess = torch.minimum(excess, (length + rounded).square() / n)
        least, most = mean_squares(*end_points(c, *span))
        if along is not None:
            start = (z * m).mean(-1, keepdim=True)
            size = q + excess + (z.abs() * (m.abs() + r)).mean(-1, keepdim=True)
            slack = (n + 16) * UNIT * size
            least = torch.maximum(least, q + 2 * (along[0] - start) - 4 * slack)
            most = torch.minimum(most, q + 2 * (along[1] - start) + excess + 4 * slack)
        return q, excess, self._rates(least, most)

    def plane_on(self, centres: Sequence[Tensor], spans: Sequence[Span], extent: Extent) -> Plane:
        """With the range along the centre, and the length, of every token."""
        along = extent.along(0, self.direction(centres[0], spans[0]))
        length = extent.length(0, (centres[0].ndim - 2,))
        return self.plane(centres, spans, along, length)

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """`rho ((1 - y_i^2 / n) g_i - y_i sum_{k != i} y_k g_k / n)`, and at most `rho_max
        ||g||_2` in magnitude.

        The division by n is one of the terms that `sum_of_others` has to spare, the difference is
        rounded by less than `rho` has to spare, and so is the product with the norm.
        """
        low, high = widened(*spans[0])
        n = low.shape[-1]
        rho, y = for_each(self._rates(*mean_squares(low, high))), for_each(self.span(spans[0]))
        least, most = squares(*y)
        own = outward((1 - most / n).clamp(min=0), 1 - least / n, torch.ones_like(least), 2)
        size = torch.maximum(g[0].abs(), g[1].abs())
        norm = length(size, 2, -1)[..., None] * (1 + (n + 8) * UNIT)
        low, high = sum_of_others(interval_product(y, g))
        others = interval_product(y, (low / n, high / n))
        found = interval_product(rho, interval_minus(interval_product(own, g), others))
        bound = rho[1] * norm
        return ((torch.maximum(found[0], -bound), torch.minimum(found[1], bound)),)

    def tangent(self, spans: Sequence[Span]) -> Tangent:
        """In the middle."""
        return _NormaliseTangent.make(self, spans)


def _chord(rho: Span, excess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slope of the chord of `q^(-1/2)` between `q = rho^-2` at its two ends, and what `rho -
    slope q(z)` lies between: below the chord the tangent of the same slope touches.
    """
    slope = -rho[0] * rho[1] / (1 / rho[0] + 1 / rho[1])
    touch = (-2 * slope).pow(-1 / 3)  # the root of where the derivative -q^(-3/2) / 2 is the slope
    lower = 1 / touch - slope * touch.square() + slope * excess
    upper = torch.maximum(*(side - slope / side.square() for side in rho))
    return slope, lower, upper


@dataclass(frozen=True, eq=False)
class _NormaliseTangent:
    """`M t = rho (t - y <y, t> / n)`: rho `(N, 1, ..., 1)` and y `(N, 1, *shape)`, and their
    largest deviations.

    `J^T h - M^T h = drho (h - (y + dy) <y + dy, h> / n) - rho (dy <y + dy, h> + y <dy, h>) / n`.
    The rounding of `<y, g>` is below `much = (n + 8) U <|y|, |g|>`, and n of these units; of the
    others two are for the product with y and the quotient after it.
    """

    rho: Tensor
    y: Tensor
    rho_width: Tensor
    y_width: Tensor
    terms: int

    @classmethod
    def make(cls, curve: Normalise, spans: Sequence[Span]) -> _NormaliseTangent:
        low, high = spans[0]
        n = low.shape[-1]
        c = middle_and_width(spans[0])[0]
        least, most = squares(low, high)
        slack = (n + 16) * UNIT
        top = (least.mean(-1, keepdim=True) + curve.eps).rsqrt() * (1 + slack)
        bottom = (most.mean(-1, keepdim=True) + curve.eps).rsqrt() * (1 - slack)
        rho = (c.square().mean(-1, keepdim=True) + curve.eps).rsqrt()
        y, (first, last) = c * rho, curve.span(spans[0])
        turn = torch.maximum(top - rho, rho - bottom)
        slip = torch.maximum(last - y, y - first)
        turn, slip = (v.clamp(min=0) * (1 + 4 * UNIT) for v in (turn, slip))
        return cls(rho[:, None], y[:, None], turn[:, None], slip[:, None], n + 8)

    def forward(self, *t: Tensor) -> Tensor:
        return self.rho * (t[0] - self.y * last_sum(self.y * t[0]) / self.y.shape[-1])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return (self.forward(g),)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        y = self.y.abs()
        return (self.rho * (g + y * last_sum(y * g) / y.shape[-1]),)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        n = self.y.shape[-1]
        y = self.y.abs()
        dy = self.y_width
        size = g.abs() + error
        along = last_sum(self.y * g)
        across = last_sum(dy * size)
        slip = last_sum(y * error)
        much = self.terms * UNIT * last_sum(y * size)
        most = along.abs() + slip + across + much  # <y + dy, h>
        rest = (dy * most + y * (across + slip + much)) / n
        whole = (g - self.y * along / n).abs() + error + rest
        return (self.rho_width * whole + self.rho * (dy * most + y * across) / n,)


@dataclass(frozen=True, eq=False)
class RankOne:
    """`J d = alpha d + gain <unit, d>` over the last axis."""

    alpha: Tensor
    gain: Tensor
    unit: Tensor
    off: Tensor
    far: Tensor

    @property
    def terms(self) -> int:
        """How many numbers are added up for one entry."""
        return self.unit.shape[-1] + 4

    def transpose(self, w: Tensor, owner: Tensor) -> tuple[Tensor, ...]:
        """The transposed map on rows of coefficients, each with the plane of its sample."""
        alpha, gain, unit = (take_entries(v, owner) for v in (self.alpha, self.gain, self.unit))
        return (torch.addcmul(alpha * w, unit, (gain * w).sum(-1, keepdim=True)),)

    def forward(self, *d: Tensor) -> Tensor:
        """The map itself."""
        alpha, gain, unit = (v.double() for v in (self.alpha, self.gain, self.unit))
        return alpha * d[0] + gain * (unit * d[0]).sum(-1, keepdim=True)

    def reach(self, *sizes: Tensor) -> Tensor:
        """The largest values for inputs of these sizes."""
        alpha, gain, unit = (v.abs().double() for v in (self.alpha, self.gain, self.unit))
        return alpha * sizes[0] + gain * (unit * sizes[0]).sum(-1, keepdim=True)

    def to(self, dtype: torch.dtype) -> RankOne:
        """The same plane in another type."""
        alpha, gain, unit = (v.to(dtype) for v in (self.alpha, self.gain, self.unit))
        return RankOne(alpha, gain, unit, self.off, self.far)


@spelled("layer_norm")
def layer_norm(
    net: Builder,
    x: Index,
    size: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn: bool = False,
) -> Index:
    """`gain (x - mean) / sqrt(variance + eps) + bias` over the last axes: a matrix,
    `Normalise`, a scale.
    """
    width = math.prod(size)
    centre = torch.eye(width, dtype=torch.float64) - 1 / width
    return normalised(net, x, size, centre, weight, bias, eps)


@spelled("native_layer_norm")
def native_layer_norm(net: Builder, x: Index, size: Sequence[int], *rest: Any) -> list[Any]:
    """The same, with what a backward pass would need."""
    return [layer_norm(net, x, size, *rest), None, None]


@spelled("rms_norm")
def rms_norm(
    net: Builder,
    x: Index,
    size: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Index:
    """`gain x / sqrt(mean(x^2) + eps)` over the last axes."""
    # Torch takes that of the type it computes in.
    tiny = torch.finfo(net.dtype).eps if eps is None else eps
    return normalised(net, x, size, None, weight, None, tiny)


@spelled("group_norm")
def group_norm(
    net: Builder,
    x: Index,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn: bool = False,
) -> Index:
    """A LayerNorm over each group of channels, with one gain and bias for each channel."""
    full = net.full(x)
    parts = net.move(torch.reshape, x, [(full[0], groups, -1)], {})
    found = layer_norm(net, parts, net.full(parts)[-1:], eps=eps)
    whole = net.move(torch.reshape, found, [full], {})
    if weight is None:
        return whole  # type: ignore[no-any-return]
    ones = net.along(x, 1)
    return net.scaled(whole, weight.reshape(ones), None if bias is None else bias.reshape(ones))


def normalised(
    net: Builder,
    x: Index,
    size: Sequence[int],
    centre: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Index:
    """A matrix that centres, `Normalise`, a gain."""
    full = net.full(x)
    if len(size) > 1:
        x = net.move(torch.reshape, x, [(*full[: len(full) - len(size)], -1)], {})
    if net.single(x):
        raise net.refuse("a normalisation over the batch axis")
    if centre is not None:
        x = linear(net, x, centre)
    x = net.curve(Normalise(eps), "layer_norm", x, lead=x.lead)
    if weight is not None:
        shift = None if bias is None else bias.flatten()
        x = net.affine(Scale(weight.flatten()), shift, x, net.nodes[x].shape)
    return net.move(torch.reshape, x, [full], {}) if len(size) > 1 else x
