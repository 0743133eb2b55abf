"""Subproblems of a branch and bound on margins, and what an ascent may change in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from wassail.certificates.search.intervals import Cuts, SmoothBackward

TIE = 2.0**-13  # scores that differ by less, relative to the largest, are equal
HOSTED = ("owner", "rival", "depth", "bound", "pick")  # what is kept on the CPU
KEPT_NUMBERS = 2**17  # numbers of a kind that are kept of a sample


@dataclass(frozen=True, eq=False)
class Subproblems:
    """R subproblems of a tree.

    On the CPU, where the next ones are chosen: owner `(R,)`, the place of its sample in the tree;
    rival `(R,)`, of the row `e_rival - e_y`; depth `(R,)`, how many neurons are fixed; bound
    `(R,)`, on the margin, from below; pick `(R, look)`, the neurons to split on next, the best
    first, -1 where none is left, from U on for smooth ones. Where the network is: signs (1 on, -1
    off, 0 free), slopes and multipliers of the U ReLUs, `(R, U)` each; the intervals of smooth
    neurons.
    """

    owner: Tensor
    rival: Tensor
    depth: Tensor
    bound: Tensor
    pick: Tensor
    sign: Tensor
    alpha: Tensor
    beta: Tensor
    cuts: Cuts

    def take(self, rows: Tensor) -> Subproblems:
        """Some of them, by indices on the CPU."""
        there = rows.to(self.sign.device, non_blocking=True)
        few = {name: getattr(self, name)[rows] for name in HOSTED}
        many = {name: getattr(self, name)[there] for name in ("sign", "alpha", "beta")}
        return Subproblems(**few, **many, cuts=self.cuts.take(there))

    def where(self, mask: Tensor) -> Subproblems:
        """Some of them, by a mask on the CPU."""
        return self if bool(mask.all()) else self.take(mask.nonzero()[:, 0])

    def unproved(self) -> Subproblems:
        """Those whose bound is not above 0, NaN among them."""
        return self.where(~(self.bound > 0))

    def join(self, other: Subproblems) -> Subproblems:
        """These, then the others."""
        tensors = [f.name for f in fields(self) if f.name != "cuts"]
        parts = {k: torch.cat([getattr(self, k), getattr(other, k)]) for k in tensors}
        return Subproblems(**parts, cuts=self.cuts.join(other.cuts))

    def __len__(self) -> int:
        return len(self.rival)


@dataclass(frozen=True, eq=False)
class Margin:
    """Lower bounds on the margins of R subproblems.

    value `(R,)`; scores: of each node, what the relaxation of its unstable neurons adds, `(R, u)`,
    if asked; sizes: of each node, their coefficients; smooth: the same for smooth neurons.
    """

    value: Tensor
    scores: Mapping[int, Tensor]
    sizes: Mapping[int, Tensor]
    smooth: SmoothBackward | None


@dataclass(frozen=True, eq=False)
class Unknowns:
    """What an ascent may change: slopes and multipliers of ReLUs, if there are any, then slopes up
    and down and multipliers under and over of cut neurons, if there are any.
    """

    values: list[Tensor]
    relus: bool
    cut: bool

    @classmethod
    def of(cls, subproblems: Subproblems) -> Unknowns:
        """Where subproblems begin."""
        cuts = subproblems.cuts
        relus = bool(subproblems.sign.shape[1])
        values = [subproblems.alpha, subproblems.beta] if relus else []
        values += [cuts.up, cuts.down, cuts.under, cuts.over] if cuts.width else []
        return cls([v.clone() for v in values], relus, bool(cuts.width))

    def leaves(self) -> Unknowns:
        """The same, to take gradients of."""
        return replace(self, values=[v.detach().requires_grad_(True) for v in self.values])

    def parts(self, subproblems: Subproblems) -> tuple[Tensor, Tensor, Cuts]:
        """Slopes and multipliers of ReLUs, and the cuts."""
        alpha, beta = self.values[:2] if self.relus else (subproblems.alpha, subproblems.beta)
        if not self.cut:
            return alpha, beta, subproblems.cuts
        up, down, under, over = self.values[-4:]
        return alpha, beta, replace(subproblems.cuts, up=up, down=down, under=under, over=over)

    def scales(self, sizes: Tensor, smooth: SmoothBackward | None) -> list[Tensor]:
        """Units of the steps: 1 for the slopes of ReLUs, the width of the range of `f'` for those
        of cut neurons, and for multipliers the coefficients that they stand beside.

        Args:
            sizes: coefficients of the ReLUs, `(R, U)`.
            smooth: the smooth neurons in the pass that began the ascent.
        """
        found = [torch.ones_like(sizes), sizes.abs().clamp(min=1e-6)] if self.relus else []
        if self.cut and smooth is not None:
            wide = smooth.held.steepness
            beside = (smooth.size * smooth.held.steepest).clamp(min=1e-6)
            found += [wide, wide, beside, beside]
        return found

    def moved(
        self,
        moves: list[Tensor | None],
        scales: list[Tensor],
        rate: float,
        sign: Tensor,
        slope: Tensor,
    ) -> Unknowns:
        """After a step; multipliers are at least 0, and slopes of ReLUs between the two there
        are.
        """
        values = [
            v.detach() if move is None else v.detach() + rate * scale * move
            for v, move, scale in zip(self.values, moves, scales)
        ]
        if self.relus:
            values[0] = torch.minimum(torch.maximum(values[0], slope), torch.ones_like(slope))
            values[1] = values[1].clamp(min=0) * (sign != 0)
        if self.cut:
            values[-2:] = [v.clamp(min=0) for v in values[-2:]]
        return replace(self, values=values)


def largest(score: Tensor, count: int) -> Tensor:
    """The places of the largest scores of each row, `(R, count)`, the first of those that are
    equal up to the rounding of float32; -1 where none is above 0.
    """
    if not score.shape[1]:
        return score.new_full((len(score), count), -1, dtype=torch.int64)
    most = score.amax(1, keepdim=True)
    level = (score / torch.where(most > 0, TIE * most, 1.0)).round()
    found = []
    for _ in range(count):
        place = level.argmax(1, keepdim=True)
        value = score.gather(1, place)
        taken = level.gather(1, place) > -math.inf
        found.append(torch.where((value > 0) & taken, place, -1))
        level = level.scatter(1, place, -math.inf)
    return torch.cat(found, 1)


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

    def within(self, sample: int, radius: float, most: int) -> Leaves | None:
        """What is left of a ball, if a larger one, or the same, was tried before, and if to bound
        that again leaves room for as many subproblems: else it is better to begin anew.
        """
        known, left = self.trees.get(sample, (-math.inf, None))
        fits = left is not None and radius <= known and 2 * len(left.rival) <= most
        return left if fits else None

    def keep(self, sample: int, radius: float, leaves: Leaves | None) -> None:
        """Keep what is left of a ball, unless it is too much."""
        if leaves is not None and leaves.numbers <= KEPT_NUMBERS:
            self.trees[sample] = (radius, leaves)
