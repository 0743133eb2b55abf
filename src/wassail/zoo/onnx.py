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

import importlib
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wassail.errors import InputError
from wassail.zoo.operators import LARGEST
from wassail.zoo.weights import regular

__all__ = ["OnnxClassifier", "load_onnx"]

_WIDEST = 1 << 16  # a window, a stride or a padding

Shape: TypeAlias = "tuple[int, ...]"
Statistic: TypeAlias = "float | Sequence[float] | Tensor"


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
        graph = _read(path)
        logits, nodes, constants = _specialise(graph, path)
        model = OnnxClassifier(graph, logits, nodes, constants, None, None).eval()
        with torch.no_grad():
            found = model(torch.full((2, *model.shape), 0.5))
    except InputError:
        raise
    except (
        Exception
    ) as error:  # a damaged or hostile graph can fail anywhere, in torch's operators too
        raise InputError(
            f"{str(path)!r} is no graph that can be run: {_reason(error)}; export the model again."
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
        graph: _Graph,
        logits: str,
        nodes: list[_Node],
        constants: dict[str, Tensor],
        mean: Statistic | None,
        std: Statistic | None,
    ) -> None:
        super().__init__()
        self.image = graph.image
        self.logits = logits
        self.nodes = nodes
        self.shape = _row(graph.shape)
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
            for name in (
                node.finished
            ):  # else every activation would stay in memory, even without gradients
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
    tensor = torch.as_tensor(values, dtype=torch.float32).detach().clone()
    if tensor.ndim == 1 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.ndim > 1 or (tensor.ndim == 1 and tensor.shape != shape[:1]):
        raise InputError(
            f"{what} has shape {tuple(tensor.shape)} but the graph takes images of shape {shape}: "
            "give one number, or one for each channel."
        )
    if not torch.isfinite(tensor).all() or (what == "std" and not (tensor > 0).all()):
        raise InputError(
            f"{what} is {tensor.tolist()}: give finite "
            f"numbers{', all positive' if what == 'std' else ''}."
        )
    return tensor.reshape(-1, *[1] * (len(shape) - 1)) if tensor.ndim else tensor


# ---- The file
# --------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """One operation of the graph, and what is known about it from the run on a single image."""

    op: str
    name: str
    version: int  # of the operator set
    attributes: dict[str, Any]
    inputs: list[str]  # "" where an optional input is left out
    outputs: list[str]
    shapes: list[Shape] = field(default_factory=list)  # of the inputs, for a single image
    results: list[Shape] = field(default_factory=list)  # of the outputs, likewise
    data: list[bool] = field(default_factory=list)  # which inputs depend on the image
    fixed: list[Tensor | None] = field(
        default_factory=list
    )  # the constant inputs that are integers or single numbers
    integer: bool = False  # arithmetic on shapes
    axes: tuple[int, ...] = ()  # along which it works, counted from the front
    shift: int = 0  # 1 where it is applied to (n, *s), 0 where to the rows as they are
    finished: tuple[str, ...] = ()  # values that nobody needs afterwards

    @property
    def arguments(self) -> list[str]:
        """The inputs that are handed over as tensors."""
        return self.inputs[: _OPERATORS[self.op].tensors]

    @property
    def dims(self) -> list[int]:
        """The axes as the tensors have them."""
        return [axis + self.shift for axis in self.axes]

    def get(self, attribute: str, default: Any) -> Any:
        return self.attributes.get(attribute, default)

    def static(self, attribute: str, index: int) -> list[Any] | None:
        """What older versions of the operator keep in an attribute and newer ones take as an
        input; None if left out.
        """
        if attribute in self.attributes:
            value = self.attributes[attribute]
            return list(value) if isinstance(value, (list, tuple)) else [value]
        fixed = self.fixed[index] if index < len(self.fixed) else None
        return None if fixed is None else fixed.flatten().tolist()

    def positive(self, axes: Iterable[int], rank: int | None = None) -> tuple[int, ...]:
        """Axes of the first input (or of a tensor of that rank), counted from the front."""
        rank = len(self.shapes[0]) if rank is None else rank
        return tuple(axis + rank if axis < 0 else axis for axis in axes)


