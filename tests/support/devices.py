"""One call on the CPU and on the second device: a model, samples, and a comparison to the last
bit.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.second_device import Second, SecondTensor, second_device

# Where the samples and labels are when the model is on the device.
WAYS = ("everything there", "samples here", "labels here")


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Five classes of 1 x 4 x 4 images."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator)
                * (0.7 if parameter.ndim > 1 else 0.1)
            )
    return model.to(dtype)


def samples(
    model: nn.Module, count: int = 6, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Images with some pixels at the walls of the box, and their classes; the last label is
    wrong.
    """
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(4), dtype=dtype)
    x[:, :, 0] = x[:, :, 0].round()
    with torch.no_grad():
        y = model(x).argmax(1)
    y[-1] = (y[-1] + 1) % 5
    return x, y


def there(
    call: Callable[[Any, Tensor, Tensor], Any],
    model: Any,
    x: Tensor,
    y: Tensor,
    way: str = WAYS[0],
    float64: bool = True,
) -> tuple[Any, Second]:
    """What the call returns with the model on the second device, and what happened there."""
    with second_device(float64) as second:
        moved = copy.deepcopy(model).to(second.device) if isinstance(model, nn.Module) else model
        data = x if way == "samples here" else x.to(second.device)
        labels = y.to(second.device) if way == "everything there" else y
        second.waits.clear()
        return call(moved, data, labels), second


def differences(a: Any, b: Any, name: str = "result") -> list[str]:
    """Where two results differ in value, dtype or shape, whatever their devices."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        b = b.inside if isinstance(b, SecondTensor) else b
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [name]
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        fields = [field.name for field in dataclasses.fields(a)]
        return [
            bad
            for field in fields
            for bad in differences(getattr(a, field), getattr(b, field), f"{name}.{field}")
        ]
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return [
            bad for k, (p, q) in enumerate(zip(a, b)) for bad in differences(p, q, f"{name}[{k}]")
        ]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [bad for key in a for bad in differences(a[key], b[key], f"{name}[{key!r}]")]
    return [] if a == b or (a != a and b != b) else [name]
