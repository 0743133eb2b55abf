"""Average and max poolings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.graph.builder import Builder, Index, lead_of
from wassail.certificates.graph.execution import FEW, Step
from wassail.certificates.graph.fold import pair_of, window_of
from wassail.certificates.graph.graph import Affine, Node
from wassail.certificates.graph.maps import Linear, Pick
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
    lead = lead_of(output)
    # With a leading axis of length 1 the operation sees a batch there, and else one sample at a
    # time.
    every = one if x.lead else torch.vmap(one)

    def function(x: Tensor) -> Tensor:
        return sign * every(x).reshape(len(x), *output[lead:])

    try:
        good = function(torch.ones(3, *shape, dtype=torch.float64)).shape == (3, *output[lead:])
    except RuntimeError:
        good = False
    if not good:
        raise net.refuse("an average over the batch axis")
    whole = Average(function, shape)
    count = window_of(net.name, full, output, list(args), options)
    steps = (Step(whole, None, FEW + count),)
    mean = net.add(Node((x,), output[lead:], net.place, Affine(whole), steps=steps), lead)
    return mean if sign > 0 else net.negative(mean)


@spelled("max_pool2d")
def max_pool2d(
    net: Builder,
    x: Index,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Index:
    """Entry by entry of the window: a tree of maxima. Where a window leaves the image it
    looks at its first entry again.
    """
    shape = net.nodes[x].shape
    size = math.prod(net.nodes[x].shape)
    if len(shape) != 3:
        raise net.refuse("a max pooling of tokens")
    height, width = pair_of(kernel)
    (up, left), (down, across), spread = (
        pair_of(padding),
        pair_of(stride or kernel),
        pair_of(dilation),
    )
    pool = F.max_pool2d(
        torch.zeros(1, *shape), (height, width), (down, across), (up, left), spread, ceil_mode
    )
    output = tuple(pool.shape[1:])
    index = torch.arange(size).reshape(shape)
    picks: list[Tensor] = []
    for i in range(height):
        for j in range(width):
            row = torch.arange(output[1]) * down - up + i * spread[0]
            col = torch.arange(output[2]) * across - left + j * spread[1]
            inside = ((row >= 0) & (row < shape[1]))[:, None] & ((col >= 0) & (col < shape[2]))
            entry = index[:, row.clamp(0, shape[1] - 1)][:, :, col.clamp(0, shape[2] - 1)]
            picks.append(torch.where(inside, entry, -1))
    stacked = torch.stack(picks)
    outside = stacked < 0
    known = stacked.gather(0, (~outside).int().argmax(0, keepdim=True))  # some entry that is inside
    filled = torch.where(outside, known, stacked)
    picked = [Pick(s.flatten(), shape, output) for s in filled]
    parts = [
        net.add(Node((x,), output, net.place, Affine(pick), steps=()), x.lead) for pick in picked
    ]
    if (
        outside.any()
    ):  # one after the other, so that a stand-in, which cannot win, can be left out of its race
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


@spelled("max_pool2d_with_indices")
def max_pool2d_with_indices(net: Builder, *args: Any) -> list[Any]:
    """The same, without the indices."""
    return [max_pool2d(net, *args), None]
