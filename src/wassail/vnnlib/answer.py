"""What was decided about a property, and counterexamples as the competitions write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wassail.vnnlib.clauses import UnsafeSet


@dataclass(frozen=True, eq=False)
class Answer:
    """The verdict on a property.

    Args:
        status: "sat", "unsat" or "unknown".
        reason: why it is unknown, else "".
        point: the counterexample, flat, float64 `(n,)`; None without one.
        outputs: there `(K,)`, of the runtime named last in `checked`.
        checked: which evaluations the counterexample holds in: "float64", "float32",
            "onnxruntime".
        by: what decided: "attack", "crown", "input split", "neuron split", or "" .
        seconds: of the clock.
        info: how much work it took.
    """

    status: str
    reason: str = ""
    point: Tensor | None = None
    outputs: Tensor | None = None
    checked: tuple[str, ...] = ()
    by: str = ""
    seconds: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    def counterexample(self, property_: UnsafeSet) -> str:
        """The counterexample in the format of the competitions; "" without one.

        property_: what it is a counterexample of.
        """
        if self.point is None or self.outputs is None:
            return ""
        names = property_.names or ("X", "Y")
        lines = [
            f"({name}_{i} {value!r})"
            for name, values in zip(names, (self.point, self.outputs))
            for i, value in enumerate(values.tolist())
        ]
        return "(" + "\n".join(lines) + ")"

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}" if self.reason else self.status
