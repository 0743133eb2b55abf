"""Exact Lipschitz constants beside LipBaB's and ExLipBaB's; the paper's constant beside ours."""

from __future__ import annotations

from functools import partial

from torch import nn

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, NORMS, processor_limits, spent
from benchmarks.networks.load import layers
from benchmarks.stage import Row, Stage, Unit, here

LIMIT = 240.0  # processor seconds
# network -> upper end of the box, LipBaB's published constants (arXiv 2105.05495), its seconds
LOCAL = {
    "lipbab_iris_4-5-5-3": (
        1.0,
        {"l2": 6.771454513402937, "l1": 5.958048912394726, "linf": 12.605085581416922},
    ),
    "lipbab_sd_10-15-10-3": (
        0.1,
        {"l2": 9.530716922306004, "l1": 10.41286850374477, "linf": 16.274810805318676},
    ),
    "lipbab_sd_10-20-15-10-3": (
        0.1,
        {"l2": 40.05651016370293, "l1": 48.04897158493324, "linf": 72.28569774866806},
    ),
    "lipbab_sd_10-30-30-30-3": (
        0.1,
        {"l2": 19.462799793264388, "l1": 19.369311332018757, "linf": 39.11036425646691},
    ),
}
# network -> what ExLipBaB published (arXiv 2602.15499), its nodes
GLOBAL = {
    "exlipbab_wine_11-24-24-1": ("1.7369 to 2.53, open after 12 h", 670_175),
    "exlipbab_iris_4-6-6-3": ("11.634355134114875", 48),
    "exlipbab_wine_11-12-12-1": ("1.7433699967107172", 2_850),
    "exlipbab_abalone_9-16-16-1": ("11.121602332235268", 801),
    "exlipbab_bike_13-20-16-8-3": ("at least 10802.403812748018", 763_290),
}
SLOPES = "lipsdp_mnist_784-50-10"


def units() -> list[Unit]:
    """Constants on all of space, then on boxes, then the slopes of one network."""
    found = [
        Unit(f"{name}/space", partial(constant, name, "l2", None), networks=(name,))
        for name in GLOBAL
    ]
    for name, (high, published) in LOCAL.items():
        for norm in published:
            run = partial(constant, name, norm, high)
            found.append(Unit(f"{name}/box/{norm}", run, networks=(name,)))
    for norm in NORMS:
        run = partial(slopes, norm)
        found.append(Unit(f"{SLOPES}/slopes/{norm}", run, networks=(SLOPES,)))
    return found


def network(name: str) -> nn.Module:
    """A ReLU network in float64."""
    found = nn.Sequential()
    parts = layers(name)
    for place, (weight, bias) in enumerate(parts):
        linear = nn.Linear(weight.shape[1], weight.shape[0]).double()
        linear.weight.data = weight
        linear.bias.data = bias.flatten()
        found.append(linear)
        if place < len(parts) - 1:
            found.append(nn.ReLU())
    return found.eval()


def inputs(model: nn.Module) -> tuple[int, ...]:
    first = next(iter(model.parameters()))
    return (first.shape[1],)


def constant(name: str, norm: str, high: float | None) -> Row:
    """The largest norm of the Jacobian, from both sides."""
    model = network(name)
    domain = None if high is None else (0.0, high)
    r = NORMS[norm]
    with spent() as used, processor_limits():
        found = ws.lipschitz(
            model,
            r,
            domain,
            outputs="logits",
            norm_out=r,
            method="exact",
            shape=inputs(model),
            time_limit=LIMIT,
        )
    return {
        "lower": found.lower,
        "upper": found.upper,
        "exact": bool(found.exact),
        "seconds": used.seconds,
    }


def slopes(norm: str) -> Row:
    """The paper's constant L and the margin slope Lm, each from both sides, on all of space."""
    model = network(SLOPES)
    r = NORMS[norm]
    dual = {1.0: INF, 2.0: 2.0, INF: 1.0}[r]
    with spent() as used, processor_limits():
        margin = ws.lipschitz(model, r, None, shape=inputs(model), time_limit=20)
        logits = ws.lipschitz(
            model,
            r,
            None,
            outputs="logits",
            norm_out=dual,
            shape=inputs(model),
            time_limit=20,
        )
    scale = 2 ** (1 / r)
    return {
        "margin": [margin.lower, margin.upper],
        "paper": [scale * logits.lower, scale * logits.upper],
        "seconds": used.seconds,
    }


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """Constants on all of space, on boxes, slopes."""
    everywhere = [
        {"id": name, "network": name, "published": published, "nodes": nodes}
        | done[f"{name}/space"]
        for name, (published, nodes) in GLOBAL.items()
        if f"{name}/space" in done
    ]
    boxes = []
    for name, (high, published) in LOCAL.items():
        for norm, value in published.items():
            if f"{name}/box/{norm}" in done:
                found = done[f"{name}/box/{norm}"]
                head = {"id": f"{name}-{norm}", "network": name, "high": high, "norm": norm}
                away = abs((found["lower"] + found["upper"]) / 2 / value - 1)
                boxes.append(head | {"published": value, "difference": away} | found)
    steep = [
        {"id": f"{SLOPES}-{norm}", "network": SLOPES, "norm": norm}
        | done[f"{SLOPES}/slopes/{norm}"]
        for norm in NORMS
        if f"{SLOPES}/slopes/{norm}" in done
    ]
    return {"space": everywhere, "boxes": boxes, "slopes": steep}


STAGE = Stage(
    name="lipschitz",
    about="Exact Lipschitz constants of small networks.",
    depends=rooms.CONSTANTS,
    units=units,
    tables=tables,
    source=here(),
)
