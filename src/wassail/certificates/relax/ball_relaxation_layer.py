"""One layer of ReLUs over a ball and a box: the formula of `ball_relaxation.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.relax.lines import Lines
from wassail.certificates.relax.rows import row_dot

HALVINGS = 9  # of the search for the first multipliers
PACKED = 3  # rows are packed where the neurons that count are a third at most
LEAST = 1e-30  # a multiplier: so small that it says nothing


@dataclass(frozen=True, eq=False)
class BallLayer:
    """One ReLU node for R rows: all that its bound needs.

    up, down: the slopes for coefficients above and below 0, the parameters of the ascent with the
    logarithm of the multiplier, `(R,)`.
    """

    line: Lines
    free: Tensor
    c: Tensor
    here: Tensor
    low: Tensor
    high: Tensor
    slope: Tensor
    error: Tensor
    rho: Tensor

    def split(self, w: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """`(g, w)` of the neurons that are not dead; 0 at the others."""
        open_ = torch.where(self.free, w, 0.0)
        return torch.where(open_ > 0, up, down) * open_, open_

    def places(self, w: Tensor, g: Tensor, lam: Tensor, q: Tensor | float) -> tuple[Tensor, Tensor]:
        """Where the two maxima are: on the right of the kink and on its left."""
        with torch.no_grad():
            low = torch.maximum(self.low, -self.c)
            right = _highest(w + q * (self.c - self.here) - g, lam - q, low, self.high)
            high = torch.minimum(self.high, -self.c)
            shift = self.slope * self.c - self.here
            pull = self.slope * (w + q * shift) - g
            left = _highest(pull, lam - q * self.slope.square(), self.low, high)
        return right, left

    def values(
        self, w: Tensor, g: Tensor, lam: Tensor, q: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The maximum, where it is, and the magnitude of what it is a sum of."""
        right, left = self.places(w, g, lam, q)
        up = self.c + right - self.here
        first = w * up + q / 2 * up.square() - g * right - lam / 2 * right.square()
        down = self.slope * (self.c + left) - self.here
        second = w * down + q / 2 * down.square() - g * left - lam / 2 * left.square()
        # A neuron that cannot move has its kink at both ends: the right side holds for it.
        first = torch.where(self.high >= -self.c, first, -math.inf)
        second = torch.where(self.low < -self.c, second, -math.inf)
        # Terms may cancel, and the places are rounded: all count in full, at the ends.
        far = torch.maximum(-self.low, self.high)
        wide = far + 2 * self.c.abs()
        size = (w.abs() + q * wide) * wide + (g.abs() + lam * far) * far
        return torch.maximum(first, second), torch.where(first > second, right, left), size

    def first_multiplier(self, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """The logarithm of the best multiplier for these coefficients: where the maxima fill the
        ball.
        """
        with torch.no_grad():
            g, w = self.split(w, up, down)
            layer, (g, w) = self.packed(w, g, w)
            scale = lengths_of(w) / layer.rho.clamp(min=LEAST)
            scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
            low = scale.log() - 20.0
            high = scale.log() + 10.0
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                lam = widened(middle.exp().clamp(min=LEAST), w)
                at = layer.values(w, g, lam)[1]
                more = squares_of(torch.where(layer.free, at, 0.0)) > layer.rho.square()
                low = torch.where(more, middle, low)
                high = torch.where(more, high, middle)
        return (low + high) / 2

    def multiplier(self, log_lam: Tensor, q: Tensor | None) -> Tensor:
        """`lam` `(R,)`: more than q, so that no maximum is at an end for its sake."""
        lam = log_lam.exp().clamp(min=LEAST)
        return lam if q is None else lam + q

    def costs(
        self, w: Tensor, up: Tensor, down: Tensor, log_lam: Tensor, q: Tensor | None
    ) -> Tensor:
        """The maxima, one for each neuron."""
        g, open_ = self.split(w, up, down)
        more = 0.0 if q is None else widened(q, w)
        best = self.values(open_, g, widened(self.multiplier(log_lam, q), w), more)[0]
        return torch.where(self.free, best, 0.0)

    def pull(
        self,
        w: Tensor,
        up: Tensor,
        down: Tensor,
        log_lam: Tensor,
        terms: float,
        q: Tensor | None = None,
        linked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Coefficients of the inputs, and the constant; terms: what rounding takes of a sum.

        q: `q / 2 ||f(c + d) - f(c)||^2` is added to what is bounded, `(R,)`; linked: rows that pay
        for their ball elsewhere, `(R,)`.
        """
        lam = self.multiplier(log_lam, q)
        g, open_ = self.split(w, up, down)
        best = self._best(open_, g, lam, terms, q)
        firm = torch.where(self.free, 0.0, w)
        constant = row_dot(firm, self.line.off) + row_dot(firm.abs(), self.line.far)
        known = torch.isfinite(self.rho)
        rho = torch.where(known, self.rho, 0.0)
        ball = lam / 2 * rho * rho * (1 + 2.0**-40)  # not rho^2, which may underflow
        if linked is not None:
            ball = torch.where(linked, 0.0, ball)
            known = known | linked
        total = constant + best + ball
        total = torch.where(known, total, math.inf)
        settled = firm * self.line.mid + firm.abs() * self.line.rad
        return torch.where(self.free, g, settled), total

    def _best(self, w: Tensor, g: Tensor, lam: Tensor, terms: float, q: Tensor | None) -> Tensor:
        """The sum of the maxima, rounded up by `terms`, `(R,)`."""
        layer = self
        if q is None and not torch.is_grad_enabled():  # what has no coefficient costs nothing
            layer, (w, g) = self.packed(w, w, g)
        more = 0.0 if q is None else widened(q, w)
        best, _, size = layer.values(w, g, widened(lam, w), more)
        best = best + g.abs() * layer.error + terms * (size + g.abs() * layer.error)
        return torch.where(layer.free, best, 0.0).flatten(1).sum(1)

    def packed(self, w: Tensor, *values: Tensor) -> tuple[BallLayer, list[Tensor]]:
        """The layer and some values with the neurons of each row that count, `(R, m)`: rows of a
        convolution have coefficients for few. The rest of a row is filled with neurons that do not
        count, whose coefficients are 0.
        """
        counts = (w != 0).flatten(1)
        most = int(counts.sum(1).amax()) if len(w) else 0
        size = counts.shape[1]
        if PACKED * most > size:
            return self, list(values)
        row, column = counts.nonzero().T
        start = counts.sum(1).cumsum(0) - counts.sum(1)
        place = torch.arange(len(row), device=row.device) - start[row]
        # Neurons that are left over: any index will do, the masks below leave them out.
        index = row.new_zeros(len(w), most)
        index[row, place] = column
        known = torch.zeros_like(index, dtype=torch.bool)
        known[row, place] = True

        def taken(value: Tensor) -> Tensor:
            return value.expand_as(w).flatten(1).gather(1, index)

        mine = (self.c, self.here, self.low, self.high, self.slope, self.error)
        c, here, low, high, slope, error = (taken(v) for v in mine)
        free = taken(self.free) & known
        layer = BallLayer(self.line, free, c, here, low, high, slope, error, self.rho)
        return layer, [torch.where(known, taken(v), 0.0) for v in values]

    def rows(self, keep: Tensor) -> BallLayer:
        """For some of the rows."""
        line = Lines(
            *(v[keep] for v in (self.line.mid, self.line.rad, self.line.off, self.line.far))
        )
        free, c, here, low, high, error, rho = (
            v[keep]
            for v in (
                self.free,
                self.c,
                self.here,
                self.low,
                self.high,
                self.error,
                self.rho,
            )
        )
        return BallLayer(line, free, c, here, low, high, self.slope, error, rho)


def _highest(slope: Tensor, bend: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Where `slope t - bend t^2 / 2` is highest between two ends."""
    top = slope / torch.where(bend > 0, bend, 1.0)
    end = torch.where(slope > bend * (low + high) / 2, high, low)
    return torch.where(bend > 0, torch.maximum(torch.minimum(top, high), low), end)


def widened(values: Tensor, like: Tensor) -> Tensor:
    """One number a row, to be multiplied with rows of other shapes."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def squares_of(values: Tensor) -> Tensor:
    """The square of the length of each row."""
    return values.flatten(1).square().sum(1)


def lengths_of(values: Tensor) -> Tensor:
    """The length of each row."""
    return squares_of(values).sqrt()
