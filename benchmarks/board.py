"""The board: real networks, attacked and certified over Omega_1, Omega_2 and Omega_inf.

    nice -n 10 python benchmarks/board.py --runs FOLDER [--images 200] [--only NAME] [--seconds S]
    python benchmarks/board.py --runs FOLDER --site FOLDER [--since TIME] > docs/board.md

The first line makes the runs that are missing, one after the other, and can be stopped and started
at any time. The cheap ones come first (`--stages`): every network attacked in the norm that it was
trained for, then certificates that take seconds, other norms, certificates that take minutes. The
second line makes the site and its page from the runs that are there and computes nothing; runs that
were begun before TIME (as 2026-11-17T15:00) are marked as older than the code.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wassail.cli import main as cli
from wassail.evaluation.run import Evaluation
from wassail.threat import show
from zoo_path import ROOT, ZOO

IMAGES = 200
DEAR_IMAGES = 50  # where certificates take more than 0.2 CPU seconds an image
FEW_IMAGES = 20  # so that every network has a certificate before any has a second one
PASSES = 100
NORMS = ("inf", "2", "1")
TWIN = "cifar_resnet_2b"  # the same network as vnn_resnet2b, read from an ONNX file
# Budgets in norms that a network was not trained for, by data set: one for all networks.
USUAL = {
    "mnist": {"inf": "0.1", "2": "0.3", "1": "1"},
    "cifar": {"inf": "2/255", "2": "36/255", "1": "0.5"},
}
CIFAR = ["--mean", "0.4914", "0.4822", "0.4465", "--std"]
NARROW = [*CIFAR, "0.2023", "0.1994", "0.2010"]
WIDE = [*CIFAR, "0.2471", "0.2435", "0.2616"]


@dataclass(frozen=True)
class Network:
    """A network, its data, the budget it was trained for, and how it is certified.

    Args:
        name: in the folder of networks.
        data: name of the test images.
        norm: that it was trained for, or is known for.
        eps: its budget there; in other norms the usual one of the data set.
        quick: method of radii that takes seconds, by norm; default none.
        dear: whether the best cheap certificate (`auto`: linear bounds, and for l1 and l2 what
            knows how far a whole layer moves) takes 0.2 to 4 CPU seconds an image, not minutes.
        images: the first so many; fewer than 200 for large networks.
        options: more words for the command line.
    """

    name: str
    data: str
    norm: str
    eps: str
    quick: tuple[tuple[str, str], ...] = ()
    dear: bool = True
    images: int = IMAGES
    options: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """As the command line takes it, in the folder of networks."""
        return f"models/{self.name}" if self.name.endswith(".onnx") else f"zoo:load({self.name})"

    def budget(self, norm: str) -> str:
        """The budget at a norm."""
        return self.eps if norm == self.norm else USUAL[self.family][norm]

    @property
    def family(self) -> str:
        return "cifar" if "cifar" in self.data else "mnist"


LINEAR = (("inf", "crown"), ("2", "crown"), ("1", "crown"))  # of small networks: seconds
WHOLE_LAYERS = (("2", "auto"),)  # how far a whole layer moves: under a second an image
NETWORKS = (
    Network("mnist_mlp_toy20", "mnist", "inf", "0.02", LINEAR),
    Network("mnist_mlp_6_100", "mnist", "inf", "0.026", LINEAR),
    Network("mnist_mlp_spectral", "mnist", "inf", "0.1", LINEAR),
    Network("sdp_mnist_mlp", "sdp_mnist", "2", "1", LINEAR),
    Network("mnist_madry_tiny", "mnist", "inf", "0.3"),
    Network("lip1_mnist_conv", "mnist", "2", "1", WHOLE_LAYERS),
    Network("sdp_mnist_convsmall", "sdp_mnist", "2", "0.3", WHOLE_LAYERS),
    Network("mnist_kw_01", "mnist", "inf", "0.1"),
    Network("fashion_kw_01", "fashion", "inf", "0.1"),
    Network("mnist_conv_small", "mnist", "inf", "0.12"),
    Network("mnist_cnn_a_adv", "mnist", "inf", "0.3"),
    Network("mnist_convnet_avgpool.onnx", "mnist", "inf", "0.1"),
    Network("mnist_convnet_maxpool.onnx", "mnist", "inf", "0.1"),
    Network("cifar_base_kw", "cifar10", "inf", "2/255"),
    Network("sdp_cifar_cnn_c", "sdp_cifar", "2", "24/255", WHOLE_LAYERS),
    Network("sdp_cifar_cnn_a", "sdp_cifar", "2", "24/255", WHOLE_LAYERS),
    Network("lip1_cifar_cnn_a", "cifar10", "2", "36/255", WHOLE_LAYERS),
    Network("cifar_small_kw_l2_36px", "cifar10", "2", "36/255", WHOLE_LAYERS),
    Network("cifar_cnn_a_adv", "cifar10", "inf", "2/255"),
    Network("cifar_cnn_a_mix", "cifar10", "inf", "2/255"),
    Network("cifar_cnn_a_adv4", "cifar10", "inf", "8/255"),
    Network("cifar_conv_small_sigmoid", "cifar10", "inf", "2/255"),
    Network("vnn_resnet2b", "cifar10", "inf", "2/255"),
    Network("cifar_vit_pgd_2_3_16.onnx", "cifar10", "inf", "2/255", options=tuple(NARROW)),
    Network("cifar_vit_ibp_3_3_8.onnx", "cifar10", "inf", "2/255", options=tuple(NARROW)),
    Network("cifar_resnet_2b.onnx", "cifar10", "inf", "2/255", options=tuple(WIDE)),
    Network("mnist_smallcnn_ddn", "mnist", "2", "1.5", dear=False),
    Network("mnist_trades", "mnist", "inf", "0.3", dear=False),
    Network("vnn_resnet4b", "cifar10", "inf", "1/255", dear=False),
    Network("cifar_resnet20", "cifar10", "inf", "1/255", dear=False, images=50),
    Network("cifar_sri_resnet_a.onnx", "cifar10", "inf", "4/255", (), False, 50, tuple(NARROW)),
    Network("cifar_resnet18_aa", "cifar10", "inf", "8/255", dear=False, images=20),
)


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        network: what is evaluated.
        norm: ground norm.
        images: the first so many.
        certify: method of the radii, or None.
    """

    network: Network
    norm: str
    images: int
    certify: str | None

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        end = "" if self.certify is None else f"-{self.certify}"
        return f"{self.network.name.removesuffix('.onnx')}-l{self.norm}-{self.images}{end}"


