import itertools
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from support.networks import Net, dense, jacobian, one_sentence, prelu, seeded
from support.transformers import CURVED, Vision, linear
from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Concat, Matrix, Pick, Scale, Sum
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.registry import RULES, spelled
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.ranges import bounds_on
from wassail.errors import InputError
from wassail.zoo import load, load_onnx


def pooled(pool: nn.Module, image: tuple[int, int, int], size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(image[0], 2, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), linear(size)
    )


MEAN = torch.tensor([0.3, -0.4]).view(1, 2, 1, 1).double()
STD = torch.tensor([0.5, 2.0]).view(1, 2, 1, 1).double()

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "no hidden layer": (lambda: linear(4), (4,)),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(inplace=True), linear(5)
        ),
        (4,),
    ),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)),
        (4,),
    ),
    "flattened image": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), linear(5)),
        (3, 2, 2),
    ),
    "tokens": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), linear(20)), (5, 3)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), linear(27)),
        (2, 5, 5),
    ),
    "conv, stride and padding": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0)),
            nn.ReLU(),
            nn.Flatten(),
            linear(18),
        ),
        (2, 5, 6),
    ),
    "conv, dilation": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.ReLU(), nn.Flatten(), linear(18)),
        (1, 7, 7),
    ),
    "conv, groups": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.ReLU(), nn.Flatten(), linear(54)
        ),
        (4, 3, 3),
    ),
    "conv, depthwise": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 2, groups=3), nn.ReLU(), nn.Flatten(), linear(12)),
        (3, 3, 3),
    ),
    "conv, same": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, (5, 3), padding="same"), nn.ReLU(), nn.Flatten(), linear(24)
        ),
        (1, 4, 3),
    ),
    "conv, valid": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2, padding="valid"), nn.ReLU(), nn.Flatten(), linear(12)
        ),
        (1, 3, 4),
    ),
    "conv, circular": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"),
            nn.ReLU(),
            nn.Flatten(),
            linear(18),
        ),
        (1, 3, 3),
    ),
    "weights computed from others": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU(), linear(5)
        ),
        (4,),
    ),
    "batch norm, flat": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), linear(5)),
        (4,),
    ),
    "batch norm, no weights": (
        lambda: nn.Sequential(
            nn.BatchNorm1d(4, affine=False), nn.Linear(4, 5), nn.ReLU(), linear(5)
        ),
        (4,),
    ),
    "batch norm, after the activation": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.ReLU(), linear(5)),
        (4,),
    ),
    "batch norm, images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 3, padding=1, groups=2),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.Flatten(),
            linear(18),
        ),
        (2, 3, 3),
    ),
    "leaky": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.LeakyReLU(0.2), nn.Linear(5, 5), nn.LeakyReLU(), linear(5)
        ),
        (4,),
    ),
    "prelu, one": (lambda: prelu(nn.Sequential(nn.Linear(4, 5), nn.PReLU(), linear(5))), (4,)),
    "prelu, channels": (
        lambda: prelu(nn.Sequential(nn.Conv2d(1, 3, 2), nn.PReLU(3), nn.Flatten(), linear(12))),
        (1, 3, 3),
    ),
    "relu6": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU6(), linear(5)), (4,)),
    "hardtanh": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Hardtanh(-0.5, 0.25), linear(5)), (4,)),
    "clamp": (
        lambda: Net(lambda m, x: m.b(m.a(x).clamp(-0.3, 0.7)), a=nn.Linear(4, 5), b=linear(5)),
        (4,),
    ),
    "clamp below": (
        lambda: Net(lambda m, x: m.b(m.a(x).clamp(min=-0.3)), a=nn.Linear(4, 5), b=linear(5)),
        (4,),
    ),
    "clamp above": (
        lambda: Net(lambda m, x: m.b(m.a(x).clamp(max=0.3)), a=nn.Linear(4, 5), b=linear(5)),
        (4,),
    ),
    "abs": (lambda: Net(lambda m, x: m.b(m.a(x).abs()), a=nn.Linear(4, 5), b=linear(5)), (4,)),
    "maximum": (
        lambda: Net(
            lambda m, x: m.c(torch.maximum(m.a(x), m.b(x))),
            a=nn.Linear(4, 5),
            b=nn.Linear(4, 5),
            c=linear(5),
        ),
        (4,),
    ),
    "maximum with a constant": (
        lambda: Net(
            lambda m, x: m.b(torch.maximum(m.a(x), m.limit.bias)),
            a=nn.Linear(4, 5),
            b=linear(5),
            limit=nn.Linear(1, 1),
        ),
        (4,),
    ),
    "residual": (
        lambda: Net(
            lambda m, x: m.c(x + m.b(m.a(x).relu())),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 4),
            c=linear(4),
        ),
        (4,),
    ),
    "residual, in place": (  # the skip path sees what the in-place ReLU left behind
        lambda: Net(
            lambda m, x: (lambda h: m.c(m.b(F.relu(h, inplace=True)) + h))(m.a(x)),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 6),
            c=linear(6),
        ),
        (4,),
    ),
    "residual, added in place": (
        lambda: Net(
            lambda m, x: (lambda h: m.c(m.b(h).add_(h).relu_()))(m.a(x)),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 6),
            c=linear(6),
        ),
        (4,),
    ),
    "x + x": (
        lambda: Net(
            lambda m, x: (lambda h: m.b(h + h))(m.a(x).relu()), a=nn.Linear(4, 5), b=linear(5)
        ),
        (4,),
    ),
    "difference": (
        lambda: Net(
            lambda m, x: m.c(torch.sub(x.relu(), m.a(x).relu(), alpha=0.7) + (2 - x)),
            a=nn.Linear(4, 4),
            c=linear(4),
        ),
        (4,),
    ),
    "constants": (
        lambda: Net(
            lambda m, x: (3 * m.b((1 - m.a(x / 0.5)).relu() - 0.25) + 1) / 2 * -1,
            a=nn.Linear(4, 5),
            b=linear(5),
        ),
        (4,),
    ),
    "concat": (
        lambda: Net(
            lambda m, x: m.c(torch.cat([x, m.a(x).relu(), x.relu()], 1)),
            a=nn.Linear(4, 5),
            c=linear(13),
        ),
        (4,),
    ),
    "concat, channels": (
        lambda: Net(
            lambda m, x: m.c(torch.cat([x, m.a(x).relu()], -3).flatten(1)),
            a=nn.Conv2d(2, 3, 1),
            c=linear(20),
        ),
        (2, 2, 2),
    ),
    "moves": (
        lambda: Net(
            lambda m, x: m.b(
                F.pad(m.a(x.permute(0, 3, 1, 2)).relu()[:, 1:, :, ::2], (1, 0, 0, 2)).reshape(
                    len(x), -1
                )
            ),
            a=nn.Conv2d(2, 3, 1),
            b=linear(30),
        ),
        (3, 4, 2),
    ),
    "chunk, flip, roll": (
        lambda: Net(
            lambda m, x: (lambda p, q: m.b(p.relu().flip(1) + q.roll(1, 1)))(*m.a(x).chunk(2, 1)),
            a=nn.Linear(4, 6),
            b=linear(3),
        ),
        (4,),
    ),
    "expand, select, split": (
        lambda: Net(
            lambda m, x: m.b(
                (
                    lambda u, v: (
                        u.unsqueeze(2).expand(-1, -1, 3).flatten(1) + v[:, :1].relu().expand(-1, 6)
                    )
                )(*m.a(x).relu().split([2, 3], 1))
                + x.select(1, 0)[:, None].expand(-1, 6)
            ),
            a=nn.Linear(4, 5),
            b=linear(6),
        ),
        (4,),
    ),
    "average pool": (
        lambda: pooled(nn.AvgPool2d(2, stride=1, padding=1), (1, 3, 4), 40),
        (1, 3, 4),
    ),
    "average pool, padding not counted": (
        lambda: pooled(
            nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 4, 4), 18
        ),
        (1, 4, 4),
    ),
    "adaptive pool": (lambda: pooled(nn.AdaptiveAvgPool2d((2, 3)), (1, 5, 4), 12), (1, 5, 4)),
    "global pool": (lambda: pooled(nn.AdaptiveAvgPool2d(1), (1, 5, 4), 2), (1, 5, 4)),
    "mean and sum": (
        lambda: Net(
            lambda m, x: m.b(m.a(x).relu().mean((2, 3)) + x.sum((1, 2, 3))[:, None].expand(-1, 3)),
            a=nn.Conv2d(1, 3, 2),
            b=linear(3),
        ),
        (1, 3, 4),
    ),
    "max pool": (lambda: pooled(nn.MaxPool2d(2), (1, 4, 4), 8), (1, 4, 4)),
    "max pool, odd": (lambda: pooled(nn.MaxPool2d(2), (1, 5, 3), 4), (1, 5, 3)),
    "max pool, 3x3 stride 2, padded": (
        lambda: pooled(nn.MaxPool2d(3, 2, 1), (1, 5, 4), 12),
        (1, 5, 4),
    ),
    "max pool, dilated, ceil": (
        lambda: pooled(nn.MaxPool2d(2, 2, 1, dilation=2, ceil_mode=True), (1, 5, 4), 18),
        (1, 5, 4),
    ),
    "max pool of negative numbers": (  # padding must not count as zero
        lambda: Net(lambda m, x: m.b(F.max_pool2d(-x.abs() - 1, 3, 1, 1).flatten(1)), b=linear(9)),
        (1, 3, 3),
    ),
    "normalisation, then padding": (
        lambda: Net(
            lambda m, x: m.b(m.a((x - MEAN) / STD).relu().flatten(1)),
            a=nn.Conv2d(2, 3, 3, padding=1),
            b=linear(27),
        ),
        (2, 3, 3),
    ),
    "one number per sample": (
        lambda: Net(
            lambda m, x: m.b(torch.cat([x.sum(1).relu()[:, None], m.a(x)[:, 0].abs()[:, None]], 1)),
            a=nn.Linear(4, 2),
            b=linear(2),
        ),
        (4,),
    ),
    "casts and constants made on the way": (
        lambda: Net(
            lambda m, x: m.a((x.double() - torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x)).relu()).to(
                torch.float64
            ),
            a=linear(4),
        ),
        (4,),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), linear(5)),
        (4,),
    ),
}


