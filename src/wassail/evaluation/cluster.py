"""Evaluation on more than one process or machine, with Ray: `evaluate(..., runner=Ray(workers=8))`.

Workers are Ray actors: processes that load the model once and take one chunk of samples after the
other, whoever is free the next. A result depends on its task alone, so the files of a run are those
of a run in one process, to the byte, for the same chunk size and number of threads; a run may begin
here and go on there.

A worker may die (killed, out of memory, its machine gone) or hang (`timeout`): another one takes
its place and its chunk. A chunk that kills two workers is halved, then quartered and so on, and a
sample that kills even when it is alone is given up: the run goes on without it and says so. Only
such a chunk is not the same to the byte, for its pieces are batches of another size.

Samples are read where the run was started and travel with the tasks, so no other machine needs the
files. Where a worker finds the same files (a folder of images on a shared disk, say) it reads them
itself, and what it reads is compared by its hash.

A cluster that is started here listens on the loopback interface only, with a password of its own;
`address` joins one that is running. Ray is imported when it is needed: `pip install
"wassail[ray]"`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise
from types import SimpleNamespace, TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from typing_extensions import Self

from wassail.errors import InputError
from wassail.evaluation.pieces import cut, divisible, join, nothing
from wassail.evaluation.plan import data_hash
from wassail.evaluation.work import Result, Settings, Task, Worker
from wassail.network import versions
from wassail.zoo.datasets import Data

DEATHS = 2  # of workers, until a chunk is taken to be the cause
# deaths with nothing finished in between, and two of each worker: then it is not the samples
IN_A_ROW = 12
QUICK = 5.0  # seconds: tasks that take less are sent before the one ahead of them is done
POLL = 0.5  # seconds between looks at clocks
ASK = 2.0  # seconds between questions for a worker's progress
LIGHT = 1 << 20  # bytes: data with an array larger than this are not sent as a whole
LATE = 60.0  # seconds without a single worker until somebody should be told

Samples: TypeAlias = "tuple[Tensor, Tensor, list[str]]"  # samples (n, *shape), labels (n,), ids

_log = logging.getLogger("wassail")


# ---- In the worker
# --------------------------------------------------------------------------------------------------


class _Handed(Data):
    """Samples that came with a task: those at start..start + n - 1 of the data they are from."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        start: int,
        x: Tensor,
        y: Tensor,
        ids: Sequence[str],
    ) -> None:
        self.name = name
        self.shape = shape
        self.info = {}
        self.classes = None
        self._start = start
        self._x = x
        self._y = y
        self._ids = ids

    def __len__(self) -> int:
        """Those up to the last that is here."""
        return self._start + len(self._y)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Places are those in the data they are from."""
        a = start - self._start
        b = stop - self._start
        return self._x[a:b].clone(), self._y[a:b].clone()

    def ids(self, start: int, stop: int) -> list[str]:
        """As the data have them."""
        return list(self._ids[start - self._start : stop - self._start])


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
class _Failure:
    """An exception in a worker; memory: of the kind that a smaller chunk may not meet."""

    error: Exception
    trace: str
    memory: bool


class _Actor:
    """The process that does the work. `share` is answered by a thread of its own while a task
    is running.
    """

    def __init__(self, threads: int, gpu: bool) -> None:
        self.threads = threads
        self.device = "cuda" if gpu else "cpu"
        self.now = (-1, 0.0)
        self.worker: Worker | None = None
        self.own: Data | None = None

    def load(self, recipe: _Recipe) -> tuple[int, str, bool] | _Failure:
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
            none = _Handed(
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
        return os.getpid(), _node(importlib.import_module("ray")), self.own is not None

    def work(
        self, number: int, task: Task, samples: Samples | None
    ) -> tuple[Result, float] | _Failure:
        """Do one task; samples: those of the task, None to read them here."""
        assert self.worker is not None
        torch.set_num_threads(self.threads)  # of the thread that computes, whichever that is
        if samples is not None:
            self.worker.data = _Handed(self.recipe.name, self.recipe.shape, task.start, *samples)
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


def _node(ray: Any) -> str:
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


def _failure(error: Exception) -> _Failure:
    text = "".join(traceback.format_exception(error))
    memory = isinstance(
        error, (MemoryError, torch.cuda.OutOfMemoryError)
    ) or "can't allocate memory" in str(error)
    try:
        pickle = importlib.import_module("ray.cloudpickle")
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception that cannot travel
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Failure(error.with_traceback(None), text, memory)


class WorkerError(Exception):
    """Where in a worker an exception came from: the cause of the exception that is raised here."""


# ---- Where the run is
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Whole:
    """A task that was cut: its pieces' results as they come."""

    task: Task
    samples: Samples
    open: int = 0
    seconds: float = 0.0
    parts: list[tuple[Task, Result]] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    """A task on its way, perhaps a piece of one; deaths: of workers that had it in hand."""

    task: Task
    deaths: int = 0
    whole: _Whole | None = None


