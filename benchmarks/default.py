"""Is the default the best that its parts can do? `auto` beside every named method.

    python benchmarks/default.py [--images 6] [--from 0] [--only NAME] [--norms inf 2 1]

Prints docs/default.md: the mean of radius / distance of the nearest flip known, and processor
seconds for an image. Settings were chosen with `--from 1000`.
"""

from __future__ import annotations

import argparse
import time

import torch

import wassail as ws
import zoo_path

BOX = (0.0, 1.0)
NETWORKS = (
    "mnist_mlp_toy20",
    "mnist_mlp_spectral",
    "mnist_mlp_6_100",
    "sdp_mnist_mlp",
    "mnist_conv_small",
    "mnist_kw_01",
    "fashion_kw_01",
    "mnist_cnn_a_adv",
    "cifar_base_kw",
    "cifar_small_kw_l2_36px",
    "cifar_cnn_a_adv",
    "sdp_cifar_cnn_a",
    "cifar_conv_small_sigmoid",
    "vnn_resnet2b",
)
METHODS = ("crown", "ball", "branch", "auto")
FLIP_PASSES = 300
HEAD = """# The default beside its parts

Radii by `auto`, which a person gets without an option, and by each named method: the mean of radius
/ distance of the nearest flip known, and processor seconds for an image, one thread. {} images that
the network gets right, from image {} on.
"""


def chosen(name: str, first: int, count: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A network, and images that it gets right, with their labels, from some place on."""
    model, dataset = zoo_path.load(name)
    x, y = zoo_path.images(dataset)[:2]
    x, y = x[first : first + 4 * count], y[first : first + 4 * count]
    with torch.no_grad():
        right = (model(x).argmax(1) == y).nonzero()[:count, 0]
    return model, x[right], y[right]


def row(name: str, norm: str, first: int, count: int) -> str:
    """The figures of one network at one norm."""
    model, x, y = chosen(name, first, count)
    flips = ws.nearest(model, x, y, norm, BOX, passes=FLIP_PASSES).distances
    ratios: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for method in METHODS:
        if method == "ball" and norm != "2":
            continue
        begun = time.process_time()
        found = ws.radii(model, x, y, norm, BOX, method).values
        seconds[method] = (time.process_time() - begun) / len(x)
        assert (found <= flips).all(), f"{name}, {norm}, {method}: a radius above a flip"
        ratios[method] = float((found / flips).mean())
    named = [method for method in ratios if method != "auto"]
    best = max(named, key=lambda method: ratios[method])
    cells = [f"`{name}`", "l" + norm]
    for method in METHODS:
        figures = f"{ratios[method]:.3f}, {seconds[method]:.2f}" if method in ratios else "–"
        cells.append(f"{figures} s" if method in ratios else figures)
    share = ratios["auto"] / ratios[best]
    price = seconds["auto"] / seconds[best]
    return "| " + " | ".join([*cells, best, f"{share:.3f}", f"{price:.2f}"]) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(NETWORKS))
    parser.add_argument("--norms", nargs="+", default=["inf", "2", "1"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD.format(options.images, options.first))
    head = ["network", "norm", *METHODS, "best named", "auto / best", "its time / best's"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for name in options.only:
        for norm in options.norms:
            print(row(name, norm, options.first, options.images), flush=True)


if __name__ == "__main__":
    main()
