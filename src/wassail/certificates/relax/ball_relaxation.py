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

Two starts for `g`: CROWN's, and the tangents `w_i f'(c_i)`, which are better where most neurons of
a wide box stay on their side. Each row takes the one that is better for it.

Where `rho` comes from: the norms of the layers, times the radius at the input (`norms.Reach`).
Better, `(lam / 2) ||d||^2` is not replaced by `(lam / 2) rho^2` but handed on to the layer before
(`ball_quadratic_terms.py`): there it is `(q / 2) ||f(c + d') - f(c)||^2`, one term more in each of
the maxima. The input pays in the end, for the direction and for the length at once. Where a
substitution has come down to one node, `<w, d> <= ||w||_2 rho` is a bound, too.

Neurons may be split: the interval of a split neuron ends at its kink.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.matrix_norms import UP
from wassail.certificates.relax.backward import Ascent, Backward
from wassail.certificates.relax.ball_quadratic_terms import LayerBalls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Arithmetic, Lines
from wassail.certificates.relax.norms import length_above
from wassail.certificates.relax.rows import Length, add_to, of_owner, row_dot

HALVINGS = 9  # of the search for the first multipliers
PACKED = 3  # rows are packed where the neurons that count are a third at most
LEAST = 1e-30  # a multiplier: so small that it says nothing


@dataclass(frozen=True, eq=False)
class BallLayer:
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

    def places(self, w: Tensor, g: Tensor, lam: Tensor, q: Tensor | float) -> tuple[Tensor, Tensor]:
        """Where the two maxima are: on the right of the kink and on its left."""
        with torch.no_grad():
            low = torch.maximum(self.low, -self.c)
            right = _highest(w + q * (self.c - self.here) - g, lam - q, low, self.high)
            high = torch.minimum(self.high, -self.c)
            shift = self.slope * self.c - self.here
            pull = self.slope * (w + q * shift) - g
            left = _highest(pull, lam - q * self.slope.square(), self.low, high)
        return right, left

    def values(
        self, w: Tensor, g: Tensor, lam: Tensor, q: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The maximum, where it is, and the magnitude of what it is a sum of."""
        right, left = self.places(w, g, lam, q)
        up = self.c + right - self.here
        first = w * up + q / 2 * up.square() - g * right - lam / 2 * right.square()
        down = self.slope * (self.c + left) - self.here
        second = w * down + q / 2 * down.square() - g * left - lam / 2 * left.square()
        # A neuron that cannot move has its kink at both ends: the right side holds for it.
        first = torch.where(self.high >= -self.c, first, -math.inf)
        second = torch.where(self.low < -self.c, second, -math.inf)
        # Terms may cancel, and the places are rounded: all count in full, at the ends.
        far = torch.maximum(-self.low, self.high)
        wide = far + 2 * self.c.abs()
        size = (w.abs() + q * wide) * wide + (g.abs() + lam * far) * far
        return torch.maximum(first, second), torch.where(first > second, right, left), size

    def first_multiplier(self, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """The logarithm of the best multiplier for these coefficients: where the maxima fill the
        ball.
        """
        with torch.no_grad():
            g, w = self.split(w, up, down)
            layer, (g, w) = self.packed(w, g, w)
            scale = lengths_of(w) / layer.rho.clamp(min=LEAST)
            scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
            low = scale.log() - 20.0
            high = scale.log() + 10.0
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                lam = widened(middle.exp().clamp(min=LEAST), w)
                at = layer.values(w, g, lam)[1]
                more = squares_of(torch.where(layer.free, at, 0.0)) > layer.rho.square()
                low = torch.where(more, middle, low)
                high = torch.where(more, high, middle)
        return (low + high) / 2

    def multiplier(self, log_lam: Tensor, q: Tensor | None) -> Tensor:
        """`lam` `(R,)`: more than q, so that no maximum is at an end for its sake."""
        lam = log_lam.exp().clamp(min=LEAST)
        return lam if q is None else lam + q

    def costs(
        self, w: Tensor, up: Tensor, down: Tensor, log_lam: Tensor, q: Tensor | None
    ) -> Tensor:
        """The maxima, one for each neuron."""
        g, open_ = self.split(w, up, down)
        more = 0.0 if q is None else widened(q, w)
        best = self.values(open_, g, widened(self.multiplier(log_lam, q), w), more)[0]
        return torch.where(self.free, best, 0.0)

    def pull(
        self,
        w: Tensor,
        up: Tensor,
        down: Tensor,
        log_lam: Tensor,
        terms: float,
        q: Tensor | None = None,
        linked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Coefficients of the inputs, and the constant; terms: what rounding takes of a sum.

        q: `q / 2 ||f(c + d) - f(c)||^2` is added to what is bounded, `(R,)`; linked: rows that pay
        for their ball elsewhere, `(R,)`.
        """
        lam = self.multiplier(log_lam, q)
        g, open_ = self.split(w, up, down)
        best = self._best(open_, g, lam, terms, q)
        firm = torch.where(self.free, 0.0, w)
        constant = row_dot(firm, self.line.off) + row_dot(firm.abs(), self.line.far)
        known = torch.isfinite(self.rho)
        rho = torch.where(known, self.rho, 0.0)
        ball = lam / 2 * rho * rho * (1 + 2.0**-40)  # not rho^2, which may underflow
        if linked is not None:
            ball = torch.where(linked, 0.0, ball)
            known = known | linked
        total = constant + best + ball
        total = torch.where(known, total, math.inf)
        settled = firm * self.line.mid + firm.abs() * self.line.rad
        return torch.where(self.free, g, settled), total

    def _best(self, w: Tensor, g: Tensor, lam: Tensor, terms: float, q: Tensor | None) -> Tensor:
        """The sum of the maxima, rounded up by `terms`, `(R,)`."""
        layer = self
        if q is None and not torch.is_grad_enabled():  # what has no coefficient costs nothing
            layer, (w, g) = self.packed(w, w, g)
        more = 0.0 if q is None else widened(q, w)
        best, _, size = layer.values(w, g, widened(lam, w), more)
        best = best + g.abs() * layer.error + terms * (size + g.abs() * layer.error)
        return torch.where(layer.free, best, 0.0).flatten(1).sum(1)

    def packed(self, w: Tensor, *values: Tensor) -> tuple[BallLayer, list[Tensor]]:
        """The layer and some values with the neurons of each row that count, `(R, m)`: rows of a
        convolution have coefficients for few. The rest of a row is filled with neurons that do not
        count, whose coefficients are 0.
        """
        counts = (w != 0).flatten(1)
        most = int(counts.sum(1).amax()) if len(w) else 0
        size = counts.shape[1]
        if PACKED * most > size:
            return self, list(values)
        row, column = counts.nonzero().T
        start = counts.sum(1).cumsum(0) - counts.sum(1)
        place = torch.arange(len(row), device=row.device) - start[row]
        # Neurons that are left over: any index will do, the masks below leave them out.
        index = row.new_zeros(len(w), most)
        index[row, place] = column
        known = torch.zeros_like(index, dtype=torch.bool)
        known[row, place] = True

        def taken(value: Tensor) -> Tensor:
            return value.expand_as(w).flatten(1).gather(1, index)

        mine = (self.c, self.here, self.low, self.high, self.slope, self.error)
        c, here, low, high, slope, error = (taken(v) for v in mine)
        free = taken(self.free) & known
        layer = BallLayer(self.line, free, c, here, low, high, slope, error, self.rho)
        return layer, [torch.where(known, taken(v), 0.0) for v in values]

    def rows(self, keep: Tensor) -> BallLayer:
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
        return BallLayer(line, free, c, here, low, high, self.slope, error, rho)


def _highest(slope: Tensor, bend: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Where `slope t - bend t^2 / 2` is highest between two ends."""
    top = slope / torch.where(bend > 0, bend, 1.0)
    end = torch.where(slope > bend * (low + high) / 2, high, low)
    return torch.where(bend > 0, torch.maximum(torch.minimum(top, high), low), end)


def widened(values: Tensor, like: Tensor) -> Tensor:
    """One number a row, to be multiplied with rows of other shapes."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def squares_of(values: Tensor) -> Tensor:
    """The square of the length of each row."""
    return values.flatten(1).square().sum(1)


def lengths_of(values: Tensor) -> Tensor:
    """The length of each row."""
    return squares_of(values).sqrt()


Slopes: TypeAlias = "dict[int, tuple[Tensor, Tensor, Tensor]]"
Sides: TypeAlias = "Mapping[int, Tensor]"

RATE = 0.1  # of the slopes, at first
PACE = 0.3  # of the logarithms of the multipliers, at first
DECAY = 0.97
AHEAD = 1e-3  # of a bound: by how much tangents have to be better than CROWN's slopes
LATER = 30  # an ascent that goes on from slopes begins with the rate of this step


@dataclass(eq=False)
class _Moving:
    """The rows of an ascent that are not finished; point: where the steps of the first layer have
    come to.
    """

    rows: Tensor
    owner: Tensor
    goal: Tensor
    layers: dict[int, BallLayer]
    point: tuple[Tensor, Tensor] | None = None

    def take(self, keep: Tensor) -> None:
        """Go on with some of them."""
        self.rows = self.rows[keep]
        self.owner = self.owner[keep]
        self.goal = self.goal[keep]
        self.layers = {i: layer.rows(keep) for i, layer in self.layers.items()}
        if self.point is not None:
            self.point = (self.point[0][keep], self.point[1][keep])


class BallRelaxation:
    """Bounds on rows of the last node, with balls in every layer.

    Slopes: for each layer the slopes for coefficients above and below 0, `(R, *shape)`, and the
    logarithm of the multiplier, `(R,)`. Sides: for some layers 1 where a neuron is active, -1 where
    it is not, 0 where it may be both, `(R, *shape)`.

    Args:
        sweep: the boxes, and the radii.
        lengths: what a sweep found for the undecided neurons of a layer; default None.
    """

    def __init__(self, sweep: Sweep, lengths: Mapping[int, Length] | None = None) -> None:
        self.sweep = sweep
        self.graph = sweep.graph
        self.reach = sweep.reach
        self.balls = LayerBalls(sweep, lengths)

    def _layers(
        self, kind: Arithmetic, last: int, owner: Tensor, sides: Sides
    ) -> dict[int, BallLayer]:
        found = {}
        for i, bend in self.sweep.bends.items():
            if i >= last:
                continue
            node = self.graph.nodes[i]
            assert node.slope is not None
            slope = node.slope.to(kind.dtype)
            c, low, high, error = (
                of_owner(v, owner).to(kind.dtype)
                for v in (bend.shape.c, bend.shape.low, bend.shape.high, bend.error)
            )
            if i in sides:
                low = torch.where(sides[i] > 0, torch.maximum(low, -c), low)
                high = torch.where(sides[i] < 0, torch.minimum(high, -c), high)
            here = torch.where(c > 0, c, slope * c)
            found[i] = BallLayer(
                kind.lines[i].take(owner),
                of_owner(self.balls.free[i], owner),
                c,
                here,
                low,
                high,
                slope,
                error,
                self.balls.radius[i][owner].to(kind.dtype),
            )
        return found

    def _start(
        self,
        kind: Arithmetic,
        i: int,
        layer: BallLayer,
        w: Tensor,
        owner: Tensor,
        tangents: bool,
    ) -> Any:
        """CROWN's slopes for layer i, or its tangents, and the best multiplier for them."""
        bend = self.sweep.bends[i]
        if tangents:
            up = torch.where(layer.c > 0, 1.0, layer.slope).expand_as(w)
            return up, up, layer.first_multiplier(w, up, up)
        up, down = (
            of_owner(v, owner).to(kind.dtype).expand_as(w).clone() for v in (bend.up, bend.down)
        )
        found = (up, down, layer.first_multiplier(w.detach(), up, down))
        if torch.is_grad_enabled():
            for v in found:
                v.requires_grad_(True)
        return found

    def _begin(
        self, last: int, rows: Tensor, owner: Tensor, layers: Mapping[int, BallLayer]
    ) -> Slopes:
        """For each row the better one of the two starts, in float32."""
        fast = self.sweep.fast
        found: list[tuple[Tensor, Slopes]] = []
        with torch.no_grad():
            for tangents in (False, True):
                slopes: Slopes = {}
                constant, a, lam = self._substitute(
                    fast, last, rows, owner, layers, slopes, tangents=tangents
                )
                middle, spread = self.sweep.inputs.across(a, owner)
                value = constant + middle + spread
                if lam is not None:
                    value = value + lam / 2 * self.balls.radius[self.balls.first][owner].square()
                found.append((value, slopes))
        (plain, slopes), (other, tangent) = found
        better = other < plain * (1 - AHEAD)

        def chosen(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(widened(better, mine), theirs, mine)

        return {
            i: (chosen(up, tangent[i][0]), chosen(down, tangent[i][1]), chosen(lam, tangent[i][2]))
            for i, (up, down, lam) in slopes.items()
        }

    def _substitute(
        self,
        kind: Arithmetic,
        last: int,
        rows: Tensor,
        owner: Tensor,
        layers: Mapping[int, BallLayer],
        slopes: Slopes,
        cuts: list[Tensor] | None = None,
        costs: dict[int, Tensor] | None = None,
        tangents: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`<row, d_last> <= constant + <a, d_0> + (lam / 2) ||d_first||^2`: `(R,)`, `(R, n)`, and
        lam `(R,)`, None without a layer that reads the input.

        Args:
            kind: the arithmetic.
            last: the node that the rows are of.
            rows: `(R, *shape)`.
            owner: the sample of each, `(R,)`.
            layers: what is known of the layers of ReLUs.
            slopes: what is missing is found here.
            cuts: gets a bound for every node that all of a substitution goes through, `(R,)` each.
            costs: gets what each neuron of a layer costs, `(R, *shape)`.
            tangents: whether slopes that are missing are those of tangents; default False, CROWN's.
        """
        lam: Tensor | None = None
        quad: dict[int, Tensor] = {}  # `q / 2 ||d||^2` of a node that is to be paid for, too
        constant = kind.floors[last][owner].expand(len(rows))

        def watch(back: Backward, i: int, w: Tensor) -> None:
            if cuts is not None and not back.weight and i < last:
                cuts.append(back.constant + self._cut(i, w, owner, quad, lam))

        back = Backward(self.graph, kind, {last: rows}, constant, owner, watch=watch)
        for i, node, w in back.neurons(last):
            if i not in layers:
                back.take(node, *kind.lines[i].take(owner).pull(w))
                continue
            if i not in slopes:
                slopes[i] = self._start(kind, i, layers[i], w, owner, tangents)
            terms = (node.size + 8 + kind.sums) * 2.0**-52 if kind is self.sweep.exact else 0.0
            q = quad.pop(i, None)
            if costs is not None:
                costs[i] = layers[i].costs(w, *slopes[i], q)
            term = self.balls.handed_on(i)
            good = None if term is None else term.good[owner]
            part, more = layers[i].pull(w, *slopes[i], terms, q, good)
            if term is not None and good is not None:
                own = layers[i].multiplier(slopes[i][2], q)
                rest = own / 2 * term.rest[owner].to(own.dtype)
                more = more + torch.where(good, rest, 0.0)
                if term.source == 0:
                    lam = own
                else:
                    paid = own * term.square[owner].to(own.dtype)
                    add_to(quad, term.source, torch.where(good, paid, 0.0))
            back.take(node, part, more)
        return back.constant, back.inputs(), lam

    def _cut(
        self, i: int, w: Tensor, owner: Tensor, quad: Mapping[int, Tensor], lam: Tensor | None
    ) -> Tensor:
        """`<w, d_i>` and all that is still to be paid for, by the radii alone, `(R,)`."""
        # A length is rounded up by more than the product loses.
        found = length_above(w) * self.reach.radius[i][owner]
        for k, q in quad.items():
            found = found + q / 2 * self.reach.radius[k][owner].square() * UP
        if lam is not None:
            found = found + lam / 2 * self.balls.radius[self.balls.first][owner].square() * UP
        return found

    def bound(
        self,
        last: int,
        rows: Tensor,
        owner: Tensor,
        steps: int,
        goal: Tensor,
        sides: Sides | None = None,
        slopes: Slopes | None = None,
    ) -> tuple[Tensor, Slopes]:
        """Upper bounds on `<row, d_last>`, `(R,)` in float64, and the slopes that gave them.

        Args:
            last: the node that the rows are of.
            rows: `(R, *shape)`.
            owner: the sample of each, `(R,)`.
            steps: of the ascent.
            goal: rows whose bound falls below this are finished, `(R,)`.
            sides: neurons that are split; default None.
            slopes: where the ascent begins; default None, the better one of two starts.
        """
        sides = sides or {}
        layers = self._layers(self.sweep.fast, last, owner, sides)
        moving = _Moving(rows.float(), owner, goal, layers)
        begun = self._begin(last, moving.rows, owner, layers) if slopes is None else slopes
        now = _begun(begun)
        ahead = 0 if slopes is None else LATER
        ascent: Ascent | None = None
        for step in range(1, steps + 1):
            clock.check()
            with torch.enable_grad():
                value = self._value(last, moving, now)
                leaves = _leaves(now)
                if not leaves or not value.requires_grad:
                    break
                pulls = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
            ascent = ascent or Ascent(leaves, apart=True)
            ascent.keep(-value.detach(), leaves)
            open_ = (value >= moving.goal).nonzero()[:, 0]
            moved = _moved(leaves, ascent.moves(pulls), step + ahead)
            if len(open_) < len(value):
                ascent.take(open_)
                moving.take(open_)
                moved = [v[open_] for v in moved]
            if not len(open_):
                break
            now = _by_layer(now, [v.requires_grad_(True) for v in moved])
        kept = _leaves(begun) if ascent is None else ascent.kept
        best = _by_layer(begun, [v.detach().double() for v in kept])
        return self._claim(last, rows, owner, best, sides), best

    def _value(self, last: int, moving: _Moving, slopes: Slopes) -> Tensor:
        """About the bound, in float32, with its gradients; the first layer's next step, too."""
        owner = moving.owner
        where = (last, moving.rows, owner, moving.layers, slopes)
        constant, a, lam = self._substitute(self.sweep.fast, *where)
        first = self.balls.first_layer
        if lam is None or first is None or self.balls.first_quadratic is None:
            return constant + self.sweep.inputs.upper(a, owner)
        lam = lam * self.balls.first_quadratic.square[owner].to(lam.dtype)
        point = moving.point or first.start(a.detach(), lam.detach(), owner)
        value, moving.point = first.value(a, lam, owner, *point)
        return constant + value.double()

    def _claim(
        self,
        last: int,
        rows: Tensor,
        owner: Tensor,
        slopes: Slopes,
        sides: Sides,
    ) -> Tensor:
        """The bound with these slopes, in float64."""
        exact = self.sweep.exact
        layers = self._layers(exact, last, owner, sides)
        cuts: list[Tensor] = []
        with torch.no_grad():
            constant, a, lam = self._substitute(exact, last, rows, owner, layers, slopes, cuts)
            plain = constant + self.sweep.inputs.upper(a, owner)
            handed = self.balls.first_quadratic
            if lam is not None and handed is not None and self.balls.first_layer is not None:
                both = self.balls.first_layer.bound(a, lam * handed.square[owner], owner)
                cuts.append(constant + both)
                ball = lam / 2 * self.balls.radius[self.balls.first][owner].square() * UP
                plain = plain + torch.where(handed.good[owner], ball, 0.0)
            found = torch.stack([plain, *cuts])
        found = found + 4 * 2.0**-52 * found.abs()
        return torch.where(found.isnan(), math.inf, found).amin(0)

    def costs(
        self, last: int, rows: Tensor, owner: Tensor, slopes: Slopes, sides: Sides
    ) -> dict[int, Tensor]:
        """What every undecided neuron adds to a bound, `(R, *shape)` for each layer, in float32."""
        fast = self.sweep.fast
        layers = self._layers(fast, last, owner, sides)
        found: dict[int, Tensor] = {}
        rough = {
            i: (up.float(), down.float(), lam.float()) for i, (up, down, lam) in slopes.items()
        }
        with torch.no_grad():
            self._substitute(fast, last, rows.float(), owner, layers, rough, None, found)
        for i, cost in found.items():
            split = sides[i] != 0 if i in sides else torch.zeros_like(cost, dtype=torch.bool)
            open_ = of_owner(self.sweep.bends[i].crossing, owner) & ~split
            found[i] = torch.where(open_, cost, 0.0)
        return found


def _leaves(slopes: Slopes) -> list[Tensor]:
    return [v for parts in slopes.values() for v in parts]


def _begun(slopes: Slopes) -> Slopes:
    """Slopes to go on from, in float32."""
    return _by_layer(slopes, [v.float().requires_grad_(True) for v in _leaves(slopes)])


def _moved(leaves: list[Tensor], moves: list[Tensor | None], step: int) -> list[Tensor]:
    """The next values of `(up, down, multiplier)` of each layer."""
    rates = itertools.cycle((RATE, RATE, PACE))
    return [
        v.detach() if move is None else v.detach() - rate * DECAY ** (step - 1) * move
        for v, move, rate in zip(leaves, moves, rates)
    ]


def _by_layer(layers: Iterable[int], parts: list[Tensor]) -> Slopes:
    """Three tensors for each layer, from a list of all."""
    return {i: (parts[3 * k], parts[3 * k + 1], parts[3 * k + 2]) for k, i in enumerate(layers)}
