"""The example that trains with noise: what it reads, and that it learns."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import wassail as ws

EXAMPLE = Path(__file__).parents[2] / "examples" / "noise.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_noise", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bars(n: int, size: int, channels: int) -> tuple[Tensor, Tensor]:
    """Images of ten classes: which tenth of the rows is bright."""
    y = torch.arange(n) % 10
    rows = torch.arange(size) * 10 // size
    x = 200 * (rows[None] == y[:, None])[:, None, :, None].expand(n, channels, size, size)
    return x.to(torch.uint8), y


@pytest.mark.parametrize(("name", "size", "channels"), [("mnist", 28, 1), ("cifar10", 32, 3)])
def test_the_sets_are_read(
    name: str, size: int, channels: int, example: ModuleType, tmp_path: Path
) -> None:
    x, y = bars(50, size, channels)
    if name == "mnist":
        head = np.zeros(16, np.uint8)
        np.concatenate([head, x.numpy().ravel()]).tofile(tmp_path / "train-images-idx3-ubyte")
        labels = np.concatenate([head[:8], y.numpy().astype(np.uint8)])
        labels.tofile(tmp_path / "train-labels-idx1-ubyte")
    else:
        for k, part in enumerate(x.split(10), 1):
            rows = part.permute(0, 2, 3, 1).reshape(10, -1, 3).numpy()
            Image.fromarray(rows).save(tmp_path / f"data_batch_{k}.png")
        (tmp_path / "train_lables.json").write_text(json.dumps(y.tolist()))
    images, labels = example.training_set(name, tmp_path)
    assert torch.equal(images, x) and torch.equal(labels, y)


def test_it_learns(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = bars(1000, 28, 1)
    model = example.train("mnist", x, y, epochs=3)
    assert "epoch 3 of 3" in capsys.readouterr().out
    proof = ws.smoothed(model, 0.25, draws=100).certify(x[:10] / 255, y[:10])
    assert proof.mean > 0.9
    assert example.cifar10()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
