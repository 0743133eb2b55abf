import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn
from torch.nn import functional as F

from support import values
from support.graphs import MAKE, crowd, layers, mlp
from support.networks import Net, prelu, seeded
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Matrix, Pick, Sum
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.operators.pooling import Average
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.lipschitz.steepest import jacobians
from wassail.certificates.relax import crown as crown_module
from wassail.certificates.relax import rows as rows_module
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margin_bounds, margins
from wassail.certificates.relax.lines import Arithmetic, Shape
from wassail.certificates.relax.rows import Span, Turned, chunks_of
from wassail.geometry import project, steepest
from wassail.threat import Domain, dual

INF = math.inf
NORMS = [1.0, 2.0, INF]
BOX: Domain = (0.0, 1.0)
DOMAINS: list[Domain] = [BOX, None]
CASES = [(1.0, BOX), (2.0, BOX), (2.0, None), (INF, BOX), (INF, None)]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """CROWN's own slopes for the margins too: closed forms and other implementations know no
    other.
    """
    monkeypatch.setattr(crown_module, "POLISH", 0)


def branches() -> nn.Module:
    """Two branches side by side, so that an activation of one comes before a layer of the
    other; one node has four users.
    """

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        k = m.c(m.b(x).relu()).relu()
        return m.d(torch.cat([h + h, k, h.abs(), torch.cat([k, k], 1)], 1))

    return Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 5), c=nn.Linear(5, 4), d=nn.Linear(20, 3))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), groups=2),
        nn.PReLU(4),
        nn.Conv2d(4, 4, 2, dilation=(1, 2)),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2, 1),
        nn.Conv2d(4, 3, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3, 3),
    )


def smooth(act: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), act(), nn.Linear(7, 6), act(), nn.Linear(6, 3))


def smooth_conv() -> nn.Module:
    parts = (
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(3, 4, 2),
        nn.GELU("tanh"),
        nn.Flatten(),
    )
    return nn.Sequential(
        *parts, nn.Linear(16, 3), nn.Sigmoid(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)
    )


def expanded() -> nn.Module:
    return Net(
        lambda m, x: m.b(
            (m.a(x).relu().expand(-1, 3, 4) + m.c(x.flatten(1)).unflatten(1, (3, 4)))
            .relu()
            .flatten(1)
        ),
        a=nn.Linear(4, 4),
        b=nn.Linear(12, 3),
        c=nn.Linear(4, 12),
    )


NETS: dict[str, Callable[[], Graph]] = {
    **MAKE,
    "branches": lambda: read(seeded(branches(), 6), (4,)),
    "grouped": lambda: read(prelu(grouped()), (2, 5, 5)),
    "tokens": lambda: read(
        seeded(
            nn.Sequential(
                nn.Linear(3, 4),
                nn.ReLU(),
                nn.Linear(4, 2),
                nn.LeakyReLU(0.3),
                nn.Flatten(),
                nn.Linear(10, 3),
            ),
            7,
        ),
        (5, 3),
    ),
    "expanded": lambda: read(seeded(expanded(), 8), (1, 4)),
    "two maps in a row": lambda: read(
        seeded(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), 15),
        (4,),
    ),
    "relu at the input and the end": lambda: read(
        seeded(
            Net(
                lambda m, x: m.b(m.a((x - 0.5).abs()).relu()).relu(),
                a=nn.Linear(4, 6),
                b=nn.Linear(6, 3),
            ),
            9,
        ),
        (4,),
    ),
}
SMOOTH: dict[str, Callable[[], Graph]] = {
    "sigmoid": lambda: read(seeded(smooth(nn.Sigmoid), 10), (4,), smooth=True),
    "tanh": lambda: read(seeded(smooth(nn.Tanh), 11), (4,), smooth=True),
    "gelu": lambda: read(seeded(smooth(nn.GELU), 12), (4,), smooth=True),
    "silu": lambda: read(seeded(smooth(nn.SiLU), 13), (4,), smooth=True),
    "smooth convolutions": lambda: read(seeded(smooth_conv(), 14), (1, 5, 5), smooth=True),
}
ALL = {**NETS, **SMOOTH}


@cache
def network(name: str) -> Graph:
    return ALL[name]()


