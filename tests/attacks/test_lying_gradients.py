"""Networks whose gradients lie: the engine finds what others find, or says that it failed."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import wassail as ws

INF = math.inf


class Winners(nn.Module):
    """Keeps the largest share of the units: the active set changes with every small step."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        count = max(1, int(self.share * flat.shape[1]))
        least = flat.topk(count, dim=1).values[:, -1:]
        return (flat * (flat >= least)).reshape(x.shape)


class Saturated(nn.Module):
    """A steep sigmoid: its gradient is 0 in float32 where it is far from the middle."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.slope * x)


class Quantised(nn.Module):
    """Input rounded to a few levels: no gradient, or that of the identity."""

    def __init__(self, levels: int, straight: bool) -> None:
        super().__init__()
        self.levels = levels
        self.straight = straight

    def forward(self, x: Tensor) -> Tensor:
        rounded = (x * self.levels).round() / self.levels
        return x + (rounded - x).detach() if self.straight else rounded


class Lure(nn.Module):
    """Adds to the logits a term that is nearly constant but has a large gradient: a fine wave."""

    def __init__(self, model: nn.Module, size: float, pitch: float) -> None:
        super().__init__()
        self.model = model
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("weight", torch.randn(64, 10, generator=generator))
        self.size = size
        self.pitch = pitch

    def forward(self, x: Tensor) -> Tensor:
        wave = torch.sin(self.pitch * (x.flatten(1) @ self.weight))
        return self.model(x) + self.size * wave


class Votes(nn.Module):
    """How many of several noisy copies of the input vote for each class: steps without slope."""

    def __init__(self, model: nn.Module, copies: int, noise: float) -> None:
        super().__init__()
        self.model = model
        generator = torch.Generator().manual_seed(7)
        self.register_buffer("shift", noise * torch.randn(copies, 1, 8, 8, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.zeros(len(x), 10, dtype=x.dtype)
        for shift in self.shift:
            z = self.model(x + shift)
            votes = votes + nn.functional.one_hot(z.argmax(1), 10).to(x.dtype)
        return votes + 0 * x.flatten(1).sum(1, keepdim=True)


class Mean(Votes):
    """The mean softmax of noisy copies: randomised smoothing with the noise fixed."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.model(x + s).softmax(1) for s in self.shift]).mean(0).log()


class Buried(nn.Module):
    """The logits squashed so hard that most gradients are 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        z = self.model(x)
        return torch.tanh((z - z.mean(1, keepdim=True)) * 0.5)


def trained(*layers: nn.Module) -> nn.Module:
    """A few hundred steps on the digits, enough for nine right answers of ten."""
    torch.manual_seed(0)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    model = nn.Sequential(nn.Flatten(), *layers)
    x, y = ws.zoo.data("digits")
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(250):
        part = torch.arange(step * 64, step * 64 + 64) % len(x)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimiser.step()
    return model.eval()


@cache
def plain() -> nn.Module:
    return trained(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


@cache
def winners() -> nn.Module:
    return trained(nn.Linear(64, 96), Winners(0.1), nn.Linear(96, 10))


@cache
def steep() -> nn.Module:
    model = trained(nn.Linear(64, 48), Saturated(1.0), nn.Linear(48, 10))
    model[2].slope = 12.0
    return model


NETWORKS = {
    "winners": winners,
    "two layers of winners": lambda: trained(
        nn.Linear(64, 96), Winners(0.1), nn.Linear(96, 64), Winners(0.15), nn.Linear(64, 10)
    ),
    "saturated": steep,
    "quantised, straight through": lambda: nn.Sequential(Quantised(8, True), plain()),
    "quantised, no gradient": lambda: nn.Sequential(Quantised(8, False), plain()),
    "honeypot": lambda: Lure(plain(), 0.5, 40.0),
    "votes": lambda: Votes(plain(), 15, 0.15),
    "smoothed": lambda: Mean(plain(), 15, 0.15),
    "squashed": lambda: Buried(plain()),
    "squashed winners": lambda: Buried(trained(nn.Linear(64, 96), Winners(0.1), nn.Linear(96, 10))),
}
EPS = {INF: 0.1, 2.0: 0.5}


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    x, y = ws.zoo.data("digits")
    return x[:24], y[:24]


@pytest.mark.few(6)
@pytest.mark.slow_cases("2.0-*")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("norm", EPS)
def test_never_above_wda_pp_at_the_same_passes(name: str, norm: float, digits) -> None:
    """The budget is the most that WDA++ spends on a sample."""
    model = NETWORKS[name]()
    x, y = digits
    assert float((model(x).argmax(1) == y).float().mean()) > 0.85
    walked = ws.nearest(model, x, y, norm, method="wda++", eps=EPS[norm])
    budget = int((walked.forwards + walked.backwards).max())
    found = ws.nearest(model, x, y, norm, passes=budget, warn=False)
    assert (found.forwards + found.backwards <= budget).all()
    ours, theirs = (ws.allocate(f, EPS[norm], 1).accuracy for f in (found, walked))
    assert ours <= theirs + 1e-12


@pytest.mark.slow_cases("honeypot", "quantised, no gradient")
@pytest.mark.parametrize("name", ["quantised, no gradient", "votes", "honeypot"])
def test_flips_are_found_without_gradients(name: str, digits: tuple[Tensor, Tensor]) -> None:
    """Each of these had no flip for most samples: the gradient is zero, or points anywhere."""
    model = NETWORKS[name]()
    found = ws.nearest(model, *digits, INF, passes=150, warn=False)
    assert found.success.all()
    more = ws.nearest(model, *digits, INF, passes=450, warn=False)
    assert (more.distances <= found.distances).all()
    assert more.distances.mean() < 0.95 * found.distances.mean()


def test_a_blind_search_belongs_to_the_sample(digits) -> None:
    model = NETWORKS["votes"]()
    x, y = digits
    whole = ws.nearest(model, x, y, 2, passes=90)
    order = torch.tensor([7, 3, 20, 0])
    part = ws.nearest(model, x[order], y[order], 2, passes=90, batch_size=3)
    assert torch.equal(part.distances, whole.distances[order])
    other = ws.nearest(model, x, y, 2, passes=90, seed=1)
    assert not torch.equal(other.distances, whole.distances)


@pytest.mark.few(3)
@pytest.mark.slow_cases(
    "two layers of winners", "squashed winners", "squashed", "quantised, straight through"
)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_failure_is_silent(name: str, digits) -> None:
    """The figure is within two points of the best that is known, or there is a warning.

    The best: everything in the run, the points of the undefended network, and a search from them
    with three times the passes.
    """
    model = NETWORKS[name]()
    x, y = (part[:16] for part in digits)
    threat = ws.Threat(INF, 1, 0.05)
    run = ws.evaluate(model, (x, y), threat, ("wda++", "nearest"))
    twin = ws.nearest(plain(), x, y, INF, passes=100)
    moved = ws.Flips.from_points(model, x, y, twin.points, INF).shorten(model, 12)
    more = ws.nearest(model, x, y, INF, passes=300, start=moved)
    best = ws.allocate(run.flips().merge(moved, more), threat.eps, 1).accuracy
    assert run.warnings or run.best[0].accuracy <= best + 0.02
