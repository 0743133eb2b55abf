"""The examples of training run, and help."""

from pathlib import Path

import pytest
import torch

import wassail as ws
from support.examples import example


def test_hardening_helps(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example("harden").main(["--steps", "60"])
    assert after[2] > before[2] + 0.02
    assert "after:" in capsys.readouterr().out


@pytest.mark.slow
def test_hardening_with_proofs(tmp_path: Path) -> None:
    """The certified part raises what is proved, and the weights are those that were measured."""
    module = example("harden")
    weights = tmp_path / "weights.pt"
    options = ["--steps", "150", "--certified", "1", "--images", "30", "--out", str(weights)]
    before, after = module.main(options)
    assert after[1] > before[1] + 0.02
    model = ws.zoo.load("digits-cnn")
    model.load_state_dict(torch.load(weights))
    x, y = ws.zoo.data("digits")
    again = module.both(model.eval(), x[:30], y[:30], ws.Threat("inf", 1, 0.05), False)
    assert again[0] == after[0] and again[2] == after[2]


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["error", "chance"])
def test_hardening_keeps_clean_accuracy(loss: str) -> None:
    """A budget that ruins the clean accuracy does not if little of it may be lost."""
    options = ["--eps", "0.2", "--steps", "200", "--images", "100", "--seed", "1", "--climb", "1"]
    module = example("harden")
    before, ruined = module.main(options)
    assert ruined[0] < before[0] - 0.15
    _, kept = module.main([*options, "--loss", loss, "--lose", "0.02"])
    assert kept[0] > ruined[0] + 0.1


@pytest.mark.slow
def test_certified_training_closes_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    low, high = example("certified").main()
    assert 0.3 < low <= high < low + 0.05
    assert "stay right" in capsys.readouterr().out
