"""Samples and labels from anywhere, read in pieces: memory does not grow with their number.

>>> from wassail.zoo.datasets import open_data
>>> data = open_data("digits", n=100)
>>> len(data), data.shape
(100, (1, 8, 8))
>>> x, y = data.read(0, 10)

`open_data` takes the names of the command line (a built-in name, a file, a folder, `hf:NAME`,
`module:factory`) and, in Python, a pair `(x, y)`, a torch Dataset or a DataLoader. Ids, order and
preprocessing are recorded in `info`: a figure for "ImageNet" says nothing without them. The samples
are what the model gets: float32, or float64 where they were, and divided by 255 where they were
8-bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError, unknown
from wassail.zoo import DATASETS, SPLITS, data_file, factory
from wassail.zoo import data as builtin_data
from wassail.zoo.files import (
    Table,
    find_cifar,
    idx_labels,
    read_cifar,
    read_idx,
    read_npz,
    read_safetensors,
    reading,
)
from wassail.zoo.weights import regular, sha256

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

__all__ = ["Data", "open_data"]

_CHANNELS = (1, 3, 4)
_KEYS = (
    ("x", "image", "images"),
    ("y", "label", "labels"),
)  # of samples and labels in items that are dicts


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
        each time.

        The samples are float32, or float64 if that is how they were given.
        """

    def ids(self, start: int, stop: int) -> list[str]:
        """File names where there are some, else places in the data."""
        return [str(place) for place in range(*slice(start, stop).indices(len(self)))]


def open_data(
    source: str | Path | Data | tuple[Any, Any] | Dataset[Any] | DataLoader[Any],
    n: int | None = None,
    *,
    ids: str | Path | None = None,
    preprocessing: str | None = None,
) -> Data:
    """The data of that name, the first n samples of them (all if there are fewer).

    source: see the top of this page. ids: for an image folder, a file that names the images in
    order, one a line, perhaps with the label behind it (RobustBench's 5,000 of ImageNet come as
    such a file). preprocessing: for images in files, by RobustBench's names: "Res256Crop224",
    "BicubicRes256Crop224", "Crop288", "Res224"; "Gray" at the end for one channel.
    """
    if n is not None and n < 1:
        raise InputError(f"n is {n}: give a positive number of samples.")
    if isinstance(source, Data):
        return source if n is None or n >= len(source) else _First(source, n)
    if isinstance(source, (str, Path)):
        found = _named(str(source), n, ids, preprocessing)
    elif ids is not None or preprocessing is not None:
        raise InputError(
            "ids and preprocessing are for images in files: choose and transform the samples "
            "before."
        )
    else:
        found = _given(source, "data in memory" if _is_pair(source) else type(source).__name__, n)
    return found if n is None or n >= len(found) else _First(found, n)


def _named(name: str, n: int | None, ids: str | Path | None, preprocessing: str | None) -> Data:
    path = Path(name)
    own = (
        factory.is_call(name) and not path.exists() and not name.startswith("hf:")
    )  # errors of the user's code stay as they are
    with contextlib.nullcontext() if own else reading(name):
        found = _opened(name, path, n, ids, preprocessing)
    if not len(found):
        raise InputError(f"{name!r} holds no samples: give data with at least one.")
    return found


def _opened(
    name: str, path: Path, n: int | None, ids: str | Path | None, preprocessing: str | None
) -> Data:
    images = path.is_dir() or name.startswith("hf:")
    if name in DATASETS or name.partition(":")[0] in DATASETS:
        found = _builtin(name)
    elif name.startswith("hf:") or (path.is_dir() and _is_saved(path)):
        return _huggingface(name, n, preprocessing)
    elif path.suffix == ".npz":
        found = ArrayData(name, read_npz(path, n))
    elif path.suffix == ".safetensors":
        found = ArrayData(name, read_safetensors(path, n))
    elif idx_labels(path) is not None:
        found = ArrayData(name, read_idx(path, n))
    elif path.exists() and (cifar := find_cifar(path)) is not None:
        found = ArrayData(name, read_cifar(*cifar, n))
    elif path.is_dir() and (idx := _idx_inside(path)) is not None:
        found = ArrayData(name, read_idx(idx, n))
    elif path.is_dir():
        from wassail.zoo.images import ImageFolder

        return ImageFolder(name, n, ids, preprocessing)
    elif factory.is_call(name) and not path.exists():
        made = factory.call(name, "data")
        found = _given(made.value, name, n)
        if made.file is not None:
            found.info = {**found.info, "files": {made.file.name: sha256(made.file)}}
    elif path.exists() or path.suffix or "/" in name:
        what = "is no kind of data that is known" if path.exists() else "does not exist"
        raise InputError(
            f"{name!r} {what}: give an .npz or .safetensors file with x and y, an IDX image "
            "file, a folder of images or of "
            "CIFAR, hf:NAME, module:factory, or a built-in name."
        )
    else:
        raise unknown("data set", name, DATASETS)
    if ids is not None or (preprocessing is not None and not images):
        raise InputError(
            f"ids and preprocessing are for folders of images, and {name!r} is none: leave them "
            "out."
        )
    return found


