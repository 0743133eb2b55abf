"""Small networks as graphs, regions around the origin, and many points of a region."""

import itertools
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks import Net, seeded
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
    regions: dict[str, Where] = {
        "box": (torch.zeros(n), torch.ones(n)),
        "l1": Ball(centre, 0.7, 1),
        "l2 in a box": Ball(centre, 0.5, 2, (0.0, 1.0)),
        "linf": Ball(centre, 0.3, math.inf),
        "R^n": None,
    }
    return regions[kind]


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


PAIRS = list(itertools.product(NORMS, NORMS))
