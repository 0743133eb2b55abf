"""Known shifts for the terminal, the page and files."""

from __future__ import annotations

from wassail.evaluation.run import Evaluation
from wassail.report.html import Cell, Panel, Table, percent, proved_cell, spell
from wassail.threat import show

LEAD = (
    "Shifts that people know, with the eps that each of them has. eps: what the change of every "
    "sample costs, an upper bound on the Wasserstein distance. Measured: accuracy on the changed "
    "samples, which can only be at or above what is certified at that eps."
)


def landmarks_table(run: Evaluation) -> Table:
    """One line for each shift, the certified side beside the measured accuracy."""
    rows = []
    first = run.orders[0]
    for landmark in run.landmarks:
        certified = run.curve(first)(landmark.eps[first])[0]
        cells = [
            Cell(landmark.name, kind="head"),
            Cell(percent(landmark.accuracy), landmark.accuracy),
            proved_cell(None if run.radii is None else certified),
        ]
        cells += [Cell(show(landmark.eps[p]), landmark.eps[p]) for p in run.orders]
        rows.append(cells)
    heads = ["Shift", "Measured", f"Certified, p = {spell(first)}"]
    heads += [f"eps, p = {spell(order)}" for order in run.orders]
    return Table(f"{len(rows)} shifts", heads, rows, "Table of known shifts")


def landmarks_panel(run: Evaluation) -> Panel | None:
    """The panel of the page, None if there is no shift."""
    return Panel([landmarks_table(run)], LEAD) if run.landmarks else None
