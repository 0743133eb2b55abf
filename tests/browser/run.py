"""The pages in a real browser: `make test-browser`. Not part of `make test`, which starts no
browser.

Writes the pages of made-up runs, opens them in headless Chromium and tries everything a reader can
do. Ends with a line `N passed, N failed`, or `skipped: REASON` where there is no browser and none
can be installed. With a folder as argument it also leaves screenshots there.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from chromium import Browser, Page, address, command
from samples import HOSTILE, made_up

from wassail.evaluation.run import Evaluation
from wassail.report.compare import write_comparison
from wassail.report.page import write_report
from wassail.threat import Groups

INF = math.inf
CONTRAST = """
(() => {
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (text) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const weights = [.2126, .7152, .0722];
  const light = (c) => weights.reduce((sum, w, i) => sum + w * linear(c[i] / 255), 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgba(getComputedStyle(e).backgroundColor);
      if (c[3] > 250) return c;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement, style = getComputedStyle(e);
    if (!node.textContent.trim() || !e.checkVisibility()) continue;
    if (['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName)) continue;
    const ink = rgba(e.ownerSVGElement ? style.fill : style.color), paper = ground(e);
    const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    seen++;
    const text = node.textContent.trim().slice(0, 40);
    if (ratio < (large ? 3 : 4.5)) poor.push(`${ratio.toFixed(2)}: ${text} (${e.tagName})`);
  }
  return {seen, poor};
})()
"""


class Pages:
    """The files under test, written once, and the runs behind them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = made_up(300)
        self.weighted = made_up(150, weighted=True, seed=3, orders=(3.0, 1.0))
        self.bare = made_up(40, (9,), certified=False, classes=None, norm=2.0, eps=0.5, domain=None)
        self.hostile = made_up(60, hostile=True, seed=5)
        self.others = [
            self.run,
            made_up(300, shift=1.4, name="sturdier"),
            made_up(300, certified=False, shift=0.7, name="weaker"),
            made_up(120, eps=4 / 255, name="elsewhere"),
            made_up(100, norm=2.0, eps=0.5, name="other norm"),
            self.hostile,
        ]
        groups = Groups([str(int(label) % 4) for label in self.weighted.y], 0.1, 0.6)
        others = {"label_cost": INF, "subpopulation": 1.0, "groups": groups}
        self.grouped = replace(self.weighted, others=others)
        for name in ("run", "weighted", "bare", "hostile", "grouped"):
            write_report(getattr(self, name), folder / f"{name}.html")
        write_comparison(self.others, folder / "compare.html")

    def url(self, name: str) -> str:
        return address(self.folder / f"{name}.html")


Test = Callable[[Browser, Pages], None]
TESTS: list[Test] = []


def test(function: Test) -> Test:
    TESTS.append(function)
    return function


def quiet(page: Page) -> None:
    assert page.troubles() == [], page.troubles()
    assert page.requests() == [], page.requests()


def reading(page: Page, plot: str, number: int, side: str) -> float | None:
    value = page.js(
        f'document.querySelector(\'[data-plot="{plot}"] [data-read="{number}:{side}"]\').value'
    )
    return float(value) if value else None


def choose(page: Page, plot: str, order: float) -> None:
    value = "Infinity" if order == INF else repr(order)
    page.js(f'document.querySelector(\'[data-plot="{plot}"] input[value="{value}"]\').click()')


def enter(page: Page, plot: str, text: str) -> None:
    page.js(f"document.querySelector('[data-plot=\"{plot}\"] input[type=text]').select()")
    page.js(f"document.querySelector('[data-plot=\"{plot}\"] input[type=text]').focus()")
    page.type(text)


@test
def every_page_is_quiet_and_draws_its_curves(browser: Browser, pages: Pages) -> None:
    for name, lines in (("run", 2), ("weighted", 2), ("bare", 1), ("hostile", 2)):
        page = browser.page(pages.url(name))
        paths = page.js(
            "[...document.querySelectorAll('.canvas path[data-side]')].map(p => "
            "p.getAttribute('d'))"
        )
        assert len(paths) == lines, (name, len(paths))
        assert all(
            len(path) > 500 and "NaN" not in path and path.startswith("M") for path in paths
        ), name
        boxes = page.js(
            "[...document.querySelectorAll('.canvas path[data-side]')].map(p => "
            "[p.getBBox().width, p.getBBox().height])"
        )
        assert all(width > 500 and height > 50 for width, height in boxes), (name, boxes)
        quiet(page)
        page.close()


@test
def the_curve_in_the_browser_is_the_curve_in_python(browser: Browser, pages: Pages) -> None:
    worst = 0.0
    usual = (1.0, 2.0, INF)
    cases = (
        ("run", pages.run, usual),
        ("weighted", pages.weighted, (*usual, 3.0)),
        ("bare", pages.bare, usual),
    )
    for name, run, orders in cases:
        page = browser.page(pages.url(name))
        for order in orders:
            curve = run.curve(order)
            choose(page, "sandwich-data", order)
            eps = run.threat.eps
            bends = curve.breakpoints()[0].tolist()
            bends += [] if curve.radii is None else curve.breakpoints("certified")[0].tolist()
            places = [
                0.0,
                eps,
                1e-9,
                0.3 * eps,
                1.7 * eps,
                50 * eps,
                *bends[5::71],
                *(0.999 * b for b in bends[9::83]),
            ]
            if (
                order == INF
            ):  # at a distance a flip counts, at a radius it protects; and right after
                exact = [
                    *run.distances[7:9].tolist(),
                    *([] if run.radii is None else run.radii[7:9].tolist()),
                ]
                places += [e for e in exact if e < INF] + [
                    math.nextafter(e, INF) for e in exact if e < INF
                ]
            for place in places:
                enter(page, "sandwich-data", repr(place))
                certified, attacked = curve(place)
                got = reading(page, "sandwich-data", 0, "attacked")
                assert got is not None and abs(got - attacked) <= 1e-9, (
                    name,
                    order,
                    place,
                    got,
                    attacked,
                )
                worst = max(worst, abs(got - attacked))
                low = (
                    None if curve.radii is None else reading(page, "sandwich-data", 0, "certified")
                )
                if low is not None:
                    assert abs(low - certified) <= 1e-9, (name, order, place, low, certified)
                    worst = max(worst, abs(low - certified))
        quiet(page)
        page.close()
    print(f"    largest difference {worst:.1e}")


def tell(page: Page, plot: str, name: str, text: str) -> None:
    """Type a label cost or a share of people into its field."""
    field = f'document.querySelector(\'[data-plot="{plot}"] [data-set="{name}-text"]\')'
    page.js(f"{field}.select()")
    page.js(f"{field}.focus()")
    page.type(text)


@test
def labels_and_people_in_the_browser_are_those_in_python(browser: Browser, pages: Pages) -> None:
    worst = 0.0
    for name, run in (("run", pages.run), ("weighted", pages.weighted), ("bare", pages.bare)):
        page = browser.page(pages.url(name))
        eps = run.threat.eps
        for order in (1.0, 2.0, INF):
            choose(page, "sandwich-data", order)
            for kappa, share in ((INF, 0.8), (0.7 * eps, 1.0), (1.3 * eps, 0.6), (3 * eps, 0.05)):
                tell(page, "sandwich-data", "kappa", "never" if kappa == INF else repr(kappa))
                tell(page, "sandwich-data", "share", repr(share))
                curve = replace(run.curve(order), label_cost=kappa, subpopulation=share)
                for place in (0.0, 0.4 * eps, eps, 2.5 * eps):
                    enter(page, "sandwich-data", repr(place))
                    expected = curve(place)
                    for k, side in enumerate(("certified", "attacked")):
                        if k == 0 and run.radii is None:
                            continue
                        got = reading(page, "sandwich-data", 0, side)
                        where = (name, order, kappa, share, place, side, got, expected[k])
                        assert got is not None and abs(got - expected[k]) <= 1e-9, where
                        worst = max(worst, abs(got - expected[k]))
        quiet(page)
        page.close()
    print(f"    largest difference {worst:.1e}")


@test
def labels_and_people_move_by_sliders(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    plain = reading(page, "sandwich-data", 0, "attacked")
    line = "document.querySelector('.line.attacked').getAttribute('d')"
    before = page.js(line)
    page.js("document.querySelector('#sandwich-share').focus()")
    for _ in range(3):
        page.key("PageDown", 34)
    share = float(page.js("document.querySelector('[data-set=share-text]').value"))
    assert 0 < share < 1, share
    assert page.js("document.querySelector('#sandwich-share').getAttribute('aria-valuetext')")
    run = pages.run
    expected = replace(run.curve(run.threat.order), subpopulation=share)(run.threat.eps)[1]
    got = reading(page, "sandwich-data", 0, "attacked")
    assert got is not None and plain is not None and abs(got - expected) <= 1e-9 and got < plain
    assert page.js(line) != before  # the curve is drawn anew
    tell(page, "sandwich-data", "share", "2")
    invalid = "document.querySelector('[data-set=share-text]').getAttribute('aria-invalid')"
    assert page.js(invalid) == "true"
    page.js("document.querySelector('#sandwich-kappa').focus()")
    page.key("PageDown", 34)
    assert page.js("document.querySelector('[data-set=kappa-text]').value") != "never"
    quiet(page)
    page.close()


def part_of_ranges(run: Evaluation, part: float) -> Groups:
    """Ranges a part of the way from the weights of the samples to those of the run."""
    groups = run.others["groups"]
    weights = [0.0] * len(groups.names)
    for place, mass in zip(groups.places, run.mu.tolist()):
        weights[place] += mass
    ends = [
        {name: w + part * (end - w) for name, w, end in zip(groups.names, weights, side)}
        for side in (groups.low, groups.high)
    ]
    return Groups(groups.ids, *ends)


@test
def weights_of_groups_in_the_browser_are_those_in_python(browser: Browser, pages: Pages) -> None:
    worst = 0.0
    run = pages.grouped
    page = browser.page(pages.url("grouped"))
    eps = run.threat.eps
    for order in (1.0, 2.0, INF):
        choose(page, "sandwich-data", order)
        for part, kappa, share in ((0.3, INF, 1.0), (1.0, INF, 1.0), (1.0, 1.3 * eps, 0.7)):
            tell(page, "sandwich-data", "range", repr(part))
            tell(page, "sandwich-data", "kappa", "never" if kappa == INF else repr(kappa))
            tell(page, "sandwich-data", "share", repr(share))
            also = {"label_cost": kappa, "subpopulation": share}
            curve = replace(run.curve(order), groups=part_of_ranges(run, part), **also)
            for place in (0.0, 0.4 * eps, eps, 2.5 * eps):
                enter(page, "sandwich-data", repr(place))
                for side, expected in zip(("certified", "attacked"), curve(place)):
                    got = reading(page, "sandwich-data", 0, side)
                    assert got is not None
                    worst = max(worst, abs(got - expected))
                    assert worst <= 1e-9, (order, part, kappa, share, place, side, got, expected)
    line = "document.querySelector('.canvas .line.attacked').getAttribute('d')"
    before = page.js(line)
    page.js("document.querySelector('#sandwich-range').focus()")
    page.key("Home", 36)
    assert page.js(line) != before
    assert page.js("document.querySelector('[data-set=range-text]').value") == "0"
    tell(page, "sandwich-data", "range", "1.5")
    invalid = "document.querySelector('[data-set=range-text]').getAttribute('aria-invalid')"
    assert page.js(invalid) == "true"
    assert page.js("document.querySelectorAll('#others table').length") == 2
    quiet(page)
    page.close()
    print(f"    largest difference {worst:.1e}")


@test
def no_table_is_cut_off(browser: Browser, pages: Pages) -> None:
    """On a desk and on a phone: no frame of a table has to be scrolled sideways."""
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    for name in ("run", "grouped", "compare"):
        for width in (1280, 400):
            page = browser.page(pages.url(name), width=width, height=900, phone=width < 700)
            found = page.js(f"{cut}.map(e => e.getAttribute('aria-label'))")
            assert found == [], (name, width, found)
            page.close()


@test
def certified_figures_are_rounded_down(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    for order in (1.0, 2.0, INF):
        choose(page, "sandwich-data", order)
        for step in range(1, 40):
            eps = pages.run.threat.eps * step / 13
            enter(page, "sandwich-data", repr(eps))
            shown = page.js("document.querySelector('[data-read=\"0:certified\"]').textContent")
            true = pages.run.curve(order)(eps)[0]
            assert (
                100 * (true + 2.0**-48)
                >= float(shown.removesuffix("\u00a0%"))
                > 100 * true - 0.0101
            ), (
                order,
                eps,
                shown,
                true,
            )
    page.close()


@test
def the_order_is_switched_by_mouse_and_by_keyboard(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    before = page.js("document.querySelector('.canvas path[data-side=attacked]').getAttribute('d')")
    page.click("label[for=sandwich-order-1]")
    second = page.js("document.querySelector('.canvas path[data-side=attacked]').getAttribute('d')")
    assert page.js("document.querySelector('#sandwich-order-1').checked") and second != before
    assert "Order 2" in page.js(
        "[...document.querySelectorAll('.meaning')].filter(p => !p.hidden).map(p => "
        "p.textContent).join()"
    )
    page.key("ArrowRight", 39)
    assert page.js("document.querySelector('#sandwich-order-2').checked")
    third = page.js("document.querySelector('.canvas path[data-side=attacked]').getAttribute('d')")
    assert third not in (before, second)
    assert (
        abs((reading(page, "sandwich-data", 0, "attacked") or 0) - pages.run.curve(INF)(8 / 255)[1])
        < 1e-9
    )  # eps stays
    quiet(page)
    page.close()


@test
def eps_moves_by_slider_field_and_picture(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    state = (
        "[document.querySelector('#sandwich-eps').value, document.querySelector('.budget "
        "input[type=text]').value]"
    )
    start, text = page.js(state)
    assert (
        text == "8/255" and page.js("document.querySelector('[data-eps]').textContent") == "8/255"
    )
    page.js("document.querySelector('#sandwich-eps').focus()")
    page.key("ArrowRight", 39)
    page.key("ArrowRight", 39)
    value, text = page.js(state)
    assert int(value) == int(start) + 2 and text != "8/255"
    spoken = page.js("document.querySelector('#sandwich-eps').getAttribute('aria-valuetext')")
    assert spoken.startswith(f"eps {text}: attacked ") and "certified" in spoken
    page.key("Home", 36)
    assert (
        page.js(state) == ["0", "0"]
        and abs((reading(page, "sandwich-data", 0, "attacked") or 0) - pages.run.clean) < 1e-12
    )
    enter(page, "sandwich-data", "12/255")
    assert (
        abs((reading(page, "sandwich-data", 0, "attacked") or 0) - pages.run.curve(1)(12 / 255)[1])
        < 1e-9
    )
    kept = reading(page, "sandwich-data", 0, "attacked")
    for nonsense in ("12/", "-1", "eight", "1/0", "", "1e999"):
        enter(page, "sandwich-data", nonsense) if nonsense else page.key("Backspace", 8)
        assert (
            page.js(
                "document.querySelector('.budget input[type=text]').getAttribute('aria-invalid')"
            )
            == "true"
        ), nonsense
        assert reading(page, "sandwich-data", 0, "attacked") == kept
    page.click(".canvas svg")
    middle = page.js(state)
    assert 400 < int(middle[0]) < 600 and reading(page, "sandwich-data", 0, "attacked") != kept
    quiet(page)
    page.close()


@test
def tables_are_sorted_by_mouse_and_by_keyboard(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    values = (
        "[...document.querySelectorAll('#attacks tbody tr')].map(r => r.cells[{}].dataset.sort)"
    )
    first = page.js(values.format(3))
    page.click("#attacks thead th:nth-child(4) button")
    up = [float(v) for v in page.js(values.format(3))]
    assert up == sorted(float(v) for v in first) and up != [float(v) for v in first]
    assert (
        page.js(
            "document.querySelector('#attacks thead th:nth-child(4)').getAttribute('aria-sort')"
        )
        == "ascending"
    )
    page.key("Enter", 13, "\r")
    assert [float(v) for v in page.js(values.format(3))] == up[::-1]
    assert (
        page.js(
            "document.querySelector('#attacks thead th:nth-child(4)').getAttribute('aria-sort')"
        )
        == "descending"
    )
    page.js("document.querySelector('#attacks thead th:nth-child(10) button').focus()")
    for direction in ("ascending", "descending"):
        page.key(" ", 32, " ")
        times = page.js(values.format(9))
        known = [float(v) for v in times if v]
        assert known == sorted(known, reverse=direction == "descending") and times[
            len(known) :
        ] == [""] * (len(times) - len(known))
        sorts = page.js(
            "[...document.querySelectorAll('#attacks th')].map(h => "
            "h.getAttribute('aria-sort')).filter(Boolean)"
        )
        assert sorts == [direction]
    page.click("#classes thead th:first-child button")
    names = page.js("[...document.querySelectorAll('#classes tbody th')].map(c => c.textContent)")
    assert names == sorted(names) and len(names) == 10
    quiet(page)
    page.close()


@test
def the_theme_follows_the_system_until_it_is_chosen(browser: Browser, pages: Pages) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    for dark in (False, True):
        page = browser.page(pages.url("run"), dark=dark)
        start = page.js(ground)
        page.click("button.theme")
        assert page.js(ground) != start and page.js("document.documentElement.dataset.theme") == (
            "light" if dark else "dark"
        )
        assert page.js("document.querySelector('button.theme').textContent") == (
            "Dark theme" if dark else "Light theme"
        )
        page.key("Enter", 13, "\r")
        assert page.js(ground) == start
        quiet(page)
        page.close()


@test
def text_has_contrast_in_both_themes(browser: Browser, pages: Pages) -> None:
    for name in ("run", "compare"):
        for dark in (False, True):
            page = browser.page(pages.url(name), dark=dark)
            found = page.js(CONTRAST)
            assert found["seen"] > 200 and found["poor"] == [], (
                name,
                dark,
                found["seen"],
                found["poor"][:8],
            )
            page.close()


@test
def a_phone_needs_no_sideways_scrolling(browser: Browser, pages: Pages) -> None:
    for name in ("run", "bare", "hostile", "compare"):
        for width in (390, 320):
            page = browser.page(pages.url(name), width=width, height=800, phone=True)
            wide = page.js("document.documentElement.scrollWidth")
            assert wide <= width, (name, width, wide)
            assert (
                page.js("document.querySelector('.canvas svg').getBoundingClientRect().right")
                <= width
            )
            quiet(page)
            page.close()


@test
def the_plot_follows_the_window(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    page.size(600, 900)
    deadline = time.monotonic() + 5
    while not (
        fits := page.js(
            "Number(document.querySelector('.canvas svg').getAttribute('viewBox').split(' ')[2]) "
            "< 600"
        )
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert fits
    page.close()


@test
def print_shows_everything_but_the_controls(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"), dark=True)
    page.media("print", dark=True)
    hidden = page.js(
        "['.controls', '.contents', 'button.theme', '.skip'].map(s => "
        "document.querySelector(s).checkVisibility())"
    )
    assert hidden == [False] * 4
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    cut = page.js(
        "[...document.querySelectorAll('.scroll')].filter(e => getComputedStyle(e).overflowX !== "
        "'visible').length"
    )
    assert cut == 0
    assert page.js(
        "[...document.querySelectorAll('.samples img')].every(i => i.checkVisibility() && "
        "i.naturalWidth === 32)"
    )
    data = page.pdf()
    assert (
        data.startswith(b"%PDF")
        and data.count(b"/Type /Page\n") + data.count(b"/Type /Page ") + data.count(b"/Type /Page/")
        >= 3
    )
    quiet(page)
    page.close()


@test
def without_scripts_all_content_is_there(browser: Browser, pages: Pages) -> None:
    scripted = browser.page(pages.url("run"))
    plain = browser.page(pages.url("run"), scripts=False)
    words = "document.querySelector('{}').innerText"
    for part in ("h1", "#findings", "#distances", "#provenance"):
        assert plain.js(words.format(part)) == scripted.js(words.format(part))
    rows = "[...document.querySelectorAll('{} tbody tr')].map(r => r.innerText)"
    for part in ("#attacks", "#classes", "#certificate"):
        assert plain.js(rows.format(part)) == scripted.js(rows.format(part)) != []
    shown = "[...document.querySelectorAll('{}')].filter(e => e.checkVisibility()).length"
    assert (
        plain.js(shown.format(".static path.line.attacked"))
        == 3
        == plain.js(shown.format(".static path.line.certified"))
    )
    assert (
        plain.js(shown.format("button")) == plain.js(shown.format("input")) == 0
    )  # no control that does nothing
    assert plain.js(shown.format("noscript p")) == 1
    assert scripted.js(shown.format(".static")) == 0
    quiet(plain)
    plain.close()
    scripted.close()


@test
def hostile_strings_are_inert(browser: Browser, pages: Pages) -> None:
    for name in ("hostile", "compare"):
        page = browser.page(pages.url(name))
        assert (
            page.js("document.scripts.length")
            == page.js("document.querySelectorAll('figure[data-plot]').length") + 1
        )
        attributes = page.js(
            "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
        )
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        links = page.js(
            "[...document.querySelectorAll('[href], [src]')].map(e => e.getAttribute('href') ?? "
            "e.getAttribute('src'))"
        )
        assert (
            page.js(
                "document.querySelectorAll('form, iframe, object, embed, link, base, "
                "[action]').length"
            )
            == 0
        )
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
        assert page.js(
            "[...document.querySelectorAll('img')].every(i => i.complete && i.naturalWidth > 0)"
        )
        text = page.js("document.body.innerText")
        assert HOSTILE[0] in text and "\u202e" not in text
        assert len(page.js("document.querySelector('table').innerText")) < 100_000
        quiet(page)
        page.close()


@test
def the_policy_forbids_what_is_not_ours(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    refused = page.js(
        """(async () => {
          const refused = [];
          const note = (event) => refused.push(event.effectiveDirective);
          document.addEventListener('securitypolicyviolation', note);
          const script = document.createElement('script');
          script.textContent = 'window.ran = true';
          const image = new Image();
          const failed = new Promise((done) => { image.onerror = done; });
          image.src = 'https://example.org/x.png';
          document.body.append(script, image);
          document.body.setAttribute('style', 'color: red');
          await failed;
          await fetch('https://example.org/').catch(() => null);
          await new Promise((done) => setTimeout(done, 50));
          return refused.sort();
        })()"""
    )
    assert refused == ["connect-src", "img-src", "script-src-elem", "style-src-attr"], refused
    assert page.js("window.ran") is None and page.js("document.body.style.color") == ""
    page.close()


@test
def everything_has_a_name(browser: Browser, pages: Pages) -> None:
    for name in ("run", "bare", "compare"):
        page = browser.page(pages.url(name))
        tree = page.names()
        roles = [role for role, _ in tree]
        for role in (
            "main",
            "navigation",
            "banner",
            "contentinfo",
            "slider",
            "radio",
            "textbox",
            "button",
            "table",
            "region",
        ):
            assert role in roles, (name, role)
        controls = {
            "slider",
            "radio",
            "textbox",
            "button",
            "link",
            "img",
            "image",
            "region",
            "table",
            "columnheader",
            "navigation",
        }
        unnamed = [role for role, label in tree if role in controls and not label.strip()]
        assert unnamed == [], (name, unnamed)
        assert page.js("document.documentElement.lang") == "en" and page.js("document.title")
        assert page.js("document.querySelectorAll('h1').length") == 1
        identifiers = page.js("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(identifiers) == len(set(identifiers))
        page.close()


@test
def the_tab_key_reaches_everything_in_order(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("run"))
    seen = []
    for _ in range(60):
        page.key("Tab", 9)
        here = page.js(
            "(() => { const e = document.activeElement, s = getComputedStyle(e), b = "
            "e.getBoundingClientRect();"
            "const ring = e.type === 'radio' ? getComputedStyle(e.nextElementSibling) : s;"
            "return [e.className || e.id || e.type || e.tagName, ring.outlineStyle !== 'none', "
            "b.width > 0]; })()"
        )
        seen.append(here)
    names = [name for name, _, _ in seen]
    assert names[0] == "skip" and names[1] == "theme"
    assert all(ring and size for name, ring, size in seen if name != "BODY"), [
        here for here in seen if not here[1]
    ]
    assert (
        names.index("sandwich-order-0")
        < names.index("sandwich-eps")
        < names.index("text")
        < names.index("scroll")
    )
    page.js("document.querySelector('.skip').focus()")
    page.key("Enter", 13, "\r")
    assert page.js("document.activeElement.id") == "main"
    page.close()


@test
def the_comparison_overlays_and_sorts(browser: Browser, pages: Pages) -> None:
    page = browser.page(pages.url("compare"))
    assert page.js("document.querySelectorAll('figure[data-plot]').length") == 2  # two norms
    lines = page.js("document.querySelectorAll('#group-1 .canvas path[data-side=attacked]').length")
    assert (
        lines == 5
        and page.js("document.querySelectorAll('#group-2 .canvas path[data-side=attacked]').length")
        == 1
    )
    choose(page, "group-1-data", 2.0)
    enter(page, "group-1-data", "6/255")
    runs = [run for run in pages.others if run.threat.norm == INF]
    for number, run in enumerate(runs):
        certified, attacked = run.curve(2)(6 / 255)
        got = reading(page, "group-1-data", number, "attacked")
        assert got is not None and abs(got - attacked) < 1e-9
        low = reading(page, "group-1-data", number, "certified")
        assert (low is None) == (run.radii is None) and (low is None or abs(low - certified) < 1e-9)
    page.click("#group-1 .sortable thead th:nth-child(3) button")
    clean = page.js(
        "[...document.querySelectorAll('#group-1 .sortable tbody tr')].map(r => "
        "Number(r.cells[2].dataset.sort))"
    )
    assert clean == sorted(clean) and len(clean) == 5, clean
    assert page.js("[...document.querySelectorAll('#group-2 .sortable tbody tr')].length") == 1
    quiet(page)
    page.close()


def pictures(browser: Browser, pages: Pages, folder: Path) -> None:
    """What a person should look at."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page_name, options in (
        ("light", "run", {}),
        ("dark", "run", {"dark": True}),
        ("phone", "run", {"width": 390, "height": 844, "phone": True}),
        ("noscript", "run", {"scripts": False}),
        ("hostile", "hostile", {}),
        ("compare", "compare", {}),
    ):
        page = browser.page(pages.url(page_name), **options)
        (folder / f"{name}.png").write_bytes(page.picture())
        page.close()
    page = browser.page(pages.url("run"))
    (folder / "print.pdf").write_bytes(page.pdf())
    page.close()


def main(arguments: list[str]) -> int:
    chromium = command()
    if chromium is None:
        return 0
    torch.set_num_threads(1)
    start = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, Browser(chromium) as browser:
        pages = Pages(Path(folder))
        for function in TESTS:
            name = function.__name__.replace("_", " ")
            began = time.monotonic()
            try:
                function(browser, pages)
            except Exception:
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc()}")
            else:
                print(f"passed {name} ({time.monotonic() - began:.1f} s)")
        if arguments:
            pictures(browser, pages, Path(arguments[0]))
    print(f"{len(TESTS) - failed} passed, {failed} failed in {time.monotonic() - start:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