@cache
def build(name: str) -> tuple[nn.Module, Graph]:
    """A model and its graph: read once, both are only looked at."""
    make, shape = MODELS[name]
    model = make()
    model = model if "prelu" in name else seeded(model)
    return model, read(model, shape)


def points(shape: tuple[int, ...], count: int = 16, seed: int = 1) -> Tensor:
    return 1.5 * torch.randn(
        count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def close(a: Tensor, b: Tensor) -> bool:
    size = 1 + (b.abs().max() if b.numel() else 0.0)
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-10 * size).all())


@pytest.mark.few(14)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_gives_the_models_logits_and_jacobians(name: str) -> None:
    model, graph = build(name)
    x = points(graph.nodes[0].shape)
    assert close(graph.logits(x), model(x).detach())
    assert close(jacobian(graph.logits, x), jacobian(model, x))
    assert graph.inputs == x[0].numel() and graph.outputs == model(x).shape[1]
    assert [node.shape for node in graph.nodes] == [tuple(v.shape[1:]) for v in graph.values(x)]


@pytest.mark.parametrize("name", MODELS)
def test_the_dense_form_is_the_graph_also_with_the_stable_neurons_of_a_box_fixed(name: str) -> None:
    _, graph = build(name)
    x = points(graph.nodes[0].shape)
    network = graph.piecewise()
    flat = x.flatten(1)
    same_network(network, graph, flat)
    assert network.neurons == graph.neurons
    box = Region.make((0.2, 0.5), graph.inputs)
    bounds = bounds_on(graph, box)
    small = graph.piecewise(bounds.states())
    assert small.neurons == bounds.open
    same_network(small, graph, box.sample(16, torch.Generator().manual_seed(2)))
    # The dense form can fix neurons itself; where it does, both agree.
    side = torch.where((network.preactivations(flat[:1]) > 0)[0], 1, 0)
    whole = network.fix(side)
    assert whole.neurons == 0
    assert close(whole.C, network.jacobian(network.mask(flat[:1]))[0])


