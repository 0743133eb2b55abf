"""Small files of every kind, written by hand: the fuzzer changes them, the tests make hostile
ones.
"""

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def onnx_model(path: Path, kind: str = "dense") -> Path:
    """A classifier of a few operators as an ONNX file."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)

    def constant(name: str, value: Any) -> Any:
        return numpy_helper.from_array(np.asarray(value), name)

    def noise(name: str, *shape: int) -> Any:
        return constant(name, rng.standard_normal(shape).astype(np.float32))

    node = helper.make_node
    if kind == "dense":
        shape = [1, 4]
        nodes = [
            node("Gemm", ["x", "w", "b"], ["h"], transB=1),
            node("Relu", ["h"], ["r"]),
            node("MatMul", ["r", "v"], ["z"]),
        ]
        held = [noise("w", 6, 4), noise("b", 6), noise("v", 6, 3)]
    else:
        shape = [1, 2, 6, 6]
        nodes = [
            node(
                "Conv",
                ["x", "k", "c"],
                ["a"],
                kernel_shape=[3, 3],
                pads=[1, 1, 1, 1],
                strides=[1, 1],
            ),
            node("BatchNormalization", ["a", "s", "c", "c", "s"], ["n"]),
            node("MaxPool", ["n"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Shape", ["p"], ["q"]),
            node("Gather", ["q", "zero"], ["g"], axis=0),
            node("Unsqueeze", ["g", "axes"], ["u"]),
            node("Concat", ["u", "rest"], ["t"], axis=0),
            node("Reshape", ["p", "t"], ["f"]),
            node("Softmax", ["f"], ["o"], axis=-1),
            node("Pad", ["o", "pads"], ["d"]),
            node("Slice", ["d", "axes", "ends", "one"], ["e"]),
            node("MatMul", ["e", "w"], ["z"]),
        ]
        held = [
            noise("k", 3, 2, 3, 3),
            constant("c", np.zeros(3, np.float32)),
            constant("s", np.ones(3, np.float32)),
            constant("zero", np.int64(0)),
            constant("axes", np.array([0])),
            constant("rest", np.array([27])),
            constant("pads", np.array([0, 1, 0, 1])),
            constant("ends", np.array([29])),
            constant("one", np.array([1])),
            noise("w", 29, 3),
        ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 3])
    graph = helper.make_graph(nodes, "g", [x], [z], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def state(path: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    torch.save({"state_dict": network.state_dict(), "epoch": 3}, path, **options)
    return path


def samples(n: int = 6) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8), np.arange(n, dtype=np.int64) % 3


def npz(path: Path, packed: bool = False) -> Path:
    x, y = samples()
    (np.savez_compressed if packed else np.savez)(path, x=x, y=y)
    return path


def idx(folder: Path, packed: bool = False) -> Path:
    x, y = samples()
    end = ".gz" if packed else ""
    images = folder / f"t10k-images-idx3-ubyte{end}"
    labels = folder / f"t10k-labels-idx1-ubyte{end}"
    write = (
        (lambda path, data: path.write_bytes(gzip.compress(data, mtime=0)))
        if packed
        else Path.write_bytes
    )
    write(images, bytes((0, 0, 8, 3)) + struct.pack(">3I", 6, 4, 4) + x.tobytes())
    write(labels, bytes((0, 0, 8, 1)) + struct.pack(">I", 6) + y.astype(np.uint8).tobytes())
    return images


def cifar(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
    names = [f"class {k}" for k in range(10)]
    (folder / "test_batch").write_bytes(
        pickle.dumps({b"data": data, b"labels": [3, 4], b"filenames": [b"a", b"b"]}, protocol=2)
    )
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    return folder


def image_folder(folder: Path) -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    for place, end in enumerate(("png", "jpg", "bmp", "ppm", "tiff", "webp")):
        target = folder / f"class{place % 2}"
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
            target / f"image{place}.{end}"
        )
    return folder


def vnnlib(path: Path, tensors: bool = False) -> Path:
    """A property, of version 2.0 with tensors."""
    if tensors:
        path.write_text(
            "(vnnlib-version <2.0>)\n(declare-network f\n (declare-input X Real [1,2])\n"
            " (declare-output Y Real [3])\n)\n"
            "(assert (and (>= X[0,0] -1.5) (<= (* 2 X[0,0]) 1e-2)))\n"
            "(assert (and (>= X[0,1] 0) (<= X[0,1] 1)))\n"
            "(assert (or (<= Y[0] (+ Y[1] 0.5)) (and (> Y[2] 0) (== Y[1] 0))))\n"
        )
        return path
    declared = [f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1")]
    asserted = [
        "(assert (>= X_0 -1.5)) ; a comment",
        "(assert (or (and (<= X_0 0.25) (>= X_1 0)) (and (<= X_0 1) (>= X_1 0.5))))",
        "(assert (<= X_1 1e0))",
        "(assert (or (<= (- Y_0 (* 2 Y_1)) 0.125) (and (>= Y_0 1) (< Y_1 -1))))",
    ]
    path.write_text("\n".join(declared + asserted) + "\n")
    return path


def omega(folder: Path, least: float = 0.5, beside: bool = False) -> Path:
    """A property of a distribution with its network, the samples in it or beside it."""
    from safetensors.numpy import save_file

    folder.mkdir()
    onnx_model(folder / "net.onnx")
    x = np.random.default_rng(1).uniform(0, 1, (3, 4)).astype(np.float32)
    samples: dict[str, Any] = {"x": x.tolist(), "y": [0, 1, 2], "weights": [1, 2, 1.5]}
    if beside:
        held = {"x": x, "y": np.array([0, 1, 2]), "weights": np.array([1.0, 2.0, 1.5])}
        save_file(held, folder / "samples.safetensors")
        samples = {"file": "samples.safetensors"}
    threat = {"norm": "inf", "order": 1, "eps": "1/50", "domain": [0, 1], "subpopulation": 0.8}
    content = {
        "format": "omega/1",
        "network": {"onnx": "net.onnx"},
        "samples": samples,
        "threat": {**threat, "label_cost": 0.4},
        "claim": {"measure": "accuracy", "at_least": least},
    }
    (folder / "omega.json").write_text(json.dumps(content))
    return folder
