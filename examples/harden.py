"""Harden a model for the distributional threat: a few lines in a training loop.

    python examples/harden.py

Fine-tunes an embedded digits network with `ws.robust_loss` and prints what it can lose over
`Omega_1(0.05)` before and after. Put your own model and data in their place.
"""

import copy

import torch
from torch import nn

import wassail as ws

THREAT = ws.Threat(norm="inf", order=1, eps=0.05)


def harden(model: nn.Module, steps: int = 200) -> nn.Module:
    """A copy of the model, trained on its worst distribution."""
    model = copy.deepcopy(model).train()
    x, y = ws.zoo.data("digits", "train")
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    price = ws.Price()
    for _ in range(steps):
        rows = torch.randperm(len(x), generator=generator)[:100]
        loss = ws.robust_loss(model, x[rows], y[rows], THREAT, price=price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def attacked(model: nn.Module) -> tuple[float, float]:
    """Clean accuracy, and at most so much over the ball."""
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:200], y[:200], norm=THREAT.norm, passes=50)
    curve = ws.risk_curve(flips, order=THREAT.order)
    return curve(0)[1], curve(THREAT.eps)[1]


def main(steps: int = 200) -> tuple[float, float]:
    """Print both; return what is left over the ball before and after."""
    model = ws.zoo.load("digits-cnn")
    before = attacked(model)
    after = attacked(harden(model, steps))
    print(f"before: {100 * before[0]:.1f} % right, at most {100 * before[1]:.1f} % over {THREAT}")
    print(f"after:  {100 * after[0]:.1f} % right, at most {100 * after[1]:.1f} % over {THREAT}")
    return before[1], after[1]


if __name__ == "__main__":
    main()
