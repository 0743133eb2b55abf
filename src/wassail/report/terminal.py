"""An evaluation on the terminal: the table of attacks, both sides where radii were certified,
findings, one headline.
"""

from __future__ import annotations

from typing import Any

from wassail.evaluation.conditions import conditions
from wassail.evaluation.result import Row
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import others_population, population_sentence
from wassail.evaluation.units import units_text
from wassail.network import versions
from wassail.report.landmarks import LEAD
from wassail.report.landmarks import terminal_table as landmarks_table
from wassail.report.others import DEFINITIONS as OTHERS_DEFINITIONS
from wassail.report.others import terminal_table as others_table
from wassail.report.others import terms
from wassail.report.population import DEFINITIONS as POPULATION_DEFINITIONS
from wassail.report.population import advice, terminal_table
from wassail.threat import box_text, ceil_percent, floor_percent, show
from wassail.zoo.classes import classes_text

DEFINITIONS = """\
Omega_p: all distributions within Wasserstein-p distance eps of the data; at order inf every sample
may move by eps.
{share}: mass of the adversarial distribution that is {kept}, rounded up;
{tie}. Lower = stronger. WDA moves the share 1/kappa of every sample by up to kappa^(1/p) eps.
WDA++, nearest and other attacks for the nearest flip spend the budget on the nearest flips first;
nearest is our engine, WDA++ the paper's. W-PGD moves all samples at once. Attacks with a ball for
every sample (APGD, AutoAttack, A3, ...) answer Omega_inf; pooled, their flips serve all.
spent: what the flips cost, as a share of eps. Points that moved and flipped nothing are left out:
the {share} is the same without them (Distribution.spent; Distribution.cost counts them).
F + B: forward and backward passes, mean per sample that was correct to begin with.
95 %: interval for all inputs that the samples were drawn from; its coverage is guaranteed."""
SANDWICH_DEFINITIONS = """\
certified: proved. Every distribution in Omega_p(eps) has at least this {share}, because no point
within a sample's radius is {wrong}; rounded down.
attacked: all attacks pooled. The truth lies between the two.
gap: what is not known, in percentage points; largest: over all eps.
50 % at eps: the {share} falls to one half somewhere between these two budgets."""


def defined(run: Evaluation, text: str) -> str:
    """Definitions in the words of a run."""
    words = run.words
    return text.format(share=words.share, kept=words.kept, wrong=words.wrong, tie=words.tie)


