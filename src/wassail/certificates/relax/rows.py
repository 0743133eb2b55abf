"""Rows of coefficients, each with the sample that it belongs to, and which go together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Node
from wassail.certificates.graph.maps import Linear, laid_out

Span: TypeAlias = "tuple[Tensor, Tensor]"
# How far some entries of a node move together, `(N,)`, and which ones, `(N, *shape)`.
Length: TypeAlias = "tuple[Tensor, Tensor]"
Chunk: TypeAlias = "tuple[Tensor, Tensor]"  # owner and place of rows

# Rows of one sample that are worth a pass of their own: at least so many, and so large a part of
# those that fit into one pass. Below that most of a pass is overhead. In float32 the sums of a
# mixed pass differ by more than bounds may depend on a batch: there the part does not count.
ALONE = 24
PARTS = 16
CHUNK = 2**19  # numbers in one tensor of a backward pass: about what a cache holds
# The same on another device, and how many such tensors are kept at a time.
DEVICE_CHUNK = 2**23
TOGETHER = 8


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
    if owner.shape[0] != 1 or owner.device != HOST:
        return values[owner]
    return values.narrow(0, int(owner), 1)


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


def chunks_of(wanted: Tensor, most: int, mixed: bool = True) -> Iterator[Chunk]:
    """The true entries of `(N, size)` as lists (row, column) of at most `most`; rows with many
    entries stay on their own: with more of them if `mixed`.

    A chunk of one sample reads that sample's lines, and its list of rows has length 1; a mixed one
    has to copy a set of lines for each entry. The host waits for a device once.
    """
    counts = wanted.sum(1).tolist()
    where = torch.nonzero_static(wanted, size=sum(counts))
    return _cut(where[:, 0], where[:, 1], counts, most, mixed)


def two_chunks(
    first: Tensor, second: Tensor, most: int, mixed: bool = True
) -> list[Iterator[Chunk]]:
    """The chunks of two masks of one shape, for one wait."""
    counts = torch.stack([first.sum(1), second.sum(1)]).tolist()
    places = [
        torch.nonzero_static(mask, size=sum(own)) for mask, own in zip((first, second), counts)
    ]
    return [_cut(where[:, 0], where[:, 1], own, most, mixed) for where, own in zip(places, counts)]


def all_chunks(samples: int, size: int, most: int, device: torch.device) -> Iterator[Chunk]:
    """The same for all entries of `(samples, size)`."""
    every = torch.arange(samples * size, device=device)
    return _cut(every // size, every % size, [size] * samples, most, True)


def _cut(
    owner: Tensor, place: Tensor, counts: list[int], most: int, mixed: bool
) -> Iterator[Chunk]:
    """Lists of entries, so many for each sample, in chunks."""
    most = max(most, 1)
    alone = min(max(ALONE, most // PARTS if mixed else 0), most)
    start = 0
    total = 0
    samples = 0
    for count in counts:
        if total and (total + count > most or count >= alone):
            clock.check()
            yield owner[start : start + (total if samples > 1 else 1)], place[start : start + total]
            start = start + total
            total = 0
            samples = 0
        if count >= alone:
            parts = -(-count // most)
            small, larger = divmod(count, parts)
            for part in range(parts):
                clock.check()
                size = small + (part < larger)
                yield owner[start : start + 1], place[start : start + size]
                start += size
        else:
            total = total + count
            samples = samples + (count > 0)
    if total:
        clock.check()
        yield owner[start:] if samples > 1 else owner[start : start + 1], place[start:]


def room_of(device: torch.device) -> int:
    """Numbers in one tensor of a backward pass."""
    return CHUNK if device == HOST else DEVICE_CHUNK


def groups_of(chunks: Iterator[Chunk], device: torch.device) -> Iterator[list[Chunk]]:
    """Chunks that go through the network in step: on the CPU each on its own, elsewhere as many
    as memory holds.
    """
    while group := list(itertools.islice(chunks, 1 if device == HOST else TOGETHER)):
        yield group


def in_step(walks: list[Generator[Tensor, Tensor | None, Span]]) -> list[Span]:
    """What walks return that ask on their way which of their rows go on: one wait for the
    questions of all of them.
    """
    found: dict[int, Span] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(walks)))
    while answers:
        asked: dict[int, Tensor] = {}
        for k, answer in answers.items():
            try:
                asked[k] = walks[k].send(answer)
            except StopIteration as end:
                found[k] = end.value
        counts = torch.stack([mask.sum() for mask in asked.values()]).tolist() if asked else []
        answers = {
            k: torch.nonzero_static(mask, size=n)[:, 0]
            for (k, mask), n in zip(asked.items(), counts)
        }
    return [found[k] for k in range(len(walks))]
