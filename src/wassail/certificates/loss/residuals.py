"""Losses of regression as functions of the errors of a sample's outputs (THEORY 11).

Let `e_k = f_k(x) - y_k`. All losses are

    loss = phi(u),      u = max_k max((1 - q) e_k, -q e_k) or max_k |e_k|,

with phi convex and rising on `u >= 0`: the identity for the absolute and the pinball loss, Huber's
function, the square. A network whose outputs are `(0, e, -e)` is a classifier whose label 0 is
right, and u is its margin loss. So a lower bound on its margins is an upper bound on the loss, a
loss is as steep as the outputs times the slope of phi, and where margins are linear in the distance
the loss is convex in it.

Several outputs count by the largest of their losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Graph, Input, Node
from wassail.certificates.graph.maps import Matrix, Pick, Sum
from wassail.certificates.graph.specified import specified
from wassail.certificates.loss.labels import Loss
from wassail.certificates.relax.balls import Targets
from wassail.errors import InputError
from wassail.rounding import UNIT, up
from wassail.threat import Boxes, Domain, Number, boxes_of, number


@dataclass(frozen=True, eq=False)
class Residuals(Loss):
    """The targets of N samples and what an error costs.

    Args:
        loss: one of `names.ERRORS`.
        y: targets, float64 `(N, K)`.
        quantile: q of the pinball loss: an output that is too low costs q a unit, one that is too
            high 1 - q.
        delta: of the Huber loss, `u^2 / 2` up to delta and `delta (u - delta / 2)` beyond.
    """

    loss: str
    y: Tensor
    quantile: float = 0.5
    delta: float = 1.0

    starts: ClassVar[tuple[int | None, ...]] = (0, 1)

    @classmethod
    def of(cls, loss: str, y: Any, quantile: Number, delta: Number, count: int) -> Residuals:
        """Check what was given.

        Args:
            loss: name of the loss.
            y: targets, `(N,)` or `(N, K)`.
            quantile: q, between 0 and 1.
            delta: positive and finite.
            count: N.
        """
        y = torch.as_tensor(y)
        if y.is_complex() or y.ndim not in (1, 2) or len(y) != count:
            raise InputError(
                f"the targets have shape {tuple(y.shape)} for {count} samples: give one number for "
                "each sample, (N,), or for each output of each sample, (N, K)."
            )
        y = y.detach().cpu().double().reshape(count, -1)
        if not bool(torch.isfinite(y).all()):
            raise InputError("the targets contain NaN or infinity: give finite numbers.")
        q, size = number(quantile, "quantile"), number(delta, "delta")
        if not 0 < q < 1:
            raise InputError(f"the quantile is {quantile!r}: give a number between 0 and 1.")
        if not 0 < size < math.inf:
            raise InputError(f"delta is {delta!r}: give a positive number, in the targets' unit.")
        return cls(loss, y, q, size)

    @property
    def weights(self) -> tuple[float, float]:
        """What a unit of an output too high, and of one too low, counts in u."""
        return (1 - self.quantile, self.quantile) if self.loss == "pinball" else (1.0, 1.0)

    @property
    def steepest(self) -> float:
        """The largest weight."""
        return max(self.weights)

    @property
    def offsets(self) -> Tensor:
        """What is added to the outputs `(0, f, -f)`, `(N, 2K + 1)`."""
        return torch.cat([torch.zeros_like(self.y[:, :1]), -self.y, self.y], 1)

    def targets(self, device: torch.device) -> Targets:
        """The targets, on both sides."""
        offsets = self.offsets.to(device)
        matters = torch.ones_like(offsets, dtype=torch.bool)
        matters[:, 0] = False
        return Targets(offsets, matters)

    @property
    def rows(self) -> Tensor:
        """Output 0, which is 0."""
        return torch.zeros(len(self.y), dtype=torch.int64)

    @property
    def too_high(self) -> Tensor:
        """Rows that pick the outputs `f` of `(0, f, -f)`, `(K, 2K + 1)`."""
        count = self.y.shape[1]
        return torch.eye(2 * count + 1, dtype=torch.float64)[1 : 1 + count]

    def scores(self, z: Tensor) -> Tensor:
        """Errors with both signs, `(N, 2K)`, of the outputs `(0, f, -f)`."""
        return (z + self.offsets.to(z.device))[:, 1:]

    def scores_of_model(self, z: Tensor) -> Tensor:
        """The same, of the outputs f."""
        apart = z - self.y.to(z.device)
        return torch.cat([apart, -apart], 1)

    def judged(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """A class is 1 + the side of the largest error."""
        return self.value(self.height(scores)), scores.argmax(1) + 1

    def height(self, scores: Tensor) -> Tensor:
        """u, of which the loss is a rising function."""
        return self.largest(scores)

    def climbed(self, scores: Tensor, start: int | None) -> Tensor:
        """u; the first output, too high or too low, where the ascent starts."""
        half = scores.shape[1] // 2
        return (self.largest(scores) if start is None else scores[:, start * half]).sum()

    def steepness(self, slope: float, lift: float, top: Tensor) -> tuple[float, float]:
        """By the steepest slope of phi in the domain."""
        # What is used of this sum is rounded up by more than its rounding.
        reach = max(float(self.largest(-top[:, 1:]).max()) + lift, 0.0)
        factor = self.steepest * self.slope(reach)
        steep = slope * factor * (1 + 4 * UNIT) if slope and factor else 0.0
        return steep, lift * factor * (1 + 4 * UNIT) if lift else 0.0

    def weighted(self, signed: Tensor) -> Tensor:
        """Errors with both signs, each times its weight, `(M, 2K)`.

        Args:
            signed: `(e, -e)`.
        """
        half = signed.shape[1] // 2
        high, low = self.weights
        return torch.cat([high * signed[:, :half], low * signed[:, half:]], 1)

    def largest(self, signed: Tensor) -> Tensor:
        """u, `(M, 2K) -> (M,)`.

        Args:
            signed: `(e, -e)`.
        """
        return self.weighted(signed).amax(1)

    def value(self, u: Tensor) -> Tensor:
        """The loss at u: phi.

        Args:
            u: of any shape, 0 or more.
        """
        if self.loss == "huber":
            near = u.clamp(max=self.delta)
            return near * near / 2 + self.delta * (u - near)
        return u * u if self.loss == "squared" else u

    def above(self, lowest: Tensor) -> Tensor:
        """By the largest weighted error."""
        u = self.largest(-lowest[:, 1:])
        if self.loss == "absolute":
            return u
        # The products, the square, a sum: no more than four roundings of positive numbers.
        found = self.value(u.clamp(min=0)) * (1 + 8 * UNIT)
        return torch.where(torch.isfinite(found), up(found), found)

    def slope(self, reach: float) -> float:
        """The largest slope of phi for u up to reach.

        Args:
            reach: bound on u; inf if there is none.
        """
        if self.loss == "huber":
            return min(self.delta, reach)
        return 2 * reach if self.loss == "squared" else 1.0


def signed_network(graph: Graph) -> Graph:
    """The network with outputs `(0, f, -f)`.

    Args:
        graph: f, with K outputs.
    """
    eye = torch.eye(graph.outputs, dtype=torch.float64)
    return specified(graph, torch.cat([-eye, eye]))


def with_targets(graph: Graph, cost: float) -> Graph:
    """The network `(x, t) -> (0, f(x) - c t, -f(x) + c t)`: a target is one more input (THEORY 11).

    `c` is 1 / cost, rounded up, so that a target costs no more than it should. For one output.

    Args:
        graph: what `signed_network` returned.
        cost: price of moving a target by one unit.
    """
    first = graph.nodes[0]
    n = first.size
    device = graph.device
    outputs = graph.outputs
    pick = Pick(torch.arange(n, device=device), (n + 1,), first.shape)
    last_input = Pick(torch.tensor([n], device=device), (n + 1,), (1,))
    nodes = [
        Node((), (n + 1,), first.place, Input()),
        Node((0,), first.shape, "the inputs", Affine(pick), ()),
    ]
    for node in graph.nodes[1:]:
        nodes.append(replace(node, inputs=tuple(j + 1 for j in node.inputs)))
    end = len(nodes) - 1
    c = math.nextafter(1 / cost, math.inf)
    signs = torch.tensor([0.0, -c, c], dtype=torch.float64, device=device)
    nodes += [
        Node((0,), (1,), "the target", Affine(last_input), ()),
        Node((end + 1,), (outputs,), "the target", Affine(Matrix(signs[:, None])), ()),
        Node((end, end + 2), (outputs,), "the error", Affine(Sum(2)), ()),
    ]
    return replace(graph, nodes=tuple(nodes), arithmetic="exact")


def beside_targets(x: Tensor, domain: Domain) -> tuple[Tensor, Domain]:
    """Samples `(N, n + 1)` whose last entry is how far the target moved, times its price, and their
    box, which has no walls there.

    Args:
        x: samples `(N, *shape)`.
        domain: box, boxes of features or samples, or None.
    """
    flat = torch.cat([x.flatten(1), torch.zeros_like(x.flatten(1)[:, :1])], 1)
    if domain is None:
        return flat, None
    own = boxes_of(domain)
    if own is None:
        # float64: a wall that float32 rounds belongs to another box
        wall = flat.new_empty((1, flat.shape[1] - 1), dtype=torch.float64)
        low, high = (torch.full_like(wall, side) for side in domain)  # type: ignore[arg-type]
    else:
        low, high = own.fit(x).flat()
    free = torch.full_like(low[:, :1], math.inf)
    sides = torch.cat([low, -free], 1), torch.cat([high, free], 1)
    return flat, Boxes(*sides)  # type: ignore[return-value]
