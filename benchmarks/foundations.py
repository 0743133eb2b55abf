"""WDA and WDA++ on real networks: accuracies, passes and time, beside the authors' implementation's
figures.

    python benchmarks/foundations.py > docs/foundations.md

First 200 test images (`mnist_trades` 100), domain [0, 1], the paper's settings scaled to eps. The
authors' figures were measured on the same images with their own code, which selects rivals by the
raw logit.
"""

import math
import sys
import time
from pathlib import Path

import torch

import wassail as ws
from zoo_path import ROOT, images, load

sys.path.insert(0, str(Path(ROOT) / "tests" / "attacks"))
from test_real_networks import THEIRS

INF = math.inf


def main() -> None:
    print("# WDA and WDA++ beside the authors' implementation\n")
    print(
        "Command: `python benchmarks/foundations.py`. Accuracy in %, ours / theirs; passes per "
        "attacked sample (F forward,"
    )
    print(
        "B backward); `overhead`: share of our wall time that is not spent inside the model's "
        "forward and backward calls.\n"
    )
    print(
        "| network, norm, eps | clean | WDA k=1 | k=2 O1 | k=2 O2 | WDA++ O1 | O2 | F + B, ours "
        "| theirs | s | overhead |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (name, n, norm, eps), theirs in THEIRS.items():
        model, dataset = load(name)
        x, y = images(dataset, n)
        clock = Clock(model)
        start = time.perf_counter()
        with clock:
            flips = ws.nearest(clock.model, x, y, norm, method="wda++", eps=eps)
        seconds = time.perf_counter() - start
        ours = [100 * ws.allocate(flips, eps, p).accuracy for p in (1, 2)]
        mixed = [
            100 * ws.wda(model, x, y, ws.Threat(norm, order, eps), kappa=kappa).accuracy
            for order, kappa in ((INF, 1), (1, 2), (2, 2))
        ]
        cells = [f"{a:.2f} / {b:.2f}" for a, b in zip(mixed + ours, (*theirs[:3], *theirs[5:]))]
        forwards, backwards = flips.passes()
        print(
            f"| `{name}`, l{norm:g}, {eps:.4g} | {100 * flips.clean_accuracy():.1f} | "
            f"{' | '.join(cells)} | "
            f"{forwards:.1f} + {backwards:.1f} | {theirs[3]} + {theirs[4]} | {seconds:.1f} | "
            f"{1 - clock.spent / seconds:.0%} |",
            flush=True,
        )


class Clock:
    """Times the model's own forward calls and autograd's backward calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inner = model
        self.spent = 0.0
        self.grad = torch.autograd.grad

    def model(self, x: torch.Tensor) -> torch.Tensor:
        return self.timed(self.inner, x)

    def timed(self, call, *args, **options):
        start = time.perf_counter()
        result = call(*args, **options)
        self.spent += time.perf_counter() - start
        return result

    def __enter__(self) -> None:
        torch.autograd.grad = lambda *args, **options: self.timed(self.grad, *args, **options)

    def __exit__(self, *exc) -> None:
        torch.autograd.grad = self.grad


if __name__ == "__main__":
    main()
