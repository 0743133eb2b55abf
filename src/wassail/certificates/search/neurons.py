"""The unstable neurons of some samples, and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Arithmetic, Lines
from wassail.certificates.relax.rows import flattened, of_owner
from wassail.certificates.search.intervals import Intervals
from wassail.certificates.search.subproblems import Subproblems

# neurons that are tried before a subproblem is cut, in networks with smooth activations or curves
LOOK = 4


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
        self.intervals = Intervals(sweep, self.samples)
        smooth = self.intervals.count
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

    def replaced(self, i: int, flat: Tensor, places: Tensor, values: Tensor | float) -> Tensor:
        """The rows with other entries at node i's neurons: what `gathered` looks at."""
        places = places.expand(len(flat), -1)
        if isinstance(values, float):
            values = flat.new_full(places.shape, values)
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
                    flat = [self.replaced(i, v, self.places[i], 0.0) for v in flat]
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
