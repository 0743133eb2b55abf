"""Max poolings as ReLUs: linear bounds spend nothing on comparisons that rounding alone leaves
open, and take them for no depth.
"""

import math

import torch
from torch import nn

from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins


def pooled(strength: float) -> nn.Sequential:
    """Two convolutions, the second with weights times `strength`, a max pooling, a linear layer."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 3, 3, padding=1).double()
    mixed = nn.Conv2d(3, 3, 3, padding=1).double()
    with torch.no_grad():
        assert mixed.bias is not None
        mixed.weight.mul_(strength)
        mixed.bias.fill_(0.5)
    layers = [first, nn.ReLU(), mixed, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(192, 2).double())


def swept(model: nn.Module, radius: float) -> Sweep:
    graph = read(model, (1, 16, 16))
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    balls = Balls.make(x, torch.full((2,), radius, dtype=torch.float64), math.inf, (0.0, 1.0))
    return Sweep(graph, balls).run()


def test_neurons_that_stand_still_are_not_compared() -> None:
    assert swept(pooled(1e-18), 0.1).rows == 0


def test_open_comparisons_are_still_bounded() -> None:
    sweep = swept(pooled(1.0), 0.05)
    assert sweep.rows > 0
    lower = margins(sweep, torch.zeros(2, dtype=torch.int64))[0]
    x = sweep.balls.x.reshape(-1, 1, 16, 16)
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        z = sweep.graph.logits((x + 0.05 * signs).clamp(0, 1))
        assert (z[:, :1] - z >= lower - 1e-9).all()


def test_poolings_are_no_depth() -> None:
    wide = [
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1).double(), nn.ReLU(), *pools, nn.Flatten())
        for pools in ([nn.MaxPool2d(2)], [nn.MaxPool2d(2), nn.MaxPool2d(2)])
    ]
    ends = [nn.Sequential(*net, nn.Linear(8 * n, 2).double()) for net, n in zip(wide, (64, 16))]
    assert [swept(net, 0.01).coarse for net in ends] == [True, True]
