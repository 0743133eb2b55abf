"""The softmax of a row; and a log-softmax at the end: it subtracts one number from all logits, so
no margin changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.builder import GONE, Builder, Index
from wassail.certificates.graph.operators.arithmetic import add, mul
from wassail.certificates.graph.operators.normalise import RankOne
from wassail.certificates.graph.operators.products import matmul
from wassail.certificates.graph.operators.registry import spelled
from wassail.certificates.graph.planes import (
    LARGEST,
    SHARE,
    SMALL,
    STEEPEST,
    TINY,
    Curve,
    Plane,
    Span,
    all_but_own,
    end_points,
    flushed,
    for_each,
    interval_minus,
    interval_product,
    jensen,
    middle_of,
    odds,
    outward,
    sum_of_others,
)
from wassail.certificates.graph.tangent import Tangent, last_sum, middle_and_width
from wassail.rounding import UNIT

DEEP = 2000.0  # a weight of exp(-DEEP) is less than any rounding of a number that is not 0


@dataclass(frozen=True)
class Softmax(Curve):
    """`exp(s_j) / sum_k exp(s_k)` over the last axis."""

    def value(self, *v: Tensor) -> Tensor:
        """Same shape."""
        return torch.softmax(v[0], -1)

    def span(self, *spans: Span) -> Span:
        """`p_j` rises in `s_j` and falls in the others: exact, `1 / (1 + sum_{k != j} exp(h_k -
        l_j))` and its mirror image.
        """
        low, high = (torch.sigmoid(side) for side in odds(*spans[0]))
        return low * (1 - 4 * UNIT), (high * (1 + 4 * UNIT) + TINY).clamp(max=1)

    def plane(self, centres: Sequence[Tensor], spans: Sequence[Span]) -> Plane:
        """Rows `u_j (d_j - <p, d>)`, p the value in the middle z of the box; at a point `u = p`,
        the tangent.

        With `a_j = s_j - lse_{k != j} s_k`: `a_j(z + e) = a_j(z) + e_j - <p, e>_{k != j} / (1 -
        p_j) - gap`, and `sigma(a)` lies within `slope a + [lower, upper]` with the slope of its
        chord. So `u_j = slope / (1 - p_j)`.

        Rounding. `upper`, `lower`, `slope start` and `here` and their sums are rounded six times: 8
        units of them. `touch` has 8 units of `min(1, |a|)` besides: more than underflow takes. p is
        off by `delta` relatively, and so is what is linear in it: less than those 8 units where `r
        < 8 UNIT / delta`, and far less than the bend of the function, `upper - lower` and `gap`,
        where r is larger. An entry that `flushed` drops counts less than `SMALL u` upward, and less
        than 70 times that downward beyond its part of the gap. A rest below `SMALL` only says where
        a plane is of no use.

        An entry whose weight is below `exp(-DEEP / 2)` on the whole box (a mask by a large number)
        moves a sum by less than a rounding, however wide its range is. It could only count where
        others fall as far, by more than 900, and the gap of these is twice as wide as they fall.
        """
        (c,), ((low, high),) = centres, spans
        z, m, r = middle_of(c, low, high)
        here = self.value(c)
        p = self.value(z)
        delta = (3 * c.shape[-1] + 800) * UNIT
        rest = all_but_own(p)
        kept = flushed(p)
        bottom, top = odds(*end_points(c, low, high))
        m, r = (torch.where(top < -DEEP / 2, 0.0, v) for v in (m, r))
        useful = (rest > SMALL) & (top - bottom < LARGEST)
        bottom, top = (torch.where(useful, side, 0.0) for side in (bottom, top))
        at = [torch.where(useful, side, 0.0) for side in odds(z, z)]
        start = (at[0] + at[1]) / 2
        doubt = at[1] - at[0]
        rest = torch.where(useful, rest, 1.0)
        gap = jensen(p, rest, r)
        # The slope that parallel lines around a convex or concave piece have.
        sigma = ACTIVATIONS["sigmoid"]
        chord = sigma.chord(bottom, top, sigma.derivative((bottom + top) / 2))
        u = flushed((chord / rest).clamp(max=STEEPEST))
        slope = u * rest
        lower, upper = _between_lines(slope, bottom, top)
        lower = lower - slope * gap
        off = (
            (upper + lower) / 2 + slope * start - u * (m - (kept * m).sum(-1, keepdim=True)) - here
        )
        reach = r + m.abs() + (kept * (r + m.abs())).sum(-1, keepdim=True)
        far = (
            (upper - lower) / 2
            + slope * (doubt + delta * (top - bottom))
            + u * (delta * reach + SMALL * r.sum(-1, keepdim=True))
        )
        far = far + 8 * UNIT * (upper.abs() + lower.abs() + slope * start.abs() + here)
        spread = u * (rest * r + all_but_own(kept * r))
        least, most = self.span(end_points(c, low, high))
        flat = (most - least) / 2 + 4 * UNIT
        better = useful & (far + SHARE * spread < flat)
        far = torch.where(better, far, flat)
        off = torch.where(better, off, (least + most) / 2 - here)
        u = torch.where(better, u, 0.0)
        return RankOne(u, -u, kept, off, far)

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """`p_j ((1 - p_j) h_j - sum_{k != j} p_k h_k)` with `h = g - mean`, and `p_j (1 - p_j)`
        times a difference of g's.

        A difference is rounded by half a unit of itself. That of h goes with half a unit of `one`
        and with a term that `sum_of_others` has to spare, the outer one with a unit of p, and those
        of g with the units of `most`.
        """
        low, high = p = for_each(self.span(spans[0]))
        middle = (low + high) / 2
        mean = (middle * (g[0] + g[1])).sum(-1, keepdim=True) / (2 * middle.sum(-1, keepdim=True))
        mean = torch.where(mean.isfinite(), mean, 0.0)  # any number will do
        h = (g[0] - mean, g[1] - mean)
        one = outward(1 - high, 1 - low, torch.ones_like(low), 1)
        own = interval_minus(interval_product(one, h), sum_of_others(interval_product(p, h)))
        found = interval_product(p, own)
        # p (1 - p) is largest at 1/2, and a mean of the g's lies between them: 0 is in the room.
        ends = torch.stack(
            [low * (1 - low), high * (1 - high), torch.where((low < 0.5) & (high > 0.5), 0.25, 0.0)]
        )
        most = ends.amax(0) * (1 + 4 * UNIT)
        room = (g[0] - g[1].amax(-1, keepdim=True), g[1] - g[0].amin(-1, keepdim=True))
        other = interval_product((most, most), room)
        return ((torch.maximum(found[0], other[0]), torch.minimum(found[1], other[1])),)

    def tangent(self, spans: Sequence[Span]) -> Tangent:
        """In the middle."""
        return _SoftmaxTangent.make(self, spans)


def _between_lines(slope: Tensor, bottom: Tensor, top: Tensor) -> Span:
    """What `sigma(a) - slope a` lies between, for the logistic function on `[bottom, top]`."""
    sigma = ACTIVATIONS["sigmoid"]
    (upper, above), (lower, below) = (
        sigma.touch(slope, bottom, top, side) for side in (True, False)
    )
    upper = sigma.value(upper) - slope * upper + above
    return sigma.value(lower) - slope * lower - below, upper


@dataclass(frozen=True, eq=False)
class _SoftmaxTangent:
    """`M t = p (t - <p, t>)`: p `(N, 1, *shape)`, its largest deviation and its largest value.

    `J^T h - M^T h = dp (h - <p, h>) - (p + dp) <dp, h>`, and `<dp, h> = <dp, g - <p, g>> + <p, g>
    sum(dp) + <dp, h - g>`. The entries of dp add up to 0 but for the rounding of the stored p. That
    takes one of the four times `terms U <p, |g|>` in `spread`; the rounding of `<p, g>` takes the
    others, one where it is multiplied by dp, which is at most p + dp, and two in the product with
    all of dp, whose entries add up to 2 at most.
    """

    p: Tensor
    width: Tensor
    most: Tensor
    terms: int

    @classmethod
    def make(cls, curve: Softmax, spans: Sequence[Span]) -> _SoftmaxTangent:
        p = curve.value(middle_and_width(spans[0])[0])[:, None]
        low, high = (side[:, None] for side in curve.span(spans[0]))
        return cls(
            p, torch.maximum(high - p, p - low).clamp(min=0) * (1 + 4 * UNIT), high, p.shape[-1] + 8
        )

    def forward(self, *t: Tensor) -> Tensor:
        return self.p * (t[0] - last_sum(self.p * t[0]))

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return (self.forward(g),)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        return (self.p * (g + last_sum(self.p * g)),)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        much = last_sum(self.p * g.abs())
        off = (g - last_sum(self.p * g)).abs() + error + last_sum(self.p * error)
        return (
            self.width * off
            + self.most * (last_sum(self.width * off) + 4 * self.terms * UNIT * much),
        )


@spelled("softmax")
def softmax(net: Builder, x: Index, dim: int, dtype: Any = None) -> Index:
    """Over any axis."""
    net.axis(x, dim)
    last = len(net.full(x)) - 1
    if dim % (last + 1) != last:
        turned = net.move(torch.transpose, x, [dim, last], {})
        found = softmax(net, turned, last)
        return net.move(torch.transpose, found, [dim, last], {})  # type: ignore[no-any-return]
    return net.curve(Softmax(), "softmax", _unmasked(net, x), lead=x.lead)


def _unmasked(net: Builder, x: Index) -> Index:
    """Scores without masked entries: each becomes one that is not masked in its row, less `DEEP`.

    So its weight is 0, whatever the scores are. A mask by a finite number is no mask: it is added,
    and the bounds on the scores tell what is left of the entry.
    """
    shape = net.nodes[x].shape
    start = net.partial(x).logits(torch.zeros(1, *net.nodes[0].shape, dtype=torch.float64))[0]
    top, best = start.max(-1, keepdim=True)
    if bool((top <= -GONE / 2).any()):
        raise net.refuse("a softmax of which all entries are masked")
    gone = start <= -GONE / 2
    if not bool(gone.any()):
        return x
    own = torch.arange(start.numel()).reshape(shape)
    where = torch.where(gone, own[..., :1] + best, own)
    one = torch.tensor(1.0, dtype=torch.float64)
    found = net.placed(x, where.flatten(), shape, x.lead)
    return net.exactly(found, one, -DEEP * gone.double())


@spelled("scaled_dot_product_attention")
def scaled_dot_product_attention(
    net: Builder,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Index:
    """`softmax(q k^T scale + mask) v`."""
    if not all(isinstance(part, Index) for part in (q, k, v)) or enable_gqa:
        raise net.refuse("attention to constants or with grouped queries")
    n = net.full(q)[-2]
    m = net.full(k)[-2]
    width = net.full(q)[-1]
    scores = matmul(net, q, net.move(torch.transpose, k, [-2, -1], {}))
    scores = mul(net, scores, 1 / math.sqrt(width) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(n, m, dtype=torch.bool).tril()
    if attn_mask is not None:
        net.masks = True
        added = (
            torch.where(attn_mask, 0.0, -math.inf) if attn_mask.dtype == torch.bool else attn_mask
        )
        scores = add(net, scores, added)
    return matmul(net, softmax(net, scores, -1), v)


@spelled("log_softmax")
def log_softmax(net: Builder, x: Index, dim: int, dtype: Any = None) -> Index:
    """Left out, and remembered: the graph's logits are the model's up to one number a sample."""
    last = len(net.full(x)) - 1
    if not net.final or last != 1 or dim % 2 != 1:
        raise net.refuse("a log-softmax that is not over the logits at the end")
    net.common = True
    return x
