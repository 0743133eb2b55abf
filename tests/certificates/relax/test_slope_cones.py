"""Linear bounds that know how far a layer bends: they hold for the values that points reach, alone
and not by grace of CROWN's; their lengths hold; they meet closed forms; they win where they should.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.networks import Net
from support.rescaled import ALL, case, inside, random_graph, rescaled
from support.rounding import MODES, rounded
from wassail.certificates.graph.graph import Affine, Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.ball_relaxation import BallRelaxation
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.norms import matrix_norms
from wassail.certificates.relax.rows import Length, flattened
from wassail.certificates.relax.slope_cones import Bounded, SlopeCones

BOX = (0.0, 1.0)
NORMS = (1.0, 2.0)


def climbed(graph: Graph, x: Tensor, radius: Tensor, norm: float, j: int, seed: int) -> Tensor:
    """Points of the balls where single entries of node j are large: signed steps of Frank and
    Wolfe's kind from random points, `(points, N, *shape)`.
    """
    shape = (-1, *[1] * (x.ndim - 1))
    found = []
    for points in inside(x, radius, norm, 4, seed):
        found.append(points)
        for entry in range(min(3, graph.nodes[j].size)):
            moved = points.clone()
            for _ in range(3):
                leaf = moved.clone().requires_grad_(True)
                value = graph.values(leaf)[j].flatten(1)[:, entry]
                (slope,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True)
                if slope is None:
                    break
                flat = slope.flatten(1)
                if norm == 2:
                    step = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-300)
                else:
                    top = flat.abs().argmax(1, keepdim=True)
                    step = torch.zeros_like(flat).scatter(1, top, flat.gather(1, top).sign())
                moved = (x + radius.reshape(shape) * step.reshape(x.shape)).clamp(*BOX)
                found.append(moved)
    return torch.stack(found)


def begun(graph: Graph, x: Tensor, radius: Tensor, norm: float) -> tuple[Sweep, dict[int, Length]]:
    moved: dict[int, Length] = {}
    sweep = Sweep(graph, Balls.make(x, radius, norm, BOX), 0, None, moved).run()
    return sweep, moved


def alone(sweep: Sweep, j: int, owner: int) -> tuple[Tensor, Tensor]:
    """Bounds on the entries of node j for one sample by cones only, from below and above."""
    cones = sweep.cones
    assert cones is not None
    size = sweep.graph.nodes[j].size
    unit = torch.eye(size, dtype=torch.float64).reshape(-1, *sweep.graph.nodes[j].shape)
    tops = []
    for sign in (1.0, -1.0):
        found, a, across = cones.bound(j, sign * unit, torch.tensor([owner]))
        apart = found.constant + across
        tops.append(torch.minimum(apart, found.together))
        assert a.shape == (size, sweep.graph.inputs)
    return -tops[1], tops[0]


@pytest.mark.few(9)
@pytest.mark.parametrize("most", [0, 66])  # layers times 2^-66 to 2^66
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", list(ALL))
def test_rows_and_lengths_hold_what_points_reach(kind: str, norm: float, most: int) -> None:
    graph = random_graph(kind, 7)
    graph = rescaled(graph, 7, most) if most else graph
    given = case(graph, 7, norm)
    radius = torch.linspace(0.1, 0.7, len(given.x), dtype=torch.float64)
    sweep, moved = begun(graph, given.x, radius, norm)
    cones = sweep.cones
    assert cones is not None and cones.layers
    last = len(graph.nodes) - 1
    points = climbed(graph, given.x, radius, norm, last, 3)
    values = [graph.values(some) for some in points]
    for j, node in enumerate(graph.nodes):
        if not isinstance(node.op, Affine) or j < min(cones.layers):
            continue
        for owner in range(len(given.x)):
            low, high = alone(sweep, j, owner)
            for value in values:
                d = (value[j] - sweep.centre[j])[owner].flatten()
                slack = 1e-9 * (value[j][owner].flatten().abs() + high.abs())
                assert (d <= high + slack).all() and (d >= low - slack).all()
    for i, layer in cones.layers.items():
        j = graph.nodes[i].inputs[0]
        length, those = moved[i]
        for value in values:
            t = value[j] - sweep.centre[j]
            bent = (flattened(t) * layer.bent.root).norm(dim=1)
            assert (bent <= layer.eps.amax(1) * (1 + 1e-9)).all()
            assert ((t * those).flatten(1).norm(dim=1) <= length * (1 + 1e-9)).all()


def test_radii_near_a_wall() -> None:
    """Four inputs, one of them near the wall: a flip at 0.644, where a bound of a larger ball, cut
    by the box, must not be scaled down.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.fill_(5.0)
        model[2].weight.copy_(torch.tensor([[0.0], [1.0]]).expand(2, 4))
        model[2].bias.copy_(torch.tensor([5 * 4 + 0.9 + 1.5 + 1.2, 0.0]))
    x = torch.tensor([[0.9, 0.5, 0.5, 0.5]], dtype=torch.float64)
    y = torch.tensor([0])
    flip = torch.tensor([[1.0, 0.867, 0.867, 0.867]], dtype=torch.float64)
    assert int(model(flip).argmax()) == 1
    for method in ("crown", "ball", "exact"):
        found = ws.radii(model, x, y, 2, BOX, method).values
        assert 0.6 < float(found) <= float((flip - x).norm())


