import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import ZOO
from wassail.certificates.exact import programs
from wassail.certificates.exact.cells import (
    enumerate_cells,
    inequalities,
    masks_at,
)
from wassail.certificates.exact.programs import nearest_point
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Ball, Region
from wassail.errors import InputError
from wassail.geometry import operator_norm


def random_net(sizes: tuple[int, ...], seed: int, slope: float = 0.0) -> Piecewise:
    g = torch.Generator().manual_seed(seed)
    shapes = [((b, a), (b,)) for a, b in itertools.pairwise(sizes)]
    draw = partial(torch.randn, generator=g, dtype=torch.float64)
    return Piecewise.from_layers([(draw(weight), draw(bias)) for weight, bias in shapes], slope)


def rows(masks: Tensor) -> set[tuple[int, ...]]:
    return {tuple(m) for m in masks.int().tolist()}


def lines(weight: list[list[float]], bias: list[float]) -> Piecewise:
    """One layer of neurons with these hyperplanes, summed up."""
    return Piecewise.from_layers(
        [(torch.tensor(weight), torch.tensor(bias)), (torch.ones(1, len(bias)), torch.zeros(1))]
    )


@pytest.mark.parametrize(("n", "neurons"), [(1, 6), (2, 8), (3, 9), (4, 8), (6, 4)])
def test_hyperplanes_in_general_position_make_zaslavskys_number_of_cells(
    n: int, neurons: int
) -> None:
    net = random_net((n, neurons, 2), seed=n)
    affine = enumerate_cells(net, Region.make(None, n))
    central = enumerate_cells(net.homogeneous(), Region.make(None, n))
    assert len(affine) == sum(math.comb(neurons, i) for i in range(n + 1))
    assert len(central) == 2 * sum(math.comb(neurons - 1, i) for i in range(n))
    assert affine.complete and central.complete
    if (n, neurons) == (2, 8):
        assert len(affine) == 37


def test_parallel_coincident_constant_and_dead_neurons() -> None:
    # x <= 0, x <= 1, the first one twice (once reversed and scaled), and three constants.
    net = lines([[1.0, 0], [1, 0], [-3, 0], [0, 0], [0, 0], [0, 0]], [0.0, -1, 0, 2, -2, 0])
    cells = enumerate_cells(net, Region.make(None, 2))
    assert rows(cells.masks) == {(0, 0, 1, 1, 0, 0), (1, 0, 0, 1, 0, 0), (1, 1, 0, 1, 0, 0)}


def test_no_neurons_are_one_cell() -> None:
    net = Piecewise.from_layers([(torch.eye(2), torch.zeros(2))])
    cells = enumerate_cells(net, Region.make(None, 2))
    assert cells.masks.shape == (1, 0) and cells.points.shape == (1, 2)
    assert masks_at(net, torch.zeros(2)).shape == (1, 0)


@pytest.mark.few(4)
@pytest.mark.parametrize("where", [None, (-1.0, 1.0), 1, 2, math.inf, "cut"])
@pytest.mark.parametrize(
    ("sizes", "slope"), [((2, 6, 6, 3), 0.0), ((3, 5, 5, 4, 2), 0.0), ((2, 5, 5, 2), 0.1)]
)
def test_deep_cells_are_those_that_sampling_finds(
    where: object, sizes: tuple[int, ...], slope: float
) -> None:
    net = random_net(sizes, seed=7, slope=slope)
    n = sizes[0]
    if where == "cut":
        where = Ball(torch.full((n,), 0.4), 1.0, 2, (0.0, 1.0))
    elif isinstance(where, int | float):
        where = Ball(torch.full((n,), 0.2), 1.5, where)
    region = Region.make(where, n)  # type: ignore[arg-type]
    cells = enumerate_cells(net, region)
    assert cells.complete and len(rows(cells.masks)) == len(cells)
    assert (net.mask(cells.points) == cells.masks).all() and region.contains(cells.points).all()
    g = torch.Generator().manual_seed(0)
    samples = torch.cat([region.sample(30_000, g, spread) for spread in (1.0, 30.0)])
    samples = samples[region.contains(samples)]
    assert len(samples) > 10_000
    sampled = rows(net.mask(samples))
    assert sampled <= rows(cells.masks)
    assert len(cells) < 2 * len(sampled)


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_inequalities_describe_the_cell(slope: float) -> None:
    net = random_net((3, 5, 4, 2), seed=2, slope=slope)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 3, generator=g, dtype=torch.float64)
    masks = net.mask(x)
    for mask in masks[:5]:
        big_g, small_g = inequalities(net, mask)
        assert ((x @ big_g.T <= small_g).all(1) == (masks == mask).all(1)).all()


