"""ONNX files: the published networks of the zoo where they are at hand, and small graphs built
here.
"""

import copy
import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx

from wassail.certificates.graph.reader import read
from wassail.errors import InputError
from wassail.zoo.onnx import load_onnx

onnx = pytest.importorskip("onnx")
Spec = tuple[
    str, Sequence[str], Sequence[str], dict[str, Any]
]  # operator, inputs, outputs, attributes

WIDE = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
FILES = {  # file: (normalisation, data, images, correct ones of them)
    "cifar_vit_pgd_2_3_16": (WIDE, "cifar10", 300, 186),
    "cifar_vit_ibp_3_3_8": (WIDE, "cifar10", 300, 186),
    "cifar_sri_resnet_a": (WIDE, "cifar10", 1000, 799),
    "cifar_resnet_2b": (((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)), "cifar10", 1000, 703),
    "mnist_fc_256x2": ((None, None), "mnist", 1000, 978),
    "mnist_fc_256x4": ((None, None), "mnist", 1000, 974),
    "mnist_fc_256x6": ((None, None), "mnist", 1000, 965),
    "mnist_convnet_maxpool": ((None, None), "mnist", 1000, 976),
    "mnist_convnet_avgpool": ((None, None), "mnist", 1000, 974),
}


def write(
    path: Path,
    nodes: Sequence[Spec],
    weights: dict[str, Any],
    shape: Sequence[Any],
    opset: int = 17,
    outputs: Sequence[tuple[str, Any]] = (("z", [1, None]),),
    more_inputs: Sequence[str] = (),
) -> Path:
    """A graph from "x" to "z" as a file."""
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node(op, list(i), list(o), name=f"{op}_{k}", **a)
            for k, (op, i, o, a) in enumerate(nodes)
        ],
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name in ("x", *more_inputs)],
        [helper.make_tensor_value_info(name, kind, sizes) for name, sizes in outputs],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, str(path))
    return path


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def runtime(path: Path, x: Tensor) -> Tensor:
    """What onnxruntime answers to the images one by one, shaped as the graph has them."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (image,) = session.get_inputs()
    shape = [size if isinstance(size, int) else 1 for size in image.shape]
    return torch.cat(
        [
            torch.from_numpy(session.run(None, {image.name: row.reshape(shape).numpy()})[0])
            for row in x
        ]
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A fixed batch of one in three places (Slice and Reshape, a class token, the last
    Reshape), and uneven padding.
    """
    nodes: list[Spec] = [
        (
            "Conv",
            ["x", "w", "b"],
            ["c"],
            {"kernel_shape": [3, 2], "pads": [0, 1, 2, 0], "strides": [2, 1]},
        ),
        ("Tanh", ["c"], ["t"], {}),
        ("Slice", ["t"], ["s"], {"starts": [0, 1, -3], "ends": [1, 4, 9999], "axes": [0, 1, 3]}),
        ("Reshape", ["s", "tokens"], ["r"], {}),
        ("Concat", ["token", "r"], ["k"], {"axis": 1}),
        ("Softmax", ["k"], ["p"], {"axis": 2}),
        ("Reshape", ["p", "flat"], ["f"], {}),
        ("Gemm", ["f", "v", "d"], ["z"], {"transB": 1}),
    ]
    weights = {
        "w": normal(4, 2, 3, 2), "b": normal(4), "tokens": ints(1, 3, 9), "token": normal(1, 1, 9),
        "flat": ints(1, -1), "v": normal(3, 36), "d": normal(3),
    }  # fmt: skip
    return write(tmp_path / "tiny.onnx", nodes, weights, [1, 2, 5, 5], opset=9)


def by_hand(x: Tensor) -> Tensor:
    """The same network, written in torch."""
    w, b, token, v, d = map(
        torch.from_numpy, (normal(4, 2, 3, 2), normal(4), normal(1, 1, 9), normal(3, 36), normal(3))
    )
    t = torch.conv2d(torch.nn.functional.pad(x, (1, 0, 0, 2)), w, b, stride=(2, 1)).tanh()
    r = t[:, 1:4, :, -3:].reshape(len(x), 3, 9)
    return torch.cat([token.expand(len(x), 1, 9), r], 1).softmax(2).flatten(1) @ v.T + d


# ---- A small graph
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_a_fixed_batch_of_one_takes_any_batch(tiny: Path, size: int) -> None:
    x = torch.randn(size, 2, 5, 5, generator=torch.Generator().manual_seed(size))
    z = load_onnx(tiny)(x)
    assert z.shape == (size, 3)
    torch.testing.assert_close(z, by_hand(x))


