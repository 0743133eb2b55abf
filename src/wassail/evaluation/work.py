"""What does the work of an evaluation: a worker knows the model, the data and the settings, a
runner gives it tasks.

A worker knows nothing of the run directory: what it returns is a function of the task alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.boxes import inside, one_box
from wassail.evaluation.chunks import judged
from wassail.evaluation.criterion import outputs_of, right_of
from wassail.evaluation.plan import Unit, data_hash
from wassail.evaluation.settings import Settings
from wassail.evaluation.tasks.task import Place, Result, Task
from wassail.geometry import clip
from wassail.network import Model, frozen, mixed
from wassail.progress import Progress
from wassail.specification import Labels
from wassail.threat import Domain, Threat, box_at
from wassail.transport.flips import Flips
from wassail.zoo.samples import Data

if TYPE_CHECKING:
    from wassail.certificates.graph.graph import Graph


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

            share(0.0)
            result = worker.run(task, share)
            share(1.0)
            yield task, result, time.perf_counter() - begun


class Worker:
    """Model, data and settings, ready for tasks."""

    def __init__(self, model: Model, data: Data, settings: Settings, mu: Tensor) -> None:
        self.model = model
        self.data = data
        self.settings = settings
        self.mu = mu
        plain = settings.gradients == "float32"
        self.attacked = model if plain else mixed(model, getattr(torch, settings.gradients))

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
        with frozen(self.model):
            return task.run(self, tick)

    def samples(self, place: Place) -> tuple[Tensor, Labels]:
        """Samples of a task and what is right for them: their labels, or a specification."""
        x, y = self.rows(place)
        return x, right_of(self.settings.criterion, y)

    def rows(self, place: Place) -> tuple[Tensor, Tensor]:
        """Samples of a task, and labels or targets as the data have them: those that the run was
        begun with.
        """
        size = self.settings.chunk
        parts = []
        for k, start in enumerate(range(place.start, place.stop, size)):
            stop = min(start + size, place.stop)
            x, y = self.data.read(start, stop)
            if place.hashes and place.hashes[k] != data_hash(x, y):
                raise InputError(
                    f"samples {start} to {stop - 1} of {self.data.name!r} are not those that the "
                    "run was begun with: give the same data, or choose another --out."
                )
            parts.append((x, y))
        if not parts:
            return self.data.read(0, 0)
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def logits(self, x: Tensor) -> Tensor:
        """Logits, or outputs, `(n, K)` of samples, on the CPU."""
        return outputs_of(self.model, x, self.settings.criterion, self.settings.batch_size)

    def box(self, place: Place, x: Tensor) -> Domain:
        """Where the samples of a task may move."""
        rows = torch.arange(place.start, place.stop)
        return inside(self.model, self.settings.boxes, self.settings.domain, rows, x)

    def inside(self, unit: Unit, place: Place, x: Tensor) -> Threat:
        """The threat of an attack on the samples of a task, where they may move."""
        return (
            unit.threat if one_box(unit.attack) else replace(unit.threat, domain=self.box(place, x))
        )

    def held(
        self, flips: Flips, place: Place, x: Tensor, y: Labels, some: Tensor | None = None
    ) -> Flips:
        """The flips after features that may not move are put back to their values, and points
        outside the box of their sample into it.

        A point that is no flip any more is left out: distance infinity. some: which of the samples
        of the task these are; by default all.
        """
        held = getattr(self.model, "held", None)
        frozen_ = isinstance(held, Tensor) and bool(held.any())
        if not (frozen_ or self.settings.boxes is not None) or not len(x):
            return flips
        points = flips.points.to(x)
        if isinstance(held, Tensor) and frozen_:
            points = torch.where(held.to(x.device), x, points)
        domain = self.settings.domain
        if self.settings.boxes is not None:
            domain = self.box(place, x)
            domain = domain if some is None else box_at(domain, some)
            points = clip(points, domain)
        again = judged(self.model, x, y, points, self.settings.norm, domain)
        return replace(flips, points=again.points, distances=again.distances, labels=again.labels)

    def none(self, x: Tensor, y: Labels) -> Flips:
        """No flips but the samples that are wrong already."""
        settings = self.settings
        return judged(self.model, x, y, x, settings.norm, settings.domain)


@dataclass(eq=False)
class Handed(Data):
    """Samples that came with a task: those at start..start + n - 1 of the data they are from."""

    name: str
    shape: tuple[int, ...]
    start: int
    x: Tensor
    y: Tensor
    names: Sequence[str]
    info: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """Those up to the last that is here."""
        return self.start + len(self.y)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Places are those in the data they are from."""
        mine = slice(start - self.start, stop - self.start)
        return self.x[mine].clone(), self.y[mine].clone()

    def ids(self, start: int, stop: int) -> list[str]:
        """As the data have them."""
        return list(self.names[start - self.start : stop - self.start])
