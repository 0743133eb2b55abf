"""Proofs and flips against public verdicts: instances of the verification competitions of 2021 and
2022.

    python benchmarks/vnncomp.py [--state FOLDER] [--only NAME] [--limit 6] [--passes 200] [--count
    N] [--show]

$WASSAIL_VNNCOMP is a folder that holds checkouts of the four public repositories `vnncomp2021`,
`vnncomp2021_results`, `vnncomp2022_benchmarks` and `vnncomp2022_results`. Every finished instance
is one line of FOLDER/instances.jsonl and is not done again. `--show` prints what is there and
computes nothing: that is docs/vnncomp.md.

With `--peer` alpha-beta-CROWN's own program tries the instances that are not refuted, one thread of
the CPU and the same limit: $WASSAIL_ABCROWN is its folder `complete_verifier`, and
$WASSAIL_ABCROWN_PATH what it has to find on PYTHONPATH.
"""

import argparse
import csv
import gzip
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import wassail as ws
from radii import Units
from wassail.certificates import clock
from wassail.zoo.onnx import load_onnx

# year, name in the competition, words of the networks' names that are taken
BENCHMARKS = (
    (2021, "cifar10_resnet", "resnet"),
    (2022, "mnist_fc", "mnist"),
    (2022, "oval21", "cifar_base"),
    (2022, "sri_resnet_a", "resnet"),
)
PROVED = {"unsat", "holds"}
REFUTED = {"sat", "violated"}
WINNER = {2021: "a-b-CROWN", 2022: "alpha_beta_crown"}
START = 3.0  # processor seconds that the peer takes to start: not counted
# The peer's settings: those of its authors for the benchmark, less what needs a commercial solver,
# in batches for a CPU and without an attack.
PEER = {
    "mnist_fc": """
model: {input_shape: [-1, 1, 28, 28]}
solver: {batch_size: 256, start_save_best: -1, beta-crown: {iteration: 20, lr_beta: 0.03}}
bab: {branching: {candidates: 5, reduceop: max}}
""",
    "oval21": """
general: {conv_mode: matrix}
solver: {batch_size: 256, start_save_best: -1, beta-crown: {lr_beta: 0.01}}
bab: {interm_transfer: false, branching: {candidates: 10, reduceop: max}}
""",
    "sri_resnet_a": """
model: {onnx_quirks: "{'Reshape': {'fix_batch_size': True}}"}
solver: {batch_size: 128, beta-crown: {lr_beta: 0.05, iteration: 10}}
bab: {interm_transfer: false, branching: {method: kfsb-intercept-only, candidates: 10}}
""",
    "cifar10_resnet": """
solver: {batch_size: 128, beta-crown: {lr_beta: 0.01}}
bab: {branching: {reduceop: max}}
""",
}


@dataclass(frozen=True)
class Instance:
    """One question of the competition: does the network answer `label` everywhere in the box?"""

    year: int
    benchmark: str
    network: Path
    question: Path

    @property
    def key(self) -> str:
        """What names it, without the machine's folders."""
        question = self.question.name.removesuffix(".gz").removesuffix(".vnnlib")
        return f"{self.year} {self.benchmark} {plain(self.network)} {question}"


def plain(path: Path) -> str:
    """The name of a network's file without its endings."""
    return path.name.removesuffix(".gz").removesuffix(".onnx")


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # A limit is in processor seconds here: a busy machine proves as much as an idle one.
    clock.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[assignment]
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--state", type=Path, default=Path(".vnncomp"), help="folder of what is done"
    )
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument("--limit", type=float, default=6.0, help="seconds for one proof")
    parser.add_argument(
        "--passes", type=int, default=200, help="passes of the attack on one instance"
    )
    parser.add_argument(
        "--count", type=int, default=1000, help="first so many instances of each network"
    )
    parser.add_argument("--show", action="store_true", help="print what is done, compute nothing")
    parser.add_argument("--peer", action="store_true", help="alpha-beta-CROWN beside it")
    options = parser.parse_args()
    units = Units(options.state, "instances", options.show)
    others = Units(options.state, "peer", options.show)
    verdicts = public_verdicts()
    rows = []
    taken: Counter[str] = Counter()
    for instance in instances():
        if options.only in instance.key and taken[plain(instance.network)] < options.count:
            taken[plain(instance.network)] += 1
            found = units.get(instance.key, answer, instance, options.limit, options.passes)
            tools = verdicts.get(verdict_key(instance), {})
            if found and options.peer and verdict(instance, tools) != "refuted":
                found["peer"] = others.get(instance.key, peer, instance, options.limit)
            if found:
                rows.append((instance, found, tools))
    print_page(rows, options)