def test_the_small_graph_agrees_with_onnxruntime(tiny: Path) -> None:
    x = torch.randn(5, 2, 5, 5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(load_onnx(tiny)(x), runtime(tiny, x), rtol=0, atol=1e-5)


def test_gradient_matches_finite_differences(tiny: Path) -> None:
    model = load_onnx(tiny, mean=(0.1, 0.2), std=(0.5, 2.0)).double()
    x = torch.randn(
        2,
        2,
        5,
        5,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
        requires_grad=True,
    )
    assert model(x).dtype == torch.float64
    assert torch.autograd.gradcheck(model, (x,))


def test_the_module_is_frozen_eval_float32_and_can_be_copied(tiny: Path) -> None:
    model = load_onnx(tiny)
    x = torch.rand(3, 2, 5, 5)
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert len(list(model.parameters())) == 5
    assert list(model.buffers()) == []  # targets and slices are plain numbers by now
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_fx_traces_the_module_for_every_batch_size(tiny: Path) -> None:
    model = load_onnx(tiny, mean=0.5)
    traced = fx.symbolic_trace(model)
    for size in (1, 4):
        x = torch.rand(size, 2, 5, 5)
        assert torch.equal(traced(x), model(x))


def test_images_of_another_shape_are_read_in_row_major_order(tiny: Path) -> None:
    model = load_onnx(tiny)
    x = torch.rand(4, 2, 5, 5)
    assert torch.equal(model(x.flatten(1)), model(x))
    assert torch.equal(model(x.reshape(4, 5, 10)), model(x))
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.rand(4, 2, 5, 10))  # not eight images


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.1, 0.2), (0.5, 2.0)),
        (0.3, 0.7),
        ((0.3,), None),
        (None, torch.tensor([2.0, 3.0])),
        (0.3, (1, 2)),
    ],
)
def test_normalisation(tiny: Path, mean: Any, std: Any) -> None:
    x = torch.rand(3, 2, 5, 5)
    m = torch.as_tensor(0.0 if mean is None else mean).reshape(-1, 1, 1)
    s = torch.as_tensor(1.0 if std is None else std).reshape(-1, 1, 1)
    torch.testing.assert_close(load_onnx(tiny, mean, std)(x), by_hand((x - m) / s))


# ---- Operators
# --------------------------------------------------------------------------------------------------

