"""What it costs to certify the network as it is executed: radii in executed and in exact
arithmetic, side by side.

    python benchmarks/arithmetic.py [--samples 4] [--only PART_OF_A_NAME] > docs/arithmetic.md

For the zoo's piecewise-linear networks, which are float32, and norm inf: the median radius by CROWN
in both arithmetics, searched to 0.1 %; the bound on the rounding error of the margins at the
samples beside the margins; the largest difference from float64 that was seen there; and the
processor's time for both. One thread. Rows go to standard error as they are ready.
"""

import argparse
import sys
import time
import warnings

import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.executed import arithmetic_of, margin_errors
from zoo_path import images, load

NAMES = (
    "mnist_mlp_toy20",
    "mnist_mlp_6_100",
    "mnist_mlp_spectral",
    "sdp_mnist_mlp",
    "mnist_conv_small",
    "mnist_kw_01",
    "fashion_kw_01",
    "mnist_madry_tiny",
    "mnist_cnn_a_adv",
    "sdp_mnist_convsmall",
    "cifar_base_kw",
    "cifar_small_kw_l2_36px",
    "cifar_cnn_a_adv",
    "cifar_cnn_a_mix",
    "cifar_cnn_a_adv4",
    "sdp_cifar_cnn_a",
    "mnist_smallcnn_ddn",
    "mnist_trades",
    "vnn_resnet2b",
    "vnn_resnet4b",
)
BOX = (0.0, 1.0)
INTRODUCTION = """# The network as it is executed

`python benchmarks/arithmetic.py`

A float32 network is not the exact function: its margins are off by rounding. With
`arithmetic="executed"` radii hold for the network as it runs, in any order of summation: all
margins are proved above a bound on that error. `loss`: how much smaller the median radius is, CROWN
at l-inf, searched to 0.1 %; `error`: the median over the samples of the bound on the error of the
smallest margin, and `of margin` the same as a share of that margin; `seen`: the largest error at
the samples and at random points near them, as a share of its bound; `time`: seconds of the
processor for the executed radii over those for the exact ones, one thread.

| network | samples | exact | executed | loss | error | of margin | seen | time |
|---|---|---|---|---|---|---|---|---|"""


def chosen(model: nn.Module, dataset: str, count: int) -> tuple[Tensor, Tensor]:
    """The first so many images that are classified rightly."""
    x, y = images(dataset, 10 * count)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    return x[right][:count], y[right][:count]


def radii(
    graph: Graph, x: Tensor, y: Tensor, arithmetic: str, tolerance: float = 1e-3
) -> tuple[Tensor, float]:
    begin = time.process_time()
    found = ws.radii(graph, x, y, "inf", BOX, "crown", arithmetic=arithmetic, tolerance=tolerance)
    return found.values, time.process_time() - begin


def errors(model: nn.Module, graph: Graph, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """The bound at the samples, as it is and as a share of the margins, and what is seen of it."""
    none = torch.zeros(len(x), dtype=torch.float64)
    bound = margin_errors(
        Sweep(arithmetic_of(graph, "executed"), Balls.make(x, none, torch.inf, BOX)).run(), y
    )
    z = graph.logits(x)
    margin = (z.gather(1, y[:, None]) - z).scatter(1, y[:, None], torch.inf)
    least = margin.argmin(1, keepdim=True)
    own = bound.gather(1, least)[:, 0]
    size = margin.gather(1, least)[:, 0]
    seen = 0.0
    for points in (x, *((x + 1e-3 * torch.randn(x.shape)).clamp(0, 1) for _ in range(4))):
        with torch.no_grad():
            off = model(points).double() - graph.logits(points)
        apart = (off.gather(1, y[:, None]) - off).abs()
        seen = max(seen, float((apart / bound.clamp(min=1e-300)).scatter(1, y[:, None], 0.0).max()))
    return float(own.median()), float((own / size).median()), seen


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--only", default="", help="networks with this in their name")
    parser.add_argument("--after", default="", help="networks after this one")
    args = parser.parse_args()
    print(INTRODUCTION)
    for name in NAMES[NAMES.index(args.after) + 1 if args.after else 0 :]:
        if args.only not in name:
            continue
        model, dataset = load(name)
        x, y = chosen(model, dataset, args.samples)
        try:
            graph = arithmetic_of(read(model, tuple(x.shape[1:])), "exact")
        except ws.InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        radii(graph, x, y, "exact", 1.0)  # once, so that what torch does at first is not timed
        (exact, plain), (executed, slow) = (
            radii(graph, x, y, kind) for kind in ("exact", "executed")
        )
        error, share, seen = errors(model, graph, x, y)
        a = float(exact.median())
        b = float(executed.median())
        row = (
            f"| `{name}` | {len(x)} | {a:.5f} | {b:.5f} | {100 * (1 - b / a):.3f} % | "
            f"{error:.1e} | {share:.1e} | {seen:.3f} "
            f"| {slow / plain:.2f} |"
        )
        print(row, flush=True)
        print(row, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
