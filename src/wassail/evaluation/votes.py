"""Votes of a smoothed model by a runner: `smooth.votes(x, y, counter=counter(Ray(workers=8)))`.

The draws of a sample are keyed by its content, so a count does not depend on who makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wassail.evaluation.settings import Settings
from wassail.evaluation.tasks.looks import Votes
from wassail.evaluation.tasks.task import Place
from wassail.evaluation.work import Handed, Runner, Worker
from wassail.network import Model
from wassail.smoothing.draws import Counter, Draws
from wassail.threat import Threat


def counter(runner: Runner) -> Counter:
    """What counts the votes of a smoothed model with a runner.

    Workers get the model once, and the samples with the tasks.

    runner: for example `evaluation.cluster.Ray(workers=8)`.
    """
    known: list[Worker] = []

    def count(
        model: Model, x: Tensor, y: Tensor, draws: Draws, parts: Sequence[tuple[int, int]]
    ) -> Iterator[Tensor]:
        if not known or known[0].model is not model:
            known[:] = [_worker(model, draws)]
        worker = known[0]
        ids = [str(place) for place in range(len(x))]
        worker.data = Handed("samples", tuple(x.shape[1:]), 0, x.cpu(), y.cpu(), ids)
        worker.mu = torch.full((len(x),), 1 / max(len(x), 1), dtype=torch.float64)
        return _in_order(runner, worker, draws, parts)

    return count


def _worker(model: Model, draws: Draws) -> Worker:
    """A worker that only votes: of the settings it needs none but the sizes."""
    nothing = torch.zeros(0)
    threat = Threat(norm=2, order=1, eps=1.0, domain=None)
    settings = Settings((threat,), {}, chunk=250, batch_size=draws.batch_size, look=False)
    return Worker(model, Handed("samples", (0,), 0, nothing, nothing, ()), settings, nothing)


def _in_order(
    runner: Runner, worker: Worker, draws: Draws, parts: Sequence[tuple[int, int]]
) -> Iterator[Tensor]:
    """The hits of the parts, in the order of the parts; a runner has any order."""
    tasks = (
        Votes(Place("votes", k, start, stop), draws.part(start, stop))
        for k, (start, stop) in enumerate(parts)
    )
    ready: dict[int, Tensor] = {}
    following = 0
    for task, (tensors, _), _ in runner.run(worker, tasks, _quiet):
        ready[task.place.chunk] = tensors["hits"]
        while following in ready:
            yield ready.pop(following)
            following += 1


def _quiet(*_: Any) -> None:
    """Progress is told by whoever asked for the votes."""
