"""Balls and boxes together at l2: the networks of SDP-CROWN, and 1-Lipschitz ones.

    python benchmarks/spheres.py [--images 200]
    python benchmarks/spheres.py --radii 3
    python benchmarks/spheres.py --only-lipschitz --lipschitz 40 --quick

Prints docs/spheres.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import time
from collections.abc import Iterator

import torch

import wassail as ws
import zoo_path
from wassail.certificates.graph.reader import read
from wassail.certificates.prove.exact import slack_of
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.products import product_radii
from wassail.certificates.relax import crown
from wassail.certificates.relax.ball_margins import ball_margins
from wassail.certificates.relax.crown import margin_bounds

BOX = (0.0, 1.0)
PUBLISHED = {
    "sdp_mnist_mlp": (1.0, "32.5", "41", "29", "54"),
    "sdp_mnist_convsmall": (0.3, "81.5", "19.5", "77.5", "84.5"),
    "sdp_cifar_cnn_a": (24 / 255, "49", "20", "39", "55.5"),
}
BATCH = 5
NETWORKS = (
    "cifar_base_kw",
    "cifar_small_kw_l2_36px",
    "mnist_kw_01",
    "fashion_kw_01",
    "cifar_cnn_a_adv",
    "mnist_cnn_a_adv",
    "vnn_resnet2b",
    "mnist_mlp_spectral",
    "mnist_mlp_6_100",
    "cifar_conv_small_sigmoid",
)


def data(name: str, n: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A network and the first images of its own set."""
    model, _ = zoo_path.load(name)
    x, y = zoo_path.images("sdp_mnist" if "mnist" in name else "sdp_cifar")[:2]
    return model, x[:n], y[:n]


