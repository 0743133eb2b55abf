"""Known shifts on real networks: their eps, the accuracy under them, and what is certified there.

    python benchmarks/landmarks.py > docs/landmarks.md

linf, orders 1, 2 and inf, box [0, 1]. Pictures: docs/landmarks/. A measured accuracy below
the certified curve would stop the script with an error.
"""

import math
from pathlib import Path

import torch

import wassail as ws
from wassail.threat import floor_percent, show
from wassail.transport.picture import draw_sandwich
from zoo_path import ROOT, images, load

INF = math.inf
SAMPLES = 24
NETWORKS = {
    "digits-cnn-adv": "0.05",
    "mnist_kw_01": "0.1",
    "cifar_base_kw": "8/255",
    "cifar_cnn_a_adv": "2/255",
    "vnn_resnet2b": "2/255",
}


def samples_of(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    if name.startswith("digits"):
        x, y = ws.zoo.data("digits")
        return ws.zoo.load(name), x[:SAMPLES], y[:SAMPLES]
    model, data = load(name)
    return model, *images(data, SAMPLES)


def main() -> None:
    print("# Known shifts and their eps\n")
    print(
        f"Command: `python benchmarks/landmarks.py`. The first {SAMPLES} test images, radii by "
        "linear bounds (`crown`), flips by `nearest` with 60 passes. `eps`: cost of the pairing, "
        "an upper bound on the Wasserstein distance; `W_1`: the exact distance within classes. "
        "`measured`: accuracy on the changed images, in %. `certified`: at least that, at the eps "
        "of order 1, 2 and inf. No measured accuracy is below a certified one: the script would "
        "have stopped.\n"
    )
    folder = Path(ROOT) / "docs" / "landmarks"
    folder.mkdir(exist_ok=True)
    for name, mark in NETWORKS.items():
        model, x, y = samples_of(name)
        flips = ws.nearest(model, x, y, INF, passes=60)
        radii = ws.radii(model, x, y, INF, method="crown")
        curves = [ws.risk_curve(flips, radii, order) for order in (1, 2, INF)]
        found = ws.landmarks(model, x, y, INF, curves=curves, exact=True)
        print(f"## {name}, linf, clean {100 * curves[0](0)[1]:.1f} %\n")
        print("| shift | measured | eps p = 1 | W_1 | p = 2 | p = inf | certified 1, 2, inf |")
        print("|---|---|---|---|---|---|---|")
        for landmark in found:
            proved = [floor_percent(c(landmark.eps[c.order])[0], 1) for c in curves]
            print(
                f"| {landmark.name} | {100 * landmark.accuracy:.1f} | {landmark.eps[1]:.4g} | "
                f"{landmark.exact[1]:.4g} | {landmark.eps[2]:.4g} | {show(landmark.eps[INF])} "
                f"| {', '.join(proved)} |"
            )
        figure = draw_sandwich(
            curves, f"{name}, linf", mark=mark, landmarks=found, eps=found_end(found)
        )
        figure.savefig(folder / f"{name}-linf.png", dpi=90)
        print(f"\n![]({folder.name}/{name}-linf.png)\n", flush=True)


def found_end(found: tuple[ws.Landmark, ...]) -> float:
    """Where the axes end: the median eps of order 1 of all shifts."""
    return sorted(landmark.eps[1] for landmark in found)[len(found) // 2]


if __name__ == "__main__":
    main()
