"""The samples with the nearest flips as pictures: what the difference shows in each norm."""

import re

import numpy as np
import pytest
import torch

from support.pages import decode, made_up
from wassail.report.fragile import fragile_panel, smoothed, spread, window


def pictures(panel: str) -> list[np.ndarray]:
    return [decode(source) for source in re.findall(r'src="([^"]+)"', panel)]


def test_a_change_in_linf_is_averaged_and_says_so() -> None:
    run = made_up(30, (1, 8, 9))
    panel = str(fragile_panel(run, 2))
    assert "averaged over 3 × 3 pixels" in panel
    nearest = [i for i in run.distances.argsort(stable=True).tolist() if run.distances[i] > 0][:2]
    x, flips = run.images(nearest)
    factors = [int(text) for text in re.findall(r"<figcaption>mean change ×(\d+)<", panel)]
    assert len(factors) == 2
    for place, factor in enumerate(factors):
        change = (flips - x)[place, 0].double().numpy()
        mean = np.array(
            [
                [change[max(0, i - 1) : i + 2, max(0, j - 1) : j + 2].mean() for j in range(9)]
                for i in range(8)
            ]
        )
        shown = pictures(panel)[3 * place + 2][..., 0]
        assert np.abs(shown - (127.5 + 255 * factor * mean)).max() <= 0.51
        assert factor * np.abs(mean).max() <= 0.5


def test_a_change_in_l2_is_drawn_as_it_is() -> None:
    panel = str(fragile_panel(made_up(30, (1, 8, 9), norm=2.0, eps=0.5), 2))
    assert "averaged" not in panel and "mean change" not in panel
    assert len(re.findall(r"<figcaption>change ×", panel)) == 2


def test_noise_goes_and_a_patch_stays() -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2, (32, 32), generator=g).double() * 2 - 1
    noise[8:16, 8:16] = 1.0
    mean = smoothed(noise, window((32, 32)))
    inside = mean[10:14, 10:14].min()
    outside = mean.clone()
    outside[6:18, 6:18] = 0
    assert float(inside) == 1
    assert float(outside.abs().mean()) < 0.35  # of 1: signs cancel


@pytest.mark.parametrize(
    ("shape", "side"), [((1, 10), 1), ((5, 7), 1), ((8, 8), 3), ((32, 32), 5), ((75, 75), 9)]
)
def test_the_window_is_odd_and_grows_with_the_picture(shape: tuple[int, int], side: int) -> None:
    assert window(shape) == side


def test_how_many_numbers_move() -> None:
    change = torch.tensor([0.1, -0.1, 0.05, 0.0])
    assert spread(change) == "moved: 75 % of the numbers, 50 % by the most, 0.1"
