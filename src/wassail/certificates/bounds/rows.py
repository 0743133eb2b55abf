"""Rows of coefficients, each with the sample that it belongs to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.device import plain
from wassail.certificates.graph.graph import Node
from wassail.certificates.graph.maps import Conv, Linear, Matrix, Scale
from wassail.rounding import FLOOR

Span: TypeAlias = "tuple[Tensor, Tensor]"


def narrow_to(
    low: Tensor, high: Tensor, owner: Tensor, place: Tensor, bottom: Tensor, top: Tensor
) -> None:
    """Intersect spans `(N, size)`, which contain 0, with bounds `(R,)` on some entries; NaN (an
    overflow) is no bound.
    """
    low[owner, place] = torch.fmax(low[owner, place], bottom.clamp(max=0))
    high[owner, place] = torch.fmin(high[owner, place], top.clamp(min=0))


def units_of(node: Node, place: Tensor, dtype: torch.dtype) -> Tensor:
    """Unit vectors, `(R, *shape)`."""
    unit = place.new_zeros(len(place), node.size, dtype=dtype).scatter(1, place[:, None], 1.0)
    return laid_out(unit.reshape(-1, *node.shape))


def of_owner(values: Tensor, owner: Tensor) -> Tensor:
    """What belongs to each row: owner `(R,)`, or `(1,)` if all rows belong to one sample."""
    return values[owner]


def doubled(owner: Tensor) -> Tensor:
    """The owners of rows that follow each other twice."""
    return owner if len(owner) == 1 else owner.repeat(2)


def row_dot(rows: Tensor, values: Tensor) -> Tensor:
    """`<row, values>` for rows `(R, ...)` and values of each or of all `(1, ...)`: `(R,)` in
    float64.

    Summed in any order, so off by at most (number of terms) 2^-24 or 2^-53 of the magnitudes: the
    values account for that.
    """
    if len(values) == 1:
        return (flattened(rows) @ flattened(values)[0]).double()
    return flattened(rows * values).sum(1).double()


def add_to(store: dict[int, Tensor], key: int, value: Tensor) -> None:
    """Add a value to what the store has under this key."""
    store[key] = store[key] + value if key in store else value


def laid_out(values: Tensor) -> Tensor:
    """Images with their channels last in memory, which is how convolutions go fastest here."""
    return values.contiguous(memory_format=torch.channels_last) if values.ndim == 4 else values


def flattened(values: Tensor) -> Tensor:
    """Rows `(R, ...)` as `(R, n)`, in the order in which they lie in memory."""
    return (values.permute(0, 2, 3, 1) if values.ndim == 4 else values).reshape(len(values), -1)


def unflattened(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What `flattened` undid: `(R, n) -> (R, *shape)`."""
    if len(shape) == 3:
        return rows.reshape(len(rows), *shape[1:], shape[0]).permute(0, 3, 1, 2)
    return rows.reshape(len(rows), *shape)


class Turned:
    """A map's transpose in another floating-point type, for coefficient vectors with channels
    last.
    """

    def __init__(self, map_: Linear, dtype: torch.dtype) -> None:
        self.map = map_
        if isinstance(map_, Matrix):
            self.map = Matrix(map_.weight.to(dtype))
        elif isinstance(map_, Scale):
            self.map = Scale(map_.factor.to(dtype))
        elif isinstance(map_, Conv):
            # With stride 1 the transpose is a convolution with the kernel turned around, and faster
            # as that.
            size = map_.weight.shape[2:]
            self.plain = (
                map_.stride == (1, 1)
                and map_.groups == 1
                and all(p <= k - 1 for p, k in zip(map_.padding, size))
            )
            weight = map_.weight.flip(2, 3).transpose(0, 1) if self.plain else map_.weight
            self.weight = laid_out(weight.to(dtype))
            # Patches that do not overlap (of a transformer) are a matrix product, which is much
            # faster in float32.
            patches = (
                map_.stride == tuple(size)
                and map_.padding == (0, 0)
                and map_.dilation == (1, 1)
                and map_.groups == 1
            )
            self.patches = (
                map_.weight.permute(0, 2, 3, 1).flatten(1).to(dtype)
                if patches and not self.plain
                else None
            )

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(R, *output) -> (R, *shape)` for each input."""
        m = self.map
        if not isinstance(m, Conv):
            return tuple(laid_out(part) for part in m.transpose(g))
        if self.patches is not None:
            return (_unpatched(g, self.patches, m),)
        reach = [d * (k - 1) for d, k in zip(m.dilation, m.weight.shape[2:])]
        if self.plain and all(p <= r for p, r in zip(m.padding, reach)):
            padding = [r - p for r, p in zip(reach, m.padding)]
            with plain(g.device):
                return (F.conv2d(g, self.weight, None, 1, padding, m.dilation),)
        rest = [
            n - ((o - 1) * s - 2 * p + r + 1)
            for n, o, s, p, r in zip(m.shape[1:], g.shape[2:], m.stride, m.padding, reach)
        ]
        with plain(g.device):
            return (
                F.conv_transpose2d(
                    g, self.weight, None, m.stride, m.padding, rest, m.groups, m.dilation
                ),
            )


def _unpatched(g: Tensor, weight: Tensor, conv: Conv) -> Tensor:
    """`(R, out, i, j) -> (R, in, i height, j width)`, with zeros where the patches leave a rim;
    channels last.
    """
    (channels, tall, wide), (height, width) = conv.shape, conv.stride
    rows, columns = g.shape[2:]
    parts = (g.permute(0, 2, 3, 1) @ weight).reshape(len(g), rows, columns, height, width, channels)
    image = parts.transpose(2, 3).reshape(len(g), rows * height, columns * width, channels)
    if image.shape[1:3] != (tall, wide):
        image = F.pad(image, (0, 0, 0, wide - columns * width, 0, tall - rows * height))
    return image.permute(0, 3, 1, 2)


def row_norms(map_: Matrix | Conv, s: float) -> Tensor:
    """Upper bounds on the s-norms of the rows of a map, one for each output, broadcasting
    against one sample.
    """
    if s == math.inf:
        top = map_.weight.abs().flatten(1).amax(1)
        return top if isinstance(map_, Matrix) else top[:, None, None]
    squares = replace(map_, weight=map_.weight.square() + FLOOR[torch.float64])  # one may underflow
    if isinstance(map_, Matrix):
        return squares.weight.sum(1).sqrt()
    return squares.forward(map_.weight.new_ones(1, *map_.shape))[0].sqrt()


def rounded_up(values: Tensor) -> Tensor:
    """The next number above, entry by entry."""
    return torch.nextafter(values, torch.full_like(values, math.inf))
