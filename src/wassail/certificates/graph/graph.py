"""A network as a graph of nodes: affine maps, activations, products.

What a node computes is one of a few kinds (`Op`). Ask with `match node.op` and end with
`assert_never`: the type checker then names every place that a new kind has to be added to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, assert_never

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.activations import ACTIVATIONS, Activation
from wassail.certificates.graph.arc import Arc, ReluArc, SmoothArc
from wassail.certificates.graph.dense import Columns, Piecewise
from wassail.certificates.graph.maps import (
    Call,
    Execution,
    Linear,
    Matrix,
    Scale,
    moved_to,
    rounding_map,
)
from wassail.certificates.graph.planes import Curve, Span
from wassail.certificates.graph.switched import switched
from wassail.certificates.graph.tangent import AffineTangent, EntrywiseTangent, Tangent
from wassail.errors import InputError, JumpError
from wassail.rounding import FLOOR, UNIT, finite_size, outward

JUMPS = (
    "the {} of this network jumps where beta x passes its threshold {:g}, which may happen here, "
    "so that no Lipschitz constant bounds it: give it threshold=40, where the jump is below "
    "rounding, or use radii with method='crown'."
)
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Input:
    """The input of the network."""


@dataclass(frozen=True, eq=False)
class Affine:
    """`map(inputs) + bias`.

    bias: broadcasts against one sample; bias_most: the magnitudes that the bias is a sum of, if it
    is one.
    """

    map: Linear
    bias: Tensor | None = None
    bias_most: Tensor | None = None

    @property
    def bias_size(self) -> Tensor | float:
        """The magnitude of the bias that rounding errors are relative to."""
        if self.bias_most is not None:
            return self.bias_most
        return 0.0 if self.bias is None else self.bias.abs()

    @property
    def layer(self) -> tuple[Tensor, Tensor] | None:
        """`(W, b)` of a matrix whose numbers are exact, b for every row; None if it is none."""
        match self.map:
            case Matrix(weight, None) if self.bias_most is None:
                bias = weight.new_zeros(()) if self.bias is None else self.bias
                return weight, bias.expand(len(weight))
            case _:
                return None

    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`, from those of the inputs."""
        return self.shifted(self.map.forward(*given))

    def shifted(self, out: Tensor) -> Tensor:
        """What the map gave, with the bias."""
        return out if self.bias is None else out + self.bias

    def span(self, given: Sequence[Span], rounding: float) -> Span:
        """The range of the values from those of the inputs, rounded outward: `W+ low - W- high + b`
        and the other way round. Infinite sides are followed on their own: W+ and W- cannot cancel.

        rounding: the relative error of the weights.
        """
        map_ = self.map
        plus, minus = map_.signed()
        far = [(torch.isinf(a).double(), torch.isinf(b).double()) for a, b in given]
        near = [
            (torch.where(p > 0, 0.0, a), torch.where(q > 0, 0.0, b))
            for (a, b), (p, q) in zip(given, far)
        ]
        size = rounding_map(map_).forward(*[torch.maximum(a.abs(), b.abs()) for a, b in near])
        error = (rounding + UNIT * (map_.terms + 4)) * (size + self.bias_size)
        sides = []
        for k, sign in ((0, -1.0), (1, 1.0)):
            side, blown = plus.forward(*[v[k] for v in near]), plus.forward(*[v[k] for v in far])
            if minus is not None:
                side = side - minus.forward(*[v[1 - k] for v in near])
                blown = blown + minus.forward(*[v[1 - k] for v in far])
            side = self.shifted(side)
            sides.append(torch.where(blown > 0, sign * math.inf, side + sign * error))
        return sides[0], sides[1]

    def adjoint(self, g: Span, given: Sequence[Span], rounding: float) -> tuple[Span, ...]:
        """`W^T g` of gradients `(N, m, *shape)`: centre and radius; what an infinite entry feeds is
        infinite.
        """
        map_ = self.map
        lead = g[0].shape[:2]
        low, high = (side.flatten(0, 1) for side in g)
        far = torch.isinf(low) | torch.isinf(high)
        low = torch.where(far, 0.0, low)
        high = torch.where(far, 0.0, high)
        size = map_.magnitude()
        blown = size.transpose(far.double()) if far.any() else None
        wide = rounding + UNIT * (map_.terms + 4)
        much = rounding_map(map_).transpose(torch.maximum(low.abs(), high.abs()))
        parts = zip(map_.transpose((low + high) / 2), size.transpose((high - low) / 2), much)
        found = []
        for k, (centre, reach, most) in enumerate(parts):
            reach = reach + wide * most
            if blown is not None:
                reach = torch.where(blown[k] > 0, math.inf, reach)
            shape = (*lead, *centre.shape[1:])
            found.append(((centre - reach).reshape(shape), (centre + reach).reshape(shape)))
        return tuple(found)

    def tangent(self, given: Sequence[Span], rounding: float) -> Tangent:
        """The map is its own derivative."""
        return AffineTangent(self.map, rounding)

    def to(self, device: torch.device) -> Affine:
        """The same with its tensors on a device."""
        return Affine(
            self.map.to(device), moved_to(self.bias, device), moved_to(self.bias_most, device)
        )


