"""A model whose answer depends on the size of the batch has no certificate."""

import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph.batches import batch_logits, check_batches
from wassail.certificates.graph.reader import read

INF = math.inf


class Odd(nn.Module):
    """A network that exchanges two logits in batches of one size."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.size = size
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x) + self.offset
        return z.flip(1) if len(x) == self.size else z


def data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 4, generator=generator), torch.arange(n) % 3


CALLS = {
    "radii": lambda m, x, y: ws.radii(m, x, y, INF),
    "verify": lambda m, x, y: ws.verify(m, x, y, ws.Threat(INF, INF, 0.01)),
    "certify": lambda m, x, y: ws.certify(m, x, y, norm=2, loss="margin"),
    "worst case": lambda m, x, y: ws.worst_case(
        m, x, y, ws.Threat(INF, 1, 0.01, domain=(0, 1)), "margin", time_limit=1
    ),
    "loss curve": lambda m, x, y: ws.loss_curve(m, x, y, norm=INF, order=1, loss="margin"),
    "sandwich": lambda m, x, y: ws.sandwich(
        m, x, y, ws.Threat(INF, 1, 0.01), gap=0.5, time_limit=1
    ),
    "evaluate": lambda m, x, y: ws.evaluate(
        m, (x, y), ws.Threat(INF, 1, 0.01), ("fgsm", "wda++"), certify="crown", look=False
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_size_that_the_call_uses_is_noticed(call) -> None:
    x, y = data(37)
    with pytest.raises(ws.InputError, match="depends on the batch"):
        call(Odd(37), x, y)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_a_common_term_hides_nothing(offset: float) -> None:
    x, y = data(37)
    with pytest.raises(ws.InputError, match="37 of 37 samples, in batches of 37"):
        ws.radii(Odd(37, offset), x, y, INF, method="crown")
    assert (ws.radii(Odd(38, offset), x, y, INF, method="crown").values > 0).any()


def test_the_last_batch_of_many_samples_counts() -> None:
    x, y = data(259)  # 250 and 9
    with pytest.raises(ws.InputError, match="9 of 259 samples"):
        ws.radii(Odd(9), x, y, INF, method="crown")


def test_models_that_keep_samples_apart_pass() -> None:
    for name in ("digits-mlp", "digits-cnn-adv", "digits-vit"):
        model = ws.zoo.load(name)
        x, _ = ws.zoo.data("digits")
        x = x[:37]
        graph = read(model, x.shape[1:], smooth=True)
        check_batches(graph, x, batch_logits(model, x))
        check_batches(graph, x.double(), batch_logits(model, x.double()))
        check_batches(graph, x[:0], batch_logits(model, x[:0]))
