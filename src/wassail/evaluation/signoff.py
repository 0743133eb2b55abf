"""Whether an evaluation meets its requirements, and what it says about all inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.errors import InputError, remedies
from wassail.evaluation.notes import Verification
from wassail.evaluation.requirement import Requirement, parse_requirement
from wassail.notebook import card, lines
from wassail.threat import Threat, ceil_percent, floor_percent, show
from wassail.transport.confidence import proportion_at_least
from wassail.transport.curve import RiskCurve

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

CONDITIONS = (
    "The samples are independent draws from the population, none of them chosen by hand.",
    "Model, preprocessing and requirement were fixed without looking at these samples.",
    "Labels do not change unless a figure says at what price: inputs move and keep their label.",
    "A tie of two classes counts as an error.",
)
NOT_CHECKED = (
    "Shifts larger than the stated eps in the stated norm, and shifts that are not near in it.",
    "Populations from which the samples were not drawn: another camera, another country.",
    "Label errors of the data, calibration, fairness and privacy.",
)


@dataclass(frozen=True)
class Verdict:
    """Whether a requirement holds. True if it does.

    value: the accuracy that is compared with the requirement, rounded down where it is proved;
    sentence: what was found, for people.
    """

    requirement: Requirement
    holds: bool
    value: float
    sentence: str

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}: {self.requirement.text}: {self.sentence}"

    def _repr_html_(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        return card(f"{verdict}: {self.requirement.text}", lines(self.sentence))


def check(run: Evaluation, requirement: Requirement | str) -> Verdict:
    """Whether an evaluation meets a requirement.

    requirement: a sentence or what `parse_requirement` made of it.
    """
    asked = parse_requirement(requirement) if isinstance(requirement, str) else requirement
    order = run.threat.order if asked.order is None else asked.order
    curve = of_class(run, order, asked.label)
    if not len(curve.mu):
        raise InputError(f"no sample answers {asked.text!r}: evaluate some, of that class.")
    if asked.side == "proved" and curve.radii is None:
        raise remedies(
            f"{asked.text!r} needs a proof", "evaluate with certify='auto'", "add --certify"
        )
    who = "samples" if asked.confidence is None else "population"
    if asked.label is not None:
        who += f" of class {asked.label}"
    if asked.side == "clean":
        value = _clean(curve, asked.confidence)
        where = "on the data"
    else:
        assert asked.eps is not None
        others = _others(run, asked)
        curve = replace(curve, **others)
        threat = Threat(run.threat.norm, order, asked.eps, run.threat.domain, **others)
        value = _robust(curve, asked, threat)
        where = f"over {run.told(threat)}"
        if asked.side == "attacked":
            where = f"under the attacks that were run, {where}"
    verb = f"is {run.words.kept}" if asked.side == "clean" else run.words.stays
    sure = "" if asked.confidence is None else f", with {100 * asked.confidence:g} % confidence"
    sentence = (
        f"at least {floor_percent(value)} % of the {who} {verb} {where}{sure} "
        f"({len(curve.mu):,} samples)"
    )
    # 55 of 100 samples are 0.55, also where the sum of their weights was rounded down.
    slack = 2.0**-48 if asked.confidence is None else 0.0
    return Verdict(asked, value + slack >= asked.accuracy, value, sentence)


def _others(run: Evaluation, asked: Requirement) -> dict[str, Any]:
    """What may change besides inputs, as a requirement says."""
    groups = run.others.get("groups") if asked.groups else None
    if asked.groups and groups is None:
        raise remedies(
            f"{asked.text!r} needs groups, and the run has none",
            "evaluate with groups=ws.Groups(...)",
            "add --groups and --group-weights",
        )
    return {"label_cost": asked.label_cost, "subpopulation": asked.subpopulation, "groups": groups}


def looked_at(verdict: Verdict, looked: Verification) -> Verdict:
    """A verdict on a run with results that were stored before, after a look at these.

    verdict: from the run as it is stored.
    """
    if not looked:
        said = f"{verdict.sentence}; but results that were stored before are false: "
        return replace(verdict, holds=False, sentence=said + looked.problems[0])
    said = f"{verdict.sentence}; results that were stored before were verified again"
    if verdict.requirement.side == "attacked":
        said += (
            ", but their attacks were not run again: flips that were left out would make the "
            "figure too high"
        )
    return replace(verdict, sentence=said)


def of_class(run: Evaluation, order: float, label: int | None) -> RiskCurve:
    """The curve of the samples of one class, with a budget of its own; of all for None.

    label: a class, or None.
    """
    if label is None:
        return run.curve(order)
    if run.criterion is not None:
        raise InputError(f"class {label}: this run has no classes; ask about all samples.")
    return of_rows(run, order, run.y == label)


def of_rows(run: Evaluation, order: float, mine: Tensor) -> RiskCurve:
    """The curve of some of the samples, with a budget of their own.

    mine: bool `(N,)`.
    """
    curve = run.curve(order)
    mu = curve.mu[mine]
    radii = None if curve.radii is None else curve.radii[mine]
    return RiskCurve(curve.distances[mine], radii, mu / mu.sum() if len(mu) else mu, order)


def independent(run: Evaluation) -> bool:
    """Whether anything can be said about a population: there are samples, of equal weight."""
    return len(run) > 0 and bool((run.mu == run.mu[0]).all())


def population_sentence(run: Evaluation, confidence: float = 0.95) -> str | None:
    """What the samples prove for all inputs like them at the headline's threat, or None."""
    if not independent(run):
        return None
    threat = run.threat
    certified, attacked = run.curve(threat.order).population(confidence)(threat.eps)
    kind = "" if threat.order == math.inf else f" of Wasserstein-{threat.order:g} size"
    shift = f"every shift{kind} up to {show(threat.eps)} (l{threat.norm:g})"
    sure = f"With {100 * confidence:g} % confidence"
    if run.radii is None:
        return (
            f"{sure} at most {ceil_percent(attacked)} % of ALL such inputs {run.words.stay} under "
            f"the worst of {shift}."
        )
    return (
        f"{sure} at least {floor_percent(certified)} % of ALL such inputs {run.words.stay} under "
        f"{shift}."
    )


