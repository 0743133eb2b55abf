"""What a look at a run found: what is false, what was checked, and what was not.

Every field of a run is in one of two lists, checked and not checked: a field that no check claims
is not checked, so a new one cannot be forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.evaluation.result import Row
from wassail.writing import printable

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

NESTED = ("model", "data", "certify")  # parts of a configuration whose keys are listed one by one
MANY = 40  # files that are listed by name


@dataclass(frozen=True)
class Verification:
    """What `Evaluation.verify` found: true if nothing that was looked at is false.

    problems: what is false; checked: what was computed again and holds; unchecked: what was not
    looked at, and how to; seed: of the random choices, with which they can be made again; choices:
    what the run chose for itself (weights, boxes, units), with the figures without it; fields,
    unread: the names of all fields of the run that were checked, and of all others.
    """

    problems: tuple[str, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    seed: int
    choices: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        head = (
            "false: " + f"{len(self.problems)} statements do not hold"
            if self.problems
            else "nothing that was checked is false"
        )
        parts = (
            ("FALSE", self.problems),
            ("the run's own choice", self.choices),
            ("checked", self.checked),
            ("not checked", self.unchecked),
        )
        lines = [f"{name}: {text}" for name, texts in parts for text in texts]
        lines.append(f"fields checked: {', '.join(self.fields) or 'none'}")
        lines.append(f"fields not checked: {', '.join(self.unread) or 'none'}")
        return "\n".join([head, *lines, f"seed {self.seed}"])


class Notes:
    """What there is to say so far."""

    def __init__(self) -> None:
        self.problems = list[str]()
        self.checked = list[str]()
        self.unchecked = list[str]()
        self.choices = list[str]()
        self.fields = list[str]()

    def count(self, counts: Mapping[str, int], told: str) -> None:
        """One problem for each count that is not 0; told: what was looked at."""
        wrong = [f"{count} {what}" for what, count in counts.items() if count]
        self.problems += wrong
        self.checked += [] if wrong else [told]

    def expect(self, holds: bool, problem: str, told: str) -> None:
        """One statement."""
        (self.checked if holds else self.problems).append(told if holds else problem)

    def cover(self, *names: str) -> None:
        """Fields of the run that a check has compared, whatever it found."""
        self.fields += names

    def result(self, names: Iterable[str], seed: int) -> Verification:
        """All of it; names: of every field of the run.

        seed: of the random choices.
        """
        covered = set(self.fields)
        known = list(dict.fromkeys(names))
        return Verification(
            tuple(self.problems),
            tuple(self.checked),
            tuple(self.unchecked),
            seed,
            tuple(self.choices),
            tuple(name for name in known if name in covered),
            tuple(name for name in known if name not in covered),
        )


def fields_of(run: Evaluation) -> list[str]:
    """The name of every field of a run: of its record, of its configuration, and its other files.

    Args:
        run: the evaluation.
    """
    parts = [part.name for part in fields(Row)]
    names = list[str]()
    for entry in fields(run):
        if entry.name in ("rows", "best"):
            names += [f"{entry.name}.{part}" for part in parts]
        elif entry.name == "certificate":
            names += [f"certificate.{key}" for key in run.certificate]
        elif entry.name not in ("info", "folder"):
            names.append(entry.name)
    for key, value in run.info.items():
        if key in NESTED and isinstance(value, Mapping):
            names += [f"config.{key}.{inner}" for inner in value]
        else:
            names.append(f"config.{key}")
    return names if run.folder is None else [*names, *_other_files(Path(run.folder))]


def _other_files(folder: Path) -> list[str]:
    """Files beside the configuration and the results: nothing that was verified is in them."""
    found = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    )
    mine = [name for name in found if name != "config.json" and not name.startswith("results/")]
    more = len(mine) - MANY
    return [f"file {name}" for name in mine[:MANY]] + ([f"{more} more files"] if more > 0 else [])


def plain_text(value: Any) -> str:
    """A name out of a run, one line of at most 60 characters."""
    return printable(str(value))[:60]


def close(stated: Any, found: Any) -> bool:
    """Whether two values of JSON are the same, fractions to the rounding of another processor."""
    if isinstance(stated, dict) and isinstance(found, dict):
        return stated.keys() == found.keys() and all(close(stated[k], found[k]) for k in found)
    if isinstance(stated, list) and isinstance(found, list):
        return len(stated) == len(found) and all(map(close, stated, found))
    if type(stated) is float and type(found) is float:
        unknown = stated != stated and found != found
        return unknown or math.isclose(stated, found, rel_tol=1e-9, abs_tol=1e-12)
    return type(stated) is type(found) and bool(stated == found)
