"""What several commands need."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.cli.options import settings_of
from wassail.errors import InputError, unknown
from wassail.threat import Domain, number, parse_domain, parse_norm
from wassail.writing import make

if TYPE_CHECKING:
    from wassail.evaluation.work import Runner
    from wassail.zoo.files import Targets
    from wassail.zoo.samples import Data
    from wassail.zoo.source import Source

# Settings behind a colon: of folders of images, of RobustBench's models, of a cluster.
FOLDER = ("ids", "preprocessing")
ROBUSTBENCH = ("dataset", "models")
CLUSTER = ("workers", "gpus", "timeout")


def seconds_text(text: str) -> float:
    """A positive number of seconds."""
    seconds = number(text, "time limit")
    if not 0 < seconds < math.inf:
        raise InputError(f"the time limit is {text!r}: give a positive number of seconds.")
    return seconds


def known(kind: str, names: Sequence[str], valid: Collection[str]) -> None:
    """Raise an error that lists the valid names unless all names are valid."""
    for name in names:
        if name not in valid:
            raise unknown(kind, name, valid)


def refuse(options: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse options of `evaluate` that were given where they say nothing.

    options: of the command line; names: of the options, as attributes; reason: how the sentence
    goes on behind the option.
    """
    for name in names:
        if getattr(options, name) != options.usual[name]:
            raise InputError(f"--{name.replace('_', '-')} is {reason}")


def checked(options: argparse.Namespace) -> tuple[float, Domain]:
    """The norm and the domain, and everything else that commands on data share and that can be
    wrong without torch.
    """
    if options.n is not None and options.n < 1:
        raise InputError(f"-n is {options.n}: give a positive number of samples.")
    checked_threads(options)
    return parse_norm(options.norm), None if options.no_box else parse_domain(tuple(options.domain))


def checked_threads(options: argparse.Namespace) -> None:
    """Refuse a number of threads that makes no sense."""
    if options.threads is not None and not 1 <= options.threads <= 1024:
        raise InputError(
            f"--threads is {options.threads}: give a number of CPU threads, 1 to 1024."
        )


def checked_share(text: str) -> float:
    """The share of radii to prove again."""
    share = number(text, "--radii")
    if not 0 <= share <= 1:
        raise InputError(
            f"--radii is {text!r}: give the share to prove again, between 0 and 1, or nothing for "
            "all."
        )
    return share


def use_threads(options: argparse.Namespace) -> None:
    """Give torch the number of threads that was asked for."""
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)


def folder_of(options: argparse.Namespace) -> Path | None:
    """The --out directory, made before the work: one that cannot be written to should not cost
    a run.
    """
    if options.out is None:
        return None
    if not options.out:
        raise InputError("--out is empty: name a directory.")
    folder = Path(options.out)
    with writing(folder):
        make(folder)
    return folder


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {str(folder)!r}: {error.strerror}; choose another place."
        ) from None


def loaded(options: argparse.Namespace, targets: Targets | None = None) -> tuple[Source, Data]:
    """The model and the data, the number of threads set."""
    use_threads(options)
    source = model_from(options, parse_norm(options.norm))
    device = getattr(options, "device", None)
    if device is not None:
        try:
            source.model.to(device)  # type: ignore[attr-defined]
        except (RuntimeError, AttributeError, AssertionError) as error:
            raise InputError(
                f"cannot use device {device!r}: {str(error).splitlines()[0].rstrip('.')}."
            ) from None
    data = data_from(options, options.data, options.n, targets)
    if options.n is not None and len(data) < options.n:
        raise InputError(
            f"-n is {options.n}, but {options.data!r} has {len(data)} samples: give at most that, "
            "or leave it out."
        )
    return source, data


def data_from(
    options: argparse.Namespace,
    name: str,
    n: int | None = None,
    targets: Targets | None = None,
    classes: Sequence[str] | None = None,
) -> Data:
    """Data read as the options say.

    Args:
        options: of the command line.
        name: of the data.
        n: the first n samples; None for all.
        targets: which they are; None for classes.
        classes: their names in the order of the model, where the options give none.
    """
    from wassail.zoo.datasets import open_data
    from wassail.zoo.files import CLASSES

    name, settings = settings_of(name, FOLDER, path=True)
    return open_data(
        name,
        n,
        **settings,
        classes=_classes_of(options) or classes,
        targets=targets or CLASSES,
    )


def _classes_of(options: argparse.Namespace) -> list[str] | None:
    """The names of the classes in the order of the model, if they were given."""
    if options.classes is None:
        return None
    return [name.strip() for name in options.classes.split(",")]


def boxed(
    path: str | None, source: Source, data: Data, domain: Domain, held: Sequence[str]
) -> tuple[Source, Data, Domain]:
    """The model, the data and the domain with a box for each feature, out of a file or the same for
    all, and features that may not move.
    """
    from wassail.zoo.features import in_boxes, with_held
    from wassail.zoo.files import reading
    from wassail.zoo.tables import read_box, read_sample_boxes

    box: Any = domain
    if path is not None:
        with reading(path):
            own = read_sample_boxes(Path(path), (len(data), *data.shape))
            if own is not None and not held:
                return source, data, own  # type: ignore[return-value]
            box = read_box(Path(path), data.info.get("features"))
    return in_boxes(source, data, with_held(data, box, held) if held else box)


def model_from(options: argparse.Namespace, norm: float) -> Source:
    """The model that the options name."""
    from wassail.zoo.models import open_model

    mean, std = (
        [number(v, name) for v in values] if (values := getattr(options, name)) else None
        for name in ("mean", "std")
    )
    name, own = options.model, dict[str, str]()
    if name.startswith("robustbench:"):
        name, own = settings_of(name, ROBUSTBENCH, path=True)
    return open_model(
        name,
        weights=options.weights,
        mean=mean,
        std=std,
        logits=options.logits,
        **own,
        threat="L2" if norm == 2 else "Linf",
        trust=bool(options.trust),
        one_logit=bool(options.one_logit),
    )


def runner_of(options: argparse.Namespace) -> AbstractContextManager[Runner | None]:
    """Who does the work: a Ray cluster if one was asked for, else this process."""
    if options.ray is None:
        return nullcontext()
    address, own = settings_of(options.ray, CLUSTER)
    workers = own.get("workers")
    if workers is not None and not workers.isdecimal():
        raise InputError(f"workers of --ray is {workers!r}: give a number of processes.")
    from wassail.evaluation.cluster import Ray

    return Ray(
        address or None,
        None if workers is None else int(workers),
        number(own.get("gpus", "0"), "gpus of --ray"),
        threads=options.threads or 1,
        timeout=seconds_text(own["timeout"]) if "timeout" in own else None,
    )


def progress(options: argparse.Namespace) -> bool:
    """Whether the share done is shown: a bar on a terminal, else a line every few seconds."""
    return not options.quiet


def made_by(options: argparse.Namespace) -> str:
    """Seed and versions, for files."""
    from wassail.network import versions

    return f"seed {options.seed}, " + ", ".join(f"{k} {v}" for k, v in versions().items())
