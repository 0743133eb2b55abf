"""The two ways in which the library speaks up: an error that stops, a warning that does not; and
what a command ends with.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

HOLDS = 0  # exit code: done, and every requirement holds
FAILS = 1  # a requirement does not hold, or something in a run is false
BAD_INPUT = 2  # one sentence says what to give instead
UNKNOWN = 3  # neither proved nor refuted within its limits
INTERNAL = 70  # an error of the library, or of the model's own code: nothing is known
SIGNALLED = 128  # and the number of the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP


class InputError(ValueError):
    """Something given by the caller cannot be right. The message is one sentence: the cause,
    then the fix.

    Args:
        text: the sentence.
        command: the sentence for the command line, where the fix there is another one.
    """

    def __init__(self, text: str = "", command: str | None = None) -> None:
        super().__init__(text)
        self.command = text if command is None else command

    def within(self, where: str) -> InputError:
        """The same error with the place where it was met in front of it."""
        return InputError(f"{where}: {self}", f"{where}: {self.command}")


def remedies(cause: str, python: str, command: str) -> InputError:
    """An error with one fix in Python and another one on the command line.

    python: the fix, without a full stop; command: the fix by options of the command line.
    """
    return InputError(f"{cause}: {python}.", f"{cause}: {command}.")


class JumpError(InputError):
    """What is asked for needs a continuous function, and the network has a jump."""


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

    kind: the class that is wanted; what: what it is called, with its verb: "the flips are"; origin:
    where one gets it.
    """
    if not isinstance(value, kind):
        article = "None" if value is None else f"a {type(value).__name__}"
        raise InputError(f"{what} {article}: give {kind.__name__}, {origin}.")


def numbers(value: object, what: str) -> InputError:
    """The error for what is no tensor of numbers."""
    return InputError(f"{what} are a {type(value).__name__}: give a tensor of numbers.")
