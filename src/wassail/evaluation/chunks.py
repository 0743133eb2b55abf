"""What one chunk of a run holds, and how: tensors for the samples of the chunk, points only where
there is a flip.

Images that are multiples of 1/255, as nearly all are, are kept as bytes: a quarter of the space,
and the same floats when read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.attacks.catalogue import Entry
from wassail.errors import ModelWarning
from wassail.network import Model
from wassail.specification import Labels
from wassail.threat import Domain
from wassail.transport.distribution import Distribution
from wassail.transport.flips import Flips

Tensors: TypeAlias = "dict[str, Tensor]"
LEVELS = 255
# Folders of a run beside those of its attacks, radii and pools.
CLEAN = "clean"
TRANSFER = "transfer"
CHECKS = "checks"
CONVERGENCE = "convergence"


def pack(x: Tensor) -> Tensor:
    """Samples as they are stored: uint8 if that loses nothing, else as they are."""
    if x.dtype != torch.float32 or not x.numel() or not (x.min() >= 0 and x.max() <= 1):
        return x.contiguous()
    levels = (x * LEVELS).round()
    return (
        levels.to(torch.uint8).contiguous() if torch.equal(levels / LEVELS, x) else x.contiguous()
    )


def unpack(stored: Tensor) -> Tensor:
    """What `pack` was given."""
    return stored.float() / LEVELS if stored.dtype == torch.uint8 else stored


def flips_chunk(flips: Flips) -> Tensors:
    """The flips of one chunk: per-sample numbers `(n,)`, the rows that have a flip `(m,)`, and
    their points `(m, *shape)`.
    """
    index = (flips.success & (flips.distances > 0)).nonzero()[:, 0]
    numbers = {
        name: getattr(flips, name).cpu()
        for name in ("distances", "labels", "forwards", "backwards", "checks")
    }
    return {
        **numbers,
        "index": index,
        "points": flips.points[index.to(flips.points.device)].cpu().contiguous(),
    }


def spread(part: Tensors, chosen: Tensor, y: Tensor, predicted: Tensor) -> Tensors:
    """The flips of some samples of a chunk as flips of the chunk: the others have none.

    Args:
        part: flips of the chosen samples, as `flips_chunk` gives them.
        chosen: bool `(n,)`.
        y: labels `(n,)`.
        predicted: classes predicted at the samples `(n,)`; those that are wrong have distance 0.
    """
    rows = chosen.nonzero()[:, 0]
    wrong = predicted != y
    full = {
        "distances": torch.where(wrong, 0.0, math.inf).double(),
        "labels": torch.where(wrong, predicted, y),
    }
    for name in ("forwards", "backwards", "checks"):
        full[name] = torch.zeros(len(y), dtype=torch.int64)
    for name, values in full.items():
        values[rows] = part[name]
    return {**full, "index": rows[part["index"]], "points": part["points"]}


def take(tensors: Tensors, start: int, stop: int) -> Tensors:
    """The samples start..stop - 1 of a chunk's tensors, as a chunk of their own."""
    inside = (tensors["index"] >= start) & (tensors["index"] < stop)
    return {
        name: value[inside] - (start if name == "index" else 0)
        if name in ("index", "points")
        else value[start:stop]
        for name, value in tensors.items()
    }


def moved(x: Tensor, tensors: Tensors) -> Tensor:
    """The samples of a chunk with the known flips in their place, `(n, *shape)`."""
    return x.index_copy(0, tensors["index"], tensors["points"].to(x.dtype))


def judged(
    model: Model,
    x: Tensor,
    y: Labels,
    points: Tensor,
    norm: float,
    domain: Domain,
    batch_size: int | None = None,
) -> Flips:
    """Points as flips, judged as they are: wherever a stored flip is looked at again.

    Args:
        model: callable from a batch to outputs.
        x: samples `(n, *shape)`.
        y: what is right for them.
        points: one for each sample.
        norm: ground norm.
        domain: where the points may be.
        batch_size: most samples in one call of the model.
    """
    with warnings.catch_warnings():
        # What a warning would say of points outside their boxes is left to `holds`.
        warnings.simplefilter("ignore", ModelWarning)
        return Flips.from_points(
            model, x, y, points, norm, domain, pull_in=False, batch_size=batch_size
        )


def holds(found: Flips, points: Tensor, stated: Tensor) -> Tensor:
    """Which points are the flips that they are called, bool `(n,)`: wrong, where they may be, as
    near as is stated.

    Args:
        found: of the points, as `judged` gives them.
        points: as they are stored; one outside its box was moved into it before it was judged.
        stated: distances.
    """
    same = (found.points.to(points) == points).flatten(1).all(1).cpu()
    return found.success & (found.distances == stated) & same


def nearest_of(parts: Sequence[Tensors], start: int) -> Tensors:
    """The nearest flip of each sample over several results for one chunk: rows `(m,)`, points.

    parts: as `flips_chunk` gives them; start: the row of the chunk's first sample.
    """
    found_by = torch.stack([part["distances"] for part in parts]).argmin(0)
    mine = [found_by[part["index"]] == k for k, part in enumerate(parts)]
    return {
        "index": start + torch.cat([part["index"][own] for part, own in zip(parts, mine)]),
        "points": torch.cat([part["points"][own] for part, own in zip(parts, mine)]),
    }


def share_of(weights: Tensor, allocation: str) -> float | None:
    """The share of every sample that an attack moves, None where the budget is allocated among
    the samples at the end.
    """
    if allocation == "knapsack":
        return None
    return float(weights[0]) if len(weights) else math.nan


def title_of(entry: Entry, found: Distribution) -> str:
    """What the row of an attack is called, with the share of each sample where it is an option."""
    kappa = found.info.get("options", {}).get("kappa")
    return entry.title if kappa is None else f"{entry.title}, kappa {kappa:g}"


def plain(value: Any) -> Any:
    """A value that JSON can hold, tuples as lists: what chunks say about themselves."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
