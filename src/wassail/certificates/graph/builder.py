"""A graph while it is built from a program, node by node.

A scale beside a matrix or a convolution is folded into it, so that norms see one map; moves one
after another are one move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Op, Relu, Smooth, sizes_of
from wassail.certificates.graph.maps import FEW, Call, Execution, Linear, Pick, Scale, Sum
from wassail.certificates.graph.planes import Curve
from wassail.certificates.graph.restrict import reached
from wassail.certificates.graph.switched import jump_at
from wassail.errors import InputError, JumpError

WAY_OUT = "attacks still work, and ws.smoothed certifies any model"
GONE = 2.0**1000  # stands for infinity in a mask until the softmax that it is for leaves it out


def several(value: Any, axes: int) -> tuple[int, ...]:
    """A number for all axes, or one for each."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return tuple(int(v) for v in (values * axes if len(values) == 1 else values))


def fold_call(map_: Linear, bias: Tensor | None) -> Call:
    """What is executed for an affine map and its bias: a sum of products for each entry, or one
    product.
    """
    return Call(map_, None if bias is None else bias.abs(), map_.roundings)


def added_bias(moved: Tensor, bias: Tensor | None, most: Tensor | None) -> Tensor:
    """The magnitudes of a bias that was moved through a map, and of one that is added to it.

    Twice: the factors of the map were rounded before, and the sum is rounded after.
    """
    size = most if most is not None else torch.zeros_like(moved) if bias is None else bias.abs()
    return 2 * (moved + size)


def fold_calls(node: Node) -> tuple[Call, ...]:
    """What is executed for an affine node, to be followed by more: an exact one is a call, too."""
    if node.calls or not isinstance(node.op, Affine):
        return node.calls or ()
    return (Call(node.op.map, None if node.op.bias is None else node.op.bias.abs()),)


def moved_call(call: Call, entries: Callable[[Tensor], Tensor]) -> Call:
    """The same operation, entry by entry, after the entries have moved."""
    assert isinstance(call.map, Scale)
    parts = (call.map.factor, call.bias, call.noise)
    factor, bias, noise = (
        v if v is None else v.reshape(()) if v.numel() == 1 else entries(v) for v in parts
    )
    assert factor is not None
    return replace(call, map=Scale(factor), bias=bias, noise=noise)