IMAGE = (1, 4, 6, 5)
NEAREST = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
CORNERS = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
# name: (version, shape of the image, nodes from "x" to "y", weights). A Reshape to (1, -1) comes
# last.
CASES: dict[str, tuple[int, Sequence[Any], list[Spec], dict[str, Any]]] = {
    "unary": (
        20,
        IMAGE,
        [
            ("Neg", ["x"], ["a"], {}),
            ("LeakyRelu", ["a"], ["b"], {"alpha": 0.3}),
            ("Sigmoid", ["b"], ["c"], {}),
            ("Sqrt", ["c"], ["d"], {}),
            ("Erf", ["d"], ["e"], {}),
            ("Gelu", ["e"], ["f"], {}),
            ("Gelu", ["f"], ["g"], {"approximate": "tanh"}),
            ("Elu", ["x"], ["h"], {"alpha": 0.5}),
            ("Exp", ["h"], ["i"], {}),
            ("Abs", ["i"], ["j"], {}),
            ("Log", ["j"], ["k"], {}),
            ("Softplus", ["k"], ["l"], {}),
            ("Reciprocal", ["l"], ["m"], {}),
            ("Relu", ["x"], ["n"], {}),
            ("Identity", ["n"], ["o"], {}),
            ("Dropout", ["o"], ["p"], {}),
            ("Sum", ["g", "m", "p"], ["y"], {}),
        ],
        {},
    ),
    "arithmetic": (
        13,
        IMAGE,
        [
            ("Add", ["x", "c"], ["a"], {}),
            ("Sub", ["s", "a"], ["b"], {}),
            ("Div", ["b", "w"], ["d"], {}),
            ("Pow", ["d", "two"], ["e"], {}),
            ("Max", ["e", "x", "s"], ["f"], {}),
            ("Min", ["f", "w"], ["g"], {}),
            ("Clip", ["g", "", "top"], ["h"], {}),
            ("Cast", ["h"], ["i"], {"to": 1}),
            ("Mul", ["i", "i"], ["y"], {}),
        ],
        {
            "c": normal(4, 1, 1),
            "s": np.float32(0.7),
            "w": np.abs(normal(1, 4, 1, 5)) + 1,
            "two": np.float32(2),
            "top": np.float32(2.5),
        },
    ),
    "rank grows by a constant": (
        13,
        (1, 6),
        [("Mul", ["x", "w"], ["y"], {})],
        {"w": normal(3, 2, 1, 6)},
    ),
    "ranks differ": (
        13,
        (1, 2, 3),
        [  # (1, 2, 3) * (1, 3): each image times its own mean
            ("ReduceMean", ["x"], ["m"], {"axes": [1], "keepdims": 0}),
            ("Mul", ["x", "m"], ["y"], {}),
        ],
        {},
    ),
    "clip by attributes": (6, IMAGE, [("Clip", ["x"], ["y"], {"min": -0.5, "max": 0.25})], {}),
    "pow by a tensor": (
        13,
        IMAGE,
        [("Abs", ["x"], ["a"], {}), ("Pow", ["a", "e"], ["y"], {})],
        {"e": np.abs(normal(6, 1))},
    ),
    "gemm": (
        13,
        (1, 6),
        [
            ("Gemm", ["x", "w", "c"], ["a"], {"alpha": 0.5, "beta": 2.0}),
            ("Gemm", ["a", "v"], ["b"], {"transB": 1}),
            ("Gemm", ["b", "w2", "s"], ["y"], {}),
        ],
        {
            "w": normal(6, 4),
            "c": normal(1, 4),
            "v": normal(3, 4),
            "w2": normal(3, 2),
            "s": normal(1),
        },
    ),
    "gemm of many rows": (
        13,
        (1, 3, 4),
        [
            ("Reshape", ["x", "rows"], ["r"], {}),
            ("Gemm", ["r", "w", "c"], ["a"], {"transA": 1, "transB": 1}),
            ("Gemm", ["v", "a", "a"], ["y"], {}),
        ],
        {"rows": ints(3, 4), "w": normal(4, 3), "c": normal(4), "v": normal(4, 4)},
    ),
    "matmul": (
        13,
        (1, 2, 3, 4),
        [
            ("MatMul", ["x", "w"], ["a"], {}),
            ("MatMul", ["v", "a"], ["b"], {}),
            ("Transpose", ["b"], ["c"], {"perm": [0, 1, 3, 2]}),
            ("MatMul", ["b", "c"], ["d"], {}),
            ("MatMul", ["d", "e"], ["y"], {}),
        ],
        {"w": normal(4, 4), "v": normal(1, 2, 5, 3), "e": normal(5)},
    ),
    "matmul of vectors and matrices": (
        13,
        (1, 6),
        [
            ("MatMul", ["x", "w"], ["a"], {}),
            ("Squeeze", ["a", "zero"], ["b"], {}),
            ("MatMul", ["b", "v"], ["c"], {}),
            ("MatMul", ["u", "b"], ["d"], {}),
            ("MatMul", ["b", "d"], ["e"], {}),
            ("Transpose", ["x"], ["f"], {}),
            ("MatMul", ["f", "x"], ["g"], {}),
            ("Mul", ["e", "g"], ["h"], {}),
            ("Unsqueeze", ["c", "zero"], ["i"], {}),
            ("MatMul", ["i", "h"], ["y"], {}),
        ],
        {"w": normal(6, 4), "zero": ints(0), "v": normal(4, 6), "u": normal(4, 4)},
    ),
    "conv with groups, dilations and strides": (
        11,
        IMAGE,
        [
            (
                "Conv",
                ["x", "w", "b"],
                ["y"],
                {"group": 2, "dilations": [2, 1], "strides": [1, 2], "pads": [1, 0, 1, 0]},
            )
        ],
        {"w": normal(6, 2, 3, 2), "b": normal(6)},
    ),
    "conv same upper": (
        11,
        IMAGE,
        [("Conv", ["x", "w"], ["y"], {"auto_pad": "SAME_UPPER", "strides": [2, 2]})],
        {"w": normal(2, 4, 3, 4)},
    ),
    "conv same lower": (
        11,
        IMAGE,
        [("Conv", ["x", "w"], ["y"], {"auto_pad": "SAME_LOWER", "strides": [1, 2]})],
        {"w": normal(2, 4, 2, 4)},
    ),
    "conv valid": (
        11,
        IMAGE,
        [("Conv", ["x", "w"], ["y"], {"auto_pad": "VALID"})],
        {"w": normal(2, 4, 3, 2)},
    ),
    "conv in one dimension": (
        11,
        (1, 3, 7),
        [("Conv", ["x", "w"], ["y"], {"pads": [2, 0]})],
        {"w": normal(2, 3, 3)},
    ),
    "conv of several images in one": (
        11,
        (1, 2, 3, 4, 4),
        [
            ("Reshape", ["x", "r"], ["a"], {}),
            ("Conv", ["a", "w"], ["b"], {}),
            ("BatchNormalization", ["b", *"cdef"], ["y"], {}),
        ],
        {
            "r": ints(-1, 3, 4, 4),
            "w": normal(2, 3, 2, 2),
            "c": normal(2),
            "d": normal(2),
            "e": normal(2),
            "f": np.abs(normal(2)),
        },
    ),
    "batch norm of rows": (
        9,
        (1, 6),
        [("BatchNormalization", ["x", *"abcd"], ["y"], {"epsilon": 0.1})],
        {"a": normal(6), "b": normal(6), "c": normal(6), "d": np.abs(normal(6))},
    ),
    "max pool": (
        12,
        IMAGE,
        [
            (
                "MaxPool",
                ["x"],
                ["y"],
                {
                    "kernel_shape": [3, 2],
                    "strides": [2, 2],
                    "pads": [1, 0, 0, 1],
                    "dilations": [1, 2],
                },
            )
        ],
        {},
    ),
    "max pool over the end": (
        12,
        (1, 2, 6, 8),
        [("MaxPool", ["x"], ["y"], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1})],
        {},
    ),
    "average pool": (
        11,
        IMAGE,
        [
            (
                "AveragePool",
                ["x"],
                ["y"],
                {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 0, 1]},
            )
        ],
        {},
    ),
    "average pool with its padding": (
        11,
        IMAGE,
        [
            (
                "AveragePool",
                ["x"],
                ["y"],
                {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1},
            )
        ],
        {},
    ),
    "average pool over the end": (
        11,
        (1, 2, 6, 8),
        [
            (
                "AveragePool",
                ["x"],
                ["y"],
                {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
            )
        ],
        {},
    ),
    "average pool same": (
        11,
        IMAGE,
        [("AveragePool", ["x"], ["y"], {"kernel_shape": [2, 4], "auto_pad": "SAME_LOWER"})],
        {},
    ),
    "global pools": (
        11,
        IMAGE,
        [
            ("GlobalAveragePool", ["x"], ["a"], {}),
            ("GlobalMaxPool", ["x"], ["b"], {}),
            ("Concat", ["a", "b"], ["y"], {"axis": 1}),
        ],
        {},
    ),
    "flatten": (
        13,
        IMAGE,
        [("Flatten", ["x"], ["a"], {"axis": 2}), ("MatMul", ["w", "a"], ["y"], {})],
        {"w": normal(3, 4)},
    ),
    "flatten to one row": (13, IMAGE, [("Flatten", ["x"], ["y"], {"axis": 0})], {}),
    # (3, 1, heads, tokens, width) by Transpose, Gather on axis 0
    "heads as timm splits them": (
        13,
        (1, 5, 6),
        [
            ("MatMul", ["x", "w"], ["a"], {}),
            ("Reshape", ["a", "r"], ["b"], {}),
            ("Transpose", ["b"], ["c"], {"perm": [2, 0, 3, 1, 4]}),
            ("Gather", ["c", "0"], ["q"], {"axis": 0}),
            ("Gather", ["c", "1"], ["k"], {"axis": 0}),
            ("Gather", ["c", "-1"], ["v"], {}),
            ("Transpose", ["k"], ["kt"], {"perm": [0, 1, 3, 2]}),
            ("MatMul", ["q", "kt"], ["s"], {}),
            ("Softmax", ["s"], ["p"], {"axis": -1}),
            ("MatMul", ["p", "v"], ["y"], {}),
        ],
        {
            "w": normal(6, 18),
            "r": ints(1, 5, 3, 2, 3),
            "0": np.int64(0),
            "1": np.int64(1),
            "-1": np.int64(-1),
        },
    ),
    # as torch's attention has them, then (batch x heads, tokens, ...)
    "tokens before images": (
        13,
        (1, 5, 6),
        [
            ("Transpose", ["x"], ["a"], {"perm": [1, 0, 2]}),
            ("MatMul", ["a", "w"], ["b"], {}),
            ("Reshape", ["b", "r"], ["c"], {}),
            ("Transpose", ["c"], ["d"], {"perm": [1, 0, 2]}),
            ("Transpose", ["c"], ["e"], {"perm": [1, 2, 0]}),
            ("MatMul", ["d", "e"], ["f"], {}),
            ("Softmax", ["f"], ["g"], {}),
            ("MatMul", ["g", "d"], ["h"], {}),
            ("Transpose", ["h"], ["i"], {"perm": [1, 0, 2]}),
            ("Reshape", ["i", "s"], ["j"], {}),
            ("Add", ["j", "a"], ["k"], {}),
            ("LayerNormalization", ["k", "g1", "b1"], ["l"], {}),
            ("Transpose", ["l"], ["y"], {"perm": [1, 0, 2]}),
        ],
        {
            "w": normal(6, 6),
            "r": ints(5, 2, 3),
            "s": ints(5, 1, 6),
            "g1": normal(6),
            "b1": normal(6),
        },
    ),
    "softmax of old": (
        9,
        (1, 3, 4),
        [("Softmax", ["x"], ["a"], {}), ("LogSoftmax", ["a"], ["y"], {"axis": 2})],
        {},
    ),
    "softmax over axis 0": (
        13,
        (1, 3, 4),
        [
            ("Softmax", ["x"], ["a"], {"axis": 0}),
            ("Transpose", ["x"], ["b"], {"perm": [1, 0, 2]}),
            ("LogSoftmax", ["b"], ["c"], {"axis": 0}),
            ("Mul", ["a", "c"], ["y"], {}),
        ],
        {},
    ),
    "concat along axis 0": (
        13,
        (1, 3, 4),
        [("Concat", ["x", "c", "x"], ["y"], {"axis": 0})],
        {"c": normal(2, 3, 4)},
    ),
    "class token by Expand": (
        13,
        ("batch", 3, 4),
        [
            ("Shape", ["x"], ["s"], {}),
            ("Gather", ["s", "0"], ["n"], {}),
            ("Unsqueeze", ["n", "zero"], ["u"], {}),
            ("Concat", ["u", "rest"], ["t"], {"axis": 0}),
            ("Expand", ["token", "t"], ["e"], {}),
            ("Concat", ["e", "x"], ["y"], {"axis": 1}),
        ],
        {"0": np.int64(0), "zero": ints(0), "rest": ints(1, 4), "token": normal(1, 1, 4)},
    ),
    "class token by ConstantOfShape": (
        13,
        ("batch", 3, 4),
        [
            ("Shape", ["x"], ["s"], {}),
            ("Slice", ["s", "zero", "one"], ["u"], {}),
            ("Div", ["u", "one"], ["d"], {}),
            ("Mod", ["d", "rest"], ["m"], {}),
            ("Slice", ["m", "one", "two"], ["v"], {}),
            ("Concat", ["v", "rest"], ["t"], {"axis": 0}),
            (
                "ConstantOfShape",
                ["t"],
                ["e"],
                {"value": onnx.helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [0.5])},
            ),
            ("Equal", ["t", "minus"], ["q"], {}),
            ("Where", ["q", "one", "t"], ["r"], {}),
            ("Expand", ["e", "r"], ["g"], {}),
            ("Constant", [], ["k"], {"value_float": 2.0}),
            ("Mul", ["g", "k"], ["h"], {}),
            ("Concat", ["h", "x"], ["y"], {"axis": 1}),
        ],
        {"zero": ints(0), "one": ints(1), "rest": ints(1, 4), "minus": ints(-1), "two": ints(2)},
    ),
    "expand": (
        13,
        (1, 1, 4),
        [
            ("Expand", ["x", "a"], ["b"], {}),
            ("Expand", ["b", "c"], ["d"], {}),
            ("Expand", ["x", "e"], ["f"], {}),
            ("Mul", ["d", "f"], ["y"], {}),
        ],
        {"a": ints(3, 1), "c": ints(2, 1, 3, 4), "e": ints(3, 1, 1)},
    ),
    "slice": (
        13,
        IMAGE,
        [("Slice", ["x", "s", "e", "a", "t"], ["b"], {}), ("Slice", ["b", "s0", "e0"], ["y"], {})],
        {
            "s": ints(-1, 1),
            "e": ints(-9999, 5),
            "a": ints(2, -1),
            "t": ints(-2, 3),
            "s0": ints(0, 1),
            "e0": ints(9, 3),
        },
    ),
    "slice of old along axis 0": (
        9,
        (1, 6, 2),
        [
            ("Squeeze", ["x"], ["a"], {"axes": [0]}),
            ("Slice", ["a"], ["b"], {"starts": [1], "ends": [-1]}),
            ("Unsqueeze", ["b"], ["y"], {"axes": [-1, 0]}),
        ],
        {},
    ),
    "gather": (
        13,
        IMAGE,
        [
            ("Gather", ["x", "i"], ["a"], {"axis": 3}),
            ("Gather", ["a", "j"], ["b"], {"axis": 1}),
            ("Gather", ["b", "k"], ["y"], {}),
        ],
        {"i": np.array([[0, -1, 2], [3, 3, 1]], dtype=np.int64), "j": ints(2, 0), "k": ints(0, 0)},
    ),
    "split": (
        13,
        (1, 6, 4),
        [
            ("Split", ["x", "s"], ["a", "b"], {"axis": 1}),
            ("Split", ["b"], ["c", "d"], {"axis": -1}),
            ("Reshape", ["a", "r"], ["e"], {}),
            ("Split", ["e"], ["f", "g"], {}),
            ("Split", ["g"], ["h"], {}),
            ("Concat", ["c", "d"], ["i"], {"axis": 1}),
            ("MatMul", ["f", "h"], ["j"], {}),
            ("MatMul", ["i", "j"], ["y"], {}),
        ],
        {"s": ints(2, 4), "r": ints(4, 2)},
    ),
    "split of old": (
        9,
        (1, 6, 4),
        [
            ("Split", ["x"], ["a", "b"], {"axis": 1, "split": [2, 4]}),
            ("ReduceMax", ["a"], ["c"], {"axes": [1]}),
            ("ReduceMin", ["b"], ["d"], {"axes": [1, 2]}),
            ("Sub", ["c", "d"], ["y"], {}),
        ],
        {},
    ),
    "reduce": (
        13,
        IMAGE,
        [
            ("ReduceMean", ["x"], ["a"], {"axes": [-1, 2]}),
            ("ReduceSum", ["x", "i"], ["b"], {"keepdims": 0}),
            ("ReduceMean", ["b"], ["c"], {"keepdims": 0}),
            ("ReduceSum", ["x", ""], ["d"], {"noop_with_empty_axes": 1}),
            ("Add", ["a", "c"], ["e"], {}),
            ("Mul", ["e", "d"], ["y"], {}),
        ],
        {"i": ints(0, 3)},
    ),
    "reduce of now": (
        18,
        IMAGE,
        [("ReduceMean", ["x", "i"], ["y"], {"keepdims": 0})],
        {"i": ints(2, 3)},
    ),
    "pad": (
        13,
        IMAGE,
        [
            ("Pad", ["x", "p", "v"], ["a"], {}),
            ("Pad", ["a", "q"], ["b"], {"mode": "reflect"}),
            ("Pad", ["b", "q"], ["c"], {"mode": "edge"}),
            ("Pad", ["c", "n"], ["y"], {}),
        ],
        {
            "p": ints(0, 1, 0, 2, 0, 0, 3, -1),
            "v": np.float32(0.5),
            "q": ints(0, 0, 1, 0, 0, 0, 0, 2),
            "n": ints(1, 0, 0, 0, 0, 0, 0, 0),
        },
    ),
    "pad of several images in one": (
        13,
        (1, 2, 3, 4, 4),
        [("Reshape", ["x", "r"], ["a"], {}), ("Pad", ["a", "q"], ["y"], {"mode": "reflect"})],
        {"r": ints(2, 3, 4, 4), "q": ints(0, 0, 1, 0, 0, 0, 0, 2)},
    ),
    "pad of old": (
        9,
        IMAGE,
        [("Pad", ["x"], ["y"], {"pads": [0, 0, 1, 0, 0, 0, 0, 2], "value": 0.25})],
        {},
    ),
    "layer norm over two axes": (
        17,
        IMAGE,
        [("LayerNormalization", ["x", "w"], ["y"], {"axis": -2, "epsilon": 0.1})],
        {"w": normal(6, 5)},
    ),
    "squeeze": (
        13,
        (1, 3, 1, 4),
        [
            ("Squeeze", ["x"], ["a"], {}),
            ("Unsqueeze", ["a", "i"], ["b"], {}),
            ("Squeeze", ["b", "j"], ["c"], {}),
            ("Reshape", ["c", "k"], ["d"], {}),
            ("Concat", ["d", "w"], ["y"], {"axis": 2}),
        ],
        {"i": ints(0, -1), "j": ints(-1), "k": ints(0, 2, -1), "w": normal(1, 2, 1)},
    ),
    "hard activations": (
        18,
        IMAGE,
        [
            ("HardSwish", ["x"], ["a"], {}),
            ("HardSigmoid", ["x"], ["b"], {"alpha": 1 / 6, "beta": 0.4}),
            ("Mish", ["a"], ["c"], {}),
            ("Selu", ["c"], ["d"], {"alpha": 1.5}),
            ("Celu", ["x"], ["e"], {"alpha": 0.7}),
            ("PRelu", ["e", "s"], ["f"], {}),
            ("PRelu", ["f", "t"], ["g"], {}),
            ("Sum", ["b", "d", "g"], ["y"], {}),
        ],
        {"s": normal(4, 1, 1), "t": normal(1)},
    ),
    "transposed convolutions": (
        13,
        IMAGE,
        [
            (
                "ConvTranspose",
                ["x", "w", "b"],
                ["a"],
                {"strides": [2, 3], "output_padding": [1, 2], "group": 2, "pads": [1, 0, 1, 0]},
            ),
            ("ConvTranspose", ["x", "v"], ["c"], {"pads": [1, 0, 0, 2], "dilations": [2, 1]}),
            ("GlobalAveragePool", ["a"], ["d"], {}),
            ("GlobalAveragePool", ["c"], ["e"], {}),
            ("Concat", ["d", "e"], ["y"], {"axis": 1}),
        ],
        {"w": normal(4, 3, 3, 4), "b": normal(6), "v": normal(4, 2, 2, 3)},
    ),
    "resized": (
        13,
        IMAGE,
        [
            ("Resize", ["x", "", "s"], ["a"], NEAREST),
            ("Resize", ["x", "", "t"], ["b"], {"mode": "linear"}),
            ("Resize", ["b", "", "", "n"], ["c"], CORNERS),
            ("Resize", ["a", "", "", "n"], ["d"], {"nearest_mode": "round_prefer_ceil"}),
            ("Concat", ["c", "d"], ["y"], {"axis": 1}),
        ],
        {
            "s": floats(1, 1, 2, 3),
            "t": floats(1, 1, 1.7, 2.4),
            "n": ints(1, 4, 7, 8),
        },
    ),
    "upsampled as of old": (
        9,
        IMAGE,
        [("Upsample", ["x", "s"], ["y"], {"mode": "nearest"})],
        {"s": floats(1, 1, 2, 2)},
    ),
    "depth and space": (
        13,
        (1, 8, 4, 2),
        [
            ("DepthToSpace", ["x"], ["a"], {"blocksize": 2}),
            ("DepthToSpace", ["x"], ["b"], {"blocksize": 2, "mode": "CRD"}),
            ("Sub", ["a", "b"], ["c"], {}),
            ("SpaceToDepth", ["c"], ["y"], {"blocksize": 2}),
        ],
        {},
    ),
    "instance norm": (
        13,
        IMAGE,
        [("InstanceNormalization", ["x", "w", "b"], ["y"], {"epsilon": 0.01})],
        {"w": normal(4), "b": normal(4)},
    ),
    "max pool with a rim": (
        13,
        IMAGE,
        [
            (
                "MaxPool",
                ["x"],
                ["y"],
                {"kernel_shape": [3, 3], "strides": [1, 2], "pads": [1, 1, 1, 1]},
            )
        ],
        {},
    ),
    "no batch at all": (13, (3, 4), [("MatMul", ["w", "x"], ["y"], {})], {"w": normal(2, 3)}),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Tensor]:
    """A file, and five images for it."""
    opset, shape, nodes, weights = CASES[request.param]
    path = write(
        tmp_path / "case.onnx",
        [*nodes, ("Reshape", ["y", "row"], ["z"], {})],
        {**weights, "row": ints(1, -1)},
        shape,
        opset,
    )
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    return path, torch.randn(5, math.prod(sizes), generator=torch.Generator().manual_seed(1))


