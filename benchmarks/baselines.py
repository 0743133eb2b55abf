"""Our point-wise baselines beside the originals: robust accuracy, passes and time, each pair in one
process.

    python benchmarks/baselines.py > docs/baselines.md       # resumable: what --out holds already
    is not run again python benchmarks/baselines.py --cases 'cifar.* l2 apgd' --first 1000 --images
    100

The originals are read from their authors' source, wherever it has been unpacked; without it only
our side is run:

    WASSAIL_AUTOATTACK   folder that holds the package `autoattack`            (fra31/auto-attack)
    WASSAIL_A3           folder that holds `Adaptive_Auto_Attack_main.py`
    (liuye6666/adaptive_auto_attack) WASSAIL_WPGD         folder that holds `attacker.py`
    (JanObloj/W-DRO-Adversarial-Methods, src/)

Both sides see the same model, frozen, in batches of 250 and on one thread. All that passes through
it is counted by `Counted`, checks and verification included; our own counters must agree with that,
and a disagreement is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

import wassail as ws
from wassail.attacks.fab import fab_engine
from wassail.attacks.pointwise import pointwise
from wassail.threat import show
from zoo_path import ROOT, images, load

INF = math.inf
BATCH = 250
FIVE = {  # eps for linf, l2, l1; the l1 radii were chosen on images 1000 and up
    "mnist_madry_tiny": (0.3, 1.5, 4.0),
    "cifar_cnn_a_adv": (2 / 255, 0.25, 3.0),
    "cifar_base_kw": (2 / 255, 0.25, None),
    "vnn_resnet2b": (2 / 255, 0.25, None),
    "vnn_resnet4b": (1 / 255, 0.25, None),
}
EPS = {**FIVE, "mnist_trades": (0.3, 1.5, None)}
MOST = {"mnist_trades": 100}  # images; the others take as many as asked
ATTACKS = (
    "apgd-ce",
    "apgd-dlr",
    "apgd-t",
    "fab-t",
    "square",
)  # run alone, on the images that the model has right
BESIDE = (
    "mnist_trades",
    "mnist_madry_tiny",
    "cifar_cnn_a_adv",
)  # where the originals of A3 and W-PGD are run
LONG = 30.0  # seconds after which a pair is not timed again


def cases() -> Iterable[tuple[str, float, str]]:
    """(network, norm, method), the quick methods first."""
    for method in (*ATTACKS, "autoattack"):
        for name in FIVE:
            yield from (
                (name, norm, method)
                for norm, eps in zip((INF, 2.0, 1.0), FIVE[name])
                if eps is not None
            )
    for method, networks in (("w-pgd", BESIDE), ("a3-pgd", EPS), ("a3-wda", FIVE)):
        yield from ((name, norm, method) for name in networks for norm in (INF, 2.0))


class Counted(torch.nn.Module):
    """Counts the rows that go forward and backward through a model; live: rows whose gradient
    at the logits is not zero.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.reset()

    def reset(self) -> None:
        self.forwards = self.backwards = self.live = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.model(x)
        self.forwards += len(x)
        if z.requires_grad:
            z.register_hook(self.back)
        return z

    def back(self, gradient: torch.Tensor) -> None:
        self.backwards += len(gradient)
        self.live += int((gradient != 0).any(1).sum())


# ---- the originals: function of (model, x, y) that returns its points, or the accuracy where it
# returns no points


def peer(name: str, method: str) -> str | None:
    """The environment variable with the folder of the original that belongs beside this case,
    None if there is none.
    """
    if method == "a3-wda" or (method == "a3-pgd" and name not in BESIDE):
        return None
    return {"a3-pgd": "WASSAIL_A3", "w-pgd": "WASSAIL_WPGD"}.get(method, "WASSAIL_AUTOATTACK")


