"""The first pass over a model file from a stranger, in a process of its own with limits on memory
and time.

Readers check what they call. Should a check be missing, the pass ends in a crash, fills the memory
or does not end; here that happens to a child process, and the caller gets a sentence. The child is
no sandbox: it may read what its user may read.

The time is that of the processor, so that a busy machine refuses nothing that an idle one reads.
Memory is limited on Linux, and the time of the processor where there is `setrlimit`; elsewhere the
clock is all there is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from wassail.errors import InputError

__all__ = ["attempt"]

# Windows has none.
resource: Any = (
    importlib.import_module("resource") if importlib.util.find_spec("resource") else None
)

SECONDS = 5.0  # of the processor, after the libraries are loaded
SECONDS_FOR_EACH_BYTE = 1 / (4 << 20)  # large networks take longer
MEMORY = 600 << 20  # bytes on top of what the libraries take
MEMORY_FOR_EACH_BYTE = 8
_LONGEST = 1 << 16  # bytes of the child's answer
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from wassail.zoo.trial import "
    "main; main(sys.argv[2:])"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

_answers: dict[str, dict[str, Any]] = {}  # of files that were tried, by content


def attempt(path: str | Path, digest: str) -> dict[str, Any]:
    """Read the model and run it forwards and backwards in a child process; raise InputError if that
    does not end well.

    A file is tried once in each process: copies and later calls are known by their content.

    Args:
        path: of the ONNX file.
        digest: SHA-256 of the file.

    Returns:
        What the child found out: how far the logits are from onnxruntime's.
    """
    if digest not in _answers:
        _answers[digest] = _attempt(Path(path))
    return _answers[digest]


def _attempt(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    seconds = math.ceil(SECONDS + size * SECONDS_FOR_EACH_BYTE)
    memory = MEMORY + MEMORY_FOR_EACH_BYTE * size
    # Not the current folder: the file may lie beside a module of its author's.
    folders = [
        str(Path(__file__).parents[2]),
        *(os.path.abspath(folder) for folder in sys.path if folder),
    ]
    asked = (str(path.resolve()), str(seconds), str(memory))
    command = [sys.executable, "-I", "-c", _CODE, json.dumps(folders), *asked]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(
            f"cannot start a process to try {str(path)!r} in ({error.strerror}): trust the file "
            "with --trust to go without."
        ) from None
    # Nothing in the child waits for anything.
    wait = 600 + 10 * seconds if resource is not None else 20 + 4 * seconds
    try:
        answer, _ = process.communicate(timeout=wait)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise InputError(_sentence(path, f"did not end within {wait} s")) from None
    except BaseException:
        _kill(process)
        raise
    return _read(path, process.returncode, answer, seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child and all that it started."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
    process.communicate()


def _read(path: Path, code: int, answer: bytes, seconds: int) -> dict[str, Any]:
    if code < 0 and -code == getattr(signal, "SIGXCPU", 0):
        raise InputError(_sentence(path, f"took more than {seconds} s"))
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        raise InputError(_sentence(path, f"ended with {name}"))
    try:
        found = json.loads(answer[:_LONGEST])
        if code or not isinstance(found, dict):
            raise ValueError
    except ValueError:
        raise InputError(_sentence(path, f"ended with code {code} and no answer")) from None
    if "error" in found:
        raise InputError(" ".join(str(found["error"]).split()))
    return found


def _sentence(path: Path, what: str) -> str:
    return (
        f"the first pass over {str(path)!r}, in a process of its own, {what}: export the "
        "model again (--trust skips this)."
    )


# ---- In the child
# --------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Try one file and print the answer as JSON."""
    path, seconds, memory = arguments
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    import torch

    from wassail.zoo import difference, onnx  # noqa: F401  all that is needed

    torch.set_num_threads(1)
    difference.import_onnx()
    limit(int(seconds), int(memory), 4 * Path(path).stat().st_size + (1 << 20))
    try:
        found = read_and_run(path)
    except InputError as error:
        found = {"error": str(error)}
    except Exception as error:
        found = {
            "error": f"{path!r} cannot be run ({type(error).__name__}): export the model again."
        }
    text = json.dumps(found)
    os.write(answer, text.encode()[:_LONGEST])
    os._exit(0)  # nothing is left to do, and a library that was misled may not end well


def read_and_run(path: str | Path) -> dict[str, Any]:
    """What the child does: read the model, run it forwards and backwards, compare it with
    onnxruntime.
    """
    from wassail.zoo import difference, onnx

    model = onnx.load_onnx(path)
    difference.forth_and_back(model)
    return difference.runtime_difference(str(path), model)


def limit(seconds: int, memory: int, written: int) -> None:
    """Limit what this process may take from now on.

    memory: bytes on top of those that it has; written: bytes of a file.
    """
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(
        resource.RLIMIT_CPU, (math.ceil(used) + seconds, math.ceil(used) + seconds + 1)
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (written, written))
    # Other systems do not say how much is taken already.
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
