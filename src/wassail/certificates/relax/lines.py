"""Lines that enclose an activation on its interval, planes that enclose a curve, and how far the
inputs of a curve move together (`InputExtent`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates.graph.arc import Arc
from wassail.certificates.graph.graph import Graph, Node
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.graph.planes import Plane, end_points
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.rows import (
    Span,
    Turned,
    add_to,
    all_chunks,
    flattened,
    of_owner,
    of_owners,
    room_of,
    rounded_up,
    row_dot,
    unflattened,
)
from wassail.rounding import FLOOR, TINY, UNIT
from wassail.ties import loud

if TYPE_CHECKING:
    from wassail.certificates.relax.crown import Sweep


STILL = 2.0**-40  # of the values that a node is computed from: what moves less stands still


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of one activation node: `(mid - rad) d + off - far <= f(c + d) - f(c) <= (mid +
    rad) d + off + far`.

    So a coefficient w of the output is at most `w mid + |w| rad` of the input plus `w off + |w|
    far`. `(N, *shape)` each, or a row for each coefficient vector.
    """

    mid: Tensor
    rad: Tensor
    off: Tensor
    far: Tensor

    def take(self, owner: Tensor) -> Lines:
        """For rows that belong to samples `owner` `(R,)`; one view if all belong to one."""
        return Lines(*of_owners((self.mid, self.rad, self.off, self.far), owner))

    def pull(self, w: Tensor) -> Span:
        """Coefficients w `(R, *shape)` of the output as those of the input, constants `(R,)`."""
        size = w.abs()
        constant = row_dot(w, self.off) + row_dot(size, self.far)
        return torch.addcmul(w * self.mid, size, self.rad), constant

    def pull_both(self, w: Tensor) -> Span:
        """Coefficients w `(R, *shape)` of the output, then `-w`, as coefficients of the input `(2
        R, *shape)`, and constants `(2 R,)`.
        """
        size = w.abs()
        shift = row_dot(w, self.off)
        far = row_dot(size, self.far)
        tilt = w * self.mid
        wide = size * self.rad
        return torch.cat([wide + tilt, wide - tilt]), torch.cat([far + shift, far - shift])


@dataclass(frozen=True, eq=False)
class Planes:
    """The planes of one curve node: `f(c + d) - f(c)` lies within `J d + off +- far`; off and
    far `(N, *shape)`.
    """

    plane: Plane
    off: Tensor
    far: Tensor

    @classmethod
    def make(
        cls,
        kind: Arithmetic,
        node: Node,
        plane: Plane,
        count: int,
        errors: Sequence[Tensor],
        reach: Tensor,
        total: Tensor,
    ) -> Planes:
        """In a type, with all that rounding may add.

        Args:
            kind: the type.
            node: the curve.
            plane: in float64.
            count: roundings of a coefficient vector that goes through it and meets others.
            errors: of the deviations of the inputs, `(N, *in)` each.
            reach: of the plane, for the deviations.
            total: the sum of the magnitudes that underflow may be multiplied by, `(N,)`.
        """
        error = plane.reach(*errors) + 1.01 * kind.tiny * count * reach
        off = plane.off.to(kind.dtype)
        far = plane.far + error + kind.floor * (1 + total.reshape(-1, *[1] * len(node.shape)))
        rest = (plane.off - off.double()).abs() + rounding_of(node, kind) * (
            far + off.double().abs()
        )
        far = rounding.up(far + rest, kind.dtype)
        return cls(plane.to(kind.dtype), laid_out(off), laid_out(far))

    def pull(
        self, weight: dict[int, Tensor], inputs: tuple[int, ...], w: Tensor, owner: Tensor
    ) -> Span:
        """Adds to `weight` what coefficients w `(R, *shape)` of the output are of the inputs;
        `<w, off>` and `<|w|, far>`.
        """
        for j, part in zip(inputs, self.plane.transpose(w, owner)):
            add_to(weight, j, laid_out(part))
        return row_dot(w, of_owner(self.off, owner)), row_dot(w.abs(), of_owner(self.far, owner))


