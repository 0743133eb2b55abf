"""The smooth neurons of some samples, and subproblems that cut their input intervals in two.

A ReLU is linear once its sign is chosen. A smooth activation is not, but its two lines are nearer
to it on a part of its interval. So a subproblem fixes the interval of some neurons to `[low, m]` or
`[m, high]`, m shared by both (GenBaB, Shi et al. 2025): the lines of such a neuron are made anew,
with slopes of their own, and `v <= m` or `v >= m` enters the bound with a multiplier >= 0. The
lines of all other neurons have the slopes that were best for the whole ball, one pair for each
rival of a sample (`tilt`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.activations import Activation
from wassail.certificates.graph.graph import Node, Smooth
from wassail.certificates.relax.backward import Ascent
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Arithmetic, Lines, Shape
from wassail.certificates.relax.rows import Span, flattened, of_owner, row_dot
from wassail.certificates.search.subproblems import Cuts
from wassail.rounding import FAINT, UNIT

TILTS = 20  # steps of the ascent on the slopes for the whole ball
RATE = 0.05  # of the first step, in widths of the range of `f'`
INNER = (0.125, 0.375, 0.625, 0.875)  # where the gap between a line and the function is looked at
NEAR = 0.25  # of an interval's length: a bend that near to the middle is where it is cut


@dataclass(frozen=True, eq=False)
class Held:
    """What a batch of R subproblems needs of the smooth neurons, gathered once.

    root `(R,)` or `(1,)`: its row of the lines for the whole ball; lines: of each type, of each
    node, `(R, size)` or `(1, size)`; place: of each node, where its cut neurons are, `(R, D)`, size
    for none; the rest is of the cut neurons, `(R, D)`: steepness, the width of the range of `f'` on
    their intervals, and steepest, the largest `|f'|` on the whole ball, in float32.
    """

    lines: Mapping[torch.dtype, Mapping[int, Lines]]
    place: Mapping[int, Tensor]
    c: Tensor
    here: Tensor
    error: Tensor
    most: Tensor
    steepness: Tensor
    steepest: Tensor
    own: Tensor


@dataclass(frozen=True, eq=False)
class Forms:
    """Slopes, heights and multipliers of the cut neurons of a batch, `(R, D)` in one type."""

    up: Tensor
    down: Tensor
    above: Tensor
    below: Tensor
    under: Tensor
    over: Tensor


class Intervals:
    """The smooth neurons of S samples of a sweep, V in all: nodes one after the other, `(S, V)`.

    parts: of each smooth node, its columns. c, here: the input and the output at the sample; error:
    what rounding may add to the input; low, high: the interval on the whole ball; gain_above,
    gain_below: by how much the gap of a line shrinks where its neuron is cut; steepest: the largest
    `|f'|`.
    """

    def __init__(self, sweep: Sweep, samples: Tensor) -> None:
        self.sweep = sweep
        self.parts: dict[int, slice] = {}
        self.names: dict[Smooth, list[int]] = {}  # the nodes of each activation
        self.activations: dict[int, Smooth] = {}
        self.lines: dict[torch.dtype, dict[int, Lines]] = {torch.float32: {}, torch.float64: {}}
        start = 0
        columns: list[list[Tensor]] = []
        for i, (shape, error) in sweep.smooth.items():
            node = shape.node
            assert isinstance(node.op, Smooth)
            self.names.setdefault(node.op, []).append(i)
            self.activations[i] = node.op
            self.parts[i] = slice(start, start + node.size)
            start += node.size
            low, high = (flattened(of_owner(v, samples)) for v in shape.ends)
            c, rounded = (flattened(of_owner(v, samples)) for v in (shape.c, error))
            here = node.op.function.value(c)
            gains = gains_of(node.op.function, low, high)
            least, most = node.op.function.derivative_range(low, high)
            steepest = torch.maximum(least.abs(), most.abs())
            columns.append([c, here, rounded, low, high, *gains, steepest])
        none = torch.zeros(len(samples), 0, dtype=torch.float64, device=samples.device)
        whole = (torch.cat([none, *v], 1) for v in (zip(*columns) if columns else [()] * 8))
        self.c, self.here, self.error, self.low, self.high, *rest = whole
        self.gain_above, self.gain_below, self.steepest = rest
        self.count = start

    def node(self, i: int) -> Node:
        """The node itself."""
        return self.sweep.graph.nodes[i]

    def shape_of(self, i: int, own: Tensor) -> Shape:
        """The activation of node i on the whole ball, flat, for rows of samples `own` `(R,)`."""
        part = self.parts[i]
        c, low, high = (v[:, part][own] for v in (self.c, self.low, self.high))
        return Shape(self.node(i), c, low - c, high - c, (low, high))

    def tilt(self, own: Tensor, bound: Callable[[Mapping[int, Lines]], Tensor]) -> None:
        """Add the lines of roots: those with the best bound that an ascent on their slopes finds.

        Args:
            own: the sample of each root, `(Q,)`.
            bound: lower bounds on the margins `(Q,)` with given lines, to be climbed.
        """
        if not self.parts:
            return
        shapes = {i: self.shape_of(i, own) for i in self.parts}
        unknowns = [slope.float() for shape in shapes.values() for slope in shape.slopes()]
        widths = [_steepness(shape) for shape in shapes.values() for _ in range(2)]
        ascent = Ascent(unknowns)
        for step in range(1, TILTS + 1):
            clock.check()
            with torch.enable_grad():
                unknowns = [v.detach().requires_grad_(True) for v in unknowns]
                value = bound(_lines(shapes, unknowns))
                pulls = torch.autograd.grad(value.sum(), unknowns, allow_unused=True)
            ascent.keep(value.detach(), unknowns)
            rate = RATE * 0.1 ** (step / TILTS)
            moves = ascent.moves(pulls)
            unknowns = [
                old.detach() if move is None else old.detach() + rate * width * move
                for old, width, move in zip(unknowns, widths, moves)
            ]
        kept = dict(zip(shapes, zip(ascent.kept[::2], ascent.kept[1::2])))
        for i, (up, down) in kept.items():
            error = self.error[:, self.parts[i]][own]
            exact = shapes[i].lines(up.double(), down.double(), error, self.sweep.exact)
            self._add_lines(i, exact)

    def _add_lines(self, i: int, exact: Lines) -> None:
        """The lines of more roots of node i, in both types."""
        parts = (exact.mid, exact.rad, exact.off, exact.far)
        for dtype, known in self.lines.items():
            new = [v.to(dtype) for v in parts]
            if i in known:
                old = known[i]
                new = [torch.cat(pair) for pair in zip((old.mid, old.rad, old.off, old.far), new)]
            known[i] = Lines(*new)

    def held(self, root: Tensor, own: Tensor, cuts: Cuts, ascend: bool) -> Held:
        """What a batch of subproblems needs.

        Args:
            root: rows of the lines for the whole ball, `(R,)`, or `(1,)` if all have one.
            own: the samples of the subproblems, `(R,)` or `(1,)`.
            cuts: theirs.
            ascend: whether lines in float32 are needed, too.
        """
        types = (torch.float32, torch.float64) if ascend else (torch.float64,)
        lines = {
            dtype: {i: line.take(root) for i, line in self.lines[dtype].items()} for dtype in types
        }
        place = {}
        for i, part in self.parts.items() if cuts.width else ():
            mine = (cuts.column >= part.start) & (cuts.column < part.stop)
            if mine.device != HOST or bool(mine.any()):
                place[i] = torch.where(mine, cuts.column - part.start, part.stop - part.start)
        c, here, error, low, high = (
            self.at(v, own, cuts.column)
            for v in (self.c, self.here, self.error, self.low, self.high)
        )
        most = torch.maximum(high - c, c - low)
        steepness = torch.zeros_like(c).float()
        for name, mask in self.which(cuts.column).items() if cuts.width else ():
            wide = _steepness(self.shape(name, c, (cuts.low, cuts.high)))
            steepness = torch.where(mask, wide, steepness)
        steepest = self.at(self.steepest, own, cuts.column).float()
        return Held(lines, place, c, here, error, most, steepness, steepest, own)

    def at(self, table: Tensor, own: Tensor, column: Tensor) -> Tensor:
        """The entries of a table `(S, V)` for neurons `(R, D)` of samples `own`; 0 for none."""
        if not column.numel():
            return column.double()
        found = table[own].expand(len(column), -1).gather(1, column.clamp(min=0))
        return torch.where(column >= 0, found, 0.0)

    def shape(self, name: Smooth, c: Tensor, ends: Span) -> Shape:
        """An activation on intervals of its own."""
        low, high = ends
        return Shape(self.node(self.names[name][0]), c, low - c, high - c, ends)

    def which(self, column: Tensor) -> dict[Smooth, Tensor]:
        """Of each activation, which neurons have it: bool, of the shape of column."""
        if len(self.names) == 1:
            return {name: torch.ones_like(column, dtype=torch.bool) for name in self.names}
        found = {}
        for name, nodes in self.names.items():
            mask = torch.zeros_like(column, dtype=torch.bool)
            for i in nodes:
                part = self.parts[i]
                mask = mask | ((column >= part.start) & (column < part.stop))
            found[name] = mask
        return found

    def forms(self, held: Held, cuts: Cuts, dtype: torch.dtype) -> Forms:
        """The lines of the cut neurons: heights that hold on their intervals for these slopes."""
        up = cuts.up.double()
        down = cuts.down.double()
        above = torch.zeros_like(held.c)
        below = torch.zeros_like(held.c)
        for name, mask in self.which(cuts.column).items():
            shape = self.shape(name, held.c, (cuts.low, cuts.high))
            above = torch.where(mask, shape.shift(up, True), above)
            below = torch.where(mask, shape.shift(down, False), below)
        parts = (up, down, above, below, cuts.under, cuts.over)
        return Forms(*(v.to(dtype) for v in parts))

    def pull(
        self, kind: Arithmetic, i: int, w: Tensor, held: Held, cuts: Cuts, forms: Forms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The coefficients of node i's input for those of its output, what the bound grows by, and
        the coefficients of its cut neurons: `(R, size) -> (R, size), (R,), (R, D)`.
        """
        line = held.lines[kind.dtype][i]
        if forms is None or i not in held.place:
            size = w.abs()
            constant = row_dot(w, line.off) + row_dot(size, line.far)
            none = w.new_zeros(len(w), cuts.width)
            return torch.addcmul(w * line.mid, size, line.rad), constant, none
        place = held.place[i]
        padded = F.pad(w, (0, 1))
        chosen = padded.gather(1, place)
        rest = padded.scatter(1, place, 0.0)[:, :-1]
        size = rest.abs()
        constant = row_dot(rest, line.off) + row_dot(size, line.far)
        flat = torch.addcmul(rest * line.mid, size, line.rad)
        mine = place < w.shape[1]
        coefficient, added = self._neurons(kind, chosen, mine, held, cuts, forms, w.shape[1])
        flat = F.pad(flat, (0, 1)).scatter(1, place, coefficient)[:, :-1]
        return flat, constant + added.double().sum(1), chosen

    def _neurons(
        self,
        kind: Arithmetic,
        w: Tensor,
        mine: Tensor,
        held: Held,
        cuts: Cuts,
        forms: Forms,
        terms: int,
    ) -> tuple[Tensor, Tensor]:
        """For coefficients w `(R, D)` of cut neurons: those of their inputs, and what the bound
        grows by. mine: which of them belong to the node; terms: at most so many are added up.
        """
        plus = w.clamp(min=0)
        minus = w - plus
        under = torch.where(mine, forms.under, 0.0)
        over = torch.where(mine, forms.over, 0.0)
        coefficient = plus * forms.up + minus * forms.down + (under - over)
        relaxed = plus * forms.above + minus * forms.below
        to_low = (held.c - cuts.low).to(w.dtype)
        to_high = (cuts.high - held.c).to(w.dtype)
        added = relaxed + under * to_low + over * to_high
        if kind is not self.sweep.exact:
            return coefficient, added
        # Of the products, their sum and the differences `c - low` and `high - c`; and of the
        # product with a slope, which a multiplier may cancel.
        pushed = under + over
        steep = torch.maximum(forms.up.abs(), forms.down.abs())
        tall = torch.maximum(forms.above.abs(), forms.below.abs())
        ends = held.c.abs() + torch.maximum(cuts.low.abs(), cuts.high.abs())
        size = w.abs() * (tall + steep * held.most + FAINT) + pushed * (ends + held.most)
        size = torch.where(mine, size, 0.0)
        slack = coefficient.abs() * held.error + (terms + 64) * UNIT * size
        return coefficient, added + torch.where(mine, slack, 0.0)

    def scores(self, i: int, w: Tensor, held: Held, cuts: Cuts) -> Tensor:
        """What a cut of each neuron of node i may gain, for coefficients `(R, size)` of its
        output.
        """
        part = self.parts[i]
        plus = w.clamp(min=0)
        minus = plus - w
        above, below = (v[:, part][held.own] for v in (self.gain_above, self.gain_below))
        score = plus * above + minus * below
        if i not in held.place:
            return score
        place = held.place[i]
        above, below = gains_of(self.activations[i].function, cuts.low, cuts.high)
        up, down = (F.pad(v, (0, 1)).gather(1, place) for v in (plus, minus))
        return F.pad(score, (0, 1)).scatter(1, place, up * above + down * below)[:, :-1]

    def split(self, cuts: Cuts, own: Tensor, column: Tensor) -> tuple[Cuts, Cuts]:
        """The two children of each subproblem at a neuron, column `(R,)`; those with -1 stay as
        they are. Both children have the point of the cut.
        """
        cutting = column >= 0
        if column.device == HOST and not bool(cutting.any()):
            return cuts, cuts
        known = cuts.column == column[:, None]
        again = known.any(1) & cutting if cuts.width else torch.zeros_like(cutting)
        wider = cuts.padded(cuts.width + 1)
        free = (wider.column < 0).to(torch.int8).argmax(1)
        slot = torch.where(again, known.to(torch.int8).argmax(1), free) if cuts.width else free
        table = (self.at(v, own, column[:, None])[:, 0] for v in (self.low, self.high))
        low, high = (
            torch.where(again, old.gather(1, slot[:, None])[:, 0], new)
            for old, new in zip((wider.low, wider.high), table)
        )
        middle = self.middle(column, low, high)
        sides = []
        for ends in ((low, middle), (middle, high)):
            up, down = self.slopes(column, *ends)
            zero = torch.zeros_like(low)
            values = {"column": column, "low": ends[0], "high": ends[1], "up": up, "down": down}
            values |= {"under": zero, "over": zero}
            sides.append(wider.narrowed(slot, cutting, values))
        if column.device == HOST and not bool((sides[0].column[:, -1] >= 0).any()):
            width = cuts.width
            sides = [side.trimmed(width) for side in sides]
        return sides[0], sides[1]

    def slopes(self, column: Tensor, low: Tensor, high: Tensor) -> Span:
        """CROWN's slopes of neurons on intervals, `(R,)` each."""
        up = torch.zeros_like(low)
        down = torch.zeros_like(low)
        for name, mask in self.which(column).items():
            found = self.shape(name, low, (low, high)).slopes()
            up, down = (torch.where(mask, new, old) for new, old in zip(found, (up, down)))
        return up, down

    def middle(self, column: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Where intervals are cut: at a bend of the function if it is near the middle, else there,
        so that both parts are shorter by a quarter at least.
        """
        middle = (low + high) / 2
        best = middle
        for name, mask in self.which(column).items():
            for bend in (-name.function.bend, name.function.bend):
                near = (middle - bend).abs() <= NEAR * (high - low)
                best = torch.where(mask & near, bend, best)
        return best.maximum(low).minimum(high)

    def regrown(self, cuts: Cuts, k: int) -> tuple[Cuts, Tensor]:
        """The cuts of a larger ball around the k-th sample, with what is left of their intervals
        here, and which subproblems have nothing left, bool `(R,)`: they hold no point of this ball.
        """
        own = torch.full((1,), k, dtype=torch.int64, device=cuts.column.device)
        low, high = (self.at(v, own, cuts.column) for v in (self.low, self.high))
        left = torch.maximum(cuts.low, low)
        right = torch.minimum(cuts.high, high)
        empty = left > right
        kept = replace(
            cuts, low=torch.where(empty, low, left), high=torch.where(empty, high, right)
        )
        return kept, empty.any(1)


def gaps_of(function: Activation, low: Tensor, high: Tensor) -> Tensor:
    """The mean gap above and below the function with CROWN's lines on intervals: `(2, ...)`."""
    up, down = function.slopes(low, high)
    found = []
    for slope, above in ((up, True), (down, False)):
        touch = function.touch(slope, low, high, above)[0]
        height = function.value(touch) - slope * touch
        points = [low + share * (high - low) for share in INNER]
        gaps = [(slope * v + height - function.value(v)).abs() for v in points]
        found.append(torch.stack(gaps).mean(0))
    return torch.stack(found)


def gains_of(function: Activation, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the gaps above and below shrink in the halves of an interval, on average."""
    middle = (low + high) / 2
    halves = (gaps_of(function, low, middle) + gaps_of(function, middle, high)) / 2
    gain = (gaps_of(function, low, high) - halves).clamp(min=0)
    return gain[0], gain[1]


def _steepness(shape: Shape) -> Tensor:
    """The width of the range of `f'` on the intervals, in float32."""
    assert isinstance(shape.node.op, Smooth)
    least, most = shape.node.op.function.derivative_range(*shape.ends)
    return (most - least).float()


def _lines(shapes: Mapping[int, Shape], slopes: list[Tensor]) -> dict[int, Lines]:
    """Lines in float32 with these slopes, two for each node: a function of the slopes, nothing is
    proved with them.
    """
    found = {}
    for (i, shape), up, down in zip(shapes.items(), slopes[::2], slopes[1::2]):
        above = shape.shift(up.double(), True).float()
        below = shape.shift(down.double(), False).float()
        found[i] = Lines((up + down) / 2, (up - down) / 2, (above + below) / 2, (above - below) / 2)
    return found


class SmoothBackward:
    """The smooth neurons in one backward pass."""

    def __init__(self, intervals: Intervals, held: Held, cuts: Cuts, kind: Arithmetic) -> None:
        self.intervals = intervals
        self.held = held
        self.cuts = cuts
        self.forms = intervals.forms(held, cuts, kind.dtype) if cuts.width else None
        self.size = torch.zeros_like(cuts.up)
        self.scores: dict[int, Tensor] = {}

    def pull(self, kind: Arithmetic, i: int, w: Tensor, scored: bool) -> tuple[Tensor, Tensor]:
        """The coefficients of node i's input, and what the bound grows by."""
        flat, added, chosen = self.intervals.pull(kind, i, w, self.held, self.cuts, self.forms)
        self.size = self.size + chosen.detach().abs()
        if scored:
            self.scores[i] = self.intervals.scores(i, w, self.held, self.cuts)
        return flat, added

    def scales(self) -> list[Tensor]:
        """Units of steps on what is unknown of the cut neurons: for slopes the width of the range
        of `f'`, for multipliers the coefficients that they stand beside.
        """
        wide = self.held.steepness
        beside = (self.size * self.held.steepest).clamp(min=1e-6)
        return [wide, wide, beside, beside]

    def in_order(self) -> list[Tensor]:
        """The scores in the order of the columns; 0 for nodes that do not matter."""
        if not self.scores:
            return []
        known = next(iter(self.scores.values()))
        return [
            self.scores[i]
            if i in self.scores
            else known.new_zeros(len(known), part.stop - part.start)
            for i, part in self.intervals.parts.items()
        ]
