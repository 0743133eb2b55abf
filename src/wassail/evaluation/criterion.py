"""What right means in a run that is no classification (THEORY 11): a tolerance around the targets
of a regression, or a threshold for one label or several.

A sample has a row of numbers in the place of its class. The row travels with the sample and is all
that its specification needs, so that work can be cut by samples. A run keeps the rows beside the
class 0, which a specification calls right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.errors import InputError, remedies
from wassail.losses import margin, predict
from wassail.network import Model, Network, device_of
from wassail.specification import Labels, Specification, labels_of, specification_of
from wassail.threat import Number, number, whole
from wassail.zoo.files import Targets
from wassail.zoo.samples import Data, Wrapped

OWN = "own"  # tolerances that were given for each sample
LONGEST = 40  # characters of a name in a sentence


@dataclass(frozen=True)
class Words:
    """How a run speaks of samples that are right.

    Args:
        share: the figure, "accuracy".
        stay: what samples do that no shift breaks, "stay correct".
        stays: the same of one share, "stays correct".
        kept: what they are, "classified correctly".
        wrong: what a flip is, "misclassified".
        tie: how the boundary counts.
    """

    share: str = "accuracy"
    stay: str = "stay correct"
    stays: str = "stays correct"
    kept: str = "classified correctly"
    wrong: str = "misclassified"
    tie: str = "a tie counts as an error"


CLASSES = Words()


@dataclass(frozen=True)
class Regression:
    """Right while every output is nearer to its target than the tolerance.

    The row of a sample holds K targets and then K tolerances.

    Args:
        outputs: K.
        tolerance: a number, a share of the target as "5%", or "own" for one of each sample.
        names: of the outputs, or none.
    """

    outputs: int
    tolerance: float | str
    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of one sample."""
        return 2 * self.outputs

    @property
    def rows(self) -> int:
        """Inequalities of one sample."""
        return 2 * self.outputs

    def specification(self, rows: Tensor) -> Specification:
        """What right means for samples with these rows, `(n, 2 K)`."""
        goal = Specification.within(rows[:, : self.outputs], rows[:, self.outputs :])
        return replace(goal, about=f"within {self.tolerance}")

    def wanted(self, rows: Tensor) -> Tensor:
        """The targets of these rows, `(n, K)`."""
        return rows[:, : self.outputs]

    def check(self, rows: Tensor) -> None:
        """Refuse rows that do not have the tolerance that is stated."""
        tolerances = rows[:, self.outputs :]
        if self.tolerance != OWN:
            expected = tolerances_of(self.wanted(rows), self.tolerance)
            if not torch.equal(expected, tolerances):
                raise ValueError("tolerances that are not those of its configuration")

    @property
    def config(self) -> dict[str, Any]:
        """As plain values."""
        about = {"kind": "regression", "tolerance": self.tolerance, "outputs": self.outputs}
        return {**about, "names": list(self.names)}

    @cached_property
    def near(self) -> str:
        """The tolerance in words: "within 0.5 of the target"."""
        every = "" if self.outputs == 1 else f" in all {self.outputs} outputs"
        if self.tolerance == OWN:
            return f"within the sample's own tolerance of the target{every}"
        shown = self.tolerance if isinstance(self.tolerance, str) else f"{self.tolerance:.6g}"
        return f"within {shown.replace('%', ' %')} of the target{every}"

    @property
    def words(self) -> Words:
        """How a run speaks of it."""
        return Words(
            share="share within tolerance",
            stay=f"stay {self.near}",
            stays=f"stays {self.near}",
            kept=self.near,
            wrong="off by the tolerance or more",
            tie="an error of just the tolerance is too large",
        )

    def row_text(self, row: int) -> str:
        """What it means that a row fails, counted from 1: too high or too low."""
        output = (row - 1) % self.outputs
        name = _shown(self.names[output]) if self.names else f"output {output}"
        return (f"{name} " if self.outputs > 1 else "") + (
            "too high" if row <= self.outputs else "too low"
        )


