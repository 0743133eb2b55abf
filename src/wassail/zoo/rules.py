"""What the arguments of each operator must be.

Long because it is a list of rules, one for each kind of operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

LARGEST = 1 << 26


_BOUND = 1 << 31


_END = (1 << 63) - 1  # how exporters write "to the end"


def limit(result: Any, rows: int, target: str) -> None:
    """Raise ValueError where a result has more numbers than a batch of that many rows can need."""
    for value in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(value, Tensor) and math.prod(value.shape) > LARGEST * max(rows, 1):
            raise ValueError(
                f"{target} would compute a value of shape {tuple(value.shape)}, which is no "
                "classifier's"
            )


def show(value: Any) -> str:
    """A value, shortened for an error message."""
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."


def integer_of(value: Any, name: str) -> bool:
    """Whether a value is an integer of a sane size."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and (abs(value) <= _BOUND or (name == "end" and value == _END))
    )


class Arguments:
    """The arguments of one call as attributes, the operator's defaults filled in."""

    def __init__(self, values: Mapping[str, Any], results: int) -> None:
        self.results = results
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


_Rule = Callable[[Arguments], str]


def _wide(value: Any, count: int) -> list[int]:
    """A number for each of `count` axes, where one may stand for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _vector(length: int, **tensors: Tensor | None) -> str:
    for name, tensor in tensors.items():
        if tensor is not None and (
            tuple(tensor.shape) != (length,) or not tensor.is_floating_point()
        ):
            return f"{name} has shape {tuple(tensor.shape)} for {length} channels"
    return ""


def _batch_norm(a: Arguments) -> str:
    if getattr(a, "training", False):
        return "it is in training mode: export the model in eval mode"
    if (
        a.input.ndim < 2
        or a.running_mean is None
        or a.running_var is None
        or not a.input.is_floating_point()
    ):
        return "it lacks its statistics, or its input has no channels"
    return _vector(
        a.input.shape[1], weight=a.weight, bias=a.bias, mean=a.running_mean, variance=a.running_var
    )


def _instance_norm(a: Arguments) -> str:
    given = a.running_mean is not None and a.running_var is not None
    if a.input.ndim < 3 or not a.input.is_floating_point():
        return "its input has no channels"
    if a.use_input_stats == (given or a.running_mean is not None or a.running_var is not None):
        return "it would change its statistics, or lacks them: export the model in eval mode"
    if math.prod(a.input.shape[2:]) < 1:
        return "its input is empty"
    return _vector(
        a.input.shape[1], weight=a.weight, bias=a.bias, mean=a.running_mean, variance=a.running_var
    )


def _group_norm(a: Arguments) -> str:
    groups = a.num_groups if hasattr(a, "num_groups") else a.group
    shape = tuple(a.input.shape)
    if (
        len(shape) < 2
        or groups < 1
        or shape[1] < 1
        or shape[1] % groups
        or not a.input.is_floating_point()
    ):
        return f"{groups} groups do not divide an input of shape {shape}"
    if hasattr(a, "HxW") and (a.N, a.C, a.HxW) != (shape[0], shape[1], math.prod(shape[2:])):
        return f"its sizes are not those of an input of shape {shape}"
    return _vector(shape[1], weight=a.weight, bias=a.bias)


def _layer_norm(a: Arguments) -> str:
    shape = tuple(a.normalized_shape)
    if (
        not shape
        or min(shape) < 1
        or tuple(a.input.shape[-len(shape) :]) != shape
        or not a.input.is_floating_point()
    ):
        return f"it normalises {shape} of an input of shape {tuple(a.input.shape)}"
    for tensor in (a.weight, getattr(a, "bias", None)):
        if tensor is not None and (tuple(tensor.shape) != shape or not tensor.is_floating_point()):
            return f"a weight has shape {tuple(tensor.shape)} for {shape}"
    return ""


def _convolution(a: Arguments) -> str:
    """What is wrong with the arguments of a convolution, or nothing.

    Long because it is a list of what torch's kernels assume of their arguments.
    """
    axes = a.weight.ndim - 2
    if (
        axes not in (1, 2, 3)
        or a.input.ndim not in (axes + 1, axes + 2)
        or a.input.dtype != a.weight.dtype
    ):
        return (
            f"a kernel of shape {tuple(a.weight.shape)} meets an input of shape "
            f"{tuple(a.input.shape)}"
        )
    if not a.input.is_floating_point():
        return "its input is no floating-point tensor"
    transposed = getattr(a, "transposed", False) or (
        hasattr(a, "output_padding") and not hasattr(a, "transposed")
    )
    channels = a.input.shape[-axes - 1]
    sizes = a.input.shape[-axes:]
    first, second, *kernel = a.weight.shape
    if min(channels, first, second, *kernel, *sizes) < 1 or a.groups < 1 or first % a.groups:
        return (
            f"{a.groups} groups of a kernel of shape {tuple(a.weight.shape)} meet an input of "
            f"shape {tuple(a.input.shape)}"
        )
    if channels != (first if transposed else second * a.groups):
        return (
            f"a kernel of shape {tuple(a.weight.shape)} meets {channels} channels in "
            f"{a.groups} groups"
        )
    stride = _wide(a.stride, axes)
    dilation = _wide(a.dilation, axes)
    # With a stride of 2^31 - 1 the gradient takes for ever.
    if (
        len(stride) != axes
        or len(dilation) != axes
        or min(*stride, *dilation) < 1
        or max(*stride, *dilation) > 1 << 16
    ):
        return f"its stride is {stride} and its dilation {dilation}"
    extent = [d * (width - 1) + 1 for d, width in zip(dilation, kernel)]
    if isinstance(a.padding, str):
        if a.padding not in ("valid", "same") or (a.padding == "same" and max(stride) > 1):
            return f"its padding is {a.padding!r}"
        padding = [0 if a.padding == "valid" else width for width in extent]
    else:
        padding = _wide(a.padding, axes)
    if len(padding) != axes or min(padding) < 0:
        return f"its padding is {padding}"
    if transposed:
        extra = _wide(a.output_padding, axes)
        sides = zip(sizes, stride, padding, extent, extra)
        results = [
            (size - 1) * step - 2 * pad + width + more for size, step, pad, width, more in sides
        ]
        if len(extra) != axes or any(
            more < 0 or more >= max(s, d) for more, s, d in zip(extra, stride, dilation)
        ):
            return f"its output padding is {extra}"
    else:
        results = [size + 2 * pad - width + 1 for size, pad, width in zip(sizes, padding, extent)]
    if min(results) < 1:
        return f"its kernel is wider than an input of shape {tuple(a.input.shape)}"
    if math.prod(results) > LARGEST:
        return f"its result would have {math.prod(results)} numbers a channel"
    return _vector(second * a.groups if transposed else first, bias=a.bias)


def _pool(axes: int) -> _Rule:
    def rule(a: Arguments) -> str:
        kernel = _wide(a.kernel_size, axes)
        padding = _wide(a.padding, axes)
        stride = _wide(a.stride or kernel, axes)
        dilation = _wide(getattr(a, "dilation", 1), axes)
        window = (kernel, padding, stride, dilation)
        if a.self.ndim not in (axes + 1, axes + 2) or any(len(part) != axes for part in window):
            return f"it pools an input of shape {tuple(a.self.shape)} with windows {kernel}"
        if min(*kernel, *stride, *dilation, *a.self.shape[-axes - 1 :]) < 1 or min(padding) < 0:
            return (
                f"its windows are {kernel}, stride {stride}, dilation {dilation}, padding {padding}"
            )
        if (
            any(2 * pad > width for pad, width in zip(padding, kernel))
            or getattr(a, "divisor_override", None) == 0
        ):
            return f"its padding is {padding} for windows {kernel}"
        sides = zip(a.self.shape[-axes:], kernel, padding, dilation)
        if any(size + 2 * pad < d * (width - 1) + 1 for size, width, pad, d in sides):
            return f"its windows {kernel} are larger than an input of shape {tuple(a.self.shape)}"
        return "" if a.self.is_floating_point() else "its input is no floating-point tensor"

    return rule


def _adaptive(axes: int) -> _Rule:
    def rule(a: Arguments) -> str:
        sizes = _wide(a.output_size, axes)
        if (
            a.self.ndim not in (axes + 1, axes + 2)
            or len(sizes) != axes
            or not 1 <= min(sizes) <= max(sizes) <= 1 << 16
        ):
            return f"it pools an input of shape {tuple(a.self.shape)} to {sizes}"
        if min(a.self.shape[-axes - 1 :]) < 1 or not a.self.is_floating_point():
            return "its input is empty, or no floating-point tensor"
        return ""

    return rule


def _upsample(a: Arguments) -> str:
    """What is wrong with the arguments of an upsampling, or nothing.

    Long because it is a list of what torch's kernels assume of their arguments.
    """
    image = a.input if hasattr(a, "input") else a.self
    if image.ndim != 4 or min(image.shape[1:]) < 1 or not image.is_floating_point():
        return f"it resizes an input of shape {tuple(image.shape)}"
    height, width = image.shape[2:]
    scales = (
        list(a.scale_factors or []) if hasattr(a, "scale_factors") else [a.scales_h, a.scales_w]
    )
    sizes = a.output_size
    if (sizes is None) == (not scales and hasattr(a, "scale_factors")) and sizes is None:
        return "it names no size"
    if hasattr(a, "scale_factors") and sizes is not None and scales:
        return "it names a size and a scale"
    if any(scale is not None and not 2**-16 < scale < 2**16 for scale in scales):
        return f"its scales are {scales}"
    if sizes is None:
        if len(scales) != 2:
            return f"its scales are {scales}"
        sizes = [int(height * scales[0]), int(width * scales[1])]
    elif len(sizes) != 2:
        return f"its size is {sizes}"
    elif any(
        scale is not None and int(side * scale) != size
        for side, scale, size in zip((height, width), scales, sizes)
    ):
        return f"its size {sizes} is not that of its scales {scales}"
    return "" if min(sizes) >= 1 and math.prod(sizes) <= LARGEST else f"its size is {sizes}"


def _attention(a: Arguments) -> str:
    q, k, v = (tuple(tensor.shape) for tensor in (a.query, a.key, a.value))
    if a.dropout_p != 0:
        return "it drops at random: export the model in eval mode"
    if (
        a.enable_gqa
        or not 2 <= len(q) <= 4
        or not len(q) == len(k) == len(v)
        or q[:-2] != k[:-2]
        or k[:-1] != v[:-1]
    ):
        return f"query, key and value have shapes {q}, {k} and {v}"
    if (
        q[-1] != k[-1]
        or min(*q[1:], *k[1:], *v[1:]) < 1
        or len({a.query.dtype, a.key.dtype, a.value.dtype}) > 1
    ):
        return f"query, key and value have shapes {q}, {k} and {v}"
    if not a.query.is_floating_point() or math.prod(q[-3:-1]) * k[-2] > LARGEST:
        return f"it compares {q[-2]} tokens with {k[-2]}"
    mask = a.attn_mask
    if mask is not None:
        scores = (*q[:-1], k[-2])
        sizes = zip(reversed(mask.shape), reversed(scores))
        if (
            mask.ndim > len(scores)
            or mask.ndim < 2
            or any(size not in (1, wanted) for size, wanted in sizes)
        ):
            return f"its mask has shape {tuple(mask.shape)} for scores of shape {scores}"
        if mask.dtype not in (torch.bool, a.query.dtype) or a.is_causal:
            return "its mask is of another number type, or one of two"
    return ""


def _linear(a: Arguments) -> str:
    if (
        a.weight.ndim != 2
        or a.input.ndim < 1
        or a.input.shape[-1] != a.weight.shape[1]
        or a.input.dtype != a.weight.dtype
    ):
        return (
            f"a matrix of shape {tuple(a.weight.shape)} meets an input of shape "
            f"{tuple(a.input.shape)}"
        )
    return _vector(a.weight.shape[0], bias=a.bias)


def _prelu(a: Arguments) -> str:
    channels = a.self.shape[1] if a.self.ndim > 1 else 1
    return (
        ""
        if a.weight.ndim <= 1 and a.weight.numel() in (1, channels)
        else "it has not one slope for each channel"
    )


def _eval_only(a: Arguments) -> str:
    return "it drops at random: export the model in eval mode" if a.train is not False else ""


def _view(a: Arguments) -> str:
    sizes = list(a.size if hasattr(a, "size") else a.shape)
    numel = math.prod(a.self.shape)
    known = math.prod(size for size in sizes if size != -1)
    if len(sizes) > 16 or any(size < -1 for size in sizes) or sizes.count(-1) > 1:
        return f"its shape is {sizes}"
    if (known != numel) if -1 not in sizes else (known == 0 or numel % known):
        return f"an input of shape {tuple(a.self.shape)} has not the size {sizes}"
    return ""


def _unflatten(a: Arguments) -> str:
    if not -a.self.ndim <= a.dim < a.self.ndim or not a.sizes:
        return f"an input of shape {tuple(a.self.shape)} has no axis {a.dim}"
    known = math.prod(size for size in a.sizes if size != -1)
    size = a.self.shape[a.dim]
    if len(a.sizes) > 16 or any(part < -1 for part in a.sizes) or a.sizes.count(-1) > 1:
        return f"its shape is {a.sizes}"
    return (
        f"{size} is not of the size {a.sizes}"
        if ((known != size) if -1 not in a.sizes else known == 0 or size % known)
        else ""
    )


def _expand(a: Arguments) -> str:
    fits = len(a.size) >= a.self.ndim and len(a.size) <= 16 and all(size >= -1 for size in a.size)
    known = math.prod(size for size in a.size if size != -1)
    return (
        ""
        if fits and known <= LARGEST << 10
        else f"it expands an input of shape {tuple(a.self.shape)} to {list(a.size)}"
    )


def _made(a: Arguments) -> str:
    sizes = list(a.size) if hasattr(a, "size") else [a.n, getattr(a, "m", a.n)]
    fits = (
        len(sizes) <= 16 and all(size >= 0 for size in sizes) and math.prod(sizes) <= LARGEST << 10
    )
    return "" if fits else f"it makes a tensor of shape {sizes}"


def _arange(a: Arguments) -> str:
    start = getattr(a, "start", 0)
    step = getattr(a, "step", 1)
    if (
        not all(map(math.isfinite, (start, a.end, step)))
        or step == 0
        or not 0 <= (a.end - start) / step <= LARGEST
    ):
        return f"it counts from {start} to {a.end} by {step}"
    return ""


def _linspace(a: Arguments) -> str:
    fits = math.isfinite(a.start) and math.isfinite(a.end) and 0 <= a.steps <= LARGEST
    return "" if fits else f"it makes {a.steps} numbers from {a.start} to {a.end}"


def _repeat(a: Arguments) -> str:
    counts = list(a.repeats if hasattr(a, "repeats") else a.dims)
    fits = len(counts) <= 16 and all(0 <= count <= LARGEST for count in counts)
    fits = fits and math.prod(counts) * math.prod(a.self.shape) <= LARGEST << 10
    return "" if fits else f"it repeats an input of shape {tuple(a.self.shape)} by {counts}"


def _interleave(a: Arguments) -> str:
    fits = (
        a.output_size is None
        and 0 <= a.repeats <= LARGEST
        and a.repeats * math.prod(a.self.shape) <= LARGEST << 10
    )
    return "" if fits else f"it repeats an input of shape {tuple(a.self.shape)} by {a.repeats}"


def _scatter(a: Arguments) -> str:
    """What is written has the shape of what it replaces: a part along one axis, or one entry of
    it.
    """
    size = _axis(a)
    if size is None or a.src.dtype != a.self.dtype:
        return f"it replaces a part of an input of shape {tuple(a.self.shape)}"
    shape = list(a.self.shape)
    axis = a.dim % a.self.ndim
    if hasattr(a, "index"):
        del shape[axis]
        fits = -size <= a.index < size
    else:
        fits = a.step >= 1
        shape[axis] = len(range(*slice(a.start, a.end, max(a.step, 1)).indices(size)))
    return (
        ""
        if fits and list(a.src.shape) == shape
        else f"what it writes has shape {tuple(a.src.shape)}"
    )


def _axis(a: Arguments, name: str = "dim") -> int | None:
    """The size of the axis that is named, None if there is none."""
    axis = getattr(a, name)
    return a.self.shape[axis] if -a.self.ndim <= axis < a.self.ndim else None


def _pieces(a: Arguments) -> str:
    """The pieces of a split are as many as the program has names for: else their number alone
    could fill the memory.

    Long because it has a case for each operator that splits.
    """
    size = _axis(a)
    if size is None:
        return f"an input of shape {tuple(a.self.shape)} has no axis {a.dim}"
    if hasattr(a, "chunks") or hasattr(a, "sections"):
        count = a.chunks if hasattr(a, "chunks") else a.sections
        made = count
        if (
            hasattr(a, "chunks") and count >= 1 and size
        ):  # pieces of equal length, and so perhaps fewer
            made = -(-size // -(-size // count))
        return "" if count >= 1 and made == a.results else f"it makes {count} pieces of {size}"
    sizes = (
        a.split_size
        if hasattr(a, "split_size")
        else a.split_sizes
        if hasattr(a, "split_sizes")
        else 1
    )
    if isinstance(sizes, int):
        fits = sizes >= 1 and -(-size // sizes) == a.results
    else:
        fits = all(part >= 0 for part in sizes) and sum(sizes) == size and len(sizes) == a.results
    return "" if fits else f"it splits {size} into {sizes} and {a.results} of them are taken"


def _slice(a: Arguments) -> str:
    return (
        ""
        if _axis(a) is not None and a.step >= 1
        else f"it slices an input of shape {tuple(a.self.shape)} along {a.dim}"
    )


def _narrow(a: Arguments) -> str:
    size = _axis(a)
    fits = size is not None and a.length >= 0 and -size <= a.start <= size
    fits = fits and (a.start + size if a.start < 0 else a.start) + a.length <= size
    return "" if fits else f"an input of shape {tuple(a.self.shape)} has no such part"


def _select(a: Arguments) -> str:
    size = _axis(a)
    fits = size is not None and -size <= a.index < size
    return (
        ""
        if fits
        else f"an input of shape {tuple(a.self.shape)} has no entry {a.index} along {a.dim}"
    )


def _unfold(a: Arguments) -> str:
    size = _axis(a, "dimension")
    fits = size is not None and a.step >= 1 and 1 <= a.size <= size
    return "" if fits else f"an input of shape {tuple(a.self.shape)} has no windows of {a.size}"


def _im2col(a: Arguments) -> str:
    kernel, dilation, padding, stride = (
        _wide(v, 2) for v in (a.kernel_size, a.dilation, a.padding, a.stride)
    )
    if a.self.ndim not in (3, 4) or any(
        len(part) != 2 for part in (kernel, dilation, padding, stride)
    ):
        return f"it takes an input of shape {tuple(a.self.shape)} apart"
    if (
        min(*kernel, *dilation, *stride, *a.self.shape[-3:]) < 1
        or min(padding) < 0
        or max(*kernel, *padding) > 1 << 16
    ):
        return f"its windows are {kernel}, stride {stride}, dilation {dilation}, padding {padding}"
    sides = zip(a.self.shape[-2:], kernel, dilation, padding)
    return (
        "its windows are too large"
        if any(n + 2 * p < d * (k - 1) + 1 for n, k, d, p in sides)
        else ""
    )


def _shuffle(a: Arguments) -> str:
    factor = a.upscale_factor if hasattr(a, "upscale_factor") else a.downscale_factor
    if a.self.ndim < 3 or not 1 <= factor <= 1 << 12:
        return f"it shuffles an input of shape {tuple(a.self.shape)} by {factor}"
    *_, channels, height, width = a.self.shape
    fits = (
        channels % factor**2 == 0
        if hasattr(a, "upscale_factor")
        else height % factor == width % factor == 0
    )
    return "" if fits else f"it shuffles an input of shape {tuple(a.self.shape)} by {factor}"


def _pad(mode: str) -> _Rule:
    def rule(a: Arguments) -> str:
        amounts = list(a.padding if hasattr(a, "padding") else a.pad)
        kind = getattr(a, "mode", mode)
        axes = len(amounts) // 2
        if (
            kind not in ("constant", "reflect", "replicate", "circular")
            or len(amounts) % 2
            or axes > a.self.ndim
        ):
            return f"it pads an input of shape {tuple(a.self.shape)} by {amounts} ({kind})"
        if kind != "constant" and not (1 <= axes <= 3 and a.self.ndim in (axes + 1, axes + 2)):
            return f"it pads an input of shape {tuple(a.self.shape)} by {amounts} ({kind})"
        for axis in range(axes):
            size = a.self.shape[-1 - axis]
            pair = amounts[2 * axis : 2 * axis + 2]
            most = {"reflect": size - 1, "circular": size}.get(kind, LARGEST)
            if (
                size + sum(pair) < 1
                or min(pair) < (-size if kind == "constant" else 0)
                or max(pair) > most
            ):
                return f"it pads {size} by {pair} ({kind})"
        return ""

    return rule


def _whole(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _index(a: Arguments) -> str:
    given = [tensor for tensor in a.indices if tensor is not None]
    if not given or len(a.indices) > a.self.ndim or not all(map(_whole, given)):
        return "it is indexed by other than integers"
    return ""


def _index_select(a: Arguments) -> str:
    fits = _axis(a) is not None and a.index.ndim <= 1 and _whole(a.index)
    return (
        ""
        if fits
        else f"an index of shape {tuple(a.index.shape)} selects from shape {tuple(a.self.shape)}"
    )


def _gather(a: Arguments) -> str:
    axis = a.dim % a.self.ndim if _axis(a) is not None and a.self.ndim else None
    if axis is None or a.sparse_grad or a.index.ndim != a.self.ndim or a.index.dtype != torch.int64:
        return f"an index of shape {tuple(a.index.shape)} gathers from shape {tuple(a.self.shape)}"
    sides = enumerate(zip(a.index.shape, a.self.shape))
    return (
        "its index is larger than its input"
        if any(i > n for k, (i, n) in sides if k != axis)
        else ""
    )


def _embedding(a: Arguments) -> str:
    fits = a.weight.ndim == 2 and _whole(a.indices) and not a.sparse and not a.scale_grad_by_freq
    fits = fits and -1 <= a.padding_idx < a.weight.shape[0]
    return "" if fits else f"a table of shape {tuple(a.weight.shape)} is looked up in"


def _floating(*names: str) -> _Rule:
    """Integers are not divided with rounding: the least of them by -1 ends the process on some
    processors.
    """

    def rule(a: Arguments) -> str:
        if getattr(a, "rounding_mode", "floor") is None:
            return ""
        values = [getattr(a, name) for name in names]
        floats = [
            v.is_floating_point() if isinstance(v, Tensor) else isinstance(v, float) for v in values
        ]
        tensors = [v.is_floating_point() for v in values if isinstance(v, Tensor)]
        return "" if any(floats) and all(tensors) else "it divides integers"

    return rule


def _mask(name: str) -> _Rule:
    return lambda a: (
        "" if getattr(a, name).dtype == torch.bool else f"its {name} is no tensor of truth values"
    )


def _einsum(a: Arguments) -> str:
    fits = (
        re.fullmatch(r"[A-Za-z., ]{1,100}(->[A-Za-z. ]{0,50})?", a.equation)
        and a.path is None
        and len(a.tensors) <= 4
    )
    return "" if fits else f"it sums by {a.equation[:60]!r}"


def _topk(a: Arguments) -> str:
    size = _axis(a)
    return "" if size is not None and 0 <= a.k <= size else f"it takes {a.k} of {size}"


def _softmax(a: Arguments) -> str:
    return "" if not a.half_to_float and a.self.is_floating_point() else "it converts its input"


def _roll(a: Arguments) -> str:
    return (
        ""
        if len(a.shifts) == max(len(a.dims), 1)
        else f"it shifts by {list(a.shifts)} along {list(a.dims)}"
    )


def _several(a: Arguments) -> str:
    return "" if 1 <= len(a.tensors) <= 1 << 14 else "it joins nothing"


RULES: dict[str, _Rule] = {
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "native_group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "prelu": _prelu,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "convolution"),
        _convolution,
    ),
    "max_pool1d": _pool(1),
    "max_pool2d": _pool(2),
    "max_pool3d": _pool(3),
    "max_pool2d_with_indices": _pool(2),
    "avg_pool1d": _pool(1),
    "avg_pool2d": _pool(2),
    "avg_pool3d": _pool(3),
    "adaptive_avg_pool1d": _adaptive(1),
    "adaptive_avg_pool2d": _adaptive(2),
    "_adaptive_avg_pool2d": _adaptive(2),
    "adaptive_avg_pool3d": _adaptive(3),
    "adaptive_max_pool1d": _adaptive(1),
    "adaptive_max_pool2d": _adaptive(2),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"), _upsample),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "native_dropout"), _eval_only),
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "unflatten": _unflatten,
    "expand": _expand,
    "broadcast_to": _expand,
    **dict.fromkeys(("full", "zeros", "ones", "eye", "new_full", "new_ones", "new_zeros"), _made),
    "arange": _arange,
    "linspace": _linspace,
    "repeat": _repeat,
    "tile": _repeat,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unbind"), _pieces),
    "repeat_interleave": _interleave,
    "slice_scatter": _scatter,
    "select_scatter": _scatter,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "unfold": _unfold,
    "im2col": _im2col,
    "pixel_shuffle": _shuffle,
    "pixel_unshuffle": _shuffle,
    "pad": _pad("constant"),
    "constant_pad_nd": _pad("constant"),
    "reflection_pad1d": _pad("reflect"),
    "reflection_pad2d": _pad("reflect"),
    "replication_pad1d": _pad("replicate"),
    "replication_pad2d": _pad("replicate"),
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "embedding": _embedding,
    **dict.fromkeys(("floor_divide", "fmod", "remainder"), _floating("self", "other")),
    "div": lambda a: (
        _floating("self", "other")(a) if getattr(a, "rounding_mode", None) is not None else ""
    ),
    "where": _mask("condition"),
    "masked_fill": _mask("mask"),
    "einsum": _einsum,
    "topk": _topk,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "roll": _roll,
    **dict.fromkeys(("cat", "stack", "hstack", "vstack"), _several),
}


def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Integers stay as long as sizes are: squared forty times, one would fill the memory."""

    def run(*values: Any) -> Any:
        if not all(isinstance(value, (int, float)) for value in values):
            raise ValueError("arithmetic on sizes meets something else")
        found = function(*values)
        if isinstance(found, int) and abs(found) > _END:
            raise ValueError("a size is computed that no tensor can have")
        return found

    return run


def entry_of(values: Any, place: Any) -> Any:
    """One entry of a list."""
    if not isinstance(values, (list, tuple)) or not isinstance(place, int):
        raise ValueError("an entry is taken from something that has none")
    return values[place]
