"""The operators of ONNX, one function each."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

# numbers that a value of one sample may have: a quarter of a gigabyte in float32
LARGEST = 1 << 26
WIDEST = 1 << 16  # a window, a stride or a padding
Shape: TypeAlias = "tuple[int, ...]"
Statistic: TypeAlias = "float | Sequence[float] | Tensor"


@dataclass
class OnnxNode:
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
    # The constant inputs that are integers or single numbers.
    fixed: list[Tensor | None] = field(default_factory=list)
    integer: bool = False  # arithmetic on shapes
    axes: tuple[int, ...] = ()  # along which it works, counted from the front
    shift: int = 0  # 1 where it is applied to (n, *s), 0 where to the rows as they are
    finished: tuple[str, ...] = ()  # values that are not needed afterwards

    @property
    def arguments(self) -> list[str]:
        """The inputs that are handed over as tensors."""
        return self.inputs[: OPERATORS[self.op].tensors]

    @property
    def dims(self) -> list[int]:
        """The axes as the tensors have them."""
        return [axis + self.shift for axis in self.axes]

    def get(self, attribute: str, default: Any) -> Any:
        """An attribute, or its default."""
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
class OnnxGraph:
    """What a file holds: the operations in order, and the constants."""

    image: str
    shape: Shape  # of a single image, as the graph has it: with its batch of one
    outputs: list[tuple[str, int | None]]  # names and declared ranks
    initialisers: dict[str, Tensor]
    nodes: list[OnnxNode]


def row_of(shape: Shape) -> Shape:
    """How a value of shape `shape` for a single image is kept in a batch `(n, *row)`."""
    return shape[1:] if shape[:1] == (1,) else shape


def lifted(node: OnnxNode, i: int) -> Shape:
    """The shape, for one image, in which input `i` meets the others: of the same rank if they
    broadcast.
    """
    shape = node.shapes[i]
    if OPERATORS[node.op].where != "broadcast":
        return shape
    rank = max(len(node.results[0]), *(len(s) for s in node.shapes))
    if node.op in ("MatMul", "Gemm"):
        rank = max(rank, 2)
        if node.op == "MatMul" and len(shape) == 1:  # a row on the left, a column on the right
            shape = (1, *shape) if i == 0 else (*shape, 1)
    return (1,) * (rank - len(shape)) + shape


def view_of(x: Any, have: Shape | None, want: Shape) -> Tensor:
    """`(n, *have)` as `(n, *want)`."""
    view: Tensor = x if have == want else x.reshape(-1, *want)
    return view


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
    axes: Callable[[OnnxNode], Iterable[int]] = lambda node: ()


def _unary(function: Callable[[Tensor], Tensor]) -> _Operator:
    return _Operator(lambda node, x: function(x))


def _binary(function: Callable[[Any, Any], Any]) -> _Operator:
    return _Operator(lambda node, a, b: function(a, b))


def _variadic(function: Callable[[Any, Any], Any]) -> _Operator:
    def run(node: OnnxNode, first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = function(first, other)
        return first

    return _Operator(run)


def _div(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc") if node.integer else a / b


def _equal(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    if any(node.data):
        raise ValueError("it compares values that depend on the image, which have no gradient then")
    return torch.eq(a, b)


def _pow(node: OnnxNode, x: Tensor, exponent: Tensor) -> Tensor:
    fixed = node.fixed[1]
    # A number is faster than a tensor, and an exponent of 2 has no trouble at negative bases.
    return x ** (
        exponent if fixed is None or fixed.numel() > 1 or node.shapes[1] != () else fixed.item()
    )


def _clip(node: OnnxNode, x: Tensor) -> Tensor:
    low = node.static("min", 1)
    high = node.static("max", 2)
    if low is None and high is None:
        return x
    return torch.clamp(
        x, min=None if low is None else low[0], max=None if high is None else high[0]
    )


def _cast(node: OnnxNode, x: Tensor) -> Tensor:
    target = dict.fromkeys((1, 10, 11, 16), torch.float32)
    target |= {6: torch.int32, 7: torch.int64, 9: torch.bool}
    if node.get("to", 1) not in target:
        raise ValueError(f"a cast to type {node.get('to', 1)} is not supported")
    dtype = target[node.get("to", 1)]
    if node.data[0] and not dtype.is_floating_point:
        raise ValueError("it rounds values that depend on the image, which have no gradient then")
    # Only constants get here in a batch: there a cast is a view, and the module may be in float64.
    return x.to(dtype)


def _expand(node: OnnxNode, x: Tensor) -> Tensor:
    target = node.static("shape", 1)
    if target is None:
        raise ValueError("it has no target shape")
    old = node.shapes[0]
    shape = torch.broadcast_shapes(old, target)  # type: ignore[no-untyped-call]
    new = len(shape) - len(old)
    # -1 also where a batch took the place of the one.
    kept = [-1 if a == b else b for a, b in zip(old, shape[new:])]
    return x.expand(*[-1] * node.shift, *shape[:new], *kept)


def _gemm(node: OnnxNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
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
    node: OnnxNode, kernel: Sequence[int]
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


def _conv(node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    strides, dilations, pads = _window(node, node.shapes[1][2:])
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(strides)]
    padding = [before for before, _ in pads]
    if any(before != after for before, after in pads):
        x = F.pad(x, _pairs(pads))
        padding = [0] * len(pads)
    result: Tensor = convolve(x, weight, bias, strides, padding, dilations, node.get("group", 1))
    return result


def _conv_transpose(
    node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if node.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or node.get("output_shape", None):
        raise ValueError("only padding that is written out is supported")
    strides, dilations, pads = _window(node, node.shapes[1][2:])
    convolve: Callable[..., Tensor] = {
        1: F.conv_transpose1d,
        2: F.conv_transpose2d,
        3: F.conv_transpose3d,
    }[len(strides)]
    more = list(node.get("output_padding", [0] * len(strides)))
    group = node.get("group", 1)
    if all(before == after for before, after in pads):
        rim = [before for before, _ in pads]
        return convolve(x, weight, bias, strides, rim, more, group, dilations)
    whole = convolve(x, weight, bias, strides, 0, more, group, dilations)
    return F.pad(whole, [-amount for amount in _pairs(pads)])


RESIZED = ("Resize", "Upsample")  # whose scales, which are no integers, are looked at


def _resize(node: OnnxNode, x: Tensor) -> Tensor:
    """By the ways that torch has: it is refused where torch would look at other pixels."""
    old = node.op == "Upsample"
    scales = node.static("scales", 1 if old or node.version < 11 else 2)
    sizes = None if old or node.version < 11 else node.static("sizes", 3)
    rank = len(node.shapes[0])
    factors = scales or [a / b for a, b in zip(sizes or [], node.shapes[0])]
    if len(factors) != rank or rank < 3 or any(f != 1 for f in factors[:2]):
        raise ValueError("only a change of the size of images is supported")
    if any(node.get(name, 0) for name in ("antialias", "exclude_outside", "axes")):
        raise ValueError("antialiasing, excluded pixels and chosen axes are not supported")
    away = "asymmetric" if old or node.version < 11 else "half_pixel"
    where = node.get("coordinate_transformation_mode", away)
    mode = node.get("mode", "nearest")
    wanted: dict[str, Any] = {"scale_factor": tuple(float(f) for f in factors[2:])}
    if not scales:
        wanted = {"size": tuple(int(s) for s in (sizes or [])[2:])}
    if mode == "nearest":
        return F.interpolate(x, **wanted, mode=_nearest(node, where, factors[2:]))
    if mode != "linear" or where not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        raise ValueError(f"an interpolation {mode!r} with coordinates {where!r} is not supported")
    if where == "pytorch_half_pixel" and 1 in [int(n * f) for n, f in zip(node.shapes[0], factors)]:
        raise ValueError("a result of one pixel with these coordinates is not supported")
    kind = {3: "linear", 4: "bilinear", 5: "trilinear"}[rank]
    return F.interpolate(x, **wanted, mode=kind, align_corners=where == "align_corners")


def _nearest(node: OnnxNode, where: str, factors: Sequence[float]) -> str:
    """Which of torch's two ways it is: `floor(i / f)`, or `floor((i + 1/2) / f)`."""
    rounding = node.get("nearest_mode", "round_prefer_floor")
    whole = all(float(f).is_integer() for f in factors)
    if where == "asymmetric" and (
        node.op == "Upsample" or node.version < 11 or rounding == "floor"
    ):
        return "nearest"
    if where in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round_prefer"):
        if whole:  # no pixel lies half-way between two
            return "nearest"
        if rounding == "round_prefer_ceil":
            return "nearest-exact"
    raise ValueError(f"the nearest pixel by {where!r} and {rounding!r} is not supported")


