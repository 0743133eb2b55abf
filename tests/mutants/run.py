"""`make test-mutants`: removes the rounding terms of the certificates one at a time, and runs the
tests that must notice.

Prints every mutant that no test notices, and how many there are; the exit code is 1 if there is one
outside the files that are still open. `find.py` finds the mutants, `table.py` says which tests
guard which file. No file is changed: a child process compiles the changed source and exchanges the
code of the one function that differs, before it runs the tests.

A file that the table names and that is gone, or that has terms and is not in the table, stops the
run, and so does an excuse that excuses nothing.

Usage: run.py [TEXT ...] [-j WORKERS] [--list] [--verbose] [--seconds LIMIT]
    TEXT: only mutants whose name contains one of these, for example `linear.py` or `Sweep._affine`.
    -j: processes at a time (default 2). --seconds: of a processor for one mutant (default 600); a
    test that takes more counts as one that fails, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import resource
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

from find import Mutant, module_of, mutants  # noqa: E402
from table import EXCUSED, GUARDS, ONLY_NAMED, OPEN, WITHOUT, excused, named  # noqa: E402

OPTIONS = [
    "-p",
    "no:terminal",
    "-m",
    "not slow",
    "-p",
    "no:xdist",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "--rootdir",
    str(ROOT),
]

# where claims are made
PLACES = (
    "certificates",
    "paper/attention_bounds.py",
    "paper/attention_layout.py",
    "paper/corollary.py",
    "paper/transformer_constants.py",
    "transport",
    "rounding.py",
)
SOURCES = {
    file: (PACKAGE / file).read_text() for file in GUARDS if (PACKAGE / file).exists()
}  # as they were at the start, whatever happens to the files


def out_of_date() -> list[str]:
    """What the table says that is not so: a file that is gone, one that it has not heard of, an
    excuse for nothing.
    """
    wrong = [f"{file}: no such file" for file in (*GUARDS, *OPEN) if not (PACKAGE / file).exists()]
    files = (str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")))
    here = {file: (PACKAGE / file).read_text() for file in files if file.startswith(PLACES)}
    every = mutants(PACKAGE, here)
    unknown = {m.file for m in every if not excused(m)} - {*GUARDS, *WITHOUT}
    wrong += [f"{file}: has rounding terms and no tests that guard them" for file in unknown]
    wrong += [
        f"{key}: excuses nothing" for key in EXCUSED if not any(excused(m) == key for m in every)
    ]
    return wrong


def exchange(mutant: Mutant) -> None:
    """Gives the function that a mutant changes its new code, wherever it is already in use."""
    module = importlib.import_module(module_of(mutant.file))
    if not mutant.where:
        return exchange_constant(mutant, module)
    code = compile(mutant.apply(SOURCES[mutant.file]), str(PACKAGE / mutant.file), "exec")
    owner: Any = module
    for name in mutant.where.split("."):
        code = next(
            part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name
        )
        owner = vars(owner)[name]
        if not isinstance(owner, type):
            break
    for inside in ("fget", "func", "__func__", "__wrapped__"):
        owner = getattr(owner, inside, owner)
    assert owner.__code__.co_code != code.co_code or owner.__code__.co_consts != code.co_consts, (
        "nothing changed"
    )
    owner.__code__ = code


def exchange_constant(mutant: Mutant, module: Any) -> None:
    """The same for a table of numbers of a module, wherever it is already imported."""
    changed = ast.parse(mutant.apply(SOURCES[mutant.file])).body
    statement = next(s for s in changed if s.lineno <= mutant.line <= (s.end_lineno or s.lineno))
    assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    old = vars(module)[statement.targets[0].id]
    new = eval(compile(ast.Expression(statement.value), mutant.file, "eval"), vars(module))
    assert old != new, "nothing changed"
    for other in [m for name, m in sys.modules.items() if name.startswith("wassail")]:
        for name in [k for k, v in vars(other).items() if v is old]:
            setattr(other, name, new)


class Loop:
    """A plugin of pytest that runs the mutants instead of the tests: these are collected once,
    and inherited by each child.
    """

    def __init__(self, todo: list[Mutant], arguments: argparse.Namespace) -> None:
        self.todo = todo
        self.arguments = arguments
        self.alive: list[Mutant] = []
        self.done = 0
        self.seconds = 0.0  # of a processor
        self.broken = False  # in a child: whether a test failed because the change makes no sense

    def pytest_exception_interact(self, call: Any) -> None:
        """A test that fails of a wrong type has not noticed that a number is missing."""
        self.broken |= call.excinfo is not None and call.excinfo.type in (TypeError, AttributeError)

    def pytest_runtestloop(self, session: Any) -> bool:
        """Shares the mutants among the workers and prints what they report."""
        # Not before pytest starts: it warns of its plugins that are imported already.
        for file in {mutant.file for mutant in self.todo}:
            importlib.import_module(module_of(file))
        wrong, self.seconds = self.tested(session, None, [])
        if wrong != "alive":
            print(f"Without any change: {wrong}. Mend that first.")
            return True
        workers = max(1, min(self.arguments.j, len(self.todo)))
        end, pipe = os.pipe()
        children = []
        for worker in range(workers):
            child = os.fork()
            if not child:
                os.close(end)
                self.work(session, range(worker, len(self.todo), workers), pipe)
                os._exit(0)
            children.append(child)
        os.close(pipe)
        with os.fdopen(end) as reports:
            for report in reports:
                number, verdict, seconds = report.rstrip().split("\t")
                mutant = self.todo[int(number)]
                self.done += 1
                self.seconds += float(seconds)
                noticed = verdict.startswith("killed") or verdict == "hangs"
                if not noticed:
                    self.alive.append(mutant)
                if self.arguments.verbose or not noticed:
                    print(f"{verdict}: {mutant.name} ({seconds} s)", flush=True)
        for child in children:
            os.waitpid(child, 0)
        return True

    def work(self, session: Any, numbers: range, pipe: int) -> None:
        """One worker: some of the mutants, and a report of each."""
        recent: list[str] = []  # tests that noticed one, the last first: neighbours fail the same
        for number in numbers:
            verdict, seconds = self.tested(session, self.todo[number], recent)
            name = verdict.removeprefix("killed by ")
            if name != verdict:
                recent = [name, *(other for other in recent if other != name)]
            os.write(pipe, f"{number}\t{verdict}\t{seconds:.1f}\n".encode())

    def tested(self, session: Any, mutant: Mutant | None, recent: list[str]) -> tuple[str, float]:
        """Runs the guards of one mutant in a child process: "alive", "killed by ..." or "hangs",
        and the seconds of a processor that it took.

        None: all guards, of the code as it is. recent: tests that go first.
        """
        end, pipe = os.pipe()
        child = os.fork()
        if not child:
            os.close(end)
            try:
                if mutant is not None:
                    limit = int(self.arguments.seconds)
                    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
                run_tests(session, mutant, self.todo, pipe, self, recent)
            except BaseException as error:
                os.write(pipe, f"error {type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(pipe)
        with os.fdopen(end) as report:
            said = " ".join(report.read().split())
        _, status, usage = os.wait4(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            said = "hangs"
        return said or "died", usage.ru_utime + usage.ru_stime


def run_tests(
    session: Any,
    mutant: Mutant | None,
    todo: list[Mutant],
    pipe: int,
    loop: Loop,
    recent: list[str],
) -> None:
    """In a child process: the change, and the tests up to the first that fails."""
    if mutant is None:
        files = {m.file: m for m in todo}.values()
        items = list(dict.fromkeys(item for m in files for item in guards_of(session, m)))
    else:
        exchange(mutant)
        rank = {name: k for k, name in enumerate(recent)}
        items = sorted(guards_of(session, mutant), key=lambda i: rank.get(i.name, len(rank)))
        assert items, "no test guards it"
    for number, item in enumerate(items):
        following = items[number + 1] if number + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            os.write(pipe, f"{'broken' if loop.broken else 'killed by'} {item.name}".encode())
            return
    os.write(pipe, b"alive")


def guards_of(session: Any, mutant: Mutant) -> list[Any]:
    """The tests of a mutant's file, in the order of the table."""
    found = []
    for guard in GUARDS[mutant.file]:
        file, _, words = guard.partition("::")
        mine = [item for item in session.items if item.nodeid.split("::")[0] == f"tests/{file}"]
        found += [
            item for item in mine if not words or any(word in item.name for word in words.split())
        ]
    return found


