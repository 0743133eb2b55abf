"""Examples of docstrings as code on the documentation site: an extension of griffe.

Docstrings show examples as lines that begin with `>>>`. Markdown takes these for quotations. Here
each run of them is put into a block of code; the source stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with its examples in blocks of code.

    Args:
        text: of the docstring, without the indentation of its source.
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Doctests(griffe.Extension):
    """Changes the text of every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the examples of one object into blocks.

        Args:
            obj: a module, class, function or attribute.
        """
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
