"""Fuzz every reader: `make fuzz SECONDS=3600`.

Small files of every kind are made, changed by what knows their structure (`mutate.py`), and read by
processes that are forked from one with all libraries loaded, a few dozen inputs each. A reader may
accept a file or refuse it with an InputError. Everything else is a finding: a signal, another
exception, more than ten seconds of the processor, more than a gigabyte of memory. Inputs are
numbered: the seed and the number determine an input. Findings are printed with the way to run them
again.

Model files are read as the first pass reads them (`wassail.zoo.trial`), with its limits. Where
onnxruntime runs a file, the product has it do so in a process that may crash: such ends are counted
apart.
"""

import argparse
import faulthandler
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if __package__ is None or not __package__:
    sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from fuzz import build, mutate  # noqa: E402
from wassail.cli import parser as parser_module  # noqa: E402
from wassail.errors import InputError  # noqa: E402
from wassail.evaluation.store import encoding, store  # noqa: E402
from wassail.evaluation.store import identity as identity_module  # noqa: E402
from wassail.zoo import (  # noqa: E402
    difference,
    exported,  # noqa: F401
    hubs,
    images,  # noqa: F401
    onnx,
    operators,
    rules,
    trial,
    weights,
)
from wassail.zoo.datasets import open_data  # noqa: E402

# what one input may take
SECONDS = 10.0
MEMORY = 1 << 30
ROOM = (
    6 << 30
    # bytes of addresses: more than allowed, so that what takes too much is seen and the machine
    # survives
)
WAIT = (
    120.0  # seconds of the clock, for what sleeps: what computes slowly on a busy machine has more
)

