"""The rungs of the ladder: balls, quadratic bounds and branching, each on the sweep of an attempt.

A new one is a class here and a line in `ladder.levels_of`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.certificates.prove.problem import Problem
from wassail.certificates.relax.ball_margins import BallEffort, raised_margins
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.quadratic import CUBE, proved_samples
from wassail.certificates.search.leaves import Forest, Leaves
from wassail.certificates.search.margins import (
    ASCENT_STEPS,
    WIDTH,
    Decided,
    branch_leaves,
    branch_shared,
    mixes,
)
from wassail.certificates.search.workers import Pool

if TYPE_CHECKING:
    from wassail.certificates.prove.ladder import Attempt

BATCH = 16  # samples in one sweep; a sweep holds every node's values and spans for each
SMALL_BATCH = 64  # the same on a small network, where overhead is most of the time
ROW_PASSES = 0.2  # that a coefficient vector of a sweep takes: most end halfway
DOMAIN_PASSES = ASCENT_STEPS  # that a domain takes: its steps are in float32, and share a batch
SMOOTH_DOMAIN = 4e6  # operations of a domain with smooth neurons, beside its passes
BALL_PASSES = 60 * 3 * 8  # of the least effort with balls
BALL_GROWTH = 6  # times as many with each effort after it
LEAST_DOMAINS = 48  # of the least effort
MOST_DOMAINS = 12288  # of the largest effort
LEAST_SHARE = 0.125  # of a step, which more domains must be expected to bring
HOPE = 1.5  # times as fast as they did, bounds may rise
RIVALS = 4  # that a sample has open, before one was tried
SLOPE_STEPS = 10  # on the slopes of inner bounds, before branching with many domains
SLOPE_SWEEPS = 13  # sweeps that these steps cost


@dataclass(frozen=True)
class BallRung:
    """Bounds that know how far all neurons of a layer move at once (THEORY 7).

    Args:
        effort: what may be spent.
        level: how many efforts come before it.
    """

    effort: BallEffort
    level: int
    name = "ball"

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        return float(problem.unit * BALL_PASSES * BALL_GROWTH**self.level)

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Raise the margins of the samples that can pay."""
        left = left[self.price(attempt.problem) <= purse]
        if not len(left) or attempt.lengths is None:
            return
        problem = attempt.problem
        # Margins above 0 are not raised: those of samples that are not tried are hidden.
        asked = torch.ones_like(attempt.lower)
        asked[left] = attempt.lower[left]
        lower, passes = raised_margins(
            attempt.sweep, attempt.lengths, problem.y, asked.to(problem.x.device), self.effort
        )
        attempt.lower[left] = lower.cpu()[left]
        attempt.note(left, attempt.least[left] > 0, self.name)
        attempt.spend(left, passes.cpu()[left] * problem.unit)


@dataclass(frozen=True)
class QuadraticRung:
    """Quadratic bounds, the dual of a semidefinite relaxation, for each sample on its own.

    Args:
        steps: for each rival.
    """

    steps: int
    name = "quadratic"

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        variables = problem.graph.inputs + unstable_share(problem.graph)
        return float(self.steps / 3 * RIVALS * CUBE * variables**3)

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Try the samples that can pay."""
        left = left[self.price(attempt.problem) <= purse]
        rows = left.tolist()
        known = (attempt.problem.labels, attempt.lower, self.steps, attempt.provers)
        found, work = proved_samples(attempt.sweep, rows, *known)
        attempt.note(left, torch.tensor(found, dtype=torch.bool), self.name)
        attempt.spend(left, torch.tensor(work, dtype=torch.float64))


@dataclass(frozen=True)
class BranchRung:
    """Branch and bound on unstable neurons, going on from the leaves that were left.

    Args:
        count: domains of a sample, more where its linear bounds were dear.
        slopes: whether inner bounds get better slopes first.
    """

    count: int
    slopes: bool
    name = "branch"

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        work = self.count * domain_price(problem)
        if self.slopes:
            rows = ROW_PASSES * unstable_share(problem.graph)
            work += SLOPE_SWEEPS * rows * problem.unit
        return work

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Branch on the samples; one that cannot pay for all domains gets fewer."""
        each = domain_price(attempt.problem)
        swept = attempt.swept[left]
        slopes = SLOPE_SWEEPS * swept if self.slopes else torch.zeros_like(swept)
        # After a sweep the least effort is worth at least that much; balls cost far more than it.
        dear = (swept / each / LEAST_DOMAINS).clamp(min=1.0)
        count = self.count * (dear if attempt.lengths is None else torch.ones_like(dear))
        most = torch.minimum((purse - slopes) / each, count).long()
        able = most >= WIDTH
        left, most, slopes = left[able], most[able], slopes[able]
        if not len(left):
            return
        known = (attempt.sweep, attempt.lower, attempt.problem.labels, left.tolist())
        if self.slopes:
            sweep, lower = _better_slopes(attempt, left)
            known = (sweep, lower, attempt.problem.labels[left], list(range(len(left))))
            attempt.spend(left, slopes)
        # The least effort begins with a few domains, and ends there where more would not do.
        tried = most.clamp(max=LEAST_DOMAINS) if self.count == LEAST_DOMAINS else most
        self._branch(attempt, left, known, tried, purse[able])
        rest = most - tried
        more = (rest >= WIDTH) & ~attempt.proved[left] & (attempt.gain[left] > LEAST_SHARE)
        if bool(more.any()):
            places = [k for k, again in zip(known[3], more.tolist()) if again]
            self._branch(attempt, left[more], (*known[:3], places), rest[more], purse[able][more])

    def _branch(
        self,
        attempt: Attempt,
        left: Tensor,
        known: tuple[Sweep, Tensor, Tensor, list[int]],
        most: Tensor,
        purse: Tensor,
    ) -> None:
        """Branch on some samples, and note what that says of more domains.

        Args:
            attempt: with their sweep.
            left: their places in it, `(L,)`.
            known: the sweep to branch on, bounds and labels of its samples, their places there.
            most: domains of each, `(L,)`.
            purse: operations that each may take, `(L,)`.
        """
        sweep, lower, labels, places = known
        names = [attempt.names[k] for k in left.tolist()]
        found = branched(
            sweep, lower, places, labels, most.tolist(), attempt.pool, attempt.forest, names
        )
        spent = torch.tensor([one.count for one in found], dtype=torch.float64)
        attempt.domains += int(spent.sum())
        attempt.note(left, torch.tensor([one.proved for one in found]), self.name)
        each = domain_price(attempt.problem)
        attempt.spend(left, spent * each)
        deficit = -least_value(lower[places], labels[places])
        for k, one, lack, rest in zip(left.tolist(), found, deficit.tolist(), purse.tolist()):
            attempt.gain[k] = min(float(attempt.gain[k]), expected_gain(one, lack, rest / each))


