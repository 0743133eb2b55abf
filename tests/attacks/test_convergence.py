"""Distances that still fall fast when the passes end: `nearest` says so, and only then."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.attacks.convergence import far_from_rest, first_flips, quarter, shrinkage
from wassail.attacks.minimal import run as engine_run

INF = math.inf
MLP = ws.zoo.load("digits-mlp")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Quantised(nn.Module):
    """The digits rounded to a few levels: the gradient is 0 everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return MLP((x * 6).round() / 6 + 0 * x)


def digits(n: int = 24) -> tuple[Tensor, Tensor]:
    x, y = ws.zoo.data("digits")
    return x[:n], y[:n]


def test_what_is_far_from_rest() -> None:
    assert not far_from_rest(tensor(1.0, 1.0), tensor(0.9, 0.91))
    assert far_from_rest(tensor(1.0, 1.0), tensor(0.9, 0.89))
    # A wrong sample and one without a flip have no share in the mean.
    assert far_from_rest(tensor(0.0, 1.0, INF), tensor(0.0, 0.89, INF))
    # Of ten attacked samples one may get its first flip, not two.
    late = tensor(0, *[1.0] * 10)
    assert not far_from_rest(tensor(0, INF, *[1.0] * 9), late)
    assert far_from_rest(tensor(0, INF, INF, *[1.0] * 8), late)
    assert first_flips(tensor(INF, INF, 1), tensor(INF, 2, 1)) == 1
    assert not far_from_rest(tensor(), tensor()) and shrinkage(tensor(), tensor()) == 0
    assert not far_from_rest(tensor(INF, 0.0), tensor(INF, 0.0))
    assert [quarter(passes) for passes in (1, 4, 103)] == [1, 1, 25]


@pytest.mark.slow_cases("plain-1", "no gradient-2", "no gradient-1", "plain-2")
@pytest.mark.parametrize("norm", [1, 2, INF])
@pytest.mark.parametrize("model", [MLP, Quantised()], ids=["plain", "no gradient"])
def test_the_early_distances_are_as_near_as_those_of_a_search_with_fewer_passes(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, norm: float
) -> None:
    """So the warning says what evaluate finds by two searches, and takes no pass. The longer search
    may begin a step that the shorter one cannot pay to its end.
    """
    told = []
    monkeypatch.setattr(engine_run, "_warn_if_falling", lambda *told_: told.append(told_))
    x, y = digits()
    found = ws.nearest(model, x, y, norm, passes=120, batch_size=7)
    ((early, late, few, passes),) = told
    assert (few, passes) == (30, 120) and torch.equal(late, found.distances)
    fewer = ws.nearest(model, x, y, norm, passes=30).distances
    up = 1 + 1e-6  # lengths in float32 and in float64
    assert (late <= up * early).all() and (early <= up * fewer).all()
    torch.testing.assert_close(early, fewer, rtol=0.05, atol=0)
    silent = ws.nearest(model, x, y, norm, passes=120, batch_size=7, warn=False)
    assert torch.equal(silent.points, found.points) and silent.passes() == found.passes()
    assert len(told) == 1


def test_a_search_that_is_far_from_its_end_says_so_once() -> None:
    x, y = digits()
    model = Quantised()
    said = r"^the mean distance fell by \d\d % .*from 25 to 100 passes: .* passes=400\.$"
    with pytest.warns(ws.ModelWarning, match=said) as told:
        ws.nearest(model, x, y, INF, passes=100, batch_size=9)
    assert len(told) == 1 and told[0].filename == __file__


def test_a_search_that_rests_or_was_told_says_nothing() -> None:
    x, y = digits()
    model = Quantised()
    known = ws.nearest(model, x, y, INF, passes=99)  # few passes are the caller's own choice
    for norm in (1, 2, INF):
        ws.nearest(MLP, x, y, norm, passes=100)
    ws.nearest(model, x, y, INF, passes=100, start=known)
    ws.nearest(model, x, y, INF, passes=100, eps=0.05, order=1)
    ws.nearest(model, x, y, INF, passes=100, warn=False)
    ws.nearest(model, x, y, INF)
    ws.nearest(MLP, x, y, INF, passes=100, method="fmn")


def test_evaluate_says_it_in_its_findings_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = ws.evaluate(Quantised(), digits(), ws.Threat(INF, 1, 0.05), ("nearest",), passes=100)
    found = [finding for finding in run.findings if finding.name == "convergence"]
    assert len(found) == 1 and found[0].level == "warning"
