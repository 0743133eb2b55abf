"""Smooth networks and transformers: linear bounds beside auto_LiRPA's, verified beside attacked
accuracy, branching, local slopes.

    python benchmarks/smooth.py --part peer|verified|branched|slack|lipschitz [--state FOLDER]
    [--only NAME] [--images N] [--show]

Every finished unit of work is one line of FOLDER/<part>.jsonl and is not done again: stop and start
as you like. `--show` prints what is there and computes nothing. Without --part all sections are
printed so: together they are docs/transformers.md. auto_LiRPA is found through $WASSAIL_LIRPA, the
folder that holds the package `auto_LiRPA`; without it its columns stay empty.
"""

import argparse
import math
import os
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wassail as ws
from radii import Units, rivals
from wassail.certificates.graph.graph import Curved, Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.lipschitz.steepest import margin_rows
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margin_bounds, margins
from wassail.certificates.relax.rows import add_to, row_dot
from wassail.certificates.search.margins import branch_margins
from wassail.paper.transformer_constants import euclidean_bound
from wassail.threat import show
from zoo_path import ZOO, images, load

INF = math.inf
BOX = (0.0, 1.0)
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
NETWORKS = {  # eps at which accuracy is verified, linf
    "digits-gelu": 0.05,
    "digits-gelu-adv": 0.05,
    "digits-vit": 0.01,
    "digits-vit-adv": 0.01,
    "cifar_conv_small_sigmoid": 2 / 255,
    "cifar_vit_pgd_2_3_16": 1 / 255,
    "cifar_vit_ibp_3_3_8": 1 / 255,
}
GROWTH = (1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5)
DOMAINS = 2000
BRANCHED = {
    "digits-vit": (1.0, 2.0, INF),
    "digits-vit-adv": (1.0, 2.0, INF),
    "cifar_vit_pgd_2_3_16": (1.0, 2.0, INF),
    "cifar_vit_ibp_3_3_8": (INF,),
    "mnist_trades": (2.0, INF),
    "mnist_convnet_maxpool": (2.0, INF),
    "mnist_smallcnn_ddn": (2.0, INF),
}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parts = {
        "peer": peer,
        "verified": verified,
        "branched": branched,
        "slack": slack,
        "lipschitz": lipschitz,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=parts)
    parser.add_argument(
        "--state", type=Path, default=Path(".smooth"), help="folder of what is done"
    )
    parser.add_argument("--images", type=int, default=None, help="first so many images")
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--show", action="store_true", help="print what is done, compute nothing")
    options = parser.parse_args()
    if options.part is None:
        print(INTRODUCTION)
        options.show = True
    for part in [options.part] if options.part else parts:
        parts[part](Units(options.state, part, options.show), options)


INTRODUCTION = f"""\
# Smooth networks and transformers: measured

`digits-gelu` and `digits-vit` are the built-in networks (`-adv`: adversarially trained), the other
three are public ones: a sigmoid CNN, and two vision transformers with BatchNorm and no LayerNorm.
First images of the test sets, one thread, processor time, torch {torch.__version__}; made by
`python benchmarks/smooth.py`, unit by unit, so that a count below what was asked for is the number
of images that were done.
"""


@cache
def network(name: str, tanh: bool = False) -> tuple[nn.Module, Graph, Tensor, Tensor]:
    """A network, its structure, and its test images with their labels. tanh: GELUs in their
    tanh form.
    """
    if name.startswith("digits"):
        model, (x, y) = ws.zoo.load(name), ws.zoo.data("digits")
    elif name.startswith("cifar_vit"):
        model, (x, y) = (
            ws.zoo.load_onnx(ZOO / "models" / f"{name}.onnx", mean=MEAN, std=STD),
            images("cifar10", 100),
        )
    elif name == "mnist_convnet_maxpool":
        model = ws.zoo.load_onnx(ZOO / "models" / f"{name}.onnx")
        x, y = images("mnist", 100)
    else:
        model, data = load(name)
        x, y = images(data, 100)
    for module in model.modules():
        if tanh and isinstance(module, nn.GELU):
            module.approximate = "tanh"
    model.eval().requires_grad_(False)
    return model, read(model, tuple(x.shape[1:]), smooth=True), x, y


# Part peer: CROWN through attention and LayerNorm beside auto_LiRPA's.

