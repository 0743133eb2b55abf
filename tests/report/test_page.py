"""The pages as text: what they say is what the run says, whatever the names in it are. `make
test-browser` tries them out.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.pages import decode, made_up, samples
from wassail.errors import InputError
from wassail.evaluation.intervals import compare
from wassail.evaluation.result import Finding
from wassail.evaluation.run import Evaluation
from wassail.report.compare import comparison, write_comparison
from wassail.report.html import Cell, Panel, Table, data_block, duration, flat, said, visible
from wassail.report.page import report, write_report
from wassail.threat import Threat

INF = math.inf
SPACE = "\u00a0"


class Reader(HTMLParser):
    """A page as a list of elements with their attributes and the text inside; complains about
    tags that do not match.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs), []))
        if tag not in ("meta", "img", "input"):
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        hidden = self.elements[self.open[-1]][0] in ("script", "style") if self.open else False
        for place in self.open[-1:] if hidden else self.open:
            self.elements[place][2].append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str | None], str]]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            (attrs, "".join(text))
            for name, attrs, text in self.elements
            if name == tag and all(attrs.get(key) == value for key, value in wanted.items())
        ]

    def text(self, tag: str, **attributes: str) -> str:
        return self.all(tag, **attributes)[0][1]

    def rows(self, section: str) -> list[list[tuple[str, str | None]]]:
        """The cells of a section's first table, header row apart: text, and the value they are
        sorted by.
        """
        start = next(
            i
            for i, (kind, attrs, _) in enumerate(self.elements)
            if kind == "section" and attrs.get("id") == section
        )
        table: list[list[tuple[str, str | None]]] = []
        for kind, attrs, text in self.elements[start:]:
            if kind == "section" and attrs.get("id") != section:
                break
            if kind == "tr":
                table.append([])
            if kind in ("td", "th") and attrs.get("scope") != "col":
                table[-1].append(("".join(text), attrs.get("data-sort")))
        return [row for row in table if row]


def small(**changes: Any) -> Evaluation:
    """Four samples over Omega_1(1/2): wrong already, flips at 1 and 2, none; radii at half of
    that.
    """
    run = made_up(4, (3, 4, 4), classes=("left", "right"))
    threat = Threat(INF, 1, 0.5)
    values: dict[str, Any] = {
        "threats": (threat,),
        "y": torch.tensor([0, 0, 1, 1]),
        "predicted": torch.tensor([1, 0, 1, 1]),
        "labels": torch.tensor([1, 1, 0, 1]),
        "distances": torch.tensor([0.0, 1.0, 2.0, INF]).double(),
        "radii": torch.tensor([0.0, 0.5, 1.0, 3.0]).double(),
        "exact": torch.tensor([True, False, True, False]),
        "found_by": torch.tensor([0, 1, 2, 0]),
        "rows": (),
        "best": (),
        "clean": 0.75,
    }
    return dataclasses.replace(run, **{**values, **changes})


def take(run: Evaluation, n: int) -> Evaluation:
    """The first n samples."""
    some: dict[str, Any] = {
        name: getattr(run, name)[:n]
        for name in ("ids", "y", "predicted", "mu", "distances", "labels", "found_by")
    }
    more: dict[str, Any] = {
        name: None if getattr(run, name) is None else getattr(run, name)[:n]
        for name in ("radii", "exact")
    }
    some["mu"] = some["mu"] / some["mu"].sum() if n else some["mu"]
    return dataclasses.replace(run, **some, **more)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        write_report(samples.made_up(30), tmp_path / name) for name in ("a.html", "b.html")
    )
    assert first == tmp_path / "a.html" and first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_the_headline_is_the_runs_own() -> None:
    # eps 1/2 buys the flip at 1 (a quarter of the mass for 1/4) and half of the one at 2: 1 - 1/4 -
    # 1/4 - 1/8; from below the radii 1/2 and 1 cost 1/8 and 1/4, and 1/8 of the budget is left for
    # the sample at 3: 1/24.
    page = Reader(report(small()))
    assert page.text("span", class_="number") == "37.50 %"
    told = " ".join(text for _, text in page.all("main"))
    for words in (
        small().headline,
        small().definition,
        f"75.00{SPACE}%",
        f"20.83{SPACE}% proved",
        f"16.67{SPACE}% not known",
    ):
        assert words in told
    assert f"37.50{SPACE}% lost" in told and f"25.00{SPACE}% wrong to begin with" in told
    assert page.text("title").startswith(f"37.50{SPACE}% · made-up-net on made-up-data")


