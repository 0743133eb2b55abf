"""Data whose features are no pixels: a box and a unit for each of them, by a change of variables.

Feature i may lie between `low_i` and `high_i`, and a distance is measured in units of `scale_i`. In
the variable `z_i = (x_i - low_i) / scale_i` that is the plain norm, and the box of feature i is
`[0, top_i]` with `top_i = (high_i - low_i) / scale_i`. Attacks and certificates have one box for
all features, `[0, max_i top_i]`, so the model that they see first clips each feature to its own
top.

This is exact: clipping moves no point farther from a sample that is inside its own box, so a flip
outside becomes a flip inside at most as far away, and the nearest flip is the same in both boxes.
(`top_i` is rounded to float32, so a feature may pass `high_i` by a part of 1e-7.)

A feature that may not move has `scale_i = 0`. Its range is then `HELD` times as wide as the widest
of the others: within a distance d it moves by less than d / 4096 of its range. `evaluate` freezes
it for searches and proofs (`own_boxes`), puts it back to its value in every flip, and looks again
whether it is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wassail.errors import InputError, remedies
from wassail.network import Model, as_taken
from wassail.threat import Boxes, Domain, boxes_of
from wassail.zoo.files import Table
from wassail.zoo.samples import ArrayData, Data
from wassail.zoo.source import Source
from wassail.zoo.tables import frame_values, is_frame

HELD = 4096.0  # the range of a feature that may not move, in ranges of the widest that may


@dataclass(frozen=True, eq=False)
class Features:
    """A box and a unit for each feature.

    Args:
        low: least values, `(F,)`.
        high: greatest values, `(F,)`; a feature with `high == low` cannot move.
        scale: the unit of each feature in which distances are measured, `(F,)`; by default its
            range `high - low`, so that 0.1 is a tenth of the range; 0 for a feature that may not
            move.
        names: of the features (default "feature 0", ...).
    """

    low: Any
    high: Any
    scale: Any = None
    names: Sequence[str] = ()
    fixed: Tensor = field(init=False, repr=False)
    _top: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        low = _numbers(self.low, "low")
        high = _numbers(self.high, "high")
        if low.ndim != 1 or low.shape != high.shape or not len(low):
            raise InputError(
                f"low and high have shapes {tuple(low.shape)} and {tuple(high.shape)}: give one "
                "number for each feature in both."
            )
        if not bool(torch.isfinite(low).all() & torch.isfinite(high).all() & (low <= high).all()):
            raise InputError("a box needs finite numbers with low at or below high, per feature.")
        width = high - low
        scale = torch.where(width > 0, width, 1.0)
        if self.scale is not None:
            scale = _numbers(self.scale, "scale").expand_as(low).clone()
        if not bool((scale >= 0).all() & torch.isfinite(scale).all()):
            raise InputError(
                "scale needs finite numbers >= 0: the unit of each feature, 0 if it may not move."
            )
        fixed = (scale == 0) & (width > 0)
        if bool(fixed.any()):
            free = width[~fixed] / torch.where(scale[~fixed] > 0, scale[~fixed], 1.0)
            widest = float(free.max()) if bool((free > 0).any()) else 0.0
            if not widest:
                raise InputError("no feature may move: give at least one a unit above 0.")
            scale = torch.where(fixed, width / (HELD * widest), scale)
        scale = torch.where(scale == 0, 1.0, scale)  # one value only: it has no room to move
        names = tuple(self.names or (f"feature {i}" for i in range(len(low))))
        if len(names) != len(low):
            raise InputError(
                f"there are {len(names)} names for {len(low)} features: give one each."
            )
        for name, value in (("low", low), ("high", high), ("scale", scale), ("names", names)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "fixed", fixed)
        object.__setattr__(self, "_top", (width / scale).float().double())

    @property
    def top(self) -> Tensor:
        """The upper end of the box of each feature in the new variable, `(F,)`."""
        return self._top

    @property
    def domain(self) -> tuple[float, float]:
        """The one box of all features in the new variable, for `Threat` and everything else."""
        return 0.0, float(self._top.max()) or 1.0

    def encode(self, x: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Samples in the new variable, `(N, F)`; refused where one lies outside its box.

        Args:
            x: samples in original units, `(N, F)`: a tensor, an array or a table of numbers.
            dtype: of the result, that of the model (default float32).
        """
        if is_frame(x):
            self._same_columns([str(column) for column in x.columns])
            x = frame_values(x, "the samples")
        rounded = getattr(x, "dtype", None) in (torch.float32, np.float32)
        x = torch.as_tensor(np.asarray(x, dtype=np.float64))
        if x.ndim != 2 or x.shape[1] != len(self.low):
            raise InputError(
                f"the samples have shape {tuple(x.shape)}: give (N, {len(self.low)}), one column "
                "for each feature."
            )
        low, high = self.low, self.high
        if rounded:  # a sample at an end of its box may lie outside by the rounding of float32
            low, high = torch.minimum(low, low.float()), torch.maximum(high, high.float())
        outside = ~((x >= low) & (x <= high))
        if bool(outside.any()):
            row, column = outside.nonzero()[0].tolist()
            raise InputError(
                f"sample {row} has {self.names[column]} = {float(x[row, column]):g}, outside "
                f"[{float(self.low[column]):g}, {float(self.high[column]):g}]: widen the box or "
                "remove the sample."
            )
        refuse_one_hot(x, self.names, (self.high > self.low) & ~self.fixed)
        z = self.rescaled(x).clamp(min=0).to(dtype)
        return torch.minimum(z, self._top.to(dtype))

    def rescaled(self, x: Tensor) -> Tensor:
        """Points in the new variable, float64 `(N, F)`, wherever they lie.

        Args:
            x: points in original units, `(N, F)`.
        """
        moved: Tensor = (x.detach().cpu().double() - self.low) / self.scale
        return moved

    def decode(self, z: Tensor) -> Tensor:
        """Points of the new variable in original units, float64 `(N, F)`.

        Args:
            z: points, `(N, F)`; clipped to the box of each feature.
        """
        z = z.detach().cpu().double()
        moved: Tensor = self.low + self.scale * torch.minimum(z.clamp(min=0), self._top)
        return moved

    def model(self, model: Model) -> nn.Module:
        """The model as a function of the new variable.

        Args:
            model: from original units `(n, F)` to logits.
        """
        return Rescaled(model, self).eval()

    def data(self, x: Any, y: Any, name: str = "features", **options: Any) -> ArrayData:
        """Encoded samples with their labels, for `evaluate`: reports then speak original units.

        Args:
            x: samples in original units, `(N, F)`.
            y: labels, `(N,)`; or targets in floats, `(N,)` or `(N, K)`.
            name: what to call the data; default "features".
            options: `dtype`, see `encode`.
        """
        about = {"source": "features", **self.about}
        y = torch.as_tensor(y)
        table = Table(self.encode(x, **options), y, about, numbers=y.is_floating_point())
        return ArrayData(name, table)

    @property
    def about(self) -> dict[str, Any]:
        """What a run records of the features."""
        return {
            "features": list(self.names),
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "scale": self.scale.tolist(),
            "fixed": [name for name, held in zip(self.names, self.fixed.tolist()) if held],
        }

    def _same_columns(self, columns: Sequence[str]) -> None:
        """Refuse a data frame whose columns are others, or stand in another order."""
        named = any(name != f"feature {i}" for i, name in enumerate(self.names))
        if named and tuple(columns) != tuple(self.names):
            raise InputError(
                f"the columns are {', '.join(columns[:6])} and the features "
                f"{', '.join(self.names[:6])}: give the same ones in the same order."
            )


