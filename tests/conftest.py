"""Shared fixtures. The real networks live outside the repository: $WASSAIL_ZOO, else
../shared/zoo beside it.
"""

import importlib.util
import os
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
    asked = " ".join([config.getoption("markexpr"), *config.args])
    if "device" in asked and "not device" not in asked:
        from support.second_device import registered

        registered()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a second device are marked by their names."""
    for item in items:
        if "device" in item.path.name or "device" in item.name:
            item.add_marker("device")
