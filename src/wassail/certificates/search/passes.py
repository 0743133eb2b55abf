"""The cut neurons and entries in one backward pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.bounds.lines import Arithmetic
from wassail.certificates.bounds.rows import add_to, flattened, unflattened
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.search.cuts import Cuts
from wassail.certificates.search.intervals import Forms, Held, Intervals
from wassail.certificates.search.sheets import pull_curve
from wassail.rounding import FAINT, UNIT


class Pass:
    """The smooth neurons in one backward pass."""

    def __init__(self, intervals: Intervals, held: Held, cuts: Cuts, forms: Forms | None) -> None:
        self.intervals = intervals
        self.held = held
        self.cuts = cuts
        self.forms = forms
        self.size = torch.zeros_like(cuts.up)
        self.scores: dict[int, Tensor] = {}
        self.gains: dict[int, Tensor] = {}  # of nodes that curves read

    @classmethod
    def make(
        cls, intervals: Intervals, held: Held | None, cuts: Cuts, kind: Arithmetic
    ) -> Pass | None:
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

    def curve(
        self,
        kind: Arithmetic,
        i: int,
        w: Tensor,
        owner: Tensor,
        weight: dict[int, Tensor],
        scored: bool,
    ) -> Tensor:
        """Adds to `weight` the coefficients of a curve's inputs; what the bound grows by."""
        sheet = self.held.sheets.get(i)
        sheets = self.intervals.sheets
        if scored and i in sheets.surfaces:
            for j, gain in sheets.gains(i, w, owner, sheet):
                add_to(self.gains, j, gain)
        if sheet is not None and kind is self.intervals.sweep.fast:
            self._measure(kind, i, w.detach(), owner)
        return pull_curve(kind, i, self.intervals.node(i).inputs, w, owner, weight, sheet)

    def _measure(self, kind: Arithmetic, i: int, w: Tensor, owner: Tensor) -> None:
        """How large multipliers of a curve's cut entries may have to be: the coefficients that its
        planes on the whole ball give count too, since those on a part may be flat.
        """
        parts = kind.planes[i].plane.transpose(w, owner)
        for j, part in zip(self.intervals.node(i).inputs, parts):
            if j in self.held.entries:
                flat = F.pad(flattened(part), (0, 1))
                self.size = self.size + flat.gather(1, self.held.entries[j]).abs()

    def push(self, kind: Arithmetic, j: int, w: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients of node j, and the constant of the bound, with the multipliers of its
        cut entries.
        """
        place = self.held.entries.get(j)
        if place is None or self.forms is None:
            return w, constant
        shape = self.intervals.node(j).shape
        flat = F.pad(flattened(w), (0, 1))
        self.size = self.size + flat.detach().gather(1, place).abs()
        mine = place < flat.shape[1] - 1
        under = torch.where(mine, self.forms.under, 0.0)
        over = torch.where(mine, self.forms.over, 0.0)
        flat = flat.scatter_add(1, place, under - over)[:, :-1]
        cuts = self.cuts
        held = self.held
        added = under * (held.c - cuts.low).to(w.dtype) + over * (cuts.high - held.c).to(w.dtype)
        if kind is self.intervals.sweep.exact:
            # of the differences, the products and their sum; and of the entry itself
            ends = held.c.abs() + torch.maximum(cuts.low.abs(), cuts.high.abs())
            rounded = (cuts.width + 64) * UNIT * (ends + held.most + FAINT)
            added = added + (under + over) * (held.error + rounded) + FAINT * mine.double()
        return laid_out(unflattened(flat, shape)), constant + added.double().sum(1)

    def in_order(self) -> list[Tensor]:
        """The scores in the order of the columns; 0 for nodes that do not matter."""
        kinds = ((self.scores, self.intervals.parts), (self.gains, self.intervals.sheets.parts))
        known = [v for scores, _ in kinds for v in scores.values()]
        if not known:
            return []
        return [
            scores[i] if i in scores else known[0].new_zeros(len(known[0]), part.stop - part.start)
            for scores, parts in kinds
            for i, part in parts.items()
        ]
