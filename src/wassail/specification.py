"""What right means for each sample: linear inequalities of the model's outputs (THEORY 11).

A sample is right at `x` while all of its own rows hold, `C_i f(x) + b_i > 0`; a tie is an error.
Labels are the usual specification, rows `e_y - e_j` for all other classes j. Regression within a
tolerance, several labels at once and one logit with a threshold are others. Everything else in the
library needs no more than the distance to the nearest point where a row fails.

The rows and offsets are float64 numbers, and the specification is about them as they are: a margin
is the exact `C_i f + b_i` of the outputs f that the model gives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.device import has_float64
from wassail.errors import InputError
from wassail.threat import whole

Labels: TypeAlias = "Tensor | Specification"


@dataclass(frozen=True, eq=False, repr=False)
class Specification:
    """What right means for each of N samples: `rows_i f(x) + offsets_i > 0`, all M rows of it.

    `classes`, `within`, `multilabel` and `threshold` make the usual ones. It is taken in the place
    of labels by `radii`, `verify`, `nearest`, `Flips.from_points` and every attack on a threat.

    Args:
        rows: float tensor `(M, K)` for rows that all samples share, or `(N, M, K)`; K outputs of
            the model. A sample with fewer rows than others repeats one of its own.
        offsets: float tensor `(M,)` that all samples share, or `(N, M)`; default None, 0.
        chosen: which of the rows each sample has, integer tensor `(N, M)`; default None, all.
        labels: classes, integer tensor `(N,)`, which need no rows; default None.
        about: what it is, in a few words; default "own rows".
    """

    rows: Tensor | None = None
    offsets: Tensor | None = None
    chosen: Tensor | None = None
    labels: Tensor | None = None
    about: str = "own rows"

    def __post_init__(self) -> None:
        if self.labels is not None:
            return
        rows, chosen = _table(_numbers(self.rows, "rows"), self.chosen)
        count = len(rows) if chosen is None else chosen.shape[-1]
        number = None if chosen is None else len(chosen)
        offsets = self.offsets
        offsets = rows.new_zeros(count) if offsets is None else _numbers(offsets, "offsets")
        shared = offsets.shape == (count,)
        if not shared and offsets.shape != (len(offsets) if number is None else number, count):
            each = "one for each row" + (f" of each of {number} samples" if number else "")
            raise InputError(
                f"the offsets have shape {tuple(offsets.shape)} for {count} rows: give {each}."
            )
        if shared and number is not None:
            offsets = offsets.expand(number, -1)
        for name, value in (("rows", rows), ("offsets", offsets), ("chosen", chosen)):
            object.__setattr__(self, name, value)

    @classmethod
    def classes(cls, y: Tensor) -> Specification:
        """A class for each sample: its logit is above all others. The same as giving `y`.

        Args:
            y: integer tensor `(N,)`.
        """
        return cls(labels=torch.as_tensor(y), about="classes")

    @classmethod
    def within(cls, y: Tensor, tolerance: float | Tensor) -> Specification:
        """Regression: right while every output is nearer to its target than the tolerance.

        Args:
            y: targets, `(N,)` for one output or `(N, K)`.
            tolerance: a number above 0, or a tensor with one for each sample, `(N,)`, or for each
                output of each sample, `(N, K)`.
        """
        y = _numbers(y, "targets")
        y = y[:, None] if y.ndim == 1 else y
        if y.ndim != 2 or not y.shape[1]:
            raise InputError(
                f"the targets have shape {tuple(y.shape)}: give (N,) for one output or (N, K)."
            )
        tau = _numbers(tolerance, "tolerances")
        tau = tau[:, None] if tau.ndim == 1 else tau
        if tau.ndim and tau.shape != y.shape and tau.shape != (len(y), 1):
            raise InputError(
                f"the tolerances have shape {tuple(tau.shape)} for targets {tuple(y.shape)}: give "
                "a number, or one for each sample."
            )
        if not bool((tau > 0).all()):
            raise InputError(
                f"the tolerance is {float(tau.min()):g}: give a number above 0, in the units of "
                "the targets."
            )
        eye = torch.eye(y.shape[1], dtype=torch.float64)
        offsets = torch.cat([tau + y, tau - y], 1)
        even = tau.numel() > 0 and bool((tau == tau.flatten()[0]).all())
        told = f"within {float(tau.flatten()[0]):.4g}" if even else "within tolerances"
        return cls(torch.cat([-eye, eye]), offsets, about=told)

    @classmethod
    def multilabel(cls, y: Tensor, threshold: float | Tensor = 0.0) -> Specification:
        """Several labels at once: right while each output is on its own side of the threshold.

        Args:
            y: which labels hold, bool or 0 and 1, `(N, K)`.
            threshold: a number, or one for each of the K outputs, `(K,)`; default 0, which is for
                logits.
        """
        y = torch.as_tensor(y).detach().cpu()
        if y.ndim != 2 or not y.shape[1] or not bool(((y == 0) | (y == 1)).all()):
            raise InputError(
                f"the labels have shape {tuple(y.shape)}: give 0 or 1 for each of K labels of each "
                "sample, (N, K)."
            )
        limit = _numbers(threshold, "thresholds")
        if limit.ndim > 1 or (limit.ndim and len(limit) != y.shape[1]):
            raise InputError(
                f"the thresholds have shape {tuple(limit.shape)}: give a number, or one for each "
                f"of the {y.shape[1]} labels."
            )
        count = y.shape[1]
        eye = torch.eye(count, dtype=torch.float64)
        holds = y == 1
        place = torch.arange(count)
        chosen = torch.where(holds, place, place + count)
        offsets = torch.where(holds, -limit, limit)
        return cls(torch.cat([eye, -eye]), offsets, chosen, about="multilabel")

    @classmethod
    def threshold(
        cls, y: Tensor, threshold: float = 0.0, *, output: int = 0, outputs: int = 1
    ) -> Specification:
        """One output and a threshold: right while it is above for `y = 1` and below for `y = 0`.

        Args:
            y: which side, bool or 0 and 1, `(N,)`.
            threshold: a number; default 0.
            output: which output; default 0. With another one this is a given label of several.
            outputs: how many the model has; default 1.
        """
        y = torch.as_tensor(y).detach().cpu()
        if y.ndim != 1:
            raise InputError(f"the labels have shape {tuple(y.shape)}: give 0 or 1 for each, (N,).")
        if not 0 <= whole(output, "output", 0) < whole(outputs, "outputs"):
            raise InputError(f"output {output} of {outputs}: count from 0.")
        one = cls.multilabel(y[:, None], threshold)
        assert one.rows is not None
        rows = torch.zeros(2, outputs, dtype=torch.float64)
        rows[:, output] = one.rows[:, 0]
        return replace(one, rows=rows, about=f"threshold {threshold:g}")

    @property
    def outputs(self) -> int:
        """K, the outputs that the rows are about."""
        return self.table.shape[1]

    @property
    def table(self) -> Tensor:
        """All rows that some sample has, float64 `(R, K)`."""
        assert self.rows is not None, "labels have no rows of their own"
        return self.rows

    @property
    def constants(self) -> Tensor:
        """The offsets, float64 `(N, M)` or `(M,)`."""
        assert self.offsets is not None, "labels have no offsets"
        return self.offsets

    def fit(self, count: int) -> Specification:
        """The same for so many samples, or one sentence if it is for others.

        Args:
            count: N.
        """
        if self.labels is not None:
            return self
        known = len(self.constants) if self.constants.ndim == 2 else None
        if known is not None and known != count:
            raise InputError(
                f"there are {count} samples but the specification is for {known}: give one for "
                "each sample."
            )
        return replace(self, offsets=self.constants.expand(count, -1))

    def check_outputs(self, outputs: int) -> None:
        """Refuse rows that are not about the outputs of a model.

        Args:
            outputs: K of the model.
        """
        if outputs != self.outputs:
            raise InputError(
                f"the specification is about {self.outputs} outputs and the model has {outputs}: "
                "give a row with one entry for each output."
            )

    def take(self, some: Tensor) -> Specification:
        """The specification of some of the samples.

        Args:
            some: places or a mask.
        """
        parts: dict[str, Any] = {}
        for name in ("labels", "offsets", "chosen"):
            value = getattr(self, name)
            own = value is not None and not (name == "offsets" and value.ndim == 1)
            parts[name] = value[some.to(value.device)] if own else value
        return replace(self, **parts)

    def to(self, device: torch.device) -> Specification:
        """The same with its tensors on a device.

        Args:
            device: where.
        """
        if not has_float64(device):
            return self
        names = ("rows", "offsets", "chosen", "labels")
        known = {name: getattr(self, name) for name in names}
        return replace(self, **{n: v.to(device) for n, v in known.items() if v is not None})

    def margins(self, z: Tensor) -> Tensor:
        """`C_i z_i + b_i`, in float64 where the device has it: `(N, M)`.

        Args:
            z: outputs `(N, K)`.
        """
        wide = z.double() if has_float64(z.device) else z
        found = wide @ self.table.to(wide).T
        if self.chosen is not None:
            found = found.gather(1, self.chosen.to(z.device))
        return found + self.constants.to(wide)

    def sizes(self, z: Tensor) -> Tensor:
        """The largest sum of magnitudes in a margin, `(N,)`: rounding errors are relative to it.

        Args:
            z: outputs `(N, K)`.
        """
        wide = z.detach().double() if has_float64(z.device) else z.detach()
        found = wide.abs() @ self.table.to(wide).abs().T
        if self.chosen is not None:
            found = found.gather(1, self.chosen.to(z.device))
        return (found + self.constants.to(wide).abs()).amax(1)

    def logits(self, z: Tensor) -> Tensor:
        """Outputs as logits of a classifier whose label 0 is right, `(N, M + 1)`: 0 and minus the
        margins, in the type of z. The class is 1 + the row that fails most.

        Args:
            z: outputs `(N, K)`.
        """
        rivals = -self.margins(z).to(z.dtype)
        return torch.cat([torch.zeros_like(rivals[:, :1]), rivals], 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Specification):
            return NotImplemented
        names = ("rows", "offsets", "chosen", "labels")
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return all(
            a is b or (a is not None and b is not None and torch.equal(a.cpu(), b.cpu()))
            for a, b in pairs
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        if self.labels is not None:
            return f"Specification(classes of {len(self.labels)} samples)"
        count = "all" if self.constants.ndim == 1 else str(len(self.constants))
        size = self.constants.shape[-1]
        return (
            f"Specification({self.about}: {size} rows of {self.outputs} outputs, {count} samples)"
        )


def labels_of(y: Labels, device: torch.device | None = None) -> Tensor:
    """Labels `(N,)`; of a fitted specification the class 0, which its `logits` call right.

    Args:
        y: labels, or a specification.
        device: where; default None, where they are.
    """
    if isinstance(y, Specification):
        constants = y.constants
        return torch.zeros(len(constants), dtype=torch.int64, device=device or constants.device)
    return y if device is None else y.to(device)


def labels_at(y: Labels, rows: Tensor | slice) -> Labels:
    """The labels, or the specification, of some of the samples.

    Args:
        y: labels, or a fitted specification.
        rows: places, a mask or a slice.
    """
    if not isinstance(y, Specification):
        return y[rows]
    if isinstance(rows, slice):
        rows = torch.arange(len(y.constants))[rows]
    return y.take(rows)


def specification_of(y: Labels) -> Specification | None:
    """The specification in the place of labels, None for labels."""
    return y if isinstance(y, Specification) else None


def _table(rows: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """All rows `(R, K)`, and which of them each sample has, `(N, M)`; None where it has all."""
    if rows.ndim == 3 and chosen is None:
        size = rows.shape[:2]
        rows, place = torch.unique(rows.flatten(0, 1), dim=0, return_inverse=True)
        chosen = place.reshape(size)
    if rows.ndim != 2 or not rows.numel():
        raise InputError(
            f"the rows have shape {tuple(rows.shape)}: give (M, K) for M rows that all samples "
            "share, or (N, M, K), with one entry for each of K outputs."
        )
    return rows, chosen


def _numbers(values: Any, what: str) -> Tensor:
    """Finite float64 numbers on the CPU, or one sentence."""
    try:
        # In float64 at once: torch makes float32 of a Python number.
        found = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        kind = "None" if values is None else f"a {type(values).__name__}"
        raise InputError(f"the {what} are {kind}: give a tensor of numbers.") from None
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"the {what} contain NaN or infinity: give finite numbers.")
    return found
