"""A model from anywhere: one name in, one eval-mode classifier out that takes samples in the box
and returns logits.

>>> from wassail.zoo.models import open_model
>>> source = open_model("digits-cnn-adv")
>>> source.kind
'builtin'

Names are those of the command line: a built-in name, an `.onnx` or `.pt2` file, `module:factory` or
`module:factory(word)`, `robustbench:NAME`, `timm:NAME`, `hf:NAME`. Normalisation belongs inside the
model, so that every budget is in units of the samples: `mean` and `std` put it there. No file that
is opened here can run code, but a `.pt2` file that is trusted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from wassail.errors import InputError, ModelWarning, unknown
from wassail.network import Model
from wassail.zoo import MODELS, factory, load, weight_file
from wassail.zoo.difference import CLOSE, FAR, runtime_difference
from wassail.zoo.features import OneLogit
from wassail.zoo.hubs import (
    files_of,
    library_versions,
    no_weights,
    open_huggingface,
    open_robustbench,
    open_timm,
)
from wassail.zoo.source import Logits, Normalized, Source
from wassail.zoo.weights import fill, fingerprint, regular, sha256

__all__ = ["KINDS", "Logits", "Normalized", "Source", "open_model"]
KINDS = ("builtin", "factory", "pt2", "onnx", "robustbench", "timm", "huggingface", "module")
_PREFIXES = ("robustbench", "timm", "hf", "huggingface")


def open_model(
    name: str,
    *,
    weights: str | Path | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    logits: str | int | None = None,
    models: str | Path = "models",
    dataset: str = "cifar10",
    threat: str = "Linf",
    trust: bool = False,
    one_logit: bool = False,
) -> Source:
    """The model of that name, in eval mode.

    name: see the top of this page. weights: a `.safetensors` or `.pt` state dict for a built-in
    network, a factory or a timm model. mean, std: normalisation `(x - mean) / std` to put inside;
    for timm and Hugging Face models in place of their own. logits: the key, attribute or place of
    the logits in what the model returns, if that is not a tensor (Hugging Face models need none).
    models, dataset, threat: RobustBench's folder, data set and threat model, as its `load_model`
    takes them: checkpoints are looked for at `<models>/<dataset>/<threat>/<NAME>.pt`. trust:
    whether the file is your own: a `.pt2` file is read only then, because that runs code out of it,
    and an `.onnx` file goes without a first pass in a process of its own (see `wassail.zoo.trial`).
    one_logit: the model has one output, positive for class 1: it becomes a classifier of two
    classes.
    """
    if isinstance(logits, str) and logits.isdigit():  # as a command line has it
        logits = int(logits)
    model: Model
    prefix, _, rest = name.partition(":")
    if prefix in _PREFIXES and rest:
        if prefix == "robustbench":
            no_weights(name, weights)
            model, kind, info = open_robustbench(name, rest, Path(models), dataset, threat)
        elif prefix == "timm":
            model, kind, info, mean, std = open_timm(name, rest, weights, mean, std)
        else:
            no_weights(name, weights)
            model, kind, info, mean, std = open_huggingface(name, rest, mean, std)
            logits = "logits" if logits is None else logits
    elif name.endswith((".onnx", ".pt2")):
        no_weights(name, weights)
        model, kind, info = _onnx(name, trust) if name.endswith(".onnx") else _exported(name, trust)
    elif name in MODELS or not factory.is_call(name):
        model, kind, info = _builtin(name, weights)
    else:
        model, kind, info = _factory(name, weights)
    if logits is not None:
        model, info["logits"] = Logits(model, logits), logits
    if one_logit:
        model, info["one_logit"] = OneLogit(model), True
    if mean is not None or std is not None:
        mean = 0.0 if mean is None else mean
        std = 1.0 if std is None else std
        model = Normalized(model, mean, std)
        info["mean"], info["std"] = (
            float(s) if isinstance(s, (int, float)) else [float(v) for v in s] for s in (mean, std)
        )
    if isinstance(model, nn.Module):
        model = model.eval().requires_grad_(False)
    return Source(model, name, kind, {**info, "weights": fingerprint(model)})


def _builtin(name: str, weights: str | Path | None) -> tuple[nn.Module, str, dict[str, Any]]:
    if name not in MODELS:
        if name.endswith((".pt", ".pth", ".safetensors", ".bin", ".ckpt")):
            raise InputError(
                f"{name!r} holds weights but no architecture: give the network as module:factory "
                f"and add --weights {name}."
            )
        raise unknown(
            "model",
            name,
            [*MODELS, "module:factory", *(f"{p}:NAME" for p in _PREFIXES[:3]), "*.onnx", "*.pt2"],
        )
    model = load(name)
    if weights is not None:
        fill(model, weights, name)
    return model, "builtin", files_of(weight_file(name) if weights is None else weights)


def _factory(name: str, weights: str | Path | None) -> tuple[Model, str, dict[str, Any]]:
    made = factory.call(name, "model")
    model = made.value[0] if isinstance(made.value, tuple) and made.value else made.value
    if not callable(model):
        raise InputError(
            f"{name!r} returned a {type(made.value).__name__}: it must return the model, or a "
            "tuple that starts with it."
        )
    if weights is not None:
        fill(model, weights, name)
    return model, "factory", files_of(*(path for path in (made.file, weights) if path is not None))


def _exported(name: str, trust: bool) -> tuple[nn.Module, str, dict[str, Any]]:
    from wassail.zoo.exported import load_exported

    regular(name, "a model")
    if not trust:
        raise InputError(
            f"{name!r} is read by torch.export.load, which runs code out of its file: add --trust "
            "(trust=True) if the file is your own, or export the model to ONNX, which runs none."
        )
    model = load_exported(name)
    return model, "pt2", {**files_of(name), "batch": model.batch or "any"}


def _onnx(name: str, trust: bool) -> tuple[nn.Module, str, dict[str, Any]]:
    from wassail.zoo.onnx import load_onnx

    found = _tried(name, trust)
    model = load_onnx(name)
    if trust:
        found = runtime_difference(name, model)
    return (
        model,
        "onnx",
        {**files_of(name), "versions": library_versions("onnx"), "check": _verdict(name, found)},
    )


def _tried(name: str, trust: bool) -> Mapping[str, Any]:
    """What a first pass over the file in a process of its own found; nothing where the file is
    trusted.
    """
    regular(name, "a model")
    if trust:
        return {}
    from wassail.zoo.trial import attempt

    return attempt(name, sha256(name))


def _verdict(name: str, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is recorded about the comparison; a model that is misread is refused."""
    known = {key: str(found[key]) for key in ("onnxruntime", "result") if key in found}
    if "difference" not in found:
        return known
    difference = float(found["difference"])
    if not difference <= FAR:
        raise InputError(
            f"{name!r} gives logits that differ from onnxruntime's by {difference:.1e} of the "
            "largest: "
            "this loader misreads the file, so export the model with other operators and report it."
        )
    if difference > CLOSE:
        warnings.warn(
            f"{name!r} gives logits that differ from onnxruntime's by {difference:.1e} of the "
            "largest.",
            ModelWarning,
            stacklevel=2,
        )
    return {**known, "agrees_within": CLOSE if difference <= CLOSE else FAR}
