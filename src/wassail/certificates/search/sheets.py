"""The curves of some samples, and domains that cut the interval of one of their inputs in two.

A product or a softmax lies between two planes around the sample, and they are nearer to it on a
part of its box. So a domain fixes the interval of some entries of a node that curves read: of a
factor of a product, of the logits of a softmax. The planes of every curve that reads the entry are
made anew on the part, and `v <= m` or `v >= m` enters the bound with a multiplier >= 0, where the
coefficients of the node are known. A curve that reads another one has that one's range on the
part: a cut of a logit narrows all weights of its row. A normalisation is not cut: its planes hang
on all entries of a token, and a part of one entry moves them little.

A part may lie beside the sample. Planes are made around a point of the box, so they are made around
`c'`, the point of the part next to the sample's value c, and moved:
`f(v) - f(c) = (f(v) - f(c')) + (f(c') - f(c))`, and `J (v - c') = J (v - c) + J (c - c')`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.bounds.crown import Sweep
from wassail.certificates.bounds.lines import Arithmetic, Planes, Surface, ends_of
from wassail.certificates.bounds.rows import (
    Span,
    add_to,
    flattened,
    of_owner,
    row_dot,
    unflattened,
)
from wassail.certificates.device import HOST
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.planes import Curve
from wassail.certificates.search.cuts import Cuts
from wassail.rounding import FAINT, UNIT

CUT: tuple[type[Curve], ...] = (Product, Softmax)  # curves whose inputs are cut
# Entries that curves read, up to which they are cut: what a cut may gain is known of each of them,
# for each domain.
MOST = 2**18
BESIDE = 0.5  # of a gain: a ReLU gains about twice its score, a curve its score
ABOVE = 1 + 2.0**-20  # of a sum of magnitudes: more than rounding takes from it


@dataclass(frozen=True, eq=False)
class Sheet:
    """The planes of a curve node on the domains of a batch that cut one of its inputs.

    rows `(r,)`: those domains; among `(R,)`: the place of each domain there, or -1; planes: of each
    type, for them; floor `(r,)`: what underflow may take; centres, spans: of the inputs on the
    parts, `(r, *in)` each; far, ends: of the planes and of the value there, `(r, *out)`.
    """

    rows: Tensor
    among: Tensor
    planes: Mapping[torch.dtype, Planes]
    floor: Tensor
    centres: list[Tensor]
    spans: list[Span]
    far: Tensor
    ends: Span

    def within(self, rows: Tensor) -> Span:
        """The range of the value on some domains of the batch; infinite where it is not
        narrowed.
        """
        place = self.among[rows]
        known = (place >= 0).reshape(-1, *[1] * (self.far.ndim - 1))
        low, high = (side[place.clamp(min=0)] for side in self.ends)
        return torch.where(known, low, -math.inf), torch.where(known, high, math.inf)


@dataclass(frozen=True, eq=False)
class _Parts:
    """What is narrowed on r domains.

    places: of each node with cut entries, where they are, `(r, D)`; cuts: their intervals; ranges:
    of nodes that are curves with narrowed inputs themselves, `(r, *shape)`.
    """

    places: Mapping[int, Tensor]
    cuts: Cuts
    ranges: Mapping[int, Span]


class Sheets:
    """The curves of S samples of a sweep that are cut.

    parts: of each node that such a curve reads, its columns among those of all cut values, from
    `start` on. tables: of each such node, what is known of its entries, `(S, size)` each: the value
    at the sample, what rounding may add to it, and the ends of its interval.
    """

    def __init__(self, sweep: Sweep, samples: Tensor, start: int) -> None:
        self.sweep = sweep
        self.samples = samples
        self.surfaces: dict[int, Surface] = {}
        self.parts: dict[int, slice] = {}
        self.tables: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        cut = {i: v for i, v in sweep.surfaces.items() if isinstance(v.curve, CUT)}
        read = {j for surface in cut.values() for j in surface.node.inputs}
        if sum(sweep.graph.nodes[j].size for j in read) > MOST:
            cut = {}
        for i, surface in cut.items():
            self.surfaces[i] = surface
            inputs = zip(surface.node.inputs, surface.centres, surface.spans, surface.errors)
            for j, c, (low, high), error in inputs:
                if j in self.parts:
                    continue
                size = sweep.graph.nodes[j].size
                self.parts[j] = slice(start, start + size)
                start += size
                # of the sum of the coefficients of all that read it
                reach = torch.maximum(-low, high)
                error = error + 1.01 * UNIT * (8 + len(sweep.users[j])) * reach
                table = (c, error, *ends_of(c, low, high))
                c, error, low, high = (flattened(of_owner(v, samples)) for v in table)
                self.tables.append((c, error, low, high))
        self.stop = start

    def places(self, column: Tensor) -> dict[int, Tensor]:
        """Of each node with cut entries, where they are, `(R, D)`; its size for none."""
        found = {}
        for j, part in self.parts.items() if column.shape[1] else ():
            mine = (column >= part.start) & (column < part.stop)
            if mine.device != HOST or bool(mine.any()):
                found[j] = torch.where(mine, column - part.start, part.stop - part.start)
        return found

    def on(self, places: Mapping[int, Tensor], own: Tensor, cuts: Cuts) -> dict[int, Sheet]:
        """The planes of the curves that read cut entries, for a batch of domains of samples own,
        `(R,)` or `(1,)`.
        """
        found: dict[int, Sheet] = {}
        for i, surface in self.surfaces.items():
            inputs = surface.node.inputs
            cut = [(places[j] < self._size(j)).any(1) for j in inputs if j in places]
            cut += [found[j].among >= 0 for j in inputs if j in found]
            if not cut:
                continue
            any_cut = torch.stack(cut).any(0)
            if any_cut.device == HOST:
                rows = any_cut.nonzero()[:, 0]
            else:  # a device is not asked
                rows = torch.arange(len(any_cut), device=any_cut.device)
            owner = self.samples[own].expand(len(any_cut))[rows]
            among = torch.full_like(any_cut, -1, dtype=torch.int64)
            among[rows] = torch.arange(len(rows), device=rows.device)
            some = {j: places[j][rows] for j in inputs if j in places}
            ranges = {j: found[j].within(rows) for j in inputs if j in found}
            parts = _Parts(some, cuts.take(rows), ranges)
            found[i] = self._sheet(i, surface, rows, among, owner, parts)
        return found

    def _size(self, j: int) -> int:
        return self.sweep.graph.nodes[j].size

    def _sheet(
        self,
        i: int,
        surface: Surface,
        rows: Tensor,
        among: Tensor,
        owner: Tensor,
        parts: _Parts,
    ) -> Sheet:
        """The planes of node i on the parts of some domains."""
        centres: list[Tensor] = []
        spans: list[Span] = []
        whole: list[tuple[Tensor, Span]] = []
        for j, c, span in zip(surface.node.inputs, surface.centres, surface.spans):
            old = (of_owner(c, owner), (of_owner(span[0], owner), of_owner(span[1], owner)))
            whole.append(old)
            new, part = self._narrowed(j, *old, parts)
            centres.append(new)
            spans.append(part)
        curve = surface.curve
        if isinstance(curve, Product):
            given = zip(surface.lengths, curve.summed(), whole, zip(centres, spans))
            lengths = [
                _length(of_owner(length, owner), [k + 1 for k in axes], old, new)
                for length, axes, old, new in given
            ]
            plane = curve.plane(centres, spans, lengths)
        else:
            plane = curve.plane(centres, spans)
        steps = [old - new for new, (old, _) in zip(centres, whole)]
        sizes = [torch.maximum(-low, high) for _, (low, high) in whole]  # of deviations from c
        # Both values are numbers. The difference, the step and `J step` are rounded.
        here = curve.value(*centres)
        value = of_owner(self.sweep.centre[i], owner)
        moved = plane.forward(*steps)
        terms = (plane.terms + 8) * plane.reach(*(v.abs() for v in steps))
        terms = terms + 8 * (here.abs() + value.abs() + moved.abs() + plane.off.abs())
        plane = plane.moved(moved + (here - value), UNIT * terms * ABOVE + FAINT)
        reach = plane.reach(*sizes)
        every = [*(v.flatten(1) for v in sizes), reach.flatten(1)]
        total = torch.stack([v.sum(1) for v in every]).sum(0) * ABOVE
        exact = self.sweep.exact
        errors = [of_owner(v, owner) for v in surface.errors]
        sure = Planes.make(exact, surface, plane, errors, reach, total)
        fast = Planes(sure.plane.to(torch.float32), sure.off.float(), sure.far.float())
        floor = exact.floor * (2 * surface.count(plane) * total + 16 * surface.node.size)
        planes = {torch.float64: sure, torch.float32: fast}
        ends = curve.span(*(ends_of(c, *span) for c, span in zip(centres, spans)))
        return Sheet(rows, among, planes, floor, centres, spans, plane.far, ends)

    def _narrowed(self, j: int, c: Tensor, span: Span, parts: _Parts) -> tuple[Tensor, Span]:
        """Of an input, on the parts: the point next to c, and the span around it. Entries that are
        not narrowed stay as they are, and so do those of a part with no point.
        """
        if j not in parts.places and j not in parts.ranges:
            return c, span
        bottom, top = ends = ends_of(c, *span)
        if j in parts.ranges:
            bottom = torch.maximum(bottom, parts.ranges[j][0])
            top = torch.minimum(top, parts.ranges[j][1])
        if j in parts.places:
            bottom = torch.maximum(bottom, self._put(j, -math.inf, parts, parts.cuts.low))
            top = torch.minimum(top, self._put(j, math.inf, parts, parts.cuts.high))
        changed = ((bottom > ends[0]) | (top < ends[1])) & (bottom <= top)
        new = torch.where(changed, c.maximum(bottom).minimum(top), c)
        slack = UNIT * (new.abs() + torch.maximum(bottom.abs(), top.abs()))
        low = torch.where(changed, (bottom - new - slack).clamp(max=0), span[0])
        high = torch.where(changed, (top - new + slack).clamp(min=0), span[1])
        return new, (low, high)

    def _put(self, j: int, rest: float, parts: _Parts, values: Tensor) -> Tensor:
        """The ends of cut entries of node j, and `rest` elsewhere: `(r, *shape)`."""
        place = parts.places[j]
        flat = values.new_full((len(place), self._size(j) + 1), rest)
        flat = flat.scatter(1, place, values)[:, :-1]
        return unflattened(flat, self.sweep.graph.nodes[j].shape)

    def gains(
        self, i: int, w: Tensor, owner: Tensor, sheet: Sheet | None
    ) -> list[tuple[int, Tensor]]:
        """What a cut of each entry that node i reads may gain, for coefficients `(R, *shape)`: of
        each input, `(R, size)`.
        """
        surface = self.surfaces[i]
        curve = surface.curve
        assert isinstance(curve, Product | Softmax)
        size = w.abs().double()
        far = of_owner(self.sweep.exact.planes[i].far, owner)
        centres = [of_owner(v, owner) for v in surface.centres]
        spans = [(of_owner(low, owner), of_owner(high, owner)) for low, high in surface.spans]
        found = [flattened(v) for v in curve.gains(size, centres, spans, far)]
        if sheet is not None:
            parts = curve.gains(size[sheet.rows], sheet.centres, sheet.spans, sheet.far)
            found = [
                whole.index_copy(0, sheet.rows, flattened(v)) for whole, v in zip(found, parts)
            ]
        return [(j, BESIDE * gain) for j, gain in zip(surface.node.inputs, found)]


def _length(
    length: Tensor, axes: list[int], old: tuple[Tensor, Span], new: tuple[Tensor, Span]
) -> Tensor:
    """A bound on the Euclidean norm of `v - z'` along some axes, z' the middle of the parts, for
    one of `u = v - z`, z the middle of the whole spans.

    With `e = z' - z`: `|u - e|^2 = |u|^2 - 2 <u - e, e> - |e|^2`, and `|u - e| <= r` entry by
    entry, r the half widths of the parts. A part that lies far from the middle makes it smaller.

    Args:
        length: of u.
        axes: the axes that are summed over.
        old: the centre and the span of the whole.
        new: those of the parts.
    """
    (c, (low, high)), (other, (left, right)) = old, new
    m, middle = (low + high) / 2, (left + right) / 2
    r = torch.maximum(right - middle, middle - left) * (1 + UNIT)
    same = (c == other) & (m == middle)
    e = (other - c) + (middle - m)
    doubt = 8 * UNIT * (c.abs() + other.abs() + m.abs() + middle.abs())
    grown = 2 * e.abs() * r - e.square() + doubt * (2 * r + 2 * e.abs() + doubt)
    size = 2 * e.abs() * r + e.square()
    grown, size = (_summed(torch.where(same, 0.0, v), axes) for v in (grown, size))
    square = length.square()
    count = c.shape[1:].numel() + 16
    found = (square + grown + count * UNIT * (square + size)).clamp(min=0).sqrt()
    moved = _summed((~same).double(), axes) > 0
    return torch.where(moved, found * (1 + 8 * UNIT) + FAINT, length)


def _summed(values: Tensor, axes: list[int]) -> Tensor:
    """Along some axes, which have length 1 then; torch takes no axes for all of them."""
    return values.sum(axes, keepdim=True) if axes else values


def pull_curve(
    kind: Arithmetic,
    i: int,
    inputs: tuple[int, ...],
    w: Tensor,
    owner: Tensor,
    weight: dict[int, Tensor],
    sheet: Sheet | None,
) -> Tensor:
    """Adds to `weight` what coefficients w `(R, *shape)` of a curve are of its inputs; what the
    bound grows by, `(R,)`.

    Args:
        kind: the arithmetic.
        i: the node.
        inputs: the nodes that it reads.
        w: the coefficients.
        owner: the samples of the rows, in the sweep.
        weight: the coefficients of earlier nodes.
        sheet: its planes where its inputs are cut.
    """
    root = kind.planes[i]
    if sheet is None:
        off, far = root.pull(weight, inputs, w, owner)
        return off + far
    rows = sheet.rows
    every = torch.arange(len(rows), device=w.device)
    planes = sheet.planes[kind.dtype]
    own = w[rows]
    parts = planes.plane.transpose(own, every)
    grown = row_dot(own, planes.off) + row_dot(own.abs(), planes.far) + sheet.floor
    if len(rows) < len(w):
        whole = root.plane.transpose(w, owner)
        parts = tuple(old.index_copy(0, rows, new) for old, new in zip(whole, parts))
        all_ = row_dot(w, of_owner(root.off, owner)) + row_dot(w.abs(), of_owner(root.far, owner))
        grown = all_.index_copy(0, rows, grown)
    for j, part in zip(inputs, parts):
        add_to(weight, j, laid_out(part))
    return grown
