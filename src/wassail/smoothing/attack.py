"""The attacked side of a smoothed model: points whose votes were counted, with confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wassail.attacks.apgd import apgd
from wassail.attacks.nearest import nearest
from wassail.errors import InputError, instance
from wassail.geometry import column
from wassail.geometry import distances as distances_between
from wassail.network import BATCH_SIZE
from wassail.progress import Progress, progress_bar
from wassail.records import Record
from wassail.smoothing.certificate import budget
from wassail.smoothing.draws import Counter
from wassail.smoothing.model import Smoothed
from wassail.threat import Domain, Number, Threat, parse_confidence, parse_domain, parse_order
from wassail.transport import confidence as limits
from wassail.transport.envelope import envelope

INSIDE = 1 - 1e-6  # of a ball: a point on its surface may be rounded out of it
SLACK = 1e-12  # of a price and of an accuracy: above their rounding
STRETCHES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the way to a flip of the averaged logits


@dataclass(frozen=True, eq=False)
class SmoothedAttack(Record):
    """Points around N samples and upper limits on how often the model is right there under noise.

    All limits hold together with the confidence. The first point of each sample is itself.

    Args:
        distances: l2 distances of the points from their samples, float64 `(N, P)`.
        high: upper limits on the probability that the model is right, `(N, P)`.
        points: `(N, P, *shape)`.
        draws: draws of each point.
        confidence: of all limits together.
    """

    distances: Tensor
    high: Tensor
    points: Tensor
    draws: int
    confidence: float

    @property
    def flips(self) -> Tensor:
        """The distance of the nearest point where the vote is wrong or abstains, `(N,)`, or inf."""
        known = torch.where(self.high < 0.5, self.distances, math.inf)
        return known.amin(1)

    def accuracy(self, eps: Number, order: Number = 1) -> float:
        """The accuracy of the randomised classifier under the best distribution on the points.

        At most so much stays right over `Omega_order(eps)`.

        Args:
            eps: budget >= 0 in the l2 norm.
            order: Wasserstein order, 1 to inf; default 1.
        """
        size = budget(eps)
        p = parse_order(order)
        start = self.high[:, 0]
        if p == math.inf:
            near = torch.where(self.distances <= size, self.high, math.inf)
            return float(near.amin(1).mean())
        gain = start[:, None] - self.high
        # in units of the budget, rounded up
        price = (self.distances / size) ** p * (1 + SLACK * (1 + p)) if size else self.distances
        gain = torch.where((self.distances > 0) & (price > 0), gain, -math.inf)
        steps = envelope(gain, price)
        left = float(len(start)) if size else 0.0
        saved = 0.0
        for cost, slope in zip(steps.price.tolist(), steps.slope.tolist(), strict=True):
            part = min(cost, left)
            saved += part * slope
            left -= part
            if left <= 0:
                break
        return min(max(float(start.mean()) - saved / len(start), 0.0) + SLACK, 1.0)


def _climbed(
    model: Smoothed, x: Tensor, y: Tensor, box: Domain, radius: float, steps: int, batch_size: int
) -> Tensor:
    """APGD's points in balls around the samples, moved on to the balls' surface.

    APGD ends at a flip of the averaged logits; the rest of the way costs nothing in a ball.
    """
    threat = Threat(norm=2, order=math.inf, eps=radius, domain=box)
    found = apgd(model, x, y, threat, steps=steps, batch_size=batch_size).points.to(x)
    far = distances_between(found, x, 2.0).to(x)
    factor = torch.where(far > 0, INSIDE * radius / far, 1.0)
    points = x + column(factor, x) * (found - x)
    return points if box is None else points.clamp(*box)


def attack_smoothed(
    model: Smoothed,
    x: Tensor,
    y: Tensor,
    domain: Domain = (0.0, 1.0),
    passes: int = 100,
    draws: int | None = None,
    confidence: Number = 0.999,
    stretches: Sequence[float] = STRETCHES,
    batch_size: int = BATCH_SIZE,
    progress: Progress = False,
    counter: Counter | None = None,
    eps: Sequence[Number] = (),
) -> SmoothedAttack:
    """Attack a smoothed model: `nearest` on its averaged logits, then votes on the way there.

    For point-wise threats APGD climbs the loss of the averaged logits in balls of the given radii,
    and votes are counted there too.

    Args:
        model: a smoothed model.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        domain: box `(low, high)`, or None for all of R^n; default (0, 1).
        passes: passes of `nearest` for each sample, of averaged logits; default 100.
        draws: draws of each point, a multiple of 100; default None, the model's.
        confidence: that all limits hold; default 0.999.
        stretches: shares of the way to the flip of the averaged logits that are voted on.
        batch_size: inputs of one pass at most; default 250.
        progress: bool, or a callable that is given the share done; default False.
        counter: what counts the votes, for example `evaluation.cluster.counter(Ray(workers=8))`;
            default None, this process. The search for the points is made here in any case.
        eps: radii of balls for APGD, in the l2 norm; default none. Each costs as many passes as
            `nearest`, and votes at one point of each sample.
    """
    instance(model, Smoothed, "the model is", "as ws.smoothed(model, sigma) returns it")
    if not stretches or min(stretches) <= 0:
        raise InputError("stretches must be positive numbers: give at least one, such as 1.0.")
    box = parse_domain(domain)
    level = parse_confidence(confidence)
    small = max(batch_size // model.average, 1)
    with progress_bar(progress, "attack on the smoothed model") as report:
        found = nearest(
            model, x, y, norm=2, domain=box, passes=passes, batch_size=small, warn=False
        )
        report(0.5)
        ways = [x]
        for stretch in stretches:
            point = x + stretch * (found.points - x)
            ways.append(point if box is None else point.clamp(*box))
        for radius in sorted({budget(each) for each in eps} - {0.0}):
            ways.append(_climbed(model, x, y, box, radius, max(passes // 2, 1), small))
        other = Smoothed(model.model, model.sigma, model.draws, model.seed + 1, model.average)
        each = (1 - level) / max(len(x) * len(ways), 1)
        highs = []
        for k, points in enumerate(ways):
            votes = other.votes(points, y, draws, batch_size=batch_size, counter=counter)
            counts = votes.hits.numpy().astype(np.float64)
            highs.append(torch.from_numpy(limits.proportions(counts, votes.draws, each)[1]))
            report(0.5 + 0.5 * (k + 1) / len(ways))
    lengths = [distances_between(points, x, 2.0).double().cpu() for points in ways]
    return SmoothedAttack(
        torch.stack(lengths, 1), torch.stack(highs, 1), torch.stack(ways, 1), votes.draws, level
    )
