"""Certified radii and verdicts, as records that save, load and show themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wassail.geometry import clip
from wassail.losses import flip_tolerance
from wassail.network import Model
from wassail.notebook import card, pairs, picture
from wassail.records import Record
from wassail.specification import Labels
from wassail.threat import Domain, box_text
from wassail.transport.flips import Flips
from wassail.transport.picture import draw_distances

# Relative, to move a boundary point to the other side.
PUSHES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3)
# An executed radius is taken to be the distance itself where a flip is known at most this much
# farther away (see `Radii`).
EXACT = 1e-3
STATUSES = ("proved", "falsified", "wrong", "open")


@dataclass(frozen=True, eq=False, repr=False)
class Radii(Record):
    """Certified radii of N samples: no point of the domain within `values[i]` of sample i is
    classified other than y_i.

    An executed radius is exact where a flip is known at most 0.1 % farther away: no proof gets past
    the bound on the rounding error.

    Args:
        values: float64 `(N,)`, rounded down; 0 where the sample is misclassified, inf where nothing
            in the domain flips.
        exact: bool `(N,)`, whether it is the distance itself (to 1e-9).
        method: name of the method.
        norm: ground norm r.
        domain: box `(low, high)`, those of the samples, or None for R^n.
        points: where the nearest flips were found on the way, the sample itself where none was,
            `(N, *shape)`, or None.
        info: time, versions, settings.
        arithmetic: whether the radii hold for the network as it is "executed", in its own
            floating-point type, or for the "exact" function.
        errors: how far rounding may move the smallest margin at each sample, `(N,)`, by a bound;
            where the network is not covered what was seen there (`info["errors"]` says which); or
            None.
        proved_by: of each sample the method that proved its radius, "" where it is 0; None in
            records of earlier versions.
    """

    values: Tensor
    exact: Tensor
    method: str
    norm: float
    domain: Domain
    points: Tensor | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    arithmetic: str = "exact"
    errors: Tensor | None = None
    proved_by: tuple[str, ...] | None = None

    def flips(self, model: Model, x: Tensor, y: Labels) -> Flips | None:
        """The points as flips of the model itself, which close the sandwich where radii are exact;
        None without points.

        They lie on the boundary: each is moved outward until the model, in its own arithmetic, is
        clearly wrong there.

        Args:
            model: callable from a batch `(n, *shape)` to logits `(n, K)`.
            x: the samples of the radii, `(N, *shape)`.
            y: true labels, integer tensor `(N,)`, or a `Specification`.
        """
        if self.points is None:
            return None
        where = (model, x, y, self.points, PUSHES, self.norm, self.domain, self.method)
        return flips_behind(*where, tolerance=flip_tolerance(x.dtype))

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        sure = self.values > 0
        middle = float(self.values[sure].median()) if sure.any() else 0.0
        box = box_text(self.domain)
        return (
            f"Radii({len(self)} samples by {self.method}, l{self.norm:g}, {box}: "
            f"{int(sure.sum())} above 0, median of those "
            f"{middle:.4g}, {int(self.exact.sum())} exact; {self.arithmetic} arithmetic)"
        )

    def _repr_html_(self) -> str:
        sure = self.values > 0
        middle = float(self.values[sure].median()) if sure.any() else 0.0
        rows = [
            ("threat", f"l{self.norm:g}, {box_text(self.domain)}"),
            ("method", f"{self.method}, {self.arithmetic} arithmetic"),
            ("above 0", f"{int(sure.sum())}, median {middle:.4g}"),
            ("exact", int(self.exact.sum())),
        ]
        drawn = picture(
            lambda: draw_distances(None, self.values, self.norm),
            "histogram of the certified radii",
        )
        return card(f"Certified radii of {len(self)} samples", pairs(rows), drawn)


def flips_behind(
    model: Model,
    x: Tensor,
    y: Labels,
    points: Tensor,
    pushes: Sequence[float],
    norm: float,
    domain: Domain,
    method: str,
    *,
    tolerance: float = 0.0,
    batch_size: int | None = None,
) -> Flips:
    """The nearest flips among points on the rays from samples through candidates.

    Args:
        model: callable from a batch to logits.
        x: the samples, `(N, *shape)`.
        y: labels, or a specification.
        points: a candidate for each, `(N, *shape)`.
        pushes: how far beyond it points are tried, relative to its distance.
        norm: ground norm.
        domain: the box, or None.
        method: the name that flips have.
        tolerance: as in `Flips.from_points`.
        batch_size: most samples in one call of the model.
    """
    start = x.detach().cpu().double()
    step = points - start
    options: Any = {"pull_in": False, "method": method, "tolerance": tolerance}
    pool = []
    for push in pushes:
        moved = clip(start + (1 + push) * step, domain)
        moved = clip(moved.to(x.device, x.dtype), domain)
        pool.append(
            Flips.from_points(model, x, y, moved, norm, domain, batch_size=batch_size, **options)
        )
    return pool[0].merge(*pool[1:])


@dataclass(frozen=True, eq=False, repr=False)
class Verdicts(Record):
    """Verdicts on N samples, each at a radius: `verify` makes them.

    Args:
        status: of each sample "proved" (nothing in the closed ball flips), "falsified" (a point of
            it does: `points`), "wrong" (the sample itself is misclassified), or "open".
        radius: the radii, float64 `(N,)`.
        points: `(N, *shape)`: the flip where a sample is falsified, else the sample.
        reasons: of each sample why it is open, "" where it is not.
        proved_by: of each sample the way it was proved, "" where it was not.
        norm: ground norm r.
        domain: box `(low, high)`, or None for R^n.
        arithmetic: whether proofs hold for the network as it is "executed" or for the "exact"
            function.
        info: effort, operations and seconds spent, passes, versions.
    """

    status: tuple[str, ...]
    radius: Tensor
    points: Tensor
    reasons: tuple[str, ...]
    proved_by: tuple[str, ...]
    norm: float
    domain: Domain
    arithmetic: str = "exact"
    info: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.status)

    @property
    def proved(self) -> Tensor:
        """Which samples are proved, bool `(N,)`."""
        return self._are("proved")

    @property
    def falsified(self) -> Tensor:
        """Which samples have a flip in their ball, bool `(N,)`."""
        return self._are("falsified")

    @property
    def counts(self) -> dict[str, int]:
        """How many samples have each status."""
        return {name: self.status.count(name) for name in STATUSES}

    def _are(self, name: str) -> Tensor:
        return torch.tensor([own == name for own in self.status], dtype=torch.bool)

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        where = f"l{self.norm:g}, {box_text(self.domain)}"
        return f"Verdicts({len(self)} samples, {where}: {told}; {self.arithmetic} arithmetic)"

    def _repr_html_(self) -> str:
        rows = [("threat", f"l{self.norm:g}, {box_text(self.domain)}"), *self.counts.items()]
        return card(f"Verdicts on {len(self)} samples", pairs(rows))