PEER_TEXT = """\
Lower bounds on the nine margins `theta_y - theta_j` over the linf ball cut by the box, ours
(`linear.margin_bounds`) and auto_LiRPA's CROWN in turn in one process, image by image, each with
its structure read before the clock starts. The GELUs are in their tanh form: auto_LiRPA answers to
the erf form "{refusal}", and names `onnx::Erf`. auto_LiRPA computes in float32 without care for
rounding; ours are sound. `looser`: our bounds below auto_LiRPA's by more than 1e-4; `worst`: the
largest such difference; `median`: of ours minus auto_LiRPA's, all in logits. `time`: processor
seconds for an image, `ratio`: auto_LiRPA's over ours.
"""


def peer(units: Units, options: argparse.Namespace) -> None:
    wanted = 10 if options.images is None else options.images
    refusal = units.get("refusal", refused) or "not run"
    print("\n## CROWN through attention beside auto_LiRPA's\n")
    print(
        "`python benchmarks/smooth.py --part peer --images "
        f"{wanted}`\n\n{PEER_TEXT.format(refusal=refusal)}"
    )
    print(
        "| network | eps | images | verified, ours | auto_LiRPA | margins | looser | worst | "
        "median | "
        "time, ours | auto_LiRPA | ratio |"
    )
    print("|" + 12 * "---|")
    for name in ("digits-vit", "digits-vit-adv"):
        for eps in (0.002, 0.004, 0.008):
            if options.only in name:
                found = [units.get(f"{name} {eps} {i}", both, name, eps, i) for i in range(wanted)]
                peer_row(name, eps, [u for u in found if u])


def both(name: str, eps: float, i: int) -> dict[str, Any]:
    """One unit: the margins of one image, ours and auto_LiRPA's, and the time of each."""
    _, graph, x, y = network(name, tanh=True)
    x = x[i : i + 1]
    y = y[i : i + 1]
    began = time.process_time()
    ours = margin_bounds(graph, x, y, eps, INF, BOX)
    unit = {"ours": rivals(ours, y)[0], "ours seconds": time.process_time() - began, "theirs": []}
    if "WASSAIL_LIRPA" in os.environ:
        theirs, seconds = lirpa(name, x, y, eps)
        unit |= {"theirs": theirs.tolist(), "theirs seconds": seconds}
    return unit


@cache
def bounded(name: str, tanh: bool) -> Any:
    """auto_LiRPA's model."""
    sys.path.insert(0, os.environ["WASSAIL_LIRPA"])
    from auto_LiRPA import BoundedModule

    model, _, x, _ = network(name, tanh)
    return BoundedModule(model, torch.zeros_like(x[:1]), bound_opts={"conv_mode": "patches"})


def lirpa(name: str, x: Tensor, y: Tensor, eps: float, tanh: bool = True) -> tuple[Tensor, float]:
    """auto_LiRPA's CROWN bounds on the margins of one image, `(K - 1,)`, and their processor
    time.
    """
    model = bounded(name, tanh)
    from auto_LiRPA import BoundedTensor, PerturbationLpNorm

    classes = network(name, tanh)[1].outputs
    eye = torch.eye(classes)
    rows = torch.stack([eye[int(y)] - eye[j] for j in range(classes) if j != int(y)])[None]
    ball = PerturbationLpNorm(norm=INF, x_L=(x - eps).clamp(*BOX), x_U=(x + eps).clamp(*BOX))
    began = time.process_time()
    lower, _ = model.compute_bounds(
        x=(BoundedTensor(x, ball),), C=rows, method="CROWN", bound_upper=False
    )
    return lower[0].detach().double(), time.process_time() - began


def refused() -> str:
    """What auto_LiRPA says to the erf form of GELU."""
    if "WASSAIL_LIRPA" not in os.environ:
        return "not run"
    _, _, x, y = network("digits-vit")
    try:
        lirpa("digits-vit", x[:1], y[:1], 0.002, tanh=False)
    except Exception as error:  # whatever it raises is what we ask for
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    return "none: it is bounded"


def peer_row(name: str, eps: float, found: list[dict[str, Any]]) -> None:
    if not found:
        return
    count = len(found)
    proved = sum(min(u["ours"]) > 0 for u in found)
    mine = sum(u["ours seconds"] for u in found) / count
    if not all(u["theirs"] for u in found):
        print(f"| `{name}` | {eps} | {count} | {proved} | | | | | | {mine:.2f} | | |", flush=True)
        return
    ours, theirs = (
        torch.tensor([u[side] for u in found], dtype=torch.float64) for side in ("ours", "theirs")
    )
    said = int((theirs.amin(1) > 0).sum())
    other = sum(u["theirs seconds"] for u in found) / count
    ahead = ours - theirs
    print(
        f"| `{name}` | {eps} | {count} | {proved} | {said} | {ours.numel()} | "
        f"{int((ahead < -1e-4).sum())} | "
        f"{max(float(-ahead.min()), 0.0):.1e} | {float(ahead.median()):+.2g} | {mine:.2f} | "
        f"{other:.2f} | {other / mine:.1f} |",
        flush=True,
    )


