"""An evaluation for machines: JSON with a version, and JUnit XML (docs/reference/run-format.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from wassail.evaluation.conditions import conditions
from wassail.evaluation.landmarks import plain
from wassail.evaluation.notes import Verification
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import (
    Verdict,
    costs,
    others_population,
    population_sentence,
)
from wassail.evaluation.units import units_text
from wassail.report.sides import CONFIDENCE, sides_at
from wassail.threat import Threat
from wassail.writing import printable, without_folders
from wassail.zoo.classes import numbers_of

SCHEMA = "wassail/evaluation/1"


def as_json(
    run: Evaluation, verdicts: Sequence[Verdict] = (), looked: Verification | None = None
) -> dict[str, Any]:
    """The figures of a run under names that do not change within one version of the schema.

    verdicts: the requirements that were checked; looked: what was verified of results that were
    stored before, or None.
    """
    return {
        "schema": SCHEMA,
        "model": run.name,
        "data": run.data,
        "samples": len(run),
        "classes": numbers_of(run.classes),
        "headline": run.headline,
        "clean": _number(run.clean),
        "task": _task(run),
        "units": units_text(run.info.get("data"), run.threat),
        "threats": [_threat(run, threat) for threat in run.threats],
        "others": _others(run) if run.others else None,
        "population": population_sentence(run, CONFIDENCE),
        "conditions": list(conditions(run)),
        "requirements": [_verdict(verdict) for verdict in verdicts],
        "holds": all(verdicts),
        "verification": None
        if looked is None
        else {
            "holds": bool(looked),
            "false": list(looked.problems),
            "checked": list(looked.checked),
            "not_checked": list(looked.unchecked),
        },
        "landmarks": plain(run.landmarks),
        "findings": [
            {"name": finding.name, "level": finding.level, "text": without_folders(finding.text)}
            for finding in run.findings
        ],
        "versions": {
            str(name): str(version) for name, version in (run.info.get("versions") or {}).items()
        },
        "seed": run.info.get("seed"),
    }


def schema_text() -> str:
    """The JSON schema of `as_json`, the file `evaluation.schema.json` of this package."""
    return (resources.files("wassail.report") / "evaluation.schema.json").read_text("utf-8")


def as_junit(
    run: Evaluation, verdicts: Sequence[Verdict], looked: Verification | None = None
) -> str:
    """JUnit XML: one test case for each requirement, a failure where it does not hold.

    verdicts: the requirements that were checked; looked: what was verified of results that were
    stored before, or None.
    """
    failed = sum(not verdict for verdict in verdicts)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name="wassail" tests="{len(verdicts)}" failures="{failed}" errors="0">',
    ]
    for verdict in verdicts:
        about = f"{run.name} on {run.data}"
        case = f"  <testcase classname={_quoted(about)} name={_quoted(verdict.requirement.text)}"
        if verdict:
            lines.append(case + "/>")
        else:
            lines.append(case + ">")
            lines.append(f"    <failure message={_quoted(verdict.sentence)}/>")
            lines.append("  </testcase>")
    told = [*conditions(run), *([] if looked is None else str(looked).split("\n"))]
    if told:
        text = "\n".join(printable(line) for line in told)
        lines.append(f"  <system-out>{escape(text)}</system-out>")
    return "\n".join([*lines, "</testsuite>", ""])


def _task(run: Evaluation) -> dict[str, Any] | None:
    """What right means where there are no classes."""
    if run.criterion is None:
        return None
    error = {} if run.mean_error is None else {"mean_error": _number(run.mean_error)}
    return {**run.criterion.config, "right": run.words.kept, **error}


def _others(run: Evaluation) -> dict[str, Any]:
    """The figures with labels that change and other people."""
    groups = run.others["groups"]
    counted = Counter() if groups is None else Counter(groups.ids)
    return {
        "headline": run.others_sentence,
        "population": others_population(run, CONFIDENCE),
        "label_cost": _number(run.others["label_cost"]),
        "subpopulation": run.others["subpopulation"],
        "groups": groups
        and [
            {"name": name, "low": low, "high": high, "samples": counted[name]}
            for name, low, high in zip(groups.names, groups.low, groups.high)
        ],
        "threats": [_threat(run, threat) for threat in run.others_threats],
    }


def _threat(run: Evaluation, threat: Threat) -> dict[str, Any]:
    sides = sides_at(run, threat)
    found: dict[str, Any] = {
        "norm": _number(threat.norm),
        "order": _number(threat.order),
        "eps": threat.eps,
        "domain": threat.domain,
        "attacked": _number(sides.attacked),
        "certified": sides.certified,
        "population": None,
    }
    if sides.population is not None:
        low, high = sides.population
        sampling, proof = costs(sides.curve, threat.eps, CONFIDENCE)
        found["population"] = {
            "confidence": CONFIDENCE,
            "attacked": high,
            "certified": low,
            "sampling_costs": None if low is None else sampling,
            "proof_gap_costs": None if low is None else proof,
        }
    return found


def _verdict(verdict: Verdict) -> dict[str, Any]:
    asked = verdict.requirement
    return {
        "requirement": asked.text,
        "holds": verdict.holds,
        "accuracy": verdict.value,
        "at_least": asked.accuracy,
        "side": asked.side,
        "eps": asked.eps,
        "order": None if asked.order is None else _number(asked.order),
        "confidence": asked.confidence,
        "class": asked.label,
        "subpopulation": asked.subpopulation,
        "label_cost": _number(asked.label_cost),
        "groups": asked.groups,
        "sentence": verdict.sentence,
    }


def _number(value: float) -> float | str | None:
    """JSON has no infinity and no NaN: "inf" and null stand for them."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else "inf"


def _quoted(text: str) -> str:
    """An attribute; characters that XML cannot hold become a question mark."""
    return quoteattr(printable(text))