def _given(source: Any, name: str, n: int | None) -> Data:
    """What was made in Python: a pair, a Dataset or a DataLoader."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(source, Data):
        return source
    if _is_pair(source):
        x, y = (
            part.detach().cpu() if isinstance(part, Tensor) else np.asarray(part) for part in source
        )
        found = ArrayData(name, Table(x, y, {"source": "arrays"}))
        found.info = {**found.info, "sha256": _digest(found)}
        return found
    if isinstance(source, DataLoader):
        return _loader(source, name, n)
    if isinstance(source, IterableDataset):
        return _spooled(
            ([item] for item in source),
            name,
            n,
            "as the data set yields them, fixed when first read",
            single=True,
        )
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        info = {"source": "dataset", "class": type(source).__name__}
        items = ItemData(name, source.__getitem__, len(source), info, _classes(source))
        some = range(
            0, len(items), max(len(items) // 32, 1)
        )  # all of them could take as long as the evaluation
        items.info = {**items.info, "samples": len(items), "sha256 of some": _digest(items, some)}
        return items
    raise InputError(
        f"{name} is no data: give a pair (x, y), a torch Dataset, a DataLoader, a file or a name."
    )


def _is_pair(source: Any) -> bool:
    """Whether it is `(x, y)`; a list of two may also be two items of a data set."""
    if not isinstance(source, (tuple, list)) or len(source) != 2:
        return False
    return isinstance(source, tuple) or all(
        isinstance(part, (Tensor, np.ndarray)) for part in source
    )


# ---- The kinds of data
# --------------------------------------------------------------------------------------------------


class _First(Data):
    """The first n samples of other data."""

    def __init__(self, whole: Data, n: int) -> None:
        self.name = whole.name
        self.info = whole.info
        self.classes = whole.classes
        self.shape = whole.shape
        self._whole = whole
        self._n = n

    def __len__(self) -> int:
        """At most n."""
        return self._n

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As the data do."""
        start, stop, _ = slice(start, stop).indices(self._n)
        return self._whole.read(start, stop)

    def ids(self, start: int, stop: int) -> list[str]:
        """As the data do."""
        start, stop, _ = slice(start, stop).indices(self._n)
        return self._whole.ids(start, stop)


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
        if len(self._y.shape) != 1 and tuple(self._y.shape[1:]) != (
            1,
        ):  # (N, 1) is how some libraries keep them
            raise InputError(
                f"the labels of {name!r} have shape {tuple(self._y.shape)}: give class indices "
                "of shape (N,)."
            )
        if self._x.shape[0] != self._y.shape[0]:
            raise InputError(
                f"{name!r} has {self._x.shape[0]} samples but {self._y.shape[0]} labels: give "
                "one for each sample."
            )
        self._change, steps = layout(tuple(self._x.shape), _kind(self._x.dtype), name)
        _labels(self._y[0:0], name)
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
        return self._change(_tensor(self._x[start:stop])), _labels(self._y[start:stop], self.name)


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
                    f"{tuple(sample.shape)} and the first "
                    f"{tuple(self._raw)}: bring them to one size (images in files by a "
                    "preprocessing such as Res256Crop224)."
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
    pair = _pair(item)
    if pair[0] is None or pair[1] is None:
        raise InputError(
            f"an item of {name!r} is a {type(item).__name__}: it must be a pair (sample, label)."
        )
    label = np.asarray(pair[1].cpu() if isinstance(pair[1], Tensor) else pair[1])
    if label.size != 1 or label.dtype.kind not in "ui":
        raise InputError(f"a label of {name!r} is {pair[1]!r}: labels are class indices.")
    return _tensor(pair[0] if isinstance(pair[0], Tensor) else np.asarray(pair[0])), int(
        _labels(label, name)
    )


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        x, y = (next((item[k] for k in names if k in item), None) for names in _KEYS)
        return x, y
    return (item[0], item[1]) if isinstance(item, (tuple, list)) and len(item) > 1 else (None, None)


