"""Tensors and settings as bytes with checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.writing import MAX_TEXT

MAX_CHUNK = 10**6

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


def packed(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Any]]:
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
    digest = hashlib.sha256(header_of(layout, metadata))
    for part in parts:
        digest.update(part)
    return header_of(layout, {**metadata, "sha256": digest.hexdigest()}), parts


def _sorted(layout: Layout) -> Layout:
    """Largest elements first, which keeps all of them aligned, then by name."""
    return sorted(layout, key=lambda item: (-_SIZES[item[1]], item[0]))


def header_of(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """The beginning of the file: a length in eight bytes, then JSON, padded so that the tensors
    begin at a multiple of 8.
    """
    content: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    start = 0
    for name, dtype, shape in layout:
        stop = start + _SIZES[dtype] * math.prod(shape)
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = dumps(content, sort=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def opened_chunk(path: Path) -> Iterator[tuple[Layout, dict[str, str], BinaryIO]]:
    """Layout and metadata of a chunk, and the file at the first byte of its tensors; ValueError
    if `header_of` wrote it not.
    """
    size = signature_of(path)[0]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_TEXT):
            raise ValueError("it is cut short or no safetensors file")
        text = file.read(length)
        try:
            content = parsed(text.decode("ascii"))
            metadata = content.pop("__metadata__")
            layout = _sorted(
                [(name, entry["dtype"], entry["shape"]) for name, entry in content.items()]
            )
            if not all(_is_shape(shape) for _, _, shape in layout) or not all(
                type(value) is str for value in metadata.values()
            ):
                raise ValueError
            written = header_of(layout, metadata)
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


def known_tensor(name: str, file: Any) -> str:
    """The name, if the file has a tensor of that name."""
    if name not in file.keys():  # noqa: SIM118 - not a dict
        raise InputError(
            f"there is no tensor {name!r} in the chunk: it has {', '.join(file.keys()) or 'none'}."
        )
    return name


def fields_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields that stand beside the tensors."""
    fields = loads(metadata.get("fields", ""))
    if not isinstance(fields, dict):
        raise ValueError("its fields are no object")
    return fields


def signature_of(path: Path) -> tuple[int, ...]:
    """Size first, and what changes when the file does; ValueError for a pipe and the like,
    which would be read forever.
    """
    status = os.lstat(path)
    if not S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_bytes(path: Path, most: int, whole: bool = False) -> bytes:
    """The first `most` bytes of a regular file; with `whole`, ValueError if there are more."""
    if signature_of(path)[0] > most and whole:
        raise ValueError(f"it has more than {most >> 20} MB")
    with path.open("rb") as file:
        return file.read(most)


def checksum(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    digest = hashlib.sha256()
    size = signature_of(path)[0]
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"sha256": digest.hexdigest(), "size": size}


def has_content(path: Path, data: bytes) -> bool:
    """Whether a file is there and holds just that."""
    try:
        return signature_of(path)[0] == len(data) and read_bytes(path, len(data)) == data
    except (OSError, ValueError):
        return False


def encode(value: Any, where: str) -> Any:
    """A value as JSON can hold it; `where` is its name in an error."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, (list, tuple)):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        if _is_float(value):
            raise InputError(
                f"{where} cannot be stored, for {dict(value)!r} stands for a number: call its "
                "key otherwise."
            )
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    raise InputError(
        f"{where} cannot be stored, being of type {type(value).__name__}: give text, numbers, "
        "None, lists and dicts of them."
    )


def _is_float(value: Mapping[str, Any]) -> bool:
    return set(value) == {"float"} and isinstance(value["float"], str) and value["float"] in _FLOATS


def decode(value: Any) -> Any:
    """The reverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if _is_float(value):
            return _FLOATS[value["float"]]
        return {key: decode(item) for key, item in value.items()}
    return value


def dumps(value: Any, sort: bool = True) -> str:
    """JSON in one form only."""
    return json.dumps(value, sort_keys=sort, separators=(",", ":"), allow_nan=False)


def parsed(text: str | bytes) -> Any:
    """JSON as the standard has it; ValueError for anything else, be it an infinity, a thousand
    brackets, or a name that stands twice in one object.
    """
    try:
        return json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=unique
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def loads(text: str) -> Any:
    """What `encode` and `dumps` wrote."""
    try:
        return decode(parsed(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. A name that stands twice means one thing to one reader and another to the
    next, so it is a ValueError.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)
