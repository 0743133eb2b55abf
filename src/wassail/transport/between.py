"""Which shift lies between two samples: the least eps that explains the second by the first, for
every share of people that is there (THEORY 9 and 12).

With a subpopulation of share alpha the samples after are explained at

    eps(alpha) = min { W_p(Q, after) : dQ/dbefore <= 1/alpha },

a partial transport, solved as a linear program. It falls as alpha does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.notebook import card, lines, table
from wassail.threat import (
    Number,
    check_seed,
    parse_label_cost,
    parse_norm,
    parse_order,
    parse_subpopulation,
    show,
    whole,
)

SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
MOST = 100  # samples of each side: a program has as many unknowns as there are pairs
MOST_COST = 1e100  # of a pair, in units of the least that some sample has to move
REPEATS = 19  # the largest of 19 is passed by chance once in 20


@dataclass(frozen=True)
class ShiftBetween:
    """The least eps for each share of people, beside what chance alone makes of it.

    Args:
        norm: ground norm r.
        order: Wasserstein order p.
        label_cost: price of a changed label; labels count where both sides have some.
        shares: least shares alpha, descending.
        eps: that explain the samples after, one for each share; inf where nothing does.
        baseline: the same between random halves of both samples together, medians.
        chance: how often such halves are as far apart, one for each share; small values say that
            the two samples differ.
        samples: how many of each side were looked at.
    """

    norm: float
    order: float
    label_cost: float
    shares: tuple[float, ...]
    eps: tuple[float, ...]
    baseline: tuple[float, ...]
    chance: tuple[float, ...]
    samples: tuple[int, int]

    @property
    def caution(self) -> str:
        """What these figures are not."""
        return (
            "Two independent samples of one distribution are not at distance 0: an eps near its "
            "baseline says nothing, and even one above it contains the baseline. Where samples are "
            "paired, use ws.landmarks."
        )

    def __str__(self) -> str:
        rows = [
            f"  subpopulation {share:g}: eps {show(eps)} (by chance {show(usual)}, as far in "
            f"{100 * chance:.0f} % of random halves)"
            for share, eps, usual, chance in self._rows
        ]
        head = (
            f"Shift between {self.samples[0]} and {self.samples[1]} samples, order "
            f"{self.order:g}, l{self.norm:g}:"
        )
        return "\n".join([head, *rows, self.caution])

    @property
    def _rows(self) -> list[tuple[float, float, float, float]]:
        return list(zip(self.shares, self.eps, self.baseline, self.chance))

    def _repr_html_(self) -> str:
        shown = [(f"{s:g}", show(e), show(b), f"{c:.2f}") for s, e, b, c in self._rows]
        heads = ("subpopulation", "eps", "by chance", "share of chance")
        return card("The shift between two samples", table(heads, shown), lines(self.caution))


def shift_between(
    before: Tensor | tuple[Tensor, Tensor],
    after: Tensor | tuple[Tensor, Tensor],
    norm: Number = "inf",
    order: Number = 1,
    *,
    label_cost: Number = math.inf,
    shares: Sequence[Number] = SHARES,
    most: int = MOST,
    repeats: int = REPEATS,
    seed: int = 0,
) -> ShiftBetween:
    """The least eps that explains samples by earlier ones, for each share of people that is there.

    For unpaired samples, with or without labels. What two samples of one distribution are apart is
    shown beside it, by random halves of all samples: read no eps without its baseline.

    Args:
        before: samples `(N, *shape)`, or a pair of samples and labels.
        after: samples `(M, *shape)`, or a pair of samples and labels.
        norm: ground norm r, 1, 2 or inf; default "inf".
        order: Wasserstein order p, finite; default 1.
        label_cost: price of a changed label, where both have labels; default inf: labels stay.
        shares: least shares alpha in (0, 1]; default 1, 0.95, 0.9, 0.8, 0.7 and 0.5.
        most: int, samples of each side that are drawn; default 100.
        repeats: int, random halves; default 19.
        seed: int of the draws; default 0.

    Returns:
        `ShiftBetween`.
    """
    r, p = parse_norm(norm), parse_order(order)
    if p == math.inf:
        raise InputError(
            "the order is inf: give a finite one, for example 1, for unpaired samples."
        )
    price = parse_label_cost(label_cost)
    asked = sorted({parse_subpopulation(share) for share in shares}, reverse=True)
    if not asked:
        raise InputError("there are no shares: give some in (0, 1], for example [1, 0.8].")
    check_seed(seed)
    rng = np.random.default_rng(seed)
    first, labels = _drawn(before, whole(most, "most"), rng, "before")
    second, others = _drawn(after, most, rng, "after")
    if first.shape[1] != second.shape[1]:
        raise InputError(
            f"the samples have {first.shape[1]} and {second.shape[1]} numbers each: give samples "
            "of one shape."
        )
    if (labels is None) != (others is None):
        raise InputError("only one of the two has labels: give both with labels, or neither.")
    x = np.concatenate([first, second])
    y = None if labels is None or others is None else np.concatenate([labels, others])
    costs = _apart(x, y, r, price)
    size = len(first)
    here = [_least(costs[:size, size:], share, p) for share in asked]
    chance = []
    for _ in range(whole(repeats, "repeats")):
        mixed = rng.permutation(len(x))
        part = costs[np.ix_(mixed[:size], mixed[size:])]
        chance.append([_least(part, share, p) for share in asked])
    usual = np.array(chance)
    # Two infinite distances are no farther apart.
    as_far = (1 + (usual >= np.array(here) * (1 - 1e-9)).sum(0)) / (1 + len(usual))
    return ShiftBetween(
        r,
        p,
        price,
        tuple(asked),
        tuple(here),
        tuple(np.sort(usual, 0)[len(usual) // 2].tolist()),
        tuple(as_far.tolist()),
        (size, len(second)),
    )


def _drawn(
    given: Any, most: int, rng: np.random.Generator, name: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """Some of the samples as rows of numbers, and their labels."""
    labels = None
    if isinstance(given, (tuple, list)) and len(given) == 2:
        given, labels = given
    try:
        x = torch.as_tensor(given).detach().cpu().double()
        y = None if labels is None else torch.as_tensor(labels).detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"the samples {name} are no tensor: give samples (N, ...).") from None
    if x.ndim < 2 or not len(x) or not bool(torch.isfinite(x).all()):
        raise InputError(
            f"the samples {name} have shape {tuple(x.shape)}: give finite samples (N, ...), one or "
            "more."
        )
    if y is not None and y.shape != (len(x),):
        raise InputError(f"the labels {name} must be {len(x)} numbers, one for each sample.")
    chosen = np.sort(rng.permutation(len(x))[:most])
    return x.flatten(1).numpy()[chosen], None if y is None else y[chosen]


def _apart(x: np.ndarray, y: np.ndarray | None, norm: float, label_cost: float) -> np.ndarray:
    """The price of moving each sample to each other one."""
    from scipy.spatial.distance import cdist

    apart = cdist(x, x, {1.0: "cityblock", 2.0: "euclidean", math.inf: "chebyshev"}[norm])
    if y is not None:
        apart = apart + np.where(y[:, None] != y[None, :], label_cost, 0.0)
    return np.asarray(apart)


def _least(apart: np.ndarray, share: float, order: float) -> float:
    """The least eps of a plan that fills every column evenly, with no row above 1 / share of its
    own weight; inf if there is none.
    """
    unit = float(apart.min(0).max())  # a column is as far at least: its power is no underflow
    if unit == 0 or unit == math.inf:
        unit = 1.0
    with np.errstate(over="ignore"):
        powers = np.where(np.isinf(apart), math.inf, np.minimum((apart / unit) ** order, MOST_COST))
    return float(unit * _least_cost(powers, share) ** (1 / order))


def _least_cost(costs: np.ndarray, share: float) -> float:
    """The least cost of such a plan, inf if there is none."""
    from scipy.optimize import linear_sum_assignment, linprog
    from scipy.sparse import csr_array

    n, m = costs.shape
    allowed = np.isfinite(costs)
    if share == 1 and n == m and allowed.all():
        rows, columns = linear_sum_assignment(costs)
        return float(costs[rows, columns].mean())
    row, column = np.nonzero(allowed)
    if len(set(column.tolist())) < m:
        return math.inf
    place = np.arange(len(row))
    one = np.ones(len(row))
    answer = linprog(
        costs[row, column],
        A_ub=csr_array((one, (row, place)), shape=(n, len(row))),
        b_ub=np.full(n, 1 / (n * share)),
        A_eq=csr_array((one, (column, place)), shape=(m, len(row))),
        b_eq=np.full(m, 1 / m),
        method="highs",
    )
    return max(float(answer.fun), 0.0) if answer.status == 0 else math.inf
