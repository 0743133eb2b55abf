"""`wassail smooth`: certificates for a model under noise, from both sides."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.cli.options import common_options, model_options
from wassail.cli.shared import checked, folder_of, loaded, made_by, progress, writing
from wassail.errors import InputError
from wassail.threat import ceil_percent, floor_percent, number, parse_confidence, parse_order, show
from wassail.writing import save

if TYPE_CHECKING:
    from wassail.smoothing.attack import SmoothedAttack
    from wassail.smoothing.certificate import Smoothing
    from wassail.smoothing.model import Smoothed, Votes
    from wassail.zoo.samples import Data
    from wassail.zoo.source import Source

DEFINITIONS = """\
All figures are for the SMOOTHED model, which sees its input with Gaussian noise, not for the bare
one.
vote: the class that is most probable under the noise. random: the class of one draw.
certified: at least so much stays right under every distribution within Wasserstein distance eps.
attacked: at most so much, under a distribution that was found. Kumar: the bound of Kumar, Levine
and Feizi (2022) for `random`, from the same draws."""


def smooth_options(parser: argparse.ArgumentParser) -> None:
    """What `wassail smooth` takes."""
    model_options(parser)
    parser.add_argument(
        "--sigma", required=True, help="standard deviation of the noise, for example 0.25"
    )
    parser.add_argument(
        "--draws", type=int, default=1000, help="draws of each sample (default: %(default)s)"
    )
    parser.add_argument(
        "--confidence",
        default="0.999",
        help="that all that is said holds (default: %(default)s for each side)",
    )
    parser.add_argument(
        "--eps",
        nargs="+",
        default=["0", "0.05", "0.1", "0.25", "0.5"],
        help="budgets in the l2 norm (default: 0 0.05 0.1 0.25 0.5)",
    )
    parser.add_argument("--order", default="1", metavar="P", help="Wasserstein order (default: 1)")
    parser.add_argument(
        "--passes",
        type=int,
        default=50,
        help="passes of the attack for each sample; 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the votes in --out; more --draws add"
    )
    common_options(
        parser,
        norm="2",
        threads=None,
        out="votes.safetensors, attack.safetensors and smoothing.json",
    )
    parser.set_defaults(run=smooth_command)


def smooth_command(options: argparse.Namespace) -> int:
    """`wassail smooth`."""
    norm, domain = checked(options)
    if norm != 2:
        raise InputError("Gaussian noise certifies the l2 norm: leave --norm away, or give 2.")
    parse_confidence(options.confidence)
    order = parse_order(options.order)
    budgets = sorted({number(e, "eps") for e in options.eps})
    if options.resume and options.out is None:
        raise InputError("--resume goes on with the votes in --out: name it.")
    folder = folder_of(options)
    import wassail as ws

    source, data = loaded(options)
    x, y = data.read(0, len(data))
    model = ws.smoothed(source.model, options.sigma, options.draws, options.seed)
    votes = _votes(model, source, data, folder, options)
    proof = votes.certificate(options.confidence)
    found = None
    if options.passes:
        found = ws.attack_smoothed(
            model,
            x,
            y,
            domain,
            options.passes,
            confidence=options.confidence,
            progress=progress(options),
        )
    rows = [_row(proof, found, eps, order) for eps in budgets]
    _print(rows, proof, options, order)
    if folder is not None:
        about = {
            "model": options.model,
            "data": options.data,
            "samples": len(y),
            "sigma": proof.sigma,
            "draws": proof.draws,
            "confidence": proof.confidence,
            "norm": 2,
            "order": show(order),
            "made by": made_by(options),
        }
        with writing(folder):
            if found is not None:
                found.save(folder / "attack.safetensors")
            text = json.dumps({**about, "rows": rows}, indent=1)
            save(folder / "smoothing.json", text.encode())
    return 0


def _votes(
    model: Smoothed,
    source: Source,
    data: Data,
    folder: Path | None,
    options: argparse.Namespace,
) -> Votes:
    """The votes: those in the folder, and what is missing."""
    from wassail.evaluation.plan import data_hash
    from wassail.smoothing.model import Votes
    from wassail.zoo.weights import fingerprint

    x, y = data.read(0, len(data))
    identity = {"weights": fingerprint(source.model), "data": data_hash(x, y)}
    start = None
    path = None if folder is None else folder / "votes.safetensors"
    if path is not None and path.exists():
        if not options.resume:
            raise InputError(
                f"{str(path)!r} has votes already: give --resume to go on, or another --out."
            )
        start = Votes.load(path)
        if {name: start.info.get(name) for name in identity} != identity:
            raise InputError(
                f"the votes in {str(path)!r} are of another model or of other samples: choose "
                "another --out."
            )
    votes = model.votes(x, y, start=start, progress=progress(options))
    votes = replace(votes, info={**votes.info, **identity})
    if path is not None:
        with writing(path.parent):
            votes.save(path)
    return votes


def _row(
    proof: Smoothing, found: SmoothedAttack | None, eps: float, order: float
) -> dict[str, Any]:
    """Both sides of both classifiers at one budget."""
    reached = None if found is None else found.flips
    certified, attacked = proof.curve(order, reached)(eps)
    return {
        "eps": eps,
        "vote certified": certified,
        "vote attacked": attacked,
        "random certified": proof.accuracy(eps, order),
        "random attacked": 1.0 if found is None else found.accuracy(eps, order),
        "Kumar": proof.kumar(eps),
    }


def _print(
    rows: list[dict[str, Any]], proof: Smoothing, options: argparse.Namespace, order: float
) -> None:
    """A table, and what its words mean."""
    print(
        f"{options.model} with noise {proof.sigma:g} on {len(proof.low)} samples of "
        f"{options.data}: l2, order {show(order)}, {proof.draws} draws a sample, confidence "
        f"{proof.confidence:g} a side"
    )
    names = [name for name in rows[0] if name != "eps"]
    print("      eps" + "".join(f"{name:>18}" for name in names))
    for row in rows:
        cells = [
            (ceil_percent if "attacked" in name else floor_percent)(row[name]) for name in names
        ]
        print(f"{row['eps']:9.4g}" + "".join(f"{cell + ' %':>18}" for cell in cells))
    print(DEFINITIONS)
