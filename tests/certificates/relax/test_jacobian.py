"""Bounds on the Jacobian of smooth networks and transformers: true slopes, regions of all
kinds, and the search over inputs.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from support.attention import euclidean_bound
from support.graphs import NORMS, crowd
from support.networks import Net, seeded
from support.transformers import CURVED
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Matrix, Sum
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region, Where
from wassail.certificates.lipschitz import ladder
from wassail.certificates.lipschitz.ladder import lipschitz, propagated
from wassail.certificates.lipschitz.semidefinite import semidefinite
from wassail.certificates.lipschitz.steepest import ascend, jacobian_norms, jacobians, margin_rows
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.jacobian import adjoint, centred, entries, entry_norms, secants
from wassail.certificates.relax.norms import product
from wassail.certificates.relax.ranges import Rays, far_ranges, one_region, ranges, smooth_bounds
from wassail.certificates.search.input_boxes import InputSearch
from wassail.zoo.onnx import load_onnx

inf = math.inf
SMOOTH = ["sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "softplus", "elu"]
STEEPEST = {
    "gelu": 1.128905,
    "gelu_tanh": 1.128994,
    "silu": 1.099840,
    "sigmoid": 0.25,
    "tanh": 1,
    "softplus": 1,
    "elu": 1,
}


def mlp(sizes: list[int], seed: int, names: list[str]) -> Graph:
    """A random perceptron, one activation name after the other."""
    g = torch.Generator().manual_seed(seed)
    turn = itertools.cycle(names)
    nodes = [Node((), (sizes[0],), "the input")]
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        if i:
            nodes.append(Node((len(nodes) - 1,), (a,), "", Smooth(next(turn))))
        weight = torch.randn(b, a, dtype=torch.float64, generator=g) * (2.5 / a) ** 0.5
        nodes.append(
            Node(
                (len(nodes) - 1,),
                (b,),
                "",
                Affine(Matrix(weight), torch.randn(b, dtype=torch.float64, generator=g) / 2),
            )
        )
    return Graph(tuple(nodes))


def one(name: str) -> Graph:
    """`theta = (0, f(x))`."""
    head = Matrix(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    return Graph(
        (
            Node((), (1,), "x"),
            Node((0,), (1,), "f", Smooth(name)),
            Node((1,), (2,), "head", Affine(head)),
        )
    )


def residual() -> nn.Module:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = x + m.b(F.gelu(m.a(x)))
        return m.d(torch.cat([F.silu(m.c(h)), h.relu(), x], 1))

    return Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 4), c=nn.Linear(4, 5), d=nn.Linear(13, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2),
        nn.Softplus(2.0),
        nn.AvgPool2d(2, 1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def token_block() -> nn.Module:
    """Two tokens of two numbers: attention, a norm and a gate on four inputs."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.norm(x.reshape(-1, 2, 2))
        y = x.reshape(-1, 2, 2) + F.scaled_dot_product_attention(m.q(y), m.k(y), m.v(y))
        return m.head(m.out(y).flatten(1))

    return Net(
        forward,
        norm=nn.LayerNorm(2, eps=0.1),
        q=nn.Linear(2, 2),
        k=nn.Linear(2, 2),
        v=nn.Linear(2, 2),
        out=nn.LayerNorm(2, 0.2),
        head=nn.Linear(4, 3),
    )


MAKE: dict[str, Callable[[], Graph]] = {
    "mlp": lambda: mlp([4, 7, 6, 3], 0, SMOOTH),
    "deep": lambda: mlp([3, 5, 5, 5, 5, 2], 1, ["gelu", "tanh"]),
    "residual": lambda: read(seeded(residual(), 2), (4,), smooth=True),
    "convolutions": lambda: read(seeded(convolutions(), 3), (1, 5, 5), smooth=True),
    "tokens": lambda: read(seeded(token_block(), 4), (4,), smooth=True),
    **{
        name: lambda name=name: read(
            seeded(CURVED[name][0](), 5).eval(), CURVED[name][1], smooth=True
        )
        for name in ("post-LN, batch second", "causal", "gate", "broadcast product")
    },
}
KINDS = ["box", "l1", "l2 in a box", "linf", "R^n", "half"]


