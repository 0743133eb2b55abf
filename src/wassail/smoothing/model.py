"""The smoothed model: its votes, and averaged logits that attacks can follow."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wassail.checks import check_data, fingerprint
from wassail.errors import InputError
from wassail.network import BATCH_SIZE, Model, check_model, frozen, versions
from wassail.progress import Progress, progress_bar
from wassail.records import Record, check_equal
from wassail.smoothing.certificate import Smoothing, certificate, check_counts
from wassail.smoothing.draws import BLOCK, Counter, Draws, checked_draws, count_here, keys_of
from wassail.threat import Number, number

SAVES = 100  # times that counts are kept while they are made, at least
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

    def __init__(
        self, model: Model, sigma: Number, draws: int = 1000, seed: int = 0, average: int = AVERAGE
    ) -> None:
        super().__init__()
        self.sigma = number(sigma, "sigma")
        if not 0 < self.sigma < math.inf:
            raise InputError(
                f"sigma is {sigma!r}: give a positive standard deviation, such as 0.25."
            )
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seed is {seed!r}: give a whole number.")
        if average < 1:
            raise InputError(f"average is {average}: give at least one draw.")
        self.model = model
        self.draws = checked_draws(draws)
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
        counter: Counter | None = None,
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
            counter: what counts, for example `evaluation.cluster.counter(Ray(workers=8))`; default
                None, this process. The counts are the same.
        """
        total = self.draws if draws is None else checked_draws(draws)
        x, y = check_data(x, y, None)
        keys = keys_of(x, self.seed)
        info = {
            "versions": versions(),
            "samples": sample_digest(x, y, self.seed),
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
            wanted = Draws(self.sigma, tuple(keys), done // BLOCK, total // BLOCK, batch_size)
            size = max(len(keys) // SAVES, 1)
            edges = [*range(counted, len(keys), size), len(keys)] if done < total else []
            parts = list(itertools.pairwise(edges))
            counts = (counter or count_here)(self.model, x, y, wanted, parts)
            for (start, stop), found in zip(parts, counts, strict=True):
                hits[start:stop] += found
                if keep is not None:
                    _Counted(hits, stop, total, asked).save(keep)
                report(stop / len(keys))
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


smoothed = Smoothed
"""The class `Smoothed`: `ws.smoothed(model, sigma)` makes a smoothed model."""


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


def sample_digest(x: Tensor, y: Tensor, seed: int) -> str:
    """What tells these samples and labels, in this order and with this seed, from others.

    x: samples, `(N, *shape)`; y: labels, `(N,)`.
    """
    return _digest([*keys_of(x, seed), *map(str, y.tolist())])


def _digest(keys: list[str]) -> str:
    """What tells these samples, in this order, from others."""
    return hashlib.sha256(" ".join(keys).encode()).hexdigest()
