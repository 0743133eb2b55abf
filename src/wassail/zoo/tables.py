"""Tables: CSV and Parquet files and pandas data frames, one row a sample, one column of labels.

The column of labels is called label, labels, target, class or y; else it is the last one. The
others are features, and their names are kept.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from wassail.errors import InputError, remedies, unknown
from wassail.threat import Boxes, boxes_of, number, parse_domain
from wassail.zoo.files import (
    ALPHABETICAL,
    CLASS_NAMES,
    CLASSES,
    Table,
    Targets,
    refuse_bomb,
    small_arrays,
)
from wassail.zoo.weights import regular, sha256

LABELS = ("label", "labels", "target", "class", "y")  # names of the column of labels, else the last
LONGEST = 1 << 20  # characters of one value
LINE = 1 << 24  # characters of one line
SAMPLE_BYTES = 1 << 30  # of the boxes of all samples, each side
BOX_BYTES = 1 << 23  # of a file of boxes, and of each of its arrays unpacked
NO_PANDAS = 'Parquet files need pandas and pyarrow: pip install "wassail[tables]".'


def read_csv(path: Path, n: int | None = None, targets: Targets = CLASSES) -> Table:
    """Features float32 `(N, F)` and labels `(N,)`; names of features are in `info["features"]`.

    Labels are class numbers, or names, which are sorted and numbered over the whole file.

    path: a CSV file in UTF-8 with a header; n: the first so many samples (default: all); targets:
    which columns they are, and of what kind (default: classes in the usual one).
    """
    regular(path, "data")
    rows: list[array[float]] = []
    numbers: list[array[float]] = []
    labels: list[str] = []
    lines = _rows(path)
    header = [name.strip() for name in next(lines, [])]
    if len(header) < 2 or len(set(header)) < len(header):
        separated = len(header) == 1 and any(sign in header[0] for sign in ";\t|")
        raise InputError(
            f"{str(path)!r} needs a first line of names, all different: the features and the label"
            + (", with commas between the values." if separated else ".")
        )
    places, features = _places(header, targets)
    for at, line in enumerate(lines, start=2):
        if not line:
            continue
        if len(line) != len(header):
            raise InputError(
                f"line {at} of {str(path)!r} has {len(line)} values for {len(header)} "
                "names: repair it."
            )
        if targets.numbers and len(rows) == n:
            break
        if targets.numbers:
            numbers.append(array("d", (_value(line[i], at, path) for i in places)))
        else:
            labels.append(line[places[0]].strip())
        if n is None or len(rows) < n:  # the names of the others are numbered, too
            rows.append(array("d", (_value(line[i], at, path) for i in features)))
    names = [header[i] for i in features]
    x = np.array(rows, dtype=np.float32).reshape(len(rows), len(names))
    info = {"source": "csv", "files": {path.name: sha256(path)}, "features": names}
    info |= _named(header, places, targets)
    if targets.numbers:
        y = np.array(numbers, dtype=np.float64).reshape(len(rows), len(places))
        return Table(x, y, info, numbers=True)
    _refuse_fractions(labels, str(path))
    y, classes = _classes(labels)
    return Table(x, y[: len(rows)], info | _numbered(classes), classes)


def read_parquet(path: Path, n: int | None = None, targets: Targets = CLASSES) -> Table:
    """The same table out of a Parquet file, by pandas and what it reads Parquet with.

    n: the first so many samples (default: all); targets: which columns they are, and of what kind
    (default: classes in the usual one).
    """
    regular(path, "data")
    try:
        import pandas
    except ImportError:
        raise InputError(NO_PANDAS) from None
    try:
        _refuse_swollen(path)
        frame = pandas.read_parquet(path)
    except ImportError:
        raise InputError(NO_PANDAS) from None
    table = from_frame(frame, str(path), n, targets)
    about = {**table.info, "source": "parquet", "files": {path.name: sha256(path)}}
    return replace(table, info=about)


def _rows(path: Path) -> Iterator[list[str]]:
    """The values of each line of a CSV file; a line without an end, as a file of holes has, is
    refused.
    """

    def lines(file: IO[str]) -> Iterator[str]:
        while line := file.readline(LINE):
            if len(line) == LINE:
                raise InputError(
                    f"a line of {str(path)!r} has {LINE:,} characters or more: repair it."
                )
            yield line

    csv.field_size_limit(LONGEST)
    with open(path, newline="", encoding="utf-8-sig") as file:
        yield from csv.reader(lines(file))


def _refuse_swollen(path: Path) -> None:
    """Refuse a Parquet file that says it holds far more numbers than its bytes can mean."""
    from pyarrow.parquet import ParquetFile

    about = ParquetFile(path).metadata
    refuse_bomb(str(path), 8 * about.num_rows * max(about.num_columns, 1), path.stat().st_size)


def read_box(path: Path, features: Sequence[str] | None) -> Boxes:
    """A box for each feature out of a CSV file with the columns `feature`, `low`, `high` and
    perhaps `scale`, or an `.npz` file with arrays of these names.

    Args:
        path: of the file. An empty scale, or none, is the range; 0: the feature may not move.
        features: names of the features of the data, which decide about the order; None if they
            have no names: then the order of the file counts.
    """
    regular(path, "box")
    columns = _box_columns(path)
    missing = [name for name in ("low", "high") if name not in columns]
    if missing:
        raise InputError(
            f"{str(path)!r} has no {' and no '.join(missing)}: a box has the columns feature, low, "
            "high and perhaps scale."
        )
    names = columns.get("feature")
    size = len(columns["low"])
    order = list(range(size))
    if features is not None and names is not None:
        place = {name: i for i, name in enumerate(names)}
        lost = [name for name in features if name not in place]
        if lost or len(place) != len(features):
            raise InputError(
                f"{str(path)!r} has boxes for {len(place)} features and the data {len(features)}; "
                f"{lost[0] if lost else 'another one'!r} is in one only: give one box for each."
            )
        order = [place[name] for name in features]

    def side(name: str, empty: list[float] | None = None) -> list[float]:
        texts = columns[name]
        plain = [
            empty[i] if empty is not None and not texts[i].strip() else number(texts[i], name)
            for i in range(size)
        ]
        return [plain[i] for i in order]

    ranges = [
        (number(top, "high") - number(bottom, "low")) or 1.0
        for bottom, top in zip(columns["low"], columns["high"])
    ]
    scale = side("scale", ranges) if "scale" in columns else None
    sides: Any = (side("low"), side("high"))
    found = boxes_of(parse_domain(sides, scale, own=True))
    assert found is not None
    return found


def read_sample_boxes(path: Path, shape: tuple[int, ...]) -> Boxes | None:
    """A box for each sample out of an `.npz` file with arrays `low` and `high` of the shape of the
    samples; None for any other file.

    Args:
        path: of the file.
        shape: of all samples, `(N, *shape)`; boxes of more samples are cut.
    """
    regular(path, "box")
    if path.suffix != ".npz":
        return None
    arrays = small_arrays(path, ("low", "high"), SAMPLE_BYTES)
    if len(arrays) < 2 or any(values.ndim != len(shape) for values in arrays.values()):
        return None
    sides: Any = tuple(arrays[side][: shape[0]] for side in ("low", "high"))
    for side in sides:
        if side.shape != shape:
            raise InputError(
                f"the boxes in {str(path)!r} have shape {side.shape} and the samples {shape}: give "
                "low and high of the shape of the samples."
            )
    return boxes_of(parse_domain(sides, own=True))


def read_column(path: Path, name: str) -> list[str]:
    """One column of a CSV or Parquet file as texts."""
    regular(path, "data")
    if path.suffix == ".parquet":
        try:
            import pandas

            frame = pandas.read_parquet(path)
        except ImportError:
            raise InputError(NO_PANDAS) from None
        header = [str(column) for column in frame.columns]
        values = frame.iloc[:, header.index(name)].tolist() if name in header else []
    else:
        lines = [line for line in _rows(path) if line]
        header = [column.strip() for column in (lines or [[]])[0]]
        place = header.index(name) if name in header else None
        values = [] if place is None else [line[place].strip() for line in lines[1:]]
    if name not in header:
        raise unknown("column", name, header)
    return [str(value) for value in values]


def read_groups(path: Path) -> list[str]:
    """The group of each sample out of a file: `.npy`, or texts, one a line."""
    regular(path, "groups")
    if path.suffix == ".npy":
        found = np.load(path, allow_pickle=False)
        return [str(value) for value in found.ravel().tolist()]
    lines = [line.strip() for line in path.read_text("utf-8-sig").rstrip().splitlines()]
    if "" in lines:
        raise InputError(
            f"line {lines.index('') + 1} of {str(path)!r} is empty: give the group of each sample, "
            "one a line, in their order."
        )
    return lines


def _box_columns(path: Path) -> dict[str, list[str]]:
    """The columns of a file of boxes as texts, each of the same length."""
    if path.suffix == ".npz":
        arrays = small_arrays(path, ("feature", "low", "high", "scale"), BOX_BYTES)
        if any(values.ndim > 1 for values in arrays.values()):
            raise InputError(
                f"{str(path)!r} has boxes of each sample: freeze a number there with low = high, "
                "and leave immutable features out."
            )
        found = {
            key: [str(value) for value in values.ravel().tolist()] for key, values in arrays.items()
        }
    else:
        if path.stat().st_size > BOX_BYTES:
            raise InputError(f"{str(path)!r} has more than {BOX_BYTES:,} bytes: it is no box.")
        head, *lines = [line for line in _rows(path) if line] or [[]]
        found = {
            name.strip().lower(): [line[i] if i < len(line) else "" for line in lines]
            for i, name in enumerate(head if lines else ())
        }
        if "feature" in found:
            found["feature"] = [name.strip() for name in found["feature"]]
    if len({len(column) for column in found.values()}) > 1:
        raise InputError(f"the arrays in {str(path)!r} have different lengths: give one box each.")
    return found


def is_frame(value: Any) -> bool:
    """Whether it is a pandas data frame, or something with the same methods."""
    return all(hasattr(value, name) for name in ("columns", "to_numpy", "iloc"))


def from_frame(frame: Any, name: str, n: int | None = None, targets: Targets = CLASSES) -> Table:
    """Features `(N, F)` and labels of a data frame with a column of labels.

    Args:
        frame: a pandas data frame.
        name: what an error calls it.
        n: the first so many samples (default: all); names of classes are numbered over all.
        targets: which columns they are, and of what kind (default: classes in the usual one).
    """
    header = [str(column) for column in frame.columns]
    if len(header) < 2 or len(set(header)) < len(header):
        raise InputError(
            f"{name!r} needs at least two columns with different names: features and the label."
        )
    places, features = _places(header, targets)
    x = frame_values(frame.iloc[:n, features], name)
    info: dict[str, Any] = {"source": "frame", "features": [header[i] for i in features]}
    info |= _named(header, places, targets)
    if targets.numbers:
        return Table(x, frame_values(frame.iloc[:n, places], name), info, numbers=True)
    y, classes = _column_classes(frame.iloc[:, places[0]].to_numpy(), name)
    return Table(x, y[: len(x)], info | _numbered(classes), classes)


def frame_values(frame: Any, name: str) -> np.ndarray:
    """The numbers of a data frame, float64 unless all of them are float32, `(N, F)`.

    frame: a pandas data frame of features; name: what an error calls it.
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