def test_masks_at_generic_points_are_the_mask() -> None:
    net = random_net((3, 6, 6, 2), seed=3)
    g = torch.Generator().manual_seed(2)
    for x in torch.randn(50, 3, generator=g, dtype=torch.float64):
        assert torch.equal(masks_at(net, x), net.mask(x[None]))


def test_masks_at_a_vertex_of_three_lines() -> None:
    # Three lines through the origin: six cells around it, although eight sign patterns exist.
    net = lines([[1.0, 0], [0, 1], [1, 1], [1, 0]], [0.0, 0, 0, 5])
    patterns = {(*signs, 1) for signs in itertools.product((0, 1), repeat=3)}
    assert rows(masks_at(net, torch.zeros(2))) == patterns - {(0, 0, 1, 1), (1, 1, 0, 1)}
    assert rows(masks_at(net, torch.tensor([0.0, 2.0]))) == {(0, 1, 1, 1), (1, 1, 1, 1)}


def test_masks_at_boundaries_of_deeper_neurons_are_the_cells_that_touch() -> None:
    net = random_net((2, 4, 4, 2), seed=4)
    g = torch.Generator().manual_seed(3)
    for start, end in torch.randn(30, 2, 2, generator=g, dtype=torch.float64) * 2:
        low = start
        high = end
        if torch.equal(*net.mask(torch.stack([low, high]))):
            continue
        for _ in range(60):  # bisect onto the first change of the mask
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if torch.equal(*net.mask(torch.stack([start, middle])))
                else (low, middle)
            )
        around = low + 1e-5 * torch.randn(2000, 2, generator=g, dtype=torch.float64)
        assert rows(masks_at(net, low)) == rows(net.mask(around))
        assert len(masks_at(net, low)) >= 2


def test_a_dead_neighbour_hides_a_boundary() -> None:
    # Where the first neuron is dead the second layer is constant 0: on that side its zero is no
    # boundary.
    net = Piecewise.from_layers([(torch.ones(1, 1), torch.zeros(1))] * 3)
    assert rows(masks_at(net, torch.zeros(1))) == {(0, 0), (1, 1)}
    assert rows(enumerate_cells(net, Region.make(None, 1)).masks) == {(0, 0), (1, 1)}


def test_a_neuron_that_cancels_up_to_rounding_splits_nothing() -> None:
    # 0.3 relu(x + 10) - 0.1 relu(3 x + 30) is zero, but in float64 its weight is not.
    hidden = (torch.tensor([[1.0], [3.0]]), torch.tensor([10.0, 30.0]))
    cancel = (torch.tensor([[0.3, -0.1]], dtype=torch.float64), torch.zeros(1))
    net = Piecewise.from_layers([hidden, cancel, (torch.ones(1, 1), torch.zeros(1))])
    assert net.affine(torch.tensor([[True, True, True]]))[0][0, 2] != 0
    assert rows(enumerate_cells(net, Region.make(None, 1)).masks) == {(0, 0, 0), (1, 1, 0)}


def test_limits_and_empty_regions_are_refused() -> None:
    net = random_net((2, 8, 2), seed=2)
    with pytest.raises(InputError, match="more than 36 cells"):
        enumerate_cells(net, Region.make(None, 2), limit=36)
    assert len(enumerate_cells(net, Region.make(None, 2), limit=37)) == 37
    with pytest.raises(InputError, match="empty interior"):
        enumerate_cells(net, Region.make((0.0, torch.tensor([0.0, 1.0])), 2))


