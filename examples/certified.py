"""Train a model whose robustness over a Wasserstein ball can be proved.

    python examples/certified.py

Trains a small digits network with `ws.certified_loss`, one ball for each sample in a step, and
prints both sides of what is left over `Omega_1(0.05)`. Put your own model and data in their place.
"""

import torch
from torch import nn

import wassail as ws

THREAT = ws.Threat(norm="inf", order=1, eps=0.05)


def network() -> nn.Sequential:
    """A small network: what intervals can bound is a sequence of layers that ends in a linear."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(256, 50), nn.ReLU(), nn.Linear(50, 10))


def train(steps: int = 600) -> nn.Module:
    """On the estimated bound of the error; the budget grows over the first half."""
    model = network()
    x, y = ws.zoo.data("digits", "train")
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    price = ws.Price()
    for step in range(steps):
        share = min(1.0, 2 * (step + 1) / steps)
        threat = ws.Threat(norm="inf", order=1, eps=share * THREAT.eps)
        rows = torch.randperm(len(x), generator=generator)[:100]
        loss = ws.certified_loss(
            model, x[rows], y[rows], threat, "error", price=price, generator=generator
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(steps: int = 600) -> tuple[float, float]:
    """Print both sides; return them."""
    model = train(steps)
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:200], y[:200], norm="inf", passes=50)
    radii = ws.radii(model, x[:200], y[:200], norm="inf", upper=flips.distances)
    low, high = ws.risk_curve(flips, radii, order=1)(THREAT.eps)
    print(f"between {100 * low:.1f} % and {100 * high:.1f} % stay right over {THREAT}")
    return low, high


if __name__ == "__main__":
    main()