class Entrywise(ABC):
    """An activation: a function of one number, entry by entry.

    seen: whether it jumps by more than a rounding of the model.
    """

    seen: bool = False

    @property
    @abstractmethod
    def kinks(self) -> tuple[float, ...]:
        """Where the derivative jumps."""

    @abstractmethod
    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`."""

    @abstractmethod
    def derivative_range(self, low: Tensor, high: Tensor) -> Span:
        """The range of the derivative on `[low, high]`, of their shape."""

    @abstractmethod
    def over(self, low: Tensor, high: Tensor) -> Arc:
        """What relaxations ask of it, with its input between two."""

    @property
    @abstractmethod
    def steepest(self) -> float:
        """The largest derivative in size on all of R, beside a jump, rounded up."""

    def jump(self, low: Tensor, high: Tensor) -> Tensor:
        """How far the model's function may be from the one that slopes are known of."""
        return torch.zeros_like(low)

    def adjoint(self, g: Span, given: Sequence[Span], rounding: float) -> tuple[Span, ...]:
        """The range of `f'(v) g` for gradients `(N, m, *shape)`."""
        least, top = self.derivative_range(*given[0])
        return (_times(g, (least[:, None], top[:, None])),)

    def tangent(self, given: Sequence[Span], rounding: float) -> Tangent:
        """Between the ends of the derivative's range."""
        return EntrywiseTangent.make(self.derivative_range(*given[0]))


