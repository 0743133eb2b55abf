"""What the budget buys: by class, and which class becomes which."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from markupsafe import Markup

from wassail.report.html import Cell, Head, Panel, Table, name, percent
from wassail.transport.allocation import knapsack

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

MOST_CLASSES = 20  # of the table of flips; more do not fit a page


def class_name(run: Evaluation, label: int) -> Markup:
    """A class by its name, or by its number where names are not known."""
    known = run.classes is not None and 0 <= label < len(run.classes)
    return name(run.classes[label] if known and run.classes is not None else f"class {label}", 24)


def way_name(run: Evaluation, label: int) -> Markup:
    """A class, or without classes the way in which a sample fails: "too high".

    Args:
        run: the evaluation.
        label: of the class; or the row that fails, counted from 1, and 0 for none.
    """
    if run.criterion is None:
        return class_name(run, label)
    return name("not moved" if label == 0 else run.criterion.row_text(label), 60)


def budget_panel(run: Evaluation) -> Panel | None:
    """Which classes the budget is spent on, and which class becomes which."""
    threat = run.threat
    right = run.distances > 0
    bought = knapsack(run.distances, threat.eps, threat.order, run.mu) * right * run.mu
    if not float(bought.sum()):
        return None
    finite = run.distances.isfinite()
    power = 1.0 if threat.order == math.inf else threat.order
    spent = torch.where(finite, bought * run.distances.clamp(max=1e150) ** power, 0.0)
    # Without classes: by the way in which the flips fail.
    kinds = run.y if run.criterion is None else torch.where(bought > 0, run.labels, 0)
    total = float(spent.sum())
    rows = []
    for label in torch.unique(kinds).tolist():
        mine = kinds == label
        shares = (float(spent[mine].sum()) / total, float(bought[mine].sum()))
        figures = [Cell(percent(v), v) for v in (*shares, float(run.mu[mine].sum()))]
        rows.append([Cell(way_name(run, label), kind="head"), *figures])
    word = "class" if run.criterion is None else "way to fail"
    heads = [word.capitalize(), "Share of the budget", "Mass that flips", "Mass of these samples"]
    heads[-1] = "Mass of the class" if run.criterion is None else heads[-1]
    lead = (
        f"The worst distribution found for {run.told(threat)}: how much of its cost each {word} "
        "takes, and what is bought with it."
    )
    moves = _confusion(run, bought) if run.criterion is None else None
    return Panel([Table(f"The budget by {word}", heads, rows), moves], lead)


def _confusion(run: Evaluation, bought: torch.Tensor) -> Table | None:
    """The mass that moves from each class to each other one, in % of all mass."""
    seen = sorted({*run.y.tolist(), *run.labels[bought > 0].tolist()})
    if len(seen) > MOST_CLASSES:
        return None
    rows = []
    for a in seen:
        masses = [float(bought[(run.y == a) & (run.labels == b)].sum()) for b in seen]
        figures = [Cell(f"{100 * mass:.1f}" if mass else "", mass) for mass in masses]
        rows.append([Cell(class_name(run, a), kind="head"), *figures])
    heads: list[str | Head] = ["from \\ to", *(Head(class_name(run, label)) for label in seen)]
    return Table("Flips: mass in % from the true class to the predicted one", heads, rows)
