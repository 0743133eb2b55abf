"""An interval that contains a number, with how it was computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wassail.errors import InputError
from wassail.notebook import card, pairs
from wassail.records import Record
from wassail.writing import rounded_down, rounded_up

EXACT = 1e-9  # relative gap below which a bracket counts as closed


def below(lower: float, upper: float, what: str, tolerance: float = 1e-9) -> float:
    """`lower`, clipped to `upper` where it is above by rounding only; more than that is a
    contradiction, and an error.

    An evaluated point above a certified bound is a bug in one of them, which clipping would hide.
    """
    if lower > upper + tolerance * max(abs(lower), abs(upper)) + 1e-12:
        raise AssertionError(
            f"{what}: an evaluated {lower!r} is above the certified {upper!r}; please report "
            "this bug."
        )
    return min(lower, upper)


@dataclass(frozen=True, eq=False, repr=False)
class Bound(Record):
    """`lower <= value <= upper`: the lower side comes with a witness, the upper side is rounded
    outward.

    Args:
        lower: float, a value that is attained, or a lower bound.
        upper: float, never below the true value.
        method: what gave the upper side.
        witness: the point `(n,)` where the lower side is attained; default None.
        info: norms, domain, outputs, nodes, seconds, seed and versions.
    """

    lower: float
    upper: float
    method: str
    witness: Tensor | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side in ("lower", "upper"):
            object.__setattr__(self, side, float(getattr(self, side)))
        if not self.lower <= self.upper:
            raise InputError(
                f"a bound needs lower <= upper, not [{self.lower}, {self.upper}]: this is a bug, "
                "please report it."
            )

    @property
    def exact(self) -> bool:
        """Whether the bracket is closed: a relative gap of at most 1e-9."""
        known = math.isfinite(self.upper) and self.upper - self.lower <= EXACT * max(
            abs(self.upper), abs(self.lower)
        )
        return known or self.upper == self.lower

    @property
    def gap(self) -> float:
        """The relative width, `(upper - lower) / |upper|`; 0 when closed, inf when nothing is
        known above.
        """
        if math.isinf(self.upper):
            return math.inf
        return (self.upper - self.lower) / abs(self.upper) if self.upper != self.lower else 0.0

    def meet(self, other: Bound) -> Bound:
        """The intersection of two bounds on the same number.

        Args:
            other: `Bound` on the same number.
        """
        low = max(self, other, key=lambda b: b.lower)
        high = min(self, other, key=lambda b: b.upper)
        return Bound(low.lower, high.upper, high.method, low.witness, {**low.info, **high.info})

    def __repr__(self) -> str:
        value = (
            f"{self.upper:.10g}, exact"
            if self.exact
            else f"[{rounded_down(self.lower, 8)}, {rounded_up(self.upper, 8)}]"
        )
        return f"Bound({value}, by {self.method})"

    def _repr_html_(self) -> str:
        rows = [
            ("at least", rounded_down(self.lower, 10)),
            ("at most", rounded_up(self.upper, 10)),
        ]
        return card(f"A bound by {self.method}{', exact' if self.exact else ''}", pairs(rows))
