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


def unknown(kind: str, name: object, valid: Iterable[str]) -> InputError:
    """The error for a name that is not among the valid ones: quotes it and offers the nearest."""
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return InputError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}.")
