"""The smoothed model: its votes, and averaged logits that attacks can follow."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wassail.checks import check_data, fingerprint
from wassail.errors import InputError
from wassail.network import BATCH_SIZE, Model, check_model, device_of, frozen, sample_keys, versions
from wassail.progress import Progress, progress_bar
from wassail.records import Record, check_equal
from wassail.smoothing.certificate import Smoothing, certificate, check_counts
from wassail.threat import Number, number

SAVES = 100  # times that counts are kept while they are made, at least
BLOCK = 100  # draws that share one generator: more draws go on where these ended
AVERAGE = 16  # draws that the logits for attacks are averaged over


@dataclass(frozen=True, eq=False)
class Votes(Record):
    """How often the model was right under noise.

    Args:
        hits: number of draws at which the class was the true one, int64 `(N,)`.
        draws: draws of each sample.
        sigma: standard deviation of the noise.
        seed: of the draws.
        info: versions, and hashes of the samples with their labels and of the weights.
        first: draws of the first count; default None, all. More draws come in multiples of it.
    """

    hits: Tensor
    draws: int
    sigma: float
    seed: int
    info: dict[str, Any] = field(default_factory=dict)
    first: int | None = None

    def __post_init__(self) -> None:
        check_counts(self.hits, self.draws, self.sigma, self.first)

    def certificate(self, confidence: Number = 0.999) -> Smoothing:
        """What the votes prove, all samples together, and together with what they proved before
        they grew.

        Args:
            confidence: that every statement of the certificate holds, between 0 and 1; default
                0.999.
        """
        return certificate(self.hits, self.draws, self.sigma, confidence, self.first)


@dataclass(frozen=True, eq=False)
class _Counted(Record):
    """Counts of a call that was interrupted: those of the first samples, up to `total` draws."""

    hits: Tensor
    samples: int
    total: int
    about: str


class Smoothed(nn.Module):
    """A model that sees its input with Gaussian noise: a classifier of its own.

    It is two classifiers. The *vote* answers with the class that has more than half of the
    probability under the noise, and abstains if none has; the *randomised classifier* answers with
    the class of one draw. Certificates are for these, not for the model inside. Called as a module
    it gives the logarithm of the average softmax over a few fixed draws, which attacks can follow.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        sigma: standard deviation of the noise, in units of the input.
        draws: draws of each sample, a multiple of 100; default 1000.
        seed: of all draws; default 0.
        average: draws that the logits for attacks are averaged over; default 16.
    """

    def __init__(
        self,
        model: Model,
        sigma: Number,
        draws: int = 1000,
        seed: int = 0,
        average: int = AVERAGE,
    ) -> None:
        super().__init__()
        self.sigma = number(sigma, "sigma")
        if not 0 < self.sigma < math.inf:
            raise InputError(
                f"sigma is {sigma!r}: give a positive standard deviation, such as 0.25"
            )
        if average < 1:
            raise InputError(f"average is {average}: give at least one draw.")
        self.model = model
        self.draws = _checked(draws)
        self.seed = seed
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        """Averaged logits `(n, K)`: the same draws for every input, so that it is a function.

        Args:
            x: inputs, float tensor `(n, *shape)`.
        """
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(self.average, *x.shape[1:], generator=generator)
        noise = self.sigma * noise.to(x.device, x.dtype)
        seen = (x[:, None] + noise[None]).flatten(0, 1)
        logits = self.model(seen)
        parts = logits.log_softmax(1).view(len(x), self.average, -1)
        averaged: Tensor = parts.logsumexp(1) - math.log(self.average)
        return averaged

    def votes(
        self,
        x: Tensor,
        y: Tensor,
        draws: int | None = None,
        start: Votes | None = None,
        batch_size: int = BATCH_SIZE,
        progress: Progress = False,
        keep: str | PathLike[str] | None = None,
    ) -> Votes:
        """Count how often the model is right under noise.

        The draws of a sample are keyed by its content, so batches, order and device do not matter,
        and more draws continue what was counted. Votes grow to multiples of their first count, and
        their certificate pays for the look at what was known before.

        Args:
            x: samples, float tensor `(N, *shape)`.
            y: true labels, integer tensor `(N,)`.
            draws: draws of each sample in all, a multiple of 100; default None, the model's.
            start: votes of the same samples to go on from; default None.
            batch_size: int, inputs of one pass at most; default 250.
            progress: bool, or a callable that is given the share done; default False.
            keep: a file that holds the counts while they are made: a call that was interrupted goes
                on where it ended; default None.
        """
        total = self.draws if draws is None else _checked(draws)
        x, y = check_data(x, y, None)
        keys = _keys(x, self.seed)
        info = {
            "versions": versions(),
            "samples": _digest([*keys, *map(str, y.tolist())]),
            "weights": fingerprint(self.model),
        }
        hits = torch.zeros(len(x), dtype=torch.int64)
        first = total
        done = 0
        if start is not None:
            check_equal("sigma", self.sigma, start.sigma)
            check_equal("seed", self.seed, start.seed)
            for name in ("samples", "weights"):
                check_equal(name, info[name], start.info.get(name))
            hits = start.hits.clone()
            done = start.draws
            first = done if start.first is None else start.first
            total = max(total, done)
            check_counts(hits, total, self.sigma, first)
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}: give a positive number.")
        with frozen(self.model), torch.no_grad(), progress_bar(progress, "votes") as report:
            check_model(self.model, x, y)
            asked = _digest([*map(str, info.values()), str(self.sigma), f"{done} {total}"])
            hits, counted = _resumed(keep, hits, asked, total)
            for i, key in enumerate(keys):
                if i < counted:
                    continue
                for block in range(done // BLOCK, total // BLOCK):
                    hits[i] += self._hits(x[i], int(y[i]), _generator(key, block), batch_size)
                if keep is not None and (i + 1) % max(len(keys) // SAVES, 1) == 0:
                    _Counted(hits, i + 1, total, asked).save(keep)
                report((i + 1) / len(keys))
        if keep is not None:
            Path(keep).unlink(missing_ok=True)
        return Votes(hits, total, self.sigma, self.seed, info, first)

    def certify(
        self,
        x: Tensor,
        y: Tensor,
        confidence: Number = 0.999,
        batch_size: int = BATCH_SIZE,
        progress: Progress = False,
    ) -> Smoothing:
        """Vote, and prove what the votes allow: `votes(...).certificate(confidence)`.

        Args:
            x: samples, float tensor `(N, *shape)`.
            y: true labels, integer tensor `(N,)`.
            confidence: that every statement of the certificate holds; default 0.999.
            batch_size: int, inputs of one pass at most; default 250.
            progress: bool, or a callable that is given the share done; default False.
        """
        return self.votes(x, y, None, None, batch_size, progress).certificate(confidence)

    def _hits(self, x: Tensor, label: int, generator: np.random.Generator, batch_size: int) -> int:
        """How many draws of one block give the label; ties and what is not finite do not.

        The noise is added in float64 and rounded once, to the type of the samples.
        """
        device = device_of(self.model, x.device)
        center = x.detach().cpu().double()
        found = 0
        for start in range(0, BLOCK, batch_size):
            size = min(batch_size, BLOCK - start)
            noise = torch.from_numpy(generator.standard_normal((size, *x.shape)))
            seen = (center + self.sigma * noise).to(x.dtype).to(device)
            logits = self.model(seen)
            rivals = logits.clone()
            rivals[:, label] = -math.inf
            right = (logits[:, label] > rivals.amax(1)) & torch.isfinite(logits).all(1)
            found += int(right.sum())
        return found


def smoothed(
    model: Model,
    sigma: Number,
    draws: int = 1000,
    seed: int = 0,
    average: int = AVERAGE,
) -> Smoothed:
    """The model under Gaussian noise, which can be certified whatever its size.

    >>> import wassail as ws
    >>> model, (x, y) = ws.zoo.load("digits-cnn-adv"), ws.zoo.data("digits")
    >>> proof = ws.smoothed(model, sigma=0.1, draws=200).certify(x[:20], y[:20])
    >>> bool(proof.accuracy(0.05) >= proof.kumar(0.05) > 0)
    True

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        sigma: standard deviation of the noise, in units of the input.
        draws: draws of each sample, a multiple of 100; default 1000.
        seed: of all draws; default 0.
        average: draws that the logits for attacks are averaged over; default 16.
    """
    return Smoothed(model, sigma, draws, seed, average)


def _resumed(
    keep: str | PathLike[str] | None, hits: Tensor, asked: str, total: int
) -> tuple[Tensor, int]:
    """The counts of an interrupted call for the same thing, and for how many samples they are."""
    if keep is None or not Path(keep).exists():
        return hits, 0
    found = _Counted.load(keep)
    if found.about != asked or found.hits.shape != hits.shape:
        return hits, 0
    check_counts(found.hits, total, 1.0, None)
    return found.hits.clone(), found.samples


def _checked(draws: int) -> int:
    """A number of draws, or one sentence."""
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < BLOCK or draws % BLOCK:
        raise InputError(f"draws is {draws!r}: give a multiple of {BLOCK}, for example 1000.")
    return draws


def _keys(x: Tensor, seed: int) -> list[str]:
    """A key for each sample: the seed, its content, and how many like it came before.

    Equal samples get draws of their own, since limits on the mean need independent draws.
    """
    seen: dict[int, int] = {}
    keys = []
    for content in sample_keys(x):
        before = seen.get(content, 0)
        seen[content] = before + 1
        keys.append(f"{seed} {content} {before}")
    return keys


def _digest(keys: list[str]) -> str:
    """What tells these samples, in this order, from others."""
    return hashlib.sha256(" ".join(keys).encode()).hexdigest()


def _generator(key: str, block: int) -> np.random.Generator:
    """The generator of one block of draws of one sample.

    Its key has 128 bits, so no two blocks share their draws. (The generators of torch look at 32
    bits of their seed: among 100,000 blocks one pair would be equal.)
    """
    digest = hashlib.sha256(f"{key} {block}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
