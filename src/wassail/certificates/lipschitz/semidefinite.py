"""The semidefinite rung of the ladder: LipSDP-Neuron on a whole network, or on its pieces.

`multipliers` has the bound, its start and its Newton steps. Here: a schedule, and a bound that is
proved by a Cholesky factor whatever the iteration did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.exact.multipliers import (
    Form,
    Split,
    forms,
    prove,
    reduce,
    split,
    start,
    tighten,
)
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Scale
from wassail.certificates.graph.matrix_norms import change, matrix_norm
from wassail.certificates.relax.norms import product
from wassail.certificates.relax.ranges import Bounds
from wassail.rounding import UNIT
from wassail.ties import first_largest

GAPS = (0.3, 0.1, 0.03, 0.01)  # relative distance of the barrier's minimiser from the bound
NEWTON_UP_TO_NEURONS = 1100  # neurons: one Newton step at this size takes seconds
WIDE = 1500  # neurons and weights together
MEMORY = 2**28  # numbers in the largest node of a dense form
GROUP = 2**26  # operations of one factor of all members that are worked on at once


def semidefinite(
    network: Piecewise, norm_in: float, norm_out: float, time_limit: float | None = None
) -> float:
    """An upper bound on `||J||_{r -> s}` on every set where only the neurons of this network change
    sides; inf if none.

    For r = 1 and inf there are two: from the 2-norm, `||J||_{r -> s} <= ||J||_{2 -> s} max ||u||_2
    / ||u||_r`, and directly.
    """
    # A neuron that nothing reaches, or that reaches nothing, would only slow the iteration down.
    deaf = (network.A == 0).all(1) & (network.B == 0).all(1)
    mute = (network.B == 0).all(0) & (network.D == 0).all(0)
    if (deaf | mute).any():
        return semidefinite(
            network.fix(torch.where(deaf | mute, 0, -1)), norm_in, norm_out, time_limit
        )
    if network.neurons == 0:
        return matrix_norm(network.C, norm_in, norm_out)
    if network.neurons > NEWTON_UP_TO_NEURONS:
        return math.inf
    with clock.limited(time_limit), suppress(clock.Late):
        network, scale = _balanced(network)
        return scale * _from_two(network, norm_in, norm_out)
    return math.inf


def _balanced(network: Piecewise) -> tuple[Piecewise, float]:
    """The same network with layers, inputs and outputs in units of about one, and what its Jacobian
    was divided by.

    A ReLU commutes with positive factors, and factors that are powers of two cost no rounding. One
    for each layer: `start` takes the neurons of a layer as equals.
    """
    a = network.A.clone()
    b = network.B.clone()
    d = network.D.clone()
    for rows in network.blocks():
        size = _power(torch.linalg.vector_norm(torch.cat([a[rows], b[rows]], 1), dim=1).amax())
        a[rows], b[rows] = a[rows] / size, b[rows] / size
        b[:, rows], d[:, rows] = b[:, rows] * size, d[:, rows] * size
    enter = _power(a.abs().amax())
    leave = _power(torch.cat([network.C / enter, d], 1).abs().amax())
    parts = {"A": a / enter, "B": b, "C": network.C / enter / leave, "D": d / leave}
    return replace(network, **parts), float(enter * leave)


def _power(size: Tensor) -> Tensor:
    return torch.where(size > 0, torch.exp2(size.clamp(min=1e-300).log2().round()), 1.0)


def _from_two(network: Piecewise, norm_in: float, norm_out: float) -> float:
    if norm_in == 2:
        return _semidefinite(network, 2.0, norm_out)
    best = math.inf
    with clock.limited(clock.seconds_left() / 2, clock.work_left() / 2), suppress(clock.Late):
        best = (
            change(network.inputs, norm_in, 2.0)
            * _semidefinite(network, 2.0, norm_out)
            * (1 + 4 * UNIT)
        )
    if not clock.late():
        with suppress(clock.Late):
            best = min(best, _semidefinite(network, norm_in, norm_out))
    return best


def _semidefinite(network: Piecewise, norm_in: float, norm_out: float) -> float:
    """Members (rows, columns: `multipliers.split`) from the largest start down, each until it
    is below the largest so far.
    """
    how = split(network.inputs, network.outputs, norm_in, norm_out)
    size = network.neurons + how.weights
    if size > WIDE or how.members * size**2 > MEMORY:
        return math.inf
    clock.spend(2 * how.members * size**3)
    groups = torch.split(torch.arange(how.members), max(1, GROUP // size**3))
    # What is short is done in any case: then there is a bound.
    with clock.unlimited() if how.members * size**3 <= GROUP else nullcontext():
        form, w, t, value = _begun(network, how, groups)
    done = torch.zeros(len(value), dtype=torch.bool)
    while not done.all() and not clock.late():
        worst = int(first_largest(torch.where(done, -math.inf, value)))
        settled = float(value[done].max()) if done.any() else 0.0
        if value[worst] <= settled:
            break
        one = form.take(torch.tensor([worst]))
        value[worst], best = _settle(one, w[worst, None], t[worst, None], value[worst], settled)
        done[worst] = True
        if how.weights == 1:  # what is good for one row or column is often good for all
            for some in groups:
                with suppress(clock.Late):
                    clock.look()
                    other = _with(form.take(some), best.expand(len(some), -1))
                    value[some] = torch.minimum(value[some], other)
    return how.factor * math.sqrt(float(value.max())) * (1 + 4 * UNIT)


def _begun(
    network: Piecewise, how: Split, groups: Sequence[Tensor]
) -> tuple[Form, Tensor, Tensor, Tensor]:
    """All members, their `start`, and the bounds that it proves."""
    clock.look()
    reduced = reduce(network, torch.full((1, network.neurons), -1))
    clock.look()
    form = forms(reduced, how, torch.arange(network.neurons)[None])
    found = []
    for some in groups:
        part = form.take(some)
        w, t = start(part, network.layer, how)
        clock.look()
        found.append((w, t, prove(part, w, t)))
    w, t, value = (torch.cat(sides) for sides in zip(*found))
    return form, w, t, value


def segmented(
    bounds: Bounds, norm_in: float, norm_out: float, most: int = NEWTON_UP_TO_NEURONS
) -> float:
    """An upper bound on `||J||_{r -> s}` of a large network: cut where all paths meet, the pieces'
    norms multiplied.

    Between the pieces the norm is 2. A piece takes as many unstable neurons as a semidefinite
    bound can carry; the product of its layers' norms is the other bound on it. A cut stands before
    a ReLU, which does not stretch, and what is never active is dropped there. The matrices are
    small and worked on one after the other: on the CPU.
    """
    graph = bounds.graph.to(HOST)
    states = {i: state.to(HOST) for i, state in bounds.states().items()}
    pieces = _pieces(graph, states, most)
    total = 1.0
    for number, (first, last) in enumerate(reversed(pieces)):
        piece, sides = _piece(graph, states, first, last)
        enter = norm_in if first == 0 else 2.0
        leave = norm_out if last == len(graph.nodes) - 1 else 2.0
        best = product(piece, enter, leave)
        columns = piece.inputs + sum(int((side < 0).sum()) for side in sides.values())
        if columns * max(node.size for node in piece.nodes) <= MEMORY:
            if clock.late():  # the product is what is known of this piece
                total *= best * (1 + 4 * UNIT)
                continue
            share = 1 if number == len(pieces) - 1 else 2
            part = clock.limited(clock.seconds_left() / share, clock.work_left() / share)
            with part, suppress(clock.Late):
                best = min(best, semidefinite(piece.piecewise(sides), enter, leave))
        total *= best * (1 + 4 * UNIT)
    return total


def _pieces(graph: Graph, states: Mapping[int, Tensor], most: int) -> list[tuple[int, int]]:
    """`(first, last)` node of each piece, from the input on: built from the output back, as
    large as `most` allows.
    """
    end = len(graph.nodes)
    users = [[k for k in range(end) if i in graph.nodes[k].inputs] for i in range(end)]
    # no path jumps over the ReLU
    cuts = [i for i in graph.relus if all(k <= i for j in range(i) for k in users[j])]

    def free(first: int, last: int) -> int:
        return sum(int((states[i] < 0).sum()) for i in graph.relus if first <= i < last)

    last = end - 1
    pieces = []
    count = free(cuts[-1] + 1, end) if cuts else 0
    for cut, before in zip(reversed(cuts), [*reversed(cuts[:-1]), 0]):
        more = free(before + 1, cut + 1)  # what comes with it if there is no cut here
        if count + more > most:
            pieces.append((cut, last))
            last = graph.nodes[cut].inputs[0]
            count = more - free(cut, cut + 1)
        else:
            count += more
    pieces.append((0, last))
    return pieces[::-1]


def _piece(
    graph: Graph, states: Mapping[int, Tensor], first: int, last: int
) -> tuple[Graph, dict[int, Tensor]]:
    """The part of a graph from ReLU node `first` (0: the input) to `last`, the ReLU itself
    replaced by what it lets through.
    """
    start = graph.nodes[first]
    nodes = [Node((), start.shape, start.place)]
    number = {first: 0}
    shift = 1
    if first:  # a neuron that is never active passes its slope at most
        one = torch.tensor(1.0, dtype=torch.float64)
        slope = one if start.slope is None else start.slope
        passes = torch.where(states[first] == 0, slope, 1.0)
        nodes.append(Node((0,), start.shape, start.place, Affine(Scale(passes))))
        number[first], shift = 1, 2
    sides: dict[int, Tensor] = {}
    for i in range(first + 1, last + 1):
        number[i] = shift + i - first - 1
        nodes.append(
            replace(graph.nodes[i], inputs=tuple(number[j] for j in graph.nodes[i].inputs))
        )
        if i in states:
            sides[number[i]] = states[i]
    return Graph(tuple(nodes)), sides


def _settle(
    form: Form, w: Tensor, t: Tensor, value: Tensor, enough: float
) -> tuple[Tensor, Tensor]:
    """Newton with a shrinking barrier until the proved bound stops falling, is `enough`, or
    late; and its multipliers.
    """
    best = t
    for gap in GAPS:
        before = value
        for _ in range(6):
            if clock.late():
                break
            clock.spend(3 * 2 * (w.shape[1] + t.shape[1] + form.A.shape[2]) ** 3)
            last = w.sum()
            _, w, t, _ = tighten(form, w, t, torch.full((1,), enough, dtype=torch.float64), 3, gap)
            if (last - w.sum()).abs() < 0.1 * gap * w.sum():
                break
        proved = _proved(form, w, t)[0]
        value, best = (proved, t) if proved < value else (value, best)
        if value <= enough or clock.late() or (gap < 0.1 and before - value < 1e-3 * before):
            break
    return value, best


def _with(form: Form, t: Tensor) -> Tensor:
    """The bounds that these multipliers prove, each with the smallest weight that goes with
    them: `(m,)`, inf for none.
    """
    n = form.A.shape[2]
    s = form.matrix(torch.zeros(len(t), 1, dtype=torch.float64), t)
    factor, failed = torch.linalg.cholesky_ex(s[:, n:, n:])
    cross = torch.cholesky_solve(s[:, n:, :n], factor)
    least = torch.linalg.eigvalsh(s[:, :n, n:] @ cross - s[:, :n, :n])[:, -1:]
    value = prove(form, least.nan_to_num(0.0).clamp(min=0) * (1 + 1e-9) + 1e-300, t)
    return value.masked_fill(failed != 0, math.inf)


def _proved(form: Form, w: Tensor, t: Tensor) -> Tensor:
    """The bound of the smallest multiple of `w` that a Cholesky factor proves with this `t`, to
    about 1e-6: `(m,)`.
    """
    best = prove(form, w, t)
    low = torch.zeros(len(w), dtype=torch.float64)
    high = torch.ones(len(w), dtype=torch.float64)
    for _ in range(20):
        if clock.out_of_time():
            break
        middle = (low + high) / 2
        value = prove(form, w * middle[:, None], t)
        proved = torch.isfinite(value)
        best = torch.minimum(best, value)
        low = torch.where(proved, low, middle)
        high = torch.where(proved, middle, high)
    return best
