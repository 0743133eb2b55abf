"""Exact Lipschitz constants: branch and bound on the networks of LipBaB and ExLipBaB, as markdown
tables.

    python benchmarks/branch.py [--zoo DIR] [--time-limit SECONDS] [--only PART_OF_A_NAME]

Published figures: LipBaB (arXiv 2105.05495) on boxes, ExLipBaB (arXiv 2602.15499) on all of R^n
with its node counts. With $WASSAIL_LIPBAB, the folder of LipBaB's repository (it needs cvxopt),
LipBaB runs beside ours on the boxes, for 60 s at most. One thread, float64. A node is a partial
mask that was generated, the root included.
"""

import argparse
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from wassail.certificates.exact.constants import Bracket, branch
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region

INF = math.inf
# name, upper end of the box, published values for norms 2, 1, inf, the name of LipBaB's file
LOCAL = [
    (
        "lipbab_iris_4-5-5-3",
        1.0,
        (6.771454513402937, 5.958048912394726, 12.605085581416922),
        "iris_net_(4,5,5,3)",
    ),
    (
        "lipbab_sd_10-15-10-3",
        0.1,
        (9.530716922306004, 10.41286850374477, 16.274810805318676),
        "SDnet_(10,15,10,3)",
    ),
    (
        "lipbab_sd_10-20-15-10-3",
        0.1,
        (40.05651016370293, 48.04897158493324, 72.28569774866806),
        "SDnet_(10,20,15,10,3)",
    ),
    (
        "lipbab_sd_10-30-30-30-3",
        0.1,
        (19.462799793264388, 19.369311332018757, 39.11036425646691),
        "SDnet_(10,30,30,30,3)",
    ),
]
GLOBAL = [  # name, published value or bracket, published nodes, LipSDP-Neuron
    ("exlipbab_iris_4-6-6-3", "11.634355134114875", "48", "11.635340"),
    ("exlipbab_wine_11-12-12-1", "1.7433699967107172", "2,850", "1.846913"),
    ("exlipbab_abalone_9-16-16-1", "11.121602332235268", "801", "11.225478"),
    ("exlipbab_bike_13-20-16-8-3", "at least 10802.403812748018", "763,290", "11184.509"),
    ("exlipbab_wine_11-24-24-1", "open after 12 h: [1.7369, 2.53]", "670,175", "2.303798"),
]


INTRODUCTION = """\
Made by `python benchmarks/branch.py`, one thread, LipBaB's own script beside ours in the same run.
Largest Jacobian norm over a box, same norm in and out, then over all of R^n. Wine 11-24-24-1 was
open: ExLipBaB stops at [1.7369, 2.53] after 12 hours, and [1.8156, 2.3038] was the best known
bracket.
"""


def load(folder: Path, name: str) -> Piecewise:
    arrays = np.load(folder / "lipschitz" / f"{name}.npz")
    return Piecewise.from_layers(
        [
            (torch.tensor(arrays[f"W{i}"]), torch.tensor(arrays[f"b{i}"]))
            for i in range(len(arrays) // 2)
        ]
    )


def lipbab(file: str, high: float, norm: float, limit: float = 60.0) -> str:
    """LipBaB's own script on its own file of the network: what it prints as its time, or that
    it was stopped.
    """
    folder = os.environ.get("WASSAIL_LIPBAB")
    if folder is None:
        return ""
    code = Path(folder, "LipBaB.py").read_text()
    code = re.sub(r"saved_networks/[^']*_(weights|biases)", rf"saved_networks/{file}_\1", code)
    code = code.replace("[[0.,0.1]", f"[[0.,{high}]").replace(
        "pnorm=2 ", f"pnorm={'math.inf' if norm == INF else norm:} "
    )
    code = code.replace(
        "    print(tp.Lub)\n", ""
    )  # a line for every node would be part of its time
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return f"> {limit:g}"
    return f"{float(done.stdout.split()[-1]):.2f}"


def show(found: Bracket) -> str:
    return (
        f"{found.upper:.13g}, exact"
        if found.complete
        else f"[{found.lower:.9g}, {found.upper:.9g}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("WASSAIL_ZOO", Path(__file__).resolve().parents[2] / "shared" / "zoo")
    parser.add_argument(
        "--zoo", type=Path, default=default, help="the folder that holds lipschitz/*.npz"
    )
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds per row")
    parser.add_argument("--only", default="", help="rows whose network has this in its name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("# Exact Lipschitz constants by branch and bound\n")
    print(INTRODUCTION)
    print(
        "| network, box | norm | ours | nodes | seconds | published by LipBaB | relative "
        "difference | LipBaB, seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, high, values, file in LOCAL:
        if args.only in name:
            net = load(args.zoo, name)
            for norm, value in zip((2.0, 1.0, INF), values):
                found = branch(
                    net,
                    Region.make((0.0, high), net.inputs),
                    norm,
                    norm,
                    time_limit=args.time_limit,
                )
                away = abs((found.lower + found.upper) / 2 / value - 1)
                cells = (
                    show(found),
                    f"{found.nodes:,}",
                    f"{found.seconds:.2f}",
                    value,
                    f"{away:.0e}",
                    lipbab(file, high, norm),
                )
                print(
                    f"| {name}, [0, {high:g}] | {norm:g} | " + " | ".join(map(str, cells)) + " |",
                    flush=True,
                )
    print(
        "\n| network, R^n, 2 -> 2 | ours | nodes | seconds | ExLipBaB | its nodes | LipSDP-Neuron |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, value, nodes, relaxed in GLOBAL:
        if args.only in name:
            net = load(args.zoo, name)
            found = branch(net, Region.make(None, net.inputs), 2, 2, time_limit=args.time_limit)
            print(
                f"| {name} | {show(found)} | {found.nodes:,} | {found.seconds:.2f} | {value} | "
                f"{nodes} | {relaxed} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
