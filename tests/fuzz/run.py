"""Fuzz every reader: `make fuzz`, or `make fuzz SECONDS=3600`.

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
import math
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
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if __package__ is None or not __package__:
    sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from fuzz import build, mutate  # noqa: E402
from wassail.cli import parser as parser_module  # noqa: E402
from wassail.cli.config import apply_config  # noqa: E402
from wassail.errors import InputError  # noqa: E402
from wassail.evaluation.landmarks import read_plain  # noqa: E402
from wassail.evaluation.run import Evaluation  # noqa: E402
from wassail.evaluation.sealing import check_seal, sealed  # noqa: E402
from wassail.evaluation.store import encoding, store  # noqa: E402
from wassail.evaluation.store import identity as identity_module  # noqa: E402
from wassail.evidence import pack  # noqa: E402
from wassail.evidence.statement import Statement  # noqa: E402
from wassail.evidence.verify import check_files  # noqa: E402
from wassail.evidence.verify import load as load_pack  # noqa: E402
from wassail.omega.answer import read_answer  # noqa: E402
from wassail.omega.check import check_answer  # noqa: E402
from wassail.omega.decide import decide_omega  # noqa: E402
from wassail.omega.property import read_omega  # noqa: E402
from wassail.report.card import model_card  # noqa: E402
from wassail.report.machine import as_json  # noqa: E402
from wassail.report.standing import standing  # noqa: E402
from wassail.vnnlib.property import Property  # noqa: E402
from wassail.zoo import data as builtin  # noqa: E402
from wassail.zoo import (  # noqa: E402
    difference,
    hubs,
    images,  # noqa: F401
    onnx,
    trial,
    weights,
)
from wassail.zoo.datasets import open_data  # noqa: E402
from wassail.zoo.features import Features  # noqa: E402
from wassail.zoo.files import reading  # noqa: E402
from wassail.zoo.points import read_points  # noqa: E402
from wassail.zoo.tables import read_box  # noqa: E402

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
    read: Callable[[Path], object]
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


def use_property(path: Path) -> None:
    found = Property.read(path)
    str(found), found.groups


def use_omega(folder: Path) -> None:
    """A property of a distribution is read, and decided with little work."""
    property_ = read_omega(folder / "omega.json")
    json.dumps(decide_omega(property_, effort=0.01).as_json(property_))


def use_omega_answer(folder: Path) -> None:
    property_ = read_omega(folder / "omega.json")
    check_answer(property_, read_answer(folder / "answer.json", property_), again=2)


def omega_answer(folder: Path, least: float) -> Path:
    """A property with its answer."""
    path = build.omega(folder / "omega", least)
    property_ = read_omega(path / "omega.json")
    answer = decide_omega(property_, effort=0.5)
    (path / "answer.json").write_text(json.dumps(answer.as_json(property_)))
    return path


def change_omega(folder: Path, rng: Random) -> None:
    name = "samples.safetensors" if rng.random() < 0.2 else "omega.json"
    change = mutate.json_file if name.endswith("json") else mutate.safetensors
    path = folder / name
    in_place(change)(path if path.exists() else folder / "omega.json", rng)


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
# What a changed file makes of forging; a mistake of the fuzzer's own raises something else.
UNREADABLE = (ValueError, KeyError, TypeError, OSError, RecursionError, SafetensorError, InputError)


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
        with suppress(InputError, RuntimeError):  # what cannot be packed stays as it was
            change_chunk(path, rng)
    else:
        changes = {
            ".json": mutate.json_file,
            ".jsonl": mutate.lines,
            ".safetensors": mutate.safetensors,
        }
        path.write_bytes(changes[path.suffix](path.read_bytes(), rng))
    if rng.random() < 0.85:
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
    metadata = header["__metadata__"]
    if not isinstance(metadata, dict):
        raise ValueError("no metadata")
    return {key: value for key, value in metadata.items() if key != "sha256"}


def write_chunk(path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    header, parts = encoding.packed(
        metadata, {name: value.contiguous() for name, value in tensors.items()}
    )
    path.write_bytes(header + b"".join(bytes(part) for part in parts))


def forge(folder: Path) -> bool:
    """Make every checksum of the run right; False where what was changed cannot be read as a run,
    so that no checksum can be.
    """
    try:
        content = json.loads((folder / "config.json").read_text())
        config = encoding.decode(content["config"])
        if not isinstance(config, dict):
            return False
        identity = identity_module.identity(config)
        content["run"] = identity
        (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
        for path in sorted(folder.rglob("*.safetensors")):
            metadata = chunk_metadata(path)
            if metadata.get("run") != identity:
                write_chunk(path, {**metadata, "run": identity}, load_file(path))
    except UNREADABLE:
        return False
    results = folder / "results"
    files = {}
    for path in sorted(results.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            data = path.read_bytes()
            about = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            files[path.relative_to(results).as_posix()] = about
    (results / "manifest.json").write_text(
        json.dumps({"files": files, "format": store.FORMAT}, indent=1, sort_keys=True) + "\n"
    )
    return True


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
        lambda: quiet(["board", str(folder), "-o", str(folder.parent / "site")]),
        lambda: as_json(Evaluation.load(folder)) and model_card(Evaluation.load(folder)),
    ]
    turn = int(digest_of(folder), 16)
    refusals = []
    size = len(uses)
    for use in (uses[turn % size], uses[turn // size % size]):
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


def digest_of(path: Path) -> str:
    """Of the names and contents of a file, or of all files in a folder."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        kind = "link" if file.is_symlink() else "file" if file.is_file() else "other"
        found.update(f"{kind} {file.relative_to(path.parent)}\n".encode(errors="replace"))
        found.update(file.read_bytes() if kind == "file" else b"")
    return found.hexdigest()


