"""Known shifts on real networks: their eps, the accuracy under them, and what is certified there.

    python benchmarks/landmarks.py > docs/landmarks.md

linf and l2, orders 1, 2 and inf, box [0, 1]. Pictures: docs/landmarks/. A measured accuracy below
the certified curve would stop the script with an error. Some tables only: give their names, for
example mnist_kw_01-l2.
"""

import math
import sys
from pathlib import Path

import torch

import wassail as ws
from wassail.evaluation.shifts import IMAGES
from wassail.threat import floor_percent
from wassail.transport.picture import draw_sandwich
from zoo_path import ROOT, images, load

INF = math.inf
SAMPLES = 100
PASSES = 60
# Weaker than the known ones: near the eps at which CIFAR networks are certified at all.
WEAK = (
    "noise-0.1",
    "noise-0.5",
    "brightness-0.2",
    "brightness-1",
    "contrast-99",
    "blur-0.3",
    "rotate-0.1",
)
NETWORKS = {
    "digits-cnn-adv": {INF: "0.05", 2.0: "0.3"},
    "mnist_kw_01": {INF: "0.1", 2.0: "0.5"},
    "cifar_base_kw": {INF: "8/255", 2.0: "0.25"},
    "cifar_cnn_a_adv": {INF: "2/255", 2.0: "0.1"},
    "vnn_resnet2b": {INF: "2/255", 2.0: "0.1"},
}


def samples_of(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    if name.startswith("digits"):
        x, y = ws.zoo.data("digits")
        return ws.zoo.load(name), x[:SAMPLES], y[:SAMPLES]
    model, data = load(name)
    return model, *images(data, SAMPLES)


def one(name: str, norm: float, mark: str, folder: Path) -> None:
    """The table and the picture of one network and norm."""
    model, x, y = samples_of(name)
    flips = ws.nearest(model, x, y, norm, passes=PASSES)
    radii = ws.radii(model, x, y, norm, method="crown", upper=flips.distances)
    curves = [ws.risk_curve(flips, radii, order) for order in (1, 2, INF)]
    found = ws.landmarks(model, x, y, norm, shifts=[*WEAK, *IMAGES], curves=curves, exact=True)
    clean, attacked = 100 * curves[0](0)[1], 100 * curves[0](ws.Threat(eps=mark).eps)[1]
    print(f"## {name}, l{norm:g}, clean {clean:.1f} %\n")
    above = sum(c(m.eps[c.order])[0] > 0 for m in found for c in curves)
    least = min(m.accuracy - c(m.eps[c.order])[0] for m in found for c in curves)
    print(
        f"Certified above 0 at {above} of {len(found) * len(curves)} places; the measured accuracy "
        f"is at least {100 * least:.1f} points above the certified one at all of them. At eps "
        f"{mark}, order 1, attacks leave {attacked:.1f} %.\n"
    )
    print("| shift | measured | eps p = 1 | W_1 | p = 2 | p = inf | certified 1, 2, inf |")
    print("|---|---|---|---|---|---|---|")
    for landmark in found:
        proved = [floor_percent(c(landmark.eps[c.order])[0], 1) for c in curves]
        exact = landmark.exact[1]
        print(
            f"| {landmark.name} | {100 * landmark.accuracy:.1f} | {landmark.eps[1]:.4g} | "
            f"{'' if exact is None else f'{exact:.4g}'} | {landmark.eps[2]:.4g} | "
            f"{landmark.eps[INF]:.4g} | {', '.join(proved)} |"
        )
    figure = draw_sandwich(curves, f"{name}, l{norm:g}", mark=mark, landmarks=found)
    figure.savefig(folder / f"{name}-l{norm:g}.png", dpi=90)
    print(f"\n![]({folder.name}/{name}-l{norm:g}.png)\n", flush=True)


def main() -> None:
    print("# Known shifts and their eps\n")
    print(
        f"Command: `python benchmarks/landmarks.py`. The first {SAMPLES} test images, linf and l2, "
        f"radii by linear bounds (`crown`), flips by `nearest` with {PASSES} passes. `eps`: cost "
        "of the pairing, "
        "an upper bound on the Wasserstein distance; `W_1`: the exact distance within classes. "
        "`measured`: accuracy on the changed images, in %. `certified`: at least that, at the eps "
        "of order 1, 2 and inf. No measured accuracy is below a certified one: the script would "
        "have stopped. The first seven shifts are weaker than the standard ones.\n"
    )
    folder = Path(ROOT) / "docs" / "landmarks"
    folder.mkdir(exist_ok=True)
    for name, marks in NETWORKS.items():
        for norm, mark in marks.items():
            if not sys.argv[1:] or f"{name}-l{norm:g}" in sys.argv[1:]:
                one(name, norm, mark, folder)


if __name__ == "__main__":
    main()
