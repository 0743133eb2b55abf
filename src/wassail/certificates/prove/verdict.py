"""What is known of samples at one radius each: proved, falsified, wrong or open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wassail.notebook import card, pairs
from wassail.records import Record
from wassail.threat import Domain, box_text

STATUSES = ("proved", "falsified", "wrong", "open")


@dataclass(frozen=True, eq=False, repr=False)
class Verdicts(Record):
    """Verdicts on N samples, each at a radius: `verify` makes them.

    Args:
        status: of each sample "proved" (nothing in the closed ball flips), "falsified" (a point of
            it does: `points`), "wrong" (the sample itself is misclassified), or "open".
        radius: the radii, float64 `(N,)`.
        points: `(N, *shape)`: the flip where a sample is falsified, else the sample.
        reasons: of each sample why it is open, "" where it is not.
        proved_by: of each sample the way it was proved, "" where it was not.
        norm: ground norm r.
        domain: box `(low, high)`, or None for R^n.
        arithmetic: whether proofs hold for the network as it is "executed" or for the "exact"
            function.
        info: effort, operations and seconds spent, passes, versions.
    """

    status: tuple[str, ...]
    radius: Tensor
    points: Tensor
    reasons: tuple[str, ...]
    proved_by: tuple[str, ...]
    norm: float
    domain: Domain
    arithmetic: str = "exact"
    info: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.status)

    @property
    def proved(self) -> Tensor:
        """Which samples are proved, bool `(N,)`."""
        return self._are("proved")

    @property
    def falsified(self) -> Tensor:
        """Which samples have a flip in their ball, bool `(N,)`."""
        return self._are("falsified")

    @property
    def counts(self) -> dict[str, int]:
        """How many samples have each status."""
        return {name: self.status.count(name) for name in STATUSES}

    def _are(self, name: str) -> Tensor:
        return torch.tensor([own == name for own in self.status], dtype=torch.bool)

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        where = f"l{self.norm:g}, {box_text(self.domain)}"
        return f"Verdicts({len(self)} samples, {where}: {told}; {self.arithmetic} arithmetic)"

    def _repr_html_(self) -> str:
        rows = [("threat", f"l{self.norm:g}, {box_text(self.domain)}"), *self.counts.items()]
        return card(f"Verdicts on {len(self)} samples", pairs(rows))