def good_smoothing(folder: Path) -> Path:
    command = "evaluate digits-mlp --smooth 0.1:draws=100 -n 3 --passes 12 --eps 0.05 0.1"
    command += f" --order 1 inf --threads 1 --quiet --out {folder / 'smoothed'}"
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        if parser_module.main(command.split()):
            raise SystemExit("no votes could be made")
    return folder / "smoothed"


def change_smoothing(folder: Path, rng: Random) -> None:
    if rng.random() < 0.1:
        any_file(mutate.raw)(folder, rng)
        return
    name = rng.choice(("smoothing.json",) * 3 + ("votes.safetensors", "attack.safetensors"))
    change = mutate.json_file if name.endswith("json") else mutate.safetensors
    in_place(change)(folder / name, rng)


def use_smoothing(folder: Path) -> None:
    page = str(folder.parent / "page.html")
    refusals = []
    for words in (
        ["report", str(folder), "-o", page],
        ["verify", str(folder), "digits-mlp", "--data", "digits", "--seed", "0", "-o", page],
        ["seal", str(folder)],
    ):
        try:
            quiet(words)
        except InputError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def good_seal(folder: Path) -> Path:
    """A sealed run: the seal alone is changed."""
    run = copy(CORPUS / "run" / "0" / "run", folder)
    quiet(["seal", str(run)])
    return run


def use_seal(folder: Path) -> None:
    check_seal(folder)
    standing(Evaluation.load(folder))


def good_pack(folder: Path) -> Path:
    """A pack around the run of the corpus."""
    place = folder / "pack"
    place.mkdir()
    shutil.copytree(CORPUS / "run" / "0" / "run", place / "run")
    x, y = (torch.as_tensor(part) for part in builtin("digits"))
    words = Statement("digits", "drawn", "noise", "grey", ("none",), ("accuracy>=0.1 clean",))
    pack.write_pack(place, words, (x[:6], y[:6]))
    (folder / "pack.zip").unlink()
    return place


def good_zip(folder: Path) -> Path:
    """The same pack as a zip file."""
    place = good_pack(folder)
    archive = pack.write_zip(place)
    shutil.rmtree(place)
    return archive


def change_pack(path: Path, rng: Random) -> None:
    """Another record, page or seal, mostly sealed anew; or other bytes of a zip file."""
    if path.is_file():
        in_place(mutate.raw)(path, rng)
        return
    if rng.random() < 0.15:
        any_file(mutate.raw)(path, rng)
        return
    change = {".json": mutate.json_file, ".npz": mutate.npz}
    records = (pack.RECORD,) * 4 + (pack.SHIFT,) * 2 + (pack.SETTINGS, "seal.json")
    file = path / rng.choice(records)
    in_place(change.get(file.suffix, mutate.lines))(file, rng)
    if rng.random() < 0.8 and file.name != "seal.json":
        with suppress(*UNREADABLE):
            run = Evaluation.load(path / "run")
            (path / "seal.json").write_text(sealed(pack.claim_of(path, run)))


def use_pack(path: Path) -> None:
    """What is done with a pack, without the proofs."""
    with pack.opened(path) as place:
        run = load_pack(place)
        check_files(place, run)
        pack.check_pack_seal(place, run)


def use_box(path: Path) -> None:
    for features in (None, ["a", "b", "c"]):
        with reading(path):
            box = read_box(path, features)
        Features(box.low, box.high, box.scale)


def use_points(path: Path) -> None:
    read_points(path)


def use_config(path: Path) -> None:
    parser = dict(parser_module.commands(parser_module._parser()))[("evaluate",)]
    apply_config(parser, str(path))
    with suppress(SystemExit):
        parser.parse_args([])


