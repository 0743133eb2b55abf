"""Certificates of smooth networks: the paper's claim and its counterexamples, and both sides
against brute force.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates import clock
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.graph import Affine, Graph, Node, Smooth
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.reader import read
from wassail.certificates.loss.certificate import Certificate
from wassail.certificates.loss.chords import Chords, ChordSearch, _front
from wassail.certificates.loss.slopes import highest_loss, paper_smooth_slope
from wassail.certificates.search.input_boxes import OVERHEAD
from wassail.geometry import vector_norm
from wassail.losses import LIPSCHITZ
from wassail.threat import dual
from wassail.zoo.onnx import load_onnx

LIKE_RELU = ("gelu", "gelu_tanh", "silu", "softplus", "elu")
ALL = (*LIKE_RELU, "tanh", "sigmoid")
INF = math.inf
ORIGIN = torch.zeros(1, 1, dtype=torch.float64)
FIRST = torch.tensor([0])


def certify(*args: Any, time_limit: float = 1.0, **options: Any) -> Certificate:
    """With a budget of work that is worth so many seconds: no test here depends on the clock."""
    with clock.limited(work=time_limit * clock.SECOND):
        return ws.certify(*args, **options)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, eq=False)
class Shallow:
    """`theta(x) = D f(A x + c) + e`."""

    a: Tensor
    c: Tensor
    d: Tensor
    e: Tensor
    activation: str

    @classmethod
    def random(cls, n: int, hidden: int, classes: int, activation: str, seed: int) -> "Shallow":
        generator = torch.Generator().manual_seed(seed)
        sizes = ((hidden, n), (hidden,), (classes, hidden), (classes,))
        a, c, d, e = (torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes)
        return cls(a, c, d, e, activation)

    @property
    def graph(self) -> Graph:
        h, k = self.d.T.shape
        first = Node((0,), (h,), "in", Affine(Matrix(self.a), self.c))
        last = Node((2,), (k,), "out", Affine(Matrix(self.d), self.e))
        return Graph(
            (
                Node((), (self.a.shape[1],), "input"),
                first,
                Node((1,), (h,), "f", Smooth(self.activation)),
                last,
            )
        )

    def gaps(self, k: int) -> Tensor:
        """The rows `d_j - d_k`."""
        return self.d - self.d[k]

    def steepness(self, norm: float, labels: list[int]) -> float:
        """At least Lm: no activation here is steeper than 1.13."""
        return max(
            float(vector_norm(1.13 * self.gaps(k).abs() @ self.a.abs(), dual(norm)).max())
            for k in labels
        )

    def slope_at_infinity(self, norm: float, labels: list[int], directions: Tensor) -> float:
        """The steepest of some rays `(m, n)` of the bias-free ReLU network."""
        if self.activation in ("tanh", "sigmoid"):
            return 0.0
        unit = directions / vector_norm(directions, norm)[:, None]
        rays = (unit @ self.a.T).clamp(min=0)
        return max(0.0, *(float((rays @ self.gaps(k).T).max()) for k in labels))

    def constant(self, k: int) -> float:
        """The margins are within this of those of the bias-free ReLU network, everywhere."""
        far = (
            1.0
            if self.activation in ("tanh", "sigmoid")
            else self.c.abs() + ACTIVATIONS[self.activation].distance_to_relu
        )
        return float(
            (
                self.gaps(k).abs() @ (far * torch.ones_like(self.c)) + (self.e - self.e[k]).abs()
            ).max()
        )


def draw_line(
    net: Shallow, x: Tensor, k: int, norm: float, loss: str, axis: Tensor
) -> tuple[Tensor, Tensor]:
    """Distance and loss on the lattice `x + axis^n`, of shape `(len(axis),) * n`."""
    n = len(x)
    steps = torch.cartesian_prod(*[axis] * n).reshape(-1, n)
    height = LIPSCHITZ[loss](net.graph.logits(x + steps), torch.full((len(steps),), k))
    return vector_norm(steps, norm).reshape([len(axis)] * n), height.reshape([len(axis)] * n)


def envelope(distance: Tensor, height: Tensor) -> list[tuple[float, float]]:
    """The corners of the concave envelope from distance 0 on, as far as it rises."""
    order = sorted(zip(distance.flatten().tolist(), height.flatten().tolist()))
    hull: list[tuple[float, float]] = []
    for d, h in order:
        if hull and h <= hull[-1][1]:
            continue
        while len(hull) > 1 and (h - hull[-1][1]) * (hull[-1][0] - hull[-2][0]) >= (
            hull[-1][1] - hull[-2][1]
        ) * (d - hull[-1][0]):
            hull.pop()
        hull.append((d, h))
    return hull


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (c[1] - b[1]) * (b[0] - a[0]) >= (b[1] - a[1]) * (c[0] - b[0])


def spend(hulls: list[list[tuple[float, float]]], eps: float) -> float:
    """The expected loss of the best distribution on the corners, samples of equal weight: steps
    in order of steepness.
    """
    total = sum(hull[0][1] for hull in hulls)
    left = eps * len(hulls)
    steps = [(b[0] - a[0], b[1] - a[1]) for hull in hulls for a, b in pairwise(hull)]
    for run, rise in sorted(steps, key=lambda step: -step[1] / step[0]):
        share = min(1.0, left / run)
        total = total + share * rise
        left = left - share * run
    return total / len(hulls)


def cells_above(
    distance: Tensor, height: Tensor, axis: Tensor, norm: float, lip: float
) -> tuple[Tensor, Tensor]:
    """For every cell of the lattice the least distance and the highest loss: its corners' and
    what a step to one may add.
    """
    n = distance.ndim
    width = axis.diff()
    half = torch.stack(torch.meshgrid(*[width / 2] * n, indexing="ij"), -1).reshape(-1, n)
    near = torch.minimum(axis[:-1].abs(), axis[1:].abs())
    least = vector_norm(
        torch.stack(torch.meshgrid(*[near] * n, indexing="ij"), -1).reshape(-1, n), norm
    )
    top = -torch.nn.functional.max_pool2d(-height.reshape(1, 1, *([1] * (2 - n)), *height.shape), 1)
    top = torch.nn.functional.max_pool2d(top, (1, 2) if n == 1 else (2, 2), stride=1).flatten()
    return least, top + lip * vector_norm(half, norm)


def brute_force(
    net: Shallow,
    x: Tensor,
    y: Tensor,
    norm: float,
    loss: str,
    axis: Tensor,
    slope: float,
    eps: tuple[float, ...],
) -> list[tuple[float, float]]:
    """`V(eps)` from both sides: the best distribution on a lattice, and the dual with every cell's
    error added.

    Beyond the lattice, at distance d >= R, the loss is at most `slope (d + ||x||) + constant`, with
    a slope that is at least l.
    """
    labels = sorted(set(y.tolist()))
    lip = net.steepness(norm, labels)
    far = float(axis.max())
    hulls = []
    cells = []
    tails = []
    for point, k in zip(x, y.tolist()):
        distance, height = draw_line(net, point, k, norm, loss, axis)
        hulls.append(envelope(distance, height))
        cells.append(cells_above(distance, height, axis, norm, lip))
        more = math.log(len(net.e)) if loss == "cross_entropy" else 0.0
        tails.append(slope * float(vector_norm(point[None], norm)[0]) + net.constant(k) + more)
    multipliers = [slope + lip * 2.0 ** (-k / 4) for k in range(48)]
    found = []
    for budget in eps:
        above = [
            lam * budget
            + sum(
                max(float((top - lam * least).max()), tail - (lam - slope) * far)
                for (least, top), tail in zip(cells, tails)
            )
            / len(x)
            for lam in multipliers
        ]
        found.append((spend(hulls, budget), min(above)))
    return found


def lattice(near: float, step: float, ratio: float, far: float) -> Tensor:
    """0, steps of one size, then steps that grow; both signs."""
    start = torch.arange(1, round(near / step) + 1, dtype=torch.float64) * step
    count = math.ceil(math.log(far / near) / math.log(ratio))
    grown = near * ratio ** torch.arange(1, count + 1, dtype=torch.float64)
    side = torch.cat([start, grown])
    return torch.cat([-side.flip(0), torch.zeros(1, dtype=torch.float64), side])


def check(
    found: Certificate,
    brackets: list[tuple[float, float]],
    budgets: tuple[float, ...],
    slope: float,
) -> None:
    """`E + l eps <= V <= min(E + S eps, C(lam) + lam eps)`, the witness inside its budget and
    evaluated.
    """
    assert (
        found.infinity is not None
        and found.anchor is not None
        and found.margin is not None
        and found.line is not None
    )
    assert found.infinity.lower <= found.anchor.lower <= found.anchor.upper <= found.margin.upper
    assert slope <= found.infinity.upper * (1 + 1e-9) + 1e-9
    lam, offset = found.line
    assert lam >= found.infinity.upper
    for eps, (least, most) in zip(budgets, brackets):
        low, high = found.bounds(eps)
        assert (
            found.empirical + found.infinity.lower * eps <= low <= most
            and least <= high * (1 + 1e-12) + 1e-12
        )
        assert least <= min(found.empirical + found.anchor.upper * eps, offset + lam * eps) + 1e-12
        witness = found.witness(eps)
        assert witness.cost <= eps and witness.info["loss"] <= most


# The paper's smooth theorem: V(eps) >= E + l eps with l = sup ||J^T (e_j - e_k)||, and why it is
# false (THEORY 3).


def unit(activation: str) -> Graph:
    """`theta = (0, f(x))`."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return Shallow(
        one,
        torch.zeros(1).double(),
        torch.tensor([[0.0], [1.0]]).double(),
        torch.zeros(2).double(),
        activation,
    ).graph


