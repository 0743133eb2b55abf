"""Regressions from both sides: accuracy within a tolerance, and the mean absolute error.

Networks of ExLipBaB on their tables, features in units of their standard deviations.
$WASSAIL_TABLES is a folder with `winequality-red.csv`, `winequality-white.csv` and `abalone.data`
of the UCI repository; without it nothing is run. The domain is the range of each feature in the
table. A tolerance is more than a sample's own error by half a point of a wine's quality, or by one
ring of an abalone's age: all samples are right at eps 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import spent
from benchmarks.networks.load import layers
from benchmarks.stage import SEED, Row, Stage, Unit, here

SAMPLES = 50  # drawn once
ORDERS = ("1", "2", "inf")
EPS = (0.02, 0.05, 0.1)
NORMS = ("2", "inf")
GRID = sorted({*EPS, *(0.01 * 2 ** (k / 2) for k in range(16))})


def standard(x: Tensor) -> Tensor:
    """In units of the standard deviation of each feature."""
    return (x - x.mean(0)) / x.std(0)


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


@dataclass(frozen=True)
class Task:
    """A table, and how much more than its own error a sample may be off."""

    table: Callable[[Path], tuple[Tensor, Tensor]]
    more: float


TASKS = {
    "exlipbab_wine_11-24-24-1": Task(wine, 0.5),
    "exlipbab_abalone_9-16-16-1": Task(abalone, 1.0),
}


def home() -> Path | None:
    """The folder of the tables."""
    folder = os.environ.get("WASSAIL_TABLES")
    return Path(folder) if folder else None


def units() -> list[Unit]:
    """A network and a norm."""
    if home() is None:
        return []
    return [
        Unit(f"{name}/l{norm}", partial(bracketed, name, norm), networks=(name,))
        for name in TASKS
        for norm in NORMS
    ]


def network(name: str) -> nn.Module:
    """A ReLU network from its arrays."""
    found: list[nn.Module] = []
    for weight, bias in layers(name):
        layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        layer.weight.data, layer.bias.data = weight.double(), bias.double()
        found += [layer, nn.ReLU()]
    return nn.Sequential(*found[:-1]).eval()


def bracketed(name: str, norm: str) -> Row:
    """One network at one norm: an entry for each order and budget."""
    folder = home()
    assert folder is not None
    model, task = network(name), TASKS[name]
    x, y = task.table(folder)
    box: Any = (x.amin(0), x.amax(0))  # of each feature
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))[:SAMPLES]
    x, y = x[chosen], y[chosen]
    with spent() as errors:
        curves = {
            order: ws.loss_curve(
                *(model, x, y, norm, order, "absolute", box),
                grid=GRID,
                eps=EPS,
            )
            for order in ORDERS
        }
    right = ws.Specification.within(y, (model(x).detach()[:, 0] - y).abs() + task.more)
    found = []
    for order in ORDERS:
        for eps in EPS:
            with spent() as used:
                threat = ws.Threat(norm, order, eps, box)
                bracket = ws.sandwich(model, x, right, threat, gap=0.005)
            low, high = curves[order](eps)
            sides = (bracket.certified, bracket.attacked, low, high)
            found.append([order, eps, *map(float, sides), used.seconds])
    return {"found": found, "error_seconds": errors.seconds}


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """A row for each order and budget."""
    rows = []
    for unit, answer in done.items():
        name, _, norm = unit.partition("/")
        for order, eps, low, high, least, most, seconds in answer["found"]:
            rows.append(
                {
                    "id": f"{unit} {order} {eps:g}",
                    "network": name,
                    "norm": norm,
                    "order": order,
                    "eps": eps,
                    "samples": SAMPLES,
                    "within_low": 100 * low,
                    "within_high": 100 * high,
                    "error_low": least,
                    "error_high": most,
                    "error_gap": 100 * (most / least - 1),
                    "seconds": seconds,
                    "error_seconds": answer["error_seconds"],
                }
            )
    return {"regression": rows}


STAGE = Stage(
    name="regression",
    about="Regressions from both sides: accuracy within a tolerance, mean absolute error.",
    depends=rooms.LOSSES,
    units=units,
    tables=tables,
    source=here(),
)
