"""Predictions on the samples as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail.checks import check_data
from wassail.errors import InputError
from wassail.evaluation.chunks import pack
from wassail.evaluation.plan import data_hash
from wassail.evaluation.tasks.task import Result, Samples, Task, unknown
from wassail.losses import predict
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
            x, y = check_data(*data.read(place.start, place.stop), worker.settings.domain)
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
        y = y.cpu()
        mass = worker.mu[place.start : place.stop]
        tensors = {"x": pack(x), "y": y, "predicted": predict(z, y), "logits": z, "mu": mass}
        return tensors, {"ids": data.ids(place.start, place.stop), "sha256": data_hash(x, y)}

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """See `Task`."""
        x, y, ids = samples
        tensors = {
            "x": pack(x),
            "y": y,
            "predicted": y.clone(),
            "logits": torch.zeros(len(y), 0),
            "mu": mu.clone(),
        }
        return tensors, {"ids": list(ids), "sha256": data_hash(x, y), **unknown(ids, reason)}
