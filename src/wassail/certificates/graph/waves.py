"""Activations that are concave, then convex, then concave, and not symmetric.

`f'` falls up to the first bend, rises up to the second and falls again. So a line above touches one
of the concave tails or bridges them, and a line below touches the convex part or reaches from it to
an end of the interval.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.graph.activations import Activation, within_bounds


@dataclass(frozen=True, eq=False)
class Wave(Activation):
    """A function with `f'` from 0 at -inf to 1 at +inf that bends twice.

    bend: the second bend; first: the first one. `f' <= 0` on the left tail, `>= 1` on the right.
    """

    first: float

    @abstractmethod
    def left_tail(self, slope: Tensor) -> Tensor:
        """Where `f - slope v` is largest on the left tail, to about 1e-6: -inf for slopes >= 0."""

    @abstractmethod
    def right_tail(self, slope: Tensor) -> Tensor:
        """Where `f - slope v` is largest on the right tail, to about 1e-6: inf for slopes <= 1."""

    @abstractmethod
    def centre(self, slope: Tensor) -> Tensor:
        """Where `f - slope v` is least between the bends, to about 1e-6."""

    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        start = slope.new_full((), self.first)
        end = slope.new_full((), self.bend)
        if not above:
            return start, end
        far = slope.new_full((), float("inf"))
        right = slope > 0.5  # f' <= 0 on the left tail and >= 1 on the right one
        return torch.where(right, end, -far), torch.where(right, far, start)

    def _where(self, slope: Tensor, above: bool) -> Tensor:
        if not above:
            return self.centre(slope)
        return torch.where(slope > 0.5, self.right_tail(slope), self.left_tail(slope))

    @property
    def bends(self) -> tuple[float, float]:
        """Both."""
        return self.first, self.bend

    @torch.no_grad()
    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes of the line above and of the line below that are nearest to `f` in the middle.

        Above: the tangent in the middle on a tail, else the bridge between the tails. Below: the
        tangent between the bends, else the line from there to the end of the interval.
        """
        within_bounds(low, high)
        middle = (low + high) / 2
        tangent = self.derivative(middle)
        chord = self.chord(low, high, tangent)
        bridge = chord
        t = low
        u = high
        for _ in range(5):
            t = self.left_tail(bridge).clamp(max=self.first).maximum(low).minimum(high)
            u = self.right_tail(bridge).clamp(min=self.bend).minimum(high).maximum(low)
            bridge = self.chord(t, u, bridge)
        up = torch.where((middle <= t) | (middle >= u), tangent, bridge)
        down = tangent
        for end, inside in ((low, low >= self.first), (high, high <= self.bend)):
            slope = chord
            for _ in range(5):
                t = self.centre(slope).maximum(low).minimum(high)
                ends = (low, t) if end is low else (t, high)
                slope = self.chord(*ends, slope)
            beyond = (middle < t) if end is low else (middle > t)
            down = torch.where(beyond & ~inside, slope, down)
        return up, down
