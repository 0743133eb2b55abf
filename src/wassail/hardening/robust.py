"""The worst expected loss of a batch over a Wasserstein ball, climbed; a loss to train with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wassail.checks import check_data
from wassail.errors import InputError, instance, unknown
from wassail.geometry import distances, steepest
from wassail.hardening.price import ERRORS, Price, allocated, balls, dual, error, wrongness
from wassail.losses import cross_entropy, margin
from wassail.network import Model
from wassail.threat import Threat, parse_threat, whole

LOSSES = {"cross_entropy": cross_entropy, "margin": margin}
NAMES = (*LOSSES, "kl", *ERRORS)
REACH = (1.0, 2.0, 4.0)  # how far single samples may go, in units of eps
WEIGHT = 6.0  # of "kl", as in TRADES


def robust_loss(
    model: Model,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    loss: str = "cross_entropy",
    price: Price | None = None,
    reach: Sequence[float] = REACH,
    steps: int = 2,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The worst expected loss of a batch over `Omega_p(eps)`, as far as a few steps find it.

    By the dual: `lam eps^p + mean_i max_x' [loss(x') - lam d(x, x')^p]`. For each sample a path of
    points leads outward, at the distances `reach`; the price lam shares the budget between the
    samples. The value is differentiable in the weights: the points are held fixed, as in
    adversarial training.

    `loss="kl"` is cross entropy at the sample and 6 times the divergence of what the model says at
    `x'` from what it says at `x`, as in TRADES (Zhang et al. 2019).

    `loss="error"` stands for the share of wrong answers. A flip at distance `r` gains
    `max(0, 1 - lam r^p)`: the share of the balls of radius `(u / lam)^(1/p)`, `u` uniform in 0 to
    1, that have it inside. Each ball is climbed, and cross entropy in bits is at least 1 where it
    finds a flip. With a `generator` each sample has one ball, drawn for this call.

    `loss="chance"` is the same with twice the probability of the other classes in place of the
    bits. It is also at least 1 at a flip, and never above 2: a sample that cannot be kept stops
    pulling, so that less clean accuracy is lost. It is flat where a model is far off: start from a
    trained one.

    >>> import torch, wassail as ws
    >>> model, (x, y) = ws.zoo.load("digits-mlp"), ws.zoo.data("digits")
    >>> threat = ws.Threat(norm="inf", order=1, eps=0.05)
    >>> clean = torch.nn.functional.cross_entropy(model(x[:50]), y[:50])
    >>> bool(ws.robust_loss(model, x[:50], y[:50], threat) > clean)
    True

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`; its mode is left as it is.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        threat: `Threat`: norm, order, eps and domain.
        loss: "cross_entropy" (the default), "margin", "kl", "error" or "chance".
        price: `Price` that is kept between batches; default None, the price of this batch alone
            ("error" and "chance": `(3 eps)^-p`).
        reach: distances in units of eps at which points are kept, increasing; order inf: only 1;
            "error" and "chance": not used.
        steps: passes with gradients for each distance; default 2.
        generator: `torch.Generator` on the CPU that draws one ball for each sample; default None,
            several balls. Only for "error" and "chance".
    """
    if loss not in NAMES:
        raise unknown("loss", loss, NAMES)
    whole(steps, "steps")
    check_price(price)
    radii = checked_reach(reach, threat)
    check_generator(generator, loss)
    x, y = check_data(x, y, threat.domain)
    if loss in ERRORS:
        return _error(model, x, y, threat, loss, price, steps, generator)
    # the divergence is flat at the sample itself: its points are climbed by cross entropy
    points = _path(model, x, y, threat, LOSSES.get(loss, cross_entropy), radii, steps)
    logits = model(torch.cat([x, *points]))
    values = _values(logits, y, loss)
    if threat.order == math.inf:
        return values.amax(1).mean()
    lengths = [distances(point, x, threat.norm).to(values) for point in points]
    costs = torch.stack([torch.zeros_like(lengths[0]), *lengths], 1) ** threat.order
    budget = threat.eps**threat.order
    if price is None:
        return allocated(values, costs, budget)
    return dual(values, costs, budget, price.of(values.detach(), costs, budget))


def _values(logits: Tensor, y: Tensor, loss: str) -> Tensor:
    """Losses at the samples and at the points after them, `(N, points + 1)`."""
    n = len(y)
    if loss != "kl":
        return LOSSES[loss](logits, y.repeat(len(logits) // n)).view(-1, n).t()
    said = logits.log_softmax(1).view(-1, n, logits.shape[1])
    apart = (said[:1].exp() * (said[:1] - said)).sum(2)
    return (cross_entropy(logits[:n], y) + WEIGHT * apart).t()


def _error(
    model: Model,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    loss: str,
    price: Price | None,
    steps: int,
    generator: torch.Generator | None,
) -> Tensor:
    """`lam eps^p + mean_i mean_u wrongness_i` at points that were climbed to in balls (`balls`)."""
    if threat.order == math.inf:
        points = _path(model, x, y, threat, cross_entropy, [threat.eps], steps)
        return wrongness(cross_entropy(model(points[0]), y), loss).mean()
    used, parts = balls(len(x), threat, price, generator)
    radii = list(((parts / used) ** (1 / threat.order)).to(x))
    points = _path(model, x, y, threat, cross_entropy, radii, steps)
    rows = cross_entropy(model(torch.cat(points)), y.repeat(len(points))).view(len(points), -1)
    return error(wrongness(rows, loss), parts, threat, used, price)


def check_price(price: Price | None) -> None:
    """A price that is kept between batches, or one sentence."""
    if price is not None:
        instance(price, Price, "price is", "one for the whole training: price = ws.Price()")


def check_generator(generator: torch.Generator | None, loss: str) -> None:
    """Balls are drawn for the error only, or one sentence."""
    if generator is not None and loss not in ERRORS:
        raise InputError(
            f'a generator draws balls, which loss="{loss}" has none of: use loss="error" or leave '
            "the generator out."
        )


def checked_reach(reach: Sequence[float], threat: Threat) -> list[float]:
    """Distances in units of the input, or one sentence; the threat is looked at, too."""
    if parse_threat(threat).order == math.inf:
        return [threat.eps]
    factors = [float(factor) for factor in reach]
    if not factors or factors[0] <= 0 or sorted(set(factors)) != factors:
        raise InputError(f"reach is {tuple(reach)}: give increasing positive numbers, (1, 2, 4).")
    return [factor * threat.eps for factor in factors]


def _path(
    model: Model,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    loss: Callable[[Tensor, Tensor], Tensor],
    radii: Sequence[float | Tensor],
    steps: int,
) -> list[Tensor]:
    """A point at most each distance away, each climbed from the one before.

    A step goes toward the point of the ball that the gradient likes best, all the way at first,
    then half of it: it never leaves ball or box, which are convex.
    """
    point = x
    found = []
    for radius in radii:
        for step in range(steps):
            with torch.enable_grad():
                at = point.detach().requires_grad_(True)
                value = loss(model(at), y).sum()
                (gradient,) = torch.autograd.grad(value, at)
            best = x + steepest(x, gradient, threat.norm, radius, threat.domain)
            point = best if step == 0 else (point + best) / 2
            point = point.detach()
        found.append(point)
    return found
