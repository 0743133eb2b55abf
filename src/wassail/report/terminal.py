"""An evaluation on the terminal: the headline, one table, findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wassail.evaluation.conditions import conditions
from wassail.evaluation.result import Row
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import others_population, population_sentence
from wassail.evaluation.units import units_text
from wassail.network import versions
from wassail.report import results
from wassail.report.compare import grouped, title_of
from wassail.report.landmarks import LEAD, landmarks_table
from wassail.report.population import advice
from wassail.report.sides import sides_at
from wassail.threat import Threat, box_text, ceil_percent, floor_percent, show
from wassail.writing import printable
from wassail.zoo.classes import classes_text

WIDEST = 400  # characters of a line
LEGEND = """\
In %. Over all distributions within Wasserstein-p distance eps of the data. certified: proved, at
least this; attacked: found, at most this; the truth lies between. The glossary says more."""


def console() -> Any:
    """Where results are printed: tables are never cut."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, width=WIDEST)


def print_evaluation(run: Evaluation) -> None:
    """Everything a person wants to see at the end of a run, the headline first."""
    out = console()
    out.print(f"[dim]{_plain(where(run))}[/dim]")
    out.print(f"[bold]{_plain(run.headline)}[/bold] (clean {100 * run.clean:.2f} %{_error(run)})")
    out.print(_plain(run.definition))
    out.print(_results(run))
    if run.radii is not None:
        out.print(_plain(_radii(run)))
    out.print(LEGEND)
    named = classes_text(run.classes, run.info.get("data") or {})
    more = (named, *conditions(run), population_sentence(run), advice(run))
    more = (*more, *_other_eps(run))
    for text in (*more, run.others_sentence, others_population(run)):
        if text is not None:
            out.print(_plain(text))
    for finding in run.findings:
        if finding.level != "ok":
            out.print(f"[bold]{finding.level}[/bold]: {_plain(finding.text)}")
    out.print(f"[dim]{_plain(made(run))}[/dim]")


def _other_eps(run: Evaluation) -> list[str]:
    """An eps to try for each order at which no eps of the run leaves anything."""
    found = []
    for order in run.orders:
        mine = [threat for threat in run.threats if threat.order == order]
        told = results.suggestions([run], mine)
        found += told[:1] if len(told) == len(mine) else []
    return found


def print_comparison(runs: Sequence[Evaluation]) -> None:
    """Several runs: a table for each norm and box, and an eps where a threat tells nothing apart.

    Args:
        runs: evaluations.
    """
    out = console()
    for group in grouped(runs):
        threats = results.threats_of(group)
        heads = [_over(threat, True) for threat in threats]
        half = f"50 % at eps, p={threats[0].order:g}"
        table = table_of("run", None, ("N", "clean", *heads, half))
        for run in group:
            figures = [_between(*results.sides(run, threat)) for threat in threats]
            clean = f"{100 * run.clean:.2f}"
            between = results.half_text(run, threats[0].order) if len(run) else ""
            table.add_row(_plain(run.name), f"{len(run):,}", clean, *figures, between)
        out.print(f"[bold]{_plain(title_of(group))}[/bold], certified..attacked in %")
        out.print(table)
        for text in results.suggestions(group, threats):
            out.print(_plain(text))


def _between(certified: str, attacked: str) -> str:
    return attacked if certified == "–" else f"{certified}..{attacked}"


def _error(run: Evaluation) -> str:
    """The mean error of a regression beside its clean figure."""
    error = run.mean_error
    return "" if error is None else f", mean absolute error {error:.4g}"


def print_landmarks(run: Evaluation) -> None:
    """Known shifts, their eps and the accuracy under them, as on the page."""
    out = console()
    table = landmarks_table(run)
    first, *rest = map(str, table.heads)
    shown = table_of(first, None, tuple(rest))
    for row in table.rows:
        shown.add_row(*(_plain(str(cell.text).replace("\u00a0", " ")) for cell in row))
    out.print(shown)
    out.print(LEAD)


