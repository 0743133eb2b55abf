"""A pack on disk: a folder, and the same folder as one zip file.

    evidence.html       for people, also on paper
    evidence.json       for machines
    settings.toml       to make the evaluation again
    box.csv             the box and the unit of each feature, where they have their own
    run/                the evaluation: configuration, results, page
    shift.npz           samples of later data, where a shift was measured
    model.onnx          the model, where it was included
    seal.json           digests of all of it, perhaps signed

The zip file holds the files as they are, in the order of their names, without times: the same pack
gives the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.run import Evaluation
from wassail.evaluation.sealing import SEAL, Seal, differences, digests, read_seal, sealed
from wassail.evaluation.store.encoding import encode, has_content, parsed, read_bytes
from wassail.evidence.document import document
from wassail.evidence.page import page
from wassail.evidence.question import own_boxes
from wassail.evidence.settings import box_text, settings_text
from wassail.evidence.statement import Statement, read_statement
from wassail.report.page import write_report
from wassail.transport.between import MOST, ShiftBetween, shift_between
from wassail.writing import MAX_TEXT, check_links, save, saving
from wassail.zoo.files import read_npz, reading

FORMAT = "wassail pack 1"
PAGE = "evidence.html"
RECORD = "evidence.json"
SETTINGS = "settings.toml"
BOX = "box.csv"
SHIFT = "shift.npz"
MODEL = "model.onnx"
RUN = "run"
REPORT = f"{RUN}/report.html"
GIVEN = {SHIFT, MODEL, SEAL, f"{RUN}/config.json"}  # what does not follow from the results
ENTRIES = 100_000  # files of a pack
MOST_BYTES = 64 << 30  # of a pack
DATE = (1980, 1, 1, 0, 0, 0)  # of every file in a zip: the first that the format can say
BLOCK = 1 << 20
BY_HAND = "unpack it by hand if you trust it, and give the folder."


def is_pack(place: str | PathLike[str]) -> bool:
    """Whether a path is that of a pack: a zip file, or a folder with `evidence.json`.

    Args:
        place: a path.
    """
    path = Path(place)
    return os.path.lexists(path / RECORD) if path.is_dir() else path.suffix == ".zip"


def write_pack(
    folder: str | PathLike[str],
    statement: Statement,
    shift: tuple[Tensor, Tensor] | None = None,
    model: bytes | None = None,
    key: str | PathLike[str] | None = None,
) -> tuple[Path, Path]:
    """Make a pack of the finished run in its folder `run`; returns the page and the zip file.

    Args:
        folder: of the pack, with `run` in it.
        statement: the author's words.
        shift: samples and labels of later data, in the variable of the run; default None.
        model: the bytes of an ONNX file to include; default None.
        key: file with an Ed25519 private key that signs the seal; default None.
    """
    place = Path(folder)
    _tidy(place / RUN)
    run = Evaluation.load(place / RUN)
    if not len(run):
        raise InputError("the run has no samples: a pack needs some.")
    write_report(run, place / REPORT)
    for name in (BOX, SHIFT, MODEL):  # of a pack that was interrupted
        (place / name).unlink(missing_ok=True)
    if shift is not None:
        save(place / SHIFT, shift_bytes(*shift))
    if model is not None:
        save(place / MODEL, model)
    for name, text in texts(run, statement, measured(place, run), model is not None).items():
        save(place / name, text)
    save(place / SEAL, sealed(claim_of(place, run), key))
    return place / PAGE, write_zip(place)


def texts(
    run: Evaluation, statement: Statement, shift: ShiftBetween | None, model: bool
) -> dict[str, str]:
    """The files of a pack that follow from its run, by name.

    Args:
        run: the evaluation.
        statement: the author's words.
        shift: as `measured` gives it.
        model: whether the model is included.
    """
    record = document(run, statement, shift, MODEL if model else None)
    made = {
        RECORD: json.dumps(record, indent=1, allow_nan=False) + "\n",
        PAGE: page(record, run),
        SETTINGS: settings_text(run, statement),
    }
    return made | ({BOX: box_text(run)} if own_boxes(run) else {})


def claim_of(place: Path, run: Evaluation) -> dict[str, Any]:
    """What the seal of a pack is about: every file of it by digest, and what it was made with.

    Args:
        place: of the pack.
        run: its run.
    """
    names = [name for name in listed(place) if name != SEAL]
    facts = {key: encode(run.info.get(key), key) for key in ("versions", "model", "data")}
    return {"format": FORMAT, "kind": "evidence", "files": digests(place, names), **facts}


def check_pack_seal(place: Path, run: Evaluation, signer: str | None = None) -> Seal:
    """Whether the seal of a pack fits it, and who vouches for it.

    Args:
        place: of the pack, as a folder.
        run: its run.
        signer: the key that must have signed it, as in `check_seal`; default None.
    """
    claim, known = read_seal(place, signer)
    found = differences(claim, claim_of(place, run))
    return Seal(known.digest, known.signer, (*known.problems, *found))


def seal_again(folder: str | PathLike[str], key: str | PathLike[str] | None) -> tuple[Path, Path]:
    """Seal a pack anew, perhaps with a key, and write its zip file; returns both paths.

    Args:
        folder: of the pack.
        key: file with an Ed25519 private key, or None.
    """
    place = Path(folder)
    if not place.is_dir():
        raise InputError(f"{str(folder)!r} is a zip file: unpack it, and seal the folder.")
    run = Evaluation.load(place / RUN)
    return save(place / SEAL, sealed(claim_of(place, run), key)), write_zip(place)


def listed(place: Path) -> list[str]:
    """The names of all files of a pack, sorted. A link or anything that is no file is refused.

    Args:
        place: of the pack, as a folder.
    """
    names = []
    for folder, below, files in os.walk(place):
        for name in [*below, *files]:
            path = Path(folder) / name
            check_links(path, place)
            mode = os.lstat(path).st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise InputError(
                    f"{path.relative_to(place).as_posix()!r} in the pack {str(place)!r} is no "
                    "file: remove it."
                )
        if not below and not files and Path(folder) != place:
            raise InputError(f"the pack {str(place)!r} has an empty folder: remove it.")
        names += [(Path(folder) / name).relative_to(place).as_posix() for name in files]
        if len(names) > ENTRIES:
            raise InputError(f"{str(place)!r} has more than {ENTRIES:,} files: it is no pack.")
    return sorted(names)


def write_zip(place: Path) -> Path:
    """The pack as one file beside its folder: uncompressed, without times, names sorted.

    Args:
        place: of the pack.
    """
    target = place.absolute().with_name(place.absolute().name + ".zip")
    with saving(target) as file:
        _zip(place, file)
    return target


def _zip(place: Path, file: IO[bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in listed(place):
            about = zipfile.ZipInfo(name, DATE)
            about.external_attr = 0o644 << 16
            about.create_system = 3
            about.file_size = (place / name).stat().st_size
            with archive.open(about, "w") as inside, open(place / name, "rb") as source:
                shutil.copyfileobj(source, inside, BLOCK)


@contextmanager
def opened(place: str | PathLike[str]) -> Iterator[Path]:
    """The folder of a pack; a zip file is unpacked into a temporary one.

    Args:
        place: of a folder, or of a zip file.
    """
    path = Path(place)
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="wassail-pack-") as made:
        _unpack(path, Path(made))
        yield Path(made)


def _unpack(path: Path, target: Path) -> None:
    """Unpack what `write_zip` wrote. What could fill the disk or lead elsewhere is refused first.
    Then what was unpacked must give the same bytes: a pack has no links, no comments, no name
    twice, and nothing that some programs take for a file and others do not.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _check_entries(entries, path)
            for entry in entries:
                place = target / entry.filename
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, open(place, "xb") as copy:
                    shutil.copyfileobj(source, copy, BLOCK)
        with tempfile.TemporaryFile() as made:
            _zip(target, made)
            if not _same(path, made):
                raise InputError(f"{str(path)!r} is not as `wassail evidence` wrote it: {BY_HAND}")
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise InputError(f"{str(path)!r} is no pack that can be read: {reason}.") from None


