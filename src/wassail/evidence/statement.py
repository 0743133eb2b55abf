"""What the author of a pack states in words. Nothing here is computed, and a pack says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wassail.errors import InputError
from wassail.evaluation.requirement import parse_requirement

LONGEST = 4000  # characters of one text
MOST = 100  # limits, and requirements


@dataclass(frozen=True)
class Statement:
    """The author's words.

    Args:
        purpose: what the model is for; "" if nothing is said.
        drawn: how the samples were drawn.
        why: why this eps.
        unit: what a distance of 1 is.
        limits: known limits, one sentence each.
        require: requirements, as they were written.
    """

    purpose: str = ""
    drawn: str = ""
    why: str = ""
    unit: str = ""
    limits: tuple[str, ...] = ()
    require: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("purpose", "drawn", "why", "unit"):
            _check(name, getattr(self, name))
        for name in ("limits", "require"):
            listed = getattr(self, name)
            if len(listed) > MOST:
                raise InputError(f"there are {len(listed)} {name}: give at most {MOST}.")
            for text in listed:
                _check(name, text)
        for text in self.require:
            parse_requirement(text)

    @property
    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        found = asdict(self)
        return found | {"limits": list(self.limits), "require": list(self.require)}


def read_statement(values: Any) -> Statement:
    """The reverse of `Statement.plain`, of any origin.

    Args:
        values: an object of a JSON file.
    """
    names = ("purpose", "drawn", "why", "unit", "limits", "require")
    if not isinstance(values, Mapping) or set(values) != set(names):
        raise InputError("the statement of the pack has other parts than it should: it is damaged.")
    listed = [values[name] for name in names[4:]]
    if not all(isinstance(part, list) for part in listed):
        raise InputError("the limits or requirements of the pack are no lists: it is damaged.")
    return Statement(*(values[name] for name in names[:4]), *map(tuple, listed))


def _check(name: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > LONGEST:
        raise InputError(f"{name} is no text of at most {LONGEST} characters: shorten it.")
