"""Predictions on the samples as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail.checks import check_task
from wassail.errors import InputError
from wassail.evaluation.chunks import pack
from wassail.evaluation.criterion import kept_labels, predicted, right_of
from wassail.evaluation.plan import data_hash
from wassail.evaluation.tasks.task import Result, Samples, Task, unknown
from wassail.network import check_model
from wassail.progress import Progress

if TYPE_CHECKING:
    from wassail.evaluation.work import Worker


@dataclass(frozen=True)
class Clean(Task):
    """Predictions, kept with the samples, so that the run can be read without the data."""

    sent = True  # the run is about the samples as they are where it was started

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        place = self.place
        data = worker.data
        try:
            x, rows = data.read(place.start, place.stop)
            right = right_of(worker.settings.criterion, rows)
            own = worker.settings.boxes is not None
            domain = worker.box(place, x) if own else worker.settings.domain
            x, y = check_task(x, right, domain)
            check_model(worker.model, x, y)
        except InputError as error:
            where = f"samples {place.start} to {place.stop - 1} of {data.name!r}"
            raise error.within(where) from None
        z = worker.logits(x)
        if not torch.isfinite(z).all():
            bad = place.start + int((~torch.isfinite(z)).any(1).nonzero()[0])
            raise InputError(
                f"the model returns NaN or infinity at sample {bad}: check its weights and "
                "preprocessing."
            )
        x = x.cpu()
        mass = worker.mu[place.start : place.stop]
        tensors = {"x": pack(x), **kept_labels(rows), "predicted": predicted(z, right)}
        fields = {"ids": data.ids(place.start, place.stop), "sha256": data_hash(x, rows)}
        return tensors | {"logits": z, "mu": mass}, fields

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """See `Task`."""
        x, y, ids = samples
        kept = kept_labels(y)
        tensors = {
            "x": pack(x),
            **kept,
            "predicted": kept["y"].clone(),
            "logits": torch.zeros(len(y), 0),
            "mu": mu.clone(),
        }
        return tensors, {"ids": list(ids), "sha256": data_hash(x, y), **unknown(ids, reason)}
