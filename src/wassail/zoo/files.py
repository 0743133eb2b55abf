"""Samples and labels in files: `.npz`, `.safetensors`, IDX (MNIST) and CIFAR's own two formats,
read in pieces.

Nothing in a file is trusted. Sizes are compared with the file before anything is unpacked, arrays
of objects are refused, and CIFAR's pickles are read by an unpickler that can make lists, dicts,
strings, numbers and arrays of bytes and nothing else. Every reader returns rows that are
memory-mapped: what is not asked for is not read.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from wassail.errors import InputError
from wassail.writing import MAX_TEXT, read_small
from wassail.zoo.pickles import LIMIT, REST, restricted_unpickle
from wassail.zoo.weights import regular, sha256

RATIO = 200  # images compress ten times or so; DEFLATE cannot exceed 1032
_SAMPLES = ("x", "images")
_LABELS = ("y", "labels")
NAMES_BYTES = 1 << 24  # of the names of features
_NAMES = ("features", "feature_names", "names", "columns")
CLASS_NAMES = "class names"  # what a run records of the order in which names were numbered
ALPHABETICAL = "in alphabetical order"


@dataclass(frozen=True, eq=False)
class Table:
    """Samples `(N, ...)` and labels `(N,)` as they are in a file.

    x, y: anything with `shape` and `dtype` whose slices are arrays or tensors; info: what a run
    records about them; numbers: whether y are numbers and not classes, `(N,)` or `(N, K)`.
    """

    x: Any
    y: Any
    info: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    numbers: bool = False


@dataclass(frozen=True)
class Targets:
    """What the model is to say about a sample, and where that stands.

    Args:
        numbers: whether they are numbers, of a regression or of several labels, and not classes.
        columns: of a table; default none, the usual column of labels.
        aside: columns of a table that are no features.
    """

    numbers: bool = False
    columns: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


CLASSES = Targets()


@contextlib.contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Turn whatever a damaged file makes its reader stumble over into one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # Zlib, zipfile, tokenize, struct and others each raise errors of their own.
        text = str(getattr(error, "strerror", None) or error) or type(error).__name__
        fix = "; check the name" if isinstance(error, FileNotFoundError) else ""
        raise InputError(
            f"cannot read data from {str(name)!r}: {text.splitlines()[0].rstrip('.')}{fix}."
        ) from None


def one_label_each(name: object, samples: int, labels: int) -> None:
    """Refuse data with another number of labels than samples, also where only the first ones of
    both are read.

    name: of the file or the data; samples: how many there are in all; labels: how many there are in
    all.
    """
    if samples != labels:
        raise InputError(
            f"{str(name)!r} has {samples} samples but {labels} labels: give one for each sample."
        )


def read_npz(path: Path, n: int | None = None) -> Table:
    """Arrays x (or images) and y (or labels) of an `.npz` file, the first n rows.

    Members that are stored as they are get mapped where they lie; compressed ones are unpacked
    once, only as many rows as are asked for, into a temporary file that is mapped and disappears
    with the table.
    """
    regular(path, "data")
    with reading(path), _opened(path) as (archive, members):
        keys = _both(path, members)
        (x, samples), (y, labels) = (_member(path, archive, members[key], n) for key in keys)
        one_label_each(path, samples, labels)
        key = next((key for key in _NAMES if key in members), None)
        names = None if key is None else _names(archive, members[key], x.shape)
    info = {"source": "npz", "files": {path.name: sha256(path)}, "arrays": keys}
    return Table(x, y, info if names is None else info | {"features": names})


def _both(path: Path, names: Iterable[str]) -> list[str]:
    """What the samples and the labels are called among the arrays of a file."""
    found = list(names)
    keys = [next((key for key in kind if key in found), "") for kind in (_SAMPLES, _LABELS)]
    if not all(keys):
        listed = ", ".join(found) or "nothing"
        raise InputError(f"{str(path)!r} has arrays {listed}: name the samples x and the labels y.")
    return keys


def read_array(path: Path, names: Iterable[str]) -> Any:
    """The array of an `.npz` file that has the first of these names, or the file's first array.

    names: in the order in which they are looked for.
    """
    regular(path, "points")
    with _opened(path) as (archive, members):
        if not members:
            raise InputError(f"{str(path)!r} has no arrays: save one with numpy.savez.")
        key = next((name for name in names if name in members), next(iter(members)))
        return _member(path, archive, members[key], None)[0]


def small_arrays(path: Path, names: Iterable[str], most: int) -> dict[str, np.ndarray]:
    """Some arrays of numbers or texts in an `.npz` file, none of more bytes than allowed.

    Args:
        path: the file.
        names: of the arrays that are wanted; those that are not there are left out.
        most: bytes of one array, unpacked.
    """
    found = {}
    with _opened(path) as (archive, members):
        for name in filter(members.__contains__, names):
            with archive.open(members[name]) as file:
                data = file.read(most + 1)
            if len(data) > most or members[name].file_size > most:
                raise InputError(f"{name} in {str(path)!r} has more than {most:,} bytes.")
            found[name] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """An `.npz` file and its members by name."""
    with zipfile.ZipFile(path) as archive:
        yield archive, {info.filename.removesuffix(".npy"): info for info in archive.infolist()}


def _names(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, shape: tuple[int, ...]
) -> list[str] | None:
    """The names of F features in an archive of samples `(N, F)`; None if they are not that."""
    if len(shape) != 2 or info.file_size > NAMES_BYTES:
        return None
    try:
        with archive.open(info) as file:
            found = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, MemoryError):  # something else has that name
        return None
    if found.dtype.kind != "U" or found.shape != (shape[1],):
        return None
    return [str(name) for name in found]


def _member(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, n: int | None
) -> tuple[Any, int]:
    """The first n rows of an array, and how many it has."""
    name = f"{info.filename} in {path}"
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file, name)
        start = file.tell()
        size = math.prod(shape) * dtype.itemsize
        if info.file_size - start != size:
            raise InputError(
                f"{name} should have {size} bytes and has {info.file_size - start}: the file is "
                "damaged."
            )
        if fortran and len(shape) > 1:
            raise InputError(
                f"{name} is stored column by column: save it with numpy.ascontiguousarray."
            )
        if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
            # The local header may be longer than the one in the directory.
            with open(path, "rb") as raw:
                raw.seek(info.header_offset)
                fixed = raw.read(30)
                if fixed[:4] != b"PK\x03\x04":
                    raise InputError(f"{name} is not where the archive says: the file is damaged.")
                skip = info.header_offset + 30 + sum(struct.unpack("<HH", fixed[26:30])) + start
            if skip + size > path.stat().st_size:
                raise InputError(f"{name} ends after the end of the file: the file is damaged.")
            drain(file, size)
            return _map(path, dtype, shape, skip)[:n], shape[0]
        rows = shape[0] if n is None else min(n, shape[0])
        wanted = rows * math.prod(shape[1:]) * dtype.itemsize
        refuse_bomb(name, wanted, max(info.compress_size, 1))
        unpacked = spool(file, dtype, (rows, *shape[1:]), wanted, name)
        if size - wanted <= REST:
            drain(file, size - wanted)
        return unpacked, shape[0]


def drain(file: IO[bytes], left: int) -> None:
    """Read a member of an archive to its end: its checksum is compared there."""
    while piece := file.read(1 << 16):
        left -= len(piece)
        if left < 0:
            raise ValueError("it is longer than it says")


def _header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise InputError(
            f"{name} has version {version} of the npy format: save it with a plain number type."
        )
    if dtype.hasobject or dtype.kind not in "buif":
        raise InputError(
            f"{name} holds {dtype}, not numbers: save plain arrays (objects could run code and "
            "are never read)."
        )
    if dtype.itemsize > 8:
        raise InputError(
            f"{name} holds {dtype}, which torch does not know: save it as float32 or float64."
        )
    if not shape:
        raise InputError(f"{name} is a single number: save arrays of shape (N, ...).")
    if len(shape) > 16 or not all(0 <= size <= LIMIT for size in shape):
        raise InputError(f"{name} has shape {shape}: the file is damaged.")
    return shape, fortran, dtype


def refuse_bomb(name: str, size: int, packed: int) -> None:
    """Raise before anything is unpacked that cannot be meant: too large at all, or absurdly
    compressed and large.
    """
    if size > LIMIT or (size > RATIO * packed and size > min(REST, free_memory())):
        raise InputError(
            f"{name} would unpack {packed} bytes to {size}: that is no data set (or save it "
            "uncompressed, with numpy.savez)."
        )


def free_memory() -> int:
    """Bytes of memory that are free now; where the system does not say, a modest guess."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def spool(
    file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...], size: int, name: str
) -> Any:
    """Copy the next `size` bytes of a stream into a temporary file without a name, and map it."""
    if size > shutil.disk_usage(tempfile.gettempdir()).free:
        raise InputError(
            f"{name} needs {size} bytes of temporary space: set TMPDIR to a larger disk, or save "
            "it uncompressed."
        )
    with tempfile.TemporaryFile(prefix="wassail-") as target:  # the mapping keeps it alive
        left = size
        while left:
            piece = file.read(min(left, 1 << 16))
            if not piece:
                raise InputError(f"{name} ends {left} bytes early: the file is damaged.")
            target.write(piece)
            left -= len(piece)
        target.flush()
        return _map(target, dtype, shape, 0)