# Part verified: proved beside attacked accuracy.

VERIFIED_TEXT = """\
linf, cut by the box. `attacked`: images that `ws.nearest(passes=100)` does not flip within eps;
`crown` and `branch`: images that `ws.verify` proves there by linear bounds, and with two seconds of
branching for each that these leave open. What lies between is not
known. `above`: images proved and flipped, which would be an error. Time in processor seconds an
image.
"""


def verified(units: Units, options: argparse.Namespace) -> None:
    wanted = 20 if options.images is None else options.images
    print("\n## Verified and attacked accuracy\n")
    print(f"`python benchmarks/smooth.py --part verified --images {wanted}`\n\n{VERIFIED_TEXT}")
    print(
        "| network | eps | images | clean | attacked | crown | branch | above | s an image: "
        "crown | branch |"
    )
    print("|" + 10 * "---|")
    for name, eps in NETWORKS.items():
        if options.only not in name:
            continue
        rows = [
            units.get(f"{name} {start}", proofs, name, eps, start, 10)
            for start in range(0, wanted, 10)
        ]
        rows = [row for row in rows if row]
        if rows:
            n = sum(row["images"] for row in rows)
            counts = (
                str(sum(row[key] for row in rows))
                for key in ("clean", "attacked", "crown", "branch", "above")
            )
            seconds = (
                f"{sum(row[f'{key} seconds'] for row in rows) / n:.2f}"
                for key in ("crown", "branch")
            )
            print(
                f"| `{name}` | {show(eps)} | {n} | {' | '.join(counts)} | {' | '.join(seconds)} |",
                flush=True,
            )


def proofs(name: str, eps: float, start: int, count: int) -> dict[str, Any]:
    """One unit: how many of some images each side has."""
    model, _, x, y = network(name)
    x = x[start : start + count]
    y = y[start : start + count]
    distances = ws.nearest(model, x, y, INF, BOX, passes=100).distances
    unit: dict[str, Any] = {
        "images": len(x),
        "clean": int((distances > 0).sum()),
        "attacked": int((distances > eps).sum()),
    }
    threat = ws.Threat(INF, INF, eps, BOX)
    above = torch.zeros(len(x), dtype=torch.bool)
    for method in ("crown", "branch"):
        began = time.process_time()
        proved = ws.verify(model, x, y, threat, method, effort=2).proved
        unit |= {method: int(proved.sum()), f"{method} seconds": time.process_time() - began}
        above |= proved & (distances <= eps)
    return unit | {"above": int(above.sum())}


# Part branched: radii by branching.

BRANCHED_TEXT = f"""\
The largest of the balls with {", ".join(f"{f:g}" for f in GROWTH)} times CROWN's radius that
branching on ReLUs and smooth neurons proves with {DOMAINS} domains, from the smallest on until one
fails. Factors image by image, the first images that are classified correctly; domains and processor
seconds for all balls of an image, the mean, without the linear bounds before them. `above`: radii
above the distance that `ws.nearest(passes=100)` finds, which would be an error.
"""


def branched(units: Units, options: argparse.Namespace) -> None:
    wanted = 3 if options.images is None else options.images
    print("\n## Branching\n")
    print(f"`python benchmarks/smooth.py --part branched --images {wanted}`\n\n{BRANCHED_TEXT}")
    print("| network | norm | crown / distance | branch / crown | domains | s | above |")
    print("|" + 7 * "---|")
    for name, norms in BRANCHED.items():
        for norm in norms if options.only in name else ():
            keys = [f"{name} {norm:g} {i}" for i in range(wanted)]
            rows = [units.get(key, growths, name, norm, i) for i, key in enumerate(keys)]
            rows = [row for row in rows if row]
            if rows:
                print(branched_row(name, norm, rows), flush=True)


def branched_row(name: str, norm: float, rows: list[dict[str, Any]]) -> str:
    """One line of the table."""
    shares = ", ".join(f"{row['crown'] / row['distance']:.2f}" for row in rows)
    cells = [f"`{name}`", f"l{norm:g}", shares]
    known = [row["branch"] for row in rows]
    cells.append(", ".join(f"{row['factor']:g}" for row in known))
    cells.append(f"{sum(row['domains'] for row in known) / len(known):.0f}")
    cells.append(f"{sum(row['seconds'] for row in known) / len(known):.1f}")
    cells.append(str(sum(row["above"] for row in rows)))
    return f"| {' | '.join(cells)} |"


