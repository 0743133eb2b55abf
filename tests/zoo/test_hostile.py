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
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fuzz import build
from fuzz.build import Program, Raw
from wassail.errors import InputError
from wassail.zoo import operators, trial
from wassail.zoo.datasets import open_data
from wassail.zoo.exported import load_exported
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


# ---- .pt2: operators and their arguments
# ---------------------------------------------------------------------------------


def test_files_by_hand_are_read(tmp_path: Path) -> None:
    for batch in (None, 1, 3):
        model = load_exported(build.convolutional(tmp_path / "c.pt2", batch))
        x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
        assert (
            model(x).shape == (5, 3) and torch.autograd.grad(model(x).sum(), x)[0].abs().sum() > 0
        )
        torch.testing.assert_close(model(x)[2:3], model(x[2:3]))
    assert load_exported(build.shapes(tmp_path / "s.pt2"))(torch.rand(4, 2, 4, 4)).shape == (4, 3)


STATISTICS = {"weight": None, "bias": None, "momentum": 0.1, "eps": 1e-5}
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "short statistics": (
        "_native_batch_norm_legit_no_training.default",
        {"input": "x", **STATISTICS, "running_mean": torch.zeros(1), "running_var": torch.ones(1)},
    ),
    "short statistics, by the usual name": (
        "batch_norm.default",
        {
            "input": "x",
            **STATISTICS,
            "running_mean": torch.zeros(4),
            "running_var": torch.ones(3),
            "training": False,
            "cudnn_enabled": False,
        },
    ),
    "training": (
        "batch_norm.default",
        {
            "input": "x",
            **STATISTICS,
            "running_mean": torch.zeros(4),
            "running_var": torch.ones(4),
            "training": True,
            "cudnn_enabled": False,
        },
    ),
    "the old batch norm": (
        "native_batch_norm.default",
        {
            "input": "x",
            **STATISTICS,
            "running_mean": torch.zeros(1),
            "running_var": torch.ones(1),
            "training": True,
        },
    ),
    "a view as another type": ("view.dtype", {"self": "x", "dtype": -1}),
    "a type that is a number": ("to.dtype", {"self": "x", "dtype": -1}),
    "a type that is none": ("to.dtype", {"self": "x", "dtype": Raw({"as_scalar_type": 99})}),
    "memory as it is found": ("empty.memory_format", {"size": [2, 3]}),
    "the same, like another": ("empty_like.default", {"self": "x"}),
    "the same, by strides": ("empty_strided.default", {"size": [2, 3], "stride": [3, 1]}),
    "a view beyond its memory": (
        "as_strided.default",
        {"self": "x", "size": [9, 9], "stride": [99, 1]},
    ),
    "random numbers": ("rand.default", {"size": [2, 3]}),
    "dropout": ("dropout.default", {"input": "x", "p": 0.5, "train": True}),
    "attention that drops": (
        "scaled_dot_product_attention.default",
        {"query": "x", "key": "x", "value": "x", "dropout_p": 0.5},
    ),
    "weights that are written to": ("relu_.default", {"self": torch.zeros(3)}),
    "copied over": ("copy_.default", {"self": "x", "src": torch.zeros(3)}),
    "no groups": ("conv1d.default", {"input": "x", "weight": torch.zeros(1, 4, 1), "groups": 0}),
    "too few channels": (
        "conv1d.default",
        {"input": "x", "weight": torch.zeros(4, 2, 1), "groups": 1},
    ),
    "a negative padding": (
        "conv1d.default",
        {"input": "x", "weight": torch.zeros(1, 4, 1), "padding": [-2]},
    ),
    "an absurd padding": (
        "conv1d.default",
        {"input": "x", "weight": torch.zeros(1, 4, 1), "padding": [2**62]},
    ),
    "an absurd dilation": (
        "conv1d.default",
        {"input": "x", "weight": torch.zeros(1, 4, 3), "dilation": [2**31]},
    ),
    "no stride": ("max_pool1d.default", {"self": "x", "kernel_size": [2], "stride": [0]}),
    "no window": ("avg_pool1d.default", {"self": "x", "kernel_size": [0]}),
    "a view of another size": ("view.default", {"self": "x", "size": [2**31, 2**31, 4]}),
    "two open sizes": ("reshape.default", {"self": "x", "shape": [-1, -1]}),
    "an absurd size": ("full.default", {"size": [2**31, 2**31, 2], "fill_value": 0.0}),
    "a large size": ("full.default", {"size": [10**6, 10**6], "fill_value": 0.0}),
    "an absurd repetition": ("repeat.default", {"self": "x", "repeats": [2**20, 2**20, 2**20]}),
    "an index that is no integer": ("index.Tensor", {"self": "x", "indices": ["x"]}),
    "an entry that is not there": ("select.int", {"self": "x", "dim": 1, "index": 4}),
    "a word for a number": ("add.Scalar", {"self": "x", "other": "one"}),
    "a number for a tensor": ("relu.default", {"self": 3}),
    "a missing argument": ("add.Tensor", {"self": "x"}),
    "an argument of another name": ("relu.default", {"self": "x", "out": "x"}),
    "groups that do not divide": ("group_norm.default", {"input": "x", "num_groups": 3}),
    "a scale that is negative": (
        "upsample_nearest2d.default",
        {"self": "x", "output_size": [4, 4], "scales_h": -1.0, "scales_w": -1.0},
    ),
    "endless counting": ("arange.start_step", {"start": 0, "end": 10, "step": 0}),
    "integers divided": (
        "floor_divide.default",
        {"self": torch.tensor([1]), "other": torch.tensor([0])},
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_operator_with_hostile_arguments_is_not_called(tmp_path: Path, kind: str) -> None:
    target, arguments = HOSTILE[kind]
    shape = (4, 4, 4) if "upsample" in target else (4, 6)
    p = Program(*shape)
    filled: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, str) and value == "x":
            filled[name] = p.x
        elif isinstance(value, list) and value == ["x"]:
            filled[name] = [p.x]
        else:
            filled[name] = p.weight(value) if isinstance(value, torch.Tensor) else value
    x = p.call(target, **filled)
    refused(lambda: load_exported(p.save(tmp_path / "evil.pt2", x)))


