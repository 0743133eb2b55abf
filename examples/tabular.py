"""From a CSV file to a signed-off figure: features with boxes and units of their own.

    python examples/tabular.py
    python examples/tabular.py breast_cancer

The first table is made of scikit-learn's handwritten digits, which ship with wassail: is it an 8 or
a 3? Sixteen features: the ink in each row and each column of the image, in counts of 0 to 128. The
second one is scikit-learn's own, thirty measures of cells, and needs scikit-learn (the extra
`train`). Put your own CSV file and your own model in their place.

The same on the command line, with the model in a file of yours:

    wassail evaluate mine:net --one-logit --data test.csv --box box.csv --eps 0.005 --certify
        --require "accuracy>=0.5 at eps 0.005 order 1 confidence 0.95 proved"
"""

import csv
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import wassail as ws
from wassail.report.card import model_card

EPS = 0.005  # of the range of each feature, in the mean over all samples
REQUIREMENT = f"accuracy>=0.5 at eps {EPS} order 1 confidence 0.95 proved"
NAMES = [f"ink in {kind} {place}" for kind in ("row", "column") for place in range(8)]


def digits() -> tuple[list[str], list[list[float]]]:
    """The names of the columns, and the rows; the label stands at the end."""
    rows = []
    for split in ("train", "test"):
        x, y = ws.zoo.data("digits", split)
        for image, label in zip(x[:, 0], y.tolist()):
            if label in (3, 8):
                counts = (16 * image).round().int()
                ink = torch.cat([counts.sum(1), counts.sum(0)]).tolist()
                rows.append([*ink, "eight" if label == 8 else "a three"])
    return [*NAMES, "label"], rows


def breast_cancer() -> tuple[list[str], list[list[float]]]:
    """The same for scikit-learn's table, in a random order that is always the same."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    order = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(0))
    rows = [
        [*table.data[i].tolist(), str(table.target_names[table.target[i]])] for i in order.tolist()
    ]
    return [*map(str, table.feature_names), "label"], rows


def write_table(path: Path, names: list[str], rows: list[list[float]]) -> None:
    """Samples as a CSV file: a line of names, one line a sample."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def train(x: torch.Tensor, y: torch.Tensor, high: torch.Tensor) -> nn.Module:
    """A small network with one logit, trained in units of the range, for features as they are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(x.shape[1], 16), nn.ReLU(), nn.Linear(16, 1))
    optimiser = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=1e-2)
    for _ in range(400):
        loss = nn.functional.binary_cross_entropy_with_logits(net(x / high)[:, 0], y.float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        net[0].weight /= high
    return net.eval()


def main(name: str = "digits") -> int:
    """Evaluate, print the verdict and the section of a model card; 1 if it does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        names, rows = digits() if name == "digits" else breast_cancer()
        half = len(rows) // 2
        for part, some in (("train", rows[:half]), ("test", rows[half:])):
            write_table(Path(folder) / f"{part}.csv", names, some)
        x, y = ws.zoo.open_data(Path(folder) / "train.csv").read(0, half)
        data = ws.zoo.open_data(Path(folder) / "test.csv")
        data.name = f"{name}, the second half"
    low = torch.zeros(x.shape[1])
    # The box comes from how a feature is made (8 pixels of 0 to 16), or from other samples than
    # those that are evaluated: twice the greatest of the training half.
    high = torch.full_like(low, 128.0) if name == "digits" else 2 * x.amax(0)
    model = ws.OneLogit(train(x, y, high))
    run = ws.evaluate(
        model,
        data,
        ws.Threat("inf", 1, EPS, domain=(low, high)),
        ("nearest",),
        certify="auto",
        passes=20,
        name="a network with one logit",
    )
    verdict = run.require(REQUIREMENT)
    print(verdict)
    print(model_card(run, [verdict]))
    return 0 if verdict else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
