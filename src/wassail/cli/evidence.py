"""`wassail evidence`, `wassail recheck`, and packs in `wassail verify` and `wassail seal`."""

from __future__ import annotations

import argparse
import io
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.cli.commands import evaluate_command, seal_command, verify_command
from wassail.cli.options import shared
from wassail.cli.shared import (
    checked_share,
    checked_threads,
    data_from,
    folder_of,
    model_from,
    use_threads,
    writing,
)
from wassail.cli.signoff import has_results, quiet_output
from wassail.errors import InputError
from wassail.writing import is_run, printable

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation
    from wassail.evidence.statement import Statement
    from wassail.zoo.source import Source

QUIET = "print nothing: the exit code is the answer"
OWN_ORDER = "the order of the classes: that of the pack was used (--classes gives yours)"
OWN_MODEL = "the model in the pack was used: compare its digest with that of the model that you use"


def evidence_options(parser: argparse.ArgumentParser) -> None:
    """What the author states, and what else goes into the pack."""
    group = parser.add_argument_group("the pack")
    group.add_argument("--purpose", default="", metavar="TEXT", help="what the model is for")
    group.add_argument("--drawn", default="", metavar="TEXT", help="how the samples were drawn")
    group.add_argument("--why", default="", metavar="TEXT", help="why this eps, in your words")
    group.add_argument("--unit", default="", metavar="TEXT", help="what a distance of 1 is")
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="TEXT",
        help="a known limit; may be given several times",
    )
    group.add_argument(
        "--later-data",
        metavar="D",
        help="later samples, as --data: the shift to them is measured, and stands beside eps",
    )
    group.add_argument(
        "--include-model",
        action="store_true",
        help="put the .onnx file into the pack, so that a reader needs nothing else",
    )
    group.add_argument("--key", metavar="FILE", help="an Ed25519 private key that signs the seal")


def statement_from(options: argparse.Namespace) -> Statement:
    """The author's words."""
    from wassail.evidence.statement import Statement

    return Statement(
        options.purpose,
        options.drawn,
        options.why,
        options.unit,
        tuple(options.limit),
        tuple(options.require),
    )


def evidence_command(options: argparse.Namespace) -> int:
    """`wassail evidence`: the evaluation in PACK/run, then the pack around it."""
    if options.out is None:
        raise InputError("a pack needs a folder: add --out PACK.")
    from wassail.evaluation.sealing import SEAL

    folder = Path(options.out)
    if (folder / SEAL).exists():
        raise InputError(
            f"{options.out!r} holds a pack already: name another folder, or remove it."
        )
    folder_of(options)
    _remove_unbegun(folder / "run")
    statement = statement_from(options)
    model = _included(options)
    inner = argparse.Namespace(**{**vars(options), "out": str(folder / "run")})
    code = evaluate_command(inner)
    from wassail.evaluation.run import Evaluation
    from wassail.evidence.pack import RUN, write_pack

    later = _later(options, Evaluation.load(folder / RUN))
    with writing(folder):
        page, archive = write_pack(folder, statement, later, model, options.key)
    with quiet_output(options):
        print("removed the picture and the times of the run: they differ from machine to machine")
        print(f"wrote {page}\nwrote {archive}")
    return code


def _remove_unbegun(run: Path) -> None:
    """Remove a run that ended before its first result: other settings may be asked for now."""
    if run.is_symlink() or not is_run(run) or has_results(run):
        return
    for name in ("log/lock", "log/events.jsonl", "config.json"):
        (run / name).unlink(missing_ok=True)


def _included(options: argparse.Namespace) -> bytes | None:
    """The bytes of the model's file, where it is to be included."""
    if not options.include_model:
        return None
    from wassail.writing import read_small

    if not str(options.model).endswith(".onnx"):
        raise InputError("--include-model is for .onnx files: leave it away, or export the model.")
    return read_small(options.model, 2 << 30, "a model")


def _later(options: argparse.Namespace, run: Evaluation) -> Any:
    """The later samples in the variable of the run, or None."""
    if options.later_data is None:
        return None
    from torch import nn

    from wassail.zoo.features import as_evaluated

    data = data_from(options, options.later_data, classes=_classes(options, run))
    _, encoded = as_evaluated(run.info.get("data"), nn.Identity(), data)
    assert encoded is not None
    return encoded.read(0, len(encoded))


def _model(options: argparse.Namespace, place: Path, run: Evaluation) -> tuple[Source | None, bool]:
    """The model that was named, else that of the pack or a built-in one; and whether it is the
    pack's own.
    """
    from wassail.evidence.document import commands
    from wassail.evidence.pack import MODEL
    from wassail.zoo import MODELS

    if options.model is not None:
        return model_from(options, run.threat.norm), False
    chosen = argparse.Namespace(**vars(options))
    if (place / MODEL).is_file():
        chosen.model = str(place / MODEL)
        about = run.info.get("model")
        if isinstance(about, dict):
            chosen.one_logit = options.one_logit or about.get("one_logit") is True
        return model_from(chosen, run.threat.norm), True
    name = commands(run, None)["verify"]["words"].split()[3]
    if name not in MODELS:
        return None, False
    chosen.model = name
    return model_from(chosen, run.threat.norm), False


