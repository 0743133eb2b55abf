"""The figures of a run as plain values, which its folder keeps beside the chunks."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wassail.evaluation.plan import exactly
from wassail.evaluation.result import Row

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

GRID = 65  # budgets at which the curves are written


def summary(result: Evaluation) -> dict[str, Any]:
    """The figures as plain values; times are in the log."""

    def row(item: Row) -> dict[str, Any]:
        threat = item.threat
        about = {
            "norm": f"{threat.norm:g}",
            "order": exactly(threat.order),
            "eps": threat.eps,
            "domain": threat.domain,
        }
        apart = ("threat", "seconds")
        return about | {name: value for name, value in vars(item).items() if name not in apart}

    top = 2 * max(threat.eps for threat in result.threats)
    curves = []
    for order in result.orders:
        curve = result.curve(order)
        grid = sorted({top * k / (GRID - 1) for k in range(GRID)} | {t.eps for t in result.threats})
        sides = [curve(eps) for eps in grid] if len(result) else []
        attacked = [attacked for _, attacked in sides]
        certified = None if result.radii is None else [certified for certified, _ in sides]
        kept = {"order": exactly(order), "eps": grid, "attacked": attacked, "certified": certified}
        curves.append(kept)
    return {
        **_others(result),
        "headline": result.headline,
        "definition": result.definition,
        "samples": len(result),
        "clean": _finite(result.clean),
        "clean_interval": [_finite(v) for v in result.clean_interval],
        **({} if result.mean_error is None else {"mean_error": _finite(result.mean_error)}),
        "attacks": [row(item) for item in result.rows],
        "pooled": [row(item) for item in result.best],
        "curves": curves,
        "findings": [asdict(finding) for finding in result.findings],
    }


def _others(result: Evaluation) -> dict[str, Any]:
    """The figures with labels that change and other people, where there are any."""
    if not result.others:
        return {}
    figures = []
    for threat in result.others_threats:
        low, high = result.others_curve(threat.order)(threat.eps)
        certified = None if result.radii is None else low
        about = {"order": exactly(threat.order), "eps": threat.eps}
        figures.append(about | {"certified": certified, "attacked": _finite(high)})
    return {"others": {"headline": result.others_sentence, "threats": figures}}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
