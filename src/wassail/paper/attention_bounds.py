"""Self-attention: how steep it can be, on a ball, on a box and at one input; upper bounds rounded
up, and real points below.

One head on tokens `x_1 ... x_n` (rows of `X`, `(n, d)`) with queries `Q x_i + b_q`, keys `K x_j +
b_k` and values `V x_j`:

    f_i = V m_i,   m_i = sum_j P_ij x_j,   P_ij = softmax_j <x_j, y_i>,   y_i = A x_i + u,   A = K^T
    Q / sqrt(d_head),

with `u = K^T b_q / sqrt(d_head)`. The key bias is not there because it changes nothing: the score
is `<K x_j + b_k, Q x_i + b_q> / sqrt(d_head) = <x_j, y_i> + (a number that does not depend on j)`,
and a softmax does not see what is added to a whole row. The bias of the values is added to every
output, since rows of `P` sum to 1. Masks, and biases of relative position, are constants `mask`
`(n, n)` added to the scores, -inf where a token may not look. The derivative has blocks

    J_ij = V ( P_ij (I + (x_j - m_i) y_i^T) + [i = j] S_i A ),   S_i = sum_j P_ij (x_j - m_i)(x_j -
    m_i)^T,

three terms: `P (x) V`; the operator `T: D -> (V W_i D y_i)_i` with `W_i = [P_ij (x_j - m_i)]_j`
`(d, n)`; and `diag(V S_i A)`. All norms are Euclidean (spectral), all tensors float64.

What the bounds rest on, with `p` a row of `P`, `s^2 = sum_j p_j |x_j - m|^2` and `q_j = p_j |x_j -
m|^2 / s^2`:

1. `|T| <= |diag(t) Y|` with `t_i = |V W_i|`: `T` is `D -> (D t_i y_i)_i`, of norm `|diag(t) Y|`,
   then `V W_i / t_i` on part i.
2. `q_j <= 1 - p_j`: from `p_j (x_j - m) = - sum_{k != j} p_k (x_k - m)` and Cauchy-Schwarz.
3. So `sum_j p_j^2 + |W|_F^2 / s^2 = sum_j p_j (p_j + q_j) <= 1`, and `|W|_F^2 <= s^2 / 2`: `sum_j
   p_j q_j` is largest when all q is on the two likeliest tokens, and then at most `2 p (1 - p)`.
4. `s^2 <= R^2 - |m|^2` and `|S_i| <= s^2` for tokens in a ball of radius `R` around 0.

The paper's constant, `castin`, stands beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.rounding import UNIT

UP = 1 + 128 * UNIT  # room for the few dozen operations on single numbers at the end of each bound


def spectral(matrix: Tensor) -> Tensor:
    """An upper bound on the largest singular value of `(..., p, q)`: `(...)`.

    By the eigenvalues of the smaller Gram matrix. Forming it and the (backward stable) eigenvalues
    move the largest one by less than `(p + q + 8) 2^-51` times the sum of all squares. Entries are
    first divided by the power of two below the largest: then no square that counts underflows, and
    none overflows. Infinite where an entry is not finite.
    """
    p, q = matrix.shape[-2:]
    finite = torch.isfinite(matrix).all(-1).all(-1)
    matrix = torch.where(finite[..., None, None], matrix, 0.0)
    _, exponent = torch.frexp(matrix.abs().amax((-2, -1)))
    unit = torch.ldexp(torch.ones_like(matrix[..., 0, 0]), exponent - 1)
    matrix = matrix / unit[..., None, None]
    small = matrix if p <= q else matrix.mT
    top = torch.linalg.eigvalsh(small @ small.mT)[..., -1].clamp(min=0)
    found: Tensor = (top + (p + q + 8) * 2 * UNIT * matrix.square().sum((-2, -1))).sqrt() * UP
    return torch.where(finite, found * unit, math.inf)


def _length(values: Tensor, dim: int = -1) -> Tensor:
    """Euclidean lengths from above: a sum of n squares is off by `n 2^-52` of itself at most, its
    root by half of that.
    """
    found: Tensor = torch.linalg.vector_norm(values, dim=dim)
    return found * (1 + (values.shape[dim] + 8) * UNIT)


def global_bound(
    tokens: int,
    a: Tensor,
    v: Tensor,
    radius: float,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    most: tuple[float, float, float] | None = None,
) -> float:
    """An upper bound on `|J(X)|` over all n tokens in the ball of radius R around 0; never above
    THEORY 5, nor above the paper's constant.

    Let `B = |A| R^2 + |u| R >= |y_i| s_i` and `pi = sum_j P_ij^2`. Row i of the first two terms is
    at most `|V| (sqrt(pi) + |y_i| |W_i|) <= |V| (sqrt(pi) + B sqrt(w))`, `pi + w <= 1` and `w <=
    1/2` (fact 3). Scores of one row differ by at most 2 B, so no probability is above `top = 1 / (1
    + (n - 1) exp(-2 B))`, nor are pi and w. The maximum h under these conditions is at `pi = 1 / (1
    + B^2)`, cut to `[1/2, top]`, and `sqrt(top) (1 + B)` if `top <= 1/2`. In all,

        Lip <= |V| (sqrt(n) h + |A| R^2),   h <= 1 + B.

    Tokens in a ball around c instead of 0: the same with `bias = u + A c`, because moving all
    tokens by c changes every row of scores by a constant and the output by `V c`. mask: `(n, n)`,
    constants added to the scores. most: where `A`, `V` and u are products of matrices that were
    rounded, the products of those matrices' Frobenius norms.
    """
    if radius < 0 or not radius < math.inf:
        raise InputError(
            f"the tokens' radius is {radius!r}: attention is Lipschitz only on bounded sets of "
            "tokens."
        )
    size_a, size_v, shift = _sizes(a, v, bias, most)
    return _global(tokens, float(size_a), float(size_v), radius, shift, mask)


def castin(tokens: int, a: Tensor, v: Tensor, radius: float, bias: Tensor | None = None) -> float:
    """The paper's constant for n tokens in the ball of radius R: `sqrt(3) |V| (|A|^2 R^4 (4 n + 1)
    + n)^(1/2)`, that of Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024, arXiv
    2312.14820 (Theorem 3.3).

    Their attention has no biases. A query bias u is one of theirs for tokens `(x_j, t)` with an
    entry more, of any constant t: `A` becomes `[[A, u / t], [0, 0]]` and `R^2` becomes `R^2 + t^2`;
    the best of a few t is taken.
    """
    if bias is None or not bias.any() or radius == 0:
        best = float(spectral(a)) * radius**2
    else:
        scales = [radius * 2.0**k for k in range(-8, 3)]
        best = min(
            float(spectral(torch.cat([a, bias[:, None] / t], 1))) * (radius**2 + t**2)
            for t in scales
        )
    return (
        math.sqrt(3)
        * float(spectral(v))
        * math.hypot(best * math.sqrt(4 * tokens + 1), math.sqrt(tokens))
        * UP
    )


def _sizes(
    a: Tensor, v: Tensor, bias: Tensor | None, most: tuple[float, float, float] | None
) -> tuple[Tensor, Tensor, float]:
    """Upper bounds on `|A|`, `|V|` and `|u|`, with the rounding of the products they may be."""
    shift = 0.0 if bias is None else float(_length(bias))
    if most is None:
        return spectral(a), spectral(v), shift
    slack = (a.shape[-1] + 8) * 4 * UNIT
    return spectral(a) + slack * most[0], spectral(v) + slack * most[1], shift + slack * most[2]


def _global(
    tokens: int, a: float, v: float, radius: float, shift: float, mask: Tensor | None
) -> float:
    if tokens == 1:
        return v
    b = (a * radius + shift) * radius  # to three units, of which `UP` below has 128
    top = _likeliest(tokens, b, mask)
    share = min(max(1 / (1 + b * b), 0.5), top)
    h = math.sqrt(share) + b * math.sqrt(min(1 - share, top) if top > 0.5 else top)
    return v * (math.sqrt(tokens) * h + a * radius**2) * UP


def _likeliest(tokens: int, b: float, mask: Tensor | None) -> float:
    """An upper bound on every entry of `P` where scores of one row, without the mask, differ by
    at most 2 b.
    """
    if mask is None:
        return min(1.0, UP / (1 + (tokens - 1) * math.exp(-2 * b)))
    chances = torch.softmax(mask, -1)
    most = float(chances.max())  # p e^b / (p e^b + (1 - p) e^-b), increasing in p
    return (
        1.0
        if most > 1 - 1e-9
        else min(1.0, (1 + 1e-12) / (1 + (1 - most) / most * math.exp(-2 * b)))
    )


@dataclass(frozen=True, eq=False)
class _State:
    """Attention at one input: y `(n, d)`, log P and P `(n, n)`, deviations `x_j - m_i` `(n, n,
    d)`, covariances `(n, d, d)`.
    """

    x: Tensor
    y: Tensor
    log: Tensor
    p: Tensor
    deviation: Tensor
    covariance: Tensor

    @classmethod
    def make(cls, x: Tensor, a: Tensor, bias: Tensor | None, mask: Tensor | None) -> _State:
        y = x @ a.T if bias is None else x @ a.T + bias
        scores = y @ x.T if mask is None else y @ x.T + mask
        log = torch.log_softmax(scores, -1)
        p = log.exp()
        deviation = x - (p @ x)[:, None]
        return cls(
            x, y, log, p, deviation, torch.einsum("ij,ija,ijb->iab", p, deviation, deviation)
        )


def region_bound(
    low: Tensor,
    high: Tensor,
    a: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    reach: float = math.inf,
    p: tuple[Tensor, Tensor] | None = None,
    most: tuple[float, float, float] | None = None,
) -> Tensor:
    """An upper bound on `|J(X)|` over the box `low <= X <= high` `(n, d)`, cut by `|x_i| <= reach`
    for all i: a number.

    p: where the entries of `P` are known to lie, `(n, n)` each; most: as in `global_bound`.

    The least of three: the bound at the middle (`_middle`) plus how far each term may move from
    there (interval arithmetic on scores, `P`, means and deviations); the sum of the three terms
    with each bounded on the box; and `global_bound` on the balls around 0 and around the middle of
    the tokens that contain the box.
    """
    if not (low <= high).all() or not torch.isfinite(high - low).all():
        raise InputError(
            "the box of tokens is empty or unbounded: give finite bounds, low <= high."
        )
    n, d = low.shape
    x = (low + high) / 2
    r = (high - low) / 2 + UNIT * (low.abs() + high.abs())
    r = torch.where(low == high, 0.0, r)
    size_a, size_v, turn = _sizes(a, v, bias, most)
    shift = torch.zeros(d, dtype=torch.float64) if bias is None else bias
    lost = turn - float(_length(shift))  # of the bias, by rounding
    most = most or (float(torch.linalg.matrix_norm(a)), float(torch.linalg.matrix_norm(v)), 0.0)
    balls = _global_balls(x, r, a, float(size_a), float(size_v), shift, lost, mask, reach)
    if n == 1:
        return torch.tensor(balls, dtype=torch.float64)
    at = _State.make(x, a, bias, mask)
    length = float(torch.linalg.vector_norm(x.abs() + r, dim=1).max())
    score = length * (most[0] * length + max(float(torch.linalg.vector_norm(shift)), most[2]))
    if mask is not None:
        # where scores differ by 800 the lower one's probability is 0
        score += float(torch.where(mask > -800 - 2 * score, mask.abs(), 0.0).max())
    # relative error of P and of everything summed up with it, see below
    slack = (n + d + 8) * 4 * UNIT * (1 + score)
    move = _moves(at, r, a, slack, p)
    pulled = (at.p[..., None] * at.deviation) @ v.T  # V W_i, transposed
    width = spectral(pulled)
    first = size_v * spectral(at.p)
    second = spectral(width[:, None] * at.y)
    third = spectral(v @ at.covariance @ a)
    drift = _drift(at, move, width, size_a, size_v)
    # Rounding: sums of n or d terms whose magnitudes are those of the three terms, with a relative
    # error below the slack.
    error = 8 * slack * most[1] * (math.sqrt(n) + (math.sqrt(n) + 1) * score)
    middle = _middle(at, a, v, pulled, first, second, third) + drift[0] + drift[1] + drift[2].max()
    terms = (
        # |P|^2 <= longest row sum times column sum
        torch.minimum(first + drift[0], size_v * move.most.sum(0).max().sqrt())
        + torch.minimum(second + drift[1], _second(move, size_v))
        + torch.minimum(third + drift[2], size_v * size_a * move.largest).max()
    )
    return (torch.minimum(middle, terms) * UP + error).clamp(max=balls)


def _global_balls(
    x: Tensor,
    r: Tensor,
    a: Tensor,
    size_a: float,
    size_v: float,
    shift: Tensor,
    lost: float,
    mask: Tensor | None,
    reach: float,
) -> float:
    """`global_bound` on the smallest of the balls at hand around 0 and around the middle of the
    tokens; lost: how far the shift may be from the exact one.
    """
    centre = x.mean(0)
    far = min(float(_length(x.abs() + r).max()), reach)
    near = float(_length((x - centre).abs() + r).max())
    bound = _global(len(x), size_a, size_v, far, float(_length(shift)) + lost, mask)
    moved = _length(shift + a @ centre) + 4 * UNIT * len(a) * (
        shift.norm() + size_a * centre.norm()
    )
    return min(bound, _global(len(x), size_a, size_v, near, float(moved) + lost, mask))


def _middle(
    at: _State, a: Tensor, v: Tensor, pulled: Tensor, first: Tensor, second: Tensor, third: Tensor
) -> Tensor:
    """An upper bound on `|J(X)|` at one input, without rounding.

    Besides the sum of the three terms (the first is `|V| |P|`, the second as in fact 1), the input
    is split into what all tokens share and the rest, `1 (x) c` and `D` with `sum_j D_j = 0`. On the
    first, where the second term vanishes, `J` is the matrix `M = [V (I + S_i A)]_i / sqrt(n)`; it
    is known, and so is `N = M^T J` on the rest. On the rest, with `Q = P - 1/n`,

        |J| <= b = (|Q (x) V|^2 + |T|^2 + 2 |T (Q (x) V)^T|)^(1/2) + max_i |V S_i A|,

    the mixed product being of the form of `T` again. `|J|^2` is at most the largest eigenvalue of
    `[[|M|^2, |N|], [|N|, b^2]]`. pulled `(n, n, o)` holds `V P_ij (x_j - m_i)`; then the norms of
    the three terms.
    """
    n = len(at.x)
    largest = third.max()
    common = v + v @ at.covariance @ a  # (n, o, d)
    shared = spectral(common.flatten(0, 1)) / math.sqrt(n)
    rest = at.p - 1 / n
    spread = spectral(v) * spectral(rest)
    mixed = spectral(spectral(torch.einsum("ijo,kj->iok", pulled, rest))[:, None] * (at.y @ v.T))
    b = (
        spread.square() + second.square() + 2 * torch.minimum(mixed, spread * second)
    ).sqrt() + largest
    back = _pull(at, common.permute(2, 0, 1) / math.sqrt(n), a, v)
    cross = spectral((back - back.mean(1, keepdim=True)).flatten(1))
    half = (shared.square() + b.square()) / 2
    gap = (shared.square() - b.square()) / 2
    return torch.minimum(first + second + largest, (half + torch.hypot(gap, cross)).sqrt())


@dataclass(frozen=True, eq=False)
class _Moves:
    """How far things may be from their values in the middle of a box, and how large they may be in
    it.

    p `(n, n)` and y `(n, d)`: entry by entry; weights `(n,)`: in `|W_i|`; covariance `(n,)`: in
    `|S_i|`; most `(n, n)`: upper ends of `P`; largest `(n,)`: an upper bound on `|S_i|` and
    `s_i^2`; steep `(n,)`: on `|y_i|`.
    """

    p: Tensor
    y: Tensor
    weights: Tensor
    covariance: Tensor
    most: Tensor
    largest: Tensor
    steep: Tensor


def _moves(
    at: _State, r: Tensor, a: Tensor, slack: float, known: tuple[Tensor, Tensor] | None = None
) -> _Moves:
    """With `m_i` in the middle as the origin: scores `<x_j - m_i, y_i>`, deviations `x_j - m_i
    - (m_i(X) - m_i)`.
    """
    away = at.deviation.abs()
    length = torch.linalg.vector_norm(at.deviation, dim=-1)
    y = r @ a.abs().T * (1 + (len(a) + 8) * UNIT)
    scores = torch.einsum("ijd,id->ij", away, y) + (at.y.abs() + y) @ r.T
    least, most = _probabilities(at.log, scores, slack)
    if known is not None:
        least = torch.maximum(least, known[0])
        most = torch.minimum(most, known[1])
    p = torch.maximum(most - at.p, at.p - least).clamp(min=0)
    mean = most @ r + torch.einsum("ij,ijd->id", p, away)
    weights = most[..., None] * (r + mean[:, None]) + p[..., None] * away
    widths = torch.minimum(
        torch.linalg.vector_norm(weights, dim=(1, 2)),
        (weights.sum(1).amax(1) * weights.sum(2).amax(1)).sqrt(),
    )
    short = torch.linalg.vector_norm(r, dim=1)
    off = torch.linalg.vector_norm(mean, dim=1)
    moved = (
        spectral((p.sqrt()[..., None] * at.deviation).mT).square()
        + (most * (2 * length + short) * short).sum(1)
        + off.square()
    )
    largest = torch.minimum(
        (length + short).amax(1).square(), (most * (length + short).square()).sum(1)
    )
    steep = torch.linalg.vector_norm(at.y.abs() + y, dim=1)
    return _Moves(p, y, widths, moved, most, largest, steep)


def _probabilities(log: Tensor, e: Tensor, slack: float) -> tuple[Tensor, Tensor]:
    """The lower and upper ends of each `P_ij` when scores move by at most e `(n, n)`; slack: the
    relative error of `P` that comes of the rounding of scores and of e.

    The upper end has its own score raised and all others lowered: `1 / (1 + sum_{k != j} exp(down_k
    - up_j))`. The sum is taken over all k, and `exp(-2 e_j)` off again: harmless, because 1 is
    added. At the lower end it is not harmless, so what rounding may do is added first.
    """
    up = log + e
    down = log - e
    most = 1 / (1 + torch.exp(torch.logsumexp(down, -1, keepdim=True) - up) - torch.exp(-2 * e))
    top = torch.exp(torch.logsumexp(up, -1, keepdim=True) - down)
    least = torch.nan_to_num(1 / (1 + top * (1 + slack) - torch.exp(2 * e)), nan=0.0).clamp(min=0)
    most = torch.where(torch.isnan(most), 1.0, most * (1 + slack)).clamp(max=1)
    most = torch.where(torch.isneginf(log), 0.0, most)
    least = torch.where(torch.isneginf(log), 0.0, least * (1 - slack))
    return least, most


def _drift(
    at: _State, move: _Moves, width: Tensor, size_a: Tensor, size_v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How far the three terms may move from the middle of a box, the third for each i: width `(n,)`
    holds `|V W_i|` there.

    The second moves by `(V (W_i' - W_i) D y_i')_i + (V W_i D (y_i' - y_i))_i`, each of the form of
    fact 1.
    """
    turn = size_v * move.weights
    second = spectral(turn[:, None] * at.y) + spectral((turn + width)[:, None] * move.y)
    return size_v * spectral(move.p), second, size_v * size_a * move.covariance


def _second(move: _Moves, size_v: Tensor) -> Tensor:
    """The second term by `|W_i|^2 <= s_i^2 max_j P_ij` and by `|W_i|^2 <= s_i^2 / 2` (fact 3);
    `largest` bounds `s_i^2` too.
    """
    width = (move.largest * move.most.amax(1).clamp(max=0.5)).sqrt()
    return size_v * (width * move.steep).square().sum().sqrt()


def heads(joint: Sequence[float], single: Sequence[float], out: Tensor, most: float = 0.0) -> float:
    """An upper bound for several heads through the output projection, `f = sum_h W_h f_h`.

    joint: each head's bound with the value matrix `W_h V_h`, which add up; single: with `V_h`
    alone, which combine as `|W_O| (sum_h Lip_h^2)^(1/2)`, `W_O = [W_1 ... W_H]` `(o, H d_head)`.
    most: where `W_O` is a product of matrices that was rounded, that of their Frobenius norms.
    """
    size = float(spectral(out)) + (out.shape[-1] + 8) * 4 * UNIT * most
    return min(math.fsum(joint), size * math.hypot(*single)) * UP


def _pull(at: _State, g: Tensor, a: Tensor, v: Tensor) -> Tensor:
    """`J^T g` for `(m, n, o)`: `(m, n, d)`."""
    g = g @ v
    scores = at.p * (g @ at.x.T)
    scores = scores - at.p * scores.sum(-1, keepdim=True)
    return at.p.T @ g + scores.mT @ at.y + scores @ at.x @ a
