"""Training for Omega_1 beside PGD, W-PGD and IBP on digits, at equal passes; built-in networks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import spent
from benchmarks.networks.load import images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here

EPS = 0.05  # linf, order 1
IMAGES = 200  # that no training saw
PASSES = 3000  # forward and backward passes of a batch in each training
BATCH = 100
SEEDS = (0, 1)
BUILT_IN = ("digits-cnn", "digits-cnn-adv", "digits-cnn-noise", "digits-cnn-cert")
Loss = Callable[[nn.Module, Tensor, Tensor, float], Tensor]


def network(seed: int) -> nn.Sequential:
    """Two convolutions and two linear layers at random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 50),
        nn.ReLU(),
        nn.Linear(50, 10),
    )


def standard(_: float) -> Loss:
    """Cross entropy."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        return F.cross_entropy(model(x), y)

    return loss


def pgd(radius: float) -> Loss:
    """Madry et al. 2018, seven steps."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        limit = share * radius
        point = (x + limit * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
        for _ in range(7):
            point = point.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y), point)
            moved = point + 2.5 * limit / 7 * gradient.sign()
            point = torch.minimum(torch.maximum(moved, x - limit), x + limit).clamp(0, 1)
        return F.cross_entropy(model(point.detach()), y)

    return loss


def w_pgd(eps: float) -> Loss:
    """The attack of Bai et al. 2023, order 2, as the inner problem: seven steps."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        budget = share * eps
        point = x.clone()
        for _ in range(7):
            point = point.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y), point)
            size = gradient.abs().flatten(1).sum(1)
            size = size / size.square().mean().sqrt().clamp(min=1e-12)
            step = 2.5 * budget / 7 * size.view(-1, 1, 1, 1) * gradient.sign()
            move = (point.detach() + step).clamp(0, 1) - x
            used = move.abs().flatten(1).amax(1).square().mean().sqrt()
            point = x + move * min(1.0, budget / max(float(used), 1e-12))
        return F.cross_entropy(model(point.detach()), y)

    return loss


def ibp(radius: float) -> Loss:
    """Gowal et al. 2018: half cross entropy, half its interval bound, the radius growing."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        threat = ws.Threat(norm="inf", order="inf", eps=max(share * radius, 1e-6))
        bound = ws.certified_loss(model, x, y, threat)
        return (1 - share / 2) * F.cross_entropy(model(x), y) + share / 2 * bound

    return loss


def robust(eps: float) -> Loss:
    """Ours, attacked: one ball for each sample, the price kept."""
    price = ws.Price()
    draws = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        threat = ws.Threat(norm="inf", order=1, eps=max(share * eps, 1e-4))
        return ws.robust_loss(model, x, y, threat, "error", price=price, steps=7, generator=draws)

    return loss


def certified(eps: float) -> Loss:
    """Ours, bounded: one ball for each sample, the price kept, the budget growing."""
    price = ws.Price()
    draws = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        threat = ws.Threat(norm="inf", order=1, eps=max(share * eps, 1e-4))
        return ws.certified_loss(model, x, y, threat, "error", price=price, generator=draws)

    return loss


# name -> passes of one step, the loss, its radius or budget: the better one of two on training
# images and another seed
TRAININGS: dict[str, tuple[float, Callable[[float], Loss], float]] = {
    "standard": (1, standard, 0.0),
    "pgd": (8, pgd, 0.1),
    "w-pgd": (8, w_pgd, 0.1),
    "robust_loss (ours)": (8, robust, 0.1),
    "ibp": (3, ibp, 0.15),
    "certified_loss (ours)": (2, certified, 0.075),
}


def units() -> list[Unit]:
    """Built-in networks, then trainings."""
    found = [Unit(f"built-in/{name}", partial(built_in, name)) for name in BUILT_IN]
    for name in TRAININGS:
        for seed in SEEDS:
            found.append(Unit(f"{name}/{seed}", partial(trained, name, seed)))
    return found


def trained(name: str, seed: int) -> Row:
    """Train once and measure."""
    cost, loss_of, setting = TRAININGS[name]
    loss = loss_of(setting)
    with spent() as used:
        model = network(seed)
        x, y = ws.zoo.data("digits", "train")
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        steps = int(PASSES / cost)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            rows = torch.randperm(len(x), generator=generator)[:BATCH]
            optimizer.zero_grad()
            loss(model, x[rows], y[rows], min(1.0, 2 * step / steps)).backward()
            optimizer.step()
            schedule.step()
    return measured(model.eval()) | {"seconds": used.seconds}


def built_in(name: str) -> Row:
    """A network that comes with the package."""
    return measured(load(name))


def measured(model: nn.Module) -> Row:
    """Clean, certified (CROWN) and attacked accuracy over Omega_1(EPS), in percent."""
    x, y = images("digits", IMAGES)
    with spent():
        flips = ws.nearest(model, x, y, norm="inf", passes=100, seed=SEED)
        radii = ws.radii(model, x, y, norm="inf", method="crown", upper=flips.distances)
        low, high = ws.risk_curve(flips, radii, order=1)(EPS)
    clean = float((flips.distances > 0).double().mean())
    return {"clean": 100 * clean, "certified": 100 * low, "attacked": 100 * high}


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """Means over the seeds with their range."""
    rows = []
    for name, (_, _, setting) in TRAININGS.items():
        found = [done[f"{name}/{seed}"] for seed in SEEDS if f"{name}/{seed}" in done]
        if found:
            row: Row = {"id": name, "training": name, "setting": setting, "seeds": len(found)}
            for side in ("clean", "certified", "attacked", "seconds"):
                values = [answer[side] for answer in found]
                row[side] = statistics.mean(values)
                row[f"{side}_range"] = [min(values), max(values)]
            rows.append(row | {"images": IMAGES, "eps": EPS})
    networks = [
        {"id": name, "network": name, "images": IMAGES, "eps": EPS} | done[f"built-in/{name}"]
        for name in BUILT_IN
        if f"built-in/{name}" in done
    ]
    return {"trainings": rows, "built_in": networks}


STAGE = Stage(
    name="training",
    about="Training for Omega_1 beside other trainings, digits.",
    depends=rooms.TRAINING,
    units=units,
    tables=tables,
    source=here(),
)
