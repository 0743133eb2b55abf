"""The examples of training run, and help."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hardening_helps(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example("harden").main(steps=60)
    assert after > before + 0.02
    assert "after:" in capsys.readouterr().out


@pytest.mark.slow
def test_certified_training_closes_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    low, high = example("certified").main()
    assert 0.3 < low <= high < low + 0.05
    assert "stay right" in capsys.readouterr().out
