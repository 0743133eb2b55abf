"""What a plan is worth: the network evaluated at its points in every arithmetic there is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from wassail.losses import LIPSCHITZ
from wassail.omega.plan import Plan
from wassail.omega.property import Omega
from wassail.zoo.runtime import outputs_of

BATCH = 250
ASKED = 250  # points given to onnxruntime in one call
LOST = 1e-9  # of a loss and of 1: more than the evaluation of a loss in float64 rounds


class Judge:
    """The network of a property in float64, in float32 and by onnxruntime.

    Args:
        property_: whose network it is.
    """

    def __init__(self, property_: Omega) -> None:
        self.property = property_
        self.wide = copy.deepcopy(property_.model).double()
        self.runtime = True  # until it gives no answer
        self._rest: list[Tensor] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The arithmetics, after an evaluation."""
        return ("float64", "float32", *(("onnxruntime",) if self.runtime else ()))

    def outputs(self, points: Tensor) -> list[Tensor]:
        """Outputs at flat float32 points, `(R, K)` in float64, one tensor for each arithmetic."""
        shape = self.property.x.shape[1:]
        classes = self.property.outputs
        empty = torch.zeros(0, classes, dtype=torch.float64)
        wide, own, third = [empty], [empty], [empty]
        with torch.no_grad():
            for part in torch.split(points, BATCH) if len(points) else ():
                shaped = part.reshape(-1, *shape)
                wide.append(self.wide(shaped.double()))
                own.append(self.property.model(shaped).double())
        for part in torch.split(points, ASKED) if len(points) else ():
            if not self.runtime:
                break
            found = outputs_of(self.property.network, part.double().tolist())
            if found is None or any(len(row) != classes for row in found):
                self.runtime = False
                break
            third.append(torch.tensor(found, dtype=torch.float64))
        return [torch.cat(wide), torch.cat(own), *([torch.cat(third)] if self.runtime else [])]

    def value(self, plan: Plan) -> Fraction:
        """The accuracy of a plan at most, or its loss at least: for every row the evaluation that
        refutes least counts.

        plan: a distribution of the threat.
        """
        if self._rest is None:
            self._rest = self.outputs(self.property.x.flatten(1))
        moved = self.outputs(plan.points)
        measured = self._errors if self.property.least else self._losses
        rest = measured(self._rest[: len(moved)], self.property.y)
        there = measured(moved, torch.tensor(plan.labels, dtype=torch.int64))
        masses = plan.masses(self.property)
        left = [Fraction(1)] * len(masses)
        total = Fraction(0)
        for i, share, value in zip(plan.sample, plan.share, there):
            left[i] -= Fraction(share)
            total += masses[i] * Fraction(share) * value
        total += sum((m * part * v for m, part, v in zip(masses, left, rest)), Fraction(0))
        return 1 - total if self.property.least else total

    def _errors(self, outputs: Sequence[Tensor], labels: Tensor) -> list[Fraction]:
        """1 where a label is wrong in every arithmetic, else 0; a tie is wrong."""
        wrong = torch.ones(len(labels), dtype=torch.bool)
        for z in outputs:
            own = z.gather(1, labels[:, None])
            others = z.scatter(1, labels[:, None], -torch.inf)
            wrong &= ~(own > others).all(1)
        return [Fraction(int(value)) for value in wrong.tolist()]

    def _losses(self, outputs: Sequence[Tensor], labels: Tensor) -> list[Fraction]:
        """The least loss over the arithmetics, less what its evaluation rounds."""
        loss = LIPSCHITZ[self.property.measure]
        least = torch.stack([loss(z, labels).double() for z in outputs]).amin(0)
        least = torch.nan_to_num(least - LOST * (1 + least.abs()), -1e300, 1e300, -1e300)
        return [Fraction(value) for value in least.tolist()]
