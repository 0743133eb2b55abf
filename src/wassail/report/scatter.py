"""Clean against robust accuracy of several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wassail.report.drawing import SHARES, Axes, Picture, dot_mark, line_mark
from wassail.report.html import LONG, attacked_percent, percent, proved
from wassail.threat import show

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation
    from wassail.threat import Threat


def scatter(runs: Sequence[Evaluation], threat: Threat) -> Picture | None:
    """A dot for each run: clean to the right, attacked upward, with a bar down to the certified.

    runs: evaluations in one norm and box; threat: order and eps of the robust accuracy.
    """
    shown = [run for run in runs if len(run) and not math.isnan(run.clean)]
    if len(shown) < 2:
        return None
    axes = Axes(1.0)
    title = f"robust accuracy (p = {threat.order:g}, eps {show(threat.eps)}) against clean, in %"
    parts = axes.frame([(share, f"{100 * share:g}") for share in SHARES], title)
    dots = []
    for place, run in enumerate(shown):
        certified, attacked = run.curve(threat.order)(threat.eps)
        x, high = axes.at(run.clean, attacked)
        text = f"{run.name[:LONG]}: clean {percent(run.clean)}, "
        text += f"at most {attacked_percent(attacked)}"
        tone = f"line run run-{place % 6}"
        if run.radii is not None:
            low = axes.at(run.clean, certified)[1]
            text += f", at least {proved(certified)}"
            parts.append(line_mark(f"{tone} proved", x, high, x, low))
        parts.append(dot_mark(tone, x, high, text))
        dots.append((x, high, run.name[:18]))
    return Picture(axes.width, axes.height, title, parts + axes.labels(dots))
