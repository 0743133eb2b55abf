"""Quadratic bounds: never above what is reached, above linear bounds where they should be, the same
whoever shares the work.
"""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.graph.reader import read
from wassail.certificates.relax import quadratic
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.quadratic import (
    Forms,
    Relaxation,
    Split,
    forms_of,
    has_quadratics,
    proved_samples,
)

BOX = (0.0, 1.0)
INF = math.inf


class Skip(nn.Module):
    """A residual block between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.inner = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.last((h + self.inner(h).relu()).relu())


def network(kind: str, seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(seed)
    if kind == "skip":
        return Skip().double(), (4,)
    if kind == "conv":
        layers = (nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(8, 3)).double(), (1, 4, 4)
    sizes = (nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    return nn.Sequential(*sizes).double(), (4,)


def problem(
    kind: str, seed: int, radius: float, n: int = 3
) -> tuple[nn.Module, Tensor, Tensor, Sweep]:
    model, shape = network(kind, seed)
    for p in model.parameters():
        p.data *= 2.0
    x = torch.rand(n, *shape, dtype=torch.float64)
    y = model(x).argmax(1)
    graph = read(model, shape)
    balls = Balls.make(x, torch.full((n,), radius, dtype=torch.float64), INF, BOX)
    return model, x, y, Sweep(graph, balls).run()


def forms(sweep: Sweep, k: int) -> Forms:
    found = forms_of(sweep, sweep.proved(), k)
    assert found is not None and len(found.base)
    return found


@pytest.mark.parametrize("kind", ["plain", "conv", "skip"])
@pytest.mark.parametrize("seed", [0, 1])
def test_forms_are_the_network(kind: str, seed: int) -> None:
    """With the neurons' own outputs as variables the forms give the logits of any point."""
    model, x, _, sweep = problem(kind, seed, 0.2)
    low, high = sweep.balls.box
    for k in range(len(x)):
        f = forms(sweep, k)
        share = torch.rand(50, *low[k].shape, dtype=torch.float64)
        share[:2] = torch.tensor([0.0, 1.0])[:, None]
        points = x[k].flatten() + low[k] + share * (high[k] - low[k])
        first = f.variables - len(f.base)
        s = torch.zeros(len(points), f.variables, dtype=torch.float64)
        s[:, :first] = 2 * share - 1
        for part in f.parts:
            z = s @ f.rows[part].T + f.base[part]
            assert (z >= f.low[part]).all() and (z <= f.high[part]).all()
            s[:, first + part.start : first + part.stop] = z.relu() / f.half[part] - 1
        assert s.abs().max() <= 1 + 1e-12
        with torch.no_grad():
            truth = model(points.reshape(-1, *x.shape[1:]))
        assert torch.allclose(s @ f.logits.T + f.logit_base, truth, rtol=1e-9, atol=1e-9)
        assert (f.error >= 0).all() and f.error.max() < 1e-10


@pytest.mark.parametrize("kind", ["plain", "conv", "skip"])
def test_any_multipliers_give_a_bound(kind: str) -> None:
    """Claimed bounds are below the margins of all points of the ball, whatever the multipliers."""
    model, x, y, sweep = problem(kind, 3, 0.15)
    low, high = sweep.balls.box
    finite = 0
    for k in range(len(x)):
        f = forms(sweep, k)
        share = torch.rand(400, *low[k].shape, dtype=torch.float64).round()  # corners
        points = x[k].flatten() + low[k] + share * (high[k] - low[k])
        with torch.no_grad():
            z = model(points.reshape(-1, *x.shape[1:]))
        for rival in range(3):
            if rival == y[k]:
                continue
            task = Relaxation(f, int(y[k]), rival)
            least = float((z[:, y[k]] - z[:, rival]).min())
            for _ in range(8):
                noise = torch.randn(4 * task.m + task.n, dtype=torch.float64)
                logs = task.begun() + noise
                logs[4 * task.m :] += 2
                bound = task.claimed(logs.exp())
                finite += math.isfinite(bound)
                assert bound <= least
    assert finite > 10


def test_multipliers_below_zero_prove_nothing() -> None:
    _, _, y, sweep = problem("conv", 0, 0.1)
    task = Relaxation(forms(sweep, 0), int(y[0]), (int(y[0]) + 1) % 3)
    values = task.begun().exp()
    values[4 * task.m :] += 10
    assert math.isfinite(task.claimed(values))
    values[0] = -values[0]
    assert task.claimed(values) == -INF


