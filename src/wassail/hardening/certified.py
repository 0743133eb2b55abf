"""An upper bound on the worst expected loss of a batch over a Wasserstein ball, by intervals.

It is differentiable in the weights: a loss for certified training. It is not rounded outward, so
what it says of a trained model is checked by `radii` or `loss_curve`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wassail.checks import check_data
from wassail.errors import InputError, unknown
from wassail.geometry import column
from wassail.hardening.price import ERRORS, Price, balls, batch_price, dual, error, wrongness
from wassail.hardening.robust import check_generator, check_price, checked_reach
from wassail.threat import Threat, parse_domain
from wassail.threat import dual as dual_norm

Box: TypeAlias = "tuple[Tensor, Tensor]"  # middles and half widths
LOSSES = ("cross_entropy", "margin", *ERRORS)
REACH = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # radii of the balls, in units of eps


def certified_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    loss: str = "cross_entropy",
    price: Price | None = None,
    reach: Sequence[float] = REACH,
    generator: torch.Generator | None = None,
) -> Tensor:
    """An upper bound on the worst expected loss of a batch over `Omega_p(eps)`, differentiable.

    On balls of several radii the loss is bounded by intervals; the budget is shared between the
    samples by the dual, which holds for every price:

        lam eps^p + mean_i max_k [bound_i(radius_k) - lam radius_(k-1)^p].

    The last ball is the whole box.

    `loss="error"` bounds the share of wrong answers, one minus the accuracy. A sample of certified
    radius `r` loses at most `max(0, 1 - lam r^p)`: the share of the balls of radius
    `(u / lam)^(1/p)`, `u` uniform in 0 to 1, that are not proved. The bound on cross entropy, in
    bits, is at least 1 where a ball is not proved. No ball is larger than `lam^(-1/p)`, so
    intervals stay useful. With a `generator` each sample has one ball, drawn for this call: the
    value is then no bound but an estimate of one, whose mean over the draws is a bound, at the cost
    of one ball. `loss="chance"` bounds the same with twice the probability of the other classes in
    place of the bits: never above 2 for a sample, so that one that cannot be proved stops pulling.

    >>> import torch, wassail as ws
    >>> model, (x, y) = ws.zoo.load("digits-mlp"), ws.zoo.data("digits")
    >>> threat = ws.Threat(norm="inf", order=1, eps=0.01)
    >>> upper = ws.certified_loss(model, x[:50], y[:50], threat)
    >>> bool(upper >= ws.robust_loss(model, x[:50], y[:50], threat))
    True

    Args:
        model: `nn.Sequential` of linear, convolutional, batch-norm, pooling, flatten, ReLU and
            leaky ReLU layers, the last one linear.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        threat: `Threat`: norm, order, eps and domain; a finite order needs a box unless the loss is
            "error" or "chance".
        loss: "cross_entropy" (the default), "margin", "error" or "chance".
        price: `Price` that is kept between batches; default None, the price of this batch alone
            ("error" and "chance": `(3 eps)^-p`).
        reach: radii in units of eps, increasing; order inf: only 1; "error" and "chance": not used.
        generator: `torch.Generator` on the CPU that draws one ball for each sample; default None,
            all balls. Only for "error" and "chance".
    """
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    check_generator(generator, loss)
    check_price(price)
    radii = checked_reach(reach, threat)
    x, y = check_data(x, y, parse_domain(threat.domain))
    layers = list(layers_of(model))
    if loss in ERRORS:
        return _error(layers, x, y, threat, loss, price, generator)
    if threat.order == math.inf:
        return _bound(layers, x, y, threat, radii[0], loss).mean()
    if threat.domain is None:
        raise InputError(
            "at a finite order a sample may go anywhere: give the threat a domain, the box of the "
            "inputs."
        )
    if threat.norm == math.inf:  # larger balls are the whole box
        width = threat.domain[1] - threat.domain[0]
        radii = [radius for radius in radii if radius < width]
    bounds = [_bound(layers, x, y, threat, radius, loss) for radius in (0.0, *radii, math.inf)]
    values = torch.stack(bounds, 1)
    starts = torch.tensor([0.0, 0.0, *radii], dtype=values.dtype, device=values.device)
    costs = starts**threat.order
    budget = threat.eps**threat.order
    if price is None:
        used = batch_price(values, costs, budget)
    else:
        used = price.of(values.detach(), costs, budget)
    return dual(values, costs, budget, used)


def _error(
    layers: list[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    loss: str,
    price: Price | None,
    generator: torch.Generator | None,
) -> Tensor:
    """`lam eps^p + mean_i mean_u wrongness_i`: in all balls of a grid, or in one each."""
    if threat.order == math.inf:
        bound = _bound(layers, x, y, threat, threat.eps, "cross_entropy")
        return wrongness(bound, loss).mean()
    used, parts = balls(len(x), threat, price, generator)
    radii = ((parts / used) ** (1 / threat.order)).to(x)
    rows = [_bound(layers, x, y, threat, radius, "cross_entropy") for radius in radii]
    return error(wrongness(torch.stack(rows), loss), parts, threat, used, price)


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested sequences, in order; what changes nothing is left out."""
    if isinstance(model, nn.Sequential):
        for part in model:
            yield from layers_of(part)
    elif isinstance(model, nn.Dropout) and model.training:
        raise InputError("a dropout layer in training mode is random: call model.eval() first.")
    elif not isinstance(model, nn.Identity | nn.Dropout):
        yield model


