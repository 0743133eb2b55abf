"""Linear programs and least distances by norm: everything that a solver is called for.

What comes back is a proposal: a point that is evaluated, or multipliers that prove something
whatever they are. So every claim is checked where it is made, not here.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from wassail.certificates import clock
from wassail.geometry import maximiser
from wassail.threat import dual

Array: TypeAlias = NDArray[np.float64]
Task: TypeAlias = "tuple[Array, Array, Array, float]"  # a (n,), G (R, n), h (R,), nu
Solution: TypeAlias = "tuple[Array, Array]"  # a maximiser d (n,) and multipliers u (R,) of G d <= h
# a certificate for a multiplier this much larger, relatively, is accepted; the dual value pays for
# it
LIFT = 1e-11
TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
PROGRAM = 1e7  # operations of a linear program, measured on small ones
LEAST = 1e-9  # least unit of distance in `nearest_point`
FAR = 1e11  # a polyhedron farther from the centre than this counts as empty
WEIGHT = 1e-5  # of the unstable neurons in a least-distance program, relative to the inputs
# price of violating a side, in distances to the nearest flip: keeps linear programs feasible
ELASTIC = 1e4


def linprog(*args: Any, **options: Any) -> Any:
    """`scipy.optimize.linprog`, loaded when it is used: that takes a fifth of a second.

    HiGHS is given the time that is left, and is `Late` at its end.
    """
    from scipy.optimize import linprog as solve

    clock.look()
    clock.spend(PROGRAM)
    left = clock.seconds_left()
    if left < math.inf:
        options["options"] = {**options.get("options", {}), "time_limit": max(left, LEAST)}
    answer = solve(*args, **options)
    if answer.status != 0:
        clock.look()
    return answer


def nnls(*args: Any, **options: Any) -> Any:
    """`scipy.optimize.nnls`, loaded when it is used."""
    from scipy.optimize import nnls as solve

    clock.look()
    return solve(*args, **options)


def farkas(rows: Array, need: Array, most: int | None = None) -> tuple[Array, float, Array]:
    """Least-distance programming (Lawson & Hanson 1974, chapter 23).

    For `min |u|, H u >= h` solve `min |E y - f|, y >= 0` with `E = [H^T; h^T]`, `f = (0, .., 0,
    1)`. The residual `r = E y - f` gives `u = -r_{1..n} / r_{n+1}`; if it vanishes, y is a Farkas
    certificate: no such u exists. It takes microseconds where a linear program takes milliseconds.

    Args:
        rows: H `(R, n)`.
        need: h `(R,)`.
        most: iterations; more of them are a `RuntimeError`. Default: scipy's.

    Returns:
        y `(R,)`, the length of the residual, and the residual `(n + 1,)`.
    """
    system = np.vstack([rows.T, need])
    target = np.zeros(len(system))
    target[-1] = 1.0
    y, length = nnls(system, target, maxiter=most)
    return y, float(length), system @ y - target


def nonnegative(rows: Array, target: Array) -> Array:
    """`argmin_{u >= 0} ||target - rows^T u||_2`; any u >= 0 is sound, so 0 if the solver gives
    up.
    """
    try:
        return np.asarray(nnls(rows.T, target, maxiter=100 * len(rows))[0])
    except RuntimeError:
        return np.zeros(len(rows))


def nearest_point(rows: Array, limits: Array, centre: Array) -> Array | None:
    """The point of `{x : rows x <= limits}` nearest to the centre in the 2-norm; None when the
    solver says that there is none, which proves nothing.
    """
    return least_distance(rows, limits, centre)[0]


def least_distance(rows: Array, limits: Array, centre: Array) -> tuple[Array | None, Array]:
    """The same point, and the multipliers `(R,)`, at least 0, that the solver found last.

    By `farkas`: a residual of length delta proves that no point is nearer than `(1 - delta) /
    delta`, so a vanishing one proves emptiness. The limits are rescaled until the residual is of
    order one, since `r_{n+1} = |r|^2` loses its digits when the point is far.
    """
    need = rows @ centre - limits
    multipliers = np.zeros(len(need))
    if not (need > 0).any():
        return centre, multipliers
    scale = float(max(need.max(), LEAST))
    while scale < FAR:
        multipliers, length, residual = farkas(-rows, need / scale, 100 * len(need))
        if length > 1e-3:
            return np.asarray(centre - scale * residual[:-1] / residual[-1]), multipliers
        if length < 1 / FAR:
            break
        scale /= length
    return None, multipliers


def widest(rows: Array, limits: Array, sides: Array) -> tuple[Array, Array] | None:
    """The point of `{y : rows y >= limits}` farthest from the sides, up to distance 1.

    Args:
        rows: `(R, n)`, of length 1.
        limits: `(R,)`.
        sides: which rows a distance is kept from, bool `(R,)`.

    Returns:
        The point `(n,)` and multipliers of the rows `(R,)`; None if the solver gives up.
    """
    columns = rows.shape[1]
    cost = np.zeros(columns + 1)
    cost[-1] = -1.0
    answer = linprog(
        cost,
        A_ub=np.concatenate([-rows, sides[:, None].astype(float)], 1),
        b_ub=-limits,
        bounds=[(None, None)] * columns + [(None, 1.0)],
        method="highs",
    )
    if answer.status != 0:
        return None
    return answer.x[:-1], np.maximum(-answer.ineqlin.marginals, 0.0)


def support(g: Array, cone: Array, norm: float) -> tuple[Array, Array]:
    """`max { g . u : cone u <= 0, ||u||_r <= 1 }`: a direction u `(n,)` and multipliers y >= 0
    `(H,)`, so that it is at most `||g - cone^T y||_s`.

    r = 2: `||P_K(g)||`, the projection onto the cone, by non-negative least squares (Moreau); r =
    1, inf: a linear program.
    """
    if len(cone) == 0:
        return maximiser(torch.from_numpy(g)[None], norm)[0].numpy(), np.zeros(0)
    scale = 1.0 if norm == 2 else float(np.abs(g).max()) or 1.0
    solution = _in_cones([(g / scale, cone)], norm)[0]
    if solution is None:
        return np.zeros_like(g), np.zeros(len(cone))
    return solution[0], solution[1] * scale


def _in_cones(pieces: list[tuple[Array, Array]], norm: float) -> list[Solution | None]:
    """`max { <a, d> : G d <= 0, ||d||_r <= 1 }` for pieces `(a, G)`; for r = 2 the direction is not
    shrunk to the ball.
    """
    if norm == 2:  # the projection of a onto the cone is what the one onto its polar leaves
        multipliers = [nonnegative(rows, a) for a, rows in pieces]
        return [(a - u @ rows, u) for (a, rows), u in zip(pieces, multipliers)]
    if norm == 1:  # d = d+ - d- with both at least 0, and a sum of at most 1
        programs = []
        for a, rows in pieces:
            matrix = np.vstack([np.hstack([rows, -rows]), np.ones((1, 2 * len(a)))])
            programs.append((np.append(-a, a), matrix, np.append(np.zeros(len(rows)), 1.0)))
        solved = _minimise(programs, (0.0, None))
    else:
        solved = _minimise([(-a, rows, np.zeros(len(rows))) for a, rows in pieces], (-1.0, 1.0))
    return [
        s and (_difference(s[0], len(a), norm), s[1][: len(rows)])
        for s, (a, rows) in zip(solved, pieces)
    ]


def cell_programs(tasks: list[Task], norm: float) -> list[Solution | None]:
    """`max <a, d> - nu ||d||_r : G d <= h` for tasks `(a, G, h, nu)`: maximisers and
    multipliers, None where there is none.
    """
    answers: list[Solution | None] = [None] * len(tasks)
    linear = []
    for k, (a, rows, room, nu) in enumerate(tasks):
        size = float(np.linalg.norm(a, dual(norm)))
        if room.min(initial=0.0) >= 0 and size <= nu:
            answers[k] = (np.zeros_like(a), np.zeros(len(room)))
        elif norm == 2 and nu > 1e-9 * size:
            # Below that the norm has no say, and tau a / nu no digits.
            answers[k] = _euclidean(a, rows, room, nu)
        else:
            linear.append(k)
    for k, solution in zip(linear, _linear([tasks[k] for k in linear], norm)):
        lost = solution is None and norm == 2 and tasks[k][3] > 0
        answers[k] = _euclidean(*tasks[k]) if lost else solution
    return answers


def _linear(tasks: list[Task], norm: float) -> list[Solution | None]:
    """The programs for r = 1 and inf, or without a norm."""
    programs = []
    for a, rows, room, nu in tasks:
        n = len(a)
        if norm == 1:  # d = d+ - d-
            programs.append((np.concatenate([nu - a, nu + a]), np.hstack([rows, -rows]), room))
        elif norm == math.inf:  # |d_i| <= t
            sides = np.hstack([np.vstack([np.eye(n), -np.eye(n)]), -np.ones((2 * n, 1))])
            matrix = np.vstack([np.hstack([rows, np.zeros((len(rows), 1))]), sides])
            programs.append((np.append(-a, nu), matrix, np.concatenate([room, np.zeros(2 * n)])))
        else:
            programs.append((-a, rows, room))
    solved = _minimise(programs, (0.0, None) if norm == 1 else (None, None))
    return [
        s and (_difference(s[0], len(t[0]), norm), s[1][: len(t[2])]) for s, t in zip(solved, tasks)
    ]


def recessions(
    pieces: list[tuple[Array, Array]], norm: float
) -> list[tuple[float, Array, Array | None]]:
    """`nu = max { <a, d> : G d <= 0, ||d||_r <= 1 } = min_{u >= 0} ||a - G^T u||_s`: how fast
    pieces `(a, G)` grow at infinity.

    Returns nu, u, and the direction d if the piece grows at all.
    """
    answers: list[tuple[float, Array, Array | None]] = []
    for (a, rows), solution in zip(pieces, _in_cones(pieces, norm)):
        u = np.zeros(len(rows)) if solution is None else solution[1]
        nu = float(np.linalg.norm(a - u @ rows, dual(norm)))
        if nu <= 1e-12 * float(np.linalg.norm(a)) or solution is None:
            answers.append((0.0 if solution else nu, u, None))
        else:
            d = solution[0]
            # 0 where nu is nothing but the solver's tolerance
            size = float(np.linalg.norm(d, norm))
            answers.append((nu, u, d / size if size > 0 else None))
    return answers


def _difference(point: Array, n: int, norm: float) -> Array:
    """The displacement d `(n,)` in the variables of a linear program: `d+ - d-` for r = 1."""
    return point[:n] - point[n:] if norm == 1 else point[:n]


def _minimise(
    programs: list[tuple[Array, Array, Array]], bounds: tuple[float | None, float | None]
) -> list[Solution | None]:
    """`min <c, v> : M v <= m` for programs `(c, M, m)` in one block-diagonal call: solutions
    and multipliers of the rows.
    """
    if not programs:
        return []
    costs, matrices, limits = zip(*programs)
    from scipy.sparse import block_diag

    result = linprog(
        np.concatenate(costs),
        block_diag(matrices, "csr"),
        np.concatenate(limits),
        bounds=bounds,
        method="highs",
        options=TIGHT,
    )
    if result.status != 0:  # one program without a solution spoils the block
        alone = len(programs) == 1
        return [None if alone else _minimise([program], bounds)[0] for program in programs]
    points = np.split(result.x, np.cumsum([len(c) for c in costs])[:-1])
    prices = np.maximum(-result.ineqlin.marginals, 0.0)
    return list(zip(points, np.split(prices, np.cumsum([len(m) for m in limits])[:-1])))


def _tight_multipliers(rows: Array, tight: NDArray[np.bool_], target: Array) -> Array:
    """`argmin_{u >= 0} ||target - rows^T u||_2` over the rows that are tight, 0 for the others."""
    u = np.zeros(len(rows))
    if tight.any():
        u[tight] = nonnegative(rows[tight], target)
    return u


def _next_length(tau: float, low: float, high: float, guess: float) -> float:
    """The guess if it lies in the bracket, else its middle, or eight times as far."""
    if low < guess < high:
        return guess
    if low > 0 and high < math.inf:
        return math.sqrt(low * high)
    return 8 * tau if low > 0 or tau < high else tau / 8


def _euclidean(a: Array, rows: Array, room: Array, nu: float) -> Solution | None:
    """The program for r = 2, by projections.

    Since `||d|| = min_tau (||d||^2 / tau + tau) / 2`, the solution is the projection of `tau a /
    nu` onto the cell for the tau at which `||d|| = tau`, and `||d|| / tau` falls in tau. While the
    same rows G_A are tight, `d = p + tau q` with `p = G_A^+ h_A` orthogonal to `q = (1 - G_A^+ G_A)
    a / nu`, so `tau = ||p|| / (1 - ||q||^2)^(1/2)`.
    """
    if room.min(initial=0.0) >= 0:  # the sample is in the cell: is it the maximiser?
        u = _tight_multipliers(rows, room <= 1e-13, a)
        if np.linalg.norm(a - u @ rows) <= nu * (1 + LIFT / 2):
            return np.zeros_like(a), u
    low = 0.0
    high = math.inf
    scale = max(1.0, float(-room.min(initial=0.0)))
    tau = scale
    answer = None
    for _ in range(100):
        d = nearest_point(rows, room, tau * a / nu)
        if d is None:
            break
        tight = room - rows @ d <= 1e-9 * (1 + np.linalg.norm(d))
        u = _tight_multipliers(rows, tight, a - nu / tau * d)
        if np.linalg.norm(d) <= tau:
            high = tau
            answer = (d, u)
        else:
            low = tau
        active = np.flatnonzero(u > 0)
        inverse = np.linalg.pinv(rows[active]) if len(active) else np.zeros((len(a), 0))
        p = inverse @ room[active]
        q = (a - inverse @ (rows[active] @ a)) / nu
        left = 1 - float(q @ q)
        guess = float(np.linalg.norm(p)) / math.sqrt(left) if left > 0 else math.inf
        if 0 < guess < 1e8 * scale:
            d = p + guess * q
            multipliers = inverse.T @ (a - nu / guess * d)
            if (rows @ d <= room + 1e-12 * (1 + np.abs(room))).all() and (multipliers >= 0).all():
                u = np.zeros(len(room))
                u[active] = multipliers
                return d, u
        if tau > 1e8 * scale or high <= low * (1 + 1e-15):
            break
        tau = _next_length(tau, low, high, guess)
    return answer if answer is not None else ((d, u) if d is not None else None)


def shortest(
    table: Array, limit: Array, room: tuple[Array, Array], elastic: int, norm: float
) -> Solution | None:
    """`min ||u||_r` over `table (u, z) <= limit` in a box, r = 1 or inf, by HiGHS.

    Args:
        table: `(R, n + k)`.
        limit: `(R,)`.
        room: the sides of the box for u, `(n,)` each; infinite where there are none.
        elastic: so many of the first rows may be violated at a price, so that a program always has
            an answer and its multipliers are finite.
        norm: r.

    Returns:
        The point `(n + k,)` and multipliers of the rows; None if the solver gives up.
    """
    low, high = room
    n = len(low)
    k = table.shape[1] - n
    price = -(np.arange(len(table)) < elastic).astype(float)[:, None]
    if norm == 1:  # u = p - q
        cost = np.concatenate([np.ones(2 * n), np.zeros(k), [ELASTIC]])
        rows = np.concatenate([table[:, :n], -table[:, :n], table[:, n:], price], 1)
        sizes = [*((0, h) for h in high), *((0, -a) for a in low), *[(None, None)] * k, (0, None)]
    else:  # |u_i| <= t
        cost = np.concatenate([np.zeros(n + k), [1.0, ELASTIC]])
        rows = np.concatenate([table, np.zeros((len(table), 1)), price], 1)
        ball = np.concatenate([np.eye(n), np.zeros((n, k)), -np.ones((n, 1)), np.zeros((n, 1))], 1)
        mirror = ball.copy()
        mirror[:, :n] *= -1
        rows = np.concatenate([rows, ball, mirror])
        limit = np.concatenate([limit, np.zeros(2 * n)])
        sizes = [*zip(low, high), *[(None, None)] * k, (0, None), (0, None)]
    answer = linprog(cost, A_ub=rows, b_ub=limit, bounds=sizes, method="highs-ds")
    if answer.status != 0:
        return None
    u = answer.x[:n] - answer.x[n : 2 * n] if norm == 1 else answer.x[:n]
    z = answer.x[2 * n : 2 * n + k] if norm == 1 else answer.x[n : n + k]
    return np.concatenate([u, z]), -answer.ineqlin.marginals[: len(table)]


def shortest_euclidean(
    table: Array, limit: Array, room: tuple[Array, Array], noise: float
) -> Solution | None:
    """The same for r = 2 by least-distance programming; z counts as WEIGHT times its size.

    noise: how much the first limit is raised if there is no point else.
    """
    low, high = room
    n = len(low)
    k = table.shape[1] - n
    rows = table.copy()
    rows[:, n:] /= WEIGHT
    if np.isfinite(low).any() or np.isfinite(high).any():
        near = -low < 1
        over = high < 1
        eye = np.eye(n, n + k)
        rows = np.concatenate([rows, -eye[near], eye[over]])
        limit = np.concatenate([limit, -low[near], high[over]])
    try:
        for extra in (0.0, noise):  # where the margin can be 0 but not negative
            limit[0] += extra
            y, length, residual = farkas(-rows, -limit, 20 * len(limit))
            if length > 1e-9:
                break
    except RuntimeError:
        return None
    u = np.zeros(n + k)
    if length > 1e-9:
        if residual[-1] >= 0:  # it is -length^2 but for rounding
            return None
        u = -residual[:-1] / residual[-1]
        u[n:] /= WEIGHT
    return u, y[: len(table)]
