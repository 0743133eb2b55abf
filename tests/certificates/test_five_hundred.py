"""Five hundred random smooth networks and transformers, and three real ones: no upper bound is
below anything that is found.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import wassail as ws
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region, Where
from wassail.losses import LIPSCHITZ
from wassail.threat import dual

NORMS = (1.0, 2.0, math.inf)
METHODS = ("product", "propagate", "auto")
ACTS: tuple[Callable[[], nn.Module], ...] = (
    nn.GELU,
    lambda: nn.GELU("tanh"),
    nn.SiLU,
    lambda: nn.Softplus(threshold=40),  # no jump: Lipschitz constants on R^n are asked for
    lambda: nn.Softplus(4.0, 40),
    lambda: nn.Softplus(0.3, 40),
    nn.ELU,
    lambda: nn.ELU(0.4),
    lambda: nn.ELU(1.8),
    nn.SELU,
    lambda: nn.CELU(1.5),
    nn.Tanh,
    nn.Sigmoid,
    nn.ReLU,
)


class Draw:
    """The choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def one(self, *choices: object) -> object:
        return choices[self.between(0, len(choices) - 1)]

    def act(self) -> nn.Module:
        return ACTS[self.between(0, len(ACTS) - 1)]()

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(
            torch.rand(1, dtype=torch.float64, generator=self.generator)
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)


