"""ONNX classifiers as PyTorch modules: batches of any size, gradients, float32 or float64.

>>> from wassail.zoo.onnx import load_onnx
>>> model = load_onnx("network.onnx", mean=(0.4914, 0.4822, 0.4465), std=(0.2471, 0.2435, 0.2616))

The graph is run once on a single image, operator by operator. Whatever does not depend on the
values of the image (the weights, all arithmetic on shapes) turns into a constant; what is left is a
straight list of tensor operations whose other arguments are plain numbers, so ``torch.fx`` can
trace the module.

Most files were exported with a batch of one, and that one is scattered over their graphs: in the
targets of Reshape and Expand, in class tokens, in slices. There is no need to find it. The shape
`s` of every value for a single image is known, and n images are kept as rows `(n, *s)`, without the
leading one of `s` where it has one: `(1, 3, 32, 32)` gives `(n, 3, 32, 32)`. An operator that
leaves dimension 0 alone is applied to the rows as it is. Any other is applied to `(n, *s)` with its
axes shifted by one. Either way no image can see another, and its logits are those that the file
gives to it alone.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from wassail.errors import InputError, reason_of
from wassail.zoo.onnx_file import read_onnx
from wassail.zoo.onnx_operators import (
    LARGEST,
    OPERATORS,
    RESIZED,
    WIDEST,
    OnnxGraph,
    OnnxNode,
    Shape,
    Statistic,
    lifted,
    row_of,
    view_of,
)
from wassail.zoo.source import statistic_of
from wassail.zoo.weights import regular

__all__ = ["OnnxClassifier", "load_onnx"]


def load_onnx(
    path: str | Path, mean: Statistic | None = None, std: Statistic | None = None
) -> OnnxClassifier:
    """The classifier in an ONNX file, in eval mode: a batch `(n, *shape)` of any size -> logits
    `(n, K)`.

    The image is the first input that is not an initialiser; the logits are the first output of two
    dimensions. Images of another shape than the graph's own are reshaped to it in row-major order
    if they have as many elements (28 x 28 images fit a graph that takes 784 numbers); no axes are
    swapped. `mean` and `std`, numbers or one for each channel, are built in: the graph sees `(x -
    mean) / std`. All weights are float32 parameters that ask for no gradient; use `.double()` for
    more.
    """
    path = Path(path)
    regular(path, "a model")
    try:
        graph = read_onnx(path)
        logits, nodes, constants = _specialise(graph, path)
        model = OnnxClassifier(graph, logits, nodes, constants, None, None).eval()
        with torch.no_grad():
            found = model(torch.full((2, *model.shape), 0.5))
    except InputError:
        raise
    except Exception as error:
        # A damaged or hostile graph can fail anywhere, in torch's operators too.
        raise InputError(
            f"{str(path)!r} is no graph that can be run: {reason_of(error)}; export the model "
            "again."
        ) from error
    if found.ndim != 2 or len(found) != 2:
        raise InputError(
            f"{str(path)!r} gives logits of shape {tuple(found.shape)} for two samples: export "
            "the model again."
        )
    if mean is None and std is None:
        return model
    return OnnxClassifier(graph, logits, nodes, constants, mean, std).eval()


class OnnxClassifier(nn.Module):
    """A list of operations read from an ONNX file, `(n, *shape) -> (n, K)`. Made by `load_onnx`."""

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        graph: OnnxGraph,
        logits: str,
        nodes: list[OnnxNode],
        constants: dict[str, Tensor],
        mean: Statistic | None,
        std: Statistic | None,
    ) -> None:
        super().__init__()
        self.image = graph.image
        self.logits = logits
        self.nodes = nodes
        self.shape = row_of(graph.shape)
        normalised = mean is not None or std is not None
        self.register_buffer(
            "mean",
            _statistic("mean", 0.0 if mean is None else mean, self.shape) if normalised else None,
        )
        self.register_buffer(
            "std",
            _statistic("std", 1.0 if std is None else std, self.shape) if normalised else None,
        )
        # A holder of their own: a weight may be called like an attribute of this module.
        self.constants = nn.Module()
        self.attributes: dict[str, str] = {}
        for name, value in constants.items():
            attribute = "".join(c if c.isalnum() else "_" for c in name)
            while not attribute.isidentifier() or hasattr(self.constants, attribute):
                attribute = f"_{attribute}"
            self.attributes[name] = attribute
            if value.is_floating_point():
                # Not trained on: running statistics are among them.
                self.constants.register_parameter(
                    attribute, nn.Parameter(value, requires_grad=False)
                )
            else:
                self.constants.register_buffer(attribute, value)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the images, `(n, *shape) -> (n, K)`."""
        # The batch size is written out: with -1 an image of half the size would pass for half an
        # image.
        x = x.reshape(x.shape[0], *self.shape)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        values: dict[str, Tensor] = {self.image: x}
        for node in self.nodes:
            values.update(
                zip(
                    node.outputs, _run(node, [self._value(name, values) for name in node.arguments])
                )
            )
            # Else every activation would stay in memory, even without gradients.
            for name in node.finished:
                values.pop(name, None)
        return values[self.logits]

    def _value(self, name: str, values: dict[str, Tensor]) -> Tensor | None:
        if not name:  # an optional input that the node leaves out
            return None
        return values[name] if name in values else getattr(self.constants, self.attributes[name])


