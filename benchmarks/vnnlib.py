"""Ten sets of the verification competition of 2025 beside the public verdicts: `docs/vnnlib.md`.

    WASSAIL_VNNCOMP=FOLDER python benchmarks/vnnlib.py --count 20

FOLDER holds checkouts of `vnncomp2025_benchmarks` and `vnncomp2025_results`. Limits and times are
processor seconds of one thread, so that a busy machine decides as much as an idle one. What is
done is kept in --state; started again it goes on, also with a larger --count. `--show` prints the
table of what is done.
"""

import argparse
import csv
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch

from wassail.certificates import clock
from wassail.vnnlib.sets import Result, read_instances, read_results, run_set, status_line

SETS = (
    "safenlp_2024",
    "acasxu_2023",
    "sat_relu",
    "malbeware",
    "lsnc_relu",
    "linearizenn_2024",
    "dist_shift_2023",
    "collins_rul_cnn_2022",
    "tllverifybench_2023",
    "cersyve",
)
HEAD = """\
# VNN-LIB: ten sets of the verification competition of 2025

`wassail vnnlib` ([how to use it](howto/vnnlib.md)) on ten public sets that fit a CPU: of
`safenlp` the first instances of the list, of the others a sample, spread evenly over it. The table
says how many. All rows are from one commit.

`WASSAIL_VNNCOMP=FOLDER python benchmarks/vnnlib.py --count N --limit 20`: one thread, at most the
competition's own seconds or 20, whichever is less. Limits and times are processor seconds of our
process (what onnxruntime takes to check a counterexample is not in them). The public verdict is
alpha-beta-CROWN's of 2025, else that of at least two tools with none against them. A
*contradiction* is a verdict of ours that differs from it. The networks of `malbeware` were not in
the copy of the repository at hand.

The whole sets were not run, `lsnc_relu` not at all with this commit, and small samples say little,
above all of `tllverifybench`. Of `safenlp` three stay open, which few tools decide in time. No
other tool was run on this machine.
"""
TAIL = """
## How a property is decided

1. **Attack**: up to 128 starts for each clause and box in one batch (the middle, random points,
   corners), 30 steps by the sign of the gradient of the clause's largest inequality, in float32.
   Points that seem unsafe are evaluated in float64, float32 and by onnxruntime.
2. **Linear bounds** (CROWN, `relax/crown.Sweep`) of every inequality, for all boxes at once. A
   clause is excluded on a box as soon as one of its inequalities is.
3. **Networks with one layer of ReLUs** and more than 20 free inputs, `safenlp` and `sat_relu`
   (`search/shallow.py`, on the one frontier). Only neurons with a negative coefficient are split,
   since the others are convex and linear bounds with the best slopes are exact for them. A split is
   a half-space of inputs: it cuts the box, and it bounds every other neuron better, by a table of
   pairs of neurons. The mean of a clause's inequalities is bounded as one.
4. **Splits of the input**, alone where at most 20 inputs are free (`search/boxes.py`, on the one
   frontier): up to 512 boxes in one sweep. The linear bounds of a clause's inequalities also cut
   the box (a point must satisfy all of them): a box that loses half of its volume is bounded
   again and not halved. Else the side with the largest smear is halved.
5. **Splits of neurons** with more inputs (`search/margins.py`). The largest inequality of a
   clause is made of ReLUs behind the network, so a slope of such a ReLU is a multiplier between
   two inequalities, and a split of it decides between them.

Measured and decided on ACAS Xu, `sat_relu` and `linearizenn`: the smear by the slope of the worst
bound alone needs 491, 545, 3085, 847 boxes on instances 20, 40, 180, 185 of ACAS Xu, by the bound
on the Jacobian alone 117, 209, 3485, 233, by both, each relative to its largest, 107, 191, 2921,
205. The table of pairs and the cut boxes on `safenlp`: instance 7 (`ruarobot`, 3558) takes 90,261
domains of neurons without them, 1,230 with them; instance 1 of `sat_relu` 27, where 71,679 did not
do before boxes were cut.

## Weak

- `lsnc_relu`: bounds through products are slow (about 100 boxes a second) and loose on large
  boxes.
- `tllverifybench` from N = 40 on: thousands of undecided neurons on every box."""
FIRST = "alpha_beta_crown"  # whose verdict counts where it has one


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    clock.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[assignment]
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, default=Path(".vnnlib"), help="what is done")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds, at most")
    parser.add_argument("--count", type=int, default=None, help="so many of each set, evenly")
    parser.add_argument("--show", action="store_true", help="compute nothing")
    options = parser.parse_args()
    if not options.show:
        for name in options.sets:
            run(name, options)
    print(HEAD)
    print_table(options)
    print(TAIL)


