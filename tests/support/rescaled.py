"""Small random networks of all layer kinds, the same networks with their layers rescaled, and their
nearest flips.

A template is read once; a random network of it has other weights in the same graph, so hundreds of
them cost little.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from support.networks import Net
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Concat, Matrix, Pick, Sum
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.operators.pooling import Average
from wassail.certificates.graph.reader import read


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )


def shallow() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))


def leaky() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 4), nn.LeakyReLU(0.1), nn.Linear(4, 4), nn.LeakyReLU(0.3), nn.Linear(4, 3)
    )


def residual() -> nn.Module:
    return Net(
        lambda m, x: m.out(m.step(h := torch.relu(m.stem(x))) + h),
        stem=nn.Linear(2, 4),
        step=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        out=nn.Sequential(nn.ReLU(), nn.Linear(4, 3)),
    )


def joined() -> nn.Module:
    return Net(
        lambda m, x: m.out(torch.cat([torch.relu(m.one(x)), torch.relu(m.two(x))], 1)),
        one=nn.Linear(2, 3),
        two=nn.Linear(2, 3),
        out=nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)),
    )


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Conv2d(2, 2, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def max_pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )


def mean_pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2, 1),
        nn.ReLU6(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def smooth() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )


PIECEWISE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (2,)),
    "shallow": (shallow, (2,)),
    "leaky": (leaky, (2,)),
    "residual": (residual, (2,)),
    "joined": (joined, (2,)),
    "conv": (conv, (1, 2, 2)),
    "max pooled": (max_pooled, (1, 2, 2)),
    "mean pooled": (mean_pooled, (1, 2, 2)),
}
ALL = {**PIECEWISE, "smooth": (smooth, (2,))}


@cache
def template(name: str) -> Graph:
    make, shape = ALL[name]
    return read(make().double().eval(), shape, smooth=True)


def random_graph(name: str, seed: int) -> Graph:
    """The template with other weights and biases: scales of order one, some of them exactly 0."""
    g = torch.Generator().manual_seed(seed)

    def fresh(values: Tensor, fan: int) -> Tensor:
        drawn = torch.randn(values.shape, generator=g, dtype=torch.float64) * (1.5 / fan**0.5)
        return torch.where(torch.rand(values.shape, generator=g) < 0.1, 0.0, drawn)

    def renewed(node: Node) -> Node:
        match node.map:
            case Matrix(weight):
                matrix = Matrix(fresh(weight, weight.shape[1]))
                return replace(node, op=Affine(matrix, fresh(torch.zeros(node.shape), 2)))
            case Conv(weight):
                conv = replace(node.map, weight=fresh(weight, weight[0].numel()))
                bias = fresh(torch.zeros(node.shape[0], 1, 1), 2)
                return replace(node, op=Affine(conv, bias))
            case _:
                return node

    graph = replace(template(name), nodes=tuple(renewed(node) for node in template(name).nodes))
    # The logits are balanced, so that most networks have flips in the box.
    *before, last = graph.nodes
    points = torch.rand(50, *graph.nodes[0].shape, generator=g, dtype=torch.float64)
    assert isinstance(last.op, Affine) and last.op.bias is not None
    op = replace(last.op, bias=last.op.bias - graph.logits(points).mean(0))
    return replace(graph, nodes=(*before, replace(last, op=op)))


def rescaled(graph: Graph, seed: int, most: int) -> Graph:
    """The same function: all nodes that scale together are multiplied by one power of two, up to
    2^most.

    The input, the logits and what a smooth function sees and returns keep their scale.
    """
    g = torch.Generator().manual_seed(seed)
    exponent = [int(torch.randint(-most, most + 1, (1,), generator=g)) for _ in graph.nodes]
    exponent[0] = exponent[-1] = 0
    for _ in graph.nodes:  # until nodes that must agree do: 0 wins, else the least
        for i, node in enumerate(graph.nodes):
            same = [i, *node.inputs]
            if isinstance(node.op, Smooth):
                chosen = 0
            elif isinstance(node.op, Relu) or isinstance(node.map, Pick | Average | Sum | Concat):
                chosen = 0 if 0 in (exponent[k] for k in same) else min(exponent[k] for k in same)
            else:
                continue
            for k in same:
                exponent[k] = chosen
    nodes = []
    for i, node in enumerate(graph.nodes):
        up = exponent[i] - (exponent[node.inputs[0]] if node.inputs else 0)
        if not isinstance(node.op, Affine):
            nodes.append(node)
            continue
        map_, bias, most_ = node.op.map, node.op.bias, node.op.bias_most
        if map_.coefficients is not None:
            map_ = map_.reweighted(_times(map_.coefficients, up))
        most_ = None if most_ is None else _times(most_, exponent[i])
        bias = None if bias is None else _times(bias, exponent[i])
        nodes.append(replace(node, op=Affine(map_, bias, most_)))
    return replace(graph, nodes=tuple(nodes))


def _times(values: Tensor, exponent: int) -> Tensor:
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


@dataclass(frozen=True)
class Case:
    """Samples of a network `(N, *shape)`, and for each the distance of the nearest flip that a
    search of the box finds.
    """

    x: Tensor
    y: Tensor
    flips: Tensor


def case(graph: Graph, seed: int, norm: float, samples: int = 2, count: int = 600) -> Case:
    """Samples in the unit box with the nearest flip among random points and corners, moved back
    to the boundary.
    """
    g = torch.Generator().manual_seed(seed)
    shape = graph.nodes[0].shape
    points = torch.rand(count, *shape, generator=g, dtype=torch.float64)
    corners = torch.randint(0, 2, (count // 4, *shape), generator=g).double()
    points = torch.cat([points, corners])
    found = graph.logits(points).argmax(1)
    x = points[:samples]
    y = found[:samples]
    flips = [nearest(graph.logits, a, b, points[found != b], norm) for a, b in zip(x, y)]
    return Case(x, y, torch.stack(flips))


def nearest(
    logits: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, ends: Tensor, norm: float
) -> Tensor:
    """The distance of the nearest flip, a point in the type of x, between a sample and flips."""
    if not len(ends):
        return torch.tensor(math.inf, dtype=torch.float64)
    length = torch.linalg.vector_norm((ends - x).flatten(1), norm, dim=1)
    ends = ends[length.argsort()[:64]].double()
    wide = [1] * x.ndim
    near = torch.zeros(len(ends), dtype=torch.float64)
    far = torch.ones(len(ends), dtype=torch.float64)

    def between(share: Tensor) -> Tensor:
        return (x + share.reshape(-1, *wide) * (ends - x)).to(x.dtype)

    for _ in range(16):
        middle = (near + far) / 2
        flipped = logits(between(middle)).argmax(1) != y
        near = torch.where(flipped, near, middle)
        far = torch.where(flipped, middle, far)
    away = between(far).double() - x.double()
    return torch.linalg.vector_norm(away.flatten(1), norm, dim=1).min()


NORMS = (math.inf, 2.0, 1.0)


def inside(x: Tensor, radius: Tensor, norm: float, count: int, seed: int) -> Tensor:
    """Points of the balls cut by the box [0, 1], many of them at the rim: `(count, N, *shape)`."""
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(count, *x.shape, generator=generator, dtype=torch.float64)
    d[::3] = d[::3] * (torch.rand(d[::3].shape, generator=generator) < 0.1)
    size = torch.linalg.vector_norm(d.flatten(2), norm, dim=2).clamp(min=1e-12)
    scale = (radius * (1 - 1e-12) / size).reshape(count, len(x), *[1] * (x.ndim - 1))
    return (x + d * scale).clamp(0.0, 1.0)
