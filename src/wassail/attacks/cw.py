"""The Carlini-Wagner attack for l2 (Carlini & Wagner, S&P 2017, arXiv 1608.04644)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.fmn import BISECTIONS, fitting
from wassail.attacks.minimal.run import find_flips
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import Objective, objective
from wassail.device import has_float64, take, wide
from wassail.errors import InputError
from wassail.geometry import clip, column, vector_norm
from wassail.network import Model
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Domain, Threat, parse_domain, parse_threat
from wassail.transport.distribution import Distribution, allocate

LARGEST_C = 1e10  # that is tried
STEPS_A_SEARCH = 50  # Adam steps a search should have where passes are limited


def cw(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    searches: int = 9,
    steps: int = 1000,
    rate: float = 0.01,
    c: float | None = None,
    target: Tensor | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """The nearest flips that Carlini and Wagner's l2 attack finds, and the budget of the threat
    allocated to them.

    Carlini and Wagner (2017), l2 only: Adam on `||x' - x||_2^2 + c max(z_y - max_{j != y} z_j, 0)`,
    with a binary search for the weight c of each sample. It looks for the nearest flip whatever eps
    is, so its flips serve every order and eps.

    Passes: the clean one and 1 backward, then for each step 1 forward and 1 backward; 10 to
    shorten.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        searches: int, searches for c; default 9, as in the paper.
        steps: int, Adam steps in each; default 1000 (the paper: 10,000).
        rate: float, Adam's learning rate; default 0.01.
        c: float, the first weight of the penalty (the paper: 0.001); default None, twice the least
            that flips a linear model.
        target: classes to be reached, integer tensor `(N,)`; default None, any wrong class.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, recorded only, since nothing here is random; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` whose weights come from the knapsack; its `flips` serve every other order and
        eps.
    """
    options = {"searches": searches, "steps": steps, "rate": rate, "c": c}
    threat = parse_threat(threat, own=True)
    flips = find_flips(
        cw_engine,
        "cw",
        model,
        x,
        y,
        threat.norm,
        threat.domain,
        target=target,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        options=options,
    )
    return allocate(flips, threat.eps, threat.order, mu)


def cw_engine(
    tracker: Tracker,
    tick: Tick,
    *,
    searches: int = 9,
    steps: int = 1000,
    rate: float = 0.01,
    c: float | None = None,
) -> None:
    """Adam on distance plus penalty, with a binary search for the weight c of the penalty, of each
    sample its own:

        minimise over w:  ||x' - x||_2^2 + c max(z_y - max_{j != y} z_j, 0),  z = theta(x'),  x' =
        tanh(w) mapped onto the box,

    distances in units of the box's width; without a box `x' = x + w`. Every search starts at the
    sample. The next c lies half way between the largest that failed and the smallest that flipped,
    in the last tenth of the steps, or is ten times larger where none has flipped yet; a sample
    whose c is known to 10 % is done. A search ends early for a sample whose lowest loss has not
    fallen by 0.01 % over a tenth of the steps. The paper's confidence is 0: the nearest flip is
    wanted, not a sure one.

    searches, steps: searches for c and Adam steps in each (the paper: 9 and 10,000); rate: Adam's
    learning rate. c: the first one (the paper: 0.001); by default twice `2 (z_y - max z_j) /
    ||grad||^2` at the sample, the least that flips a linear model, which spares the searches for
    its order of magnitude. Where passes are limited there are fewer steps, and fewer searches where
    they would have less than 50 each. Only for l2.

    Passes: the clean one and 1 backward, then for each step 1 forward and 1 backward; 10 to
    shorten.
    """
    if tracker.norm != 2:
        raise InputError(
            f"the Carlini-Wagner attack is for l2 and the norm is l{tracker.norm:g}: choose norm "
            "2, or FMN or FAB, which are for all norms."
        )
    if min(searches, steps) < 1 or not (0 < rate < math.inf and (c is None or 0 < c <= LARGEST_C)):
        raise InputError(
            f"searches={searches}, steps={steps}, rate={rate}, c={c}: give at least one search "
            "of one step, a positive rate "
            f"and a first c of at most {LARGEST_C:g}."
        )
    room = fitting(tracker, searches * steps)
    steps = min(steps, room // min(searches, max(room // STEPS_A_SEARCH, 1)))
    parse_domain(tracker.domain)  # its change of variables is for one box
    goal = objective(tracker, "margin")
    rows = tracker.rows
    rows = rows[tracker.affordable(rows, 2)]
    if not len(rows):
        tracker.execute_gradients(1, 2)
        return
    gap, weight = _gap(tracker, goal, tracker.clean[rows], rows)
    # Of the margin at the samples, where every search starts.
    gradient = tracker.start.pull(weight, rows)
    slope = vector_norm(wide(gradient) * _width(tracker.domain), 2)
    now = (
        (4 * gap.to(slope) / slope.square()).clamp(max=LARGEST_C)
        if c is None
        else torch.full_like(slope, c)
    )
    # without a gradient there is no way to go
    low = torch.where(slope > 0, 0.0, LARGEST_C)
    high = torch.full_like(now, math.inf)
    for search in range(searches):
        can = (_left(tracker, rows) >= 1) & (low < (0.9 * high).clamp(max=LARGEST_C)).to(
            rows.device
        )
        rows, gradient, now, low, high = (
            t[can.to(t.device)] for t in (rows, gradient, now, low, high)
        )
        if not len(rows):
            break
        flipped = _descend(tracker, rows, goal, gradient, now, steps, rate).to(now.device)
        low = torch.where(flipped, low, now)
        high = torch.where(flipped, now, high)
        now = torch.where(torch.isinf(high), 10 * now, (low + high) / 2).clamp(max=LARGEST_C)
        tick((search + 1) / searches)
    tracker.shorten(tracker.rows, BISECTIONS)


def _descend(
    tracker: Tracker,
    rows: Tensor,
    goal: Objective,
    gradient: Tensor,
    c: Tensor,
    steps: int,
    rate: float,
) -> Tensor:
    """One search from these n samples with weights c `(n,)`, gradient: of the margin there. Which
    ended flipped, bool `(n,)`.

    The last tenth of the steps decides: Adam's first steps have the length of its rate, and may
    flip whatever c is.
    """
    flipped = torch.zeros_like(rows, dtype=torch.bool)
    index = torch.arange(len(rows), device=rows.device)
    x = tracker.x[rows].contiguous()
    width = _width(tracker.domain)
    period = max(steps // 10, 10)
    w = _to_line(x, tracker.domain)
    mean = torch.zeros_like(x)
    square = torch.zeros_like(x)
    point = x
    slope = _to_box(w, x, tracker.domain)[1]
    c = c.to(x.device) if has_float64(x.device) else c.to(x)
    lowest = checked = torch.full_like(c, math.inf)
    for k in range(1, steps + 1):
        g = slope * (2 * (point - x) / width**2 - column(c, x) * gradient)
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * g * g
        w = w - rate * (mean / (1 - 0.9**k)) / ((square / (1 - 0.999**k)).sqrt() + 1e-8)
        point, slope = _to_box(w, x, tracker.domain)
        # The look here, the gradient and the next look; where they are not paid for, only a look.
        going = _left(tracker, rows) >= 3 if k < steps else torch.zeros_like(rows, dtype=torch.bool)
        end = (~going).nonzero()[:, 0]
        if len(end):
            _, flip = tracker.logits(point[end], rows[end])
            flipped[index[end]] |= flip
        rows, index, x, w, mean, square, point, slope, c, lowest, checked = take(
            going.nonzero()[:, 0], rows, index, x, w, mean, square, point, slope, c, lowest, checked
        )
        if not len(rows):
            break
        tape, flip = tracker.tape(point, rows)
        flipped[index] |= flip
        gap, weight = _gap(tracker, goal, tape.logits, rows)
        lowest = torch.minimum(
            lowest, vector_norm((point - x) / width, 2).square() + c * gap.clamp(min=0)
        )
        # Where the penalty is zero, so is its gradient.
        gradient = torch.where(column(gap > 0, x), tape.pull(weight), 0.0)
        stay = _left(tracker, rows) >= 1
        if k % period == 0:
            stay = stay & (lowest <= 0.9999 * checked)
            checked = lowest
        keep = stay.nonzero()[:, 0]
        if k % period == 0:
            flipped[index[keep]] = False
        rows, index, x, w, mean, square, point, slope, gradient, c, lowest, checked = take(
            keep, rows, index, x, w, mean, square, point, slope, gradient, c, lowest, checked
        )
    return flipped


def _gap(tracker: Tracker, goal: Objective, z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the margin has to rise for a flip at logits `(m, K)`, `(m,)`, and the margin's
    gradient, `(m, K)`.

    As in DeepFool the boundary is put at twice the flip tolerance: at a tie nothing counts as a
    flip yet.
    """
    value, weight = goal(z, rows)
    return tracker.network.need(z, rows, 2) - value, weight


def _left(tracker: Tracker, rows: Tensor) -> Tensor:
    """Passes left to these samples: one that has a flip keeps enough to shorten it."""
    return tracker.passes_left(rows) - BISECTIONS * torch.isfinite(tracker.distance[rows])


def _width(domain: Domain) -> float:
    return 1.0 if domain is None else domain[1] - domain[0]  # type: ignore[return-value]


def _to_line(x: Tensor, domain: Domain) -> Tensor:
    """The w with `_to_box(w) = x`, up to 1e-6 of the box's width: its faces lie at infinity.
    Without a box, 0.
    """
    if domain is None:
        return torch.zeros_like(x)
    t = (1 - 1e-6) * (2 * (x - domain[0]) / _width(domain) - 1)
    # torch.atanh rounds differently at different places of a batch.
    return (torch.log1p(t) - torch.log1p(-t)) / 2


def _to_box(w: Tensor, x: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """The point at w and its derivative by w, both of the shape of w: tanh mapped onto the box,
    `x + w` without one.
    """
    if domain is None:
        return x + w, torch.ones_like(w)
    t = torch.tanh(w)
    half = _width(domain) / 2
    return clip(domain[0] + half * (1 + t), domain), half * (1 - t * t)