def _map(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Any:
    if not math.prod(shape):
        return np.zeros(shape, dtype)  # nothing cannot be mapped
    return np.memmap(file, dtype, "r", offset, shape)


class _Slices:
    """A tensor in a `.safetensors` file: slices of it are read when asked for."""

    def __init__(self, path: Path, key: str, n: int | None) -> None:
        from safetensors import safe_open

        opened: Any = safe_open(path, framework="pt")
        self._slice = opened.get_slice(key)
        rows, *rest = self._slice.get_shape()
        self.shape = (rows if n is None else min(n, rows), *rest)
        self.dtype = self[0:0].dtype if len(self.shape) else None

    def __getitem__(self, index: slice) -> Any:
        start, stop, _ = index.indices(self.shape[0])
        return self._slice[start:stop]


def read_safetensors(path: Path, n: int | None = None) -> Table:
    """Tensors x (or images) and y (or labels) of a `.safetensors` file, the first n rows."""
    from safetensors import SafetensorError, safe_open

    with reading(path):
        regular(path, "data")
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise InputError(
                f"cannot read data from {str(path)!r}: {str(error).splitlines()[0].rstrip('.')}."
            ) from None
        keys = _both(path, names)
        for key in keys:
            if not shapes[key]:
                raise InputError(
                    f"{key} in {path} is a single number: save arrays of shape (N, ...)."
                )
        one_label_each(path, *(shapes[key][0] for key in keys))
        x, y = (_Slices(path, key, n) for key in keys)
    return Table(
        x, y, {"source": "safetensors", "files": {path.name: sha256(path)}, "arrays": keys}
    )


def idx_labels(path: Path) -> Path | None:
    """The label file beside an IDX image file, by the names that MNIST and its relatives use;
    None if the name is another.
    """
    name = path.name
    if "images" not in name or "idx3" not in name:
        return None
    return path.with_name(name.replace("images", "labels").replace("idx3", "idx1"))


def read_idx(path: Path, n: int | None = None) -> Table:
    """Images `(N, H, W)` of an IDX file, perhaps gzipped, and the labels of the file beside it."""
    labels = idx_labels(path)
    if labels is None:
        raise InputError(
            f"{str(path)!r} is not named like an IDX image file: the name must contain images "
            "and idx3."
        )
    if not labels.is_file():
        other = labels.with_name(
            labels.name.removesuffix(".gz") if labels.suffix == ".gz" else f"{labels.name}.gz"
        )
        if not other.is_file():
            raise InputError(
                f"the labels of {str(path)!r} are missing: put {labels.name} beside it."
            )
        labels = other
    x, samples = _idx(path, n, 3)
    y, labelled = _idx(labels, n, 1)
    one_label_each(path, samples, labelled)
    return Table(
        x, y, {"source": "idx", "files": {file.name: sha256(file) for file in (path, labels)}}
    )


def _idx(path: Path, n: int | None, rank: int) -> tuple[Any, int]:
    """The first n rows of an IDX file, and how many it has."""
    regular(path, "data")
    with reading(path), open(path, "rb") as raw:
        packed = path.suffix == ".gz"
        opened: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        with opened as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, rank)):
                raise InputError(
                    f"{str(path)!r} is no IDX file of {rank}-dimensional arrays of bytes: it "
                    f"starts with {magic!r}."
                )
            shape: tuple[int, ...] = struct.unpack(f">{rank}I", file.read(4 * rank))
            rows = shape[0] if n is None else min(n, shape[0])
            size = rows * math.prod(shape[1:])
            if packed:
                refuse_bomb(str(path), size, path.stat().st_size)
                unpacked = spool(file, np.dtype(np.uint8), (rows, *shape[1:]), size, str(path))
                rest = math.prod(shape) - size
                if rest <= REST:
                    drain(file, rest)
                return unpacked, shape[0]
            if file.tell() + math.prod(shape) != path.stat().st_size:
                raise InputError(
                    f"{str(path)!r} should hold {math.prod(shape)} bytes of data and does not: "
                    "it is damaged."
                )
            return _map(path, np.dtype(np.uint8), (rows, *shape[1:]), 4 + 4 * rank), shape[0]