@pytest.mark.slow_cases("1.0")
@pytest.mark.parametrize("norm", NORMS)
def test_radii_where_a_layer_saturates(norm: float) -> None:
    """`tanh(100 x)` and absolute values: a flip at 0.006, far inside the ball on which the first
    layer is at its box.
    """
    n = 16
    rotation = torch.ones(1, 1, dtype=torch.float64)
    while len(rotation) < n:
        top = torch.cat([rotation, rotation], 1)
        rotation = torch.cat([top, torch.cat([rotation, -rotation], 1)]) / math.sqrt(2)
    eye = torch.eye(n, dtype=torch.float64)
    weights = [
        100 * eye,
        torch.cat([eye, -eye]),
        torch.cat([torch.cat([rotation, rotation], 1), torch.cat([-rotation, -rotation], 1)]),
        torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, 2 * n),
    ]
    linear = [nn.Linear(w.shape[1], w.shape[0]).double() for w in weights]
    with torch.no_grad():
        for layer, weight in zip(linear, weights):
            layer.weight.copy_(weight)
            layer.bias.zero_()
        linear[3].bias[0] = 2.0
    first, second, third, last = linear
    model = nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), third, nn.ReLU(), last)
    x = torch.zeros(1, n, dtype=torch.float64)
    flip = x.clone()
    flip[0, 0] = 0.006
    assert int(model(flip).argmax()) == 1
    for domain in (None, (-1.0, 1.0)):
        assert float(ws.radii(model, x, torch.tensor([0]), norm, domain, "crown").values) <= 0.006


@pytest.mark.parametrize(("neurons", "dtype"), [(24, torch.float64), (1100, torch.float32)])
def test_rows_of_any_scale(neurons: int, dtype: torch.dtype) -> None:
    """`<w, relu(d)>` at its kink, with coefficients that are far from 1, also where they are
    float32: never below what is reached.
    """
    n = 24
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(2, n, generator=generator, dtype=dtype) + 0.1
    for scale in (1.0, 1e-10, 1e-19, 1e-28, 1e-34, 1e10, 1e19, 1e20, 1e25):
        model = nn.Sequential(nn.Linear(n, neurons), nn.ReLU(), nn.Linear(neurons, 2)).to(dtype)
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
            model[0].weight[:n] = torch.eye(n)
            model[2].weight[1, :n] = weight[1] * scale
        graph = read(model, (n,))
        x = torch.zeros(1, n, dtype=torch.float64)
        balls = Balls.make(x, torch.tensor([0.5], dtype=torch.float64), 2.0, None)
        lower = margins(Sweep(graph, balls).run(), torch.tensor([0]))[0][0, 1]
        step = weight[1].double()
        z = graph.logits((0.5 * step / step.norm() * (1 - 1e-12))[None])
        assert float(lower) <= float(z[0, 0] - z[0, 1]) * (1 - 1e-9)


def test_smooth_neurons_bend_as_far_as_their_slopes_differ() -> None:
    """Sixteen GELUs less half of their inputs, so that the lines cancel: what a point reaches is
    0.92 of the bound.
    """
    n = 16
    model = Net(
        lambda m, x: m.out(torch.cat([m.bend(m.first(x)), x], 1)),
        first=nn.Linear(n, n),
        bend=nn.GELU(),
        out=nn.Linear(2 * n, 2),
    ).double()
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(n))
        model.first.bias.fill_(-3.0)
        model.out.weight[:, :n] = 1.0
        model.out.weight[:, n:] = -0.5
    graph = read(model, (n,), smooth=True)
    x = torch.zeros(1, n, dtype=torch.float64)
    balls = Balls.make(x, torch.tensor([8.0], dtype=torch.float64), 2.0, None)
    sweep = Sweep(graph, balls).run()
    last = len(graph.nodes) - 1
    low = alone(sweep, last, 0)[0]
    reached = (graph.logits(x + 2.0) - graph.logits(x))[0]
    assert (low <= reached).all()
    assert (low >= 1.15 * reached).all()