@cache
def network(name: str) -> Graph:
    return MAKE[name]()


def where(kind: str, n: int, radius: float = 0.3) -> Where:
    centre = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    regions: dict[str, Where] = {
        "box": (centre - 0.5 * radius, centre + radius),
        "l1": Ball(centre, 2 * radius, 1),
        "l2 in a box": Ball(centre, 1.5 * radius, 2, (0.0, 1.0)),
        "linf": Ball(centre, radius, inf),
        "R^n": None,
        "half": (
            torch.where(centre > 0.5, -inf, centre),
            torch.where(centre < 0.7, inf, centre + radius),
        ),
    }
    return regions[kind]


@pytest.mark.parametrize("name", SMOOTH)
def test_steepest_slopes_are_the_true_ones_rounded_up(name: str) -> None:
    truth = (
        ACTIVATIONS[name]
        .derivative(torch.linspace(-30, 30, 600001, dtype=torch.float64))
        .abs()
        .max()
    )
    assert float(truth) <= Smooth(name).steepest <= STEEPEST[name] + 1e-12
    assert math.ceil(Smooth(name).steepest * 1e6 - 1e-6) == round(STEEPEST[name] * 1e6)
    graph = one(name)
    for r in NORMS:
        assert product(graph, r, inf) == pytest.approx(Smooth(name).steepest, rel=1e-9)
    assert product(graph, 2.0, inf, {1: 0.125}) == pytest.approx(0.125, rel=1e-9)


@pytest.mark.parametrize("name", SMOOTH)
def test_one_activation_on_the_line(name: str) -> None:
    f = ACTIVATIONS[name]
    graph = one(name)
    for low, high in [(-inf, inf), (-1.0, 2.0), (-inf, -0.25)]:
        x = torch.linspace(max(low, -40), min(high, 40), 20001, dtype=torch.float64)
        bound = lipschitz(graph, 2, (low, high), method="exact")
        truth = float(f.derivative(x).abs().max())
        assert (
            bound.gap <= 1e-6
            and bound.lower <= Smooth(name).steepest
            and bound.upper == pytest.approx(truth, rel=1e-5)
        )
    assert lipschitz(graph, 2, Ball(torch.zeros(1), 0.0)).upper == pytest.approx(
        float(f.derivative(torch.zeros(1).double()))
    )


def test_the_counterexamples_of_the_smooth_theorem_have_these_slopes() -> None:
    assert lipschitz(one("tanh"), 2).upper == pytest.approx(1.0, rel=1e-6)
    gelu = lipschitz(one("gelu"), 2)
    assert (
        gelu.exact
        and gelu.upper == pytest.approx(1.1289041, abs=1e-7)
        and gelu.info["neurons"] == 1
    )


@pytest.mark.parametrize(("r", "truth"), [(1.0, 2.0), (2.0, math.sqrt(5)), (inf, 3.0)])
def test_two_inputs_in_closed_form(r: float, truth: float) -> None:
    head = Matrix(torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64))
    graph = Graph(
        (
            Node((), (2,), "x"),
            Node((0,), (2,), "f", Smooth("tanh")),
            Node((1,), (2,), "head", Affine(head)),
        )
    )
    for domain in (None, (-1.0, 0.5), Ball(torch.tensor([0.2, -0.1]), 1.0, 2)):
        bound = lipschitz(graph, r, domain)
        assert bound.gap <= 1e-6 and bound.upper == pytest.approx(truth, rel=1e-6)
    away = lipschitz(graph, r, (1.0, 2.0))  # the slope of tanh at 1
    assert away.upper == pytest.approx(truth * (1 - math.tanh(1) ** 2), rel=1e-6)


