"""Data from anywhere: the right samples in the right order, read in pieces, and no file that is
opened can run code.
"""

import gzip
import io
import json
import os
import pickle
import struct
import sys
import tracemalloc
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from wassail import zoo
from wassail.errors import InputError
from wassail.zoo import files
from wassail.zoo.datasets import open_data
from wassail.zoo.samples import Data


def refused(call: Callable[[], Any]) -> str:
    """The one sentence with which something is refused."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text
    return text


def pixels(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def check(data: Data, x: Any, y: Any) -> None:
    """All samples, in pieces of every size, twice; ids and info in order."""
    x = torch.as_tensor(np.asarray(x))
    y = torch.as_tensor(np.asarray(y))
    assert len(data) == len(x)
    assert data.shape == tuple(x.shape[1:])
    for size in (1, 2, len(x) + 3):
        parts = [data.read(start, start + size) for start in range(0, len(x), size)]
        assert torch.equal(torch.cat([part for part, _ in parts]), x)
        assert torch.equal(torch.cat([part for _, part in parts]), y)
    empty = data.read(len(x), len(x) + 5)
    assert (
        data.read(0, 1)[0].dtype == empty[0].dtype == x.dtype
        and data.read(0, 1)[1].dtype == torch.int64
    )
    assert empty[0].shape == (0, *data.shape) and empty[1].shape == (0,)
    assert len(data.ids(0, len(x) + 5)) == len(x) == len(set(data.ids(0, len(x))))
    json.dumps(data.info)
    first = open_data(data, 1)
    assert (
        len(first) == 1
        and torch.equal(first.read(0, 9)[0], x[:1])
        and first.ids(0, 9) == data.ids(0, 1)
    )


def floats(x: Any) -> Any:
    return x.astype(np.float32) / np.float32(255)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What a payload would make; it must not be there when the test is over."""
    mark = tmp_path / "code-was-run"
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()
    mark.rmdir()
    yield mark
    assert not mark.exists()


class Payload:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


# ---- .npz and .safetensors
# -----------------------------------------------------------------------------------------------

LABELS = np.array([3, 0, 2, 1, 1])
LAYOUTS = {  # what is stored, what is read, and what is said about it
    "NCHW": (pixels(5, 3, 6, 7), lambda x: floats(x), ["divided by 255"]),
    "NHWC": (
        pixels(5, 6, 7, 3),
        lambda x: floats(x.transpose(0, 3, 1, 2)),
        ["NHWC to NCHW", "divided by 255"],
    ),
    "NHW1": (
        pixels(5, 6, 7, 1),
        lambda x: floats(x.transpose(0, 3, 1, 2)),
        ["NHWC to NCHW", "divided by 255"],
    ),
    "either": (pixels(5, 3, 6, 3), lambda x: floats(x), ["divided by 255"]),
    "NHW": (pixels(5, 6, 7), lambda x: floats(x[:, None]), ["NHW to N1HW", "divided by 255"]),
    "ND": (pixels(5, 9), lambda x: floats(x), ["divided by 255"]),
    "float": (pixels(5, 6, 7, 3).astype(np.float32), lambda x: x, []),
    "double": (pixels(5, 9).astype(np.float64) / 7, lambda x: x, []),
    "half": (
        pixels(5, 9).astype(np.float16) / 7,
        lambda x: x.astype(np.float32),
        ["float16 to float32"],
    ),
    "foreign": (pixels(5, 9).astype(">f4") / 7, lambda x: x.astype(np.float32), []),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_npz(tmp_path: Path, layout: str, packed: bool) -> None:
    x, expected, steps = LAYOUTS[layout]
    (np.savez_compressed if packed else np.savez)(
        tmp_path / "d.npz", images=x, labels=LABELS.astype(np.uint8)
    )
    data = open_data(str(tmp_path / "d.npz"))
    check(data, expected(x), LABELS)
    assert data.info["preprocessing"] == steps
    assert data.info["files"] == {"d.npz": files.sha256(tmp_path / "d.npz")}
    check(open_data(tmp_path / "d.npz", 3), expected(x)[:3], LABELS[:3])
    check(open_data(tmp_path / "d.npz", 99), expected(x), LABELS)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.uint64, ">i4"])
def test_labels_of_any_integer_type(tmp_path: Path, kind: Any) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 2), np.float32), y=LABELS.astype(kind)[:, None])
    check(open_data(tmp_path / "d.npz"), np.zeros((5, 2), np.float32), LABELS)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "foreign"])
