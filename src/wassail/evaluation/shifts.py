"""Changes of the data that people know: noise, blur, JPEG, a missing feature.

A shift maps samples `(N, *shape)` with values in [0, 1] to samples of the same shape. Random ones
are keyed by the content of each sample and a seed. The severity is in the name: `jpeg-50` is
quality 50, `noise-5` noise with a standard deviation of 5 % of the range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from io import BytesIO
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.errors import InputError, unknown
from wassail.network import generators

Shift: TypeAlias = Callable[[Tensor], Tensor]

IMAGES: tuple[str, ...] = (
    *("noise-2", "noise-5", "noise-10", "shot-500", "shot-100", "blur-0.5", "blur-1"),
    *("defocus-1", "defocus-2", "brightness-5", "brightness-10", "contrast-90", "contrast-75"),
    *("jpeg-90", "jpeg-50", "jpeg-20", "pixelate-2", "translate-1", "rotate-2", "rotate-5"),
)
FEATURES = ("spread-1", "spread-5", "spread-20", "dropout-5", "dropout-20")


def standard(shape: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the known shifts for samples of this shape: images, or features."""
    return IMAGES if is_image(shape) else FEATURES


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether samples `(C, H, W)` or `(H, W)` look like images of 1 or 3 channels."""
    return (len(shape) == 3 and shape[0] in (1, 3)) or len(shape) == 2


def shift_of(name: str, seed: int = 0) -> Shift:
    """A known shift by its name, for example `jpeg-50`.

    seed: of the random shifts.
    """
    kind, _, text = name.rpartition("-")
    if kind not in KINDS:
        raise unknown("shift", name, (*IMAGES, *FEATURES))
    try:
        severity = float(text)
    except ValueError:
        raise unknown("shift", name, (*IMAGES, *FEATURES)) from None
    if not 0 < severity < math.inf:
        raise InputError(f"the shift {name!r} has no positive severity: write it as 'jpeg-50'.")
    change = KINDS[kind]
    return lambda x: change(x, severity, seed)


def _noise(x: Tensor, severity: float, seed: int) -> Tensor:
    """Gaussian noise, in per cent of the range."""
    return x + severity / 100 * _normal(x, seed)


def _shot(x: Tensor, severity: float, seed: int) -> Tensor:
    """Photon noise: at full brightness so many photons are counted."""
    rates = severity * x.clamp(min=0)
    drawn = [
        torch.poisson(rate.cpu().double(), key) for rate, key in zip(rates, generators(x, seed, 2))
    ]
    return torch.stack(drawn).to(x) / severity if len(x) else x


def _blur(x: Tensor, severity: float, seed: int) -> Tensor:
    """Gaussian blur with a standard deviation in pixels."""
    reach = max(1, math.ceil(3 * severity))
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = torch.exp(-(steps**2) / (2 * severity**2))
    return _filtered(x, torch.outer(weights, weights))


def _defocus(x: Tensor, severity: float, seed: int) -> Tensor:
    """The mean over a disc with a radius in pixels."""
    reach = math.ceil(severity)
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    return _filtered(x, (steps[:, None] ** 2 + steps**2 <= severity**2).double())


def _brightness(x: Tensor, severity: float, seed: int) -> Tensor:
    """Brighter by so many per cent of the range."""
    return x + severity / 100


def _contrast(x: Tensor, severity: float, seed: int) -> Tensor:
    """Contrast in per cent of what it was, around the mean of each sample."""
    middle = x.flatten(1).mean(1).reshape(-1, *[1] * (x.ndim - 1))
    return middle + severity / 100 * (x - middle)


def _jpeg(x: Tensor, severity: float, seed: int) -> Tensor:
    """JPEG of this quality, 1 to 95, by Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError('JPEG needs Pillow: pip install "wassail[images]".') from None
    import numpy as np

    found = []
    for sample in _images(x).clamp(0, 1).cpu():
        pixels = (255 * sample).round().to(torch.uint8).movedim(0, -1).numpy()
        file = BytesIO()
        Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0]).save(
            file, "JPEG", quality=int(severity)
        )
        file.seek(0)
        with Image.open(file, formats=["JPEG"]) as picture:
            seen = torch.from_numpy(np.array(picture, dtype=np.float64) / 255)
        found.append(seen.movedim(-1, 0) if seen.ndim == 3 else seen[None])
    return torch.stack(found).to(x).reshape(x.shape) if found else x


