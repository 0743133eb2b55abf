"""The small problem that the figures of the bounds share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.dense import Piecewise
from wassail.errors import unknown
from wassail.losses import ASCENTS, cross_entropy, margin

# what the figures of a network are drawn of, unless told
MODEL = "digits-cnn-adv"
SAMPLES = 200
LOSSES = {"cross_entropy": (cross_entropy, ASCENTS["ce"]), "margin": (margin, ASCENTS["margin"])}
BUDGETS = tuple(k / 24 for k in range(1, 13))  # of the curve against eps; 1/4 is among them


@dataclass(frozen=True, eq=False)
class Instance:
    """A network of the plane, `R^2 -> R^2` with one hidden layer, and samples x `(N, 2)` with
    labels y `(N,)`.
    """

    network: Piecewise
    x: Tensor
    y: Tensor
    about: str

    @property
    def labels(self) -> list[int]:
        """The labels that occur."""
        return sorted(set(self.y.tolist()))


def instance(
    seed: int = 0, *, tight: bool = False, neurons: int = 8, samples: int = 12
) -> Instance:
    """Normal weights and samples, each sample with the label that the network gives it: nothing is
    wrong to begin with.

    tight: the kind of network for which the paper's bounds match. Its logits are `(-f, f)`, f a sum
    of neurons with positive weights and so convex: f is steepest at infinity, and `e_2 - e_1` is
    the direction in which the logits grow most, l = L.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    first = (normal(neurons, 2), normal(neurons))
    head = normal(2, neurons) / math.sqrt(neurons)
    bias = 0.3 * normal(2)
    x = normal(samples, 2)
    if tight:
        rise = head[1].abs() / 2
        head = torch.stack([-rise, rise])
        middle = (x @ first[0].T + first[1]).clamp(min=0) @ rise
        bias = torch.stack([middle.median(), -middle.median()])  # so that both labels occur
    network = Piecewise.from_layers([first, (head, bias)])
    kind = "convex logit gap, for which the paper's bounds match" if tight else "normal weights"
    return Instance(
        network,
        x,
        network.logits(x).argmax(1),
        f"network 2-{neurons}-2 ({kind}), {samples} samples, seed {seed}",
    )


def losses_at(name: str) -> tuple[Any, Any]:
    """A loss by name, with its gradient."""
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]


def spoken(loss: str) -> str:
    """The name of a loss in words."""
    return loss.replace("_", " ")