@dataclass(frozen=True)
class _Cifar:
    """One of CIFAR's official folders: its test file, where class names are, and the labels'
    place.
    """

    test: str
    names: str
    labels: str  # key of the labels, for the pickled version
    class_names: str  # key of the class names, likewise
    prefix: int = 0  # bytes of labels in front of each image, for the binary version


CIFAR = {
    "cifar-10-batches-py": _Cifar("test_batch", "batches.meta", "labels", "label_names"),
    "cifar-100-python": _Cifar("test", "meta", "fine_labels", "fine_label_names"),
    "cifar-10-batches-bin": _Cifar("test_batch.bin", "batches.meta.txt", "", "", prefix=1),
    "cifar-100-binary": _Cifar("test.bin", "fine_label_names.txt", "", "", prefix=2),
}


def find_cifar(path: Path) -> tuple[Path, _Cifar] | None:
    """The CIFAR folder that is meant: the folder itself, one inside it, or the one that holds
    the named test file.
    """
    if path.is_file():
        found = next((cifar for cifar in CIFAR.values() if path.name == cifar.test), None)
        return None if found is None else (path.parent, found)
    for name, cifar in CIFAR.items():
        if (path / name / cifar.test).is_file():
            return path / name, cifar
    for cifar in CIFAR.values():
        if (path / cifar.test).is_file() and (path / cifar.names).is_file():
            return path, cifar
    return None