def test_safetensors(tmp_path: Path, layout: str) -> None:
    x, expected, steps = LAYOUTS[layout]
    save_file(
        {"x": torch.from_numpy(x.copy()), "y": torch.from_numpy(LABELS)}, tmp_path / "d.safetensors"
    )
    data = open_data(str(tmp_path / "d.safetensors"))
    check(data, expected(x), LABELS)
    assert data.info["preprocessing"] == steps
    check(open_data(tmp_path / "d.safetensors", 3), expected(x)[:3], LABELS[:3])


def test_bfloat16_safetensors(tmp_path: Path) -> None:
    x = torch.rand(5, 4).bfloat16()
    save_file({"images": x, "labels": torch.from_numpy(LABELS)}, tmp_path / "d.safetensors")
    check(open_data(tmp_path / "d.safetensors"), x.float(), LABELS)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path, packed: bool) -> None:
    x = pixels(4000, 1, 32, 32)
    (np.savez_compressed if packed else np.savez)(
        tmp_path / "d.npz", x=x, y=np.zeros(4000, np.int64)
    )
    save_file(
        {"x": torch.from_numpy(x), "y": torch.zeros(4000, dtype=torch.int64)},
        tmp_path / "d.safetensors",
    )
    open_data(tmp_path / "d.npz").read(0, 10)  # imports, once
    for name in ("d.npz", "d.safetensors"):
        tracemalloc.start()
        data = open_data(tmp_path / name)
        for start in range(0, 4000, 50):
            piece, _ = data.read(start, start + 50)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert torch.equal(piece, torch.from_numpy(floats(x[-50:])))
        assert peak < 2e6  # numpy reports its arrays, and all samples as bytes are 4 MB


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"a": np.zeros((2, 2)), "b": np.zeros(2)},
            "has arrays a, b: name the samples x and the labels y",
        ),
        ({"x": np.zeros((2, 2))}, "name the samples x and the labels y"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(2)}, "labels of .* are float64"),
        ({"x": np.zeros((2, 2)), "y": np.zeros((2, 3), int)}, "labels of .* have shape"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(3, int)}, "2 samples but 3 labels"),
        ({"x": np.zeros(2), "y": np.zeros(2, int)}, r"samples of .* have shape \(2,\)"),
        ({"x": np.zeros(()), "y": np.zeros(2, int)}, "is a single number"),
        ({"x": np.zeros((2, 2), np.int64), "y": np.zeros(2, int)}, "samples of .* are int64"),
        ({"x": np.zeros((2, 2), bool), "y": np.zeros(2, int)}, "samples of .* are bool"),
        ({"x": np.zeros((2, 2), complex), "y": np.zeros(2, int)}, "not numbers"),
        ({"x": np.array([["a", "b"]]), "y": np.zeros(1, int)}, "not numbers"),
        ({"x": np.zeros((3, 2)).T, "y": np.zeros(2, int)}, "column by column"),
    ],
)
def test_arrays_that_are_no_data(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(InputError, match=words):
        open_data(tmp_path / "d.npz")


def test_labels_beyond_all_integers(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 2)), y=np.array([0, 2**63], np.uint64))
    assert "a label of" in refused(lambda: open_data(tmp_path / "d.npz").read(0, 2))


def test_damaged_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 20)), y=np.zeros(20, int))
    content = (tmp_path / "d.npz").read_bytes()
    for cut in (0, 10, 300, len(content) - 50):
        (tmp_path / "d.npz").write_bytes(content[:cut])
        assert "cannot read data" in refused(lambda: open_data(tmp_path / "d.npz"))
    save_file(
        {"x": torch.zeros(20, 20), "y": torch.zeros(20, dtype=torch.int64)},
        tmp_path / "d.safetensors",
    )
    content = (tmp_path / "d.safetensors").read_bytes()
    for cut in (0, 10, len(content) - 50):
        (tmp_path / "d.safetensors").write_bytes(content[:cut])
        assert "cannot read data" in refused(lambda: open_data(tmp_path / "d.safetensors"))
    save_file({"a": torch.zeros(2)}, tmp_path / "d.safetensors")
    assert "has arrays a" in refused(lambda: open_data(tmp_path / "d.safetensors"))
    for name in ("none.npz", "none.safetensors"):
        assert "cannot read data" in refused(lambda name=name: open_data(tmp_path / name))


