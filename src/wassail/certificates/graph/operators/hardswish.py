"""Hardswish, `x relu6(x + 3) / 6`, and hardsigmoid, `relu6(x + 3) / 6`, which is a clamp."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.graph.activations import ACTIVATIONS, ROUNDING, reachable
from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.operators.registry import spelled
from wassail.certificates.graph.operators.relu import clamp
from wassail.certificates.graph.waves import Wave


@dataclass(frozen=True, eq=False)
class Hardswish(Wave):
    """0 up to -3, `v (v + 3) / 6` up to 3, v after it: convex between two kinks that are concave.

    `f'` jumps from 0 to -1/2 at -3, and from 3/2 to 1 at 3; `derivative` has the tails' values
    there.
    """

    @property
    def kinks(self) -> tuple[float, ...]:
        """Both of them."""
        return (-3.0, 3.0)

    def value(self, v: Tensor) -> Tensor:
        """`f(v)`."""
        return v * (v + 3).clamp(0, 6) / 6

    def derivative(self, v: Tensor) -> Tensor:
        """`f'(v)`."""
        inner = (2 * v + 3) / 6
        return torch.where(v <= -3, 0.0, torch.where(v >= 3, 1.0, inner))

    @torch.no_grad()
    def derivative_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Both values of a kink belong to it."""
        low, high = reachable(low, high)
        inside = (high >= -3) & (low <= 3)
        least = torch.where(inside, (2 * low.clamp(-3, 3) + 3) / 6, math.inf)
        most = torch.where(inside, (2 * high.clamp(-3, 3) + 3) / 6, -math.inf)
        for tail, limit in ((low <= -3, 0.0), (high >= 3, 1.0)):
            least = torch.where(tail, least.clamp(max=limit), least)
            most = torch.where(tail, most.clamp(min=limit), most)
        return least - ROUNDING, most + ROUNDING

    def left_tail(self, slope: Tensor) -> Tensor:
        """The kink, or the far end."""
        return torch.where(slope < 0, -3.0, -math.inf)

    def right_tail(self, slope: Tensor) -> Tensor:
        """The kink, or the far end."""
        return torch.where(slope > 1, 3.0, math.inf)

    def centre(self, slope: Tensor) -> Tensor:
        """Where `(2 v + 3) / 6` is the slope."""
        return (3 * slope - 1.5).clamp(-3, 3)


# The dip, at -3/2, is 3/8 deep: no number is rounded.
ACTIVATIONS["hardswish"] = Hardswish("hardswish", 3.0, -1.5, 0.375, first=-3.0)


@spelled("hardswish")
def hardswish(net: Builder, x: Index) -> Index:
    """An activation of its own."""
    return net.activation(x, "hardswish")


@spelled("hardsigmoid")
def hardsigmoid(net: Builder, x: Index) -> Index:
    """`x / 6 + 1 / 2` clamped to [0, 1]."""
    one = torch.tensor(1.0, dtype=torch.float64)
    return clamp(net, net.scaled(x, one / 6, one / 2), 0.0, 1.0)
