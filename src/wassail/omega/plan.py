"""A distribution that refutes a property: which share of which sample goes where."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.omega.exact import distance_above, price_above, shares_of
from wassail.omega.fields import Fields, finite, shown
from wassail.omega.property import Omega, whole_numbers
from wassail.threat import boxes_of
from wassail.transport.distribution import Distribution

# Of every moved mass and of the density: room for the checker's rounding, which is to the safe
# side. It costs that much of the error at most.
ROOM = 1e-9
MOST_ROWS = 10**6


@dataclass(frozen=True, eq=False)
class Plan:
    """Shares of samples that move, the rest of each staying where it is.

    Args:
        sample: whose share a row is, R whole numbers.
        share: of the sample's mass, in [0, 1], R floats.
        points: where it goes, float32 `(R, n)`, flat.
        labels: the labels there, R whole numbers.
        density: of the samples that are there, relative to their weights, N floats; None for 1.
    """

    sample: list[int]
    share: list[float]
    points: Tensor
    labels: list[int]
    density: list[float] | None = None

    def as_json(self) -> dict[str, Any]:
        """What a file holds."""
        rows = [
            {"sample": i, "share": a, "point": point, "label": k}
            for i, a, point, k in zip(
                self.sample, self.share, self.points.double().tolist(), self.labels
            )
        ]
        return {"rows": rows} | ({} if self.density is None else {"density": self.density})

    @classmethod
    def read(cls, value: Any, property_: Omega) -> Plan:
        """A plan out of a file, its kinds and lengths checked; whether it is one, `problems` says.

        property_: that it is about.
        """
        fields = Fields(value, "plan", ("rows",), ("density",))
        rows = fields.get("rows")
        if not isinstance(rows, list) or len(rows) > MOST_ROWS:
            raise InputError(f"rows of plan is {shown(rows)}: give a list, of {MOST_ROWS} at most.")
        n = property_.x[0].numel()
        parts = [Fields(row, "a row", ("sample", "share", "point", "label")) for row in rows]
        points = []
        for row in parts:
            if len(row.reals("point")) != n:
                raise InputError(f"a point of the plan has other than {n} numbers.")
            points.append(row.reals("point"))
        moved = torch.tensor(points, dtype=torch.float64).reshape(-1, n).float()
        if not bool(torch.isfinite(moved).all()):
            raise InputError("a point holds a number that float32 cannot: give finite ones.")
        density = None if fields.get("density") is None else fields.reals("density", 0.0)
        if density is not None and len(density) != len(property_.y):
            raise InputError(f"density has other than {len(property_.y)} numbers.")
        return cls(
            whole_numbers([row.get("sample") for row in parts], "sample of rows"),
            finite([row.get("share") for row in parts], "share of rows", 0.0),
            moved,
            whole_numbers([row.get("label") for row in parts], "label of rows"),
            density,
        )

    def masses(self, property_: Omega) -> list[Fraction]:
        """The mass of each sample that is there, exactly; of sum one."""
        mu = shares_of(property_.weights.tolist())
        if self.density is None:
            return mu
        total = sum((Fraction(d) * m for d, m in zip(self.density, mu)), Fraction(0))
        if not total:
            raise InputError("the density of the plan is 0 everywhere.")
        return [Fraction(d) * m / total for d, m in zip(self.density, mu)]

    def problems(self, property_: Omega) -> list[str]:
        """Why it is no distribution of the threat, exactly; empty if it is one.

        property_: whose threat it is.
        """
        count, classes = len(property_.y), property_.outputs
        if any(not 0 <= i < count for i in self.sample):
            return ["a row names a sample that there is not"]
        found = []
        if any(not 0 <= k < classes for k in self.labels):
            found.append("a row has a label that there is not")
        if not self._inside(property_):
            found.append("a point lies outside the box")
        moved: dict[int, Fraction] = defaultdict(Fraction)
        for i, share in zip(self.sample, self.share):
            moved[i] += Fraction(share)
        if any(share > 1 for share in moved.values()):
            found.append("more than all of a sample moves")
        return found + self._crowded(property_) + self._dear(property_)

    def _inside(self, property_: Omega) -> bool:
        domain = property_.threat.domain
        if domain is None:
            return True
        points = self.points.double()
        boxes = boxes_of(domain)
        if boxes is None:
            return bool(((points >= domain[0]) & (points <= domain[1])).all())
        low, high = (side.reshape(1, -1) for side in boxes)
        return bool(((points >= low) & (points <= high)).all())

    def _crowded(self, property_: Omega) -> list[str]:
        """Whether the samples that are there are a subpopulation."""
        if self.density is None:
            return []
        mu = shares_of(property_.weights.tolist())
        most = 1 / Fraction(property_.threat.subpopulation)
        if any(mass > most * weight for mass, weight in zip(self.masses(property_), mu)):
            return ["a sample weighs more than the subpopulation allows"]
        return []

    def _dear(self, property_: Omega) -> list[str]:
        """Whether the moves cost more than eps."""
        threat = property_.threat
        x = property_.x.flatten(1).double().numpy()
        points = self.points.double().numpy()
        masses = self.masses(property_)
        spent = Fraction(0)
        for k, (i, share) in enumerate(zip(self.sample, self.share)):
            if not share or not masses[i]:
                continue
            price = distance_above(points[k], x[i], threat.norm)
            if self.labels[k] != int(property_.y[i]):
                price = (
                    math.nextafter(price + threat.label_cost, math.inf)
                    if price
                    else (threat.label_cost)
                )
            if threat.order == math.inf:
                spent = max(spent, Fraction(2 if price > threat.eps else 1))
                continue
            power = price_above(price, threat.eps, threat.order)
            if power is None:
                return ["a move costs more than eps"]
            spent += masses[i] * Fraction(share) * power
        return ["the moves cost more than eps"] if spent > 1 else []


def plan_of(found: Distribution, property_: Omega) -> Plan:
    """A distribution as a plan, with room for exact checks.

    Equal samples are one: a row of the distribution is shared by all of them.

    found: what an attack returned; property_: that it is about.
    """
    places = _places(property_.x, property_.y)
    # Whole samples that move within eps need no room.
    plain = property_.threat.order == math.inf and property_.threat.subpopulation == 1
    keep = 1.0 if plain and len(places) == len(property_.y) else 1 - 2 * ROOM
    mu = property_.mu.tolist()
    mass, weights = found.mass.tolist(), found.weights.tolist()
    flat, labels = found.points.flatten(1), found.labels.tolist()
    there: dict[tuple[bytes, int], float] = defaultdict(float)
    keys = _keys(found.x, found.y)
    for key, own in zip(keys, mass):
        there[key] += own
    density = None
    held = {key: math.fsum(mu[i] for i in rows) for key, rows in places.items()}
    if property_.threat.subpopulation < 1:
        # A little of all: no sample is then above its limit by rounding.
        ratio = {key: there[key] / held[key] if held[key] else 0.0 for key in places}
        near = {key: (1 - ROOM) * value + ROOM for key, value in ratio.items()}
        density = [near[key] for key in _keys(property_.x, property_.y)]
        held = {key: near[key] * held[key] for key in places}
    rows: list[tuple[int, float, int]] = []
    for k, key in enumerate(keys):
        moved = mass[k] * weights[k]
        if moved > 0 and held[key] > 0:
            share = min(keep * moved / held[key], 1.0)
            rows += [(i, share, k) for i in places[key]]
    chosen = torch.tensor([k for *_, k in rows], dtype=torch.int64)
    return Plan(
        [i for i, *_ in rows],
        [share for _, share, _ in rows],
        flat[chosen].float(),
        [labels[k] for *_, k in rows],
        density,
    )


def _keys(x: Tensor, y: Tensor) -> list[tuple[bytes, int]]:
    """What two samples have in common that are the same."""
    flat = x.flatten(1).float().numpy()
    return [(np.ascontiguousarray(row).tobytes(), int(k)) for row, k in zip(flat, y)]


def _places(x: Tensor, y: Tensor) -> dict[tuple[bytes, int], list[int]]:
    """The samples that are the same, by what they have in common."""
    found: dict[tuple[bytes, int], list[int]] = defaultdict(list)
    for i, key in enumerate(_keys(x, y)):
        found[key].append(i)
    return found
