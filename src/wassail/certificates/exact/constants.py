"""Exact Lipschitz constants of piecewise-linear networks by an anytime branch and bound on the
sides of neurons.

    value = sup { |J_D|_{r -> s} : D the mask of a cell that meets the interior of the region },
    r, s in {1, 2, inf}.

For margins take the head with rows `e_j - e_k` and `s = inf`: `|J|_{r -> inf}` is the longest row
in the dual norm, the `Lm` of THEORY 3.

A node fixes some neurons to one side; the network on it is affine in them (`reduce`). Its upper
bound is the smallest of an interval bound on the entries of J, the semidefinite bound of
`multipliers`, and its parent's. Its cell is dropped when a Farkas certificate proves it empty.
Lower bounds are norms at real points strictly inside cells. Nodes are taken in batches, largest
bound first, so the bracket is valid whenever the search stops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.exact.multipliers import (
    Form,
    Reduced,
    balance,
    gather,
    reduce,
    split,
    start,
    stretched,
    tighten,
)
from wassail.certificates.exact.paths import (
    CLOSE,
    brief,
    connected,
    influence,
    path_entries,
    paths_of,
    preactivations,
    strict,
)
from wassail.certificates.exact.polytope import feasible, polytope_of, widest_point
from wassail.certificates.exact.relaxation import Triangle, triangle
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.matrix_norms import positive_norms
from wassail.certificates.graph.region import Region
from wassail.certificates.search.frontier import Heap, Part, SharedFrontier, Workers, crew
from wassail.errors import InputError
from wassail.geometry import operator_norm
from wassail.rounding import FAINT, UNIT
from wassail.ties import first_largest, largest

# nodes taken at once, operations and numbers of a batch: at most
BATCH = 256
WORK = 200_000_000
MEMORY = 16_000_000
PASS = 100_000_000  # operations for the Jacobians of one pass
# of the first search from below: points per scale, best ones that walk on, and how far
SAMPLES = 256
WALKERS = 8
ROUNDS = 40
CHUNK = 64  # nodes bounded at once: sorted by their free neurons, so that little is padded
# Newton steps per node, and how far from the best multipliers they aim
NEWTON_STEPS = 3
GAP = 1e-2
NEWTON_CUBES = 3  # operations of a step on the multipliers, in cubes of the matrix's side


@dataclass(frozen=True, eq=False)
class Bracket:
    """`lower <= value <= upper`; lower is attained at witness `(n,)`, strictly inside a cell (None
    if no such point was found).

    nodes: partial masks generated, the root included; complete: whether the bracket is closed to
    1e-9.
    """

    lower: float
    upper: float
    witness: Tensor | None
    nodes: int
    seconds: float
    complete: bool


def branch(
    network: Piecewise,
    region: Region,
    norm_in: float,
    norm_out: float,
    *,
    time_limit: float | None = None,
    nodes: int | None = None,
    seed: int = 0,
    tick: Callable[[float, float, int], None] | None = None,
    workers: Workers = None,
) -> Bracket:
    """Bracket `sup |J|_{norm_in -> norm_out}` over the cells of the region until it closes, time or
    nodes run out, or Ctrl-C.

    A cell so thin that the rounding errors of a proof of its emptiness hide it (some `1e-14 (|x| +
    scale)`) counts as empty. Everything else that could raise the value is counted in upper,
    rounding errors included.

    time_limit: seconds; nodes: stop once this many partial masks were generated (the batch under
    way is finished). tick: called with (lower, upper, nodes) after every batch. The answer depends
    on the seed only (and on the clock if it stops the search). workers: they share the open nodes
    (see `frontier`); then lower and upper are as close, but witness and nodes may differ.
    """
    if norm_in not in (1, 2, math.inf) or norm_out not in (1, 2, math.inf):
        raise InputError(
            f"norms {norm_in!r} -> {norm_out!r} are not supported: choose each from 1, 2 and inf."
        )
    begin = time.monotonic()
    # Outputs in units near the value itself; a power of two changes no digit.
    size = float(positive_norms(paths_of(network), norm_in, norm_out))
    unit = 2.0 ** round(math.log2(size)) if size > 0 else 1.0
    scaled = replace(network, C=network.C / unit, D=network.D / unit, e=network.e / unit)
    search = _Search(
        scaled, region, float(norm_in), float(norm_out), torch.Generator().manual_seed(seed)
    )
    search.most = math.inf if nodes is None else nodes
    if tick is not None:
        search.tick = lambda: tick(unit * search.lower, unit * search.upper, search.nodes)
    try:
        with crew(workers) as pool, clock.limited(time_limit):
            search.begun()
            search.proceed(pool)
            search.centre()
    except (KeyboardInterrupt, clock.Late):
        pass  # what is known so far is valid
    complete = search.upper - search.lower <= 2 * CLOSE * search.upper
    seconds = time.monotonic() - begin
    return Bracket(
        unit * search.lower, unit * search.upper, search.witness, search.nodes, seconds, complete
    )


@dataclass(eq=False)
class _Node:
    """A partial mask `(H,)` and a member of the norm (see `split`): what is known about it, and
    where the search goes next.
    """

    state: np.ndarray
    member: int
    bound: float
    # weights and multipliers `(H,)`: float32, they are a starting point only; None: not yet bounded
    w: np.ndarray | None = None
    t: np.ndarray | None = None
    omega: np.ndarray | None = None  # how its inputs are stretched, if they are
    pick: int = -1  # the neuron to branch on, -1 for a full mask
    mask: np.ndarray | None = None  # of a real point in it, if one is known


def _nodes(
    parents: list[_Node],
    states: Iterable[np.ndarray],
    bounds: np.ndarray,
    multipliers: tuple[Tensor, Tensor, Tensor | None],
    pick: Tensor,
) -> list[_Node]:
    """Nodes for the members of their parents, a row each; multipliers: w, t and omega."""
    w, t, omega = multipliers
    stretches = [None] * len(parents) if omega is None else brief(omega)
    parts = zip(parents, states, bounds.tolist(), brief(w), brief(t), stretches, pick.tolist())
    return [_Node(state, parent.member, *rest) for parent, state, *rest in parts]


@dataclass(frozen=True, eq=False)
class _Found:
    """What a search knows besides its open nodes.

    settled: the largest bound of all closed nodes; nodes: generated, most: stop at so many.
    """

    lower: float
    witness: Tensor | None
    settled: float
    nodes: int
    most: float


@dataclass(eq=False)
class _Search(SharedFrontier[list[_Node], _Found]):
    """The state of a search. Between steps `lower <= value <= upper` holds; a step that is
    interrupted leaves them valid.

    settled: the largest bound of all closed nodes: full masks, and what is within CLOSE of lower;
    before the roots are open, a bound on everything. tick: called after every step.
    """

    network: Piecewise
    region: Region
    norm_in: float
    norm_out: float
    generator: torch.Generator
    lower: float = 0.0
    witness: Tensor | None = None
    nodes: int = 0
    most: float = math.inf
    open: Heap[_Node] = field(default_factory=Heap)
    out: list[Part[list[_Node], _Found]] = field(default_factory=list)
    tick: Callable[[], None] | None = None
    swept: float = 0.0  # nodes with bounds up to this are closed

    def __post_init__(self) -> None:
        net = self.network
        clock.look()
        self.how = split(net.inputs, net.outputs, self.norm_in, self.norm_out, exact=True)
        # Entries of J, reduced or not, carry rounding errors of at most (3 H + n + K + 4) 2^-52
        # times the sum over all paths.
        size = float(positive_norms(paths_of(net), self.norm_in, self.norm_out))
        size = max(size, FAINT) if connected(net) else size  # what underflows adds nothing to a sum
        self.slack = (3 * net.neurons + net.inputs + net.outputs + 4) * UNIT * size
        self.ceiling = size + self.slack
        self.settled = self.ceiling
        # Batches are smaller for large networks: by the operations of a Newton step, by the numbers
        # in a reduced network.
        work = (net.neurons + self.how.weights) ** 3
        numbers = net.neurons * (net.neurons + net.inputs + 1)
        self.batch = min(BATCH, 1 + WORK // work, 1 + MEMORY // (numbers + 1))
        lengths = torch.linalg.vector_norm(net.A, dim=1)
        seen = (lengths > 0) & (net.c != 0)
        self.scale = float((net.c[seen].abs() / lengths[seen]).median()) if seen.any() else 1.0
        if self.region.bounded:
            low, high = self.region.box
            self.scale = max(float((high - low).max()) / 2, 1e-300)

    @property
    def upper(self) -> float:
        """The largest of what is closed, open, and out at workers."""
        return max(self.lower, min(self.ceiling, max([self.settled, *self.bounds])))

    @property
    def over(self) -> bool:
        """Whether it is closed, or time or nodes have run out."""
        return clock.late() or self.nodes >= self.most or max(self.bounds, default=0.0) <= self.cut

    @property
    def cut(self) -> float:
        """Nodes bounded by this are closed."""
        return self.lower * (1 + CLOSE)

    @property
    def goal(self) -> float:
        """Squared members bounded by this are closed."""
        return (max(self.cut - self.slack, 0.0) / self.how.factor) ** 2 * (1 - 1e-9)

    def begun(self) -> None:
        """The first incumbent, and the root once for each member, bounded by intervals; the
        largest of them refined.
        """
        self.explore()
        state = self.settle(torch.full((1, self.network.neurons), -1, dtype=torch.int8))[0]
        self.root = reduce(self.network, state)
        free = (state[0] < 0).nonzero()[:, 0].tolist()
        roots: list[_Node] = []
        for begin in range(0, self.how.members, 8 * CHUNK):
            member = torch.arange(begin, min(begin + 8 * CHUNK, self.how.members))
            part = self.how.pick(self.root.repeat(len(member)), member)
            bounds = self.entries(path_entries(part, self.network))
            for i, bound in zip(member.tolist(), bounds.tolist()):
                roots.append(_Node(state[0].numpy(), i, bound, pick=free[0] if free else -1))
        closed = [self.closed(node) for node in roots]
        self.open.add([node for node, bound in zip(roots, closed) if bound is None])
        self.settled = max([0.0, *(bound for bound in closed if bound is not None)])
        self.nodes = 0 if len(self.open) else 1
        if len(self.open):
            self.refine()
        self.sift()

    def refine(self) -> None:
        """Multipliers, from scratch, for the members with the largest bounds that have none yet."""
        fresh = self.open.first(min(CHUNK, self.batch), lambda node: node.t is None)
        with self.taken(fresh):
            self.add(self.refined(fresh))

    def refined(self, fresh: list[_Node]) -> list[_Node]:
        """The nodes with multipliers."""
        count = len(fresh)
        free = torch.from_numpy(np.flatnonzero(fresh[0].state < 0))
        self.nodes += count
        member = torch.tensor([node.member for node in fresh])
        part = self.how.pick(self.root.repeat(count), member)
        index = free.expand(count, -1)
        sizes = path_entries(part, self.network)[:, 0]
        omega = None
        if self.how.stretch:
            omega = sizes / sizes.sum(1, keepdim=True) + 1e-3 / self.network.inputs
        w, t = start(self.form(part, index, omega), self.network.layer[free], self.how)
        bounds = np.array([node.bound for node in fresh])
        for gap in (1.0, 0.3, 0.1, 0.03, *[GAP] * (3 if self.how.stretch else 1)):
            clock.spend(count * 10 * (self.network.neurons + self.how.weights) ** 3)
            proved, w, t, score, omega = self.tighten(part, index, w, t, omega, 10, gap)
            bounds = np.minimum(bounds, self.norm(proved))
            if clock.late():
                break
        full = torch.ones(count, self.network.neurons, dtype=torch.float64)
        full[:, free] = t
        states = [node.state for node in fresh]
        return _nodes(fresh, states, bounds, (w, full, omega), free[first_largest(score)])

    def form(self, part: Reduced, index: Tensor, omega: Tensor | None) -> Form:
        """The forms of members over the neurons `index` `(m, F)`, stretched by omega `(m, n)`
        if there is one.
        """
        return gather(part if omega is None else stretched(part, omega), self.how, index)

    def tighten(
        self,
        part: Reduced,
        index: Tensor,
        w: Tensor,
        t: Tensor,
        omega: Tensor | None,
        steps: int,
        gap: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Proved bounds on the squared members `(m,)`, then `w, t`, scores, omega for the next
        time.
        """
        form = self.form(part, index, omega)
        total = 1.0 if omega is None else omega.sum(1) * (1 + self.network.inputs * UNIT)
        proved, w, t, score = tighten(
            form, w, t, torch.full((len(w),), self.goal, dtype=torch.float64) / total, steps, gap
        )
        if omega is not None:
            with suppress(clock.Late):
                omega = balance(form, w, t, omega)
        return proved * total, w, t, score, omega

    def norm(self, proved: Tensor) -> np.ndarray:
        """What bounds on the squares of members say about the norm, `(m,)`, rounding included."""
        return _known(self.how.factor * proved.sqrt().numpy() + self.slack)

    def entries(self, sizes: Tensor) -> np.ndarray:
        """What bounds on the entries of J say about the norm, `(m,)`, rounding included."""
        return _known(positive_norms(sizes, self.norm_in, self.norm_out).numpy() + self.slack)

    def closed(self, node: _Node) -> float | None:
        """The bound that a node is closed with; None if it stays open.

        A full mask is closed at once: its norm is exact, and lower knows it if a real point of it
        is known.
        """
        if node.bound <= self.cut:
            return node.bound
        if node.pick >= 0:
            return None
        jacobian = self.network.jacobian(torch.from_numpy(node.state)[None] == 1)
        member = torch.tensor([node.member])
        k = self.network.outputs
        part = self.how.outputs(self.how.inputs(jacobian, member, k), member)
        value = float(operator_norm(part, self.norm_in, self.norm_out)[0]) + self.slack
        return min(node.bound, value)

    def add(self, nodes: list[_Node]) -> None:
        """Queue the nodes that stay open."""
        for node in nodes:
            bound = self.closed(node)
            if bound is None:
                self.open.push(node)
            else:
                self.settled = max(self.settled, bound)

    def sift(self) -> None:
        """Close what a better lower bound closes."""
        if self.cut > self.swept:
            pruned = [node.bound for node in self.open.prune(self.cut)]
            self.settled = max([self.settled, *pruned])
            self.swept = self.cut

    def tell(self) -> None:
        """Tell the caller."""
        if self.tick is not None:
            self.tick()

    def step(self) -> None:
        """Take the nodes with the largest bounds, split each on its neuron, keep the children
        that may hold more than lower.
        """
        before = self.lower
        if self.open.top.t is None:
            self.refine()
        else:
            count = min(self.batch, 1 + self.nodes // 8)
            parents = self.open.first(count, lambda node: node.t is not None)
            with self.taken(parents):
                self.expand(parents)
        if self.lower > before:
            assert self.witness is not None
            self.walk(self.witness[None])

    def expand(self, parents: list[_Node]) -> None:
        """Both children of each node: settled, bounded, and kept where they may be reachable."""
        states = np.repeat(np.stack([p.state for p in parents]), 2, 0)
        rows = np.arange(len(states))
        states[rows, np.repeat([p.pick for p in parents], 2)] = rows % 2
        self.nodes += len(states)
        side = self.network.neurons + self.how.weights
        clock.spend(len(states) * NEWTON_STEPS * NEWTON_CUBES * side**3)
        state, possible, low, high = self.settle(torch.from_numpy(states))
        kept = possible.nonzero()[:, 0]
        kept = kept[torch.argsort((state[kept] < 0).sum(1), stable=True)]
        for begin in range(0, len(kept), CHUNK):
            clock.check()
            part = kept[begin : begin + CHUNK]
            above = [parents[i // 2] for i in part.tolist()]
            reduced = reduce(self.network, state[part])
            nodes = self.bound(reduced, state[part], above)
            lines = triangle(low[part], high[part]) if self.region.bounded else None
            self.add(self.reach(nodes, above, reduced, lines))

    def bound(self, reduced: Reduced, state: Tensor, parents: list[_Node]) -> list[_Node]:
        """The children with their bounds: by intervals, then by multipliers that start from
        those of the parents.
        """
        part = self.how.pick(reduced, torch.tensor([p.member for p in parents]))
        sizes = path_entries(part, self.network)
        entries = self.entries(sizes)
        bounds = np.minimum([p.bound for p in parents], entries)
        w = torch.from_numpy(np.stack([p.w for p in parents if p.w is not None])).double()
        t = torch.from_numpy(np.stack([p.t for p in parents if p.t is not None])).double()
        stretches = [p.omega for p in parents if p.omega is not None]
        omega = torch.from_numpy(np.stack(stretches)).double() if stretches else None
        free = state < 0
        pick = torch.where(free.any(1), free.to(torch.int8).argmax(1), -1)
        rows = (torch.from_numpy(bounds > self.cut) & free.any(1)).nonzero()[:, 0]
        if len(rows):
            width = int(free[rows].sum(1).max())
            order = torch.argsort((~free[rows]).to(torch.int8), dim=1, stable=True)[:, :width]
            index = torch.where(free[rows].gather(1, order), order, -1)
            begin = t[rows].gather(1, order).masked_fill(index < 0, 1.0)
            some = None if omega is None else omega[rows]
            proved, w[rows], last, score, some = self.tighten(
                part.take(rows), index, w[rows], begin, some, NEWTON_STEPS, GAP
            )
            if omega is not None and some is not None:
                omega[rows] = some
            bounds[rows.numpy()] = np.minimum(bounds[rows.numpy()], self.norm(proved))
            t[rows] = t[rows].scatter(1, order, last)
            best = first_largest(score.masked_fill(index < 0, -math.inf))
            pick[rows] = index.gather(1, best[:, None])[:, 0]
            # here the entries decide, not the multipliers
            loose = torch.from_numpy(bounds >= entries) & free.any(1)
            if loose.any():
                flow = influence(part, self.network, sizes).masked_fill(~free, -math.inf)
                pick = torch.where(loose, first_largest(flow), pick)
        return _nodes(parents, state.numpy(), bounds, (w, t, omega), pick)

    def settle(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fix the neurons that cannot change sides: states int8 `(m, H)`, which are possible
        `(m,)`, bounds on v `(m, H)`.
        """
        possible = torch.ones(len(state), dtype=torch.bool)
        while True:
            clock.look()
            reduced = reduce(self.network, state)
            low, high = preactivations(reduced, self.network, self.region)
            possible &= ~(((state == 1) & (high < 0)) | ((state == 0) & (low > 0))).any(1)
            free = state < 0
            new = torch.where(free & (low >= 0), 1, state)
            new = torch.where(free & (high <= 0), 0, new).to(torch.int8)
            if (new == state).all():
                return state, possible, low, high
            state = new

    def reach(
        self, nodes: list[_Node], parents: list[_Node], reduced: Reduced, lines: Triangle | None
    ) -> list[_Node]:
        """The nodes that are not closed and not proved empty, with the mask of a real point
        where one is found.
        """
        kept = []
        found = []
        points = []
        for row, (node, parent) in enumerate(zip(nodes, parents)):
            fixed = node.state >= 0
            if node.bound <= self.cut:
                self.settled = max(self.settled, node.bound)
                continue
            if parent.mask is not None and (parent.mask == node.state)[fixed].all():
                node.mask = parent.mask
            else:
                polytope = polytope_of(reduced, row, node.state, self.region, self.scale, lines)
                clock.spend(0)  # of a few least squares
                y, empty = (None, True) if polytope is None else feasible(polytope)
                if empty:
                    continue
                if y is not None:
                    found.append(node)
                    points.append(self.point(y))
            kept.append(node)
        masks = self.visit(self.region.inside(torch.stack(points))) if points else ()
        for node, mask in zip(found, masks):
            if mask is not None and (mask == node.state)[node.state >= 0].all():
                node.mask = mask
        return kept

    def point(self, y: np.ndarray) -> Tensor:
        """The input at a point of a polytope."""
        return self.region.centre + self.scale * torch.from_numpy(y[: self.network.inputs])

    def visit(self, points: Tensor) -> list[np.ndarray | None]:
        """Norms at real points `(m, n)` raise lower. Their masks, int8; None where the point is
        not strictly inside a cell.
        """
        v = self.network.preactivations(points)
        mask = v > 0
        inside = self.region.contains(points) & strict(self.network, points, v)
        if inside.any():
            values = self.norms(mask[inside]) - self.slack
            best = int(values.argmax())
            if float(values[best]) > self.lower or self.witness is None:
                self.lower = max(self.lower, float(values[best]))
                self.witness = points[inside][best].clone()
        rows = mask.to(torch.int8).numpy()
        return [row if good else None for row, good in zip(rows, inside.tolist())]

    def norms(self, masks: Tensor) -> Tensor:
        """`|J|` of masks `(m, H)`: `(m,)`."""
        net = self.network
        numbers = (net.neurons + 1) * (net.inputs + 1)
        size = max(1, min(MEMORY // numbers, PASS // (max(net.neurons, 1) * numbers)))
        found = []
        for part in torch.split(masks, size):
            clock.look()
            clock.spend(len(part) * net.neurons * numbers)
            found.append(operator_norm(net.jacobian(part), self.norm_in, self.norm_out))
        return torch.cat(found)

    def explore(self) -> None:
        """The first incumbent: random points at several scales, then a walk from the best."""
        spreads = [1.0]
        if not self.region.bounded:
            spreads = [self.scale * 10.0**k for k in (-1, 0, 1, 2, 4)]
        points = torch.cat([self.region.sample(SAMPLES, self.generator, v) for v in spreads])
        masks, first = np.unique(self.network.mask(points).numpy(), axis=0, return_index=True)
        try:
            values = self.norms(torch.from_numpy(masks))
        except clock.Late:  # a few points are a lower side, too
            with clock.unlimited():
                self.visit(points[:WALKERS])
            raise
        self.walk(points[torch.from_numpy(first)[largest(values, min(WALKERS, len(values)))]])

    def walk(self, points: Tensor) -> None:
        """From each point to the best neighbouring cell while that helps."""
        with suppress(clock.Late):
            best = self.norms(self.network.mask(points))
            for _ in range(ROUNDS):
                near = self.neighbours(points)
                values = self.norms(self.network.mask(near.flatten(0, 1))).view(len(points), -1)
                gain = values.amax(1)
                which = first_largest(values)
                better = gain > best * (1 + 1e-12)
                if clock.late() or not better.any():
                    break
                every = torch.arange(len(points))
                points = torch.where(better[:, None], near[every, which], points)
                best = torch.where(better, gain, best)
        with clock.unlimited():  # where it has come to, whatever the time
            self.visit(points)

    def neighbours(self, points: Tensor) -> Tensor:
        """For each point, itself and points just across every wall (and twice as far) along its
        normal, `(m, 1 + 2 H, n)`.
        """
        clock.look()
        rows, shift, _, _ = self.network.affine(self.network.mask(points))
        v = (rows @ points[..., None])[..., 0] + shift
        size = rows.square().sum(2)
        step = torch.where(size > 0, v / size.clamp(min=1e-300), 0.0)[..., None] * rows
        here = points[:, None]
        return self.region.inside(torch.cat([here, here - (1 + 1e-3) * step, here - 2 * step], 1))

    def centre(self) -> None:
        """Move the witness as far inside its cell as a linear program can."""
        if self.witness is None:
            return
        mask = self.network.mask(self.witness[None])
        state = mask.to(torch.int8)
        polytope = polytope_of(
            reduce(self.network, state), 0, state[0].numpy(), self.region, self.scale, None
        )
        y = None if polytope is None else widest_point(polytope)[0]
        if y is not None:
            point = self.region.inside(self.point(y))[None]
            v = self.network.preactivations(point)
            same = ((v > 0) == mask).all() and self.region.contains(point).all()
            if same and strict(self.network, point, v).all():
                self.witness = point[0]

    # ---- Handed out to workers

    def bare(self) -> _Search:
        """Without nodes, and without the caller."""
        other = super().bare()
        other.tick = None
        return other

    def known(self, workers: int) -> _Found:
        """A worker generates its share of the nodes.

        nodes: of all workers together it would be a quarter. It says how many are split at once:
        few, so that the largest come first.
        """
        nodes = self.nodes // (4 * workers)
        most = nodes + 1 + (self.most - self.nodes) / workers
        return _Found(self.lower, self.witness, 0.0, nodes, most)

    def begin(self, found: _Found) -> None:
        """Begin with the best solution of all."""
        self.lower = found.lower
        self.witness = found.witness
        self.settled = found.settled
        self.nodes = found.nodes
        self.most = found.most

    def since(self, found: _Found) -> _Found:
        """The nodes that were generated here."""
        count = self.nodes - found.nodes
        return _Found(self.lower, self.witness, self.settled, count, self.most)

    def learn(self, found: _Found) -> None:
        """A solution counts if it is better than ours."""
        self.nodes += found.nodes
        self.settled = max(self.settled, found.settled)
        if found.lower > self.lower:
            self.lower = found.lower
            self.witness = found.witness

    def stand(self, part: Part[list[_Node], _Found]) -> None:
        """Its largest bound counts."""
        self.settled = max(self.settled, part.bound)

    def behind(self, part: Part[list[_Node], _Found]) -> bool:
        """Below the middle of a part: others have nodes with larger bounds, and lower may be
        poor yet.
        """
        middle = part.nodes[len(part.nodes) // 2].bound
        return len(self.open) > 0 and self.open.loosest < middle


def _known(bounds: np.ndarray) -> np.ndarray:
    """Upper bounds; one that is no number, after an overflow, says nothing."""
    return np.where(np.isnan(bounds), math.inf, bounds)
