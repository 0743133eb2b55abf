"""The delicate part of the suite under other kernels: `make test-kernels`.

Each set-up is a process of its own, since torch and its libraries choose their kernels when they
are loaded. It computes the figures of `figures.py`, which must agree with those of this processor
as it is; the two that differ most from it also run the tests with the marker `kernels`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from figures import AGREE, apart

HERE = Path(__file__).parent
OLD = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
}
MIDDLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SETTINGS: list[
    tuple[int, bool, dict[str, str]]
] = [  # threads, whether the tests run too, environment
    (1, False, {}),
    (2, False, {}),
    (1, True, OLD),
    (2, True, MIDDLE),
    (2, False, {"MKL_CBWR": "COMPATIBLE"}),
]


def main() -> int:
    """Every set-up in turn; how many of them are red."""
    first: dict[str, list[float]] | None = None
    red = 0
    for threads, tested, settings in SETTINGS:
        began = time.monotonic()
        what = " ".join(f"{k}={v}" for k, v in settings.items()) or "as it is"
        environment = {
            **os.environ,
            **settings,
            "OMP_NUM_THREADS": str(threads),
            "WASSAIL_TEST_THREADS": str(threads),
        }
        made = subprocess.run(
            [sys.executable, str(HERE / "figures.py"), str(threads)],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        found = json.loads(made.stdout)
        first = first or found
        off = {name: value for name, value in apart(first, found).items() if value > AGREE}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "-m",
            "kernels and not slow",
            str(HERE),
        ]
        tests = None
        if tested:
            tests = subprocess.run(
                command, env=environment, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True
            )
        good = not off and (tests is None or tests.returncode == 0)
        red += not good
        seconds = time.monotonic() - began
        print(
            f"{'ok ' if good else 'RED'} {threads} thread{'s' * (threads > 1)}, {what}: "
            f"{seconds:.0f} s",
            flush=True,
        )
        for name, value in off.items():
            print(f"    {name}: off by {value:.2g}")
        if tests is not None and tests.returncode:
            print(tests.stdout)
    return red


if __name__ == "__main__":
    sys.exit(main())
