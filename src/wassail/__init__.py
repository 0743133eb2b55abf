"""How badly can a PyTorch classifier fail under every distribution within a Wasserstein ball of
your data?

>>> import wassail as ws
>>> model, (x, y) = ws.zoo.load("digits-cnn-adv"), ws.zoo.data("digits")
>>> adversary = ws.wda_pp(model, x[:50], y[:50], ws.Threat(norm="inf", order=1, eps="0.1"))
>>> lower = adversary.accuracy < adversary.clean_accuracy
>>> lower, adversary.cost <= 0.1, bool(adversary.verify(model))
(True, True, True)

Public names are imported when first used, so that `import wassail` and `wassail --help` do not wait
for torch.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wassail import testing, zoo
    from wassail.attacks.a3 import a3
    from wassail.attacks.apgd import apgd
    from wassail.attacks.autoattack import AutoAttack, autoattack
    from wassail.attacks.cw import cw
    from wassail.attacks.deepfool import deepfool
    from wassail.attacks.fab import fab
    from wassail.attacks.fgsm import fgsm
    from wassail.attacks.nearest import nearest
    from wassail.attacks.pgd import pgd
    from wassail.attacks.square import square
    from wassail.attacks.w_pgd import w_fgsm, w_pgd
    from wassail.attacks.wda import wda
    from wassail.attacks.wda_pp import wda_pp
    from wassail.certificates.bound import Bound
    from wassail.certificates.certify import Certificate, certify, worst_case
    from wassail.certificates.lipschitz import lipschitz
    from wassail.certificates.loss_curve import LossCurve, loss_curve
    from wassail.certificates.radii import Radii, radii, verify
    from wassail.certificates.region import Ball
    from wassail.certificates.slopes import paper_smooth_slope
    from wassail.certificates.transformer import Corollary, corollary
    from wassail.errors import InputError, ModelWarning
    from wassail.evaluation.intervals import Comparison, compare
    from wassail.evaluation.protocol import evaluate
    from wassail.evaluation.result import Evaluation
    from wassail.threat import Threat
    from wassail.transport import (
        Distribution,
        Flips,
        RiskCurve,
        Verification,
        allocate,
        knapsack,
        risk_curve,
        transport_cost,
    )

__version__ = metadata.version("wassail")

_HOME = {
    "AutoAttack": "attacks.autoattack",
    "w_fgsm": "attacks.w_pgd",
    **{
        name: f"attacks.{name}"
        for name in (
            "a3",
            "apgd",
            "autoattack",
            "cw",
            "deepfool",
            "fab",
            "fgsm",
            "nearest",
            "pgd",
            "square",
            "w_pgd",
        )
    },
    "wda": "attacks.wda",
    "wda_pp": "attacks.wda_pp",
    "Ball": "certificates.region",
    "paper_smooth_slope": "certificates.slopes",
    **dict.fromkeys(("Corollary", "corollary"), "certificates.transformer"),
    "Bound": "certificates.bound",
    "lipschitz": "certificates.lipschitz",
    **dict.fromkeys(("LossCurve", "loss_curve"), "certificates.loss_curve"),
    **dict.fromkeys(("Radii", "radii", "verify"), "certificates.radii"),
    **dict.fromkeys(("Certificate", "certify", "worst_case"), "certificates.certify"),
    **dict.fromkeys(("Comparison", "compare"), "evaluation.intervals"),
    "Evaluation": "evaluation.result",
    "evaluate": "evaluation.protocol",
    "InputError": "errors",
    "ModelWarning": "errors",
    "Threat": "threat",
    **dict.fromkeys(
        (
            "Distribution",
            "Flips",
            "RiskCurve",
            "Verification",
            "allocate",
            "knapsack",
            "risk_curve",
            "transport_cost",
        ),
        "transport",
    ),
}
_MODULES = (
    "attacks",
    "certificates",
    "evaluation",
    "geometry",
    "losses",
    "network",
    "report",
    "testing",
    "transport",
    "zoo",
)

__all__ = [
    "AutoAttack",
    "Ball",
    "Bound",
    "Certificate",
    "Comparison",
    "Corollary",
    "Distribution",
    "Evaluation",
    "Flips",
    "InputError",
    "LossCurve",
    "ModelWarning",
    "Radii",
    "RiskCurve",
    "Threat",
    "Verification",
    "a3",
    "allocate",
    "apgd",
    "autoattack",
    "certify",
    "compare",
    "corollary",
    "cw",
    "deepfool",
    "evaluate",
    "fab",
    "fgsm",
    "inf",
    "knapsack",
    "lipschitz",
    "loss_curve",
    "nearest",
    "paper_smooth_slope",
    "pgd",
    "radii",
    "risk_curve",
    "square",
    "testing",
    "transport_cost",
    "verify",
    "w_fgsm",
    "w_pgd",
    "wda",
    "wda_pp",
    "worst_case",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"wassail.{_HOME[name]}"), name)
        globals()[name] = (
            value  # a submodule of the same name (attacks.wda) can never take its place
        )
        return value
    if name in _MODULES:
        return importlib.import_module(f"wassail.{name}")
    raise AttributeError(f"module 'wassail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
