"""A clock that goes with the work that is done, whatever the machine and its load.

Every operation of torch, every call of a function and every call of a solver costs what its size
says. So a limit in these seconds ends at the same place each time, and so does what follows it.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import scipy.optimize
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from wassail.certificates import clock

SECOND = 1e9  # operations
CALL = 1e3  # operations that a call of any function costs
OPERATION = 1e4  # and one of torch
CUBES = ("cholesky", "eigh", "eigvals", "svd", "solve", "triangular", "qr", "lu_", "inv")


class Work(TorchDispatchMode):
    """done: operations so far; looks: how often the clock was asked; longest: the most seconds
    between two looks, and where the second of them was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done = 0.0
        self.looks = 0
        self.last = 0.0
        self.longest = 0.0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.done += OPERATION + _operations(func, args, kwargs or {}, out)
        return out

    def seconds(self) -> float:
        """What the clock shows."""
        return self.done / SECOND

    def now(self) -> float:
        """A look at the clock."""
        seconds = self.seconds()
        self.looks += 1
        if seconds - self.last > self.longest:
            self.longest = seconds - self.last
            self.where = _where()
        self.last = seconds
        return seconds

    def count(self, frame: FrameType, event: str, arg: Any) -> None:
        """A call, of Python or of C: what `sys.setprofile` is given."""
        if event in ("call", "c_call"):
            self.done += CALL


def _operations(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Operations of one call of torch."""
    given = [v for v in args if isinstance(v, Tensor)]
    made = [v for v in (out if isinstance(out, tuple | list) else (out,)) if isinstance(v, Tensor)]
    name = func.__name__
    if func._overloadpacket in flop_registry:
        return float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)) / 2
    if any(word in name for word in CUBES):
        return max((v.numel() * min(v.shape[-2:]) for v in given if v.ndim > 1), default=0)
    return float(sum(v.numel() for v in made))


def _where() -> str:
    """The line of the library that looks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith("clock.py"):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """The clock of all limits is one of work inside."""
    work = Work()

    def priced(solve: Callable[..., Any]) -> Callable[..., Any]:
        def solved(*args: Any, **options: Any) -> Any:
            # The solver's own limit is in seconds of the wall: here the work decides.
            options.get("options", {}).pop("time_limit", None)
            work.done += 1e5 + 10 * math.prod(args[1].shape if len(args) > 1 else (1,))
            return solve(*args, **options)

        return solved

    with monkeypatch.context() as patch:
        for name in ("linprog", "nnls"):
            patch.setattr(scipy.optimize, name, priced(getattr(scipy.optimize, name)))
        patch.setattr(clock, "now", work.now)
        before = sys.getprofile()
        with work:
            sys.setprofile(work.count)
            try:
                yield work
            finally:
                sys.setprofile(before)
