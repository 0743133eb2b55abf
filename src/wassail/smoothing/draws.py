"""The draws of noise: keyed by sample and block, so that whoever makes them makes the same ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.network import Model, device_of, frozen, sample_keys

BLOCK = 100  # draws that share one generator: more draws go on where these ended


@dataclass(frozen=True)
class Draws:
    """Which draws of which samples are to be counted.

    Args:
        sigma: standard deviation of the noise.
        keys: of the samples, N of them: see `keys_of`.
        start: number of the first block.
        stop: number of the block behind the last.
        batch_size: inputs of one pass at most.
    """

    sigma: float
    keys: tuple[str, ...]
    start: int
    stop: int
    batch_size: int

    def part(self, start: int, stop: int) -> Draws:
        """Those of the samples start..stop - 1.

        start: place of the first sample; stop: place behind the last.
        """
        return replace(self, keys=self.keys[start:stop])

    def hits(self, model: Model, x: Tensor, y: Tensor, slack: float = 0.0) -> Tensor:
        """How many draws of each sample give its label, int64 `(n,)`.

        Args:
            model: callable from a batch to logits.
            x: samples, `(n, *shape)`, one for each key.
            y: labels, `(n,)`.
            slack: by so much of the largest logit the label's must win; below 0 it may lose by
                so much. Default 0.
        """
        found = torch.zeros(len(x), dtype=torch.int64)
        with frozen(model), torch.no_grad():
            for i, key in enumerate(self.keys):
                for block in range(self.start, self.stop):
                    source = generator(key, block)
                    found[i] += self._block(model, x[i], int(y[i]), source, slack)
        return found

    def _block(
        self, model: Model, x: Tensor, label: int, source: np.random.Generator, slack: float
    ) -> int:
        """How many draws of one block give the label; ties and what is not finite do not.

        The noise is added in float64 and rounded once, to the type of the samples.
        """
        device = device_of(model, x.device)
        center = x.detach().cpu().double()
        found = 0
        for start in range(0, BLOCK, self.batch_size):
            size = min(self.batch_size, BLOCK - start)
            noise = torch.from_numpy(source.standard_normal((size, *x.shape)))
            seen = (center + self.sigma * noise).to(x.dtype).to(device)
            logits = model(seen)
            rivals = logits.clone()
            rivals[:, label] = -math.inf
            lead = logits[:, label] > rivals.amax(1)
            if slack:
                lead = logits[:, label] - rivals.amax(1) > slack * logits.abs().amax(1)
            right = lead & torch.isfinite(logits).all(1)
            found += int(right.sum())
        return found


# Counts the draws of N samples in parts `(start, stop)`, and gives the hits of each part in order.
Counter: TypeAlias = (
    "Callable[[Model, Tensor, Tensor, Draws, Sequence[tuple[int, int]]], Iterable[Tensor]]"
)


def count_here(
    model: Model, x: Tensor, y: Tensor, draws: Draws, parts: Sequence[tuple[int, int]]
) -> Iterable[Tensor]:
    """The hits of one part after the other, in this process.

    Args:
        model: callable from a batch to logits.
        x: samples, `(N, *shape)`.
        y: labels, `(N,)`.
        draws: of the N samples.
        parts: places of the first sample and behind the last, for each part.
    """
    for start, stop in parts:
        yield draws.part(start, stop).hits(model, x[start:stop], y[start:stop])


def checked_draws(draws: int) -> int:
    """A number of draws, or one sentence.

    draws: as it was asked for.
    """
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < BLOCK or draws % BLOCK:
        raise InputError(f"draws is {draws!r}: give a multiple of {BLOCK}, for example 1000.")
    return draws


def keys_of(x: Tensor, seed: int) -> list[str]:
    """A key for each sample: the seed, its content, and how many like it came before.

    Equal samples get draws of their own, since limits on the mean need independent draws.

    x: samples, `(N, *shape)`.
    """
    seen: dict[int, int] = {}
    keys = []
    for content in sample_keys(x):
        before = seen.get(content, 0)
        seen[content] = before + 1
        keys.append(f"{seed} {content} {before}")
    return keys


def generator(key: str, block: int) -> np.random.Generator:
    """The generator of one block of draws of one sample.

    Its key has 128 bits, so no two blocks share their draws. (The generators of torch look at 32
    bits of their seed: among 100,000 blocks one pair would be equal.)

    block: number of the block.
    """
    digest = hashlib.sha256(f"{key} {block}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
