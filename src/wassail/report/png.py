"""Images as PNG files, written with nothing but zlib (PNG specification, third edition)."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wassail.errors import InputError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2}  # channels -> colour type: grey, RGB


def encode(image: NDArray[np.uint8]) -> bytes:
    """A PNG file of an image: uint8, `(H, W)` or `(H, W, 1)` in grey, `(H, W, 3)` in colour."""
    pixels = np.asarray(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 3
        or pixels.shape[2] not in _COLOURS
        or 0 in pixels.shape
    ):
        raise InputError(
            f"an image of {pixels.dtype} with shape {tuple(np.shape(image))} cannot be a PNG: give "
            "uint8 of shape (H, W) or (H, W, 3)."
        )
    height, width, channels = pixels.shape
    # Each row starts with its filter: 0, none.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    return (
        _SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def to_uint8(image: Any, low: float = 0.0, high: float = 1.0) -> NDArray[np.uint8]:
    """The nearest 8-bit image of a sample `(H, W)`, `(1, H, W)` or `(3, H, W)` with values in
    `[low, high]`, channels last.
    """
    array = np.asarray(image, dtype=np.float64)
    if array.ndim == 3:
        array = array[0] if array.shape[0] == 1 else np.moveaxis(array, 0, -1)
    scaled = np.rint(255 * (array - low) / (high - low))
    return scaled.clip(0, 255).astype(np.uint8)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
