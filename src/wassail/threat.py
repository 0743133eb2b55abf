"""The threat model: which distributions an adversary may choose from.

`Omega_p(eps)` is the set of distributions within Wasserstein-`p` distance `eps` of the data, for
the ground cost `||x' - x||_r` (changing a label costs infinity). `p = inf` is the point-wise threat
of AutoAttack and RobustBench. This module knows numbers only, so that importing it is instant.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from wassail.errors import InputError, remedies

if TYPE_CHECKING:
    from torch import Tensor

Number: TypeAlias = "float | int | str | Fraction"
Domain: TypeAlias = "tuple[float, float] | tuple[Tensor, Tensor] | None"
Name: TypeAlias = "int | str"

ROUNDING = 1e-9  # what weights that are written as decimals may miss a sum of one by
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


@dataclass(frozen=True, eq=False, repr=False)
class Boxes:
    """A box for each feature, or for each feature of each sample: what `parse_domain` makes of
    tensors. It stands where a pair `(low, high)` does; `low = high` freezes a coordinate.

    Args:
        low: least values, float64, `(*shape)` or `(N, *shape)` for samples `(N, *shape)`.
        high: greatest values, of the same shape.
        scale: unit of each feature, 0 for one that may not move, for `evaluate`; None for none.
    """

    low: Tensor
    high: Tensor
    scale: tuple[float, ...] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        if self.scale is not None:
            raise InputError(ONE_UNIT)
        return iter((self.low, self.high))

    def __getitem__(self, place: int) -> Tensor:
        return tuple(self)[place]

    def fit(self, x: Tensor) -> Boxes:
        """The same with one axis for the samples, of length 1 if they share the boxes, or one
        sentence if it does not fit samples `(N, *shape)`.
        """
        low, high = self
        count = len(low) if low.ndim == x.ndim else 1
        try:
            if low.ndim > x.ndim or count not in (1, len(x)):
                raise RuntimeError
            sides = [side.expand(count, *x.shape[1:]) for side in (low, high)]
        except RuntimeError:
            raise InputError(
                f"the boxes have shape {tuple(low.shape)} and the samples {tuple(x.shape)}: give "
                "one number for each feature, or for each feature of each sample."
            ) from None
        return Boxes(sides[0], sides[1])

    def take(self, rows: Tensor) -> Boxes:
        """Those of some samples, after `fit`."""
        if len(self.low) == 1:
            return self
        rows = rows.to(self.low.device)
        return Boxes(self.low[rows], self.high[rows])

    def flat(self) -> Boxes:
        """The same for flat samples, after `fit`."""
        return Boxes(self.low.flatten(1), self.high.flatten(1))

    def like(self, x: Tensor) -> Boxes:
        """The same in the type and on the device of points, rounded inward: a point between them is
        inside.
        """
        if self.low.dtype == x.dtype and self.low.device == x.device:
            return self
        low, high = (side.to(x) for side in self)
        if self.low.dtype != x.dtype:
            up = low.nextafter(low.new_tensor(math.inf))
            down = high.nextafter(high.new_tensor(-math.inf))
            low = up.where((low.cpu().double() < self.low.cpu()).to(low.device), low)
            high = down.where((high.cpu().double() > self.high.cpu()).to(high.device), high)
        return Boxes(low, high)

    @property
    def digest(self) -> str:
        """A few letters that tell these boxes from others."""
        found = hashlib.sha256()
        for side in (self.low, self.high):
            found.update(side.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:8]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Boxes) or self.scale != other.scale:
            return False
        try:
            pairs = ((self.low, other.low), (self.high, other.high))
            return all(bool((a.cpu() == b.cpu()).all()) for a, b in pairs)
        except RuntimeError:  # of other shapes
            return False

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Boxes({box_text(self)}, {self.digest})"  # type: ignore[arg-type]


ONE_BOX = (
    "the domain has boxes of its own for features or samples, which attacks, radii, verify and "
    "sandwich take: give this one pair of numbers (low, high), or make features = "
    "ws.Features(low, high, scale) and give features.model(model), features.encode(x) and "
    "domain=features.domain."
)
ONE_UNIT = (
    "the domain has a unit for each feature, which evaluate understands: for anything else make "
    "features = ws.Features(low, high, scale), and give features.model(model), features.encode(x) "
    "and domain=features.domain."
)


def boxes_of(domain: Any) -> Boxes | None:
    """A domain as boxes of features or samples, None if it is none."""
    return domain if isinstance(domain, Boxes) else None


def fitted(domain: Domain, x: Tensor) -> Domain:
    """A domain for samples `(N, *shape)`: see `Boxes.fit`; one box, or none, as it is."""
    known = boxes_of(domain)
    return domain if known is None else known.fit(x)  # type: ignore[return-value]


def box_at(domain: Domain, rows: Tensor) -> Domain:
    """The domain of some samples, after `fitted`; one box, or none, as it is."""
    known = boxes_of(domain)
    return domain if known is None else known.take(rows)  # type: ignore[return-value]


def parse_domain(value: Domain, scale: Any = None, *, own: bool = False) -> Domain:
    """A box `(low, high)`, the same for every coordinate, or None for all of R^n.

    Args:
        value: two numbers; or tensors, for a box for each feature or each feature of each sample.
        scale: unit of each feature, only with vectors; default None.
        own: whether boxes of features or samples are taken; default False, they are refused.
    """
    if value is None:
        if scale is not None:
            raise InputError("scale needs a box for each feature: give domain=(low, high).")
        return None
    known = boxes_of(value)
    if known is None and (scale is not None or any(map(_is_vector, _sides(value)))):
        known = _boxes(value, scale)
    if known is not None:
        if not own:
            raise InputError(ONE_BOX)
        known = known if scale is None else _boxes((known.low, known.high), scale)
        return known  # type: ignore[return-value]
    try:
        if isinstance(value, str):
            raise TypeError
        low, high = (number(v, "domain") for v in value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"domain {value!r} is not a box: give (low, high), for example (0, 1), or None."
        ) from None
    if not low < high:
        raise remedies(
            f"domain {value!r} is empty",
            "give (low, high) with low below high, or None for no box",
            "give --domain LOW HIGH with LOW below HIGH, or --no-box",
        )
    return (low, high)


def _sides(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) and len(value) == 2 else ()


def _is_vector(side: Any) -> bool:
    return not isinstance(side, str) and (getattr(side, "ndim", 0) > 0 or hasattr(side, "append"))


def _boxes(value: Any, scale: Any) -> Boxes:
    """Tensors in float64 on the CPU, of one shape; one number stands for all features."""
    import torch  # not before there is a tensor: this module is instant to import

    try:
        sides = [
            torch.as_tensor(side, dtype=torch.float64).detach().cpu() for side in _sides(value)
        ]
        low, high = (side.expand_as(sides[0] + sides[1]) for side in sides)
    except (TypeError, ValueError, IndexError, RuntimeError):
        raise InputError(
            "a box for each feature needs low and high, with one number for each feature, or for "
            "each feature of each sample, in both."
        ) from None
    if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
        raise InputError("a box needs finite numbers with low at or below high, per feature.")
    low, high = (side.reshape(1) if side.ndim == 0 else side for side in (low, high))
    if scale is None:
        return Boxes(low, high)
    units = _floats(scale, "scale")
    if low.ndim > 1 or len({len(low), len(units)} - {1}) > 1:
        raise InputError(
            "a box for each feature needs low and high, and scale, with one number for each "
            "feature in all of them."
        )
    if not all(0 <= unit < math.inf for unit in units):
        raise InputError("scale needs finite numbers >= 0: the unit of each feature, 0 if fixed.")
    size = max(len(low), len(units))
    return Boxes(low.expand(size), high.expand(size), units * (size // len(units)))


def _floats(values: Any, name: str) -> tuple[float, ...]:
    plain = values.tolist() if hasattr(values, "tolist") else values
    listed = plain if isinstance(plain, (list, tuple)) else [plain]
    if any(isinstance(value, (list, tuple)) for value in listed):
        raise InputError(f"{name} has more than one axis: give one number for each feature.")
    return tuple(number(value, name) for value in listed)


def box_text(domain: Domain) -> str:
    """A domain in words: "box [0, 1]", or "no box"."""
    known = boxes_of(domain)
    if known is not None and known.low.ndim > 1 and len(known.low) > 1:
        return f"own boxes of {len(known.low)} samples"
    if known is not None:
        return f"a box for each of {known.low.numel()} features"
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


def parse_label_cost(value: Number) -> float:
    """The price of a changed label: positive, inf for labels that cannot change."""
    cost = number(value, "label_cost")
    if not cost > 0:
        raise InputError(
            f"label_cost is {value!r}: give the price of a changed label, above 0, in the units "
            "of eps, or inf."
        )
    return cost


def parse_subpopulation(value: Number) -> float:
    """The least share of the population that is there, in (0, 1]."""
    share = number(value, "subpopulation")
    if not 0 < share <= 1:
        raise InputError(
            f"subpopulation is {value!r}: give the least share of the population that is there, "
            "above 0 and at most 1, for example 0.8."
        )
    return share


def dual(norm: float) -> float:
    """The dual exponent s of r: 1/r + 1/s = 1."""
    return {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[norm]


def show(value: float) -> str:
    """A number as people read it: 8/255 for a multiple of 1/255, else four digits."""
    steps = round(255 * value) if math.isfinite(255 * value) else 0
    short = float(f"{value:.4g}") == value  # 0.2 is 51/255, too, but is written as 0.2
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
class Groups:
    """The group of each sample, and between what its weight may lie.

    The weights of the groups may be any numbers in their ranges that sum to one, whatever they are
    among the samples; within a group all is as it was. With the classes as groups this is label
    shift. With a subpopulation of share alpha, each group keeps at least that share of its own.

    Args:
        ids: group of each sample, N whole numbers or texts; a tensor, an array or a list.
        low: least weight of each group: one number for all; a list in the order of `names`; or a
            dict by name; default 0.
        high: greatest weight of each group, in the same way; default 1.

    >>> Groups(["old", "young", "young"], low={"old": 0.2, "young": 0.3}).names
    ('old', 'young')
    """

    ids: tuple[Name, ...]
    low: tuple[float, ...] = 0.0  # type: ignore[assignment]
    high: tuple[float, ...] = 1.0  # type: ignore[assignment]
    names: tuple[Name, ...] = field(init=False, compare=False)

    if TYPE_CHECKING:  # what may be given is more than what is kept

        def __init__(self, ids: Any, low: Any = 0.0, high: Any = 1.0) -> None: ...

    def __post_init__(self) -> None:
        ids = tuple(_name(value) for value in _listed(self.ids, "the groups"))
        if len({isinstance(value, str) for value in ids}) > 1:
            ids = tuple(str(value) for value in ids)
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "names", tuple(sorted(set(ids))))
        for side in ("low", "high"):
            object.__setattr__(self, side, self._ranges(getattr(self, side), side))
        for name, low, high in zip(self.names, self.low, self.high):
            if not 0 <= low <= high <= 1:
                raise InputError(
                    f"the weight of group {name!r} is between {low:g} and {high:g}: give a range "
                    "within [0, 1] with its lower end first."
                )
        if ids and math.fsum(self.low) > 1 + ROUNDING:
            raise InputError(
                f"the least weights of the groups sum to {math.fsum(self.low):g}, above 1: no "
                "weights are in these ranges, so lower some."
            )
        if ids and math.fsum(self.high) < 1 - ROUNDING:
            raise InputError(
                f"the greatest weights of the groups sum to {math.fsum(self.high):g}, below 1: no "
                "weights are in these ranges, so raise some."
            )

    def _ranges(self, given: Any, side: str) -> tuple[float, ...]:
        """One end of the ranges, in the order of the names."""
        what = f"{side} of the groups"
        if isinstance(given, Mapping):
            known = {_name(key): value for key, value in given.items()}
            if self.names and isinstance(self.names[0], str):
                known = {str(key): value for key, value in known.items()}
            strange = [name for name in known if name not in self.names]
            if strange:
                raise InputError(
                    f"group {strange[0]!r} has no samples, so nothing is known about it: leave it "
                    f"out of {side}, or add samples of it."
                )
            default = 0.0 if side == "low" else 1.0
            return tuple(number(known.get(name, default), what) for name in self.names)
        if isinstance(given, (int, float, str, Fraction)):
            return (number(given, what),) * len(self.names)
        listed = _listed(given, what)
        if len(listed) != len(self.names):
            raise InputError(
                f"{side} has {len(listed)} numbers, but the samples are of {len(self.names)} "
                "groups: give one number for each, or a dict by name; a group without samples "
                "cannot be weighed."
            )
        return tuple(number(value, what) for value in listed)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each sample's group in `names`."""
        found = {name: place for place, name in enumerate(self.names)}
        return tuple(found[name] for name in self.ids)

    def __repr__(self) -> str:
        ranges = [
            f"{name}: {low:g} to {high:g}"
            for name, low, high in list(zip(self.names, self.low, self.high))[:6]
        ]
        more = ", ..." if len(self.names) > len(ranges) else ""
        return f"Groups({len(self.ids)} samples; {', '.join(ranges)}{more})"

    def __str__(self) -> str:
        return f"weights of {len(self.names)} groups within their ranges"


