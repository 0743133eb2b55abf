"""The pages of the site: each has a place, each link leads somewhere, each recipe runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import wassail as ws
from support.files import ROOT, script

DOCS = ROOT / "docs"
HOWTO = sorted(path.stem for path in (DOCS / "howto").glob("*.md") if path.stem != "index")
MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
site_pages = script("site_pages")


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
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(navigation()) == sorted(pages)


def test_every_benchmark_page_is_linked_from_what_is_measured() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    measured = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    pages = next(part["Measured"] for part in measured if "Measured" in part)
    overview = (DOCS / "measured.md").read_text()
    for page in set(placed(pages)) - {"measured.md"}:
        assert f"({page})" in overview, page


def headings(text: str) -> set[str]:
    """The anchors of the titles of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    words = (re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles)
    return {re.sub(r"[\s-]+", "-", title) for title in words}


def text_of(page: Path) -> str:
    """A page as the site shows it."""
    source = site_pages.PAGES.get(page.relative_to(DOCS).as_posix())
    return page.read_text() if source is None else site_pages.relinked((ROOT / source).read_text())


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md")), ids=str
)
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


@pytest.mark.parametrize("name", HOWTO)
def test_every_recipe_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "howto" / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), names)


def test_nothing_of_the_site_comes_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    for path in (DOCS / "site").glob("*.[cj]s*"):
        assert "http" not in path.read_text(), path.name
    assert "http" not in text.replace("https://wassail", "")
