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
from markupsafe import Markup

from wassail.errors import InputError
from wassail.evaluation.intervals import compare, same_task
from wassail.report.drawing import USUAL, plot
from wassail.report.html import (
    Cell,
    Head,
    Panel,
    Table,
    attacked_percent,
    document,
    interval_text,
    name,
    percent,
    proved,
    render,
    said,
    spell,
)
from wassail.report.panels import unverified
from wassail.report.results import half_text, suggestions, threats_of
from wassail.report.scatter import scatter
from wassail.threat import Threat, show
from wassail.writing import save

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation


def write_comparison(runs: Sequence[Evaluation], path: str | PathLike[str]) -> Path:
    """Write the leaderboard of several runs to `path`, which is returned.

    There is one table and one plot for each norm, box and shape of samples, since budgets mean
    something else in each. The first run of each is the baseline: the others on the same samples
    are compared with it, sample by sample.
    """
    return save(path, comparison(runs))


def comparison(runs: Sequence[Evaluation]) -> str:
    """The page of `write_comparison` as text."""
    if not runs:
        raise InputError("there is no run to compare: give at least one.")
    groups = grouped(runs)
    sections = [
        (f"group-{place}", f"Leaderboard: {title_of(group)}", _group(f"group-{place}", group))
        for place, group in enumerate(groups, 1)
    ]
    title = f"{len(runs)} run{'s' if len(runs) > 1 else ''} compared"
    head = render(
        "compare.html.j2", title=title, apart=len(groups) > 1, unverified=unverified(None)
    )
    return document(f"{title} · wassail", head, sections, wide=True)