def where(run: Evaluation) -> str:
    """Model, data and threat in one line."""
    units = units_text(run.info.get("data"), run.threat)
    budgets = list(dict.fromkeys(show(threat.eps) for threat in run.threats))
    first = show(run.threat.eps)
    if units is not None and first in budgets:
        budgets[budgets.index(first)] = f"{first} = {units}"
    box = f", {box_text(run.threat.domain)}" if units is None else ""
    return (
        f"{run.name} on {len(run)} samples of {run.data}, l{run.threat.norm:g}, eps "
        f"{', '.join(budgets)}{box}"
    )


def made(run: Evaluation) -> str:
    """Seed and versions."""
    return f"seed {run.info.get('seed')}, " + ", ".join(
        f"{k} {v}" for k, v in (run.info.get("versions") or versions()).items()
    )


def _results(run: Evaluation) -> Any:
    """The table: clean, every attack over every threat, then all of them with what is proved."""
    columns = ("certified", "attacked", "95 %", "50 % at eps", "F + B", "time s")
    table = table_of("attack", "over", columns)
    clean = f"{100 * run.clean:.2f}"
    table.add_row("none (clean)", "data", "", clean, _span(run.clean_interval), "", "1 + 0", "")
    several = len({threat.eps for threat in run.threats}) > 1
    before: Row | None = None
    for row in run.rows:
        known = before is not None and (before.attack, before.title) == (row.attack, row.title)
        effort = ("same", "")
        if not known or row.seconds is not None:
            seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
            effort = (f"{row.forwards:.0f} + {row.backwards:.0f}", seconds)
        over = _over(row.threat, several)
        figure = ceil_percent(row.accuracy)
        table.add_row(_plain(row.title), over, "", figure, _span(row.interval), "", *effort)
        before = row
    table.add_section()
    for row in run.best:
        order = row.threat.order
        certified = run.curve(order)(row.threat.eps)[0]
        table.add_row(
            f"[bold]{row.title}",
            _over(row.threat, several),
            "" if run.radii is None else f"[bold]{floor_percent(certified)}",
            f"[bold]{ceil_percent(row.accuracy)}",
            _span(row.interval),
            results.half_text(run, order),
            "",
            "",
        )
    for threat in run.others_threats if len(run) else ():
        found = sides_at(run, threat)
        proof = "" if found.certified is None else floor_percent(found.certified)
        over = _over(threat, several)
        table.add_row("with others", over, proof, ceil_percent(found.attacked), *[""] * 4)
    return table


def _radii(run: Evaluation) -> str:
    """How the radii were found."""
    seconds = run.certificate.get("seconds")
    spent = "" if seconds is None else f", {seconds:.1f} s"
    exact = 0 if run.exact is None else int(run.exact.sum())
    method = run.certificate.get("method")
    arithmetic = run.certificate.get("arithmetic", "exact")
    return f"radii by {method}, {arithmetic} arithmetic, {exact} of {len(run)} exact{spent}"


def table_of(first: str, second: str | None, rest: tuple[str, ...]) -> Any:
    """An empty table: one or two columns of text, the rest of figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in (first, second):
        if name is not None:
            table.add_column(name, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _over(threat: Threat, several: bool) -> str:
    return f"p={threat.order:g}" + (f" eps {show(threat.eps)}" if several else "")


def _span(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.1f}..{100 * interval[1]:.1f}"


def _plain(text: str) -> str:
    """Text of a run as it is: square brackets would be taken for styles, control characters for
    commands to the terminal.
    """
    from rich.markup import escape

    return escape(printable(text, "\n"))


def points_text(run: Evaluation, file: str) -> str:
    """How many of the points that were given are flips, and how many are the nearest known."""
    row = next(row for row in run.rows if row.attack == "points")
    right = int((run.predicted == run.y).sum())
    mine = run.methods.index("points") if "points" in run.methods else -1
    nearest = (run.found_by == mine) & (run.distances > 0) & run.distances.isfinite()
    return (
        f"{printable(file)}: of {len(run)} points "
        f"{round(row.flipped * right)} are flips of samples that were right, looked at again, and "
        f"{int(nearest.sum())} are the nearest flips known and were used."
    )
