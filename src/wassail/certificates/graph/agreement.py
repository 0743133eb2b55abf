"""Whether a graph is the model that it was read from: both are evaluated at points.

A certificate is about margins, so margins are compared, relative to how much they vary: a constant
that all logits share hides nothing. The program runs in float64, whatever the model computes in,
so that a translation that is wrong by a millionth is found. The model itself runs as it is, which
tells whether the program is what it does with a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph, Input, Relu, Smooth
from wassail.certificates.graph.program import Exact
from wassail.errors import InputError
from wassail.network import Model

CLOSE = 2.0**-22  # of the spread, between a graph and its program in float64
LOOSE = 2.0**-12  # of the spread, between a program and its model in float32
AMPLE = 2.0**7  # times the error of an arithmetic as it was simulated: sums have many terms
SCALES = (1.0, 4.0, -1.0, -64.0)  # of random points of [0, 1]
CUTS = 3  # of a segment on which an activation changes sides
CUT = 2.0**-6  # of its length


def probes(shape: tuple[int, ...], like: Tensor) -> list[Tensor]:
    """Random points `(m, *shape)` in groups, one for each scale; like: a tensor of their type,
    where the model takes its input.
    """
    unit = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    return [(scale * unit[: 4 if scale == 1 else 2]).to(like) for scale in SCALES]


def near_samples(samples: Tensor | None, like: Tensor) -> Tensor:
    """Some samples, and random points of the box that they span."""
    if samples is None or not len(samples):
        return like[:0]
    some = samples[:4].detach().to(like)
    low, high = some.amin(0), some.amax(0)
    draw = torch.rand(2, *some.shape[1:], generator=torch.Generator().manual_seed(1))
    return torch.cat([some, low + (high - low) * draw.to(like)])


@torch.no_grad()
def check(
    model: Model, program: Any, graph: Graph, points: list[Tensor], samples: Tensor | None
) -> Tensor:
    """The model's logits at groups of points, or an `InputError`: the graph, the program and the
    model are not one function there, or at some samples, or where activations change sides.
    """
    like = points[0]
    exact = Exact(program, like.dtype)
    more = [near_samples(samples, like)]
    ends = torch.cat([points[-1], more[0][:2] if len(more[0]) > 1 else points[-2]])
    more.append(crossings(graph, like.cpu(), ends.cpu()).to(like))
    rest = torch.cat(more)
    truth = _run(model, torch.cat(points), graph.outputs)
    found = torch.cat([truth, _run(model, rest, graph.outputs)])
    if not bool(torch.isfinite(found[: len(like)]).all()):
        raise InputError(
            "the model returns NaN or infinity at random points: check its weights and "
            "preprocessing."
        )
    groups = [group for group in (*points, *more) if len(group)]
    for x, run in zip(groups, torch.split(found, [len(group) for group in groups])):
        theirs = exact.logits(x.cpu())
        if bool(torch.isfinite(theirs).all() & torch.isfinite(run).all()):  # or it is far away
            _compare_graph(exact, x.cpu(), graph, theirs)
            _compare_model(exact, x.cpu(), run, theirs, groups[0] is x and not _charged(graph))
    return truth


def _charged(graph: Graph) -> bool:
    """Whether certificates may charge what rounding does to the model (`relax/executed.py`)."""
    return not graph.smooth and graph.execution is not None and not graph.execution.refusal


def _run(model: Model, x: Tensor, classes: int) -> Tensor:
    """The model's logits `(m, K)` in float64."""
    logits = model(x).cpu().double() if len(x) else torch.zeros(0, classes, dtype=torch.float64)
    if logits.shape != (len(x), classes):
        raise _other("it depends on the batch or on data.")
    return logits


def _other(why: str) -> InputError:
    return InputError(f"the structure read from the model does not reproduce its logits: {why}")


def _compare_graph(exact: Exact, x: Tensor, graph: Graph, theirs: Tensor) -> None:
    """theirs: of the program, in float64."""
    ours = graph.logits(x).cpu()
    if _near(ours, theirs, CLOSE, graph.common):
        return
    error = exact.logits(x, torch.finfo(torch.float64).eps) - theirs
    # The graph adds what the program does not: a clamp with a far limit is `c - relu(c - x)`.
    # So much that the margins are lost is more than may be excused.
    most = LOOSE * float(_centred(theirs).abs().max())
    error = error.abs() + _rounding_of(graph, x, ours).clamp(max=most / AMPLE)
    if not _near(ours, theirs, CLOSE, graph.common, AMPLE * error):
        raise _other("an operation is translated wrongly, please report this model.")


