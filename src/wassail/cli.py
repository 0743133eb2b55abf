"""The command line. Heavy imports happen inside the commands, so that `wassail --help` answers
at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from wassail.errors import InputError, unknown
from wassail.threat import (
    Domain,
    Threat,
    number,
    parse_domain,
    parse_eps,
    parse_norm,
    parse_order,
    show,
)
from wassail.writing import make, save, saving

if TYPE_CHECKING:
    from wassail.certificates.bound import Bound
    from wassail.certificates.certify import Certificate
    from wassail.certificates.transformer import Corollary
    from wassail.evaluation.result import Evaluation
    from wassail.evaluation.work import Runner
    from wassail.zoo.datasets import Data
    from wassail.zoo.models import Source

SUMMARY = (
    "How badly can a classifier fail under every distribution within a Wasserstein ball of "
    "your data?"
)
# The names of attacks.catalogue, spelt out here because that module needs torch.
ATTACKS = (
    "wda",
    "wda++",
    "nearest",
    "w-pgd",
    "w-fgsm",
    "fgsm",
    "pgd",
    "apgd-ce",
    "apgd-dlr",
    "apgd-t",
    "square",
    "autoattack",
    "a3",
    "a3-wda",
    "fab",
    "fab-t",
    "deepfool",
    "cw",
)
DEFAULT = ("wda", "wda++", "nearest")
RUN_FILES = "the run, report.html and sandwich.png"
SLOPES = {
    "infinity": "l",
    "anchor": "S",
    "margin": "Lm",
    "paper": "L",
}  # of certificates.certify, with their symbols
LOSSES = ("cross_entropy", "margin")
METHODS = ("auto", "lipschitz", "crown", "alpha-crown", "branch", "exact")  # of certificates.radii
ARITHMETICS = ("auto", "executed", "exact")  # of certificates.executed
FIGURES = (
    "convergence",
    "witness",
    "inclusion",
    "step",
    "runtime",
    "curve",
    "kappa",
    "steps",
)  # of report.figures
DEMO_SECONDS = "120"  # for the certificates of the demo, which need a third of it on a laptop
CHUNK = 100  # samples that are computed, and stored, in one go
PRECISIONS = ("float32", "bfloat16", "float16")  # of evaluation.protocol
MODEL_OPTIONS = (
    "weights",
    "mean",
    "std",
    "logits",
    "models_dir",
    "dataset",
    "ids",
    "preprocessing",
    "trust",
)
EXPORTS = ("csv", "robustbench", "pt", "npz", "png")  # of evaluation.export
SLOPE_DEFINITIONS = """\
slope: growth of the worst expected loss per unit of eps, over distributions within Wasserstein-1
distance eps of the data.
l: at infinity, for large eps (0 in a box).
S: steepest chord from a sample, for small eps.
Lm: Lipschitz constant of the logit differences.
L: the paper's, 2^(1/r) times that of the logits. l <= S <= Lm <= L; all digits are rounded outward.
at most: the lowest upper line at eps. at least: the highest lower one.
witnessed: the share of the growth at least - E that a distribution built from evaluated points
attains; the rest is approached along a ray and not attained."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a run that is false, 2 for bad input,
    130 for Ctrl-C.

    Bad input is one sentence on stderr. A reader that has seen enough (`| head -1`) ends the
    printing, not the work.
    """
    out: Any = sys.stdout
    if out is None:  # closed
        return _main(argv)
    patient: Any = _Patient(out)
    sys.stdout = patient
    try:
        return _main(argv)
    finally:
        patient.flush()
        sys.stdout = out


class _Patient:
    """The standard output, which goes nowhere once nobody reads it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's own."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """As the stream's own."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._give_up()

    def _give_up(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _main(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    try:
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
        print("wassail: interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wassail", description=SUMMARY)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="attack and certify the embedded model on the embedded data: a minute"
    )
    demo.add_argument(
        "model", nargs="?", default="digits-cnn-adv", help="a built-in model (default: %(default)s)"
    )
    _threat_options(
        demo, eps="0.05", threads=1, out=f"{RUN_FILES} (default: wassail-demo)"
    )  # a tiny network needs one thread
    _run_options(demo, certify="auto", seconds=DEMO_SECONDS)
    demo.set_defaults(
        run=_evaluate,
        data="digits",
        out="wassail-demo",
        resume=True,
        look=True,
        add_attack=[],
        **dict.fromkeys(MODEL_OPTIONS),
    )

    evaluate = commands.add_parser(
        "evaluate",
        help="robust accuracy of a model on data, attacked and if asked certified; resumable",
    )
    _model_options(evaluate)
    _threat_options(evaluate, eps=None, threads=None, out=RUN_FILES)
    _run_options(evaluate, certify=None, seconds=None)
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
    evaluate.set_defaults(run=_evaluate)

    attack = commands.add_parser(
        "attack", help="attack a model on data: `evaluate` without checks and certificates"
    )
    _model_options(attack)
    _threat_options(attack, eps=None, threads=None, out=RUN_FILES)
    attack.set_defaults(
        run=_evaluate,
        certify=None,
        arithmetic="auto",
        time_limit=None,
        resume=False,
        add_attack=[],
        look=False,
        chunk=CHUNK,
        gradients="float32",
        ray=None,
        workers=None,
    )

    report = commands.add_parser("report", help="one self-contained HTML page of a run")
    report.add_argument("folder", metavar="RUN", help="the --out of an evaluation")
    report.add_argument("-o", "--output", metavar="FILE", help="default: report.html in RUN")
    report.set_defaults(run=_report)

    compare = commands.add_parser(
        "compare", help="a leaderboard page of several runs, with paired differences"
    )
    compare.add_argument(
        "folders", nargs="+", metavar="RUN", help="the --out of several evaluations"
    )
    compare.add_argument(
        "-o", "--output", metavar="FILE", default="compare.html", help="default: %(default)s"
    )
    compare.set_defaults(run=_compare)

    verify = commands.add_parser(
        "verify", help="compare a run from elsewhere with the model it is about: what is false?"
    )
    verify.add_argument("folder", metavar="RUN", help="the run directory")
    _model_options(verify)
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
    verify.set_defaults(run=_verify, data=None)

    export = commands.add_parser(
        "export", help="a run as CSV, RobustBench entry, .pt, NPZ or PNG files"
    )
    export.add_argument("folder", metavar="RUN", help="the --out of an evaluation")
    export.add_argument("formats", nargs="+", metavar="FORMAT", help=f"any of {', '.join(EXPORTS)}")
    export.add_argument(
        "-o", "--output", metavar="DIR", help="where to write (default: export in RUN)"
    )
    _model_options(export, required=False)
    export.set_defaults(run=_export)

    certify = commands.add_parser("certify", help="bound the worst expected loss from both sides")
    _model_options(certify)
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
    _common_options(
        certify, norm="2", threads=None, out="certificate.safetensors and certificate.json"
    )
    certify.set_defaults(run=_certify)

    _paper_commands(commands)
    models = commands.add_parser("models", help="list the built-in models")
    models.set_defaults(run=_models)
    return parser


def _paper_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    paper = commands.add_parser("paper", help="the paper's table and figures, made again")
    parts = paper.add_subparsers(required=True, metavar="WHAT")
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
    figures.set_defaults(run=_figures)

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
    table.add_argument("--quiet", action="store_true", help="no progress bar")
    table.set_defaults(run=_table)


def _model_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    kinds = (
        "a built-in name (see `wassail models`), FILE.onnx, FILE.pt2, robustbench:NAME, "
        "timm:NAME, hf:NAME, module:factory"
    )
    if required:
        parser.add_argument("model", help=kinds)
    else:
        parser.add_argument("--model", help=f"to look at rounded images again: {kinds}")
    parser.add_argument(
        "--weights",
        help="state dict for module:factory or timm: .safetensors, or .pt (weights only)",
    )
    parser.add_argument(
        "--mean",
        nargs="+",
        metavar="M",
        help="normalisation (x - mean) / std to put inside the model, by channel",
    )
    parser.add_argument("--std", nargs="+", metavar="S", help="see --mean")
    parser.add_argument(
        "--logits",
        metavar="KEY",
        help="key, attribute or place of the logits in what the model returns",
    )
    parser.add_argument(
        "--models-dir",
        default="models",
        metavar="DIR",
        help="RobustBench's folder of checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="an .onnx or .pt2 file of your own: no first pass in a process of its own",
    )
    parser.add_argument(
        "--dataset",
        default=None,
        help="RobustBench's name of the data set (default: cifar10, or by --data)",
    )
    if required:
        parser.add_argument(
            "--data",
            default="digits",
            help="'digits', .npz, .safetensors, an "
            "image folder, CIFAR or IDX, "
            "hf:NAME, module:factory (default: %(default)s)",
        )
        parser.add_argument(
            "--ids",
            metavar="FILE",
            help="image folders: the images to use and their order, one path a line",
        )
        parser.add_argument(
            "--preprocessing",
            metavar="P",
            help="image folders: Res256Crop224, Crop288, ... as RobustBench names them",
        )


def _run_options(parser: argparse.ArgumentParser, certify: str | None, seconds: str | None) -> None:
    parser.add_argument(
        "--certify",
        nargs="?",
        const="auto",
        default=certify,
        metavar="METHOD",
        help=f"radii too: {', '.join(METHODS)} (default: {certify or 'none'}; bare: auto)",
    )
    parser.add_argument(
        "--arithmetic",
        default="auto",
        metavar="A",
        help="radii for the network as it is executed, or for the exact "
        "function: auto, executed, exact "
        "(default: auto, executed where that is covered)",
    )
    parser.add_argument(
        "--time-limit",
        default=seconds,
        metavar="SECONDS",
        help=f"for the radii; samples not reached have radius 0 (default: {seconds or 'none'})",
    )
    parser.add_argument(
        "--chunk", type=int, default=CHUNK, help="samples stored in one go (default: %(default)s)"
    )
    parser.add_argument(
        "--gradients",
        default="float32",
        help=f"precision of the attacks' gradients: {', '.join(PRECISIONS)}",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        default=None,
        metavar="ADDRESS",
        help="do the work on a Ray cluster; bare: one on this machine that nobody else reaches",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        help="--ray: processes (default: as many as there is room for)",
    )
    parser.add_argument(
        "--gpus-per-worker",
        default="0",
        metavar="G",
        help="--ray: GPUs of each, perhaps 0.5 (default: 0)",
    )
    parser.add_argument(
        "--chunk-timeout",
        default=None,
        metavar="SECONDS",
        help="--ray: a chunk that takes longer hangs",
    )


def _threat_options(
    parser: argparse.ArgumentParser, eps: str | None, threads: int | None, out: str
) -> None:
    parser.add_argument(
        "--eps",
        nargs="+",
        default=[eps],
        required=eps is None,
        help="budgets, for example 8/255; the first is the headline's",
    )
    parser.add_argument(
        "--order",
        nargs="+",
        default=["1", "2", "inf"],
        metavar="P",
        help="Wasserstein orders: any of 1, 2, any p >= 1, inf (default: 1 2 inf)",
    )
    parser.add_argument(
        "--attacks",
        nargs="+",
        default=list(DEFAULT),
        metavar="A",
        help=f"any of {', '.join(ATTACKS)} (default: {' '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--batch-size", type=int, default=None, help="most samples in one model call (default: 250)"
    )
    parser.add_argument(
        "--step",
        default=None,
        help="step size alpha of WDA and WDA++ (default: the paper's for its eps, else a share)",
    )
    parser.add_argument(
        "--topk",
        type=int,
        default=None,
        help="rivals that WDA and WDA++ try (default: the paper's)",
    )
    parser.add_argument(
        "--kappa",
        default=None,
        help="of WDA: 1/kappa of every sample moves (default: 2, at order inf 1)",
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=100,
        help="passes a sample for `nearest` (default: %(default)s)",
    )
    _common_options(parser, norm="inf", threads=threads, out=out)


def _common_options(
    parser: argparse.ArgumentParser, norm: str, threads: int | None, out: str
) -> None:
    parser.add_argument(
        "--norm", default=norm, help="ground norm: 1, 2 or inf (default: %(default)s)"
    )
    parser.add_argument(
        "--domain", nargs=2, default=["0", "1"], metavar=("LOW", "HIGH"), help="box (default: 0 1)"
    )
    parser.add_argument(
        "--no-box", action="store_true", help="let points leave the box: all of R^n"
    )
    parser.add_argument("-n", type=int, default=None, help="use the first N samples only")
    parser.add_argument("--seed", type=int, default=0, help="keys the random starts (default: 0)")
    parser.add_argument("--out", default=None, help=f"directory for {out}")
    parser.add_argument(
        "--threads",
        type=int,
        default=threads,
        help="CPU threads (default: %s)" % (threads or "torch's own"),
    )
    parser.add_argument(
        "--device", default=None, help="where to compute: cpu, cuda, mps (default: cpu)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _models(options: argparse.Namespace) -> int:
    from wassail import zoo

    for name, description in zoo.builtin().items():
        print(f"{name:16} {description}")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    """Everything that can be wrong without a model is checked before torch is even imported."""
    norm, domain = _checked(options)
    orders, budgets = (
        list(dict.fromkeys(map(parse, words)))
        for parse, words in ((parse_order, options.order), (parse_eps, options.eps))
    )
    _known("attack", [*options.attacks, *options.add_attack], ATTACKS)
    _known("precision", [options.gradients], PRECISIONS)
    if options.certify is not None:
        _known("method", [options.certify], METHODS)
    _known("arithmetic", [options.arithmetic], ARITHMETICS)
    seconds = None if options.time_limit is None else _seconds(options.time_limit)
    given: dict[str, Any] = {"topk": options.topk}
    for word in ("step", "kappa"):
        given[word] = (
            None if getattr(options, word) is None else number(getattr(options, word), word)
        )
    if (options.resume or options.add_attack) and options.out is None:
        raise InputError(
            "--resume and --add-attack need --out: the folder of the run to go on with."
        )
    folder = _folder(options)
    import wassail as ws
    from wassail.report.terminal import print_evaluation

    source, data = _load(options)
    own: dict[str, dict[str, Any]] = {
        name: {} for name in dict.fromkeys([*options.attacks, *options.add_attack])
    }
    for name, words in {"wda": ("step", "topk", "kappa"), "wda++": ("step", "topk")}.items():
        if name in own:
            own[name] = {word: given[word] for word in words if given[word] is not None}
    if options.add_attack and folder is not None:
        before = _attacks_of(folder)
        own = before | {name: before.get(name, {}) | own[name] for name in options.add_attack}
    with _runner(options) as runner:
        run = ws.evaluate(
            source,
            data,
            [Threat(norm, order, eps, domain) for eps in budgets for order in orders],
            own,
            out=folder,
            resume=options.resume or bool(options.add_attack),
            add=bool(options.add_attack),
            certify=options.certify,
            arithmetic=options.arithmetic,
            time_limit=seconds,
            passes=options.passes,
            seed=options.seed,
            chunk=options.chunk,
            batch_size=options.batch_size,
            gradients=options.gradients,
            look=options.look,
            command=sys.argv[1:],
            runner=runner,
            progress=_progress(options),
        )
    print_evaluation(run)
    if folder is not None:
        _write_pages(run, folder)
    return 0


def _runner(options: argparse.Namespace) -> AbstractContextManager[Runner | None]:
    """Who does the work: a Ray cluster if one was asked for, else this process."""
    if options.ray is None:
        if options.workers is not None:
            raise InputError("--workers is for --ray: add it, bare for a cluster on this machine.")
        return nullcontext()
    from wassail.evaluation.cluster import Ray

    timeout = None if options.chunk_timeout is None else _seconds(options.chunk_timeout)
    gpus = number(options.gpus_per_worker, "--gpus-per-worker")
    return Ray(
        options.ray or None, options.workers, gpus, threads=options.threads or 1, timeout=timeout
    )


def _attacks_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The attacks that a run was made with, and their options."""
    from wassail.evaluation.store import Store

    return {
        entry["name"]: {k: v for k, v in entry.items() if k != "name"}
        for entry in Store.open(folder).config["attacks"]
    }


def _write_pages(run: Evaluation, folder: Path) -> None:
    """The page and the picture beside the run; without matplotlib one sentence instead of the
    picture.
    """
    from wassail.report.page import write_report
    from wassail.report.sandwich import draw_sandwich
    from wassail.report.terminal import where

    with _writing(folder):
        print(f"wrote {write_report(run, folder / 'report.html')}")
        try:
            figure = draw_sandwich(
                [run.curve(order) for order in run.orders],
                f"{where(run)}\n{run.headline}",
                mark=run.threat.eps,
            )
        except InputError as error:
            print(f"no sandwich.png: {error}")
            return
        with saving(folder / "sandwich.png") as picture:
            figure.savefig(picture, format="png", dpi=160)
        print(f"wrote {folder / 'sandwich.png'}")


def _report(options: argparse.Namespace) -> int:
    import wassail as ws
    from wassail.report.page import write_report

    run = ws.Evaluation.load(options.folder)
    path = Path(options.output or Path(options.folder) / "report.html")
    with _writing(path):
        print(f"wrote {write_report(run, path)}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    import wassail as ws
    from wassail.report.compare import write_comparison

    runs = [ws.Evaluation.load(folder) for folder in options.folders]
    path = Path(options.output)
    with _writing(path):
        print(f"wrote {write_comparison(runs, path)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    _known("format", options.formats, EXPORTS)
    import wassail as ws
    from wassail.evaluation import export

    run = ws.Evaluation.load(options.folder)
    folder = Path(options.output or Path(options.folder) / "export")
    model = None if options.model is None else _model(options, run.threat.norm).model
    with _writing(folder):
        make(folder)
        for name in dict.fromkeys(options.formats):
            print(f"wrote {export.write(run, name, folder, model, options.dataset)}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Exit code 1 if something in the run is false."""
    _checked_threads(options)
    share = number(options.radii, "--radii")
    if not 0 <= share <= 1:
        raise InputError(
            f"--radii is {options.radii!r}: give the share to prove again, between 0 and 1, or "
            "nothing for all."
        )
    import torch

    import wassail as ws
    from wassail.report.page import write_report
    from wassail.zoo.datasets import open_data

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    run = ws.Evaluation.load(options.folder)
    source = _model(options, run.threat.norm)
    data = None
    if options.data is not None:
        data = open_data(
            options.data, max(len(run), 1), ids=options.ids, preprocessing=options.preprocessing
        )
    found = run.verify(source.model, data, share, seed=options.seed)
    print("".join(c if c.isprintable() or c == "\n" else "?" for c in str(found)))
    if options.output is not None:
        print(f"wrote {write_report(run, options.output, verified=found)}")
    return 0 if found else 1


def _certify(options: argparse.Namespace) -> int:
    budgets, (norm, domain) = sorted({parse_eps(e) for e in options.eps}), _checked(options)
    _known("slope", options.slopes, SLOPES)
    if options.loss == "dlr":
        raise InputError(
            "the DLR loss is a ratio of logit differences and not Lipschitz: use --loss margin "
            "or cross_entropy."
        )
    _known("loss", [options.loss], LOSSES)
    seconds = None if options.time_limit is None else _seconds(options.time_limit)
    radius = parse_eps(options.radius)
    folder = _folder(options)
    import wassail as ws
    from wassail.certificates.structure import read

    source, data = _load(options)
    (x, y), graph = data.read(0, len(data)), read(source.model, tuple(data.shape), smooth=True)
    certificate = ws.certify(
        graph,
        x,
        y,
        norm,
        options.loss,
        domain,
        slopes=options.slopes,
        time_limit=seconds,
        seed=options.seed,
        progress=_progress(options),
    )
    rows = [
        (eps, *certificate.bounds(eps), certificate.witness(eps).info["loss"]) for eps in budgets
    ]
    loss = options.loss.replace("_", " ")
    where = (
        f"{options.model} on {len(y)} samples of {options.data}, {loss}, l{norm:g}, {_box(domain)}"
    )
    made = _made(options)
    modules = None
    if graph.curved:
        modules = ws.corollary(graph, norm, ws.Ball(x[0], radius, norm, domain), seed=options.seed)
    _print_certificate(where, made, certificate, rows, modules)
    if folder is not None:
        _save_certificate(folder, certificate, rows, {"run": where, "made_with": made}, modules)
    return 0


def _print_certificate(
    where: str,
    made: str,
    certificate: Certificate,
    rows: list[tuple[float, float, float, float]],
    modules: Corollary | None,
) -> None:
    from rich import box
    from rich.table import Table

    from wassail.report.terminal import console as screen

    console = screen()
    slopes = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    slopes.add_column("slope", no_wrap=True)
    for name in ("at least", "at most", "gap"):
        slopes.add_column(name, justify="right", no_wrap=True)
    slopes.add_column("upper side by", no_wrap=True)
    slopes.add_column("time s", justify="right", no_wrap=True)
    for name, symbol in SLOPES.items():
        bound: Bound | None = getattr(certificate, name)
        if bound is not None:
            gap = "exact" if bound.exact else f"{100 * bound.gap:.2g} %"
            spent = bound.info.get("seconds")
            time_spent = "" if spent is None else f"{spent:.1f}"
            slopes.add_row(
                f"{symbol:2} {name}",
                _down(bound.lower),
                _up(bound.upper),
                gap,
                bound.method,
                time_spent,
            )
    losses = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("eps", "E on the data", "worst: at least", "at most", "witnessed"):
        losses.add_column(name, justify="right", no_wrap=True)
    start = certificate.empirical
    for eps, lower, upper, reached in rows:
        share = f"{_down(100 * (reached - start) / (lower - start))} %" if lower > start else ""
        losses.add_row(show(eps), f"{start:.6g}", _down(lower), _up(upper), share)
    console.print(f"[bold]{where}[/bold]")
    console.print(slopes)
    console.print(losses)
    console.print(SLOPE_DEFINITIONS)
    if modules is not None:
        console.print(
            "\n[bold]Constants of the modules, for the paper's bound on transformers[/bold]"
        )
        console.print(str(modules), soft_wrap=True, highlight=False, markup=False)
    if certificate.tight is not None:
        console.print(
            "The condition of the paper's theorem for l = L "
            f"{'holds' if certificate.tight else 'does not hold'} here."
        )
    eps, lower, upper, reached = rows[-1]
    low = _down(lower)
    high = _up(upper)
    threat = Threat(certificate.norm, 1.0, eps, certificate.domain)
    above = f"no distribution within that Wasserstein distance of the data is worse than {high}"
    if math.isinf(upper):
        above = "the slopes asked for bound nothing above (give a box, or add infinity to --slopes)"
    console.print(
        f"[bold]The worst expected loss is between {low} and {high} over {threat}[/bold] (on the "
        f"data {start:.6g}):\n"
        f"{above}, and one that reaches {_down(reached)} was built and evaluated."
    )
    console.print(f"[dim]{made}[/dim]")


def _modules_entry(modules: Corollary) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return (
            None if isinstance(value, float) and not math.isfinite(value) else value
        )  # JSON has no infinity

    sides = {name: plain(getattr(modules, name)) for name in ("paper", "ours", "local")}
    rows = [{name: plain(value) for name, value in row._asdict().items()} for row in modules.rows]
    return {
        "style": modules.style,
        "domain": modules.domain,
        "log10_lambda": sides,
        "empirical": modules.empirical,
        "slope_at_least": modules.slope,
        "vacuous": modules.vacuous,
        "rows": rows,
    }


def _save_certificate(
    folder: Path,
    certificate: Certificate,
    rows: list[tuple[float, float, float, float]],
    run: dict[str, str],
    modules: Corollary | None,
) -> None:
    def entry(bound: Bound) -> dict[str, Any]:
        upper = bound.upper if math.isfinite(bound.upper) else None  # JSON has no infinity
        seconds = bound.info.get("seconds")
        return {
            "lower": bound.lower,
            "upper": upper,
            "exact": bound.exact,
            "method": bound.method,
            "seconds": seconds,
        }

    slopes = {
        name: entry(bound) for name in SLOPES if (bound := getattr(certificate, name)) is not None
    }
    names = ("eps", "lower", "upper", "witnessed")
    results = {
        **run,
        "norm": str(certificate.norm),
        "domain": certificate.domain,
        "loss": certificate.loss,
        "empirical": certificate.empirical,
        "slopes": slopes,
        "line": certificate.line,
        "tight": certificate.tight,
        **({} if modules is None else {"modules": _modules_entry(modules)}),
        "bounds": [
            dict(zip(names, (v if math.isfinite(v) else None for v in row))) for row in rows
        ],
    }
    with _writing(folder):
        certificate.save(folder / "certificate.safetensors")
        save(folder / "certificate.json", json.dumps(results, indent=1))
    print(f"wrote {folder / 'certificate.safetensors'} and {folder / 'certificate.json'}")


def _figures(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(options.names)) or list(FIGURES)
    _known("figure", names, FIGURES)
    chosen: dict[str, Any] = {
        "norm": None if options.norm is None else parse_norm(options.norm),
        "data": options.data,
    }
    chosen |= {
        name: getattr(options, name)
        for name in ("model", "n", "eps")
        if getattr(options, name) is not None
    }
    from wassail.report.figures import write

    with _writing(Path(options.out)):
        paths = write(options.out, names, seed=options.seed, **chosen)
    for path in paths:
        print(f"wrote {path}")
    return 0


def _table(options: argparse.Namespace) -> int:
    _checked_threads(options)
    norms = [parse_norm(norm) for norm in options.norm]
    folder = _folder(options)
    assert folder is not None
    import torch

    from wassail.evaluation.table import ATTACKS, parse_budgets, table
    from wassail.report.paper import write_pages

    if options.threads is not None:
        torch.set_num_threads(max(options.threads, 1))
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
        progress=_progress(options),
        begin=lambda text: print(text, file=sys.stderr),
    )
    print(found)
    with _writing(folder):
        pages = write_pages(found, folder)
    print(f"wrote {folder / 'table.csv'}, {folder / 'table.md'} and {pages[0]}")
    return 0 if found.done else 2


def _seconds(text: str) -> float:
    seconds = number(text, "time limit")
    if not 0 < seconds < math.inf:
        raise InputError(f"the time limit is {text!r}: give a positive number of seconds.")
    return seconds


def _known(kind: str, names: Sequence[str], valid: Sequence[str] | dict[str, str]) -> None:
    for name in names:
        if name not in valid:
            raise unknown(kind, name, valid)


def _checked(options: argparse.Namespace) -> tuple[float, Domain]:
    """The norm and the domain, and everything else that commands on data share and that can be
    wrong without torch.
    """
    if options.n is not None and options.n < 1:
        raise InputError(f"-n is {options.n}: give a positive number of samples.")
    _checked_threads(options)
    return parse_norm(options.norm), None if options.no_box else parse_domain(tuple(options.domain))


def _checked_threads(options: argparse.Namespace) -> None:
    if options.threads is not None and not 1 <= options.threads <= 1024:
        raise InputError(
            f"--threads is {options.threads}: give a number of CPU threads, 1 to 1024."
        )


def _folder(options: argparse.Namespace) -> Path | None:
    """The --out directory, made before the work: one that cannot be written to should not cost
    a run.
    """
    if options.out is None:
        return None
    if not options.out:
        raise InputError("--out is empty: name a directory.")
    folder = Path(options.out)
    with _writing(folder):
        make(folder)
    return folder


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {str(folder)!r}: {error.strerror}; choose another --out."
        ) from None


