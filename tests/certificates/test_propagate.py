import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from test_structure import Net, jacobian, seeded
from torch import Tensor, nn
from torch.nn import functional as F

from wassail.certificates.bounds import propagate
from wassail.certificates.bounds.propagate import (
    Bounds,
    Gradients,
    Span,
    crown,
    gradients,
    intervals,
    substitute,
)
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region, Where

NORMS = [1.0, 2.0, math.inf]


def mlp(sizes: list[int], seed: int, slope: float = 0.0) -> Graph:
    """A random perceptron as a graph, without a model."""
    g = torch.Generator().manual_seed(seed)
    nodes = [Node((), (sizes[0],), "the input")]
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        if i:
            nodes.append(
                Node((len(nodes) - 1,), (a,), "", Relu(torch.tensor(slope, dtype=torch.float64)))
            )
        weight = torch.randn(b, a, dtype=torch.float64, generator=g) * (1.5 / a) ** 0.5
        bias = 0.5 * torch.randn(b, dtype=torch.float64, generator=g)
        nodes.append(Node((len(nodes) - 1,), (b,), "", Affine(Matrix(weight), bias)))
    return Graph(tuple(nodes))


def layers(*weights: list[list[float]], bias: list[list[float]] | None = None) -> Graph:
    """A perceptron with these weights."""
    nodes = [Node((), (len(weights[0][0]),), "the input")]
    for i, rows in enumerate(weights):
        w = torch.tensor(rows, dtype=torch.float64)
        if i:
            nodes.append(
                Node(
                    (len(nodes) - 1,),
                    nodes[-1].shape,
                    "",
                    Relu(torch.tensor(0.0, dtype=torch.float64)),
                )
            )
        shift = None if bias is None else torch.tensor(bias[i], dtype=torch.float64)
        nodes.append(Node((len(nodes) - 1,), (len(w),), "", Affine(Matrix(w), shift)))
    return Graph(tuple(nodes))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def blocks() -> nn.Module:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = x + m.b(m.a(x).relu())
        h = h.relu()
        return m.e(torch.cat([h + m.d(m.c(h).relu()), x], 1))

    return Net(
        forward,
        a=nn.Linear(4, 6),
        b=nn.Linear(6, 4),
        c=nn.Linear(4, 5),
        d=nn.Linear(5, 4),
        e=nn.Linear(8, 3),
    )


def pools() -> nn.Module:
    return Net(
        lambda m, x: m.b(F.avg_pool2d(F.max_pool2d(m.a(x), 3, 2, 1).relu(), 2, 1).flatten(1)),
        a=nn.Conv2d(1, 2, 2), b=nn.Linear(8, 3),
    )  # fmt: skip


def clamps() -> nn.Module:
    return Net(
        lambda m, x: m.b(m.a(x).clamp(-0.5, 0.5).abs()), a=nn.Linear(4, 6), b=nn.Linear(6, 3)
    )


MAKE: dict[str, Callable[[], Graph]] = {
    "mlp": lambda: mlp([4, 7, 6, 3], 0),
    "deep": lambda: mlp([3, 5, 5, 5, 5, 2], 1),
    "leaky": lambda: mlp([4, 6, 5, 3], 2, slope=0.2),
    "convolutions": lambda: read(seeded(convolutions(), 3), (1, 5, 5)),
    "blocks": lambda: read(seeded(blocks(), 4), (4,)),
    "pools": lambda: read(seeded(pools(), 5), (1, 6, 6)),
    "clamps": lambda: read(seeded(clamps()), (4,)),
}  # fmt: skip


@cache
def network(name: str) -> Graph:
    return MAKE[name]()


def where(kind: str, n: int) -> Where:
    centre = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return {
        "box": (torch.zeros(n), torch.ones(n)),
        "l1": Ball(centre, 0.7, 1),
        "l2 in a box": Ball(centre, 0.5, 2, (0.0, 1.0)),
        "linf": Ball(centre, 0.3, math.inf),
        "R^n": None,
    }[kind]


KINDS = ["box", "l1", "l2 in a box", "linf", "R^n"]


