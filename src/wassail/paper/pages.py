"""The pages of the reproduction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from wassail.evaluation.run import Evaluation
from wassail.paper.runtime import ORDERS
from wassail.report.html import Cell, Head, Panel, Table, document, name, render
from wassail.threat import show
from wassail.writing import save

if TYPE_CHECKING:
    from wassail.paper.table import Line
    from wassail.paper.table import Table as PaperTable


def write_pages(table: PaperTable, folder: str | Path) -> list[Path]:
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
    return [save(Path(folder) / "index.html", index(table)), *pages]


def index(table: PaperTable) -> str:
    """The page that opens the others: the paper's table by order, its claims counted, and what
    could not be run.
    """
    from wassail.paper.published import CLEAN, COLUMNS

    sections = []
    for order in ORDERS:
        columns = [CLEAN] + [column for column in COLUMNS if column.order == order]
        what = f"Robust accuracy over Omega_{order:g}, in %; lower is the stronger attack"
        heads: list[str | Head] = [Head("Model", text=True)]
        heads += [column.title for column in columns]
        rows = [
            [_model_cell(line), *(_figure_cell(line, column.key) for column in columns)]
            for line in table.done
        ]
        panel = Panel([Table(what, heads, rows)])
        sections.append((f"omega-{order:g}", f"Omega_{order:g}", panel))
    said = render("list.html.j2", texts=table.verdicts())
    sections.append(("claims", "What is claimed of it", Panel([said])))
    problems = [
        Markup("{}: {}").format(name(line), line.problem)
        for line in table.rows
        if line.problem is not None
    ]
    if problems:
        listed = render("list.html.j2", texts=problems)
        sections.append(("problems", "Not run", Panel([listed])))
    head = render("paper.html.j2", curves=bool(table.done))
    return document("The paper's table · wassail", head, sections, wide=True)


def _model_cell(line: Line) -> Cell:
    model = name(line.model)
    if line.folder is not None:
        model = Markup('<a href="{}">{}</a>').format(f"{line.folder.name}/report.html", model)
    about = f"l{line.norm:g} {show(line.eps)}, {line.samples} of {line.data}"
    about += "" if line.finished else ", unfinished"
    return Cell(model, small=[about], kind="head")


def _figure_cell(line: Line, key: str) -> Cell:
    cell = line.figures.get(key)
    paper = line.published.get(key)
    beside = "" if paper is None else f"published {paper:.2f}"
    if cell is None:
        return Cell("–", small=[beside])
    low, high = (100 * side for side in cell.interval)
    small = [f"{low:.1f} to {high:.1f}", beside]
    return Cell(f"{100 * cell.accuracy:.2f}", cell.accuracy, small)