@dataclass
class _Graph:
    image: str
    shape: Shape  # of a single image, as the graph has it: with its batch of one
    outputs: list[tuple[str, int | None]]  # names and declared ranks
    initialisers: dict[str, Tensor]
    nodes: list[_Node]


def _read(path: Path) -> _Graph:
    """All that is taken from the file. The only place that touches onnx, which is incompletely
    typed.
    """
    try:
        onnx: Any = importlib.import_module("onnx")
    except ImportError as error:
        raise InputError(
            "reading ONNX files needs the package onnx: install wassail[onnx]."
        ) from error
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

    def tensor(proto: Any) -> Tensor:
        array = onnx.numpy_helper.to_array(proto)
        floating = proto.data_type in (
            onnx.TensorProto.FLOAT,
            onnx.TensorProto.DOUBLE,
            onnx.TensorProto.FLOAT16,
            onnx.TensorProto.BFLOAT16,
        )
        return torch.from_numpy(array.astype("float32") if floating else array.copy())

    def attribute(proto: Any) -> Any:
        value = onnx.helper.get_attribute_value(proto)
        if isinstance(value, onnx.TensorProto):
            return tensor(value)
        return value.decode() if isinstance(value, bytes) else value

    try:
        version = next(
            (entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1
        )
        initialisers = {proto.name: tensor(proto) for proto in model.graph.initializer}
        nodes = [
            _Node(
                op=node.op_type
                if node.domain in ("", "ai.onnx")
                else f"{node.domain}.{node.op_type}",
                name=node.name or (node.output[0] if node.output else ""),
                version=version,
                attributes={proto.name: attribute(proto) for proto in node.attribute},
                inputs=list(node.input),
                outputs=list(node.output),
            )
            for node in model.graph.node
        ]
    except (TypeError, ValueError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} contains a tensor or an attribute that cannot be read: {_reason(error)}."
        ) from error
    images = [entry for entry in model.graph.input if entry.name not in initialisers]
    if not images:
        raise InputError(
            f"the graph in {path} has no input but its initialisers: export it with the image as "
            "an input."
        )
    image = images[0]
    sizes = [
        dim.dim_value if dim.WhichOneof("value") == "dim_value" else 0
        for dim in image.type.tensor_type.shape.dim
    ]
    if sizes and sizes[0] < 1:
        sizes[0] = 1  # a batch left open
    if len(sizes) < 1 or min(sizes) < 1:
        seen = [dim.dim_value or dim.dim_param or "?" for dim in image.type.tensor_type.shape.dim]
        raise InputError(
            f"input {image.name!r} of {path} has shape {seen}: export it with a fixed size of "
            "the image."
        )
    if math.prod(sizes) > LARGEST:
        raise InputError(
            f"input {image.name!r} of {path} has shape {sizes}, which no data set has: export "
            "the model again."
        )

    def rank(output: Any) -> int | None:
        kind = output.type.tensor_type
        return len(kind.shape.dim) if kind.HasField("shape") else None

    outputs = [(output.name, rank(output)) for output in model.graph.output]
    return _Graph(image.name, tuple(sizes), outputs, initialisers, nodes)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


# ---- From the graph to a list of operations
# ----------------------------------------------------------------------------------


def _specialise(graph: _Graph, path: Path) -> tuple[str, list[_Node], dict[str, Tensor]]:
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
    nodes: list[_Node] = []
    for node in _ancestors(graph.nodes, logits):
        if node.op not in _OPERATORS:
            raise InputError(
                f"{path} uses the ONNX operator {node.op!r} at node {node.name!r}, which this "
                "loader does not know: "
                "export the model without it."
            )
        try:
            results = _fold(node, values, live)
        except Exception as error:  # hostile attributes make torch's operators stumble in every way
            raise InputError(
                f"node {node.name!r} ({node.op}) of {path} cannot be run: {_reason(error)}."
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


def _ancestors(nodes: list[_Node], output: str) -> list[_Node]:
    """The nodes that the output depends on, in order: the others (labels, features) may be
    anything.
    """
    needed: set[str] = {output}
    kept: list[_Node] = []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(name for name in node.inputs if name)
            kept.append(node)
    return kept[::-1]


@torch.no_grad()
def _fold(node: _Node, values: dict[str, Tensor], live: set[str]) -> list[Tensor]:
    """The node's outputs for a single image; on the way everything about it is written down."""
    kind = _OPERATORS[node.op]
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
        if value is None or data or (value.is_floating_point() and value.numel() > 1)
        else value
        for value, data in zip(inputs, node.data)
    ]
    if any(node.data[1:]) and kind.where != "broadcast" and node.op != "Concat":
        raise ValueError("its weights or other arguments are computed from the image")
    node.axes = tuple(kind.axes(node))
    _refuse(node)
    if node.op not in _MAKE_TENSORS:  # without memory first, for the size of the result
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


