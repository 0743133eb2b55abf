"""Several runs on one page: a leaderboard, their curves on top of each other, and paired
differences where the samples agree.

Distances in different norms or boxes are different quantities. Runs are therefore ranked within one
norm and box only, and every column is for one order and one eps; what else differs between the runs
of a table is said above it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wassail.errors import InputError
from wassail.evaluation.intervals import compare, same_task
from wassail.report.drawing import plot
from wassail.report.html import (
    Html,
    attacked_percent,
    document,
    name,
    number_cell,
    percent,
    proved,
    save,
    section,
    spell,
    table,
    tag,
)
from wassail.report.panels import unverified
from wassail.report.scatter import scatter
from wassail.threat import Threat, show

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation


def write_comparison(runs: Sequence[Evaluation], path: str | PathLike[str]) -> Path:
    """Write the leaderboard of several runs to `path`, which is returned.

    There is one table and one plot for each norm, box and shape of samples, since budgets mean
    something else in each. The first run of each is the baseline: the others on the same samples
    are compared with it, sample by sample.
    """
    return save(comparison(runs), path)


def comparison(runs: Sequence[Evaluation]) -> str:
    """The page of `write_comparison` as text."""
    if not runs:
        raise InputError("there is no run to compare: give at least one.")
    runs = told_apart(runs)
    groups: dict[tuple[object, ...], list[Evaluation]] = {}
    for run in runs:
        own = run.boxes is not None
        key = (run.threat.norm, run.threat.domain, own, *_shape(run), run.words.kept)
        groups.setdefault(key, []).append(run)
    parts = [_group(f"group-{place}", group) for place, group in enumerate(groups.values(), 1)]
    contents = [(f"group-{place}", _title(group)) for place, group in enumerate(groups.values(), 1)]
    lead = (
        "Accuracy under the worst distribution within a Wasserstein ball of the data: at most "
        "the attacked figure, at least "
        "the certified one."
    )
    apart = (
        "The runs are for different norms, boxes, kinds of samples or tasks. A budget or a figure "
        "is another quantity in each, so each has its own table; do not rank across them."
        if len(groups) > 1
        else None
    )
    head = Html(
        tag("h1", f"{len(runs)} run{'s' if len(runs) > 1 else ''} compared")
        + tag("p", lead, class_="lead")
        + unverified(None)
        + (tag("p", apart, class_="headline") if apart else Html(""))
    )
    return document(f"{len(runs)} runs compared · wassail", head, contents, *parts, wide=True)


def told_apart(runs: Sequence[Evaluation]) -> list[Evaluation]:
    """Runs whose names differ: one that another run has too gets its weights and its folder.

    Args:
        runs: evaluations, perhaps with the same names.
    """
    names = Counter((run.name, run.threat.norm, run.data) for run in runs)
    found = []
    for run in runs:
        if names[run.name, run.threat.norm, run.data] > 1:
            weights = (run.info.get("model") or {}).get("weights")
            parts = [run.name]
            parts += [f"weights {str(weights)[:8]}"] if weights else []
            parts += [Path(run.folder).resolve().name] if run.folder else []
            run = replace(run, name=" · ".join(parts))
        found.append(run)
    return found


def _group(identifier: str, runs: Sequence[Evaluation]) -> Html:
    """The table and the curves of the runs with one norm, one box and one shape of samples."""
    baseline = runs[0]
    # One column for one order and eps: a run that was not evaluated there has the figure on its
    # curve.
    threats = list(dict.fromkeys(threat for run in runs for threat in run.threats))
    ranked = sorted(runs, key=lambda run: -_attacked(run, threats[0]))
    drawn = [run for run in runs if len(run)]
    heads: list[object] = ["#", _head("Model", text=True), _head("Data", text=True), "N", "Clean"]
    for threat in threats:
        heads += [_head("Attacked", _short(threat)), _head("Certified", _short(threat))]
        heads += (
            [_head("Difference to the baseline", _short(threat))] if threat is threats[0] else []
        )
    heads.append(_head("Worst finding", text=True))
    rows = [
        _row(rank, _key(drawn, run), run, baseline, threats) for rank, run in enumerate(ranked, 1)
    ]
    remarks = _remarks(runs, threats)
    share = baseline.words.share
    caption = f"Ranked by attacked {share} at {_short(threats[0])}; {baseline.setting}"
    orders = sorted({*(order for run in runs for order in run.orders), 1.0, 2.0, math.inf})
    curves = None
    if drawn:
        legend = tag(
            "ul",
            [tag("li", _key(drawn, run), " on ", name(run.data, 40)) for run in drawn],
            class_="legend",
        )
        curves = plot(
            identifier,
            drawn,
            orders,
            f"attacked {share} of every run against eps",
            legend,
            _reading(drawn),
            overlay=True,
        )
    note = (
        "Thick lines: attacked. Thin lines of the same colour: certified, where the run has radii."
    )
    return section(
        identifier,
        f"Leaderboard: {_title(runs)}",
        [tag("p", remark, class_="note") for remark in remarks],
        table(caption, heads, rows, f"Leaderboard, {baseline.setting}"),
        scatter(runs, threats[0], lambda run: run.name),
        tag("h3", "All curves"),
        tag("p", note, class_="lead"),
        curves,
    )


def _shape(run: Evaluation) -> tuple[object, ...]:
    about = run.info.get("data")
    return tuple(about.get("shape") or ()) if isinstance(about, Mapping) else ()


def _title(runs: Sequence[Evaluation]) -> str:
    """Norm and box, and the data if they are one."""
    names = {run.data for run in runs}
    task = "" if runs[0].criterion is None else f", {runs[0].words.kept}"
    return runs[0].setting + task + (f", {names.pop()[:40]}" if len(names) == 1 else "")


def _head(title: str, above: str = "", *, text: bool = False) -> Html:
    return tag(
        "th",
        tag("small", above) if above else None,
        title,
        scope="col",
        class_="text" if text else None,
    )


def _short(threat: Threat) -> str:
    return f"p = {spell(threat.order)}, eps = {show(threat.eps)}"


def _attacked(run: Evaluation, threat: Threat) -> float:
    value = run.curve(threat.order)(threat.eps)[1]
    return -1.0 if math.isnan(value) else value


def _remarks(runs: Sequence[Evaluation], threats: Sequence[Threat]) -> list[str]:
    """What makes figures of one column less comparable than they look."""
    found = []
    if any(not same_samples(run, runs[0]) for run in runs):
        found.append(
            "Not all runs are on the same samples: their figures differ by the data as well as "
            "by the model, and have no "
            "paired difference."
        )
    if any(set(run.threats) != set(threats) for run in runs):
        found.append(
            "Not all runs were evaluated at the same orders and eps. A figure marked † is read "
            "off the run's own curve, whose "
            "attacks were run for another eps, and has no interval."
        )
    attacks = {frozenset(row.attack for row in run.rows) for run in runs}
    if len(attacks) > 1:
        found.append(
            "The runs used different attacks: a higher attacked accuracy may mean a weaker "
            "attack, not a better model."
        )
    return found


def same_samples(a: Evaluation, b: Evaluation) -> bool:
    """Whether two runs are on the same samples with the same weights, in the same order, so
    that they can be paired.
    """
    same = a.ids == b.ids and torch.equal(a.y, b.y) and torch.equal(a.mu, b.mu)
    return same and same_task(a, b)


def _row(
    rank: int, key: Html, run: Evaluation, baseline: Evaluation, threats: Sequence[Threat]
) -> Html:
    cells = [
        number_cell(rank, float(rank)),
        tag("th", key, scope="row"),
        tag("td", name(run.data, 40), class_="text"),
        number_cell(f"{len(run):,}", float(len(run))),
        number_cell((percent(run.clean), _small(*run.clean_interval)), run.clean),
    ]
    for threat in threats:
        certified, attacked = run.curve(threat.order)(threat.eps)
        mark = "" if threat in run.threats else " †"
        low, high = next(
            (row.interval for row in run.best if row.threat == threat), (math.nan, math.nan)
        )
        cells += [
            number_cell((attacked_percent(attacked) + mark, _small(low, high)), attacked),
            number_cell("–", None)
            if run.radii is None
            else number_cell(proved(certified) + mark, certified),
        ]
        cells += [_difference(run, baseline, threat)] if threat is threats[0] else []
    cells.append(_finding(run))
    return tag("tr", cells)


def _difference(run: Evaluation, baseline: Evaluation, threat: Threat) -> Html:
    """The paired difference to the baseline, in points, with its 95 % interval and p-value."""
    if run is baseline:
        return number_cell("baseline", 0.0)
    if not same_samples(run, baseline) or not len(run):
        return number_cell("other samples", None)
    found = compare(run, baseline, threat)
    low, high = found.interval
    text = f"{100 * found.difference:+.2f}"
    more = f"{100 * low:+.2f} to {100 * high:+.2f}, p = {found.p_value:.2g}"
    low, high = found.guaranteed
    proof = tag("small", "proved for all inputs") if low > 0 or high < 0 else None
    return number_cell((text, tag("small", more), proof), found.difference)


def _finding(run: Evaluation) -> Html:
    """The first warning, or the first note, or that there is neither."""
    loud = [
        finding
        for level in ("warning", "note")
        for finding in run.findings
        if finding.level == level
    ]
    if not loud:
        return tag("td", "✓ in order" if run.findings else "–", class_="text")
    more = f" and {len(loud) - 1} more" if len(loud) > 1 else None
    return tag(
        "td",
        "⚠ " if run.warnings else "note: ",
        name(loud[0].text, 60),
        tag("small", more) if more else None,
        class_="text",
    )


def _small(low: float, high: float) -> Html | None:
    """The interval under its figure."""
    return None if math.isnan(low) else tag("small", f"{100 * low:.2f} – {100 * high:.2f}")


def _key(drawn: Sequence[Evaluation], run: Evaluation) -> Html:
    """The run's line in the plot, if it has one, and its name."""
    place = next((place for place, other in enumerate(drawn) if other is run), None)
    picture = None
    if place is not None:
        line = tag(
            "line",
            class_=f"line run run-{place % 6} dash-{place // 6 % 4}",
            x1="0",
            y1="5",
            x2="30",
            y2="5",
        )
        picture = tag("svg", line, viewBox="0 0 30 10", aria_hidden="true")
    return tag("span", picture, tag("span", name(run.name, 60)), class_="key")


def _reading(runs: Sequence[Evaluation]) -> Html:
    """The figures of every run at the eps of the slider: filled in by the script."""
    rows = []
    for place, run in enumerate(runs):
        figures = [
            tag("td", tag("data", value="", data_read=f"{place}:{side}"))
            for side in ("certified", "attacked", "gap")
        ]
        rows.append(tag("tr", tag("th", _key(runs, run), scope="row"), figures))
    heads = [
        tag("th", head, scope="col")
        for head in ("Model", "Certified, at least", "Attacked, at most", "Not known")
    ]
    caption = tag("caption", "At eps ", tag("b", data_eps=True))
    inside = tag(
        "table", caption, tag("thead", tag("tr", heads)), tag("tbody", rows), class_="readings"
    )
    return tag(
        "div",
        inside,
        class_="sideways",
        tabindex="0",
        role="region",
        aria_label="Figures at the chosen eps",
    )
