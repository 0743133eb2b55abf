"""What the model is for, on the command line: `--tolerance`, `--threshold`, `--target` and
`--immutable`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.cli.options import settings_of
from wassail.errors import InputError
from wassail.threat import number

if TYPE_CHECKING:
    from wassail.zoo.files import Targets

TABLES = (".csv", ".parquet")
MOST = 1 << 26  # bytes of tolerances


def task_options(parser: argparse.ArgumentParser) -> None:
    """Tasks that are no classification, and features that may not move."""
    group = parser.add_argument_group("the task (default: classes)")
    words = {
        "tolerance": ("T", "regression: off by less than 0.5, 5%%, or a column"),
        "threshold": ("T", "labels of 0 and 1: an output above T says 1; 0:label=3: only that one"),
        "target": ("A,B", "columns of --data that the model predicts"),
        "immutable": ("A,B", "features that may not move, names or places"),
    }
    for name, (shown, text) in words.items():
        group.add_argument(f"--{name}", metavar=shown, help=text)


def check_task_options(options: argparse.Namespace) -> None:
    """Refuse options of the task that contradict each other, without a model."""
    if options.tolerance is not None and options.threshold is not None:
        raise InputError("--tolerance is for a regression and --threshold for labels: give one.")
    if options.threshold is not None and options.one_logit:
        raise InputError("--one-logit is for classes, with threshold 0: leave it away.")
    if options.tolerance is not None and options.one_logit:
        raise InputError("--one-logit is for classes, and --tolerance for a regression: give one.")
    if options.threshold is not None:
        number(_threshold(options)[0], "--threshold")


def _threshold(options: argparse.Namespace) -> tuple[str, str | None]:
    """The threshold, and the one label that counts."""
    value, own = settings_of(options.threshold, ("label",))
    return value, own.get("label")


def names_in(text: str | None) -> tuple[str, ...]:
    """The names of a list with commas."""
    return () if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def targets_from(options: argparse.Namespace) -> Targets:
    """Which columns the targets are, and whether they are numbers."""
    from wassail.zoo.files import Targets

    numbers = options.tolerance is not None or options.threshold is not None
    named = options.tolerance is not None and not _is_number(options.tolerance)
    table = Path(options.data).suffix in TABLES
    aside = (options.tolerance,) if named and table else ()
    if table and _groups_in_words(options):
        aside = (*aside, options.groups)
    return Targets(numbers, names_in(options.target), aside)


def _groups_in_words(options: argparse.Namespace) -> bool:
    """Whether `--groups` is a column of words, which no network takes."""
    from wassail.zoo.files import reading
    from wassail.zoo.tables import read_column

    groups, path = getattr(options, "groups", None), Path(options.data)
    if groups in (None, "classes") or Path(groups).is_file() or not path.is_file():
        return False
    with reading(options.data):
        return not all(_is_number(value) for value in read_column(path, groups))


def task_from(options: argparse.Namespace) -> dict[str, Any]:
    """`tolerance`, `threshold` and `label` of `evaluate`, where they are given."""
    threshold, label = (None, None) if options.threshold is None else _threshold(options)
    found = {"threshold": threshold, "label": label}
    tolerance = options.tolerance
    if tolerance is not None and not _is_number(tolerance):
        tolerance = _own(options)
    return {**found, "tolerance": tolerance}


def _is_number(text: str) -> bool:
    try:
        number(text.strip().removesuffix("%"), "tolerance")
    except InputError:
        return False
    return True


def _own(options: argparse.Namespace) -> list[float]:
    """The tolerance of each sample out of a column or an array of the data."""
    from wassail.zoo.files import reading, small_arrays
    from wassail.zoo.tables import read_column

    path = Path(options.data)
    with reading(options.data):
        if path.suffix in TABLES:
            texts = read_column(path, options.tolerance)
            values = [number(text, options.tolerance) for text in texts]
        elif path.suffix == ".npz":
            arrays = small_arrays(path, (options.tolerance,), MOST)
            if options.tolerance not in arrays:
                raise InputError(
                    f"--tolerance is {options.tolerance!r}, and {options.data!r} has no such "
                    "array: give a number, 5% of the target, or an array of one for each sample."
                )
            values = arrays[options.tolerance].tolist()
        else:
            raise InputError(
                f"--tolerance is {options.tolerance!r}: give a number in the unit of the targets, "
                "or 5% of the target."
            )
    return values if options.n is None else values[: options.n]