@pytest.mark.parametrize(("r", "size"), [(1.0, 1.0), (2.0, math.sqrt(2)), (inf, 2.0)])
def test_a_softmax_and_a_layer_norm_in_closed_form(r: float, size: float) -> None:
    softmax = read(nn.Softmax(1), (2,), smooth=True)  # p_1 - p_2 = tanh((x_1 - x_2) / 2)
    bound = lipschitz(softmax, r, (-1.0, 2.0), method="exact", nodes=4000)
    assert bound.lower == pytest.approx(size / 2, rel=1e-9) and bound.upper <= size / 2 * (1 + 2e-3)
    apart = (torch.tensor([1.0, -2.0]), torch.tensor([2.0, 0.0]))  # x_1 - x_2 >= 1
    assert lipschitz(softmax, r, apart, method="exact", nodes=4000).upper == pytest.approx(
        size / 2 / math.cosh(0.5) ** 2, rel=2e-3
    )
    norm = read(
        nn.LayerNorm(2, eps=0.25, elementwise_affine=False), (2,), smooth=True
    )  # y = +- c / sqrt(c^2 + eps)
    bound = lipschitz(norm, r, (-1.0, 1.0), method="exact", nodes=4000)
    assert bound.lower == pytest.approx(2 * size, rel=1e-6) and bound.upper <= 2 * size * (1 + 1e-3)
    # Far out along (1, 1) the range of x_1 - x_2 stays infinite: the range of each entry alone
    # loses a factor of sqrt 2.
    bound = lipschitz(norm, r, method="propagate")
    assert bound.lower == pytest.approx(2 * size, rel=1e-6)
    assert bound.upper <= 2 * math.sqrt(2) * size * (1 + 1e-3)


def spread(graph: Graph, region: Region, count: int = 60) -> Tensor:
    """Points of a region, `(m, *shape)`."""
    return crowd(region, count).reshape(-1, *graph.nodes[0].shape)


@pytest.mark.few(14)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKE)
def test_values_and_jacobians_stay_in_their_ranges(name: str, kind: str) -> None:
    graph = network(name)
    if graph.curved and graph.inputs > 4 and kind not in ("l2 in a box", "R^n"):
        return  # the parts are the same
    rows = margin_rows(graph.outputs, None)
    for radius in (1e-5, 0.3) if kind not in ("R^n", "half") else (0.3,):
        region = Region.make(where(kind, graph.inputs, radius), graph.inputs)
        x = spread(graph, region)
        spans = ranges(graph, one_region(region))
        values = graph.values(x)
        for j, (low, high) in spans.items():
            slack = 1e-13 * (1 + values[j].abs())
            assert (low - slack <= values[j]).all() and (values[j] <= high + slack).all()
        truth = rows @ jacobians(graph, x.flatten(1))
        found = [adjoint(graph, spans, rows)]
        if region.bounded:
            found += [centred(graph, spans, rows), centred(graph, spans, rows, tighten=True)]
            assert (found[2][1] - found[2][0]).sum() <= (found[1][1] - found[1][0]).sum() * (
                1 + 1e-9
            )
        for low, high in found:
            slack = 1e-12 * truth.abs().max()
            assert (low - slack <= truth).all() and (truth <= high + slack).all()