def npy(shape: tuple[int, ...], data: bytes, dtype: str = "|u1") -> bytes:
    """A member of an archive that claims to have that shape."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue() + data


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def test_an_object_array_runs_nothing(tmp_path: Path, mark: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([[Payload(mark)]], dtype=object), y=np.zeros(1, int))
    assert "objects could run code" in refused(lambda: open_data(tmp_path / "d.npz"))
    np.savez(tmp_path / "d.npz", x=np.zeros((1, 1)), y=np.array([Payload(mark)], dtype=object))
    assert "objects could run code" in refused(lambda: open_data(tmp_path / "d.npz"))


def test_a_header_is_read_and_not_run(tmp_path: Path, mark: Path) -> None:
    header = (
        "{'descr': '|u1', 'fortran_order': False, 'shape': "
        f"__import__('os').mkdir({str(mark)!r})}}\n"
    ).encode()
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    assert "cannot read data" in refused(
        lambda: open_data(archive(tmp_path / "d.npz", x=member, y=npy((1,), b"\0")))
    )


def test_a_zip_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 20 << 20
    path = archive(
        tmp_path / "d.npz",
        x=npy((size // 1024, 1024), bytes(size)),
        y=npy((size // 1024,), bytes(size // 1024)),
    )
    assert path.stat().st_size < size / 500
    spooled: list[int] = []
    spool = files.spool

    def watched(file: Any, dtype: Any, shape: Any, number: int, name: str) -> Any:
        spooled.append(number)
        return spool(file, dtype, shape, number, name)

    monkeypatch.setattr(files, "spool", watched)
    monkeypatch.setattr(files, "free_memory", lambda: size // 2)
    assert "would unpack" in refused(lambda: open_data(path))
    assert not spooled
    assert len(open_data(path, 10)) == 10  # as many rows as are asked for are harmless
    assert spooled == [10240, 10]
    monkeypatch.setattr(files, "free_memory", lambda: 2 * size)
    assert len(open_data(path)) == size // 1024
    monkeypatch.setattr(files, "REST", size // 2)  # a large memory is no reason to fill it
    assert "would unpack" in refused(lambda: open_data(path))
    monkeypatch.undo()
    monkeypatch.setattr(files, "LIMIT", size - 1)
    assert "would unpack" in refused(lambda: open_data(path))


def test_a_size_that_is_made_up(tmp_path: Path) -> None:
    for shape in ((10**12, 10), (3, 2), (-1, 4)):
        path = archive(tmp_path / "d.npz", x=npy(shape, b"1234"), y=npy((1,), b"\0"))
        assert "damaged" in refused(lambda path=path: open_data(path))


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "d.npz", x=npy((2, 2), b"1234"), y=npy((2,), b"\0\1"))
    monkeypatch.setattr(
        "wassail.zoo.files.shutil.disk_usage", lambda folder: types.SimpleNamespace(free=3)
    )
    assert "temporary space" in refused(lambda: open_data(path))


def test_nothing_is_written_beside_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    with zipfile.ZipFile("d.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("../x", "/x", "../../etc/y", "x", "y"):
            file.writestr(
                f"{name}.npy", npy((2,), b"\0\1") if name.endswith("y") else npy((2, 2), b"1234")
            )
    check(open_data("d.npz"), floats(np.frombuffer(b"1234", np.uint8).reshape(2, 2)), [0, 1])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["d.npz", "inside"]


# ---- IDX and CIFAR
# --------------------------------------------------------------------------------------------------


def idx(path: Path, array: Any) -> None:
    data = (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("ending", ["-idx{}-ubyte", "-idx{}-ubyte.gz", ".idx{}-ubyte"])
def test_idx(tmp_path: Path, ending: str) -> None:
    x = pixels(5, 4, 6)
    image, label = (
        tmp_path / f"t10k-{name}{ending.format(rank)}"
        for name, rank in (("images", 3), ("labels", 1))
    )
    idx(image, x)
    assert label.name in refused(lambda: open_data(image))
    idx(label, LABELS.astype(np.uint8))
    check(open_data(image), floats(x)[:, None], LABELS)
    check(open_data(image, 2), floats(x[:2])[:, None], LABELS[:2])
    check(open_data(tmp_path), floats(x)[:, None], LABELS)  # the folder that holds them
    assert list(open_data(image).info["files"]) == [image.name, label.name]


def test_idx_files_that_are_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "a-images-idx3-ubyte"
    label = tmp_path / "a-labels-idx1-ubyte"
    idx(label, LABELS.astype(np.uint8))
    for content in (
        b"",
        b"\0\0\x08",
        b"\0\0\x0d\x03" + bytes(12),
        struct.pack(">4I", 0x803, 5, 10**6, 10**6),
        b"<html>",
    ):
        image.write_bytes(content)
        refused(lambda: open_data(image))
    for more in (-3, 3):
        image.write_bytes(struct.pack(">4I", 0x803, 5, 4, 4) + bytes(80 + more))
        assert "should hold 80 bytes" in refused(lambda: open_data(image))
    packed = tmp_path / "a-images-idx3-ubyte.gz"
    packed.write_bytes(gzip.compress(struct.pack(">4I", 0x803, 5, 4, 4) + bytes(20)))
    assert "early" in refused(lambda: open_data(packed))
    packed.write_bytes(gzip.compress(struct.pack(">4I", 0x803, 5, 10**6, 10**6)))
    monkeypatch.setattr(files, "free_memory", lambda: 10**6)
    assert "would unpack" in refused(lambda: open_data(packed))


def cifar_folder(folder: Path, protocol: int = 2, hundred: bool = False) -> Any:
    """What the official archives hold, small: bytes for keys, as Python 2 wrote them."""
    x = pixels(5, 3072)
    keys = (
        ("test", "meta", b"fine_labels", b"fine_label_names")
        if hundred
        else ("test_batch", "batches.meta", b"labels", b"label_names")
    )
    folder.mkdir(parents=True)
    batch = {
        b"batch_label": b"testing batch 1 of 1",
        keys[2]: LABELS.tolist(),
        b"data": x,
        b"filenames": [b"a.png"] * 5,
    }
    (folder / keys[0]).write_bytes(pickle.dumps(batch, protocol=protocol))
    (folder / keys[1]).write_bytes(
        pickle.dumps(
            {keys[3]: [b"cat", b"dog", b"fox", b"owl"], b"num_vis": 3072}, protocol=protocol
        )
    )
    return floats(x.reshape(5, 3, 32, 32))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("hundred", [False, True])
def test_cifar_pickles(tmp_path: Path, protocol: int, hundred: bool) -> None:
    folder = tmp_path / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    x = cifar_folder(folder, protocol, hundred)
    for name in (folder, tmp_path, folder / ("test" if hundred else "test_batch")):
        data = open_data(str(name))
        check(data, x, LABELS)
        assert data.classes == ("cat", "dog", "fox", "owl")
    check(open_data(folder, 2), x[:2], LABELS[:2])
    assert len(open_data(folder).info["files"]) == 2


def test_a_cifar_pickle_of_python_2_and_an_old_numpy(tmp_path: Path) -> None:
    """The opcodes of the official file: strings in place of bytes, numpy.core, a dtype that is
    built in two steps.
    """
    x = pixels(2, 3072)
    raw = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03"
        b"cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01M\x02\x00M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T"
        + struct.pack("<I", 6144)
        + x.tobytes()
        + b"tbU\x06labelsq\x08]q\x09(K\x03K\x05eu."
    )
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(raw)
    check(open_data(tmp_path), floats(x.reshape(2, 3, 32, 32)), [3, 5])


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("cifar-10-batches-bin/test_batch.bin", 1), ("cifar-100-binary/test.bin", 2)],
)
def test_cifar_binaries(tmp_path: Path, name: str, prefix: int) -> None:
    x = pixels(5, 3072)
    coarse = np.full((5, prefix - 1), 9, np.uint8)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(
        np.hstack([coarse, LABELS.astype(np.uint8)[:, None], x]).tobytes()
    )
    check(open_data(tmp_path), floats(x.reshape(5, 3, 32, 32)), LABELS)
    check(open_data(tmp_path / name, 3), floats(x.reshape(5, 3, 32, 32))[:3], LABELS[:3])
    (tmp_path / name).write_bytes(b"x" * 4000)
    assert "not rows of" in refused(lambda: open_data(tmp_path / name))


def test_a_malicious_cifar_pickle_runs_nothing(tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    cifar_folder(folder)
    good = {b"labels": [0], b"data": pixels(1, 3072)}
    for batch in (
        Payload(mark),
        good | {b"x": Payload(mark)},
        good | {b"data": np.array([[Payload(mark)]], dtype=object)},
    ):
        for protocol in (0, 2, 4):
            (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=protocol))
            assert "cannot read data" in refused(lambda: open_data(folder))
    # Even where numpy alone would make it: only arrays of bytes are made.
    for array in (
        np.zeros(3, np.float32),
        np.array([None], dtype=object),
        np.asfortranarray(pixels(4, 4)),
    ):
        (folder / "test_batch").write_bytes(pickle.dumps(good | {b"x": array}, protocol=2))
        assert "not one of bytes" in refused(lambda: open_data(folder))
    cifar_folder(tmp_path / "again")
    (tmp_path / "again" / "batches.meta").write_bytes(pickle.dumps({b"label_names": Payload(mark)}))
    assert "code in a file is never run" in refused(lambda: open_data(tmp_path / "again"))


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"labels": [0]},
        {b"labels": [0], b"data": [1]},
        {b"labels": ["a"], b"data": np.zeros((1, 3072), np.uint8)},
        {b"labels": [0], b"data": np.zeros((1, 3072), np.float32)},
        {b"labels": [0], b"data": np.zeros((1, 100), np.uint8)},
        {b"labels": [0, 1], b"data": np.zeros((1, 3072), np.uint8)},
    ],
)
def test_pickles_that_are_no_batch_of_cifar(tmp_path: Path, batch: Any) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch))
    refused(lambda: open_data(tmp_path / "test_batch"))
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch)[:-20])
    refused(lambda: open_data(tmp_path / "test_batch"))


# ---- Images
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Three classes; names that sort otherwise than they are made; a file that is no image; a
    folder inside.
    """
    image = pytest.importorskip("PIL.Image")
    made = {}
    for place, name in enumerate(("b/2.png", "b/10.PNG", "a/z.png", "c/deep/y.png", "a/a.png")):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        made[name] = pixels(6 + place % 1, 8, 3) + np.uint8(place)
        image.fromarray(made[name]).save(tmp_path / "data" / name, format="png")
    (tmp_path / "data" / "a" / "notes.txt").write_text("no image")
    return tmp_path / "data", made


