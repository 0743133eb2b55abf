"""`wassail demo`: an evaluation of an embedded network, then three trainings side by side."""

from __future__ import annotations

import argparse

from wassail.cli.commands import evaluate_command
from wassail.cli.signoff import quiet_output
from wassail.threat import ceil_percent, floor_percent

TRAININGS = {
    "standard": "digits-cnn",
    "adversarial": "digits-cnn-adv",
    "certified": "digits-cnn-cert",
}
EPS = 0.05
SAMPLES = 20
PASSES = 20


def demo_command(options: argparse.Namespace) -> int:
    """Evaluate the network, and show what training for the distributional threat buys."""
    code = evaluate_command(options)
    with quiet_output(options):
        print_share(options)
        print_trainings()
    return code


def print_share(options: argparse.Namespace) -> None:
    """Say that the figures are of some samples, not of all, and what all of them take."""
    import wassail as ws

    every = len(ws.zoo.data("digits")[0])
    if options.n is not None and options.n < every:
        print(
            f"\nThe first {options.n} of {every} samples: a proof takes a second or two of a core "
            f"for each. All of them: wassail demo -n {every} --time-limit 900 --out all"
        )


def print_trainings() -> None:
    """Clean accuracy and both sides over `Omega_1(0.05)` of one architecture, trained in three
    ways. A few seconds.
    """
    import wassail as ws

    x, y = ws.zoo.data("digits")
    x = x[:SAMPLES]
    y = y[:SAMPLES]
    print(f"\nOne network, three trainings: over Omega_1({EPS:g}), linf, {SAMPLES} samples, in %")
    print(f"{'training':12} {'clean':>6} {'certified':>10} {'attacked':>9}")
    for training, name in TRAININGS.items():
        model = ws.zoo.load(name)
        flips = ws.nearest(model, x, y, norm="inf", passes=PASSES)
        radii = ws.radii(model, x, y, norm="inf", method="crown", upper=flips.distances)
        curve = ws.risk_curve(flips, radii, order=1)
        low, high = curve(EPS)
        clean = ceil_percent(curve(0)[1], 1)
        sides = f"{floor_percent(low, 1):>10} {ceil_percent(high, 1):>9}"
        print(f"{training:12} {clean:>6} {sides}", flush=True)