@dataclass(frozen=True)
class ManyLabels:
    """Right while each output is on its own side of the threshold, or one output is.

    The row of a sample holds 0 or 1 for each of K labels.

    Args:
        outputs: K.
        threshold: an output above it says that the label holds.
        label: the one output that counts; None for all of them.
        names: of the labels, or none.
    """

    outputs: int
    threshold: float
    label: int | None = None
    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of one sample."""
        return self.outputs

    @property
    def rows(self) -> int:
        """Inequalities of one sample."""
        return self.outputs if self.label is None else 1

    def specification(self, rows: Tensor) -> Specification:
        """What right means for samples with these rows, `(n, K)`."""
        if self.label is None:
            return Specification.multilabel(rows, self.threshold)
        one = rows[:, self.label]
        return Specification.threshold(one, self.threshold, output=self.label, outputs=self.outputs)

    def wanted(self, rows: Tensor) -> Tensor:
        """The labels of these rows, `(n, K)`."""
        return rows

    def check(self, rows: Tensor) -> None:
        """Refuse rows that are no labels."""
        if not bool(((rows == 0) | (rows == 1)).all()):
            raise ValueError("labels that are neither 0 nor 1")

    @property
    def config(self) -> dict[str, Any]:
        """As plain values."""
        about = {"kind": "labels", "threshold": self.threshold, "label": self.label}
        return {**about, "outputs": self.outputs, "names": list(self.names)}

    @property
    def words(self) -> Words:
        """How a run speaks of it."""
        at = f"threshold {self.threshold:g}"
        if self.outputs == 1:
            kept = f"on the right side of the {at}"
            stay, stays = f"stay {kept}", f"stays {kept}"
        else:
            what = f"all {self.outputs} labels" if self.label is None else self._name(self.label)
            kept = f"with {what} right ({at})"
            stay, stays = f"keep {what} right ({at})", f"keeps {what} right ({at})"
        share = "share with all labels right" if self.label is None else "share with it right"
        return Words(
            share="share that is right" if self.outputs == 1 else share,
            stay=stay,
            stays=stays,
            kept=kept,
            wrong="wrong in a label",
            tie="an output at the threshold counts as wrong",
        )

    def row_text(self, row: int) -> str:
        """What it means that a row fails, counted from 1."""
        return f"{self._name(row - 1 if self.label is None else self.label)} wrong"

    def _name(self, output: int) -> str:
        return f"label {_shown(self.names[output]) if self.names else output}"


def _shown(name: str) -> str:
    """A name out of a file, in which no page and no terminal finds anything to obey."""
    return re.sub(r"[^\w .%+-]", "?", name)[:LONGEST]


Criterion: TypeAlias = "Regression | ManyLabels"


class WithTolerances(Wrapped):
    """Data of a regression whose rows hold targets and tolerances.

    Args:
        whole: data with targets `(n, K)`.
        tolerance: as in `Regression`.
        own: one for each sample, `(N,)` or `(N, K)`; None for any other tolerance.
    """

    def __init__(self, whole: Data, tolerance: float | str, own: Tensor | None) -> None:
        super().__init__(whole, {})
        self.classes = None
        self._tolerance = tolerance
        self._own = own

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As the data do, with the tolerances behind the targets."""
        x, y = super().read(start, stop)
        if self._own is None:
            tolerances = tolerances_of(y, self._tolerance, start)
        else:
            own = self._own[slice(*slice(start, stop).indices(len(self)))]
            tolerances = own[:, None].expand_as(y) if own.ndim == 1 else own
        return x, torch.cat([y, tolerances], 1)


def tolerances_of(targets: Tensor, tolerance: float | str, start: int = 0) -> Tensor:
    """The tolerance of each target, float64 `(n, K)`.

    targets: `(n, K)`; tolerance: a number, or a share as "5%"; start: place of the first sample,
    for a sentence.
    """
    if not isinstance(tolerance, str):
        return torch.full_like(targets, tolerance)
    found = number(tolerance.removesuffix("%"), "tolerance") / 100 * targets.abs()
    if not bool((found > 0).all()):
        place = start + int((found <= 0).any(1).nonzero()[0])
        raise InputError(
            f"sample {place} has the target 0, and {tolerance} of it is no tolerance: give a "
            "number in the unit of the targets."
        )
    return found


