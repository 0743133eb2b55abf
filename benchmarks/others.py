"""Labels that change and people that are missing: beside other libraries, and the coverage of
limits for the population.

    python benchmarks/others.py > docs/others.md

The comparison needs `dro` and `skwdro` (PyPI), which solve linear models with a label cost; it is
left out where they are not there. The figures of accuracy are compared with the full transport
program in `tests/transport`.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable

import numpy as np
import torch

import wassail as ws
from wassail.transport.curve import RiskCurve

INF = math.inf
REPETITIONS = 1_000
QUANTILES = 20_000
SAMPLES = 200
EPS = {1.0: 0.06, 2.0: 0.15, INF: 0.25}
SETTINGS = ((INF, 1.0), (INF, 0.7), (0.3, 1.0), (0.3, 0.7))


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Twelve samples of two classes, labels -1 and 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, 3))
    y = np.sign(x @ np.array([1.0, -0.5, 0.3]) + 0.5 * rng.normal(size=12))
    return x, np.where(y == 0, 1.0, y)


def ours(
    x: np.ndarray, y: np.ndarray, theta: np.ndarray, b: float, norm: float, eps: float, kappa: float
) -> float:
    """The worst-case logistic loss of a linear model, from above."""
    model = torch.nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(np.stack([0 * theta, theta])))
        model.bias.copy_(torch.tensor([0.0, b], dtype=torch.float64))
    label = torch.tensor((y > 0).astype(np.int64))
    name = "cross_entropy"
    curve = ws.loss_curve(model, torch.tensor(x), label, norm, 1, name, None, label_cost=kappa)
    return curve(eps)[1]


def with_dro(x: np.ndarray, y: np.ndarray, norm: float, eps: float, kappa: float) -> float:
    """What dro finds, less what we find for its model."""
    solver = importlib.import_module("dro.linear_model.wasserstein_dro")
    model = solver.WassersteinDRO(3, "logistic")
    words = {INF: "inf", 1.0: 1, 2.0: 2}
    model.update({"p": words[norm], "kappa": "inf" if kappa == INF else kappa, "eps": eps})
    found = model.fit(x, y)
    here = ours(x, y, np.array(found["theta"]), float(found["b"]), norm, eps, kappa)
    return abs(here - model.robust_obj) / max(1.0, abs(model.robust_obj))


def with_skwdro(x: np.ndarray, y: np.ndarray, norm: float, eps: float, kappa: float) -> float:
    """The same for skwdro, whose norm is l2 and whose label cost is finite."""
    solver = importlib.import_module("skwdro.solvers.specific_solvers")
    solve = getattr(solver.WDROLogisticSpecificSolver, "__wrapped__", None)
    given = {"rho": eps, "kappa": kappa, "X": x, "y": y, "fit_intercept": True}
    found = (solve or solver.WDROLogisticSpecificSolver)(**given)
    theta, b, _, value = found
    here = ours(x, y, np.array(theta), float(b), norm, eps, kappa)
    return abs(here - float(value)) / max(1.0, abs(float(value)))


def compared(
    name: str, against: Callable[..., float], norms: tuple[float, ...], kappas: tuple[float, ...]
) -> None:
    """One line of the table."""
    try:
        found = [
            against(*data(seed), norm, eps, kappa)
            for seed in range(4)
            for norm in norms
            for kappa in kappas
            for eps in (0.05, 0.3)
        ]
    except ImportError as error:
        print(f"| {name} | not installed ({error.name}) | |")
        return
    print(f"| {name} | {len(found)} | {max(found):.1e} |")


def distances(rng: np.random.Generator | None, group: int, n: int) -> np.ndarray:
    """Distances of one of two groups, n of them drawn, or quantiles: one in ten wrong already."""
    u = (np.arange(n) + 0.5) / n if rng is None else rng.uniform(0, 1, n)
    return np.where(u < 0.1, 0.0, (u - 0.1) * (1.0 + group))


def curve_of(
    rng: np.random.Generator | None, n: int, order: float, grouped: bool, **others: float
) -> RiskCurve:
    """The curve of n samples, of 2 n quantiles for none drawn."""
    known = torch.tensor(np.concatenate([distances(rng, g, n // 2) for g in (0, 1)]))
    mu = torch.full((len(known),), 1 / len(known), dtype=torch.float64)
    groups = ws.Groups([0] * (n // 2) + [1] * (n // 2), 0.2, 0.7) if grouped else None
    return RiskCurve(known, known.clone(), mu, order, groups=groups, **others)


def coverage() -> None:
    """How often each limit holds, a line for each setting."""
    heads = ["label cost", "subpopulation", "groups", "order", "band: certified", "attacked"]
    heads += ["one threat: certified", "attacked"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for kappa, alpha in SETTINGS:
        for grouped in (False, True):
            for order, eps in EPS.items():
                others = {"label_cost": kappa, "subpopulation": alpha}
                true = curve_of(None, QUANTILES, order, grouped, **others)(eps)[1]
                rng = np.random.default_rng(0)
                holds = np.zeros(4)
                for _ in range(REPETITIONS):
                    curve = curve_of(rng, SAMPLES, order, grouped, **others)
                    sides = (
                        *curve.population()(eps),
                        *curve.population_at(ws.Threat(INF, order, eps)),
                    )
                    holds += [
                        sides[0] <= true,
                        sides[1] >= true,
                        sides[2] <= true,
                        sides[3] >= true,
                    ]
                shares = " | ".join(f"{100 * share:.1f}" for share in holds / REPETITIONS)
                who = "two, 0.2 to 0.7" if grouped else "none"
                print(f"| {kappa:g} | {alpha:g} | {who} | {order:g} | {shares} |", flush=True)


def main() -> None:
    """Print the page."""
    warnings.filterwarnings("ignore")
    print("# Other people and labels: beside other libraries, and coverage\n")
    print("Command: `python benchmarks/others.py`.\n")
    print("## Linear models\n")
    print("Logistic regression with a label cost, order 1, on R^n: what a library finds for the")
    print("model that it fits, and the upper side of `ws.loss_curve(..., label_cost=)` for that")
    print("model. Largest difference, relative to the larger one of the value and 1.\n")
    print("| library | settings | largest difference |\n|---|---|---|")
    compared("dro", with_dro, (1.0, 2.0, INF), (INF, 0.5, 2.0))
    compared("skwdro", with_skwdro, (2.0,), (0.5, 2.0, 1000.0))
    print("\n## Limits for the population\n")
    print(f"{REPETITIONS:,} repetitions of {SAMPLES} samples, in % of them: how often a limit that")
    print("promises 95 % holds. The true curve is that of 20,000 quantiles. Sampling error of a")
    print("coverage: 0.7 points (one standard deviation). One in ten samples is wrong already.\n")
    coverage()


if __name__ == "__main__":
    main()
