"""The structure of a network, piecewise linear or with smooth activations, read from the model itself.

`read` exports the model (`torch.export`) and keeps a graph of a few kinds of node: affine maps with their exact transposes,
sums, concatenations, ReLUs, and on request sigmoid, tanh, GELU and SiLU. Normalisations and frozen batch norms are folded into
their neighbours; a maximum is written `max(a, b) = a + relu(b - a)`, so that max pooling, clamps and absolute values are ReLUs
too. Everything is float64. What is none of this is refused in one sentence that names its place in the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from wassail.certificates.activations import ACTIVATIONS
from wassail.certificates.piecewise import Piecewise
from wassail.errors import InputError
from wassail.network import Model, frozen


class Linear(Protocol):
    """A linear map of one or several tensors `(m, *shape)`; the node adds its bias."""

    def forward(self, *x: Tensor) -> Tensor:
        """The map itself."""

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its transpose: one tensor for each input."""

    def magnitude(self) -> Linear:
        """The map with the absolute values of its weights: for intervals and rounding errors."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """`W x` over the last axis; weight `(out, in)`; most: the magnitudes that its entries are sums of, if they are sums."""

    weight: Tensor
    most: Tensor | None = None

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, ..., in) -> (m, ..., out)`."""
        return x[0] @ self.weight.T

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, ..., out) -> (m, ..., in)`."""
        return (g @ self.weight,)

    def magnitude(self) -> Matrix:
        """`|W|`."""
        return Matrix(self.weight.abs())


def rounding_map(map_: Linear) -> Linear:
    """The map of magnitudes that rounding errors are relative to: the absolute weights, or what they were summed from."""
    if isinstance(map_, Matrix) and map_.most is not None:
        return Matrix(map_.most)
    return map_.magnitude()


@dataclass(frozen=True, eq=False)
class Conv:
    """A two-dimensional convolution; weight `(out, in / groups, height, width)`, shape: of the input."""

    weight: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, in, ., .) -> (m, out, ., .)`."""
        return F.conv2d(x[0], self.weight, None, self.stride, self.padding, self.dilation, self.groups)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, out, ., .) -> (m, in, ., .)`."""
        size = [len(g), *self.shape]
        return (conv2d_input(size, self.weight, g, self.stride, self.padding, self.dilation, self.groups),)  # type: ignore[no-untyped-call]

    def magnitude(self) -> Conv:
        """The kernel's absolute values."""
        return replace(self, weight=self.weight.abs())


@dataclass(frozen=True, eq=False)
class Scale:
    """`factor x`, entry by entry; factor broadcasts against one sample."""

    factor: Tensor

    def forward(self, *x: Tensor) -> Tensor:
        """Same shape."""
        return x[0] * self.factor

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Its own transpose."""
        return (g * self.factor,)

    def magnitude(self) -> Scale:
        """`|factor|`."""
        return Scale(self.factor.abs())


@dataclass(frozen=True, eq=False)
class Pick:
    """Entries moved, dropped or repeated: reshape, permute, slice, pad, expand. source: index of each entry, -1 for zero."""

    source: Tensor | None  # None: the same entries in the same order
    shape: tuple[int, ...]
    output: tuple[int, ...]

    def forward(self, *x: Tensor) -> Tensor:
        """`(m, *shape) -> (m, *output)`."""
        flat = x[0].reshape(len(x[0]), -1)
        if self.source is not None:
            flat = F.pad(flat, (0, 1))[:, self.source]  # index -1 is the padded zero
        return flat.reshape(-1, *self.output)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`(m, *output) -> (m, *shape)`."""
        flat = g.reshape(len(g), -1)
        if self.source is not None:
            size = math.prod(self.shape)
            where = torch.where(self.source < 0, size, self.source)
            flat = flat.new_zeros(len(g), size + 1).index_add(1, where, flat)[:, :size]
        return (flat.reshape(-1, *self.shape),)

    def magnitude(self) -> Pick:
        """Itself."""
        return self


