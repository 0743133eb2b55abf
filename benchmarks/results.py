"""Measure the figures of the pages: `make results`, or

    python -m benchmarks.results [STAGE ...] [--list] [--budget MINUTES] [--jobs 2] [--only WORD]

Stages run from cheap to dear. A unit that is done is kept and not run again, so a run can be
stopped at any time. In the end, and after each unit, `results/STAGE.json` is written for every
stage, then the pages. `--draft` writes nothing there: figures of code that is not committed do not
belong in a results file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from benchmarks.stage import RESULTS, Stage, Unit, commit, write

STAGES = (
    "lipschitz",
    "certificates",
    "methods",
    "gaps",
    "attacks",
    "autoattack",
    "vnncomp",
    "corruptions",
    "coverage",
    "smoothing",
    "distributions",
    "training",
    "scale",
    "regression",
    "vnnlib",
    "board",
)


def stage_of(name: str) -> Stage:
    """A stage by its name."""
    found: Stage = importlib.import_module(f"benchmarks.stages.{name}").STAGE
    return found


def main(words: list[str] | None = None) -> int:
    """Run what is missing; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results")
    parser.add_argument("stages", nargs="*", default=[], metavar="STAGE", help="default all")
    parser.add_argument("--list", action="store_true", help="what is done, and what is not")
    parser.add_argument(
        "--budget", type=float, default=None, help="start no unit after so many min"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes; default 1")
    parser.add_argument("--only", default="", help="units whose name matches this expression")
    parser.add_argument("--peers", action="store_true", help="only units of other tools")
    parser.add_argument("--draft", action="store_true", help="write no results file")
    options = parser.parse_args(words)
    unknown = sorted(set(options.stages) - set(STAGES))
    if unknown:
        parser.error(f"no stage {unknown[0]!r}: there are {', '.join(STAGES)}.")
    stages = [stage_of(name) for name in STAGES if not options.stages or name in options.stages]
    if options.list:
        show(stages)
        return 0
    if not options.draft and commit().endswith("+"):
        print("src or benchmarks have changes: commit them first, or give --draft.")
        return 1
    failed = run(stages, options)
    if not options.draft:
        for stage in stages:
            save(stage)
    return 1 if failed else 0


def missing(stages: list[Stage], options: argparse.Namespace) -> Iterator[tuple[Stage, Unit]]:
    """Units that can be run and are not done."""
    for stage in stages:
        for unit in stage.units():
            wanted = bool(re.search(options.only, unit.key)) and (
                bool(unit.peer) or not options.peers
            )
            if wanted and stage.answer(unit) is None and stage.runnable(unit):
                yield stage, unit


def run(stages: list[Stage], options: argparse.Namespace) -> int:
    """Run the units that are missing; returns how many failed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    waiting = list(missing(stages, options))
    total = len(waiting)
    failed = 0
    running: dict[Future[str], tuple[Stage, Unit]] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        while waiting or running:
            late = options.budget is not None and time.monotonic() - began > 60 * options.budget
            if late:
                waiting = []
            while waiting and len(running) < options.jobs:
                stage, unit = waiting.pop(0)
                running[pool.submit(measured, stage.name, unit.key)] = (stage, unit)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                stage, unit = running.pop(future)
                try:
                    line = future.result()
                except Exception as error:
                    failed += 1
                    line = f"failed: {error}"
                place = total - len(waiting) - len(running)
                print(f"[{place}/{total}] {stage.name} {unit.key}: {line}", flush=True)
    return failed


def measured(stage: str, key: str) -> str:
    """Run one unit, in a process of its own."""
    found = stage_of(stage)
    unit = next(unit for unit in found.units() if unit.key == key)
    try:
        return f"{found.measure(unit):.1f} s"
    except Exception:
        raise RuntimeError(traceback.format_exc(limit=-4)) from None


def save(stage: Stage) -> None:
    """Write the results file of a stage, if there is something to write."""
    record = stage.record()
    if record["units"]["done"]:
        write(RESULTS / f"{stage.name}.json", json.dumps(record, indent=1) + "\n")
        done, planned = record["units"]["done"], record["units"]["planned"]
        print(f"results/{stage.name}.json: {done} of {planned} units")


def show(stages: list[Stage]) -> None:
    """One line for each stage, and the units that are missing."""
    for stage in stages:
        units = stage.units()
        done = [unit for unit in units if stage.answer(unit) is not None]
        print(f"{stage.name}: {len(done)} of {len(units)} units, {stage.seconds():.0f} s")
        for unit in units:
            if unit not in done:
                print(f"    {unit.key}" + ("" if stage.runnable(unit) else ", its tool is missing"))


if __name__ == "__main__":
    sys.exit(main())
