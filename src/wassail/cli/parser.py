"""Every command with its options, and how it ends."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NoReturn

from wassail.cli.certificate import certify_command
from wassail.cli.commands import (
    board_command,
    compare_command,
    evaluate_command,
    export_command,
    figures_command,
    models_command,
    report_command,
    table_command,
)
from wassail.cli.config import apply_config, config_in, init_command
from wassail.cli.demo import demo_command
from wassail.cli.evidence import (
    evidence_command,
    evidence_options,
    recheck_command,
    recheck_options,
    seal_any,
    verify_any,
    verify_options,
)
from wassail.cli.omega import omega_options
from wassail.cli.options import (
    DEMO_GAP,
    DEMO_SAMPLES,
    DEMO_SECONDS,
    RUN_FILES,
    SUMMARY,
    Patient,
    common_options,
    model_options,
    refuse_gone,
    run_options,
    shared,
    threat_options,
)
from wassail.cli.others import others_options
from wassail.cli.signoff import signoff_options
from wassail.cli.smooth import smooth_options
from wassail.cli.task import task_options
from wassail.cli.vnnlib import vnnlib_options
from wassail.errors import BAD_INPUT, HOLDS, INTERNAL, SIGNALLED, InputError
from wassail.names import EXPORTS, FIGURES, SLOPES
from wassail.writing import printable

# Python's collector otherwise walks all that torch's import leaves, again and again: an eighth of a
# short command.
FEW_COLLECTIONS = (50_000, 20, 50)

SHELLS = ("bash", "zsh", "fish")
# Commands of earlier versions, and what replaces them.
GONE = {
    "attack": "wassail evaluate --no-look, or without that option for its checks, too",
    "smooth": "wassail evaluate --smooth SIGMA with the same options",
}
# Seconds for the proof of a sample in a pack: some hundred samples take minutes, not an hour.
PACK_EFFORT = "0.3"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, as all others are."""

    def error(self, message: str) -> NoReturn:
        """End with the exit code of bad input.

        message: what argparse has to say.
        """
        said = printable(message)
        self.exit(BAD_INPUT, f"wassail: {said}; see `{self.prog} --help`.\n")


