"""The architectures of the list.

A sequential network is written as its layers: "conv 3 16 4 2 1; relu; flatten; linear 2048 10" has
a convolution from 3 to 16 channels, kernel 4, stride 2, padding 1. The others are classes whose
parameters have the names of the public files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Normalise(nn.Module):
    """(x - mean) / std, by channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class GroupSort(nn.Module):
    """Pairs of neighbouring channels, sorted: 1-Lipschitz."""

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[:, 0::2], x[:, 1::2]
        pairs = torch.stack([torch.minimum(even, odd), torch.maximum(even, odd)], 2)
        return pairs.reshape(x.shape)


class Block(nn.Module):
    """Two convolutions and a shortcut.

    Args:
        before: channels of the input.
        after: channels of the output.
        stride: of the first convolution.
        norm: whether batch normalisation follows each convolution.
        padded: whether a shortcut between different shapes drops every second pixel and adds
            channels of zeros; else it is a convolution with kernel 1.
    """

    def __init__(self, before: int, after: int, stride: int, *, norm: bool, padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=not norm)
        self.bn1 = nn.BatchNorm2d(after) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=not norm)
        self.bn2 = nn.BatchNorm2d(after) if norm else nn.Identity()
        changes = stride != 1 or before != after
        self.zeros = after // 4 if padded and changes else 0
        self.shortcut = nn.Sequential()
        if changes and not padded:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride, bias=not norm))
            if norm:
                self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.zeros:
            outer = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.zeros, self.zeros))
        else:
            outer = self.shortcut(x)
        return F.relu(inner + outer)


class ResNet(nn.Module):
    """A residual network for CIFAR-10: stages of blocks, mean over the image, one linear layer."""

    def __init__(self, widths: tuple[int, ...], blocks: int, pool: int, padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        before = widths[0]
        for number, width in enumerate(widths, 1):
            stage = nn.Sequential()
            for place in range(blocks):
                stride = 2 if number > 1 and place == 0 else 1
                stage.append(Block(before, width, stride, norm=True, padded=padded))
                before = width
            self.add_module(f"layer{number}", stage)
        self.stages = len(widths)
        self.pool = pool
        self.linear = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.linear(F.avg_pool2d(x, self.pool).flatten(1))


class VerifiedResNet(nn.Module):
    """The residual networks of VNN-COMP 2021, without batch normalisation."""

    def __init__(self, width: int, stages: int, features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 2, 1)
        before = width
        for number in range(1, stages + 1):
            first = Block(before, 2 * width, 2, norm=False, padded=False)
            second = Block(2 * width, 2 * width, 1, norm=False, padded=False)
            self.add_module(f"layer{number}", nn.Sequential(first, second))
            before = 2 * width
        self.stages = stages
        self.linear1 = nn.Linear(features, 100)
        self.linear2 = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.linear2(F.relu(self.linear1(x.flatten(1))))


class SmallCNN(nn.Module):
    """The network of TRADES for MNIST: four convolutions, two max-poolings, three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        features = nn.Sequential()
        for name, layer in (
            ("conv1", nn.Conv2d(1, 32, 3)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(32, 32, 3)),
            ("relu2", nn.ReLU()),
            ("maxpool1", nn.MaxPool2d(2)),
            ("conv3", nn.Conv2d(32, 64, 3)),
            ("relu3", nn.ReLU()),
            ("conv4", nn.Conv2d(64, 64, 3)),
            ("relu4", nn.ReLU()),
            ("maxpool2", nn.MaxPool2d(2)),
        ):
            features.add_module(name, layer)
        head = nn.Sequential()
        last: tuple[tuple[str, nn.Module], ...] = (
            ("fc1", nn.Linear(1024, 200)),
            ("relu1", nn.ReLU()),
            ("drop", nn.Dropout(0.5)),
            ("fc2", nn.Linear(200, 200)),
            ("relu2", nn.ReLU()),
            ("fc3", nn.Linear(200, 10)),
        )
        for name, module in last:
            head.add_module(name, module)
        self.feature_extractor = features
        self.classifier = head

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.feature_extractor(x).flatten(1))


CLASSES: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: ResNet((64, 128, 256, 512), 2, 4, padded=False),
    "ResNet-20": lambda: ResNet((16, 32, 64), 3, 8, padded=True),
    "resnet_2b": lambda: VerifiedResNet(8, 1, 1024),
    "resnet_4b": lambda: VerifiedResNet(16, 2, 512),
    "SmallCNN": SmallCNN,
}
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "conv": nn.Conv2d,
    "linear": nn.Linear,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "groupsort": GroupSort,
    "flatten": nn.Flatten,
}


def build(architecture: str) -> nn.Module:
    """A network at random weights."""
    if architecture in CLASSES:
        return CLASSES[architecture]()
    network = nn.Sequential()
    for layer in architecture.split("; "):
        name, *numbers = layer.split()
        network.append(LAYERS[name](*map(int, numbers)))
    return network