def _depth_to_space(node: OnnxNode, x: Tensor) -> Tensor:
    block = node.attributes["blocksize"]
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    _, channels, height, width = node.shapes[0]
    parts = x.reshape(-1, block, block, channels // block**2, height, width)
    moved = parts.permute(0, 3, 4, 1, 5, 2)
    return moved.reshape(-1, channels // block**2, height * block, width * block)


def _space_to_depth(node: OnnxNode, x: Tensor) -> Tensor:
    block = node.attributes["blocksize"]
    _, channels, height, width = node.shapes[0]
    parts = x.reshape(-1, channels, height // block, block, width // block, block)
    moved = parts.permute(0, 3, 5, 1, 2, 4)
    return moved.reshape(-1, channels * block**2, height // block, width // block)


def _prelu(node: OnnxNode, x: Tensor, slope: Tensor) -> Tensor:
    """One slope, or one for each channel."""
    rank = len(node.shapes[0])
    shape = (1,) * (rank - len(node.shapes[1])) + node.shapes[1]
    if any(size != 1 for axis, size in enumerate(shape) if axis != 1):
        raise ValueError("only one slope for each channel is supported")
    return F.prelu(x, slope.flatten())


def _hard_sigmoid(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.clamp(node.get("alpha", 0.2) * x + node.get("beta", 0.5), 0.0, 1.0)


def _selu(node: OnnxNode, x: Tensor) -> Tensor:
    gamma: float = node.get("gamma", 1.0507010221481323)
    return gamma * F.elu(x, node.get("alpha", 1.6732631921768188))


def _instance_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, None, None, scale, bias, True, 0.0, node.get("epsilon", 1e-5))


def _pooling(
    node: OnnxNode,
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
        # A window that starts in the padding behind the image is left out.
        if last * stride >= size + before:
            last -= 1
        exact.append((before, max(last * stride + extent - size - before, 0)))
    return kernel, strides, dilations, pads, exact


def _max_pool(node: OnnxNode, x: Tensor) -> Tensor:
    kernel, strides, dilations, _, exact = _pooling(node)
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
    rim = [before for before, _ in exact]
    if any(a != b or 2 * a > width for (a, b), width in zip(exact, kernel)):
        x = F.pad(x, _pairs(exact), value=-math.inf)  # torch has no such padding of its own
        rim = [0] * len(kernel)
    result: Tensor = pool(x, kernel, strides, rim, dilations)
    return result


def _average_pool(node: OnnxNode, x: Tensor) -> Tensor:
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
    node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if node.get("training_mode", 0) or not node.get("spatial", 1):
        raise ValueError(
            "only the form for inference, with one mean and variance for each channel, is supported"
        )
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, node.get("epsilon", 1e-5))


def _layer_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    x = (
        F.layer_norm(x, [node.shapes[0][axis] for axis in node.axes], eps=node.get("epsilon", 1e-5))
        * scale
    )
    return x if bias is None else x + bias


def _trailing(node: OnnxNode) -> Iterable[int]:
    rank = len(node.shapes[0])
    return range(node.positive([node.get("axis", -1)])[0], rank)


def _softmax_axes(node: OnnxNode) -> Iterable[int]:
    """Before version 13 everything from the axis on was one distribution."""
    rank = len(node.shapes[0])
    (axis,) = node.positive([node.get("axis", -1 if node.version >= 13 else 1)])
    return (axis,) if node.version >= 13 else range(axis, rank)


def _softmax(function: Callable[[Tensor, int], Tensor]) -> _Operator:
    def run(node: OnnxNode, x: Tensor) -> Tensor:
        if len(node.dims) == 1:
            return function(x, node.dims[0])
        joined = function(x.flatten(node.dims[0]), node.dims[0])
        return torch.unflatten(joined, node.dims[0], [node.shapes[0][axis] for axis in node.axes])

    return _Operator(run, "axes", axes=_softmax_axes)


def _reduce_axes(node: OnnxNode) -> Iterable[int]:
    axes = node.static("axes", 1)
    if axes:
        return node.positive(axes)
    return () if node.get("noop_with_empty_axes", 0) else range(len(node.shapes[0]))


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> _Operator:
    def run(node: OnnxNode, x: Tensor) -> Tensor:
        return function(x, node.dims, bool(node.get("keepdims", 1))) if node.dims else x

    return _Operator(run, "axes", tensors=1, axes=_reduce_axes)


def _axis(default: int) -> Callable[[OnnxNode], Iterable[int]]:
    return lambda node: node.positive([node.get("axis", default)])


def _concat(node: OnnxNode, *tensors: Tensor) -> Tensor:
    return torch.cat(tensors, node.dims[0])


def _gather(node: OnnxNode, x: Tensor, indices: Tensor) -> Tensor:
    (axis,), (dim,) = node.axes, node.dims
    size = node.shapes[0][axis]
    fixed = node.fixed[1]
    if fixed is not None and fixed.ndim == 0:
        return x.select(dim, int(fixed) % size)
    return torch.unflatten(
        x.index_select(dim, torch.remainder(indices, size).flatten()), dim, node.shapes[1]
    )


def _slices(node: OnnxNode) -> list[tuple[int, range]]:
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


def _slice(node: OnnxNode, x: Tensor) -> Tensor:
    for axis, kept in _slices(node):
        before = (slice(None),) * (axis + node.shift)
        if kept.step > 0:
            where = (*before, slice(kept.start, kept.stop, kept.step))
            x = x[where]
        else:  # torch slices forwards only
            part = slice(kept[-1], kept[0] + 1, -kept.step) if kept else slice(0, 0)
            where = (*before, part)
            x = x[where].flip(axis + node.shift)
    return x


def _slice_axes(node: OnnxNode) -> Iterable[int]:
    return [axis for axis, _ in _slices(node)]


def _split(node: OnnxNode, x: Tensor) -> Any:
    size = node.shapes[0][node.axes[0]]
    count = len(node.outputs)
    if (sizes := node.static("split", 1)) is None:
        piece = math.ceil(size / count)
        sizes = [piece] * (count - 1) + [size - piece * (count - 1)]
    return torch.split(x, sizes, node.dims[0])


def _transpose(node: OnnxNode, x: Tensor) -> Tensor:
    return x.permute(*range(node.shift), *(axis + node.shift for axis in _order(node)))


def _order(node: OnnxNode) -> list[int]:
    return list(node.get("perm", range(len(node.shapes[0]))[::-1]))


def _amounts(node: OnnxNode) -> list[tuple[int, int]]:
    """Padding (before, after) of every axis."""
    rank = len(node.shapes[0])
    pads = node.static("pads", 1)
    if pads is None:
        raise ValueError("it does not say how much to pad")
    axes = node.positive(node.static("axes", 3) or range(rank))
    pairs = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :])))
    return [pairs.get(axis, (0, 0)) for axis in range(rank)]