class Ended(SystemExit):
    """A signal asked the command to end. No proof takes it for a Ctrl-C that asks for what is
    known so far.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, one of those in `wassail.errors`.

    Bad input is one sentence on stderr. A reader that has seen enough (`| head -1`) ends the
    printing, not the work.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*FEW_COLLECTIONS)
    out: Any = sys.stdout
    patient: Any = None if out is None else Patient(out)  # None: closed
    sys.stdout = patient
    try:
        return _main(argv)
    finally:
        if patient is not None:
            patient.flush()
        sys.stdout = out
        gc.set_threshold(*thresholds)


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return HOLDS
    options = argparse.Namespace()
    try:
        with _ending():
            if words[0] in GONE:
                raise InputError(
                    f"`wassail {words[0]}` is a part of `wassail evaluate`: write {GONE[words[0]]}."
                )
            refuse_gone(words, _child(parser, words)._option_string_actions)
            file = config_in(words) if words[0] in ("evaluate", "evidence") else None
            if file is not None:
                apply_config(_child(parser, words), file, "--trust" in words)
            options = parser.parse_args(words)
            code: int = options.run(options)
            return code
    except InputError as error:
        _say(error.command)
        return BAD_INPUT
    except KeyboardInterrupt:
        _say(f"interrupted.{_go_on(parser, words, options)}")
        return SIGNALLED + signal.SIGINT
    except Ended as ended:
        _say(f"ended by {ended}.{_go_on(parser, words, options)}")
        return SIGNALLED + signal.Signals[str(ended)]
    except Exception as error:  # also what the code of a model raises
        traceback.print_exc()
        _say(
            f"{type(error).__name__} inside, which says nothing about the model (exit code "
            f"{INTERNAL}): if the lines above end in code of yours repair it, else report them."
        )
        return INTERNAL


def _say(text: str) -> None:
    """One sentence on stderr. What a file says may be quoted in it, and a terminal obeys control
    characters.
    """
    said = printable(text)
    print(f"wassail: {said}", file=sys.stderr)


def _go_on(
    parser: argparse.ArgumentParser, words: Sequence[str], options: argparse.Namespace
) -> str:
    """How an interrupted command is continued, for those that can be."""
    if getattr(options, "out", None) is None or not hasattr(options, "resume"):
        return ""
    if "--resume" in _child(parser, words)._option_string_actions:
        return " What was done is kept: go on with --resume."
    return " What was done is kept: start it again to go on." if options.resume else ""


@contextmanager
def _ending() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process with a sentence, unless they are handled."""
    process = os.getpid()
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    kept = {}

    def end(number: int, frame: Any) -> None:
        if os.getpid() == process:
            raise Ended(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)  # a child of this process ends as it always did
        os.kill(os.getpid(), number)

    for name in names:
        number = getattr(signal, name)
        try:
            if signal.getsignal(number) == signal.SIG_DFL:
                kept[number] = signal.signal(number, end)
        except ValueError:  # not the main thread
            break
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def _child(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that these words begin with."""
    paths = [path for path, _ in commands(parser) if tuple(words[: len(path)]) == path]
    return dict(commands(parser))[max(paths, key=len)]


def _parser() -> argparse.ArgumentParser:
    """The commands and their options, in the order of `wassail --help`."""
    parser = Parser(prog="wassail", description=SUMMARY)
    parser.add_argument("--version", action="version", version=f"wassail {version('wassail')}")
    children = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = children.add_parser(
        "demo",
        help=f"attack and certify the embedded model on {DEMO_SAMPLES} samples: about a minute",
    )
    evaluate = _evaluate_command(children)
    _demo_command(demo, evaluate)
    _page_commands(children)
    evidence = _evidence_commands(children, evaluate)
    _verify_command(children)
    _export_command(children)
    _certify_command(children)
    vnnlib_options(children)
    omega_options(children)
    _paper_commands(children)
    init = children.add_parser("init", help="write a commented file for `evaluate --config`")
    init.add_argument(
        "file", nargs="?", default="wassail.toml", metavar="FILE", help="default: %(default)s"
    )
    init.add_argument(
        "--evidence", action="store_true", help="the file is for `wassail evidence --config`"
    )
    init.add_argument(
        "--box-of",
        metavar="DATA",
        help="instead: a file for --box, with the range of each feature in a table",
    )
    init.add_argument(
        "--target", metavar="A,B", help="with --box-of: columns of numbers that are predicted"
    )
    init.set_defaults(
        run=lambda options: init_command(options, evidence if options.evidence else evaluate)
    )
    complete = children.add_parser("completion", help="print a script that completes commands")
    complete.add_argument("shell", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    complete.set_defaults(run=lambda options: _complete(parser, options.shell))
    models = children.add_parser("models", help="list the built-in models")
    models.set_defaults(run=models_command)
    return parser


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The parser and all below it, each with the words that lead there."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*path, name))


def _complete(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print shtab's script; what is no option of a fixed list is completed to a file."""
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError:
        raise InputError(
            "completion needs the package shtab: pip install 'wassail[completion]'."
        ) from None
    for _, child in commands(parser):
        for action in child._actions:
            if action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))
    return 0


def _runs_evaluate(
    parser: argparse.ArgumentParser, evaluate: argparse.ArgumentParser, **own: Any
) -> None:
    """Give a command that runs `evaluate` the defaults of all options that it does not have.

    evaluate: the parser of `evaluate`; own: defaults of the command's own.
    """
    mine = {action.dest for action in parser._actions}
    known = {name: value for name, value in evaluate._defaults.items() if name not in mine}
    known |= {name: value for name, value in known["usual"].items() if name not in mine}
    parser.set_defaults(**(known | own))


