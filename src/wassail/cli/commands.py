"""The command line. Heavy imports happen inside the commands, so that `wassail --help` answers
at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wassail.cli.options import settings_of
from wassail.cli.others import groups_from, others_from
from wassail.cli.shared import (
    boxed,
    checked,
    checked_share,
    checked_threads,
    data_from,
    folder_of,
    known,
    loaded,
    model_from,
    progress,
    runner_of,
    seconds_text,
    use_threads,
    writing,
)
from wassail.cli.signoff import (
    budget,
    has_results,
    judged,
    parsed,
    quiet_output,
    recorded,
    sign_off,
    threats_of,
)
from wassail.cli.smooth import evaluate_smoothed
from wassail.cli.task import check_task_options, names_in, targets_from, task_from
from wassail.errors import InputError
from wassail.evaluation.settings import Choices
from wassail.names import ATTACKS, EXPORTS, FIGURES
from wassail.threat import Domain, number, parse_norm, parse_order
from wassail.writing import make, printable, save

if TYPE_CHECKING:
    from wassail.evaluation.notes import Verification
    from wassail.evaluation.run import Evaluation
    from wassail.evaluation.signoff import Verdict


def models_command(options: argparse.Namespace) -> int:
    """`wassail models`."""
    from wassail import zoo

    for name, description in zoo.builtin().items():
        print(f"{name:16} {description}")
    return 0


# Options that are keyword arguments of `evaluate` as they stand.
SAME = (
    *("effort", "closing", "provers", "seed"),
    *("chunk", "batch_size", "gradients", "look"),
)
COMPARED = (".html", ".tex", ".csv", ".json", ".svg", ".pdf")  # what `compare` writes


class _Asked(NamedTuple):
    """What the options of `evaluate` say, as far as that is known without a model: the domain
    before the boxes of a file, the attacks with those that are added.
    """

    norm: float
    domain: Domain
    orders: list[float]
    budgets: list[float | str]
    choices: Choices
    attacks: dict[str, dict[str, Any]]
    others: dict[str, Any]


def evaluate_command(options: argparse.Namespace) -> int:
    """`wassail evaluate`: what can be wrong without a model is checked before torch is imported."""
    if options.norm is None:
        options.norm = "inf" if options.smooth is None else "2"
    if options.smooth is not None:
        return evaluate_smoothed(options)
    asked = _asked(options)
    requirements = parsed(options)
    folder = folder_of(options)
    stored = has_results(folder)
    import wassail as ws
    from wassail.zoo.features import points_in_boxes
    from wassail.zoo.points import read_points

    source, data = loaded(options, targets_from(options))
    task = task_from(options)
    points = None if options.points is None else read_points(options.points)
    if points is not None and options.n is not None:
        points = points[: options.n]
    domain = asked.domain
    held = names_in(options.immutable)
    if options.box is not None or held:
        before = data
        source, data, domain = boxed(options.box, source, data, domain, held)
        if points is not None and data is not before:
            points = points_in_boxes(points, data)
    attacks = _chosen_attacks(options, asked.attacks, folder)
    others = asked.others | groups_from(options, data)
    with runner_of(options) as runner:
        run = ws.evaluate(
            source,
            data,
            threats_of(asked.budgets, asked.orders, asked.norm, domain, data, options.seed),
            attacks,
            out=folder,
            resume=options.resume or bool(options.add_attack),
            add=bool(options.add_attack) or (options.resume and points is not None),
            points=points,
            passes=options.passes,
            **vars(asked.choices),
            **others,
            **task,
            landmarks="standard" if options.landmarks else None,
            name=options.name,
            command=sys.argv[1:],
            runner=runner,
            progress=progress(options),
        )
    again = (lambda proved: run.verify(source.model, data, proved)) if stored else None
    verdicts, looked = judged(run, requirements, again)
    with quiet_output(options):
        _print_run(options, run, folder, verdicts)
    return sign_off(options, run, verdicts, looked)


def _asked(options: argparse.Namespace) -> _Asked:
    """The options, checked without a model."""
    norm, domain = checked(options)
    check_task_options(options)
    orders = list(dict.fromkeys(map(parse_order, options.order)))
    budgets = list(dict.fromkeys(map(budget, options.eps)))
    attacks = attack_options([*options.attacks, *options.add_attack])
    method, own = options.certify, dict[str, str]()
    if method is not None:
        method, own = settings_of(method, ("arithmetic",))
    if method == "smoothing":
        raise InputError("--certify smoothing is for a smoothed model: add --smooth SIGMA.")
    seconds = None if options.time_limit is None else seconds_text(options.time_limit)
    gap = None if options.gap is None else number(options.gap, "--gap") / 100
    same = {name: getattr(options, name) for name in SAME}
    certify = None if method is None else method or "auto"
    choices = Choices(
        certify=certify,
        gap=gap,
        time_limit=seconds,
        arithmetic=own.get("arithmetic", "auto"),
        **same,
    )
    if (options.resume or options.add_attack) and options.out is None:
        raise InputError(
            "--resume and --add-attack need --out: the folder of the run to go on with."
        )
    return _Asked(norm, domain, orders, budgets, choices, attacks, others_from(options))


def attack_options(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Attacks with their options: `wda:kappa=4,step=8/255`.

    words: names, perhaps with options behind a colon.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, _, given = word.partition(":")
        known("attack", [name], ATTACKS)
        own = found.setdefault(name, {})
        for part in given.split(",") if given else ():
            key, equals, value = part.partition("=")
            if not (key and equals and value):
                raise InputError(f"cannot read {word!r}: write {name}:option=value,option=value.")
            own[key] = _plain(value)
    return found


def _plain(text: str) -> int | float | str:
    """A whole number, a number, or the text itself."""
    try:
        value = number(text)
    except InputError:
        return text
    return int(text) if text.isdecimal() else value


def _chosen_attacks(
    options: argparse.Namespace, asked: dict[str, dict[str, Any]], folder: Path | None
) -> dict[str, dict[str, Any]]:
    """The attacks with the options of each: those asked for, beside those of a run that is
    extended.
    """
    if not options.add_attack or folder is None:
        return asked
    from wassail.evaluation.configuration import attacks_of
    from wassail.evaluation.store.store import Store

    before = attacks_of(Store.open(folder).config)
    added = attack_options(options.add_attack)
    return before | {name: before.get(name, {}) | own for name, own in added.items()}


def _print_run(
    options: argparse.Namespace, run: Evaluation, folder: Path | None, verdicts: Sequence[Verdict]
) -> None:
    """The run on the terminal, and its pages beside it.

    options: of the command line; folder: the run directory, or None.
    """
    from wassail.report.terminal import points_text, print_evaluation, print_landmarks

    print_evaluation(run)
    if options.points is not None:
        print(points_text(run, options.points))
    if run.landmarks:
        print_landmarks(run)
    if folder is not None:
        _write_pages(run, folder, verdicts)


def _write_pages(run: Evaluation, folder: Path, verdicts: Sequence[Verdict] = ()) -> None:
    """The page and the picture beside the run."""
    from wassail.report.drawing import figure_of_runs
    from wassail.report.page import write_report

    with writing(folder):
        print(f"wrote {write_report(run, folder / 'report.html', verdicts=verdicts)}")
        if len(run):
            print(f"wrote {save(folder / 'sandwich.svg', figure_of_runs([run]).svg())}")


def report_command(options: argparse.Namespace) -> int:
    """`wassail report`."""
    import wassail as ws
    from wassail.evaluation.smoothed import is_smoothed
    from wassail.report.page import write_report
    from wassail.report.smoothing import write_smoothing

    path = Path(options.output or Path(options.folder) / "report.html")
    if is_smoothed(options.folder):
        with writing(path):
            print(f"wrote {write_smoothing(options.folder, path)}")
        return 0
    run = ws.Evaluation.load(options.folder)
    with writing(path):
        print(f"wrote {write_report(run, path, verdicts=recorded(run))}")
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """`wassail compare`: the table on the terminal, and files by their endings."""
    paths = [Path(name) for name in options.output or ("compare.html",)]
    for path in paths:
        known("ending of a file", [path.suffix], COMPARED)
    import wassail as ws
    from wassail.report.compare import told_apart, write_comparison
    from wassail.report.export import write_runs
    from wassail.report.terminal import print_comparison

    loaded_runs = [ws.Evaluation.load(folder) for folder in options.folders]
    print_comparison(loaded_runs)
    runs = told_apart(loaded_runs)
    for path in paths:
        with writing(path):
            if path.suffix == ".html":
                write_comparison(loaded_runs, path)
            else:
                write_runs(runs, path)
        print(f"wrote {path}")
    return 0


def board_command(options: argparse.Namespace) -> int:
    """`wassail board`."""
    import wassail as ws
    from wassail.paper.published import PUBLISHED
    from wassail.report.board import write_board
    from wassail.report.standing import standing

    runs = [ws.Evaluation.load(folder) for folder in options.folders]
    standings = [standing(run, options.signer, options.verify) for run in runs]
    lines = [line.record for line in PUBLISHED]
    folder = Path(options.output)
    with writing(folder):
        index = write_board(runs, folder, lines, standings)
    print(f"wrote {index} and {folder / 'board.json'}")
    return 0


def export_command(options: argparse.Namespace) -> int:
    """`wassail export`."""
    known("format", options.formats, EXPORTS)
    import wassail as ws
    from wassail.report import export

    run = ws.Evaluation.load(options.folder)
    folder = Path(options.output or Path(options.folder) / "export")
    model = None if options.model is None else model_from(options, run.threat.norm).model
    with writing(folder):
        make(folder)
        for name in dict.fromkeys(options.formats):
            print(f"wrote {export.write(run, name, folder, model, options.dataset)}")
    return 0


def verify_command(options: argparse.Namespace) -> int:
    """Exit code 1 if something in the run is false."""
    checked_threads(options)
    share = checked_share(options.radii)
    from wassail.evaluation.smoothed import is_smoothed

    use_threads(options)
    look = _verify_smoothed if is_smoothed(options.folder) else _verify_run
    found, write = look(options, share)
    if options.seal is not None:
        found = _with_seal(found, options)
    print(printable(str(found), "\n"))
    if options.output is not None:
        print(f"wrote {write(found)}")
    return 0 if found else 1


def _verify_run(
    options: argparse.Namespace, share: float
) -> tuple[Verification, Callable[[Verification], Path]]:
    """A run: what was found, and what writes its page."""
    import wassail as ws
    from wassail.evaluation.criterion import recorded_targets
    from wassail.report.page import write_report

    run = ws.Evaluation.load(options.folder)
    source = model_from(options, run.threat.norm)
    numbers = recorded_targets(run.info.get("data"), run.criterion)
    data = (
        None
        if options.data is None
        else data_from(options, options.data, max(len(run), 1), numbers)
    )
    found = run.verify(source.model, data, share, seed=options.seed)
    return found, lambda found: write_report(run, options.output, verified=found)


def _verify_smoothed(
    options: argparse.Namespace, share: float
) -> tuple[Verification, Callable[[Verification], Path]]:
    """The results of a smoothed model."""
    from wassail.evaluation.smoothed import read_smoothing, verify_smoothed
    from wassail.report.smoothing import write_smoothing

    if options.data is None:
        raise InputError(
            f"{options.folder!r} is of a smoothed model, and holds no samples: add --data."
        )
    stated = read_smoothing(options.folder).get("samples")
    size = stated if isinstance(stated, int) and 0 < stated < 1 << 31 else 1
    source = model_from(options, 2.0)
    data = data_from(options, options.data, size)
    found = verify_smoothed(options.folder, source.model, data, share, seed=options.seed)
    return found, lambda found: write_smoothing(options.folder, options.output, found)


def _with_seal(found: Verification, options: argparse.Namespace) -> Verification:
    """The answer with what the seal of the run says."""
    from wassail.evaluation.sealing import SEAL, check_seal

    known = check_seal(options.folder, options.seal or None)
    name = f"file {SEAL}"
    said = str(known)
    return replace(
        found,
        problems=found.problems + (() if known else (said,)),
        checked=found.checked + ((said,) if known else ()),
        fields=(*found.fields, name),
        unread=tuple(entry for entry in found.unread if entry != name),
    )


def seal_command(options: argparse.Namespace) -> int:
    """`wassail seal`."""
    from wassail.evaluation.sealing import check_seal, seal

    with writing(Path(options.folder)):
        print(f"wrote {seal(options.folder, options.key)}")
    print(check_seal(options.folder))
    return 0


def figures_command(options: argparse.Namespace) -> int:
    """`wassail paper figures`."""
    names = list(dict.fromkeys(options.names)) or list(FIGURES)
    known("figure", names, FIGURES)
    chosen: dict[str, Any] = {
        "norm": None if options.norm is None else parse_norm(options.norm),
        "data": options.data,
    }
    chosen |= {
        name: getattr(options, name)
        for name in ("model", "n", "eps")
        if getattr(options, name) is not None
    }
    from wassail.paper.figures import write
    from wassail.plots import own_style

    with writing(Path(options.out)), own_style():
        paths = write(options.out, names, seed=options.seed, **chosen)
    for path in paths:
        print(f"wrote {path}")
    return 0


def table_command(options: argparse.Namespace) -> int:
    """`wassail paper table`."""
    checked_threads(options)
    if options.n < 1:
        raise InputError(f"-n is {options.n}: give a positive number of samples.")
    norms = [parse_norm(norm) for norm in options.norm]
    folder = folder_of(options)
    assert folder is not None
    from wassail.paper.pages import write_pages
    from wassail.paper.published import ATTACKS, parse_budgets
    from wassail.paper.table import table

    use_threads(options)
    found = table(
        options.models,
        options.data,
        norms,
        folder=folder,
        eps=parse_budgets(options.eps, norms),
        n=options.n,
        attacks=options.attacks or ATTACKS,
        passes=options.passes,
        resume=options.resume,
        dataset=options.dataset,
        models_dir=options.models_dir,
        seed=options.seed,
        batch_size=options.batch_size,
        progress=progress(options),
        begin=lambda text: print(text, file=sys.stderr),
    )
    print(found)
    with writing(folder):
        pages = write_pages(found, folder)
    print(f"wrote {folder / 'table.csv'}, {folder / 'table.md'} and {pages[0]}")
    return 0 if found.done else 2
