"""How the bounds of the corollary grow with tokens, depth and width: prints docs/growth.md and
draws docs/growth/growth.png.

    python benchmarks/growth.py [--seeds 2]

Pre-LN transformers are made for it, with the weights that torch gives new layers; nothing else is
read.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from wassail.paper import corollary as module
from wassail.paper.corollary import corollary

ROOT = Path(__file__).resolve().parents[1]
TOKENS = (4, 8, 16, 32, 64, 128)
DEPTHS = (1, 2, 3, 4)
WIDTHS = (8, 16, 32, 64)
FEATURES = 4
CLASSES = 3
HEADS = 2
INK = {"paper": "#D55E00", "ours": "#0072B2", "found": "black"}


class Transformer(nn.Module):
    """Tokens of four numbers, a linear embedding, a class token, Pre-LN blocks, a final norm, a
    head on the class token.
    """

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def make(depth: int, width: int, seed: int, sharp: float) -> Transformer:
    """New weights from a seed of their own; sharp: queries and keys are scaled by this."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(depth, width).double().eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight[: 2 * width] *= sharp
        model.token.copy_(torch.randn(1, 1, width, generator=torch.Generator().manual_seed(seed)))
    return model


def measure(
    tokens: int, depth: int, width: int, seeds: int, sharp: float = 1.0
) -> dict[str, float]:
    """log10 of Lambda by both, and of the steepest slope found, averaged over the seeds."""
    rows = []
    for seed in range(seeds):
        found = corollary(make(depth, width, seed, sharp), shape=(tokens - 1, FEATURES), seed=seed)
        rows.append((found.paper, found.ours, math.log10(found.empirical)))
        assert found.empirical <= 10**found.ours <= 10**found.paper
    return dict(zip(INK, (sum(column) / seeds for column in zip(*rows))))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line."""
    a = torch.tensor(x, dtype=torch.float64)
    b = torch.tensor(y, dtype=torch.float64)
    return float(((a - a.mean()) * (b - b.mean())).sum() / (a - a.mean()).square().sum())


def table(title: str, keys: Sequence[object], runs: Sequence[dict[str, float]]) -> None:
    """The numbers behind one line of the figure."""
    print(
        f"| {title} | " + " | ".join(str(key) for key in keys) + " |\n|" + "---|" * (len(keys) + 1)
    )
    for name in INK:
        print(f"| {name} | " + " | ".join(f"{run[name]:.2f}" for run in runs) + " |")
    print()


def draw(
    by_tokens: dict[int, list[dict[str, float]]],
    by_depth: list[dict[str, float]],
    by_width: list[dict[str, float]],
) -> None:
    """Three panels with one vertical axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
    for depth, runs in by_tokens.items():
        for name, colour in INK.items():
            label = name if depth == DEPTHS[-1] else None
            axes[0].plot(
                TOKENS,
                [run[name] for run in runs],
                "o-",
                color=colour,
                ms=3,
                lw=0.6 + 0.4 * depth,
                label=label,
            )
    for name, colour in INK.items():
        axes[1].plot(DEPTHS, [run[name] for run in by_depth], "o-", color=colour, ms=3, label=name)
        axes[2].plot(WIDTHS, [run[name] for run in by_width], "o-", color=colour, ms=3, label=name)
    axes[0].set(
        xscale="log",
        xlabel="tokens n (thicker: deeper, 1 to 4 blocks)",
        ylabel="log10 of the bound on $\\|J\\|_2$",
    )
    axes[1].set(xlabel="blocks H (16 tokens, width 16)", xticks=DEPTHS)
    axes[2].set(
        xscale="log", xlabel="width d (16 tokens, 2 blocks)", xticks=WIDTHS, xticklabels=WIDTHS
    )
    axes[2].minorticks_off()
    axes[1].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
    (ROOT / "docs" / "growth").mkdir(exist_ok=True)
    figure.savefig(ROOT / "docs" / "growth" / "growth.png", dpi=150)