def original(method: str, threat: ws.Threat, dataset: str, folder: str) -> Callable:
    if method.startswith("a3"):
        return a3(threat, dataset, Path(folder))
    sys.path.insert(0, folder)
    return w_pgd(threat) if method == "w-pgd" else auto_attack(method, threat)


def auto_attack(method: str, threat: ws.Threat) -> Callable:
    from autoattack import AutoAttack

    def run(model, x, y):
        name = {INF: "Linf", 2.0: "L2", 1.0: "L1"}[threat.norm]
        suite = AutoAttack(model, norm=name, eps=threat.eps, seed=0, verbose=False, device="cpu")
        if method == "autoattack":
            return suite.run_standard_evaluation(x, y, bs=BATCH)
        suite.apgd.n_restarts, suite.apgd_targeted.n_target_classes = (
            1,
            9,
        )  # "standard" has 5 and 5 for l1
        suite.apgd.loss, suite.fab.targeted = method.removeprefix("apgd-"), True
        attack = {"apgd-t": suite.apgd_targeted, "fab-t": suite.fab, "square": suite.square}.get(
            method, suite.apgd
        )
        with torch.no_grad():
            return torch.cat(
                [
                    attack.perturb(x[i : i + BATCH], y[i : i + BATCH])
                    for i in range(0, len(x), BATCH)
                ]
            )

    return run


def w_pgd(threat: ws.Threat) -> Callable:
    sys.modules["data"] = types.ModuleType("data")  # theirs downloads data sets
    sys.modules["data"].BATCH_SIZE = BATCH
    from attacker import wpgd
    from loss_fns import ReDLR

    s = {INF: 1, 2.0: 2}[threat.norm]  # the dual exponents of norm and order
    return lambda model, x, y: wpgd(2, s, threat.eps, ReDLR(), x, y).attack(model)["X_adv"]


class Frame(dict):
    """As much of a pandas table as A3 uses: columns, and `loc` with a mask."""

    @property
    def loc(self) -> Frame:
        return self

    def __getitem__(self, key):
        return (
            super().__getitem__(key)
            if isinstance(key, str)
            else Frame({k: np.asarray(v)[key] for k, v in self.items()})
        )


def a3(threat: ws.Threat, dataset: str, folder: Path) -> Callable:
    """A3 reads images from files, runs on a GPU and prints its result: here it reads tensors
    and runs on the CPU.
    """
    code = (folder / "Adaptive_Auto_Attack_main.py").read_text().replace("cuda", "cpu")
    code = re.sub(r"(?m)^(import|from) (torchvision|pandas|glob|PIL|tqdm)\b.*$", "", code)
    code = re.sub(r"np\.(bool|int)\b", r"\1", code)  # names that NumPy has dropped
    code = code.replace(
        "range(bs)])", "range(bs)], dtype=torch.long)"
    )  # a batch may have become empty
    module = types.ModuleType("adaptive_auto_attack")
    exec(compile(code, "Adaptive_Auto_Attack_main.py", "exec"), module.__dict__)

    def run(model, x, y):
        frames = []

        def frame(columns):
            frames.append(Frame(columns))
            return frames[-1]

        def loader(batch_size, dataframe, datasets, model_name):
            place = [int(Path(path).stem) for path in dataframe["img_path"]]
            for i in range(0, len(place), batch_size):
                rows = torch.tensor(place[i : i + batch_size])
                yield {"img": x[rows], "lab": y[rows]}

        module.glob = types.SimpleNamespace(
            glob=lambda _: [f"images/{label}/{i}.png" for i, label in enumerate(y.tolist())]
        )
        module.pd = types.SimpleNamespace(DataFrame=frame)
        module.mytest_loader = loader
        module.trange = range
        torch.manual_seed(0)
        random.seed(0)
        module.Adaptive_Auto_white_box_attack(
            model,
            torch.device("cpu"),
            threat.eps,
            True,
            BATCH,
            1000,
            "network",
            data_set={"mnist": "mnist"}.get(dataset, "cifar10"),
            Lnorm="Linf" if threat.norm == INF else "L2",
        )
        return float(
            np.mean(frames[0]["not_suc"])
        )  # its own array of who still stands, changed in place

    return run


