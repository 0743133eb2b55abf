"""The paper's constant for self-attention.

It is that of Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024, arXiv
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