def main(seeds: int) -> None:
    """Measure, print, draw."""
    print(f"""# How the transformer bounds grow

Command: `python benchmarks/growth.py`, {seeds} seeds. The networks are Pre-LN transformers with the
weights that torch gives new layers: an embedding, a class token, H blocks of attention ({HEADS}
heads) and a GELU part of twice the width, a final norm, a head on the class token. Each number is
log10 of `Lambda` on R^n, with the paper's constants and with ours, and of the largest `||J||_2`
that gradient ascent found (`found`, a lower bound on the truth).

![growth](growth/growth.png)

## Tokens: is it n^(H/2)?

Width 16.
""")
    logs = [math.log10(n) for n in TOKENS]
    by_tokens = {depth: [measure(n, depth, 16, seeds) for n in TOKENS] for depth in DEPTHS}
    for depth, runs in by_tokens.items():
        table(f"H = {depth}, n =", TOKENS, runs)
    print(
        "Exponents of n, fitted over all n:\n\n| H | H / 2 | "
        + " | ".join(INK)
        + " |\n|"
        + "---|" * (len(INK) + 2)
    )
    for depth, runs in by_tokens.items():
        fits = " | ".join(f"{slope(logs, [run[name] for run in runs]):.2f}" for name in INK)
        print(f"| {depth} | {depth / 2:g} | {fits} |", flush=True)
    print(
        "\nThe same for one block and one seed, queries and keys scaled (scores by the square of "
        "it):\n\n| scale | " + " | ".join(INK) + " |\n|" + "---|" * (len(INK) + 1)
    )
    for sharp in (0.03, 0.1, 0.3, 1.0, 3.0):
        runs = [measure(n, 1, 16, 1, sharp) for n in TOKENS]
        print(
            f"| {sharp:g} | "
            + " | ".join(f"{slope(logs, [run[name] for run in runs]):.2f}" for name in INK)
            + " |",
            flush=True,
        )
    print("\n## Depth\n\n16 tokens, width 16.\n")
    by_depth = [by_tokens[depth][TOKENS.index(16)] for depth in DEPTHS]
    table("H =", DEPTHS, by_depth)
    print(
        "Decades for each block: "
        + ", ".join(f"{name} {slope(DEPTHS, [r[name] for r in by_depth]):.2f}" for name in INK)
        + "."
    )
    print("\n## Width\n\n16 tokens, 2 blocks.\n")
    by_width = [
        by_tokens[2][TOKENS.index(16)] if d == 16 else measure(16, 2, d, seeds) for d in WIDTHS
    ]
    table("d =", WIDTHS, by_width)
    wide = [math.log10(d) for d in WIDTHS]
    print(
        "Exponents of d: "
        + ", ".join(f"{name} {slope(wide, [r[name] for r in by_width]):.2f}" for name in INK)
        + "."
    )
    draw(by_tokens, by_depth, by_width)
    print(READING)


READING = """
## Reading

- The corollary says `O(n^(H/2))`: for the paper's constants that is what the product does, to the
  second digit.
- Ours grows more slowly, and not at all where scores are small: `sqrt(n)` enters only when a row of
  attention can put most of its weight on one token, that is when `|A| R^2` is not small beside `log
  n`. At the weights torch starts from it is large.
- The networks themselves get flatter with more tokens, like `n^(-1/2)`: the class token averages
  over all of them. A sharp attention (scale 3) takes that away. Nothing found here grows like
  `n^(H/2)`; attention that makes every token look at one and the same does have a norm of
  `sqrt(n)`, so the exponent of one block cannot be improved for all weights.
- Depth costs both bounds about seven decades a block, five of them from the two factors `1 /
  sqrt(eps)` of LayerNorm, while the networks stay where they are. On R^n both are vacuous from the
  first block on; on a small domain the variance is bounded below, and the local constants are the
  useful ones.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    torch.set_num_threads(1)
    # of the ascents: it is the growth that matters here
    module.STARTS = 3
    module.ROUNDS = 2
    main(parser.parse_args().seeds)
