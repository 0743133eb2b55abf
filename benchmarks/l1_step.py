"""Which step size should the walk take for l1? Sweep it on images 1000..1199 (never the reported
ones).

python benchmarks/l1_step.py > docs/l1-step.md
"""

import wassail as ws
from zoo_path import images, load

SHARES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
CASES = (
    ("cifar_cnn_a_adv", 3.0),
    ("vnn_resnet2b", 3.0),
    ("cifar_base_kw", 3.0),
    ("mnist_madry_tiny", 5.0),
    ("mnist_conv_small", 3.0),
)


def main() -> None:
    print("# The l1 step of the walk\n")
    print(
        "The paper runs no l1 attack, so its step sizes say nothing about l1. Accuracy in % over "
        "Omega_1 and Omega_2 of"
    )
    print(
        "WDA++ (20 steps, box [0, 1]), and of WDA at kappa = 1, for alpha = share x eps, images "
        "1000 to 1199."
    )
    print("Command: `python benchmarks/l1_step.py`.\n")
    print("| network, eps | clean | " + " | ".join(f"{s:g} eps" for s in SHARES) + " |")
    print("|---|---|" + "---|" * len(SHARES))
    for name, eps in CASES:
        model, dataset = load(name)
        x, y = (t[1000:1200] for t in images(dataset, 1200))
        cells = []
        for share in SHARES:
            flips = ws.nearest(model, x, y, norm=1, method="wda++", step=share * eps)
            one, two = (100 * ws.allocate(flips, eps, p).accuracy for p in (1, 2))
            point = 100 * ws.wda(model, x, y, ws.Threat(1, "inf", eps), step=share * eps).accuracy
            cells.append(f"{one:.2f}, {two:.2f}; {point:.1f}")
        print(
            f"| `{name}`, {eps:g} | {100 * flips.clean_accuracy():.1f} | "
            + " | ".join(cells)
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