Random = random.Random


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    Args:
        make: functions that write a good one into a folder and return its path. change: write a
        changed one, in place. read: open it and use it. limits: "first pass" for what the product
        reads in a process with limits; "contained" if that may also crash. weight: how often,
        relative to the others.
    """

    make: list[Callable[[Path], Path]]
    change: Callable[[Path, Random], None]
    read: Callable[[Path], None]
    limits: str = ""
    weight: float = 1.0


def in_place(change: mutate.Change) -> Callable[[Path, Random], None]:
    def run(path: Path, rng: Random) -> None:
        path.write_bytes(change(path.read_bytes(), rng))

    return run


def any_file(change: mutate.Change) -> Callable[[Path, Random], None]:
    """Change one of the files in a folder, or make something else of it."""

    def run(folder: Path, rng: Random) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = rng.choice(files)
        match rng.randrange(30):
            case 0:
                path.unlink()
            case 1:
                path.unlink()
                path.mkdir()
            case 2:
                path.unlink()
                os.mkfifo(path)
            case 3:
                path.unlink()
                path.symlink_to(rng.choice((folder, path.parent, path, Path("/dev/zero"), *files)))
            case 4:
                (path.parent / "more").symlink_to(rng.choice((folder, path.parent)))
            case 5:
                path.write_bytes(rng.choice(files).read_bytes())
            case _:
                path.write_bytes(change(path.read_bytes(), rng))

    return run


def use_data(path: Path) -> None:
    for n in (None, 2):
        data = open_data(path, n)
        for start in range(0, min(len(data), 64), 16):
            data.read(start, start + 16)
        data.ids(0, 16)
        json.dumps(data.info)


def use_images(path: Path) -> None:
    listed = path / "ids.txt"
    ids = listed if listed.exists() else None
    for preprocessing in (None, "Res6Crop4", "Crop9Gray"):
        data = open_data(path, ids=ids, preprocessing=preprocessing)
        for place in range(len(data)):
            with suppress(InputError):  # one bad image does not hide the others
                data.read(place, place + 1)


def use_weights(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    weights.fill(model, path, "net")
    weights.fingerprint(model)


def use_checkpoint(path: Path) -> None:
    hubs._safe_checkpoint(path)
    use_weights(path)


def use_onnx(path: Path) -> None:
    difference.forth_and_back(onnx.load_onnx(path))


# ---- Runs
# --------------------------------------------------------------------------------------------------

CORPUS = Path()  # good files, written when the fuzzer starts


def good_run(folder: Path) -> Path:
    command = [
        "evaluate",
        "digits-mlp",
        "--eps",
        "0.05",
        "-n",
        "4",
        "--attacks",
        "wda",
        "nearest",
        "--certify",
        "crown",
        "--threads",
        "1",
        "--quiet",
        "--no-look",
        "--out",
        str(folder / "run"),
    ]
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        if parser_module.main(command):
            raise SystemExit("no run could be made")
    return folder / "run"


def change_run(folder: Path, rng: Random) -> None:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in (".json", ".safetensors", ".jsonl")
    )
    path = rng.choice(files)
    if rng.random() < 0.1:
        any_file(mutate.raw)(folder, rng)  # links and pipes among them: no checksum hides those
        return
    if path.suffix == ".safetensors" and rng.random() < 0.8:
        with suppress(Exception):  # what cannot be packed stays as it was
            change_chunk(path, rng)
    else:
        changes = {
            ".json": mutate.json_file,
            ".jsonl": mutate.lines,
            ".safetensors": mutate.safetensors,
        }
        path.write_bytes(changes[path.suffix](path.read_bytes(), rng))
    if rng.random() < 0.85:
        with suppress(Exception):
            forge(folder)


def change_chunk(path: Path, rng: Random) -> None:
    """Other numbers in a chunk, with the right checksum."""
    tensors = load_file(path)
    metadata = chunk_metadata(path)
    name = rng.choice(sorted(tensors)) if tensors else ""
    if not name or rng.random() < 0.2:
        key = rng.choice(sorted(metadata))
        metadata[key] = rng.choice(
            (*map(str, mutate.VALUES), metadata[rng.choice(sorted(metadata))])
        )
    else:
        value = tensors[name].clone()
        match rng.randrange(6):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = (
                    value[: rng.randrange(len(value) + 1)] if value.ndim else value.reshape(1)
                )
            case 2:
                tensors[name] = value.to(
                    rng.choice((torch.float32, torch.float64, torch.int64, torch.bool))
                )
            case _:
                special = (0.0, -1.0, 1.0, 1e308, -1e308, float("inf"), float("nan"), 1e-320, 255.0)
                flat = value.reshape(-1)
                for _ in range(rng.choice((1, 1, 3, len(flat)))):
                    with suppress(RuntimeError, OverflowError, IndexError, ValueError):
                        flat[rng.randrange(max(len(flat), 1))] = rng.choice(special)
                tensors[name] = flat.reshape(value.shape)
    write_chunk(path, metadata, tensors)


def chunk_metadata(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return {key: value for key, value in header["__metadata__"].items() if key != "sha256"}


def write_chunk(path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    header, parts = encoding.packed(
        metadata, {name: value.contiguous() for name, value in tensors.items()}
    )
    path.write_bytes(header + b"".join(bytes(part) for part in parts))


def forge(folder: Path) -> None:
    """Make every checksum of the run right."""
    config = store._parse((folder / "config.json").read_text())["config"]
    identity = identity_module.identity(config)
    for path in sorted(folder.rglob("*.safetensors")):
        metadata = chunk_metadata(path)
        if metadata.get("run") != identity:
            write_chunk(path, {**metadata, "run": identity}, load_file(path))
    results = folder / "results"
    files = {}
    for path in sorted(results.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            data = path.read_bytes()
            about = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            files[path.relative_to(results).as_posix()] = about
    (results / "manifest.json").write_text(
        json.dumps({"files": files, "format": 1}, indent=1, sort_keys=True) + "\n"
    )


def use_run(folder: Path) -> None:
    """Two of the things that are done with a run, by turns."""
    good = CORPUS / "run" / "0" / "run"
    uses: list[Callable[[], Any]] = [
        lambda: quiet(["report", str(folder), "-o", str(folder.parent / "page.html")]),
        lambda: quiet(["export", str(folder), "csv", "npz"]),
        lambda: quiet(
            ["compare", str(folder), str(good), "-o", str(folder.parent / "compare.html")]
        ),
        lambda: quiet(["verify", str(folder), "digits-mlp", "--seed", "0"]),
    ]
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    turn = int(hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest(), 16)
    refusals = []
    for use in (uses[turn % 4], uses[turn // 4 % 4]):
        try:
            use()
        except InputError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def quiet(arguments: list[str]) -> None:
    """A command without its words, its refusal as an error."""
    options = parser_module._parser().parse_args(arguments)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        options.run(options)


# ---- All readers
# --------------------------------------------------------------------------------------------------


def with_ids(folder: Path) -> Path:
    path = build.image_folder(folder / "images")
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.*"))
    (path / "ids.txt").write_text("\n".join(files))
    return path


def change_images(folder: Path, rng: Random) -> None:
    listed = folder / "ids.txt"
    if listed.exists() and rng.random() < 0.7:
        in_place(mutate.lines)(listed, rng)
    else:
        any_file(mutate.image)(folder, rng)


def tensors_file(path: Path) -> Path:
    x, y = build.samples()
    save_file({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, path)
    return path


def state_file(path: Path) -> Path:
    state = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).state_dict()
    save_file(dict(state), path)
    return path


def idx_folder(folder: Path, packed: bool) -> Path:
    (folder / "idx").mkdir()
    build.idx(folder / "idx", packed)
    return folder / "idx"


def binary_cifar(folder: Path) -> Path:
    target = folder / "cifar-10-batches-bin"
    target.mkdir()
    (target / "test_batch.bin").write_bytes(
        np.random.default_rng(0).integers(0, 10, 2 * 3073, dtype=np.uint8).tobytes()
    )
    (target / "batches.meta.txt").write_text("\n".join(f"class {k}" for k in range(10)))
    return target


PROGRAMS: list[Callable[[Path], Path]] = [
    lambda f: build.shapes(f / "net.pt2"),
    lambda f: build.convolutional(f / "net.pt2"),
    lambda f: build.convolutional(f / "net.pt2", 1),
    lambda f: build.convolutional(f / "net.pt2", 3),
]
GRAPHS: list[Callable[[Path], Path]] = [
    lambda f: build.onnx_model(f / "net.onnx", "dense"),
    lambda f: build.onnx_model(f / "net.onnx", "convolutional"),
]
READERS: dict[str, Reader] = {
    "npz": Reader(
        [lambda f: build.npz(f / "d.npz"), lambda f: build.npz(f / "d.npz", True)],
        in_place(mutate.npz),
        use_data,
        weight=2,
    ),
    "safetensors": Reader(
        [lambda f: tensors_file(f / "d.safetensors")], in_place(mutate.safetensors), use_data
    ),
    "idx": Reader([lambda f: idx_folder(f, False)], any_file(mutate.raw), use_data),
    "idx.gz": Reader(
        [lambda f: idx_folder(f, True)], any_file(mutate.zipped(mutate.raw)), use_data
    ),
    "cifar pickles": Reader(
        [lambda f: build.cifar(f / "cifar-10-batches-py")],
        any_file(mutate.pickled),
        use_data,
        weight=2,
    ),
    "cifar binary": Reader([binary_cifar], any_file(mutate.raw), use_data, weight=0.5),
    "images and ids": Reader(
        [lambda f: build.image_folder(f / "images")] * 2 + [with_ids],
        change_images,
        use_images,
        weight=2,
    ),
    "weights .pt": Reader(
        [lambda f: build.state(f / "w.pt")], in_place(mutate.pt), use_weights, weight=2
    ),
    "weights .pt, old": Reader(
        [lambda f: build.state(f / "w.pt", _use_new_zipfile_serialization=False)],
        in_place(mutate.pickled),
        use_weights,
    ),
    "checkpoint": Reader([lambda f: build.state(f / "w.pt")], in_place(mutate.pt), use_checkpoint),
    "weights .safetensors": Reader(
        [lambda f: state_file(f / "w.safetensors")], in_place(mutate.safetensors), use_weights
    ),
    "pt2": Reader(
        PROGRAMS, in_place(mutate.pt2), lambda p: run_first_pass(p, "pt2"), "first pass", 6
    ),
    "onnx": Reader(GRAPHS, in_place(mutate.protobuf), use_onnx, "first pass", 4),
    "onnx in onnxruntime": Reader(
        GRAPHS, in_place(mutate.protobuf), lambda p: run_first_pass(p, "onnx"), "contained", 2
    ),
    "run": Reader([good_run], change_run, use_run, weight=3),
}


def run_first_pass(path: Path, kind: str) -> None:
    trial.read_and_run(path, kind)


def know_operators() -> None:
    """Every operator of torch's that takes and returns plain values: the reader has to refuse
    most of them.
    """
    listed = sorted(operators.NAMES)
    others = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            others.append(f"{name}.{overload}")
    ruled = [
        name for name in listed if name.split(".")[0] in rules.RULES
    ]  # where there is something to get wrong
    mutate.OPERATORS[:] = (
        sorted(others)
        + listed * (2 * len(others) // len(listed))
        + ruled * (3 * len(others) // len(ruled))
    )
    for name in set(mutate.OPERATORS):
        packet, overload = name.split(".")
        schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
        arguments = schema.arguments
        mutate.SCHEMAS[name] = [
            (entry.name, str(entry.real_type), entry.has_default_value()) for entry in arguments
        ]
        mutate.RESULTS[name] = [str(entry.type) for entry in schema.returns]


# ---- In a worker
# --------------------------------------------------------------------------------------------------


def write_corpus(only: str | None) -> None:
    for kind, reader in READERS.items():
        if only in (None, kind):
            for place, make in enumerate(reader.make):
                folder = CORPUS / kind / str(place)
                folder.mkdir(parents=True)
                READERS[kind].read(
                    copy(make(folder), CORPUS / "tried")
                )  # and what is loaded late is loaded before the fork
                shutil.rmtree(CORPUS / "tried")


def copy(path: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    return target


def prepare(index: int, seed: int, folder: Path, only: str | None) -> tuple[str, Path]:
    """The kind and the path of input number `index`."""
    rng = Random(f"{seed} {index}")
    kinds = list(READERS) if only is None else [only]
    kind = rng.choices(kinds, [READERS[name].weight for name in kinds])[0]
    (made,) = (CORPUS / kind / str(rng.randrange(len(READERS[kind].make)))).iterdir()
    path = copy(made, folder)
    if rng.random() > 0.02:  # a few stay good, and those that a change does not fit
        with suppress(Exception):
            READERS[kind].change(path, rng)
    return kind, path


def set_limits(kind: str) -> None:
    """Soft limits for one input: those of the first pass where the product has one, else room
    to be seen to take too much.
    """
    passes = bool(READERS[kind].limits)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + int(trial.SECONDS if passes else SECONDS + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (trial.MEMORY if passes else ROOM)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))


def worker(
    batch: list[tuple[int, tuple[str, Path] | None]],
    options: argparse.Namespace,
    work: Path,
    answers: int,
) -> None:
    """Read some inputs in this process, which ends here; every begin and end is written down at
    once.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    warnings.simplefilter("ignore")
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def say(**words: Any) -> None:
        os.write(answers, json.dumps(words).encode() + b"\n")

    for index, given in batch:
        folder = work / f"input{index}"
        folder.mkdir()
        kind, path = given or prepare(index, options.seed, folder, options.only)
        say(index=index, kind=kind, end="begun")
        before = resource.getrusage(resource.RUSAGE_SELF)
        end = "accepted"
        text = ""
        try:
            set_limits(kind)
            READERS[kind].read(path)
        except InputError as error:
            end = "refused"
            text = str(error)
        except BaseException as error:
            end = "foreign"
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        say(
            index=index,
            kind=kind,
            end=end,
            text=text,
            seconds=seconds,
            memory=after.ru_maxrss * 1024,
        )
        if end == "foreign" or seconds > SECONDS or after.ru_maxrss * 1024 > MEMORY:
            break  # the folder is looked at before it goes
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


