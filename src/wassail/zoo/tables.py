"""Tables: CSV and Parquet files and pandas data frames, one row a sample, one column of labels.

The column of labels is called label, labels, target, class or y; else it is the last one. The
others are features, and their names are kept.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np

from wassail.errors import InputError
from wassail.zoo.files import Table
from wassail.zoo.weights import regular, sha256

LABELS = ("label", "labels", "target", "class", "y")  # names of the column of labels, else the last
LONGEST = 1 << 20  # characters of one value
NO_PANDAS = 'Parquet files need pandas and pyarrow: pip install "wassail[tables]".'


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
        place = label_place(header)
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


def read_parquet(path: Path, n: int | None = None) -> Table:
    """The same table out of a Parquet file, by pandas and what it reads Parquet with.

    Args:
        path: a Parquet file.
        n: the first so many samples (default: all).
    """
    regular(path, "data")
    try:
        import pandas
    except ImportError:
        raise InputError(NO_PANDAS) from None
    try:
        frame = pandas.read_parquet(path)
    except ImportError:
        raise InputError(NO_PANDAS) from None
    table = from_frame(frame if n is None else frame.iloc[:n], str(path))
    return Table(
        table.x,
        table.y,
        {**table.info, "source": "parquet", "files": {path.name: sha256(path)}},
        table.classes,
    )


def is_frame(value: Any) -> bool:
    """Whether it is a pandas data frame, or something with the same methods."""
    return all(hasattr(value, name) for name in ("columns", "to_numpy", "iloc"))


def from_frame(frame: Any, name: str) -> Table:
    """Features `(N, F)` and labels of a data frame with a column of labels.

    Args:
        frame: a pandas data frame.
        name: what an error calls it.
    """
    header = [str(column) for column in frame.columns]
    if len(header) < 2 or len(set(header)) < len(header):
        raise InputError(
            f"{name!r} needs at least two columns with different names: features and the label."
        )
    place = label_place(header)
    features = [i for i in range(len(header)) if i != place]
    x = frame_values(frame.iloc[:, features], name)
    y, classes = _column_classes(frame.iloc[:, place].to_numpy(), name)
    names = [header[i] for i in features]
    return Table(x, y, {"source": "frame", "features": names}, classes)


def frame_values(frame: Any, name: str) -> np.ndarray:
    """The numbers of a data frame, float64 unless all of them are float32, `(N, F)`.

    Args:
        frame: a pandas data frame of features.
        name: what an error calls it.
    """
    for place, column in enumerate(frame.columns):
        values = frame.iloc[:, place].to_numpy()
        numeric = values.dtype.kind in "buif"
        if not numeric or not np.isfinite(values.astype(np.float64)).all():
            raise InputError(
                f"column {str(column)!r} of {name!r} holds {values.dtype}, or values that are "
                "missing: features are finite numbers."
            )
    values = frame.to_numpy()
    wanted = np.float32 if values.dtype == np.float32 else np.float64
    return np.ascontiguousarray(values, dtype=wanted)


def label_place(header: list[str]) -> int:
    """Which column holds the labels: the first that is called so, else the last.

    Args:
        header: names of the columns.
    """
    named = (i for i, name in enumerate(header) if name.strip().lower() in LABELS)
    return next(named, len(header) - 1)


def _column_classes(values: np.ndarray, name: str) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Class numbers of a column of labels: whole numbers as they are, others sorted by name."""
    if values.dtype.kind in "ui":
        return values, None
    if values.dtype.kind == "f":
        raise InputError(
            f"the labels of {name!r} are {values.dtype}: give class indices or names; the column "
            f"of labels is called {', '.join(LABELS)}, or is the last one."
        )
    return _classes([str(value) for value in values])


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
