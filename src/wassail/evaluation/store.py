"""The run store: a directory that survives a kill, a full disk and a careless copy.

    config.json                            what the run was asked to do
    results/UNIT/000000.safetensors        one chunk of the samples: tensors, and plain values in
    the header results/summary.json, manifest.json    written at the end log/events.jsonl, lock,
    corrupt/       times, the writer's process id, damaged files that were replaced

A file is written beside its place, flushed to the disk and renamed, so it is there whole or not at
all. What is under `results/` is a function of the configuration alone: no times, no process ids,
tensors and keys in one order. A chunk is *intact* if its bytes are those that `put` writes for what
it holds, and if it belongs to this run, unit and place; anything else counts as missing and is
computed again.

Plain values are JSON, which has no infinity: `inf`, `-inf` and `nan` are kept as `{"float": "inf"}`
and so on and come back as floats, also within lists and dicts; tuples come back as lists.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import count
from numbers import Integral, Real
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import Self

from wassail.errors import InputError
from wassail.threat import show
from wassail.writing import MAX_TEXT, TEMPORARY, append, check_links, make, opened, replacing

# the one key of a configuration that may get more entries: a list of names, or options by name
GROWS = "attacks"
_SINGULAR = "attack"
# recorded, never compared: the command that resumes a run is not the one that started it
FREE = "command"
FORMAT = "wassail run 1"
MAX_CHUNK = 10**6
SHOWN = 3  # differences that a refusal names

_PART = re.compile(r"[a-z0-9][a-z0-9+._@=-]{0,99}")
_CHUNK = re.compile(r"([0-9]{6})\.safetensors")
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
_SIZES = {name: dtype.itemsize for dtype, name in _DTYPES.items()}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

# name, dtype, shape of each tensor, in the order of the file
Layout: TypeAlias = "list[tuple[str, str, list[int]]]"


class Store:
    """One run on disk. Made by `create`, `resume` or `open`; a context manager that gives the lock
    back.

    config: what the run was asked to do; folder: where it is. `unit` is a name such as
    `"attack@wda++"`, one piece of work over all samples; `chunk` counts the pieces of the samples
    from 0.
    """

    config: dict[str, Any]
    folder: Path

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.config = {}
        self._run = ""
        self._lock: int | None = None
        self._writer = False
        self._seen: dict[
            Path, tuple[int, ...]
        ] = {}  # chunks known to be intact, by what the file system says of them

    @classmethod
    def create(cls, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> Self:
        """A new run in `folder`, which is made if need be; one that holds a run is refused."""
        store = cls(folder)
        plain = _decode(_encode(config, "config"))
        if store._file("config.json").exists():
            raise store._taken()
        with store._writing():
            if store._file("config.json").exists():  # made by another process in the meantime
                raise store._taken()
            if any(store._files("results")):
                raise InputError(
                    f"{_quote(folder)} has files in results/ and no config.json to say what they "
                    "are: choose another --out."
                )
            store._start(plain)
        return store

    @classmethod
    def resume(
        cls, folder: str | os.PathLike[str], config: Mapping[str, Any], grow: Sequence[str] = ()
    ) -> Self:
        """Go on with the run in `folder`, which must have been made with the same `config`; starts
        it if there is none yet.

        A difference is refused and named. `grow=("attacks",)` permits more entries in
        `config["attacks"]` (a list, or a dict of options by name), never fewer or other ones: the
        new ones come last in `Store.config`, which is what the run now is. The order of the entries
        does not matter. `config["command"]` is not compared; the first one stays.
        """
        store = cls(folder)
        plain = _decode(_encode(config, "config"))
        if not store._file("config.json").exists():  # killed before it began
            return cls.create(folder, config)
        with store._writing():
            store._load()
            more, differences = _compare(store.config, plain)
            if differences:
                raise InputError(_difference(store.folder, differences))
            if more and GROWS not in grow:
                raise InputError(
                    f"the run in {_quote(folder)} was made without {_SINGULAR} "
                    f"{' and '.join(more)}: "
                    "add it with --add-attack, or leave it out to go on with the run as it was."
                )
            store._clean()
            if more:
                store._save_config(
                    store.config | {GROWS: _grown(store.config.get(GROWS), plain[GROWS])}
                )
            store.log(
                {"event": "resumed", "process": os.getpid(), "added": more, FREE: plain.get(FREE)}
            )
        return store

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """The run in `folder` for reading, finished or not, of any origin: nothing in it is
        executed, nothing is written.
        """
        store = cls(folder)
        store._load()
        return store

    def has(self, unit: str, chunk: int) -> bool:
        """Whether the chunk is there and intact (its checksum is computed once a process).

        A writer moves a damaged file to `log/corrupt/`, so that it is computed again and nothing is
        lost.
        """
        path = self._chunk(unit, chunk)
        problem = self._problem(path, unit, chunk)
        if problem is not None and self._writer and os.path.lexists(path):
            self._set_aside(path, unit, chunk, problem)
        return problem is None

    def put(
        self, unit: str, chunk: int, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]
    ) -> None:
        """Write one chunk. The same chunk again is no work; another one in its place is
        refused: the store only grows.
        """
        self._check_writer()
        path = self._chunk(unit, chunk)
        metadata = {"fields": _dumps(_encode(fields, "fields")), "format": FORMAT, "run": self._run}
        header, parts = _packed(metadata | {"unit": unit, "chunk": str(chunk)}, tensors)
        if self.has(unit, chunk):
            if _read(path, len(header)) != header:  # the header holds the checksum of everything
                raise InputError(
                    f"chunk {chunk} of {unit!r} is in {_quote(self.folder)} already and was "
                    "computed differently this time: "
                    "the model or an attack is not deterministic, or the run was made on another "
                    "machine; choose another --out."
                )
            return
        self._replace(path, [header, *parts])
        self._seen[path] = _signature(path)

    def get(
        self, unit: str, chunk: int, names: Sequence[str] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and fields of one chunk; `names` chooses among the tensors. A damaged chunk
        is refused.
        """
        with self._tensors(unit, chunk) as file:
            wanted = file.keys() if names is None else [_known(name, file) for name in names]
            return {name: file.get_tensor(name) for name in wanted}, _fields(file.metadata())

    def rows(self, unit: str, chunk: int, name: str, index: Sequence[int]) -> Tensor:
        """Rows `index` of one tensor `(n, ...)` of a chunk, as `(len(index), ...)`; memory for
        these rows only.
        """
        with self._tensors(unit, chunk) as file:
            rows = file.get_slice(_known(name, file))
            size = (rows.get_shape() or [0])[0]
            missing = [i for i in index if not 0 <= i < size]
            if missing:
                raise InputError(
                    f"tensor {name!r} of chunk {chunk} of {unit!r} has {size} rows: there is no "
                    f"row {missing[0]}."
                )
            return torch.cat([rows[0:0], *(rows[i : i + 1] for i in index)])

    def chunks(self, unit: str) -> list[int]:
        """The numbers of the chunks of a unit that are there, in order, intact or not."""
        names = (_CHUNK.fullmatch(path.name) for path in self._results(unit).glob("*.safetensors"))
        return sorted(int(match[1]) for match in names if match)

    def write(self, name: str, text: str) -> None:
        """Write `results/NAME`, whole or not at all; the same text again is no work."""
        self._check_writer()
        path = self._results(name)
        if path.name.endswith(TEMPORARY):
            raise InputError(
                f"a result cannot be called {name!r}: files that end in {TEMPORARY} are removed "
                "at --resume."
            )
        data = text.encode(errors="surrogateescape")  # file names among the ids may be no UTF-8
        if not _holds(path, data):
            self._replace(path, [data])

    def read(self, name: str) -> str | None:
        """The text of `results/NAME`, None if there is none."""
        return self._text(self._results(name))

    def log(self, event: Mapping[str, Any]) -> None:
        """Append one event with the time to `log/events.jsonl`. Times live there and nowhere
        else.
        """
        self._check_writer()
        path = self._file("log/events.jsonl")
        line = (
            _dumps(
                {"time": datetime.now(timezone.utc).isoformat(), **_encode(event, "event")}
            ).encode()
            + b"\n"
        )
        try:
            append(path, line, self.folder)
        except OSError as error:
            raise self._failed(path, error) from None

    def events(self) -> list[dict[str, Any]]:
        """What was logged, oldest first; lines that a kill has torn are left out."""
        events = []
        for line in (self._text(self._file("log/events.jsonl")) or "").split("\n"):
            with suppress(ValueError):
                event = _loads(line)
                if isinstance(event, dict):
                    events.append(event)
        return events

    def seal(self) -> None:
        """Write `results/manifest.json`: size and sha256 of every file under `results/`, sorted
        by name.
        """
        self._check_writer()
        files = {name: entry for name, entry in self._sums().items() if entry is not None}
        self.write(
            "manifest.json",
            json.dumps({"files": files, "format": FORMAT}, indent=1, sort_keys=True) + "\n",
        )

    def verify(self) -> list[str]:
        """What is wrong with the run, in words; empty if every file is there and is what the
        manifest says.
        """
        text = self.read("manifest.json")
        if text is None:
            return ["results/manifest.json is missing: the run is not finished."]
        try:
            listed = dict(_loads(text)["files"])
        except (ValueError, TypeError, KeyError):
            return ["results/manifest.json is not a manifest."]
        found = self._sums()
        problems = [
            f"results/ has no file {_brief(name)!r}."
            for name in sorted(listed.keys() - found.keys())
        ]
        problems += [
            f"results/ has a file {_brief(name)!r} that the manifest has not."
            for name in sorted(found.keys() - listed.keys())
        ]
        for name in sorted(listed.keys() & found.keys()):
            unit, _, last = name.rpartition("/")
            number = _CHUNK.fullmatch(last)
            if found[name] is None or found[name] != listed[name]:
                problems.append(
                    f"results/{name} is not the file of which the manifest has the checksum."
                )
            elif (
                unit
                and number
                and (problem := self._problem(self._results(name), unit, int(number[1])))
            ):
                problems.append(f"results/{name} {problem}.")
        return problems

    def close(self) -> None:
        """Give the lock back. Reading goes on to work."""
        self._writer = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # The configuration.

    def _start(self, config: dict[str, Any]) -> None:
        make(self.folder / "results", self.folder)
        self._run = _identity(config)
        self._save_config(config)
        self.log({"event": "created", "process": os.getpid()})

    def _save_config(self, config: dict[str, Any]) -> None:
        content = {"config": _encode(config, "config"), "format": FORMAT, "run": self._run}
        self._replace(self._file("config.json"), [(json.dumps(content, indent=1) + "\n").encode()])
        self.config = config

    def _load(self) -> None:
        text = self._text(self._file("config.json"))
        if text is None:
            raise InputError(
                f"{_quote(self.folder)} holds no run, for there is no config.json in it: give "
                "the folder that --out named."
            )
        try:
            content = _loads(text)
            config = content["config"]
            form = content["format"]
            run = content["run"]
            if not isinstance(config, dict) or form != FORMAT:
                raise ValueError(f"format {form!r}")
            changed = run != _identity(config)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"config.json in {_quote(self.folder)} is not that of a run "
                f"({_brief(str(error))}): give the folder of a run."
            ) from None
        if changed:
            raise InputError(
                f"config.json in {_quote(self.folder)} is not as the run wrote it: put the "
                "original back or take another --out."
            )
        self.config = config
        self._run = run

    def _taken(self) -> InputError:
        return InputError(
            f"{_quote(self.folder)} holds a run already: add --resume to go on with it, or "
            "choose another --out."
        )

    # Writing.

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Take the lock; give it back if what follows fails."""
        try:
            make(self.folder / "log", self.folder)
            self._take_lock()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise InputError(
                f"cannot write to {_quote(self.folder)} ({reason}): make it writable or choose "
                "another --out."
            ) from None
        try:
            self._writer = True
            yield
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        """Refuse a second writer. The kernel gives the lock back when the process ends, however
        it ends.
        """
        if sys.platform == "win32":  # no such locks
            return
        import fcntl

        lock = opened(self._file("log/lock"), os.O_RDWR | os.O_CREAT, self.folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            process = os.read(lock, 20).strip().decode(errors="replace")
            os.close(lock)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            raise InputError(
                f"process {process or '?'} is writing to {_quote(self.folder)}: wait for it, "
                "stop it, or choose another --out."
            ) from None
        self._lock = lock
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())

    def _check_writer(self) -> None:
        if not self._writer:
            raise InputError(
                f"the run in {_quote(self.folder)} is open for reading only: write to it with "
                "--resume."
            )

    def _replace(self, path: Path, parts: Iterable[Any]) -> None:
        """Write a file: killed at any moment, its place holds all of it or nothing
        (`wassail.writing`).
        """
        try:
            make(path.parent, self.folder)
            with replacing(path, self.folder) as file:
                for part in parts:
                    file.write(part)
        except OSError as error:
            raise self._failed(path, error) from None

    def _failed(self, path: Path, error: OSError) -> InputError:
        """One sentence for a write that failed: what happened, what is safe, how to go on."""
        reason = (error.strerror or type(error).__name__).lower()
        safe = sum(bool(_CHUNK.fullmatch(file.name)) for file in self._files("results"))
        cure = "put that right"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full ({reason})"
            cure = "free some space"
        elif error.errno == errno.EFBIG:
            reason = f"a file may not be that large ({reason})"
            cure = "raise the limit"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            cure = "make the folder writable"
        return InputError(
            f"cannot write {path.relative_to(self.folder).as_posix()!r} in "
            f"{_quote(self.folder)}, {reason}: "
            f"what was written before is safe ({safe} chunk{'' if safe == 1 else 's'}); {cure} "
            "and go on with --resume."
        )

    def _clean(self) -> None:
        """Remove what a killed process left unfinished."""
        for path in [*self._files("results"), self.folder / ("config.json" + TEMPORARY)]:
            if path.name.endswith(TEMPORARY):
                path.unlink(missing_ok=True)

    def _set_aside(self, path: Path, unit: str, chunk: int, problem: str) -> None:
        folder = self._file("log/corrupt")
        try:
            make(folder, self.folder)
            names = (
                folder / f"{unit.replace('/', '@')}@{path.stem}-{i}{path.suffix}" for i in count()
            )
            aside = next(name for name in names if not os.path.lexists(name))
            os.replace(path, aside)
        except OSError as error:
            raise self._failed(path, error) from None
        self._seen.pop(path, None)
        self.log(
            {
                "event": "corrupt",
                "unit": unit,
                "chunk": chunk,
                "problem": problem,
                "moved": f"log/corrupt/{aside.name}",
            }
        )

    # Reading, with as little trust as possible: the run may come from anywhere.

    def _file(self, name: str) -> Path:
        """A path in the folder, with no link in it."""
        path = self.folder / name
        check_links(path, self.folder)
        return path

    def _results(self, name: str) -> Path:
        if not all(_PART.fullmatch(part) for part in name.split("/")):
            raise InputError(
                f"{_brief(name)!r} is no name of a result: write small letters, digits and "
                "+._@=- after a letter or digit."
            )
        return self._file(f"results/{name}")

    def _chunk(self, unit: str, chunk: int) -> Path:
        if not 0 <= chunk < MAX_CHUNK:
            raise InputError(
                f"chunk {chunk} of {unit!r} is out of range: there are at most {MAX_CHUNK} "
                "chunks, so take larger ones."
            )
        return self._results(f"{unit}/{chunk:06d}.safetensors")

    def _files(self, below: str) -> Iterator[Path]:
        """Every file below a folder of the run; links to folders are not followed."""
        for folder, inner, names in os.walk(self._file(below)):
            yield from (Path(folder, name) for name in names)
            yield from (path for name in inner if (path := Path(folder, name)).is_symlink())

    def _text(self, path: Path) -> str | None:
        if not os.path.lexists(path):
            return None
        try:
            return _read(path, MAX_TEXT, whole=True).decode(errors="surrogateescape")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {_quote(path)}: {_brief(str(error))}.") from None

    def _sums(self) -> dict[str, dict[str, Any] | None]:
        """Size and sha256 of every file under `results/` but the manifest; None for what cannot
        be ours.
        """
        sums: dict[str, dict[str, Any] | None] = {}
        for path in self._files("results"):
            name = path.relative_to(self.folder / "results").as_posix()
            if name != "manifest.json":
                try:
                    sums[name] = _sum(self._results(name))
                except (OSError, ValueError):  # a link among them
                    sums[name] = None
        return sums

    def _problem(self, path: Path, unit: str, chunk: int) -> str | None:
        """What is wrong with a chunk, as the end of a sentence; None if it is intact."""
        try:
            signature = _signature(path)
            if self._seen.get(path) == signature:
                return None
            with _opened(path) as (layout, metadata, file):
                claimed = metadata.get("sha256")
                rest = {name: value for name, value in metadata.items() if name != "sha256"}
                digest = hashlib.sha256(_header(layout, rest))
                while block := file.read(1 << 20):
                    digest.update(block)
                _fields(metadata)
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"is damaged ({_brief(str(error))})"
        if digest.hexdigest() != claimed:
            return "is damaged (its checksum is wrong)"
        if (metadata.get("run"), metadata.get("unit"), metadata.get("chunk")) != (
            self._run,
            unit,
            str(chunk),
        ):
            return "belongs to another run or place"
        self._seen[path] = signature
        return None

    @contextmanager
    def _tensors(self, unit: str, chunk: int) -> Iterator[Any]:
        """An intact chunk, memory-mapped."""
        path = self._chunk(unit, chunk)
        problem = self._problem(path, unit, chunk)
        try:
            if problem is None:
                with safe_open(path, "pt") as file:
                    yield file
        except (OSError, SafetensorError, RuntimeError) as error:
            problem = f"cannot be read ({_brief(str(error))})"
        if problem is not None:
            raise InputError(
                f"chunk {chunk} of {unit!r} in {_quote(self.folder)} {problem}: compute it again "
                "with --resume."
            )


# The format of a chunk: a safetensors file in one spelling only, so that equal content is equal
# bytes.


def _packed(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Any]]:
    """The header with the checksum, and the bytes of the tensors in the order of the file."""
    values = {name: value.detach().cpu() for name, value in tensors.items()}
    for name, value in values.items():
        if value.dtype not in _DTYPES or name == "__metadata__":
            raise InputError(
                f"tensor {name!r} of type {value.dtype} cannot be stored: convert it, for "
                "example with .float()."
            )
    layout = _sorted(
        [(name, _DTYPES[value.dtype], list(value.shape)) for name, value in values.items()]
    )
    parts = [
        values[name].reshape(-1).view(torch.uint8).numpy().data
        for name, _, shape in layout
        if math.prod(shape)
    ]
    digest = hashlib.sha256(_header(layout, metadata))
    for part in parts:
        digest.update(part)
    return _header(layout, {**metadata, "sha256": digest.hexdigest()}), parts


def _sorted(layout: Layout) -> Layout:
    """Largest elements first, which keeps all of them aligned, then by name."""
    return sorted(layout, key=lambda item: (-_SIZES[item[1]], item[0]))


def _header(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """The beginning of the file: a length in eight bytes, then JSON, padded so that the tensors
    begin at a multiple of 8.
    """
    content: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    start = 0
    for name, dtype, shape in layout:
        stop = start + _SIZES[dtype] * math.prod(shape)
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = _dumps(content, sort=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Layout, dict[str, str], BinaryIO]]:
    """Layout and metadata of a chunk, and the file at the first byte of its tensors; ValueError
    if `_header` wrote it not.
    """
    size = _signature(path)[0]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_TEXT):
            raise ValueError("it is cut short or no safetensors file")
        text = file.read(length)
        try:
            content = _parsed(text.decode("ascii"))
            metadata = content.pop("__metadata__")
            layout = _sorted(
                [(name, entry["dtype"], entry["shape"]) for name, entry in content.items()]
            )
            if not all(_is_shape(shape) for _, _, shape in layout) or not all(
                type(value) is str for value in metadata.values()
            ):
                raise ValueError
            written = _header(layout, metadata)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError("its header is not one of ours") from None
        if written != len(text).to_bytes(8, "little") + text:
            raise ValueError("its header is not one of ours")
        if (
            len(written) + sum(_SIZES[dtype] * math.prod(shape) for _, dtype, shape in layout)
            != size
        ):
            raise ValueError("its size is not that of its tensors")
        yield layout, metadata, file


def _is_shape(shape: Any) -> bool:
    """Whether a tensor can have it: a hostile one must not reach the arithmetic of torch."""
    sizes = (
        type(shape) is list
        and len(shape) <= 16
        and all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    )
    return sizes and math.prod(max(n, 1) for n in shape) < 1 << 48


def _known(name: str, file: Any) -> str:
    if name not in file.keys():  # noqa: SIM118 - not a dict
        raise InputError(
            f"there is no tensor {name!r} in the chunk: it has {', '.join(file.keys()) or 'none'}."
        )
    return name


def _fields(metadata: Mapping[str, str]) -> dict[str, Any]:
    fields = _loads(metadata.get("fields", ""))
    if not isinstance(fields, dict):
        raise ValueError("its fields are no object")
    return fields


# Files.


def _signature(path: Path) -> tuple[int, ...]:
    """Size first, and what changes when the file does; ValueError for a pipe and the like,
    which would be read forever.
    """
    status = os.lstat(path)
    if not S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read(path: Path, most: int, whole: bool = False) -> bytes:
    """The first `most` bytes of a regular file; with `whole`, ValueError if there are more."""
    if _signature(path)[0] > most and whole:
        raise ValueError(f"it has more than {most >> 20} MB")
    with path.open("rb") as file:
        return file.read(most)


def _sum(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    digest = hashlib.sha256()
    size = _signature(path)[0]
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"sha256": digest.hexdigest(), "size": size}


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file is there and holds just that."""
    try:
        return _signature(path)[0] == len(data) and _read(path, len(data)) == data
    except (OSError, ValueError):
        return False


