"""Rows of coefficients backward through a network whose lines and planes are known: CROWN with the
slopes it chooses, and with those that an ascent finds (alpha-CROWN, Xu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.relax.ascent import Ascent
from wassail.certificates.relax.backward import Backward, unit_rows
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.lines import Arithmetic, Bend, Slopes
from wassail.certificates.relax.rows import (
    ALONE,
    flattened,
    repeated,
    unflattened,
)
from wassail.errors import InputError
from wassail.ties import firm

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