# ---- The fuzzer
# --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened to the inputs of one kind."""

    ends: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    largest: int = 0


ENDS = ("accepted", "refused", "out of time", "contained", "signal", "foreign", "slow", "large")
FINDINGS = ENDS[4:]


def judge(found: dict[str, Any], status: int) -> str:
    """How an input ended, in one word; `status` is the worker's where it ended with it."""
    limits = READERS[found["kind"]].limits
    if found["end"] == "begun":
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if limits and number == signal.SIGXCPU:
            return "out of time"
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return "slow"
        return "contained" if limits == "contained" else "signal"
    if found["end"] == "foreign":
        return "foreign"
    if found["seconds"] > SECONDS:
        return "slow"
    return "large" if found["memory"] > MEMORY else str(found["end"])


def inputs(
    options: argparse.Namespace, work: Path
) -> Iterator[tuple[int, tuple[str, Path] | None]]:
    """The regressions first, then numbers without an end."""
    if options.first == 0 and options.only is None:
        for place, path in enumerate(sorted((HERE / "regressions").glob("*--*"))):
            kind = path.name.split("--")[0].replace("_", " ")
            target = work / f"regression{place}"
            target.mkdir()
            copied = target / path.name.split("--")[1]
            shutil.copytree(path, copied, symlinks=True) if path.is_dir() else shutil.copy(
                path, copied
            )
            yield -1 - place, (kind, copied)
    index = options.first
    while options.count is None or index < options.first + options.count:
        yield index, None
        index += 1


