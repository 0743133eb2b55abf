"""Accuracy over Omega_1 against passes per sample, for every engine.

python benchmarks/nearest_plot.py > docs/nearest-passes.txt     # and docs/nearest.png
python benchmarks/nearest_plot.py --redraw      # draws again what docs/nearest-passes.txt says
"""

import math
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import wassail as ws
from zoo_path import ROOT, images, load

BUDGETS = (25, 50, 100, 200, 400)
CASES = (
    ("cifar_cnn_a_adv", math.inf, 2 / 255),
    ("mnist_madry_tiny", math.inf, 0.3),
    ("cifar_cnn_a_adv", 2.0, 0.25),
    ("mnist_madry_tiny", 2.0, 1.5),
)
ENGINES = ("boundary-search", "fab", "apgd", "fmn", "ddn", "pdpgd", "deepfool")


def measure(name: str, norm: float, eps: float, engine: str) -> list[float]:
    model, dataset = load(name)
    x, y = images(dataset, 50)
    long = {"steps": 1000} if engine in ("fab", "fmn", "ddn", "pdpgd") else {}
    flips = [ws.nearest(model, x, y, norm, method=engine, passes=p, **long) for p in BUDGETS]
    line = [100 * ws.allocate(f, eps, 1).accuracy for f in flips]
    print(f"{name}, l{norm:g}, {engine}:", " ".join(f"{a:.2f}" for a in line), flush=True)
    return line


def main() -> None:
    torch.set_num_threads(1)
    known = {}
    if "--redraw" in sys.argv:
        for row in (ROOT / "docs" / "nearest-passes.txt").read_text().splitlines()[1:]:
            title, _, figures = row.partition(": ")
            known[title] = [float(figure) for figure in figures.split()]
    else:
        print("network, norm, engine: accuracy over Omega_1 in % at", BUDGETS, "passes")
    figure, grid = plt.subplots(2, 2, figsize=(9, 7.2))
    axes = grid.T.flatten()  # a norm is a column
    for axis, (name, norm, eps) in zip(axes, CASES):
        for k, engine in enumerate(ENGINES):
            if engine == "ddn" and norm != 2:
                continue
            line = known.get(f"{name}, l{norm:g}, {engine}") or measure(name, norm, eps, engine)
            wide = 2.5 if engine == "boundary-search" else 1
            axis.plot(
                BUDGETS, line, "o-", color=f"C{k}", label=engine, linewidth=wide, markersize=3
            )
        model, dataset = load(name)
        walked = ws.nearest(model, *images(dataset, 50), norm, method="wda++", eps=eps)
        axis.plot(
            sum(walked.passes()),
            100 * ws.allocate(walked, eps, 1).accuracy,
            "k*",
            markersize=10,
            label="wda++",
        )
        axis.set(
            xscale="log", xlabel="passes per sample", title=f"{name}, l{norm:g}, eps {eps:.3g}"
        )
        axis.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
        axis.set_xticks([], minor=True)
    for axis in axes[:2]:
        axis.set_ylabel("accuracy over Omega_1, %")
    axes[2].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "nearest.png", dpi=90)


if __name__ == "__main__":
    main()
