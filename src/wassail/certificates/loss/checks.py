"""What `certify`, `loss_curve` and `worst_case` ask of their losses, samples and models."""

from __future__ import annotations

from torch import Tensor

from wassail.certificates.graph.batches import batch_logits, check_batches
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.checks import check_data
from wassail.errors import InputError, unknown
from wassail.losses import LIPSCHITZ
from wassail.names import ERRORS
from wassail.network import Model
from wassail.threat import Domain


def check_loss(loss: str) -> None:
    """Refuse a loss that is not Lipschitz."""
    if loss == "dlr":
        raise InputError(
            "the DLR loss is a ratio of logit differences and not Lipschitz: use 'margin' or "
            "'cross_entropy'."
        )
    if loss not in LIPSCHITZ:
        raise unknown("loss", loss, (*LIPSCHITZ, *ERRORS))


def check_samples(x: Tensor, y: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Samples and labels as tensors; at least one."""
    x, y = check_data(x, y, domain)
    if not len(x):
        raise InputError(
            "there are no samples: a certificate is about the loss on data, give at least one."
        )
    return x, y


def check_labels(graph: Graph, y: Tensor) -> None:
    """Refuse labels that the network has no output for."""
    if graph.outputs < 2 or int(y.min()) < 0 or int(y.max()) >= graph.outputs:
        raise InputError(
            f"the labels range over {int(y.min())}..{int(y.max())} but the model has "
            f"{graph.outputs} classes."
        )


def graph_of(model: Model | Graph, x: Tensor) -> Graph:
    """A model as a graph, compared with its logits at the samples."""
    if isinstance(model, Graph):
        return model
    graph = read(model, tuple(x.shape[1:]), smooth=True, device=x.device, samples=x)
    check_batches(graph, x, batch_logits(model, x))
    return graph
