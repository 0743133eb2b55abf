"""Download, check, build and keep a network or a data set."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.networks import architectures
from benchmarks.networks.files import FOLDER, Entry, Missing, digest_of, entry_of

RAW = "https://raw.githubusercontent.com/{repository}/{commit}/{path}"
PIECE = 1 << 16
SECONDS = 60.0  # without an answer of the server


def fetch(
    name: str,
    folder: Path = FOLDER,
    mirror: str = "",
    say: Callable[[str], None] = print,
) -> Path:
    """The file of a network or data set, checked; downloaded and built if it is not there.

    Args:
        name: as in `networks.json`.
        folder: that keeps them; default `FOLDER`.
        mirror: address of a server that has the built files; default "", the public sources.
        say: is told what happens.

    Returns:
        The path of the file.
    """
    entry = entry_of(name)
    path = folder / entry.file
    if path.exists() and digest_of(path) == entry.sha256:
        say(f"{name}: is there")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.stem + ".new" + path.suffix)
    if mirror:
        address = f"{mirror.rstrip('/')}/{entry.file}"
        download(address, part, say)
    else:
        parts = [source_file(source, folder, say) for source in sources_of(entry)]
        build(entry, parts, part)
    if digest_of(part) != entry.sha256:
        part.unlink()
        raise Missing(f"{name}: what was downloaded has another SHA-256 than networks.json says.")
    part.replace(path)
    say(f"{name}: {path}")
    return path


def sources_of(entry: Entry) -> tuple[dict[str, Any], ...]:
    if not entry.sources:
        raise Missing(
            f"{entry.name} has no public address: {entry.about} Give a server that has it "
            "(--from), or set WASSAIL_ZOO to a folder that holds it."
        )
    return entry.sources


def address_of(source: dict[str, Any]) -> str:
    """The address of a public file."""
    return source["url"] if "url" in source else RAW.format(**source)


def source_file(source: dict[str, Any], folder: Path, say: Callable[[str], None]) -> Path:
    """A public file as it is published, kept beside the built ones and checked."""
    address = address_of(source)
    path = folder / "sources" / source["sha256"][:16]
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        download(address, part, say)
        if hashlib.sha256(part.read_bytes()).hexdigest() != source["sha256"]:
            part.unlink()
            raise Missing(f"{address} has another SHA-256 than networks.json says.")
        part.replace(path)
    return path


def download(address: str, path: Path, say: Callable[[str], None]) -> None:
    """A file from a server; what an earlier try left is not downloaded again."""
    have = path.stat().st_size if path.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            goes_on = answer.status == 206
            say(f"{address}" + (f", from byte {have}" if goes_on else ""))
            with path.open("ab" if goes_on else "wb") as file:
                while piece := answer.read(PIECE):
                    file.write(piece)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # all of it is there already
            return
        raise Missing(f"{address} cannot be had: {error.code} {error.reason}.") from None
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        raise Missing(
            f"{address} cannot be reached ({reason}): connect to the network and run the same "
            "command again, it goes on where it stopped."
        ) from None


# ---- from a public file to ours


def build(entry: Entry, parts: list[Path], path: Path) -> None:
    """Write the file that the loader reads."""
    if entry.kind == "onnx":
        path.write_bytes(unpacked(entry.sources[0], parts[0]))
    elif entry.kind == "network":
        save_file(weights(entry, unpacked(entry.sources[0], parts[0])), path)
    elif entry.kind == "layers":
        np.savez(path, **arrays(entry, parts))  # type: ignore[arg-type]
    else:
        np.savez_compressed(path, **pictures(entry, parts))  # type: ignore[arg-type]


def unpacked(source: dict[str, Any], path: Path) -> bytes:
    """The bytes of a source, of one member where it is an archive."""
    data = path.read_bytes()
    if "member" in source:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            member = archive.extractfile(source["member"])
            assert member is not None
            return member.read()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def weights(entry: Entry, data: bytes) -> dict[str, torch.Tensor]:
    """Tensors by the names of ours. `tensors` of a source says where they are: "/state_dict/*" for
    all of them below a place, under the same names, or one place for each name.
    """
    stored = stored_tensors(data)
    places = entry.sources[0]["tensors"]
    if isinstance(places, str):
        names = architectures.build(entry.architecture).state_dict()
        front = places.removesuffix("*")
        wanted = {name: front + name for name in names}
        places = {name: place for name, place in wanted.items() if place in stored}
    return {name: stored[place].clone().contiguous() for name, place in places.items()}


def stored_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """All tensors of a file of torch or ONNX, by their path. Nothing in it is run."""
    if data[:2] == b"PK" or data[:1] == b"\x80":
        return dict(_walk(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), ""))
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_model_from_string(data).graph
    return {t.name: torch.tensor(numpy_helper.to_array(t)) for t in graph.initializer}


def _walk(value: object, place: str) -> Any:
    if isinstance(value, torch.Tensor):
        yield place, value.detach()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, f"{place}/{key}")
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _walk(inner, f"{place}/{key}")


def arrays(entry: Entry, parts: list[Path]) -> dict[str, np.ndarray]:
    """Weights and biases in float64: a file for each, of MATLAB or NumPy; without a second file
    all biases are 0.
    """
    lists = [listed(part.read_bytes(), name) for part, name in zip(parts, ("weights", "biases"))]
    weights = [w.T for w in lists[0]] if entry.sources[0].get("transposed") else lists[0]
    found = {f"W{i}": weight.astype(np.float64) for i, weight in enumerate(weights)}
    biases = lists[1] if len(lists) > 1 else [np.zeros(len(weight)) for weight in weights]
    return found | {f"b{i}": bias.astype(np.float64).ravel() for i, bias in enumerate(biases)}


def listed(data: bytes, name: str) -> list[np.ndarray]:
    """The arrays of a file."""
    if data.startswith(b"MATLAB"):
        from scipy.io import loadmat

        return list(loadmat(io.BytesIO(data))[name].ravel())
    file = io.BytesIO(data)
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    return list(OnlyArrays(file).load())


class OnlyArrays(pickle.Unpickler):
    """Reads pickled arrays of NumPy and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickled array needs."""
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if name == "_reconstruct" and module.endswith(".multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        raise pickle.UnpicklingError(f"{module}.{name} is no array")


def pictures(entry: Entry, parts: list[Path]) -> dict[str, np.ndarray]:
    """Images (N, height, width, channels) or (N, height, width) and labels, both uint8."""
    blobs = [unpacked(source, part) for source, part in zip(entry.sources, parts)]
    if entry.architecture == "idx":
        x = np.frombuffer(blobs[0], np.uint8, offset=16).reshape(-1, 28, 28)
        return {"images": x, "labels": np.frombuffer(blobs[1], np.uint8, offset=8)}
    if entry.architecture == "cifar-binary":
        rows = np.frombuffer(blobs[0], np.uint8).reshape(-1, 3073)
        pictures = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return {"images": np.ascontiguousarray(pictures), "labels": rows[:, 0].copy()}
    x = np.load(io.BytesIO(blobs[0]), allow_pickle=False)  # "npy": values in [0, 1]
    y = np.load(io.BytesIO(blobs[1]), allow_pickle=False)
    whole = np.rint(255 * x).astype(np.uint8)
    return {
        "images": whole[..., 0] if whole.shape[-1] == 1 else whole,
        "labels": y.astype(np.uint8),
    }
