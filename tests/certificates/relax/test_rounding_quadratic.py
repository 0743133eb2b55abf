"""Quadratic bounds: every part pays for its own rounding, in every rounding mode, against
fractions.
"""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from support.exact import normal, perceptron, uniform
from support.rounding import MODES, fractions, rounded
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.relax import quadratic
from wassail.certificates.relax.balls import Balls, Targets
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.quadratic import Forms, Relaxation, forms_of

INF = math.inf
DOUBLE = torch.float64


@pytest.mark.parametrize("mode", MODES)
def test_variables_of_the_input_cover_its_box(mode: str) -> None:
    n = 100
    x = normal(1, n, seed=1)
    low = -uniform(1, n, seed=2) / 3
    high = uniform(1, n, seed=3) / 3
    nodes = (Node((), (n,), "the input"),)
    sweep = SimpleNamespace(graph=Graph(nodes), centre={0: x}, spans={0: (low, high)})
    with rounded(mode):
        rows = quadratic._input_rows(sweep, 0, n)  # type: ignore[arg-type]
    parts = (rows[0], rows[1:].diagonal(), x[0], low[0], high[0])
    for middle, half, centre, below, above in zip(*map(fractions, parts)):
        assert middle - half <= centre + below and centre + above <= middle + half


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("off", [0.0, 1e-7])
@pytest.mark.parametrize("before", [0.0, 1e3])
def test_forms_of_affine_maps(before: float, off: float, mode: str) -> None:
    """off: by how much weights and biases may be wrong, here all of them one way; before: by how
    much the inputs may be.
    """
    n = 300
    weight = 1 + uniform(3, n, seed=4)
    bias = uniform(3, seed=5)
    given = torch.cat([1 + uniform(1, n, seed=6), uniform(2, n, seed=7)])
    errors = before * (1 + uniform(1, n, seed=8))
    graph = replace(Graph((Node((), (n,), "the input"),)), rounding=off)
    map_ = Matrix(weight)
    node = Node((0,), (3,), "a layer", Affine(map_, bias))
    with rounded(mode):
        form = map_.forward(given)
        form = torch.cat([form[:1] + bias, form[1:]])
        found = quadratic._affine_error(graph, node, [given], [errors])
    more = 1 + Fraction(off)
    inputs = fractions(given)
    wrong = fractions(errors)[0]
    for k, row in enumerate(fractions(weight)):
        exact = [sum(a * b for a, b in zip(row, values)) for values in inputs]
        exact[0] += Fraction(float(bias[k]))
        lost = sum(abs(v * more - Fraction(float(u))) for v, u in zip(exact, form[:, k]))
        passed = sum(a * b for a, b in zip(row, wrong)) * more
        assert Fraction(float(found[0, k])) >= lost + passed


def test_forms_keep_the_errors_of_all_layers() -> None:
    """Weights that may be wrong, all of them one way: neurons that are on pass the error of the
    first layer on, and undecided ones have their own.
    """
    off = 1e-6
    first = torch.cat([1 + uniform(4, 3, seed=9), normal(2, 3, seed=10)])
    second = 1 + uniform(2, 6, seed=11)
    biases = [torch.tensor([5.0] * 4 + [0.0] * 2).double(), torch.zeros(2).double()]
    graph = replace(perceptron([first, second], biases), rounding=off)
    x = torch.full((1, 3), 0.1, dtype=DOUBLE)
    sweep = Sweep(graph, Balls.make(x, torch.ones(1, dtype=DOUBLE), INF, None)).run()
    forms = forms_of(sweep, sweep.proved(), 0)
    assert forms is not None and len(forms.base) == 2
    assert (forms.error >= off * first[4:].abs() @ (x[0] + 0.9)).all()
    # Of the second layer alone, and as much again of the neurons that are on.
    here = second[:, :4] @ (first[:4] @ x[0] + 5)
    assert (forms.logit_error >= off * 1.9 * here).all()


@pytest.mark.parametrize("mode", MODES)
def test_forms_pay_for_the_constants_of_a_specification(mode: str) -> None:
    weights = [normal(6, 3, seed=12), 1e-3 * normal(4, 6, seed=13)]
    graph = perceptron(weights, [torch.zeros(6).double(), torch.zeros(4).double()])
    x = uniform(1, 3, seed=14)
    balls = Balls.make(x, torch.ones(1, dtype=DOUBLE), INF, None)
    offsets = uniform(1, 4, seed=15)
    targets = Targets(offsets, torch.ones(1, 4, dtype=torch.bool))
    plain = Sweep(graph, balls).run()
    other = Sweep(graph, replace(balls, targets=targets)).run()
    with rounded(mode):
        found = [forms_of(sweep, sweep.proved(), 0) for sweep in (plain, other)]
    old, new = found
    assert old is not None and new is not None
    parts = (old.logit_base, offsets[0], new.logit_base, old.logit_error, new.logit_error)
    for before, more, after, error, paid in zip(*map(fractions, parts)):
        assert abs(before + more - after) + error <= paid


