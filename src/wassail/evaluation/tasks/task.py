"""A task: what to compute for which samples.

What a task returns depends on the model, the data, the settings and the task alone. So tasks may be
done in any order, by any number of workers, again after a crash, and the results are the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from wassail.evaluation.chunks import Tensors
from wassail.evaluation.criterion import kept_labels
from wassail.evaluation.pieces import REASON, UNKNOWN
from wassail.progress import Progress

if TYPE_CHECKING:
    from wassail.evaluation.work import Worker

Result: TypeAlias = "tuple[Tensors, dict[str, Any]]"  # of a chunk: tensors, and plain values
Samples: TypeAlias = "tuple[Tensor, Tensor, list[str]]"  # samples (n, *shape), labels (n,), ids


@dataclass(frozen=True)
class Place:
    """The samples start..stop - 1, and where in the run their results go: folder and chunk.

    hashes: of samples and labels, chunk by chunk, as the run was begun with; none where they were
    compared already.
    """

    key: str
    chunk: int
    start: int
    stop: int
    hashes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Task(ABC):
    """One piece of work."""

    place: Place
    # Whether its samples travel with it to a worker, even to one that could read them.
    sent: ClassVar[bool] = False

    @abstractmethod
    def run(self, worker: Worker, tick: Progress) -> Result:
        """Do it; `tick` is given the share done."""

    @abstractmethod
    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """The result where it cannot be done: true of any samples, with their names and the reason.

        Distances are inf, radii 0, and the predictions are the labels: each errs on the side of its
        bound.

        mu: their weights `(n,)`; reason: why nothing is known.
        """

    @property
    def divisible(self) -> bool:
        """Whether it is the sum of its parts."""
        return len(self.place) > 1

    def cut(self, start: int, stop: int) -> Self:
        """The part for the samples start..stop - 1. They have to be compared already: hashes are of
        whole chunks.

        stop: the one after the last.
        """
        return replace(self, place=replace(self.place, start=start, stop=stop, hashes=()))


def unknown(ids: Sequence[str], reason: str) -> dict[str, Any]:
    """The fields that say of which samples nothing is known, and why.

    ids: names of the samples.
    """
    return {UNKNOWN: list(ids), REASON: reason}


def no_flips(x: Tensor, y: Tensor) -> Tensors:
    """What a chunk holds where no flip is known.

    x: samples `(n, *shape)`; y: labels `(n,)`, or rows of a criterion.
    """
    y = kept_labels(y)["y"]
    zeros = torch.zeros(len(y), dtype=torch.int64)
    return {
        "distances": torch.full((len(y),), math.inf, dtype=torch.float64),
        "labels": y.clone(),
        "forwards": zeros,
        "backwards": zeros.clone(),
        "checks": zeros.clone(),
        "index": torch.zeros(0, dtype=torch.int64),
        "points": x[:0].clone(),
    }
