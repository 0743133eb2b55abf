"""Accuracy over Omega_1 from both sides, by `sandwich`."""

from __future__ import annotations

from functools import partial

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, NORMS, numbers, spent, tensor
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here

IMAGES = 50
EFFORT = 1  # seconds of one core an image, roughly; the default is 2
POINTS = 41  # of the curves that are drawn
CASES = {  # the eps it was trained for
    "cifar_base_kw": ("linf", "2/255"),
    "fashion_kw_01": ("linf", "0.1"),
    "mnist_kw_01": ("linf", "0.1"),
    "sdp_mnist_mlp": ("l2", "1"),
    "cifar_small_kw_l2_36px": ("l2", "36/255"),
    "vnn_resnet2b": ("linf", "2/255"),
}


def units() -> list[Unit]:
    """One network each."""
    return [
        Unit(name, partial(bracket, name, norm, eps), networks=(name, data_of(name)))
        for name, (norm, eps) in CASES.items()
    ]


def bracket(name: str, norm: str, eps: str) -> Row:
    """Both sides of every sample; all curves follow from them."""
    x, y = images(data_of(name), IMAGES)
    model = load(name)
    threat = ws.Threat(NORMS[norm], 1, eps)
    with spent() as used:
        found = ws.sandwich(model, x, y, threat, effort=EFFORT, seed=SEED)
    curves = {}
    for order in (1, 2, INF):
        curve = ws.risk_curve(found.flips, found.radii, order)
        at = [2 * threat.eps * k / (POINTS - 1) for k in range(POINTS)]
        curves[f"{order:g}"] = {
            "eps": at,
            "certified": [100 * curve(e)[0] for e in at],
            "attacked": [100 * curve(e)[1] for e in at],
            "here": [100 * side for side in curve(threat.eps)],
        }
    return {
        "distances": numbers(found.flips.distances),
        "radii": numbers(found.radii.values),
        "curves": curves,
        "seconds": used.seconds / len(x),
    }


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network."""
    rows = []
    for name, (norm, eps) in CASES.items():
        if name not in done:
            continue
        found = done[name]
        right = tensor(found["distances"]) > 0
        row: Row = {"id": name, "network": name, "norm": norm, "eps": eps, "images": len(right)}
        row["clean"] = 100 * float(right.double().mean())
        for order, curve in found["curves"].items():
            row[f"certified_{order}"], row[f"attacked_{order}"] = curve["here"]
        row["seconds"] = found["seconds"]
        row["effort"] = EFFORT
        row["curves"] = found["curves"]
        rows.append(row)
    return {"brackets": rows}


STAGE = Stage(
    name="gaps",
    about="Accuracy over Omega_1, Omega_2 and Omega_inf, certified and attacked.",
    depends=rooms.PROOFS,
    units=units,
    tables=tables,
    source=here(),
)
