"""Semidefinite bounds on the Jacobians of a piecewise-linear network, in batches and without a
semidefinite solver.

Write `dz_h = d_h dv_h` with `d_h` in {0, 1} for the free neurons, `dv = A dx + B dz`, `dy = C dx +
D dz`. Each free neuron satisfies `dz_h (dv_h - dz_h) >= 0`, so for any multipliers `t` and weights
`w` for which

    S(w, t) = diag(w) (+) 0 - [C D]^T [C D] - sum_h t_h (p_h q_h^T + q_h p_h^T)  >= 0,    p_h = e_h,
    q_h = (A_h, B_h - e_h),

`|dy|^2 <= sum_i w_i dx_i^2` for every mask: `|J|_{2->2}^2 <= rho` with `w = rho 1`, and
`|J|_{inf->2}^2 <= sum_i w_i`. This is LipSDP-Neuron (Fazlyab et al. 2019, arXiv 1906.04893). The
other norms are maxima over rows or columns of these two, or these two for the transposed network.
Minimising is a convex problem with a self-concordant barrier whose Newton step is closed form,

    minimise  sum w / mu - log det S(w, t),     hess_hk = 2 (X_hk X_kh + (q_h' S^-1 q_k) (p_h' S^-1
    p_k)),  X = p' S^-1 q,

and fixing a neuron restricts S to a subspace, so the multipliers of a node of branch and bound are
feasible for its children.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates import clock
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.search.frontier import TensorRows
from wassail.rounding import UNIT

# relative: room for the final Cholesky to prove S >= 0 against its own rounding errors
INFLATE = 2e-10
PAIRS = 64  # entries of J that the 1 -> inf norm looks at one by one, unless told
# inputs from which on |dx|_inf <= 1 has no weight for each of them in the matrix, if told
STRETCHED_FROM_INPUTS = 100
SIGNS = 14  # outputs whose sign vectors the norms to 1 look at one by one, if told


@dataclass(frozen=True, eq=False)
class Reduced(TensorRows):
    """Networks with some neurons fixed, m at a time: `v = A x + B z + c`, `theta = C x + D z + e`,
    `z = relu(v)` where free.

    A `(m, H, n)`, B `(m, H, H)`, c `(m, H)`, C `(m, K, n)`, D `(m, K, H)`, free bool `(m, H)`. Rows
    of fixed neurons stay, so that their sides are constraints on `(x, z)`; columns of fixed neurons
    are zero.
    """

    A: Tensor
    B: Tensor
    c: Tensor
    C: Tensor
    D: Tensor
    free: Tensor

    def repeat(self, count: int) -> Reduced:
        """One network, several times (without copies)."""
        parts = (self.A, self.B, self.c, self.C, self.D, self.free)
        return Reduced(*(v.expand(count, *v.shape[1:]) for v in parts))


def reduce(network: Piecewise, state: Tensor) -> Reduced:
    """The networks on the sets where neurons have the states `(m, H)`: 1 active, 0 inactive, -1
    free.

    A free leaky neuron is written `slope v + (1 - slope) relu(v)`, so that every free neuron that
    is left is a plain ReLU.
    """
    m = len(state)
    n = network.inputs
    slope = torch.where(state == 1, 1.0, network.slope)
    column = torch.where(state < 0, 1 - network.slope, 0.0)[:, None, :]
    eye = torch.eye(network.neurons, dtype=torch.float64)
    parts = (network.A.expand(m, -1, -1), network.B * column, network.c.expand(m, -1)[..., None])
    right = torch.cat(parts, 2)
    rows = torch.linalg.solve_triangular(
        eye - network.B * slope[:, None, :], right, upper=False, unitriangular=True
    )
    weights = network.D * slope[:, None, :]
    return Reduced(
        rows[..., :n],
        rows[..., n:-1],
        rows[..., -1],
        network.C + weights @ rows[..., :n],
        network.D * column + weights @ rows[..., n:-1],
        state < 0,
    )


@dataclass(frozen=True, eq=False)
class Form:
    """A batch of `dv = A dx + B dz`, `dy = C dx + D dz` over the free neurons only: A `(m, F, n)`,
    B `(m, F, F)`, ...

    spread: whether `|dx|_inf <= 1` (one weight per input) rather than `|dx|_2 <= 1` (one weight for
    all).
    """

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    spread: bool

    @property
    def T(self) -> Form:
        """The transposed Jacobians: outputs in, inputs out."""
        return Form(self.D.mT, self.B.mT, self.C.mT, self.A.mT, self.spread)

    def take(self, rows: Tensor) -> Form:
        """Some members of the batch."""
        return Form(self.A[rows], self.B[rows], self.C[rows], self.D[rows], self.spread)

    def matrix(self, w: Tensor, t: Tensor) -> Tensor:
        """`S(w, t)`, `(m, n + F, n + F)`."""
        n = self.A.shape[2]
        out = torch.cat([self.C, self.D], 2)
        cross = t[..., None] * torch.cat([self.A, self.B], 2)
        s = -(out.mT @ out)
        s[:, n:] -= cross
        s[:, :, n:] -= cross.mT
        _diagonal(s)[:] += torch.cat([w.expand(-1, n), 2 * t], 1)
        return s


@dataclass(frozen=True)
class Split:
    """How a norm `r -> s` becomes bounds of `Form`s: which members there are and what the root of
    the bound is scaled by.

    kind: which parts of J the members are, and .T where they are transposed. Rows, columns, entries
    (member `i K + k` is `J_ki`), signs (`sigma^T J` for the sign vectors with `sigma_1 = 1`, coded
    in binary), or the whole.
    """

    members: int
    weights: int  # of each member
    factor: float
    kind: str
    # whether each row g is bounded through its stretched 2-norm, see `stretched`
    stretch: bool = False

    @property
    def part(self) -> str:
        """The kind without its transposition."""
        return self.kind.removesuffix(".T")

    def outputs(self, rows: Tensor, member: Tensor) -> Tensor:
        """What the members `(m,)` take of matrices `(m, K, ...)` with a row for each output:
        `(m, 1, ...)`, or all of it.
        """
        each = torch.arange(len(member))
        k = rows.shape[1]
        if self.part == "signs":
            bits = (member[:, None] >> torch.arange(k - 1)) & 1
            sigma = F.pad(1 - 2 * bits.to(rows.dtype), (1, 0), value=1.0)
            return sigma[:, None, :] @ rows
        if self.part in ("rows", "entries"):
            return rows[each, member % k][:, None]
        return rows

    def inputs(self, columns: Tensor, member: Tensor, k: int) -> Tensor:
        """What the members `(m,)` take of matrices `(m, ..., n)` with a column for each input;
        k: the number of outputs.
        """
        if self.part in ("columns", "entries"):
            column = member if self.part == "columns" else member // k
            return columns[torch.arange(len(member)), :, column][..., None]
        return columns

    def pick(self, reduced: Reduced, member: Tensor) -> Reduced:
        """Networks whose Jacobians are the members `(m,)` of those of `reduced`, one each."""
        k = reduced.C.shape[1]
        c = self.outputs(self.inputs(reduced.C, member, k), member)
        a = self.inputs(reduced.A, member, k)
        d = self.outputs(reduced.D, member)
        return Reduced(a, reduced.B, reduced.c, c, d, reduced.free)


def split(n: int, k: int, norm_in: float, norm_out: float, exact: bool = False) -> Split:
    """The members of the `norm_in -> norm_out` norm of Jacobians `(k, n)`; the norm is at most the
    largest of their bounds.

    exact: take as many members as it needs for the bound to be the norm itself once all neurons are
    fixed (for branch and bound); else 1 -> inf by rows if it has more than 64 entries, and to 1 by
    the sum of squares.
    """
    inf = math.inf
    if norm_in == 1 and norm_out == inf and n * k > PAIRS and not exact:
        norm_in = 2  # |J|_{1 -> inf} <= |J|_{2 -> inf}, by rows
    signs = exact and norm_in > 1 and norm_out == 1 and k <= SIGNS
    if exact and norm_in == inf and n > STRETCHED_FROM_INPUTS and (norm_out == inf or signs):
        members, kind = (2 ** (k - 1), "signs.T") if signs else (k, "rows.T")
        return Split(members, 1, 1.0, kind, True)
    if signs:
        weights, kind = (1, "signs.T") if norm_in == 2 else (n, "signs")
        return Split(2 ** (k - 1), weights, 1.0, kind)
    if norm_in == inf and norm_out == 1:
        if k <= n:
            return Split(1, n, math.sqrt(k), "whole")
        return Split(1, k, math.sqrt(n), "whole.T")
    table = {
        (2.0, 2.0): Split(1, 1, 1.0, "whole.T" if k < n else "whole"),
        (2.0, inf): Split(k, 1, 1.0, "rows.T"),
        (inf, inf): Split(k, n, 1.0, "rows"),
        (1.0, 2.0): Split(n, 1, 1.0, "columns"),
        (1.0, 1.0): Split(n, k, 1.0, "columns.T"),
        (1.0, inf): Split(n * k, 1, 1.0, "entries"),
        (inf, 2.0): Split(1, n, 1.0, "whole"),
        (2.0, 1.0): Split(1, k, 1.0, "whole.T"),
    }
    return table[norm_in, norm_out]


def forms(reduced: Reduced, how: Split, index: Tensor) -> Form:
    """All members of each network, `(m * members, ...)`, over the neurons `index` `(m, F)`;
    negative ones are padding.
    """
    rows = torch.arange(len(index)).repeat_interleave(how.members)
    many = reduced.repeat(how.members) if len(index) == 1 else reduced.take(rows)
    return gather(how.pick(many, torch.arange(how.members).repeat(len(index))), how, index[rows])


def gather(part: Reduced, how: Split, index: Tensor) -> Form:
    """The forms of members, one each (see `Split.pick`), over the neurons `index` `(m, F)`;
    negative ones are padding.
    """
    pad = index < 0
    order = index.clamp(min=0)
    a = part.A.gather(1, order[..., None].expand(-1, -1, part.A.shape[2])).masked_fill(
        pad[..., None], 0.0
    )
    b = part.B.gather(1, order[..., None].expand(-1, -1, part.B.shape[2]))
    b = b.gather(2, order[:, None, :].expand(-1, order.shape[1], -1)).masked_fill(
        pad[..., None] | pad[:, None, :], 0.0
    )
    d = part.D.gather(2, order[:, None, :].expand(-1, part.D.shape[1], -1)).masked_fill(
        pad[:, None, :], 0.0
    )
    form = Form(a, b, part.C, d, how.weights > 1)
    return form.T if how.kind.endswith(".T") else form


def stretched(part: Reduced, omega: Tensor) -> Reduced:
    """Networks with inputs `x_i / sqrt(omega_i)`, omega `(m, n)` positive: `|g|_1^2 <= sum(omega)
    sum_i g_i^2 / omega_i`.

    So a 2-norm of the stretched rows bounds the 1-norm, with equality where omega is proportional
    to `|g|`; unlike a weight for each input it leaves the matrix S as small as the number of
    neurons.
    """
    root = omega.sqrt()[:, None, :]
    return replace(part, A=part.A / root, C=part.C / root)


def balance(form: Form, w: Tensor, t: Tensor, omega: Tensor) -> Tensor:
    """The next omega: towards `omega_i ~ sqrt(E g_i^2)`, covariance `S^-1`, as far as `(w, t)`
    stays feasible. `(m, n)`.

    form: of the transposed members stretched by omega; the stationary points are those of the
    barrier function in omega.
    """
    factor, info = torch.linalg.cholesky_ex(form.matrix(w, t))
    out = torch.cat([form.C, form.D], 2)
    spread = torch.linalg.solve_triangular(factor, out.mT, upper=False).square().sum(1) * omega
    goal = spread.clamp(min=0).sqrt()
    goal = goal + 1e-3 * goal.mean(1, keepdim=True)  # no input is left with nothing
    goal = goal / goal.sum(1, keepdim=True)
    result = omega.clone()
    rows = ((info == 0) & goal.isfinite().all(1)).nonzero()[:, 0]
    for share in (1.0, 0.5, 0.25, 0.125):
        clock.look()
        trial = (1 - share) * omega[rows] + share * goal[rows]
        ratio = (omega[rows] / trial).sqrt()[:, :, None]
        some = form.take(rows)
        moved = replace(some, C=some.C * ratio, D=some.D * ratio)
        fits = torch.linalg.cholesky_ex(moved.matrix(w[rows], t[rows])).info == 0
        result[rows[fits]], rows = trial[fits], rows[~fits]
    return result


def start(form: Form, layer: Tensor, how: Split, room: float = 0.2) -> tuple[Tensor, Tensor]:
    """Feasible `(w, t)` for forms over the neurons of these layers `(F,)`: `(m, weights)`, `(m,
    F)`.

    Layers are eliminated from the output side, with equal multipliers within each: that gives the
    product of the layers' norms, and with exact Schur complements less (ECLipsE, Xu & Sivaranjani
    2024). With `M` the part of `-S` left on a layer, `t = |M|_2` makes its block `2 t - M >=
    |M|_2`; `room` keeps it inside.
    """
    m, f, n = form.A.shape
    out = torch.cat([form.C, form.D], 2)
    rows = torch.cat([form.A, form.B], 2)
    left = -(out.mT @ out)
    t = torch.zeros(m, f, dtype=torch.float64)
    rest = torch.arange(n + f)
    layers = sorted(set(layer.tolist()))
    for number in layers if how.kind.endswith(".T") else reversed(layers):
        clock.look()
        here = (layer == number).nonzero().flatten()
        block = left[:, n + here][:, :, n + here]
        size = (1 + room) * torch.linalg.eigvalsh(-block)[:, -1].clamp(min=0)
        size = size + 1e-9 * size.amax().clamp(min=1e-12)
        t[:, here] = size[:, None]
        rest = rest[~torch.isin(rest, n + here)]
        cross = left[:, n + here][:, :, rest] - size[:, None, None] * rows[:, here][:, :, rest]
        corner = left[:, rest][:, :, rest] - cross.mT @ torch.linalg.solve(
            2 * torch.diag_embed(t[:, here]) + block, cross
        )
        left = left.clone()
        left[:, rest[:, None], rest] = corner
    clock.look()
    top = torch.linalg.eigvalsh(-left[:, :n, :n])[:, -1].clamp(min=0)
    return (1.05 * top[:, None] + 1e-12).expand(-1, how.weights).clone(), t


def prove(form: Form, w: Tensor, t: Tensor) -> Tensor:
    """The bound on `|J|^2` that `(w, t)` proves in floating point, `(m,)`: `sum w` (spread) or `w`,
    and inf where it does not.

    S is formed with errors of `(N + K + 4) 2^-52` of the sum of magnitudes, entry by entry (K:
    outputs), and a Cholesky factor that exists is exact for a matrix `(N + 1) 2^-52 trace` away
    (Higham 2002, theorem 10.3): once S is scaled to magnitudes of 1 on its diagonal, both are taken
    off that diagonal first.
    """
    w = w * (1 + INFLATE)
    s = form.matrix(w, t)
    size = s.shape[-1]
    out = torch.cat([form.C, form.D], 2).abs()
    n = form.A.shape[2]
    absolute = Form(-form.A.abs(), -form.B.abs(), out[..., :n], out[..., n:], form.spread)
    magnitude = absolute.matrix(w, t) + 2 * out.mT @ out
    scale = _diagonal(magnitude).clamp(min=1e-300).rsqrt()  # definiteness survives a congruence
    s, magnitude = (v * scale[:, :, None] * scale[:, None, :] for v in (s, magnitude))
    slack = (size + out.shape[1] + 4) * UNIT * (magnitude.sum(2).amax(1) + size)
    _diagonal(s)[:] -= slack[:, None]
    failed = torch.linalg.cholesky_ex(s).info != 0
    return (w.sum(1) * (1 + size * UNIT)).masked_fill(failed, math.inf)


def tighten(
    form: Form, w: Tensor, t: Tensor, target: Tensor, steps: int, gap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Damped Newton on the barrier from a feasible `(w, t)`; rows stop early once they reach
    `target` `(m,)`.

    gap: the barrier weight mu, given as the relative distance `(n + F) mu / sum w` of its minimiser
    from the best bound. Returns the proved bound on `|J|^2` `(m,)` (inf where the start was not
    feasible in floating point), the last `(w, t)`, and the score `(m, F)` of each neuron: `t_h`
    times how far it is from the one side or the other in the relaxed worst case, `max(E dz_h^2, E
    (dv_h - dz_h)^2)` with covariance `S^-1`. Padded neurons (zero rows of A and B) keep their `t`.
    When the time is up the best so far is proved.
    """
    w, t, score = w.clone(), t.clone(), torch.zeros_like(t)
    size = form.A.shape[1] + form.A.shape[2]
    best = torch.full_like(target, math.inf)
    best_w = w.clone()
    best_t = t.clone()
    rows = (torch.linalg.cholesky_ex(form.matrix(w, t)).info == 0).nonzero()[:, 0]
    with suppress(clock.Late):
        for step in range(steps + 1):
            if not len(rows):
                break
            here = _Iterate.at(form.take(rows), w[rows], t[rows])
            scaled = here.smallest()
            value = scaled.sum(1)
            better = value < best[rows]
            now = rows[better]
            best[now], best_w[now], best_t[now] = value[better], scaled[better], here.t[better]
            score[rows] = here.t * torch.maximum(_diagonal(here.pp), _diagonal(here.qq))
            left = value > target[rows]
            rows = rows[left]
            if step < steps and len(rows):
                w[rows], t[rows] = (here if left.all() else here.take(left)).descend(gap / size)
    return prove(form, best_w, best_t), w, t, score