def test_a_matrix_that_is_not_positive_proves_nothing() -> None:
    _, _, y, sweep = problem("plain", 0, 0.3)
    task = Relaxation(forms(sweep, 0), int(y[0]), (int(y[0]) + 1) % 3)
    values = task.begun().exp()
    values[2 * task.m : 3 * task.m] = 1e3
    values[4 * task.m :] = 1e-3
    assert task.claimed(values) == -INF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_split_is_the_whole_matrix(dtype: torch.dtype) -> None:
    """The peak and the derivatives of log det, against the dense matrix and autograd."""
    _, _, y, sweep = problem("conv", 1, 0.2)
    f = forms(sweep, 0)
    task = Relaxation(f, int(y[0]), (int(y[0]) + 1) % 3)
    values = task.begun().exp()
    values[4 * task.m :] += 1
    values = values.requires_grad_(True)
    matrix = task.matrix(values)
    pull = task.linear(values)[1].detach()
    torch.logdet(matrix).backward()
    assert values.grad is not None
    quick = Relaxation(f.single() if dtype == torch.float32 else f, int(y[0]), 0)
    found = Split(quick.forms).peak(quick.parts(values.detach().to(dtype)), pull.to(dtype))
    assert found is not None
    close = 1e-3 if dtype == torch.float32 else 1e-9
    truth = 0.5 * torch.linalg.solve(matrix.detach(), pull)
    wanted = (truth, values.grad[4 * task.m :], values.grad[2 * task.m : 3 * task.m])
    for got, true in zip(found, wanted):
        assert torch.allclose(got.double(), true, rtol=close, atol=close * float(true.abs().max()))


@pytest.mark.slow_cases("0", "3")
@pytest.mark.parametrize("seed", range(4))
def test_radii_that_are_proved_are_below_exact_distances(seed: int) -> None:
    """On tiny networks, where the distance is known; and beyond what linear bounds prove."""
    model, x, y, _ = problem("plain", seed, 0.1, n=6)
    graph = read(model, (4,))
    exact = nearest_flip(graph, x, y, INF, BOX).upper
    proved = []
    for share in (0.7, 0.9, 0.97, 1.001, 1.05):
        radius = (share * exact).clamp(max=2.0)
        sweep = Sweep(graph, Balls.make(x, radius, INF, BOX)).run()
        lower = margins(sweep, y)[0]
        good, work = proved_samples(sweep, list(range(6)), y, lower, 100)
        assert len(work) == 6 and min(work) >= 0
        if share > 1:
            assert not any(g for g, far in zip(good, exact.tolist()) if far < 2.0 / 1.1)
        linear = lower.scatter(1, y[:, None], INF).amin(1) > 0
        proved.append((sum(good), int(linear.sum())))
    assert sum(a for a, _ in proved) > sum(b for _, b in proved)


def test_executed_margins_have_to_exceed_their_rounding() -> None:
    """A bound that is above 0 by less than what rounding may take is no proof."""
    _, _, y, sweep = problem("conv", 0, 0.02)
    f = forms(sweep, 0)
    clean = torch.ones(3, dtype=torch.float64)
    lower = -torch.ones(3, dtype=torch.float64)
    none = torch.zeros(3, dtype=torch.float64)
    assert quadratic.proves(f, int(y[0]), clean, lower, none, 200)[0]
    assert not quadratic.proves(f, int(y[0]), clean, lower, none + 100.0, 5)[0]


def test_errors_of_forms_are_charged() -> None:
    """Neurons that may be off by more lower the bound by at least that."""
    _, _, y, sweep = problem("conv", 0, 0.1)
    f = forms(sweep, 0)
    rival = (int(y[0]) + 1) % 3
    task = Relaxation(f, int(y[0]), rival)
    values = task.begun().exp()
    values[4 * task.m :] += 1
    worse = replace(f, error=f.error + 1.0, logit_error=f.logit_error + 1.0)
    b, e = values[task.m : 2 * task.m], values[3 * task.m : 4 * task.m]
    charged = task.claimed(values) - Relaxation(worse, int(y[0]), rival).claimed(values)
    assert charged >= 2.0 + float((b + e * task.slope).sum()) - 1e-9


