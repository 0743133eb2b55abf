r"""Harden a CIFAR-10 network of the zoo: both sides of Omega_1(2/255), before and after.

    export WASSAIL_CIFAR=folder    # with cifar10_train.npz: images (50000, 32, 32, 3), labels
    python benchmarks/hardening_cifar.py --do train
    python benchmarks/hardening_cifar.py --do before
    python benchmarks/hardening_cifar.py --do after
    python benchmarks/hardening_cifar.py > docs/hardening-cifar.md

Weights and measurements are kept in the folder. The training is that of `examples/harden.py`, in
minutes of the processor.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

import wassail as ws
from zoo_path import ROOT, images, load

NAME = "cifar_cnn_a_adv"
EPS = 2 / 255
IMAGES = 500
PASSES = 100  # of an attack alone
WORK = 2e9  # operations for each image to close the sandwich: about a second
REPEATS = 5000  # of the bootstrap
SETTING = {
    "rate": 1e-3,
    "loss": "chance",
    "lose": 0.0,
    "climb": 1,
}


HEAD = f"""# Hardening a CIFAR-10 network

Made by `python benchmarks/hardening_cifar.py`. `{NAME}` (two convolutions, trained by others
against attacks at 2/255) is fine-tuned by `examples/harden.py` on the 50,000 training images, one
thread. Both sides of `Omega_1(2/255)`, linf, on the first {IMAGES} test images, closed together by
`ws.sandwich` with the same work for each network; where nothing was proved: `nearest` with
{PASSES} passes. No training image equals a test image.
Settings were tried on images that are not reported: the last 1,000 training images, which are held
back, and test images from the 1,001st on. In brackets: 95 % of {REPEATS} bootstrap samples of the
images; the rows "less before" are differences on the same images. All but the second table's
minutes, steps and distances are in percent.

    python examples/harden.py --model module:network --data cifar10_train.npz --held test.npz \\
        --eps 2/255 --loss chance --lose 0 --certified 0.5 --part 0.25 --climb 1 --minutes 60

With `--lose` cross entropy on clean images is trained, too, and the weight of the robust part
follows the accuracy on held-back images. The original network has seen those images, so "lose 0"
there is not quite 0 on test images.
"""

FOOT = f"""
Radii and distances are in units of 1/255, means over all images, 0 where the network is wrong;
minutes are those of the processor, one thread.

