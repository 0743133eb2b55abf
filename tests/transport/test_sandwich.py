"""The drawing of the sandwich: what the lines show is what the curve says, and the file is a
picture.
"""

import math
import sys

import pytest
import torch

import wassail as ws
from wassail.errors import InputError
from wassail.threat import ceil_percent, floor_percent
from wassail.transport.curve import RiskCurve
from wassail.transport.picture import INK, draw_sandwich, plot_curve

INF = math.inf


def curve(order: float = 1.0, certified: bool = True) -> RiskCurve:
    """Four samples: wrong already, flipped at 1 and 2, never flipped; radii at half of that."""
    d = torch.tensor([0.0, 1.0, 2.0, INF], dtype=torch.float64)
    radii = torch.tensor([0.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    return RiskCurve(
        d, radii if certified else None, torch.full((4,), 0.25, dtype=torch.float64), order
    )


def lines(axes) -> dict[str, tuple[list[float], list[float]]]:
    names = {color: side for side, color in INK.items()}
    return {
        names[line.get_color()]: (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
        if line.get_color() in names and len(line.get_xdata()) > 2
    }


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_the_lines_are_the_curve(order: float) -> None:
    shown = curve(order)
    axes = plot_curve(shown, eps=2.5)
    drawn = lines(axes)
    assert set(drawn) == {"certified", "attacked"}
    for place, side in enumerate(("certified", "attacked")):
        eps, accuracy = drawn[side]
        assert eps[0] == 0 and eps[-1] == 2.5 and eps == sorted(eps)
        assert accuracy == pytest.approx([100 * shown(e)[place] for e in eps])
        assert set(shown.breakpoints(side)[0].tolist()) - {
            e for e in shown.breakpoints(side)[0].tolist() if e > 2.5
        } <= set(eps)
    if order == INF:  # a step is a step: right after a radius, and at a flip
        eps, accuracy = drawn["certified"]
        at = eps.index(0.5)
        assert accuracy[at] == 75 and accuracy[at + 1] == 50
    assert (
        axes.get_xlim() == (0, 2.5) and len(axes.collections) == 2
    )  # what is proved, and the band


def test_one_side_only() -> None:
    axes = plot_curve(curve(certified=False), mark=0.1)
    assert set(lines(axes)) == {"attacked"} and not axes.collections


def test_three_panels_one_legend(tmp_path) -> None:
    figure = draw_sandwich(
        [curve(p) for p in (1.0, 2.0, INF)], "net on 4 samples, linf, box [0, 1]", mark="8/255"
    )
    assert [axes.get_title().split(":")[0] for axes in figure.axes] == [
        "Omega_1",
        "Omega_2",
        "Omega_inf",
    ]
    assert figure.get_suptitle().startswith("net on 4 samples")
    (legend,) = figure.legends
    words = " ".join(text.get_text() for text in legend.get_texts())
    assert "certified" in words and "attacked" in words and "eps = 8/255" in words
    texts = [text.get_text() for text in figure.axes[2].texts]
    assert texts == ["75.0 %", "75.0 %"]
    figure.savefig(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(draw_sandwich([curve()], eps=1).axes) == 1


def test_certified_numbers_are_rounded_down() -> None:
    n = 3000
    d = torch.full((n,), 2.0, dtype=torch.float64)
    d[0] = 0.0
    shown = RiskCurve(
        d, d / 2, torch.full((n,), 1 / n, dtype=torch.float64), INF
    )  # 99.9666 % of both
    texts = {text.get_text() for text in plot_curve(shown, mark=1.0).texts}
    assert texts == {"99.9 %", "100.0 %"}
    full = RiskCurve(d[1:101], d[1:101] / 2, torch.full((100,), 0.01, dtype=torch.float64), INF)
    assert [text.get_text() for text in plot_curve(full, mark=1.0).texts] == ["100.0 %", "100.0 %"]


def test_from_the_curve_itself_and_where_the_axes_end() -> None:
    axes = curve(2.0).plot()
    assert axes.get_xlim()[1] > 1.9 and curve(2.0).plot(mark=5).get_xlim()[1] > 5
    figure = draw_sandwich([curve()])
    assert curve().plot(figure.axes[0], eps="1/2") is figure.axes[0] and figure.axes[
        0
    ].get_xlim() == (0, 0.5)
    none = RiskCurve(
        torch.tensor([INF]).double(), torch.tensor([1.0]).double(), torch.ones(1).double(), 1.0
    )
    assert none.plot().get_xlim() == (0, 1)
    with pytest.raises(InputError, match="no curve to draw"):
        draw_sandwich([])
    with pytest.raises(ws.InputError, match="eps"):
        draw_sandwich([curve()], mark="-1")


def test_without_matplotlib_one_sentence(monkeypatch) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="figures need matplotlib"):
        curve().plot()


def test_certified_shares_are_printed_rounded_down() -> None:
    assert (
        ceil_percent(1 / 3) == "33.34"
        and ceil_percent(0.0) == "0.00"
        and ceil_percent(1.0) == "100.00"
    )
    assert ceil_percent(math.nextafter(0.55, 1)) == "55.00" and ceil_percent(0.1 + 0.2) == "30.00"
    assert (
        floor_percent(0.99999) == "99.99"
        and floor_percent(0.0) == "0.00"
        and floor_percent(1.0) == "100.00"
    )
    assert (
        floor_percent(math.nextafter(0.55, 0)) == "55.00"
        and floor_percent(math.nextafter(0.57, 0), 1) == "57.0"
    )
    for n in (3, 7, 100, 365, 1000):  # as the curve gives them: rounded down by an ulp or two
        for k in range(0, n + 1, max(1, n // 25)):
            share = math.nextafter(k / n, 0)
            printed = float(floor_percent(share))
            assert printed <= 100 * k / n + 1e-12 and printed > 100 * k / n - 0.01 - 1e-12