def _bound(
    layers: list[nn.Module], x: Tensor, y: Tensor, threat: Threat, radius: float | Tensor, loss: str
) -> Tensor:
    """Upper bounds on the loss on one ball around each sample, `(N,)`.

    The radius is one number or a tensor `(N,)`, one for each sample.
    """
    if not layers or not isinstance(layers[-1], nn.Linear):
        raise InputError(
            "certified_loss needs an nn.Sequential whose last layer is nn.Linear: give the model "
            "in that form."
        )
    box = _start(x, threat, radius)
    center: Tensor | None = None
    if threat.norm != math.inf and (isinstance(radius, Tensor) or math.isfinite(radius)):
        center = x
    for layer in layers[:-1]:
        box, center = _through(layer, box, center, threat.norm, radius)
    # margins z_k - z_y: one linear layer with the last one
    last = layers[-1]
    weight = last.weight[None] - last.weight[y][:, None]
    offset = 0.0 if last.bias is None else last.bias[None] - last.bias[y][:, None]
    middle, half = box
    upper = _product(weight, middle) + _product(weight.abs(), half) + offset
    if center is not None:
        size = torch.linalg.vector_norm(weight, ord=dual_norm(threat.norm), dim=2)
        reach = column(radius, size) * size
        upper = torch.minimum(upper, _product(weight, center) + offset + reach)
    own = F.one_hot(y, upper.shape[1]).bool()
    upper = upper.masked_fill(own, 0.0)
    if loss == "cross_entropy":
        return upper.logsumexp(1)
    return upper.masked_fill(own, -math.inf).amax(1)


def _start(x: Tensor, threat: Threat, radius: float | Tensor) -> tuple[Tensor, Tensor]:
    """The box around each sample: middles and half widths."""
    width = column(radius, x)
    low = x - width
    high = x + width
    if threat.domain is not None:
        low = low.clamp(*threat.domain)
        high = high.clamp(*threat.domain)
    return (low + high) / 2, (high - low) / 2


def _product(weight: Tensor, values: Tensor) -> Tensor:
    """`(N, K, d)` times `(N, d)`."""
    return (weight @ values[..., None])[..., 0]


def _through(
    layer: nn.Module, box: Box, center: Tensor | None, norm: float, radius: float | Tensor
) -> tuple[Box, Tensor | None]:
    """A box through one layer.

    `center` is the sample as long as only moves came before: then the first layer with weights
    sees the ball itself. A neuron moves by the radius times the dual norm of its weights, or by its
    box, whichever is less.
    """
    middle, half = box
    if isinstance(layer, nn.Flatten | nn.Unflatten):
        moved = None if center is None else layer(center)
        return (layer(middle), layer(half)), moved
    after = layer_box(layer, middle, half)
    if center is None or not isinstance(layer, nn.Linear | nn.Conv2d):
        return after, None
    size = torch.linalg.vector_norm(layer.weight.flatten(1), ord=dual_norm(norm), dim=1)
    size = size[:, None, None] if isinstance(layer, nn.Conv2d) else size
    value = layer(center)
    reach = column(radius, value) * size
    low = torch.maximum(after[0] - after[1], value - reach)
    high = torch.minimum(after[0] + after[1], value + reach)
    return ((low + high) / 2, (high - low) / 2), None


def layer_box(layer: nn.Module, middle: Tensor, half: Tensor) -> Box:
    """Middles and half widths after one layer."""
    if isinstance(layer, nn.Linear):
        return layer(middle), F.linear(half, layer.weight.abs())
    if isinstance(layer, nn.Conv2d):
        return layer(middle), _convolution(layer, half)
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return layer(middle), half * _factor(layer, middle)
    if isinstance(layer, nn.AvgPool2d):
        return layer(middle), layer(half)
    if isinstance(layer, nn.ReLU | nn.MaxPool2d) or (
        isinstance(layer, nn.LeakyReLU) and layer.negative_slope >= 0
    ):  # increasing: its ends are the ends' values
        low = layer(middle - half)
        high = layer(middle + half)
        return (low + high) / 2, (high - low) / 2
    raise InputError(
        f"certified_loss does not know the layer {type(layer).__name__}: use linear, "
        "convolutional, batch-norm, pooling, flatten, ReLU and leaky ReLU layers."
    )


def _convolution(layer: nn.Conv2d, half: Tensor) -> Tensor:
    """Half widths after a convolution."""
    if layer.padding_mode != "zeros":
        raise InputError("certified_loss knows convolutions that pad with zeros: change the layer.")
    return F.conv2d(
        half, layer.weight.abs(), None, layer.stride, layer.padding, layer.dilation, layer.groups
    )


def _factor(layer: nn.BatchNorm1d | nn.BatchNorm2d, like: Tensor) -> Tensor:
    """What a batch norm in eval mode multiplies half widths by."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        raise InputError("a batch norm in training mode mixes samples: call its eval() first.")
    factor = (layer.running_var + layer.eps).rsqrt()
    if layer.weight is not None:
        factor = factor * layer.weight
    return factor.abs().view((1, -1) + (1,) * (like.ndim - 2))
