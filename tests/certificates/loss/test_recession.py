"""The recession function of smooth networks, the piecewise-linear networks that shadow them,
and their ranges over R^n.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Smooth
from wassail.certificates.graph.maps import Concat, Matrix, Sum
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.reader import read
from wassail.certificates.loss.recession import highest, recession, shadow, spans
from wassail.errors import InputError

LIKE_RELU = ("gelu", "gelu_tanh", "silu", "softplus", "elu")
BOUNDED = ("tanh", "sigmoid")
ALL = LIKE_RELU + BOUNDED


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(model: nn.Module, seed: int) -> nn.Module:
    """Random weights that do not depend on the global state; LayerNorm's gains and biases
    included.
    """
    generator = torch.Generator().manual_seed(seed)
    for p in model.double().parameters():
        p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator) / math.sqrt(
            p.shape[-1]
        )
    return model.eval()


class Transformer(nn.Module):
    """Three tokens of four numbers, one encoder layer, mean pooling."""

    def __init__(self, norm_first: bool, final: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=norm_first
        )
        self.norm = nn.LayerNorm(8) if final else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embed(x.reshape(-1, 3, 4)))).mean(1))


def residual_graph(name: str, skip: bool, norm: bool = False, seed: int = 0) -> Graph:
    """`head(x + b(f(a(x))))`, or without the way around f, with random weights; by hand,
    because exporting takes long.
    """
    layers = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3), nn.Linear(3, 4))
    filled(layers, seed)
    a, b, head = ((Matrix(m.weight.detach()), m.bias.detach()) for m in layers)
    nodes = [
        Node((), (3,), "input"),
        Node((0,), (7,), "a", Affine(*a)),
        Node((1,), (7,), "f", Smooth(name)),
        Node((2,), (3,), "b", Affine(*b)),
    ]
    if skip:
        nodes.append(Node((0, 3), (3,), "sum", Affine(Sum(2))))
    if norm:
        nodes.append(Node((len(nodes) - 1,), (3,), "norm", Curved(Normalise(1e-5))))
    return Graph((*nodes, Node((len(nodes) - 1,), (4,), "head", Affine(*head))))


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def check_limit(graph: Graph, found: Graph | None, seed: int) -> None:
    """`theta(x + t u) / t -> theta0(u)`, at the rate 1 / t."""
    x, u = (
        normal(20, *graph.nodes[0].shape, seed=seed),
        normal(20, *graph.nodes[0].shape, seed=seed + 1),
    )
    truth = torch.zeros(20, graph.outputs).double() if found is None else found.logits(u)
    far = [float((graph.logits(x + t * u) / t - truth).abs().max()) for t in (1e5, 1e8)]
    assert far[1] < 1e-6 * (1 + float(truth.abs().max())) and far[1] < 1.1e-3 * far[0] + 1e-12


@pytest.mark.parametrize("name", LIKE_RELU)
def test_one_unit_is_a_relu(name: str) -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    nodes = (
        Node((), (1,), "input"),
        Node((0,), (1,), "in", Affine(Matrix(3 * one), one[0])),
        Node((1,), (1,), "f", Smooth(name)),
        Node((2,), (1,), "out", Affine(Matrix(2 * one), -5 * one[0])),
        Node((3, 0), (2,), "both", Affine(Concat(1, (1, 1)))),
    )
    found = recession(Graph(nodes))
    assert found is not None
    u = torch.tensor([[-2.0], [-0.5], [0.0], [4.0]]).double()
    torch.testing.assert_close(found.logits(u), torch.cat([6 * u.clamp(min=0), u], 1))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_limits_along_rays(name: str, skip: bool, norm: bool) -> None:
    graph = residual_graph(name, skip, norm, seed=3)
    found = recession(graph)
    assert (found is None) == (norm or (name in BOUNDED and not skip))
    check_limit(graph, found, seed=11)


def test_what_is_zero_disappears() -> None:
    graph = residual_graph("tanh", skip=True)
    found = recession(graph)
    head = graph.nodes[-1].map
    assert found is not None and len(found.nodes) == 2 and found.neurons == 0  # the head alone
    assert isinstance(head, Matrix)
    torch.testing.assert_close(found.logits(torch.eye(3).double()), head.weight.T)


def test_concatenation_with_a_bounded_part() -> None:
    weight = normal(3, 5, seed=2)
    model = Function(lambda x: torch.cat([torch.tanh(x), F.gelu(x), x[:, :1]], 1))
    graph = read(model, (2,), smooth=True).head(weight)
    found = recession(graph)
    assert found is not None
    u = normal(6, 2, seed=5)
    torch.testing.assert_close(
        found.logits(u), torch.cat([u.clamp(min=0), u[:, :1]], 1) @ weight[:, 2:].T
    )
    check_limit(graph, found, seed=4)


def test_weights_of_zero_do_not_grow() -> None:
    layer = nn.Linear(2, 3).double()
    layer.weight.data.zero_()
    assert (
        recession(
            read(nn.Sequential(layer, nn.GELU(), filled(nn.Linear(3, 2), 1)), (2,), smooth=True)
        )
        is None
    )


def test_piecewise_linear_networks_are_their_own_shadow() -> None:
    model = filled(
        nn.Sequential(
            nn.Linear(3, 6), nn.LeakyReLU(0.2), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
        ),
        seed=1,
    )
    graph = read(model, (3,))
    u = normal(10, 3, seed=2)
    found = recession(graph)
    assert found is not None and not shadow(graph).own
    torch.testing.assert_close(found.logits(u), graph.homogeneous().logits(u))


@pytest.mark.parametrize(("norm_first", "final"), [(True, False), (True, True), (False, False)])
def test_transformers(norm_first: bool, final: bool) -> None:
    """Pre-LN without a final norm keeps head after embedding through the residual stream; the
    others do not grow.
    """
    model = filled(Transformer(norm_first, final), seed=6)
    graph = read(model, (12,), smooth=True)
    found = recession(graph)
    check_limit(graph, found, seed=1)
    assert (found is None) == (final or not norm_first)
    if found is not None:
        assert isinstance(model, Transformer)
        u = normal(4, 12, seed=8)
        linear = u.reshape(-1, 3, 4).mean(1) @ (model.head.weight @ model.embed.weight).T
        torch.testing.assert_close(found.logits(u), linear.detach())
        assert found.neurons == 0


def test_attention_without_a_normalisation_is_refused() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.reshape(-1, 3, 4)
            return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))

    gate = Node((0, 1), (2,), "the gate", Curved(Product("i,i->i")))
    gated = Graph((Node((), (2,), "input"), Node((0,), (2,), "f", Smooth("sigmoid")), gate))
    for graph in (read(filled(Attention(), seed=0), (12,), smooth=True), gated):
        with pytest.raises(InputError, match=r"not Lipschitz on R\^n: give a domain") as caught:
            recession(graph)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LIKE_RELU)
def test_the_shadow_is_as_far_as_it_says(name: str) -> None:
    """One unit: the error is the activation's distance to the ReLU, attained; and a margin sees
    the difference of two heads.
    """
    unit = Graph((Node((), (1,), "input"), Node((0,), (1,), "f", Smooth(name))))
    graph = unit.head(torch.tensor([[1.0], [3.0]]))
    found = shadow(graph)
    x = torch.linspace(-40, 40, 80001).double()[:, None]
    far = (graph.logits(x) - found.graph.logits(x)).diff(dim=1).abs().max()
    bound = found.margin_error(0)
    assert bound[0] == 0 and far <= bound[1] <= far * 1.001 + 1e-3


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("skip", [True, False])
def test_the_shadow_is_never_left(name: str, skip: bool) -> None:
    graph = residual_graph(name, skip, seed=7)
    found = shadow(graph)
    far = recession(graph)
    for scale in (0.1, 1.0, 10.0, 1e3):
        x = scale * normal(400, 3, seed=9)
        zero = torch.zeros(400, graph.outputs).double()
        parts = (graph.logits(x), found.graph.logits(x), zero if far is None else far.logits(x))
        for k in range(graph.outputs):
            z, flat, ray = (part - part[:, k : k + 1] for part in parts)
            assert ((z - flat).abs() <= found.margin_error(k) + 1e-9).all()
            assert ((z - ray).abs() <= found.drift(k) + 1e-9).all()


@pytest.mark.parametrize("name", ALL)
def test_ranges_over_all_of_space(name: str) -> None:
    graph = residual_graph(name, skip=False, norm=name == "silu", seed=2)
    ranges = spans(graph)
    tops = highest(graph, range(4))
    for scale in (0.1, 3.0, 100.0):
        x = scale * normal(500, 3, seed=5)
        for value, (low, high) in zip(graph.values(x), ranges):
            assert ((low <= value) & (value <= high)).all()
        z = graph.logits(x)
        for k in range(4):
            assert (z - z[:, k : k + 1] <= tops[k]).all()
    assert torch.isfinite(tops).all() == (name in (*BOUNDED, "silu"))


def test_ranges_of_closed_forms() -> None:
    top = highest(
        read(Function(lambda x: torch.cat([0 * x, torch.tanh(x)], 1)), (1,), smooth=True), [0, 1]
    )
    torch.testing.assert_close(top, torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double())
    lone = highest(
        read(Function(lambda x: torch.cat([0 * x, -F.softplus(x) + 2], 1)), (1,), smooth=True),
        [0, 1],
    )
    torch.testing.assert_close(
        lone, torch.tensor([[0.0, 2.0], [math.inf, 0.0]]).double()
    )  # one side only grows


def test_a_normalised_vector_is_no_longer_than_its_dimension() -> None:
    weight = normal(3, 4, seed=4)
    graph = Graph(
        (Node((), (4,), "input"), Node((0,), (4,), "norm", Curved(Normalise(1e-5))))
    ).head(weight)
    top = highest(graph, [1])[0]
    gaps = weight - weight[1]
    torch.testing.assert_close(
        top, 2 * torch.linalg.vector_norm(gaps, dim=1)
    )  # sqrt(4) times the length, reached far away
    z = graph.logits(1e4 * gaps)
    assert ((z - z[:, 1:2]).diag() <= top).all() and ((z - z[:, 1:2]).diag() >= top - 1e-6).all()


def test_intervals_that_start_from_points_hold_them() -> None:
    graph = read(filled(Transformer(True, True), seed=1), (12,), smooth=True)
    x = normal(5, 12, seed=3)
    low, high = spans(graph, (x, x))[-1]
    z = graph.logits(x)
    assert ((low <= z) & (z <= high) & (high - low < 1e-9)).all()