def grouped(runs: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """The runs that can be ranked together: of one norm, box, shape of samples and task. Their
    names are told apart.
    """
    groups: dict[tuple[object, ...], list[Evaluation]] = {}
    for run in told_apart(runs):
        own = run.boxes is not None
        key = (run.threat.norm, run.threat.domain, own, *_shape(run), run.words.kept)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def told_apart(runs: Sequence[Evaluation]) -> list[Evaluation]:
    """Runs whose names differ: one that another run has too gets its weights and its folder.

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


def _group(identifier: str, runs: Sequence[Evaluation]) -> Panel:
    """The table and the curves of the runs with one norm, one box and one shape of samples."""
    baseline = runs[0]
    # One column for one order and eps: a run that was not evaluated there has the figure on its
    # curve.
    threats = threats_of(runs)
    ranked = sorted(runs, key=lambda run: -_attacked(run, threats[0]))
    drawn = [run for run in runs if len(run)]
    heads: list[str | Head] = ["#", Head("Model", text=True), "Clean"]
    heads += [Head("Attacked", _short(threat)) for threat in threats]
    heads.append(Head("Difference to the baseline", _short(threats[0])))
    heads.append(Head("50 % at eps", f"p = {spell(threats[0].order)}"))
    rows = [
        _row(rank, _key(drawn, run), run, baseline, threats) for rank, run in enumerate(ranked, 1)
    ]
    share = baseline.words.share
    caption = f"Ranked by attacked {share} at {_short(threats[0])}; {baseline.setting}"
    board = Table(caption, heads, rows, f"Leaderboard, {baseline.setting}")
    told = [*_remarks(runs, threats), *suggestions(runs, threats)]
    remarks = [said(remark, "note") for remark in told]
    dots = scatter(runs, threats[0])
    picture = None if dots is None else render("drawn.html.j2", picture=dots)
    curves = _all_curves(identifier, drawn) if drawn else None
    return Panel([*remarks, board, picture, curves])


def _all_curves(identifier: str, runs: Sequence[Evaluation]) -> object:
    """The curves of all runs on top of each other."""
    keys = [(_key(runs, run), run.data) for run in runs]
    orders = sorted({*(order for run in runs for order in run.orders), *USUAL})
    shown = plot(
        identifier,
        runs,
        orders,
        f"attacked {runs[0].words.share} of every run against eps",
        render("compare_legend.html.j2", keys=keys),
        render("compare_reading.html.j2", keys=[key for key, _ in keys]),
        overlay=True,
    )
    return render("compare_curves.html.j2", plot=shown)


def _shape(run: Evaluation) -> tuple[object, ...]:
    about = run.info.get("data")
    return tuple(about.get("shape") or ()) if isinstance(about, Mapping) else ()


def title_of(runs: Sequence[Evaluation]) -> str:
    """Norm and box, and the data if they are one."""
    names = {run.data for run in runs}
    task = "" if runs[0].criterion is None else f", {runs[0].words.kept}"
    return runs[0].setting + task + (f", {names.pop()[:40]}" if len(names) == 1 else "")


def _short(threat: Threat) -> str:
    return f"p\u00a0=\u00a0{spell(threat.order)}, eps\u00a0=\u00a0{show(threat.eps)}"


def _attacked(run: Evaluation, threat: Threat) -> float:
    value = run.curve(threat.order)(threat.eps)[1]
    return -1.0 if math.isnan(value) else value


def _remarks(runs: Sequence[Evaluation], threats: Sequence[Threat]) -> list[str]:
    """What makes figures of one column less comparable than they look."""
    found = []
    if any(not same_samples(run, runs[0]) for run in runs):
        found.append(
            "Not all runs are on the same samples: their figures differ by the data as well as by "
            "the model, and have no paired difference."
        )
    if any(set(run.threats) != set(threats) for run in runs):
        found.append(
            "Not all runs were evaluated at the same orders and eps. A figure marked † is read off "
            "the run's own curve, whose attacks were run for another eps, and has no interval."
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
    rank: int, key: Markup, run: Evaluation, baseline: Evaluation, threats: Sequence[Threat]
) -> list[Cell]:
    about = Markup("{}, {:,} samples").format(name(run.data, 40), len(run))
    cells = [
        Cell(rank, float(rank)),
        Cell(key, small=[about, _finding(run)], kind="head"),
        Cell(percent(run.clean), run.clean, [interval_text(run.clean_interval)]),
    ]
    nothing = (math.nan, math.nan)
    for threat in threats:
        certified, attacked = run.curve(threat.order)(threat.eps)
        mark = "" if threat in run.threats else " †"
        interval = next((row.interval for row in run.best if row.threat == threat), nothing)
        proof = "" if run.radii is None else f"certified {proved(certified)}"
        small = [interval_text(interval), proof]
        cells.append(Cell(attacked_percent(attacked) + mark, attacked, small))
    cells.append(_difference(run, baseline, threats[0]))
    order = threats[0].order
    half = run.curve(order).inverse(0.5) if len(run) else math.nan
    cells.append(Cell(half_text(run, order) if len(run) else "–", half))
    return cells


def _difference(run: Evaluation, baseline: Evaluation, threat: Threat) -> Cell:
    """The paired difference to the baseline, in points, with its 95 % interval and p-value."""
    if run is baseline:
        return Cell("baseline", 0.0)
    if not same_samples(run, baseline) or not len(run):
        return Cell("other samples")
    found = compare(run, baseline, threat)
    low, high = found.interval
    more = f"{100 * low:+.2f} to {100 * high:+.2f}, p = {found.p_value:.2g}"
    low, high = found.guaranteed
    proof = "proved for all inputs" if low > 0 or high < 0 else ""
    return Cell(f"{100 * found.difference:+.2f}", found.difference, [more, proof])


def _finding(run: Evaluation) -> Markup | None:
    """The first warning, or the first note; None where there is neither."""
    loud = [
        finding
        for level in ("warning", "note")
        for finding in run.findings
        if finding.level == level
    ]
    if not loud:
        return None
    word = "⚠ " if run.warnings else "note: "
    more = f" and {len(loud) - 1} more" if len(loud) > 1 else ""
    return Markup("{}{}{}").format(word, name(loud[0].text, 90), more)


def _key(drawn: Sequence[Evaluation], run: Evaluation) -> Markup:
    """The run's line in the plot, if it has one, and its name."""
    place = next((place for place, other in enumerate(drawn) if other is run), None)
    return render("key.html.j2", place=place, text=name(run.name, 60))