# ---- Layout
# --------------------------------------------------------------------------------------------------


def layout(
    shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> tuple[Callable[[Tensor], Tensor], list[str]]:
    """How samples stored like this become images in floats with the channels first, and the same in
    words.

    Only 8-bit arrays are rearranged: they are images for certain, and their values say how they are
    scaled.
    """
    if dtype in (
        torch.float32,
        torch.float64,
    ):  # double precision is somebody's choice, and that of the model
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
    if len(shape) == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS:
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


def _labels(rows: Any, name: str) -> Tensor:
    rows = rows.numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    if rows.dtype.kind not in "ui":
        raise InputError(
            f"the labels of {name!r} are {rows.dtype}: save class indices as integers."
        )
    if rows.dtype == np.uint64 and rows.size and rows.max() > np.iinfo(np.int64).max:
        raise InputError(f"a label of {name!r} is {rows.max()}: labels are class indices, 0..K-1.")
    return torch.from_numpy(rows.astype(np.int64).reshape(-1))


# ---- One function for each source
# ----------------------------------------------------------------------------------------


def _builtin(name: str) -> Data:
    base, _, split = name.partition(":")
    if split and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    x, y = builtin_data(base, split or "test")
    info = {
        "source": "builtin",
        "split": split or "test",
        "files": {f"{base}.npz": sha256(data_file(base))},
    }
    return ArrayData(name, Table(x, y, info, tuple(str(digit) for digit in range(10))))


def _idx_inside(folder: Path) -> Path | None:
    """The test images of an MNIST-like folder."""
    return next(iter(sorted(folder.glob("t10k-images*idx3-ubyte*"))), None)


def _classes(dataset: Any) -> tuple[str, ...] | None:
    names = getattr(dataset, "classes", None)
    return tuple(map(str, names)) if isinstance(names, (list, tuple)) else None


def _loader(loader: DataLoader[Any], name: str, n: int | None) -> Data:
    """A loader that goes through its data set in order is that data set; any other is read
    once, and that order is kept.
    """
    from torch.utils.data import BatchSampler, SequentialSampler, default_collate

    batches = loader.batch_sampler
    plain = (
        isinstance(loader.sampler, SequentialSampler)
        and loader.collate_fn is default_collate
        and (
            batches is None
            or (
                type(batches) is BatchSampler
                and batches.sampler is loader.sampler
                and not batches.drop_last
            )
        )
    )
    if plain:
        return _given(loader.dataset, name, n)
    order = "as the loader yielded them, fixed when first read"
    return _spooled(loader, name, n, order, single=loader.batch_size is None and batches is None)


def _spooled(batches: Iterable[Any], name: str, n: int | None, order: str, single: bool) -> Data:
    """Read everything once into a temporary file, in the order in which it comes, and map the
    file.
    """
    labels: list[int] = []
    change: Callable[[Tensor], Tensor] | None = None
    steps: list[str] = []
    found = hashlib.sha256()
    shape = torch.Size()
    kind = np.dtype(np.float32)
    with tempfile.TemporaryFile(prefix="wassail-") as file:
        for batch in batches:
            x, y = _batch(
                batch[0] if single and isinstance(batch, list) and len(batch) == 1 else batch,
                name,
                single,
            )
            if change is None:
                change, steps = layout(tuple(x.shape), x.dtype, name)
                first = change(x[:1])
                shape = first.shape[1:]
                kind = first.numpy().dtype
            x = change(x)[: None if n is None else n - len(labels)]
            if x.shape[1:] != shape:
                raise InputError(
                    f"{name} yields samples of shape {tuple(x.shape[1:])} after {tuple(shape)}: "
                    "bring them to one size."
                )
            data = x.numpy().tobytes()
            file.write(data)
            found.update(data)
            labels += y[: len(x)].tolist()
            if n is not None and len(labels) >= n:
                break
        if not labels:
            raise InputError(f"{name} yields no samples: give data with at least one.")
        file.flush()
        rows = np.memmap(file, kind, "r", 0, (len(labels), *shape))
    found.update(np.asarray(labels, np.int64).tobytes())
    info = {"source": "loader", "order": order, "sha256": found.hexdigest()}
    data_ = ArrayData(name, Table(rows, np.asarray(labels, np.int64), info))
    data_.info = {**data_.info, "preprocessing": steps}
    return data_


def _batch(batch: Any, name: str, single: bool) -> tuple[Tensor, Tensor]:
    """Samples `(n, ...)` and labels `(n,)` of what a loader yields."""
    if single:
        sample, label = split_item(batch, name)
        return sample[None], torch.tensor([label])
    pair = _pair(batch)
    if pair[0] is None or pair[1] is None:
        raise InputError(
            f"{name} yields a {type(batch).__name__}: batches must be pairs (samples, labels)."
        )
    x, y = (
        part.detach().cpu() if isinstance(part, Tensor) else torch.as_tensor(np.asarray(part))
        for part in pair
    )
    if len(x) != y.numel():
        raise InputError(
            f"{name} yields {len(x)} samples with {y.numel()} labels: give one label for each "
            "sample."
        )
    return x, _labels(y, name)


def _digest(data: Data, places: range | None = None) -> str:
    """SHA-256 of the samples and labels at some places, by default all, as they are read."""
    found = hashlib.sha256()
    starts, size = (range(0, len(data), 256), 256) if places is None else (places, 1)
    for start in starts:
        for part in data.read(start, start + size):
            found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()


def _is_saved(folder: Path) -> bool:
    """Whether Hugging Face's save_to_disk wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _huggingface(name: str, n: int | None, preprocessing: str | None) -> Data:
    """A Hugging Face data set of images, `hf:NAME` or `hf:NAME:SPLIT`, from a folder that
    save_to_disk wrote or the cache.
    """
    from wassail.zoo.images import Preprocessing, open_image

    change = Preprocessing(preprocessing)
    word, _, split = name.removeprefix("hf:").partition(":")
    try:
        library: Any = importlib.import_module("datasets")
    except Exception as error:  # a broken library of its own raises more than ImportError
        raise InputError(
            f"{name!r} needs the package datasets ({error}): install it with pip install datasets."
        ) from error
    # Scripts that come with data are never run. Libraries from version 4 on run none, and do not
    # know the word.
    try:
        known = inspect.signature(library.load_dataset).parameters
        options = {"trust_remote_code": False} if "trust_remote_code" in known else {}
        saved = Path(word).is_dir() and _is_saved(Path(word))
        table = library.load_from_disk(word) if saved else library.load_dataset(word, **options)
    except Exception as error:  # no network, no such name, a script that would have to run
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"datasets could not load {word!r} ({reason}): give a folder that save_to_disk "
            "wrote, or a name in the cache."
        ) from error
    if isinstance(table, Mapping):  # several splits
        split = split or next((s for s in ("test", "validation", "valid", "val") if s in table), "")
        if split not in table:
            raise InputError(
                f"{name!r} has the splits {', '.join(table)}: choose one with hf:NAME:SPLIT."
            )
        table = table[split]
    features = table.features
    image = next((key for key, kind in features.items() if type(kind).__name__ == "Image"), None)
    label = next(
        (key for key, kind in features.items() if type(kind).__name__ == "ClassLabel"), None
    )
    label = label or next(
        (key for key in ("label", "labels", "fine_label", "y") if key in features), None
    )
    if image is None or label is None:
        raise InputError(
            f"{name!r} has columns {', '.join(features)}: it needs one of images and one of "
            "class labels."
        )

    if hasattr(table, "cast_column") and hasattr(
        library, "Image"
    ):  # decoded here, by the formats that are promised only
        table = table.cast_column(image, library.Image(decode=False))

    def item(place: int) -> tuple[Any, Any]:
        with reading(name):
            row = table[place]
            found = row[image]
            if isinstance(found, Mapping):
                stored = found.get("bytes")
                where = f"image {place} of {name}"
                if stored is None:
                    regular(found["path"], "an image")
                found = open_image(found["path"] if stored is None else io.BytesIO(stored), where)
            return change.keep_mode(found), row[label]

    info = {
        "source": "huggingface",
        "split": split or str(getattr(table, "split", "") or ""),
        "columns": [image, label],
        "fingerprint": str(getattr(table, "_fingerprint", "")),
        "preprocessing": change.steps,
        "versions": {"datasets": str(library.__version__)},
    }
    names = getattr(features[label], "names", None)
    size = len(table) if n is None else min(n, len(table))
    return ItemData(name, item, size, info, None if names is None else tuple(map(str, names)))
