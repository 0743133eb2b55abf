"""The Lipschitz ladder on real networks, and its Jacobian bounds beside auto_LiRPA's in the same
run.

    python benchmarks/certificates.py [--part ladder|peer|slopes] [--seconds 60]

auto_LiRPA is found through $WASSAIL_LIRPA, the folder that holds the package `auto_LiRPA`; without
it its columns stay empty.
"""

import argparse
import contextlib
import io
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.condense import condensed
from wassail.certificates.relax.propagate import gradients
from wassail.certificates.relax.ranges import bounds_on
from zoo_path import ZOO, images, load

NETWORKS = {
    "mnist_mlp_6_100": (0.005, 0.02),
    "mnist_conv_small": (0.005, 0.02),
    "vnn_resnet2b": (0.25 / 255, 1 / 255),
}
PEER = {
    "mnist_mlp_6_100": (0.005, 0.02),
    "mnist_madry_tiny": (0.1,),
    "vnn_resnet2b": (0.25 / 255,),
    "mnist_conv_small": (0.02,),
}
INF = math.inf
PEER_TEXT = """\
Largest `||J^T (e_j - e_y)||_s` over some rivals j on a linf ball around image 0. `plain`:
`compute_jacobian_bounds` with `optimize=False`, `default`: with its optimised slopes. `ours`:
CROWN, stable neurons gone, optimised slopes on the rest, the Jacobian by substitution, in float64
and rounded outward (auto_LiRPA: float32). nan: auto_LiRPA fails (an assertion in its Jacobian of a
residual addition).
"""


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("ladder", "peer", "slopes"), default=None)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in [options.part] if options.part else ["slopes", "peer", "ladder"]:
        {"ladder": ladder, "peer": peer, "slopes": slopes}[part](options.seconds)