def test_the_order_is_that_of_the_names(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    names = [f"{number * 7 % 13:02}.png" for number in range(13)]
    (tmp_path / "a").mkdir()
    for name in names:
        image.fromarray(pixels(2, 2, 3)).save(tmp_path / "a" / name)
    assert names != sorted(names)
    assert open_data(tmp_path).ids(0, 99) == [f"a/{name}" for name in sorted(names)]


def chosen(made: dict[str, Any], names: list[str]) -> Any:
    return floats(np.stack([made[name] for name in names]).transpose(0, 3, 1, 2))


def test_image_folder(folder: tuple[Path, dict[str, Any]]) -> None:
    root, made = folder
    names = ["a/a.png", "a/z.png", "b/10.PNG", "b/2.png", "c/deep/y.png"]
    data = open_data(str(root))
    check(data, chosen(made, names), [0, 0, 1, 1, 2])
    assert data.ids(0, 5) == names and data.classes == ("a", "b", "c")
    check(open_data(root, 3), chosen(made, names[:3]), [0, 0, 1])
    assert (
        open_data(root).info["sha256"] == data.info["sha256"] != open_data(root, 3).info["sha256"]
    )
    (root / "b" / "2.png").write_bytes((root / "a" / "a.png").read_bytes())
    assert open_data(root).info["sha256"] != data.info["sha256"]


def test_ids_choose_images_and_their_order(
    folder: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, made = folder
    ids = tmp_path / "ids.txt"
    ids.write_text("c/deep/y.png\nb/2.png\n\na/z.png\n")
    data = open_data(root, ids=ids)
    check(data, chosen(made, ["c/deep/y.png", "b/2.png", "a/z.png"]), [2, 1, 0])
    assert (
        data.ids(0, 3) == ["c/deep/y.png", "b/2.png", "a/z.png"] and data.info["order"] == "ids.txt"
    )
    ids.write_text("b/2.png 711\na/z.png 5\n")
    data = open_data(root, ids=ids)
    check(data, chosen(made, ["b/2.png", "a/z.png"]), [711, 5])
    assert data.classes is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("../secret.png", "below the folder"),
        ("a/../../secret.png", "below the folder"),
        ("/etc/passwd.png 3", "below the folder"),
        ("a\\z.png", "below the folder"),
        ("z.png", "below the folder"),
        ("d/z.png", "in no class folder"),
        ("a/none.png", "is missing"),
        ("a/z.png 1\nb/2.png", "some lines"),
    ],
)
def test_ids_that_are_refused(
    folder: tuple[Path, dict[str, Any]], tmp_path: Path, line: str, words: str
) -> None:
    (tmp_path / "secret.png").write_bytes((folder[0] / "a" / "a.png").read_bytes())
    (tmp_path / "ids.txt").write_text(line)
    assert words in refused(lambda: open_data(folder[0], ids=tmp_path / "ids.txt"))