BATCH = 40  # inputs for each worker


@dataclass
class Running:
    """A worker: the end of its pipe, what it has still to do, what it said last."""

    pid: int
    answers: int
    batch: list[tuple[int, tuple[str, Path] | None]]
    rest: bytes = b""
    last: dict[str, Any] | None = None
    begun: float = 0.0
    done: int = 0


def fuzz(options: argparse.Namespace, work: Path) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    running: dict[int, Running] = {}
    stream = inputs(options, work)
    waiting: list[tuple[int, tuple[str, Path] | None]] = []
    stop = time.monotonic() + options.seconds
    shown = time.monotonic()
    while True:
        late = time.monotonic() > stop
        while len(running) < options.jobs and not late:
            batch = waiting[:BATCH]
            waiting = waiting[BATCH:]
            batch += islice(stream, BATCH - len(batch))
            if not batch:
                break
            started = start(batch, options, work)
            running[started.answers] = started
        if not running:
            return tallies
        for answers in select.select(list(running), [], [], 1.0)[0]:
            one = running[answers]
            data = os.read(answers, 1 << 16)
            one.rest += data
            *lines, one.rest = one.rest.split(b"\n")
            for line in lines:
                one.last = json.loads(line)
                one.begun = time.monotonic()
                if one.last["end"] != "begun":
                    one.done += 1
                    finish(one.last, 0, options, work, tallies)
            if not data:
                _, status, _ = os.wait4(one.pid, 0)
                os.close(answers)
                del running[answers]
                if one.last is not None and one.last["end"] == "begun":
                    one.done += 1
                    finish(one.last, status, options, work, tallies)
                elif not lines and not one.done:
                    raise SystemExit(f"a worker ended with status {status} before its first input")
                waiting += one.batch[one.done :]
        for one in running.values():
            waited = time.monotonic() - one.begun
            between = late and one.last is not None and one.last["end"] != "begun"
            if between or waited > 20 * WAIT or (waited > WAIT and sleeps(one.pid)):
                os.kill(one.pid, signal.SIGKILL)
                one.begun = time.monotonic()
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(table(tallies), flush=True)


