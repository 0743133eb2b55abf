"""A3, the Adaptive Auto Attack (Liu et al., CVPR 2022, arXiv 2203.05154), and A3-WDA, which walks
with WDA's step.

Up to 13 restarts, each with three parts:

- Online statistics-based discarding (OSD): of the samples that still stand only the easiest share
  is attacked, those whose best margin `max_{j != y} theta_j - theta_y` in any look so far is
  largest. The hard ones would only cost passes.
- Adaptive direction initialisation (ADI): from a random point a few steps of full length along the
  gradient of `<w, theta>` for random weights `w` `(K,)`. In restart 1 all of `w` is uniform on [-1,
  1]; from restart 2 on the weights of the label and of one rival, the rivals in turn, follow what
  succeeded in restart 1.
- An ascent with steps from eps down to 0.001 eps on a cosine.

A look at a point also gives the next gradient, so a step costs one forward and one backward pass
where the authors' code pays two and one. What else differs from that code, each time for the
better:

- Success is tested at every look, in ADI and at the random start too, and the sample leaves at
  once. Projections onto ball and box are exact. Flips by ADI are counted as meant, where a loop
  variable used twice makes their code miss most of them.
- Rivals are ranked by how close they came in any look so far (`reach`), not by the logits at one
  random corner, which saves the pass there.
- OSD keeps at least 1 % of all samples, which is the authors' 100 of their 10,000: the cost of a
  sample does not grow when there are few. Where less than a tenth of all stand, none is
  discarded, as in their code, but its ten more repeats are left out: they would spend the passes on
  the shortest restarts.
- The budget is 1000 backward passes for each sample that stands after restart 0, and it is kept.
- Repeats of a restart on few samples run side by side, up to 64 points: one batch instead of many
  small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import Tensor

from wassail.attacks.best import Best
from wassail.checks import check_task
from wassail.device import write
from wassail.errors import InputError, unknown
from wassail.geometry import column, maximiser, project, pull_inside, steepest, vector_norm
from wassail.losses import predict, strongest_rival
from wassail.network import Model, Network, generators, search
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Threat, check_seed, parse_threat
from wassail.transport.distribution import Distribution

STEPS = ("pgd", "wda")
BUDGET = 1000  # backward passes for each sample that stands after restart 0
FLOOR = 0.01  # the least share of all samples that OSD keeps
FEW = 0.1  # the share of all samples below which OSD discards none
# the share of the samples standing after restart 0 that ADI alone must flip for the biased plans
BIAS = 0.05
NEVER = 10**9  # the turn of a flip that did not come
WAVE = 64  # repeats run side by side as long as they are no more points than this
# The authors' restarts: share of the standing samples, steps of the ascent, repeats.
PLANS = (
    (1.0, 8, 1),
    (1.0, 8, 1),
    (1.0, 8, 1),
    (0.7, 25, 1),
    (0.6, 30, 1),
    (0.5, 30, 1),
    (0.4, 35, 1),
    (0.3, 40, 1),
    (0.2, 45, 1),
    (0.1, 50, 1),
    (0.1, 50, 4),
    (0.065, 55, 4),
    (0.03, 60, 50),
)
# Theirs from restart 3 on for a model that ADI alone fools ("BIAS_ATK"): share, steps of the
# ascent, steps of ADI, repeats.
BIASED_PLANS = (
    (1.0, 5, 10, 10),
    (1.0, 5, 15, 1),
    (1.0, 10, 15, 1),
    (1.0, 10, 10, 1),
    (1.0, 15, 10, 1),
    (1.0, 18, 10, 1),
    (1.0, 20, 10, 1),
    (0.8, 25, 10, 5),
    (0.5, 35, 10, 5),
    (0.5, 45, 10, 20),
)


def a3(
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    step: str = "pgd",
    restarts: int = 13,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """A3 in every sample's ball of radius eps, with all of its mass; with step="wda" the A3-WDA of
    the WDA paper.

    Liu et al. (2022). With "pgd" the walk climbs the margin, whose rival may change at every look,
    with steps `size M_r(g)`, as published. With "wda" ADI is the probe, the rival with the largest
    gap at its end is fixed, and every step is the steepest one inside the box. For l1, which the
    authors do not have, both take that step.

    A restart with `a` steps of ADI and `s` of the ascent costs `a + s + 1` F and `a + s` B a
    repeat; a flip ends it. A sample that is attacked in all of them pays 4637 B, but OSD leaves 340
    F and 340 B for the mean standing sample (about 1000 with the biased plans), and the mean is
    never above 1000 B. The clean look is 1 F.

    The work is cut into rounds. Between them all samples are looked at together; inside a round
    samples are independent, and random draws are keyed by (seed, sample, repeat), so batch size and
    order do not matter.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        step: name of the walk, not a length: "pgd" (the default) or "wda", the A3-WDA of the WDA
            paper.
        restarts: int, how many of the 13 restarts to run; default 13.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, keys the random draws together with each sample's content; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
    """
    if step not in STEPS:
        raise unknown("step", step, STEPS)
    if not isinstance(restarts, int) or not 1 <= restarts <= len(PLANS):
        raise InputError(
            f"restarts is {restarts}: the schedule has {len(PLANS)}, give 1 to {len(PLANS)}."
        )
    threat = parse_threat(threat)
    check_seed(seed)
    x, y = check_task(x, y, threat.domain, model)
    radius = threat.eps * (1 - 1e-12)  # room for the rounding of a sum of N costs
    settings = _Settings(threat, radius, step, seed)

    def whole(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        points, clean = _run(settings, network, x, y, restarts, tick)
        return pull_inside(points, x, threat.norm, radius, threat.domain), clean

    name = "a3" if step == "pgd" else "a3-wda"
    found = search(whole, model, x, y, batch_size, progress, name, whole=True)
    options = {"step": step, "restarts": restarts}
    return Distribution.from_search(
        x, y, found, threat, 1.0, name, {"method": name, "options": options, "seed": seed}, mu
    )


@dataclass(frozen=True)
class Plan:
    """A restart: the share of the standing samples it attacks, its steps of ADI and of the ascent,
    its repeats.

    final: one of the last restarts, whose directions follow a law of their own.
    """

    share: float
    adi: int
    steps: int
    repeats: int
    final: bool


def schedule(restart: int, biased: bool, classes: int) -> Plan:
    """The authors' plan for restart 0..12; from 1000 classes on that of ImageNet, with 10 more
    steps and 1 more repeat.

    Their code runs the steps of ADI on top of those of the ascent and counts them in it once more;
    so does this.
    """
    share, steps, repeats = PLANS[restart]
    adi = 0 if restart == 0 else 7
    if biased and restart > 2:
        share, steps, adi, repeats = BIASED_PLANS[restart - 3]
    if classes >= 1000:
        steps = steps + 10
        repeats = 32 if repeats == 50 else repeats + 1
    return Plan(share, adi, adi + steps, repeats, restart >= (11 if biased else 10))


@dataclass(frozen=True)
class Hit:
    """What a round found for n samples.

    turn: the look at which the sample flipped, `(n,)`, NEVER if it did not; point: the flip, else
    the point with the best margin, `(n, *shape)`; reach: the largest `theta_j - theta_y` of any
    look, `(n, K)`; pushed: the weights `w` behind the point, at the class predicted there and at
    the label, `(n, 2)`.
    """

    turn: Tensor
    point: Tensor
    reach: Tensor
    pushed: Tensor

    @property
    def flipped(self) -> Tensor:
        """Which samples flipped, bool `(n,)`."""
        return self.turn < NEVER


@dataclass
class Tally:
    """What all samples together tell the next round.

    standing: how many stood after restart 0, before that at the start; early: flips by ADI; rival,
    label: of the `w` that succeeded in restart 1 the weights at the class flipped to and at the
    label.
    """

    standing: int
    early: int = 0
    rival: list[float] = field(default_factory=list)
    label: list[float] = field(default_factory=list)

    @property
    def biased(self) -> bool:
        """Whether ADI alone fools so many that its directions are worth more than long ascents."""
        return 0 < BIAS * self.standing <= self.early

    def add(self, restart: int, adi: int, hit: Hit) -> None:
        """Count a round's flips, but not those of the random starts: no `w` had moved them."""
        self.early += int(((hit.turn > 0) & (hit.turn <= adi)).sum())
        if restart == 1:
            moved = hit.flipped & (hit.turn > 0)
            self.rival += hit.pushed[moved, 0].tolist()
            self.label += hit.pushed[moved, 1].tolist()


