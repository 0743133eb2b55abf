"""Files that were made to do harm: each is refused in one sentence, by the readers themselves
and by the first pass.
"""

import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fuzz import build
from wassail.errors import InputError
from wassail.zoo import trial
from wassail.zoo.datasets import open_data
from wassail.zoo.models import open_model
from wassail.zoo.onnx import load_onnx
from wassail.zoo.weights import read_state


def refused(call: Callable[[], Any]) -> str:
    """The one sentence with which something is refused."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text
    return text


# ---- Weights
# --------------------------------------------------------------------------------------------------


def larger(data: bytes, old: int, new: int) -> bytes:
    """A pickle with another size in it."""
    assert data.count(b"K" + bytes([old])) >= 1
    return data.replace(b"K" + bytes([old]), b"M" + struct.pack("<H", new))


def test_a_weight_is_not_filled_up_with_what_was_in_memory(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(77)}, tmp_path / "w.pt")
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as old,
        zipfile.ZipFile(tmp_path / "evil.pt", "w") as new,
    ):
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, larger(data, 77, 9999) if name.endswith("data.pkl") else data)
    refused(lambda: read_state(tmp_path / "evil.pt"))
    torch.save(
        {
            "w": torch.sparse_coo_tensor(
                torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=True
            )
        },
        tmp_path / "sparse.pt",
    )
    refused(lambda: read_state(tmp_path / "sparse.pt"))


def _checkpoint(path: Path, pickled: bytes, name: str = "data.pkl") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"archive/{name}", b"\x80\x02" + pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return path


def _nested(depth: int) -> bytes:
    """A tuple of two tuples of two tuples: its hash takes 2^depth steps."""
    pairs = (
        b"h" + bytes([place]) + b"h" + bytes([place]) + b"\x86q" + bytes([place + 1])
        for place in range(depth)
    )
    return b"K\x01\x85q\x00" + b"".join(pairs)


_LETTER = b"X\x01\x00\x00\x00a"
_MANY = (
    b"X\x00\x00\x01\x00"
    + b"a" * (1 << 16)
    + b"q\x02X\x06\x00\x00\x00latin1q\x03c_codecs\nencode\nq\x04"
)
CHECKPOINTS = {
    "a tuple of tuples as a key": b"}" + _nested(60) + b"K\x02s.",
    "a set of tuples": b"cbuiltins\nset\n](" + _nested(60) + b"e\x85R.",
    "bytes of any number": b"}"
    + _LETTER
    + b"cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x01\x85Rs.",
    "memory as it is found": b"}" + _LETTER + b"ctorch\nTensor\nM\x00\x10\x85Rs.",
    "text copied": b"}" + _LETTER + b"](" + _MANY + b"h\x04h\x02h\x03\x86R" * 2000 + b"es.",
    "keys of one hash": b"}("
    + b"".join(
        b"\x8a\x0a" + (k * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for k in range(20_000)
    )
    + b"u.",
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_that_takes_more_than_its_length(tmp_path: Path, kind: str) -> None:
    for name in ("data.pkl", "DATA.PKL"):  # torch takes either
        path = _checkpoint(tmp_path / "w.pt", CHECKPOINTS[kind], name)
        text = refused(lambda path=path: read_state(path))
        assert "over and over" in text or "any size" in text
    old = tmp_path / "old.pt"
    old.write_bytes(b"\x80\x02" + CHECKPOINTS[kind])  # as before torch 1.6
    text = refused(lambda: read_state(old))
    assert "over and over" in text or "any size" in text


def test_an_archive_with_two_directories(tmp_path: Path) -> None:
    """Torch reads the one that the end names, Python the one before the end."""
    path = _checkpoint(tmp_path / "w.pt", CHECKPOINTS["a tuple of tuples as a key"])
    path.write_bytes(b"in front" + path.read_bytes())
    assert "no archive" in refused(lambda: read_state(path))


def test_checkpoints_of_the_usual_kinds_are_read(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    state["tied"] = state["0.weight"]
    more = {
        "state_dict": state,
        "epoch": 3,
        "seed": 1 << 40,
        "raw": b"bytes",
        "best": {"at": (1, (2, 3))},
        "groups": {0: [1]},
    }
    for old in (False, True):
        torch.save(more, tmp_path / "w.pt", _use_new_zipfile_serialization=not old)
        found = read_state(tmp_path / "w.pt")
        assert found.keys() == state.keys() and all(
            torch.equal(found[name], state[name]) for name in state
        )


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path: Path) -> None:
    data = bytearray(build.state(tmp_path / "w.pt").read_bytes())
    place = data.index(read_state(tmp_path / "w.pt")["1.weight"].numpy().tobytes())
    data[place + 5] ^= 1
    (tmp_path / "w.pt").write_bytes(data)
    assert "damaged" in refused(lambda: read_state(tmp_path / "w.pt"))


# ---- ONNX
# --------------------------------------------------------------------------------------------------


def onnx_graph(
    path: Path,
    nodes: list[Any],
    held: list[Any],
    shape: tuple[int, ...] = (1, 4),
    more: tuple[Any, ...] = (),
) -> Path:
    import onnx
    from onnx import TensorProto, helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 3])
    graph = helper.make_graph(nodes, "g", [x], [z, *more], held)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        str(path),
    )
    return path


def endless(path: Path) -> Path:
    """A classifier of one matrix, and beside it a loop without an end."""
    from onnx import TensorProto, helper, numpy_helper

    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Add", ["v", "v"], ["v2"])],
        "body",
        [
            value("i", TensorProto.INT64, []),
            value("c", TensorProto.BOOL, []),
            value("v", TensorProto.FLOAT, [1, 4]),
        ],
        [value("c2", TensorProto.BOOL, []), value("v2", TensorProto.FLOAT, [1, 4])],
    )
    held = [
        numpy_helper.from_array(np.array(True), "yes"),
        numpy_helper.from_array(np.ones((4, 3), np.float32), "w"),
    ]
    nodes = [
        helper.make_node("Loop", ["", "yes", "x"], ["v"], body=body),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
    ]
    return onnx_graph(path, nodes, held, more=(value("v", TensorProto.FLOAT, [1, 4]),))


def test_an_input_of_forty_gigabytes(tmp_path: Path) -> None:
    from onnx import helper, numpy_helper

    held = [numpy_helper.from_array(np.ones((4, 3), np.float32), "w")]
    path = onnx_graph(
        tmp_path / "big.onnx", [helper.make_node("MatMul", ["x", "w"], ["z"])], held, (1, 10**10)
    )
    assert "which no data set has" in refused(lambda: open_model(str(path), trust=True))


def test_results_of_onnx_operators_are_measured_before_they_are_made(tmp_path: Path) -> None:
    from onnx import helper, numpy_helper

    def held(name: str, value: Any) -> Any:
        return numpy_helper.from_array(np.asarray(value), name)

    node = helper.make_node
    made = {
        "outer": [node("MatMul", ["c", "r"], ["z"])],
        "expand": [node("Expand", ["x", "s"], ["e"]), node("Add", ["e", "e"], ["z"])],
        "pad": [node("Pad", ["x", "p"], ["z"])],
        "constant": [node("ConstantOfShape", ["s"], ["e"]), node("Add", ["x", "e"], ["z"])],
        "integers": [node("Div", ["least", "minus"], ["d"]), node("Reshape", ["x", "d"], ["z"])],
        "statistics": [node("BatchNormalization", ["x", "s1", "s1", "s1", "s1"], ["z"])],
    }
    values = [
        held("c", np.ones((100_000, 1), np.float32)),
        held("r", np.ones((1, 100_000), np.float32)),
        held("s", [10**6, 10**6]),
        held("p", [0, 10**9, 0, 10**9]),
        held("least", [-(2**63)]),
        held("minus", [-1]),
        held("s1", np.ones(2, np.float32)),
    ]
    for name, nodes in made.items():
        path = onnx_graph(tmp_path / f"{name}.onnx", nodes, values)
        refused(lambda path=path: load_onnx(path))


# ---- The first pass in a process of its own
# ------------------------------------------------------------------------------


def test_the_first_pass_answers_once_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.onnx_model(tmp_path / "net.onnx")
    (tmp_path / "torch.py").write_text("raise SystemExit('code beside the file was run')")
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []
    popen = subprocess.Popen

    def count(*arguments: Any, **options: Any) -> Any:
        started.append(options)
        return popen(*arguments, **options)

    monkeypatch.setattr(trial.subprocess, "Popen", count)
    model = open_model(str(path), trust=True).model
    assert not started
    assert torch.equal(open_model("net.onnx").model(torch.ones(1, 4)), model(torch.ones(1, 4)))
    (tmp_path / "copy.onnx").write_bytes(path.read_bytes())
    open_model(str(tmp_path / "copy.onnx"))
    assert len(started) == 1 and started[0]["start_new_session"]
    assert "preexec_fn" not in started[0]


@pytest.mark.slow
def test_an_endless_loop_beside_the_logits_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = refused(lambda: open_model(str(endless(tmp_path / "loop.onnx"))))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "took more than" in text and "--trust" in text
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    # Kilobytes, of the largest child yet: an earlier test may have had a larger one, and a child
    # begins as a copy of this process.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after.ru_maxrss <= max(before.ru_maxrss, own, 1 << 20)


LIMITED = """
import os, sys
from wassail.zoo import trial
trial.limit(1, 200 << 20, 1 << 10)
what = sys.argv[1]
if what == "memory":
    try:
        block = bytearray(1 << 30)
    except MemoryError:
        sys.exit(7)
