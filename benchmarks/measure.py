"""What all stages share: processor seconds, percentages with limits, other tools' points."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from scipy.stats import beta
from torch import Tensor, nn

INF = math.inf
NORMS = {"linf": INF, "l2": 2.0, "l1": 1.0}
REPORTED = 0  # figures are for images from here on
TUNED = 1000  # settings were chosen on images from here on


@dataclass
class Spent:
    """Processor seconds of a block."""

    seconds: float = 0.0


@contextmanager
def spent() -> Iterator[Spent]:
    """Count the processor seconds of a block, one thread."""
    found = Spent()
    torch.set_num_threads(1)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found
    found.seconds = time.process_time() - began


@contextmanager
def processor_limits() -> Iterator[None]:
    """Time limits of proofs in processor seconds: a busy machine proves as much as an idle one."""
    from wassail.certificates import clock

    kept = vars(clock)["time"]
    vars(clock)["time"] = SimpleNamespace(monotonic=time.process_time)
    try:
        yield
    finally:
        vars(clock)["time"] = kept


def share(hits: int, n: int) -> dict[str, Any]:
    """A percentage with its 95 % limits (Clopper and Pearson): exact for a share of n draws."""
    low = 0.0 if hits == 0 else float(beta.ppf(0.025, hits, n - hits + 1))
    high = 1.0 if hits == n else float(beta.ppf(0.975, hits + 1, n - hits))
    return {"percent": 100 * hits / n, "low": 100 * low, "high": 100 * high, "n": n}


def clean(model: nn.Module, x: Tensor, y: Tensor, batch: int = 250) -> Tensor:
    """Which samples the model gets right."""
    with torch.no_grad():
        parts = [model(part).argmax(1) for part in x.split(batch)]
    return torch.cat(parts) == y


def distances(points: Tensor, x: Tensor, norm: float) -> Tensor:
    """Distance of each point from its sample, in float64."""
    return torch.linalg.vector_norm((points.double() - x.double()).flatten(1), norm, dim=1)


class Counted(nn.Module):
    """Counts the rows that go forward and backward through a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        z = self.model(x)
        self.rows += len(x)
        if z.requires_grad:
            z.register_hook(lambda g: setattr(self, "rows", self.rows + len(g)))
        return z


Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def minimal(
    model: nn.Module, x: Tensor, y: Tensor, norm: float, attack: Attack, batch: int = 250
) -> tuple[Tensor, float]:
    """Distances of another tool's adversarial examples, and its passes for each sample it attacks.

    0 where the sample is wrong already, inf where it found nothing. A point on the very boundary
    may come back right in another batch: the nearest of four points, pushed away by at most 1 %,
    counts.
    """
    right = clean(model, x, y)
    counted = Counted(model)
    found = torch.zeros(len(x), dtype=torch.float64)
    torch.manual_seed(0)
    for rows in right.nonzero()[:, 0].split(batch):
        start, labels = x[rows], y[rows]
        points = attack(counted, start, labels).detach()
        nearest = torch.full((len(rows),), INF, dtype=torch.float64)
        for push in (1.0, 1.0005, 1.002, 1.01):
            pushed = (start + push * (points - start)).clamp(0, 1)
            wrong = ~clean(model, pushed, labels)
            far = distances(pushed, start, norm)
            nearest = torch.where(wrong, torch.minimum(nearest, far), nearest)
        found[rows] = nearest
    return found, counted.rows / max(int(right.sum()), 1)


def numbers(values: Tensor) -> list[float | None]:
    """A tensor as JSON has it: every digit, None for inf."""
    return [None if math.isinf(v) else v for v in values.tolist()]


def tensor(values: list[float | None]) -> Tensor:
    """Back from JSON."""
    return torch.tensor([INF if v is None else v for v in values], dtype=torch.float64)
