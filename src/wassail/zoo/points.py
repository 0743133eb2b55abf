"""Adversarial examples in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.zoo.files import read_array
from wassail.zoo.weights import load_tensors, plain_tensors, refuse_html, unread

NAMES = ("adv_complete", "x_adv", "points", "x")  # of points among other tensors


def read_points(path: str | Path) -> Tensor:
    """The points in a `.pt`, `.safetensors` or `.npz` file: one tensor, or the first of a pair or
    dict.

    path: as AutoAttack and RobustBench save adversarial examples, or foolbox's users.
    """
    path = Path(path)
    refuse_html(path, "points")
    try:
        found = _content(path)
    except InputError:
        raise
    except Exception as error:  # whatever a broken file makes the restricted unpickler raise
        raise InputError(
            f"cannot read points from {str(path)!r}: {unread(error)}; save one tensor of shape "
            "(N, ...) with torch.save, or one array with numpy.savez."
        ) from None
    if isinstance(found, Mapping):
        names = [name for name in NAMES if name in found] or list(found)
        found = found[names[0]] if names else None
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise InputError(
            f"{str(path)!r} holds no points: save one float tensor of shape (N, ...) with "
            "torch.save, in the order of the samples."
        )
    try:
        plain_tensors({"points": found})
    except ValueError as error:
        raise InputError(
            f"cannot read points from {str(path)!r}: {error}; save one tensor with torch.save."
        ) from None
    return found.detach()


def _content(path: Path) -> Any:
    """What is in the file, as its suffix says."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".npz":
        array = np.array(read_array(path, NAMES))  # a copy in memory: the file may change
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    return load_tensors(path)