@dataclass(frozen=True, eq=False)
class Relu(Entrywise):
    """`max(v, slope v)`, entry by entry; slope: in [0, 1], broadcasts against one sample."""

    slope: Tensor
    kinks = (0.0,)

    @cached_property
    def steepest(self) -> float:
        """The largest slope in size. A device is asked once."""
        return max(1.0, float(self.slope.abs().max()))

    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`."""
        return torch.where(given[0] > 0, given[0], self.slope * given[0])

    def span(self, given: Sequence[Span], rounding: float = 0.0) -> Span:
        """The range of the values, rounded outward."""
        low, high = (
            side.clamp(min=0) + torch.where(self.slope > 0, self.slope * side.clamp(max=0), 0.0)
            for side in given[0]
        )
        return outward(low, high)

    def over(self, low: Tensor, high: Tensor) -> Arc:
        """Two lines."""
        return ReluArc(self.slope, low, high)

    def derivative_range(self, low: Tensor, high: Tensor) -> Span:
        """One value where a neuron keeps its side."""
        least = torch.where((low >= 0) & (high > 0), 1.0, self.slope)
        return least, torch.where(high <= 0, self.slope, 1.0)

    def to(self, device: torch.device) -> Relu:
        """The same with its tensors on a device."""
        return Relu(self.slope.to(device))


@dataclass(frozen=True)
class Smooth(Entrywise):
    """A smooth activation, entry by entry; name: one of `ACTIVATIONS`.

    threshold: above it the model has the identity instead; seen: whether the jump there is more
    than a rounding of the model.
    """

    name: str
    threshold: float = math.inf
    seen: bool = False

    @property
    def function(self) -> Activation:
        """What is known of it."""
        if self.threshold == math.inf:
            return ACTIVATIONS[self.name]
        return switched(self.name, self.threshold, self.seen)

    @property
    def kinks(self) -> tuple[float, ...]:
        """As the function says."""
        return self.function.kinks

    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`."""
        return self.function.value(given[0])

    def span(self, given: Sequence[Span], rounding: float) -> Span:
        """The range of the values, rounded outward."""
        return self.function.span(*given[0])

    def over(self, low: Tensor, high: Tensor) -> Arc:
        """A piece of the curve."""
        return SmoothArc(self.function, low, high)

    @cached_property
    def steepest(self) -> float:
        """GELU 1.128905 (erf form), 1.128994 (tanh form), SiLU 1.099840 to six decimals."""
        far = torch.tensor(math.inf, dtype=torch.float64)
        least, top = self.function.derivative_range(-far, far)
        return max(-float(least), float(top))

    def jump(self, low: Tensor, high: Tensor) -> Tensor:
        """As the function says."""
        return self.function.jump(low, high)

    def derivative_range(self, low: Tensor, high: Tensor) -> Span:
        """A `JumpError` where the function has none."""
        if self.seen and bool(self.function.jumps(low, high).any()):
            raise JumpError(JUMPS.format(self.name, self.threshold))
        return self.function.derivative_range(low, high)


@dataclass(frozen=True, eq=False)
class Curved:
    """A smooth function that is not entry by entry: a product, softmax, normalised tokens."""

    curve: Curve

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self.curve).__name__.lower()

    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`."""
        return self.curve.value(*given)

    def span(self, given: Sequence[Span], rounding: float) -> Span:
        """The range of the values, rounded outward."""
        return self.curve.span(*given)

    def adjoint(self, g: Span, given: Sequence[Span], rounding: float) -> tuple[Span, ...]:
        """The range of `J^T g`."""
        return self.curve.adjoint(g, given)

    def tangent(self, given: Sequence[Span], rounding: float) -> Tangent:
        """As the curve says."""
        return self.curve.tangent(given)


def _times(g: Span, d: Span) -> Span:
    """The product of two intervals, rounded outward; 0 times infinity is 0: an infinite side
    stands for finite numbers.
    """
    products = [
        torch.nan_to_num(a * b, nan=0.0, posinf=math.inf, neginf=-math.inf) for a in g for b in d
    ]
    low = torch.minimum(
        torch.minimum(products[0], products[1]), torch.minimum(products[2], products[3])
    )
    high = torch.maximum(
        torch.maximum(products[0], products[1]), torch.maximum(products[2], products[3])
    )
    # Else it is 0, and nothing underflows.
    some = ((g[0] != 0) | (g[1] != 0)) & ((d[0] != 0) | (d[1] != 0))
    lost = some.double() * FLOOR[torch.float64]
    return low - UNIT * finite_size(low) - lost, high + UNIT * finite_size(high) + lost


Op: TypeAlias = Input | Affine | Relu | Smooth | Curved


