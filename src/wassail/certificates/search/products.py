"""Linear bounds on boxes of inputs that take the remainders of all products together.

The planes around a product `u v` leave `(u - mu) (v - mv)`, m the middles: at most the product of
the half widths. Where a network adds products up, as a quadratic form or a Lyapunov function does,
these remainders are not independent. Every factor is a linear function of the input and a small
rest (`Spread`), so with weights w the sum leaves

    sum_t w_t (<alpha_t, d> + e_t) (<beta_t, d> + f_t) = d' S d + what the rests are worth,

one matrix S for each row. A part of S without a positive eigenvalue cannot raise the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Node
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.planes import TINY, Curve
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Arithmetic, Planes
from wassail.certificates.relax.rows import Span, flattened
from wassail.rounding import UNIT

INPUTS = 32  # most inputs: each row gets a matrix of that size
TERMS = 256  # most products that one node adds up


@dataclass(frozen=True, eq=False)
class _Factor:
    """One factor of the T terms of a product node on N boxes, less the middle of its span: within
    `<a, z> +- rest` for inputs `z` in [-1, 1], the box in units of its half widths, and within
    `+- width`; a `(N, T, n)`, else `(N, T)`.
    """

    a: Tensor
    rest: Tensor
    width: Tensor

    @classmethod
    def of(cls, sweep: Sweep, j: int, entry: Tensor) -> _Factor:
        """From what a sweep knows of node j; entry: of each term."""
        spread = sweep.spreads[j]
        low, high = (side.flatten(1)[:, entry] for side in sweep.spans[j])
        middle = (low + high) / 2
        shift = spread.shift[:, entry]
        left, right = sweep.inputs.box
        a = spread.a[:, entry] * torch.maximum(-left, right)[:, None]
        rest = spread.rest[:, entry] + (shift - middle).abs()
        rest = rest + 4 * UNIT * (shift.abs() + middle.abs() + rest)
        width = torch.maximum(high - middle, middle - low) * (1 + 2 * UNIT)
        return cls(a, rest, width)

    def take(self, owner: Tensor) -> _Factor:
        """For rows that belong to boxes `owner` `(R,)`."""
        return _Factor(self.a[owner], self.rest[owner], self.width[owner])


@dataclass(frozen=True, eq=False)
class _Terms:
    """A product node: the output that each of its T terms belongs to, their factors, and planes
    without the remainders.
    """

    output: Tensor
    factors: tuple[_Factor, _Factor]
    planes: Planes


class _Told:
    """Planes that note the coefficients they are given."""

    def __init__(self, planes: Planes) -> None:
        self.planes = planes
        self.weights: Tensor | None = None

    def pull(
        self, weight: dict[int, Tensor], inputs: tuple[int, ...], w: Tensor, owner: Tensor
    ) -> Span:
        """As `Planes.pull`."""
        self.weights = flattened(w)
        return self.planes.pull(weight, inputs, w, owner)


class ProductSweep(Sweep):
    """A sweep on boxes whose bounds on the last node take products together."""

    def run(self) -> ProductSweep:
        """Forward, node by node."""
        self.terms: dict[int, _Terms] = {}
        super().run()
        return self

    def _curve(self, i: int, node: Node, curve: Curve) -> None:
        """The planes of a curve node, and what is known of the factors of a product."""
        terms = None
        if isinstance(curve, Product) and self.graph.inputs <= INPUTS:
            shapes = [self.graph.nodes[j].shape for j in node.inputs]
            *entries, output = curve.entries(*shapes)
            if len(output) <= TERMS:
                first, second = (_Factor.of(self, j, e) for j, e in zip(node.inputs, entries))
                terms = _Terms(output, (first, second), self._bare(i, node, curve))
        super()._curve(i, node, curve)
        if terms is not None:
            self.terms[i] = terms

    def _bare(self, i: int, node: Node, curve: Product) -> Planes:
        """The planes of a product in float64 with all that `Planes.make` charges but for the
        remainders.
        """
        kind = self.exact
        spans = [self.spans[j] for j in node.inputs]
        centres = [self.centre[j] for j in node.inputs]
        plane = curve.plane(centres, spans, [c.new_zeros(()) for c in centres])
        sizes = [torch.maximum(-low, high) for low, high in spans]
        reach = plane.reach(*sizes)
        much = torch.stack([flattened(v).sum(1) for v in (*sizes, reach)]).sum(0) * (1 + 2.0**-20)
        count = plane.terms + 8 + max(len(self.users[j]) for j in node.inputs)
        errors = tuple(
            kind.errors[j].double()
            if j in kind.errors and self.users[j] == [i]  # else the rows pay for them
            else torch.zeros_like(c)
            for j, c in zip(node.inputs, centres)
        )
        return Planes.make(kind, node, plane, count, errors, reach, much)

    def substitute(
        self,
        kind: Arithmetic,
        last: int,
        rows: Tensor,
        owner: Tensor,
        both: bool,
        alpha: Mapping[int, Tensor] | None = None,
        units: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Substitution.substitute`; for rows of the last node with products together."""
        if kind is not self.exact or last != len(self.graph.nodes) - 1 or not self.terms:
            return super().substitute(kind, last, rows, owner, both, alpha, units)
        usual = {i: kind.planes[i] for i in self.terms}
        told = {i: _Told(terms.planes) for i, terms in self.terms.items()}
        kind.planes.update(told)  # type: ignore[arg-type]
        try:
            found = super().substitute(kind, last, rows, owner, both, alpha, units)
        finally:
            kind.planes.update(usual)
        constant, a, owner = found
        weights = {i: one.weights for i, one in told.items() if one.weights is not None}
        if not weights:
            return found
        return constant + self._remainders(weights, owner, len(constant)), a, owner

    def _remainders(self, weights: Mapping[int, Tensor], owner: Tensor, count: int) -> Tensor:
        """What all products together add to rows with these coefficients, at most: `(R,)`."""
        found = self.balls.x.new_zeros(count)
        used = torch.stack([(w != 0).any(1) for w in weights.values()]).any(0).nonzero()[:, 0]
        owner = owner.expand(count)[used]
        n = self.graph.inputs
        matrix = found.new_zeros(len(used), n, n)
        apart, rest, size = (found.new_zeros(len(used)) for _ in range(3))
        terms = 0
        for i, weight in weights.items():
            first, second = (factor.take(owner) for factor in self.terms[i].factors)
            w = weight[used][:, self.terms[i].output]
            terms += w.shape[1]
            matrix = matrix + (w[:, :, None] * first.a).transpose(1, 2) @ second.a
            w = w.abs()
            far, near = first.a.abs().sum(2), second.a.abs().sum(2)
            apart = apart + (w * first.width * second.width).sum(1)
            rest = rest + (w * (first.rest * (near + second.rest) + second.rest * far)).sum(1)
            size = size + (w * far * near).sum(1)
        # Entries of the matrix are sums of `terms` products of five roundings, `size` at most.
        top, lost = highest((matrix + matrix.transpose(1, 2)) / 2)
        slack = UNIT * (terms + n + 16)
        together = (top + lost + rest + 2 * slack * (size + rest)) * (1 + 2 * slack) + TINY
        apart = apart * (1 + slack) + TINY
        found[used] = torch.where(together < apart, together, apart)  # an overflow is no bound
        return found


