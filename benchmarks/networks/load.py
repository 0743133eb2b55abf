"""Networks as modules that take inputs in [0, 1] and scale them inside; data as tensors."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import wassail as ws
from benchmarks.networks.architectures import Normalise, build
from benchmarks.networks.files import entry_of, path_of


def load(name: str) -> nn.Module:
    """A network in evaluation mode; built-in ones (digits-...) by their name."""
    if name.startswith("digits"):
        return ws.zoo.load(name)
    entry = entry_of(name)
    path = path_of(name)
    if entry.kind == "onnx":
        scaling = (list(entry.mean), list(entry.std)) if entry.mean else ()
        return ws.zoo.load_onnx(path, *scaling)
    network = build(entry.architecture)
    missing, unexpected = network.load_state_dict(load_file(path), strict=False)
    wrong = [key for key in missing if not key.endswith("num_batches_tracked")]
    if wrong or unexpected:
        raise ValueError(f"{name}: the weights do not fit: {wrong} missing, {unexpected} left over")
    scaled = nn.Sequential(Normalise(entry.mean, entry.std), network) if entry.mean else network
    return scaled.eval()


def images(name: str, count: int | None = None, first: int = 0) -> tuple[Tensor, Tensor]:
    """Test images of a data set in their order: values in [0, 1], NCHW, and labels."""
    last = None if count is None else first + count
    if name == "digits":
        x, y = ws.zoo.data("digits")
        return x[first:last], y[first:last]
    arrays = np.load(path_of(name), allow_pickle=False)
    x = torch.from_numpy(arrays["images"][first:last]).float() / 255
    x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
    return x, torch.from_numpy(arrays["labels"][first:last].astype(np.int64))


def data_of(name: str) -> str:
    """The data set of a network."""
    return "digits" if name.startswith("digits") else entry_of(name).data


def layers(name: str) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of a small network in float64, ReLU between them."""
    arrays = np.load(path_of(name), allow_pickle=False)
    return [
        (torch.tensor(arrays[f"W{i}"]), torch.tensor(arrays[f"b{i}"]))
        for i in range(len(arrays) // 2)
    ]