@pytest.mark.parametrize(("least", "answer"), [(0.2, "HOLDS"), (0.3, "FAILS")])
def test_the_page_opens_with_what_was_required(least: float, answer: str) -> None:
    verdicts = [small().require("accuracy>=0.1 clean")]
    verdicts.append(small().require(f"accuracy>={least} at eps 0.5 order 1 proved"))
    page = Reader(report(small(), verdicts=verdicts))
    assert page.text("p", class_="answer") == answer
    assert page.text("title").startswith(f"{answer} · 37.50")
    told = page.text("div", class_=f"verdict {answer.lower()}")
    assert verdicts[1].sentence in told and f"accuracy>={least} at eps 0.5" in told
    main = page.text("main")
    assert main.index(answer) < main.index("robust accuracy is at most")
    assert "HOLDS" not in report(small()) and "FAILS" not in report(small())


def test_eps_is_said_in_plain_words() -> None:
    words = {
        (INF, 1.0, 8 / 255): "every number of a sample may move by 3.14 % of the range [0, 1] "
        "(8 of 255 levels), on average over the samples.",
        (2.0, INF, 0.5): "a sample may move by 0.5, Euclidean length, as much as 0.072 in each of "
        "its 48 numbers, for each sample at most.",
        (1.0, 2.0, 12.0): "a sample may move by 12, sum of all changes, as much as 0.25 in each of "
        "its 48 numbers, in the root mean square over the samples.",
    }
    for (norm, order, eps), text in words.items():
        run = small(threats=(Threat(norm, order, eps),))
        assert text in Reader(report(run)).text("main")
    free = small(threats=(Threat(INF, 1, 0.25, None),))
    assert "move by 0.25 in the unit of the inputs, on average" in report(free)


def test_features_have_a_table_of_units() -> None:
    about = {"features": ["age", "<b>", "sex"], "low": [20.0, 0, 0], "high": [90.0, 1, 1]}
    about |= {"scale": [70.0, 1, 1], "fixed": ["sex"], "shape": [3]}
    rows = Reader(report(small(info={"data": about}))).rows("units")
    assert [[text for text, _ in row] for row in rows] == [
        ["age", "20", "90", "70", "35"],
        ["<b>", "0", "1", "1", "0.5"],
        ["sex", "0", "1", "may not move", "–"],
    ]
    for odd in ({**about, "low": ["x", 0, 0]}, {**about, "scale": [1]}, {"features": None}, {}):
        page = Reader(report(small(info={"data": odd})))
        assert "units" not in [attrs["id"] for attrs, _ in page.all("section")]


def test_certified_figures_are_rounded_down() -> None:
    # 2 of 3 samples are proved at order inf: 66.666... is 66.66 and never 66.67
    threats = (Threat(INF, INF, 0.75),)
    run = take(small(distances=torch.tensor([0.5, 2.0, 3.0, 4.0]).double(), threats=threats), 3)
    run = dataclasses.replace(run, radii=torch.tensor([0.5, 1.0, 1.0]).double(), clean=1.0)
    rows = Reader(report(run)).rows("certificate")
    assert [text for text, _ in rows[0]] == [
        "p = ∞, eps 0.75",
        f"66.66{SPACE}%",
        f"66.67{SPACE}%",
        f"0.00{SPACE}%",
    ]