def refuse_one_hot(x: Tensor, names: Sequence[str], free: Tensor) -> None:
    """Refuse columns of zeros and ones of which exactly one is 1, if they may move.

    x: samples `(N, F)`; free: bool `(F,)`, which may move.
    """
    binary = ((x == 0) | (x == 1)).all(0) & free
    some = binary.nonzero()[:, 0].tolist()
    group = some if len(x) > 1 and len(some) > 1 and _one_each(x, some) else []
    for first in range(len(some) if len(x) > 1 and not group else 0):
        for last in range(first + 1, len(some)):
            columns = some[first : last + 1]
            if columns[-1] - columns[0] != last - first or bool((x[:, columns].sum(1) > 1).any()):
                break
            if _one_each(x, columns):
                group = columns
                break
        if group:
            break
    if group:
        shown = ", ".join(str(names[i]) for i in group[:4])
        cause = (
            f"{shown} look like a one-hot group: half of a category is no input, so a norm says "
            "nothing about them"
        )
        raise remedies(
            cause,
            "hold them with immutable=[...], which leaves the category as it is, or evaluate each "
            "category on its own, without these columns",
            "hold them with --immutable, which leaves the category as it is, or evaluate each "
            "category on its own, without these columns",
        )


def _one_each(x: Tensor, columns: Sequence[int]) -> bool:
    """Whether exactly one of the columns is 1 in each sample, and none of them in all."""
    part = x[:, list(columns)]
    return bool((part.sum(1) == 1).all()) and bool((part.sum(0) < len(x)).all())


