"""Which rungs a method climbs, and in which order."""

import itertools
import math

import pytest
import torch
from torch import nn

from wassail.certificates.prove.ladder import BranchRung, Rung, levels_of
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
