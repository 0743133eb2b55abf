"""Regressions of the literature from both sides: accuracy within a tolerance, mean absolute error.

    python benchmarks/regression.py --tables FOLDER [--samples 100] [--only wine] [--norms 2 inf]

FOLDER holds `winequality-red.csv`, `winequality-white.csv` and `abalone.data` of the UCI
repository, `$WASSAIL_TABLES` if it is not given; the networks are ExLipBaB's, trained on these
tables with every feature divided by its standard deviation. Prints docs/regression.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import wassail as ws
import zoo_path

HEAD = """# Regressions, from both sides

Made by `python benchmarks/regression.py`, one thread. Networks of ExLipBaB on their tables,
features in units of their standard deviations, {} samples drawn once. The domain is the range of
each feature in the table. Tolerances: half of a point of a wine's quality more than its error, one
ring of an abalone's age more, so that all samples are right at eps 0. Processor seconds are for the
accuracy of the row, and for the errors of all rows of a network and norm.
"""
ORDERS = ("1", "2", "inf")
GRID = [0.01 * 2 ** (k / 2) for k in range(16)]


def wine(folder: Path) -> tuple[Tensor, Tensor]:
    """Features and quality of red and white wines."""
    parts = []
    for colour in ("red", "white"):
        lines = (folder / f"winequality-{colour}.csv").read_text().splitlines()[1:]
        parts += [[float(v) for v in line.split(";")] for line in lines if line.strip()]
    table = torch.tensor(parts, dtype=torch.float64)
    return standard(table[:, :-1]), table[:, -1]


def abalone(folder: Path) -> tuple[Tensor, Tensor]:
    """Features and rings of abalones; the sex is two indicators at the end."""
    rows = [line.split(",") for line in (folder / "abalone.data").read_text().splitlines()]
    rows = [row for row in rows if len(row) == 9 and row[0] in ("F", "I", "M")]
    numbers = torch.tensor([[float(v) for v in row[1:]] for row in rows], dtype=torch.float64)
    sex = torch.tensor([[row[0] == "I", row[0] == "M"] for row in rows], dtype=torch.float64)
    return standard(torch.cat([numbers[:, :-1], sex], 1)), numbers[:, -1]


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def network(name: str) -> nn.Module:
    """A ReLU network from its arrays."""
    arrays = np.load(zoo_path.ZOO / "lipschitz" / f"{name}.npz")
    layers: list[nn.Module] = []
    for i in range(len(arrays) // 2):
        weight = torch.tensor(arrays[f"W{i}"])
        layer = nn.Linear(*weight.shape[::-1], dtype=torch.float64)
        layer.weight.data, layer.bias.data = weight, torch.tensor(arrays[f"b{i}"])
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


# Network, its table, how much more than its own error a sample may be off, budgets.
Row = tuple[str, Callable[[Path], tuple[Tensor, Tensor]], float, tuple[float, ...]]
NETWORKS: dict[str, Row] = {
    "wine 11-24-24-1": ("exlipbab_wine_11-24-24-1", wine, 0.5, (0.02, 0.05, 0.1)),
    "abalone 9-16-16-1": ("exlipbab_abalone_9-16-16-1", abalone, 1.0, (0.02, 0.05, 0.1)),
}


def show(low: float, high: float, gap: str) -> str:
    return f"{low:.4f} to {high:.4f} ({gap})"


def rows(title: str, norm: str, folder: Path, count: int) -> None:
    """One network at one norm: a row for each order and budget."""
    name, table, more, budgets = NETWORKS[title]
    model = network(name)
    x, y = table(folder)
    box = (x.amin(0), x.amax(0))
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]
    x, y = x[chosen], y[chosen]
    began = time.process_time()
    curve = ws.loss_curve(model, x, y, norm, 1, "absolute", box, grid=GRID)
    errors = time.process_time() - began
    tolerance = (model(x).detach()[:, 0] - y).abs() + more
    right = ws.Specification.within(y, tolerance)
    for order in ORDERS:
        one = curve.of_order(order)
        for eps in budgets:
            began = time.process_time()
            found = ws.sandwich(model, x, right, ws.Threat(norm, order, eps, box), gap=0.005)
            seconds = time.process_time() - began
            low, high = one(eps)
            accuracy = (100 * found.certified, 100 * found.attacked)
            points = f"{accuracy[1] - accuracy[0]:.2f} points"
            print(
                f"| {title} | l{norm} | {order} | {eps:g} "
                f"| {accuracy[0]:.2f} to {accuracy[1]:.2f} ({points}) | {seconds:.0f} "
                f"| {show(low, high, f'{100 * (high / low - 1):.1f} %')} | {errors:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=os.environ.get("WASSAIL_TABLES"))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--only", default="", help="networks with this in their names")
    parser.add_argument("--norms", nargs="+", default=["2", "inf"])
    args = parser.parse_args()
    if args.tables is None:
        parser.error("give --tables FOLDER with the UCI files, or set WASSAIL_TABLES.")
    torch.set_num_threads(1)
    print(HEAD.format(args.samples))
    print("| network | norm | order | eps | % within the tolerance | s | mean absolute error | s |")
    print("|---|---|---|---|---|---|---|---|")
    for title in NETWORKS:
        for norm in args.norms:
            if args.only in title:
                rows(title, norm, Path(args.tables), args.samples)


if __name__ == "__main__":
    main()