# ---- ours


def ours(method: str, threat: ws.Threat) -> Callable:
    name, options = {
        "apgd-ce": ("apgd", {"loss": "ce"}),
        "apgd-dlr": ("apgd", {"loss": "dlr"}),
        "apgd-t": ("apgd", {"loss": "targeted"}),
        "fab-t": ("fab-t", {"targets": 9, "shorten": 0}),
        "w-pgd": ("w_pgd", {"loss": "redlr"}),
        "a3-pgd": ("a3", {"step": "pgd"}),
        "a3-wda": ("a3", {"step": "wda"}),
    }.get(method, (method, {}))
    if name == "fab-t":  # as AutoAttack uses it: a sample is done once it has a flip within eps
        return lambda model, x, y: pointwise(
            fab_engine, name, model, x, y, threat, graph=True, options=options
        )
    return lambda model, x, y: getattr(ws, name)(model, x, y, threat, batch_size=BATCH, **options)


# ---- one case


def measure(model: Counted, run: Callable, x: torch.Tensor, y: torch.Tensor) -> dict:
    """One run: what it returned, rows through the model, wall and processor seconds."""
    model.reset()
    wall = time.perf_counter()
    used = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):  # the originals print
        result = run(model, x, y)
    wall = time.perf_counter() - wall
    used = time.process_time() - used
    return {
        "result": result,
        "F": model.forwards,
        "B": model.backwards,
        "live": model.live,
        "wall": wall,
        "cpu": used,
    }


def disagreement(side: dict) -> str | None:
    """How our own counters differ from the rows counted in the model, if they do.

    Forwards: the counted ones, the verification, and two looks at up to 8 samples for each search
    the method makes. Backwards: rows of a batch that need no gradient ride along in the model and
    are not counted, so it lies between.
    """
    adversary = side["result"]
    forwards = int((adversary.forwards + adversary.checks).sum())
    backwards = int(adversary.backwards.sum())
    looks, rest = divmod(side["F"] - forwards, 2 * min(8, len(adversary.y)))
    if rest or not 1 <= looks <= 8:
        return f"{side['F']} rows went forward but {forwards} are accounted for"
    if not side["live"] <= backwards <= side["B"]:
        return (
            f"{side['B']} rows went backward, {side['live']} of them with a gradient, but "
            f"{backwards} are accounted for"
        )
    return None


def accuracy(
    model: Counted, result: object, x: torch.Tensor, y: torch.Tensor, threat: ws.Threat
) -> float:
    """The share of samples still right: somebody's points count if they are wrong and lie in
    the ball up to rounding.
    """
    if isinstance(result, ws.Distribution):
        return result.accuracy
    if isinstance(result, float):
        return result
    with torch.no_grad():
        wrong = torch.cat([model(part).argmax(1) for part in result.split(BATCH)]) != y
    far = ws.geometry.distances(result, x, threat.norm)
    if threat.order == INF:
        wrong &= far <= threat.eps * (1 + 1e-4)
    else:  # a point may lie anywhere, but the samples share one budget
        assert far.pow(threat.order).mean() ** (1 / threat.order) <= threat.eps * (1 + 1e-4), (
            "the budget is overspent"
        )
    return 1 - float(wrong.double().mean())


