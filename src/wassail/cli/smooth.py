"""`wassail evaluate --smooth`: certificates for a model under noise, from both sides."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.cli.config import actions
from wassail.cli.options import settings_of
from wassail.cli.shared import (
    checked,
    folder_of,
    loaded,
    made_by,
    progress,
    refuse,
    runner_of,
    writing,
)
from wassail.errors import InputError
from wassail.threat import (
    Domain,
    ceil_percent,
    floor_percent,
    number,
    parse_confidence,
    parse_order,
)
from wassail.writing import check_links, printable, save

if TYPE_CHECKING:
    from torch import Tensor

    from wassail.smoothing.attack import SmoothedAttack
    from wassail.smoothing.certificate import Smoothing
    from wassail.smoothing.draws import Counter
    from wassail.smoothing.model import Smoothed, Votes

DEFINITIONS = """\
All figures are for the SMOOTHED model, which sees its input with Gaussian noise, not for the bare
one.
vote: the class that has more than half of the probability under the noise, else it abstains, which
is an error. random: the class of one draw.
certified: at least so much stays right under every distribution within Wasserstein distance eps.
attacked: at most so much, under a distribution that was found. Kumar: the bound of Kumar, Levine
and Feizi (2022) for `random`, from the same draws."""
DRAWS = 1000
CONFIDENCE = "0.999"
BUDGETS = ["0", "0.05", "0.1", "0.25", "0.5"]
# Options of `evaluate` that say nothing about a smoothed model, and those that only it has.
FOREIGN = (
    *("attacks", "add_attack", "points", "effort", "gap", "time_limit"),
    *("gradients", "chunk", "require", "json", "write", "landmarks", "box"),
    *("label_cost", "subpopulation", "groups", "group_weights"),
    *("tolerance", "threshold", "target", "immutable"),
)
OWN = ("draws", "confidence")  # settings behind the colon


@dataclass(frozen=True)
class Asked:
    """What a smoothed model is asked for.

    sigma: of the noise; draws: of each sample; confidence: of each side; budgets in l2; orders;
    passes of the attack, 0 for none; domain: of the attack's points; name: of the model.
    """

    sigma: str
    draws: int
    confidence: float
    budgets: list[float]
    orders: list[float]
    passes: int
    domain: Domain
    name: str


class _Smooth(argparse.Action):
    """`--smooth` has budgets of its own: with it `--eps` may be left away."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep the value."""
        setattr(namespace, self.dest, values)
        for _, action in actions(parser):
            if action.dest == "eps":
                action.required = False


def smooth_options(parser: argparse.ArgumentParser) -> None:
    """What `wassail evaluate` takes for a smoothed model."""
    group = parser.add_argument_group("smoothing")
    group.add_argument(
        "--smooth",
        action=_Smooth,
        metavar="SIGMA",
        help="the model under Gaussian noise of this size, in l2; 0.25:draws=1000,confidence=0.999 "
        "are draws of each sample (with --resume a multiple of the first) and how sure each side "
        "is (these are the defaults)",
    )


def evaluate_smoothed(options: argparse.Namespace) -> int:
    """`wassail evaluate --smooth SIGMA`: votes, attack, table and files."""
    asked = _asked(options)
    folder = folder_of(options)
    if folder is not None and (folder / "config.json").exists():
        raise InputError(f"{str(folder)!r} has a run of the bare model: choose another --out.")
    import wassail as ws
    from wassail.evaluation.smoothed import row_of
    from wassail.evaluation.votes import counter
    from wassail.network import BATCH_SIZE
    from wassail.zoo.classes import check_match, classes_text, numbers_of

    options.batch_size = options.batch_size or BATCH_SIZE
    source, data = loaded(options)
    check_match(source.model, data)
    x, y = data.read(0, len(data))
    model = ws.smoothed(source.model, asked.sigma, asked.draws, options.seed)
    with runner_of(options) as runner:
        counts = None if runner is None else counter(runner)
        votes = _votes(model, x, y, folder, options, counts)
        proof = votes.certificate(asked.confidence)
        found = _attack(model, x, y, folder, asked, options, counts)
    rows = [row_of(proof, found, eps, order) for order in asked.orders for eps in asked.budgets]
    about = {
        "model": asked.name,
        "data": options.data,
        "samples": len(y),
        "classes": numbers_of(data.classes),
        "sigma": proof.sigma,
        "draws": proof.draws,
        "first draws": votes.first,
        "confidence": proof.confidence,
        "norm": 2,
        "attack": None if found is None else _settings(asked, options) | {"draws": found.draws},
        "command": sys.argv[1:],
        "made by": made_by(options),
        "rows": rows,
    }
    named = classes_text(data.classes, data.info)
    if named is not None:
        print(printable(named))
    _print(about, options)
    if folder is not None:
        _write(about, folder, proof, found, asked)
    return 0


def _asked(options: argparse.Namespace) -> Asked:
    """The options, checked without a model."""
    if options.certify not in (None, "auto", "smoothing"):
        raise InputError(
            f"--certify {options.certify} is for the bare model: with --smooth give smoothing, or "
            "nothing."
        )
    refuse(options, FOREIGN, "not for a smoothed model: leave it away, or leave --smooth away.")
    if options.eps == [None]:
        options.eps = BUDGETS
    norm, domain = checked(options)
    if norm != 2:
        raise InputError("Gaussian noise certifies the l2 norm: leave --norm away, or give 2.")
    if not isinstance(options.passes, int) or options.passes < 0:
        raise InputError(
            f"--passes is {options.passes}: give a number of passes for the smoothed model, 0 for "
            "no attack."
        )
    if options.resume and options.out is None:
        raise InputError("--resume goes on with the votes in --out: name it.")
    sigma, own = settings_of(options.smooth, OWN)
    draws = own.get("draws", str(DRAWS))
    if not draws.isdecimal() or len(draws) > 9:
        raise InputError(f"draws of --smooth is {draws!r}: give a whole number.")
    return Asked(
        sigma,
        int(draws),
        parse_confidence(own.get("confidence", CONFIDENCE)),
        sorted({_budget(e) for e in options.eps}),
        list(dict.fromkeys(map(parse_order, options.order))),
        options.passes,
        domain,
        options.name or options.model,
    )


