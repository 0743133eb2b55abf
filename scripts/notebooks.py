"""Run the tutorials: their pages get what is printed, and notebooks/ the same with outputs.

    python scripts/notebooks.py [--check] [NAME ...]

A tutorial is text with blocks of Python and of commands (`run_pages.py` says which); each becomes a
cell. Its outputs are stored: what it prints, and how its last value shows itself, picture included.
Tutorials that need the networks of $WASSAIL_ZOO are left out where there are none. `--check`: run
and write nothing, and end with code 1 if a notebook has other cells or prints than its page.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!http)([^)]+)\)")
Cell = dict[str, Any]


def run_pages() -> ModuleType:
    """The script beside this one."""
    if "run_pages" not in sys.modules:
        spec = importlib.util.spec_from_file_location("run_pages", ROOT / "scripts/run_pages.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["run_pages"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["run_pages"])
    return sys.modules["run_pages"]


def tutorials() -> list[Path]:
    """The pages that are notebooks, too."""
    folder = ROOT / "docs" / "tutorials"
    return sorted(path for path in folder.glob("*.md") if path.stem != "index")


def cells(name: str, pieces: list[Any]) -> list[Cell]:
    """The cells of a tutorial, in their order, with the outputs of a page that was run.

    Args:
        name: of the tutorial.
        pieces: of its page.
    """
    made: list[Cell] = []
    for piece in pieces:
        if piece.blank or piece.kind in ("text", "picture"):
            continue
        source, outputs = _content(piece)
        runs = piece.kind != "markdown"
        cell = {
            "cell_type": "code" if runs else "markdown",
            "id": f"{name}-{len(made)}",
            "metadata": {},
            "source": source.strip("\n").splitlines(keepends=True),
        }
        if runs:
            cell |= {"execution_count": None, "outputs": outputs}
        made.append(cell)
    return made


def notebook(made: list[Cell]) -> str:
    """Cells as the JSON of a notebook.

    Args:
        made: by `cells`.
    """
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _content(piece: Any) -> tuple[str, list[Cell]]:
    """Source and outputs of a cell."""
    if piece.kind == "markdown":
        return _relinked(run_pages().NEEDS.sub("", piece.source)), []
    if piece.title is not None:
        return f"%%writefile {piece.title}\n{piece.source}", []
    if piece.kind == "console":
        said = run_pages().commands(piece.source)
        printed = "".join(text for _, text in piece.commands)
        return "\n".join(f"!{command}" for command, _ in said), _stream(printed)
    return piece.source, [*_stream(piece.printed), *_shown(piece.value)]


def _stream(printed: str) -> list[Cell]:
    if not printed:
        return []
    text = printed.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": text}]


def _shown(value: Any) -> list[Cell]:
    if value is None:
        return []
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    kind = "execute_result"
    return [{"data": data, "execution_count": None, "metadata": {}, "output_type": kind}]


def _relinked(source: str) -> str:
    """Links as seen from notebooks/: to the pages, but to the other notebooks where they are."""
    names = {path.name for path in tutorials()}

    def link(found: re.Match[str]) -> str:
        target, hash_, anchor = found[1].partition("#")
        if target in names:
            return f"]({target.removesuffix('.md')}.ipynb)"
        place = "" if target.startswith("../") else "tutorials/"
        return f"](../docs/{place}{target.removeprefix('../')}{hash_}{anchor})"

    return LINK.sub(link, source)


def stale(page: Path) -> bool:
    """Whether a stored notebook has other cells, or other printed lines, than its page.

    Args:
        page: of the tutorial.
    """
    path = ROOT / "notebooks" / f"{page.stem}.ipynb"
    if not path.exists():
        return True
    stored = json.loads(path.read_text())["cells"]
    pages = run_pages()
    pieces = [piece for piece in pages.parts(page.read_text()) if not piece.blank]
    bare = [{**cell, "outputs": []} if "outputs" in cell else cell for cell in stored]
    if bare != cells(page.stem, pieces):
        return True
    printed = [_printed(cell) for cell in stored if "outputs" in cell]
    return not all(pages.agree(now, then) for now, then in zip(printed, _told(pieces)))


def _told(pieces: list[Any]) -> list[str]:
    """What a page shows below each block that is a cell."""
    told = []
    for piece, below in zip(pieces, [*pieces[1:], None]):
        if piece.kind == "console":
            told.append("".join(shown for _, shown in run_pages().commands(piece.source)))
        elif piece.kind not in ("markdown", "text", "picture"):
            told.append(below.source if below is not None and below.kind == "text" else "")
    return told


def _printed(cell: Cell) -> str:
    """What a stored cell printed."""
    streams = (out["text"] for out in cell["outputs"] if out["output_type"] == "stream")
    return "".join("".join(text) for text in streams)


def main(arguments: list[str]) -> int:
    """Run tutorials; write their pages, pictures and notebooks; or compare them."""
    pages = run_pages()
    names = [name for name in arguments if name != "--check"]
    if "--check" in arguments:
        old = [page.stem for page in tutorials() if stale(page)]
        if old:
            print(f"not what the tutorials say: {', '.join(old)}; run scripts/notebooks.py.")
        return 1 if old else 0
    for page in tutorials():
        text = page.read_text()
        asked = page.stem in names if names else True
        missing = pages.needs(text) == "zoo" and "WASSAIL_ZOO" not in os.environ
        if not asked or missing:
            continue
        pieces = pages.refresh(pages.run_page(text))
        pages.draw(pieces, page.parent)
        page.write_text(pages.written(pieces))
        made = notebook(cells(page.stem, pieces))
        (ROOT / "notebooks" / f"{page.stem}.ipynb").write_text(made)
        for sentence in pages.compare(pieces):
            print(f"{page.name}: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
