"""Shared fixtures. The real networks live outside the repository: $WASSAIL_ZOO, else
../shared/zoo beside it.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import pytest
import torch

ZOO = Path(os.environ.get("WASSAIL_ZOO", Path(__file__).resolve().parents[2] / "shared" / "zoo"))


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    """The module that loads the real networks and data."""
    if not (ZOO / "zoo.py").exists():
        pytest.skip(f"no real networks at {ZOO}: set WASSAIL_ZOO to the folder that holds zoo.py")
    spec = importlib.util.spec_from_file_location("real_zoo", ZOO / "zoo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(
        int(os.environ.get("WASSAIL_TEST_THREADS", "1"))
    )  # the suite itself runs on several workers
    _same_numbers()


def _same_numbers() -> None:
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.default_generator.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The same for what a file draws when it is imported."""
    if isinstance(collector, pytest.Module):
        _same_numbers()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """The same for fixtures that several tests share, whichever of them comes first."""
    if fixturedef.scope != "function":
        _same_numbers()


@pytest.fixture(autouse=True)
def _modules_of_one_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote is forgotten after it: another test may give the same name to
    another file, and which of them runs first differs from machine to machine.
    """
    before = set(sys.modules)
    yield
    ours = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and file.startswith(ours):
            del sys.modules[name]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(
        f"skipped: {skipped} (see the reasons above)" if skipped else "skipped: 0"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Where tests of a second device are asked for, torch knows it from the start.

    Autograd starts a thread for every device that there is at its first use. So the device must be
    known before, and not at all where tests fork: a process that is forked beside such threads
    cannot differentiate. `make test` runs the two apart.
    """
    if _asks_for_devices(config):
        from support.second_device import registered

        registered()


def _asks_for_devices(config: pytest.Config) -> bool:
    asked = config.getoption("markexpr")
    return "device" in asked and "not device" not in asked


@pytest.fixture(autouse=True)
def _registered(request: pytest.FixtureRequest) -> None:
    """A test of a second device needs the process that was made for it."""
    if request.node.get_closest_marker("device") and not _asks_for_devices(request.config):
        pytest.skip("a second device is there with `-m device` only")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For tests of a second device no file without that mark is read."""
    if not _asks_for_devices(config) or collection_path.suffix != ".py":
        return None
    return True if "mark.device" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_finish() -> None:
    """Thousands of collected tests are looked through at every collection of garbage: they are set
    aside, and it comes less often. That is a fifth of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _all_but_a_few(items: list[pytest.Item]) -> None:
    """Of tests marked `few(count)` all but so many cases become slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for every in cases.values():
        mark = every[0].get_closest_marker("few")
        assert mark is not None
        count = mark.args[0]
        kept = {k * len(every) // count for k in range(count)}
        for k, item in enumerate(every):
            if k not in kept:
                item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow cases become slow tests; a pattern without a case is a mistake."""
    _all_but_a_few(items)
    marked: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for item in items:
        case = item.callspec.id if isinstance(item, pytest.Function) and "[" in item.name else ""
        for mark in item.iter_markers("slow_cases"):
            for pattern in mark.args:
                key = (item.nodeid.split("[")[0], pattern)
                marked.add(key)
                if fnmatchcase(case, pattern):
                    used.add(key)
                    item.add_marker("slow")
    part = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    if not part and marked - used:
        raise pytest.UsageError(f"slow_cases without a case: {sorted(marked - used)}")
