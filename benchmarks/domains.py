"""Branching on margins: domains bounded in a processor second, as a markdown table.

    python benchmarks/domains.py [--first 1000] [--samples 3] [--most 1000] [--factor 1.3]

A ball of `factor` times CROWN's radius around the first samples from `--first` on that are
classified correctly; `branch_margins` with `most` domains on each. One thread. The sweep before it
is not counted. With PYTHONPATH the same script measures another version beside it.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import wassail as ws
import zoo_path
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.search.margins import branch_margins

NETWORKS = {  # network -> norm
    "vnn_resnet2b": "inf",
    "mnist_kw_01": "inf",
    "cifar_small_kw_l2_36px": "2",
}


def measured(name: str, norm: str, x: Tensor, y: Tensor, args: argparse.Namespace) -> str:
    """One row."""
    model, _ = zoo_path.load(name)
    right = (model(x).argmax(1) == y).nonzero()[:, 0]
    samples = right[: args.samples]
    x = x[samples]
    y = y[samples]
    graph = read(model, x.shape[1:])
    radius = ws.radii(model, x, y, norm, method="crown", arithmetic="exact").values
    seconds = 0.0
    counts: list[int] = []
    proved = 0
    for k in range(len(x)):
        balls = Balls.make(x[k : k + 1], args.factor * radius[k : k + 1], float(norm), (0.0, 1.0))
        sweep = Sweep(graph, balls).run()
        lower = margins(sweep, y[k : k + 1])[0][0]
        rivals = [j for j in range(len(lower)) if j != int(y[k]) and not lower[j] > 0]
        begun = time.process_time()
        good, count = branch_margins(sweep, 0, int(y[k]), torch.tensor(rivals), args.most)
        seconds += time.process_time() - begun
        counts.append(count)
        proved += good
    each = ", ".join(map(str, counts))
    return (
        f"| `{name}` | {norm} | {each} | {proved} | {seconds:.2f} | {sum(counts) / seconds:.0f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=1000, help="place of the first image")
    parser.add_argument("--samples", type=int, default=3, help="of each network")
    parser.add_argument("--most", type=int, default=1000, help="domains for a sample")
    parser.add_argument("--factor", type=float, default=1.3, help="of CROWN's radius")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | norm | domains of each sample | proved | seconds | domains a second |")
    print("|---|---|---|---|---|---|")
    for name, norm in NETWORKS.items():
        x, y = zoo_path.images(zoo_path.load(name)[1])[:2]
        few = slice(args.first, args.first + 10 * args.samples)
        print(measured(name, norm, x[few], y[few], args), flush=True)
