"""Labels that change and other people beside inputs that move: for the terminal, the page, the
model card and the board (THEORY 12).
"""

from __future__ import annotations

import math
from typing import Any

from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import others_population
from wassail.report.html import Cell, Panel, Table, name, said
from wassail.report.sides import CONFIDENCE, Sides, markdown_table, side_cells, sides_at
from wassail.threat import ceil_percent, floor_percent, show

MOST_GROUPS = 40  # of the page; more are told by their number
DEFINITIONS = """\
with others: the same budget also pays for changed labels, at their price each, the worst
subpopulation of the stated share is drawn, and the groups have the worst weights in their ranges.
By arithmetic on the same flips and radii: no attack or proof was made for it."""


def terms(run: Evaluation) -> str:
    """What may change besides inputs, in words.

    run: an evaluation with others.
    """
    return run.others_threats[0].others.removeprefix(", ")


def others_panel(run: Evaluation) -> Panel | None:
    """The panel of the page: one line for each threat, and the ranges of the groups."""
    if not run.others or not len(run):
        return None
    rows = []
    for found in (sides_at(run, threat) for threat in run.others_threats):
        sure = found.population
        all_inputs = [Cell("–"), Cell("–")] if sure is None else side_cells(*sure)
        rows.append([*found.cells, *all_inputs])
    heads = ["Threat", "Certified", "Attacked", "All inputs: at least", "At most"]
    shown = Table(f"{len(rows)} threats, {terms(run)}", heads, rows, "Table with others")
    sentence = said(f"{run.others_sentence}.", "headline")
    lead = DEFINITIONS.replace("\n", " ")
    return Panel([sentence, others_population(run, CONFIDENCE), shown, _groups(run)], lead)


def _groups(run: Evaluation) -> Table | str | None:
    """The ranges of the groups beside their weights among the samples."""
    groups = run.others["groups"]
    if groups is None:
        return None
    if len(groups.names) > MOST_GROUPS:
        return f"{groups}."
    rows = []
    weights = [0.0] * len(groups.names)
    for place, mass in zip(groups.places, run.mu.tolist()):
        weights[place] += mass
    for group, low, high, weight in zip(groups.names, groups.low, groups.high, weights):
        shares = [Cell(f"{100 * v:.2f} %", v) for v in (weight, low, high)]
        rows.append([Cell(name(str(group), 24), kind="head"), *shares])
    heads = ["Group", "Weight among the samples", "Least", "Greatest"]
    return Table("The groups and their weights", heads, rows, "Groups")


def card_lines(run: Evaluation) -> list[str]:
    """The part of a model card, in Markdown; none for a run without others."""
    if not run.others or not len(run):
        return []
    rows = [
        (f"{threat.order:g}", show(threat.eps), *sides_at(run, threat).texts)
        for threat in run.others_threats
    ]
    lines = markdown_table(("order", "eps", "certified", "attacked"), rows)
    sure = others_population(run, CONFIDENCE)
    said = f"**Other people and labels.** {run.others_sentence}." + (f" {sure}" if sure else "")
    return [said, lines]


def feed(run: Evaluation) -> dict[str, Any] | None:
    """The figures for the board's feed, in %, or None."""
    if not run.others or not len(run):
        return None
    found = {}
    for threat in run.others_threats:
        if threat.eps == run.threat.eps:
            found[f"{threat.order:g}"] = fed(sides_at(run, threat))
    return {"terms": terms(run), "orders": found}


def fed(found: Sides) -> dict[str, float | None]:
    """Two figures of the feed in %, rounded to the safe side; None where nothing is known."""
    least, most = found.certified, found.attacked
    return {
        "certified": None if least is None else float(floor_percent(least)),
        "attacked": None if math.isnan(most) else float(ceil_percent(most)),
    }