def samples(graph: Graph, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of the unit box, some of their entries on its walls, the classes predicted, and
    radii of many sizes.
    """
    g = torch.Generator().manual_seed(100 + seed)
    x = torch.rand(count, *graph.nodes[0].shape, dtype=torch.float64, generator=g)
    x = torch.where(torch.rand(x.shape, generator=g) < 0.2, x.round(), x)
    radius = 0.4 * torch.rand(count, dtype=torch.float64, generator=g) ** 2
    return x, graph.logits(x).argmax(1), radius


def inside(
    x: Tensor, radius: float, norm: float, domain: Domain, shape: tuple[int, ...], count: int = 200
) -> Tensor:
    """Points of one ball cut by the box, its corners among them, a hair inside so that their
    own rounding cannot matter.
    """
    region = Region.make(Ball(x.flatten(), radius, norm, domain), x.numel())
    points = x.flatten() + (1 - 1e-9) * (crowd(region, count) - x.flatten())
    return torch.cat([x.flatten()[None], points]).reshape(-1, *shape)


def holds(sweep: Sweep, i: int, points: Tensor) -> None:
    """Every node's deviation at points of ball i lies in its span."""
    for k, v in enumerate(sweep.graph.values(points)):
        d, (low, high) = v - sweep.centre[k][i], sweep.spans[k]
        assert (d >= low[i]).all() and (d <= high[i]).all(), f"node {k} leaves its span"


def gaps(graph: Graph, points: Tensor, y: int) -> Tensor:
    """The least margins over the rivals at many points, `(K,)`."""
    z = graph.logits(points)
    return (z[:, y, None] - z).amin(0)


# Balls.


def longest(
    a: np.ndarray, below: np.ndarray, above: np.ndarray, radius: float, norm: float
) -> float:
    """`max <a, d>` over the ball cut by the box, by a program of its own: a feasible point, so
    from below.
    """
    n = len(a)
    if norm == INF:
        return float(
            np.where(a > 0, a * np.minimum(above, radius), -a * np.minimum(below, radius)).sum()
        )
    if radius == 0:
        return 0.0
    if norm == 1:  # in units of the radius
        room = np.minimum(np.concatenate([above, below]) / radius, 1.0)
        answer = linprog(
            -np.concatenate([a, -a]),
            A_ub=np.ones((1, 2 * n)),
            b_ub=[1.0],
            bounds=[(0, v) for v in room],
        )
        return float(-answer.fun) * radius
    low = 0.0
    high = 1e6
    for _ in range(200):  # d = clip(t a) with the t that fills the ball
        t = (low + high) / 2
        low, high = (
            (t, high) if np.linalg.norm(np.clip(t * a, -below, above)) <= radius else (low, t)
        )
    return float(a @ np.clip(low * a, -below, above))


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_support_function_of_a_ball_cut_by_a_box(norm: float, domain: Domain) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(6, 9, dtype=torch.float64, generator=g)
    x = torch.where(torch.rand(x.shape, generator=g) < 0.4, x.round(), x)
    radius = torch.tensor([0.0, 1e-9, 0.1, 0.7, 3.0, 20.0], dtype=torch.float64)
    balls = Balls.make(x, radius, norm, domain)
    a = torch.randn(24, 9, dtype=torch.float64, generator=g)
    a[torch.rand(a.shape, generator=g) < 0.2] = 0.0
    a[7] = 0.0
    owner = torch.arange(24) % 6
    middle, spread = balls.across(a.float(), owner)  # as screening does
    a = a.float().double()
    upper = balls.upper(a, owner)
    for k, i in enumerate(owner.tolist()):
        low, high = domain if domain is not None else (-INF, INF)
        best = longest(
            a[k].numpy(), (x[i] - low).numpy(), (high - x[i]).numpy(), float(radius[i]), norm
        )
        assert best * (1 - 1e-9) <= upper[k] <= best * (1 + 1e-9) + 1e-300
        worst = longest(
            -a[k].numpy(), (x[i] - low).numpy(), (high - x[i]).numpy(), float(radius[i]), norm
        )
        assert middle[k] + spread[k] >= best * (1 - 1e-9) and middle[k] - spread[k] <= -worst * (
            1 - 1e-9
        )
        for sign, side in ((1, middle[k] + spread[k]), (-1, spread[k] - middle[k])):
            # A wall that the sample touches counts; the box as a whole does for r = inf.
            open_ = torch.where(sign * a[k] > 0, x[i] < high, x[i] > low)
            ball = float(radius[i] * torch.linalg.vector_norm(a[k] * open_, dual(norm)))
            assert (
                side <= (ball if norm < INF else (best if sign > 0 else worst)) * (1 + 1e-5) + 1e-18
            )
        if domain is None:
            assert upper[k] >= radius[i] * torch.linalg.vector_norm(a[k], dual(norm))
    # Rows of one sample take a path of their own, and single precision is widened.
    assert torch.allclose(balls.upper(a[::6], owner[::6]), upper[::6], rtol=1e-14, atol=0)
    assert torch.allclose(balls.upper(a.float(), owner), upper, rtol=1e-6, atol=1e-12)
    order = torch.randperm(9, generator=g)
    assert torch.allclose(
        balls.reordered(order).upper(a[:, order], owner), upper, rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("norm", NORMS)
def test_every_point_of_a_ball_lies_below_its_support_function(norm: float) -> None:
    g = torch.Generator().manual_seed(1)
    n = 200  # budgets reach far down the list of the steepest entries
    x = torch.rand(3, n, dtype=torch.float64, generator=g)
    x = torch.where(torch.rand(x.shape, generator=g) < 0.9, x.round(), x)
    radius = torch.tensor([0.5, 4.0, 60.0], dtype=torch.float64)
    balls = Balls.make(x, radius, norm, BOX)
    a = torch.randn(30, n, dtype=torch.float64, generator=g)
    owner = torch.arange(30) % 3
    best = (a * steepest(x[owner], a, norm, radius[owner], BOX)).sum(1)  # the exact step, evaluated
    upper = balls.upper(a, owner)
    assert (upper >= best * (1 - 1e-15)).all() and torch.allclose(upper, best, rtol=1e-10)
    low, high = balls.box
    assert (low <= 0).all() and (high >= 0).all()
    assert torch.allclose(high, torch.minimum(1 - x, radius[:, None]), atol=1e-15)
    assert torch.allclose(-low, torch.minimum(x, radius[:, None]), atol=1e-15)


def test_entries_of_every_scale_do_not_overflow_the_support_function() -> None:
    x = torch.full((1, 3), 0.5, dtype=torch.float64)
    for scale in (1e-120, 1e-30, 1.0, 1e30, 1e120):
        a = scale * torch.tensor([[3.0, -4.0, 0.0]], dtype=torch.float64)
        for norm, size in ((1.0, 4.0), (2.0, 5.0), (INF, 7.0)):
            ball = Balls.make(x, torch.tensor([0.25]), norm, None)
            assert float(ball.upper(a, torch.zeros(1).long())) == pytest.approx(
                0.25 * size * scale, rel=1e-12
            )


# Closed forms.

AFFINE: dict[tuple[int, ...], Callable[[], nn.Module]] = {
    (12,): lambda: nn.Linear(12, 4),
    (3, 2, 2): lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4)),
    (2, 4, 3): lambda: nn.Sequential(
        nn.Conv2d(2, 3, 2, padding=1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    ),
}


@cache
def affine(shape: tuple[int, ...]) -> Graph:
    return read(seeded(AFFINE[shape](), 3), shape)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("norm", NORMS)
def test_margins_of_linear_networks_are_exact(norm: float, domain: Domain) -> None:
    for shape in AFFINE:
        graph = affine(shape)
        x, y, radius = samples(graph, 7, 1)
        jacobian = jacobians(graph, x[:1].flatten(1))[0]
        found = margin_bounds(graph, x, y, radius, norm, domain)
        z = graph.logits(x)
        for j in range(4):
            w = jacobian[j] - jacobian[y]
            step = steepest(x.flatten(1), w, norm, radius, domain)
            exact = z.gather(1, y[:, None])[:, 0] - z[:, j] - (w * step).sum(1)
            assert (found[:, j] <= exact + 1e-15).all() and torch.allclose(
                found[:, j], exact, rtol=0, atol=1e-12
            )
        assert (found.gather(1, y[:, None]) == 0).all()


@pytest.mark.parametrize("slope", [0.0, 0.25])
@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 3.0), (-3.0, 1.0), (-3.0, -1.0), (1.0, 3.0), (-2.0, 2.0)]
)
def test_one_neuron_in_closed_form(low: float, high: float, slope: float) -> None:
    # theta = (relu x, t x): the margin relu x - t x is bounded by the lower line, its negative by
    # the chord
    t = 0.5
    plain = layers([[1.0], [1.0]], [[1.0, 0.0], [0.0, t]])
    slopes = torch.tensor([slope, 1.0], dtype=torch.float64)  # the second neuron is the identity
    graph = Graph(
        tuple(
            replace(node, op=Relu(slopes)) if isinstance(node.op, Relu) else node
            for node in plain.nodes
        )
    )
    x = torch.full((2, 1), (low + high) / 2, dtype=torch.float64)
    r = (high - low) / 2
    found = margin_bounds(graph, x, torch.tensor([0, 1]), r, INF, None)

    def f(v: float) -> float:
        return v if v > 0 else slope * v

    line = slope if high <= 0 or (low < 0 and high <= -low) else 1.0
    below = min((line - t) * v for v in (low, high))
    above = min(t * v - f(v) for v in (low, high))  # the chord meets the function at both ends
    assert float(found[0, 1]) == pytest.approx(below, abs=1e-12) and float(
        found[1, 0]
    ) == pytest.approx(above, abs=1e-12)
    assert found[0, 1] <= below and found[1, 0] <= above


