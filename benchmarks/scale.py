"""Evaluation on one and on two workers of a local Ray cluster, and what the measured times say
about sixty-four.

    python benchmarks/scale.py > docs/scale.md              # vnn_resnet2b, 500 images, one thread a
    worker; a few minutes python benchmarks/scale.py --images 60 --passes 50      # a quick look

Times are of `evaluate` with the workers ready; what it takes to get them ready is told apart. Run
it on an idle machine.
"""

import argparse
import hashlib
import heapq
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import wassail as ws
from wassail.evaluation.cluster import Ray
from wassail.evaluation.store.store import Store
from wassail.evaluation.work import Local
from zoo_path import images, load

AIM = 0.6
IMAGENET = 50_000
SHAPE = (3, 224, 224)
CHUNK = 100  # images, of the extrapolation: the default of `evaluate`
CROWD = (1, 2, 8, 64)


class Timed:
    """A runner that notes when results come and how long whoever asked is busy with them."""

    def __init__(self, runner) -> None:
        self.runner = runner
        self.workers = runner.workers
        self.about = runner.about
        self.busy = []

    def run(self, worker, tasks, tick) -> Iterator:
        for result in self.runner.run(worker, tasks, tick):
            begun = time.perf_counter()
            yield result
            self.busy.append(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vnn_resnet2b")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--chunk", type=int, default=25)
    parser.add_argument("--passes", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, dataset = load(options.network)
    data = images(dataset, options.images)
    threats = [ws.Threat("inf", 1, "2/255")]
    attacks = {"wda++": {}, "nearest": {"passes": options.passes}}

    with tempfile.TemporaryDirectory() as folder:

        def evaluate(name: str, runner) -> tuple[float, Timed]:
            timed = Timed(runner)
            begun = time.perf_counter()
            ws.evaluate(
                model,
                data,
                threats,
                attacks,
                out=Path(folder, name),
                chunk=options.chunk,
                runner=timed,
            )
            return time.perf_counter() - begun, timed

        took = {}
        busy = {}
        ready = {}
        took["this process"], _ = evaluate("local", Local())
        for workers in (1, 2):
            name = crowd(workers)
            begun = time.perf_counter()
            with Ray(workers=workers) as runner:
                few = (data[0][: 4 * workers], data[1][: 4 * workers])
                ws.evaluate(model, few, threats, ("wda++",), chunk=1, look=False, runner=runner)
                runner._link.ray.get([actor.__ray_ready__.remote() for actor in runner._actors])
                ready[name] = time.perf_counter() - begun
                took[name], timed = evaluate(name, runner)
                busy[name] = timed.busy
                if workers == 2:
                    trip = round_trip(runner)
                    heavy = shipping(Path(folder))
        same = (
            len({fingerprint(Path(folder, name)) for name in ("local", "1 worker", "2 workers")})
            == 1
        )
        stages = chunk_times(Path(folder, "1 worker"))

    ratio = took["2 workers"] / took["1 worker"]
    print("# More than one worker\n")
    print(
        f"Command: `python benchmarks/scale.py --images {options.images} --chunk {options.chunk} "
        f"--passes {options.passes}`."
    )
    print(
        f"`{options.network}`, {options.images} images in chunks of {options.chunk}: WDA++, "
        f"nearest ({options.passes} passes)"
    )
    print(
        f"and all checks, one thread a worker, {os.cpu_count()} processors, everything on one "
        "machine.\n"
    )
    print("| who | seconds | against one worker | seconds to get ready |\n|---|---|---|---|")
    for name, seconds in took.items():
        print(
            f"| {name} | {seconds:.1f} | {seconds / took['1 worker']:.2f} | "
            f"{ready.get(name, 0.0):.1f} |"
        )
    print(
        f"\nTwo workers take {ratio:.2f} of the time of one (aim: at most {AIM}). The three "
        "runs' files are",
        end=" ",
    )
    print("the same to the byte." if same else "NOT THE SAME.")
    print(
        "To get ready is to start Ray, two interpreters with PyTorch and the model, and a first "
        "task on each.\n"
    )
    print("## Where the time goes\n")
    print("Seconds inside the worker for one chunk, by stage, one worker:\n")
    print("| stage | chunks | mean | least | most | deviation |\n|---|---|---|---|---|---|")
    for name, times in stages.items():
        spread = statistics.pstdev(times)
        print(
            f"| {name} | {len(times)} | {statistics.mean(times):.3f} | {min(times):.3f} | "
            f"{max(times):.3f} | {spread:.3f} |"
        )
    inside = sum(map(sum, stages.values()))
    print(
        f"\nIn all {inside:.1f} s of {took['1 worker']:.1f} s. The rest, for each of "
        f"{sum(map(len, stages.values()))} tasks:"
    )
    store = statistics.mean(busy["1 worker"])
    print(
        f"{1000 * store:.1f} ms to put a result on the disk, where the run was started, and "
        f"{1000 * trip:.1f} ms to hand out"
    )
    print(
        f"a task and take back its result. For {CHUNK} samples of shape {SHAPE} both together "
        f"take {heavy:.2f} s.\n"
    )
    model_of_scale(stages, took, ready, store + trip, heavy, options)


def fingerprint(folder: Path) -> str:
    files = sorted(path for path in (folder / "results").rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def chunk_times(folder: Path) -> dict[str, list[float]]:
    stages: dict[str, list[float]] = {}
    for event in Store.open(folder).events():
        if event.get("event") == "done":
            kind, _, rest = event["unit"].partition("@")
            stages.setdefault(rest if kind == "attack" else kind, []).append(event["seconds"])
    return stages


def round_trip(runner: Ray, times: int = 200) -> float:
    """Seconds for one task that does next to nothing, to a worker and back, one after the other."""
    actor = runner._actors[0]
    ray = runner._link.ray
    begun = time.perf_counter()
    for _ in range(times):
        ray.get(actor.__ray_ready__.remote())
    return (time.perf_counter() - begun) / times


def shipping(folder: Path) -> float:
    """Seconds that a chunk of ImageNet's size costs where the run was started: read, sent, its
    result fetched and stored.
    """
    import ray

    x, y = torch.rand(CHUNK, *SHAPE), torch.zeros(CHUNK).long()
    begun = time.perf_counter()
    ray.get(ray.put((x, y)))
    with Store.create(folder / "heavy", {}) as store:
        store.put("attack", 0, {"points": x}, {})
    return time.perf_counter() - begun


def makespan(times: list[float], workers: int, serial: float) -> float:
    """One stage: whoever is free takes the next task, after the driver has seen to it for
    `serial` seconds.
    """
    free = [0.0] * workers
    driver = 0.0
    last = 0.0
    heapq.heapify(free)
    for seconds in times:
        driver = max(driver, heapq.heappop(free)) + serial
        heapq.heappush(free, driver + seconds)
        last = max(last, driver + seconds)
    return last


def model_of_scale(stages, took, ready, light: float, heavy: float, options) -> None:
    """Simulated from the measured chunk times: tasks go one by one to whoever is free, every
    stage waits for its last chunk.
    """
    draw = random.Random(0)

    def drawn(dear: float, size: int) -> list[list[float]]:
        scale = dear * size / options.chunk
        chunks = -(-IMAGENET // size)
        return [
            [draw.choice(seen) * scale for _ in range(chunks if len(seen) > 1 else 1)]
            for seen in stages.values()
        ]

    def total(work: list[list[float]], workers: int, serial: float) -> float:
        return sum(makespan(stage, workers, serial) for stage in work)

    measured = [
        f"{crowd(w)} {total(list(stages.values()), w, light):.1f} s (measured "
        f"{took[crowd(w)]:.1f} s)"
        for w in (1, 2)
    ]
    print(MODEL.format(measured=", ".join(measured)))
    print(f"| {IMAGENET:,} images | " + " | ".join(crowd(w) for w in CROWD) + " |")
    print("|---|" + "---|" * len(CROWD))
    rows = [(f"`{options.network}`, CIFAR's size", 1, CHUNK, light)]
    rows += [
        (f"ImageNet's size, a network {dear} times as dear", dear, CHUNK, heavy)
        for dear in (10, 100, 1000)
    ]
    rows += [("the same, in chunks of a quarter", 1000, CHUNK // 4, heavy / 4)]
    for name, dear, size, serial in rows:
        work = drawn(dear, size)
        spans = [ready[crowd(2)] + total(work, w, serial) for w in CROWD]
        cells = [f"{shown(t)} ({100 * spans[0] / (w * t):.0f} %)" for w, t in zip(CROWD, spans)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(LIMIT.format(heavy=heavy, most=CROWD[-1], least=shown(CROWD[-1] * heavy)))


MODEL = """## On more workers: a model

This part is a simulation. Chunk times are drawn from those measured above, a task costs the driver
the time measured above and goes to whoever is free, every stage waits for its last chunk. It
ignores that workers on one machine share its memory, and that a network is slower than loopback.
Held against the measurement: {measured}.
"""
LIMIT = """
Chunks are of 100 images. In brackets the efficiency: the time of one worker over workers times
time. A driver that needs
{heavy:.2f} s for a chunk of ImageNet's size keeps {most} workers busy only if
a chunk takes each longer than {least}."""


def crowd(workers: int) -> str:
    return f"{workers} worker" + "s" * (workers > 1)


def shown(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
