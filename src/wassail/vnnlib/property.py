"""A property of a network: boxes of inputs, and what must not happen on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from wassail.errors import InputError
from wassail.vnnlib.answer import Answer
from wassail.vnnlib.clauses import Clause, Part, UnsafeSet
from wassail.vnnlib.decide import decide
from wassail.vnnlib.reader import read_property


@dataclass(frozen=True, eq=False)
class Property(UnsafeSet):
    """What must not happen: on a box of inputs, all inequalities of a clause at once.

    A point of a part's box where one of its clauses holds is a counterexample ("sat"); without one
    in any part the network has the property ("unsat"). Numbers of a file are rounded to float64.

    >>> import torch, wassail as ws
    >>> low, high = torch.zeros(2), torch.ones(2)
    >>> safe = ws.Property.within(low, high, rows=[[1.0, -1.0]], offsets=[3.0])
    >>> print(safe)
    1 box of 2 inputs, 2 outputs, 1 clause

    Args:
        inputs: how many numbers a network takes, in row-major order.
        outputs: how many it gives.
        parts: boxes with their clauses.
        names: of the tensors of input and output in a file of version 2.0, else None.
    """

    @classmethod
    def read(cls, path: str | Path) -> Property:
        """The property in a VNN-LIB file, version 1.0 or 2.0, also compressed (`.gz`).

        Args:
            path: of the file.
        """
        found = read_property(path)
        return cls(found.inputs, found.outputs, found.parts, found.names)

    @classmethod
    def within(
        cls,
        low: Tensor,
        high: Tensor,
        rows: list[list[float]] | Tensor,
        offsets: list[float] | Tensor,
    ) -> Property:
        """`rows f(x) <= offsets` everywhere in one box, or there is a counterexample: one clause
        for each row.

        Args:
            low: lower ends, `(n,)`.
            high: upper ends, `(n,)`.
            rows: `(M, K)`.
            offsets: `(M,)`.
        """
        low, high, rows, offsets = (
            torch.as_tensor(v, dtype=torch.float64).detach() for v in (low, high, rows, offsets)
        )
        if low.ndim != 1 or low.shape != high.shape or not bool((low <= high).all()):
            raise InputError("low and high are no box: give two vectors, low nowhere above high.")
        if rows.ndim != 2 or offsets.shape != rows.shape[:1]:
            raise InputError("rows and offsets do not fit: give (M, K) and (M,).")
        strict = torch.ones(1, dtype=torch.bool)
        clauses = tuple(Clause(-row[None], -c[None], strict) for row, c in zip(rows, offsets))
        return cls(len(low), rows.shape[1], (Part(low, high, clauses),))

    def decide(
        self,
        model: nn.Module | str | Path,
        *,
        time_limit: float | None = None,
        effort: float | None = None,
        seed: int = 0,
    ) -> Answer:
        """Whether a network has the property: "unsat" (it has), "sat" with a counterexample, or
        "unknown" with the reason.

        "unsat" is about the function of real numbers that the network's weights define, rounding
        errors of the proof included. A counterexample was evaluated in float64, in the model's own
        arithmetic, and by onnxruntime if the network is a file and onnxruntime is installed.

        Args:
            model: a module from a batch to outputs `(n, K)`, or an ONNX file (also `.gz`).
            time_limit: seconds; default None.
            effort: about how many seconds of one core the proof may take, counted in operations, so
                that the answer does not depend on the machine; default None: no limit with a time
                limit, else 60.
            seed: int, keys the random starts of the attack; default 0.

        Returns:
            `Answer`: `status`, `point`, `outputs`, `reason`, `seconds`.
        """
        return decide(self, model, time_limit=time_limit, effort=effort, seed=seed)
