"""Models and data from anywhere, and a few built in, so that everything can be tried without
downloads or training.

>>> from wassail import zoo
>>> model = zoo.load("digits-cnn-adv")
>>> x, y = zoo.data("digits")

`open_model` and `open_data` take every name that the command line takes; see
`docs/reference/models-and-data.md`.
Torch is imported by what needs it only: listing the models needs none of it. Where the built-in
data come from, how they were split and how the networks were trained is written in ``DIGITS.md``
next to this file.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.errors import unknown

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wassail.zoo.datasets import open_data
    from wassail.zoo.models import open_model
    from wassail.zoo.samples import Data
    from wassail.zoo.source import Logits, Normalized, Source
    from wassail.zoo.weights import fingerprint

__all__ = [
    "DATASETS",
    "MODELS",
    "SPLITS",
    "Data",
    "Entry",
    "Logits",
    "Normalized",
    "Source",
    "builtin",
    "data",
    "fingerprint",
    "load",
    "load_onnx",
    "open_data",
    "open_model",
]

_HOME = {
    **dict.fromkeys(("Logits", "Normalized", "Source", "open_model"), "models"),
    **dict.fromkeys(("Data", "open_data"), "datasets"),
    "fingerprint": "weights",
}

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """One built-in network: which architecture it is, and what was done to train it."""

    architecture: str  # a key of wassail.zoo.digits.ARCHITECTURES
    training: str  # "standard", "adversarial", "certified" or "noise"
    summary: str


_SUMMARIES = {
    "mlp": "ReLU perceptron 64-32-32-10",
    "cnn": "ReLU network of two convolutions and two linear layers",
    "gelu": "GELU perceptron 64-32-32-10",
    "vit": "Pre-LN vision transformer, 16 tokens of width 32, two blocks of two heads",
}
MODELS: dict[str, Entry] = {
    f"digits-{architecture}{suffix}": Entry(architecture, training, summary)
    for architecture, summary in _SUMMARIES.items()
    for suffix, training in (("", "standard"), ("-adv", "adversarial"))
} | {
    "digits-cnn-cert": Entry("cnn", "certified", _SUMMARIES["cnn"]),
    "digits-cnn-noise": Entry("cnn", "noise", _SUMMARIES["cnn"]),
}
"""The built-in networks by name; the measured figures of each are kept in the header of its
weight file.
"""

DATASETS = ("digits",)
SPLITS = ("train", "test")


def builtin() -> dict[str, str]:
    """Names of the built-in networks, each with one line that says what it is and how accurate
    it was measured.
    """
    return {name: _describe(name, entry) for name, entry in MODELS.items()}


def load(name: str) -> nn.Module:
    """The built-in network of that name in eval mode: images (N, 1, 8, 8) in [0, 1] -> logits
    (N, 10).
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    from safetensors.torch import load_file

    from wassail.zoo.digits import ARCHITECTURES

    model = ARCHITECTURES[MODELS[name].architecture]()
    model.load_state_dict(load_file(weight_file(name)))
    return model.eval()


def data(name: str = "digits", split: str = "test") -> tuple[Tensor, Tensor]:
    """Images, float32 (N, 1, 8, 8) in [0, 1], and labels, int64 (N,): N = 500 for "test", 1297
    for "train".
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    import numpy as np
    import torch

    with np.load(data_file(name)) as arrays:
        images = arrays[f"{split}_images"]
        labels = arrays[f"{split}_labels"]
    # Pixels count the inked cells of a 4x4 grid, 0..16, so sixteenths are exact in float32.
    return torch.from_numpy(images).float().div(16).unsqueeze(1), torch.from_numpy(labels).long()


def load_onnx(path: str | Path, mean: Any = None, std: Any = None) -> nn.Module:
    """The classifier in an ONNX file, normalisation `(x - mean) / std` inside; see
    `wassail.zoo.onnx.load_onnx`.
    """
    from wassail.zoo.onnx import load_onnx as read

    return read(path, mean, std)


def data_file(name: str) -> Path:
    """Where built-in data are."""
    return _HERE / f"{name}.npz"


def weight_file(name: str) -> Path:
    """Where the weights of a built-in network are."""
    return _HERE / "weights" / f"{name}.safetensors"


def _figures(name: str) -> dict[str, Any]:
    """What scripts/train_digits.py measured, from the header of the weight file (reads no
    tensor).
    """
    from safetensors import safe_open

    with safe_open(weight_file(name), framework="numpy") as file:
        figures: dict[str, Any] = json.loads(file.metadata()["wassail"])
    return figures


def _describe(name: str, entry: Entry) -> str:
    figures = _figures(name)
    training = {
        "standard": "standard training",
        "adversarial": f"adversarial training (linf {figures['train_eps']:g})",
        "certified": f"certified training (linf, order 1, {figures['train_eps']:g})",
        "noise": f"training with Gaussian noise of {figures['train_eps']:g}",
    }[entry.training]
    accuracies = f"{figures['clean_accuracy']:.1f} % clean, {figures['pgd_accuracy']:.1f} % PGD"
    return f"{entry.summary}, {training}; test accuracy {accuracies} at linf {figures['pgd_eps']:g}"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"wassail.zoo.{_HOME[name]}"), name)
    raise AttributeError(f"module 'wassail.zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