def case(job: tuple[str, float, str, int, int]) -> dict:
    name, norm, method, first, count = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    network, dataset = load(name)
    x, y = (part[first:] for part in images(dataset, first + min(count, MOST.get(name, count))))
    eps = EPS[name][{INF: 0, 2.0: 1, 1.0: 2}[norm]]
    threat = ws.Threat(norm, 2 if method == "w-pgd" else INF, eps)
    model = Counted(network).requires_grad_(
        False
    )  # else the originals' `backward` differentiates the weights as well
    with torch.no_grad():
        right = model(x).argmax(1) == y
    xs, ys = (x[right], y[right]) if method in ATTACKS else (x, y)
    scale = len(xs) / len(x)
    attacked = len(x) if method == "w-pgd" else int(right.sum())  # W-PGD moves them all
    runs = {"ours": ours(method, threat)}
    folder = os.environ.get(peer(name, method) or "")
    if folder:
        runs["original"] = original(method, threat, dataset, folder)
    model(xs.clone().requires_grad_(True)).sum().backward()  # nobody pays for the first call
    found: dict[str, list[dict]] = {side: [] for side in runs}
    start = time.perf_counter()
    order = list(runs)
    while not found["ours"] or (len(found["ours"]) < 3 and time.perf_counter() - start < LONG):
        order.reverse()  # original first, then ours first, ...: drifts of the machine meet both
        for side in order:
            found[side].append(measure(model, runs[side], xs, ys))
    answer = {
        "network": name,
        "norm": norm,
        "method": method,
        "eps": eps,
        "first": first,
        "images": len(x),
    }
    answer["clean"] = float(right.double().mean())
    answer["disagreement"] = disagreement(found["ours"][-1])
    own = found["ours"][-1]["result"]
    answer["counted"] = [int(own.forwards.sum()) / attacked, int(own.backwards.sum()) / attacked]
    for side, results in found.items():
        last = results[-1]
        answer[side] = {
            "accuracy": scale * accuracy(model, last["result"], xs, ys, threat),
            "F": last["F"] / attacked, "B": last["B"] / attacked,
            "wall": min(r["wall"] for r in results), "cpu": min(r["cpu"] for r in results),
        }  # fmt: skip
    return answer


def attempt(job: tuple[str, float, str, int, int]) -> dict | str:
    """The case, or why it failed: the others are still worth running."""
    try:
        return case(job)
    except Exception:
        return f"{job} failed:\n{traceback.format_exc()}"


def identity(result: dict) -> tuple:
    return tuple(result[key] for key in ("network", "norm", "method", "first", "eps"))


# ---- tables


def pair(result: dict, cell: Callable[[dict], str]) -> str:
    return f"{cell(result['original']) if 'original' in result else '–'} / {cell(result['ours'])}"


def row(result: dict, *, named: bool = False) -> str:
    network = f"`{result['network']}`, " if named else ""
    ratio = (
        f"{result['ours']['cpu'] / result['original']['cpu']:.2f}" if "original" in result else "–"
    )
    cells = (
        f"{network}l{result['norm']:g} {show(result['eps'])}",
        result["method"],
        str(result["images"]),
        pair(result, lambda side: f"{100 * side['accuracy']:.1f}"),
        pair(result, lambda side: f"{side['F']:.0f} + {side['B']:.0f}"),
        "{:.0f} + {:.0f}".format(*result["counted"]),
        pair(result, lambda side: f"{side['wall']:.1f}"),
        ratio,
    )
    return f"| {' | '.join(cells)} |"


