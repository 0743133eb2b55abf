"""What passes buy: accuracy against the forward and backward passes that were spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail.report.drawing import Axes, Picture, dot_mark, path_mark
from wassail.report.html import LONG, Panel, attacked_percent, render
from wassail.threat import Threat
from wassail.transport.allocation import knapsack

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation


def passes_panel(run: Evaluation) -> Panel | None:
    """A dot for each attack at the headline's threat: passes to the right, accuracy upward.

    Where the run chose the passes of `nearest` itself, a line shows what the samples that it was
    chosen on say for fewer and for more passes.
    """
    dots = [
        (row.forwards + row.backwards, row.accuracy, row.title)
        for row in run.rows
        if row.threat == run.threat and not math.isnan(row.accuracy)
    ]
    if not dots or math.isnan(run.clean):
        return None
    line = [
        (float(passes), drawn_accuracy(distances, run.clean, run.threat))
        for passes, distances in sorted(run.searched.items())
        if len(distances)
    ]
    lead = (
        f"{run.words.share.capitalize()} over {run.told(run.threat)} that each attack reaches, "
        "against the forward and backward passes that it took for a sample that was correct to "
        "begin with. Lower and further left is better."
    )
    if line:
        count = max(len(distances) for distances in run.searched.values())
        lead += (
            f" Dashed: nearest with fewer and more passes, on the {count} samples that its passes "
            "were chosen on."
        )
    drawn = _picture([(1.0, run.clean, "clean"), *dots], line)
    return Panel([render("drawn.html.j2", picture=drawn)], lead)


def _picture(
    dots: Sequence[tuple[float, float, str]], line: Sequence[tuple[float, float]]
) -> Picture:
    """Axes, the dashed line and the dots; the axis of passes is logarithmic.

    Args:
        dots: passes, accuracy and name; the first is the clean accuracy.
        line: passes and accuracy.
    """
    most = max([passes for passes, _, _ in dots] + [passes for passes, _ in line])
    decades = max(1, math.ceil(math.log10(max(most, 1.0))))
    axes = Axes(float(decades))
    marks = [(float(k), f"{10**k:,}") for k in range(decades + 1)]
    parts = axes.frame(marks, "accuracy in % against passes a sample")

    def place(passes: float, share: float) -> tuple[float, float]:
        return axes.at(math.log10(max(passes, 1.0)), share)

    if line:
        parts.append(path_mark("line run run-2 dash-1", [place(*point) for point in line]))
    for number, (passes, share, title) in enumerate(dots):
        words = f"{title[:LONG]}: {attacked_percent(share)} after {passes:,.0f} passes"
        tone = 5 if number == 0 else (number - 1) % 5
        parts.append(dot_mark(f"line run run-{tone}", *place(passes, share), words))
    parts += axes.labels([(*place(passes, share), title[:18]) for passes, share, title in dots])
    return Picture(axes.width, axes.height, "accuracy against passes for each attack", parts)


def drawn_accuracy(distances: Tensor, clean: float, threat: Threat) -> float:
    """The accuracy over a threat if all correct samples were like some of them.

    distances: to the nearest flips of some correct samples, float64 `(n,)`; clean: accuracy without
    a shift, the mass that these samples stand for.
    """
    zero = torch.zeros(1, dtype=torch.float64)
    both = torch.cat([zero, distances])
    each = torch.full_like(distances, clean / len(distances))
    mu = torch.cat([zero + (1 - clean), each])
    if not clean:
        return 0.0
    bought = knapsack(both, threat.eps, threat.order, mu)
    return float((each * (1 - bought[1:])).sum())
