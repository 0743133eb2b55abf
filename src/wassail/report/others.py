"""Labels that change and other people beside inputs that move: for the terminal, the page, the
model card and the board (THEORY 12).
"""

from __future__ import annotations

from typing import Any

from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import independent, others_population
from wassail.report.html import Cell, Panel, Table, attacked_percent, name, proved_cell, said, spell
from wassail.threat import Threat, ceil_percent, floor_percent, show

CONFIDENCE = 0.95
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


def figures(run: Evaluation, threat: Threat) -> tuple[float, float, tuple[float, float] | None]:
    """Certified and attacked accuracy, and both sides for all inputs or None.

    run: an evaluation with others; threat: one of its `others_threats`.
    """
    curve = run.others_curve(threat.order)
    sure = curve.population(CONFIDENCE)(threat.eps) if independent(run) else None
    return *curve(threat.eps), sure


def others_panel(run: Evaluation) -> Panel | None:
    """The panel of the page: one line for each threat, and the ranges of the groups."""
    if not run.others or not len(run):
        return None
    known = run.radii is not None
    rows = []
    for threat in run.others_threats:
        low, high, sure = figures(run, threat)
        cells = [
            Cell(f"p = {spell(threat.order)}, eps {show(threat.eps)}", kind="head"),
            proved_cell(low if known else None),
            Cell(attacked_percent(high), high),
            proved_cell(sure[0] if known and sure else None),
            Cell(attacked_percent(sure[1]), sure[1]) if sure else Cell("–"),
        ]
        rows.append(cells)
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
    lines = ["| order | eps | certified | attacked |", "|---|---|---|---|"]
    for threat in run.others_threats:
        low, high, _ = figures(run, threat)
        least = "none" if run.radii is None else f"{floor_percent(low)} %"
        lines.append(
            f"| {threat.order:g} | {show(threat.eps)} | {least} | {ceil_percent(high)} % |"
        )
    sure = others_population(run, CONFIDENCE)
    said = f"**Other people and labels.** {run.others_sentence}." + (f" {sure}" if sure else "")
    return [said, "\n".join(lines)]


def feed(run: Evaluation) -> dict[str, Any] | None:
    """The figures for the board's feed, in %, or None."""
    if not run.others or not len(run):
        return None
    found = {}
    for threat in run.others_threats:
        if threat.eps == run.threat.eps:
            low, high, _ = figures(run, threat)
            found[f"{threat.order:g}"] = {
                "certified": None if run.radii is None else float(floor_percent(low)),
                "attacked": float(ceil_percent(high)),
            }
    return {"terms": terms(run), "orders": found}
