"""The table of results as in a paper: a row for each run, for LaTeX, CSV, JSON and the terminal."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wassail.threat import Threat, ceil_percent, floor_percent, show
from wassail.writing import cell, rounded_down, rounded_up, visible, without_folders

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


def threats_of(runs: Sequence[Evaluation]) -> list[Threat]:
    """The threats of the runs, each once."""
    return list(dict.fromkeys(threat for run in runs for threat in run.threats))


def reads(run: Evaluation, threat: Threat) -> bool:
    """Whether a run says something about a threat: distances in its norm and box."""
    own = run.threat
    return len(run) > 0 and (own.norm, own.domain) == (threat.norm, threat.domain)


def half_text(run: Evaluation, order: float) -> str:
    """The eps at which the accuracy is down to one half: between two budgets, or at most one."""
    curve = run.curve(order)
    most = curve.inverse(0.5)
    high = "never" if most == math.inf else rounded_up(most, 3)
    if run.radii is None:
        return high if most in (0.0, math.inf) else f"≤ {high}"
    return f"{rounded_down(curve.inverse(0.5, 'certified'), 3)}..{high}"


def records(runs: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """A record for each run and each of its threats; shares, unrounded, None where unknown."""
    found = []
    for run in runs:
        for threat in run.threats:
            curve = run.curve(threat.order)
            certified, attacked = curve(threat.eps)
            known = run.radii is not None
            record: dict[str, Any] = {
                "model": without_folders(run.name),
                "data": without_folders(run.data),
                "samples": len(run),
                "norm": f"{threat.norm:g}",
                "order": f"{threat.order:g}",
                "eps": threat.eps,
                "clean": run.clean,
                "certified": certified if known else None,
                "attacked": attacked,
                "half_certified": curve.inverse(0.5, "certified") if known else None,
                "half_attacked": curve.inverse(0.5),
            }
            for row in run.rows:
                if row.threat == threat:
                    record[f"attack {row.title}"] = row.accuracy
            found.append(record)
    return [{key: finite_or_none(value) for key, value in record.items()} for record in found]


def finite_or_none(value: Any) -> Any:
    """What JSON has a word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(runs: Sequence[Evaluation]) -> str:
    """The records as JSON."""
    return json.dumps(records(runs), indent=1, allow_nan=False) + "\n"


def to_csv(runs: Sequence[Evaluation]) -> str:
    """The records as CSV; numbers are exact, and text is no formula to a spreadsheet."""
    found = records(runs)
    titles = list(dict.fromkeys(key for record in found for key in record))
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow([cell(title) for title in titles])
    for record in found:
        values = [record.get(title) for title in titles]
        texts = [cell(v) if isinstance(v, str) else repr(v) for v in values]
        table.writerow(["" if value is None else text for value, text in zip(values, texts)])
    return file.getvalue()


def to_latex(runs: Sequence[Evaluation]) -> str:
    """A `tabular` for the package booktabs: clean, and both sides at each threat, in %."""
    threats = threats_of(runs)
    norms = {threat.norm for threat in threats}
    above = [""] * 2
    rules = []
    heads = ["Model", "Clean"]
    for place, threat in enumerate(threats):
        order = r"\infty" if threat.order == math.inf else f"{threat.order:g}"
        norm = "" if len(norms) == 1 else rf"$\ell_{{{_norm(threat)}}}$, "
        what = rf"{norm}$p = {order}$, $\varepsilon = {show(threat.eps)}$"
        above.append(rf"\multicolumn{{2}}{{c}}{{{what}}}")
        rules.append(rf"\cmidrule(lr){{{2 * place + 3}-{2 * place + 4}}}")
        heads += ["Certified", "Attacked"]
    lines = [
        *(f"% {_latex(text)}" for text in _remarks(runs)),
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        " & ".join(above) + r" \\",
        "".join(rules),
        " & ".join(heads) + r" \\",
        r"\midrule",
    ]
    for run in runs:
        cells = [_latex(without_folders(run.name)), f"{100 * run.clean:.2f}"]
        for threat in threats:
            cells += [text.replace("–", "--") for text in sides(run, threat)]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def sides(run: Evaluation, threat: Threat) -> tuple[str, str]:
    """Certified and attacked accuracy in %, rounded down and up; a dash where unknown.

    Args:
        run: the evaluation.
        threat: order and eps; one that the run was not evaluated at is read off its curve.
    """
    if not reads(run, threat):
        return "–", "–"
    certified, attacked = run.curve(threat.order)(threat.eps)
    return "–" if run.radii is None else floor_percent(certified), ceil_percent(attacked)


def _norm(threat: Threat) -> str:
    return r"\infty" if threat.norm == math.inf else f"{threat.norm:g}"


def _remarks(runs: Sequence[Evaluation]) -> list[str]:
    """What the table does not show: data and setting of each run."""
    said = "Accuracy in %; certified rounded down, attacked rounded up. Needs the package booktabs."
    each = [
        f"{without_folders(run.name)}: {len(run)} samples of {without_folders(run.data)}, "
        f"{run.setting}, seed {run.info.get('seed')}"
        for run in runs
    ]
    return [said, *each]


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in visible(text))


def suggestions(runs: Sequence[Evaluation], threats: Sequence[Threat]) -> list[str]:
    """A sentence for each threat at which nothing is left of any run: an eps that tells them apart.

    runs: of one norm and box.
    """
    found = []
    for threat in threats:
        mine = [run for run in runs if reads(run, threat) and run.clean > 0]
        curves = [run.curve(threat.order) for run in mine]
        if not mine or any(ceil_percent(curve(threat.eps)[1]) != "0.00" for curve in curves):
            continue
        halves = [curve.inverse(run.clean / 2) for run, curve in zip(mine, curves)]
        eps = float(f"{max(halves):.2g}")
        left = ", ".join(
            f"{ceil_percent(curve(eps)[1])} % of {run.name[:40]}"
            for run, curve in zip(mine, curves)
        )
        found.append(
            f"At p = {threat.order:g}, eps {show(threat.eps)} nothing is left, which tells little: "
            f"try eps {eps:g}, which leaves at most {left}."
        )
    return found
