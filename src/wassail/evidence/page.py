"""The page of a pack: `evidence.html`, which prints as a document.

The template is jinja2's with every value escaped. The page has no script and no network. It follows
from `evidence.json` and the curves of the run.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from wassail.evaluation.run import Evaluation
from wassail.report.drawing import axis_end, still, unit_of
from wassail.report.html import visible
from wassail.threat import ceil_percent, floor_percent

KINDS = (
    ("requirement", "Requirements"),
    ("clean", "On the data"),
    ("certified", "Certified: no distribution of the set does worse"),
    ("attacked", "Attacked: a distribution of the set that does so"),
    ("population", "All inputs, by the samples"),
    ("subpopulation", "Other people and labels"),
    ("class", "Each class"),
    ("group", "Each group"),
    ("landmark", "Known shifts"),
)


def page(record: Mapping[str, Any], run: Evaluation) -> str:
    """The page.

    Args:
        record: what `document` made.
        run: the evaluation, whose curves are drawn.
    """
    room = resources.files("wassail.evidence")
    style = (room / "page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown, trim_blocks=True
    )
    environment.filters |= {"floor": _floor, "ceil": _ceil}
    template = environment.from_string((room / "page.html.jinja").read_text("utf-8"))
    frameworks: dict[str, list[Mapping[str, Any]]] = {}
    for line in record["clauses"]:
        frameworks.setdefault(line["framework"], []).append(line)
    return template.render(
        it=record,
        style=Markup(style),
        policy=policy,
        pictures=[Markup(text) for text in pictures(run)],
        kinds=KINDS,
        frameworks=list(frameworks.items()),
    )


def pictures(run: Evaluation) -> list[str]:
    """Both curves of each order, as SVG whose text is escaped.

    Args:
        run: the evaluation.
    """
    ends = {order: axis_end([run.curve(order)], run.threat.eps) for order in run.orders}
    unit = unit_of(run.threat, max(ends.values()))
    return [still([run], order, end, unit, False) for order, end in ends.items()]


def _shown(value: object) -> object:
    """Text with nothing hidden in it: no control characters and no change of direction."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _floor(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{floor_percent(value)} %"


def _ceil(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{ceil_percent(value)} %"
