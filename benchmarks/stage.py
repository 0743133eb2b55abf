"""Stages and their units; what is done is kept, so that a run that was stopped goes on.

A unit is one network, norm and method. Its answer is a file below `.cache/results`, in a folder
named by the hash of the code: an answer of other code is never used. The answer of another tool
does not depend on our code and is kept by the version of that tool.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import code
from benchmarks.code import ROOT

RESULTS = ROOT / "results"
CACHE = Path(os.environ.get("WASSAIL_RESULTS_CACHE", ROOT / ".cache" / "results"))
SEED = 0
Row = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One measurement.

    Args:
        key: its name, as "cifar_base_kw/linf/nearest-300"; unique in its stage.
        run: measures; returns what JSON can hold.
        peer: the package of another tool that is measured, or "".
        networks: names of the networks and data sets whose files it reads.
    """

    key: str
    run: Callable[[], Row]
    peer: str = ""
    networks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Units that make one results file.

    Args:
        name: of the file `results/NAME.json`.
        about: what is measured, one sentence.
        depends: rooms of src/wassail.
        units: the units, the important ones first.
        tables: rows for the pages from the answers of the units that are done, by table.
        source: the file that measures.
    """

    name: str
    about: str
    depends: tuple[str, ...]
    units: Callable[[], list[Unit]]
    tables: Callable[[dict[str, Row]], dict[str, list[Row]]]
    source: Path

    @cached_property
    def digest(self) -> str:
        """The hash of all code that its figures depend on."""
        return code.digest(self.depends, [self.source])

    def file_of(self, unit: Unit) -> Path:
        """Where the answer of a unit is kept."""
        folder = f"peer-{unit.peer}-{version(unit.peer)}" if unit.peer else self.digest[:16]
        return CACHE / self.name / folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', unit.key)}.json"

    def answer(self, unit: Unit) -> Row | None:
        """What the unit measured; None if it is to be run."""
        if unit.peer and not version(unit.peer):
            kept = sorted((CACHE / self.name).glob(f"peer-{unit.peer}-*/{self.file_of(unit).name}"))
            return None if not kept else json.loads(kept[-1].read_text())["answer"]
        path = self.file_of(unit)
        return json.loads(path.read_text())["answer"] if path.exists() else None

    def runnable(self, unit: Unit) -> bool:
        """Whether the tool that the unit measures is here."""
        return not unit.peer or bool(version(unit.peer))

    def measure(self, unit: Unit) -> float:
        """Run a unit and keep its answer; returns processor seconds."""
        began = time.process_time()
        answer = unit.run()
        seconds = time.process_time() - began
        text = json.dumps({"key": unit.key, "seconds": seconds, "answer": answer})
        write(self.file_of(unit), text)
        return seconds

    def seconds(self) -> float:
        """Processor seconds of the units that are done."""
        files = [self.file_of(unit) for unit in self.units() if self.answer(unit) is not None]
        return sum(json.loads(f.read_text())["seconds"] for f in files if f.exists())

    def record(self) -> Row:
        """What `results/NAME.json` holds."""
        units = self.units()
        answers = {unit.key: self.answer(unit) for unit in units}
        done = {key: answer for key, answer in answers.items() if answer is not None}
        names = sorted({name for unit in units if unit.key in done for name in unit.networks})
        return {
            "stage": self.name,
            "about": self.about,
            "commit": commit(),
            "command": f"python -m benchmarks.results {self.name}",
            "seed": SEED,
            "processor": processor(),
            "threads": 1,
            "versions": versions(units),
            "depends": {"modules": list(self.depends), "sha256": self.digest},
            "units": {"planned": len(units), "done": len(done)},
            "open": sorted(set(answers) - set(done)),
            "processor_seconds": round(self.seconds(), 1),
            "files": checksums(names),
            "tables": self.tables(done),
        }


def stale(folder: Path = RESULTS) -> list[str]:
    """Results files that are older than their code, one sentence each."""
    from benchmarks.results import STAGES, stage_of

    found = []
    for path in sorted(folder.glob("*.json")):
        if path.stem not in STAGES:
            found.append(f"results/{path.name} belongs to no stage: delete it.")
        elif json.loads(path.read_text())["depends"]["sha256"] != stage_of(path.stem).digest:
            found.append(
                f"results/{path.name} is older than the code it depends on: run "
                f"`python -m benchmarks.results {path.stem}`."
            )
    return found


def write(path: Path, text: str) -> None:
    """The whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


def here(depth: int = 1) -> Path:
    """The file that calls."""
    return Path(inspect.stack()[depth].filename).resolve()


def commit() -> str:
    """The commit of the working tree; "+" behind it where src or benchmarks have changes."""
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", "src", "benchmarks")
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def version(package: str) -> str:
    """The version of an installed package; "" if it is not here, "source" if it has none."""
    module, distribution = PEERS.get(package, (package, package))
    if importlib.util.find_spec(module) is None:
        return ""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "source"


# Name of a tool: its module and its distribution.
PEERS = {"adv-lib": ("adv_lib", "adv-lib"), "autoattack": ("autoattack", "autoattack")}


def versions(units: Iterable[Unit] = ()) -> dict[str, str]:
    """Versions of Python and of the packages that decide about figures."""
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "numpy", "scipy", "wassail"):
        found[package] = version(package)
    for peer in sorted({unit.peer for unit in units if unit.peer}):
        found[peer] = version(peer) or "not installed, answers kept from an earlier run"
    return found


def checksums(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files of networks and data."""
    from benchmarks.networks import checksum

    return {name: checksum(name) for name in names}
