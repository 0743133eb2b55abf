"""Worker processes of this machine for one hard problem: the open nodes of a branch and bound are
shared among them (`frontier`).
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Self

import torch

from wassail.errors import InputError


class Processes:
    """Worker processes on this machine, with so many threads each. One that dies is replaced. Also
    a context manager.

    They start when they are needed, and import the main script as `multiprocessing` does: it needs
    the usual guard.
    """

    def __init__(self, workers: int, threads: int = 1) -> None:
        if workers < 1 or threads < 1:
            raise InputError(
                f"{workers} workers with {threads} threads each cannot work: give at least 1 of "
                "both."
            )
        self.workers = workers
        self.threads = threads
        # One process per pool: a pool ends with the first process that dies. A server process that
        # has imported torch once makes new ones at once, and unlike a fork of this process it has
        # no threads to break.
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context(
            "forkserver" if "forkserver" in methods else "spawn"
        )
        if "forkserver" in methods:
            self._context.set_forkserver_preload(["__main__", "wassail.certificates.prove.radii"])
        self._pools: list[ProcessPoolExecutor | None] = [None] * workers
        self._last: list[Future[Any] | None] = [None] * workers

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call it in a process that is free, else after what the first of them is doing."""
        free = (i for i, last in enumerate(self._last) if last is None or last.done())
        i = next(free, 0)
        pool = self._pools[i] or self._hired()
        try:
            future = pool.submit(function, *args)
        except BrokenProcessPool:
            pool = self._hired()
            future = pool.submit(function, *args)
        self._pools[i], self._last[i] = pool, future
        return future

    def _hired(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, self._context, _begin, (self.threads,))

    def close(self) -> None:
        """End them; what they are doing is dropped."""
        for pool in self._pools:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self._pools = [None] * self.workers
        self._last = [None] * self.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _begin(threads: int) -> None:
    """In a new process: Ctrl-C is for the one that was started by hand."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
