"""The distance to the nearest flip by a mixed-integer program."""

import math

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

from wassail.certificates.graph.dense import Piecewise

INF = math.inf


def mixed_integer(net: Piecewise, x: Tensor, y: int, norm: float, big: float = 60.0) -> float:
    """The same in the unit box by one big-M program for each rival, r = 1 or inf, over (x, z,
    t, switches).
    """
    n = net.inputs
    h = net.neurons
    sizes = n if norm == 1 else 1
    columns = n + h + sizes + h
    a = net.A.numpy()
    b = net.B.numpy()
    c = net.c.numpy()
    eye_h = np.eye(h)
    ball = np.eye(n) if norm == 1 else np.ones((n, 1))

    def block(*parts: np.ndarray | None) -> np.ndarray:
        count = next(len(p) for p in parts if p is not None)
        widths = (n, h, sizes, h)
        return np.concatenate(
            [np.zeros((count, w)) if p is None else p for p, w in zip(parts, widths)], 1
        )

    rows = [
        block(a, b - eye_h, None, None),  # z >= v
        block(-a, eye_h - b, None, big * eye_h),  # z <= v + M (1 - s)
        block(None, eye_h, None, -big * eye_h),  # z <= M s
        block(np.eye(n), None, -ball, None),
        block(-np.eye(n), None, -ball, None),
    ]
    limits = [-c, c + big, np.zeros(h), x.numpy(), -x.numpy()]
    low = np.zeros(columns)
    high = np.concatenate([np.ones(n), np.full(h + sizes, big), np.ones(h)])
    cost = np.concatenate([np.zeros(n + h), np.ones(sizes), np.zeros(h)])
    switches = np.concatenate([np.zeros(n + h + sizes), np.ones(h)])
    best = INF
    for j in set(range(net.outputs)) - {y}:
        margin = block(
            (net.C[y] - net.C[j]).numpy()[None], (net.D[y] - net.D[j]).numpy()[None], None, None
        )
        table = LinearConstraint(
            np.vstack([*rows, margin]), ub=np.concatenate([*limits, [float(net.e[j] - net.e[y])]])
        )
        answer = milp(
            cost,
            integrality=switches,
            bounds=Bounds(low, high),
            constraints=table,
            options={"mip_rel_gap": 0},
        )
        if answer.status == 0:
            best = min(best, float(answer.fun))
    return best