def same_network(network: Piecewise, graph: Graph, flat: Tensor) -> None:
    x = flat.reshape(-1, *graph.nodes[0].shape)
    assert close(network.logits(flat), graph.logits(x))
    assert close(network.jacobian(network.mask(flat)), jacobian(graph.logits, x))
    for block in network.blocks():  # layers in order, and no neuron feeds its own
        assert not network.B[block, block.start :].any()


@pytest.mark.parametrize("name", MODELS)
def test_transposes_are_adjoints_and_magnitudes_are_absolute_values(name: str) -> None:
    _, graph = build(name)
    g = torch.Generator().manual_seed(3)
    for node in graph.nodes:
        if node.map is None:
            continue
        for k, source in enumerate(node.inputs):
            shapes = [graph.nodes[j].shape for j in node.inputs]
            x = torch.randn(2, *graph.nodes[source].shape, dtype=torch.float64, generator=g)
            cotangent = torch.randn(2, *node.shape, dtype=torch.float64, generator=g)
            value = node.map.forward(
                *[x if i == k else x.new_zeros(2, *s) for i, s in enumerate(shapes)]
            )
            there = (value * cotangent).reshape(2, -1).sum(1)
            back = (x * node.map.transpose(cotangent)[k]).reshape(2, -1).sum(1)
            assert torch.allclose(there, back, rtol=1e-11, atol=1e-11)
            assert torch.allclose(
                dense(node.map.magnitude(), shapes, k), dense(node.map, shapes, k).abs(), rtol=1e-14
            )


