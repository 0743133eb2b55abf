"""The one list of names: every function exists, the documentation and the command line agree."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wassail as ws
from wassail import names
from wassail.attacks import catalogue
from wassail.attacks import nearest as nearest_module
from wassail.cli.parser import main
from wassail.losses import LIPSCHITZ
from wassail.paper import published

DOCS = Path(__file__).parents[1] / "docs"


def table(page: str, heading: str, column: int = 0) -> list[str]:
    """The names in backticks of one column of the first table below a heading."""
    text = (DOCS / page).read_text()
    lines = text[text.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---")) + 1
    found: list[str] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found += re.findall(r"`([^`]+)`", line.split("|")[column + 1])
    return found


@pytest.mark.parametrize("name", names.ATTACKS)
def test_every_attack_has_its_function(name: str) -> None:
    entry = catalogue.find(name)
    assert callable(entry.run) and entry.about and entry.title
    assert entry.orders in ("each", "one", "inf", "above 1")


@pytest.mark.parametrize("name", names.ENGINES)
def test_every_engine_has_its_function(name: str) -> None:
    module, function = names.ENGINES[name].home.split(":")
    found = getattr(importlib.import_module(f"wassail.attacks.{module}"), function)
    assert nearest_module.engine(name) is found


def test_the_documentation_has_the_same_names() -> None:
    assert sorted(table("reference/attacks.md", "# Every attack")) == sorted(names.ATTACKS)
    engines = {"auto", *table("reference/attacks.md", "## Engines of `ws.nearest`")}
    assert engines == set(names.NEAREST_METHODS)
    page = "explanation/how-certificates-work.md"
    assert {"auto", *table(page, "### Methods")} == set(names.RADIUS_METHODS)
    slopes = zip(table(page, "### The four slopes", 1), table(page, "### The four slopes"))
    assert list(slopes) == [(name, symbol) for name, (symbol, _) in names.SLOPES.items()]
    ladder = (DOCS / page).read_text().split("### Lipschitz")[1].split("\n## ")[0]
    rungs = re.findall(r"^\d\. \*\*([\w-]+)\*\*", ladder, re.MULTILINE)
    assert ["auto", *rungs] == list(names.LIPSCHITZ_METHODS)


def test_lists_that_are_tables_of_functions_have_the_same_names() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names.PRECISIONS)
    assert set(names.LOSSES) == set(LIPSCHITZ)
    columns = {column.attack for column in published.PAPER} - {"clean", "all"}
    assert columns <= set(names.ATTACKS)


def test_the_command_line_tells_every_attack(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    listed = re.search(r"any of ([^()]*) \(default: wda", shown)
    assert listed and listed[1].replace("- ", "-").split(", ") == list(names.ATTACKS)


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    for name in ws.__all__:
        assert getattr(ws, name) is not None
    assert set(names.DEFAULT_ATTACKS) <= set(names.ATTACKS)


@pytest.mark.parametrize("name", ws._MOVED)
def test_a_name_that_moved_says_where_it_is(name: str) -> None:
    with pytest.raises(AttributeError, match=f"import {name}") as said:
        getattr(ws, name)
    found: dict[str, object] = {}
    exec(re.search(r"`(.*)`", str(said.value))[1], found)
    assert name in found and not hasattr(ws, name)


def test_the_list_needs_no_torch() -> None:
    code = "import sys; import wassail.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