def crowd(region: Region, count: int = 1000) -> Tensor:
    """Many points of a region, its corners among them."""
    g = torch.Generator().manual_seed(11)
    if not region.bounded:
        return torch.cat(
            [region.sample(count // 4, g, spread) for spread in (0.1, 1.0, 10.0, 1000.0)]
        )
    n = len(region.low)
    if region.radius < math.inf:
        if region.norm == 1:
            step = region.radius * torch.cat([torch.eye(n), -torch.eye(n)]).double()
        else:
            step = torch.randn(count // 2, n, dtype=torch.float64, generator=g)
            step = region.radius * step / step.norm(dim=1, keepdim=True)
        corners = (region.centre + step).clamp(region.low, region.high)
    else:
        side = torch.rand(count // 2, n, generator=g) < 0.5
        corners = torch.where(side, region.low, region.high)
    return torch.cat([region.sample(count, g), corners])


def check_values(bounds: Bounds, x: Tensor) -> None:
    """Every neuron's input lies in its span, and every combination of logits below its bound."""
    graph = bounds.graph
    found = graph.values(x.reshape(-1, *graph.nodes[0].shape))
    for i in graph.relus:
        v, (low, high) = found[graph.nodes[i].inputs[0]], bounds.spans[i]
        assert (v >= low).all() and (v <= high).all()
    if bounds.region.bounded:
        rows = torch.randn(
            8, graph.outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        last = len(graph.nodes) - 1
        assert ((found[-1] @ rows.T).amax(0) <= substitute(bounds, last, rows) + 1e-12).all()


def check_gradients(found: Gradients, x: Tensor, tighten: bool = True) -> None:
    """Every sampled gradient, at every ReLU and at the input, lies in its span, and its norms
    below their bounds.
    """
    graph = found.bounds.graph
    for k, row in enumerate(found.rows):
        with torch.enable_grad():
            points = x.reshape(-1, *graph.nodes[0].shape).clone().requires_grad_(True)
            values = graph.values(points)
            top = (values[-1] @ row).sum()
        for i, (low, high) in found.spans.items():
            (g,) = torch.autograd.grad(top, values[i], retain_graph=True)
            assert (g >= low[k]).all() and (g <= high[k]).all()
        g = torch.autograd.grad(top, points)[0].flatten(1)
        entries = found.entries(tighten)
        assert (g >= entries[0][k]).all() and (g <= entries[1][k]).all()
        for s in NORMS:
            assert torch.linalg.vector_norm(g, s, dim=1).max() <= found.norm(s, entries)[k] * (
                1 + 1e-15
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKE)
def test_values_and_gradients_of_many_points_lie_within_their_bounds(name: str, kind: str) -> None:
    graph = network(name)
    region = Region.make(where(kind, graph.inputs), graph.inputs)
    plain = intervals(graph, region)
    sharp = crown(graph, region)
    x = crowd(region)
    check_values(plain, x)
    check_values(sharp, x)
    rows = torch.cat(
        [
            torch.eye(graph.outputs).double(),
            torch.randn(2, graph.outputs, generator=torch.Generator().manual_seed(1)),
        ]
    )
    loose = gradients(plain, rows, tighten=False)
    tight = gradients(sharp, rows)
    check_gradients(loose, x, tighten=False)
    check_gradients(tight, x)
    # Substitution never loses against intervals.
    for i in graph.relus:
        assert (sharp.spans[i][0] >= plain.spans[i][0]).all() and (
            sharp.spans[i][1] <= plain.spans[i][1]
        ).all()
    for i in tight.spans:
        assert (tight.spans[i][0] >= loose.spans[i][0] - 1e-9).all() and (
            tight.spans[i][1] <= loose.spans[i][1] + 1e-9
        ).all()
    assert sharp.open <= plain.open <= graph.neurons


@pytest.mark.parametrize("name", ["mlp", "blocks", "pools"])
def test_states_are_the_sides_of_the_points(name: str) -> None:
    graph = network(name)
    region = Region.make(where("linf", graph.inputs), graph.inputs)
    bounds = crown(graph, region)
    x = crowd(region)
    found = graph.values(x.reshape(-1, *graph.nodes[0].shape))
    some = 0
    for i, state in bounds.states().items():
        active = found[graph.nodes[i].inputs[0]] > 0
        assert active[:, state == 1].all() and not active[:, state == 0].any()
        assert torch.equal(state == -1, bounds.unstable(i))
        some += int((state >= 0).sum())
    assert some > 0 and bounds.open == graph.neurons - some
    # A smaller ball has no more undecided neurons.
    assert isinstance(ball := where("linf", graph.inputs), Ball)
    assert (
        crown(graph, Region.make(Ball(ball.centre, 0.01, math.inf), graph.inputs)).open
        <= bounds.open
    )


@pytest.mark.parametrize("name", ["mlp", "leaky", "convolutions", "blocks", "pools", "clamps"])
def test_without_an_undecided_neuron_everything_is_exact(name: str) -> None:
    graph = network(name)
    centre = torch.rand(
        graph.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(8)
    )
    region = Region.make(Ball(centre, 1e-7, 2), graph.inputs)
    bounds = crown(graph, region)
    assert bounds.open == 0
    x = centre.reshape(1, *graph.nodes[0].shape)
    slopes = jacobian(graph.logits, x)[0]
    eye = torch.eye(graph.outputs, dtype=torch.float64)
    found = gradients(bounds, eye)
    for side in found.entries():
        assert torch.allclose(side, slopes, rtol=0, atol=1e-11)
    for s in NORMS:
        assert torch.allclose(
            found.norm(s, found.entries()), torch.linalg.vector_norm(slopes, s, dim=1), rtol=1e-9
        )
    upper = substitute(bounds, len(graph.nodes) - 1, eye)
    assert torch.allclose(upper, graph.logits(x)[0] + 1e-7 * slopes.norm(dim=1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "deep", "convolutions", "blocks"])
def test_rounding_errors_stay_within_the_bounds_of_a_single_point(name: str, norm: float) -> None:
    graph = network(name)
    g = torch.Generator().manual_seed(12)
    net = graph.piecewise()
    eye = torch.eye(graph.outputs, dtype=torch.float64)
    for _ in range(5):
        x = 100 * torch.randn(1, graph.inputs, dtype=torch.float64, generator=g)
        bounds = crown(graph, Region.make(Ball(x[0], 0.0, norm), graph.inputs))
        check_values(bounds, x)
        found = gradients(bounds, eye)
        check_gradients(found, x)
        low, high = found.entries()
        slopes = net.jacobian(net.mask(x))[0]  # the same numbers, added in another order
        assert (slopes >= low).all() and (slopes <= high).all() and (high - low).max() < 1e-10


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (-3.0, 1.0)])
def test_one_neuron_in_closed_form(low: float, high: float) -> None:
    graph = layers([[1.0]], [[1.0], [-2.0]])  # theta = (relu x, -2 relu x)
    bounds = crown(graph, Region.make((low, high), 1))
    assert [float(side) for side in bounds.spans[2]] == pytest.approx([low, high])
    upper = substitute(bounds, 3, torch.eye(2, dtype=torch.float64))
    # Above, the chord from (low, 0) to (high, high); below, the line of the smaller triangle: x or
    # 0.
    assert upper.tolist() == pytest.approx([high, -2 * low if high > -low else 0.0])
    found = gradients(bounds, torch.eye(2, dtype=torch.float64)).entries()
    assert [side.flatten().tolist() for side in found] == [
        pytest.approx([0.0, -2.0]),
        pytest.approx([1.0, 0.0]),
    ]


def test_the_absolute_value_in_closed_form() -> None:
    graph = layers([[1.0], [-1.0]], [[1.0, 1.0]])  # |x| = relu x + relu -x
    one = torch.ones(1, 1, dtype=torch.float64)
    bounds = crown(graph, Region.make((-1.0, 3.0), 1))
    # 3/4 (x + 1) + 1/4 (3 - x) = x / 2 + 3 / 2, which is 3 at x = 3; intervals say 3 + 1.
    assert float(substitute(bounds, 3, one)) == pytest.approx(3.0)
    for region in (Region.make((-1.0, 3.0), 1), Region.make(None, 1)):
        found = gradients(crown(graph, region), one)
        assert [float(side) for side in found.entries()] == pytest.approx([-1.0, 1.0])
        assert [float(found.norm(s, found.entries())) for s in NORMS] == pytest.approx(
            [1.0, 1.0, 1.0]
        )


def test_norms_of_independent_neurons_in_closed_form() -> None:
    graph = layers([[3.0, 0.0], [0.0, -4.0]], [[1.0, 1.0]])  # the gradient is (3 d1, -4 d2)
    for region in (Region.make((-1.0, 1.0), 2), Region.make(None, 2)):
        found = gradients(crown(graph, region), torch.ones(1, 1, dtype=torch.float64))
        assert [float(found.norm(s, found.entries())) for s in NORMS] == pytest.approx(
            [7.0, 5.0, 4.0]
        )


def test_the_substitution_of_a_whole_sum_sees_what_cancels() -> None:
    graph = layers(
        [[2.0, -1.0], [-1.0, 2.0]], [[1.0, 1.0]]
    )  # the gradient is (2 d1 - d2, 2 d2 - d1), each in [-1, 2]
    found = gradients(
        crown(graph, Region.make((-1.0, 1.0), 2)), torch.ones(1, 1, dtype=torch.float64)
    )
    entries = found.entries()
    assert [side.flatten().tolist() for side in entries] == [
        pytest.approx([-1.0, -1.0]),
        pytest.approx([2.0, 2.0]),
    ]
    # |g| <= (g + 4) / 3 and g^2 <= g + 2 on [-1, 2], and the two gradients add up to d1 + d2 <= 2.
    assert float(found.norm(1.0, entries)) == pytest.approx(10 / 3)
    assert float(found.norm(2.0, entries)) == pytest.approx(math.sqrt(6))


def test_the_bounds_do_not_depend_on_how_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network("pools")
    region = Region.make(where("box", graph.inputs), graph.inputs)
    eye = torch.eye(3, dtype=torch.float64)

    def everything() -> Iterator[Tensor]:
        bounds = crown(graph, region)
        for span in bounds.spans.values():
            yield from span
        found = gradients(bounds, eye)
        yield from found.entries()
        yield found.norm(1.0, found.entries())

    whole = list(everything())
    monkeypatch.setattr(propagate, "ROWS", 1)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(whole, everything()))


def test_a_dead_network_and_one_without_neurons() -> None:
    dead = layers([[1.0], [2.0]], [[1.0, 1.0]], bias=[[-5.0, -9.0], [0.25]])
    bounds = crown(dead, Region.make((0.0, 1.0), 1))
    found = gradients(bounds, torch.ones(1, 1, dtype=torch.float64))
    assert bounds.open == 0 and [float(v) for v in found.entries()] == [0.0, 0.0]
    assert float(substitute(bounds, 3, torch.ones(1, 1, dtype=torch.float64))) == pytest.approx(
        0.25
    )
    line = layers([[2.0, -1.0]])
    found = gradients(crown(line, Region.make(None, 2)), torch.ones(1, 1, dtype=torch.float64))
    assert [float(found.norm(s, found.entries())) for s in NORMS] == pytest.approx(
        [3.0, math.sqrt(5), 2.0]
    )


def test_a_neuron_that_stays_at_its_kink_has_one_derivative() -> None:
    graph = layers([[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0]])  # relu x + relu y with x frozen at 0
    bounds = crown(graph, Region.make((torch.zeros(2), torch.tensor([0.0, 1.0])), 2))
    least, top = bounds.derivative(2)
    assert (least <= top).all()
    x = torch.tensor([[0.0, 0.5]], dtype=torch.float64)
    check_gradients(gradients(bounds, torch.ones(1, 1, dtype=torch.float64)), x)


def too_low(
    lines: Callable[[Span, Tensor], tuple[Span, Span]],
) -> Callable[[Span, Tensor], tuple[Span, Span]]:
    def broken(span: Span, other: Tensor) -> tuple[Span, Span]:
        (up, shift), down = lines(span, other)
        return (up, 0 * shift), down

    return broken


@pytest.mark.parametrize("name", ["mlp", "deep", "blocks"])
def test_a_broken_relaxation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(name)
    region = Region.make(where("box", graph.inputs), graph.inputs)
    x = crowd(region)
    eye = torch.eye(graph.outputs, dtype=torch.float64)
    right = crown(graph, region)
    with monkeypatch.context() as patch:
        patch.setattr(propagate, "_value_lines", too_low(propagate._value_lines))
        with pytest.raises(AssertionError):
            check_values(crown(graph, region), x)
    monkeypatch.setattr(propagate, "_gradient_lines", too_low(propagate._gradient_lines))  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        check_gradients(gradients(right, eye), x)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_optimised_slopes_are_sound_and_never_looser(norm: float) -> None:
    """On a deep network the ascent on the lower lines must gain something, lose nothing, and
    leave out no sampled value.
    """
    generator = torch.Generator().manual_seed(11)
    layers = [
        nn.Linear(5, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.LeakyReLU(0.1),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    ]
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        parameter.data = (
            torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            / parameter.shape[-1] ** 0.5
        )
    graph = read(model, (5,))
    region = Region.make(Ball(torch.full((5,), 0.5), 0.4, norm, (0.0, 1.0)), 5)
    plain = crown(graph, region)
    best = crown(graph, region, steps=10)
    values = graph.values(region.sample(4000, torch.Generator().manual_seed(0)))
    gained = 0.0
    for i in graph.relus:
        (low, high), (tight_low, tight_high) = plain.spans[i], best.spans[i]
        assert (tight_low >= low).all() and (tight_high <= high).all()
        v = values[graph.nodes[i].inputs[0]]
        assert (v >= tight_low).all() and (v <= tight_high).all()
        gained += float((tight_low - low).sum() + (high - tight_high).sum())
    assert gained > 1e-3
