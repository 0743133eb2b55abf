import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from support import values
from support.graphs import MAKE, NORMS, crowd, layers, network, where
from support.networks import jacobian
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.relax import jacobian as bounds_by_jacobian
from wassail.certificates.relax.jacobian import Gradients, gradients
from wassail.certificates.relax.ranges import Bounds, Span, bounds_on, upper_on

KINDS = ["box", "l1", "l2 in a box", "linf", "R^n"]


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
        assert ((found[-1] @ rows.T).amax(0) <= upper_on(graph, bounds.region, rows)).all()


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


@pytest.mark.few(13)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKE)
def test_values_and_gradients_of_many_points_lie_within_their_bounds(name: str, kind: str) -> None:
    graph = network(name)
    region = Region.make(where(kind, graph.inputs), graph.inputs)
    plain = values.intervals(graph, region)
    sharp = bounds_on(graph, region)
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
    bounds = bounds_on(graph, region)
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
        bounds_on(graph, Region.make(Ball(ball.centre, 0.01, math.inf), graph.inputs)).open
        <= bounds.open
    )


@pytest.mark.parametrize("name", ["mlp", "leaky", "convolutions", "blocks", "pools", "clamps"])
def test_without_an_undecided_neuron_everything_is_exact(name: str) -> None:
    graph = network(name)
    centre = torch.rand(
        graph.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(8)
    )
    region = Region.make(Ball(centre, 1e-7, 2), graph.inputs)
    bounds = bounds_on(graph, region)
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
    upper = upper_on(graph, bounds.region, eye)
    assert torch.allclose(upper, graph.logits(x)[0] + 1e-7 * slopes.norm(dim=1), rtol=0, atol=1e-12)


@pytest.mark.few(4)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "deep", "convolutions", "blocks"])
def test_rounding_errors_stay_within_the_bounds_of_a_single_point(name: str, norm: float) -> None:
    graph = network(name)
    g = torch.Generator().manual_seed(12)
    net = graph.piecewise()
    eye = torch.eye(graph.outputs, dtype=torch.float64)
    for _ in range(5):
        x = 100 * torch.randn(1, graph.inputs, dtype=torch.float64, generator=g)
        bounds = bounds_on(graph, Region.make(Ball(x[0], 0.0, norm), graph.inputs))
        check_values(bounds, x)
        found = gradients(bounds, eye)
        check_gradients(found, x)
        low, high = found.entries()
        slopes = net.jacobian(net.mask(x))[0]  # the same numbers, added in another order
        assert (slopes >= low).all() and (slopes <= high).all() and (high - low).max() < 1e-10


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (-3.0, 1.0)])
def test_one_neuron_in_closed_form(low: float, high: float) -> None:
    graph = layers([[1.0]], [[1.0], [-2.0]])  # theta = (relu x, -2 relu x)
    bounds = bounds_on(graph, Region.make((low, high), 1))
    assert [float(side) for side in bounds.spans[2]] == pytest.approx([low, high])
    upper = upper_on(graph, bounds.region, torch.eye(2, dtype=torch.float64))
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
    bounds = bounds_on(graph, Region.make((-1.0, 3.0), 1))
    # 3/4 (x + 1) + 1/4 (3 - x) = x / 2 + 3 / 2, which is 3 at x = 3; intervals say 3 + 1.
    assert float(upper_on(graph, bounds.region, one)) == pytest.approx(3.0)
    for region in (Region.make((-1.0, 3.0), 1), Region.make(None, 1)):
        found = gradients(bounds_on(graph, region), one)
        assert [float(side) for side in found.entries()] == pytest.approx([-1.0, 1.0])
        assert [float(found.norm(s, found.entries())) for s in NORMS] == pytest.approx(
            [1.0, 1.0, 1.0]
        )


def test_norms_of_independent_neurons_in_closed_form() -> None:
    graph = layers([[3.0, 0.0], [0.0, -4.0]], [[1.0, 1.0]])  # the gradient is (3 d1, -4 d2)
    for region in (Region.make((-1.0, 1.0), 2), Region.make(None, 2)):
        found = gradients(bounds_on(graph, region), torch.ones(1, 1, dtype=torch.float64))
        assert [float(found.norm(s, found.entries())) for s in NORMS] == pytest.approx(
            [7.0, 5.0, 4.0]
        )


def test_the_substitution_of_a_whole_sum_sees_what_cancels() -> None:
    graph = layers(
        [[2.0, -1.0], [-1.0, 2.0]], [[1.0, 1.0]]
    )  # the gradient is (2 d1 - d2, 2 d2 - d1), each in [-1, 2]
    found = gradients(
        bounds_on(graph, Region.make((-1.0, 1.0), 2)), torch.ones(1, 1, dtype=torch.float64)
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
        bounds = bounds_on(graph, region)
        for span in bounds.spans.values():
            yield from span
        found = gradients(bounds, eye)
        yield from found.entries()
        yield found.norm(1.0, found.entries())

    whole = list(everything())
    monkeypatch.setattr(bounds_by_jacobian, "ROWS", 1)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(whole, everything()))


def test_a_dead_network_and_one_without_neurons() -> None:
    dead = layers([[1.0], [2.0]], [[1.0, 1.0]], bias=[[-5.0, -9.0], [0.25]])
    bounds = bounds_on(dead, Region.make((0.0, 1.0), 1))
    found = gradients(bounds, torch.ones(1, 1, dtype=torch.float64))
    assert bounds.open == 0 and [float(v) for v in found.entries()] == [0.0, 0.0]
    above = upper_on(dead, bounds.region, torch.ones(1, 1, dtype=torch.float64))
    assert float(above) == pytest.approx(0.25)
    line = layers([[2.0, -1.0]])
    found = gradients(bounds_on(line, Region.make(None, 2)), torch.ones(1, 1, dtype=torch.float64))
    assert [float(found.norm(s, found.entries())) for s in NORMS] == pytest.approx(
        [3.0, math.sqrt(5), 2.0]
    )


def test_a_neuron_that_stays_at_its_kink_has_one_derivative() -> None:
    graph = layers([[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0]])  # relu x + relu y with x frozen at 0
    bounds = bounds_on(graph, Region.make((torch.zeros(2), torch.tensor([0.0, 1.0])), 2))
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
    right = bounds_on(graph, region)
    lower = too_low(bounds_by_jacobian._gradient_lines)  # type: ignore[arg-type]
    monkeypatch.setattr(bounds_by_jacobian, "_gradient_lines", lower)
    with pytest.raises(AssertionError):
        check_gradients(gradients(right, eye), x)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_optimised_slopes_are_sound_and_tighter(norm: float) -> None:
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
    plain = bounds_on(graph, region)
    best = bounds_on(graph, region, steps=10)
    values = graph.values(region.sample(4000, torch.Generator().manual_seed(0)))
    gained = 0.0
    for i in graph.relus:
        (low, high), (tight_low, tight_high) = plain.spans[i], best.spans[i]
        # A decided neuron is bounded no further; at l1 vertices bound some without steps.
        undecided = best.unstable(i) & (norm > 1)
        assert (tight_low >= low)[undecided].all() and (tight_high <= high)[undecided].all()
        v = values[graph.nodes[i].inputs[0]]
        assert (v >= tight_low).all() and (v <= tight_high).all()
        gained += float((tight_low - low).sum() + (high - tight_high).sum())
    assert gained > 1e-3