@pytest.mark.parametrize(
    "name", ["mlp", "batch norm, images", "residual", "max pool", "hardtanh", "global pool"]
)
def test_head_and_recession(name: str) -> None:
    model, graph = build(name)
    x = points(graph.nodes[0].shape)
    weight = torch.tensor([[1.0, -1.0, 0.0], [0.5, 2.0, -3.0]])
    for net in (graph.head(weight), graph.head(weight).head(torch.tensor([[1.0, 1.0]]))):
        rows = weight.double() if net.outputs == 2 else weight.double().sum(0, keepdim=True)
        assert close(net.logits(x), model(x).detach() @ rows.T)
    far = 1e7
    recession = graph.homogeneous()
    assert not recession.logits(torch.zeros_like(x)).any()
    assert torch.allclose(recession.logits(x), graph.logits(far * x) / far, atol=1e-4)
    assert close(
        recession.piecewise().logits(x.flatten(1)),
        graph.piecewise().homogeneous().logits(x.flatten(1)),
    )


def test_normalisations_and_batch_norms_become_part_of_their_layers() -> None:
    _, graph = build("batch norm, flat")
    assert [type(node.map) for node in graph.nodes] == [type(None), Matrix, type(None), Matrix]
    _, graph = build("normalisation, then padding")
    assert isinstance(graph.nodes[1].map, Conv) and graph.nodes[1].inputs == (0,)
    assert graph.nodes[1].bias is not None and graph.nodes[1].bias.shape == (
        3,
        3,
        3,
    )  # the border sees other zeros


def test_a_plain_function_and_a_float32_model() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.5, 0.25], [3.0, -1.0]])
    graph = read(lambda x: torch.relu(x @ weight.T) - 1, (2,))
    x = points((2,))
    assert close(graph.logits(x), torch.relu(x @ weight.double().T) - 1)
    model = seeded(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))).float()
    graph = read(model, (2,))
    assert graph.logits(x.float()).dtype == torch.float64
    assert torch.allclose(graph.logits(x.float()).float(), model(x.float()), atol=1e-5)


def test_a_parameter_shared_by_two_layers() -> None:
    layer = nn.Linear(4, 4)
    model = seeded(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 2)))
    assert close(read(model, (4,)).logits(points((4,))), model(points((4,))).detach())


def test_modes_and_gradients_of_the_model_are_given_back() -> None:
    model = seeded(
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.ReLU(), nn.Linear(5, 2))
    ).train()
    model[3].eval()
    model[0].weight.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    read(model, (4,))
    assert [m.training for m in model] == [True, True, True, False, True] and model.training
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 5
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.append(nn.Sigmoid())
    with pytest.raises(InputError):
        read(model, (4,))
    assert model.training


