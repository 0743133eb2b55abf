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
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.activations import ACTIVATIONS, UNBOUNDED, within
from wassail.certificates.curves import Curve, Normalise, Plane, Product
from wassail.certificates.device import HOST, plain
from wassail.certificates.executed import step_error
from wassail.certificates.propagate import _terms
from wassail.certificates.structure import (
    Concat,
    Conv,
    Graph,
    Linear,
    Matrix,
    Node,
    Pick,
    Scale,
    Sum,
    rounding_map,
)
from wassail.errors import InputError
from wassail.geometry import fill
from wassail.rounding import FLOOR, TINY
from wassail.threat import Domain, dual
from wassail.ties import firm, quiet, steep_below

Span: TypeAlias = "tuple[Tensor, Tensor]"
Chunk: TypeAlias = "tuple[Tensor, Tensor]"  # owner and place of rows
ALONE = 24  # rows of one sample that are worth a pass of their own
CHUNK = 2**19  # numbers in one tensor of a backward pass: about what a cache holds
# the same on another device, and how many such tensors are kept at a time
LARGE = 2**23
TOGETHER = 8
POLISH = 4  # steps of the ascent on the slopes for the margins themselves, where they cost little
# Networks with at most so many activations, and a node this large, are bounded in float32 inside;
# so are transformers without a node this large, where the slack for rounding is far below that of
# the planes.
SHALLOW = 6
WIDE = 1024
MOSTLY = 0.6  # share of open neurons from which on a node is bounded in float32 too


@dataclass(frozen=True, eq=False)
class Balls:
    """N regions `{x + d : ||d||_r <= radius, -below <= d <= above}`, flat, float64: x, below,
    above `(N, n)`, radius `(N,)`.
    """

    x: Tensor
    radius: Tensor
    norm: float
    below: Tensor
    above: Tensor

    @classmethod
    def make(cls, x: Tensor, radius: Tensor, norm: float, domain: Domain) -> Balls:
        """Around samples `(N, *shape)`, cut by a box or not. The room to the walls is rounded
        up.
        """
        flat = x.detach().double().flatten(1)
        low, high = domain if domain is not None else (-math.inf, math.inf)
        return cls(
            flat,
            radius.to(flat.device).double(),
            norm,
            *(torch.where(side > 0, _up(side), 0.0) for side in (flat - low, high - flat)),
        )

    @property
    def box(self) -> Span:
        """The smallest box around each, as deviations `(N, n)`."""
        return -torch.minimum(self.below, self.radius[:, None]), torch.minimum(
            self.above, self.radius[:, None]
        )

    def reordered(self, order: Tensor) -> Balls:
        """The same balls with their coordinates in another order."""
        return replace(
            self, x=self.x[:, order], below=self.below[:, order], above=self.above[:, order]
        )

    @cached_property
    def _halves(self) -> Span:
        low, high = self.box
        middle = (low + high) / 2
        reach = (high - low) / 2
        return middle, reach + (middle.shape[1] + 8) * 2.0**-52 * (middle.abs() + reach)

    @cached_property
    def _ways(self) -> Span:
        """Whether the box leaves a way down and a way up, 0 or 1 in float32, `(N, n)` each."""
        return (self.below > 0).float(), (self.above > 0).float()

    def across(self, a: Tensor, owner: Tensor) -> Span:
        """`<a, d>` lies in middle +- spread, `(R,)` each in float64, rounded up: by the box, or by
        the ball and its open ways.

        For screening, a in float32: walls that are near, but not touched by the sample, do not
        count for r = 1 and 2.
        """
        if self.norm == math.inf:
            middle, reach = (_take(v, owner) for v in self._halves)
            a = a.double()
            return _dot(a, middle), _dot(a.abs(), reach)
        down, up = (_take(v, owner) for v in self._ways)
        plus = a.clamp(min=0)
        minus = plus - a
        radius = self.radius[owner]
        if self.norm == 1:
            top, bottom = (
                torch.maximum((plus * p).amax(1), (minus * m).amax(1)).double()
                for p, m in ((up, down), (down, up))
            )
        else:
            plus = plus.square()
            minus = minus.square()
            slack = 1 + (a.shape[1] + 8) * 2.0**-23
            lost = a.shape[1] * FLOOR[torch.float32]  # squares that underflow
            top, bottom = (
                (_dot(plus, p) + _dot(minus, m) + lost).sqrt() * slack
                for p, m in ((up, down), (down, up))
            )
        top = radius * top
        bottom = radius * bottom
        return (top - bottom) / 2, (top + bottom) / 2 * (1 + 2.0**-50)

    def reach(self, a: Tensor, owner: Tensor) -> Tensor:
        """`|<a, d>|` is at most this on ball `owner`, rounded up; quick: of the box only for r
        = inf. `(R, n) -> (R,)`.
        """
        slack = 1 + (a.shape[1] + 8) * 2.0**-52
        if self.norm == math.inf:
            low, high = self.box
            return _dot(a.abs(), _take(torch.maximum(-low, high), owner)) * slack
        return self.radius[owner] * rounding.length(a, dual(self.norm), 1) * slack

    def stretch(self, a: Tensor) -> Span:
        """`||A d - A d_mid||_2` over each ball is at most the second, rounded up, `(N, T, g, n) ->
        (N, T)`; first: `A d_mid`.

        d_mid: the middle of the box for r = inf, else 0. r = 2: the spectral norm. r = 1: the
        longest column. r = inf: `max ||B s||^2` over `|s| <= 1` is at most `tr(D) lambda_max(B D^-1
        B^T)` for every diagonal D > 0; here D has the lengths of the columns, which is exact for
        matrices of rank 1.
        """
        low, high = self.box
        open_ = ((self.below > 0) | (self.above > 0))[:, None, None]
        middle = ((low + high) / 2 if self.norm == math.inf else torch.zeros_like(low))[:, None]
        start = (a @ middle[..., None])[..., 0]
        width = (high - low)[:, None, None] / 2 if self.norm == math.inf else open_.double()
        b = a * width
        columns = rounding.length(b, 2, 2)
        radius = self.radius[:, None]
        slack = (b.shape[3] + b.shape[2] + 16) * 2.0**-51
        if self.norm == 1:
            return start, radius * columns.amax(2) * (1 + slack)
        weight = (
            columns[:, :, None] if self.norm == math.inf else torch.ones_like(columns[:, :, None])
        )
        gram = torch.where(weight > 0, b / torch.where(weight > 0, weight, 1.0), 0.0) @ b.mT
        known = torch.isfinite(gram).flatten(2).all(2)  # not after an overflow
        gram = torch.where(known[:, :, None, None], gram, 0.0)
        trace = gram.diagonal(dim1=2, dim2=3).sum(2)
        lost = b.shape[2] * b.shape[3] * FLOOR[torch.float64]  # products that underflow
        # The trace is at least the largest eigenvalue: its slack pays for the square root and the
        # products after it, too.
        top = (
            torch.linalg.eigvalsh((gram + gram.mT) / 2)[..., -1].clamp(min=0) + slack * trace + lost
        )
        total = columns.sum(2) if self.norm == math.inf else radius.square()
        return start, torch.where(known, (total * top).sqrt(), math.inf)

    def upper(self, a: Tensor, owner: Tensor) -> Tensor:
        """`sup <a, d>` over ball `owner` for rows `a` `(R, n)`: `(R,)` in float64, rounded up,
        exact up to that.

        The box alone where r = inf. For r = 1 and 2 by weak duality, `min_lam lam radius + sum_i
        max { |a_i| t - lam t : 0 <= t <= room_i }` (squares for r = 2): any lam gives a bound, the
        one that fills the ball gives the value.
        """
        if self.norm == math.inf:
            middle, spread = self.across(a, owner)  # spread: rounded up for both
            return middle + spread
        a, slack = a.double(), (a.shape[1] + 8) * 2.0**-52
        size = a.abs()
        radius = self.radius[owner].expand(len(a))
        room = torch.where(a > 0, _take(self.above, owner), _take(self.below, owner))
        room = torch.minimum(room, radius[:, None])
        return (
            _fill_one(size, room, radius) if self.norm == 1 else _fill_two(size, room, radius)
        ) * (1 + slack)