def main() -> int:
    """Reads the command line, shares the mutants among the workers, prints what they report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="*")
    parser.add_argument("-j", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    wrong = out_of_date()
    if wrong:
        print("The table is out of date:", *wrong, sep="\n- ")
        return 2
    every = [
        *mutants(PACKAGE, {f: s for f, s in SOURCES.items() if f not in ONLY_NAMED}),
        *named(SOURCES),
    ]
    todo = [
        m
        for m in every
        if not excused(m) and (not arguments.text or any(t in m.name for t in arguments.text))
    ]
    if arguments.list:
        print("\n".join(m.name for m in todo))
        print(f"{len(todo)} mutants, {len(every) - len(todo)} excused or left out")
        return 0
    os.chdir(ROOT)
    import pytest
    import torch

    torch.set_num_threads(1)
    files = dict.fromkeys(
        f"tests/{guard.partition('::')[0]}" for mutant in todo for guard in GUARDS[mutant.file]
    )
    loop = Loop(todo, arguments)
    start = time.monotonic()
    code = pytest.main([*OPTIONS, *files], [loop])
    minutes = (time.monotonic() - start) / 60
    known = [mutant for mutant in loop.alive if mutant.file in OPEN]
    alive = len(loop.alive) - len(known)
    print(
        f"{loop.done} of {len(todo)} mutants run in {minutes:.1f} minutes"
        f" ({loop.seconds / 60:.1f} of a processor): {alive or 'none'} alive",
        end="",
    )
    print(f", and {len(known)} in files that are still open (`OPEN` in table.py)" if known else "")
    return 1 if alive or loop.done < len(todo) or code not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