def test_what_writes_over_a_value_in_use_is_refused_and_nothing_else_is(tmp_path: Path) -> None:
    x = torch.tensor([[-1.0, 2.0, -3.0, 4.0]])
    p = Program(4)
    y = p.call("mul.Tensor", self=p.x, other=p.weight(torch.ones(4)))
    p.call("relu_.default", self=y)  # what follows sees the new value, as the memory would show it
    z = p.linear(p.call("add.Tensor", self=y, other=p.x), 4)
    weight = p.weights["w1"][0]
    torch.testing.assert_close(
        load_exported(p.save(tmp_path / "a.pt2", z))(x), (x.relu() + x) @ weight.T
    )
    p = Program(4)
    y = p.call("mul.Tensor", self=p.x, other=p.weight(torch.ones(4)))
    seen = p.call("view.default", self=y, size=[-1, 2, 2])
    p.call("relu_.default", self=y)
    z = p.linear(p.call("flatten.using_ints", self=seen, start_dim=1), 4)
    assert "uses again" in refused(lambda: load_exported(p.save(tmp_path / "b.pt2", z)))
    p = Program(4)
    held = p.call("view.default", self=p.weight(torch.ones(4)), size=[1, 4])
    p.call("relu_.default", self=held)
    z = p.linear(p.x, 4)
    assert "its own weights" in refused(lambda: load_exported(p.save(tmp_path / "c.pt2", z)))


def test_every_operator_is_a_function() -> None:
    """Nothing on the list writes, draws random numbers or returns memory as it is found."""
    for name in operators.NAMES:
        found = operators.find(f"torch.ops.aten.{name}")
        assert found is not None
        schema = found.run._schema
        assert not schema.is_mutable and "Generator" not in str(schema), name
        assert (
            torch.Tag.nondeterministic_seeded not in found.run.tags
            or "dropout" in name
            or "attention" in name
        ), name
        assert "empty" not in name


def test_a_stride_of_which_the_gradient_never_ends(tmp_path: Path) -> None:
    p = Program(4, 6)
    x = p.call(
        "conv1d.default", input=p.x, weight=p.weight(torch.ones(2, 4, 3)), stride=[2**31 - 1]
    )
    x = p.call("sum.dim_IntList", self=x, dim=[2])
    assert "its stride is" in refused(lambda: load_exported(p.save(tmp_path / "e.pt2", x)))


def test_integers_that_are_squared_end(tmp_path: Path) -> None:
    p = Program(4)
    size = p.call("sym_size.int", self=p.x, dim=1)
    for _ in range(40):
        size = p.call("_operator.mul", a=size, b=size)
    x = p.call("view.default", self=p.x, size=[-1, size])
    assert "a size is computed that no tensor can have" in refused(
        lambda: load_exported(p.save(tmp_path / "e.pt2", x))
    )


