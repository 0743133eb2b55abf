"""Small files of every kind, written by hand: the fuzzer changes them, the tests make hostile
ones.
"""

import gzip
import json
import math
import pickle
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

KINDS = {
    torch.uint8: 1,
    torch.int32: 4,
    torch.int64: 5,
    torch.float32: 7,
    torch.float64: 8,
    torch.bool: 12,
}


@dataclass(frozen=True)
class Ref:
    """The name of a tensor in a program."""

    name: str


@dataclass(frozen=True)
class Size:
    """The name of an integer in a program."""

    name: str


@dataclass(frozen=True)
class Raw:
    """An argument as it is to stand in the program."""

    value: dict[str, Any]


def argument(value: Any) -> dict[str, Any]:
    match value:
        case Raw():
            return value.value
        case Ref():
            return {"as_tensor": {"name": value.name}}
        case Size():
            return {"as_sym_int": {"as_name": value.name}}
        case None:
            return {"as_none": True}
        case bool():
            return {"as_bool": value}
        case int():
            return {"as_int": value}
        case float():
            return {"as_float": value if math.isfinite(value) else str(value)}
        case str():
            return {"as_string": value}
        case torch.dtype():
            return {"as_scalar_type": KINDS[value]}
        case list() if value and all(isinstance(entry, Ref) for entry in value):
            return {"as_tensors": [{"name": entry.name} for entry in value]}
        case list() if any(entry is None or isinstance(entry, Ref) for entry in value):
            return {"as_optional_tensors": [argument(entry) for entry in value]}
        case list() if any(isinstance(entry, Size) for entry in value):
            entries = [{"as_name": e.name} if isinstance(e, Size) else {"as_int": e} for e in value]
            return {"as_sym_ints": entries}
        case list():
            return {"as_ints": value}
    raise TypeError(value)


def meta(tensor: Tensor, **changes: Any) -> dict[str, Any]:
    found = {
        "dtype": KINDS[tensor.dtype],
        "sizes": [{"as_int": size} for size in tensor.shape],
        "strides": [{"as_int": step} for step in tensor.stride()],
        "storage_offset": {"as_int": 0},
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "layout": 7,
    }
    return {**found, **changes}


class Program:
    """An exported program, written node by node: `x = p.call("relu.default", self=p.x)`."""

    def __init__(self, *shape: int, batch: int | None = None) -> None:
        self.shape = shape
        self.batch = batch
        self.x = Ref("x")
        self.nodes: list[dict[str, Any]] = []
        self.weights: dict[str, tuple[Tensor, dict[str, Any]]] = {}

    def weight(self, tensor: Tensor, **changes: Any) -> Ref:
        name = f"w{len(self.weights)}"
        self.weights[name] = tensor.contiguous(), meta(tensor.contiguous(), **changes)
        return Ref(name)

    def call(program, target: str, results: int | None = None, /, **arguments: Any) -> Any:
        name = f"v{len(program.nodes)}"
        sizes = target.startswith(("_operator.", "sym_"))
        outputs: list[dict[str, Any]] = [
            {"as_sym_int": {"as_name": name}} if sizes else {"as_tensor": {"name": name}}
        ]
        found: Any = Size(name) if sizes else Ref(name)
        if results is not None:
            found = [Ref(f"{name}_{place}") for place in range(results)]
            outputs = [{"as_tensors": [{"name": ref.name} for ref in found]}]
        inputs = [
            {"name": key, "arg": argument(value), "kind": 1} for key, value in arguments.items()
        ]
        full = target if "_operator" in target or ":" in target else f"torch.ops.aten.{target}"
        program.nodes.append({"target": full, "inputs": inputs, "outputs": outputs, "metadata": {}})
        return found

    def linear(self, x: Ref, wide: int, classes: int = 3) -> Ref:
        """A last layer, so that the program is a classifier."""
        generator = torch.Generator().manual_seed(0)
        weight = self.weight(torch.randn(classes, wide, generator=generator))
        return self.call("linear.default", input=x, weight=weight, bias=None)

    def save(self, path: Path, logits: Ref) -> Path:
        first = (
            {"as_int": self.batch}
            if self.batch is not None
            else {"as_expr": {"expr_str": "Symbol('s0')", "hint": None}}
        )
        sizes = [first, *({"as_int": size} for size in self.shape)]
        base = {**meta(torch.zeros(1)), "strides": []}
        values = {name: about for name, (_, about) in self.weights.items()}
        values["x"] = {**base, "sizes": sizes}
        values[logits.name] = {**base, "sizes": [first, {"as_int": 3}]}
        held = [
            {"parameter": {"arg": {"name": name}, "parameter_name": name}} for name in self.weights
        ]
        user = {"user_input": {"arg": {"as_tensor": {"name": "x"}}}}
        out = {"user_output": {"arg": {"as_tensor": {"name": logits.name}}}}
        program = {
            "graph_module": {
                "graph": {"nodes": self.nodes, "tensor_values": values},
                "signature": {"input_specs": [*held, user], "output_specs": [out]},
            },
            "torch_version": "2.13.0",
        }
        with zipfile.ZipFile(path, "w") as archive:
            config = {}
            for place, (name, (tensor, about)) in enumerate(self.weights.items()):
                entry = {
                    "path_name": f"weight_{place}",
                    "is_param": True,
                    "use_pickle": False,
                    "tensor_meta": about,
                }
                config[name] = entry
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                archive.writestr(zipfile.ZipInfo(f"m/data/weights/weight_{place}"), data)
            texts = {
                "m/data/weights/model_weights_config.json": {"config": config},
                "m/data/constants/model_constants_config.json": {"config": {}},
                "m/models/model.json": program,
            }
            for member, content in texts.items():
                archive.writestr(zipfile.ZipInfo(member), json.dumps(content))
        return path


