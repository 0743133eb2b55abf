"""Products of two values of a network."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index, parted
from wassail.certificates.graph.operators.linear import linear
from wassail.certificates.graph.operators.registry import spelled
from wassail.certificates.graph.planes import (
    SMALL,
    TINY,
    Curve,
    Extent,
    Plane,
    Span,
    flushed,
    halves_of,
    interval_sum,
    take_entries,
)
from wassail.certificates.graph.tangent import Tangent, middle_and_width
from wassail.errors import InputError
from wassail.rounding import UNIT


@dataclass(frozen=True)
class Product(Curve):
    """The einsum of two nodes for one sample, such as `"hik,hjk->hij"`.

    No letter occurs twice in one operand, and every letter of an operand occurs in the other one or
    after the arrow.
    """

    lengthwise: ClassVar[bool] = True

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
        return interval_sum(lambda u, v: self._times(a, b, out, u, v), spans[0], spans[1], terms)

    def summed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of each operand that are summed over: a row along them meets a row of the
        other operand.
        """
        a, b, out = self._letters
        return tuple(i for i, k in enumerate(a) if k not in out), tuple(
            i for i, k in enumerate(b) if k not in out
        )

    def entries(self, *shapes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Of each single product, `(T,)`: the entries of both factors, and the entry of the output
        that it is a part of.
        """
        sizes = self._sizes(*shapes)
        every = torch.cartesian_prod(*map(torch.arange, sizes.values()), torch.arange(1))
        places = dict(zip(sizes, every.reshape(-1, len(sizes) + 1).T))
        first, second, output = (
            sum(
                (
                    places[k] * math.prod(sizes[m] for m in part[at + 1 :])
                    for at, k in enumerate(part)
                ),
                torch.zeros(len(every), dtype=torch.int64),
            )
            for part in self._letters
        )
        return first, second, output

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
        middle, radius = zip(*(halves_of(*span) for span in spans))
        first, second = (flushed(c + m) for c, m in zip(centres, middle))
        most = max(math.prod(size for k, size in sizes.items() if k not in part) for part in (a, b))
        zero = first.new_zeros(())
        plane = _ProductPlane(self, first, second, zero, zero, most + 1)
        size = self.value(*(c.abs() for c in centres)) + self.value(*(m.abs() for m in middle))
        reach = [torch.maximum(-low, high) for low, high in spans]
        ones = [torch.full_like(v, SMALL) for v in reach]
        # What `flushed` drops, and more.
        lost = self.value(ones[0], reach[1]) + self.value(reach[0], ones[1])
        rest = self.value(*radius)
        if lengths:
            each = (v.expand_as(c) / math.sqrt(terms) for v, c in zip(lengths, centres))
            rest = torch.minimum(rest, self.value(*each))
        far = rest + UNIT * ((terms + 4) * size + plane.reach(*reach)) + lost
        return replace(plane, off=-self.value(*middle), far=far * (1 + (terms + 8) * UNIT) + TINY)

    def plane_on(self, centres: Sequence[Tensor], spans: Sequence[Span], extent: Extent) -> Plane:
        """With the lengths along the summed axes."""
        lengths = [extent.length(k, axes) for k, axes in enumerate(self.summed())]
        return self.plane(centres, spans, lengths)

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The gradient at a factor is the einsum of g with the other factor, in interval
        arithmetic.
        """
        a, b, out = self._letters
        sizes = self._sizes(*(tuple(low.shape[1:]) for low, _ in spans))

        def at(own: str, other: str, span: Span) -> Span:
            terms = math.prod(size for k, size in sizes.items() if k not in own)
            return interval_sum(
                lambda u, v: self._times(out, other, own, u, v, self._row), g, span, terms
            )

        return at(a, b, spans[1]), at(b, a, spans[0])

    def tangent(self, spans: Sequence[Span]) -> Tangent:
        """The product rule in the middle."""
        return _ProductTangent.make(self, spans)


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
        first = take_entries(self.first, owner)
        second = take_entries(self.second, owner)
        return self.product._times(out, b, a, w, second), self.product._times(out, a, b, w, first)

    def forward(self, *d: Tensor) -> Tensor:
        first = self.first.double()
        second = self.second.double()
        return self.product.value(d[0], second) + self.product.value(first, d[1])

    def reach(self, *sizes: Tensor) -> Tensor:
        first = self.first.abs().double()
        second = self.second.abs().double()
        return self.product.value(sizes[0], second) + self.product.value(first, sizes[1])

    def to(self, dtype: torch.dtype) -> _ProductPlane:
        return replace(self, first=self.first.to(dtype), second=self.second.to(dtype))


@dataclass(frozen=True, eq=False)
class _ProductTangent:
    """The product rule, `M (s, t) = s b + a t`: factors a, b `(N, *shape)` and their half
    widths.
    """

    curve: Product
    factors: tuple[Tensor, Tensor]
    widths: tuple[Tensor, Tensor]
    terms: int

    @classmethod
    def make(cls, curve: Product, spans: Sequence[Span]) -> _ProductTangent:
        (a, da), (b, db) = (middle_and_width(span) for span in spans)
        return cls(curve, (a, b), (da, db), 8 + max(a[0].numel(), b[0].numel()))

    def forward(self, *t: Tensor) -> Tensor:
        a, b, out = self.curve._letters
        row = self.curve._row
        left = self.curve._times(a, b, out, t[0], self.factors[1], row)
        return left + self.curve._times(b, a, out, t[1], self.factors[0], row)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return self._pull(g, *self.factors)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        return self._pull(g, *(v.abs() for v in self.factors))

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        return self._pull(g.abs() + error, *self.widths)

    def _pull(self, g: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        a, b, out = self.curve._letters
        row = self.curve._row
        return (
            self.curve._times(out, b, a, g, right, row),
            self.curve._times(out, a, b, g, left, row),
        )


@spelled("matmul", "bmm", "mm", "mv")
def matmul(net: Builder, a: Any, b: Any) -> Index:
    """With a constant matrix on the right it is linear; else `a` and `b` both depend on the
    input.
    """
    if isinstance(a, Index) and isinstance(b, Tensor) and b.ndim == 2:
        return linear(net, a, b.T)
    if isinstance(a, Tensor) and a.ndim == 2 and isinstance(b, Index) and len(net.full(b)) > 2:
        turned = linear(net, net.move(torch.transpose, b, [-2, -1], {}), a)
        return net.move(torch.transpose, turned, [-2, -1], {})  # type: ignore[no-any-return]
    if isinstance(a, Index) and isinstance(b, Tensor) and b.ndim == 1 and len(net.full(a)) > 1:
        row: Index = net.move(torch.squeeze, linear(net, a, b[None]), [-1], {})
        return row
    if (
        not isinstance(a, Index)
        or not isinstance(b, Index)
        or min(len(net.full(a)), len(net.full(b))) < 2
    ):
        raise net.refuse("a product with these constants or with a vector")
    (*first, i, k), (*second, _, j) = net.full(a), net.full(b)
    batch = tuple(torch.broadcast_shapes(first, second))  # type: ignore[no-untyped-call]
    a, b = net.expanded(a, (*batch, i, k)), net.expanded(b, (*batch, k, j))
    axes = "abcdefgh"[: len(batch)]
    return product(net, f"{axes}ik,{axes}kj->{axes}ij", a, b, (*batch, i, j))


def product(net: Builder, equation: str, a: Index, b: Index, full: tuple[int, ...]) -> Index:
    """An einsum, written for the tensors of the program; a leading axis of length 1 has no
    letter.
    """
    (first, second), last = equation.split("->")[0].split(","), equation.split("->")[1]
    lead, _ = parted(full)
    if not full:
        raise net.refuse("a product that is summed over the batch")
    if full == (1,) and not net.single(a) and not net.single(b):
        # A product of two samples: the letter of the batch stands for an axis of its own.
        a, b = (net.move(torch.unsqueeze, part, [0], {}) for part in (a, b))
        equation = f"{first},{second}->{last}"
    else:
        equation = f"{first[a.lead :]},{second[b.lead :]}->{last[lead:]}"
    return net.curve(
        Product(equation), "a product of two quantities that depend on the input", a, b, lead=lead
    )


@spelled("einsum")
def einsum(net: Builder, equation: str, parts: Sequence[Any], path: Any = None) -> Index:
    """Of two quantities that depend on the input, every letter written out."""
    left, arrow, last = equation.replace(" ", "").partition("->")
    if (
        len(parts) != 2
        or not all(isinstance(p, Index) for p in parts)
        or not arrow
        or "." in equation
    ):
        raise net.refuse(
            "an einsum with a constant, with more than two operands or without an arrow"
        )
    first, second = left.split(",")
    sizes = dict(zip(first + second, net.full(parts[0]) + net.full(parts[1])))
    return product(net, f"{left}->{last}", parts[0], parts[1], tuple(sizes[k] for k in last))