class LinesByNode:
    """The lines of activation nodes in one arithmetic, each made when it is first asked for: most
    sweeps use a part of them.
    """

    def __init__(self) -> None:
        self._made: dict[int, Lines] = {}
        self._makers: dict[int, Callable[[], Lines]] = {}

    def later(self, i: int, make: Callable[[], Lines]) -> None:
        """How the lines of node i are made."""
        self._makers[i] = make
        self._made.pop(i, None)

    def __getitem__(self, i: int) -> Lines:
        """The lines of node i."""
        if i not in self._made:
            self._made[i] = self._makers[i]()
        return self._made[i]

    def __iter__(self) -> Iterator[int]:
        """The nodes, in the order of the sweep."""
        return iter(self._makers)

    def __len__(self) -> int:
        """How many nodes have lines."""
        return len(self._makers)


class Precision:
    """A floating-point type, and what is lost in it.

    sums: additions beyond those of a product with one node.
    """

    def __init__(self, dtype: torch.dtype, sums: int) -> None:
        self.dtype = dtype
        self.tiny = TINY[dtype]
        self.floor = FLOOR[dtype]
        self.sums = sums


class Arithmetic(Precision):
    """What a backward pass needs in one floating-point type: the maps, the lines of each
    activation, the errors of the rest.

    errors: of the nodes whose rounding error is not part of an activation's shift. floors: for each
    node, `(N,)`, what products that underflow may take from a substitution that starts there. like:
    the same but for the lines.
    """

    def __init__(self, graph: Graph, dtype: torch.dtype, like: Arithmetic | None = None) -> None:
        super().__init__(dtype, 8 + 2 * len(graph.nodes))
        # For what is made later. That may not hold the lines it will be one of: such a circle, with
        # all values of a sweep in it, is freed by chance only.
        self.precision = Precision(dtype, self.sums)
        self.maps: dict[int, Turned] = {} if like is None else like.maps
        if like is None:
            self.maps = {
                i: Turned(node.map, dtype)
                for i, node in enumerate(graph.nodes)
                if node.map is not None
            }
        self.errors: dict[int, Tensor] = {} if like is None else like.errors
        self.floors: dict[int, Tensor] = {} if like is None else like.floors
        self.lines = LinesByNode()
        self.planes: dict[int, Planes] = {} if like is None else like.planes


@dataclass(frozen=True, eq=False)
class Values:
    """What a sweep knows of the nodes it has come to. centre: node -> value at the samples; spans:
    node -> (low <= 0, high >= 0) of `v - centre`, `(N, *shape)` each.
    """

    graph: Graph
    centre: dict[int, Tensor]
    spans: dict[int, Span]

    def open_entries(self, j: int, low: Tensor, high: Tensor) -> Tensor:
        """Which entries of node j, with spans `(N, size)`, a bound can help: undecided neurons that
        move by more than rounding. The difference of two constants, as in a max pooling after
        weights that training has made 0, does not.
        """
        sizes = [
            (self.centre[i].abs() + torch.maximum(-self.spans[i][0], self.spans[i][1])).flatten(1)
            for i in self.graph.nodes[j].inputs
        ]
        size = torch.stack([v.amax(1) for v in sizes]).amax(0)
        moving = high - low > STILL * size[:, None]
        return undecided(self.centre[j].flatten(1), low, high) & moving