def judged(
    data: Data,
    tolerance: Number | Tensor | Sequence[float] | None,
    threshold: Number | None,
    label: int | str | None,
) -> tuple[Data, Criterion | None]:
    """Data with the rows of a criterion, and the criterion; classes as they are, and None.

    Args:
        data: of any kind.
        tolerance: a number, "5%", or one for each sample; None for no regression.
        threshold: of labels; None for none.
        label: the one that counts, its place or name; None for all.
    """
    if tolerance is None and threshold is None:
        if label is not None:
            raise remedies(
                "label says which of several labels counts",
                "give threshold, too (0 for logits)",
                "add --threshold (0 for logits)",
            )
        return data, None
    if tolerance is not None and threshold is not None:
        raise InputError("tolerance is for a regression and threshold for labels: give one.")
    targets = data.read(0, min(1, len(data)))[1]
    if not targets.is_floating_point():
        raise InputError(
            f"{data.name!r} was opened as classes: give the samples and targets as a pair (x, y), "
            "or open them with zoo.open_data(..., targets=Targets(numbers=True))."
        )
    names = tuple(map(str, data.info.get("targets") or ()))
    outputs = targets.shape[1]
    names = names if len(names) == outputs else ()
    if threshold is None:
        if label is not None:
            raise InputError("label is for several labels: leave it out of a regression.")
        return _regression(data, tolerance, outputs, names)
    place = None if label is None else _place(label, outputs, names)
    found = ManyLabels(outputs, _finite(threshold, "threshold"), place, names)
    _check_labels(data, found)
    return data, found


def _regression(
    data: Data, tolerance: Any, outputs: int, names: tuple[str, ...]
) -> tuple[Data, Criterion]:
    asked = parse_tolerance(tolerance)
    if isinstance(asked, Tensor):
        if asked.shape not in ((len(data),), (len(data), outputs)):
            raise InputError(
                f"the tolerances have shape {tuple(asked.shape)} for {len(data)} samples with "
                f"{outputs} targets: give a number, or one for each sample."
            )
        return WithTolerances(data, OWN, asked), Regression(outputs, OWN, names)
    return WithTolerances(data, asked, None), Regression(outputs, asked, names)


def parse_tolerance(value: Any) -> float | str | Tensor:
    """A tolerance as people give it: 0.5, "5%", or one for each sample.

    value: number, text, tensor or list.
    """
    if isinstance(value, str) and value.strip().endswith("%"):
        share = number(value.strip().removesuffix("%"), "tolerance")
        if not 0 < share < 1e6:
            raise InputError(f"the tolerance is {value}: give a share of the target above 0 %.")
        return f"{share!r}%".replace(".0%", "%")
    if isinstance(value, (str, int, float)) or not hasattr(value, "__len__"):
        found = _finite(value, "tolerance")
        if not found > 0:
            raise InputError(
                f"the tolerance is {value}: give a number above 0, in the unit of the targets."
            )
        return found
    try:
        own = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"the tolerance is a {type(value).__name__}: give a number, a share as '5%', or a "
            "number for each sample."
        ) from None
    if not bool((torch.isfinite(own) & (own > 0)).all()):
        raise InputError("a tolerance is 0, negative or infinite: give numbers above 0.")
    return own


def _finite(value: Any, name: str) -> float:
    found = number(value, name)
    if abs(found) == float("inf"):
        raise InputError(f"the {name} is {value}: give a finite number.")
    return found


def _place(label: int | str, outputs: int, names: tuple[str, ...]) -> int:
    """Which output a label is."""
    if isinstance(label, str) and label in names:
        return names.index(label)
    known = f"a number from 0 to {outputs - 1}" + (f" or one of {', '.join(names)}" * bool(names))
    try:
        place = whole(int(label), "label", 0)
    except (TypeError, ValueError):
        place = outputs
    if not 0 <= place < outputs:
        raise InputError(f"label {label!r} is none of {outputs} labels: give {known}.")
    return place


def _check_labels(data: Data, criterion: ManyLabels) -> None:
    """Refuse labels other than 0 and 1 before any work."""
    for start in range(0, len(data), 1000):
        rows = data.read(start, start + 1000)[1]
        bad = ~((rows == 0) | (rows == 1)).all(1)
        if bool(bad.any()):
            place = start + int(bad.nonzero()[0])
            raise InputError(
                f"sample {place} has labels other than 0 and 1: a threshold is for labels that "
                "hold or do not; for a regression give a tolerance."
            )
        if criterion.width != rows.shape[1]:
            raise InputError(f"sample {start} has {rows.shape[1]} labels: give each as many.")