@pytest.mark.parametrize("name", MAKE)
def test_on_a_point_the_bound_is_the_jacobian(name: str) -> None:
    graph = network(name)
    x = torch.rand(3, graph.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    zero = torch.zeros_like(x)
    spans = ranges(graph, Balls(x, torch.zeros(3, dtype=torch.float64), inf, zero, zero))
    truth = jacobians(graph, x)
    eye = torch.eye(graph.outputs).double()
    for low, high in (
        adjoint(graph, spans, eye),
        centred(graph, spans, eye),
        centred(graph, spans, eye, True),
    ):
        assert (high - low).amax() <= 1e-7 * truth.abs().amax()
        assert (low <= truth + 1e-12).all() and (truth <= high + 1e-12).all()


PARTS: dict[str, tuple[Node, tuple[tuple[int, ...], ...]]] = {
    "product": (Node((0, 1), (2, 3), "", Curved(Product("ik,jk->ij"))), ((2, 4), (3, 4))),
    "square": (Node((0, 0), (3,), "", Curved(Product("i,i->i"))), ((3,), (3,))),
    "softmax": (Node((0,), (2, 3), "", Curved(Softmax())), ((2, 3),)),
    "softmax of two": (Node((0,), (2,), "", Curved(Softmax())), ((2,),)),
    "normalise": (Node((0,), (2, 4), "", Curved(Normalise(0.05))), ((2, 4),)),
    "normalise two": (Node((0,), (2,), "", Curved(Normalise(0.05))), ((2,),)),
    "gelu": (Node((0,), (4,), "", Smooth("gelu")), ((4,),)),
    "relu": (Node((0,), (4,), "", Relu(torch.tensor(0.1, dtype=torch.float64))), ((4,),)),
}


def value(node: Node, *v: Tensor) -> Tensor:
    if node.curve is not None:
        return node.curve.value(*v)
    return ACTIVATIONS[node.activation].value(v[0]) if node.activation else F.leaky_relu(v[0], 0.1)


@pytest.mark.parametrize("radius", [1e-4, 0.1, 1.0])
@pytest.mark.parametrize("part", PARTS)
def test_the_derivative_of_a_node_is_its_middle_map_and_a_remainder(
    part: str, radius: float
) -> None:
    node, shapes = PARTS[part]
    g = torch.Generator().manual_seed(10)
    nearest = 0.0
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
    for _ in range(20):
        centres, reach = (
            [draw(1, *shape) for shape in shapes],
            [radius * draw(1, *shape).abs() for shape in shapes],
        )
        spans = [(c - w, c + w) for c, w in zip(centres, reach)]
        by = node.tangent(spans, 0.0)
        head, error = draw(1, 1, *node.shape), 0.1 * radius * draw(1, 1, *node.shape).abs()
        # Adjoint and size of the middle map.
        t = [draw(1, 1, *shape) for shape in shapes]
        pulled = by.transpose(head)
        assert float((by.forward(*t) * head).sum()) == pytest.approx(
            sum(float((a * b).sum()) for a, b in zip(t, pulled))
        )
        assert all((p.abs() <= r * (1 + 1e-12)).all() for p, r in zip(pulled, by.reach(head.abs())))
        # At points of the box, most of them corners, and gradients within the error.
        count = 300
        x = [
            c
            + w
            * draw(count, *shape).sign()
            * (draw(count, 1).abs() > 0.1).double().reshape(-1, *[1] * len(shape))
            for c, w, shape in zip(centres, reach, shapes)
        ]
        h = head[0] + error[0] * draw(count, *node.shape).sign()
        with torch.enable_grad():
            x = [v.requires_grad_(True) for v in x]
            true = torch.autograd.grad((value(node, *x) * h).sum(), x)
        for truth, fixed, most in zip(true, by.transpose(h[None]), by.spread(head, error)):
            rest = (truth - fixed[0]).abs()
            assert (rest <= most[0] * (1 + 1e-9) + 1e-13).all()
            nearest = max(nearest, float((rest / most[0].clamp(min=1e-12)).max()))
    assert nearest > 0.6 or (part, radius) == ("relu", 1e-4)  # it is not far above what happens


@pytest.mark.parametrize("name", ["residual", "convolutions", "causal"])
def test_many_regions_at_once_are_the_same_as_one_by_one(name: str) -> None:
    graph = network(name)
    g = torch.Generator().manual_seed(7)
    x, reach = (torch.rand(3, graph.inputs, dtype=torch.float64, generator=g) for _ in range(2))
    balls = Balls(x, torch.full((3,), 0.05, dtype=torch.float64), 2.0, 0.1 * reach, 0.2 * reach)
    low, high = entries(graph, ranges(graph, balls))
    for k in range(3):
        single = Balls(
            x[k, None], balls.radius[k, None], 2.0, balls.below[k, None], balls.above[k, None]
        )
        least, top = entries(graph, ranges(graph, single))
        torch.testing.assert_close(low[k, None], least, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(high[k, None], top, rtol=1e-3, atol=1e-4)


@pytest.mark.slow_cases("causal")
@pytest.mark.parametrize("name", ["mlp", "convolutions", "causal", "post-LN, batch second"])
def test_the_smaller_the_ball_the_nearer_to_the_true_norm(name: str) -> None:
    graph = network(name)
    gaps = []
    for radius in (1e-2, 1e-4, 1e-5):
        bound = lipschitz(graph, 2, where("l2 in a box", graph.inputs, radius), method="propagate")
        gaps.append(bound.upper / bound.lower - 1)
    assert all(a > b for a, b in itertools.pairwise(gaps)) and gaps[-1] < 2e-3
    assert gaps[-1] < gaps[-2] / 8 or gaps[-1] < 1e-6  # of first order


def uppers(graph: Graph, region: Region, r: float, q: float) -> dict[str, Any]:
    """Every upper bound there is on `||J||_{r -> q}`."""
    spans = ranges(graph, one_region(region))
    found = {
        "product": product(graph, r, q),
        "intervals": float(
            entry_norms(*adjoint(graph, spans, torch.eye(graph.outputs).double()), r, q)
        ),
        "entries": float(entry_norms(*entries(graph, spans), r, q)),
    }
    if region.bounded:
        found["tightened"] = float(entry_norms(*entries(graph, spans, True), r, q))
    if graph.curved:
        found["modules"] = euclidean_bound(graph, region, r, q)
    else:
        bounds = smooth_bounds(graph, region, spans)
        found["substituted"] = propagated(bounds, r, q)
        found["local product"] = product(
            graph,
            r,
            q,
            {
                i: max(float(side.abs().max()) for side in bounds.derivative(i))
                for i in bounds.spans
            },
        )
        states = secants(bounds)
        found["sdp"] = semidefinite(states.graph.piecewise(states.states()), r, q, 0.01)
    return found


def check(graph: Graph, region: Region, r: float, q: float) -> None:
    """No Jacobian and no chord is steeper than a bound, and no bound of the ladder above the
    others.
    """
    x = crowd(region, 80)
    most = float(jacobian_norms(jacobians(graph, x), r, q).max()) * (1 - 1e-12)
    z = graph.logits(x.reshape(-1, *graph.nodes[0].shape))
    move = torch.linalg.vector_norm(z[1:] - z[:-1], q, dim=1)
    step = torch.linalg.vector_norm(x[1:] - x[:-1], r, dim=1)
    far = step > 1e-3 * step.max()
    most = max(most, float((move[far] / step[far]).max()) * (1 - 1e-9))
    for name, upper in uppers(graph, region, r, q).items():
        assert most <= upper, f"{name}: {most} above {upper}"


@pytest.mark.parametrize("kind", ["box", "R^n", "l1", "l2 in a box", "linf", "half"])
def test_no_jacobian_of_random_smooth_networks_beats_a_bound(kind: str) -> None:
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        depth, r, q, turn = (
            int(torch.randint(*span, (), generator=g)) for span in ((1, 4), (0, 3), (0, 3), (0, 7))
        )
        sizes = [int(v) for v in torch.randint(1, 6, (depth + 2,), generator=g)]
        graph = mlp(sizes, seed, SMOOTH[turn:] + SMOOTH[:turn])
        if seed % 2 and graph.outputs > 1:
            graph = graph.head(margin_rows(graph.outputs, None))
            q = 2
        check(
            graph,
            Region.make(where(kind, sizes[0], 0.1 + 0.1 * seed), sizes[0]),
            NORMS[r],
            NORMS[q],
        )


@pytest.mark.slow_cases("causal", "post-LN, batch second")
@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("mlp", "deep")])
def test_no_jacobian_of_larger_ones_does_either(name: str) -> None:
    graph = network(name)
    graph = graph.head(margin_rows(graph.outputs, None))
    for kind, (r, q) in zip(
        ["box", "l2 in a box", "l1", "R^n"], [(inf, inf), (2.0, inf), (1.0, 2.0), (2.0, 1.0)]
    ):
        check(graph, Region.make(where(kind, graph.inputs), graph.inputs), r, q)