def mixing(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else 2 * x


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "sigmoid": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), linear(5)),
        "'sigmoid'",
        "'1' (Sigmoid)",
    ),
    "gelu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), linear(5)), "'gelu'", "'1' (GELU)"),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Softmax(1)), "'softmax", "'1' (Softmax)"),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), linear(5)),
        "'layer_norm'",
        "'1' (LayerNorm)",
    ),
    "product": (
        lambda: Net(lambda m, x: m.a(x) * m.b(x), a=linear(4), b=linear(4)),
        "product",
        "the model itself (Net)",
    ),
    "matrix product": (
        lambda: Net(
            lambda m, x: (m.a(x)[:, None] @ m.b(x)[:, :, None]).flatten(1), a=linear(4), b=linear(4)
        ),
        "product",
        "the model itself (Net)",
    ),
    "division": (
        lambda: Net(lambda m, x: 1 / m.a(x), a=linear(4)),
        "reciprocal",
        "the model itself (Net)",
    ),
    "square": (
        lambda: Net(lambda m, x: m.a(x) ** 2, a=linear(4)),
        "product",
        "the model itself (Net)",
    ),
    "cube": (lambda: Net(lambda m, x: m.a(x) ** 3, a=linear(4)), "power", "the model itself (Net)"),
    "batch mean": (
        lambda: Net(lambda m, x: m.a(mixing(x)), a=linear(4)),
        "batch",
        "the model itself (Net)",
    ),
    "batch flip": (
        lambda: Net(lambda m, x: m.a(x.flip(0)), a=linear(4)),
        "depends on the batch",
        "model",
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named_in_one_sentence(name: str) -> None:
    make, what, place = REFUSED[name]
    with pytest.raises(InputError) as error:
        read(seeded(make()), (4,))
    one_sentence(str(error.value))
    assert what in str(error.value) and place in str(error.value)


SMOOTH: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "sigmoid": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), linear(5)), (4,), ["sigmoid"]),
    "tanh": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), linear(5)), (4,), ["tanh"]),
    "gelu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), linear(5)), (4,), ["gelu"]),
    "gelu, tanh form": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU("tanh"), linear(5)),
        (4,),
        ["gelu_tanh"],
    ),
    "silu": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.SiLU(inplace=True), linear(5)),
        (4,),
        ["silu"],
    ),
    "methods": (
        lambda: Net(
            lambda m, x: m.b(m.a(x).sigmoid_() + x.tanh().sum(1)[:, None].expand(-1, 5)),
            a=nn.Linear(4, 5),
            b=linear(5),
        ),
        (4,),
        ["sigmoid", "tanh"],
    ),
    "beside ReLUs": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(6, 5),
            nn.GELU(),
            nn.ReLU(),
            linear(5),
        ),
        (2, 4, 2),
        ["silu", "gelu"],
    ),
    "residual": (
        lambda: Net(
            lambda m, x: m.b(x + F.gelu(m.a(torch.tanh(x)))), a=nn.Linear(4, 4), b=linear(4)
        ),
        (4,),
        ["tanh", "gelu"],
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_activations_are_nodes_when_asked_for_and_refused_when_not(name: str) -> None:
    make, shape, activations = SMOOTH[name]
    model = seeded(make())
    with pytest.raises(InputError, match=f"'{activations[0]}' at "):
        read(model, shape)
    graph = read(model, shape, smooth=True)
    x = points(shape)
    assert sorted(node.activation for node in graph.nodes if node.activation is not None) == sorted(
        activations
    )
    assert all(
        node.map is None and node.slope is None
        for node in graph.nodes
        if node.activation is not None
    )
    assert close(graph.logits(x), model(x).detach())
    assert close(jacobian(graph.logits, x), jacobian(model, x))
    assert [node.shape for node in graph.nodes] == [tuple(v.shape[1:]) for v in graph.values(x)]
    weight = torch.tensor([[1.0, -1.0, 0.0], [0.5, 2.0, -3.0]])
    assert close(graph.head(weight).logits(x), model(x).detach() @ weight.double().T)


def test_what_is_for_piecewise_linear_networks_refuses_smooth_ones() -> None:
    make, shape, _ = SMOOTH["beside ReLUs"]
    graph = read(seeded(make()), shape, smooth=True)
    for use in (lambda: graph.relus, lambda: graph.neurons, graph.homogeneous, graph.piecewise):
        with pytest.raises(InputError) as error:
            use()
        one_sentence(str(error.value))
        assert "'silu' at '2' (SiLU)" in str(error.value)


@pytest.mark.parametrize("name", ["mlp", "residual", "max pool", "hardtanh"])
def test_a_piecewise_linear_network_is_the_same_with_and_without_smooth(name: str) -> None:
    model, graph = build(name)
    again = read(model, graph.nodes[0].shape, smooth=True)
    assert [node.inputs for node in again.nodes] == [
        node.inputs for node in graph.nodes
    ] and again.relus == graph.relus


@pytest.mark.parametrize(("layer", "called"), [(nn.RReLU(), "rrelu")])
def test_other_activations_are_refused_by_name(layer: nn.Module, called: str) -> None:
    name = type(layer).__name__
    with pytest.raises(
        InputError, match=rf"'{called}' at '1' \({name}\) .*softmax attention"
    ) as error:
        read(seeded(nn.Sequential(nn.Linear(4, 5), layer, linear(5))), (4,), smooth=True)
    one_sentence(str(error.value))


@pytest.mark.few(5)
@pytest.mark.slow_cases("vision", "vision, fused")
@pytest.mark.parametrize("name", CURVED)
def test_transformers_and_their_parts(name: str) -> None:
    make, shape, curves = CURVED[name]
    model = seeded(make()).eval()
    with pytest.raises(InputError):
        read(model, shape)
    graph = read(model, shape, smooth=True)
    x = points(shape)
    assert graph.smooth and graph.curved
    assert [type(node.curve).__name__ for node in graph.nodes if node.curve is not None] == curves
    assert close(graph.logits(x), model(x).detach())
    assert close(jacobian(graph.logits, x), jacobian(model, x))
    assert [node.shape for node in graph.nodes] == [tuple(v.shape[1:]) for v in graph.values(x)]
    for use in (lambda: graph.relus, graph.piecewise):
        with pytest.raises(InputError, match="not piecewise linear"):
            use()


@pytest.mark.parametrize(
    "layer",
    [nn.Softplus(), nn.Softplus(3.0), nn.ELU(), nn.ELU(0.5), nn.ELU(2.0), nn.CELU(1.7), nn.SELU()],
    ids=str,
)
def test_softplus_and_elu_with_their_scales(layer: nn.Module) -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 5), layer, linear(5)))
    graph = read(model, (4,), smooth=True)
    x = points((4,))
    assert close(graph.logits(x), model(x).detach()) and graph.smooth and not graph.curved