def worst_of_unit(activation: str, loss: str, eps: float) -> float:
    """V(eps) of that network from the sample 0: the concave envelope of the loss over a fine
    lattice.
    """
    x = torch.cat(
        [
            torch.arange(0, 200001, dtype=torch.float64) * 1e-4,
            20 * 1.01 ** torch.arange(1, 1500).double(),
        ]
    )[:, None]
    height = LIPSCHITZ[loss](unit(activation).logits(x), torch.zeros(len(x), dtype=torch.int64))
    return spend([envelope(x[:, 0], height)], eps)


def test_the_tanh_counterexample() -> None:
    graph = unit("tanh")
    slope = paper_smooth_slope(graph, 2, labels=[0], time_limit=2.0)
    assert slope.upper == pytest.approx(1.0, abs=1e-6)
    found = certify(graph, ORIGIN, FIRST, 2, "cross_entropy", time_limit=4.0)
    assert found.empirical + slope.lower * 0.5 == pytest.approx(
        1.1931, abs=1e-4
    )  # the paper's claim
    assert found.empirical + slope.lower * 5 == pytest.approx(5.6931, abs=1e-4)
    truth = worst_of_unit("tanh", "cross_entropy", 0.5)
    assert truth == pytest.approx(0.9507, abs=5e-5)
    low, high = found.bounds(0.5)
    assert low - 1e-6 <= truth <= high and high < 0.9537 and low > 0.9506
    assert (
        found.infinity is not None
        and found.infinity.upper == 0.0
        and found.infinity.method == "bounded"
    )
    for eps in (0.5, 5.0, 1e3):
        assert found.bounds(eps)[1] <= math.log1p(math.e) + 1e-9 == pytest.approx(1.3133, abs=5e-5)
    assert found.bounds(1e3)[0] == pytest.approx(math.log1p(math.e), rel=1e-9)
    assert found.margin is not None and found.margin.upper == pytest.approx(
        slope.upper, rel=1e-6
    )  # it is the margin slope


