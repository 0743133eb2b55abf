"""The one back-substitution: coefficients of a node go through the network to the input.

`Walk` is the loop: it hands out every node that something has come down to, and adds up what a node
gives to its inputs. What comes down may be anything that can be added: coefficients, intervals of
gradients, values with their errors. `Backward` is the walk of coefficients.

With `d` the deviations from a sample, every state satisfies

    <row, d_last> <= shift + constant + sum_k <weight_k, d_k>,

the sum over the nodes that the rows have come down to. An affine map and the planes of a curve are
taken as they are. An activation is relaxed by the caller: `neurons` hands out its coefficients w,
and `take` puts back those of its input, with what the bound grows by. CROWN's lines, slopes that an
ascent chooses, slope cones, balls and split neurons differ in that step alone:

    for i, node, w in back.neurons(last):
        line = kind.lines[i].take(back.owner)
        back.take(node, *line.pull(w))
    a = back.inputs()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph, Node
from wassail.certificates.relax.lines import Arithmetic
from wassail.certificates.relax.rows import add_to, doubled, flattened, of_owner, row_dot, units_of

Held = TypeVar("Held")


class Walk(Generic[Held]):
    """From some nodes of a network to its input, the last node first.

    Args:
        graph: the network.
        weight: what the walk begins with, by node. What has come down so far is kept here.
        added: the sum of what a node is given twice.
    """

    def __init__(
        self, graph: Graph, weight: dict[int, Held], added: Callable[[Held, Held], Held]
    ) -> None:
        self.graph = graph
        self.weight = weight
        self.added = added

    def nodes(self, last: int, stop: int = 0) -> Iterator[tuple[int, Node, Held]]:
        """Every node from `last` down to the one after `stop` that something has come down to, and
        what that is.
        """
        for i in range(last, stop, -1):
            if i in self.weight:
                clock.look()
                yield i, self.graph.nodes[i], self.weight.pop(i)

    def give(self, node: Node, parts: Iterable[Held]) -> None:
        """What a node hands on to each of its inputs."""
        for j, part in zip(node.inputs, parts):
            self.weight[j] = self.added(self.weight[j], part) if j in self.weight else part


class Backward(Walk[Tensor]):
    """Rows on their way to the input.

    weight: coefficients `(R, *shape)` by node; constant `(R,)`; owner: the samples of the rows,
    `(R,)`, or `(1,)` for all.

    Args:
        graph: the network.
        kind: the arithmetic of the coefficients.
        weight: where the rows begin.
        constant: what the bound begins with.
        owner: as above.
        both: whether the negatives of the rows are wanted, too: until the first curve or activation
            they go as one.
        sure: whether rounding is paid for; an ascent needs no rounding errors.
        apart: whether what is added whatever the sign of a row, `shift`, is kept apart from what is
            added to both sides.
        columns: of a node, its coefficients and their owner, the entries that can differ from 0,
            or None.
        watch: is told every node and its coefficients, and is given these rows: it must not hold
            them, since they hold it.
        tidy: makes of the coefficients of a curve those that its planes get.
    """

    def __init__(
        self,
        graph: Graph,
        kind: Arithmetic,
        weight: dict[int, Tensor],
        constant: Tensor,
        owner: Tensor,
        both: bool = False,
        sure: bool = True,
        apart: bool = False,
        columns: Callable[[int, Tensor, Tensor], Tensor | None] | None = None,
        watch: Callable[[Backward, int, Tensor], None] | None = None,
        tidy: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(graph, weight, torch.add)
        self.kind = kind
        self.constant = constant
        self.shift = torch.zeros_like(constant) if apart else None
        self.owner = owner
        self.both = both
        self.sure = sure
        self.columns = columns
        self.watch = watch
        self.tidy = tidy
        self.passed = False  # whether a curve or an activation was

    def neurons(self, last: int, stop: int = 0) -> Iterator[tuple[int, Node, Tensor]]:
        """Every activation that the rows meet between node `last` and node `stop`, with their
        coefficients there; all other nodes on the way are done here.
        """
        for i, node, w in self.nodes(last, stop):
            if self.watch is not None:
                self.watch(self, i, w)
            if node.map is not None:
                self._affine(i, node, w)
            elif i in self.kind.planes:
                self._curve(i, node, w)
            else:
                yield i, node, w

    def _affine(self, i: int, node: Node, w: Tensor) -> None:
        """The transposed map, and the rounding errors of the node."""
        errors = self.kind.errors
        if self.sure and i in errors:
            self.constant = self.constant + row_dot(w.abs(), of_owner(errors[i], self.owner))
        some = None if self.columns is None else self.columns(i, w, self.owner)
        self.give(node, self.kind.maps[i].transpose(w, some))

    def _curve(self, i: int, node: Node, w: Tensor) -> None:
        """The planes of a curve."""
        self.passed = True
        w = w if self.tidy is None else self.tidy(w)
        if self.both:
            w = torch.cat([w, -w])
            self.double()
        off, far = self.kind.planes[i].pull(self.weight, node.inputs, w, self.owner)
        if self.shift is None:
            self.constant = self.constant + off + far
        else:
            self.shift = self.shift + off
            self.constant = self.constant + far

    def double(self) -> None:
        """From here on the negatives of the rows have rows of their own, after all others."""
        for k, w in self.weight.items():
            self.weight[k] = torch.cat([w, -w])
        self.constant = self.constant.repeat(2)
        self.owner = doubled(self.owner)
        self.both = False

    def take(self, node: Node, part: Tensor, more: Tensor | None = None) -> None:
        """What an activation made of its coefficients: those of its input, and what the bound
        grows by, `(R,)`.
        """
        self.passed = True
        if more is not None:
            self.constant = self.constant + more
        self.give(node, (part,))

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows, by indices."""
        self.owner = self.owner if len(self.owner) == 1 else self.owner[rows]
        self.constant = self.constant[rows]
        if self.shift is not None:
            self.shift = self.shift[rows]
        for k, w in self.weight.items():
            self.weight[k] = w[rows]

    def inputs(self) -> Tensor:
        """The coefficients of the input, `(R, n)`: at the end."""
        if self.both:
            self.double()
        if 0 in self.weight:
            return flattened(self.weight[0])
        size = (len(self.constant), self.graph.inputs)
        return self.constant.new_zeros(size, dtype=self.kind.dtype)


def unit_rows(
    graph: Graph, kind: Arithmetic, last: int, place: Tensor, owner: Tensor
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
        node = graph.nodes[i]
        if node.map is None:
            add_to(weight, i, units_of(node, place, kind.dtype))
            continue
        if i in kind.errors:
            error = kind.errors[i]
            constant = constant + error.reshape(len(error), -1)[owner, place].double()
        if node.map.in_place and all(graph.users[j] == [i] or j == 0 for j in node.inputs):
            pure.extend(node.inputs)
            continue
        for j, part in zip(node.inputs, kind.maps[i].rows(place, node)):
            add_to(weight, j, part)
    return weight, constant
