"""The threat model: which distributions an adversary may choose from.

`Omega_p(eps)` is the set of distributions within Wasserstein-`p` distance `eps` of the data, for
the ground cost `||x' - x||_r` (changing a label costs infinity). `p = inf` is the point-wise threat
of AutoAttack and RobustBench. This module knows numbers only, so that importing it is instant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from wassail.errors import InputError

Number: TypeAlias = "float | int | str | Fraction"
Domain: TypeAlias = "tuple[float, float] | None"

_NORMS = {"1": 1.0, "2": 2.0, "inf": math.inf}


def number(value: Number, name: str = "number") -> float:
    """A number as people write it: `0.03`, `"8/255"`, `"1e-3"`, `"inf"`."""
    try:
        if isinstance(value, bool):
            raise ValueError
        if isinstance(value, str):
            text = value.strip().lower()
            if text in {"inf", "infinity", "∞"}:
                return math.inf
            # float first: a Fraction would build 10^999999999 in full
            result = float(Fraction(text)) if "/" in text else float(text)
            if not math.isfinite(result):
                raise ValueError
        else:
            result = float(value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        raise InputError(
            f"{name} {value!r} is not a number: write it as 0.03 or as '8/255'."
        ) from None
    if math.isnan(result):
        raise InputError(f"{name} is NaN: give a number such as 0.03 or '8/255'.")
    return result


def whole(value: int, name: str, least: int = 1) -> int:
    """A count as people give it: 20, never 2.5, "many" or True.

    Args:
        value: int, or another number without a fraction.
        name: what it is called.
        least: the smallest that makes sense.
    """
    try:
        exact = not isinstance(value, (bool, str)) and int(value) == value
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact or int(value) < least:
        raise InputError(f"{name} is {value!r}: give a whole number, {least} or more.")
    return int(value)


def check_seed(seed: int) -> None:
    """Refuse a seed that is no whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed is {seed!r}: give a whole number, for example 0.")


def parse_seconds(value: Number, name: str = "time_limit") -> float:
    """A positive time in seconds."""
    seconds = number(value, name)
    if not seconds > 0:
        raise InputError(f"{name} is {value!r}: give a positive number of seconds, or None.")
    return seconds


def parse_eps(value: Number) -> float:
    """A budget: positive and finite."""
    eps = number(value, "eps")
    if not 0 < eps < math.inf:
        raise InputError(
            f"eps is {value!r}, but a budget must be positive and finite, for example '8/255'."
        )
    return eps


def parse_norm(value: Number) -> float:
    """A ground norm r: 1, 2 or inf; `"linf"`, `"L2"` and the like are understood."""
    text = str(value).strip().lower().removeprefix("l").removesuffix(".0").replace("∞", "inf")
    if text not in _NORMS:
        raise InputError(f"norm {value!r} is not supported: choose 1, 2 or inf.")
    return _NORMS[text]


def parse_order(value: Number) -> float:
    """A Wasserstein order p: any number from 1 to inf."""
    try:
        order = number(value, "order")
    except InputError:
        if isinstance(value, float):  # NaN
            raise
        raise InputError(
            f"order {value!r} is not a number: a Wasserstein order is 1, 2, any p >= 1, or inf, "
            "without a letter."
        ) from None
    if order < 1:
        raise InputError(
            f"order {value!r} is below 1: a Wasserstein order is 1, 2, any p >= 1, or inf."
        )
    return order


