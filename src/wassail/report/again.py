"""The command with which a reader looks at a run again, and what only the reader can supply.

A run may come from a stranger. Nothing that it says becomes a command that runs code or opens a
path: the words come from closed sets (built-in names, names of two libraries, numbers, known
options), and everything else is a placeholder with a sentence.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.writing import printable
from wassail.zoo import DATASETS, MODELS, SPLITS, weight_file
from wassail.zoo.classes import GIVEN
from wassail.zoo.files import CLASS_NAMES
from wassail.zoo.weights import sha256

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

LIBRARIES = ("robustbench", "timm")  # whose names of models are no paths and no code
BOARDS = ("cifar10", "cifar100", "imagenet")  # RobustBench's data sets
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
KEY = re.compile(r"[a-z][a-z0-9_]{0,39}|[0-9]{1,2}")
DIGEST = re.compile(r"[0-9a-f]{64}")
SHOWN = 80  # characters of a name in a sentence


@dataclass(frozen=True)
class Again:
    """A command, with capital letters where the reader's own things go, and what these must be.

    Args:
        command: words for a shell, quoted.
        supply: a sentence for each thing that the reader supplies.
    """

    command: str
    supply: tuple[str, ...]


def again(run: Evaluation) -> Again:
    """How every figure of a run is looked at again, from its stored points."""
    model = _record(run.info.get("model"))
    data = _record(run.info.get("data"))
    supply = []
    folder = "RUN" if run.folder is None else Path(run.folder).resolve().name
    if not WORD.fullmatch(folder):
        folder = "RUN"
    if folder == "RUN":
        supply.append("RUN: the folder of the run.")
    name = _known_model(model)
    if name is None:
        supply.append(
            f"MODEL: the model, from a source that you trust; the run calls it {_shown(run.name)}"
            f"{_digests(model, 'weights')}."
        )
    if not _known_data(run.data, data):
        supply.append(
            f"DATA: the data, from a source that you trust; the run calls them {_shown(run.data)}"
            f"{_digests(data, 'sha256')}."
        )
    options = _options(model)
    if name is None and options is None:
        supply.append("Options of MODEL: the run records some that are no plain words or numbers.")
    if data.get(CLASS_NAMES) == GIVEN:
        supply.append("--classes: the names of all classes, in the order of the model.")
    words = ["wassail", "verify", folder, name or "MODEL", "--data"]
    words.append(run.data if _known_data(run.data, data) else "DATA")
    return Again(shlex.join([*words, *(options or ())]), tuple(supply))


def _record(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _known_model(model: Mapping[str, Any]) -> str | None:
    """The name of a model that is no file and no code of the run's, or None."""
    name = model.get("source", model.get("name"))
    if not isinstance(name, str) or _options(model) is None:
        return None
    files = model.get("files")
    if name in MODELS:
        own = weight_file(name)
        return name if files == {own.name: sha256(own)} else None
    library, _, rest = name.partition(":")
    if library not in LIBRARIES or not WORD.fullmatch(rest) or ".." in rest:
        return None
    if library == "robustbench":
        dataset = model.get("dataset")
        return f"{name}:dataset={dataset}" if dataset in BOARDS else name
    return name if files == {} else None  # a file of weights was given


def _known_data(name: str, data: Mapping[str, Any]) -> bool:
    """Whether the data come with the library."""
    names = {*DATASETS, *(f"{base}:{split}" for base in DATASETS for split in SPLITS)}
    return name in names and data.get("source") == "builtin"


def _options(model: Mapping[str, Any]) -> list[str] | None:
    """The options of the model that the run records, or None where they are not of a known kind."""
    words = []
    for name in ("mean", "std"):
        value = model.get(name)
        if value is None:
            continue
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(_is_number(number) for number in numbers):
            return None
        words += [f"--{name}", *(repr(float(number)) for number in numbers)]
    key = model.get("logits")
    if key is not None:
        if isinstance(key, bool) or not KEY.fullmatch(str(key)):
            return None
        words += ["--logits", str(key)]
    if model.get("kind") == "robustbench" and model.get("dataset") not in BOARDS:
        return None
    if model.get("one_logit") is True:
        words.append("--one-logit")
    return words


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _digests(about: Mapping[str, Any], own: str) -> str:
    """The digests that a run records, as far as they are some."""
    found = []
    digest = about.get(own)
    if isinstance(digest, str) and DIGEST.fullmatch(digest):
        found.append(f"{'its weights have' if own == 'weights' else 'they have'} SHA-256 {digest}")
    for name, value in _record(about.get("files")).items():
        if isinstance(value, str) and DIGEST.fullmatch(value):
            found.append(f"the file {_shown(name)} has SHA-256 {value}")
    return "".join(f", and {text}" if k else f", and says: {text}" for k, text in enumerate(found))


def _shown(text: object) -> str:
    """A name that a run gives, in quotes: the last part of a path, without odd characters."""
    last = re.split(r"[/\\]", str(text).rstrip("/\\"))[-1]
    return repr(printable(last)[:SHOWN])
