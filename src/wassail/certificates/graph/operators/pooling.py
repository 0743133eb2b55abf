"""Average and max poolings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index, parted, several, window_of
from wassail.certificates.graph.graph import Affine
from wassail.certificates.graph.maps import FEW, Call, Linear, Pick
from wassail.certificates.graph.operators.registry import spelled


@dataclass(frozen=True, eq=False)
class Average(Linear):
    """An average pooling or a mean or sum over axes: a linear function with weights >= 0."""

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def forward(self, *x: Tensor) -> Tensor:
        """Whatever the function does."""
        return self.function(x[0])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """By automatic differentiation: the derivative of a linear function does not depend on
        the point.
        """
        with torch.enable_grad():
            x = g.new_zeros(len(g), *self.shape, requires_grad=True)
            return torch.autograd.grad(self.function(x), x, g, create_graph=g.requires_grad)

    @property
    def terms(self) -> int:
        """All entries of the input, at most."""
        return 4 + math.prod(self.shape)


@spelled("avg_pool2d", "adaptive_avg_pool2d", "mean", "sum", "avg_pool1d", "adaptive_avg_pool1d")
def average(net: Builder, x: Index, *args: Any, **options: Any) -> Index:
    """Whatever torch does, as a linear map."""
    # Everything here is float64, whatever the program sums in.
    args = tuple(torch.float64 if isinstance(v, torch.dtype) else v for v in args)
    for key, value in options.items():
        options[key] = torch.float64 if isinstance(value, torch.dtype) else value
    target = net.target

    def one(x: Tensor) -> Tensor:
        return target(x, *args, **options)  # type: ignore[no-any-return]

    shape = net.nodes[x].shape
    full = net.full(x)
    ones = one(torch.ones(full, dtype=torch.float64))
    output = tuple(ones.shape)
    sign = -1.0 if bool((ones < 0).any()) else 1.0  # a divisor may be negative
    lead, inner = parted(output)
    # With a leading axis of length 1 the operation sees a batch there, and else one sample at a
    # time.
    every = one if x.lead else torch.vmap(one)

    def function(x: Tensor) -> Tensor:
        return sign * every(x).reshape(len(x), *inner)

    try:
        good = function(torch.ones(3, *shape, dtype=torch.float64)).shape == (3, *inner)
    except RuntimeError:
        good = False
    if not good or net.single(x):
        raise net.refuse("an average over the batch axis")
    whole = Average(function, shape)
    count = window_of(net.name, full, output, list(args), options)
    calls = (Call(whole, None, FEW + count),)
    mean = net.add(Affine(whole), x, shape=inner, calls=calls, lead=lead)
    return mean if sign > 0 else net.negative(mean)


@spelled("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    net: Builder,
    x: Index,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Index:
    """Of lines, images and volumes."""
    shape = net.nodes[x].shape
    axes = int(net.name[8])
    if len(shape) != axes + 1:
        raise net.refuse("a max pooling of tokens")
    with torch.no_grad():
        zeros = torch.zeros(1, *shape, dtype=torch.float64)
        pool = net.target(zeros, kernel, stride, padding, dilation, ceil_mode)
    output = tuple((pool[0] if isinstance(pool, tuple) else pool).shape[1:])
    size = several(kernel, axes)
    steps = several(stride, axes) if stride else size
    geometry = zip(shape[1:], output[1:], size, steps, several(padding, axes))
    sides = []
    for (n, out, k, step, rim), spread in zip(geometry, several(dilation, axes)):
        entry = torch.arange(out) * step - rim + torch.arange(k)[:, None] * spread
        sides.append(torch.where((entry >= 0) & (entry < n), entry, -1))
    return largest(net, x, sides, output)


@spelled("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_indices(net: Builder, x: Index, *args: Any) -> list[Any]:
    """The same, without the indices."""
    return [max_pool(net, x, *args), None]


@spelled("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(net: Builder, x: Index, output_size: Any) -> list[Any]:
    """Windows that cover the axis: from `floor(i n / m)` to `ceil((i + 1) n / m)`."""
    shape = net.nodes[x].shape
    axes = int(net.name[17])
    if len(shape) != axes + 1:
        raise net.refuse("a max pooling of tokens")
    sizes = several(output_size, axes)
    sides = []
    for n, m in zip(shape[1:], sizes):
        start = torch.arange(m) * n // m
        end = -(-(torch.arange(m) + 1) * n // m)
        entry = start + torch.arange(int((end - start).max()))[:, None]
        sides.append(torch.where(entry < end, entry, -1))
    return [largest(net, x, sides, (shape[0], *sizes)), None]


def largest(net: Builder, x: Index, sides: list[Tensor], output: tuple[int, ...]) -> Index:
    """The largest entry of each window: a tree of maxima, entry by entry of the window. Where a
    window leaves the image it looks at its first entry again.

    Args:
        net: the graph so far.
        x: channels first.
        sides: for each axis `(k, m)`: the k entries of each of m windows, -1 outside.
        output: the shape of the result.
    """
    shape = net.nodes[x].shape
    whole = torch.zeros(1, *[1] * len(sides), dtype=torch.int64)
    inside = torch.ones_like(whole, dtype=torch.bool)
    for axis, side in enumerate(sides):  # `(K, m_1, ..., m_axis, 1, ..., 1)`
        wide = [len(side), *(len(side[0]) if k == axis else 1 for k in range(len(sides)))]
        entry = side.reshape(1, *wide)
        stride = math.prod(shape[axis + 2 :])
        whole = (whole[:, None] + stride * entry).flatten(0, 1)
        inside = (inside[:, None] & (entry >= 0)).flatten(0, 1)
    channels = (torch.arange(shape[0]) * math.prod(shape[1:])).reshape(-1, *[1] * len(sides))
    picks = torch.where(inside[:, None], whole[:, None] + channels, -1)
    stacked = picks.expand(-1, *output)
    outside = stacked < 0
    known = stacked.gather(0, (~outside).int().argmax(0, keepdim=True))  # some entry that is inside
    filled = torch.where(outside, known, stacked)
    picked = [Pick(s.flatten(), shape, output) for s in filled]
    parts = [net.add(Affine(pick), x, shape=output, calls=()) for pick in picked]
    if outside.any():
        # One after the other, so that a stand-in, which cannot win, can be left out of its race.
        best = parts[0]
        for part, entry, out in zip(parts[1:], stacked[1:], outside[1:]):
            races = ~(out | (outside[0] & (entry == known[0])))
            race = net.exactly(net.difference(part, best), races.double(), None)
            best = net.sum([best, net.relu(race)], exact=True)
        return best
    while len(parts) > 1:
        pairs = [net.larger(a, b) for a, b in zip(parts[::2], parts[1::2])]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]