def _refuse(node: _Node) -> None:
    """Raise ValueError where torch's kernels would be called with what they were not written
    for.
    """
    if node.op in ("Conv", "MaxPool", "AveragePool"):
        window = [
            *node.get("strides", [1]),
            *node.get("dilations", [1]),
            *node.get("kernel_shape", [1]),
            node.get("group", 1),
        ]
        if node.op == "Conv":
            window += node.shapes[1]
        if not all(
            isinstance(size, int) and 1 <= size <= _WIDEST for size in (*window, *node.shapes[0])
        ):
            raise ValueError("its window has a size that is not positive, or absurd")
        if not all(isinstance(size, int) and 0 <= size <= _WIDEST for size in node.get("pads", [])):
            raise ValueError("its padding is negative or absurd")
        axes = len(node.shapes[0]) - 2
        lengths = {"strides": axes, "dilations": axes, "kernel_shape": axes, "pads": 2 * axes}
        if any(len(node.get(name, [0] * length)) != length for name, length in lengths.items()):
            raise ValueError("its window has another number of axes than the image")
    if node.op == "BatchNormalization":
        channels = node.shapes[0][1:2]
        if (
            not channels
            or len(node.shapes) != 5
            or any(shape != channels for shape in node.shapes[1:])
        ):
            raise ValueError(f"its statistics are not one for each of the channels {channels}")
    if node.op in ("Mod", "Div") and node.integer and not any(node.data):
        divisor = node.fixed[1]
        if divisor is None or not bool(
            (divisor > 0).all()
        ):  # the least integer by -1 ends the process on some processors
            raise ValueError("it divides integers by what is not positive")


def _rides(node: _Node) -> bool:
    """Whether dimension 0 is one and stays untouched, so that a batch can take its place."""
    shapes = [shape for shape, data in zip(node.shapes, node.data) if data]
    if any(shape[:1] != (1,) for shape in (*shapes, *node.results)) or 0 in node.axes:
        return False
    if _OPERATORS[node.op].where != "broadcast":
        return True
    # Shapes are aligned at their ends: dimension 0 meets dimension 0 only where there are equally
    # many.
    if any(len(shape) != len(node.results[0]) for shape in shapes):
        return False
    if node.op == "Gemm":
        return node.data[0] and not node.data[1] and not node.get("transA", 0)
    # A product of two matrices sums over dimension 0 of the second.
    return node.op != "MatMul" or len(node.results[0]) > 2 or not node.data[1]


def _row(shape: Shape) -> Shape:
    """How a value of shape `shape` for a single image is kept in a batch `(n, *row)`."""
    return shape[1:] if shape[:1] == (1,) else shape


def _run(node: _Node, inputs: list[Tensor | None]) -> list[Tensor]:
    """The node's outputs as rows, from its inputs: rows of what depends on the image, constants as
    the file has them.

    Decides nothing by looking at a tensor, so that torch.fx can hand in its proxies.
    """
    kind = _OPERATORS[node.op]
    arguments = list(inputs)
    if kind.where == "view":
        return [_view(inputs[0], _row(node.shapes[0]), _row(node.results[0]))]
    for i, shape in enumerate(node.shapes[: len(inputs)]):
        if node.data[i]:
            arguments[i] = _view(
                inputs[i], _row(shape), _lifted(node, i) if node.shift else shape[1:]
            )
    if node.op == "Concat":  # class tokens: the same for every image
        size = next(argument for argument, data in zip(arguments, node.data) if data).shape[0]  # type: ignore[union-attr]
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
    return [_view(results[i], have[i], _row(shape)) for i, shape in enumerate(node.results)]


