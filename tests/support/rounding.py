"""Other rounding modes of the processor, and exact arithmetic to compare with.

A bound that is sound in floating point does not hang on luck: it also holds if every operation is
rounded down, or every operation up. Then the errors of a long sum have one sign and grow with the
number of its terms, as its proof allows, where they would cancel otherwise. Directed rounding is
off by less than 2^-52 where rounding to nearest is off by 2^-53, so this is for terms that count
2^-52 an operation.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEL = {"nearest": 0, "down": 0x400, "up": 0x800, "zero": 0xC00}
ARM = {"nearest": 0, "up": 0x400000, "down": 0x800000, "zero": 0xC00000}
FLAGS = INTEL if platform.machine().lower() in ("x86_64", "amd64", "i686") else ARM
MODES = ("down", "up", "nearest")

Array = np.ndarray[Any, np.dtype[np.longdouble]]


@contextmanager
def rounded(mode: str) -> Iterator[None]:
    """Every operation of this thread is rounded to nearest, "down", "up", or toward "zero"."""
    library = ctypes.CDLL(None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the mode belongs to one thread
    assert library.fesetround(FLAGS[mode]) == 0
    try:
        yield
    finally:
        assert library.fesetround(FLAGS["nearest"]) == 0
        torch.set_num_threads(threads)


@contextmanager
def serial() -> Iterator[None]:
    """`Tensor.sum` and `Tensor.mean` over one axis, or of a vector, add their terms one after the
    other, as a kernel may: the longest chain of roundings.
    """
    fast = Tensor.sum
    fast_mean = Tensor.mean

    def slow(values: Tensor, dim: Any = None, *rest: Any, **more: Any) -> Tensor:
        dim = 0 if dim is None and values.ndim == 1 else dim
        if not isinstance(dim, int) or rest or more or not values.shape[dim]:
            return fast(values, *(() if dim is None else (dim,)), *rest, **more)
        return values.cumsum(dim).select(dim, -1)

    def slow_mean(values: Tensor, dim: Any = None, *rest: Any, **more: Any) -> Tensor:
        if not isinstance(dim, int) or rest or more:
            return fast_mean(values, *(() if dim is None else (dim,)), *rest, **more)
        return slow(values, dim) / values.shape[dim]

    Tensor.sum = slow  # type: ignore[assignment,method-assign]
    Tensor.mean = slow_mean  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.sum = fast  # type: ignore[method-assign]
        Tensor.mean = fast_mean  # type: ignore[method-assign]


def long(values: Tensor | float) -> Array:
    """The same numbers with 64 bits each: sums and products of a few hundred of them are exact
    to 2^-55.
    """
    exact = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    return exact.detach().double().numpy().astype(np.longdouble)


def fractions(values: Tensor) -> list[Any]:
    """The same numbers as fractions, in nested lists."""
    if values.ndim == 0:
        return Fraction(float(values))  # type: ignore[return-value]
    return [fractions(row) for row in values]
