"""An activation over an interval of its input: what a relaxation needs to know of it.

A ReLU and a smooth function answer the same questions, so that no bound asks which of the two it
has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wassail.certificates.graph.activations import Activation
from wassail.certificates.graph.tangent import Span
from wassail.rounding import FAINT, UNIT
from wassail.ties import steep_below


class Arc(ABC):
    """An activation f with its input between low and high, tensors of one shape in float64."""

    @abstractmethod
    def slopes(self) -> Span:
        """CROWN's slopes of the line above and the line below."""

    @abstractmethod
    def gap(self, slope: Tensor, above: bool) -> Span:
        """The largest value of `f(v) - slope v`, or the least if not above; and what rounding may
        take of it.
        """

    @abstractmethod
    def span(self) -> Span:
        """The range of the values."""

    @abstractmethod
    def cone(self, c: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Span:
        """A slope, as it is after rounding to a type, and how far the slopes of all chords from c
        are from it: `|f(c + t) - f(c) - slope t| <= bend |t|` for `low <= t <= high`; a bend of 0
        where f is a line there.
        """

    @abstractmethod
    def off(self, c: Tensor) -> Tensor:
        """What is no multiple of t beside that: the rounding of `f(c)`, and a jump."""


@dataclass(frozen=True, eq=False)
class ReluArc(Arc):
    """`max(v, slope v)`."""

    slope: Tensor
    low: Tensor
    high: Tensor

    def _value(self, v: Tensor) -> Tensor:
        return torch.where(v > 0, v, self.slope * v)

    @cached_property
    def _corners(self) -> tuple[Tensor, Tensor, Tensor]:
        """Both ends and the kink, stacked, the values there, and the larger end in size."""
        kink = torch.zeros_like(self.low).clamp(self.low, self.high)
        points = torch.stack([self.low, self.high, kink])
        return points, self._value(points), torch.maximum(self.low.abs(), self.high.abs())

    def slopes(self) -> Span:
        """Above the chord, below one of the two slopes."""
        low, high, slope = self.low, self.high, self.slope
        crossing = (low < 0) & (high > 0)
        up = torch.where(
            crossing,
            (high - slope * low) / torch.where(crossing, high - low, 1.0),
            (low >= 0) * (1 - slope) + slope,
        )
        return up, torch.where(crossing, torch.where(steep_below(low, high), 1.0, slope), up)

    def gap(self, slope: Tensor, above: bool) -> Span:
        """At an end or at the kink."""
        points, values, size = self._corners
        gaps = values - slope * points
        return gaps.amax(0) if above else gaps.amin(0), 4 * UNIT * (1 + slope.abs()) * size

    def span(self) -> Span:
        """At the ends."""
        least, most, _ = self._corners[1]
        return least, most

    def cone(self, c: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Span:
        """Between the slope at c and the chord to the far end of the other side."""
        slope = self.slope
        crossing = (self.low < 0) & (self.high > 0)
        far = torch.where(c > 0, -low, high)
        share = (c.abs() / torch.where(far > 0, far, 1.0)).clamp(max=1.0)
        chord = torch.where(c > 0, slope + (1 - slope) * share, 1 - (1 - slope) * share)
        own = torch.where(c > 0, torch.ones_like(chord), slope)
        mid = ((chord + own) / 2).to(dtype).double()
        bend = torch.maximum((chord - mid).abs(), (own - mid).abs())
        bend = bend + 16 * UNIT * (1 + slope.abs())
        decided = torch.where(self.low >= 0, torch.ones_like(chord), slope).expand_as(c)
        return torch.where(crossing, mid, decided), torch.where(crossing, bend, 0.0)

    def off(self, c: Tensor) -> Tensor:
        """Nothing: the slopes pay for it."""
        return torch.zeros_like(c)


@dataclass(frozen=True, eq=False)
class SmoothArc(Arc):
    """A smooth function."""

    function: Activation
    low: Tensor
    high: Tensor

    def slopes(self) -> Span:
        """Those with the least area."""
        return self.function.slopes(self.low, self.high)

    def gap(self, slope: Tensor, above: bool) -> Span:
        """Where the line touches."""
        v, slack = self.function.touch(slope, self.low, self.high, above)
        return self.function.value(v) - slope * v, slack

    def span(self) -> Span:
        """Rounded outward."""
        return self.function.span(self.low, self.high)

    def cone(self, c: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Span:
        """By the range of the derivative."""
        least, most = self.function.derivative_range(self.low, self.high)
        mid = ((least + most) / 2).to(dtype).double()
        bend = torch.maximum(most - mid, mid - least)
        return mid, torch.where(torch.isfinite(bend) & (bend > 0), bend * (1 + 4 * UNIT), 0.0)

    def off(self, c: Tensor) -> Tensor:
        """The value at the sample is rounded."""
        here = self.function.value(c)
        rounded = 2.0**-44 * (here.abs() + c.abs() + FAINT)
        return rounded + self.function.jump(self.low, self.high)
