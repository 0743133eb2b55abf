"""A board in a real browser: `python tests/browser/board.py SITE [FOLDER]`.

SITE is what `wassail board RUN... -o SITE` wrote. Every page is opened from disk, on a desk and on
a phone, in both themes: no message in the console, no request but for files of the site, nothing
wider than the screen, and the table is sorted by its heads. With a FOLDER it leaves screenshots
there. Ends with a line `N passed, N failed`, or `skipped: REASON`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from chromium import Browser, Page, address, command, failures

# Wide (a desk) and narrow (a phone), in CSS pixels.
SIZES = {"wide": (1400, 900), "narrow": (400, 800)}
THEMES = {"light": False, "dark": True}


def opened(browser: Browser, page: Path, size: str, theme: str) -> Page:
    width, height = SIZES[size]
    return browser.page(
        address(page), width=width, height=height, dark=THEMES[theme], phone=size == "narrow"
    )


def closed(page: Page) -> None:
    """Close a page and forget the theme, which it keeps as if it had been chosen."""
    page.js("localStorage.clear()")
    page.close()
    page.browser.events.clear()


def every_page_is_quiet_and_fits(browser: Browser, site: Path) -> None:
    """On a desk in the dark and on a phone in the light; the index in all four ways."""
    for path in sorted(site.rglob("*.html")):
        ways = [("wide", "dark"), ("narrow", "light")]
        if path.parent == site:
            ways += [("wide", "light"), ("narrow", "dark")]
        for size, theme in ways:
            page = opened(browser, path, size, theme)
            assert page.troubles() == [], (path.name, page.troubles())
            away = [url for url in page.requests() if not url.startswith(address(site))]
            assert away == [], (path.name, away)
            inner, outer = page.js("[document.documentElement.scrollWidth, innerWidth]")
            assert inner <= outer, f"{path.name} is {inner} pixels wide on a screen of {outer}"
            closed(page)


def every_link_leads_somewhere(browser: Browser, site: Path) -> None:
    """The index links to models and runs that are there."""
    page = opened(browser, site / "index.html", "wide", "light")
    links = page.js("[...document.querySelectorAll('table a')].map(a => a.getAttribute('href'))")
    assert links
    missing = [link for link in links if not (site / link).is_file()]
    assert missing == [], missing
    closed(page)


def the_table_is_sorted_by_its_heads(browser: Browser, site: Path) -> None:
    """A press on `Clean` orders the rows by it."""
    page = opened(browser, site / "index.html", "wide", "light")
    clean = (
        "[...document.querySelector('table').tBodies[0].rows]"
        ".map(row => Number(row.cells[4].dataset.sort))"
    )
    press = (
        "[...document.querySelector('table').querySelectorAll('th button')]"
        ".find(b => b.textContent.includes('Clean')).click()"
    )
    page.js(press)
    once = page.js(clean)
    page.js(press)
    twice = page.js(clean)
    assert sorted([once, twice]) == sorted([sorted(once), sorted(once, reverse=True)])
    closed(page)


def pictures(browser: Browser, site: Path, folder: Path) -> None:
    """The index in both sizes and themes."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for theme in THEMES:
            page = opened(browser, site / "index.html", size, theme)
            (folder / f"board-{size}-{theme}.png").write_bytes(page.picture(whole=False))
            closed(page)


TESTS = (
    every_page_is_quiet_and_fits,
    every_link_leads_somewhere,
    the_table_is_sorted_by_its_heads,
)


def main(arguments: list[str]) -> int:
    site = Path(arguments[0]).resolve() if arguments else Path()
    if not arguments or not (site / "index.html").exists():
        print("give the folder of a board: `wassail board RUN... -o SITE` makes one.")
        return 1
    chromium = command()
    if chromium is None:
        return 0
    with Browser(chromium) as browser:
        failed = failures(TESTS, browser, site)
        if len(arguments) > 1:
            pictures(browser, site, Path(arguments[1]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
