"""`nearest` as an attack of attackbenchlib, under its own protocol, beside attacks of adv-lib.

    python benchmarks/attack_bench.py [NETWORK:NORM ...] --count 20

`attack(passes)` is what `attackbench.run_attack` takes: a function of model, inputs and labels that
returns points. Here it has 200 forward and backward passes a sample, the others have 2,000, the
library's budget; the library counts them and keeps the nearest flip of all queries. The score is
its local optimality, 1 for the nearest flip of all attacks together.
"""

import argparse
import math
import sys
import types
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import wassail as ws
from nearest import images, network

NORMS = {"l1": 1.0, "l2": 2.0, "linf": math.inf}
CASES = (
    "mnist_madry_tiny:l2",
    "mnist_madry_tiny:l1",
    "mnist_madry_tiny:linf",
    "cifar_cnn_a_adv:l2",
    "cifar_cnn_a_adv:l1",
    "cifar_cnn_a_adv:linf",
    "mnist_smallcnn_ddn:l2",
)
CHECKS = 4  # forward passes that `nearest` makes beside its budget: it looks at its answers again

HEAD = """# Under the protocol of AttackBench

Made by `python benchmarks/attack_bench.py --count {count}`, with attackbenchlib 2.0.2 and
adversarial-library. The first {count} images of each network. The library counts the passes
and keeps the nearest flip of all queries; optimality: 1 for the nearest flip of all these attacks
together, 0 for none. The library gives each query to the sample that is nearest to it, so a far
start can be charged to another sample. Its acceptance script loads its own models, which are not
here, and was not run.
"""


def attack(passes: int) -> Callable[..., Tensor]:
    """`nearest` for `attackbench.run_attack`, with at most so many passes a sample in all."""

    def run(model: nn.Module, inputs: Tensor, labels: Tensor, norm: str = "linf") -> Tensor:
        flips = ws.nearest(model, inputs, labels, NORMS[norm], passes=passes - CHECKS)
        return flips.points

    run.__name__ = f"nearest{passes}"
    return run


def library() -> types.ModuleType:
    """attackbenchlib; what it imports for downloads and plots is replaced if it is missing."""
    for name, members in (
        ("torchvision", ("transforms", "datasets")),
        ("torchvision.transforms", ()),
        ("torchvision.datasets", ("CIFAR10", "MNIST")),
        ("visdom", ("Visdom",)),
        ("wandb", ("Api", "Artifact")),
        ("torchvision.models", ()),
    ):
        if name not in sys.modules:
            module = types.ModuleType(name)
            for member in members:
                setattr(module, member, object)
            sys.modules[name] = module
    import attackbench

    return attackbench


def others(norm: str) -> dict[str, Callable[..., Tensor]]:
    """Attacks of adv-lib with 1,000 steps, a forward and a backward pass each."""
    from adv_lib import attacks

    r = NORMS[norm]
    found = {
        "fmn": lambda model, inputs, labels: attacks.fmn(
            model, inputs, labels, norm=r, steps=1000, α_init=10.0 if r == math.inf else 1.0
        ),
        "pdpgd": lambda model, inputs, labels: attacks.pdpgd(
            model, inputs, labels, norm=r, num_steps=1000
        ),
    }
    if norm == "l2":
        found["ddn"] = lambda model, inputs, labels: attacks.ddn(
            model, inputs, labels, steps=1000, levels=None
        )
    if norm != "linf":
        found["alma"] = lambda model, inputs, labels: attacks.alma(
            model,
            inputs,
            labels,
            num_steps=1000,
            distance=norm,
            init_lr_distance={"l1": 0.5, "l2": 0.1}[norm],
        )
    return found


def scores(bench: types.ModuleType, name: str, norm: str, count: int) -> None:
    """The table of one network and norm."""
    model, dataset = network(name)
    data = torch.utils.data.TensorDataset(*images(dataset, count))
    loader = torch.utils.data.DataLoader(data, batch_size=count)
    results = {}
    runs = {"nearest, 200": (attack(200), 200), "nearest, 2000": (attack(2000), 2000)}
    runs |= {f"adv-lib {label}": (other, 2000) for label, other in others(norm).items()}
    for label, (function, budget) in runs.items():
        results[label] = bench.run_attack(
            model, loader, function, norm, query_budget=budget, debug=True
        )
    print(f"\n## `{name}`, {norm}\n")
    print("| attack | most passes | flipped % | optimality |\n|---|---|---|---|")
    for label, result in results.items():
        spent = max(f + b for f, b in zip(result["num_forwards"], result["num_backwards"]))
        every = list(results.values())
        score = bench.compute_local_optimality(result, every, norm, use_wandb=False)
        flipped = [math.isfinite(d) for d in result["distances"][norm]]
        share = 100 * sum(flipped) / len(flipped)
        print(f"| {label} | {spent} | {share:.0f} | {score['optimality']:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", help="NETWORK:NORM, a network of the zoo")
    parser.add_argument("--count", type=int, default=20, help="images; default 20")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bench = library()
    print(HEAD.format(count=given.count))
    for case in given.cases or CASES:
        name, norm = case.split(":")
        scores(bench, name, norm, given.count)


if __name__ == "__main__":
    main()
