"""The recipes of CONTRIBUTING.md run as they stand; the attack's is in `attacks/test_wda.py`."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.certificates.graph.operators import registry
from wassail.certificates.graph.reader import read
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
