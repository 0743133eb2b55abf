"""The network as it is executed: small networks, each operation by hand, in exact fractions.

Every part of the bound on its rounding errors is needed by one of them.
"""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, fractions, rounded
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Call, Matrix, Scale
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.executed import (
    SLACK,
    _off,
    ahead,
    arithmetic_of,
    call_error,
    dot_error,
    gamma,
    margin_errors,
)

SINGLE = torch.float32
DOUBLE = torch.float64
TYPES = [SINGLE, DOUBLE]


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def error_of(calls: tuple[Call, ...], size: Tensor, dtype: torch.dtype) -> Tensor:
    """What a node with these calls is off by, for inputs of this size."""
    n = size.shape[1]
    node = Node((0,), (n,), "", Affine(calls[0].map), calls=calls)
    return call_error(node, [size], dtype, [Node((), (n,), "the input")])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_product_that_is_rounded(dtype: torch.dtype) -> None:
    """Also where it is subnormal: then it is off by half of the smallest number."""
    least = {SINGLE: 2.0**-149, DOUBLE: 2.0**-1074}[dtype]
    for scale in (1.0, 1.5 * least):
        v = (scale * (1 + uniform(1, 50, seed=1))).to(dtype)
        factor = torch.tensor(0.7, dtype=dtype)
        seen = factor * v
        calls = (Call(Scale(factor.double()), None, 1),)
        found = error_of(calls, v.double(), dtype)
        apart = [
            abs(Fraction(float(a)) - Fraction(float(factor)) * Fraction(float(b)))
            for a, b in zip(seen[0], v[0])
        ]
        assert any(apart)
        assert all(Fraction(float(e)) >= a for e, a in zip(found[0], apart))


@pytest.mark.parametrize("dtype", TYPES)
def test_errors_of_several_steps_add_up(dtype: torch.dtype) -> None:
    """Two products, an exact sign between them, and a constant that the type does not have."""
    unit = {SINGLE: 2.0**-24, DOUBLE: 2.0**-53}[dtype]
    one = torch.ones((), dtype=DOUBLE)
    size = torch.ones(1, 1, dtype=DOUBLE)
    rate = Fraction(unit)

    def found(*calls: Call) -> Fraction:
        return Fraction(float(error_of(calls, size, dtype)))

    product = Call(Scale(3 * one), None, 1)
    sign = Call(Scale(-one))
    noisy = Call(Scale(one), None, 0, torch.full((1,), 0.125, dtype=DOUBLE))
    both = Call(Scale(3 * one), None, 1, torch.full((1,), 0.125, dtype=DOUBLE))
    # |fl(3 v) - 3 v| <= 3 u; then times 3 again, of a number that is at most 3 + 3 u.
    first = 3 * rate
    second = 3 * first + rate * 3 * (3 + first)
    assert found(product) >= first
    assert found(product, sign) >= first and found(product, product) >= second
    assert found(product, sign, product) >= second
    assert found(noisy) >= Fraction(1, 8) and found(product, noisy) >= first + Fraction(1, 8)
    assert found(both) >= first + Fraction(1, 8)
    assert found(noisy, product) >= Fraction(3, 8) + rate * 3 * Fraction(9, 8)


def test_a_sum_that_may_overflow_is_off_by_any_number() -> None:
    largest = torch.finfo(SINGLE).max
    calls = (Call(Scale(torch.ones((), dtype=DOUBLE)), None, 2),)
    size = torch.tensor([[1.0, largest * (1 - 2.0**-24), 2 * largest]], dtype=DOUBLE)
    found = error_of(calls, size, SINGLE)
    assert math.isfinite(found[0, 0]) and found[0, 1:].isinf().all()


def test_what_is_executed_next_knows_the_error_so_far() -> None:
    """The size of what goes into a second call is that of the first and its error."""
    one = torch.ones((), dtype=DOUBLE)
    noise = torch.full((1,), 1e9, dtype=DOUBLE)
    calls = (Call(Scale(one), None, 0, noise), Call(Scale(one), None, 4))
    found = float(error_of(calls, torch.zeros(1, 1, dtype=DOUBLE), SINGLE))
    assert Fraction(found) >= Fraction(10**9) * (1 + 4 * Fraction(2.0**-24))


@pytest.mark.parametrize("mode", MODES)
def test_the_error_pays_for_the_sum_it_is(mode: str) -> None:
    """Errors of 20000 inputs come together in one entry."""
    n = 20000
    weight = 1 + uniform(1, n, seed=2)
    noise = 1 + uniform(n, seed=3)
    size = torch.zeros(1, n, dtype=DOUBLE)
    calls = (Call(Scale(torch.ones((), dtype=DOUBLE)), None, 0, noise), Call(Matrix(weight)))
    with rounded(mode):
        found = float(error_of(calls, size, SINGLE))
    exact = sum(a * b for a, b in zip(fractions(weight)[0], fractions(noise)))
    assert Fraction(found) >= exact


