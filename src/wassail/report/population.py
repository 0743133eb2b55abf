"""What the samples say about all inputs like them: for the terminal and the page."""

from __future__ import annotations

from typing import Any

from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import CONDITIONS, costs, independent, population_sentence
from wassail.report.html import (
    Cell,
    Panel,
    Table,
    attacked_percent,
    proved_cell,
    render,
    said,
    spell,
)
from wassail.threat import Threat, ceil_percent, floor_percent, show
from wassail.transport.confidence import samples_needed

CONFIDENCE = 0.95
DEFINITIONS = """\
all inputs: the population that the samples are independent draws from. Each side holds with 95 %
confidence, for all eps and orders at once (exact one-sided Kolmogorov band).
sampling: what a finite number of samples costs. proof gap: what is not known on the samples."""


def advice(run: Evaluation) -> str | None:
    """Whether more samples or more proofs would help more, at the headline's threat."""
    if run.radii is None or not independent(run):
        return None
    sampling, proof = costs(run.curve(run.threat.order), run.threat.eps, CONFIDENCE)
    if max(sampling, proof) < 0.005:
        return None
    if sampling >= proof:
        need = samples_needed(max(sampling / 2, 1e-3), CONFIDENCE)
        return f"Sampling costs more than the proof gap: {need:,} samples would halve it."
    return "The proof gap costs more than sampling: certify longer before you label more data."


def terminal_table(run: Evaluation, make: Any) -> Any:
    """A rich table with one line for each threat.

    run: the evaluation, with samples of equal weight; make: makes an empty table of the given
    columns.
    """
    columns = ("at least %", "at most %", "sampling", "proof gap")
    shown = make("all inputs", None, columns)
    for threat in run.threats:
        low, high, sampling, proof = _figures(run, threat)
        known = run.radii is not None
        shown.add_row(
            f"Omega_{threat.order:g}({show(threat.eps)})",
            f"[bold]{floor_percent(low)}" if known else "",
            ceil_percent(high),
            f"{100 * sampling:.2f}" if known else "",
            f"{100 * proof:.2f}" if known else "",
        )
    return shown


def population_panel(run: Evaluation) -> Panel | None:
    """The panel of the page: one line for each threat, the sentence, the conditions."""
    sentence = population_sentence(run, CONFIDENCE)
    if sentence is None:
        return None
    known = run.radii is not None
    rows = []
    for threat in run.threats:
        low, high, sampling, proof = _figures(run, threat)
        costs_of = [Cell(f"{100 * v:.2f}", v) if known else Cell("–") for v in (sampling, proof)]
        cells = [
            Cell(f"p = {spell(threat.order)}, eps {show(threat.eps)}", kind="head"),
            proved_cell(low if known else None),
            Cell(attacked_percent(high), high),
            *costs_of,
        ]
        rows.append(cells)
    heads = ["Threat", "At least", "At most", "Sampling costs", "Proof gap costs"]
    shown = Table(f"{len(rows)} threats", heads, rows, "Table of the population")
    assumed = render("list.html.j2", texts=CONDITIONS)
    headline = said(sentence, "headline")
    return Panel([headline, shown, advice(run), assumed], DEFINITIONS.replace("\n", " "))


def _figures(run: Evaluation, threat: Threat) -> tuple[float, float, float, float]:
    curve = run.curve(threat.order)
    low, high = curve.population(CONFIDENCE)(threat.eps)
    return low, high, *costs(curve, threat.eps, CONFIDENCE)
