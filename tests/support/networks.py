"""Small networks that many tests share, and what is read off them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wassail.certificates.graph.maps import Linear


class Net(nn.Module):
    """A model written in one line: its parts by name, and what to do with them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def __getattr__(self, name: str) -> nn.Module:
        return super().__getattr__(name)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and eval mode, all its numbers drawn anew; variances are positive."""
    g = torch.Generator().manual_seed(seed)
    for name, value in model.double().eval().state_dict().items():
        if value.is_floating_point():
            fresh = (
                torch.randn(value.shape, generator=g, dtype=torch.float64)
                / max(1, math.prod(value.shape[1:])) ** 0.5
            )
            value.copy_(fresh.abs() + 0.5 if "var" in name else fresh)
    return model


def prelu(model: nn.Module) -> nn.Module:
    """Slopes back between 0 and 1."""
    for module in seeded(model).modules():
        if isinstance(module, nn.PReLU):
            module.weight.data = module.weight.data.abs() % 1
    return model


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`(m, K, n)` at samples `(m, *shape)`."""
    x = x.clone().requires_grad_(True)
    out = function(x)
    rows = [
        torch.autograd.grad(out[:, k].sum(), x, retain_graph=True)[0].flatten(1)
        for k in range(out.shape[1])
    ]
    return torch.stack(rows, 1).detach()


def dense(map_: Linear, shapes: list[tuple[int, ...]], k: int) -> Tensor:
    """The matrix of a map in its input k, `(in, out)`."""
    size = math.prod(shapes[k])
    eye = torch.eye(size, dtype=torch.float64).reshape(-1, *shapes[k])
    return map_.forward(
        *[eye if i == k else eye.new_zeros(size, *s) for i, s in enumerate(shapes)]
    ).reshape(size, -1)


def one_sentence(text: str) -> None:
    assert text.endswith(".") and "\n" not in text and not text.endswith("..")
    assert ". " not in text
