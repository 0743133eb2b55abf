"""Transformers: recognised weights against the modules' own, constants by hand, and bounds
above every sampled Jacobian.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.attention import attend, euclidean_bound
from support.networks import Net
from support.rounding import long
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Concat, Matrix, Scale, Sum
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.lipschitz.steepest import jacobians
from wassail.paper import attention_layout as layout
from wassail.paper import corollary, transformer_constants
from wassail.paper.attention_bounds import (
    _sizes,
    castin,
    global_bound,
    heads,
)

# tokens, width, heads, width of the feed-forward part
N = 5
D = 8
H = 2
WIDE = 12


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeded(module: nn.Module, seed: int, scale: float = 0.5) -> nn.Module:
    """Every parameter normal: gains around 1, nothing is left at its default."""
    module = module.double().eval()
    with torch.no_grad():
        for k, (name, p) in enumerate(sorted(module.named_parameters())):
            p.copy_(
                scale * normal(1000 * seed + k, *p.shape)
                + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
            )
    return module


class Encoder(nn.Module):
    """torch's own layers between a linear embedding and a linear head."""

    def __init__(
        self,
        first: bool,
        depth: int = 1,
        final: bool = False,
        eps: float = 1e-5,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(3, D)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                D, H, WIDE, 0.0, "gelu", eps, batch_first=True, norm_first=first
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(D) if final else nn.Identity()
        self.head = nn.Linear(D, 3)
        self.mask = (
            nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
            if causal
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(self.norm(x).mean(1))


class Block(nn.Module):
    """As in timm: fused queries, keys and values, the scale in the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(D)
        self.norm2 = nn.LayerNorm(D, eps=1e-6)
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, WIDE), nn.GELU(), nn.Linear(WIDE, D))

    def attention(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, d // H).permute(2, 0, 3, 1, 4).unbind(0)
        p = (q * (d // H) ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((p @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, class token, positions, blocks, a final norm, a head on the class token."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, D, 2, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, D))
        self.position = nn.Parameter(torch.zeros(1, 5, D))
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class Mixer(nn.Module):
    """Queries that mix tokens, which is not self-attention token by token; and a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(N, N, bias=False)
        self.q = nn.Linear(3, 4)
        self.k = nn.Linear(3, 4)
        self.v = nn.Linear(3, 6)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.mix(x.transpose(1, 2)).transpose(1, 2))
        y = (q @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)
        return self.head(nn.functional.glu(y).mean(1))


KINDS = {
    "pre": lambda: Encoder(True, final=True),
    "post": lambda: Encoder(False),
    "vit": ViT,
    "mixer": Mixer,
    "causal": lambda: Encoder(True, causal=True),
}


@cache
def graph_of(kind: str, seed: int) -> Graph:
    return read(
        seeded(KINDS[kind](), seed, 0.4), (1, 4, 4) if kind == "vit" else (N, 3), smooth=True
    )


def modules(graph: Graph, region: Region) -> float:
    """The Euclidean constant over a region."""
    return euclidean_bound(graph, region, 2.0, 2.0)


def norms(graph: Graph, x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(jacobians(graph, x), 2)


def largest(graph: Graph, region: Region, count: int = 24, seed: int = 0) -> float:
    """The steepest of random points, of several sizes where the region is unbounded."""
    generator = torch.Generator().manual_seed(seed)
    spreads = (1.0,) if region.bounded else (0.01, 0.3, 1.0, 10.0)
    return max(
        float(norms(graph, region.sample(count // len(spreads), generator, s)).max())
        for s in spreads
    )


def weights(layer: nn.TransformerEncoderLayer) -> tuple[Tensor, ...]:
    """A, u, V and W of torch's attention for tokens after the LayerNorm, `(H, ...)` each."""
    mha = layer.self_attn
    k = D // H
    q, key, v = mha.in_proj_weight.detach().reshape(3, H, k, D)
    b_q = mha.in_proj_bias.detach().reshape(3, H, k)[0]
    out = mha.out_proj.weight.detach().reshape(D, H, k).transpose(0, 1)
    return key.mT @ q / math.sqrt(k), (key.mT @ b_q[..., None])[..., 0] / math.sqrt(k), v, out


def test_weights_of_torchs_attention_are_read_off_the_graph():
    model: Any = seeded(Encoder(True), 1)
    layer = model.layers[0]
    graph = read(model, (N, 3), smooth=True)
    a, u, v, w = weights(layer)
    g = layer.norm1.weight.detach()
    b = layer.norm1.bias.detach()
    (outer,) = layout.find(graph, outer=True).values()
    for ours, theirs in ((outer.a, a), (outer.bias, u), (outer.value, v), (outer.out, w)):
        assert torch.allclose(ours, theirs, atol=1e-12)
    (inner,) = layout.find(graph).values()  # tokens before gain and bias: x = g z + b
    assert isinstance(graph.nodes[inner.source].curve, Normalise)
    assert torch.allclose(inner.a, g[:, None] * a * g, atol=1e-12)
    assert torch.allclose(inner.bias, g * (u + a @ b), atol=1e-12)
    assert torch.allclose(inner.value, v * g, atol=1e-12)
    assert inner.tokens == N and not inner.mask.any()
    z = normal(3, N, D)
    function = graph.nodes[inner.target].place
    assert "self_attn" in function
    y = attend(z * g + b, a, w @ v, u)
    moved = attend(z, inner.a, inner.out @ inner.value, inner.bias)
    assert torch.allclose(y - y[:1], moved - moved[:1], atol=1e-10)


def test_a_query_bias_that_cancels_in_its_product_with_the_keys():
    """`K^T b` as it was computed is all rounding: its exact length is below what is used of it."""
    model = seeded(Encoder(True), 2)
    k = D // H
    mha = model.layers[0].self_attn
    with torch.no_grad():
        key = mha.in_proj_weight[D : 2 * D].reshape(H, k, D)
        bias = mha.in_proj_bias[:D].reshape(H, k)
        bias *= 1e3
        key[:, -1] = -(key[:, :-1] * bias[:, :-1, None]).sum(1) / bias[:, -1:]
    (found,) = layout.find(read(model, (N, 3), smooth=True), outer=True).values()
    products = long(key.detach()) * long(bias.detach())[..., None]
    exact = products.sum(1) / np.sqrt(np.longdouble(k))
    assert (np.abs(exact).max(1) > 0).all()
    for h in range(H):
        first, second, last = (float(found.most[row, h]) for row in (0, 1, 3))
        most = (first, second, last)
        *_, shift = _sizes(found.a[h], found.value[h], 0 * found.bias[h], most)
        assert np.abs(exact[h] - long(found.bias[h])).max() <= shift < 1e-9


def test_constants_of_a_pre_ln_encoder_by_hand():
    model: Any = seeded(Encoder(True), 2)
    layer = model.layers[0]
    found = corollary.corollary(model, shape=(N, 3))
    assert found.style == "pre-LN" and found.covered and found.local is None
    assert [(row.block, row.kind) for row in found.rows] == [
        (0, "embedding"),
        (1, "LayerNorm"),
        (1, "attention"),
        (1, "LayerNorm"),
        (1, "feed-forward"),
        (0, "head"),
    ]

    def size(m: Tensor) -> float:
        return float(torch.linalg.matrix_norm(m.detach(), 2))

    a, u, v, w = weights(layer)
    g = layer.norm1.weight.detach()
    b = layer.norm1.bias.detach()
    reach = math.sqrt(D) * float(g.abs().max()) + float(b.norm())
    slope = Smooth("gelu").steepest
    paper = [
        size(model.embed.weight),
        float(g.abs().max()) / math.sqrt(1e-5),
        sum(size(w[h]) * castin(N, a[h], v[h], reach, u[h]) for h in range(H)),
        float(layer.norm2.weight.detach().abs().max()) / math.sqrt(1e-5),
        size(layer.linear2.weight) * slope * size(layer.linear1.weight),
        size(model.head.weight) / math.sqrt(N),
    ]
    assert [row.paper for row in found.rows] == pytest.approx(paper, rel=1e-9)
    inner = (g[:, None] * a * g, v * g, g * (u + a @ b))
    joint = [
        global_bound(N, inner[0][h], w[h] @ inner[1][h], math.sqrt(D), inner[2][h])
        for h in range(H)
    ]
    single = [
        global_bound(N, inner[0][h], inner[1][h], math.sqrt(D), inner[2][h]) for h in range(H)
    ]
    ours = [
        paper[0],
        1 / math.sqrt(1e-5),
        heads(joint, single, w.transpose(0, 1).flatten(1)),
        1 / math.sqrt(1e-5),
        size(layer.linear2.weight) * slope * size(layer.linear1.weight * layer.norm2.weight),
        paper[5],
    ]
    assert [row.ours for row in found.rows] == pytest.approx(ours, rel=1e-9)
    for column, total in ((paper, found.paper), (ours, found.ours)):
        e, n1, m, n2, f, h = column
        assert 10**total == pytest.approx(h * e * (1 + n1 * m) * (1 + n2 * f), rel=1e-8)
    assert found.ours <= found.paper


@pytest.mark.slow_cases("causal", "mixer", "post", "vit")
@pytest.mark.parametrize("kind", KINDS)
def test_no_sampled_jacobian_is_above_the_walk(kind: str):
    for seed in range(2):
        graph = graph_of(kind, seed)
        centre = normal(seed, *graph.nodes[0].shape)
        for where in ((-1.0, 1.0), Ball(centre, 0.3, 2), Ball(centre, 1e-3, math.inf)):
            region = Region.make(where, graph.inputs)
            bound = modules(graph, region)
            assert largest(graph, region) <= bound < math.inf, (kind, seed, str(region))
        whole = Region.make(None, graph.inputs)
        bound = modules(graph, whole)
        assert largest(graph, whole) <= bound
        paper = corollary.PaperWalk.make(graph, whole).stretch(0, len(graph.nodes) - 1)
        assert math.isfinite(bound) == math.isfinite(paper) == (kind in ("pre", "vit", "causal"))
        assert math.isinf(bound) or math.log(bound) <= paper + 1e-9


def test_a_row_head_and_a_smaller_region_are_no_steeper():
    graph = graph_of("vit", 0)
    rows = torch.tensor([[1.0, -1.0, 0.0, 0.0]], dtype=torch.float64)
    margin = graph.head(rows)
    x = normal(0, 1, 4, 4)
    sizes = [
        modules(margin, Region.make(Ball(x, radius, 2), 16)) for radius in (1e-6, 1e-3, 0.1, 10.0)
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= modules(margin, Region.make(None, 16)) * (1 + 1e-9)
    assert modules(margin, Region.make(None, 16)) <= math.sqrt(2) * modules(
        graph, Region.make(None, 16)
    ) * (1 + 1e-9)
    assert float(norms(margin, x.reshape(1, -1))) <= sizes[0] <= 0.1 * sizes[-1]


def test_every_step_of_a_walk_is_above_its_own_jacobian():
    # Node by node, from its inputs: what the walk says one node does, against the derivative of
    # that node alone.
    graph = graph_of("vit", 1)
    region = Region.make(Ball(normal(1, 1, 4, 4), 0.05, math.inf), 16)
    walk = transformer_constants.TransformerConstants.make(graph, region)
    x = region.sample(3, torch.Generator().manual_seed(0))
    for i, node in enumerate(graph.nodes):
        for j in node.inputs if len(node.inputs) == 1 else ():
            for point in x:
                value = graph.values(point.reshape(1, 1, 4, 4))[j]

                def step(t: Tensor, node=node) -> Tensor:
                    if node.map is not None:
                        return node.map.forward(t)
                    return (
                        node.curve.value(t)
                        if node.curve is not None
                        else ACTIVATIONS[node.activation].value(t)
                    )

                jacobian = torch.autograd.functional.jacobian(step, value).reshape(node.size, -1)
                assert float(torch.linalg.matrix_norm(jacobian, 2)) <= math.exp(
                    walk.stretch(j, i)
                ), (i, node.place)
    attention = next(iter(walk.attentions.values()))
    for point in x:
        z = graph.values(point.reshape(1, 1, 4, 4))[attention.source][0]
        jacobian = torch.autograd.functional.jacobian(
            lambda t: attend(t, attention.a, attention.out @ attention.value, attention.bias), z
        )
        assert float(torch.linalg.matrix_norm(jacobian.reshape(5 * D, 5 * D), 2)) <= math.exp(
            walk._attention(attention)
        )


def test_without_attention_a_small_ball_is_almost_exact():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, D)
            self.norm = nn.LayerNorm(D)
            self.last = nn.RMSNorm(D, eps=1e-4)
            self.mlp = nn.Sequential(
                nn.Linear(D, WIDE), nn.SiLU(), nn.Linear(WIDE, D), nn.ReLU(), nn.Linear(D, D)
            )
            self.head = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head(self.last(x + self.mlp(self.norm(x)))).flatten(1)

    graph = read(seeded(Tokens(), 6), (N, 3), smooth=True)
    x = normal(5, N, 3)
    truth = float(norms(graph, x.reshape(1, -1)))
    assert (
        truth <= modules(graph, Region.make(Ball(x, 1e-9, math.inf), 3 * N)) <= truth * (1 + 1e-5)
    )
    for radius in (1e-4, 1e-2, 0.3):
        region = Region.make(Ball(x, radius, math.inf), 3 * N)
        assert largest(graph, region, 200) <= modules(graph, region), radius


def test_single_steps_by_hand():
    two = torch.tensor(2.0, dtype=torch.float64)
    start = Node((), (3,), "")
    twice = Node((0,), (3,), "", Affine(Scale(two)))
    rank = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    cases = [
        ((twice, Node((0, 1), (3,), "", Affine(Sum(2)))), 3.0),
        ((twice, Node((0, 1), (6,), "", Affine(Concat(1, (3, 3))))), math.sqrt(5)),
        ((Node((0, 0), (3,), "", Curved(Product("i,i->i"))),), 4.0),  # 2 x at x = 2
        ((twice, Node((0, 1), (3,), "", Curved(Product("i,i->i")))), 8.0),
        (
            (
                Node((0,), (3,), "", Affine(Scale(two), bias=-two)),
                Node((1,), (3,), "", Relu(0 * two)),
            ),
            2.0,
        ),
        (
            (
                Node((0,), (3,), "", Affine(Matrix(rank))),
                Node((1,), (2,), "", Affine(Matrix(rank.T[:2]))),
            ),
            math.sqrt(5.25) * math.sqrt(5),
        ),
        ((Node((0,), (3,), "", Curved(Normalise(1e-2))),), 10.0),
    ]
    for nodes, truth in cases:
        found = modules(Graph((start, *nodes)), Region.make((0.0, 2.0), 3))
        assert truth <= found <= truth * (1 + 1e-9), nodes
    away = modules(
        Graph((start, Node((0,), (3,), "", Curved(Normalise(0.0))))), Region.make((3.0, 4.0), 3)
    )
    assert (
        1 / 3 * math.sqrt(2 / 3) <= away <= 1 / 3 * (1 + 1e-9)
    )  # at (3, 3, 3) the direction (1, 1, 1) is lost
    lost = Graph(
        (
            start,
            Node((0, 0), (3,), "", Curved(Product("i,i->i"))),
            Node((1,), (3,), "", Affine(Scale(0 * two))),
        )
    )
    assert (
        modules(lost, Region.make(None, 3)) == 0.0
    )  # x^2 is infinitely steep on R^n, 0 x^2 is not
    pair = Graph((Node((), (2,), ""), Node((0,), (2,), "", Curved(Softmax()))))
    assert 0.5 <= modules(pair, Region.make((-1.0, 1.0), 2)) <= 0.5 * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["normalise", "gelu"])
def test_derivatives_of_tokens_stay_in_their_ranges(kind: str):
    op = Curved(Normalise(0.1)) if kind == "normalise" else Smooth("gelu")
    graph = Graph((Node((), (2, 3), ""), Node((0,), (2, 3), "", op)))
    used = torch.zeros(2, 3, 3, dtype=torch.float64)
    for radius in (1e-3, 0.1, 1.0):
        region = Region.make(Ball(normal(4, 2, 3), radius, math.inf), 6)
        walk = transformer_constants.TransformerConstants.make(graph, region)
        start = walk._start(0)
        assert start is not None
        found = walk._carry(1, [start])
        assert found is not None
        for x in region.sample(200, torch.Generator().manual_seed(1)):
            values = torch.autograd.functional.jacobian(
                lambda t: graph.values(t[None])[-1][0], x.reshape(2, 3)
            )
            blocks = torch.stack([values[k, :, k] for k in range(2)])
            assert ((blocks - found.centre).abs() <= found.radius + 1e-12).all()
            used = torch.maximum(
                used, ((blocks - found.centre).abs() / found.radius.clamp(min=1e-9))
            )
    assert float(used.max()) > 0.8  # and they are not much wider than it takes


def test_masks_are_recognised():
    graph = graph_of("causal", 0)
    (found,) = layout.find(graph).values()
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    assert torch.equal(found.mask, torch.where(hidden, -math.inf, 0.0).double().expand(H, N, N))


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_a_constant_score_is_no_mask(fill: float):
    """It counts where the other scores of its row are as low; minus infinity never does."""
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)

    def forward(m, x, fill):
        scores = (m.q(x) @ x.mT).masked_fill(hidden, fill)
        return m.a((scores.softmax(-1) @ x).flatten(1))

    parts = {"a": nn.Linear(6, 2), "q": nn.Linear(2, 2)}
    for value, count in ((fill, 0), (-math.inf, 1)):
        model = Net(lambda m, x, value=value: forward(m, x, value), **parts).double()
        assert len(layout.find(read(model, (3, 2), smooth=True))) == count


def test_queries_that_mix_tokens_are_not_self_attention():
    graph = graph_of("mixer", 0)
    assert any(isinstance(node.curve, Softmax) for node in graph.nodes)
    assert layout.find(graph) == {}


def test_post_ln_is_told_apart_and_not_covered():
    found = corollary.corollary(graph_of("post", 0), domain=(0, 1))
    assert found.style == "post-LN" and not found.covered
    assert [row.kind for row in found.rows] == [
        "embedding",
        "attention",
        "LayerNorm",
        "feed-forward",
        "head",
    ]
    assert math.isinf(found.ours) and math.isinf(
        found.paper
    )  # the first attention sees the embedding itself
    assert found.local is not None and found.empirical <= 10**found.local < math.inf
    assert "Pre-LN" in str(found) and "not Lipschitz on R^n" in str(found)


def test_rms_norm_and_a_norm_without_gain():
    class Small(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm
            self.mha = nn.MultiheadAttention(3, 1, batch_first=True)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            z = self.norm(x)
            return self.head((x + self.mha(z, z, z, need_weights=False)[0]).flatten(1)[:, :3])

    for k, norm in enumerate(
        (nn.RMSNorm(3, eps=1e-3), nn.LayerNorm(3, 1e-3, elementwise_affine=False))
    ):
        graph = read(seeded(Small(norm), k), (4, 3), smooth=True)
        assert len(layout.find(graph)) == 1
        style, parts = corollary._modules(graph)
        assert style == "pre-LN" and [part.kind for part in parts] == [
            "embedding",
            "LayerNorm",
            "attention",
            "head",
        ]
        whole = Region.make(None, 12)
        walk = transformer_constants.TransformerConstants.make(graph, whole)
        assert math.exp(walk.stretch(*parts[1].ours)) == pytest.approx(
            1 / math.sqrt(1e-3), rel=1e-9
        )
        assert largest(graph, whole) <= modules(graph, whole)


@pytest.mark.slow
def test_constants_beyond_float64_are_carried_as_logarithms(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corollary, "ROUNDS", 1)
    graph = read(seeded(Encoder(True, 3, eps=1e-120), 0), (N, 3), smooth=True)
    found = corollary.corollary(graph)
    assert 308 < found.ours < found.paper < math.inf
    assert modules(graph, Region.make(None, 3 * N)) == math.inf
    assert found.vacuous and math.isinf(found.looseness) and math.isfinite(found.decades)
    assert "10^" in str(found) and "vacuous" in str(found)


@pytest.mark.slow_cases("1", "inf")
@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_the_conversion_to_other_norms(norm: float, tmp_path: Path):
    graph = graph_of("pre", 0)
    found = corollary.corollary(graph, norm, (0, 1))
    factor = {1: 2.0, 2: math.sqrt(2), math.inf: math.sqrt(3 * N * 3)}[norm]
    assert found.conversion == pytest.approx(factor, rel=1e-12)
    assert found.local is not None
    assert found.slope <= found.conversion * 10**found.local
    assert found.empirical == pytest.approx(float(norms(graph, found.witness[None])), rel=1e-9)
    found.save(tmp_path / "found")
    again = corollary.Corollary.load(tmp_path / "found")
    assert str(again) == str(found) and again.rows == found.rows


def test_digits_vit():
    model = ws.zoo.load("digits-vit")
    graph = read(model, (1, 8, 8), smooth=True)
    style, parts = corollary._modules(graph)
    assert style == "pre-LN"
    assert [part.block for part in parts] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 0]
    assert len(layout.find(graph)) == 2
    x = ws.zoo.data("digits")[0][0].double()
    region = Region.make(Ball(x, 1e-2, math.inf, (0, 1)), 64)
    assert (
        largest(graph, region, 8) <= modules(graph, region) < modules(graph, Region.make(None, 64))
    )


@pytest.mark.parametrize("name", ["cifar_vit_pgd_2_3_16", "cifar_vit_ibp_3_3_8"])
def test_the_vision_transformers_of_the_zoo(name: str, zoo):
    pytest.importorskip("onnx")
    from wassail.zoo.onnx import load_onnx

    path = Path(zoo.__file__).parent / "models" / f"{name}.onnx"
    model = load_onnx(path, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)).double()
    graph = read(model, (3, 32, 32), smooth=True)
    blocks = 2 if "pgd" in name else 3
    assert len(layout.find(graph)) == blocks
    style, parts = corollary._modules(graph)
    assert style == "no LayerNorm" and [part.kind for part in parts].count("attention") == blocks
    assert modules(graph, Region.make(None, 3072)) == math.inf
    if blocks == 3:  # the ball is only for the faster one
        return
    x = torch.rand(3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    region = Region.make(Ball(x, 1e-3, math.inf, (0, 1)), 3072)
    assert largest(graph, region, 3) <= modules(graph, region) < math.inf