def use_feed(path: Path) -> None:
    """What a run keeps as JSON beside its numbers, and what it says of known shifts."""
    try:
        read_plain(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError("no landmarks.") from error  # as the reader of a run does


def text_file(folder: Path, text: str, name: str = "d.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def parquet_file(folder: Path) -> Path:
    import pandas

    frame = pandas.DataFrame({"a": [0.5, 1.5, 2.0], "b": [1, 2, 3], "label": ["x", "y", "x"]})
    frame.to_parquet(folder / "d.parquet")
    return folder / "d.parquet"


def box_file(folder: Path) -> Path:
    names = np.array(["a", "b", "c"])
    np.savez(folder / "box.npz", feature=names, low=np.zeros(3), high=np.ones(3), scale=np.ones(3))
    return folder / "box.npz"


def points_file(folder: Path) -> Path:
    np.savez(folder / "points.npz", x_adv=np.zeros((3, 4), dtype=np.float32))
    return folder / "points.npz"


OPTIONS = """\
# an evaluation
model = "digits-mlp"
eps = ["8/255", 0.05]
order = [1, "inf"]
data = "digits"
attacks = ["fgsm", "nearest"]
n = 4
seed = 3
no-look = true
certify = "crown"
out = "run"
require = ["accuracy>=0.5 at eps 2/255 proved"]
"""


def feed_file(folder: Path) -> Path:
    eps = {"1": 0.1, "2": 0.2, "inf": 0.3}
    mark = {"name": "jpeg-50", "norm": "inf", "accuracy": 0.5, "eps": eps, "exact": eps}
    (folder / "landmarks.json").write_text(json.dumps([mark, {**mark, "name": "blur-1"}]))
    return folder / "landmarks.json"


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


GRAPHS: list[Callable[[Path], Path]] = [
    lambda f: build.onnx_model(f / "net.onnx", "dense"),
    lambda f: build.onnx_model(f / "net.onnx", "convolutional"),
]
READERS: dict[str, Reader] = {
    "vnnlib": Reader(
        [lambda f: build.vnnlib(f / "p.vnnlib"), lambda f: build.vnnlib(f / "q.vnnlib", True)],
        in_place(mutate.expressions),
        use_property,
        weight=2,
    ),
    "omega": Reader(
        [lambda f: build.omega(f / "omega"), lambda f: build.omega(f / "omega", beside=True)],
        change_omega,
        use_omega,
    ),
    "omega answer": Reader(
        [lambda f: omega_answer(f, 0.9), lambda f: omega_answer(f, 0.1)],
        lambda p, rng: in_place(mutate.json_file)(p / "answer.json", rng),
        use_omega_answer,
    ),
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
    "onnx": Reader(GRAPHS, in_place(mutate.protobuf), use_onnx, "first pass", 4),
    "onnx in onnxruntime": Reader(
        GRAPHS, in_place(mutate.protobuf), trial.read_and_run, "contained", 2
    ),
    "run": Reader([good_run], change_run, use_run, weight=3),
    "seal": Reader(
        [good_seal], lambda p, rng: in_place(mutate.json_file)(p / "seal.json", rng), use_seal
    ),
    "pack": Reader([good_pack, good_zip], change_pack, use_pack, weight=2),
    "smoothing": Reader([good_smoothing], change_smoothing, use_smoothing, weight=2),
    "csv": Reader(
        [
            lambda f: text_file(f, "a,b,label\n0.5,1,x\n1.5,2,y\n2,3,x\n"),
            lambda f: text_file(f, '"a",b,y\n1e3,"2",0\n-1,0.25,1\n'),
        ],
        in_place(mutate.lines),
        use_data,
    ),
    "box": Reader([box_file], in_place(mutate.npz), use_box),
    "box .csv": Reader(
        [lambda f: text_file(f, "feature,low,high,scale\na,0,1,\nb,-1,2,0\nc,0,3,0.5\n")],
        in_place(mutate.lines),
        use_box,
    ),
    "points": Reader([points_file], in_place(mutate.npz), use_points),
    "toml": Reader(
        [lambda f: text_file(f, OPTIONS, "wassail.toml")], in_place(mutate.lines), use_config
    ),
    "feed": Reader([feed_file], in_place(mutate.json_file), use_feed),
}
# Without its libraries a second CSV stands for it, so that an input has the same number everywhere.
READERS["parquet"] = (
    Reader([parquet_file], in_place(mutate.raw), use_data)
    if find_spec("pyarrow") is not None and find_spec("pandas") is not None
    else READERS["csv"]
)


OWN = "the fuzzer itself"  # the kind of its mistakes
# What a change raises that does not fit a file; anything else is a mistake of the fuzzer's own.
UNFIT = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    OSError,
    RecursionError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)

# ---- In a worker
# --------------------------------------------------------------------------------------------------


NEED_RUN = ("seal", "pack")  # kinds whose good files are made of a run


def write_corpus(only: str | None) -> None:
    needed = {only, "run"} if only in NEED_RUN else {only}
    for kind, reader in READERS.items():
        if only is None or kind in needed:
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


def prepare(index: int, seed: int, folder: Path, only: str | None) -> tuple[str, Path, bool]:
    """The kind and the path of input number `index`, and whether it differs from the good one."""
    rng = Random(f"{seed} {index}")
    kinds = list(READERS) if only is None else [only]
    kind = rng.choices(kinds, [READERS[name].weight for name in kinds])[0]
    (made,) = (CORPUS / kind / str(rng.randrange(len(READERS[kind].make)))).iterdir()
    path = copy(made, folder)
    before = digest_of(path)
    if rng.random() > 0.02:  # a few stay good, and those that a change does not fit
        with suppress(*UNFIT):
            READERS[kind].change(path, rng)
    return kind, path, not path.exists() or digest_of(path) != before


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
        try:
            kind, path, changed = (
                (*given, True)
                if given is not None
                else prepare(index, options.seed, folder, options.only)
            )
        except Exception:  # a mistake of the fuzzer's own: it is told as a finding
            say(index=index, kind=OWN, end="foreign", text=traceback.format_exc()[-3000:])
            break
        say(index=index, kind=kind, end="begun", changed=changed)
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
            changed=changed,
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
    changed: int = 0
    slowest: float = 0.0
    largest: int = 0


ENDS = ("accepted", "refused", "out of time", "contained", "signal", "foreign", "slow", "large")
FINDINGS = ENDS[4:]


def judge(found: dict[str, Any], status: int) -> str:
    """How an input ended, in one word; `status` is the worker's where it ended with it."""
    limits = READERS[found["kind"]].limits if found["kind"] in READERS else ""
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
COUNT = 1500  # inputs of a run without any option: the same on every machine, about a minute


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
    tally.changed += bool(found.get("changed"))
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
        f"{'':22}{'inputs':>9}{'changed':>9}"
        + "".join(f"{end:>12}" for end in ENDS)
        + f"{'most s':>9}{'most MB':>9}"
    ]
    total = Tally()
    for kind, tally in [*sorted(tallies.items()), ("all", total)]:
        rows.append(
            f"{kind:22}{sum(tally.ends.values()):>9}{tally.changed:>9}"
            + "".join(f"{tally.ends[end]:>12}" for end in ENDS)
            + f"{tally.slowest:>9.1f}{tally.largest >> 20:>9}"
        )
        total.ends.update(tally.ends)
        total.changed += tally.changed
        total.slowest = max(total.slowest, tally.slowest)
        total.largest = max(total.largest, tally.largest)
    return "\n".join(rows)


