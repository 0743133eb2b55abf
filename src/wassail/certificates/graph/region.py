"""Where a bound holds: a box, a ball, a ball inside a box, or all of R^n, over flattened inputs
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.support import fill_one, fill_two
from wassail.errors import InputError
from wassail.rounding import UNIT, length
from wassail.threat import Number, dual, number, parse_domain, parse_norm


@dataclass(frozen=True, eq=False)
class Ball:
    """`{x in box : ||x - centre||_r <= radius}`: a domain for local bounds.

    Args:
        centre: one sample `(*shape)`.
        radius: float >= 0, in units of the norm.
        norm: ground norm r, 1, 2 or inf; default inf.
        domain: box `(low, high)` that cuts the ball, of numbers or tensors, or None (the default).
    """

    centre: Tensor
    radius: Number
    norm: Number = math.inf
    domain: tuple[float, float] | tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        parse_norm(self.norm)
        if not 0 <= number(self.radius, "radius") < math.inf:
            raise InputError(f"the ball's radius is {self.radius!r}: give a finite number >= 0.")
        parse_domain(self.domain, own=True)
        if not isinstance(self.centre, Tensor):
            raise InputError(
                f"the ball's centre is a {type(self.centre).__name__}: give one sample, a tensor."
            )
        if not torch.isfinite(self.centre).all():
            raise InputError("the ball's centre contains NaN or infinity: give a real sample.")


Where: TypeAlias = "Ball | Sequence[float | Tensor] | None"


@dataclass(frozen=True, eq=False)
class Region:
    """`{x : low <= x <= high, ||x - centre||_r <= radius}` for flat x, `(n,)` each; infinite
    bounds where there are none.
    """

    low: Tensor
    high: Tensor
    centre: Tensor
    radius: float = math.inf
    norm: float = math.inf

    @classmethod
    def make(cls, where: Where, n: int, device: torch.device = HOST) -> Region:
        """From None (all of R^n), a box `(low, high)` of numbers or tensors, or a `Ball`; its
        tensors on a device.
        """
        return cls._on_host(where, n).to(device)

    @classmethod
    def _on_host(cls, where: Where, n: int) -> Region:
        if isinstance(where, Ball):
            centre = torch.as_tensor(where.centre).detach().cpu().double().flatten()
            if len(centre) != n:
                raise InputError(
                    f"the ball's centre has {len(centre)} entries but the model takes {n}: give "
                    "one sample."
                )
            radius = number(where.radius, "radius")
            norm = parse_norm(where.norm)
            low, high = _box(where.domain, n)
            if not ((low <= centre) & (centre <= high)).all():
                raise InputError(
                    "the ball's centre lies outside its box: clamp it or give the box it lives in."
                )
            if norm == math.inf:  # a box again
                return cls(*_around(centre, radius, low, high), centre)
            return cls(low, high, centre, radius, norm)
        low, high = _box(where, n)
        finite = torch.isfinite(low) & torch.isfinite(high)
        return cls(
            low, high, torch.where(finite, (low + high) / 2, torch.zeros_like(low).clamp(low, high))
        )

    def to(self, device: torch.device) -> Region:
        """The same region with its tensors on a device."""
        if device == self.low.device:
            return self
        return replace(
            self, low=self.low.to(device), high=self.high.to(device), centre=self.centre.to(device)
        )

    @cached_property
    def bounded(self) -> bool:
        """Whether it is bounded: a recession direction exists if not."""
        return self.radius < math.inf or bool(
            (torch.isfinite(self.low) & torch.isfinite(self.high)).all()
        )

    @cached_property
    def _walled(self) -> bool:
        """Whether any side has a wall."""
        return bool((torch.isfinite(self.low) | torch.isfinite(self.high)).any())

    @cached_property
    def _boxed(self) -> bool:
        """Whether the smallest box around it is bounded."""
        low, high = self.box
        return bool((torch.isfinite(low) & torch.isfinite(high)).all())

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """The smallest box around it, `(n,)` each, rounded outward."""
        if self.radius == math.inf:
            return self.low, self.high
        return _around(self.centre, self.radius, self.low, self.high)

    def upper(self, a: Tensor, cut: bool = True) -> Tensor:
        """An upper bound on `sup <a, x>` over the region for rows `a` `(..., n)`: `(...)`, rounded
        outward; exact up to that.

        For a ball cut by a box by weak duality, `<a, c> + min_lam lam radius + sum_i max { a_i d -
        lam |d| : c + d in box }` (r = 1; squares for r = 2): any multiplier gives a bound, the one
        that fills the ball gives the value. Without `cut` by the better of box and ball, which can
        be differentiated.
        """
        best = a.new_full(a.shape[:-1], math.inf)
        low, high = self.box
        if self._boxed:
            size = torch.maximum(low.abs(), high.abs())
            best = a.clamp(min=0) @ high + a.clamp(max=0) @ low + _slack(a) * (a.abs() @ size)
        if self.radius < math.inf:
            norms = length(a, dual(self.norm), -1)
            scale = a.abs() @ self.centre.abs() + self.radius * norms
            ball = a @ self.centre + self.radius * norms
            if cut and self._walled:
                both = self._cut(a.reshape(-1, a.shape[-1])).reshape(ball.shape)
                ball = torch.minimum(ball, a @ self.centre + both)
            best = torch.minimum(best, ball + 2 * _slack(a) * scale)
        if not self.bounded:
            best = torch.where((a == 0).all(-1), 0.0, best)
        return best

    def _cut(self, a: Tensor) -> Tensor:
        """The dual value of `max { <a, d> : ||d||_r <= radius, c + d in box }` at its
        multiplier, `(m, n) -> (m,)`.
        """
        room = torch.where(a > 0, self.high - self.centre, self.centre - self.low).clamp(
            max=self.radius
        )
        radius = a.new_full((len(a),), self.radius)
        return (fill_one if self.norm == 1 else fill_two)(a.abs(), room, radius)

    def contains(self, x: Tensor, tolerance: float = 0.0) -> Tensor:
        """Which of the points `(m, n)` lie inside, bool `(m,)`."""
        inside = ((x >= self.low - tolerance) & (x <= self.high + tolerance)).all(1)
        if self.radius < math.inf:
            size = torch.linalg.vector_norm(x - self.centre, self.norm, dim=1)
            inside &= size <= self.radius + tolerance
        return inside

    def sample(self, count: int, generator: torch.Generator, spread: float = 1.0) -> Tensor:
        """Random points of the region, `(count, n)`; where it is unbounded normal ones, `spread`
        wide.

        The numbers come from a generator of the CPU, so that all devices get the same.
        """
        low, high = self.box
        normal, uniform = (
            draw(count, len(low), dtype=torch.float64, generator=generator).to(low.device)
            for draw in (torch.randn, torch.rand)
        )
        normal = spread * normal
        floor, ceiling = torch.isfinite(low), torch.isfinite(high)
        both = floor & ceiling
        inside = torch.where(both, low, 0.0) + torch.where(both, high - low, 1.0) * uniform
        above = torch.where(ceiling, inside, low + normal.abs())
        below = torch.where(ceiling, high - normal.abs(), normal)
        return self.inside(torch.where(floor, above, below))

    def inside(self, x: Tensor) -> Tensor:
        """Points `(..., n)` clamped to the box and then scaled toward the centre until they are
        in the ball.
        """
        x = torch.minimum(torch.maximum(x, self.low), self.high)
        if self.radius < math.inf:
            size = torch.linalg.vector_norm(x - self.centre, self.norm, dim=-1, keepdim=True)
            share = (self.radius * (1 - 1e-12) / size.clamp(min=1e-300)).clamp(max=1)
            x = self.centre + (x - self.centre) * share
        return x

    def __str__(self) -> str:
        if self.radius < math.inf:
            return f"l{self.norm:g} ball of radius {self.radius:g}"
        if not self.bounded:
            return "half-bounded box" if self._walled else "R^n"
        if (self.low == self.low[0]).all() and (self.high == self.high[0]).all():
            return f"box [{self.low[0]:g}, {self.high[0]:g}]"
        return "box"


def _box(where: Sequence[float | Tensor] | None, n: int) -> tuple[Tensor, Tensor]:
    if where is None:
        far = torch.full((n,), math.inf, dtype=torch.float64)
        return -far, far
    try:
        low, high = (
            torch.as_tensor(v, dtype=torch.float64).detach().cpu().flatten() for v in where
        )
        low = low.expand(n).clone()
        high = high.expand(n).clone()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"domain {where!r} is not a box for {n} inputs: give (low, high), a ws.Ball, or None."
        ) from None
    if not ((low <= high) & (low < math.inf) & (high > -math.inf)).all():  # NaN fails too
        raise InputError("the domain is empty: give (low, high) with low below high.")
    return low, high


def _around(centre: Tensor, radius: float, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """A cube cut by a box, `(n,)` each: sums are rounded, so one ulp outward."""
    bottom = torch.nextafter(centre - radius, torch.full_like(centre, -math.inf))
    top = torch.nextafter(centre + radius, torch.full_like(centre, math.inf))
    return torch.maximum(low, bottom), torch.minimum(high, top)


def _slack(a: Tensor) -> float:
    """The rounding error of an n-term sum, relative to the sum of magnitudes."""
    return (a.shape[-1] + 4) * UNIT