@pytest.mark.few(14)
def test_operator(case: tuple[Path, Tensor]) -> None:
    """A batch gives what its images give one by one, traced or not, in both precisions; so does
    onnxruntime.
    """
    path, x = case
    model = load_onnx(path)
    z = model(x)
    torch.testing.assert_close(z, torch.cat([model(row[None]) for row in x]), rtol=1e-5, atol=1e-5)
    assert torch.equal(fx.symbolic_trace(model)(x), z)
    assert not torch.equal(z[0], z[1])
    double = copy.deepcopy(model).double()(x.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), z, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z, runtime(path, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "hard activations",
        "transposed convolutions",
        "resized",
        "upsampled as of old",
        "depth and space",
        "instance norm",
        "max pool with a rim",
    ],
)
def test_operators_of_a_file_are_read_by_certificates(name: str, tmp_path: Path) -> None:
    opset, shape, nodes, weights = CASES[name]
    last: tuple[Any, ...] = ("Reshape", ["y", "row"], ["z"], {})
    path = write(tmp_path / "a.onnx", [*nodes, last], {**weights, "row": ints(1, -1)}, shape, opset)
    model = load_onnx(path).double()
    count = math.prod(int(size) for size in shape)
    x = torch.randn(3, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(read(model, (count,), smooth=True).logits(x), model(x))


def test_operator_gradients_stay_with_their_image(case: tuple[Path, Tensor]) -> None:
    path, x = case
    model = load_onnx(path)
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(x)[2].square().sum(), x)
    assert gradient[2].abs().max() > 0
    assert gradient[[0, 1, 3, 4]].abs().max() == 0