def test_slopes_are_optimised_to_the_known_optimum() -> None:
    # relu(x) + relu(-x) - 1/2 >= -1/2 on [-1, 3]; CROWN takes slope 1 for the one and 0 for the
    # other: x - 1/2 >= -3/2.
    graph = layers([[1.0], [-1.0]], [[1.0, 1.0], [0.0, 0.0]], bias=[[0.0, 0.0], [-0.5, 0.0]])
    x = torch.ones(1, 1, dtype=torch.float64)
    y = torch.tensor([0])
    assert float(margin_bounds(graph, x, y, 2.0, INF, None)[0, 1]) == pytest.approx(-1.5, abs=1e-9)
    best = float(margin_bounds(graph, x, y, 2.0, INF, None, steps=30)[0, 1])
    assert -0.55 < best <= -0.5  # any slopes a and a - 1 give -1/2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["relu", "leaky", *ACTIVATIONS])
def test_the_lines_of_a_neuron_hold_and_touch(kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(13)
    c = 2 * torch.randn(1, 300, dtype=torch.float64, generator=g)
    low = -2 * torch.rand(c.shape, dtype=torch.float64, generator=g) ** 4
    high = 2 * torch.rand(c.shape, dtype=torch.float64, generator=g) ** 4
    slope = {
        "relu": torch.tensor(0.0).double(),
        "leaky": torch.rand(300, dtype=torch.float64, generator=g),
    }.get(kind)
    node = Node((0,), (300,), "", Smooth(kind) if slope is None else Relu(slope))
    shape = Shape(node, c, low, high)
    up, down = shape.slopes()
    arithmetic = Arithmetic(network("mlp"), dtype)
    v = torch.cat(
        [
            low,
            high,
            (-c).clamp(low, high),
            low + (high - low) * torch.linspace(0, 1, 201).double()[:, None],
        ]
    )
    here, (least, most) = shape.output()
    rise = Graph((Node((), (300,), ""), node)).logits(c + v) - here
    assert (rise >= least).all() and (rise <= most).all()
    # CROWN's slopes, parallel ones, and a slope that nobody would choose.
    for above, below in ((up, down), (up, up), (up, torch.full_like(down, 0.3))):
        line = shape.lines(above, below, torch.zeros_like(c), arithmetic)
        mid, rad, off, far = (part.double() for part in (line.mid, line.rad, line.off, line.far))
        over = (mid + rad) * v + off + far - rise
        under = rise - ((mid - rad) * v + off - far)
        assert (over >= -1e-15).all() and (under >= -1e-15).all()
        loose = 1e-12 if dtype == torch.float64 else 1e-3 * far + 1e-6  # rounding, of 300 terms
        for gap in (over, under):
            assert (gap.amin(0) <= loose + 1e-3 * (high - low).square()).all(), (
                "the line does not touch"
            )


# Soundness.


@pytest.mark.few(22)
@pytest.mark.parametrize(("norm", "domain"), CASES)
@pytest.mark.parametrize("name", ALL)
def test_every_value_lies_in_its_span_and_every_margin_above_its_bound(
    name: str, norm: float, domain: Domain
) -> None:
    graph = network(name)
    x, y, radius = samples(graph, 2)
    sweep = Sweep(graph, Balls.make(x, radius, norm, domain)).run()
    lower, base, a = margins(sweep, y)
    assert lower.shape == (2, graph.outputs) and lower.dtype == torch.float64
    for i in range(2):
        points = inside(x[i], float(radius[i]), norm, domain, graph.nodes[0].shape)
        holds(sweep, i, points)
        least = gaps(graph, points, int(y[i]))
        assert (lower[i] <= least + 1e-12).all()
        # The line that the bound comes from, in the order in which the sweep lays coordinates out.
        shape = graph.nodes[0].shape
        order = torch.arange(graph.inputs).reshape(shape)
        order = (order.permute(1, 2, 0) if len(shape) == 3 else order).flatten()
        d = (points - x[i]).flatten(1)[:, order]
        z = graph.logits(points)
        assert (z[:, y[i], None] - z >= base[i] + d @ a[i].T - 1e-12).all()


@pytest.mark.few(6)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "name",
    ["mlp", "leaky", "branches", "grouped", "pools", "clamps", "tokens", "smooth convolutions"],
)
def test_optimised_slopes_stay_sound(name: str, norm: float) -> None:
    graph = network(name)
    x, y, radius = samples(graph, 2, 5)
    sweep = Sweep(graph, Balls.make(x, radius, norm, BOX), steps=6).run()
    lower = margins(sweep, y)[0]
    for i in range(2):
        points = inside(x[i], float(radius[i]), norm, BOX, graph.nodes[0].shape)
        holds(sweep, i, points)
        assert (lower[i] <= gaps(graph, points, int(y[i])) + 1e-12).all()


