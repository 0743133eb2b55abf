"""The two ways in which the library speaks up: an error that stops, a warning that does not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something given by the caller cannot be right. The message is one sentence: the cause,
    then the fix.
    """


class ModelWarning(UserWarning):
    """The model can be attacked, but a figure computed from it needs care."""


def reason_of(error: BaseException) -> str:
    """The first line of what another library's error says, without its full stop; its class where
    it says nothing.
    """
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def unknown(kind: str, name: object, valid: Iterable[str]) -> InputError:
    """The error for a name that is not among the valid ones: quotes it and offers the nearest."""
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return InputError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}.")


def instance(value: object, kind: type, what: str, origin: str) -> None:
    """Refuse what is not of a kind: "the flips are a Tensor: give Flips, as ws.nearest returns".

    Args:
        value: what was given.
        kind: the class that is wanted.
        what: what it is called, with its verb: "the flips are".
        origin: where one gets it.
    """
    if not isinstance(value, kind):
        article = "None" if value is None else f"a {type(value).__name__}"
        raise InputError(f"{what} {article}: give {kind.__name__}, {origin}.")


def numbers(value: object, what: str) -> InputError:
    """The error for what is no tensor of numbers."""
    return InputError(f"{what} are a {type(value).__name__}: give a tensor of numbers.")