@dataclass(frozen=True, eq=False)
class _Iterate:
    """A feasible `(w, t)` with the Cholesky factor and inverse of S and the products `S^-1 q`,
    `p' S^-1 p`, `q' S^-1 q`.
    """

    form: Form
    w: Tensor
    t: Tensor
    factor: Tensor
    inverse: Tensor
    wq: Tensor
    pp: Tensor
    qq: Tensor

    @classmethod
    def at(cls, form: Form, w: Tensor, t: Tensor) -> _Iterate:
        n = form.A.shape[2]
        clock.look()
        factor = torch.linalg.cholesky_ex(form.matrix(w, t)).L
        inverse = torch.cholesky_inverse(factor)
        clock.look()
        q = torch.cat([form.A, form.B - torch.eye(form.A.shape[1], dtype=torch.float64)], 2)
        wq = inverse @ q.mT
        return cls(form, w, t, factor, inverse, wq, inverse[:, n:, n:], q @ wq)

    def take(self, keep: Tensor) -> _Iterate:
        """Some rows, by a bool mask."""
        parts = (self.w, self.t, self.factor, self.inverse, self.wq, self.pp, self.qq)
        return _Iterate(self.form.take(keep), *(v[keep] for v in parts))

    def smallest(self) -> Tensor:
        """The smallest multiple of w that is feasible with this t, by Schur complement: `1 - 1
        / |w^1/2 (S^-1)_xx w^1/2|`.
        """
        n = self.form.A.shape[2]
        root = self.w.expand(-1, n).sqrt()
        inner = root[:, :, None] * self.inverse[:, :n, :n] * root[:, None, :]
        clock.look()
        largest = inner[:, 0, 0] if n == 1 else torch.linalg.eigvalsh(inner)[:, -1]
        return self.w * (1 - 1 / largest)[:, None]

    def descend(self, mu: float) -> tuple[Tensor, Tensor]:
        """The next `(w, t)`: a Newton step of `sum w / (mu sum w_now) - log det S`, halved
        until it falls as promised.
        """
        price = 1 / (mu * self.w.sum(1))
        dw, dt, decrement = self.newton(price)
        value = price * self.w.sum(1) - 2 * _diagonal(self.factor).log().sum(1)
        size = torch.ones_like(price)
        rows = torch.arange(len(price))
        for _ in range(12):
            clock.look()
            w = self.w[rows] + size[rows, None] * dw[rows]
            t = self.t[rows] + size[rows, None] * dt[rows]
            factor, info = torch.linalg.cholesky_ex(self.form.take(rows).matrix(w, t))
            after = price[rows] * w.sum(1) - 2 * _diagonal(factor).log().sum(1)
            promised = value[rows] - size[rows] * decrement[rows] / 4 + 1e-9 * value[rows].abs()
            rows = rows[~((info == 0) & (after <= promised) & (w > 0).all(1))]
            if not len(rows):
                break
            size[rows] /= 2
        size[rows] = 0.0  # no step helps: stay
        return self.w + size[:, None] * dw, self.t + size[:, None] * dt

    def newton(self, price: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The Newton step `(dw, dt)` of `price sum w - log det S` and its squared decrement
        `(m,)`.
        """
        form = self.form
        n = self.form.A.shape[2]
        pq = self.wq[:, self.form.A.shape[2] :]
        xx = self.inverse[:, :n, :n]
        hess_w = xx.square()
        hess_wt = -2 * self.inverse[:, :n, n:] * self.wq[:, :n]
        grad_w = _diagonal(xx)
        if not form.spread:  # one weight for all inputs
            parts = (hess_w.sum(2, keepdim=True), hess_wt, grad_w)
            hess_w, hess_wt, grad_w = (v.sum(1, keepdim=True) for v in parts)
        top = torch.cat([hess_w, hess_wt], 2)
        hess = torch.cat([top, torch.cat([hess_wt.mT, 2 * (pq * pq.mT + self.pp * self.qq)], 2)], 1)
        pinned = (form.A == 0).all(2) & (form.B == 0).all(2)
        keep = torch.cat([torch.ones_like(grad_w), (~pinned).double()], 1)
        grad = torch.cat([price[:, None] - grad_w, 2 * _diagonal(pq)], 1) * keep
        hess = hess * keep[:, :, None] * keep[:, None, :] + torch.diag_embed(1 - keep)
        # Jacobi scaling: multipliers differ by magnitudes
        scale = _diagonal(hess).clamp(min=1e-300).rsqrt()
        clock.look()
        scaled = hess * scale[:, :, None] * scale[:, None, :]
        step = -scale * torch.linalg.solve_ex(scaled, scale * grad).result
        # a singular Hessian gives no step
        step = step.nan_to_num(0.0, 0.0, 0.0)
        weights = grad_w.shape[1]
        return step[:, :weights], step[:, weights:], -(step * grad).sum(1)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)