def _statistic(what: str, values: Statistic, shape: Shape) -> Tensor:
    """A mean or standard deviation that broadcasts against images of that shape: `()` or `(C,
    1, ...)`.
    """
    tensor = statistic_of(what, values)
    if tensor.ndim and tensor.shape != shape[:1]:
        raise InputError(
            f"{what} has shape {tuple(tensor.shape)} but the graph takes images of shape {shape}: "
            "give one number, or one for each channel."
        )
    return tensor.reshape(-1, *[1] * (len(shape) - 1)) if tensor.ndim else tensor


def _specialise(graph: OnnxGraph, path: Path) -> tuple[str, list[OnnxNode], dict[str, Tensor]]:
    """Run the graph on a single image: the name of the logits, the operations that depend on
    the image, their constants.
    """
    logits = next((name for name, rank in graph.outputs if rank in (2, None)), None)
    if logits is None:
        ranks = (
            ", ".join(f"{name!r} has {rank} dimensions" for name, rank in graph.outputs)
            or "there is none"
        )
        raise InputError(
            f"{path} has no output of two dimensions ({ranks}): a classifier's logits have shape "
            "(N, classes)."
        )
    values: dict[str, Tensor] = {**graph.initialisers, graph.image: torch.zeros(graph.shape)}
    live = {graph.image}  # the values that depend on the image
    nodes: list[OnnxNode] = []
    for node in _ancestors(graph.nodes, logits):
        if node.op not in OPERATORS:
            raise InputError(
                f"{path} uses the ONNX operator {node.op!r} at node {node.name!r}, which this "
                "loader does not know: export the model without it."
            )
        try:
            results = _fold(node, values, live)
        except Exception as error:  # hostile attributes make torch's operators stumble in every way
            raise InputError(
                f"node {node.name!r} ({node.op}) of {path} cannot be run: {reason_of(error)}."
            ) from error
        values.update(zip(node.outputs, results))
        if any(node.data) and node.op != "Shape":  # every image has the same shape
            live.update(node.outputs)
            nodes.append(node)
    if logits not in live:
        raise InputError(
            f"output {logits!r} of {path} does not depend on the input {graph.image!r}: export "
            "the classifier."
        )
    if values[logits].ndim != 2 or len(values[logits]) != 1:
        raise InputError(
            f"output {logits!r} of {path} has shape {tuple(values[logits].shape)} for an input "
            f"of shape {graph.shape}: "
            "a classifier's logits have shape (N, classes), and a fixed batch must be 1."
        )
    used: set[str] = {logits}
    for node in reversed(nodes):
        node.finished = tuple(
            dict.fromkeys(
                name for name in (*node.inputs, *node.outputs) if name in live and name not in used
            )
        )
        used.update(node.inputs)
    wanted = dict.fromkeys(
        name for node in nodes for name in node.arguments if name and name not in live
    )
    return logits, nodes, {name: values[name] for name in wanted}


