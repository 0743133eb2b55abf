"""Samples that are no pictures: which features change on the way to a flip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SHOWN = 5  # features of one sample, those that change most


def changes(about: Mapping[str, Any], sample: Tensor, flip: Tensor) -> list[tuple[str, str, str]]:
    """Feature, before and after for the features that change most, in original units.

    about: what a run records of its data: `features`, perhaps `low` and `scale`; sample: `(F,)`, as
    the model gets it; flip: `(F,)`.
    """
    names = about.get("features")
    size = sample.numel()
    if sample.ndim != 1 or not isinstance(names, Sequence) or len(names) != size:
        return []
    low = _numbers(about.get("low"), size, 0.0)
    scale = _numbers(about.get("scale"), size, 1.0)
    before = low + scale * sample.double()
    after = low + scale * flip.double()
    step = (flip.double() - sample.double()).abs()
    order = step.sort(descending=True, stable=True).indices[:SHOWN].tolist()
    return [
        (str(names[i]), f"{float(before[i]):.4g}", f"{float(after[i]):.4g}")
        for i in order
        if float(step[i]) > 0
    ]


def feature_ranges(about: Mapping[str, Any], sample: Tensor) -> Tensor | None:
    """The range of each feature as the model gets it, `(F,)`, to draw all of them on one scale;
    None where they have no boxes of their own.

    about: what a run records of its data: `low`, `high` and `scale`; sample: `(F,)`.
    """
    kept = [about.get(key) for key in ("low", "high", "scale")]
    if sample.ndim != 1 or not all(isinstance(part, list) for part in kept):
        return None
    low, high, scale = (_numbers(part, sample.numel(), 1.0) for part in kept)
    found = ((high - low) / scale).to(sample.dtype)
    return torch.where(torch.isfinite(found) & (found > 0), found, 1.0)


def _numbers(given: Any, size: int, default: float) -> Tensor:
    """Numbers of a run, one for each feature; the default where they are not that."""
    plain = isinstance(given, Sequence) and len(given) == size
    if plain and all(isinstance(v, (int, float)) and math.isfinite(v) for v in given):
        return torch.tensor(given, dtype=torch.float64)
    return torch.full((size,), default, dtype=torch.float64)
