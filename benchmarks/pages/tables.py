"""Results files, figures by name, and tables in Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stage import RESULTS

Row = dict[str, Any]
Cell = Callable[[Row], str]
NONE = "–"


class Results:
    """All results files of a folder."""

    def __init__(self, folder: Path = RESULTS) -> None:
        files = sorted(folder.glob("*.json"))
        self.stages: dict[str, Row] = {path.stem: json.loads(path.read_text()) for path in files}

    def table(self, stage: str, table: str) -> list[Row]:
        """The rows of a table; none if nothing is measured."""
        found: list[Row] = self.stages.get(stage, {}).get("tables", {}).get(table, [])
        return found

    def row(self, stage: str, table: str, name: str) -> Row | None:
        """One row by its id."""
        return next((row for row in self.table(stage, table) if row["id"] == name), None)

    def figure(self, key: str) -> str:
        """A figure by its place in the files: "stage.table.row.field", perhaps with ":.2f" behind
        it.
        """
        place, _, form = key.partition(":")
        stage, table, name, *fields = place.split(".")
        found: Any = self.row(stage, table, name)
        for field in fields:
            if found is None:
                break
            found = found[int(field)] if isinstance(found, list) else found.get(field)
        if found is None:
            raise KeyError(f"no figure {key!r} in results/{stage}.json.")
        if isinstance(found, str):
            return found
        return format(found, form or (".3g" if isinstance(found, float) else "d"))


def markdown(columns: Sequence[tuple[str, Cell]], rows: Iterable[Row]) -> str:
    """A table: titles and what stands below them in each row."""
    lines = [
        "| " + " | ".join(title for title, _ in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def field(name: str, form: str = "") -> Cell:
    """A field as it is, or as the format says."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return NONE if value is None else format(value, form)

    return cell


def code(name: str) -> Cell:
    """A name, set as code."""
    return lambda row: f"`{row[name]}`"


def threat(row: Row) -> str:
    """Norm and eps."""
    return f"{row['norm']} {row['eps']}"


def floor(percent: float) -> str:
    """What is certified, rounded down."""
    return f"{math.floor(10 * percent + 1e-9) / 10:.1f}"


def ceil(percent: float) -> str:
    """What attacks leave, rounded up."""
    return f"{math.ceil(10 * percent - 1e-9) / 10:.1f}"


def both(low: float, high: float) -> str:
    """Certified..attacked."""
    return f"{floor(low)}..{ceil(high)}"


def limits(share: Row) -> str:
    """A percentage with its 95 % confidence limits."""
    return f"{share['percent']:.1f} ({share['low']:.1f} to {share['high']:.1f})"
