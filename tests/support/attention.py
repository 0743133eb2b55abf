"""What bounds on attention are compared with: attention itself, its Jacobian's norm at a point, an
ascent on that norm, and the bounds at single inputs and over whole transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.matrix_norms import change, matrix_norm
from wassail.certificates.graph.region import Region
from wassail.paper import attention_bounds
from wassail.paper.transformer_constants import TransformerConstants

Function: TypeAlias = Callable[[Tensor], Tensor]


def _leading(
    function: Function, x: Tensor, direction: Tensor, iterations: int
) -> tuple[float, Tensor, Tensor]:
    """The norm, the direction `D` of length 1 it was found at, and `J D` scaled to length 1."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x)
        dual = torch.zeros_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(
            y, x, dual, create_graph=True
        )  # linear in dual, so its derivative there is J
    norm = 0.0
    image = y.detach()
    for _ in range(iterations):
        direction = direction / torch.linalg.vector_norm(direction)
        (image,) = torch.autograd.grad(back, dual, direction, retain_graph=True)
        last = norm
        norm = float(torch.linalg.vector_norm(image))
        if norm == 0 or abs(norm - last) <= 1e-9 * norm:
            break
        (direction,) = torch.autograd.grad(y, x, image / norm, retain_graph=True)
    return norm, direction / torch.linalg.vector_norm(direction), image / max(norm, 1e-300)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _uphill(function: Function, x: Tensor, direction: Tensor, image: Tensor) -> Tensor:
    """The gradient of `<u, J(X) D>` in X."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (back,) = torch.autograd.grad(function(x), x, image, create_graph=True)
        (gradient,) = torch.autograd.grad((back * direction).sum(), x)
    return gradient


def steepest(
    function: Function,
    x: Tensor,
    project: Function,
    steps: int = 50,
    size: float = 0.1,
    seed: int = 0,
) -> tuple[float, Tensor]:
    """Ascent on `|J(X)|` from x inside a set given by its projection: the largest norm met and
    where.

    The gradient of the norm is that of `<u, J(X) D>` with the leading singular vectors u and D held
    fixed (Danskin). Steps are `size` times the length of x and shrink by a fifth whenever they do
    not climb.
    """
    direction = torch.randn(x.shape, dtype=x.dtype, generator=_generator(seed))
    best, direction, image = _leading(function, x, direction, 200)
    stride = size * float(torch.linalg.vector_norm(x).clamp(min=1e-6))
    for _ in range(steps):
        gradient = _uphill(function, x, direction, image)
        length = float(torch.linalg.vector_norm(gradient))
        if not 0 < length < math.inf:
            break
        trial = project(x + gradient * (stride / length))
        norm, turned, image_there = _leading(function, trial, direction, 10)
        if norm > best:
            best = norm
            x = trial
            direction = turned
            image = image_there
        else:
            stride *= 0.8
    return best, x


def jacobian_norm(function: Function, x: Tensor, iterations: int = 200, seed: int = 0) -> float:
    """A lower bound on the spectral norm of a function's Jacobian at x, in practice its value:
    power iteration.

    It stops when the norm stands still to 1e-9. Whatever the direction is, `|J D| / |D|` is a lower
    bound.
    """
    return _leading(
        function, x, torch.randn(x.shape, dtype=x.dtype, generator=_generator(seed)), iterations
    )[0]


def attend(
    x: Tensor, a: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """`f(X)` for `X` `(n, d)`: `(n, o)`; with a head axis in front, `A` `(H, d, d)` and `V`
    `(H, o, d)`, the heads' sum.
    """
    y = x @ a.mT if bias is None else x @ a.mT + bias[..., None, :]
    scores = y @ x.T if mask is None else y @ x.T + mask
    out = torch.softmax(scores, -1) @ x @ v.mT
    return out.sum(0) if a.ndim == 3 else out


def _each(function: Function, x: Tensor) -> Tensor:
    found = [function(t) for t in x.reshape(-1, *x.shape[-2:])]
    return torch.stack(found).reshape(x.shape[:-2])


def local_bound(
    x: Tensor, a: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """An upper bound on `|J(X)|` at inputs `(..., n, d)`: `(...)`.

    Besides the sum of the three terms (the first is `|V| |P|`, the second as in fact 1), the input
    is split into what all tokens share and the rest, `1 (x) c` and `D` with `sum_j D_j = 0`. On the
    first, where the second term vanishes, `J` is the matrix `M = [V (I + S_i A)]_i / sqrt(n)`; it
    is known, and so is `N = M^T J` on the rest. On the rest, with `Q = P - 1/n`,

        |J| <= b = (|Q (x) V|^2 + |T|^2 + 2 |T (Q (x) V)^T|)^(1/2) + max_i |V S_i A|,

    the mixed product being of the form of `T` again. `|J|^2` is at most the largest eigenvalue of
    `[[|M|^2, |N|], [|N|, b^2]]`.
    """
    return _each(lambda t: attention_bounds.region_bound(t, t, a, v, bias, mask), x)


def euclidean_bound(graph: Graph, region: Region, norm_in: float, norm_out: float) -> float:
    """`||J||_{r -> s}` of a transformer over a region by the Euclidean constants of its modules
    (THEORY 5)."""
    walk = TransformerConstants.make(graph, region)
    last = graph.nodes[-1]
    size = walk.stretch(0, len(graph.nodes) - 1) + math.log(change(graph.outputs, 2.0, norm_out))
    # or the last matrix changes from the 2-norm to s in one piece
    if isinstance(last.map, Matrix) and len(last.shape) == 1:
        leave = matrix_norm(last.map.weight, 2.0, norm_out)
        size = min(size, walk.stretch(0, last.inputs[0]) + math.log(max(leave, 1e-300)))
    return (
        change(graph.inputs, norm_in, 2.0) * math.exp(size) * (1 + 1e-12)
        if size < 700
        else math.inf
    )
