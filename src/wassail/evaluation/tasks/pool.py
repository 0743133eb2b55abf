"""The nearest flip of each sample over all attacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from wassail.evaluation.chunks import Tensors, holds, judged, moved, take
from wassail.evaluation.criterion import kept_labels
from wassail.evaluation.tasks.task import Result, Samples, Task, unknown
from wassail.progress import Progress
from wassail.specification import labels_at
from wassail.threat import box_at

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
        parts, settings = self.parts, worker.settings
        x, y = worker.samples(self.place)
        inside = worker.box(self.place, x)
        known, labels = self._stacked("distances"), self._stacked("labels")
        found_by = known.argmin(0)
        rows = torch.arange(len(x))
        refuted = torch.zeros_like(known, dtype=torch.bool)
        while len(rows):
            points = x[rows]
            for k, part in enumerate(parts):
                mine = found_by[rows] == k
                points[mine] = moved(x, part)[rows[mine]]
            stated = known[found_by[rows], rows]
            found = judged(
                worker.model,
                x[rows],
                labels_at(y, rows),
                points,
                settings.norm,
                box_at(inside, rows),
                settings.batch_size,
            )
            # Nothing is claimed at distance 0 and inf.
            bad = rows[~(holds(found, points, stated) | (stated == 0) | torch.isinf(stated))]
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