def _better_slopes(attempt: Attempt, left: Tensor) -> tuple[Sweep, Tensor]:
    """A sweep of some samples with steps on the slopes of inner bounds, and their margins."""
    some = left.to(attempt.problem.x.device)
    old = attempt.sweep
    known = {j: (low[some], high[some]) for j, (low, high) in old.proved().items()}
    sweep = Sweep(old.graph, old.balls.take(some), SLOPE_STEPS, known).run()
    found = margins(sweep, attempt.problem.y[some])[0].cpu()
    return sweep, torch.maximum(attempt.lower[left], found)


def domain_price(problem: Problem) -> float:
    """Operations of one domain of branching."""
    own = SMOOTH_DOMAIN if problem.graph.smooth else 0.0
    return problem.unit * DOMAIN_PASSES + own


def unstable_share(graph: Graph) -> float:
    """Neurons of a sample that a sweep may leave unstable: half of them."""
    return 0.5 * sum(graph.nodes[j].size for j in graph.read_by_others)


def batch_of(graph: Graph) -> int:
    """Samples that are bounded at once, unless told."""
    return SMALL_BATCH if mixes(graph) else BATCH


def least_value(margin: Tensor, y: Tensor) -> Tensor:
    """The least margin over the rivals, `(N, K), (N,) -> (N,)`."""
    return margin.scatter(1, y[:, None], math.inf).amin(1)


def branched(
    sweep: Sweep,
    lower: Tensor,
    rows: list[int],
    y: Tensor,
    most: list[int],
    pool: Pool | None = None,
    forest: Forest | None = None,
    names: list[int] | None = None,
) -> list[Decided]:
    """What branching says of some samples of a sweep.

    Args:
        sweep: of the samples' balls.
        lower: bounds on their margins, `(N, K)` on the CPU.
        rows: places of the samples in the sweep.
        y: labels of all samples of the sweep, `(N,)` on the CPU.
        most: domains for each.
        pool: shares the domains of one sample; the samples come one after the other then.
        forest: what earlier proofs of the samples left; what this one leaves is kept there.
        names: of the samples in the forest.
    """
    label = [int(y[k]) for k in rows]
    rivals = [
        [j for j in range(lower.shape[1]) if j != c and not lower[k, j] > 0]
        for k, c in zip(rows, label)
    ]
    if pool is not None:
        each = zip(rows, label, rivals, most)
        return [branch_shared(sweep, k, c, j, n, pool) for k, c, j, n in each]
    known: list[Leaves | None] = [None] * len(rows)
    if forest is None or names is None:
        return branch_leaves(sweep, rows, label, rivals, most, known)
    every = sweep.balls.radius.tolist()
    radius = [every[k] for k in rows]
    known = [_leaves(forest, i, r, count) for i, r, count in zip(names, radius, most)]
    decided = branch_leaves(sweep, rows, label, rivals, most, known)
    for i, r, found in zip(names, radius, decided):
        forest.keep(i, r, found.leaves)
    return decided


def expected_gain(found: Decided, lack: float, most: float) -> float:
    """How far the radius is expected to grow by branching, as a share of the step that failed;
    infinite where nothing is known of that.

    Bounds rise about as the logarithm of the number of domains. A bound of `-lack` at the step is
    one of 0 where the step began, where linear bounds prove the sample.

    Args:
        found: by branching that failed.
        lack: how far linear bounds are below 0.
        most: domains that can be paid in all.
    """
    known = not found.proved and found.count > 1
    if not known or math.isinf(found.first) or math.isinf(found.last):
        return math.inf
    rise = max(found.last - found.first, 0.0) / math.log(found.count)
    reached = found.first + HOPE * rise * math.log(max(min(most, MOST_DOMAINS), found.count))
    return 1 + reached / lack


def _leaves(forest: Forest, name: int, radius: float, most: int) -> Leaves | None:
    """What earlier proofs of a sample left, if to bound that again leaves room for as many domains:
    else it is better to begin anew.
    """
    left = forest.within(name, radius)
    return left if left is not None and 2 * len(left.rival) <= most else None