# Plain values.


def _encode(value: Any, where: str) -> Any:
    """A value as JSON can hold it; `where` is its name in an error."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        if _is_float(value):
            raise InputError(
                f"{where} cannot be stored, for {dict(value)!r} stands for a number: call its "
                "key otherwise."
            )
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    raise InputError(
        f"{where} cannot be stored, being of type {type(value).__name__}: give text, numbers, "
        "None, lists and dicts of them."
    )


def _is_float(value: Mapping[str, Any]) -> bool:
    return set(value) == {"float"} and isinstance(value["float"], str) and value["float"] in _FLOATS


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if _is_float(value):
            return _FLOATS[value["float"]]
        return {key: _decode(item) for key, item in value.items()}
    return value


def _dumps(value: Any, sort: bool = True) -> str:
    return json.dumps(value, sort_keys=sort, separators=(",", ":"), allow_nan=False)


def _parsed(text: str) -> Any:
    """JSON as the standard has it; ValueError for anything else, be it an infinity or a
    thousand brackets.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _loads(text: str) -> Any:
    """What `_encode` and `_dumps` wrote."""
    try:
        return _decode(_parsed(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


# Two configurations.


def _identity(config: Mapping[str, Any]) -> str:
    """sha256 of what never changes in a configuration: chunks carry it, so that those of
    another run are told apart.
    """
    fixed = {key: value for key, value in config.items() if key not in (GROWS, FREE)}
    return hashlib.sha256(_dumps(_encode(fixed, "config")).encode()).hexdigest()


def _compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Entries that `new` has more under GROWS, and all other differences, each in words."""
    ours = _by_name(old.get(GROWS))
    theirs = _by_name(new.get(GROWS))
    left, right = (
        {k: v for k, v in config.items() if k not in (GROWS, FREE)} for config in (old, new)
    )
    differences = _differences(left, right, ())
    for name in ours:
        if name in theirs:
            differences += _differences(ours[name], theirs[name], (_SINGULAR, name))
        else:
            differences.append(f"with {_SINGULAR} {name} and you leave it out")
    return [name for name in theirs if name not in ours], differences


def _by_name(value: Any) -> dict[str, Any]:
    """A list of names, or of dicts with a "name", or a dict by name: as a dict by name."""
    if isinstance(value, dict):
        return value
    items = value if isinstance(value, list) else [] if value is None else [value]
    return {str(item.get("name", item) if isinstance(item, dict) else item): item for item in items}


def _grown(old: Any, new: Any) -> Any:
    """The old entries, then those that only `new` has."""
    known = _by_name(old)
    more = {name: item for name, item in _by_name(new).items() if name not in known}
    return {**known, **more} if isinstance(new, dict) else [*known.values(), *more.values()]


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            text
            for key in dict.fromkeys([*new, *old])
            for text in _one_key(old, new, key, (*path, key))
        ]
    if (
        isinstance(old, list)
        and isinstance(new, list)
        and len(old) == len(new)
        and any(isinstance(v, dict) for v in old)
    ):
        # what an entry says needs no name of the list: "eps 0.03", be it of one threat or of all
        return list(
            dict.fromkeys(text for a, b in zip(old, new) for text in _differences(a, b, path[:-1]))
        )
    return (
        []
        if _same(old, new)
        else [f"with {' '.join(path)} {_shown(old, new)} and you ask for {_shown(new, old)}"]
    )


def _one_key(
    old: dict[str, Any], new: dict[str, Any], key: str, path: tuple[str, ...]
) -> list[str]:
    if key in old and key in new:
        return _differences(old[key], new[key], path)
    name = " ".join(path)
    if key in old:
        return [f"with {name} {_short(old[key])} and you leave it out"]
    return [f"without {name} and you ask for {_short(new[key])}"]


def _same(old: Any, new: Any) -> bool:
    """Equality, but NaN is NaN, and True is not 1 (though 1.0 is)."""
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    return bool(old == new) or _dumps(_encode(old, "")) == _dumps(_encode(new, ""))


def _shown(value: Any, other: Any) -> str:
    """A value as people write it, short unless that makes it look like the other one."""
    short = _short(value)
    return short if short != _short(other) else str(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return show(value)
    if isinstance(value, list):
        return _brief("[" + ", ".join(map(_short, value)) + "]")
    if isinstance(value, dict):
        return _brief(" ".join(f"{key} {_short(item)}" for key, item in value.items()))
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40,}", value):
        return value[:12] + "..."
    return _brief(str(value))


def _difference(folder: Path, differences: Sequence[str]) -> str:
    rest = len(differences) - SHOWN
    more = f", and {rest} more difference{'s' if rest > 1 else ''}" if rest > 0 else ""
    return (
        f"the run in {_quote(folder)} was made {', '.join(differences[:SHOWN])}{more}: "
        "give the same settings to go on with it, or choose another --out for a new run."
    )


def _quote(path: str | os.PathLike[str]) -> str:
    return repr(str(path))


def _brief(text: str) -> str:
    """One line of at most 80 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
