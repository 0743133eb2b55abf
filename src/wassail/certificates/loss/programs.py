"""The small convex programs of the exact worst case."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, nnls
from scipy.sparse import block_diag

from wassail.certificates.search.cells import nearest_point
from wassail.threat import dual

Array: TypeAlias = NDArray[np.float64]


Task: TypeAlias = "tuple[Array, Array, Array, float]"  # a (n,), G (R, n), h (R,), nu


Solution: TypeAlias = "tuple[Array, Array]"  # a maximiser d (n,) and multipliers u (R,) of G d <= h


# a certificate for a multiplier this much larger, relatively, is accepted; the dual value pays for
# it
LIFT = 1e-11


TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


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
        elif (
            norm == 2 and nu > 1e-9 * size
        ):  # below that the norm has no say, and tau a / nu no digits
            answers[k] = _euclidean(a, rows, room, nu)
        else:
            linear.append(k)
    for k, solution in zip(linear, _linear([tasks[k] for k in linear], norm)):
        answers[k] = (
            _euclidean(*tasks[k])
            if solution is None and norm == 2 and tasks[k][3] > 0
            else solution
        )
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
    solutions: list[Solution | None]
    if norm == 2:  # the projection of a onto the cone is what the one onto its polar leaves
        multipliers = [_nonnegative(rows, a) for a, rows in pieces]
        solutions = [(a - u @ rows, u) for (a, rows), u in zip(pieces, multipliers)]
    elif norm == 1:
        ball = [
            np.vstack([np.hstack([rows, -rows]), np.ones((1, 2 * len(a)))]) for a, rows in pieces
        ]
        programs = [
            (np.concatenate([-a, a]), m, np.append(np.zeros(len(m) - 1), 1.0))
            for (a, _), m in zip(pieces, ball)
        ]
        solutions = _minimise(programs, (0.0, None))
    else:
        solutions = _minimise([(-a, rows, np.zeros(len(rows))) for a, rows in pieces], (-1.0, 1.0))
    answers: list[tuple[float, Array, Array | None]] = []
    for (a, rows), solution in zip(pieces, solutions):
        u = np.zeros(len(rows)) if solution is None else solution[1][: len(rows)]
        nu = float(np.linalg.norm(a - u @ rows, dual(norm)))
        if nu <= 1e-12 * float(np.linalg.norm(a)) or solution is None:
            answers.append((0.0 if solution else nu, u, None))
        else:
            d = _difference(solution[0], len(a), norm)
            size = float(
                np.linalg.norm(d, norm)
            )  # 0 where nu is nothing but the solver's tolerance
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
    result = linprog(
        np.concatenate(costs),
        block_diag(matrices, "csr"),
        np.concatenate(limits),
        bounds=bounds,
        method="highs",
        options=TIGHT,
    )
    if result.status != 0:  # one program without a solution spoils the block
        return (
            [_minimise([program], bounds)[0] for program in programs]
            if len(programs) > 1
            else [None]
        )
    points = np.split(result.x, np.cumsum([len(c) for c in costs])[:-1])
    multipliers = np.split(
        np.maximum(-result.ineqlin.marginals, 0.0), np.cumsum([len(m) for m in limits])[:-1]
    )
    return list(zip(points, multipliers))


def _nonnegative(rows: Array, target: Array) -> Array:
    """`argmin_{u >= 0} ||target - rows^T u||_2`; any u >= 0 is sound, so 0 if the solver gives
    up.
    """
    try:
        return np.asarray(nnls(rows.T, target, maxiter=100 * len(rows))[0])
    except RuntimeError:
        return np.zeros(len(rows))


def _euclidean(a: Array, rows: Array, room: Array, nu: float) -> Solution | None:
    """The program for r = 2, by projections.

    Since `||d|| = min_tau (||d||^2 / tau + tau) / 2`, the solution is the projection of `tau a /
    nu` onto the cell for the tau at which `||d|| = tau`, and `||d|| / tau` falls in tau. While the
    same rows G_A are tight, `d = p + tau q` with `p = G_A^+ h_A` orthogonal to `q = (1 - G_A^+ G_A)
    a / nu`, so `tau = ||p|| / (1 - ||q||^2)^(1/2)`.
    """
    if room.min(initial=0.0) >= 0:  # the sample is in the cell: is it the maximiser?
        u = np.zeros(len(room))
        tight = np.flatnonzero(room <= 1e-13)
        if len(tight):
            u[tight] = _nonnegative(rows[tight], a)
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
        tight = np.flatnonzero(room - rows @ d <= 1e-9 * (1 + np.linalg.norm(d)))
        u = np.zeros(len(room))
        if len(tight):
            u[tight] = _nonnegative(rows[tight], a - nu / tau * d)
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
        if not low < guess < high:
            guess = (
                math.sqrt(low * high)
                if low > 0 and high < math.inf
                else (8 * tau if low > 0 or tau < high else tau / 8)
            )
        tau = guess
    return answer if answer is not None else ((d, u) if d is not None else None)
