"""ReLUs, and what is made of them: clamps, magnitudes, maxima."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index
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


@spelled("clamp")
def clamp(net: Builder, x: Index, min: Any = None, max: Any = None) -> Index:
    """`low + relu(x - low) - relu(x - high)`, each side on its own where only one is given."""
    one = torch.tensor(1.0, dtype=torch.float64)
    min = net.fixed(min)
    max = net.fixed(max)
    if min is not None and not (isinstance(min, float) and min == -math.inf):
        low = torch.as_tensor(min, dtype=torch.float64)
        x = net.exactly(net.relu(net.exactly(x, one, -low)), one, low)
    if max is not None and not (
        isinstance(max, float) and max == math.inf
    ):  # min(x, high) = high - relu(high - x)
        high = torch.as_tensor(max, dtype=torch.float64)
        x = net.exactly(net.relu(net.exactly(x, -one, high)), -one, high)
    return x


@spelled("clamp_min")
def clamp_min(net: Builder, x: Index, min: Any) -> Index:
    """From below."""
    return clamp(net, x, min)


@spelled("clamp_max")
def clamp_max(net: Builder, x: Index, max: Any) -> Index:
    """From above."""
    return clamp(net, x, None, max)


@spelled("abs")
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
