"""Which rungs a method climbs, and in which order."""

import importlib
import itertools
import math

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.certificates.prove.ladder import BranchRung, Ladder, Rung, levels_of
from wassail.certificates.prove.problem import Problem


def rungs(sizes: tuple[int, ...], method: str, norm: float = math.inf) -> list[Rung]:
    """The rungs for a perceptron, from cheap to dear."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for rows, columns in itertools.pairwise(sizes):
        layers += [nn.Linear(rows, columns), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    x = torch.rand(1, sizes[0])
    problem = Problem.of(model, x, model(x).argmax(1), norm, (0.0, 1.0))
    return [rung for level in levels_of(problem, method) for rung in level]


def test_a_rung_changes_nothing_for_those_before_it() -> None:
    """Quadratic bounds of many inputs come last: branching is what it is without them."""
    sizes = (784, 100, 100, 100, 100, 100, 10)
    branch = rungs(sizes, "branch")
    auto = rungs(sizes, "auto")
    assert [rung.name for rung in auto] == ["branch"] * 5 + ["quadratic"] * 2
    assert auto[:5] == branch
    slopes = [rung.slopes for rung in branch if isinstance(rung, BranchRung)]
    assert slopes == [False, False, False, True, True]


def test_better_slopes_are_left_out_behind_quadratic_bounds() -> None:
    """Those of few inputs are cheap, and prove more for the price."""
    auto = rungs((20, 160, 150, 3), "auto")
    names = [rung.name for rung in auto]
    assert sorted(names) == ["branch"] * 5 + ["quadratic"] * 2
    first = names.index("quadratic")
    assert first < 3
    assert not any(rung.slopes for rung in auto if isinstance(rung, BranchRung))


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_quadratic_bounds_are_for_boxes(norm: float) -> None:
    assert "quadratic" not in {rung.name for rung in rungs((20, 160, 150, 3), "auto", norm)}


def test_branching_that_brings_nothing_is_left_to_the_cheap_level() -> None:
    """A level says what more domains are expected to bring; where that is nothing, the next takes
    none.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU())
    model = nn.Sequential(*model, nn.Linear(20, 3))
    x = torch.rand(2, 6)
    problem = Problem.of(model, x, model(x).argmax(1), math.inf, (0.0, 1.0))
    attempt = Ladder(problem, "branch").begin(torch.arange(2), torch.full((2,), 0.5).double())
    assert not attempt.proved.any()
    attempt.gain[0] = 0.0
    rest = torch.full((2,), math.inf).double()
    before = attempt.work.clone()
    BranchRung(192).prove(attempt, torch.arange(2), rest)
    assert attempt.work[0] == before[0] and attempt.work[1] > before[1]


def test_products_are_asked_of_what_linear_bounds_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than linear bounds, and prove less but on networks that do not stretch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 3))
    x = torch.rand(8, 6)
    y = model(x).argmax(1)
    near = ws.radii(model, x, y, 2, method="crown").values
    asked = []
    module = importlib.import_module("wassail.certificates.prove.verify")
    old = module.product_radii

    def asking(problem: Problem, *rest: torch.Tensor) -> torch.Tensor:
        asked.append(len(problem))
        return old(problem, *rest)

    monkeypatch.setattr(module, "product_radii", asking)
    threat = ws.Threat(2, math.inf, 0.1)
    assert ws.verify(model, x, y, threat, "ball", at=0.9 * near).proved.all()
    assert not sum(asked)
    ws.verify(model, x, y, threat, "ball", at=1.05 * near)
    assert sum(asked)