def test_nearest_point_in_closed_form() -> None:
    corner = np.array([[-1.0, 0], [0, -1.0]])  # x >= a, y >= b
    for a, b in [(3.0, 4.0), (-1.0, 2.0), (-1.0, -1.0), (3e6, 4e6), (3e-8, 4e-8)]:
        nearest = nearest_point(corner, np.array([-a, -b]), np.zeros(2))
        assert nearest == pytest.approx(np.array([max(a, 0), max(b, 0)]), rel=1e-9, abs=1e-15)
    assert (
        nearest_point(np.array([[1.0], [-1.0]]), np.array([1.0, -1.0 - 1e-9]), np.zeros(1)) is None
    )
    # |y| <= -1 - 1e-6 x: the nearest point is far, and an angle of 1e-6 costs twelve of sixteen
    # digits across it.
    wedge = np.array([[1e-6, 1.0], [1e-6, -1.0]])
    assert nearest_point(wedge, np.array([-1.0, -1.0]), np.zeros(2)) == pytest.approx(
        np.array([-1e6, 0]), rel=1e-9, abs=1e-3
    )


@pytest.mark.slow_cases("lipbab_sd_10-30-30-30-3-0.1-expected3")
@pytest.mark.skipif(not (ZOO / "lipschitz").exists(), reason="no real networks")
@pytest.mark.parametrize(
    ("name", "high", "expected"),
    [
        ("lipbab_iris_4-5-5-3", 1.0, (6.771454513402937, 5.958048912394726, 12.605085581416922)),
        ("lipbab_sd_10-15-10-3", 0.1, (9.530716922306004, 10.41286850374477, 16.274810805318676)),
        ("lipbab_sd_10-20-15-10-3", 0.1, (40.05651016370293, 48.04897158493324, 72.28569774866806)),
        (
            "lipbab_sd_10-30-30-30-3",
            0.1,
            (19.462799793264388, 19.369311332018757, 39.11036425646691),
        ),
    ],
)
def test_published_lipschitz_constants_by_enumeration(
    name: str, high: float, expected: tuple[float, float, float]
) -> None:
    file = np.load(ZOO / "lipschitz" / f"{name}.npz")
    layers = [
        (torch.from_numpy(file[f"W{i}"]), torch.from_numpy(file[f"b{i}"]))
        for i in range(len(file.files) // 2)
    ]
    net = Piecewise.from_layers(layers)
    jacobians = net.jacobian(enumerate_cells(net, Region.make((0.0, high), net.inputs)).masks)
    for norm, value in zip((2.0, 1.0, math.inf), expected):
        assert float(operator_norm(jacobians, norm, norm).max()) == pytest.approx(value, rel=1e-9)


def test_the_largest_slope_of_a_sawtooth() -> None:
    # relu(x) - 3 relu(x - 1) + 5 relu(x - 2): slopes 0, 1, -2, 3.
    net = Piecewise.from_layers(
        [
            (torch.ones(3, 1), torch.tensor([0.0, -1, -2])),
            (torch.tensor([[1.0, -3, 5]]), torch.zeros(1)),
        ]
    )
    for high, value in [(0.5, 1.0), (1.5, 2.0), (2.5, 3.0)]:
        masks = enumerate_cells(net, Region.make((-1.0, high), 1)).masks
        found = float(operator_norm(net.jacobian(masks), 2.0, 2.0).max())
        assert found == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("where", [None, (0.0, 1.0), Ball(torch.full((2,), 0.5), 0.4, 2.0)])
def test_no_cell_is_left_out_on_a_solvers_word(
    where: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A solver that finds everything empty proves nothing: the list says that it has gaps."""
    net = random_net((2, 5, 2), seed=3)
    region = Region.make(where, 2)  # type: ignore[arg-type]
    assert enumerate_cells(net, region).complete

    def lie(rows: np.ndarray, need: np.ndarray, most: int | None = None) -> object:
        return np.ones(len(need)), 0.0, np.zeros(rows.shape[1] + 1)

    monkeypatch.setattr(programs, "farkas", lie)
    found = enumerate_cells(net, region)
    assert not found.complete
