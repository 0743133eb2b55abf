"""Linear maps of a network: value, transpose, magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from wassail.certificates.device import plain
from wassail.rounding import sized


class Linear(Protocol):
    """A linear map of one or several tensors `(m, *shape)`; the node adds its bias."""

    def forward(self, *x: Tensor) -> Tensor:
        """The map itself."""

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its transpose: one tensor for each input."""

    def magnitude(self) -> Linear:
        """The map with the absolute values of its weights: for intervals and rounding errors."""

    def to(self, device: torch.device) -> Linear:
        """The same map with its tensors on a device."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """`W x` over the last axis; weight `(out, in)`; most: the magnitudes that its entries are
    sums of, if they are sums.
    """

    weight: Tensor
    most: Tensor | None = None

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, ..., in) -> (m, ..., out)`."""
        return x[0] @ self.weight.T

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, ..., out) -> (m, ..., in)`."""
        return (g @ self.weight,)

    def magnitude(self) -> Matrix:
        """`|W|`."""
        return Matrix(self.weight.abs())

    def to(self, device: torch.device) -> Matrix:
        """On a device."""
        return Matrix(self.weight.to(device), moved_to(self.most, device))


def fan_in(map_: Linear) -> int:
    """Multiplications for one output."""
    if isinstance(map_, Matrix):
        return map_.weight.shape[1]
    return map_.weight[0].numel() if isinstance(map_, Conv) else 1


@dataclass(frozen=True, eq=False)
class Sizes:
    """A map of magnitudes >= 0, none of which is below `FAINT` unless it is 0: errors relative
    to it cover underflow, too.
    """

    map: Linear

    def forward(self, *x: Tensor) -> Tensor:
        """Magnitudes to magnitudes."""
        return sized(self.map.forward(*(sized(v) for v in x)))

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its transpose."""
        return tuple(sized(part) for part in self.map.transpose(sized(g)))

    def magnitude(self) -> Sizes:
        """Itself."""
        return self

    def to(self, device: torch.device) -> Sizes:
        """The same on another device."""
        return Sizes(self.map.to(device))


def rounding_map(map_: Linear) -> Sizes:
    """The map of magnitudes that rounding errors are relative to: the absolute weights, or what
    they were summed from.
    """
    match map_:
        case Matrix(weight, most):
            return Sizes(Matrix(sized(weight.abs() if most is None else most)))
        case Conv(weight):
            return Sizes(replace(map_, weight=sized(weight.abs())))
        case Scale(factor):
            return Sizes(Scale(sized(factor.abs())))
        case _:
            return Sizes(map_.magnitude())


@dataclass(frozen=True, eq=False)
class Conv:
    """A two-dimensional convolution; weight `(out, in / groups, height, width)`, shape: of the
    input.
    """

    weight: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, in, ., .) -> (m, out, ., .)`."""
        with plain(self.weight.device):
            return F.conv2d(
                x[0], self.weight, None, self.stride, self.padding, self.dilation, self.groups
            )

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, out, ., .) -> (m, in, ., .)`."""
        size = [len(g), *self.shape]
        with plain(self.weight.device):
            back = conv2d_input(  # type: ignore[no-untyped-call]
                size, self.weight, g, self.stride, self.padding, self.dilation, self.groups
            )
            return (back,)

    def magnitude(self) -> Conv:
        """The kernel's absolute values."""
        return replace(self, weight=self.weight.abs())

    def to(self, device: torch.device) -> Conv:
        """On a device."""
        return replace(self, weight=self.weight.to(device))