STAGES = ("attack", "quick", "few", "norms", "dear")


def jobs(images: int, stage: str) -> Iterator[Job]:
    """The runs of one stage.

    Args:
        images: at most so many for each network.
        stage: "attack" (every network in the norm it was trained for, not certified), "quick" (the
            same with certificates that take seconds), "few" (with the best cheap certificates for
            the first images), "norms" (the other norms), "dear" (as "few" for more images).
    """
    for network in NETWORKS:
        count = min(images, network.images)
        quick = dict(network.quick)
        if stage == "attack":
            yield Job(network, network.norm, count, None)
        elif stage == "quick" and network.norm in quick:
            yield Job(network, network.norm, count, quick[network.norm])
        elif stage == "norms" and network.images == IMAGES:
            for norm in NORMS:
                if norm != network.norm:
                    yield Job(network, norm, count, quick.get(norm))
        elif stage in FEWER and network.dear and not is_quick(network):
            yield Job(network, network.norm, min(count, FEWER[stage]), "auto")


FEWER = {"few": FEW_IMAGES, "dear": DEAR_IMAGES}


def is_quick(network: Network) -> bool:
    """Whether certificates for all images take seconds."""
    return dict(network.quick).get(network.norm) == "crown"


def command(job: Job, folder: Path) -> list[str]:
    """The words of one run after `wassail`."""
    network = job.network
    words = ["evaluate", network.model, "--data", f"zoo:images({network.data})"]
    words += ["-n", str(job.images), "--name", network.name.removesuffix(".onnx")]
    words += ["--norm", job.norm, "--eps", network.budget(job.norm)]
    words += ["--attacks", "nearest", "--passes", str(PASSES)]
    words += ["--threads", "1", "--quiet", "--no-look", "--landmarks", "--resume"]
    words += ["--out", os.path.relpath(folder, ZOO.resolve())]
    words += [] if job.certify is None else ["--certify", job.certify]
    words += ["--trust"] if network.name.endswith(".onnx") else []
    return [*words, *network.options]