def _places(header: list[str], targets: Targets) -> tuple[list[int], list[int]]:
    """The columns of the targets and those of the features."""
    for name in (*targets.columns, *targets.aside):
        if name not in header:
            raise unknown("column", name, header)
    places = [header.index(name) for name in targets.columns] or [label_place(header)]
    if len(places) > 1 and not targets.numbers:
        raise remedies(
            f"the targets are {len(places)} columns and a class is one",
            "name one column, or give tolerance or threshold",
            "name one column with --target, or add --tolerance or --threshold",
        )
    kept = {*places, *(header.index(name) for name in targets.aside)}
    features = [i for i in range(len(header)) if i not in kept]
    if not features or len(set(places)) < len(places):
        raise InputError(
            f"the columns are {', '.join(header[:8])}: name each target once, and leave features."
        )
    return places, features


def _named(header: list[str], places: list[int], targets: Targets) -> dict[str, Any]:
    """What a run records of columns that are not the usual ones; nothing of the usual one."""
    if targets == CLASSES:
        return {}
    found = {"targets": [header[place] for place in places]}
    return found | ({"aside": list(targets.aside)} if targets.aside else {})


def label_place(header: list[str]) -> int:
    """Which column holds the labels: the first that is called so, else the last.

    header: names of the columns.
    """
    named = (i for i, name in enumerate(header) if name.strip().lower() in LABELS)
    return next(named, len(header) - 1)