def _pad(node: OnnxNode, x: Tensor) -> Tensor:
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


def _reshape(node: OnnxNode, x: Tensor) -> Tensor:
    target = node.static("shape", 1)
    if target is None:
        raise ValueError("it has no target shape")
    copied = not node.get("allowzero", 0)
    return x.reshape(
        [node.shapes[0][i] if size == 0 and copied else size for i, size in enumerate(target)]
    )


def _flatten(node: OnnxNode, x: Tensor) -> Tensor:
    (axis,) = node.positive([node.get("axis", 1)])
    return x.reshape(math.prod(node.shapes[0][:axis]), -1)


def _squeeze(node: OnnxNode, x: Tensor) -> Tensor:
    shape = node.shapes[0]
    given = node.static("axes", 1)
    axes = (
        node.positive(given)
        if given is not None
        else [axis for axis, size in enumerate(shape) if size == 1]
    )
    return x.reshape([size for axis, size in enumerate(shape) if axis not in axes])


def _unsqueeze(node: OnnxNode, x: Tensor) -> Tensor:
    axes = node.static("axes", 1) or []
    for axis in sorted(node.positive(axes, len(node.shapes[0]) + len(axes))):
        x = x.unsqueeze(axis)
    return x


def _constant(node: OnnxNode) -> Tensor:
    (value,) = node.attributes.values()
    kinds = {"value": None, "value_float": torch.float32, "value_floats": torch.float32}
    kinds |= {"value_int": torch.int64, "value_ints": torch.int64}
    (name,) = node.attributes
    if name not in kinds:
        raise ValueError(f"a constant of this kind ({name}) is not supported")
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=kinds[name])


