"""The pieces of a task that was cut, joined again: the results in the order of the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.evaluation.chunks import pack, unpack
from wassail.evaluation.criterion import stored_labels
from wassail.evaluation.plan import data_hash

if TYPE_CHECKING:
    from wassail.evaluation.tasks.task import Place, Result, Samples, Task

# fields of a chunk: ids of the samples that nothing is known about, and why
UNKNOWN = "unknown"
REASON = "reason"
PIECES = "pieces"  # field of a chunk that was computed in pieces: their sizes


@dataclass(eq=False)
class Whole:
    """A task that was cut, with its samples, and the results of its pieces as they come.

    left: pieces that are to come; parts: those that came, with their results.
    """

    task: Task
    samples: Samples
    left: int = 1
    seconds: float = 0.0
    parts: list[tuple[Task, Result]] = field(default_factory=list)

    def samples_of(self, place: Place) -> Samples:
        """The samples of a piece."""
        first = self.task.place.start
        mine = slice(place.start - first, place.stop - first)
        x, y, ids = self.samples
        return x[mine].clone(), y[mine].clone(), ids[mine]


def join(parts: Sequence[tuple[Task, Result]]) -> Result:
    """The results of the pieces of one task as the result of the task."""
    parts = sorted(parts, key=lambda part: part[0].place.start)
    base = parts[0][0].place.start
    tensors = {
        name: _joined(name, [(task.place.start - base, found[name]) for task, (found, _) in parts])
        for name in parts[0][1][0]
    }
    fields = _fields([fields for _, (_, fields) in parts])
    if "sha256" in fields:
        fields["sha256"] = data_hash(unpack(tensors["x"]), stored_labels(tensors))
    return tensors, fields | {PIECES: [len(task.place) for task, _ in parts]}


def _joined(name: str, parts: list[tuple[int, Tensor]]) -> Tensor:
    values = [value for _, value in parts]
    if name == "index":  # places in the chunk
        return torch.cat([value + offset for offset, value in parts])
    if name == "x":  # a piece may be 8-bit and another not
        return pack(torch.cat([unpack(value) for value in values]))
    if name == "logits":  # of samples that killed their worker there are none
        width = max(value.shape[1] for value in values)
        values = [
            value if value.shape[1] else value.new_full((len(value), width), math.nan)
            for value in values
        ]
    return torch.cat(values)


def _fields(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists one after the other, warnings and methods once each; of the rest, which is the same
    in every piece, the first.
    """
    merged: dict[str, Any] = {}
    for fields in parts:
        for name, value in fields.items():
            if name in ("ids", UNKNOWN):
                merged[name] = merged.get(name, []) + value
            elif name == "warnings":
                merged[name] = sorted({*merged.get(name, []), *value})
            elif name == "lost":
                merged[name] = merged.get(name, 0) + value
            elif name == "cut":  # if any of them was
                merged[name] = bool(merged.get(name)) or value
            else:
                merged.setdefault(name, value)
    if "method" in merged:
        methods = {str(fields["method"]) for fields in parts if UNKNOWN not in fields}
        merged["method"] = " and ".join(sorted(methods)) or merged["method"]
    return merged
