"""Certified radii and verified accuracy on real networks: beside auto_LiRPA, beside published
figures, beside attacks.

    python benchmarks/radii.py --part peer|batches|memory|alpha|full|soundness|branched|sandwich
    [--state FOLDER] [--only NAME] [--images 500] [--show]

Every finished unit of work is one line of FOLDER/<part>.jsonl and is not done again: stop and start
as you like. `--show` prints what is there and computes nothing. Without --part all sections are
printed so: together they are docs/radii.md. auto_LiRPA is found through $WASSAIL_LIRPA, the folder
that holds the package `auto_LiRPA`; without it its columns stay empty.
"""

import argparse
import copy
import ctypes
import gc
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.prove import linear_search
from wassail.certificates.relax.crown import margin_bounds
from wassail.testing import corpus
from wassail.threat import show
from wassail.transport.curve import RiskCurve
from wassail.transport.picture import draw_sandwich
from zoo_path import ROOT, ZOO, images, load

INF = math.inf
BOX = (0.0, 1.0)
BATCH = 20  # images in one unit of the comparison, and in one batch of auto_LiRPA
BLOCK = 100  # images in one unit of the whole test set
PUBLISHED = {  # VNN-COMP 2021, CROWN-verified accuracy over the 10,000 test images, %
    ("vnn_resnet2b", 2): 26.88,
    ("vnn_resnet2b", 1): 57.16,
    ("vnn_resnet4b", 1): 23.28,
    ("vnn_resnet4b", 2): 0.24,
}


class Units:
    """Results by key, one JSON line each, kept in a file; a result that is there is not
    computed again.
    """

    def __init__(self, folder: Path, part: str, show: bool) -> None:
        self.path = folder / f"{part}.jsonl"
        self.show = show
        self.known: dict[str, Any] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                key, value = json.loads(line)
                self.known[key] = value

    def get(self, key: str, compute: Callable[..., Any], *args: Any) -> Any:
        """The result of this unit; None if it is not there and nothing is to be computed."""
        if key not in self.known and not self.show:
            self.known[key] = compute(*args)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.known[key]]) + "\n")
            print(f"done: {key}", file=sys.stderr, flush=True)
        return self.known.get(key)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parts = {
        "peer": peer,
        "batches": batches,
        "memory": memory,
        "alpha": alpha,
        "full": full,
        "soundness": soundness,
        "branched": branched,
        "sandwich": sandwich,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=parts)
    parser.add_argument("--state", type=Path, default=Path(".radii"), help="folder of what is done")
    parser.add_argument(
        "--images", type=int, default=None, help="peer: first so many images; full: the same"
    )
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--show", action="store_true", help="print what is done, compute nothing")
    options = parser.parse_args()
    if options.part is None:
        print(INTRODUCTION)
        options.show = True
    for part in [options.part] if options.part else parts:
        parts[part](Units(options.state, part, options.show), options)


INTRODUCTION = f"""\
# Certified radii, verified accuracy and the sandwich: measured

A sample's *certified radius* is a distance within which, as is proved, nothing in the box [0, 1] is
classified otherwise. *Verified accuracy* at eps is the part of the samples that are proved right in
the whole closed ball of radius eps. The *sandwich* is the robust accuracy over all distributions
within Wasserstein distance eps of the data, from below by certified radii and from above by the
distances of flips that an attack found, through the same knapsack. Everything here is measured on
the first images of the test sets, one thread, processor time, torch {torch.__version__}; made by
`python benchmarks/radii.py`, unit by unit, so that a count below what was asked for is the number
of images that were done.
"""


# Part peer: CROWN beside auto_LiRPA's.

PEER_TEXT = """\
Lower bounds on the nine margins `theta_y - theta_j` of every correctly classified image over its
linf ball, cut by the box. Both in turn in one process, in units of 20 images; the structure is read
before the clock starts, on both sides. auto_LiRPA computes in float32 without care for rounding;
ours are sound, and include a few steps on the slopes of the margins' own lines. `looser`: our
bounds below auto_LiRPA's by more than 1e-4 of the larger of the two in size; `worst`: the largest
such difference; `median`: of ours minus auto_LiRPA's, in logits. `time`: processor seconds for a
correctly classified image, `ratio`: auto_LiRPA's over ours, in all and the range over the units.
"""


def peer(units: Units, options: argparse.Namespace) -> None:
    wanted = 500 if options.images is None else options.images
    print("\n## CROWN beside auto_LiRPA's\n")
    print(f"`python benchmarks/radii.py --part peer --images {wanted}`\n\n{PEER_TEXT}")
    print(
        "| network | eps | images | correct | verified, ours | auto_LiRPA | differ | entries | "
        "looser | worst | median | "
        "time, ours | auto_LiRPA | ratio | range |"
    )
    print("|" + 15 * "---|")
    for name in ("vnn_resnet2b", "vnn_resnet4b"):
        for eps in (1, 2):
            if options.only in name:
                starts = range(0, wanted, BATCH)
                found = [
                    units.get(f"{name} crown {eps}/255 {s}", both, name, eps, s, BATCH)
                    for s in starts
                ]
                peer_row(name, f"{eps}/255", [u for u in found if u])


