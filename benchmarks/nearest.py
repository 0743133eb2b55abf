"""Nearest-flip engines on real networks: ours against WDA++ and, where installed, adv-lib, in one
run.

    python benchmarks/nearest.py > docs/nearest.md          # two worker processes of one thread
    each

First 200 test images (fewer for the slow networks), box [0, 1]. Settings were chosen on images 1000
and up. Every peer's points are re-verified by `Flips.from_points`; its passes are counted inside
the model.
"""

import math
import multiprocessing
import sys
import time
import types
import warnings

import torch

import wassail as ws
from zoo_path import ZOO, images, load

INF = math.inf
VIT = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
NETWORKS = {  # name: (images, eps for l1, l2, linf)
    "mnist_madry_tiny": (200, 5.0, 1.5, 0.3),
    "mnist_trades": (100, 5.0, 1.5, 0.3),
    "cifar_cnn_a_adv": (200, 3.0, 0.25, 2 / 255),
    "vnn_resnet4b": (200, 3.0, 0.25, 1 / 255),
    "cifar_conv_small_sigmoid": (100, 3.0, 0.25, 2 / 255),
    "cifar_vit_pgd_2_3_16": (200, 3.0, 0.25, 1 / 255),
    "cifar_resnet18_aa": (6, 3.0, 0.25, 1 / 255),
}
PEERS = (
    "mnist_madry_tiny",
    "cifar_cnn_a_adv",
)  # where the peers are run; elsewhere the published anchors are quoted
# Best single peer at up to 1,000 passes, and the nearest flip of everything tried: (Omega_1,
# Omega_2, mean distance), measured earlier on the same images with adv-lib, AutoAttack and others.
ANCHORS = {
    ("mnist_madry_tiny", INF): ((4.58, 10.84, 0.3183), (0.13, 2.97, 0.3020)),
    ("mnist_madry_tiny", 2.0): ((0.00, 0.00, 1.3162), (0.00, 0.00, 1.0627)),
    ("mnist_trades", INF): ((13.27, 23.75, 0.3528), (7.99, 15.12, 0.3291)),
    ("mnist_trades", 2.0): ((5.42, 10.58, 1.6432), (0.00, 0.90, 1.4646)),
    ("cifar_cnn_a_adv", INF): ((8.22, 19.58, 4.342 / 255), (7.37, 18.94, 4.144 / 255)),
    ("cifar_cnn_a_adv", 2.0): ((7.74, 19.44, 0.5222), (7.18, 18.90, 0.5095)),
    ("vnn_resnet4b", INF): ((36.62, 51.62, 4.722 / 255), (36.13, 51.23, 4.602 / 255)),
    ("vnn_resnet4b", 2.0): ((21.26, 33.95, 0.6323), (20.50, 33.29, 0.6110)),
    ("cifar_vit_pgd_2_3_16", INF): ((21.66, 35.60, 3.983 / 255), (21.37, 35.39, 3.904 / 255)),
    ("cifar_vit_pgd_2_3_16", 2.0): ((9.60, 22.25, 0.5838), (9.33, 21.95, 0.5766)),
}


class Counted(torch.nn.Module):
    """Counts the rows that go forward and backward through a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.model(x)
        self.rows += len(x)
        if z.requires_grad:
            z.register_hook(lambda g: setattr(self, "rows", self.rows + len(g)))
        return z


def peers(norm: float):
    """adv-lib's attacks at about 1,000 passes a sample; nothing where it is not installed."""
    for name, attributes in (
        ("torchvision", ["models"]),
        ("torchvision.models", []),
        ("visdom", ["Visdom"]),
    ):
        if (
            name not in sys.modules
        ):  # adv-lib imports them for a distance and a plot that are not used here
            module = types.ModuleType(name)
            for attribute in attributes:
                setattr(module, attribute, object)
            sys.modules[name] = module
    try:
        from adv_lib import attacks
    except ImportError:
        return
    yield "adv-lib FAB 50", lambda m, x, y: attacks.fab(m, x, y, norm=norm, n_iter=50)
    first = 10.0 if norm == INF else 1.0
    yield (
        "adv-lib FMN 500",
        lambda m, x, y: attacks.fmn(m, x, y, norm=norm, steps=500, α_init=first),
    )
    if norm == 2:
        yield "adv-lib DDN-NQ 500", lambda m, x, y: attacks.ddn(m, x, y, steps=500, levels=None)
    if norm != INF:
        yield (
            "adv-lib ALMA 500",
            lambda m, x, y: attacks.alma(
                m,
                x,
                y,
                num_steps=500,
                distance=f"l{norm:g}",
                init_lr_distance={1: 0.5, 2: 0.1}[norm],
            ),
        )
        yield "adv-lib PDPGD 500", lambda m, x, y: attacks.pdpgd(m, x, y, norm=norm, num_steps=500)


