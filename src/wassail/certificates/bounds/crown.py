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
- An error of a neuron's input by m is an error of its output by `slope m`: it goes into the
  neuron's shift, for nothing.
- A product that underflows is off by the smallest normal number, whatever w is. An entry of a
  coefficient vector that is off by that changes `<w, d>` by that times `|d|`, so all of a
  substitution is off by a constant that is known from the forward sweep (`Arithmetic.floors`). A
  weight that underflows when it is converted is an error of `d_i` like any other.

A curve (a product, a softmax, a normalisation) lies between two parallel planes, `J d + off +-
far`, with a map J of each sample's own, so that a coefficient vector goes through it as through a
layer (`curves.py`; Shi et al. 2020 for transformers).

Long because one sweep's steps (forward, screening, substitution, ascent) share its state.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import assert_never

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.bounds.ascent import Ascent
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.chunks import (
    ALONE,
    all_chunks,
    chunks_of,
    groups_of,
    in_step,
    room_of,
    two_chunks,
)
from wassail.certificates.bounds.corners import sectors_of
from wassail.certificates.bounds.executed import call_error
from wassail.certificates.bounds.lines import (
    Arithmetic,
    Bend,
    Lines,
    LinesByNode,
    Planes,
    Shape,
    Slopes,
    Spread,
    Surface,
    ends_of,
    entrywise,
    rounding_of,
    undecided,
)
from wassail.certificates.bounds.rows import (
    Length,
    Span,
    add_to,
    doubled,
    flattened,
    narrow_to,
    of_owner,
    repeated,
    row_dot,
    unflattened,
    units_of,
)
from wassail.certificates.bounds.windows import Looks, Windows
from wassail.certificates.device import HOST
from wassail.certificates.graph.activations import UNBOUNDED, within
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Node, Relu, Smooth
from wassail.certificates.graph.maps import (
    Matrix,
    Pick,
    Scale,
    Sum,
    laid_out,
    magnitude_map,
    rounding_map,
)
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.planes import Curve, Plane
from wassail.errors import InputError
from wassail.rounding import UNIT
from wassail.threat import Domain, dual
from wassail.ties import firm

POLISH = 4  # steps of the ascent on the slopes for the margins themselves, where they cost little


# Networks with at most so many layers of activations, and a node this large, are bounded in float32
# inside; so are transformers without a node this large, where the slack for rounding is far below
# that of the planes.
SHALLOW = 6
WIDE = 1024
STILL = 2.0**-40  # of the values that a node is computed from: what moves less stands still
ALIKE = 1e-6  # of a bound: a difference that rounding can make
FULL = 0.8  # share of active neurons from which on the others are multiplied, too
MOSTLY = 0.6  # share of open neurons from which on a node is bounded in float32 too