def alpha(units: Units, options: argparse.Namespace) -> None:
    """What optimised slopes and branching prove beyond CROWN."""
    wanted = 100 if options.images is None else options.images
    print(
        "\n## Optimised slopes and branching\n\n`python benchmarks/radii.py --part alpha "
        f"--images {wanted}`\n\n{ALPHA_TEXT}"
    )
    print(
        "| network | eps | images | attacked % | crown | branch | auto | s an image: "
        "crown | branch | auto |"
    )
    print("|" + 10 * "---|")
    for name, eps in (
        ("vnn_resnet2b", 2 / 255),
        ("cifar_base_kw", 2 / 255),
        ("fashion_kw_01", 0.1),
    ):
        if options.only not in name:
            continue
        rows = [
            units.get(f"{name} {start}", proofs, name, eps, start, 10)
            for start in range(0, wanted, 10)
        ]
        rows = [row for row in rows if row]
        n = sum(row["images"] for row in rows)
        if n:
            shares = (
                f"{100 * sum(row[key] for row in rows) / n:.1f}" for key in ("attacked", *PROOFS)
            )
            seconds = (f"{sum(row[f'{key} seconds'] for row in rows) / n:.2f}" for key in PROOFS)
            print(
                f"| `{name}` | {show(eps)} | {n} | {' | '.join(shares)} | {' | '.join(seconds)} |",
                flush=True,
            )


def proofs(name: str, eps: float, start: int, count: int) -> dict[str, Any]:
    """One unit: how many images each method proves, and in what time; none of them may be
    flipped.
    """
    model, _, x, y = network(name)
    x = x[start : start + count]
    y = y[start : start + count]
    left = ws.nearest(model, x, y, INF, BOX, passes=200).distances > eps
    unit: dict[str, Any] = {"images": len(x), "attacked": int(left.sum())}
    for method, settings in PROOFS.items():
        began = time.process_time()
        proved = ws.verify(
            model, x[left], y[left], ws.Threat(INF, INF, eps, BOX), method, **settings
        ).proved
        unit |= {method: int(proved.sum()), f"{method} seconds": time.process_time() - began}
    return unit


def peer_row(name: str, eps: str, found: list[dict[str, Any]]) -> None:
    found = [u for u in found if u["ours"]]
    if not found:
        return
    if not all(u["theirs"] for u in found):
        count = sum(u["images"] for u in found)
        correct = sum(len(u["ours"]) for u in found)
        proved = sum(min(row) > 0 for u in found for row in u["ours"])
        mine = sum(u["ours_seconds"] for u in found) / correct
        share = f"{proved} ({100 * proved / count:.1f} %)"
        print(
            f"| `{name}` | {eps} | {count} | {correct} | {share} | | | | | | | {mine:.3f} | | | |",
            flush=True,
        )
        return
    ours, theirs = (
        torch.tensor([v for u in found for row in u[side] for v in row])
        for side in ("ours", "theirs")
    )
    proved, said = ([min(row) > 0 for u in found for row in u[side]] for side in ("ours", "theirs"))
    count = sum(u["images"] for u in found)
    correct = sum(len(u["ours"]) for u in found)
    ours = ours.double()
    theirs = theirs.double()
    behind = (theirs - ours) / torch.maximum(theirs.abs(), ours.abs())
    spent = {side: sum(u[f"{side}_seconds"] for u in found) for side in ("ours", "theirs")}
    each = [u["theirs_seconds"] / u["ours_seconds"] for u in found]
    print(
        f"| `{name}` | {eps} | {count} | {correct} | {sum(proved)} "
        f"({100 * sum(proved) / count:.1f} %) | "
        f"{sum(said)} ({100 * sum(said) / count:.1f} %) | "
        f"{sum(a != b for a, b in zip(proved, said))} | {len(ours)} | "
        f"{int((behind > 1e-4).sum())} | {max(float(behind.max()), 0.0):.1e} | "
        f"{float((ours - theirs).median()):+.1e} | "
        f"{spent['ours'] / correct:.3f} | {spent['theirs'] / correct:.3f} | "
        f"{spent['theirs'] / spent['ours']:.2f} | "
        f"{min(each):.2f} to {max(each):.2f} |",
        flush=True,
    )


PROOFS: dict[str, dict[str, Any]] = {"crown": {}, "branch": {}, "auto": {}}
ALPHA_TEXT = """\
First test images, linf, the eps of training. Images that `ws.nearest(passes=200)` flips within eps
cannot be proved and are not tried; of the others `ws.verify` proves the share given, in % of all
images: by CROWN, by branching, and by the whole ladder. What lies between the last of these and the
attacked accuracy is not known.
"""