def test_a_part_of_imagenet_is_refused(tmp_path: Path) -> None:
    """Five sorted folders are classes 0..4, which they are not among the thousand."""
    image = pytest.importorskip("PIL.Image")
    for name in ("n01440764", "n02823750"):
        (tmp_path / "val" / name).mkdir(parents=True)
        image.fromarray(pixels(4, 4, 3)).save(tmp_path / "val" / name / "1.png")
    assert "2 of ImageNet's 1000 class folders" in refused(lambda: open_data(tmp_path / "val"))
    (tmp_path / "ids.txt").write_text("n02823750/1.png")
    assert "2 of ImageNet's 1000" in refused(
        lambda: open_data(tmp_path / "val", ids=tmp_path / "ids.txt")
    )
    (tmp_path / "ids.txt").write_text("n02823750/1.png 440")
    assert open_data(tmp_path / "val", ids=tmp_path / "ids.txt").read(0, 1)[1].tolist() == [440]
    for place in range(998):
        (tmp_path / "val" / f"n1{place:07}").mkdir()
    assert open_data(tmp_path / "val").read(0, 2)[1].tolist() == [0, 1]


def test_preprocessing(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "d" / "a").mkdir(parents=True)
    x = pixels(21, 35, 3)
    image.fromarray(x).save(tmp_path / "d" / "a" / "1.png")
    whole = torch.from_numpy(floats(x)).permute(2, 0, 1)

    def sample(name: str | None) -> Tensor:
        data = open_data(tmp_path / "d", preprocessing=name)
        assert data.info["preprocessing"] == ([] if name is None else [name]) + ["divided by 255"]
        return data.read(0, 1)[0][0]

    assert torch.equal(sample(None), whole)
    assert torch.equal(
        sample("Crop10"), whole[:, 6:16, 12:22]
    )  # round(5.5) is 6 and round(12.5) is 12, as in torchvision
    padded = sample("Crop40")
    assert padded.shape == (3, 40, 40) and torch.equal(padded[:, 9:30, 2:37], whole)
    assert padded.count_nonzero() == whole.count_nonzero()
    small = image.fromarray(x).resize(
        (16, 10), image.Resampling.BILINEAR
    )  # int(10 * 35 / 21) is 16
    assert torch.equal(
        sample("Res10Crop8"), torch.from_numpy(floats(np.array(small)))[1:9, 4:12].permute(2, 0, 1)
    )
    square = image.fromarray(x).resize((7, 7), image.Resampling.BILINEAR)
    assert torch.equal(sample("Res7"), torch.from_numpy(floats(np.array(square))).permute(2, 0, 1))
    sharp = image.fromarray(x).resize((16, 10), image.Resampling.BICUBIC)
    assert torch.equal(
        sample("BicubicRes10Crop8"),
        torch.from_numpy(floats(np.array(sharp)))[1:9, 4:12].permute(2, 0, 1),
    )
    assert sample("Res7Gray").shape == (1, 7, 7)
    for name in ("Res", "Resize256", "Crop224Res256", "Bicubic", "Res0", "res256crop224"):
        assert "unknown preprocessing" in refused(
            lambda name=name: open_data(tmp_path / "d", preprocessing=name)
        )


