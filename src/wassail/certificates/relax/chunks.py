"""Which rows are computed together."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.relax.rows import Span

Chunk: TypeAlias = "tuple[Tensor, Tensor]"  # owner and place of rows


# Rows of one sample that are worth a pass of their own: at least so many, and so large a part of
# those that fit into one pass. Below that most of a pass is overhead. In float32 the sums of a
# mixed pass differ by more than bounds may depend on a batch: there the part does not count.
ALONE = 24
PARTS = 16


CHUNK = 2**19  # numbers in one tensor of a backward pass: about what a cache holds


# the same on another device, and how many such tensors are kept at a time
DEVICE_CHUNK = 2**23


TOGETHER = 8


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
