"""Known shifts: their eps, the accuracy under them, and what attacks leave at that eps."""

from __future__ import annotations

from functools import partial

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, NORMS, spent
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here

IMAGES = 1000
PASSES = 100
CASES = {  # eps that is usual for the network
    "cifar_cnn_a_adv": {"linf": "8/255", "l2": "0.5"},
    "vnn_resnet2b": {"linf": "8/255", "l2": "0.5"},
    "mnist_kw_01": {"linf": "0.1", "l2": "1.5"},
}


def units() -> list[Unit]:
    """One network and norm each."""
    return [
        Unit(f"{name}/{norm}", partial(shifted, name, norm), networks=(name, data_of(name)))
        for name, budgets in CASES.items()
        for norm in budgets
    ]


def shifted(name: str, norm: str) -> Row:
    """The standard shifts of images."""
    model = load(name)
    x, y = images(data_of(name), IMAGES)
    r = NORMS[norm]
    with spent() as used:
        flips = ws.nearest(model, x, y, r, passes=PASSES, seed=SEED)
        found = ws.landmarks(model, x, y, r)
    curves = {order: ws.risk_curve(flips, None, order) for order in (1, INF)}
    usual = ws.Threat(r, 1, CASES[name][norm]).eps
    return {
        "images": len(x),
        "clean": 100 * curves[1](0)[1],
        "attacked": {f"{order:g}": 100 * curve(usual)[1] for order, curve in curves.items()},
        "seconds": used.seconds,
        "shifts": [
            {
                "name": mark.name,
                "accuracy": 100 * mark.accuracy,
                "eps": {f"{order:g}": mark.eps[order] for order in (1, 2, INF)},
                "attacked": 100 * curves[1](mark.eps[1])[1],
            }
            for mark in found
        ],
    }


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network and norm."""
    rows = []
    for name, budgets in CASES.items():
        for norm, eps in budgets.items():
            if f"{name}/{norm}" in done:
                head = {"id": f"{name}-{norm}", "network": name, "norm": norm, "eps": eps}
                answer = done[f"{name}/{norm}"]
                least = min(answer["shifts"], key=lambda shift: shift["eps"]["1"])
                rows.append(head | answer | {"least": least})
    return {"shifts": rows}


STAGE = Stage(
    name="corruptions",
    about="Known shifts: their eps and the accuracy under them.",
    depends=rooms.SHIFTS,
    units=units,
    tables=tables,
    source=here(),
)
