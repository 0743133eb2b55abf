"""Work that is left out: it changes no bound and no proof."""

import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.reader import read
from wassail.certificates.prove import ladder
from wassail.certificates.relax import backward
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margin_bounds, margins

BOX = (0.0, 1.0)


def sleepy(samples: int) -> tuple[nn.Module, Graph, Tensor, Tensor]:
    """A perceptron most of whose first neurons are never active, with samples and its classes."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 5)
    )
    with torch.no_grad():
        model[0].bias[:45] -= 4
    x = torch.rand(samples, 20)
    return model.eval(), read(model, (20,)), x, model(x).argmax(1)


def around(graph: Graph, x: Tensor, y: Tensor) -> Tensor:
    """Radii on both sides of those that the steps just prove."""
    edge = ws.radii(graph, x, y, math.inf, BOX, "crown").values
    return edge * torch.linspace(0.8, 1.2, len(x), dtype=torch.float64)


@pytest.mark.parametrize("norm", [math.inf, 2.0])
def test_neurons_that_are_never_active_are_left_out(
    norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graph, x, y = sleepy(1)
    balls = Balls.make(x, torch.tensor([0.5]), norm, BOX)
    sweep = Sweep(graph, balls).run()
    known = [rows for rows in sweep.awake.values() if rows is not None]
    assert known and all(len(rows) < 20 for rows in known)
    found = margins(sweep, y)[0]
    monkeypatch.setattr(backward, "FULL", 0.0)
    every = Sweep(graph, balls).run()
    assert not any(rows is not None for rows in every.awake.values())
    assert torch.allclose(found, margins(every, y)[0], rtol=1e-9, atol=1e-12)


def test_steps_only_where_a_margin_is_open() -> None:
    _, graph, x, y = sleepy(24)
    radius = around(graph, x, y)
    every = margin_bounds(graph, x, y, radius, math.inf, BOX)
    some = margin_bounds(graph, x, y, radius, math.inf, BOX, polish="open")
    none = margin_bounds(graph, x, y, radius, math.inf, BOX, polish="none")
    assert (none <= every).all()
    assert torch.equal(some > 0, every > 0)
    done = none > 0
    left = ~done & (none < 0)
    assert torch.equal(some[done], none[done])
    assert torch.allclose(some[left], every[left], rtol=1e-5, atol=1e-5)
    assert (every[left] > 0).any()  # the steps prove something
    assert (every[done] > none[done] + 1e-6).any()  # and would have moved what is proved


def test_verification_is_the_same_with_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph, x, y = sleepy(24)
    at = around(graph, x, y)
    threat = ws.Threat(math.inf, math.inf, 0.1, BOX)
    found = ws.verify(model, x, y, threat, "crown", at=at).proved
    asked = []

    def all_of_them(sweep: Sweep, labels: Tensor, polish: str) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(polish)
        return margins(sweep, labels)

    monkeypatch.setattr(ladder, "margins", all_of_them)
    assert torch.equal(ws.verify(model, x, y, threat, "crown", at=at).proved, found)
    assert set(asked) == {"open"}
    assert found.any() and not found.all()


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_terms_of_a_transposed_convolution(stride: int, dilation: int, groups: int) -> None:
    """As many as entries of the matrix in a column: ones, added up."""
    for size in (1, 2, 3, 4):
        kernel = torch.ones(6, 4 // groups, size, size, dtype=torch.float64)
        pair = (stride, stride)
        conv = Conv(kernel, (4, 23, 23), pair, (1, 1), (dilation, dilation), groups)
        image = conv.forward(torch.ones(1, 4, 23, 23, dtype=torch.float64))
        (count,) = conv.transpose(torch.ones_like(image))
        assert int(count.max()) == conv.back_terms - 4
        assert conv.back_terms <= conv.terms


def test_terms_of_a_transposed_matrix() -> None:
    ones = torch.ones(7, 50, dtype=torch.float64)
    (count,) = Matrix(ones).transpose(torch.ones(1, 7, dtype=torch.float64))
    assert int(count.max()) == Matrix(ones).back_terms - 4