@pytest.mark.parametrize("name", ["mlp", "deep", "residual", "tokens"])
def test_values_along_rays_stay_in_their_ranges(name: str) -> None:
    graph = network(name)
    n = graph.inputs
    g = torch.Generator().manual_seed(8)
    for width in (1.0, 0.1, 0.0):
        u = torch.rand(4, n, dtype=torch.float64, generator=g) * 2 - 1
        face = torch.arange(4) % n
        u[torch.arange(4), face] = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        sides = (u - width).clamp(min=-1), (u + width).clamp(max=1)
        for side in sides:
            side[torch.arange(4), face] = u[torch.arange(4), face]
        start = torch.tensor([1.0, 4.0, 100.0, 1e4], dtype=torch.float64)
        origin = torch.rand(n, dtype=torch.float64, generator=g)
        rays = Rays(
            origin, torch.full((n,), -inf).double(), torch.full((n,), inf).double(), start, sides
        )
        spans = far_ranges(graph, rays)
        for factor in (1.0, 1.5, 10.0, 1e5):
            v = sides[0] + (sides[1] - sides[0]) * torch.rand(
                4, n, dtype=torch.float64, generator=g
            )
            values = graph.values(
                (origin + factor * start[:, None] * v).reshape(-1, *graph.nodes[0].shape)
            )
            for j, (low, high) in spans.items():
                slack = 1e-12 * (1 + values[j].abs())
                assert (low - slack <= values[j]).all() and (values[j] <= high + slack).all()
        if (
            width == 0.0 and name != "tokens"
        ):  # far out the slopes are known but for neurons that the ray runs along
            widths = [high - low for i in spans for low, high in [spans[i]]]
            assert sum(int(torch.isfinite(w[3]).sum()) for w in widths) < sum(
                w[3].numel() for w in widths
            )


