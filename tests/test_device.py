"""Work by index on the CPU, by mask elsewhere: the same rows, no wait; and float64 where there
is none.
"""

import pytest
import torch

from support.second_device import second_device
from wassail.device import blend, fetch, has_float64, rows_to_compute, send, take, wide, write

pytestmark = pytest.mark.device

VALUES = torch.arange(12.0).reshape(4, 3)
MASKS = ([True, False, True, False], [False] * 4, [True] * 4)


@pytest.mark.parametrize("mask", MASKS)
def test_rows_are_computed_by_index_here_and_by_mask_there(mask):
    mask = torch.tensor(mask)
    expected = torch.where(mask[:, None], -VALUES, VALUES)

    def negate(values, mask):
        rows = rows_to_compute(mask)
        (part,) = take(rows, values)
        return len(rows), blend(mask, rows, -part, values)

    count, found = negate(VALUES, mask)
    assert count == int(mask.sum()) and torch.equal(found, expected)
    with second_device() as second:
        values, mask = (t.to(second.device, non_blocking=True) for t in (VALUES, mask))
        count, found = negate(values, mask)
        assert count == 4 and second.total == 0
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("rows", [None, [3, 0, 2]])
def test_write_changes_the_masked_rows_in_place(rows):
    rows = None if rows is None else torch.tensor(rows)
    mask = (
        torch.tensor([True, False, True, False])
        if rows is None
        else torch.tensor([True, False, True])
    )
    new = -1 - torch.arange(3.0 * len(mask)).reshape(-1, 3)
    expected = VALUES.clone()
    expected[mask if rows is None else rows[mask]] = new[mask]
    here = VALUES.clone()
    write(here, mask, new, rows)
    assert torch.equal(here, expected)
    with second_device() as second:
        target, mask, new = (
            t.to(second.device, non_blocking=True) for t in (VALUES.clone(), mask, new)
        )
        rows = None if rows is None else rows.to(second.device, non_blocking=True)
        write(target, mask, new, rows)
        assert second.total == 0
        assert torch.equal(target.cpu(), expected)


def test_masks_come_home_together_and_indices_go_without_a_wait():
    with second_device() as second:
        rows = send(torch.tensor([2, 0]), second.device)
        a = torch.zeros(4, dtype=torch.bool, device=second.device).index_fill(0, rows, True)
        assert second.total == 0
        here, there = fetch(a, ~a)
        assert second.total == 1
    assert here.tolist() == [True, False, True, False] and torch.equal(there, ~here)
    assert fetch(here)[0] is here


def test_float64_is_found_on_the_device_or_on_the_cpu():
    assert has_float64(torch.device("cpu"))
    with second_device() as second:
        assert has_float64(second.device)
        assert wide(torch.ones(1, device=second.device)).device == second.device
    with second_device(float64=False) as second:
        assert not has_float64(second.device)
        found = wide(torch.ones(1, device=second.device))
        assert found.device.type == "cpu" and found.dtype == torch.float64