def test_images_of_several_sizes_are_refused(folder: tuple[Path, dict[str, Any]]) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(pixels(5, 5, 3)).save(folder[0] / "b" / "2.png")
    text = refused(lambda: open_data(folder[0]).read(0, 5))
    assert "sample b/2.png" in text and "Res256Crop224" in text
    assert open_data(folder[0], preprocessing="Res4").read(0, 5)[0].shape == (5, 3, 4, 4)


def test_images_that_cannot_be_read(
    folder: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(
        image, "MAX_IMAGE_PIXELS", 40
    )  # 6 x 8 is more, but not twice as much: Pillow only warns
    assert "decompression bomb" in refused(lambda: open_data(folder[0]))
    monkeypatch.undo()
    (folder[0] / "b" / "2.png").write_bytes(b"no image")
    assert "cannot read the image" in refused(lambda: open_data(folder[0]).read(0, 5))


def test_folders_that_are_no_data(tmp_path: Path) -> None:
    assert "no sub-folders" in refused(lambda: open_data(tmp_path))
    (tmp_path / "a").mkdir()
    assert "no images" in refused(lambda: open_data(tmp_path))


# ---- Built-in, Python, factories
# -----------------------------------------------------------------------------------------


def test_builtin() -> None:
    check(open_data("digits", 7), *(part[:7] for part in zoo.data("digits")))
    check(open_data("digits:train", 7), *(part[:7] for part in zoo.data("digits", "train")))
    assert open_data("digits").classes == tuple("0123456789")
    assert len(open_data("digits")) == 500
    assert "did you mean 'digits'" in refused(lambda: open_data("digit"))
    assert "unknown split 'tests'" in refused(lambda: open_data("digits:tests"))
    assert "n is 0" in refused(lambda: open_data("digits", 0))


def test_a_pair() -> None:
    x = torch.rand(5, 3)
    y = torch.from_numpy(LABELS)
    data = open_data((x, y))
    check(data, x, y)
    assert (
        data.info["sha256"]
        == open_data((x.numpy(), LABELS)).info["sha256"]
        != open_data((x + 1, y)).info["sha256"]
    )
    check(
        open_data((pixels(5, 6, 7, 3), LABELS)),
        floats(pixels(5, 6, 7, 3)).transpose(0, 3, 1, 2),
        LABELS,
    )
    before = x.clone()
    data.read(0, 5)[0].zero_()
    assert torch.equal(x, before)  # what is read is the reader's own
    assert open_data(data) is data
    assert "is no data" in refused(lambda: open_data(3))  # type: ignore[arg-type]


class Items(Dataset[Any]):
    """Five samples as somebody's own class gives them."""

    classes = ("x", "y", "z", "w")

    def __init__(self, make: Callable[[int], Any], size: int = 5) -> None:
        self.make = make
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> Any:
        return self.make(place)


X = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (X[i], int(LABELS[i])),
        lambda i: (X[i], torch.tensor(LABELS[i]), "more"),
        lambda i: {"image": X[i].numpy(), "label": LABELS[i]},
    ],
)
def test_a_dataset(make: Callable[[int], Any]) -> None:
    data = open_data(Items(make))
    check(data, X, LABELS)
    assert data.classes == Items.classes
    check(open_data(Items(make), 2), X[:2], LABELS[:2])
    items: Any = [make(i) for i in range(2)]  # a list of items is a data set too
    check(open_data(items), X[:2], LABELS[:2])
    other = open_data(Items(lambda i: (X[i] + (i == 3), int(LABELS[i]))))
    assert (
        other.info["sha256 of some"]
        != data.info["sha256 of some"]
        == open_data(Items(make)).info["sha256 of some"]
    )


