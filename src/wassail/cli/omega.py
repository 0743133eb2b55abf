"""`wassail omega`: a property of a distribution, and the check of an answer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from wassail.cli.options import shared
from wassail.cli.shared import checked_threads, seconds_text, use_threads, writing
from wassail.errors import FAILS, HOLDS, UNKNOWN, InputError
from wassail.writing import rounded_down, rounded_up, save

SAMPLED = 20  # samples that are proved again, by default


def omega_options(children: argparse._SubParsersAction[Any]) -> None:
    """The options of `wassail omega`."""
    parser = children.add_parser(
        "omega", help="holds, fails or unknown: a bound over all distributions near given samples"
    )
    parser.add_argument("file", metavar="omega.json", help="the property")
    parser.add_argument(
        "--timeout", metavar="S", help="seconds (default: effort, not time, is limited)"
    )
    parser.add_argument(
        "--effort",
        metavar="S",
        help="seconds of one core for each sample, counted in operations (default: 2)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the answer with what it rests on"
    )
    parser.add_argument("--check", metavar="FILE", help="an answer to check, instead of a decision")
    parser.add_argument(
        "--again",
        metavar="K",
        default=str(SAMPLED),
        help="with --check: samples proved again, drawn at random, or all (default: %(default)s)",
    )
    shared(parser, "--seed", help="of draws (default: %(default)s)")
    shared(parser, "--threads")
    parser.set_defaults(run=omega_command)


def omega_command(options: argparse.Namespace) -> int:
    """Decide a property, or check an answer."""
    checked_threads(options)
    limit = None if options.timeout is None else seconds_text(options.timeout)
    effort = None if options.effort is None else seconds_text(options.effort)
    again = _count(options.again)
    if options.check is not None and (options.output or limit is not None or effort is not None):
        raise InputError("--check decides nothing: give it without --timeout, --effort and -o.")
    use_threads(options)
    if options.check is not None:
        return _check(options, again)
    return _decide(options, limit, effort)


def _count(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or len(text) > 9:
        raise InputError(f"--again is {text!r}: give a whole number, or all.")
    return int(text)


def _decide(options: argparse.Namespace, limit: float | None, effort: float | None) -> int:
    """One word, and its figures on standard error."""
    from wassail.omega.decide import decide_omega
    from wassail.omega.property import read_omega

    property_ = read_omega(options.file)
    answer = decide_omega(property_, time_limit=limit, effort=effort, seed=options.seed)
    print(answer.status)
    if answer.reason:
        print(f"unknown: {answer.reason}", file=sys.stderr)
    else:
        low, high = answer.bounds
        figure = f"{property_.measure} in the worst case: {rounded_down(low)} to {rounded_up(high)}"
        print(f"{property_}: {figure}", file=sys.stderr)
    if answer.checked:
        print(f"checked in {', '.join(answer.checked)}", file=sys.stderr)
    if options.output is not None:
        with writing(Path(options.output)):
            save(options.output, json.dumps(answer.as_json(property_)) + "\n")
    return {"holds": HOLDS, "fails": FAILS, "unknown": UNKNOWN}[answer.status]


def _check(options: argparse.Namespace, again: int | None) -> int:
    """Whether an answer is true: confirmed, false or open."""
    from wassail.omega.answer import read_answer
    from wassail.omega.check import check_answer
    from wassail.omega.property import read_omega

    property_ = read_omega(options.file)
    answer = read_answer(options.check, property_)
    found = check_answer(property_, answer, again=again, seed=options.seed)
    print("confirmed" if found.confirmed else "false" if found.problems else "open")
    for kind, lines in (("false", found.problems), ("open", found.open), ("", found.done)):
        for line in lines:
            print(f"{kind}: {line}." if kind else f"{line}.", file=sys.stderr)
    return HOLDS if found.confirmed else FAILS if found.problems else UNKNOWN
