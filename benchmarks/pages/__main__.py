"""Write docs/results, the picture of the README and the figures of other pages from results/*.json.

    python -m benchmarks.pages [--check]

On any page `<!-- results:glance -->` ... `<!-- /results -->` holds the six rows, and
`<!-- figure:KEY -->` ... `<!-- /figure -->` one figure; KEY is its place in the files, as
`certificates.sdp.sdp_mnist_mlp.verified.percent`, perhaps with a format behind it (`:.1f`).
`--check` writes nothing and tells what differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.code import ROOT
from benchmarks.pages import picture
from benchmarks.pages.content import pages
from benchmarks.pages.glance import glance
from benchmarks.pages.tables import Results

FOLDER = ROOT / "docs" / "results"
BLOCK = re.compile(r"(<!-- results:(\w+) -->\n)(.*?)(<!-- /results -->)", re.S)
FIGURE = re.compile(r"(<!-- figure:(\S+) -->)(.*?)(<!-- /figure -->)", re.S)


def filled(text: str, results: Results) -> str:
    """A page with its marked figures as the files have them."""

    def block(match: re.Match[str]) -> str:
        if match[2] != "glance":
            raise KeyError(f"no block results:{match[2]}: there is results:glance.")
        return match[1] + glance(results) + match[4]

    def figure(match: re.Match[str]) -> str:
        return match[1] + results.figure(match[2]) + match[4]

    return FIGURE.sub(figure, BLOCK.sub(block, text))


def marked(root: Path = ROOT) -> list[Path]:
    """Hand-written pages that quote figures."""
    own = root / "docs" / "results"
    every = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [
        path
        for path in every
        if path.exists()
        and path.parent != own
        and (BLOCK.search(path.read_text()) or FIGURE.search(path.read_text()))
    ]


def written(root: Path = ROOT) -> dict[Path, str]:
    """What every generated page and every page that quotes figures has to hold."""
    results = Results(root / "results")
    found = {root / "docs" / "results" / name: text for name, text in pages(results).items()}
    for path in marked(root):
        try:
            found[path] = filled(path.read_text(), results)
        except KeyError as error:
            raise SystemExit(f"{path.relative_to(root).as_posix()}: {error.args[0]}") from None
    return found


def differences(root: Path = ROOT) -> list[str]:
    """Pages that show something else than the files, one sentence each."""
    found = []
    wanted = written(root)
    own = root / "docs" / "results"
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            name = path.relative_to(root).as_posix()
            found.append(
                f"{name} is not what results/*.json say: run `python -m benchmarks.pages`."
            )
    if picture.differs(Results(root / "results"), root):
        found.append(
            f"{picture.FILE.as_posix()} is drawn from other figures than results/gaps.json has: "
            "run `python -m benchmarks.pages`."
        )
    for path in sorted(own.glob("*.md")):
        if path not in wanted:
            found.append(f"docs/results/{path.name} has no results file behind it: delete it.")
    return found


def main(words: list[str] | None = None) -> int:
    """Write the pages; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages")
    parser.add_argument("--check", action="store_true", help="write nothing, tell what differs")
    options = parser.parse_args(words)
    if options.check:
        found = differences()
        print("\n".join(found) or "all pages are as the files say")
        return 1 if found else 0
    for path, text in written().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(path.relative_to(ROOT))
    results = Results()
    if picture.differs(results):
        picture.draw(results)
        print(picture.FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