def test_a_dataset_of_pillow_images() -> None:
    image = pytest.importorskip("PIL.Image")
    x = pixels(5, 6, 7, 3)
    gray = pixels(5, 6, 7)
    check(
        open_data(Items(lambda i: (image.fromarray(x[i]), LABELS[i]))),
        floats(x).transpose(0, 3, 1, 2),
        LABELS,
    )
    check(
        open_data(Items(lambda i: (image.fromarray(gray[i]), LABELS[i]))),
        floats(gray)[:, None],
        LABELS,
    )


def test_datasets_that_are_refused() -> None:
    assert "remove random transforms" in refused(
        lambda: open_data(Items(lambda i: (torch.rand(3), 0)))
    )
    assert "must be a pair" in refused(lambda: open_data(Items(lambda i: X[i])))
    assert "labels are class indices" in refused(lambda: open_data(Items(lambda i: (X[i], 0.5))))
    assert "labels are class indices" in refused(lambda: open_data(Items(lambda i: (X[i], 2**63))))
    assert "no samples" in refused(lambda: open_data(Items(lambda i: (X[i], 0), size=0)))
    assert "one size" in refused(
        lambda: open_data(Items(lambda i: (torch.zeros(i + 1), 0))).read(0, 2)
    )


def test_a_loader_in_order_is_its_dataset() -> None:
    dataset = TensorDataset(X, torch.from_numpy(LABELS))
    data = open_data(DataLoader(dataset, batch_size=2))
    check(data, X, LABELS)
    assert data.info["source"] == "dataset"


@pytest.mark.parametrize("kind", ["shuffled", "collated", "short", "single"])
def test_any_other_loader_is_read_once(kind: str) -> None:
    dataset = TensorDataset(X, torch.from_numpy(LABELS))
    kinds: dict[str, dict[str, Any]] = {
        "shuffled": {
            "batch_size": 2,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(0),
        },
        "collated": {
            "batch_size": 2,
            "collate_fn": lambda items: {
                "x": torch.stack([i[0] for i in items]),
                "y": [int(i[1]) for i in items],
            },
        },
        "short": {"batch_size": 2, "drop_last": True},
        "single": {"batch_size": None, "shuffle": True},
    }
    options = kinds[kind]
    data = open_data(DataLoader(dataset, **options))
    places = [next(i for i in range(5) if torch.equal(X[i], x)) for x in data.read(0, 9)[0]]
    check(data, X[places], LABELS[places])
    assert len(places) == (4 if kind == "short" else 5) and data.info["source"] == "loader"
    assert len(open_data(DataLoader(dataset, **options), 3)) == 3
    double = open_data(
        DataLoader(TensorDataset(X.double() / 3, torch.from_numpy(LABELS)), **options)
    )
    assert all(any(torch.equal(x, known) for known in X.double() / 3) for x in double.read(0, 9)[0])
    if kind == "shuffled":
        assert places != sorted(places)
        assert (
            open_data(DataLoader(dataset, **options)).info["sha256"] != data.info["sha256"]
        )  # another order is another set


