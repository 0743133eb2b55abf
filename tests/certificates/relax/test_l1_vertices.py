"""Bounds by the vertices of an l1 ball: they hold for the values that points reach, alone and not
by grace of others; they meet closed forms; sparse and dense matrices say the same; they win where
they should.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.rescaled import PIECEWISE, case, inside, random_graph, rescaled
from wassail.certificates.graph.graph import Affine, Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.relax import l1_vertices
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.l1_vertices import VertexCones

BOX = (0.0, 1.0)


@pytest.fixture(autouse=True)
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers, too, and nothing but vertices."""
    monkeypatch.setattr(l1_vertices, "LEAST_ENTRIES", 0)
    monkeypatch.setattr(l1_vertices, "BOTH_UP_TO_NEURONS", 0)


def swept(
    graph: Graph, x: Tensor, radius: Tensor, box: tuple[float, float] | None = BOX
) -> tuple[Sweep, VertexCones]:
    sweep = Sweep(graph, Balls.make(x, radius, 1.0, box)).run()
    assert isinstance(sweep.cones, VertexCones)
    return sweep, sweep.cones


def alone(sweep: Sweep, j: int, owner: int) -> tuple[Tensor, Tensor]:
    """Bounds on the entries of node j for one sample by vertices only, from below and above."""
    assert sweep.cones is not None
    size = sweep.graph.nodes[j].size
    unit = torch.eye(size, dtype=torch.float64).reshape(-1, *sweep.graph.nodes[j].shape)
    tops = []
    for sign in (1.0, -1.0):
        found, a, across = sweep.cones.bound(j, sign * unit, torch.tensor([owner]))
        assert a.shape == (size, sweep.graph.inputs)
        # Each of the two bounds has to hold: the smaller one.
        tops.append(torch.minimum(found.constant + across, found.together))
    return -tops[1], tops[0]


def points_of(graph: Graph, x: Tensor, radius: Tensor) -> Tensor:
    """Points of the balls, vertices and pairs of coordinates among them, `(points, N, *shape)`."""
    found = list(inside(x, radius, 1.0, 30, 5))
    n = x[0].numel()
    for j in range(n):
        for k in range(n):
            for one, two in ((1.0, 0.0), (-1.0, 0.0), (0.5, 0.5), (0.7, -0.3), (-0.5, -0.5)):
                step = torch.zeros(len(x), n, dtype=torch.float64)
                step[:, j] += one
                step[:, k] += two
                step = step / step.abs().sum(1, keepdim=True).clamp(min=1.0)
                moved = x.flatten(1) + step * radius[:, None]
                found.append(moved.clamp(*BOX).reshape(x.shape))
    return torch.stack(found)


