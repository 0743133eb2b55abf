"""Certified radii of a run, proved again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.prove.ladder import METHODS
from wassail.certificates.prove.problem import BATCH
from wassail.certificates.prove.radii import radii
from wassail.certificates.prove.record import EXACT as MET
from wassail.certificates.prove.verify import verify as prove
from wassail.evaluation.notes import Notes
from wassail.evaluation.result import Outcome
from wassail.network import Model
from wassail.specification import labels_at
from wassail.threat import Threat, box_at, number

CONFIDENCE = 0.95
DRAWN = 45  # radii: where so many of any number are true, at most 6.5 % are false, at CONFIDENCE
SHARE = 0.1  # of the radii, where that is fewer
EXACT = 1e-6  # relative: an exact radius is the distance itself to 1e-9, and both are computed
PATIENCE = 60.0  # seconds for a radius that the usual work does not prove again
NEARLY = 2e-4  # the same in executed arithmetic
# Relative: an executed radius is exact where a flip is at most so much farther away (see `Radii`),
# and points are rounded to float32.
CLOSED = 1.0005 * MET
QUICK = 0.05  # seconds of work of the first branching: it proves most at a fraction of the price


def most_false(n: int, k: int) -> int:
    """How many of n may be false when k of them, drawn at random, were all true: the largest number
    that is still likely.

    With F false ones a draw of k holds none of them with probability C(n - F, k) / C(n, k)
    (hypergeometric). The answer is the largest F for which that is at least 1 - CONFIDENCE: more
    are ruled out.
    """
    low = 0
    high = n - k
    while low < high:
        middle = (low + high + 1) // 2
        likely = float(np.log1p(-middle / (n - np.arange(k, dtype=np.float64))).sum()) if k else 0.0
        low, high = (
            (middle, high) if likely >= math.log(1 - CONFIDENCE) - 1e-12 else (low, middle - 1)
        )
    return low


def few(run: Outcome) -> float:
    """The share of the radii that is enough for a verification in little time: a tenth, at most
    `DRAWN`.
    """
    n = 0 if run.radii is None else int((run.radii > 0).sum())
    return min(SHARE, DRAWN / max(n, 1))


def prove_again(
    run: Outcome, model: Model, share: float, seed: int, notes: Notes, attacked: Tensor
) -> None:
    """Some certified radii of a run, drawn at random, proved again. attacked: distances of the
    flips that were known before the radii were sought, `(N,)`.
    """
    assert run.radii is not None
    claimed = (run.radii > 0).nonzero()[:, 0]
    wrong = int(((run.radii > 0) & (run.predicted != run.y)).sum())
    if wrong:
        notes.problems.append(f"{wrong} radii are above 0 where the sample is wrong already.")
    n = len(claimed)
    if share == 0:
        notes.unchecked.append(
            f"{n} certified radii: none was proved again (radii=True, or a share of them; --radii)."
        )
        return
    count = min(math.ceil(share * n - 1e-9), n)
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:count])
    index = claimed[torch.from_numpy(chosen)]
    method = str((run.info.get("certify") or {}).get("method", "auto"))
    method = method if method in METHODS else "auto"
    graph = read(model, tuple(run.images([])[0].shape[1:]), smooth=True)
    found = [0, 0, 0]
    for part in torch.split(index, BATCH) if count else ():
        new = _unproved(run, model, graph, part, method, attacked[part])
        found = [a + b for a, b in zip(found, new)]
    words = (
        "could not be proved again",
        "are called exact and are not the distance",
        "are called exact, and that could not be shown again",
    )
    false = [f"{k} of {count} radii {text}." for k, text in zip(found, words) if k]
    notes.problems += false
    if count == n:
        notes.cover("radii", "exact")
    if false:
        return
    if count == n:
        notes.checked.append(f"all {n} radii above 0 were proved again.")
        return
    most = most_false(n, count)
    notes.checked.append(
        f"{count} of {n} radii above 0, drawn at random, were proved again: at "
        f"{100 * CONFIDENCE:g} % confidence at most {most} of {n} are false."
    )
    notes.unchecked.append(f"the other {n - count} radii.")


def _unproved(
    run: Outcome, model: Model, graph: Graph, index: Tensor, method: str, attacked: Tensor
) -> tuple[int, int, int]:
    """How many radii of some samples are not proved; how many of the others are called exact and
    are not, and how many of those cannot be shown to be. attacked: as in `prove_again`, `(n,)`.
    """
    assert run.radii is not None and run.exact is not None
    x, _ = run.images(index.tolist())
    y = labels_at(run.right, index)
    stated = run.radii[index]
    exact = run.exact[index]
    threat = replace(run.threat, domain=run.inside(model, index, x))
    arithmetic = "executed" if run.certificate.get("arithmetic") == "executed" else "exact"
    # Between a radius that is proved and a flip that was looked at, no search finds anything else.
    if arithmetic == "exact":
        closed = stated >= run.distances[index] * (1 - EXACT)
    else:
        closed = run.distances[index] <= stated * (1 + CLOSED)
    search = ((exact & ~closed) | torch.isinf(stated)).nonzero()[:, 0]
    bad = torch.zeros(len(index), dtype=torch.bool)
    simple = torch.isfinite(stated) & (~exact | closed if arithmetic == "exact" else True)
    left = simple.nonzero()[:, 0]

    def proved(rows: Tensor, way: str, **budget: Any) -> Tensor:
        """Which radii one method proves."""
        ball = Threat(threat.norm, math.inf, float(stated[rows].max()), box_at(threat.domain, rows))
        given = (graph, x[rows], labels_at(y, rows), ball, way)
        return prove(*given, arithmetic=arithmetic, at=stated[rows], **budget).proved

    # Any proof will do, so the cheapest way is tried first.
    own = _effort(run)
    ways: list[tuple[str, dict[str, Any]]] = [("crown", {}), ("branch", {"effort": QUICK})]
    ways += [(method, {} if own is None else {"effort": own})]
    ways += [(way, {}) for way in dict.fromkeys((method, "auto"))]
    if method == "branch":  # a search may have taken more than the usual work
        ways.append(("branch", {"time_limit": PATIENCE * len(left)}))
    for way, budget in ways:
        if len(left):
            left = left[~proved(left, way, **budget)]
    bad[left] = True
    if not len(search):
        return int(bad.sum()), 0, 0
    # As the run sought them: where a search begins moves what it finds in executed arithmetic.
    closing = (run.info.get("certify") or {}).get("gap") is not None
    upper = run.distances[index] if closing else attacked
    found = radii(
        graph,
        x[search],
        labels_at(y, search),
        threat.norm,
        box_at(threat.domain, search),
        method,
        arithmetic=arithmetic,
        upper=upper[search],
        effort=own,
    )
    claimed = stated[search]
    short = (found.values < claimed) & ((arithmetic == "exact") | torch.isinf(claimed))
    # The search stops a little below the distance.
    near_miss = (short & torch.isfinite(claimed)).nonzero()[:, 0]
    if len(near_miss):
        short[near_miss] = ~proved(search[near_miss], method)
    bad[search] |= short
    same = EXACT if arithmetic == "exact" else NEARLY
    near = (found.values - claimed).abs() <= same * claimed
    near |= torch.isinf(found.values) & torch.isinf(claimed)
    known = torch.where(found.exact, near, _met(claimed, run.distances[index][search], arithmetic))
    vague = exact[search] & ~bad[search] & ~known
    return int(bad.sum()), int((vague & found.exact).sum()), int((vague & ~found.exact).sum())


def _effort(run: Outcome) -> float | None:
    """The effort that the run was given, as far as its reader is patient; None for the usual."""
    stated = (run.info.get("certify") or {}).get("effort")
    return None if stated is None else min(number(stated, "effort"), PATIENCE)


def _met(claimed: Tensor, distances: Tensor, arithmetic: str) -> Tensor:
    """Which radii are exact where no search finds the distance: executed ones, proved, with a flip,
    which was looked at, near enough.
    """
    near = claimed >= distances * (1 - MET) * (1 - 1e-9)
    return near & (arithmetic == "executed")
