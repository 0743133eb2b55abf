"""One form for every piecewise-linear network: a list of neurons between affine maps.

    v = A x + B z + c,    z_h = max(v_h, slope_h v_h),    theta(x) = C x + D z + e,       B strictly
    lower triangular.

Linear and convolutional layers, folded batch norms, residual additions, concatenations, poolings (a
maximum of two numbers is `a + relu(b - a)`) all end up here, so masks, cells, slopes and branch and
bound are written once, for this form. Everything is float64 on the CPU and inputs are flat. It is
dense: made for networks of up to a few thousand neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.graph.maps import Linear, Matrix


@dataclass(frozen=True, eq=False)
class Piecewise:
    """A network `R^n -> R^K` with H neurons in topological order.

    A `(H, n)`, B `(H, H)`, c `(H,)`, C `(K, n)`, D `(K, H)`, e `(K,)`; slope `(H,)`: the derivative
    of each neuron where it is negative (0 for ReLU), at most 1; layer `(H,)`: neurons of one layer
    do not feed each other, layers count from 0.
    """

    A: Tensor
    B: Tensor
    c: Tensor
    C: Tensor
    D: Tensor
    e: Tensor
    slope: Tensor
    layer: Tensor

    @classmethod
    def from_layers(cls, layers: Sequence[tuple[Tensor, Tensor]], slope: float = 0.0) -> Piecewise:
        """A multi-layer perceptron from its `(W, b)`, with an activation between them."""
        weights = [(torch.as_tensor(w).double(), torch.as_tensor(b).double()) for w, b in layers]
        inputs = weights[0][0].shape[1]
        columns = Columns(inputs, sum(len(b) for _, b in weights[:-1]))
        slopes = torch.tensor(slope, dtype=torch.float64)
        value = columns.start((inputs,))
        for i, (w, b) in enumerate(weights[:-1]):
            value = columns.affine(Matrix(w), b, [value])
            value = columns.relu(slopes.expand(len(b)), torch.full((len(b),), -1), value, i)
        return columns.network(columns.affine(Matrix(weights[-1][0]), weights[-1][1], [value]))

    @property
    def inputs(self) -> int:
        """n, the number of inputs."""
        return self.A.shape[1]

    @property
    def neurons(self) -> int:
        """H, the number of neurons."""
        return len(self.c)

    @property
    def outputs(self) -> int:
        """K, the number of outputs."""
        return len(self.e)

    def preactivations(self, x: Tensor) -> Tensor:
        """`v` at points `(m, n)`: `(m, H)`."""
        v = x @ self.A.T + self.c
        z = torch.zeros_like(v)
        for rows in self.blocks():
            v[:, rows] = v[:, rows] + z @ self.B[rows].T
            z[:, rows] = torch.maximum(v[:, rows], self.slope[rows] * v[:, rows])
        return v

    def logits(self, x: Tensor) -> Tensor:
        """`theta` at points `(m, n)`: `(m, K)`."""
        v = self.preactivations(x)
        return x @ self.C.T + torch.maximum(v, self.slope * v) @ self.D.T + self.e

    def mask(self, x: Tensor) -> Tensor:
        """Which neurons are active (`v > 0`) at points `(m, n)`: bool `(m, H)`."""
        return self.preactivations(x) > 0

    def affine(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The affine pieces of masks, bool `(m, H)`: `v = P x + p` and `theta = J x + q` there.

        P `(m, H, n)`, p `(m, H)`, J `(m, K, n)` (the paper's `J_D`), q `(m, K)`.
        """
        d = torch.where(mask, 1.0, self.slope)
        # The bias rides along as a column.
        full = torch.cat([self.A, self.c[:, None]], 1).expand(len(mask), -1, -1).clone()
        for rows in self.blocks()[1:]:
            before = slice(0, rows.start)
            full[:, rows] = full[:, rows] + self.B[rows, before] @ (
                d[:, before, None] * full[:, before]
            )
        out = torch.cat([self.C, self.e[:, None]], 1) + self.D @ (d[:, :, None] * full)
        return full[..., :-1], full[..., -1], out[..., :-1], out[..., -1]

    def jacobian(self, mask: Tensor) -> Tensor:
        """`J_D` of masks, bool `(m, H)`: `(m, K, n)`."""
        return self.affine(mask)[2]

    def head(self, weight: Tensor) -> Piecewise:
        """The network followed by a linear map `(J, K)`: for margins, rows `e_j - e_k`."""
        weight = weight.double()
        return replace(self, C=weight @ self.C, D=weight @ self.D, e=weight @ self.e)

    def homogeneous(self) -> Piecewise:
        """The same network with all biases zero: its recession function (THEORY 3)."""
        return replace(self, c=torch.zeros_like(self.c), e=torch.zeros_like(self.e))

    def fix(self, state: Tensor) -> Piecewise:
        """The network on a set where some neurons do not change sides: they are affine there and
        disappear.

        state: int `(H,)`, 1 where active, 0 where inactive, -1 where free. The rest keeps its
        order.
        """
        parts = (self.A, self.B, self.c, self.C, self.D, self.e)
        a, b, c, big_c, big_d, e = (part.clone() for part in parts)
        # In topological order: row h is final when its turn comes.
        for h in (state >= 0).nonzero().flatten().tolist():
            d = 1.0 if state[h] == 1 else float(self.slope[h])
            for rows, square, shift, column in (
                (a, b, c, b[:, h].clone()),
                (big_c, big_d, e, big_d[:, h].clone()),
            ):
                rows += d * column[:, None] * a[h]
                square += d * column[:, None] * b[h]
                shift += d * column * c[h]
            b[:, h], big_d[:, h] = 0, 0
        free = (state < 0).nonzero().flatten()
        _, layer = torch.unique(self.layer[free], return_inverse=True)
        return Piecewise(
            a[free], b[free][:, free], c[free], big_c, big_d[:, free], e, self.slope[free], layer
        )

    def blocks(self) -> list[slice]:
        """The neurons of each layer as a slice; neurons are stored layer by layer."""
        counts = torch.bincount(self.layer).tolist()
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [slice(end - size, end) for end, size in zip(ends, counts)]


