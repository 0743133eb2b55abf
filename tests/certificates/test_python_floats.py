"""No bound makes float32 out of Python's floats: torch.where of two numbers, torch.full and
torch.tensor of one take torch's default type, and a wall or a length that float32 rounds belongs to
another question.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import wassail as ws

DOUBLE = torch.float64
ROOM = str(Path(ws.__file__).parent / "certificates")
# A guess where to try, and a length of a step of an ascent: no bound takes either for exact.
GUESSES = ("prove/radius_search.py", "lipschitz/steepest.py")


def inexact(value: Any) -> bool:
    """Whether a number, or one in a list, is not what float32 makes of it."""
    if isinstance(value, (list, tuple)):
        return any(map(inexact, value))
    return isinstance(value, float) and value != torch.tensor(value, dtype=torch.float32).item()


class Watch(TorchFunctionMode):
    """Where in the certificates a float becomes another number in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        numbers = self.numbers(func, args, kwargs)
        if numbers and isinstance(answer, Tensor) and answer.dtype == torch.float32:
            frame: Any = sys._getframe(1)
            name = frame.f_code.co_filename
            if name.startswith(ROOM) and not name.endswith(GUESSES):
                self.found[f"{name}:{frame.f_lineno}"] += 1
        return answer

    @staticmethod
    def numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all that a call makes a tensor of are inexact floats without a type."""
        if kwargs.get("dtype") is not None:
            return False
        if func is torch.where:
            both = args[1:]
            return not any(isinstance(a, Tensor) for a in both) and any(map(inexact, both))
        if func is torch.full:
            return inexact([*args[1:], kwargs.get("fill_value")])
        return func in (torch.tensor, torch.as_tensor) and inexact(args[0])


@pytest.fixture
def watch() -> Iterator[Watch]:
    with Watch() as found:
        yield found


def small(activation: Callable[[], nn.Module], outputs: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 6), activation(), nn.Linear(6, 6), activation(), nn.Linear(6, outputs)
    )
    return net.double().eval(), 0.1 + 0.8 * torch.rand(4, 3, dtype=DOUBLE)


def test_the_watch_sees_what_it_looks_for(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOM", str(Path(__file__).parent))
    mask, wall = torch.tensor([True, False]), 0.3
    assert not watch.found
    torch.where(mask, wall, 0.7)
    torch.full((2,), wall)
    torch.tensor([0.5, wall])
    assert sum(watch.found.values()) == 3
    torch.where(mask, torch.zeros(2, dtype=DOUBLE), wall)
    torch.full((2,), wall, dtype=DOUBLE)
    torch.tensor([0.5, 0.25])
    assert sum(watch.found.values()) == 3


@pytest.mark.few(2)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.SiLU])
@pytest.mark.parametrize("norm", [1, 2, "inf"])
def test_radii_and_constants(watch: Watch, activation: Any, norm: Any) -> None:
    net, x = small(activation)
    y = net(x).argmax(1)
    box = (0.05, 0.97)
    for method in ("crown", "ball", "branch", "exact", "auto"):
        if method != "exact" or activation is nn.ReLU:
            ws.radii(net, x, y, norm, box, method=method, effort=0.1)
    ws.lipschitz(net, norm, box)
    assert not watch.found


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", ["absolute", "pinball", "huber", "squared"])
@pytest.mark.parametrize("others", [{}, {"label_cost": 0.3}, {"subpopulation": 0.7}])
def test_losses_of_regressions(watch: Watch, loss: str, others: dict[str, Any]) -> None:
    net, x = small(nn.ReLU, 1)
    y = net(x).detach()[:, 0] + 0.1
    order = 2 if loss == "squared" else 1
    curve: Any = ws.loss_curve(net, x, y, "inf", order, loss, (0.05, 0.97), eps=[0.03], **others)
    curve(0.03)
    assert not watch.found


def test_losses_of_classes(watch: Watch) -> None:
    net, x = small(nn.ReLU)
    y = net(x).argmax(1)
    ws.certify(net, x, y, "inf", domain=(0.05, 0.97))
    ws.loss_curve(net, x, y, "inf", 1, "cross_entropy", (0.05, 0.97))(0.03)
    assert not watch.found
