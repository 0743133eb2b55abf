"""Products of norms beyond a ball: networks that do not stretch, in both arithmetics."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.rounding import MODES, rounded
from wassail.certificates import clock
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.reader import read
from wassail.certificates.prove import products
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.products import product_radii
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.executed import arithmetic_of, margin_errors
from wassail.certificates.relax.norms import Reach

SIZE = 48


class Sorted(nn.Module):
    """Pairs of entries, each sorted."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unflatten(1, (-1, 2)).unbind(2)
        return torch.stack([torch.minimum(a, b), torch.maximum(a, b)], 2).flatten(1)


def isometric(rows: int, columns: int, generator: torch.Generator) -> nn.Linear:
    """Orthonormal rows, in float64, rounded to float32."""
    q = torch.linalg.qr(torch.randn(columns, rows, generator=generator).double())[0].T
    layer = nn.Linear(columns, rows)
    with torch.no_grad():
        layer.weight.copy_(q)
        layer.bias.copy_(0.1 * torch.randn(rows, generator=generator))
    return layer


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that does not stretch, with samples and the classes that it gives them."""
    generator = torch.Generator().manual_seed(5)
    sizes = (SIZE, 64, 40, 10)
    layers: list[nn.Module] = []
    for columns, rows in pairwise(sizes):
        wide = isometric(min(rows, columns), max(rows, columns), generator)
        layer = nn.Linear(columns, rows)
        with torch.no_grad():
            layer.weight.copy_(wide.weight if rows <= columns else wide.weight.T)
            layer.bias.copy_(0.1 * torch.randn(rows, generator=generator))
        layers += [layer, Sorted()]
    model = nn.Sequential(*layers[:-1]).eval()
    x = torch.rand(6, SIZE, generator=generator)
    with torch.no_grad():
        return model, x, model(x).argmax(1)


def margin(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        top = model.double()(x.double()).topk(2).values
    model.float()
    return top[:, 0] - top[:, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("arithmetic", ["exact", "executed"])
def test_no_radius_is_below_the_margin_over_the_constant(
    network: tuple[nn.Module, Tensor, Tensor], arithmetic: str
) -> None:
    """Nothing says that the network is 1-Lipschitz. Every flip is farther, and what is proved is
    proved again.
    """
    model, x, y = network
    simple = margin(model, x) / math.sqrt(2)
    found = ws.radii(model, x, y, 2, (0.0, 1.0), "ball", arithmetic=arithmetic).values
    assert (found > simple).all() and (found > 1.02 * simple).any()
    flips = ws.nearest(model, x, y, 2, (0.0, 1.0), passes=60).distances
    assert (found <= flips).all()
    threat = ws.Threat(2, math.inf, float(found.max()), (0.0, 1.0))
    assert ws.verify(model, x, y, threat, "ball", arithmetic=arithmetic, at=found).proved.all()


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_a_ball_and_products_beyond_it(
    network: tuple[nn.Module, Tensor, Tensor], norm: float
) -> None:
    """Better than the products alone, and in any batch the same."""
    model, x, y = network
    problem = Problem.of(model, x, y, norm, (0.0, 1.0), "executed")
    zero = torch.zeros(len(x)).double()
    alone = product_radii(problem, zero, zero)
    found = product_radii(problem, alone)
    assert (found > alone).all()
    assert (found <= ws.nearest(model, x, y, norm, (0.0, 1.0), passes=60).distances).all()
    some = torch.tensor([3, 4])
    again = product_radii(problem.take(some), alone[some])
    assert torch.allclose(again, found[some], rtol=1e-12)
    far = product_radii(problem, 5 * alone)
    assert not far.any(), "far beyond the products nothing is tried"


def test_the_radius_of_a_linear_classifier_is_its_distance() -> None:
    """Margins and norms are exact, so the radius is, wherever the ball ends; not beyond."""
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double()
    graph = Graph(
        (
            Node((), (2,), "the input"),
            Node((0,), (2,), "", Affine(Matrix(weight), torch.tensor([-2.0, 0.0]).double())),
        )
    )
    x = torch.tensor([[1.0, 1.0]]).double()
    y = torch.tensor([0])
    problem = Problem.of(graph, x, y, 2.0, None)
    found = float(product_radii(problem, torch.tensor([0.9]).double()))
    assert 1 - 1e-8 < found < 1


def test_what_rounding_may_take_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins of 1 on every ball, a slope of 1: a slack of 1/4 leaves 3/4 beyond the ball, and one
    of 1 nothing. A ball whose margins are not positive gives nothing, however steep the rest.
    """
    graph = Graph((Node((), (2,), "the input"),))
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double()
    problem = Problem.of(graph, x, torch.tensor([0, 0]), 2.0, None)
    lowest = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).double()
    monkeypatch.setattr(products, "pair_products", lambda *rest: torch.tensor([0.0, 1.0]))
    monkeypatch.setattr(Problem, "bounds", lambda *rest: lowest)
    for slack, wanted in ((None, 1.5), (0.25, 0.75 * 1.5), (1.0, 0.0)):
        taken = None if slack is None else torch.full((2, 2), slack).double()
        monkeypatch.setattr(Problem, "slack", lambda *rest, taken=taken: taken)
        found = product_radii(problem, torch.ones(2).double())
        assert torch.allclose(found, torch.full((2,), wanted).double(), rtol=1e-8)
        assert (found < wanted).all() or not wanted


