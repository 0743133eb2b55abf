"""What all nearest-flip engines share: the best flip seen, the budget of passes, the shortening at
the end.

An engine is a function `engine(tracker, tick, **options)` that proposes points. Every point it has
evaluated goes through `Tracker.logits` or `Tracker.tape`, which count the pass and keep the nearest
flip ever seen; `Tracker.affordable` says which samples have passes left. So no engine can lose a
flip.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from wassail.device import host_waits, rows_to_compute, take, write
from wassail.geometry import Walls, clip, column, project, vector_norm, walls
from wassail.losses import predict
from wassail.network import Network, Tape
from wassail.threat import Domain, box_at, boxes_of
from wassail.transport.flips import Flips


class Part:
    """Some samples of a tracker, with what the rounds ask of them again and again, picked out once.

    rows `(m,)`; x `(m, *shape)`; y `(m,)`; scale: of the logits at the samples, `(m,)`; distinct:
    whether the rows rise, so that no sample is there twice (not asked, and False, where the host
    would have to wait).
    """

    def __init__(self, tracker: Tracker, rows: Tensor) -> None:
        self.rows = rows
        self.domain = tracker.box(rows)
        self.distinct = not host_waits(rows) and bool((rows[1:] > rows[:-1]).all())
        whole = self.distinct and len(rows) == len(tracker.x)
        self.x = tracker.x if whole else tracker.x.index_select(0, rows)
        self.y = tracker.y if whole else tracker.y.index_select(0, rows)
        scale = tracker.network.scale
        self.scale = scale.index_select(0, rows.to(scale.device)).to(tracker.clean)

    @cached_property
    def room(self) -> Walls:
        """How far the coordinates are from the walls of the box, see `walls`."""
        return walls(self.x, self.domain)

    @cached_property
    def _two(self) -> tuple[Tensor, ...]:
        return tuple(torch.stack([room, room]) for room in self.room or ())

    def two_walls(self, away: Tensor, share: Tensor) -> Walls:
        """The walls of two points each, `(2, m, *shape)`: of the sample moved by a share `(m,)`,
        from 0 to 1, of `away`, which ends inside the box, and of the sample. Good until the next
        call.
        """
        if self.room is None:
            return None
        less = column(-share, away)
        for room, rooms in zip(self.room, self._two):
            torch.addcmul(room, away, less, out=rooms[0])
        return self._two[0], self._two[1]


class Tracker:
    """The search for the nearest flip of each of n samples.

    x `(n, *shape)`, y `(n,)`; clean: logits at the samples `(n, K)`; points, distance: nearest flip
    so far and how far it is, `(n,)`, inf where there is none; wrong: samples that need no attack.
    `rows` index the n samples. limit: how far a flip may be to be wanted, any distance if negative;
    radius: less by rounding, of the balls to search (both in `ball`); target: classes `(N,)` of the
    whole data set that a flip must reach, any wrong one if None; flat: where a climb met a zero
    gradient; early: `distance` as it was after the first `quarter` passes of each sample, kept if
    quarter is above 0.
    """

    def __init__(
        self,
        network: Network,
        x: Tensor,
        y: Tensor,
        norm: float,
        domain: Domain,
        passes: int | None,
        known: Flips | None = None,
        ball: tuple[float, float] = (-1.0, -1.0),
        target: Tensor | None = None,
        graph: bool = True,
        clean: Tensor | None = None,
        quarter: int = 0,
    ) -> None:
        self.limit, self.radius = ball
        self.target = None if target is None else target[network.ids.to(target.device)].to(y.device)
        self.network = network
        self.x = x
        self.y = y
        self.norm = norm
        self.domain = network.boxes(domain, x)
        self.passes = math.inf if passes is None else passes
        # An attack that asks for no gradient at the samples has no use for the graph's memory.
        self._start = network.tape(x, network.rows) if graph else None
        if self._start is not None:
            clean = self._start.logits
        self.clean = network.logits(x, network.rows) if clean is None else clean
        network.measure(self.clean)
        self.wrong = predict(self.clean, y) != y
        self.points = x.clone()
        self.distance = torch.where(
            self.wrong, 0.0, torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
        )
        self.anytime = False
        self.stopped = torch.zeros_like(self.wrong)
        self._scarce = False  # whether a sample may have stopped for want of passes
        self.flat = torch.zeros_like(self.wrong)
        self._part: Part | None = None  # the samples that were asked for last
        self.first = 0  # passes that the first step asked for; 0 if it asked for none
        if known is not None:
            found = (known.success[network.ids].to(x.device) & ~self.wrong).nonzero()[:, 0]
            self.points[found] = known.points[network.ids.to(known.points.device)].to(x.device)[
                found
            ]
            self.distance[found] = known.distances[network.ids].to(self.distance)[found]
        self.quarter = quarter
        self.early = self.distance.clone()

    @property
    def start(self) -> Tape:
        """The forward pass at the samples, with its graph."""
        assert self._start is not None, "this search was begun without a graph"
        return self._start

    def execute_gradients(self, gradients: int, cost: int) -> None:
        """So many gradients at the samples where none of them is worth attacking: with others in
        the batch they would be executed, and passes must not depend on the batch.

        cost: passes that a sample must have left for them.
        """
        if self.passes - 1 >= cost:
            for _ in range(gradients):
                self.start.pull(self.clean[:0], self.network.rows[:0], again=True)

    @property
    def rows(self) -> Tensor:
        """The samples that are worth attacking: right at the start, and without a flip within
        the radius if there is one.
        """
        return (~self.wrong & (self.distance > self.limit)).nonzero()[:, 0]

    def box(self, rows: Tensor) -> Domain:
        """The domain of these samples."""
        return box_at(self.domain, rows)

    def width(self, rows: Tensor) -> float | Tensor:
        """The width of the box; of own boxes the widest side of each of these samples, `(m,)`; 1
        without a box.
        """
        if self.domain is None:
            return 1.0
        low, high = self.domain
        own = boxes_of(self.domain)
        if own is None:
            return high - low
        widest = (own.high - own.low).flatten(1).amax(1)
        return widest.expand(len(rows)) if len(widest) == 1 else widest[rows]

    def part(self, rows: Tensor) -> Part:
        """These samples; the same object as long as the same tensor of rows is asked for."""
        if self._part is None or self._part.rows is not rows:
            self._part = Part(self, rows)
        return self._part

    def unflipped(self, rows: Tensor) -> Tensor:
        """Which of these samples have no flip within the limit yet, bool; without a limit all:
        a nearer flip may exist.
        """
        return self.distance[rows] > self.limit

    def passes_left(self, rows: Tensor) -> Tensor:
        """Passes left to these samples."""
        return self.passes - (self.network.forwards + self.network.backwards).to(rows.device)[rows]

    def can_afford(self, rows: Tensor, cost: int) -> Tensor:
        """Whether these samples have `cost` passes left, bool.

        In an `anytime` search a sample that cannot afford the next thing of the schedule stops for
        good, even with a pass left that something later could use: so a smaller budget is always a
        beginning of a larger one, and never does better.
        """
        if not self._tight(cost):
            return torch.ones_like(rows, dtype=torch.bool)
        enough = self.passes_left(rows) >= cost
        if self.anytime:
            enough &= ~self.stopped[rows]
            self.stopped[rows] = ~enough
        return enough

    def affordable(self, rows: Tensor, cost: int) -> Tensor:
        """The places `(k,)` among these samples of those that can afford `cost` passes: see
        `can_afford`. One wait at most.
        """
        if not self._tight(cost):
            return self.network.rows[: rows.shape[0]]
        return self.can_afford(rows, cost).nonzero()[:, 0]

    def _tight(self, cost: int) -> bool:
        """Whether a sample may be short of passes; if none can be, its counts need no look."""
        self.first = self.first or cost
        self._scarce = self._scarce or self.network.calls + cost > self.passes
        return self._scarce

    def logits(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate points of these samples (all must afford 1): logits `(m, K)` and whether
        each is a flip.
        """
        z = self.network.logits(points, rows)
        return z, self.offer(points, rows, z)

    def tape(self, points: Tensor, rows: Tensor, away: Tensor | None = None) -> tuple[Tape, Tensor]:
        """The same with a graph for gradients; one pass, and one for each gradient asked of it."""
        tape = self.network.tape(points, rows)
        flipped, tape.rival, tape.lead = self._offer(points, rows, tape.logits, away)
        return tape, flipped

    def offer(self, points: Tensor, rows: Tensor, z: Tensor) -> Tensor:
        """Keep those of these points, with logits `(m, K)`, that are the nearest flips so far;
        which are flips, bool `(m,)`.
        """
        return self._offer(points, rows, z)[0]

    def _offer(
        self, points: Tensor, rows: Tensor, z: Tensor, away: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`offer`, the strongest class but the label, and its lead. away: the points less the
        samples, if that is known.
        """
        part = self.part(rows)
        target = None if self.target is None else self.target[rows]
        flipped, rival, lead = self.network.flipped(z, part.y, part.scale, target)
        if host_waits(flipped) or bool(flipped.any()):
            keep = self._keep_distinct if part.distinct else self._keep
            keep(points, part, flipped, points - part.x if away is None else away)
            if self.quarter:  # no distance changes anywhere else
                self._remember()
        return flipped, rival, lead

    def _keep_distinct(self, points: Tensor, part: Part, flipped: Tensor, away: Tensor) -> None:
        """Keep the nearer ones of points that are all of different samples, on the CPU."""
        length = vector_norm(away, self.norm)
        (best,) = take(part.rows, self.distance)
        closer = (flipped & (length < best)).nonzero()[:, 0]
        if closer.shape[0]:
            place, new, short = take(closer, part.rows, points, length)
            self.points.index_copy_(0, place, new)
            self.distance.index_copy_(0, place, short)

    def _keep(self, points: Tensor, part: Part, flipped: Tensor, away: Tensor) -> None:
        """Several candidates of one sample may come at once: the nearest counts, of equals the
        first.
        """
        some = rows_to_compute(flipped)
        mine, theirs, flips, path = take(some, part.rows, points, flipped, away)
        length = torch.where(flips, vector_norm(path, self.norm), math.inf)
        none = torch.full_like(self.distance, math.inf)
        best = none.scatter_reduce(0, mine, length, "amin")
        better = (length == best[mine]) & (length < self.distance[mine])
        place = torch.where(better, torch.arange(len(mine), device=mine.device), len(mine))
        last = torch.full_like(self.distance, len(mine), dtype=torch.int64)
        first = last.scatter_reduce(0, mine, place, "amin")
        nearer = first < len(mine)
        chosen = rows_to_compute(nearer)
        place = first[chosen].clamp(max=len(mine) - 1)
        write(self.points, nearer[chosen], theirs.index_select(0, place), chosen)
        write(self.distance, nearer[chosen], length[place], chosen)

    def _remember(self) -> None:
        """Keep the distances of samples that are within the first quarter of their passes."""
        spent = self.network.forwards + self.network.backwards
        self.early = torch.where(spent <= self.quarter, self.distance, self.early)

    def guess(self, rows: Tensor, points: Tensor) -> None:
        """Leave an untried answer where no flip is known: the final check tells if it is one,
        at no pass of the budget.
        """
        write(self.points, torch.isinf(self.distance[rows]), points, rows)

    def further(self, share: float) -> tuple[Tensor, Tensor]:
        """The flips moved on by a share of their way, inside the box, and which samples have one
        that was found, bool `(n,)`.
        """
        moved = clip(torch.lerp(self.x, self.points, 1 + share), self.domain)
        return moved, torch.isfinite(self.distance) & ~self.wrong

    def shorten(self, rows: Tensor, times: int, shortest: float = 0.0) -> None:
        """Bisect toward the sample along norm-aware points while they stay flipped. One pass a
        bisection.

        The point at share t is the Euclidean projection of the flip onto the ball of radius t d:
        scaled for l2, clipped for linf, soft-thresholded for l1. `shortest`: the share to start
        from.
        """
        rows = rows[
            (torch.isfinite(self.distance[rows]) & (self.distance[rows] > 0)).nonzero()[:, 0]
        ]
        point = self.points[rows]
        full = self.distance[rows]
        low = torch.full_like(full, shortest)
        high = torch.ones_like(full)
        for _ in range(times):
            rows, point, full, low, high = take(
                self.affordable(rows, 1), rows, point, full, low, high
            )
            if not rows.shape[0]:
                return
            middle = (low + high) / 2
            x = self.part(rows).x
            if self.norm == 2:  # between two points of the box: the projection has a closed form
                trial = clip(torch.lerp(x, point, column(middle, x)), self.box(rows))
            else:
                trial = project(point, x, self.norm, middle * full, self.box(rows))
            _, flipped = self.logits(trial, rows)
            low = torch.where(flipped, low, middle)
            high = torch.where(flipped, middle, high)
