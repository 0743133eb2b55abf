"""The options of every command."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Container, Iterable, Sequence
from typing import Any, TextIO

from wassail.errors import InputError
from wassail.evaluation.settings import CHUNK
from wassail.names import ARITHMETICS, ATTACKS, DEFAULT_ATTACKS, PRECISIONS, RADIUS_METHODS

SUMMARY = (
    "How badly can a classifier fail under every distribution within a Wasserstein ball of "
    "your data?"
)

RUN_FILES = "the run, report.html and sandwich.svg"

# The demo: samples, of 500; the gap that it closes at its first order, in points; and the seconds
# that it may take for that. It takes some 80 of one core, or half of them on two.
DEMO_SAMPLES = 50
DEMO_GAP = "9.9"
DEMO_SECONDS = "120"

# Options that several commands have, as argparse is given them.
SHARED: dict[str, dict[str, Any]] = {
    "--threads": {"type": int, "help": "CPU threads (default: torch's own)"},
    "--seed": {"type": int, "default": 0, "help": "keys the random starts (default: 0)"},
    "-n": {"type": int, "help": "use the first N samples only"},
    "--batch-size": {"type": int, "help": "most samples in one model call (default: 250)"},
    "--no-look": {
        "dest": "look",
        "action": "store_false",
        "help": "no checks and indicators of attack failure",
    },
    "--quiet": {"action": "store_true", "help": "no progress bar or lines"},
}

# Options of earlier versions, and what replaces them.
GONE = {
    **{name: f"--attacks wda:{name[2:]}=VALUE" for name in ("--step", "--topk", "--kappa")},
    "--explain": "--out DIR, whose report.html says what the words mean",
    "--junit": "--write FILE.xml",
    "--card": "--write FILE.md",
    "--sarif": "--write FILE.sarif",
    "--job-summary": "--write job-summary",
    "--workers": "--ray workers=VALUE",
    "--gpus-per-worker": "--ray gpus=VALUE",
    "--chunk-timeout": "--ray timeout=VALUE",
    "--draws": "--smooth SIGMA:draws=VALUE",
    "--confidence": "--smooth SIGMA:confidence=VALUE",
    "--arithmetic": "--certify auto:arithmetic=VALUE",
    "--label": "--threshold T:label=VALUE",
    "--ids": "--data FOLDER:ids=FILE",
    "--preprocessing": "--data FOLDER:preprocessing=VALUE",
    "--dataset": "the model as robustbench:NAME:dataset=VALUE",
    "--models-dir": "the model as robustbench:NAME:models=DIR",
}


def refuse_gone(words: Iterable[str], known: Container[str] = ()) -> None:
    """Refuse options that are gone in a sentence that names the new one.

    known: options that the command has.
    """
    for word in words:
        option = word.partition("=")[0]
        if option in GONE and option not in known:
            raise InputError(f"{option} is gone: give {GONE[option]}.")


def settings_of(word: str, names: Sequence[str], path: bool = False) -> tuple[str, dict[str, str]]:
    """A word without the settings behind its colon, and these: `auto:workers=8,gpus=1`. Settings
    may also stand alone.

    names: of the settings that there are; path: the word may be a path with `=` in it.
    """
    known = "|".join(names) if path else "[a-z]+"
    found = re.fullmatch(rf"(?:(.*?):)?((?:{known})=.*)", word)
    if found is None:
        return word, {}
    parts = [part.partition("=") for part in found[2].split(",")]
    for name, _, value in parts:
        if name not in names or not value:
            raise InputError(
                f"cannot read {word!r}: behind the colon write NAME=VALUE,NAME=VALUE; known are "
                f"{', '.join(names)}."
            )
    return found[1] or "", {name: value for name, _, value in parts}


def shared(group: argparse._ActionsContainer, name: str, **own: Any) -> None:
    """Add an option that several commands have.

    group: a parser, or a group of its options; own: what is different for this command.
    """
    group.add_argument(name, **(SHARED[name] | own))


class Patient:
    """The standard output, which goes nowhere once its reader is gone."""

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


def count_or_auto(word: str) -> int | str:
    """A whole number, or the word auto."""
    if word == "auto":
        return word
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"invalid value: {word!r} (a whole number, or auto)"
        ) from None


def model_options(
    parser: argparse.ArgumentParser, required: bool = True, perhaps: bool = False
) -> None:
    """Which model, and what stands before it; perhaps: MODEL may be left out."""
    group = parser.add_argument_group("model and data")
    kinds = (
        "a built-in name (see `wassail models`), FILE.onnx, FILE.pt2, timm:NAME, hf:NAME, "
        "module:factory, robustbench:NAME[:dataset=cifar10,models=DIR]"
    )
    if required:
        group.add_argument("model", nargs="?" if perhaps else None, help=kinds)
    else:
        group.add_argument("--model", help=f"to look at rounded images again: {kinds}")
    group.add_argument(
        "--weights",
        help="state dict for module:factory or timm: .safetensors, or .pt (weights only)",
    )
    group.add_argument(
        "--mean",
        nargs="+",
        metavar="M",
        help="normalisation (x - mean) / std to put inside the model, by channel",
    )
    group.add_argument("--std", nargs="+", metavar="S", help="see --mean")
    group.add_argument(
        "--logits",
        metavar="KEY",
        help="key, attribute or place of the logits in what the model returns",
    )
    group.add_argument(
        "--trust",
        action="store_true",
        help="the file is your own: .pt2, which runs code; .onnx without a first pass",
    )
    group.add_argument(
        "--one-logit", action="store_true", help="the model has one output, positive for class 1"
    )
    if required:
        group.add_argument(
            "--data",
            default="digits",
            help="'digits', .npz, .safetensors, .csv, .parquet, CIFAR or IDX, hf:NAME, "
            "module:factory, or a folder of images, perhaps with :ids=FILE (paths, one a line) and "
            ":preprocessing=Res256Crop224 (RobustBench's names) (default: %(default)s)",
        )
        group.add_argument(
            "--classes", metavar="A,B,C", help="names of all classes in the order of the model"
        )


def run_options(
    parser: argparse.ArgumentParser,
    certify: str | None,
    seconds: str | None,
    gap: str | None = None,
    effort: str | None = None,
) -> None:
    """Certificates, workers and what is kept."""
    group = parser.add_argument_group("certificates and workers")
    group.add_argument(
        "--certify",
        nargs="?",
        const="auto",
        default=certify,
        metavar="METHOD",
        help=f"radii too: {', '.join(RADIUS_METHODS)} (default: {certify or 'none'}; bare: auto); "
        f"auto:arithmetic=exact is about real numbers ({', '.join(ARITHMETICS)})",
    )
    group.add_argument(
        "--effort",
        metavar="SECONDS",
        default=effort,
        help=f"with --certify: of one core, a sample (default: {effort or 2})",
    )
    group.add_argument(
        "--gap",
        default=gap,
        metavar="POINTS",
        help="with --certify: attack and certify until the accuracies differ by so many points "
        f"(default: {gap or 'none'})",
    )
    group.add_argument(
        "--time-limit",
        default=seconds,
        metavar="SECONDS",
        help=f"for the radii; samples not reached have radius 0 (default: {seconds or 'none'})",
    )
    group.add_argument(
        "--chunk", type=int, default=CHUNK, help="samples stored in one go (default: %(default)s)"
    )
    group.add_argument(
        "--gradients",
        default="float32",
        metavar="T",
        help=f"type of gradients: {', '.join(PRECISIONS)}",
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="work on a Ray cluster; bare: one on this machine; auto:workers=8,gpus=0.5,timeout=600"
        " are processes (default: all there is room for), GPUs of each (0), seconds after which a "
        "chunk hangs (none)",
    )


def threat_options(
    parser: argparse.ArgumentParser, eps: str | None, threads: int | None, out: str
) -> None:
    """Budgets, orders and attacks."""
    group = parser.add_argument_group("threats and attacks")
    group.add_argument(
        "--eps",
        nargs="+",
        default=[eps],
        required=eps is None,
        help="budgets, as 8/255; the first is the headline's",
    )
    group.add_argument(
        "--order",
        nargs="+",
        default=["1", "2", "inf"],
        metavar="P",
        help="Wasserstein orders: any of 1, 2, any p >= 1, inf (default: 1 2 inf)",
    )
    group.add_argument(
        "--attacks",
        nargs="+",
        default=list(DEFAULT_ATTACKS),
        metavar="A",
        help=f"any of {', '.join(ATTACKS)} (default: {' '.join(DEFAULT_ATTACKS)}); options "
        "behind a colon: wda:kappa=4,step=8/255",
    )
    shared(group, "--batch-size", metavar="B")
    group.add_argument(
        "--passes",
        type=count_or_auto,
        default=100,
        help="passes a sample for `nearest`, or auto: doubled until distances are at rest "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--points",
        metavar="FILE",
        help="anyone's adversarial examples, .pt, .npz or .safetensors: flips join the pool",
    )
    group.add_argument("--name", help="what to call the model (default: MODEL)")
    common_options(parser, norm=None, threads=threads, out=out)


def common_options(
    parser: argparse.ArgumentParser, norm: str | None, threads: int | None, out: str
) -> None:
    """Norm, domain, data, seed, device; without a norm it is inf, and 2 for a smoothed model."""
    group = parser.add_argument_group("norm, samples and output")
    group.add_argument(
        "--norm", default=norm, help=f"ground norm: 1, 2 or inf (default: {norm or 'inf'})"
    )
    group.add_argument(
        "--domain", nargs=2, default=["0", "1"], metavar=("LOW", "HIGH"), help="box (default: 0 1)"
    )
    group.add_argument("--no-box", action="store_true", help="let points leave the box: all of R^n")
    shared(group, "-n")
    shared(group, "--seed")
    group.add_argument("--out", help=f"directory for {out}")
    own = {} if threads is None else {"help": f"CPU threads (default: {threads})"}
    shared(group, "--threads", default=threads, **own)
    group.add_argument("--device", help="where to compute: cpu, cuda, mps (default: cpu)")
    shared(group, "--quiet")