def make_runs(options: argparse.Namespace) -> None:
    """Every run that is missing, the cheap ones first."""
    began = time.monotonic()
    os.chdir(ZOO)
    for job in (job for stage in options.stages for job in jobs(options.images, stage)):
        folder = options.runs / job.folder
        if options.only not in job.network.name or (folder / "report.html").exists():
            continue
        if time.monotonic() - began > options.seconds:
            return
        start = time.process_time()
        words = command(job, folder)
        sys.argv = ["wassail", *words]  # which a run keeps
        with redirect_stdout(io.StringIO()):
            code = cli(words)
        took = time.process_time() - start
        print(f"{folder.name}: code {code}, {took:.0f} CPU s", file=sys.stderr, flush=True)


PAGE = """\
# The board

Real networks over every Wasserstein ball: `Omega_1` and `Omega_2` beside the point-wise threat
`Omega_inf` of other boards, in l1, l2 and linf. Certified .. attacked accuracy in %, rounded
outward: at least the first under every distribution of the set, at most the second, for a
distribution that was built and verified. "–": not certified.

**{networks} networks, {runs} runs; {certified} networks have certificates.** Each network at the
eps it was trained for, in the norm it was trained for; in other norms at one eps for all networks
of a data set. N: the first N test images. It is {images} but for large networks and for dear
certificates, where time did not allow more
(such a network has two rows, one with certificates and one with more images): sampling alone moves
a figure by up to {many:.0f} points for 200 images, {some:.0f} for 50 and {few:.0f} for 20 (95 %
confidence). Networks are ranked by the attacked accuracy over `Omega_1`. Look at N, eps and data
before you compare two rows. Attack: `nearest`, {passes} passes a sample. `vnn_resnet2b` and
`cifar_resnet_2b` are one network, as a PyTorch module and as an ONNX file.
{older}

`wassail board RUN... -o site/` makes the same as a site: sortable tables, a page for each model, a
page for each run with its sandwich and known shifts, and a feed. The feed of this page is
[board.json](board.json), with the known shifts and, for every row, the command that computes it
again from the stored points, with the digest of the model that the reader has to supply, for
example

    {verify}

{seconds}

The runs are not in the repository: `python benchmarks/board.py --runs FOLDER` makes them, and
`python benchmarks/board.py --runs FOLDER --site FOLDER` this page.

<div class="pictures" markdown>
{pictures}
</div>
"""
OLDER = """†: made before the attack and the bounds had their present form; the
same command would now give figures that differ a little."""
SECONDS = """in the folder of networks, where MODEL is `'zoo:load(fashion_kw_01)'` and DATA
`'zoo:images(fashion)'`. It looks at samples, predictions, every flip, budgets and
curves, and attacks 100 samples again: 5 processor seconds for `mnist_kw_01` and for `vnn_resnet2b`.
With `--radii` the radii are proved again, too, which takes as long as the run."""
PICTURES = """![the board on a desk, light](site/board-wide-light.png)
![the board on a desk, dark](site/board-wide-dark.png)
![the board on a phone, light](site/board-narrow-light.png)
![the board on a phone, dark](site/board-narrow-dark.png)"""


def selected(runs: Path) -> list[Path]:
    """The runs that are shown: of one network in one norm those that no other makes needless.

    A run is needless if another has at least as many images and certificates, or neither has
    certificates; of two alike the newer one is shown.

    Args:
        runs: the folder that holds them.
    """
    groups: dict[tuple[str, float], list[tuple[bool, int, Path]]] = {}
    for page in sorted(runs.glob("*/report.html")):
        run = Evaluation.load(page.parent)
        key = (run.name, run.threat.norm)
        groups.setdefault(key, []).append((run.radii is not None, len(run), page.parent))
    kept = []
    for group in groups.values():
        most = max(count for _, count, _ in group)
        proved = max((count for certified, count, _ in group if certified), default=0)
        newest = sorted(group, key=lambda entry: begun(entry[2]), reverse=True)
        seen = set()
        for certified, count, folder in newest:
            wanted = proved if certified else most
            if count == wanted and (certified or count > proved) and certified not in seen:
                kept.append(folder)
                seen.add(certified)
    return sorted(kept)


def begun(run: Path) -> str:
    """When a run was begun, as it wrote down itself: ISO text, which sorts."""
    with open(run / "log" / "events.jsonl") as events:
        return str(json.loads(events.readline())["time"])


