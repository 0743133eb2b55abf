"""Upsampling and resizing: nearest entries move, interpolation is a matrix for each axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.graph import Affine
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.operators.registry import spelled


@spelled(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_nearest_exact1d",
    "upsample_nearest_exact2d",
    "upsample_nearest_exact3d",
)
def nearest(net: Builder, x: Index, *args: Any, **options: Any) -> Any:
    """Entries that are repeated, or dropped."""
    return net.move(net.target, x, list(args), options)


@spelled("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
def interpolated(net: Builder, x: Index, *args: Any, **options: Any) -> Index:
    """One matrix for each axis, since weights are products of those of the axes.

    Where it is executed in float32 the weights themselves are computed in it, with errors that are
    not relative to them: so its roundings are not counted, and `arithmetic="executed"` refuses it.
    """
    full = net.full(x)
    if len(full) < 3 or not x.lead:
        raise net.refuse("an interpolation across the batch axis")
    count = len(full) - 2
    for axis in range(2, 2 + count):
        # The entries along this axis one after the other, the same for all others: weights of the
        # other axes add up to 1.
        shape = [full[axis], 1, *full[2:]]
        eye = torch.eye(full[axis], dtype=torch.float64)
        wide = [full[axis], 1, *(full[k] if k == axis else 1 for k in range(2, len(full)))]
        with torch.no_grad():
            out: Tensor = net.target(eye.reshape(wide).expand(shape), *args, **options)
        first: list[Any] = [0 if k != axis else slice(None) for k in range(1, len(full))]
        where = (slice(None), *first)
        x = _along(net, x, axis, out[where].T.contiguous())
    return x


def _along(net: Builder, x: Index, axis: int, weight: Tensor) -> Index:
    """A matrix `(out, in)` over one axis."""
    turned = net.move(torch.movedim, x, [axis, -1], {})
    shape = (*net.nodes[turned].shape[:-1], len(weight))
    found = net.add(Affine(Matrix(weight)), turned, shape=shape, lead=x.lead)
    moved: Index = net.move(torch.movedim, found, [-1, axis], {})
    return moved