def _demo_command(demo: argparse.ArgumentParser, evaluate: argparse.ArgumentParser) -> None:
    """`wassail demo`."""
    demo.add_argument(
        "model", nargs="?", default="digits-cnn-adv", help="a built-in model (default: %(default)s)"
    )
    # A tiny network needs one thread; proofs of two samples run side by side.
    threat_options(demo, eps="0.05", threads=1, out=f"{RUN_FILES} (default: wassail-demo)")
    run_options(demo, certify="auto", seconds=DEMO_SECONDS, gap=DEMO_GAP)
    _runs_evaluate(
        demo,
        evaluate,
        run=demo_command,
        data="digits",
        n=DEMO_SAMPLES,
        closing=1,
        provers=2,
        out="wassail-demo",
        resume=True,
    )


def _evaluate_command(children: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """`wassail evaluate`, whose options `init` writes down."""
    evaluate: argparse.ArgumentParser = children.add_parser(
        "evaluate",
        help="robust accuracy of a model on data, attacked and if asked certified; resumable",
        usage="wassail evaluate MODEL --eps EPS [EPS ...] [--out DIR] [options]",
    )
    model_options(evaluate)
    threat_options(evaluate, eps=None, threads=None, out=RUN_FILES)
    task_options(evaluate)
    others_options(evaluate)
    run_options(evaluate, certify=None, seconds=None)
    run = evaluate.add_argument_group("the run")
    run.add_argument("--resume", action="store_true", help="go on with the run in --out")
    run.add_argument(
        "--add-attack",
        nargs="+",
        default=[],
        metavar="A",
        help="extend the run in --out by these attacks",
    )
    shared(run, "--no-look")
    run.add_argument("--config", metavar="FILE", help="options from a file of `wassail init`")
    signoff_options(evaluate)
    smooth_options(evaluate)
    usual = {action.dest: action.default for action in evaluate._actions}
    evaluate.set_defaults(run=evaluate_command, closing=None, provers=1, usual=usual)
    return evaluate


def _evidence_commands(
    children: argparse._SubParsersAction[Any], evaluate: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """`wassail evidence` and `wassail recheck`."""
    evidence: argparse.ArgumentParser = children.add_parser(
        "evidence",
        help="an evaluation as a sealed pack: question, figures, limits, clauses, commands",
        usage="wassail evidence MODEL --data D --eps EPS [EPS ...] --out PACK [options]",
    )
    model_options(evidence)
    threat_options(evidence, eps=None, threads=None, out="the pack; PACK.zip is beside it")
    others_options(evidence)
    run_options(evidence, certify="auto", seconds=None, effort=PACK_EFFORT)
    run = evidence.add_argument_group("the run")
    shared(run, "--no-look")
    run.add_argument(
        "--config", metavar="FILE", help="options from a file of `wassail init --evidence`"
    )
    evidence_options(evidence)
    signoff_options(evidence)
    _runs_evaluate(evidence, evaluate, run=evidence_command, resume=True)
    recheck = children.add_parser(
        "recheck", help="does the guarantee of a pack still speak about new data?"
    )
    recheck.add_argument(
        "folder", metavar="PACK", help="the --out of `wassail evidence`, or its zip"
    )
    model_options(recheck, perhaps=True)
    recheck_options(recheck)
    recheck.set_defaults(run=recheck_command, data=None)
    return evidence


def _page_commands(children: argparse._SubParsersAction[Any]) -> None:
    """The pages of runs: `report`, `compare` and `board`."""
    report = children.add_parser("report", help="one self-contained HTML page of a run")
    report.add_argument("folder", metavar="RUN", help="the --out of an evaluation")
    report.add_argument("-o", "--output", metavar="FILE", help="default: report.html in RUN")
    report.set_defaults(run=report_command)

    compare = children.add_parser(
        "compare", help="several runs in one table, as a page, or for a paper"
    )
    compare.add_argument(
        "folders", nargs="+", metavar="RUN", help="the --out of several evaluations"
    )
    compare.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        action="append",
        default=[],
        help=".html a page, .tex .csv .json the table, .svg .pdf the curves; may be given several "
        "times (default: compare.html)",
    )
    compare.set_defaults(run=compare_command)

    board = children.add_parser(
        "board", help="a static site of many runs: tables, a page for each model, a JSON feed"
    )
    board.add_argument("folders", nargs="+", metavar="RUN", help="the --out of evaluations")
    board.add_argument("-o", "--output", metavar="DIR", default="site", help="default: %(default)s")
    board.add_argument(
        "--signer",
        action="append",
        default=[],
        metavar="KEY",
        help="runs sealed with this key stand apart from claims: a file with an Ed25519 public "
        "key, or its fingerprint SHA256:...; may be given several times",
    )
    board.add_argument(
        "--verify",
        action="store_true",
        help="verify the runs of built-in models on built-in data, radii included: they stand "
        "apart from claims",
    )
    board.set_defaults(run=board_command)


def _verify_command(children: argparse._SubParsersAction[Any]) -> None:
    """`wassail verify`."""
    verify = children.add_parser(
        "verify", help="compare a run or a pack with the model it is about: what is false?"
    )
    verify.add_argument("folder", metavar="RUN", help="the run directory, or a pack or its zip")
    model_options(verify, perhaps=True)
    verify.add_argument(
        "--radii",
        nargs="?",
        const="1",
        metavar="SHARE",
        help="prove the certified radii again; with a share (0.1) so many, drawn at random "
        "(default: none of a run; of a pack a tenth, at most 45)",
    )
    about = "of what is drawn at random (default: a new one, printed)"
    shared(verify, "--seed", default=None, help=about)
    shared(verify, "--threads")
    verify.add_argument(
        "-o", "--output", metavar="FILE", help="write the page of the run with what was verified"
    )
    verify.add_argument(
        "--seal",
        nargs="?",
        const="",
        metavar="KEY",
        help="check the seal of the run, too, and say who vouches for it; with a key (a file with "
        "an Ed25519 public key, or its fingerprint) it must be signed with that",
    )
    verify.add_argument(
        "--record",
        metavar="FILE",
        help="packs: what was verified, as JSON (default: PACK.verified.json)",
    )
    verify.add_argument(
        "--key", metavar="FILE", help="packs: an Ed25519 key that signs that record"
    )
    verify_options(verify)
    verify.set_defaults(run=verify_any, data=None)

    seal = children.add_parser(
        "seal", help="write a digest of all that a run claims, signed if there is a key"
    )
    seal.add_argument("folder", metavar="RUN", help="the --out of an evaluation")
    seal.add_argument(
        "--key",
        metavar="FILE",
        help="an Ed25519 private key, PEM or OpenSSH, without a password: needs cryptography",
    )
    seal.set_defaults(run=seal_any)


def _export_command(children: argparse._SubParsersAction[Any]) -> None:
    """`wassail export`."""
    export = children.add_parser(
        "export", help="a run for a paper or another tool: table, figures, samples, flips"
    )
    export.add_argument("folder", metavar="RUN", help="the --out of an evaluation")
    export.add_argument("formats", nargs="+", metavar="FORMAT", help=f"any of {', '.join(EXPORTS)}")
    export.add_argument(
        "-o", "--output", metavar="DIR", help="where to write (default: export in RUN)"
    )
    model_options(export, required=False)
    export.add_argument("--dataset", help="robustbench: its name of the data (default: as named)")
    export.set_defaults(run=export_command)


def _certify_command(children: argparse._SubParsersAction[Any]) -> None:
    """`wassail certify`."""
    certify = children.add_parser("certify", help="bound the worst expected loss from both sides")
    model_options(certify)
    certify.add_argument(
        "--loss", default="cross_entropy", help="cross_entropy or margin (default: %(default)s)"
    )
    certify.add_argument(
        "--eps", nargs="+", default=["0.01", "0.1", "1"], help="budgets (default: 0.01 0.1 1)"
    )
    certify.add_argument(
        "--slopes",
        nargs="+",
        default=list(SLOPES),
        metavar="S",
        help=f"any of {', '.join(SLOPES)} (default: all)",
    )
    certify.add_argument(
        "--radius",
        default="0.01",
        help="transformers: module constants on a ball of this radius around "
        "the first sample, too "
        "(default: %(default)s)",
    )
    certify.add_argument(
        "--time-limit",
        metavar="SECONDS",
        help="for all slopes (default: a budget of work instead, about a minute)",
    )
    common_options(
        certify, norm="2", threads=None, out="certificate.safetensors and certificate.json"
    )
    certify.set_defaults(run=certify_command)


def _paper_commands(children: argparse._SubParsersAction[Any]) -> None:
    """The commands about the paper."""
    paper = children.add_parser("paper", help="the paper's table and figures, made again")
    parts = paper.add_subparsers(required=True, metavar="WHAT")
    _figures_command(parts)
    _table_command(parts)


def _figures_command(parts: argparse._SubParsersAction[Any]) -> None:
    """`wassail paper figures`."""
    figures = parts.add_parser("figures", help="PNG and CSV files of the figures")
    figures.add_argument(
        "names", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)} (default: all)"
    )
    figures.add_argument(
        "--norm", help="ground norm: 1, 2 or inf (default: the one of each figure)"
    )
    figures.add_argument("--model", help="for the figures of attacks (default: an embedded one)")
    figures.add_argument("--data", help="see `wassail evaluate` (default: digits)")
    shared(figures, "-n", help="samples (default: the figure's)")
    figures.add_argument("--eps", help="budget (default: the figure's)")
    shared(figures, "--seed", help="of the networks and samples (default: 0)")
    figures.add_argument(
        "--out", default="figures", help="directory to write to (default: %(default)s)"
    )
    figures.set_defaults(run=figures_command)


