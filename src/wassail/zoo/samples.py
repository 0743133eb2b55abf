"""Samples from anywhere, read when they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError, remedies
from wassail.network import CHANNELS, Model, as_taken
from wassail.zoo.files import Table, one_label_each

# Of samples and labels in items that are dicts.
_KEYS = (("x", "image", "images"), ("y", "label", "labels"))


class Data(ABC):
    """N samples and their labels in a fixed order, read in pieces.

    name: as the person gave it; info: what a run records, ready for JSON: source, files with their
    SHA-256, preprocessing; classes: names of the classes, if known; shape: of one sample.
    """

    name: str
    info: Mapping[str, Any]
    classes: tuple[str, ...] | None
    shape: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples, N."""

    @abstractmethod
    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Samples `(n, *shape)` and labels int64 `(n,)` of the places start..stop-1; the same bytes
        each time. Targets that are numbers are float64 `(n, K)`.

        The samples are float32, or float64 if that is how they were given.
        """

    def ids(self, start: int, stop: int) -> list[str]:
        """File names where there are some, else places in the data."""
        return [str(place) for place in range(*slice(start, stop).indices(len(self)))]


class ArrayData(Data):
    """Samples and labels in two arrays, which may lie in a file."""

    def __init__(self, name: str, table: Table) -> None:
        self.name = name
        self.classes = table.classes
        self._x = table.x
        self._y = table.y
        if len(self._x.shape) < 2:
            raise InputError(
                f"the samples of {name!r} have shape {tuple(self._x.shape)}: a batch has shape "
                "(N, ...)."
            )
        self._judge = targets_of if table.numbers else labels_of
        _check_shape(tuple(self._y.shape), table.numbers, name)
        one_label_each(name, self._x.shape[0], self._y.shape[0])
        self._change, steps = layout(tuple(self._x.shape), _kind(self._x.dtype), name)
        self._judge(self._y[0:0], name)
        self.info = {**table.info, "preprocessing": steps}
        self.shape = tuple(
            self._change(
                torch.empty(1, *self._x.shape[1:], dtype=_kind(self._x.dtype), device="meta")
            ).shape[1:]
        )

    def __len__(self) -> int:
        """N."""
        return int(self._x.shape[0])

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The rows of the two arrays."""
        start, stop, _ = slice(start, stop).indices(len(self))
        y = self._judge(self._y[start:stop], self.name)
        return self._change(_tensor(self._x[start:stop])), y


class Wrapped(Data):
    """Other data as they are: a subclass changes what it gives.

    Args:
        whole: the data.
        about: what is recorded besides what the data say.
    """

    def __init__(self, whole: Data, about: Mapping[str, Any]) -> None:
        self.whole = whole
        self.name = whole.name
        self.classes = whole.classes
        self.shape = whole.shape
        self.info = {**whole.info, **about}

    def __len__(self) -> int:
        """As the data."""
        return len(self.whole)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As the data do."""
        return self.whole.read(start, stop)

    def ids(self, start: int, stop: int) -> list[str]:
        """As the data do."""
        return self.whole.ids(start, stop)


class CastData(Wrapped):
    """Other data in the floating-point type of a model."""

    def __init__(self, whole: Data, dtype: torch.dtype) -> None:
        step = f"to {str(dtype).removeprefix('torch.')}, the type of the model"
        super().__init__(whole, {"preprocessing": [*whole.info.get("preprocessing", []), step]})
        self._dtype = dtype

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As the data do, rounded."""
        x, y = super().read(start, stop)
        return x.to(self._dtype), y


def for_model(data: Data, model: Model) -> Data:
    """The data in the floating-point type of a model, if it refuses their own.

    model: a callable from a batch to logits.
    """
    if not len(data):
        return data
    first = data.read(0, 1)[0]
    taken = as_taken(model, first)
    return data if taken.dtype == first.dtype else CastData(data, taken.dtype)


