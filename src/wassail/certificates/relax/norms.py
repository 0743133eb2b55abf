"""Operator norms of the linear maps in a graph, rounded up, and the product bound they give for a
whole network; norms of matrices that are made on the way; and how far the nodes move on balls.

Every map knows its own norm (`Linear.norm`). A node moves by the norms of the layers before it,
times the radius at the input (`Reach`). What only sorts does not stretch
(`graph/nonexpansive_sort.py`). And back: `|d_i| <= ||row_i||_2 rho` bounds the entries of the next
layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Relu, Smooth
from wassail.certificates.graph.maps import (
    Linear,
    magnitude_map,
    rounding_map,
)
from wassail.certificates.graph.matrix_norms import UP, change, matrix_norm
from wassail.certificates.graph.nonexpansive_sort import nonexpansive_sorts
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.executed import call_error, gamma
from wassail.certificates.relax.rows import Span
from wassail.rounding import UNIT, length, times
from wassail.threat import dual


def map_norm(map_: Linear, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
    """An upper bound on `||map||_{r -> r}` for one sample of shape `shape -> output`; kept for
    as long as the map lives.
    """
    key = ("norm", norm, shape, output)
    return map_.kept(key, lambda: map_.norm(norm, shape, output), small=True)


def product(
    graph: Graph, norm_in: float, norm_out: float, steepest: Mapping[int, float] | None = None
) -> float:
    """`||J||_{r -> s}` on all of R^n by the norms of the layers: the best of walking through in
    norm 1, 2 or inf.

    Additions add, concatenations combine in the norm, ReLUs and sorting do not stretch, a smooth
    activation stretches by its steepest slope (`steepest`: on the region, by node; else on R). The
    first matrix changes from r to the norm of the walk and the last one from that to s, each in one
    piece where it is a matrix. Infinite where a product, a softmax or a normalisation is in the
    way, whose norms depend on where they are, and where an activation jumps.
    """
    if graph.curved or _jumps(graph, steepest or {}):
        return math.inf
    slopes = {i: node.act.steepest for i, node in enumerate(graph.nodes) if node.act is not None}
    found = math.inf
    for inner in (1.0, math.inf, 2.0):  # the dear one last: without it there is a bound in any case
        with suppress(clock.Late):
            walked = _walk(graph, norm_in, inner, norm_out, {**slopes, **(steepest or {})})
            found = min(found, walked)
    return found * UP


def pair_products(graph: Graph, norm: float, label: int) -> Tensor:
    """`||d(theta_label - theta_j)||` on all of R^n for every class j by norms, `(K,)` on the CPU.

    As `product` of each difference of two logits, but the layers before the last are walked once.
    """
    last = graph.nodes[-1]
    rows = torch.eye(graph.outputs, dtype=torch.float64)
    rows = rows[label] - rows
    if _jumps(graph, {}):
        return torch.full((graph.outputs,), math.inf, dtype=torch.float64)
    if graph.curved or last.matrix is None:
        found = [product(graph.head(row[None]), norm, math.inf) for row in rows]
        return torch.tensor(found, dtype=torch.float64)
    before = Graph(graph.nodes[: last.inputs[0] + 1])
    weight = last.matrix.to(HOST)
    ways = weight[label] - weight
    slack = 1 + (ways.shape[1] + 16) * UNIT
    lengths = [
        product(before, norm, inner) * length(ways, dual(inner), 1)
        for inner in (1.0, 2.0, math.inf)
    ]
    return torch.stack(lengths).amin(0) * slack


def _jumps(graph: Graph, steepest: Mapping[int, float]) -> bool:
    """Whether an activation jumps whose slopes on the region are not known."""
    return any(
        node.act is not None and node.act.seen and i not in steepest
        for i, node in enumerate(graph.nodes)
    )


def _walk(
    graph: Graph, norm_in: float, inner: float, norm_out: float, steepest: Mapping[int, float]
) -> float:
    """The product of norms, node by node."""
    last = len(graph.nodes) - 1
    enter = change(graph.inputs, norm_in, inner)
    sorted_ = nonexpansive_sorts(graph)
    found: list[float] = []
    raw: list[
        bool
    ] = []  # whether a node is the input itself, its entries moved: still measured in norm r
    for i, node in enumerate(graph.nodes):
        if inner == 2:
            clock.look()
        given = [found[j] for j in node.inputs]
        flat = [raw[j] for j in node.inputs]
        plain = False
        match node.op:
            case Input():
                found.append(1.0)
            case Relu() | Smooth() | Curved():
                found.append(times(given[0] * (enter if flat[0] else 1.0), steepest.get(i, 1.0)))
            case Affine(map_) if map_.in_place and len(given) == 1:
                plain = True
                found.append(given[0])
            case Affine() if node.matrix is not None:
                source = norm_in if flat[0] else inner
                target = norm_out if i == last else inner
                found.append(times(given[0], matrix_norm(node.matrix, source, target)))
            case Affine(map_):
                given = [g * (enter if f else 1.0) for g, f in zip(given, flat)]
                found.append(_combined(graph, i, map_, given, inner))
            case _:
                assert_never(node.op)
        if i in sorted_:
            base = sorted_[i].base
            found[i] = min(found[i], found[base] * (enter if raw[base] else 1.0))
        raw.append(not node.inputs or (plain and flat[0]))
    final = graph.nodes[last]
    if final.matrix is not None:
        return found[-1]
    if raw[-1]:
        return found[-1] * change(graph.outputs, norm_in, norm_out)
    return found[-1] * change(graph.outputs, inner, norm_out)


def _combined(graph: Graph, i: int, map_: Linear, given: list[float], norm: float) -> float:
    if map_.joins:
        return float(torch.linalg.vector_norm(torch.tensor(given, dtype=torch.float64), norm)) * UP
    if len(given) > 1:
        return math.fsum(given) * UP
    node = graph.nodes[i]
    return times(given[0], map_norm(map_, norm, graph.nodes[node.inputs[0]].shape, node.shape))


KRYLOV_STEPS = 16  # of Lanczos' method
SQUARINGS = 12  # of a matrix whose largest eigenvalue is to stand out
NOTHING_NEW = 1e-8  # of an image: what is left of it beside the vectors before
# Rows of a Gram matrix that are made together: neighbours in an image share their columns.
BLOCK = 32
PLAIN_UP_TO = 2**16  # entries of a matrix whose products are made at once
EIGENVALUES_UP_TO_ROWS = 64  # of a Gram matrix: below, all its eigenvalues cost less than Lanczos
# of its result, of which a Cholesky factor proves one
FACTORS = (1 + 1e-9, 1.001, 1.01, 1.03, 1.1, 1.5)


@dataclass(frozen=True, eq=False)
class Gram:
    """`A A^T` of matrices `(N, m, n)`, over the square of scale, `(N, m, m)`; scale: `(N,)`; off:
    what each entry is off by, in units of the lengths of its two rows.
    """

    values: Tensor
    scale: Tensor
    off: float

    @classmethod
    def of(cls, a: Tensor) -> Gram:
        """In float64. Entries below 2^-1000 may be lost."""
        # Squares of numbers near 1 do not underflow, and the trace is that of the scaled matrix.
        scale = a.abs().amax((1, 2)).clamp(min=2.0**-1000)
        clock.look()
        return cls(_products(a / scale[:, None, None]), scale, (sum(a.shape[1:]) + 64) * 4 * UNIT)

    def norms(self, weight: Tensor | None = None) -> Tensor:
        """`||A||_2` from above, `(N,)`, the rows times weights `(N, m)`, which are at most 1; NaN
        after an overflow.
        """
        if weight is None:
            return gram_norms(self.values, self.off) * self.scale
        values = self.values * weight[:, :, None] * weight[:, None, :]
        # Products of weights that underflow are as long as this together.
        lost = weight.shape[1] * 2.0**-500
        return (gram_norms(values, self.off) + lost) * self.scale


def matrix_norms(a: Tensor) -> Tensor:
    """`||A||_2` of matrices `(N, m, n)` in float64, from above, `(N,)`; NaN after an overflow."""
    if not a.numel():
        return a.new_zeros(len(a))
    gram = Gram.of(a if a.shape[1] <= a.shape[2] else a.mT)
    # Entries that were lost are as long as this together.
    lost = (gram.scale <= 2.0**-1000).double() * (math.sqrt(a[0].numel()) * 2.0**-1000)
    return gram.norms() + lost


def _products(a: Tensor) -> Tensor:
    """`A A^T` of matrices `(N, m, n)`. Columns in which a block of rows is 0 are left out of its
    products; a device would have to be asked for them.
    """
    m, n = a.shape[1:]
    if m <= BLOCK or m * n <= PLAIN_UP_TO or a.device != HOST:
        return a @ a.mT
    gram = a.new_empty(len(a), m, m)
    for own, rows in zip(gram, a):
        columns = rows.T.contiguous()
        for first in range(0, m, BLOCK):
            after = first + BLOCK
            seen = (rows[first:after] != 0).any(0).nonzero()[:, 0]
            some = columns[:, first:].index_select(0, seen)
            own[first:after, first:] = some[:, :BLOCK].T @ some
            own[after:, first:after] = own[first:after, after:].T
    return gram


def gram_norms(gram: Tensor, off: float) -> Tensor:
    """`||A||_2` from `A A^T`, `(N, m, m)`, from above, `(N,)`; NaN after an overflow.

    By a Cholesky factor of `mu - A A^T`, which proves that mu is enough; a device is not asked for
    it. off: of all roundings in the product, in units of the trace.
    """
    gram = (gram + gram.mT) / 2
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)
    known = torch.isfinite(trace)
    gram = torch.where(known[:, None, None], gram, 0.0)
    top = _top(gram, trace)
    found = (top.clamp(min=0) + off * trace).sqrt() * (1 + 16 * UNIT)
    return torch.where(known, found, math.nan)


def _top(gram: Tensor, trace: Tensor) -> Tensor:
    """The largest eigenvalue of each Gram matrix, from above up to rounding: `(N,)`."""
    m = gram.shape[1]
    guess = _guessed(gram)
    eye = torch.eye(m, dtype=gram.dtype, device=gram.device)
    found = trace
    done = torch.zeros_like(found, dtype=torch.bool)
    for factor in FACTORS:
        clock.look()
        mu = factor * guess
        failed = torch.linalg.cholesky_ex(mu[:, None, None] * eye - gram)[1]
        # Its own roundings: those of a factor of a matrix with the trace m mu.
        proved = mu * (1 + 4 * m * (m + 8) * UNIT)
        found = torch.where((failed == 0) & ~done, torch.minimum(found, proved), found)
        done = done | (failed == 0)
        if found.device == HOST and bool(done.all()):
            break
    return found


def _guessed(gram: Tensor) -> Tensor:
    """About the largest eigenvalue of each, `(N,)`, not above it but for rounding: of the vectors
    that Lanczos' method meets, the one that is stretched most.
    """
    if gram.device == HOST and gram.shape[1] <= EIGENVALUES_UP_TO_ROWS:
        every: Tensor = torch.linalg.eigvalsh(gram)
        return every[:, -1]
    v = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()[:, :, None]
    basis = []
    images = []
    for _ in range(min(KRYLOV_STEPS, gram.shape[1])):
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1e-300)
        basis.append(v)
        images.append(gram @ v)
        v = images[-1]
        long = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        known = torch.cat(basis, 2)
        for _ in range(2):  # once leaves what rounding has made
            v = v - known @ (known.mT @ v)
        # Where nothing new is left but rounding the search is over.
        rest = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        v = torch.where(rest > NOTHING_NEW * long, v, 0.0)
    known = torch.cat(basis, 2)
    small = known.mT @ torch.cat(images, 2)
    v = known @ _leading((small + small.mT) / 2)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1e-300)
    found: Tensor = (v * (gram @ v)).sum((1, 2))
    return found


def _leading(small: Tensor) -> Tensor:
    """About the eigenvector of the largest eigenvalue of each matrix `(N, k, k)`, `(N, k, 1)`.

    On a device, which would be asked whether `eigh` has converged, by squares of the matrix.
    """
    if small.device == HOST:
        vectors: Tensor = torch.linalg.eigh(small)[1]
        return vectors[:, :, -1:]
    for _ in range(SQUARINGS):
        small = small / small.abs().amax((1, 2), keepdim=True).clamp(min=1e-300)
        small = small @ small
    column = small.diagonal(dim1=1, dim2=2).argmax(1)
    return small.gather(2, column[:, None, None].expand(-1, small.shape[1], 1))


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
