r"""Harden a model for the distributional threat: a few lines in a training loop.

    python examples/harden.py
    python examples/harden.py --model module:factory --data train.npz --held test.npz \
        --eps 2/255 --loss chance --lose 0 --certified 0.5 --minutes 60 --out hardened.pt

Fine-tunes a model with `ws.robust_loss` and, if `--certified` is not 0, with `ws.certified_loss`
beside it, and prints what is left over `Omega_1(eps)` before and after, from both sides. Without
options: an embedded digits network. Models and data are named as for `wassail evaluate`; minutes
are those of the processor.

`--lose` is how much accuracy on clean samples may be lost. Cross entropy is trained beside the
other losses then, and their weight follows the accuracy on samples that are held back.
`--loss chance` gives up samples that cannot be kept, so that others are kept at larger distances;
it needs a trained model to start from.
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
EVERY = 20  # steps between two looks at the samples that are held back
WATCHED = 1000  # of them, and no more than a tenth of all


def harden(  # noqa: PLR0913
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: ws.Threat,
    share: Callable[[int], float],
    certified: float = 0.0,
    part: float = 0.25,
    rate: float = 1e-3,
    loss: str = "error",
    lose: float | None = None,
    climb: int = 2,
    seed: int = 0,
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
        loss: "error", or "chance", which gives up samples that cannot be kept.
        lose: accuracy on clean samples that may be lost, 0 to 1; default None, any.
        climb: steps of `ws.robust_loss`; default 2.
        seed: of all draws; default 0.
        report: called after each step.
    """
    model = copy.deepcopy(model).eval().requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    climbed = ws.Price()
    bounded = ws.Price()
    weight = 1.0
    if lose is not None:
        back = min(WATCHED, len(x) // 10)
        watched = (x[-back:], y[-back:])
        x = x[:-back]
        least = accuracy(model, *watched) - lose
    step = 0
    while (done := share(step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * done)) / 2
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        at = shifted(x[rows], generator)
        to = y[rows]
        total = ws.robust_loss(
            model, at, to, threat, loss, price=climbed, steps=climb, generator=generator
        )
        if certified:
            # its budget grows: the bounds of a model that was not trained for it are huge
            eps = part * threat.eps * min(1.0, 2 * done + 0.01)
            small = ws.Threat(threat.norm, threat.order, eps, threat.domain)
            bound = ws.certified_loss(
                model, at, to, small, loss, price=bounded, generator=generator
            )
            total = total + certified * bound
        if lose is not None:
            if step % EVERY == 0:
                room = (accuracy(model, *watched) - least) / 0.01
                weight *= math.exp(0.05 * max(-1.0, min(1.0, room)))
            total = nn.functional.cross_entropy(model(at), to) + weight * total
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        step += 1
        if report is not None:
            report(step, model)
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers on clean samples."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


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
    parser.add_argument("--loss", choices=("error", "chance"), default="error")
    parser.add_argument("--lose", type=float, help="clean accuracy that may be lost, 0 to 1")
    parser.add_argument("--climb", type=int, default=2, help="steps to the worst points")
    parser.add_argument("--seed", type=int, default=0)
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

    hardened = harden(
        model,
        x,
        y,
        threat,
        share,
        asked.certified,
        asked.part,
        asked.rate,
        asked.loss,
        asked.lose,
        asked.climb,
        asked.seed,
    )
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
