"""Notebooks are what the tutorials say, with outputs that the present code still prints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.networks.files import FOLDER

from support.files import ROOT, script

notebooks = script("notebooks")
run_pages = notebooks.run_pages()
PAGES = {page.stem: page for page in notebooks.tutorials()}
NAMES = [
    "certify",
    "choose-eps",
    "first-evaluation",
    "harden",
    "large-models",
    "regression",
    "robustbench-cifar10",
    "tabular",
]
IMAGE = re.compile(r'src="data:image/png;base64,[^"]*"')


def stored(name: str) -> list[dict[str, Any]]:
    """The cells of a notebook."""
    return json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]


def needs_zoo(name: str) -> bool:
    return run_pages.needs(PAGES[name].read_text()) == "zoo"


def shown(cell: dict[str, Any]) -> str:
    """How the value of a cell shows itself, without its picture."""
    found = [out["data"] for out in cell["outputs"] if out["output_type"] == "execute_result"]
    return IMAGE.sub("", "".join(found[0].get("text/html", []))) if found else ""


def test_the_tutorials_are_known() -> None:
    assert sorted(PAGES) == NAMES
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_its_tutorial_says(name: str) -> None:
    assert not notebooks.stale(PAGES[name])
    outputs = [out for cell in stored(name) for out in cell.get("outputs", [])]
    assert any(out["output_type"] == "stream" for out in outputs)
    assert any("data:image/png" in json.dumps(out) for out in outputs), "no picture is stored"


def run_or_slow(name: str) -> Any:
    """Tutorials of real networks take minutes."""
    return pytest.param(name, marks=pytest.mark.slow) if needs_zoo(name) else name


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [run_or_slow(name) for name in NAMES])
def test_a_tutorial_prints_what_it_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if needs_zoo(name):
        if not (FOLDER / "models").is_dir():
            pytest.skip("no real networks: run `python -m benchmarks.networks fetch`")
        monkeypatch.setenv("WASSAIL_ZOO", str(FOLDER))
    pieces = run_pages.run_page(PAGES[name].read_text())
    assert not run_pages.compare(pieces)
    now = notebooks.cells(name, pieces)
    for old, new in zip(stored(name), now, strict=True):
        if old["cell_type"] == "code":
            assert run_pages.agree(words(shown(new)), words(shown(old)))


def words(html: str) -> str:
    """Text of HTML, a line for each row."""
    return re.sub(r"<[^>]+>", " ", html.replace("</tr>", "\n").replace("</p>", "\n"))


def test_links_lead_somewhere() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in stored(path.stem):
            if cell["cell_type"] == "code":
                continue
            for link in re.findall(r"\]\(([^)#:]+)[)#]", "".join(cell["source"])):
                assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_no_path_of_a_machine_is_stored() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = path.read_text()
        assert str(Path.home()) not in text
        assert os.sep + "tmp" + os.sep not in text
        assert str(ROOT.parent) not in text


def test_other_figures_do_not_agree() -> None:
    agree = run_pages.agree
    assert agree("order 1: 12.3 %\n", "order 1: 12.1 %\n")
    assert not agree("order 1: 22.3 %\n", "order 1: 12.1 %\n")
    assert not agree("order 1: 12.1 points\n", "order 1: 12.1 %\n")
    assert not agree("", "order 1: 12.1 %\n")
    assert not agree("order 1: 12.1 %\nand more\n", "order 1: 12.1 %\n")


def test_dots_stand_for_lines_and_for_text() -> None:
    agree = run_pages.agree
    printed = "first\nsecond 5\nthird, in 7 s\n"
    assert agree(printed, "first\n...\n")
    assert agree(printed, "...\nthird, in ...\n")
    assert agree(printed, "...\nsecond 5\n...\n")
    assert not agree(printed, "...\nsecond 6\n...\n")
    assert not agree(printed, "...\nfourth\n")


def test_what_was_printed_is_filled_in() -> None:
    page = "```python\nprint(2 + 2)\n```\n\nNext.\n\n```console\n$ echo a\nb\n```\n"
    pieces = run_pages.run_page(page)
    assert len(run_pages.compare(pieces)) == 2
    new = run_pages.written(run_pages.refresh(pieces))
    shown = "```text\n4\n```\n\nNext.\n\n```console\n$ echo a\na\n```\n"
    want = f"```python\nprint(2 + 2)\n```\n\n{shown}"
    assert new == want
    assert not run_pages.compare(run_pages.run_page(new))
