"""Outputs of an ONNX file by onnxruntime, in a process of its own: a file may crash it.

Run as a script with the name of a file it reads points as JSON, one line for each call, from
standard input and writes outputs. It imports neither torch nor the rest of the library.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

SECONDS = 60.0  # for one call: a file that takes longer is not waited for


class Runtime:
    """A process that evaluates one file; it starts with the first call and ends with `close`.

    Args:
        file: the network, not compressed.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.usable = importlib.util.find_spec("onnxruntime") is not None
        self._process: subprocess.Popen[str] | None = None

    def outputs(self, points: list[list[float]]) -> list[list[float]] | None:
        """Outputs at flat points, or None where onnxruntime is not installed or cannot run the
        file.

        points: inputs in row-major order.
        """
        if not self.usable:
            return None
        found: object = None
        with suppress(OSError, ValueError):
            found = json.loads(self._asked(json.dumps(points)))
        if isinstance(found, list) and len(found) == len(points):
            return found
        self.usable = False  # it crashed, or took too long
        self.close()
        return None

    def _asked(self, line: str) -> str:
        """The answer to one line; "" where there is none in time."""
        if self._process is None:
            # Isolated: nothing of the folder that the command was started in is imported.
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__, str(self.file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes the pipes and waits
                self._process = None


def outputs_of(file: Path, points: list[list[float]]) -> list[list[float]] | None:
    """Outputs at flat points of one call, or None as `Runtime.outputs`.

    file: the network, not compressed; points: inputs in row-major order.
    """
    with closing(Runtime(file)) as runtime:
        return runtime.outputs(points)


def evaluator(file: str, outputs: list[str] | None = None) -> Callable[[Any], Any]:
    """A function from one flat point to the first output there, in this process: most files take
    a batch of 1.

    file: the network; outputs: names of those that are wanted; None for all.
    """
    import numpy as np

    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    first = session.get_inputs()[0]
    shape = [size if isinstance(size, int) and size > 0 else 1 for size in first.shape]
    kind = np.float64 if first.type == "tensor(double)" else np.float32

    def evaluate(point: Any) -> Any:
        x = np.array(point, dtype=kind).reshape(shape)
        return session.run(outputs, {first.name: x})[0].astype(np.float64)

    return evaluate


if __name__ == "__main__":
    output = evaluator(sys.argv[1])
    for line in sys.stdin:
        print(
            json.dumps([output(point).ravel().tolist() for point in json.loads(line)]), flush=True
        )