def _ancestors(nodes: list[OnnxNode], output: str) -> list[OnnxNode]:
    """The nodes that the output depends on, in order: the others (labels, features) may be
    anything.
    """
    needed: set[str] = {output}
    kept: list[OnnxNode] = []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(name for name in node.inputs if name)
            kept.append(node)
    return kept[::-1]


@torch.no_grad()
def _fold(node: OnnxNode, values: dict[str, Tensor], live: set[str]) -> list[Tensor]:
    """The node's outputs for a single image; on the way everything about it is written down."""
    kind = OPERATORS[node.op]
    missing = [name for name in node.inputs if name and name not in values]
    if missing:
        raise ValueError(
            f"nothing computes its input {missing[0]!r}, and the image is the only input that is "
            "filled"
        )
    inputs = [values[name] if name else None for name in node.inputs]
    node.shapes = [() if value is None else tuple(value.shape) for value in inputs]
    node.data = [name in live for name in node.inputs]
    node.integer = not any(value is not None and value.is_floating_point() for value in inputs)
    node.fixed = [
        # Weights are left out: they would stay in float32 and be kept twice.
        None
        if value is None
        or data
        or (value.is_floating_point() and value.numel() > 1 and node.op not in RESIZED)
        else value
        for value, data in zip(inputs, node.data)
    ]
    if any(node.data[1:]) and kind.where != "broadcast" and node.op != "Concat":
        raise ValueError("its weights or other arguments are computed from the image")
    node.axes = tuple(kind.axes(node))
    _refuse(node)
    if node.op not in _MAKE_TENSORS and _most(node) > LARGEST:
        # Without memory first, for the size of the result. Torch loads its compiler for this (2 s).
        weightless = [
            None if value is None else value.to("meta") for value in inputs[: kind.tensors]
        ]
        expected = kind.run(node, *weightless)
        for value in [expected] if isinstance(expected, Tensor) else expected:
            if value.numel() > LARGEST:
                raise ValueError(f"its result would have shape {tuple(value.shape)}")
    results = kind.run(node, *inputs[: kind.tensors])
    outputs = [results] if isinstance(results, Tensor) else list(results)
    node.results = [tuple(output.shape) for output in outputs]
    node.shift = 0 if kind.where in ("rows", "view") or _rides(node) else 1
    return outputs


_MAKE_TENSORS = ("Constant", "ConstantOfShape", "Shape")
# Operators whose result has no more entries than all their inputs multiplied.
_MULTIPLIED = ("Add", "Sub", "Mul", "Div", "MatMul", "Gemm")
_UNCHANGED = ("Relu", "Sigmoid", "Tanh", "Flatten", "Identity", "Softmax", "LogSoftmax")


def _most(node: OnnxNode) -> float:
    """How many entries the result of a node may have, as far as its inputs tell; inf if not."""
    sizes = [math.prod(shape) for shape, name in zip(node.shapes, node.inputs) if name]
    if node.op in _UNCHANGED:
        return sizes[0]
    if node.op not in _MULTIPLIED or 0 in sizes:
        return math.inf
    if node.op == "MatMul" or (node.op == "Gemm" and not node.get("transA", 0)):
        return math.prod(sizes) // math.prod(node.shapes[0][-1:])  # the last axis is summed over
    return math.prod(sizes)