With weight 0.5 and 9 of the 60 minutes the attacked side rises by 8 points, the certified side by
3 instead of 5. Clean accuracy is kept on all 10,000 test images; on the {IMAGES} it is 1.4 points
lower, with an interval of 4 to each side. Certified figures at smaller budgets are of the radii
that were sought for 2/255. What limits it: the worst distribution moves each image just beyond its
radius, so nothing is certified at 2/255 unless the mean radius is above 2/255. Linear bounds alone
(`radii` by CROWN, measured before) prove 2.00/255 on average, and nothing at 2/255; branching
where the budget is spent, a second an image, proves the rest of what is in the table. A larger
weight on larger balls (weight 1, three times as long) proves a point more, and costs more distance
and clean accuracy than is allowed; with weight 2 and part 0.4 CROWN's mean radius was 2.01/255, at
64.1 % clean. Intervals, which are cheap enough to train with, are far looser than CROWN at these
radii: most balls are not proved in training. Training with linear bounds gets farther, for much
clean accuracy: `cifar_base_kw` has 10.4 % certified and 20.3 % attacked on 100 images
([radii](radii.md)), at 58.5 % clean. Trainings of the full 60 minutes were not measured.
"""


def network() -> nn.Module:
    """The network; its normalisation is a layer that bounds can read."""
    inner, _ = load(NAME)
    normalise = nn.BatchNorm2d(3, eps=0, affine=False)
    normalise.running_mean = inner[0].mean.flatten().clone()
    normalise.running_var = inner[0].std.flatten().square()
    return nn.Sequential(normalise, inner[1]).eval()


def recipe() -> ModuleType:
    """`examples/harden.py`."""
    spec = importlib.util.spec_from_file_location("harden", ROOT / "examples" / "harden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(folder: Path, minutes: float, certified: float, part: float, seed: int) -> None:
    """Fine-tune, and keep the weights and how they were made."""
    data = ws.zoo.open_data(folder / "cifar10_train.npz")
    x, y = data.read(0, len(data))
    weights = folder / f"hardened-{certified:g}-{seed}.pt"
    setting = {"certified": certified, "part": part, "seed": seed, **SETTING}
    threat = ws.Threat(norm="inf", order=1, eps=EPS)
    began = time.process_time()
    steps = 0

    def share(step: int) -> float:
        return (time.process_time() - began) / 60 / minutes

    def report(step: int, model: nn.Module) -> None:
        nonlocal steps
        steps = step
        if step % 500 == 0:
            right = recipe().accuracy(model, x[-1000:], y[-1000:])
            print(f"step {step}, share {share(step):.3f}: {right:.3f} held back", flush=True)
            torch.save(model.state_dict(), weights)

    model = recipe().harden(network(), x, y, threat, share, report=report, **setting)
    torch.save(model.state_dict(), weights)
    told = {"minutes": minutes, "steps": steps, **setting}
    weights.with_suffix(".json").write_text(json.dumps(told))


def measure(model: nn.Module, file: Path, prove: bool = True) -> None:
    """Both sides for the first images, and the clean accuracy on all; kept in a file."""
    x, y = images("cifar10")
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(1000)]) == y
    x = x[:IMAGES]
    y = y[:IMAGES]
    if prove:
        closed = ws.sandwich(model, x, y, ws.Threat(norm="inf", order=1, eps=EPS), work=WORK)
        found = {"right": right, "flips": closed.flips.distances, "radii": closed.radii.values}
        low = closed.certified
        high = closed.attacked
    else:
        flips = ws.nearest(model, x, y, norm="inf", passes=PASSES)
        found = {"right": right, "flips": flips.distances}
        low, high = ws.risk_curve(flips, None, order=1)(EPS)
    torch.save(found, file)
    print(f"{100 * low:.2f} to {100 * high:.2f} %; {100 * right.double().mean():.2f} % clean")


def left(distances: Tensor, eps: float) -> Tensor:
    """Accuracy over `Omega_1(eps)` if samples flip at these distances, for rows of samples."""
    ordered = distances.double().sort(1).values
    n = ordered.shape[1]
    room = eps * n - (ordered.cumsum(1) - ordered)  # before each sample, the cheapest first
    moved = (room / ordered.clamp(min=1e-12)).clamp(0, 1)
    moved = torch.where(ordered <= 0, 1.0, moved)
    return 1 - moved.sum(1) / n


def interval(statistic: Callable[[Tensor], Tensor] | None, n: int) -> str:
    """The value in percent, and 95 % of its bootstrap over the samples.

    Args:
        statistic: its values for rows of samples, which are given by their numbers.
        n: samples.
    """
    if statistic is None:
        return "not measured"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(n, (REPEATS, n), generator=generator)
    values = torch.cat([statistic(part) for part in rows.split(500)])
    ends = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64))
    value = float(statistic(torch.arange(n)[None])[0])
    low, high = (100 * float(end) for end in ends)
    return f"{100 * value:.1f} ({low:.1f} to {high:.1f})"


def measures(found: dict[str, Tensor]) -> list[Callable[[Tensor], Tensor] | None]:
    """The columns of the table, as functions of rows of samples; None where nothing was proved."""
    right = found["right"].double()
    radii = found.get("radii")
    flips = found["flips"]
    proved: list[Callable[[Tensor], Tensor] | None] = [None, None, None]
    if radii is not None:
        proved = [
            lambda rows: left(radii[rows], EPS / 4),
            lambda rows: left(radii[rows], EPS / 2),
            lambda rows: left(radii[rows], EPS),
        ]
    return [lambda rows: right[rows].mean(1), *proved, lambda rows: left(flips[rows], EPS)]


def page(folder: Path) -> None:
    """Print the page from what is in the folder."""
    print(HEAD)
    before = torch.load(folder / "before.pt")
    print(f"| network | clean, {IMAGES} | certified, 0.5/255 | 1/255 | 2/255 | attacked, 2/255 |")
    print("|---|---|---|---|---|---|")
    show("before", [interval(of, IMAGES) for of in measures(before)])
    rest = ["| network | minutes | steps | clean, 10,000 | mean radius | mean distance |"]
    rest.append("|---|---|---|---|---|---|")
    rest.append(other("before", before, {}))
    for file in sorted(folder.glob("after-*.pt")):
        found = torch.load(file)
        told = folder / file.name.replace("after", "hardened")
        setting = json.loads(told.with_suffix(".json").read_text())
        name = f"weight {setting['certified']:g}, part {setting['part']:g}, seed {setting['seed']}"
        show(name, [interval(of, IMAGES) for of in measures(found)])
        pairs = zip(measures(found), measures(before), strict=True)
        show("less before", [interval(difference(new, old), IMAGES) for new, old in pairs])
        rest.append(other(name, found, setting))
    print("\n" + "\n".join(rest))
    print(FOOT, end="")


def difference(
    new: Callable[[Tensor], Tensor] | None, old: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor] | None:
    """One statistic less another, on the same samples."""
    if new is None or old is None:
        return None
    return lambda rows: new(rows) - old(rows)


def show(name: str, cells: list[str]) -> None:
    """A row of a table."""
    print(f"| {name} | " + " | ".join(cells) + " |")


def other(name: str, found: dict[str, Tensor], setting: dict[str, float]) -> str:
    """A row of the second table; radii and distances in units of 1/255."""
    clean = 100 * float(found["right"].double().mean())
    cells = [f"{setting.get(key, 0):g}" for key in ("minutes", "steps")]
    cells += [f"{clean:.2f}"]
    for key in ("radii", "flips"):
        known = key in found
        cells.append(f"{255 * float(found[key].double().mean()):.2f}" if known else "")
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """One part, or the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--do", choices=("train", "before", "after"))
    parser.add_argument("--minutes", type=float, default=60, help="of the processor")
    parser.add_argument("--certified", type=float, default=0.5, help="weight of the bound")
    parser.add_argument("--part", type=float, default=0.25, help="of eps that is bounded")
    parser.add_argument("--attacked", action="store_true", help="only the attacked side")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if "WASSAIL_CIFAR" not in os.environ:
        sys.exit("set WASSAIL_CIFAR to the folder of cifar10_train.npz.")
    folder = Path(os.environ["WASSAIL_CIFAR"])
    if asked.do == "train":
        train(folder, asked.minutes, asked.certified, asked.part, asked.seed)
    elif asked.do == "before":
        measure(network(), folder / "before.pt")
    elif asked.do == "after":
        model = network()
        name = f"{asked.certified:g}-{asked.seed}.pt"
        model.load_state_dict(torch.load(folder / f"hardened-{name}"))
        measure(model, folder / f"after-{name}", not asked.attacked)
    else:
        page(folder)


if __name__ == "__main__":
    main()
