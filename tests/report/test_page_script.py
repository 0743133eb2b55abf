"""The arithmetic of the page's script, run by node, against that of Python."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from importlib import resources
from typing import Any

import numpy as np
import pytest
import torch

from wassail.report.drawing import packed
from wassail.threat import Groups
from wassail.transport.curve import RiskCurve

INF = math.inf
RUN = """
const fs = require("fs");
globalThis.atob = (text) => Buffer.from(text, "base64").toString("latin1");
require("vm").runInThisContext(fs.readFileSync(process.argv[1], "utf8"));
const number = (v) => (v === "inf" ? Infinity : v);
const cases = JSON.parse(fs.readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(({ run, at }) => {
  const made = new wassail.Run(run);
  return at.map((where) => made.at(...where.map(number)));
})));
"""


def curves() -> list[RiskCurve]:
    """Samples of equal weight and of others, some wrong, some without a flip, some at once."""
    found = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 40))
        distances = rng.uniform(0.05, 2.0, n).round(seed % 3 + 1)
        distances[rng.random(n) < 0.2] = 0.0
        distances[rng.random(n) < 0.2] = INF
        known = torch.tensor(distances)
        radii = known.clamp(max=3.0) * torch.tensor(rng.uniform(0.3, 1.0, n))
        mu = np.full(n, 1 / n) if seed % 2 else rng.dirichlet(np.ones(n))
        found.append(RiskCurve(known, radii if seed % 5 else None, torch.tensor(mu), 1.0))
    return found


def scripted(cases: list[dict[str, Any]]) -> Any:
    """What the script of the page computes, by node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the script with")
    script = resources.files("wassail.report") / "page.js"
    answer = subprocess.run(
        [node, "-e", RUN, str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout)


def test_sliders_show_what_python_computes() -> None:
    rng = np.random.default_rng(0)
    made = curves()
    asked: list[list[list[float]]] = []
    for curve in made:
        kappas = [INF, 0.3, float(curve.distances[0]) or 0.7, float(rng.uniform(0.05, 2))]
        places = [0.0, 0.3, 0.05, 1.1, 5.0, float(rng.uniform(0, 1))]
        asked.append(
            [
                [order, eps, kappa, share]
                for order in (1.0, 2.0, 1.5, INF)
                for eps in places
                for kappa in kappas
                for share in (1.0, 0.8, 0.37)
            ]
        )
    plain = [
        {"run": packed(curve), "at": [["inf" if v == INF else v for v in row] for row in rows]}
        for curve, rows in zip(made, asked)
    ]
    count = 0
    for curve, rows, got in zip(made, asked, scripted(plain)):
        for (order, eps, kappa, share), (certified, attacked) in zip(rows, got):
            shifted = RiskCurve(
                curve.distances,
                curve.radii,
                curve.mu,
                order,
                label_cost=kappa,
                subpopulation=share,
            )
            low, high = shifted(eps)
            assert abs(attacked - high) < 1e-9, (order, eps, kappa, share)
            assert (certified is None) == (curve.radii is None)
            if certified is not None:
                assert abs(certified - low) < 1e-9, (order, eps, kappa, share)
            count += 1
    assert count == 24 * 4 * 6 * 4 * 3


def groups_of(curve: RiskCurve, seed: int) -> Groups:
    """Up to four groups, whose ranges hold some weights that sum to one."""
    rng = np.random.default_rng(seed)
    ids = [str(k) for k in rng.integers(0, 4, len(curve.mu))]
    names = sorted(set(ids))
    middle = dict(zip(names, rng.dirichlet(np.ones(len(names)))))
    low = {name: float(v * rng.uniform(0, 1)) for name, v in middle.items()}
    high = {name: float(min(v + rng.uniform(0, 1), 1)) for name, v in middle.items()}
    return Groups(tuple(ids), low, high)


def within(curve: RiskCurve, groups: Groups, part: float) -> Groups:
    """Ranges that are a part of the way from the weights of the samples to those of the groups."""
    weights = [0.0] * len(groups.names)
    for place, mass in zip(groups.places, curve.mu.tolist()):
        weights[place] += mass
    low, high = (
        {name: w + part * (end - w) for name, w, end in zip(groups.names, weights, ends)}
        for ends in (groups.low, groups.high)
    )
    return Groups(groups.ids, low, high)


@pytest.mark.slow
def test_weights_of_groups_are_those_of_python() -> None:
    """The dual of the page against the plan of Python, for every order and all sliders at once."""
    rng = np.random.default_rng(1)
    made = [(curve, groups_of(curve, seed)) for seed, curve in enumerate(curves())]
    settings = [
        [order, eps, kappa, share, part]
        for order in (1.0, 2.0, 1.5, INF)
        for eps in (0.0, 0.05, 0.3, 1.1, 5.0, float(rng.uniform(0, 1)))
        for kappa in (INF, 0.3)
        for share in (1.0, 0.6)
        for part in (0.001, 0.5, 1.0)
    ]
    told = [["inf" if v == INF else v for v in row] for row in settings]
    cases = [{"run": packed(curve, groups), "at": told} for curve, groups in made]
    worst = 0.0
    for (curve, groups), got in zip(made, scripted(cases)):
        for (order, eps, kappa, share, part), (certified, attacked) in zip(settings, got):
            shifted = RiskCurve(
                curve.distances,
                curve.radii,
                curve.mu,
                order,
                label_cost=kappa,
                subpopulation=share,
                groups=within(curve, groups, part),
            )
            low, high = shifted(eps)
            worst = max(worst, abs(attacked - high))
            if certified is not None:
                worst = max(worst, abs(certified - low))
    assert worst < 1e-9, worst