def both(name: str, eps: int, start: int, count: int) -> dict[str, Any]:
    """One unit: margin bounds of the correctly classified ones of some images, ours and
    auto_LiRPA's, and the time of each.
    """
    model, graph, x, y = network(name)
    x = x[start : start + count]
    y = y[start : start + count]
    with torch.no_grad():
        right = model(x).argmax(1) == y
    x = x[right]
    y = y[right]
    radius = eps / 255
    unit: dict[str, Any] = {
        "images": len(right),
        "ours": [],
        "theirs": [],
        "ours_seconds": 0,
        "theirs_seconds": 0,
    }
    if not len(x):
        return unit
    began = time.process_time()
    ours = margin_bounds(graph, x, y, radius, INF, BOX)
    unit["ours_seconds"] = time.process_time() - began
    unit["ours"] = rivals(ours, y)
    if "WASSAIL_LIRPA" in os.environ:
        theirs, unit["theirs_seconds"] = lirpa(name, x, y, radius)
        unit["theirs"] = rivals(theirs, y)
    return unit


@cache
def network(name: str) -> tuple[nn.Module, Graph, Tensor, Tensor]:
    """A network of the zoo, its structure, and the test images with their labels."""
    model, data = load(name)
    x, y = images(data)
    return model, read(model, tuple(x.shape[1:]), smooth=True), x, y


def rivals(margins: Tensor, y: Tensor) -> list[list[float]]:
    """The K - 1 margins that mean something, of `(N, K)`."""
    keep = torch.ones_like(margins, dtype=torch.bool).scatter(1, y[:, None], False)
    found: list[list[float]] = margins[keep].reshape(len(y), -1).tolist()
    return found


@cache
def bounded(name: str) -> tuple[nn.Module, Any]:
    """The normalisation and auto_LiRPA's model of the rest."""
    sys.path.insert(0, os.environ["WASSAIL_LIRPA"])
    from auto_LiRPA import BoundedModule

    model, x, _ = any_network(name, 1)
    parts = list(model.children())
    if len(parts) == 2 and type(parts[0]).__name__ == "Normalize":
        return parts[0], BoundedModule(parts[1], x)
    return nn.Identity(), BoundedModule(model, x)


def lirpa(name: str, x: Tensor, y: Tensor, radius: float) -> tuple[Tensor, float]:
    """auto_LiRPA's margin bounds `(N, K)` over the ball cut by the box, and its processor time."""
    normalise, model = bounded(name)
    from auto_LiRPA import BoundedTensor, PerturbationLpNorm

    eye = torch.eye(10)
    rows = eye[y][:, None] - eye[None]
    keep = torch.ones(len(y), 10, dtype=torch.bool).scatter(1, y[:, None], False)
    rows = rows[keep].reshape(len(y), 9, 10)
    low = normalise((x - radius).clamp(0, 1))
    high = normalise((x + radius).clamp(0, 1))
    ball = BoundedTensor(normalise(x), PerturbationLpNorm(norm=INF, eps=radius, x_L=low, x_U=high))
    began = time.process_time()
    with torch.no_grad():
        lower, _ = model.compute_bounds(x=(ball,), C=rows, method="CROWN", bound_upper=False)
    seconds = time.process_time() - began
    found = torch.zeros(len(y), 10, dtype=torch.float64)
    found[keep] = lower.detach().double().flatten()
    return found, seconds


# Part batches: the same at every batch size, on small networks.

BATCHES = {  # name: (eps of training, batch sizes)
    "mnist_mlp_6_100": (0.026, (1, 2, 4, 8, 20, 64)),
    "mnist_mlp_spectral": (0.1, (1, 2, 4, 8, 20, 64)),
    "mnist_fc_256x2.onnx": (0.02, (1, 2, 4, 8, 20, 64)),
    "mnist_fc_256x4.onnx": (0.02, (1, 2, 4, 8, 20, 64)),
    "digits-cnn-adv": (0.1, (1, 2, 4, 8, 20, 64)),
    "mnist_cnn_a_adv": (0.3, (1, 2, 4, 8, 20)),
    "cifar_cnn_a_adv": (2 / 255, (1, 2, 4, 8, 20)),
    "cifar_base_kw": (2 / 255, (1, 2, 4, 8, 20)),
    "vnn_resnet2b": (2 / 255, (1, 2, 4, 8, 20)),
}
GROUPS = {1: 8, 2: 6, 4: 4, 8: 3}  # batches of one size, of different images; else 2
TURNS = 3  # how often each batch is timed; the shortest counts
BATCHES_TEXT = """\
The first correctly classified images, linf, eps of training, cut by the box. All in turn in one
process, the structure read and one batch done before the clock starts. `plain`: our bounds without
steps on the slopes of the margins' own lines, the same work as auto_LiRPA's CROWN; `steps`: with
the four steps that `ws.radii` and `ws.loss_curve` take (`ws.verify` takes them where a margin is
not proved without). A time is that of the fastest of 3 turns, processor milliseconds for a batch,
mean over several batches of different images; `ratio`: auto_LiRPA's over ours, the time of all
batches. `looser`: our bounds below auto_LiRPA's by more than 1e-4 of the larger of the two in size,
of `entries`, plain and with steps; `median`: of ours with steps minus auto_LiRPA's, in logits.
"""


