"""What can be wrong with a model and its data."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from wassail.errors import InputError
from wassail.network import Model, as_taken, name_of
from wassail.threat import Domain


def _tensor(value: Tensor, what: str, wanted: str) -> Tensor:
    """A dense tensor, or one sentence for what is none."""
    try:
        found = None if value is None else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None:
        shown = "None" if value is None else f"a {type(value).__name__} that is no array"
        raise InputError(f"the {what} are {shown}: give {wanted}.")
    if found.layout != torch.strided:
        raise InputError(f"the {what} are a sparse tensor: convert them with to_dense().")
    return found


def check_data(
    x: Tensor, y: Tensor, domain: Domain, model: Model | None = None
) -> tuple[Tensor, Tensor]:
    """Samples `(N, *shape)` and labels `(N,)` as tensors, or one sentence that says what is
    wrong with them.

    Long because it is a list of what can be wrong with data, one sentence each.

    Args:
        x: samples.
        y: labels.
        domain: box that they must lie in, or None.
        model: whose floating-point type the samples get if it refuses their own (`as_taken`).
    """
    if torch.is_inference_mode_enabled():
        raise InputError(
            "the call stands inside torch.inference_mode, where nothing can be differentiated: "
            "move it out, or use torch.no_grad."
        )
    x = _tensor(x, "samples", "a float tensor of shape (N, ...)")
    y = _tensor(y, "labels", "class indices of shape (N,)")
    if x.dtype not in (torch.float32, torch.float64):
        scale = " and divide by 255 if they are 8-bit images" if not x.is_floating_point() else ""
        raise InputError(f"the samples are {name_of(x.dtype)}: convert them with x.float(){scale}.")
    if x.ndim < 2:
        raise InputError(
            f"the samples have shape {tuple(x.shape)}: a batch has shape (N, ...), use x[None] "
            "for one."
        )
    if (
        y.dtype.is_floating_point
        or y.dtype in (torch.bool, torch.complex64, torch.complex128)
        or y.ndim != 1
    ):
        raise InputError(
            f"the labels are {name_of(y.dtype)} of shape {tuple(y.shape)}: give class indices of "
            "shape (N,)."
        )
    if len(x) != len(y):
        raise InputError(
            f"there are {len(x)} samples but {len(y)} labels: give one label for each sample."
        )
    if y.device != x.device:
        y = y.to(x.device)
    if not torch.isfinite(x).all():
        bad = (~torch.isfinite(x.flatten(1))).any(1).nonzero()[0].item()
        raise InputError(
            f"sample {bad} contains NaN or infinity: remove such samples or repair the "
            "preprocessing."
        )
    low, high = (float(x.min()), float(x.max())) if domain is not None and x.numel() else (0.0, 0.0)
    if domain is not None and x.numel() and not (domain[0] <= low and high <= domain[1]):
        seen = (
            f"the samples range over [{low:.4g}, {high:.4g}] but the domain is "
            f"[{domain[0]:g}, {domain[1]:g}]"
        )
        if 2 < high <= 255 and low >= 0 and domain == (0.0, 1.0):
            raise InputError(f"{seen}: these look like 8-bit images, divide them by 255.")
        raise InputError(
            f"{seen}: put any normalisation inside the model, clamp the samples, or give their "
            "domain."
        )
    x = x.detach() if model is None else as_taken(model, x.detach())
    return x, y.long()


def fingerprint(model: object) -> str | None:
    """The SHA-256 of a module's parameters and buffers, names, shapes and bytes; None for a
    callable that shows none.
    """
    if not isinstance(model, nn.Module):
        return None
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            if value.is_meta:
                raise InputError(
                    "the model's weights are on the meta device, where they have no values: load "
                    "them first."
                )
            found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            # As bytes: numpy knows no bfloat16.
            found.update(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return found.hexdigest()
