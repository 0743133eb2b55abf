"""The work of an evaluation in pieces: a task says what to compute for which samples, a worker
computes it.

A worker knows the model, the data and the settings, and nothing of the run directory: what it
returns is a function of the task alone. So tasks may be done in any order, by any number of
workers, again after a crash, and the results are the same.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from wassail.attacks.catalogue import GIVEN
from wassail.checks import check_task
from wassail.errors import InputError, ModelWarning
from wassail.evaluation import indicators
from wassail.evaluation.chunks import Tensors, flips_chunk, moved, pack, plain, share_of, spread
from wassail.evaluation.criterion import kept_labels, lead, outputs_of, predicted, right_of
from wassail.evaluation.plan import Unit, data_hash
from wassail.evaluation.settings import PRECISIONS, Settings
from wassail.geometry import distances as distances_between
from wassail.network import Model, check_model, device_of, frozen, mixed
from wassail.progress import Progress
from wassail.specification import Labels, labels_at, labels_of
from wassail.threat import Threat, ceil_percent, floor_percent
from wassail.transport.flips import Flips
from wassail.zoo.features import own_boxes
from wassail.zoo.samples import Data

if TYPE_CHECKING:
    from wassail.certificates.graph.graph import Graph
    from wassail.certificates.prove.record import Radii

# Certificates are loaded where they are asked for: half a second that attacks alone do not need.
Result: TypeAlias = (
    "tuple[Tensors, dict[str, Any]]"  # what a chunk of the run holds: tensors, and plain values
)
ONE_BOX = ("cw", "a3", "w_pgd")  # homes of attacks that have one box for all features
_log = logging.getLogger("wassail")


def _told(threat: Threat, certified: float, attacked: float) -> None:
    """A line for each time that a bracket shrinks."""
    least = floor_percent(certified)
    most = ceil_percent(attacked)
    _log.info("%s: accuracy at least %s %%, at most %s %%", threat, least, most)


@dataclass(frozen=True)
class Task:
    """One piece of work for the samples start..stop - 1: `kind` names a method of `Worker`, key and
    chunk where its results go.

    hashes: of samples and labels, chunk by chunk, as the run was begun with; given: what the method
    needs besides.
    """

    kind: str
    key: str
    chunk: int
    start: int
    stop: int
    hashes: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """Who does the tasks: this process (`Local`), or a cluster. Results come in any order, with
    the seconds each took.
    """

    @property
    def workers(self) -> int:
        """How many tasks are done at once."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What the results depend on besides the tasks, for the record: device and threads,
        where they are not the driver's.
        """

    def run(
        self, worker: Worker, tasks: Iterable[Task], tick: Callable[[Task, float], None]
    ) -> Iterator[tuple[Task, Result, float]]:
        """Do the tasks, which are made when they are asked for; `tick` takes the share of a
        task that is done.
        """


class Local:
    """One task after the other, here."""

    workers = 1
    about: Mapping[str, Any] = {}

    def run(
        self, worker: Worker, tasks: Iterable[Task], tick: Callable[[Task, float], None]
    ) -> Iterator[tuple[Task, Result, float]]:
        """See `Runner`."""
        for task in tasks:
            begun = time.perf_counter()

            def share(value: float, task: Task = task) -> None:
                tick(task, value)

            yield task, worker.run(task, share), time.perf_counter() - begun


class Worker:
    """Model, data and settings, ready for tasks."""

    def __init__(self, model: Model, data: Data, settings: Settings, mu: Tensor) -> None:
        self.model = model
        self.data = data
        self.settings = settings
        self.mu = mu
        precision = PRECISIONS[settings.gradients]
        self.attacked = model if precision is None else mixed(model, precision)

    @cached_property
    def graph(self) -> Graph:
        """The model's structure, for certificates; a model that has none we can read is refused
        here.
        """
        from wassail.certificates.graph.reader import read

        some, _ = self.data.read(0, min(4, len(self.data)))
        return read(self.model, tuple(self.data.shape), smooth=True, samples=some)

    def run(self, task: Task, tick: Progress = False) -> Result:
        """Do one task; `tick` is given the share done."""
        method: Callable[[Task, Progress], Result] = getattr(self, f"_{task.kind}")
        with frozen(self.model):
            return method(task, tick)

    def samples(self, task: Task) -> tuple[Tensor, Labels]:
        """Samples of a task and what is right for them: their labels, or a specification."""
        x, y = self.rows(task)
        return x, right_of(self.settings.criterion, y)

    def rows(self, task: Task) -> tuple[Tensor, Tensor]:
        """Samples of a task, and labels or targets as the data have them: those that the run was
        begun with.
        """
        size = self.settings.chunk
        parts = []
        for k, start in enumerate(range(task.start, task.stop, size)):
            stop = min(start + size, task.stop)
            x, y = self.data.read(start, stop)
            if task.hashes and task.hashes[k] != data_hash(x, y):
                raise InputError(
                    f"samples {start} to {stop - 1} of {self.data.name!r} are not those that the "
                    "run was begun with: give the "
                    "same data, or choose another --out."
                )
            parts.append((x, y))
        return (
            (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
            if parts
            else self.data.read(0, 0)
        )

    def logits(self, x: Tensor) -> Tensor:
        """Logits, or outputs, `(n, K)` of samples, on the CPU."""
        return outputs_of(self.model, x, self.settings.criterion, self.settings.batch_size)

    def _clean(self, task: Task, tick: Progress) -> Result:
        """Predictions on the samples, which are kept with them, so that the run can be read
        without the data.
        """
        try:
            x, rows = self.data.read(task.start, task.stop)
            right = right_of(self.settings.criterion, rows)
            x, y = check_task(x, right, self.settings.domain)
            check_model(self.model, x, y)
        except InputError as error:
            where = f"samples {task.start} to {task.stop - 1} of {self.data.name!r}"
            raise error.within(where) from None
        z = self.logits(x)
        if not torch.isfinite(z).all():
            bad = task.start + int((~torch.isfinite(z)).any(1).nonzero()[0])
            raise InputError(
                f"the model returns NaN or infinity at sample {bad}: check its weights and "
                "preprocessing."
            )
        x = x.cpu()
        mass = self.mu[task.start : task.stop]
        tensors = {"x": pack(x), **kept_labels(rows), "predicted": predicted(z, right)}
        fields = {"ids": self.data.ids(task.start, task.stop), "sha256": data_hash(x, rows)}
        return tensors | {"logits": z, "mu": mass}, fields

    def _votes(self, task: Task, tick: Progress) -> Result:
        """How often the model is right under noise: the draws are keyed by sample."""
        return {"hits": task.given["draws"].hits(self.model, *self.samples(task))}, {}

    def _checks(self, task: Task, tick: Progress) -> Result:
        """What can be said before any attack."""
        found = indicators.check(
            self.model,
            *self.samples(task),
            self.settings.domain,
            self.settings.batch_size,
            self.settings.criterion,
        )
        return {}, {"findings": [task.given["mode"], *(asdict(finding) for finding in found)]}

    def _attack(self, task: Task, tick: Progress) -> Result:
        """One attack, as its flips and the share of each sample that it moves."""
        unit: Unit = task.given["unit"]
        options: dict[str, Any] = {
            "seed": self.settings.seed,
            "batch_size": self.settings.batch_size,
            **unit.options,
        }
        if unit.attack == GIVEN and self.settings.points is not None:
            options["points"] = self.settings.points[task.start : task.stop]
            options["eps"] = [t.eps for t in self.settings.threats if t.order == math.inf]
        if unit.whole:
            options["mu"] = self.mu[task.start : task.stop]
        x, y = self.samples(task)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ModelWarning)
            threat = self._inside(unit, x)
            found = unit.entry.run(self.attacked, x, y, threat, progress=tick, **options)
        said = sorted({str(w.message) for w in caught if issubclass(w.category, ModelWarning)})
        kappa = found.info.get("options", {}).get("kappa")
        title = unit.entry.title if kappa is None else f"{unit.entry.title}, kappa {kappa:g}"
        share = share_of(found.weights, found.allocation)
        return flips_chunk(self._held(found.flips, x, y)), {
            "title": title,
            "share": share,
            "warnings": said,
            "info": plain(dict(found.info)),
        }

    def _rung(self, task: Task, tick: Progress) -> Result:
        """One attack on some samples of a chunk: the others have no flip here."""
        unit: Unit = task.given["unit"]
        chosen: Tensor = task.given["chosen"]
        x, y = self.samples(task)
        some = chosen.to(x.device)
        options: dict[str, Any] = {
            "seed": self.settings.seed,
            "batch_size": self.settings.batch_size,
            **unit.options,
        }
        with warnings.catch_warnings():
            # So few passes may be none at all, and are our own choice.
            warnings.simplefilter("ignore", ModelWarning)
            right = labels_at(y, some)
            threat = self._inside(unit, x[some])
            found = unit.entry.run(self.attacked, x[some], right, threat, progress=tick, **options)
        part = flips_chunk(self._held(found.flips, x[some], right))
        return spread(part, chosen, labels_of(y).cpu(), task.given["predicted"]), {}

    def _inside(self, unit: Unit, x: Tensor) -> Threat:
        """The threat of an attack on some samples, where features that may not move are frozen."""
        if unit.entry.home.split(":")[0] in ONE_BOX:
            return unit.threat
        domain = own_boxes(self.model, x, unit.threat.domain)
        return replace(unit.threat, domain=domain)

    def _held(self, flips: Flips, x: Tensor, y: Labels) -> Flips:
        """The flips after features that may not move are put back to their values.

        A point that is no flip any more is left out: distance infinity.
        """
        held = getattr(self.model, "held", None)
        if not isinstance(held, Tensor) or not bool(held.any()) or not len(x):
            return flips
        points = torch.where(held.to(x.device), x, flips.points.to(x))
        settings = self.settings
        again = Flips.from_points(
            self.model, x, y, points, settings.norm, settings.domain, pull_in=False
        )
        return replace(flips, points=again.points, distances=again.distances, labels=again.labels)

    def _none(self, x: Tensor, y: Labels) -> Flips:
        """No flips but the samples that are wrong already."""
        settings = self.settings
        return Flips.from_points(self.model, x, y, x, settings.norm, settings.domain, pull_in=False)

    def _convergence(self, task: Task, tick: Progress) -> Result:
        """Whether `nearest` has come to rest: a quarter of its passes on the first samples,
        beside what all of them found.
        """
        settings = self.settings
        x, y = self.samples(task)
        found = indicators.converged(
            self.attacked,
            x,
            y,
            settings.norm,
            own_boxes(self.model, x, settings.domain),
            settings.attacks["nearest"]["passes"],
            settings.seed,
            settings.batch_size,
            task.given["late"],
        )
        return {}, {"findings": [asdict(found)]}

    def _transfer(self, task: Task, tick: Progress) -> Result:
        """Flips that no gradient was needed for: they belong to the pool, and tell when
        gradients mislead.
        """
        settings = self.settings
        x, y = self.samples(task)
        found = indicators.transfer(
            self.model,
            x,
            y,
            settings.norm,
            settings.domain,
            settings.batch_size,
            among=task.given["among"],
        )
        return flips_chunk(self._held(found, x, y)), {}

    def _radii(self, task: Task, tick: Progress) -> Result:
        """Certified radii, nothing sought beyond a known flip; the flips that exact searches
        meet join the pool.
        """
        from wassail.certificates.bounds.executed import refusal
        from wassail.certificates.graph.batches import check_batches
        from wassail.certificates.prove.radii import radii

        settings, (x, y) = self.settings, self.samples(task)
        limit = task.given["limit"]
        if limit is not None and limit <= 0:
            flips = self._none(x, y)
            none = torch.zeros(len(x), dtype=torch.float64)
            tensors = {
                "values": none,
                "exact": none.bool(),
                "margins": none.clone(),
                "errors": none.clone(),
                **flips_chunk(flips),
            }
            return tensors, {"method": "none: out of time", "cut": True}
        met: Flips | None
        if settings.gap is not None:
            found, met = self._closed(x, y, limit, task.given["known"])
        else:
            check_batches(self.graph, x, self.logits(x))
            found = radii(
                self.graph,
                x,
                y,
                settings.norm,
                own_boxes(self.model, x, settings.domain),
                settings.certify or "auto",
                arithmetic=settings.arithmetic,
                upper=task.given["upper"],
                effort=settings.effort,
                time_limit=limit,
                progress=tick,
            )
            met = found.flips(self.model, x, y)
        flips = self._none(x, y) if met is None else met
        tensors = {
            "values": found.values,
            "exact": found.exact,
            **self._beside(found, x, y),
            **flips_chunk(self._held(flips, x, y)),
        }
        fields = {
            "method": found.method,
            "arithmetic": found.arithmetic,
            "uncovered": refusal(self.graph),
        }
        here = device_of(self.model, self.graph.device)
        lacking = {"no_float64": here.type} if here != self.graph.device else {}
        return tensors, {**fields, **({"cut": True} if found.info["cut"] else {}), **lacking}

    def _closed(
        self, x: Tensor, y: Labels, limit: float | None, known: Tensors | None
    ) -> tuple[Radii, Flips]:
        """Radii and flips of all samples, closed until the bracket of each threat is as tight as
        asked, one threat after the other; only the first `closing` of them, if that is given.

        What closes the first serves the others: each may take half of the time that is left.
        known: the nearest flips of the attacks, judged once more.
        """
        from wassail.certificates.prove.sandwich import sandwich

        settings = self.settings
        flips: Flips | None = None
        if known is not None:
            flips = Flips.from_points(
                self.model,
                x,
                y,
                moved(x, known),
                settings.norm,
                own_boxes(self.model, x, settings.domain),
                pull_in=False,
                batch_size=settings.batch_size,
            )
        found: Radii | None = None
        inside = own_boxes(self.model, x, settings.domain)
        chosen = [replace(t, domain=inside) for t in settings.threats[: settings.closing]]
        for done, threat in enumerate(chosen):
            left = len(chosen) - done
            began = time.monotonic()
            closed = sandwich(
                self.model,
                x,
                y,
                threat,
                gap=settings.gap,
                effort=settings.effort,
                time_limit=None if limit is None else max(limit, 1e-3) / min(left, 2),
                mu=self.mu,
                arithmetic=settings.arithmetic,
                flips=flips,
                start=found,
                seed=settings.seed,
                batch_size=settings.batch_size,
                provers=settings.provers,
                progress=partial(_told, threat),
            )
            flips = closed.flips
            found = closed.radii
            limit = None if limit is None else limit - (time.monotonic() - began)
        assert flips is not None and found is not None
        return found, flips

    def _beside(self, found: Radii, x: Tensor, y: Labels) -> Tensors:
        """The smallest margins at the samples, and how far rounding may move them, or did where
        no bound is known.
        """
        run, exact = (lead(z.cpu().double(), y) for z in (self.logits(x), self.graph.logits(x)))
        errors = (run - exact).abs() if found.errors is None else found.errors
        return {"margins": exact.clamp(min=0), "errors": errors}

    def _pool(self, task: Task, tick: Progress) -> Result:
        """The nearest flip of each sample over all attacks, as they were stored, looked at once
        more.

        A flip that is not wrong any more, not in the box or not as near as it says gives way to the
        next nearest.
        """
        parts: list[Tensors] = task.given["parts"]
        x, y = self.samples(task)
        known, labels = (
            torch.stack([part[name] for part in parts]) for name in ("distances", "labels")
        )
        found_by = known.argmin(0)
        rows = torch.arange(len(x))
        refuted = torch.zeros_like(known, dtype=torch.bool)
        while len(rows):
            points = x[rows]
            for k, part in enumerate(parts):
                mine = found_by[rows] == k
                points[mine] = moved(x, part)[rows[mine]]
            right = labels_at(y, rows)
            bad = rows[~self._holds(x[rows], right, points, known[found_by[rows], rows])]
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

    def _holds(self, x: Tensor, y: Labels, points: Tensor, stated: Tensor) -> Tensor:
        """Which points are what a flip claims to be, bool `(n,)`; nothing is claimed at
        distance 0 and inf.
        """
        holds = predicted(self.logits(points), y) != labels_of(y)
        holds &= distances_between(points, x, self.settings.norm) == stated
        if self.settings.domain is not None:
            low, high = self.settings.domain
            holds &= ((points >= low) & (points <= high)).flatten(1).all(1)
        return holds | ~torch.isfinite(stated) | (stated == 0)
