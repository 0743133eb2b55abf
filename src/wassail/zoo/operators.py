"""The operators that an exported classifier may use, and what is looked at before one of them is
called.

Torch's kernels were written for programs, not for files from strangers: some read beyond their
arguments when the lengths do not fit, some divide by a number that is zero. So the list holds what
a classifier in eval mode needs and nothing else, by exact overload: nothing that writes into its
arguments, that draws random numbers, that returns memory as it finds it, or whose result has a size
that depends on values. Every argument is compared with the operator's own schema, and the shapes
with what the operator assumes of them. The result is computed without memory first (on torch's meta
device), for its size.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wassail.zoo.rules import LARGEST, RULES, Arguments, bounded, entry_of, integer_of, limit, show

__all__ = ["ARITHMETIC", "LARGEST", "Arithmetic", "Operator", "find", "functional", "limit"]


"""The numbers that a sample, or a value computed from one sample, may have: a quarter of a
gigabyte in float32.
"""


_SAME_SHAPE = """
    abs acos acosh asin asinh atan atanh ceil celu cos cosh elu erf erfc exp exp2 expm1 floor gelu
    hardshrink hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 log_sigmoid
    logical_not mish nan_to_num neg reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin
    sinh softplus softshrink sqrt square tan tanh alias clone contiguous detach lift_fresh_copy tril
    triu zeros_like ones_like full_like _to_copy
"""


_OTHERS = """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar
    div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor true_divide.Scalar
    floor_divide.default floor_divide.Scalar fmod.Tensor fmod.Scalar remainder.Tensor
    remainder.Scalar pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar atan2.default addcdiv.default
    addcmul.default lerp.Scalar lerp.Tensor clamp.default clamp.Tensor clamp_max.default
    clamp_max.Tensor clamp_min.default clamp_min.Tensor maximum.default minimum.default max.other
    min.other eq.Tensor eq.Scalar ne.Tensor ne.Scalar ge.Tensor ge.Scalar gt.Tensor gt.Scalar
    le.Tensor le.Scalar lt.Tensor lt.Scalar logical_and.default logical_or.default
    logical_xor.default bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar
    bitwise_not.default isfinite.default isinf.default isnan.default masked_fill.Scalar
    masked_fill.Tensor where.self where.ScalarOther where.ScalarSelf where.Scalar mm.default
    bmm.default mv.default dot.default matmul.default linear.default addmm.default addmv.default
    baddbmm.default addbmm.default outer.default einsum.default scaled_dot_product_attention.default
    conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding
    conv_transpose1d.default conv_transpose2d.input convolution.default batch_norm.default
    _native_batch_norm_legit_no_training.default instance_norm.default group_norm.default
    native_group_norm.default layer_norm.default native_layer_norm.default rms_norm.default
    max_pool1d.default max_pool2d.default max_pool3d.default max_pool2d_with_indices.default
    avg_pool1d.default avg_pool2d.default avg_pool3d.default adaptive_avg_pool1d.default
    adaptive_avg_pool2d.default adaptive_avg_pool3d.default _adaptive_avg_pool2d.default
    adaptive_max_pool1d.default adaptive_max_pool2d.default softmax.int _softmax.default
    log_softmax.int _log_softmax.default logsumexp.default glu.default prelu.default dropout.default
    feature_dropout.default alpha_dropout.default native_dropout.default mean.default mean.dim
    sum.default sum.dim_IntList prod.default prod.dim_int amax.default amin.default max.default
    max.dim min.default min.dim argmax.default argmin.default std.default std.dim std.correction
    var.default var.dim var.correction var_mean.default var_mean.dim var_mean.correction norm.Scalar
    norm.ScalarOpt_dim linalg_vector_norm.default cumsum.default cumprod.default topk.default
    sort.default any.default any.dim any.dims all.default all.dim all.dims cat.default stack.default
    hstack.default vstack.default split.Tensor split.sizes split_with_sizes.default chunk.default
    tensor_split.sections unbind.int view.default _unsafe_view.default view_as.default
    reshape.default reshape_as.default flatten.using_ints unflatten.int squeeze.default squeeze.dim
    squeeze.dims unsqueeze.default expand.default expand_as.default broadcast_to.default
    broadcast_tensors.default permute.default transpose.int t.default numpy_T.default movedim.int
    movedim.intlist flip.default roll.default repeat.default repeat_interleave.self_int tile.default
    slice_scatter.default select_scatter.default copy.default fill.Scalar fill.Tensor select.int
    slice.Tensor narrow.default diagonal.default diag.default unfold.default im2col.default
    pixel_shuffle.default pixel_unshuffle.default pad.default constant_pad_nd.default
    reflection_pad1d.default reflection_pad2d.default replication_pad1d.default
    replication_pad2d.default index.Tensor index_select.default gather.default embedding.default
    upsample_nearest2d.default upsample_nearest2d.vec upsample_bilinear2d.default
    upsample_bilinear2d.vec upsample_bicubic2d.default upsample_bicubic2d.vec arange.default
    arange.start arange.start_step linspace.default full.default zeros.default ones.default
    eye.default eye.m new_full.default new_ones.default new_zeros.default scalar_tensor.default
    to.dtype to.device to.dtype_layout to.other type_as.default sym_size.int sym_size.default
    sym_numel.default