@dataclass(frozen=True)
class FeatureBox:
    """A box, and perhaps a unit, for each of F features: what `Threat` makes of tensors.

    Only `evaluate` knows what to do with it. Everything else has one box for all coordinates, and
    says so as soon as it looks for a bound.

    Args:
        low: least values.
        high: greatest values.
        scale: unit of each feature, 0 for one that may not move; None for the ranges.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    scale: tuple[float, ...] | None = None

    def __iter__(self) -> Iterator[float]:
        raise InputError(ONE_BOX)

    def __getitem__(self, place: int) -> float:
        raise InputError(ONE_BOX)


ONE_BOX = (
    "the domain has a box for each feature, which evaluate understands: for anything else make "
    "features = ws.Features(low, high, scale), and give features.model(model), features.encode(x) "
    "and domain=features.domain."
)


def boxes_of(domain: Any) -> FeatureBox | None:
    """A domain as a box for each feature, None if it is none."""
    return domain if isinstance(domain, FeatureBox) else None


def parse_domain(value: Domain, scale: Any = None) -> Domain:
    """A box `(low, high)`, the same for every coordinate, or None for all of R^n.

    Args:
        value: two numbers; or two vectors, for a box for each feature.
        scale: unit of each feature, only with vectors; default None, the range.
    """
    known = boxes_of(value)
    if known is not None:
        value = known.low, known.high  # type: ignore[assignment]
        scale = known.scale if scale is None else scale
    if value is None:
        if scale is not None:
            raise InputError("scale needs a box for each feature: give domain=(low, high).")
        return None
    if scale is not None or any(_is_vector(side) for side in _sides(value)):
        return _feature_box(value, scale)  # type: ignore[return-value]
    try:
        if isinstance(value, str):
            raise TypeError
        low, high = (number(v, "domain") for v in value)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"domain {value!r} is not a box: give (low, high), for example (0, 1), or None."
        ) from None
    if not low < high:
        raise InputError(
            f"domain {value!r} is empty: give (low, high) with low below high, or None for no box."
        )
    return (low, high)


def _sides(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) and len(value) == 2 else ()


def _is_vector(side: Any) -> bool:
    return not isinstance(side, str) and (getattr(side, "ndim", 0) > 0 or hasattr(side, "append"))


def _feature_box(value: Any, scale: Any) -> FeatureBox:
    """Vectors as tuples of floats; one number stands for all features."""
    sides = [_floats(side, "domain") for side in _sides(value)]
    units = None if scale is None else _floats(scale, "scale")
    sizes = {len(side) for side in [*sides, *([] if units is None else [units])]} - {1}
    if len(sides) != 2 or len(sizes) > 1:
        raise InputError(
            "a box for each feature needs low and high, and perhaps scale, with one number for "
            "each feature in all of them."
        )
    size = max(sizes, default=1)
    low, high = (side * (size // len(side)) for side in sides)
    if not all(bottom <= top < math.inf and bottom > -math.inf for bottom, top in zip(low, high)):
        raise InputError("a box needs finite numbers with low at or below high, per feature.")
    if units is None:
        return FeatureBox(low, high)
    units = units * (size // len(units))
    if not all(0 <= unit < math.inf for unit in units):
        raise InputError("scale needs finite numbers >= 0: the unit of each feature, 0 if fixed.")
    return FeatureBox(low, high, units)


def _floats(values: Any, name: str) -> tuple[float, ...]:
    plain = values.tolist() if hasattr(values, "tolist") else values
    listed = plain if isinstance(plain, (list, tuple)) else [plain]
    if any(isinstance(value, (list, tuple)) for value in listed):
        raise InputError(f"{name} has more than one axis: give one number for each feature.")
    return tuple(number(value, name) for value in listed)


def box_text(domain: Domain) -> str:
    """A domain in words: "box [0, 1]", or "no box"."""
    known = boxes_of(domain)
    if known is not None:
        return f"a box for each of {len(known.low)} features"
    return "no box" if domain is None else f"box [{domain[0]:g}, {domain[1]:g}]"


def parse_level(value: Number, name: str) -> float:
    """A share or probability between 0 and 1."""
    level = number(value, name)
    if not 0 <= level <= 1:
        raise InputError(
            f"{name} {value!r} is not between 0 and 1: accuracies are fractions here, write 0.5 "
            "for 50 %."
        )
    return level


def parse_confidence(confidence: Number) -> float:
    """A confidence strictly between 0 and 1.

    Args:
        confidence: for example 0.95.
    """
    value = number(confidence, "confidence")
    if not 0 < value < 1:
        raise InputError(
            f"confidence is {confidence!r}: give a number between 0 and 1, for example 0.95."
        )
    return value


def dual(norm: float) -> float:
    """The dual exponent s of r: 1/r + 1/s = 1."""
    return {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[norm]


def show(value: float) -> str:
    """A number as people read it: 8/255 for a multiple of 1/255, else four digits."""
    steps = round(255 * value) if math.isfinite(255 * value) else 0
    short = float(f"{value:.4g}") == value  # 0.2 is 51/255 too, but nobody calls it that
    if 0 < steps < 255 and not short and math.isclose(steps / 255, value, rel_tol=1e-12):
        return f"{steps}/255"
    return f"{value:.4g}"


def floor_percent(share: float, digits: int = 2) -> str:
    """A certified share as a percentage, rounded down.

    The share is a float that was itself rounded down from, say, 55 of 100 samples; 2^-48 makes up
    for that and no more, so that 55 % is not printed as 54.99: no other multiple of 0.01 % lies
    that close to a count over fewer than 10^10 samples.
    """
    return f"{math.floor(10 ** (digits + 2) * (share + 2.0**-48)) / 10**digits:.{digits}f}"


def ceil_percent(share: float, digits: int = 2) -> str:
    """An attacked share as a percentage, rounded up: what stands behind "at most" is at most
    that; see `floor_percent`.
    """
    return f"{max(math.ceil(10 ** (digits + 2) * (share - 2.0**-48)), 0) / 10**digits:.{digits}f}"


@dataclass(frozen=True)
class Threat:
    """Everything that defines an adversary: which distributions it may choose from.

    Args:
        norm: ground norm r, 1, 2 or inf; default inf.
        order: Wasserstein order p, 1, 2, any p >= 1, or inf (the default) for the point-wise
            threat.
        eps: the budget in units of x, positive; "8/255" is accepted; required.
        domain: box `(low, high)` the points live in, or None for all of R^n; default (0, 1). Two
            vectors, one number for each feature, for `evaluate`.
        scale: with vectors, the unit of each feature in which distances are measured, 0 for one
            that may not move; default None, its range.

    >>> Threat(norm="inf", order=1, eps="8/255")
    Threat(norm=inf, order=1, eps=8/255, domain=[0, 1])
    """

    norm: float = math.inf
    order: float = math.inf
    eps: float = math.nan
    domain: Domain = (0.0, 1.0)
    scale: InitVar[Any] = None

    def __post_init__(self, scale: Any) -> None:
        if isinstance(self.eps, float) and math.isnan(self.eps):
            raise InputError(
                "a threat needs eps: for example Threat(norm=inf, order=1, eps='8/255')."
            )
        for name, parse in (
            ("norm", parse_norm),
            ("order", parse_order),
            ("eps", parse_eps),
        ):
            object.__setattr__(self, name, parse(getattr(self, name)))
        object.__setattr__(self, "domain", parse_domain(self.domain, scale))

    def radius(self, kappa: float = 1.0) -> float:
        """How far a fraction 1/kappa of every sample may move: kappa^(1/p) eps (THEORY 2b).

        Args:
            kappa: number >= 1; default 1, all of the sample.
        """
        if not kappa >= 1:
            raise InputError(f"kappa is {kappa!r}: give a number of at least 1.")
        return float(kappa ** (1 / self.order) * self.eps)

    def __repr__(self) -> str:
        box = "None" if self.domain is None else box_text(self.domain).removeprefix("box ")
        return (
            f"Threat(norm={self.norm:g}, order={self.order:g}, eps={show(self.eps)}, domain={box})"
        )

    def __str__(self) -> str:
        where = f"ground norm l{self.norm:g}, {box_text(self.domain)}"
        return f"Omega_{self.order:g}({show(self.eps)}), {where}"


def parse_threat(threat: Threat) -> Threat:
    """A threat, or one sentence for what people give in its place: a number, a text, a pair."""
    if not isinstance(threat, Threat):
        raise InputError(
            f"the threat is {threat!r}: give Threat(norm=..., order=..., eps=...), for example "
            "Threat('inf', 1, '8/255')."
        )
    return threat
