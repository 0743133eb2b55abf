"""Intervals that subproblems fix for the inputs of smooth neurons."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class Cuts:
    """Of R subproblems, up to D neurons each whose input lies in an interval; where the network is.

    column `(R, D)`: which neuron, by its place among all smooth neurons of the network, -1 for
    none; low, high: its interval, in float64; up, down: slopes of its two lines, in float32; under,
    over: multipliers >= 0 of `v >= low` and `v <= high`, in float32.
    """

    column: Tensor
    low: Tensor
    high: Tensor
    up: Tensor
    down: Tensor
    under: Tensor
    over: Tensor

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Cuts:
        """Of subproblems without any."""
        column = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        ends = (column.double(), column.double())
        return cls(column, *ends, *(column.float() for _ in range(4)))

    def __len__(self) -> int:
        return len(self.column)

    @property
    def width(self) -> int:
        """D, the most neurons that a subproblem may have."""
        return self.column.shape[1]

    def take(self, rows: Tensor) -> Cuts:
        """Those of some subproblems, by indices where the network is."""
        if not self.width:
            return Cuts.none(len(rows), self.column.device)
        return Cuts(*(getattr(self, f.name)[rows] for f in fields(self)))

    def padded(self, width: int) -> Cuts:
        """The same with room for so many neurons."""
        more = width - self.width
        if more <= 0:
            return self
        column = F.pad(self.column, (0, more), value=-1)
        rest = (F.pad(getattr(self, f.name), (0, more)) for f in fields(self)[1:])
        return Cuts(column, *rest)

    def trimmed(self, width: int) -> Cuts:
        """The first so many slots."""
        return Cuts(*(getattr(self, f.name)[:, :width] for f in fields(self)))

    def join(self, other: Cuts) -> Cuts:
        """These, then the others."""
        width = max(self.width, other.width)
        if not width:
            return Cuts.none(len(self) + len(other), self.column.device)
        one = self.padded(width)
        two = other.padded(width)
        return Cuts(*(torch.cat([getattr(one, f.name), getattr(two, f.name)]) for f in fields(one)))

    def narrowed(self, slot: Tensor, chosen: Tensor, values: dict[str, Tensor]) -> Cuts:
        """The chosen subproblems with other values in a slot: slot `(R,)`, chosen bool `(R,)`,
        values `(R,)` by name.
        """
        changed = {}
        for name, new in values.items():
            old = getattr(self, name)
            here = torch.where(chosen, new.to(old.dtype), old.gather(1, slot[:, None])[:, 0])
            changed[name] = old.scatter(1, slot[:, None], here[:, None])
        return replace(self, **changed)
