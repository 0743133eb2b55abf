"""The semidefinite rung of the ladder: LipSDP-Neuron on a whole network, from a start that is already below the product bound.

`multipliers` has the bound and its Newton steps. Here: a feasible start by eliminating layers one after the other (for equal
multipliers in a layer this gives the product of the layers' norms, and with exact Schur complements less: Xu & Sivaranjani 2024,
ECLipsE), a schedule, and a bound that is proved by a Cholesky factor whatever the iteration did.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from wassail.certificates.multipliers import Form, forms, prove, reduce, split, tighten
from wassail.certificates.piecewise import Piecewise

GAPS = (0.3, 0.1, 0.03, 0.01)  # relative distance of the barrier's minimiser from the bound
MOST = 1200  # neurons: one Newton step at this size takes seconds


def semidefinite(network: Piecewise, norm_in: float, norm_out: float, time_limit: float = math.inf) -> float:
    """An upper bound on `||J||_{r -> s}` on every set where only the neurons of this network change sides; inf if none.

    Members (rows, columns: see `multipliers.split`) are handled from the largest start down, each only until it is below the
    largest value so far.
    """
    deadline = time.monotonic() + time_limit
    if network.neurons > MOST:
        return math.inf
    reduced = reduce(network, torch.full((1, network.neurons), -1))
    how = split(network.inputs, network.outputs, norm_in, norm_out)
    form = forms(reduced, how, torch.arange(network.neurons)[None])
    if network.neurons == 0:
        weights = torch.zeros(len(form.A), 0, dtype=torch.float64)
        return how.factor * math.sqrt(float(_proved(form, *_finish(form, weights, how.weights)).max()))
    w, t = start(form, network.layer, how.weights, how.kind.endswith(".T"))
    value = prove(form, w, t)
    done = torch.zeros(len(value), dtype=torch.bool)
    while not done.all() and time.monotonic() < deadline:
        worst = int(torch.where(done, -math.inf, value).argmax())
        settled = float(value[done].max()) if done.any() else 0.0
        if value[worst] <= settled:
            break
        value[worst] = _settle(form.take(torch.tensor([worst])), w[worst, None], t[worst, None], value[worst], settled, deadline)
        done[worst] = True
    return how.factor * math.sqrt(float(value.max())) * (1 + 2.0**-50)


def _settle(form: Form, w: Tensor, t: Tensor, value: Tensor, enough: float, deadline: float) -> Tensor:
    """Newton with a shrinking barrier until the proved bound stops falling, is `enough`, or time is up."""
    for gap in GAPS:
        before = value
        for _ in range(6):
            if time.monotonic() > deadline or value <= enough:
                return value
            last = w.sum()
            _, w, t, _ = tighten(form, w, t, torch.full((1,), enough, dtype=torch.float64), 3, gap)
            if (last - w.sum()).abs() < 0.1 * gap * w.sum():
                break
        value = torch.minimum(value, _proved(form, w, t)[0])
        if gap < 0.1 and before - value < 1e-3 * before:
            break
    return value


def _proved(form: Form, w: Tensor, t: Tensor) -> Tensor:
    """The bound of the smallest multiple of `w` that a Cholesky factor proves with this `t`, to about 1e-6: `(m,)`."""
    best = prove(form, w, t)
    low, high = torch.zeros(len(w), dtype=torch.float64), torch.ones(len(w), dtype=torch.float64)
    for _ in range(20):
        middle = (low + high) / 2
        value = prove(form, w * middle[:, None], t)
        proved = torch.isfinite(value)
        best = torch.minimum(best, value)
        low, high = torch.where(proved, low, middle), torch.where(proved, middle, high)
    return best


def start(form: Form, layer: Tensor, weights: int, transposed: bool, room: float = 0.2) -> tuple[Tensor, Tensor]:
    """Feasible `(w, t)`, `(m, weights)` and `(m, F)`: layers eliminated from the output side, equal multipliers within each.

    With `M` the part of `-S` left on a layer, `t = |M|_2` makes its block `2 t - M >= |M|_2`; `room` keeps it inside.
    """
    m, f, n = form.A.shape
    out, rows = torch.cat([form.C, form.D], 2), torch.cat([form.A, form.B], 2)
    left = -(out.mT @ out)
    t = torch.zeros(m, f, dtype=torch.float64)
    rest = torch.arange(n + f)
    layers = range(int(layer.max()) + 1)
    for number in layers if transposed else reversed(layers):
        here = (layer == number).nonzero().flatten()
        block = left[:, n + here][:, :, n + here]
        size = (1 + room) * torch.linalg.eigvalsh(-block)[:, -1].clamp(min=0)
        size = size + 1e-9 * size.amax().clamp(min=1e-12)
        t[:, here] = size[:, None]
        rest = rest[~torch.isin(rest, n + here)]
        cross = left[:, n + here][:, :, rest] - size[:, None, None] * rows[:, here][:, :, rest]
        corner = left[:, rest][:, :, rest] - cross.mT @ torch.linalg.solve(2 * torch.diag_embed(t[:, here]) + block, cross)
        left = left.clone()
        left[:, rest[:, None], rest] = corner
    return _finish(form, t, weights, left[:, :n, :n])


def _finish(form: Form, t: Tensor, weights: int, left: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Equal weights `w` above the largest eigenvalue of what the layers leave on the input."""
    left = -(form.C.mT @ form.C) if left is None else left
    top = torch.linalg.eigvalsh(-left)[:, -1].clamp(min=0)
    return (1.05 * top[:, None] + 1e-12).expand(-1, weights).clone(), t