def _classes(
    options: argparse.Namespace, run: Evaluation, given: bool = False
) -> tuple[str, ...] | None:
    """The classes of a pack, where the labels of its data were names and no order is given now.
    Other samples may lack a name, which would number them otherwise.

    given: only where the author gave an order.
    """
    from wassail.evidence.question import recorded
    from wassail.zoo.classes import GIVEN
    from wassail.zoo.files import CLASS_NAMES

    order = recorded(run.info, "data").get(CLASS_NAMES)
    known = order is not None and (order == GIVEN or not given)
    return run.classes if known and options.classes is None else None


def _verify_pack(options: argparse.Namespace) -> int:
    """`wassail verify PACK`: exit code 1 if something in the pack is false."""
    checked_threads(options)
    if options.output is not None:
        raise InputError("-o is for runs: for a pack, --record FILE names what is written.")
    share = None if options.radii is None else checked_share(options.radii)
    from wassail.evaluation.reproving import few
    from wassail.evidence.pack import opened
    from wassail.evidence.verify import load, record_text, verify_pack
    from wassail.writing import save

    use_threads(options)
    with opened(options.folder) as place:
        run = load(place)
        radii = few(run) if share is None else share
        source, own = _model(options, place, run)
        if source is None:
            raise InputError("the pack has no model in it: give MODEL, as `wassail evaluate` does.")
        classes = _classes(options, run, given=True) if options.data is not None else None
        data = options.data and data_from(options, options.data, max(len(run), 1), classes=classes)
        signer = options.seal or None
        found, known = verify_pack(
            place,
            source.model,
            data,
            radii,
            signer=signer,
            seed=options.seed,
            run=run,
            files=None if own else source.info.get("files"),
            later=_later(options, run),
        )
    told = [f"{text}." for text, used in ((OWN_MODEL, own), (OWN_ORDER, classes)) if used]
    found = replace(found, unchecked=(*found.unchecked, *told))
    target = (
        options.record or f"{str(options.folder).rstrip('/').removesuffix('.zip')}.verified.json"
    )
    with writing(Path(target)):
        made = save(target, record_text(found, known, radii, options.key))
    if not options.quiet:
        print(f"{printable(str(found), chr(10))}\nwrote {made}")
    return 0 if found else 1


def verify_options(parser: argparse.ArgumentParser) -> None:
    """Options of `verify` that are for packs, and how much it says."""
    parser.add_argument(
        "--later-data",
        metavar="D",
        help="packs: the later samples that `evidence` was given; those of the pack are compared",
    )
    shared(parser, "--quiet", help=QUIET)


def recheck_options(parser: argparse.ArgumentParser) -> None:
    """Options of `recheck` beside those of the model."""
    shared(parser, "--seed", help="of the draws (default: 0)")
    shared(parser, "--threads")
    shared(parser, "--quiet", help=QUIET)


def recheck_command(options: argparse.Namespace) -> int:
    """`wassail recheck`: 0 if the guarantee still speaks about the new data, 1 if not, 3 if these
    samples cannot tell.
    """
    checked_threads(options)
    if options.data is None:
        raise InputError("new data are needed: add --data NEW.")
    from wassail.evidence.pack import check_pack_seal, opened
    from wassail.evidence.recheck import recheck
    from wassail.evidence.verify import load

    use_threads(options)
    with opened(options.folder) as place:
        run = load(place)
        if not (known := check_pack_seal(place, run)):
            raise InputError(
                f"the pack was changed: {known} Take one that `wassail verify` passes."
            )
        source, _ = _model(options, place, run)
        found = recheck(
            run,
            data_from(options, options.data, classes=_classes(options, run)),
            None if source is None else source.model,
            options.seed,
        )
    if not options.quiet:
        print(printable(str(found), "\n"))
    return found.code


def verify_any(options: argparse.Namespace) -> int:
    """`wassail verify`, of a run or of a pack."""
    from wassail.evidence.pack import is_pack

    if is_pack(options.folder):
        return _verify_pack(options)
    if options.model is None and not Path(options.folder).exists():
        raise InputError(
            f"{options.folder!r} is not there: give a pack, or a run with its model "
            "(wassail verify RUN MODEL)."
        )
    if (options.key, options.record, options.later_data) != (None, None, None):
        raise InputError(
            "--record, --key and --later-data are for packs: give one, or leave them away."
        )
    if options.model is None:
        raise InputError("a run is verified with its model: wassail verify RUN MODEL.")
    options.radii = "0" if options.radii is None else options.radii
    with redirect_stdout(io.StringIO()) if options.quiet else nullcontext():
        return verify_command(options)


def seal_any(options: argparse.Namespace) -> int:
    """`wassail seal`, of a run or of a pack."""
    from wassail.evidence.pack import is_pack, seal_again

    if not is_pack(options.folder):
        return seal_command(options)
    with writing(Path(options.folder)):
        for path in seal_again(options.folder, options.key):
            print(f"wrote {path}")
    return 0