@pytest.mark.parametrize("mode", MODES)
def test_lines_above_neurons(mode: str) -> None:
    forms = simple(200, low=-uniform(200, seed=12) - 0.1, high=uniform(200, seed=13) + 0.1)
    with rounded(mode):
        slope = Relaxation(forms, 0, 1).slope
    for steep, low, high in zip(*map(fractions, (slope, forms.low, forms.high))):
        assert steep * (high - low) >= high


def simple(m: int, **given: Tensor) -> Forms:
    """M neurons and no input, every form 0 but for what is given."""
    zero = torch.zeros(m, dtype=DOUBLE)
    parts = {
        "rows": torch.zeros(m, m, dtype=DOUBLE),
        "base": zero,
        "error": zero,
        "low": zero - 1,
        "high": zero + 1,
        "half": zero + 0.5,
        "logits": torch.zeros(2, m, dtype=DOUBLE),
        "logit_base": torch.zeros(2, dtype=DOUBLE),
        "logit_error": torch.zeros(2, dtype=DOUBLE),
    }
    return Forms(**{**parts, **given}, parts=(slice(0, m),))


def exact(forms: Forms, found: Relaxation, values: Tensor, s: Tensor, way: int) -> Fraction:
    """The function of the module's docstring at variables s, where the label is 0 and the rival 1,
    and no form has a coefficient; way: the sign of all errors of the neurons' inputs.
    """
    assert not forms.rows.any() and not forms.logits.any()
    bases, errors = map(fractions, (forms.logit_base, forms.logit_error))
    total = bases[1] - bases[0] + sum(errors)
    parts = (*found.parts(values), found.slope, s, forms.half, forms.base, forms.error, forms.low)
    for a, b, c, e, d, slope, at, half, base, error, low in zip(*map(fractions, parts)):
        v = half * (1 + at)
        z = base + way * error
        total += a * v + b * (v - z) + c * v * (z - v) + e * (slope * (z - low) - v)
        total += d * (1 - at * at)
    return Fraction(total)


@pytest.mark.parametrize("mode", MODES)
def test_claims_pay_for_coefficients_that_cancel(mode: str) -> None:
    """Large biases of the logits, and a neuron's that is as large: their difference is small."""
    for seed in range(20):
        logits = 2.0**27 * (1 + uniform(2, seed=seed)) * torch.tensor([-0.25, 1.0])
        base = (logits[1] - logits[0])[None] * (1 + 2.0**-30)
        forms = simple(1, logit_base=logits, base=base)
        multipliers = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.5], dtype=DOUBLE)
        with rounded(mode):
            found = Relaxation(forms, 0, 1)
            upper = -found.claimed(multipliers)
        best = exact(forms, found, multipliers, torch.tensor([0.5], dtype=DOUBLE), 0)
        assert Fraction(upper) >= best
        assert upper - float(best) < 1e-4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("neurons", "logits"), [(1e6, 0.0), (0.0, 1e3)])
def test_claims_pay_for_the_errors_of_forms(neurons: float, logits: float, mode: str) -> None:
    """Errors that are far larger than all else, of many neurons or of the logits."""
    m = 200
    forms = simple(
        m,
        error=neurons * (1 + uniform(m, seed=14)),
        logit_error=logits * (1 + uniform(2, seed=15)),
    )
    zero = torch.zeros(m, dtype=DOUBLE)
    multiplier = 1e-3 * (1 + uniform(m, seed=16))
    values = torch.cat([multiplier, zero, zero, multiplier, zero + 2.0**-30])
    with rounded(mode):
        found = Relaxation(forms, 0, 1)
        upper = -found.claimed(values)
    assert Fraction(upper) >= exact(forms, found, values, zero, 1)


@pytest.mark.parametrize("mode", MODES)
def test_heights_and_slopes_at_a_point(mode: str) -> None:
    """Whatever the point is: one where the derivatives nearly vanish, and one where they do not."""
    n = 100
    matrix = 1 + uniform(n, n, seed=17)
    matrix = matrix + matrix.T
    s = 1 + uniform(n, seed=18)
    for pull in (2 * (matrix @ s), normal(n, seed=19)):
        constant = s @ matrix @ s - pull @ s
        with rounded(mode):
            height, slope = quadratic.height_at(constant, pull, matrix, s)
        at = fractions(s)
        image = [sum(a * b for a, b in zip(row, at)) for row in fractions(matrix)]
        pulls = fractions(pull)
        top = Fraction(float(constant)) + sum(p * t - t * q for p, t, q in zip(pulls, at, image))
        assert Fraction(float(height)) >= top
        for p, q, most in zip(pulls, image, fractions(slope)):
            assert most >= abs(p - 2 * q)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_matrix_lacks_to_be_positive(mode: str) -> None:
    """The product of a factor with itself as it is rounded."""
    n = 40
    factor = uniform(n, n, seed=20)
    with rounded(mode):
        matrix = factor @ factor.T
        lack, _ = quadratic.lack_of(matrix, factor)
    rows = fractions(factor)
    for given, first in zip(fractions(matrix), rows):
        off = [m - sum(a * b for a, b in zip(first, row)) for m, row in zip(given, rows)]
        assert Fraction(float(lack)) >= sum(map(abs, off))