def test_sections_come_in_order_and_are_linked() -> None:
    page = Reader(report(made_up(60)))
    order = [
        "findings",
        "curve",
        "orders",
        "population",
        "attacks",
        "distances",
        "certificate",
        "fragile",
        "classes",
        "budget",
        "passes",
        "provenance",
    ]
    assert [attrs["id"] for attrs, _ in page.all("section")] == order
    links = [attrs["href"] for attrs, _ in page.all("a")]
    assert links == ["#main", *(f"#{name}" for name in order)]
    identifiers = [attrs["id"] for _, attrs, _ in page.elements if attrs.get("id")]
    assert len(identifiers) == len(set(identifiers))
    for attrs, _ in page.all("section"):
        assert attrs["aria-labelledby"] in identifiers
    assert all(attrs.get("alt") for attrs, _ in page.all("img"))
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for attrs, _ in page.all("svg"))


def test_without_radii_nothing_is_said_to_be_certified() -> None:
    page = Reader(report(made_up(60, certified=False)))
    assert "certificate" not in [attrs["id"] for attrs, _ in page.all("section")]
    assert not [1 for attrs, _ in page.all("data") if "certified" in str(attrs["data-read"])]
    assert "Nothing was certified" in page.text("main") and " proved: " not in page.text("main")
    assert json.loads(page.text("script", id="sandwich-data"))["runs"][0]["certified"] is None


def test_findings_are_listed_with_warnings_first() -> None:
    run = dataclasses.replace(
        made_up(20),
        findings=(
            Finding("a", "ok", "Fine."),
            Finding("b", "note", "Mind."),
            Finding("c", "warning", "Stop."),
        ),
    )
    page = Reader(report(run))
    told = page.text("section", id="findings")
    assert (
        told.index("Stop.") < told.index("Mind.") < told.index("Fine.")
        and "1 warning: explain it" in told
    )
    calm = dataclasses.replace(run, findings=run.findings[:2])
    assert "No check and no indicator" in Reader(report(calm)).text("section", id="findings")
    assert "findings" not in [
        attrs["id"] for attrs, _ in Reader(report(small(findings=()))).all("section")
    ]


def test_the_table_of_attacks_holds_every_row() -> None:
    run = made_up(50)
    rows = Reader(report(run)).rows("attacks")
    assert len(rows) == len(run.best) + len(run.rows)
    for row, cells in zip([*run.best, *run.rows], rows):
        values = [value for _, value in cells]
        assert (
            float(values[3] or "nan") == row.accuracy
            and float(values[6] or "nan") == row.cost / row.threat.eps
        )
        assert (
            float(values[7] or "nan") == row.forwards + row.backwards
            and float(values[8] or "nan") == row.flipped
        )
        assert values[9] == ("" if row.seconds is None else repr(row.seconds))
        assert (
            100 * row.accuracy - 1e-9 <= float(cells[3][0].rstrip("%")) < 100 * row.accuracy + 0.01
        )  # rounded up
        assert cells[4][0].split() == [
            *(f"{100 * row.interval[0]:.2f}", "–", f"{100 * row.interval[1]:.2f}")
        ]
    assert [cells[0][0] for cells in rows[:4]] == ["all attacks"] * 3 + [run.rows[0].title]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", [1.0, INF])
def test_classes_add_up_to_the_headline(weighted: bool, order: float) -> None:
    run = made_up(120, weighted=weighted, orders=(order,))
    rows = Reader(report(run)).rows("classes")
    mass = [float(run.mu[run.y == label].sum()) for label in torch.unique(run.y).tolist()]
    for column, whole in ((2, run.clean), (3, run.curve(order)(run.threat.eps)[1])):
        shares = [float(cells[column][1] or "nan") for cells in rows]
        assert sum(m * s for m, s in zip(mass, shares)) == pytest.approx(whole, abs=1e-12)
    assert [
        int(text.replace(",", "")) for text, _ in (cells[1] for cells in rows)
    ] == torch.bincount(run.y).tolist()


