"""The figures of a pack: one record each, with a sentence and the command that looks at it again.

Every figure is arithmetic on the distances and radii of the run, so a reader of the run computes
the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import Verdict, independent
from wassail.evidence.question import named
from wassail.threat import ceil_percent, floor_percent, show
from wassail.transport.curve import RiskCurve

CONFIDENCE = 0.95
SHARES = (0.9, 0.8, 0.5)  # of people that are there, at the headline's threat


@dataclass(frozen=True)
class Figure:
    """One figure, as it stands in `evidence.json`.

    Args:
        id: unique in the pack.
        kind: what it is about, for example "certified".
        sentence: for people.
        least: a lower limit of an accuracy, or None.
        most: an upper limit, or None.
        samples: how many it rests on.
        confidence: None where it is about the samples themselves.
        command: key of the command that looks at it again.
    """

    id: str
    kind: str
    sentence: str
    least: float | None
    most: float | None
    samples: int
    confidence: float | None = None
    command: str = "verify"


def figures(run: Evaluation, verdicts: Sequence[Verdict] = ()) -> list[Figure]:
    """All figures of a run, in the order of the page.

    Args:
        run: the evaluation, with samples.
        verdicts: the requirements that were checked.
    """
    found = [*_clean(run), *_threats(run), *_subpopulations(run), *_others(run)]
    found += [*_classes(run), *_groups(run), *_landmarks(run)]
    found += [_requirement(verdict, place, run) for place, verdict in enumerate(verdicts, 1)]
    return found


def _clean(run: Evaluation) -> Iterator[Figure]:
    low, high = run.clean_interval
    sentence = (
        f"{100 * run.clean:.2f} % of {len(run):,} samples are classified correctly "
        f"(95 % interval for all inputs: {100 * low:.1f} to {100 * high:.1f} %)."
    )
    yield Figure("clean", "clean", sentence, run.clean, run.clean, len(run))


def _threats(run: Evaluation) -> Iterator[Figure]:
    for threat in run.threats:
        curve = run.curve(threat.order)
        certified, attacked = curve(threat.eps)
        where = f"{threat.order:g}@{threat.eps!r}"
        over = named(run, threat)
        if run.radii is not None:
            way = run.certificate.get("arithmetic", "exact")
            exact = 0 if run.exact is None else int(run.exact.sum())
            text = (
                f"At least {floor_percent(certified)} % stay correct over {over}: proved on the "
                f"samples, in {way} arithmetic; {exact:,} of {len(run):,} radii are the exact "
                "distance."
            )
            yield Figure(
                f"certified@{where}",
                "certified",
                text,
                certified,
                None,
                len(run),
                command="prove",
            )
        text = (
            f"At most {ceil_percent(attacked)} % stay correct over {over}: a distribution that "
            "does so was built, and every point of it was evaluated once more."
        )
        yield Figure(f"attacked@{where}", "attacked", text, None, attacked, len(run))
        if independent(run):
            yield _population(curve, threat.eps, f"population@{where}", over)


def _population(
    curve: RiskCurve, eps: float, name: str, where: str, kind: str = "population"
) -> Figure:
    """Both limits for all inputs, each with the same confidence."""
    low, high = curve.population(CONFIDENCE)(eps)
    known = curve.radii is not None
    least = f"at least {floor_percent(low)} % and " if known else ""
    text = (
        f"With {100 * CONFIDENCE:g} % confidence for each side, {least}at most "
        f"{ceil_percent(high)} % of all inputs like the samples stay correct over {where}."
    )
    samples = len(curve.mu)
    return Figure(name, kind, text, low if known else None, high, samples, CONFIDENCE)


def _bracket(curve: RiskCurve, eps: float, name: str, kind: str, about: str, where: str) -> Figure:
    """Both sides on the samples."""
    certified, attacked = curve(eps)
    known = curve.radii is not None
    least = f"between {floor_percent(certified)} % and " if known else "at most "
    text = f"{about}: {least}{ceil_percent(attacked)} % stay correct {where}."
    low = certified if known else None
    return Figure(name, kind, text, low, attacked, len(curve.mu))


def _subpopulations(run: Evaluation) -> Iterator[Figure]:
    threat = run.threat
    over = named(run, threat)
    for share in SHARES:
        curve = replace(run.curve(threat.order), subpopulation=share)
        about = f"If as few as {100 * share:g} % of the people are there, the worst of them"
        yield _bracket(
            curve, threat.eps, f"subpopulation@{share:g}", "subpopulation", about, f"over {over}"
        )


def _others(run: Evaluation) -> Iterator[Figure]:
    for threat in run.others_threats:
        curve = run.others_curve(threat.order)
        where = f"{threat.order:g}@{threat.eps!r}"
        over = named(run, threat)
        about = "With the other people and labels that were asked for"
        yield _bracket(curve, threat.eps, f"others@{where}", "subpopulation", about, f"over {over}")
        if independent(run):
            name = f"others-population@{where}"
            yield _population(curve, threat.eps, name, over, "subpopulation")


def of_samples(run: Evaluation, mine: Tensor) -> RiskCurve:
    """The curve of some of the samples at the headline's order, with a budget of their own.

    Args:
        run: the evaluation.
        mine: which samples, bool `(N,)`, at least one.
    """
    curve = run.curve(run.threat.order)
    mu = curve.mu[mine]
    radii = None if curve.radii is None else curve.radii[mine]
    return RiskCurve(curve.distances[mine], radii, mu / mu.sum(), run.threat.order)


def _classes(run: Evaluation) -> Iterator[Figure]:
    labels = sorted(set(run.y.tolist()))
    names = run.classes
    for label in labels:
        known = names is not None and label < len(names)
        shown = f"Class {names[label]!r}" if known and names is not None else f"Class {label}"
        yield from _part(run, run.y == label, f"class@{label}", "class", shown, len(labels))


def _groups(run: Evaluation) -> Iterator[Figure]:
    groups = run.others.get("groups") if run.others else None
    if groups is None:
        return
    places = torch.tensor(groups.places)
    for place, name in enumerate(groups.names):
        mine = places == place
        shown = f"Group {str(name)!r}"
        yield from _part(run, mine, f"group@{place}", "group", shown, len(groups.names))


def _part(
    run: Evaluation, mine: Tensor, name: str, kind: str, shown: str, parts: int
) -> Iterator[Figure]:
    """One class or group on its own: the samples, and all inputs like them at the confidence
    that all parts together need.
    """
    curve = of_samples(run, mine)
    eps = run.threat.eps
    about = f"{shown}, {int(mine.sum()):,} samples with a budget of their own"
    figure = _bracket(curve, eps, name, kind, about, f"at eps {show(eps)}")
    if independent(run):
        sure = 1 - (1 - CONFIDENCE) / parts
        low, high = curve.population(sure)(eps)
        least = f"at least {floor_percent(low)} %, " if curve.radii is not None else ""
        more = (
            f" All inputs like them, with {100 * CONFIDENCE:g} % confidence for each side of all "
            f"{parts} together: {least}at most {ceil_percent(high)} %."
        )
        figure = replace(figure, sentence=figure.sentence + more)
    yield figure


def _landmarks(run: Evaluation) -> Iterator[Figure]:
    order = run.threat.order
    for landmark in run.landmarks:
        eps = landmark.eps[order]
        text = (
            f"Under the known shift {landmark.name}, of eps {show(eps)} at order {order:g}, "
            f"{100 * landmark.accuracy:.2f} % of the samples are classified correctly."
        )
        share = landmark.accuracy
        yield Figure(f"landmark@{landmark.name}", "landmark", text, share, share, len(run))


def _requirement(verdict: Verdict, place: int, run: Evaluation) -> Figure:
    asked = verdict.requirement
    text = f"{verdict!s}."
    value = verdict.value if math.isfinite(verdict.value) else None
    command = "prove" if asked.side == "proved" else "verify"
    return Figure(
        f"requirement@{place}",
        "requirement",
        text,
        value,
        None,
        len(run),
        asked.confidence,
        command,
    )
