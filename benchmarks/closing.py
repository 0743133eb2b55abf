"""Closing the bracket: the gap against the work, beside the two sides on their own.

    python benchmarks/closing.py [--images 6] [--work 2e10] [NETWORK ...]

Prints docs/closing-measured.md.
"""

from __future__ import annotations

import argparse
import time

import torch

import wassail as ws
import zoo_path

# network -> norm, eps it was trained for
NETWORKS: dict[str, tuple[str, float]] = {
    "mnist_kw_01": ("inf", 0.1),
    "fashion_kw_01": ("inf", 0.1),
    "cifar_base_kw": ("inf", 2 / 255),
    "cifar_small_kw_l2_36px": ("2", 36 / 255),
    "vnn_resnet2b": ("inf", 2 / 255),
}


def closed(name: str, images: int, work: float) -> None:
    """One row: today's sides, and what closing them together makes of it."""
    norm, eps = NETWORKS[name]
    model, dataset = zoo_path.load(name)
    x, y = zoo_path.images(dataset)[:2]
    threat = ws.Threat(norm, 1, eps)
    x = x[:images]
    y = y[:images]
    begun = time.process_time()
    found = ws.sandwich(model, x, y, threat, work=work)
    seconds = (time.process_time() - begun) / len(x)
    _, low, high = found.history[0]
    cells = [
        f"`{name}`",
        f"l{norm} {eps:.4g}",
        str(len(x)),
        f"{100 * low:.2f} .. {100 * high:.2f}",
        f"{100 * (high - low):.2f}",
        f"{100 * found.certified:.2f} .. {100 * found.attacked:.2f}",
        f"**{100 * found.gap:.2f}**",
        f"{seconds:.1f}",
        str(found.info["domains"]),
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--work", type=float, default=2e10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    given = " ".join(["--images", str(options.images), "--work", f"{options.work:g}"])
    print(
        f"""# Both sides closed together, measured

Command: `python benchmarks/closing.py {given} {" ".join(options.networks)}`. One thread, processor
seconds, order 1 at the eps of training, the first images. `first bracket`: `nearest` with 300
passes and `radii` by "auto", which is what `evaluate --certify` gives without `--gap`. How it
works: [closing.md](closing.md).
"""
    )
    print("| network | norm, eps | images | first bracket % | gap | closed % | gap |", end="")
    print(" s an image | domains |\n" + "|---" * 9 + "|")
    for name in options.networks:
        closed(name, options.images, options.work)


if __name__ == "__main__":
    main()