def test_class_by_class_in_closed_form() -> None:
    rows = [[text for text, _ in cells] for cells in Reader(report(small())).rows("classes")]
    left, right = (row[:4] + row[5:6] for row in rows)
    assert all(row[6] == f"0.00{SPACE}%" for row in rows)  # two samples prove nothing of all inputs
    assert left == ["left", "2", f"50.00{SPACE}%", f"0.00{SPACE}%", "1"]
    assert right == ["right", "2", f"100.00{SPACE}%", f"75.00{SPACE}%", "no flip known"]


def test_all_inputs_of_each_class_share_the_confidence() -> None:
    run = made_up(120)
    rows = Reader(report(run)).rows("classes")
    labels = torch.unique(run.y).tolist()
    for label, cells in zip(labels, rows):
        low = run.population(run.threat.order, 1 - 0.05 / len(labels), label)(run.threat.eps)[0]
        assert float(cells[6][1] or "nan") == low
    assert all(
        len(cells) == 6 for cells in Reader(report(made_up(9, weighted=True))).rows("classes")
    )


def test_the_script_is_given_the_sorted_distances() -> None:
    run = made_up(70, weighted=True)
    block = json.loads(Reader(report(run)).text("script", id="sandwich-data"))["runs"][0]
    for side, values in (("attacked", run.distances), ("certified", run.curve(1).radii)):
        assert values is not None
        d, w = (np.frombuffer(base64.b64decode(block[side][name]), "<f8") for name in "dw")
        finite = values[torch.isfinite(values)]
        assert (np.diff(d) >= 0).all() and sorted(d.tolist()) == sorted(finite.tolist())
        where = [
            int((values == value).nonzero()[0])
            for value in sorted(set(d.tolist()))
            if (values == value).sum() == 1
        ]
        assert (
            all(w[np.searchsorted(d, float(values[i]))] == float(run.mu[i]) for i in where)
            and len(where) > 20
        )
    even = json.loads(Reader(report(made_up(70))).text("script", id="sandwich-data"))["runs"][0]
    assert even["attacked"]["w"] is None and even["n"] == 70 and even["total"] == 1.0


def test_the_still_picture_is_the_curve() -> None:
    """Without the script: pixel columns of the path against the curve itself."""
    run = made_up(80)
    page = Reader(report(run))
    ends = dict(json.loads(page.text("script", id="sandwich-data"))["orders"])
    for side, place in (("certified", 0), ("attacked", 1)):
        paths = [attrs["d"] for attrs, _ in page.all("path", class_=f"line {side}")]
        assert len(paths) == 3
        for (order, end), path in zip(ends.items(), paths):
            curve = run.curve(float(order))
            for point in str(path)[1:].split("L")[::20]:
                x, y = (float(v) for v in point.split())
                eps = round((x - 40) / 308 * 180) / 180 * end
                assert y == pytest.approx(212 - 202 * curve(eps)[place], abs=0.06)


def test_the_histogram_counts_every_sample() -> None:
    page = Reader(report(small()))
    told = page.text("section", id="distances")
    assert (
        "2 samples with a flip; 1 wrong to begin with (distance 0); 1 with no flip known." in told
        and "beyond" not in told
    )
    end = 1.05 * float(np.quantile([1.0, 2.0, 0.5, 1.0, 3.0], 0.98))
    for kind, values in (("attacked", [1.0, 2.0]), ("certified", [0.5, 1.0, 3.0])):
        bars = [
            (float(attrs["x"] or "nan"), float(attrs["height"] or "nan"))
            for attrs, _ in page.all("rect", class_=f"bar {kind}")
        ]
        assert [x for x, _ in bars] == pytest.approx(
            [40.5 + 17.8 * math.floor(40 * value / end) for value in values], abs=0.01
        )
        assert all(height == 112 for _, height in bars)  # one sample each


