"""HTML from parts that are always escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from wassail import writing
from wassail.threat import Threat, box_text, ceil_percent, floor_percent

LONG = 90  # characters of a name that are shown; the rest is in its title


TITLE = 1000  # characters of a title


# of all pictures together before they are compressed, so that a page stays below two megabytes
BYTES = 1_250_000


FOLDED = 64  # numbers from which a square number of them is shown as a square


TALL = 20  # rows from which a table scrolls on its own


# What would move or hide text around it: controls, bidirectional overrides, line and paragraph
# separators.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
)


class Html(str):
    """Text that is HTML already; every other string is escaped when it is put into a tag."""


def tag(element: str, /, *children: object, **attributes: object) -> Html:
    """`<element attribute="...">children</element>`, everything escaped that is not `Html`.

    Attributes: a trailing `_` is dropped and `_` becomes `-`; None and False leave it out, True
    leaves it empty. Children: lists are taken apart, None is nothing.
    """
    inside = "".join(_text(child) for child in children)
    end = "" if element in {"img", "input", "meta"} else f"</{element}>"
    return Html(f"<{element}{_attributes(attributes)}>{inside}{end}")


def _text(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, (list, tuple)):
        return "".join(_text(one) for one in child)
    return child if isinstance(child, Html) else escape(visible(str(child)))


def _attributes(attributes: Mapping[str, object]) -> str:
    kept = {
        name.rstrip("_").replace("_", "-"): value
        for name, value in attributes.items()
        if value not in (None, False)
    }
    return "".join(
        f" {name}" + ("" if value is True else f'="{escape(visible(str(value)))}"')
        for name, value in kept.items()
    )


def visible(text: str) -> str:
    """The text with everything in it shown: controls and direction overrides as `⟨U+202E⟩`,
    lone surrogates as `?`.
    """
    return (
        _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
        .encode("utf-8", "replace")
        .decode()
    )


def name(text: object, length: int = LONG) -> Html:
    """A name out of a run: isolated, so that its direction stays its own, and shortened with
    the whole of it as a title.
    """
    full = visible(str(text))
    if len(full) <= length:
        return tag("bdi", full)
    return tag(
        "bdi", full[: length - 1] + "…", title=full[:TITLE] + ("…" if len(full) > TITLE else "")
    )


def data_block(identifier: str, data: object) -> Html:
    """JSON for the script; `<`, `>`, `&` and the line separators of JavaScript are written as
    escapes.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Html(text), type="application/json", id=identifier)


def document(
    title: str,
    head: object,
    contents: Sequence[tuple[str, str]],
    *sections: object,
    wide: bool = False,
) -> str:
    """A whole page: the policy that forbids the network, the style, the head line, the
    sections, the script.
    """
    style, script = (
        files("wassail.report").joinpath(file).read_text("utf-8")
        for file in ("page.css", "page.js")
    )
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    links = [tag("li", tag("a", text, href=f"#{anchor}")) for anchor, text in contents]
    theme = tag("button", "Dark theme", class_="theme", type="button", hidden=True)
    body = [
        tag("a", "Skip to the results", class_="skip", href="#main"),
        tag(
            "header",
            tag("div", "wassail", tag("span", " report"), class_="mark"),
            theme,
            class_="top",
        ),
        tag("nav", tag("ul", links), class_="contents", aria_label="Sections"),
        tag("main", head, sections, id="main", tabindex="-1"),
        tag("footer", "One file, no network. The same run writes the same bytes."),
    ]
    html = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            tag("style", Html(style)),
        ),
        tag(
            "body",
            tag("div", body, class_="page wide" if wide else "page"),
            tag("script", Html(script)),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{html}\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def save(text: str, path: str | PathLike[str]) -> Path:
    """Write a page in one piece: it is there complete, or as it was before."""
    return writing.save(path, text)


def section(identifier: str, title: str, *children: object, lead: object = None) -> Html:
    """A part of the page with its heading."""
    heading = tag("h2", title, id=f"{identifier}-title")
    inside = tag("p", lead, class_="lead") if lead is not None else None
    return tag(
        "section", heading, inside, children, id=identifier, aria_labelledby=f"{identifier}-title"
    )


def attacked_percent(share: float) -> str:
    """An accuracy that an attack leaves, rounded up."""
    return "–" if math.isnan(share) else f"{ceil_percent(share)}\u00a0%"


def percent(share: float) -> str:
    """A share as a percentage with two digits."""
    return "–" if math.isnan(share) else f"{100 * share:.2f}\u00a0%"


def proved(share: float) -> str:
    """A certified share as a percentage, rounded down."""
    return "–" if math.isnan(share) else f"{floor_percent(share)}\u00a0%"


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
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def setting(threat: Threat) -> str:
    """What every threat of a run shares, in words."""
    return f"ground norm l{threat.norm:g}, {box_text(threat.domain)}"


def number_cell(text: object, value: float | None, **attributes: object) -> Html:
    """A cell of a table with the number it is sorted by; nothing to sort by comes last."""
    known = value is not None and not math.isnan(value)
    return tag(
        "td",
        text,
        data_sort=repr(float(value)) if known and value is not None else "",
        **attributes,
    )


def table(caption: str, heads: Sequence[object], rows: Sequence[Html], label: str) -> Html:
    """A sortable table in a frame of its own, which scrolls where the page is too narrow. A
    head may be a ready cell.
    """
    cells = [head if isinstance(head, Html) else tag("th", head, scope="col") for head in heads]
    inside = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", cells)),
        tag("tbody", list(rows)),
        class_="sortable",
    )
    classes = "scroll tall" if len(rows) > TALL else "scroll"
    return tag("div", inside, class_=classes, tabindex="0", role="region", aria_label=label)


def short(value: object) -> object:
    """A number with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


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