def _check_entries(entries: list[zipfile.ZipInfo], path: Path) -> None:
    """Refuse what could fill the disk, or lead to another folder."""
    size = path.stat().st_size
    if len(entries) > ENTRIES or size > MOST_BYTES:
        raise InputError(
            f"{str(path)!r} has {len(entries):,} files in {size:,} bytes: no pack has."
        )
    odd = [entry.filename for entry in entries if not _harmless(entry.filename)]
    if odd:
        problem = f"names a file that leads elsewhere ({_short(odd[0])})"
    elif any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        problem = "has a compressed part"
    elif sum(entry.file_size for entry in entries) > size:
        problem = "says that it holds more bytes than it has"
    else:
        return
    raise InputError(f"{str(path)!r} {problem}, which no pack has: {BY_HAND}")


def _same(path: Path, made: IO[bytes]) -> bool:
    """Whether a file has the bytes of another."""
    size = made.seek(0, os.SEEK_END)
    made.seek(0)
    with open(path, "rb") as file:
        blocks = iter(lambda: file.read(BLOCK), b"")
        return path.stat().st_size == size and all(made.read(BLOCK) == block for block in blocks)


def _harmless(name: str) -> bool:
    """Whether a name in a zip file stays below the folder it is unpacked to."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and part.isprintable() for part in parts)
    return plain and len(name) < 500 and not any(c in name for c in "\\:\x00")


def _short(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)[:60]


def read_record(place: Path) -> dict[str, Any]:
    """`evidence.json` of a pack, of any origin, as far as it is an object.

    Args:
        place: of the pack, as a folder.
    """
    check_links(place / RECORD, place)
    try:
        found = parsed(read_bytes(place / RECORD, MAX_TEXT, whole=True).decode())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(
            f"{str(place)!r} is no pack: its {RECORD} cannot be read; `wassail evidence` makes one."
        )
    return found


def statement_of(place: Path) -> Statement:
    """The author's words in a pack.

    Args:
        place: of the pack, as a folder.
    """
    return read_statement(read_record(place).get("statement"))


def _tidy(run: Path) -> None:
    """Remove what differs from machine to machine, or needs other packages: times and pictures."""
    shutil.rmtree(run / "log", ignore_errors=True)
    for name in ("sandwich.svg", "report.html"):
        (run / name).unlink(missing_ok=True)


def drawn(n: int, seed: int = 0) -> Tensor:
    """The places of as many of n samples as a measured shift looks at, drawn at random, sorted.

    Args:
        n: number of samples.
        seed: of the draw.
    """
    return torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(n)[:MOST]))


def shift_bytes(x: Tensor, y: Tensor) -> bytes:
    """The file of later samples in a pack: those that are drawn of all.

    Args:
        x: samples `(N, *shape)`.
        y: labels `(N,)`.
    """
    some = drawn(len(x))
    return _arrays(x[some], y[some])


def _arrays(x: Tensor, y: Tensor) -> bytes:
    """Samples as an `.npz` file, each array as it is: without times, so that bytes repeat."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, array in (("x", x.cpu().numpy()), ("y", y.cpu().numpy())):
            with archive.open(zipfile.ZipInfo(f"{name}.npy", DATE), "w") as inside:
                np.lib.format.write_array(inside, np.ascontiguousarray(array), allow_pickle=False)
    return made.getvalue()


def measured(place: Path, run: Evaluation) -> ShiftBetween | None:
    """The shift between the samples of a pack and the later ones in it, or None without them.

    Args:
        place: of the pack, as a folder.
        run: its run.
    """
    path = place / SHIFT
    if not os.path.lexists(path):
        return None
    check_links(path, place)
    with reading(str(path)):
        table = read_npz(path, None)
    mine = run.images(range(len(run)))[0]
    if len(table.x) > MOST or tuple(table.x.shape[1:]) != tuple(mine.shape[1:]):
        raise InputError(
            f"{SHIFT} has samples of shape {tuple(table.x.shape)}: a pack has at most {MOST}, of "
            "the shape of its own."
        )
    x, y = (torch.from_numpy(np.array(part)) for part in (table.x, table.y))
    if not has_content(path, _arrays(x, y)):
        raise InputError(f"{SHIFT} holds more than samples and labels: it was changed.")
    some = drawn(len(run))
    order = next((order for order in run.orders if order != float("inf")), 1.0)
    return shift_between(
        (mine[some], run.y[some]),
        (x, y),
        run.threat.norm,
        order,
        label_cost=run.others.get("label_cost", float("inf")),
    )