def test_optimised_slopes_are_not_looser_and_often_tighter() -> None:
    better = 0
    for seed in range(4):
        graph = mlp([5, 12, 12, 12, 3], 40 + seed, slope=0.1 * (seed % 2))
        x, y, radius = samples(graph, 4, seed)
        for norm in NORMS:
            plain, best = (
                margin_bounds(graph, x, y, radius, norm, BOX, steps) for steps in (0, 10)
            )
            assert (best >= plain - 1e-9).all()
            better += int((best > plain + 1e-4).sum())
    assert better > 25


def attacked(
    graph: Graph, x: Tensor, y: Tensor, rival: int, radius: Tensor, norm: float, domain: Domain
) -> Tensor:
    """The least margin against a rival that descent finds in the ball, `(N,)`."""
    g = torch.Generator().manual_seed(0)
    start = torch.randn(x.shape, dtype=torch.float64, generator=g)
    best = torch.full((len(x),), INF, dtype=torch.float64)
    point = project(x + radius.reshape(-1, *[1] * (x.ndim - 1)) * start, x, norm, radius, domain)
    for k in range(25):
        with torch.enable_grad():
            point = point.detach().requires_grad_(True)
            z = graph.logits(point)
            value = z.gather(1, y[:, None])[:, 0] - z[:, rival]
            (slope,) = torch.autograd.grad(value.sum(), point)
        best = torch.minimum(best, value.detach())
        point = project(
            point.detach() + steepest(x, -slope, norm, radius * (1 - k / 25), domain),
            x,
            norm,
            radius,
            domain,
        )
    return best


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "gelu", "silu", "smooth convolutions", "mlp"])
def test_descent_does_not_get_below_the_bounds(name: str) -> None:
    graph = network(name)
    x, y, _ = samples(graph, 4, 9)
    for norm in NORMS:
        near = torch.full((4,), 1e-3, dtype=torch.float64)
        for radius in (near, 200 * near):
            lower = margin_bounds(graph, x, y, radius, norm, BOX)
            for j in range(graph.outputs):
                found = attacked(graph, x, y, j, radius, norm, BOX)
                assert (lower[:, j] <= found + 1e-12).all()
                # On a small ball without a kink the bound is nearly reached.
                assert radius is not near or name == "mlp" or (lower[:, j] >= found - 3e-4).all()


