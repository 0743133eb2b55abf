"""Branch and bound on boxes of inputs: whether linear inequalities of the outputs can hold.

For networks with few inputs the input is split, not neurons: the bounds of all neurons get better
at once. A clause of inequalities `g_m(x) <= 0` is excluded on a box as soon as one of them is.
Where none is, the linear bounds `g_m >= base + <a, d>` still cut the box: a point with
`g_m <= 0` lies in `<a, d> <= -base`, so the box shrinks to what the inequalities of some clause
leave of it (Clip-and-Verify, Zhou et al. 2025). Then the side with the largest smear is halved: its
width times the slope of the worst bound and the bound on the Jacobian along it, each relative to
the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.jacobian import adjoint
from wassail.certificates.relax.ranges import boxed
from wassail.certificates.relax.rows import rounded_up
from wassail.certificates.search.frontier import Frontier, Table, TensorRows
from wassail.rounding import FLOOR, UNIT

WIDTH = 256  # boxes split at once
ROOM = 2_000_000  # values of the nodes of all boxes that are bounded at once
FLAT = 1e-3  # share of the steepest slope that a side without one is given
POLISHED = 20  # inputs above which the bounds of open boxes get steps on their slopes
HALF = 0.5  # of the volume: a box that its inequalities cut to this is bounded again, not halved
AGAIN = -1  # its axis
DEAR = 10**7  # numbers of the Jacobians of all boxes that are bounded at once
FAR = 1e100  # a slope that is not known to be finite


@dataclass(frozen=True, eq=False)
class Boxes(TensorRows):
    """R boxes: low, high `(R, n)`; bound `(R,)`, how near the worst clause may come to holding,
    not above 0 for an open box; axis `(R,)`, the side to halve, or `AGAIN`.
    """

    low: Tensor
    high: Tensor
    bound: Tensor
    axis: Tensor


class BoxSearch(Frontier[Boxes]):
    """The boxes on which no clause is excluded yet.

    graph: with outputs `(0, -g_1, ..., -g_R)`; clauses: of each, the places m of its inequalities,
    from 1 on; accept: given points `(P, n)` where a clause seems to hold, one that is a
    counterexample, or None. found: that point; stuck: whether a box could not be halved any more;
    count: boxes that were bounded.
    """

    def __init__(
        self,
        graph: Graph,
        low: Tensor,
        high: Tensor,
        clauses: Sequence[Sequence[int]],
        accept: Callable[[Tensor], Tensor | None],
    ) -> None:
        self.graph = graph
        self.member = torch.zeros(len(clauses), graph.outputs - 1, dtype=torch.bool)
        for k, places in enumerate(clauses):
            self.member[k, torch.tensor(places) - 1] = True
        self.accept = accept
        # Steps on the slopes pay where many sides make splits dear.
        self.polish = "open" if low.shape[1] > POLISHED else "none"
        self.found: Tensor | None = None
        self.stuck = False
        self.count = 0
        size = sum(node.size for node in graph.nodes)
        self.width = max(1, min(WIDTH, ROOM // size // 2))
        self.roots = [part.clone() for part in (low, high)]
        none = torch.zeros(0, low.shape[1], dtype=torch.float64)
        axis = torch.zeros(0, dtype=torch.int64)
        self.open: Table[Boxes] = Table(Boxes(none, none, none[:, 0], axis))

    def begin(self) -> None:
        """Bound the boxes that it begins with."""
        while len(self.roots[0]) and self.found is None:
            low, high = (part[: 2 * self.width] for part in self.roots)
            self.open.add(self._bounded(low, high))
            self.roots = [part[2 * self.width :] for part in self.roots]

    @property
    def done(self) -> bool:
        """Whether every clause is excluded on every box."""
        left = len(self.roots[0]) + len(self.open)
        return not left and not self.stuck and self.found is None

    @property
    def over(self) -> bool:
        """Whether a counterexample is known, or a limit is reached."""
        return self.found is not None or clock.late()

    def step(self) -> None:
        """Halve the boxes with the least bounds."""
        with self.taken(self.open.first(self.width)) as boxes:
            low, high = self._halves(boxes)
            if len(low):
                self.open.add(self._bounded(low, high))

    def _halves(self, boxes: Boxes) -> tuple[Tensor, Tensor]:
        """Two children for each box, one for a box that was cut enough; those that are as thin as
        numbers allow are given up.
        """
        again = boxes.axis == AGAIN
        alone = boxes.low[again], boxes.high[again]
        boxes = boxes.take((~again).nonzero()[:, 0])
        rows = torch.arange(len(boxes))
        bottom = boxes.low[rows, boxes.axis]
        top = boxes.high[rows, boxes.axis]
        middle = bottom + (top - bottom) / 2
        thick = (bottom < middle) & (middle < top)
        self.stuck |= not bool(thick.all())
        left, right = boxes.high.clone(), boxes.low.clone()
        left[rows, boxes.axis] = middle
        right[rows, boxes.axis] = middle
        low = torch.cat([boxes.low[thick], right[thick], alone[0]])
        return low, torch.cat([left[thick], boxes.high[thick], alone[1]])

    def _bounded(self, low: Tensor, high: Tensor) -> Boxes:
        """What the bounds leave of some boxes; counterexamples among their points are noted."""
        x = low + (high - low) / 2
        sweep = Sweep(self.graph, box_balls(low, high)).run()
        label = torch.zeros(len(x), dtype=torch.int64, device=self.graph.device)
        lower, _, a = (part[:, 1:] for part in margins(sweep, label, self.polish))
        clock.spend(sweep.rows * self.graph.operations)
        self.count += len(x)
        # A clause is as far from holding as its best inequality says.
        value = torch.where(self.member, lower[:, None], -math.inf).amax(2)
        bound, worst = value.min(1)
        rows = torch.arange(len(x))
        row = torch.where(self.member[worst], lower, -math.inf).argmax(1)
        slope = a[rows, row]
        self._look(x, torch.where(slope > 0, low, high), sweep.centre[len(self.graph.nodes) - 1])
        cut_low, cut_high = self.clipped(low, high, lower, a)
        left = ~(bound > 0) & (cut_low <= cut_high).all(1)
        width = high - low
        rest = (cut_high - cut_low) / torch.where(width > 0, width, 1.0)
        shrunk = torch.where(width > 0, rest, 1.0).prod(1)  # of the volume
        low, high = cut_low[left], cut_high[left]
        if not len(low):
            return Boxes(low, high, bound[left], torch.zeros(0, dtype=torch.int64))
        steep = _share(slope.abs()[left]) + self._steepness(sweep, worst, left.nonzero()[:, 0])
        axis = ((high - low) * (steep + FLAT)).argmax(1)
        axis = torch.where(shrunk[left] <= HALF, AGAIN, axis)
        return Boxes(low, high, bound[left], axis)

    def _steepness(self, sweep: Sweep, worst: Tensor, boxes: Tensor) -> Tensor | float:
        """How steep the inequalities of the worst clause of some boxes can be along each input,
        relative to the steepest, `(R, n)`: bounds on their Jacobian, added up. 0 where that would
        take more memory than the bounds themselves.
        """
        widest = max(node.size for node in self.graph.nodes)
        if len(boxes) * self.graph.outputs * widest > DEAR:
            return 0.0
        spans = {j: (low[boxes], high[boxes]) for j, (low, high) in sweep.proved().items()}
        rows = torch.eye(self.graph.outputs, dtype=torch.float64)[1:]
        low, high = adjoint(self.graph, spans, rows)
        steep = torch.maximum(-low, high).nan_to_num(posinf=FAR).clamp(max=FAR)
        return _share((steep * self.member[worst[boxes]][:, :, None]).sum(1))

    def _look(self, x: Tensor, corner: Tensor, outputs: Tensor) -> None:
        """Whether a clause holds in the middle of a box, or where its bound is least."""
        if self.found is not None:
            return
        both = torch.cat([outputs, self.graph.logits(corner)])
        over = (both[:, :1] - both[:, 1:])[:, None]
        excess = torch.where(self.member, over, -math.inf).amax(2).amin(1)
        near = (excess <= 0).nonzero()[:, 0]
        if len(near):
            near = near[excess[near].argsort(stable=True)]
            self.found = self.accept(torch.cat([x, corner])[near])

    def clipped(self, low: Tensor, high: Tensor, lower: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest boxes around what the inequalities of each clause leave, rounded outward:
        lower `(R, M)` and a `(R, M, n)` for each inequality.

        `base + <a, d> <= 0` with `lower` below the least of the left side gives, side by side,
        `a_i (d_i - d_i at the least) <= -lower`.
        """
        size = a.abs()
        room = (-lower).clamp(min=0)[:, :, None]  # (R, M, 1)
        reach = torch.where(size > 0, room / torch.where(size > 0, size, 1.0), math.inf)
        # A reach that matters is at most the side: a quotient and three sums are off by less.
        slack = (8 * UNIT * (low.abs() + high.abs()) + FLOOR[torch.float64])[:, None]
        top = torch.where(a > 0, low[:, None] + reach + slack, math.inf)
        bottom = torch.where(a < 0, high[:, None] - reach - slack, -math.inf)
        lows, highs = [], []
        for member in self.member:
            own_low = torch.maximum(bottom[:, member].amax(1), low)
            own_high = torch.minimum(top[:, member].amin(1), high)
            empty = ((own_low > own_high).any(1) | (lower[:, member] > 0).any(1))[:, None]
            lows.append(torch.where(empty, math.inf, own_low))
            highs.append(torch.where(empty, -math.inf, own_high))
        return torch.stack(lows).amin(0), torch.stack(highs).amax(0)


def box_balls(low: Tensor, high: Tensor) -> Balls:
    """Boxes `(N, n)` around their middles, the room to the walls rounded up."""
    x = low + (high - low) / 2
    sides = (torch.where(side > 0, rounded_up(side), 0.0) for side in (x - low, high - x))
    return boxed(x, *sides)


def _share(values: Tensor) -> Tensor:
    """Rows of numbers >= 0 relative to their largest."""
    most = values.amax(1, keepdim=True)
    return values / torch.where(most > 0, most, 1.0)
