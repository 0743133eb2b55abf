"""Whether a model computes each sample by itself, in the batches that a call really uses."""

from __future__ import annotations

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.errors import InputError
from wassail.network import BATCH_SIZE, Model, as_taken, device_of, frozen

CLOSE = 1e-3  # of the spread of the logits: farther apart, structure and model are not the same
ROUNDINGS = 8  # of the largest logit


def batch_logits(model: Model, x: Tensor) -> Tensor | None:
    """The model's logits at samples `(N, *shape)`, in calls of at most `BATCH_SIZE`, on the CPU;
    None without samples.
    """
    device = device_of(model, x.device)
    x = as_taken(model, x)
    with frozen(model), torch.no_grad():
        parts = [model(part.to(device)).cpu() for part in torch.split(x, BATCH_SIZE) if len(x)]
    return torch.cat(parts) if parts else None


def check_batches(graph: Graph, x: Tensor, logits: Tensor | None, specified: bool = False) -> None:
    """Raise if the model's logits in the batches of a call are not those of its structure.

    A structure is read for one sample and tested on a few. A model whose answer to a sample depends
    on the batch that it is in has no structure that a certificate could be about.

    Args:
        graph: the structure.
        x: samples `(N, *shape)`.
        logits: of the model there, `(N, K)`, as `batch_logits` gives them; None without samples.
        specified: whether a term that all logits share matters, too.
    """
    if logits is None or not len(x):
        return
    ours = torch.cat([graph.logits(part.to(graph.device)).cpu() for part in torch.split(x, 64)])
    truth = logits.double()
    rounding = ROUNDINGS * torch.finfo(logits.dtype).eps * truth.abs().max()
    # A common term of all logits changes no margin, and the structure may leave it out.
    if not specified or graph.common:
        ours = ours - ours.mean(1, keepdim=True)
        truth = truth - truth.mean(1, keepdim=True)
    apart = (truth - ours).abs().amax(1)
    far = ~(apart <= CLOSE * truth.abs().max() + rounding)
    if far.any():
        size = min(len(x), BATCH_SIZE)
        raise InputError(
            f"the model's logits at {int(far.sum())} of {len(x)} samples, in batches of {size}, "
            "are not those of the structure that was read for one sample: its answer to a sample "
            "depends on the batch, so nothing can be certified; let every operation work on one "
            "sample at a time."
        )
