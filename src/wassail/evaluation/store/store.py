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
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.store.encoding import (
    MAX_CHUNK,
    checksum,
    decode,
    dumps,
    encode,
    fields_of,
    has_content,
    header_of,
    known_tensor,
    loads,
    opened_chunk,
    packed,
    read_bytes,
    signature_of,
)
from wassail.evaluation.store.identity import (
    FREE,
    GROWS,
    SINGULAR,
    brief,
    compare_configs,
    difference,
    grown,
    identity,
    quote,
)
from wassail.writing import MAX_TEXT, TEMPORARY, append, check_links, make, opened, replacing

FORMAT = "wassail run 1"
_PART = re.compile(r"[a-z0-9][a-z0-9+._@=-]{0,99}")
_CHUNK = re.compile(r"([0-9]{6})\.safetensors")


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
        # Chunks known to be intact, by what the file system says of them.
        self._seen: dict[Path, tuple[int, ...]] = {}

    @classmethod
    def create(cls, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> Self:
        """A new run in `folder`, which is made if need be; one that holds a run is refused."""
        store = cls(folder)
        plain = decode(encode(config, "config"))
        if store._file("config.json").exists():
            raise store._taken()
        with store._writing():
            if store._file("config.json").exists():  # made by another process in the meantime
                raise store._taken()
            if any(store._files("results")):
                raise InputError(
                    f"{quote(folder)} has files in results/ and no config.json to say what they "
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
        plain = decode(encode(config, "config"))
        if not store._file("config.json").exists():  # killed before it began
            return cls.create(folder, config)
        with store._writing():
            store._load()
            more, differences = compare_configs(store.config, plain)
            if differences:
                raise InputError(difference(store.folder, differences))
            if more and GROWS not in grow:
                raise InputError(
                    f"the run in {quote(folder)} was made without {SINGULAR} {' and '.join(more)}: "
                    "add it with --add-attack, or leave it out to go on with the run as it was."
                )
            store._clean()
            if more:
                store._save_config(
                    store.config | {GROWS: grown(store.config.get(GROWS), plain[GROWS])}
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
        metadata = {"fields": dumps(encode(fields, "fields")), "format": FORMAT, "run": self._run}
        header, parts = packed(metadata | {"unit": unit, "chunk": str(chunk)}, tensors)
        if self.has(unit, chunk):
            # The header holds the checksum of everything.
            if read_bytes(path, len(header)) != header:
                raise InputError(
                    f"chunk {chunk} of {unit!r} is in {quote(self.folder)} already and was "
                    "computed differently this time: the model or an attack is not deterministic, "
                    "or the run was made on another machine; choose another --out."
                )
            return
        self._replace(path, [header, *parts])
        self._seen[path] = signature_of(path)

    def get(
        self, unit: str, chunk: int, names: Sequence[str] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and fields of one chunk; `names` chooses among the tensors. A damaged chunk
        is refused.
        """
        with self._tensors(unit, chunk) as file:
            wanted = file.keys() if names is None else [known_tensor(name, file) for name in names]
            return {name: file.get_tensor(name) for name in wanted}, fields_of(file.metadata())

    def rows(self, unit: str, chunk: int, name: str, index: Sequence[int]) -> Tensor:
        """Rows `index` of one tensor `(n, ...)` of a chunk, as `(len(index), ...)`; memory for
        these rows only.
        """
        with self._tensors(unit, chunk) as file:
            rows = file.get_slice(known_tensor(name, file))
            size = (rows.get_shape() or [0])[0]
            missing = [i for i in index if not 0 <= i < size]
            if missing:
                raise InputError(
                    f"tensor {name!r} of chunk {chunk} of {unit!r} has {size} rows: there is no "
                    f"row {missing[0]}."
                )
            return torch.cat([rows[0:0], *(rows[i : i + 1] for i in index)])

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
        if not has_content(path, data):
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
            dumps({"time": datetime.now(UTC).isoformat(), **encode(event, "event")}).encode()
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
                event = loads(line)
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
            content = loads(text)
            listed = dict(content["files"])
            if not set(content) <= {"files", "format"}:
                raise ValueError
        except (ValueError, TypeError, KeyError):
            return ["results/manifest.json is not a manifest."]
        found = self._sums()
        problems = [
            f"results/ has no file {brief(name)!r}."
            for name in sorted(listed.keys() - found.keys())
        ]
        problems += [
            f"results/ has a file {brief(name)!r} that the manifest has not."
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
        self._run = identity(config)
        self._save_config(config)
        self.log({"event": "created", "process": os.getpid()})

    def _save_config(self, config: dict[str, Any]) -> None:
        content = {"config": encode(config, "config"), "format": FORMAT, "run": self._run}
        self._replace(self._file("config.json"), [(json.dumps(content, indent=1) + "\n").encode()])
        self.config = config

    def _load(self) -> None:
        text = self._text(self._file("config.json"))
        if text is None:
            raise InputError(
                f"{quote(self.folder)} holds no run, for there is no config.json in it: give "
                "the folder that evaluate --out named."
            )
        try:
            content = loads(text)
            config = content["config"]
            form = content["format"]
            run = content["run"]
            if not isinstance(config, dict) or form != FORMAT or len(content) != 3:
                raise ValueError(f"format {form!r}, parts {', '.join(map(str, content))}")
            changed = run != identity(config)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"config.json in {quote(self.folder)} is not that of a run "
                f"({brief(str(error))}): give the folder of a run."
            ) from None
        if changed:
            raise InputError(
                f"config.json in {quote(self.folder)} is not as the run wrote it: put the "
                "original back or take another --out."
            )
        self.config = config
        self._run = run

    def _taken(self) -> InputError:
        return InputError(
            f"{quote(self.folder)} holds a run already: add --resume to go on with it, or "
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
                f"cannot write to {quote(self.folder)} ({reason}): make it writable or choose "
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
                f"process {process or '?'} is writing to {quote(self.folder)}: wait for it, "
                "stop it, or choose another --out."
            ) from None
        self._lock = lock
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())

    def _check_writer(self) -> None:
        if not self._writer:
            raise InputError(
                f"the run in {quote(self.folder)} is open for reading only: write to it with "
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
            f"cannot write {path.relative_to(self.folder).as_posix()!r} in {quote(self.folder)}, "
            f"{reason}: what was written before is safe ({safe} chunk{'' if safe == 1 else 's'}); "
            f"{cure} and go on with --resume."
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
                f"{brief(name)!r} is no name of a result: write small letters, digits and "
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
            return read_bytes(path, MAX_TEXT, whole=True).decode(errors="surrogateescape")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {quote(path)}: {brief(str(error))}.") from None

    def _sums(self) -> dict[str, dict[str, Any] | None]:
        """Size and sha256 of every file under `results/` but the manifest; None for what cannot
        be ours.
        """
        sums: dict[str, dict[str, Any] | None] = {}
        for path in self._files("results"):
            name = path.relative_to(self.folder / "results").as_posix()
            if name != "manifest.json":
                try:
                    sums[name] = checksum(self._results(name))
                except (OSError, ValueError):  # a link among them
                    sums[name] = None
        return sums

    def _problem(self, path: Path, unit: str, chunk: int) -> str | None:
        """What is wrong with a chunk, as the end of a sentence; None if it is intact."""
        try:
            signature = signature_of(path)
            if self._seen.get(path) == signature:
                return None
            with opened_chunk(path) as (layout, metadata, file):
                claimed = metadata.get("sha256")
                rest = {name: value for name, value in metadata.items() if name != "sha256"}
                digest = hashlib.sha256(header_of(layout, rest))
                while block := file.read(1 << 20):
                    digest.update(block)
                fields_of(metadata)
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"is damaged ({brief(str(error))})"
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
            problem = f"cannot be read ({brief(str(error))})"
        if problem is not None:
            raise InputError(
                f"chunk {chunk} of {unit!r} in {quote(self.folder)} {problem}: compute it again "
                "with --resume."
            )