@dataclass(frozen=True)
class Aim:
    """The law of ADI's directions: `w_y` is uniform on [low, high], `w_j = push` for one of the
    `rivals` nearest rivals j.
    """

    low: float
    high: float
    push: float
    rivals: int


def aim(plan: Plan, biased: bool, classes: int, tally: Tally) -> Aim:
    """The authors' law from restart 2 on.

    With fewer than 100 classes (their CIFAR-10) the signs are those of the sums over the successful
    `w` of restart 1; with more (CIFAR-100, and ImageNet from 1000 on) the label is pushed down and
    the rival up. Weights grow as K/10, so that the other classes' do not drown them; with fewer
    than ten classes, which the authors do not have, they stay as for ten.
    """
    low = -0.5
    high = 0.1
    push = 0.8
    rivals = 9 if classes < 100 else 14 if classes < 1000 else 20
    if biased:
        low, high = (0.0, 0.0) if plan.final else (-0.1, 0.5)
    elif plan.final:
        low = -0.8
        rivals = 4 if classes < 100 else rivals
    elif classes < 100:
        # fsum is exact: the order of the samples cannot change a sign.
        low, high = (-0.1, 0.5) if math.fsum(tally.label) > 0 else (low, high)
        push = -push if math.fsum(tally.rival) < 0 else push
    scale = max(classes / 10, 1.0)
    return Aim(scale * low, scale * high, scale * push, min(rivals, classes - 1))


