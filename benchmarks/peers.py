"""Attacks of other tools, where they are installed: adversarial-library, AutoAttack."""

from __future__ import annotations

import contextlib
import io
import sys
import types

from torch import Tensor, nn

from benchmarks.measure import INF, Attack

# adv-lib imports these for a distance and a plot that are not used here.
UNUSED = {"torchvision": ["models"], "torchvision.models": [], "visdom": ["Visdom"]}
MINIMAL = {  # attacks of adv-lib that are run at each norm
    INF: ("FMN", "APGD-T bisected", "FAB"),
    2.0: ("FMN", "DDN", "ALMA", "SuperDeepFool", "FAB"),
    1.0: ("FMN", "PDPGD", "ALMA"),
}


def adv_lib(name: str, norm: float) -> Attack:
    """An attack of adversarial-library at about 1,000 passes a sample."""
    for module, attributes in UNUSED.items():
        if module not in sys.modules:
            sys.modules[module] = types.ModuleType(module)
            for attribute in attributes:
                setattr(sys.modules[module], attribute, object)
    from adv_lib import attacks
    from adv_lib.attacks.auto_pgd import minimal_apgd

    far = {1.0: 40.0, 2.0: 4.0, INF: 0.5}[norm]
    first = 10.0 if norm == INF else 1.0
    known: dict[str, Attack] = {
        "FMN": lambda m, x, y: attacks.fmn(m, x, y, norm=norm, steps=500, α_init=first),
        "FAB": lambda m, x, y: attacks.fab(m, x, y, norm=norm, n_iter=90),
        "PDPGD": lambda m, x, y: attacks.pdpgd(m, x, y, norm=norm, num_steps=500),
        "DDN": lambda m, x, y: attacks.ddn(m, x, y, steps=500, levels=None),
        "SuperDeepFool": lambda m, x, y: attacks.sdf(m, x, y, steps=10, df_steps=10),
        "ALMA": lambda m, x, y: attacks.alma(
            m,
            x,
            y,
            num_steps=500,
            distance=f"l{norm:g}",
            init_lr_distance={1.0: 0.5, 2.0: 0.1}[norm],
        ),
        "APGD-T bisected": lambda m, x, y: minimal_apgd(
            m,
            x,
            y,
            norm=norm,
            max_eps=far,
            targeted_version=True,
            binary_search_steps=10,
            n_iter=25,
            num_targets=3,
        ),
    }
    return known[name]


def auto_attack(model: nn.Module, x: Tensor, y: Tensor, norm: float, eps: float) -> Tensor:
    """The points of AutoAttack's standard version by its authors' program."""
    from autoattack import AutoAttack

    name = {INF: "Linf", 2.0: "L2", 1.0: "L1"}[norm]
    with contextlib.redirect_stdout(io.StringIO()):
        suite = AutoAttack(model, norm=name, eps=eps, seed=0, verbose=False, device="cpu")
        points: Tensor = suite.run_standard_evaluation(x, y, bs=250)
    return points.detach()


def within(points: Tensor, x: Tensor, norm: float, eps: float) -> Tensor:
    """Which points are in the ball, up to rounding."""
    from benchmarks.measure import distances

    return distances(points, x, norm) <= eps * (1 + 1e-5)


def installed(name: str) -> bool:
    """Whether a tool is here."""
    from benchmarks.stage import version

    return bool(version(name))