def read_cifar(folder: Path, cifar: _Cifar, n: int | None = None) -> Table:
    """CIFAR's test images `(N, 3, 32, 32)` in their canonical order, with labels (fine ones for
    CIFAR-100) and class names.
    """
    test = folder / cifar.test
    names = folder / cifar.names
    info = {
        "source": "cifar",
        "files": {file.name: sha256(file) for file in (test, names) if file.is_file()},
    }
    if cifar.prefix:
        with reading(test):
            row = cifar.prefix + 3072
            size = test.stat().st_size
            if not size or size % row:
                raise InputError(
                    f"{str(test)!r} has {size} bytes, not rows of {row}: it is damaged, or "
                    "another data set's."
                )
            rows = _map(test, np.dtype(np.uint8), (size // row, row), 0)[:n]
            classes = None
            if names.is_file():
                classes = tuple(read_small(names, MAX_TEXT, "names of classes").decode().split())
            pixels = rows[:, cifar.prefix :].reshape(-1, 3, 32, 32)  # a view: nothing is read
            return Table(pixels, np.array(rows[:, cifar.prefix - 1]), info, classes)
    with reading(test):
        batch = restricted_unpickle(test)
        pixels = _entry(batch, "data", test)
        labels = _entry(batch, cifar.labels, test)
        if (
            not isinstance(pixels, np.ndarray)
            or pixels.ndim != 2
            or pixels.shape[1] != 3072
            or pixels.dtype != np.uint8
        ):
            raise InputError(
                f"'data' in {str(test)!r} is no array of 3072 bytes an image: it is damaged."
            )
        if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
            raise InputError(
                f"{cifar.labels!r} in {str(test)!r} is no list of integers: it is damaged."
            )
        one_label_each(test, len(pixels), len(labels))
        kept = np.asarray(labels, dtype=np.int64)[:n]
    classes = None
    if names.is_file():
        with reading(names):
            entries = _entry(restricted_unpickle(names), cifar.class_names, names)
            if not isinstance(entries, (list, tuple)) or not all(
                isinstance(entry, (str, bytes)) for entry in entries
            ):
                raise InputError(
                    f"{cifar.class_names!r} in {str(names)!r} is no list of names: it is damaged."
                )
            classes = tuple(
                e.decode("utf-8", "replace") if isinstance(e, bytes) else e for e in entries
            )
    return Table(pixels[:n].reshape(-1, 3, 32, 32), kept, info, classes)


def _entry(batch: Any, key: str, path: Path) -> Any:
    """Pickles of Python 2 have bytes for keys."""
    if isinstance(batch, Mapping):
        for found in (key, key.encode()):
            if found in batch:
                return batch[found]
    raise InputError(f"{str(path)!r} has no {key!r}: it is no batch of CIFAR.")
