"""One ascent for slopes and multipliers: Adam, and the best so far.

Bounds are valid for all slopes in their range and all multipliers >= 0, so nothing is proved here:
an ascent only looks for good ones. Every row is a problem of its own, and its steps do not depend
on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wassail.ties import quiet


class Ascent:
    """Adam (Kingma & Ba 2015) on tensors with R rows, and the values that were best in each row.

    The steps are written out instead of `torch.optim.Adam`: gradients that are 0 but for rounding
    count as 0 (`ties.quiet`), and each row keeps its own best.

    Args:
        unknowns: where it begins, `(R, ...)` each.
        fresh: weight of a new gradient in the mean of its squares. Default: 0.01.
        floor: the size below which a gradient takes shorter steps. Default: 1e-12.
        apart: whether the tensors have different units, so that what is noise is told from the
            other gradients of the same tensor only. Default: False.
    """

    def __init__(
        self,
        unknowns: Sequence[Tensor],
        fresh: float = 0.01,
        floor: float = 1e-12,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self.fresh = fresh
        self.floor = floor
        self.taken = 0
        self.first = [torch.zeros_like(v) for v in unknowns]
        self.second = [torch.zeros_like(v) for v in unknowns]
        rows = unknowns[0] if unknowns else torch.zeros(0)
        self.best = rows.new_full((len(rows),), -math.inf, dtype=torch.float64)
        self.kept = [v.detach().clone() for v in unknowns]
        self.rows: Tensor | None = None  # places of the rows that still move; None: all

    def take(self, rows: Tensor) -> None:
        """Go on with some rows of those that still move. What the others reached stays in `best`
        and `kept`.

        Args:
            rows: their places `(r,)` among the rows that move now.
        """
        self.rows = rows if self.rows is None else self.rows[rows]
        self.first = [v[rows] for v in self.first]
        self.second = [v[rows] for v in self.second]

    def keep(self, value: Tensor, values: Sequence[Tensor]) -> None:
        """Keep the values of the rows that are better than before.

        Args:
            value: what each row that moves reached, `(R,)`; larger is better.
            values: with which values, `(R, ...)` each.
        """
        if self.rows is not None:
            better = (value > self.best[self.rows]).nonzero()[:, 0]
            places = self.rows[better]
            self.best[places] = value[better]
            for new, old in zip(values, self.kept):
                old[places] = new.detach()[better]
            return
        better = value > self.best
        self.best = torch.where(better, value, self.best)
        self.kept = [
            torch.where(better.reshape(-1, *[1] * (new.ndim - 1)), new.detach(), old)
            for new, old in zip(values, self.kept)
        ]

    def moves(self, pulls: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The next step along the gradients, in units of the rate; None where nothing pulls.

        pulls: gradients, as `torch.autograd.grad` returns them.
        """
        self.taken += 1
        found: list[Tensor | None] = []
        heard = [quiet([g])[0] for g in pulls] if self.apart else quiet(pulls)
        for first, second, g in zip(self.first, self.second, heard):
            if g is None:
                found.append(None)
                continue
            first.mul_(0.9).add_(g, alpha=0.1)
            second.mul_(1 - self.fresh).addcmul_(g, g, value=self.fresh)
            size = (second / (1 - (1 - self.fresh) ** self.taken)).sqrt_().add_(self.floor)
            found.append((first / (1 - 0.9**self.taken)).div_(size))
        return found
