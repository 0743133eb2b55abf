"""Accuracy over Omega_1 from both sides, by `sandwich`."""

from __future__ import annotations

from functools import partial

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, NORMS, numbers, spent, tensor
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here
from wassail.threat import parse_eps
from wassail.transport.allocation import sample_weights
from wassail.transport.curve import RiskCurve

IMAGES = 200
EFFORT = 1  # seconds of one core an image, roughly; the default is 2
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
    with spent() as used:
        found = ws.sandwich(model, x, y, ws.Threat(NORMS[norm], 1, eps), effort=EFFORT, seed=SEED)
    return {
        "distances": numbers(found.flips.distances),
        "radii": numbers(found.radii.values),
        "seconds": used.seconds / len(x),
    }


def curve(row: Row, order: float) -> RiskCurve:
    """Accuracy against eps, from the distances and radii of a row."""
    distances, radii = tensor(row["distances"]), tensor(row["radii"])
    return RiskCurve(distances, radii, sample_weights(None, len(radii)), order)


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network: both sides in percent at its eps, at order 1 at half of it, too."""
    rows = []
    for name, (norm, eps) in CASES.items():
        if name not in done:
            continue
        found = done[name]
        right = tensor(found["distances"]) > 0
        row: Row = {"id": name, "network": name, "norm": norm, "eps": eps, "images": len(right)}
        row["clean"] = 100 * float(right.double().mean())
        full = parse_eps(eps)
        for label, order, budget in (
            ("1", 1.0, full),
            ("2", 2.0, full),
            ("inf", INF, full),
            ("half", 1.0, full / 2),
        ):
            low, high = curve(found, order)(budget)
            row[f"certified_{label}"], row[f"attacked_{label}"] = 100 * low, 100 * high
        row["effort"] = EFFORT
        rows.append(row | found)
    return {"brackets": rows}


STAGE = Stage(
    name="gaps",
    about="Accuracy over Omega_1, Omega_2 and Omega_inf, certified and attacked.",
    depends=rooms.PROOFS,
    units=units,
    tables=tables,
    source=here(),
)
