"""Sets of the verification competition of 2025 (`wassail vnnlib`) beside the public verdicts.

$WASSAIL_VNNCOMP is a folder with checkouts of `vnncomp2025_benchmarks` and `vnncomp2025_results`;
without it nothing is run.
"""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from functools import cache, partial
from pathlib import Path

from benchmarks import rooms
from benchmarks.measure import processor_limits, spent
from benchmarks.stage import Row, Stage, Unit, here
from benchmarks.stages.vnncomp import checkout, home

LIMIT = 20.0  # processor seconds, or the competition's own if these are less
# set -> instances that are run, spread evenly over the list
SETS = {
    "safenlp_2024": 200,
    "acasxu_2023": 20,
    "sat_relu": 50,
    "linearizenn_2024": 12,
    "dist_shift_2023": 12,
    "collins_rul_cnn_2022": 12,
    "cersyve": 12,
    "tllverifybench_2023": 4,
}
CHUNK = 50
FIRST = "alpha_beta_crown"  # whose verdict counts where it has one


def units() -> list[Unit]:
    """Chunks of a set."""
    if home() is None:
        return []
    return [
        Unit(f"{name}/{start}", partial(answered, name, start))
        for name, count in SETS.items()
        for start in range(0, count, CHUNK)
    ]


def answered(name: str, start: int) -> Row:
    """What becomes of some instances of a set."""
    from wassail.vnnlib.sets import read_instances, run_set

    path = checkout("vnncomp2025_benchmarks") / "benchmarks" / name / "instances.csv"
    every = read_instances(path)
    count = min(SETS[name], len(every))
    chosen = [every[k * len(every) // count] for k in range(count)][start : start + CHUNK]
    known = public(name)
    found = []
    with tempfile.TemporaryDirectory() as folder, spent(), processor_limits():
        for instance in chosen:
            words = f"{instance.network} {instance.question}"
            results = run_set(path, Path(folder), LIMIT, words)
            result = next(r for r in results if r.key == (instance.network, instance.question))
            told = known.get(key(*result.key), "open")
            found.append([result.status, result.seconds, told])
    return {"instances": len(every), "found": found}


@cache
def public(name: str) -> dict[tuple[str, str], str]:
    """The public verdicts: alpha-beta-CROWN's, else that of at least two tools with none against
    them.
    """
    votes: dict[tuple[str, str], dict[str, str]] = {}
    for path in sorted(checkout("vnncomp2025_results").glob(f"*/2025_{name}/results.csv")):
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
    return network.split("onnx/", 1)[-1], question.split("vnnlib/", 1)[-1]


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each set, and one for all."""
    rows = []
    for name, count in SETS.items():
        parts = [done[f"{name}/{s}"] for s in range(0, count, CHUNK) if f"{name}/{s}" in done]
        if parts:
            found = [entry for part in parts for entry in part["found"]]
            rows.append(summary(name, parts[0]["instances"], found))
    if rows:
        every = [e for answer in done.values() for e in answer["found"]]
        rows.append(summary("all", sum(row["instances"] for row in rows), every))
    return {"sets": rows}


def summary(name: str, instances: int, found: list[list]) -> Row:
    """Counts of one set."""
    ours = Counter(status for status, _, _ in found)
    solved = sorted(seconds for status, seconds, _ in found if status != "unknown")
    return {
        "id": name,
        "set": name,
        "instances": instances,
        "run": len(found),
        "decided": len(solved),
        "unsat": ours["unsat"],
        "sat": ours["sat"],
        "contradictions": sum(
            status in ("sat", "unsat") and told in ("sat", "unsat") and status != told
            for status, _, told in found
        ),
        "public": sum(told in ("sat", "unsat") for _, _, told in found),
        "median": solved[len(solved) // 2] if solved else None,
        "limit": LIMIT,
    }


STAGE = Stage(
    name="vnnlib",
    about="Sets of the verification competition of 2025.",
    depends=rooms.VNNLIB,
    units=units,
    tables=tables,
    source=here(),
)