def _numbers(values: Any, name: str) -> Tensor:
    """A vector of numbers in float64, or one sentence."""
    try:
        return torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} is {values!r}: give one number for each feature.") from None


class Rescaled(nn.Module):
    """`model(low + scale * min(z, top))` for z >= 0; `held` are the features that may not move."""

    low: Tensor
    scale: Tensor
    top: Tensor
    held: Tensor

    def __init__(self, model: Model, features: Features) -> None:
        super().__init__()
        self.inner = model
        top = features.top
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        dtype = torch.float32 if parameter is None else parameter.dtype
        self.register_buffer("low", features.low.to(dtype))
        self.register_buffer("scale", features.scale.to(dtype))
        self.register_buffer("top", top.to(dtype))
        self.register_buffer("held", features.fixed.clone(), persistent=False)
        self.clips = bool((top < top.max()).any())

    def forward(self, z: Tensor) -> Tensor:
        """Logits of points in the new variable."""
        if self.clips:
            z = z - torch.relu(z - self.top)
        out: Tensor = self.inner(z * self.scale + self.low)
        return out


def own_model(model: Model) -> Model:
    """The model in original units, out of one made by `Features.model`; any other as it is."""
    return model.inner if isinstance(model, Rescaled) else model


def own_boxes(model: Model, x: Tensor, domain: Domain) -> Domain:
    """The box of each feature of each sample in which a search or a proof may move, where some
    features may not: those are frozen. For a model without such features the domain as it is.

    model: perhaps made by `Features.model`; x: samples in its variable, `(N, F)`; domain: the one
    box of all features.
    """
    held = getattr(model, "held", None)
    if not isinstance(model, Rescaled) or not isinstance(held, Tensor) or not bool(held.any()):
        return domain
    at, held, top = x.detach().cpu().double(), held.cpu(), model.top.cpu().double()
    low = torch.where(held, at, 0.0)
    high = torch.where(held, at, top.expand_as(at))
    return Boxes(low, high)  # type: ignore[return-value]


def in_boxes(source: Source, data: Data, box: Boxes) -> tuple[Source, Data, tuple[float, float]]:
    """A model, data and the domain in the variable in which all features have one box.

    source: the model, on features in original units; data: samples `(N, F)` in original units.
    """
    if len(data.shape) != 1:
        raise InputError(
            f"the samples have shape {tuple(data.shape)}: a box for each feature is for samples "
            "of shape (F,)."
        )
    size = data.shape[0]
    if box.low.ndim > 1:
        raise InputError("these are boxes of samples: give one for each feature.")
    if len(box.low) not in (1, size):
        raise InputError(f"the box is for {len(box.low)} features and the samples have {size}.")
    names = data.info.get("features") or ()
    low = box.low.expand(size)
    high = box.high.expand(size)
    scale = None if box.scale is None else torch.tensor(box.scale, dtype=torch.float64)
    features = Features(low, high, scale, names if len(names) == size else ())
    model = features.model(source.model)
    x, y = data.read(0, len(data))
    taken = as_taken(source.model, x[:1]).dtype if len(x) else x.dtype
    table = Table(
        features.encode(x, dtype=taken),
        y,
        {**data.info, **features.about},
        data.classes,
        y.is_floating_point(),
    )
    return replace(source, model=model), ArrayData(data.name, table), features.domain


