"""Every activation against the model itself: what torch's rounding is off by and what is charged
for it, and generated networks of any scale.
"""

import copy
import math
import re
from functools import cache
from pathlib import Path

import mpmath  # comes with torch, through sympy
import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.activations import CASES, LAYERS, Case, grid
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import arithmetic_of

INF = math.inf
UNITS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "operators.md"
ROWS = {case.row: case for case in CASES}


@cache
def table() -> dict[str, tuple[float, float, str]]:
    """Of each activation on the page: units in float32 and in float64, and whether executed
    arithmetic covers it.
    """
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"[\d.]+", cells[2]):
            found[cells[0]] = (float(cells[2]), float(cells[3]), cells[4])
    return found


@cache
def measured(row: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A grid, how far torch is from the function there, and that in units of `|f| + min(1, |v|)`;
    underflow is not counted.
    """
    case = ROWS[row]
    v = grid(dtype)
    off = []
    share = []
    with mpmath.workdps(40):
        for at, ours in zip(v.tolist(), case.run(v).tolist()):
            truth = case.real(mpmath.mpf(at))
            error = abs(mpmath.mpf(ours) - truth)
            size = abs(truth) + min(1, abs(at))
            off.append(float(error))
            share.append(float(error / size / UNITS[dtype]) if error else 0.0)
    return v, torch.tensor(off, dtype=torch.float64), torch.tensor(share, dtype=torch.float64)


def test_the_page_has_a_row_for_each_activation() -> None:
    assert set(table()) >= set(ROWS)
    assert set(table()) - set(ROWS) == {"Softmax"}


@pytest.mark.few(5)
@pytest.mark.parametrize("row", ROWS)
def test_torch_is_as_far_from_the_function_as_the_page_says(row: str) -> None:
    for dtype, stated in zip(UNITS, table()[row]):
        worst = float(measured(row, dtype)[2].max())
        assert worst <= stated and (worst > 0) == (stated > 0)


class Applied(nn.Module):
    """An activation and a scale by 1, after which nothing is left to charge."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.case = case
        self.one = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.case.run(x) * self.one


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_executed_arithmetic_charges_the_difference_or_refuses(
    row: str, dtype: torch.dtype
) -> None:
    case = ROWS[row]
    v, off, _ = measured(row, dtype)
    graph = read(Applied(case, dtype).eval(), v.shape, smooth=True)
    assert table()[row][2].startswith("refused") != case.linear
    if not case.linear:
        with pytest.raises(ws.InputError, match="executed arithmetic does not cover"):
            arithmetic_of(graph, "executed", dtype)
        return
    charged = {}
    for arithmetic in ("exact", "executed"):
        point = Balls.make(v[None], torch.zeros(1, dtype=torch.float64), INF, None)
        sweep = Sweep(arithmetic_of(graph, arithmetic, dtype), point).run()
        low, high = sweep.spans[len(graph.nodes) - 1]
        charged[arithmetic] = torch.maximum(-low, high)[0]
    assert (off <= charged["executed"]).all()
    if float(off.max()) > 0 and dtype == torch.float32:  # and nothing else pays for it
        assert not (off <= charged["exact"]).all()


def test_softmax_is_as_far_from_the_function_as_the_page_says() -> None:
    g = torch.Generator().manual_seed(0)
    scale = 2.0 ** torch.linspace(-6, 9, 16, dtype=torch.float64)
    scores = scale[:, None, None] * torch.randn(16, 6, 5, generator=g, dtype=torch.float64)
    for dtype, stated in zip(UNITS, table()["Softmax"]):
        given = scores.to(dtype).reshape(-1, 5)
        worst = 0.0
        with mpmath.workdps(40):
            for row, ours in zip(given.tolist(), torch.softmax(given, 1).tolist()):
                powers = [mpmath.exp(mpmath.mpf(v) - max(row)) for v in row]
                for v, power, p in zip(row, powers, ours):
                    truth = power / mpmath.fsum(powers)
                    size = truth * (1 + max(row) - v) * UNITS[dtype]
                    if truth > 1e-30:  # below it float32 may underflow
                        worst = max(worst, float(abs(p - truth) / size))
        assert 0 < worst <= stated


def network(name: str, seed: int, dtype: torch.dtype, offset: float) -> nn.Sequential:
    """Three inputs, an activation whose inputs are of a random scale between 2^-20 and 2^20, three
    logits of order one above a common offset.
    """
    g = torch.Generator().manual_seed(seed)
    scale = 2.0 ** int(torch.randint(-20, 21, (1,), generator=g)) if seed else 1.0
    first, last = nn.Linear(3, 5), nn.Linear(5, 3)
    model = nn.Sequential(first, LAYERS[name](), last).double()
    with torch.no_grad():
        for layer in (first, last):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=g))
            layer.bias.copy_(torch.randn(layer.bias.shape, generator=g))
        first.weight *= scale
        first.bias *= scale
        given = first(2 * torch.rand(200, 3, generator=g, dtype=torch.float64) - 1)
        hidden = model[1](given)
        # Not less than rounding leaves of it in float32.
        least = 2.0**-8 * (hidden.abs().amax() + given.abs().clamp(max=1).amax())
        last.weight /= torch.maximum(hidden.std(0).amax(), least)
        last.bias -= last(hidden).mean(0)
        last.bias += offset + 0.3 * torch.randn(3, generator=g)
    return model.requires_grad_(False).to(dtype)


