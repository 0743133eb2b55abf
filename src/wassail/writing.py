"""The one place where this project writes files.

A file is written beside its place under the name `NAME.tmp`, as a new file. It is flushed to the
disk, renamed, and its folder is flushed. So its place holds all of it or what was there before,
whenever the process or the machine stops.

No link is followed. A name that is there already, be it a link, is replaced and never written into.
Below a run (a folder whose `config.json` says so) links are refused, and every folder on the way is
opened by its descriptor. What lies above a run is the user's own choice of a place, where links are
as good as folders.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias

from wassail.errors import InputError

FilePath: TypeAlias = "str | PathLike[str]"
TEMPORARY = ".tmp"
KIND = "wassail run"  # how the format of a run's config.json begins
MAX_TEXT = 64 << 20  # bytes of a JSON or text file: larger ones are not ours
BUFFER = 1 << 20
# Flags that a system may not have.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe would be waited for
_BINARY = getattr(os, "O_BINARY", 0)
# The beginning of an absolute path of Unix or Windows, and one within a text.
_ROOTED = re.compile(r"(?:~|file:/*|[A-Za-z]:)?[/\\]")
_ABSOLUTE = re.compile(r"(^|[\s'\"=])(?:/|[A-Za-z]:\\)(?:[^\s'\"/\\]+[/\\])*([^\s'\"/\\]+)")
_BY_DESCRIPTOR = os.open in os.supports_dir_fd and bool(_FOLDER and _NO_LINK)


# What others call.


@contextlib.contextmanager
def saving(path: FilePath) -> Iterator[IO[bytes]]:
    """A file to write to. It takes its place when all is written, and leaves nothing behind if it
    is not.

    What goes wrong on the disk is one sentence.
    """
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise failed(path, error) from None


def save(path: FilePath, data: bytes | str) -> Path:
    """Write a file in one piece, text as UTF-8; its path is returned."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"the file is {path!r}: give the path of one to write.")
    with saving(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
    return Path(path)


@contextlib.contextmanager
def saving_folder(path: FilePath) -> Iterator[Path]:
    """A folder to write files to, which takes its place when all of them are written; there is no
    other of that name.

    The files are made in `NAME.tmp` beside it. One that a killed process left behind is removed
    first.
    """
    place = Path(path)
    half = place.with_name(place.name + TEMPORARY)
    try:
        make(place.parent)
        with _Folder(place.parent) as above:
            if above.in_run:
                above.check(place.name)
            if above.lstat(place.name) is not None:
                _check_empty(place)
            _remove(half, above)
            above.make(half.name)
            try:
                yield half
                above.rename(half.name, place.name)
            except BaseException:
                with contextlib.suppress(OSError, InputError):
                    _remove(half, above)
                raise
    except OSError as error:
        raise failed(path, error) from None


def failed(path: FilePath, error: OSError) -> InputError:
    """One sentence for what could not be written."""
    return InputError(
        f"cannot write {str(path)!r}: {error.strerror or error}; choose another place."
    )


def cell(text: object) -> str:
    """Text as a cell of a table: no control characters, and nothing that a spreadsheet takes for a
    formula.

    `'` stands before = + - @ at the start, also after spaces and in their wide forms. For text
    only: numbers stay numbers.
    """
    shown = visible(str(text))
    return (
        f"'{shown}"
        if shown.lstrip()[:1] in ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
        else shown
    )


def visible(text: str) -> str:
    """The text with control characters and lone surrogates written out: they hide things, and
    some files cannot hold them.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str, keep: str = "") -> str:
    """The text with control characters as question marks: a terminal would obey them.

    keep: control characters that stay, such as the end of a line.
    """
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def without_folders(text: str) -> str:
    """The text with absolute paths cut to their last part: what is shown goes to other machines.

    A text that is one path, perhaps behind `--option=`, may hold spaces.

    text: a name, a word of a command, or a sentence.
    """
    found = re.match(r"--?[\w-]+=", text)
    option = "" if found is None else found[0]
    path = text[len(option) :]
    if _ROOTED.match(path):
        last = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
        return f"{option}…/{last}"
    return _ABSOLUTE.sub(lambda found: f"{found[1]}…/{found[2]}", text)


def read_small(path: FilePath, most: int, what: str) -> bytes:
    """The bytes of a regular file of at most so many: no pipe, no device, no endless file.

    Args:
        path: of the file; a link of the user's own is followed.
        most: bytes.
        what: it holds, for the sentence that refuses it.
    """
    try:
        number = os.open(path, os.O_RDONLY | _NO_WAIT | _BINARY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file can have this name"
        raise InputError(f"cannot read {what} from {str(path)!r}: {reason}.") from None
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(number)
        if stat.S_ISREG(status.st_mode):
            raise InputError(
                f"{str(path)!r} has {status.st_size:,} bytes, and {what} has at most {most:,}."
            )
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "pipe or a device"
        raise InputError(f"cannot read {what} from {str(path)!r}: it is a {kind}, so give a file.")
    with open(number, "rb") as file:
        return file.read(most)


# What the run store calls too: errors of the disk stay as they are.


@contextlib.contextmanager
def replacing(path: FilePath, root: FilePath | None = None) -> Iterator[IO[bytes]]:
    """`saving` with errors of the disk as they are.

    Args:
        path: the file.
        root: the folder below which no link is followed; by default that of the run around the
            path.
    """
    place = Path(path)
    with _Folder(place.parent, root) as folder:
        name = place.name
        half = place.name + TEMPORARY
        if folder.in_run:
            folder.check(name)
        folder.unlink(half)
        number = folder.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with io.BufferedWriter(_Raw(number), BUFFER) as file:
                yield file
                file.flush()
                os.fsync(number)
                if not folder.holds(half, number):
                    raise InputError(
                        f"another process is writing {str(path)!r}, too: let one of them finish."
                    )
            folder.rename(half, name)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.unlink(half)
            raise


def append(path: FilePath, line: bytes, root: FilePath | None = None) -> None:
    """Add a line to a file of lines, which is made if need be; a line that a kill has torn
    stays alone.
    """
    number = opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, root)
    try:
        size = os.fstat(number).st_size
        torn = (
            size > 0 and os.pread(number, 1, size - 1) != b"\n" if hasattr(os, "pread") else False
        )
        write_all(number, (b"\n" if torn else b"") + line)
    finally:
        os.close(number)


def opened(path: FilePath, flags: int, root: FilePath | None = None) -> int:
    """A descriptor of a regular file that is written in place: no link, and no second name of
    another file.
    """
    place = Path(path)
    with _Folder(place.parent, root) as folder:
        folder.check(place.name)
        number = folder.open(place.name, flags)
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(number)
        what = (
            "has a second name (a hard link)"
            if stat.S_ISREG(status.st_mode)
            else "is no regular file"
        )
        raise InputError(f"{str(path)!r} {what}: put a copy in its place.")
    return number


def make(folder: FilePath, root: FilePath | None = None) -> None:
    """Make a folder and those above it, each of them on the disk before anything is put into it."""
    place = Path(folder)
    base = _root(place, root)
    if base is not None and base != place.absolute():
        make(base)
        with _Folder(place, base, make=True):
            return
    if not place.is_dir():
        if place.parent != place:
            make(place.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(place)
        if not place.is_dir():
            raise FileExistsError(17, "File exists", str(place))
        _sync_folder(place.parent)


def check_links(path: FilePath, root: FilePath) -> None:
    """Refuse a path with a link in it below a root: what a run holds is in the run."""
    base = Path(root).absolute()
    place = Path(path).absolute()
    for part in [place, *place.parents]:
        if part == base:
            return
        if part.is_symlink():
            raise linked(part, base)


def linked(path: FilePath, root: FilePath) -> InputError:
    """The sentence for a link below a run."""
    name = Path(path).absolute().relative_to(Path(root).absolute()).as_posix()
    return InputError(
        f"{name!r} in {str(root)!r} is a symbolic link, which a run has none of: put what it "
        "points to in its place."
    )


def write_all(number: int, data: Any) -> None:
    """Write to a descriptor, which may take a part only: then the next call says why."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(number, rest) :]


# Inside.


class _Raw(io.RawIOBase):
    """A descriptor as a file, whose every write is an `os.write`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, data: Any) -> int:
        return os.write(self._number, data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._number, offset, whence)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._number)


class _Folder:
    """An open folder. Names in it are reached by its descriptor, so no link can be put on
    the way meanwhile.
    """

    def __init__(self, path: Path, root: FilePath | None = None, make: bool = False) -> None:
        self.path = path
        self.number = -1
        base = _root(path, root)
        parts = () if base is None else path.absolute().relative_to(base).parts
        self.root = path if base is None else base
        self.in_run = base is not None
        if not _BY_DESCRIPTOR:
            self._checked(parts, make)
            return
        self.number = os.open(self.root, os.O_RDONLY | _FOLDER)
        try:
            for k in range(len(parts)):
                self._enter(parts[: k + 1], make)
        except BaseException:
            self.close()
            raise

    def _enter(self, parts: tuple[str, ...], make: bool) -> None:
        flags = os.O_RDONLY | _FOLDER | _NO_LINK
        name = parts[-1]
        try:
            inner = os.open(name, flags, dir_fd=self.number)
        except OSError as error:
            self.check(name, self.root.joinpath(*parts))
            if not make or not isinstance(error, FileNotFoundError):
                raise
            self.make(name)
            inner = os.open(name, flags, dir_fd=self.number)
        os.close(self.number)
        self.number = inner

    def _checked(self, parts: tuple[str, ...], make: bool) -> None:
        """The same by names, on systems without descriptors of folders."""
        for k in range(len(parts)):
            inner = self.root.joinpath(*parts[: k + 1])
            check_links(inner, self.root)
            if make and not inner.is_dir():
                os.mkdir(inner)

    def _at(self, name: str) -> tuple[Any, dict[str, Any]]:
        return (name, {"dir_fd": self.number}) if self.number >= 0 else (self.path / name, {})

    def lstat(self, name: str) -> os.stat_result | None:
        where, how = self._at(name)
        try:
            return os.stat(where, follow_symlinks=False, **how)
        except FileNotFoundError:
            return None

    def check(self, name: str, path: Path | None = None) -> None:
        """Refuse a name that is a link."""
        status = self.lstat(name)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise linked(path or self.path / name, self.root)

    def open(self, name: str, flags: int) -> int:
        where, how = self._at(name)
        return os.open(where, flags | _NO_LINK | _NO_WAIT | _BINARY, 0o666, **how)

    def make(self, name: str) -> None:
        where, how = self._at(name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(where, **how)
        self.sync()

    def unlink(self, name: str) -> None:
        where, how = self._at(name)
        if self.lstat(name) is not None:
            os.unlink(where, **how)

    def holds(self, name: str, number: int) -> bool:
        """Whether a name is still that of an open file."""
        found = self.lstat(name)
        ours = os.fstat(number)
        return found is not None and (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)

    def rename(self, old: str, new: str) -> None:
        how = {"src_dir_fd": self.number, "dst_dir_fd": self.number} if self.number >= 0 else {}
        os.replace(self._at(old)[0], self._at(new)[0], **how)
        self.sync()

    def sync(self) -> None:
        if self.number >= 0:
            os.fsync(self.number)

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _root(path: Path, root: FilePath | None) -> Path | None:
    """The folder below which no link is followed on the way to a folder: the root, else the
    outermost run around it.
    """
    if root is not None:
        return Path(root).absolute()
    around = [path.absolute(), *path.absolute().parents]
    return next((folder for folder in reversed(around) if is_run(folder)), None)


def is_run(folder: Path) -> bool:
    """Whether a folder's `config.json` is that of a run."""
    try:
        number = os.open(folder / "config.json", os.O_RDONLY | _NO_WAIT | _BINARY)
    except OSError:
        return False
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_TEXT:
        os.close(number)
        return False
    with open(number, "rb") as file:
        try:
            content = json.loads(file.read())
        except (ValueError, RecursionError):
            return False
    return isinstance(content, dict) and str(content.get("format", "")).startswith(KIND)


def _check_empty(place: Path) -> None:
    if place.is_symlink() or not place.is_dir():
        raise FileExistsError(17, "File exists", str(place))
    if any(place.iterdir()):
        raise InputError(f"the folder {str(place)!r} is not empty: remove it, or choose another.")


def _remove(half: Path, above: _Folder) -> None:
    """Remove an unfinished folder, with the files in it; anything else of its name is no work
    of ours.
    """
    status = above.lstat(half.name)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        above.unlink(half.name)
        return
    with _Folder(half, half.parent) as inside:
        for name in os.listdir(inside.number if inside.number >= 0 else half):
            inside.unlink(name)
    where, how = above._at(half.name)
    os.rmdir(where, **how)


def _sync_folder(folder: Path) -> None:
    if _FOLDER:
        number = os.open(folder, os.O_RDONLY | _FOLDER)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def rounded_down(value: float, digits: int = 6) -> str:
    """Some digits, rounded down: a printed lower bound is still one."""
    return _digits(value, digits, ROUND_FLOOR)


def rounded_up(value: float, digits: int = 6) -> str:
    """Some digits, rounded up; inf where nothing is known."""
    return _digits(value, digits, ROUND_CEILING)


def _digits(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return f"{value:g}"
    exact = Context(prec=digits, rounding=rounding).create_decimal_from_float(value)
    return f"{float(exact):.{digits}g}"
