"""Branch and bound on boxes of inputs: whether linear inequalities of the outputs can hold.

For networks with few inputs the input is split, not neurons: the bounds of all neurons get better
at once. A clause of inequalities `g_m(x) <= 0` is excluded on a box as soon as one of them is, or
a combination of two. Where none is, the linear bounds `g_m >= base + <a, d>` still cut the box: a
point with `g_m <= 0` lies in `<a, d> <= -base`, so the box shrinks to what the inequalities of some
clause leave of it (Clip-and-Verify, Zhou et al. 2025), again and again. Then the side with the
largest smear is halved, of the inequality that is nearest to excluding the worst clause: its width
times the slope of the linear bound and the bound on the gradient along it, each relative to the
largest.
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
from wassail.certificates.relax.rows import Span, rounded_up
from wassail.certificates.search.frontier import Frontier, Table, TensorRows
from wassail.certificates.search.products import ProductSweep
from wassail.rounding import FLOOR, UNIT

WIDTH = 2048  # boxes cut at once
ROOM = 2_000_000  # values of the nodes of all boxes that are bounded at once
FLAT = 1e-3  # share of the steepest slope that a side without one is given
POLISHED = 20  # inputs above which open boxes get steps on their slopes, where there are products
HALF = 0.5  # of the volume: a box that its inequalities cut to this is bounded again, not halved
ROUNDS = 3  # of clipping with the same planes
PAIRED = 512  # numbers of the planes of two inequalities each, of one box, at most
DEAR = 10**7  # numbers of the Jacobians of all boxes that are bounded at once
# Operations of a batch of boxes beside its passes, measured: of every node, and of every node for
# each box.
OVERHEAD = 2e6
EACH = 5e3
FAR = 1e100  # a slope that is not known to be finite


@dataclass(frozen=True, eq=False)
class Boxes(TensorRows):
    """R boxes: low, high `(R, n)`; bound `(R,)`, how near the worst clause may come to holding,
    not above 0 for an open box; axis `(R,)`, the side to halve; again `(R,)`, whether it is bounded
    once more as it is.
    """

    low: Tensor
    high: Tensor
    bound: Tensor
    axis: Tensor
    again: Tensor


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
        # Steps on the slopes of ReLUs save most of the boxes; they do little for the planes of
        # products, and pay there only where many sides make splits dear.
        flat = not graph.curved
        self.polish = "open" if flat or low.shape[1] > POLISHED else "none"
        self.found: Tensor | None = None
        self.stuck = False
        self.count = 0
        size = sum(node.size for node in graph.nodes)
        self.width = max(1, min(WIDTH, ROOM // size // 2))
        self.roots = [part.clone() for part in (low, high)]
        none = torch.zeros(0, low.shape[1], dtype=torch.float64)
        self.open: Table[Boxes] = Table(
            Boxes(none, none, none[:, 0], none[:, 0].long(), none[:, 0].bool())
        )

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
        """Cut the boxes with the least bounds."""
        with self.taken(self.open.first(self.width)) as boxes:
            low, high = self._parts(boxes)
            if len(low):
                self.open.add(self._bounded(low, high))

    def _parts(self, boxes: Boxes) -> Span:
        """Two halves of each box, itself if it was clipped enough; those that are as thin as
        numbers allow are given up.
        """
        whole, boxes = boxes.take(boxes.again), boxes.take(~boxes.again)
        rows = torch.arange(len(boxes))
        bottom, top = boxes.low[rows, boxes.axis], boxes.high[rows, boxes.axis]
        middle = bottom + (top - bottom) / 2
        thick = (bottom < middle) & (middle < top)
        self.stuck |= not bool(thick.all())
        left, right = boxes.high.clone(), boxes.low.clone()
        left[rows, boxes.axis] = middle
        right[rows, boxes.axis] = middle
        low = torch.cat([boxes.low[thick], right[thick], whole.low])
        return low, torch.cat([left[thick], boxes.high[thick], whole.high])

    def _bounded(self, low: Tensor, high: Tensor) -> Boxes:
        """What the bounds leave of some boxes; counterexamples among their points are noted."""
        x = low + (high - low) / 2
        sweep = ProductSweep(self.graph, box_balls(low, high)).run()
        label = torch.zeros(len(x), dtype=torch.int64, device=self.graph.device)
        lower, base, a = (part[:, 1:] for part in margins(sweep, label, self.polish))
        beside = len(self.graph.nodes) * (OVERHEAD + EACH * len(x))
        clock.spend(sweep.rows * self.graph.operations + beside)
        self.count += len(x)
        outputs = sweep.centre[len(self.graph.nodes) - 1]
        # Inequalities have units of their own: how far the bound is above 0, or below, relative to
        # its distance from the middle's value. Below -1 the middle satisfies the inequality.
        gap = (outputs[:, :1] - outputs[:, 1:] - lower).clamp(min=FLOOR[torch.float64])
        share = (lower / gap).nan_to_num(nan=-math.inf)
        # A clause is as far from holding as its best inequality says.
        value, best = torch.where(self.member, share[:, None], -math.inf).max(2)
        bound, worst = value.min(1)
        rows = torch.arange(len(x))
        slope = a[rows, best[rows, worst]]
        self._look(x, torch.where(slope > 0, low, high), outputs)
        cut_low, cut_high = self.clipped(low, high, HalfSpaces.of(x, low, high, lower, base, a))
        left = (cut_low <= cut_high).all(1)
        width = high - low
        rest = (cut_high - cut_low) / torch.where(width > 0, width, 1.0)
        shrunk = torch.where(width > 0, rest, 1.0).prod(1)  # of the volume
        some = left.nonzero()[:, 0]
        low, high, bound = cut_low[some], cut_high[some], bound[some]
        axis = some
        if len(some):
            steep = _share(slope.abs()[some]) + self._steepness(sweep, best[rows, worst], some)
            axis = ((high - low) * (steep + FLAT)).argmax(1)
        return Boxes(low, high, bound, axis, shrunk[some] <= HALF)

    def _steepness(self, sweep: Sweep, row: Tensor, boxes: Tensor) -> Tensor | float:
        """How steep one inequality of each of some boxes can be along each input, relative to the
        steepest, `(R, n)`: bounds on its gradient. 0 where that would take more memory than the
        bounds themselves.
        """
        widest = max(node.size for node in self.graph.nodes)
        if len(boxes) * widest > DEAR:
            return 0.0
        spans = {j: (low[boxes], high[boxes]) for j, (low, high) in sweep.proved().items()}
        rows = torch.eye(self.graph.outputs, dtype=torch.float64)[1 + row[boxes]]
        low, high = adjoint(self.graph, spans, rows[:, None])
        steep = torch.maximum(-low, high)[:, 0]
        return _share(steep.nan_to_num(nan=FAR, posinf=FAR).clamp(max=FAR))

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

    def clipped(self, low: Tensor, high: Tensor, planes: HalfSpaces) -> Span:
        """The smallest boxes around what the inequalities of each clause leave, rounded outward;
        empty where no clause can hold.
        """
        lows, highs = torch.full_like(low, math.inf), torch.full_like(high, -math.inf)
        for member in self.member:
            places = member.nonzero()[:, 0]
            rows = (~(planes.lower[:, places] > 0).any(1)).nonzero()[:, 0]
            if len(rows):
                own = planes.take(rows, places)
                bottom, top = own.clipped(low[rows], high[rows])
                lows[rows] = torch.minimum(lows[rows], bottom)
                highs[rows] = torch.maximum(highs[rows], top)
        return lows, highs


@dataclass(frozen=True, eq=False)
class HalfSpaces:
    """Linear bounds `g_m(x + d) >= base + <a, d>` of M inequalities on R boxes around x `(R, n)`.

    lower: at least this on all of the box; size: of the numbers that are added up for that; `(R,
    M)`, a `(R, M, n)`.
    """

    x: Tensor
    lower: Tensor
    base: Tensor
    a: Tensor
    size: Tensor

    @classmethod
    def of(
        cls, x: Tensor, low: Tensor, high: Tensor, lower: Tensor, base: Tensor, a: Tensor
    ) -> HalfSpaces:
        """On all of the boxes."""
        half = torch.maximum(x - low, high - x)[:, None]
        return cls(x, lower, base, a, base.abs() + (a.abs() * half).sum(2))

    def take(self, rows: Tensor, places: Tensor) -> HalfSpaces:
        """Some inequalities of some boxes."""
        x, parts = self.x[rows], (self.lower, self.base, self.a, self.size)
        return HalfSpaces(x, *(part[rows][:, places] for part in parts))

    def clipped(self, low: Tensor, high: Tensor) -> Span:
        """The smallest boxes, inside of these, around the points where all inequalities hold:
        rounded outward, and (inf, -inf) where there are none.

        `base + <a, d> <= 0`, with `lower` below the least of the left side, gives side by side
        `a_i (d_i - d_i at the least) <= -lower`. A box that got smaller is looked at again.
        """
        # A reach that matters is at most the side: a quotient and three sums are off by less.
        slack = 8 * UNIT * (low.abs() + high.abs()) + FLOOR[torch.float64]
        lower = self.lower
        empty = torch.zeros(len(low), dtype=torch.bool)
        for again in range(ROUNDS):
            if again:
                lower = self._least(low, high)
            lower, a = self._paired(low, high, lower)
            size = a.abs()
            room = (-lower).clamp(min=0)[:, :, None]  # (R, M, 1)
            reach = torch.where(size > 0, room / torch.where(size > 0, size, 1.0), math.inf)
            reach = torch.where(reach.isnan(), math.inf, reach)  # after an overflow
            top = torch.where(a > 0, (low + slack)[:, None] + reach, math.inf).amin(1)
            bottom = torch.where(a < 0, (high - slack)[:, None] - reach, -math.inf).amax(1)
            low, high = torch.maximum(bottom, low), torch.minimum(top, high)
            empty |= (low > high).any(1) | (lower > 0).any(1)
        none = empty[:, None]
        return torch.where(none, math.inf, low), torch.where(none, -math.inf, high)

    def _least(self, low: Tensor, high: Tensor) -> Tensor:
        """The least of every plane on a box inside of its own, rounded down, `(R, M)`."""
        sides = self.a * (low - self.x)[:, None], self.a * (high - self.x)[:, None]
        return self.base + torch.minimum(*sides).sum(2) - self._slack * self.size

    @property
    def _slack(self) -> float:
        """What rounding takes from the least of a plane or of two, of its size: two products, a
        sum of n terms, a difference for each.
        """
        return 2 * UNIT * (self.a.shape[2] + 16)

    def _paired(self, low: Tensor, high: Tensor, lower: Tensor) -> Span:
        """The planes, and each with the best one: `(1 - t) g_best + t g_m <= 0` holds as well, and
        its least is largest where a coefficient changes its sign, or at an end. Least `(R, 2 M)`
        and coefficients.
        """
        count, n = self.a.shape[1:]
        if count == 1 or count * n * n > PAIRED:
            return lower, self.a
        rows = torch.arange(len(lower))
        best = lower.argmax(1)
        a, base, size = (part[rows, best][:, None] for part in (self.a, self.base, self.size))
        apart = a - self.a
        t = torch.where(apart != 0, a / torch.where(apart != 0, apart, 1.0), 0.0).clamp(0, 1)
        t = t.nan_to_num()
        both = (1 - t)[..., None] * a[:, :, None] + t[..., None] * self.a[:, :, None]
        sides = (both * (side - self.x)[:, None, None] for side in (low, high))
        least = torch.minimum(*sides).sum(3) + (1 - t) * base[..., None] + t * self.base[..., None]
        least = least - self._slack * ((1 - t) * size[..., None] + t * self.size[..., None])
        found, place = least.max(2)
        place = place[..., None, None].expand(-1, -1, 1, n)
        joint = both.gather(2, place)[:, :, 0]
        return torch.cat([lower, found], 1), torch.cat([self.a, joint], 1)


def box_balls(low: Tensor, high: Tensor) -> Balls:
    """Boxes `(N, n)` around their middles, the room to the walls rounded up."""
    x = low + (high - low) / 2
    sides = (torch.where(side > 0, rounded_up(side), 0.0) for side in (x - low, high - x))
    return boxed(x, *sides)


def _share(values: Tensor) -> Tensor:
    """Rows of numbers >= 0 relative to their largest."""
    return values / values.amax(1, keepdim=True).clamp(min=FLOOR[torch.float64])