def shortened(entry: dict[str, Any]) -> dict[str, Any]:
    """A row of the feed with the eps of known shifts in four digits."""
    shifts = [
        {**shift, "eps": {order: float(f"{eps:.4g}") for order, eps in shift["eps"].items()}}
        for shift in entry["landmarks"]
    ]
    return {**entry, "landmarks": shifts}


def write_feed(feed: dict[str, Any], path: Path) -> None:
    """The feed with one line for each run."""
    lines = {
        key: ",\n".join(json.dumps(entry) for entry in entries)
        for key, entries in (
            ("runs", [shortened(entry) for entry in feed["runs"]]),
            ("published", feed["published"]),
        )
    }
    body = ",\n".join(f'"{key}": [\n{text}\n]' for key, text in lines.items())
    path.write_text(f'{{"format": {feed["format"]},\n{body}}}\n')


def spread(n: int) -> float:
    """By how many points an average of n samples may be off, with 95 % confidence (Hoeffding)."""
    return 100 * math.sqrt(math.log(40) / (2 * n))


def make_page(options: argparse.Namespace) -> None:
    """The site, the feed beside the page, and the page on standard output."""
    folders = selected(options.runs)
    with redirect_stdout(io.StringIO()):
        code = cli(["board", *map(str, folders), "-o", str(options.site)])
    if code:
        sys.exit(code)
    feed = json.loads((options.site / "board.json").read_text())
    rows = feed["runs"]
    older = {folder.name for folder in folders if begun(folder) < options.since}
    for row in rows:
        row["older"] = row["verify"].split()[2] in older
    write_feed(feed, ROOT / "docs" / "board.json")
    pictures = PICTURES if (ROOT / "docs" / "site" / "board-wide-light.png").exists() else ""
    text = PAGE.format(
        networks=len({row["model"] for row in rows} - {TWIN}),
        runs=len(rows),
        certified=len({row["model"] for row in rows if row["certified_by"]} - {TWIN}),
        images=IMAGES,
        passes=PASSES,
        many=spread(200),
        some=spread(50),
        few=spread(20),
        verify=next((row["verify"] for row in rows if "kw_01" in row["model"]), ""),
        older=OLDER if older else "",
        seconds=SECONDS,
        pictures=pictures,
    )
    print(text)
    for norm in NORMS:
        mine = [row for row in rows if row["norm"] == norm]
        if not mine:
            continue
        print(f"## l{norm}, box [0, 1]\n")
        print("| model | data | N | eps | clean | p = 1 | p = 2 | p = inf | radii by |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in sorted(mine, key=lambda row: -row["orders"]["1"]["attacked"]):
            print("| " + " | ".join(map(str, cells_of(row))) + " |")
        print()
    print("## The paper's Table 1: published figures, checkpoints not available here\n")
    print("WDA++ over `Omega_1` and `Omega_2`, AutoAttack over `Omega_inf`; nothing certified.\n")
    print("| model | data | threat | clean | p = 1 | p = 2 | p = inf | measured here |")
    print("|---|---|---|---|---|---|---|---|")
    for line in feed["published"]:
        figures = " | ".join(str(value) for value in line["attacked"].values())
        threat = f"l{line['norm']}, {show(line['eps'])}"
        print(
            f"| {line['model']} | {line['data']} | {threat} | {line['clean']} | {figures} | "
            f"{line['note']} |"
        )


def cells_of(row: dict[str, Any]) -> list[object]:
    """A run as a row of the page."""
    sides = [
        f"{'–' if side['certified'] is None else side['certified']} .. {side['attacked']}"
        for side in row["orders"].values()
    ]
    data = row["data"].removeprefix("zoo:images(").removesuffix(")")
    by = row["certified_by"] or "–"
    name = f"{row['model']} †" if row["older"] else row["model"]
    return [name, data, row["samples"], show(row["eps"]), row["clean"], *sides, by]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path(".board"), help="folder of the runs")
    parser.add_argument("--images", type=int, default=IMAGES, help="the first so many test images")
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--site", type=Path, default=None, help="make the site of what is done")
    parser.add_argument("--since", default="", help="mark runs that were begun before this time")
    options = parser.parse_args()
    options.runs = Path(os.environ.get("WASSAIL_BOARD", options.runs)).resolve()
    if "WASSAIL_BOARD" in os.environ and options.site is None:
        options.site = options.runs / "site"
    if options.site is None:
        make_runs(options)
    else:
        make_page(options)


if __name__ == "__main__":
    main()
