"""Bounds and answers do not jump with the number of threads, the size of a part of the work, or
the order of the samples.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from figures import AGREE, answers, apart, bounds, cases
from torch import Tensor

import wassail as ws
from wassail import ties
from wassail.certificates.relax import jacobian, rows

pytestmark = pytest.mark.kernels


def collected(part: Callable[[], Iterator[tuple[str, Tensor]]]) -> dict[str, list[float]]:
    return {name: values.double().tolist() for name, values in part()}


def test_bounds_do_not_depend_on_threads_or_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    few = partial(bounds, few=True)
    plain = collected(few)
    torch.set_num_threads(2)
    threaded = collected(few)
    torch.set_num_threads(1)
    monkeypatch.setattr(rows, "CHUNK", 1)
    monkeypatch.setattr(jacobian, "ROWS", 1)
    cut = collected(few)
    for other in (threaded, cut):
        off = apart(plain, other)
        assert max(off.values()) <= AGREE, {
            name: value for name, value in off.items() if value > AGREE
        }


def test_radii_do_not_depend_on_batches_or_the_order_of_samples() -> None:
    _, graph, x, y = next(cases())
    whole = ws.radii(graph, x, y, 2.0, method="crown").values
    single = ws.radii(graph, x, y, 2.0, method="crown", batch_size=1).values
    turned = ws.radii(graph, x.flip(0), y.flip(0), 2.0, method="crown").values.flip(0)
    torch.testing.assert_close(single, whole, rtol=AGREE, atol=0)
    torch.testing.assert_close(turned, whole, rtol=AGREE, atol=0)


@pytest.mark.slow
def test_answers_do_not_depend_on_threads() -> None:
    torch.set_num_threads(1)
    plain = collected(answers)
    torch.set_num_threads(2)
    off = apart(plain, collected(answers))
    assert max(off.values()) <= AGREE, {name: value for name, value in off.items() if value > AGREE}


def noisy(values: Tensor, seed: int) -> Tensor:
    """As another kernel would have them."""
    generator = torch.Generator().manual_seed(seed)
    return values * (
        1 + 2.0**-50 * torch.randn(values.shape, dtype=values.dtype, generator=generator)
    )


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_change_a_choice(seed: int) -> None:
    values = torch.tensor(
        [[0.3, 0.7, 0.1 * 7, 0.7, -math.inf, 0.0], [1e-300, 0.0, 0.0, 1e-300, 0.0, 0.0]]
    ).double()
    other = noisy(values, seed)
    assert ties.first_largest(other).tolist() == [1, 0]
    assert ties.in_order(other, descending=True)[0].tolist() == [1, 2, 3, 0, 5, 4]
    assert ties.in_order(other[0]).tolist() == [4, 5, 0, 1, 2, 3]
    assert ties.largest(other, 3)[0].tolist() == [1, 2, 3]
    assert ties.in_order(values[0, :0]).tolist() == []
    high = torch.tensor([1.0, 1.0, 1.001, 0.999], dtype=torch.float64)
    assert ties.steep_below(
        noisy(-torch.ones(4).double(), seed), noisy(high, seed + 9)
    ).tolist() == [False, False, True, False]


def test_noise_has_no_gradient() -> None:
    rows = torch.tensor([[1.0, 1e-9, 0.0], [1e-9, 2e-9, 0.0]], requires_grad=True)
    firm = ties.firm(rows)
    assert torch.equal(firm, rows)
    firm.abs().sum().backward()
    assert rows.grad is not None and rows.grad.tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    first, second = ties.quiet([torch.tensor([[1.0, 1e-7]]), torch.tensor([[1e-6, -0.5]])])
    assert first is not None and second is not None
    assert first.tolist() == [[1.0, 0.0]] and second.tolist() == [[0.0, -0.5]]
    assert ties.quiet([None]) == [None]
