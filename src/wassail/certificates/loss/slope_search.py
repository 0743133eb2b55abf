"""One certificate in the making, of any loss: each slope is kept as soon as it is known."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.exact.infinity import infinity
from wassail.certificates.graph.graph import Graph
from wassail.certificates.loss.certificate import SLOPES
from wassail.certificates.loss.chords import Chords, steepest_of
from wassail.certificates.loss.samples import Samples
from wassail.certificates.loss.slopes import ray_slope
from wassail.network import versions

WORK = 60 * clock.SECOND  # operations for all slopes when there is no time limit
DENSE_NEURONS = 300  # networks whose slope at infinity goes to branch and bound


class SlopeSearch:
    """The slopes of some samples, and the line that caps the loss.

    Args:
        samples: of classes or errors.
        mu: their weights.
        seed: of the random starts.
    """

    names: ClassVar[tuple[str, ...]] = ()  # the slopes, cheap and general ones first

    def __init__(self, samples: Samples, mu: Tensor, seed: int) -> None:
        self.samples = samples
        self.graph = samples.graph
        self.norm = samples.norm
        self.mu = mu
        self.seed = seed
        self.cut = False
        self.found: dict[str, Bound] = {}
        self.line: tuple[float, float] | None = None

    def search(self, wanted: Sequence[str], report: Callable[[float], None]) -> None:
        """Find the slopes, each within its share of the time and the work, then the line.

        Args:
            wanted: which of them.
            report: is given the share done.
        """
        todo = [name for name in self.names if name in wanted]
        for done, name in enumerate(todo):
            began = time.monotonic()
            share = len(todo) - done
            with clock.limited(clock.seconds_left() / share, clock.work_left() / share):
                with suppress(clock.Late):
                    getattr(self, f"_{name}")()
                self.cut |= clock.out_of_time()
            bound = self.found.get(name, Bound(0.0, math.inf, "none: out of time"))
            seconds = {"seconds": time.monotonic() - began}
            self.found[name] = replace(bound, info={**bound.info, **seconds})
            report((done + 1) / len(todo))
        with suppress(clock.Late):
            self.find_line()

    def find_line(self) -> None:
        """Find the line `C + lam eps`, if there is one."""
        raise NotImplementedError

    def at_infinity(self, far: Graph, labels: Sequence[int]) -> Bound:
        """The slope at infinity of a network, from its recession function.

        Args:
            far: that function.
            labels: which outputs are right.
        """
        if far.neurons <= DENSE_NEURONS:
            return infinity(far.piecewise(), self.norm, labels, seed=self.seed)
        return ray_slope(far.to(self.graph.device), self.norm, labels, self.seed)

    def settle(self, found: Chords) -> None:
        """`l <= S <= Lm <= L`: each bracket learns from its neighbours, and S from the chords.

        Args:
            found: evaluated chords.
        """
        slope, place = steepest_of(self.graph, self.samples.x, found)
        if "anchor" in self.found and slope > self.found["anchor"].lower:
            old = self.found["anchor"]
            info = {**old.info, "sample": int(found.root[place])}
            point = found.points[place].flatten().double()
            self.found["anchor"] = Bound(
                below(slope, old.upper, "anchor"), old.upper, old.method, point, info
            )
        chain = [name for name in SLOPES if name in self.found]
        for low, high in itertools.pairwise(chain):
            a = self.found[low]
            b = self.found[high]
            if a.lower > b.lower:
                self.found[high] = replace(b, lower=below(a.lower, b.upper, high))
        for high, low in itertools.pairwise(reversed(chain)):
            a = self.found[low]
            b = self.found[high]
            if b.upper < a.upper:
                lower = below(a.lower, b.upper, low)
                self.found[low] = Bound(lower, b.upper, f"{high}, {b.method}", a.witness, a.info)

    def fields(
        self,
        wanted: Sequence[str],
        found: Chords,
        clean: Tensor,
        predicted: Tensor,
        above: float,
    ) -> dict[str, Any]:
        """The fields of a certificate.

        Args:
            wanted: slopes that were asked for.
            found: evaluated points.
            clean: loss at the samples.
            predicted: class there.
            above: no less than their mean loss.
        """
        info = {
            "empirical_above": above,
            "versions": versions(),
            "seed": self.seed,
            "order": 1,
            "smooth": self.graph.smooth,
            "cut": self.cut,
        }
        return {
            "x": self.samples.x.cpu(),
            "y": self.samples.loss.rows.cpu(),
            "mu": self.mu,
            "norm": self.norm,
            "loss": self.samples.loss.loss,
            "domain": self.samples.domain,
            "empirical": math.fsum((self.mu * clean).tolist()),
            **{name: self.found.get(name) if name in wanted else None for name in SLOPES},
            "line": self.line,
            "points": found.points,
            "root": found.root,
            "gain": found.gain,
            "distance": found.distance,
            "predicted": found.predicted,
            "clean_predicted": predicted,
            "info": info,
        }