@pytest.mark.parametrize(
    "name",
    ["causal", "heads, boolean mask", "post-LN, batch second", "vision, fused", "padding mask"],
)
def test_masks_hide_far_out_too(name: str) -> None:
    make, shape, _ = CURVED[name]
    model = seeded(make()).eval()
    graph = read(model, shape, smooth=True)
    x = points(shape)
    assert close(graph.logits(300 * x), model(300 * x).detach())


ODD: dict[str, Callable[[], nn.Module]] = {
    "rounded": lambda: Net(lambda m, x: m.a((x * 4096).long() / 4096), a=linear(4)),
    "bias by the input": lambda: Net(lambda m, x: F.linear(x, m.a.weight, m.a(x)[0]), a=linear(4)),
    "clamp by the input": lambda: Net(lambda m, x: m.a(x).clamp(min=x[:, :3]), a=linear(4)),
    "negative celu": lambda: nn.Sequential(nn.Linear(4, 3), nn.CELU(-1.0)),
    "threshold that jumps": lambda: nn.Sequential(nn.Linear(4, 3), nn.Threshold(0.1, 0.0)),
    "hard shrinkage": lambda: nn.Sequential(nn.Linear(4, 3), nn.Hardshrink(0.1)),
    "softplus of beta 0": lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus(0.0)),
    "einsum with a constant": lambda: Net(
        lambda m, x: torch.einsum("bi,ki->bk", x, m.a.weight), a=linear(4)
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ODD)
def test_what_would_be_read_wrongly_is_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        read(seeded(ODD[name]()), (4,), smooth=True)
    one_sentence(str(error.value))