def idle(tallies: dict[str, Tally], wanted: Iterable[str]) -> list[str]:
    """Kinds of which the fuzzer did too little to say anything: none was read, fewer than half of
    the inputs were changed, or none was ever accepted or refused.
    """
    found = []
    for kind in wanted:
        tally = tallies.get(kind, Tally())
        inputs = sum(tally.ends.values())
        told = tally.ends["accepted"] and tally.ends["refused"]
        if not inputs or (inputs >= ENOUGH and (2 * tally.changed < inputs or not told)):
            found.append(kind)
    return found


ENOUGH = 50  # inputs of one kind of which some are accepted and some refused


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz every reader of files.")
    parser.add_argument(
        "--seconds", type=float, default=None, help="of the clock, instead of --count"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument(
        "--count", type=int, default=None, help=f"inputs (default: {COUNT}, or as time allows)"
    )
    parser.add_argument("--only", choices=list(READERS), default=None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, default=None, help="a folder for what is found")
    options = parser.parse_args()
    if options.count is None and options.seconds is None:
        options.count = COUNT
    options.seconds = math.inf if options.seconds is None else options.seconds
    torch.set_num_threads(1)
    difference.import_onnx()
    with tempfile.TemporaryDirectory(prefix="wassail-fuzz-", ignore_cleanup_errors=True) as folder:
        global CORPUS
        CORPUS = Path(folder, "corpus")
        write_corpus(options.only)
        tallies = fuzz(options, Path(folder))
    print(table(tallies))
    found = sum(tally.ends[end] for tally in tallies.values() for end in FINDINGS)
    print(f"seed {options.seed}, {options.seconds:g} s, {options.jobs} jobs: {found} findings")
    lazy = idle(tallies, [options.only] if options.only else READERS) if options.first == 0 else []
    if lazy:
        print(f"too little was done to say anything of: {', '.join(lazy)}")
    return 1 if found or lazy else 0


if __name__ == "__main__":
    sys.exit(main())
