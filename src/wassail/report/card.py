"""The section of a model card: definition, figure, conditions, what was not checked; and the job
summary of a workflow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from wassail.evaluation.conditions import conditions
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import (
    CONDITIONS,
    NOT_CHECKED,
    Verdict,
    independent,
    population_sentence,
)
from wassail.report.others import card_lines
from wassail.report.sides import CONFIDENCE, markdown_table, percents, sides_at
from wassail.report.units import features_of
from wassail.threat import show
from wassail.writing import visible, without_folders
from wassail.zoo.classes import classes_text


def model_card(run: Evaluation, verdicts: Sequence[Verdict] = ()) -> str:
    """A section for a model card, in Markdown.

    verdicts: the requirements that were checked.
    """
    parts = [
        "## Robustness under shifts of the data",
        f"{_plain(run.name)} on {len(run):,} samples of {_plain(run.data)}. **{run.headline}.**",
    ]
    sentence = population_sentence(run, CONFIDENCE) if len(run) else None
    if sentence is not None:
        parts.append(f"**{sentence}**")
    parts.append(f"**Definition.** {run.definition}")
    if run.criterion is not None:
        error = "" if run.mean_error is None else f"; mean absolute error {run.mean_error:.4g}"
        kept = f"{100 * run.clean:.2f} % are {run.words.kept}"
        parts.append(f"**On the data as they are.** {_plain(kept + error)}.")
    parts += _choices(run)
    named = classes_text(run.classes, run.info.get("data") or {}, len(run.classes or ()))
    if named is not None:
        parts.append(f"**Classes.** {_plain(named)}")
    parts += _units(run)
    parts.append(_table(run))
    parts += card_lines(run)
    if verdicts:
        listed = [
            f"- {'holds' if v else 'FAILS'}: `{v.requirement.text}`: {v.sentence}" for v in verdicts
        ]
        parts.append("**Requirements.**\n\n" + "\n".join(listed))
    tie = f"{run.words.tie[0].upper()}{run.words.tie[1:]}."
    assumed = CONDITIONS if run.criterion is None else (*CONDITIONS[:-1], tie)
    parts.append("**Conditions.**\n\n" + "\n".join(f"- {text}" for text in assumed))
    missing = list(NOT_CHECKED)
    if run.radii is None:
        missing.insert(0, "Nothing is proved: the figures are what the attacks found.")
    missing += [_plain(finding.text) for finding in run.warnings]
    parts.append("**Not checked.**\n\n" + "\n".join(f"- {text}" for text in missing))
    return "\n\n".join([*parts, _made(run)]) + "\n"


def _made(run: Evaluation) -> str:
    """Versions and seed."""
    known = run.info.get("versions")
    listed = known.items() if isinstance(known, Mapping) else ()
    versions = ", ".join(f"{k} {v}" for k, v in listed)
    return _plain(f"Made with {versions}; seed {run.info.get('seed')}.")


def _choices(run: Evaluation) -> list[str]:
    """Weights, boxes and units that the run chose for itself."""
    own = [f"- {_plain(text)}" for text in conditions(run)]
    return ["**The run's own choice.**\n\n" + "\n".join(own)] if own else []


def _units(run: Evaluation) -> list[str]:
    """What a distance is measured in, where each feature has a box and a unit of its own."""
    features = features_of(run)
    if not features:
        return []
    lines = []
    for name, low, high, scale in features:
        unit = f"{scale:.4g}" if scale else "may not move"
        lines.append((_plain(name), f"{low:.4g}", f"{high:.4g}", unit))
    said = "**Units.** Each feature stays in its own box, and is measured in its own unit.\n\n"
    return [said + markdown_table(("feature", "least", "greatest", "unit"), lines)]


def _table(run: Evaluation) -> str:
    sure = independent(run)
    head = ["norm", "order", "eps", "certified", "attacked"]
    head += [f"all inputs, {100 * CONFIDENCE:g} % confidence"] if sure else []
    rows = []
    for threat in run.threats:
        found = sides_at(run, threat)
        cells = [f"l{threat.norm:g}", f"{threat.order:g}", show(threat.eps), *found.texts]
        if found.population is not None:
            least, most = percents(*found.population)
            cells.append(
                f"at most {most}" if least == "none" else f"at least {least}, at most {most}"
            )
        rows.append(cells)
    return markdown_table(head, rows)


def _plain(text: str) -> str:
    """Text out of a run: one line, in which Markdown and HTML find nothing to obey."""
    shown = escape(visible(without_folders(text)), quote=False)
    shown = re.sub(r"([\\`*_\[\]|#!~$@])", r"\\\1", shown)
    return re.sub(r"(?i)(www)\.|:(?=//)", lambda found: f"{found[1] or ''}\\{found[0][-1]}", shown)


def job_summary(run: Evaluation, verdicts: Sequence[Verdict] = ()) -> str:
    """What a workflow shows of a run, in Markdown: the answer first, then the model card.

    verdicts: the requirements that were checked.
    """
    failed = sum(not verdict for verdict in verdicts)
    answer = f"{len(verdicts)} requirements hold" if verdicts else "no requirement was given"
    if failed:
        answer = f"{failed} of {len(verdicts)} requirements FAIL"
    return f"# wassail: {answer}\n\n{model_card(run, verdicts)}\n"
