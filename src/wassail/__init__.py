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

from wassail import names

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
    from wassail.certificates.graph.region import Ball
    from wassail.certificates.lipschitz.ladder import lipschitz
    from wassail.certificates.loss.certificate import Certificate
    from wassail.certificates.loss.certify import certify
    from wassail.certificates.loss.loss_curve import loss_curve
    from wassail.certificates.loss.slopes import paper_smooth_slope
    from wassail.certificates.loss.worst_case import worst_case
    from wassail.certificates.prove.radii import radii
    from wassail.certificates.prove.record import Radii
    from wassail.certificates.prove.sandwich import sandwich
    from wassail.certificates.prove.verify import verify
    from wassail.errors import InputError, ModelWarning
    from wassail.evaluation.intervals import compare
    from wassail.evaluation.landmarks import landmarks
    from wassail.evaluation.protocol import evaluate
    from wassail.evaluation.run import Evaluation
    from wassail.hardening.certified import certified_loss
    from wassail.hardening.price import Price
    from wassail.hardening.robust import robust_loss
    from wassail.paper.corollary import corollary
    from wassail.smoothing.attack import attack_smoothed
    from wassail.smoothing.model import smoothed
    from wassail.specification import Specification
    from wassail.threat import Groups, Threat
    from wassail.transport.allocation import knapsack
    from wassail.transport.between import shift_between
    from wassail.transport.confidence import samples_needed
    from wassail.transport.curve import RiskCurve, risk_curve
    from wassail.transport.distribution import Distribution, allocate
    from wassail.transport.flips import Flips
    from wassail.vnnlib.property import Property
    from wassail.zoo.features import Features, OneLogit

__version__ = metadata.version("wassail")

# Where each public name lives: the attacks by `names`, the rest here.
_HOME = {
    **{
        function: f"attacks.{module}"
        for module, function in (attack.home.split(":") for attack in names.ATTACKS.values())
    },
    "AutoAttack": "attacks.autoattack",
    "Ball": "certificates.graph.region",
    "Certificate": "certificates.loss.certificate",
    "Distribution": "transport.distribution",
    "Evaluation": "evaluation.run",
    "Features": "zoo.features",
    "Flips": "transport.flips",
    "Groups": "threat",
    "InputError": "errors",
    "ModelWarning": "errors",
    "OneLogit": "zoo.features",
    "Price": "hardening.price",
    "Property": "vnnlib.property",
    "Radii": "certificates.prove.record",
    "RiskCurve": "transport.curve",
    "Specification": "specification",
    "Threat": "threat",
    "allocate": "transport.distribution",
    "attack_smoothed": "smoothing.attack",
    "certified_loss": "hardening.certified",
    "certify": "certificates.loss.certify",
    "compare": "evaluation.intervals",
    "corollary": "paper.corollary",
    "evaluate": "evaluation.protocol",
    "knapsack": "transport.allocation",
    "landmarks": "evaluation.landmarks",
    "lipschitz": "certificates.lipschitz.ladder",
    "loss_curve": "certificates.loss.loss_curve",
    "nearest": "attacks.nearest",
    "paper_smooth_slope": "certificates.loss.slopes",
    "radii": "certificates.prove.radii",
    "risk_curve": "transport.curve",
    "robust_loss": "hardening.robust",
    "samples_needed": "transport.confidence",
    "sandwich": "certificates.prove.sandwich",
    "shift_between": "transport.between",
    "smoothed": "smoothing.model",
    "verify": "certificates.prove.verify",
    "worst_case": "certificates.loss.worst_case",
}
# Names that were here until 0.3: results that are returned and never made by hand, and a part.
_MOVED = {
    "Bound": "certificates.bound",
    "Comparison": "evaluation.intervals",
    "Corollary": "paper.corollary",
    "Landmark": "evaluation.landmarks",
    "LossCurve": "certificates.loss.curve",
    "PopulationCurve": "transport.curve",
    "Sandwich": "certificates.prove.sandwich",
    "ShiftBetween": "transport.between",
    "Smoothed": "smoothing.model",
    "SmoothedAttack": "smoothing.attack",
    "Smoothing": "smoothing.certificate",
    "Verification": "transport.distribution",
    "Votes": "smoothing.model",
    "transport_cost": "transport.allocation",
}
_MODULES = (
    *("attacks", "certificates", "evaluation", "geometry", "hardening", "losses"),
    *("network", "report", "smoothing", "testing", "transport", "zoo"),
)

__all__ = [
    "AutoAttack",
    "Ball",
    "Certificate",
    "Distribution",
    "Evaluation",
    "Features",
    "Flips",
    "Groups",
    "InputError",
    "ModelWarning",
    "OneLogit",
    "Price",
    "Property",
    "Radii",
    "RiskCurve",
    "Specification",
    "Threat",
    "a3",
    "allocate",
    "apgd",
    "attack_smoothed",
    "autoattack",
    "certified_loss",
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
    "landmarks",
    "lipschitz",
    "loss_curve",
    "nearest",
    "paper_smooth_slope",
    "pgd",
    "radii",
    "risk_curve",
    "robust_loss",
    "samples_needed",
    "sandwich",
    "shift_between",
    "smoothed",
    "square",
    "testing",
    "verify",
    "w_fgsm",
    "w_pgd",
    "wda",
    "wda_pp",
    "worst_case",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _HOME and name in __all__:
        value = getattr(importlib.import_module(f"wassail.{_HOME[name]}"), name)
        globals()[name] = (
            value  # a submodule of the same name (attacks.wda) can never take its place
        )
        return value
    if name in _MODULES:
        return importlib.import_module(f"wassail.{name}")
    if name in _MOVED:
        raise AttributeError(
            f"wassail.{name} has moved: write `from wassail.{_MOVED[name]} import {name}`."
        )
    raise AttributeError(f"module 'wassail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
