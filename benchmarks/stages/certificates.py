"""Verified accuracy by default `verify`: the networks of SDP-CROWN, and networks at linf."""

from __future__ import annotations

from collections import Counter
from functools import partial

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, NORMS, share, spent
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here

IMAGES = 200
CHUNK = 50
# Published with SDP-CROWN (ICML 2025), on a GPU: verified % by SDP-CROWN, by BICCOS, by a product
# of layer norms, and the upper bound of an attack.
SDP = {
    "sdp_mnist_mlp": ("l2", "1", {"sdp_crown": 32.5, "biccos": 41, "product": 29, "attack": 54}),
    "sdp_mnist_convsmall": (
        "l2",
        "0.3",
        {"sdp_crown": 81.5, "biccos": 19.5, "product": 77.5, "attack": 84.5},
    ),
    "sdp_cifar_cnn_a": (
        "l2",
        "24/255",
        {"sdp_crown": 49, "biccos": 20, "product": 39, "attack": 55.5},
    ),
}
OTHERS = {
    "mnist_kw_01": ("linf", "0.1"),
    "fashion_kw_01": ("linf", "0.1"),
    "cifar_base_kw": ("linf", "2/255"),
    "cifar_small_kw_l2_36px": ("l2", "36/255"),
    "mnist_mlp_6_100": ("linf", "0.026"),
    "mnist_madry_tiny": ("linf", "0.1"),
    "vnn_resnet2b": ("linf", "1/255"),
    "cifar_cnn_a_adv": ("linf", "1/255"),
}


def cases() -> dict[str, tuple[str, str]]:
    """Norm and eps of every network."""
    return {name: (norm, eps) for name, (norm, eps, _) in SDP.items()} | OTHERS


def units() -> list[Unit]:
    """Chunks of images."""
    return [
        Unit(
            f"{name}/{first}",
            partial(verified, name, norm, eps, first),
            networks=(name, data_of(name)),
        )
        for name, (norm, eps) in cases().items()
        for first in range(0, IMAGES, CHUNK)
    ]


def verified(name: str, norm: str, eps: str, first: int) -> Row:
    """What default `verify` says of each image."""
    x, y = images(data_of(name), CHUNK, first)
    model = load(name)
    with spent() as used:
        found = ws.verify(model, x, y, ws.Threat(NORMS[norm], INF, eps), seed=SEED)
    return {"status": list(found.status), "seconds": used.seconds}


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network of which a chunk is done."""
    rows: dict[str, list[Row]] = {"sdp": [], "others": []}
    for name, (norm, eps) in cases().items():
        parts = [done[f"{name}/{f}"] for f in range(0, IMAGES, CHUNK) if f"{name}/{f}" in done]
        if not parts:
            continue
        counts = Counter(word for part in parts for word in part["status"])
        n = sum(counts.values())
        row: Row = {"id": name, "network": name, "norm": norm, "eps": eps, "images": n}
        row["verified"] = share(counts["proved"], n)
        row["clean"] = share(n - counts["wrong"], n)
        row["attacked"] = share(n - counts["wrong"] - counts["falsified"], n)
        row["open"] = counts["open"]
        row["seconds"] = sum(part["seconds"] for part in parts) / n
        if name in SDP:
            row["published"] = SDP[name][2]
        rows["sdp" if name in SDP else "others"].append(row)
    return rows


STAGE = Stage(
    name="certificates",
    about="Verified accuracy by default `verify`.",
    depends=rooms.PROOFS,
    units=units,
    tables=tables,
    source=here(),
)
