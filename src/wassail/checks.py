"""What can be wrong with a model and its data."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from wassail.errors import InputError, remedies
from wassail.network import Model, as_taken, name_of
from wassail.specification import Labels, Specification
from wassail.threat import Boxes, Domain, boxes_of


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

    domain: box that they must lie in, or None; model: whose floating-point type the samples get if
    it refuses their own (`as_taken`).
    """
    if torch.is_inference_mode_enabled():
        raise InputError(
            "the call stands inside torch.inference_mode, where nothing can be differentiated: "
            "move it out, or use torch.no_grad."
        )
    x = _tensor(x, "samples", "a float tensor of shape (N, ...)")
    if isinstance(y, Specification):  # type: ignore[unreachable]
        raise InputError("this takes labels only: give class indices, not a specification.")
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
    _check_inside(x, domain)
    x = x.detach() if model is None else as_taken(model, x.detach())
    return x, y.long()


def _check_inside(x: Tensor, domain: Domain) -> None:
    """Refuse samples outside the domain."""
    boxes = boxes_of(domain)
    if boxes is not None:
        _check_own(x, boxes)
        return
    low, high = (float(x.min()), float(x.max())) if domain is not None and x.numel() else (0.0, 0.0)
    if domain is not None and x.numel() and not (domain[0] <= low and high <= domain[1]):
        seen = (
            f"the samples range over [{low:.4g}, {high:.4g}] but the domain is "
            f"[{domain[0]:g}, {domain[1]:g}]"
        )
        # More than one dimension and values above 128: a table has one, digits end at 16.
        if x.ndim > 2 and 128 < high <= 255 and low >= 0 and domain == (0.0, 1.0):
            raise remedies(
                f"{seen}, and these look like 8-bit images",
                "divide them by 255",
                "save them as uint8, or divided by 255",
            )
        raise remedies(
            seen,
            "put any normalisation inside the model, clamp the samples, or give their domain",
            "give their box with --domain LOW HIGH (for features with boxes of their own, evaluate "
            "has --box FILE, and `wassail init` can write such a file), or samples from "
            "before the normalisation, which --mean and --std put inside the model",
        )


def _check_own(x: Tensor, boxes: Boxes) -> None:
    """Refuse samples outside their own boxes."""
    low, high = (side.to(x.device) for side in boxes.fit(x))
    outside = (x < low) | (x > high)
    if bool(outside.any()):
        sample, *place = outside.nonzero()[0].tolist()
        at = place[0] if len(place) == 1 else tuple(place)
        where = (sample, *place)
        value, *ends = (float(v.expand_as(x)[where]) for v in (x, low, high))
        raise InputError(
            f"sample {sample} has {value:g} at feature {at}, outside its box "
            f"[{ends[0]:g}, {ends[1]:g}]: widen the box or clamp the sample."
        )


def check_task(
    x: Tensor, y: Labels, domain: Domain, model: Model | None = None
) -> tuple[Tensor, Labels]:
    """As `check_data`, where a specification may stand in the place of labels: it is fitted to the
    samples, and one that is about classes gives its labels.

    y: labels, or a specification; domain: box that they must lie in, or None; model: see
    `check_data`.
    """
    if not isinstance(y, Specification):
        return check_data(x, y, domain, model)
    if y.labels is not None:
        return check_data(x, y.labels, domain, model)
    count = len(x) if isinstance(x, Tensor) and x.ndim else 0
    x, _ = check_data(x, torch.zeros(count, dtype=torch.int64), domain, model)
    return x, y.fit(len(x)).to(x.device)


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
