"""Branch and bound on the input of a small network with smooth parts: boxes, and rays that reach to
infinity.

The bound of `jacobian` on a box is the true norm up to an error that shrinks like the box. So the
pieces with the largest bounds are cut in two until the largest bound of a piece meets the longest
Jacobian at a real point. An unbounded region is a box around its centre and, through each face of
that box on an infinite side, the rays `centre + t u`, `t >= start`: far out a neuron keeps its side
along most of them, and its slope is as good as its limit (`ranges.far_ranges`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import below
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.jacobian import entries, entry_norms
from wassail.certificates.relax.ranges import Rays, Span, far_ranges, ranges
from wassail.certificates.relax.rows import rounded_up
from wassail.certificates.search.boxes import box_balls
from wassail.certificates.search.frontier import Frontier, Table, TensorRows
from wassail.rounding import UNIT
from wassail.ties import first_largest

CLOSE = 1e-6  # relative gap at which the search stops
BATCH = 256  # pieces that are cut at once
NUMBERS = 2**21  # in one tensor of a pass over many pieces
FAR = 2.0**40  # rays are cut no further out
# operations that a batch costs for each node, however small: dozens of calls of torch
OVERHEAD = 25 * clock.STEP


@dataclass(frozen=True, eq=False)
class InputBoxes(TensorRows):
    """B pieces of a region: boxes `(B, n)`, or rays where face (the input that is infinite, else
    -1) says so.

    Of a piece with rays the sides of input `face` are `start` and infinity, as distances from the
    origin, and the others are the directions u, with `u = 1` or -1 at the face. bound: on the norm
    there; own: the same without what is known of the piece that it was cut from, so that it holds
    on all of the box (a box around a part of the rays has points beside them, which belong to other
    pieces); cut: the input to cut next.
    """

    low: Tensor
    high: Tensor
    face: Tensor
    bound: Tensor
    own: Tensor
    cut: Tensor


@dataclass(eq=False)
class InputSearch(Frontier[InputBoxes]):
    """Branch and bound on the input of a small network. Between steps `lower <= sup ||J||_{r -> s}
    <= upper` holds.

    value: the norm of the Jacobian at points `(m, n) -> (m,)`, rounded down; climb: moves points to
    steeper ones; best: an upper bound known before; settled: the largest bound of the pieces that
    are as good as closed; most: stop when so many pieces were made; tick: called after every step.
    """

    graph: Graph
    region: Region
    norm_in: float
    norm_out: float
    value: Callable[[Tensor], Tensor]
    climb: Callable[[Tensor], Tensor]
    lower: float = 0.0
    witness: Tensor | None = None
    best: float = math.inf
    settled: float = 0.0
    nodes: int = 0
    most: float = math.inf
    tick: Callable[[InputSearch], None] | None = None

    def __post_init__(self) -> None:
        widest = max(node.size for node in self.graph.nodes)
        self.batch = max(1, min(BATCH, NUMBERS // (widest * self.graph.outputs)))
        low, high = self.region.box
        c = self.region.centre
        walls = torch.cat([c - low, high - c])
        start = (
            float(rounded_up(walls[torch.isfinite(walls)].clamp(min=1).amax()))
            if torch.isfinite(walls).any()
            else 1.0
        )
        # The box and the rays overlap by the rounding errors of both. These are four units of
        # `start`, so that it makes no difference whether it is rounded up itself.
        room = start * (1 + 4 * UNIT) + 4 * UNIT * c.abs()
        boxes = [(torch.maximum(low, c - room), torch.minimum(high, c + room), -1)]
        # Walls are at most `start` away, which is a direction of at most 1.
        least = torch.where(torch.isinf(low), -1.0, (low - c) / start * (1 + 4 * UNIT))
        top = torch.where(torch.isinf(high), 1.0, (high - c) / start * (1 + 4 * UNIT))
        for k in range(len(c)):
            for side, ends in ((low, (-math.inf, -start)), (high, (start, math.inf))):
                if torch.isinf(side[k]):
                    boxes.append((least.clone(), top.clone(), k))
                    boxes[-1][0][k], boxes[-1][1][k] = ends
        face = torch.tensor([k for _, _, k in boxes], device=c.device)
        lows = torch.stack([a for a, _, _ in boxes])
        highs = torch.stack([b for _, b, _ in boxes])
        best = math.inf if math.isnan(self.best) else self.best
        found = self._bounded(lows, highs, face, c.new_full((len(boxes),), best))
        self.open: Table[InputBoxes] = Table(found, descending=True)

    @property
    def upper(self) -> float:
        """The largest bound of a piece, open or not."""
        return max(self.settled, self.lower, self.open.loosest if len(self.open) else 0.0)

    @property
    def over(self) -> bool:
        """Whether a limit (`clock`) or the nodes have run out."""
        return clock.late() or self.nodes >= self.most

    def tell(self) -> None:
        """Tell the caller."""
        if self.tick is not None:
            self.tick(self)

    def step(self) -> None:
        """Cut the pieces with the largest bounds in two."""
        count = 2 * min(len(self.open), self.batch)
        clock.spend(
            count * 4 * self.graph.operations * self.graph.outputs
            + OVERHEAD * len(self.graph.nodes)
        )
        with self.taken(self.open.first(self.batch)) as picked:
            low, high, face, parent, stuck = self._halves(picked)
            inside = self._meets(low, high, face)
            found = self._bounded(low[inside], high[inside], face[inside], parent[inside])
            self._look(found)
            self.settled = max([self.settled, *picked.bound[stuck].tolist()])
            self.nodes = self.nodes + len(low)
            self.open.rows = found.join(self.open.rows)  # of equal bounds the new ones come first

    def sift(self) -> None:
        """Close the pieces that are as good as closed."""
        closed = self.open.split(~(self.open.rows.bound > self.lower * (1 + CLOSE)))
        self.settled = max([self.settled, *closed.bound.tolist()])

    def _halves(self, p: InputBoxes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The halves of pieces: low, high, face, the bound of the whole, and which pieces
        cannot be cut.
        """
        rows = torch.arange(len(p.cut), device=p.cut.device)
        outward = p.face == p.cut
        # of rays cut there: the start, with its sign
        side = torch.where(torch.isinf(p.low), p.high, p.low)[rows, p.cut]
        at = torch.where(outward, 2 * side, (p.low + (p.high - p.low) / 2)[rows, p.cut])
        # neighbours, or too far out
        stuck = (at <= p.low[rows, p.cut]) | (at >= p.high[rows, p.cut]) | (at.abs() > FAR)
        left = p.high.clone()
        right = p.low.clone()
        left[rows, p.cut], right[rows, p.cut] = at, at
        low = torch.cat([p.low, right])
        high = torch.cat([left, p.high])
        face = p.face.repeat(2)
        # Rays that are cut through at a distance leave a piece of finite length, which is put into
        # a box.
        short = (
            outward.repeat(2)
            & torch.isfinite(
                low.gather(1, p.cut.repeat(2)[:, None]) + high.gather(1, p.cut.repeat(2)[:, None])
            )[:, 0]
        )
        if short.any():
            low[short], high[short] = self._shell(low[short], high[short], face[short])
            face = torch.where(short, -1, face)
        keep = ~stuck.repeat(2)
        return low[keep], high[keep], face[keep], p.bound.repeat(2)[keep], stuck

    def _shell(self, low: Tensor, high: Tensor, face: Tensor) -> Span:
        """Boxes around `{origin + t u}` for t between the two sides of input `face`, cut by the
        walls.
        """
        near = torch.minimum(low.abs(), high.abs()).gather(1, face[:, None])
        far = torch.maximum(low.abs(), high.abs()).gather(1, face[:, None])
        c = self.region.centre
        rows = torch.arange(len(face), device=face.device)
        u = low.clone(), high.clone()
        for side in u:
            side[rows, face] = torch.sign(low + high)[rows, face]
        least = torch.minimum(u[0] * near, u[0] * far)
        top = torch.maximum(u[1] * near, u[1] * far)
        slack = 4 * UNIT * (c.abs() + torch.maximum(least.abs(), top.abs()))
        least = torch.maximum(c + least - slack, self.region.low)
        top = torch.minimum(c + top + slack, self.region.high)
        return torch.minimum(least, top), top  # the slack keeps a box from being empty

    def _points(self, p: InputBoxes) -> Tensor:
        """One point of each piece, `(B, n)`; on rays at twice the distance where they start."""
        rows = torch.arange(len(p.face), device=p.face.device)
        middle = p.low + (p.high - p.low) / 2
        rays = p.face >= 0
        side = torch.where(torch.isinf(p.low), p.high, p.low)[rows, p.face]
        middle[rows[rays], p.face[rays]] = side.sign()[rays]
        out = self.region.centre + 2 * side.abs()[:, None] * middle
        return self.region.inside(torch.where(rays[:, None], out, middle))

    def _look(self, p: InputBoxes) -> None:
        """Raise the lower side by the best of one point of each piece, and by climbing from
        there.
        """
        if not len(p.face):
            return
        x = self._points(p)
        values = self.value(x).nan_to_num(nan=0.0, posinf=math.inf)  # an overflow shows nothing
        held = (p.face < 0) & (x >= p.low).all(1) & (x <= p.high).all(1)
        worst = int(torch.where(held, values - p.own, -math.inf).argmax())
        if held[worst]:
            below(float(values[worst]), float(p.own[worst]), "Jacobian norm in a piece")
        best = int(values.argmax())
        if float(values[best]) > self.lower or self.witness is None:
            x = torch.cat([x[best, None], self.climb(x[best, None])])
            values = self.value(x).nan_to_num(nan=0.0, posinf=math.inf)
            best = int(values.argmax())
            self.lower = max(0.0, float(values[best]))
            self.witness = x[best]

    def _meets(self, low: Tensor, high: Tensor, face: Tensor) -> Tensor:
        """Which pieces meet the region, bool `(B,)`: rays belong to regions that are not balls."""
        if self.region.radius == math.inf:
            return torch.ones_like(face, dtype=torch.bool)
        nearest = torch.minimum(torch.maximum(self.region.centre, low), high)
        distance: Tensor = torch.linalg.vector_norm(
            nearest - self.region.centre, self.region.norm, dim=1
        )
        return distance <= self.region.radius * (1 + 1e-12)

    def _bounded(self, low: Tensor, high: Tensor, face: Tensor, parent: Tensor) -> InputBoxes:
        """The pieces with bounds on the norm, no larger than `parent`, and with the input to
        cut.
        """
        own = torch.full_like(parent, math.inf)
        cut = torch.zeros_like(face)
        for rays in (False, True):
            some = ((face >= 0) == rays).nonzero().flatten()
            if not len(some):
                continue
            a = low[some]
            b = high[some]
            k = face[some]
            spans = (
                far_ranges(self.graph, self._rays(a, b, k))
                if rays
                else ranges(self.graph, box_balls(a, b))
            )
            least, top = entries(self.graph, spans)
            own[some] = entry_norms(least, top, self.norm_in, self.norm_out)
            cut[some] = (
                self._widest(a, b, k)
                if rays
                else _smear(b - a, torch.maximum(least.abs(), top.abs()))
            )
        own = torch.where(own.isnan(), math.inf, own)  # nothing is known
        return InputBoxes(low, high, face, torch.minimum(parent, own), own, cut)

    def _rays(self, low: Tensor, high: Tensor, face: Tensor) -> Rays:
        rows = torch.arange(len(face), device=face.device)
        side = torch.where(torch.isinf(low), high, low)[rows, face]
        u = low.clone(), high.clone()
        for v in u:
            v[rows, face] = side.sign()
        return Rays(self.region.centre, self.region.low, self.region.high, side.abs(), u)

    def _widest(self, low: Tensor, high: Tensor, face: Tensor) -> Tensor:
        """Rays are cut where their directions differ most, or outward once those are closer
        than 1 / sqrt(start).
        """
        rows = torch.arange(len(face), device=face.device)
        start = torch.minimum(low.abs(), high.abs())[rows, face]
        width = high - low
        width[rows, face] = start**-0.5
        return first_largest(width)


def _smear(width: Tensor, steep: Tensor) -> Tensor:
    """The input to cut: where width `(N, n)` times slope `(N, m, n)` is largest (Kearfott 1996).

    An input that seems not to matter is cut as well, once the others are ten times as short.
    """
    steep = torch.nan_to_num(steep, nan=1e300, posinf=1e300).amax(1)
    return first_largest(width * (steep + 0.1 * steep.amax(1, keepdim=True) + 1e-300))