class Residual(nn.Module):
    """`x + f(x)`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gate(nn.Module):
    """`act(W x) (V x)`, projected: SwiGLU and its relatives."""

    def __init__(self, act: nn.Module, width: int, inner: int) -> None:
        super().__init__()
        self.act, self.gate, self.value, self.out = (
            act,
            *(nn.Linear(width, inner) for _ in range(2)),
            nn.Linear(inner, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.gate(x)) * self.value(x))


class Attention(nn.Module):
    """Several heads, with a mask and with normalised queries and keys or without."""

    def __init__(
        self, width: int, heads: int, mask: Tensor | None, norm: Callable[[int], nn.Module] | None
    ) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads
        self.mask = mask
        self.norms = (
            None if norm is None else nn.ModuleList([norm(width // heads), norm(width // heads)])
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if self.norms is not None:
            q = self.norms[0](q)
            k = self.norms[1](k)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    """Attention and feed-forward, each with its norm before (Pre-LN) or after (Post-LN) it."""

    def __init__(
        self,
        attention: nn.Module,
        feed: nn.Module,
        first: nn.Module,
        second: nn.Module,
        before: bool,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed = feed
        self.first = first
        self.second = second
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.first(x))
            return x + self.feed(self.second(x))
        x = self.first(x + self.attention(x))
        return self.second(x + self.feed(x))


class Transformer(nn.Module):
    """Tokens `(T, d)` embedded, a class token or the mean of all, blocks, a last norm or none,
    a head.
    """

    def __init__(
        self,
        tokens: int,
        d: int,
        width: int,
        blocks: list[nn.Module],
        norm: nn.Module,
        cls: bool,
        k: int,
    ) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm, self.head = (
            nn.Linear(d, width),
            nn.Sequential(*blocks),
            norm,
            nn.Linear(width, k),
        )
        self.position = nn.Parameter(torch.zeros(tokens + cls, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if cls else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.blocks(x + self.position))
        return self.head(x[:, 0] if self.token is not None else x.mean(1))


def mlp(draw: Draw, k: int) -> tuple[nn.Module, tuple[int, ...]]:
    n = draw.between(1, 30) if draw.between(0, 1) else draw.between(1, 4)
    width = draw.between(2, 10)
    layers: list[nn.Module] = [nn.Linear(n, width), draw.act()]
    for _ in range(draw.between(0, 2)):
        inner = nn.Sequential(nn.Linear(width, width), draw.act())
        kind = draw.between(0, 4)
        layers.append(
            Residual(inner)
            if kind == 0
            else Residual(Gate(draw.act(), width, 4))
            if kind == 1
            else inner
        )
        if kind == 2:
            norms = (nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-2))
            layers.append(draw.one(*norms))  # type: ignore[arg-type]
    return nn.Sequential(*layers, nn.Linear(width, k)), (n,)


def conv(draw: Draw, k: int) -> tuple[nn.Module, tuple[int, ...]]:
    side = draw.between(3, 5)
    c = draw.between(2, 4)
    stride = draw.between(1, 2)
    size = (side - 1) // stride + 1
    pool = draw.between(0, 1)
    end: list[nn.Module] = [nn.AdaptiveAvgPool2d(1)] if pool else []
    layers = [
        nn.Conv2d(1, c, 3, stride, 1),
        draw.act(),
        nn.BatchNorm2d(c),
        Residual(nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), draw.act())),
    ]
    return nn.Sequential(
        *layers, *end, nn.Flatten(), nn.Linear(c * (1 if pool else size * size), k)
    ), (1, side, side)


def transformer(draw: Draw, k: int) -> tuple[nn.Module, tuple[int, ...]]:
    tokens = draw.between(1, 6)
    d = draw.between(1, 5)
    heads = draw.between(1, 3)
    width = heads * draw.between(2, 3)
    cls = bool(draw.between(0, 1))
    before = bool(draw.between(0, 2))
    n = tokens + cls
    eps = draw.one(1e-5, 1e-2, 0.3)

    def norm(size: int) -> nn.Module:
        kind = nn.RMSNorm if rms else nn.LayerNorm
        return kind(size, eps=eps)  # type: ignore[arg-type]

    # plain: no norms at all, so bounded domains only
    rms = draw.between(0, 3) == 0
    plain = draw.between(0, 7) == 0

    def block() -> nn.Module:
        kind = draw.between(0, 3)
        mask = None
        if kind == 1:
            mask = torch.zeros(n, n, dtype=torch.float64).masked_fill(
                torch.ones(n, n).triu(1).bool(), -math.inf
            )
        elif kind == 2:
            mask = draw.normal(n, n)  # a relative position bias
        attention = Attention(width, heads, mask, norm if draw.between(0, 3) == 0 else None)
        if draw.between(0, 2) == 0:
            feed: nn.Module = Gate(draw.act(), width, 5)
        else:
            feed = nn.Sequential(nn.Linear(width, 6), draw.act(), nn.Linear(6, width))
        first, second = (nn.Identity() if plain else norm(width) for _ in range(2))
        return Block(attention, feed, first, second, before)

    last = nn.Identity() if plain or draw.between(0, 2) == 0 else norm(width)
    return Transformer(
        tokens, d, width, [block() for _ in range(draw.between(1, 2))], last, cls, k
    ), (tokens, d)


def network(seed: int) -> tuple[nn.Module, tuple[int, ...], Draw]:
    """A random architecture with random weights, tame to wild."""
    draw = Draw(seed)
    k = draw.between(2, 4)
    model, shape = (mlp, transformer, transformer, conv, mlp, transformer)[seed % 6](draw, k)
    gain = math.exp(draw.uniform(math.log(0.1), math.log(5.0)))
    model = model.double().eval()
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.BatchNorm2d):
                    parameter.copy_(
                        (1.0 if name == "weight" else 0.0) + 0.5 * draw.normal(*parameter.shape)
                    )
                else:
                    fan = parameter[0].numel() if parameter.ndim > 1 else 1
                    parameter.copy_(
                        draw.normal(*parameter.shape)
                        * (gain / math.sqrt(fan) if parameter.ndim > 1 else 0.5)
                    )
    return model, shape, draw


def jacobian(
    model: Callable[[Tensor], Tensor], x: Tensor, shape: tuple[int, ...], graph: bool = False
) -> Tensor:
    """Of the model itself at flat points `(m, n)`: `(m, K, n)`."""
    with (
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):  # the fused kernels have no second derivatives
        if not x.requires_grad:
            x = x.clone().requires_grad_(True)
        z = model(x.reshape(-1, *shape))
        rows = [
            torch.autograd.grad(z[:, k].sum(), x, retain_graph=True, create_graph=graph)[0]
            for k in range(z.shape[1])
        ]
    return torch.stack(rows, 1)


def outward(k: int, outputs: str, norm_out: float) -> Tensor | None:
    """Rows v `(V, K)` with `||J|| = max_v ||J^T v||_s`; None for the spectral norm."""
    eye = torch.eye(k, dtype=torch.float64)
    if outputs == "margins":
        return torch.stack([eye[i] - eye[j] for i in range(k) for j in range(i)])
    if norm_out == math.inf:
        return eye
    if norm_out == 1:
        return torch.tensor(list(product((1.0, -1.0), repeat=k)), dtype=torch.float64)
    return None


def steepness(j: Tensor, norm: float, rows: Tensor | None, norm_out: float) -> Tensor:
    """`||J||` of `(m, K, n)` from the input norm to that of the outputs, `(m,)`."""
    if rows is not None:
        return torch.linalg.vector_norm(rows @ j, dual(norm), dim=2).amax(1)
    if norm == 1:
        return torch.linalg.vector_norm(j, norm_out, dim=1).amax(1)
    return torch.linalg.matrix_norm(j, 2)


def points_of(region: Region, draw: Draw, count: int) -> Tensor:
    """Random points, at several scales on R^n, and corners."""
    if not region.bounded:
        return torch.cat(
            [
                scale * draw.normal(count // 5, len(region.low))
                for scale in (0.05, 0.5, 3.0, 30.0, 1000.0)
            ]
        )
    low, high = region.box
    inside = region.sample(count // 2, draw.generator)
    corners = torch.where(draw.normal(count // 2, len(low)) > 0, low, high)
    return torch.cat([inside, region.inside(corners)])


def ascent(
    model: nn.Module,
    region: Region,
    shape: tuple[int, ...],
    x: Tensor,
    size: Callable[[Tensor], Tensor],
    steps: int,
) -> Tensor:
    """The points moved to where the Jacobian's norm is larger, each by steps of its own; the
    values reached, `(m,)`.
    """
    low, high = region.box
    width = float((high - low).max()) if region.bounded else 1.0
    step = 0.2 * (
        torch.full_like(x[:, :1], width) if region.bounded else x.abs().amax(1, keepdim=True) + 0.1
    )

    def climb(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_(True)
        value = size(jacobian(model, x, shape, graph=True))
        pull = (
            torch.autograd.grad(value.sum(), x)[0] if value.requires_grad else torch.zeros_like(x)
        )
        pull = torch.nan_to_num(pull)
        return value.detach(), pull / pull.abs().amax(1, keepdim=True).clamp(min=1e-300)

    best, pull = climb(x)
    for _ in range(steps):
        moved = region.inside(x + step * pull)
        value, turn = climb(moved)
        better = (value > best)[:, None]
        x = torch.where(better, moved, x)
        pull = torch.where(better, turn, pull)
        best = torch.maximum(value, best)
        step = torch.where(better, 1.7 * step, 0.35 * step)
    return best


def chord_slopes(
    model: nn.Module,
    region: Region,
    shape: tuple[int, ...],
    x: Tensor,
    norm: float,
    rows: Tensor | None,
    q: float,
    draw: Draw,
) -> Tensor:
    """Between points near and far, less what rounding may add."""
    near = region.inside(x + 1e-3 * (1 + x.abs().amax()) * draw.normal(*x.shape))
    pairs = torch.cat(
        [torch.stack([x, near]), torch.stack([x, x.roll(1, 0)]), torch.stack([x, x.roll(7, 0)])], 1
    )
    with torch.no_grad():
        a, b = (model(side.reshape(-1, *shape)) for side in pairs)
    length = torch.linalg.vector_norm(pairs[0] - pairs[1], norm, dim=1)
    rise = (
        torch.linalg.vector_norm(a - b, q, dim=1)
        if rows is None
        else ((a - b) @ rows.T).abs().amax(1)
    )
    noise = 1e-11 * torch.maximum(a.abs(), b.abs()).amax(1)
    return ((rise - noise) / length.clamp(min=1e-300))[length > 0]


class Tally:
    """Comparisons made, and those that failed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.wrong = list[str]()

    def above(self, upper: float, values: Tensor, what: str) -> None:
        self.count += values.numel()
        if values.numel() and not float(values.max()) <= upper + 1e-9 * abs(upper):
            self.wrong.append(f"{self.name} {what}: {float(values.max())!r} above {upper!r}")

    def true(self, good: bool, what: str) -> None:
        self.count += 1
        if not good:
            self.wrong.append(f"{self.name} {what}")