def read_criterion(config: Mapping[str, Any]) -> Criterion | None:
    """What the configuration of a run says of its task; None for classes."""
    kept = config.get("criterion")
    if kept is None:
        return None
    names = tuple(str(name) for name in kept["names"])
    outputs = whole(kept["outputs"], "outputs")
    if names and len(names) != outputs:
        raise ValueError("names of other outputs")
    if kept["kind"] == "regression":
        stated = kept["tolerance"]
        tolerance = OWN if stated == OWN else parse_tolerance(stated)
        if isinstance(tolerance, Tensor):
            raise ValueError("a list in the place of a tolerance")
        return Regression(outputs, tolerance, names)
    if kept["kind"] != "labels":
        raise ValueError("a task of an unknown kind")
    label = None if kept["label"] is None else _place(kept["label"], outputs, ())
    return ManyLabels(outputs, _finite(kept["threshold"], "threshold"), label, names)


def recorded_targets(about: Any, criterion: Criterion | None) -> Targets:
    """Which part of the data the targets of a run were.

    about: what the run records of its data; criterion: of the run, or None for classes.
    """
    kept = about if isinstance(about, Mapping) else {}
    parts = [kept.get(key) for key in ("targets", "aside")]
    columns, aside = (tuple(map(str, part)) if isinstance(part, list) else () for part in parts)
    return Targets(criterion is not None, columns, aside)


def right_of(criterion: Criterion | None, y: Tensor) -> Labels:
    """Classes as they are; rows of a criterion as their specification.

    criterion: of the run, or None; y: classes `(n,)` or rows `(n, W)`.
    """
    return y if criterion is None else criterion.specification(y)


def check_outputs(criterion: Criterion, z: Tensor) -> None:
    """Refuse a model that has other outputs than there are targets.

    z: outputs of the model at a few samples.
    """
    if z.shape[1] != criterion.outputs:
        what = "targets" if isinstance(criterion, Regression) else "labels"
        raise InputError(
            f"each sample has {criterion.outputs} {what} and the model {z.shape[1]} outputs: give "
            "one for each output, in the same order."
        )


def outputs_of(
    model: Model, x: Tensor, criterion: Criterion | None, batch_size: int | None = None
) -> Tensor:
    """What a model gives at samples, `(n, K)`, on the CPU; one output is enough where there is a
    criterion.

    Args:
        model: callable from a batch to outputs.
        x: samples.
        criterion: of the run, or None.
        batch_size: most samples in one call of the model; default None, all of them.
    """
    goal = None if criterion is None else Specification(torch.eye(criterion.outputs))
    size, device = batch_size or max(len(x), 1), device_of(model, x.device)
    network = Network(model, torch.arange(len(x)), size, device, specification=goal)
    return network.outputs(x, network.rows).cpu()


def predicted(z: Tensor, y: Labels) -> Tensor:
    """The class predicted at outputs, where a tie is an error; of a specification 0 where it holds,
    and else the row that fails most, counted from 1.

    z: outputs `(n, K)`; y: labels, or a fitted specification.
    """
    goal = specification_of(y)
    return predict(z if goal is None else goal.logits(z), labels_of(y, z.device))


def lead(z: Tensor, y: Labels) -> Tensor:
    """By how much a sample is right, `(n,)`: the least margin, negative where it is wrong.

    z: outputs `(n, K)`; y: labels, or a fitted specification.
    """
    goal = specification_of(y)
    return -margin(z, labels_of(y, z.device)) if goal is None else goal.margins(z).amin(1)


def kept_labels(y: Tensor) -> dict[str, Tensor]:
    """Labels as a chunk of a run keeps them: rows of a criterion beside the class 0.

    y: classes `(n,)` or rows `(n, W)`.
    """
    if not y.is_floating_point():
        return {"y": y}
    return {"y": torch.zeros(len(y), dtype=torch.int64), "targets": y}


def stored_labels(kept: Mapping[str, Tensor]) -> Tensor:
    """What `kept_labels` was given.

    kept: tensors of a chunk.
    """
    return kept.get("targets", kept["y"])