def batches(units: Units, options: argparse.Namespace) -> None:
    print("\n## CROWN at small batches\n")
    print(f"`python benchmarks/radii.py --part batches`\n\n{BATCHES_TEXT}")
    print(
        "| network | eps | batch | plain, ms | steps | auto_LiRPA | ratio, plain | steps | "
        "entries | looser, plain | steps | median |"
    )
    print("|" + 12 * "---|")
    for name, (eps, sizes) in BATCHES.items():
        if options.only not in name:
            continue
        for size in sizes:
            found = units.get(f"{name} {size}", in_turn, name, eps, size)
            if found:
                batch_row(name, eps, size, found)


def batch_row(name: str, eps: float, size: int, found: dict[str, Any]) -> None:
    """One line of the table."""
    values = {side: torch.tensor(found[side]) for side in SIDES}
    spent = {side: sum(found[f"{side} seconds"]) for side in SIDES}
    theirs = values["theirs"]
    looser = []
    for side in ("none", "all"):
        scale = torch.maximum(theirs.abs(), values[side].abs())
        looser.append(int((theirs - values[side] > 1e-4 * scale).sum()))
    times = " | ".join(f"{1e3 * spent[side] / len(found['all seconds']):.1f}" for side in SIDES)
    ratios = " | ".join(f"{spent['theirs'] / spent[side]:.2f}" for side in ("none", "all"))
    print(
        f"| `{name}` | {show(eps)} | {size} | {times} | {ratios} | {len(theirs)} | "
        f"{looser[0]} | {looser[1]} | {float((values['all'] - theirs).median()):+.1e} |",
        flush=True,
    )


SIDES = ("none", "all", "theirs")  # which of our margins get steps, and auto_LiRPA


def in_turn(name: str, eps: float, size: int) -> dict[str, Any]:
    """One unit: bounds and times of some batches of one size."""
    groups = GROUPS.get(size, 2)
    model, x, y = any_network(name, 2 * groups * size + 20)
    graph = read(model, tuple(x.shape[1:]))
    with torch.no_grad():
        right = model(x).argmax(1) == y
    x = x[right][: groups * size]
    y = y[right][: groups * size]
    unit: dict[str, Any] = {side: [] for side in SIDES}
    unit |= {f"{side} seconds": [] for side in SIDES}
    timed("all", name, graph, x[:size], y[:size], eps)
    timed("theirs", name, graph, x[:size], y[:size], eps)
    for start in range(0, len(x), size):
        own = (x[start : start + size], y[start : start + size])
        turns = [
            {side: timed(side, name, graph, *own, eps) for side in SIDES} for _ in range(TURNS)
        ]
        for side in SIDES:
            unit[f"{side} seconds"].append(min(turn[side][1] for turn in turns))
            unit[side] += [v for row in rivals(turns[0][side][0], own[1]) for v in row]
    return unit


def timed(
    side: str, name: str, graph: Graph, x: Tensor, y: Tensor, eps: float
) -> tuple[Tensor, float]:
    """Margin bounds of one side and their processor time."""
    if side == "theirs":
        return lirpa(name, x, y, eps)
    began = time.process_time()
    found = margin_bounds(graph, x, y, eps, INF, BOX, polish=side)
    return found, time.process_time() - began


# Part memory: what each image takes.

MEMORY_TEXT = """\
The most memory that a call takes beyond what the process had before it, for the first images and
for twice as many, linf, a ball of 1e-4 that most images are proved on at once. `KB an image`: the
slope between the two; `GB`: that slope times 10,000 images, not measured. The images themselves (12
KB each in float32) are not counted. `radii` keeps spans of at most 256 MB; here they are held to 8
MB, so that the rest shows.
"""
MEMORY = {"verify": (400, 800), "radii": (200, 400)}  # images of the two runs


def memory(units: Units, options: argparse.Namespace) -> None:
    """What is kept for each image."""
    print("\n## Memory\n")
    print(f"`python benchmarks/radii.py --part memory`\n\n{MEMORY_TEXT}")
    print("| network | call | images | MB | images | MB | KB an image | GB of 10,000 |")
    print("|" + 8 * "---|")
    for name, (call, counts) in itertools.product(
        ("cifar_base_kw", "vnn_resnet2b"), MEMORY.items()
    ):
        if options.only not in name:
            continue
        found = units.get(f"{name} {call}", peaks, name, call, counts)
        if found:
            few, many = found
            slope = (many - few) / (counts[1] - counts[0])
            print(
                f"| `{name}` | `{call}` | {counts[0]} | {few / 2**20:.0f} | {counts[1]} | "
                f"{many / 2**20:.0f} | {slope / 2**10:.1f} | {1e4 * slope / 2**30:.2f} |",
                flush=True,
            )


