"""The demo's settings on samples that they were not chosen on.

    python benchmarks/demo.py [--first 200] [--samples 50] [--time-limit 600]

Evaluates what `wassail demo` evaluates, on other samples of the embedded data, and prints the
bracket over Omega_1(0.05) with the processor seconds of everything. The limit is longer than the
demo's own 120 seconds, so that a busy machine gives the same figures.
"""

from __future__ import annotations

import argparse
import time

import torch

import wassail as ws
from wassail.cli.options import DEMO_GAP, DEMO_SAMPLES

EPS = 0.05
ORDERS = (1, 2, "inf")


def main() -> None:
    """Print one line for each order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--samples", type=int, default=DEMO_SAMPLES)
    parser.add_argument("--time-limit", type=float, default=600.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    x, y = ws.zoo.data("digits")
    last = asked.first + asked.samples
    begun = time.process_time(), time.monotonic()
    run = ws.evaluate(
        ws.zoo.load("digits-cnn-adv"),
        (x[asked.first : last], y[asked.first : last]),
        [ws.Threat("inf", order, EPS) for order in ORDERS],
        certify="auto",
        gap=float(DEMO_GAP) / 100,
        closing=1,
        provers=2,
        time_limit=asked.time_limit,
    )
    seconds, clock = time.process_time() - begun[0], time.monotonic() - begun[1]
    print(f"samples {asked.first} to {last - 1}: {seconds:.0f} processor s, {clock:.0f} s")
    for order in ORDERS:
        low, high = run.curve(order)(EPS)
        gap = high - low
        print(f"Omega_{order}({EPS}): {100 * low:.2f} .. {100 * high:.2f}, gap {100 * gap:.2f}")


if __name__ == "__main__":
    main()