# ---- What is taken from a file
# ---------------------------------------------------------------------------------------


def test_logits_are_the_first_output_of_two_dimensions_and_nothing_else_is_read(
    tmp_path: Path,
) -> None:
    nodes: list[Spec] = [
        ("Relu", ["x"], ["feature"], {}),
        ("NonZero", ["feature"], ["strange"], {}),  # unknown, but the logits do not need it
        ("Flatten", ["feature"], ["z"], {}),
    ]
    outputs = [("feature", [1, 2, 2, 2]), ("z", [1, 8]), ("strange", [4, None])]
    model = load_onnx(write(tmp_path / "two.onnx", nodes, {}, [1, 2, 2, 2], outputs=outputs))
    x = torch.randn(3, 2, 2, 2)
    assert torch.equal(model(x), x.relu().flatten(1))


def test_weights_may_have_any_name(tmp_path: Path) -> None:
    nodes: list[Spec] = [
        ("Add", ["x", "training"], ["a"], {}),
        ("Add", ["a", "1.w"], ["b"], {}),
        ("Add", ["b", "1:w"], ["z"], {}),
    ]
    path = write(
        tmp_path / "names.onnx",
        nodes,
        {"training": normal(4), "1.w": normal(1, 4), "1:w": normal(1, 1)},
        [1, 4],
    )
    expected = sum(map(torch.from_numpy, (normal(4), normal(1, 4), normal(1, 1))))
    torch.testing.assert_close(load_onnx(path)(torch.zeros(2, 4)), expected.expand(2, 4))