def home() -> Path:
    """The folder of the four repositories."""
    folder = os.environ.get("WASSAIL_VNNCOMP")
    if not folder:
        sys.exit(
            "set WASSAIL_VNNCOMP to the folder that holds the public repositories of the "
            "competitions."
        )
    return Path(folder)


def checkout(name: str) -> Path:
    """The checkout of one repository, whatever its owner is called."""
    found = sorted(p for p in home().iterdir() if p.name.endswith(name))
    if not found:
        sys.exit(f"no checkout of {name} below WASSAIL_VNNCOMP.")
    return found[0]


def instances() -> Iterator[Instance]:
    """Every instance of the chosen benchmarks, in the order of the competition."""
    for year, name, words in BENCHMARKS:
        root = (
            checkout("vnncomp2021" if year == 2021 else "vnncomp2022_benchmarks")
            / "benchmarks"
            / name
        )
        lists = sorted(root.glob("*instances.csv"))
        for network, question, _ in csv.reader(lists[0].open()):
            if words in network:
                yield Instance(year, name, existing(root / network), existing(root / question))


def existing(path: Path) -> Path:
    """The file itself or its compressed form."""
    return path if path.exists() else path.with_name(path.name + ".gz")


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def verdict_key(instance: Instance) -> tuple[int, str, str]:
    return instance.year, plain(instance.network), instance.question.name.removesuffix(".gz")


@cache
def public_verdicts() -> dict[tuple[int, str, str], dict[str, str]]:
    """What each tool answered: (year, network, question) -> tool -> "proved" or "refuted"."""
    found: dict[tuple[int, str, str], dict[str, str]] = {}
    files = [
        (2021, p, p.stem)
        for p in sorted((checkout("vnncomp2021_results") / "results_csv").glob("*.csv"))
    ]
    files += [
        (2022, p, p.parent.name)
        for p in sorted(checkout("vnncomp2022_results").glob("*/results.csv"))
    ]
    for year, path, tool in files:
        for row in csv.reader(path.open()):
            word = row[4].lower()
            if word in PROVED | REFUTED:
                key = (year, plain(Path(row[1])), Path(row[2]).name)
                found.setdefault(key, {})[tool] = "proved" if word in PROVED else "refuted"
    return found


def verdict(instance: Instance, tools: dict[str, str]) -> str:
    """The winner's answer of that year; else that of at least two tools without another against
    them; else "open".
    """
    if WINNER[instance.year] in tools:
        return tools[WINNER[instance.year]]
    answers = Counter(tools.values())
    return next(iter(answers)) if len(answers) == 1 and len(tools) >= 2 else "open"


def question(path: Path) -> tuple[Tensor, Tensor, int]:
    """The box and the label of a question that asks for one label everywhere: float64 `(n,)`,
    `(n,)`, int.
    """
    text = content(path).decode()
    bounds: dict[str, dict[int, float]] = {"<=": {}, ">=": {}}
    for sign, index, value in re.findall(r"\((<=|>=)\s+X_(\d+)\s+([-+.\deE]+)\)", text):
        bounds[sign][int(index)] = float(value)
    n = len(bounds["<="])
    low, high = (
        torch.tensor([bounds[sign][i] for i in range(n)], dtype=torch.float64)
        for sign in (">=", "<=")
    )
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\(>=\s+Y_(\d+)\s+Y_(\d+)\)", text)]
    pairs += [(int(b), int(a)) for a, b in re.findall(r"\(<=\s+Y_(\d+)\s+Y_(\d+)\)", text)]
    labels = {label for _, label in pairs}
    rivals = {rival for rival, _ in pairs}
    declared = len(set(re.findall(r"declare-const Y_(\d+)", text)))
    if len(labels) != 1 or len(rivals) != declared - 1:
        raise ValueError(f"{path.name} does not ask for one label everywhere")
    return low, high, labels.pop()


