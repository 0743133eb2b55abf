"""Values and gradients of the bounds of subproblems in networks of ReLUs, written out.

An ascent proves nothing: it looks for slopes and multipliers. So it is done in float32, without
rounding errors, and without a record of its operations for `torch.autograd`, whose small tensors
took most of the time. With `T` the bound to be taken off the margin, and `w` the coefficients of a
node, the gradient of `T` by `w` is what the relaxed network makes of the worst input: it goes
forward through the maps, `p <- W p`, and through the lines of the neurons.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassail.certificates.relax.backward import Backward
from wassail.certificates.relax.rows import flattened, of_owner, unflattened
from wassail.certificates.search.neurons import Neurons, Rows
from wassail.ties import loud


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
        self.begun = self._begun()
        self.needed = self._needed()
        last = len(self.sweep.graph.nodes) - 1
        z = of_owner(self.sweep.centre[last], rows.owner)
        y = neurons.y[rows.own]
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
        back = self._backward(dict(self.begun))
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

    def _begun(self) -> dict[int, Tensor]:
        """The coefficients above the last unstable neurons: no slope changes them."""
        nodes = self.sweep.graph.nodes
        eye = torch.eye(self.sweep.graph.outputs, dtype=self.kind.dtype, device=self.sign.device)
        last = len(nodes) - 1
        back = self._backward({last: eye[self.rows.rival] - eye[self.neurons.y[self.rows.own]]})
        for i, node, w in back.neurons(last, self.top):
            through = flattened(w) * self.neurons.others(self.kind, i, self.rows).mid
            back.take(node, unflattened(through, node.shape))
        return back.weight

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
