"""Do the limits for the population hold as often as they say? By simulation, and on the digits.

    python benchmarks/population.py > docs/population.md

Five distributions of the distance, N = 50, 500 and 5,000, orders 1, 2 and inf, 10,000 repetitions
each. The exact error is known: each distribution is a list of 4,001 atoms.
"""

import math

import numpy as np
import torch

import wassail as ws
from wassail.transport import confidence as limits
from wassail.transport.bootstrap import interval

INF = math.inf
ALPHA = 0.05
REPETITIONS = 10_000
SIZES = (50, 500, 5_000)
SPLITS = 200
PILOT = 100  # other samples that choose the price of the certified limit for one threat
WIDTH_ROWS = 5  # repetitions of a block whose attacked limits for one threat are computed in full
EPS = {1.0: 0.1, 2.0: 0.25, INF: 0.45}


def distributions() -> dict[str, np.ndarray]:
    """Equally likely distances, ascending."""
    grid = (np.arange(4_001) + 0.5) / 4_001
    smooth = -np.log(1 - grid)
    return {
        "exponential": smooth,
        "15 % wrong, 20 % never": np.where(
            grid < 0.15, 0.0, np.where(grid > 0.8, INF, 0.2 + smooth)
        ),
        "ties on a grid of 0.25": np.round(4 * smooth) / 4,
        "two values": np.where(grid < 0.3, 0.5, 1.5),
        "heavy tail": (1 - grid) ** -1.5 - 1,
    }


def errors(sorted_: np.ndarray, mass: np.ndarray, eps: float, order: float) -> np.ndarray:
    """The knapsack for each row of ascending distances `(R, N)`; mass: of each column, `(N,)`."""
    if order == INF:
        return ((sorted_ <= eps) * mass).sum(1)
    price = np.minimum((sorted_ / eps) ** order, 1e12)
    paid = np.cumsum(mass * price, 1)
    full = (paid <= 1).sum(1)
    bought = np.append(0.0, np.cumsum(mass))[full]
    at = np.minimum(full, len(mass) - 1)
    rows = np.arange(len(sorted_))
    spent = np.where(full > 0, paid[rows, np.maximum(full - 1, 0)], 0.0)
    part = np.where(full < len(mass), (1 - spent) / price[rows, at], 0.0)
    return np.minimum(bought + part, 1.0)


def banded(sorted_: np.ndarray, shift: float, eps: float, order: float, up: bool) -> np.ndarray:
    """The knapsack after moving mass `shift` from the largest to 0 (up), or the nearest to inf."""
    n = sorted_.shape[1]
    if up:
        mass = np.append(shift, np.clip(1 - shift - np.arange(n) / n, 0, 1 / n))
        moved = np.concatenate([np.zeros((len(sorted_), 1)), sorted_], 1)
        return errors(moved, mass, eps, order)
    mass = np.append(np.clip((np.arange(n) + 1) / n - shift, 0, 1 / n), shift)
    moved = np.concatenate([sorted_, np.full((len(sorted_), 1), INF)], 1)
    return errors(moved, mass, eps, order)


def everywhere(sorted_: np.ndarray, atoms: np.ndarray, shift: float) -> int:
    """In how many rows the true distribution function is within the band, at every distance."""
    n = sorted_.shape[1]
    before = np.searchsorted(atoms, sorted_, side="left") / len(atoms)
    gap = (before - np.arange(n) / n).max(1)  # just before each sample, where it is largest
    last = np.isfinite(atoms).mean() - np.isfinite(sorted_).mean(1)
    return int((np.maximum(gap, last) <= shift).sum())


def one_threat(drawn: np.ndarray, others: np.ndarray, eps: float, order: float) -> np.ndarray:
    """`error_at_most` of each row of samples, at the price of its row of other samples, `(R,)`."""
    n = drawn.shape[1]
    if order == INF:
        hits = (drawn < eps).sum(1)
        table = np.array([limits.proportion_at_most(k, n, 1 - ALPHA) for k in range(n + 1)])
        return table[hits]
    prices = np.array([limits.price_of(row, eps, order) for row in others])
    worth = np.maximum(1 - (drawn / prices[:, None]) ** order, 0.0).sum(1)
    mean = limits.mean_at_most(worth, n, ALPHA)
    return np.minimum((eps / prices) ** order + mean, 1.0)