def parse_groups(value: Any) -> Groups | None:
    """Groups, None for none; a mapping is what a file holds."""
    if isinstance(value, Mapping) and {"ids", "low", "high"} <= set(value):
        return Groups(*(value[name] for name in ("ids", "low", "high")))
    if value is not None and not isinstance(value, Groups):
        raise InputError(
            f"groups is a {type(value).__name__}: give ws.Groups(ids, low, high), with the group "
            "of each sample."
        )
    return value


def _listed(values: Any, what: str) -> list[Any]:
    """A tensor, an array or a sequence as a list."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, (str, bytes, Mapping)) or not hasattr(plain, "__iter__"):
        raise InputError(f"{what} must be a list with one entry each, not {values!r}.")
    return list(plain)


def _name(value: Any) -> Name:
    """The name of a group: a whole number or a text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bool) and isinstance(value, (int, float)) and value == int(value):
        return int(value)
    raise InputError(f"a group is called {value!r}: give whole numbers or texts as names.")


@dataclass(frozen=True)
class Threat:
    """Everything that defines an adversary: which distributions it may choose from.

    Args:
        norm: ground norm r, 1, 2 or inf; default inf.
        order: Wasserstein order p, 1, 2, any p >= 1, or inf (the default) for the point-wise
            threat.
        eps: the budget in units of x, positive; "8/255" is accepted; required.
        domain: box `(low, high)` the points live in, or None for all of R^n; default (0, 1). Two
            tensors, with one number for each feature or for each feature of each sample, are boxes
            of their own, and `low = high` freezes a coordinate.
        scale: with vectors, the unit of each feature in which `evaluate` measures distances, 0 for
            one that may not move; default None, its range in `evaluate`, else the units of x.
        label_cost: price kappa of a changed label, in the units of eps; default inf: none changes.
        subpopulation: least share alpha of the population that is there; default 1: all of it.
        groups: `Groups`, ranges of the weights of known groups; default None: no other weights.

    >>> Threat(norm="inf", order=1, eps="8/255")
    Threat(norm=inf, order=1, eps=8/255, domain=[0, 1])
    """

    norm: float = math.inf
    order: float = math.inf
    eps: float = math.nan
    domain: Domain = (0.0, 1.0)
    scale: InitVar[Any] = None
    label_cost: float = field(default=math.inf, kw_only=True)
    subpopulation: float = field(default=1.0, kw_only=True)
    groups: Groups | None = field(default=None, kw_only=True)

    if TYPE_CHECKING:  # what may be given is more than what is kept

        def __init__(
            self,
            norm: Number = math.inf,
            order: Number = math.inf,
            eps: Number = math.nan,
            domain: Domain = (0.0, 1.0),
            scale: Any = None,
            *,
            label_cost: Number = math.inf,
            subpopulation: Number = 1.0,
            groups: Groups | None = None,
        ) -> None: ...

    def __post_init__(self, scale: Any) -> None:
        if isinstance(self.eps, float) and math.isnan(self.eps):
            raise InputError(
                "a threat needs eps: for example Threat(norm=inf, order=1, eps='8/255')."
            )
        for name, parse in (
            ("norm", parse_norm),
            ("order", parse_order),
            ("eps", parse_eps),
            ("label_cost", parse_label_cost),
            ("subpopulation", parse_subpopulation),
            ("groups", parse_groups),
        ):
            object.__setattr__(self, name, parse(getattr(self, name)))
        object.__setattr__(self, "domain", parse_domain(self.domain, scale, own=True))

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
        known = f"norm={self.norm:g}, order={self.order:g}, eps={show(self.eps)}, domain={box}"
        if self.label_cost < math.inf:
            known += f", label_cost={show(self.label_cost)}"
        if self.subpopulation < 1:
            known += f", subpopulation={self.subpopulation:g}"
        if self.groups is not None:
            known += f", groups={self.groups!r}"
        return f"Threat({known})"

    def __str__(self) -> str:
        where = f"ground norm l{self.norm:g}, {box_text(self.domain)}"
        return f"Omega_{self.order:g}({show(self.eps)}), {where}{self.others}"

    @property
    def others(self) -> str:
        """What may change beside the inputs, in words; empty where nothing else may."""
        words = ""
        if self.label_cost < math.inf:
            words += f", a changed label costs {show(self.label_cost)}"
        if self.subpopulation < 1:
            each = "" if self.groups is None else " of each group"
            words += f", subpopulations of {100 * self.subpopulation:g} % or more{each}"
        if self.groups is not None:
            words += f", {self.groups}"
        return words


def parse_threat(threat: Threat, *, own: bool = False) -> Threat:
    """A threat, or one sentence for what people give in its place: a number, a text, a pair.

    Args:
        threat: what was given.
        own: whether boxes of features or samples are taken; default False, they are refused.
    """
    if not isinstance(threat, Threat):
        raise InputError(
            f"the threat is {threat!r}: give Threat(norm=..., order=..., eps=...), for example "
            "Threat('inf', 1, '8/255')."
        )
    if threat.others:
        raise InputError(
            "this threat lets labels change or people be missing, which needs no attack or proof "
            "of its own: give the plain threat here, then label_cost, subpopulation and groups "
            "to ws.risk_curve, ws.allocate and ws.evaluate."
        )
    parse_domain(threat.domain, own=own)
    return threat
