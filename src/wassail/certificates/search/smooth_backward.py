"""The smooth neurons in one backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from wassail.certificates.relax.lines import Arithmetic
from wassail.certificates.search.cuts import Cuts
from wassail.certificates.search.intervals import Forms, Held, Intervals


class SmoothBackward:
    """The smooth neurons in one backward pass."""

    def __init__(self, intervals: Intervals, held: Held, cuts: Cuts, forms: Forms | None) -> None:
        self.intervals = intervals
        self.held = held
        self.cuts = cuts
        self.forms = forms
        self.size = torch.zeros_like(cuts.up)
        self.scores: dict[int, Tensor] = {}

    @classmethod
    def make(
        cls, intervals: Intervals, held: Held | None, cuts: Cuts, kind: Arithmetic
    ) -> SmoothBackward | None:
        """None where there are no smooth neurons."""
        if held is None:
            return None
        forms = intervals.forms(held, cuts, kind.dtype) if cuts.width else None
        return cls(intervals, held, cuts, forms)

    def pull(self, kind: Arithmetic, i: int, w: Tensor, scored: bool) -> tuple[Tensor, Tensor]:
        """The coefficients of node i's input, and what the bound grows by."""
        flat, added, chosen = self.intervals.pull(kind, i, w, self.held, self.cuts, self.forms)
        self.size = self.size + chosen.detach().abs()
        if scored:
            self.scores[i] = self.intervals.scores(i, w, self.held, self.cuts)
        return flat, added

    def in_order(self) -> list[Tensor]:
        """The scores in the order of the columns; 0 for nodes that do not matter."""
        if not self.scores:
            return []
        known = next(iter(self.scores.values()))
        return [
            self.scores[i]
            if i in self.scores
            else known.new_zeros(len(known), part.stop - part.start)
            for i, part in self.intervals.parts.items()
        ]