def _constant_of_shape(node: OnnxNode) -> Tensor:
    fill = node.get("value", torch.zeros(1))
    target = node.static("shape", 0)
    if target is None:
        raise ValueError("its shape depends on the values of the image")
    if any(size < 0 for size in target) or math.prod(target) > LARGEST:
        raise ValueError(f"its result would have shape {tuple(target)}")
    return torch.full(target, fill.item(), dtype=fill.dtype)


def _shape(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.tensor(node.shapes[0], dtype=torch.int64)[
        node.get("start", 0) : node.get("end", None)
    ]


def _same(node: OnnxNode, x: Tensor) -> Tensor:
    return x


OPERATORS: dict[str, _Operator] = {
    "Abs": _unary(torch.abs),
    "Add": _binary(operator.add),
    "AveragePool": _Operator(_average_pool, "rows"),
    "BatchNormalization": _Operator(_batch_norm, "rows"),
    "Celu": _Operator(lambda node, x: F.celu(x, node.get("alpha", 1.0))),
    "Cast": _Operator(_cast, "view"),
    "Clip": _Operator(_clip, tensors=1),
    "Concat": _Operator(_concat, "axes", axes=_axis(1)),
    "Constant": _Operator(_constant),
    "ConstantOfShape": _Operator(_constant_of_shape, tensors=0),
    "Conv": _Operator(_conv, "rows"),
    "ConvTranspose": _Operator(_conv_transpose, "rows"),
    "DepthToSpace": _Operator(_depth_to_space, "rows"),
    "Div": _Operator(_div),
    "Dropout": _Operator(_same, "view", tensors=1),
    "Elu": _Operator(lambda node, x: F.elu(x, node.get("alpha", 1.0))),
    "Equal": _Operator(_equal),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Expand": _Operator(_expand, tensors=1),
    "Flatten": _Operator(_flatten, "view"),
    "Gather": _Operator(_gather, "axes", axes=_axis(0)),
    "Gelu": _Operator(lambda node, x: F.gelu(x, approximate=node.get("approximate", "none"))),
    "Gemm": _Operator(_gemm),
    "GlobalAveragePool": _global_pool(lambda x, dims: x.mean(dims, keepdim=True)),
    "GlobalMaxPool": _global_pool(lambda x, dims: x.amax(dims, keepdim=True)),
    "HardSigmoid": _Operator(_hard_sigmoid),
    "HardSwish": _unary(F.hardswish),
    "Identity": _Operator(_same, "view"),
    "InstanceNormalization": _Operator(_instance_norm, "rows"),
    "LayerNormalization": _Operator(_layer_norm, "axes", axes=_trailing),
    "LeakyRelu": _Operator(lambda node, x: F.leaky_relu(x, node.get("alpha", 0.01))),
    "Log": _unary(torch.log),
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _binary(torch.matmul),
    "Max": _variadic(torch.maximum),
    "MaxPool": _Operator(_max_pool, "rows"),
    "Min": _variadic(torch.minimum),
    "Mish": _unary(F.mish),
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
    "PRelu": _Operator(_prelu, "rows"),
    "Pow": _Operator(_pow),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceMax": _reduce(lambda x, dims, keep: x.amax(dims, keepdim=keep)),
    "ReduceMean": _reduce(lambda x, dims, keep: x.mean(dims, keepdim=keep)),
    "ReduceMin": _reduce(lambda x, dims, keep: x.amin(dims, keepdim=keep)),
    "ReduceSum": _reduce(lambda x, dims, keep: x.sum(dims, keepdim=keep)),
    "Relu": _unary(F.relu),
    "Reshape": _Operator(_reshape, "view", tensors=1),
    "Resize": _Operator(_resize, "rows", tensors=1),
    "Selu": _Operator(_selu),
    "Shape": _Operator(_shape),
    "Sigmoid": _unary(torch.sigmoid),
    "Slice": _Operator(_slice, "axes", tensors=1, axes=_slice_axes),
    "Softmax": _softmax(torch.softmax),
    "Softplus": _unary(F.softplus),
    "SpaceToDepth": _Operator(_space_to_depth, "rows"),
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
    "Upsample": _Operator(_resize, "rows", tensors=1),
    "Where": _Operator(lambda node, condition, a, b: torch.where(condition, a, b)),
}