def case(job: tuple[str, float]) -> tuple[tuple[str, float], list[str]]:
    name, norm = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    n, *eps = NETWORKS[name]
    eps = eps[{1.0: 0, 2.0: 1, INF: 2}[norm]]
    if "vit" in name:
        model, dataset = ws.zoo.load_onnx(ZOO / "models" / f"{name}.onnx", *VIT), "cifar10"
    else:
        model, dataset = load(name)
    x, y = images(dataset, n)
    rows = []
    pool = []

    def add(label: str, flips: ws.Flips, seconds: float, passes: float) -> None:
        d = flips.distances[flips.distances > 0]
        found = d[torch.isfinite(d)]
        one, two = (100 * ws.allocate(flips, eps, p).accuracy for p in (1, 2))
        rows.append(
            f"| {label} | {passes:.0f} | {100 * len(found) / max(len(d), 1):.0f} % | "
            f"{found.mean():.5g} | {d.median():.5g} | "
            f"{one:.2f} | {two:.2f} | {seconds:.0f} |"
        )

    def ours(label: str, **options) -> ws.Flips:
        start = time.perf_counter()
        flips = ws.nearest(model, x, y, norm, **options)
        add(label, flips, time.perf_counter() - start, sum(flips.passes()))
        return flips

    walked = ours("WDA++", method="wda++", eps=eps)
    ours("**chase**, WDA++'s passes", passes=int(sum(walked.passes())))
    ours("**chase**, 100", passes=100)
    if name != "cifar_resnet18_aa":
        ours("**chase**, 1000", passes=1000)
    if name in PEERS:
        ours("**chase**, 1000, steered for Omega_1", passes=1000, eps=eps, order=1)
    if name in PEERS:
        for label, attack in peers(norm):
            keep = ws.Flips.from_points(model, x, y, x, norm).distances > 0
            counted = Counted(model)
            points = x.clone()
            start = time.perf_counter()
            points[keep] = attack(counted, x[keep], y[keep]).detach()
            seconds = time.perf_counter() - start
            # Points on the very boundary come back right in another batch: the nearest of a few
            # tiny pushes counts.
            pushed = [(x + s * (points - x)).clamp(0, 1) for s in (1.0, 1.0005, 1.002, 1.01)]
            flips = ws.Flips.merge(
                *(ws.Flips.from_points(model, x, y, p, norm, method=label) for p in pushed)
            )
            add(label, flips, seconds, counted.rows / int(keep.sum()))
            pool.append(flips)
        if pool:
            add("union of these peers", pool[0].merge(*pool[1:]), 0, 0)
    for label, figures in zip(
        ("best single peer (anchor)", "best known (anchor)"), ANCHORS.get(job, ())
    ):
        rows.append(f"| {label} | | | {figures[2]:.5g} | | {figures[0]:.2f} | {figures[1]:.2f} | |")
    title = (
        f"\n## `{name}`, l{norm:g}, eps {eps:.4g}, {n} images, clean "
        f"{100 * walked.clean_accuracy():.1f} %\n"
    )
    head = (
        "| engine | passes | flipped | mean d | median d | Omega_1 % | Omega_2 % | s |\n|"
        + 8 * "---|"
    )
    return job, [title, head, *rows]


def main() -> None:
    print("# Nearest-flip engines on real networks\n")
    print(
        "Command: `python benchmarks/nearest.py`. Passes: forward plus backward per attacked "
        "sample. Mean distance over"
    )
    print(
        "flipped samples, median over all attacked ones; accuracies over Omega_1 and Omega_2 in "
        "%. Anchors: measured"
    )
    print(
        "earlier on the same images. Two cases run at once, so seconds compare within a table only."
    )
    wanted = sys.argv[1:]
    jobs = [
        (name, norm)
        for name in NETWORKS
        for norm in (INF, 2.0, 1.0)
        if not wanted or name in wanted
    ]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for _, lines in pool.imap(case, jobs, chunksize=1):
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