class InBox(nn.Module):
    """The network as a function of the place in the box: 0 is the lower corner, 1 the upper one."""

    low: Tensor
    width: Tensor

    def __init__(self, network: nn.Module, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("low", low)
        self.register_buffer("width", high - low)

    def forward(self, u: Tensor) -> Tensor:
        return self.network(self.low + self.width * u)


@cache
def network(path: Path) -> tuple[nn.Module, tuple[int, ...]]:
    """The network in float64 and the shape of one sample."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        file.write_bytes(content(path))
        model = load_onnx(file)
    return model.double(), tuple(model.shape)


def answer(instance: Instance, limit: float, passes: int) -> dict[str, Any]:
    """Attack the instance, then try to prove it; everything in float64."""
    low, high, label = question(instance.question)
    net, shape = network(instance.network)
    model = InBox(net, low.reshape(shape), high.reshape(shape)).eval()
    u = torch.full((1, *shape), 0.5, dtype=torch.float64)
    y = torch.tensor([label])
    began = time.process_time()
    flips = ws.nearest(model, u, y, norm=math.inf, domain=(0.0, 1.0), passes=passes, seed=0)
    attack = time.process_time() - began
    refuted = bool(torch.isfinite(flips.distances[0]))
    if refuted:
        with torch.no_grad():
            z = model(flips.points.double().clamp(0, 1))[0]
        refuted = bool((z.argmax() != label) | (z[label] <= z[torch.arange(len(z)) != label].max()))
    proofs: dict[str, bool] = {}
    seconds: dict[str, float] = {}
    threat = ws.Threat(norm=math.inf, order=math.inf, eps=0.5, domain=(0.0, 1.0))
    for method in ("crown", "branch"):
        began = time.process_time()
        proofs[method] = bool(
            ws.verify(
                model, u, y, threat, method=method, arithmetic="exact", time_limit=limit
            ).proved[0]
        )
        seconds[method] = time.process_time() - began
    return {
        "refuted": refuted,
        "attack": attack,
        "proofs": proofs,
        "seconds": seconds,
        "limit": limit,
        "passes": passes,
    }


def peer(instance: Instance, limit: float) -> dict[str, Any]:
    """Whether alpha-beta-CROWN proves the instance in so many processor seconds, and in how many.

    A new process each, as its authors run it; what it takes to start is given to it on top.
    """
    program = Path(os.environ["WASSAIL_ABCROWN"])
    setting = "attack: {pgd_order: skip}\n" + PEER[instance.benchmark]
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "network.onnx": content(instance.network),
            "question.vnnlib": content(instance.question),
            "setting.yaml": setting.encode(),
        }
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        command = [sys.executable, "abcrown.py", "--device", "cpu", "--timeout", "600"]
        command += ["--config", f"{folder}/setting.yaml", "--results_file", f"{folder}/result"]
        command += ["--onnx_path", f"{folder}/network.onnx"]
        command += ["--vnnlib_path", f"{folder}/question.vnnlib"]
        path = os.environ.get("WASSAIL_ABCROWN_PATH", "")
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command,
            cwd=program,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, 2 * (int(limit + START),)),
        )
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime
    if done.returncode > 0 and "Result:" not in done.stdout:
        raise RuntimeError(f"alpha-beta-CROWN failed on {instance.key}: {done.stderr[-800:]}")
    proved = bool(re.search(r"Result: (unsat|safe)", done.stdout))
    return {"proved": proved, "seconds": max(0.0, seconds - START), "limit": limit}


TEXT = """\
# Public verdicts: the verification competitions of 2021 and 2022

Every instance asks whether a network gives one label everywhere in a box of inputs. The tools of
the competition answered *proved* ("unsat", "holds") or *refuted* ("sat", "violated"); their files
are public. The public verdict here is that of the winner of the year (alpha-beta-CROWN), else that
of at least two tools with none against them, else *open*. Our attack (`ws.nearest`) and our proofs
(`ws.verify` by `crown` and `branch`) ran on the same instances, both whatever the other says.
Everything of ours is in float64 and about exact arithmetic, as the competition is; one thread,
processor seconds, the limit on a proof too.

A *contradiction* is a proof of ours where the public verdict is refuted, a flip of ours where it is
proved, or a proof and a flip of ours on one instance.

Beside ours stands alpha-beta-CROWN's own program (release of December 2025) on the same CPU, on the
instances that are not publicly refuted: one thread, the same limit in processor seconds after the
3 s it takes to start, its authors' settings for the benchmark less what needs a commercial solver,
no attack.
"""


def print_page(
    rows: list[tuple[Instance, dict[str, Any], dict[str, str]]], options: argparse.Namespace
) -> None:
    print(TEXT)
    print(
        f"`python benchmarks/vnncomp.py --limit {options.limit:g} --passes {options.passes} "
        f"--count {options.count}{' --peer' if options.peer else ''}`\n"
    )
    print(
        "| benchmark | network | instances | public: proved, refuted, open | ours: crown | "
        "branch | refuted "
        "| contradictions | s an instance: attack | crown | branch "
        "| alpha-beta-CROWN's program | s |"
    )
    print("|" + 13 * "---|")
    groups: dict[tuple[int, str, str], list[tuple[Instance, dict[str, Any], dict[str, str]]]] = {}
    for row in rows:
        instance = row[0]
        groups.setdefault((instance.year, instance.benchmark, plain(instance.network)), []).append(
            row
        )
    wrong: list[str] = []
    for (year, name, net), part in groups.items():
        public = Counter(verdict(instance, tools) for instance, _, tools in part)
        bad = [
            instance.key
            for instance, found, tools in part
            if contradiction(found, verdict(instance, tools))
        ]
        wrong += bad
        counts = [sum(found["proofs"][m] for _, found, _ in part) for m in ("crown", "branch")]
        refuted = sum(found["refuted"] for _, found, _ in part)
        seconds = [sum(found["attack"] for _, found, _ in part)]
        seconds += [sum(found["seconds"][m] for _, found, _ in part) for m in ("crown", "branch")]
        print(
            f"| {name} {year} | `{net}` | {len(part)} | {public['proved']}, {public['refuted']}, "
            f"{public['open']} | "
            f"{counts[0]} | {counts[1]} | {refuted} | {len(bad)} | "
            + " | ".join(f"{s / len(part):.1f}" for s in seconds)
            + f" | {beside(part)} |"
        )
    print(f"\n**{len(rows)} instances, {len(wrong)} contradictions.**")
    for key in wrong:
        print(f"- {key}")
    new = [
        i.key
        for i, found, tools in rows
        if verdict(i, tools) == "open" and (found["refuted"] or any(found["proofs"].values()))
    ]
    print(f"\nOf the instances whose public verdict is open we decided {len(new)}.")


def beside(part: list[tuple[Instance, dict[str, Any], dict[str, str]]]) -> str:
    """The peer's cells: proved of the instances that it tried, and seconds for one of them."""
    tried = [found["peer"] for _, found, _ in part if found.get("peer")]
    if not tried:
        return "– | –"
    proved = sum(answer["proved"] for answer in tried)
    return f"{proved} of {len(tried)} | {sum(a['seconds'] for a in tried) / len(tried):.1f}"


def contradiction(found: dict[str, Any], public: str) -> bool:
    """Whether our answers disagree with the public one or with each other."""
    proved = any(found["proofs"].values())
    return (
        (proved and found["refuted"])
        or (proved and public == "refuted")
        or (found["refuted"] and public == "proved")
    )


if __name__ == "__main__":
    main()