def others_population(run: Evaluation, confidence: float = 0.95) -> str | None:
    """What the samples say about all inputs with labels that change and other people, or None."""
    if not run.others or not independent(run):
        return None
    threat = run.others_threats[0]
    certified, attacked = run.others_curve(threat.order).population(confidence)(threat.eps)
    least = "" if run.radii is None else f"at least {floor_percent(certified)} % and "
    return (
        f"With {100 * confidence:g} % confidence for each side, {least}at most "
        f"{ceil_percent(attacked)} % of all inputs {run.words.stay} over {run.told(threat)}."
    )


def costs(curve: RiskCurve, eps: float, confidence: float) -> tuple[float, float]:
    """What is lost to sampling and what to unfinished proofs, as parts of the accuracy.

    confidence: of the statement about the population.
    """
    return curve(eps)[0] - curve.population(confidence)(eps)[0], curve.gap(eps)


def _clean(curve: RiskCurve, confidence: float | None) -> float:
    right = curve.distances > 0
    if confidence is None:
        return float(curve.mu[right].sum())
    curve.population(confidence)  # refuses weights
    return proportion_at_least(int(right.sum()), len(right), confidence)


def _robust(curve: RiskCurve, asked: Requirement, threat: Threat) -> float:
    """The certified accuracy; for attacks the same with the distances of their flips as radii."""
    if asked.side == "attacked":
        # A flip at a distance of exactly eps counts: the radius that it leaves is just below.
        below = curve.distances.nextafter(curve.distances.new_zeros(1))
        below = torch.where(torch.isfinite(curve.distances), below, math.inf)
        curve = replace(curve, radii=below)
    if asked.confidence is None:
        return curve(threat.eps)[0]
    return curve.population_at(threat, asked.confidence)[0]