def test_threads_and_company_change_nothing() -> None:
    model = ws.zoo.load("digits-cnn-adv")
    x, y = ws.zoo.data("digits")
    x, y = x[:3], y[:3]
    graph = read(model, x.shape[1:])
    radius = torch.tensor([0.07, 0.06, 0.08], dtype=torch.float64)
    sweep = Sweep(graph, Balls.make(x, radius, INF, BOX)).run()
    lower = margins(sweep, y)[0]
    both = [proved_samples(sweep, [0, 1, 2], y, lower, 60, provers) for provers in (1, 3)]
    assert both[0] == both[1] and any(both[0][0])
    alone = [proved_samples(sweep, [k], y, lower, 60)[0][0] for k in range(3)]
    assert alone == both[0][0]


def test_where_it_is_tried() -> None:
    model, _ = network("plain", 0)
    assert has_quadratics(read(model, (4,)), INF)
    assert not has_quadratics(read(model, (4,)), 2.0)
    smooth = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    assert not has_quadratics(read(smooth, (4,), smooth=True), INF)
    leaky = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 3)).double()
    assert not has_quadratics(read(leaky, (4,)), INF)
    assert not has_quadratics(read(nn.Sequential(nn.Linear(4, 3)).double(), (4,)), INF)


def test_forms_that_are_too_many_or_too_large_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, sweep = problem("plain", 0, 0.2)
    monkeypatch.setattr(quadratic, "LARGE", 1e-3)
    assert forms_of(sweep, sweep.proved(), 0) is None
    monkeypatch.undo()
    monkeypatch.setattr(quadratic, "VARIABLES", 4)
    assert forms_of(sweep, sweep.proved(), 0) is None


def test_single_keeps_everything() -> None:
    _, _, _, sweep = problem("conv", 0, 0.2)
    f = forms(sweep, 0)
    one = f.single()
    for field in fields(f):
        own, other = getattr(f, field.name), getattr(one, field.name)
        if isinstance(own, Tensor):
            assert other.dtype == torch.float32 and torch.allclose(own, other.double(), rtol=1e-5)
        else:
            assert own == other


class Shifted(nn.Module):
    """A reshape, a constant that is added to it, and a skip connection past both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.inner = nn.Linear(8, 2)
        self.skip = nn.Linear(8, 2)
        self.register_buffer("shift", torch.full((2, 4), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        moved = h.reshape(-1, 2, 4) + self.get_buffer("shift")
        return self.inner(torch.relu(moved).flatten(1)) + self.skip(h)


@pytest.mark.parametrize("arithmetic", ["executed", "exact"])
def test_a_shift_of_a_view_changes_no_other_reader(arithmetic: str) -> None:
    """Corners and middles of the boxes against what is proved, by the exact search and by quadratic
    bounds: some samples are, some are not. The dense form is the network.
    """
    torch.manual_seed(0)
    model = Shifted().eval()
    x = torch.rand(20, 4)
    with torch.no_grad():
        model.skip.weight[0] = 1.0
        model.skip.weight[1] = 0.0
        model.inner.weight.mul_(0.05)
        z = model(x)
        model.skip.bias[1] += (z[:, 0] - z[:, 1]).median() - 0.3
        y = model(x).argmax(1)
    x = x[y == 0]
    y = y[y == 0]
    eps = 0.2
    proved = ws.verify(model, x, y, ws.Threat(eps=eps), arithmetic=arithmetic).proved
    graph = read(model, (4,))
    assert torch.allclose(graph.piecewise().logits(x.double()), graph.logits(x))
    sweep = Sweep(graph, Balls.make(x, torch.full((len(x),), eps), INF, BOX)).run()
    lower = margins(sweep, y)[0]
    alone, _ = proved_samples(sweep, list(range(len(x))), y, lower, 200)
    steps = torch.cartesian_prod(*[torch.tensor([-eps, 0.0, eps])] * 4)
    points = (x[:, None] + steps).clamp(0, 1)
    with torch.no_grad():
        found = model(points.flatten(0, 1)).argmax(1).reshape(len(x), -1)
    wrong = (found != 0).any(1)
    assert proved.any() and wrong.any()
    assert not (proved & wrong).any()
    assert any(alone)
    assert not (torch.tensor(alone) & wrong).any()
