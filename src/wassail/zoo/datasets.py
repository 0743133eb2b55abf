"""Samples and labels from anywhere, read in pieces: memory does not grow with their number.

>>> from wassail.zoo.datasets import open_data
>>> data = open_data("digits", n=100)
>>> len(data), data.shape
(100, (1, 8, 8))
>>> x, y = data.read(0, 10)

`open_data` takes the names of the command line (a built-in name, a file, a folder, `hf:NAME`,
`module:factory`) and, in Python, a pair `(x, y)`, a pandas data frame, a torch Dataset or a
DataLoader. Ids, order and
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError, reason_of, unknown
from wassail.zoo import DATASETS, SPLITS, data_file, factory
from wassail.zoo import data as builtin_data
from wassail.zoo.classes import InOrder
from wassail.zoo.files import (
    CLASSES,
    Table,
    Targets,
    find_cifar,
    idx_labels,
    read_cifar,
    read_idx,
    read_npz,
    read_safetensors,
    reading,
)
from wassail.zoo.samples import (
    ArrayData,
    Data,
    ItemData,
    Wrapped,
    labels_of,
    layout,
    pair_of,
    split_item,
)
from wassail.zoo.tables import frame_values, from_frame, is_frame, read_csv, read_parquet
from wassail.zoo.weights import regular, sha256

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

__all__ = ["Data", "open_data"]

FILES: dict[str, Callable[[Path, int | None], Table]] = {
    ".npz": read_npz,
    ".safetensors": read_safetensors,
}
"""How a file is read, by its suffix: the path and the number of samples that are wanted."""
TABLES: dict[str, Callable[[Path, int | None, Targets], Table]] = {
    ".csv": read_csv,
    ".parquet": read_parquet,
}
"""How a table is read, by its suffix: also which columns the targets are."""


def open_data(
    source: str | Path | Data | tuple[Any, Any] | Dataset[Any] | DataLoader[Any],
    n: int | None = None,
    *,
    ids: str | Path | None = None,
    preprocessing: str | None = None,
    classes: Sequence[str] | None = None,
    targets: Targets = CLASSES,
) -> Data:
    """The data of that name, the first n samples of them (all if there are fewer).

    source: see the top of this page. ids: for an image folder, a file that names the images in
    order, one a line, perhaps with the label behind it (RobustBench's 5,000 of ImageNet come as
    such a file). preprocessing: for images in files, by RobustBench's names: "Res256Crop224",
    "BicubicRes256Crop224", "Crop288", "Res224"; "Gray" at the end for one channel. classes: names
    of all classes in the order of the model, class 0 first; by default names are numbered in
    alphabetical order, over all of the data. targets: by default classes; numbers are for files,
    tables and pairs `(x, y)`.
    """
    if n is not None and n < 1:
        raise InputError(f"n is {n}: give a positive number of samples.")
    if isinstance(source, Data):
        found = source
    elif isinstance(source, (str, Path)):
        found = _named(str(source), n, ids, preprocessing, targets)
    elif ids is not None or preprocessing is not None:
        raise InputError(
            "ids and preprocessing are for images in files: choose and transform the samples "
            "before."
        )
    else:
        name = "data in memory" if _is_pair(source) else type(source).__name__
        found = _given(source, name, n, targets)
    found = found if n is None or n >= len(found) else _First(found, n)
    return found if classes is None else InOrder(found, classes)


def _named(
    name: str, n: int | None, ids: str | Path | None, preprocessing: str | None, targets: Targets
) -> Data:
    path = Path(name)
    # Errors of the user's code stay as they are.
    own = factory.is_call(name) and not path.exists() and not name.startswith("hf:")
    with contextlib.nullcontext() if own else reading(name):
        if targets == CLASSES:
            found = _opened(name, path, n, ids, preprocessing)
        else:
            found = _with_targets(name, path, n, targets)
    if not len(found):
        raise InputError(f"{name!r} holds no samples: give data with at least one.")
    return found


def _with_targets(name: str, path: Path, n: int | None, targets: Targets) -> Data:
    """A file with targets that are numbers, or that stand in columns with names of their own."""
    if path.suffix in TABLES:
        return ArrayData(name, TABLES[path.suffix](path, n, targets))
    if targets.columns or targets.aside:
        raise InputError(
            f"{', '.join((*targets.columns, *targets.aside))} should be columns of {name!r}, which "
            "is no table: give a .csv or .parquet file."
        )
    if path.suffix in FILES:
        return ArrayData(name, replace(FILES[path.suffix](path, n), numbers=True))
    if factory.is_call(name) and not path.exists():
        return _given(factory.call(name, "data").value, name, n, targets)
    raise InputError(
        f"{name!r} has classes: targets that are numbers are read from .npz, .safetensors, .csv "
        "and .parquet files and from module:factory."
    )


def _file(path: Path, n: int | None) -> Table:
    """Samples and classes out of a file."""
    if path.suffix in TABLES:
        return TABLES[path.suffix](path, n, CLASSES)
    return FILES[path.suffix](path, n)


def _opened(
    name: str, path: Path, n: int | None, ids: str | Path | None, preprocessing: str | None
) -> Data:
    """The data of that name."""
    images = path.is_dir() or name.startswith("hf:")
    if name in DATASETS or name.partition(":")[0] in DATASETS:
        found = _builtin(name)
    elif name.startswith("hf:") or (path.is_dir() and _is_saved(path)):
        return _huggingface(name, n, preprocessing)
    elif path.suffix in (*FILES, *TABLES):
        found = ArrayData(name, _file(path, n))
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
        found = _given(made.value, name, n, CLASSES)
        if made.file is not None:
            found.info = {**found.info, "files": {made.file.name: sha256(made.file)}}
    elif path.exists() or path.suffix or "/" in name:
        what = "is no kind of data that is known" if path.exists() else "does not exist"
        raise InputError(
            f"{name!r} {what}: give an .npz or .safetensors file with x and y, a .csv, a "
            ".parquet, an IDX image file, a folder of images or of "
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


def _given(source: Any, name: str, n: int | None, targets: Targets) -> Data:
    """What was made in Python: a pair, a Dataset or a DataLoader."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(source, Data):
        return source
    if is_frame(source):
        found = ArrayData("data frame", from_frame(source, "data frame", targets=targets))
        found.info = {**found.info, "sha256": _digest(found)}
        return found
    if _is_pair(source):
        named = {}
        if is_frame(source[0]):
            named = {"features": [str(column) for column in source[0].columns]}
            source = (frame_values(source[0], name), source[1])
        x, y = (
            part.detach().cpu() if isinstance(part, Tensor) else np.asarray(part) for part in source
        )
        about = {"source": "arrays", **named}
        found = ArrayData(name, Table(x, y, about, numbers=targets.numbers))
        found.info = {**found.info, "sha256": _digest(found)}
        return found
    if targets.numbers:
        raise InputError(
            f"{name} gives one item at a time: for targets that are numbers give a pair (x, y), a "
            "data frame or a file."
        )
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
    if isinstance(source, Mapping):
        raise InputError("the data are a dict: give a pair (x, y), for example (d['x'], d['y']).")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        info = {"source": "dataset", "class": type(source).__name__}
        items = ItemData(name, source.__getitem__, len(source), info, _classes(source))
        # All of them could take as long as the evaluation.
        some = range(0, len(items), max(len(items) // 32, 1))
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


class _First(Wrapped):
    """The first n samples of other data."""

    def __init__(self, whole: Data, n: int) -> None:
        super().__init__(whole, {})
        self._n = n

    def __len__(self) -> int:
        """At most n."""
        return self._n

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As the data do."""
        start, stop, _ = slice(start, stop).indices(self._n)
        return super().read(start, stop)

    def ids(self, start: int, stop: int) -> list[str]:
        """As the data do."""
        start, stop, _ = slice(start, stop).indices(self._n)
        return super().ids(start, stop)


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
        return _given(loader.dataset, name, n, CLASSES)
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
    pair = pair_of(batch)
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
    return x, labels_of(y, name)


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
    table, split = _one_split(_hf_loaded(library, word), split, name)
    features = table.features
    image, label = _hf_columns(features, name)
    if hasattr(table, "cast_column") and hasattr(library, "Image"):
        # Decoded here, by the formats that are promised only.
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


def _hf_loaded(library: Any, word: str) -> Any:
    """What the library finds under a name. Scripts that come with data are never run: libraries
    from version 4 on run none, and do not know the option.
    """
    try:
        known = inspect.signature(library.load_dataset).parameters
        options = {"trust_remote_code": False} if "trust_remote_code" in known else {}
        saved = Path(word).is_dir() and _is_saved(Path(word))
        return library.load_from_disk(word) if saved else library.load_dataset(word, **options)
    except Exception as error:  # no network, no such name, a script that would have to run
        reason = reason_of(error)
        raise InputError(
            f"datasets could not load {word!r} ({reason}): give a folder that save_to_disk "
            "wrote, or a name in the cache."
        ) from error


def _one_split(table: Any, split: str, name: str) -> tuple[Any, str]:
    """The split asked for, else that of tests, and its name."""
    if not isinstance(table, Mapping):  # there is only one
        return table, split
    split = split or next((s for s in ("test", "validation", "valid", "val") if s in table), "")
    if split not in table:
        raise InputError(
            f"{name!r} has the splits {', '.join(table)}: choose one with hf:NAME:SPLIT."
        )
    return table[split], split


def _hf_columns(features: Mapping[str, Any], name: str) -> tuple[str, str]:
    """The columns of the images and of the labels."""
    kinds = {key: type(kind).__name__ for key, kind in features.items()}
    image = next((key for key, kind in kinds.items() if kind == "Image"), None)
    label = next((key for key, kind in kinds.items() if kind == "ClassLabel"), None)
    label = label or next(
        (key for key in ("label", "labels", "fine_label", "y") if key in features), None
    )
    if image is None or label is None:
        raise InputError(
            f"{name!r} has columns {', '.join(features)}: it needs one of images and one of "
            "class labels."
        )
    return image, label
