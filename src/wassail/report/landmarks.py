"""Known shifts for the terminal, the page and files."""

from __future__ import annotations

from typing import Any

from wassail.evaluation.run import Evaluation
from wassail.report.html import Cell, Panel, Table, percent, proved_cell, spell
from wassail.threat import floor_percent, show

LEAD = (
    "Shifts that people know, with the eps that each of them has. eps: what the change of every "
    "sample costs, an upper bound on the Wasserstein distance. Measured: accuracy on the changed "
    "samples, which can only be at or above what is certified at that eps."
)


def terminal_table(run: Evaluation, make: Any) -> Any:
    """A rich table with one line for each shift.

    run: the evaluation, whose certified side stands beside the measured accuracy; make: makes an
    empty table of the given columns.
    """
    orders = run.orders
    heads = tuple(f"eps p={order:g}" for order in orders)
    shown = make("shift", None, ("measured %", "certified %", *heads))
    first = orders[0]
    for landmark in run.landmarks:
        certified = run.curve(first)(landmark.eps[first])[0]
        shown.add_row(
            landmark.name,
            f"{100 * landmark.accuracy:.2f}",
            "" if run.radii is None else floor_percent(certified),
            *(show(landmark.eps[order]) for order in orders),
        )
    return shown


def landmarks_panel(run: Evaluation) -> Panel | None:
    """The panel of the page: one line for each shift, None if there is none."""
    if not run.landmarks:
        return None
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
    return Panel([Table(f"{len(rows)} shifts", heads, rows, "Table of known shifts")], LEAD)