def test_the_gelu_counterexample() -> None:
    graph = unit("gelu")
    slope = paper_smooth_slope(graph, 2, labels=[0], time_limit=2.0)
    found = certify(graph, ORIGIN, FIRST, 2, "margin", time_limit=4.0)
    assert found.empirical + slope.lower * 2 == pytest.approx(2.2578, abs=5e-5)  # the paper's claim
    truth = worst_of_unit("gelu", "margin", 2.0)
    assert truth == pytest.approx(2.0, abs=5e-5)
    low, high = found.bounds(2.0)
    assert (
        low - 1e-9 <= truth <= high
        and low == pytest.approx(2.0, abs=5e-5)
        and high == pytest.approx(2.0, abs=2e-4)
    )
    assert found.infinity is not None and found.infinity.lower == pytest.approx(1.0, rel=1e-9)


# Both sides.

AXIS_1 = lattice(3.0, 0.004, 1.005, 1e4)
AXIS_2 = lattice(2.0, 0.05, 1.06, 1e3)
BUDGETS = (0.05, 0.5, 3.0, 40.0)


@pytest.mark.few(5)
@pytest.mark.parametrize(("activation", "seed"), list(zip(ALL, range(len(ALL)))))
def test_one_input_against_brute_force(activation: str, seed: int) -> None:
    net = Shallow.random(1, 5, 2 + seed % 2, activation, seed)
    x = normal(2, 1, seed=seed)
    y = torch.tensor([0, 1])
    loss = ("margin", "cross_entropy")[seed % 2]
    slope = net.slope_at_infinity(2, [0, 1], torch.tensor([[1.0], [-1.0]]).double())
    brackets = brute_force(net, x, y, 2, loss, AXIS_1, slope, BUDGETS)
    found = certify(
        net.graph, x, y, 2, loss, slopes=("infinity", "anchor", "margin"), time_limit=1.0
    )
    check(found, brackets, BUDGETS, slope)
    assert found.infinity is not None and found.infinity.upper == pytest.approx(slope, abs=1e-9)
    for least, most in brackets[:2]:  # the brute force itself is worth something
        assert most - least < 0.05 * max(1.0, abs(most))


