"""Linear bounds that know how far all neurons of a layer bend at once, for r = 1 and 2.

A neuron whose input moves by t from the sample moves by `s t + e`, where s is the middle slope of
its cone and `|e| <= k |t|`: k is 0 for a neuron that keeps its side, and 1/2 at most for a ReLU.
With these slopes a coefficient vector goes backward through the network once, for both sides:

    <w, d>  =  <a, d_0>  +  sum over layers <b, e>  +-  rounding.

`<b, e>` is bounded with e in its box AND `||e / sqrt k||_2 <= ||sqrt(k) t||_2 =: N(d_0)`. The
entries of `sqrt(k) t` are such rows themselves: their coefficients make matrices A and B, and

    N(d_0)  <=  ||A d_0||_2  +  sum over layers before  ||B sqrt k||_2 N'(d_0)  +  rounding.

So all of a bound is a convex function of d_0. Over an l1 ball it is largest at a vertex. On an l2
ball let x be the share of d_0 along a: the first term is `x ||a|| r`, and `||A d_0||_2 <=
x ||A a|| r / ||a|| + sqrt(1 - x^2) ||A||_2 r`; the largest value over x is a square root. A
direction in which all neurons bend is seldom that of a.

CROWN pays for every bent neuron of a layer as if all of them bent as far as each can. On a ball
they do not: most of what CROWN loses at l1 and l2 is this. There is nothing to optimise here, and
the price is about that of CROWN's own substitution. `docs/theory.md`, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.graph.matrix_norms import UP
from wassail.certificates.relax.backward import Backward, unit_rows
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.lines import Arithmetic, Shape
from wassail.certificates.relax.norms import Gram, Reach, map_norm, matrix_norms
from wassail.certificates.relax.rows import (
    Span,
    flattened,
    narrow_to,
    of_owner,
    room_of,
    row_dot,
    unflattened,
)
from wassail.certificates.relax.slope_cone_layer import (
    Bent,
    Layer,
    Lengths,
    Pulled,
    Slanted,
    flattened_root,
    losses_of,
)
from wassail.certificates.relax.windows import ConeWindows, Windows
from wassail.rounding import UNIT

if TYPE_CHECKING:
    from wassail.certificates.relax.crown import Sweep

# Bent neurons of a layer whose matrices are made; more are bounded by their boxes.
MATRIX_UP_TO_ROWS = 1024
LEAST_SCALE = 2.0**-60  # of the weights of a layer whose Gram matrix is made
ALIKE = 0.7  # lengths by matrices are taken below the others divided by this


@dataclass(frozen=True, eq=False)
class Bounded:
    """`<row, d> <= constant + <a, d_0>` and `<row, d> <= together` on the balls, `(R,)` each,
    rounded up.
    """

    constant: Tensor
    together: Tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """What rows of coefficients see: balls, and which of them is each row's; boxes: layer -> down
    and up of the row's coefficients there, where those are no whole rows.
    """

    balls: Balls
    owner: Tensor
    boxes: Mapping[int, Span] = field(default_factory=dict)


class SlopeCones:
    """The layers of one sweep as far as it has come.

    Args:
        sweep: its spans are narrowed layer by layer.
        reach: how far its nodes move.
    """

    def __init__(self, sweep: Sweep, reach: Reach) -> None:
        # Not the sweep itself, which holds this: a circle is freed by chance only.
        self.graph = sweep.graph
        self.balls = sweep.balls
        self.inputs = sweep.inputs
        self.exact = sweep.exact
        self.values = sweep.values
        self.moved = sweep.lengths
        self.rows = 0  # coefficient vectors substituted so far
        self.kind: Arithmetic = sweep.fast if sweep.coarse else sweep.exact
        self.reach = reach
        self.free = (sweep.inputs.below > 0) | (sweep.inputs.above > 0)
        self.layers: dict[int, Layer] = {}
        self._known: dict[int, Lengths] = {}
        self.sizes = losses_of(self.graph, self.kind.tiny)

    @property
    def known(self) -> bool:
        """Whether there are layers."""
        return bool(self.layers)

    @property
    def enough(self) -> bool:
        """Whether CROWN's own bounds on a layer, after screening, would add next to nothing."""
        return False

    def user(self, j: int) -> int | None:
        """The first activation that reads node j."""
        users = [i for i in self.graph.users[j] if self.graph.nodes[i].act is not None]
        return users[0] if users else None

    def narrow(self, j: int, low: Tensor, high: Tensor) -> None:
        """Spans of node j, `(N, size)`: narrowed in place. Then the ball of the activation that
        reads it.

        The host waits for a device once.
        """
        i = self.user(j)
        if i is None:
            return
        node = self.graph.nodes[j]
        open_ = self.values.open_entries(j, low, high)
        if self.graph.nodes[i].smooth:
            open_ = low < high
        lengths = open_.sum(1)
        counts = lengths.tolist()
        order = _by_neighbours(node.shape, low.device)
        places = order[torch.nonzero_static(open_[:, order], size=sum(counts))[:, 1]]
        known = self._known[i] = Lengths.nothing(open_.reshape(-1, *node.shape), self.inputs)
        begun = 0
        for first, after in _groups(counts, self.together(j)):
            clock.check()
            most = max(counts[first:after])
            total = sum(counts[first:after])
            own = places[begun : begun + total]
            begun += total
            # The columns of the first matrix need no product.
            keep = most <= MATRIX_UP_TO_ROWS or (self.balls.norm == 1 and not self.layers)
            if not most or not (keep or self.layers):
                continue
            part = torch.arange(first, after, device=low.device)
            owner, place, there = _padded(own, lengths[first:after], part, most)
            view = self._view(j, first, after)
            pulled = self._narrowed(j, owner, place, low, high, keep, view)
            if pulled is None:
                continue
            shape = self._shape(i, part, low, high)
            every = flattened_root(shape, self.kind)
            known.those[part] = ((every > 0) & open_[part]).reshape(-1, *node.shape)
            root = every.gather(1, place.reshape(len(part), most)) * there.reshape(len(part), -1)
            pulled = replace(pulled, gram=self._gram(j, pulled.a, place.reshape(len(part), most)))
            self._measure(known, pulled, root, part)

    def together(self, j: int) -> int:
        """Rows of one batch."""
        widest = max(n.size for n in self.graph.nodes[: j + 1])
        return max(1, room_of(self.graph.device) // widest)

    def _shape(self, i: int, part: Tensor, low: Tensor, high: Tensor) -> Shape:
        """The activation over the spans of some samples."""
        node = self.graph.nodes[i]
        j = node.inputs[0]
        shape = (-1, *self.graph.nodes[j].shape)
        return Shape(
            node,
            self.values.centre[j][part],
            low[part].reshape(shape),
            high[part].reshape(shape),
        )

    def _view(self, j: int, first: int, after: int) -> ConeWindows | None:
        """What rows of node j see of some samples, where each of them reads a window only."""
        windows = Windows.of(self.graph, j) if self.balls.norm == 2 else None
        if windows is None or self.graph.curved or windows.act not in self.layers:
            return None
        bent = self.layers[windows.act].bent
        return ConeWindows(windows, j, self.kind, bent, self.balls, slice(first, after))

    def _narrowed(
        self,
        j: int,
        owner: Tensor,
        place: Tensor,
        low: Tensor,
        high: Tensor,
        keep: bool,
        view: ConeWindows | None,
    ) -> Pulled | None:
        """Bounds on some entries of node j; and their rows, if they are kept."""
        kept: list[Pulled] = []
        step = self.together(j) if view is None else view.together
        for part in torch.split(torch.arange(len(place), device=place.device), step):
            clock.look()
            mine = owner if len(owner) == 1 else owner[part]
            if view is None:
                pulled = self.pull_units(j, place[part], mine)
            else:
                self.rows += len(part)
                pulled = view.pull(mine, place[part])
            if self.layers:
                bottom, top = self._between(pulled, mine, place[part], view)
                narrow_to(low, high, mine, place[part], bottom, top)
            if keep:
                kept.append(pulled if view is None else view.whole(pulled, place[part]))
        if not kept:
            return None
        bent = {k: torch.cat([p.bent[k] for p in kept]) for k in kept[0].bent}
        parts = ([p.shift for p in kept], [p.spread for p in kept], [p.a for p in kept])
        shift, spread, a = (torch.cat(values) for values in parts)
        return Pulled(shift, spread, a, bent)

    def _between(
        self, pulled: Pulled, owner: Tensor, place: Tensor, view: ConeWindows | None
    ) -> Span:
        """`<row, d>` lies between these, `(R,)` each; place: of the rows."""
        if view is None:
            along = self._along(pulled.a, owner)
            seen = Seen(self.inputs, owner)
        else:
            window = view.window(owner, place)
            seen = Seen(view.balls, window, {view.act: view.box(window)})
            length = view.length(_units(pulled.a), window)
            along = {view.act: self._moved(view.act, length, owner, {})}
        top = self._top(pulled, owner, 1.0, along, seen)
        bottom = self._top(pulled, owner, -1.0, along, seen)
        return -bottom, top

    def _top(
        self, pulled: Pulled, owner: Tensor, sign: float, along: dict[int, Tensor], seen: Seen
    ) -> Tensor:
        """`sign <row, d>` is at most this, `(R,)`."""
        a = pulled.a if sign > 0 else -pulled.a
        across = seen.balls.upper(a, seen.owner)
        found = self.upper(pulled, a, across, owner, sign, along, seen.boxes)
        apart = found.constant + across
        return torch.fmin(apart + 2 * UNIT * apart.abs(), found.together)

    def _measure(self, known: Lengths, pulled: Pulled, root: Tensor, part: Tensor) -> None:
        """The lengths of one layer, of some samples, from their rows, as many of each.

        Args:
            known: gets them.
            pulled: the rows.
            root: sqrt(k) of each row's neuron, `(samples, rows)`, 0 for rows that do not count.
            part: the samples.
        """
        grams = self._grams(pulled, len(part))
        found, norms, known.rest[part] = self._lengths(pulled, root, part, grams)
        for k, norm in norms.items():
            known.links.setdefault(k, torch.zeros_like(known.rest))[part] = norm
            found = found + norm[:, None] * self.layers[k].eps[part]
        found = found + known.rest[part][:, None]
        known.eps[part] = found * (1 + (len(norms) + 16) * UNIT)
        if self.moved is not None:
            # The length of t itself, over the neurons that bend: a ball for `ball_relaxation.py`.
            found, norms, rest = self._lengths(pulled, (root > 0).double(), part, grams)
            plain = found.amax(1)
            for k, norm in norms.items():
                plain = plain + norm * self.layers[k].eps[part].amax(1)
            known.plain[part] = (plain + rest) * (1 + (len(norms) + 16) * UNIT)

    def _grams(self, pulled: Pulled, count: int) -> dict[int, Gram]:
        """The Gram matrices of the rows that are asked twice: of the input's coefficients, under 0,
        and of a layer's, where these are at least as many as the rows.
        """
        found = {} if pulled.gram is None else {0: pulled.gram}
        if self.moved is None:
            return found
        given = pulled.bent if self.inputs.norm == 1 else {0: pulled.a, **pulled.bent}
        for k, rows in given.items():
            wide = rows.reshape(count, -1, rows.shape[1])
            if k not in found and wide.shape[1] < wide.shape[2]:
                found[k] = Gram.of(wide.double())
        return found

    def _lengths(
        self, pulled: Pulled, weight: Tensor, part: Tensor, grams: Mapping[int, Gram]
    ) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        """Rows times a weight each, as vectors: how long they are for deviations of the input, at
        each vertex for r = 1; the norms of what the layers before add; and the length of the rest.
        """

        def weighted(rows: Tensor) -> Tensor:
            return rows.double().reshape(*weight.shape, -1) * weight[:, :, None]

        def norms_of(k: int, rows: Tensor) -> Tensor:
            return grams[k].norms(weight) if k in grams else matrix_norms(weighted(rows))

        if self.inputs.norm == 1:
            longest = rounding.length(weighted(pulled.a), 2, 1) * (1 + (weight.shape[1] + 8) * UNIT)
        else:
            longest = norms_of(0, pulled.a)[:, None]
        norms = {}
        for k, bent in pulled.bent.items():
            norms[k] = norms_of(k, bent)
        rest = (pulled.shift.abs() + pulled.spread).reshape(weight.shape) * weight
        length = rounding.length(rest, 2, 1) * (1 + (rest.shape[1] + 8) * UNIT)
        return longest * self.inputs.radius[part][:, None], norms, length

    def _gram(self, j: int, a: Tensor, place: Tensor) -> Gram | None:
        """`A A^T` of rows of node j, entries `place` `(samples, m)`, where that is cheap: node j is
        a convolution of the input, so it is the convolution of the rows themselves. None elsewhere.

        The rows have the weights in their own type, the map has them in float64.
        """
        node = self.graph.nodes[j]
        first = not self.layers and node.inputs == (0,) and self.balls.norm == 2
        if not first or node.map is None or node.map.window is None:
            return None
        count, m = place.shape
        scale = a.double().abs().reshape(count, -1).amax(1)
        # Below that weights may have underflowed in float32: nothing is said of them.
        scale = torch.where(scale > LEAST_SCALE, scale, math.nan)
        map_ = self.exact.maps[j]
        found = []
        for part in torch.split(torch.arange(len(a), device=a.device), self.together(j)):
            clock.look()
            unit = a[part].double() / scale[part // m][:, None]
            image = map_.forward(laid_out(unflattened(unit, self.graph.nodes[0].shape)))
            found.append(image.flatten(1).gather(1, place[part // m]))
        values = torch.cat(found).reshape(count, m, m) / scale[:, None, None]
        off = 8 * self.kind.tiny + (m + node.map.terms + 64) * 4 * UNIT
        return Gram(values, scale, off)

    def _along(self, a: Tensor, owner: Tensor) -> dict[int, Tensor]:
        """`||sqrt(k) t||_2` of each layer for the deviation of length `radius` along a, `(R,)`,
        from above: forward with the middle slopes, in float64. For r = 2; {}: nothing is known.
        """
        if self.balls.norm != 2 or self.graph.curved or not self.layers:
            return {}
        nodes = self.graph.nodes
        exact = self.exact
        unit = _units(a)
        value = {0: laid_out(unflattened(unit, nodes[0].shape))}
        found: dict[int, Tensor] = {}
        last = max(self.layers)
        for i, node in enumerate(nodes[: last + 1]):
            clock.look()
            if node.map is not None:
                value[i] = exact.maps[i].forward(*(value[j] for j in node.inputs))
            elif i in self.layers:
                bent = self.layers[i].bent
                j = node.inputs[0]
                moved = rounding.length(flattened(value[j]) * of_owner(bent.root, owner), 2, 1)
                found[i] = self._moved(i, moved, owner, found)
                value[i] = value[j] * of_owner(bent.mid, owner).double()
        return found

    def _moved(self, i: int, length: Tensor, owner: Tensor, found: dict[int, Tensor]) -> Tensor:
        """`||sqrt(k) t||_2` of layer i for deviations of length `radius`, `(R,)`, from above.

        Args:
            i: the layer.
            length: what a forward pass gave for deviations of length 1.
            owner: of the rows.
            found: the same of the layers before.
        """
        layer = self.layers[i]
        node = self.graph.nodes[i]
        j = node.inputs[0]
        most = layer.bent.root.amax(1)[owner]
        # The rounding of that pass, and of the rows that it stands for.
        moved = length * (1 + (node.size + 16) * UNIT) + self.sizes[j] * most
        moved = moved * self.balls.radius[owner] * (1 + 2.0**-20)
        for k, norms in layer.links.items():
            moved = moved + norms[owner] * found[k]
        floors = self.kind.floors[j][owner] * math.sqrt(node.size) * most
        moved = moved + floors + layer.rest[owner]
        moved = moved * (1 + (len(layer.links) + 16) * UNIT)
        eps = layer.eps[:, 0][owner].expand(len(length))
        # Less than eps may be said: that is the length for every deviation of the ball.
        return torch.where(layer.direct[owner], torch.fmin(moved, eps), eps)

    def _off(self, j: int) -> Tensor | None:
        """`d_j = W d_0 + e`: the length of e is at most this, `(N,)`; None if several nodes meet on
        the way from the input.
        """
        node = self.graph.nodes[j]
        if not node.inputs:
            return torch.zeros_like(self.reach.radius[0])
        before = self._off(node.inputs[0])
        if before is None or len(node.inputs) > 1 or node.map is None:
            return None
        shape = self.graph.nodes[node.inputs[0]].shape
        return (before * map_norm(node.map, 2.0, shape, node.shape) + self.reach.lost[j]) * UP

    def add(self, i: int, shape: Shape, error: Tensor) -> None:
        """Activation i with its final spans.

        Args:
            i: the node.
            shape: its spans.
            error: what rounding may add to the deviation of its input, `(N, *shape)`.
        """
        known = self._known.pop(i, None)
        if known is None:
            none = torch.zeros_like(shape.c, dtype=torch.bool)
            known = Lengths.nothing(none, self.inputs)
        if self.moved is not None:
            plain = torch.where(known.plain.isnan(), math.inf, known.plain)
            self.moved[i] = (plain, known.those)
        bent = Bent.make(shape, error, known.open, self.kind)
        # By the norms of the layers, for rows that are too many for a matrix.
        whole = bent.root.amax(1) * self.reach.radius[shape.node.inputs[0]] * UP
        # One of them for all directions: the least of several functions is not convex.
        least = torch.fmin(whole, bent.box)
        direct = known.eps.amax(1) * ALIKE < least
        eps = torch.where(direct[:, None], known.eps, least[:, None])
        rest = known.rest
        off = None if self.layers else self._off(shape.node.inputs[0])
        if off is not None and self.balls.norm == 2:
            # The first layer is a map of the input alone, and its norm holds in every direction.
            given = self.reach.radius[0]
            wider = self.balls.radius / torch.where(given > 0, given, 1.0)
            every = whole * torch.where(given > 0, wider, 1.0) * UP
            linear = ~direct & (every < bent.box / ALIKE)
            eps = torch.where(linear[:, None], every[:, None], eps)
            rest = torch.where(linear, bent.root.amax(1) * off * UP, rest)
            direct = direct | linear
        self.layers[i] = Layer(bent, eps, direct, known.links, rest)

    def pull(self, last: int, rows: Tensor, owner: Tensor) -> Pulled:
        """Rows of node `last` backward to the input, `(R, *shape)`; owner as in `of_owner`."""
        return self._pull({last: rows}, self.kind.floors[last][owner].expand(len(rows)), owner)

    def pull_units(self, last: int, place: Tensor, owner: Tensor) -> Pulled:
        """Unit vectors for entries `place` of node `last` backward to the input."""
        return self._pull(*unit_rows(self.graph, self.kind, last, place, owner), owner)

    def _pull(self, weight: dict[int, Tensor], spread: Tensor, owner: Tensor) -> Pulled:
        bent: dict[int, Tensor] = {}
        self.rows += len(spread)
        back = Backward(self.graph, self.kind, weight, spread, owner, apart=True)
        assert back.shift is not None
        for i, node, w in back.neurons(max(weight)):
            line = self.bent(i)
            back.shift = back.shift + row_dot(w, of_owner(line.off, owner))
            own = self.coefficients(i, w, owner)
            if own.shape[1]:
                bent[i] = own
            far = row_dot(w.abs(), of_owner(line.far, owner))
            back.take(node, w * of_owner(line.mid, owner), far)
        # An input that cannot move has no part in any factor of a bound: not in lengths, not in
        # the direction of a.
        a = torch.where(of_owner(self.free, owner), back.inputs(), 0.0)
        return Pulled(back.shift, back.constant, a, bent)

    def bent(self, i: int) -> Slanted:
        """Activation i as rows go through it."""
        return self.layers[i].bent

    def coefficients(self, i: int, w: Tensor, owner: Tensor) -> Tensor:
        """What multiplies the bent parts of its neurons, `(R, neurons)`."""
        return self.layers[i].bent.coefficients(w, owner)

    def upper(
        self,
        pulled: Pulled,
        a: Tensor,
        across: Tensor,
        owner: Tensor,
        sign: float,
        along: dict[int, Tensor],
        boxes: Mapping[int, Span],
    ) -> Bounded:
        """Bounds on `sign <row, d>`.

        Args:
            pulled: the rows.
            a: their coefficients of the input, times sign.
            across: the most that `<a, d_0>` can be, `(R,)`.
            owner: the sample of each, or of all.
            sign: 1 or -1.
            along: what `_along` found.
            boxes: of a layer, down and up of the coefficients, where rows hold a part of them.
        """
        balls = self.inputs
        fixed = sign * pulled.shift + pulled.spread
        size = pulled.shift.abs() + pulled.spread
        sides = torch.zeros_like(fixed)  # what the layers add to a deviation across a
        ahead = torch.zeros_like(fixed)  # and to one along a
        vertices = torch.zeros(1, dtype=fixed.dtype, device=fixed.device)
        for k, bent in pulled.bent.items():
            layer = self.layers[k]
            own, rate = layer.reach(sign * bent, owner, boxes.get(k))
            fixed = fixed + own
            size = size + own
            eps = layer.eps.amax(1)[owner].expand(len(rate))
            sides = sides + rate * eps
            if balls.norm == 1:
                vertices = vertices + rate[:, None] * of_owner(layer.eps, owner)
            else:
                ahead = ahead + rate * along.get(k, eps)
        few = (16 + 4 * len(pulled.bent)) * UNIT
        fixed = fixed + few * size
        constant = fixed + sides + few * (size + sides)
        if balls.norm == 1:
            up = of_owner(balls.above, owner) > 0
            down = of_owner(balls.below, owner) > 0
            free = torch.where(torch.where(a > 0, up, down), a.double().abs(), 0.0)
            radius = balls.radius[owner].expand(len(a))
            growth = (free * radius[:, None] + vertices).amax(1)
        else:
            growth = self._widest(a, across, owner, ahead, sides)
        slack = (a.shape[1] + 64 + 8 * len(pulled.bent)) * UNIT
        return Bounded(constant, fixed + growth + slack * (fixed.abs() + growth))

    def _widest(
        self, a: Tensor, across: Tensor, owner: Tensor, ahead: Tensor, sides: Tensor
    ) -> Tensor:
        """The largest `x p + sqrt(1 - x^2) q` over the shares x of a deviation along a, `(R,)`, up
        to relative errors: p has the input's part, and x is so large only as the box lets it.

        No x below 0 gives more: there the layers add q at most, which is the value at x = 0.
        """
        radius = self.inputs.radius[owner].expand(len(a))
        whole = rounding.length(a.double(), 2, 1) * radius
        p = whole + ahead
        q = sides
        most = (across / whole.clamp(min=1e-300)).clamp(max=1.0) * (1 + 2.0**-40)
        best = torch.hypot(p, q)
        beyond = p > most * best
        # As a product: the difference of two squares would cancel near 1.
        beside = ((1 - most) * (1 + most)).clamp(min=0).sqrt() * (1 + 2.0**-40)
        cut = most * p + beside * q
        return torch.where(beyond & (most < 1), torch.minimum(cut, best), best)

    def bound(self, last: int, rows: Tensor, owner: Tensor) -> tuple[Bounded, Tensor, Tensor]:
        """Bounds on rows of a node, their coefficients a `(R, n)` of the input in float64, and the
        most that `<a, d_0>` can be.
        """
        pulled = self.pull(last, rows.to(self.kind.dtype), owner)
        across = self.inputs.upper(pulled.a, owner)
        along = self._along(pulled.a, owner)
        found = self.upper(pulled, pulled.a, across, owner, 1.0, along, {})
        return found, pulled.a.double(), across


def _units(a: Tensor) -> Tensor:
    """Rows of length 1 along rows `(R, n)`, in float64."""
    # Scaled first: the square of a length may not overflow or vanish.
    unit = a.double()
    unit = unit / unit.abs().amax(1, keepdim=True).clamp(min=2.0**-1000)
    length: Tensor = torch.linalg.vector_norm(unit, dim=1, keepdim=True).clamp(min=2.0**-500)
    return unit / length


def _by_neighbours(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The entries of a node, pixels of an image along a Z-curve: few neighbouring rows read few
    pixels of the layers before.
    """
    every = torch.arange(math.prod(shape), device=device)
    if len(shape) != 3:
        return every
    wide = shape[2]
    down = every // wide % shape[1]
    across = every % wide
    key = torch.zeros_like(every)
    for bit in range(max(shape[1], wide).bit_length()):
        key = key + ((down >> bit & 1) << 2 * bit + 1) + ((across >> bit & 1) << 2 * bit)
    return key.argsort(stable=True)


def _groups(counts: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Samples that go together, the first one and the one after the last: at most so many rows,
    filled up to the longest.
    """
    first = 0
    for s in range(1, len(counts) + 1):
        if s == len(counts) or max(counts[first : s + 1]) * (s + 1 - first) > most:
            yield first, s
            first = s


def _padded(
    places: Tensor, lengths: Tensor, part: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of some samples with as many rows for each: owner, place, and which rows count.

    Rows that only fill up are copies of the sample's first one: so nothing is written twice with
    different values.
    """
    if len(part) == 1:
        return part, places, torch.ones_like(places, dtype=torch.bool)
    there = torch.arange(most, device=places.device) < lengths[:, None]
    begun = (lengths.cumsum(0) - lengths).clamp(max=len(places) - 1)
    place = places[begun][:, None].expand(-1, most).masked_scatter(there, places)
    return part.repeat_interleave(most), place.flatten(), there.flatten()
