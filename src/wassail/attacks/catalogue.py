"""Every attack by the name that a person types: how to call it, and which orders it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from wassail.attacks.a3 import a3
from wassail.attacks.apgd import apgd
from wassail.attacks.autoattack import autoattack
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
from wassail.errors import unknown
from wassail.threat import Threat
from wassail.transport.distribution import Distribution, allocate

Attack = Callable[..., Distribution]


@dataclass(frozen=True)
class Entry:
    """One attack: its title in a table, the function, and for which of the orders asked for it is
    run.

    orders: "each" runs it for every order, "one" once, since its flips serve every order, "inf" at
    order inf only, where every sample moves by eps and no budget is shared, "above 1" for every
    order but 1. passes: about how many a sample that is hard to flip costs with the defaults,
    forward and backward, K = 10: what "cheapest first" goes by.
    """

    title: str
    run: Attack
    orders: str
    passes: int


def _nearest(model: Any, x: Any, y: Any, threat: Threat, **options: Any) -> Distribution:
    return allocate(
        nearest(model, x, y, threat.norm, threat.domain, **options), threat.eps, threat.order
    )


ATTACKS: dict[str, Entry] = {
    "wda": Entry("WDA", wda, "each", 230),
    "wda++": Entry("WDA++", wda_pp, "one", 80),
    "nearest": Entry("nearest", _nearest, "one", 100),
    "w-pgd": Entry("W-PGD", w_pgd, "above 1", 100),
    "w-fgsm": Entry("W-FGSM", w_fgsm, "above 1", 3),
    "fgsm": Entry("FGSM", fgsm, "inf", 2),
    "pgd": Entry("PGD", pgd, "inf", 82),
    "apgd-ce": Entry("APGD-CE", partial(apgd, loss="ce"), "inf", 201),
    "apgd-dlr": Entry("APGD-DLR", partial(apgd, loss="dlr"), "inf", 202),
    "apgd-t": Entry("APGD-T", partial(apgd, loss="targeted"), "inf", 1800),
    "square": Entry("Square", square, "inf", 5000),
    "autoattack": Entry("AutoAttack", autoattack, "inf", 9000),
    "a3": Entry("A3", partial(a3, step="pgd"), "inf", 680),
    "a3-wda": Entry("A3-WDA", partial(a3, step="wda"), "inf", 690),
    "fab": Entry("FAB", fab, "one", 400),
    "fab-t": Entry("FAB-T", partial(fab, targets=9), "one", 2700),
    "deepfool": Entry("DeepFool", deepfool, "one", 50),
    "cw": Entry("CW", cw, "one", 18000),
}


def find(name: str) -> Entry:
    """The attack of this name, or one sentence with the names there are."""
    if name not in ATTACKS:
        raise unknown("attack", name, tuple(ATTACKS))
    return ATTACKS[name]


def results(
    entry: Entry,
    model: Any,
    x: Any,
    y: Any,
    norm: float,
    eps: float,
    orders: Iterable[float],
    domain: Any,
    **options: Any,
) -> Iterator[Distribution]:
    """The distributions of one attack for those of the orders that it answers; a search that
    serves all is done once.
    """
    orders = list(orders)
    if entry.orders == "one":
        first = entry.run(model, x, y, Threat(norm, orders[0], eps, domain), **options)
        yield first
        yield from (allocate(first.flips, eps, order) for order in orders[1:])
        return
    fits = {"each": orders, "inf": [math.inf], "above 1": [order for order in orders if order > 1]}[
        entry.orders
    ]
    for order in orders:
        if order in fits:
            yield entry.run(model, x, y, Threat(norm, order, eps, domain), **options)
