"""What a curve needs to know of a loss, and the losses of classes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from wassail.certificates.relax.balls import Targets
from wassail.losses import ASCENTS, LIPSCHITZ, predict
from wassail.rounding import UNIT


class Loss(ABC):
    """What a curve needs to know of a loss of N samples: one of classes, or one of errors.

    It is a function of scores, `(N, S)`: logits, or errors with both signs. It falls in margins:
    lower bounds on those of the outputs are an upper bound on it.
    """

    starts: ClassVar[tuple[int | None, ...]]  # the ways an ascent begins
    loss: str
    y: Tensor

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The output that is to win for each sample, `(N,)`."""

    @abstractmethod
    def targets(self, device: torch.device) -> Targets | None:
        """What bounds on balls add to the outputs of a network on this device."""

    def take(self, rows: Tensor) -> Self:
        """The loss of some samples, by their places."""
        return replace(self, y=self.y[rows.to(self.y.device)])  # type: ignore[type-var]

    @abstractmethod
    def scores(self, z: Tensor) -> Tensor:
        """The scores, from the outputs of the graph."""

    @abstractmethod
    def scores_of_model(self, z: Tensor) -> Tensor:
        """The scores, from the outputs of the model."""

    @abstractmethod
    def judged(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the predicted class, `(N,)` each."""

    @abstractmethod
    def height(self, scores: Tensor) -> Tensor:
        """What an ascent keeps the highest of, `(N,)`."""

    @abstractmethod
    def climbed(self, scores: Tensor, start: int | None) -> Tensor:
        """A number whose gradient an ascent follows; start: one of `starts`, then None."""

    @abstractmethod
    def above(self, lowest: Tensor) -> Tensor:
        """The loss where every margin `(N, K)` is at its lower bound, rounded up, `(N,)`."""

    @abstractmethod
    def steepness(self, slope: float, lift: float, top: Tensor) -> tuple[float, float]:
        """How steep the loss is where margins, or outputs, have this slope, and by how much the
        executed loss may be higher where they are off by `lift`; top `(N, K)`: lower bounds on the
        margins in the domain.
        """


@dataclass(frozen=True, eq=False)
class Labels(Loss):
    """The labels of N samples and a loss of classes.

    Args:
        loss: "cross_entropy" or "margin".
        y: labels `(N,)`, where the network is.
    """

    loss: str
    y: Tensor

    starts: ClassVar[tuple[int | None, ...]] = (None,)

    @property
    def rows(self) -> Tensor:
        """The labels."""
        return self.y

    def targets(self, device: torch.device) -> Targets | None:
        """Nothing."""
        return None

    def scores(self, z: Tensor) -> Tensor:
        """Logits."""
        return z

    def scores_of_model(self, z: Tensor) -> Tensor:
        """Logits."""
        return z

    def judged(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """A tie counts as an error."""
        return self.height(scores), predict(scores, self.y)

    def height(self, scores: Tensor) -> Tensor:
        """The loss."""
        return LIPSCHITZ[self.loss](scores, self.y)

    def climbed(self, scores: Tensor, start: int | None) -> Tensor:
        """Logits times the gradient of the loss, which does not vanish where the model is sure."""
        ascent = ASCENTS["ce" if self.loss == "cross_entropy" else self.loss]
        return (scores * ascent(scores.detach(), self.y)[1]).sum()

    def above(self, lowest: Tensor) -> Tensor:
        """See `loss_above`."""
        return loss_above(lowest, self.y, self.loss)

    def steepness(self, slope: float, lift: float, top: Tensor) -> tuple[float, float]:
        """Both losses are 1-Lipschitz in the margins."""
        return slope, lift


def loss_above(lowest: Tensor, y: Tensor, loss: str) -> Tensor:
    """The loss where every margin `theta_y - theta_j` is at its lower bound, `(N, K) -> (N,)`,
    rounded up.

    Both losses fall in every margin: cross entropy is `log sum_j exp(-margin_j)`, the margin loss
    `max_{j != y} -margin_j`.
    """
    if loss == "margin":
        return (-lowest).scatter(1, y[:, None], -math.inf).amax(1)
    value = (-lowest).logsumexp(1)
    return value + (lowest.shape[1] + 8) * UNIT * (1 + lowest.abs().amax(1))
