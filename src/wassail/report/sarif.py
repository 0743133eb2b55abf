"""Requirements that fail as SARIF 2.1.0, for code scanning: a result with the file and the line of
the configuration that asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from wassail.evaluation.notes import Verification
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import Verdict
from wassail.writing import printable, without_folders

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = {
    "requirement": "A requirement on the robustness of the model does not hold.",
    "stored-results": "Results that were stored before are false.",
}


def as_sarif(
    run: Evaluation,
    verdicts: Sequence[Verdict],
    looked: Verification | None = None,
    places: Mapping[str, tuple[str, int]] | None = None,
) -> dict[str, Any]:
    """A SARIF log with one run: a result for each requirement that fails.

    verdicts: the requirements that were checked; looked: what was verified of results that were
    stored before, or None; places: file (relative, with slashes) and line of each requirement's
    text, where known.
    """
    where = places or {}
    results = [
        _result("requirement", f"{verdict.requirement.text}: {verdict.sentence}.", run)
        | _location(verdict, where)
        for verdict in verdicts
        if not verdict
    ]
    false = () if looked is None else looked.problems
    results += [_result("stored-results", text, run) | NOWHERE for text in false]
    driver = {
        "name": "wassail",
        "version": version("wassail"),
        "rules": [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()],
    }
    made = {"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [made]}


NOWHERE: dict[str, Any] = {"locations": [{"logicalLocations": [{"name": "the command line"}]}]}


def _result(rule: str, text: str, run: Evaluation) -> dict[str, Any]:
    about = f"{run.name} on {run.data}"
    said = printable(without_folders(f"{about}: {text}"))
    return {"ruleId": rule, "level": "error", "message": {"text": said}}


def _location(verdict: Verdict, places: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """The line of the configuration; the command line where the requirement is not in a file."""
    known = places.get(verdict.requirement.text)
    if known is None:
        return NOWHERE
    file, line = known
    place = {"artifactLocation": {"uri": file}, "region": {"startLine": line}}
    return {"locations": [{"physicalLocation": place}]}


def lines_of(text: str, file: str, requirements: Sequence[str]) -> dict[str, tuple[str, int]]:
    """File and line of each requirement that a configuration holds on one line.

    file: its path, relative, with slashes; requirements: their texts, with single spaces.
    """
    found: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        plain = " ".join(line.split())
        for asked in requirements:
            if asked in plain and not plain.startswith("#"):
                found.setdefault(asked, (file, number))
    return found