class ItemData(Data):
    """Samples that are made one at a time: `item(place) -> (sample, label)`."""

    def __init__(
        self,
        name: str,
        item: Callable[[int], Any],
        size: int,
        info: Mapping[str, Any],
        classes: tuple[str, ...] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.classes = classes
        self._item = item
        self._size = size
        self._names = names
        self.info = dict(info)
        if not size:
            raise InputError(f"{name!r} holds no samples: give data with at least one.")
        first = self._get(0)
        again = self._get(0)
        if not torch.equal(first[0], again[0]) or first[1] != again[1]:
            raise InputError(
                f"{name!r} gives another sample each time it is asked: remove random transforms "
                "from it."
            )
        self._change, steps = layout((1, *first[0].shape), first[0].dtype, name)
        self._raw = first[0].shape
        self._kind = first[0].dtype
        self.shape = tuple(self._change(first[0][None]).shape[1:])
        self.info = {**self.info, "preprocessing": [*self.info.get("preprocessing", []), *steps]}

    def __len__(self) -> int:
        """N."""
        return self._size

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The items, one after the other."""
        places = range(*slice(start, stop).indices(len(self)))
        if not places:
            return self._change(torch.zeros(0, *self._raw, dtype=self._kind)), torch.zeros(
                0, dtype=torch.int64
            )
        items = [self._get(place) for place in places]
        for place, (sample, _) in zip(places, items):
            if sample.shape != self._raw:
                raise InputError(
                    f"sample {self.ids(place, place + 1)[0]} of {self.name!r} has shape "
                    f"{tuple(sample.shape)} and the first {tuple(self._raw)}: bring them to one "
                    "size (images in files by a preprocessing such as Res256Crop224)."
                )
        return self._change(torch.stack([sample for sample, _ in items])), torch.tensor(
            [label for _, label in items]
        )

    def ids(self, start: int, stop: int) -> list[str]:
        """File names where there are some, else places in the data."""
        return super().ids(start, stop) if self._names is None else list(self._names[start:stop])

    def _get(self, place: int) -> tuple[Tensor, int]:
        return split_item(self._item(place), self.name)


def split_item(item: Any, name: str) -> tuple[Tensor, int]:
    """Sample and label of one item: a pair, or a dict that names them as `.npz` files do."""
    pair = pair_of(item)
    if pair[0] is None or pair[1] is None:
        raise InputError(
            f"an item of {name!r} is a {type(item).__name__}: it must be a pair (sample, label)."
        )
    label = np.asarray(pair[1].cpu() if isinstance(pair[1], Tensor) else pair[1])
    if label.size != 1 or label.dtype.kind not in "ui":
        raise InputError(
            f"a label of {name!r} is {pair[1]!r}: labels are class indices; for a regression or "
            "several labels give a pair (x, y) or a file."
        )
    return _tensor(pair[0] if isinstance(pair[0], Tensor) else np.asarray(pair[0])), int(
        labels_of(label, name)
    )


def pair_of(item: Any) -> tuple[Any, Any]:
    """A sample and its label from one item."""
    if isinstance(item, Mapping):
        x, y = (next((item[k] for k in names if k in item), None) for names in _KEYS)
        return x, y
    return (item[0], item[1]) if isinstance(item, (tuple, list)) and len(item) > 1 else (None, None)


def layout(
    shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> tuple[Callable[[Tensor], Tensor], list[str]]:
    """How samples stored like this become images in floats with the channels first, and the same in
    words.

    Only 8-bit arrays are rearranged: they are images for certain, and their values say how they are
    scaled.
    """
    if dtype in (torch.float32, torch.float64):  # data in double precision were meant to be so
        return (lambda x: x), []
    if dtype in (torch.float16, torch.bfloat16):
        return (lambda x: x.float()), [f"{str(dtype).removeprefix('torch.')} to float32"]
    if dtype != torch.uint8:
        kind = str(dtype).removeprefix("torch.")
        raise InputError(
            f"the samples of {name!r} are {kind}: save 8-bit images as uint8, anything else as "
            "float32 in its box."
        )
    if len(shape) == 3:
        return (lambda x: x.unsqueeze(1).float().div(255)), ["NHW to N1HW", "divided by 255"]
    if len(shape) == 4 and shape[3] in CHANNELS and shape[1] not in CHANNELS:
        return (lambda x: x.permute(0, 3, 1, 2).contiguous().float().div(255)), [
            "NHWC to NCHW",
            "divided by 255",
        ]
    return (lambda x: x.float().div(255)), ["divided by 255"]


def _kind(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.zeros(0, np.dtype(dtype).newbyteorder("="))).dtype
    except TypeError:
        raise InputError(
            f"the data hold {np.dtype(dtype)}, which torch does not know: save float32 or float64."
        ) from None


def _tensor(rows: Any) -> Tensor:
    """A copy as a tensor: what was mapped from a file must not be written to, and stays
    readable when the file is closed.
    """
    if isinstance(rows, Tensor):
        return rows.detach().clone()
    return torch.from_numpy(np.array(rows, dtype=rows.dtype.newbyteorder("="), order="C"))


def _check_shape(shape: tuple[int, ...], numbers: bool, name: str) -> None:
    """Refuse labels, or targets, of a shape that they cannot have."""
    if numbers and (len(shape) not in (1, 2) or 0 in shape[1:]):
        raise InputError(
            f"the targets of {name!r} have shape {shape}: give (N,) for one output of the model, "
            "or (N, K) for K of them."
        )
    if not numbers and len(shape) != 1 and shape[1:] != (1,):  # (N, 1): some libraries keep them so
        raise remedies(
            f"the labels of {name!r} have shape {shape}",
            "give class indices of shape (N,); for several labels of each sample say where an "
            "output means yes, with threshold (0 for logits), and for a regression how far off it "
            "may be, with tolerance",
            "give class indices of shape (N,); for several labels of each sample say where an "
            "output means yes, with --threshold (0 for logits), and for a regression how far off "
            "it may be, with --tolerance",
        )


def targets_of(rows: Any, name: str) -> Tensor:
    """Targets that are numbers, float64 `(n, K)`, checked."""
    rows = rows.numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    if rows.dtype.kind not in "buif":
        raise InputError(f"the targets of {name!r} are {rows.dtype}: give numbers.")
    found = torch.from_numpy(rows.astype(np.float64))
    if not bool(torch.isfinite(found).all()):
        raise InputError(
            f"a target of {name!r} is NaN or infinity: remove such samples, or give finite numbers."
        )
    return found[:, None] if found.ndim == 1 else found


def labels_of(rows: Any, name: str) -> Tensor:
    """Class indices as a tensor, checked."""
    rows = rows.numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    if rows.dtype.kind not in "ui":
        indices = "save class indices as integers, or for a regression say how far off it may be"
        raise remedies(
            f"the labels of {name!r} are {rows.dtype}",
            f"{indices}, with tolerance",
            f"{indices}, with --tolerance",
        )
    if rows.dtype == np.uint64 and rows.size and rows.max() > np.iinfo(np.int64).max:
        raise InputError(f"a label of {name!r} is {rows.max()}: labels are class indices, 0..K-1.")
    return torch.from_numpy(rows.astype(np.int64).reshape(-1))
