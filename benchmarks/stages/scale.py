"""What a run costs: processor seconds and memory of `evaluate` against the number of samples."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from benchmarks import rooms
from benchmarks.code import ROOT
from benchmarks.stage import Row, Stage, Unit, here

NETWORK = "cifar_cnn_a_adv"
COUNTS = (100, 1000, 10000)
PASSES = 20
PROGRAM = """
import json, resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import wassail as ws
from benchmarks.networks.load import data_of, images, load
name, count, passes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = load(name)
x, y = images(data_of(name), count)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
threats = [ws.Threat("inf", order, "2/255") for order in (1, 2, "inf")]
ws.evaluate(model, (x, y), threats, ("nearest",), passes=passes, progress=False)
used = time.process_time() - began
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": used, "before": before / 1024, "after": after / 1024}))
"""


def units() -> list[Unit]:
    """One number of samples each."""
    files = (NETWORK, "cifar10")
    return [Unit(f"{NETWORK}/{n}", partial(run, n), networks=files) for n in COUNTS]


def run(count: int) -> Row:
    """A whole evaluation in a process of its own: its memory is its own, too."""
    command = [sys.executable, "-c", PROGRAM, NETWORK, str(count), str(PASSES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    answer: Row = json.loads(done.stdout.splitlines()[-1])
    return answer


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each number of samples."""
    rows = [
        {"id": f"{NETWORK}-{n}", "network": NETWORK, "samples": n, "passes": PASSES}
        | done[f"{NETWORK}/{n}"]
        | {"each": 1000 * done[f"{NETWORK}/{n}"]["seconds"] / n}
        for n in COUNTS
        if f"{NETWORK}/{n}" in done
    ]
    return {"evaluate": rows}


STAGE = Stage(
    name="scale",
    about="Processor seconds and memory of an evaluation.",
    depends=rooms.EVALUATION,
    units=units,
    tables=tables,
    source=here(),
)
