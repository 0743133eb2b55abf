"""Exact Lipschitz constants: branch and bound on the networks of LipBaB and ExLipBaB, as markdown tables.

    python benchmarks/branch.py [--zoo DIR] [--time-limit SECONDS] [--only PART_OF_A_NAME]

Published figures: LipBaB (arXiv 2105.05495) on boxes, ExLipBaB (arXiv 2602.15499) on all of R^n with its node counts.
One thread, float64. A node is a partial mask that was generated, the root included.
"""

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch

from wassail.certificates.branch import Bracket, branch
from wassail.certificates.piecewise import Piecewise
from wassail.certificates.region import Region

INF = math.inf
LOCAL = [  # name, upper end of the box, (norm, published value), seconds of LipBaB at 2 -> 2
    ("lipbab_iris_4-5-5-3", 1.0, (6.771454513402937, 5.958048912394726, 12.605085581416922), "0.07"),
    ("lipbab_sd_10-15-10-3", 0.1, (9.530716922306004, 10.41286850374477, 16.274810805318676), "0.31"),
    ("lipbab_sd_10-20-15-10-3", 0.1, (40.05651016370293, 48.04897158493324, 72.28569774866806), "6.0"),
    ("lipbab_sd_10-30-30-30-3", 0.1, (19.462799793264388, 19.369311332018757, 39.11036425646691), "> 240"),
]
GLOBAL = [  # name, published value or bracket, published nodes, LipSDP-Neuron
    ("exlipbab_iris_4-6-6-3", "11.634355134114875", "48", "11.635340"),
    ("exlipbab_wine_11-12-12-1", "1.7433699967107172", "2,850", "1.846913"),
    ("exlipbab_abalone_9-16-16-1", "11.121602332235268", "801", "11.225478"),
    ("exlipbab_bike_13-20-16-8-3", "at least 10802.403812748018", "763,290", "11184.509"),
    ("exlipbab_wine_11-24-24-1", "open after 12 h: [1.7369, 2.53]", "670,175", "2.303798"),
]


def load(folder: Path, name: str) -> Piecewise:
    arrays = np.load(folder / "lipschitz" / f"{name}.npz")
    return Piecewise.from_layers(
        [(torch.tensor(arrays[f"W{i}"]), torch.tensor(arrays[f"b{i}"])) for i in range(len(arrays) // 2)]
    )


def show(found: Bracket) -> str:
    return f"{found.upper:.13g}, exact" if found.complete else f"[{found.lower:.9g}, {found.upper:.9g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("WASSAIL_ZOO", Path(__file__).resolve().parents[2] / "shared" / "zoo")
    parser.add_argument("--zoo", type=Path, default=default, help="the folder that holds lipschitz/*.npz")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds per row")
    parser.add_argument("--only", default="", help="rows whose network has this in its name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| network, box | norm | ours | nodes | seconds | LipBaB | relative difference | its seconds, 2 -> 2 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, high, values, seconds in LOCAL:
        if args.only in name:
            net = load(args.zoo, name)
            for norm, value in zip((2.0, 1.0, INF), values):
                found = branch(net, Region.make((0.0, high), net.inputs), norm, norm, time_limit=args.time_limit)
                away = abs((found.lower + found.upper) / 2 / value - 1)
                cells = (
                    show(found),
                    f"{found.nodes:,}",
                    f"{found.seconds:.2f}",
                    value,
                    f"{away:.0e}",
                    seconds if norm == 2 else "",
                )
                print(f"| {name}, [0, {high:g}] | {norm:g} | " + " | ".join(map(str, cells)) + " |", flush=True)
    print("\n| network, R^n, 2 -> 2 | ours | nodes | seconds | ExLipBaB | its nodes | LipSDP-Neuron |")
    print("|---|---|---|---|---|---|---|")
    for name, value, nodes, relaxed in GLOBAL:
        if args.only in name:
            net = load(args.zoo, name)
            found = branch(net, Region.make(None, net.inputs), 2, 2, time_limit=args.time_limit)
            print(
                f"| {name} | {show(found)} | {found.nodes:,} | {found.seconds:.2f} | {value} | {nodes} | {relaxed} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
