"""The notebooks run from the first cell to the last, and print what the tutorials say."""

from __future__ import annotations

import ast
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from support.files import ROOT, script

NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?")
# Another processor may train another network: figures of the tutorials hold to 10 % or 0.02.
RELATIVE = 0.1
ABSOLUTE = 0.02


notebooks = script("notebooks")
PAGES = [page.stem for page in notebooks.tutorials()]


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            expression = ast.Expression(last.value)  # type: ignore[attr-defined]
            value = eval(compile(expression, "cell", "eval"), names)
    return printed.getvalue(), value


def agree(printed: str, expected: str) -> bool:
    """The same words, and numbers that are near."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", expected).split():
        return False
    pairs = zip(map(float, NUMBER.findall(printed)), map(float, NUMBER.findall(expected)))
    return all(abs(a - b) <= max(RELATIVE * abs(b), ABSOLUTE) for a, b in pairs)


def test_there_are_seven_of_them() -> None:
    known = ["autoattack", "harden", "other-people", "own-model", "regression"]
    known += ["sign-off", "smoothing"]
    assert [*known, "which-eps"] == PAGES
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_it_is_what_the_tutorial_says(name: str) -> None:
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    assert text == notebooks.notebook(name, page.read_text())


@pytest.mark.parametrize("name", PAGES)
def test_it_runs_and_prints_what_the_tutorial_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    parts = notebooks.cells((ROOT / "docs" / "tutorials" / f"{name}.md").read_text())
    kinds = [kind for kind, _ in parts]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = 0
    for place, (kind, source) in enumerate(parts):
        if kind != "python":
            continue
        assert sources.pop(0) == source
        printed, value = run_cell(source, names)
        expected = parts[place + 1][1] if kinds[place + 1 : place + 2] == ["text"] else ""
        assert agree(printed, expected), f"{source}\nprints\n{printed}"
        if hasattr(value, "_repr_html_"):
            shown += 1
            assert value._repr_html_().startswith("<div>")
    assert not sources
    assert shown >= 1, "no cell shows a result"


def test_links_lead_somewhere() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                continue
            for link in re.findall(r"\]\(([^)#:]+)\)", "".join(cell["source"])):
                assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_other_figures_do_not_agree() -> None:
    assert agree("order 1: 12.3 %", "order 1: 12.1 %")
    assert not agree("order 1: 22.3 %", "order 1: 12.1 %")
    assert not agree("order 1: 12.1 points", "order 1: 12.1 %")
    assert not agree("", "order 1: 12.1 %")