@pytest.mark.few(12)
@pytest.mark.slow_cases("max pooled-66-*", "max pooled-*-65536")
@pytest.mark.parametrize("dense", [0, 2**16])
@pytest.mark.parametrize("most", [0, 66])  # layers times 2^-66 to 2^66
@pytest.mark.parametrize("kind", list(PIECEWISE))
def test_rows_hold_what_points_reach(
    kind: str, most: int, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(l1_vertices, "DENSE", dense)
    for seed in (7, 8):
        graph = random_graph(kind, seed)
        graph = rescaled(graph, seed, most) if most else graph
        given = case(graph, seed, 1.0)
        radius = torch.linspace(0.05, 1.3, len(given.x), dtype=torch.float64)
        sweep, _ = swept(graph, given.x, radius)
        values = [graph.values(some) for some in points_of(graph, given.x, radius)]
        for j, node in enumerate(graph.nodes):
            if not isinstance(node.op, Affine):
                continue
            for owner in range(len(given.x)):
                low, high = alone(sweep, j, owner)
                for value in values:
                    d = (value[j] - sweep.centre[j])[owner].flatten()
                    slack = 1e-9 * (value[j][owner].flatten().abs() + high.abs())
                    assert (d <= high + slack).all() and (d >= low - slack).all()


def kinks(thresholds: list[float], slope: float = 0.0) -> nn.Sequential:
    """`f(x_i - threshold_i)` for each input, added up."""
    n = len(thresholds)
    model = nn.Sequential(nn.Linear(n, n), nn.LeakyReLU(slope), nn.Linear(n, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(n))
        model[0].bias.copy_(-torch.tensor(thresholds, dtype=torch.float64))
        model[2].weight.copy_(torch.stack([torch.ones(n), -torch.ones(n)]))
        model[2].bias.zero_()
    return model


def test_a_corner_bends_one_neuron() -> None:
    """Of two neurons that bend at 1/2 only one can by a whole half; boxes count both."""
    graph = read(kinks([0.5, 0.5]), (2,))
    x = torch.zeros(1, 2, dtype=torch.float64)
    sweep, cones = swept(graph, x, torch.ones(1, dtype=torch.float64), None)
    row = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found, a, _ = cones.bound(len(graph.nodes) - 1, row, torch.tensor([0]))
    assert float(found.together) == pytest.approx(0.5, abs=1e-12) and float(found.together) >= 0.5
    assert a.abs().max() == 0, "both neurons are off at the sample"
    # From below nothing bends: both are at least 0.
    found, _, _ = cones.bound(len(graph.nodes) - 1, -row, torch.tensor([0]))
    assert 0 <= float(found.together) <= 1e-12
    assert sweep.cones is cones


def test_the_box_leaves_no_corner_to_itself() -> None:
    """Radius 2 with room for 1 a coordinate: half of each vertex, 3 * 1.5 / 2 + 2 * 1.5 / 2."""
    model = kinks([0.5, 0.5])
    with torch.no_grad():
        model[2].weight.mul_(torch.tensor([3.0, 2.0]))
    graph = read(model, (2,))
    x = torch.zeros(1, 2, dtype=torch.float64)
    _, cones = swept(graph, x, torch.full((1,), 2.0, dtype=torch.float64))
    row = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = cones.bound(len(graph.nodes) - 1, row, torch.tensor([0]))[0]
    boxes = 3 * 0.5 + 2 * 0.5  # cheaper here, and taken
    assert float(found.together) == pytest.approx(boxes, abs=1e-12)
    _, cones = swept(graph, x, torch.full((1,), 1.25, dtype=torch.float64))
    found = cones.bound(len(graph.nodes) - 1, row, torch.tensor([0]))[0]
    # 1.25 e_1 is worth 3 * 0.75 and has a share of 0.8, 1.25 e_2 is worth 1.5 and has the rest.
    assert float(found.together) == pytest.approx(0.8 * 2.25 + 0.2 * 1.5, abs=1e-12)


@pytest.mark.parametrize("slope", [-0.5, 0.3])
def test_two_layers_at_the_corners(slope: float) -> None:
    """`f(g(x_1 - 0.2) + g(x_2 - 0.2) - 0.1)`: the largest and least value by a fine grid, and the
    bounds at the vertices by hand.
    """
    model = nn.Sequential(
        *kinks([0.2, 0.2], slope)[:2], nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 2)
    ).double()
    with torch.no_grad():
        model[2].weight.fill_(1.0)
        model[2].bias.fill_(-0.1 + 0.4 * slope)  # -0.1 at the sample
        model[4].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[4].bias.zero_()
    graph = read(model, (2,))
    x = torch.zeros(1, 2, dtype=torch.float64)
    _, cones = swept(graph, x, torch.ones(1, dtype=torch.float64), None)
    row = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    top = float(cones.bound(len(graph.nodes) - 1, row, torch.tensor([0]))[0].together)
    axis = torch.linspace(-1, 1, 201, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    grid = grid[grid.abs().sum(1) <= 1 + 1e-12]
    true = float(model(grid)[:, 0].detach().max())
    # g(t - 0.2) - g(-0.2) = slope t + (1 - slope) max(0, t - 0.2), and one vertex of two at a time.
    rise = max(slope + max(0.0, 1 - slope) * 0.8, -slope)
    assert true - 1e-12 <= top == pytest.approx(max(0.0, rise - 0.1), abs=1e-12)


def test_a_share_is_priced_from_above() -> None:
    """Without a sort: at least the value of the knapsack, and hardly more."""
    model = nn.Sequential(nn.Linear(400, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    generator = torch.Generator().manual_seed(8)
    x = torch.rand(4, 400, generator=generator, dtype=torch.float64)
    radius = torch.tensor([0.4, 0.8, 3.0, 9.0], dtype=torch.float64)
    _, cones = swept(read(model, (400,)), x, radius)
    values = torch.randn(50, 800, generator=generator, dtype=torch.float64)
    values[:10] = 1.0
    values[10:20] *= 1e-300
    priced = [cones._filled(values, sample) for sample in range(4)]
    cones.counts = []
    for sample, found in enumerate(priced):
        exact = cones._filled(values, sample)
        assert not torch.equal(found, exact) or sample < 2
        assert (found >= exact * (1 - 1e-12)).all() and (found <= 1.03 * exact).all()


def test_sparse_matrices_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(54, 20),
        nn.ReLU(),
        nn.Linear(20, 4),
    ).double()
    graph = read(model, (2, 7, 7))
    x = torch.rand(3, 2, 7, 7, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    radius = torch.tensor([0.3, 0.9, 1.8], dtype=torch.float64)
    found = {}
    for dense in (0, 2**30):
        monkeypatch.setattr(l1_vertices, "DENSE", dense)
        sweep, cones = swept(graph, x, radius)
        kinds = {t.vertices.index is None for turns in cones.turns.values() for t in turns.samples}
        assert kinds == {dense > 0}
        found[dense] = margins(sweep, y)[0]
    assert torch.allclose(found[0], found[2**30], rtol=1e-10, atol=1e-12)
    assert (found[0] > -math.inf).all()


@pytest.mark.parametrize("few", [0, 512])
def test_the_same_in_any_batch(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l1_vertices, "BOTH_UP_TO_NEURONS", few)
    for kind in ("dense", "conv", "residual"):
        graph = random_graph(kind, 2)
        given = case(graph, 2, 1.0)
        radius = torch.linspace(0.1, 0.9, len(given.x), dtype=torch.float64)
        whole = margins(swept(graph, given.x, radius)[0], given.y)[0]
        for k in range(len(given.x)):
            some = slice(k, k + 1)
            part = margins(swept(graph, given.x[some], radius[some])[0], given.y[some])[0]
            assert torch.allclose(part, whole[some], rtol=1e-9, atol=1e-12)


def test_boxes_are_narrower_and_margins_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both kinds of bounds nothing is wider than with one, and margins fall by less."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 10)
    ).double()
    graph = read(model, (40,))
    x = torch.rand(3, 40, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    balls = Balls.make(x, torch.full((3,), 1.5, dtype=torch.float64), 1.0, BOX)
    monkeypatch.setattr(l1_vertices, "BOTH_UP_TO_NEURONS", 512)
    with_ = Sweep(graph, balls).run()
    assert isinstance(with_.cones, VertexCones) and with_.cones.other is not None
    monkeypatch.setattr(l1_vertices, "LEAST_ENTRIES", 2**30)
    without = Sweep(graph, balls).run()
    assert not isinstance(without.cones, VertexCones)
    for j, (low, high) in with_.spans.items():
        bottom, top = without.spans[j]
        assert (low >= bottom - 1e-12).all() and (high <= top + 1e-12).all()
    clean = with_.centre[len(graph.nodes) - 1]
    here = clean.gather(1, y[:, None]) - clean
    rivals = torch.arange(10) != y[:, None]
    new, old = ((here - margins(sweep, y)[0])[rivals].mean() for sweep in (with_, without))
    assert new < 0.85 * old


def test_after_an_overflow_nothing_is_claimed() -> None:
    model = kinks([0.5, 0.5])
    with torch.no_grad():
        model[0].weight.mul_(1e150)
    graph = read(model, (2,))
    x = torch.zeros(1, 2, dtype=torch.float64)
    _, cones = swept(graph, x, torch.full((1,), 1e200, dtype=torch.float64), None)
    row = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = cones.bound(len(graph.nodes) - 1, row, torch.tensor([0]))[0]
    assert not math.isfinite(float(found.together))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["dense", "leaky", "conv"])
def test_no_radius_is_beyond_a_flip(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    make, shape = PIECEWISE[kind]
    model = make().to(dtype).eval()
    x = torch.rand(6, *shape, dtype=dtype)
    with torch.no_grad():
        y = model(x).argmax(1)
    radii = ws.radii(model, x, y, 1, BOX, "crown").values
    flips = ws.nearest(model, x, y, 1, BOX, passes=30).distances
    assert (radii <= flips).all() and (radii > 0).any()