def _rounding_of(graph: Graph, x: Tensor, logits: Tensor) -> Tensor:
    """How far the logits of a graph move if every value is rounded once more."""
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for node in graph.nodes:
        given = [found[i] for i in node.inputs]
        value = x.to(graph.device).double() if isinstance(node.op, Input) else node.op.value(*given)
        drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        sign = drawn.sub(0.5).sign().to(value.device)
        found.append(value * (1 + sign * torch.finfo(torch.float64).eps))
    return (found[-1].cpu() - logits).abs()


def _compare_model(exact: Exact, x: Tensor, run: Tensor, theirs: Tensor, seen: bool) -> None:
    """run: of the model as it is; seen: whether its margins must be seen here."""
    dtype = exact.coarsest
    share = CLOSE if dtype == torch.float64 else LOOSE
    tiny = torch.finfo(dtype).tiny
    if _near(run, theirs, share, False, floor=tiny):
        return
    error = exact.logits(x, torch.finfo(dtype).eps) - theirs
    hidden = bool(_centred(error).abs().amax() >= _centred(theirs).abs().amax())
    if hidden and seen and theirs.shape[1] > 1:
        raise InputError(
            f"rounding in {dtype} hides the margins of the model: a constant that all logits "
            "share is too large, subtract it or use float64."
        )
    if not _near(run, theirs, share, False, AMPLE * error, tiny):
        raise _other("it depends on the batch or on data.")


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(1, keepdim=True)


def _near(
    a: Tensor,
    b: Tensor,
    share: float,
    common: bool,
    error: Tensor | float = 0.0,
    floor: float = 0.0,
) -> bool:
    """Whether two tables of logits `(m, K)` have the same margins, up to a share of the sample's
    own, and the same logits, up to a share of how much these vary, beside an error that is known.

    common: they may differ by one number for each sample; floor: what underflow may take.
    """
    more = floor
    more += 0.0 if isinstance(error, float) else float(error.nan_to_num(0.0, 0.0, 0.0).abs().max())
    more += 2.0**-45 * float(b.abs().max())
    margins = share * _centred(b).abs().amax(1, keepdim=True) + more
    same = bool((_centred(a - b).abs() <= margins).all())
    if common:
        return same
    levels = max(float((b - b.mean(0)).abs().max()), float(_centred(b).abs().max()))
    return same and bool(((a - b).abs() <= share * levels + more).all())


@torch.no_grad()
def crossings(graph: Graph, start: Tensor, end: Tensor) -> Tensor:
    """Points `(2 m, *shape)`: m, and the m that belong to them, close together, between which an
    activation changes sides; on the segments between given points `(m, *shape)`.

    A segment is cut on both sides of the root of the line through the values at its ends. Where
    the activation's input is linear there, a cut leaves `2 CUT` of it.
    """
    bent = [i for i, node in enumerate(graph.nodes) if isinstance(node.op, Relu | Smooth)]
    read = [graph.nodes[i].inputs[0] for i in bent]
    if not read:
        return start[:0].double()
    start, end = start.double(), end.double()
    watched = _swapped(graph, read, start, end)

    def value(points: Tensor) -> Tensor:
        found = graph.values(points)
        return torch.stack([found[i][k].flatten()[entry] for k, (i, entry) in enumerate(watched)])

    def chosen(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    low, high = value(start), value(end)
    for _ in range(CUTS):
        root = (low / (low - high)).nan_to_num(0.5)
        parts = [(root + side).clamp(CUT, 1 - CUT) for side in (-CUT, CUT)]
        a, b = (start + p.reshape(-1, *[1] * (start.ndim - 1)) * (end - start) for p in parts)
        at_a, at_b = value(a), value(b)
        early, late = (at_a > 0) != (low > 0), (at_b > 0) == (low > 0)
        start, end = (
            chosen(early, start, chosen(late, b, a)),
            chosen(early, a, chosen(late, end, b)),
        )
        low, high = (
            torch.where(early, low, torch.where(late, at_b, at_a)),
            torch.where(early, at_a, torch.where(late, high, at_b)),
        )
    return torch.cat([start, end])


def _swapped(graph: Graph, read: list[int], start: Tensor, end: Tensor) -> list[tuple[int, int]]:
    """For each segment a node and an entry of it that changes sides, on every segment of another
    layer if it can be; the first entry if there is none.
    """
    first, last = graph.values(start), graph.values(end)
    watched = []
    for k in range(len(start)):
        turn = k * len(read) // len(start)
        order = [*read[turn:], *read[:turn]]
        swaps = [((first[i][k] > 0) != (last[i][k] > 0)).flatten().nonzero()[:, 0] for i in order]
        found = [(i, int(swap[len(swap) // 2])) for i, swap in zip(order, swaps) if len(swap)]
        watched.append(found[0] if found else (order[0], 0))
    return watched
