"""What all pages share: jinja2 with every value escaped, tables, panels, numbers in words.

Whatever has a method `__html__` is HTML already: a `Table`, a `Panel`, a picture, a `Markup` of
markupsafe. Every other text is escaped by jinja2, and nothing in it stays hidden.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from wassail.threat import ceil_percent, floor_percent, show

LONG = 90  # characters of a name that are shown; the rest is in its title
TITLE = 1000  # characters of a title
TALL = 20  # rows from which a table scrolls on its own
# What would move or hide text around it: controls, bidirectional overrides, line and paragraph
# separators.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
)


def visible(text: str) -> str:
    """The text with everything in it shown: controls and direction overrides as `⟨U+202E⟩`,
    lone surrogates as `?`.
    """
    shown = _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
    return shown.encode("utf-8", "replace").decode()


def render(template: str, **values: object) -> Markup:
    """The text of a template in `templates/`, every value escaped that is not HTML already.

    values: what the template names.
    """
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("wassail.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"name": name, "percent": percent, "proved": proved, "spell": spell}
    made.filters |= {"attacked": attacked_percent, "share": share_text, "show": show}
    return made


def _finalized(value: object) -> object:
    if value is None:
        return ""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def name(text: object, length: int = LONG) -> Markup:
    """A name out of a run: isolated, so that its direction stays its own, and shortened with
    the whole of it as a title.
    """
    full = visible(str(text))
    if len(full) <= length:
        return Markup("<bdi>{}</bdi>").format(full)
    title = full[:TITLE] + ("…" if len(full) > TITLE else "")
    return Markup('<bdi title="{}">{}</bdi>').format(title, full[: length - 1] + "…")


def said(text: object, kind: str) -> Markup:
    """A paragraph of a kind: "headline", "note", "lead"."""
    shown = text if isinstance(text, Markup) else visible(str(text))
    return Markup('<p class="{}">{}</p>').format(kind, shown)


def data_block(identifier: str, data: object) -> Markup:
    """JSON for the script; `<`, `>`, `&` and the line separators of JavaScript are written as
    escapes.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    block = Markup('<script type="application/json" id="{}">{}</script>')
    return block.format(identifier, Markup(text))


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: what it shows.
        sort: the number it is sorted by; None or NaN comes last.
        small: lines below it.
        kind: "number", "text", "head" (of its row) or "picture".
    """

    text: object
    sort: float | None = None
    small: Sequence[object] = ()
    kind: str = "number"

    @property
    def key(self) -> str:
        """The number it is sorted by, as text; empty where there is none."""
        return "" if self.sort is None or math.isnan(self.sort) else repr(float(self.sort))


@dataclass(frozen=True)
class Head:
    """The head of a column.

    Args:
        title: what it shows.
        above: a small line above that.
        text: whether the column holds text.
        fixed: whether the table cannot be sorted by it.
    """

    title: object
    above: str = ""
    text: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Table:
    """A sortable table in a frame of its own, which scrolls where the page is too narrow.

    Args:
        caption: above the table.
        heads: of the columns.
        rows: cells.
        label: what a screen reader calls it; default: the caption.
        strong: how many of the first rows stand out.
    """

    caption: str
    heads: Sequence[str | Head]
    rows: Sequence[Sequence[Cell]]
    label: str = ""
    strong: int = 0

    def __html__(self) -> Markup:
        heads = [head if isinstance(head, Head) else Head(head) for head in self.heads]
        return render("table.html.j2", it=self, heads=heads, tall=len(self.rows) > TALL)


@dataclass(frozen=True)
class Panel:
    """The inside of a section.

    Args:
        parts: tables, pictures and other HTML as they are, texts as paragraphs; None is nothing.
        lead: the first paragraph.
    """

    parts: Sequence[object]
    lead: object = None

    def __html__(self) -> Markup:
        return render("panel.html.j2", it=self)

    def __str__(self) -> str:
        return self.__html__()


def document(
    title: str, head: object, sections: Sequence[tuple[str, str, Panel]], wide: bool = False
) -> str:
    """A whole page: the policy that forbids the network, the style, the head, the sections, the
    script.

    sections: key, title and inside of each; wide: whether its tables are wide.
    """
    room = files("wassail.report")
    style = (room / "page.css").read_text("utf-8")
    script = (room / "page.js").read_text("utf-8")
    return render(
        "page.html.j2",
        title=title,
        head=head,
        sections=sections,
        wide=wide,
        style=Markup(style),
        script=Markup(script),
        style_hash=_digest(style),
        script_hash=_digest(script),
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Numbers and names in words.


def attacked_percent(share: float) -> str:
    """An accuracy that an attack leaves, rounded up."""
    return "–" if math.isnan(share) else f"{ceil_percent(share)}\u00a0%"


def percent(share: float) -> str:
    """A share as a percentage with two digits."""
    return "–" if math.isnan(share) else f"{100 * share:.2f}\u00a0%"


def proved(share: float | None) -> str:
    """A certified share as a percentage, rounded down; None where nothing is certified."""
    none = share is None or math.isnan(share)
    return "–" if share is None or none else f"{floor_percent(share)}\u00a0%"


def proved_cell(share: float | None) -> Cell:
    """A certified share, or None where nothing is certified."""
    return Cell(proved(share), share)


def interval_text(interval: tuple[float, float]) -> str:
    """A 95 % interval in percent; nothing where there is none."""
    low, high = interval
    return "" if math.isnan(low) else f"{100 * low:.2f}\u00a0–\u00a0{100 * high:.2f}"


def share_text(value: float) -> str:
    """A share as a length in a picture that is as wide as its place."""
    return f"{100 * value:.3f}".rstrip("0").rstrip(".") + "%"


def spell(order: float) -> str:
    """An order as it is written on the page."""
    return "∞" if order == math.inf else f"{order:g}"


def length(value: float) -> str:
    """A distance: four digits, and words where there is none."""
    return "no flip known" if value == math.inf else "–" if math.isnan(value) else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Seconds as people read them."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def flat(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested plain values as lines: `model · sha256` and its value as text; an entry of a list
    of mappings is one line.
    """
    lines: list[tuple[str, str]] = []
    for key, value in info.items():
        if isinstance(value, Mapping):
            lines += [(f"{key} · {inner}", text) for inner, text in flat(value)]
        elif isinstance(value, (list, tuple)) and any(isinstance(one, Mapping) for one in value):
            lines += [(f"{key} {place}", _one_line(one)) for place, one in enumerate(value, 1)]
        elif value not in (None, "", [], ()):
            lines.append((str(key), _one_line(value)))
    return lines


def _one_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text}" for key, text in flat(value))
    return ", ".join(str(one) for one in value) if isinstance(value, (list, tuple)) else str(value)
