"""The pages of the site: each has a place, each link leads somewhere, each recipe runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import wassail as ws
from support.files import ROOT, script

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
SITE = [page for page in PAGES if page.parts[0] != "lab-notes"]
MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
site_pages = script("site_pages")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def placed(nav: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in placed(part)]


def navigation() -> list[str]:
    """Pages in the order of the navigation; tags that only mkdocs knows are not looked at."""
    text = (ROOT / "mkdocs.yml").read_text()
    return placed(yaml.safe_load(text[text.index("\nnav:") :])["nav"])


def test_every_page_has_one_place_in_the_navigation() -> None:
    assert sorted(navigation()) == [page.as_posix() for page in SITE]


def test_every_page_of_a_room_is_linked_from_its_first_page() -> None:
    for room in ("explanation", "results"):
        overview = (DOCS / room / "index.md").read_text()
        for page in sorted((DOCS / room).glob("*.md")):
            assert page.name == "index.md" or f"({page.name})" in overview, page


def test_lab_notes_say_what_they_are_and_are_not_on_the_site() -> None:
    """Their figures may be old: the first line says so, and no page of the site shows them."""
    assert "exclude_docs: |\n  lab-notes/\n" in (ROOT / "mkdocs.yml").read_text()
    for path in (DOCS / "lab-notes").glob("*.md"):
        assert path.read_text().startswith("Notes of earlier measurements; "), path.name


def clicks(start: Path) -> dict[Path, int]:
    """How many links lead from a page to each other one."""
    found = {start: 0}
    row = [start]
    while row:
        page = row.pop(0)
        for link in MARKDOWN_LINK.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_file() and target not in found:
                found[target] = found[page] + 1
                row.append(target)
    return found


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_what_a_reader_looks_for_is_near(start: str) -> None:
    """Install, first figure, own model, which eps, how to read the page, API, theory, results."""
    wanted = ["install", "tutorials/first-evaluation", "howto/load-model", "api/index", "theory"]
    wanted += ["explanation/choosing-eps", "reference/report-page", "results/index"]
    found = clicks(ROOT / start)
    assert all(found.get(DOCS / f"{page}.md", 9) <= 3 for page in wanted), found


def headings(text: str) -> set[str]:
    """The anchors of the titles of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    words = (re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles)
    return {re.sub(r"[\s-]+", "-", title) for title in words}


def test_the_code_cites_sections_of_the_theory_that_exist() -> None:
    """Comments cite them as "THEORY 2a" or "THEORY 2 and 6"."""
    sections = re.findall(r"^##+ (\d+[a-z]?)\. ", (DOCS / "theory.md").read_text(), re.M)
    cited: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = re.sub(r"\s*\n\s*(?:# )?", " ", path.read_text())
        for found in re.findall(r"THEORY (\d+[a-z]?(?:(?:, | and )\d+[a-z]?)*)", text):
            cited.update(re.findall(r"\d+[a-z]?", found))
    assert len(cited) > 8 and cited <= set(sections), sorted(cited - set(sections))


def test_pages_that_the_code_names_exist() -> None:
    named = {
        page
        for path in (ROOT / "src").rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())
    }
    assert named and all((ROOT / page).is_file() for page in named), sorted(named)


def test_files_that_the_architecture_names_exist() -> None:
    text = (DOCS / "project" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`", text)
    rooms = [ROOT / "src" / "wassail", ROOT / "src" / "wassail" / "certificates"]
    rooms += [ROOT / "src" / "wassail" / "evaluation", ROOT]
    assert named
    assert [name for name in named if not any((room / name).is_file() for room in rooms)] == []


def test_formulas_are_drawn_by_files_of_the_site() -> None:
    styles = (DOCS / "site" / "katex" / "katex.min.css").read_text()
    fonts = re.findall(r"url\(([^)]*)\)", styles)
    assert fonts and (DOCS / "site" / "katex" / "LICENSE").is_file()
    assert all((DOCS / "site" / "katex" / font).is_file() for font in fonts)


def text_of(page: Path) -> str:
    """A page as the site shows it."""
    place = page.relative_to(DOCS).as_posix()
    source = site_pages.PAGES.get(place)
    if source is None:
        return page.read_text()
    return str(site_pages.relinked((ROOT / source).read_text(), place))


@pytest.mark.parametrize("page", SITE, ids=str)
def test_every_link_of_the_site_leads_somewhere(page: Path) -> None:
    here = DOCS / page
    for link in MARKDOWN_LINK.findall(text_of(here)):
        if link.startswith(("http:", "https:")):
            continue
        target, _, anchor = link.partition("#")
        found = (here.parent / target).resolve() if target else here
        assert found.is_file() and found.is_relative_to(DOCS), f"{page}: {link}"
        if anchor and found.parent.name != "api":
            assert anchor in headings(text_of(found)), f"{page}: {link}"


def test_the_api_has_every_public_name_once() -> None:
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    names = re.findall(r"^::: wassail\.(\w+)$", text, re.M)
    assert sorted([*names, "inf"]) == sorted(ws.__all__)
    overview = (DOCS / "api" / "index.md").read_text()
    assert set(re.findall(r"\[`(\w+)`\]", overview)) == set(ws.__all__)


def test_every_page_says_its_version_and_where_it_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "Owner/wassail")
    config = site_pages.on_config(SimpleNamespace(site_url=None))
    assert VERSION in config.copyright
    assert config.site_url == "https://owner.github.io/wassail/"
    monkeypatch.delenv("GITHUB_REPOSITORY")
    assert site_pages.on_config(SimpleNamespace(site_url=None)).site_url is None


def test_nothing_of_the_site_comes_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    for path in (DOCS / "site").glob("*.[cj]s*"):
        assert "http" not in path.read_text(), path.name
    assert "http" not in text.replace("https://wassail", "")
