"""JSON from strangers: bounded, every key known, every value of the right kind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wassail.errors import InputError, unknown
from wassail.threat import number
from wassail.writing import read_small

LARGEST = 16 << 20  # bytes of a file; more samples go into a .safetensors file
SHOWN = 40  # characters of a value in an error


def read_json(path: Path, what: str, most: int = LARGEST) -> tuple[Any, bytes]:
    """What a JSON file holds, and its bytes.

    what: it should be, for the sentence that refuses it; most: bytes that are taken.
    """
    data = read_small(path, most, what)
    try:
        found = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except InputError as error:
        raise error.within(str(path)) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, too deep, too many digits
        reason = (str(error).splitlines() or ["it is nested too deeply"])[0]
        raise InputError(f"{str(path)!r} is no JSON: {reason}; write it again.") from None
    return found, data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InputError("a key stands twice in one object: leave one of them out.")
    return found


def _no_constant(text: str) -> float:
    raise InputError(f"{text} is no number of JSON: write a finite one, or 'inf' as a text.")


class Fields:
    """An object of a file, whose keys are all known.

    Args:
        value: what stands there.
        where: its name in errors.
        needed: keys that it must have.
        allowed: keys that it may have beside them.
    """

    def __init__(
        self, value: Any, where: str, needed: Iterable[str], allowed: Iterable[str] = ()
    ) -> None:
        if not isinstance(value, dict):
            raise InputError(f"{where} is {shown(value)}: give an object with keys.")
        self.value = value
        self.where = where
        known = [*needed, *allowed]
        for key in value:
            if key not in known:
                raise unknown(f"key of {where}", key[:SHOWN], known)
        for key in needed:
            if key not in value:
                raise InputError(f"{where} has no {key!r}: add it.")

    def of_format(self, name: str) -> None:
        """Refuse another format than the one that is read."""
        found = self.get("format")
        if found != name:
            raise InputError(f"its format is {shown(found)}: this version reads {name!r}.")

    def get(self, key: str, default: Any = None) -> Any:
        """What stands under a key."""
        return self.value.get(key, default)

    def text(self, key: str) -> str:
        """A text."""
        found = self.value[key]
        if not isinstance(found, str):
            raise InputError(f"{key} of {self.where} is {shown(found)}: give a text.")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """A number, or one as a text: "8/255", "inf"."""
        found = self.value.get(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float, str)):
            raise InputError(f"{key} of {self.where} is {shown(found)}: give a number.")
        if isinstance(found, str) and len(found) > SHOWN:
            raise InputError(f"{key} of {self.where} has {len(found)} characters: give a number.")
        return number(found, key)

    def reals(self, key: str, least: float = -math.inf) -> list[float]:
        """A list of finite numbers."""
        found = self.value[key]
        if not isinstance(found, list):
            raise InputError(f"{key} of {self.where} is {shown(found)}: give a list of numbers.")
        return finite(found, f"{key} of {self.where}", least)


def finite(values: list[Any], what: str, least: float = -math.inf) -> list[float]:
    """Finite numbers of a list, none below the least.

    least: the least of them.
    """
    for value in values:
        if type(value) not in (int, float):
            raise InputError(f"{what} holds {shown(value)}: give numbers.")
    try:
        found = [float(value) for value in values]
    except OverflowError:
        raise InputError(f"{what} holds a number that float64 cannot: give finite ones.") from None
    if not all(math.isfinite(value) and value >= least for value in found):
        bound = "" if least == -math.inf else f", {least:g} or more"
        raise InputError(f"{what} must be finite numbers{bound}.")
    return found


def shown(value: Any) -> str:
    """A value in an error: its beginning."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
