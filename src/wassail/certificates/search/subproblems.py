"""The unstable neurons of some samples, and subproblems over them.

A subproblem fixes the signs of some ReLUs, and intervals of the inputs of some smooth neurons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.relax.backward import Backward
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Arithmetic, Lines
from wassail.certificates.relax.rows import flattened, of_owner, unflattened
from wassail.ties import loud

# neurons that are tried before a subproblem is cut, in networks with smooth activations or curves
LOOK = 4
TIE = 2.0**-13  # scores that differ by less, relative to the largest, are equal
HOSTED = ("owner", "rival", "depth", "bound", "pick")  # what is kept on the CPU
KEPT_NUMBERS = 2**17  # numbers of a kind that are kept of a sample


@dataclass(frozen=True, eq=False)
class Cuts:
    """Of R subproblems, up to D neurons each whose input lies in an interval; where the network is.

    column `(R, D)`: which neuron, by its place among all smooth neurons of the network, -1 for
    none; low, high: its interval, in float64; up, down: slopes of its two lines, in float32; under,
    over: multipliers >= 0 of `v >= low` and `v <= high`, in float32.
    """

    column: Tensor
    low: Tensor
    high: Tensor
    up: Tensor
    down: Tensor
    under: Tensor
    over: Tensor

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Cuts:
        """Of subproblems without any."""
        column = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        ends = (column.double(), column.double())
        return cls(column, *ends, *(column.float() for _ in range(4)))

    def __len__(self) -> int:
        return len(self.column)

    @property
    def width(self) -> int:
        """D, the most neurons that a subproblem may have."""
        return self.column.shape[1]

    def take(self, rows: Tensor) -> Cuts:
        """Those of some subproblems, by indices where the network is."""
        if not self.width:
            return Cuts.none(len(rows), self.column.device)
        return Cuts(*(getattr(self, f.name)[rows] for f in fields(self)))

    def padded(self, width: int) -> Cuts:
        """The same with room for so many neurons."""
        more = width - self.width
        if more <= 0:
            return self
        column = F.pad(self.column, (0, more), value=-1)
        rest = (F.pad(getattr(self, f.name), (0, more)) for f in fields(self)[1:])
        return Cuts(column, *rest)

    def trimmed(self, width: int) -> Cuts:
        """The first so many slots."""
        return Cuts(*(getattr(self, f.name)[:, :width] for f in fields(self)))

    def join(self, other: Cuts) -> Cuts:
        """These, then the others."""
        width = max(self.width, other.width)
        if not width:
            return Cuts.none(len(self) + len(other), self.column.device)
        one = self.padded(width)
        two = other.padded(width)
        return Cuts(*(torch.cat([getattr(one, f.name), getattr(two, f.name)]) for f in fields(one)))

    def narrowed(self, slot: Tensor, chosen: Tensor, values: dict[str, Tensor]) -> Cuts:
        """The chosen subproblems with other values in a slot: slot `(R,)`, chosen bool `(R,)`,
        values `(R,)` by name.
        """
        changed = {}
        for name, new in values.items():
            old = getattr(self, name)
            here = torch.where(chosen, new.to(old.dtype), old.gather(1, slot[:, None])[:, 0])
            changed[name] = old.scatter(1, slot[:, None], here[:, None])
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class Subproblems:
    """R subproblems of a tree.

    On the CPU, where the next ones are chosen: owner `(R,)`, the place of its sample in the tree;
    rival `(R,)`, of the row `e_rival - e_y`; depth `(R,)`, how many neurons are fixed; bound
    `(R,)`, on the margin, from below; pick `(R, look)`, the neurons to split on next, the best
    first, -1 where none is left, from U on for smooth ones. Where the network is: signs (1 on, -1
    off, 0 free), slopes and multipliers of the U ReLUs, `(R, U)` each; the intervals of smooth
    neurons.
    """

    owner: Tensor
    rival: Tensor
    depth: Tensor
    bound: Tensor
    pick: Tensor
    sign: Tensor
    alpha: Tensor
    beta: Tensor
    cuts: Cuts

    def take(self, rows: Tensor) -> Subproblems:
        """Some of them, by indices on the CPU."""
        there = rows.to(self.sign.device, non_blocking=True)
        few = {name: getattr(self, name)[rows] for name in HOSTED}
        many = {name: getattr(self, name)[there] for name in ("sign", "alpha", "beta")}
        return Subproblems(**few, **many, cuts=self.cuts.take(there))

    def where(self, mask: Tensor) -> Subproblems:
        """Some of them, by a mask on the CPU."""
        return self if bool(mask.all()) else self.take(mask.nonzero()[:, 0])

    def unproved(self) -> Subproblems:
        """Those whose bound is not above 0, NaN among them."""
        return self.where(~(self.bound > 0))

    def join(self, other: Subproblems) -> Subproblems:
        """These, then the others."""
        tensors = [f.name for f in fields(self) if f.name != "cuts"]
        parts = {k: torch.cat([getattr(self, k), getattr(other, k)]) for k in tensors}
        return Subproblems(**parts, cuts=self.cuts.join(other.cuts))

    def __len__(self) -> int:
        return len(self.rival)


@dataclass(frozen=True, eq=False)
class Unknowns:
    """What an ascent may change: slopes and multipliers of ReLUs, if there are any, then slopes up
    and down and multipliers under and over of cut neurons, if there are any.
    """

    values: list[Tensor]
    relus: bool
    cut: bool

    @classmethod
    def of(cls, subproblems: Subproblems) -> Unknowns:
        """Where subproblems begin."""
        cuts = subproblems.cuts
        relus = bool(subproblems.sign.shape[1])
        values = [subproblems.alpha, subproblems.beta] if relus else []
        values += [cuts.up, cuts.down, cuts.under, cuts.over] if cuts.width else []
        return cls([v.clone() for v in values], relus, bool(cuts.width))

    def leaves(self) -> Unknowns:
        """The same, to take gradients of."""
        return replace(self, values=[v.detach().requires_grad_(True) for v in self.values])

    def parts(self, subproblems: Subproblems) -> tuple[Tensor, Tensor, Cuts]:
        """Slopes and multipliers of ReLUs, and the cuts."""
        alpha, beta = self.values[:2] if self.relus else (subproblems.alpha, subproblems.beta)
        if not self.cut:
            return alpha, beta, subproblems.cuts
        up, down, under, over = self.values[-4:]
        return alpha, beta, replace(subproblems.cuts, up=up, down=down, under=under, over=over)

    def scales(self, sizes: Tensor, cut: list[Tensor]) -> list[Tensor]:
        """Units of the steps: 1 for the slopes of ReLUs, for their multipliers the coefficients
        `(R, U)` that they stand beside; cut: those of cut neurons.
        """
        own = [torch.ones_like(sizes), sizes.abs().clamp(min=1e-6)] if self.relus else []
        return own + cut

    def moved(
        self,
        moves: list[Tensor | None],
        scales: list[Tensor],
        rate: float,
        sign: Tensor,
        slope: Tensor,
    ) -> Unknowns:
        """After a step; multipliers are at least 0, and slopes of ReLUs between the two there
        are.
        """
        values = [
            v.detach() if move is None else v.detach() + rate * scale * move
            for v, move, scale in zip(self.values, moves, scales)
        ]
        if self.relus:
            values[0] = torch.minimum(torch.maximum(values[0], slope), torch.ones_like(slope))
            values[1] = values[1].clamp(min=0) * (sign != 0)
        if self.cut:
            values[-2:] = [v.clamp(min=0) for v in values[-2:]]
        return replace(self, values=values)


def largest(score: Tensor, count: int) -> Tensor:
    """The places of the largest scores of each row, `(R, count)`, the first of those that are
    equal up to the rounding of float32; -1 where none is above 0.
    """
    if not score.shape[1]:
        return score.new_full((len(score), count), -1, dtype=torch.int64)
    most = score.amax(1, keepdim=True)
    level = (score / torch.where(most > 0, TIE * most, 1.0)).round()
    found = []
    for _ in range(count):
        place = level.argmax(1, keepdim=True)
        value = score.gather(1, place)
        taken = level.gather(1, place) > -math.inf
        found.append(torch.where((value > 0) & taken, place, -1))
        level = level.scatter(1, place, -math.inf)
    return torch.cat(found, 1)


@dataclass(frozen=True, eq=False)
class Leaves:
    """L open subproblems of one sample over U neurons, where the network is.

    rival `(L,)`, on the CPU; places: of each node with such neurons, their places in it, in the
    order of the columns; signs `(L, U)` int8, slopes and multipliers `(L, U)` float32; cuts: of
    smooth neurons, whose intervals stay what they are on every ball.
    """

    rival: Tensor
    places: Mapping[int, Tensor]
    sign: Tensor
    alpha: Tensor
    beta: Tensor
    cuts: Cuts

    @property
    def numbers(self) -> int:
        """How many are kept of a kind."""
        return max(self.sign.numel(), self.cuts.column.numel())

    def on(self, node: int, places: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Which of some neurons of a node have columns here, bool `(u,)`, and those columns.

        Args:
            node: the node.
            places: of the neurons, `(u,)`; `size` stands for none.
            size: of the node.
        """
        start = 0
        for other, own in self.places.items():
            if other == node:
                column = torch.full((size + 1,), -1, dtype=torch.int64, device=places.device)
                column[own] = torch.arange(start, start + len(own), device=places.device)
                found = column[places]
                return found >= 0, found[found >= 0]
            start += len(own)
        none = torch.zeros(len(places), dtype=torch.bool, device=places.device)
        return none, torch.zeros(0, dtype=torch.int64, device=places.device)