def window_of(
    name: str,
    full: Sequence[int],
    output: Sequence[int],
    args: list[Any],
    options: Mapping[str, Any],
) -> int:
    """How many entries an average or a sum takes at most."""
    if name in ("mean", "sum"):
        return math.prod(full) // math.prod(output)
    if name.startswith("adaptive"):
        return math.prod(-(-n // m) + 1 for n, m in zip(full[-2:], output[-2:]))
    tall, wide = several(args[0] if args else options["kernel_size"], 2)
    return wide if name.endswith("1d") else tall * wide


class Index(int):
    """The index of a node, told apart from the plain numbers among an operation's arguments.

    lead: 1 if the program's tensor has an axis of length 1 before those of the node; -1 if it is a
    single number, since a node has one axis at least.
    """

    lead: int

    def __new__(cls, value: int, lead: int) -> Index:
        """An int with one attribute more."""
        self = super().__new__(cls, value)
        self.lead = lead
        return self


class Builder:
    """The nodes so far, and the ways to add one.

    The tensor that an index stands for in the program has the shape of the node, with one axis of
    length 1 before it if the index says so (`lead`): the batch axis, as a rule.

    Args:
        shape: of one sample.
        smooth: whether smooth activations and curves are read.
        dtype: the type that the model computes in.
    """

    def __init__(self, shape: tuple[int, ...], smooth: bool, dtype: torch.dtype) -> None:
        self.nodes = [Node((), shape, "the input")]
        self.smooth = smooth
        self.dtype = dtype
        self.place = ""  # where the operation that is translated stands in the model
        self.name = ""  # what torch calls it
        self.target: Any = None  # torch's own function for it
        self.mixed = ""  # why the executed network is not covered, if it is not
        # whether what is translated goes nowhere but into a softmax: minus infinity is a mask there
        self.masks = False
        self.final = False  # whether what is translated is the output
        self.common = False  # whether the outputs are the logits up to one number a sample
        self.pairs: dict[tuple[int, ...], Index] = {}  # that were compared

    def refuse(self, what: str) -> InputError:
        """An `InputError` that names what is not read, and where it stands."""
        more = (
            ", sigmoid, tanh, GELU, SiLU, Softplus, ELU, LayerNorm, softmax attention, products"
            if self.smooth
            else ""
        )
        return InputError(
            f"{what!r} at {self.place} is not supported: certificates read linear and "
            "convolutional layers, frozen batch norm, "
            f"ReLU, leaky ReLU{more}, additions, concatenations, reshapes and poolings ({WAY_OUT})."
        )

    def jumps(self, what: str) -> JumpError:
        """The same for a function with a jump, which no other spelling makes continuous."""
        return JumpError(str(self.refuse(f"{what}, which jumps,")))

    def add(
        self,
        op: Op,
        *parts: int,
        shape: tuple[int, ...] | None = None,
        calls: tuple[Call, ...] | None = None,
        lead: int | None = None,
    ) -> Index:
        """A node for the operation that is translated.

        Args:
            op: what it computes.
            parts: the nodes that it reads.
            shape: of one sample; default that of the first part.
            calls: what is executed; default None, not known.
            lead: of the index; default that of the first part.
        """
        first = parts[0]
        shape = self.nodes[first].shape if shape is None else shape
        if lead is None:
            assert isinstance(first, Index)
            lead = first.lead
        return self._append(Node(parts, shape, self.place, op, calls), lead)

    def _append(self, node: Node, lead: int) -> Index:
        self.nodes.append(node)
        return Index(len(self.nodes) - 1, lead)

    def full(self, x: Index) -> tuple[int, ...]:
        """The shape of the tensor that an index stands for in the program."""
        shape = self.nodes[x].shape
        return () if x.lead < 0 else (1,) * x.lead + shape

    def single(self, x: Index) -> bool:
        """Whether it is one number for each sample, so that its only axis is that of the batch."""
        return self.full(x) in ((), (1,))

    def axis(self, x: Index, dim: int) -> int:
        """An axis of that tensor as an axis of a batch `(m, *shape)`; 0 is the batch axis and
        refused.
        """
        full = self.full(x)
        axis = dim % max(len(full), 1) + 1 - x.lead
        if not axis or self.single(x):
            raise self.refuse("an operation across the batch axis")
        return axis

    def affine(
        self,
        map_: Linear,
        bias: Tensor | None,
        source: Index,
        shape: tuple[int, ...],
        calls: tuple[Call, ...] | None = None,
        most: Tensor | None = None,
    ) -> Index:
        """A node of its own, or folded with the one before it.

        Args:
            map_: the map.
            bias: what is added.
            source: the node before it.
            shape: of one sample.
            calls: what is executed, if it is not the map itself.
            most: the magnitudes that the bias is a sum of, if it is one.
        """
        before = self.nodes[source]
        calls = (fold_call(map_, bias),) if calls is None else calls
        match before.op:
            case Affine(Scale(factor), own) if not self._is_gain(before):
                folded = map_.fold_before(factor, before.shape)
                if folded is not None:
                    if own is not None:
                        shift = map_.forward(own.expand(before.shape)[None])[0]
                        sizes = sizes_of(before.op).expand(before.shape)[None]
                        most = added_bias(map_.magnitude().forward(sizes)[0], bias, most)
                        bias = shift if bias is None else shift + bias
                    start = Index(before.inputs[0], source.lead)
                    both = (*fold_calls(before), *calls)
                    return self.affine(folded, bias, start, shape, both, most)
            case _:
                pass
        return self.add(Affine(map_, bias, most), source, shape=shape, calls=calls)

    def scaled(
        self,
        source: Index,
        factor: Tensor,
        bias: Tensor | None,
        call: Call | None = None,
        most: Tensor | None = None,
    ) -> Index:
        """`factor x + bias`, entry by entry.

        Args:
            source: the node of x.
            factor: broadcasts against one sample.
            bias: broadcasts against one sample.
            call: what is executed, if it is not this.
            most: the magnitudes that the bias is a sum of, if it is one.
        """
        before = self.nodes[source]
        call = fold_call(Scale(factor), bias) if call is None else call
        calls = (*fold_calls(before), call)
        sizes = (before.shape, factor.shape, () if bias is None else bias.shape)
        if tuple(torch.broadcast_shapes(*sizes)) != before.shape:  # type: ignore[no-untyped-call]
            raise self.refuse("a broadcast against a constant")
        if isinstance(before.op, Affine):
            folded = before.op.map.fold_after(factor, before.shape)
            if folded is None and bias is not None and bool((factor == 1).all()):
                folded = before.op.map  # a shift only, as of a position embedding
            if folded is not None:
                if before.op.bias is not None:
                    most = added_bias(sizes_of(before.op) * factor.abs(), bias, most)
                    moved = before.op.bias * factor
                    bias = moved if bias is None else moved + bias
                op = Affine(folded, bias, most)
                return self._append(replace(before, op=op, calls=calls), source.lead)
        return self.affine(Scale(factor), bias, source, before.shape, (call,), most)

    def exactly(self, source: Index, factor: Tensor, bias: Tensor | None) -> Index:
        """The same as a part of an operation that is exact in floating point, but for the
        constant itself.
        """
        noise = None if bias is None else (bias - bias.to(self.dtype).double()).abs()
        call = Call(Scale(factor), None if bias is None else bias.abs(), 0, noise)
        return self.scaled(source, factor, bias, call)

    def relu(self, source: Index, slope: Tensor | float = 0.0) -> Index:
        """`x` where it is positive, else `slope x`.

        With slopes outside [0, 1]: `slope x + (1 - slope) relu(x)`, the same two lines.
        """
        slope = torch.as_tensor(slope, dtype=torch.float64)
        if not bool(torch.isfinite(slope).all()):
            raise self.refuse("a leaky ReLU whose slope is not finite")
        if not ((slope >= 0) & (slope <= 1)).all():
            return self._steep(source, slope)
        exact = bool(((slope == 0) | (slope == 1)).all())
        # Relative to what comes out.
        calls = () if exact else (fold_call(Scale(torch.ones_like(slope)), None),)
        return self.add(Relu(slope), source, calls=calls)

    def _steep(self, source: Index, slope: Tensor) -> Index:
        bent = self.relu(source)
        straight = self.add(Affine(Scale(slope)), source, calls=())
        bent = self.add(Affine(Scale(1 - slope)), bent, calls=())
        # The model rounds one product; its error is below that of this sum.
        return self.add(Affine(Sum(2)), straight, bent, calls=(Call(Sum(2), None, FEW),))

    def activation(self, source: Index, name: str, threshold: float = math.inf) -> Index:
        """A smooth activation by its name; threshold: above it the model has the identity."""
        if not self.smooth:
            raise self.refuse(name)
        seen = jump_at(threshold) > torch.finfo(self.dtype).eps * abs(threshold)
        return self.add(Smooth(name, threshold, seen and threshold < math.inf), source)

    def curve(self, curve: Curve, what: str, *parts: Index, lead: int) -> Index:
        """A curve of one or two nodes."""
        if not self.smooth:
            raise self.refuse(what)
        shape = curve.output(*(self.nodes[p].shape for p in parts))
        return self.add(Curved(curve), *parts, shape=shape, lead=lead)

    def sum(self, parts: Sequence[Index], exact: bool = False) -> Index:
        """exact: it is a part of an operation that is exact in floating point."""
        parts = self.alike(*parts)
        total = Sum(len(parts))
        calls = () if exact else (Call(total, None, len(parts)),)
        return self.add(Affine(total), *parts, calls=calls)

    def alike(self, *parts: Index) -> list[Index]:
        """All of one shape, as broadcasting would make them."""
        sizes = [self.full(p) for p in parts]
        full = torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]
        return [self.expanded(p, tuple(full)) for p in parts]

    def expanded(self, x: Index, full: tuple[int, ...]) -> Index:
        """The value, expanded to a shape."""
        if self.full(x) == full:
            return x
        return self.move(torch.Tensor.expand, x, list(full), {})  # type: ignore[no-any-return]

    def constant(self, values: Tensor) -> Index:
        """A constant tensor as a node: nothing of the input, plus a bias."""
        lead, shape = parted(values.shape)
        nothing = Pick(torch.full((values.numel(),), -1), self.nodes[0].shape, shape)
        op = Affine(nothing, values.double().reshape(shape))
        return self.add(op, 0, shape=shape, calls=(), lead=lead)

    def larger(self, a: Index, b: Index) -> Index:
        """`max(a, b) = a + relu(b - a)`."""
        return self.sum([a, self._excess(a, b)], exact=True)

    def smaller(self, a: Index, b: Index) -> Index:
        """`min(a, b) = b - relu(b - a)`, with the same ReLU."""
        return self.sum([b, self.negative(self._excess(a, b))], exact=True)

    def _excess(self, a: Index, b: Index) -> Index:
        """`relu(b - a)`, made once for a pair."""
        key = (a, a.lead, b, b.lead)
        if key not in self.pairs:
            self.pairs[key] = self.relu(self.difference(b, a))
        return self.pairs[key]

    def difference(self, a: Index, b: Index) -> Index:
        """`a - b`, as a part of an operation that is exact."""
        return self.sum([a, self.negative(b)], exact=True)

    def move(self, target: Any, source: Index, args: list[Any], options: dict[str, Any]) -> Any:
        """Data movement, and constants that come in: run the operation on the numbers 1, 2, 3, ...
        and see where they went.
        """
        full = self.full(source)
        count = torch.arange(1, math.prod(full) + 1, dtype=torch.float64).reshape(full)
        with torch.no_grad():
            moved, turned = target(count, *args, **options), target(-count, *args, **options)
        if isinstance(moved, Tensor):
            return self._picked(source, moved, turned)
        return [self._picked(source, *pair) for pair in zip(moved, turned)]

    def _picked(self, source: Index, moved: Tensor, turned: Tensor) -> Index:
        """moved: the numbers where they went; turned: the same for their negatives, which tells
        them from constants.
        """
        lead, output = parted(moved.shape)
        fixed = moved == turned
        where = torch.where(fixed, 0.0, moved).flatten().long()
        if not torch.equal(torch.where(fixed, moved, -turned), moved):
            raise self.refuse("an operation that does more than move entries")
        found = self.placed(source, where - 1, output, lead)
        constants = torch.where(fixed, moved, 0.0)
        if not bool(constants.any()):
            return found
        one = torch.tensor(1.0, dtype=torch.float64)
        return self.exactly(found, one, self.masked(constants.reshape(output)))

    def placed(self, source: int, where: Tensor, output: tuple[int, ...], lead: int) -> Index:
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
                return self.placed(node.inputs[0], there, output, lead)
            case Affine(Scale(factor), own, sizes) if not self._is_gain(node):
                factor = factor.reshape(()) if factor.numel() == 1 else entries(factor)
                bias, most = (None if v is None else entries(v) for v in (own, sizes))
                calls = tuple(moved_call(call, entries) for call in fold_calls(node))
                start_ = self.placed(node.inputs[0], where, output, lead)
                return self.affine(Scale(factor), bias, start_, output, calls, most)
            case _:
                pass
        same = torch.equal(where, torch.arange(node.size))
        if same and output == node.shape:
            return Index(source, lead)
        move = Pick(None if same else where, node.shape, output)
        return self.add(Affine(move), source, shape=output, calls=(), lead=lead)

    def _is_gain(self, node: Node) -> bool:
        """Whether it is the gain of a LayerNorm, which is left in its place."""
        if not node.inputs:
            return False
        op = self.nodes[node.inputs[0]].op
        return isinstance(op, Curved) and op.curve.keeps_gain

    def along(self, x: Index, dim: int) -> list[int]:
        """The shape in which a vector along an axis broadcasts against one sample."""
        axis = self.axis(x, dim)
        return [-1 if i == axis - 1 else 1 for i in range(len(self.nodes[x].shape))]

    def fixed(self, value: Any) -> Any:
        """A constant, or it is refused: an index is a number, and would be taken for one."""
        flat, _ = torch.utils._pytree.tree_flatten(value)
        if any(isinstance(v, Index) for v in flat):
            raise self.refuse("an operation whose parameter depends on the input")
        return value

    def wide_as(self, x: Index, constant: Tensor) -> Index:
        """The value, expanded to the shape that an operation with this constant broadcasts to."""
        full = torch.broadcast_shapes(self.full(x), constant.shape)  # type: ignore[no-untyped-call]
        return self.expanded(x, tuple(full))

    def masked(self, constant: Tensor) -> Tensor:
        """A constant that is added, or takes the place of a value: finite, which minus infinity
        is before a softmax.
        """
        if self.masks:
            constant = torch.where(constant == -math.inf, -GONE, constant)
        if not torch.isfinite(constant).all():
            raise self.refuse("an infinite constant that is no mask of a softmax")
        return constant

    def negative(self, x: Any) -> Index:
        """`-x`, exactly."""
        return self.exactly(x, torch.tensor(-1.0, dtype=torch.float64), None)

    def partial(self, last: int) -> Graph:
        """Only the nodes that one of them depends on, renumbered."""
        nodes = reached(self.nodes, last)
        refusal = self.mixed or ("a log-softmax at the end" if self.common else "")
        return Graph(nodes, execution=Execution(self.dtype, refusal=refusal), common=self.common)


def parted(full: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The shape of a tensor of the program as that of a node and the `lead` of its index.

    A first axis of length 1 is that of the batch. One number for each sample has an axis of its
    own: no node has the shape ().
    """
    if len(full) < 2:
        return (0, tuple(full)) if len(full) else (-1, (1,))
    lead = int(full[0] == 1)
    return lead, tuple(full[lead:])


def tensor_of(constant: Any) -> Tensor:
    """A constant in float64."""
    return torch.as_tensor(constant, dtype=torch.float64)


def sample_of(constant: Any, shape: tuple[int, ...], lead: int) -> Tensor:
    """A constant that broadcasts against a tensor of the program, as one that broadcasts
    against a node's sample.
    """
    values = tensor_of(constant)
    return values[0] if lead and values.ndim > len(shape) else values