"""


NAMES = frozenset([f"{name}.default" for name in _SAME_SHAPE.split()] + _OTHERS.split())


# Activations that write into their argument, as nn.ReLU(inplace=True) does: the reader runs the
# form that does not.
_IN_PLACE = frozenset(
    """
    relu.default relu6.default celu.default elu.default gelu.default hardsigmoid.default
    hardswish.default hardtanh.default leaky_relu.default mish.default selu.default sigmoid.default
    silu.default tanh.default clamp.default add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor
    mul.Scalar div.Tensor div.Scalar masked_fill.Scalar dropout.default feature_dropout.default
    alpha_dropout.default detach.default
    """.split()  # noqa: SIM905
)


# Those that may return (a part of) their argument although their schema does not say so.
_ALIASES = frozenset(
    """
    dropout feature_dropout alpha_dropout native_dropout pad constant_pad_nd type_as _unsafe_view
    broadcast_tensors einsum diag pixel_shuffle pixel_unshuffle
    """.split()  # noqa: SIM905
)


_TARGET = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


def find(target: str) -> Operator | None:
    """The operator that an exported program names like this, None if it is not on the list."""
    match = _TARGET.fullmatch(target)
    if match is None or f"{match[1]}.{match[2]}" not in NAMES:
        return None
    run = getattr(getattr(torch.ops.aten, match[1], None), match[2], None)
    return None if run is None else Operator(target, match[1], run)


def functional(target: str) -> str | None:
    """The name of the operator that computes the same without writing into its first argument;
    None for all others.
    """
    match = _TARGET.fullmatch(target)
    if (
        match is None
        or not match[1].endswith("_")
        or f"{match[1][:-1]}.{match[2]}" not in _IN_PLACE
    ):
        return None
    return f"torch.ops.aten.{match[1][:-1]}.{match[2]}"


class Operator:
    """One overload of one operator: what it is called with is checked, then it is run.

    Args:
        target: as an exported program names it.
        name: without namespace and overload.
        run: torch's own.
    """

    def __init__(self, target: str, name: str, run: Any) -> None:
        self.target = target
        self.name = name
        self.run = run
        self.schema = {argument.name: argument for argument in run._schema.arguments}

    def __reduce__(self) -> Any:
        return find, (self.target,)

    @property
    def aliases(self) -> bool:
        """Whether a result may share memory with an argument."""
        return self.name in _ALIASES or any(
            value.alias_info is not None for value in self.run._schema.returns
        )

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError unless the operator has arguments of these names, and no other that
        it needs.
        """
        foreign = [name for name in names if name not in self.schema]
        needed = [
            name
            for name, argument in self.schema.items()
            if not argument.has_default_value() and name not in names
        ]
        if foreign or needed or len(set(names)) != len(names):
            raise ValueError(
                f"{self.target} is called with the arguments {', '.join(names) or '(none)'}"
            )

    def check(self, arguments: Mapping[str, Any], results: int) -> None:
        """Raise ValueError unless every argument is what the operator assumes.

        Args:
            arguments: by name; tensors need no memory.
            results: how many tensors the program takes out of a list, where the operator returns
                one.
        """
        for name, value in arguments.items():
            argument = self.schema[name]
            if not _fits(value, str(argument.real_type), argument.N, name):
                raise ValueError(
                    f"{self.target} is called with {name} = {show(value)}, which is no "
                    f"{argument.real_type}"
                )
        rule = RULES.get(self.name)
        if rule is not None:
            filled = {
                name: arguments.get(
                    name, argument.default_value if argument.has_default_value() else None
                )
                for name, argument in self.schema.items()
            }
            reason = rule(Arguments(filled, results))
            if reason:
                raise ValueError(f"{self.target}: {reason}")


def _fits(value: Any, kind: str, count: int | None, name: str) -> bool:
    """Whether a value is of a kind that a schema names.

    Long because it has a case for each kind of argument.
    """
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[9:-1], count, name)
    if kind.startswith("List["):
        if not isinstance(value, (list, tuple)) or not all(
            _fits(entry, kind[5:-1], None, name) for entry in value
        ):
            return False
        return count is None or count == 1 or len(value) in (0, 1, count)
    match kind:
        case "Tensor":  # exporters write `x + 3` as a sum of tensors
            return isinstance(value, Tensor) or (
                name == "other" and _fits(value, "number", None, name)
            )
        case "int":
            return integer_of(value, name)
        case "float":
            return isinstance(value, float) or integer_of(value, name)
        case "number":
            return isinstance(value, (float, bool)) or integer_of(value, name)
        case "bool":
            return isinstance(value, bool) and not (value and name == "pin_memory")
        case "str":
            return isinstance(value, str)
        case "ScalarType":
            return isinstance(value, torch.dtype)
        case "Layout":
            return value is torch.strided
        case "MemoryFormat":
            return isinstance(value, torch.memory_format)
        case "Device":
            return isinstance(value, torch.device)
    return False


class Arithmetic:
    """An operation on sizes, by the name that exported programs have for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.run = ARITHMETIC[name]

    def __reduce__(self) -> Any:
        return Arithmetic, (self.name,)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{
        f"_operator.{name}": bounded(getattr(operator, name))
        for name in (
            "add",
            "sub",
            "mul",
            "floordiv",
            "mod",
            "neg",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
        )
    },
    "_operator.getitem": entry_of,
}