@dataclass(eq=False)
class _Hand:
    """A worker as it is seen from here; queue: what it was sent, oldest first, `since` when
    that one was begun.
    """

    actor: Any
    loading: Any
    recipe: Any
    pid: int = 0
    node: str = ""
    sees: bool = False
    queue: deque[tuple[int, _Job, Any]] = field(default_factory=deque)
    since: float = 0.0
    last: float = 0.0
    asked: Any = None
    heard: float = 0.0


class Ray:
    """A runner that does the tasks on Ray actors; also a context manager, which ends them.

    address: of a running cluster ("auto" for the one that this machine belongs to, or `host:port`);
    None starts one on this machine, which nobody else can reach. workers: how many processes, by
    default as many as the cluster has room for. gpus: of each worker; with more than 0 the model is
    moved to `cuda` there (0.5 puts two workers on one device). threads: of each worker. timeout:
    seconds after which a chunk is taken to hang; its worker is killed then.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        gpus: float = 0.0,
        threads: int = 1,
        timeout: float | None = None,
    ) -> None:
        for name, value, least in (
            ("workers", workers, 1),
            ("gpus", gpus, 0),
            ("threads", threads, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} is {value}: give a number of at least {least}.")
        if timeout is not None and not timeout > 0:
            raise InputError(f"timeout is {timeout}: give a positive number of seconds.")
        self.address = address
        self.wanted = workers
        self.gpus = gpus
        self.threads = threads
        self.timeout = timeout
        self._link: Link | None = None
        self._hands: list[_Hand] = []
        self._worker: Worker | None = None
        self._recipe: Any = None
        self._kind: Any = None
        self._deadly: dict[int, str] = {}  # samples that no pass of the model survives, and why

    @property
    def workers(self) -> int:
        """How many processes work at once."""
        return len(self._hands) if self._hands else self._room(self._connected())

    @property
    def about(self) -> dict[str, Any]:
        """What the results depend on: a run records it in place of this process's device and
        threads.
        """
        return {"device": "cuda" if self.gpus else "cpu", "threads": self.threads}

    def pids(self) -> list[int]:
        """The process ids of the workers that are ready, each on its own machine."""
        return [hand.pid for hand in self._hands if hand.pid]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and the cluster if it was started here."""
        self._dismiss()
        if self._link is not None:
            self._link.close()
        self._link = self._kind = None

    def run(
        self, worker: Worker, tasks: Iterable[Task], tick: Callable[[Task, float], None]
    ) -> Iterator[tuple[Task, Result, float]]:
        """See `Runner`. Tasks are asked for when a worker is free, results come as they are
        ready, in any order.
        """
        source = iter(tasks)
        first = next(source, None)
        if first is None:  # all of it was done before: no need for a cluster
            return
        try:
            self._hire(worker)
            yield from _Shift(self, worker, chain([first], source), tick).results()
        except BaseException:  # Ctrl-C, or whoever asked does not want the rest
            self._dismiss()
            raise

    # Workers come and go.

    def _connected(self) -> Any:
        if self._link is None:
            cpus = None if self.wanted is None else self.wanted * self.threads
            self._link = Link(self.address, cpus)
            options = {
                "num_cpus": self.threads,
                "num_gpus": self.gpus,
                "max_restarts": 0,
                "max_task_retries": 0,
            }
            names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
            env = {"env_vars": dict.fromkeys(names, str(self.threads))}
            self._kind = self._link.ray.remote(
                **options, concurrency_groups={"ask": 1}, runtime_env=env
            )(_Actor)
        return self._link.ray

    def _room(self, ray: Any) -> int:
        """How many workers there are to be."""
        if self.wanted is not None and not (self.gpus and self.address is None):
            return self.wanted  # a cluster may grow, this machine will not
        has = ray.cluster_resources()
        room = has.get("CPU", 0) // self.threads
        room = min(room, has.get("GPU", 0) // self.gpus) if self.gpus else room
        if room < (self.wanted or 1):
            raise InputError(
                f"the cluster has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs, and "
                "each worker needs "
                f"{self.threads} and {self.gpus:g}: ask for less, or for fewer workers."
            )
        return self.wanted or int(room)

    def _hire(self, worker: Worker) -> None:
        """As many workers as there are to be, with the model that is now wanted."""
        ray = self._connected()
        if self._worker is not worker:
            self._worker = worker
            self._recipe = ray.put(_packed(worker))
            self._deadly = {}
        for hand in self._hands:
            if hand.recipe is not self._recipe:
                hand.loading = hand.actor.load.remote(self._recipe)
                hand.recipe = self._recipe
        while len(self._hands) < self._room(ray):
            self._hands.append(self._hired())

    def _hired(self) -> _Hand:
        actor = self._kind.remote(self.threads, self.gpus > 0)
        return _Hand(actor, actor.load.remote(self._recipe), self._recipe)

    def _dismiss(self) -> None:
        for hand in self._hands:
            self._end(hand)
        self._hands = []
        self._worker = None
        self._recipe = None

    def _end(self, hand: _Hand) -> None:
        assert self._link is not None
        with contextlib.suppress(Exception):  # it may be gone, or the cluster may
            self._link.ray.kill(hand.actor, no_restart=True)


class _Shift:
    """One stage of a run: tasks given out, results taken back, the dead replaced."""

    def __init__(
        self,
        office: Ray,
        worker: Worker,
        tasks: Iterator[Task],
        tick: Callable[[Task, float], None],
    ) -> None:
        self.office = office
        self.worker = worker
        self.tasks = tasks
        self.tick = tick
        self.ray = office._connected()
        self.again: deque[_Job] = deque()
        self.numbers = 0
        self.deaths = 0
        self.begun = time.monotonic()
        self.told = False
        self.finished: deque[tuple[Task, Result, float]] = deque()

    @property
    def hands(self) -> list[_Hand]:
        return self.office._hands

    def results(self) -> Iterator[tuple[Task, Result, float]]:
        """Until every task is done."""
        while self._give_out():
            self._look()
            while self.finished:
                task, result, seconds = self.finished.popleft()
                self.tick(task, 1.0)
                yield task, result, seconds

    # Giving out.

    def _give_out(self) -> bool:
        """Send tasks to those that are free, one each before anybody gets a second; whether
        there is anything to wait for.
        """
        for depth in (1, 2):
            for hand in self.hands:
                ready = (
                    hand.loading is None
                    and len(hand.queue) < depth
                    and (depth == 1 or 0 < hand.last < QUICK)
                )
                job = self._next() if ready else None
                if job is not None:
                    self._send(hand, job)
        return bool(
            self.finished or self.again or any(hand.queue for hand in self.hands) or self._more()
        )

    def _more(self) -> bool:
        """Whether there is a task left; it is put where the next one is taken from."""
        job = self._next()
        if job is not None:
            self.again.appendleft(job)
        return job is not None

    def _next(self) -> _Job | None:
        while not self.again:
            task = next(self.tasks, None)
            if task is None:
                return None
            deadly = sorted(i for i in self.office._deadly if task.start <= i < task.stop)
            if not deadly or task.kind == "clean":
                return _Job(task)
            self._around(task, deadly)
        return self.again.popleft()

    def _send(self, hand: _Hand, job: _Job) -> None:
        task = job.task
        if job.whole is not None:
            a = task.start - job.whole.task.start
            b = task.stop - job.whole.task.start
            x, y, ids = job.whole.samples
            samples = (x[a:b].clone(), y[a:b].clone(), ids[a:b])
        elif (
            hand.sees and task.kind != "clean"
        ):  # the first look is at the samples as they are here, and counts
            samples = None
        else:
            samples = self._read(task)
        self.numbers += 1
        if not hand.queue:
            hand.since = time.monotonic()
        hand.queue.append((self.numbers, job, hand.actor.work.remote(self.numbers, task, samples)))

    def _read(self, task: Task) -> Samples:
        data = self.worker.data
        return (*data.read(task.start, task.stop), data.ids(task.start, task.stop))

    # Taking back.

    def _look(self) -> None:
        """Wait for something to happen, and see to it."""
        waiting: dict[Any, tuple[_Hand, str]] = {}
        now = time.monotonic()
        for hand in self.hands:
            if hand.loading is not None:
                waiting[hand.loading] = (hand, "loaded")
            if hand.queue:
                waiting[hand.queue[0][2]] = (hand, "worked")
                if hand.asked is None and now - hand.heard > ASK:
                    hand.asked = hand.actor.share.options(concurrency_group="ask").remote()
        if waiting:
            done, _ = self.ray.wait(list(waiting), num_returns=1, timeout=POLL)
            for ref in done:
                hand, what = waiting[ref]
                self._loaded(hand, ref) if what == "loaded" else self._worked(hand, ref)
        self._watch()

    def _loaded(self, hand: _Hand, ref: Any) -> None:
        found = self._got(hand, ref)
        if isinstance(found, _Failure):
            raise InputError(
                f"a worker could not load the model ({type(found.error).__name__}: "
                f"{_line(found.error)}): install the model's "
                "code and wassail on every machine of the cluster, in the same versions."
            ) from WorkerError(found.trace)
        if found is not None:
            (hand.pid, hand.node, hand.sees), hand.loading = found, None

    def _worked(self, hand: _Hand, ref: Any) -> None:
        found = self._got(hand, ref)
        if found is None:
            return
        _, job, _ = hand.queue.popleft()
        hand.since = time.monotonic()
        if isinstance(found, _Failure):
            if not found.memory:
                raise found.error from (
                    None if isinstance(found.error, InputError) else WorkerError(found.trace)
                )
            self._suspect(job, f"it needs more memory than there is ({_line(found.error)})")
            return
        self.deaths = 0
        result, hand.last = found
        self._done(job, result, hand.last)

    def _got(self, hand: _Hand, ref: Any) -> Any:
        """What a worker returned; None if it died."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(ref)
        except (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as error:
            if "creation task" in str(error):  # not killed: it could not even begin
                reason = str(error).strip().splitlines()[-1]
                raise InputError(
                    f"a worker could not start ({reason}): install wassail on every machine alike."
                ) from error
            self._died(hand, "it killed its worker", _line(error))
            return None

    def _done(self, job: _Job, result: Result, seconds: float) -> None:
        if job.whole is None:
            self.finished.append((job.task, result, seconds))
            return
        whole = job.whole
        whole.parts.append((job.task, result))
        whole.open = whole.open - 1
        whole.seconds = whole.seconds + seconds
        if not whole.open:
            parts = sorted(whole.parts, key=lambda part: part[0].start)
            self.finished.append(
                (whole.task, join(parts) if len(parts) > 1 else parts[0][1], whole.seconds)
            )

    # Deaths.

    def _watch(self) -> None:
        """Progress, and who has taken too long."""
        now = time.monotonic()
        limit = self.office.timeout
        for hand in list(self.hands):
            if hand.asked is not None and self.ray.wait([hand.asked], timeout=0)[0]:
                with contextlib.suppress(
                    self.ray.exceptions.RayError
                ):  # its death is seen by the task
                    number, share = self.ray.get(hand.asked)
                    if hand.queue and hand.queue[0][0] == number and hand.queue[0][1].whole is None:
                        self.tick(hand.queue[0][1].task, share)
                hand.asked = None
                hand.heard = now
            late = limit is not None and hand.queue and now - hand.since > limit
            if (
                late and not self.ray.wait([hand.queue[0][2]], timeout=0)[0]
            ):  # else it is we who are late
                if hand.node == _node(self.ray):  # a process that is stopped does not hear ray
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(hand.pid, signal.SIGKILL)
                self._died(hand, f"it took more than {limit:g} s", "killed")
        if any(hand.loading is None for hand in self.hands):
            self.begun = now
        elif now - self.begun > LATE and not self.told:
            self.told = True
            _log.warning(
                "no worker has started yet: the cluster is busy, or has no machine with %d CPUs "
                "and %g GPUs",
                self.office.threads,
                self.office.gpus,
            )

    def _died(self, hand: _Hand, why: str, detail: str) -> None:
        """Another worker in its place; what it had in hand is suspect, what it had not begun is
        not.
        """
        self.office._end(hand)
        self.hands[self.hands.index(hand)] = self.office._hired()
        self.deaths += 1
        if self.deaths >= IN_A_ROW + 2 * len(self.hands):
            raise InputError(
                f"{self.deaths} workers in a row died with nothing done ({detail}): give them "
                "more memory, a smaller chunk or "
                "batch size, or look at the model's own code."
            )
        jobs = [job for _, job, _ in hand.queue]
        self.again.extendleft(reversed(jobs[1:]))
        if jobs:
            _log.info(
                "%s, samples %d to %d: %s (%s)",
                jobs[0].task.key,
                jobs[0].task.start,
                jobs[0].task.stop - 1,
                why,
                detail,
            )
            self._suspect(jobs[0], why)

    def _suspect(self, job: _Job, why: str) -> None:
        """A task that somebody died of: again, in halves, or not any more."""
        task = job.task
        job.deaths = job.deaths + 1
        halves = divisible(task)
        if job.deaths < (1 if job.whole is not None and halves else DEATHS):
            self.again.appendleft(job)
        elif halves:
            middle = (task.start + task.stop) // 2
            self._cut(job, [(task.start, middle), (middle, task.stop)])
        else:
            self._give_up(job, f"{why} twice")

    def _cut(self, job: _Job, bounds: Sequence[tuple[int, int]]) -> None:
        whole = job.whole or _Whole(
            job.task, (*self.worker.samples(job.task), self._read(job.task)[2]), 1
        )
        whole.open += len(bounds) - 1
        self.again.extendleft(_Job(cut(job.task, *bound), 0, whole) for bound in reversed(bounds))

    def _give_up(self, job: _Job, reason: str) -> None:
        task = job.task
        x, y, ids = self._read(task)
        if task.kind == "clean":  # a pass is enough to kill: nothing else needs to try it
            self.office._deadly |= dict.fromkeys(range(task.start, task.stop), reason)
        _log.warning("%s: nothing is known about sample %s: %s", task.key, ", ".join(ids), reason)
        self._done(
            job, nothing(task, x, y, ids, self.worker.mu[task.start : task.stop], reason), 0.0
        )

    def _around(self, task: Task, deadly: Sequence[int]) -> None:
        """A task without the samples that no model pass survives."""
        job = _Job(task)
        if not divisible(task):
            self._give_up(job, f"sample {deadly[0]}: {self.office._deadly[deadly[0]]}")
            return
        edges = sorted({task.start, task.stop, *deadly, *(i + 1 for i in deadly)})
        self._cut(job, list(pairwise(edges)))
        for piece in [
            piece for piece in self.again if piece.task.start in deadly and piece.whole is not None
        ]:
            self.again.remove(piece)
            self._give_up(piece, self.office._deadly[piece.task.start])


def _line(error: BaseException) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


# ---- What travels
# --------------------------------------------------------------------------------------------------


def _packed(worker: Worker) -> _Recipe:
    """Everything that a worker needs; a model that cannot be sent is refused."""
    data = worker.data
    try:
        model = _pickled(worker.model)
    except Exception as error:
        raise InputError(
            f"the model cannot be sent to another process ({type(error).__name__}: "
            f"{_line(error)}): keep open files, locks and "
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


# ---- The cluster
# --------------------------------------------------------------------------------------------------


class Link:
    """A connection to a Ray cluster: to the one at `address`, to the one this process is connected
    to, or to a new one.

    A new one belongs to this process, has `cpus` CPUs (default: those of the machine), listens on
    loopback only and ends with `close`, with its folder of temporary files. `ray` is the module.
    """

    def __init__(self, address: str | None = None, cpus: int | None = None) -> None:
        self._kept: dict[str, str | None] = {}
        self._folder: str | None = None
        self._term: Any = None
        if "ray" not in sys.modules:
            self._set({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if address is None else {})
        try:
            self.ray: Any = importlib.import_module("ray")
        except ImportError as error:
            self._restore()
            raise InputError(
                f'a cluster needs the package ray ({error}): pip install "wassail[ray]".'
            ) from None
        self.mine = False
        if self.ray.is_initialized():
            self._restore()
            if address not in (None, "auto", self.ray.get_runtime_context().gcs_address):
                raise InputError(
                    f"this process is connected to another cluster than {address!r}: "
                    "ray.shutdown() first."
                )
            return
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        self._before: Any = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:
                self._start(cpus, quiet)
            else:
                self.ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            self._restore()
            self._remove()
            what = (
                "start a cluster on this machine"
                if address is None
                else f"reach a cluster at {address!r}"
            )
            raise InputError(
                f"ray could not {what} ({_line(error)}): see what ray status says."
            ) from error
        self.mine = True
        self._listen()
        atexit.register(self.close)  # before ray's own end, for it would leave its files

    def _start(self, cpus: int | None, quiet: Mapping[str, Any]) -> None:
        # Ray gives its machine's address to every server it starts, even if told 127.0.0.1, except
        # on systems where it supports one machine only. That is what is wanted here: then all of
        # them bind to loopback.
        constants: Any = importlib.import_module("ray._private.ray_constants")
        was = constants.ENABLE_RAY_CLUSTER
        self._set({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"})
        self._set({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_TOKEN": _password()})
        self._kept.setdefault(
            "RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE")
        )  # ray turns it on, for us too
        logging.getLogger("ray").setLevel(logging.ERROR)  # and would tell
        constants.ENABLE_RAY_CLUSTER = False
        node: Any = importlib.import_module("ray._private.node").Node
        served = getattr(
            node, "start_api_server", None
        )  # the dashboard's process, which ray starts even without dashboard
        if served is not None:
            node.start_api_server = _no_server
        self._folder = _short_folder()
        try:
            self.ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=self._folder,
                **quiet,
            )
        finally:
            constants.ENABLE_RAY_CLUSTER = was
            if served is not None:
                node.start_api_server = served
        found = str(self.ray.util.get_node_ip_address())
        if not found.startswith("127.") and found != "::1":
            self.ray.shutdown()
            raise RuntimeError(f"it would listen on {found}, which the network can reach")

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self.mine:
            self.mine = False
            atexit.unregister(self.close)
            self.ray.shutdown()
            self._remove()
            if self._term is not None:
                with contextlib.suppress(ValueError):  # not in the main thread
                    signal.signal(signal.SIGTERM, self._term)
        self._restore()

    def _listen(self) -> None:
        """Take SIGTERM back from ray, which prints the stack of its machine code: end as
        `sys.exit` does.
        """
        was = self._before
        handler: Any = _leave if was in (None, signal.SIG_DFL) else was
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, handler)
            self._term = signal.SIG_DFL if was is None else was

    def _remove(self) -> None:
        """Remove the files of a cluster that was started here; its last processes may still be
        writing.
        """
        for _ in range(20 if self._folder else 0):
            shutil.rmtree(str(self._folder), ignore_errors=True)
            if not os.path.exists(str(self._folder)):
                break
            time.sleep(0.1)
        self._folder = None

    def _set(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._kept.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _restore(self) -> None:
        for name, value in self._kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._kept = {}


def _leave(number: int, frame: Any) -> None:
    """What SIGTERM does while there is a cluster: everything that is open is closed."""
    sys.exit(128 + number)


def _no_server(node: Any, **_: Any) -> None:
    """In place of the start of the dashboard's process."""
    node._webui_url = ""


def _short_folder() -> str:
    """A new folder for ray's sockets, whose paths may have hardly a hundred characters."""
    place = "/tmp" if os.access("/tmp", os.W_OK) else None
    return tempfile.mkdtemp(prefix="wassail-ray-", dir=place)


@cache
def _password() -> str:
    """One for the life of this process, in its environment only: ray would write one to the
    home directory, for all to read.
    """
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
