"""Ball and box together: linear bounds that know how far all neurons of a layer move at once.

CROWN bounds a layer over the box of its inputs. Where the inputs of the network fill an l2 ball,
those of a layer fill a thin part of their box, and the bound loses about the square root of the
number of neurons. SDP-CROWN (ICML 2025) bounds a layer over a ball instead. Both are one formula.
Let `d` be the deviations of the inputs of a layer of ReLUs, `low <= d <= high` and
`||d||_2 <= rho`, and `w` the coefficients of its outputs. For every `g` and every `lam >= 0`

    <w, f(c + d) - f(c)>  <=  <g, d> + (lam / 2) rho^2
                              + sum_i max { w_i (f(c_i + t) - f(c_i)) - g_i t - (lam / 2) t^2 },

each maximum over `low_i <= t <= high_i`, because what is added, `(lam / 2)(rho^2 - ||d||^2)`, is
not negative. `lam = 0` with CROWN's `g` is CROWN; `g = 0` is the product of the norms. Dead neurons
do not belong into the ball. `g` and `lam` are found by an ascent in float32; what is claimed is
computed again in float64, with what rounding may lose.

Where `rho` comes from: the norms of the layers, times the radius at the input. What only sorts
does not stretch (`graph.contract`). And back: `|d_i| <= ||row_i||_2 rho` tightens the boxes of the
next layer. Where a substitution has come down to one node, `<w, d> <= ||w||_2 rho` is a bound, too.

Long because the radii, the bound of a layer and the ascent serve `ball_margins` only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import assert_never

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.bounds.ascent import Ascent
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.chunks import room_of
from wassail.certificates.bounds.crown import Sweep, margins
from wassail.certificates.bounds.executed import step_error
from wassail.certificates.bounds.lines import Arithmetic, Lines
from wassail.certificates.bounds.norms import map_norm, steepest_slope
from wassail.certificates.bounds.rows import Span, add_to, flattened, of_owner, row_dot
from wassail.certificates.graph.contract import contractions
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Relu, Smooth
from wassail.certificates.graph.maps import Concat, Matrix, rounding_map
from wassail.certificates.graph.matrix_norms import matrix_norm
from wassail.threat import Domain

UP = 1 + 2.0**-40  # more than the roundings of a few products and of a norm take away
STEPS = 60  # of the ascent on slopes and multipliers
RATE = 0.1  # of the slopes, at first
PACE = 0.3  # of the logarithms of the multipliers, at first
DECAY = 0.97
HALVINGS = 24  # of the search for the first multipliers
LEAST = 1e-30  # a multiplier: so small that it says nothing


@dataclass(frozen=True, eq=False)
class Reach:
    """How far the nodes of a network move on N balls.

    radius: node -> `||v - centre||_2` is at most this, `(N,)`, inf where nothing is known. ranges:
    node -> the values of affine nodes, `(N, *shape)` each.
    """

    radius: Mapping[int, Tensor]
    ranges: Mapping[int, Span]

    @classmethod
    def make(cls, graph: Graph, balls: Balls) -> Reach:
        """Forward, by the norms of the layers and of their rows."""
        return _Forward(graph, balls).run()


class _Forward:
    """One pass: values at the samples, radii, and a bound on the deviation of each entry."""

    def __init__(self, graph: Graph, balls: Balls) -> None:
        self.graph = graph
        self.balls = balls
        self.centre: dict[int, Tensor] = {}
        self.radius: dict[int, Tensor] = {}
        self.most: dict[int, Tensor] = {}
        self.ranges: dict[int, Span] = {}
        self.lost: dict[int, Tensor] = {}  # what rounding moves the values of a node by, a length
        self.sorted = contractions(graph)

    def run(self) -> Reach:
        """Every node in turn."""
        with torch.no_grad():
            for i, node in enumerate(self.graph.nodes):
                clock.check()
                match node.op:
                    case Input():
                        low, high = self.balls.box
                        self.centre[0] = self.balls.x.reshape(-1, *node.shape)
                        far = torch.maximum(-low, high)
                        self.most[0] = far.reshape(-1, *node.shape)
                        across = rounding.length(far, 2, 1) * UP
                        short = self.balls.norm in (1, 2)
                        self.radius[0] = (
                            torch.minimum(across, self.balls.radius) if short else across
                        )
                    case Affine():
                        self._affine(i, node.op)
                    case Relu(slope):
                        self._activation(i, node.op, max(1.0, float(slope.abs().max())))
                    case Smooth(name):
                        self._activation(i, node.op, steepest_slope(name))
                    case Curved():
                        self.centre[i] = node.op.value(*[self.centre[j] for j in node.inputs])
                        self.radius[i] = torch.full_like(self.radius[0], math.inf)
                        self.most[i] = torch.full_like(self.centre[i], math.inf)
                    case _:
                        assert_never(node.op)
                self._contracted(i)
        return Reach(self.radius, self.ranges)

    def _contracted(self, i: int) -> None:
        """What only sorts entries of another node moves no farther than that one.

        The rounding of a difference moves both entries that it compares, and those of different
        nodes add up: less than 4 times their sum.
        """
        if i not in self.sorted:
            return
        between = self.sorted[i].between
        lost = torch.stack([self.lost[k] for k in between]).sum(0)
        least = (self.radius[self.sorted[i].base] + 4 * lost) * UP
        self.radius[i] = torch.minimum(self.radius[i], least)

    def _activation(self, i: int, op: Relu | Smooth, steep: float) -> None:
        j = self.graph.nodes[i].inputs[0]
        self.centre[i] = op.value(self.centre[j])
        # The value at the sample is rounded, too.
        lost = 2.0**-48 * self.centre[i].abs()
        self.most[i] = (self.most[j] * steep + lost) * UP
        self.lost[i] = _length(lost)
        self.radius[i] = (self.radius[j] * steep + self.lost[i]) * UP

    def _affine(self, i: int, op: Affine) -> None:
        """`d_i = W d_j + e`: the radius by norms, an entry by its row.

        `error` has a unit for each term and four more, of what an entry is at most: it pays for the
        length of the row, too, where that is less. The radii and lengths pay for their own sum.
        """
        node = self.graph.nodes[i]
        centres = [self.centre[j] for j in node.inputs]
        most = [self.most[j] for j in node.inputs]
        rough = rounding_map(op.map)
        wide = self.graph.rounding + (op.map.terms + 4) * 2.0**-52
        self.centre[i] = op.value(*centres)
        sizes = [c.abs() for c in centres]
        error = wide * (rough.forward(*sizes) + op.bias_size + rough.forward(*most))
        if self.graph.arithmetic == "executed":
            assert self.graph.execution is not None
            sources = [self.graph.nodes[j] for j in node.inputs]
            largest = [c + m for c, m in zip(sizes, most)]
            error = error + step_error(node, largest, self.graph.execution.dtype, sources)
        self.lost[i] = _length(error)
        self.radius[i] = self._stretched(i, op) + self.lost[i]
        entry = op.map.magnitude().forward(*most)
        lengths = op.map.row_norms(2.0)
        if lengths is not None and len(node.inputs) == 1:
            before = self.radius[node.inputs[0]].reshape(-1, *[1] * len(node.shape))
            entry = torch.minimum(entry, lengths * before)
        entry = torch.minimum(entry, self.radius[i].reshape(-1, *[1] * len(node.shape)))
        entry = entry + error
        self.most[i] = torch.where(entry.isnan(), math.inf, entry)
        slack = 2.0**-50 * (self.centre[i].abs() + self.most[i])
        self.ranges[i] = (
            self.centre[i] - self.most[i] - slack,
            self.centre[i] + self.most[i] + slack,
        )

    def _stretched(self, i: int, op: Affine) -> Tensor:
        """`||W d_j||_2`."""
        node = self.graph.nodes[i]
        given = [self.radius[j] for j in node.inputs]
        if isinstance(op.map, Concat):
            return rounding.length(torch.stack(given), 2, 0) * UP
        if len(given) > 1:
            return torch.stack(given).sum(0) * UP
        first = isinstance(self.graph.nodes[node.inputs[0]].op, Input)
        if first and self.balls.norm == 1 and isinstance(op.map, Matrix) and len(node.shape) == 1:
            return self.balls.radius * matrix_norm(op.map.weight, 1.0, 2.0) * UP
        shape = self.graph.nodes[node.inputs[0]].shape
        return given[0] * map_norm(op.map, 2.0, shape, node.shape) * UP


def _length(values: Tensor) -> Tensor:
    """`||v||_2` of each sample, from above, with room for a product and a sum."""
    flat = values.reshape(len(values), -1)
    return rounding.length(flat, 2, 1) * (1 + (flat.shape[1] + 8) * 2.0**-52)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One ReLU node for R rows: all that its bound needs.

    up, down: the slopes for coefficients above and below 0, the parameters of the ascent with the
    logarithm of the multiplier, `(R,)`.
    """

    line: Lines
    free: Tensor
    c: Tensor
    here: Tensor
    low: Tensor
    high: Tensor
    slope: Tensor
    error: Tensor
    rho: Tensor

    def split(self, w: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """`(g, w)` of the neurons that are not dead; 0 at the others."""
        open_ = torch.where(self.free, w, 0.0)
        return torch.where(open_ > 0, up, down) * open_, open_

    def places(self, w: Tensor, g: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Where the two maxima are: on the right of the kink and on its left."""
        with torch.no_grad():
            right = (w - g) / lam
            right = torch.minimum(torch.maximum(right, torch.maximum(self.low, -self.c)), self.high)
            left = (w * self.slope - g) / lam
            left = torch.maximum(torch.minimum(left, torch.minimum(self.high, -self.c)), self.low)
        return right, left

    def values(self, w: Tensor, g: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The maximum, where it is, and the magnitude of what it is a sum of."""
        right, left = self.places(w, g, lam)
        a = w * (self.c - self.here)
        b = (w - g) * right
        q = lam / 2 * right.square()
        first = a + b - q
        a_ = w * (self.slope * self.c - self.here)
        b_ = (w * self.slope - g) * left
        q_ = lam / 2 * left.square()
        second = a_ + b_ - q_
        # A neuron that cannot move has its kink at both ends: the right side holds for it.
        first = torch.where(self.high >= -self.c, first, -math.inf)
        second = torch.where(self.low < -self.c, second, -math.inf)
        # Products with the slope may cancel, against `here` and against g: they count in full.
        bent = (w * self.slope).abs() * (self.c.abs() + left.abs())
        size = torch.maximum(a.abs() + b.abs() + q, a_.abs() + b_.abs() + q_ + bent)
        return torch.maximum(first, second), torch.where(first > second, right, left), size

    def first_multiplier(self, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """The logarithm of the best multiplier for these coefficients: where the maxima fill the
        ball.
        """
        with torch.no_grad():
            g, w = self.split(w, up, down)
            scale = _lengths(w) / self.rho.clamp(min=LEAST)
            scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
            low = scale.log() - 20.0
            high = scale.log() + 10.0
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                lam = _wide(middle.exp().clamp(min=LEAST), w)
                at = self.values(w, g, lam)[1]
                more = _squares(torch.where(self.free, at, 0.0)) > self.rho.square()
                low = torch.where(more, middle, low)
                high = torch.where(more, high, middle)
        return (low + high) / 2

    def pull(
        self, w: Tensor, up: Tensor, down: Tensor, log_lam: Tensor, terms: float
    ) -> tuple[Tensor, Tensor]:
        """Coefficients of the inputs, and the constant; terms: what rounding takes of a sum."""
        lam = log_lam.exp().clamp(min=LEAST)
        g, open_ = self.split(w, up, down)
        best, _, size = self.values(open_, g, _wide(lam, w))
        best = best + g.abs() * self.error + terms * (size + g.abs() * self.error)
        firm = torch.where(self.free, 0.0, w)
        constant = row_dot(firm, self.line.off) + row_dot(firm.abs(), self.line.far)
        known = torch.isfinite(self.rho)
        ball = lam / 2 * torch.where(known, self.rho, 0.0).square() * (1 + 2.0**-40)
        total = constant + torch.where(self.free, best, 0.0).flatten(1).sum(1) + ball
        total = torch.where(known, total, math.inf)
        settled = firm * self.line.mid + firm.abs() * self.line.rad
        return torch.where(self.free, g, settled), total

    def rows(self, keep: Tensor) -> _Layer:
        """For some of the rows."""
        line = Lines(
            *(v[keep] for v in (self.line.mid, self.line.rad, self.line.off, self.line.far))
        )
        free, c, here, low, high, error, rho = (
            v[keep]
            for v in (
                self.free,
                self.c,
                self.here,
                self.low,
                self.high,
                self.error,
                self.rho,
            )
        )
        return _Layer(line, free, c, here, low, high, self.slope, error, rho)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _squares(values: Tensor) -> Tensor:
    return values.flatten(1).square().sum(1)


def _lengths(values: Tensor) -> Tensor:
    return _squares(values).sqrt()


class Spheres:
    """Bounds on rows of the last node, with balls in every layer.

    sweep: the boxes; reach: the radii.
    """

    def __init__(self, sweep: Sweep, reach: Reach) -> None:
        self.sweep = sweep
        self.graph = sweep.graph
        self.reach = reach
        self.radius: dict[int, Tensor] = {}
        self.free: dict[int, Tensor] = {}
        for i, bend in sweep.bends.items():
            j = self.graph.nodes[i].inputs[0]
            low, high = sweep.spans[j]
            self.free[i] = bend.crossing | (bend.shape.ends[0] >= 0)
            box = _length(torch.where(self.free[i], torch.maximum(-low, high), 0.0))
            self.radius[i] = torch.minimum(reach.radius[j], box)

    def _layers(self, kind: Arithmetic, last: int, owner: Tensor) -> dict[int, _Layer]:
        found = {}
        for i, bend in self.sweep.bends.items():
            if i >= last:
                continue
            node = self.graph.nodes[i]
            assert isinstance(node.op, Relu)
            c, low, high, error = (
                of_owner(v, owner).to(kind.dtype)
                for v in (bend.shape.c, bend.shape.low, bend.shape.high, bend.error)
            )
            here = torch.where(c > 0, c, node.op.slope.to(kind.dtype) * c)
            found[i] = _Layer(
                kind.lines[i].take(owner),
                of_owner(self.free[i], owner),
                c,
                here,
                low,
                high,
                node.op.slope.to(kind.dtype),
                error,
                self.radius[i][owner].to(kind.dtype),
            )
        return found

    def _substitute(
        self,
        kind: Arithmetic,
        last: int,
        rows: Tensor,
        owner: Tensor,
        layers: Mapping[int, _Layer],
        slopes: dict[int, tuple[Tensor, Tensor, Tensor]],
        cuts: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`<row, d_last> <= constant + <a, d_0>`. Multipliers that are missing are found here.

        Long because all kinds of nodes add to the same weights and to the same constant.

        cuts: gets a bound for every node that all of a substitution goes through, `(R,)` each.
        """
        nodes = self.graph.nodes
        weight = {last: rows}
        constant = kind.floors[last][owner].expand(len(rows))
        for i in range(last, 0, -1):
            if i not in weight:
                continue
            node = nodes[i]
            w = weight.pop(i)
            if cuts is not None and not weight and i < last:
                # A length is rounded up by more than the product loses.
                cuts.append(constant + _length(w) * self.reach.radius[i][owner])
            if isinstance(node.op, Affine):
                if i in kind.errors:
                    constant = constant + row_dot(w.abs(), of_owner(kind.errors[i], owner))
                for j, part in zip(node.inputs, kind.maps[i].transpose(w)):
                    add_to(weight, j, part)
            elif i in layers:
                layer = layers[i]
                if i not in slopes:
                    bend = self.sweep.bends[i]
                    up, down = (
                        of_owner(v, owner).to(kind.dtype).expand_as(w).clone()
                        for v in (bend.up, bend.down)
                    )
                    slopes[i] = (up, down, layer.first_multiplier(w.detach(), up, down))
                    if torch.is_grad_enabled():
                        for v in slopes[i]:
                            v.requires_grad_(True)
                terms = (node.size + 16) * 2.0**-52 if kind is self.sweep.exact else 0.0
                part, more = layer.pull(w, *slopes[i], terms)
                constant = constant + more
                add_to(weight, node.inputs[0], part)
            elif i in kind.planes:
                off, far = kind.planes[i].pull(weight, node.inputs, w, owner)
                constant = constant + off + far
            else:
                line = kind.lines[i].take(owner)
                constant = constant + row_dot(w, line.off) + row_dot(w.abs(), line.far)
                add_to(weight, node.inputs[0], w * line.mid + w.abs() * line.rad)
        if 0 not in weight:
            return constant, constant.new_zeros(len(constant), self.graph.inputs, dtype=kind.dtype)
        return constant, flattened(weight[0])

    def bound(self, last: int, rows: Tensor, owner: Tensor, steps: int, goal: Tensor) -> Tensor:
        """Upper bounds on `<row, d_last>`, `(R,)` in float64; rows that fall below their goal are
        finished.
        """
        fast = self.sweep.fast
        layers = self._layers(fast, last, owner)
        slopes: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        ascent: Ascent | None = None
        part = rows.float()
        mine = owner
        for step in range(1, steps + 1):
            clock.check()
            with torch.enable_grad():
                constant, a = self._substitute(fast, last, part, mine, layers, slopes)
                value = constant + self.sweep.inputs.upper(a, mine)
                leaves = [v for parts in slopes.values() for v in parts]
                if not leaves or not value.requires_grad:
                    break
                pulls = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
            ascent = ascent or Ascent(leaves, apart=True)
            ascent.keep(-value.detach(), leaves)
            open_ = (value >= goal).nonzero()[:, 0]
            moved = _moved(leaves, ascent.moves(pulls), step)
            if len(open_) < len(part):
                ascent.take(open_)
                part = part[open_]
                mine = mine[open_]
                goal = goal[open_]
                layers = {i: layer.rows(open_) for i, layer in layers.items()}
                moved = [v[open_] for v in moved]
            if not len(part):
                break
            slopes = _by_layer(slopes, [v.requires_grad_(True) for v in moved])
        best = {} if ascent is None else _by_layer(slopes, [v.double() for v in ascent.kept])
        return self._claim(last, rows, owner, best)

    def _claim(
        self,
        last: int,
        rows: Tensor,
        owner: Tensor,
        slopes: dict[int, tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        """The bound with these slopes, in float64."""
        exact = self.sweep.exact
        layers = self._layers(exact, last, owner)
        cuts: list[Tensor] = []
        with torch.no_grad():
            constant, a = self._substitute(exact, last, rows, owner, layers, slopes, cuts)
            found = torch.stack([constant + self.sweep.inputs.upper(a, owner), *cuts])
        return torch.where(found.isnan(), math.inf, found).amin(0)


def _moved(leaves: list[Tensor], moves: list[Tensor | None], step: int) -> list[Tensor]:
    """The next values of `(up, down, multiplier)` of each layer."""
    rates = itertools.cycle((RATE, RATE, PACE))
    return [
        v.detach() if move is None else v.detach() - rate * DECAY ** (step - 1) * move
        for v, move, rate in zip(leaves, moves, rates)
    ]


def _by_layer(
    layers: Iterable[int], parts: list[Tensor]
) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Three tensors for each layer, from a list of all."""
    return {i: (parts[3 * k], parts[3 * k + 1], parts[3 * k + 2]) for k, i in enumerate(layers)}


def ball_margins(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    radius: Tensor | float,
    norm: float,
    domain: Domain,
    steps: int = STEPS,
) -> Tensor:
    """Lower bounds on `theta_y - theta_j` over each sample's ball cut by the box, `(N, K)` in
    float64, 0 at `j = y`: CROWN's, or those with balls in every layer where they are better.

    Args:
        graph: the network.
        x: samples `(N, *shape)`.
        y: labels `(N,)`.
        radius: of the balls, one number or `(N,)`.
        norm: ground norm, 1, 2 or inf.
        domain: the box, or None.
        steps: of the ascent on slopes and multipliers.
    """
    x = x.to(graph.device)
    y = y.to(graph.device)
    radius = torch.as_tensor(radius, dtype=torch.float64).expand(len(x))
    balls = Balls.make(x, radius, norm, domain)
    reach = Reach.make(graph, balls)
    sweep = Sweep(graph, balls, 0, reach.ranges).run()
    lower = margins(sweep, y)[0]
    if not sweep.bends or not steps:
        return lower
    open_ = (lower <= 0) & (torch.arange(graph.outputs, device=y.device) != y[:, None])
    owner, rival = open_.nonzero().T
    if not len(owner):
        return lower
    last = len(graph.nodes) - 1
    z = sweep.centre[last]
    here = z.gather(1, y[:, None]) - z
    spheres = Spheres(sweep, reach)
    eye = torch.eye(graph.outputs, dtype=torch.float64, device=y.device)
    widest = max(node.size for node in graph.nodes)
    size = max(1, 8 * room_of(y.device) // widest)
    for part in torch.split(torch.arange(len(owner), device=y.device), size):
        mine = owner[part]
        other = rival[part]
        goal = here[mine, other] * (1 - 2.0**-20)
        found = spheres.bound(last, eye[other] - eye[y[mine]], mine, steps, goal)
        slack = 2.0**-50 * (z[mine].abs().amax(1) + found.abs())
        better = here[mine, other] - found - slack
        better = torch.where(better.isnan(), -math.inf, better)
        lower[mine, other] = torch.maximum(lower[mine, other], better)
    return lower
