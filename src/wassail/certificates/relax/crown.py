"""Linear bounds (CROWN) for a batch of samples, each over its own ball cut by the box.

Zhang et al. 2018 substitute a bound on a neuron backward to the input: each activation is replaced
by a line above or below it, by the sign of its coefficient. Here this is done in DEVIATIONS from
the sample: every value is written `v = c + d` with `c` its value at the sample in float64, so that
biases vanish, every quantity is as large as the ball makes it, and not as large as the network's
values are. That is what makes float32 coefficients sound AND tight, at half the cost or less:

- `d_i = W d_j`, and a computed coefficient vector `fl(W^T w)` is off by at most `g |W|^T |w|` (g:
  terms times 2^-24). That changes `<w, d>` by at most `<|w|, g |W| D_j>` with `D_j >= |d_j|` known
  from the forward sweep: an error of `d_i` by `m_i = g |W| D_j`, known before any coefficient is.
  So is the rounding error of `c` itself.
- An error of a neuron's input by m is an error of its output by `slope m`: it is added to
  the neuron's shift, which costs no operation.
- A product that underflows is off by the smallest normal number, whatever w is. An entry of a
  coefficient vector that is off by that changes `<w, d>` by that times `|d|`, so all of a
  substitution is off by a constant that is known from the forward sweep (`Arithmetic.floors`). A
  weight that underflows when it is converted is an error of `d_i` like any other.

A curve (a product, a softmax, a normalisation) lies between two parallel planes, `J d + off +-
far`, with a map J of each sample's own, so that a coefficient vector goes through it as through a
layer (`graph/planes.py`; Shi et al. 2020 for transformers).

The forward sweep is here, what rows do on their way back in `backward`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from functools import cached_property, partial
from typing import assert_never

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.activations import UNBOUNDED, within
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Node, Relu, Smooth
from wassail.certificates.graph.maps import (
    Linear,
    laid_out,
    magnitude_map,
    rounding_map,
)
from wassail.certificates.graph.planes import Curve, end_points
from wassail.certificates.relax.backward import Backward, Substitution, unit_rows
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.executed import call_error
from wassail.certificates.relax.l1_vertices import VertexCones, vertices_serve
from wassail.certificates.relax.lines import (
    Arithmetic,
    Bend,
    InputExtent,
    Planes,
    Shape,
    Spread,
    Values,
    rounding_of,
)
from wassail.certificates.relax.norms import Reach
from wassail.certificates.relax.rows import (
    Length,
    Span,
    all_chunks,
    chunks_of,
    doubled,
    groups_of,
    in_step,
    narrow_to,
    of_owner,
    room_of,
    row_dot,
    two_chunks,
    units_of,
)
from wassail.certificates.relax.slope_cones import SlopeCones
from wassail.certificates.relax.windows import InputWindows, windows_of
from wassail.errors import InputError
from wassail.rounding import UNIT
from wassail.threat import Domain, dual

POLISH = 4  # steps of the ascent on the slopes for the margins themselves, where they cost little
# Networks with at most so many layers of activations, and a node this large, are bounded in float32
# inside; so are transformers without a node this large, where the slack for rounding is far below
# that of the planes.
SHALLOW = 6
WIDE = 1024
ALIKE = 1e-6  # of a bound: a difference that rounding can make
MOSTLY = 0.6  # share of open neurons from which on a node is bounded in float32 too


class Sweep(Substitution):
    """One pass through a network for N balls: for every node its value at the samples and the span
    of its deviations.

    known: what `proved` returned for the same samples on larger balls; steps: of the ascent on the
    slopes (0: CROWN's choice); lengths: gets for each activation how far the inputs of its
    undecided neurons move together, for r = 1 and 2. centre: node -> value at the samples; spans:
    node -> (low <= 0, high >= 0) of `v - centre`, `(N, *shape)` each, sound.

    Most neurons that intervals leave undecided are decided by any linear bound. So they are
    screened first: in float32, with parallel lines (Fast-Lin, Weng et al. 2018), where one
    coefficient vector bounds both sides, and only until they are decided. What is left gets CROWN's
    bounds, in float64 unless the network is shallow and wide: there the slack for rounding in
    float32 is a few 1e-4 of the width, less than a few steps on the slopes of the margins' own
    lines win.
    """

    def __init__(
        self,
        graph: Graph,
        balls: Balls,
        steps: int = 0,
        known: Mapping[int, Span] | None = None,
        lengths: dict[int, Length] | None = None,
    ) -> None:
        super().__init__(graph, balls)
        self.steps = steps
        self.known = known or {}
        self.lengths = lengths
        nodes = graph.nodes
        self.values = Values(graph, {}, {})
        self.centre = self.values.centre
        self.spans = self.values.spans
        # nodes whose values fill a box: maps of them are bounded exactly by intervals
        self.boxes: set[int] = set()
        self.tight: set[int] = set()  # nodes whose spans substitution cannot improve
        # Where rows are asked whether they are decided: before layers that are larger, and so
        # dearer, than those above.
        acts = [i for i, node in enumerate(nodes) if node.act is not None]
        widest = max(node.size for node in nodes)
        deep = sum(graph.weighted(nodes[i].inputs[0]) for i in acts)
        self.coarse = widest <= WIDE if graph.curved else deep <= SHALLOW and widest >= WIDE
        self.stops = {
            i for i, below in zip(acts[1:], acts) if nodes[below].size > nodes[i].size
        } | set(acts[:1])
        # of smooth activations, with the error of the input in float64
        self.smooth: dict[int, tuple[Shape, Tensor]] = {}
        self._bounded: list[Tensor] = []  # whether the inputs of activations are, one number each
        # middle and half width of the spans where rows are asked, in float32
        self.halves: dict[int, Span] = {}
        self.spreads: dict[int, Spread] = {}
        self.executed: dict[int, Tensor] = {}  # errors of nodes as they are executed, `(N, *shape)`
        self.cones = self._cones()

    def _cones(self) -> SlopeCones | None:
        """The bounds on rows that know more than boxes; None if there are none."""
        if self.balls.norm not in (1, 2) or not len(self.balls.x):
            return None
        cones = VertexCones if vertices_serve(self) else SlopeCones
        return cones(self, self.reach)

    @cached_property
    def reach(self) -> Reach:
        """How far the nodes move on the balls."""
        return Reach(self.graph, self.balls).run()

    def run(self) -> Sweep:
        """Forward, node by node; before an activation its inputs are bounded by substitution."""
        with torch.no_grad():
            for i, node in enumerate(self.graph.nodes):
                clock.check()
                match node.op:
                    case Affine():
                        self._affine(i, node, node.op)
                    case Curved(curve):
                        for j in node.inputs:
                            self._tighten(j)
                        self._curve(i, node, curve)
                    case Relu() | Smooth():
                        self._tighten(node.inputs[0])
                        self._activation(i, node)
                    case Input():
                        self._start(node)
                    case _:
                        assert_never(node.op)
        if self._bounded and not bool(torch.stack(self._bounded).all()):
            raise InputError(UNBOUNDED)
        if self.balls.targets is not None:
            # Bounds are on deviations, which a constant does not change. Output 0 is 0 exactly, so
            # that margins pay for this rounding in the place of that of a difference.
            last = len(self.graph.nodes) - 1
            self.centre[last] = self.centre[last] + self.balls.targets.offsets
        return self

    def _start(self, node: Node) -> None:
        """The input: its ball."""
        low, high = self.balls.box
        self.centre[0] = self.balls.x.reshape(-1, *node.shape)
        self.spans[0] = low.reshape(-1, *node.shape), high.reshape(-1, *node.shape)
        self.tight.add(0)
        if self.balls.norm == math.inf:
            self.boxes.add(0)
        for kind in (self.exact, self.fast):  # of the product with the input
            kind.floors[0] = 4 * kind.floor * (node.size + self._total(0))

    def _total(self, j: int) -> Tensor:
        """`sum |d_j|` is at most this, `(N,)`."""
        low, high = self.spans[j]
        return torch.maximum(-low, high).reshape(len(low), low.shape[1:].numel()).sum(1) * (
            1 + 2.0**-20
        )

    def _sink(self, kind: Arithmetic, i: int, operations: int, total: Tensor) -> None:
        """The floor of node i: on top of that of all nodes before it, `operations` for each entry
        of its inputs.

        total: the sum of the magnitudes that the entries are multiplied by. Errors and shifts: at
        most 16 products a number.
        """
        kind.floors[i] = kind.floors[i - 1] + kind.floor * (
            operations * total + 16 * self.graph.nodes[i].size
        )

    @property
    def rows(self) -> int:
        """Coefficient vectors substituted so far."""
        return self.taken + (0 if self.cones is None else self.cones.rows)

    def proved(self) -> dict[int, Span]:
        """The range of the values themselves at the inputs of activations, for sweeps on
        smaller balls.
        """
        found = {}
        for j in self.graph.read_by_others:
            c, (low, high) = self.centre[j], self.spans[j]
            slack = 2 * UNIT * (c.abs() + torch.maximum(-low, high))
            bottom = c + low - slack
            top = c + high + slack
            found[j] = (
                torch.where(bottom.isnan(), -math.inf, bottom),
                torch.where(top.isnan(), math.inf, top),
            )
        return found

    def _affine(self, i: int, node: Node, op: Affine) -> None:
        """Values, interval arithmetic, and the error that rounding adds to `d_i = W d_j`."""
        centres = [self.centre[j] for j in node.inputs]
        spans = [self.spans[j] for j in node.inputs]
        map_ = op.map
        rough = rounding_map(map_)
        terms = map_.terms
        # Two products as one.
        value, middle = torch.chunk(
            map_.forward(*[torch.cat([c, (a + b) / 2]) for c, (a, b) in zip(centres, spans)]), 2
        )
        size, reach = torch.chunk(
            rough.forward(
                *[torch.cat([c.abs(), torch.maximum(-a, b)]) for c, (a, b) in zip(centres, spans)]
            ),
            2,
        )
        self.centre[i] = op.shifted(value)
        wide = self.graph.rounding + terms * UNIT
        residual = wide * (size + op.bias_size)
        if self.graph.arithmetic == "executed":
            residual = residual + self._executed(i, node)
        width = (
            magnitude_map(map_).forward(*[(b - a) / 2 for a, b in spans]) + wide * reach + residual
        )
        low = (middle - width).clamp(max=0)
        high = (middle + width).clamp(min=0)
        round_ = node.inputs == (0,) and self.balls.norm != math.inf
        norm = dual(self.balls.norm)
        lengths = map_.kept(("rows", norm), partial(map_.row_norms, norm)) if round_ else None
        if lengths is not None:
            radius = self.balls.radius.reshape(-1, *[1] * len(node.shape))
            # The length of a row of n entries is off by n / 2 + 3 roundings, the sum by 2. What is
            # reached is at most the exact length times the radius, and at most `reach`: that many
            # roundings of the smaller one are in `wide * reach`.
            ball = radius * lengths + wide * reach + residual
            low = torch.maximum(low, -ball)
            high = torch.minimum(high, ball)
        self.spans[i] = self._within_known(i, low, high)
        self._charge(i, node, map_, reach, residual)
        if len(node.inputs) == 1 and node.inputs[0] in self.boxes:
            self.tight.add(i)
            if map_.moves:
                self.boxes.add(i)

    def _within_known(self, i: int, low: Tensor, high: Tensor) -> Span:
        """The span of node i, narrowed by what is known of its values."""
        for known in (self.known, {} if self.cones is None else self.cones.reach.ranges):
            if i not in known:
                continue
            bottom, top = (side - self.centre[i] for side in known[i])
            slack = 2 * UNIT * (self.centre[i].abs() + torch.maximum(bottom.abs(), top.abs()))
            low = torch.maximum(low, (bottom - slack).clamp(max=0))
            high = torch.minimum(high, (top + slack).clamp(min=0))
        return low, high

    def _charge(self, i: int, node: Node, map_: Linear, reach: Tensor, residual: Tensor) -> None:
        """What rows pay for when they go through an affine node.

        A coefficient vector is rounded when it goes through the map and when it meets others at
        the map's inputs. reach: `|W| |d|` at most; residual: what its values are off by.
        """
        count = map_.back_terms + 4 + max(len(self.users[j]) for j in node.inputs)
        total = torch.stack([self._total(j) for j in node.inputs]).sum(0)
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 2 * count, total)
            error = (self.graph.rounding + 1.01 * kind.tiny * count) * reach + residual
            if map_.coefficients is not None:  # weights that underflow in this type
                error = error + kind.floor * total.reshape(-1, *[1] * len(node.shape))
            if map_.copies:
                # Coefficients are copied here, so the errors of the inputs may as well be charged
                # at the output.
                error = error + map_.forward(*[self._moved(kind, j) for j in node.inputs])
            kind.errors[i] = laid_out(
                rounding.up(error * (1 + rounding_of(node, kind)), kind.dtype)
            )

    def _executed(self, i: int, node: Node) -> Tensor:
        """What rounding adds where the network is executed (`executed.py`): an error of the
        node like any other.
        """
        assert self.graph.execution is not None
        sizes = [
            self.centre[j].abs() + torch.maximum(-self.spans[j][0], self.spans[j][1])
            for j in node.inputs
        ]
        sources = [self.graph.nodes[j] for j in node.inputs]
        ranges = [end_points(self.centre[j], *self.spans[j]) for j in node.inputs]
        error = call_error(node, sizes, self.graph.execution.dtype, sources, ranges)
        if self.cones is not None:  # which know how far the inputs move together
            error = torch.fmin(error, self.cones.reach.executed[i])
        self.executed[i] = error
        return self.executed[i]

    def _moved(self, kind: Arithmetic, j: int) -> Tensor:
        """The error of node j, charged to its only user instead; 0 if it has several."""
        once = j in kind.errors and len(self.users[j]) == 1
        return kind.errors.pop(j).double() if once else torch.zeros_like(self.centre[j])

    def _activation(self, i: int, node: Node) -> None:
        """The lines of an activation node, and the span of its output."""
        j = node.inputs[0]
        low, high = self.spans[j]
        most = torch.maximum(-low, high)
        shape = Shape(node, self.centre[j], low, high)
        if node.smooth and low.device != HOST:  # asked once, when the sweep is done
            self._bounded.append(within(*shape.ends).all())
        up, down = shape.slopes()
        alone = self.graph.nodes[j].matrix is not None and self.users[j] == [i]
        if alone and not node.smooth and up.device == HOST:
            self.passing[j] = (up != 0) | (down != 0)
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 8 + len(self.users[j]), self._total(j))
            error = self._moved(kind, j) + 1.01 * kind.tiny * (8 + len(self.users[j])) * most
            if kind is self.fast:
                self.parallel.lines.later(i, partial(shape.lines, up, up, error, kind.precision))
            kind.lines.later(i, partial(shape.lines, up, down, error, kind.precision))
            if self.cones is not None and kind is self.cones.kind:
                self.cones.add(i, shape, error)
            if kind is self.exact and not node.smooth:
                crossing = (shape.ends[0] < 0) & (shape.ends[1] > 0)
                make = partial(Bend.make, shape, error, crossing, up, down)
                self.later(i, crossing, make)
            if kind is self.exact and node.smooth:
                self.smooth[i] = (shape, error)
        self.centre[i], self.spans[i] = shape.output()

    def _curve(self, i: int, node: Node, curve: Curve) -> None:
        """The planes of a curve node, and the span of its output: what the planes leave of the
        curve's own range.
        """
        centres = [self.centre[j] for j in node.inputs]
        spans = [self.spans[j] for j in node.inputs]
        plane = curve.plane_on(centres, spans, InputExtent(self, node))
        for j in node.inputs:
            if self.users[j][-1] == i:
                self.spreads.pop(j, None)
        reach = plane.reach(*[torch.maximum(-low, high) for low, high in spans])
        total = torch.stack([self._total(j) for j in node.inputs]).sum(0)
        much = total + reach.reshape(len(reach), -1).sum(1)  # a plane may be several products
        count = plane.terms + 8 + max(len(self.users[j]) for j in node.inputs)
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 2 * count, much)
            errors = tuple(self._moved(kind, j) for j in node.inputs)
            kind.planes[i] = Planes.make(kind, node, plane, count, errors, reach, much)
        value = self.centre[i] = curve.value(*centres)
        ends = [end_points(c, low, high) for c, (low, high) in zip(centres, spans)]
        bottom, top = curve.span(*ends)
        low, high = rounding.outward(bottom - value, top - value)
        entries = sum(self.graph.nodes[j].size for j in node.inputs)  # what reach may add up
        wide = (reach + plane.far + plane.off.abs()) * (1 + (entries + 16) * UNIT)
        self.spans[i] = (
            torch.maximum(low, -wide).clamp(max=0),
            torch.minimum(high, wide).clamp(min=0),
        )

    def _tighten(self, j: int) -> None:
        """Bound node j, the input of an activation, by substitution where intervals leave it
        undecided.
        """
        node = self.graph.nodes[j]
        users = [self.graph.nodes[i] for i in self.users[j]]
        spread = None
        lengthwise = any(user.curve is not None and user.curve.lengthwise for user in users)
        if j not in self.spreads and lengthwise:
            spread = self.spreads[j] = Spread.zero(self.balls.x, node.size, self.graph.inputs)
        if j in self.tight and spread is None:
            return
        self.tight.add(j)
        low, high = (side.flatten(1).clone() for side in self.spans[j])
        smooth = any(user.smooth for user in users)
        windows = None if spread is not None else windows_of(self.graph, j)
        # Before the first line or plane all bounds are exact.
        if not smooth and (self.fast.lines or self.fast.planes):
            self._screened(j, low, high, windows)
        left = low < high if smooth else self.values.open_entries(j, low, high)
        if self.cones is not None and self.cones.enough and not self.steps:
            left = torch.zeros_like(left)
        if windows is not None and not self.steps:
            for some, owner, place in windows.groups(left):
                looks = windows.looks(j, self.exact, self.balls, some)
                upper = looks.above(owner, place)
                narrow_to(low, high, owner, place, -upper[len(place) :], upper[: len(place)])
                self.taken += 2 * len(place)
            left = torch.zeros_like(left)
        self._bounded_by_rows(j, low, high, left, smooth, spread)
        if self.cones is not None:
            self.cones.narrow(j, low, high)
        self.spans[j] = low.reshape(-1, *node.shape), high.reshape(-1, *node.shape)

    def _widest(self, j: int) -> int:
        """Numbers of one row on its way from node j."""
        return max(node.size for node in self.graph.nodes[: j + 1])

    def _screened(self, j: int, low: Tensor, high: Tensor, windows: InputWindows | None) -> None:
        """Spans of node j, `(N, size)`, narrowed in place with parallel lines in float32."""
        open_ = self.values.open_entries(j, low, high)
        if windows is not None:
            for some, owner, place in windows.groups(open_):
                looks = windows.looks(j, self.parallel, self.balls, some)
                narrow_to(low, high, owner, place, *looks.between(owner, place))
                self.taken += len(place)
            return
        chunks = chunks_of(open_, room_of(low.device) // self._widest(j), not self.coarse)
        for group in groups_of(chunks, low.device):
            found = in_step([self._screen(j, owner, place) for owner, place in group])
            for (owner, place), (bottom, top) in zip(group, found):
                narrow_to(low, high, owner, place, bottom, top)

    def _bounded_by_rows(
        self, j: int, low: Tensor, high: Tensor, left: Tensor, smooth: bool, spread: Spread | None
    ) -> None:
        """Spans of node j, `(N, size)`, narrowed in place by CROWN's lines where they are left."""
        size = low.shape[1]
        # Where most neurons stay open the bounds are too wide for the slack of float32 to matter.
        lost = (left.sum(1, keepdim=True) > MOSTLY * size) & (size >= WIDE // 2) & (not smooth)
        most = room_of(low.device) // (2 * self._widest(j))
        parts = two_chunks(left & ~lost, left & lost, most, not self.coarse)
        for coarse, chunks in zip((False, True), parts):
            for owner, place in chunks:
                constant, a = self._sides(j, owner, place, coarse or self.coarse)
                upper = constant + self.inputs.upper(a, doubled(owner), spent=spread is None)
                narrow_to(low, high, owner, place, -upper[len(place) :], upper[: len(place)])
                if spread is not None:
                    spread.put(owner, place, constant, a, self.inputs)

    def _sides(self, j: int, owner: Tensor, place: Tensor, coarse: bool) -> tuple[Tensor, Tensor]:
        """`d <= constant + <a, d_0>` and then the same for `-d`, for entries `place` of node j:
        `(2 R,)`, `(2 R, n)`.
        """
        if not self.steps:
            kind = self.fast if coarse else self.exact
            return self.substitute(kind, j, place, owner, True, units=True)[:2]
        rows = units_of(self.graph.nodes[j], place, torch.float64)
        return self.bound(j, rows, owner, self.steps, both=True)[:2]

    def _screen(
        self, j: int, owner: Tensor, place: Tensor
    ) -> Generator[Tensor, Tensor | None, Span]:
        """Bounds on `d` for entries `place` of node j, `(R,)` each: a row is dropped as soon as its
        neuron is decided.

        Yields which rows are undecided, and is sent their indices.
        """
        kind = self.parallel
        c = self.centre[j].flatten(1)[owner, place]
        best = (torch.full_like(c, -math.inf), torch.full_like(c, math.inf))
        alive = torch.arange(len(c), device=c.device)
        self.taken += len(c)
        columns = partial(self.columns, j)
        start = unit_rows(self.graph, kind, j, place, owner)
        back = Backward(self.graph, kind, *start, owner, apart=True, columns=columns)
        for i, node, w in back.neurons(j):
            assert back.shift is not None
            if i in self.stops and back.passed:  # right below node j it is what intervals gave
                back.weight[i] = w
                bottom, top = self._meet(back.weight, back.owner, back.shift, back.constant)
                best[0][alive] = torch.maximum(best[0][alive], bottom)
                best[1][alive] = torch.minimum(best[1][alive], top)
                open_ = yield (c[alive] + bottom < 0) & (c[alive] + top > 0)
                assert open_ is not None
                if not len(open_):
                    return best
                if len(open_) < len(alive):
                    alive = alive[open_]
                    back.keep(open_)
                w = back.weight.pop(i)
            line = kind.lines[i].take(back.owner)
            back.shift = back.shift + row_dot(w, line.off)
            back.take(node, w * line.mid, row_dot(w.abs(), line.far))
        assert back.shift is not None
        middle, reach = self.inputs.across(back.inputs(), back.owner)
        reach = back.constant + reach
        best[0][alive] = torch.maximum(best[0][alive], back.shift + middle - reach)
        best[1][alive] = torch.minimum(best[1][alive], back.shift + middle + reach)
        return best

    def _meet(
        self, weight: Mapping[int, Tensor], owner: Tensor, shift: Tensor, spread: Tensor
    ) -> Span:
        """`shift +- spread + <weight, d>` over the spans of the nodes that the rows have come
        down to.
        """
        for k, w in weight.items():
            if k not in self.halves:
                low, high = self.spans[k]
                middle = ((low + high) / 2).float()
                reach = (high - low) / 2
                reach = (
                    reach
                    + rounding_of(self.graph.nodes[k], self.fast) * (middle.abs() + reach)
                    + self.fast.floor
                )
                self.halves[k] = laid_out(middle), laid_out(rounding.up(reach, torch.float32))
            middle, reach = (of_owner(v, owner) for v in self.halves[k])
            shift = shift + row_dot(w, middle)
            spread = spread + row_dot(w.abs(), reach)
        return shift - spread, shift + spread


def margin_bounds(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    radius: Tensor | float,
    norm: float,
    domain: Domain,
    steps: int = 0,
    polish: str = "all",
) -> Tensor:
    """Lower bounds on `theta_y - theta_j` over each sample's ball cut by the box: `(N, K)`
    float64, 0 at `j = y`. polish: as in `margins`.
    """
    x = x.to(graph.device)
    y = y.to(graph.device)
    radius = torch.as_tensor(radius, dtype=torch.float64).expand(len(x))
    sweep = Sweep(graph, Balls.make(x, radius, norm, domain), steps).run()
    return margins(sweep, y, polish)[0]


def margins(sweep: Sweep, y: Tensor, polish: str = "all") -> tuple[Tensor, Tensor, Tensor]:
    """Lower bounds on the margins, `(N, K)`, and what they come from: `theta_y - theta_j >= base +
    <a, d>`.

    base `(N, K)`, a `(N, K, n)` in the order of `sweep.inputs`. polish: which margins get steps on
    the slopes of their own lines, "all", those that are not above 0 without ("open": enough where
    only that is asked), or "none".
    """
    last = len(sweep.graph.nodes) - 1
    outputs = sweep.graph.outputs
    n = len(y)
    eye = torch.eye(outputs, dtype=torch.float64, device=y.device)
    if not n or outputs == 1:
        none = eye[0].expand(n, -1) * 0
        return none, none, none[:, :, None].expand(-1, -1, sweep.graph.inputs)
    z = sweep.centre[last]
    here = z.gather(1, y[:, None]) - z
    size = z.abs().amax(1)
    widest = max(node.size for node in sweep.graph.nodes)
    found = []
    for owner, rival in all_chunks(n, outputs - 1, room_of(y.device) // widest, y.device):
        rival = rival + (rival >= y[owner])  # the label is no rival of its own
        rows = eye[rival] - eye[y[owner]]
        found.append(_rise(sweep, rows, owner, here[owner, rival], size[owner], polish))
    constant, a, reach, together = (
        _with_label(torch.cat(parts).reshape(n, outputs - 1, *parts[0].shape[1:]), y)
        for parts in zip(*found)
    )
    base, lower = _base_and_lower(here, constant, reach, size[:, None])
    slack = 4 * UNIT * (size[:, None] + together.abs())
    lower = torch.fmax(lower, here - together - slack)
    lower = torch.where(torch.isnan(lower), -math.inf, lower)  # an overflow is no bound
    lower = lower.scatter(1, y[:, None], 0.0)
    if sweep.balls.targets is not None:  # the one place that says which rows matter
        matters = sweep.balls.targets.matters
        lower = torch.where(matters, lower, math.inf)
        base = torch.where(matters, base, math.inf)
    return lower, base, -a


def _rise(
    sweep: Sweep, rows: Tensor, owner: Tensor, here: Tensor, size: Tensor, polish: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By how much rows of the last node may rise, `(R, K)`: `constant + <a, d>`, the most that the
    last can be, and what all of it is at most. here: the margins at the samples, size: of the
    logits, `(R,)` each.
    """
    last = len(sweep.graph.nodes) - 1
    constant, a, _ = sweep.bound(last, rows, owner)
    if polish == "open":
        lower = _base_and_lower(here, constant, sweep.inputs.upper(a, owner), size)[1]
        left = (~(lower > 0)).nonzero()[:, 0]
        mine = owner if len(owner) == 1 else owner[left]
        if len(left):
            constant[left], a[left] = sweep.climbed(
                last, rows[left], mine, max(sweep.steps, POLISH), constant[left], a[left]
            )
    elif polish == "all":
        constant, a = sweep.climbed(last, rows, owner, max(sweep.steps, POLISH), constant, a)
    reach = sweep.inputs.upper(a, owner)
    if sweep.cones is None or not sweep.cones.known:
        return constant, a, reach, torch.full_like(reach, math.inf)
    other, b, across = sweep.cones.bound(last, rows, owner)
    # Where both are equal but for rounding CROWN's stay.
    better = other.constant + across < constant + reach - ALIKE * (constant.abs() + reach)
    return (
        torch.where(better, other.constant, constant),
        torch.where(better[:, None], b, a),
        torch.where(better, across, reach),
        other.together,
    )


def _base_and_lower(here: Tensor, constant: Tensor, reach: Tensor, size: Tensor) -> Span:
    """A margin's value at the sample less what it may lose, without the linear part and with it;
    size: of the logits. All of one shape.
    """
    base = here - constant - 4 * UNIT * (size + constant)
    return base, base - reach - 4 * UNIT * (base.abs() + reach)


def _with_label(values: Tensor, y: Tensor) -> Tensor:
    """Values `(N, K - 1, ...)` of the rivals as `(N, K, ...)`, 0 for the label."""
    place = torch.arange(values.shape[1], device=y.device)
    place = place + (place >= y[:, None])
    full = values.new_zeros(values.shape[0], values.shape[1] + 1, *values.shape[2:])
    place = place.reshape(*place.shape, *[1] * (values.ndim - 2)).expand_as(values)
    return full.scatter_(1, place, values)
