"""Other people and labels on the command line: `--label-cost`, `--subpopulation`, `--groups`,
`--group-weights`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.cli.shared import data_from
from wassail.cli.task import targets_from
from wassail.errors import InputError
from wassail.threat import Groups, number, parse_label_cost, parse_subpopulation

if TYPE_CHECKING:
    from wassail.zoo.samples import Data


def others_options(parser: argparse.ArgumentParser) -> None:
    """Labels that change and other people: figures beside those of the threats."""
    group = parser.add_argument_group("other people and labels")
    group.add_argument(
        "--label-cost", metavar="K", help="price of a changed label, as an eps (default: inf)"
    )
    group.add_argument(
        "--subpopulation", metavar="S", help="least share of people that is there (default: 1)"
    )
    group.add_argument(
        "--groups", metavar="G", help="classes, a column of --data, or a text or .npy file"
    )
    group.add_argument(
        "--group-weights",
        nargs="+",
        default=[],
        metavar="W",
        help="LOW:HIGH for every group, NAME=LOW:HIGH for one (default: 0:1)",
    )


def others_from(options: argparse.Namespace) -> dict[str, Any]:
    """`label_cost` and `subpopulation`, where they are given, checked without a model."""
    if options.group_weights and options.groups is None:
        raise InputError("--group-weights needs --groups: say which groups they are for.")
    ranges_of(options.group_weights)
    found: dict[str, Any] = {}
    if options.label_cost is not None:
        found["label_cost"] = parse_label_cost(options.label_cost)
    if options.subpopulation is not None:
        found["subpopulation"] = parse_subpopulation(options.subpopulation)
    return found


def groups_from(options: argparse.Namespace, data: Data) -> dict[str, Any]:
    """The groups of the samples with their ranges, where they are given."""
    if options.groups is None:
        return {}
    ids = _ids(options, data)
    every, low, high = ranges_of(options.group_weights)
    names = sorted(set(map(str, ids)))
    strange = [name for name in low if name not in names]
    if strange:
        known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InputError(
            f"group {strange[0]!r} of --group-weights has no samples, so nothing is known about "
            f"it: the groups are {known}."
        )
    ends = [{name: side.get(name, end) for name in names} for side, end in zip((low, high), every)]
    return {"groups": Groups(tuple(map(str, ids)), *ends)}


def _ids(options: argparse.Namespace, data: Data) -> Sequence[object]:
    """The group of each sample: its class, or what a file or a column says."""
    from wassail.zoo.files import reading
    from wassail.zoo.tables import read_column, read_groups

    if options.groups == "classes":
        y = data.read(0, len(data))[1]
        if y.is_floating_point():
            raise InputError(
                "--groups classes is for classes, and these are targets or labels: give a file "
                "with the group of each sample, or a column of the table."
            )
        labels = y.tolist()
        return labels if data.classes is None else [data.classes[label] for label in labels]
    if Path(options.groups).is_file():
        with reading(options.groups):
            found = read_groups(Path(options.groups))
        whole = _samples_in_all(options, data)
        if len(found) not in (len(data), whole):
            raise InputError(
                f"{options.groups!r} has {len(found)} groups for {whole} samples: give the group "
                "of each sample, one a line."
            )
        return found[: len(data)]
    path = Path(options.data)
    if path.suffix not in (".csv", ".parquet") or not path.is_file():
        raise InputError(
            f"--groups is {options.groups!r}, which is no file, and --data is no table: give "
            "classes, a file with the group of each sample, or a column of a .csv or .parquet file."
        )
    with reading(options.data):
        return read_column(path, options.groups)[: len(data)]


def _samples_in_all(options: argparse.Namespace, data: Data) -> int:
    """How many samples the data have without `-n`."""
    if options.n is None:
        return len(data)
    return len(data_from(options, options.data, targets=targets_from(options)))


def ranges_of(
    words: Sequence[str],
) -> tuple[tuple[float, float], dict[str, float], dict[str, float]]:
    """The range of every group, and the lower and upper ends of those that are named."""
    every = (0.0, 1.0)
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for word in words:
        name, named, text = word.rpartition("=")
        ends = [number(end, "--group-weights") for end in text.split(":")]
        if len(ends) > 2 or (named and not name):
            raise InputError(
                f"--group-weights has {word!r}: write LOW:HIGH for every group, or NAME=LOW:HIGH."
            )
        if named:
            low[name], high[name] = ends[0], ends[-1]
        else:
            every = (ends[0], ends[-1])
    return every, low, high