def test_fragile_samples_are_the_nearest_with_their_pictures() -> None:
    run = made_up(40, (3, 5, 7))
    page = Reader(report(run, fragile=6))
    nearest = [i for i in run.distances.argsort(stable=True).tolist() if run.distances[i] > 0][:6]
    told = page.text("ol")
    assert re.findall(r"id (\d+)", told) == [run.ids[i] for i in nearest]
    assert [float(v) for v in re.findall(r"distance ([\d.]+)", told)] == [
        float(f"{run.distances[i]:.4g}") for i in nearest
    ]
    images = [decode(str(attrs["src"])) for attrs, _ in page.all("img")]
    assert len(images) == 18 and all(image.shape == (5, 7, 3) for image in images)
    x, flips = made_up(40, (3, 5, 7)).images(nearest)
    factors = [
        int(text.removeprefix("change ×"))
        for _, text in page.all("figcaption")
        if text.startswith("change")
    ]
    for place in range(6):
        sample, flip = (np.rint(255 * t[place].permute(1, 2, 0).numpy()) for t in (x, flips))
        assert (images[3 * place] == sample).all() and (images[3 * place + 1] == flip).all()
        change = (flips - x)[place].permute(1, 2, 0).numpy().astype(float)
        unit = 10 ** max(
            0, len(str(factors[place])) - 2
        )  # two digits of the largest factor that fits
        assert (
            factors[place] * np.abs(change).max()
            <= 0.5
            < (factors[place] + unit) * np.abs(change).max()
        )
        assert np.abs(images[3 * place + 2] - (127.5 + 255 * factors[place] * change)).max() <= 0.51


@pytest.mark.parametrize(
    ("shape", "size", "words"),
    [
        ((784,), (28, 28, 1), "784 numbers, shown folded into 28 × 28"),
        ((10,), (1, 10, 1), "10 numbers, shown as strips"),
        ((1, 8, 8), (8, 8, 1), ""),
        ((6, 9), (6, 9, 1), ""),
        ((3, 224, 224), (75, 75, 3), "every third pixel of 224 × 224"),
        ((5, 4, 4), None, "Samples of shape (5, 4, 4) are no pictures"),
        ((2000,), None, "no pictures"),
    ],
)
def test_samples_of_any_shape(
    shape: tuple[int, ...], size: tuple[int, ...] | None, words: str
) -> None:
    text = report(made_up(30, shape, norm=2.0, eps=0.5, domain=None))
    page = Reader(text)
    assert words in page.text("section", id="fragile")
    images = [decode(str(attrs["src"])) for attrs, _ in page.all("img")]
    assert [image.shape for image in images] == (
        [] if size is None else [size] * len(images)
    ) and bool(images) == bool(size)
    assert len(page.all("ol")) == 1 and len(text) < 2e6


def twice(run: Evaluation) -> str:
    return comparison([run, dataclasses.replace(run, name=samples.HOSTILE[6])])


@pytest.mark.parametrize("make", [report, twice])
def test_hostile_names_stay_text(make: Any) -> None:
    text = make(made_up(60, hostile=True))
    page = Reader(text)
    own = page.all("script")
    assert [attrs.get("type") for attrs, _ in own].count(None) == 1 and own[-1][1].startswith(
        "// Adds to the page"
    )
    for attrs, body in own[:-1]:
        assert (
            attrs["type"] == "application/json"
            and not re.search(r"[<>&\u2028\u2029]", body)
            and json.loads(body)
        )
    for _, attrs, _ in page.elements:
        assert not [name for name in attrs if name.startswith("on") or name == "style"]
        for name in ("href", "src"):
            assert str(attrs.get(name, "#")).startswith(("#", "data:image/png;base64,"))
        assert all(
            len(value or "") < 1200
            for name, value in attrs.items()
            if name not in ("src", "d", "content")
        )
    assert not {"iframe", "object", "embed", "link", "base", "form"} & {
        name for name, _, _ in page.elements
    }
    told = page.text("main")
    assert samples.HOSTILE[0] in told and samples.HOSTILE[1] in told  # the names of model and data
    assert make is not report or (
        samples.HOSTILE[8] in told and "⟨U+202E⟩gnp.exe⟨U+2066⟩ two⟨U+000A⟩" in told
    )
    assert (
        not re.search(r"[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f]", text)
        and "x" * 300 not in told
    )
    titles = [str(attrs["title"]) for attrs, _ in page.all("bdi") if "title" in attrs]
    assert visible(samples.HOSTILE[6])[:1000] + "…" in titles


