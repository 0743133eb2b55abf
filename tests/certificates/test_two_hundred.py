"""200 random regressions and multi-label networks, ReLU and smooth, of one to three outputs, with
inputs that are frozen and boxes of their own: no radius holds a sampled or attacked violation, and
no loss that is sampled or attacked lies above its bound.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws

INF = math.inf
DOUBLE = torch.float64
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.Sigmoid, nn.ReLU, nn.GELU, nn.Softplus)
NORMS = (1.0, 2.0, INF)
LOSSES = ("absolute", "pinball", "huber", "squared")
ORDERS = (1.0, 2.0, INF)
SAMPLES = 4
DRAWN = 300  # points a sample
FEW = (0, 3, 4, 6)  # networks of every run of the tests
PART = 10  # networks of a slow test


class Case:
    """One network, its samples, and their boxes, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(1000 + seed)
        self.seed = seed
        n = 2 + int(torch.randint(4, (1,), generator=self.draw))
        self.outputs = 1 + seed % 3
        widths = [n, *torch.randint(3, 9, (1 + seed % 2,), generator=self.draw).tolist()]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), ACTIVATIONS[seed % len(ACTIVATIONS)]()]
        self.net = nn.Sequential(*layers, nn.Linear(widths[-1], self.outputs)).double().eval()
        for value in self.net.parameters():
            value.data = 1.2 * torch.randn(value.shape, dtype=DOUBLE, generator=self.draw)
        self.x = torch.rand(SAMPLES, n, dtype=DOUBLE, generator=self.draw)
        self.norm = NORMS[seed // 2 % 3]
        width = torch.rand(SAMPLES, n, dtype=DOUBLE, generator=self.draw)
        frozen = torch.rand(SAMPLES, n, generator=self.draw) < 0.3
        frozen[:, 0] = False  # one input moves
        width[frozen] = 0.0
        self.box = (self.x - width, self.x + width * (seed % 5 > 0))
        noise = 0.3 * torch.randn(SAMPLES, self.outputs, dtype=DOUBLE, generator=self.draw)
        self.y = self.at(self.x) + noise

    def at(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.net(x)

    def near(self, radius: Tensor) -> Tensor:
        """Points of the balls cut by the boxes, `(DRAWN, N, n)`, most of them at a rim."""
        v = torch.randn(DRAWN, *self.x.shape, dtype=DOUBLE, generator=self.draw)
        v[::3] *= torch.rand(v[::3].shape, generator=self.draw) < 0.4
        v = torch.where(self.box[0] < self.box[1], v, 0.0)
        size = torch.linalg.vector_norm(v, self.norm, dim=2, keepdim=True).clamp(min=1e-12)
        share = torch.rand(DRAWN, SAMPLES, 1, dtype=DOUBLE, generator=self.draw) ** 0.3
        return (self.x + v / size * share * radius[:, None]).clamp(*self.box)

    def rule(self) -> ws.Specification:
        """Within a tolerance for even seeds, all labels for odd ones."""
        if self.seed % 2 == 0:
            return ws.Specification.within(self.y, (self.y - self.at(self.x)).abs().amax(1) + 0.2)
        return ws.Specification.multilabel(self.at(self.x) > 0)


def check_radii(case: Case) -> None:
    rule = case.rule()
    method = "auto" if case.seed % 4 < 2 else "crown"
    radii = ws.radii(case.net, case.x, rule, case.norm, case.box, method=method).values
    assert bool((radii > 0).any())
    for shrink in (1.0, 0.5):
        for points in case.near(shrink * radii.clamp(max=10.0)):
            assert bool((rule.margins(case.at(points)) > 0).all())
    flips = ws.nearest(case.net, case.x, rule, case.norm, case.box, passes=60, warn=False)
    assert bool((radii <= flips.distances * (1 + 1e-9)).all())


def losses(e: Tensor, loss: str) -> Tensor:
    huber = nn.functional.huber_loss(e, torch.zeros_like(e), reduction="none", delta=0.4)
    pinball = torch.where(e < 0, -0.9 * e, (1 - 0.9) * e)
    known = {"absolute": e.abs(), "pinball": pinball, "huber": huber, "squared": e * e}
    return known[loss].amax(-1)


def check_losses(case: Case) -> None:
    loss = LOSSES[case.seed // 2 % 4]
    grid = [0.05, 0.2, 0.6]
    curve = ws.loss_curve(
        case.net, case.x, case.y, case.norm, 1, loss, case.box, quantile=0.9, delta=0.4, grid=grid
    )
    wide = curve.of_order(INF)
    for radius in (0.02, *grid, 1.5):
        points = case.near(torch.full((SAMPLES,), radius, dtype=DOUBLE))
        found = losses(case.at(points) - case.y, loss).amax(0)
        high = wide(radius)[1]
        assert float(found.mean()) <= high * (1 + 1e-9) + 1e-12
        # One sample moves with the share of its mass that the budget pays for, the rest stay.
        clean = losses(case.at(case.x) - case.y, loss)
        gain = float((found - clean).max()) / SAMPLES
        for order in (1.0, 2.0):
            low, high = curve.of_order(order)(radius / SAMPLES ** (1 / order))
            assert float(clean.mean()) + gain <= high * (1 + 1e-9) + 1e-12 and low <= high
    for order in ORDERS:
        one = curve.of_order(order)
        witness = one.witness(0.1)
        assert witness.verify(case.net) and witness.info["loss"] <= one(0.1)[1]


def check(seed: int) -> None:
    case = Case(seed)
    check_radii(case)
    check_losses(case)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", FEW)
def test_a_few(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_all(part: int) -> None:
    for seed in range(PART * part, PART * (part + 1)):
        check(seed)
