"""The samples with the nearest flips, as pictures.

In l1 and l2 the difference of flip and sample says where the change is. In linf it is nearly the
same size everywhere and looks like noise, so its local mean is drawn.
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.report.budget import class_name, way_name
from wassail.report.html import Panel, length, render
from wassail.report.png import encode, to_uint8
from wassail.report.units import changes, feature_ranges

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

# Of all pictures together before they are compressed, so that a page stays below two megabytes.
BYTES = 1_250_000
FOLDED = 64  # numbers from which a square number of them is shown as a square
STRIP = 1024  # numbers that still make a readable strip
SMOOTHED = 6  # pixels of a side from which a change in linf is averaged
FEW = 3  # targets that are shown
SEEN = 0.01  # of the largest change: less is called no move


def fragile_panel(run: Evaluation, count: int) -> Panel | None:
    """The samples with the nearest flips: sample, flip and their difference, enlarged."""
    order = run.distances.sort(stable=True).indices
    known = (run.distances > 0) & run.distances.isfinite()
    chosen: list[int] = order[known[order]][:count].tolist()
    if not chosen:
        return None
    samples, flips = run.images(chosen)
    fold, note = _layout(tuple(samples.shape[1:]), len(chosen))
    ranges = feature_ranges(run.info.get("data", {}), samples[0])
    low, high = run.threat.domain or _range(samples, flips)
    if ranges is not None:
        low, high = 0.0, 1.0
    shape = (0, 0) if fold is None else tuple(fold(samples[0]).shape[-2:])
    size = window(shape) if run.threat.norm == math.inf else 1
    items = []
    for place, i in enumerate(chosen):
        pictures = None
        if fold is not None:
            pair = (samples[place], flips[place])
            pair = pair if ranges is None else (pair[0] / ranges, pair[1] / ranges)
            x, flip = map(fold, pair)
            pictures = _triple(x, flip, low, high, size)  # type: ignore[arg-type]
        before, after = _change(run, i)
        items.append(
            {
                "pictures": pictures,
                "before": before,
                "after": after,
                "distance": length(float(run.distances[i])),
                "method": run.methods[int(run.found_by[i])] if run.methods else "unknown",
                "id": run.ids[i],
                "moved": spread(flips[place] - samples[place]),
                "changes": changes(run.info.get("data", {}), samples[place], flips[place]),
            }
        )
    lead = (
        f"The {len(chosen)} correct samples with the nearest flips, the nearest first: "
        f"{_changes_text(run)} In the third picture grey is no change, and the change is enlarged "
        f"by the factor below it. {smoothed_text(size)}{note}"
    )
    strips = bool(shape) and shape[0] == 1
    return Panel([render("fragile.html.j2", items=items, strips=strips)], lead)


def _change(run: Evaluation, i: int) -> tuple[object, object]:
    """What a flip changes: the class, or which way a prediction fails."""
    if run.criterion is None:
        return class_name(run, int(run.y[i])), class_name(run, int(run.labels[i]))
    assert run.targets is not None and run.outputs is not None
    wanted, said = run.criterion.wanted(run.targets)[i], run.outputs[i]
    told = f"{_few(wanted)}, predicted {_few(said)}"
    return told, way_name(run, int(run.labels[i]))


def _few(values: Tensor) -> str:
    """The first numbers of a row."""
    shown = ", ".join(f"{value:.4g}" for value in values[:FEW].tolist())
    return shown + (", ..." if len(values) > FEW else "")


def _changes_text(run: Evaluation) -> str:
    if run.criterion is None:
        return "label, then the class predicted at the flip."
    return "target, prediction at the sample, then how it fails at the flip."


def _range(*tensors: Tensor) -> tuple[float, float]:
    """Without a box: from the least to the greatest value there is."""
    low = min(float(t.min()) for t in tensors)
    high = max(float(t.max()) for t in tensors)
    return (low, high) if high > low else (low, low + 1)


def _layout(shape: tuple[int, ...], count: int) -> tuple[Any, str]:
    """How samples of a shape become pictures `(H, W)` or `(C, H, W)`: a function, or None, and
    a sentence where it matters.
    """
    size = math.prod(shape)
    if len(shape) == 1 and math.isqrt(size) ** 2 == size and size >= FOLDED:
        side = math.isqrt(size)
        return (
            lambda x: x.reshape(side, side)
        ), f"Samples are {size} numbers, shown folded into {side} × {side}."
    if len(shape) == 1 and size <= STRIP:
        return (
            lambda x: x.reshape(1, size)
        ), f"Samples are {size} numbers, shown as strips from left to right."
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)):
        return None, f"Samples of shape {shape} are no pictures, so only their figures are listed."
    step = max(1, math.ceil(math.sqrt(3 * count * size / BYTES)))
    if step == 1:
        return (lambda x: x), ""
    note = f"Pictures show every {_ordinal(step)} pixel of {shape[-2]} × {shape[-1]}."
    return (lambda x: x[..., ::step, ::step]), note


def _ordinal(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")


def window(shape: tuple[int, ...]) -> int:
    """The side of the squares that a change in linf is averaged over: odd, 1 for no average.

    shape: height and width of the picture.
    """
    side = min(shape)
    return 1 if side < SMOOTHED else 2 * max(1, round(side / 20)) + 1


def smoothed(change: Tensor, size: int) -> Tensor:
    """The mean of a change over the square around each pixel, as far as it is in the picture.

    Args:
        change: `(H, W)` or `(C, H, W)`.
        size: side of the square, odd.
    """
    if size == 1:
        return change
    planes = change.reshape(-1, 1, *change.shape[-2:])
    mean = torch.nn.functional.avg_pool2d(
        planes, size, 1, padding=size // 2, count_include_pad=False
    )
    return mean.reshape(change.shape)


def smoothed_text(size: int) -> str:
    """What the third picture shows where it is an average.

    size: side of the square.
    """
    if size == 1:
        return ""
    return (
        "A flip in linf moves nearly every number by the same amount, so that the change itself "
        f"looks like noise: it is averaged over {size} × {size} pixels, and what is left is where "
        "the picture gets lighter or darker as a whole. "
    )


def spread(change: Tensor) -> str:
    """How many numbers of a sample move, and how many by nearly as much as the one that moves most.

    Args:
        change: flip minus sample.
    """
    size = change.detach().double().abs()
    most = float(size.max())
    moved = float((size > SEEN * most).double().mean())
    whole = float((size >= (1 - SEEN) * most).double().mean())
    return f"moved: {100 * moved:.0f} % of the numbers, {100 * whole:.0f} % by the most, {most:.3g}"


def _triple(
    sample: Tensor, flip: Tensor, low: float, high: float, size: int
) -> list[tuple[str, str, int, int]]:
    """Sample, flip and amplified difference: word, picture, width and height of each."""
    change = smoothed((flip - sample).double(), size)
    largest = float(change.abs().max())
    factor = _factor(0.5 * (high - low) / largest) if largest > 0 else 1
    middle = (low + high) / 2 + factor * change
    word = "change" if size == 1 else "mean change"
    pictures = (
        ("sample", sample),
        ("flip", flip),
        (f"{word} ×{factor if factor < 1000 else f'{factor / 1000:g}k'}", middle),
    )
    return [
        (word, _uri(picture, low, high), picture.shape[-1], picture.shape[-2])
        for word, picture in pictures
    ]


def _factor(most: float) -> int:
    """The largest whole factor of two digits and zeros that is not above `most`, and at least 1."""
    whole = max(1, math.floor(most))
    unit = int(10 ** max(0, len(str(whole)) - 2))
    return whole // unit * unit


def _uri(picture: Tensor, low: float, high: float) -> str:
    pixels = to_uint8(picture.double().nan_to_num(low), low, high)
    return "data:image/png;base64," + base64.b64encode(encode(pixels)).decode()