# Against the implementation for one region.


def nothing(
    self: Sweep, j: int, owner: Tensor, place: Tensor
) -> Generator[Tensor, Tensor | None, Span]:
    """Screening that decides nothing."""
    none = torch.full((len(place),), INF, dtype=torch.float64)
    yield from ()
    return -none, none


@pytest.mark.few(10)
@pytest.mark.parametrize(("norm", "domain"), CASES[1:4])
@pytest.mark.parametrize("name", NETS)
def test_as_tight_as_the_bounds_of_a_single_region(
    name: str, norm: float, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(name)
    x, y, radius = samples(graph, 2, 2)
    found = margin_bounds(graph, x, y, radius, norm, domain)
    monkeypatch.setattr(Sweep, "_screen", nothing)
    plain = margin_bounds(graph, x, y, radius, norm, domain)
    eye = torch.eye(graph.outputs, dtype=torch.float64)
    for i in range(2):
        bounds = values.crown(
            graph, Region.make(Ball(x[i].flatten(), float(radius[i]), norm, domain), graph.inputs)
        )
        reference = -values.linear_upper(bounds, len(graph.nodes) - 1, eye - eye[y[i]])
        assert (plain[i] >= reference - 1e-9).all()
        if norm == INF:  # the same intervals, the same rows, the same slopes
            assert (plain[i] <= reference + 1e-8).all()
        # Screening tightens spans, and tighter spans may make CROWN choose a worse slope: in a
        # chain of nine maxima they do.
        assert name == "pools" or (found[i] >= reference - 1e-9).all()


# What the bounds must not depend on.


@pytest.mark.few(3)
@pytest.mark.slow_cases("pools-0")
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("mlp", 0),
        ("convolutions", 0),
        ("branches", 0),
        ("pools", 0),
        ("grouped", 0),
        ("silu", 0),
        ("leaky", 3),
        ("branches", 3),
    ],
)
def test_a_batch_is_as_good_as_its_samples_alone(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(name)
    x, y, radius = samples(graph, 5, 3)
    for norm in NORMS:
        off = 1e-9 if not steps else 1e-5  # the ascent is in single precision
        whole = margin_bounds(graph, x, y, radius, norm, BOX, steps)
        alone = torch.cat(
            [margin_bounds(graph, x[[i]], y[[i]], radius[i], norm, BOX, steps) for i in range(5)]
        )
        assert torch.allclose(whole, alone, rtol=off, atol=off)
        order = torch.tensor([3, 0, 4, 1, 2])
        mixed = margin_bounds(graph, x[order], y[order], radius[order], norm, BOX, steps)
        assert torch.allclose(mixed, whole[order], rtol=off, atol=off)
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "CHUNK", 1024)
            patch.setattr(rows_module, "ALONE", 2)
            cut = margin_bounds(graph, x, y, radius, norm, BOX, steps)
        assert torch.allclose(cut, whole, rtol=off, atol=off)


def test_chunks_are_every_wanted_entry_once() -> None:
    g = torch.Generator().manual_seed(4)
    for share, most in itertools.product((0.0, 0.02, 0.3, 1.0), (0, 1, 7, 50, 10**6)):
        wanted = torch.rand(9, 60, generator=g) < share
        wanted[4] = True
        parts = list(chunks_of(wanted, most))
        rows = [torch.stack([owner.expand(len(place)), place], 1) for owner, place in parts]
        assert torch.equal(torch.cat(rows), wanted.nonzero())
        for owner, place in parts:
            assert len(owner) == 1 or len(owner) == len(place) <= most
            assert len(place) <= max(most, 1) or len(owner) == 1


@pytest.mark.few(4)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "convolutions", "branches", "pools", "silu"])
def test_spans_known_from_a_larger_ball_are_used_and_stay_sound(name: str, norm: float) -> None:
    graph = network(name)
    x, y, radius = samples(graph, 3, 4)
    wide = Sweep(graph, Balls.make(x, 1.3 * radius, norm, BOX), steps=3).run()
    known = wide.proved()
    sweep = Sweep(graph, Balls.make(x, radius, norm, BOX), known=known).run()
    lower = margins(sweep, y)[0]
    assert set(known) == {
        node.inputs[0] for node in graph.nodes if node.map is None and node.inputs
    }
    for j in set(known) - {0}:
        low, high = (sweep.centre[j] + side for side in sweep.spans[j])
        assert (low >= known[j][0] - 1e-12).all() and (high <= known[j][1] + 1e-12).all()
    for i in range(3):
        points = inside(x[i], float(radius[i]), norm, BOX, graph.nodes[0].shape)
        holds(sweep, i, points)
        assert (lower[i] <= gaps(graph, points, int(y[i])) + 1e-12).all()


# Rounding.


def exactly(graph: Graph, x: Tensor) -> list[np.ndarray]:
    """Every node at one sample in extended precision."""
    found: list[np.ndarray] = []
    for node in graph.nodes:
        if not node.inputs:
            found.append(x.numpy().astype(np.longdouble))
        elif node.slope is not None:
            v = found[node.inputs[0]]
            found.append(np.where(v > 0, v, np.longdouble(float(node.slope)) * v))
        elif isinstance(node.map, Sum):
            found.append(found[node.inputs[0]] + found[node.inputs[1]])
        else:
            assert isinstance(node.map, Matrix) and node.bias is not None
            found.append(
                node.map.weight.numpy().astype(np.longdouble) @ found[node.inputs[0]]
                + node.bias.numpy()
            )
    return found


