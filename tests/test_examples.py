"""The examples run, and say what they promise."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def module(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None and found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def test_a_table_from_csv_to_a_signed_off_figure(capsys) -> None:
    assert module("tabular").main() == 0
    said = capsys.readouterr().out
    assert said.startswith("holds: accuracy>=0.5 at eps 0.005 order 1 confidence 0.95 proved")
    assert "179 samples" in said
    for part in ("**Definition.**", "**Units.**", "**Conditions.**", "**Not checked.**"):
        assert part in said
    assert "ink in row 0" in said
