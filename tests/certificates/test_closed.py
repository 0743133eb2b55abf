"""On small networks both sides of the sandwich are one number, and it is the one that a
mixed-integer program gives.
"""

import math

import pytest
import torch

import wassail as ws
from support.programs import mixed_integer
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.relax.ranges import bounds_on


def _case(name: str, count: int):
    x, y = ws.zoo.data("digits")
    return ws.zoo.load(name).double(), x[:count].double(), y[:count]


@pytest.mark.slow_cases("1.0", "2.0")
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_exact_radii_and_their_flips_close_the_sandwich(norm: float) -> None:
    model, x, y = _case("digits-mlp", 6)
    flips = ws.nearest(model, x, y, norm=norm, passes=60)
    radii = ws.radii(model, x, y, norm=norm, method="exact", upper=flips.distances)
    assert radii.exact.all() and radii.method == "exact"
    own = radii.flips(model, x, y)
    assert own is not None
    both = flips.merge(own)
    assert (radii.values <= both.distances).all()
    for order in (1, 2, math.inf):
        curve = ws.risk_curve(both, radii, order)
        for eps in torch.linspace(0, float(both.distances.max()), 7)[1:].tolist():
            certified, attacked = curve(eps)
            assert attacked - 1e-6 <= certified <= attacked
    assert (
        max(ws.risk_curve(flips, radii, 1).largest_gap()[0], 0) > 1e-6
    )  # the attack alone does not close it


@pytest.mark.slow
@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_exact_radii_are_those_of_a_mixed_integer_program(norm: float) -> None:
    model, x, y = _case("digits-mlp", 3)
    graph = read(model, x.shape[1:])
    flips = ws.nearest(model, x, y, norm=norm, passes=100)
    radii = ws.radii(graph, x, y, norm=norm, method="exact", upper=flips.distances)
    for i in range(len(x)):
        # Only neurons that can change sides within the flip's distance are switches: the nearest
        # flip is no farther.
        bounds = bounds_on(
            graph,
            Region.make(Ball(x[i], float(flips.distances[i]), norm, (0.0, 1.0)), graph.inputs),
        )
        exact = mixed_integer(graph.piecewise(bounds.states()), x[i].flatten(), int(y[i]), norm)
        assert radii.values[i] == pytest.approx(exact, rel=1e-5)
