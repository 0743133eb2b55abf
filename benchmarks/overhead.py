"""How much of the engine's time is not the model's: `python benchmarks/overhead.py >
docs/overhead.md`.
"""

import math
import time

import torch

import wassail as ws
from foundations import Clock
from zoo_path import images, load


def main() -> None:
    torch.set_num_threads(1)
    print("# Overhead over the bare passes\n")
    print(
        "Command: `python benchmarks/overhead.py`. Share of the wall time of `nearest` outside "
        "the model's forward and"
    )
    print(
        "autograd's backward calls, one thread, 100 passes a sample. The small networks answer "
        "in 0.1 ms a sample, so exact"
    )
    print(
        "projections inside the box weigh as much as their passes; from ResNet-18's size on they "
        "vanish.\n"
    )
    print("| network, images | norm | seconds | overhead |\n|---|---|---|---|")
    for name, n in (("cifar_resnet18_aa", 8), ("vnn_resnet4b", 64), ("cifar_cnn_a_adv", 64)):
        model, dataset = load(name)
        x, y = images(dataset, n)
        for norm in (math.inf, 2.0, 1.0):
            clock = Clock(model)
            start = time.perf_counter()
            with clock:
                ws.nearest(clock.model, x, y, norm, passes=100)
            seconds = time.perf_counter() - start
            print(
                f"| `{name}`, {n} | l{norm:g} | {seconds:.1f} | {1 - clock.spent / seconds:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