def two_inputs(activation: str, seed: int, norm: float, loss: str, seconds: float) -> None:
    net = Shallow.random(2, 4, 3, activation, seed)
    x = normal(1, 2, seed=seed)
    y = torch.tensor([seed % 3])
    angle = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
    slope = net.slope_at_infinity(norm, y.tolist(), torch.stack([angle.cos(), angle.sin()], 1))
    # The rays between those looked at are hardly steeper: a generous step for the brute force.
    brackets = brute_force(
        net, x, y, norm, loss, AXIS_2, slope + 1e-3 * net.steepness(norm, y.tolist()), BUDGETS
    )
    found = certify(
        net.graph, x, y, norm, loss, slopes=("infinity", "anchor", "margin"), time_limit=seconds
    )
    check(found, brackets, BUDGETS, slope)
    assert found.infinity is not None and found.infinity.lower <= slope + 1e-3 * net.steepness(
        norm, y.tolist()
    )


@pytest.mark.slow_cases("silu-2.0")
@pytest.mark.parametrize(("activation", "norm"), [("gelu", 1.0), ("silu", 2.0), ("tanh", INF)])
def test_two_inputs_against_brute_force(activation: str, norm: float) -> None:
    two_inputs(activation, 1, norm, "margin" if norm == 2 else "cross_entropy", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
@pytest.mark.parametrize("activation", ALL)
def test_many_networks_of_two_inputs(activation: str, norm: float) -> None:
    for seed in range(10, 20):
        two_inputs(activation, seed, norm, ("margin", "cross_entropy")[seed % 2], 4.0)


def test_the_search_for_chords_is_charged_for_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network whose cells hardly close: a step is dozens of calls of torch for every node,
    however small the network.
    """
    net = Shallow.random(2, 4, 3, "gelu", 12)
    steps = []
    inner = ChordSearch._inner
    monkeypatch.setattr(
        ChordSearch, "_inner", lambda self, *cubes: steps.append(1) or inner(self, *cubes)
    )
    budget = 1.0
    certify(net.graph, normal(1, 2, seed=12), FIRST, 1.0, "margin", time_limit=budget)
    most = budget * clock.SECOND / (OVERHEAD * len(net.graph.nodes))
    assert 2 < len(steps) <= most + 2


def test_the_front_keeps_what_no_nearer_point_reaches() -> None:
    generator = torch.Generator().manual_seed(3)
    root, rank = (torch.randint(0, n, (200,), generator=generator) for n in (3, 20))
    gain = torch.round(10 * torch.randn(200, generator=generator)).double()
    chords = Chords(root, rank[:, None].double(), gain, rank.double(), root)
    front = _front(chords)
    kept = {(int(i), float(d), float(g)) for i, d, g in zip(front.root, front.distance, front.gain)}
    found = set()
    for i, d, g in zip(root.tolist(), rank.tolist(), gain.tolist()):
        nearer = gain[(root == i) & (rank < d)]
        best = g == max(gain[(root == i) & (rank == d)].tolist())
        if g > 0 and best and not (nearer >= g).any():
            found.add((i, float(d), g))
    assert kept == found and len(front.root) == len(kept)
    assert len(_front(Chords(*(v[:0] for v in (root, gain[:, None], gain, gain, root)))).root) == 0


@pytest.mark.parametrize(("activation", "loss"), [("gelu", "margin"), ("tanh", "cross_entropy")])
def test_a_box(activation: str, loss: str) -> None:
    """In a box: the slope at infinity is 0 and no distribution in it beats the bounds."""
    net = Shallow.random(1, 6, 3, activation, 5)
    y = torch.tensor([2, 0])
    inside = torch.linspace(0, 1, 20001, dtype=torch.float64)
    x = inside[[4000, 18000], None]
    found = certify(net.graph, x, y, INF, loss, (0.0, 1.0), time_limit=1.0)
    heights = [
        LIPSCHITZ[loss](net.graph.logits(inside[:, None]), torch.full((20001,), int(k))) for k in y
    ]
    hulls = [envelope((inside - p).abs(), h) for p, h in zip(x[:, 0], heights)]
    assert found.infinity is not None and found.infinity.upper == 0.0 and found.anchor is not None
    chord = max((h - hull[0][1]) / d for hull in hulls for d, h in hull[1:])
    assert chord <= found.anchor.upper * (1 + 1e-9) and found.anchor.upper <= chord * 1.01
    for eps in (0.01, 0.1, 1.0, 10.0):
        low, high = found.bounds(eps)
        truth = spend(hulls, eps)
        assert low <= truth + 1e-6 and truth <= high
        assert high - low < 0.2 * (truth - found.empirical) + 0.02 or eps > 0.1
    assert bool(found.witness(0.1).verify(net.graph.logits))


@pytest.mark.slow_cases(
    "gelu_tanh-1.0-cross_entropy", "silu-inf-cross_entropy", "softplus-2.0-cross_entropy"
)
@pytest.mark.parametrize(
    ("activation", "norm", "loss"),
    [
        ("gelu", 2.0, "margin"),
        ("gelu_tanh", 1.0, "cross_entropy"),
        ("silu", INF, "cross_entropy"),
        ("softplus", 2.0, "cross_entropy"),
        ("elu", 1.0, "margin"),
    ],
)
def test_the_witness_grows_at_the_recession_slope(activation: str, norm: float, loss: str) -> None:
    """Two hidden layers: the evaluated loss grows by l per unit between two large budgets, to
    1e-3, and so does the line.
    """
    nodes = [Node((), (3,), "input")]
    for place, (a, b) in enumerate(pairwise((3, 5, 4, 3))):
        weight = normal(b, a, seed=place + 7) / math.sqrt(a)
        bias = normal(b, seed=place)
        nodes.append(Node((len(nodes) - 1,), (b,), f"layer {place}", Affine(Matrix(weight), bias)))
        if place < 2:
            nodes.append(Node((len(nodes) - 1,), (b,), f"f {place}", Smooth(activation)))
    graph = Graph(tuple(nodes))
    y = torch.tensor([0, 1, 2])
    found = certify(
        graph, normal(3, 3), y, norm, loss, slopes=("infinity", "anchor"), time_limit=1.0
    )
    assert found.infinity is not None and found.infinity.lower == pytest.approx(
        found.infinity.upper, rel=1e-6
    )
    first = found.witness(1e3)
    last = found.witness(1e5)
    assert first.cost <= 1e3 and last.cost <= 1e5 and bool(last.verify(graph.logits))
    growth = (last.info["loss"] - first.info["loss"]) / (1e5 - 1e3)
    assert growth == pytest.approx(found.infinity.upper, rel=1e-3)
    low, high = found.bounds(1e5)
    assert found.infinity.upper > 0.1 and high - low < 1e-3 * high


class Normalised(nn.Module):
    """A LayerNorm of two inputs inside a residual block: very steep where its argument
    vanishes, and nowhere else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 4)
        self.norm = nn.LayerNorm(4)
        self.b = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        generator = torch.Generator().manual_seed(1)
        for p in self.double().parameters():
            p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.a(x)
        more = torch.relu(self.b(torch.relu(self.norm(tokens))))
        return self.head(tokens + more)