def test_gamma_is_that_of_higham() -> None:
    """`m u / (1 - m u)`, and what float64 adds in the graph."""
    for dtype, u in ((SINGLE, Fraction(2) ** -24), (DOUBLE, Fraction(2) ** -53)):
        for m in (1, 2, 100, 10**6):
            assert Fraction(gamma(m, dtype)) >= m * u / (1 - m * u) * (1 - Fraction(2) ** -50)
    assert gamma(2**24, SINGLE) == math.inf
    assert SLACK > 1 and _off((), [torch.ones(1)], [torch.zeros(1)], SINGLE) == 0


@pytest.mark.parametrize("mode", MODES)
def test_margins_are_moved_by_the_slack_and_no_less(mode: str) -> None:
    """Also where the slack is below the last digit of the bias, and where the bias has a size of
    its own.
    """
    node = Node((), (3,), "the input")
    for scale in (1e-12, 1.0, 1e17):
        bias = scale * (uniform(40, seed=4) - 0.5)
        slack = uniform(40, seed=5)
        slack[0] = 0.0
        for most in (None, bias.abs()):
            op = Affine(Matrix(uniform(40, 3, seed=6)), bias, most)
            graph = Graph((node, Node((0,), (40,), "", op)))
            with rounded(mode):
                last = ahead(graph, slack).nodes[-1]
            moved = last.bias
            assert moved is not None and moved[0] == bias[0] and isinstance(last.op, Affine)
            for new, old, wanted in zip(fractions(moved), fractions(bias), fractions(slack)):
                assert new - old >= wanted
            if most is not None:
                size = last.op.bias_size
                assert isinstance(size, Tensor) and (size >= moved.abs()).all()


@pytest.mark.parametrize("mode", MODES)
def test_margins_pay_for_the_products_of_their_coefficients(mode: str) -> None:
    """A neuron that is off by 1, and whose coefficient is a long sum that cancels: what is left of
    it is rounding. All neurons are active.
    """
    width = 300
    out = 1 + uniform(width, seed=7)
    sides = torch.where(torch.arange(width) % 2 == 0, 1.0, -1.0).double()
    for k in range(-80, 81, 4):
        last = sides * (1 + uniform(width, seed=8))
        last[-1] = -(last[:-1] @ out[:-1]) / out[-1] + k * 2e-15
        active = Relu(torch.zeros((), dtype=DOUBLE))
        maps = [torch.ones(1, 1).double(), out[:, None], torch.stack([last, 0 * last])]
        nodes = [Node((), (1,), "the input")]
        for i, weight in enumerate(maps):
            nodes.append(Node((2 * i,), (len(weight),), "", Affine(Matrix(weight))))
            nodes.append(Node((2 * i + 1,), (len(weight),), "", active))
        one = {i: torch.ones(1, *node.shape, dtype=DOUBLE) for i, node in enumerate(nodes[:-1])}
        sweep = SimpleNamespace(
            graph=Graph(tuple(nodes[:-1])),
            centre=one,
            spans={i: (0 * v, 0 * v) for i, v in one.items()},
            executed={i: v if i == 1 else 0 * v for i, v in one.items()},
            cones=None,
        )
        with rounded(mode):
            found = margin_errors(sweep, torch.tensor([0]))[0, 1]  # type: ignore[arg-type]
        exact = sum(a * b for a, b in zip(fractions(last), fractions(out)))
        assert Fraction(float(found)) >= abs(exact)


def test_a_long_sum_loses_what_its_formula_says() -> None:
    """`u (P + N) + n u (M + gamma (P + N))`, of thousands of terms of both signs: gamma counts."""
    n = 4000
    weight = uniform(1, n, seed=18) - 0.5
    x = 1 + uniform(1, n, seed=19)
    found = dot_error(Call(Matrix(weight), None, n + 2), x, x.clone(), SINGLE)
    terms = [a * b for a, b in zip(fractions(weight)[0], fractions(x)[0])]
    plus = sum(v for v in terms if v > 0)
    minus = -sum(v for v in terms if v < 0)
    unit = Fraction(2) ** -24
    more = Fraction(gamma(n + 2, SINGLE)) * (plus + minus)
    exact = unit * (plus + minus) + n * unit * (max(plus, minus) + more)
    assert Fraction(float(found)) >= exact


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_sweeps_keep_the_errors_of_what_is_executed(norm: float) -> None:
    """A layer in float32, which torch adds up in its own way."""
    n = 300
    layer = nn.Linear(n, 20)
    with torch.no_grad():
        layer.weight.copy_(uniform(20, n, seed=20))
        layer.bias.copy_(uniform(20, seed=21))
    graph = arithmetic_of(read(nn.Sequential(layer, nn.ReLU(), nn.Linear(20, 2)), (n,)), "executed")
    x = uniform(1, n, seed=22).float()
    balls = Balls.make(x, torch.full((1,), 0.1, dtype=DOUBLE), norm, None)
    found = Sweep(graph, balls).run().executed[1]
    seen = layer(x)[0].tolist()
    rows = zip(seen, found[0].tolist(), fractions(layer.weight.detach()), layer.bias.tolist())
    apart = []
    for value, error, row, bias in rows:
        exact = sum(a * b for a, b in zip(row, fractions(x)[0])) + Fraction(bias)
        apart.append(abs(Fraction(value) - exact))
        assert Fraction(error) >= apart[-1]
    assert any(apart)