def easiest(standing: Tensor, reach: Tensor, share: float) -> Tensor:
    """OSD: the share of the standing samples, bool `(N,)`, with the largest best margin `max_j
    reach_j`; `(m,)`.

    All ties at the cut are kept, so the order of the samples does not matter.
    """
    rows = standing.nonzero()[:, 0]
    if len(rows) < max(FEW * len(standing), 2):
        return rows
    best = reach[rows].amax(1)
    need = max(int(share * len(rows)), int(FLOOR * len(standing)), 1)
    return rows[best >= best.topk(need).values[-1]]


@dataclass(frozen=True)
class _Settings:
    """What stays the same for all rounds."""

    threat: Threat
    radius: float
    step: str
    seed: int


def _run(
    settings: _Settings, network: Network, x: Tensor, y: Tensor, restarts: int, tick: Tick
) -> tuple[Tensor, Tensor]:
    """All restarts on N samples: their flips, or else their best points, `(N, *shape)`, and the
    clean logits `(N, K)`.
    """
    clean = network.logits(x, network.rows)
    network.measure(clean)
    standing = predict(clean, y) == y
    points = x.clone()
    reach = _gaps(clean, y)
    tally = Tally(int(standing.sum()))
    classes = clean.shape[1]
    number = 0
    for restart in range(restarts):
        if restart == 1:
            tally.standing = int(standing.sum())
        biased = restart > 2 and tally.biased
        plan = schedule(restart, biased, classes)
        law = aim(plan, biased, classes, tally) if restart > 1 else None
        last = number + plan.repeats
        while number < last:
            rows = easiest(standing, reach, plan.share)
            cost = len(rows) * (plan.adi + plan.steps)
            left = BUDGET * tally.standing - int(network.backwards.sum())
            if not 0 < cost <= left:
                break
            numbers = range(
                number, number + max(1, min(last - number, WAVE // len(rows), left // cost))
            )
            for part in torch.split(rows, max(network.batch_size // len(numbers), 1)):
                hit = _repeat(
                    settings, network, part, x[part], y[part], reach[part], plan, law, numbers
                )
                better = hit.flipped | (hit.reach.amax(1) > reach[part].amax(1))
                write(points, better, hit.point, part)
                reach[part] = torch.maximum(reach[part], hit.reach)
                standing[part] = ~hit.flipped
                tally.add(restart, plan.adi, hit)
            number = numbers.stop
            tick((restart + 1 - (last - number) / plan.repeats) / restarts)
        number = last
    return points, clean


def _repeat(
    settings: _Settings,
    network: Network,
    samples: Tensor,
    x: Tensor,
    y: Tensor,
    reach: Tensor,
    plan: Plan,
    law: Aim | None,
    numbers: range,
) -> Hit:
    """The repeats `numbers` of a restart on n samples `x` `(n, *shape)`, side by side; nothing but
    its arguments counts.

    samples: their places in the data `(n,)`, for the count of passes; reach: what is known of them
    so far, `(n, K)`.
    """
    n = len(y)
    home = x.device
    samples, x, y, reach = (t.to(network.device or home) for t in (samples, x, y, reach))
    start, weight = _draw(settings, x, y, reach, law, numbers)
    # from here on one for each of the c points
    samples = samples.repeat(len(numbers))
    y = y.repeat(len(numbers))
    log = _Log(start, y, weight.shape[1])
    rival = y.clone()
    last = plan.adi + plan.steps

    def goal(z: Tensor, mine: Tensor, turn: int) -> Tensor:
        if turn < plan.adi:
            return weight[mine]
        if turn == plan.adi or settings.step == "pgd":
            rival[mine] = strongest_rival(z, y[mine])[1]
        return (
            torch.zeros_like(z).scatter(1, rival[mine, None], 1.0).scatter(1, y[mine, None], -1.0)
        )

    live, point, center = (
        torch.arange(len(y), device=y.device),
        start,
        x.repeat(len(numbers), *[1] * (x.ndim - 1)),
    )
    for turn in range(last + 1):
        wanted = None if turn == last else partial(goal, turn=turn)
        z, predicted, gradient = _look(network, point, samples[live], y[live], live, wanted)
        flip = log.write(live, point, z, predicted, turn)
        # A sample that flipped in one repeat needs no other repeat: drop them all.
        stay = ~torch.isin(live % n, live[flip] % n)
        if wanted is None or not stay.any():
            break
        if not stay.all():
            live = live[stay]
            point = point[stay]
            center = center[stay]
            gradient = gradient[stay[~flip]]
        size = settings.radius * (1.0 if turn < plan.adi else cosine(turn - plan.adi, plan.steps))
        point = _step(settings, point, gradient, center, size)
    hit = log.close(n, weight)
    return Hit(*(getattr(hit, one.name).to(home) for one in fields(hit)))


def cosine(turn: int, steps: int) -> float:
    """The size of a step of the ascent as a share of eps: from 1 down to 0.001, or 0.1 if there
    are 10 steps or less.
    """
    least = 0.1 if steps <= 10 else 0.001
    return least + (1 - least) * (1 + math.cos(math.pi * turn / (steps + 1))) / 2


def _draw(
    settings: _Settings, x: Tensor, y: Tensor, reach: Tensor, law: Aim | None, numbers: range
) -> tuple[Tensor, Tensor]:
    """Starts `(c, *shape)` and weights `w` `(c, K)` for these repeats of n samples, sample i of the
    r-th at place `r n + i`.

    linf: uniform in the cube; l2: on the sphere, where the authors' cube lands with the first
    projection; l1: a Gaussian point.
    """
    norm = settings.threat.norm
    classes = reach.shape[1]
    noise = []
    uniform = []
    for number in numbers:
        for generator in generators(x, settings.seed, number):
            draw = torch.rand if norm == math.inf else torch.randn
            noise.append(draw(x.shape[1:], dtype=x.dtype, generator=generator))
            uniform.append(2 * torch.rand(classes + 1, dtype=x.dtype, generator=generator) - 1)
    v = torch.stack(noise).to(x.device)
    u = torch.stack(uniform).to(x.device)
    if norm == math.inf:
        v = settings.radius * (2 * v - 1)
    elif norm == 2:
        v = v * column(settings.radius / vector_norm(v, 2), v)
    x, weight = x.repeat(len(numbers), *[1] * (x.ndim - 1)), u[:, :classes]
    start = project(x + v, x, norm, settings.radius, settings.threat.domain)
    if law is None:
        return start, weight
    nearest = reach.topk(law.rivals, dim=1).indices
    rival = torch.cat([nearest[:, (number - 1) % law.rivals] for number in numbers])
    spread = (law.low + law.high) / 2 + (law.high - law.low) / 2 * u[:, classes:]
    weight = weight.scatter(1, y.repeat(len(numbers))[:, None], spread)
    return start, weight.scatter(1, rival[:, None], law.push)


def _look(
    network: Network,
    point: Tensor,
    samples: Tensor,
    y: Tensor,
    live: Tensor,
    goal: Callable[[Tensor, Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `(m, K)`, predictions `(m,)` and, with a goal, gradients at the k of m points that are
    no flips, `(k, *shape)`.

    goal: logits and places `live` -> the weights of the logits to raise. In calls of at most the
    network's batch size: a repeat of a sample that flips elsewhere in the same look still gets its
    gradient, whatever the batch size.
    """
    if goal is None:
        z = network.logits(point, samples)
        return z, network.predict(z, y, samples), point[:0]
    logits = []
    predictions = []
    gradients = [point[:0]]
    for part in torch.split(torch.arange(len(point), device=point.device), network.batch_size):
        tape = network.tape(point[part], samples[part])
        predicted = network.predict(tape.logits, y[part], samples[part])
        logits.append(tape.logits)
        predictions.append(predicted)
        keep = (predicted == y[part]).nonzero()[:, 0]
        gradients.append(tape.pull(goal(tape.logits, live[part])[keep], keep))
    return torch.cat(logits), torch.cat(predictions), torch.cat(gradients)


def _step(
    settings: _Settings, point: Tensor, gradient: Tensor, center: Tensor, size: float
) -> Tensor:
    """The next points `(m, *shape)`, in ball and box."""
    norm = settings.threat.norm
    domain = settings.threat.domain
    if norm == math.inf or (
        norm == 2 and settings.step == "pgd"
    ):  # for linf projected both are the same
        move = size * maximiser(gradient, norm)
    else:
        move = steepest(point, gradient, norm, size, domain)
    return project(point + move, center, norm, settings.radius, domain)


class _Log:
    """The best of each of c walks: point, its margin and predicted class, the turn of its flip,
    and every gap reached.
    """

    def __init__(self, start: Tensor, y: Tensor, classes: int) -> None:
        self.y = y
        self.best = Best(start)  # by margin; a flip replaces what was before it
        self.predicted = y.clone()
        self.reach = self.best.value[:, None].repeat(1, classes)
        self.turn = torch.full_like(y, NEVER)

    def write(self, live: Tensor, point: Tensor, z: Tensor, predicted: Tensor, turn: int) -> Tensor:
        """A look at the walks `live` `(m,)`; which of them flip, bool `(m,)`."""
        gap = _gaps(z, self.y[live])
        flip = predicted != self.y[live]
        better = self.best.offer(point, gap.amax(1), live, sure=flip)
        write(self.predicted, better, predicted, live)
        self.reach[live] = torch.maximum(self.reach[live], gap)
        self.turn[live] = torch.where(flip, turn, self.turn[live])
        return flip

    def close(self, n: int, weight: Tensor) -> Hit:
        """Of the walks of each of n samples the first that flipped, else the one with the best
        margin; of equals the first.
        """
        turns = self.turn.reshape(-1, n)
        every = torch.arange(n, device=self.y.device)
        turn = turns.amin(0)
        order = torch.where(turn < NEVER, -turns, self.best.value.reshape(-1, n))
        chosen = order.sort(dim=0, descending=True, stable=True).indices[0] * n + every
        pushed = weight[chosen].gather(1, torch.stack([self.predicted[chosen], self.y[chosen]], 1))
        return Hit(
            turn, self.best.points[chosen], self.reach.reshape(len(turns), n, -1).amax(0), pushed
        )


def _gaps(z: Tensor, y: Tensor) -> Tensor:
    """`theta_j - theta_y`, `(n, K)`, and -inf at the label and where it is NaN: there nothing
    was reached.
    """
    gap = (z - z.gather(1, y[:, None])).scatter(1, y[:, None], -math.inf)
    return torch.where(gap.isnan(), -math.inf, gap)
