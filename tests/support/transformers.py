"""Small transformers and their parts, with the nodes that each is read into."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks import Net


def linear(n: int, k: int = 3) -> nn.Module:
    return nn.Linear(n, k)


class Encoder(nn.Module):
    """torch's own encoder layer on 5 tokens of width 8."""

    def __init__(self, first: bool, batch_first: bool, mask: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 12, activation="gelu", batch_first=batch_first, norm_first=first, dropout=0.3
        )
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        mask = (
            nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype) if self.mask else None
        )
        y = self.layer(x if self.batch_first else x.transpose(0, 1), src_mask=mask)
        return self.head(y.mean(1 if self.batch_first else 0))


class Heads(nn.Module):
    """`nn.MultiheadAttention`, with or without its weights, and masks of both kinds."""

    def __init__(self, weights: bool, mask: Tensor | None = None) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 4, batch_first=True)
        self.head = nn.Linear(40, 3)
        self.weights = weights
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask if self.mask is None or self.mask.dtype == torch.bool else self.mask.to(x)
        return self.head(
            self.heads(x, x, x, need_weights=self.weights, attn_mask=mask)[0].flatten(1)
        )


class Block(nn.Module):
    """A Pre-LN block as vision libraries write it: one matrix for queries, keys and values,
    fused or spelled out.
    """

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 9), nn.GELU("tanh"), nn.Linear(9, width))
        self.heads = heads
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q * (width // self.heads) ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        x = x + self.project(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    """Patches, class token and position embedding, blocks, a norm, the class token's head."""

    def __init__(self, fused: bool = False, width: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.ones(1, 1, width))
        self.position = nn.Parameter(torch.ones(1, 5, width))
        self.blocks = nn.Sequential(Block(width, 2, fused), Block(width, 3, fused))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


TOKENS = (5, 8)


BLOCK = ["Normalise", "Product", "Softmax", "Product", "Normalise"]


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


CURVED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "pre-LN": (lambda: Encoder(True, True), TOKENS, BLOCK),
    "post-LN, batch second": (
        lambda: Encoder(False, False),
        TOKENS,
        ["Product", "Softmax", "Product", "Normalise", "Normalise"],
    ),
    "pre-LN, batch second": (
        lambda: Encoder(True, False),
        TOKENS,
        BLOCK,
    ),
    "causal": (lambda: Encoder(True, True, True), TOKENS, BLOCK),
    "heads with weights": (lambda: Heads(True), TOKENS, BLOCK[1:4]),
    "heads, boolean mask": (lambda: Heads(False, CAUSAL), TOKENS, BLOCK[1:4]),
    "heads, additive mask": (
        lambda: Heads(True, torch.where(CAUSAL, -math.inf, 0.3)),
        TOKENS,
        BLOCK[1:4],
    ),
    "vision": (Vision, (1, 4, 4), [*BLOCK, *BLOCK, "Normalise"]),
    "vision, fused": (lambda: Vision(True), (1, 4, 4), [*BLOCK, *BLOCK, "Normalise"]),
    "RMS norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6, eps=1e-3), linear(6)),
        (4,),
        ["Normalise"],
    ),
    "norm of two axes": (
        lambda: nn.Sequential(nn.LayerNorm((2, 4)), nn.Flatten(), linear(8)),
        (2, 4),
        ["Normalise"],
    ),
    "norm without gain": (
        lambda: nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), linear(4)),
        (4,),
        ["Normalise"],
    ),
    "group norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), linear(12)),
        (4, 3),
        ["Normalise"],
    ),
    "gate": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GLU(), linear(3)), (4,), ["Product"]),
    "softmax over channels": (
        lambda: nn.Sequential(nn.Softmax(1), nn.Flatten(), linear(12)),
        (4, 3),
        ["Softmax"],
    ),
    "broadcast product": (
        lambda: Net(
            lambda m, x: m.b(
                m.a(x)[:, :, None] * x.sum(1)[:, None, None] + x.square()[:, None]
            ).flatten(1)[:, :3],
            a=nn.Linear(4, 2),
            b=nn.Linear(4, 4),
        ),
        (4,),
        ["Product", "Product"],
    ),
    "einsum": (
        lambda: Net(
            lambda m, x: m.a(
                torch.einsum(
                    "bij,bjk->bik", torch.einsum("bid,bjd->bij", x, m.k(x)).softmax(-1), x
                ).flatten(1)
            ),
            a=linear(12),
            k=nn.Linear(4, 4),
        ),
        (3, 4),
        ["Product", "Softmax", "Product"],
    ),
    "padding mask": (
        lambda: Net(
            lambda m, x: m.a(
                (x @ x.transpose(1, 2))
                .masked_fill(torch.tensor([False, True, False]), -math.inf)
                .softmax(-1)
                .flatten(1)
            ),
            a=linear(9),
        ),
        (3, 4),
        ["Product", "Softmax"],
    ),
}