@pytest.mark.few(4)
@pytest.mark.slow_cases("sizes6-*", "sizes4-*")
@pytest.mark.parametrize(("sizes", "names", "kind", "gap"), [
    ([1, 6, 5, 3], ["gelu", "tanh"], "R^n", 1e-6),
    ([1, 6, 5, 3], ["silu"], "half", 1e-6),
    ([1, 4, 4, 2], ["softplus", "sigmoid"], "box", 1e-6),
    ([2, 5, 3], ["tanh"], "R^n", 1e-3),
    ([2, 5, 3], ["gelu"], "R^n", 1e-3),
    ([2, 4, 4, 3], ["elu", "tanh"], "box", 1e-3),
    ([2, 4, 4, 3], ["gelu"], "l2 in a box", 1e-3),
    ([3, 4, 2], ["silu"], "l1", 1e-2),
])  # fmt: skip
def test_the_search_over_inputs_closes(
    sizes: list[int], names: list[str], kind: str, gap: float
) -> None:
    graph = mlp(sizes, sum(sizes), names)
    domain = where(kind, sizes[0])
    bound = lipschitz(graph, 2, domain, method="exact", nodes=15000)
    assert bound.gap <= gap and bound.method in ("branch", "propagate")
    region = Region.make(domain, sizes[0])
    found = jacobian_norms(
        jacobians(graph.head(margin_rows(sizes[-1], None)), crowd(region, 4000)), 2, inf
    )
    assert float(found.max()) <= bound.upper * (1 + 1e-12) and bound.lower >= float(found.max()) * (
        1 - 1e-3
    )
    assert bound.witness is not None and region.contains(bound.witness[None], 1e-12).all()


def test_the_search_closes_on_attention() -> None:
    bound = lipschitz(network("tokens"), 2, where("box", 4, 0.02), method="exact", nodes=2000)
    plain = lipschitz(network("tokens"), 2, where("box", 4, 0.02), method="propagate")
    assert bound.method == "branch" and bound.upper - bound.lower < (plain.upper - plain.lower) / 3


