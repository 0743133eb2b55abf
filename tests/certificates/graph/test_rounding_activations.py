"""What activations of their own say of themselves, against exact values."""

from fractions import Fraction

import mpmath  # comes with torch, through sympy
import pytest
import torch
from torch import nn

from support.rounding import MODES, rounded
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.graph import Relu
from wassail.certificates.graph.operators.mish import _make
from wassail.certificates.graph.reader import read


@pytest.mark.parametrize("mode", MODES)
def test_the_derivative_of_hardswish_at_a_point(mode: str) -> None:
    v = 6 * torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 3
    with rounded(mode):
        low, high = ACTIVATIONS["hardswish"].derivative_range(v, v)
    for at, least, most in zip(*(t.tolist() for t in (v, low, high))):
        assert Fraction(least) <= (2 * Fraction(at) + 3) / 6 <= Fraction(most)


def test_the_distance_of_hardswish_and_mish_to_a_relu() -> None:
    assert ACTIVATIONS["hardswish"].distance_to_relu == 0.375
    with mpmath.workdps(40):

        def mish(v: mpmath.mpf) -> mpmath.mpf:
            return v * mpmath.tanh(mpmath.log1p(mpmath.exp(v)))

        lowest = mpmath.findroot(lambda v: mpmath.diff(mish, v), ACTIVATIONS["mish"].lowest)
        depth = -mish(lowest)
    for mode in MODES:
        with rounded(mode):
            found = _make().distance_to_relu
        assert depth <= found < depth + mpmath.mpf(10) ** -12


def test_an_elu_is_itself_up_to_the_last_digit_of_its_parameter() -> None:
    """With `alpha = 1 - 2^-53` there is a ReLU besides. CELU has none: `1 / 49` is just rounded."""
    assert 49.0 * (1 / 49.0) != 1

    def relus(layer: nn.Module) -> int:
        return sum(isinstance(node.op, Relu) for node in read(layer, (2,), smooth=True).nodes)

    assert relus(nn.ELU(1 - 2.0**-53)) == 1
    assert relus(nn.CELU(49.0)) == relus(nn.ELU()) == 0
