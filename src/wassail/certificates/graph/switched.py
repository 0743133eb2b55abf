"""An activation that a model leaves for the identity above a threshold, as torch's Softplus.

`f(v)` up to the threshold T and v after it, where f is softplus: `f(v) - v = log(1 + exp(-v))`
falls, so the function of the model lies between `f - J` and f, `J = log(1 + exp(-T))`, and it jumps
down by J at T. Bounds on values pay J wherever T may be reached. A bound on slopes holds up to a
jump: what needs a Lipschitz constant asks `jumps` first.

Rounding. The smooth function pays 2^-49 of its size where softplus is off by less than 2^-51: that
covers a second evaluation and the differences taken here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from wassail.certificates.graph.activations import ACTIVATIONS, ROUNDING, Activation


@dataclass(frozen=True, eq=False)
class Switched(Activation):
    """The function of the model.

    smooth: what it is up to the threshold; after, beyond: between these two either may be taken;
    seen: whether the jump is more than a rounding of the model there.
    """

    smooth: Activation
    threshold: float
    after: float
    beyond: float
    seen: bool

    def value(self, v: Tensor) -> Tensor:
        """`f(v)`, with the jump."""
        return torch.where(v > self.threshold, v, self.smooth.value(v))

    def derivative(self, v: Tensor) -> Tensor:
        """`f'(v)` beside the jump."""
        return torch.where(v > self.threshold, 1.0, self.smooth.derivative(v))

    def jump(self, low: Tensor, high: Tensor) -> Tensor:
        """How far below the smooth function it may be on `[low, high]`: `log(1 + exp(-v))` at the
        first v beyond the threshold; NaN is any number.
        """
        most = self.smooth.value(-torch.where(low > self.after, low, self.after))
        return torch.where(high < self.after, 0.0, most + ROUNDING * (most + 1))

    def jumps(self, low: Tensor, high: Tensor) -> Tensor:
        """Where it has no Lipschitz constant on `[low, high]`."""
        return ~((high < self.after) | (low > self.beyond)) & self.seen

    @torch.no_grad()
    def span(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The smooth function's, lower by the jump."""
        least, top = self.smooth.span(low, high)
        return least - self.jump(low, high), top

    @torch.no_grad()
    def derivative_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The smooth function's, and 1 beyond the threshold."""
        least, top = self.smooth.derivative_range(low, high)
        return least, torch.where(high < self.after, top, top.clamp(min=1.0))

    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the smooth function."""
        return self.smooth.slopes(low, high)

    @torch.no_grad()
    def touch(self, slope: Tensor, low: Tensor, high: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        """The smooth function's point v and slack. With `g` the smooth function and `a = g(v) -
        f(v)`: `f <= g`, so a is paid above, and `f >= g - J`, so `J - a` is paid below.
        """
        v, slack = self.smooth.touch(slope, low, high, above)
        apart = self.smooth.value(v) - self.value(v)
        if above:
            return v, slack + apart.clamp(min=0)
        return v, slack + (self.jump(low, high) - apart).clamp(min=0)

    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        return self.smooth._ends(slope, above)

    def _where(self, slope: Tensor, above: bool) -> Tensor:
        return self.smooth._where(slope, above)


def jump_at(threshold: float) -> float:
    """About `log(1 + exp(-threshold))`."""
    return max(-threshold, 0.0) + math.log1p(math.exp(-abs(threshold)))


@cache
def switched(name: str, threshold: float, seen: bool) -> Switched:
    """The activation of this name with a threshold.

    Torch compares a product that is rounded, with a beta that is: in float32 at the least.
    """
    f = ACTIVATIONS[name]
    room = 2.0**-20 * abs(threshold)
    after = threshold - room
    away = max(f.distance_to_relu, -after)
    own = (f.name, f.bend, f.lowest, away)
    return Switched(*own, f, threshold, after, threshold + room, seen)