def _fill_one(size: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """R = 1: the budget goes to the largest entries first; lam: the first entry that is not filled.

    A budget rarely reaches far down the list. On the CPU the first few entries are looked at first;
    a device sorts all of them at once, since it would have to be asked whether they were enough.
    Sums from the left give the same number for both.
    """
    if size.device != HOST:
        return _filled(size, room, radius, size.shape[1])[0]
    value = torch.empty_like(radius)
    rows = torch.arange(len(size))
    count = 16
    while len(rows):
        count = min(count, size.shape[1])
        value[rows], known = _filled(size[rows], room[rows], radius[rows], count)
        rows = rows[~known]
        count = 8 * count
    return value


def _filled(size: Tensor, room: Tensor, radius: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The value for r = 1 by the `count` largest entries of each row, and whether they are enough.

    With the filled entries' room F and gain S the dual value is `lam (radius - F) + S`: no term is
    negative, so it is off by less than n 2^-52 of itself.
    """
    large, order = size.topk(count, dim=1)
    free = room.gather(1, order)
    paid = free.cumsum(1)
    gain = (large * free).cumsum(1)
    place = (paid < radius[:, None]).sum(1, keepdim=True)  # entries that are filled
    lam = torch.where(place < count, large.gather(1, place.clamp(max=count - 1)), 0.0)
    before = (place - 1).clamp(min=0)
    spent, won = (torch.where(place > 0, v.gather(1, before), 0.0) for v in (paid, gain))
    known = (place < count) | (count == size.shape[1])
    return (lam * (radius[:, None] - spent) + won)[:, 0], known[:, 0]


def _fill_two(size: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """The value for r = 2: `rho ||a||` unless a wall is in the way."""
    free = torch.where(room > 0, size, 0.0)
    value = rounding.length(free, 2, 1)
    t = radius / value.clamp(min=1e-300)
    value = value * radius
    late = ((free * t[:, None]) > room).any(
        1
    )  # the ball's own maximiser leaves the box: the others are done
    if size.device != HOST:  # it is not asked whether there are any
        return torch.where(late, _water(size, room, radius), value)
    if late.any():
        value[late] = _water(size[late], room[late], radius[late])
    return value


def _water(size: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """The value for r = 2: `d = min(t size, room)` with the t that fills the ball, and `lam = 1
    / (2 t)`.
    """
    top = size.amax(1, keepdim=True)
    unit = torch.where(
        room > 0, size / torch.where(top > 0, top, 1), 0.0
    )  # at most 1, so that squares do not overflow
    t = fill(unit.square(), room.square(), radius.square(), ask=False).sqrt()[
        :, None
    ]  # any t gives a bound
    lam = torch.where(torch.isfinite(t) & (t > 0), top / (2 * torch.where(t > 0, t, 1)), 0.0)
    # The maximum of |a| d - lam d^2 over 0 <= d <= room; with a multiplier of 0 the walls alone
    # hold.
    step = torch.where(
        lam > 0, torch.minimum(size / (2 * torch.where(lam > 0, lam, 1)), room), room
    )
    return lam[:, 0] * radius * radius + (size * step - lam * step.square()).sum(
        1
    )  # not radius^2, which may underflow


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
        return Lines(*(_take(v, owner) for v in (self.mid, self.rad, self.off, self.far)))


@dataclass(frozen=True, eq=False)
class Planes:
    """The planes of one curve node: `f(c + d) - f(c)` lies within `J d + off +- far`; off and
    far `(N, *shape)`.
    """

    plane: Plane
    off: Tensor
    far: Tensor

    def pull(
        self, weight: dict[int, Tensor], inputs: tuple[int, ...], w: Tensor, owner: Tensor
    ) -> Span:
        """Adds to `weight` what coefficients w `(R, *shape)` of the output are of the inputs;
        `<w, off>` and `<|w|, far>`.
        """
        for j, part in zip(inputs, self.plane.transpose(w, owner)):
            _accumulate(weight, j, _layed(part))
        return _dot(w, _take(self.off, owner)), _dot(w.abs(), _take(self.far, owner))


class Arithmetic:
    """What a backward pass needs in one floating-point type: the maps, the lines of each
    activation, the errors of the rest.

    errors: of the nodes whose rounding error is not part of an activation's shift. floors: for each
    node, `(N,)`, what products that underflow may take from a substitution that starts there. like:
    the same but for the lines.
    """

    def __init__(self, graph: Graph, dtype: torch.dtype, like: Arithmetic | None = None) -> None:
        self.dtype = dtype
        self.tiny = TINY[dtype]
        self.floor = FLOOR[dtype]
        self.sums = 8 + 2 * len(graph.nodes)  # additions beyond those of a product with one node
        self.maps: dict[int, _Turned] = {} if like is None else like.maps
        if like is None:
            self.maps = {
                i: _Turned(node.map, dtype)
                for i, node in enumerate(graph.nodes)
                if node.map is not None
            }
        self.errors: dict[int, Tensor] = {} if like is None else like.errors
        self.floors: dict[int, Tensor] = {} if like is None else like.floors
        self.lines: dict[int, Lines] = {}
        self.planes: dict[int, Planes] = {} if like is None else like.planes


class Sweep:
    """One pass through a network for N balls: for every node its value at the samples and the span
    of its deviations.

    known: what `proved` returned for the same samples on larger balls; steps: of the ascent on the
    slopes (0: CROWN's choice). centre: node -> value at the samples; spans: node -> (low <= 0, high
    >= 0) of `v - centre`, `(N, *shape)` each, sound.

    Most neurons that intervals leave undecided are decided by any linear bound. So they are
    screened first: in float32, with parallel lines (Fast-Lin, Weng et al. 2018), where one
    coefficient vector bounds both sides, and only until they are decided. What is left gets CROWN's
    bounds, in float64 unless the network is shallow and wide: there the slack for rounding in
    float32 is a few 1e-4 of the width, less than a few steps on the slopes of the margins' own
    lines win.
    """

    def __init__(
        self, graph: Graph, balls: Balls, steps: int = 0, known: Mapping[int, Span] | None = None
    ) -> None:
        if torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled(
            graph.device.type
        ):
            raise InputError(
                "torch is set to round float32 products to fewer digits: certify outside "
                "autocast and with "
                "torch.set_float32_matmul_precision('highest')."
            )
        self.graph = graph
        self.balls = balls
        self.steps = steps
        self.known = known or {}
        nodes = graph.nodes
        self.users = [
            [i for i, node in enumerate(nodes) for k in node.inputs if k == j]
            for j in range(len(nodes))
        ]
        self.exact = Arithmetic(graph, torch.float64)
        self.fast = Arithmetic(graph, torch.float32)
        self.parallel = Arithmetic(graph, torch.float32, self.fast)
        order = _flat(
            torch.arange(graph.inputs, device=graph.device).reshape(1, *nodes[0].shape).contiguous()
        )[0]
        self.inputs = balls.reordered(order)  # as coefficient vectors are laid out
        self.centre: dict[int, Tensor] = {}
        self.spans: dict[int, Span] = {}
        self.boxes: set[int] = (
            set()
        )  # nodes whose values fill a box: maps of them are bounded exactly by intervals
        self.tight: set[int] = set()  # nodes whose spans substitution cannot improve
        # Where rows are asked whether they are decided: before layers that are larger, and so
        # dearer, than those above.
        acts = [i for i, node in enumerate(nodes) if _entrywise(node)]
        widest = max(node.size for node in nodes)
        self.coarse = widest <= WIDE if graph.curved else len(acts) <= SHALLOW and widest >= WIDE
        self.stops = {
            i for i, below in zip(acts[1:], acts) if nodes[below].size > nodes[i].size
        } | set(acts[:1])
        self._bends: dict[int, _Bend] = {}
        self._unasked: dict[
            int, tuple[Tensor, partial[_Bend]]
        ] = {}  # whether there are any, and how to make them
        self._bounded: list[Tensor] = []  # whether the inputs of activations are, one number each
        self.halves: dict[
            int, Span
        ] = {}  # middle and half width of the spans where rows are asked, in float32
        self.spreads: dict[int, _Spread] = {}
        self.executed: dict[int, Tensor] = {}  # errors of nodes as they are executed, `(N, *shape)`
        self.rows = 0  # coefficient vectors substituted so far

    def run(self) -> Sweep:
        """Forward, node by node; before an activation its inputs are bounded by substitution."""
        with torch.no_grad():
            for i, node in enumerate(self.graph.nodes):
                clock.check()
                if node.map is not None:
                    self._affine(i, node, node.map)
                elif node.curve is not None:
                    for j in node.inputs:
                        self._tighten(j)
                    self._curve(i, node, node.curve)
                elif node.inputs:
                    self._tighten(node.inputs[0])
                    self._activation(i, node)
                else:
                    low, high = self.balls.box
                    self.centre[0] = self.balls.x.reshape(-1, *node.shape)
                    self.spans[0] = low.reshape(-1, *node.shape), high.reshape(-1, *node.shape)
                    self.tight.add(0)
                    if self.balls.norm == math.inf:
                        self.boxes.add(0)
                    for kind in (self.exact, self.fast):  # of the product with the input
                        kind.floors[0] = 4 * kind.floor * (node.size + self._total(0))
        if self._bounded and not bool(torch.stack(self._bounded).all()):
            raise InputError(UNBOUNDED)
        return self

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
    def bends(self) -> dict[int, _Bend]:
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
        for j in {j for node in self.graph.nodes if node.map is None for j in node.inputs}:
            c, (low, high) = self.centre[j], self.spans[j]
            slack = 2.0**-51 * (c.abs() + torch.maximum(-low, high))
            bottom = c + low - slack
            top = c + high + slack
            found[j] = (
                torch.where(bottom.isnan(), -math.inf, bottom),
                torch.where(top.isnan(), math.inf, top),
            )
        return found

    def _affine(self, i: int, node: Node, map_: Linear) -> None:
        """Values, interval arithmetic, and the error that rounding adds to `d_i = W d_j`."""
        centres = [self.centre[j] for j in node.inputs]
        spans = [self.spans[j] for j in node.inputs]
        rough = rounding_map(map_)
        terms = _terms(node)
        value = map_.forward(*centres)
        self.centre[i] = value if node.bias is None else value + node.bias
        wide = self.graph.rounding + terms * 2.0**-52
        residual = wide * (rough.forward(*[c.abs() for c in centres]) + node.bias_size)
        if self.graph.arithmetic == "executed":
            residual = residual + self._executed(i, node)
        reach = rough.forward(*[torch.maximum(-a, b) for a, b in spans])
        middle = map_.forward(*[(a + b) / 2 for a, b in spans])
        width = map_.magnitude().forward(*[(b - a) / 2 for a, b in spans]) + wide * reach + residual
        low = (middle - width).clamp(max=0)
        high = (middle + width).clamp(min=0)
        if node.inputs == (0,) and self.balls.norm != math.inf and isinstance(map_, Matrix | Conv):
            radius = self.balls.radius.reshape(-1, *[1] * len(node.shape))
            # The length of a row of n entries is off by n / 2 + 3 roundings, the sum by 2. What is
            # reached is at most the exact length times the radius, and at most `reach`: that many
            # roundings of the smaller one are in `wide * reach`.
            ball = radius * _row_norms(map_, dual(self.balls.norm)) + wide * reach + residual
            low = torch.maximum(low, -ball)
            high = torch.minimum(high, ball)
        if i in self.known:
            bottom, top = (side - self.centre[i] for side in self.known[i])
            slack = 2.0**-51 * (self.centre[i].abs() + torch.maximum(bottom.abs(), top.abs()))
            low = torch.maximum(low, (bottom - slack).clamp(max=0))
            high = torch.minimum(high, (top + slack).clamp(min=0))
        self.spans[i] = low, high
        # A coefficient vector is rounded when it goes through the map and when it meets others at
        # the map's inputs.
        count = terms + 4 + max(len(self.users[j]) for j in node.inputs)
        total = torch.stack([self._total(j) for j in node.inputs]).sum(0)
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 2 * count, total)
            error = (self.graph.rounding + 1.01 * kind.tiny * count) * reach + residual
            if isinstance(map_, Matrix | Conv | Scale):  # weights that underflow in this type
                error = error + kind.floor * total.reshape(-1, *[1] * len(node.shape))
            if isinstance(map_, Sum | Concat) or (isinstance(map_, Pick) and map_.source is None):
                # Coefficients are copied here, so the errors of the inputs may as well be charged
                # at the output.
                error = error + map_.forward(*[self._moved(kind, j) for j in node.inputs])
            kind.errors[i] = _layed(rounding.up(error * (1 + _rounding(node, kind)), kind.dtype))
        if len(node.inputs) == 1 and node.inputs[0] in self.boxes:
            self.tight.add(i)
            if isinstance(map_, Pick):
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
        self.executed[i] = step_error(node, sizes, self.graph.execution.dtype, sources)
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
        shape = _Shape(node, self.centre[j], low, high)
        if node.activation is not None and low.device != HOST:  # asked once, when the sweep is done
            self._bounded.append(within(*shape.ends).all())
        up, down = shape.slopes()
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 8 + len(self.users[j]), self._total(j))
            error = self._moved(kind, j) + 1.01 * kind.tiny * (8 + len(self.users[j])) * most
            if kind is self.fast:
                self.parallel.lines[i] = shape.lines(up, up, error, kind)
            kind.lines[i] = shape.lines(up, down, error, kind)
            if kind is self.exact and node.slope is not None:
                crossing = (shape.ends[0] < 0) & (shape.ends[1] > 0)
                self._unasked[i] = (
                    crossing.any(),
                    partial(self._bend, i, shape, crossing, error, up, down),
                )
        self.centre[i], self.spans[i] = shape.output()

    def _curve(self, i: int, node: Node, curve: Curve) -> None:
        """The planes of a curve node, and the span of its output: what the planes leave of the
        curve's own range.
        """
        centres = [self.centre[j] for j in node.inputs]
        spans = [self.spans[j] for j in node.inputs]
        if isinstance(curve, Normalise):
            along = self._along(node.inputs[0], curve.direction(centres[0], spans[0]))
            plane = curve.plane(
                centres, spans, along, self._length(node.inputs[0], (len(node.shape) - 1,))
            )
        elif isinstance(curve, Product):
            plane = curve.plane(
                centres,
                spans,
                [self._length(j, axes) for j, axes in zip(node.inputs, curve.summed())],
            )
        else:
            plane = curve.plane(centres, spans)
        for j in node.inputs:
            if self.users[j][-1] == i:
                self.spreads.pop(j, None)
        reach = plane.reach(*[torch.maximum(-low, high) for low, high in spans])
        count = plane.terms + 8 + max(len(self.users[j]) for j in node.inputs)
        total = torch.stack([self._total(j) for j in node.inputs]).sum(0)
        much = total + reach.reshape(len(reach), -1).sum(1)  # a plane may be several products
        for kind in (self.exact, self.fast):
            self._sink(kind, i, 2 * count, much)
            error = (
                plane.reach(*[self._moved(kind, j) for j in node.inputs])
                + 1.01 * kind.tiny * count * reach
            )
            off, far = (
                plane.off.to(kind.dtype),
                plane.far + error + kind.floor * (1 + much.reshape(-1, *[1] * len(node.shape))),
            )
            rest = (plane.off - off.double()).abs() + _rounding(node, kind) * (
                far + off.double().abs()
            )
            kind.planes[i] = Planes(
                plane.to(kind.dtype), _layed(off), _layed(rounding.up(far + rest, kind.dtype))
            )
        value = self.centre[i] = curve.value(*centres)
        ends = [_ends(c, low, high) for c, (low, high) in zip(centres, spans)]
        slack = 2.0**-48 * value.abs()
        low, high = (side - value for side in curve.span(*ends))
        wide = (reach + plane.far + plane.off.abs()) * (1 + 2.0**-48)
        low = torch.maximum(low - slack, -wide)
        high = torch.minimum(high + slack, wide)
        self.spans[i] = low.clamp(max=0), high.clamp(min=0)

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
        for owner, place in _all_chunks(
            len(direction), count, _room(top.device) // (2 * widest), top.device
        ):
            rows = direction.new_zeros(len(place), count, width)
            rows = rows.scatter(
                1, place[:, None, None].expand(-1, 1, width), tokens[owner, place][:, None]
            )
            constant, a, both = self._substitute(
                self.exact, j, _layed(rows.reshape(-1, *node.shape)), owner, True
            )
            top[:, owner, place] = (constant + self.inputs.upper(a, both)).reshape(2, -1)
        top = torch.where(torch.isnan(top), math.inf, top)  # an overflow is no bound
        high, low = (side.reshape(*direction.shape[:-1], 1) for side in (top[0], -top[1]))
        return low, high

    def _bend(
        self, i: int, shape: _Shape, crossing: Tensor, error: Tensor, up: Tensor, down: Tensor
    ) -> _Bend:
        """What an ascent or a branching needs to know of node i."""
        line = self.exact.lines[i]
        slope = self.graph.nodes[i].slope
        assert slope is not None
        parts = (up, line.off + line.far, down, shape.c, shape.output()[0])
        up, above, down, c, here = (_layed(v.float()) for v in parts)
        return _Bend(shape, error, _layed(crossing), up, above, down, c, here, slope.float())

    def _tighten(self, j: int) -> None:
        """Bound node j, the input of an activation, by substitution where intervals leave it
        undecided.
        """
        node = self.graph.nodes[j]
        users = [self.graph.nodes[i] for i in self.users[j]]
        spread = None
        if j not in self.spreads and any(
            isinstance(user.curve, Normalise | Product) for user in users
        ):
            spread = self.spreads[j] = _Spread.zero(self.balls.x, node.size, self.graph.inputs)
        if j in self.tight and spread is None:
            return
        self.tight.add(j)
        low, high = (side.flatten(1).clone() for side in self.spans[j])
        c = self.centre[j].flatten(1)
        smooth = any(user.activation is not None or user.curve is not None for user in users)
        widest = max(n.size for n in self.graph.nodes[: j + 1])
        room = _room(c.device)
        if (
            not smooth and self.fast.lines | self.fast.planes
        ):  # before the first of them all bounds are exact
            for group in _groups(_chunks(_open(c, low, high), room // widest), c.device):
                found = _in_step([self._screen(j, owner, place) for owner, place in group])
                for (owner, place), (bottom, top) in zip(group, found):
                    _narrow_to(low, high, owner, place, bottom, top)
        left = low < high if smooth else _open(c, low, high)
        # Where most neurons stay open the bounds are too wide for the slack of float32 to matter.
        lost = (
            (left.sum(1, keepdim=True) > MOSTLY * node.size)
            & (node.size >= WIDE // 2)
            & (not smooth)
        )
        for coarse, chunks in zip(
            (False, True), _two_chunks(left & ~lost, left & lost, room // (2 * widest))
        ):
            for owner, place in chunks:
                constant, a = self._sides(j, owner, place, coarse or self.coarse)
                upper = constant + self.inputs.upper(a, _twice(owner))
                _narrow_to(low, high, owner, place, -upper[len(place) :], upper[: len(place)])
                if spread is not None:
                    spread.put(owner, place, constant, a, self.inputs)
        self.spans[j] = low.reshape(-1, *node.shape), high.reshape(-1, *node.shape)

    def _sides(self, j: int, owner: Tensor, place: Tensor, coarse: bool) -> tuple[Tensor, Tensor]:
        """`d <= constant + <a, d_0>` and then the same for `-d`, for entries `place` of node j:
        `(2 R,)`, `(2 R, n)`.
        """
        node = self.graph.nodes[j]
        if coarse and not self.steps:
            return self._substitute(self.fast, j, _units(node, place, torch.float32), owner, True)[
                :2
            ]
        return self.bound(j, _units(node, place, torch.float64), owner, self.steps, both=True)[:2]

    def _length(self, j: int, axes: tuple[int, ...]) -> Tensor:
        """Bounds on the Euclidean norm of `d - middle of its span` along some axes of node j: `(N,
        *shape)`, length 1 there.

        With `d = A d_0 + shift +- rest`: the norm of A on the ball, and that of the rest.
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
        size = (a.abs() @ torch.maximum(-self.inputs.box[0], self.inputs.box[1])[:, None, :, None])[
            ..., 0
        ]
        error = (a.shape[-1] + 8) * 2.0**-52 * (size + middle.abs() + shift.abs())
        apart = shift.abs() + grouped(spread.rest)[..., 0] + error
        found = (stretch + rounding.length(apart, 2, 2)) * (1 + (width + 8) * 2.0**-52)
        wide = rounding.length(torch.maximum(high - middle, middle - low), 2, 2) * (
            1 + (width + 8) * 2.0**-52
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
        nodes = self.graph.nodes
        kind = self.parallel
        c = self.centre[j].flatten(1)[owner, place]
        best = (torch.full_like(c, -math.inf), torch.full_like(c, math.inf))
        weight: dict[int, Tensor] = {j: _units(nodes[j], place, kind.dtype)}
        # d_j lies in shift +- spread + <weight, d>
        shift = torch.zeros_like(c)
        spread = kind.floors[j][owner].expand(len(c))
        alive = torch.arange(len(c), device=c.device)
        self.rows += len(c)
        for i in range(j, 0, -1):
            if i not in weight:
                continue
            node = nodes[i]
            w = weight.pop(i)
            if node.map is not None:
                if i in kind.errors:
                    spread = spread + _dot(w.abs(), _take(kind.errors[i], owner))
                for k, part in zip(node.inputs, kind.maps[i].transpose(w)):
                    _accumulate(weight, k, part)
                continue
            if i in kind.planes:
                off, far = kind.planes[i].pull(weight, node.inputs, w, owner)
                shift = shift + off
                spread = spread + far
                continue
            if i in self.stops and i < j:
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
            shift = shift + _dot(w, line.off)
            spread = spread + _dot(w.abs(), line.far)
            _accumulate(weight, node.inputs[0], w * line.mid)
        a = (
            _flat(weight[0])
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
                    + _rounding(self.graph.nodes[k], self.fast) * (middle.abs() + reach)
                    + self.fast.floor
                )
                self.halves[k] = _layed(middle), _layed(rounding.up(reach, torch.float32))
            middle, reach = (_take(v, owner) for v in self.halves[k])
            shift = shift + _dot(w, middle)
            spread = spread + _dot(w.abs(), reach)
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
        constant, a, owner = found = self._substitute(self.exact, last, rows, owner, both)
        if not steps or not any(i < last and i in self.bends for i in self.exact.lines):
            return found
        if both:
            rows = torch.cat([rows, -rows])
        alpha = self._ascend(last, rows.float(), owner, steps)
        other, b, _ = self._substitute(
            self.exact, last, rows, owner, False, {k: v.double() for k, v in alpha.items()}
        )
        better = other + self.inputs.upper(b, owner) < constant + self.inputs.upper(a, owner)
        return torch.where(better, other, constant), torch.where(better[:, None], b, a), owner

    def _ascend(self, last: int, rows: Tensor, owner: Tensor, steps: int) -> dict[int, Tensor]:
        """The slopes of the lower lines that gave each row its lowest bound, by Adam in
        float32: nothing is proved here.
        """
        alpha = {
            i: _take(self.bends[i].down, owner)
            .expand(len(rows), *self.bends[i].down.shape[1:])
            .clone()
            for i in self.bends
            if i < last
        }
        first, second = ({i: torch.zeros_like(a) for i, a in alpha.items()} for _ in range(2))
        best = rows.new_full((len(rows),), math.inf, dtype=torch.float64)
        kept = {i: a.clone() for i, a in alpha.items()}
        for step in range(1, steps + 1):
            clock.check()
            with torch.enable_grad():
                leaves = {i: a.requires_grad_(True) for i, a in alpha.items()}
                constant, a, _ = self._substitute(self.fast, last, rows, owner, False, leaves)
                value = constant + self.inputs.upper(firm(a), owner)
                if not value.requires_grad:  # no undecided neuron feeds the rows
                    return kept
                pulls: tuple[Tensor | None, ...] = torch.autograd.grad(
                    value.sum(), list(leaves.values()), allow_unused=True
                )
            value = value.detach()
            better = value < best
            best = torch.where(better, value, best)
            for (i, old), g in zip(alpha.items(), quiet(pulls)):
                old = old.detach()
                kept[i] = torch.where(better.reshape(-1, *[1] * (old.ndim - 1)), old, kept[i])
                if g is None:  # no undecided neuron of this node feeds the row's
                    continue
                first[i].mul_(0.9).add_(g, alpha=0.1)
                second[i].mul_(0.99).addcmul_(g, g, value=0.01)
                move = (first[i] / (1 - 0.9**step)) / (
                    (second[i] / (1 - 0.99**step)).sqrt() + 1e-12
                )
                slope = self.bends[i].slope
                alpha[i] = torch.minimum(
                    torch.maximum(old - 0.3 * 0.9**step * move, slope), torch.ones_like(slope)
                )
        return kept

    def _substitute(
        self,
        kind: Arithmetic,
        last: int,
        rows: Tensor,
        owner: Tensor,
        both: bool,
        alpha: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward to the input; until the first activation the rows and their negatives go
        through as one.
        """
        nodes = self.graph.nodes
        weight: dict[int, Tensor] = {last: rows}
        constant = kind.floors[last][owner].expand(len(rows))
        self.rows += len(rows) * (1 + both)
        for i in range(last, 0, -1):
            if i not in weight:
                continue
            node = nodes[i]
            w = weight.pop(i)
            if node.map is None:
                if both:
                    weight = {k: torch.cat([v, -v]) for k, v in weight.items()}
                    w = torch.cat([w, -w])
                    constant = constant.repeat(2)
                    owner = _twice(owner)
                    both = False
                if i in kind.planes:
                    off, far = kind.planes[i].pull(weight, node.inputs, w, owner)
                    constant = constant + off + far
                    continue
                line = self._lines(kind, i, owner, alpha)
                w = firm(w)
                size = w.abs()
                constant = constant + _dot(w, line.off) + _dot(size, line.far)
                _accumulate(weight, node.inputs[0], torch.addcmul(w * line.mid, size, line.rad))
                continue
            if i in kind.errors:
                constant = constant + _dot(w.abs(), _take(kind.errors[i], owner))
            for j, part in zip(node.inputs, kind.maps[i].transpose(w)):
                _accumulate(weight, j, part)
        if both:
            weight = {k: torch.cat([v, -v]) for k, v in weight.items()}
            constant = constant.repeat(2)
            owner = _twice(owner)
        a = (
            _flat(weight[0])
            if 0 in weight
            else constant.new_zeros(len(constant), self.graph.inputs, dtype=kind.dtype)
        )
        return constant, a, owner

    def _lines(
        self, kind: Arithmetic, i: int, owner: Tensor, alpha: Mapping[int, Tensor] | None
    ) -> Lines:
        """The lines of activation i for rows of `owner`, with the slopes `alpha` below if there
        are any.
        """
        if alpha is None or i not in alpha:
            return kind.lines[i].take(owner)
        bend = self.bends[i].take(owner)
        if kind is self.exact:
            return bend.shape.lines(bend.shape.slopes()[0], alpha[i], bend.error, kind)
        line = kind.lines[i].take(owner)
        a = alpha[i]
        below = a * bend.c - bend.here  # the line through the kink
        mid = (bend.up + a) / 2
        rad = (bend.up - a) / 2
        off = (bend.above + below) / 2
        far = (bend.above - below) / 2
        pairs = ((mid, line.mid), (rad, line.rad), (off, line.off), (far, line.far))
        return Lines(*(torch.where(bend.crossing, new, old) for new, old in pairs))


@dataclass(frozen=True, eq=False)
class _Spread:
    """A node as a linear function of the input and a rest: `d = A d_0 + shift +- rest`; a `(N,
    size, n)`, else `(N, size)`.

    From two bounds, `d <= c + <a, d_0>` and `-d <= c' + <a', d_0>`: A = (a - a') / 2, and the rest
    has what they differ by.
    """

    a: Tensor
    shift: Tensor
    rest: Tensor

    @classmethod
    def zero(cls, like: Tensor, size: int, inputs: int) -> _Spread:
        """For entries that do not move; like: samples `(N, n)`, for their number and device."""
        return cls(*(like.new_zeros(len(like), size, *more) for more in ((inputs,), (), ())))

    def put(self, owner: Tensor, place: Tensor, constant: Tensor, a: Tensor, balls: Balls) -> None:
        """What `Sweep._sides` found for some entries."""
        (above, below), (up, down) = torch.chunk(constant, 2), torch.chunk(a.double(), 2)
        apart = (up + down) / 2
        reach = balls.reach(apart, owner)
        rounding = 2.0**-50 * (above.abs() + below.abs()) + 2.0**-52 * balls.reach(
            up.abs() + down.abs(), owner
        )
        self.a[owner, place], self.shift[owner, place] = (up - down) / 2, (above - below) / 2
        self.rest[owner, place] = (above + below) / 2 + reach + rounding


@dataclass(frozen=True, eq=False)
class _Bend:
    """What the ascent needs to know of a ReLU node with undecided neurons, in float32 but for
    the shape and its error.
    """

    shape: _Shape
    error: Tensor
    crossing: Tensor
    up: Tensor
    above: Tensor
    down: Tensor
    c: Tensor
    here: Tensor
    slope: Tensor

    def take(self, owner: Tensor) -> _Bend:
        """For rows that belong to samples `owner` `(R,)`."""
        values = {
            k: _take(getattr(self, k), owner)
            for k in ("error", "crossing", "up", "above", "down", "c", "here")
        }
        shape = _Shape(
            self.shape.node,
            *(_take(v, owner) for v in (self.shape.c, self.shape.low, self.shape.high)),
        )
        return _Bend(shape, slope=self.slope, **values)


@dataclass(frozen=True, eq=False)
class _Shape:
    """An activation over the spans of its input, `(N, *shape)` each."""

    node: Node
    c: Tensor
    low: Tensor
    high: Tensor

    @property
    def ends(self) -> Span:
        """The input itself, rounded outward."""
        return _ends(self.c, self.low, self.high)

    def slopes(self) -> Span:
        """CROWN's slopes of the line above and the line below."""
        low, high = self.ends
        if self.node.activation is not None:
            return ACTIVATIONS[self.node.activation].slopes(low, high)
        slope = self.node.slope
        assert slope is not None
        crossing = (low < 0) & (high > 0)
        up = torch.where(
            crossing,
            (high - slope * low) / torch.where(crossing, high - low, 1.0),
            (low >= 0) * (1 - slope) + slope,
        )
        return up, torch.where(crossing, torch.where(steep_below(low, high), 1.0, slope), up)

    def lines(self, up: Tensor, down: Tensor, error: Tensor, kind: Arithmetic) -> Lines:
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
        rest = ((above + below) / 2 - off.double()).abs() + _rounding(self.node, kind) * (
            far + off.double().abs()
        )
        return Lines(*(_layed(v) for v in (mid, rad, off, rounding.up(far + rest, dtype))))

    def shift(self, slope: Tensor, above: bool) -> Tensor:
        """The least s with `f(c + d) - f(c) <= slope d + s` on the span, rounded up; mirrored
        from below.
        """
        low, high = self.ends
        sign = 1.0 if above else -1.0
        if self.node.activation is not None:
            f = ACTIVATIONS[self.node.activation]
            v, slack = f.touch(slope, low, high, above)
            here = f.value(self.c)
            gap = f.value(v) - slope * v
            slack = slack + 2.0**-48 * (
                f.value(v).abs() + here.abs() + (slope * v).abs()
            )  # of the functions themselves
        else:  # piecewise linear: the extremum is at an end or at the kink
            here = self._relu(self.c)
            kink = torch.zeros_like(low).clamp(low, high)
            gaps = [sign * (self._relu(v) - slope * v) for v in (low, high, kink)]
            gap = sign * torch.maximum(torch.maximum(gaps[0], gaps[1]), gaps[2])
            slack = 2.0**-50 * (1 + slope.abs()) * torch.maximum(low.abs(), high.abs())
        tilt = slope * self.c
        return (
            gap - (here - tilt) + sign * (slack + 2.0**-50 * (gap.abs() + here.abs() + tilt.abs()))
        )

    def _relu(self, v: Tensor) -> Tensor:
        slope = self.node.slope
        assert slope is not None
        return torch.where(v > 0, v, slope * v)

    def output(self) -> tuple[Tensor, Span]:
        """The value at the samples and the span of the output's deviation."""
        low, high = self.ends
        if self.node.activation is not None:
            f = ACTIVATIONS[self.node.activation]
            here, (least, most) = f.value(self.c), f.span(low, high)
            ulp = 2.0**-48 * here.abs()
        else:
            here, least, most = (self._relu(v) for v in (self.c, low, high))
            ulp = torch.zeros_like(here)
        slack = ulp + 2.0**-51 * (here.abs() + torch.maximum(least.abs(), most.abs()))
        return here, ((least - here - slack).clamp(max=0), (most - here + slack).clamp(min=0))


def margin_bounds(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    radius: Tensor | float,
    norm: float,
    domain: Domain,
    steps: int = 0,
) -> Tensor:
    """Lower bounds on `theta_y - theta_j` over each sample's ball cut by the box: `(N, K)`
    float64, 0 at `j = y`.
    """
    x = x.to(graph.device)
    y = y.to(graph.device)
    radius = torch.as_tensor(radius, dtype=torch.float64).expand(len(x))
    sweep = Sweep(graph, Balls.make(x, radius, norm, domain), steps).run()
    return margins(sweep, y)[0]


def margins(sweep: Sweep, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lower bounds on the margins, `(N, K)`, and what they come from: `theta_y - theta_j >= base +
    <a, d>`.

    base `(N, K)`, a `(N, K, n)` in the order of `sweep.inputs`.
    """
    last = len(sweep.graph.nodes) - 1
    outputs = sweep.graph.outputs
    n = len(y)
    eye = torch.eye(outputs, dtype=torch.float64, device=y.device)
    if not n:
        none = eye[:0]
        return none, none, none[:, :, None].expand(-1, -1, sweep.graph.inputs)
    widest = max(node.size for node in sweep.graph.nodes)
    found = []
    for owner, rival in _all_chunks(n, outputs, _room(y.device) // widest, y.device):
        constant, a, _ = sweep.bound(
            last, eye[rival] - eye[y[owner]], owner, max(sweep.steps, POLISH)
        )
        found.append((constant, a, sweep.inputs.upper(a, owner)))
    constant, a, reach = (torch.cat(parts) for parts in zip(*found))
    z = sweep.centre[last]
    here = z.gather(1, y[:, None]) - z
    constant = constant.reshape(n, outputs)
    reach = reach.reshape(n, outputs)
    base = here - constant - 2.0**-50 * (z.abs().amax(1, keepdim=True) + constant)
    lower = base - reach - 2.0**-50 * (base.abs() + reach)
    lower = torch.where(torch.isnan(lower), -math.inf, lower)  # an overflow is no bound
    lower = lower.scatter(1, y[:, None], 0.0)
    return lower, base, -a.reshape(n, outputs, -1)


def _chunks(wanted: Tensor, most: int) -> Iterator[Chunk]:
    """The true entries of `(N, size)` as lists (row, column) of at most `most`; rows with many
    entries stay on their own.

    A chunk of one sample reads that sample's lines, and its list of rows has length 1; a mixed one
    has to copy a set of lines for each entry. The host waits for a device once.
    """
    counts = wanted.sum(1).tolist()
    where = torch.nonzero_static(wanted, size=sum(counts))
    return _cut(where[:, 0], where[:, 1], counts, most)


def _two_chunks(first: Tensor, second: Tensor, most: int) -> list[Iterator[Chunk]]:
    """The chunks of two masks of one shape, for one wait."""
    counts = torch.stack([first.sum(1), second.sum(1)]).tolist()
    places = [
        torch.nonzero_static(mask, size=sum(own)) for mask, own in zip((first, second), counts)
    ]
    return [_cut(where[:, 0], where[:, 1], own, most) for where, own in zip(places, counts)]


def _all_chunks(samples: int, size: int, most: int, device: torch.device) -> Iterator[Chunk]:
    """The same for all entries of `(samples, size)`."""
    every = torch.arange(samples * size, device=device)
    return _cut(every // size, every % size, [size] * samples, most)


def _cut(owner: Tensor, place: Tensor, counts: list[int], most: int) -> Iterator[Chunk]:
    """Lists of entries, so many for each sample, in chunks."""
    most = max(most, 1)
    start = 0
    total = 0
    samples = 0
    for count in counts:
        if total and (total + count > most or count >= ALONE):
            clock.check()
            yield owner[start : start + (total if samples > 1 else 1)], place[start : start + total]
            start = start + total
            total = 0
            samples = 0
        if count >= ALONE:
            parts = -(-count // most)
            small, larger = divmod(count, parts)
            for part in range(parts):
                clock.check()
                size = small + (part < larger)
                yield owner[start : start + 1], place[start : start + size]
                start += size
        else:
            total = total + count
            samples = samples + (count > 0)
    if total:
        clock.check()
        yield owner[start:] if samples > 1 else owner[start : start + 1], place[start:]


def _room(device: torch.device) -> int:
    """Numbers in one tensor of a backward pass."""
    return CHUNK if device == HOST else LARGE


def _groups(chunks: Iterator[Chunk], device: torch.device) -> Iterator[list[Chunk]]:
    """Chunks that go through the network in step: on the CPU each on its own, elsewhere as many
    as memory holds.
    """
    while group := list(itertools.islice(chunks, 1 if device == HOST else TOGETHER)):
        yield group


def _in_step(walks: list[Generator[Tensor, Tensor | None, Span]]) -> list[Span]:
    """What walks return that ask on their way which of their rows go on: one wait for the
    questions of all of them.
    """
    found: dict[int, Span] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(walks)))
    while answers:
        asked: dict[int, Tensor] = {}
        for k, answer in answers.items():
            try:
                asked[k] = walks[k].send(answer)
            except StopIteration as end:
                found[k] = end.value
        counts = torch.stack([mask.sum() for mask in asked.values()]).tolist() if asked else []
        answers = {
            k: torch.nonzero_static(mask, size=n)[:, 0]
            for (k, mask), n in zip(asked.items(), counts)
        }
    return [found[k] for k in range(len(walks))]


def _entrywise(node: Node) -> bool:
    """Whether it is an activation: a function of one node, entry by entry."""
    return node.slope is not None or node.activation is not None


def _ends(c: Tensor, low: Tensor, high: Tensor) -> Span:
    """The range of a value with deviations in a span, rounded outward."""
    slack = 2.0**-52 * (c.abs() + torch.maximum(-low, high))
    return c + low - slack, c + high + slack


def _open(c: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Which neurons may change sides."""
    return (c + low < 0) & (c + high > 0)


def _narrow_to(
    low: Tensor, high: Tensor, owner: Tensor, place: Tensor, bottom: Tensor, top: Tensor
) -> None:
    """Intersect spans `(N, size)`, which contain 0, with bounds `(R,)` on some entries; NaN (an
    overflow) is no bound.
    """
    low[owner, place] = torch.fmax(low[owner, place], bottom.clamp(max=0))
    high[owner, place] = torch.fmin(high[owner, place], top.clamp(min=0))


def _units(node: Node, place: Tensor, dtype: torch.dtype) -> Tensor:
    """Unit vectors, `(R, *shape)`."""
    unit = place.new_zeros(len(place), node.size, dtype=dtype).scatter(1, place[:, None], 1.0)
    return _layed(unit.reshape(-1, *node.shape))


def _rounding(node: Node, kind: Arithmetic) -> float:
    """The relative error of a sum over the entries of a node, and of its terms."""
    return 1.01 * kind.tiny * (node.size + kind.sums)


def _take(values: Tensor, owner: Tensor) -> Tensor:
    """What belongs to each row: owner `(R,)`, or `(1,)` if all rows belong to one sample."""
    return values[owner]


def _twice(owner: Tensor) -> Tensor:
    """The owners of rows that follow each other twice."""
    return owner if len(owner) == 1 else owner.repeat(2)


def _dot(rows: Tensor, values: Tensor) -> Tensor:
    """`<row, values>` for rows `(R, ...)` and values of each or of all `(1, ...)`: `(R,)` in
    float64.

    Summed in any order, so off by at most (number of terms) 2^-24 or 2^-53 of the magnitudes: the
    values account for that.
    """
    if len(values) == 1:
        return (_flat(rows) @ _flat(values)[0]).double()
    return _flat(rows * values).sum(1).double()


def _accumulate(store: dict[int, Tensor], key: int, value: Tensor) -> None:
    store[key] = store[key] + value if key in store else value


def _layed(values: Tensor) -> Tensor:
    """Images with their channels last in memory, which is how convolutions go fastest here."""
    return values.contiguous(memory_format=torch.channels_last) if values.ndim == 4 else values


def _flat(values: Tensor) -> Tensor:
    """Rows `(R, ...)` as `(R, n)`, in the order in which they lie in memory."""
    return (values.permute(0, 2, 3, 1) if values.ndim == 4 else values).reshape(len(values), -1)


def _unflat(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What `_flat` undid: `(R, n) -> (R, *shape)`."""
    if len(shape) == 3:
        return rows.reshape(len(rows), *shape[1:], shape[0]).permute(0, 3, 1, 2)
    return rows.reshape(len(rows), *shape)


class _Turned:
    """A map's transpose in another floating-point type, for coefficient vectors with channels
    last.
    """

    def __init__(self, map_: Linear, dtype: torch.dtype) -> None:
        self.map = map_
        if isinstance(map_, Matrix):
            self.map = Matrix(map_.weight.to(dtype))
        elif isinstance(map_, Scale):
            self.map = Scale(map_.factor.to(dtype))
        elif isinstance(map_, Conv):
            # With stride 1 the transpose is a convolution with the kernel turned around, and faster
            # as that.
            size = map_.weight.shape[2:]
            self.plain = (
                map_.stride == (1, 1)
                and map_.groups == 1
                and all(p <= k - 1 for p, k in zip(map_.padding, size))
            )
            weight = map_.weight.flip(2, 3).transpose(0, 1) if self.plain else map_.weight
            self.weight = _layed(weight.to(dtype))
            # Patches that do not overlap (of a transformer) are a matrix product, which is much
            # faster in float32.
            patches = (
                map_.stride == tuple(size)
                and map_.padding == (0, 0)
                and map_.dilation == (1, 1)
                and map_.groups == 1
            )
            self.patches = (
                map_.weight.permute(0, 2, 3, 1).flatten(1).to(dtype)
                if patches and not self.plain
                else None
            )

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(R, *output) -> (R, *shape)` for each input."""
        m = self.map
        if not isinstance(m, Conv):
            return tuple(_layed(part) for part in m.transpose(g))
        if self.patches is not None:
            return (_unpatched(g, self.patches, m),)
        reach = [d * (k - 1) for d, k in zip(m.dilation, m.weight.shape[2:])]
        if self.plain and all(p <= r for p, r in zip(m.padding, reach)):
            padding = [r - p for r, p in zip(reach, m.padding)]
            with plain(g.device):
                return (F.conv2d(g, self.weight, None, 1, padding, m.dilation),)
        rest = [
            n - ((o - 1) * s - 2 * p + r + 1)
            for n, o, s, p, r in zip(m.shape[1:], g.shape[2:], m.stride, m.padding, reach)
        ]
        with plain(g.device):
            return (
                F.conv_transpose2d(
                    g, self.weight, None, m.stride, m.padding, rest, m.groups, m.dilation
                ),
            )


def _unpatched(g: Tensor, weight: Tensor, conv: Conv) -> Tensor:
    """`(R, out, i, j) -> (R, in, i height, j width)`, with zeros where the patches leave a rim;
    channels last.
    """
    (channels, tall, wide), (height, width) = conv.shape, conv.stride
    rows, columns = g.shape[2:]
    parts = (g.permute(0, 2, 3, 1) @ weight).reshape(len(g), rows, columns, height, width, channels)
    image = parts.transpose(2, 3).reshape(len(g), rows * height, columns * width, channels)
    if image.shape[1:3] != (tall, wide):
        image = F.pad(image, (0, 0, 0, wide - columns * width, 0, tall - rows * height))
    return image.permute(0, 3, 1, 2)


def _row_norms(map_: Matrix | Conv, s: float) -> Tensor:
    """Upper bounds on the s-norms of the rows of a map, one for each output, broadcasting
    against one sample.
    """
    if s == math.inf:
        top = map_.weight.abs().flatten(1).amax(1)
        return top if isinstance(map_, Matrix) else top[:, None, None]
    squares = replace(map_, weight=map_.weight.square() + FLOOR[torch.float64])  # one may underflow
    if isinstance(map_, Matrix):
        return squares.weight.sum(1).sqrt()
    return squares.forward(map_.weight.new_ones(1, *map_.shape))[0].sqrt()


def _up(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, math.inf))
