"""Mish, `x tanh(softplus(x))`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.graph.activations import ACTIVATIONS, rounded_up, zero_of
from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.operators.registry import spelled
from wassail.certificates.graph.waves import Wave

FARTHEST = 60.0  # f' is at its limit to all digits there
HALVINGS = 58  # down to neighbouring numbers


@dataclass(frozen=True, eq=False)
class Mish(Wave):
    """With `e = exp v` and `n = e (e + 2)`: `tanh(softplus v) = n / (n + 2)`, no term negative.

    For v > 0 the same with `w = exp(-v)`, so that nothing overflows.
    """

    def value(self, v: Tensor) -> Tensor:
        """`f(v)`."""
        return v * _parts(v)[0]

    def derivative(self, v: Tensor) -> Tensor:
        """`f'(v)`: the gate, and v times its derivative."""
        gate, slope = _parts(v)
        return gate + v * slope

    def left_tail(self, slope: Tensor) -> Tensor:
        """By bisection: `f'` falls from 0."""
        return torch.where(slope < 0, self._root(slope, -FARTHEST, self.first, -1), -math.inf)

    def right_tail(self, slope: Tensor) -> Tensor:
        """By bisection: `f'` falls to 1."""
        return torch.where(slope > 1, self._root(slope, self.bend, FARTHEST, -1), math.inf)

    def centre(self, slope: Tensor) -> Tensor:
        """By bisection: `f'` rises."""
        return self._root(slope, self.first, self.bend, 1)

    def _root(self, slope: Tensor, start: float, end: float, sign: int) -> Tensor:
        """Where `f' = slope` on a piece where it rises (sign 1) or falls (-1)."""
        low = torch.full_like(slope, start)
        high = torch.full_like(slope, end)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            beyond = sign * (self.derivative(middle) - slope) > 0
            high = torch.where(beyond, middle, high)
            low = torch.where(beyond, low, middle)
        return (low + high) / 2


def _parts(v: Tensor) -> tuple[Tensor, Tensor]:
    """`tanh(softplus v)` and its derivative."""
    e = v.clamp(max=0).exp()
    w = (-v).clamp(max=0).exp()
    n = e * (e + 2)
    m = 1 + 2 * w
    bottom = m + 2 * w * w
    positive = v > 0
    gate = torch.where(positive, m / bottom, n / (n + 2))
    above = 4 * w * w * (1 + w) / bottom.square()
    below = 4 * e * (1 + e) / (n + 2).square()
    return gate, torch.where(positive, above, below)


def _make() -> Mish:
    raw = Mish("mish", 1.5, -1.2, 1.0, first=-2.3)

    def second(v: Tensor) -> Tensor:
        with torch.enable_grad():
            at = v.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(raw.derivative(at), at)
        return slope

    def one(function: Callable[[Tensor], Tensor], positive: float, negative: float) -> float:
        return zero_of(function, positive, negative)

    first = one(second, -1.0, -4.0)
    bend = one(second, 0.5, 3.0)
    lowest = one(raw.derivative, 0.0, first)
    dip = -float(raw.value(torch.tensor(lowest, dtype=torch.float64)))
    return Mish("mish", bend, lowest, rounded_up(dip), first=first)


ACTIVATIONS["mish"] = _make()


@spelled("mish")
def mish(net: Builder, x: Index) -> Index:
    """An activation of its own."""
    return net.activation(x, "mish")
