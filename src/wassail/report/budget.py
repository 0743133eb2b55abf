"""What the budget buys: all orders in one picture, the budget by class, and which class becomes
which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from wassail.report.drawing import axis_end, label_mark, line_mark, ticks, unit_of
from wassail.report.html import (
    Html,
    attacked_percent,
    name,
    number_cell,
    percent,
    section,
    spell,
    table,
    tag,
)
from wassail.threat import show
from wassail.transport.allocation import knapsack

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

ORDERS = (1.0, 2.0, math.inf)
WIDTH, HEIGHT = 720, 300  # of a picture, in its own units
LEFT, RIGHT, TOP, BOTTOM = 44, 700, 12, 256  # of its axes
MOST_CLASSES = 20  # of the table of flips; more do not fit a page


def axes(end: float, marks: list[tuple[float, str]], below: str) -> list[Html]:
    """Rules for accuracies from 0 to 100 %, and an axis with marks below them.

    Args:
        end: where the axis ends.
        marks: places and texts on it.
        below: what the axis is.
    """
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = BOTTOM - (BOTTOM - TOP) * share
        parts.append(line_mark("rule", LEFT, y, RIGHT, y))
        parts.append(label_mark(LEFT - 6, y + 4, f"{100 * share:g}", "end"))
    for value, text in marks:
        x = LEFT + (RIGHT - LEFT) * value / end
        parts.append(line_mark("axis", x, BOTTOM, x, BOTTOM + 5))
        parts.append(label_mark(x, BOTTOM + 18, text, "middle"))
    parts.append(line_mark("axis", LEFT, BOTTOM, RIGHT, BOTTOM))
    parts.append(label_mark((LEFT + RIGHT) / 2, HEIGHT - 6, below, "middle"))
    return parts


def picture(parts: list[Html], label: str) -> Html:
    """A drawing with the words that a screen reader says.

    Args:
        parts: marks.
        label: the words.
    """
    return tag("svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def orders_panel(run: Evaluation) -> Html | None:
    """All three orders in one picture, both sides.

    Args:
        run: the evaluation.
    """
    if not len(run):
        return None
    end = max(axis_end([run.curve(order)], run.threat.eps) for order in ORDERS)
    share = run.words.share
    parts = axes(end, ticks(end, unit_of(run.threat, end), 8), f"{share} in % against eps")
    where = np.linspace(0, end, 121).tolist()
    for place, order in enumerate(ORDERS):
        sides = list(zip(*(run.curve(order)(eps) for eps in where)))
        kinds = [("line", sides[1])]
        if run.radii is not None:
            kinds.append(("line proved", sides[0]))
        for kind, side in kinds:
            points = "L".join(
                f"{LEFT + (RIGHT - LEFT) * eps / end:.1f} {BOTTOM - (BOTTOM - TOP) * height:.1f}"
                for eps, height in zip(where, side)
            )
            parts.append(tag("path", class_=f"{kind} run run-{place} dash-{place}", d=f"M{points}"))
    at = LEFT + (RIGHT - LEFT) * run.threat.eps / end
    parts.append(line_mark("axis", at, TOP, at, BOTTOM))
    parts.append(label_mark(at + 4, TOP + 10, f"eps {show(run.threat.eps)}", "start"))
    keys = []
    for place, order in enumerate(ORDERS):
        line = tag("line", class_=f"line run run-{place} dash-{place}", x1=0, y1=5, x2=30, y2=5)
        mark = tag("svg", line, viewBox="0 0 30 10", aria_hidden="true")
        at_most = attacked_percent(run.curve(order)(run.threat.eps)[1])
        text = f"p = {spell(order)}: at most {at_most} at eps {show(run.threat.eps)}"
        keys.append(tag("li", tag("span", mark, text, class_="key")))
    lead = (
        "Thick: attacked. Thin: certified. A larger order is a smaller set of distributions, so "
        "its curves lie higher: what a budget buys if few samples may take all of it (p = 1), and "
        "if every sample has its own (p = ∞, the point-wise threat)."
    )
    shown = picture(parts, f"{run.words.share} against eps for orders 1, 2 and infinity")
    legend = tag("ul", keys, class_="legend")
    return section("orders", "All orders", tag("figure", shown, legend, class_="plot"), lead=lead)


def class_name(run: Evaluation, label: int) -> Html:
    """A class by its name, or by its number where names are not known.

    Args:
        run: the evaluation.
        label: of the class.
    """
    known = run.classes is not None and 0 <= label < len(run.classes)
    return name(run.classes[label] if known and run.classes is not None else f"class {label}", 24)


def way_name(run: Evaluation, label: int) -> Html:
    """A class, or without classes the way in which a sample fails: "too high".

    Args:
        run: the evaluation.
        label: of the class; or the row that fails, counted from 1, and 0 for none.
    """
    if run.criterion is None:
        return class_name(run, label)
    return name("not moved" if label == 0 else run.criterion.row_text(label), 60)


def budget_panel(run: Evaluation) -> Html | None:
    """Which classes the budget is spent on, and which class becomes which.

    Args:
        run: the evaluation.
    """
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
        share = float(spent[mine].sum()) / total
        mass = float(bought[mine].sum())
        cells = [
            tag("th", way_name(run, label), scope="row"),
            number_cell(percent(share), share),
            number_cell(percent(mass), mass),
            number_cell(percent(float(run.mu[mine].sum())), float(run.mu[mine].sum())),
        ]
        rows.append(tag("tr", cells))
    word = "class" if run.criterion is None else "way to fail"
    heads = [word.capitalize(), "Share of the budget", "Mass that flips", "Mass of these samples"]
    heads[-1] = "Mass of the class" if run.criterion is None else heads[-1]
    lead = (
        f"The worst distribution found for {run.told(threat)}: how much of its cost each {word} "
        "takes, and what is bought with it."
    )
    spent_table = table(f"The budget by {word}", heads, rows, f"The budget by {word}")
    moves = _confusion(run, bought) if run.criterion is None else None
    return section("budget", "What the budget buys", spent_table, moves, lead=lead)


def _confusion(run: Evaluation, bought: torch.Tensor) -> Html | None:
    """The mass that moves from each class to each other one, in % of all mass."""
    seen = sorted({*run.y.tolist(), *run.labels[bought > 0].tolist()})
    if len(seen) > MOST_CLASSES:
        return None
    cell: Callable[[int, int], float] = lambda a, b: float(  # noqa: E731
        bought[(run.y == a) & (run.labels == b)].sum()
    )
    rows = [
        tag(
            "tr",
            tag("th", class_name(run, a), scope="row"),
            [
                number_cell(f"{100 * cell(a, b):.1f}" if cell(a, b) else "", cell(a, b))
                for b in seen
            ],
        )
        for a in seen
    ]
    heads: list[object] = ["from \\ to", *(class_name(run, label) for label in seen)]
    heads = [heads[0], *(tag("th", head, scope="col") for head in heads[1:])]
    title = "Flips: mass in % from the true class to the predicted one"
    return table(title, heads, rows, title)
