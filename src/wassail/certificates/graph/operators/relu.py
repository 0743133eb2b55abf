"""ReLUs, and what is made of them: clamps, thresholds, magnitudes, maxima."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index, sample_of
from wassail.certificates.graph.operators.registry import spelled


@spelled("relu")
def relu(net: Builder, x: Index) -> Index:
    """`max(x, 0)`."""
    return net.relu(x)


@spelled("leaky_relu")
def leaky_relu(net: Builder, x: Index, slope: float = 0.01) -> Index:
    """One slope for all."""
    return net.relu(x, slope)


@spelled("prelu")
def prelu(net: Builder, x: Index, weight: Tensor) -> Index:
    """One slope for each channel."""
    return net.relu(x, weight if weight.numel() == 1 else weight.reshape(net.along(x, 1)))


@spelled("hardtanh")
def hardtanh(net: Builder, x: Index, low: float = -1.0, high: float = 1.0) -> Index:
    """A clamp."""
    return clamp(net, x, low, high)


@spelled("relu6")
def relu6(net: Builder, x: Index) -> Index:
    """A clamp to [0, 6]."""
    return clamp(net, x, 0.0, 6.0)


@spelled("clamp", "clip")
def clamp(net: Builder, x: Index, min: Any = None, max: Any = None) -> Index:
    """`low + relu(x - low) - relu(x - high)`, each side on its own where only one is given."""
    one = torch.tensor(1.0, dtype=torch.float64)
    if isinstance(net.fixed(min), Tensor) or isinstance(net.fixed(max), Tensor):
        x = net.wide_as(x, torch.zeros(_together(min, max)))
        shape = net.nodes[x].shape
        min, max = (None if v is None else sample_of(v, shape, x.lead) for v in (min, max))
    if min is not None and not (isinstance(min, float) and min == -math.inf):
        low = torch.as_tensor(min, dtype=torch.float64)
        x = net.exactly(net.relu(net.exactly(x, one, -low)), one, low)
    if max is not None and not (isinstance(max, float) and max == math.inf):
        # min(x, high) = high - relu(high - x)
        high = torch.as_tensor(max, dtype=torch.float64)
        x = net.exactly(net.relu(net.exactly(x, -one, high)), -one, high)
    return x


def _together(*limits: Any) -> tuple[int, ...]:
    """The shape that limits broadcast to."""
    sizes = [v.shape for v in limits if isinstance(v, Tensor)]
    return tuple(torch.broadcast_shapes(*sizes))  # type: ignore[no-untyped-call]


@spelled("clamp_min")
def clamp_min(net: Builder, x: Index, min: Any) -> Index:
    """From below."""
    return clamp(net, x, min)


@spelled("clamp_max")
def clamp_max(net: Builder, x: Index, max: Any) -> Index:
    """From above."""
    return clamp(net, x, None, max)


@spelled("threshold")
def threshold(net: Builder, x: Index, threshold: float, value: float) -> Index:
    """The value up to the threshold, then x: a maximum where the two are one number, else a
    jump.
    """
    if value != threshold:
        raise net.jumps("a threshold with another value")
    return clamp(net, x, threshold)


@spelled("softshrink")
def softshrink(net: Builder, x: Index, width: float = 0.5) -> Index:
    """`relu(x - width) - relu(-x - width)`, of which one is 0."""
    one = torch.tensor(1.0, dtype=torch.float64)
    if not 0 <= width < math.inf:
        raise net.refuse("a soft shrinkage by less than 0 or by no finite number")
    up, down = (net.relu(net.scaled(x, sign * one, -width * one)) for sign in (1, -1))
    return net.difference(up, down)


@spelled("hardshrink")
def hardshrink(net: Builder, x: Index, width: float = 0.5) -> Index:
    """x, but 0 up to the width: it jumps there, unless the width is 0 or less."""
    if not width <= 0:
        raise net.jumps("a hard shrinkage")
    return x


@spelled("abs", "absolute")
def absolute(net: Builder, x: Index) -> Index:
    """`relu(x) + relu(-x)`."""
    return net.sum([net.relu(x), net.relu(net.negative(x))], exact=True)


@spelled("maximum")
def maximum(net: Builder, a: Any, b: Any) -> Index:
    """Of two quantities, or with a constant."""
    if not isinstance(a, Index) or not isinstance(b, Index):
        x, constant = (a, b) if isinstance(a, Index) else (b, a)
        return clamp(net, x, constant)
    return net.larger(a, b)


@spelled("minimum")
def minimum(net: Builder, a: Any, b: Any) -> Index:
    """Of two quantities, or with a constant."""
    if isinstance(a, Index) and isinstance(b, Index):
        return net.smaller(a, b)
    return net.negative(
        maximum(net, *(net.negative(v) if isinstance(v, Index) else -v for v in (a, b)))
    )
