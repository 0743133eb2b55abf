"""What work on a bracket promised and kept, and how its progress is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from wassail.progress import progress_bar


class BracketReporter:
    """Tells the caller, or a bar, how far the bracket is.

    A bar shows how much of the first gap is closed.
    """

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.first = 0.0
        self.bar: Any = None
        self.tick: Callable[[float], None] = lambda share: None

    def __enter__(self) -> Callable[[float, float], None]:
        if callable(self.progress):
            return self.progress  # type: ignore[no-any-return]
        self.bar = progress_bar(self.progress, "closing the bracket")
        self.tick = self.bar.__enter__()
        return self._told

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(*error)

    def _told(self, certified: float, attacked: float) -> None:
        gap = attacked - certified
        self.first = max(self.first, gap)
        self.tick(1 - gap / self.first if self.first > 0 else 1.0)


class ExpectedGain:
    """What pieces of work of one kind promised, and what they kept of it.

    It begins with a piece as large as the first one, that kept what is usual.
    """

    def __init__(self, usual: float) -> None:
        self.usual = usual
        self.promised = 0.0
        self.kept = 0.0

    def add(self, promised: Tensor, kept: Tensor) -> None:
        """One more piece."""
        if not self.promised:
            self.promised = float(promised.sum())
            self.kept = self.usual * self.promised
        self.promised += float(promised.sum())
        self.kept += float(kept.sum())

    @property
    def share(self) -> float:
        """Of what is promised, so much is kept."""
        return self.kept / self.promised if self.promised > 0 else self.usual


def kept_share(records: Mapping[int, ExpectedGain], kind: int, usual: float) -> float:
    """The share that work of a kind keeps; before the first piece, that of the kind before it."""
    known = [records[k].share for k in range(kind + 1) if k in records]
    return known[-1] if known else usual