def inside(x: Tensor, radius: float, norm: float, low: Tensor, high: Tensor) -> Tensor:
    """Points of the ball around a sample that are in the box, as numbers of its type."""
    g = torch.Generator().manual_seed(1)
    u = torch.randn(1500, 3, generator=g, dtype=torch.float64)
    u[:500] = u[:500].sign()
    u = u / torch.linalg.vector_norm(u, norm, dim=1, keepdim=True)
    u[800:] *= torch.rand(700, 1, generator=g, dtype=torch.float64)
    points = (x.double() + radius * (1 - 1e-6) * u).clamp(low, high).to(x.dtype)
    far = torch.linalg.vector_norm(points.double() - x.double(), norm, dim=1)
    return points[(far <= radius) & (points >= low).all(1) & (points <= high).all(1)]


def check(name: str, seed: int) -> bool:
    """No margin at a point of a ball is below the bound; every second box has a frozen input.
    Returns whether a bound is above 0.
    """
    kind = seed + list(LAYERS).index(name)
    dtype = (torch.float32, torch.float64)[kind % 2]
    norm = (INF, 2.0, 1.0)[kind % 3]
    model = network(name, seed, dtype, (0.0, 1e4)[kind // 2 % 2])
    g = torch.Generator().manual_seed(seed + 50)
    x = 2 * torch.rand(1, 3, generator=g, dtype=torch.float64).to(dtype) - 1
    low, high = (torch.full((3,), side, dtype=torch.float64) for side in (-1.0, 1.0))
    if kind // 4 % 2:
        low[1] = high[1] = float(x[0, 1])
    y = model(x).argmax(1)
    graph = arithmetic_of(read(model, (3,), smooth=True), "auto", dtype)
    # Exact arithmetic is about real numbers, which float64 is near to.
    wide = copy.deepcopy(model).double()
    run = model if graph.arithmetic == "executed" else wide
    proved = False
    for radius in (1e-3, 0.1, 0.7):
        size = torch.tensor([radius], dtype=torch.float64)
        sweep = Sweep(graph, Balls.make(x, size, norm, (low, high))).run()
        least = margins(sweep, y)[0][0]
        points = inside(x, radius, norm, low, high)
        assert len(points) > 300
        logits = run(points.to(next(run.parameters()))).double()
        reach = wide[2].weight.abs() @ wide[:2](points.double()).abs().amax(0) + wide[2].bias.abs()
        slack = 0.0 if graph.arithmetic == "executed" else 2.0**-44 * float(reach.max())
        seen = (logits[:, y] - logits).amin(0)
        assert (least <= seen + slack).all(), (name, seed, radius)
        proved |= bool((least.sort().values[1:] > 0).all())
    return proved


@pytest.mark.few(7)
@pytest.mark.slow_cases("Mish")
@pytest.mark.parametrize("name", LAYERS)
def test_margins_are_bounded_at_every_scale(name: str) -> None:
    proved = [check(name, seed) for seed in range(4)]
    assert any(proved)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_margins_are_bounded_at_every_scale_of_many(name: str) -> None:
    proved = [check(name, seed) for seed in range(4, 50)]
    assert any(proved)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_a_celu_of_negative_alpha_is_refused_behind_any_offset(offset: float) -> None:
    """It was taken for another function, which a common offset hid: radius inf, flip at 0.54."""
    model = nn.Sequential(nn.Linear(1, 1), nn.CELU(-1.0), nn.Linear(1, 2)).double()
    with torch.no_grad():
        for layer, weight, bias in (
            (model[0], [[1.0]], [-0.5]),
            (model[2], [[1.0], [-1.0]], [0.55 + offset, offset - 0.55]),
        ):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))
    x = torch.tensor([[0.6]], dtype=torch.float64)
    with pytest.raises(ws.InputError, match="grows exponentially below 0"):
        ws.radii(model, x, model(x).argmax(1), INF, (0, 1))