class Columns:
    """A network while it is written in this form: every node as an affine function of (x, z), a
    batch of n + H + 1 columns, the last one the constant.

    Args:
        inputs: n.
        free: H, the neurons that stay.
    """

    def __init__(self, inputs: int, free: int) -> None:
        self.inputs = inputs
        self.free = free
        self.count = inputs + free + 1
        self.taken = inputs  # columns that belong to inputs and neurons so far
        none = torch.zeros(0, dtype=torch.float64)
        self.rows = [none.new_zeros(0, self.count)]
        self.slopes = [none]
        self.layers = [none.long()]

    def start(self, shape: tuple[int, ...]) -> Tensor:
        """The input."""
        eye = torch.eye(self.inputs, dtype=torch.float64)
        return F.pad(eye, (0, 0, 0, self.free + 1)).reshape(self.count, *shape)

    def affine(self, map_: Linear, bias: Tensor | None, given: Sequence[Tensor]) -> Tensor:
        """An affine node of others."""
        out = map_.forward(*given)
        if bias is None:
            return out
        # Not in place: a reshape returns a view of its input.
        return torch.cat([out[:-1], out[-1:] + bias])

    def relu(self, slope: Tensor, side: Tensor, given: Tensor, level: int) -> Tensor:
        """ReLUs of a node; side: 1 where one is always active, 0 where never, -1 where it stays;
        level: of those that stay.
        """
        where = (side < 0).flatten().nonzero().flatten()
        count = len(where)
        before = given.reshape(self.count, -1)
        after = (given * torch.where(side == 1, 1.0, slope)).reshape(self.count, -1)
        after[:, where] = 0
        after[torch.arange(self.taken, self.taken + count), where] = 1.0
        self.taken += count
        self.rows.append(before[:, where].T)
        self.slopes.append(slope.flatten()[where])
        self.layers.append(torch.full((count,), level))
        return after.reshape(given.shape)

    def network(self, output: Tensor) -> Piecewise:
        """The whole, its neurons layer by layer; output: the last node."""
        table = torch.cat(self.rows)
        out = output.reshape(self.count, -1).T
        layer = torch.cat(self.layers)
        order = torch.argsort(layer, stable=True)
        table = table[order]
        n = self.inputs
        return Piecewise(
            table[:, :n],
            table[:, n:-1][:, order],
            table[:, -1],
            out[:, :n],
            out[:, n:-1][:, order],
            out[:, -1],
            torch.cat(self.slopes)[order],
            torch.unique(layer[order], return_inverse=True)[1],
        )