@dataclass(frozen=True, eq=False)
class Average:
    """An average pooling or a mean or sum over axes: a linear function with weights >= 0."""

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def forward(self, *x: Tensor) -> Tensor:
        """Whatever the function does."""
        return self.function(x[0])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """By automatic differentiation: the derivative of a linear function does not depend on the point."""
        with torch.enable_grad():
            x = g.new_zeros(len(g), *self.shape, requires_grad=True)
            return torch.autograd.grad(self.function(x), x, g, create_graph=g.requires_grad)

    def magnitude(self) -> Average:
        """Itself."""
        return self


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of several tensors of one shape."""

    count: int

    def forward(self, *x: Tensor) -> Tensor:
        """Same shape."""
        return reduce(torch.add, x)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """The same to each."""
        return (g,) * self.count

    def magnitude(self) -> Sum:
        """Itself."""
        return self


@dataclass(frozen=True, eq=False)
class Concat:
    """Concatenation along an axis of the batch; sizes: of the inputs there."""

    axis: int
    sizes: tuple[int, ...]

    def forward(self, *x: Tensor) -> Tensor:
        """Joined."""
        return torch.cat(x, self.axis)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """Cut again."""
        return torch.split(g, list(self.sizes), self.axis)

    def magnitude(self) -> Concat:
        """Itself."""
        return self


@dataclass(frozen=True, eq=False)
class Node:
    """One step of the network: the input (no inputs), an affine map, a ReLU (slope given), or a smooth activation.

    inputs: indices of earlier nodes; shape: of one sample; bias: broadcasts against one sample; slope: the derivative where
    the ReLU is off, in [0, 1], broadcasts against one sample; place: where it stands in the model; bias_most: the magnitudes
    that the bias is a sum of, if it is one; activation: the name of a smooth activation, one of `ACTIVATIONS`.
    """

    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    place: str
    map: Linear | None = None
    bias: Tensor | None = None
    slope: Tensor | None = None
    bias_most: Tensor | None = None
    activation: str | None = None

    @property
    def bias_size(self) -> Tensor | float:
        """The magnitude of the bias that rounding errors are relative to."""
        return self.bias_most if self.bias_most is not None else 0.0 if self.bias is None else self.bias.abs()

    @property
    def size(self) -> int:
        """How many numbers it holds for one sample."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Graph:
    """A network: nodes in topological order, the first the input, the last the logits; piecewise linear or smooth.

    rounding: relative error of the weights themselves, where they were computed.
    """

    nodes: tuple[Node, ...]
    rounding: float = 0.0

    @property
    def inputs(self) -> int:
        """n, the number of inputs."""
        return self.nodes[0].size

    @property
    def outputs(self) -> int:
        """K, the number of logits."""
        return self.nodes[-1].size

    @property
    def relus(self) -> list[int]:
        """The indices of the ReLU nodes of a piecewise-linear network."""
        self.refuse_smooth()
        return [i for i, node in enumerate(self.nodes) if node.slope is not None]

    @property
    def neurons(self) -> int:
        """H, the number of ReLUs."""
        return sum(self.nodes[i].size for i in self.relus)

    def values(self, x: Tensor) -> list[Tensor]:
        """Every node at samples `(m, *shape)` in float64."""
        found: list[Tensor] = []
        for node in self.nodes:
            given = [found[i] for i in node.inputs]
            if node.slope is not None:
                found.append(torch.where(given[0] > 0, given[0], node.slope * given[0]))
            elif node.activation is not None:
                found.append(ACTIVATIONS[node.activation].value(given[0]))
            elif node.map is not None:
                found.append(_biased(node.map.forward(*given), node.bias))
            else:
                found.append(x.double())
        return found

    def logits(self, x: Tensor) -> Tensor:
        """`theta` at samples `(m, *shape)`: `(m, K)` in float64."""
        return self.values(x)[-1]

    def homogeneous(self) -> Graph:
        """The same network with all biases zero: its recession function (THEORY 3), if it is piecewise linear."""
        self.refuse_smooth()
        return Graph(tuple(replace(node, bias=None) for node in self.nodes))

    def head(self, weight: Tensor) -> Graph:
        """The network followed by a linear map `(J, K)`, merged into the last layer where that is a matrix."""
        last, weight = self.nodes[-1], weight.double()
        bias = None if last.bias is None else weight @ last.bias.expand(last.shape)
        if isinstance(last.map, Matrix):
            node = replace(last, map=Matrix(weight @ last.map.weight), bias=bias, shape=(len(weight),))
            return Graph((*self.nodes[:-1], node))
        node = Node((len(self.nodes) - 1,), (len(weight),), "the margins", Matrix(weight))
        return Graph((*self.nodes, node))

    def refuse_smooth(self) -> None:
        """An `InputError` that names the first smooth activation, if there is one."""
        for node in self.nodes:
            if node.activation is not None:
                raise InputError(
                    f"{node.activation!r} at {node.place} is not piecewise linear: this method is for ReLU networks, "
                    "use one that takes smooth activations."
                )

    def piecewise(self, states: Mapping[int, Tensor] | None = None, limit: int = 5000) -> Piecewise:
        """The dense form, for networks of at most `limit` free neurons.

        states: for ReLU nodes, of the node's shape, 1 where a neuron is always active, 0 where never, -1 where it is free;
        neurons with a side are replaced by the linear function they are.
        """
        sides = {i: torch.full(self.nodes[i].shape, -1) if states is None else states[i] for i in self.relus}
        n, total = self.inputs, sum(int((side < 0).sum()) for side in sides.values())
        if total > limit:
            raise InputError(
                f"{total} ReLUs may change sides here: exact methods take at most {limit}, use method='propagate'."
            )
        # Every node as an affine function of (x, z): a batch of n + H + 1 columns, the last one the constant.
        columns, start = n + total + 1, n
        value: list[Tensor] = []
        depth: list[int] = []
        none = torch.zeros(0, dtype=torch.float64)
        rows, slopes, layers = [none.new_zeros(0, columns)], [none], [none.long()]
        for i, node in enumerate(self.nodes):
            given = [value[j] for j in node.inputs]
            level = max((depth[j] for j in node.inputs), default=0)
            if node.slope is not None:
                free, slope = (sides[i] < 0).flatten(), node.slope.expand(node.shape)
                before = given[0].reshape(columns, -1)
                after = (given[0] * torch.where(sides[i] == 1, 1.0, slope)).reshape(columns, -1)
                where, count = free.nonzero().flatten(), int(free.sum())
                after[:, where] = 0
                after[torch.arange(start, start + count), where] = 1.0
                rows.append(before[:, where].T)
                slopes.append(slope.flatten()[where])
                layers.append(torch.full((count,), level))
                value.append(after.reshape(columns, *node.shape))
                start, level = start + count, level + (count > 0)
            elif node.map is not None:
                out = node.map.forward(*given)
                if node.bias is not None:
                    out[-1] = out[-1] + node.bias
                value.append(out)
            else:
                value.append(F.pad(torch.eye(n, dtype=torch.float64), (0, 0, 0, total + 1)).reshape(columns, *node.shape))
            depth.append(level)
        table, out, layer = torch.cat(rows), value[-1].reshape(columns, -1).T, torch.cat(layers)
        order = torch.argsort(layer, stable=True)  # layer by layer, as Piecewise stores them
        table = table[order]
        return Piecewise(
            table[:, :n], table[:, n:-1][:, order], table[:, -1], out[:, :n], out[:, n:-1][:, order], out[:, -1],
            torch.cat(slopes)[order], torch.unique(layer[order], return_inverse=True)[1],
        )  # fmt: skip


