"""The nearest flip of each sample over all attacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from wassail.evaluation.chunks import Tensors, moved, take
from wassail.evaluation.criterion import kept_labels, predicted
from wassail.evaluation.tasks.task import Result, Samples, Task, unknown
from wassail.geometry import distances as distances_between
from wassail.progress import Progress
from wassail.specification import Labels, labels_at, labels_of
from wassail.threat import box_at, boxes_of

if TYPE_CHECKING:
    from wassail.evaluation.work import Worker


@dataclass(frozen=True)
class Pool(Task):
    """The nearest flip of each sample over all attacks, as they were stored, looked at once more.

    A flip that is not wrong any more, not in the box or not as near as it says gives way to the
    next nearest. parts: the flips of each attack, as `flips_chunk` gives them.
    """

    parts: list[Tensors]

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        parts = self.parts
        x, y = worker.samples(self.place)
        known, labels = self._stacked("distances"), self._stacked("labels")
        found_by = known.argmin(0)
        rows = torch.arange(len(x))
        refuted = torch.zeros_like(known, dtype=torch.bool)
        while len(rows):
            points = x[rows]
            for k, part in enumerate(parts):
                mine = found_by[rows] == k
                points[mine] = moved(x, part)[rows[mine]]
            right = labels_at(y, rows)
            stated = known[found_by[rows], rows]
            holds = _holds(worker, x[rows], right, points, stated)
            bad = rows[~(holds & self._inside(worker, x, rows, points, stated))]
            known[found_by[bad], bad], refuted[found_by[bad], bad] = math.inf, True
            found_by[bad] = known[:, bad].argmin(0)
            rows = bad
        every = torch.arange(len(x))
        tensors = {
            "distances": known[found_by, every],
            "labels": labels[found_by, every],
            "found_by": found_by,
        }
        return {**tensors, "refuted": refuted.T.contiguous()}, {"lost": int(refuted.sum())}

    def _inside(
        self, worker: Worker, x: Tensor, rows: Tensor, points: Tensor, stated: Tensor
    ) -> Tensor:
        """Which points are in the boxes of their samples, where these have some, bool `(n,)`."""
        if worker.settings.boxes is None:
            return torch.ones(len(rows), dtype=torch.bool)
        own = boxes_of(box_at(worker.box(self.place, x), rows))
        assert own is not None
        wide = points.cpu().double()
        inside = ((wide >= own.low) & (wide <= own.high)).flatten(1).all(1)
        return inside | ~torch.isfinite(stated) | (stated == 0)

    def cut(self, start: int, stop: int) -> Self:
        """See `Task`."""
        first = self.place.start
        parts = [
            {name: value.clone() for name, value in take(part, start - first, stop - first).items()}
            for part in self.parts
        ]
        return replace(super().cut(start, stop), parts=parts)

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """A sample that is wrong as it is stays so; no flip beyond it was looked at again."""
        _, rows, ids = samples
        y = kept_labels(rows)["y"]
        known = self._stacked("distances")
        nearest, found_by = known.min(0)
        labels = self._stacked("labels")[found_by, torch.arange(len(y))]
        tensors = {
            "distances": torch.where(nearest == 0, 0.0, math.inf).double(),
            "labels": torch.where(nearest == 0, labels, y),
            "found_by": found_by,
            "refuted": ((known > 0) & torch.isfinite(known)).T.contiguous(),
        }
        return tensors, {"lost": 0, **unknown(ids, reason)}

    def _stacked(self, name: str) -> Tensor:
        return torch.stack([part[name] for part in self.parts])


def _holds(worker: Worker, x: Tensor, y: Labels, points: Tensor, stated: Tensor) -> Tensor:
    """Which points are what a flip claims to be, bool `(n,)`; nothing is claimed at distance 0 and
    inf.
    """
    settings = worker.settings
    holds = predicted(worker.logits(points), y) != labels_of(y)
    holds &= distances_between(points, x, settings.norm) == stated
    if settings.domain is not None:
        low, high = settings.domain
        holds &= ((points >= low) & (points <= high)).flatten(1).all(1)
    return holds | ~torch.isfinite(stated) | (stated == 0)