@pytest.mark.parametrize("kind", ["R^n", "half", "box", "l2 in a box"])
def test_the_pieces_of_a_search_cover_the_region(kind: str) -> None:
    graph = mlp([2, 4, 2], 3, ["gelu"])
    region = Region.make(where(kind, 2), 2)
    # It sees no value, so no piece is ever settled.
    run = InputSearch(graph, region, 2.0, inf, lambda x: torch.zeros(len(x)).double(), lambda x: x)
    x = crowd(region, 400)
    norms = jacobian_norms(jacobians(graph, x), 2, inf)
    before = inf
    away = x - region.centre
    for _ in range(12):
        p = run.open.rows
        rows = torch.arange(len(p.face))
        rays = p.face >= 0
        side = torch.where(torch.isinf(p.low), p.high, p.low)[rows, p.face]
        t = (
            away[:, p.face] * side.sign()
        )  # how far out each point is, seen from each piece with rays
        u = away[:, None] / t.clamp(min=1e-300)[:, :, None]
        least = p.low.clone()
        top = p.high.clone()
        least[rows[rays], p.face[rays]], top[rows[rays], p.face[rays]] = -1.0, 1.0
        along = ((u >= least - 1e-9) & (u <= top + 1e-9)).all(2) & (t >= side.abs() * (1 - 1e-12))
        inside = ((x[:, None] >= p.low - 1e-12) & (x[:, None] <= p.high + 1e-12)).all(2)
        over = torch.where(torch.where(rays, along, inside), p.bound, -inf).amax(1)
        assert (norms <= over * (1 + 1e-12)).all()
        run.step()
        run.sift()
        assert run.upper <= before * (1 + 1e-12) and run.settled == 0.0
        before = run.upper
    assert len(run.open) > 100