def test_slopes_without_a_bound_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump has no Lipschitz constant: every product is infinite, that of the label too."""
    graph = Graph((Node((), (2,), "the input"),))
    x = torch.tensor([[1.0, 0.0]]).double()
    problem = Problem.of(graph, x, torch.tensor([0]), 2.0, None)
    far = torch.full((2,), math.inf).double()
    monkeypatch.setattr(products, "pair_products", lambda *rest: far)
    assert product_radii(problem, torch.zeros(1).double()).tolist() == [0.0]


def test_the_clock_leaves_what_was_not_done_at_zero(
    network: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = network
    problem = Problem.of(model, x, y, 2.0, (0.0, 1.0), "exact")
    with clock.limited(0.0):
        assert not product_radii(problem, torch.ones(len(x)).double()).any()


@pytest.mark.parametrize("mode", MODES)
def test_lengths_of_errors_at_the_margins(
    network: tuple[nn.Module, Tensor, Tensor], mode: str
) -> None:
    """Errors go to the margins by their length; executed margins of points of the ball stay within
    them, and they are less than entry by entry.
    """
    model, x, y = network
    graph = arithmetic_of(read(model, (SIZE,)), "executed")
    balls = Balls.make(x, torch.full((len(x),), 0.5), 2.0, (0.0, 1.0))
    with rounded(mode):
        error = Reach(graph, balls).run().margin_errors(y)
    generator = torch.Generator().manual_seed(6)
    step = torch.randn(60, len(x), SIZE, generator=generator)
    step = 0.49 * step / step.norm(dim=2, keepdim=True)
    points = (x + step).clamp(0, 1).flatten(0, 1)
    labels = y.repeat(60)[:, None]
    with torch.no_grad():
        z = model(points).double()
    precise = graph.logits(points)
    apart = (z.gather(1, labels) - z) - (precise.gather(1, labels) - precise)
    assert (apart.abs() <= error.repeat(60, 1) + 1e-12).all() and apart.abs().max() > 0
    sweep = Sweep(graph, balls).run()
    entries = sweep.cones
    sweep.cones = None
    alone = margin_errors(sweep, y)
    sweep.cones = entries
    assert (margin_errors(sweep, y) <= alone).all()
    assert (margin_errors(sweep, y) < 0.8 * alone).any()


@pytest.mark.parametrize("last", ["matrix", "relu"])
def test_logits_of_any_kind_have_lengths_of_errors(last: str) -> None:
    torch.manual_seed(2)
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers, *([nn.ReLU()] if last == "relu" else [])).eval()
    graph = arithmetic_of(read(model, (6,)), "executed")
    x = torch.rand(2, 6)
    y = torch.tensor([0, 2])
    found = Reach(graph, Balls.make(x, torch.ones(2), 2.0, None)).run().margin_errors(y)
    with torch.no_grad():
        z = model(x).double()
    precise = graph.logits(x)
    apart = (z.gather(1, y[:, None]) - z) - (precise.gather(1, y[:, None]) - precise)
    assert (apart.abs() <= found).all()
    assert (found.gather(1, y[:, None]) == 0).all() and (found > 0).sum() == 4
    assert found.max() < 1e-4