def _lifted(node: _Node, i: int) -> Shape:
    """The shape, for one image, in which input `i` meets the others: of the same rank if they
    broadcast.
    """
    shape = node.shapes[i]
    if _OPERATORS[node.op].where != "broadcast":
        return shape
    rank = max(len(node.results[0]), *(len(s) for s in node.shapes))
    if node.op in ("MatMul", "Gemm"):
        rank = max(rank, 2)
        if node.op == "MatMul" and len(shape) == 1:  # a row on the left, a column on the right
            shape = (1, *shape) if i == 0 else (*shape, 1)
    return (1,) * (rank - len(shape)) + shape


def _view(x: Any, have: Shape | None, want: Shape) -> Tensor:
    """`(n, *have)` as `(n, *want)`."""
    view: Tensor = x if have == want else x.reshape(-1, *want)
    return view


# ---- The operators
# --------------------------------------------------------------------------------------------------
# Each takes its node and tensors of the shapes in the file, or with one more dimension in front if
# the node is shifted. Shapes are looked up in the node, never in a tensor.


@dataclass(frozen=True)
class _Operator:
    """How to run an operator, and how it treats a batch.

    where: "axes" works along `node.axes`; "broadcast" aligns the shapes of its inputs; "rows" takes
    a batch in dimension 0 by definition; "view" only changes the shape. tensors: how many inputs
    are handed over as tensors, the others are static.
    """

    run: Callable[..., Any]
    where: Literal["axes", "broadcast", "rows", "view"] = "broadcast"
    tensors: int | None = None
    axes: Callable[[_Node], Iterable[int]] = lambda node: ()


def _unary(function: Callable[[Tensor], Tensor]) -> _Operator:
    return _Operator(lambda node, x: function(x))


def _binary(function: Callable[[Any, Any], Any]) -> _Operator:
    return _Operator(lambda node, a, b: function(a, b))


