"""Inner boxes by balls: a sweep that bounds undecided neurons by ball and box together.

A box of an inner layer that CROWN found on an l2 ball is too wide for the same reason as a margin
is, and what is lost there is lost again in every layer after it. So each layer's open neurons are
bounded anew, with the balls of the layers before; then their boxes give the next balls.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.relax.ball_relaxation import BallRelaxation
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.chunks import chunks_of, room_of
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.rows import Length, Span, narrow_to, units_of

OPEN_NEURONS = 100  # open neurons of a sample in one layer, up to which an ascent is worth its time
ASCENT_STEPS = 6  # of that ascent
SPARE = 0.03  # how far beyond its kink a neuron's ascent goes on, since its values are rough
# What a step of an ascent costs: passes for each row, and overhead that is worth so many rows.
PASSES = 3
OVERHEAD = 6


def passes_of(owner: Tensor, samples: int, steps: int) -> Tensor:
    """Passes through the network that an ascent takes for each sample, float64 `(N,)`.

    A sample pays the overhead whatever else is in the batch.

    Args:
        owner: the sample of each row, `(R,)`.
        samples: how many there are, N.
        steps: of the ascent.
    """
    rows = torch.bincount(owner, minlength=samples).double()
    return PASSES * steps * torch.where(rows > 0, rows + OVERHEAD, 0.0)


class BallSweep(Sweep):
    """The same sweep with narrower boxes, never wider than those given.

    Args:
        graph: a network of affine nodes and ReLUs.
        balls: one for each sample.
        known: what CROWN's sweep on these balls proved, node by node.
        moved: how far the undecided neurons of each layer move together.
    """

    def __init__(
        self,
        graph: Graph,
        balls: Balls,
        known: Mapping[int, Span],
        moved: Mapping[int, Length],
    ) -> None:
        super().__init__(graph, balls, 0, known)
        self.moved = moved
        self.passes = torch.zeros_like(balls.radius)  # through the network, of each sample

    def _cones(self) -> None:
        """What they say is known."""
        return None

    def _tighten(self, j: int) -> None:
        """The open entries of node j, the input of an activation, by balls: where they are few."""
        if j in self.tight or not self.bends:
            return
        self.tight.add(j)
        node = self.graph.nodes[j]
        low, high = (side.flatten(1).clone() for side in self.spans[j])
        open_ = self.values.open_entries(j, low, high)
        few = open_.sum(1, keepdim=True) <= OPEN_NEURONS
        relaxation = BallRelaxation(self, self.moved)
        widest = max(n.size for n in self.graph.nodes[: j + 1])
        most = max(1, 4 * room_of(low.device) // widest)
        both_sides = (open_ & few).nonzero()[:, 0].repeat(2)
        self.passes = self.passes + passes_of(both_sides, len(low), ASCENT_STEPS)
        for owner, place in chunks_of(open_ & few, most):
            clock.check()
            both = self._both(relaxation, j, owner, place)
            narrow_to(low, high, owner, place, -both[len(place) :], both[: len(place)])
        self.spans[j] = low.reshape(-1, *node.shape), high.reshape(-1, *node.shape)

    def _both(self, relaxation: BallRelaxation, j: int, owner: Tensor, place: Tensor) -> Tensor:
        """Upper bounds on the deviations of some entries of node j, then on their negatives."""
        unit = units_of(self.graph.nodes[j], place, torch.float64)
        c = self.centre[j].flatten(1)[owner, place]
        rows = torch.cat([unit, -unit])
        goal = torch.cat([-c, c]).clamp(min=0) * (1 - SPARE)
        # An ascent drops rows, so that each needs its own owner.
        twice = owner.expand(len(place)).repeat(2)
        return relaxation.bound(j, rows, twice, ASCENT_STEPS, goal)[0]
