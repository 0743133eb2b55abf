"""Small random networks of every activation that the reader knows, as people have them: either
precision, logits with a common offset, inputs that may not move, any batch size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import wassail as ws
from support.networks import Net
from support.rescaled import nearest

NORMS = (1.0, 2.0, math.inf)
METHODS = ("auto", "crown", "ball", "branch", "exact")
PIECEWISE: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    lambda: nn.LeakyReLU(0.1),
    lambda: nn.LeakyReLU(-0.2),
    lambda: nn.PReLU(1, 0.3),
    nn.Hardtanh,
    nn.ReLU6,
    nn.Hardsigmoid,
    lambda: Net(lambda m, x: x.abs()),
    lambda: Net(lambda m, x: x.clamp(-0.3, 0.8)),
    lambda: Net(lambda m, x: torch.maximum(x, x.flip(1))),
    lambda: Net(lambda m, x: x.sort(1).values),
)
SMOOTH: tuple[Callable[[], nn.Module], ...] = (
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    lambda: nn.GELU("tanh"),
    nn.SiLU,
    nn.Softplus,
    lambda: nn.Softplus(4.0),
    nn.ELU,
    lambda: nn.ELU(1.8),
    lambda: nn.CELU(1.5),
    nn.SELU,
    nn.Mish,
    nn.Hardswish,
    lambda: nn.Softmax(1),
    lambda: Net(lambda m, x: nn.functional.layer_norm(x, x.shape[1:], eps=0.1)),
)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A network, samples that it classifies, and how radii of them are asked for."""

    model: nn.Module
    x: Tensor
    y: Tensor
    norm: float
    domain: tuple[float, float] | None
    method: str
    options: dict[str, Any] = field(default_factory=dict)


class Shifted(nn.Module):
    """A model all of whose logits are larger by one number: its predictions are the same."""

    def __init__(self, model: nn.Module, offset: float) -> None:
        super().__init__()
        self.model = model
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + self.offset


def drawn(seed: int) -> Drawn:
    """The network of a seed; the seed says which of the choices meet, in turn."""
    g = torch.Generator().manual_seed(seed)

    def one(*choices: float) -> float:
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    smooth = seed % 2 == 1
    acts = SMOOTH if smooth else PIECEWISE
    depth = 1 + int(one(0, 0, 1))
    sizes = [int(one(2, 3, 4)), *(int(one(3, 4, 5)) for _ in range(depth)), int(one(2, 3))]
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layer = nn.Linear(a, b, bias=bool(one(1, 1, 1, 0)))
        with torch.no_grad():
            for parameter in layer.parameters():
                scale = 2 / a**0.5 if parameter.ndim > 1 else 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=g))
        layers += [layer, acts[(seed // 2 + i) % len(acts)]()]
    model: nn.Module = nn.Sequential(*layers[:-1])
    offset = one(0.0, 0.0, 1.0, -100.0, 1e4, -1e4)
    model = Shifted(model, offset) if offset else model
    # Smooth networks are bounded as exact functions, which float32 with an offset is far from.
    dtype = torch.float64 if smooth or one(0, 1) else torch.float32
    model = model.to(dtype).eval()
    x = torch.rand(3, sizes[0], generator=g, dtype=torch.float64)
    domain: tuple[float, float] | None = (0.0, 1.0) if one(1, 1, 1, 0) else None
    held = int(one(0, 0, 1, sizes[0] - 1))
    if held:
        x[:, :held] = x[0, :held]
        low = torch.cat([x[0, :held], torch.zeros(sizes[0] - held).double()])
        high = torch.cat([x[0, :held], torch.ones(sizes[0] - held).double()])
        features = ws.Features(low, high)
        model, domain = features.model(model), features.domain
        x = features.encode(x.numpy(), dtype=dtype).double()
    x = x.to(dtype)
    with torch.no_grad():
        y = model(x).argmax(1)
    method = METHODS[seed // 2 % len(METHODS)]
    size = (None, 1, 2)[seed // 5 % 3]
    options: dict[str, Any] = {} if size is None else {"batch_size": size}
    if smooth and method in ("branch", "exact"):
        options["time_limit"] = 0.3  # branching goes on for minutes; what is proved by then is kept
    return Drawn(model, x, y, NORMS[seed // 3 % 3], domain, method, options)


def flips(case: Drawn, seed: int) -> Tensor:
    """The distances of the nearest flips that an attack and random points find, `(N,)`."""
    found = ws.nearest(case.model, case.x, case.y, case.norm, case.domain, passes=30).distances
    g = torch.Generator().manual_seed(seed)
    shape = (300, case.x.shape[1])
    points = torch.rand(*shape, generator=g, dtype=torch.float64)
    points[:100] = points[:100].round()
    if case.domain is None:
        points = 4 * points - 1.5
    points = points.to(case.x.dtype)
    with torch.no_grad():
        label = case.model(points).argmax(1)
        others = [
            nearest(case.model, a, b, points[label != b], case.norm) for a, b in zip(case.x, case.y)
        ]
    return torch.minimum(found, torch.stack(others))


def above_flips(seed: int) -> list[str]:
    """Radii of the network of a seed that are above a flip: none should be."""
    case = drawn(seed)
    found = ws.radii(
        case.model, case.x, case.y, case.norm, case.domain, case.method, **case.options
    ).values
    known = flips(case, seed)
    return [
        f"{seed}: radius {r} by {case.method} at norm {case.norm}, a flip at {d}"
        for r, d in zip(found.tolist(), known.tolist())
        if r > d
    ]
