"""Certified radii, as a record that saves, loads and shows itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        flat = self.points.to(x.device)
        start = x.detach().double()
        pool = []
        for push in PUSHES:
            moved = start + (1 + push) * (flat - start)
            moved = clip(moved, self.domain)
            tolerance = flip_tolerance(x.dtype)
            pool.append(
                Flips.from_points(
                    model,
                    x,
                    y,
                    clip(moved.to(x.dtype), self.domain),
                    self.norm,
                    self.domain,
                    pull_in=False,
                    method=self.method,
                    tolerance=tolerance,
                )
            )
        return pool[0].merge(*pool[1:])

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
