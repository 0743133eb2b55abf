"""Certified radii, chunk by chunk or of all samples together."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from wassail.evaluation.chunks import Tensors, flips_chunk, judged, moved
from wassail.evaluation.criterion import lead
from wassail.evaluation.tasks.task import Result, Samples, Task, no_flips, unknown
from wassail.network import device_of
from wassail.progress import Progress
from wassail.specification import Labels
from wassail.threat import Threat, ceil_percent, floor_percent
from wassail.transport.flips import Flips

if TYPE_CHECKING:
    from wassail.certificates.prove.record import Radii
    from wassail.evaluation.work import Worker

# Certificates are loaded where they are asked for: half a second that attacks alone do not need.
_log = logging.getLogger("wassail")


@dataclass(frozen=True)
class _Certified(Task):
    """Certified radii; flips that exact searches meet join the pool. limit: seconds, or None."""

    limit: float | None

    def run(self, worker: Worker, tick: Progress) -> Result:
        """See `Task`."""
        from wassail.certificates.relax.executed import refusal

        x, y = worker.samples(self.place)
        if self.limit is not None and self.limit <= 0:
            tensors = {**_no_radii(len(x)), **flips_chunk(worker.none(x, y))}
            return tensors, {"method": "none: out of time", "cut": True}
        found, met = self._found(worker, x, y, tick)
        flips = worker.none(x, y) if met is None else met
        tensors = {
            "values": found.values,
            "exact": found.exact,
            **_beside(worker, found, x, y),
            **flips_chunk(worker.held(flips, self.place, x, y)),
        }
        fields = {
            "method": found.method,
            "arithmetic": found.arithmetic,
            "uncovered": refusal(worker.graph),
        }
        here = device_of(worker.model, worker.graph.device)
        lacking = {"no_float64": here.type} if here != worker.graph.device else {}
        return tensors, {**fields, **({"cut": True} if found.info["cut"] else {}), **lacking}

    @abstractmethod
    def _found(
        self, worker: Worker, x: Tensor, y: Labels, tick: Progress
    ) -> tuple[Radii, Flips | None]:
        """The radii, and flips that were met on the way."""

    def empty(self, samples: Samples, mu: Tensor, reason: str) -> Result:
        """See `Task`."""
        x, y, ids = samples
        tensors = {**_no_radii(len(y)), **no_flips(x, y)}
        return tensors, {"method": "none", **unknown(ids, reason)}


@dataclass(frozen=True)
class Certify(_Certified):
    """Radii of the samples of a chunk; nothing is sought beyond `upper` `(n,)`, the distances of
    known flips.
    """

    upper: Tensor

    def cut(self, start: int, stop: int) -> Self:
        """Each part has its share of the time."""
        first = self.place.start
        share = (stop - start) / len(self.place)
        limit = None if self.limit is None else self.limit * share
        upper = self.upper[start - first : stop - first].clone()
        return replace(super().cut(start, stop), limit=limit, upper=upper)

    def _found(
        self, worker: Worker, x: Tensor, y: Labels, tick: Progress
    ) -> tuple[Radii, Flips | None]:
        from wassail.certificates.graph.batches import check_batches
        from wassail.certificates.prove.radii import radii

        settings = worker.settings
        check_batches(worker.graph, x, worker.logits(x))
        found = radii(
            worker.graph,
            x,
            y,
            settings.norm,
            worker.box(self.place, x),
            settings.certify or "auto",
            arithmetic=settings.arithmetic,
            upper=self.upper,
            effort=settings.effort,
            time_limit=self.limit,
            progress=tick,
        )
        return found, found.flips(worker.model, x, y)


@dataclass(frozen=True)
class Close(_Certified):
    """Radii and flips of all samples, closed until the bracket of each threat is as tight as asked,
    one threat after the other; only the first `closing` of them, if that is given.

    What closes the first serves the others: each may take half of the time that is left. known: the
    nearest flips of the attacks, judged once more; None without an attack.
    """

    known: Tensors | None

    @property
    def divisible(self) -> bool:
        """The bracket is one of all samples."""
        return False

    def _found(
        self, worker: Worker, x: Tensor, y: Labels, tick: Progress
    ) -> tuple[Radii, Flips | None]:
        from wassail.certificates.prove.sandwich import sandwich

        settings = worker.settings
        flips = None if self.known is None else self._judged(worker, x, y, self.known)
        limit = self.limit
        found: Radii | None = None
        inside = worker.box(self.place, x)
        chosen = [replace(t, domain=inside) for t in settings.threats[: settings.closing]]
        for done, threat in enumerate(chosen):
            left = len(chosen) - done
            began = time.monotonic()
            closed = sandwich(
                worker.model,
                x,
                y,
                threat,
                gap=settings.gap,
                effort=settings.effort,
                time_limit=None if limit is None else max(limit, 1e-3) / min(left, 2),
                mu=worker.mu,
                arithmetic=settings.arithmetic,
                flips=flips,
                start=found,
                seed=settings.seed,
                batch_size=settings.batch_size,
                provers=settings.provers,
                progress=partial(_log_bracket, threat),
            )
            flips = closed.flips
            found = closed.radii
            limit = None if limit is None else limit - (time.monotonic() - began)
        assert found is not None
        return found, flips

    def _judged(self, worker: Worker, x: Tensor, y: Labels, known: Tensors) -> Flips:
        settings = worker.settings
        about = settings.norm, worker.box(self.place, x), settings.batch_size
        return judged(worker.model, x, y, moved(x, known), *about)


def _no_radii(n: int) -> Tensors:
    none = torch.zeros(n, dtype=torch.float64)
    return {"values": none, "exact": none.bool(), "margins": none.clone(), "errors": none.clone()}


def _beside(worker: Worker, found: Radii, x: Tensor, y: Labels) -> Tensors:
    """The smallest margins at the samples, and how far rounding may move them, or did where no
    bound is known.
    """
    run, exact = (lead(z.cpu().double(), y) for z in (worker.logits(x), worker.graph.logits(x)))
    errors = (run - exact).abs() if found.errors is None else found.errors
    return {"margins": exact.clamp(min=0), "errors": errors}


def _log_bracket(threat: Threat, certified: float, attacked: float) -> None:
    """A line for each time that a bracket shrinks."""
    least = floor_percent(certified)
    most = ceil_percent(attacked)
    _log.info("%s: accuracy at least %s %%, at most %s %%", threat, least, most)