@dataclass(frozen=True, eq=False)
class Node:
    """One step of the network.

    inputs: indices of earlier nodes; shape: of one sample; place: where it stands in the model; op:
    what it computes, one of a few kinds, to be asked with `match`; calls: the operations that are
    executed for it, none where it is exact in floating point, None where they are not known
    (`executed.py`); exponent: its values are those of the model times 2 to this power
    (`equilibrated`).
    """

    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    place: str
    op: Op = Input()
    calls: tuple[Call, ...] | None = None
    exponent: int = 0

    @property
    def map(self) -> Linear | None:
        """The map of an affine node."""
        return self.op.map if isinstance(self.op, Affine) else None

    @property
    def matrix(self) -> Tensor | None:
        """The weights of an affine node that is a matrix of one token, `(size, inputs)`."""
        return None if self.map is None or len(self.shape) > 1 else self.map.matrix

    @property
    def bias(self) -> Tensor | None:
        """The bias of an affine node."""
        return self.op.bias if isinstance(self.op, Affine) else None

    @property
    def bias_most(self) -> Tensor | None:
        """The magnitudes that the bias is a sum of."""
        return self.op.bias_most if isinstance(self.op, Affine) else None

    @property
    def bias_size(self) -> Tensor | float:
        """The magnitude of the bias that rounding errors are relative to."""
        return self.op.bias_size if isinstance(self.op, Affine) else 0.0

    @property
    def layer(self) -> tuple[Tensor, Tensor] | None:
        """Weights and bias of a matrix whose numbers are exact."""
        return self.op.layer if isinstance(self.op, Affine) else None

    @property
    def slope(self) -> Tensor | None:
        """The slope of a ReLU."""
        return self.op.slope if isinstance(self.op, Relu) else None

    @property
    def activation(self) -> str | None:
        """The name of a smooth activation."""
        return self.op.name if isinstance(self.op, Smooth) else None

    @property
    def smooth(self) -> bool:
        """Whether it is a smooth activation or a curve: not piecewise linear."""
        return isinstance(self.op, Smooth | Curved)

    @property
    def name(self) -> str:
        """What messages call a smooth activation or a curve."""
        return self.op.name if isinstance(self.op, Smooth | Curved) else ""

    @property
    def late(self) -> tuple[Call, ...]:
        """Calls of a ReLU: the product of a leaky one is rounded, and charged to its readers."""
        return (self.calls or ()) if isinstance(self.op, Relu) else ()

    @property
    def curve(self) -> Curve | None:
        """The curve of a curved node."""
        return self.op.curve if isinstance(self.op, Curved) else None

    @property
    def act(self) -> Relu | Smooth | None:
        """The activation of a node that is one: a function of one node, entry by entry."""
        return self.op if isinstance(self.op, Relu | Smooth) else None

    def derivative_range(self, low: Tensor, high: Tensor) -> Span:
        """The range of the derivative of an activation where its input lies between two."""
        assert self.act is not None
        return self.act.derivative_range(low, high)

    @property
    def _step(self) -> Affine | Relu | Smooth | Curved:
        assert not isinstance(self.op, Input), "the input is computed from nothing"
        return self.op

    def span(self, given: Sequence[Span], rounding: float) -> Span:
        """The range of its values from those of its inputs, `(N, *shape)`, rounded outward;
        rounding: the relative error of the weights.
        """
        return self._step.span(given, rounding)

    def adjoint(self, g: Span, given: Sequence[Span], rounding: float) -> tuple[Span, ...]:
        """The range of `J^T g`, rounded outward: g `(N, m, *shape)`, given: ranges of the inputs;
        `(N, m, *in)` for each.
        """
        return self._step.adjoint(g, given, rounding)

    def tangent(self, given: Sequence[Span], rounding: float) -> Tangent:
        """Its derivative where its inputs have these ranges."""
        return self._step.tangent(given, rounding)

    @property
    def size(self) -> int:
        """How many numbers it holds for one sample."""
        return math.prod(self.shape)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that say where it computes."""
        match self.op:
            case Affine(map_, bias, most):
                return [v for v in (*map_.tensors, bias, most) if v is not None]
            case Relu(slope):
                return [slope]
            case Input() | Smooth() | Curved():
                return []
            case _:
                assert_never(self.op)

    def to(self, device: torch.device) -> Node:
        """The same node with its tensors on a device."""
        op = self.op.to(device) if isinstance(self.op, Affine | Relu) else self.op
        calls = None if self.calls is None else tuple(call.to(device) for call in self.calls)
        return replace(self, op=op, calls=calls)


@dataclass(frozen=True, eq=False)
class Graph:
    """A network: nodes in topological order, the first the input, the last the logits; piecewise
    linear or smooth.

    rounding: relative error of the weights themselves, where they were computed; arithmetic: what
    bounds on it hold for, the "exact" function or the network as "executed"; execution: what is
    known of that; common: the model's outputs are these up to one number for each sample (a
    log-softmax at the end).
    """

    nodes: tuple[Node, ...]
    rounding: float = 0.0
    arithmetic: str = "exact"
    execution: Execution | None = None
    common: bool = False

    @cached_property
    def _derived(self) -> dict[str, Any]:
        return {}

    def kept(self, name: str, make: Callable[[], _T]) -> _T:
        """What `make` returns: made once, and kept with the graph, which does not change."""
        if name not in self._derived:
            self._derived[name] = make()
        found: _T = self._derived[name]
        return found

    @cached_property
    def device(self) -> torch.device:
        """Where its tensors are, and so where bounds are computed; the CPU if it has none."""
        return next((v.device for node in self.nodes for v in node.tensors), HOST)

    def to(self, device: torch.device) -> Graph:
        """The same network with its tensors on a device."""
        if device == self.device:
            return self
        return replace(self, nodes=tuple(node.to(device) for node in self.nodes))

    @property
    def inputs(self) -> int:
        """n, the number of inputs."""
        return self.nodes[0].size

    @property
    def outputs(self) -> int:
        """K, the number of logits."""
        return self.nodes[-1].size

    @property
    def smooth(self) -> bool:
        """Whether there is a smooth activation or a curve: it is not piecewise linear."""
        return any(node.smooth for node in self.nodes)

    @property
    def curved(self) -> bool:
        """Whether there is a curve: a product, a softmax or a normalisation."""
        return any(node.curve is not None for node in self.nodes)

    def weighted(self, j: int) -> bool:
        """Whether weights lie between node j and the activations before it. None do where maxima
        are written as ReLUs: those add next to no rounding, and do not count as depth.
        """
        map_ = self.nodes[j].map
        if map_ is None:
            return False
        if map_.coefficients is not None and not isinstance(map_, Scale):
            return True
        return any(self.weighted(k) for k in self.nodes[j].inputs)

    @property
    def relus(self) -> list[int]:
        """The indices of the ReLU nodes of a piecewise-linear network."""
        self.refuse_smooth()
        return [i for i, node in enumerate(self.nodes) if isinstance(node.op, Relu)]

    @property
    def read_by_others(self) -> set[int]:
        """The nodes that something nonlinear reads."""
        return {j for node in self.nodes if not isinstance(node.op, Affine) for j in node.inputs}

    @cached_property
    def users(self) -> list[list[int]]:
        """For each node the nodes that read it, one that reads it twice twice."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for j in node.inputs:
                found[j].append(i)
        return found

    @property
    def neurons(self) -> int:
        """H, the number of ReLUs."""
        return sum(self.nodes[i].size for i in self.relus)

    @property
    def operations(self) -> int:
        """Multiplications of a forward pass of one sample: what budgets of work are counted in."""
        return sum(
            node.size * (node.op.map.fan_in if isinstance(node.op, Affine) else 1)
            for node in self.nodes
        )

    def values(self, x: Tensor) -> list[Tensor]:
        """Every node at samples `(m, *shape)` in float64, where the network is."""
        x = x.to(self.device)
        found: list[Tensor] = []
        for node in self.nodes:
            given = [found[i] for i in node.inputs]
            match node.op:
                case Input():
                    found.append(x.double())
                case Affine() | Relu() | Smooth() | Curved():
                    found.append(node.op.value(*given))
                case _:
                    assert_never(node.op)
        return found

    def logits(self, x: Tensor) -> Tensor:
        """`theta` at samples `(m, *shape)`: `(m, K)` in float64."""
        return self.values(x)[-1]

    def homogeneous(self) -> Graph:
        """The same network with all biases zero: its recession function (THEORY 3), if it is
        piecewise linear.
        """
        self.refuse_smooth()
        return self.with_maps(lambda op: Affine(op.map))

    def absolute(self) -> Graph:
        """The network of absolute weights and biases."""

        def sizes(op: Affine) -> Affine:
            bias = None if op.bias is None and op.bias_most is None else sizes_of(op)
            return Affine(rounding_map(op.map), bias, op.bias_most)

        return self.with_maps(sizes)

    def with_maps(self, change: Callable[[Affine], Affine]) -> Graph:
        """The network with other affine nodes, in exact arithmetic."""
        return Graph(
            tuple(
                replace(node, op=change(node.op)) if isinstance(node.op, Affine) else node
                for node in self.nodes
            )
        )

    def head(self, weight: Tensor) -> Graph:
        """The network followed by a linear map `(J, K)`, merged into the last layer where that
        is a matrix.
        """
        last = self.nodes[-1]
        weight = weight.to(self.device).double()
        match last.op:
            case Affine(Matrix(own), bias, most):
                bias = None if bias is None else weight @ bias.expand(last.shape)
                most = None if most is None else weight.abs() @ most.expand(last.shape)
                op = Affine(Matrix(weight @ own), bias, most)
                return Graph((*self.nodes[:-1], replace(last, op=op, shape=(len(weight),))))
            case _:
                op = Affine(Matrix(weight))
                node = Node((len(self.nodes) - 1,), (len(weight),), "the margins", op)
                return Graph((*self.nodes, node))

    def refuse_smooth(self) -> None:
        """An `InputError` that names the first smooth activation or curve, if there is one."""
        for node in self.nodes:
            if node.smooth:
                raise InputError(
                    f"{node.name!r} at {node.place} is not piecewise linear: this method is for "
                    "ReLU networks, use one that takes smooth activations."
                )

    def piecewise(self, states: Mapping[int, Tensor] | None = None, limit: int = 5000) -> Piecewise:
        """The dense form, for networks of at most `limit` free neurons; on the CPU, where exact
        programs are solved.

        states: for ReLU nodes, of the node's shape, 1 where a neuron is always active, 0 where
        never, -1 where it is free; neurons with a side are replaced by the linear function they
        are.
        """
        if self.device != HOST:
            return self.to(HOST).piecewise(
                None if states is None else {i: s.to(HOST) for i, s in states.items()}, limit
            )
        sides = {
            i: torch.full(self.nodes[i].shape, -1) if states is None else states[i]
            for i in self.relus
        }
        n = self.inputs
        total = sum(int((side < 0).sum()) for side in sides.values())
        if total > limit:
            raise InputError(
                f"{total} ReLUs may change sides here: exact methods take at most {limit}, use "
                "method='propagate'."
            )
        columns = Columns(n, total)
        value: list[Tensor] = []
        depth: list[int] = []
        for i, node in enumerate(self.nodes):
            clock.look()
            given = [value[j] for j in node.inputs]
            level = max((depth[j] for j in node.inputs), default=0)
            if not node.inputs:
                value.append(columns.start(node.shape))
            elif node.map is not None:
                value.append(columns.affine(node.map, node.bias, given))
            else:
                assert node.slope is not None, "refused by `relus`"
                slope = node.slope.expand(node.shape)
                value.append(columns.relu(slope, sides[i], given[0], level))
                level = level + bool((sides[i] < 0).any())
            depth.append(level)
        return columns.network(value[-1])


def sizes_of(op: Affine) -> Tensor:
    """The magnitudes that the bias of a node is a sum of."""
    size = op.bias_size
    assert isinstance(size, Tensor)
    return size