def test_chords_are_not_as_steep_as_the_steepest_place() -> None:
    model = Normalised()
    x = normal(3, 2)
    y = torch.tensor([0, 1, 2])
    found = certify(
        model, x, y, 2, "cross_entropy", slopes=("infinity", "anchor", "margin"), time_limit=1.0
    )
    assert found.anchor is not None and found.margin is not None
    assert found.anchor.method == "boxes" and found.anchor.upper < 0.05 * found.margin.upper
    for scale in (0.01, 0.3, 3.0, 100.0):
        steps = scale * normal(2000, 2, seed=7)
        clean = LIPSCHITZ["cross_entropy"](model(x), y)
        for point, k, start in zip(x, y.tolist(), clean.tolist()):
            gain = LIPSCHITZ["cross_entropy"](model(point + steps), torch.full((2000,), k)) - start
            assert (gain <= found.anchor.upper * vector_norm(steps, 2) + 1e-12).all()


# Transformers, refusals, the rest of the surface.


class Transformer(nn.Module):
    """Two tokens, one Pre-LN layer."""

    def __init__(self, norm: nn.Module, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)
        self.norm = norm
        self.layer = nn.TransformerEncoderLayer(
            4, 2, 6, 0.0, "gelu", batch_first=True, norm_first=True
        )
        generator = torch.Generator().manual_seed(seed)
        for p in self.double().parameters():
            p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator) / math.sqrt(
                p.shape[-1]
            )
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.layer(self.embed(x.reshape(-1, 2, 2)))
        return self.head(self.norm(tokens).mean(1))


