"""The paper's constant for self-attention, and the truth beside bounds on it: attention itself, its
Jacobian's norm at a point, and an ascent on that norm.

The constant is that of Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024, arXiv
2312.14820 (Theorem 3.3). Our bounds: `attention_bounds.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.paper.attention_bounds import UP, spectral

Function: TypeAlias = Callable[[Tensor], Tensor]


def castin(tokens: int, a: Tensor, v: Tensor, radius: float, bias: Tensor | None = None) -> float:
    """The paper's constant for n tokens in the ball of radius R: `sqrt(3) |V| (|A|^2 R^4 (4 n + 1)
    + n)^(1/2)`.

    Their attention has no biases. A query bias u is one of theirs for tokens `(x_j, t)` with an
    entry more, of any constant t: `A` becomes `[[A, u / t], [0, 0]]` and `R^2` becomes `R^2 + t^2`;
    the best of a few t is taken.
    """
    if bias is None or not bias.any() or radius == 0:
        best = float(spectral(a)) * radius**2
    else:
        scales = [radius * 2.0**k for k in range(-8, 3)]
        best = min(
            float(spectral(torch.cat([a, bias[:, None] / t], 1))) * (radius**2 + t**2)
            for t in scales
        )
    return (
        math.sqrt(3)
        * float(spectral(v))
        * math.hypot(best * math.sqrt(4 * tokens + 1), math.sqrt(tokens))
        * UP
    )


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


def jacobian_norm(function: Function, x: Tensor, iterations: int = 200, seed: int = 0) -> float:
    """A lower bound on the spectral norm of a function's Jacobian at x, in practice its value:
    power iteration.

    It stops when the norm stands still to 1e-9. Whatever the direction is, `|J D| / |D|` is a lower
    bound.
    """
    return _leading(
        function, x, torch.randn(x.shape, dtype=x.dtype, generator=_generator(seed)), iterations
    )[0]


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


def _uphill(function: Function, x: Tensor, direction: Tensor, image: Tensor) -> Tensor:
    """The gradient of `<u, J(X) D>` in X."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (back,) = torch.autograd.grad(function(x), x, image, create_graph=True)
        (gradient,) = torch.autograd.grad((back * direction).sum(), x)
    return gradient


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
