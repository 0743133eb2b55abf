"""Every name that a person may type: attacks, engines, methods, losses, slopes and so on, each with
one line that says what it is.

No other file keeps such a list. This one needs no torch, so `wassail --help` reads it at once; the
attacks, the certificates, the evaluation and the tests of the documentation read it too. A new
attack is a file in `attacks/` and an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Attack:
    """One attack of the command line and of an evaluation.

    Args:
        title: what stands above its column in a table.
        home: "module:function" below `wassail.attacks`.
        about: one line that says what it is.
        orders: for which Wasserstein orders it is run. "each": one run for every order. "one": one
            run, whose flips serve every order. "inf": order inf only, where every sample moves by
            eps and no budget is shared. "above 1": one run for every order but 1.
        passes: forward and backward passes of a sample that is hard to flip, with the defaults and
            10 classes. An evaluation runs the cheapest attacks first.
        whole: it reduces over all samples between its steps, so that all samples are one piece of
            work.
        options: keyword arguments that make this attack of the function.
    """

    title: str
    home: str
    about: str
    orders: str
    passes: int
    whole: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


ATTACKS: dict[str, Attack] = {
    "wda": Attack("WDA", "wda:wda", "the paper's Algorithm 1", "each", 230),
    "wda++": Attack("WDA++", "wda_pp:wda_pp", "the paper's Algorithm 2", "one", 80),
    "nearest": Attack(
        "nearest",
        "catalogue:nearest_and_allocate",
        "our engine: the nearest flips, then the best use of the budget",
        "one",
        100,
    ),
    "w-pgd": Attack(
        "W-PGD",
        "w_pgd:w_pgd",
        "PGD of the whole data set in the Wasserstein ball",
        "above 1",
        100,
        whole=True,
    ),
    "w-fgsm": Attack(
        "W-FGSM", "w_pgd:w_fgsm", "one step of W-PGD of length eps", "above 1", 3, whole=True
    ),
    "fgsm": Attack("FGSM", "fgsm:fgsm", "one steepest step", "inf", 2),
    "pgd": Attack("PGD", "pgd:pgd", "40 steps from a random start", "inf", 82),
    "apgd-ce": Attack(
        "APGD-CE",
        "apgd:apgd",
        "PGD with an adaptive step on the cross-entropy",
        "inf",
        201,
        options={"loss": "ce"},
    ),
    "apgd-dlr": Attack(
        "APGD-DLR",
        "apgd:apgd",
        "PGD with an adaptive step on the difference of logits ratio",
        "inf",
        202,
        options={"loss": "dlr"},
    ),
    "apgd-t": Attack(
        "APGD-T",
        "apgd:apgd",
        "APGD once for each of 9 rival classes",
        "inf",
        1800,
        options={"loss": "targeted"},
    ),
    "square": Attack(
        "Square", "square:square", "random search with squares, no gradients", "inf", 5000
    ),
    "autoattack": Attack(
        "AutoAttack",
        "autoattack:autoattack",
        "APGD-CE, APGD-T, FAB-T and Square in turn",
        "inf",
        9000,
    ),
    "a3": Attack(
        "A3",
        "a3:a3",
        "Adaptive Auto Attack, with PGD's step",
        "inf",
        680,
        whole=True,
        options={"step": "pgd"},
    ),
    "a3-wda": Attack(
        "A3-WDA",
        "a3:a3",
        "Adaptive Auto Attack, with WDA's step",
        "inf",
        690,
        whole=True,
        options={"step": "wda"},
    ),
    "fab": Attack("FAB", "fab:fab", "the Fast Adaptive Boundary attack", "one", 400),
    "fab-t": Attack(
        "FAB-T",
        "fab:fab",
        "FAB once for each of 9 rival classes",
        "one",
        2700,
        options={"targets": 9},
    ),
    "deepfool": Attack(
        "DeepFool", "deepfool:deepfool", "steps to the nearest linearised boundary", "one", 50
    ),
    "cw": Attack("CW", "cw:cw", "Carlini and Wagner's search, l2 only", "one", 18000),
}
DEFAULT_ATTACKS = ("wda", "wda++", "nearest")


@dataclass(frozen=True)
class Engine:
    """One engine of `nearest`.

    Args:
        home: "module:function" below `wassail.attacks`.
        about: one line that says what it is.
    """

    home: str
    about: str


ENGINES: dict[str, Engine] = {
    "boundary-search": Engine(
        "minimal.schedule:boundary_search_engine",
        "ours: the nearest linearised boundary, linearised again at every step",
    ),
    "deepfool": Engine("deepfool:deepfool_engine", "steps to the nearest linearised boundary"),
    "fab": Engine("fab:fab_engine", "the Fast Adaptive Boundary attack"),
    "fmn": Engine("fmn:fmn_engine", "Fast Minimum-Norm"),
    "ddn": Engine("ddn:ddn_engine", "Decoupled Direction and Norm, l2 only"),
    "apgd": Engine("apgd_min:apgd_engine", "APGD with a bisection on the radius"),
    "pdpgd": Engine("pdpgd:pdpgd_engine", "Primal-Dual Proximal Gradient Descent"),
    "cw": Engine("cw:cw_engine", "Carlini and Wagner's search, l2 only"),
}
NEAREST_METHODS: dict[str, str] = {
    "auto": "boundary-search, for every norm",
    "wda++": "the paper's Algorithm 2; needs step or eps",
    **{name: engine.about for name, engine in ENGINES.items()},
}
# Engines of earlier versions, and what replaces them.
GONE_ENGINES: dict[str, str] = {"chase": 'it is "boundary-search" now, or "auto"'}

RADIUS_METHODS: dict[str, str] = {
    "auto": "the whole ladder, as far as the effort goes",
    "crown": "linear bounds by back-substitution",
    "ball": "crown, norms, then balls and boxes together in every layer, for l2",
    "branch": "crown, then branch and bound on unstable neurons",
    "exact": "the distance of the nearest flip itself, for small networks",
}
# Methods of earlier versions, and what replaces them.
GONE_METHODS: dict[str, str] = {
    "alpha-crown": 'branching proves more in less time, use "branch" or "auto"',
    "lipschitz": 'products of norms are a part of "auto", and `ws.lipschitz` gives the constants',
}
LIPSCHITZ_METHODS: dict[str, str] = {
    "auto": "the tightest that the time allows",
    "product": "the product of the layers' norms",
    "propagate": "bounds on the Jacobian over the region",
    "sdp": "LipSDP, a semidefinite program; l2 only",
    "exact": "branch and bound on activation patterns",
}
ARITHMETICS: dict[str, str] = {
    "auto": "executed where that is covered, else exact",
    "executed": "the network as it is executed, with the rounding of its arithmetic",
    "exact": "the function that the weights define, in exact arithmetic",
}
LOSSES: dict[str, str] = {
    "cross_entropy": "the cross-entropy of the softmax",
    "margin": "the largest rival logit less the true one",
}
# Losses of regression, where labels are numbers.
ERRORS: dict[str, str] = {
    "absolute": "the absolute error",
    "pinball": "the absolute error with another weight for each side, which makes a quantile",
    "huber": "half of the square of a small error, linear in a large one",
    "squared": "the square of the error",
}
# name: (symbol of the paper, what it is)
SLOPES: dict[str, tuple[str, str]] = {
    "infinity": ("l", "growth of the loss far away: a lower bound on every other slope"),
    "anchor": ("S", "steepest chord from a sample"),
    "margin": ("Lm", "Lipschitz constant of the margins, times that of the loss"),
    "paper": ("L", "Lipschitz constant of the logits, times that of the loss: Corollary 1"),
}
PRECISIONS = ("float32", "bfloat16", "float16")  # of the gradients of attacks
# The formats of `wassail export`: for papers, for machines, for other people's tools.
_FOR_PAPERS = ("latex", "csv", "json", "svg", "pdf")
EXPORTS = (*_FOR_PAPERS, "samples", "robustbench", "pt", "npz", "png", "card")
FIGURES = ("convergence", "witness", "inclusion", "step", "runtime", "curve", "kappa", "steps")
