"""A model with what is known of its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wassail.errors import InputError, remedies
from wassail.network import Model


@dataclass(frozen=True, eq=False)
class Source:
    """A model, and where it came from.

    model: eval mode, normalisation inside, a batch `(n, *shape)` in the box -> logits `(n, K)`;
    name: what the person typed; kind: one of `KINDS`; info: what a run records, ready for JSON:
    files with their SHA-256, the weights' own, mean, std, versions of the libraries that loaded it.
    """

    model: Model
    name: str
    kind: str
    info: Mapping[str, Any]


class Normalized(nn.Module):
    """`model((x - mean) / std)`: a classifier that was trained on normalised samples, for samples
    in the box.

    mean, std: a number, or one for each channel (the first axis of a sample).
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: Model, mean: float | Sequence[float], std: float | Sequence[float]
    ) -> None:
        super().__init__()
        self.model = model
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        double = parameter is not None and parameter.dtype == torch.float64
        dtype = torch.float64 if double else torch.float32
        self.register_buffer("mean", statistic_of("mean", mean, dtype))
        self.register_buffer("std", statistic_of("std", std, dtype))
        if self.mean.ndim and self.std.ndim and len(self.mean) != len(self.std):
            raise InputError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}: give one for each "
                "channel."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of samples in the box, `(n, C, ...) -> (n, K)`."""
        return self.model((x - self._shaped(self.mean, x)) / self._shaped(self.std, x))

    def _shaped(self, statistic: Tensor, x: Tensor) -> Tensor:
        if not statistic.ndim:
            return statistic
        # Broadcasting would make three channels out of one.
        if x.ndim < 2 or x.shape[1] != len(statistic):
            raise InputError(
                f"mean and std have {len(statistic)} numbers but the samples have shape "
                f"{tuple(x.shape[1:])}: give one number, or one for each channel."
            )
        return statistic.reshape(-1, *[1] * (x.ndim - 2))


class Logits(nn.Module):
    """The logits out of a model that returns more: the attribute or key of that name, or the
    entry at that place.
    """

    def __init__(self, model: Model, key: str | int = "logits") -> None:
        super().__init__()
        self.model = model
        self.key = key

    def forward(self, x: Tensor) -> Tensor:
        """`(n, *shape) -> (n, K)`."""
        z: Any = self.model(x)
        try:
            if isinstance(self.key, int) or (isinstance(z, Mapping) and self.key in z):
                found = z[self.key]
            else:
                found = getattr(z, self.key)
        except (AttributeError, KeyError, IndexError, TypeError):
            has = f" with {', '.join(map(str, z))}" if isinstance(z, Mapping) else ""
            raise remedies(
                f"the model returns a {type(z).__name__}{has}, which has no {self.key!r}",
                "name its logits",
                "name its logits with --logits KEY",
            ) from None
        return found  # type: ignore[no-any-return]


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


def statistic_of(
    what: str, values: float | Sequence[float] | Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean or std as a tensor, checked."""
    tensor = torch.as_tensor(values, dtype=dtype).detach().clone()
    if tensor.ndim == 1 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.ndim > 1:
        raise InputError(
            f"{what} has shape {tuple(tensor.shape)}: give one number, or one for each channel."
        )
    if (
        not tensor.numel()
        or not torch.isfinite(tensor).all()
        or (what == "std" and not (tensor > 0).all())
    ):
        raise InputError(
            f"{what} is {tensor.tolist()}: give finite "
            f"numbers{', all positive' if what == 'std' else ''}."
        )
    return tensor
