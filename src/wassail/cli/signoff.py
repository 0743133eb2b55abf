"""Requirements on the command line: `--require`, `--json`, `--write`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from wassail.cli.shared import known, writing
from wassail.errors import InputError
from wassail.threat import Domain, Threat, parse_eps
from wassail.writing import append, printable, read_small, save

if TYPE_CHECKING:
    from wassail.evaluation.notes import Verification
    from wassail.evaluation.requirement import Requirement
    from wassail.evaluation.run import Evaluation
    from wassail.evaluation.signoff import Verdict
    from wassail.zoo.samples import Data


WRITTEN = (".xml", ".md", ".sarif")
SUMMARY = "job-summary"
STEP = "GITHUB_STEP_SUMMARY"  # where GitHub says which file its job summary is
KNOWN_SHIFT = re.compile(r"[a-z]+-[0-9.]+")


def signoff_options(parser: argparse.ArgumentParser) -> None:
    """What must hold, and where the answer is written."""
    group = parser.add_argument_group("sign-off")
    group.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="R",
        help='exit code 1 unless it holds: "accuracy>=0.5 at eps 2/255 order 1 confidence 0.95 '
        'proved" (or attacked, or clean); may be given several times',
    )
    group.add_argument(
        "--json", action="store_true", help="figures as JSON on stdout, all else on stderr"
    )
    group.add_argument(
        "--landmarks", action="store_true", help="known shifts: noise, blur, JPEG, ..."
    )
    group.add_argument(
        "--box",
        metavar="FILE",
        help="a box and a unit for each feature, instead of --domain: CSV with feature, low, high, "
        "scale (0: may not move), or .npz, also of each sample",
    )
    group.add_argument(
        "--write",
        action="append",
        default=[],
        metavar="FILE",
        help="the answer as a file, by its ending: .xml JUnit, .md a section for a model card, "
        ".sarif what fails for code scanning; or job-summary, which is added to the file in "
        "GITHUB_STEP_SUMMARY; may be given several times",
    )


@contextmanager
def quiet_output(options: argparse.Namespace) -> Iterator[None]:
    """With --json nothing but the JSON goes to standard output."""
    if not options.json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def parsed(options: argparse.Namespace) -> list[Requirement]:
    """The requirements, read before any work: one that cannot be answered costs no run."""
    if SUMMARY in options.write and not os.environ.get(STEP):
        raise InputError(f"--write job-summary needs {STEP}, which is not set: name a file there.")
    files = [target for target in options.write if target != SUMMARY]
    known("ending of a file", [Path(target).suffix for target in files], WRITTEN)
    for target in files:
        if not Path(target).parent.is_dir():
            raise InputError(f"cannot write {target!r}: there is no such folder; make it first.")
    if not options.require:
        return []
    from wassail.evaluation.requirement import parse_requirement

    asked = [parse_requirement(text) for text in options.require]
    for requirement in asked:
        if requirement.side == "proved" and options.certify is None:
            raise InputError(f"{requirement.text!r} needs a proof: add --certify.")
    return asked


def budget(text: str) -> float | str:
    """An eps as a number, or the name of a known shift whose eps is meant."""
    return text if KNOWN_SHIFT.fullmatch(text) else parse_eps(text)


def threats_of(
    budgets: Sequence[float | str],
    orders: Sequence[float],
    norm: float,
    domain: Domain,
    data: Data,
    seed: int,
) -> list[Threat]:
    """The threats, with the eps of known shifts computed from the data for each order."""
    found = []
    for eps in budgets:
        distance = None
        if isinstance(eps, str):
            from wassail.evaluation.landmarks import changed, mean_cost
            from wassail.geometry import distances

            x, _ = data.read(0, len(data))
            distance = distances(changed(x, eps, domain, seed), x, norm)
        for order in orders:
            value = parse_eps(eps) if distance is None else mean_cost(distance, order)
            found.append(Threat(norm, order, value, domain))
    return found


def has_results(folder: Path | None) -> bool:
    """Whether a folder holds results already: a sign-off looks at those again.

    folder: of the run, or None.
    """
    return folder is not None and any((folder / "results").glob("*/*.safetensors"))


def judged(
    run: Evaluation,
    asked: Sequence[Requirement],
    verify: Callable[[bool], Verification] | None = None,
) -> tuple[list[Verdict], Verification | None]:
    """The verdicts, and what was verified of results that were stored before.

    Args:
        run: the evaluation.
        asked: the requirements.
        verify: looks again at a run with results that were stored before; given whether radii
            count. None where this process computed all of it.
    """
    from wassail.evaluation.signoff import check, looked_at

    verdicts = [check(run, requirement) for requirement in asked]
    if not verdicts or verify is None:
        return verdicts, None
    looked = verify(any(requirement.side == "proved" for requirement in asked))
    return [looked_at(verdict, looked) for verdict in verdicts], looked


def recorded(run: Evaluation) -> list[Verdict]:
    """The verdicts on the requirements in the command that a run records, as far as they are some.

    run: the evaluation, perhaps a stranger's.
    """
    from wassail.evaluation.signoff import check

    command = run.info.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    texts = [after for word, after in pairwise(words) if word == "--require"]
    texts += [word.partition("=")[2] for word in words if word.startswith("--require=")]
    found = []
    for text in texts:
        with suppress(InputError):
            found.append(check(run, text))
    return found


def sign_off(
    options: argparse.Namespace,
    run: Evaluation,
    verdicts: Sequence[Verdict],
    looked: Verification | None = None,
) -> int:
    """Print and write the verdicts; 1 if a requirement does not hold.

    options: of the command line; verdicts: of `judged`; looked: what was verified of results that
    were stored before, or None.
    """
    from wassail.report.card import job_summary, model_card
    from wassail.report.machine import as_json, as_junit
    from wassail.report.sarif import as_sarif

    def sarif() -> str:
        log = as_sarif(run, verdicts, looked, _places(options, verdicts))
        return json.dumps(log, indent=1) + "\n"

    texts = {
        ".xml": lambda: as_junit(run, verdicts, looked),
        ".md": lambda: model_card(run, verdicts),
        ".sarif": sarif,
    }

    with quiet_output(options):
        for verdict in verdicts:
            print(printable(str(verdict)))
        for target in options.write:
            if target == SUMMARY:
                target = os.environ[STEP]
                with writing(Path(target)):
                    append(target, job_summary(run, verdicts).encode())
                print(f"added a summary to {target}")
                continue
            with writing(Path(target)):
                save(target, texts[Path(target).suffix]())
            print(f"wrote {target}")
    if options.json:
        print(json.dumps(as_json(run, verdicts, looked), indent=1))
    return 0 if all(verdicts) else 1


def _places(options: argparse.Namespace, verdicts: Sequence[Verdict]) -> dict[str, tuple[str, int]]:
    """Where the configuration asks for each requirement."""
    from wassail.report.sarif import lines_of

    file = options.config
    if file is None:
        return {}
    text = read_small(file, 1 << 20, "a configuration").decode()
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    name = path.name if path.is_absolute() else path.as_posix()
    return lines_of(text, name, [verdict.requirement.text for verdict in verdicts])