def growths(name: str, norm: float, i: int) -> dict[str, Any]:
    """One unit: how far branching grows CROWN's radius of the i-th image."""
    model, graph, x, y = network(name)
    right = (model(x[:50]).argmax(1) == y[:50]).nonzero()[:, 0]
    x = x[right[i : i + 1]]
    y = y[right[i : i + 1]]
    distance = float(ws.nearest(model, x, y, norm, BOX, passes=100).distances[0])
    crown = ws.radii(model, x, y, norm, BOX, "crown", arithmetic="exact").values
    found = growth(graph, x, y, crown, norm)
    unit = {"crown": float(crown[0]), "distance": distance, "branch": found}
    return unit | {"above": int(found["factor"] * unit["crown"] > distance)}


def growth(graph: Graph, x: Tensor, y: Tensor, crown: Tensor, norm: float) -> dict[str, float]:
    """The largest factor that is proved, what it took."""
    found = {"factor": 1.0, "domains": 0, "seconds": 0.0}
    for factor in GROWTH:
        sweep = Sweep(graph, Balls.make(x, factor * crown, norm, BOX)).run()
        lower = margins(sweep, y)[0][0]
        rivals = [j for j in range(len(lower)) if j != int(y[0]) and not lower[j] > 0]
        began = time.process_time()
        good, count = branch_margins(sweep, 0, int(y[0]), torch.tensor(rivals), DOMAINS)
        found["seconds"] += time.process_time() - began
        found["domains"] += count
        if rivals and not good:
            break
        found["factor"] = factor
    return found


# Part slack: which nodes the linear bound loses its margin at.

SLACK_TEXT = """\
At 1.1 times CROWN's radius, linf, at the input where the linear bound on the lowest margin is
least: what the margin has there, what the bound says, and the share of the difference that the
lines or planes of each kind of node add. The shares of an image add up to 1; the mean over images.
"""
SLACK = ("digits-vit", "digits-vit-adv", "cifar_vit_pgd_2_3_16", "cifar_vit_ibp_3_3_8")
KINDS = ("normalise", "product", "softmax", "activation")


def slack(units: Units, options: argparse.Namespace) -> None:
    wanted = 3 if options.images is None else options.images
    print("\n## What the linear bound loses\n")
    print(f"`python benchmarks/smooth.py --part slack --images {wanted}`\n\n{SLACK_TEXT}")
    print("| network | images | margin | bound | LayerNorm | product | softmax | activation |")
    print("|" + 8 * "---|")
    for name in SLACK:
        if options.only not in name:
            continue
        rows = [units.get(f"{name} {i}", lost, name, i) for i in range(wanted)]
        rows = [row for row in rows if row]
        if rows:
            margin = ", ".join(f"{row['true']:.2f}" for row in rows)
            bound = ", ".join(f"{row['bound']:.2f}" for row in rows)
            shares = (f"{sum(row[kind] for row in rows) / len(rows):.2f}" for kind in KINDS)
            print(f"| `{name}` | {len(rows)} | {margin} | {bound} | {' | '.join(shares)} |")


