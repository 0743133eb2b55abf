"""Every block of Python in the README runs as it stands."""

import math
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_block_runs() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def rows(page: str) -> list[list[str]]:
    """The cells of every line of a table."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_figures_are_those_of_the_page() -> None:
    """The table is that of `docs/lab-notes/radii.md`, rounded outward to one digit."""
    measured = {
        (row[0], row[3], row[4]): (float(row[5]), float(row[6]))
        for row in rows("docs/lab-notes/radii.md")
        if row[1:3] == ["inf", "100"] and len(row) == 11
    }
    told = rows("README.md")
    assert told
    for network, eps, *pairs in told:
        for order, pair in zip(("inf", "1"), pairs):
            low, high = measured[network, eps, order]
            outward = (math.floor(10 * low) / 10, math.ceil(10 * high) / 10)
            assert tuple(map(float, pair.split(".."))) == outward, (network, order)


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