def test_a_direction_in_which_two_layers_bend() -> None:
    """`10 x + relu(|x| - 0.01)`: the second layer moves by what the first one bends, and by nothing
    else, in the very direction of the row.
    """
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    weights = [
        ([[1.0], [-1.0], [1.0]], [0.0, 0.0, 100.0]),
        ([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [-0.01, 0.0]),
        ([[1.0, 10.0], [0.0, 0.0]], [0.0, 0.0]),
    ]
    model = model.double()
    with torch.no_grad():
        for layer, (weight, bias) in zip(list(model)[::2], weights):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))
    graph = read(model, (1,))
    x = torch.zeros(1, 1, dtype=torch.float64)
    balls = Balls.make(x, torch.tensor([1.0], dtype=torch.float64), 2.0, None)
    sweep = Sweep(graph, balls).run()
    assert sweep.cones is not None
    row = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = sweep.cones.bound(len(graph.nodes) - 1, row, torch.tensor([0]))[0]
    reached = float((graph.logits(x + 1.0) - graph.logits(x))[0, 0])
    assert float(found.together) >= reached
    assert float(found.together) <= 1.1 * reached


def test_a_ball_of_undecided_neurons_takes_the_place_of_a_link() -> None:
    """Bounds with random slopes and multipliers, not only with those an ascent finds: never below
    what points reach, where the balls of inner layers are those around undecided neurons.
    """
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU()
    ).append(nn.Linear(30, 3))
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(1.5)
            layer.bias.mul_(4.0)
    graph = read(model.double(), (20,))
    x = torch.rand(1, 20, dtype=torch.float64)
    radius = torch.tensor([0.5], dtype=torch.float64)
    balls = Balls.make(x, radius, 2.0, BOX)
    moved: dict[int, Length] = {}
    sweep = Sweep(graph, balls, 0, None, moved).run()
    spheres = BallRelaxation(sweep, moved)
    replaced = [i for i in spheres.balls.quadratic if not bool(spheres.balls.quadratic[i].good)]
    assert replaced
    # A layer after it hands nothing on to a ball that leaves neurons out.
    links = BallRelaxation(sweep).balls
    first, second = links.quadratic
    good = torch.ones(1, dtype=torch.bool)
    links.quadratic[second] = replace(links.quadratic[second], good=good)
    links._part(first, *moved[first])
    assert links.quadratic[second].source == first
    assert not bool(links.quadratic[first].good) and not bool(links.quadratic[second].good)
    assert not bool((links.free[first] & ~moved[first][1]).any())
    last = len(graph.nodes) - 1
    rows = torch.eye(3, dtype=torch.float64)
    owner = torch.zeros(3, dtype=torch.int64)
    goal = torch.full((3,), -math.inf, dtype=torch.float64)
    slopes = spheres.bound(last, rows, owner, 0, goal)[1]
    points = climbed(graph, x, radius, 2.0, last, 1)
    values = torch.cat([graph.values(some)[last] for some in points]) - sweep.centre[last]
    reached = values.amax(0)
    for shift in (-8.0, -4.0, -2.0, 0.0, 2.0):
        for slope in (None, 0.0, 1.0):
            changed = {
                i: (
                    up if slope is None else torch.full_like(up, slope),
                    down if slope is None else torch.full_like(down, slope),
                    log + shift,
                )
                for i, (up, down, log) in slopes.items()
            }
            found = spheres.bound(last, rows, owner, 0, goal, None, changed)[0]
            assert (found >= reached - 1e-9).all()


def test_a_layer_at_its_kink() -> None:
    """`<w, relu(d)>` with `w > 0` on an l2 ball of R^n is `r ||w||`, which is met exactly; by boxes
    it is `r ||w||_1`. On an l1 ball it is `r max w`, and the bound is `r (max w + ||w||) / 2`.
    """
    n = 24
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(3, n, generator=generator, dtype=torch.float64) + 0.1
    model = nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(n))
        model[0].bias.zero_()
        model[2].weight.copy_(weight)
    graph = read(model, (n,))
    x = torch.zeros(1, n, dtype=torch.float64)
    length = weight.norm(dim=1)
    for norm, bound in ((2.0, length), (1.0, (weight.amax(1) + length) / 2)):
        balls = Balls.make(x, torch.tensor([0.5], dtype=torch.float64), norm, None)
        sweep = Sweep(graph, balls).run()
        low, high = alone(sweep, 3, 0)
        assert (high >= 0.5 * bound * (1 - 1e-12)).all()
        assert (high <= 0.5 * bound * (1 + 1e-9)).all()
        assert (low >= -0.5 * bound * (1 + 1e-9)).all()


