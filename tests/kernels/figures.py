"""What must not depend on the processor, the number of threads, or how work is cut: certificates of
small networks.

The networks are chosen for their ties: pooling, symmetric weights, samples in the middle of the
box. `python figures.py` prints the figures of this machine as it is set up; `run.py` compares those
of several set-ups.
"""

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.crown import margin_bounds
from wassail.certificates.relax.jacobian import gradients
from wassail.certificates.relax.ranges import bounds_on

INF = math.inf
# relative to the largest figure of a kind: float32 steers some of the bounds, 2e-6 was seen
AGREE = 1e-5


class Pools(nn.Module):
    """Max pooling is `b + relu(a - b)`, whose spans over a box are symmetric."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 2, 2)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(self.a(x), 3, 2, 1).relu()
        return self.b(F.avg_pool2d(pooled, 2, 1).flatten(1))


def seeded(make: type[nn.Module] | nn.Module, seed: int) -> nn.Module:
    """A network with weights of its own, in float64."""
    generator = torch.Generator().manual_seed(seed)
    model = (make() if isinstance(make, type) else make).double().eval()
    for value in model.parameters():
        spread = 1.5 / max(1, value[0].numel()) ** 0.5 if value.ndim > 1 else 0.3
        value.data = spread * torch.randn(value.shape, dtype=torch.float64, generator=generator)
    return model


def mirrored() -> nn.Module:
    """Every neuron and its negative: `|v|` from two ReLUs, ties wherever one looks."""
    model = seeded(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), 3
    )
    for layer in (model[0], model[2]):
        layer.weight.data[4:], layer.bias.data[4:] = -layer.weight.data[:4], -layer.bias.data[:4]
    return model


def cases() -> Iterator[tuple[str, Graph, Tensor, Tensor]]:
    """Name, network, samples, labels."""
    generator = torch.Generator().manual_seed(0)
    for name, model, shape in (
        ("pools 1", seeded(Pools, 1), (1, 6, 6)),
        ("pools 2", seeded(Pools, 2), (1, 6, 6)),
        ("mirrored", mirrored(), (4,)),
    ):
        some = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
        x = torch.cat([some, torch.full((1, *shape), 0.5, dtype=torch.float64)])
        graph = read(model, shape)
        yield name, graph, x, graph.logits(x).argmax(1)


def bounds(few: bool = False) -> Iterator[tuple[str, Tensor]]:
    """What a radius or a slope is made of: spans, gradients, margins; few: of one network with
    pools only.
    """
    for name, graph, x, y in cases():
        if few and name == "pools 2":
            continue
        region = Region.make((0.0, 1.0), graph.inputs)
        found = bounds_on(graph, region)
        for i, span in found.spans.items():
            yield f"{name}, span {i}", torch.cat([side.flatten() for side in span])
        slopes = gradients(found, torch.eye(graph.outputs, dtype=torch.float64))
        yield f"{name}, gradients", torch.stack(slopes.entries()).flatten()
        yield f"{name}, gradient norms", slopes.norm(1.0, slopes.entries())
        for norm, radius in ((1.0, 1.0), (2.0, 1.0), (INF, 0.3)):
            for steps in (0, 8) if norm == 2 else (0,):
                margins = margin_bounds(graph, x, y, radius, norm, (0.0, 1.0), steps)
                yield f"{name}, margins l{norm:g} at {radius:g}, {steps} steps", margins.flatten()


def answers() -> Iterator[tuple[str, Tensor]]:
    """What a user asks for."""
    (_, graph, x, y), _, last = cases()
    for norm in (2.0, INF):
        yield f"pools, radii l{norm:g}", ws.radii(graph, x[1:], y[1:], norm, method="crown").values
    yield (
        "pools, radii by branch",
        ws.radii(graph, x[:1], y[:1], 2.0, method="branch", tolerance=0.1).values,
    )
    _, graph, x, y = last
    for norm, method in ((2.0, "ball"), (2.0, "branch"), (INF, "exact"), (INF, "auto")):
        found = ws.radii(graph, x[1:2], y[1:2], norm, method=method, tolerance=0.05)
        yield f"mirrored, radii l{norm:g} by {method}", found.values
    for method in ("propagate", "sdp", "auto"):
        steepest = ws.lipschitz(graph, 2, (0.0, 1.0), method=method)
        yield f"Lipschitz constant by {method}", torch.tensor([steepest.lower, steepest.upper])
    slopes = ws.certify(graph, x, y, 2, domain=None)
    for name in ("infinity", "margin", "paper"):
        bound = getattr(slopes, name)
        yield f"slope {name}", torch.tensor([bound.lower, bound.upper])
    curve = ws.loss_curve(graph, x, y, INF, 1, grid=[0.05, 0.2])
    yield "loss curve", torch.tensor([side for eps in (0.01, 0.1) for side in curve(eps)])


def attacks() -> Iterator[tuple[str, Tensor]]:
    """Distances of the nearest flips known."""
    for name, _, x, y in cases():
        model = seeded(Pools, int(name[-1])) if name.startswith("pools") else mirrored()
        for norm in (2.0, INF):
            yield f"{name}, flips l{norm:g}", ws.nearest(model, x, y, norm).distances


def figures() -> dict[str, list[float]]:
    """All of them."""
    parts = (bounds, answers, attacks)
    return {name: values.double().tolist() for part in parts for name, values in part()}


def apart(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, Any]:
    """By how much each figure differs, relative to the largest of its kind; a finite one from
    an infinite one: inf.
    """
    found = {}
    for name in one:
        a, b = (torch.tensor(values[name], dtype=torch.float64) for values in (one, other))
        size = torch.where(torch.isfinite(a), a.abs(), 0.0).amax().clamp(min=1e-300)
        off = torch.where(a == b, 0.0, (a - b).abs() / size)
        found[name] = float(torch.nan_to_num(off, nan=math.inf).amax())
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(figures()))