def one_threat_attacked(
    drawn: np.ndarray, atoms: np.ndarray, eps: float, order: float, truth: float
) -> tuple[int, float]:
    """In how many rows `error_at_least` is at most the truth, and its mean distance to the error.

    The limit is the least over all prices, so a row is covered if it is at the best price of the
    truth; the others, and the first `WIDTH_ROWS`, are computed in full. Below `FEWEST` samples it
    is the band.
    """
    n = drawn.shape[1]
    even = np.full(n, 1 / n)
    if order == INF:
        hits = (drawn > eps).sum(1)
        table = 1 - np.array([limits.proportion_at_most(k, n, 1 - ALPHA) for k in range(n + 1)])
        low = table[hits]
        mean = (drawn <= eps).mean(1)
        return int((low <= truth + 1e-9).sum()), float((mean - low).mean())
    if n < limits.FEWEST:
        ascending = np.sort(drawn, 1)
        low = banded(ascending, limits.kolmogorov(n, 1 - ALPHA), eps, order, False)
        mean = errors(ascending, even, eps, order)
        return int((low <= truth + 1e-9).sum()), float((mean - low).mean())
    ends = eps * limits.RATIO ** np.arange(930)
    worth = np.array([limits.bought(atoms, price, order).mean() for price in ends])
    best = int(((eps / ends) ** order + worth).argmin())
    total = np.maximum(1 - (drawn / ends[best]) ** order, 0.0).sum(1)
    there = (eps / ends[best + 1]) ** order + limits.mean_at_least(total, n, ALPHA)
    covered = there <= truth
    found = {}
    first = range(min(WIDTH_ROWS, len(drawn)))
    for row in {*np.flatnonzero(~covered).tolist(), *first}:
        found[row] = limits.error_at_least(drawn[row], eps, order, ALPHA)
        covered[row] = found[row] <= truth + 1e-9
    mean = errors(np.sort(drawn[: len(first)], 1), even, eps, order)
    return int(covered.sum()), float(np.mean([mean[row] - found[row] for row in first]))