def with_held(data: Data, domain: Domain, immutable: Sequence[int | str]) -> Boxes:
    """The boxes of the features with some that may not move.

    data: samples `(N, F)`, perhaps with names of the features; domain: one box for all of them, or
    a box for each; immutable: names or places of those that may not move.
    """
    if len(data.shape) != 1:
        raise InputError(
            f"the samples have shape {tuple(data.shape)}: features that may not move are for "
            "samples of shape (F,)."
        )
    if domain is None:
        raise remedies(
            "features that may not move need a box for the others",
            "give domain=(low, high), numbers or one for each feature",
            "give --domain LOW HIGH or --box FILE, and no --no-box",
        )
    if isinstance(immutable, str):
        raise InputError(f"immutable is {immutable!r}: give a list of names or places.")
    size = data.shape[0]
    known = boxes_of(domain)
    sides = domain if known is None else (known.low, known.high)
    low, high = (torch.as_tensor(side, dtype=torch.float64).expand(size) for side in sides)
    units = (high - low).clone()
    if known is not None and known.scale is not None:
        units = torch.tensor(known.scale, dtype=torch.float64).expand(size).clone()
    names = [str(name) for name in data.info.get("features") or ()]
    held = [_feature(one, names, size) for one in immutable]
    units[held] = 0.0
    if not bool(((units > 0) & (high > low)).any()):
        raise InputError("no feature may move: leave at least one out of the immutable ones.")
    return Boxes(low, high, tuple(units.tolist()))


def _feature(one: int | str, names: Sequence[str], size: int) -> int:
    """The place of a feature, by its name or its number."""
    if isinstance(one, str) and one in names:
        return list(names).index(one)
    text = str(one)
    if (isinstance(one, int) or text.isdecimal()) and 0 <= int(text) < size:
        return int(text)
    known = f"one of {', '.join(names[:12])}" + (", ..." if len(names) > 12 else "")
    raise InputError(
        f"feature {one!r} may not move, and there is none: give "
        f"{known + ' or ' if names else ''}a number from 0 to {size - 1}."
    )


def features_of(about: Mapping[str, Any]) -> Features:
    """The boxes and units that a run records of its data.

    about: with `low`, `high` and `scale`, perhaps `features` and `fixed`.
    """
    try:
        low, high, scale = (
            torch.tensor(about[key], dtype=torch.float64) for key in ("low", "high", "scale")
        )
        names = list(map(str, about.get("features") or ()))
        held = set(map(str, about.get("fixed") or ()))
        for place, name in enumerate(names):
            if name in held:
                scale[place] = 0.0
        return Features(low, high, scale, names)
    except InputError:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError, OverflowError) as error:
        raise InputError("the boxes of the features in this run make no sense.") from error


def feature_boxes(about: Any) -> Features | None:
    """The boxes and units that a run records of its data, None where it has no box for each
    feature.

    about: what is recorded of the data.
    """
    kept = [about.get(key) for key in ("low", "high", "scale")] if isinstance(about, dict) else []
    return features_of(about) if kept and all(isinstance(part, list) for part in kept) else None


def points_in_boxes(points: Tensor, data: Data) -> Tensor:
    """Points `(N, F)` in original units in the variable of some data, wherever they lie.

    points: given with the samples in original units, so of their shape, else as they are; data: as
    `in_boxes` returns it.
    """
    if tuple(points.shape) != (len(data), *data.shape):
        return points
    return features_of(data.info).rescaled(points).to(data.read(0, 0)[0].dtype)


def as_evaluated(about: Any, model: Model, data: Data | None) -> tuple[Model, Data | None]:
    """A model and data in the variable that a run was made in, if it had a box for each feature.

    Args:
        about: what the run records of its data.
        model: in original units, or made by `Features.model` already.
        data: in original units, or made by `Features.data` already; or None.
    """
    features = feature_boxes(about)
    if features is None:
        return model, data
    if not isinstance(model, Rescaled):
        model = features.model(model)
    if data is not None and "scale" not in data.info:
        x, y = data.read(0, len(data))
        data = features.data(x, y, data.name, dtype=x.dtype)
    return model, data


class OneLogit(nn.Module):
    """A model with one logit as a classifier of two classes: class 1 where the logit is positive.

    Args:
        model: returns logits `(n, 1)` or `(n,)`.
    """

    sides: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = model
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        dtype = torch.float32 if parameter is None else parameter.dtype
        self.register_buffer("sides", torch.tensor([[-0.5], [0.5]], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(n, 2)`, half of the one logit with both signs.

        Args:
            x: batch `(n, *shape)`.
        """
        z: Tensor = self.inner(x)
        z = z[:, None] if z.ndim == 1 else z
        if z.ndim != 2 or z.shape[1] != 1:
            raise InputError(
                f"the model gives {tuple(z.shape)}: --one-logit is for models with one output."
            )
        return nn.functional.linear(z, self.sides)