def peaks(name: str, call: str, counts: tuple[int, int]) -> list[int]:
    """Bytes that a call takes at most, for two numbers of images. Linux only."""
    model, _, x, y = network(name)
    near = 1e-4
    linear_search.KEPT = 2**20
    found = []
    for count in (16, *counts):  # the first call warms up
        a = x[:count]
        b = y[:count]
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = resident("VmRSS")
        if call == "verify":
            ws.verify(model, a, b, ws.Threat(INF, INF, near, BOX), "crown")
        else:
            upper = torch.full((len(a),), near, dtype=torch.float64)
            ws.radii(model, a, b, INF, BOX, "crown", upper=upper)
        found.append(resident("VmHWM") - before)
    return found[1:]


def resident(what: str) -> int:
    """Bytes of memory of this process, as Linux tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


# Part full: the whole test set.

FULL_TEXT = """\
Images that are misclassified, or that `ws.nearest(passes=30)` flips within eps, cannot be verified
and are not tried; for the others `ws.verify(method="crown")` decides. `flipped`: right, but flipped
within eps by that short attack. Published: VNN-COMP 2021, all 10,000 images. `error`: the standard
error of our figure as an estimate of the one for 10,000 images.
"""


def full(units: Units, options: argparse.Namespace) -> None:
    wanted = 10_000 if options.images is None else options.images
    print("\n## The whole test set\n")
    print(
        f"`python benchmarks/radii.py --part full`; units of {BLOCK} images, from the first "
        f"on.\n\n{FULL_TEXT}"
    )
    print(
        "| network | eps | images | right % | flipped % | verified % | error | published % | s "
        "an image |"
    )
    print("|" + 9 * "---|")
    for (name, eps), published in PUBLISHED.items():
        if options.only not in name:
            continue
        starts = range(0, wanted, BLOCK)
        found = [units.get(f"{name} {eps}/255 {s}", block, name, eps, s) for s in starts]
        found = [u for u in found if u]
        n = sum(u["images"] for u in found)
        if n:
            right, flipped, verified = (
                100 * sum(u[key] for u in found) / n for key in ("right", "flipped", "verified")
            )
            error = math.sqrt(verified * (100 - verified) / n * (1 - n / 10_000))
            print(
                f"| `{name}` | {eps}/255 | {n} | {right:.2f} | {flipped:.2f} | {verified:.2f} | "
                f"{error:.2f} | {published} | "
                f"{sum(u['seconds'] for u in found) / n:.3f} |",
                flush=True,
            )


def block(name: str, eps: int, start: int) -> dict[str, Any]:
    """One unit: how many of some images are right, flipped and verified."""
    model, _, x, y = network(name)
    x = x[start : start + BLOCK]
    y = y[start : start + BLOCK]
    began = time.process_time()
    distances = ws.nearest(model, x, y, INF, BOX, passes=30).distances
    left = distances > eps / 255
    threat = ws.Threat(INF, INF, eps / 255, BOX)
    proved = ws.verify(model, x[left], y[left], threat, "crown").proved
    right = distances > 0
    counts = {"right": right, "flipped": right & ~left, "verified": proved}
    return {
        "images": len(x),
        **{key: int(value.sum()) for key, value in counts.items()},
        "seconds": time.process_time() - began,
    }


# Part soundness: no radius above a flip.

ATTACKS = {
    INF: ("boundary-search", "fab", "fmn", "apgd"),
    2.0: ("boundary-search", "fab", "ddn", "apgd"),
    1.0: ("boundary-search", "fab", "fmn", "apgd"),
}
PASSES = {"boundary-search": 300, "fab": 150, "fmn": 150, "ddn": 150, "apgd": 150}
SOUND_TEXT = """\
Radii of one method against the nearest flip that four engines found together (ours 300 passes;
FAB, FMN (l2: DDN) and bisected APGD 150 each). `samples`: those classified rightly; medians over
them; `ratio`: median of radius / distance, 1 if both are exact. `exact`: radii known to be the
distance itself. `violations`: radii above the distance of a flip, evaluated in float64, the
arithmetic the radii are proved in; `float32`: flips within a radius in the network's own float32
that are none in float64.
"""
MOST = ("crown", "ball", "auto")
ALL = (*MOST, "exact")
SOUND = {  # name: (samples, methods)
    "random-mlp": (60, ALL),
    "random-leaky": (60, ALL),
    "random-residual": (60, ALL),
    "random-conv": (60, ALL),
    "random-pool": (60, ALL),
    "random-tanh": (60, ("crown",)),
    "digits-mlp": (200, ALL),
    "digits-mlp-adv": (200, ("crown", "exact")),
    "digits-cnn": (200, ("crown", "auto")),
    "digits-cnn-adv": (200, ("crown", "auto")),
    "digits-gelu": (200, ("crown",)),
    "digits-gelu-adv": (200, ("crown",)),
    "mnist_mlp_toy20": (200, ("crown", "exact")),
    "mnist_mlp_spectral": (100, ("crown",)),
    "mnist_mlp_6_100": (60, ("crown",)),
    "mnist_fc_256x2.onnx": (30, ("crown",)),
    "mnist_madry_tiny": (30, ("crown",)),
    "mnist_conv_small": (10, ("crown",)),
    "mnist_kw_01": (6, ("crown",)),
    "fashion_kw_01": (6, ("crown",)),
    "mnist_cnn_a_adv": (6, ("crown",)),
    "mnist_convnet_avgpool.onnx": (6, ("crown",)),
    "mnist_convnet_maxpool.onnx": (6, ("crown",)),
    "cifar_base_kw": (10, ("crown",)),
    "cifar_small_kw_l2_36px": (10, ("crown",)),
    "cifar_cnn_a_adv": (8, ("crown",)),
    "cifar_conv_small_sigmoid": (6, ("crown",)),
    "vnn_resnet2b": (4, ("crown",)),
    "mnist_trades": (1, ("crown",)),
}


FEW = 3  # samples of each network where proofs get real time
FEWER = 2  # of the larger ones
BRANCHED_TEXT = """\
The same for the dearer methods: linear bounds (`crown`), balls and boxes together (`ball`; l1 and
l2), branching (`branch`) and exact distances (`exact`, where branching takes over when the 10 s for
all samples are over), the first 3 samples of the small networks and the first 2 of the larger ones
(from `mnist_madry_tiny` on), where `ball` and `branch` have 60 s for both samples. `ratio` is the
mean here; `s`: processor seconds a sample.
"""
SMALL = ("random", "digits-mlp", "mnist_mlp", "mnist_fc")
LIMITS = {"exact": 10.0}  # seconds for all samples
LARGE_LIMITS = {"exact": 10.0, "ball": 60.0, "branch": 60.0}


def few_methods(name: str, norm: float) -> tuple[str, ...]:
    """What is tried on a network: balls at l1 and l2, exact distances on the small ones."""
    balls = ("ball",) if norm < INF and not re.search("tanh|gelu|sigmoid", name) else ()
    exact = ("exact",) if name.startswith(SMALL) and "tanh" not in name else ()
    return ("crown", *balls, "branch", *exact)


def few_samples(name: str) -> int:
    """How many samples of a network get real time."""
    return FEW if name.startswith((*SMALL, "digits")) else FEWER


def branched(units: Units, options: argparse.Namespace) -> None:
    """Soundness where proofs get real time."""
    print("\n## Soundness with branching, and what balls give\n")
    print(f"`python benchmarks/radii.py --part branched`\n\n{BRANCHED_TEXT}")
    print(
        "| network | norm | samples | method | exact | ratio | s | violations | float32 |\n|"
        + 9 * "---|"
    )
    bad = 0
    count = 0
    for name, norm in itertools.product(SOUND, (INF, 2.0, 1.0)):
        if options.only not in name:
            continue
        few = few_samples(name)
        limits = LIMITS if few == FEW else LARGE_LIMITS
        flips = units.get(f"{name} {norm:g} flips", attacked, name, few, norm)
        for method in few_methods(name, norm) if flips else ():
            task = (proved, name, few, norm, method, limits.get(method))
            found = units.get(f"{name} {norm:g} {method}", *task)
            if not found:
                continue
            single = torch.tensor(flips["float32"], dtype=torch.float64)
            double = torch.tensor(flips["float64"], dtype=torch.float64)
            values = torch.tensor(found["values"], dtype=torch.float64)
            right = single > 0
            wrong = int((values > double).sum())
            only = int(((values > single) & ~(values > double)).sum())
            ratio = (values / single)[right].nan_to_num(1.0)
            bad += wrong
            count += int(right.sum())
            print(
                f"| `{name}` | {norm:g} | {int(right.sum())} | {method} | {found['exact']} | "
                f"{float(ratio.mean()):.3f} | {found['seconds'] / few:.1f} | {wrong} | {only} |",
                flush=True,
            )
    print(f"\n{count} radii: {bad} violations.")


def soundness(units: Units, options: argparse.Namespace) -> None:
    print("\n## Soundness: no radius above the distance of a flip\n")
    print(f"`python benchmarks/radii.py --part soundness`\n\n{SOUND_TEXT}")
    print(
        "| network | norm | samples | method | exact | median radius | median flip | ratio | "
        "violations | float32 |"
    )
    print("|" + 10 * "---|")
    pairs = 0
    samples = 0
    bad = 0
    near = 0
    seen = set()
    for name, (count, methods) in SOUND.items():
        if options.only not in name:
            continue
        for norm in (INF, 2.0, 1.0):
            flips = units.get(f"{name} {norm:g} flips", attacked, name, count, norm)
            if not flips:
                continue
            single, double = (
                torch.tensor(flips[key], dtype=torch.float64) for key in ("float32", "float64")
            )
            right = single > 0
            for place, method in enumerate(methods):
                task = (proved, name, count, norm, method, LIMITS.get(method))
                found = units.get(f"{name} {norm:g} {method}", *task)
                if not found:
                    continue
                pairs += 0 if place else int(right.sum())
                samples += 0 if name in seen else int(right.sum())
                seen.add(name)
                values = torch.tensor(found["values"], dtype=torch.float64)
                wrong = int((values > double).sum())
                inside = int((values > single).sum())
                only = int(((values > single) & ~(values > double)).sum())
                bad = bad + wrong
                near = near + only
                r = values[right]
                d = single[right]
                print(
                    f"| `{name}` | {norm:g} | {int(right.sum())} | {method} | {found['exact']} | "
                    f"{middle(r):.4g} | "
                    f"{middle(d):.4g} | {middle(r / d):.3f} | {wrong} | {only} |",
                    flush=True,
                )
                if wrong:
                    where = (values > double).nonzero()[:, 0].tolist()
                    print(
                        f"VIOLATION: {name} l{norm:g} {method} samples {where}, {inside} in "
                        "float32",
                        file=sys.stderr,
                        flush=True,
                    )
    print(
        f"\n{len(seen)} networks, {samples} samples, {pairs} pairs of a sample and a norm: {bad} "
        "violations, "
        f"{near} in float32 only."
    )


def middle(values: Tensor) -> float:
    """The median, nan for none; of infinite ratios and distances too."""
    return float(values.nan_to_num(1.0, posinf=INF).median()) if len(values) else math.nan


@cache
def any_network(name: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of any kind by its name, in the arithmetic it comes in, and its first samples
    with labels.
    """
    if name.startswith("digits"):
        x, y = ws.zoo.data("digits")
        return ws.zoo.load(name), x[:count], y[:count]
    if name.startswith("random"):
        return random_network(name, count)
    if name.endswith(".onnx"):
        model = ws.zoo.load_onnx(ZOO / "models" / name)
        x, y = images("mnist", count)
        return model, x.reshape(count, 1, 784, 1) if "fc" in name else x, y
    model, _, x, y = network(name)
    return model, x[:count], y[:count]


