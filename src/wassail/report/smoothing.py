"""The page of a smoothed model: both sides of its vote and of its random classifier.

It is made of `smoothing.json` alone, so anybody can make it again. See `page` for what a page may
hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.evaluation.smoothed import read_smoothing
from wassail.report.html import (
    LONG,
    Cell,
    Panel,
    Table,
    attacked_percent,
    document,
    flat,
    proved,
    render,
    spell,
)
from wassail.report.panels import shown, unverified, verified_panel
from wassail.threat import show
from wassail.writing import save, without_folders

if TYPE_CHECKING:
    from wassail.evaluation.notes import Verification

SIDES = {
    "vote certified": "Vote, at least",
    "vote attacked": "Vote, at most",
    "random certified": "Random, at least",
    "random attacked": "Random, at most",
    "Kumar": "Kumar et al., at least",
}
WORDS = (
    "All figures are for the smoothed model, which sees its input with Gaussian noise, not for the "
    "bare one.",
    "The vote answers with the class that has more than half of the probability under the noise, "
    "and abstains if none has: an error. The random classifier answers with the class of one draw.",
    "At least: so much stays right under every distribution within Wasserstein distance eps of the "
    "samples. At most: no more stays right under a distribution that was found.",
    "Kumar et al.: the bound of Kumar, Levine and Feizi (2022) for the random classifier, from the "
    "same draws.",
)


def write_smoothing(
    folder: str | PathLike[str], path: str | PathLike[str], verified: Verification | None = None
) -> Path:
    """Write the page of the smoothed model in a folder to `path`, which is returned.

    folder: with the file `smoothing.json`; verified: what `verify_smoothed` found, which the page
    then says.
    """
    about = read_smoothing(folder)
    return save(path, _page(about, verified))


def headline(about: Mapping[str, Any]) -> str:
    """The first budget of the first order in one sentence.

    about: what `smoothing.json` holds.
    """
    row = next((row for row in about["rows"] if row["eps"] > 0), about["rows"][0])
    return (
        f"With noise {float(about['sigma']):g}, over Omega_{row['order']}({show(row['eps'])}) in "
        f"l2, the SMOOTHED model keeps {_between(row, 'vote')} of its votes and "
        f"{_between(row, 'random')} of its single draws right (confidence "
        f"{float(about['confidence']):g} a side)."
    )


def _between(row: Mapping[str, Any], which: str) -> str:
    low, high = (float(row[f"{which} {side}"]) for side in ("certified", "attacked"))
    return f"{proved(low)} to {attacked_percent(high)}".replace("\u00a0", " ")


def _page(about: Mapping[str, Any], verified: Verification | None) -> str:
    orders = list(dict.fromkeys(row["order"] for row in about["rows"]))
    called = without_folders(about["model"])
    head = render(
        "smoothing.html.j2",
        model=f"{called}, smoothed",
        headline=headline(about),
        lead=WORDS[0],
        unverified=unverified(verified),
    )
    tables = [_table([row for row in about["rows"] if row["order"] == order]) for order in orders]
    facts = flat({what: shown(value) for what, value in about.items() if what != "rows"})
    parts = [
        ("sides", "Both sides", Panel(tables)),
        ("words", "What the words mean", Panel(WORDS)),
        ("provenance", "Provenance", Panel([render("provenance.html.j2", facts=facts)])),
    ]
    looked = verified_panel(verified)
    if looked is not None:
        parts.insert(0, ("verified", "Verified", looked))
    return document(f"{called[:LONG]}, smoothed · wassail", head, parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The budgets of one order."""
    order = rows[0]["order"]
    lines = []
    for row in rows:
        cells = [Cell(show(float(row["eps"])), kind="head")]
        for side in SIDES:
            value = float(row[side])
            cells.append(Cell((attacked_percent if "attacked" in side else proved)(value), value))
        lines.append(cells)
    spelled = spell(math.inf if order == "inf" else float(order))
    label = f"Accuracy of the smoothed model, l2, order {spelled}"
    return Table(label, ["eps", *SIDES.values()], lines)