def test_choices_by_a_constant_mask() -> None:
    mask = torch.tensor([True, False, True])
    model = seeded(
        Net(
            lambda m, x: (
                torch.where(mask, m.a(x), m.b(x)) + torch.where(mask, m.a(x), torch.ones(3))
            ),
            a=linear(4),
            b=linear(4),
        )
    )
    graph = read(model, (4,))
    x = points((4,))
    assert close(graph.logits(x), model(x).detach())


def test_the_default_eps_of_an_rms_norm_is_that_of_the_type() -> None:
    for dtype in (torch.float32, torch.float64):
        graph = read(seeded(nn.Sequential(nn.RMSNorm(4), linear(4))).to(dtype), (4,), smooth=True)
        (curve,) = [node.curve for node in graph.nodes if node.curve is not None]
        assert curve == Normalise(torch.finfo(dtype).eps)


def test_a_position_embedding_and_moves_cost_no_nodes() -> None:
    graph = read(seeded(Vision()).eval(), (1, 4, 4), smooth=True)
    assert not any(
        isinstance(node.map, Pick) and isinstance(graph.nodes[node.inputs[0]].map, Pick)
        for node in graph.nodes
    )
    stream = next(node for node in graph.nodes if isinstance(node.map, Concat))
    assert stream.bias is not None and stream.bias.shape == (5, 6)


def test_a_layer_norm_keeps_its_gain() -> None:
    model = seeded(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)))
    nn.init.constant_(model[0].weight, 2.5)
    graph = read(model, (4,), smooth=True)
    assert [type(node.map).__name__ for node in graph.nodes] == [
        "NoneType",
        "Matrix",
        "NoneType",
        "Scale",
        "Matrix",
    ]
    gain = graph.nodes[3].map
    assert isinstance(gain, Scale) and torch.equal(
        gain.factor, torch.full((4,), 2.5, dtype=torch.float64)
    )


def test_real_transformers(zoo: ModuleType) -> None:
    model = load("digits-vit").double()
    x = torch.rand(20, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert close(read(model, (1, 8, 8), smooth=True).logits(x), model(x).detach())
    for name, blocks in (("cifar_vit_pgd_2_3_16", 2), ("cifar_vit_ibp_3_3_8", 3)):
        path = Path(str(zoo.__file__)).parent / "models" / f"{name}.onnx"
        vision = load_onnx(path, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
        x = zoo.images("cifar10", 8)[0]
        graph = read(vision, (3, 32, 32), smooth=True)
        assert sum(type(node.curve).__name__ == "Softmax" for node in graph.nodes) == blocks
        assert torch.allclose(graph.logits(x).float(), vision(x).detach(), atol=1e-4)


def test_real_networks_with_smooth_activations(zoo: ModuleType) -> None:
    model = load("digits-gelu").double()
    graph = read(model, (1, 8, 8), smooth=True)
    x = torch.rand(20, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert [node.activation for node in graph.nodes if node.activation] == ["gelu", "gelu"]
    assert close(graph.logits(x), model(x).detach())
    model, dataset = zoo.load("cifar_conv_small_sigmoid")
    x = zoo.images(dataset, 8)[0]
    graph = read(model, tuple(x.shape[1:]), smooth=True)
    assert {node.activation for node in graph.nodes} == {None, "sigmoid"}
    assert close(graph.logits(x), model.double()(x.double()).detach())


def test_data_dependent_branches_wrong_shapes_and_what_is_not_logits() -> None:
    fine = seeded(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), linear(5)))
    bad: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
        (seeded(Net(lambda m, x: m.a(branching(x)), a=linear(4))), (4,)),
        (fine, (5,)),
        (lambda x: (x, x), (4,)),
        (lambda x: torch.ones(len(x), 3), (4,)),
        (lambda x: x.sum(1), (4,)),
        (lambda x: x.reshape(-1, 2, 2), (4,)),
        (lambda x: torch.relu(x)[:2], (4,)),  # right for the two samples it is read with only
        (lambda x: F.dropout(x, 0.5), (4,)),  # random
    ]
    for model, shape in bad:
        with pytest.raises(InputError) as error:
            read(model, shape)
        one_sentence(str(error.value))


