"""A hook of mkdocs: two pages are files of the repository, and every page says its version.

The site has the changelog and the guide for contributors. In docs/ there is a line in the place of
each; here it is exchanged for the file, with links that lead to the pages of the site.
"""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
}
# Files that are no page of the site: their links become plain text.
NO_PAGES = ("README.md", "CITATION.cff", "LICENSE", "notebooks/")


def on_config(config: Any) -> Any:
    """Put the version below every page, and the address where a workflow publishes the site.

    Args:
        config: mkdocs' configuration.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config.copyright = f"wassail {version}, MIT licence"
    owner, slash, name = os.environ.get("GITHUB_REPOSITORY", "").partition("/")
    if slash:
        config.site_url = f"https://{owner.lower()}.github.io/{name}/"
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page: mkdocs calls this for each.

    Args:
        markdown: text of the file in docs/.
        page: mkdocs' page; `page.file.src_uri` is its path in docs/.
    """
    place = page.file.src_uri
    source = PAGES.get(place)
    return markdown if source is None else relinked((ROOT / source).read_text(), place)


def relinked(text: str, place: str) -> str:
    """A text of the repository's root with links as seen from a page of docs/.

    Args:
        text: Markdown.
        place: path of the page in docs/.
    """
    folder = posixpath.dirname(place)

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        if target.startswith(NO_PAGES):
            return label
        if re.match(r"\w+:|#", target):
            return found[0]
        file, hash_sign, anchor = target.partition("#")
        for page, source in PAGES.items():
            file = page if file == source else file
        seen = posixpath.relpath(file.removeprefix("docs/"), folder)
        return f"{mark}[{label}]({seen}{hash_sign}{anchor})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)]+)\)", link, text)