def odd_ends(p: Program) -> None:
    """Weights that nothing needs: lengths, shapes and types for a fuzzer to put in the place of
    others.
    """
    for shape in (
        (0,),
        (1,),
        (2,),
        (3,),
        (5,),
        (8,),
        (1, 4),
        (4, 4),
        (3, 8),
        (2, 4, 3),
        (4, 4, 3, 3),
        (1, 1, 8, 8),
    ):
        p.weight(torch.full(shape, 0.5))
    for indices in ([0], [1, 2], [-1, 99], [2**40]):
        p.weight(torch.tensor(indices))
    p.weight(torch.tensor([-(2**63), 2**63 - 1, 0]))
    p.weight(torch.tensor([True, False]))
    p.weight(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    p.weight(torch.tensor([float("nan"), float("inf"), -1e38]))


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def convolutional(path: Path, batch: int | None = None) -> Path:
    """Convolution, batch norm, ReLU in place, pooling, layer norm, attention and a linear layer."""
    p = Program(1, 8, 8, batch=batch)
    generator = torch.Generator().manual_seed(1)
    kernel = p.weight(torch.randn(4, 1, 3, 3, generator=generator))
    bias = p.weight(torch.zeros(4))
    x = p.call(
        "conv2d.default",
        input=p.x,
        weight=kernel,
        bias=bias,
        stride=[1, 1],
        padding=[1, 1],
        dilation=[1, 1],
        groups=1,
    )
    statistics = {
        name: p.weight(ones(4)) for name in ("weight", "bias", "running_mean", "running_var")
    }
    x = p.call(
        "batch_norm.default",
        input=x,
        **statistics,
        training=False,
        momentum=0.1,
        eps=1e-5,
        cudnn_enabled=False,
    )
    x = p.call("relu_.default", self=x)
    x = p.call("max_pool2d.default", self=x, kernel_size=[2, 2], stride=[2, 2])
    x = p.call("flatten.using_ints", self=x, start_dim=2)
    x = p.call("transpose.int", self=x, dim0=1, dim1=2)
    x = p.call(
        "layer_norm.default",
        input=x,
        normalized_shape=[4],
        weight=p.weight(ones(4)),
        bias=p.weight(torch.zeros(4)),
    )
    first, rest = p.call("split.sizes", 2, self=x, split_size=[1, 15], dim=1)
    x = p.call("cat.default", tensors=[first, rest], dim=1)
    y = p.call("scaled_dot_product_attention.default", query=x, key=x, value=x)
    x = p.call("add.Tensor", self=x, other=y)
    x = p.call("gelu.default", self=x)
    x = p.call("mean.dim", self=x, dim=[1])
    odd_ends(p)
    return p.save(path, p.linear(x, 4))


def shapes(path: Path) -> Path:
    """Arithmetic on sizes, views, padding, indices and functions of each kind."""
    p = Program(2, 4, 4)
    n = p.call("sym_size.int", self=p.x, dim=0)
    for tail in (
        [1 << 16],
        [1 << 16, 1],
        [1 << 14, 2, 2],
        [1, 1 << 16],
    ):  # what is read beyond the end of it is seen
        p.call("full.default", size=[n, *tail], fill_value=0.5, dtype=torch.float32)
    wide = p.call("_operator.mul", a=4, b=8)
    x = p.call("view.default", self=p.x, size=[n, wide])
    x = p.call("unsqueeze.default", self=x, dim=1)
    x = p.call("pad.default", self=x, pad=[1, 1], mode="reflect")
    x = p.call("constant_pad_nd.default", self=x, pad=[1, 1], value=0.5)
    x = p.call("slice.Tensor", self=x, dim=2, start=1, end=2**63 - 1)
    x = p.call("index_select.default", self=x, dim=2, index=p.weight(torch.arange(8)))
    x = p.call("reshape.default", self=x, shape=[n, 2, 4])
    x = p.call("expand.default", self=x, size=[-1, -1, 4])
    x = p.call("clamp.default", self=x, min=0.0, max=1.0)
    x = p.call("softmax.int", self=x, dim=-1)
    y = p.call("full.default", size=[n, 2, 4], fill_value=2.0, dtype=torch.float32)
    x = p.call("mul.Tensor", self=x, other=y)
    x = p.call("where.self", condition=p.call("gt.Scalar", self=x, other=0.5), self=x, other=y)
    x = p.call("permute.default", self=x, dims=[0, 2, 1])
    x = p.call("repeat.default", self=x, repeats=[1, 1, 2])
    x = p.call("adaptive_avg_pool1d.default", self=x, output_size=[2])
    x = p.call("reshape.default", self=x, shape=[n, 8])
    odd_ends(p)
    return p.save(path, p.linear(x, 8))


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
