"""Certified radii of a run, proved again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wassail.certificates.graph.reader import read
from wassail.certificates.prove.ladder import METHODS
from wassail.certificates.prove.problem import BATCH
from wassail.certificates.prove.radii import radii
from wassail.certificates.prove.record import EXACT as MET
from wassail.certificates.prove.record import Radii
from wassail.certificates.prove.verify import verify as prove
from wassail.evaluation.notes import Notes
from wassail.network import Model
from wassail.specification import Labels, labels_at
from wassail.threat import Domain, Threat, number

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

CONFIDENCE = 0.95
DRAWN = 45  # radii: where so many of any number are true, at most 6.5 % are false, at CONFIDENCE
SHARE = 0.1  # of the radii, where that is fewer
EXACT = 1e-6  # relative: an exact radius is the distance itself to 1e-9, and both are computed
PATIENCE = 60.0  # seconds for a radius that the usual work does not prove again
NEARLY = 2e-4  # the same in executed arithmetic
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


def few(run: Evaluation) -> float:
    """The share of the radii that is enough for a verification in little time: a tenth, at most
    `DRAWN`.
    """
    n = 0 if run.radii is None else int((run.radii > 0).sum())
    return min(SHARE, DRAWN / max(n, 1))


def prove_again(
    run: Evaluation, model: Model, share: float, seed: int, notes: Notes, attacked: Tensor
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
    again = _Again(run, model, attacked)
    found = [0, 0, 0]
    for part in torch.split(index, BATCH) if count else ():
        found = [a + b for a, b in zip(found, again.false(part))]
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


class _Again:
    """Radii of a run, proved and sought again. attacked: as in `prove_again`."""

    def __init__(self, run: Evaluation, model: Model, attacked: Tensor) -> None:
        self.run = run
        self.model = model
        self.graph = read(model, tuple(run.images([])[0].shape[1:]), smooth=True)
        asked = run.info.get("certify") or {}
        method = str(asked.get("method", "auto"))
        self.method = method if method in METHODS else "auto"
        # As the run was given, as far as its reader is patient; None for the usual.
        effort = asked.get("effort")
        self.effort = None if effort is None else min(number(effort, "effort"), PATIENCE)
        # A search begins where that of the run did, which moves what it finds by rounding.
        # Where a gap was closed, attacks and proofs took turns.
        self.upper = attacked if asked.get("gap") is None else run.distances
        self.executed = run.certificate.get("arithmetic") == "executed"
        self.arithmetic = "executed" if self.executed else "exact"

    def false(self, index: Tensor) -> tuple[int, int, int]:
        """How many radii of some samples are not proved; how many of the others are called exact
        and are not, and how many of those cannot be shown to be.
        """
        assert self.run.radii is not None and self.run.exact is not None
        stated = self.run.radii[index]
        exact = self.run.exact[index]
        distances = self.run.distances[index]
        # Between a radius that is proved and a flip that was looked at, no search finds anything
        # else.
        same = NEARLY if self.executed else EXACT
        search = (exact & (stated < distances * (1 - same))) | torch.isinf(stated)
        bad = torch.zeros(len(index), dtype=torch.bool)
        bad[~search] = ~self._proved(index[~search])
        rows = search.nonzero()[:, 0]
        if not len(rows):
            return int(bad.sum()), 0, 0
        found = self._sought(index[rows])
        claimed = stated[rows]
        short = found.values < claimed
        # What a search reaches is proved; it may stop a little below the distance.
        open_ = (short & torch.isfinite(claimed)).nonzero()[:, 0]
        short[open_] = ~self._proved(index[rows[open_]])
        bad[rows] = short
        near = (found.values - claimed).abs() <= same * claimed
        near |= torch.isinf(found.values) & torch.isinf(claimed)
        # Where no search finds the distance: proved, with a flip that was looked at near enough.
        met = (claimed >= distances[rows] * (1 - MET) * (1 - 1e-9)) & self.executed
        vague = exact[rows] & ~bad[rows] & ~torch.where(found.exact, near, met)
        return int(bad.sum()), int((vague & found.exact).sum()), int((vague & ~found.exact).sum())

    def _proved(self, index: Tensor) -> Tensor:
        """Which radii are proved, bool `(n,)`: any proof will do, the cheapest is tried first."""
        ways: list[tuple[str, dict[str, Any]]] = [("crown", {}), ("branch", {"effort": QUICK})]
        if self.effort is not None:
            ways.append((self.method, {"effort": self.effort}))
        ways += [(way, {}) for way in dict.fromkeys((self.method, "auto"))]
        left = torch.arange(len(index))
        for way, budget in ways:
            if len(left):
                left = left[~self._by(way, index[left], **budget)]
        if len(left) and self.method == "branch":  # a search may have taken more than usual
            left = left[~self._by("branch", index[left], time_limit=PATIENCE * len(left))]
        return torch.ones(len(index), dtype=torch.bool).index_fill(0, left, False)

    def _by(self, way: str, index: Tensor, **budget: Any) -> Tensor:
        """Which radii one method proves, bool `(n,)`."""
        assert self.run.radii is not None
        x, y, domain = self._samples(index)
        stated = self.run.radii[index]
        ball = Threat(self.run.threat.norm, math.inf, float(stated.max()), domain)
        kept = {"arithmetic": self.arithmetic, "at": stated, **budget}
        return prove(self.graph, x, y, ball, way, **kept).proved

    def _sought(self, index: Tensor) -> Radii:
        """Radii as the run sought them."""
        x, y, domain = self._samples(index)
        norm, upper = self.run.threat.norm, self.upper[index]
        kept: dict[str, Any] = {"arithmetic": self.arithmetic, "effort": self.effort}
        return radii(self.graph, x, y, norm, domain, self.method, upper=upper, **kept)

    def _samples(self, index: Tensor) -> tuple[Tensor, Labels, Domain]:
        """Samples, what is right for them, and where they may move."""
        x, _ = self.run.images(index.tolist())
        return x, labels_at(self.run.right, index), self.run.inside(self.model, index, x)