def test_half_and_double_weights_become_float32(tmp_path: Path) -> None:
    nodes: list[Spec] = [("Cast", ["h"], ["w"], {"to": 1}), ("Mul", ["x", "w"], ["z"], {})]
    for kind in (np.float16, np.float64):
        path = write(tmp_path / "half.onnx", nodes, {"h": np.array([0.5, 2.0], dtype=kind)}, [1, 2])
        assert load_onnx(path)(torch.ones(3, 2)).tolist() == [[0.5, 2.0]] * 3


# ---- Errors
# --------------------------------------------------------------------------------------------------


def rejected(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_onnx(path, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_unreadable_files(tmp_path: Path) -> None:
    assert "No such file" in rejected(tmp_path / "none.onnx")
    for content in (
        b"",
        b"this is not a network\n",
        b"\x00\x01\x02" * 50,
        b"PK\x03\x04" + bytes(100),
    ):
        (tmp_path / "no.onnx").write_bytes(content)
        assert "is not an ONNX file" in rejected(tmp_path / "no.onnx")


def test_a_truncated_file(tiny: Path) -> None:
    tiny.write_bytes(tiny.read_bytes()[:-40])
    assert "is not an ONNX file, or a damaged one" in rejected(tiny)


def test_without_the_extra(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "install wassail[onnx]" in rejected(tiny)


def test_an_unknown_operator_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.onnx", [("Relu", ["x"], ["a"], {}), ("Det", ["a"], ["z"], {})], {}, [1, 2, 2]
    )
    assert "'Det' at node 'Det_1'" in rejected(path)


def test_a_node_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.onnx", [("Gemm", ["x", "w"], ["z"], {})], {"w": normal(3, 4)}, [1, 2]
    )
    assert "node 'Gemm_0' (Gemm)" in rejected(path)
    path = write(tmp_path / "a.onnx", [("Cast", ["x"], ["z"], {"to": 7})], {}, [1, 2])
    assert "node 'Cast_0' (Cast)" in rejected(path) and "no gradient" in rejected(path)
    path = write(
        tmp_path / "a.onnx", [("Reshape", ["x", "y"], ["z"], {})], {}, [1, 2], more_inputs=["y"]
    )
    assert "nothing computes its input 'y'" in rejected(path)
    nodes: list[Spec] = [
        ("Flatten", ["x"], ["w"], {}),
        ("Conv", ["x", "x"], ["c"], {}),
        ("Flatten", ["c"], ["z"], {}),
    ]
    assert "computed from the image" in rejected(
        write(tmp_path / "a.onnx", nodes, {}, [1, 2, 3, 3])
    )


def test_outputs_that_are_no_logits(tmp_path: Path) -> None:
    relu: list[Spec] = [("Relu", ["x"], ["z"], {})]
    path = write(tmp_path / "a.onnx", relu, {}, [1, 2, 2], outputs=[("z", [1, 2, 2])])
    assert "no output of two dimensions ('z' has 3 dimensions)" in rejected(path)
    assert "has shape (1, 2, 2)" in rejected(
        write(tmp_path / "a.onnx", relu, {}, [1, 2, 2], outputs=[("z", None)])
    )
    assert "a fixed batch must be 1" in rejected(write(tmp_path / "a.onnx", relu, {}, [4, 2]))
    assert "does not depend" in rejected(
        write(tmp_path / "a.onnx", relu, {}, [1, 2], outputs=[("nobody", [1, 2])])
    )
    assert "does not depend" in rejected(
        write(tmp_path / "a.onnx", [("Relu", ["w"], ["z"], {})], {"w": normal(1, 2)}, [1, 2])
    )


def test_images_without_a_fixed_size(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.onnx", [("Flatten", ["x"], ["z"], {})], {}, ["n", 3, "height", "width"]
    )
    assert "['n', 3, 'height', 'width']: export it with a fixed size" in rejected(path)


def test_a_normalisation_that_does_not_fit(tiny: Path) -> None:
    assert "mean has shape (3,)" in rejected(tiny, mean=(0.1, 0.2, 0.3))
    assert "std has shape (1, 2)" in rejected(tiny, std=torch.ones(1, 2))
    assert "all positive" in rejected(tiny, std=(0.1, 0.0))
    assert "finite" in rejected(tiny, mean=math.nan)


# ---- The published networks
# ------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("name", list(FILES))
def test_published_network(zoo: ModuleType, name: str) -> None:
    normalisation, data, count, correct = FILES[name]
    path = zoo.HERE / "models" / f"{name}.onnx"
    model = load_onnx(path, *normalisation)
    x, y = zoo.images(data, count)
    with torch.no_grad():
        z = torch.cat([model(chunk) for chunk in x.split(250)])
        assert int((z.argmax(1) == y).sum()) == correct
        five = model(x[:5])
        torch.testing.assert_close(
            five, torch.cat([model(row[None]) for row in x[:5]]), rtol=0, atol=1e-5
        )
    mean, std = (torch.tensor(0.0 if s is None else s).reshape(-1, 1, 1) for s in normalisation)
    few = (x[:50] - mean) / (std if normalisation[1] else 1.0)
    torch.testing.assert_close(z[:50], runtime(path, few), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["cifar_vit_pgd_2_3_16", "mnist_fc_256x2", "mnist_convnet_avgpool"]
)
def test_published_network_has_gradients(zoo: ModuleType, name: str) -> None:
    """Against central differences in float64, along random directions."""
    normalisation, data, _, _ = FILES[name]
    model = load_onnx(zoo.HERE / "models" / f"{name}.onnx", *normalisation).double()
    x = zoo.images(data, 3)[0].double().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 10, dtype=torch.float64, generator=generator)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    (gradient,) = torch.autograd.grad((weight * model(x)).sum(), x)
    with torch.no_grad():
        step = 1e-6 * direction
        slope = (weight * (model(x + step) - model(x - step))).sum(1) / 2e-6
    torch.testing.assert_close(
        (gradient * direction).flatten(1).sum(1), slope, rtol=1e-5, atol=1e-6
    )
