"""Draw docs/site/curve.png, the picture of the README, from the embedded network and data.

python scripts/readme_picture.py        # about five minutes of one core
"""

from __future__ import annotations

from pathlib import Path

import wassail as ws
from wassail.transport.picture import draw_sandwich

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 100
PASSES = 200
EPS = 0.05  # the network was trained against attacks at this eps


def main() -> None:
    """Certified and attacked accuracy against eps, for three orders."""
    model = ws.zoo.load("digits-cnn-adv")
    x, y = (part[:SAMPLES] for part in ws.zoo.data("digits"))
    flips = ws.nearest(model, x, y, norm="inf", passes=PASSES)
    radii = ws.radii(model, x, y, norm="inf", upper=flips.distances)
    curves = [ws.risk_curve(flips, radii, order=order) for order in (1, 2, "inf")]
    figure = draw_sandwich(curves, f"digits-cnn-adv, linf, {SAMPLES} samples", mark=EPS)
    figure.savefig(ROOT / "docs" / "site" / "curve.png", dpi=110)


if __name__ == "__main__":
    main()
