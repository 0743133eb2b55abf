"""Convolutions of lines, which are images of height 1, and of volumes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv3d_input

from wassail.certificates.device import plain
from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.fold import several
from wassail.certificates.graph.maps import Linear, dense_norm
from wassail.certificates.graph.operators.convolution import DENSE, conv2d, rim_of
from wassail.certificates.graph.operators.registry import spelled
from wassail.rounding import FLOOR


@dataclass(frozen=True, eq=False)
class Conv3d(Linear):
    """A three-dimensional convolution; weight `(out, in / groups, depth, height, width)`, shape: of
    the input.
    """

    weight: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, in, ., ., .) -> (m, out, ., ., .)`."""
        options = (self.stride, self.padding, self.dilation, self.groups)
        with plain(self.weight.device):
            return F.conv3d(x[0], self.weight, None, *options)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, out, ., ., .) -> (m, in, ., ., .)`."""
        options = (self.stride, self.padding, self.dilation, self.groups)
        with plain(self.weight.device):
            shape = [len(g), *self.shape]
            back = conv3d_input(shape, self.weight, g, *options)  # type: ignore[no-untyped-call]
            return (back,)

    @property
    def coefficients(self) -> Tensor:
        """The kernel."""
        return self.weight

    def reweighted(self, coefficients: Tensor) -> Conv3d:
        """Another kernel."""
        return replace(self, weight=coefficients)

    @property
    def terms(self) -> int:
        """Of an output, and of an input, which all output channels of its group may read."""
        out, per_group, *kernel = self.weight.shape
        return 4 + math.prod(kernel) * max(per_group, out)

    @property
    def fan_in(self) -> int:
        """The entries of one kernel."""
        return self.weight[0].numel()

    @property
    def roundings(self) -> int:
        """Of a sum of products and a bias."""
        return self.fan_in + 2

    @property
    def sliding(self) -> bool:
        """If the kernel is more than one entry."""
        return max(self.weight.shape[2:]) > 1

    def fold_before(self, factor: Tensor, shape: tuple[int, ...]) -> Conv3d | None:
        """If all entries of a channel have one factor."""
        flat = factor.expand(shape).flatten(1)
        if not torch.equal(flat, flat[:, :1].expand_as(flat)):
            return None
        count = len(self.weight) // self.groups
        per_group = flat[:, 0].reshape(self.groups, -1).repeat_interleave(count, 0)
        return replace(self, weight=self.weight * per_group[:, :, None, None, None])

    def fold_after(self, factor: Tensor, shape: tuple[int, ...]) -> Conv3d | None:
        """If all entries of a channel have one factor."""
        flat = factor.expand(shape).flatten(1)
        if not torch.equal(flat, flat[:, :1].expand_as(flat)):
            return None
        return replace(self, weight=flat[:, 0, None, None, None, None] * self.weight)

    def norm(self, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
        """The longest row and column; for r = 2 the singular values of a small map as well."""
        found = super().norm(norm, shape, output)
        if norm == 2 and min(math.prod(shape), math.prod(output)) <= DENSE:
            return min(found, dense_norm(self, shape, output))
        return found

    def row_norms(self, s: float) -> Tensor:
        """One for each output: at the rim a part of the kernel."""
        if s == math.inf:
            return self.weight.abs().flatten(1).amax(1)[:, None, None, None]
        squares = replace(self, weight=self.weight.square() + FLOOR[torch.float64])  # may underflow
        return squares.forward(self.weight.new_ones(1, *self.shape))[0].sqrt()


@spelled("conv1d")
def conv1d(
    net: Builder,
    x: Index,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Index:
    """An image of height 1."""
    if len(net.nodes[x].shape) != 2:
        raise net.refuse("a convolution of tokens")
    rim = padding if isinstance(padding, str) else (0, *several(padding, 1))
    line = net.move(torch.unsqueeze, x, [-2], {})
    wide = (1, *several(stride, 1))
    spread = (1, *several(dilation, 1))
    image = conv2d(net, line, weight[:, :, None], bias, wide, rim, spread, groups)
    flat: Index = net.move(torch.squeeze, image, [-2], {})
    return flat


@spelled("conv3d")
def conv3d(
    net: Builder,
    x: Index,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Index:
    """One or several groups, any stride, padding and dilation."""
    shape = net.nodes[x].shape
    if len(shape) != 4:
        raise net.refuse("a convolution of tokens")
    spread = several(dilation, 3)
    if isinstance(padding, str):
        x, padding = rim_of(net, x, padding, weight.shape[2:], spread)
        shape = net.nodes[x].shape
    conv = Conv3d(weight, shape, several(stride, 3), several(padding, 3), spread, groups)
    output = tuple(conv.forward(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
    return net.affine(conv, None if bias is None else bias[:, None, None, None], x, output)
