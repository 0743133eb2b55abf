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

`Substitution` does this with CROWN's lines, and with the slopes that an ascent finds (alpha-CROWN,
Xu et al. 2021). The ascent itself is `Ascent`: Adam, and the best so far. Bounds are valid for all
slopes in their range and all multipliers >= 0, so that it proves nothing. Every row is a problem of
its own, and its steps do not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph, Node
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.lines import Arithmetic, Bend, Slopes
from wassail.certificates.relax.rows import (
    ALONE,
    add_to,
    doubled,
    flattened,
    of_owner,
    repeated,
    row_dot,
    unflattened,
    units_of,
)
from wassail.errors import InputError
from wassail.ties import firm, quiet


class Ascent:
    """Adam (Kingma & Ba 2015) on tensors with R rows, and the values that were best in each row.

    The steps are written out instead of `torch.optim.Adam`: gradients that are 0 but for rounding
    count as 0 (`ties.quiet`), and each row keeps its own best.

    Args:
        unknowns: where it begins, `(R, ...)` each.
        fresh: weight of a new gradient in the mean of its squares. Default: 0.01.
        floor: the size below which a gradient takes shorter steps. Default: 1e-12.
        apart: whether the tensors have different units, so that what is noise is told from the
            other gradients of the same tensor only. Default: False.
    """

    def __init__(
        self,
        unknowns: Sequence[Tensor],
        fresh: float = 0.01,
        floor: float = 1e-12,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self.fresh = fresh
        self.floor = floor
        self.taken = 0
        self.first = [torch.zeros_like(v) for v in unknowns]
        self.second = [torch.zeros_like(v) for v in unknowns]
        rows = unknowns[0] if unknowns else torch.zeros(0)
        self.best = rows.new_full((len(rows),), -math.inf, dtype=torch.float64)
        self.kept = [v.detach().clone() for v in unknowns]
        self.rows: Tensor | None = None  # places of the rows that still move; None: all

    def take(self, rows: Tensor) -> None:
        """Go on with some rows of those that still move. What the others reached stays in `best`
        and `kept`.

        Args:
            rows: their places `(r,)` among the rows that move now.
        """
        self.rows = rows if self.rows is None else self.rows[rows]
        self.first = [v[rows] for v in self.first]
        self.second = [v[rows] for v in self.second]

    def keep(self, value: Tensor, values: Sequence[Tensor]) -> None:
        """Keep the values of the rows that are better than before.

        Args:
            value: what each row that moves reached, `(R,)`; larger is better.
            values: with which values, `(R, ...)` each.
        """
        if self.rows is not None:
            better = (value > self.best[self.rows]).nonzero()[:, 0]
            places = self.rows[better]
            self.best[places] = value[better]
            for new, old in zip(values, self.kept):
                old[places] = new.detach()[better]
            return
        better = value > self.best
        self.best = torch.where(better, value, self.best)
        self.kept = [
            torch.where(better.reshape(-1, *[1] * (new.ndim - 1)), new.detach(), old)
            for new, old in zip(values, self.kept)
        ]

    def moves(self, pulls: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The next step along the gradients, in units of the rate; None where nothing pulls.

        pulls: gradients, as `torch.autograd.grad` returns them.
        """
        self.taken += 1
        found: list[Tensor | None] = []
        heard = [quiet([g])[0] for g in pulls] if self.apart else quiet(pulls)
        for first, second, g in zip(self.first, self.second, heard):
            if g is None:
                found.append(None)
                continue
            first.mul_(0.9).add_(g, alpha=0.1)
            second.mul_(1 - self.fresh).addcmul_(g, g, value=self.fresh)
            size = (second / (1 - (1 - self.fresh) ** self.taken)).sqrt_().add_(self.floor)
            found.append((first / (1 - 0.9**self.taken)).div_(size))
        return found


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


FULL = 0.8  # share of active neurons from which on the others are multiplied, too


class Substitution:
    """What is known of a network on N balls, as rows that go backward need it.

    exact, fast, parallel: the lines and planes of float64, of float32, and of float32 with two
    parallel lines for each neuron; inputs: the balls, as coefficients of the input are laid out;
    taken: coefficient vectors substituted so far.
    """

    def __init__(self, graph: Graph, balls: Balls) -> None:
        _check_precision(graph)
        self.graph = graph
        self.balls = balls
        self.users = graph.users
        self.exact = Arithmetic(graph, torch.float64)
        self.fast = Arithmetic(graph, torch.float32)
        self.parallel = Arithmetic(graph, torch.float32, self.fast)
        start = graph.nodes[0].shape
        self.order = flattened(
            torch.arange(graph.inputs, device=graph.device).reshape(1, *start).contiguous()
        )[0]
        # as coefficient vectors are laid out: pixel by pixel, where there are several channels
        images = len(start) == 3 and start[0] > 1
        self.inputs = balls.reordered(self.order) if images else balls
        self._bends: dict[int, Bend] = {}
        self._slopes: dict[int, Slopes] = {}
        # whether a node has any, and how to make them
        self._unasked: dict[int, tuple[Tensor, partial[Bend]]] = {}
        # Where one of the slopes of the only activation that reads a matrix is not 0, by the
        # matrix's node; and as places, by that and the sample.
        self.passing: dict[int, Tensor] = {}
        self.awake: dict[tuple[int, int], Tensor | None] = {}
        self.taken = 0

    def later(self, i: int, crossing: Tensor, make: partial[Bend]) -> None:
        """How to make what `bends` knows of node i; crossing: its undecided neurons."""
        self._unasked[i] = (crossing.any(), make)

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

    def bound(
        self, last: int, rows: Tensor, owner: Tensor, steps: int = 0, both: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`<row, d_last> <= constant + <a, d_0>` on each row's ball: `(R, *shape), (R,) -> (R,),
        (R, n), (R,)`.

        both: the negatives of the rows after them, `2 R` of each. With steps the slopes of the
        lower lines are optimised for each row on its own (alpha-CROWN, Xu et al. 2021): any slope
        between the neuron's two gives a bound.
        """
        constant, a, owner = self.substitute(self.exact, last, rows, owner, both)
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
        alpha = self._ascend(last, rows.float(), owner, steps)
        other, b, _ = self.substitute(
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
        # The planes of a curve have no way back of their own.
        measured = self._differentiated if self.graph.curved else self._pulled
        for step in range(1, steps + 1):
            clock.check()
            found = measured(last, rows, owner, lines, alpha, step < steps)
            if found is None:  # no undecided neuron feeds the rows
                break
            value, pulls = found
            ascent.keep(-value, list(alpha.values()))
            if step == steps:  # nothing comes after it
                break
            for i, move in zip(alpha, ascent.moves([pulls.get(i) for i in alpha])):
                if move is not None:
                    moved = torch.sub(alpha[i], move, alpha=0.3 * 0.9**step)
                    alpha[i] = torch.maximum(moved, self._least(i).float()).clamp_(max=1.0)
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
        path: dict[int, Tensor] = {}
        none = rows.new_zeros(len(rows), dtype=torch.float64)

        def watch(_: Backward, i: int, w: Tensor) -> None:
            path[i] = w

        back = Backward(self.graph, self.fast, {last: rows}, none, owner, sure=False, watch=watch)
        for i, node, w in back.neurons(last):
            back.take(node, *lines[i].pull(w, alpha.get(i, lines[i].down)))
        known = [i for i in path if i in alpha]
        if not known or 0 not in back.weight:
            return None
        a = flattened(back.weight[0])
        if not steer:
            return back.constant + self.inputs.support(a, owner), {}
        reach, point = self.inputs.worst(a, owner)
        moved = {0: laid_out(unflattened(point, nodes[0].shape))}
        pulls: dict[int, Tensor] = {}
        for i, w in reversed(path.items()):
            if i > known[0]:
                break
            given = [moved[j] for j in nodes[i].inputs]
            if i in lines:
                moved[i], pull = lines[i].push(w, alpha.get(i, lines[i].down), given[0])
                if i in alpha:
                    pulls[i] = pull
            else:
                moved[i] = maps[i].forward(*given)
        return back.constant + reach, pulls

    def _differentiated(
        self,
        last: int,
        rows: Tensor,
        owner: Tensor,
        lines: Mapping[int, Slopes],
        alpha: Mapping[int, Tensor],
        steer: bool,
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """As `_pulled`, by torch's gradients."""
        none = rows.new_zeros(len(rows), dtype=torch.float64)
        with torch.enable_grad():
            leaves = {i: a.detach().requires_grad_(True) for i, a in alpha.items()}
            back = Backward(self.graph, self.fast, {last: rows}, none, owner, sure=False)
            for i, node, w in back.neurons(last):
                slope = lines[i].down
                if i in leaves:
                    slope = torch.where(lines[i].crossing > 0, leaves[i], slope)
                back.take(node, *lines[i].pull(firm(w), slope))
            value = back.constant + self.inputs.upper(firm(back.inputs()), owner)
            if not value.requires_grad:
                return None
            pulls: tuple[Tensor | None, ...] = ()
            if steer:
                pulls = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
        return value.detach(), {i: g for i, g in zip(leaves, pulls) if g is not None}

    def _least(self, i: int) -> Tensor:
        """The slope of ReLU i below 0."""
        slope = self.graph.nodes[i].slope
        assert slope is not None
        return slope

    def substitute(
        self,
        kind: Arithmetic,
        last: int,
        rows: Tensor,
        owner: Tensor,
        both: bool,
        alpha: Mapping[int, Tensor] | None = None,
        units: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward to the input by lines; until the first activation the rows and their negatives
        go through as one. units: the rows are unit vectors, and given by their places `(R,)`.
        """
        weight: dict[int, Tensor] = {last: rows}
        constant = kind.floors[last][owner].expand(len(rows))
        if units:
            weight, constant = unit_rows(self.graph, kind, last, rows, owner)
        self.taken += len(rows) * (1 + both)
        columns = partial(self.columns, last)
        back = Backward(self.graph, kind, weight, constant, owner, both, columns=columns)
        for i, node, w in back.neurons(last):
            if alpha is not None and i in alpha:
                back.take(node, *self._bent(i, w, back.owner, alpha[i]))
                continue
            line = kind.lines[i].take(back.owner)
            part, more = line.pull_both(w) if back.both else line.pull(w)
            if back.both:
                back.double()
            back.take(node, part, more)
        a = back.inputs()
        return back.constant, a, back.owner

    def columns(self, last: int, i: int, w: Tensor, owner: Tensor) -> Tensor | None:
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
        line = self.slopes(i).take(owner)
        # Between its two slopes, also after it was rounded to float32.
        a = torch.maximum(alpha, self._least(i)).clamp(max=1.0)
        return line.pull(w, torch.where(line.crossing > 0, a, line.down))


def _check_precision(graph: Graph) -> None:
    """Refuse products that are rounded to fewer digits than bounds account for."""
    reduced = torch.get_float32_matmul_precision() != "highest"
    if reduced or torch.is_autocast_enabled(graph.device.type):
        raise InputError(
            "torch is set to round float32 products to fewer digits: certify outside autocast and "
            "with torch.set_float32_matmul_precision('highest')."
        )
