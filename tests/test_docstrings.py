"""Every public name tells each of its parameters, and refers to public names only."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wassail as ws

SOURCE = Path(ws.__file__).parent


def documented() -> Iterator[tuple[str, Any]]:
    """Functions and classes of `ws.__all__`, and the public methods of the classes."""
    for name in ws.__all__:
        found = getattr(ws, name)
        if inspect.ismodule(found) or not callable(found):
            continue
        if inspect.isclass(found) and issubclass(found, Exception | Warning):
            continue
        yield name, found
        for key, value in vars(found).items() if inspect.isclass(found) else ():
            method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
            if method and not key.startswith("_"):
                yield f"{name}.{key}", getattr(found, key)


NAMES = dict(documented())


def arguments(text: str) -> dict[str, str]:
    """The entries of the Args section."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^    \*{0,2}(\w+): ((?:.*\n?(?:     .*\n?)*))", section[1], re.MULTILINE)
    return {name: " ".join(about.split()) for name, about in entries}


@pytest.mark.parametrize("name", NAMES)
def test_the_args_are_those_of_the_signature(name: str) -> None:
    text = inspect.getdoc(NAMES[name]) or ""
    summary = text.split("\n\n")[0]
    assert summary[0].isupper() or summary[0] == "`", summary
    given = [key for key in inspect.signature(NAMES[name]).parameters if key not in ("self", "cls")]
    assert list(arguments(text)) == given


@pytest.mark.parametrize("name", [name for name in NAMES if not inspect.isclass(NAMES[name])])
def test_a_default_is_told(name: str) -> None:
    """A number or a name that stands in the signature stands in the text, and no other one."""
    told = arguments(inspect.getdoc(NAMES[name]) or "")
    for key, parameter in inspect.signature(NAMES[name]).parameters.items():
        value = parameter.default
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            continue
        text = told[key].replace(",", "")
        shown = f'"{value}"' if isinstance(value, str) else re.escape(f"{value:.15g}")
        if isinstance(value, str):
            assert shown in text or f"default {value}" in text, (key, text)
        else:
            assert re.search(rf"default {shown}\b|{shown} by default", text), (key, text)


def _inner_functions() -> set[str]:
    """Functions of the source that are not public."""
    found = {
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    return found - set(ws.__all__)


def test_no_text_refers_to_a_function_that_is_not_public() -> None:
    inner = _inner_functions()
    for name, value in NAMES.items():
        text = inspect.getdoc(value) or ""
        members = set(dir(value)) | set(inspect.signature(value).parameters)
        owner = getattr(ws, name.split(".")[0])
        words = set(re.findall(r"`([a-z]+_\w+)`", text)) - members - set(dir(owner))
        assert not words & inner, (name, words & inner)
