"""Passes that an evaluation chooses itself: `passes="auto"`.

Some correct samples are drawn at random. They are searched with 100 passes, 200, 400 and so on,
until a quarter of the passes gives nearly the same mean distance as all of them. All samples are
then searched with that many. A look at the drawn samples with twice the passes says how much is
left at least.

The draw depends on the content of the samples and on the seed, and the decision on the stored
distances of the drawn samples. So neither depends on chunks, workers, interruptions or the order of
the samples.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.attacks.convergence import (
    AT_REST,
    at_rest,
    far_from_rest,
    first_flips,
    quarter,
    shrinkage,
)
from wassail.evaluation.result import Finding
from wassail.network import sample_keys
from wassail.threat import floor_percent
from wassail.transport.confidence import proportion_at_least

DRAWN = "drawn.json"  # in a run: the samples that were drawn
COUNT = 100  # samples that are drawn
RUNGS = (100, 200, 400, 800, 1600, 3200)  # passes that may be chosen
MOST = RUNGS[-1]
# all passes that the drawn samples may be searched with
LOOKS = tuple(sorted({passes * factor // 4 for passes in RUNGS for factor in (1, 4, 8)}))
NEARER = 0.01  # a flip that is nearer by this share counts as left
CONFIDENCE = 0.95


def key_of(passes: int) -> str:
    """The folder of a run for the drawn samples with so many passes."""
    return f"passes@{passes}"


def draw(samples: Iterable[tuple[int, Tensor]], seed: int) -> list[int]:
    """Places of at most `COUNT` samples drawn at random, in ascending order.

    samples: pairs of a place and a sample; seed: keys the draw, together with the content of each
    sample.
    """

    def ranked() -> Iterable[tuple[bytes, int]]:
        for place, sample in samples:
            text = f"{seed} {sample_keys(sample[None])[0]}"
            yield hashlib.sha256(text.encode()).digest(), place

    return sorted(place for _, place in heapq.nsmallest(COUNT, ranked()))


@dataclass(frozen=True)
class Ladder:
    """What the drawn samples say so far.

    Args:
        known: distances of the drawn samples `(n,)` by passes.
    """

    known: Mapping[int, Tensor]

    @property
    def top(self) -> tuple[int | None, int | None]:
        """The passes that are chosen, if they are known, and the passes that are missing, if any.

        The look with twice the passes comes last.
        """
        for passes in RUNGS:
            for need in (quarter(passes), passes):
                if need not in self.known:
                    return None, need
            if passes == MOST or at_rest(self.known[quarter(passes)], self.known[passes]):
                break
        return passes, None if 2 * passes in self.known else 2 * passes

    @property
    def passes(self) -> int | None:
        """The passes that are chosen, None while more has to be looked at."""
        return self.top[0]

    def findings(self) -> list[Finding]:
        """How the passes were chosen, and how much is left at least."""
        passes, missing = self.top
        if passes is None or not len(self.known[passes]):
            return []
        found = [self._chosen(passes)]
        if missing is None:
            found.append(self._left(passes))
        return found

    def _chosen(self, passes: int) -> Finding:
        early = self.known[quarter(passes)]
        late = self.known[passes]
        gain = shrinkage(early, late)
        text = (
            f"nearest took {passes} passes a sample, chosen on {len(late)} correct samples drawn "
            f"at random: their mean distance shrinks by {100 * gain:.1f} % from "
            f"{quarter(passes)} to {passes} passes"
        )
        if at_rest(early, late):
            return Finding("convergence", "ok", f"{text}, at most {100 * AT_REST:g} % was asked.")
        new = first_flips(early, late)
        if new:
            text += f", and {new} have their first flip there"
        level = "warning" if far_from_rest(early, late) else "note"
        advice = (
            f"more than the {100 * AT_REST:g} % that was asked, at the most passes that auto "
            f"takes, so give it --passes {4 * passes} and add an attack without gradients (square)"
        )
        return Finding("convergence", level, f"{text}: {advice}.")

    def _left(self, passes: int) -> Finding:
        """A lower confidence limit on the share of inputs that have a nearer flip.

        The passes were chosen on the same samples, so the limit holds for every choice at once.
        """
        now = self.known[passes]
        later = self.known[2 * passes]
        share = torch.where(torch.isfinite(now), 1 - later / now, torch.isfinite(later).double())
        n = len(now)
        hits = int((share > NEARER).sum())
        each = 1 - (1 - CONFIDENCE) / len(RUNGS)
        least = proportion_at_least(hits, n, each)
        mean = float(share.mean())
        text = (
            f"Twice the passes ({2 * passes}) bring {hits} of these {n} samples more than "
            f"{100 * NEARER:g} % nearer, all of them {100 * mean:.1f} % nearer in the mean: with "
            f"{100 * CONFIDENCE:g} % confidence at least {floor_percent(least)} % of the correct "
            "inputs like these have a flip so much nearer than found. What no search finds is "
            "not counted"
        )
        if mean > AT_REST:
            return Finding("left", "note", f"{text}: raise --passes to {4 * passes}.")
        return Finding("left", "ok", f"{text}.")
