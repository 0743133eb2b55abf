"""A thousand random networks: no lower bound of anything beats an upper bound of anything, and no
radius is above a flip.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from support.drawn import above_flips
from wassail.certificates.exact.infinity import infinity
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss.chords import chords
from wassail.certificates.loss.slopes import ray_slope

NORMS = (1.0, 2.0, math.inf)


def network(seed: int) -> tuple[nn.Sequential, torch.Generator]:
    """Depth 1 to 3, widths 2 to 7, two to four classes, some of them leaky."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    sizes = [draw(1, 4), *(draw(2, 7) for _ in range(draw(1, 3))), draw(2, 4)]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layer = nn.Linear(a, b).double()
        layer.weight.data = (
            torch.randn(b, a, dtype=torch.float64, generator=generator) * (2 / a) ** 0.5
        )
        layer.bias.data = 0.5 * torch.randn(b, dtype=torch.float64, generator=generator)
        layers += [layer, nn.LeakyReLU(0.2) if seed % 5 == 0 else nn.ReLU()]
    return nn.Sequential(*layers[:-1]), generator


def violations(seed: int) -> list[str]:
    model, generator = network(seed)
    norm = NORMS[seed % 3]
    graph = read(model, (next(model.parameters()).shape[1],))
    x = torch.rand(4, graph.inputs, dtype=torch.float64, generator=generator)
    y = torch.arange(4) % graph.outputs
    labels = sorted(set(y.tolist()))
    domains = {"R^n": None, "box": (0.0, 1.0), "ball": Ball(x[0], 0.3, NORMS[seed // 3 % 3])}
    wrong: list[str] = []
    brackets = {}
    for title, domain in domains.items():
        exact = lipschitz(
            graph, norm, domain, labels=labels, method="exact", nodes=300, time_limit=3.0
        )
        for method in ("product", "propagate", "sdp"):
            other = lipschitz(graph, norm, domain, labels=labels, method=method, time_limit=0.2)
            brackets[title, method] = other
            if exact.lower > other.upper * (1 + 1e-9) or other.lower > exact.upper * (1 + 1e-9):
                wrong.append(f"{seed} {title} {method}: {exact} against {other}")
        brackets[title, "exact"] = exact
    slope = infinity(graph.piecewise(), norm, labels, nodes=50, time_limit=1.0)
    rays = ray_slope(graph, norm, labels)
    everywhere = min(
        brackets["R^n", method].upper for method in ("product", "propagate", "sdp", "exact")
    )
    if max(slope.lower, rays.lower) > min(slope.upper, rays.upper, everywhere) * (1 + 1e-9) + 1e-12:
        wrong.append(f"{seed} infinity: {slope} and {rays} against Lm {everywhere}")
    for loss in ("margin", "cross_entropy"):
        for title, domain in (("R^n", None), ("box", (0.0, 1.0))):
            found = chords(graph, x, y, norm, domain, loss)
            steepest = float((found.gain / found.distance).max()) if len(found.gain) else 0.0
            if (
                steepest
                > min(brackets[title, m].upper for m in ("product", "propagate", "sdp", "exact"))
                * (1 + 1e-7)
                + 1e-9
            ):
                wrong.append(f"{seed} {title} {loss}: a chord of slope {steepest}")
    return wrong


@pytest.mark.slow_cases("1", "2")
@pytest.mark.parametrize("part", range(3))
def test_nine_networks(part: int) -> None:
    assert [v for seed in range(3 * part, 3 * part + 3) for v in violations(seed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_networks(part: int) -> None:
    assert [v for seed in range(50 * part, 50 * part + 50) for v in violations(seed)] == []


@pytest.mark.slow_cases("0", "2", "3")
@pytest.mark.parametrize("part", range(4))
def test_no_radius_of_forty_networks_is_above_a_flip(part: int) -> None:
    assert [v for seed in range(10 * part, 10 * part + 10) for v in above_flips(seed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_no_radius_of_a_thousand_networks_is_above_a_flip(part: int) -> None:
    assert [v for seed in range(50 * part, 50 * part + 50) for v in above_flips(seed)] == []
