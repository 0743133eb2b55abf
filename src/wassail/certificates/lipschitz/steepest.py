"""Lower bounds: the steepest points that an ascent finds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.matrix_norms import FEW_SIGNS
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region, Where
from wassail.errors import InputError
from wassail.geometry import maximiser, operator_norm
from wassail.network import Model
from wassail.rounding import UNIT
from wassail.threat import dual
from wassail.ties import first_largest

CLIMB = 24  # steps of the ascent to steeper points of a smooth network


def jacobians(graph: Graph, x: Tensor) -> Tensor:
    """`J` at flat points `(m, n)`: `(m, K, n)`."""
    with torch.enable_grad():
        points = x.reshape(-1, *graph.nodes[0].shape).clone().requires_grad_(True)
        z = graph.logits(points)
        rows = []
        for k in range(graph.outputs):
            clock.look()
            (row,) = torch.autograd.grad(z[:, k].sum(), points, retain_graph=True)
            rows.append(row.flatten(1))
    return torch.stack(rows, 1).detach()


def ascend(
    graph: Graph,
    region: Region,
    x: Tensor,
    norm_in: float,
    norm_out: float,
    spread: float | None = None,
) -> Tensor:
    """Points of a region moved to steeper ones of a smooth network, `(m, n)`: an ascent on
    `||J(x)^T w||_s`.

    w `(K,)`: the combination of outputs that grows fastest at the start, in the dual norm of
    theirs. Each point has its own step: longer after a success, else shorter; it never moves to a
    lower value. spread: of the first steps.
    """
    low, high = region.box
    width = (high - low)[torch.isfinite(high - low)]
    first = spread if spread is not None else float(width.max()) if len(width) else 1.0
    # rounded to float32: any length will do
    step = x.new_full((len(x), 1), float(torch.tensor(0.1 * first)))
    w = _steepest(jacobians(graph, x), norm_in, norm_out)
    best, pull = _slope(graph, x, w, norm_in)
    for _ in range(CLIMB):
        clock.look()
        moved = region.inside(x + step * pull)
        value, turn = _slope(graph, moved, w, norm_in)
        better = (value > best)[:, None]
        x = torch.where(better, moved, x)
        pull = torch.where(better, turn, pull)
        best = torch.maximum(value, best)
        step = torch.where(better, 1.5 * step, 0.3 * step)
    return x


def _steepest(jacobian: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """`w` `(m, K)` with `||J^T w||` about the norm: in turn the best direction for the outputs
    and the best outputs for it.
    """
    rows = torch.linalg.vector_norm(jacobian, dual(norm_in), dim=2)
    w = torch.zeros_like(rows).scatter(1, first_largest(rows)[:, None], 1.0)
    for _ in range(4):
        u = maximiser((w[:, None] @ jacobian)[:, 0], norm_in)
        w = maximiser((jacobian @ u[:, :, None])[:, :, 0], dual(norm_out))
    return w


def _slope(graph: Graph, x: Tensor, w: Tensor, norm_in: float) -> tuple[Tensor, Tensor]:
    """`||J(x)^T w||_s` at points `(m, n)`, `(m,)`, and the direction in which it grows, its
    largest entry 1.
    """
    with torch.enable_grad():
        points = x.clone().requires_grad_(True)
        z = (graph.logits(points.reshape(-1, *graph.nodes[0].shape)) * w).sum()
        (g,) = torch.autograd.grad(z, points, create_graph=True)
        value = torch.linalg.vector_norm(g, dual(norm_in), dim=1)
        (pull,) = (
            torch.autograd.grad(value.sum(), points)
            if value.requires_grad
            else (torch.zeros_like(x),)
        )
    pull = torch.nan_to_num(pull)
    return value.detach(), pull / pull.abs().amax(1, keepdim=True).clamp(min=1e-300)


def jacobian_norms(jacobian: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """`||J||_{r -> s}` of `(m, K, n)`: `(m,)`; a lower bound of it where the norm is NP-hard
    and large.
    """
    _, outputs, inputs = jacobian.shape
    # what operator_norm enumerates
    signs = outputs if norm_out == 1 and (norm_in == 2 or outputs <= inputs) else inputs
    if norm_in != 1 and norm_out != math.inf and not norm_in == norm_out == 2 and signs > FEW_SIGNS:
        rows: Tensor = torch.linalg.vector_norm(jacobian, dual(norm_in), dim=2)
        return rows.amax(1)  # the longest row is no longer than the norm
    return operator_norm(jacobian, norm_in, norm_out)


def room_of(outputs: int, inputs: int) -> float:
    """How far the norm of an `(outputs, inputs)` matrix as it is computed may be from its norm,
    relatively.

    One operation loses half of `UNIT`, a norm adds up `outputs + inputs` numbers one after the
    other at most, and the singular values of LAPACK are off by a small multiple of that. Never less
    than 1e-12, so that entries with a few wrong digits do not make the two sides of a bound cross.
    """
    return max(1e-12, (outputs + inputs + 16) * 4 * UNIT)


def margin_rows(classes: int, labels: Iterable[int] | None) -> Tensor:
    """`e_j - e_k` for every pair of classes, at least one of them among the labels, `(J, K)`;
    the norm ignores signs.
    """
    if classes < 2:
        raise InputError(
            "the model has one output: margins need two classes, use outputs='logits'."
        )
    try:
        wanted = set(range(classes)) if labels is None else {int(k) for k in labels}
    except (TypeError, ValueError):
        wanted = set()
    if not wanted or not wanted <= set(range(classes)):
        raise InputError(
            f"labels {labels!r} are not among the classes: give a list of some of 0..{classes - 1}."
        )
    eye = torch.eye(classes, dtype=torch.float64)
    return torch.stack(
        [eye[j] - eye[k] for k in range(classes) for j in range(k) if {j, k} & wanted]
    )


def as_graph(
    model: Model | Graph, domain: Where = None, shape: Sequence[int] | None = None
) -> Graph:
    """The structure of a model, its input shape taken from `shape`, the domain's tensors, or
    its first layer.
    """
    if isinstance(model, Graph):
        return model
    if shape is None and isinstance(domain, Ball):
        shape = tuple(domain.centre.shape)
    if shape is None and isinstance(domain, tuple | list):
        shape = next(
            (tuple(side.shape) for side in domain if isinstance(side, Tensor) and side.ndim), None
        )
    if shape is None and isinstance(model, nn.Module):
        first = next((m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
        shape = (first.in_features,) if isinstance(first, nn.Linear) else None
    if shape is None:
        raise InputError(
            "the shape of a sample is not known: give shape=(3, 32, 32), or a domain with "
            "tensors of that shape."
        )
    region = Region.make(domain, math.prod(shape))
    ends = torch.stack([region.centre, *(side for side in region.box if side.isfinite().all())])
    return read(model, shape, smooth=True, samples=ends.reshape(-1, *shape))
