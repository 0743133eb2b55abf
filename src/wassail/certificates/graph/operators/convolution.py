"""Convolutions of images, of lines, which are images of height 1, and of volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv3d_input

from wassail.certificates import clock
from wassail.certificates.device import plain
from wassail.certificates.graph.builder import Builder, Index, several
from wassail.certificates.graph.maps import Linear, Turnable, Window, dense_norm, laid_out
from wassail.certificates.graph.operators.registry import spelled
from wassail.rounding import FLOOR, UNIT

# the spectral norm of a convolution is computed from its matrix up to this many inputs or outputs
DENSE = 1024
GROUP = 2**26  # operations of one factor of all frequencies that are worked on at once


@dataclass(frozen=True, eq=False)
class Conv(Linear):
    """A convolution over two or three axes; weight `(out, in / groups, *kernel)`, shape: of the
    input.
    """

    weight: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, in, ...) -> (m, out, ...)`."""
        move = F.conv2d if self._axes == 2 else F.conv3d
        options = (self.stride, self.padding, self.dilation, self.groups)
        with plain(self.weight.device):
            return move(x[0], self.weight, None, *options)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, out, ...) -> (m, in, ...)`."""
        move: Any = conv2d_input if self._axes == 2 else conv3d_input
        options = (self.stride, self.padding, self.dilation, self.groups)
        with plain(self.weight.device):
            return (move([len(g), *self.shape], self.weight, g, *options),)

    @property
    def _axes(self) -> int:
        return self.weight.ndim - 2

    @property
    def coefficients(self) -> Tensor:
        """The kernel."""
        return self.weight

    def reweighted(self, coefficients: Tensor) -> Conv:
        """Another kernel."""
        return replace(self, weight=coefficients)

    @property
    def terms(self) -> int:
        """Of an output, and of an input, which all output channels of its group may read."""
        out, per_group, *kernel = self.weight.shape
        return 4 + math.prod(kernel) * max(per_group, out)

    @property
    def back_terms(self) -> int:
        """Of an input: with a stride only some entries of a kernel meet it."""
        met = (
            -(-size // (step // math.gcd(step, apart)))
            for size, step, apart in zip(self.weight.shape[2:], self.stride, self.dilation)
        )
        return 4 + len(self.weight) // self.groups * math.prod(met)

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

    def turned(self, dtype: torch.dtype) -> Turnable:
        """The fastest way for this kernel."""
        return Turned(self, dtype) if self._axes == 2 else super().turned(dtype)

    def fold_before(self, factor: Tensor, shape: tuple[int, ...]) -> Conv | None:
        """If all entries of a channel have one factor."""
        own = _one_each(factor, shape)
        if own is None:
            return None
        per_group = own.reshape(self.groups, -1).repeat_interleave(
            len(self.weight) // self.groups, 0
        )
        return replace(self, weight=self.weight * per_group.reshape(*per_group.shape, *self._ones))

    def fold_after(self, factor: Tensor, shape: tuple[int, ...]) -> Conv | None:
        """If all entries of a channel have one factor."""
        own = _one_each(factor, shape)
        if own is None:
            return None
        return replace(self, weight=own.reshape(-1, 1, *self._ones) * self.weight)

    @property
    def _ones(self) -> list[int]:
        return [1] * self._axes

    def norm(self, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
        """The true operator norm: for r = 1 and inf the longest column and row, for r = 2 the
        largest singular value over the frequencies of a torus large enough that the zero-padded
        convolution is a part of the circular one. Of large volumes Schur's bound for r = 2.
        """
        found = super().norm(norm, shape, output)
        if norm != 2:
            return found
        if min(math.prod(shape), math.prod(output)) <= DENSE:
            return min(found, dense_norm(self, shape, output))
        return min(found, _spectral(self, output)) if self._axes == 2 else found

    def row_norms(self, s: float) -> Tensor:
        """One for each output: at the rim a part of the kernel."""
        if s == math.inf:
            return self.weight.abs().flatten(1).amax(1).reshape(-1, *self._ones)
        squares = replace(self, weight=self.weight.square() + FLOOR[torch.float64])  # may underflow
        return squares.forward(self.weight.new_ones(1, *self.shape))[0].sqrt()

    def longest_column(self, output: tuple[int, ...]) -> float:
        """Of an input pixel, with all that read it; inf after an overflow."""
        squares = self.reweighted(self.weight.square() + FLOOR[torch.float64])  # may underflow
        most = float(squares.transpose(self.weight.new_ones(1, *output))[0].max())
        found = math.sqrt(most * (1 + (self.weight.numel() + 16) * UNIT))
        return found if math.isfinite(found) else math.inf

    @property
    def window(self) -> Window | None:
        """Of images, if all channels read all."""
        if self.groups > 1 or self._axes != 2:
            return None
        return Window(self.weight, self.stride, self.padding, self.dilation, self.shape)


def _one_each(factor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The factor of each channel, if all its entries have one."""
    flat = factor.expand(shape).flatten(1)
    return flat[:, 0] if torch.equal(flat, flat[:, :1].expand_as(flat)) else None


class Turned:
    """The transpose in another floating-point type, for coefficient vectors with channels last."""

    def __init__(self, conv: Conv, dtype: torch.dtype) -> None:
        self.conv = conv
        # With stride 1 the transpose is a convolution with the kernel turned around, and faster as
        # that.
        size = conv.weight.shape[2:]
        self.plain = (
            conv.stride == (1, 1)
            and conv.groups == 1
            and all(p <= k - 1 for p, k in zip(conv.padding, size))
        )
        weight = conv.weight.flip(2, 3).transpose(0, 1) if self.plain else conv.weight
        self.weight = laid_out(weight.to(dtype))
        # Patches that do not overlap (of a transformer) are a matrix product, which is much faster
        # in float32.
        moves = (conv.stride, conv.padding, conv.dilation, conv.groups)
        self.patches = moves == (tuple(size), (0, 0), (1, 1), 1) and not self.plain

    @cached_property
    def ahead(self) -> Tensor:
        """The kernel of the map itself."""
        return laid_out(self.conv.weight.to(self.weight.dtype)) if self.plain else self.weight

    @cached_property
    def stamps(self) -> Tensor:
        """The kernel of each output channel as a row, channels last."""
        return self.conv.weight.permute(0, 2, 3, 1).flatten(1).to(self.weight.dtype)

    def forward(self, *x: Tensor) -> Tensor:
        """`(R, *shape) -> (R, *output)`."""
        m = self.conv
        with plain(x[0].device):
            return F.conv2d(x[0], self.ahead, None, m.stride, m.padding, m.dilation, m.groups)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(R, *output) -> (R, *shape)`."""
        m = self.conv
        if self.patches:
            return (_unpatched(g, self.stamps, m),)
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
            options = (m.stride, m.padding, rest, m.groups, m.dilation)
            return (F.conv_transpose2d(g, self.weight, None, *options),)

    @property
    def matrix(self) -> None:
        """It is none."""
        return None

    def rows(self, place: Tensor, output: tuple[int, ...]) -> Tensor | None:
        """The transpose of unit vectors: the kernel of an entry's channel, where it stands.

        place: entries `(R,)` of the output.
        """
        m = self.conv
        if m.groups > 1 or len(output) != 3:
            return None
        channels, tall, wide = m.shape
        _, _, height, width = m.weight.shape
        down, across = output[1:]
        channel = place // (down * across)
        first = place // across % down * m.stride[0] - m.padding[0]
        second = place % across * m.stride[1] - m.padding[1]
        y = first[:, None] + m.dilation[0] * torch.arange(height, device=place.device)
        x = second[:, None] + m.dilation[1] * torch.arange(width, device=place.device)
        inside = ((y >= 0) & (y < tall))[:, :, None] & ((x >= 0) & (x < wide))[:, None]
        where = (y.clamp(0, tall - 1) * wide)[:, :, None] + x.clamp(0, wide - 1)[:, None]
        where = where[..., None] * channels + torch.arange(channels, device=place.device)
        stamp = self.stamps[channel].reshape(len(place), height, width, channels)
        stamp = torch.where(inside[..., None], stamp, 0.0)  # what stands in the padding adds 0
        flat = stamp.new_zeros(len(place), tall * wide * channels)
        flat.scatter_add_(1, where.reshape(len(place), -1), stamp.reshape(len(place), -1))
        return flat.reshape(-1, tall, wide, channels).permute(0, 3, 1, 2)


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


def _spectral(conv: Conv, output: tuple[int, ...]) -> float:
    """An upper bound on the spectral norm of a zero-padded strided convolution (Sedghi et al. 2019
    for stride 1).

    A stride s makes s x s phases of the input channels of their own, so what is left is a
    convolution of stride 1. On a torus of the output's size plus the kernel's it is circular, block
    diagonal in the frequencies, and contains the padded one.
    """
    out, per_group, height, width = conv.weight.shape
    tall, wide = ((k - 1) * d + 1 for k, d in zip((height, width), conv.dilation))
    spread = conv.weight.new_zeros(out, per_group, tall, wide)
    spread[:, :, :: conv.dilation[0], :: conv.dilation[1]] = conv.weight
    down, across = conv.stride
    rows = -(-tall // down)
    cols = -(-wide // across)
    padded = conv.weight.new_zeros(out, per_group, rows * down, cols * across)
    padded[:, :, :tall, :wide] = spread
    phases = padded.reshape(out, per_group, rows, down, cols, across)
    phases = phases.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    torus = (output[1] + rows, output[2] + cols)
    best = 0.0
    for group in torch.split(phases, out // conv.groups):
        # Groups do not mix: the norm is the largest of theirs.
        # Real kernels: half of the frequencies are enough. The smaller Gram matrix has the squares
        # of the singular values.
        spectrum = torch.fft.rfft2(group, torus).permute(2, 3, 0, 1).flatten(0, 1)
        spectrum = spectrum if spectrum.shape[1] <= spectrum.shape[2] else spectrum.mT
        top = _largest_eigenvalue(spectrum)
        # Squares that underflow.
        lost = 8 * group.numel() ** 2 * FLOOR[torch.float64] if bool(group.any()) else 0.0
        error = 8 * (spectrum.shape[1] + spectrum.shape[2] + 16) * UNIT
        best = max(best, math.sqrt(top * (1 + error) + lost))
    return best


def _largest_eigenvalue(spectrum: Tensor) -> float:
    """The largest of `A A^H` for matrices A `(F, m, n)`, not all of them at once."""
    top = 0.0
    for part in torch.split(spectrum, max(1, GROUP // spectrum.shape[1] ** 3)):
        clock.look()
        top = max(top, float(torch.linalg.eigvalsh(part @ part.mH)[:, -1].max()))
    return top


def rim_of(
    net: Builder, x: Index, padding: str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Index, list[int]]:
    """A padding in words as numbers, "valid" or "same"; where "same" is not symmetric, zeros are
    put around x first, one more at the end.
    """
    reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
    if padding == "valid":
        return x, [0] * len(reach)
    if not any(r % 2 for r in reach):
        return x, [r // 2 for r in reach]
    sides = [side for r in reversed(reach) for side in (r // 2, r - r // 2)]
    return net.move(F.pad, x, [sides], {}), [0] * len(reach)


@spelled("conv1d", "conv2d", "conv3d")
def conv(
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
    axes = weight.ndim - 2
    if len(net.nodes[x].shape) != axes + 1:
        raise net.refuse("a convolution of tokens")
    steps = several(stride, axes)
    spread = several(dilation, axes)
    rim: Any = padding if isinstance(padding, str) else several(padding, axes)
    if axes == 1:
        rim = rim if isinstance(rim, str) else (0, *rim)
        line = net.move(torch.unsqueeze, x, [-2], {})
        kernel = weight[:, :, None]
        image = conv(net, line, kernel, bias, (1, *steps), rim, (1, *spread), groups)
        return net.move(torch.squeeze, image, [-2], {})  # type: ignore[no-any-return]
    if isinstance(rim, str):
        x, rim = rim_of(net, x, rim, weight.shape[2:], spread)
    shape = net.nodes[x].shape
    map_ = Conv(weight, shape, steps, tuple(rim), spread, groups)
    output = tuple(map_.forward(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
    return net.affine(map_, None if bias is None else bias.reshape(-1, *[1] * axes), x, output)
