"""How far the inputs of a curve move together, beyond their spans, as a sweep knows it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates.graph.graph import Node
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.relax.rows import Span, all_chunks, room_of
from wassail.rounding import UNIT

if TYPE_CHECKING:
    from wassail.certificates.relax.crown import Sweep


class InputExtent(NamedTuple):
    """The inputs of a curve node, of which a sweep has the spans and the linear bounds."""

    sweep: Sweep
    node: Node

    def length(self, k: int, axes: tuple[int, ...]) -> Tensor:
        """Bounds on the Euclidean norm of `d - middle of its span` along some axes of input k: `(N,
        *shape)`, length 1 there.

        With `d = A d_0 + shift +- rest`: the norm of A on the ball, and that of the rest. `d = 0`
        is one of the deviations, so `|shift| <= rest`, and the middle is no farther from it than
        the norm: the factor pays for their roundings, and the slack of `stretch` for that of
        `start`.
        """
        j = self.node.inputs[k]
        shape = self.sweep.graph.nodes[j].shape
        spread = self.sweep.spreads[j]
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        width = math.prod(shape[axis] for axis in axes)
        count = math.prod(shape[axis] for axis in kept)

        def grouped(values: Tensor) -> Tensor:
            own = values.reshape(len(values), *shape, -1)
            own = own.permute(0, *(v + 1 for v in (*kept, *axes)), len(shape) + 1)
            return own.reshape(len(values), count, width, -1)

        low, high = (grouped(side)[..., 0] for side in self.sweep.spans[j])
        middle = (low + high) / 2
        a = grouped(spread.a)
        start, stretch = self.sweep.inputs.stretch(a)
        shift = start + grouped(spread.shift)[..., 0] - middle
        apart = shift.abs() + grouped(spread.rest)[..., 0]
        found = (stretch + rounding.length(apart, 2, 2)) * (1 + (width + 8) * UNIT)
        wide = rounding.length(torch.maximum(high - middle, middle - low), 2, 2) * (
            1 + (width + 8) * UNIT
        )
        return torch.fmin(found, wide).reshape(
            -1, *(1 if axis in axes else size for axis, size in enumerate(shape))
        )

    def along(self, k: int, direction: Tensor) -> Span:
        """The range of `<direction, d>` for every token of input k, `(N, *shape)` to `(N, ...,
        1)`: one row for each.
        """
        graph = self.sweep.graph
        j = self.node.inputs[k]
        node = graph.nodes[j]
        width = direction.shape[-1]
        count = node.size // width
        tokens = direction.reshape(len(direction), count, width)
        top = direction.new_empty(2, len(direction), count)
        widest = max(n.size for n in graph.nodes[: j + 1])
        for owner, place in all_chunks(
            len(direction), count, room_of(top.device) // (2 * widest), top.device
        ):
            rows = direction.new_zeros(len(place), count, width)
            rows = rows.scatter(
                1, place[:, None, None].expand(-1, 1, width), tokens[owner, place][:, None]
            )
            constant, a, both = self.sweep.substitute(
                self.sweep.exact, j, laid_out(rows.reshape(-1, *node.shape)), owner, True
            )
            top[:, owner, place] = (constant + self.sweep.inputs.upper(a, both)).reshape(2, -1)
        top = torch.where(torch.isnan(top), math.inf, top)  # an overflow is no bound
        high, low = (side.reshape(*direction.shape[:-1], 1) for side in (top[0], -top[1]))
        return low, high