def tables(results: list[dict]) -> Iterable[str]:
    head = (
        "| threat | method | images | robust accuracy % | rows F + B | our count | seconds | "
        "time ratio |\n|" + 8 * "---|"
    )
    yield "# Baselines beside their originals\n"
    yield (
        "Command: `python benchmarks/baselines.py`. Every pair reads original / ours. Robust "
        "accuracy in %. Rows F + B: all"
    )
    yield (
        "that goes through the model, forward and backward, per attacked image, checks and "
        "verification too. Our count: the"
    )
    yield (
        "passes our result reports; rows that only ride along in a batch with a zero gradient, "
        "and checks, are not in it."
    )
    yield (
        "Time ratio: processor time ours / original, one thread, run in turn in one process. "
        "Budgets: APGD 100 steps, APGD-T"
    )
    yield (
        "and FAB-T 9 targets of 100 steps, Square 5000 queries, AutoAttack its standard "
        "version. Attacks run alone on the"
    )
    yield (
        "images that the model has right; AutoAttack runs its own in sequence. A case with "
        "fewer images than the others was"
    )
    yield "run with `--images`.\n"
    for result in results:
        if result["disagreement"]:
            yield (
                f"**PASS COUNTERS DISAGREE**: {' '.join(map(str, identity(result)))}: "
                f"{result['disagreement']}.\n"
            )
    missing = {str(peer(r["network"], r["method"])) for r in results if "original" not in r} - {
        "None"
    }
    if missing:
        yield (
            "Originals that were not run, because their folder was not given: "
            f"{', '.join(sorted(missing))}.\n"
        )
    for name in FIVE:
        mine = [
            r for r in results if r["network"] == name and r["method"] in (*ATTACKS, "autoattack")
        ]
        if mine:
            mine.sort(key=lambda r: -r["norm"])
            clean = max(mine, key=lambda r: r["images"])
            yield (
                f"## `{name}`: clean {100 * clean['clean']:.1f} % of the first "
                f"{clean['images']}\n\n{head}"
            )
            yield "\n".join(map(row, mine)) + "\n"
    beside = [r for r in results if r["network"] in BESIDE and r["method"] in ("a3-pgd", "w-pgd")]
    if beside:
        yield f"## A3 and W-PGD (ReDLR, Omega_2; passes per image)\n\n{head}"
        yield "\n".join(row(r, named=True) for r in beside) + "\n"
    suites = ("autoattack", "a3-pgd", "a3-wda")
    found = {(r["network"], r["norm"], r["method"]): r for r in results}
    whole = [
        k
        for k in {(n, norm): 0 for n in FIVE for norm in (INF, 2.0)}
        if all((*k, m) in found for m in suites)
    ]
    if whole:
        yield "## Ours: AutoAttack, A3 with PGD and A3 with WDA: robust accuracy in %, F + B\n"
        yield f"| threat | images | {' | '.join(suites)} |\n|" + 5 * "---|"
        for name, norm in whole:
            mine = [found[name, norm, method] for method in suites]
            cells = [
                f"{100 * r['ours']['accuracy']:.1f}, {r['ours']['F']:.0f} + {r['ours']['B']:.0f}"
                for r in mine
            ]
            images = ", ".join(dict.fromkeys(str(r["images"]) for r in mine))
            yield f"| `{name}`, l{norm:g} | {images} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / ".cache" / "baselines.jsonl",
        help="results, one JSON line a case",
    )
    parser.add_argument(
        "--cases",
        default="",
        help="regular expression for 'network lnorm method'; the others are not run",
    )
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="index of the first image; choose settings on 1000 and up",
    )
    parser.add_argument("--workers", type=int, default=1, help="cases at once, of one thread each")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    results = {identity(r): r for r in map(json.loads, lines)}
    jobs = []
    failed = []
    for name, norm, method in cases():
        count = min(options.images, MOST.get(name, options.images))
        eps = EPS[name][{INF: 0, 2.0: 1, 1.0: 2}[norm]]
        known = results.get((name, norm, method, options.first, eps))
        folder = os.environ.get(peer(name, method) or "")
        done = known and known["images"] == count and ("original" in known or not folder)
        if not done and re.search(options.cases, f"{name} l{norm:g} {method}"):
            jobs.append((name, norm, method, options.first, count))
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
        for result in pool.imap(attempt, jobs, chunksize=1):
            if isinstance(result, str):
                failed.append(result)
                print(result, file=sys.stderr, flush=True)
                continue
            results[identity(result)] = result
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(
                row(result, named=True), result["disagreement"] or "", file=sys.stderr, flush=True
            )
    shown = [
        r
        for name, norm, method in cases()
        for r in results.values()
        if (r["network"], r["norm"], r["method"], r["first"]) == (name, norm, method, options.first)
    ]
    print("\n".join(tables(shown)))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
