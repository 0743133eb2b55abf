"""What `nearest` costs beside its passes: `python benchmarks/overhead.py > docs/overhead.md`; names
of networks after it choose some of them.

The calls of the model and of autograd are recorded, sizes of batches included, and made again
without anything in between. Both are measured in processor time.
"""

import math
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import wassail as ws
from zoo_path import images, load

NETWORKS = (
    ("cifar_cnn_a_adv", 64),
    ("mnist_madry_tiny", 64),
    ("vnn_resnet4b", 64),
    ("cifar_resnet18_aa", 8),
)
PASSES = 100
REPEATS = 3
HEAD = f"""\
# Overhead over the bare passes

Command: `python benchmarks/overhead.py`. Processor time of `nearest` over that of a replay of its
bare passes: the same calls of the model and of autograd with batches of the same size, and nothing
in between. One thread, {PASSES} passes a sample, the least of {REPEATS} measurements of each.

| network, images | norm | passes alone, s | `nearest`, s | overhead |
|---|---|---|---|---|"""


class Tape:
    """Records the calls of a model and of autograd, and makes them again."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inner = model
        self.calls: list[tuple[int, bool, list[bool]]] = []
        self.grad = torch.autograd.grad

    def model(self, x: Tensor) -> Tensor:
        """A forward pass that is recorded."""
        self.calls.append((len(x), torch.is_grad_enabled(), []))
        return self.inner(x)

    def pull(self, *args: Tensor, **options: bool) -> tuple[Tensor, ...]:
        """A backward pass that is recorded with the last forward pass that has as many rows."""
        rows = len(args[1])
        last = next(c for c in reversed(self.calls) if c[0] == rows and c[1])
        last[2].append(bool(options.get("retain_graph")))
        return self.grad(*args, **options)

    def __enter__(self) -> "Tape":
        torch.autograd.grad = self.pull
        return self

    def __exit__(self, *_: object) -> None:
        torch.autograd.grad = self.grad

    def replay(self, x: Tensor) -> None:
        """The same passes at the samples `(N, *shape)`, repeated where a batch is larger."""
        x = x.repeat(1 + max(rows for rows, _, _ in self.calls) // len(x), *[1] * (x.ndim - 1))
        for rows, graph, pulls in self.calls:
            part = x[:rows].clone()
            if not graph:
                with torch.no_grad():
                    self.inner(part)
                continue
            part.requires_grad_(True)
            z = self.inner(part)
            for again in pulls:
                torch.autograd.grad(z, part, torch.ones_like(z), retain_graph=again)


def spent(call: Callable[[], object]) -> float:
    """Processor time of a call, in seconds."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def measure(model: torch.nn.Module, x: Tensor, y: Tensor, norm: float) -> tuple[float, float]:
    """Seconds of the bare passes and of `nearest`, each the least of some."""
    with Tape(model) as tape:
        ws.nearest(tape.model, x, y, norm, passes=PASSES)
    bare = math.inf
    whole = math.inf
    for _ in range(REPEATS):
        bare = min(bare, spent(lambda: tape.replay(x)))
        whole = min(whole, spent(lambda: ws.nearest(model, x, y, norm, passes=PASSES)))
    return bare, whole


def main() -> None:
    torch.set_num_threads(1)
    print(HEAD)
    for name, n in NETWORKS:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        model, dataset = load(name)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        x, y = images(dataset, n)
        for norm in (math.inf, 2.0, 1.0):
            bare, whole = measure(model, x, y, norm)
            more = f"{whole / bare - 1:.0%}"
            row = (f"`{name}`, {n}", f"l{norm:g}", f"{bare:.2f}", f"{whole:.2f}", more)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
