"""CSV files: a header with the names of the features, one line a sample, one column of labels."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from wassail.errors import InputError
from wassail.zoo.files import Table
from wassail.zoo.weights import regular, sha256

LABELS = ("label", "labels", "target", "class", "y")  # names of the column of labels, else the last
LONGEST = 1 << 20  # characters of one value


def read_csv(path: Path, n: int | None = None) -> Table:
    """Features float32 `(N, F)` and labels `(N,)`; names of features are in `info["features"]`.

    Labels are class numbers, or names, which are sorted and numbered.

    Args:
        path: a CSV file in UTF-8 with a header.
        n: the first so many samples (default: all).
    """
    regular(path, "data")
    csv.field_size_limit(LONGEST)
    rows: list[list[float]] = []
    labels: list[str] = []
    with open(path, newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        header = [name.strip() for name in next(lines, [])]
        if len(header) < 2 or len(set(header)) < len(header):
            raise InputError(
                f"{str(path)!r} needs a first line of names, all different: the features and the "
                "label."
            )
        place = next((i for i, name in enumerate(header) if name.lower() in LABELS), -1)
        place %= len(header)
        for number, line in enumerate(lines, start=2):
            if n is not None and len(rows) >= n:
                break
            if not line:
                continue
            if len(line) != len(header):
                raise InputError(
                    f"line {number} of {str(path)!r} has {len(line)} values for {len(header)} "
                    "names: repair it."
                )
            labels.append(line[place].strip())
            rows.append([_value(text, number, path) for i, text in enumerate(line) if i != place])
    names = header[:place] + header[place + 1 :]
    x = np.array(rows, dtype=np.float32).reshape(len(rows), len(names))
    y, classes = _classes(labels)
    info = {"source": "csv", "files": {path.name: sha256(path)}, "features": names}
    return Table(x, y, info, classes)


def _value(text: str, number: int, path: Path) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 3e38:
        raise InputError(
            f"line {number} of {str(path)!r} has {text[:40]!r} where a number should be: features "
            "are finite numbers."
        )
    return value


def _classes(labels: list[str]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Class numbers, and names where the labels are no whole numbers."""
    if all(text.isdecimal() and len(text) < 10 for text in labels):
        return np.array([int(text) for text in labels], dtype=np.int64), None
    names = sorted(set(labels))
    place = {name: i for i, name in enumerate(names)}
    return np.array([place[text] for text in labels], dtype=np.int64), tuple(names)