def _table_command(parts: argparse._SubParsersAction[Any]) -> None:
    """`wassail paper table`."""
    table = parts.add_parser(
        "table",
        help="every column of Table 1 for the models given, ours beside the published figure",
    )
    table.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="as for `evaluate`; NAME@inf=2/255@2=0.25@data=D@mean=M,M,M@std=S,S,S for its own",
    )
    table.add_argument(
        "--data", help="see `wassail evaluate` (default: digits for the embedded models)"
    )
    table.add_argument(
        "--norm", nargs="+", default=["inf", "2"], help="ground norms (default: inf 2)"
    )
    table.add_argument(
        "--eps", nargs="+", default=[], help="budgets, inf=8/255 2=0.5 (default: RobustBench's)"
    )
    table.add_argument(
        "--attacks", nargs="+", metavar="A", help="the columns to run (default: all)"
    )
    shared(table, "-n", default=200, help="samples (default: %(default)s)")
    table.add_argument(
        "--passes",
        type=int,
        default=1000,
        help="passes a sample for `nearest` (default: %(default)s)",
    )
    table.add_argument(
        "--dataset", help="RobustBench's data set (default: the paper's for the model)"
    )
    table.add_argument(
        "--models-dir",
        default="models",
        metavar="DIR",
        help="RobustBench's checkpoints (default: %(default)s)",
    )
    for name in ("--batch-size", "--threads", "--seed"):
        shared(table, name)
    table.add_argument(
        "--out",
        default="paper-table",
        help="directory of the runs and pages (default: %(default)s)",
    )
    table.add_argument(
        "--resume",
        action="store_true",
        help="go on with the runs in --out, perhaps with more models or attacks",
    )
    shared(table, "--quiet")
    table.set_defaults(run=table_command)
