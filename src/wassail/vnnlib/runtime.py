"""Outputs of an ONNX file by onnxruntime, in a process of its own: a file may crash it.

Run as a script with the name of a file it reads points as JSON from standard input and writes
outputs. It imports neither torch nor the rest of the library.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 60.0  # for one call: a file that takes longer is not waited for


def outputs_of(file: Path, points: list[list[float]]) -> list[list[float]] | None:
    """Outputs at flat points, or None where onnxruntime is not installed or cannot run the file.

    Args:
        file: the network, not compressed.
        points: inputs in row-major order.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    # Isolated: nothing of the folder that the command was started in is imported.
    command = [sys.executable, "-I", __file__, str(file)]
    try:
        done = subprocess.run(
            command, input=json.dumps(points), capture_output=True, text=True, timeout=SECONDS
        )
        found: list[list[float]] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, OSError, ValueError):
        return None
    return found if done.returncode == 0 and len(found) == len(points) else None


def _run(file: str, points: list[list[float]]) -> list[list[float]]:
    """Outputs at points, one call for each: most files take a batch of 1."""
    import numpy as np

    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    first = session.get_inputs()[0]
    shape = [size if isinstance(size, int) and size > 0 else 1 for size in first.shape]
    kind = np.float64 if first.type == "tensor(double)" else np.float32
    found = []
    for point in points:
        x = np.array(point, dtype=kind).reshape(shape)
        found.append(session.run(None, {first.name: x})[0].astype(np.float64).ravel().tolist())
    return found


if __name__ == "__main__":
    print(json.dumps(_run(sys.argv[1], json.load(sys.stdin))))
