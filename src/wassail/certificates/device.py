"""Where certificates are computed: on the model's device, if that has float64."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

HOST = torch.device("cpu")


def plain(device: torch.device) -> AbstractContextManager[None]:
    """Convolutions inside are sums of products in the type of their tensors.

    cuDNN may compute them by other formulas (Winograd, Fourier) or in TF32, whose errors no bound
    here covers. It is left out for certificates.
    """
    return torch.backends.cudnn.flags(enabled=False) if device.type == "cuda" else nullcontext()


def place(device: torch.device) -> torch.device:
    """The device itself if it computes in float64, else the CPU, with a warning.

    Bounds are rounded outward in float64. Some accelerators (Apple's MPS) have none.
    """
    if computes_float64(device):
        return device
    warnings.warn(
        f"the device {device} has no float64: certificates are computed on the CPU.",
        RuntimeWarning,
        stacklevel=2,
    )
    return HOST


def computes_float64(device: torch.device) -> bool:
    """Whether a device has float64, seen by trying."""
    if device.type == "cpu":
        return True
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True
