"""W-PGD and W-FGSM (Bai, He, Jiang & Obloj 2023, arXiv 2306.09844): ascent of a whole data set in a
Wasserstein ball.

The steepest direction of the mean loss over `Omega_p(eps)` gives every sample a share of the step
by the length of its own gradient, so each step needs a number that all samples decide. The attack
is therefore written as rounds: pure functions of a batch and of a few global numbers, and between
them reductions of one number a sample (`mean_norm`, exact sums, so that neither batches nor the
order of the samples matter). What happens inside a round can be spread over machines as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wassail.checks import check_task
from wassail.errors import InputError, unknown
from wassail.geometry import clip, column, distances, inner, maximiser, pull_inside, vector_norm
from wassail.losses import ce_ascent, flip_tolerance, margin_ascent, spread_of
from wassail.network import Model, Network, search
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Number, Threat, check_seed, number, parse_threat, whole
from wassail.transport.allocation import sample_weights
from wassail.transport.distribution import Distribution


def w_pgd(
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    loss: str = "redlr",
    steps: int = 50,
    step: Number | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """W-PGD of Bai et al. (2023): raise the mean loss by projected steps of the whole data set in
    `Omega_p(eps)`, from the samples, order p > 1.

        h_i = M_r(g_i) (||g_i||_s / U)^(q-1),   U = (sum_j mu_j ||g_j||_s^q)^(1/q),   x <-
        clip(Proj(x + step h)),

    with `g_i` the gradient of sample i's loss, `1/r + 1/s = 1/p + 1/q = 1` and `M_r` the dual
    maximiser, so that h has length 1 as the ball measures it. Proj: if the data set has moved by `W
    = (sum_i mu_i d_i^p)^(1/p) > eps`, every sample is brought back to `eps / W` times its own
    distance, scaled for l2 and clipped for linf. At order inf `h_i = M_r(g_i)`, every sample stays
    in its own ball, and this is PGD (the authors' l2 code always goes to the sphere there). The
    paper has orders 2 and inf; the formula serves every order above 1.

    The result is the iterate with the lowest accuracy, all weights 1; at order inf, where samples
    share nothing, a sample that is fooled stops for good and the others return their last point.
    Points that moved in vain keep their part of the budget: `ws.allocate(result.flips, eps, order)`
    has the same accuracy without them, and what it leaves unspent can buy the flips of other
    attacks (`Flips.merge`).

    Per sample at most `steps + 1` F and `steps` B (order inf: `steps` F), where the authors' code
    needs `2 steps` F: the forward pass of the next gradient measures accuracy too, and a sample
    that rests is not evaluated again. Memory: three copies of x (points, directions, best iterate).
    The directions are kept because no sample can move before the gradients of all are known, and to
    compute them again would cost F and B twice.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        loss: "redlr" (the default: DLR, without a gradient once fooled), "dlr", "ce" or "margin";
            with the last three a fooled sample, even one that was wrong from the start, goes on and
            spends.
        steps: int, steps of the whole data set; default 50.
        step: length of a step in units of eps' norm; default None, `1.875 eps / steps`.
        mu: sample weights, tensor `(N,)`; default None, 1/N each; a sample of weight 0 is left
            alone.
        seed: int, recorded only, since nothing here is random; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
    """
    threat = parse_threat(threat)
    steps = whole(steps, "steps")
    size = 1.875 * threat.eps / steps if step is None else number(step, "step")
    if not 0 < size < math.inf:
        raise InputError(
            f"step is {step!r}: it must be positive and finite, 1.875 eps / steps by default."
        )
    return _attack("w-pgd", model, x, y, threat, loss, steps, size, mu, seed, batch_size, progress)


def w_fgsm(
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    loss: str = "redlr",
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """One step of W-PGD of the full size eps (Bai et al. 2023): see `w_pgd`.

    2 F and 1 B a sample at most, at order inf 1 F and 1 B.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        loss: "redlr" (the default), "dlr", "ce" or "margin", as in `w_pgd`.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, recorded only, since nothing here is random; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
    """
    threat = parse_threat(threat)
    return _attack(
        "w-fgsm", model, x, y, threat, loss, 1, threat.eps, mu, seed, batch_size, progress
    )


def _attack(
    name: str,
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    loss: str,
    steps: int,
    step: float,
    mu: Tensor | None,
    seed: int,
    batch_size: int | None,
    progress: Progress,
) -> Distribution:
    check_seed(seed)
    if loss not in SLOPES:
        raise unknown("loss", loss, tuple(SLOPES))
    if threat.norm == 1:
        raise InputError(
            f"{name} has no l1 form: the steepest l1 step moves one coordinate, which sticks at "
            "the wall of the box, so choose "
            "norm 2 or inf, or another attack such as apgd."
        )
    if threat.order == 1:
        raise InputError(
            f"{name} has no direction at order 1: the steepest one moves only the sample with "
            "the longest gradient, so choose "
            "an order above 1, or another attack such as wda_pp."
        )
    x, y = check_task(x, y, threat.domain, model)
    weights = sample_weights(mu, len(x))

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        points, clean = _ascend(_Ascent(network, x, y, threat, weights, loss), steps, step, tick)
        return _afford(points, x, threat, weights), clean

    found = search(chunk, model, x, y, batch_size, progress, name, whole=True)
    info = {"method": name, "options": {"loss": loss, "steps": steps, "step": step}, "seed": seed}
    return Distribution.from_search(x, y, found, threat, 1.0, name, info, mu)


def _ascend(data: _Ascent, steps: int, step: float, tick: Tick) -> tuple[Tensor, Tensor]:
    """The rounds: the best iterate `(N, *shape)` and the logits at the samples `(N, K)`."""
    tolerance = flip_tolerance(data.x.dtype)
    # A sample that is wrong as it stands needs no tolerance.
    clean = data.look(torch.arange(len(data.x)), 0.0)
    data.network.measure(clean)
    data.keep_best()
    for turn in range(steps):
        if data.lowest == 0 or not (data.length > 0).any():
            break  # all are fooled, or nothing leads anywhere
        rows = data.move(step)
        if turn + 1 < steps:
            data.look(rows, tolerance)
        elif not data.alone:  # at order inf the last points are the answer, whatever they are
            data.judge(rows, tolerance)
        data.keep_best()
        tick((turn + 1) / steps)
    return data.best, clean


class _Ascent:
    """The data set between two rounds.

    points: the iterate `(N, *shape)`; best: the one with the lowest accuracy so far, at order inf
    always the newest; direction `(N, *shape)`, length `(N,)`: `M_r(g_i)` and `||g_i||_s` at the
    iterate, the length zero where there is nothing to climb; right: whether its class is still the
    right one, bool `(N,)`; reach: a bound on how far the data set has moved. What is one number a
    sample lives on the CPU in float64.
    """

    def __init__(
        self, network: Network, x: Tensor, y: Tensor, threat: Threat, mu: Tensor, loss: str
    ) -> None:
        self.network = network
        self.x = x
        self.y = y
        self.threat = threat
        self.mu = mu
        self.loss = loss
        self.alone = threat.order == math.inf  # no sample's step depends on another's
        self.points = x.clone()
        self.direction = torch.zeros_like(x)
        self.length = torch.zeros(len(x), dtype=torch.float64)
        self.right = torch.zeros(len(x), dtype=torch.bool)
        self.best = self.points
        self.lowest = math.inf
        self.reach = 0.0
        # Less than eps by the rounding of coordinates.
        self.budget = threat.eps * (1 - 100 * torch.finfo(x.dtype).eps)

    def look(self, rows: Tensor, tolerance: float) -> Tensor:
        """Evaluate the iterate of these samples: logits `(m, K)`. 1 F + 1 B each."""
        rest = self.alone or self.loss == "redlr"
        found = [self.x.new_zeros(0, 2)]
        for part in _batches(rows, self.network.batch_size):
            z, self.right[part], climbing, g = _slope(
                self.network,
                self.points[part],
                self.y[part],
                part,
                self.mu[part] > 0,
                self.loss,
                tolerance,
                rest,
            )
            self.length[part] = 0
            direction = maximiser(g, self.threat.norm)
            # The dual norm of g is what its maximiser reaches; and no square can underflow.
            self.length[climbing], self.direction[climbing] = (
                inner(g, direction).cpu().double(),
                direction.to(self.x.device),
            )
            found.append(z.to(self.x.device))
        return torch.cat(found[1:] or found)

    def judge(self, rows: Tensor, tolerance: float) -> None:
        """Whether the iterate of these samples is still right, without a look at where to go
        next. 1 F each.
        """
        for part in _batches(rows, self.network.batch_size):
            z = self.network.logits(self.points[part], part)
            right = self.network.predict(z, self.y[part], part, tolerance) == self.y[part]
            self.right[part] = right.cpu()

    def keep_best(self) -> None:
        """Reduction: the accuracy of the iterate. At order inf a fooled sample rests, so the
        newest iterate is the best.
        """
        accuracy = math.fsum(self.mu[self.right].tolist())
        if accuracy < self.lowest and not self.alone:
            self.best = self.points.clone()
            self.lowest = accuracy

    def move(self, step: float) -> Tensor:
        """One step and the way back into the ball; the samples whose points are new, `(m,)`."""
        q = 1.0 if self.alone else self.threat.order / (self.threat.order - 1)
        share = step * (self.length / mean_norm(self.length, self.mu, q)) ** (q - 1)
        share = torch.where(self.length > 0, share, 0)
        # the step of the whole data set has this length: no need to measure while it cannot be too
        # far
        self.reach += step
        distance = self.measure(share) if self.reach > self.budget else torch.zeros_like(share)
        self.reach = min(self.reach, self.threat.eps)
        radius = _radii(distance, self.mu, self.threat, self.budget)
        rows = ((share > 0) | (radius < distance)).nonzero()[:, 0]
        for part in _batches(rows, self.network.batch_size):
            point = _ahead(self.points[part], self.direction[part], share[part])
            self.points[part] = _back(
                point, self.x[part], self.threat, distance[part], radius[part]
            )
        return rows

    def measure(self, share: Tensor) -> Tensor:
        """How far from its sample each point would be after the step, `(N,)`."""
        found = []
        for i in range(0, len(self.x), self.network.batch_size):
            part = slice(i, i + self.network.batch_size)
            ahead = _ahead(self.points[part], self.direction[part], share[part])
            found.append(vector_norm(ahead - self.x[part], self.threat.norm).cpu().double())
        return torch.cat(found)


def _batches(rows: Tensor, size: int) -> list[Tensor]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _slope(
    network: Network,
    points: Tensor,
    y: Tensor,
    rows: Tensor,
    wanted: Tensor,
    loss: str,
    tolerance: float,
    rest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch's part of a round: logits `(m, K)`, whether they are right, bool `(m,)`, and where
    the loss leads.

    That is those of the rows that climb, `(k,)`, and the gradients of their loss, `(k, *shape)`:
    rows that are wanted, bool `(m,)`, and with `rest` right as well.
    """
    device = network.device or points.device
    y = y.to(device)
    points = points.to(device)
    mine = rows.to(device)
    climbs, stays = (mask.to(device).nonzero()[:, 0] for mask in (wanted, ~wanted))
    parts = []
    tape = network.tape(points[climbs], mine[climbs]) if len(climbs) else None
    if tape is not None:
        parts.append(tape.logits)
    if len(stays):
        parts.append(network.logits(points[stays], mine[stays]))
    z = torch.cat(parts)[torch.cat([climbs, stays]).argsort()]
    right = network.predict(z, y, rows, tolerance) == y
    place = (right[climbs] if rest else torch.ones_like(right[climbs])).nonzero()[:, 0]
    keep = climbs[place]
    g = points[:0]
    if tape is not None:
        g = tape.pull(SLOPES[loss](z, y)[keep], place)
    # An entry that is not finite says nothing, and must not spoil the mean over all samples.
    g = g.nan_to_num(0.0, 0.0, 0.0)
    return z, right.cpu(), rows[keep.cpu()], g


def _ahead(points: Tensor, direction: Tensor, share: Tensor) -> Tensor:
    """Where the step leads: share `(m,)` times its direction, from the points."""
    return points + column(share, points) * direction


def _back(points: Tensor, x: Tensor, threat: Threat, distance: Tensor, radius: Tensor) -> Tensor:
    """Points at these distances `(m,)` brought back to these radii `(m,)` where they are
    smaller, and into the box after.
    """
    if (radius < distance).any():
        way = points - x
        limit = column(radius, x)
        way = (
            way.clamp(-limit, limit)
            if threat.norm == math.inf
            else way * column(radius / distance, x)
        )
        points = torch.where(column(radius < distance, x), x + way, points)
    return clip(points, threat.domain)


def _radii(distance: Tensor, mu: Tensor, threat: Threat, budget: float) -> Tensor:
    """Reduction: how far each sample may stay from where it began, `(N,)`, for the data set to
    be within the budget.
    """
    if threat.order == math.inf:
        return torch.where(distance > threat.eps, budget, distance)
    cost = mean_norm(distance, mu, threat.order)
    return distance * (budget / cost) if cost > budget else distance


def mean_norm(lengths: Tensor, mu: Tensor, power: float) -> float:
    """`(sum_i mu_i length_i^power)^(1/power)` of float64 `(N,)`, summed exactly: the order of
    the samples does not matter.
    """
    top = float(lengths.max())
    if top == 0:
        return 0.0
    return float(top * math.fsum((mu * (lengths / top) ** power).tolist()) ** (1 / power))


def _afford(points: Tensor, x: Tensor, threat: Threat, mu: Tensor) -> Tensor:
    """The points with the last rounding error taken out: their cost, as the result will compute
    it, is at most eps.
    """
    if threat.order == math.inf:
        return pull_inside(points, x, threat.norm, threat.eps, threat.domain)
    # room for the rounding of a sum of N costs
    length = distances(points, x, threat.norm)
    budget = threat.eps * (1 - 1e-12)
    cost = mean_norm(length, mu, threat.order)
    return (
        pull_inside(points, x, threat.norm, length * (budget / cost), threat.domain)
        if cost > budget
        else points
    )


def ce_slope(z: Tensor, y: Tensor) -> Tensor:
    """The gradient of cross entropy with respect to the logits, `softmax(z) - e_y`, shape `(N,
    K)`, without cancellation.
    """
    value, weight = ce_ascent(z, y)  # cross entropy is log(1 + exp(value))
    return value.sigmoid()[:, None] * weight


def dlr_slope(z: Tensor, y: Tensor) -> Tensor:
    """The gradient of DLR with respect to the logits, shape `(N, K)`; with at most three classes
    that of the margin.

    Zero where `y` is third: there DLR is 1 whatever the logits, and such a sample must not get a
    share of the step.
    """
    value, weight = margin_ascent(z, y)
    if z.shape[1] <= 3:
        return weight
    top = z.topk(3, dim=1)
    spread = spread_of(top.values[:, 0] - top.values[:, 2])[:, None]
    ratio = value / spread[:, 0]
    turn = torch.stack([-ratio, 0 * ratio, ratio], 1)
    return weight.scatter_add(1, top.indices, turn) / spread


def margin_slope(z: Tensor, y: Tensor) -> Tensor:
    """The gradient of the margin with respect to the logits, shape `(N, K)`."""
    return margin_ascent(z, y)[1]


# Gradients with respect to the logits, lengths included: here a sample's share of the step depends
# on them.
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "redlr": dlr_slope,
    "dlr": dlr_slope,
    "ce": ce_slope,
    "margin": margin_slope,
}