def random_network(name: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network with random weights in float64, random points of the unit box, and the
    classes it gives them itself.
    """
    generator = torch.Generator().manual_seed(7)
    flat = nn.Flatten()
    relu = nn.ReLU()
    tanh = nn.Tanh()
    residual = type(corpus()["residual"][0][1])
    steep = nn.LeakyReLU(0.05)
    gentle = nn.LeakyReLU(0.2)
    layers, shape = {
        "random-mlp": ((nn.Linear(6, 16), relu, nn.Linear(16, 12), relu, nn.Linear(12, 4)), (6,)),
        "random-leaky": (
            (nn.Linear(5, 14), gentle, nn.Linear(14, 10), steep, nn.Linear(10, 3)),
            (5,),
        ),
        "random-residual": ((nn.Linear(5, 8), residual(8), residual(8), nn.Linear(8, 4)), (5,)),
        "random-conv": (
            (nn.Conv2d(1, 3, 3, 1, 1), relu, nn.Conv2d(3, 4, 3, 2), relu, flat, nn.Linear(16, 4)),
            (1, 5, 5),
        ),
        "random-pool": (
            (nn.Conv2d(1, 3, 2), relu, nn.MaxPool2d(2), flat, nn.Linear(12, 4)),
            (1, 5, 5),
        ),
        "random-tanh": ((nn.Linear(6, 16), tanh, nn.Linear(16, 12), tanh, nn.Linear(12, 4)), (6,)),
    }[name]
    model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = (2.0 / parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(
                scale * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            )
        x = torch.rand(count, *shape, dtype=torch.float64, generator=generator)
        model[-1].bias -= model(x).mean(0)  # so that no class has it all
        return model, x, model(x).argmax(1)


def attacked(name: str, count: int, norm: float) -> dict[str, Any]:
    """The nearest flips of four engines, by the network as it is and, for those points, by the
    same network in float64.
    """
    model, x, y = any_network(name, count)
    found = [
        ws.nearest(model, x, y, norm, BOX, method=engine, passes=PASSES[engine])
        for engine in ATTACKS[norm]
    ]
    precise = copy.deepcopy(model).double()
    checked = []
    for flips in found:
        points = torch.where(
            torch.isfinite(flips.distances).reshape(-1, *[1] * (x.ndim - 1)), flips.points, x
        )
        again = ws.Flips.from_points(
            precise, x.double(), y, points.double(), norm, BOX, pull_in=False
        )
        checked.append(again.distances)
    single = torch.stack([flips.distances for flips in found]).amin(0)
    return {"float32": single.tolist(), "float64": torch.stack(checked).amin(0).tolist()}


def proved(name: str, count: int, norm: float, method: str, limit: float | None) -> dict[str, Any]:
    """Certified radii by one method. It is not told of the flips: a wrong radius must be able
    to show.
    """
    model, x, y = any_network(name, count)
    began = time.process_time()
    found = ws.radii(model, x, y, norm, BOX, method, time_limit=limit)
    return {
        "values": found.values.tolist(),
        "exact": int((found.exact & (found.values > 0)).sum()),
        "seconds": time.process_time() - began,
    }


# Part sandwich: both sides of the robust accuracy.

SANDWICH = {  # name: (norm it was trained for, eps of it)
    "mnist_kw_01": (INF, 0.1),
    "fashion_kw_01": (INF, 0.1),
    "cifar_base_kw": (INF, 2 / 255),
    "vnn_resnet2b": (INF, 2 / 255),
    "cifar_small_kw_l2_36px": (2.0, 36 / 255),
}
# images at the norm a network was trained for, and at the other, where the bounds are dearer
COUNT = 100
OTHER = 20
SANDWICH_TEXT = """\
First test images, the same for both sides; flips by `ws.nearest(passes=200)`, radii by
`ws.radii(method="crown", upper=flips.distances)`; at the norm and eps of training what is then
still open at order inf is branched, two seconds an image on average. At the norm a network was
trained for, eps is that of its training; at the other norm it is that eps times the median ratio of
the two distances of an image's flips, to two digits. `certified` (rounded down) and `attacked`: the
accuracy over `Omega_order(eps)` is between them. `gap`: their difference in points; `mean gap`: the
area between the two curves over [0, eps], divided by eps; `largest gap`: over all eps. Figures:
`docs/sandwich/`.
"""


def sandwich(units: Units, options: argparse.Namespace) -> None:
    print("\n## The sandwich\n")
    print(f"`python benchmarks/radii.py --part sandwich`\n\n{SANDWICH_TEXT}")
    print(
        "| network | norm | images | eps | order | certified % | attacked % | gap | mean gap | "
        "largest gap | at eps |"
    )
    print("|" + 11 * "---|")
    wanted = {name: eps for name, eps in SANDWICH.items() if options.only in name}
    own = {name: both_sides(units, name, norm, COUNT) for name, (norm, _) in wanted.items()}
    for name, (norm, eps) in wanted.items():
        if not own[name]:
            continue
        rows(name, norm, own[name], eps)
        other = 2.0 if norm == INF else INF
        curves = both_sides(units, name, other, OTHER)
        if curves:
            near = own[name][0].distances[: len(curves[0].mu)]
            far = curves[0].distances[: len(own[name][0].mu)]
            rows(name, other, curves, float(f"{eps * middle((far / near)[near > 0]):.1e}"))


def both_sides(units: Units, name: str, norm: float, count: int) -> list[RiskCurve]:
    """The curves of the orders 1, 2 and inf for the first images, as many as are done; none if
    none are.
    """
    found = [
        units.get(f"{name} {norm:g} {start}", slices, name, norm, start)
        for start in range(0, count, BATCH)
    ]
    distances, radii = (
        torch.tensor([v for u in found if u for v in u[key]], dtype=torch.float64)
        for key in ("distances", "radii")
    )
    mu = torch.full_like(distances, 1 / max(len(distances), 1))
    return [RiskCurve(distances, radii, mu, order) for order in (1.0, 2.0, INF)] if len(mu) else []


def rows(name: str, norm: float, curves: list[RiskCurve], eps: float) -> None:
    """What is printed and drawn for one network and one norm."""
    for curve in curves:
        (certified, attacked), (largest, where) = curve(eps), curve.largest_gap()
        print(
            f"| `{name}` | {norm:g} | {len(curve.mu)} | {show(eps)} | {curve.order:g} | "
            f"{math.floor(1e4 * certified + 1e-9) / 100:.2f} | {100 * attacked:.2f} | "
            f"{100 * (attacked - certified):.2f} | "
            f"{100 * curve.area(eps) / eps:.2f} | {100 * largest:.1f} | {where:.3g} |",
            flush=True,
        )
    folder = ROOT / "docs" / "sandwich"
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{name}, l{norm:g}, first {len(curves[0].mu)} test images"
    draw_sandwich(curves, title, mark=eps).savefig(folder / f"{name}-l{norm:g}.png", dpi=110)


def slices(name: str, norm: float, start: int) -> dict[str, Any]:
    """One unit: distances of flips and certified radii of some images."""
    model, _, x, y = network(name)
    x = x[start : start + BATCH]
    y = y[start : start + BATCH]
    flips = ws.nearest(model, x, y, norm, BOX, passes=200)
    began = time.process_time()
    found = ws.radii(model, x, y, norm, BOX, "crown", upper=flips.distances)
    if (
        norm == SANDWICH[name][0]
    ):  # what is open at the eps of training, for the orders that it is open for
        aim = {"eps": SANDWICH[name][1], "order": INF, "time_limit": 2.0 * len(x)}
        found = ws.radii(
            model, x, y, norm, BOX, "branch", upper=flips.distances, start=found, **aim
        )
    ws.risk_curve(flips, found)  # an error if a radius is above a flip
    return {
        "distances": flips.distances.tolist(),
        "radii": found.values.tolist(),
        "seconds": time.process_time() - began,
    }


if __name__ == "__main__":
    main()
