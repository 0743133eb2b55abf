"""What the samples say about all inputs like them: for the page."""

from __future__ import annotations

from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import CONDITIONS, costs, independent, population_sentence
from wassail.report.html import Cell, Panel, Table, render, said
from wassail.report.sides import CONFIDENCE, side_cells, sides_at
from wassail.transport.confidence import samples_needed

DEFINITIONS = (
    "all inputs: the population that the samples are independent draws from. Each side holds with "
    "95 % confidence, for all eps and orders at once (exact one-sided Kolmogorov band). sampling: "
    "what a finite number of samples costs. proof gap: what is not known on the samples."
)


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


def population_panel(run: Evaluation) -> Panel | None:
    """The panel of the page: one line for each threat, the sentence, the conditions."""
    sentence = population_sentence(run, CONFIDENCE)
    if sentence is None:
        return None
    known = run.radii is not None
    rows = []
    for found in (sides_at(run, threat) for threat in run.threats):
        lost = costs(found.curve, found.threat.eps, CONFIDENCE)
        assert found.population is not None
        cells = [found.cells[0], *side_cells(*found.population)]
        rows.append([*cells, *(Cell(f"{100 * v:.2f}", v) if known else Cell("–") for v in lost)])
    heads = ["Threat", "At least", "At most", "Sampling costs", "Proof gap costs"]
    shown = Table(f"{len(rows)} threats", heads, rows, "Table of the population")
    assumed = render("list.html.j2", texts=CONDITIONS)
    parts = [said(sentence, "headline"), shown, advice(run), assumed]
    return Panel(parts, DEFINITIONS)
