"""How far the nodes of a network move on balls: by the norms of the layers, times the radius at the
input, and entry by entry.

What only sorts does not stretch (`graph/nonexpansive_sort.py`). And back: `|d_i| <= ||row_i||_2
rho` bounds the entries of the next layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Relu, Smooth
from wassail.certificates.graph.maps import (
    magnitude_map,
    rounding_map,
)
from wassail.certificates.graph.nonexpansive_sort import nonexpansive_sorts
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.executed import call_error, gamma
from wassail.certificates.relax.norms import map_norm
from wassail.certificates.relax.rows import Span

UP = 1 + 2.0**-40  # more than the roundings of a few products and of a norm take away


class Reach:
    """How far the nodes of a network move on N balls: one pass with the values at the samples.

    radius: node -> `||v - centre||_2` is at most this, `(N,)`, inf where nothing is known. most:
    node -> how far each entry moves at most, `(N, *shape)`. ranges: node -> the values of affine
    nodes, `(N, *shape)` each. lost: node -> `d_i = W d_j + e` with `||e||_2` at most this, `(N,)`.
    Where the network is executed, executed: affine node -> what its own rounding adds, at most,
    `(N, *shape)`; off: node -> the length of what all rounding so far has added, at most, `(N,)`.
    """

    def __init__(self, graph: Graph, balls: Balls) -> None:
        self.graph = graph
        self.balls = balls
        self.centre: dict[int, Tensor] = {}
        self.radius: dict[int, Tensor] = {}
        self.most: dict[int, Tensor] = {}
        self.ranges: dict[int, Span] = {}
        self.lost: dict[int, Tensor] = {}
        self.executed: dict[int, Tensor] = {}
        self.off: dict[int, Tensor] = {}
        self.sorted = nonexpansive_sorts(graph)

    def run(self) -> Reach:
        """Every node in turn."""
        with torch.no_grad():
            for i, node in enumerate(self.graph.nodes):
                clock.check()
                match node.op:
                    case Input():
                        low, high = self.balls.box
                        self.centre[0] = self.balls.x.reshape(-1, *node.shape)
                        far = torch.maximum(-low, high)
                        self.most[0] = far.reshape(-1, *node.shape)
                        across = rounding.length(far, 2, 1) * UP
                        short = self.balls.norm in (1, 2)
                        self.radius[0] = (
                            torch.minimum(across, self.balls.radius) if short else across
                        )
                        self.off[0] = torch.zeros_like(self.radius[0])
                    case Affine():
                        self._affine(i, node.op)
                    case Relu() | Smooth():
                        self._activation(i, node.op)
                    case Curved():
                        self.centre[i] = node.op.value(*[self.centre[j] for j in node.inputs])
                        self.radius[i] = torch.full_like(self.radius[0], math.inf)
                        self.off[i] = self.radius[i]
                        self.most[i] = torch.full_like(self.centre[i], math.inf)
                    case _:
                        assert_never(node.op)
                self._contracted(i)
        return self

    def margin_errors(self, y: Tensor) -> Tensor:
        """How far the executed margins `theta_y - theta_j` are from the exact ones on each ball,
        `(N, K)`, rounded up: the length of the error before the last matrix, times that of the
        difference of two of its rows, and its own errors. y: labels `(N,)`.
        """
        last = len(self.graph.nodes) - 1
        node = self.graph.nodes[last]
        y = y.to(self.off[0].device)
        own = y[:, None]
        weight = node.matrix
        if weight is not None:
            ways = rounding.length(weight[y][:, None] - weight, 2, 2) * (1 + 2.0**-20)
            error = self.executed[last]
            found = ways * self.off[node.inputs[0]][:, None] + error + error.gather(1, own)
        else:
            found = math.sqrt(2) * self.off[last][:, None].expand(-1, self.graph.outputs)
        found = torch.where(found.isnan(), math.inf, found * UP)
        return found.scatter(1, own, 0.0)

    def _contracted(self, i: int) -> None:
        """What only sorts entries of another node moves no farther than that one.

        The rounding of a difference moves both entries that it compares, and those of different
        nodes add up: less than 4 times their sum.
        """
        if i not in self.sorted:
            return
        between = self.sorted[i].between
        lost = torch.stack([self.lost[k] for k in between]).sum(0)
        for known in (self.radius, self.off):
            least = (known[self.sorted[i].base] + 4 * lost) * UP
            known[i] = torch.minimum(known[i], least)

    def _activation(self, i: int, op: Relu | Smooth) -> None:
        steep = op.steepest
        j = self.graph.nodes[i].inputs[0]
        self.centre[i] = op.value(self.centre[j])
        # The value at the sample is rounded, too.
        lost = 2.0**-48 * self.centre[i].abs()
        lost = lost + op.jump(*_around(self.centre[j], self.most[j]))
        self.most[i] = (self.most[j] * steep + lost) * UP
        self.lost[i] = length_above(lost)
        self.radius[i] = (self.radius[j] * steep + self.lost[i]) * UP
        self.off[i] = (self.off[j] * steep + self.lost[i]) * UP

    def _affine(self, i: int, op: Affine) -> None:
        """`d_i = W d_j + e`: the radius by norms, an entry by its row.

        `error` has a unit for each term and four more, of what an entry is at most: it pays for the
        length of the row, too, where that is less. The radii and lengths pay for their own sum.
        """
        node = self.graph.nodes[i]
        centres = [self.centre[j] for j in node.inputs]
        most = [self.most[j] for j in node.inputs]
        rough = rounding_map(op.map)
        wide = self.graph.rounding + (op.map.terms + 4) * 2.0**-52
        self.centre[i] = op.value(*centres)
        sizes = [c.abs() for c in centres]
        error = wide * (rough.forward(*sizes) + op.bias_size + rough.forward(*most))
        self.lost[i] = length_above(error)
        if self.graph.arithmetic == "executed":
            executed, length = self._executed(i, sizes, most)
            self.executed[i] = executed
            error = error + executed
            self.lost[i] = (self.lost[i] + length) * UP
        self.radius[i] = self._stretched(i, op) + self.lost[i]
        self.off[i] = self._by_norms(i, op, self.off) + self.lost[i]
        entry = magnitude_map(op.map).forward(*most)
        lengths = op.map.row_norms(2.0)
        if lengths is not None and len(node.inputs) == 1:
            before = self.radius[node.inputs[0]].reshape(-1, *[1] * len(node.shape))
            entry = torch.minimum(entry, lengths * before)
        entry = torch.minimum(entry, self.radius[i].reshape(-1, *[1] * len(node.shape)))
        entry = entry + error
        self.most[i] = torch.where(entry.isnan(), math.inf, entry)
        slack = 2.0**-50 * (self.centre[i].abs() + self.most[i])
        self.ranges[i] = (
            self.centre[i] - self.most[i] - slack,
            self.centre[i] + self.most[i] + slack,
        )

    def _executed(self, i: int, sizes: list[Tensor], most: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What rounding adds where the network is executed, entry by entry, and its length `(N,)`.

        The bound on it is linear in the magnitudes of the inputs. Those are at most what they are
        at the sample, and a deviation of which the length is known: its entries are not all at
        their largest at once.
        """
        node = self.graph.nodes[i]
        assert self.graph.execution is not None
        dtype = self.graph.execution.dtype
        sources = [self.graph.nodes[j] for j in node.inputs]
        largest = [c + m for c, m in zip(sizes, most)]
        centres = [self.centre[j] for j in node.inputs]
        around = [_around(c, far) for c, far in zip(centres, most)]
        error = call_error(node, largest, dtype, sources, around)
        length = length_above(error)
        calls = node.calls or ()
        plain = len(sources) == 1 and not sources[0].late
        if len(calls) != 1 or not plain or node.exponent or sources[0].exponent:
            return error, length
        (call,) = calls
        shapes = (sources[0].shape, node.shape)
        one, all_ = (map_norm(call.map, s, *shapes) for s in (1.0, math.inf))
        # The root of their product bounds `|| |W| ||_2`; 2^-20: of the roundings of this product.
        rate = gamma(call.roundings, dtype) * math.sqrt(one * all_) * (1 + 2.0**-20)
        # It holds for the halved bound on a sum, too: its partial sums move by `|W|` times the
        # deviation at most.
        at = [(c, c) for c in centres]
        here = call_error(node, sizes, dtype, sources, at)
        far = self.radius[node.inputs[0]]
        apart = (length_above(here) + rate * far) * UP
        length = torch.where(torch.isfinite(length), torch.fmin(length, apart), length)
        rows = call.map.row_norms(2.0)
        if rows is not None:
            # So does an entry, by the length of its row times that of the deviation.
            rows = gamma(call.roundings, dtype) * (1 + 2.0**-20) * rows
            near = (here + rows * far.reshape(-1, *[1] * len(node.shape))) * UP
            error = torch.where(torch.isfinite(error), torch.fmin(error, near), error)
        return error, length

    def _stretched(self, i: int, op: Affine) -> Tensor:
        """`||W d_j||_2`."""
        node = self.graph.nodes[i]
        if node.inputs == (0,) and self.balls.norm == 1:
            key = ("longest column", node.shape)
            longest = op.map.kept(key, lambda: op.map.longest_column(node.shape), small=True)
            if longest is not None:
                return self.balls.radius * longest
        return self._by_norms(i, op, self.radius)

    def _by_norms(self, i: int, op: Affine, lengths: Mapping[int, Tensor]) -> Tensor:
        """The length of `W v` for inputs of these lengths."""
        node = self.graph.nodes[i]
        given = [lengths[j] for j in node.inputs]
        if op.map.joins:
            return rounding.length(torch.stack(given), 2, 0) * UP
        if len(given) > 1:
            return torch.stack(given).sum(0) * UP
        shape = self.graph.nodes[node.inputs[0]].shape
        return given[0] * map_norm(op.map, 2.0, shape, node.shape) * UP


def _around(centre: Tensor, most: Tensor) -> Span:
    """The range of values that lie that far from the sample's at most."""
    (far,) = _wider([centre.abs()], [most])
    return centre - far, centre + far


def _wider(sizes: list[Tensor], most: list[Tensor]) -> list[Tensor]:
    """How far values may lie from the sample's, with room for the roundings of a sum."""
    return [far + 2.0**-50 * (size + far) for size, far in zip(sizes, most)]


def length_above(values: Tensor) -> Tensor:
    """`||v||_2` of each sample, from above, with room for a product and a sum."""
    flat = values.reshape(len(values), -1)
    return rounding.length(flat, 2, 1) * (1 + (flat.shape[1] + 8) * 2.0**-52)
