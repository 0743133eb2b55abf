"""Closing the bracket: the gap against processor seconds, beside the two sides on their own.

    python benchmarks/closing.py [--images 100] [--first 0] [--work 1e10] [--alone crown]
        [NETWORK ...]

Prints the rows of docs/closing-measured.md, and draws a plot for each network. `--work` is for one
image; `--alone` names the methods beside it, crown and branch. The bracket as it shrinks goes to
standard error, and in the end what radii and distances add up to, as shares of the budget.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

import wassail as ws
import zoo_path
from wassail.certificates import clock

matplotlib.use("Agg")
from matplotlib import pyplot

# network -> norm, eps it was trained for
NETWORKS: dict[str, tuple[str, float]] = {
    "mnist_kw_01": ("inf", 0.1),
    "fashion_kw_01": ("inf", 0.1),
    "cifar_base_kw": ("inf", 2 / 255),
    "cifar_small_kw_l2_36px": ("2", 36 / 255),
    "vnn_resnet2b": ("inf", 2 / 255),
}
ALONE = ("crown", "branch")  # methods of the two sides on their own
Point = tuple[float, float, float]  # processor seconds an image, certified, attacked


def apart(model: torch.nn.Module, x: Tensor, y: Tensor, threat: ws.Threat, method: str) -> Point:
    """The two sides on their own, as `evaluate --certify METHOD` has them."""
    begun = time.process_time()
    flips = ws.nearest(model, x, y, threat.norm, passes=300)
    known = ws.radii(model, x, y, threat.norm, method=method, upper=flips.distances)
    seconds = (time.process_time() - begun) / len(x)
    certified, attacked = ws.risk_curve(flips, known, threat.order)(threat.eps)
    return seconds, certified, attacked


def together(
    model: torch.nn.Module, x: Tensor, y: Tensor, threat: ws.Threat, work: float
) -> tuple[list[Point], ws.Sandwich]:
    """How the bracket shrinks, and what is left of it."""
    points: list[Point] = []
    begun = time.process_time()

    def told(certified: float, attacked: float) -> None:
        points.append(((time.process_time() - begun) / len(x), certified, attacked))
        if len(points) % 20 == 1:
            print(*(f"{value:.4f}" for value in points[-1]), file=sys.stderr, flush=True)

    found = ws.sandwich(model, x, y, threat, effort=work / clock.SECOND, progress=told)
    told(found.certified, found.attacked)
    return points, found


def drawn(name: str, shrinking: list[Point], others: dict[str, Point], folder: Path) -> None:
    """The gap against seconds an image."""
    figure, axes = pyplot.subplots(figsize=(5, 3))
    axes.step(
        [p[0] for p in shrinking],
        [100 * (p[2] - p[1]) for p in shrinking],
        where="post",
        label="sandwich",
    )
    for mark, (label, (seconds, certified, attacked)) in zip("os", others.items()):
        axes.plot([seconds], [100 * (attacked - certified)], mark, label=label)
    axes.set_xlabel("processor seconds an image")
    axes.set_ylabel("gap, points")
    axes.set_ylim(bottom=0)
    axes.set_title(name)
    axes.legend()
    figure.savefig(folder / f"{name}.png", dpi=80, bbox_inches="tight")
    pyplot.close(figure)


def cell(point: Point) -> list[str]:
    """Bracket, gap and seconds."""
    seconds, low, high = point
    return [
        f"{100 * low:.2f} .. {100 * high:.2f}",
        f"{100 * (high - low):.2f}",
        f"{seconds:.1f}",
    ]


def told_sums(name: str, found: ws.Sandwich, first: Tensor) -> None:
    """What radii and distances add up to: where radii are below 1, nothing is certified."""
    budget = len(first) * found.threat.eps
    sums = [float(v.sum()) / budget for v in (first, found.radii.values, found.flips.distances)]
    words = " -> ".join(f"{value:.3f}" for value in sums[:2])
    print(f"{name}: radii {words} of the budget, distances {sums[2]:.3f}", file=sys.stderr)


def measured(name: str, some: slice, work: float, alone: list[str], folder: Path) -> None:
    """One row, and one plot."""
    norm, eps = NETWORKS[name]
    model, dataset = zoo_path.load(name)
    x, y = zoo_path.images(dataset)[:2]
    threat = ws.Threat(norm, 1, eps)
    x = x[some]
    y = y[some]
    shrinking, found = together(model, x, y, threat, work)
    others = {method: apart(model, x, y, threat, method) for method in alone}
    told_sums(name, found, ws.radii(model, x, y, norm, method="crown").values)
    assert bool((found.radii.values <= found.flips.distances).all())
    drawn(name, shrinking, others, folder)
    cells = [f"`{name}`", f"l{norm} {eps:.4g}", str(len(x))]
    for method in ALONE:
        cells += cell(others[method]) if method in others else ["", "", ""]
    cells += cell(shrinking[-1])
    print("| " + " | ".join([*cells, str(found.info["domains"])]) + " |", flush=True)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--work", type=float, default=1e10)
    parser.add_argument("--alone", nargs="*", default=list(ALONE), choices=ALONE)
    parser.add_argument("--plots", type=Path, default=Path("docs/closing"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.plots.mkdir(parents=True, exist_ok=True)
    print("| network | norm, eps | images | crown % | gap | s | branch % | gap | s |", end="")
    print(" sandwich % | gap | s | domains |\n" + "|---" * 13 + "|", flush=True)
    some = slice(options.first, options.first + options.images)
    for name in options.networks:
        measured(name, some, options.work, options.alone, options.plots)


if __name__ == "__main__":
    main()