def _pixelate(x: Tensor, severity: float, seed: int) -> Tensor:
    """Blocks of so many pixels each way get their mean."""
    size = int(severity)
    images = _images(x)
    small = F.avg_pool2d(images, size, ceil_mode=True, count_include_pad=False)
    large = small.repeat_interleave(size, -1).repeat_interleave(size, -2)
    return large[..., : images.shape[-2], : images.shape[-1]].reshape(x.shape)


def _translate(x: Tensor, severity: float, seed: int) -> Tensor:
    """So many whole pixels to the right; the left edge is repeated."""
    step = int(severity)
    images = _images(x)
    moved = F.pad(images, (step, 0, 0, 0), mode="replicate")
    return moved[..., : images.shape[-1]].reshape(x.shape)


def _rotate(x: Tensor, severity: float, seed: int) -> Tensor:
    """By so many degrees about the middle, bilinear; edges are repeated."""
    images = _images(x)
    height, width = images.shape[-2:]
    angle = math.radians(severity)
    rows = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    across = math.cos(angle) * columns + math.sin(angle) * rows[:, None]
    down = math.cos(angle) * rows[:, None] - math.sin(angle) * columns
    grid = torch.stack([2 * across / max(width - 1, 1), 2 * down / max(height - 1, 1)], -1)
    grid = grid.to(images).expand(len(images), -1, -1, -1)
    turned = F.grid_sample(images, grid, padding_mode="border", align_corners=True)
    return turned.reshape(x.shape)


def _spread(x: Tensor, severity: float, seed: int) -> Tensor:
    """Noise of so many per cent of the standard deviation of each feature over the samples."""
    width = x.double().std(0, correction=0).to(x)
    return x + severity / 100 * width * _normal(x, seed)


def _dropout(x: Tensor, severity: float, seed: int) -> Tensor:
    """So many per cent of all values are missing: the mean of the feature takes their place."""
    drawn = [torch.rand(x.shape[1:], generator=key) for key in generators(x, seed, 3)]
    missing = torch.stack(drawn).to(x.device) < severity / 100 if drawn else x < x
    return torch.where(missing, x.double().mean(0).to(x), x)


_ALL: tuple[Callable[[Tensor, float, int], Tensor], ...] = (
    *(_noise, _shot, _blur, _defocus, _brightness, _contrast),
    *(_jpeg, _pixelate, _translate, _rotate, _spread, _dropout),
)
KINDS = {shift.__name__.removeprefix("_"): shift for shift in _ALL}


def _normal(x: Tensor, seed: int) -> Tensor:
    drawn = [
        torch.randn(x.shape[1:], generator=key, dtype=torch.float64)
        for key in generators(x, seed, 1)
    ]
    return torch.stack(drawn).to(x) if drawn else torch.zeros_like(x)


def _images(x: Tensor) -> Tensor:
    """Samples as `(N, C, H, W)`."""
    if not is_image(tuple(x.shape[1:])):
        raise InputError(
            f"samples of shape {tuple(x.shape[1:])} are no images: choose shifts of features, "
            f"{', '.join(FEATURES)}."
        )
    return x if x.ndim == 4 else x[:, None]


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel convolved with a kernel whose sum becomes 1; edges are repeated."""
    images = _images(x)
    channels = images.shape[1]
    reach = kernel.shape[0] // 2
    weights = (kernel / kernel.sum()).to(images).expand(channels, 1, -1, -1)
    padded = F.pad(images, (reach, reach, reach, reach), mode="replicate")
    return F.conv2d(padded, weights, groups=channels).reshape(x.shape)