@dataclass(frozen=True, eq=False)
class Scale:
    """`factor x`, entry by entry; factor broadcasts against one sample."""

    factor: Tensor

    def forward(self, *x: Tensor) -> Tensor:
        """Same shape."""
        return x[0] * self.factor

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its own transpose."""
        return (g * self.factor,)

    def magnitude(self) -> Scale:
        """`|factor|`."""
        return Scale(self.factor.abs())

    def to(self, device: torch.device) -> Scale:
        """On a device."""
        return Scale(self.factor.to(device))


@dataclass(frozen=True, eq=False)
class Pick:
    """Entries moved, dropped or repeated: reshape, permute, slice, pad, expand. source: index
    of each entry, -1 for zero.
    """

    source: Tensor | None  # None: the same entries in the same order
    shape: tuple[int, ...]
    output: tuple[int, ...]

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, *shape) -> (m, *output)`."""
        flat = x[0].reshape(len(x[0]), -1)
        if self._taken is not None:
            flat = _entries(flat, *self._taken)
        return flat.reshape(-1, *self.output)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, *output) -> (m, *shape)`."""
        flat = g.reshape(len(g), -1)
        if self._given is not None:  # no entry is repeated: a transpose is a move, too
            flat = _entries(flat, *self._given)
        elif self.source is not None:
            size = math.prod(self.shape)
            where = torch.where(self.source < 0, size, self.source)
            flat = flat.new_zeros(len(g), size + 1).index_add(1, where, flat)[:, :size]
        return (flat.reshape(-1, *self.shape),)

    @cached_property
    def _inverse(self) -> Tensor | None:
        """Where each entry went, -1 for nowhere; None where one went to several places or all
        stayed.
        """
        if self.source is None:
            return None
        used = (self.source >= 0).nonzero()[:, 0]
        inverse = torch.full((math.prod(self.shape),), -1, device=self.source.device)
        inverse[self.source[used]] = used
        return inverse if int((inverse >= 0).sum()) == len(used) else None

    @cached_property
    def _taken(self) -> tuple[Tensor, bool] | None:
        """What `_entries` needs to know of the source: asked once, since a device makes the
        host wait for it.
        """
        return None if self.source is None else _padded(self.source, math.prod(self.shape))

    @cached_property
    def _given(self) -> tuple[Tensor, bool] | None:
        """The same for the way back."""
        return None if self._inverse is None else _padded(self._inverse, math.prod(self.output))

    @cached_property
    def repeats(self) -> int:
        """How often the entry that is picked most often is picked."""
        if self.source is None:
            return 1
        return int(torch.bincount(self.source + 1, minlength=2)[1:].max())

    def magnitude(self) -> Pick:
        """Itself."""
        return self

    def to(self, device: torch.device) -> Pick:
        """On a device."""
        return replace(self, source=moved_to(self.source, device))


@dataclass(frozen=True, eq=False)
class Average:
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

    def magnitude(self) -> Average:
        """Itself."""
        return self

    def to(self, device: torch.device) -> Average:
        """Itself: it holds no tensor."""
        return self


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of several tensors of one shape."""

    count: int

    def forward(self, *x: Tensor) -> Tensor:
        """Same shape."""
        return reduce(torch.add, x)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """The same to each."""
        return (g,) * self.count

    def magnitude(self) -> Sum:
        """Itself."""
        return self

    def to(self, device: torch.device) -> Sum:
        """Itself: it holds no tensor."""
        return self


@dataclass(frozen=True, eq=False)
class Concat:
    """Concatenation along an axis of the batch; sizes: of the inputs there."""

    axis: int
    sizes: tuple[int, ...]

    def forward(self, *x: Tensor) -> Tensor:
        """Joined."""
        return torch.cat(x, self.axis)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Cut again."""
        return torch.split(g, list(self.sizes), self.axis)

    def magnitude(self) -> Concat:
        """Itself."""
        return self

    def to(self, device: torch.device) -> Concat:
        """Itself: it holds no tensor."""
        return self


def _padded(where: Tensor, size: int) -> tuple[Tensor, bool]:
    """Indices with `size` for -1, and whether there is any."""
    gone = where < 0
    return torch.where(gone, size, where), bool(gone.any())


def _entries(flat: Tensor, where: Tensor, gone: bool) -> Tensor:
    """Entries `where` of the rows `(m, n)`, 0 for n; gathering is the fastest way to move them
    here.
    """
    return (F.pad(flat, (0, 1)) if gone else flat).gather(1, where.expand(len(flat), -1))


def moved_to(values: Tensor | None, device: torch.device) -> Tensor | None:
    """The tensor on this device; None stays None."""
    return None if values is None else values.to(device)
