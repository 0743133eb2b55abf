"""`wassail vnnlib`: one property of one network, or a whole set of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from wassail.cli.options import shared
from wassail.cli.shared import checked_threads, folder_of, seconds_text, use_threads, writing
from wassail.errors import BAD_INPUT, FAILS, HOLDS, UNKNOWN, InputError
from wassail.writing import save


def vnnlib_options(children: argparse._SubParsersAction[Any]) -> None:
    """The options of `wassail vnnlib`."""
    parser = children.add_parser(
        "vnnlib", help="sat, unsat or unknown: a VNN-LIB property of an ONNX network"
    )
    parser.add_argument("network", nargs="?", metavar="NET.onnx", help="also compressed, .gz")
    parser.add_argument("property", nargs="?", metavar="PROP.vnnlib", help="also compressed, .gz")
    parser.add_argument(
        "--timeout",
        metavar="S",
        help="seconds for one property (default: those of instances.csv; else effort, not time, "
        "is limited)",
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="instances.csv instead of two files: network,property,seconds in every line",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="with --csv: results.csv, counterexamples and solved.png; started again it goes on",
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="with --csv: lines that contain this"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the verdict and the counterexample"
    )
    shared(parser, "--seed", help="of the attack (default: %(default)s)")
    shared(parser, "--threads")
    parser.set_defaults(run=vnnlib_command)


def vnnlib_command(options: argparse.Namespace) -> int:
    """Answer one property, or all of a set."""
    checked_threads(options)
    limit = None if options.timeout is None else seconds_text(options.timeout)
    if options.csv is not None:
        if options.network is not None:
            raise InputError("--csv names the files: give it, or a network and a property.")
        if options.out is None:
            raise InputError("--csv needs a place for its results: add --out DIR.")
    elif options.network is None or options.property is None:
        raise InputError("give a network and a property, or --csv instances.csv.")
    use_threads(options)
    return _one(options, limit) if options.csv is None else _set(options, limit)


def _one(options: argparse.Namespace, limit: float | None) -> int:
    """One property: the verdict, and a counterexample in the format of the competitions."""
    from wassail.vnnlib.property import Property

    property_ = Property.read(options.property)
    answer = property_.decide(options.network, time_limit=limit, seed=options.seed)
    lines = [answer.status]
    if answer.status == "sat":
        lines.append(answer.counterexample(property_))
    print("\n".join(lines))
    if answer.reason:
        print(f"unknown: {answer.reason}", file=sys.stderr)
    if answer.status == "sat":
        print(f"checked in {', '.join(answer.checked)}", file=sys.stderr)
    if options.output is not None:
        with writing(Path(options.output)):
            save(options.output, "\n".join(lines) + "\n")
    return {"unsat": HOLDS, "sat": FAILS, "unknown": UNKNOWN}[answer.status]


def _set(options: argparse.Namespace, limit: float | None) -> int:
    """A whole set: a line for each instance, then a table and a plot."""
    from wassail.vnnlib.sets import (
        Result,
        read_instances,
        run_instances,
        status_line,
        summary,
        write_plot,
    )

    folder, root = folder_of(options), Path(options.csv).parent
    assert folder is not None
    listed = [
        instance
        for instance in read_instances(options.csv)
        if options.only in f"{instance.network} {instance.question}"
    ]
    there = [i for i in listed if all(map(_is_there, (root / i.network, root / i.question)))]
    if listed and not there:
        raise InputError(
            f"none of the files in {options.csv!r} is there, the first is {listed[0].network!r}: "
            "names begin in the folder of that file."
        )

    def tell(result: Result) -> None:
        print(f"{result.network} {result.question}: {status_line(result)}", flush=True)

    results = list(run_instances(there, root, folder, limit, tell))
    print(summary(results))
    try:
        print(f"wrote {write_plot(folder, results)}")
    except InputError as error:
        print(f"no solved.png: {error}")
    done = {(i.network, i.question) for i in there}
    absent = [i for i in listed if (i.network, i.question) not in done]
    if absent:
        first = f"{absent[0].network!r} and {absent[0].question!r}"
        print(
            f"wassail: {len(absent)} of {len(listed)} instances have files that are not there, the "
            f"first {first}: put them there and start again.",
            file=sys.stderr,
        )
    return BAD_INPUT if absent else HOLDS


def _is_there(path: Path) -> bool:
    """Whether a file is there, perhaps compressed."""
    return path.is_file() or path.with_name(f"{path.name}.gz").is_file()
