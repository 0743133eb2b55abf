"""Bounds in windows beside those by whole images."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from wassail.certificates.graph.graph import Graph, Relu, Smooth
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.windows import InputLooks, InputWindows, Looks, Windows

SHAPE = (2, 12, 11)
RADII = {1.0: 0.6, 2.0: 0.2, math.inf: 0.03}


def network(activation: nn.Module, seed: int = 0) -> nn.Module:
    """Two convolutions of odd shapes, and what follows."""
    torch.manual_seed(seed)
    first = nn.Conv2d(2, 3, (3, 2), (1, 2), (2, 1))
    second = nn.Conv2d(3, 4, (2, 3), (2, 1), (1, 2))
    net = nn.Sequential(
        first, activation, second, activation, nn.Flatten(), nn.LazyLinear(3)
    ).eval()
    with torch.no_grad():
        net(torch.zeros(1, *SHAPE))
    return net


def second_convolution(graph: Graph) -> int:
    """The input of the second activation."""
    acts = [i for i, node in enumerate(graph.nodes) if isinstance(node.op, Relu | Smooth)]
    return graph.nodes[acts[1]].inputs[0]


def spans(graph: Graph, x: Tensor, norm: float, steps: int = 0) -> tuple[Tensor, Tensor]:
    radius = torch.full((len(x),), RADII[norm], dtype=torch.float64)
    sweep = Sweep(graph, Balls.make(x, radius, norm, (0.0, 1.0)), steps).run()
    return sweep.spans[second_convolution(graph)]


@pytest.mark.few(3)
@pytest.mark.slow_cases("activation2-2.0", "activation2-1.0", "activation1-1.0")
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Sigmoid()])
def test_windows_give_the_bounds_of_whole_images(
    activation: nn.Module, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding; samples in one group or each on its own; and intervals give less."""
    graph = read(network(activation), SHAPE, smooth=True)
    x = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1))
    x[:, :, :4] = 0.0  # at a wall
    assert Windows.of(graph, second_convolution(graph)) is not None
    found = spans(graph, x, norm)
    with monkeypatch.context() as patch:
        patch.setattr("wassail.certificates.relax.rows.CHUNK", 1)
        alone = spans(graph, x, norm)
    with monkeypatch.context() as patch:
        patch.setattr(Windows, "of", lambda *given: None)
        whole = spans(graph, x, norm)
    wide = (whole[1] - whole[0]).max()
    for one, other, third in zip(found, whole, alone):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * float(wide))
        assert torch.allclose(one, third, rtol=1e-6, atol=1e-6 * float(wide))


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_windows_of_the_input_give_the_bounds_of_whole_images(
    norm: float, dilation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first convolution, up to the slack for rounding in float32."""
    net = network(nn.ReLU())
    net[0].dilation = (dilation, 1)
    net[0].padding = (1 + dilation, 1)
    graph = read(net, SHAPE)
    x = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1))
    x[:, :, :4] = 0.0  # at a wall
    balls = Balls.make(x, torch.full((3,), RADII[norm], dtype=torch.float64), norm, (0.0, 1.0))
    assert InputWindows.at(graph, 1) is not None and InputWindows.at(graph, 2) is None
    found = Sweep(graph, balls).run().spans[1]
    with monkeypatch.context() as patch:
        patch.setattr(InputWindows, "at", lambda *given: None)
        whole = Sweep(graph, balls).run().spans[1]
    wide = float((whole[1] - whole[0]).max())
    for one, other in zip(found, whole):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * wide)


@pytest.mark.parametrize("samples", [1, 3])
def test_lengths_of_rows_in_windows_are_those_of_whole_images(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What slope cones make of the rows of the second convolution, up to rounding."""
    graph = read(network(nn.ReLU()), SHAPE)
    x = torch.rand(samples, *SHAPE, generator=torch.Generator().manual_seed(1))
    x[:, :, :4] = 0.0
    radius = torch.full((samples,), RADII[2.0], dtype=torch.float64)
    balls = Balls.make(x, radius, 2.0, (0.0, 1.0))
    found = Sweep(graph, balls).run().cones
    with monkeypatch.context() as patch:
        patch.setattr(Windows, "of", lambda *given: None)
        whole = Sweep(graph, balls).run().cones
    assert found is not None and whole is not None
    seen, other = (cones.layers[max(cones.layers)] for cones in (found, whole))
    assert torch.isfinite(seen.eps).all() and seen.direct.all() and list(seen.links) == [2]
    for one, two in (
        (seen.eps, other.eps),
        (seen.links[2], other.links[2]),
        (seen.rest, other.rest),
    ):
        assert torch.allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_no_point_of_a_ball_leaves_the_spans(norm: float) -> None:
    """Random points and corners, and the points that gradients lead to."""
    net = network(nn.ReLU(), 3)
    graph = read(net, SHAPE)
    j = second_convolution(graph)
    x = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(2)).double()
    low, high = spans(graph, x, norm)
    centre = graph.values(x)[j]
    part = net[:3].double()
    closest = 0.0
    for k in range(0, centre[0].numel(), 7):
        for sign in (1.0, -1.0):
            point = x.clone()
            for _ in range(3):
                point.requires_grad_(True)
                value = sign * part(point).flatten(1)[:, k]
                (pull,) = torch.autograd.grad(value.sum(), point)
                flat = pull.flatten(1)
                if norm == math.inf:
                    step = flat.sign()
                elif norm == 2:
                    step = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-30)
                else:
                    top = flat.abs().argmax(1, keepdim=True)
                    step = torch.zeros_like(flat).scatter(1, top, flat.gather(1, top).sign())
                point = (x + (RADII[norm] * step).reshape(x.shape)).clamp(0, 1).detach()
            moved = (part(point) - centre).flatten(1)[:, k].detach()
            assert (moved <= high.flatten(1)[:, k] + 1e-9).all()
            assert (moved >= low.flatten(1)[:, k] - 1e-9).all()
            reach = high.flatten(1)[:, k] if sign > 0 else -low.flatten(1)[:, k]
            closest = max(closest, float((sign * moved / reach.clamp(min=1e-9)).max()))
    assert closest > 0.7


