"""A box of its own for each sample of a run (THEORY 13).

The threats of such a run have one box that holds all of them. Searches and proofs stay in the box
of the sample, and a run keeps the boxes in a folder of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wassail.attacks.catalogue import find
from wassail.errors import InputError
from wassail.evaluation.plan import data_hash
from wassail.evaluation.store.store import Store
from wassail.network import Model
from wassail.threat import Boxes, Domain, Threat, boxes_of
from wassail.zoo.features import own_boxes
from wassail.zoo.samples import Data

BOXES = "boxes"  # folder of a run, and what its configuration calls their digest
ONE_BOX = ("cw", "a3", "w_pgd")  # homes of attacks that have one box for all samples


def one_box(attack: str) -> bool:
    """Whether an attack has one box for all features of all samples."""
    return find(attack).home.split(":")[0] in ONE_BOX


def inside(model: Model, boxes: Boxes | None, domain: Domain, rows: Tensor, x: Tensor) -> Domain:
    """Where some samples may move: in boxes of their own, with features frozen that may not move,
    or in the one box of all.

    model: perhaps with features that may not move; boxes: of all samples, or None; rows: places of
    the samples.
    """
    if boxes is None:
        return own_boxes(model, x, domain)
    return boxes.take(rows)  # type: ignore[return-value]


def with_hull(threats: Sequence[Threat], data: Data) -> tuple[tuple[Threat, ...], Boxes | None]:
    """Threats with the one box that holds the boxes of all samples, and those; None for others.

    data: whose samples they are for.
    """
    boxes = boxes_of(threats[0].domain)
    if boxes is None or boxes.low.ndim != 1 + len(data.shape):
        return tuple(threats), None
    shape = (len(data), *data.shape)
    if boxes.scale is not None or tuple(boxes.low.shape) != shape:
        raise InputError(
            f"the boxes have shape {tuple(boxes.low.shape)} and the samples {shape}: give low and "
            "high of the shape of the samples, without a scale."
        )
    ends = (float(boxes.low.min()), float(boxes.high.max())) if len(data) else (0.0, 1.0)
    return tuple(replace(threat, domain=ends) for threat in threats), boxes


def check_attacks(attacks: Mapping[str, Any], boxes: Boxes | None) -> None:
    """Refuse attacks that cannot stay in the boxes of samples.

    boxes: of the samples, or None.
    """
    lacking = [name for name in attacks if boxes is not None and one_box(name)]
    if lacking:
        raise InputError(
            f"the attack {lacking[0]!r} has one box for all samples, and these have their own: "
            "leave it out."
        )


def boxes_digest(boxes: Boxes) -> str:
    """What tells boxes from others."""
    return data_hash(boxes.low, boxes.high)


def read_boxes(store: Store, chunks: Sequence[int], shape: tuple[int, ...]) -> Boxes | None:
    """The boxes that a run keeps, or None; none that its configuration does not name.

    shape: of all samples, `(N, *shape)`.
    """
    stated = store.config.get(BOXES)
    if stated is None:
        return None
    parts = [store.get(BOXES, chunk, ("low", "high"))[0] for chunk in chunks]
    low, high = (
        torch.cat([torch.zeros(0, *shape[1:]).double(), *(part[side] for part in parts)])
        for side in ("low", "high")
    )
    found = Boxes(low, high)
    if tuple(low.shape) != shape or low.shape != high.shape or boxes_digest(found) != stated:
        raise ValueError("boxes of other samples")
    if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
        raise ValueError("boxes that are empty")
    return found
