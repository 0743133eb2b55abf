"""Requirements on an evaluation: written as a sentence, answered yes or no.

    accuracy>=0.5 at eps 2/255 order 1 confidence 0.95 proved

`proved` asks the certified side, `attacked` the accuracy under the attacks that were run, `clean`
the accuracy on the data. With a confidence the statement is about the population that the samples
were drawn from, without one about the samples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from wassail.errors import InputError
from wassail.threat import number, parse_confidence, parse_eps, parse_level, parse_order

SIDES = ("proved", "attacked", "clean")
EXAMPLE = "accuracy>=0.5 at eps 2/255 order 1 confidence 0.95 proved"


@dataclass(frozen=True)
class Requirement:
    """A least accuracy, and of what.

    accuracy: between 0 and 1; side: "proved", "attacked" or "clean"; eps, order: of the threat,
    None for clean, order None for that of the headline; confidence: None for the samples
    themselves; label: the class it is about, None for all; text: as it was written.
    """

    accuracy: float
    side: str
    eps: float | None
    order: float | None
    confidence: float | None
    label: int | None
    text: str


def parse_requirement(text: str) -> Requirement:
    """A requirement out of a sentence such as the one at the top of this module.

    Args:
        text: `accuracy>=LEVEL`, then any of `at`, `eps E`, `order P`, `confidence C`, `class K`,
            and one of `proved`, `attacked` and `clean`.
    """
    found = re.fullmatch(r"\s*accuracy\s*>=\s*(\S+)\s*(.*?)\s*", text, re.DOTALL)
    if found is None:
        raise InputError(f"cannot read the requirement {text!r}: write it as {EXAMPLE!r}.")
    level, rest = found.groups()
    words = [word for word in rest.replace(",", " ").split() if word != "at"]
    given: dict[str, str] = {}
    sides = []
    place = iter(words)
    for word in place:
        if word in SIDES:
            sides.append(word)
        elif word in ("eps", "order", "confidence", "class") and word not in given:
            given[word] = next(place, "")
        else:
            raise InputError(f"cannot read {word!r} in {text!r}: write it as {EXAMPLE!r}.")
    if len(sides) != 1:
        raise InputError(f"{text!r} needs one of the words proved, attacked and clean, at its end.")
    side = sides[0]
    if (side == "clean") == ("eps" in given):
        raise InputError(
            f"{text!r}: a clean accuracy has no eps, and every other one needs it, as in "
            f"{EXAMPLE!r}."
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
    )
