"""Looks at some samples that say something of all of them, and votes under noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation import indicators
from wassail.evaluation.tasks.task import Result, Samples, Task, unknown
from wassail.progress import Progress
from wassail.smoothing.draws import Draws

if TYPE_CHECKING:
    from wassail.evaluation.work import Worker


class _Look(Task):
    """A task that says something of its samples together: it has no parts."""

    @property
    def divisible(self) -> bool:
        """See `Task`."""
        return False


def _nothing_said(name: str, reason: str) -> dict[str, Any]:
    text = f"Nothing can be said of the {name}: {reason}."
    return {"name": name, "level": "warning", "text": text}


@dataclass(frozen=True)
class Checks(_Look):
    """What can be said before any attack. mode: the finding on the model's mode."""

    mode: Mapping[str, Any]

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        settings = worker.settings
        x, y = worker.samples(self.place)
        found = indicators.check(
            worker.model, x, y, settings.domain, settings.batch_size, settings.criterion
        )
        return {}, {"findings": [self.mode, *(asdict(finding) for finding in found)]}

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """See `Task`."""
        findings = [self.mode, _nothing_said("checks", reason)]
        return {}, {"findings": findings, **unknown(samples[2], reason)}


@dataclass(frozen=True)
class Convergence(_Look):
    """Whether `nearest` has come to rest: a quarter of its passes on the first samples, beside what
    all of them found. late: those distances `(n,)`.
    """

    late: Tensor

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        settings = worker.settings
        x, y = worker.samples(self.place)
        found = indicators.converged(
            worker.attacked,
            x,
            y,
            settings.norm,
            worker.box(self.place, x),
            settings.attacks["nearest"]["passes"],
            settings.seed,
            settings.batch_size,
            self.late,
        )
        return {}, {"findings": [asdict(found)]}

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """See `Task`."""
        findings = [_nothing_said("convergence", reason)]
        return {}, {"findings": findings, **unknown(samples[2], reason)}


@dataclass(frozen=True)
class Votes(Task):
    """How often the model is right under noise: the draws are keyed by sample."""

    draws: Draws
    sent = True  # votes are on any points

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        return {"hits": self.draws.hits(worker.model, *worker.rows(self.place))}, {}

    def cut(self, start: int, stop: int) -> Self:
        """See `Task`."""
        first = self.place.start
        return replace(super().cut(start, stop), draws=self.draws.part(start - first, stop - first))

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """No count errs on the side of both bounds: an error."""
        raise InputError(
            f"there are no votes of sample {', '.join(samples[2])}: {reason}; give a smaller batch "
            "size, or leave the sample out."
        )
