"""The ascent on slopes and multipliers: rows that leave keep what they reached."""

import torch

from wassail.certificates.relax.backward import Ascent


def climb(targets: torch.Tensor, steps: int, leave: dict[int, list[int]]) -> Ascent:
    """Maximise `-(v - target)^2` in each row; leave: step -> places of the rows that go on."""
    value = torch.zeros_like(targets).requires_grad_(True)
    ascent = Ascent([value])
    for step in range(steps):
        reached = -((value - targets) ** 2)
        (pull,) = torch.autograd.grad(reached.sum(), [value])
        ascent.keep(reached.detach(), [value])
        (move,) = ascent.moves([pull])
        assert move is not None
        value = value.detach() + 0.1 * move
        if step in leave:
            rows = torch.tensor(leave[step])
            ascent.take(rows)
            value = value[rows]
            targets = targets[rows]
        value = value.requires_grad_(True)
    return ascent


def test_rows_that_leave_do_not_change_the_others() -> None:
    targets = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    whole = climb(targets, 30, {})
    part = climb(targets, 30, {9: [0, 2, 3], 19: [1]})
    short = climb(targets, 10, {})
    middle = climb(targets, 20, {})
    assert part.kept[0][2] == whole.kept[0][2]
    assert part.best[2] == whole.best[2]
    assert part.kept[0][1] == short.kept[0][1]
    assert torch.equal(part.kept[0][[0, 3]], middle.kept[0][[0, 3]])
    assert part.kept[0][1] != whole.kept[0][1]


def test_noise_is_told_apart_for_tensors_in_different_units() -> None:
    small = torch.tensor([[1e-12, 2e-12]], dtype=torch.float64)
    large = torch.tensor([1.0], dtype=torch.float64)
    start = [torch.zeros(1, 2).double(), torch.zeros(1).double()]
    together = Ascent(start, floor=1e-30).moves([small, large])[0]
    apart = Ascent(start, floor=1e-30, apart=True).moves([small, large])[0]
    assert together is not None
    assert apart is not None
    assert not together.any()
    assert apart.all()
