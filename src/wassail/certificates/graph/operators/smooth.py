"""Smooth activations, entry by entry (`graph/activations.py` has what is known of each)."""

from __future__ import annotations

import math
from typing import Any

import torch

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.operators.arithmetic import mul
from wassail.certificates.graph.operators.registry import spelled


@spelled("sigmoid", "tanh", "silu")
def smooth(net: Builder, x: Index) -> Index:
    """An activation that torch and `ACTIVATIONS` call by one name."""
    return net.activation(x, net.name)


@spelled("gelu")
def gelu(net: Builder, x: Index, approximate: str = "none") -> Index:
    """Both forms."""
    return net.activation(x, "gelu" if approximate == "none" else "gelu_tanh")


@spelled("softplus")
def softplus(net: Builder, x: Index, beta: float = 1.0, threshold: float = 20.0) -> Index:
    """`softplus(beta x) / beta` up to `beta x = threshold`, and x beyond it: a jump that bounds pay
    for.
    """
    if beta == 0 or not math.isfinite(beta) or not threshold > -math.inf:
        raise net.refuse("a softplus with a beta of 0 or with parameters that are not finite")
    one = torch.tensor(1.0, dtype=torch.float64)
    bent = net.activation(net.scaled(x, beta * one, None), "softplus", threshold)
    return net.scaled(bent, one / beta, None)


@spelled("log_sigmoid")
def log_sigmoid(net: Builder, x: Index) -> Index:
    """`-softplus(-x)`, which torch computes without a threshold."""
    return net.negative(net.activation(net.negative(x), "softplus"))


@spelled("log_sigmoid_forward")
def log_sigmoid_forward(net: Builder, x: Index) -> list[Any]:
    """The same, with what a backward pass would need."""
    return [log_sigmoid(net, x), None]


@spelled("elu")
def elu(
    net: Builder, x: Index, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Index:
    """ELU, CELU, SELU: `scale (alpha E + (1 - alpha input_scale) relu)`, E of `input_scale x`."""
    if not all(math.isfinite(v) for v in (alpha, scale, input_scale)):
        raise net.refuse("an ELU with parameters that are not finite")
    if input_scale < 0:  # E is another function on the other side of 0
        raise net.refuse("a CELU with alpha < 0, which grows exponentially below 0,")
    one = torch.tensor(1.0, dtype=torch.float64)
    bent = net.activation(net.scaled(x, input_scale * one, None), "elu")
    bent = net.scaled(bent, scale * alpha * one, None)
    rest = scale * (1 - alpha * input_scale)
    # As in CELU: `input_scale` is `1 / alpha`, rounded.
    inverse = input_scale != 1 and abs(rest) <= 1e-15 * abs(scale)
    if rest == 0 or inverse:
        return bent
    return net.sum([bent, net.scaled(net.relu(x), rest * one, None)])


@spelled("celu")
def celu(net: Builder, x: Index, alpha: float = 1.0) -> Index:
    """`max(0, x) + min(0, alpha (exp(x / alpha) - 1))`."""
    if alpha == 0:
        raise net.refuse("a CELU with alpha 0")
    return elu(net, x, alpha, 1.0, 1 / alpha)


@spelled("selu")
def selu(net: Builder, x: Index) -> Index:
    """ELU with its two constants."""
    return elu(net, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@spelled("glu")
def glu(net: Builder, x: Index, dim: int = -1) -> Index:
    """One half gates the other."""
    value, gate = net.move(torch.chunk, x, [2, dim], {})
    return mul(net, value, net.activation(gate, "sigmoid"))
