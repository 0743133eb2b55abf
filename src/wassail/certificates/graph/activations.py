"""Smooth activations between two lines: sigmoid, tanh, GELU (both forms), SiLU, softplus and ELU,
for bound propagation.

A line of any slope `s` above a function on `[low, high]` has to lie `max_u f(u) - s u` high, and
that maximum is at an end or where `f' = s`. So a relaxation is a slope, which may be any number,
and the point where the line touches. The families:

- S-shaped (sigmoid, tanh): `f'` rises up to the bend at 0 and falls after it; `f(v) + f(-v)` is
  constant.
- gated (GELU, SiLU), `f(v) = v g(v)` with `g(v) + g(-v) = 1`, so `f(v) = v + f(-v)`: `f'` falls,
  rises between the bends `-c` and `c`, and falls again. GELU: `f'' = phi(v) (2 - v^2)`, so `c =
  sqrt 2`. With a logistic gate `g = sigma(z)`, `z = a (v + b v^3)`, `b >= 0`, and `t = 3 b v^2`,
  `f''` has the sign of `2 (1 + 2t) / (1 + t)^2 - a v tanh(z / 2)`, which falls as `|v|` grows.
- convex (softplus, ELU with its parameters 1): `f'` rises from 0 to 1, for ELU up to the point 0
  where it has a kink.

The line above with the least area is the one that is lowest in the middle: it supports the concave
envelope there, and the line below supports the convex envelope (CROWN's lines, Zhang et al. 2018,
chosen best). An envelope is the function itself or a line from an end to the point of the curve
that gives the steepest chord, which Dinkelbach's iteration (1967) finds: the slope of a chord is a
ratio, and the best point for a given ratio is where `f'` equals it.

Rounding. torch computes erfc, exp, tanh and the logistic function to within 2^-52 relatively. Where
a gate's argument is itself rounded its relative error grows with the argument, but the gate decays
faster. So the error of `f` is below `2^-50 (|f| + min(1, |v|))` and that of `f'` below 2^-50; 2^-49
instead covers two evaluations and the sums around them. torch's own softplus returns v
above a threshold: `switched.py` has that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.errors import InputError
from wassail.rounding import UNIT

ROUNDING = 8 * UNIT
LARGEST = 1e100  # beyond it the cube in the tanh form of GELU may overflow
KNOTS = 8192  # of a table; with these one step of Newton's method leaves rounding only


@dataclass(frozen=True, eq=False)
class Activation(ABC):
    """A smooth activation `f`, entry by entry, on float64 tensors of any shape.

    bend: the point c >= 0 where `f'` is largest; lowest: where `f` is least, -inf for an increasing
    function. Both are known to about 2^-50: `f'` is stationary at one and `f` at the other, so that
    the error made in `f'` and `f` is below 2^-99. distance_to_relu: at least `sup |f(v) - max(v,
    0)|`.
    """

    name: str
    bend: float
    lowest: float
    distance_to_relu: float

    @property
    def bounded(self) -> bool:
        """Whether `f` itself is bounded; if not, it is a ReLU far out, up to `distance_to_relu`."""
        return self.distance_to_relu == math.inf

    @property
    def bends(self) -> tuple[float, float]:
        """Where `f'` has its extremes."""
        return -self.bend, self.bend

    @property
    def kinks(self) -> tuple[float, ...]:
        """Where `f'` jumps."""
        return ()

    @abstractmethod
    def value(self, v: Tensor) -> Tensor:
        """`f(v)`."""

    @abstractmethod
    def derivative(self, v: Tensor) -> Tensor:
        """`f'(v)`."""

    @abstractmethod
    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        """The ends of the concave (above) or convex piece of `f` on which `f - slope v` may have
        its extremum inside.

        On the other pieces of the same kind it is monotone, and on those of the other kind its
        extremum is at their ends.
        """

    @abstractmethod
    def _where(self, slope: Tensor, above: bool) -> Tensor:
        """Where `f' = slope` on that piece, to about 1e-6; where no such point exists, the end
        with `f'` nearest to it.
        """

    def _refine(self, slope: Tensor, v: Tensor) -> Tensor:
        """The same point to all digits."""
        return v

    def jump(self, low: Tensor, high: Tensor) -> Tensor:
        """How far the model's function may be below the one that slopes are known of, on `[low,
        high]`: 0 but for those of `switched.py`.
        """
        return torch.zeros_like(low)

    def jumps(self, low: Tensor, high: Tensor) -> Tensor:
        """Where it has no Lipschitz constant on `[low, high]`, bool."""
        return torch.zeros_like(low, dtype=torch.bool)

    @torch.no_grad()
    def span(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range of `f` on `[low, high]`, rounded outward: `f` falls up to `lowest` and rises
        after it.

        Ends may be infinite.
        """
        start, end = reachable(low, high)
        least = self.value(start.clamp(min=self.lowest).minimum(end))
        top = torch.maximum(self.value(start), self.value(end))
        size = torch.maximum(start.abs(), end.abs()).clamp(max=1)
        least = least - ROUNDING * (least.abs() + size)
        top = top + ROUNDING * (top.abs() + size)
        return least, top if self.bounded else torch.where(high > LARGEST, math.inf, top)

    @torch.no_grad()
    def derivative_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range of `f'` on `[low, high]`, rounded outward: extremes are at the ends and at the
        bends.

        Ends may be infinite.
        """
        low, high = reachable(low, high)
        inner = [torch.full_like(low, c).clamp(low, high) for c in self.bends]
        found = self.derivative(torch.stack([low, high, *inner]))
        return found.amin(0) - ROUNDING, found.amax(0) + ROUNDING

    def chord(self, start: Tensor, end: Tensor, other: Tensor) -> Tensor:
        """The slope between two points, or `other` where they are so near that a difference of
        values is less accurate.
        """
        wide = end - start > 1e-5
        rise = self.value(end) - self.value(start)
        return torch.where(wide, rise / torch.where(wide, end - start, 1.0), other)

    @abstractmethod
    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes of the line above and of the line below with the least area between them and
        `f` on `[low, high]`.
        """

    @torch.no_grad()
    def touch(self, slope: Tensor, low: Tensor, high: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        """Where a line of any slope touches `f` on `[low, high]` from above or below: the point v
        and a slack >= 0.

        For all u in `[low, high]`: `f(u) - slope u <= f(v) - slope v + slack` (above), `>= ... -
        slack` (below), with the right side as float64 computes it. Not from how v was found: on a
        concave piece `[p, q]` a tangent lies above the function, so `f(u) - slope u <= f(v) - slope
        v + max((f'(v) - slope) (q - v), (slope - f'(v)) (v - p))`, and on the convex pieces the
        maximum is at their ends. `slope` broadcasts against `low` and `high`.
        """
        within_bounds(low, high)
        given = (slope, low, high)
        slope, low, high = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
        side = 1.0 if above else -1.0
        root = self._refine(slope, self._where(slope, above))
        start, end = self._ends(slope, above)
        first = start.maximum(low).minimum(high)
        last = end.maximum(low).minimum(high)
        v = root.maximum(first).minimum(last)
        rest = side * (self.derivative(v) - slope)
        error = ROUNDING * (1 + slope.abs())
        gain = torch.maximum((error + rest) * (last - v), (error - rest) * (v - first)).clamp(min=0)
        places = torch.stack([low, high, v])
        values = self.value(places)
        heights = side * (values - slope * places)
        most = torch.maximum(heights[:2].amax(0), heights[2] + gain)
        found = heights.max(0)
        reach = torch.maximum(low.abs(), high.abs())
        size = values[:2].abs().amax(0) + reach.clamp(max=1) + slope.abs() * reach
        return places.gather(0, found.indices[None])[0], most - found.values + ROUNDING * size


UNBOUNDED = (
    "an activation's input must lie between finite bounds, low <= high: give a bounded "
    "domain or radius."
)


@dataclass(frozen=True, eq=False)
class Bent(Activation):
    """Convex from 0 up to a bend c >= 0 and concave after it; the mirror image is the same up
    to a linear function.
    """

    @abstractmethod
    def _mirror(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """The slopes above and below on `[low, high]`, given those on `[-high, -low]`."""

    @torch.no_grad()
    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes of the line above and of the line below with the least area between them and `f`
        on `[low, high]`.

        With the middle m >= 0 (else on the mirrored interval) `f` is convex up to the bend c and
        concave after it. Above: the steepest chord from `low` to the concave part, or the tangent
        in m if the chord ends to the left of m. Below: the steepest chord from the convex part to
        `high`, or the tangent in m if the chord starts to the right of m.
        """
        within_bounds(low, high)
        negative = low + high < 0
        a = torch.where(negative, -high, low)
        b = torch.where(negative, -low, high)
        m = (a + b) / 2
        tangent = self.derivative(m)
        start = self.value(a)
        end = self.value(b)
        up = down = torch.where(b - a > 1e-5, (end - start) / (b - a), tangent)  # as in `chord`
        # Each step doubles the number of correct digits, also from points that are roughly right.
        for _ in range(4):
            t = self._where(up, True).clamp(min=self.bend).minimum(b)
            up = torch.where(t - a > 1e-5, torch.maximum(up, (self.value(t) - start) / (t - a)), up)
            t = self._where(down, False).clamp(max=self.bend).maximum(a)
            down = torch.where(
                b - t > 1e-5, torch.maximum(down, (end - self.value(t)) / (b - t)), down
            )
        up = torch.where(m >= self.bend, torch.minimum(up, tangent), up)
        down = torch.where(m <= self.bend, torch.minimum(down, tangent), down)
        mirrored = self._mirror(up, down)
        return torch.where(negative, mirrored[0], up), torch.where(negative, mirrored[1], down)


@dataclass(frozen=True, eq=False)
class _Sigmoidal(Bent):
    """sigmoid (rate 1) and tanh (rate 2): `f' = rate^2 sigma(rate v) sigma(-rate v)`."""

    function: Callable[[Tensor], Tensor]
    rate: float

    def value(self, v: Tensor) -> Tensor:
        """`f(v)`."""
        return self.function(v)

    def derivative(self, v: Tensor) -> Tensor:
        """`f'(v)`, without the cancellation of `1 - tanh^2`."""
        return self.rate**2 * torch.sigmoid(self.rate * v) * torch.sigmoid(-self.rate * v)

    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        zero = slope.new_zeros(())
        far = slope.new_full((), math.inf)
        return (zero, far) if above else (-far, zero)

    def _where(self, slope: Tensor, above: bool) -> Tensor:
        # 4 sigma(x) sigma(-x) = 1 - tanh(x/2)^2 = q, so x = 2 atanh(sqrt(1 - q)); slope <= 0: log
        # 0, the far end.
        q = (4 / self.rate**2 * slope).clamp(0, 1)
        root = (2 * (1 - q).sqrt().log1p() - q.log()) / self.rate
        return root if above else -root

    def _mirror(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return down, up


@dataclass(frozen=True, eq=False)
class _Table:
    """A decreasing or increasing function by linear interpolation: keys in ascending order, and
    its values there.
    """

    keys: Tensor
    values: Tensor
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, key: Tensor) -> Tensor:
        keys, values = self._on(key.device)
        key = key.clamp(keys[0], keys[-1]).contiguous()
        i = torch.searchsorted(keys, key).clamp(min=1)
        left = keys[i - 1]
        start = values[i - 1]
        return start + (key - left) / (keys[i] - left) * (values[i] - start)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys and values on a device, copied there once."""
        if device not in self._copies:
            self._copies[device] = self.keys.to(device), self.values.to(device)
        return self._copies[device]


@dataclass(frozen=True, eq=False)
class _Gated(Bent):
    """GELU and SiLU: `f(v) = v g(v)`; gate: `g`, `g'` and `g''`.

    tail and centre: first guesses of the point where `f'` has a given value, left of `-c` and
    between the bends, in coordinates (`_tail_key`, `_centre_key`) in which they are smooth, also
    next to the bends, where `f'` is stationary.
    """

    gate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    steepest: float
    tail: _Table
    centre: _Table

    @classmethod
    def make(cls, name: str, gate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> _Gated:
        def first(v: Tensor) -> Tensor:
            g, slope, _ = gate(v)
            return g + v * slope

        def second(v: Tensor) -> Tensor:
            _, slope, bend = gate(v)
            return 2 * slope + v * bend

        bend = zero_of(second, 0.5, 5.0)
        lowest = zero_of(first, 0.0, -bend)
        steepest = float(first(torch.tensor(bend, dtype=torch.float64)))
        # f(v) - v = f(-v), so the same on both sides.
        dip = -lowest * float(gate(torch.tensor(lowest, dtype=torch.float64))[0])
        grid = torch.linspace(0, 1, KNOTS + 1, dtype=torch.float64)
        left = -bend - 50 * grid**2
        left = left[first(left) < -1e-20]
        middle = bend * (2 * grid - 1)
        tail = _Table(_tail_key(first(left), steepest), left)
        centre = _Table(_centre_key(first(middle), steepest), middle)
        return cls(name, bend, lowest, rounded_up(dip), gate, steepest, tail, centre)

    def value(self, v: Tensor) -> Tensor:
        """`v g(v)`."""
        return v * self.gate(v)[0]

    def derivative(self, v: Tensor) -> Tensor:
        """`g(v) + v g'(v)`."""
        g, slope, _ = self.gate(v)
        return g + v * slope

    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        bend = slope.new_full((), self.bend)
        far = slope.new_full((), math.inf)
        if not above:
            return -bend, bend
        right = slope > 0.5  # f' <= 0 on the left tail and >= 1 on the right one
        return torch.where(right, bend, -far), torch.where(right, far, -bend)

    def _where(self, slope: Tensor, above: bool) -> Tensor:
        if not above:
            return self.centre(_centre_key(slope, self.steepest))
        right = slope > 0.5
        # The right tail is the mirror image of the left: f'(v) = 1 - f'(-v).
        value = torch.where(right, 1 - slope, slope)
        root = torch.where(value < 0, self.tail(_tail_key(value, self.steepest)), -math.inf)
        return torch.where(right, -root, root)

    def _refine(self, slope: Tensor, v: Tensor) -> Tensor:
        """One step of Newton's method for `f'(v) = slope`, too short to cross a bend; none at
        infinity.
        """
        g, first, second = self.gate(v)
        step = torch.nan_to_num((g + v * first - slope) / (2 * first + v * second))
        limit = (v.abs() - self.bend).abs() / 2
        return v - step.clamp(-limit, limit)

    def _mirror(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - up, 1 - down


@dataclass(frozen=True, eq=False)
class _Convex(Activation):
    """Softplus and ELU: `first` is `f'`, which rises from 0 to 1, and `inverse` the point where
    it has a value in [0, 1].
    """

    function: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]

    def value(self, v: Tensor) -> Tensor:
        """`f(v)`."""
        return self.function(v)

    def derivative(self, v: Tensor) -> Tensor:
        """`f'(v)`."""
        return self.first(v)

    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        far = slope.new_full((), math.inf)
        # No concave piece: none is the same as one that ends where it starts.
        return far if above else -far, far

    def _where(self, slope: Tensor, above: bool) -> Tensor:
        return self.inverse(slope.clamp(0, 1))

    @torch.no_grad()
    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The chord above, the tangent in the middle below."""
        within_bounds(low, high)
        tangent = self.derivative((low + high) / 2)
        return self.chord(low, high, tangent), tangent


def _tail_key(slope: Tensor, steepest: float) -> Tensor:
    """`sqrt log` of `f'(-c) = 1 - steepest` over `f'`: like `|v| - c` near the bend, and for
    GELU like `|v|` far out.
    """
    return ((1 - steepest) / slope.clamp(1 - steepest, -1e-20)).log().clamp(min=0).sqrt()


def _centre_key(slope: Tensor, steepest: float) -> Tensor:
    """The arc sine of `f' - 1/2`, scaled to `[-1, 1]`: like v near 0, like `|v| - c` near the
    bends.
    """
    return ((slope - 0.5) / (steepest - 0.5)).clamp(-1, 1).asin()


def _normal(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gate of GELU, the normal distribution function."""
    density = torch.exp(-v * v / 2) / math.sqrt(2 * math.pi)
    return torch.erfc(v * -math.sqrt(0.5)) / 2, density, -v * density


def _logistic(rate: float, cubic: float) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The gate `sigma(z)`, `z = rate (v + cubic v^3)`."""

    def gate(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        square = cubic * v * v
        z = rate * v * (1 + square)
        first = rate * (1 + 3 * square)
        second = 6 * rate * cubic * v
        on = torch.sigmoid(z)
        off = torch.sigmoid(-z)
        return on, on * off * first, on * off * ((off - on) * first * first + second)

    return gate


def zero_of(function: Callable[[Tensor], Tensor], positive: float, negative: float) -> float:
    """Where a function changes sign, by bisection down to neighbouring numbers."""
    for _ in range(100):
        middle = (positive + negative) / 2
        if float(function(torch.tensor(middle, dtype=torch.float64))) > 0:
            positive = middle
        else:
            negative = middle
    return positive


def rounded_up(value: float) -> float:
    """A number that is at least this one, computed twice."""
    return value + ROUNDING * (abs(value) + 1)


def reachable(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The ends as numbers: beyond `LARGEST` every activation is at its limit, or is `v`, to all
    digits.
    """
    if low.device == HOST and not (low <= high).all():
        raise InputError(
            "the bounds on an activation's input must be numbers, low <= high: check the radius "
            "and the domain."
        )
    return low.clamp(-LARGEST, LARGEST), high.clamp(-LARGEST, LARGEST)


def within(low: Tensor, high: Tensor) -> Tensor:
    """Where bounds on an activation's input are finite and in order."""
    return (low <= high) & (low >= -LARGEST) & (high <= LARGEST)


def within_bounds(low: Tensor, high: Tensor) -> None:
    """Not on a device, which the host would wait for: there what is out of order becomes NaN,
    which is no bound.
    """
    if low.device == HOST and not within(low, high).all():
        raise InputError(UNBOUNDED)


ACTIVATIONS: dict[str, Activation] = {
    "sigmoid": _Sigmoidal("sigmoid", 0.0, -math.inf, math.inf, torch.sigmoid, 1.0),
    "tanh": _Sigmoidal("tanh", 0.0, -math.inf, math.inf, torch.tanh, 2.0),
    "gelu": _Gated.make("gelu", _normal),
    "gelu_tanh": _Gated.make("gelu_tanh", _logistic(2 * math.sqrt(2 / math.pi), 0.044715)),
    "silu": _Gated.make("silu", _logistic(1.0, 0.0)),
    "softplus": _Convex(
        "softplus",
        math.inf,
        -math.inf,
        rounded_up(math.log(2)),
        lambda v: torch.logaddexp(v, torch.zeros_like(v)),
        torch.sigmoid,
        torch.logit,
    ),
    "elu": _Convex(
        "elu",
        math.inf,
        -math.inf,
        1.0,
        lambda v: torch.where(v > 0, v, v.clamp(max=0).expm1()),
        lambda v: v.clamp(max=0).exp(),
        lambda s: torch.where(s < 1, s.log(), math.inf),
    ),
}
