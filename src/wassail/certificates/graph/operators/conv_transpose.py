"""Transposed convolutions: what is known of a convolution, with its two directions exchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index, several
from wassail.certificates.graph.maps import Linear
from wassail.certificates.graph.operators.convolution import Conv, conv
from wassail.certificates.graph.operators.registry import spelled
from wassail.rounding import FLOOR
from wassail.threat import dual


@dataclass(frozen=True, eq=False)
class Transposed(Linear):
    """The transpose of a convolution; its input is the convolution's output."""

    conv: Conv

    def forward(self, *x: Tensor) -> Tensor:
        """The transpose of the convolution."""
        return self.conv.transpose(x[0])[0]

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """The convolution."""
        return (self.conv.forward(g),)

    @property
    def coefficients(self) -> Tensor:
        """The kernel."""
        return self.conv.weight

    def reweighted(self, coefficients: Tensor) -> Transposed:
        """Another kernel."""
        return Transposed(replace(self.conv, weight=coefficients))

    @property
    def terms(self) -> int:
        """Those of both directions."""
        return self.conv.terms

    @property
    def fan_in(self) -> int:
        """All entries of the kernel that one output may read."""
        weight = self.conv.weight
        return len(weight) // self.conv.groups * math.prod(weight.shape[2:])

    @property
    def roundings(self) -> int:
        """Of a sum of products and a bias."""
        return self.fan_in + 2

    @property
    def sliding(self) -> bool:
        """If the kernel is more than one pixel."""
        return self.conv.sliding

    def fold_before(self, factor: Tensor, shape: tuple[int, ...]) -> Transposed | None:
        """A factor of the convolution's output."""
        folded = self.conv.fold_after(factor, shape)
        return None if folded is None else Transposed(folded)

    def fold_after(self, factor: Tensor, shape: tuple[int, ...]) -> Transposed | None:
        """A factor of the convolution's input."""
        folded = self.conv.fold_before(factor, shape)
        return None if folded is None else Transposed(folded)

    def norm(self, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
        """That of the convolution in the dual norm."""
        return self.conv.norm(dual(norm), output, shape)

    def row_norms(self, s: float) -> Tensor:
        """One for each output; for s = inf the largest entry of the kernel."""
        weight = self.conv.weight
        if s == math.inf:
            return weight.abs().max()
        squares = self.reweighted(weight.square() + FLOOR[torch.float64])  # may underflow
        output = self.conv.forward(weight.new_zeros(1, *self.conv.shape)).shape[1:]
        return squares.forward(weight.new_ones(1, *output))[0].sqrt()


@spelled("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(
    net: Builder,
    x: Index,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Index:
    """Of lines, images and volumes; a line is an image of height 1."""
    shape = net.nodes[x].shape
    axes = weight.ndim - 2
    if len(shape) != axes + 1:
        raise net.refuse("a transposed convolution of tokens")
    steps = several(stride, axes)
    rim = several(padding, axes)
    more = several(output_padding, axes)
    spread = several(dilation, axes)
    size = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + o + 1
        for n, s, p, d, k, o in zip(shape[1:], steps, rim, spread, weight.shape[2:], more)
    )
    if axes == 1:
        line = net.move(torch.unsqueeze, x, [-2], {})
        kernel = weight[:, :, None]
        sizes = ((1, *steps), (0, *rim), (0, *more), groups, (1, *spread))
        image = conv_transpose(net, line, kernel, bias, *sizes)
        return net.move(torch.squeeze, image, [-2], {})  # type: ignore[no-any-return]
    output = (weight.shape[1] * groups, *size)
    turned = Transposed(Conv(weight, output, steps, rim, spread, groups))
    return net.affine(turned, None if bias is None else bias.reshape(-1, *[1] * axes), x, output)


@spelled("convolution")
def convolution(
    net: Builder,
    x: Index,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Index:
    """The operator that all convolutions are rewritten as."""
    if transposed:
        more = (output_padding, groups, dilation)
        return conv_transpose(net, x, weight, bias, stride, padding, *more)
    return conv(net, x, weight, bias, stride, padding, dilation, groups)
