"""The same work on every device: how not to make the host wait for a GPU, and what to do where
there is no float64.

On the CPU it pays to pick out the rows that need work. On another device the host would have to
wait to learn which they are, and the rows are computed side by side anyway: there all rows are
computed and a mask chooses. Rows are independent, so both give the same numbers. An index of whole
numbers costs no wait, a boolean index does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def host_waits(like: Tensor) -> bool:
    """Whether the host must wait to read this tensor."""
    return not like.is_cpu


def rows_to_compute(mask: Tensor) -> Tensor:
    """The rows to compute, `(k,)`: on the CPU those where the mask `(N,)` holds, on another
    device all. No wait.
    """
    return (
        torch.arange(mask.shape[0], device=mask.device)
        if host_waits(mask)
        else mask.nonzero()[:, 0]
    )


def take(rows: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """The rows `(k,)` of each of the values; if these are all rows, in order, the values
    themselves. No wait.
    """
    if rows.shape[0] == values[0].shape[0]:
        return values
    return tuple(value.index_select(0, rows) for value in values)


def blend(mask: Tensor, rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` where the mask `(N,)` holds, else `old`, for `rows = rows_to_compute(mask)` and `new`
    computed for these rows. No wait.

    On the CPU, where `new` has all rows, the mask holds everywhere.
    """
    if rows.shape[0] < old.shape[0]:
        return old.index_copy(0, rows, new)
    return torch.where(spread(mask, old), new, old) if host_waits(old) else new


def write(target: Tensor, mask: Tensor, values: Tensor, rows: Tensor | None = None) -> None:
    """`target[rows[mask]] = values[mask]`, in place. No wait.

    Args:
        target: `(N, *shape)`.
        mask: which of the values to write, `(m,)`.
        values: `(m, *shape)`.
        rows: where they belong, `(m,)`, no row twice; all rows in order by default.
    """
    if host_waits(target):
        old = target if rows is None else target[rows]
        new = torch.where(spread(mask, target), values, old)
        target.copy_(new) if rows is None else target.index_copy_(0, rows, new)
    else:
        chosen = mask.nonzero()[:, 0]
        target.index_copy_(0, chosen if rows is None else rows[chosen], values[chosen])


def fetch(*masks: Tensor) -> tuple[Tensor, ...]:
    """Masks of one shape, on the CPU: one wait for all of them."""
    return torch.stack(masks).cpu().unbind(0) if host_waits(masks[0]) else masks


def send(index: Tensor, device: torch.device) -> Tensor:
    """An index made on the CPU, on the device. No wait: the copy is queued."""
    return index.to(device, non_blocking=True)


def spread(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of rows `(N,)`, shaped to broadcast against `like` `(N, *shape)`."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def has_float64(device: torch.device) -> bool:
    """Whether tensors on the device can be float64: Apple's MPS has none."""
    if device.type in ("cpu", "cuda"):
        return True
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def wide(values: Tensor) -> Tensor:
    """The values in float64, on their device or, if that has no float64, on the CPU. Bring the
    result home with `.to`.
    """
    return values.double() if has_float64(values.device) else values.cpu().double()