elif what == "time":
    while True:
        pass
elif what == "file":
    open(sys.argv[2], "wb").write(bytes(1 << 20))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits on memory are Linux's")
@pytest.mark.parametrize(
    ("what", "codes"), [("memory", [7]), ("time", [-24, -9]), ("file", [-25, 1])]
)
def test_the_limits_hold(tmp_path: Path, what: str, codes: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, what, str(tmp_path / "f")],
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode in codes


@pytest.mark.parametrize(
    ("code", "answer", "words"),
    [
        (-11, b"", "ended with SIGSEGV"),
        (-8, b"{}", "ended with SIGFPE"),
        (-24, b"", "took more than 7 s"),
        (0, b"", "no answer"),
        (0, b"[1]", "no answer"),
        (3, b"{}", "ended with code 3"),
        (0, json.dumps({"error": "it is\nno model."}).encode(), "it is no model."),
    ],
)
def test_an_end_of_the_child_is_a_sentence(
    tmp_path: Path, code: int, answer: bytes, words: str
) -> None:
    assert words in refused(lambda: trial._read(tmp_path / "net.pt2", code, answer, 7))


def test_the_command_line_takes_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wassail.cli import parser, shared

    path = build.onnx_model(tmp_path / "net.onnx")
    asked: list[bool] = []

    def attempt(*_: Any) -> dict[str, Any]:
        asked.append(True)
        return {}

    monkeypatch.setattr(trial, "attempt", attempt)
    for more in ([], ["--trust"]):
        options = parser._parser().parse_args(["evaluate", str(path), "--eps", "0.1", *more])
        shared.model_from(options, 2.0)
        assert len(asked) == 1