def test_numbers_that_are_not_finite_are_refused() -> None:
    broken = seeded(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), linear(5)))
    broken[0].weight.data[0, 0] = math.nan
    with pytest.raises(InputError):
        read(broken, (4,))


def test_one_sided_limits_written_as_infinity() -> None:
    x = points((4,))
    graph = read(lambda x: x.clamp(0, math.inf) + F.hardtanh(x, -math.inf, 1.0), (4,))
    assert close(graph.logits(x), x.clamp(min=0) + x.clamp(max=1))


def test_the_dense_form_refuses_what_is_too_large() -> None:
    _, graph = build("mlp")
    assert graph.piecewise(limit=11).neurons == 11
    with pytest.raises(InputError, match="11 ReLUs") as error:
        graph.piecewise(limit=10)
    one_sentence(str(error.value))


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_layers_of_a_perceptron_and_neurons_fixed_one_by_one(slope: float) -> None:
    g = torch.Generator().manual_seed(5)
    draw = [
        (torch.randn(b, a, generator=g), torch.randn(b, generator=g))
        for a, b in itertools.pairwise([3, 4, 5, 2])
    ]
    network = Piecewise.from_layers(draw, slope)
    x = points((3,))
    z = x
    for i, (w, b) in enumerate(draw):
        z = z @ w.double().T + b.double()
        z = F.leaky_relu(z, slope) if i < 2 else z
    assert close(network.logits(x), z)
    mask = network.mask(x)
    for h in range(network.neurons):
        for side in (0, 1):
            state = torch.full((network.neurons,), -1)
            state[h] = side
            fixed = network.fix(state)
            here = mask[:, h] == side
            assert fixed.neurons == network.neurons - 1
            assert close(fixed.logits(x[here]), z[here])
            assert close(fixed.jacobian(fixed.mask(x[here])), network.jacobian(mask[here]))


def test_a_log_softmax_at_the_end_changes_no_margin() -> None:
    plain = seeded(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    ending = nn.Sequential(plain, nn.LogSoftmax(1)).eval()
    graph = read(ending, (4,))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert graph.common and torch.equal(graph.logits(x), read(plain, (4,)).logits(x))
    with pytest.raises(InputError, match="only its margins are known"):
        ws.lipschitz(ending, 2, shape=(4,), outputs="logits", norm_out=2)
    early = nn.Sequential(nn.LogSoftmax(1), plain).eval()
    with pytest.raises(InputError, match="not over the logits at the end"):
        read(early, (4,))


def test_a_mistake_in_a_rule_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def misspelt(net: Builder, x: Index) -> Index:
        return net.reluu(x)

    monkeypatch.setitem(RULES, "relu", misspelt)
    with pytest.raises(AttributeError, match="reluu"):
        read(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), (2,))
    with pytest.raises(ValueError, match="two rules for 'relu'"):
        spelled("relu")(misspelt)


def test_one_relu_serves_a_maximum_and_a_minimum() -> None:
    def both(x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)

    assert read(both, (4,)).neurons == 2
    assert read(lambda x: x.reshape(len(x), 2, 2).sort(2)[0].flatten(1), (4,)).neurons == 2


def test_a_layer_is_a_matrix_whose_numbers_are_exact() -> None:
    into = nn.Linear(3, 4)
    model = nn.Sequential(into, nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
    graph = read(model, (3,))
    first, relu, last = graph.nodes[1:]
    assert graph.nodes[0].layer is None and relu.layer is None
    assert first.layer is not None and last.layer is not None
    assert torch.equal(first.layer[0], into.weight) and torch.equal(first.layer[1], into.bias)
    assert torch.equal(last.layer[1], torch.zeros(2).double())
    # A product of two matrices is rounded.
    two = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double().eval()
    two[0].running_mean.fill_(0.3)
    assert read(two, (3,)).nodes[-1].layer is None


def test_only_a_sum_can_do_without_inputs() -> None:
    a, b = torch.ones(1, 2), torch.zeros(1, 2)
    fewer = Sum(2).fewer(1)
    assert fewer is not None and torch.equal(fewer.forward(a), Sum(2).forward(a, b))
    assert Concat(1, (2, 2)).fewer(1) is None and Matrix(a).fewer(1) is None
