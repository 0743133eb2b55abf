"""Pictures: names that do not lie over each other, and lines where the curves are."""

import io
import itertools
from dataclasses import replace

import pytest

from support.pages import made_up
from wassail.errors import InputError
from wassail.evaluation.landmarks import Landmark
from wassail.report.drawing import Axes, Mark, figure_of_runs, spread

WIDE, HIGH = 6.0, 12.0  # of a letter at most, in pixels


def boxes(marks: list[Mark]) -> list[tuple[float, float, float, float]]:
    """Where the letters of the labels are."""
    found = []
    for mark in marks:
        x, y = float(str(mark.at["x"])), float(str(mark.at["y"]))
        size = WIDE * len(mark.text)
        left = x - size if mark.at["text-anchor"] == "end" else x
        found.append((left, y - HIGH + 2, left + size, y + 2))
    return found


def meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_names_of_dots_do_not_overprint() -> None:
    axes = Axes(1.0)
    dots = [(300.0 + k % 3, 80.0 + 2 * k, f"network number {k}") for k in range(8)]
    found = boxes(axes.labels([*dots, (690.0, 20.0, "at the right end"), (50.0, 20.0, "left")]))
    assert len(found) >= 8
    for k, one in enumerate(found):
        assert one[0] > 0 and one[2] < axes.width
        assert not any(meet(one, other) for other in found[k + 1 :])


def test_places_are_moved_apart_and_stay_inside() -> None:
    assert spread([10, 11, 12, 50], 100, 12) == [10, 22, 34, 50]
    assert spread([95, 96, 99], 100, 12) == [76, 88, 100]
    assert spread([], 100, 12) == []


def test_names_of_shifts_stand_above_the_axes() -> None:
    run = made_up(60)
    eps = dict.fromkeys(run.orders, 0.004)
    marks = [Landmark(f"shift-{k}", 8, eps, {}, 0.9 - 0.01 * k) for k in range(1, 6)]
    drawn = figure_of_runs([replace(run, landmarks=tuple(marks))]).marks
    names = [mark for mark in drawn if mark.kind == "landmark" and mark.element == "text"]
    assert len(names) == 15
    lines = [mark for mark in drawn if mark.kind.startswith("line ") and mark.element == "path"]
    highest = min(float(p.split()[1]) for mark in lines for p in str(mark.at["d"])[1:].split("L"))
    assert all(float(str(mark.at["y"])) < highest for mark in names)
    places = [float(str(mark.at["x"])) for mark in names]
    assert all(b - a >= 11.9 or b < a for a, b in itertools.pairwise(places))


def test_runs_of_two_norms_share_no_axis() -> None:
    with pytest.raises(InputError, match="different norms or boxes"):
        figure_of_runs([made_up(20), made_up(20, norm=2.0, eps=0.5)])
    several = figure_of_runs([made_up(20), made_up(20, name="other")])
    assert "other" in several.svg() and several.svg().count("<path") == 12


def test_matplotlib_puts_every_mark_where_svg_does(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    kept = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: kept.append(self))
    picture = figure_of_runs([made_up(30)])
    picture.paint(io.BytesIO(), "pdf")
    (axes,) = kept[0].axes
    texts = [mark for mark in picture.marks if mark.element == "text"]
    assert [(text.get_text(), *text.get_position()) for text in axes.texts] == [
        (mark.text, float(str(mark.at["x"])), float(str(mark.at["y"]))) for mark in texts
    ]
    straight = [mark for mark in picture.marks if mark.element == "line"]
    drawn = [line for line in axes.lines if len(line.get_xdata()) == 2]
    for mark, line in zip(straight, drawn, strict=True):
        ends = [float(str(mark.at[key])) for key in ("x1", "x2", "y1", "y2")]
        assert [*line.get_xdata(), *line.get_ydata()] == ends
    assert axes.get_xlim() == (0, picture.width) and axes.get_ylim() == (picture.height, 0)
