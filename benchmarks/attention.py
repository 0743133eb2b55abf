"""The bounds on attention beside the truth and beside Castin's constant: prints docs/attention.md.

    python benchmarks/attention.py [--seeds 50]

Tokens, heads and values are drawn from a generator seeded by the cell and the seed, nothing else.
"""

import argparse
import math
import time

import torch
from torch import Tensor

from wassail.paper import attention as truth
from wassail.paper import attention_bounds as attention

TOKENS = (16, 64, 197)
WIDTHS = (16, 64)
STEEP = (0.1, 1.0, 10.0)
KINDS = {
    "even": "independent normal entries",
    "clustered": "one of four centres plus 0.3 times normal entries",
}


def draw(kind: str, n: int, d: int, steep: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Layer-normed tokens on the unit sphere, `A = K^T Q` scaled to `|A| R^2 = steep`, a normal
    value matrix.
    """
    generator = torch.Generator().manual_seed(1000 * seed + 10 * n + d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x = normal(n, d)
    if kind == "clustered":
        x = 0.3 * x + normal(4, d)[torch.randint(4, (n,), generator=generator)]
    x = x - x.mean(1, keepdim=True)
    a = normal(d, d).T @ normal(d, d)
    return (
        x / x.norm(dim=1, keepdim=True),
        a * steep / torch.linalg.matrix_norm(a, 2),
        normal(d, d) / math.sqrt(d),
    )


def theory_local(x: Tensor, a: Tensor, v: Tensor) -> float:
    """`|V| (|P| + max_i |S_i A| + (sum_i |A x_i|^2 sum_j P_ij^2 |x_j - m_i|^2)^(1/2))`."""
    at = attention._State.make(x, a, None, None)
    third = (
        (at.y.square().sum(1) * (at.p[..., None] * at.deviation).square().sum((1, 2))).sum().sqrt()
    )
    return float(
        torch.linalg.matrix_norm(v, 2) * (torch.linalg.matrix_norm(at.p, 2) + third)
    ) + float(torch.linalg.matrix_norm(v, 2) * torch.linalg.matrix_norm(at.covariance @ a, 2).max())


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def local(seeds: int) -> None:
    """The local bound against the true local norm."""
    print(
        "| tokens drawn | n | d | `|A| R^2` | ours: mean | ours: worst | simple sum: mean | "
        "seconds for one input |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        everything: list[float] = []
        formula: list[float] = []
        for n in TOKENS:
            for d in WIDTHS:
                for steep in STEEP:
                    ours = []
                    theirs = []
                    spent = 0.0
                    for seed in range(seeds):
                        x, a, v = draw(kind, n, d, steep, seed)
                        exact = truth.jacobian_norm(
                            lambda t, a=a, v=v: truth.attend(t, a, v), x, 1000
                        )
                        start = time.perf_counter()
                        bound = float(attention.local_bound(x, a, v))
                        spent += time.perf_counter() - start
                        assert bound >= exact * (1 - 1e-9), "a bound below the truth"
                        ours.append(bound / exact)
                        theirs.append(theory_local(x, a, v) / exact)
                    row = (
                        f"{mean(ours):.3f} | {max(ours):.3f} | {mean(theirs):.3f} | "
                        f"{spent / seeds:.3f}"
                    )
                    print(f"| {kind} | {n} | {d} | {steep:g} | {row} |", flush=True)
                    everything += ours
                    formula += theirs
        total = f"**{mean(everything):.3f}** | {max(everything):.3f} | {mean(formula):.3f}"
        print(f"| **{kind}, all {len(everything)}** | | | | {total} | |", flush=True)


def ratio() -> None:
    """Castin's constant over ours on a ball, least and most over `|A| R^2` from 1e-6 to 1e6."""
    v = torch.ones(1, 1, dtype=torch.float64)
    print(
        "| n | Castin / simple: least | most | Castin / ours: least | at 0.1 | at 1 | at 10 | "
        "most |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for n in (1, 4, 16, 64, 197, 300):
        theory = {}
        ours = {}
        for k in range(-60, 61):
            steep = 10.0 ** (k / 10)
            castin = truth.castin(n, steep * v, v, 1.0)
            theory[k] = castin / (math.sqrt(n) + (math.sqrt(n) + 1) * steep)
            ours[k] = castin / attention.global_bound(n, steep * v, v, 1.0)
        numbers = (
            min(theory.values()),
            max(theory.values()),
            min(ours.values()),
            ours[-10],
            ours[0],
            ours[10],
            max(ours.values()),
        )
        print(f"| {n} | " + " | ".join(f"{t:.3f}" for t in numbers) + " |")


def attained(seeds: int) -> None:
    """Ascent on the Jacobian's norm over the ball, beside the global bounds."""
    print("| n | d | `|A| R^2` | ours / steepest point found | Castin / steepest point found |")
    print("|---|---|---|---|---|")
    for n, d in ((4, 4), (16, 16)):
        for steep in (0.1, 1.0, 10.0, 100.0):
            ours = []
            theirs = []
            for seed in range(seeds):
                x, a, v = draw("even", n, d, steep, seed)
                found, _ = truth.steepest(
                    lambda t, a=a, v=v: truth.attend(t, a, v),
                    x,
                    lambda t: t / t.norm(dim=1, keepdim=True).clamp(min=1),
                    100,
                )
                ours.append(attention.global_bound(n, a, v, 1.0) / found)
                theirs.append(truth.castin(n, a, v, 1.0) / found)
            print(f"| {n} | {d} | {steep:g} | {mean(ours):.2f} | {mean(theirs):.2f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print(f"""# How steep attention is

Command: `python benchmarks/attention.py`, one CPU thread, {seeds} seeds for each cell.

## At one input

`local_bound` over the true spectral norm of the Jacobian (power iteration to 1e-9), geometric mean
and worst. Tokens are drawn as a LayerNorm gives them: {KINDS["even"]} ("even"), or
{KINDS["clustered"]} ("clustered"), centred and scaled to length `R = 1`. `A = K^T Q` and `V` have
normal entries, `A` is scaled to the `|A| R^2` of the row. Beside it the sum of three norms that is
easiest to prove, `|V| (|P| + max_i |S_i A| + (sum_i |A x_i|^2 sum_j P_ij^2 |x_j - m_i|^2)^(1/2))`.
""")
    local(seeds)
    print("""
## On a ball

The constant of Castin, Ablin, Peyre (2024), Theorem 3.3, over the simple bound `|V| (sqrt(n) +
(sqrt(n) + 1) |A| R^2)`, and over `global_bound`, for `|A| R^2` from 1e-6 to 1e6.
""")
    ratio()
    print("""
What is left of the gap: bounds on the ball over the steepest point that gradient ascent found in it
(five seeds, 100 steps).
""")
    attained(5)