# ---- Data
# --------------------------------------------------------------------------------------------------


def test_a_tuple_of_tuples_is_no_key(tmp_path: Path) -> None:
    """Its hash would take 2^60 steps."""
    folder = build.cifar(tmp_path / "cifar-10-batches-py")
    key = b"(I1\nI2\nt" + b"2\x86" * 60  # DUP is not among the opcodes; the memo does the same
    (folder / "test_batch").write_bytes(b"\x80\x02}" + key + b"I1\ns.")
    assert "cannot read data" in refused(lambda: open_data(folder))
    nested = b"I1\nI2\n\x86q\x00"
    for place in range(60):
        nested += b"h" + bytes([place]) + b"h" + bytes([place]) + b"\x86q" + bytes([place + 1])
    (folder / "test_batch").write_bytes(b"\x80\x02}" + nested + b"I1\ns.")
    assert "is no text" in refused(lambda: open_data(folder))
    (folder / "test_batch").write_bytes(b"\x80\x02(" + nested + b"I1\nd.")
    refused(lambda: open_data(folder))


def test_pickles_of_cifar_that_take_more_than_their_length(tmp_path: Path) -> None:
    folder = build.cifar(tmp_path / "cifar-10-batches-py")
    text = (
        b"X" + struct.pack("<I", 1 << 16) + b"a" * (1 << 16) + b"q\x02X\x06\x00\x00\x00latin1q\x03"
    )
    copies = (
        b"\x80\x02](" + text + b"c_codecs\nencode\nq\x04" + b"h\x04h\x02h\x03\x86R" * 50 + b"e."
    )
    (folder / "test_batch").write_bytes(copies)
    assert "over and over" in refused(lambda: open_data(folder))
    same = (1 << 61) - 1  # its multiples have the hash 0: a dict of n of them takes n^2 steps
    (folder / "test_batch").write_bytes(b"\x80\x02}I%d\nNs." % same)
    assert "is no text" in refused(lambda: open_data(folder))
    (folder / "test_batch").write_bytes(b"\x80\x02Np%d\n." % same)
    assert "numbers its values" in refused(lambda: open_data(folder))


