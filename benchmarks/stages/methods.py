"""The default beside its own methods: what `method="auto"` proves, and what each part proves alone.

$WASSAIL_TUNING=1 measures on images from 1,000 on, on which the order of the ladder was chosen.
"""

from __future__ import annotations

import os
from functools import partial

from torch import Tensor

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, NORMS, REPORTED, TUNED, clean, spent
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here

IMAGES = 20
# network and norm -> eps of the proofs; those of the pages
CASES = {
    ("sdp_mnist_mlp", "l2"): "1",
    ("sdp_mnist_convsmall", "l2"): "0.3",
    ("sdp_cifar_cnn_a", "l2"): "24/255",
    ("cifar_small_kw_l2_36px", "l2"): "36/255",
    ("mnist_kw_01", "linf"): "0.1",
    ("fashion_kw_01", "linf"): "0.1",
    ("cifar_base_kw", "linf"): "2/255",
    ("mnist_mlp_6_100", "linf"): "0.026",
    ("mnist_madry_tiny", "linf"): "0.1",
    ("cifar_conv_small_sigmoid", "linf"): "1/255",
    ("mnist_fc_256x2", "linf"): "0.03",
    ("mnist_kw_01", "l1"): "1",
    ("cifar_cnn_a_adv", "linf"): "1/255",
    ("vnn_resnet2b", "linf"): "1/255",
    ("cifar_vit_ibp_3_3_8", "linf"): "1/255",
}
PARTS = {1.0: ("crown", "branch"), 2.0: ("crown", "ball", "branch"), INF: ("crown", "branch")}
ASKED = ("radii", "verify")


def units() -> list[Unit]:
    """A question, a network and norm, and a method."""
    return [
        Unit(
            f"{name}/{norm}/{asked}/{method}",
            partial(measured, name, norm, eps, asked, method),
            networks=(name, data_of(name)),
        )
        for (name, norm), eps in CASES.items()
        for asked in ASKED
        for method in ("auto", *PARTS[NORMS[norm]])
    ]


def measured(name: str, norm: str, eps: str, asked: str, method: str) -> Row:
    """Radii, or how many images are proved at eps."""
    x, y = chosen(data_of(name))
    model = load(name)
    right = int(clean(model, x, y).sum())
    r = NORMS[norm]
    if asked == "radii":
        with spent() as used:
            found = float(ws.radii(model, x, y, r, method=method).values.sum()) / max(right, 1)
    else:
        threat = ws.Threat(r, INF, eps)
        with spent() as used:
            told = ws.verify(model, x, y, threat, method=method, seed=SEED)
        found = float(sum(status == "proved" for status in told.status))
    return {"found": found, "right": right, "seconds": used.seconds / len(x)}


def chosen(data: str) -> tuple[Tensor, Tensor]:
    """The images; those of SDP-CROWN are but 200, so it is tuned on the other ones of the set."""
    if os.environ.get("WASSAIL_TUNING"):
        whole = {"sdp_mnist": "mnist", "sdp_cifar": "cifar10"}.get(data, data)
        return images(whole, IMAGES, TUNED)
    return images(data, IMAGES, REPORTED)


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network and norm, in a table for each question."""
    found: dict[str, list[Row]] = {}
    for asked in ASKED:
        found[asked] = []
        for (name, norm), eps in CASES.items():
            methods = ("auto", *PARTS[NORMS[norm]])
            keys = [f"{name}/{norm}/{asked}/{method}" for method in methods]
            if not all(key in done for key in keys):
                continue
            answers = {method: done[key] for method, key in zip(methods, keys)}
            best = max(methods[1:], key=lambda m: (answers[m]["found"], -answers[m]["seconds"]))
            row: Row = {"id": f"{name}-{norm}", "network": name, "norm": norm, "eps": eps}
            row |= {"images": IMAGES, "right": answers["auto"]["right"], "best": best}
            row["found"] = {method: answers[method]["found"] for method in methods}
            row["seconds"] = {method: answers[method]["seconds"] for method in methods}
            row["ratio"] = answers["auto"]["found"] / max(answers[best]["found"], 1e-12)
            row["time"] = answers["auto"]["seconds"] / answers[best]["seconds"]
            found[asked].append(row)
    return found


STAGE = Stage(
    name="methods",
    about="The default of `radii` and `verify` beside each of its methods alone.",
    depends=rooms.PROOFS,
    units=units,
    tables=tables,
    source=here(),
)