def test_a_transformer_with_a_final_norm_is_bounded() -> None:
    model = Transformer(nn.LayerNorm(4))
    graph = read(model, (4,), smooth=True)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = certify(
        graph, x, torch.tensor([0, 1, 0]), 2, slopes=("infinity", "anchor"), time_limit=1.0
    )
    assert found.infinity is not None and found.infinity.upper == 0.0 and found.info["smooth"]
    assert found.line is not None and found.line[0] == 0.0 and found.bounds(1e9)[1] < INF
    far = 10.0 ** torch.linspace(-1, 4, 50)[:, None, None] * torch.randn(
        1, 40, 4, generator=torch.Generator().manual_seed(2)
    )
    height = LIPSCHITZ["cross_entropy"](
        graph.logits(far.flatten(0, 1)), torch.zeros(2000, dtype=torch.int64)
    )
    assert height.max() <= highest_loss(graph, [0], "cross_entropy", None)[0]
    assert bool(found.witness(1.0).verify(model)) and found.bounds(1.0)[0] > found.empirical


def test_a_transformer_without_one_grows_like_its_residual_stream() -> None:
    model = Transformer(nn.Identity())
    graph = read(model, (4,), smooth=True)
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = certify(
        graph, x, torch.tensor([0, 2]), 2, "margin", slopes=("infinity", "anchor"), time_limit=1.0
    )
    rows = (model.head.weight @ model.embed.weight / 2).detach().repeat(1, 2)
    slope = max(
        float(torch.linalg.vector_norm(rows[j] - rows[k])) for k in (0, 2) for j in range(3)
    )
    assert (
        found.infinity is not None
        and found.infinity.lower == pytest.approx(slope, rel=1e-9) == found.infinity.upper
    )
    assert (
        found.witness(1e5).info["loss"] - found.witness(1e4).info["loss"]
    ) / 9e4 == pytest.approx(slope, rel=1e-3)


