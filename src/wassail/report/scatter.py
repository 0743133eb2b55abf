"""Clean against robust accuracy of several runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wassail.report.budget import BOTTOM, LEFT, RIGHT, TOP, axes, picture
from wassail.report.drawing import label_mark
from wassail.report.html import LONG, Html, attacked_percent, percent, proved, tag, visible
from wassail.threat import show

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation
    from wassail.threat import Threat


def scatter(
    runs: Sequence[Evaluation], threat: Threat, called: Callable[[Evaluation], str]
) -> Html | None:
    """A dot for each run: clean to the right, attacked upward, with a bar down to the certified.

    Args:
        runs: evaluations in one norm and box.
        threat: order and eps of the robust accuracy.
        called: the name of a run.
    """
    shown = [run for run in runs if len(run) and not math.isnan(run.clean)]
    if len(shown) < 2:
        return None
    marks = [(share, f"{100 * share:g}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    title = f"robust accuracy (p = {threat.order:g}, eps {show(threat.eps)}) against clean, in %"
    parts = axes(1.0, marks, title)
    for place, run in enumerate(shown):
        certified, attacked = run.curve(threat.order)(threat.eps)
        x = LEFT + (RIGHT - LEFT) * run.clean
        high = BOTTOM - (BOTTOM - TOP) * attacked
        text = f"{called(run)[:LONG]}: clean {percent(run.clean)}, "
        text += f"at most {attacked_percent(attacked)}"
        tone = f"line run run-{place % 6}"
        if run.radii is not None:
            low = BOTTOM - (BOTTOM - TOP) * certified
            text += f", at least {proved(certified)}"
            parts.append(tag("line", class_=f"{tone} proved", x1=x, y1=high, x2=x, y2=low))
        words = tag("title", visible(text))
        parts.append(tag("circle", words, class_=tone, cx=f"{x:.1f}", cy=f"{high:.1f}", r=4))
        anchor = "end" if x > (LEFT + RIGHT) / 2 else "start"
        side = -8 if anchor == "end" else 8
        parts.append(label_mark(x + side, high + 4, called(run)[:24], anchor))
    return tag("figure", picture(parts, title), class_="plot")
