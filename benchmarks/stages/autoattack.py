"""AutoAttack beside its authors' program: accuracy on 1,000 images, time on fewer by turns."""

from __future__ import annotations

from functools import partial

import torch

import wassail as ws
from benchmarks import peers, rooms
from benchmarks.measure import INF, NORMS, clean, share, spent
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here

IMAGES = 1000
TIMED = 100
CASES = (
    ("cifar_cnn_a_adv", "linf", "2/255"),
    ("vnn_resnet2b", "linf", "2/255"),
    ("cifar_cnn_a_adv", "l2", "0.25"),
    ("mnist_madry_tiny", "linf", "0.3"),
)


def units() -> list[Unit]:
    """Ours, its authors', and both by turns."""
    found = []
    for name, norm, eps in CASES:
        files = (name, data_of(name))
        key = f"{name}/{norm}"
        found.append(Unit(f"{key}/ours", partial(ours, name, norm, eps), networks=files))
        run = partial(theirs, name, norm, eps)
        found.append(Unit(f"{key}/theirs", run, "autoattack", files))
    for name, norm, eps in CASES[:2]:
        run = partial(timed, name, norm, eps)
        key = f"{name}/{norm}/time"
        if peers.installed("autoattack"):
            found.append(Unit(key, run, networks=(name, data_of(name))))
    return found


def opened(name: str, count: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    return load(name).requires_grad_(False), *images(data_of(name), count)


def ours(name: str, norm: str, eps: str) -> Row:
    """How many images stay right."""
    model, x, y = opened(name, IMAGES)
    with spent() as used:
        found = ws.autoattack(model, x, y, ws.Threat(NORMS[norm], INF, eps), seed=SEED)
    return {"right": round(found.accuracy * len(x)), "n": len(x), "seconds": used.seconds}


def theirs(name: str, norm: str, eps: str) -> Row:
    """The same by its authors' program; a point counts if it is in the ball and wrong."""
    model, x, y = opened(name, IMAGES)
    budget = ws.Threat(NORMS[norm], INF, eps).eps
    with spent() as used:
        points = peers.auto_attack(model, x, y, NORMS[norm], budget)
    inside = peers.within(points, x, NORMS[norm], budget)
    right = clean(model, x, y) & ~(inside & ~clean(model, points, y))
    return {"right": int(right.sum()), "n": len(x), "seconds": used.seconds}


def timed(name: str, norm: str, eps: str) -> Row:
    """Processor seconds of both, by turns in one process, the least of two each."""
    model, x, y = opened(name, TIMED)
    threat = ws.Threat(NORMS[norm], INF, eps)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(2):
        with spent() as used:
            ws.autoattack(model, x, y, threat, seed=SEED)
        seconds["ours"].append(used.seconds)
        with spent() as used:
            peers.auto_attack(model, x, y, threat.norm, threat.eps)
        seconds["theirs"].append(used.seconds)
    return {"n": len(x), **{side: min(values) for side, values in seconds.items()}}


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each case that ours has run on."""
    rows = []
    for name, norm, eps in CASES:
        key = f"{name}/{norm}"
        if f"{key}/ours" not in done:
            continue
        row: Row = {"id": f"{name}-{norm}", "network": name, "norm": norm, "eps": eps}
        for side in ("ours", "theirs"):
            if f"{key}/{side}" in done:
                answer = done[f"{key}/{side}"]
                row[side] = share(answer["right"], answer["n"])
                row[f"{side}_seconds"] = answer["seconds"]
        if f"{key}/time" in done:
            row["time"] = done[f"{key}/time"]
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
