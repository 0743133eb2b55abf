"""Parts of a network that do not stretch: entries that are moved, compared and sorted.

A comparator takes entries a and b to `max(a, b)` and `min(a, b)`. It is read as one ReLU and two
sums, whose norms are above 1. But sorting two numbers moves no two points apart, in any norm
(Anil et al. 2019, GroupSort). So every value is followed through the moves and comparators of the
network: it is an entry of a vector that began as one node, of which comparators have exchanged some
entries. As long as the entries of a later node are different ones of that vector, all of them at
one time, the later node moves at most as far as the first.

GroupSort, MaxMin and max poolings without overlap are of this kind, however they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Graph, Relu
from wassail.certificates.graph.maps import Concat, Pick, Scale, Sum


@dataclass(frozen=True)
class NonexpansiveSort:
    """`||node - node'||_r <= ||base - base'||_r` for every norm r.

    base: the node it began as; between: the nodes on the way, the node itself the last.
    """

    base: int
    between: tuple[int, ...]


def nonexpansive_sorts(graph: Graph) -> Mapping[int, NonexpansiveSort]:
    """The nodes that sorting makes of others; kept for as long as the graph lives."""
    return graph.kept("nonexpansive_sorts", lambda: _Tracer(graph).run())


@dataclass(frozen=True, eq=False)
class _Trace:
    """Where the entries of a node are: base, the node whose vector they are of; place, which entry
    of it, -1 for a constant 0; time, the number of the comparator that made it, 0 for none.
    """

    base: int
    place: Tensor
    time: Tensor


class _Tracer:
    """One pass through the nodes."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.traces: list[_Trace] = []
        self.latest: dict[int, Tensor] = {}  # base -> the last comparator of each entry
        self.made: dict[int, int | None] = {}  # ReLU node -> its comparator, None: it is none
        self.count = 0

    def run(self) -> dict[int, NonexpansiveSort]:
        """The nodes that are made of one other by moves and at least one comparator."""
        found = {}
        for i in range(len(self.nodes)):
            trace = self._moved(i) or self._compared(i)
            if trace is None:
                trace = self._begun(i)
            elif bool((trace.time > 0).any()) and self._together(trace):
                found[i] = NonexpansiveSort(trace.base, self._between(trace.base, i))
            self.traces.append(trace)
        return found

    def _begun(self, i: int) -> _Trace:
        """A vector of its own."""
        place = torch.arange(self.nodes[i].size)
        self.latest[i] = torch.zeros_like(place)
        return _Trace(i, place, torch.zeros_like(place))

    def _moved(self, i: int) -> _Trace | None:
        """Entries of others, moved or joined."""
        node = self.nodes[i]
        if not isinstance(node.op, Affine) or not isinstance(node.op.map, Pick | Concat):
            return None
        given = [self.traces[j] for j in node.inputs]
        if node.op.bias is not None or len({trace.base for trace in given}) > 1:
            return None
        shapes = [self.nodes[j].shape for j in node.inputs]
        host = node.op.map.to(torch.device("cpu"))
        # Numbers from 1 on, since what a move leaves empty is 0; float64 holds them.
        place, time = (
            host.forward(*((v + 1).double().reshape(1, *s) for v, s in zip(values, shapes)))
            .long()
            .flatten()
            - 1
            for values in ([t.place for t in given], [t.time for t in given])
        )
        return _Trace(given[0].base, place, time)

    def _compared(self, i: int) -> _Trace | None:
        """`a + relu(b - a)`, the larger, or `b - relu(b - a)`, the smaller."""
        pair = self._sum(i)
        if pair is None:
            return None
        first, second = pair
        lower = self._negated(second)
        relu = second if lower is None else lower
        ends = self._difference(relu)
        if ends is None:
            return None
        b, a = ends
        if first != (a if lower is None else b):
            return None
        if relu not in self.made:
            self.made[relu] = self._comparator(a, b)
        time = self.made[relu]
        if time is None:
            return None
        place = self.traces[first].place
        return _Trace(self.traces[first].base, place, torch.full_like(place, time))

    def _comparator(self, a: int, b: int) -> int | None:
        """A new comparator of two nodes, if their entries are different ones at one time."""
        one = self.traces[a]
        two = self.traces[b]
        if one.base != two.base or one.place.shape != two.place.shape:
            return None
        both = _Trace(one.base, torch.cat([one.place, two.place]), torch.cat([one.time, two.time]))
        if bool((both.place < 0).any()) or not self._together(both):
            return None
        self.count += 1
        self.latest[one.base][both.place] = self.count
        return self.count

    def _together(self, trace: _Trace) -> bool:
        """Whether entries are different ones, and those that the vector has now."""
        used = trace.place >= 0
        place = trace.place[used]
        if bool((torch.bincount(place, minlength=1) > 1).any()):
            return False
        return bool((self.latest[trace.base][place] == trace.time[used]).all())

    def _sum(self, i: int) -> tuple[int, int] | None:
        """The parts of a sum of two nodes."""
        node = self.nodes[i]
        if not isinstance(node.op, Affine) or not isinstance(node.op.map, Sum):
            return None
        if len(node.inputs) != 2 or node.op.bias is not None:
            return None
        return node.inputs[0], node.inputs[1]

    def _negated(self, i: int) -> int | None:
        """The node whose negative this is."""
        node = self.nodes[i]
        if not isinstance(node.op, Affine) or not isinstance(node.op.map, Scale):
            return None
        if node.op.bias is not None or not bool((node.op.map.factor == -1).all()):
            return None
        return node.inputs[0]

    def _difference(self, i: int) -> tuple[int, int] | None:
        """`(b, a)` of `relu(b - a)`."""
        node = self.nodes[i]
        if not isinstance(node.op, Relu) or bool((node.op.slope != 0).any()):
            return None
        pair = self._sum(node.inputs[0])
        if pair is None:
            return None
        a = self._negated(pair[1])
        return None if a is None else (pair[0], a)

    def _between(self, base: int, i: int) -> tuple[int, ...]:
        """The nodes from a base on that node i is made of."""
        needed = {i}
        for k in range(i, base, -1):
            if k in needed:
                needed.update(j for j in self.nodes[k].inputs if j > base)
        return tuple(sorted(needed))