def test_windows_pay_for_the_errors_of_their_own_convolution() -> None:
    """Weights that may be wrong, here all of both convolutions one way: at a sample alone the value
    of the second is off by both.
    """
    off = 1e-6
    net = network(nn.ReLU(), 4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    graph = read(net, SHAPE)
    j = second_convolution(graph)
    graph = replace(graph, nodes=graph.nodes[: j + 1], rounding=off)
    windows = Windows.of(graph, j)
    assert windows is not None
    x = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(5)).double()
    sweep = Sweep(graph, Balls.make(x, torch.zeros(1).double(), math.inf, None)).run()
    place = torch.arange(graph.nodes[j].size)
    owner = torch.zeros_like(place)
    more = 1 + off
    first = net[0].double()(x)
    wrong = net[2].double()(first * more) * more
    apart = (wrong - graph.values(x)[j]).detach().flatten()
    for kind in (sweep.fast, sweep.exact):
        looks = Looks(windows, j, kind, sweep.balls, slice(0, 1))
        assert (looks.between(owner, place)[1] >= apart).all()
        assert (looks.above(owner, place)[: len(place)] >= apart).all()
    first = InputWindows.at(graph, 1)
    assert first is not None
    start = torch.arange(graph.nodes[1].size)
    small = replace(graph, nodes=graph.nodes[:2])  # where the errors of node 1 are still its own
    alone = Sweep(small, Balls.make(x, torch.zeros(1).double(), math.inf, None)).run()
    shifted = (net[0].double()(x) * off).detach().abs().flatten()
    for kind in (alone.fast, alone.exact):
        sees = InputLooks(first, 1, kind, alone.balls, slice(0, 1))
        assert (sees.between(torch.zeros_like(start), start)[1] >= shifted).all()
        assert (sees.above(torch.zeros_like(start), start) >= shifted.repeat(2)).all()
    cones = Sweep(graph, Balls.make(x, torch.zeros(1).double(), 2.0, None)).run().cones
    assert cones is not None
    view = cones._view(j, 0, 1)
    assert view is not None
    assert (cones._between(view.pull(owner, place), owner, place, view)[1] >= apart).all()


def test_where_there_are_no_windows() -> None:
    """Groups, dilated kernels, kernels as large as the image, and the first convolution."""
    for first, second in (
        (nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 3)),
        (nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 2, dilation=2)),
        (nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 8)),
    ):
        net = nn.Sequential(
            first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
        ).eval()
        with torch.no_grad():
            net(torch.zeros(1, *SHAPE))
        graph = read(net, SHAPE)
        assert Windows.of(graph, second_convolution(graph)) is None
        assert Windows.of(graph, 1) is None


@pytest.mark.parametrize("scale", [1.0, 2.0**-500])
def test_what_cannot_move_adds_nothing_alone_or_in_a_batch(scale: float) -> None:
    """An entry at a wall that is pushed against it, beside samples with more near walls."""
    x = torch.full((3, 6), 0.5, dtype=torch.float64)
    x[1, :3] = 0.0
    x[2] = 0.01
    balls = Balls.make(x, torch.full((3,), 0.2, dtype=torch.float64), 2.0, (0.0, 1.0))
    rows = torch.tensor([[-2.0, -1.0, 0, 0, 0, 0], [-2.0, 0, 0, 3.0, 0, 4.0]]) * scale
    rows = rows.double()
    alone = balls.take(torch.tensor([1])).upper(rows, torch.tensor([0]))
    together = balls.upper(torch.cat([rows, rows]), torch.tensor([1, 1, 2, 2]))[:2]
    assert torch.equal(alone, together)
    assert alone[0] == 0 and alone[1] == pytest.approx(5 * scale * 0.2)
