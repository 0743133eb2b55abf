"""Margins by balls and boxes together (`ball_relaxation.py`), and a few splits for those that are
close.

Samples that are left get narrower inner boxes, and the same again: a box of an inner layer that
CROWN found on an l2 ball is too wide for the same reason as a margin is, and what is lost there is
lost again in every layer after it. So each layer's open neurons are bounded anew, with the balls of
the layers before; then their boxes give the next balls (`BallSweep`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.relax.ball_relaxation import BallRelaxation, Slopes
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.rows import Length, Span, chunks_of, narrow_to, room_of, units_of
from wassail.threat import Domain
from wassail.ties import first_largest

ASCENT_STEPS = 60  # of the ascent on slopes and multipliers
SPARE = 0.03  # of a goal: how far beyond it an ascent goes on, since its values are rough
NEAR = 0.3  # of a margin: bounds that miss it by at most this are split
DEPTH = 6  # splits one after the other
WIDTH = 8  # domains of one bound that are left at a time
MORE = 25  # steps of the ascent after a split
DOMAINS = 2048  # of all rows that are split at a time, about: their slopes are kept
OPEN_NEURONS = 100  # open neurons of a sample in one layer, up to which an ascent is worth its time
INNER_STEPS = 6  # of that ascent
# What a step of an ascent costs: passes for each row, and overhead that is worth so many rows.
PASSES = 3
OVERHEAD = 6


def passes_of(owner: Tensor, samples: int, steps: int) -> Tensor:
    """Passes through the network that an ascent takes for each sample, float64 `(N,)`.

    A sample pays the overhead whatever else is in the batch.

    Args:
        owner: the sample of each row, `(R,)`.
        samples: how many there are, N.
        steps: of the ascent.
    """
    rows = torch.bincount(owner, minlength=samples).double()
    return PASSES * steps * torch.where(rows > 0, rows + OVERHEAD, 0.0)


class BallSweep(Sweep):
    """The same sweep with narrower boxes, never wider than those given.

    Args:
        graph: a network of affine nodes and ReLUs.
        balls: one for each sample.
        known: what CROWN's sweep on these balls proved, node by node.
        moved: how far the undecided neurons of each layer move together.
    """

    def __init__(
        self,
        graph: Graph,
        balls: Balls,
        known: Mapping[int, Span],
        moved: Mapping[int, Length],
    ) -> None:
        super().__init__(graph, balls, 0, known)
        self.moved = moved
        self.passes = torch.zeros_like(balls.radius)  # through the network, of each sample

    def _cones(self) -> None:
        """What they say is known."""
        return None

    def _tighten(self, j: int) -> None:
        """The open entries of node j, the input of an activation, by balls: where they are few."""
        if j in self.tight or not self.bends:
            return
        self.tight.add(j)
        node = self.graph.nodes[j]
        low, high = (side.flatten(1).clone() for side in self.spans[j])
        open_ = self.values.open_entries(j, low, high)
        few = open_.sum(1, keepdim=True) <= OPEN_NEURONS
        relaxation = BallRelaxation(self, self.moved)
        widest = max(n.size for n in self.graph.nodes[: j + 1])
        most = max(1, 4 * room_of(low.device) // widest)
        both_sides = (open_ & few).nonzero()[:, 0].repeat(2)
        self.passes = self.passes + passes_of(both_sides, len(low), INNER_STEPS)
        for owner, place in chunks_of(open_ & few, most):
            clock.check()
            both = self._both(relaxation, j, owner, place)
            narrow_to(low, high, owner, place, -both[len(place) :], both[: len(place)])
        self.spans[j] = low.reshape(-1, *node.shape), high.reshape(-1, *node.shape)

    def _both(self, relaxation: BallRelaxation, j: int, owner: Tensor, place: Tensor) -> Tensor:
        """Upper bounds on the deviations of some entries of node j, then on their negatives."""
        unit = units_of(self.graph.nodes[j], place, torch.float64)
        c = self.centre[j].flatten(1)[owner, place]
        rows = torch.cat([unit, -unit])
        goal = torch.cat([-c, c]).clamp(min=0) * (1 - SPARE)
        # An ascent drops rows, so that each needs its own owner.
        twice = owner.expand(len(place)).repeat(2)
        return relaxation.bound(j, rows, twice, INNER_STEPS, goal)[0]


@dataclass(frozen=True)
class BallEffort:
    """What is spent on the margins that CROWN leaves open.

    depth: splits, one after the other, of neurons of samples that are nearly proved; width: domains
    of one margin that may be open at a time; near: the share of a margin that a bound may miss to
    be split; inner: whether samples that are left get narrower inner boxes, for several times the
    price; early: whether there are splits before these, too.
    """

    depth: int = DEPTH
    width: int = WIDTH
    near: float = NEAR
    inner: bool = True
    early: bool = True


def ball_margins(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    radius: Tensor | float,
    norm: float,
    domain: Domain,
    steps: int = ASCENT_STEPS,
    depth: int = DEPTH,
    inner: bool = True,
) -> Tensor:
    """Lower bounds on `theta_y - theta_j` over each sample's ball cut by the box, `(N, K)` in
    float64, 0 at `j = y`: CROWN's, or those with balls in every layer where they are better.

    steps: of the ascent on slopes and multipliers; depth, inner: as in `BallEffort`.
    """
    x = x.to(graph.device)
    y = y.to(graph.device)
    radius = torch.as_tensor(radius, dtype=torch.float64).expand(len(x))
    moved: dict[int, Length] = {}
    sweep = Sweep(graph, Balls.make(x, radius, norm, domain), 0, None, moved).run()
    lower = margins(sweep, y)[0]
    return raised_margins(sweep, moved, y, lower, BallEffort(depth, inner=inner), steps)[0]


def raised_margins(
    sweep: Sweep,
    moved: Mapping[int, Length],
    y: Tensor,
    lower: Tensor,
    effort: BallEffort,
    steps: int = ASCENT_STEPS,
) -> tuple[Tensor, Tensor]:
    """The margins of a sweep, better where they were not proved, and the passes that it took for
    each sample, `(N,)`.

    Args:
        sweep: of the samples' balls.
        moved: how far the undecided neurons of each layer move together, from the same sweep.
        y: labels `(N,)`, where the network is.
        lower: what the sweep says of the margins, `(N, K)`.
        effort: what may be spent.
        steps: of the ascent on slopes and multipliers.
    """
    graph = sweep.graph
    if not sweep.bends or not steps:
        return lower, torch.zeros_like(lower[:, 0])
    inner = effort.inner and has_inner(graph, sweep.balls.norm)
    first = replace(effort, depth=0) if inner and not effort.early else effort
    lower, passes = _raised(sweep, moved, y, lower, steps, first)
    left = _open(lower, y).any(1).nonzero()[:, 0]
    if not inner or not len(left):
        return lower, passes
    known = {j: (low[left], high[left]) for j, (low, high) in sweep.proved().items()}
    moved = {i: (length[left], those[left]) for i, (length, those) in moved.items()}
    balls = sweep.balls.take(left)
    narrow = BallSweep(graph, balls, known, moved)
    narrow.run()
    found = margins(narrow, y[left])[0]
    more = narrow.passes
    if narrow.bends:
        found, again = _raised(narrow, moved, y[left], found, steps, effort)
        more = more + again
    passes[left] += more
    lower[left] = torch.maximum(lower[left], found)
    return lower, passes


def has_inner(graph: Graph, norm: float) -> bool:
    """Whether inner boxes can be narrowed by balls.

    Args:
        graph: the network.
        norm: ground norm, 1, 2 or inf.
    """
    return norm != math.inf and not graph.smooth and not graph.curved


def _open(lower: Tensor, y: Tensor) -> Tensor:
    """Which margins are not proved, `(N, K)`."""
    return (lower <= 0) & (torch.arange(lower.shape[1], device=y.device) != y[:, None])


def _raised(
    sweep: Sweep,
    moved: Mapping[int, Length],
    y: Tensor,
    lower: Tensor,
    steps: int,
    effort: BallEffort,
) -> tuple[Tensor, Tensor]:
    """The margins `(N, K)`, better where they were not proved, and the passes of each sample."""
    graph = sweep.graph
    owner, rival = _open(lower, y).nonzero().T
    passes = torch.zeros_like(lower[:, 0])
    if not len(owner):
        return lower, passes
    last = len(graph.nodes) - 1
    z = sweep.centre[last]
    here = z.gather(1, y[:, None]) - z
    relaxation = BallRelaxation(sweep, moved)
    eye = torch.eye(graph.outputs, dtype=torch.float64, device=y.device)
    size = _together(graph)
    most = min(size, DOMAINS // effort.width) if effort.depth else size
    lower = lower.clone()
    for part in _of_whole_samples(owner, most):
        mine = owner[part]
        other = rival[part]
        rows = eye[other] - eye[y[mine]]
        goal = here[mine, other]
        found, slopes = relaxation.bound(last, rows, mine, steps, goal * (1 - SPARE))
        passes = passes + passes_of(mine, len(y), steps)
        if effort.depth:
            splits = _Splits(relaxation, rows, mine, goal, effort, len(y))
            found = splits.run(found, slopes)
            passes = passes + splits.passes
        slack = 2.0**-50 * (z[mine].abs().amax(1) + found.abs())
        better = here[mine, other] - found - slack
        better = torch.where(better.isnan(), -math.inf, better)
        lower[mine, other] = torch.maximum(lower[mine, other], better)
    return lower, passes


def _together(graph: Graph) -> int:
    """Rows that are bounded at once."""
    widest = max(node.size for node in graph.nodes)
    return max(1, 8 * room_of(graph.device) // widest)


def _of_whole_samples(owner: Tensor, most: int) -> Iterator[Tensor]:
    """Places of rows, at most so many at a time, but all rows of a sample together.

    Args:
        owner: the sample of each row, in order.
        most: rows, unless one sample has more.
    """
    counts = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
    first = 0
    after = 0
    for count in counts:
        if after > first and after + count - first > most:
            yield torch.arange(first, after, device=owner.device)
            first = after
        after = after + count
    yield torch.arange(first, after, device=owner.device)


class _Splits:
    """Domains of the rows that are nearly proved: in each of them some neurons have a side.

    Args:
        relaxation: the bounds.
        rows: `(R, K)`.
        owner: the sample of each, `(R,)`.
        goal: a row is proved where its bound is below this, `(R,)`.
        effort: how deep, how wide, and how near a row has to be.
        samples: how many there are.
    """

    def __init__(
        self,
        relaxation: BallRelaxation,
        rows: Tensor,
        owner: Tensor,
        goal: Tensor,
        effort: BallEffort,
        samples: int,
    ) -> None:
        self.relaxation = relaxation
        self.last = len(relaxation.graph.nodes) - 1
        self.rows = rows
        self.owner = owner
        self.goal = goal * (1 - 2.0**-20)
        self.effort = effort
        self.size = _together(relaxation.graph)
        self.samples = samples
        self.passes = torch.zeros(samples, dtype=torch.float64, device=owner.device)

    def run(self, found: Tensor, slopes: Slopes) -> Tensor:
        """The bounds `(R,)`, after splits where they prove a row.

        A sample is left as it is when too many domains of one of its rows are open.
        """
        left = self._close(found)
        found = found.clone()
        if not len(left) or not slopes:
            return found
        most = torch.full_like(found, -math.inf)  # of the domains that are proved
        sides: dict[int, Tensor] = {}
        slopes = _rows(slopes, left)
        for _ in range(self.effort.depth):
            clock.check()
            left, sides, slopes = self._halved(left, sides, slopes)
            near = self.goal[left] * (1 - SPARE)
            self.passes = self.passes + passes_of(self.owner[left], self.samples, MORE)
            now, slopes = self._bounded(left, near, sides, slopes)
            good = now < self.goal[left]
            most.scatter_reduce_(0, left[good], now[good], "amax")
            count = torch.zeros_like(self.owner).scatter_add_(0, left, (~good).long())
            stay = (~good & ~self._wide(count)[self.owner[left]]).nonzero()[:, 0]
            done = torch.zeros_like(found, dtype=torch.bool)
            done[left] = True
            done = done & (count == 0)
            found[done] = torch.minimum(found[done], most[done])
            if not len(stay):
                break
            left = left[stay]
            sides = {i: v[stay] for i, v in sides.items()}
            slopes = _rows(slopes, stay)
        return found

    def _bounded(
        self, left: Tensor, near: Tensor, sides: dict[int, Tensor], slopes: Slopes
    ) -> tuple[Tensor, Slopes]:
        """The bounds of domains, and their slopes, in parts that memory holds.

        Args:
            left: the rows of the domains, `(D,)`.
            near: where an ascent may stop, `(D,)`.
            sides: of each node, the sides of its neurons, `(D, *shape)`.
            slopes: where the ascent begins.
        """
        bounds = []
        ends = []
        for some in torch.split(torch.arange(len(left), device=left.device), self.size):
            mine = left[some]
            own = {i: v[some] for i, v in sides.items()}
            now, end = self.relaxation.bound(
                self.last,
                self.rows[mine],
                self.owner[mine],
                MORE,
                near[some],
                own,
                _rows(slopes, some),
            )
            bounds.append(now)
            ends.append(end)
        joined = {i: _joined([end[i] for end in ends]) for i in ends[0]}
        return torch.cat(bounds), joined

    def _close(self, found: Tensor) -> Tensor:
        """The rows that are open, of the samples of which no row is hopeless."""
        open_ = found >= self.goal
        far = open_ & ~(found < self.goal * (1 + self.effort.near))
        return (open_ & ~self._of_samples(far)[self.owner]).nonzero()[:, 0]

    def _wide(self, count: Tensor) -> Tensor:
        """Samples with a row that has more open domains, `(R,)`, than it may have."""
        return self._of_samples(count > self.effort.width)

    def _of_samples(self, rows: Tensor) -> Tensor:
        """Samples with one of some rows, which are given as bool `(R,)`."""
        found = torch.zeros(int(self.owner.amax()) + 1, dtype=torch.bool, device=rows.device)
        found[self.owner[rows]] = True
        return found

    def _halved(
        self, left: Tensor, sides: dict[int, Tensor], slopes: Slopes
    ) -> tuple[Tensor, dict[int, Tensor], Slopes]:
        """Both sides of the dearest neuron of each domain; they begin with its slopes, so that none
        is worse.
        """
        where = (self.last, self.rows[left], self.owner[left])
        costs = self.relaxation.costs(*where, slopes, sides)
        sizes = [v[0].numel() for v in costs.values()]
        chosen = first_largest(torch.cat([v.flatten(1) for v in costs.values()], 1))
        halves: dict[int, Tensor] = {}
        begun: Slopes = {}
        start = 0
        for (i, cost), size in zip(costs.items(), sizes):
            place = chosen - start
            mine = (place >= 0) & (place < size)
            start = start + size
            old = sides[i] if i in sides else torch.zeros_like(cost, dtype=torch.int8)
            mark = torch.zeros_like(old).flatten(1)
            mark[mine] = mark[mine].scatter(1, place[mine, None], 1)
            mark = mark.reshape(old.shape)
            halves[i] = torch.cat([old + mark, old - mark])
            begun[i] = _twice(slopes[i])
        return torch.cat([left, left]), halves, begun


def _twice(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    up, down, log_lam = (torch.cat([v, v]) for v in parts)
    return up, down, log_lam


def _joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    up, down, log_lam = (torch.cat(values) for values in zip(*parts))
    return up, down, log_lam


def _rows(slopes: Slopes, keep: Tensor) -> Slopes:
    """The slopes of some rows."""
    return {i: (up[keep], down[keep], lam[keep]) for i, (up, down, lam) in slopes.items()}