def _column_classes(values: np.ndarray, name: str) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Class numbers of a column of labels: whole numbers as they are, others sorted by name."""
    if values.dtype.kind in "ui":
        return values, None
    if values.dtype.kind == "f":
        raise _no_classes(name, str(values.dtype))
    return _classes([str(value) for value in values])


def _refuse_fractions(labels: list[str], name: str) -> None:
    """Refuse a column of labels whose values are all numbers, some with a fraction."""
    try:
        values = [float(text) for text in labels]
    except ValueError:
        return
    if any(value != math.floor(value) for value in values if math.isfinite(value)):
        raise _no_classes(name, "numbers with a fraction")


def _no_classes(name: str, kind: str) -> InputError:
    """One sentence for labels that are the targets of a regression."""
    cause = (
        f"the labels of {name!r} are {kind}: give class indices or names; the column of labels is "
        f"called {', '.join(LABELS)}, or is the last one"
    )
    return InputError(
        f"{cause}; for a regression say how far off it may be, with tolerance.",
        f"{cause}, or is named with --target; for a regression say how far off it may be, with "
        "--tolerance.",
    )


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


def _numbered(classes: tuple[str, ...] | None) -> dict[str, str]:
    """What a run records of labels that are names."""
    return {} if classes is None else {CLASS_NAMES: ALPHABETICAL}


def _classes(labels: list[str]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Class numbers, and names where the labels are no whole numbers."""
    if all(text.isdecimal() and len(text) < 10 for text in labels):
        return np.array([int(text) for text in labels], dtype=np.int64), None
    names = sorted(set(labels))
    place = {name: i for i, name in enumerate(names)}
    return np.array([place[text] for text in labels], dtype=np.int64), tuple(names)
