"""The balls of all layers, and how they hang together.

A layer of ReLUs moves by at most `||W||_2` times what the layer before it moves, after its ReLUs.
That is a radius. It is more than a radius where a quadratic term is handed on: `(lam / 2) ||d||^2`
is at most `(lam / 2) ||W||^2` times the square of the OUTPUTS of the layer before, and these are
shorter than its inputs where ReLUs cut them off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates.graph.nonexpansive_sort import nonexpansive_sorts
from wassail.certificates.relax.ball_first_layer import FirstLayer
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.norms import map_norm
from wassail.certificates.relax.reach import UP, length_above
from wassail.certificates.relax.rows import Length

NORM_UP_TO_ROWS = 512  # rows of a matrix whose norm is computed for each sample
SMALLER = 0.8  # of the radius that a term gives: a smaller ball takes its place
FAINT = 1e-60  # radii below this hand no term on: squares might underflow


@dataclass(frozen=True, eq=False)
class QuadraticTerm:
    """`||d||^2 <= square ||d'||^2 + rest`, d' the deviations of another node.

    source: that node; square, rest: `(N,)`; good: samples for which this is used.
    """

    source: int
    square: Tensor
    rest: Tensor
    good: Tensor


class LayerBalls:
    """For every layer of ReLUs that a sweep leaves undecided: its ball and its quadratic term.

    free: layer -> the neurons in the ball, `(N, *shape)`; the others are dead. radius: layer -> of
    the ball, `(N,)`. quadratic: layer -> what its term is handed on as. first_layer, first,
    first_quadratic: the layer that reads the input, its node, and what its term is handed on as.
    """

    def __init__(self, sweep: Sweep, lengths: Mapping[int, Length] | None = None) -> None:
        self.sweep = sweep
        self.graph = sweep.graph
        self.reach = sweep.reach
        self.sorted = nonexpansive_sorts(self.graph)
        self.radius: dict[int, Tensor] = {}
        self.free: dict[int, Tensor] = {}
        self.quadratic: dict[int, QuadraticTerm] = {}
        self.first_layer: FirstLayer | None = None
        self.first_quadratic: QuadraticTerm | None = None
        self.first = -1
        sources = {self._path(i)[0] for i in sweep.bends}
        for i, bend in sweep.bends.items():
            node = self.graph.nodes[i]
            assert node.slope is not None
            j = node.inputs[0]
            low, high = sweep.spans[j]
            self.free[i] = bend.crossing | (bend.shape.ends[0] >= 0)
            if i in sources:  # the outputs of all others do not move
                self.free[i] = self.free[i] | (node.slope != 0)
            box = length_above(torch.where(self.free[i], torch.maximum(-low, high), 0.0))
            self.radius[i] = torch.minimum(self.reach.radius[j], box)
            self._join(i)
        for i, (length, those) in (lengths or {}).items():
            if i in self.quadratic:
                self._part(i, length, those)

    def handed_on(self, i: int) -> QuadraticTerm | None:
        """What the term of layer i is handed on as, to the layer before or to the input."""
        return self.first_quadratic if i == self.first else self.quadratic.get(i)

    def _part(self, i: int, length: Tensor, those: Tensor) -> None:
        """Where a ball around the undecided neurons alone is smaller, it takes the place of the
        term: what others hand on to node i would need all of its neurons.
        """
        better = length < SMALLER * self.radius[i]
        mask = better.reshape(-1, *[1] * (self.free[i].ndim - 1))
        self.free[i] = torch.where(mask, self.sweep.bends[i].crossing & those, self.free[i])
        self.radius[i] = torch.where(better, length, self.radius[i])
        for k, term in self.quadratic.items():
            if k == i or term.source == i:
                self.quadratic[k] = replace(term, good=term.good & ~better)

    def _join(self, i: int) -> None:
        """QuadraticTerm node i to the layer before, or to the input."""
        source, *path = self._path(i)
        first = source == 0 and self.sweep.balls.norm == 2 and self.first_layer is None
        if not path or not (first or source in self.radius):
            return
        norm, lost = self._norm(i)
        inner = norm * (self.reach.radius[0] if first else self.radius[source]) * UP
        share = lost / inner.clamp(min=FAINT)
        total = (inner + lost) * UP
        good = (total <= 1.001 * self.radius[i]) & (inner > FAINT)
        square = norm.square() * (1 + share) * UP
        # (s + e)^2 <= s^2 (1 + share) + e^2 (1 + 1 / share)
        term = QuadraticTerm(source, square, lost * (lost + inner) * UP, good)
        self.radius[i] = torch.minimum(self.radius[i], total)
        if first:
            self.first = i
            self.first_layer = FirstLayer(self.graph, path, self.free[i], self.sweep.inputs, norm)
            # The first layer knows the norm itself.
            self.first_quadratic = QuadraticTerm(0, (1 + share) * UP, term.rest, good)
        else:
            self.quadratic[i] = term

    def _path(self, i: int) -> list[int]:
        """The node that the inputs of node i are an affine function of, then the affine nodes."""
        nodes = self.graph.nodes
        j = nodes[i].inputs[0]
        found: list[int] = []
        while nodes[j].map is not None and len(nodes[j].inputs) == 1 and j not in self.sorted:
            found.insert(0, j)
            j = nodes[j].inputs[0]
        return [j, *found]

    def _norm(self, i: int) -> tuple[Tensor, Tensor]:
        """`||W||_2` of the affine nodes before node i, and the length of what rounding adds, `(N,)`
        each. Small matrices count with the rows and columns that move.
        """
        nodes = self.graph.nodes
        source, *path = self._path(i)
        norm = torch.ones_like(self.reach.radius[0])
        lost = torch.zeros_like(norm)
        columns = self.free.get(source)
        for k, j in zip([source, *path], path):
            map_ = nodes[j].map
            assert map_ is not None
            most = map_norm(map_, 2.0, nodes[k].shape, nodes[j].shape)
            lost = (most * lost + self.reach.lost[j]) * UP
            own = torch.full_like(norm, most)
            matrix = nodes[j].matrix
            if matrix is not None and nodes[j].size <= NORM_UP_TO_ROWS:
                rows = self.free[i] if j == path[-1] else None
                own = torch.minimum(own, restricted_norm(matrix, rows, columns, len(norm)))
            norm = norm * own * UP
            moved = columns is not None and map_.moves
            columns = map_.forward(columns.double()) > 0 if moved and columns is not None else None
        return norm, lost


def restricted_norm(weight: Tensor, rows: Tensor | None, columns: Tensor | None, n: int) -> Tensor:
    """`||W||_2` of the rows and columns wanted of each of n samples, `(n,)`, from above."""
    part = weight.expand(n, *weight.shape)
    part = part if columns is None else part * columns[:, None]
    part = part if rows is None else part * rows[:, :, None]
    gram = part @ part.mT
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)
    top = torch.linalg.eigvalsh((gram + gram.mT) / 2)[:, -1].clamp(min=0)
    slack = (sum(weight.shape) + 16) * 2.0**-50
    found: Tensor = (top + slack * trace).sqrt() * UP
    # Products that underflow are as long as this at most.
    return found + math.sqrt(weight.numel()) * 2.0**-500
