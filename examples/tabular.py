"""From a CSV file to a signed-off figure: features with boxes and units of their own.

    python examples/tabular.py

The table is made of scikit-learn's handwritten digits, which ship with wassail: is it an 8 or a 3?
Sixteen features: the ink in each row and each column of the image, in counts of 0 to 128.
Put your own CSV file and your own model in their place.
"""

import csv
import tempfile
from pathlib import Path

import torch
from torch import nn

import wassail as ws
from wassail.report.card import model_card

REQUIREMENT = "accuracy>=0.5 at eps 0.005 order 1 confidence 0.95 proved"
NAMES = [f"ink in {kind} {place}" for kind in ("row", "column") for place in range(8)]


def write_table(path: Path) -> None:
    """Samples as a CSV file: a line of names, one line a sample, the label at the end."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*NAMES, "label"])
        for split in ("train", "test"):
            x, y = ws.zoo.data("digits", split)
            for image, label in zip(x[:, 0], y.tolist()):
                if label in (3, 8):
                    counts = (16 * image).round().int()
                    ink = torch.cat([counts.sum(1), counts.sum(0)]).tolist()
                    table.writerow([*ink, int(label == 8)])


def train(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A small network with one logit, on features in their own units."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        net[0].weight /= 20  # the features are counts of up to 128
    optimiser = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=3e-2)
    for _ in range(400):
        loss = nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], y.float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


def main() -> int:
    """Evaluate, print the verdict and the section of a model card; 1 if it does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.csv"
        write_table(path)
        data = ws.zoo.open_data(path)
        x, y = data.read(0, len(data))
    half = len(x) // 2
    model = ws.OneLogit(train(x[:half], y[:half]))
    # The box is known from how a feature is made, not from the samples: 8 pixels of 0 to 16.
    features = ws.Features([0.0] * 16, [128.0] * 16, names=NAMES)
    run = ws.evaluate(
        features.model(model),
        features.data(x[half:], y[half:], "digits 3 and 8"),
        ws.Threat("inf", 1, 0.005, features.domain),
        ("nearest",),
        certify="auto",
        passes=50,
        name="rows and columns of ink",
    )
    verdict = run.require(REQUIREMENT)
    print(verdict)
    print(model_card(run, [verdict]))
    return 0 if verdict else 1


if __name__ == "__main__":
    raise SystemExit(main())
