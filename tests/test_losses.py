"""Losses against torch and plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wassail.losses import cross_entropy, dlr, flip_tolerance, margin, predict, strongest_rival

quick = settings(deadline=None, max_examples=25, derandomize=True)
LOSSES = [cross_entropy, margin, dlr]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)


@st.composite
def logits(draw, fewest=2, most=7):
    n = draw(st.integers(1, 5))
    k = draw(st.integers(fewest, most))
    entry = st.one_of(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.floats(-20, 20, width=32))
    z = draw(hnp.arrays(np.float64, (n, k), elements=entry))
    y = draw(hnp.arrays(np.int64, (n,), elements=st.integers(0, k - 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return torch.tensor(z.tolist(), dtype=dtype), torch.tensor(y.tolist())


def spread(n, k, seed=0, dtype=torch.float64):
    """Logits without ties: gradients exist everywhere."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.stack([torch.randperm(k, generator=generator) for _ in range(n)]).to(dtype)
    z = z + 0.2 * torch.rand(n, k, generator=generator, dtype=dtype)
    return z, torch.randint(k, (n,), generator=generator)


def rivals(row, label):
    return [v for j, v in enumerate(row) if j != label]


def loop_margin(z, y):
    return [max(rivals(row, c)) - row[c] for row, c in zip(z.tolist(), y.tolist())]


def loop_dlr(z, y):
    found = []
    for row, c in zip(z.tolist(), y.tolist()):
        first, _, third, *_ = sorted(row, reverse=True)
        found.append(-(row[c] - max(rivals(row, c))) / (first - third + 1e-12))
    return found


def check(found, z, truth, rtol):
    assert found.shape == (len(z),)
    assert found.dtype == z.dtype
    np.testing.assert_allclose(found.numpy(), truth, rtol=rtol, atol=rtol)


# --------------------------------------------------------------------------------------------------
# the values


@given(logits())
@quick
def test_cross_entropy_against_torch_and_its_formula(case):
    z, y = case
    found = cross_entropy(z, y)
    assert torch.equal(found, torch.nn.CrossEntropyLoss(reduction="none")(z, y))
    truth = [
        math.log(sum(math.exp(v - row[c]) for v in row)) for row, c in zip(z.tolist(), y.tolist())
    ]
    check(found, z, truth, 1e-5 if z.dtype == torch.float32 else 1e-9)


@given(logits())
@quick
def test_margin_against_a_loop(case):
    z, y = case
    check(margin(z, y), z, loop_margin(z, y), 1e-6 if z.dtype == torch.float32 else 1e-14)


@given(logits(fewest=4))
@quick
def test_dlr_against_a_loop(case):
    z, y = case
    ordered = z.sort(1, descending=True).values
    apart = ordered[:, 0] - ordered[:, 2] > 1e-3  # else the ratio amplifies rounding
    truth = np.array(loop_dlr(z, y))[apart.numpy()]
    check(dlr(z, y)[apart], z[apart], truth, 1e-3 if z.dtype == torch.float32 else 1e-9)


@given(logits(fewest=2, most=3))
@quick
def test_dlr_of_two_or_three_classes_is_the_margin(case):
    z, y = case
    assert torch.equal(dlr(z, y), margin(z, y))


@pytest.mark.parametrize(
    ("row", "label", "expected"),
    [
        ([4.0, 2.0, 1.0, 0.0], 0, -2 / 3),  # right: 2 - 4 over 4 - 1
        ([4.0, 2.0, 1.0, 0.0], 1, 2 / 3),  # wrong
        ([4.0, 2.0, 1.0, 0.0], 3, 4 / 3),  # the label is not among the first three
        ([1.0, 1.0, 0.0, 0.0], 0, 0.0),
        ([0.0, 0.0, 0.0, 0.0], 2, 0.0),
    ],
)
def test_dlr_by_hand(row, label, expected):
    z = torch.tensor([row], dtype=torch.float64)
    y = torch.tensor([label])
    assert dlr(z, y).item() == pytest.approx(expected, abs=1e-9)
    # The ratio ignores shifts and scales; the margin scales.
    assert dlr(7 * z + 3, y).item() == pytest.approx(expected, abs=1e-9)
    assert margin(7 * z + 3, y).item() == pytest.approx(7 * margin(z, y).item())


