"""AutoAttack beside its authors' program, by turns on chunks of images in one process."""

from __future__ import annotations

from functools import partial

import wassail as ws
from benchmarks import peers, rooms
from benchmarks.measure import INF, NORMS, clean, share, spent
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here

IMAGES = 1000
CHUNK = 250
CASES = (
    ("cifar_cnn_a_adv", "linf", "2/255"),
    ("vnn_resnet2b", "linf", "2/255"),
    ("cifar_cnn_a_adv", "l2", "0.25"),
    ("mnist_madry_tiny", "linf", "0.3"),
)


def units() -> list[Unit]:
    """Chunks of images, with the authors' program where it is installed."""
    both = peers.installed("autoattack")
    return [
        Unit(
            f"{name}/{norm}/{first}" + ("" if both else "/alone"),
            partial(attacked, name, norm, eps, first, both),
            networks=(name, data_of(name)),
        )
        for name, norm, eps in CASES
        for first in range(0, IMAGES, CHUNK)
    ]


def attacked(name: str, norm: str, eps: str, first: int, both: bool) -> Row:
    """How many images stay right; a point of the other program counts if it is in the ball."""
    model = load(name).requires_grad_(False)
    x, y = images(data_of(name), CHUNK, first)
    threat = ws.Threat(NORMS[norm], INF, eps)
    with spent() as used:
        found = ws.autoattack(model, x, y, threat, seed=SEED)
    answer: Row = {"n": len(x), "ours": round(found.accuracy * len(x)), "seconds": used.seconds}
    if both:
        with spent() as used:
            points = peers.auto_attack(model, x, y, threat.norm, threat.eps)
        flipped = peers.within(points, x, threat.norm, threat.eps) & ~clean(model, points, y)
        answer["theirs"] = int((clean(model, x, y) & ~flipped).sum())
        answer["their_seconds"] = used.seconds
    return answer


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each case of which a chunk is done."""
    rows = []
    for name, norm, eps in CASES:
        parts = [answer for key, answer in done.items() if key.startswith(f"{name}/{norm}/")]
        if not parts:
            continue
        n = sum(part["n"] for part in parts)
        row: Row = {"id": f"{name}-{norm}", "network": name, "norm": norm, "eps": eps}
        row |= {"images": n, "ours": share(sum(part["ours"] for part in parts), n)}
        row["ours_seconds"] = sum(part["seconds"] for part in parts)
        if all("theirs" in part for part in parts):
            row["theirs"] = share(sum(part["theirs"] for part in parts), n)
            row["theirs_seconds"] = sum(part["their_seconds"] for part in parts)
        rows.append(row)
    return {"suite": rows}


STAGE = Stage(
    name="autoattack",
    about="AutoAttack's standard version: accuracy and time beside its authors' program.",
    depends=rooms.ATTACKS,
    units=units,
    tables=tables,
    source=here(),
)
