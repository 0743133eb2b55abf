"""The README and the pages that explain: every block of code runs and prints what stands below it,
and every link leads somewhere.
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.files import ROOT
from wassail.cli.parser import main

TEXT = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# Another processor rounds otherwise, and a search may end a little nearer or farther.
RELATIVE = 0.02


PAGES = ["README.md", "docs/explanation/the-paper.md"]


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Language and text of each block of code that has its output below it, and that output."""
    return re.findall(r"^```(python|sh)\n(.*?)^```\n+```text\n(.*?)^```", text, re.M | re.S)


def agree(printed: str, expected: str) -> bool:
    """The same words, and numbers within 2 %."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", expected).split():
        return False
    pairs = zip(map(float, NUMBER.findall(printed)), map(float, NUMBER.findall(expected)))
    return all(abs(a - b) <= RELATIVE * abs(b) for a, b in pairs)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_prints_what_stands_below_it(page: str) -> None:
    names: dict[str, Any] = {}
    for language, source, expected in blocks((ROOT / page).read_text()):
        printed = io.StringIO()
        with redirect_stdout(printed):
            if language == "python":
                exec(compile(source, page, "exec"), names)
            else:
                assert main(shlex.split(source.replace("\\\n", " "))[1:]) == 0
        lines = printed.getvalue().splitlines()
        if expected.startswith("...\n"):  # the last lines of what a command prints
            expected = expected.removeprefix("...\n")
            lines = lines[-len(expected.splitlines()) :]
        assert agree("\n".join(lines), expected), f"{source}\nprints\n" + "\n".join(lines)


def test_every_block_of_python_has_its_output() -> None:
    texts = {path: path.read_text() for path in (ROOT / "docs" / "explanation").glob("*.md")}
    for path, text in {ROOT / "README.md": TEXT, **texts}.items():
        shown = sum(language == "python" for language, _, _ in blocks(text))
        assert shown == len(re.findall(r"^```python$", text, re.M)), path.name
        assert not shown or relative(path) in PAGES, path.name


def test_other_figures_do_not_agree() -> None:
    assert agree("at least 39.2%", "at least 39.0%")
    assert not agree("at least 39.2%", "at least 41.0%")
    assert not agree("at most 39.2%", "at least 39.2%")


def test_results_have_their_place() -> None:
    """`benchmarks/results.py` writes the table between the two marks."""
    table = TEXT.split("<!-- results:glance -->")[1].split("<!-- /results -->")[0]
    assert sum(line.startswith("| ") for line in table.splitlines()) >= 2


def test_continuous_integration_runs_what_is_said() -> None:
    """The README tells the commands that `.ci/run` runs."""
    commands = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert commands
    for command in commands:
        assert f"`{command}`" in re.sub(r"\s+", " ", TEXT), command


def test_citation_is_that_of_the_file() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"version = {{{citation['version']}}}" in TEXT
    assert citation["title"] in TEXT.replace("{Wasserstein}", "Wasserstein")
    assert citation["references"][0]["title"] in TEXT.replace("{Wasserstein}", "Wasserstein")


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{relative(page)}: {link}"


def relative(page: Path) -> str:
    """A path as seen from the root of the repository."""
    return page.relative_to(ROOT).as_posix()