def least(lower: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The least margin of each sample."""
    return lower.scatter(1, y[:, None], math.inf).amin(1)


def verified(n: int, only: str) -> None:
    """The table of SDP-CROWN."""
    print(
        "| network | eps | images | clean % | flipped % | CROWN % | s | ball and box % | s |",
        end="",
    )
    print(" SDP-CROWN | BICCOS | product of norms | upper bound |\n" + "|---" * 13 + "|")
    for name, (eps, *known) in PUBLISHED.items():
        if only not in name:
            continue
        model, x, y = data(name, n)
        graph = read(model, tuple(x.shape[1:]))
        right = graph.logits(x).argmax(1) == y
        flips = ws.nearest(model, x, y, 2, BOX, passes=100).distances
        proved = {}
        seconds = {}
        for what, bound in (("crown", margin_bounds), ("ball", ball_margins)):
            begun = time.process_time()
            found = [
                least(bound(graph, a, b, eps, 2.0, BOX), b) > 0
                for a, b in zip(torch.split(x, BATCH), torch.split(y, BATCH))
            ]
            seconds[what] = (time.process_time() - begun) / len(x)
            proved[what] = torch.cat(found) & right
        assert not (proved["ball"] & (flips <= eps)).any()
        cells = [
            f"`{name}`",
            "24/255" if eps < 0.1 else f"{eps:g}",
            str(len(x)),
            f"{100 * right.double().mean():.1f}",
            f"{100 * (flips <= eps).double().mean():.1f}",
            f"{100 * proved['crown'].double().mean():.1f}",
            f"{seconds['crown']:.2f}",
            f"**{100 * proved['ball'].double().mean():.1f}**",
            f"{seconds['ball']:.2f}",
            *known,
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def lipschitz(n: int, only: str = "", quick: bool = False) -> None:
    """Radii of networks whose Lipschitz constant is 1, for the network as it is executed.

    quick: only by products of norms beyond a ball, and by all that "ball" does where these are
    below margin / sqrt 2. Radii by "ball" are at least as large.
    """
    print("\n| network | images | margin / sqrt 2, median | ball and box, median |", end="")
    print(
        " least ratio | below 1 | error / margin, median | largest | least ratio, error off | s |"
    )
    print("|---" * 10 + "|")
    below = []
    for name, factor in (("lip1_mnist_conv", 1.0), ("lip1_cifar_cnn_a", 0.225)):
        if only not in name:
            continue
        model, dataset = zoo_path.load(name)
        x, y = zoo_path.images(dataset)[:2]
        x = x[:n]
        y = y[:n]
        with torch.no_grad():
            z = model(x).double()
        good = (z.argmax(1) == y).nonzero()[:, 0]
        x, y, z = x[good], y[good], z[good]
        top = z.topk(2).values
        margin = top[:, 0] - top[:, 1]
        scale = factor / math.sqrt(2)
        problem = Problem.of(model, x, y, 2.0, BOX, "executed")
        slack = slack_of(problem, scale * margin)
        assert slack is not None
        error = slack.amax(1)
        begun = time.process_time()
        radii = torch.zeros_like(margin)
        if quick:
            radii = product_radii(problem, torch.zeros_like(margin))
        left = (radii < scale * margin).nonzero()[:, 0]
        if len(left):
            radii[left] = ws.radii(model, x[left], y[left], 2, BOX, "ball").values
        seconds = (time.process_time() - begun) / len(x)
        ratio = radii / (scale * margin)
        rest = scale * (margin - error)
        sure = torch.where(rest > 0, radii / rest, math.inf)
        print(
            f"| `{name}` | {len(x)} | {scale * margin.median():.4f} | {radii.median():.4f} | "
            f"{ratio.min():.3f} | {int((ratio < 1).sum())} | {(error / margin).median():.4f} | "
            f"{(error / margin).max():.4f} | {sure.min():.3f} | {seconds:.1f} |",
            flush=True,
        )
        below += [
            f"`{name}`, image {int(good[k])}: ratio {ratio[k]:.3f}, margin {margin[k]:.4f}, "
            f"error at most {error[k]:.4f}."
            for k in (ratio < 1).nonzero()[:, 0].tolist()
        ]
    print("\n" + "\n".join(below))


def radii_beside_flips(n: int, only: str, first: int, norms: list[str]) -> None:
    """Radii over the distance of the nearest flip, by CROWN without slope cones and with them, and
    by balls.

    Images from `first` on that are classified rightly.
    """
    print("\n| network | norm | images | CROWN alone | s | crown | s | price | ball | s | price |")
    print("|---" * 11 + "|")
    for name, norm in itertools.product(NETWORKS, norms):
        if only not in name:
            continue
        model, dataset = zoo_path.load(name)
        x, y = zoo_path.images(dataset)[:2]
        x = x[first : first + 4 * n]
        y = y[first : first + 4 * n]
        with torch.no_grad():
            right = (model(x).argmax(1) == y).nonzero()[:n, 0]
        x = x[right]
        y = y[right]
        flips = ws.nearest(model, x, y, norm, passes=150).distances
        cells = [f"`{name}`", norm, str(len(x))]
        base = 0.0
        for what in ("alone", "crown", "ball"):
            begun = time.process_time()
            with cones_off() if what == "alone" else contextlib.nullcontext():
                method = "crown" if what == "alone" else what
                radii = ws.radii(model, x, y, norm, method=method, tolerance=0.03)
            seconds = (time.process_time() - begun) / len(x)
            assert bool((radii.values <= flips).all())
            cells += [f"{(radii.values / flips).mean():.3f}", f"{seconds:.1f}"]
            base = base or seconds
            if what != "alone":
                cells.append(f"{seconds / base:.1f}")
        print("| " + " | ".join(cells) + " |", flush=True)


@contextlib.contextmanager
def cones_off() -> Iterator[None]:
    """CROWN as it was: sweeps without slope cones."""
    made = crown.slope_cones_of
    crown.slope_cones_of = lambda sweep: None
    try:
        yield
    finally:
        crown.slope_cones_of = made


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--lipschitz", type=int, default=5)
    parser.add_argument("--only", default="", help="networks whose name contains this word")
    parser.add_argument("--only-lipschitz", action="store_true", help="only 1-Lipschitz networks")
    parser.add_argument("--quick", action="store_true", help="of these: without a search")
    parser.add_argument("--radii", type=int, default=0, help="only radii of so many images each")
    parser.add_argument("--first", type=int, default=0, help="their first image")
    parser.add_argument("--norms", nargs="+", default=["2", "1"], help="and their norms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.radii:
        radii_beside_flips(options.radii, options.only, options.first, options.norms)
        return
    if options.only_lipschitz:
        lipschitz(options.lipschitz, options.only, options.quick)
        return
    print(
        f"""# Balls and boxes together

Command: `python benchmarks/spheres.py --images {options.images} --lipschitz {options.lipschitz}`,
one thread, processor seconds an image. Verified accuracy at l2 on the networks and images of
SDP-CROWN (ICML 2025), whose published figures (on a GPU) stand on the right; `upper bound` is
theirs, by attack. CROWN and ball and box are ours, sound in exact arithmetic; `flipped`: by
`ws.nearest(passes=100)`. No image is both proved and flipped.
"""
    )
    verified(options.images, options.only)
    if options.lipschitz:
        print(
            """
Networks whose layers are orthogonal: a distance is never below margin / sqrt 2 (times 0.225 for the
CIFAR one, whose input is divided by that). Nothing tells the bounds so: what only sorts is
recognised, and does not stretch. In exact arithmetic no radius is below it; for the network as it
is executed in float32, as here, the bound on its rounding is taken off first.
"""
        )
        lipschitz(options.lipschitz)


if __name__ == "__main__":
    main()
