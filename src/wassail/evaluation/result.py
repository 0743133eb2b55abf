"""The small records of an evaluation: a row of its table, and one sentence about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wassail.errors import InputError
from wassail.threat import Threat, parse_threat

LEVELS = ("ok", "note", "warning")


@dataclass(frozen=True)
class Row:
    """One attack over one threat.

    attack: its name in the catalogue, "all" where all of them are pooled; interval: of the
    accuracy of this attack on all inputs, with 95 % confidence; cost: the transport cost of its
    flips, at most the threat's eps (points that moved and flipped nothing are left out); forwards,
    backwards: mean passes per attacked sample, one that is correct to begin with; flipped: the
    share of those with a flip; seconds: from the log, None where another row's search served this
    one too.
    """

    attack: str
    title: str
    threat: Threat
    accuracy: float
    interval: tuple[float, float]
    cost: float
    forwards: float
    backwards: float
    flipped: float
    seconds: float | None = None


@dataclass(frozen=True)
class Finding:
    """What a check before the attacks, or an indicator of attack failure after them, has to say:
    one sentence.

    level: "ok", "note" (worth knowing) or "warning" (do not trust the figures before this is
    explained).
    """

    name: str
    level: str
    text: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is none of {', '.join(LEVELS)}")


def same_norm(threats: Sequence[Threat]) -> tuple[Threat, ...]:
    """The threats of one evaluation, each once, or one sentence that says why they cannot be
    evaluated together.
    """
    if not threats:
        raise InputError(
            "there is no threat to evaluate: give at least one, for example Threat('inf', 1, "
            "'8/255')."
        )
    for threat in (parse_threat(threat, own=True) for threat in threats):
        if (threat.norm, threat.domain) != (threats[0].norm, threats[0].domain):
            raise InputError(
                f"the threats {threats[0]} and {threat} differ in norm or domain: one evaluation "
                "has one of each, since its distances are measured in it; make two."
            )
    return tuple(dict.fromkeys(threats))
