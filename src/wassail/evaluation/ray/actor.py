"""The worker: loads the model once, then takes chunks."""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from wassail.connection import line_of
from wassail.errors import InputError
from wassail.evaluation.plan import data_hash
from wassail.evaluation.settings import Settings
from wassail.evaluation.tasks.task import Result, Samples, Task
from wassail.evaluation.work import Handed, Worker
from wassail.network import versions
from wassail.zoo.samples import Data

LIGHT = 1 << 20  # bytes: data with an array larger than this are not sent as a whole


@dataclass(frozen=True)
class _Recipe:
    """All that a worker needs to know about an evaluation; model and data as `_pickled` wrote
    them.
    """

    model: bytes
    data: bytes | None
    first: str
    name: str
    shape: tuple[int, ...]
    settings: Settings
    mu: Tensor
    versions: Mapping[str, str]
    path: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """An exception in a worker; memory: of the kind that a smaller chunk may not meet."""

    error: Exception
    trace: str
    memory: bool


class Actor:
    """The process that does the work. `share` is answered by a thread of its own while a task
    is running.
    """

    def __init__(self, threads: int, gpu: bool) -> None:
        self.threads = threads
        self.device = "cuda" if gpu else "cpu"
        self.now = (-1, 0.0)
        self.worker: Worker | None = None
        self.own: Data | None = None

    def load(self, recipe: _Recipe) -> tuple[int, str, bool] | Failure:
        """Model and data; returns the process id and its machine's, and whether the worker
        reads the samples itself.
        """
        try:
            for name, version in versions().items():
                if version != recipe.versions[name]:
                    raise InputError(
                        f"it has {name} {version} and the run is made with {recipe.versions[name]}"
                    )
            sys.path += [
                folder for folder in recipe.path if folder not in sys.path
            ]  # the model's code, where it is at hand
            torch.set_num_threads(self.threads)
            self.recipe = recipe
            self.own = _seen(recipe)
            model = torch.load(
                io.BytesIO(recipe.model), map_location=self.device, weights_only=False
            )
            model = model.to(self.device) if isinstance(model, nn.Module) else model
            none = Handed(
                recipe.name,
                recipe.shape,
                0,
                torch.zeros(0, *recipe.shape),
                torch.zeros(0).long(),
                (),
            )
            self.worker = Worker(model, self.own or none, recipe.settings, recipe.mu)
        except Exception as error:
            return _failure(error)
        return os.getpid(), node_of(importlib.import_module("ray")), self.own is not None

    def work(
        self, number: int, task: Task, samples: Samples | None
    ) -> tuple[Result, float] | Failure:
        """Do one task; samples: those of the task, None to read them here."""
        assert self.worker is not None
        torch.set_num_threads(self.threads)  # of the thread that computes, whichever that is
        if samples is not None:
            self.worker.data = Handed(
                self.recipe.name, self.recipe.shape, task.place.start, *samples
            )
        elif self.own is not None:
            self.worker.data = self.own

        def tick(share: float) -> None:
            self.now = (number, share)

        begun = time.perf_counter()
        try:
            tensors, fields = self.worker.run(task, tick)
        except Exception as error:
            if self.device == "cuda":
                torch.cuda.empty_cache()
            return _failure(error)
        return (
            {name: _own(value) for name, value in tensors.items()},
            fields,
        ), time.perf_counter() - begun

    def share(self) -> tuple[int, float]:
        """The number of the running task and the share of it that is done."""
        return self.now


def node_of(ray: Any) -> str:
    """The machine that this worker runs on."""
    return str(ray.get_runtime_context().get_node_id())


def _seen(recipe: _Recipe) -> Data | None:
    """The data, if they can be read from here and begin with the same sample."""
    if recipe.data is None:
        return None
    try:
        data: Data = torch.load(io.BytesIO(recipe.data), weights_only=False)
        return data if data_hash(*data.read(0, 1)) == recipe.first else None
    except (
        Exception
    ):  # no such file on this machine, no such library: the samples come with the tasks then
        return None


def _own(value: Tensor) -> Tensor:
    """The tensor without the rest of the memory that it is a view of, which would travel with
    it.
    """
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _failure(error: Exception) -> Failure:
    text = "".join(traceback.format_exception(error))
    memory = isinstance(
        error, (MemoryError, torch.cuda.OutOfMemoryError)
    ) or "can't allocate memory" in str(error)
    try:
        pickle = importlib.import_module("ray.cloudpickle")
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception that cannot travel
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(error.with_traceback(None), text, memory)


class WorkerError(Exception):
    """Where in a worker an exception came from: the cause of the exception that is raised here."""


@dataclass(eq=False)
class Whole:
    """A task that was cut: its pieces' results as they come."""

    task: Task
    samples: Samples
    open: int = 0
    seconds: float = 0.0
    parts: list[tuple[Task, Result]] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A task on its way, perhaps a piece of one; deaths: of workers that had it in hand."""

    task: Task
    deaths: int = 0
    whole: Whole | None = None


def packed(worker: Worker) -> _Recipe:
    """Everything that a worker needs; a model that cannot be sent is refused."""
    data = worker.data
    try:
        model = _pickled(worker.model)
    except Exception as error:
        raise InputError(
            f"the model cannot be sent to another process ({type(error).__name__}: "
            f"{line_of(error)}): keep open files, locks and "
            "the like out of it."
        ) from error
    try:
        light = _pickled(data, LIGHT)
    except Exception:  # an open file, a large array: the samples will come with the tasks
        light = None
    return _Recipe(
        model,
        light,
        data_hash(*data.read(0, 1)),
        data.name,
        tuple(data.shape),
        worker.settings,
        worker.mu,
        versions(),
        tuple(os.path.abspath(folder) for folder in [*sys.path, ""]),
    )


def _pickled(value: Any, most: int | None = None) -> bytes:
    """Any value as bytes for `torch.load`, which can move it to a device; most: bytes that an
    array in it may have.
    """
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if most is not None and isinstance(obj, (np.ndarray, Tensor)) and obj.nbytes > most:
                raise ValueError(f"an array of {obj.nbytes} bytes")
            if isinstance(obj, OpOverload):  # in exported programs; they know no way to be pickled
                return _operator, (obj.namespace, obj._opname, obj._overloadname)
            return super().reducer_override(obj)

    file = io.BytesIO()
    torch.save(
        value,
        file,
        pickle_module=SimpleNamespace(
            __name__="cloudpickle", Pickler=Pickler, dumps=cloudpickle.dumps
        ),
    )
    return file.getvalue()


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
