"""Results as a notebook shows them: a title, a small table and a picture.

A result has `_repr_html_`, which Jupyter and its relatives ask for. Everything is escaped: names of
models and samples may come from strangers. There is no script, no style sheet and no colour of
text, so that a card looks right on a light and on a dark page. Without matplotlib there is no
picture, and the table says the same.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 144  # an inch: twice those of a plain screen
SCREEN_DOTS = 72  # CSS pixels for an inch of a figure
CELL = "text-align: left; padding: 2px 12px 2px 0; vertical-align: top"


def card(title: str, *parts: str) -> str:
    """A title and what stands below it.

    *parts: HTML, from `pairs`, `table`, `lines`, `verbatim` or `picture`.
    """
    return f"<div><p><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def pairs(rows: Sequence[tuple[str, object]]) -> str:
    """A table of names and values.

    Args:
        rows: name and value of each line; the text of a value is what `str` gives.
    """
    body = "".join(
        f'<tr><th scope="row" style="{CELL}; font-weight: normal">{escape(name)}</th>'
        f'<td style="{CELL}">{escape(str(value))}</td></tr>'
        for name, value in rows
    )
    return f'<table style="margin-left: 0">{body}</table>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a line of names on top.

    head: names of the columns; rows: one sequence of values a line.
    """
    names = "".join(f'<th scope="col" style="{CELL}">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(str(v))}</td>' for v in row) + "</tr>"
        for row in rows
    )
    return f'<table style="margin-left: 0"><tr>{names}</tr>{body}</table>'


def lines(*texts: str) -> str:
    """Sentences, one below the other."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def verbatim(text: str) -> str:
    """Text with its own line breaks and columns."""
    return f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'


def picture(draw: Callable[[], Figure], about: str) -> str:
    """A figure inside the page, or nothing where matplotlib is not installed.

    Args:
        draw: makes the figure; called only if it can be drawn.
        about: what it shows, for readers who do not see it.
    """
    if find_spec("matplotlib") is None:
        return ""
    figure = draw()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DOTS, facecolor="white")
    data = base64.b64encode(file.getvalue()).decode()
    width = round(figure.get_figwidth() * SCREEN_DOTS)
    return (
        f'<img alt="{escape(about)}" width="{width}" style="max-width: 100%; height: auto" '
        f'src="data:image/png;base64,{data}">'
    )