def _refuse(node: OnnxNode) -> None:
    """Raise ValueError where torch's kernels would be called with what they were not written
    for.
    """
    if node.op in ("Conv", "ConvTranspose", "MaxPool", "AveragePool"):
        window = [
            *node.get("strides", [1]),
            *node.get("dilations", [1]),
            *node.get("kernel_shape", [1]),
            node.get("group", 1),
        ]
        if node.op in ("Conv", "ConvTranspose"):
            window += node.shapes[1]
        if not all(
            isinstance(size, int) and 1 <= size <= WIDEST for size in (*window, *node.shapes[0])
        ):
            raise ValueError("its window has a size that is not positive, or absurd")
        rims = (*node.get("pads", []), *node.get("output_padding", []))
        if not all(isinstance(size, int) and 0 <= size <= WIDEST for size in rims):
            raise ValueError("its padding is negative or absurd")
        axes = len(node.shapes[0]) - 2
        lengths = {"strides": axes, "dilations": axes, "kernel_shape": axes, "pads": 2 * axes}
        lengths["output_padding"] = axes
        if any(len(node.get(name, [0] * length)) != length for name, length in lengths.items()):
            raise ValueError("its window has another number of axes than the image")
    if node.op in ("DepthToSpace", "SpaceToDepth"):
        block = node.get("blocksize", 0)
        if not isinstance(block, int) or not 1 <= block <= WIDEST or len(node.shapes[0]) != 4:
            raise ValueError("its block is not positive, or absurd, or its input is no image")
    if node.op in ("BatchNormalization", "InstanceNormalization"):
        channels = node.shapes[0][1:2]
        if (
            not channels
            or len(node.shapes) != (5 if node.op == "BatchNormalization" else 3)
            or any(shape != channels for shape in node.shapes[1:])
        ):
            raise ValueError(f"its statistics are not one for each of the channels {channels}")
    if node.op in ("Mod", "Div") and node.integer and not any(node.data):
        divisor = node.fixed[1]
        # The least integer by -1 ends the process on some processors.
        if divisor is None or not bool((divisor > 0).all()):
            raise ValueError("it divides integers by what is not positive")


def _rides(node: OnnxNode) -> bool:
    """Whether dimension 0 is one and stays untouched, so that a batch can take its place."""
    shapes = [shape for shape, data in zip(node.shapes, node.data) if data]
    if any(shape[:1] != (1,) for shape in (*shapes, *node.results)) or 0 in node.axes:
        return False
    if OPERATORS[node.op].where != "broadcast":
        return True
    # Shapes are aligned at their ends: dimension 0 meets dimension 0 only where there are equally
    # many.
    if any(len(shape) != len(node.results[0]) for shape in shapes):
        return False
    if node.op == "Gemm":
        return node.data[0] and not node.data[1] and not node.get("transA", 0)
    # A product of two matrices sums over dimension 0 of the second.
    return node.op != "MatMul" or len(node.results[0]) > 2 or not node.data[1]


def _run(node: OnnxNode, inputs: list[Tensor | None]) -> list[Tensor]:
    """The node's outputs as rows, from its inputs: rows of what depends on the image, constants as
    the file has them.

    Decides nothing by looking at a tensor, so that torch.fx can hand in its proxies.
    """
    kind = OPERATORS[node.op]
    arguments = list(inputs)
    if kind.where == "view":
        return [view_of(inputs[0], row_of(node.shapes[0]), row_of(node.results[0]))]
    for i, shape in enumerate(node.shapes[: len(inputs)]):
        if node.data[i]:
            arguments[i] = view_of(
                inputs[i], row_of(shape), lifted(node, i) if node.shift else shape[1:]
            )
    if node.op == "Concat":  # class tokens: the same for every image
        first = next(argument for argument, data in zip(arguments, node.data) if data)
        size = first.shape[0]  # type: ignore[union-attr]
        for i, shape in enumerate(node.shapes):
            constant = arguments[i]
            if constant is not None and not node.data[i]:
                arguments[i] = constant.expand(size, *shape[1 - node.shift :])
    results = kind.run(node, *arguments)
    if node.op != "Split":
        results = [results]
    # By index: a proxy cannot be iterated over. A shifted product may carry ones that its result
    # has not.
    have = [
        None if node.op == "MatMul" and node.shift else shape[1 - node.shift :]
        for shape in node.results
    ]
    return [view_of(results[i], have[i], row_of(shape)) for i, shape in enumerate(node.results)]
