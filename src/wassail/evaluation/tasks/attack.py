"""Searches for flips: attacks, some samples with some passes, moves toward other samples."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from wassail.attacks.catalogue import GIVEN
from wassail.errors import ModelWarning
from wassail.evaluation import indicators
from wassail.evaluation.chunks import flips_chunk, plain, share_of, spread, title_of
from wassail.evaluation.plan import Unit
from wassail.evaluation.tasks.task import Result, Samples, Task, no_flips, unknown
from wassail.progress import Progress
from wassail.specification import labels_at, labels_of
from wassail.threat import box_at

if TYPE_CHECKING:
    from wassail.evaluation.work import Worker


def _options(worker: Worker, unit: Unit) -> dict[str, Any]:
    settings = worker.settings
    return {"seed": settings.seed, "batch_size": settings.batch_size, **unit.options}


class _Search(Task):
    """A task that gives flips."""

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """See `Task`."""
        x, y, ids = samples
        return no_flips(x, y), unknown(ids, reason)


@dataclass(frozen=True)
class Attack(_Search):
    """One attack, as its flips and the share of each sample that it moves."""

    unit: Unit

    @property
    def divisible(self) -> bool:
        """An attack that looks at all samples between its steps has no parts."""
        return super().divisible and not self.unit.whole

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        unit = self.unit
        settings = worker.settings
        mine = slice(self.place.start, self.place.stop)
        options = _options(worker, unit)
        if unit.attack == GIVEN and settings.points is not None:
            options["points"] = settings.points[mine]
            options["eps"] = [t.eps for t in settings.threats if t.order == math.inf]
        if unit.whole:
            options["mu"] = worker.mu[mine]
        x, y = worker.samples(self.place)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ModelWarning)
            found = unit.entry.run(
                worker.attacked, x, y, worker.inside(unit, self.place, x), progress=tick, **options
            )
        said = sorted({str(w.message) for w in caught if issubclass(w.category, ModelWarning)})
        return flips_chunk(worker.held(found.flips, self.place, x, y)), {
            "title": title_of(unit.entry, found),
            "share": share_of(found.weights, found.allocation),
            "warnings": said,
            "info": plain(dict(found.info)),
        }

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """See `Task`."""
        tensors, fields = super().empty(samples, mu, reason)
        return tensors, {"warnings": [], **fields}


@dataclass(frozen=True)
class Rung(_Search):
    """One attack on the chosen samples of a chunk, bool `(n,)`: the others have no flip here.

    predicted: classes predicted at the samples `(n,)`.
    """

    unit: Unit
    chosen: Tensor
    predicted: Tensor

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        unit = self.unit
        x, y = worker.samples(self.place)
        some = self.chosen.to(x.device)
        options = _options(worker, unit)
        with warnings.catch_warnings():
            # So few passes may be none at all, and are our own choice.
            warnings.simplefilter("ignore", ModelWarning)
            right = labels_at(y, some)
            threat = worker.inside(unit, self.place, x)
            threat = replace(threat, domain=box_at(threat.domain, some))
            found = unit.entry.run(
                worker.attacked, x[some], right, threat, progress=tick, **options
            )
        flips = worker.held(found.flips, self.place, x[some], right, some)
        return spread(flips_chunk(flips), self.chosen, labels_of(y).cpu(), self.predicted), {}

    def cut(self, start: int, stop: int) -> Self:
        """See `Task`."""
        mine = slice(start - self.place.start, stop - self.place.start)
        chosen = self.chosen[mine].clone()
        predicted = self.predicted[mine].clone()
        return replace(super().cut(start, stop), chosen=chosen, predicted=predicted)


@dataclass(frozen=True)
class Transfer(_Search):
    """Flips that no gradient was needed for: they belong to the pool, and tell when gradients
    mislead. among: the samples that others are moved toward, and their logits.
    """

    among: tuple[Tensor, Tensor]

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        settings = worker.settings
        x, y = worker.samples(self.place)
        found = indicators.transfer(
            worker.model,
            x,
            y,
            settings.norm,
            settings.domain,
            settings.batch_size,
            among=self.among,
        )
        return flips_chunk(worker.held(found, self.place, x, y)), {}