def test_what_is_hostile_for_other_batches_only_is_found_then(tmp_path: Path) -> None:
    """Statistics as long as the batch, up to five: right for the rows that are tried, short for
    the sixth.
    """
    p = Program(3, 3)
    x = p.call("transpose.int", self=p.x, dim0=0, dim1=1)
    held = {name: p.weight(torch.ones(5)) for name in ("running_mean", "running_var")}
    n = p.call("sym_size.int", self=p.x, dim=0)
    cut = {
        name: p.call("slice.Tensor", self=ref, dim=0, start=0, end=n) for name, ref in held.items()
    }
    norm = "_native_batch_norm_legit_no_training.default"
    p.call(norm, input=x, **cut, **STATISTICS)
    p.nodes[-1]["outputs"] = [{"as_tensor": {"name": name}} for name in ("u", "v", "w")]
    x = p.call("sum.dim_IntList", self=build.Ref("u"), dim=[0])
    model = load_exported(p.save(tmp_path / "e.pt2", x))
    assert model(torch.rand(5, 3, 3)).shape == (5, 3)
    with pytest.raises(ValueError, match="for 6 channels"):
        model(torch.rand(6, 3, 3))


def test_what_grows_faster_than_the_batch_is_refused(tmp_path: Path) -> None:
    """64 numbers for the two samples that are tried in a process with limits, 64 million for
    the twenty that come next.
    """
    p = Program(3)
    n = p.call("sym_size.int", self=p.x, dim=0)
    size = n
    for _ in range(5):
        size = p.call("_operator.mul", a=size, b=n)
    x = p.call(
        "add.Tensor",
        self=p.x,
        other=p.call("sum.default", self=p.call("ones.default", size=[size])),
    )
    model = load_exported(p.save(tmp_path / "e.pt2", x))
    assert model(torch.rand(2, 3)).shape == (2, 3)
    with pytest.raises(InputError, match="would have 64000000 for 20"):
        model(torch.rand(20, 3))


def test_a_weight_of_many_numbers_in_few_bytes(tmp_path: Path) -> None:
    many = 10**9
    p = Program(4)
    sizes = {"sizes": [{"as_int": many}], "strides": [{"as_int": 0}]}
    x = p.call("mul.Tensor", self=p.linear(p.x, 4), other=p.weight(torch.ones(1), **sizes))
    assert "no bytes for it" in refused(lambda: load_exported(p.save(tmp_path / "e.pt2", x)))
    state = {"weight": torch.ones(1).expand(many), "bias": torch.zeros(3)}
    torch.save(state, tmp_path / "w.pt")
    assert (tmp_path / "w.pt").stat().st_size < 12_000
    assert f"weight has {many} numbers in 4 bytes" in refused(lambda: read_state(tmp_path / "w.pt"))


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
    path = build.convolutional(tmp_path / "net.pt2")
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
    assert torch.equal(
        open_model("net.pt2").model(torch.ones(1, 1, 8, 8)), model(torch.ones(1, 1, 8, 8))
    )
    (tmp_path / "copy.pt2").write_bytes(path.read_bytes())
    open_model(str(tmp_path / "copy.pt2"))
    assert len(started) == 1 and started[0]["start_new_session"]
    assert "preexec_fn" not in started[0]


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

    path = build.convolutional(tmp_path / "net.pt2")
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
    assert "pipe or a device" in refused(lambda: load_exported(tmp_path / "net.pt2"))
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


def test_networks_of_the_usual_kinds_are_read(tmp_path: Path) -> None:
    """What torch.export writes for layers that classifiers are made of: everything on the list
    must be right.
    """
    layers = [
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(inplace=True),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8),
        nn.GroupNorm(2, 8),
        nn.Hardswish(),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 16),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Unflatten(1, (4, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.Flatten(),
        nn.PReLU(),
        nn.Linear(16, 3),
    ]
    torch.manual_seed(0)
    model = nn.Sequential(*layers).eval()
    x = torch.rand(2, 3, 16, 16)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch about itself
        core = program.run_decompositions()
    for name, made in (("plain", program), ("core", core)):
        torch.export.save(made, tmp_path / f"{name}.pt2")
        found = load_exported(tmp_path / f"{name}.pt2")
        y = torch.rand(5, 3, 16, 16, requires_grad=True)
        torch.testing.assert_close(found(y), model(y))
        grads = [torch.autograd.grad(network(y).square().sum(), y)[0] for network in (found, model)]
        torch.testing.assert_close(*grads)


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