def _load(options: argparse.Namespace) -> tuple[Source, Data]:
    """The model and the data, the number of threads set."""
    import torch

    from wassail.zoo.datasets import open_data

    if options.threads is not None:
        torch.set_num_threads(max(options.threads, 1))
    source = _model(options, parse_norm(options.norm))
    device = getattr(options, "device", None)
    if device is not None:
        try:
            source.model.to(device)  # type: ignore[attr-defined]
        except (RuntimeError, AttributeError, AssertionError) as error:
            raise InputError(
                f"cannot use device {device!r}: {str(error).splitlines()[0].rstrip('.')}."
            ) from None
    return source, open_data(
        options.data, options.n, ids=options.ids, preprocessing=options.preprocessing
    )


def _model(options: argparse.Namespace, norm: float) -> Source:
    from wassail.zoo.models import open_model

    mean, std = (
        [number(v, name) for v in values] if (values := getattr(options, name)) else None
        for name in ("mean", "std")
    )
    return open_model(
        options.model,
        weights=options.weights,
        mean=mean,
        std=std,
        logits=options.logits,
        models=options.models_dir or "models",
        dataset=options.dataset or "cifar10",
        threat="L2" if norm == 2 else "Linf",
        trust=bool(options.trust),
    )


def _progress(options: argparse.Namespace) -> bool:
    return not options.quiet and sys.stderr.isatty()


def _box(domain: Domain) -> str:
    return "no box" if domain is None else f"box [{domain[0]:g}, {domain[1]:g}]"


def _made(options: argparse.Namespace) -> str:
    from wassail.network import versions

    return f"seed {options.seed}, " + ", ".join(f"{k} {v}" for k, v in versions().items())


def _down(value: float) -> str:
    """Six digits, rounded down: a printed lower bound is still one."""
    return f"{Context(prec=6, rounding=ROUND_FLOOR).create_decimal_from_float(value):g}"


def _up(value: float) -> str:
    """Six digits, rounded up; inf where nothing is known."""
    return f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal_from_float(value):g}".replace(
        "Infinity", "inf"
    )


if __name__ == "__main__":
    sys.exit(main())
