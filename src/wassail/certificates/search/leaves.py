"""What a proof that ran out of subproblems has left to prove, for the next ball of the same sample.

The leaves of a branch and bound cover a ball. Those that are proved are proved on every smaller
ball around the same sample too, so that only the open ones are left there. A sign that was chosen
for a neuron which the smaller ball decides is left out: the subproblem grows, and what is proved of
it holds all the more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.search.cuts import Cuts

KEPT_NUMBERS = 2**17  # numbers of a kind that are kept of a sample


@dataclass(frozen=True, eq=False)
class Leaves:
    """L open subproblems of one sample over U neurons, where the network is.

    rival `(L,)`, on the CPU; places: of each node with such neurons, their places in it, in the
    order of the columns; signs `(L, U)` int8, slopes and multipliers `(L, U)` float32; cuts: of
    smooth neurons, whose intervals stay what they are on every ball.
    """

    rival: Tensor
    places: Mapping[int, Tensor]
    sign: Tensor
    alpha: Tensor
    beta: Tensor
    cuts: Cuts

    @property
    def numbers(self) -> int:
        """How many are kept of a kind."""
        return max(self.sign.numel(), self.cuts.column.numel())

    def on(self, node: int, places: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Which of some neurons of a node have columns here, bool `(u,)`, and those columns.

        Args:
            node: the node.
            places: of the neurons, `(u,)`; `size` stands for none.
            size: of the node.
        """
        start = 0
        for other, own in self.places.items():
            if other == node:
                column = torch.full((size + 1,), -1, dtype=torch.int64, device=places.device)
                column[own] = torch.arange(start, start + len(own), device=places.device)
                found = column[places]
                return found >= 0, found[found >= 0]
            start += len(own)
        none = torch.zeros(len(places), dtype=torch.bool, device=places.device)
        return none, torch.zeros(0, dtype=torch.int64, device=places.device)


class Forest:
    """The open leaves of samples, each with the radius of the ball that they are left of."""

    def __init__(self) -> None:
        self.trees: dict[int, tuple[float, Leaves]] = {}

    def within(self, sample: int, radius: float) -> Leaves | None:
        """What is left of a ball, if a larger one, or the same, was tried before."""
        known = self.trees.get(sample)
        return known[1] if known is not None and radius <= known[0] else None

    def keep(self, sample: int, radius: float, leaves: Leaves | None) -> None:
        """Keep what is left of a ball, unless it is too much."""
        if leaves is not None and leaves.numbers <= KEPT_NUMBERS:
            self.trees[sample] = (radius, leaves)