def ladder(seconds: float) -> None:
    """Upper bounds on Lm, rung by rung."""
    print(f"\n## Upper bounds on the margin slope `Lm`, at most {seconds:g} s a rung, one thread\n")
    print(
        "Image 0 of the test set; `gain`: product / best. `lower`: the largest Jacobian found at "
        "sampled points.\n"
    )
    print(
        "| network | domain | r | undecided | lower | product | propagate | s | semidefinite | s "
        "| gain |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, radii in NETWORKS.items():
        model, data = load(name)
        x, _ = images(data, 1)
        domains = [("box [0, 1]", (0.0, 1.0))]
        domains += [(f"linf {_eps(r)}", ws.Ball(x[0], r, INF, (0.0, 1.0))) for r in radii]
        domains += [("l2 0.1", ws.Ball(x[0], 0.1, 2, (0.0, 1.0)))]
        for title, domain in domains:
            for norm in (INF, 2.0):
                cells = []
                lower = 0.0
                for method in ("product", "propagate", "sdp"):
                    start = time.perf_counter()
                    bound = ws.lipschitz(
                        model, norm, domain, method=method, shape=x.shape[1:], time_limit=seconds
                    )
                    cells.append((bound.upper, time.perf_counter() - start, bound))
                    lower = max(lower, bound.lower)
                product, propagate, sdp = cells
                print(
                    f"| `{name}` | {title} | {norm:g} | {sdp[2].info['undecided']} | {lower:.4g} "
                    f"| {product[0]:.5g} | "
                    f"{propagate[0]:.5g} | {propagate[1]:.1f} | {sdp[0]:.5g} | {sdp[1]:.1f} | "
                    f"{product[0] / sdp[0]:.1f} |",
                    flush=True,
                )


def peer(seconds: float) -> None:
    """The same rows, the same ball: ours and auto_LiRPA's Jacobian bound."""
    print("\n## Beside auto_LiRPA's Jacobian bounds (same ball, same rows, same run, one thread)\n")
    print(PEER_TEXT)
    print(
        "| network | radius | s | rows | plain | s | default | s | ours | s | ours / plain | "
        "ours / default | time / plain |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, radii in PEER.items():
        model, data = load(name)
        x, y = images(data, 1)
        label = int(y[0])
        few = 9 if name == "mnist_mlp_6_100" else 3
        rivals = [j for j in range(10) if j != label][:few]
        graph = read(model, tuple(x.shape[1:]))
        for radius in radii:
            ball = ws.Ball(x[0], radius, INF, (0.0, 1.0))
            for s in (1.0, 2.0):
                plain, plain_time = lirpa(model, x, label, rivals, radius, s, optimize=False)
                best, best_time = lirpa(model, x, label, rivals, radius, s, optimize=True)
                start = time.perf_counter()
                bounds = condensed(bounds_on(graph, Region.make(ball, graph.inputs)))
                rows = torch.zeros(few, 10, dtype=torch.float64)
                rows[torch.arange(few), rivals], rows[:, label] = 1.0, -1.0
                found = gradients(bounds, rows)
                ours = float(found.norm(s, found.entries()).max())
                our_time = time.perf_counter() - start
                print(
                    f"| `{name}` | {_eps(radius)} | {s:g} | {few} | {plain:.8g} | "
                    f"{plain_time:.2f} | {best:.8g} | "
                    f"{best_time:.2f} | {ours:.8g} | {our_time:.2f} | {ours / plain:.7f} | "
                    f"{ours / best:.7f} | "
                    f"{our_time / plain_time:.2f} |",
                    flush=True,
                )


def lirpa(
    model: nn.Module,
    x: Tensor,
    label: int,
    rivals: list[int],
    radius: float,
    s: float,
    optimize: bool,
) -> tuple[float, float]:
    """auto_LiRPA's bound as in its own example of local Lipschitz constants; nan without it."""
    if "WASSAIL_LIRPA" not in os.environ:
        return math.nan, math.nan
    sys.path.insert(0, os.environ["WASSAIL_LIRPA"])
    import numpy as np
    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
    from auto_LiRPA.jacobian import GradNorm, JacobianOP

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _plain(model)
            self.norm = GradNorm(norm=int(s))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.norm(JacobianOP.apply(self.model(x).matmul(mask), x))

    mask = torch.zeros(10, 1)
    mask[rivals[0], 0], mask[label, 0] = 1.0, -1.0
    try:
        bounded = BoundedModule(
            Wrapped(), (BoundedTensor(x), mask), bound_opts={"conv_mode": "matrix"}, device="cpu"
        )
    except AssertionError:  # its Jacobian of a residual addition
        return math.nan, math.nan
    low = (x - radius).clamp(0, 1)
    high = (x + radius).clamp(0, 1)
    ball = BoundedTensor(x, PerturbationLpNorm(norm=np.inf, x_L=low, x_U=high))
    values = []
    start = time.perf_counter()
    for rival in rivals:
        mask.zero_()
        mask[rival, 0], mask[label, 0] = 1.0, -1.0
        with contextlib.redirect_stdout(io.StringIO()):  # it says when it stops early
            upper = bounded.compute_jacobian_bounds(
                (ball, mask), bound_lower=False, optimize=optimize
            )[1]
        values.append(float(upper.max()))
    worst = max(values)
    return (worst if s == 1 else math.sqrt(worst)), time.perf_counter() - start


def _plain(model: nn.Module) -> nn.Module:
    """The normalisation as a 1x1 convolution: auto_LiRPA's Jacobians do not pass through a
    subtraction of a buffer.
    """
    first = model[0] if isinstance(model, nn.Sequential) else None
    if first is None or not hasattr(first, "mean"):
        return model
    channels = first.mean.numel()
    conv = nn.Conv2d(channels, channels, 1)
    conv.weight.data = torch.diag(1 / first.std.flatten())[:, :, None, None]
    conv.bias.data = -(first.mean / first.std).flatten()
    return nn.Sequential(conv, *list(model)[1:]).eval()


def slopes(seconds: float) -> None:
    """The margin slope against the paper's, on R^n."""
    import numpy as np

    print("\n## The paper's `L` against the margin slope `Lm` on R^n\n")
    print(
        "Brackets: lower at evaluated points, upper by the ladder; `L / Lm` compares the same "
        "side.\n"
    )
    print(
        "| network | r | Lm lower | Lm upper | L lower | L upper | L / Lm, lower | L / Lm, upper |"
    )
    print("|---|---|---|---|---|---|---|---|")
    arrays = np.load(ZOO / "lipschitz" / "lipsdp_mnist_784-50-10.npz")
    mlp = nn.Sequential(nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 10)).double()
    for layer, i in ((mlp[0], 0), (mlp[2], 1)):
        layer.weight.data, layer.bias.data = (
            torch.from_numpy(arrays[f"W{i}"]),
            torch.from_numpy(arrays[f"b{i}"]),
        )
    for name, model, shape in _models(mlp):
        for norm in (INF, 2.0, 1.0):
            margin = ws.lipschitz(model, norm, None, shape=shape, time_limit=seconds)
            dual = {1.0: INF, 2.0: 2.0, INF: 1.0}[norm]
            logits = ws.lipschitz(
                model, norm, None, outputs="logits", norm_out=dual, shape=shape, time_limit=seconds
            )
            low, high = (2 ** (1 / norm) * side for side in (logits.lower, logits.upper))
            print(
                f"| {name} | {norm:g} | {margin.lower:.5g} | {margin.upper:.5g} | {low:.5g} | "
                f"{high:.5g} | "
                f"{low / margin.lower:.2f} | {high / margin.upper:.2f} |",
                flush=True,
            )


def _models(mlp: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    yield "`lipsdp_mnist_784-50-10`", mlp, (784,)
    for name in ("mnist_mlp_toy20", "mnist_mlp_spectral", "mnist_conv_small"):
        model, data = load(name)
        yield f"`{name}`", model, tuple(images(data, 1)[0].shape[1:])


def _eps(radius: float) -> str:
    return f"{255 * radius:g}/255" if radius < 0.0045 else f"{radius:g}"


if __name__ == "__main__":
    print("# Certificates for ReLU networks: Lipschitz bounds measured\n")
    print(f"Made by `python benchmarks/certificates.py`; torch {torch.__version__}.")
    main()
