"""What `certify` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wassail import names
from wassail.certificates.bound import Bound, below
from wassail.certificates.loss.chords import Chords
from wassail.certificates.loss.slopes import allocate_gains
from wassail.geometry import column
from wassail.geometry import distances as distances_between
from wassail.network import versions
from wassail.notebook import card, lines, table
from wassail.records import Record
from wassail.rounding import UNIT
from wassail.threat import Domain, Number, Threat, box_text, parse_eps
from wassail.transport.distribution import Distribution
from wassail.writing import rounded_down, rounded_up

SLOPES = tuple(names.SLOPES)


@dataclass(frozen=True, eq=False, repr=False)
class Certificate(Record):
    """What the expected loss can and cannot become within Wasserstein-1 distance eps of the data,
    for every eps (THEORY 3).

    The four slopes are ordered, `l <= S <= Lm <= L`. Computed for the network in float64
    arithmetic, with its weights as given.

    Args:
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        mu: sample weights, float64 `(N,)`.
        norm: ground norm r.
        loss: name of the loss.
        domain: box `(low, high)`, or None for R^n.
        empirical: the loss on the data.
        infinity: `Bound` on the slope l, or None if not asked for.
        anchor: `Bound` on the slope S, or None.
        margin: `Bound` on the slope Lm, or None.
        paper: `Bound` on the slope L, or None.
        line: `(lam, C)` of the second upper line `C + lam eps`, or None.
        points: evaluated points `(M, *shape)`, what the lower side is built from.
        root: index of the sample each point is reached from, `(M,)`.
        gain: loss at the point less that at its sample, `(M,)`.
        distance: of the point from its sample, `(M,)`.
        predicted: class at the point, `(M,)`.
        clean_predicted: class at the sample, `(N,)`.
        tight: whether the paper's condition for l = L holds, None if it was not looked at.
        info: seed, seconds, versions.
    """

    x: Tensor
    y: Tensor
    mu: Tensor
    norm: float
    loss: str
    domain: Domain
    empirical: float
    infinity: Bound | None
    anchor: Bound | None
    margin: Bound | None
    paper: Bound | None
    line: tuple[float, float] | None
    points: Tensor
    root: Tensor
    gain: Tensor
    distance: Tensor
    predicted: Tensor
    clean_predicted: Tensor
    tight: bool | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def bounds(self, eps: Number) -> tuple[float, float]:
        """`(lower, upper)` on the worst expected loss over `Omega_1(eps)`.

        Below: `E + l.lower eps` on R^n, raised to the evaluated witness. Above: the lowest of the
        lines `E + slope.upper eps` and `C + lam eps`.

        Args:
            eps: budget >= 0, in units of the norm.
        """
        budget = parse_eps(eps)
        low = self.empirical + self._gained(budget)
        if self.domain is None and self.infinity is not None:
            low = max(low, self.empirical + self.infinity.lower * budget)
        high = self.upper(budget)
        return below(low, high, "worst-case loss"), high

    def upper(self, eps: float) -> float:
        """The upper side alone.

        Args:
            eps: budget >= 0, in units of the norm.
        """
        slopes = [b.upper for b in (self.anchor, self.margin, self.paper) if b is not None]
        start = float(self.info.get("empirical_above", self.empirical))
        lines = [
            (min(slopes, default=math.inf), start),
            *([] if self.line is None else [self.line]),
        ]
        return min(
            start + slope * eps + 4 * UNIT * (abs(start) + slope * eps) for slope, start in lines
        )

    def witness(self, eps: Number) -> Distribution:
        """The distribution behind the lower side: inside `Omega_1(eps)`, its expected loss
        evaluated (`info["loss"]`).

        On R^n it comes from far out on the steepest ray, where the slope is approached:
        `info["claimed"]` is the lower side of `bounds(eps)` and `info["shortfall"]` how far below
        it the evaluated loss stays.

        Args:
            eps: budget > 0, in units of the norm.
        """
        threat = Threat(self.norm, 1.0, parse_eps(eps), self.domain)
        choice, weights = allocate_gains(self._chords(), self.mu, threat.eps)
        used = choice >= 0
        points = torch.where(
            column(used, self.x),
            self.points[choice.clamp(min=0)] if len(self.points) else self.x,
            self.x,
        )
        predicted = self.clean_predicted.clone()
        if used.any():
            predicted[used] = self.predicted[choice[used]]
        distance = distances_between(points, self.x, self.norm)
        loss = self.empirical + self._gained(threat.eps)
        claimed = self.bounds(threat.eps)[0]
        zero = torch.zeros(len(self.y), dtype=torch.int64)
        info = {
            "loss": loss,
            "claimed": claimed,
            "shortfall": claimed - loss,
            "versions": versions(),
        }
        return Distribution(
            self.x,
            self.y,
            points,
            weights,
            distance,
            self.clean_predicted,
            predicted,
            self.mu,
            zero,
            zero,
            zero,
            threat,
            "certificate",
            "fixed",
            info,
        )

    def _gained(self, eps: float) -> float:
        choice, weights = allocate_gains(self._chords(), self.mu, eps)
        used = choice >= 0
        return (
            math.fsum((self.mu[used] * weights[used] * self.gain[choice[used]]).tolist())
            if used.any()
            else 0.0
        )

    def _chords(self) -> Chords:
        return Chords(self.root, self.points, self.gain, self.distance, self.predicted)

    def __repr__(self) -> str:
        box = box_text(self.domain)
        parts = [
            f"{name} {_short(getattr(self, name))}"
            for name in SLOPES
            if getattr(self, name) is not None
        ]
        return (
            f"Certificate({self.loss} on {len(self.y)} samples, l{self.norm:g}, {box}: loss "
            f"{self.empirical:.6g}; "
            f"slopes per unit of eps: {', '.join(parts)})"
        )

    def _repr_html_(self) -> str:
        slopes = {name: getattr(self, name) for name in SLOPES}
        rows = [
            (name, rounded_down(bound.lower), rounded_up(bound.upper), bound.method)
            for name, bound in slopes.items()
            if bound is not None
        ]
        title = f"How fast the worst {self.loss} loss of {len(self.y)} samples can grow with eps"
        about = (
            f"Loss on the data {self.empirical:.6g}; l{self.norm:g}, {box_text(self.domain)}; "
            "slopes per unit of eps:"
        )
        return card(title, lines(about), table(("slope", "at least", "at most", "by"), rows))


def _short(bound: Bound) -> str:
    if bound.exact:
        return f"{bound.upper:.6g}"
    return f"[{rounded_down(bound.lower)}, {rounded_up(bound.upper)}]"
