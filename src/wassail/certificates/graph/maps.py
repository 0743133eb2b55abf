"""Linear maps: what every map tells of itself, and those that everything is made of.

Matrices, scales, moves, sums and concatenations stand here, since the graph itself is built with
them, and the operations that a model executes for a node. Convolutions and poolings stand in
`operators/` with their spelling.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.device import HOST
from wassail.certificates.graph.matrix_norms import UP, matrix_norm
from wassail.rounding import FLOOR, UNIT, shifted, sized

# Roundings of an operation with a constant, entry by entry: of it, of its inverse, of the result,
# and one more.
FEW = 4
NORM = 16  # roundings of a frozen batch norm, whichever way it is computed
KEPT_UP_TO = 2**18  # weights of a map that keeps what is made of them: 5 MB
ROOM = 1 + 2.0**-40  # more than the roundings of a few products and of a norm take away
_T = TypeVar("_T")


class Window(NamedTuple):
    """A convolution of images: its kernel `(out, in, height, width)`, and how it moves."""

    weight: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    shape: tuple[int, ...]


class Linear(ABC):
    """A linear map of one or several tensors `(m, *shape)`; the node adds its bias.

    A map gives its value and its transpose. If it has weights it gives them as `coefficients` and
    says how to put others in their place (`reweighted`); if not, all its weights are >= 0. From
    these everything else follows; a map overrides what it knows better.
    """

    @abstractmethod
    def forward(self, *x: Tensor) -> Tensor:
        """The map itself."""

    @abstractmethod
    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its transpose: one tensor for each input."""

    @property
    def coefficients(self) -> Tensor | None:
        """The weights that the map is linear in; None: it has none, and no entry is negative."""
        return None

    def reweighted(self, coefficients: Tensor) -> Linear:
        """The map with other weights of the same shape."""
        raise TypeError(f"{type(self).__name__} has no weights")

    @property
    def terms(self) -> int:
        """At least 4 more than the terms of one entry of the map, and of its transpose."""
        return 5

    @property
    def back_terms(self) -> int:
        """At least 4 more than the terms of one entry of the transpose alone."""
        return self.terms

    @property
    def fan_in(self) -> int:
        """Multiplications for one output."""
        return 1

    @property
    def roundings(self) -> int:
        """How often a term of one output and of its bias is rounded where a model executes it."""
        return FEW

    @property
    def sliding(self) -> bool:
        """Whether it is a kernel of more than one entry, which some libraries compute by another
        formula.
        """
        return False

    @property
    def copies(self) -> bool:
        """Whether a coefficient vector goes through the transpose as it is, copied."""
        return False

    @property
    def moves(self) -> bool:
        """Whether every entry of the output is one of the input, or 0."""
        return False

    @property
    def in_place(self) -> bool:
        """Whether an entry of the output is that of the input with the same number, or of several
        inputs their sum.
        """
        return False

    @property
    def joins(self) -> bool:
        """Whether the output is its inputs side by side."""
        return False

    @property
    def matrix(self) -> Tensor | None:
        """Its weights, if it is a matrix that acts on the last axis."""
        return None

    @property
    def window(self) -> Window | None:
        """What it reads, if it is a convolution of images in one group."""
        return None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that say where it computes."""
        return [] if self.coefficients is None else [self.coefficients]

    def magnitude(self) -> Linear:
        """The map with the absolute values of its weights: for intervals and rounding errors."""
        return self if self.coefficients is None else self.reweighted(self.coefficients.abs())

    def rough(self) -> Sizes:
        """The map of magnitudes that rounding errors are relative to: the absolute weights, or what
        they were summed from.
        """
        if self.coefficients is None:
            return Sizes(self)
        return Sizes(self.reweighted(sized(self.coefficients.abs())))

    def signed(self) -> tuple[Linear, Linear | None]:
        """`W = W+ - W-`, both >= 0; None where `W-` is 0, as for moved entries, sums, averages."""
        weight = self.coefficients
        if weight is None:
            return self, None
        return self.reweighted(weight.clamp(min=0)), self.reweighted((-weight).clamp(min=0))

    def rows(self, place: Tensor, output: tuple[int, ...]) -> Tensor | None:
        """Its rows for some entries of the output, `(R,) -> (R, *shape)`: the transpose of unit
        vectors without a product; None where a product is as good. output: the shape of that.
        """
        return None

    def turned(self, dtype: torch.dtype) -> Turnable:
        """What computes the transpose in another floating-point type."""
        return self if self.coefficients is None else self.reweighted(self.coefficients.to(dtype))

    def moved_by(self, exponent: int) -> Linear:
        """The weights times a power of two, or an `ArithmeticError`: not exact."""
        return self.reweighted(exactly_shifted(self._weights, exponent))

    def fold_before(self, factor: Tensor, shape: tuple[int, ...]) -> Linear | None:
        """`map(factor x)` as one map, if it is one of the same kind; shape: of the input."""
        return None

    def fold_after(self, factor: Tensor, shape: tuple[int, ...]) -> Linear | None:
        """`factor map(x)` as one map, if it is one of the same kind; shape: of the output."""
        return None

    def norm(self, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
        """An upper bound on `||map||_{r -> r}` for one sample of shape `shape -> output`.

        The longest row for r = inf, the longest column for r = 1, and for r = 2 the root of their
        product (Schur's test), which is exact for moved entries and poolings without overlap.
        """
        rows, columns = self.row_and_column(shape, output)
        if norm == 2:
            return math.sqrt(rows * columns) * UP
        return (rows if norm == math.inf else columns) * (1 if self.moves or self.copies else UP)

    def row_and_column(
        self, shape: tuple[int, ...], output: tuple[int, ...]
    ) -> tuple[float, float]:
        """The largest sum of magnitudes in a row and in a column, up to rounding."""
        size = self.magnitude()
        device = self.tensors[0].device if self.tensors else HOST
        one = torch.ones(1, dtype=torch.float64, device=device)
        rows = float(size.forward(one.expand(1, *shape).clone()).max())
        columns = float(size.transpose(one.expand(1, *output).clone())[0].max())
        return rows, columns

    def fewer(self, count: int) -> Linear | None:
        """The map of `count` of its inputs where the others are 0; None if each has a place of its
        own.
        """
        return None

    def row_norms(self, s: float) -> Tensor | None:
        """Upper bounds on the s-norms of its rows, one for each output, broadcasting against one
        sample; None: not known.
        """
        return None

    def longest_column(self, output: tuple[int, ...]) -> float | None:
        """`||map||_{1 -> 2}`, the length of the longest column, from above, with room for a product
        and a sum; None: not known. output: the shape of one sample.
        """
        return None

    def to(self, device: torch.device) -> Linear:
        """The same map with its tensors on a device."""
        return self if self.coefficients is None else self.reweighted(self.coefficients.to(device))

    @property
    def _weights(self) -> Tensor:
        assert self.coefficients is not None
        return self.coefficients

    @cached_property
    def _derived(self) -> dict[object, Any]:
        """What was made of the map, which does not change."""
        return {}

    def kept(self, name: object, make: Callable[[], _T], small: bool = False) -> _T:
        """What `make` returns: made once if the map has few weights or if the result is small, and
        kept with the map.
        """
        weight = self.coefficients
        if not small and (weight is None or weight.numel() > KEPT_UP_TO):
            return make()
        if name not in self._derived:
            self._derived[name] = make()
        found: _T = self._derived[name]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """What it was made of alone: the rest is made again."""
        return {key: value for key, value in self.__dict__.items() if key != "_derived"}


@dataclass(frozen=True, eq=False)
class Call:
    """One executed operation, `map(inputs) + bias`, in which every term is rounded at most
    `roundings` times; 0: it is exact.

    bias: magnitudes of what is added, broadcasts against one sample; noise: how far constants are
    from the type's own numbers.
    """

    map: Linear
    bias: Tensor | None = None
    roundings: int = 0
    noise: Tensor | None = None

    @property
    def sliding(self) -> bool:
        """As of the map."""
        return self.map.sliding

    def to(self, device: torch.device) -> Call:
        """The same with its tensors on a device."""
        bias, noise = (None if v is None else v.to(device) for v in (self.bias, self.noise))
        return replace(self, map=self.map.to(device), bias=bias, noise=noise)


@dataclass(frozen=True)
class Execution:
    """Where a graph was read from: the type and the kind of device that the model runs in;
    refusal: why it is not covered.
    """

    dtype: torch.dtype
    device: str = "cpu"
    refusal: str = ""


def dense_norm(map_: Linear, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
    """The spectral norm by the eigenvalues of `A A^T` or `A^T A`, whichever is smaller."""
    device = map_.tensors[0].device if map_.tensors else HOST
    if math.prod(shape) <= math.prod(output):
        eye = torch.eye(math.prod(shape), dtype=torch.float64, device=device)
        matrix = map_.forward(eye.reshape(-1, *shape)).flatten(1)
    else:
        eye = torch.eye(math.prod(output), dtype=torch.float64, device=device)
        matrix = map_.transpose(eye.reshape(-1, *output))[0].flatten(1)
    lost = matrix.numel() * FLOOR[torch.float64]  # squares that underflow
    top = float(torch.linalg.eigvalsh(matrix @ matrix.T)[-1])
    return math.sqrt(top * (1 + 4 * (sum(matrix.shape) + 16) * UNIT) + lost)


class Turnable(Protocol):
    """A map with its transpose."""

    def forward(self, *x: Tensor) -> Tensor:
        """One tensor from each input."""

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """One tensor for each input."""

    def rows(self, place: Tensor, output: tuple[int, ...]) -> Tensor | None:
        """The transpose of unit vectors; None: not known."""

    @property
    def matrix(self) -> Tensor | None:
        """Its weights, if it is a matrix."""


def exactly_shifted(values: Tensor, exponent: int) -> Tensor:
    """`values 2^exponent`, or an `ArithmeticError`: not exact."""
    moved = shifted(values, exponent)
    if not torch.equal(shifted(moved, -exponent), values):
        raise ArithmeticError
    return moved


@dataclass(frozen=True, eq=False)
class Matrix(Linear):
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

    def rows(self, place: Tensor, output: tuple[int, ...]) -> Tensor | None:
        """Those of the matrix, for nodes of one token: their entries are its rows."""
        return self.weight[place] if len(output) == 1 else None

    @property
    def matrix(self) -> Tensor:
        """W."""
        return self.weight

    @property
    def coefficients(self) -> Tensor:
        """W."""
        return self.weight

    def reweighted(self, coefficients: Tensor) -> Matrix:
        """Another matrix, which is no sum."""
        return Matrix(coefficients)

    @property
    def terms(self) -> int:
        """Rows and columns."""
        return 4 + max(self.weight.shape)

    @property
    def back_terms(self) -> int:
        """The length of a column."""
        return 4 + self.weight.shape[0]

    @property
    def fan_in(self) -> int:
        """The length of a row."""
        return self.weight.shape[1]

    @property
    def roundings(self) -> int:
        """Of a sum of products and a bias."""
        return self.fan_in + 2

    def rough(self) -> Sizes:
        """What the entries are sums of, if they are sums."""
        return Sizes(Matrix(sized(self.weight.abs() if self.most is None else self.most)))

    def moved_by(self, exponent: int) -> Matrix:
        """The weights and what they are sums of."""
        most = None if self.most is None else shifted(self.most, exponent)
        return Matrix(exactly_shifted(self.weight, exponent), most)

    def fold_before(self, factor: Tensor, shape: tuple[int, ...]) -> Matrix | None:
        """The columns scaled, if all tokens have one factor."""
        rows = factor.expand(shape).reshape(-1, shape[-1])
        same = torch.equal(rows, rows[:1].expand_as(rows))
        return Matrix(self.weight * rows[0]) if same else None

    def fold_after(self, factor: Tensor, shape: tuple[int, ...]) -> Matrix | None:
        """The rows scaled, if all tokens have one factor."""
        rows = factor.expand(shape).reshape(-1, shape[-1])
        same = torch.equal(rows, rows[:1].expand_as(rows))
        return Matrix(rows[0][:, None] * self.weight) if same else None

    def norm(self, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
        """That of the matrix: tokens do not mix."""
        return matrix_norm(self.weight, norm, norm)

    def row_norms(self, s: float) -> Tensor:
        """One for each row."""
        if s == math.inf:
            return self.weight.abs().flatten(1).amax(1)
        squares = self.weight.square() + FLOOR[torch.float64]  # one may underflow
        return squares.sum(1).sqrt()

    def longest_column(self, output: tuple[int, ...]) -> float | None:
        """For nodes of one token."""
        return matrix_norm(self.weight, 1.0, 2.0) * ROOM if len(output) == 1 else None

    def to(self, device: torch.device) -> Matrix:
        """On a device."""
        return Matrix(self.weight.to(device), moved_to(self.most, device))


@dataclass(frozen=True, eq=False)
class Sizes(Linear):
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

    @property
    def terms(self) -> int:
        """Those of the map."""
        return self.map.terms

    @property
    def fan_in(self) -> int:
        """That of the map."""
        return self.map.fan_in

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the map."""
        return self.map.tensors

    def to(self, device: torch.device) -> Sizes:
        """The same on another device."""
        return Sizes(self.map.to(device))


def rounding_map(map_: Linear) -> Sizes:
    """The map of magnitudes that rounding errors are relative to."""
    return map_.kept("rough", map_.rough)


def magnitude_map(map_: Linear) -> Linear:
    """The map with the absolute values of its weights."""
    return map_.kept("magnitude", map_.magnitude)


@dataclass(frozen=True, eq=False)
class Scale(Linear):
    """`factor x`, entry by entry; factor broadcasts against one sample."""

    factor: Tensor

    def forward(self, *x: Tensor) -> Tensor:
        """Same shape."""
        return x[0] * self.factor

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its own transpose."""
        return (g * self.factor,)

    @property
    def coefficients(self) -> Tensor:
        """The factors."""
        return self.factor

    def reweighted(self, coefficients: Tensor) -> Scale:
        """Other factors."""
        return Scale(coefficients)

    def fold_before(self, factor: Tensor, shape: tuple[int, ...]) -> Scale:
        """The product of both."""
        return Scale(self.factor * factor)

    def norm(self, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
        """The largest factor."""
        return float(self.factor.abs().max())


@dataclass(frozen=True, eq=False)
class Pick(Linear):
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
        return flat.reshape(len(flat), *self.output)

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

    @property
    def terms(self) -> int:
        """An entry that is picked several times gets a sum back."""
        return 5 if self.source is None else 5 + self.repeats

    @property
    def copies(self) -> bool:
        """If all entries stay."""
        return self.source is None

    @property
    def in_place(self) -> bool:
        """If all entries stay."""
        return self.source is None

    moves = True

    @property
    def tensors(self) -> list[Tensor]:
        """The indices."""
        return [] if self.source is None else [self.source]

    def to(self, device: torch.device) -> Pick:
        """On a device."""
        return replace(self, source=moved_to(self.source, device))


@dataclass(frozen=True, eq=False)
class Sum(Linear):
    """The sum of several tensors of one shape."""

    count: int
    copies = True
    in_place = True

    def forward(self, *x: Tensor) -> Tensor:
        """Same shape."""
        return reduce(torch.add, x)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """The same to each."""
        return (g,) * self.count

    @property
    def terms(self) -> int:
        """One for each input."""
        return 4 + self.count

    def fewer(self, count: int) -> Sum:
        """The sum of the others."""
        return Sum(count)


@dataclass(frozen=True, eq=False)
class Concat(Linear):
    """Concatenation along an axis of the batch; sizes: of the inputs there."""

    axis: int
    sizes: tuple[int, ...]
    copies = True
    joins = True

    def forward(self, *x: Tensor) -> Tensor:
        """Joined."""
        return torch.cat(x, self.axis)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Cut again."""
        return torch.split(g, list(self.sizes), self.axis)

    @property
    def terms(self) -> int:
        """One for each input."""
        return 4 + len(self.sizes)


def _padded(where: Tensor, size: int) -> tuple[Tensor, bool]:
    """Indices with `size` for -1, and whether there is any."""
    gone = where < 0
    return torch.where(gone, size, where), bool(gone.any())


def _entries(flat: Tensor, where: Tensor, gone: bool) -> Tensor:
    """Entries `where` of the rows `(m, n)`, 0 for n. Gathering moves them fastest here."""
    return (F.pad(flat, (0, 1)) if gone else flat).gather(1, where.expand(len(flat), -1))


def moved_to(values: Tensor | None, device: torch.device) -> Tensor | None:
    """The tensor on this device; None stays None."""
    return None if values is None else values.to(device)


def laid_out(values: Tensor) -> Tensor:
    """Images with their channels last in memory, which is how convolutions go fastest here."""
    return values.contiguous(memory_format=torch.channels_last) if values.ndim == 4 else values