@dataclass(frozen=True, eq=False)
class Spread:
    """A node as a linear function of the input and a rest: `d = A d_0 + shift +- rest`; a `(N,
    size, n)`, else `(N, size)`.

    From two bounds, `d <= c + <a, d_0>` and `-d <= c' + <a', d_0>`: A = (a - a') / 2, and the rest
    has what they differ by.
    """

    a: Tensor
    shift: Tensor
    rest: Tensor

    @classmethod
    def zero(cls, like: Tensor, size: int, inputs: int) -> Spread:
        """For entries that do not move; like: samples `(N, n)`, for their number and device."""
        return cls(*(like.new_zeros(len(like), size, *more) for more in ((inputs,), (), ())))

    def put(self, owner: Tensor, place: Tensor, constant: Tensor, a: Tensor, balls: Balls) -> None:
        """What `Sweep._sides` found for some entries."""
        (above, below), (up, down) = torch.chunk(constant, 2), torch.chunk(a.double(), 2)
        apart = (up + down) / 2
        reach = balls.reach(apart, owner)
        rounding = 4 * UNIT * (above.abs() + below.abs()) + UNIT * balls.reach(
            up.abs() + down.abs(), owner
        )
        self.a[owner, place], self.shift[owner, place] = (up - down) / 2, (above - below) / 2
        self.rest[owner, place] = (above + below) / 2 + reach + rounding


@dataclass(frozen=True, eq=False)
class Bend:
    """A ReLU node with undecided neurons: its spans, the error of its input, which neurons those
    are, and CROWN's slopes above and below in float32; `(N, *shape)` each.
    """

    shape: Shape
    error: Tensor
    crossing: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def make(cls, shape: Shape, error: Tensor, crossing: Tensor, up: Tensor, down: Tensor) -> Bend:
        """From slopes in float64."""
        return cls(shape, error, laid_out(crossing), laid_out(up.float()), laid_out(down.float()))

    def take(self, owner: Tensor) -> Bend:
        """For rows that belong to samples `owner` `(R,)`."""
        c, low, high = of_owners((self.shape.c, self.shape.low, self.shape.high), owner)
        shape = Shape(self.shape.node, c, low, high)
        return Bend(shape, *of_owners((self.error, self.crossing, self.up, self.down), owner))


