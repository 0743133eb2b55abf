"""A property of a distribution, as `omega.json` states it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from wassail.checks import check_data
from wassail.errors import InputError, reason_of, unknown
from wassail.losses import LIPSCHITZ
from wassail.omega.fields import Fields, finite, read_json, shown
from wassail.threat import Threat, fitted
from wassail.transport.allocation import sample_weights
from wassail.writing import read_small
from wassail.zoo.models import open_model

FORMAT = "omega/1"
LARGEST = 1 << 30  # bytes of a file of samples
NETWORK = 1 << 31  # bytes of a network: what protobuf holds
MOST_SAMPLES = 10**6
MEASURES = ("accuracy", *LIPSCHITZ)


@dataclass(frozen=True, eq=False)
class Omega:
    """A bound that holds for every distribution of a threat around weighted samples, or does not.

    Args:
        path: of the file.
        digest: SHA-256 of the file.
        network: path of the ONNX file.
        network_digest: SHA-256 of it.
        model: what was read from it.
        x: samples, float32 `(N, *shape)`.
        y: labels, integer `(N,)`.
        mu: weights, float64 `(N,)`, that sum to one.
        weights: the weights as they were given, float64 `(N,)`.
        threat: which distributions are meant, with label cost and subpopulation.
        measure: "accuracy", "cross_entropy" or "margin".
        bound: the least accuracy, or the greatest loss.
    """

    path: Path
    digest: str
    network: Path
    network_digest: str
    model: nn.Module
    x: Tensor
    y: Tensor
    mu: Tensor
    weights: Tensor
    threat: Threat
    measure: str
    bound: float

    @cached_property
    def outputs(self) -> int:
        """How many classes there are."""
        with torch.no_grad():
            return int(self.model(self.x[:1]).shape[1])

    @property
    def least(self) -> bool:
        """Whether the bound is one from below: on an accuracy, not on a loss."""
        return self.measure == "accuracy"

    def kept_by(self, value: Fraction) -> bool:
        """Whether a value of the measure keeps the bound."""
        return value >= Fraction(self.bound) if self.least else value <= Fraction(self.bound)

    @property
    def sense(self) -> str:
        """The bound in words."""
        return f"{self.measure} {'at least' if self.least else 'at most'} {self.bound:g}"

    def __str__(self) -> str:
        return f"{self.sense} over {self.threat}, {len(self.y)} samples"


def schema_text(name: str = "omega") -> str:
    """The JSON schema of a file, "omega" or "answer"."""
    return (resources.files("wassail.omega") / f"{name}.schema.json").read_text("utf-8")


def read_omega(path: str | Path) -> Omega:
    """The property in an `omega.json`, with its network and samples.

    Args:
        path: of the file; the files that it names lie in its folder or below.
    """
    path = Path(path)
    content, data = read_json(path, "a property")
    try:
        return _property(path, content, hashlib.sha256(data).hexdigest())
    except InputError as error:
        raise error if str(path) in str(error) else error.within(str(path)) from None


def _property(path: Path, content: Any, digest: str) -> Omega:
    fields = Fields(content, "the property", ("format", "network", "samples", "threat", "claim"))
    fields.of_format(FORMAT)
    measure, bound = _claim(fields.get("claim"))
    rows, y, weights = _samples(path, fields.get("samples"))
    about = Fields(fields.get("network"), "network", ("onnx",), ("sha256",))
    network = _beside(path, about.text("onnx"), "onnx of network")
    found = hashlib.sha256(read_small(network, NETWORK, "a network")).hexdigest()
    _same(about.get("sha256"), found, network)
    model = _model(network)
    shape = tuple(int(size) for size in model.shape)
    if math.prod(shape) != rows.shape[1]:
        raise InputError(
            f"the network takes {math.prod(shape)} numbers, a sample has {rows.shape[1]}: give "
            "files that belong together."
        )
    threat = _threat(fields.get("threat"), shape, measure)
    x, y = check_data(_rounded(rows.reshape(-1, *shape), threat), y, threat.domain)
    mu = sample_weights(weights, len(y))
    return Omega(
        path, digest, network, found, model, x, _labels(model, x, y), mu, weights, threat,
        measure, bound,
    )  # fmt: skip


def _claim(value: Any) -> tuple[str, float]:
    """What is bounded, and by what."""
    fields = Fields(value, "claim", ("measure",), ("at_least", "at_most"))
    measure = fields.text("measure")
    if measure not in MEASURES:
        raise unknown("measure", shown(measure), MEASURES)
    side, other = ("at_least", "at_most") if measure == "accuracy" else ("at_most", "at_least")
    if fields.get(side) is None or fields.get(other) is not None:
        raise InputError(f"a claim about {measure} needs {side!r} and nothing else: give that.")
    bound = fields.real(side)
    if not math.isfinite(bound) or (measure == "accuracy" and not 0 <= bound <= 1):
        raise InputError(f"{side} is {bound:g}: give a finite number, for accuracy from 0 to 1.")
    return measure, bound


def _samples(path: Path, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of inputs in float64, labels and weights, from the file itself or from one beside it."""
    if isinstance(value, dict) and "file" in value:
        fields = Fields(value, "samples", ("file",), ("sha256",))
        place = _beside(path, fields.text("file"), "file of samples")
        data = read_small(place, LARGEST, "samples")
        _same(fields.get("sha256"), hashlib.sha256(data).hexdigest(), place)
        rows, y, weights = _tensors(place, data)
    else:
        fields = Fields(value, "samples", ("x", "y"), ("weights",))
        rows, y, weights = _listed(fields)
    if rows.ndim != 2 or not 0 < len(rows) <= MOST_SAMPLES or not rows.shape[1]:
        raise InputError(f"there must be 1 to {MOST_SAMPLES} samples with numbers in each.")
    if y.shape != rows.shape[:1]:
        raise InputError(f"there are {len(rows)} samples and {y.numel()} labels: give one each.")
    if weights is None:
        weights = torch.ones(len(rows), dtype=torch.float64)
    sample_weights(weights, len(rows))
    if not bool(torch.isfinite(rows.float()).all()):
        raise InputError("a sample holds a number that float32 cannot: give finite ones.")
    return rows, y, weights