def console() -> Any:
    """Where results are printed: tables are never wrapped."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_evaluation(run: Evaluation) -> None:
    """Everything a person wants to see at the end of a run."""
    _print_attacks(run)
    if run.radii is not None:
        _print_sandwich(run)
    out = console()
    named = classes_text(run.classes, run.info.get("data") or {})
    if named is not None:
        out.print(_plain(named))
    sentence = population_sentence(run)
    if sentence is not None:
        out.print(terminal_table(run, _table))
        out.print(POPULATION_DEFINITIONS)
    if run.others and len(run):
        out.print(others_table(run, _table))
        out.print(f"{_plain(terms(run))}\n{OTHERS_DEFINITIONS}")
    for finding in run.findings:
        if finding.level != "ok":
            out.print(f"[bold]{finding.level}[/bold]: {_plain(finding.text)}")
    out.print(
        f"[bold]{_plain(run.headline)}[/bold] (clean {100 * run.clean:.2f} "
        f"%{_error(run)}):\n{_plain(run.definition)}"
    )
    shown = (*conditions(run), sentence, advice(run), run.others_sentence, others_population(run))
    for text in shown:
        if text is not None:
            out.print(_plain(text))
    out.print(f"[dim]{_plain(made(run))}[/dim]")


def _error(run: Evaluation) -> str:
    """The mean error of a regression beside its clean figure."""
    error = run.mean_error
    return "" if error is None else f", mean absolute error {error:.4g}"


def print_landmarks(run: Evaluation) -> None:
    """Known shifts, their eps and the accuracy under them."""
    out = console()
    out.print(landmarks_table(run, _table))
    out.print(LEAD)


def where(run: Evaluation) -> str:
    """Model, data and threat in one line."""
    units = units_text(run.info.get("data"), run.threat)
    box = box_text(run.threat.domain)
    box = box if units is None else f"eps {show(run.threat.eps)} = {units}"
    budgets = ", ".join(show(eps) for eps in dict.fromkeys(threat.eps for threat in run.threats))
    return (
        f"{run.name} on {len(run)} samples of {run.data}, l{run.threat.norm:g}, eps "
        f"{budgets}, {box}"
    )


def made(run: Evaluation) -> str:
    """Seed and versions."""
    return f"seed {run.info.get('seed')}, " + ", ".join(
        f"{k} {v}" for k, v in (run.info.get("versions") or versions()).items()
    )


def _print_attacks(run: Evaluation) -> None:
    share = "accuracy %" if run.criterion is None else "right %"
    table = _table("attack", "over", (share, "95 %", "spent", "F + B", "time s"))
    table.add_row(
        "none (clean)",
        "data",
        f"{100 * run.clean:.2f}",
        _span(run.clean_interval),
        "0",
        "1 + 0",
        "",
    )
    several = len({threat.eps for threat in run.threats}) > 1
    before: Row | None = None
    for row in run.rows:
        same = (
            before is not None
            and (before.attack, before.title) == (row.attack, row.title)
            and row.seconds is None
        )
        effort = (
            ("same", "")
            if same
            else (_passes(row), "" if row.seconds is None else f"{row.seconds:.1f}")
        )
        table.add_row(
            _plain(row.title),
            _over(row, several),
            ceil_percent(row.accuracy),
            _span(row.interval),
            _spent(row),
            *effort,
        )
        before = row
    table.add_section()
    for row in run.best:
        bold = f"[bold]{ceil_percent(row.accuracy)}"
        table.add_row(
            f"[bold]{row.title}",
            _over(row, several),
            bold,
            _span(row.interval),
            _spent(row),
            "",
            "",
        )
    out = console()
    out.print(f"[bold]{_plain(where(run))}[/bold]")
    out.print(table)
    out.print(_plain(defined(run, DEFINITIONS)))


def _print_sandwich(run: Evaluation) -> None:
    assert run.exact is not None
    several = len({threat.eps for threat in run.threats}) > 1
    table = _table("over", None, ("certified %", "attacked %", "gap", "largest gap", "50 % at eps"))
    for row in run.best:
        curve = run.curve(row.threat.order)
        (certified, attacked), (gap, at) = curve(row.threat.eps), curve.largest_gap()
        table.add_row(
            _over(row, several),
            f"[bold]{floor_percent(certified)}",
            f"[bold]{ceil_percent(attacked)}",
            f"{100 * (attacked - certified):.2f}",
            f"{100 * gap:.2f} at {at:.3g}",
            f"{curve.inverse(0.5, 'certified'):.3g}..{curve.inverse(0.5):.3g}",
        )
    seconds = run.certificate.get("seconds")
    spent = "" if seconds is None else f", {seconds:.1f} s"
    exact = f"{int(run.exact.sum())} of {len(run)} exact"
    how = (
        f"{run.certificate.get('method')}, {run.certificate.get('arithmetic', 'exact')} arithmetic"
    )
    out = console()
    out.print(f"[bold]From both sides[/bold] (radii by {_plain(how)}, {exact}{spent})")
    out.print(table)
    out.print(_plain(defined(run, SANDWICH_DEFINITIONS)))


def _table(first: str, second: str | None, rest: tuple[str, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (first, second):
        if name is not None:
            table.add_column(name, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _over(row: Row, several: bool) -> str:
    return f"Omega_{row.threat.order:g}" + (f"({show(row.threat.eps)})" if several else "")


def _spent(row: Row) -> str:
    return f"{100 * row.cost / row.threat.eps:.1f} %"


def _passes(row: Row) -> str:
    return f"{row.forwards:.0f} + {row.backwards:.0f}"


def _span(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.1f}..{100 * interval[1]:.1f}"


def _plain(text: str) -> str:
    """Text of a run as it is: square brackets would be taken for styles, control characters for
    commands to the terminal.
    """
    from rich.markup import escape

    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def points_text(run: Evaluation, file: str) -> str:
    """How many of the points that were given are flips, and how many are the nearest known."""
    row = next(row for row in run.rows if row.attack == "points")
    right = int((run.predicted == run.y).sum())
    mine = run.methods.index("points") if "points" in run.methods else -1
    nearest = (run.found_by == mine) & (run.distances > 0) & run.distances.isfinite()
    return (
        f"{''.join(c if c.isprintable() else '?' for c in file)}: of {len(run)} points "
        f"{round(row.flipped * right)} are flips of samples that were right, looked at again, and "
        f"{int(nearest.sum())} are the nearest flips known and were used."
    )
