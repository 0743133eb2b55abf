"""The picture of the README, drawn from results/gaps.json.

The file says in its text what it was drawn from, so that a picture of other figures is found.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from benchmarks.code import ROOT
from benchmarks.measure import INF
from benchmarks.pages.tables import Results, Row
from benchmarks.stages.gaps import curve

FILE = Path("docs", "site", "curve.png")
NETWORK = "mnist_kw_01"
FIELD = "Source"  # of the text in the file


def differs(results: Results, root: Path = ROOT) -> bool:
    """Whether the picture is of other figures than the files have."""
    from PIL import Image

    row = results.row("gaps", "brackets", NETWORK)
    if row is None:
        return False
    path = root / FILE
    if not path.exists():
        return True
    with Image.open(path) as image:
        return image.info.get(FIELD) != digest(row)


def draw(results: Results, root: Path = ROOT) -> None:
    """Certified and attacked accuracy against eps, for three orders."""
    from wassail.transport.picture import draw_sandwich

    row = results.row("gaps", "brackets", NETWORK)
    assert row is not None
    title = f"{NETWORK}, {row['norm']}, {row['images']} images"
    figure = draw_sandwich([curve(row, order) for order in (1.0, 2.0, INF)], title, mark=row["eps"])
    figure.savefig(root / FILE, dpi=110, metadata={FIELD: digest(row)})


def digest(row: Row) -> str:
    """SHA-256 of what is drawn."""
    shown = {key: row[key] for key in ("norm", "eps", "images", "distances", "radii")}
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