@pytest.mark.parametrize("radius", [0.0, 1e-16, 1e-13])
def test_spans_hold_for_the_exact_values_and_not_only_for_the_computed_ones(radius: float) -> None:
    if np.finfo(np.longdouble).eps > 2.0**-60:
        pytest.skip("no extended precision on this machine")
    off = 0.0
    for seed, norm in itertools.product(range(3), NORMS):
        graph = mlp([30, 40, 40, 3], seed, slope=0.1)
        x = 100 * torch.randn(
            2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        sweep = Sweep(graph, Balls.make(x, torch.full((2,), radius), norm, None)).run()
        y = graph.logits(x).argmax(1)
        lower = margins(sweep, y)[0]
        for i in range(2):
            step = torch.zeros(30, dtype=torch.float64)
            step[3] = radius
            for point in (x[i], x[i] + 0.5 * step):
                values = exactly(graph, point)
                for k, v in enumerate(values):
                    d = (v - sweep.centre[k][i].numpy().astype(np.longdouble)).astype(np.float64)
                    off = max(off, float(abs(d).max())) if k else off
                    assert (d >= sweep.spans[k][0][i].numpy()).all() and (
                        d <= sweep.spans[k][1][i].numpy()
                    ).all()
                exact = (values[-1][int(y[i])] - values[-1]).astype(np.float64)
                assert (lower[i].numpy() <= exact).all() and (
                    lower[i].numpy() >= exact - 1e-9
                ).all()
    assert off > 0  # there is something to see


@pytest.mark.parametrize("summed", [False, True])
def test_what_cancels_is_charged_for_its_rounding(summed: bool) -> None:
    if np.finfo(np.longdouble).eps > 2.0**-60:
        pytest.skip("no extended precision on this machine")
    above = 0
    for seed in range(8):
        g = torch.Generator().manual_seed(60 + seed)
        big, small = (torch.randn(3, 20, dtype=torch.float64, generator=g) for _ in range(2))
        first = Matrix(
            torch.cat([1e6 * big, small - 1e6 * big], 1)
        )  # of a sample whose halves are the same
        nodes = [
            Node((), (40,), ""),
            Node((0,), (3,), "", Affine(first, torch.zeros(3, dtype=torch.float64))),
        ]
        if summed:
            nodes.append(
                replace(
                    nodes[1],
                    op=Affine(Matrix(torch.ones(3, 40, dtype=torch.float64)), nodes[1].bias),
                )
            )
            nodes.append(Node((1, 2), (3,), "", Affine(Sum(2))))
        graph = Graph(tuple(nodes))
        x = torch.rand(1, 20, dtype=torch.float64, generator=g).repeat(1, 2)
        exact = exactly(graph, x[0])[-1]
        y = torch.tensor([int(exact.argmax())])
        lower = margin_bounds(graph, x, y, 0.0, INF, None)[0].numpy()
        want = (exact[int(y)] - exact).astype(np.float64)
        assert (lower <= want).all() and (lower >= want - 1e-5).all()
        z = graph.logits(x)[0].numpy()
        above += int((z[int(y)] - z > want + 1e-12).sum())
    assert above > 0  # the margins as computed are above the real ones, the bounds are not


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor, Tensor, Span]]:
    """Records what screening says."""
    seen: list[tuple[int, Tensor, Tensor, Span]] = []
    screen = Sweep._screen

    def spy(
        self: Sweep, j: int, owner: Tensor, place: Tensor
    ) -> Generator[Tensor, Tensor | None, Span]:
        found = yield from screen(self, j, owner, place)
        seen.append((j, owner.expand_as(place), place, (found[0].clone(), found[1].clone())))
        return found

    monkeypatch.setattr(Sweep, "_screen", spy)
    return seen