@dataclass(frozen=True, eq=False)
class Slopes:
    """The lines of an activation node as a choice of slopes below sees them.

    A coefficient w > 0 becomes `w up` of the input plus `w above`; w < 0 becomes `w a` plus `w (a c
    - drop)`, with a slope a for each row where `crossing` is 1, and `down` elsewhere, where c is
    0. For a neuron that may change sides `f(v) >= a v` for every a between its two slopes, so
    `f(c + d) - f(c) >= a d + a c - f(c)`: drop is `f(c)` and what rounding may take. `(N, *shape)`
    each, or a row for each coefficient vector.
    """

    up: Tensor
    above: Tensor
    down: Tensor
    c: Tensor
    drop: Tensor
    crossing: Tensor

    @classmethod
    def of(cls, line: Lines, bend: Bend | None, kind: Arithmetic) -> Slopes:
        """From the lines of a node in float64; bend: None where no neuron may change sides.

        A product with w, and a sum over the node, are off by `rounding_of` of `|c| + |drop|`, which
        is in `drop`. So is the error of the input, times the largest slope, 1.
        """
        up = line.mid + line.rad
        above = rounded_up(line.off + line.far)
        down = line.mid - line.rad
        drop = rounded_up(line.far - line.off)
        if bend is None:
            none = torch.zeros_like(up)
            return cls(up, above, down, none, drop, none)
        c = bend.shape.c
        here = bend.shape.here
        size = c.abs() + here.abs()
        lost = (
            bend.error + 4 * UNIT * size + kind.floor * (1 + 2 * (bend.shape.high - bend.shape.low))
        )
        rate = rounding_of(bend.shape.node, kind)
        lost = (lost + rate * (size + lost)) * (1 + 8 * UNIT)
        crossing = laid_out(bend.crossing)
        return cls(
            up,
            above,
            down,
            torch.where(crossing, c, 0.0),
            torch.where(crossing, rounded_up(here + lost), drop),
            crossing.to(kind.dtype),
        )

    def to(self, dtype: torch.dtype) -> Slopes:
        """In another type, rounded anyhow: for an ascent."""
        return Slopes(*(laid_out(v.to(dtype)) for v in self._parts))

    def take(self, owner: Tensor) -> Slopes:
        """For rows that belong to samples `owner` `(R,)`."""
        return Slopes(*of_owners(self._parts, owner))

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return (self.up, self.above, self.down, self.c, self.drop, self.crossing)

    def pull(self, w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients `(R, *shape)` of the output as those of the input, and a constant `(R,)`."""
        plus = w.clamp(min=0)
        minus = w - plus
        below = minus * a
        if self.c.shape[0] == 1:
            constant = row_dot(plus, self.above) - row_dot(minus, self.drop)
            constant = constant + row_dot(below, self.c)
        else:
            terms = (plus * self.above).addcmul_(minus, self.drop, value=-1)
            constant = flattened(terms.addcmul_(below, self.c)).sum(1).double()
        return torch.addcmul(below, plus, self.up), constant

    def push(self, w: Tensor, a: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """The way back of a gradient: of the coefficients w, from that of the input's, and of a.

        moved: the gradient of the input's coefficients, which is the deviation that reaches a row's
        bound. No gradient for a coefficient that is 0 but for rounding (`ties.loud`).
        """
        positive, negative = (unflattened(v, w.shape[1:]) for v in loud(flattened(w)))
        bent = moved + self.c
        grown = positive * torch.addcmul(self.above, self.up, moved)
        return torch.addcmul(grown, negative, a * bent - self.drop), (
            negative * w * bent * self.crossing
        )


@dataclass(frozen=True, eq=False)
class Shape:
    """An activation over the spans of its input, `(N, *shape)` each.

    within: the range of the input itself, where it is narrower than the span around c; c may lie
    outside of it.
    """

    node: Node
    c: Tensor
    low: Tensor
    high: Tensor
    within: Span | None = None

    @cached_property
    def ends(self) -> Span:
        """The input itself, rounded outward."""
        return self.within or end_points(self.c, self.low, self.high)

    @cached_property
    def here(self) -> Tensor:
        """The value at the samples."""
        assert self.node.act is not None
        return self.node.act.value(self.c)

    @cached_property
    def arc(self) -> Arc:
        """The activation between the ends."""
        assert self.node.act is not None
        return self.node.act.over(*self.ends)

    def __getstate__(self) -> dict[str, Any]:
        """Without the arc: a function has no name of its own in another process."""
        return {key: value for key, value in self.__dict__.items() if key != "arc"}

    def cone(self, kind: Precision) -> Span:
        """The middle slope of each neuron, as it is after rounding, and how far the others are from
        it: `Arc.cone`, `(N, *shape)` each.
        """
        return self.arc.cone(self.c, self.low, self.high, kind.dtype)

    def slopes(self) -> Span:
        """CROWN's slopes of the line above and the line below."""
        return self.arc.slopes()

    def lines(self, up: Tensor, down: Tensor, error: Tensor, kind: Precision) -> Lines:
        """The lines with about these slopes: slopes are rounded first, then the shifts are made to
        hold for them.

        error: of the input's deviation, what rounding may add to it.
        """
        dtype = kind.dtype
        mid = ((up + down) / 2).to(dtype)
        rad = ((up - down) / 2).to(dtype)
        above = self.shift(mid.double() + rad.double(), True)
        below = self.shift(mid.double() - rad.double(), False)
        spread = (mid.abs() + rad.abs()).double() * error
        lost = kind.floor * (1 + 2 * (self.high - self.low))  # slopes and shifts that underflow
        off = ((above + below) / 2).to(dtype)
        far = (above - below) / 2 + spread + lost
        rest = ((above + below) / 2 - off.double()).abs() + rounding_of(self.node, kind) * (
            far + off.double().abs()
        )
        return Lines(*(laid_out(v) for v in (mid, rad, off, rounding.up(far + rest, dtype))))

    def shift(self, slope: Tensor, above: bool) -> Tensor:
        """The least s with `f(c + d) - f(c) <= slope d + s` on the span, rounded up; mirrored
        from below.

        `f(c)` is the number that `output` returns, so its own error does not count; `touch` pays
        for those of the function elsewhere.
        """
        sign = 1.0 if above else -1.0
        gap, slack = self.arc.gap(slope, above)
        here = self.here
        tilt = slope * self.c
        return (
            gap - (here - tilt) + sign * (slack + 4 * UNIT * (gap.abs() + here.abs() + tilt.abs()))
        )

    def output(self) -> tuple[Tensor, Span]:
        """The value at the samples and the span of the output's deviation."""
        here = self.here
        least, most = self.arc.span()
        slack = 2 * UNIT * (here.abs() + torch.maximum(least.abs(), most.abs()))
        return here, ((least - here - slack).clamp(max=0), (most - here + slack).clamp(min=0))


def undecided(c: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Which neurons may change sides."""
    return (c + low < 0) & (c + high > 0)


def rounding_of(node: Node, kind: Precision) -> float:
    """The relative error of a sum over the entries of a node, and of its terms."""
    return 1.01 * kind.tiny * (node.size + kind.sums)


class InputExtent(NamedTuple):
    """The inputs of a curve node, of which a sweep has the spans and the linear bounds."""

    sweep: Sweep
    node: Node

    def length(self, k: int, axes: tuple[int, ...]) -> Tensor:
        """Bounds on the Euclidean norm of `d - middle of its span` along some axes of input k: `(N,
        *shape)`, length 1 there.

        With `d = A d_0 + shift +- rest`: the norm of A on the ball, and that of the rest. `d = 0`
        is one of the deviations, so `|shift| <= rest`, and the middle is no farther from it than
        the norm: the factor pays for their roundings, and the slack of `stretch` for that of
        `start`.
        """
        j = self.node.inputs[k]
        shape = self.sweep.graph.nodes[j].shape
        spread = self.sweep.spreads[j]
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        width = math.prod(shape[axis] for axis in axes)
        count = math.prod(shape[axis] for axis in kept)

        def grouped(values: Tensor) -> Tensor:
            own = values.reshape(len(values), *shape, -1)
            own = own.permute(0, *(v + 1 for v in (*kept, *axes)), len(shape) + 1)
            return own.reshape(len(values), count, width, -1)

        low, high = (grouped(side)[..., 0] for side in self.sweep.spans[j])
        middle = (low + high) / 2
        a = grouped(spread.a)
        start, stretch = self.sweep.inputs.stretch(a)
        shift = start + grouped(spread.shift)[..., 0] - middle
        apart = shift.abs() + grouped(spread.rest)[..., 0]
        found = (stretch + rounding.length(apart, 2, 2)) * (1 + (width + 8) * UNIT)
        wide = rounding.length(torch.maximum(high - middle, middle - low), 2, 2) * (
            1 + (width + 8) * UNIT
        )
        return torch.fmin(found, wide).reshape(
            -1, *(1 if axis in axes else size for axis, size in enumerate(shape))
        )

    def along(self, k: int, direction: Tensor) -> Span:
        """The range of `<direction, d>` for every token of input k, `(N, *shape)` to `(N, ...,
        1)`: one row for each.
        """
        graph = self.sweep.graph
        j = self.node.inputs[k]
        node = graph.nodes[j]
        width = direction.shape[-1]
        count = node.size // width
        tokens = direction.reshape(len(direction), count, width)
        top = direction.new_empty(2, len(direction), count)
        widest = max(n.size for n in graph.nodes[: j + 1])
        for owner, place in all_chunks(
            len(direction), count, room_of(top.device) // (2 * widest), top.device
        ):
            rows = direction.new_zeros(len(place), count, width)
            rows = rows.scatter(
                1, place[:, None, None].expand(-1, 1, width), tokens[owner, place][:, None]
            )
            constant, a, both = self.sweep.substitute(
                self.sweep.exact, j, laid_out(rows.reshape(-1, *node.shape)), owner, True
            )
            top[:, owner, place] = (constant + self.sweep.inputs.upper(a, both)).reshape(2, -1)
        top = torch.where(torch.isnan(top), math.inf, top)  # an overflow is no bound
        high, low = (side.reshape(*direction.shape[:-1], 1) for side in (top[0], -top[1]))
        return low, high
