"""One layer of ReLUs: against integer programs, and tables against points."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from wassail.certificates import clock
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.executed import arithmetic_of
from wassail.certificates.search.shallow import Shallow, ShallowSearch, shallow_of

FIRST = torch.tensor([1.0, 0.0], dtype=torch.float64)  # of two outputs


def drawn(seed: int, inputs: int, neurons: int) -> tuple[Shallow, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, neurons), nn.ReLU(), nn.Linear(neurons, 2)).double()
    net = shallow_of(arithmetic_of(read(model, (inputs,)), "exact", torch.float64))
    assert net is not None
    low = torch.rand(inputs, dtype=torch.float64) - 1
    return net, low, low + 1.5 * torch.rand(inputs, dtype=torch.float64)


def least(net: Shallow, output: int, low: Tensor, high: Tensor) -> float:
    """The smallest value on the box, by an integer program: x, relu, and a sign for each neuron."""
    w, b, c = net.w.numpy(), net.b.numpy(), net.c[output].numpy()
    u, n = w.shape
    middle, half = ((low + high) / 2).numpy(), ((high - low) / 2).numpy()
    z, reach = w @ middle + b, np.abs(w) @ half
    bottom, top = z - reach, z + reach
    zero, one = np.zeros((u, u)), np.eye(u)
    rows = [
        (np.hstack([-w, one, zero]), b, np.inf),  # h >= z
        (np.hstack([-w, one, np.diag(-bottom.clip(max=0))]), -np.inf, b - bottom.clip(max=0)),
        (np.hstack([0 * w, one, np.diag(-top.clip(min=0))]), -np.inf, 0.0),
    ]
    limits = Bounds(
        np.concatenate([low.numpy(), np.zeros(2 * u)]),
        np.concatenate([high.numpy(), np.full(u, np.inf), np.ones(u)]),
    )
    found = milp(
        np.concatenate([np.zeros(n), c, np.zeros(u)]),
        integrality=np.concatenate([np.zeros(n + u), np.ones(u)]),
        bounds=limits,
        constraints=[LinearConstraint(*row) for row in rows],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success
    return float(found.fun) + float(net.c0[output])


def decided(net: Shallow, low: Tensor, high: Tensor, shift: float) -> ShallowSearch:
    """Whether output 0 minus a shift can be 0 or less."""
    moved = replace(net.combined(FIRST), c0=net.c0[:1] - shift)

    def accept(points: Tensor) -> Tensor | None:
        inside = ((low <= points) & (points <= high)).all(1)
        value = moved.c[0] @ (moved.w @ points[0] + moved.b).clamp(min=0) + moved.c0[0]
        return points[0] if bool(inside[0]) and float(value) <= 0 else None

    task = ShallowSearch(moved, low, high, accept)
    with clock.limited(None, 20 * clock.SECOND):
        task.begin()
        task.proceed()
    return task


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_the_sign_of_the_least_value(seed: int) -> None:
    net, low, high = drawn(seed, 3 + seed % 4, 10 + 2 * (seed % 3))
    exact = least(net, 0, low, high)
    below = decided(net, low, high, exact - 1e-4)
    assert below.done and below.found is None
    above = decided(net, low, high, exact + 1e-4)
    assert not above.done  # never a false proof
    far = decided(net, low, high, exact + 0.05)
    assert not far.done


def test_a_point_that_is_found_is_one() -> None:
    found = 0
    for seed in range(6):
        net, low, high = drawn(seed, 4, 12)
        task = decided(net, low, high, least(net, 0, low, high) + 0.1)
        if task.found is not None:
            found += 1
            assert bool(((low <= task.found) & (task.found <= high)).all())
    assert found >= 3


@pytest.mark.parametrize("seed", range(4))
def test_no_point_is_outside_the_table(seed: int) -> None:
    net, low, high = drawn(seed, 5, 16)
    task = ShallowSearch(net.combined(FIRST), low, high, lambda points: None)
    with clock.limited(None):
        task.fill_table(torch.arange(16))
    x = low + (high - low) * torch.rand(20_000, 5, dtype=torch.float64)
    x[:32] = torch.where(x[:32] > (low + high) / 2, high, low)
    z = x @ net.w.T + net.b
    assert bool(((task.root_low <= z) & (z <= task.root_high)).all())
    tighter = 0
    for place, s in enumerate((1, -1)):
        for j in range(16):
            some = z[s * z[:, j] >= 0]
            assert bool((some >= task.table_low[place, j]).all())
            assert bool((some <= task.table_high[place, j]).all())
            tighter += int((task.table_high[place, j] < task.root_high).sum())
    assert tighter > 16


def test_only_one_layer_of_plain_relus_is_taken() -> None:
    deep = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    leaky = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 2))
    for model in (deep, leaky, nn.Linear(3, 2)):
        graph = arithmetic_of(read(model.double(), (3,)), "exact", torch.float64)
        assert shallow_of(graph) is None


@pytest.mark.parametrize("far", [0.0, 1e3, 1e7])
@pytest.mark.parametrize("seed", range(3))
def test_a_value_of_exactly_zero_is_never_excluded(seed: int, far: float) -> None:
    # All weights are positive and all coefficients negative: the least value is at one corner,
    # where fractions know it exactly.
    net, low, high = drawn(seed, 4, 8)
    low, high = low + far, high + far
    falling = replace(net.combined(FIRST), w=net.w.abs(), c=-net.c[:1].abs())
    w, b, c = (
        [Fraction(v) for v in part.flatten().tolist()] for part in (falling.w, net.b, falling.c)
    )
    corner = [Fraction(v) for v in high.tolist()]
    z = [sum(w[4 * k + i] * corner[i] for i in range(4)) + b[k] for k in range(8)]
    value = sum(c[k] * max(z[k], 0) for k in range(8))
    zero = float(-value)
    zero = zero if Fraction(zero) <= -value else math.nextafter(zero, -math.inf)
    exact = replace(falling, c0=torch.tensor([zero], dtype=torch.float64))
    exact = replace(exact, size0=exact.c0.abs())
    task = ShallowSearch(exact, low, high, lambda points: None)
    with clock.limited(None, clock.SECOND):
        task.begin()
        task.proceed()
    assert not task.done