def sleeps(pid: int) -> bool:
    """Whether a process waits for something else than the processor."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "R"
    return False


def start(
    batch: list[tuple[int, tuple[str, Path] | None]], options: argparse.Namespace, work: Path
) -> Running:
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ours)
            worker(batch, options, work, theirs)
        finally:
            os._exit(3)
    os.close(theirs)
    return Running(pid, ours, batch, begun=time.monotonic())


def finish(
    found: dict[str, Any],
    status: int,
    options: argparse.Namespace,
    work: Path,
    tallies: dict[str, Tally],
) -> None:
    end = judge(found, status)
    tally = tallies.setdefault(found["kind"], Tally())
    tally.ends[end] += 1
    tally.slowest = max(tally.slowest, found.get("seconds", 0.0))
    tally.largest = max(tally.largest, found.get("memory", 0))
    index = found["index"]
    folder = work / f"input{index}"
    if end in FINDINGS:
        text = f"status {status}" if found["end"] == "begun" else found["text"]
        print(f"{end}: input {index} ({found['kind']}), {text}")
        only = f" --only {options.only!r}" if options.only else ""
        print(f"  again: --seed {options.seed} --first {index} --count 1{only}", flush=True)
        if options.keep is not None:
            with suppress(OSError, shutil.Error):
                shutil.copytree(
                    folder,
                    options.keep / f"{end}-{options.seed}-{index}",
                    symlinks=True,
                    dirs_exist_ok=True,
                )
    if found["end"] == "begun" or end in FINDINGS:
        shutil.rmtree(folder, ignore_errors=True)


def table(tallies: dict[str, Tally]) -> str:
    rows = [
        f"{'':22}{'inputs':>9}"
        + "".join(f"{end:>12}" for end in ENDS)
        + f"{'most s':>9}{'most MB':>9}"
    ]
    total = Tally()
    for kind, tally in [*sorted(tallies.items()), ("all", total)]:
        rows.append(
            f"{kind:22}{sum(tally.ends.values()):>9}"
            + "".join(f"{tally.ends[end]:>12}" for end in ENDS)
            + f"{tally.slowest:>9.1f}{tally.largest >> 20:>9}"
        )
        total.ends.update(tally.ends)
        total.slowest = max(total.slowest, tally.slowest)
        total.largest = max(total.largest, tally.largest)
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz every reader of files.")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of the clock (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=None, help="inputs, at most")
    parser.add_argument("--only", choices=list(READERS), default=None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, default=None, help="a folder for what is found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    know_operators()
    difference.import_onnx()
    with tempfile.TemporaryDirectory(prefix="wassail-fuzz-", ignore_cleanup_errors=True) as folder:
        global CORPUS
        CORPUS = Path(folder, "corpus")
        write_corpus(options.only)
        tallies = fuzz(options, Path(folder))
    print(table(tallies))
    found = sum(tally.ends[end] for tally in tallies.values() for end in FINDINGS)
    print(f"seed {options.seed}, {options.seconds:g} s, {options.jobs} jobs: {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
