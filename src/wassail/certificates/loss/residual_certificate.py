"""`certify` for the losses of regression: slopes of the worst expected error (THEORY 3 and 11).

The slopes are those of the rows: Lm is the Lipschitz constant of an output and l its growth along
the steepest ray, each times the slope of the loss as a function of the output. There is no slope of
the paper: with one output its L is Lm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.graph.graph import Graph
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss.certificate import SLOPES, Certificate
from wassail.certificates.loss.chords import Chords, change_of_scale, steepest_of
from wassail.certificates.loss.curve import total_of
from wassail.certificates.loss.growth import lowest_anywhere
from wassail.certificates.loss.others import OthersCertificate
from wassail.certificates.loss.points import Points
from wassail.certificates.loss.recession import recession, shadow
from wassail.certificates.loss.samples import Asked, Samples, with_errors
from wassail.certificates.loss.slope_search import WORK, SlopeSearch
from wassail.errors import InputError, unknown
from wassail.geometry import vector_norm
from wassail.network import Model
from wassail.rounding import UNIT
from wassail.specification import Specification
from wassail.threat import Number, parse_label_cost, parse_seconds, parse_subpopulation
from wassail.transport.allocation import sample_weights
from wassail.transport.distribution import Distribution

RADII = (1e-4, 1e-3, 1e-2, 0.05, 0.2, 0.5, 1.0, 2.0)  # where steep chords are looked for
FAR = tuple(4.0**k for k in range(-4, 13))  # and along a ray, in units of the samples


@dataclass(frozen=True, eq=False, repr=False)
class ResidualCertificate(Certificate):
    """A `Certificate` of a regression: `certify` makes it for the losses of errors.

    Args:
        targets: float64 `(N, K)`.
        quantile: of the pinball loss.
        delta: of the Huber loss.
        label_cost: price of moving a target by one unit; inf where they stay. Where they move, a
            sample is `(x, t)`, flat, with t the move of its target times its price.
    """

    targets: Tensor = field(kw_only=True)
    quantile: float = field(default=0.5, kw_only=True)
    delta: float = field(default=1.0, kw_only=True)
    label_cost: float = field(default=math.inf, kw_only=True)

    def witness(self, eps: Number) -> Distribution:
        """The distribution behind the lower side, as in `Certificate`.

        Args:
            eps: budget > 0, in units of the norm.
        """
        if self.label_cost < math.inf:
            raise InputError(
                "the distribution moves targets, which a Distribution does not hold: use "
                "ws.loss_curve(...).atoms(eps)."
            )
        y = self.targets
        eye = torch.eye(y.shape[1], dtype=torch.float64)
        rule = Specification(torch.cat([-eye, eye]), torch.cat([y, -y], 1), about=self.loss)
        return replace(super().witness(eps), specification=rule)


def certify_errors(
    model: Model | Graph, x: Tensor, y: Any, asked: Asked, slopes: Sequence[str], seed: int
) -> Certificate:
    """Slopes of the worst expected error over `Omega_1(eps)`, from both sides.

    Args:
        model: callable from a batch to outputs, or a graph that was read.
        x: samples.
        y: targets.
        asked: everything else.
        slopes: which of "infinity", "anchor", "margin" to compute; "paper" is left out.
        seed: of the random starts.
    """
    for name in slopes:
        if name not in SLOPES:
            raise unknown("slope", name, SLOPES)
    if asked.loss == "squared":
        raise InputError(
            "the squared error grows faster than any slope: use ws.loss_curve(..., order=2), or "
            "loss='huber'."
        )
    began = clock.now()
    price = parse_label_cost(asked.label_cost)
    share = parse_subpopulation(asked.subpopulation)
    asked = replace(asked, arithmetic="exact", grid=[1.0])
    samples, _ = with_errors(model, x, y, asked, price)
    mu = sample_weights(asked.mu, len(samples.x))
    limit = None
    if asked.time_limit is not None:
        limit = parse_seconds(asked.time_limit) - (clock.now() - began)
    with clock.limited(limit, WORK if limit is None else math.inf):
        work = ErrorSlopes(samples, mu, seed)
        found = work.run(tuple(slopes), price)
    if share == 1:
        return found
    # People may be missing (THEORY 12).
    clean = Points(samples).clean.cpu()
    return OthersCertificate.of(found, found.y, mu, clean, work.start, math.inf, share)


class ErrorSlopes(SlopeSearch):
    """The slopes of a loss of errors."""

    names = ("margin", "infinity")

    def __init__(self, samples: Samples, mu: Tensor, seed: int) -> None:
        super().__init__(samples, mu, seed)
        self.residuals = samples.residuals
        # Of the loss as a function of u, on all of R.
        self.steep = self.residuals.delta if self.residuals.loss == "huber" else 1.0
        with clock.unlimited():  # without it nothing is known
            self.start = self.residuals.above(samples.lowest(0.0)).cpu()
        self.rays: list[Tensor] = []

    def run(self, wanted: tuple[str, ...], price: float) -> Certificate:
        """The slopes that are asked for, then points."""
        self.search(self.names if "anchor" in wanted else wanted, lambda share: None)
        points = self._points()
        at, root, value, distance, side = points.columns()
        clean = points.clean.cpu()
        if "anchor" in wanted:
            self.found["anchor"] = self._anchor(clean, (at, root, value, distance, side))
        found = Chords(root, at, value - clean[root], distance, side)
        above = total_of(self.mu, self.start)
        return ResidualCertificate(
            **self.fields(wanted, found, clean, points.clean_predicted.cpu(), above),
            targets=self.residuals.y,
            quantile=self.residuals.quantile,
            delta=self.residuals.delta,
            label_cost=price,
        )

    def _scaled(self, bound: Bound, factor: float) -> Bound:
        """The bound on a slope of an output as one of the loss."""
        low = bound.lower * factor * (1 - 4 * UNIT)
        high = bound.upper * factor * (1 + 4 * UNIT)
        return Bound(low, high, bound.method, bound.witness, bound.info)

    def _margin(self) -> None:
        bound = lipschitz(
            self.graph.head(self.residuals.too_high),
            self.norm,
            self.samples.place,
            outputs="logits",
            norm_out=math.inf,
            seed=self.seed,
        )
        self.found["margin"] = self._scaled(bound, self.residuals.steepest * self.steep)

    def _infinity(self) -> None:
        """Of outputs that are too high and of those that are too low, each with its weight."""
        samples = self.samples
        if samples.domain is not None and samples.bounded:
            self.found["infinity"] = Bound(0.0, 0.0, "bounded domain")
            return
        if samples.domain is not None:  # only a target moves without end
            method = "none: some inputs are bounded and some are not"
            self.found["infinity"] = Bound(0.0, math.inf, method)
            return
        half = self.graph.outputs // 2
        eye = torch.eye(self.graph.outputs, dtype=torch.float64)
        parts = []
        for place, weight in enumerate(self.residuals.weights):
            rows = eye[[0, *range(1 + place * half, 1 + (place + 1) * half)]]
            far = recession(self.graph.head(rows))
            if far is None:
                self.found["infinity"] = Bound(0.0, 0.0, "bounded")
                return
            one = self.at_infinity(far, [0])
            if one.witness is not None:
                self.rays.append(one.witness)
            parts.append(self._scaled(one, weight * self.steep))
        best = max(parts, key=lambda bound: bound.lower)
        high = max(bound.upper for bound in parts)
        self.found["infinity"] = Bound(best.lower, high, best.method, best.witness, best.info)

    def find_line(self) -> None:
        """`C + lam eps`: in a box the highest loss. On R^n an output differs from its recession
        function by no more than its drift, so that `u <= l ||x|| + max_j w_j (drift_j + offset_j)`.
        """
        samples = self.samples
        top = lowest_anywhere(samples, 0)
        most = self.residuals.above(top).cpu()
        if bool(most.isfinite().all()):
            self.line = 0.0, total_of(self.mu, most)
            return
        known = self.found.get("infinity")
        if samples.domain is not None or known is None or known.upper == math.inf:
            return
        drift = shadow(self.graph).drift(0)[1:]
        offsets = self.residuals.offsets[:, 1:]
        # One of y and -y is 0 or more, and so is the drift: nothing cancels in a height, and the
        # units of the total pay for all roundings.
        rest = self.residuals.weighted(drift + offsets) * self.steep
        lam = known.upper * (1 + 1e-9)
        length = lam * vector_norm(samples.x.cpu().double(), samples.norm)
        height = rest.amax(1) + length * (1 + (self.graph.inputs + 8) * UNIT)
        self.line = lam, total_of(self.mu, height) + 8 * UNIT * total_of(self.mu, height.abs())

    def _points(self) -> Points:
        """Evaluated points near and far."""
        samples = self.samples
        found = Points(samples)
        n = samples.x[0].numel()
        scale = samples.diagonal if samples.bounded else change_of_scale(n, self.norm)
        for radius in RADII:
            found.climb(radius * scale)
        size = max(1.0, float(samples.x.abs().max()))
        for ray in self.rays:
            way = ray.to(samples.x).reshape(1, *samples.x.shape[1:])
            for far in FAR:
                found.add(samples.x + far * size * way, None)
        return found

    def _anchor(self, clean: Tensor, columns: tuple[Tensor, ...]) -> Bound:
        """A chord is at most as steep as the outputs; an evaluated one is rounded down."""
        margin = self.found["margin"]
        points, root, value, distance, side = columns
        factor = self.residuals.steepest * self.steep
        size = value + clean[root] + factor * self.residuals.y.abs().amax(1)[root]
        gain = (value - clean[root] - 16 * UNIT * size) / factor
        chord, _ = steepest_of(
            self.graph, self.samples.x, Chords(root, points, gain, distance, side)
        )
        # The chord has been rounded down by 1e-12 of itself: more than two operations lose.
        low = max(chord * factor, self.found["infinity"].lower)
        return Bound(below(low, margin.upper, "anchor"), margin.upper, f"margin, {margin.method}")