@pytest.mark.few(6)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "name", ["mlp", "deep", "blocks", "branches", "grouped", "pools", "clamps", "expanded"]
)
def test_screening_in_single_precision_is_sound(
    name: str, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(name)
    seen = watched(monkeypatch)
    x, _, radius = samples(graph, 3, 6)
    radius = radius + 0.3
    checked = 0
    for scale in (1.0, 0.1):
        seen.clear()
        sweep = Sweep(graph, Balls.make(x, scale * radius, norm, BOX)).run()
        for i in range(3):
            values = graph.values(
                inside(x[i], float(scale * radius[i]), norm, BOX, graph.nodes[0].shape)
            )
            for j, owner, place, (bottom, top) in seen:
                mine = owner == i
                d = (values[j] - sweep.centre[j][i]).flatten(1)[:, place[mine]]
                assert (d >= bottom[mine]).all() and (d <= top[mine]).all()
                checked += int(mine.sum())
    assert checked > 0


@pytest.mark.parametrize("norm", NORMS)
def test_screening_is_sound_where_single_precision_is_all_that_counts(
    norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An affine function seen through neurons that are always on is reached at a corner, so that
    # nothing hides rounding.
    g = torch.Generator().manual_seed(5)
    n = 60
    seen = watched(monkeypatch)
    first = torch.randn(n, n, dtype=torch.float64, generator=g)
    second = torch.randn(8, n, dtype=torch.float64, generator=g)
    weights = [
        first.tolist(),
        torch.eye(n).tolist(),
        second.tolist(),
        torch.randn(2, 8, generator=g).tolist(),
    ]
    high = [[0.0] * n, [0.0] * n, [0.0] * 8, [0.0] * 2]
    high[0] = [1e4] * n
    high[2] = (-1e4 * second.sum(1)).tolist()
    graph = layers(*weights, bias=high)
    x = torch.full((1, n), 0.5, dtype=torch.float64)
    sweep = Sweep(graph, Balls.make(x, torch.tensor([0.3]), norm, None)).run()
    rows = second @ first
    exact = 0.3 * torch.linalg.vector_norm(rows, dual(norm), dim=1)
    # The neurons of the third layer stand near 0: where they do, both ends are known.
    (where,) = (found for found in seen if found[0] == 5)
    bottom, top = where[3]
    want = exact[where[2]]
    shift = sweep.centre[5][0, where[2]] - (rows @ x[0])[where[2]]
    assert shift.abs().max() < 1e-6
    assert (top >= want - 1e-9).all() and (bottom <= -want + 1e-9).all()
    assert torch.allclose(top, want, rtol=1e-3) and torch.allclose(bottom, -want, rtol=1e-3)


@pytest.mark.parametrize("name", ["mlp", "deep", "leaky", "blocks", "branches", "clamps", "tokens"])
def test_screening_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(name)
    x, y, radius = samples(graph, 4, 7)
    for norm in NORMS:
        with_it = margin_bounds(graph, x, y, radius, norm, BOX)
        with monkeypatch.context() as patch:
            patch.setattr(Sweep, "_screen", nothing)
            without = margin_bounds(graph, x, y, radius, norm, BOX)
        assert torch.allclose(with_it, without, rtol=1e-3, atol=1e-3)


def test_screening_leaves_less_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp([8, 40, 40, 40, 3], 3)
    x, y, _ = samples(graph, 4, 8)
    counted: dict[bool, int] = {}
    sides = Sweep._sides
    for screened in (True, False):
        rows = 0

        def count(
            self: Sweep, j: int, owner: Tensor, place: Tensor, coarse: bool
        ) -> tuple[Tensor, Tensor]:
            nonlocal rows
            rows += len(place)
            return sides(self, j, owner, place, coarse)

        with monkeypatch.context() as patch:
            patch.setattr(Sweep, "_sides", count)
            if not screened:
                patch.setattr(Sweep, "_screen", nothing)
            margin_bounds(graph, x, y, 0.05, INF, BOX)
        counted[screened] = rows
    assert counted[True] < 0.8 * counted[False]


# Transposes.

GEOMETRIES = [
    dict(zip(("kernel", "stride", "padding", "dilation", "groups", "image"), values))
    for values in [
        ((3, 3), (1, 1), (1, 1), (1, 1), 1, (7, 7)),
        ((3, 2), (1, 1), (2, 0), (1, 1), 1, (6, 5)),
        ((2, 2), (1, 1), (0, 1), (2, 1), 1, (6, 7)),
        ((2, 3), (1, 1), (3, 4), (1, 1), 1, (5, 5)),  # padded beyond the kernel
        ((1, 1), (1, 1), (1, 0), (1, 1), 1, (4, 5)),
        ((1, 1), (2, 3), (0, 0), (1, 1), 1, (6, 5)),
        ((3, 3), (2, 2), (1, 1), (1, 1), 1, (8, 8)),  # the last row is not seen
        ((4, 4), (2, 2), (1, 1), (1, 1), 1, (8, 7)),
        ((3, 2), (3, 2), (1, 1), (2, 1), 1, (9, 8)),
        ((3, 3), (1, 1), (1, 1), (1, 1), 2, (5, 5)),
        ((3, 3), (2, 1), (0, 2), (1, 2), 4, (8, 9)),
        ((5, 5), (1, 1), (2, 2), (1, 1), 1, (5, 5)),
        ((2, 3), (2, 3), (0, 0), (1, 1), 1, (6, 6)),  # patches
        ((4, 2), (4, 2), (0, 0), (1, 1), 1, (9, 5)),  # patches that leave a rim
    ]
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", GEOMETRIES)
def test_turned_convolutions_are_the_transposes(
    case: dict[str, tuple[int, int]], dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(8)
    groups = int(case["groups"])  # type: ignore[call-overload]
    weight = torch.randn(8, 4 // groups, *case["kernel"], dtype=torch.float64, generator=g)
    conv = Conv(
        weight, (4, *case["image"]), case["stride"], case["padding"], case["dilation"], groups
    )
    x = torch.randn(3, 4, *case["image"], dtype=torch.float64, generator=g).requires_grad_(True)
    out = conv.forward(x)
    w = torch.randn(out.shape, dtype=torch.float64, generator=g)
    (exact,) = torch.autograd.grad(out, x, w)
    for layed in (w, w.contiguous(memory_format=torch.channels_last)):
        (found,) = Turned(conv, dtype).transpose(layed.to(dtype))
        assert found.dtype == dtype and found.shape == exact.shape
        assert torch.allclose(
            found.double(), exact, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-4
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", GEOMETRIES)
def test_rows_of_convolutions_are_the_transposes_of_unit_vectors(
    case: dict[str, tuple[int, int]], dtype: torch.dtype
) -> None:
    """To the last bit: nothing is rounded."""
    groups = int(case["groups"])  # type: ignore[call-overload]
    weight = torch.randn(
        8, 4 // groups, *case["kernel"], generator=torch.Generator().manual_seed(8)
    ).double()
    conv = Conv(
        weight, (4, *case["image"]), case["stride"], case["padding"], case["dilation"], groups
    )
    shape = tuple(conv.forward(torch.zeros(1, *conv.shape, dtype=torch.float64)).shape[1:])
    node = Node((0,), shape, "", Affine(conv))
    place = torch.arange(node.size)
    unit = torch.eye(node.size, dtype=dtype).reshape(-1, *shape)
    found = Turned(conv, dtype).rows(place.flip(0), node)
    assert torch.equal(found[0].flip(0), Turned(conv, dtype).transpose(unit)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_turned_maps_of_every_other_kind_are_the_transposes(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(9)
    maps = {
        id(node.map): (node, graph)
        for graph in map(network, NETS)
        for node in graph.nodes
        if node.map is not None
    }
    kinds = set()
    for node, graph in maps.values():
        assert node.map is not None
        kinds.add(type(node.map))
        given = [
            torch.randn(2, *graph.nodes[j].shape, dtype=torch.float64, generator=g)
            for j in node.inputs
        ]
        given = [v.requires_grad_(True) for v in given]
        out = node.map.forward(*given)
        w = torch.randn(out.shape, dtype=torch.float64, generator=g)
        exact = torch.autograd.grad(out, given, w)
        for found, want in zip(Turned(node.map, dtype).transpose(w.to(dtype)), exact):
            assert found.dtype == dtype and torch.allclose(
                found.double(), want, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-4
            )
    assert len(kinds) >= 6 and {Average, Pick, Matrix} <= kinds


# Corners.


def test_no_samples_one_sample_and_one_class() -> None:
    graph = network("mlp")
    x, _, radius = samples(graph, 4)
    y = torch.zeros(4, dtype=torch.int64)
    assert margin_bounds(graph, x[:0], y[:0], 0.1, 2.0, BOX).shape == (0, 3)
    whole = margin_bounds(graph, x, y, radius, 2.0, BOX)
    assert torch.allclose(
        margin_bounds(graph, x[:1], y[:1], radius[0], 2.0, BOX), whole[:1], rtol=1e-12, atol=1e-12
    )
    assert (whole[:, 0] == 0).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "pools", "grouped", "gelu"])
def test_a_ball_of_radius_zero_is_the_sample(name: str, norm: float) -> None:
    graph = network(name)
    x, y, _ = samples(graph, 3)
    z = graph.logits(x)
    for domain in DOMAINS:
        for steps in (0, 2):
            found = margin_bounds(graph, x, y, 0.0, norm, domain, steps)
            exact = z.gather(1, y[:, None]) - z
            assert (found <= exact + 1e-15).all() and torch.allclose(found, exact, atol=1e-11)


def test_a_network_of_another_shape_of_sample() -> None:
    graph = read(
        seeded(Net(lambda m, x: F.relu(m.a(x.flatten(1))), a=nn.Linear(16, 2)), 3), (2, 2, 2, 2)
    )
    x, y, radius = samples(graph, 2)
    for norm in NORMS:
        lower = margin_bounds(graph, x, y, radius, norm, BOX)
        for i in range(2):
            points = inside(x[i], float(radius[i]), norm, BOX, (2, 2, 2, 2))
            assert (lower[i] <= gaps(graph, points, int(y[i])) + 1e-12).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_few_steps_on_the_margins_own_slopes_only_tighten(
    norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network("mlp")
    x, y, radius = samples(graph, 5, 3)
    bare = margin_bounds(graph, x, y, radius, norm, BOX)
    monkeypatch.setattr(crown_module, "POLISH", 4)
    polished = margin_bounds(graph, x, y, radius, norm, BOX)
    assert (polished >= bare - 1e-9).all()
    assert (polished > bare + 1e-6).any()


def test_wide_networks_bounded_inside_in_float32_stay_sound_and_nearly_as_tight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = network("blocks")
    x, y, radius = samples(graph, 4, 3)
    fine = margin_bounds(graph, x, y, radius, INF, BOX)
    monkeypatch.setattr(crown_module, "WIDE", 1)
    coarse = Sweep(graph, Balls.make(x, radius, INF, BOX)).run()
    assert coarse.coarse
    bounds = crown_module.margins(coarse, y)[0]
    assert torch.allclose(bounds, fine, rtol=1e-2, atol=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        step = (
            2 * torch.rand(x.shape, dtype=torch.float64, generator=generator) - 1
        ).sign() * radius.reshape(-1, *[1] * (x.ndim - 1))
        values = graph.values((x.double() + step).clamp(*BOX))
        for j, (low, high) in coarse.spans.items():
            away = values[j] - coarse.centre[j]
            assert (away >= low - 1e-12 * (1 + values[j].abs())).all() and (
                away <= high + 1e-12 * (1 + values[j].abs())
            ).all()