def home(name: str) -> Path:
    """A checkout of one repository."""
    folder = Path(os.environ.get("WASSAIL_VNNCOMP", "."))
    found = sorted(path for path in folder.iterdir() if path.name.endswith(name))
    if not found:
        sys.exit(f"no checkout of {name} below WASSAIL_VNNCOMP.")
    return found[0]


def instances(name: str) -> Path:
    return home("vnncomp2025_benchmarks") / "benchmarks" / name / "instances.csv"


def run(name: str, options: argparse.Namespace) -> None:
    folder = options.state / name
    folder.mkdir(parents=True, exist_ok=True)

    def tell(result: Result) -> None:
        line = f"{name} {Path(result.network).name} {Path(result.question).name}"
        print(f"{line}: {status_line(result)}", file=sys.stderr, flush=True)

    for _ in run_set(instances(name), folder, options.limit, "", options.count, tell):
        pass


def public(name: str) -> dict[tuple[str, str], str]:
    """The public verdict on each instance: alpha-beta-CROWN's, else that of at least two tools with
    none against them.
    """
    votes: dict[tuple[str, str], dict[str, str]] = {}
    for path in sorted(home("vnncomp2025_results").glob(f"*/2025_{name}/results.csv")):
        for row in csv.reader(path.open()):
            if row[4] in ("sat", "unsat"):
                votes.setdefault(key(row[1], row[2]), {})[path.parts[-3]] = row[4]
    found = {}
    for instance, answers in votes.items():
        counts = Counter(answers.values())
        if FIRST in answers:
            found[instance] = answers[FIRST]
        elif len(counts) == 1 and len(answers) > 1:
            found[instance] = next(iter(counts))
    return found


def key(network: str, question: str) -> tuple[str, str]:
    """The files of an instance below its set's folder."""
    parts = (network.split("/onnx/")[-1], question.split("/vnnlib/")[-1])
    return (parts[0].split("onnx/")[-1], parts[1].split("vnnlib/")[-1])


def print_table(options: argparse.Namespace) -> None:
    print(
        "| set | instances | run | decided | unsat | sat | contradictions | "
        "s, median of decided | public: decided of those run |"
    )
    print("|" + 9 * "---|")
    wrong: list[str] = []
    total: Counter[str] = Counter()
    for name in options.sets:
        results = read_results(options.state / name)
        known = public(name)
        counts = Counter(result.status for result in results)
        solved = sorted(result.seconds for result in results if result.status != "unknown")
        against = [
            f"{name} {result.network} {result.question}: {result.status}"
            for result in results
            if result.status != "unknown"
            and known.get(key(*result.key), result.status) != result.status
        ]
        theirs = sum(key(*result.key) in known for result in results)
        every = len(read_instances(instances(name)))
        middle = f"{solved[len(solved) // 2]:.1f}" if solved else "–"
        print(
            f"| {name} | {every} | {len(results)} | {len(solved)} | {counts['unsat']} | "
            f"{counts['sat']} | {len(against)} | {middle} | {theirs} |"
        )
        wrong += against
        total.update(every=every, run=len(results), solved=len(solved), theirs=theirs)
        total.update(unsat=counts["unsat"], sat=counts["sat"])
    print(
        f"| all | {total['every']} | {total['run']} | {total['solved']} | {total['unsat']} | "
        f"{total['sat']} | {len(wrong)} | | {total['theirs']} |"
    )
    for line in wrong:
        print(f"- contradiction: {line}")


if __name__ == "__main__":
    main()
