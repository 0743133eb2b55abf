"""Compare the processor time of this code with that of another commit, in one run on this machine.

    python scripts/pace.py COMMIT [--repeats 3]

Five jobs run by turns with the package as it was at COMMIT and as it is in the working tree, each
in a process of its own with one thread. Printed for each job: the least processor time of both, and
their ratio. The exit code is 1 if a ratio is above the limit.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.05
JOBS = {
    "nearest": "ws.nearest(model, x[:500], y[:500], 'inf', (0, 1), passes=300)",
    "crown": "ws.radii(model, x[:30], y[:30], 'inf', (0, 1), 'crown')",
    "branch": "ws.radii(small, x[:3], y[:3], 'inf', (0, 1), 'branch')",
    "lipschitz": "ws.lipschitz(tiny, 2, None, method='exact', shape=(6,))",
    "evaluate": "ws.evaluate(model, (x[:500], y[:500]), threats, ('wda++', 'apgd-ce'), passes=300)",
}
SETUP = """
import time, warnings
import torch
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
import wassail as ws
x, y = ws.zoo.data("digits")
model = ws.zoo.load("digits-cnn-adv")
small = ws.zoo.load("digits-mlp-adv")
torch.manual_seed(1)
layers = [torch.nn.Linear(6, 14), torch.nn.ReLU(), torch.nn.Linear(14, 14), torch.nn.ReLU()]
tiny = torch.nn.Sequential(*layers, torch.nn.Linear(14, 3)).double()
threats = [ws.Threat("inf", order, 0.05) for order in (1, "inf")]
ws.nearest(small, x[:2], y[:2], passes=10)
ws.radii(small, x[:1], y[:1], method="crown")
begun = time.process_time()
"""


def main() -> None:
    """Time every job on both sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=tuple(JOBS), default=None)
    options = parser.parse_args()
    slow = False
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", options.commit, "src"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        sides = {"before": Path(folder) / "src", "now": ROOT / "src"}
        print(f"{'job':12}{'before s':>10}{'now s':>10}{'ratio':>8}")
        for job in [options.only] if options.only else JOBS:
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(options.repeats):
                for side, source in sides.items():
                    times[side].append(seconds(source, JOBS[job]))
            before, now = (min(times[side]) for side in sides)
            print(f"{job:12}{before:10.2f}{now:10.2f}{now / before:8.3f}", flush=True)
            slow |= now > LIMIT * before
    sys.exit(1 if slow else 0)


def seconds(source: Path, job: str) -> float:
    """The processor time of one job with the package in this folder."""
    program = f"{SETUP}{job}\nprint(time.process_time() - begun)\n"
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
    )
    return float(found.stdout.split()[-1])


if __name__ == "__main__":
    main()