class Forest:
    """The open leaves of samples, each with the radius of the ball that they are left of."""

    def __init__(self) -> None:
        self.trees: dict[int, tuple[float, Leaves]] = {}

    def within(self, sample: int, radius: float, most: int) -> Leaves | None:
        """What is left of a ball, if a larger one, or the same, was tried before, and if to bound
        that again leaves room for as many subproblems: else it is better to begin anew.
        """
        known, left = self.trees.get(sample, (-math.inf, None))
        fits = left is not None and radius <= known and 2 * len(left.rival) <= most
        return left if fits else None

    def keep(self, sample: int, radius: float, leaves: Leaves | None) -> None:
        """Keep what is left of a ball, unless it is too much."""
        if leaves is not None and leaves.numbers <= KEPT_NUMBERS:
            self.trees[sample] = (radius, leaves)


class Neurons:
    """The unstable neurons of some samples, in one vector of length U for each.

    Of every node with such neurons, places `(S, u)` tells where they are, u the largest number of
    any sample; the rest is the place after the last, where everything is 0. open: which samples
    have any.
    """

    def __init__(self, sweep: Sweep, samples: list[int], y: list[int]) -> None:
        device = sweep.graph.device
        self.sweep = sweep
        self.samples = torch.tensor(samples, device=device)
        self.y = torch.tensor(y, device=device)
        crossing = {
            i: flattened(of_owner(bend.crossing, self.samples)) for i, bend in sweep.bends.items()
        }
        counts = (
            torch.stack([mask.sum(1) for mask in crossing.values()]).tolist() if crossing else []
        )
        smooth = sum(shape.node.size for shape, _ in sweep.smooth.values())
        totals = [sum(own) + smooth for own in zip(*counts)] or [smooth] * len(samples)
        self.open = [total > 0 for total in totals]
        self.unstable = torch.tensor(totals)
        self.look = LOOK if sweep.graph.smooth else 1
        self.root = torch.full((len(samples), sweep.graph.outputs), -1, dtype=torch.int64)
        self.places: dict[int, Tensor] = {}
        self.parts: dict[int, slice] = {}
        self.ragged: set[int] = set()  # nodes with samples that have fewer neurons than others
        self.single = len(samples) == 1
        self.rest: dict[tuple[torch.dtype, int], Lines] = {}
        self.lines: dict[tuple[torch.dtype, int], Lines] = {}
        self.kept: dict[tuple[torch.dtype, int], tuple[Tensor, ...]] = {}
        self.all: tuple[Tensor, ...] | None = None
        start = 0
        columns: list[list[Tensor]] = []
        for (i, mask), own in zip(crossing.items(), counts):
            width = max(own)
            size = mask.shape[1]
            if not width:
                continue
            if min(own) < width:
                self.ragged.add(i)
            places = (
                torch.where(mask, torch.arange(size, device=device), size).sort(1).values[:, :width]
            )
            self.places[i], self.parts[i] = places, slice(start, start + width)
            start += width
            one = sweep.bends[i].take(self.samples)
            shape = one.shape
            node = one.shape.node
            assert node.slope is not None
            up = shape.slopes()[0]
            values = (
                up,
                shape.shift(up, True),
                shape.c,
                shape.output()[0],
                one.error,
                node.slope.expand(shape.c.shape),
                one.down,
                torch.maximum(-shape.low, shape.high),
            )
            columns.append([self.gathered(i, flattened(v.double()), places) for v in values])
        none = torch.zeros(len(samples), 0, dtype=torch.float64, device=device)
        whole = (torch.cat([none, *v], 1) for v in (zip(*columns) if columns else [()] * 8))
        self.up, self.above, self.c, self.here, self.error, self.slope, self.down, self.most = whole

    def gathered(self, i: int, flat: Tensor, places: Tensor) -> Tensor:
        """The entries of node i's neurons, `(R, size), (R, u) -> (R, u)`; 0 where there are
        fewer.
        """
        return (F.pad(flat, (0, 1)) if i in self.ragged else flat).gather(
            1, places.expand(len(flat), -1)
        )

    def replaced(self, i: int, flat: Tensor, places: Tensor, values: Tensor) -> Tensor:
        """The rows with other entries at node i's neurons: what `gathered` looks at."""
        places = places.expand(len(flat), -1)
        if i in self.ragged:
            return F.pad(flat, (0, 1)).scatter(1, places, values)[:, :-1]
        return flat.scatter(1, places, values)

    def others(self, kind: Arithmetic, i: int, rows: Rows) -> Lines:
        """The lines of node i for rows, with 0 at the unstable neurons, `(R, size)` each."""
        store = self.lines if self.single else rows.lines
        if (kind.dtype, i) not in store:
            if (kind.dtype, i) not in self.rest:
                line = kind.lines[i].take(self.samples)
                flat = [flattened(v) for v in (line.mid, line.rad, line.off, line.far)]
                if i in self.parts:
                    own = self.places[i]
                    flat = [self.replaced(i, v, own, v.new_zeros(own.shape)) for v in flat]
                self.rest[kind.dtype, i] = Lines(*flat)
            store[kind.dtype, i] = self.rest[kind.dtype, i].take(rows.own)
        return store[kind.dtype, i]

    def joined(self, parts: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """Numbers of the unstable neurons of each node, side by side; 0 where a node has none."""
        found = [
            parts[i] if i in parts else like.new_zeros(len(like), part.stop - part.start)
            for i, part in self.parts.items()
        ]
        return torch.cat([like[:, :0], *found], 1)

    def known(self, dtype: torch.dtype, i: int, rows: Rows) -> tuple[Tensor, ...]:
        """What is known of node i's unstable neurons, for rows, in a type; made once for a tree of
        one sample, else once for a batch.
        """
        store = self.kept if self.single else rows.kept
        if (dtype, i) not in store:
            part = self.parts[i]
            tables = (self.up, self.above, self.c, self.here, self.error, self.slope, self.most)
            store[dtype, i] = tuple(of_owner(v[:, part], rows.own).to(dtype) for v in tables)
        return store[dtype, i]

    def tables(self, rows: Rows) -> tuple[Tensor, ...]:
        """Of all unstable neurons, for rows, in float32: the slope and the shift of the line
        above, the input and the output at the sample, and the slope on the left of 0; `(R, U)`
        each, or `(1, U)` in a tree of one sample.
        """
        if self.all is None:
            every = (self.up, self.above, self.c, self.here, self.slope)
            self.all = tuple(v.float() for v in every)
        return tuple(of_owner(v, rows.own) for v in self.all)


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the rows of a batch belong, where the network is: own, in the tree; owner, in the
    sweep; and their rivals.

    own and owner are `(R,)`, or `(1,)` in a tree of one sample. lines and kept: what was gathered
    for the rows, by type and node.
    """

    own: Tensor
    owner: Tensor
    rival: Tensor
    lines: dict[tuple[torch.dtype, int], Lines] = field(default_factory=dict)
    kept: dict[tuple[torch.dtype, int], tuple[Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def make(cls, tree: Neurons, subproblems: Subproblems) -> Rows:
        """Of some subproblems."""
        single = len(tree.open) == 1
        own = (subproblems.owner[:1] if single else subproblems.owner).to(
            tree.samples.device, non_blocking=True
        )
        return cls(own, tree.samples[own], subproblems.rival.to(own.device, non_blocking=True))


class ReluGradient:
    """The bounds of a batch of subproblems as functions of slopes and multipliers, in a network
    that has nothing but affine maps and ReLUs.

    Args:
        neurons: unstable ones of the samples, one node with some at least.
        rows: where the subproblems belong.
        sign: of the subproblems, `(R, U)`.
    """

    def __init__(self, neurons: Neurons, rows: Rows, sign: Tensor) -> None:
        self.neurons = neurons
        self.sweep = neurons.sweep
        self.kind = self.sweep.fast
        self.rows = rows
        self.sign = sign
        self.fixed = sign.abs()
        self.free = 1 - self.fixed
        up, above, self.c, self.here, slope = neurons.tables(rows)
        side = slope + sign.clamp(min=0) * (1 - slope)  # the slope where the sign is chosen
        self.side = self.fixed * side
        # A neuron's line where its coefficient is positive.
        self.steep = torch.where(sign == 0, up, side)
        self.above = torch.where(sign == 0, above, side * self.c - self.here)
        self.parts = self._live()
        self.top = max(self.parts, default=0)
        self.needed = self._needed()
        last = len(self.sweep.graph.nodes) - 1
        z = of_owner(self.sweep.centre[last], rows.owner)
        y = neurons.y[rows.own]
        # The coefficients above the last unstable neurons: no slope changes them.
        eye = torch.eye(self.sweep.graph.outputs, dtype=self.kind.dtype, device=sign.device)
        back = self._backward({last: eye[rows.rival] - eye[y]})
        for i, node, w in back.neurons(last, self.top):
            through = flattened(w) * neurons.others(self.kind, i, rows).mid
            back.take(node, unflattened(through, node.shape))
        self.above_top = back.weight
        own = z.gather(1, y[:, None])[:, 0]
        self.margin = own - z.expand(len(sign), -1).gather(1, rows.rival[:, None])[:, 0]
        self.size = z.abs().amax(1)

    def value(
        self, alpha: Tensor, beta: Tensor, pull: bool
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """Bounds on the margins `(R,)`, what the relaxation of each free neuron takes from them,
        the coefficients of the neurons, `(R, U)` each, and the gradients by alpha and beta.

        Args:
            alpha: slopes of the lines below free neurons, `(R, U)`.
            beta: multipliers of the signs, `(R, U)`.
            pull: whether gradients are asked for; else there are none.
        """
        flat = self.free * alpha + self.side
        below = flat * self.c - self.here
        push = beta * self.sign
        found: dict[int, Tensor] = {}
        back = self._backward(dict(self.above_top))
        for i, node, w in back.neurons(self.top):
            rows = flattened(w)
            through = rows * self.neurons.others(self.kind, i, self.rows).mid
            if i in self.parts:
                part = self.parts[i]
                place = of_owner(self.neurons.places[i], self.rows.own)
                found[i] = self.neurons.gathered(i, rows, place)
                plus = found[i].clamp(min=0)
                line = torch.addcmul(push[:, part], plus, self.steep[:, part])
                line = line.addcmul_(found[i] - plus, flat[:, part])
                through = self.neurons.replaced(i, through, place, line)
            back.take(node, unflattened(through, node.shape))
        chosen = self.neurons.joined(found, alpha)
        plus = chosen.clamp(min=0)
        minus = chosen - plus
        relaxed = (plus * self.above).addcmul_(minus, below)
        total = torch.addcmul(relaxed, push, self.c).sum(1, dtype=torch.float64)
        a = back.inputs()
        value = self.margin - total
        relaxed = relaxed * self.free
        if not pull:
            return value - self.sweep.inputs.support(a, self.rows.owner), relaxed, chosen, []
        worst, point = self.sweep.inputs.worst(a, self.rows.owner)
        reached = self._reached(point, found, flat, below) + self.c
        pulls: list[Tensor | None] = [-(minus * reached * self.free), -(reached * self.sign)]
        return value - worst, relaxed, chosen, pulls

    def _reached(
        self, point: Tensor, found: dict[int, Tensor], flat: Tensor, below: Tensor
    ) -> Tensor:
        """What the relaxed network makes of the worst inputs at the unstable neurons, `(R, U)`.

        Args:
            point: the worst inputs, `(R, n)`.
            found: coefficients of the unstable neurons of each node.
            flat: slopes of their lines where those are negative, `(R, U)`.
            below: the shifts of these lines, `(R, U)`.
        """
        nodes = self.sweep.graph.nodes
        there = {0: unflattened(point, nodes[0].shape)}
        reached: dict[int, Tensor] = {}
        for i in range(1, self.top + 1):
            if i not in self.needed and i not in self.parts:
                continue
            node = nodes[i]
            if node.map is not None:
                there[i] = self.kind.maps[i].forward(*(there[j] for j in node.inputs))
                continue
            moved = flattened(there[node.inputs[0]])
            if i in self.parts:
                place = of_owner(self.neurons.places[i], self.rows.own)
                reached[i] = self.neurons.gathered(i, moved, place)
            if i not in self.needed:
                continue
            through = moved * self.neurons.others(self.kind, i, self.rows).mid
            if i in self.parts:
                part = self.parts[i]
                high = torch.addcmul(self.above[:, part], reached[i], self.steep[:, part])
                low = torch.addcmul(below[:, part], reached[i], flat[:, part])
                # No gradient goes through coefficients that are 0 but for rounding.
                positive, negative = loud(found[i])
                through = self.neurons.replaced(
                    i, through, place, (positive * high).addcmul_(negative, low)
                )
            there[i] = unflattened(through, node.shape)
        return self.neurons.joined(reached, flat)

    def _backward(self, weight: dict[int, Tensor]) -> Backward:
        """Coefficients on their way to the input; what the bound grows by is known at the end."""
        none = self.sign.new_zeros(len(self.sign))
        return Backward(self.sweep.graph, self.kind, weight, none, self.rows.owner, sure=False)

    def _live(self) -> dict[int, slice]:
        """The nodes with unstable neurons that lead to the output, and their columns."""
        nodes = self.sweep.graph.nodes
        found = {len(nodes) - 1}
        for i in range(len(nodes) - 1, 0, -1):
            if i in found:
                found.update(nodes[i].inputs)
        return {i: part for i, part in self.neurons.parts.items() if i in found}

    def _needed(self) -> set[int]:
        """The nodes whose values lead to unstable neurons."""
        nodes = self.sweep.graph.nodes
        found = {j for i in self.parts for j in nodes[i].inputs}
        for i in range(self.top, 0, -1):
            if i in found:
                found.update(nodes[i].inputs)
        return found
