"""A network as a graph of nodes: affine maps, activations, products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.device import HOST
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.execution import Execution, Step
from wassail.certificates.graph.maps import Linear, Matrix, fan_in, moved_to
from wassail.certificates.graph.planes import Curve
from wassail.errors import InputError


@dataclass(frozen=True, eq=False)
class Node:
    """One step of the network: the input (no inputs), an affine map, a ReLU (slope given), a smooth
    activation or a curve.

    inputs: indices of earlier nodes; shape: of one sample; bias: broadcasts against one sample;
    slope: the derivative where the ReLU is off, in [0, 1], broadcasts against one sample; place:
    where it stands in the model; bias_most: the magnitudes that the bias is a sum of, if it is one;
    activation: the name of a smooth activation, one of `ACTIVATIONS`; curve: a smooth function that
    is not entry by entry (a product, softmax, normalised tokens); steps: the operations that are
    executed for it, none where it is exact in floating point, None where they are not known
    (`executed.py`); exponent: its values are those of the model times 2 to this power
    (`equilibrated`).
    """

    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    place: str
    map: Linear | None = None
    bias: Tensor | None = None
    slope: Tensor | None = None
    bias_most: Tensor | None = None
    activation: str | None = None
    curve: Curve | None = None
    steps: tuple[Step, ...] | None = None
    exponent: int = 0

    @property
    def bias_size(self) -> Tensor | float:
        """The magnitude of the bias that rounding errors are relative to."""
        return (
            self.bias_most
            if self.bias_most is not None
            else 0.0
            if self.bias is None
            else self.bias.abs()
        )

    @property
    def size(self) -> int:
        """How many numbers it holds for one sample."""
        return math.prod(self.shape)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that say where it computes."""
        own = [getattr(self.map, name, None) for name in ("weight", "factor", "source")]
        return [v for v in (*own, self.bias, self.slope, self.bias_most) if isinstance(v, Tensor)]

    def to(self, device: torch.device) -> Node:
        """The same node with its tensors on a device."""
        return replace(
            self,
            map=None if self.map is None else self.map.to(device),
            bias=moved_to(self.bias, device),
            slope=moved_to(self.slope, device),
            bias_most=moved_to(self.bias_most, device),
            steps=None if self.steps is None else tuple(step.to(device) for step in self.steps),
        )


@dataclass(frozen=True, eq=False)
class Graph:
    """A network: nodes in topological order, the first the input, the last the logits; piecewise
    linear or smooth.

    rounding: relative error of the weights themselves, where they were computed; arithmetic: what
    bounds on it hold for, the "exact" function or the network as "executed"; execution: what is
    known of that.
    """

    nodes: tuple[Node, ...]
    rounding: float = 0.0
    arithmetic: str = "exact"
    execution: Execution | None = None

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
        return any(node.activation is not None or node.curve is not None for node in self.nodes)

    @property
    def curved(self) -> bool:
        """Whether there is a curve: a product, a softmax or a normalisation."""
        return any(node.curve is not None for node in self.nodes)

    @property
    def relus(self) -> list[int]:
        """The indices of the ReLU nodes of a piecewise-linear network."""
        self.refuse_smooth()
        return [i for i, node in enumerate(self.nodes) if node.slope is not None]

    @property
    def neurons(self) -> int:
        """H, the number of ReLUs."""
        return sum(self.nodes[i].size for i in self.relus)

    @property
    def operations(self) -> int:
        """Multiplications of a forward pass of one sample: what budgets of work are counted in."""
        return sum(node.size * (1 if node.map is None else fan_in(node.map)) for node in self.nodes)

    def values(self, x: Tensor) -> list[Tensor]:
        """Every node at samples `(m, *shape)` in float64, where the network is."""
        x = x.to(self.device)
        found: list[Tensor] = []
        for node in self.nodes:
            given = [found[i] for i in node.inputs]
            if node.slope is not None:
                found.append(torch.where(given[0] > 0, given[0], node.slope * given[0]))
            elif node.activation is not None:
                found.append(ACTIVATIONS[node.activation].value(given[0]))
            elif node.curve is not None:
                found.append(node.curve.value(*given))
            elif node.map is not None:
                found.append(_biased(node.map.forward(*given), node.bias))
            else:
                found.append(x.double())
        return found

    def logits(self, x: Tensor) -> Tensor:
        """`theta` at samples `(m, *shape)`: `(m, K)` in float64."""
        return self.values(x)[-1]

    def homogeneous(self) -> Graph:
        """The same network with all biases zero: its recession function (THEORY 3), if it is
        piecewise linear.
        """
        self.refuse_smooth()
        return Graph(tuple(replace(node, bias=None, bias_most=None) for node in self.nodes))

    def head(self, weight: Tensor) -> Graph:
        """The network followed by a linear map `(J, K)`, merged into the last layer where that
        is a matrix.
        """
        last = self.nodes[-1]
        weight = weight.to(self.device).double()
        bias = None if last.bias is None else weight @ last.bias.expand(last.shape)
        most = None if last.bias_most is None else weight.abs() @ last.bias_most.expand(last.shape)
        if isinstance(last.map, Matrix):
            node = replace(
                last,
                map=Matrix(weight @ last.map.weight),
                bias=bias,
                bias_most=most,
                shape=(len(weight),),
            )
            return Graph((*self.nodes[:-1], node))
        node = Node((len(self.nodes) - 1,), (len(weight),), "the margins", Matrix(weight))
        return Graph((*self.nodes, node))

    def refuse_smooth(self) -> None:
        """An `InputError` that names the first smooth activation or curve, if there is one."""
        for node in self.nodes:
            if node.activation is not None or node.curve is not None:
                what = node.activation or type(node.curve).__name__.lower()
                raise InputError(
                    f"{what!r} at {node.place} is not piecewise linear: this method is for ReLU "
                    "networks, "
                    "use one that takes smooth activations."
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
            given = [value[j] for j in node.inputs]
            level = max((depth[j] for j in node.inputs), default=0)
            if node.slope is not None:
                free = (sides[i] < 0).flatten()
                slope = node.slope.expand(node.shape)
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
            elif node.map is not None:
                out = node.map.forward(*given)
                if node.bias is not None:
                    out[-1] = out[-1] + node.bias
                value.append(out)
            else:
                value.append(
                    F.pad(torch.eye(n, dtype=torch.float64), (0, 0, 0, total + 1)).reshape(
                        columns, *node.shape
                    )
                )
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


def sizes_of(node: Node) -> Tensor:
    """The magnitudes that the bias of a node is a sum of."""
    size = node.bias_size
    assert isinstance(size, Tensor)
    return size


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
