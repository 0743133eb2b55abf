"""Certificates for the vote under Gaussian noise, beside the bound of Kumar, Levine and Feizi."""

from __future__ import annotations

from functools import partial

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, spent
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import Row, Stage, Unit, here

IMAGES = 200
CONFIDENCE = 0.999
BUDGETS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
DRAWS = 1000
CASES = {"digits-cnn-noise": 0.25}  # sigma


def units() -> list[Unit]:
    """One network each."""
    return [Unit(name, partial(smoothed, name, sigma)) for name, sigma in CASES.items()]


def smoothed(name: str, sigma: float) -> Row:
    """Both sides of both classifiers."""
    model = load(name)
    x, y = images(data_of(name), IMAGES)
    with spent() as used:
        smooth = ws.smoothed(model, sigma, DRAWS)
        proof = smooth.certify(x, y, CONFIDENCE)
    seconds = used.seconds / len(x)
    with spent():
        found = ws.attack_smoothed(smooth, x, y, confidence=CONFIDENCE, passes=50, draws=300)
    budgets = []
    for eps in BUDGETS:
        row: Row = {"eps": eps, "kumar": 100 * proof.kumar(eps)}
        row["vote"] = [100 * side for side in proof.curve(1, found.flips)(eps)]
        for order in (1, 2, INF):
            row[f"random_{order:g}"] = [
                100 * proof.accuracy(eps, order),
                100 * found.accuracy(eps, order),
            ]
        budgets.append(row)
    return {
        "sigma": sigma,
        "images": len(x),
        "draws": DRAWS,
        "seconds": seconds,
        "population": 100 * proof.population(0.05),
        "budgets": budgets,
    }


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network."""
    return {"votes": [{"id": n, "network": n} | done[n] for n in CASES if n in done]}


STAGE = Stage(
    name="smoothing",
    about="Certificates for the vote under Gaussian noise.",
    depends=rooms.SMOOTHING,
    units=units,
    tables=tables,
    source=here(),
)
