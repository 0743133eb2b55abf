"""The second device refuses what CUDA refuses, counts where the host waits, and computes what
the CPU computes.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from support.second_device import SecondTensor, second_device

pytestmark = pytest.mark.device

TWO = "Expected all tensors to be on the same device"

REFUSED = {
    "add": (lambda here, there: here + there, TWO),
    "in place": (lambda here, there: there.add_(here), TWO),
    "in place on the host": (lambda here, there: here.add_(there), TWO),
    "a scalar of the host as target": (lambda here, there: torch.zeros(()).add_(there.sum()), TWO),
    "cat": (lambda here, there: torch.cat([here, there]), TWO),
    "stack of scalars": (lambda here, there: torch.stack([here.sum(), there.sum()]), TWO),
    "where": (lambda here, there: torch.where(there > 0, here, there), TWO),
    "where by a mask of the host": (lambda here, there: torch.where(here > 0, there, 0), TWO),
    "matmul": (lambda here, there: here @ there.T, TWO),
    "gather": (lambda here, there: there.gather(1, here.argsort(1)), TWO),
    "index_add": (lambda here, there: there.index_add(0, torch.arange(2), there), TWO),
    "equal": (lambda here, there: torch.equal(here, there), TWO),
    "put values of the host": (
        lambda here, there: there.index_put((torch.arange(2, device=there.device),), here),
        TWO,
    ),
    "linear": (lambda here, there: nn.Linear(3, 2)(there), TWO),
    "index": (
        lambda here, there: here[torch.arange(2, device=there.device)],
        "indices should be either on cpu",
    ),
    "mask": (lambda here, there: here[there > 0], "indices should be either on cpu"),
    "put": (
        lambda here, there: here.index_put_((there > 0,), torch.tensor(1.0)),
        "indices should be either on cpu",
    ),
    "generator": (
        lambda here, there: torch.rand(3, device=there.device, generator=torch.Generator()),
        "for generator",
    ),
    "generator in place": (
        lambda here, there: there.uniform_(generator=torch.Generator()),
        "for generator",
    ),
    "numpy": (lambda here, there: there.numpy(), "to numpy"),
    "asarray": (lambda here, there: np.asarray(there), "to numpy"),
}
WAITS = {
    "item": (lambda t: t.sum().item(), 1),
    "if": (lambda t: bool((t > 0).any()), 1),
    "float": (lambda t: float(t[0, 0]), 1),
    "format": (lambda t: f"{t.max():.3f}", 1),
    "tolist": (lambda t: t.tolist(), 1),
    "cpu": (lambda t: t.cpu(), 1),
    "to": (lambda t: t.to("cpu", torch.float64), 1),
    "copy home": (lambda t: torch.zeros(2, 3).copy_(t), 1),
    "send": (lambda t: torch.ones(3).to(t.device), 1),
    "send without waiting": (lambda t: torch.ones(3).to(t.device, non_blocking=True), 0),
    "tensor": (lambda t: torch.tensor(1.0, device=t.device), 1),
    "as_tensor": (lambda t: torch.as_tensor([1.0, 2.0], device=t.device), 1),
    "tensor of scalars": (lambda t: torch.tensor([t[0, 0], t[0, 1]]), 2),
    "assign rows of the host": (lambda t: t.clone().__setitem__(0, torch.zeros(3)), 1),
    "nonzero": (lambda t: t.nonzero(), 1),
    "mask": (lambda t: t[t > 0], 1),
    "put by a mask": (lambda t: t.clone().__setitem__(t > 0, 1.0), 1),
    "index of the host": (lambda t: t[torch.tensor([0])], 1),
    "list": (lambda t: t[[0, 1]], 1),
    "masked_select": (lambda t: t.masked_select(t > 0), 1),
    "unique": (lambda t: t.unique(), 1),
    "bincount": (lambda t: (t > 0).long().flatten().bincount(), 1),
    "equal": (lambda t: torch.equal(t, t + 1), 1),
    "pick by a scalar": (lambda t: t[t.argmax()] if t.argmax() < 2 else t, 1),
    "arithmetic": (lambda t: (t * 2 + torch.tensor(1.0)).clamp(0, 1).where(t > 0, 0).sum(1), 0),
    "sort and gather": (lambda t: t.gather(1, t.argsort(1)).cumsum(1).topk(2).values, 0),
    "index": (lambda t: t[torch.arange(2, device=t.device)], 0),
    "fill": (lambda t: torch.full((2,), 3.0, device=t.device) + t.new_zeros(2), 0),
    "assign": (lambda t: t.clone().__setitem__(slice(0, 1), 0.0), 0),
    "masked_fill": (lambda t: t.masked_fill(t > 0, 1.0), 0),
    "index_add": (lambda t: t.index_add(0, torch.arange(2, device=t.device), t), 0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_what_cuda_refuses(case):
    function, words = REFUSED[case]
    with second_device() as second:
        here = torch.arange(6.0).reshape(2, 3) - 2
        there = here.to(second.device)
        with pytest.raises((RuntimeError, TypeError), match=words):
            function(here, there)


@pytest.mark.parametrize("case", WAITS)
def test_it_counts_where_the_host_waits(case):
    function, expected = WAITS[case]
    with second_device() as second:
        there = (torch.arange(6.0).reshape(2, 3) - 2).to(second.device, non_blocking=True)
        assert second.total == 0
        function(there)
    assert second.total == expected, second.worst()


def test_without_float64_it_takes_none():
    with second_device(float64=False) as second:
        there = torch.ones(2, device=second.device)
        with pytest.raises(TypeError, match="float64"):
            there.double()
        with pytest.raises(TypeError, match="float64"):
            torch.ones(2, dtype=torch.float64).to(second.device)
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(2, dtype=torch.float64, device=second.device)
        assert there.cpu().double().dtype == torch.float64  # the way to go
    with second_device() as second:
        assert torch.ones(2, device=second.device).double().dtype == torch.float64


def test_random_numbers_of_the_device_are_told():
    with second_device() as second:
        torch.rand(3).to(second.device)
        assert not second.draws
        torch.rand(3, device=second.device)
        torch.ones(3, device=second.device).normal_()
    assert second.draws.total() == 2


def test_waits_are_charged_to_the_line_that_asked():
    import wassail as ws

    with second_device() as second:
        x = torch.ones(2, 3, device=second.device)
        ws.geometry.distances(x, x, 2)
    assert all(" at geometry.py:" in where for where in second.waits)
    assert "geometry.py" in second.worst()


def test_a_network_learns_on_it_as_on_the_cpu():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
    )
    x = torch.rand(5, 1, 4, 4)
    y = torch.tensor([0, 1, 1, 0, 1])

    def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    with second_device() as second:
        there = copy.deepcopy(plain).to(second.device)
        assert all(
            isinstance(p, SecondTensor) and p.device == second.device for p in there.parameters()
        )
        twin = copy.deepcopy(there)
        found = train(there, x.to(second.device), y.to(second.device))
        assert not torch.equal(found[0], next(twin.parameters()).detach().cpu())
    expected = train(plain, x, y)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_views_share_their_numbers_and_shapes_stay():
    with second_device() as second:
        there = torch.zeros(2, 3, device=second.device)
        there[:, 1] = 1
        row = there.T.reshape(-1)[2:4]
        there.view(-1)[0] = 5
        assert there.cpu().tolist() == [[5, 1, 0], [0, 1, 0]]
        assert row.cpu().tolist() == [1, 1]
        assert not there.T.is_contiguous() and there.T.contiguous().is_contiguous()
        out = torch.empty(2, 3, device=second.device)
        assert torch.add(there, 1, out=out) is out and out[0, 0].item() == 6
        with pytest.raises(NotImplementedError, match="in place"):
            there.unsqueeze_(0)


def test_it_counts_from_zero_each_time():
    with second_device() as second:
        torch.ones(1, device=second.device).item()
    with second_device() as again:
        assert again.total == 0
    assert second.total == 1
