"""Limits of a stage, in seconds or in work: where they are looked at, and what happens then.

Without a time limit nothing here looks at the clock: what may take long has a budget of work
instead, operations counted by the sizes of what is computed, so that a result depends on its input
only. Every loop of a certificate calls `check` between two pieces of work. A stage that reaches its
limit stops with `Late`; whoever called it keeps what was proved before, and says that it was cut if
that was the clock.

A time limit is kept to within a tenth, or a second, so the pieces between two looks are short: a
fraction of a second of one core. Where a piece is charged as a whole, `look` stands inside it: it
asks the clock only, so that a result without a time limit cannot depend on where it stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

SECOND = 3e9  # operations that count as a second: about what one core does
STEP = 1e6  # operations that the least piece of work costs, whatever its size


class Late(Exception):
    """A limit is reached in the middle of a stage."""


@dataclass
class _Limit:
    """end: of `now`; work: operations left; outer: the limit around this one, which
    is charged too.
    """

    end: float = math.inf
    work: float = math.inf
    outer: _Limit | None = None


# The default is never charged: it has no outer limit and no end.
_LIMIT: ContextVar[_Limit] = ContextVar("limit", default=_Limit())  # noqa: B039


def now() -> float:
    """Seconds on the clock of all limits: the one place that reads it."""
    return time.monotonic()


def seconds_left() -> float:
    """Seconds until the limit, never below 0; inf without one."""
    end = _LIMIT.get().end
    return math.inf if end == math.inf else max(0.0, end - now())


def work_left() -> float:
    """Operations until the limit; inf without one."""
    return max(0.0, _LIMIT.get().work)


def out_of_time() -> bool:
    """Whether the clock, not the budget of work, says stop."""
    return seconds_left() == 0.0


def late() -> bool:
    """Whether a limit is reached."""
    return work_left() == 0.0 or out_of_time()


def check() -> None:
    """Stop the stage if a limit is reached."""
    if late():
        raise Late


def look() -> None:
    """Stop the stage if the time is up, in the middle of a piece of work."""
    if seconds_left() == 0.0:
        raise Late


def spend(work: float) -> None:
    """Charge operations to the limit, and to those around it."""
    limit: _Limit | None = _LIMIT.get()
    while limit is not None:
        limit.work -= STEP + work
        limit = limit.outer


@contextmanager
def unlimited() -> Iterator[None]:
    """What is done in any case, such as a last look at an answer: short, and with no limit."""
    token = _LIMIT.set(_Limit())
    try:
        yield
    finally:
        _LIMIT.reset(token)


@contextmanager
def timed(seconds: float | None = None) -> Iterator[None]:
    """What the clock alone may stop, whatever the budget of work says.

    Args:
        seconds: None or inf for no more than there are.
    """
    outer = _LIMIT.get()
    token = _LIMIT.set(_Limit(_end(outer, seconds), math.inf, outer))
    try:
        yield
    finally:
        _LIMIT.reset(token)


@contextmanager
def limited(seconds: float | None = None, work: float = math.inf) -> Iterator[None]:
    """Limit a stage; a limit around it still holds.

    Args:
        seconds: None or inf for none.
        work: operations, inf for none.
    """
    outer = _LIMIT.get()
    token = _LIMIT.set(_Limit(_end(outer, seconds), min(work, outer.work), outer))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def _end(outer: _Limit, seconds: float | None) -> float:
    """When so many seconds are over, but no later than the limit around."""
    if seconds is None or seconds == math.inf:
        return outer.end
    return min(outer.end, now() + seconds)
