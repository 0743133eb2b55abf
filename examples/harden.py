r"""Harden a model for the distributional threat: a few lines in a training loop.

    python examples/harden.py
    python examples/harden.py --model module:factory --data train.npz --held test.npz \
        --eps 2/255 --certified 0.1 --minutes 60 --out hardened.pt

Fine-tunes a model with `ws.robust_loss` and, if `--certified` is not 0, with `ws.certified_loss`
beside it, and prints what is left over `Omega_1(eps)` before and after, from both sides. Without
options: an embedded digits network. Models and data are named as for `wassail evaluate`; minutes
are those of the processor.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import wassail as ws

BATCH = 100


def harden(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: ws.Threat,
    share: Callable[[int], float],
    certified: float = 0.0,
    part: float = 0.25,
    rate: float = 1e-3,
    report: Callable[[int, nn.Module], None] | None = None,
) -> nn.Module:
    """A copy of the model, trained on its worst distribution until `share(step)` is 1.

    Args:
        model: the network; its mode is eval, so that a batch norm does not mix samples.
        x: training samples.
        y: their labels.
        threat: what to harden against.
        share: how much of the training is over, 0 to 1, at each step.
        certified: weight of the certified part; default 0.
        part: of eps that is the budget of the certified part; default 0.25.
        rate: of Adam at the start.
        report: called after each step.
    """
    model = copy.deepcopy(model).eval().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    climbed = ws.Price()
    bounded = ws.Price()
    step = 0
    while (done := share(step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * done)) / 2
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        at = shifted(x[rows], generator)
        to = y[rows]
        loss = ws.robust_loss(
            model, at, to, threat, "error", price=climbed, steps=2, generator=generator
        )
        if (
            certified
        ):  # its budget grows: the bounds of a model that was not trained for it are huge
            eps = part * threat.eps * min(1.0, 2 * done + 0.01)
            small = ws.Threat(threat.norm, threat.order, eps, threat.domain)
            bound = ws.certified_loss(
                model, at, to, small, "error", price=bounded, generator=generator
            )
            loss = loss + certified * bound
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if report is not None:
            report(step, model)
    return model


def shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images of 32 pixels and more: a batch mirrored or not, and moved by up to two pixels."""
    if x.shape[-1] < 32:
        return x
    across = int(torch.randint(5, (), generator=generator))
    down = int(torch.randint(5, (), generator=generator))
    padded = nn.functional.pad(x, (2, 2, 2, 2), mode="replicate")
    moved = padded[..., down : down + x.shape[-2], across : across + x.shape[-1]]
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), moved.flip(-1), moved)


def both(model: nn.Module, x: Tensor, y: Tensor, threat: ws.Threat, prove: bool) -> list[float]:
    """Clean accuracy, at least so much over the ball (0 if not proved), and at most so much."""
    flips = ws.nearest(model, x, y, norm=threat.norm, passes=50)
    radii = None
    if prove:
        radii = ws.radii(model, x, y, norm=threat.norm, method="crown", upper=flips.distances)
    curve = ws.risk_curve(flips, radii, order=threat.order)
    return [curve(0)[1], *curve(threat.eps)]


def main(arguments: list[str] | None = None) -> list[list[float]]:
    """Print clean accuracy and both sides, before and after; return them."""
    parser = argparse.ArgumentParser(description="Harden a model for the distributional threat.")
    parser.add_argument("--model", default="digits-cnn")
    parser.add_argument("--data", default="digits:train")
    parser.add_argument("--held", default="digits", help="the first 500 are measured")
    parser.add_argument("--eps", default="0.05", help="of order 1, linf")
    parser.add_argument("--steps", type=int, default=200, help="without --minutes")
    parser.add_argument("--minutes", type=float, help="of the processor, instead of steps")
    parser.add_argument("--certified", type=float, default=0.0, help="weight of the bound")
    parser.add_argument("--part", type=float, default=0.25, help="of eps that is bounded")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--images", type=int, default=200, help="measured")
    parser.add_argument("--out", help="file for the weights")
    asked = parser.parse_args(arguments)
    threat = ws.Threat(norm="inf", order=1, eps=asked.eps)
    model = ws.zoo.open_model(asked.model).model
    data = ws.zoo.open_data(asked.data)
    x, y = data.read(0, len(data))
    held = ws.zoo.open_data(asked.held, asked.images)
    began = time.process_time()

    def share(step: int) -> float:
        if asked.minutes is None:
            return step / asked.steps
        return (time.process_time() - began) / 60 / asked.minutes

    hardened = harden(model, x, y, threat, share, asked.certified, asked.part, asked.rate)
    if asked.out:
        torch.save(hardened.state_dict(), asked.out)
    rows = []
    for name, network in (("before", model), ("after", hardened)):
        row = both(network, *held.read(0, len(held)), threat, bool(asked.certified))
        clean, low, high = (100 * value for value in row)
        print(f"{name}: {clean:.1f} % right; {low:.1f} to {high:.1f} % over {threat}", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