def test_an_iterable_dataset() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((X[i], LABELS[i]) for i in range(5))

    check(open_data(Stream()), X, LABELS)
    check(open_data(DataLoader(Stream(), batch_size=2)), X, LABELS)
    check(open_data(Stream(), 3), X[:3], LABELS[:3])


def test_a_loader_that_yields_no_pairs() -> None:
    assert "must be pairs" in refused(
        lambda: open_data(DataLoader(TensorDataset(X), batch_size=2, shuffle=True))
    )
    assert "yields no samples" in refused(
        lambda: open_data(DataLoader(Items(lambda i: i, 0), batch_size=2, drop_last=True))
    )


def test_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"data_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n\ndef pair(n):\n    return torch.ones(n, 2), torch.arange(n)\n\ndef "
        "wrong():\n    return 'words'\n"
    )
    monkeypatch.chdir(tmp_path)
    data = open_data(f"{name}:pair(4)")
    check(data, torch.ones(4, 2), torch.arange(4))
    assert list(data.info["files"]) == [f"{name}.py"]
    refused(lambda: open_data(f"{name}:wrong"))
    assert "No module named 'nowhere'" in refused(lambda: open_data("nowhere:data"))


def test_names_that_are_no_data(tmp_path: Path) -> None:
    assert "does not exist" in refused(lambda: open_data(str(tmp_path / "none")))
    (tmp_path / "a.txt").write_text("words")
    assert "no kind of data" in refused(lambda: open_data(tmp_path / "a.txt"))
    for options in ({"ids": "x"}, {"preprocessing": "Res4"}):
        refused(lambda options=options: open_data("digits", **options))
        refused(lambda options=options: open_data((X, LABELS), **options))


# ---- Hugging Face: their library is replaced by one that writes down how it is called
# ------------------------------------


class Table(list[Any]):
    def __init__(self, rows: list[Any], features: dict[str, Any]) -> None:
        super().__init__(rows)
        self.features = features
        self._fingerprint = "abc"
        self.split = None


def test_huggingface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    x = pixels(5, 6, 7)
    kinds = {
        "id": object(),
        "img": type("Image", (), {})(),
        "label": type("ClassLabel", (), {"names": list("abcd")})(),
    }
    table = Table(
        [{"id": i, "img": image.fromarray(x[i]), "label": int(LABELS[i])} for i in range(5)], kinds
    )
    calls: list[Any] = []

    def load_dataset(name: str) -> Any:
        calls.append(name)
        if name == "nothing":
            raise ConnectionError("no connection")
        return {"train": table, "test": table}

    library = types.ModuleType("datasets")
    library.__version__ = "1"
    library.load_dataset = load_dataset
    library.load_from_disk = lambda name: calls.append(name) or table
    monkeypatch.setitem(sys.modules, "datasets", library)
    (tmp_path / "state.json").write_text("{}")
    for name in (str(tmp_path), f"hf:{tmp_path}", "hf:people/set", "hf:people/set:train"):
        data = open_data(name)
        check(data, floats(x)[:, None], LABELS)
        assert data.classes == tuple("abcd") and data.info["columns"] == ["img", "label"]
    assert calls == [str(tmp_path)] * 2 + ["people/set"] * 2
    assert open_data("hf:people/set", preprocessing="Res4").shape == (1, 4, 4)
    assert "has the splits train, test" in refused(lambda: open_data("hf:people/set:val"))
    assert "(no connection)" in refused(lambda: open_data("hf:nothing"))
    del kinds["img"]
    assert "has columns id, label" in refused(lambda: open_data("hf:people/set"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "install it with pip install datasets" in refused(lambda: open_data("hf:people/set"))


def test_the_published_images(zoo: Any) -> None:
    for name, n in (("cifar10", 30), ("mnist", 30), ("imagenet", 3)):
        file = {"imagenet": "imagenet_100"}.get(name, f"{name}_test")
        check(open_data(str(zoo.HERE / "data" / f"{file}.npz"), n), *zoo.images(name, n))
