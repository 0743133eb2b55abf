"""Linear bounds for r = 1 that know at which vertices of the ball a neuron bends at all.

A ReLU whose input is c at the sample and moves by t moves by `s t + g u`, where s is its slope at
the sample, g is 1 minus its slope below 0, and

    u  =  max(0, sigma t - |c|),

sigma the direction in which it changes sides. So u is 0 until t has come across |c|. With these
slopes a coefficient vector goes backward through the network once:

    <w, d>  =  <a, d_0>  +  sum over layers <b, g u>  +-  rounding,

and every `u >= 0` is at most a convex function of d_0: its own t is such a row, with `max(0, b g)`
for its coefficients. A convex function that is 0 at the sample is at most `sum_j |d_j| / r` times
its value at the vertex `+- r e_j`. There most neurons do not bend: a pixel moves few of them across
their |c|. So the values at the vertices are stored as sparse matrices, and a bound is a knapsack
over the vertices, with the room that the box leaves. `docs/theory.md`, section 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.graph.support import fill_one
from wassail.certificates.relax.lines import Arithmetic, Shape, rounding_of
from wassail.certificates.relax.norms import Reach
from wassail.certificates.relax.rows import flattened, narrow_to
from wassail.certificates.relax.slope_cone_layer import Pulled, Slanted, always
from wassail.certificates.relax.slope_cones import Bounded, SlopeCones
from wassail.rounding import UNIT

if TYPE_CHECKING:
    from wassail.certificates.relax.crown import Sweep

# Entries of the matrix from the input to a layer; below, layers are bounded together.
LEAST_ENTRIES = 2**14
BOTH_UP_TO_NEURONS = 512  # neurons of the widest layer up to which both kinds of bounds are taken
GROUP = 4  # inputs of which the largest value stands for all, to find a price
DENSE = 2**16  # entries of a matrix that is not made sparse
FAINTEST = 2.0**-960  # more than products that underflow take away


class Part(NamedTuple):
    """Values of some functions at the vertices: all, or those that are not 0, and where."""

    functions: int
    values: Tensor
    row: Tensor | None
    column: Tensor


def above(values: Tensor, zone: Tensor, sparse: bool) -> Part:
    """What of values `(functions, 2 n)` is above a zone `(functions,)`, rounded up."""
    if not sparse:
        over = (values - zone[:, None]).clamp(min=0) * (1 + 2 * UNIT)
        return Part(len(values), over, None, zone)
    row, column = (values > zone[:, None]).nonzero(as_tuple=True)
    return Part(len(values), (values[row, column] - zone[row]) * (1 + 2 * UNIT), row, column)


@dataclass(frozen=True, eq=False)
class VertexValues:
    """Upper bounds on functions at the vertices of a ball, at least 0, `(functions, 2 n)`: first
    all `+ r e_j`, then all `- r e_j`.

    values: all of them, or those that are not 0, by vertex. index: their functions. offsets: where
    the values of a vertex begin.
    """

    count: int
    values: Tensor
    index: Tensor | None
    offsets: Tensor | None

    @classmethod
    def make(cls, parts: list[Part], wide: int, like: Tensor) -> VertexValues:
        """From what `above` found.

        Args:
            parts: some functions each.
            wide: `2 n`.
            like: for its type and device.
        """
        count = sum(part.functions for part in parts)
        values = [part.values for part in parts]
        if not parts or parts[0].row is None:
            return cls(count, torch.cat([like.new_zeros(0, wide), *values]), None, None)
        begun = 0
        rows = []
        for part in parts:
            assert part.row is not None
            rows.append(part.row + begun)
            begun += part.functions
        vertex, order = torch.cat([part.column for part in parts]).sort(stable=True)
        counts = torch.bincount(vertex, minlength=wide)
        index = torch.cat(rows)[order]
        return cls(count, torch.cat(values)[order], index, counts.cumsum(0) - counts)

    def sums(self, weight: Tensor) -> Tensor:
        """`weight @ values` for weights at least 0, `(R, functions) -> (R, 2 n)`, from above."""
        slack = 1 + (self.count + 8) * UNIT
        if self.index is None:
            return (weight @ self.values) * slack
        if not len(self.index):
            assert self.offsets is not None
            return weight.new_zeros(len(weight), len(self.offsets))
        found: Tensor = embedding_bag(
            self.index,
            weight.T.contiguous(),
            self.offsets,
            mode="sum",
            per_sample_weights=self.values,
        )
        return found.T * slack


@dataclass(frozen=True, eq=False)
class Turn:
    """The neurons of one activation and sample that may change sides.

    place: where they are in coefficient vectors. gain: what u is multiplied by, 0 for neurons that
    keep their side. u is at most `start` and a function with these values at the vertices; and at
    most `box`.
    """

    place: Tensor
    gain: Tensor
    start: Tensor
    box: Tensor
    vertices: VertexValues


@dataclass(frozen=True, eq=False)
class Turns(Slanted):
    """An activation with the slopes that it has at the samples."""

    samples: list[Turn]


@dataclass(frozen=True, eq=False)
class Found:
    """What is known of a layer before its activation: the entries of each sample that may change
    sides, and how far beyond |c| they go.
    """

    open: Tensor
    places: tuple[Tensor, ...]
    starts: list[Tensor]
    vertices: list[VertexValues]


class VertexCones(SlopeCones):
    """The layers of one sweep for r = 1, all activations ReLUs.

    Args:
        sweep: its spans are narrowed layer by layer.
        reach: how far its nodes move.
    """

    def __init__(self, sweep: Sweep, reach: Reach) -> None:
        super().__init__(sweep, reach)
        self.other = SlopeCones(sweep, reach) if both_serve(sweep) else None
        self.turns: dict[int, Turns] = {}
        self._found: dict[int, Found] = {}
        self._sample = 0  # whose rows are pulled
        balls = sweep.inputs
        room = torch.cat([balls.above, balls.below], 1)
        # A vertex that the box blocks has no share of a deviation.
        self.walls = torch.where(room > 0, 0.0, -torch.inf)
        most = torch.maximum(balls.above, balls.below)
        radius = balls.radius[:, None]
        share = most / torch.where(radius > 0, radius, 1.0) * (1 + 4 * UNIT)
        self.shares = torch.where(radius > 0, share.clamp(max=1.0), 1.0)
        # Vertices that are filled at least, beside the last one; a device is not asked.
        self.counts: list[int] = []
        if most.device == HOST:
            least = 1 / self.shares.amax(1).clamp(min=2.0**-30)
            self.counts = [math.ceil(v) for v in least.tolist()]

    @property
    def known(self) -> bool:
        """Whether there are layers."""
        return bool(self.turns)

    @property
    def enough(self) -> bool:
        """CROWN's lines pay for every neuron at its own worst vertex; here one vertex is the same
        for all.
        """
        return bool(self.turns) and self.other is None

    def narrow(self, j: int, low: Tensor, high: Tensor) -> None:
        """Spans of node j, `(N, size)`: narrowed in place, on the side where a neuron changes.

        The host waits for a device once.
        """
        if self.other is not None:
            self.other.narrow(j, low, high)
        i = self.user(j)
        if i is None:
            return
        open_ = self.values.open_entries(j, low, high)
        counts = open_.sum(1).tolist()
        where = torch.nonzero_static(open_, size=sum(counts))[:, 1]
        places = torch.split(where, counts)
        starts = []
        vertices = []
        for sample, place in enumerate(places):
            clock.check()
            start, own = self._narrowed_sample(j, sample, place, low, high)
            starts.append(start)
            vertices.append(own)
        shape = (-1, *self.graph.nodes[j].shape)
        self._found[i] = Found(open_.reshape(shape), places, starts, vertices)

    def _narrowed_sample(
        self, j: int, sample: int, place: Tensor, low: Tensor, high: Tensor
    ) -> tuple[Tensor, VertexValues]:
        """Bounds on some entries of node j of one sample; and what goes beyond their |c|."""
        owner = torch.arange(sample, sample + 1, device=place.device)
        wide = 2 * self.graph.inputs
        sparse = low.device == HOST and len(place) * wide > DENSE
        starts = [low.new_zeros(0)]
        parts = []
        for some in torch.split(place, self.together(j)):
            if not len(some):
                continue
            c = self.values.centre[j].flatten(1)[sample, some]
            sign = torch.where(c > 0, -1.0, 1.0).to(c.dtype)
            self._sample = sample
            pulled = self.pull_units(j, some, owner)
            values, fixed, _ = self._values(pulled, sign, sample)
            if self.turns:
                top = self._filled(values, sample) + fixed
                top = top + 4 * UNIT * (top.abs() + fixed.abs())
                up = torch.where(sign > 0, top, torch.inf)
                down = torch.where(sign < 0, -top, -torch.inf)
                narrow_to(low, high, owner, some, down, up)
            zone = c.abs() - fixed - 4 * UNIT * (c.abs() + fixed.abs())
            # After an overflow nothing is known.
            sound = torch.isfinite(zone) & (values < torch.inf).all(1)
            starts.append(torch.where(sound, (-zone).clamp(min=0), torch.inf))
            parts.append(above(values, zone.clamp(min=0), sparse))
        return torch.cat(starts), VertexValues.make(parts, wide, low)

    def _pulled(self, last: int, rows: Tensor, sample: int) -> Pulled:
        """Rows of one sample backward to the input."""
        self._sample = sample
        return self.pull(last, rows, torch.arange(sample, sample + 1, device=rows.device))

    def bent(self, i: int) -> Turns:
        """Activation i as rows go through it."""
        return self.turns[i]

    def coefficients(self, i: int, w: Tensor, owner: Tensor) -> Tensor:
        """`b g`, the coefficients of u, `(R, neurons)`."""
        turn = self.turns[i].samples[self._sample]
        return flattened(w)[:, turn.place].double() * turn.gain

    def _values(self, pulled: Pulled, sign: Tensor, sample: int) -> tuple[Tensor, Tensor, Tensor]:
        """`sign <row, d>` is at most `fixed`, and a convex function that is 0 at the sample and has
        these values at the vertices, `(R, 2 n)`: -inf where the box blocks one.

        Args:
            pulled: the rows.
            sign: 1 or -1 for each, `(R,)`.
            sample: whose they are.

        Returns:
            The values, `fixed`, and what the layers have of the values at most.
        """
        a = pulled.a.double() * (sign * self.inputs.radius[sample])[:, None]
        values = torch.cat([a, -a], 1) + self.walls[sample]
        most = a.abs().amax(1)
        fixed = sign * pulled.shift + pulled.spread
        size = pulled.shift.abs() + pulled.spread
        above = torch.zeros_like(fixed)
        for k, bent in pulled.bent.items():
            turn = self.turns[k].samples[sample]
            weight = (sign[:, None] * bent).clamp(min=0)
            start = weight @ turn.start
            box = weight @ turn.box
            sums = turn.vertices.sums(weight)
            top = sums.amax(1)
            cheap = box < start + top
            if sums.device != HOST or bool(cheap.any()):
                sums = torch.where(cheap[:, None], 0.0, sums)
                top = torch.where(cheap, 0.0, top)
                start = torch.where(cheap, box, start)
            start = start * (1 + (len(turn.gain) + 8) * UNIT) + FAINTEST
            values += sums
            above = above + top
            fixed = fixed + start
            size = size + start
        few = (16 + 8 * len(pulled.bent)) * UNIT
        # What rounding takes from a value at a vertex, it takes from all shares together.
        return values, fixed + few * (size + most + above) + FAINTEST, above * (1 + few)

    def _filled(self, values: Tensor, sample: int) -> Tensor:
        """The largest value on the ball of functions that have these values at the vertices."""
        plus, minus = values.chunk(2, 1)
        best = torch.maximum(plus, minus).clamp(min=0)
        slack = 1 + (best.shape[1] + 8) * UNIT
        share = self.shares[sample]
        groups = best.shape[1] // GROUP
        count = self.counts[sample] if self.counts else groups
        if 8 * count > groups or best.shape[1] % GROUP:
            return fill_one(best, share.expand_as(best), torch.ones_like(best[:, 0])) * slack
        # Every price of a share gives a bound. Rooms are between 1/2 and 1 of the largest, as a
        # rule, so the best price is that of a vertex between these.
        largest = best.reshape(len(best), GROUP, groups).amax(1)
        prices = largest.topk(2 * count, dim=1).values
        found = torch.full_like(best[:, 0], torch.inf)
        for rank in sorted({count, (3 * count + 1) // 2, 2 * count}):
            price = prices[:, rank - 1]
            value = price + (best - price[:, None]).clamp_(min=0) @ share
            found = torch.fmin(found, value)
        return found * slack

    def add(self, i: int, shape: Shape, error: Tensor) -> None:
        """Activation i with its final spans.

        Args:
            i: the node.
            shape: its spans.
            error: what rounding may add to the deviation of its input, `(N, *shape)`.
        """
        if self.other is not None:
            self.other.add(i, shape, error)
        found = self._found.pop(i, None)
        if found is None:
            none = torch.zeros_like(shape.c, dtype=torch.bool)
            nothing = VertexValues.make([], 2 * self.graph.inputs, shape.c)
            empty = shape.c.new_zeros(0)
            count = len(none)
            places = (empty.long(),) * count
            found = Found(none, places, [empty] * count, [nothing] * count)
        self.turns[i] = turns_of(shape, error, found, self.kind)

    def bound(self, last: int, rows: Tensor, owner: Tensor) -> tuple[Bounded, Tensor, Tensor]:
        """Bounds on rows of a node, their coefficients a `(R, n)` of the input in float64, and the
        most that `<a, d_0>` can be.

        The host waits for a device once.
        """
        owners = owner.expand(len(rows)).tolist()
        a = rows.new_zeros(len(rows), self.graph.inputs, dtype=torch.float64)
        constant = torch.zeros_like(a[:, 0])
        together = torch.zeros_like(constant)
        for sample in sorted(set(owners)):
            mine = [row for row, own in enumerate(owners) if own == sample]
            some = torch.tensor(mine).to(rows.device, non_blocking=True)
            pulled = self._pulled(last, rows[some].to(self.kind.dtype), sample)
            sign = torch.ones_like(constant[some])
            values, fixed, above = self._values(pulled, sign, sample)
            top = self._filled(values, sample) + fixed
            a[some] = pulled.a.double()
            constant[some] = fixed + above + 4 * UNIT * (fixed.abs() + above)
            together[some] = top + 4 * UNIT * (top.abs() + fixed.abs())
        across = self.inputs.upper(a, owner)
        if self.other is None:
            return Bounded(constant, together), a, across
        other, b, beside = self.other.bound(last, rows, owner)
        better = ~(constant + across > other.constant + beside)
        found = Bounded(
            torch.where(better, constant, other.constant),
            torch.fmin(together, other.together),
        )
        return found, torch.where(better[:, None], a, b), torch.where(better, across, beside)


def turns_of(shape: Shape, error: Tensor, found: Found, kind: Arithmetic) -> Turns:
    """An activation with the slopes that it has at the samples.

    Args:
        shape: its final spans.
        error: what rounding may add to the deviation of the input, `(N, *shape)`.
        found: what is known of its neurons.
        kind: the arithmetic of the slopes.
    """
    bottom = shape.node.slope
    assert bottom is not None
    low, high = shape.ends
    c = shape.c
    crossing = (low < 0) & (high > 0)
    own = torch.where(c > 0, torch.ones_like(c), bottom)
    decided = torch.where(low >= 0, torch.ones_like(c), bottom)
    slope = torch.where(crossing, own, decided).to(kind.dtype).double()
    line = shape.lines(slope, slope, error, kind)
    inside = crossing & found.open
    most = torch.maximum(-shape.low, shape.high)
    # The slope, and the value at the sample, are rounded.
    lost = (own - slope).abs() * most
    lost = lost + 4 * UNIT * (1 + bottom.abs()) * (c.abs() + most)
    lost = lost * (1 + rounding_of(shape.node, kind))
    small = always(shape, line.mid, error, kind).double() + laid_out(lost)
    # Down beyond |c| for c > 0, else up.
    beyond = torch.where(c > 0, -shape.low, shape.high) - c.abs()
    box = ((beyond + 4 * UNIT * (c.abs() + most)).clamp(min=0)).flatten(1)
    gain = torch.where(inside, (1 - bottom).expand_as(c), 0.0).flatten(1)
    order = flattened(torch.arange(shape.node.size, device=c.device).reshape(1, *c.shape[1:]))[0]
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=c.device))
    samples = [
        Turn(back[place], gain[s, place], start, box[s, place], vertices)
        for s, (place, start, vertices) in enumerate(
            zip(found.places, found.starts, found.vertices, strict=True)
        )
    ]
    return Turns(
        line.mid,
        torch.where(laid_out(inside), 0.0, line.off),
        torch.where(laid_out(inside), rounding.up(small, kind.dtype), line.far),
        samples,
    )


def vertices_serve(sweep: Sweep) -> bool:
    """Whether a sweep has bounds by vertices: for r = 1, with ReLUs only, and not for small layers,
    of which those of many samples are bounded together.
    """
    graph = sweep.graph
    acts = [node for node in graph.nodes if node.act is not None]
    if sweep.balls.norm != 1 or graph.curved or not acts:
        return False
    widest = max(node.size for node in acts)
    only = all(node.slope is not None for node in acts)
    return only and widest * graph.inputs >= LEAST_ENTRIES


def both_serve(sweep: Sweep) -> bool:
    """Whether lengths are wanted, too, or are cheap."""
    widest = max(node.size for node in sweep.graph.nodes if node.act is not None)
    return sweep.lengths is not None or widest <= BOTH_UP_TO_NEURONS
