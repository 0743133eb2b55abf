"""What is taken from an ONNX file: the only place that touches onnx, which is hardly typed."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wassail.errors import InputError, reason_of
from wassail.zoo.onnx_operators import LARGEST, OnnxGraph, OnnxNode


def read_onnx(path: Path) -> OnnxGraph:
    """All that is taken from a file: the graph, its weights, the shape of an image."""
    onnx = _library()
    model = _loaded(onnx, path)
    try:
        initialisers = {proto.name: _tensor(onnx, proto) for proto in model.graph.initializer}
        nodes = _nodes(onnx, model)
    except (TypeError, ValueError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} contains a tensor or an attribute that cannot be read: {reason_of(error)}."
        ) from error
    images = [entry for entry in model.graph.input if entry.name not in initialisers]
    if not images:
        raise InputError(
            f"the graph in {path} has no input but its initialisers: export it with the image as "
            "an input."
        )
    shape = _shape(images[0], path)
    outputs = [(output.name, _rank(output)) for output in model.graph.output]
    return OnnxGraph(images[0].name, shape, outputs, initialisers, nodes)


def _library() -> Any:
    """The package onnx."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise InputError(
            "reading ONNX files needs the package onnx: install wassail[onnx]."
        ) from error


def _loaded(onnx: Any, path: Path) -> Any:
    """The file as onnx reads it."""
    try:
        model = onnx.load(str(path), format="protobuf")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # protobuf and onnx raise several kinds of their own
        raise InputError(
            f"{path} is not an ONNX file, or a damaged one: export the model again."
        ) from error
    if not model.graph.node:  # protobuf reads many other files as a model in which nothing is set
        raise InputError(f"{path} is not an ONNX file: it contains no graph.")
    return model


def _tensor(onnx: Any, proto: Any) -> Tensor:
    array = onnx.numpy_helper.to_array(proto)
    floating = proto.data_type in (
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
    )
    return torch.from_numpy(array.astype("float32") if floating else array.copy())


def _attribute(onnx: Any, proto: Any) -> Any:
    value = onnx.helper.get_attribute_value(proto)
    if isinstance(value, onnx.TensorProto):
        return _tensor(onnx, value)
    return value.decode() if isinstance(value, bytes) else value


def _nodes(onnx: Any, model: Any) -> list[OnnxNode]:
    """The operations, in the order of the file."""
    standard = ("", "ai.onnx")
    version = next((entry.version for entry in model.opset_import if entry.domain in standard), 1)
    return [
        OnnxNode(
            op=node.op_type if node.domain in standard else f"{node.domain}.{node.op_type}",
            name=node.name or (node.output[0] if node.output else ""),
            version=version,
            attributes={proto.name: _attribute(onnx, proto) for proto in node.attribute},
            inputs=list(node.input),
            outputs=list(node.output),
        )
        for node in model.graph.node
    ]


def _shape(image: Any, path: Path) -> tuple[int, ...]:
    """The shape of the input, a batch of 1 where that is left open."""
    dims = image.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.WhichOneof("value") == "dim_value" else 0 for dim in dims]
    if sizes and sizes[0] < 1:
        sizes[0] = 1
    if len(sizes) < 1 or min(sizes) < 1:
        seen = [dim.dim_value or dim.dim_param or "?" for dim in dims]
        raise InputError(
            f"input {image.name!r} of {path} has shape {seen}: export it with a fixed size of "
            "the image."
        )
    if math.prod(sizes) > LARGEST:
        raise InputError(
            f"input {image.name!r} of {path} has shape {sizes}, which no data set has: export "
            "the model again."
        )
    return tuple(sizes)


def _rank(output: Any) -> int | None:
    kind = output.type.tensor_type
    return len(kind.shape.dim) if kind.HasField("shape") else None
