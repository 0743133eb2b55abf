"""The four network architectures of the built-in digits zoo.

Every network takes float images of shape (N, 1, 8, 8) in [0, 1] and returns logits of shape (N,
10). They are written with plain modules and shape arithmetic that never depends on the batch, so
that ``torch.fx`` traces each of them into one straight-line graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_CLASSES = 10


def mlp() -> nn.Sequential:
    """ReLU multilayer perceptron 64-32-32-10; its 64 hidden units leave exact certificates within
    reach.

    (N, 1, 8, 8) -> (N, 10).
    """
    return _perceptron(nn.ReLU)


def gelu() -> nn.Sequential:
    """The perceptron of `mlp` with (erf) GELU in place of ReLU, so the two differ in smoothness
    only.

    (N, 1, 8, 8) -> (N, 10).
    """
    return _perceptron(nn.GELU)


def _perceptron(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 32),
        activation(),
        nn.Linear(32, 32),
        activation(),
        nn.Linear(32, _CLASSES),
    )


def cnn() -> nn.Sequential:
    """ReLU network of two convolutions (8 channels at 8x8, then 16 at 4x4) and two linear layers.

    (N, 1, 8, 8) -> (N, 10).
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, _CLASSES),
    )


class Attention(nn.Module):
    """Multi-head softmax self-attention, (N, tokens, width) -> (N, tokens, width).

    Written out instead of calling a fused kernel: every step is an elementary operation in the
    traced graph.
    """

    def __init__(self, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.width = width
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def _split(self, x: Tensor) -> Tensor:
        """(N, tokens, width) -> (N, heads, tokens, width / heads)."""
        return x.reshape(-1, self.tokens, self.heads, self.width // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of x, (N, tokens, width) -> (N, tokens, width)."""
        query = self._split(self.query(x))
        key = self._split(self.key(x))
        value = self._split(self.value(x))
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale
        mixed = torch.matmul(torch.softmax(scores, dim=-1), value)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(-1, self.tokens, self.width))
        return result


class Block(nn.Module):
    """Pre-LN transformer block: attention and a GELU perceptron, each normalised first and
    added to its input.
    """

    def __init__(self, tokens: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(tokens, width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, tokens, width) -> (N, tokens, width)."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(nn.Module):
    """Pre-LN vision transformer: sixteen 2x2 patches, width 32, 2 blocks of 2 heads, mean
    pooling, LayerNorm, head.
    """

    def __init__(self, width: int = 32, depth: int = 2, heads: int = 2, hidden: int = 64) -> None:
        super().__init__()
        tokens = 16
        self.patches = nn.Linear(4, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(Block(tokens, width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images, (N, 1, 8, 8) -> (N, 10)."""
        # (N, row, y, column, x) -> (N, row, column, y, x): one 2x2 patch per (row, column).
        patches = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        tokens = self.blocks(self.patches(patches) + self.position)
        logits: Tensor = self.head(self.norm(tokens.mean(dim=1)))
        return logits


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gelu": gelu,
    "vit": ViT,
}
"""Constructors of the randomly initialised networks, by the architecture names that
`wassail.zoo` uses.
"""
