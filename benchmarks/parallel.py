"""One hard branch and bound on several workers against one: seconds, ratio and nodes, as a markdown
table.

    python benchmarks/parallel.py [--zoo DIR] [--workers 2] [--only PART_OF_A_NAME] [--ray
    [ADDRESS]]

Exact Lipschitz constants, 2 -> 2, of ExLipBaB's larger networks on all of R^n and of LipBaB's
largest on boxes wider than its own, one thread for each process. "In this process" is the search
without workers, which splits more nodes at once than a worker does. The workers' start is not part
of the times: they are called once before. Run it on an idle machine with at least as many cores as
workers.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from wassail.certificates.exact.constants import Bracket, branch
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region
from wassail.certificates.search.workers import Processes

PROBLEMS = (
    ("exlipbab_wine_11-24-24-1", None),
    ("exlipbab_bike_13-20-16-8-3", None),
    ("lipbab_sd_10-30-30-30-3", 0.2),
    ("lipbab_sd_10-30-30-30-3", 0.22),
)  # name, upper end of the box


def load(folder: Path, name: str) -> Piecewise:
    arrays = np.load(folder / "lipschitz" / f"{name}.npz")
    return Piecewise.from_layers(
        [
            (torch.tensor(arrays[f"W{i}"]), torch.tensor(arrays[f"b{i}"]))
            for i in range(len(arrays) // 2)
        ]
    )


def timed(network: Piecewise, high: float | None, pool: Processes | None) -> Bracket:
    """The whole search; of the workers, if there are any, each has done something before."""
    if pool is not None:
        for future in [pool.submit(abs, -1) for _ in range(pool.workers)]:
            future.result()
    domain = None if high is None else (0.0, high)
    return branch(network, Region.make(domain, network.inputs), 2, 2, workers=pool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("WASSAIL_ZOO", Path(__file__).resolve().parents[2] / "shared" / "zoo")
    parser.add_argument(
        "--zoo", type=Path, default=default, help="the folder that holds lipschitz/*.npz"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="rows with this in their first column")
    args = parser.parse_args()
    torch.set_num_threads(1)

    about = (
        f"`python benchmarks/parallel.py --workers {args.workers}`, {os.cpu_count()} "
        "processors, one thread each"
    )
    print(f"""# One hard problem on several workers

Command: {about}. Exact Lipschitz constants, 2 -> 2, by branch and bound whose open nodes the
workers share, with the best lower bound sent along. Without workers the search splits more nodes at
once, so the gain from none to one is not parallelism. Where the best solution is found late (wine,
bike) more workers open more nodes than one needs.
""")
    print(
        "| network, domain | workers | bracket | nodes | seconds | of one worker "
        "|\n|---|---|---|---|---|---|"
    )
    for name, high in PROBLEMS:
        title = f"{name}, " + ("R^n" if high is None else f"[0, {high:g}]")
        if args.only not in title:
            continue
        network = load(args.zoo, name)
        one = 0.0
        for count in (0, 1, args.workers):
            if count == 0:
                found = timed(network, high, None)
            else:
                with Processes(count) as pool:
                    found = timed(network, high, pool)
            one = found.seconds if count == 1 else one
            bracket = (
                f"{found.upper:.13g}, exact"
                if found.complete
                else f"[{found.lower:.9g}, {found.upper:.9g}]"
            )
            ratio = f"{found.seconds / one:.2f}" if count else "-"
            who = str(count) if count else "in this process"
            print(
                f"| {title} | {who} | {bracket} | {found.nodes:,} | {found.seconds:.1f} | "
                f"{ratio} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
