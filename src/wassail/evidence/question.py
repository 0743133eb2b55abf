"""The question of a pack in words and units, and why its eps was chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wassail.evaluation.run import Evaluation
from wassail.evidence.statement import Statement
from wassail.threat import Threat, box_text, show
from wassail.transport.between import ShiftBetween

NORMS = {
    1.0: "the sum of the changes of all coordinates (l1)",
    2.0: "the length of the change (l2)",
    math.inf: "the largest change of any coordinate (linf)",
}
OWN_BOXES = "each feature in its own box and unit"
NO_REASON = (
    "No reason is given: the pack has no known shifts, no measured shift and no words of its "
    "author about this eps."
)


def question(run: Evaluation, statement: Statement, shift: ShiftBetween | None) -> dict[str, Any]:
    """What was asked: sentences and numbers.

    Args:
        run: the evaluation.
        statement: the author's words.
        shift: between the samples and later data, if it was measured.
    """
    threat = run.threat
    asked = (
        "Which share of the inputs stays correctly classified, whichever distribution within "
        f"Wasserstein-{threat.order:g} distance {show(threat.eps)} of the data the inputs come "
        "from?"
    )
    return {
        "purpose": statement.purpose,
        "asked": asked,
        "meaning": _meaning(threat),
        "distance": f"The distance between two inputs is {NORMS[threat.norm]}; {_box(run)}.",
        "units": _units(run, statement),
        "why": _why(run, statement, shift),
        "threats": [named(run, one) for one in run.threats],
    }


def named(run: Evaluation, threat: Threat) -> str:
    """The set of a threat in words. Where features have boxes of their own, the threat is stated in
    the variable that brings all of them to one box, and that box says nothing to a reader.

    Args:
        run: the evaluation.
        threat: one of its threats.
    """
    own = f", {box_text(threat.domain)}"
    return str(threat).replace(own, f", {OWN_BOXES}") if own_boxes(run) else str(threat)


def own_boxes(run: Evaluation) -> bool:
    """Whether each feature has a box and a unit of its own.

    Args:
        run: the evaluation.
    """
    return isinstance(recorded(run.info, "data").get("scale"), list)


def recorded(about: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object that a run records under a key; nothing where there is none.

    Args:
        about: a part of the configuration of a run of any origin.
        key: in it.
    """
    found = about.get(key)
    return found if isinstance(found, Mapping) else {}


def _box(run: Evaluation) -> str:
    if own_boxes(run):
        return "each feature stays in its own box and is measured in its own unit"
    return f"inputs stay in the {box_text(run.threat.domain)}".replace("the no box", "all of space")


def _meaning(threat: Threat) -> str:
    eps = show(threat.eps)
    if threat.order == math.inf:
        return f"Every input may move by {eps}, each in the worst direction."
    mean = "mean" if threat.order == 1 else f"mean of the power {threat.order:g}"
    return (
        f"The {mean} of the moves over all inputs is at most that of {eps}: a few inputs may move "
        "far if most stay where they are."
    )


def _units(run: Evaluation, statement: Statement) -> list[str]:
    """What eps is in the units of the data."""
    lines = [f"Stated by the author: {statement.unit}"] if statement.unit else []
    about = recorded(run.info, "data")
    eps = run.threat.eps
    kept = [about.get(key) for key in ("features", "scale")]
    if all(isinstance(part, list) for part in kept):
        held = set(map(str, about.get("fixed") or ()))
        for name, scale in zip(*kept):
            moves = f"eps {show(eps)} is a change of {eps * float(scale):.4g}"
            lines.append(f"{name}: {'may not move' if str(name) in held else moves}")
        return lines
    domain = run.threat.domain
    if domain is not None:
        share = eps / (domain[1] - domain[0])
        lines.append(f"{show(eps)} is {100 * share:.4g} % of the width of the {box_text(domain)}.")
    return lines


def _why(run: Evaluation, statement: Statement, shift: ShiftBetween | None) -> list[dict[str, str]]:
    """Why this eps: what is known about it, each with its kind."""
    found = []
    if run.landmarks:
        found.append({"kind": "known shifts", "sentence": _among(run)})
    if shift is not None:
        found.append({"kind": "measured shift", "sentence": _measured(run, shift)})
    if statement.why:
        found.append({"kind": "stated by the author", "sentence": statement.why})
    return found or [{"kind": "none", "sentence": NO_REASON}]


def _among(run: Evaluation) -> str:
    """The known shifts next to the eps of the headline."""
    order, eps = run.threat.order, run.threat.eps
    known = sorted((landmark.eps[order], landmark.name) for landmark in run.landmarks)
    below = [f"{name} ({show(value)})" for value, name in known if value <= eps]
    above = [f"{name} ({show(value)})" for value, name in known if value > eps]
    covers = f"covers {len(below)} of {len(known)} known shifts"
    largest = f", the largest of them {below[-1]}" if below else ""
    next_one = f"; the next is {above[0]}" if above else ""
    return f"At order {order:g} eps {show(eps)} {covers}{largest}{next_one}."


def _measured(run: Evaluation, shift: ShiftBetween) -> str:
    """The measured shift beside the eps of the headline."""
    eps = run.threat.eps
    rows = zip(shift.shares, shift.eps, shift.baseline, shift.chance)
    told = "; ".join(
        f"share {share:g}: eps {show(value)} (by chance {show(usual)}, as far in "
        f"{100 * chance:.0f} % of random halves)"
        for share, value, usual, chance in rows
    )
    return (
        f"Between {shift.samples[0]} samples and {shift.samples[1]} of the later data, order "
        f"{shift.order:g}: {told}. The eps of this pack is {show(eps)}. {shift.caution}"
    )
