"""The list of networks and data, the folder that holds them, and the digest of a file's content."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]


class Missing(Exception):
    """A file that is not here, or not what the list says; one sentence that says what to do."""


@dataclass(frozen=True)
class Entry:
    """A network or a data set.

    Args:
        name: of the network or data set.
        kind: "network", "onnx", "layers" (weights of a small network in float64) or "data".
        file: below the folder of networks.
        sha256: of its content, see `digest_of`.
        licence: of the source, as its repository says.
        data: the data set of a network.
        architecture: layers, or the name of a class; the recipe that builds it.
        mean: subtracted from inputs in [0, 1], by channel; empty: nothing.
        std: what inputs are divided by then.
        sources: public files it is built from.
        about: one sentence.
    """

    name: str
    kind: str
    file: str
    sha256: str
    licence: str
    data: str = ""
    architecture: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    sources: tuple[dict[str, Any], ...] = field(default=())
    about: str = ""


def _folder() -> Path:
    beside = ROOT.parent / "shared" / "zoo"
    if "WASSAIL_ZOO" in os.environ:
        return Path(os.environ["WASSAIL_ZOO"])
    return beside if beside.exists() else ROOT / ".cache" / "networks"


def _entries() -> dict[str, Entry]:
    listed = json.loads(Path(__file__).with_name("networks.json").read_text())
    found = {}
    for name, row in listed.items():
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
        }
        found[name] = Entry(name=name, **given)
    return found


FOLDER = _folder()
NETWORKS = _entries()


def entry_of(name: str) -> Entry:
    """The line of the list."""
    if name not in NETWORKS:
        raise Missing(f"no network or data set {name!r}: see `python -m benchmarks.networks list`.")
    return NETWORKS[name]


def path_of(name: str, folder: Path | None = None) -> Path:
    """The file of a network or data set, which is there."""
    path = (folder or FOLDER) / entry_of(name).file
    if not path.exists():
        raise Missing(f"{name} is not here: run `python -m benchmarks.networks fetch {name}`.")
    return path


def digest_of(path: Path) -> str:
    """SHA-256 of what a file holds: of names, types, shapes and numbers of its arrays in the order
    of their names, so that it does not depend on the container; of other files of their bytes.
    """
    if path.suffix == ".safetensors":
        arrays = load_file(path)
    elif path.suffix == ".npz":
        arrays = dict(np.load(path, allow_pickle=False))
    else:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.hexdigest()


@cache
def checksum(name: str) -> str:
    """The digest of the file that is here."""
    return digest_of(path_of(name))