def test_other_pickles_of_strangers(tmp_path: Path) -> None:
    folder = build.cifar(tmp_path / "cifar-10-batches-py")
    assert open_data(folder).read(0, 2)[1].tolist() == [3, 4]
    for data in (
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a place in the memo that C's unpickler makes room for
        b"\x80\x02\x96\xff\xff\xff\xff\xff\xff\xff\x00.",  # an array of bytes of 2^56
        b"\x80\x02]q\x00h\x00a.",  # a list of itself
        b"\x80\x02cnumpy\nndarray\nI1\nb.",
        b"\x80\x02]I1\nb.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"",
    ):
        (folder / "test_batch").write_bytes(data)
        refused(lambda: open_data(folder))
    build.cifar(tmp_path / "again")
    (tmp_path / "again" / "batches.meta").write_bytes(pickle.dumps({"label_names": [["a"]]}))
    refused(lambda: open_data(tmp_path / "again"))


@pytest.mark.parametrize("how", ["itself", "above", "diamonds"])
def test_links_in_an_image_folder_end(tmp_path: Path, how: str) -> None:
    folder = build.image_folder(tmp_path / "images")
    assert len(open_data(folder)) == 6
    inside = folder / "class0"
    if how == "itself":
        (inside / "again").symlink_to(inside)
        (inside / "once").symlink_to(inside)
    elif how == "above":
        (inside / "again").symlink_to(folder)
    else:  # no circle, but 2^30 ways
        for level in range(30):
            (tmp_path / f"level{level}").mkdir()
        for level in range(29):
            for name in ("a", "b"):
                (tmp_path / f"level{level}" / name).symlink_to(tmp_path / f"level{level + 1}")
        (inside / "deep").symlink_to(tmp_path / "level0")
    assert "a second time" in refused(lambda: open_data(folder))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = build.image_folder(tmp_path / "images")
    os.mkfifo(folder / "class0" / "pipe.png")
    assert "pipe or a device" in refused(lambda: open_data(folder))
    for name in (
        "d.npz",
        "d.safetensors",
        "t10k-images-idx3-ubyte",
        "net.pt2",
        "net.onnx",
        "w.pt",
        "ids.txt",
    ):
        os.mkfifo(tmp_path / name)
    build.idx(tmp_path / "images")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"")
    for name in ("d.npz", "d.safetensors", "t10k-images-idx3-ubyte"):
        assert "pipe or a device" in refused(lambda name=name: open_data(tmp_path / name))
    for name in ("net.pt2", "net.onnx"):
        assert "pipe or a device" in refused(lambda name=name: open_model(str(tmp_path / name)))
    assert "pipe or a device" in refused(lambda: load_onnx(tmp_path / "net.onnx"))
    assert "pipe or a device" in refused(lambda: read_state(tmp_path / "w.pt"))
    (folder / "class0" / "pipe.png").unlink()
    (folder / "t10k-images-idx3-ubyte").unlink()
    assert "pipe or a device" in refused(lambda: open_data(folder, ids=tmp_path / "ids.txt"))


def test_postscript_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    started: list[Any] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: started.append(a))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    page += b"(touch) (w) file\nshowpage\n%%EOF\n"
    for end in ("png", "jpg", "tiff"):
        folder = tmp_path / end / "class0"
        folder.mkdir(parents=True)
        (folder / f"image.{end}").write_bytes(page)
        assert "cannot identify image file" in refused(
            lambda folder=folder: open_data(folder.parent)
        )
    assert not started


def test_a_jpeg_that_goes_over_its_pixels_again_and_again(tmp_path: Path) -> None:
    """Each scan takes 14 bytes, and the time of all pixels: 100 KB would take minutes."""
    import io

    from PIL import Image

    folder = tmp_path / "images" / "class0"
    folder.mkdir(parents=True)
    written = io.BytesIO()
    Image.new("L", (64, 64)).save(written, "JPEG", progressive=True)
    data = written.getvalue()
    last = data.rindex(b"\xff\xda")
    (folder / "a.jpg").write_bytes(data)
    assert open_data(tmp_path / "images").read(0, 1)[0].shape == (1, 3, 64, 64)
    (folder / "a.jpg").write_bytes(data[:last] + data[last:-2] * 200 + b"\xff\xd9")
    assert "scans" in refused(lambda: open_data(tmp_path / "images").read(0, 1))


