"""A network as a graph of nodes: affine maps, activations, products.

What a node computes is one of a few kinds (`Op`). Ask with `match node.op` and end with
`assert_never`: the type checker then names every place that a new kind has to be added to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.activations import ACTIVATIONS, Activation
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.execution import Call, Execution
from wassail.certificates.graph.maps import Linear, Matrix, Scale, moved_to
from wassail.certificates.graph.planes import Curve
from wassail.certificates.graph.switched import switched
from wassail.errors import InputError


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

    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`, from those of the inputs."""
        return self.shifted(self.map.forward(*given))

    def shifted(self, out: Tensor) -> Tensor:
        """What the map gave, with the bias."""
        return out if self.bias is None else out + self.bias

    def to(self, device: torch.device) -> Affine:
        """The same with its tensors on a device."""
        return Affine(
            self.map.to(device), moved_to(self.bias, device), moved_to(self.bias_most, device)
        )


@dataclass(frozen=True, eq=False)
class Relu:
    """`max(v, slope v)`, entry by entry; slope: in [0, 1], broadcasts against one sample."""

    slope: Tensor

    @cached_property
    def steepest(self) -> float:
        """The largest slope in size. A device is asked once."""
        return max(1.0, float(self.slope.abs().max()))

    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`."""
        return torch.where(given[0] > 0, given[0], self.slope * given[0])

    def to(self, device: torch.device) -> Relu:
        """The same with its tensors on a device."""
        return Relu(self.slope.to(device))


@dataclass(frozen=True)
class Smooth:
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

    def value(self, *given: Tensor) -> Tensor:
        """The values at samples `(m, *shape)`."""
        return self.function.value(given[0])


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
    def slope(self) -> Tensor | None:
        """The slope of a ReLU."""
        return self.op.slope if isinstance(self.op, Relu) else None

    @property
    def activation(self) -> str | None:
        """The name of a smooth activation."""
        return self.op.name if isinstance(self.op, Smooth) else None

    @property
    def curve(self) -> Curve | None:
        """The curve of a curved node."""
        return self.op.curve if isinstance(self.op, Curved) else None

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
        return any(isinstance(node.op, Smooth | Curved) for node in self.nodes)

    @property
    def curved(self) -> bool:
        """Whether there is a curve: a product, a softmax or a normalisation."""
        return any(isinstance(node.op, Curved) for node in self.nodes)

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
        return Graph(
            tuple(
                replace(node, op=Affine(node.op.map)) if isinstance(node.op, Affine) else node
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
            if isinstance(node.op, Smooth | Curved):
                raise InputError(
                    f"{node.op.name!r} at {node.place} is not piecewise linear: this method is for "
                    "ReLU networks, use one that takes smooth activations."
                )

    # long: it is one match over the kinds of nodes, which fill the same table
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
        # Every node as an affine function of (x, z): a batch of n + H + 1 columns, the last one the
        # constant.
        columns = n + total + 1
        start = n
        value: list[Tensor] = []
        depth: list[int] = []
        none = torch.zeros(0, dtype=torch.float64)
        rows = [none.new_zeros(0, columns)]
        slopes = [none]
        layers = [none.long()]
        for i, node in enumerate(self.nodes):
            clock.look()
            given = [value[j] for j in node.inputs]
            level = max((depth[j] for j in node.inputs), default=0)
            match node.op:
                case Relu(factor):
                    free = (sides[i] < 0).flatten()
                    slope = factor.expand(node.shape)
                    before = given[0].reshape(columns, -1)
                    after = (given[0] * torch.where(sides[i] == 1, 1.0, slope)).reshape(columns, -1)
                    where = free.nonzero().flatten()
                    count = int(free.sum())
                    after[:, where] = 0
                    after[torch.arange(start, start + count), where] = 1.0
                    rows.append(before[:, where].T)
                    slopes.append(slope.flatten()[where])
                    layers.append(torch.full((count,), level))
                    value.append(after.reshape(columns, *node.shape))
                    start = start + count
                    level = level + (count > 0)
                case Affine(map_, bias):
                    out = map_.forward(*given)
                    if bias is not None:  # not in place: a reshape returns a view of its input
                        out = torch.cat([out[:-1], out[-1:] + bias])
                    value.append(out)
                case Input():
                    eye = torch.eye(n, dtype=torch.float64)
                    value.append(F.pad(eye, (0, 0, 0, total + 1)).reshape(columns, *node.shape))
                case Smooth() | Curved():
                    raise AssertionError("refused by `relus`")
                case _:
                    assert_never(node.op)
            depth.append(level)
        table = torch.cat(rows)
        out = value[-1].reshape(columns, -1).T
        layer = torch.cat(layers)
        order = torch.argsort(layer, stable=True)  # layer by layer, as Piecewise stores them
        table = table[order]
        return Piecewise(
            table[:, :n],
            table[:, n:-1][:, order],
            table[:, -1],
            out[:, :n],
            out[:, n:-1][:, order],
            out[:, -1],
            torch.cat(slopes)[order],
            torch.unique(layer[order], return_inverse=True)[1],
        )


def sizes_of(op: Affine) -> Tensor:
    """The magnitudes that the bias of a node is a sum of."""
    size = op.bias_size
    assert isinstance(size, Tensor)
    return size
