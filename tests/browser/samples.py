"""Runs made up for the tests of the pages: numbers, classes and names chosen by the test, no
model behind them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wassail.evaluation.result import Finding, Row
from wassail.evaluation.run import Evaluation
from wassail.threat import Threat
from wassail.transport.allocation import knapsack, transport_cost
from wassail.transport.bootstrap import interval

INF = math.inf
HOSTILE = (
    '"><script>alert(1)</script>',
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "javascript:alert(3)",
    "' onmouseover='alert(4)",
    "\u202egnp.exe\u2066 two\nlines\u2028three\x00",
    "א שלום \"'><b> " + "x" * 10_000,
    "&lt;b&gt; ${alert(5)} {{7*7}}",
    "<img src=http://example.org/a.png onerror=alert(6)>",
)


def made_up(
    n: int = 200,
    shape: tuple[int, ...] = (3, 32, 32),
    *,
    norm: float = INF,
    eps: float = 8 / 255,
    orders: tuple[float, ...] = (1.0, 2.0, INF),
    domain: tuple[float, float] | None = (0.0, 1.0),
    certified: bool = True,
    classes: tuple[str, ...] | None = (
        "plane",
        "car",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    weighted: bool = False,
    hostile: bool = False,
    shift: float = 1.0,
    seed: int = 0,
    name: str = "made-up-net",
) -> Evaluation:
    """A run of n samples with distances around eps: some wrong already, some never flipped,
    some at equal distances.
    """
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    distances = shift * 3.5 * eps * torch.rand(n, generator=g).double() ** 0.7 * 2
    distances[3::17] = distances[2::17][: len(distances[3::17])]
    distances[::9] = 0.0
    distances[5::40] = INF
    correct = distances > 0
    labels = torch.where(torch.isfinite(distances), (y + 1) % 10, y)
    mu = torch.rand(n, generator=g).double() + 0.1 if weighted else torch.ones(n).double()
    mu = mu / mu.sum()
    radii = (0.2 + 0.5 * torch.rand(n, generator=g).double()) * torch.where(
        torch.isfinite(distances), distances, 3 * eps
    )
    threats = tuple(Threat(norm, order, eps, domain) for order in orders)
    titles = ("WDA, kappa 2", "WDA++", "nearest", "AutoAttack")
    ids = tuple(f"{i:05d}" for i in range(n))
    data = "made-up-data"
    command = "wassail evaluate made-up-net --data made-up-data"
    text = "The logits are as large as 14.2."
    if hostile:
        name = HOSTILE[0]
        data = HOSTILE[1]
        command = HOSTILE[8]
        text = HOSTILE[8]
        titles = (HOSTILE[2], HOSTILE[4], HOSTILE[5], HOSTILE[6])
        classes = tuple((HOSTILE * 2)[:10])
        ids = tuple(HOSTILE[i % len(HOSTILE)] + str(i) for i in range(n))

    def row(attack: str, title: str, threat: Threat, d: Tensor, seconds: float | None) -> Row:
        bought = knapsack(d, threat.eps, threat.order, mu)
        found = interval(mu, d == 0, d, threat, resamples=50)
        return Row(
            attack,
            title,
            threat,
            float((mu * (1 - bought)).sum()),
            found,
            transport_cost(mu, bought, d, threat.order),
            31.5,
            30.5,
            float(torch.isfinite(d)[correct].double().mean()),
            seconds,
        )

    rows = [
        row(title, title, threat, distances * (1.1 + 0.1 * k), 3.7 * k + 0.4 if not j else None)
        for k, title in enumerate(titles)
        for j, threat in enumerate(threats)
    ]

    def images(index: Any) -> tuple[Tensor, Tensor]:
        chosen = [int(i) for i in index]
        low, high = domain or (0.0, 1.0)
        pictures = []
        for i in chosen:  # smooth blobs: they compress about as natural images do
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            pictures.append(
                low + (high - low) * torch.sigmoid(noise + torch.linspace(-2, 2, shape[-1]))
            )
        x = torch.stack(pictures) if pictures else torch.zeros(0, *shape)
        step = distances[chosen].float().nan_to_num(posinf=0.0).reshape(-1, *(1 for _ in shape))
        signs = torch.stack(
            [
                torch.randn(shape, generator=torch.Generator().manual_seed(i + 1)).sign()
                for i in chosen
            ]
            or [x]
        )
        return x, (x + step * signs).clamp(low, high)

    return Evaluation(
        name=name,
        data=data,
        threats=threats,
        ids=ids,
        classes=classes,
        y=y,
        predicted=torch.where(correct, y, (y + 3) % 10),
        mu=mu,
        distances=distances,
        labels=labels,
        found_by=torch.randint(0, len(titles), (n,), generator=g),
        methods=titles,
        radii=radii if certified else None,
        exact=(torch.rand(n, generator=g) < 0.3) if certified else None,
        certificate={"method": HOSTILE[0] if hostile else "crown", "seconds": 12.5}
        if certified
        else {},
        rows=tuple(rows),
        best=tuple(row("all", "all attacks", threat, distances, None) for threat in threats),
        clean=float(mu[correct].sum() / mu.sum()),
        clean_interval=(0.85, 0.93),
        findings=(
            Finding("range", "ok", "The samples use the whole box [0, 1]."),
            Finding("logits", "note", text),
            Finding(
                "zero-gradients",
                "warning",
                "3 of 180 gradients are zero: the attacks may be blind there; try Square.",
            ),
        ),
        info={
            "model": {"kind": "factory", "sha256": "0123456789abcdef" * 4},
            "data": {"shape": list(shape), "files": []},
            "seed": 0,
            "versions": {"wassail": "0.1.0", "torch": "2.9.0"},
            "dtype": "float32",
            "device": "cpu",
            "chunk": 100,
            "command": command,
        },
        images=images,
    )
