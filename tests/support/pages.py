"""What tests of pages share: runs that are made up, and pictures read back."""

from __future__ import annotations

import base64
import functools
import importlib.util
import struct
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np


def load_samples() -> ModuleType:
    """The made-up runs, which the tests in a browser use, too."""
    path = Path(__file__).parents[1] / "browser" / "samples.py"
    spec = importlib.util.spec_from_file_location("samples", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


samples = load_samples()
made_up = functools.cache(samples.made_up)


def decode(uri: str) -> np.ndarray:
    """Our own PNG files, read with nothing but zlib."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    width, height, _, colour = struct.unpack(">IIBB", data[16:26])
    length = struct.unpack(">I", data[33:37])[0]
    channels = {0: 1, 2: 3}[colour]
    rows = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(
        height, 1 + width * channels
    )
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(height, width, channels)