def test_the_policy_names_our_script_and_style_and_nothing_else() -> None:
    text = report(made_up(20))
    page = Reader(text)
    policy = next(attrs["content"] for attrs, _ in page.all("meta") if attrs.get("http-equiv"))
    parts = dict(part.strip().split(" ", 1) for part in str(policy).split(";"))

    def digest(body: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

    assert (
        parts["default-src"] == "'none'"
        and parts["img-src"] == "data:"
        and parts["form-action"] == "'none'"
    )
    assert parts["script-src"] == digest(page.all("script")[-1][1]) and parts[
        "style-src"
    ] == digest(page.text("style"))
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert not re.search(r"(?i)https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)


def test_a_thousand_images_stay_below_two_megabytes(tmp_path: Path) -> None:
    run = made_up(1000)
    start = time.perf_counter()
    path = write_report(run, tmp_path / "page.html")
    assert path.stat().st_size < 500_000 and time.perf_counter() - start < 5
    assert write_report(run, path, fragile=100).stat().st_size < 2_000_000


@pytest.mark.parametrize("n", [0, 1, 2])
def test_runs_of_almost_nothing(n: int) -> None:
    run = dataclasses.replace(
        take(made_up(20), n),
        rows=(),
        best=(),
        findings=(),
        info={},
        clean=math.nan if not n else 1.0,
    )
    page = Reader(report(run))
    shown = [attrs["id"] for attrs, _ in page.all("section")]
    assert "provenance" in shown and "attacks" not in shown and ("curve" in shown) == (n > 0)
    assert not re.search(r"\bnan\b|\binf\b", page.text("main").replace("linf", ""))
    Reader(comparison([run, made_up(20)]))


@pytest.mark.parametrize("value", [0.0, INF])
def test_runs_where_all_are_wrong_or_none_flips(value: float) -> None:
    d = torch.full((4,), value).double()
    run = small(distances=d, radii=None, exact=None, certificate={}, clean=float(value > 0))
    page = Reader(report(run))
    assert page.text("span", class_="number") == ("0.00 %" if value == 0 else "100.00 %")
    shown = [attrs["id"] for attrs, _ in page.all("section")]
    assert "fragile" not in shown and "distances" not in shown and "classes" in shown


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"cannot write '.*missing.*': No such file or directory; choose"
    ):
        write_report(small(), tmp_path / "missing" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        write_report(small(), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(InputError, match="fragile is -1"):
        write_report(small(), tmp_path / "page.html", fragile=-1)
    with pytest.raises(InputError, match="no run to compare"):
        write_comparison([], tmp_path / "page.html")


def test_provenance_lists_everything_but_the_date() -> None:
    told = Reader(report(made_up(20))).text("dl", class_="provenance")
    for words in (
        "model · kind",
        "0123456789abcdef" * 4,
        "versions · torch",
        "float32",
        "wassail evaluate made-up-net",
    ):
        assert words in told
    nested = {
        "a": {"b": [1, 2]},
        "files": [{"name": "x", "sha256": "y"}, 3],
        "none": None,
        "empty": [],
        "no": False,
        "zero": 0,
    }
    assert flat(nested) == [
        ("a · b", "1, 2"),
        ("files 1", "name x, sha256 y"),
        ("files 2", "3"),
        ("no", "False"),
        ("zero", "0"),
    ]
    typed = dataclasses.replace(
        made_up(20), info={"command": ["wassail", "evaluate", "a b", "--out", "$x"]}
    )
    assert "wassail evaluate 'a b' --out '$x'" in Reader(report(typed)).text(
        "dl", class_="provenance"
    )


def test_whatever_is_not_html_is_escaped() -> None:
    evil = "<&>\"'\u202e"
    shown = "&lt;&amp;&gt;&#34;&#39;⟨U+202E⟩"
    table = Table(evil, [evil], [[Cell(evil, small=[evil]), Cell(evil, kind="text")]])
    text = str(Panel([evil, said(evil, "note"), table, None], lead=evil))
    assert text.count(shown) == 9 and evil not in text and "<b>" not in text
    assert f'<p class="lead">{shown}</p>' in text and f'<p class="note">{shown}</p>' in text
    empty = str(Panel([Table("t", [], [[Cell("–", math.nan), Cell("–")]])]))
    assert empty.count('<td data-sort="">–</td>') == 2  # comes last
    assert visible("a\ud800b\x85") == "a?b⟨U+0085⟩"


def test_data_for_the_script_cannot_end_it() -> None:
    data = {"a": "</script><!--&\u2028\u2029é", "b": [1.5, None]}
    text = data_block("x", data)
    body = text.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert json.loads(body) == data and not re.search(r"[<>&]", body) and body.isascii()
    with pytest.raises(ValueError):
        data_block("x", math.nan)


def test_times_as_people_read_them() -> None:
    assert [duration(s) for s in (None, 0.0, 0.1234, 99.94, 100.0, 3599.6, 7265.0)] == [
        "–", "0 s", "0.123 s", "99.9 s", "1 min 40 s", "1 h 00 min", "2 h 01 min",
    ]  # fmt: skip


def test_the_leaderboard_ranks_within_one_norm() -> None:
    runs = [
        made_up(100),
        made_up(100, shift=1.5, name="sturdier"),
        made_up(100, norm=2.0, eps=0.5, name="other norm"),
    ]
    page = Reader(comparison(runs))
    first = page.rows("group-1")
    second = page.rows("group-2")
    assert "do not rank across them" in page.text("main")
    assert [row[1][0].split("made-up-data")[0] for row in first[:2]] == ["sturdier", "made-up-net"]
    assert second[0][1][0].startswith("other normmade-up-data, 100 samples⚠ 3 of 180 gradients")
    assert "do not rank" not in comparison(runs[:2])


def test_paired_differences_are_those_of_compare() -> None:
    runs = [made_up(100), made_up(100, shift=1.5, name="sturdier"), made_up(90, name="shorter")]
    page = Reader(comparison(runs))
    rows = {row[1][0].split("made-up-data")[0]: row for row in page.rows("group-1")}
    found = compare(runs[1], runs[0], runs[0].threat)
    text, value = rows["sturdier"][6]
    assert float(value or "nan") == found.difference > 0
    assert (
        text.startswith(f"{100 * found.difference:+.2f}")
        and f"{100 * found.interval[0]:+.2f} to" in text
    )
    assert rows["made-up-net"][6] == ("baseline", "0.0") and rows["shorter"][6] == (
        "other samples",
        "",
    )
    assert "Not all runs are on the same samples" in page.text("main")
    same = comparison(runs[:2])
    assert "Not all runs" not in same and "different attacks" not in same


def test_figures_read_off_a_curve_are_marked() -> None:
    runs = [made_up(100), made_up(100, eps=4 / 255, name="smaller")]
    page = Reader(comparison(runs))
    rows = {row[1][0].split("made-up-data")[0]: row for row in page.rows("group-1")}
    attacked = runs[1].curve(1)(8 / 255)[1]
    shown, value = rows["smaller"][3]
    assert shown.startswith(f"{100 * attacked:.2f}{SPACE}% †") and value == repr(attacked)
    assert "†" not in rows["made-up-net"][3][0] and "marked †" in page.text("main")
    fewer = dataclasses.replace(made_up(100), rows=made_up(100).rows[:3])
    assert "different attacks" in comparison([runs[0], fewer])