def lost(name: str, i: int) -> dict[str, Any]:
    """One unit: the shares for the i-th image that is classified correctly."""
    model, graph, x, y = network(name)
    right = (model(x[:50]).argmax(1) == y[:50]).nonzero()[:, 0]
    x = x[right[i : i + 1]].double()
    label = int(y[right[i]])
    radius = 1.1 * ws.radii(model, x.float(), y[right[i : i + 1]], INF, BOX, "crown").values
    sweep = Sweep(graph, Balls.make(x, radius, INF, BOX)).run()
    lower = margins(sweep, torch.tensor([label]))[0][0]
    lower[label] = INF
    rival = int(lower.argmin())
    row = torch.zeros(1, graph.outputs, dtype=torch.float64)
    row[0, rival] = 1
    row[0, label] = -1
    owner = torch.zeros(1, dtype=torch.int64)
    last = len(graph.nodes) - 1
    _, a, _ = sweep.bound(last, row, owner)
    step = torch.zeros_like(a[0])
    step[sweep.order] = radius * a[0].sign()
    values = graph.values((x + step.reshape(x.shape)).clamp(*BOX))
    shares = dict.fromkeys(KINDS, 0.0)
    weight = {last: row}
    for k in range(last, 0, -1):
        if k not in weight:
            continue
        node = graph.nodes[k]
        w = weight.pop(k)
        if node.map is not None:
            for j, part in zip(node.inputs, sweep.exact.maps[k].transpose(w)):
                add_to(weight, j, part)
            continue
        parts: dict[int, Tensor] = {}
        if k in sweep.exact.planes:
            off, far = sweep.exact.planes[k].pull(parts, node.inputs, w, owner)
        else:
            line = sweep.exact.lines[k].take(owner)
            off = row_dot(w, line.off)
            far = row_dot(w.abs(), line.far)
            parts[node.inputs[0]] = w * line.mid + w.abs() * line.rad
        above = off + far - (w * (values[k] - sweep.centre[k])).sum()
        for j, part in parts.items():
            above = above + (part * (values[j] - sweep.centre[j])).sum()
            add_to(weight, j, part)
        kind = node.op.name if isinstance(node.op, Curved) else "activation"
        shares[kind] += float(above)
    total = sum(shares.values())
    true = float(values[-1][0, label] - values[-1][0, rival])
    return {"true": true, "bound": true - total} | {k: v / total for k, v in shares.items()}


# Part lipschitz: local slopes of the margins.

LIPSCHITZ_TEXT = """\
`max_{j, k} sup ||J(x)^T (e_j - e_k)||_s` over a ball around each of the first images, cut by the
box, from both sides: `ws.lipschitz` with a time limit of {limit:g} seconds. `lower`: the steepest
real point that an ascent finds; `upper / lower`: the median and the largest over the images;
`product / lower`: the same for the product of the modules' constants (of transformers with the
tighter attention bound on the region), the median. `crossed`: brackets whose sides cross, which
would be an error.
"""
BALLS = ((2.0, 1e-3), (2.0, 1e-2), (INF, 1 / 255))
LIMIT = 15.0


def lipschitz(units: Units, options: argparse.Namespace) -> None:
    wanted = 5 if options.images is None else options.images
    text = LIPSCHITZ_TEXT.replace("{limit:g}", f"{LIMIT:g}")
    print(
        "\n## Local slopes of the margins\n\n`python benchmarks/smooth.py --part lipschitz "
        f"--images {wanted}`\n\n{text}"
    )
    print(
        "| network | ball | images | lower, median | upper / lower | largest | product / lower | "
        "by | crossed | s an image |"
    )
    print("|" + 10 * "---|")
    for name in NETWORKS:
        for norm, radius in BALLS:
            if options.only not in name:
                continue
            key = f"{name} {norm:g} {radius:.4g}"
            rows = [units.get(f"{key} {i}", local, name, norm, radius, i) for i in range(wanted)]
            rows = [row for row in rows if row]
            if rows:
                lower, ratio, crude = (
                    torch.tensor([f(row) for row in rows]).double()
                    for f in (
                        lambda row: row["lower"],
                        lambda row: row["upper"] / row["lower"],
                        lambda row: row["product"] / row["lower"],
                    )
                )
                methods = ", ".join(sorted({row["method"] for row in rows}))
                spent = sum(row["seconds"] for row in rows) / len(rows)
                print(
                    f"| `{name}` | l{norm:g} {show(radius)} | {len(rows)} | "
                    f"{float(lower.median()):.3g} | "
                    f"{float(ratio.median()):.2f} | {float(ratio.max()):.2f} | "
                    f"{float(crude.median()):.3g} | {methods} | "
                    f"{int((ratio < 1).sum())} | {spent:.1f} |",
                    flush=True,
                )


def local(name: str, norm: float, radius: float, i: int) -> dict[str, Any]:
    """One unit: the bracket on one ball."""
    _, graph, x, _ = network(name)
    ball = ws.Ball(x[i].double(), radius, norm, BOX)
    began = time.process_time()
    found = ws.lipschitz(graph, norm, ball, time_limit=LIMIT)
    seconds = time.process_time() - began
    crude = ws.lipschitz(graph, norm, ball, method="product").upper
    if graph.curved:
        margins = graph.head(margin_rows(graph.outputs, None))
        crude = min(crude, euclidean_bound(margins, Region.make(ball, graph.inputs), norm, INF))
    unit = {
        "lower": found.lower,
        "upper": found.upper,
        "method": found.method,
        "product": crude,
    }
    return unit | {"seconds": seconds}


if __name__ == "__main__":
    main()