def read(model: Model, shape: Sequence[int], smooth: bool = False) -> Graph:
    """The structure of a model for samples of this shape, or an `InputError` that names what is not piecewise linear.

    smooth: take sigmoid, tanh, GELU and SiLU too, as nodes with an `activation`. The graph is compared with the model at random
    points before it is returned.
    """
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    module = model if isinstance(model, nn.Module) else _Module(model)
    parameter = next(module.parameters(), None)
    if parameter is not None:
        x = x.to(parameter)
    with frozen(module), torch.no_grad():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(module, (x,), strict=False).run_decompositions({})
        except Exception as error:  # whatever the exporter stumbles over
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(". ")
            raise InputError(f"the model's structure cannot be read for samples of shape {tuple(shape)}: {reason}.") from None
        graph = _Reader(program, tuple(shape), smooth).graph()
        probe = torch.cat([x, -x, 4 * x])
        truth, ours = model(probe).double().cpu(), graph.logits(probe.cpu())
    if not torch.isfinite(truth).all():
        raise InputError("the model returns NaN or infinity at random points: check its weights and preprocessing.")
    if truth.shape != ours.shape or not (truth - ours).abs().max() <= 1e-3 * truth.abs().max().clamp(min=1):
        raise InputError("the structure read from the model does not reproduce its logits: it depends on the batch or on data.")
    return graph


