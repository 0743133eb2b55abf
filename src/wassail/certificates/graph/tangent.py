"""The derivative of a node over regions: a fixed linear map M and a bound on the rest.

`J(x)^T g = M^T g + r` with `|r|` known for every x of a region. `relax/jacobian.py` says what is
made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from wassail.certificates.graph.maps import Linear, rounding_map
from wassail.rounding import UNIT, outward

if TYPE_CHECKING:
    from wassail.certificates.graph.planes import Curve

Span: TypeAlias = "tuple[Tensor, Tensor]"


class Tangent(Protocol):
    """The derivative of a node over N regions."""

    @property
    def terms(self) -> int:
        """How many terms an entry of `M t` or `M^T g` is the sum of, and a few more."""

    def forward(self, *t: Tensor) -> Tensor:
        """`M t` of tangents `(N, k, *in)`: `(N, k, *out)`."""

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`M^T g` of gradients `(N, m, *out)`: `(N, m, *in)` for each input."""

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        """`|M|^T g`, or more, of sizes >= 0."""

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        """At least `|J(x)^T h - M^T h|` for all x of the region and all h with `|h - g| <=
        error`.
        """


@dataclass(frozen=True, eq=False)
class AffineTangent:
    """An affine map, which is its own derivative. rounding: the relative error of its weights."""

    map: Linear
    rounding: float

    @property
    def terms(self) -> int:
        """Those of the map, and a few more."""
        return self.map.terms + 4

    def forward(self, *t: Tensor) -> Tensor:
        """The map."""
        found: Tensor = self.map.forward(*(v.flatten(0, 1) for v in t))
        return found.reshape(*t[0].shape[:2], *found.shape[1:])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its transpose."""
        return _back(self.map, g)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        """By the magnitudes that rounding errors are relative to."""
        return _back(rounding_map(self.map), g)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        """What the weights are off by."""
        return tuple(self.rounding * part for part in self.reach(g.abs() + error))


def _back(map_: Linear, g: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        part.reshape(*g.shape[:2], *part.shape[1:]) for part in map_.transpose(g.flatten(0, 1))
    )


@dataclass(frozen=True, eq=False)
class EntrywiseTangent:
    """A ReLU or an activation: the derivative lies in middle +- radius, `(N, 1, *shape)`."""

    middle: Tensor
    radius: Tensor
    terms: int = 4

    @classmethod
    def make(cls, derivative: Span) -> EntrywiseTangent:
        """From the range of the derivative, `(N, *shape)` each."""
        middle, radius = middle_and_width((derivative[0][:, None], derivative[1][:, None]))
        return cls(middle, radius)

    def forward(self, *t: Tensor) -> Tensor:
        """Entry by entry."""
        return t[0] * self.middle

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Entry by entry."""
        return (g * self.middle,)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        """Entry by entry."""
        return (g * self.middle.abs(),)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        """Entry by entry."""
        return ((g.abs() + error) * self.radius,)


@dataclass(frozen=True, eq=False)
class Enclosed:
    """A curve of which only the range of `J^T g` is known: M is 0."""

    curve: Curve
    spans: Sequence[Span]
    terms: int = 4

    def forward(self, *t: Tensor) -> Tensor:
        """0."""
        shape = self.curve.output(*(tuple(v.shape[2:]) for v in t))
        return t[0].new_zeros(*t[0].shape[:2], *shape)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """0."""
        return tuple(g.new_zeros(*g.shape[:2], *low.shape[1:]) for low, _ in self.spans)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        """0."""
        return self.transpose(g)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        """The largest magnitudes of the range."""
        found = self.curve.adjoint(outward(g - error, g + error), self.spans)
        return tuple(torch.maximum(low.abs(), high.abs()) for low, high in found)


def middle_and_width(span: Span) -> Span:
    """The middle of a range and its half width, rounded up."""
    low, high = span
    middle = (low + high) / 2
    return middle, torch.maximum(high - middle, middle - low) * (1 + 4 * UNIT)


def last_sum(values: Tensor) -> Tensor:
    """The sum over the last axis, which stays with length 1."""
    return values.sum(-1, keepdim=True)
