"""How-to and reference pages: every block runs and prints what is shown, every command is one."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from support.files import ROOT, script
from wassail.cli import parser as command_line

DOCS = ROOT / "docs"
run_pages = script("notebooks").run_pages()
site_commands = script("site_commands")
ROOMS = ("howto", "reference")
PAGES = sorted(path for room in ROOMS for path in (DOCS / room).glob("*.md"))
ALL = sorted(DOCS.glob("tutorials/*.md")) + sorted(DOCS.glob("explanation/*.md")) + PAGES
RUN = [page for page in PAGES if re.search(r"^```(python|console)\n", page.read_text(), re.M)]
WORDS = "|".join({path[0] for path, _ in command_line.commands(command_line._parser()) if path})
COMMAND = re.compile(rf"wassail (?:{WORDS})\b[^`\n]*(?:\\\n[^`\n]*)*")
# Pages that only list things: nothing to run.
LISTS = {"index", "attacks", "operators", "untrusted-files", "limitations", "stability"}
LISTS |= {"report-page"}


def name(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


def test_every_page_but_lists_has_something_to_run() -> None:
    assert {page.stem for page in PAGES if page not in RUN} == LISTS


@pytest.mark.parametrize("page", RUN, ids=name)
def test_a_page_prints_what_it_shows(page: Path) -> None:
    assert not run_pages.compare(run_pages.run_page(page.read_text()))


def written_commands(text: str) -> list[list[str]]:
    """Commands of `wassail` on a page, run or not, as words."""
    found = []
    for command in COMMAND.findall(text):
        plain = command.removeprefix("wassail ").replace("\\\n", " ").partition("; ")[0]
        plain = plain.partition(" > ")[0].replace(" ...", "")
        with contextlib.suppress(ValueError):  # a quotation that is cut off
            found.append(shlex.split(plain, comments=True))
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", *ALL], ids=lambda page: page.stem)
def test_options_of_every_command_exist(page: Path) -> None:
    known = {" ".join(path): child for path, child in command_line.commands(whole())}
    for words in written_commands(page.read_text()):
        child = known.get(" ".join(words[:2])) or known.get(words[0])
        assert child is not None, words
        options = [option for action in child._actions for option in action.option_strings]
        for word in words[1:]:
            if re.match(r"--?[a-z]", word):
                assert word in options, f"{word} is no option of wassail {words[0]}"


def whole():
    return command_line._parser()


def test_the_reference_has_every_option_of_every_command() -> None:
    text = site_commands.reference()
    for path, child in command_line.commands(whole()):
        if not path or site_commands._children(child):
            continue
        title = f"## wassail {' '.join(path)}\n"
        assert text.count(title) == 1
        own = text.partition(title)[2].partition("\n## ")[0]
        for action in child._actions:
            for option in action.option_strings:
                if option not in ("-h", "--help") and action.help != "==SUPPRESS==":
                    assert f"{option}" in own, (path, option)


def test_the_hook_fills_the_page() -> None:
    class File:
        src_uri = site_commands.PAGE

    class Page:
        file = File()

    text = (DOCS / site_commands.PAGE).read_text()
    assert text.count(site_commands.MARK) == 1
    filled = site_commands.on_page_markdown(text, page=Page())
    assert site_commands.MARK not in filled
    assert "\n## wassail evaluate\n" in filled
    File.src_uri = "index.md"
    assert site_commands.on_page_markdown(text, page=Page()) == text
    assert "scripts/site_commands.py" in (ROOT / "mkdocs.yml").read_text()


def test_an_option_that_is_none_is_found() -> None:
    assert written_commands("    wassail evaluate M --eps 1 --ress\n") == [
        ["evaluate", "M", "--eps", "1", "--ress"]
    ]
    assert written_commands("`wassail verify RUN MODEL --radii`") == [
        ["verify", "RUN", "MODEL", "--radii"]
    ]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print(site_commands.reference())
    assert "--ress" not in out.getvalue()