class _Module(nn.Module):
    def __init__(self, function: Model) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


_MOVES = {
    "view", "reshape", "unsafe_view", "flatten", "unflatten", "permute", "transpose", "slice", "select", "squeeze", "unsqueeze",
    "expand", "pad", "constant_pad_nd", "contiguous", "clone", "alias", "narrow", "flip", "roll", "index_select", "split",
    "split_with_sizes", "chunk", "unbind", "movedim", "t", "numpy_T", "expand_as", "view_as", "unsafe_split", "unsafe_chunk",
}  # fmt: skip
_SAME = {"dropout", "detach", "to", "to_copy", "lift_fresh_copy", "feature_dropout", "alpha_dropout"}
_AVERAGES = {"avg_pool2d", "adaptive_avg_pool2d", "mean", "sum", "avg_pool1d", "adaptive_avg_pool1d"}


class _Reader:
    """Translates an exported program node by node. A value is a constant tensor, the index of a node, or a list of them."""

    def __init__(self, program: Any, shape: tuple[int, ...], smooth: bool) -> None:
        self.program, self.nodes, self.smooth = program, [Node((), shape, "the input")], smooth
        self.place = ""

    def graph(self) -> Graph:
        signature = self.program.graph_signature
        constants = {**self.program.state_dict, **self.program.constants}
        owners = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants,
        }  # fmt: skip
        values: dict[Any, Any] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                owner = owners.get(node.name)
                values[node] = _Index(0) if owner is None else _wide(constants[owner])
            elif node.op == "output":
                result = values[node.args[0][0]]
                if len(node.args[0]) != 1 or not isinstance(result, _Index):
                    raise InputError("the model does not return one tensor of logits that depends on its input.")
                return self._trim(result)
            else:
                values[node] = self._node(node, values)
        raise InputError("the model returns nothing: it must return logits.")

    def _node(self, node: Any, values: dict[Any, Any]) -> Any:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, kind = (stack[-1][0], str(stack[-1][1]).rsplit(".", 1)[-1]) if stack else ("", "the model")
        self.place = f"{path!r} ({kind})" if path else f"the model itself ({kind})"
        args = torch.fx.node.map_arg(node.args, lambda n: values[n])
        options = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
        name = getattr(getattr(node.target, "_schema", None), "name", str(node.target)).split("::")[-1]
        flat, _ = torch.utils._pytree.tree_flatten((args, options))
        if "assert" in name:  # the exporter's checks of dtypes, which we have widened
            return None
        if not any(isinstance(v, _Index) for v in flat):
            return node.target(*args, **options)
        if "getitem" in str(node.target):
            return args[0][args[1]]
        return self._translate(name.strip("_"), node.target, list(args), dict(options))  # relu_ and relu are one

    def _translate(self, name: str, target: Any, args: list[Any], options: dict[str, Any]) -> Any:
        first = args[0]
        if name in _SAME:
            return first
        if name in _MOVES and isinstance(first, _Index):
            return self._move(target, first, args[1:], options)
        if name in _AVERAGES and isinstance(first, _Index):
            return self._average(target, first, args[1:], options)
        rule = getattr(self, f"_{name}", None)
        if rule is None:
            raise self._refuse(name)
        try:
            return rule(*args, **options)
        except (TypeError, AttributeError):
            raise self._refuse(name) from None

    def _refuse(self, what: str) -> InputError:
        activations = "ReLU, leaky ReLU, sigmoid, tanh, GELU and SiLU" if self.smooth else "ReLU and leaky ReLU"
        return InputError(
            f"{what!r} at {self.place} is not supported: certificates read linear and convolutional layers, frozen batch norm, "
            f"{activations}, additions, concatenations, reshapes and poolings."
        )

    # Nodes. A scale beside a matrix or a convolution is folded into it, so that norms see one map.

    def _add_node(self, node: Node) -> _Index:
        self.nodes.append(node)
        return _Index(len(self.nodes) - 1)

    def _affine(self, map_: Linear, bias: Tensor | None, source: int, shape: tuple[int, ...]) -> _Index:
        before = self.nodes[source]
        if isinstance(before.map, Scale) and isinstance(map_, Matrix | Conv | Scale):
            folded = _fold_before(before.map.factor, map_, before.shape)
            if folded is not None:
                if before.bias is not None:
                    shift = map_.forward(before.bias.expand(before.shape)[None])[0]
                    bias = shift if bias is None else shift + bias
                return self._affine(folded, bias, before.inputs[0], shape)
        return self._add_node(Node((source,), shape, self.place, map_, bias))

    def _scaled(self, source: int, factor: Tensor, bias: Tensor | None) -> _Index:
        before = self.nodes[source]
        sizes = (before.shape, factor.shape, () if bias is None else bias.shape)
        if tuple(torch.broadcast_shapes(*sizes)) != before.shape:  # type: ignore[no-untyped-call]
            raise self._refuse("a broadcast against a constant")
        if isinstance(before.map, Matrix | Conv):
            folded = _fold_after(before.map, factor, before.shape)
            if folded is not None:
                moved = None if before.bias is None else before.bias * factor
                total = bias if moved is None else moved if bias is None else moved + bias
                return self._add_node(replace(before, map=folded, bias=total, place=before.place))
        return self._affine(Scale(factor), bias, source, before.shape)

    def _relu_node(self, source: int, slope: Tensor | float = 0.0) -> _Index:
        slope = torch.as_tensor(slope, dtype=torch.float64)
        if not ((slope >= 0) & (slope <= 1)).all():
            raise self._refuse("a leaky ReLU whose slope is not in [0, 1]")
        return self._add_node(Node((source,), self.nodes[source].shape, self.place, slope=slope))

    def _smooth_node(self, source: int, name: str) -> _Index:
        if not self.smooth:
            raise self._refuse(name)
        return self._add_node(Node((source,), self.nodes[source].shape, self.place, activation=name))

    def _sum(self, parts: Sequence[int]) -> _Index:
        shapes = {self.nodes[i].shape for i in parts}
        if len(shapes) > 1:
            raise self._refuse("an addition that broadcasts")
        return self._add_node(Node(tuple(parts), shapes.pop(), self.place, Sum(len(parts))))

    def _larger(self, a: int, b: int) -> _Index:
        """`max(a, b) = a + relu(b - a)`."""
        return self._sum([a, self._relu_node(self._difference(b, a))])

    def _difference(self, a: int, b: int) -> _Index:
        return self._sum([a, self._scaled(b, torch.tensor(-1.0, dtype=torch.float64), None)])

    # Data movement: run the operation on the numbers 1, 2, 3, ... and see where they went.

    def _move(self, target: Any, source: int, args: list[Any], options: dict[str, Any]) -> Any:
        shape = self.nodes[source].shape
        size = math.prod(shape)
        count = torch.arange(1, 2 * size + 1, dtype=torch.float64).reshape(2, *shape)
        with torch.no_grad():
            moved = target(count, *args, **options)
        if isinstance(moved, Tensor):
            return self._picked(source, moved, size)
        return [self._picked(source, part, size) for part in moved]

    def _picked(self, source: int, moved: Tensor, size: int) -> _Index:
        shape, output = self.nodes[source].shape, tuple(moved.shape[1:])
        if moved.ndim < 1 or len(moved) != 2:
            raise self._refuse("an operation across the batch axis")
        where = moved[0].flatten().long()
        if not torch.equal(moved[1].flatten(), torch.where(where > 0, where + size, where).double()) or where.min() < 0:
            raise self._refuse("an operation across the batch axis or a padding with other than zeros")
        same = len(where) == size and torch.equal(where, torch.arange(1, size + 1))
        if same and output == shape:
            return _Index(source)
        return self._add_node(Node((source,), output, self.place, Pick(None if same else where - 1, shape, output)))

    def _average(self, target: Any, source: int, args: list[Any], options: dict[str, Any]) -> _Index:
        def function(x: Tensor) -> Tensor:
            return target(x, *args, **options)  # type: ignore[no-any-return]

        shape = self.nodes[source].shape
        out = function(torch.ones(3, *shape, dtype=torch.float64))
        if out.ndim < 1 or len(out) != 3:
            raise self._refuse("an average over the batch axis")
        return self._add_node(Node((source,), tuple(out.shape[1:]), self.place, Average(function, shape)))

    # The operations, by their names in torch's operator library.

    def _linear(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> _Index:
        shape = (*self.nodes[x].shape[:-1], len(weight))
        return self._affine(Matrix(weight), bias, x, shape)

    def _addmm(self, bias: Tensor, x: Any, weight: Tensor) -> _Index:
        return self._linear(x, weight.T, bias)

    def _matmul(self, x: Any, weight: Tensor) -> _Index:
        if not isinstance(x, _Index) or weight.ndim != 2:
            raise self._refuse("a product of two quantities that depend on the input")
        return self._linear(x, weight.T)

    _mm = _matmul

    def _conv2d(
        self, x: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> _Index:  # fmt: skip
        if padding in ("valid", "same"):
            reach = [d * (k - 1) for d, k in zip(_pair(dilation), weight.shape[2:])]
            if padding == "same" and any(r % 2 for r in reach):
                raise self._refuse("a 'same' padding that is not symmetric")
            padding = [0, 0] if padding == "valid" else [r // 2 for r in reach]
        shape = self.nodes[x].shape
        conv = Conv(weight, shape, _pair(stride), _pair(padding), _pair(dilation), groups)
        output = tuple(conv.forward(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
        return self._affine(conv, None if bias is None else bias[:, None, None], x, output)

    def _convolution(
        self, x: Any, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
        output_padding: Any, groups: int,
    ) -> _Index:  # fmt: skip
        if transposed or weight.ndim != 4:
            raise self._refuse("a transposed or not two-dimensional convolution")
        return self._conv2d(x, weight, bias, stride, padding, dilation, groups)

    def _batch_norm(
        self, x: Any, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, training: bool, _: float,
        eps: float, *rest: Any,
    ) -> _Index:  # fmt: skip
        if training:
            raise self._refuse("a batch norm in training mode")
        factor = (var + eps).rsqrt() if weight is None else weight * (var + eps).rsqrt()
        shift = -mean * factor if bias is None else bias - mean * factor
        ones = (-1, *[1] * (len(self.nodes[x].shape) - 1))
        return self._scaled(x, factor.reshape(ones), shift.reshape(ones))

    def _native_batch_norm_legit_no_training(self, *args: Any) -> list[Any]:
        x, weight, bias, mean, var, momentum, eps = args
        return [self._batch_norm(x, weight, bias, mean, var, False, momentum, eps), None, None]

    def _relu(self, x: Any) -> _Index:
        return self._relu_node(x)

    def _leaky_relu(self, x: Any, slope: float = 0.01) -> _Index:
        return self._relu_node(x, slope)

    def _prelu(self, x: Any, weight: Tensor) -> _Index:
        return self._relu_node(x, weight.reshape(-1, *[1] * (len(self.nodes[x].shape) - 1)))

    def _sigmoid(self, x: Any) -> _Index:
        return self._smooth_node(x, "sigmoid")

    def _tanh(self, x: Any) -> _Index:
        return self._smooth_node(x, "tanh")

    def _gelu(self, x: Any, approximate: str = "none") -> _Index:
        return self._smooth_node(x, "gelu" if approximate == "none" else "gelu_tanh")

    def _silu(self, x: Any) -> _Index:
        return self._smooth_node(x, "silu")

    def _hardtanh(self, x: Any, low: float = -1.0, high: float = 1.0) -> _Index:
        return self._clamp(x, low, high)

    def _relu6(self, x: Any) -> _Index:
        return self._clamp(x, 0.0, 6.0)

    def _clamp(self, x: Any, min: Any = None, max: Any = None) -> _Index:
        """`low + relu(x - low) - relu(x - high)`, each side on its own where only one is given."""
        one = torch.tensor(1.0, dtype=torch.float64)
        if min is not None and not (isinstance(min, float) and min == -math.inf):
            low = torch.as_tensor(min, dtype=torch.float64)
            x = self._scaled(self._relu_node(self._scaled(x, one, -low)), one, low)
        if max is not None and not (isinstance(max, float) and max == math.inf):  # min(x, high) = high - relu(high - x)
            high = torch.as_tensor(max, dtype=torch.float64)
            x = self._scaled(self._relu_node(self._scaled(x, -one, high)), -one, high)
        return x  # type: ignore[no-any-return]

    def _clamp_min(self, x: Any, min: Any) -> _Index:
        return self._clamp(x, min)

    def _clamp_max(self, x: Any, max: Any) -> _Index:
        return self._clamp(x, None, max)

    def _abs(self, x: Any) -> _Index:
        minus = self._scaled(x, torch.tensor(-1.0, dtype=torch.float64), None)
        return self._sum([self._relu_node(x), self._relu_node(minus)])

    def _maximum(self, a: Any, b: Any) -> _Index:
        if not isinstance(a, _Index) or not isinstance(b, _Index):
            x, constant = (a, b) if isinstance(a, _Index) else (b, a)
            return self._clamp(x, constant)
        return self._larger(a, b)

    def _minimum(self, a: Any, b: Any) -> _Index:
        return self._neg(self._maximum(*(self._neg(v) if isinstance(v, _Index) else -v for v in (a, b))))

    def _max_pool2d(
        self, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> _Index:
        """Entry by entry of the window: a tree of maxima. Where a window leaves the image it looks at its first entry again."""
        shape, size = self.nodes[x].shape, math.prod(self.nodes[x].shape)
        height, width = _pair(kernel)
        (up, left), (down, across), spread = _pair(padding), _pair(stride or kernel), _pair(dilation)
        pool = F.max_pool2d(torch.zeros(1, *shape), (height, width), (down, across), (up, left), spread, ceil_mode)
        output = tuple(pool.shape[1:])
        index = torch.arange(size).reshape(shape)
        picks: list[Tensor] = []
        for i in range(height):
            for j in range(width):
                row = torch.arange(output[1]) * down - up + i * spread[0]
                col = torch.arange(output[2]) * across - left + j * spread[1]
                inside = ((row >= 0) & (row < shape[1]))[:, None] & ((col >= 0) & (col < shape[2]))
                entry = index[:, row.clamp(0, shape[1] - 1)][:, :, col.clamp(0, shape[2] - 1)]
                picks.append(torch.where(inside, entry, -1))
        stacked = torch.stack(picks)
        outside = stacked < 0
        known = stacked.gather(0, (~outside).int().argmax(0, keepdim=True))  # some entry that is inside
        filled = torch.where(outside, known, stacked)
        parts = [self._add_node(Node((x,), output, self.place, Pick(s.flatten(), shape, output))) for s in filled]
        if outside.any():  # one after the other, so that a stand-in, which cannot win, can be left out of its race
            best = parts[0]
            for part, entry, out in zip(parts[1:], stacked[1:], outside[1:]):
                races = ~(out | (outside[0] & (entry == known[0])))
                best = self._sum([best, self._relu_node(self._scaled(self._difference(part, best), races.double(), None))])
            return best
        while len(parts) > 1:
            pairs = [self._larger(a, b) for a, b in zip(parts[::2], parts[1::2])]
            parts = pairs + parts[2 * len(pairs) :]
        return parts[0]

    def _max_pool2d_with_indices(self, *args: Any) -> list[Any]:
        return [self._max_pool2d(*args), None]

    def _cat(self, parts: list[Any], dim: int = 0) -> _Index:
        shapes = [self.nodes[p].shape if isinstance(p, _Index) else tuple(p.shape[1:]) for p in parts]
        axis = dim % (len(shapes[0]) + 1)
        if axis == 0 or not all(isinstance(p, _Index) for p in parts):
            raise self._refuse("a concatenation over the batch axis or with a constant")
        sizes = tuple(s[axis - 1] for s in shapes)
        shape = (*shapes[0][: axis - 1], sum(sizes), *shapes[0][axis:])
        return self._add_node(Node(tuple(parts), shape, self.place, Concat(axis, sizes)))

    def _stack(self, parts: list[Any], dim: int = 0) -> _Index:
        axis = dim % (len(self.nodes[parts[0]].shape) + 2)
        return self._cat([self._move(torch.unsqueeze, part, [axis], {}) for part in parts], axis)

    def _add(self, a: Any, b: Any, alpha: float = 1) -> _Index:
        one = torch.tensor(1.0, dtype=torch.float64)
        if isinstance(a, _Index) and isinstance(b, _Index):
            return self._sum([a, b if alpha == 1 else self._scaled(b, alpha * one, None)])
        if isinstance(a, _Index):
            return self._scaled(a, one, alpha * _sample(b, self.nodes[a].shape))
        return self._scaled(b, alpha * one, _sample(a, self.nodes[b].shape))

    def _sub(self, a: Any, b: Any, alpha: float = 1) -> _Index:
        return self._add(a, b, -alpha)

    def _rsub(self, a: Any, b: Any, alpha: float = 1) -> _Index:
        return self._add(b, a, -alpha)

    def _mul(self, a: Any, b: Any) -> _Index:
        if isinstance(a, _Index) and isinstance(b, _Index):
            raise self._refuse("a product of two quantities that depend on the input")
        x, constant = (a, b) if isinstance(a, _Index) else (b, a)
        return self._scaled(x, _sample(constant, self.nodes[x].shape), None)

    def _div(self, a: Any, b: Any) -> _Index:
        if not isinstance(a, _Index) or isinstance(b, _Index):
            raise self._refuse("a division by a quantity that depends on the input")
        return self._scaled(a, 1 / _sample(b, self.nodes[a].shape), None)

    def _neg(self, x: Any) -> _Index:
        return self._scaled(x, torch.tensor(-1.0, dtype=torch.float64), None)

    def _trim(self, last: int) -> Graph:
        """Only the nodes that the logits depend on, renumbered."""
        needed = {last}
        for i in range(last, -1, -1):
            if i in needed:
                needed.update(self.nodes[i].inputs)
        if 0 not in needed or len(self.nodes[last].shape) != 1:
            raise InputError("the model does not map a batch of samples to logits of shape (N, K).")
        order = sorted(needed)
        number = {old: new for new, old in enumerate(order)}
        return Graph(tuple(replace(self.nodes[i], inputs=tuple(number[j] for j in self.nodes[i].inputs)) for i in order))


class _Index(int):
    """The index of a node, told apart from the plain numbers among an operation's arguments."""


def _wide(constant: Tensor) -> Tensor:
    constant = constant.detach().cpu()
    return constant.double() if constant.is_floating_point() else constant


def _pair(value: Any) -> tuple[int, int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return (int(values[0]), int(values[-1]))


def _sample(constant: Any, shape: tuple[int, ...]) -> Tensor:
    """A constant that broadcasts against a batch, as one that broadcasts against a sample."""
    values: Tensor = torch.as_tensor(constant, dtype=torch.float64)
    if values.ndim > len(shape):
        if len(values) != 1:
            raise TypeError  # differs from sample to sample: the caller refuses it by name
        values = values[0]
    return values


def _fold_before(factor: Tensor, map_: Matrix | Conv | Scale, shape: tuple[int, ...]) -> Linear | None:
    """`map(factor x)` as one map, if it is one of the same kind."""
    if isinstance(map_, Scale):
        return Scale(map_.factor * factor)
    factor = factor.expand(shape)
    if isinstance(map_, Matrix):
        same = len(shape) == 1 or all(
            torch.equal(row, factor[(0,) * (len(shape) - 1)]) for row in factor.reshape(-1, shape[-1])
        )
        return Matrix(map_.weight * factor.reshape(-1, shape[-1])[0]) if same else None
    flat = factor.flatten(1)
    if not torch.equal(flat, flat[:, :1].expand_as(flat)):
        return None
    per_group = flat[:, 0].reshape(map_.groups, -1).repeat_interleave(len(map_.weight) // map_.groups, 0)
    return replace(map_, weight=map_.weight * per_group[:, :, None, None])


def _fold_after(map_: Matrix | Conv, factor: Tensor, shape: tuple[int, ...]) -> Linear | None:
    """`factor map(x)` as one map, if it is one of the same kind."""
    factor = factor.expand(shape)
    if isinstance(map_, Matrix):
        rows = factor.reshape(-1, shape[-1])
        return Matrix(rows[0][:, None] * map_.weight) if torch.equal(rows, rows[:1].expand_as(rows)) else None
    flat = factor.flatten(1)
    if not torch.equal(flat, flat[:, :1].expand_as(flat)):
        return None
    return replace(map_, weight=flat[:, 0, None, None, None] * map_.weight)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
