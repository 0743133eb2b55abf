"""Rows of coefficients, each with the sample that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Node
from wassail.certificates.graph.maps import Linear, laid_out

Span: TypeAlias = "tuple[Tensor, Tensor]"
# How far some entries of a node move together, `(N,)`, and which ones, `(N, *shape)`.
Length: TypeAlias = "tuple[Tensor, Tensor]"


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
    unit = place.new_zeros(place.shape[0], node.size, dtype=dtype)
    unit = unit.scatter(1, place[:, None], 1.0)
    return laid_out(unit.reshape(-1, *node.shape))


def of_owner(values: Tensor, owner: Tensor) -> Tensor:
    """What belongs to each row: owner `(R,)`, or `(1,)` if all rows belong to one sample."""
    return of_owners((values,), owner)[0]


def of_owners(values: Sequence[Tensor], owner: Tensor) -> tuple[Tensor, ...]:
    """`of_owner` of several. On the CPU what belongs to one sample is a view; another device is not
    asked which sample that is.
    """
    if owner.shape[0] != 1 or owner.device != HOST:
        return tuple(v[owner] for v in values)
    first = int(owner)
    return tuple(v.narrow(0, first, 1) for v in values)


def doubled(owner: Tensor) -> Tensor:
    """The owners of rows that follow each other twice."""
    return owner if owner.shape[0] == 1 else owner.repeat(2)


def row_dot(rows: Tensor, values: Tensor) -> Tensor:
    """`<row, values>` for rows `(R, ...)` and values of each or of all `(1, ...)`: `(R,)` in
    float64.

    Summed in any order, so off by at most (number of terms) 2^-24 or 2^-53 of the magnitudes: the
    values account for that.
    """
    if values.shape[0] == 1:
        return torch.mv(flattened(rows), flattened(values)[0]).double()
    return flattened(rows * values).sum(1).double()


def add_to(store: dict[int, Tensor], key: int, value: Tensor) -> None:
    """Add a value to what the store has under this key."""
    store[key] = store[key] + value if key in store else value


def repeated(values: Tensor, count: int) -> Tensor:
    """Rows `(count, ...)` of their own, laid out as the values `(1, ...)` or `(count, ...)` are."""
    return laid_out(values.new_empty(count, *values.shape[1:])).copy_(values)


def flattened(values: Tensor) -> Tensor:
    """Rows `(R, ...)` as `(R, n)`, in the order in which they lie in memory."""
    if values.ndim <= 2:
        return values if values.ndim == 2 else values[:, None]
    return (values.permute(0, 2, 3, 1) if values.ndim == 4 else values).flatten(1)


def unflattened(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What `flattened` undid: `(R, n) -> (R, *shape)`."""
    if len(shape) == 3:
        return rows.reshape(rows.shape[0], *shape[1:], shape[0]).permute(0, 3, 1, 2)
    return rows.reshape(rows.shape[0], *shape)


class Turned:
    """A map's transpose in another floating-point type, for coefficient vectors with channels
    last.
    """

    def __init__(self, map_: Linear, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.map = map_.kept(dtype, partial(map_.turned, dtype))

    def transpose(self, g: Tensor, some: Tensor | None = None) -> tuple[Tensor, ...]:
        """`(R, *output) -> (R, *shape)` for each input; some: columns of a matrix, where g is 0 in
        all others.
        """
        weight = self.map.matrix
        if some is not None and weight is not None:
            return (g.index_select(1, some) @ weight.index_select(0, some),)
        return tuple(laid_out(part) for part in self.map.transpose(g))

    def rows(self, place: Tensor, node: Node) -> tuple[Tensor, ...]:
        """The transpose of unit vectors for entries `(R,)` of a node's output."""
        own = self.map.rows(place, node.shape) if len(node.inputs) == 1 else None
        if own is not None:
            return (laid_out(own),)
        return self.transpose(units_of(node, place, self.dtype))

    def forward(self, *x: Tensor) -> Tensor:
        """The map itself: `(R, *shape)` for each input `-> (R, *output)`."""
        return laid_out(self.map.forward(*x))


def rounded_up(values: Tensor) -> Tensor:
    """The next number above, entry by entry."""
    return torch.nextafter(values, torch.full_like(values, math.inf))
