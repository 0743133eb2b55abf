"""Whether two configurations are of the same run, and how they differ."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wassail.evaluation.store.encoding import dumps, encode
from wassail.threat import show

# the one key of a configuration that may get more entries: a list of names, or options by name
GROWS = "attacks"
SINGULAR = "attack"

# recorded, never compared: the command that resumes a run is not the one that started it
FREE = "command"
SHOWN = 3  # differences that a refusal names


def identity(config: Mapping[str, Any]) -> str:
    """sha256 of what never changes in a configuration: chunks carry it, so that those of
    another run are told apart.
    """
    fixed = {key: value for key, value in config.items() if key not in (GROWS, FREE)}
    return hashlib.sha256(dumps(encode(fixed, "config")).encode()).hexdigest()


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Entries that `new` has more under GROWS, and all other differences, each in words."""
    ours = _by_name(old.get(GROWS))
    theirs = _by_name(new.get(GROWS))
    left, right = (
        {k: v for k, v in config.items() if k not in (GROWS, FREE)} for config in (old, new)
    )
    differences = _differences(left, right, ())
    for name in ours:
        if name in theirs:
            differences += _differences(ours[name], theirs[name], (SINGULAR, name))
        else:
            differences.append(f"with {SINGULAR} {name} and you leave it out")
    return [name for name in theirs if name not in ours], differences


def _by_name(value: Any) -> dict[str, Any]:
    """A list of names, or of dicts with a "name", or a dict by name: as a dict by name."""
    if isinstance(value, dict):
        return value
    items = value if isinstance(value, list) else [] if value is None else [value]
    return {str(item.get("name", item) if isinstance(item, dict) else item): item for item in items}


def grown(old: Any, new: Any) -> Any:
    """The old entries, then those that only `new` has."""
    known = _by_name(old)
    more = {name: item for name, item in _by_name(new).items() if name not in known}
    return {**known, **more} if isinstance(new, dict) else [*known.values(), *more.values()]


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            text
            for key in dict.fromkeys([*new, *old])
            for text in _one_key(old, new, key, (*path, key))
        ]
    if (
        isinstance(old, list)
        and isinstance(new, list)
        and len(old) == len(new)
        and any(isinstance(v, dict) for v in old)
    ):
        # what an entry says needs no name of the list: "eps 0.03", be it of one threat or of all
        return list(
            dict.fromkeys(text for a, b in zip(old, new) for text in _differences(a, b, path[:-1]))
        )
    return (
        []
        if _same(old, new)
        else [f"with {' '.join(path)} {_shown(old, new)} and you ask for {_shown(new, old)}"]
    )


def _one_key(
    old: dict[str, Any], new: dict[str, Any], key: str, path: tuple[str, ...]
) -> list[str]:
    if key in old and key in new:
        return _differences(old[key], new[key], path)
    name = " ".join(path)
    if key in old:
        return [f"with {name} {_short(old[key])} and you leave it out"]
    return [f"without {name} and you ask for {_short(new[key])}"]


def _same(old: Any, new: Any) -> bool:
    """Equality, but NaN is NaN, and True is not 1 (though 1.0 is)."""
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    return bool(old == new) or dumps(encode(old, "")) == dumps(encode(new, ""))


def _shown(value: Any, other: Any) -> str:
    """A value as people write it, short unless that makes it look like the other one."""
    short = _short(value)
    return short if short != _short(other) else str(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return show(value)
    if isinstance(value, list):
        return brief("[" + ", ".join(map(_short, value)) + "]")
    if isinstance(value, dict):
        return brief(" ".join(f"{key} {_short(item)}" for key, item in value.items()))
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40,}", value):
        return value[:12] + "..."
    return brief(str(value))


def difference(folder: Path, differences: Sequence[str]) -> str:
    """The sentence that refuses a run with other settings."""
    rest = len(differences) - SHOWN
    more = f", and {rest} more difference{'s' if rest > 1 else ''}" if rest > 0 else ""
    return (
        f"the run in {quote(folder)} was made {', '.join(differences[:SHOWN])}{more}: "
        "give the same settings to go on with it, or choose another --out for a new run."
    )


def quote(path: str | os.PathLike[str]) -> str:
    """A path in quotation marks."""
    return repr(str(path))


def brief(text: str) -> str:
    """One line of at most 80 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
