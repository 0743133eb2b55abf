"""`make test-mutants`: removes the rounding terms of the certificates one at a time, and runs the tests that must notice.

Prints every mutant that no test notices, and how many there are; the exit code is 1 if there is one. `find.py` finds the
mutants, `table.py` says which tests guard which file. No file is changed: a child process compiles the changed source and
exchanges the code of the one function that differs, before it runs the tests.

Usage: run.py [TEXT ...] [-j WORKERS] [--list] [--verbose] [--seconds LIMIT]
    TEXT: only mutants whose name contains one of these, for example `linear.py` or `Sweep._affine`.
    -j: processes at a time (default 2). --seconds: of one mutant (default 600); a test that hangs counts as one that fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "wassail"
sys.path[:0] = [str(HERE), str(ROOT / "src"), str(ROOT / "tests")]

from find import Mutant, mutants  # noqa: E402
from table import GUARDS, excused, named  # noqa: E402

OPTIONS = ["-x", "-q", "-m", "not slow", "-p", "no:xdist", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]


def exchange(mutant: Mutant) -> None:
    """Gives the function that a mutant changes its new code, wherever it is already in use."""
    module = importlib.import_module("wassail." + mutant.file.removesuffix(".py").replace("/", "."))
    source = (PACKAGE / mutant.file).read_text()
    code = compile(mutant.apply(source), str(PACKAGE / mutant.file), "exec")
    owner: Any = module
    for name in mutant.where.split("."):
        code = next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)
        owner = vars(owner)[name]
        if not isinstance(owner, type):
            break
    for inside in ("fget", "func", "__func__", "__wrapped__"):
        owner = getattr(owner, inside, owner)
    assert owner.__code__.co_code != code.co_code or owner.__code__.co_consts != code.co_consts, "nothing changed"
    owner.__code__ = code


def tested(mutant: Mutant, log: Path, limit: float) -> str:
    """Runs the guards of one mutant in a child process: "alive", "killed" or "hangs"."""
    child = os.fork()
    if not child:
        run_tests(mutant, log)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return {0: "alive", 1: "killed"}.get(code, f"error {code}")
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def run_tests(mutant: Mutant | None, log: Path, more: tuple[str, ...] = ()) -> None:
    """In a child process: the change, and the tests up to the first that fails."""
    code = 4
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if mutant is not None:
            exchange(mutant)
            more = GUARDS[mutant.file]
        import pytest

        code = int(pytest.main([*OPTIONS, *(f"tests/{guard}" for guard in more)]))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def work(todo: list[Mutant], worker: int, workers: int, limit: float, pipe: int) -> None:
    """One worker: every `workers`-th mutant."""
    log = Path(f"/tmp/mutants-{os.getpid()}.log")
    for number in range(worker, len(todo), workers):
        start = time.monotonic()
        verdict = tested(todo[number], log, limit)
        os.write(pipe, f"{number}\t{verdict}\t{time.monotonic() - start:.1f}\n".encode())
    log.unlink(missing_ok=True)


def main() -> int:
    """Reads the command line, shares the mutants among the workers, prints what they report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*")
    parser.add_argument("-j", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    every = [*mutants(PACKAGE, list(GUARDS)), *named(PACKAGE)]
    todo = [m for m in every if not excused(m) and (not arguments.text or any(t in m.name for t in arguments.text))]
    if arguments.list:
        print("\n".join(m.name for m in todo))
        print(f"{len(todo)} mutants, {len(every) - len(todo)} excused or left out")
        return 0
    os.chdir(ROOT)
    prepare()
    end, pipe = os.pipe()
    workers = max(1, min(arguments.j, len(todo)))
    children = []
    for worker in range(workers):
        child = os.fork()
        if not child:
            os.close(end)
            work(todo, worker, workers, arguments.seconds, pipe)
            os._exit(0)
        children.append(child)
    os.close(pipe)
    alive, done, start = [], 0, time.monotonic()
    with os.fdopen(end) as reports:
        for report in reports:
            number, verdict, seconds = report.rstrip().split("\t")
            mutant, done = todo[int(number)], done + 1
            if verdict not in ("killed", "hangs"):
                alive.append(mutant)
            if arguments.verbose or verdict not in ("killed", "hangs"):
                print(f"{verdict}: {mutant.name} ({seconds} s)", flush=True)
    for child in children:
        os.waitpid(child, 0)
    minutes = (time.monotonic() - start) / 60
    print(f"{done} of {len(todo)} mutants run in {minutes:.1f} minutes: {len(alive) or 'none'} alive")
    return 1 if alive or done < len(todo) else 0


def prepare() -> None:
    """Imports everything once, so that a child process has it."""
    import mpmath  # noqa: F401
    import pytest
    import scipy.optimize  # noqa: F401
    import torch

    torch.set_num_threads(1)
    for file in GUARDS:
        importlib.import_module("wassail." + file.removesuffix(".py").replace("/", "."))
    for guards in {guards for guards in GUARDS.values()}:
        for guard in guards:
            sys.path.insert(0, str((ROOT / "tests" / guard).parent))
    del pytest


if __name__ == "__main__":
    sys.exit(main())
