"""The documentation site in a real browser: the last step of `make docs`.

Opens pages of site/ from disk, with no server and no network, as a reader of a downloaded folder
does. Ends with a line `N passed, N failed`, or `skipped: REASON` where there is no browser and
none can be installed. With a folder as argument it also leaves screenshots there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from chromium import Browser, Page, address, command, failures

SITE = Path(__file__).resolve().parents[2] / "site"
# Wide (a desk) and narrow (a phone), in CSS pixels.
SIZES = {"wide": (1400, 900), "narrow": (400, 800)}
SHOWN = ("index", "explanation/threat-model", "api/attacks", "theory", "results/index")
QUERIES = {"transport": "api/transport", "autoattack": "reference/attacks", "knapsack": "theory"}


def pages() -> list[str]:
    """Every page of the site, without its ending."""
    found = sorted(str(path.relative_to(SITE).with_suffix("")) for path in SITE.rglob("*.html"))
    found.remove("404")  # for a server: its links start at the root
    return found


def opened(browser: Browser, name: str, size: str, dark: bool = False) -> Page:
    width, height = SIZES[size]
    return browser.page(
        address(SITE / f"{name}.html"),
        width=width,
        height=height,
        dark=dark,
        phone=size == "narrow",
    )


def closed(page: Page) -> None:
    """Close a page and forget the theme, which it keeps as if it had been chosen."""
    page.js("localStorage.clear()")
    page.close()
    page.browser.events.clear()


def every_page_is_quiet_and_fits(browser: Browser) -> None:
    """No error, no request but for files of the site, no sideways scrolling on a phone."""
    assert len(pages()) > 50, pages()
    for name in pages():
        page = opened(browser, name, "narrow")
        assert page.troubles() == [], (name, page.troubles())
        away = [url for url in page.requests() if not url.startswith(address(SITE))]
        assert away == [], (name, away)
        inner, outer = page.js("[document.documentElement.scrollWidth, innerWidth]")
        assert inner <= outer, f"{name} is {inner} pixels wide on a phone of {outer}"
        broken = page.js("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
        assert broken == [], (name, broken)
        unread = page.js("document.querySelectorAll('.katex-error').length")
        assert unread == 0, f"{name}: {unread} formulas that KaTeX does not read"
        bare = page.js("document.querySelectorAll('.arithmatex:not(:has(.katex))').length")
        assert bare == 0, f"{name}: {bare} formulas that are not drawn"
        quoted = page.js("document.querySelectorAll('blockquote blockquote').length")
        assert quoted == 0, f"{name}: an example is shown as a quotation"
        closed(page)


def wait_for(page: Page, condition: str, seconds: float = 60) -> None:
    """Until an expression is true on the page."""
    until = time.monotonic() + seconds
    while not page.js(condition):
        assert time.monotonic() < until, f"not within {seconds:g} s: {condition}"
        time.sleep(0.1)


def search_works_from_disk(browser: Browser) -> None:
    """Words lead to the pages that are about them."""
    for query, wanted in QUERIES.items():
        page = opened(browser, "index", "wide")
        page.click("input[name=query]")
        status = "document.querySelector('.md-search-result__meta').textContent"
        wait_for(page, f"!{status}.includes('Initializing')")  # the index is being read
        page.type(query)
        page.key("Shift", 16)  # text is inserted without keys, and search waits for one
        wait_for(page, f"{status}.includes('matching')")
        links = "[...document.querySelectorAll('.md-search-result a')].map(a => a.href)"
        found = page.js(links)
        assert any(f"/{wanted}.html" in url for url in found), (query, found)
        assert page.troubles() == [], page.troubles()
        closed(page)


def both_themes_differ(browser: Browser) -> None:
    """The theme follows the system."""
    seen = set()
    for dark in (False, True):
        page = opened(browser, "index", "wide", dark)
        seen.add(page.js("getComputedStyle(document.body).backgroundColor"))
        closed(page)
    assert len(seen) == 2, seen


def pictures(browser: Browser, folder: Path) -> None:
    """What a person should look at."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        for size in SIZES:
            for dark in (False, True):
                page = opened(browser, name, size, dark)
                theme = "dark" if dark else "light"
                path = folder / f"{name.replace('/', '-')}-{size}-{theme}.png"
                path.write_bytes(page.picture(whole=False))
                closed(page)


TESTS = (every_page_is_quiet_and_fits, search_works_from_disk, both_themes_differ)


def main(arguments: list[str]) -> int:
    if not (SITE / "index.html").exists():
        print("there is no site/: run `make docs`.")
        return 1
    chromium = command()
    if chromium is None:
        return 0
    with Browser(chromium) as browser:
        failed = failures(TESTS, browser)
        if arguments:
            pictures(browser, Path(arguments[0]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