def test_attention_without_a_normalisation_needs_a_domain() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(nn.Identity())
            self.attention = self.model.layer.self_attn
            self.head = self.model.head

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.reshape(-1, 2, 4)
            seen = self.attention(tokens, tokens, tokens, need_weights=False)[0]
            return self.head(seen.mean(1))

    graph = read(Bare(), (8,), smooth=True)
    x = torch.full((1, 8), 0.5).double()
    with pytest.raises(ws.InputError, match=r"not Lipschitz on R\^n: give a domain"):
        certify(graph, x, FIRST, 2)
    found = certify(graph, x, FIRST, 2, domain=(0.0, 1.0), slopes=("anchor",), time_limit=1.0)
    assert found.line is not None and found.bounds(1e9)[1] < INF


@pytest.mark.slow
def test_real_networks(zoo: ModuleType) -> None:
    """A sigmoid CNN is bounded on R^n; attention without a LayerNorm has bounds on boxes only."""
    model, data = zoo.load("cifar_conv_small_sigmoid")
    x, y = zoo.images(data, 4)
    found = certify(model, x, y, "inf", slopes=("infinity",))
    assert found.infinity is not None and found.infinity.upper == 0.0 and found.bounds(1e6)[1] < 40
    assert found.bounds(0.01)[0] > found.empirical and bool(found.witness(0.01).verify(model))
    transformer = load_onnx(zoo.HERE / "models" / "cifar_vit_pgd_2_3_16.onnx")
    with pytest.raises(ws.InputError, match=r"not Lipschitz on R\^n: give a domain"):
        certify(transformer, x, y, "inf", slopes=("infinity",))
    found = certify(transformer, x, y, "inf", domain=(0.0, 1.0), slopes=("infinity",))
    assert found.empirical < found.bounds(0.01)[0] < found.bounds(0.01)[1] < INF


def test_worst_case_says_what_it_is_for() -> None:
    with pytest.raises(ws.InputError, match=r"cells of a ReLU network.*ws.loss_curve"):
        ws.worst_case(unit("gelu"), ORIGIN, FIRST, ws.Threat(2, 1, 0.5, None))


@pytest.mark.parametrize("activation", ["silu", "tanh"])
def test_loss_curves_of_smooth_networks(activation: str) -> None:
    """On R^n too, from the Lipschitz constant and, for bounded networks, from the highest loss
    there is.
    """
    curve = ws.loss_curve(
        unit(activation), ORIGIN, FIRST, 2, 1, "cross_entropy", None, time_limit=1.0
    )
    for eps in (0.1, 1.0, 30.0):
        truth = worst_of_unit(activation, "cross_entropy", eps)
        low, high = curve(eps)
        assert low <= truth + 1e-6 and truth <= high + 1e-9
    assert (curve(1e4)[1] < 1.32) == (activation == "tanh")


def test_saves_and_loads(tmp_path: object) -> None:
    found = certify(unit("silu"), ORIGIN, FIRST, 2, "margin", time_limit=1.0)
    found.save(f"{tmp_path}/certificate.safetensors")
    again = Certificate.load(f"{tmp_path}/certificate.safetensors")
    assert again.bounds(0.7) == found.bounds(0.7) and again.info["smooth"]