@each_loss
def test_losses_are_finite_where_all_logits_agree(loss):
    z = torch.zeros(2, 5, requires_grad=True)
    value = loss(z, torch.tensor([0, 4]))
    assert value.isfinite().all()


@each_loss
def test_losses_are_larger_where_the_model_is_more_wrong(loss):
    z = torch.tensor([[3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    values = [loss(z, torch.tensor([c])).item() for c in range(4)]
    assert values == sorted(values)
    assert len(set(values)) == 4


@each_loss
@pytest.mark.parametrize("k", [2, 3, 4, 10])
def test_a_row_does_not_depend_on_the_others(loss, k):
    z, y = spread(6, k)
    together = loss(z, y)
    alone = torch.cat([loss(z[i : i + 1], y[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, alone, rtol=1e-14, atol=0)


# --------------------------------------------------------------------------------------------------
# gradients


@each_loss
@pytest.mark.parametrize("k", [2, 3, 4, 10])
def test_gradients_match_finite_differences(loss, k):
    z, y = spread(6, k)
    assert torch.autograd.gradcheck(lambda t: loss(t, y), z.requires_grad_())


@pytest.mark.parametrize("k", [2, 3, 4, 10])
def test_margin_gradient_is_rival_minus_label(k):
    z, y = spread(6, k)
    (g,) = torch.autograd.grad(margin(z.requires_grad_(), y).sum(), z)
    expected = torch.zeros_like(g)
    for i, (row, c) in enumerate(zip(z.tolist(), y.tolist())):
        expected[i, c] = -1
        expected[i, row.index(max(rivals(row, c)))] = 1
    assert torch.equal(g, expected)


@each_loss
def test_losses_leave_the_logits_alone(loss):
    z, y = spread(4, 5)
    before = z.clone()
    loss(z, y)
    assert torch.equal(z, before)


# ---------------------------------------------------------------------------------------- rivals
# and predictions


@given(logits())
@quick
def test_strongest_rival_against_a_loop(case):
    z, y = case
    value, where = strongest_rival(z, y)
    assert value.tolist() == [max(rivals(row, c)) for row, c in zip(z.tolist(), y.tolist())]
    assert (where != y).all()
    assert torch.equal(z.gather(1, where[:, None])[:, 0], value)


@given(logits())
@quick
def test_predict_counts_a_tie_as_an_error(case):
    z, y = case
    found = predict(z, y)
    for row, c, p in zip(z.tolist(), y.tolist(), found.tolist()):
        outright = row[c] > max(rivals(row, c))
        assert (p == c) == outright
        assert row[p] == max(row)
    assert torch.equal(found == y, margin(z, y) < 0)


def test_predict_agrees_with_argmax_without_ties():
    z, y = spread(50, 10)
    assert torch.equal(predict(z, y), z.argmax(1))


@pytest.mark.parametrize(
    ("row", "flipped"),
    [
        ([0.0, 0.02, -1.0], True),
        ([0.0, 0.01, -1.0], True),  # exactly the tolerance is enough
        ([0.0, 0.009, -1.0], False),
        ([0.0, 0.0, -1.0], False),  # a bare tie is no flip to store
        ([0.0, -0.1, -1.0], False),
        ([0.0, 0.02, -100.0], False),  # relative to the largest logit, of either sign: 1 is needed
        ([0.0, 2.0, -100.0], True),
        ([100.0, 100.5, 0.0], False),
        ([100.0, 102.0, 0.0], True),
    ],
)
def test_predict_with_a_tolerance(row, flipped):
    z = torch.tensor([row], dtype=torch.float64)
    assert predict(z, torch.tensor([0]), tolerance=0.01).tolist() == [1 if flipped else 0]


def test_flip_tolerance_is_above_rounding():
    assert flip_tolerance(torch.float64) == 1e-9
    assert flip_tolerance(torch.float32) == 1e-5
    for dtype in (torch.float32, torch.float64):
        assert flip_tolerance(dtype) > 10 * torch.finfo(dtype).eps