def test_an_image_that_unpacks_to_too_much(tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "images" / "class0"
    folder.mkdir(parents=True)
    Image.new("1", (12_000, 6_000)).save(folder / "bomb.png")
    assert "pixels" in refused(lambda: open_data(tmp_path / "images"))
    Image.new("1", (60_000, 2)).save(folder / "bomb.png")
    assert "would be resized" in refused(
        lambda: open_data(tmp_path / "images", preprocessing="Res256Crop224")
    )


def test_damaged_archives_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = build.npz(tmp_path / "d.npz", packed=True)
    data = path.read_bytes()
    for place in range(
        40, len(data) - 60, 3
    ):  # zlib.error, tokenize.TokenError and their relatives among them
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            found = open_data(path).read(0, 6)
        except InputError:
            continue
        assert torch.equal(found[1], torch.arange(6) % 3)  # the bytes that nobody reads


@pytest.mark.parametrize("packed", [False, True])
def test_a_flipped_bit_is_found(tmp_path: Path, packed: bool) -> None:
    path = build.npz(tmp_path / "d.npz")
    data = bytearray(path.read_bytes())
    place = data.index(build.samples()[0].tobytes())
    for n in (None, 1):
        changed = bytearray(data)
        changed[place + 90] ^= 1
        path.write_bytes(changed)
        assert "Bad CRC-32" in refused(lambda n=n: open_data(path, n))
    images = build.idx(tmp_path, packed=True)
    data = bytearray(images.read_bytes())
    data[-6] ^= 1  # the checksum of gzip
    images.write_bytes(data)
    for n in (None, 1):
        assert "CRC" in refused(lambda n=n: open_data(images, n))


def test_numbers_that_torch_does_not_know(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3), np.longdouble), y=np.zeros(2, np.int64))
    assert "torch does not know" in refused(lambda: open_data(tmp_path / "d.npz"))
    assert "torch does not know" in refused(
        lambda: open_data((np.zeros((2, 3), np.longdouble), np.zeros(2, np.int64)))
    )


@pytest.mark.parametrize(
    "shape",
    ["(-2, -8)", "(6, 10**9)", "(2, 8, True)", "('a',)", "(2, " * 99, "(99999999999999999999, 2)"],
)
def test_shapes_that_no_array_has(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(16)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", member)
    refused(lambda: open_data(tmp_path / "d.npz"))


def test_no_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((0, 10**9), np.uint8), y=np.zeros(0, np.int64))
    assert "no samples" in refused(lambda: open_data(tmp_path / "d.npz"))


def test_hugging_face_data_are_decoded_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts are not run, and images are opened by the formats that are promised only."""
    import io
    import types

    from PIL import Image as Pillow

    stored = io.BytesIO()
    Pillow.new("RGB", (4, 4)).save(stored, "PNG")
    rows = [stored.getvalue(), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"]
    asked: dict[str, Any] = {}

    class Image:
        def __init__(self, decode: bool = True) -> None:
            self.decode = decode

    class ClassLabel:
        names = ("a", "b")

    class Rows:
        features: dict[str, Any] = {"image": Image(), "label": ClassLabel()}  # noqa: RUF012

        def cast_column(self, name: str, kind: Image) -> "Rows":
            asked["decode"] = (name, kind.decode)
            return self

        def __len__(self) -> int:
            return 2

        def __getitem__(self, place: int) -> dict[str, Any]:
            return {"image": {"bytes": rows[place], "path": None}, "label": place}

    def load_dataset(name: str, trust_remote_code: bool | None = None) -> Rows:
        asked["trust"] = trust_remote_code
        return Rows()

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset
    library.Image = Image
    library.__version__ = "3"
    monkeypatch.setitem(sys.modules, "datasets", library)
    data = open_data("hf:someone/images")
    assert asked == {"trust": False, "decode": ("image", False)}
    assert data.read(0, 1)[0].shape == (1, 3, 4, 4)
    assert "cannot identify" in refused(lambda: data.read(1, 2))


def test_the_lock_file_is_that_of_the_constraints() -> None:
    root = Path(__file__).parents[2]
    pinned = {line for line in (root / "constraints.txt").read_text().splitlines() if "==" in line}
    text = (root / "requirements-lock.txt").read_text()
    locked = {
        line.removesuffix(" \\")
        for line in text.splitlines()
        if "==" in line and not line.startswith("#")
    }
    assert pinned - locked == {line for line in pinned if line.startswith("torch==")}
    assert locked <= pinned and "://" not in text
    assert text.count("--hash=sha256:") >= len(locked)