def attacked_alone(atoms: np.ndarray, n: int, seed: int) -> dict[float, np.ndarray]:
    """Coverage and width of the attacked side of `population_at`, in %, for each order."""
    rng = np.random.default_rng([seed, n])
    mass = np.full(len(atoms), 1 / len(atoms))
    truth = {order: float(errors(atoms[None], mass, eps, order)[0]) for order, eps in EPS.items()}
    found = {order: np.zeros(2) for order in EPS}
    block = max(1, 1_000_000 // n)
    for start in range(0, REPETITIONS, block):
        rows = min(block, REPETITIONS - start)
        drawn = atoms[rng.integers(0, len(atoms), (rows, n))]
        for order, eps in EPS.items():
            held, width = one_threat_attacked(drawn, atoms, eps, order, truth[order])
            found[order] += [held, rows * width]
    return {order: 100 * sums / REPETITIONS for order, sums in found.items()}


def simulate(atoms: np.ndarray, n: int, rng: np.random.Generator, seed: int) -> list[str]:
    """The lines of the table for one distribution and one N: the orders share their samples."""
    attacked = attacked_alone(atoms, n, seed)
    shift = limits.kolmogorov(n, 1 - ALPHA)
    even = np.full(n, 1 / n)
    covered = {order: np.zeros(3) for order in EPS}
    width = {order: np.zeros(3) for order in EPS}
    mass = np.full(len(atoms), 1 / len(atoms))
    truth = {order: float(errors(atoms[None], mass, eps, order)[0]) for order, eps in EPS.items()}
    block = max(1, 1_000_000 // n)
    held_all = 0
    for start in range(0, REPETITIONS, block):
        rows = min(block, REPETITIONS - start)
        drawn = atoms[rng.integers(0, len(atoms), (rows, n))]
        others = atoms[rng.integers(0, len(atoms), (rows, PILOT))]
        sorted_ = np.sort(drawn, 1)
        held_all += everywhere(sorted_, atoms, shift)
        for order, eps in EPS.items():
            mean = errors(sorted_, even, eps, order)
            high = banded(sorted_, shift, eps, order, True)
            low = banded(sorted_, shift, eps, order, False)
            sharp = one_threat(drawn, others, eps, order)
            held = (high >= truth[order] - 1e-9, low <= truth[order] + 1e-9)
            covered[order] += [*(h.sum() for h in held), (sharp >= truth[order] - 1e-9).sum()]
            width[order] += [(high - mean).sum(), (mean - low).sum(), (sharp - mean).sum()]
    lines = []
    closed = math.sqrt(math.log(1 / ALPHA) / (2 * n))
    for order, eps in EPS.items():
        share = 100 * covered[order] / REPETITIONS
        points = 100 * width[order] / REPETITIONS
        boot = bootstrap(atoms, n, order, eps, truth[order], rng)
        lines.append(
            f"{order:g} | {100 * truth[order]:.1f} | {100 * held_all / REPETITIONS:.2f} | "
            f"{share[0]:.2f} | {share[1]:.2f} | "
            f"{share[2]:.2f} | {attacked[order][0]:.2f} | {100 * boot[0]:.1f} | {points[0]:.2f} | "
            f"{points[2]:.2f} | {attacked[order][1]:.2f} | {100 * boot[1]:.2f} | "
            f"{100 * closed:.2f} |"
        )
    return lines


def bootstrap(
    atoms: np.ndarray, n: int, order: float, eps: float, truth: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Coverage and width of the upper end of a 90 % bootstrap interval: 95 % are promised."""
    threat = ws.Threat(2, order, eps, None)
    rounds = 60 if n < 5_000 else 20
    covered = 0
    width = 0.0
    for _ in range(rounds):
        drawn = torch.from_numpy(atoms[rng.integers(0, len(atoms), n)])
        low, _ = interval(None, drawn == 0, drawn, threat, level=0.9, resamples=200)
        covered += 1 - low >= truth - 1e-9
        now = errors(drawn.sort().values[None].numpy(), np.full(n, 1 / n), eps, order)[0]
        width += 1 - low - now
    return covered / rounds, width / rounds


def digits() -> None:
    print("\n## Half of the digits against the other half\n")
    x, y = ws.zoo.data("digits")
    model = ws.zoo.load("digits-cnn-adv")
    radii = ws.radii(model, x, y, INF, method="crown").values
    n = len(x) // 2
    generator = torch.Generator().manual_seed(0)
    below = {0.95: np.zeros(2), 0.9975: np.zeros(2)}
    grid = torch.linspace(0, 0.2, 81).tolist()
    for _ in range(SPLITS):
        places = torch.randperm(len(x), generator=generator)
        halves = []
        for part in (radii[places[:n]], radii[places[n : 2 * n]]):
            mu = torch.full((n,), 1 / n, dtype=torch.float64)
            halves.append(ws.RiskCurve(torch.full_like(part, INF), part, mu, 1.0))
        there = [halves[1](eps)[0] for eps in grid]
        for confidence, count in below.items():
            here = halves[0].population(confidence)
            gaps = [here(eps)[0] - other for eps, other in zip(grid, there)]
            count += [max(gaps) <= 0, gaps[20] <= 0]
    print(
        f"`digits-cnn-adv`, linf, order 1, radii by `crown`, {len(x)} test images, {SPLITS} random "
        f"splits into two halves of {n}. In how many of the splits does the certified curve of the "
        "population, made from one half, lie below the certified curve of the other half?\n"
    )
    print("| confidence | everywhere on [0, 0.2] | at eps 0.05 |")
    print("|---|---|---|")
    for confidence, count in below.items():
        print(
            f"| {confidence} | {100 * count[0] / SPLITS:.1f} % | {100 * count[1] / SPLITS:.1f} % |"
        )
    print(
        "\nThe other half is a sample too, with a deviation of its own that no statement about the "
        "population counts. Against a curve that deviates as much again, 95 % everywhere need a "
        "band that is wider by the square root of 2, which is the confidence 0.9975 "
        "(`1 - 0.05^2`)."
    )


def main() -> None:
    print("# Coverage of the limits for the population\n")
    print(
        f"Command: `python benchmarks/population.py`. {REPETITIONS:,} repetitions a line, seed 0. "
        "Each limit promises 95 %; the sampling error of a coverage is 0.22 points (one standard "
        "deviation). `all eps`: the band of `RiskCurve.population` holds at every eps "
        "at once. `band`: its certified and its attacked side at eps 0.1, 0.25 and 0.45 (orders 1, "
        "2 and inf). `one`: "
        f"the certified side of `population_at` with a pilot of {PILOT} other samples (without one "
        "it is the band, at finite orders), and the attacked side (the band below 250 samples at "
        "finite orders). "
        "`boot`: the upper end of a 90 % bootstrap interval, 60 repetitions (20 at N = 5,000). "
        "Widths: how far a limit lies from the error of the samples, mean, in points; `closed`: "
        "the closed bound `sqrt(log(20) / (2N))`.\n"
    )
    print(
        "| distance | N | p | error % | all eps | band cert. | band att. | one cert. | one att. | "
        "boot | width band | one cert. | one att. | boot | closed |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for seed, (name, atoms) in enumerate(distributions().items()):
        for n in SIZES:
            for line in simulate(atoms, n, rng, seed):
                print(f"| {name} | {n:,} | {line}", flush=True)
    digits()


if __name__ == "__main__":
    main()
