"""Certificates on a second device: the figures of the CPU to the last bit, computed there, with
few questions to it.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.second_device import second_device
from wassail.certificates.bound import Bound
from wassail.certificates.graph.graph import Graph, Relu
from wassail.certificates.graph.reader import read
from wassail.certificates.relax import l1_vertices
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.l1_vertices import VertexCones
from wassail.certificates.search import margins as split
from wassail.certificates.search.margins import Tree
from wassail.certificates.search.subproblems import Subproblems

pytestmark = pytest.mark.device

INF = math.inf
BOX = (0.0, 1.0)
Call = Callable[[nn.Module, Tensor, Tensor], Any]


class Attention(nn.Module):
    """Two tokens that attend to each other, with a LayerNorm before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.all = nn.Linear(3, 9)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 3)
        q, k, v = self.all(self.norm(x)).chunk(3, -1)
        return self.head((x + torch.softmax(q @ k.mT, -1) @ v).flatten(1))


class Pairs(nn.Module):
    """The two halves compared, as in MaxMin."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (
        lambda: nn.Sequential(
            nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
        ),
        (3,),
    ),
    "plane": (lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3)), (2,)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2, 3, 2),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
            nn.Linear(3, 3),
        ),
        (1, 4, 4),
    ),
    "decoder": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(1, 4, 2, 2),
            nn.LeakyReLU(-0.4),
            nn.PixelShuffle(2),
            nn.AdaptiveMaxPool2d(3),
            nn.InstanceNorm2d(1, affine=True, track_running_stats=True).eval(),
            nn.Flatten(),
            nn.Linear(9, 3),
        ).eval(),
        (1, 2, 2),
    ),
    "waves": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.Mish(), nn.Linear(4, 4), nn.Hardswish(), nn.Linear(4, 3)
        ),
        (3,),
    ),
    "sorting": (
        lambda: nn.Sequential(nn.Linear(3, 6), Pairs(), nn.Linear(6, 4), Pairs(), nn.Linear(4, 3)),
        (3,),
    ),
    "smooth": (lambda: nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 3)), (2,)),
    "tokens": (Attention, (6,)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(5)
    model = NETS[name][0]()
    for p in model.parameters():
        p.data *= 1.5
    return model


def data(name: str, count: int = 2) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, *NETS[name][1], generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return x, made(name)(x).argmax(1)


def radius(method: str, norm: float, **more: Any) -> Call:
    def call(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        found = ws.radii(model, x, y, norm, method=method, tolerance=0.5, effort=0.02, **more)
        return found.values, found.exact, found.points

    return call


def verified(method: str, norm: float, eps: float) -> Call:
    def call(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        found = ws.verify(model, x, y, ws.Threat(norm, INF, eps), method, effort=0.05)
        return found.proved, found.falsified, found.points

    return call


def constant(method: str, norm: float, domain: Any = BOX) -> Call:
    def call(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        found = ws.lipschitz(model, norm, domain, method=method, nodes=12, shape=x.shape[1:])
        return found.lower, found.upper, found.method, found.witness

    return call


def curve(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = ws.loss_curve(model, x, y, 2, grid=[0.1, 0.4], points=[x.clone()])
    return found(0.05), found(0.3), found.points, found.ceiling


def certified(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = ws.certify(model, x, y, 2, domain=None)
    return found.bounds(0.2), found.infinity, found.margin, found.points


def local(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = ws.certify(model, x, y, INF, domain=BOX, slopes=("margin",))
    return found.bounds(0.2), found.points


def cells(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = ws.worst_case(model, x, y, ws.Threat(2, 1, 0.1))
    return found.bound.lower, found.bound.upper, found.atoms


def modules(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = ws.corollary(model, 2, BOX, x.shape[1:])
    return found.rows, found.empirical, found.local


def slope(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = ws.paper_smooth_slope(model, 2, BOX, shape=x.shape[1:])
    return found.lower, found.upper


CASES: dict[str, tuple[str, Call]] = {
    "crown 1": ("relu", radius("crown", 1)),
    "crown 2": ("relu", radius("crown", 2)),
    "crown inf": ("images", radius("crown", INF)),
    "crown, executed": ("relu", radius("crown", INF, arithmetic="executed")),
    "crown, attention": ("tokens", radius("crown", INF)),
    "crown, decoder": ("decoder", radius("crown", 2)),
    "crown, waves": ("waves", radius("crown", 1)),
    "lipschitz, decoder": ("decoder", constant("product", INF)),
    "ball 2": ("relu", radius("ball", 2)),
    "ball, sorting": ("sorting", radius("ball", 2, arithmetic="executed")),
    "products of norms": ("smooth", radius("auto", 2)),
    "verify by balls": ("images", verified("ball", 2, 0.05)),
    "branch": ("relu", radius("branch", 2)),
    "branch, smooth": ("smooth", radius("branch", INF)),
    "exact": ("plane", radius("exact", INF)),
    "auto": ("relu", radius("auto", INF)),
    "verify": ("plane", verified("auto", 2, 0.05)),
    "verify by branching": ("images", verified("branch", INF, 0.1)),
    "loss curve": ("plane", curve),
    "lipschitz product": ("images", constant("product", INF)),
    "lipschitz propagate": ("images", constant("propagate", 2)),
    "lipschitz exact": ("relu", constant("exact", 2)),
    "lipschitz sdp": ("plane", constant("sdp", 2, None)),
    "lipschitz smooth": ("smooth", constant("exact", INF)),
    "certify": ("plane", certified),
    "certify in a box": ("plane", local),
    "worst case": ("plane", cells),
    "corollary": ("tokens", modules),
    "paper's slope": ("plane", slope),
}


# For a tensor of this kind torch asks for singular vectors too, and LAPACK then computes the values
# by another routine.
SPECTRAL = {
    "lipschitz product",
    "lipschitz propagate",
    "lipschitz sdp",
    "lipschitz exact",  # begins with the multipliers of the semidefinite bound
    "corollary",
    "certify",
    "certify in a box",
}


@cache
def wanted(case: str) -> Any:
    name, call = CASES[case]
    return call(made(name), *data(name))


def same(a: Any, b: Any, digits: float) -> bool:
    """To the last bit, or numbers to so many digits."""
    if isinstance(a, Tensor):
        return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(p, q, digits) for p, q in zip(a, b))
    if isinstance(a, Bound):
        return same((a.lower, a.upper, a.method), (b.lower, b.upper, b.method), digits)
    return bool(a == b or (digits and isinstance(a, float) and math.isclose(a, b, rel_tol=digits)))


@pytest.mark.slow_cases("ball, sorting")
@pytest.mark.parametrize("case", CASES)
def test_the_figures_of_the_cpu(case: str) -> None:
    """Models and data on the device, in turn with data on the CPU."""
    name, call = CASES[case]
    x, y = data(name)
    expected = wanted(case)
    with second_device() as second:
        model = made(name).to(second.device)
        there = list(CASES).index(case) % 2 == 0
        found = call(model, *((x.to(second.device), y.to(second.device)) if there else (x, y)))
    assert same(found, expected, 1e-14 if case in SPECTRAL else 0.0), (found, expected)
    assert not second.draws, "random numbers come from the CPU"


def test_without_float64_the_work_is_done_on_the_cpu() -> None:
    """As on Apple's MPS: the figures are those of the CPU, and a warning says where they come
    from.
    """
    name, call = CASES["crown 1"]
    x, y = data(name)
    with second_device(float64=False) as second:
        model = made(name).to(second.device)
        with pytest.warns(
            RuntimeWarning, match="has no float64: certificates are computed on the CPU"
        ):
            found = call(model, x.to(second.device), y.to(second.device))
    assert same(found, wanted("crown 1"), 0.0)


def test_an_evaluation_says_that_a_device_has_no_float64() -> None:
    x, y = data("plane")
    threats = [ws.Threat(INF, INF, 0.05)]
    with second_device(float64=False) as second:
        model = made("plane").to(second.device)
        with pytest.warns(RuntimeWarning, match="has no float64"):
            result = ws.evaluate(model, (x, y), threats, ["fgsm"], certify="crown")
    told = [finding.text for finding in result.findings if finding.name == "device"]
    assert told == ["The device elsewhere has no float64: radii were computed on the CPU."]


def layers(graph: Graph) -> int:
    return sum(node.map is None and bool(node.inputs) for node in graph.nodes)


@pytest.mark.parametrize(
    ("name", "norm"), [("relu", 1.0), ("relu", 2.0), ("images", INF), ("tokens", INF)]
)
def test_a_sweep_asks_a_device_at_most_four_times_a_layer(name: str, norm: float) -> None:
    """However many samples there are. The first sweep is not counted: a graph is asked a few
    things once.
    """
    asked = []
    with second_device() as second:
        graph = read(made(name).to(second.device), NETS[name][1], smooth=True)
        for count in (1, 1, 3):
            x, y = (v.to(second.device) for v in data(name, count))
            ball = torch.full((count,), 0.2, device=second.device)
            second.waits.clear()
            sweep = Sweep(graph, Balls.make(x, ball, norm, BOX)).run()
            lower = margins(sweep, y)[0]
            asked.append(second.total)
            assert lower.device == second.device and sweep.graph.device == second.device
            assert all(
                side.device == second.device for span in sweep.spans.values() for side in span
            )
    assert max(asked[1:]) <= 4 * layers(graph), second.worst()


def branched(
    graph: Graph, x: Tensor, y: Tensor, rows: list[int], most: int
) -> list[tuple[bool, int]]:
    """What branching makes of some samples of a sweep over all of them."""
    ball = torch.full((len(x),), 0.35, device=x.device)
    sweep = Sweep(graph, Balls.make(x, ball, INF, BOX)).run()
    every = torch.full((len(x), 3), -1.0)  # all rivals are left
    found = split.branched(sweep, every, rows, y.cpu(), [most] * len(rows))
    return [(one.proved, one.count) for one in found]


def test_branching_takes_many_samples_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts and trees of each sample alone, on either device; a device is asked at most
    four times a round.
    """
    monkeypatch.setattr(split, "ROOT_STEPS", 3)
    monkeypatch.setattr(split, "ASCENT_STEPS", 2)
    monkeypatch.setattr(split, "LAST_STEPS", 4)
    monkeypatch.setattr(split, "WIDTH", 4)
    x, y = data("relu", 4)
    graph = read(made("relu"), x.shape[1:])
    expected = branched(graph, x, y, [0, 1, 2, 3], 16)
    sizes: list[int] = []
    bounded = Tree.bounded

    def spy(self: Tree, domains: Subproblems, steps: int) -> Subproblems:
        sizes.append(len(domains.owner.unique()))
        return bounded(self, domains, steps)

    monkeypatch.setattr(Tree, "bounded", spy)
    with second_device() as second:
        there = graph.to(second.device)
        x = x.to(second.device)
        y = y.to(second.device)
        branched(there, x, y, [0], 1)
        alone = second.total
        second.waits.clear()
        sizes.clear()
        found = branched(there, x, y, [3, 0, 1, 2], 16)
        rounds = len(sizes)
        waits = second.total - alone
    assert [found[k] for k in (1, 2, 3, 0)] == expected
    assert len({count for _, count in expected}) > 1, "trees of several sizes"
    assert max(sizes) >= 3, "domains of several samples in one batch"
    assert waits <= 4 * rounds, second.worst()