def highest(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The most that `<z, M z>` can be for z in [-1, 1], `(R, n, n) -> (R,)`, M symmetric, and what
    rounding adds to it.

    `M = N + E` with `N = V min(L, 0) V'`, which is nowhere above 0 whatever V is: eigenvectors need
    not be exact. For E, and for M itself, `sum_k z_k^2 max(0, M_kk + sum_l |M_kl|)`.
    """
    n = matrix.shape[1]
    values, vectors = torch.linalg.eigh(matrix.nan_to_num(posinf=0.0, neginf=0.0))
    below = values.clamp(max=0)[:, None]
    negative = (vectors * below) @ vectors.transpose(1, 2)
    size = (matrix.abs() + (vectors.abs() * -below) @ vectors.abs().transpose(1, 2)).sum((1, 2))
    top = torch.minimum(_dominated(matrix), _dominated(matrix - negative))
    return top, UNIT * (2 * n + n * n + 16) * size


def _dominated(matrix: Tensor) -> Tensor:
    """`sum_k max(0, M_kk + sum_{l != k} |M_kl|)`, `(R, n, n) -> (R,)`."""
    own = matrix.diagonal(dim1=1, dim2=2)
    return (own + matrix.abs().sum(2) - own.abs()).clamp(min=0).sum(1)
