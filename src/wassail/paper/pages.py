"""The pages of the reproduction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wassail.evaluation.run import Evaluation
from wassail.paper.runtime import ORDERS
from wassail.report import html
from wassail.threat import show

if TYPE_CHECKING:
    from wassail.paper.table import Line, Table
    from wassail.report.html import Html


def write_pages(table: Table, folder: str | Path) -> list[Path]:
    """The table as pages: `index.html`, `comparison.html` with all curves beside it, and
    `report.html` in each run's folder.
    """
    from wassail.report.compare import write_comparison
    from wassail.report.page import write_report

    runs = {
        line.folder: Evaluation.load(line.folder) for line in table.done if line.folder is not None
    }
    pages = [write_report(run, place / "report.html") for place, run in runs.items()]
    if runs:
        pages.append(write_comparison(list(runs.values()), Path(folder) / "comparison.html"))
    return [html.save(index(table), Path(folder) / "index.html"), *pages]


def index(table: Table) -> str:
    """The page that opens the others: the paper's table by order, its claims counted, and what
    could not be run.
    """
    from wassail.paper.published import CLEAN, COLUMNS

    parts = []
    for order in ORDERS:
        columns = [CLEAN] + [column for column in COLUMNS if column.order == order]
        what = f"Robust accuracy over Omega_{order:g}, in %; lower is the stronger attack"
        heads = [
            html.tag("th", "Model", scope="col", class_="text"),
            *(column.title for column in columns),
        ]
        rows = [
            html.tag(
                "tr", _model_cell(line), [_figure_cell(line, column.key) for column in columns]
            )
            for line in table.done
        ]
        parts.append(
            html.section(
                f"omega-{order:g}", f"Omega_{order:g}", html.table(what, heads, rows, what)
            )
        )
    said = html.tag("ul", [html.tag("li", text) for text in table.verdicts()])
    parts.append(html.section("claims", "What is claimed of it", said))
    problems = [
        html.tag("li", html.name(line), ": ", line.problem)
        for line in table.rows
        if line.problem is not None
    ]
    if problems:
        parts.append(html.section("problems", "Not run", html.tag("ul", problems)))
    contents = [(f"omega-{order:g}", f"Omega_{order:g}") for order in ORDERS] + [
        ("claims", "Claims")
    ]
    lead = (
        "Every column of the paper's Table 1, and ours: nearest, and the nearest flips of all "
        "attacks pooled. "
    )
    more = html.tag("a", "All curves on one page", href="comparison.html") if table.done else None
    head = [
        html.tag("h1", "The paper's table, made again"),
        html.tag("p", lead, more, class_="lead"),
    ]
    shown = contents + ([("problems", "Not run")] if problems else [])
    return html.document("The paper's table · wassail", head, shown, *parts, wide=True)


def _model_cell(line: Line) -> Html:

    model = html.name(line.model)
    link = (
        model
        if line.folder is None
        else html.tag("a", model, href=f"{line.folder.name}/report.html")
    )
    about = f"l{line.norm:g} {show(line.eps)}, {line.samples} of {line.data}" + (
        "" if line.finished else ", unfinished"
    )
    return html.tag("th", link, html.tag("small", about), scope="row")


def _figure_cell(line: Line, key: str) -> Html:

    cell = line.figures.get(key)
    paper = line.published.get(key)
    beside = None if paper is None else html.tag("small", f"published {paper:.2f}")
    if cell is None:
        return html.number_cell(("–", beside), None)
    low, high = (100 * side for side in cell.interval)
    return html.number_cell(
        (f"{100 * cell.accuracy:.2f}", html.tag("small", f"{low:.1f} to {high:.1f}"), beside),
        cell.accuracy,
    )