def slopes(
    tally: Tally,
    model: nn.Module,
    graph: Graph,
    where: Where,
    norm: float,
    outputs: str,
    q: float | None,
    method: str,
    draw: Draw,
    *,
    limit: float = 0.3,
    count: int = 40,
    steps: int = 20,
) -> None:
    """An upper slope against Jacobians at random points, corners and after an ascent, against
    chords, and its witness.
    """
    shape = graph.nodes[0].shape
    region = Region.make(where, graph.inputs)
    rows = outward(graph.outputs, outputs, math.inf if q is None else q)

    def size(j: Tensor) -> Tensor:
        return steepness(j, norm, rows, 0.0 if q is None else q)

    x = points_of(region, draw, count)
    found = size(jacobian(model, x, shape)).detach()
    steep = x[found.topk(count // 5).indices]
    climbed = ascent(model, region, shape, torch.cat([steep, x[: count // 10]]), size, steps)
    chords = chord_slopes(model, region, shape, x, norm, rows, 0.0 if q is None else q, draw)
    bound = ws.lipschitz(
        graph, norm, where, outputs=outputs, norm_out=q, method=method, time_limit=limit
    )
    title = f"{region} l{norm:g} {outputs} {q} {method}"
    for values, what in ((found, "Jacobian"), (climbed, "ascent"), (chords, "chord")):
        tally.above(bound.upper, values, f"{title} {what}")
    tally.true(bound.lower <= bound.upper, f"{title} crossed")
    if bound.witness is not None:
        at = bound.witness.flatten()[None]
        tally.true(bool(region.contains(at, 1e-9).all()), f"{title} witness outside")
        # Where a LayerNorm's input is almost constant, the last digit of the point decides about
        # many of the Jacobian's.
        around = torch.cat([at, at * (1 + 2.0**-52 * draw.normal(8, at.shape[1]).sign())])
        reached = size(jacobian(model, around, shape)).detach()
        noise = float((reached - reached[0]).abs().max())
        good = float(reached[0]) >= bound.lower * (1 - 1e-9) - 10 * noise
        tally.true(good, f"{title} witness {float(reached[0])} below {bound.lower}")


def cases(seed: int, x: Tensor) -> Iterator[tuple[Where, float, str, float | None, str]]:
    """Two of three domains, each with a norm, a kind of output and a method; over the seeds
    they all meet.
    """
    domains: tuple[Where, ...] = (
        None,
        (0.0, 1.0),
        Ball(x, (0.3, 0.03, 2.0)[seed % 3], NORMS[seed // 3 % 3]),
    )
    for i, where in enumerate(domains):
        if (seed // 6 + seed) % 3 == i:
            continue
        norm = NORMS[(seed + i) % 3]
        kind = (seed // 2 + i) % 3
        method = METHODS[(seed // 18 + i) % 3]
        yield (
            where,
            norm,
            "margins" if kind else "logits",
            None if kind else (norm, dual(norm))[seed % 2],
            method,
        )


def violations(seed: int) -> tuple[int, list[str]]:
    """How many comparisons were made with one network, and which failed."""
    model, shape, draw = network(seed)
    tally = Tally(f"seed {seed}")
    x = torch.rand(3, *shape, dtype=torch.float64, generator=draw.generator)
    graph = read(model, shape, smooth=True)
    for where, norm, outputs, q, method in cases(seed, x[0]):
        slopes(tally, model, graph, where, norm, outputs, q, method, draw)
    if seed % 10 in (0, 7):
        radii(tally, model, graph, x, NORMS[seed // 10 % 3], draw)
    if seed % 10 in (1, 8):
        losses(tally, model, graph, x, NORMS[seed // 10 % 3], draw)
    return tally.count, tally.wrong


def radii(tally: Tally, model: nn.Module, graph: Graph, x: Tensor, norm: float, draw: Draw) -> None:
    """Certified radii against the flips of an attack."""
    with torch.no_grad():
        y = model(x).argmax(1)
    domain = (None, (0.0, 1.0))[draw.between(0, 1)]
    flips = ws.nearest(model, x, y, norm, domain=domain, passes=60)
    for method in ("crown", "auto") if graph.outputs == 2 else ("crown",):
        found = ws.radii(graph, x, y, norm, domain, method, tolerance=0.2, time_limit=0.5)
        tally.count += len(x)
        if (found.values > flips.distances).any():
            tally.wrong.append(
                f"{tally.name} {method} l{norm:g} {domain}: {found.values} above {flips.distances}"
            )


def losses(
    tally: Tally, model: nn.Module, graph: Graph, x: Tensor, norm: float, draw: Draw
) -> None:
    """`certify`: the sides in order, the witness as bad as it says, no random point above the
    upper line.
    """
    y = torch.arange(len(x)) % 2
    loss = ("cross_entropy", "margin")[draw.between(0, 1)]
    domain = (None, (0.0, 1.0))[draw.between(0, 1)]
    title = f"{loss} l{norm:g} {'R^n' if domain is None else 'box'}"
    try:
        found = ws.certify(graph, x, y, norm, loss, domain, time_limit=1.0)
    except ws.InputError as error:
        return tally.true(
            domain is None and "not Lipschitz on R^n" in str(error), f"{title}: {error}"
        )

    def worst(points: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            return LIPSCHITZ[loss](model(points.reshape(-1, *x.shape[1:])), labels)

    start = worst(x, y)
    for eps in (0.01, 0.3, 5.0, 1000.0):
        low, high = found.bounds(eps)
        tally.true(low <= high, f"{title} {eps}: {low} above {high}")
        adversary = found.witness(eps)
        tally.true(
            bool(adversary.verify(model)) and adversary.cost <= eps * (1 + 1e-9),
            f"{title} {eps}: witness",
        )
        value = (start + adversary.weights * (worst(adversary.points, y) - start)).mean(
            0, keepdim=True
        )
        tally.above(high, value, f"{title} {eps}: the witness's loss")
    away = points_of(Region.make(domain, graph.inputs), draw, 40)
    for i in range(len(x)):  # all of sample i moved to one place
        length = torch.linalg.vector_norm(away - x[i].flatten(), norm, dim=1) / len(x)
        rise = start.mean() + (worst(away, y[i].expand(len(away))) - start[i]) / len(x)
        for value, eps in zip(rise, length.tolist()):
            tally.above(found.upper(eps), value[None], f"{title}: a point at {eps}")


# Seeds that take little time: all families, domains, norms and methods, radii and a certificate
# among them.
FEW = (24, 52, 119, 174, 189, 303, 309, 314, 374, 384, 388, 470, 484, 492)


@pytest.mark.slow_cases("1", "2", "3")
@pytest.mark.parametrize("part", range(4))
def test_a_few_networks(part: int) -> None:
    assert [v for seed in FEW[part::4] for v in violations(seed)[1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_five_hundred_networks(part: int) -> None:
    assert [v for seed in range(25 * part, 25 * part + 25) for v in violations(seed)[1]] == []


def real(zoo: ModuleType, name: str) -> tuple[nn.Module, Tensor]:
    """A real network in float64 and its first image."""
    path = Path(str(zoo.__file__)).parent / "models" / f"{name}.onnx"
    if path.exists():
        model = ws.zoo.load_onnx(path, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
    else:
        model = zoo.load(name)[0]
    return model.double().eval().requires_grad_(False), zoo.images("cifar10", 1)[0][0].double()


def real_violations(zoo: ModuleType, name: str, kind: str, norm: float, method: str) -> list[str]:
    model, x = real(zoo, name)
    domains: dict[str, Where] = {
        "box": (0.0, 1.0),
        "linf": Ball(x, 1 / 255, math.inf, (0.0, 1.0)),
        "l2": Ball(x, 0.01, 2.0),
    }
    tally = Tally(name)
    graph = read(model, tuple(x.shape), smooth=True)
    slopes(
        tally,
        model,
        graph,
        domains[kind],
        norm,
        "margins",
        None,
        method,
        Draw(0),
        limit=1.0,
        count=10,
        steps=4,
    )
    return tally.wrong


@pytest.mark.slow_cases("cifar_vit_pgd_2_3_16-l2-2.0")
@pytest.mark.parametrize(
    ("name", "kind", "norm"),
    [("cifar_conv_small_sigmoid", "linf", math.inf), ("cifar_vit_pgd_2_3_16", "l2", 2.0)],
)
def test_real_networks(zoo: ModuleType, name: str, kind: str, norm: float) -> None:
    assert real_violations(zoo, name, kind, norm, "propagate") == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize(
    ("kind", "norm"),
    [("box", 2.0), ("box", math.inf), ("linf", math.inf), ("l2", 2.0), ("l2", 1.0)],
)
@pytest.mark.parametrize(
    "name", ["cifar_conv_small_sigmoid", "cifar_vit_pgd_2_3_16", "cifar_vit_ibp_3_3_8"]
)
def test_real_networks_on_boxes_and_balls(
    zoo: ModuleType, name: str, kind: str, norm: float, method: str
) -> None:
    assert real_violations(zoo, name, kind, norm, method) == []
