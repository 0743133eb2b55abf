"""The process of a worker: it loads the model once, then does one task after the other."""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from wassail.connection import line_of
from wassail.errors import InputError
from wassail.evaluation.settings import Settings
from wassail.evaluation.tasks.task import Place, Result, Samples, Task
from wassail.evaluation.work import Handed, Worker
from wassail.network import versions
from wassail.zoo.samples import Data

LIGHT = 1 << 20  # bytes: data with an array larger than this are not sent as a whole


class UnreadError(Exception):
    """The samples of a task cannot be read where the worker is: they have to be sent."""


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs to know of an evaluation; model and data as `_pickled` wrote them."""

    model: bytes
    data: bytes | None
    name: str
    shape: tuple[int, ...]
    settings: Settings
    mu: Tensor
    versions: Mapping[str, str]
    path: tuple[str, ...]


class Actor:
    """A Ray actor."""

    def __init__(self, threads: int, gpu: bool) -> None:
        self.threads = threads
        self.device = "cuda" if gpu else "cpu"
        self.known = ""
        self.worker: Worker | None = None
        self.own: Data | None = None

    def work(
        self, recipe: Sequence[Any], task: Task, samples: Samples | None
    ) -> tuple[Result, float]:
        """Do one task; returns its result and the seconds it took.

        recipe: a reference to the `Recipe`, in a list: it is fetched once; samples: those of the
        task, None to read them here.
        """
        torch.set_num_threads(self.threads)
        if self.worker is None or self.known != recipe[0].hex():
            self.worker = self._loaded(importlib.import_module("ray").get(recipe[0]))
            self.known = recipe[0].hex()
        worker = self.worker
        place = task.place
        found = self._read(worker, place) if samples is None else samples
        worker.data = Handed(worker.data.name, tuple(worker.data.shape), place.start, *found)
        begun = time.perf_counter()
        try:
            tensors, fields = worker.run(task)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        seconds = time.perf_counter() - begun
        return ({name: _own(value) for name, value in tensors.items()}, fields), seconds

    def _loaded(self, recipe: Recipe) -> Worker:
        try:
            for name, version in versions().items():
                if version != recipe.versions[name]:
                    raise InputError(
                        f"it has {name} {version} and the run is made with {recipe.versions[name]}"
                    )
            # The model's code, where it is at hand.
            sys.path += [folder for folder in recipe.path if folder not in sys.path]
            file = io.BytesIO(recipe.model)
            model = torch.load(file, map_location=self.device, weights_only=False)
        except Exception as error:
            raise InputError(
                f"a worker could not load the model ({type(error).__name__}: {line_of(error)}): "
                "install the model's code and wassail on every machine of the cluster, in the same "
                "versions."
            ) from error
        model = model.to(self.device) if isinstance(model, nn.Module) else model
        self.own = _opened(recipe)
        nothing = torch.zeros(0, *recipe.shape), torch.zeros(0).long(), list[str]()
        data = Handed(recipe.name, recipe.shape, 0, *nothing)
        return Worker(model, data, recipe.settings, recipe.mu)

    def _read(self, worker: Worker, place: Place) -> Samples:
        """The samples of a task, if they can be read here and are those of the run."""
        try:
            assert self.own is not None
            worker.data = self.own
            return (*worker.rows(place), [])
        except Exception as error:
            raise UnreadError(line_of(error)) from None


def _opened(recipe: Recipe) -> Data | None:
    """The data, None where they cannot be opened: no such file here, or no such library."""
    try:
        return torch.load(io.BytesIO(recipe.data or b""), weights_only=False)  # type: ignore[no-any-return]
    except Exception:
        return None


def _own(value: Tensor) -> Tensor:
    """The tensor without the rest of the memory that it is a view of, which would travel too."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def is_memory(error: BaseException) -> bool:
    """Whether a smaller task may not meet this error."""
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def packed(worker: Worker) -> Recipe:
    """Everything that a worker needs; a model that cannot be sent is refused.

    worker: with the model, the data and the settings.
    """
    data = worker.data
    try:
        model = _pickled(worker.model)
    except Exception as error:
        raise InputError(
            f"the model cannot be sent to another process ({type(error).__name__}: "
            f"{line_of(error)}): keep open files, locks and the like out of it."
        ) from error
    try:
        light = _pickled(data, LIGHT)
    except Exception:  # an open file, a large array: the samples will come with the tasks
        light = None
    path = tuple(os.path.abspath(folder) for folder in [*sys.path, ""])
    about = (data.name, tuple(data.shape), worker.settings, worker.mu, versions(), path)
    return Recipe(model, light, *about)


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
    names = {"__name__": "cloudpickle", "Pickler": Pickler, "dumps": cloudpickle.dumps}
    torch.save(value, file, pickle_module=SimpleNamespace(**names))
    return file.getvalue()


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
