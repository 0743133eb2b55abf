"""What `module:factory` on a command line stands for: a function of the user's own, called with
plain words.

`zoo:load(vnn_resnet2b)` imports `zoo` (the current folder is searched first) and calls
`load("vnn_resnet2b")`. Arguments are words and numbers, taken apart by hand: nothing on a command
line is ever evaluated.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wassail.errors import InputError

_CALL = re.compile(
    r"(?P<module>[A-Za-z_][\w.]*):(?P<factory>[A-Za-z_][\w.]*)(?:\((?P<words>[^()]*)\))?"
)
_WORD = re.compile(r"[\w.+/@-]+")
_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Made:
    """What a factory returned, and the name of the file it is written in (None: no file of its
    own).
    """

    value: Any
    file: Path | None


def is_call(name: str) -> bool:
    """Whether the name has the form `module:factory` or `module:factory(word, ...)`."""
    return _CALL.fullmatch(name) is not None


def call(name: str, kind: str) -> Made:
    """Import the module and call the factory; kind: what is wanted, "model" or "data", for the
    sentence when it fails.
    """
    match = _CALL.fullmatch(name)
    if match is None:
        raise InputError(
            f"cannot load {kind} {name!r}: write module:factory or module:factory(word, ...)."
        )
    positional, named = _arguments(match["words"] or "", name)
    sys.path.insert(0, "")  # as `python -m` does, so that a file in the current folder can be named
    try:
        module = importlib.import_module(match["module"])
        target: Any = module
        for part in match["factory"].split("."):
            target = getattr(target, part)
        value = (
            target(*positional, **named)
            if match["words"] is not None or _is_factory(target)
            else target
        )
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # the code of the user's own may raise anything
        reason = (
            f"{type(error).__name__}: {error}"
            if not isinstance(error, (ImportError, AttributeError))
            else str(error)
        )
        first = (reason.splitlines() or [""])[0].rstrip(".")
        raise InputError(
            f"cannot load {kind} {name!r}: {first}; give module:factory that can be imported."
        ) from error
    finally:
        sys.path.remove("")
    file = getattr(module, "__file__", None)
    return Made(value, None if file is None else Path(file))


def _is_factory(target: Any) -> bool:
    """Modules of torch can be called too, but a ready-made model or data set is meant itself."""
    from torch import nn

    return callable(target) and not isinstance(target, nn.Module)


def _arguments(words: str, name: str) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for word in (part.strip() for part in words.split(",") if part.strip()):
        key, equals, value = word.partition("=")
        if equals and key.strip().isidentifier():
            named[key.strip()] = _value(value.strip(), name)
        else:
            positional.append(_value(word, name))
    return positional, named


def _value(word: str, name: str) -> Any:
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" and _WORD.fullmatch(word[1:-1]):
        return word[1:-1]
    if not _WORD.fullmatch(word):
        raise InputError(
            f"cannot read the argument {word!r} of {name!r}: arguments are plain words and numbers."
        )
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word
