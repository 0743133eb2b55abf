"""Compare the results of this code with those of another commit, to the last digit, on this
machine.

    python scripts/freeze.py COMMIT [--only WORD] [--list]

A few dozen cases run twice, each time in a process of its own: once with the package as it was at
COMMIT, once as it is in the working tree. Every number of every result is compared bit for bit. The
script is silent where nothing differs; else it names the cases and how far apart they are, and its
exit code is 1. A figure in a file would be wrong on the next processor, so there is none.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BOX = (0.0, 1.0)
NORMS = (1.0, 2.0, math.inf)
SMALL = "digits-mlp-adv"
CURVED = "digits-vit"
# What a run writes differs in these: they hold times.
TIMED = ("seconds", "began", "ended", "time", "created", "host", "pid")


def main() -> None:
    """Compare, list or compute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="the commit to compare with")
    parser.add_argument("--only", default="", help="cases whose name contains this word")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--compute", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(name for name, _ in cases()))
    elif options.compute:
        options.compute.write_bytes(pickle.dumps(compute(options.only)))
    elif options.commit:
        sys.exit(compare(options.commit, options.only))
    else:
        parser.error("give the commit to compare with")


def compare(commit: str, only: str) -> int:
    """Run both sides and print where they differ; 1 if they do."""
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        archive = subprocess.run(
            ["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(old, filter="data")
        before = side(old / "src", Path(folder) / "before", only)
        after = side(ROOT / "src", Path(folder) / "after", only)
    different = [
        line for name in before for line in differences(name, before[name], after.get(name))
    ]
    print("\n".join(different), end="\n" if different else "")
    return 1 if different else 0


def side(source: Path, file: Path, only: str) -> dict[str, Any]:
    """The results with the package in this folder."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--compute", str(file), "--only", only]
    subprocess.run(command, check=True, env=environment)
    found: dict[str, Any] = pickle.loads(file.read_bytes())
    return found


def differences(name: str, a: Any, b: Any) -> Iterator[str]:
    """Where two results differ, one line each."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from differences(f"{name} {key}", a.get(key), b.get(key))
    elif type(a) is not type(b):
        yield f"{name}: {a!r} before, {b!r} now"
    elif isinstance(a, list):
        if len(a) != len(b):
            yield f"{name}: {len(a)} values before, {len(b)} now"
        elif a != b and repr(a) != repr(b):  # NaN is not equal to itself
            apart = [abs(p - q) for p, q in zip(a, b) if p != q and repr(p) != repr(q)]
            yield f"{name}: {len(apart)} of {len(a)} values differ, by at most {max(apart):.3g}"
    elif a != b and repr(a) != repr(b):
        yield f"{name}: {a!r} before, {b!r} now"


def compute(only: str) -> dict[str, Any]:
    """Every case by its name."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {}
    for name, case in cases():
        if only in name:
            found[name] = plain(case())
    return found


def plain(value: Any) -> Any:
    """Numbers, texts, lists and dictionaries: what two processes with different code can
    exchange.
    """
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().double().flatten().tolist()
        return {"type": str(value.dtype), "shape": list(value.shape), "values": numbers}
    if isinstance(value, numpy.ndarray):
        return plain(torch.from_numpy(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if str(k) not in TIMED}
    if isinstance(value, list | tuple):
        return {str(i): plain(v) for i, v in enumerate(value)}
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    return str(value)


def embedded(name: str, count: int) -> tuple[Any, Any, Any]:
    """An embedded network and its first samples."""
    import wassail as ws

    x, y = ws.zoo.data("digits")
    return ws.zoo.load(name), x[:count], y[:count]


def random_network(sizes: tuple[int, ...], seed: int) -> Any:
    """A ReLU network with random weights in float64."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)
    layers: list[Any] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layer = nn.Linear(a, b).double()
        with torch.no_grad():
            layer.weight.copy_(
                torch.randn(b, a, generator=generator, dtype=torch.float64) / math.sqrt(a)
            )
            layer.bias.copy_(0.3 * torch.randn(b, generator=generator, dtype=torch.float64))
        layers += [layer, nn.ReLU()] if i < len(sizes) - 2 else [layer]
    return nn.Sequential(*layers).eval()


def random_samples(model: Any, n: int, features: int) -> tuple[Any, Any]:
    """Random points of the unit box with the labels that the model gives them."""
    import torch

    x = torch.rand(n, features, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x, model(x).argmax(1)


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and what computes them. Only public names: they must exist on both sides."""
    for norm in NORMS:
        for method in (
            "auto",
            "wda++",
            "boundary-search",
            "deepfool",
            "fab",
            "fmn",
            "ddn",
            "apgd",
            "pdpgd",
        ):
            if not (method == "ddn" and norm != 2):
                yield f"nearest {method} l{norm:g}", partial(flips, method, norm)
        yield f"distributions l{norm:g}", partial(distributions, norm)
        for method in ("crown", "ball", "exact"):
            yield f"radii {method} l{norm:g}", partial(certified, SMALL, method, norm, 6)
        yield f"radii crown smooth l{norm:g}", partial(certified, CURVED, "crown", norm, 2)
        yield f"verify l{norm:g}", partial(verified, norm)
        yield f"lipschitz l{norm:g}", partial(constants, norm)
        yield f"certify l{norm:g}", partial(slopes, norm)
        yield f"worst case l{norm:g}", partial(worst, norm)
        yield f"curves l{norm:g}", partial(curves, norm)
    yield "corollary", corollary
    yield "run files", run_files


def flips(method: str, norm: float) -> Any:
    """The nearest flips by one engine."""
    import wassail as ws

    model, x, y = embedded(SMALL, 12)
    options = {"step": 0.1} if method == "wda++" else {"passes": 100}
    found = ws.nearest(model, x, y, norm, BOX, method, seed=1, **options)
    return [found.distances, found.points, found.labels, found.forwards, found.backwards]


def distributions(norm: float) -> Any:
    """What the fixed-threat attacks return."""
    import wassail as ws

    model, x, y = embedded(SMALL, 8)
    threat = partial(
        ws.Threat, norm=norm, eps={1.0: 2.0, 2.0: 0.5, math.inf: 0.1}[norm], domain=BOX
    )
    runs = {
        "wda": partial(ws.wda, threat=threat(order=1)),
        "wda_pp": partial(ws.wda_pp, threat=threat(order=1)),
        "w_pgd": partial(ws.w_pgd, threat=threat(order=2), steps=5),
        "pgd": partial(ws.pgd, threat=threat(order=math.inf), steps=5),
        "fgsm": partial(ws.fgsm, threat=threat(order=math.inf)),
        "apgd": partial(ws.apgd, threat=threat(order=math.inf), steps=10),
        "square": partial(ws.square, threat=threat(order=math.inf), queries=50),
    }
    if norm == 1:
        del runs["w_pgd"]  # it has no l1 form
    found = {}
    for name, run in runs.items():
        answer = run(model, x, y)
        found[name] = [answer.weights, answer.points, answer.cost, answer.accuracy]
    return found


def certified(name: str, method: str, norm: float, count: int) -> Any:
    """Certified radii by one method."""
    import wassail as ws

    model, x, y = embedded(name, count)
    found = ws.radii(model, x, y, norm, BOX, method)
    return [found.values, found.exact]


def verified(norm: float) -> Any:
    """Which samples are proved at one eps."""
    import wassail as ws

    model, x, y = embedded(SMALL, 30)
    eps = {1.0: 0.7, 2.0: 0.25, math.inf: 0.05}[norm]
    threat = ws.Threat(norm=norm, order=math.inf, eps=eps, domain=BOX)
    found = ws.verify(model, x, y, threat, "crown")
    return getattr(found, "proved", found)  # a tensor in earlier versions


def constants(norm: float) -> Any:
    """Lipschitz constants by three methods, on all of space and on the box."""
    import wassail as ws

    model = random_network((4, 8, 8, 3), 1)
    found = {}
    for method in ("product", "propagate", "exact"):
        for where in (None, BOX):
            bound = ws.lipschitz(model, norm, where, method=method, shape=(4,))
            found[f"{method} {where}"] = [bound.lower, bound.upper, bound.exact]
    return found


def slopes(norm: float) -> Any:
    """Both sides of the worst-case loss by the slopes."""
    import wassail as ws

    model = random_network((3, 6, 3), 2)
    x, y = random_samples(model, 5, 3)
    found = ws.certify(model, x, y, norm, "margin")
    return [list(found.bounds(eps)) for eps in (0.1, 1.0, 10.0)]


def worst(norm: float) -> Any:
    """The exact worst-case loss of a small network."""
    import wassail as ws

    model = random_network((2, 5, 3), 3)
    x, y = random_samples(model, 4, 2)
    found = ws.worst_case(model, x, y, ws.Threat(norm=norm, order=1, eps=0.2, domain=BOX), "margin")
    return [found.bound.lower, found.bound.upper]


def curves(norm: float) -> Any:
    """Robust accuracy and worst-case loss at three budgets."""
    import wassail as ws

    model, x, y = embedded(SMALL, 6)
    found = ws.nearest(model, x, y, norm, BOX, passes=100, seed=0)
    radii = ws.radii(model, x, y, norm, BOX, "crown")
    eps = {1.0: 1.0, 2.0: 0.25, math.inf: 0.05}[norm]
    answer: dict[str, Any] = {}
    for order in NORMS:
        curve = ws.risk_curve(found, radii, order)
        answer[f"risk {order:g}"] = [list(curve(k * eps)) for k in (0.5, 1.0, 2.0)]
    loss = ws.loss_curve(model, x, y, norm, 1, points=[found.points])
    answer["loss"] = [list(loss(k * eps)) for k in (0.5, 1.0, 2.0)]
    return answer


def corollary() -> Any:
    """The table of a transformer's constants."""
    import wassail as ws

    model, x, _ = embedded(CURVED, 1)
    return str(ws.corollary(model, shape=x.shape[1:]))


def run_files() -> Any:
    """The names of all files of a run, and the content of those that hold no times."""
    import wassail as ws

    model, x, y = embedded(SMALL, 12)
    threats = [
        ws.Threat(norm=math.inf, order=order, eps=0.1, domain=BOX) for order in (1, math.inf)
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        ws.evaluate(
            model,
            (x, y),
            threats,
            ["wda++", "nearest"],
            out=out,
            certify="crown",
            passes=50,
            name="frozen",
        )
        files = sorted(p for p in out.rglob("*") if p.is_file())
        found: dict[str, Any] = {"names": [str(p.relative_to(out)) for p in files]}
        for path in files:
            if path.suffix in (".npz", ".safetensors", ".npy", ".pt"):
                found[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


if __name__ == "__main__":
    main()
