"""Every command with its options, and how it ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
    verify_command,
)
from wassail.cli.completion import SHELLS, commands, completion
from wassail.cli.config import apply_config, config_in, init_command
from wassail.cli.demo import demo_command
from wassail.cli.options import (
    CHUNK,
    DEMO_GAP,
    DEMO_SAMPLES,
    DEMO_SECONDS,
    RUN_FILES,
    SUMMARY,
    Patient,
    common_options,
    model_options,
    run_options,
    threat_options,
)
from wassail.cli.shared import MODEL_OPTIONS
from wassail.cli.signoff import NO_SIGN_OFF, signoff_options
from wassail.cli.smooth import evaluate_options, smooth_options
from wassail.errors import InputError
from wassail.names import EXPORTS, FIGURES, SLOPES


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, as all others are."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2.

        Args:
            message: what argparse has to say.
        """
        said = "".join(c if c.isprintable() else "?" for c in message)
        self.exit(2, f"wassail: {said}; see `{self.prog} --help`.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a run that is false, 2 for bad input,
    130 for Ctrl-C.

    Bad input is one sentence on stderr. A reader that has seen enough (`| head -1`) ends the
    printing, not the work.
    """
    out: Any = sys.stdout
    if out is None:  # closed
        return _main(argv)
    patient: Any = Patient(out)
    sys.stdout = patient
    try:
        return _main(argv)
    finally:
        patient.flush()
        sys.stdout = out


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 0
    options = argparse.Namespace()
    try:
        file = config_in(words) if words[0] == "evaluate" else None
        if file is not None:
            apply_config(_child(parser, "evaluate"), file)
        options = parser.parse_args(words)
        code: int = options.run(options)
        return code
    except InputError as error:
        # What a file says may be quoted in it, and a terminal obeys control characters.
        print(
            "wassail: " + "".join(c if c.isprintable() else "?" for c in str(error)),
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        again = (
            " What was done is kept: go on with --resume." if getattr(options, "out", None) else ""
        )
        print(f"wassail: interrupted.{again}", file=sys.stderr)
        return 130


def _child(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    return dict(commands(parser))[(name,)]


def _parser() -> argparse.ArgumentParser:
    """The commands and their options, in the order of `wassail --help`."""
    parser = Parser(prog="wassail", description=SUMMARY)
    parser.add_argument("--version", action="version", version=f"wassail {version('wassail')}")
    children = parser.add_subparsers(required=True, metavar="COMMAND")
    _demo_command(children)
    evaluate = _evaluate_command(children)
    _attack_command(children)
    _page_commands(children)
    _verify_command(children)
    _export_command(children)
    _certify_command(children)
    smooth = children.add_parser(
        "smooth", help="certify a model of any size under Gaussian noise, from both sides"
    )
    smooth_options(smooth)
    _paper_commands(children)
    init = children.add_parser("init", help="write a commented file for `evaluate --config`")
    init.add_argument(
        "file", nargs="?", default="wassail.toml", metavar="FILE", help="default: %(default)s"
    )
    init.set_defaults(run=lambda options: init_command(options, evaluate))
    complete = children.add_parser("completion", help="print a script that completes commands")
    complete.add_argument("shell", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    complete.set_defaults(run=lambda options: print(completion(parser, options.shell)) or 0)
    models = children.add_parser("models", help="list the built-in models")
    models.set_defaults(run=models_command)
    return parser


def _demo_command(children: argparse._SubParsersAction[Any]) -> None:
    """`wassail demo`."""
    demo = children.add_parser(
        "demo",
        help=f"attack and certify the embedded model on {DEMO_SAMPLES} of its samples: a minute",
    )
    demo.add_argument(
        "model", nargs="?", default="digits-cnn-adv", help="a built-in model (default: %(default)s)"
    )
    threat_options(
        demo, eps="0.05", threads=1, out=f"{RUN_FILES} (default: wassail-demo)"
    )  # a tiny network needs one thread; proofs of two samples run side by side
    run_options(demo, certify="auto", seconds=DEMO_SECONDS, gap=DEMO_GAP)
    demo.set_defaults(
        run=demo_command,
        data="digits",
        n=DEMO_SAMPLES,
        closing=1,
        provers=2,
        out="wassail-demo",
        resume=True,
        look=True,
        smooth=None,
        add_attack=[],
        **dict.fromkeys(MODEL_OPTIONS),
        **NO_SIGN_OFF,
    )


def _evaluate_command(children: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """`wassail evaluate`, whose options `init` writes down."""
    evaluate: argparse.ArgumentParser = children.add_parser(
        "evaluate",
        help="robust accuracy of a model on data, attacked and if asked certified; resumable",
    )
    model_options(evaluate)
    threat_options(evaluate, eps=None, threads=None, out=RUN_FILES)
    run_options(evaluate, certify=None, seconds=None)
    evaluate.add_argument("--resume", action="store_true", help="go on with the run in --out")
    evaluate.add_argument(
        "--add-attack",
        nargs="+",
        default=[],
        metavar="A",
        help="extend the run in --out by these attacks",
    )
    evaluate.add_argument(
        "--no-look",
        dest="look",
        action="store_false",
        help="no checks and indicators of attack failure",
    )
    evaluate.add_argument(
        "--config", metavar="FILE", default=None, help="options from a file of `wassail init`"
    )
    signoff_options(evaluate)
    evaluate_options(evaluate)
    evaluate.set_defaults(run=evaluate_command)
    return evaluate


def _attack_command(children: argparse._SubParsersAction[Any]) -> None:
    """`wassail attack`."""
    attack = children.add_parser(
        "attack", help="attack a model on data: `evaluate` without checks and certificates"
    )
    model_options(attack)
    threat_options(attack, eps=None, threads=None, out=RUN_FILES)
    attack.set_defaults(
        run=evaluate_command,
        certify=None,
        arithmetic="auto",
        gap=None,
        time_limit=None,
        resume=False,
        smooth=None,
        add_attack=[],
        look=False,
        chunk=CHUNK,
        gradients="float32",
        ray=None,
        workers=None,
        **NO_SIGN_OFF,
    )


def _page_commands(children: argparse._SubParsersAction[Any]) -> None:
    """The pages of runs: `report`, `compare` and `board`."""
    report = children.add_parser("report", help="one self-contained HTML page of a run")
    report.add_argument("folder", metavar="RUN", help="the --out of an evaluation")
    report.add_argument("-o", "--output", metavar="FILE", help="default: report.html in RUN")
    report.set_defaults(run=report_command)

    compare = children.add_parser(
        "compare", help="a leaderboard page of several runs, with paired differences"
    )
    compare.add_argument(
        "folders", nargs="+", metavar="RUN", help="the --out of several evaluations"
    )
    compare.add_argument(
        "-o", "--output", metavar="FILE", default="compare.html", help="default: %(default)s"
    )
    compare.set_defaults(run=compare_command)

    board = children.add_parser(
        "board", help="a static site of many runs: tables, a page for each model, a JSON feed"
    )
    board.add_argument("folders", nargs="+", metavar="RUN", help="the --out of evaluations")
    board.add_argument("-o", "--output", metavar="DIR", default="site", help="default: %(default)s")
    board.set_defaults(run=board_command)


def _verify_command(children: argparse._SubParsersAction[Any]) -> None:
    """`wassail verify`."""
    verify = children.add_parser(
        "verify", help="compare a run from elsewhere with the model it is about: what is false?"
    )
    verify.add_argument("folder", metavar="RUN", help="the run directory")
    model_options(verify)
    verify.add_argument(
        "--radii",
        nargs="?",
        const="1",
        default="0",
        metavar="SHARE",
        help="prove the certified radii again; with a share (0.1) so many, drawn at random",
    )
    verify.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of what is drawn at random (default: a new one, printed)",
    )
    verify.add_argument(
        "--threads", type=int, default=None, help="CPU threads (default: torch's own)"
    )
    verify.add_argument(
        "-o", "--output", metavar="FILE", help="write the page of the run with what was verified"
    )
    verify.set_defaults(run=verify_command, data=None)


def _export_command(children: argparse._SubParsersAction[Any]) -> None:
    """`wassail export`."""
    export = children.add_parser(
        "export", help="a run as CSV, RobustBench entry, .pt, NPZ or PNG files"
    )
    export.add_argument("folder", metavar="RUN", help="the --out of an evaluation")
    export.add_argument("formats", nargs="+", metavar="FORMAT", help=f"any of {', '.join(EXPORTS)}")
    export.add_argument(
        "-o", "--output", metavar="DIR", help="where to write (default: export in RUN)"
    )
    model_options(export, required=False)
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
        default=None,
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
        "--norm", default=None, help="ground norm: 1, 2 or inf (default: the one of each figure)"
    )
    figures.add_argument(
        "--model", default=None, help="for the figures of attacks (default: an embedded one)"
    )
    figures.add_argument("--data", default=None, help="see `wassail evaluate` (default: digits)")
    figures.add_argument("-n", type=int, default=None, help="samples (default: the figure's)")
    figures.add_argument("--eps", default=None, help="budget (default: the figure's)")
    figures.add_argument(
        "--seed", type=int, default=0, help="of the networks and samples (default: 0)"
    )
    figures.add_argument(
        "--out", default="figures", help="directory to write to (default: %(default)s)"
    )
    figures.set_defaults(run=figures_command)


def _table_command(parts: argparse._SubParsersAction[Any]) -> None:
    """`wassail paper table`.

    Long because it is a list of options.
    """
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
        "--data",
        default=None,
        help="see `wassail evaluate` (default: digits for the embedded models)",
    )
    table.add_argument(
        "--norm", nargs="+", default=["inf", "2"], help="ground norms (default: inf 2)"
    )
    table.add_argument(
        "--eps", nargs="+", default=[], help="budgets, inf=8/255 2=0.5 (default: RobustBench's)"
    )
    table.add_argument(
        "--attacks", nargs="+", default=None, metavar="A", help="the columns to run (default: all)"
    )
    table.add_argument("-n", type=int, default=200, help="samples (default: %(default)s)")
    table.add_argument(
        "--passes",
        type=int,
        default=1000,
        help="passes a sample for `nearest` (default: %(default)s)",
    )
    table.add_argument(
        "--dataset",
        default=None,
        help="RobustBench's data set (default: the paper's for the model)",
    )
    table.add_argument(
        "--models-dir",
        default="models",
        metavar="DIR",
        help="RobustBench's checkpoints (default: %(default)s)",
    )
    table.add_argument(
        "--batch-size", type=int, default=None, help="most samples in one model call (default: 250)"
    )
    table.add_argument(
        "--threads", type=int, default=None, help="CPU threads (default: torch's own)"
    )
    table.add_argument("--seed", type=int, default=0, help="keys the random starts (default: 0)")
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
    table.add_argument("--quiet", action="store_true", help="no progress bar or lines")
    table.set_defaults(run=table_command)
