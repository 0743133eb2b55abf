"""Three pages of the documentation site are files of the repository: a hook of mkdocs.

The start page is the README, and the site has the changelog and the guide for contributors. In
docs/ there is a line in the place of each; here it is exchanged for the file, with links that
lead to the pages of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
# Files that are no page of the site: their links become plain text.
NO_PAGES = ("CITATION.cff", "LICENSE", "notebooks/")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page: mkdocs calls this for each.

    Args:
        markdown: text of the file in docs/.
        page: mkdocs' page; `page.file.src_uri` is its path in docs/.
    """
    source = PAGES.get(page.file.src_uri)
    return markdown if source is None else relinked((ROOT / source).read_text())


def relinked(text: str) -> str:
    """A text of the repository's root with links as seen from docs/.

    Args:
        text: Markdown.
    """
    return re.sub(r"(!?)\[([^]]*)\]\(([^)]+)\)", _link, text)


def _link(found: re.Match[str]) -> str:
    mark, label, target = found.groups()
    if target.startswith(NO_PAGES):
        return label
    for page, source in PAGES.items():
        target = re.sub(rf"^{re.escape(source)}(?=#|$)", page, target)
    return f"{mark}[{label}]({target.removeprefix('docs/')})"
