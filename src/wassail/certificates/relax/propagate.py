"""Bounds on the gradients of a network without curves, by propagation.

Everything here is a sound upper bound in floating point: the rounding error of a chain of sums is
at most `gamma` times the same chain with absolute values (`gamma` = number of terms times 2^-52),
and that is what every bound is moved outward by.

Gradients go backward, `g = W^T (d g')` with `d` between the slopes of the neuron, and `d g'` lies
between two lines in `g'`, as a neuron that changes sides does in its input (Zhang, Zhang & Hsieh
2019, RecurJac; Shi et al. 2022). So a bound on a gradient is substituted FORWARD through the
network until it meets the head, as a bound on a value is substituted backward until it meets the
input. A smooth activation is a neuron like any other: its derivative lies in a range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.maps import magnitude_map, rounding_map
from wassail.certificates.relax.backward import Walk
from wassail.certificates.relax.ranges import Bounds, Span, gamma
from wassail.rounding import UNIT, length, sized

_Sized: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # low, high, and what is rounded
ROWS = 2**24  # numbers in one tensor of a pass: rows are handled in parts of about this size


@dataclass(frozen=True, eq=False)
class Gradients:
    """Bounds on the gradients of `<head row, theta>` with respect to every neuron's output and to
    the input.

    rows `(m, K)`; spans: for each ReLU or activation node and the input (0), its span `(m,
    *shape)`; sizes: the same with absolute weights, what rounding errors are relative to.
    """

    bounds: Bounds
    rows: Tensor
    spans: dict[int, Span]
    sizes: dict[int, Tensor]

    def entries(self, tighten: bool = True) -> Span:
        """Bounds on every partial derivative, `(m, n)` each; tighten: substitute each of them
        through the network.
        """
        low, high = (_rows(side) for side in self.spans[0])
        if tighten and self.bounds.open:
            better = _tightened(self, 0, torch.ones_like(low[0], dtype=torch.bool))
            low, high = (_rows(side) for side in better)
        return low, high

    def norm(self, s: float, entries: Span) -> Tensor:
        """Upper bounds on `||gradient||_s`, `(m,)`: by the entries and, for s = 1 and 2, by one
        substitution of the whole sum.

        `|g|` and `g^2` are convex, so on a span they lie below their chords, and a sum of chords is
        linear in the gradient.
        """
        low, high = entries
        most = torch.maximum(low.abs(), high.abs())
        best = length(most, s, 1) * (1 + (most.shape[1] + 4) * UNIT)
        if s == math.inf or not self.bounds.open:
            return best
        width = torch.where(high > low, high - low, 1.0)
        if s == 1:
            slope = torch.where(high > low, (high.abs() - low.abs()) / width, low.sign()).clamp(
                -1, 1
            )
            shift = torch.maximum(high.abs() - slope * high, low.abs() - slope * low)
        else:
            slope = low + high
            shift = -low * high
        size = _rows(self.sizes[0])
        scale = (slope.abs() * size).sum(1) + shift.abs().sum(1)
        chord = (
            self._substitute(0, slope[:, None, :])[:, 0] + shift.sum(1)
        ) + self._error() * scale
        # The root is one of the roundings that gamma counts beyond the sums, and `scale` is at
        # least the square of the norm.
        return torch.minimum(best, chord if s == 1 else chord.clamp(min=0).sqrt())

    def _error(self) -> float:
        return gamma(self.bounds.graph) * (len(self.bounds.spans) + 2)

    def _substitute(self, start: int, directions: Tensor, shared: bool = False) -> Tensor:
        """Upper bounds on `<t, gradient at node start>`: `(m, p, size) -> (m, p)`, before rounding.

        Forward from `start`: at a neuron, `t d g` lies below `t` times a line in `g`, the upper one
        where `t > 0`. shared: the same directions `(1, p, size)` for all rows, and their negatives
        after them, `(m, 2 p)`; until the first neuron they go through the network once.
        """
        graph = self.bounds.graph
        m = len(self.rows)
        p = directions.shape[1]
        value: dict[int, Tensor] = {start: directions.reshape(-1, *graph.nodes[start].shape)}
        constant: Tensor | float = 0.0
        last = len(graph.nodes) - 1
        uses = {
            j: i for i, node in enumerate(graph.nodes) for j in node.inputs
        }  # the last user wins
        for i in range(start + 1, last + 1):
            clock.look()
            node = graph.nodes[i]
            if not any(j in value for j in node.inputs):
                continue
            if node.map is None:
                if i not in self.spans:  # it leads nowhere
                    continue
                if shared:
                    value = {j: _fan(v, m) for j, v in value.items()}
                    p = 2 * p
                    shared = False
                value[i], shift = self._relaxed(i, value[node.inputs[0]], p)
                constant = constant + shift
            else:
                size = len(next(iter(value.values())))
                given = [
                    value[j] if j in value else directions.new_zeros(size, *graph.nodes[j].shape)
                    for j in node.inputs
                ]
                value[i] = node.map.forward(*given)
            for j in node.inputs:
                if uses[j] == i:  # not needed any more
                    value.pop(j, None)
        if shared:
            value = {j: _fan(v, m) for j, v in value.items()}
            p = 2 * p
        total = constant + (directions.new_zeros(m * p) if last not in value else 0.0)
        if last in value:
            total = (
                total + (value[last].reshape(m, p, -1) * self.rows[:, None, :]).sum(-1).flatten()
            )
        return torch.as_tensor(total).reshape(m, p)

    def _relaxed(self, i: int, t: Tensor, p: int) -> tuple[Tensor, Tensor]:
        """The step through the neurons of node i: new coefficients, and what is added to the
        constant.
        """
        (up, up_shift), (down, down_shift) = _gradient_lines(
            self.spans[i], self.bounds.derivative(i)
        )
        t = t.reshape(-1, p, *t.shape[1:])
        plus = t.clamp(min=0)
        minus = t - plus
        shift = (
            (plus * up_shift[:, None] + minus * down_shift[:, None])
            .reshape(*t.shape[:2], -1)
            .sum(2)
        )
        return (plus * up[:, None] + minus * down[:, None]).flatten(0, 1), shift.flatten()


def gradients(bounds: Bounds, rows: Tensor, tighten: bool = True) -> Gradients:
    """Bounds on the gradients of the logit combinations `rows` `(m, K)` over the region of
    `bounds`.

    One pass from the head to the input in interval arithmetic; with `tighten` every undecided
    neuron's gradient is substituted forward to the head before it is used.
    """
    graph = bounds.graph
    rows = rows.to(graph.device).double()
    last = len(graph.nodes) - 1
    found = Gradients(bounds, rows, {}, {})
    slack = gamma(graph)
    walk = Walk(graph, {last: (rows, rows, rows.abs())}, _added)
    for i, node, (low, high, most) in walk.nodes(last):
        if node.map is not None:
            parts = zip(
                node.map.transpose((low + high) / 2),
                magnitude_map(node.map).transpose((high - low) / 2),
                rounding_map(node.map).transpose(most),
            )
            walk.give(node, (_around(*part, slack) for part in parts))
            continue
        found.spans[i] = (low, high)
        found.sizes[i] = most
        open_ = bounds.unstable(i)
        if tighten and open_.any() and not torch.equal(low, high):
            low, high = found.spans[i] = _tightened(found, i, open_.flatten())
        least, top = bounds.derivative(i)
        corners = torch.stack([low * least, low * top, high * least, high * top])
        # Lines through a range of slopes are shifted by up to its width.
        steep = torch.maximum(torch.maximum(least.abs(), top.abs()), top - least)
        walk.give(node, ((corners.amin(0), corners.amax(0), sized(most) * sized(steep)),))
    low, high, most = walk.weight[0]
    found.spans[0] = (low, high)
    found.sizes[0] = most
    return found


def _around(centre: Tensor, reach: Tensor, much: Tensor, slack: float) -> _Sized:
    """A range, and the size that its rounding errors are relative to."""
    error = slack * much
    return centre - reach - error, centre + reach + error, much


def _added(a: _Sized, b: _Sized) -> _Sized:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _tightened(found: Gradients, i: int, wanted: Tensor) -> Span:
    """The span of the gradient at node i, its wanted entries (bool `(size,)`) bounded by
    substitution as well.
    """
    shape = found.spans[i][0].shape
    low, high = (_rows(side).clone() for side in found.spans[i])
    size = _rows(found.sizes[i])
    graph = found.bounds.graph
    undecided = wanted & (low < high).any(0)
    where = undecided.nonzero().flatten()
    widest = max(n.size for n in graph.nodes[i:])
    part = max(1, ROWS // (2 * widest * len(low)))
    for k in range(0, len(where), part):
        clock.check()
        some = where[k : k + part]
        clock.spend(4 * len(low) * len(some) * graph.operations)
        unit = low.new_zeros(1, len(some), low.shape[1]).scatter(2, some[None, :, None], 1.0)
        top, bottom = torch.split(found._substitute(i, unit, shared=True), len(some), 1)
        slack = found._error() * size[:, some]
        high[:, some] = torch.minimum(high[:, some], top + slack)
        low[:, some] = torch.maximum(low[:, some], -bottom - slack)
    return low.reshape(shape), high.reshape(shape)


def _gradient_lines(span: Span, derivative: Span) -> tuple[Span, Span]:
    """The lines above and below `d g` for `d` in a range and `g` on a span, each as (factor,
    shift).
    """
    low, high = span
    least, top = derivative
    crossing = (low < 0) & (high > 0) & (least < top)
    width = torch.where(crossing, high - low, 1.0)
    above = torch.where(low >= 0, top, least)  # max(g least, g top) where the sign of g is known
    below = torch.where(low >= 0, least, top)
    up = torch.where(crossing, (top * high - least * low) / width, above)
    up_shift = torch.where(crossing, torch.maximum((least - up) * low, (top - up) * high), 0.0)
    down = torch.where(crossing, (least * high - top * low) / width, below)
    down_shift = torch.where(
        crossing, torch.minimum((top - down) * low, (least - down) * high), 0.0
    )
    return (up, up_shift), (down, down_shift)


def _fan(values: Tensor, m: int) -> Tensor:
    """Directions `(p, ...)` and their negatives for each of m rows: `(m 2 p, ...)`."""
    return torch.cat([values, -values]).expand(m, *[-1] * (values.ndim)).flatten(0, 1)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)  # unlike flatten(1) also for single numbers