def _budget(text: str) -> float:
    """A budget that may be 0, checked before any work."""
    value = number(text, "eps")
    if not 0 <= value < math.inf:
        raise InputError(f"eps is {text!r}: give a budget that is 0 or more, for example 0.25.")
    return value


def _settings(asked: Asked, options: argparse.Namespace) -> dict[str, Any]:
    """What decides about an attack."""
    return {
        "passes": asked.passes,
        "seed": options.seed,
        "confidence": asked.confidence,
        "domain": None if asked.domain is None else list(asked.domain),
    }


def _attack(
    model: Smoothed,
    x: Tensor,
    y: Tensor,
    folder: Path | None,
    asked: Asked,
    options: argparse.Namespace,
    counts: Counter | None,
) -> SmoothedAttack | None:
    """The attack in the folder if there is one, else a new one; None if none is asked for.

    An attack is made once. To draw more for the same points after a look at them would break its
    confidence.
    """
    import wassail as ws
    from wassail.evaluation.smoothed import read_smoothing
    from wassail.smoothing.attack import SmoothedAttack

    path = None if folder is None else folder / "attack.safetensors"
    if not asked.passes:
        return None
    if path is not None and folder is not None and path.exists():
        check_links(path, folder)
        try:
            before = read_smoothing(folder)["attack"]
        except (InputError, KeyError):
            before = None
        if isinstance(before, dict):
            settings = _settings(asked, options)
            if {name: before.get(name) for name in settings} != settings:
                raise InputError(
                    f"the attack in {str(folder)!r} was made with other settings ({before}): give "
                    "the same, or another --out."
                )
            found = SmoothedAttack.load(path)
            if len(found.distances) == len(x):
                return found
    found = ws.attack_smoothed(
        model,
        x,
        y,
        asked.domain,
        asked.passes,
        confidence=asked.confidence,
        batch_size=options.batch_size,
        progress=progress(options),
        counter=counts,
        eps=asked.budgets if math.inf in asked.orders else (),
    )
    if path is not None:
        with writing(path.parent):
            found.save(path)
    return found


def _votes(
    model: Smoothed,
    x: Tensor,
    y: Tensor,
    folder: Path | None,
    options: argparse.Namespace,
    counts: Counter | None,
) -> Votes:
    """The votes: those in the folder, and what is missing."""
    from wassail.smoothing.model import Votes

    start = None
    path = None if folder is None else folder / "votes.safetensors"
    if path is not None and path.exists():
        if not options.resume:
            raise InputError(
                f"{str(path)!r} has votes already: give --resume to go on, or another --out."
            )
        check_links(path, path.parent)
        start = Votes.load(path)
    try:
        votes = model.votes(
            x,
            y,
            start=start,
            batch_size=options.batch_size,
            progress=progress(options),
            keep=None if folder is None else folder / "counting.safetensors",
            counter=counts,
        )
    except InputError as error:
        if "differ in" not in str(error):
            raise
        raise InputError(
            f"the votes in {str(path)!r} are of another model, of other samples or of other "
            "noise: choose another --out."
        ) from None
    if path is not None:
        with writing(path.parent):
            votes.save(path)
    return votes


def _print(about: dict[str, Any], options: argparse.Namespace) -> None:
    """A table for each order, and what its words mean."""
    from wassail.report.smoothing import headline

    print(
        f"{about['model']} with noise {about['sigma']:g} on {about['samples']} samples of "
        f"{options.data}: l2, {about['draws']} draws a sample, confidence "
        f"{about['confidence']:g} a side"
    )
    rows = about["rows"]
    names = [name for name in rows[0] if name not in ("eps", "order")]
    print("order      eps" + "".join(f"{name:>18}" for name in names))
    for row in rows:
        cells = [
            (ceil_percent if "attacked" in name else floor_percent)(row[name]) for name in names
        ]
        print(f"{row['order']:>5}{row['eps']:9.4g}" + "".join(f"{c + ' %':>18}" for c in cells))
    print(DEFINITIONS)
    print(headline(about))


def _write(
    about: dict[str, Any],
    folder: Path,
    proof: Smoothing,
    found: SmoothedAttack | None,
    asked: Asked,
) -> None:
    """The figures, the page and the picture."""
    from wassail.evaluation.reading import SMOOTHED
    from wassail.report.drawing import figure
    from wassail.report.smoothing import write_smoothing

    flips = None if found is None else found.flips
    curves = [proof.curve(order, flips) for order in asked.orders]
    with writing(folder):
        save(folder / SMOOTHED, json.dumps(about, indent=1).encode())
        print(f"wrote {write_smoothing(folder, folder / 'report.html')}")
        eps = next((eps for eps in asked.budgets if eps), 0.0)
        drawn = figure([[curve] for curve in curves], [asked.name], eps)
        print(f"wrote {save(folder / 'sandwich.svg', drawn.svg())}")
