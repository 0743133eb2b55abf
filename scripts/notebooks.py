"""Write the notebooks from the tutorials: notebooks/NAME.ipynb from docs/tutorials/NAME.md.

    python scripts/notebooks.py [--check]

A tutorial is text with blocks of Python; each becomes a cell, without outputs. Blocks of the
language `text` are what a block of Python prints; they and pictures stand in the tutorial only.
`--check`: write nothing, and end with code 1 if a notebook is not what its tutorial says.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"^!\[.*\]\(.*\)\n\n?", re.MULTILINE)
LINK = re.compile(r"\]\((?!http)([^)]+)\)")


def tutorials() -> list[Path]:
    """The pages that are notebooks, too."""
    folder = ROOT / "docs" / "tutorials"
    return sorted(path for path in folder.glob("*.md") if path.stem != "index")


def cells(text: str) -> list[tuple[str, str]]:
    """The parts of a tutorial in their order: kind ("markdown", "python", "text") and source.

    Args:
        text: of the page.
    """
    found = []
    end = 0
    for block in FENCE.finditer(text):
        found.append(("markdown", text[end : block.start()]))
        found.append((block[1], block[2]))
        end = block.end()
    found.append(("markdown", text[end:]))
    return [(kind, source.strip("\n")) for kind, source in found if source.strip()]


def notebook(name: str, text: str) -> str:
    """The notebook of a tutorial, as JSON.

    Args:
        name: of the tutorial.
        text: of the page.
    """
    made = []
    for kind, source in cells(PICTURE.sub("", text)):
        if kind == "text":
            continue
        cell = {
            "cell_type": "code" if kind == "python" else "markdown",
            "id": f"{name}-{len(made)}",
            "metadata": {},
            "source": _relinked(source).splitlines(keepends=True),
        }
        if kind == "python":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _relinked(source: str) -> str:
    """Links as seen from notebooks/: to the pages, but to the other notebooks where they are."""
    names = {path.name for path in tutorials()}

    def link(found: re.Match[str]) -> str:
        target = found[1]
        if target in names:
            return f"]({target.removesuffix('.md')}.ipynb)"
        place = "" if target.startswith("../") else "tutorials/"
        return f"](../docs/{place}{target.removeprefix('../')})"

    return LINK.sub(link, source)


def main(arguments: list[str]) -> int:
    """Write the notebooks, or compare them."""
    stale = []
    for page in tutorials():
        path = ROOT / "notebooks" / f"{page.stem}.ipynb"
        text = notebook(page.stem, page.read_text())
        if "--check" in arguments:
            stale += [] if path.exists() and path.read_text() == text else [path.name]
        else:
            path.write_text(text)
    if stale:
        print(f"not what the tutorials say: {', '.join(stale)}; run scripts/notebooks.py.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