class Sweep:
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
        _check_precision(graph)
        self.graph = graph
        self.balls = balls
        self.steps = steps
        self.known = known or {}
        self.lengths = lengths
        nodes = graph.nodes
        self.users = graph.users
        self.exact = Arithmetic(graph, torch.float64)
        self.fast = Arithmetic(graph, torch.float32)
        self.parallel = Arithmetic(graph, torch.float32, self.fast)
        self.order = flattened(
            torch.arange(graph.inputs, device=graph.device).reshape(1, *nodes[0].shape).contiguous()
        )[0]
        # as coefficient vectors are laid out: pixel by pixel, where there are several channels
        images = len(nodes[0].shape) == 3 and nodes[0].shape[0] > 1
        self.inputs = balls.reordered(self.order) if images else balls
        self.centre: dict[int, Tensor] = {}
        self.spans: dict[int, Span] = {}
        # nodes whose values fill a box: maps of them are bounded exactly by intervals
        self.boxes: set[int] = set()
        self.tight: set[int] = set()  # nodes whose spans substitution cannot improve
        # Where rows are asked whether they are decided: before layers that are larger, and so
        # dearer, than those above.
        acts = [i for i, node in enumerate(nodes) if entrywise(node)]
        widest = max(node.size for node in nodes)
        deep = sum(_weighted(nodes, nodes[i].inputs[0]) for i in acts)
        self.coarse = widest <= WIDE if graph.curved else deep <= SHALLOW and widest >= WIDE
        self.stops = {
            i for i, below in zip(acts[1:], acts) if nodes[below].size > nodes[i].size
        } | set(acts[:1])
        self._bends: dict[int, Bend] = {}
        self._slopes: dict[int, Slopes] = {}
        self.smooth: dict[
            int, tuple[Shape, Tensor]
        ] = {}  # of smooth activations, with the error of the input in float64
        self.surfaces: dict[int, Surface] = {}  # of curves
        self._unasked: dict[
            int, tuple[Tensor, partial[Bend]]
        ] = {}  # whether there are any, and how to make them
        self._bounded: list[Tensor] = []  # whether the inputs of activations are, one number each
        self.halves: dict[
            int, Span
        ] = {}  # middle and half width of the spans where rows are asked, in float32
        self.spreads: dict[int, Spread] = {}
        self.executed: dict[int, Tensor] = {}  # errors of nodes as they are executed, `(N, *shape)`
        # Where one of the slopes of the only activation that reads a matrix is not 0, by the
        # matrix's node; and as places, by that and the sample.
        self.passing: dict[int, Tensor] = {}
        self.awake: dict[tuple[int, int], Tensor | None] = {}
        self.rows = 0  # coefficient vectors substituted so far
        self.sectors = sectors_of(self)

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
    def bends(self) -> dict[int, Bend]:
        """What an ascent or a branching needs to know of the ReLU nodes with undecided neurons.

        Whether a node has any is asked for all nodes at once, since the host waits for a device's
        answer.
        """
        if self._unasked:
            some = torch.stack([flag for flag, _ in self._unasked.values()]).tolist()
            self._bends.update(
                {i: make() for (i, (_, make)), any_ in zip(self._unasked.items(), some) if any_}
            )
            self._unasked.clear()
        return self._bends

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
        """Values, interval arithmetic, and the error that rounding adds to `d_i = W d_j`.

        Long because the value, the span and the errors of a node come from the same magnitudes.
        """
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
        for known in (self.known, {} if self.sectors is None else self.sectors.reach.ranges):
            if i not in known:
                continue
            bottom, top = (side - self.centre[i] for side in known[i])
            slack = 2 * UNIT * (self.centre[i].abs() + torch.maximum(bottom.abs(), top.abs()))
            low = torch.maximum(low, (bottom - slack).clamp(max=0))
            high = torch.minimum(high, (top + slack).clamp(min=0))
        self.spans[i] = low, high
        # A coefficient vector is rounded when it goes through the map and when it meets others at
        # the map's inputs.
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
        if len(node.inputs) == 1 and node.inputs[0] in self.boxes:
            self.tight.add(i)
            if map_.moves:
                self.boxes.add(i)

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
        ranges = [ends_of(self.centre[j], *self.spans[j]) for j in node.inputs]
        error = call_error(node, sizes, self.graph.execution.dtype, sources, ranges)
        if self.sectors is not None:  # which know how far the inputs move together
            error = torch.fmin(error, self.sectors.reach.executed[i])
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
        if isinstance(node.op, Smooth) and low.device != HOST:  # asked once, when the sweep is done
            self._bounded.append(within(*shape.ends).all())
        up, down = shape.slopes()
        before = self.graph.nodes[j].op
        matrix = isinstance(before, Affine) and isinstance(before.map, Matrix)
        alone = matrix and up.ndim == 2 and self.users[j] == [i]
        if alone and isinstance(node.op, Relu) and up.device == HOST:
            self.passing[j] = (up != 0) | (down != 0)
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 8 + len(self.users[j]), self._total(j))
            error = self._moved(kind, j) + 1.01 * kind.tiny * (8 + len(self.users[j])) * most
            if kind is self.fast:
                self.parallel.lines.later(i, partial(shape.lines, up, up, error, kind.precision))
            kind.lines.later(i, partial(shape.lines, up, down, error, kind.precision))
            if self.sectors is not None and kind is self.sectors.kind:
                self.sectors.add(i, shape, error)
            if kind is self.exact and isinstance(node.op, Relu):
                crossing = (shape.ends[0] < 0) & (shape.ends[1] > 0)
                slope = node.op.slope
                make = partial(_bend, kind.lines, i, slope, shape, crossing, error, up, down)
                self._unasked[i] = (crossing.any(), make)
            if kind is self.exact and isinstance(node.op, Smooth):
                self.smooth[i] = (shape, error)
        self.centre[i], self.spans[i] = shape.output()

    def _curve(self, i: int, node: Node, curve: Curve) -> None:
        """The planes of a curve node, and the span of its output: what the planes leave of the
        curve's own range.
        """
        centres = [self.centre[j] for j in node.inputs]
        spans = [self.spans[j] for j in node.inputs]
        users = max(len(self.users[j]) for j in node.inputs)
        lengths: list[Tensor] = []
        if isinstance(curve, Product):
            lengths = [self._length(j, axes) for j, axes in zip(node.inputs, curve.summed())]
        surface = Surface(node, curve, tuple(centres), tuple(spans), tuple(lengths), users)
        plane = self._plane(surface)
        for j in node.inputs:
            if self.users[j][-1] == i:
                self.spreads.pop(j, None)
        reach = plane.reach(*[torch.maximum(-low, high) for low, high in spans])
        total = torch.stack([self._total(j) for j in node.inputs]).sum(0)
        much = total + reach.reshape(len(reach), -1).sum(1)  # a plane may be several products
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 2 * surface.count(plane), much)
            errors = tuple(self._moved(kind, j) for j in node.inputs)
            kind.planes[i] = Planes.make(kind, surface, plane, errors, reach, much)
            if kind is self.exact:
                self.surfaces[i] = replace(surface, errors=errors)
        value = self.centre[i] = curve.value(*centres)
        ends = [ends_of(c, low, high) for c, (low, high) in zip(centres, spans)]
        bottom, top = curve.span(*ends)
        low, high = rounding.outward(bottom - value, top - value)
        entries = sum(self.graph.nodes[j].size for j in node.inputs)  # what reach may add up
        wide = (reach + plane.far + plane.off.abs()) * (1 + (entries + 16) * UNIT)
        self.spans[i] = (
            torch.maximum(low, -wide).clamp(max=0),
            torch.minimum(high, wide).clamp(min=0),
        )

    def _plane(self, surface: Surface) -> Plane:
        """The plane of a curve around the samples, with what is known beyond the spans."""
        curve = surface.curve
        centres = surface.centres
        spans = surface.spans
        if isinstance(curve, Normalise):
            j = surface.node.inputs[0]
            along = self._along(j, curve.direction(centres[0], spans[0]))
            length = self._length(j, (len(surface.node.shape) - 1,))
            return curve.plane(centres, spans, along, length)
        if isinstance(curve, Product):
            return curve.plane(centres, spans, surface.lengths)
        return curve.plane(centres, spans)

    def _along(self, j: int, direction: Tensor) -> Span:
        """The range of `<direction, d>` for every token of node j, `(N, *shape)` to `(N, ...,
        1)`: one row for each.
        """
        node = self.graph.nodes[j]
        width = direction.shape[-1]
        count = node.size // width
        tokens = direction.reshape(len(direction), count, width)
        top = direction.new_empty(2, len(direction), count)
        widest = max(n.size for n in self.graph.nodes[: j + 1])
        for owner, place in all_chunks(
            len(direction), count, room_of(top.device) // (2 * widest), top.device
        ):
            rows = direction.new_zeros(len(place), count, width)
            rows = rows.scatter(
                1, place[:, None, None].expand(-1, 1, width), tokens[owner, place][:, None]
            )
            constant, a, both = self._substitute(
                self.exact, j, laid_out(rows.reshape(-1, *node.shape)), owner, True
            )
            top[:, owner, place] = (constant + self.inputs.upper(a, both)).reshape(2, -1)
        top = torch.where(torch.isnan(top), math.inf, top)  # an overflow is no bound
        high, low = (side.reshape(*direction.shape[:-1], 1) for side in (top[0], -top[1]))
        return low, high

    def _tighten(self, j: int) -> None:
        """Bound node j, the input of an activation, by substitution where intervals leave it
        undecided.

        Long because screening, and then the full bounds, narrow the same two tensors.
        """
        node = self.graph.nodes[j]
        users = [self.graph.nodes[i].op for i in self.users[j]]
        spread = None
        lengthwise = any(
            isinstance(op, Curved) and isinstance(op.curve, Normalise | Product) for op in users
        )
        if j not in self.spreads and lengthwise:
            spread = self.spreads[j] = Spread.zero(self.balls.x, node.size, self.graph.inputs)
        if j in self.tight and spread is None:
            return
        self.tight.add(j)
        low, high = (side.flatten(1).clone() for side in self.spans[j])
        c = self.centre[j].flatten(1)
        smooth = any(isinstance(op, Smooth | Curved) for op in users)
        widest = max(n.size for n in self.graph.nodes[: j + 1])
        room = room_of(c.device)
        windows = None if spread is not None else Windows.of(self.graph, j)
        if not smooth and (
            self.fast.lines or self.fast.planes
        ):  # before the first of them all bounds are exact
            open_ = self.open_entries(j, low, high)
            if windows is not None:
                for some, owner, place in windows.groups(open_):
                    looks = Looks(windows, j, self.parallel, self.inputs, self.balls, some)
                    narrow_to(low, high, owner, place, *looks.between(owner, place))
                    self.rows += len(place)
            most = room // widest
            chunks = iter(()) if windows is not None else chunks_of(open_, most, not self.coarse)
            for group in groups_of(chunks, c.device):
                found = in_step([self._screen(j, owner, place) for owner, place in group])
                for (owner, place), (bottom, top) in zip(group, found):
                    narrow_to(low, high, owner, place, bottom, top)
        left = low < high if smooth else self.open_entries(j, low, high)
        if self.sectors is not None and self.sectors.enough and not self.steps:
            left = torch.zeros_like(left)
        if windows is not None and not self.steps:
            for some, owner, place in windows.groups(left):
                looks = Looks(windows, j, self.exact, self.inputs, self.balls, some)
                upper = looks.above(owner, place)
                narrow_to(low, high, owner, place, -upper[len(place) :], upper[: len(place)])
                self.rows += 2 * len(place)
            left = torch.zeros_like(left)
        # Where most neurons stay open the bounds are too wide for the slack of float32 to matter.
        lost = (
            (left.sum(1, keepdim=True) > MOSTLY * node.size)
            & (node.size >= WIDE // 2)
            & (not smooth)
        )
        for coarse, chunks in zip(
            (False, True),
            two_chunks(left & ~lost, left & lost, room // (2 * widest), not self.coarse),
        ):
            for owner, place in chunks:
                constant, a = self._sides(j, owner, place, coarse or self.coarse)
                upper = constant + self.inputs.upper(a, doubled(owner), spent=spread is None)
                narrow_to(low, high, owner, place, -upper[len(place) :], upper[: len(place)])
                if spread is not None:
                    spread.put(owner, place, constant, a, self.inputs)
        if self.sectors is not None:
            self.sectors.narrow(j, low, high)
        self.spans[j] = low.reshape(-1, *node.shape), high.reshape(-1, *node.shape)

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

    def _sides(self, j: int, owner: Tensor, place: Tensor, coarse: bool) -> tuple[Tensor, Tensor]:
        """`d <= constant + <a, d_0>` and then the same for `-d`, for entries `place` of node j:
        `(2 R,)`, `(2 R, n)`.
        """
        if not self.steps:
            kind = self.fast if coarse else self.exact
            return self._substitute(kind, j, place, owner, True, units=True)[:2]
        rows = units_of(self.graph.nodes[j], place, torch.float64)
        return self.bound(j, rows, owner, self.steps, both=True)[:2]

    def _length(self, j: int, axes: tuple[int, ...]) -> Tensor:
        """Bounds on the Euclidean norm of `d - middle of its span` along some axes of node j: `(N,
        *shape)`, length 1 there.

        With `d = A d_0 + shift +- rest`: the norm of A on the ball, and that of the rest. `d = 0`
        is one of the deviations, so `|shift| <= rest`, and the middle is no farther from it than
        the norm: the factor pays for their roundings, and the slack of `stretch` for that of
        `start`.
        """
        shape = self.graph.nodes[j].shape
        spread = self.spreads[j]
        kept = [k for k in range(len(shape)) if k not in axes]
        width = math.prod(shape[k] for k in axes)
        count = math.prod(shape[k] for k in kept)

        def grouped(values: Tensor) -> Tensor:
            own = values.reshape(len(values), *shape, -1)
            own = own.permute(0, *(k + 1 for k in kept), *(k + 1 for k in axes), len(shape) + 1)
            return own.reshape(len(values), count, width, -1)

        low, high = (grouped(side)[..., 0] for side in self.spans[j])
        middle = (low + high) / 2
        a = grouped(spread.a)
        start, stretch = self.inputs.stretch(a)
        shift = start + grouped(spread.shift)[..., 0] - middle
        apart = shift.abs() + grouped(spread.rest)[..., 0]
        found = (stretch + rounding.length(apart, 2, 2)) * (1 + (width + 8) * UNIT)
        wide = rounding.length(torch.maximum(high - middle, middle - low), 2, 2) * (
            1 + (width + 8) * UNIT
        )
        return torch.fmin(found, wide).reshape(
            -1, *(1 if k in axes else shape[k] for k in range(len(shape)))
        )

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
        # d_j lies in shift +- spread + <weight, d>
        weight, spread = self.units(kind, j, place, owner)
        shift = torch.zeros_like(c)
        alive = torch.arange(len(c), device=c.device)
        self.rows += len(c)
        passed = False  # whether an activation or a curve was
        for i in range(j, 0, -1):
            if i not in weight:
                continue
            node = self.graph.nodes[i]
            w = weight.pop(i)
            if isinstance(node.op, Affine):
                if i in kind.errors:
                    spread = spread + row_dot(w.abs(), of_owner(kind.errors[i], owner))
                some = self._columns(i, j, w, owner)
                for k, part in zip(node.inputs, kind.maps[i].transpose(w, some)):
                    add_to(weight, k, part)
                continue
            if i in kind.planes:
                off, far = kind.planes[i].pull(weight, node.inputs, w, owner)
                shift = shift + off
                spread = spread + far
                passed = True
                continue
            if i in self.stops and passed:  # right below node j it is what intervals gave
                weight[i] = w
                bottom, top = self._meet(weight, owner, shift, spread)
                best[0][alive] = torch.maximum(best[0][alive], bottom)
                best[1][alive] = torch.minimum(best[1][alive], top)
                open_ = yield (c[alive] + bottom < 0) & (c[alive] + top > 0)
                assert open_ is not None
                if not len(open_):
                    return best
                if len(open_) < len(alive):
                    owner = owner if len(owner) == 1 else owner[open_]
                    alive = alive[open_]
                    shift = shift[open_]
                    spread = spread[open_]
                    weight = {k: v[open_] for k, v in weight.items()}
                w = weight.pop(i)
            line = kind.lines[i].take(owner)
            shift = shift + row_dot(w, line.off)
            spread = spread + row_dot(w.abs(), line.far)
            add_to(weight, node.inputs[0], w * line.mid)
            passed = True
        a = (
            flattened(weight[0])
            if 0 in weight
            else shift.new_zeros(len(alive), self.graph.inputs, dtype=kind.dtype)
        )
        middle, reach = self.inputs.across(a, owner)
        best[0][alive] = torch.maximum(best[0][alive], shift + middle - (spread + reach))
        best[1][alive] = torch.minimum(best[1][alive], shift + middle + (spread + reach))
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

    def bound(
        self, last: int, rows: Tensor, owner: Tensor, steps: int = 0, both: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`<row, d_last> <= constant + <a, d_0>` on each row's ball: `(R, *shape), (R,) -> (R,),
        (R, n), (R,)`.

        both: the negatives of the rows after them, `2 R` of each. With steps the slopes of the
        lower lines are optimised for each row on its own (alpha-CROWN, Xu et al. 2021): any slope
        between the neuron's two gives a bound.
        """
        constant, a, owner = self._substitute(self.exact, last, rows, owner, both)
        rows = torch.cat([rows, -rows]) if both else rows
        return *self.climbed(last, rows, owner, steps, constant, a), owner

    def climbed(
        self, last: int, rows: Tensor, owner: Tensor, steps: int, constant: Tensor, a: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The better, row by row, of bounds that `bound` gave without steps, `(R,)` and `(R, n)`,
        and those with steps.
        """
        if not steps or not any(i < last and i in self.bends for i in self.exact.lines):
            return constant, a
        ascend = self._climb if self.graph.curved else self._ascend
        alpha = ascend(last, rows.float(), owner, steps)
        other, b, _ = self._substitute(
            self.exact, last, rows, owner, False, {k: v.double() for k, v in alpha.items()}
        )
        better = other + self.inputs.upper(b, owner) < constant + self.inputs.upper(a, owner)
        return torch.where(better, other, constant), torch.where(better[:, None], b, a)

    def slopes(self, i: int) -> Slopes:
        """The lines of activation i in float64, as a choice of slopes sees them."""
        if i not in self._slopes:
            self._slopes[i] = Slopes.of(self.exact.lines[i], self.bends.get(i), self.exact)
        return self._slopes[i]

    def _ascend(self, last: int, rows: Tensor, owner: Tensor, steps: int) -> dict[int, Tensor]:
        """The slopes of the lower lines that gave each row its lowest bound, by Adam in
        float32: nothing is proved here.
        """
        lines = {i: self.slopes(i).to(rows.dtype).take(owner) for i in self.exact.lines if i < last}
        alpha = {i: repeated(lines[i].down, rows.shape[0]) for i in self.bends if i < last}
        ascent = Ascent(list(alpha.values()))
        for step in range(1, steps + 1):
            clock.check()
            found = self._pulled(last, rows, owner, lines, alpha, step < steps)
            if found is None:  # no undecided neuron feeds the rows
                break
            value, pulls = found
            ascent.keep(-value, list(alpha.values()))
            if step == steps:  # nothing comes after it
                break
            for i, move in zip(alpha, ascent.moves([pulls.get(i) for i in alpha])):
                if move is not None:
                    moved = torch.sub(alpha[i], move, alpha=0.3 * 0.9**step)
                    alpha[i] = torch.maximum(moved, self.bends[i].slope).clamp_(max=1.0)
        return dict(zip(alpha, ascent.kept))

    def _pulled(
        self,
        last: int,
        rows: Tensor,
        owner: Tensor,
        lines: Mapping[int, Slopes],
        alpha: Mapping[int, Tensor],
        steer: bool,
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """The bound of each row with these slopes, `(R,)`, and, to steer by, its gradient with
        respect to them, rounded anyhow; None where no slope matters.

        The gradient with respect to the coefficients of the input is the deviation that reaches the
        bound. From there it goes up through the network, as a point does.
        """
        nodes = self.graph.nodes
        maps = self.fast.maps
        weight: dict[int, Tensor] = {last: rows}
        path: list[tuple[int, Tensor]] = []
        value = rows.new_zeros(len(rows), dtype=torch.float64)
        for i in range(last, 0, -1):
            if i not in weight:
                continue
            w = weight.pop(i)
            path.append((i, w))
            if i not in lines:
                for j, part in zip(nodes[i].inputs, maps[i].transpose(w)):
                    add_to(weight, j, part)
                continue
            part, constant = lines[i].pull(w, alpha.get(i, lines[i].down))
            value = value + constant
            add_to(weight, nodes[i].inputs[0], part)
        known = [i for i, _ in path if i in alpha]
        if not known or 0 not in weight:
            return None
        if not steer:
            return value + self.inputs.support(flattened(weight[0]), owner), {}
        reach, point = self.inputs.worst(flattened(weight[0]), owner)
        moved = {0: laid_out(unflattened(point, nodes[0].shape))}
        pulls: dict[int, Tensor] = {}
        for i, w in reversed(path):
            if i > known[0]:
                break
            given = [moved[j] for j in nodes[i].inputs]
            if i in lines:
                moved[i], pull = lines[i].push(w, alpha.get(i, lines[i].down), given[0])
                if i in alpha:
                    pulls[i] = pull
            else:
                moved[i] = maps[i].forward(*given)
        return value + reach, pulls

    def _climb(self, last: int, rows: Tensor, owner: Tensor, steps: int) -> dict[int, Tensor]:
        """As `_ascend`, for networks with curves, whose planes have no way back of their own: by
        torch's gradients.
        """
        alpha = {
            i: of_owner(self.bends[i].down, owner)
            .expand(len(rows), *self.bends[i].down.shape[1:])
            .clone()
            for i in self.bends
            if i < last
        }
        ascent = Ascent(list(alpha.values()))
        for step in range(1, steps + 1):
            clock.check()
            with torch.enable_grad():
                leaves = {i: a.requires_grad_(True) for i, a in alpha.items()}
                constant, a, _ = self._substitute(self.fast, last, rows, owner, False, leaves)
                value = constant + self.inputs.upper(firm(a), owner)
                if not value.requires_grad:  # no undecided neuron feeds the rows
                    break
                pulls: tuple[Tensor | None, ...] = ()
                if step < steps:
                    pulls = torch.autograd.grad(
                        value.sum(), list(leaves.values()), allow_unused=True
                    )
            ascent.keep(-value.detach(), list(alpha.values()))
            if step == steps:  # nothing comes after it
                break
            for i, move in zip(alpha, ascent.moves(pulls)):
                old = alpha[i].detach()
                if move is None:  # no undecided neuron of this node feeds the row's
                    alpha[i] = old
                    continue
                slope = self.bends[i].slope
                alpha[i] = torch.minimum(
                    torch.maximum(old - 0.3 * 0.9**step * move, slope), torch.ones_like(slope)
                )
        return dict(zip(alpha, ascent.kept))

    def _substitute(
        self,
        kind: Arithmetic,
        last: int,
        rows: Tensor,
        owner: Tensor,
        both: bool,
        alpha: Mapping[int, Tensor] | None = None,
        units: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward to the input; until the first activation the rows and their negatives go
        through as one. units: the rows are unit vectors, and given by their places `(R,)`.

        Long because activations, curves and maps share one store of rows.
        """
        nodes = self.graph.nodes
        weight: dict[int, Tensor] = {last: rows}
        constant = kind.floors[last][owner].expand(len(rows))
        if units:
            weight, constant = self.units(kind, last, rows, owner)
        self.rows += len(rows) * (1 + both)
        for i in range(last, 0, -1):
            if i not in weight:
                continue
            node = nodes[i]
            w = weight.pop(i)
            if not isinstance(node.op, Affine):
                if both:
                    weight = {k: torch.cat([v, -v]) for k, v in weight.items()}
                    constant = constant.repeat(2)
                if i in kind.planes:
                    w = torch.cat([w, -w]) if both else w
                    mine = doubled(owner) if both else owner
                    off, far = kind.planes[i].pull(weight, node.inputs, w, mine)
                    constant = constant + off + far
                else:
                    part, more = self._through(kind, i, w, owner, both, alpha)
                    constant = constant + more
                    add_to(weight, node.inputs[0], part)
                owner = doubled(owner) if both else owner
                both = False
                continue
            if i in kind.errors:
                constant = constant + row_dot(w.abs(), of_owner(kind.errors[i], owner))
            some = self._columns(i, last, w, owner)
            for j, part in zip(node.inputs, kind.maps[i].transpose(w, some)):
                add_to(weight, j, part)
        if both:
            weight = {k: torch.cat([v, -v]) for k, v in weight.items()}
            constant = constant.repeat(2)
            owner = doubled(owner)
        a = (
            flattened(weight[0])
            if 0 in weight
            else constant.new_zeros(len(constant), self.graph.inputs, dtype=kind.dtype)
        )
        return constant, a, owner

    def _through(
        self,
        kind: Arithmetic,
        i: int,
        w: Tensor,
        owner: Tensor,
        both: bool,
        alpha: Mapping[int, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Coefficients `(R, *shape)` of the output of activation i, and then their negatives if
        both are wanted, as those of its input, and a constant `(R,)`.
        """
        if both and alpha is None:
            return kind.lines[i].take(owner).pull_both(w)
        if both:
            w = torch.cat([w, -w])
            owner = doubled(owner)
        if alpha is not None and i in alpha and kind is self.exact:
            return self._bent(i, w, owner, alpha[i])
        line = self._lines(kind, i, owner, alpha)
        w = firm(w)
        size = w.abs()
        constant = row_dot(w, line.off) + row_dot(size, line.far)
        return torch.addcmul(w * line.mid, size, line.rad), constant

    def _columns(self, i: int, last: int, w: Tensor, owner: Tensor) -> Tensor | None:
        """Where rows of coefficients of node i, a matrix, can differ from 0: neurons that are never
        active pass nothing on. None where it is not worth knowing, or not known without asking a
        device. last: where the rows began.
        """
        if i == last or i not in self.passing or w.shape[0] < ALONE or owner.shape[0] != 1:
            return None
        at = (i, int(owner))
        if at not in self.awake:
            active = self.passing[i][at[1]].nonzero()[:, 0]
            self.awake[at] = active if len(active) < FULL * w.shape[1] else None
        return self.awake[at]

    def _bent(self, i: int, w: Tensor, owner: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients through activation i with the slopes `alpha` below, in float64."""
        op = self.graph.nodes[i].op
        assert isinstance(op, Relu)
        line = self.slopes(i).take(owner)
        # Between its two slopes, also after it was rounded to float32.
        a = torch.maximum(alpha, op.slope).clamp(max=1.0)
        return line.pull(w, torch.where(line.crossing > 0, a, line.down))

    def units(
        self, kind: Arithmetic, last: int, place: Tensor, owner: Tensor
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Unit vectors for entries `place` of a node, taken through the affine nodes right before
        it: the coefficients that they become, and the errors on the way, `(R,)`.

        A row of a map is read off its weights, and nothing is rounded. A sum passes unit vectors on
        as they are.
        """
        weight: dict[int, Tensor] = {}
        constant = kind.floors[last][owner].expand(len(place))
        pure = [last]
        while pure:
            i = pure.pop()
            node = self.graph.nodes[i]
            if not isinstance(node.op, Affine):
                add_to(weight, i, units_of(node, place, kind.dtype))
                continue
            if i in kind.errors:
                error = kind.errors[i]
                constant = constant + error.reshape(len(error), -1)[owner, place].double()
            map_ = node.op.map
            passed = isinstance(map_, Sum) or (isinstance(map_, Pick) and map_.source is None)
            if passed and all(self.users[j] == [i] or j == 0 for j in node.inputs):
                pure.extend(node.inputs)
                continue
            for j, part in zip(node.inputs, kind.maps[i].rows(place, node)):
                add_to(weight, j, part)
        return weight, constant

    def _lines(
        self, kind: Arithmetic, i: int, owner: Tensor, alpha: Mapping[int, Tensor] | None
    ) -> Lines:
        """The lines of activation i for rows of `owner`, with the slopes `alpha` below if there
        are any: those in float32, for an ascent.
        """
        if alpha is None or i not in alpha:
            return kind.lines[i].take(owner)
        bend = self.bends[i].take(owner)
        line = kind.lines[i].take(owner)
        a = alpha[i]
        below = a * bend.c - bend.here  # the line through the kink
        mid = (bend.up + a) / 2
        rad = (bend.up - a) / 2
        off = (bend.above + below) / 2
        far = (bend.above - below) / 2
        pairs = ((mid, line.mid), (rad, line.rad), (off, line.off), (far, line.far))
        return Lines(*(torch.where(bend.crossing, new, old) for new, old in pairs))


def _bend(
    lines: LinesByNode,
    i: int,
    slope: Tensor,
    shape: Shape,
    crossing: Tensor,
    error: Tensor,
    up: Tensor,
    down: Tensor,
) -> Bend:
    """What an ascent or a branching needs to know of node i; lines: in float64."""
    line = lines[i]
    parts = (up, line.off + line.far, down, shape.c, shape.output()[0])
    up, above, down, c, here = (laid_out(v.float()) for v in parts)
    return Bend(shape, error, laid_out(crossing), up, above, down, c, here, slope.float())


def _check_precision(graph: Graph) -> None:
    """Refuse products that are rounded to fewer digits than bounds account for."""
    reduced = torch.get_float32_matmul_precision() != "highest"
    if reduced or torch.is_autocast_enabled(graph.device.type):
        raise InputError(
            "torch is set to round float32 products to fewer digits: certify outside autocast and "
            "with torch.set_float32_matmul_precision('highest')."
        )


def _weighted(nodes: Sequence[Node], j: int) -> bool:
    """Whether weights lie between node j and the activations before it. None do where maxima are
    written as ReLUs: those add next to no rounding, and do not count as depth.
    """
    op = nodes[j].op
    if not isinstance(op, Affine):
        return False
    if op.map.coefficients is not None and not isinstance(op.map, Scale):
        return True
    return any(_weighted(nodes, k) for k in nodes[j].inputs)


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
        constant, a, _ = sweep.bound(last, rows, owner)
        if polish == "open":
            reach = sweep.inputs.upper(a, owner)
            lower = _base_and_lower(here[owner, rival], constant, reach, size[owner])[1]
            left = (~(lower > 0)).nonzero()[:, 0]
            mine = owner if len(owner) == 1 else owner[left]
            if len(left):
                constant[left], a[left] = sweep.climbed(
                    last, rows[left], mine, max(sweep.steps, POLISH), constant[left], a[left]
                )
        elif polish == "all":
            constant, a = sweep.climbed(last, rows, owner, max(sweep.steps, POLISH), constant, a)
        reach = sweep.inputs.upper(a, owner)
        together = torch.full_like(reach, math.inf)
        if sweep.sectors is not None and sweep.sectors.known:
            other, b, across = sweep.sectors.bound(last, rows, owner)
            near = constant + reach
            # Where both are equal but for rounding CROWN's stay.
            better = other.constant + across < near - ALIKE * (constant.abs() + reach)
            constant = torch.where(better, other.constant, constant)
            reach = torch.where(better, across, reach)
            a = torch.where(better[:, None], b, a)
            together = other.together
        found.append((constant, a, reach, together))
    constant, a, reach, together = (
        _with_label(torch.cat(parts).reshape(n, outputs - 1, *parts[0].shape[1:]), y)
        for parts in zip(*found)
    )
    base, lower = _base_and_lower(here, constant, reach, size[:, None])
    slack = 4 * UNIT * (size[:, None] + together.abs())
    lower = torch.fmax(lower, here - together - slack)
    lower = torch.where(torch.isnan(lower), -math.inf, lower)  # an overflow is no bound
    lower = lower.scatter(1, y[:, None], 0.0)
    return lower, base, -a


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