def test_a_search_stops_when_told_and_keeps_its_bracket(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp([2, 6, 6, 3], 4, ["tanh"])
    few = lipschitz(graph, 2, (-1, 1), method="exact", nodes=40)
    assert 40 <= few.info["nodes"] <= 40 + 2 * 256 and few.gap > 1e-4
    steps: list[float] = []

    def interrupted(self: InputSearch) -> None:
        if len(steps) == 12:
            raise KeyboardInterrupt
        steps.append(self.upper)
        original(self)

    original = InputSearch.step
    monkeypatch.setattr(InputSearch, "step", interrupted)
    bound = lipschitz(graph, 2, (-1, 1), method="exact")
    assert (
        bound.info["interrupted"] is True
        and bound.method == "branch"
        and few.lower <= bound.upper < steps[0]
    )


def test_models_are_read_with_their_smooth_parts() -> None:
    model = seeded(
        nn.Sequential(
            nn.Linear(3, 4),
            nn.GELU(approximate="tanh"),
            nn.Linear(4, 4),
            nn.ReLU(),
            nn.Linear(4, 2),
        )
    )
    bound = ws.lipschitz(model, 1, (0, 1), method="sdp")
    assert 0 < bound.lower <= bound.upper < inf and bound.info["neurons"] == 8
    assert lipschitz(
        read(nn.Sequential(*list(model.children())[:3]), (3,), smooth=True),
        1,
        outputs="logits",
        method="product",
    ).upper <= (
        float(
            torch.linalg.matrix_norm(model[2].weight.detach(), 1)
            * torch.linalg.matrix_norm(model[0].weight.detach(), 1)
        )
        * 1.128995
    )


def test_the_same_answer_twice() -> None:
    for name, domain in [("mlp", (0, 1)), ("tokens", where("linf", 4, 0.01))]:
        first, again = (
            lipschitz(network(name), inf, domain, method="propagate", seed=3) for _ in range(2)
        )
        assert (first.lower, first.upper, first.method) == (again.lower, again.upper, again.method)


def test_the_ascent_finds_a_steep_point() -> None:
    graph = one("tanh")
    region = Region.make((-5.0, 5.0), 1)
    x = ascend(graph, region, torch.tensor([[-1.5], [2.0]], dtype=torch.float64), 2.0, inf)
    assert x.abs().max() < 1e-3 and region.contains(x).all()
    for r, q in itertools.product(NORMS, NORMS):
        graph = network("residual")
        start = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        region = Region.make((0.0, 1.0), 4)
        moved = ascend(graph, region, start, r, q)
        before, after = (jacobian_norms(jacobians(graph, v), r, q) for v in (start, moved))
        assert after.max() > before.max() * (1 - 1e-9) and region.contains(moved, 1e-12).all()


def test_secants_have_the_jacobians_of_the_smooth_network() -> None:
    graph = network("residual")
    region = Region.make((0.0, 1.0), 4)
    small = secants(smooth_bounds(graph, region, ranges(graph, one_region(region))))
    assert not small.graph.smooth and small.graph.outputs == 3
    assert sum(isinstance(node.map, Sum) for node in small.graph.nodes) > sum(
        isinstance(n.map, Sum) for n in graph.nodes
    )
    sdp = lipschitz(graph, 2, (0.0, 1.0), method="sdp")
    plain = lipschitz(graph, 2, (0.0, 1.0), method="propagate")
    assert plain.lower <= sdp.upper <= plain.upper


def test_regions_without_normalisation_have_no_bound_on_all_of_space() -> None:
    for method in ("product", "propagate", "exact", "auto"):
        bound = lipschitz(network("broadcast product"), 2, method=method)
        assert bound.upper == inf and bound.lower > 1e3
    assert lipschitz(network("broadcast product"), 2, (0.0, 1.0), method="propagate").upper < inf
    normed = lipschitz(network("tokens"), 2, method="propagate")
    assert normed.lower <= normed.upper < inf


def test_curves_between_bounded_and_unbounded_ranges() -> None:
    low = torch.tensor([[[1.0, -inf]], [[1.0, 2.0]]]).double()
    high = torch.tensor([[[2.0, inf]], [[3.0, 2.0]]]).double()
    found = entry_norms(low, high, 2.0, inf)
    assert found[0] == inf and float(found[1]) == pytest.approx(math.sqrt(13))
    assert float(entry_norms(-high[1:], high[1:], 2.0, 2.0)) == pytest.approx(math.sqrt(13))


def test_mistakes_of_a_bound_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> Tensor:
        return torch.tensor([1e-3], dtype=torch.float64)

    monkeypatch.setattr(ladder, "entry_norms", wrong)
    with pytest.raises(AssertionError, match="report this bug"):
        lipschitz(network("mlp"), 2, (0, 1))


def test_a_real_sigmoid_network_on_a_small_ball(zoo: ModuleType) -> None:
    model, dataset = zoo.load("cifar_conv_small_sigmoid")
    x, _ = zoo.images(dataset, 1)
    graph = read(model, tuple(x.shape[1:]), smooth=True)
    graph = graph.head(margin_rows(graph.outputs, [0]))
    region = Region.make(Ball(x[0], 1e-3, 2, (0.0, 1.0)), graph.inputs)
    upper = float(entry_norms(*entries(graph, ranges(graph, one_region(region))), 2.0, inf))
    lower = float(
        jacobian_norms(jacobians(graph, spread(graph, region, 10).flatten(1)), 2.0, inf).max()
    )
    assert lower <= upper <= 1.05 * lower


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar_vit_pgd_2_3_16", "cifar_vit_ibp_3_3_8"])
def test_real_vision_transformers_on_small_balls(name: str, zoo: ModuleType) -> None:
    from conftest import ZOO

    x, _ = zoo.images("cifar10", 1)
    model = load_onnx(
        ZOO / "models" / f"{name}.onnx", mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)
    )
    for norm, radius in ((2.0, 1e-3), (inf, 1e-5)):
        bound = ws.lipschitz(
            model, norm, Ball(x[0], radius, norm, (0.0, 1.0)), method="propagate", time_limit=60
        )
        assert bound.lower <= bound.upper <= 1.25 * bound.lower
