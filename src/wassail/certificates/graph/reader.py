"""The structure of a network, piecewise linear or smooth, read from the model itself.

`read` exports the model (`torch.export`) and keeps a graph of a few kinds of node: affine maps with
their exact transposes, sums, concatenations, ReLUs, and on request smooth activations, products,
softmax and normalised tokens, which is what transformers are made of. Input scalings and frozen
batch norms are folded into their neighbours; a maximum is written `max(a, b) = a + relu(b - a)`, so
that max pooling, clamps and absolute values are ReLUs too. Everything is float64. What is none of
this is refused in one sentence that names its place in the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wassail.certificates.device import HOST, place
from wassail.certificates.graph.equilibrate import equilibrated
from wassail.certificates.graph.execution import FEW, NORM, Execution, Step
from wassail.certificates.graph.fold import (
    added_bias,
    fold_step,
    fold_steps,
    moved_step,
    pair_of,
    window_of,
)
from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Relu, Smooth, sizes_of
from wassail.certificates.graph.maps import Concat, Linear, Matrix, Pick, Scale, Sum
from wassail.certificates.graph.normalise import Normalise
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.operators.pooling import Average
from wassail.certificates.graph.planes import Curve
from wassail.certificates.graph.products import Product
from wassail.certificates.graph.softmax import Softmax
from wassail.errors import InputError
from wassail.network import Model, frozen


def read(
    model: Model, shape: Sequence[int], smooth: bool = False, device: torch.device = HOST
) -> Graph:
    """The structure of a model for samples of this shape, or an `InputError` that names what is not
    piecewise linear.

    smooth: take smooth activations, attention and LayerNorm too, as nodes with an `activation` or a
    `curve`. The model is exported for one sample, so that what it does with the batch axis on the
    way (`nn.MultiheadAttention` moves it, and merges it with the heads) is no matter; the graph is
    then compared with the model on a batch of random points. device: where the model takes its
    input, if it has no parameters that tell. The structure is read on the CPU; the graph that is
    returned is on the model's device, or on the CPU if that device has no float64.
    """
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    module = model if isinstance(model, nn.Module) else _Module(model)
    parameter = next(module.parameters(), None)
    x = x.to(device) if parameter is None else x.to(parameter)
    with frozen(module), torch.no_grad():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(module, (x[:1],), strict=False).run_decompositions({})
        except Exception as error:  # whatever the exporter stumbles over
            reason = (
                (str(error).strip().splitlines() or [type(error).__name__])[0]
                .split(". ")[0]
                .rstrip(". ")
            )
            raise InputError(
                f"the model's structure cannot be read for samples of shape {tuple(shape)}: "
                f"{reason}."
            ) from None
        graph = _Reader(program, tuple(shape), smooth, x.dtype).graph()
        graph = (
            replace(graph, execution=replace(graph.execution, device=x.device.type))
            if graph.execution
            else graph
        )
        probe = torch.cat([x, -x, 4 * x])
        graph = equilibrated(graph, probe.cpu())
        truth = model(probe).cpu().double()
        ours = graph.logits(probe.cpu())
    if not torch.isfinite(truth).all():
        raise InputError(
            "the model returns NaN or infinity at random points: check its weights and "
            "preprocessing."
        )
    if truth.shape != ours.shape or not (
        truth - ours
    ).abs().max() <= 1e-3 * truth.abs().max().clamp(min=1e-2):
        raise InputError(
            "the structure read from the model does not reproduce its logits: it depends on the "
            "batch or on data."
        )
    return graph.to(place(x.device))


class _Module(nn.Module):
    def __init__(self, function: Model) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


_MOVES = {
    "view",
    "reshape",
    "unsafe_view",
    "flatten",
    "unflatten",
    "permute",
    "transpose",
    "slice",
    "select",
    "squeeze",
    "unsqueeze",
    "expand",
    "pad",
    "constant_pad_nd",
    "contiguous",
    "clone",
    "alias",
    "narrow",
    "flip",
    "roll",
    "index_select",
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "movedim",
    "t",
    "numpy_T",
    "expand_as",
    "view_as",
    "unsafe_split",
    "unsafe_chunk",
}


_SAME = {
    "dropout",
    "detach",
    "to",
    "to_copy",
    "lift_fresh_copy",
    "feature_dropout",
    "alpha_dropout",
}


_AVERAGES = {
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "mean",
    "sum",
    "avg_pool1d",
    "adaptive_avg_pool1d",
}


class _Reader:
    """Translates a program exported for one sample, node by node.

    A value is a constant tensor, the index of a node, or a list of them. The tensor that an index
    stands for in the program has the shape of the node, with one axis of length 1 before it if the
    index says so (`lead`): the batch axis, as a rule.
    """

    def __init__(
        self, program: Any, shape: tuple[int, ...], smooth: bool, dtype: torch.dtype
    ) -> None:
        self.program = program
        self.nodes = [Node((), shape, "the input")]
        self.smooth = smooth
        self.dtype = dtype
        self.place = self.mixed = ""
        # whether what is translated goes nowhere but into a softmax: far down is minus infinity
        # there
        self.masks = False
        self.scores = _scores(program)

    def graph(self) -> Graph:
        signature = self.program.graph_signature
        constants = {**self.program.state_dict, **self.program.constants}
        owners = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        values: dict[Any, Any] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                owner = owners.get(node.name)
                values[node] = _Index(0, 1) if owner is None else _wide(constants[owner])
                if (
                    owner is not None
                    and constants[owner].ndim
                    and constants[owner].is_floating_point()
                ):
                    self._same_type(constants[owner].dtype, owner)
            elif node.op == "output":
                result = values[node.args[0][0]]
                if len(node.args[0]) != 1 or not isinstance(result, _Index):
                    raise InputError(
                        "the model does not return one tensor of logits that depends on its input."
                    )
                return self._trim(result)
            else:
                values[node] = self._node(node, values)
        raise InputError("the model returns nothing: it must return logits.")

    def _node(self, node: Any, values: dict[Any, Any]) -> Any:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, kind = (
            (stack[-1][0], str(stack[-1][1]).rsplit(".", 1)[-1]) if stack else ("", "the model")
        )
        self.place = f"{path!r} ({kind})" if path else f"the model itself ({kind})"
        args = torch.fx.node.map_arg(node.args, lambda n: values[n])
        options = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
        flat, _ = torch.utils._pytree.tree_flatten((args, options))
        if "assert" in _operation(node):  # the exporter's checks of dtypes, which we have widened
            return None
        if not any(isinstance(v, _Index) for v in flat):
            value = node.target(*args, **options)
            moved = _operation(node) in _MOVES | _SAME or "getitem" in _operation(node)
            if not moved and any(isinstance(v, Tensor) and v.is_floating_point() for v in flat):
                self.mixed = self.mixed or f"weights that the model computes, as at {self.place}"
            return value
        if "getitem" in str(node.target):
            return args[0][args[1]]
        self.masks = node in self.scores
        return self._translate(_operation(node), node.target, list(args), dict(options))

    def _translate(self, name: str, target: Any, args: list[Any], options: dict[str, Any]) -> Any:
        first = args[0]
        types = [v for v in (*args, *options.values()) if isinstance(v, torch.dtype)]
        if any(t not in (torch.float32, torch.float64) for t in types):
            raise self._refuse("a conversion to integers or to half precision")
        for t in types:
            self._same_type(t, self.place)
        if name in _SAME:
            return first
        if name in _MOVES and isinstance(first, _Index):
            return self._move(target, first, args[1:], options)
        if name in _AVERAGES and isinstance(first, _Index):
            return self._average(name, target, first, args[1:], options)
        rule = getattr(self, f"_{name}", None)
        if rule is None:
            raise self._refuse(name)
        try:
            return rule(*args, **options)
        except InputError:
            raise
        except (TypeError, AttributeError, ValueError, RuntimeError, IndexError):
            raise self._refuse(name) from None

    def _same_type(self, dtype: torch.dtype, place: str) -> None:
        """Remember where a model mixes floating-point types: what it executes is then not
        covered.
        """
        if dtype != self.dtype:
            self.mixed = self.mixed or f"a model in {self.dtype} with {dtype} at {place}"

    def _refuse(self, what: str) -> InputError:
        more = (
            ", sigmoid, tanh, GELU, SiLU, Softplus, ELU, LayerNorm, softmax attention, products"
            if self.smooth
            else ""
        )
        return InputError(
            f"{what!r} at {self.place} is not supported: certificates read linear and "
            "convolutional layers, frozen batch norm, "
            f"ReLU, leaky ReLU{more}, additions, concatenations, reshapes and poolings."
        )

    # Nodes. A scale beside a matrix or a convolution is folded into it, so that norms see one map.

    def _add_node(self, node: Node, lead: int) -> _Index:
        self.nodes.append(node)
        return _Index(len(self.nodes) - 1, lead)

    def _full(self, x: _Index) -> tuple[int, ...]:
        """The shape of the tensor that an index stands for in the program."""
        return (1,) * x.lead + self.nodes[x].shape

    def _axis(self, x: _Index, dim: int) -> int:
        """An axis of that tensor as an axis of a batch `(m, *shape)`; 0 is the batch axis and
        refused.
        """
        axis = dim % len(self._full(x)) + 1 - x.lead
        if not axis:
            raise self._refuse("an operation across the batch axis")
        return axis

    def _affine(
        self,
        map_: Linear,
        bias: Tensor | None,
        source: _Index,
        shape: tuple[int, ...],
        steps: tuple[Step, ...] | None = None,
        most: Tensor | None = None,
    ) -> _Index:
        """A node of its own, or folded with the one before it.

        Args:
            map_: the map.
            bias: what is added.
            source: the node before it.
            shape: of one sample.
            steps: what is executed, if it is not the map itself.
            most: the magnitudes that the bias is a sum of, if it is one.
        """
        before = self.nodes[source]
        steps = (fold_step(map_, bias),) if steps is None else steps
        match before.op:
            case Affine(Scale(factor), own) if not self._is_gain(before):
                folded = map_.fold_before(factor, before.shape)
                if folded is not None:
                    if own is not None:
                        shift = map_.forward(own.expand(before.shape)[None])[0]
                        sizes = sizes_of(before.op).expand(before.shape)[None]
                        most = added_bias(map_.magnitude().forward(sizes)[0], bias, most)
                        bias = shift if bias is None else shift + bias
                    start = _Index(before.inputs[0], source.lead)
                    both = (*fold_steps(before), *steps)
                    return self._affine(folded, bias, start, shape, both, most)
            case _:
                pass
        op = Affine(map_, bias, most)
        return self._add_node(Node((source,), shape, self.place, op, steps), source.lead)

    def _scaled(
        self,
        source: _Index,
        factor: Tensor,
        bias: Tensor | None,
        step: Step | None = None,
        most: Tensor | None = None,
    ) -> _Index:
        """`factor x + bias`, entry by entry.

        Args:
            source: the node of x.
            factor: broadcasts against one sample.
            bias: broadcasts against one sample.
            step: what is executed, if it is not this.
            most: the magnitudes that the bias is a sum of, if it is one.
        """
        before = self.nodes[source]
        step = fold_step(Scale(factor), bias) if step is None else step
        steps = (*fold_steps(before), step)
        sizes = (before.shape, factor.shape, () if bias is None else bias.shape)
        if tuple(torch.broadcast_shapes(*sizes)) != before.shape:  # type: ignore[no-untyped-call]
            raise self._refuse("a broadcast against a constant")
        if isinstance(before.op, Affine):
            own = before.op.bias
            folded = before.op.map.fold_after(factor, before.shape)
            if folded is not None:
                moved = None if own is None else own * factor
                total = bias if moved is None else moved if bias is None else moved + bias
                if moved is not None:
                    most = added_bias(sizes_of(before.op) * factor.abs(), bias, most)
                op = Affine(folded, total, most)
                return self._add_node(replace(before, op=op, steps=steps), source.lead)
            if bias is not None and bool((factor == 1).all()):
                # a shift only, as of a position embedding
                if own is not None:
                    most = added_bias(sizes_of(before.op), bias, most)
                    bias = own + bias
                op = Affine(before.op.map, bias, most)
                return self._add_node(replace(before, op=op, steps=steps), source.lead)
        return self._affine(Scale(factor), bias, source, before.shape, (step,), most)

    def _exactly(self, source: _Index, factor: Tensor, bias: Tensor | None) -> _Index:
        """The same as a part of an operation that is exact in floating point, but for the
        constant itself.
        """
        noise = None if bias is None else (bias - bias.to(self.dtype).double()).abs()
        return self._scaled(
            source,
            factor,
            bias,
            Step(Scale(factor), None if bias is None else bias.abs(), 0, noise),
        )

    def _relu_node(self, source: _Index, slope: Tensor | float = 0.0) -> _Index:
        slope = torch.as_tensor(slope, dtype=torch.float64)
        if not ((slope >= 0) & (slope <= 1)).all():
            raise self._refuse("a leaky ReLU whose slope is not in [0, 1]")
        exact = bool(((slope == 0) | (slope == 1)).all())
        steps = (
            () if exact else (fold_step(Scale(torch.ones_like(slope)), None),)
        )  # relative to what comes out
        return self._add_node(
            Node((source,), self.nodes[source].shape, self.place, Relu(slope), steps=steps),
            source.lead,
        )

    def _smooth_node(self, source: _Index, name: str) -> _Index:
        if not self.smooth:
            raise self._refuse(name)
        return self._add_node(
            Node((source,), self.nodes[source].shape, self.place, Smooth(name)), source.lead
        )

    def _curve_node(self, curve: Curve, what: str, *parts: _Index, lead: int) -> _Index:
        if not self.smooth:
            raise self._refuse(what)
        shape = curve.output(*(self.nodes[p].shape for p in parts))
        return self._add_node(Node(tuple(parts), shape, self.place, Curved(curve)), lead)

    def _sum(self, parts: Sequence[_Index], exact: bool = False) -> _Index:
        """exact: it is a part of an operation that is exact in floating point."""
        parts = self._alike(*parts)
        total = Sum(len(parts))
        steps = () if exact else (Step(total, None, len(parts)),)
        return self._add_node(
            Node(tuple(parts), self.nodes[parts[0]].shape, self.place, Affine(total), steps=steps),
            parts[0].lead,
        )

    def _alike(self, *parts: _Index) -> list[_Index]:
        """All of one shape, as broadcasting would make them."""
        full = torch.broadcast_shapes(*(self._full(p) for p in parts))  # type: ignore[no-untyped-call]
        return [self._expanded(p, tuple(full)) for p in parts]

    def _expanded(self, x: _Index, full: tuple[int, ...]) -> _Index:
        if self._full(x) == full:
            return x
        return self._move(torch.Tensor.expand, x, list(full), {})  # type: ignore[no-any-return]

    def _constant(self, values: Tensor) -> _Index:
        """A constant tensor as a node: nothing of the input, plus a bias."""
        lead = _lead(values.shape)
        shape = tuple(values.shape[lead:])
        nothing = Pick(torch.full((values.numel(),), -1), self.nodes[0].shape, shape)
        return self._add_node(
            Node(
                (0,), shape, self.place, Affine(nothing, values.double().reshape(shape)), steps=()
            ),
            lead,
        )

    def _larger(self, a: _Index, b: _Index) -> _Index:
        """`max(a, b) = a + relu(b - a)`."""
        return self._sum([a, self._relu_node(self._difference(b, a))], exact=True)

    def _difference(self, a: _Index, b: _Index) -> _Index:
        return self._sum([a, self._neg(b)], exact=True)

    # Data movement: run the operation on the numbers 1, 2, 3, ... and see where they went.

    def _move(self, target: Any, source: _Index, args: list[Any], options: dict[str, Any]) -> Any:
        full = self._full(source)
        count = torch.arange(1, math.prod(full) + 1, dtype=torch.float64).reshape(full)
        with torch.no_grad():
            moved, turned = target(count, *args, **options), target(-count, *args, **options)
        if isinstance(moved, Tensor):
            return self._picked(source, moved, turned)
        return [self._picked(source, *pair) for pair in zip(moved, turned)]

    def _picked(self, source: _Index, moved: Tensor, turned: Tensor) -> _Index:
        """moved: the numbers where they went; turned: the same for their negatives, which tells
        them from constants.
        """
        lead = _lead(moved.shape)
        output = tuple(moved.shape[lead:])
        where = moved.flatten().long()
        if not torch.equal(moved.flatten(), where.double()) or not torch.equal(moved, -turned):
            raise self._refuse("a padding with other than zeros")
        return self._placed(source, where - 1, output, lead)

    def _placed(self, source: int, where: Tensor, output: tuple[int, ...], lead: int) -> _Index:
        """Entries `where` of a node, -1 for 0. Moves one after another are one, and scales come
        after moves, to meet others.
        """
        node = self.nodes[source]

        def entries(values: Tensor) -> Tensor:
            return F.pad(values.expand(node.shape).flatten(), (0, 1))[where].reshape(output)

        match node.op:
            case Affine(Pick(source=known), None):
                start = torch.arange(node.size) if known is None else known
                there = F.pad(start, (0, 1), value=-1)[where]
                return self._placed(node.inputs[0], there, output, lead)
            case Affine(Scale(factor), own, sizes) if not self._is_gain(node):
                factor = factor.reshape(()) if factor.numel() == 1 else entries(factor)
                bias, most = (None if v is None else entries(v) for v in (own, sizes))
                steps = tuple(moved_step(step, entries) for step in fold_steps(node))
                start_ = self._placed(node.inputs[0], where, output, lead)
                return self._affine(Scale(factor), bias, start_, output, steps, most)
            case _:
                pass
        same = torch.equal(where, torch.arange(node.size))
        if same and output == node.shape:
            return _Index(source, lead)
        move = Pick(None if same else where, node.shape, output)
        return self._add_node(Node((source,), output, self.place, Affine(move), steps=()), lead)

    def _is_gain(self, node: Node) -> bool:
        """Whether it is the gain of a LayerNorm, which is left in its place."""
        if not node.inputs:
            return False
        op = self.nodes[node.inputs[0]].op
        return isinstance(op, Curved) and isinstance(op.curve, Normalise)

    def _average(
        self, name: str, target: Any, source: _Index, args: list[Any], options: dict[str, Any]
    ) -> _Index:
        # Everything here is float64, whatever the program sums in.
        args = [torch.float64 if isinstance(v, torch.dtype) else v for v in args]
        options = {
            k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in options.items()
        }

        def one(x: Tensor) -> Tensor:
            return target(x, *args, **options)  # type: ignore[no-any-return]

        shape = self.nodes[source].shape
        full = self._full(source)
        ones = one(torch.ones(full, dtype=torch.float64))
        output = tuple(ones.shape)
        sign = -1.0 if bool((ones < 0).any()) else 1.0  # a divisor may be negative
        lead = _lead(output)
        # With a leading axis of length 1 the operation sees a batch there, and else one sample at a
        # time.
        every = one if source.lead else torch.vmap(one)

        def function(x: Tensor) -> Tensor:
            return sign * every(x).reshape(len(x), *output[lead:])

        try:
            fits = function(torch.ones(3, *shape, dtype=torch.float64)).shape == (3, *output[lead:])
        except RuntimeError:
            fits = False
        if not fits:
            raise self._refuse("an average over the batch axis")
        average = Average(function, shape)
        steps = (Step(average, None, FEW + window_of(name, full, output, args, options)),)
        mean = self._add_node(
            Node((source,), output[lead:], self.place, Affine(average), steps=steps), lead
        )
        return mean if sign > 0 else self._neg(mean)

    # The operations, by their names in torch's operator library.

    def _linear(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> _Index:
        shape = self.nodes[x].shape
        if not shape or shape[-1] != weight.shape[1]:
            raise self._refuse("a matrix product over the batch axis")
        return self._affine(Matrix(weight), self._fixed(bias), x, (*shape[:-1], len(weight)))

    def _addmm(self, bias: Tensor, x: Any, weight: Tensor) -> _Index:
        return self._linear(x, weight.T, bias)

    def _matmul(self, a: Any, b: Any) -> _Index:
        """With a constant matrix on the right it is linear; else `a` and `b` both depend on the
        input.
        """
        if isinstance(a, _Index) and isinstance(b, Tensor) and b.ndim == 2:
            return self._linear(a, b.T)
        if (
            not isinstance(a, _Index)
            or not isinstance(b, _Index)
            or min(len(self._full(a)), len(self._full(b))) < 2
        ):
            raise self._refuse("a product with a constant on the left or with a vector")
        (*first, i, k), (*second, _, j) = self._full(a), self._full(b)
        batch = tuple(torch.broadcast_shapes(first, second))  # type: ignore[no-untyped-call]
        a, b = self._expanded(a, (*batch, i, k)), self._expanded(b, (*batch, k, j))
        axes = "abcdefgh"[: len(batch)]
        return self._product(f"{axes}ik,{axes}kj->{axes}ij", a, b, (*batch, i, j))

    def _product(self, equation: str, a: _Index, b: _Index, full: tuple[int, ...]) -> _Index:
        """An einsum, written for the tensors of the program; a leading axis of length 1 has no
        letter.
        """
        (first, second), last = equation.split("->")[0].split(","), equation.split("->")[1]
        lead = _lead(full)
        equation = f"{first[a.lead :]},{second[b.lead :]}->{last[lead:]}"
        return self._curve_node(
            Product(equation),
            "a product of two quantities that depend on the input",
            a,
            b,
            lead=lead,
        )

    _bmm = _matmul

    def _einsum(self, equation: str, parts: Sequence[Any], path: Any = None) -> _Index:
        """Of two quantities that depend on the input, every letter written out."""
        left, arrow, last = equation.replace(" ", "").partition("->")
        if (
            len(parts) != 2
            or not all(isinstance(p, _Index) for p in parts)
            or not arrow
            or "." in equation
        ):
            raise self._refuse(
                "an einsum with a constant, with more than two operands or without an arrow"
            )
        first, second = left.split(",")
        sizes = dict(zip(first + second, self._full(parts[0]) + self._full(parts[1])))
        return self._product(f"{left}->{last}", parts[0], parts[1], tuple(sizes[k] for k in last))

    _mm = _matmul

    def _conv2d(
        self,
        x: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Index:
        if padding in ("valid", "same"):
            reach = [d * (k - 1) for d, k in zip(pair_of(dilation), weight.shape[2:])]
            if padding == "same" and any(r % 2 for r in reach):
                raise self._refuse("a 'same' padding that is not symmetric")
            padding = [0, 0] if padding == "valid" else [r // 2 for r in reach]
        shape = self.nodes[x].shape
        if len(shape) != 3:
            raise self._refuse("a convolution of tokens")
        conv = Conv(weight, shape, pair_of(stride), pair_of(padding), pair_of(dilation), groups)
        output = tuple(conv.forward(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
        return self._affine(conv, None if bias is None else bias[:, None, None], x, output)

    def _convolution(
        self,
        x: Any,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
    ) -> _Index:
        if transposed or weight.ndim != 4:
            raise self._refuse("a transposed or not two-dimensional convolution")
        return self._conv2d(x, weight, bias, stride, padding, dilation, groups)

    def _batch_norm(
        self,
        x: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        training: bool,
        _: float,
        eps: float,
        *rest: Any,
    ) -> _Index:
        if training:
            raise self._refuse("a batch norm in training mode")
        factor = (var + eps).rsqrt() if weight is None else weight * (var + eps).rsqrt()
        shift = -mean * factor if bias is None else bias - mean * factor
        ones = self._along(x, 1)
        most = (mean * factor).abs() if bias is None else bias.abs() + (mean * factor).abs()
        step = Step(Scale(factor.reshape(ones)), most.reshape(ones), NORM)
        return self._scaled(
            x, factor.reshape(ones), shift.reshape(ones), step, 2 * most.reshape(ones)
        )

    def _along(self, x: _Index, dim: int) -> list[int]:
        """The shape in which a vector along an axis broadcasts against one sample."""
        axis = self._axis(x, dim)
        return [-1 if i == axis - 1 else 1 for i in range(len(self.nodes[x].shape))]

    def _native_batch_norm_legit_no_training(self, *args: Any) -> list[Any]:
        x, weight, bias, mean, var, momentum, eps = args
        return [self._batch_norm(x, weight, bias, mean, var, False, momentum, eps), None, None]

    def _relu(self, x: Any) -> _Index:
        return self._relu_node(x)

    def _leaky_relu(self, x: Any, slope: float = 0.01) -> _Index:
        return self._relu_node(x, slope)

    def _prelu(self, x: Any, weight: Tensor) -> _Index:
        return self._relu_node(
            x, weight if weight.numel() == 1 else weight.reshape(self._along(x, 1))
        )

    def _sigmoid(self, x: Any) -> _Index:
        return self._smooth_node(x, "sigmoid")

    def _tanh(self, x: Any) -> _Index:
        return self._smooth_node(x, "tanh")

    def _gelu(self, x: Any, approximate: str = "none") -> _Index:
        return self._smooth_node(x, "gelu" if approximate == "none" else "gelu_tanh")

    def _silu(self, x: Any) -> _Index:
        return self._smooth_node(x, "silu")

    def _softplus(self, x: Any, beta: float = 1.0, threshold: float = 20.0) -> _Index:
        """`softplus(beta x) / beta`; beyond the threshold torch returns x, off by at most
        `exp(-threshold) / beta`.
        """
        if threshold < 18:  # the jump is exp(-threshold) / beta
            raise self._refuse("a softplus with a low threshold, where it jumps,")
        one = torch.tensor(1.0, dtype=torch.float64)
        return self._scaled(
            self._smooth_node(self._scaled(x, beta * one, None), "softplus"), one / beta, None
        )

    def _elu(
        self, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
    ) -> _Index:
        """`scale (alpha elu(t) + (1 - alpha input_scale) relu(x))` with `t = input_scale x`:
        ELU, CELU and SELU.
        """
        one = torch.tensor(1.0, dtype=torch.float64)
        bent = self._smooth_node(self._scaled(x, input_scale * one, None), "elu")
        bent = self._scaled(bent, scale * alpha * one, None)
        rest = scale * (1 - alpha * input_scale)
        if abs(rest) <= 1e-15 * abs(scale):
            return bent
        return self._sum([bent, self._scaled(self._relu_node(x), rest * one, None)])

    def _celu(self, x: Any, alpha: float = 1.0) -> _Index:
        return self._elu(x, alpha, 1.0, 1 / alpha)

    def _selu(self, x: Any) -> _Index:
        return self._elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)

    # What transformers are made of.

    def _softmax(self, x: Any, dim: int, dtype: Any = None) -> _Index:
        last = len(self._full(x)) - 1
        if dim % (last + 1) != last:
            self._axis(x, dim)
            turned = self._move(torch.transpose, x, [dim, last], {})
            return self._move(torch.transpose, self._softmax(turned, last), [dim, last], {})  # type: ignore[no-any-return]
        if not self.nodes[x].shape:
            raise self._refuse("an operation across the batch axis")
        start = self._partial(x).logits(torch.zeros(1, *self.nodes[0].shape, dtype=torch.float64))
        if bool((start.amax(-1) <= -_FAR / 2).any()):
            raise self._refuse("a softmax of which all entries are masked")
        return self._curve_node(Softmax(), "softmax", x, lead=x.lead)

    def _scaled_dot_product_attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> _Index:
        """`softmax(q k^T scale + mask) v`."""
        if not all(isinstance(part, _Index) for part in (q, k, v)) or enable_gqa:
            raise self._refuse("attention to constants or with grouped queries")
        n = self._full(q)[-2]
        m = self._full(k)[-2]
        width = self._full(q)[-1]
        scores = self._matmul(q, self._move(torch.transpose, k, [-2, -1], {}))
        scores = self._mul(scores, 1 / math.sqrt(width) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(n, m, dtype=torch.bool).tril()
        if attn_mask is not None:
            self.masks = True
            added = (
                torch.where(attn_mask, 0.0, -math.inf)
                if attn_mask.dtype == torch.bool
                else attn_mask
            )
            scores = self._add(scores, added)
        return self._matmul(self._softmax(scores, -1), v)

    def _glu(self, x: Any, dim: int = -1) -> _Index:
        value, gate = self._move(torch.chunk, x, [2, dim], {})
        return self._mul(value, self._sigmoid(gate))

    def _baddbmm(self, start: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> _Index:
        product = self._mul(self._matmul(a, b), alpha)
        return self._add(
            self._mul(start, beta) if isinstance(start, _Index) else beta * start, product
        )

    def _masked_fill(self, x: Any, mask: Tensor, value: Any) -> _Index:
        """Where the mask is set, the value, a constant too."""
        full = self._full(x)
        hidden = mask.expand(full)
        there = _tensor(self._fixed(value)).expand(full)
        there = torch.where(hidden, self._masked(there), 0.0)
        shape = self.nodes[x].shape
        return self._exactly(
            x, _sample((~hidden).double(), shape, x.lead), _sample(there, shape, x.lead)
        )

    def _fixed(self, value: Any) -> Any:
        """A constant, or it is refused: an index is a number, and would be taken for one."""
        if isinstance(value, _Index):
            raise self._refuse("an operation whose parameter depends on the input")
        return value

    def _where(self, mask: Tensor, a: Any, b: Any) -> _Index:
        """`a` where the mask is set, else `b`; constants or not."""
        if isinstance(a, _Index) and isinstance(b, _Index):
            a, b = self._alike(a, b)
            return self._sum(
                [self._masked_fill(a, ~mask, 0.0), self._masked_fill(b, mask, 0.0)], exact=True
            )
        x, other, hidden = (a, b, ~mask) if isinstance(a, _Index) else (b, a, mask)
        wide, _ = torch.broadcast_tensors(mask, torch.as_tensor(other))  # type: ignore[no-untyped-call]
        x = self._wide_as(x, torch.zeros(wide.shape))
        return self._masked_fill(x, hidden, other)

    def _layer_norm(
        self,
        x: Any,
        size: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn: bool = False,
    ) -> _Index:
        """`gain (x - mean) / sqrt(variance + eps) + bias` over the last axes: a matrix,
        `Normalise`, a scale.
        """
        width = math.prod(size)
        centre = torch.eye(width, dtype=torch.float64) - 1 / width
        return self._normalised(x, size, centre, weight, bias, eps)

    def _native_layer_norm(self, x: Any, size: Sequence[int], *rest: Any) -> list[Any]:
        return [self._layer_norm(x, size, *rest), None, None]

    def _rms_norm(
        self, x: Any, size: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> _Index:
        tiny = (
            torch.finfo(self.dtype).eps if eps is None else eps
        )  # torch takes that of the type it computes in
        return self._normalised(x, size, None, weight, None, tiny)

    def _group_norm(
        self,
        x: Any,
        groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn: bool = False,
    ) -> _Index:
        """A LayerNorm over each group of channels, with one gain and bias for each channel."""
        full = self._full(x)
        parts = self._move(torch.reshape, x, [(full[0], groups, -1)], {})
        whole = self._move(
            torch.reshape, self._layer_norm(parts, self._full(parts)[-1:], eps=eps), [full], {}
        )
        if weight is None:
            return whole  # type: ignore[no-any-return]
        ones = self._along(x, 1)
        return self._scaled(
            whole, weight.reshape(ones), None if bias is None else bias.reshape(ones)
        )

    def _normalised(
        self,
        x: _Index,
        size: Sequence[int],
        centre: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> _Index:
        full = self._full(x)
        if len(size) > 1:
            x = self._move(torch.reshape, x, [(*full[: len(full) - len(size)], -1)], {})
        if not self.nodes[x].shape:
            raise self._refuse("a normalisation over the batch axis")
        if centre is not None:
            x = self._linear(x, centre)
        x = self._curve_node(Normalise(eps), "layer_norm", x, lead=x.lead)
        if weight is not None:
            x = self._affine(
                Scale(weight.flatten()),
                None if bias is None else bias.flatten(),
                x,
                self.nodes[x].shape,
            )
        return self._move(torch.reshape, x, [full], {}) if len(size) > 1 else x

    def _hardtanh(self, x: Any, low: float = -1.0, high: float = 1.0) -> _Index:
        return self._clamp(x, low, high)

    def _relu6(self, x: Any) -> _Index:
        return self._clamp(x, 0.0, 6.0)

    def _clamp(self, x: Any, min: Any = None, max: Any = None) -> _Index:
        """`low + relu(x - low) - relu(x - high)`, each side on its own where only one is given."""
        one = torch.tensor(1.0, dtype=torch.float64)
        min = self._fixed(min)
        max = self._fixed(max)
        if min is not None and not (isinstance(min, float) and min == -math.inf):
            low = torch.as_tensor(min, dtype=torch.float64)
            x = self._exactly(self._relu_node(self._exactly(x, one, -low)), one, low)
        if max is not None and not (
            isinstance(max, float) and max == math.inf
        ):  # min(x, high) = high - relu(high - x)
            high = torch.as_tensor(max, dtype=torch.float64)
            x = self._exactly(self._relu_node(self._exactly(x, -one, high)), -one, high)
        return x  # type: ignore[no-any-return]

    def _clamp_min(self, x: Any, min: Any) -> _Index:
        return self._clamp(x, min)

    def _clamp_max(self, x: Any, max: Any) -> _Index:
        return self._clamp(x, None, max)

    def _abs(self, x: Any) -> _Index:
        return self._sum([self._relu_node(x), self._relu_node(self._neg(x))], exact=True)

    def _maximum(self, a: Any, b: Any) -> _Index:
        if not isinstance(a, _Index) or not isinstance(b, _Index):
            x, constant = (a, b) if isinstance(a, _Index) else (b, a)
            return self._clamp(x, constant)
        return self._larger(a, b)

    def _minimum(self, a: Any, b: Any) -> _Index:
        return self._neg(
            self._maximum(*(self._neg(v) if isinstance(v, _Index) else -v for v in (a, b)))
        )

    def _max_pool2d(
        self,
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> _Index:
        """Entry by entry of the window: a tree of maxima. Where a window leaves the image it
        looks at its first entry again.
        """
        shape = self.nodes[x].shape
        size = math.prod(self.nodes[x].shape)
        if len(shape) != 3:
            raise self._refuse("a max pooling of tokens")
        height, width = pair_of(kernel)
        (up, left), (down, across), spread = (
            pair_of(padding),
            pair_of(stride or kernel),
            pair_of(dilation),
        )
        pool = F.max_pool2d(
            torch.zeros(1, *shape), (height, width), (down, across), (up, left), spread, ceil_mode
        )
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
        known = stacked.gather(
            0, (~outside).int().argmax(0, keepdim=True)
        )  # some entry that is inside
        filled = torch.where(outside, known, stacked)
        picked = [Pick(s.flatten(), shape, output) for s in filled]
        parts = [
            self._add_node(Node((x,), output, self.place, Affine(pick), steps=()), x.lead)
            for pick in picked
        ]
        if (
            outside.any()
        ):  # one after the other, so that a stand-in, which cannot win, can be left out of its race
            best = parts[0]
            for part, entry, out in zip(parts[1:], stacked[1:], outside[1:]):
                races = ~(out | (outside[0] & (entry == known[0])))
                race = self._exactly(self._difference(part, best), races.double(), None)
                best = self._sum([best, self._relu_node(race)], exact=True)
            return best
        while len(parts) > 1:
            pairs = [self._larger(a, b) for a, b in zip(parts[::2], parts[1::2])]
            parts = pairs + parts[2 * len(pairs) :]
        return parts[0]

    def _max_pool2d_with_indices(self, *args: Any) -> list[Any]:
        return [self._max_pool2d(*args), None]

    def _cat(self, parts: list[Any], dim: int = 0) -> _Index:
        """Constants among the parts (a class token) become nodes of their own."""
        nodes = [
            p if isinstance(p, _Index) else self._constant(p)
            for p in parts
            if isinstance(p, _Index) or p.numel()
        ]
        full = self._full(nodes[0])
        axis = dim % len(full)
        if axis == 0:  # a leading axis of length 1 would not stay one: the others move up
            parts = [self._move(torch.movedim, p, [0, -1], {}) for p in nodes]
            return self._move(torch.movedim, self._cat(parts, -1), [-1, 0], {})  # type: ignore[no-any-return]
        axis -= nodes[0].lead
        sizes = tuple(self.nodes[p].shape[axis] for p in nodes)
        shape = self.nodes[nodes[0]].shape
        shape = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
        return self._add_node(
            Node(tuple(nodes), shape, self.place, Affine(Concat(axis + 1, sizes)), steps=()),
            nodes[0].lead,
        )

    def _stack(self, parts: list[Any], dim: int = 0) -> _Index:
        whole = next(p for p in parts if isinstance(p, _Index))
        axis = dim % (len(self._full(whole)) + 1)
        return self._cat(
            [
                self._move(torch.unsqueeze, p, [axis], {})
                if isinstance(p, _Index)
                else p.unsqueeze(axis)
                for p in parts
            ],
            axis,
        )

    def _add(self, a: Any, b: Any, alpha: float = 1) -> _Index:
        one = torch.tensor(1.0, dtype=torch.float64)
        if isinstance(a, _Index) and isinstance(b, _Index):
            return self._sum([a, b if alpha == 1 else self._scaled(b, alpha * one, None)])
        (x, factor), constant = (
            ((a, one), alpha * _tensor(b))
            if isinstance(a, _Index)
            else ((b, alpha * one), _tensor(a))
        )
        x = self._wide_as(x, constant)
        shift = _sample(constant, self.nodes[x].shape, x.lead)
        hidden = shift <= -_FAR  # a mask: nothing of x, and so far down that nothing is left of it
        if self.masks and hidden.any():
            return self._scaled(x, torch.where(hidden, 0.0, factor), self._masked(shift))
        return self._scaled(x, factor, self._masked(shift))

    def _masked(self, constant: Tensor) -> Tensor:
        """A constant that is added, or takes the place of a value: finite, which minus infinity
        is before a softmax.
        """
        if self.masks:
            constant = constant.clamp(min=-_FAR)
        if not torch.isfinite(constant).all():
            raise self._refuse("an infinite constant that is no mask of a softmax")
        return constant

    def _wide_as(self, x: _Index, constant: Tensor) -> _Index:
        """The value, expanded to the shape that an operation with this constant broadcasts to."""
        full = torch.broadcast_shapes(self._full(x), constant.shape)  # type: ignore[no-untyped-call]
        return self._expanded(x, tuple(full))

    def _sub(self, a: Any, b: Any, alpha: float = 1) -> _Index:
        return self._add(a, b, -alpha)

    def _rsub(self, a: Any, b: Any, alpha: float = 1) -> _Index:
        return self._add(b, a, -alpha)

    def _mul(self, a: Any, b: Any) -> _Index:
        if isinstance(a, _Index) and isinstance(b, _Index):
            a, b = self._alike(a, b)
            axes = "abcdefgh"[: len(self._full(a))]
            return self._product(f"{axes},{axes}->{axes}", a, b, self._full(a))
        x, constant = (a, _tensor(b)) if isinstance(a, _Index) else (b, _tensor(a))
        x = self._wide_as(x, constant)
        return self._scaled(x, _sample(constant, self.nodes[x].shape, x.lead), None)

    def _pow(self, x: Any, exponent: Any) -> _Index:
        if not isinstance(x, _Index) or isinstance(exponent, _Index) or exponent != 2:
            raise self._refuse("a power other than the square")
        return self._mul(x, x)

    def _square(self, x: Any) -> _Index:
        return self._mul(x, x)

    def _div(self, a: Any, b: Any) -> _Index:
        if not isinstance(a, _Index) or isinstance(b, _Index):
            raise self._refuse("a division by a quantity that depends on the input")
        return self._mul(a, 1 / _tensor(b))

    def _neg(self, x: Any) -> _Index:
        return self._exactly(x, torch.tensor(-1.0, dtype=torch.float64), None)

    def _trim(self, last: int) -> Graph:
        """Only the nodes that the logits depend on, renumbered."""
        graph = self._partial(last)
        if len(graph.nodes[-1].shape) != 1 or graph.nodes[0].inputs:
            raise InputError("the model does not map a batch of samples to logits of shape (N, K).")
        return graph

    def _partial(self, last: int) -> Graph:
        """Only the nodes that one of them depends on, renumbered."""
        needed = {last}
        for i in range(last, -1, -1):
            if i in needed:
                needed.update(self.nodes[i].inputs)
        order = sorted(needed)
        number = {old: new for new, old in enumerate(order)}
        nodes = tuple(
            replace(self.nodes[i], inputs=tuple(number[j] for j in self.nodes[i].inputs))
            for i in order
        )
        return Graph(nodes, execution=Execution(self.dtype, refusal=self.mixed))


class _Index(int):
    """The index of a node, told apart from the plain numbers among an operation's arguments.

    lead: 1 if the program's tensor has an axis of length 1 before those of the node.
    """

    lead: int

    def __new__(cls, value: int, lead: int) -> _Index:
        self = super().__new__(cls, value)
        self.lead = lead
        return self


_FAR = (
    1e9  # what a mask puts in the place of minus infinity: right for attention with scores above it
)


def _operation(node: Any) -> str:
    """The name of an operation of the program; relu_ and relu are one."""
    name: str = getattr(getattr(node.target, "_schema", None), "name", str(node.target))
    return name.split("::")[-1].strip("_")


def _scores(program: Any) -> set[Any]:
    """The nodes of a program that go nowhere but into a softmax, by additions, masks and moves."""
    found: set[Any] = set()
    keep = _MOVES | _SAME | {"add", "sub", "where", "masked_fill"}
    for node in reversed(list(program.graph.nodes)):
        ways = [_operation(user) for user in node.users]
        good = [
            way == "softmax" or (way in keep and user in found)
            for way, user in zip(ways, node.users)
        ]
        if good and all(good):
            found.add(node)
    return found


def _lead(full: Sequence[int]) -> int:
    return int(len(full) > 0 and full[0] == 1)


def _wide(constant: Tensor) -> Tensor:
    constant = constant.detach().cpu()
    return constant.double() if constant.is_floating_point() else constant


def _tensor(constant: Any) -> Tensor:
    return torch.as_tensor(constant, dtype=torch.float64)


def _sample(constant: Any, shape: tuple[int, ...], lead: int) -> Tensor:
    """A constant that broadcasts against a tensor of the program, as one that broadcasts
    against a node's sample.
    """
    values = _tensor(constant)
    return values[0] if lead and values.ndim > len(shape) else values
