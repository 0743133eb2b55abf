"""The recipes of CONTRIBUTING.md run as they stand; the attack's is in `attacks/test_wda.py`."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.operators import registry
from wassail.certificates.graph.reader import read
from wassail.certificates.prove.ladder import Ladder
from wassail.certificates.prove.problem import Problem
from wassail.certificates.relax.crown import Sweep, margins
from wassail.errors import InputError
from wassail.report import page
from wassail.report.page import write_report
from wassail.zoo import datasets
from wassail.zoo.datasets import open_data

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def recipe(title: str) -> dict[str, Any]:
    """Run the code below a title."""
    below = TEXT.split(f"## {title}\n")[1]
    block = re.search(r"^```python\n(.*?)^```", below, flags=re.M | re.S)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], "CONTRIBUTING.md", "exec"), names)
    return names


def test_an_operator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.RReLU(), nn.Linear(6, 3)).double().eval()
    with pytest.raises(InputError, match="rrelu"):
        read(model, (3,))
    try:
        recipe("Add an operator in one file")
        x = torch.rand(4, 3, dtype=torch.float64)
        y = model(x).argmax(1)
        assert torch.allclose(read(model, (3,)).logits(x), model(x))
        radii = ws.radii(model, x, y, "inf", (0, 1), "crown").values
        flips = ws.nearest(model, x, y, "inf", (0, 1), passes=100).distances
        assert (radii > 0).all()
        assert (radii <= flips).all()
    finally:
        registry.RULES.pop("rrelu", None)


def small(*layers: nn.Module) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network of three inputs with these layers in its middle, samples and their labels; its
    weights are large, so that there are flips.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 6), *layers, nn.Linear(6, 3)).double().eval()
    for layer in (part for part in model if isinstance(part, nn.Linear)):
        nn.init.normal_(layer.weight, std=1.7 / layer.in_features**0.5)
        nn.init.normal_(layer.bias, std=0.5)
    x = torch.rand(4, 3, dtype=torch.float64)
    return model, x, model(x).argmax(1)


class Call(nn.Module):
    """A function of torch as a layer."""

    def __init__(self, name: str, *args: int) -> None:
        super().__init__()
        self.name = name
        self.args = args

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(torch, self.name)(x, *self.args)
        return out


@pytest.mark.parametrize(
    ("title", "name", "layers"),
    [
        ("Add an activation", "atan", [Call("atan")]),
        ("Add a linear layer", "cumsum", [Call("cumsum", 1), nn.ReLU()]),
        ("Add a curve", "sin", [Call("sin")]),
    ],
)
def test_a_part_of_a_network(title: str, name: str, layers: list[nn.Module]) -> None:
    """Refused without its recipe, and certified below the flips with it."""
    model, x, y = small(*layers)
    with pytest.raises(InputError, match=name):
        read(model, (3,), smooth=True)
    try:
        recipe(title)
        graph = read(model, (3,), smooth=True)
        assert torch.allclose(graph.logits(x), model(x))
        for norm in (1, 2, "inf"):
            radii = ws.radii(model, x, y, norm, (-3, 3), "crown", arithmetic="exact").values
            flips = ws.nearest(model, x, y, norm, (-3, 3), passes=400).distances
            assert (radii > 0).all() and flips.isfinite().any()
            assert (radii <= flips).all()
        bound = ws.lipschitz(graph, 2, (0, 1), method="propagate")
        assert 0 < bound.lower <= bound.upper < float("inf")
    finally:
        registry.RULES.pop(name, None)
        ACTIVATIONS.pop(name, None)


def test_a_relaxation() -> None:
    """Sound at sampled points, never above CROWN, and finite."""
    model, x, y = small(nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    rival = (y + 1) % 3
    problem = Problem.of(model, x, y, math.inf, (0.0, 1.0), "exact")
    sweep = Sweep(problem.graph, problem.balls(torch.full((4,), 0.05).double()), 0).run()
    lower = recipe("Add a relaxation")["interval_margins"](sweep, y, rival)
    crown = margins(sweep, y)[0].gather(1, rival[:, None])[:, 0]
    assert (lower <= crown + 1e-12).all()
    step = 0.1 * torch.rand(200, 4, 3, generator=torch.Generator().manual_seed(1)).double() - 0.05
    z = model((x + step).clamp(0, 1).flatten(0, 1)).reshape(200, 4, 3)
    margin = z.gather(2, y.expand(200, 4)[..., None]) - z.gather(2, rival.expand(200, 4)[..., None])
    assert (margin[..., 0] >= lower).all()
    assert (margin[..., 0].amin(0) - lower < 1).all()


def test_a_split() -> None:
    search = recipe("Add a split")["Highest"](lambda v: torch.sin(3 * v) + v, 0.0, 4.0, 1e-6)
    search.proceed()
    top = float((torch.linspace(0, 4, 400_001) * 3).sin().add(torch.linspace(0, 4, 400_001)).max())
    assert search.lower <= search.upper <= search.lower + 2e-6
    assert search.lower - 1e-6 <= top <= search.upper + 1e-6


def test_a_rung() -> None:
    """What it proves holds, it proves more than linear bounds alone, and it is billed."""
    rung = recipe("Add a rung")["FewDomains"](200)
    model = ws.zoo.load("digits-mlp-adv")
    x, y = (part[:4] for part in ws.zoo.data("digits"))
    flips = ws.nearest(model, x, y, "inf", (0, 1), passes=100).distances
    ladder = Ladder(Problem.of(model, x, y, math.inf, (0.0, 1.0), "exact"), "crown")
    ladder.levels = [(rung,)]
    won = 0
    for share in (0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.2):
        attempt = ladder.attempt(torch.arange(4), share * flips, 0)
        assert share < 1 or not attempt.proved.any()
        won += attempt.by.count("few domains")
        assert (attempt.work >= attempt.swept).all()
    assert won


def test_a_data_source(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("0.1 0.2 0\n0.3 0.4 1\n0.5 0.6 2\n")
    try:
        recipe("Add a data source")
        data = open_data(path, 2)
        x, y = data.read(0, 2)
        assert torch.allclose(x, torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
        assert y.tolist() == [0, 1]
    finally:
        datasets.FILES.pop(".txt", None)


def test_a_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PANELS", list(page.PANELS))
    recipe("Add a panel to the page")
    model = ws.zoo.load("digits-mlp-adv")
    x, y = ws.zoo.data("digits")
    run = ws.evaluate(model, (x[:4], y[:4]), [ws.Threat("inf", 1, 0.05)], ["wda++"], seed=3)
    text = write_report(run, tmp_path / "page.html").read_text()
    assert "All random choices come from seed 3." in text