def _variadic(function: Callable[[Any, Any], Any]) -> _Operator:
    def run(node: _Node, first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = function(first, other)
        return first

    return _Operator(run)


def _div(node: _Node, a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc") if node.integer else a / b


def _equal(node: _Node, a: Tensor, b: Tensor) -> Tensor:
    if any(node.data):
        raise ValueError("it compares values that depend on the image, which have no gradient then")
    return torch.eq(a, b)


def _pow(node: _Node, x: Tensor, exponent: Tensor) -> Tensor:
    fixed = node.fixed[1]
    # A number is faster than a tensor, and an exponent of 2 has no trouble at negative bases.
    return x ** (
        exponent if fixed is None or fixed.numel() > 1 or node.shapes[1] != () else fixed.item()
    )


def _clip(node: _Node, x: Tensor) -> Tensor:
    low = node.static("min", 1)
    high = node.static("max", 2)
    if low is None and high is None:
        return x
    return torch.clamp(
        x, min=None if low is None else low[0], max=None if high is None else high[0]
    )


def _gelu(node: _Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.get("approximate", "none"))


def _cast(node: _Node, x: Tensor) -> Tensor:
    target = {
        1: torch.float32,
        10: torch.float32,
        11: torch.float32,
        16: torch.float32,
        6: torch.int32,
        7: torch.int64,
    }
    target[9] = torch.bool
    if node.get("to", 1) not in target:
        raise ValueError(f"a cast to type {node.get('to', 1)} is not supported")
    dtype = target[node.get("to", 1)]
    if node.data[0] and not dtype.is_floating_point:
        raise ValueError("it rounds values that depend on the image, which have no gradient then")
    return x.to(
        dtype
        # only constants get here in a batch: there a cast is a view, and the module may be in
        # float64
    )


def _expand(node: _Node, x: Tensor) -> Tensor:
    target = node.static("shape", 1)
    if target is None:
        raise ValueError("it has no target shape")
    old = node.shapes[0]
    shape = torch.broadcast_shapes(old, target)  # type: ignore[no-untyped-call]
    new = len(shape) - len(old)
    kept = [
        -1 if a == b else b for a, b in zip(old, shape[new:])
    ]  # -1 also where a batch took the place of the one
    return x.expand(*[-1] * node.shift, *shape[:new], *kept)


def _matmul(node: _Node, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def _gemm(node: _Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    alpha = node.get("alpha", 1.0)
    beta = node.get("beta", 1.0)
    a = a.transpose(-1, -2) if node.get("transA", 0) else a
    if (
        not node.data[1]
        and alpha == beta == 1
        and (c is None or (len(node.shapes[2]) == 1 and not node.data[2]))
    ):
        # The usual case, a linear layer, in one piece. A bias of one number is broadcast by hand.
        weight = b if node.get("transB", 0) else b.transpose(-1, -2)
        if c is None or node.shapes[2] == (node.shapes[1][0 if node.get("transB", 0) else 1],):
            return F.linear(a, weight, c)
    product = torch.matmul(a, b.transpose(-1, -2) if node.get("transB", 0) else b)
    product = product if alpha == 1 else alpha * product
    return product if c is None else product + (c if beta == 1 else beta * c)


def _pairs(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Amounts (before, after) for each axis in the order that torch wants: the last axis first."""
    return [amount for pair in reversed(pairs) for amount in pair]


def _window(
    node: _Node, kernel: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Strides, dilations and padding (before, after) of a convolution or a pooling, for each
    spatial axis.
    """
    count = len(kernel)
    sizes = node.shapes[0][2:]
    strides = list(node.get("strides", [1] * count))
    dilations = list(node.get("dilations", [1] * count))
    pads = node.get("pads", [0] * 2 * count)
    auto = node.get("auto_pad", "NOTSET")
    if auto == "NOTSET":
        return strides, dilations, list(zip(pads[:count], pads[count:]))
    if auto == "VALID":
        return strides, dilations, [(0, 0)] * count
    totals = [
        max((math.ceil(size / stride) - 1) * stride + dilation * (width - 1) + 1 - size, 0)
        for size, stride, dilation, width in zip(sizes, strides, dilations, kernel)
    ]
    upper = auto == "SAME_UPPER"
    return (
        strides,
        dilations,
        [(t // 2, t - t // 2) if upper else (t - t // 2, t // 2) for t in totals],
    )


def _conv(node: _Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    strides, dilations, pads = _window(node, node.shapes[1][2:])
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(strides)]
    padding = [before for before, _ in pads]
    if any(before != after for before, after in pads):
        x = F.pad(x, _pairs(pads))
        padding = [0] * len(pads)
    result: Tensor = convolve(x, weight, bias, strides, padding, dilations, node.get("group", 1))
    return result


def _pooling(
    node: _Node,
) -> tuple[list[int], list[int], list[int], list[tuple[int, int]], list[tuple[int, int]]]:
    """Kernel, strides, dilations, the padding asked for, and the padding with which no window
    hangs over the end.
    """
    kernel = list(node.attributes["kernel_shape"])
    strides, dilations, pads = _window(node, kernel)
    exact = []
    for size, width, stride, dilation, (before, after) in zip(
        node.shapes[0][2:], kernel, strides, dilations, pads
    ):
        extent = dilation * (width - 1) + 1
        span = size + before + after - extent
        last = -(-span // stride) if node.get("ceil_mode", 0) else span // stride
        if (
            last * stride >= size + before
        ):  # a window that starts in the padding behind the image is left out
            last -= 1
        exact.append((before, max(last * stride + extent - size - before, 0)))
    return kernel, strides, dilations, pads, exact


def _max_pool(node: _Node, x: Tensor) -> Tensor:
    kernel, strides, dilations, _, exact = _pooling(node)
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
    if any(map(any, exact)):
        x = F.pad(x, _pairs(exact), value=-math.inf)
    result: Tensor = pool(x, kernel, strides, 0, dilations)
    return result


def _average_pool(node: _Node, x: Tensor) -> Tensor:
    kernel, strides, dilations, pads, exact = _pooling(node)
    if any(dilation != 1 for dilation in dilations):
        raise ValueError("a dilated average is not supported")
    pool: Callable[..., Tensor] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[len(kernel)]
    if not any(map(any, exact)):
        return pool(x, kernel, strides)
    average = pool(F.pad(x, _pairs(exact)), kernel, strides)
    counted = [(before, min(end, after)) for (before, end), (_, after) in zip(exact, pads)]
    include = bool(node.get("count_include_pad", 0))
    if include and counted == exact:
        return average
    # Divide by the share of the window that counts: the image, with the padding asked for if it is
    # included.
    share = F.pad(x.new_ones((1, 1, *node.shapes[0][2:])), _pairs(counted), value=float(include))
    overhang = [(0, end - after) for (_, end), (_, after) in zip(exact, counted)]
    return average / pool(F.pad(share, _pairs(overhang)), kernel, strides)


def _global_pool(reduce: Callable[[Tensor, list[int]], Tensor]) -> _Operator:
    return _Operator(lambda node, x: reduce(x, list(range(2, len(node.shapes[0])))), "rows")


def _batch_norm(
    node: _Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if node.get("training_mode", 0) or not node.get("spatial", 1):
        raise ValueError(
            "only the form for inference, with one mean and variance for each channel, is supported"
        )
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, node.get("epsilon", 1e-5))


def _layer_norm(node: _Node, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    x = (
        F.layer_norm(x, [node.shapes[0][axis] for axis in node.axes], eps=node.get("epsilon", 1e-5))
        * scale
    )
    return x if bias is None else x + bias


def _trailing(node: _Node) -> Iterable[int]:
    rank = len(node.shapes[0])
    return range(node.positive([node.get("axis", -1)])[0], rank)


def _softmax_axes(node: _Node) -> Iterable[int]:
    """Before version 13 everything from the axis on was one distribution."""
    rank = len(node.shapes[0])
    (axis,) = node.positive([node.get("axis", -1 if node.version >= 13 else 1)])
    return (axis,) if node.version >= 13 else range(axis, rank)


def _softmax(function: Callable[[Tensor, int], Tensor]) -> _Operator:
    def run(node: _Node, x: Tensor) -> Tensor:
        if len(node.dims) == 1:
            return function(x, node.dims[0])
        joined = function(x.flatten(node.dims[0]), node.dims[0])
        return torch.unflatten(joined, node.dims[0], [node.shapes[0][axis] for axis in node.axes])

    return _Operator(run, "axes", axes=_softmax_axes)


def _reduce_axes(node: _Node) -> Iterable[int]:
    axes = node.static("axes", 1)
    if axes:
        return node.positive(axes)
    return () if node.get("noop_with_empty_axes", 0) else range(len(node.shapes[0]))


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> _Operator:
    def run(node: _Node, x: Tensor) -> Tensor:
        return function(x, node.dims, bool(node.get("keepdims", 1))) if node.dims else x

    return _Operator(run, "axes", tensors=1, axes=_reduce_axes)


def _axis(default: int) -> Callable[[_Node], Iterable[int]]:
    return lambda node: node.positive([node.get("axis", default)])


def _concat(node: _Node, *tensors: Tensor) -> Tensor:
    return torch.cat(tensors, node.dims[0])


def _gather(node: _Node, x: Tensor, indices: Tensor) -> Tensor:
    (axis,), (dim,) = node.axes, node.dims
    size = node.shapes[0][axis]
    fixed = node.fixed[1]
    if fixed is not None and fixed.ndim == 0:
        return x.select(dim, int(fixed) % size)
    return torch.unflatten(
        x.index_select(dim, torch.remainder(indices, size).flatten()), dim, node.shapes[1]
    )


def _slices(node: _Node) -> list[tuple[int, range]]:
    """The axes along which something is left out or reordered, each with the indices that it
    keeps.
    """
    starts = node.static("starts", 1)
    ends = node.static("ends", 2)
    if starts is None or ends is None:
        raise ValueError("it has no starts or ends")
    axes = node.static("axes", 3) or range(len(starts))
    steps = node.static("steps", 4) or [1] * len(starts)
    sizes = node.shapes[0]
    kept = [
        (axis, range(*slice(start, end, step).indices(sizes[axis])))
        for axis, start, end, step in zip(node.positive(axes), starts, ends, steps)
    ]
    # All of a batch of one is all of any batch.
    return [(axis, indices) for axis, indices in kept if indices != range(sizes[axis])]


def _slice(node: _Node, x: Tensor) -> Tensor:
    for axis, kept in _slices(node):
        before = (slice(None),) * (axis + node.shift)
        if kept.step > 0:
            x = x[(*before, slice(kept.start, kept.stop, kept.step))]
        else:  # torch slices forwards only
            x = x[
                (*before, slice(kept[-1], kept[0] + 1, -kept.step) if kept else slice(0, 0))
            ].flip(axis + node.shift)
    return x


def _slice_axes(node: _Node) -> Iterable[int]:
    return [axis for axis, _ in _slices(node)]


def _split(node: _Node, x: Tensor) -> Any:
    size = node.shapes[0][node.axes[0]]
    count = len(node.outputs)
    if (sizes := node.static("split", 1)) is None:
        piece = math.ceil(size / count)
        sizes = [piece] * (count - 1) + [size - piece * (count - 1)]
    return torch.split(x, sizes, node.dims[0])


def _transpose(node: _Node, x: Tensor) -> Tensor:
    return x.permute(*range(node.shift), *(axis + node.shift for axis in _order(node)))


def _order(node: _Node) -> list[int]:
    return list(node.get("perm", range(len(node.shapes[0]))[::-1]))


def _amounts(node: _Node) -> list[tuple[int, int]]:
    """Padding (before, after) of every axis."""
    rank = len(node.shapes[0])
    pads = node.static("pads", 1)
    if pads is None:
        raise ValueError("it does not say how much to pad")
    axes = node.positive(node.static("axes", 3) or range(rank))
    pairs = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :])))
    return [pairs.get(axis, (0, 0)) for axis in range(rank)]


def _pad(node: _Node, x: Tensor) -> Tensor:
    amounts = _amounts(node)
    mode = node.get("mode", "constant")
    value = node.static("value", 2)
    if not any(map(any, amounts)):
        return x
    if mode == "constant":
        return F.pad(x, _pairs(amounts), value=float(value[0]) if value else 0.0)
    if mode not in ("reflect", "edge") or len(amounts) < 3 or any(map(any, amounts[:2])):
        raise ValueError(
            f"padding of this kind ({mode!r}) is supported along the axes of an image only"
        )
    # Here torch allows for one batch dimension and one of channels only.
    padded = F.pad(
        x.flatten(0, node.shift), _pairs(amounts[2:]), mode="replicate" if mode == "edge" else mode
    )
    return torch.unflatten(padded, 0, (-1, node.shapes[0][0])) if node.shift else padded


def _reshape(node: _Node, x: Tensor) -> Tensor:
    target = node.static("shape", 1)
    if target is None:
        raise ValueError("it has no target shape")
    copied = not node.get("allowzero", 0)
    return x.reshape(
        [node.shapes[0][i] if size == 0 and copied else size for i, size in enumerate(target)]
    )


def _flatten(node: _Node, x: Tensor) -> Tensor:
    (axis,) = node.positive([node.get("axis", 1)])
    return x.reshape(math.prod(node.shapes[0][:axis]), -1)


def _squeeze(node: _Node, x: Tensor) -> Tensor:
    shape = node.shapes[0]
    given = node.static("axes", 1)
    axes = (
        node.positive(given)
        if given is not None
        else [axis for axis, size in enumerate(shape) if size == 1]
    )
    return x.reshape([size for axis, size in enumerate(shape) if axis not in axes])


def _unsqueeze(node: _Node, x: Tensor) -> Tensor:
    axes = node.static("axes", 1) or []
    for axis in sorted(node.positive(axes, len(node.shapes[0]) + len(axes))):
        x = x.unsqueeze(axis)
    return x


def _constant(node: _Node) -> Tensor:
    (value,) = node.attributes.values()
    kinds = {"value": None, "value_float": torch.float32, "value_floats": torch.float32}
    kinds |= {"value_int": torch.int64, "value_ints": torch.int64}
    (name,) = node.attributes
    if name not in kinds:
        raise ValueError(f"a constant of this kind ({name}) is not supported")
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=kinds[name])


def _constant_of_shape(node: _Node) -> Tensor:
    fill = node.get("value", torch.zeros(1))
    target = node.static("shape", 0)
    if target is None:
        raise ValueError("its shape depends on the values of the image")
    if any(size < 0 for size in target) or math.prod(target) > LARGEST:
        raise ValueError(f"its result would have shape {tuple(target)}")
    return torch.full(target, fill.item(), dtype=fill.dtype)


def _shape(node: _Node, x: Tensor) -> Tensor:
    return torch.tensor(node.shapes[0], dtype=torch.int64)[
        node.get("start", 0) : node.get("end", None)
    ]


def _same(node: _Node, x: Tensor) -> Tensor:
    return x


_OPERATORS: dict[str, _Operator] = {
    "Abs": _unary(torch.abs),
    "Add": _binary(operator.add),
    "AveragePool": _Operator(_average_pool, "rows"),
    "BatchNormalization": _Operator(_batch_norm, "rows"),
    "Cast": _Operator(_cast, "view"),
    "Clip": _Operator(_clip, tensors=1),
    "Concat": _Operator(_concat, "axes", axes=_axis(1)),
    "Constant": _Operator(_constant),
    "ConstantOfShape": _Operator(_constant_of_shape, tensors=0),
    "Conv": _Operator(_conv, "rows"),
    "Div": _Operator(_div),
    "Dropout": _Operator(_same, "view", tensors=1),
    "Elu": _Operator(lambda node, x: F.elu(x, node.get("alpha", 1.0))),
    "Equal": _Operator(_equal),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": _Operator(_expand, tensors=1),
    "Flatten": _Operator(_flatten, "view"),
    "Gather": _Operator(_gather, "axes", axes=_axis(0)),
    "Gelu": _Operator(_gelu),
    "Gemm": _Operator(_gemm),
    "GlobalAveragePool": _global_pool(lambda x, dims: x.mean(dims, keepdim=True)),
    "GlobalMaxPool": _global_pool(lambda x, dims: x.amax(dims, keepdim=True)),
    "Identity": _Operator(_same, "view"),
    "LayerNormalization": _Operator(_layer_norm, "axes", axes=_trailing),
    "LeakyRelu": _Operator(lambda node, x: F.leaky_relu(x, node.get("alpha", 0.01))),
    "Log": _unary(torch.log),
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _Operator(_matmul),
    "Max": _variadic(torch.maximum),
    "MaxPool": _Operator(_max_pool, "rows"),
    "Min": _variadic(torch.minimum),
    "Mod": _Operator(
        lambda node, a, b: (torch.fmod if node.get("fmod", 0) else torch.remainder)(a, b)
    ),
    "Mul": _binary(operator.mul),
    "Neg": _unary(torch.neg),
    "Pad": _Operator(
        _pad,
        "axes",
        tensors=1,
        axes=lambda node: [i for i, pair in enumerate(_amounts(node)) if any(pair)],
    ),
    "Pow": _Operator(_pow),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceMax": _reduce(lambda x, dims, keep: x.amax(dims, keepdim=keep)),
    "ReduceMean": _reduce(lambda x, dims, keep: x.mean(dims, keepdim=keep)),
    "ReduceMin": _reduce(lambda x, dims, keep: x.amin(dims, keepdim=keep)),
    "ReduceSum": _reduce(lambda x, dims, keep: x.sum(dims, keepdim=keep)),
    "Relu": _unary(F.relu),
    "Reshape": _Operator(_reshape, "view", tensors=1),
    "Shape": _Operator(_shape),
    "Sigmoid": _unary(torch.sigmoid),
    "Slice": _Operator(_slice, "axes", tensors=1, axes=_slice_axes),
    "Softmax": _softmax(torch.softmax),
    "Softplus": _unary(F.softplus),
    "Split": _Operator(_split, "axes", tensors=1, axes=_axis(0)),
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _Operator(_squeeze, "view", tensors=1),
    "Sub": _binary(operator.sub),
    "Sum": _variadic(operator.add),
    "Tanh": _unary(torch.tanh),
    "Transpose": _Operator(
        _transpose,
        "axes",
        axes=lambda node: [axis for place, axis in enumerate(_order(node)) if axis != place],
    ),
    "Unsqueeze": _Operator(_unsqueeze, "view", tensors=1),
    "Where": _Operator(lambda node, condition, a, b: torch.where(condition, a, b)),
}
