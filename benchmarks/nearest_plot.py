"""Accuracy over Omega_1 against passes per sample, for every engine.

python benchmarks/nearest_plot.py > docs/nearest-passes.txt         # and writes docs/nearest.png
"""

import math

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import wassail as ws
from zoo_path import ROOT, images, load

BUDGETS = (25, 50, 100, 200, 400)
CASES = (("cifar_cnn_a_adv", math.inf, 2 / 255), ("cifar_cnn_a_adv", 2.0, 0.25), ("mnist_madry_tiny", math.inf, 0.3),
         ("mnist_madry_tiny", 2.0, 1.5))  # fmt: skip
ENGINES = ("chase", "fab", "apgd", "fmn", "ddn", "pdpgd", "deepfool")


def main() -> None:
    torch.set_num_threads(1)
    figure, axes = plt.subplots(1, len(CASES), figsize=(4 * len(CASES), 3.6))
    print("network, norm, engine: accuracy over Omega_1 in % at", BUDGETS, "passes")
    for axis, (name, norm, eps) in zip(axes, CASES):
        model, dataset = load(name)
        x, y = images(dataset, 50)
        for engine in ENGINES:
            if engine == "ddn" and norm != 2:
                continue
            long = {"steps": 1000} if engine in ("fab", "fmn", "ddn", "pdpgd") else {}
            flips = [ws.nearest(model, x, y, norm, method=engine, passes=p, **long) for p in BUDGETS]
            line = [100 * ws.allocate(f, eps, 1).accuracy for f in flips]
            print(f"{name}, l{norm:g}, {engine}:", " ".join(f"{a:.2f}" for a in line), flush=True)
            axis.plot(BUDGETS, line, "o-", label=engine, linewidth=2.5 if engine == "chase" else 1, markersize=3)
        walked = ws.nearest(model, x, y, norm, method="wda++", eps=eps)
        axis.plot(sum(walked.passes()), 100 * ws.allocate(walked, eps, 1).accuracy, "k*", markersize=10, label="wda++")
        axis.set(xscale="log", xlabel="passes per sample", title=f"{name}, l{norm:g}, eps {eps:.3g}")
    axes[0].set_ylabel("accuracy over Omega_1, %")
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "nearest.png", dpi=90)


if __name__ == "__main__":
    main()