def _listed(fields: Fields) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples that stand in the file itself."""
    x, y = fields.get("x"), fields.get("y")
    if not isinstance(x, list) or not all(isinstance(row, list) for row in x):
        raise InputError(f"x of samples is {shown(x)}: give a list of rows of numbers.")
    if len({len(row) for row in x}) > 1:
        raise InputError("the rows of x have different lengths: give as many numbers in each.")
    rows = [finite(row, "x of samples") for row in x]
    labels = whole_numbers(y, "y of samples")
    weights = None if fields.get("weights") is None else fields.reals("weights", 0.0)
    return (
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(labels, dtype=torch.int64),
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )


def whole_numbers(value: Any, what: str) -> list[int]:
    """A list of whole numbers that int64 holds."""
    if not isinstance(value, list) or not all(type(k) is int and abs(k) < 2**62 for k in value):
        raise InputError(f"{what} is {shown(value)}: give a list of whole numbers.")
    return value


def _tensors(place: Path, data: bytes) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples of a .safetensors file: x `(N, ...)` in float32, y, weights."""
    try:
        found = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{str(place)!r} is no .safetensors file: {reason_of(error)}; write it again."
        ) from None
    if not {"x", "y"} <= set(found) <= {"x", "y", "weights"}:
        raise InputError(f"{str(place)!r} must hold x, y and perhaps weights, and nothing else.")
    x, y, weights = found["x"], found["y"], found.get("weights")
    if x.dtype != torch.float32 or y.dtype != torch.int64 or x.ndim < 2 or y.ndim != 1:
        raise InputError(f"{str(place)!r} must hold x in float32 (N, ...) and y in int64 (N,).")
    if weights is not None and (weights.dtype != torch.float64 or weights.shape != y.shape):
        raise InputError(f"{str(place)!r} must hold weights in float64 (N,).")
    rows = x.double().reshape(len(x), -1) if x.numel() else x.double().reshape(len(x), 0)
    return rows, y, weights


def _rounded(rows: Tensor, threat: Threat) -> Tensor:
    """Samples in float32, rounded to the nearest, where that leaves the box to the next inside."""
    x = rows.float()
    domain = fitted(threat.domain, x)
    if domain is None:
        return x
    low, high = domain
    over = (rows <= high) & (x.double() > high)
    under = (rows >= low) & (x.double() < low)
    x = torch.where(over, torch.nextafter(x, torch.full_like(x, -math.inf)), x)
    return torch.where(under, torch.nextafter(x, torch.full_like(x, math.inf)), x)


def _threat(value: Any, shape: tuple[int, ...], measure: str) -> Threat:
    """The threat, with a box of two numbers or of two rows."""
    optional = ("domain", "label_cost", "subpopulation")
    fields = Fields(value, "threat", ("norm", "order", "eps"), optional)
    return Threat(
        fields.real("norm"),
        fields.real("order"),
        fields.real("eps"),
        _domain(fields.get("domain", [0.0, 1.0]), shape, measure),
        label_cost=fields.real("label_cost", math.inf),
        subpopulation=fields.real("subpopulation", 1.0),
    )


def _domain(value: Any, shape: tuple[int, ...], measure: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise InputError(f"domain is {shown(value)}: give [low, high], or null for no box.")
    if not any(isinstance(side, list) for side in value):
        return tuple(Fields({"side": side}, "domain", ("side",)).real("side") for side in value)
    if measure != "accuracy":
        raise InputError("a loss needs one box for all inputs: give domain as two numbers.")
    sides = []
    for side in value:
        row = finite(side if isinstance(side, list) else [side] * math.prod(shape), "domain")
        if len(row) != math.prod(shape):
            raise InputError(f"a side of the domain has {len(row)} numbers: give one an input.")
        sides.append(torch.tensor(row, dtype=torch.float64).reshape(shape))
    return tuple(sides)


def _beside(path: Path, name: str, what: str) -> Path:
    """A file in the folder of the property or below."""
    parts = PurePosixPath(name).parts
    bad = not parts or name.startswith("/") or ".." in parts or re.search(r"[\\:\x00-\x1f]", name)
    if bad:
        raise InputError(
            f"{what} is {shown(name)}: name a file in the folder of the property or below it."
        )
    return path.parent.joinpath(*parts)


def _same(stated: Any, found: str, place: Path) -> None:
    if stated is not None and stated != found:
        raise InputError(
            f"{str(place)!r} has another SHA-256 than the property says: give the file it is about."
        )


def _model(network: Path) -> Any:
    if network.suffix != ".onnx":
        raise InputError(f"the network is {network.name!r}: give an .onnx file.")
    return open_model(str(network)).model


def _labels(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    if classes < 2 or int(y.min()) < 0 or int(y.max()) >= classes:
        raise InputError(
            f"the labels are {int(y.min())} to {int(y.max())}, the network has {classes} classes."
        )
    return y
