"""Attacks inside a certificate, which keep its time limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from wassail.certificates import clock
from wassail.errors import InputError
from wassail.network import Model


@contextmanager
def watched(model: Model) -> Iterator[None]:
    """An attack knows no clock: its model looks at every pass, and stops it when the time is up."""
    hook = None
    if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        hook = model.register_forward_pre_hook(lambda *_: clock.look())
    try:
        yield
    except InputError as error:  # what a model raises is told as a mistake of its own
        if isinstance(error.__cause__, clock.Late):
            raise clock.Late from None
        raise
    finally:
        if hook is not None:
            hook.remove()


def look_at_the_clock(share: float) -> None:
    """The progress of an attack, for models without hooks."""
    clock.look()
