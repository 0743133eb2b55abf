"""The best so far of every sample: the one tracker of the attacks that climb a loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.device import write


class Best:
    """For each of m samples the point with the largest value so far. The nearest flip is kept
    elsewhere, by `minimal.tracker.Tracker`.

    Args:
        points: where the search begins, `(m, *shape)`; copied.
        value: what is reached there, `(m,)`; default None, nothing yet.
    """

    def __init__(self, points: Tensor, value: Tensor | None = None) -> None:
        self.points = points.clone()
        if value is None:
            value = points.new_full((len(points),), -math.inf)
        self.value = value.clone()

    def offer(
        self,
        points: Tensor,
        value: Tensor,
        rows: Tensor | None = None,
        sure: Tensor | None = None,
    ) -> Tensor:
        """Keep the points that are better than those before; which of them are, bool `(k,)`.

        Args:
            points: candidates, `(k, *shape)`.
            value: what they reach, `(k,)`; larger is better.
            rows: the samples they belong to, `(k,)`, none twice; default None, all in order.
            sure: which to keep whatever they reach, bool `(k,)`; default None, none.
        """
        kind = torch.promote_types(self.value.dtype, value.dtype)
        self.value = self.value.to(kind)
        value = value.to(kind)
        better = value > (self.value if rows is None else self.value[rows])
        if sure is not None:
            better = sure | better
        write(self.value, better, value, rows)
        write(self.points, better, points, rows)
        return better

    def __getitem__(self, keep: Tensor) -> Best:
        """The same for some of the samples, as copies."""
        found = Best.__new__(Best)
        found.points = self.points[keep]
        found.value = self.value[keep]
        return found