@pytest.mark.parametrize("few", [0, 512])
def test_corners_of_l1_balls(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of the CPU, and few questions to the device."""
    monkeypatch.setattr(l1_vertices, "LEAST_ENTRIES", 0)
    monkeypatch.setattr(l1_vertices, "BOTH_UP_TO_NEURONS", few)
    torch.manual_seed(6)
    model = made("images").double().eval()
    x = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    ball = torch.full((3,), 0.4, dtype=torch.float64)
    graph = read(model, (1, 4, 4))
    y = graph.logits(x).argmax(1)
    expected = margins(Sweep(graph, Balls.make(x, ball, 1.0, BOX)).run(), y)[0]
    asked = {}
    with second_device() as second:
        there = read(model.to(second.device), (1, 4, 4))
        balls = Balls.make(x.to(second.device), ball.to(second.device), 1.0, BOX)
        for small in (0, 2**60, 0):  # the first one finds out about the weights
            monkeypatch.setattr(l1_vertices, "LEAST_ENTRIES", small)
            second.waits.clear()
            sweep = Sweep(there, balls).run()
            found = margins(sweep, y.to(second.device))[0]
            asked[small] = second.total
            if not small:
                assert isinstance(sweep.cones, VertexCones)
                assert torch.equal(found.cpu(), expected)
    bent = sum(isinstance(node.op, Relu) for node in graph.nodes)
    assert asked[0] <= asked[2**60] + bent + 2, second.worst()
