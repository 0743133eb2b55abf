"""Boxes of inputs, and inequalities of outputs that must not hold on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Clause:
    """Inequalities that hold together at an unsafe point: `rows f(x) <= offsets`.

    Args:
        rows: float64 `(M, K)`.
        offsets: float64 `(M,)`.
        strict: bool `(M,)`, which are `<`.
    """

    rows: Tensor
    offsets: Tensor
    strict: Tensor

    def excess(self, outputs: Tensor) -> Tensor:
        """How far outputs are from being unsafe, `(n, K) -> (n,)`: the largest `rows f - offsets`,
        -inf without inequalities.
        """
        over = outputs.double() @ self.rows.T - self.offsets
        none = over.new_full((len(over), 1), -torch.inf)
        return torch.cat([none, over], 1).amax(1)

    def holds(self, outputs: Tensor) -> Tensor:
        """Whether outputs are unsafe, `(n, K) -> (n,)` bool."""
        over = outputs.double() @ self.rows.T - self.offsets
        return torch.where(self.strict, over < 0, over <= 0).all(1)

    @property
    def key(self) -> tuple[bytes, ...]:
        """What two clauses have in common that are the same."""
        parts = (self.rows, self.offsets, self.strict)
        return tuple(part.numpy().tobytes() for part in parts)


@dataclass(frozen=True, eq=False)
class Part:
    """One box of inputs, with the clauses that must not hold on it.

    Args:
        low: float64 `(n,)`.
        high: float64 `(n,)`, nowhere below `low`.
        clauses: any of them is enough for a point to be unsafe.
    """

    low: Tensor
    high: Tensor
    clauses: tuple[Clause, ...]


@dataclass(frozen=True, eq=False)
class UnsafeSet:
    """Points of boxes at which all inequalities of a clause hold.

    Args:
        inputs: how many numbers a network takes, in row-major order.
        outputs: how many it gives.
        parts: boxes with their clauses.
        names: of the tensors of input and output in a file of version 2.0, else None.
    """

    inputs: int
    outputs: int
    parts: tuple[Part, ...]
    names: tuple[str, str] | None = None

    @cached_property
    def groups(self) -> list[list[Part]]:
        """The parts, those with the same clauses together."""
        found: dict[tuple[tuple[bytes, ...], ...], list[Part]] = {}
        for part in self.parts:
            found.setdefault(tuple(clause.key for clause in part.clauses), []).append(part)
        return list(found.values())

    def violated(self, points: Tensor, outputs: Tensor) -> Tensor:
        """Which points are counterexamples, `(m, n), (m, K) -> (m,)` bool.

        points: inputs, flat, in float64; outputs: of a network there.
        """
        found = torch.zeros(len(points), dtype=torch.bool)
        for part in self.parts:
            inside = ((part.low <= points) & (points <= part.high)).all(1)
            if inside.any():
                unsafe = torch.stack([clause.holds(outputs) for clause in part.clauses]).any(0)
                found |= inside & unsafe
        return found

    def __str__(self) -> str:
        boxes = len(self.parts)
        clauses = sum(len(part.clauses) for part in self.parts)
        return (
            f"{boxes} box{'es' * (boxes != 1)} of {self.inputs} inputs, {self.outputs} outputs, "
            f"{clauses} clause{'s' * (clauses != 1)}"
        )
