"""Sets of the verification competition of 2025 (`wassail vnnlib`) beside the public verdicts.

$WASSAIL_VNNCOMP is a folder with checkouts of `vnncomp2025_benchmarks` and `vnncomp2025_results`;
without it nothing is run. The folder `peers` in it may have answers of other tools on this
processor: `TOOL_SET.csv` with network, property, verdict, processor seconds.
"""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import rooms
from benchmarks.measure import processor_limits, spent
from benchmarks.stage import Row, Stage, Unit, here
from benchmarks.stages.vnncomp import checkout, home
from wassail.vnnlib.sets import read_instances, run_instances

LIMIT = 60.0  # processor seconds, or the competition's own if these are less
# set -> instances in one unit; the cheap ones first
SETS = {
    "safenlp_2024": 120,
    "sat_relu": 50,
    "dist_shift_2023": 36,
    "collins_rul_cnn_2022": 31,
    "malbeware": 25,
    "linearizenn_2024": 20,
    "acasxu_2023": 31,
    "cersyve": 4,
    "tllverifybench_2023": 4,
    "lsnc_relu": 4,
}
FIRST = "alpha_beta_crown"  # whose verdict counts where it has one
SAME = {"holds": "unsat", "violated": "sat"}  # words of nnenum


def units() -> list[Unit]:
    """Chunks of a set."""
    if home() is None:
        return []
    return [
        Unit(f"{name}/{start}", partial(answered, name, start))
        for name, size in SETS.items()
        for start in range(0, len(read_instances(listed(name))), size)
    ]


def listed(name: str) -> Path:
    """The list of a set."""
    return checkout("vnncomp2025_benchmarks") / "benchmarks" / name / "instances.csv"


def answered(name: str, start: int) -> Row:
    """What becomes of some instances of a set; "absent": its network is not in the checkout."""
    path = listed(name)
    every = read_instances(path)
    chosen = every[start : start + SETS[name]]
    here_ = [i for i in chosen if any(path.parent.glob(f"{i.network}*"))]
    known = public(name)
    with tempfile.TemporaryDirectory() as folder, spent(), processor_limits():
        done = {r.key: r for r in run_instances(here_, path.parent, Path(folder), LIMIT)}
    found = []
    for one in chosen:
        result = done.get((one.network, one.question))
        told = known.get(key(one.network, one.question), "open")
        status, seconds = ("absent", 0.0) if result is None else (result.status, result.seconds)
        found.append([status, seconds, told, *key(one.network, one.question)])
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
    """One row for each set, one for all, and rows of other tools."""
    found: dict[str, list[list[Any]]] = {}
    sizes: dict[str, int] = {}
    for unit, answer in done.items():
        name = unit.partition("/")[0]
        sizes[name] = answer["instances"]
        found.setdefault(name, []).extend(answer["found"])
    rows = [summary(name, sizes[name], found[name]) for name in SETS if name in found]
    if rows:
        every = [entry for entries in found.values() for entry in entries]
        rows.append(summary("all", sum(sizes.values()), every))
    return {"sets": rows, "peers": beside(found)}


def summary(name: str, instances: int, found: list[list[Any]]) -> Row:
    """Counts of one set."""
    run = [entry for entry in found if entry[0] != "absent"]
    ours = Counter(status for status, *_ in run)
    solved = sorted(seconds for status, seconds, *_ in run if status != "unknown")
    return {
        "id": name,
        "set": name,
        "instances": instances,
        "absent": len(found) - len(run),
        "run": len(run),
        "decided": len(solved),
        "unsat": ours["unsat"],
        "sat": ours["sat"],
        "contradictions": sum(
            status in ("sat", "unsat") and told in ("sat", "unsat") and status != told
            for status, _, told, *_ in run
        ),
        "public": sum(told in ("sat", "unsat") for _, _, told, *_ in run),
        "median": middle(solved),
        "seconds": round(sum(seconds for _, seconds, *_ in run), 1),
        "limit": LIMIT,
    }


def beside(found: dict[str, list[list[Any]]]) -> list[Row]:
    """Other tools on this processor, and ours on the same instances."""
    folder = home()
    rows = []
    for path in sorted((folder / "peers").glob("*.csv")) if folder else ():
        tool, _, name = path.stem.partition("_")
        ours = {(net, what): entry for *entry, net, what in found.get(name, ())}
        theirs = {key(row[0], row[1]): row for row in csv.reader(path.open())}
        both = [one for one in theirs if one in ours and ours[one][0] != "absent"]
        told = {one: SAME.get(theirs[one][2], theirs[one][2]) for one in both}
        decided = [one for one in both if told[one] in ("sat", "unsat")]
        mine = [one for one in both if ours[one][0] != "unknown"]
        same = [one for one in decided if one in mine]
        if both:
            rows.append(
                {
                    "id": f"{tool} {name}",
                    "tool": tool,
                    "set": name,
                    "instances": len(both),
                    "decided": len(decided),
                    "ours": len(mine),
                    "contradictions": sum(told[one] != ours[one][0] for one in same),
                    "median": middle([float(theirs[one][3]) for one in same]),
                    "our_median": middle([ours[one][1] for one in same]),
                }
            )
    return rows


def middle(values: list[float]) -> float | None:
    """The middle one."""
    return sorted(values)[len(values) // 2] if values else None


STAGE = Stage(
    name="vnnlib",
    about="Sets of the verification competition of 2025.",
    depends=rooms.VNNLIB,
    units=units,
    tables=tables,
    source=here(),
)
