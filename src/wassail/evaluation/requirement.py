"""Requirements on an evaluation: written as a sentence, answered yes or no.

    accuracy>=0.5 at eps 2/255 order 1 confidence 0.95 proved

`proved` asks the certified side, `attacked` the accuracy under the attacks that were run, `clean`
the accuracy on the data. With a confidence the statement is about the population that the samples
were drawn from, without one about the samples. `subpopulation 0.8`, `label-cost 0.3` and `groups`
let people be missing, labels change, and the groups of the run have other weights.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from wassail.errors import InputError
from wassail.threat import (
    number,
    parse_confidence,
    parse_eps,
    parse_label_cost,
    parse_level,
    parse_order,
    parse_subpopulation,
)

SIDES = ("proved", "attacked", "clean")
NAMED = ("eps", "order", "confidence", "class", "subpopulation", "label-cost")
EXAMPLE = "accuracy>=0.5 at eps 2/255 order 1 confidence 0.95 proved"


@dataclass(frozen=True)
class Requirement:
    """A least accuracy, and of what.

    accuracy: between 0 and 1; side: "proved", "attacked" or "clean"; eps, order: of the threat,
    None for clean, order None for that of the headline; confidence: None for the samples
    themselves; label: the class it is about, None for all; text: as it was written. subpopulation,
    label_cost: who may be missing, and the price of a changed label; groups: whether the weights
    of the run's groups may change.
    """

    accuracy: float
    side: str
    eps: float | None
    order: float | None
    confidence: float | None
    label: int | None
    text: str
    subpopulation: float = 1.0
    label_cost: float = math.inf
    groups: bool = False


def _words(text: str, rest: str) -> tuple[str, dict[str, str]]:
    """The side that is asked for, and what is given by name."""
    words = [word for word in rest.replace(",", " ").split() if word != "at"]
    given: dict[str, str] = {}
    sides = []
    place = iter(words)
    for word in place:
        if word in SIDES:
            sides.append(word)
        elif word in NAMED and word not in given:
            given[word] = next(place, "")
        elif word == "groups" and word not in given:
            given[word] = word
        else:
            raise InputError(f"cannot read {word!r} in {text!r}: write it as {EXAMPLE!r}.")
    if len(sides) != 1:
        raise InputError(f"{text!r} needs one of the words proved, attacked and clean, at its end.")
    return sides[0], given


def parse_requirement(text: str) -> Requirement:
    """A requirement out of a sentence such as the one at the top of this module.

    text: `accuracy>=LEVEL`, then any of `at`, `eps E`, `order P`, `confidence C`, `class K`,
    `subpopulation S`, `label-cost K`, `groups`, and one of `proved`, `attacked` and `clean`.
    """
    found = re.fullmatch(r"\s*accuracy\s*>=\s*(\S+)\s*(.*?)\s*", text, re.DOTALL)
    if found is None:
        raise InputError(f"cannot read the requirement {text!r}: write it as {EXAMPLE!r}.")
    level, rest = found.groups()
    side, given = _words(text, rest)
    if (side == "clean") == ("eps" in given):
        raise InputError(
            f"{text!r}: a clean accuracy has no eps, and every other one needs it, as in "
            f"{EXAMPLE!r}."
        )
    others = [word for word in ("subpopulation", "label-cost", "groups") if word in given]
    if others and (side == "clean" or ("groups" in given and "class" in given)):
        raise InputError(
            f"{text!r}: {others[0]} is for an accuracy with an eps, and groups are for all classes "
            "together: leave one of the two out."
        )
    share = number(level.removesuffix("%"), "accuracy") / (100 if level.endswith("%") else 1)
    return Requirement(
        parse_level(share, "accuracy"),
        side,
        parse_eps(given["eps"]) if "eps" in given else None,
        parse_order(given["order"]) if "order" in given else None,
        parse_confidence(given["confidence"]) if "confidence" in given else None,
        int(number(given["class"], "class")) if "class" in given else None,
        " ".join(text.split()),
        parse_subpopulation(given.get("subpopulation", 1)),
        parse_label_cost(given.get("label-cost", math.inf)),
        "groups" in given,
    )
