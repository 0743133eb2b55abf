"""Every activation that certificates read: what torch runs, the function of real numbers, and
parameters that are unusual.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mpmath  # comes with torch, through sympy
import torch
from mpmath import mpf
from torch import Tensor, nn
from torch.nn import functional as F

Real = Callable[[mpf], mpf]


@dataclass(frozen=True)
class Case:
    """An activation; row: its row in `docs/reference/operators.md`; linear: piecewise."""

    row: str
    run: Callable[[Tensor], Tensor]
    real: Real
    linear: bool = False


def _sigmoid(v: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-v))


def _softplus(v: mpf) -> mpf:
    return mpmath.log1p(mpmath.exp(v)) if v < 5000 else v


def _elu(v: mpf) -> mpf:
    return v if v > 0 else mpmath.expm1(v)


def _clamp(v: mpf, low: float, high: float) -> mpf:
    return min(max(v, mpf(low)), mpf(high))


def _tanh_gelu(v: mpf) -> mpf:
    inner = mpmath.sqrt(2 / mpmath.pi) * (v + mpf("0.044715") * v**3)
    return v * (1 + mpmath.tanh(inner)) / 2


ALPHA = "1.6732632423543772848170429916717"
SCALE = "1.0507009873554804934193349852946"
SLOPE = float(torch.tensor(-1.3, dtype=torch.float32))  # the same parameter in both types
WIDTH = 0.3  # rounded in float32: that is a part of the difference
CASES = [
    Case("ReLU", torch.relu, lambda v: max(v, mpf(0)), linear=True),
    Case("Threshold", lambda v: F.threshold(v, 0.25, 0.25), lambda v: max(v, mpf(0.25)), True),
    Case("Hardtanh", lambda v: F.hardtanh(v, -0.3, 0.7), lambda v: _clamp(v, -0.3, 0.7), True),
    Case("ReLU6", F.relu6, lambda v: _clamp(v, 0, 6), True),
    Case("LeakyReLU", lambda v: F.leaky_relu(v, 0.375), lambda v: v if v > 0 else v * 0.375, True),
    Case(
        "PReLU",
        lambda v: F.prelu(v, torch.tensor([SLOPE], dtype=v.dtype)),
        lambda v: v if v > 0 else v * SLOPE,
        True,
    ),
    Case(
        "Softshrink",
        lambda v: F.softshrink(v, WIDTH),
        lambda v: v - _clamp(v, -WIDTH, WIDTH),
        True,
    ),
    Case("Hardsigmoid", F.hardsigmoid, lambda v: _clamp(v + 3, 0, 6) / 6, True),
    Case("Hardswish", F.hardswish, lambda v: v * _clamp(v + 3, 0, 6) / 6),
    Case("Sigmoid", torch.sigmoid, _sigmoid),
    Case("Tanh", torch.tanh, mpmath.tanh),
    Case("Tanhshrink", F.tanhshrink, lambda v: v - mpmath.tanh(v)),
    Case("GELU, erf", F.gelu, lambda v: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2),
    Case("GELU, tanh", lambda v: F.gelu(v, approximate="tanh"), _tanh_gelu),
    Case("SiLU", F.silu, lambda v: v * _sigmoid(v)),
    Case("Mish", F.mish, lambda v: v * mpmath.tanh(_softplus(v))),
    Case("ELU", lambda v: F.elu(v, 0.75), lambda v: v if v > 0 else mpf(0.75) * _elu(v)),
    Case("CELU", lambda v: F.celu(v, 0.75), lambda v: v if v > 0 else 0.75 * _elu(v / 0.75)),
    Case("SELU", F.selu, lambda v: mpf(SCALE) * (v if v > 0 else mpf(ALPHA) * _elu(v))),
    Case("LogSigmoid", F.logsigmoid, lambda v: -_softplus(-v)),
    Case("Softplus", lambda v: F.softplus(v, 2.0, 40.0), lambda v: _softplus(2 * v) / 2),
]

# With parameters that are unusual, too.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "LeakyReLU": nn.LeakyReLU,
    "LeakyReLU, negative": lambda: nn.LeakyReLU(-0.5),
    "LeakyReLU, steep": lambda: nn.LeakyReLU(3.0),
    "PReLU": lambda: nn.PReLU(init=0.3),
    "PReLU, negative": lambda: nn.PReLU(init=-2.0),
    "PReLU, steep": lambda: nn.PReLU(init=1.5),
    "Hardtanh": lambda: nn.Hardtanh(-0.3, 0.7),
    "Threshold": lambda: nn.Threshold(0.0, 0.0),
    "Threshold, elsewhere": lambda: nn.Threshold(-0.3, -0.3),
    "Softshrink": lambda: nn.Softshrink(0.4),
    "Hardshrink by nothing": lambda: nn.Hardshrink(0.0),
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
    "GELU": nn.GELU,
    "GELU, tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "ELU": nn.ELU,
    "ELU, negative": lambda: nn.ELU(-0.7),
    "ELU, large": lambda: nn.ELU(5.0),
    "ELU, 0": lambda: nn.ELU(0.0),
    "CELU": lambda: nn.CELU(0.2),
    "CELU, large": lambda: nn.CELU(30.0),
    "SELU": nn.SELU,
    "LogSigmoid": nn.LogSigmoid,
    "Softplus": nn.Softplus,
    "Softplus, beta": lambda: nn.Softplus(0.01),
    "Softplus, negative": lambda: nn.Softplus(-2.0),
    "Softplus, threshold": lambda: nn.Softplus(1.0, 1.0),
    "Softplus, both": lambda: nn.Softplus(-0.5, -0.5),
}


def grid(dtype: torch.dtype) -> Tensor:
    """Dense between -12 and 12, in powers of two beyond, and the neighbours of places where a
    formula changes.
    """
    powers = 2.0 ** torch.linspace(-30, 12, 127, dtype=torch.float64)
    parts = [torch.linspace(-12, 12, 601, dtype=torch.float64), powers, -powers]
    places = [0.25, WIDTH, 1.5, 2.0, 3.0, 6.0, 20.0, 40.0, 88.0, 709.0]
    centre = torch.tensor([s * v for v in places for s in (1, -1)], dtype=dtype)
    for far in (math.inf, -math.inf):
        near = centre
        for _ in range(2):
            near = torch.nextafter(near, torch.full_like(near, far))
            parts.append(near.double())
    return torch.cat([*parts, centre.double(), torch.zeros(1, dtype=torch.float64)]).to(dtype)