def test_a_direction_that_does_not_bend_is_cheap() -> None:
    """The first logit is linear in one input, the bent neurons read the others: both cannot be
    moved by the whole radius. The bound is the exact one, a square root.
    """
    n = 9
    model = nn.Sequential(nn.Linear(n, n + 1), nn.ReLU(), nn.Linear(n + 1, 2)).double()
    first = torch.zeros(n + 1, n, dtype=torch.float64)
    first[0, 0] = 3.0
    first[1:n, 1:] = torch.eye(n - 1)
    bias = torch.zeros(n + 1, dtype=torch.float64)
    bias[0] = 100.0  # keeps its side
    with torch.no_grad():
        model[0].weight.copy_(first)
        model[0].bias.copy_(bias)
        model[2].weight.zero_()
        model[2].weight[0, 0] = 1.0
        model[2].weight[0, 1:n] = 1.0
        model[2].weight[0, 1:n:2] = -1.0
    graph = read(model, (n,))
    x = torch.zeros(1, n, dtype=torch.float64)
    balls = Balls.make(x, torch.tensor([1.0], dtype=torch.float64), 2.0, None)
    high = alone(Sweep(graph, balls).run(), 3, 0)[1][0]
    # a = (3, +-1/2, ...) has the length sqrt(9 + 2), e 1/2, and its coefficients sqrt 8.
    apart = math.sqrt(11) + math.sqrt(8) / 2
    assert float(high) < 0.95 * apart
    true = math.sqrt(9 + 4)  # the positive ones move, the others do not
    assert float(high) >= true


@pytest.mark.parametrize(("norm", "share"), [(2.0, 0.75), (1.0, 1.0)])
def test_boxes_are_never_wider_and_margins_gain(
    norm: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 10)
    ).double()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(2.0)
    graph = read(model, (40,))
    x = torch.rand(3, 40, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    radius = torch.full((3,), 0.8 if norm == 2 else 2.5, dtype=torch.float64)
    balls = Balls.make(x, radius, norm, BOX)
    with_ = Sweep(graph, balls).run()
    new = margins(with_, y)[0]
    monkeypatch.setattr(SlopeCones, "narrow", lambda *_: None)
    monkeypatch.setattr(SlopeCones, "bound", lambda self, last, rows, owner: _nothing(self, rows))
    without = Sweep(graph, balls).run()
    old = margins(without, y)[0]
    for j, (low, high) in with_.spans.items():
        bottom, top = without.spans[j]
        assert (low >= bottom - 1e-12).all() and (high <= top + 1e-12).all()
    assert (new >= old - 1e-9).all()
    rivals = torch.arange(10) != y[:, None]
    clean = with_.centre[len(graph.nodes) - 1]
    here = clean.gather(1, y[:, None]) - clean
    assert (here - new)[rivals].mean() < share * (here - old)[rivals].mean()


def _nothing(cones: SlopeCones, rows: Tensor) -> tuple[Bounded, Tensor, Tensor]:
    none = torch.full((len(rows),), math.inf, dtype=torch.float64)
    a = torch.zeros(len(rows), cones.graph.inputs, dtype=torch.float64)
    return Bounded(none, none), a, none


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_matrices_are_from_above(mode: str) -> None:
    """In every rounding mode; nearly exact; far from 1, too; NaN after an overflow, 0 for
    nothing.
    """
    generator = torch.Generator().manual_seed(1)
    for shape in ((5, 9), (9, 5), (1, 6), (30, 40)):
        a = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        a[1] = a[1, :, :1] @ a[1, :1]  # of rank one
        a[2] = 0.0
        true = torch.linalg.matrix_norm(a, 2)
        for scale in (1.0, 1e-200, 1e200):
            with rounded(mode):
                found = matrix_norms(a * scale)
            assert (found >= true * scale * (1 - 1e-14)).all()
            assert (found[:2] <= 1.02 * true[:2] * scale).all()
            assert float(found[2]) <= 1e-140
    # The first vector of the power iteration is an eigenvector, but not the one that is sought.
    skew = torch.tensor([[[1.0, 0.0], [-0.9, math.sqrt(0.19)]]], dtype=torch.float64)
    assert math.sqrt(1.9) <= float(matrix_norms(skew)) <= 1.001 * math.sqrt(2.0)
    assert float(matrix_norms(torch.full((1, 2, 2), 2.0**-1060, dtype=torch.float64))) >= 2.0**-1059
    assert matrix_norms(torch.full((1, 2, 3), math.inf, dtype=torch.float64)).isnan().all()
    assert matrix_norms(torch.zeros(2, 0, 3, dtype=torch.float64)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("norm", NORMS)
def test_the_same_in_any_batch(norm: float) -> None:
    graph = random_graph("dense", 2)
    given = case(graph, 2, norm)
    radius = torch.linspace(0.1, 0.5, len(given.x), dtype=torch.float64)
    whole = margins(begun(graph, given.x, radius, norm)[0], given.y)[0]
    for k in range(len(given.x)):
        some = slice(k, k + 1)
        part = margins(begun(graph, given.x[some], radius[some], norm)[0], given.y[some])[0]
        assert torch.allclose(part, whole[some], rtol=1e-9, atol=1e-12)
