"""What `nearest` costs beside its passes: `python benchmarks/overhead.py > tables.md`; names of
networks after it choose some of them. `docs/overhead.md` holds the tables and what they say.

The calls of the model and of autograd are recorded, sizes of batches included, and made again
without anything in between. Both are measured in processor time. Where adversarial-library is
installed, a second table has the time of its attacks at the same passes.
"""

import math
import sys
import time
import types
from collections.abc import Callable

import torch
from torch import Tensor

import wassail as ws
from zoo_path import images, load

NETWORKS = (  # images, passes, measurements
    ("cifar_cnn_a_adv", 64, 100, 6),
    ("mnist_madry_tiny", 64, 100, 6),
    ("vnn_resnet4b", 64, 100, 3),
    ("cifar_resnet18_aa", 4, 50, 1),
)
SMALL = {math.inf: 1e-4, 2.0: 1e-3, 1.0: 1e-2}  # radii at which APGD meets no flip and goes on
HEAD = """\
# Overhead over the bare passes

Command: `python benchmarks/overhead.py`. Processor time of `nearest` over that of a replay of its
bare passes: the same calls of the model and of autograd with batches of the same size, and nothing
in between. One thread, the least of some measurements of each.

| network, images, passes | norm | passes alone, s | `nearest`, s | overhead |
|---|---|---|---|---|"""
PEERS = """
The same passes by adversarial-library's attacks, on the samples that the network has right:
processor time in seconds. FMN and DDN make one step for two passes; so does APGD, at a radius
without flips, so that no sample leaves.

| network, samples, passes | norm | `nearest` | FMN | DDN | APGD |
|---|---|---|---|---|---|"""
Attack = Callable[[torch.nn.Module, Tensor, Tensor], Tensor]


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


def measure(
    model: torch.nn.Module, x: Tensor, y: Tensor, norm: float, passes: int, times: int
) -> tuple[float, float]:
    """Seconds of the bare passes and of `nearest`, each the least of some."""
    with Tape(model) as tape:
        ws.nearest(tape.model, x, y, norm, passes=passes)
    bare = math.inf
    whole = math.inf
    for _ in range(times):
        bare = min(bare, spent(lambda: tape.replay(x)))
        whole = min(whole, spent(lambda: ws.nearest(model, x, y, norm, passes=passes)))
    return bare, whole


def peers(norm: float, steps: int) -> dict[str, Attack] | None:
    """Attacks of adversarial-library with so many steps; None if it is not installed."""
    for name in ("torchvision", "torchvision.models", "visdom"):
        # It imports them for a distance and a plot that are not used here.
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["torchvision"].models = object  # type: ignore[attr-defined]
    sys.modules["visdom"].Visdom = object  # type: ignore[attr-defined]
    try:
        from adv_lib import attacks
    except ImportError:
        return None
    found: dict[str, Attack] = {
        "FMN": lambda m, x, y: attacks.fmn(m, x, y, norm=norm, steps=steps),
        "APGD": lambda m, x, y: attacks.apgd(m, x, y, SMALL[norm], norm=norm, n_iter=steps),
    }
    if norm == 2:
        found["DDN"] = lambda m, x, y: attacks.ddn(m, x, y, steps=steps)
    return found


def versus(
    model: torch.nn.Module, x: Tensor, y: Tensor, norm: float, passes: int, times: int
) -> list[str]:
    """Seconds of `nearest`, FMN, DDN and APGD, each the least of some."""
    others = peers(norm, passes // 2)
    if others is None:
        return []
    best = dict.fromkeys(("nearest", "FMN", "DDN", "APGD"), math.inf)
    others["nearest"] = lambda m, x, y: ws.nearest(m, x, y, norm, passes=passes).points
    for _ in range(times):
        for name, attack in others.items():
            best[name] = min(best[name], spent(lambda attack=attack: attack(model, x, y)))
    return [f"{value:.2f}" if math.isfinite(value) else "" for value in best.values()]


def main() -> None:
    torch.set_num_threads(1)
    print(HEAD)
    table = []
    for name, n, passes, times in NETWORKS:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        model, dataset = load(name)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        x, y = images(dataset, n)
        with torch.no_grad():
            right = model(x).argmax(1) == y
        for norm in (math.inf, 2.0, 1.0):
            bare, whole = measure(model, x, y, norm, passes, times)
            more = f"{whole / bare - 1:.0%}"
            row = (f"`{name}`, {n}, {passes}", f"l{norm:g}", f"{bare:.2f}", f"{whole:.2f}", more)
            print(f"| {' | '.join(row)} |", flush=True)
            found = versus(model, x[right], y[right], norm, passes, times)
            first = f"`{name}`, {int(right.sum())}, {passes}"
            table += [f"| {' | '.join([first, f'l{norm:g}', *found])} |"] if found else []
    if table:
        print("\n".join([PEERS, *table]))


if __name__ == "__main__":
    main()
