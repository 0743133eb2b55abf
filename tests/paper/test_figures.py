"""The paper's figures: their data against closed forms and against each other, the files they
are written to.
"""

import csv
import math
import sys

import pytest
import torch

from support.cells import infinity_by_cells
from wassail.certificates.graph.dense import Piecewise
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.names import FIGURES
from wassail.paper import figures
from wassail.paper.convergence import convergence, draw_convergence, pgd_loss
from wassail.paper.figures import write
from wassail.paper.instance import Instance, instance
from wassail.paper.witness import draw_witness, witness

NORMS = (1.0, 2.0, math.inf)
PNG = b"\x89PNG\r\n\x1a\n"


def kinked() -> Instance:
    """`theta = (0, relu(x_1) - 3 relu(-x_1))`, one sample of the first class at `x_1 = -0.9`:
    slopes 3, then 1.
    """
    first = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2)
    network = Piecewise.from_layers(
        [first, (torch.tensor([[0.0, 0.0], [1.0, -3.0]]), torch.zeros(2))]
    )
    return Instance(
        network, torch.tensor([[-0.9, 0.0]], dtype=torch.float64), torch.tensor([0]), "kinked"
    )


def gain(t: torch.Tensor) -> torch.Tensor:
    """What the margin loss of `kinked` gains within distance t of the sample, whatever the norm."""
    return torch.minimum(3 * t, 1.8 + t)


@pytest.fixture(scope="module", params=NORMS, ids=["l1", "l2", "linf"])
def found(request):
    return convergence(instance(0, samples=8), request.param, eps=(0.05, 1.0), budget=0.25, seed=3)


@pytest.mark.parametrize("norm", NORMS)
def test_convergence_in_closed_form(norm) -> None:
    data = convergence(kinked(), norm, "margin", eps=(0.5, 1.0, 4.0), budget=2.0)
    assert data.empirical == pytest.approx(-2.7) and data.eps.tolist() == [0.5, 1.0, 2.0, 4.0]
    assert data.infinity.upper == pytest.approx(
        1, rel=1e-12
    ) and data.anchor.upper == pytest.approx(3, rel=1e-9)
    assert data.margin == pytest.approx(3, rel=1e-12) and data.paper == pytest.approx(
        2 ** (1 / norm) * 3, rel=1e-12
    )
    assert sorted(data.cell_slopes.tolist()) == pytest.approx(
        [0, 1], abs=1e-12
    )  # to the left the loss falls
    assert sorted(data.cell_norms.tolist()) == pytest.approx(
        [2 ** (1 / norm), 2 ** (1 / norm) * 3], rel=1e-12
    )
    truth = -2.7 + gain(data.eps)
    assert (data.lower <= truth + 1e-12).all() and (truth <= data.upper + 1e-12).all()
    assert torch.allclose(data.upper, truth, atol=1e-5) and torch.allclose(
        data.pgd, truth, atol=1e-12
    )
    assert data.growth(truth) == pytest.approx(1.9, rel=1e-12)  # (1.8 + 2) / 2


@pytest.mark.parametrize("norm", NORMS)
def test_witness_in_closed_form(norm) -> None:
    data = witness(kinked(), norm, "margin", eps=0.5)
    assert data.root == 0 and float(data.alpha[0]) == 0.5 and float(data.eta[0]) == 1
    assert torch.allclose(data.points[:, 0], data.alpha - 0.9)
    assert torch.allclose(data.expected, -2.7 + 0.5 * gain(data.alpha) / data.alpha, rtol=1e-12)
    assert data.limit == pytest.approx(-2.2, rel=1e-12) and float(
        data.eta[data.shown]
    ) == pytest.approx(0.25, rel=0.1)


@pytest.mark.few(1)
def test_slopes_and_curves_are_in_order(found) -> None:
    slack = 1 + 1e-9
    cumulative = found.infinity_so_far
    so_far = found.paper_so_far
    assert (
        len(found.masks) == len(found.masks.unique(dim=0)) == 37
    )  # 1 + 8 + 28 lines, pairs of lines: all cells of the plane
    assert (cumulative.diff() >= 0).all() and (so_far.diff() >= 0).all()
    assert float(cumulative[-1]) == pytest.approx(found.infinity.upper, rel=1e-9)
    assert float(so_far[-1]) == pytest.approx(found.paper, rel=1e-12)
    assert (
        found.infinity.lower <= found.anchor.upper * slack
        and found.anchor.lower <= found.margin * slack
    )
    assert found.margin <= found.paper * slack
    by_cells = infinity_by_cells(found.case.network, found.norm, found.case.labels)
    assert found.infinity.lower <= by_cells.upper and by_cells.lower <= found.infinity.upper
    # The exact curve is concave from (0, E) on, and its chords from there fall from S towards l.
    eps = torch.cat([torch.zeros(1, dtype=torch.float64), found.eps])
    worst = torch.cat([torch.tensor([found.empirical], dtype=torch.float64), found.upper])
    rises = worst.diff() / eps.diff()
    assert (rises.diff() <= 1e-4).all() and (found.upper - found.lower <= 1e-5).all()
    slopes = found.slopes
    assert (found.empirical + slopes["infinity"] * found.eps <= found.upper).all()
    assert (found.lower <= found.empirical + slopes["anchor"] * found.eps).all()
    assert (found.pgd <= found.upper).all() and (
        found.pgd >= found.empirical
    ).all()  # Omega_inf lies in Omega_1
    growth = found.growth(found.upper)
    assert (
        slopes["infinity"] <= growth <= slopes["anchor"] + 1e-5 and found.growth(found.pgd) < growth
    )


@pytest.mark.parametrize("norm", NORMS)
def test_tight_instance_has_one_slope(norm) -> None:
    case = instance(1, tight=True)
    data = convergence(case, norm, "margin", eps=(), budget=2.0)
    assert case.labels == [0, 1]
    for slope in data.slopes.values():
        assert slope == pytest.approx(data.paper, rel=1e-9)
    assert float(data.upper) == pytest.approx(data.empirical + data.paper * 2, rel=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_witness_is_feasible_and_converges(norm) -> None:
    data = witness(instance(0), norm)
    case = data.case
    n = len(data.case.y)
    distance = torch.linalg.vector_norm(data.points - case.x[data.root], norm, dim=1)
    assert torch.allclose(data.eta * distance / n, torch.full_like(distance, data.eps), rtol=1e-12)
    assert (data.eta <= 1 + 1e-12).all() and (data.expected <= data.worst.upper).all()
    mine = case.y == data.slope.info["label"]
    step = data.points[-1] - case.x[data.root]
    ends = torch.nn.functional.cross_entropy(
        case.network.logits(case.x + step), case.y, reduction="none"
    )
    gains = ends - torch.nn.functional.cross_entropy(
        case.network.logits(case.x), case.y, reduction="none"
    )
    assert (
        mine[data.root] and mine.sum() > 1 and gains[data.root] >= gains[mine].max() * (1 - 1e-12)
    )
    assert float(data.expected[-1]) == pytest.approx(data.limit, rel=1e-4)
    # The same distribution by hand: all samples, one of them split.
    losses = torch.nn.functional.cross_entropy(
        case.network.logits(case.x), case.y, reduction="none"
    )
    far = torch.nn.functional.cross_entropy(
        case.network.logits(data.points[5:6]), case.y[data.root : data.root + 1]
    )
    losses[data.root] = (1 - data.eta[5]) * losses[data.root] + data.eta[5] * far
    assert float(data.expected[5]) == pytest.approx(float(losses.mean()), rel=1e-12)


def test_pgd_climbs_on_behind_the_boundary() -> None:
    case = instance(0)
    reached = [pgd_loss(case, 2.0, "margin", eps) for eps in (0.1, 1.0, 3.0)]
    assert (
        reached == sorted(reached) and reached[-1] > 1
    )  # far beyond 0, where a sample is misclassified


def test_no_ray_is_told() -> None:
    network = Piecewise.from_layers(
        [(torch.eye(2), torch.zeros(2)), (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(2))]
    )
    with pytest.raises(InputError, match="choose another seed"):
        witness(Instance(network, kinked().x, kinked().y, "the loss only falls"), 2)


def test_files(tmp_path, monkeypatch) -> None:
    found = convergence(kinked(), math.inf, "margin", eps=(), budget=1.0)
    monkeypatch.setattr(figures, "convergence", lambda case, norm, seed: found)
    paths = write(tmp_path / "new" / "folder", ["convergence"], seed=7, norm=found.norm)
    assert {p.name for p in paths} == {
        "convergence.png", "convergence-tight.png", "convergence-masks.csv", "convergence-eps.csv",
        "convergence-tight-masks.csv", "convergence-tight-eps.csv",
    }  # fmt: skip
    assert all(p.read_bytes()[:8] == PNG for p in paths if p.suffix == ".png")
    masks, eps = (
        read(tmp_path / "new" / "folder" / f"convergence-{name}.csv") for name in ("masks", "eps")
    )
    assert [float(row["l_so_far"]) for row in masks] == found.infinity_so_far.tolist()
    assert masks[0]["mask"] == "".join(str(int(on)) for on in found.masks[0])
    assert [float(row["exact_upper"]) for row in eps] == found.upper.tolist()
    head = (tmp_path / "new" / "folder" / "convergence-eps.csv").read_text().splitlines()
    assert head[0].startswith("# kinked") and "--seed 7" in head[1] and "torch" in head[1]
    assert draw_convergence(found) is not draw_convergence(found)


def read(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_command_line(tmp_path, capsys, monkeypatch) -> None:
    assert tuple(FIGURES) == figures.FIGURES
    assert (
        main(
            [
                "paper",
                "figures",
                "witness",
                "--out",
                str(tmp_path / "a"),
                "--norm",
                "inf",
                "--seed",
                "0",
            ]
        )
        == 0
    )
    assert (
        "witness.png" in capsys.readouterr().out
        and (tmp_path / "a" / "witness.png").read_bytes()[:8] == PNG
    )
    data = witness(instance(0), math.inf)
    rows = read(tmp_path / "a" / "witness.csv")
    assert [float(row["expected"]) for row in rows] == data.expected.tolist()
    assert len(draw_witness(data).axes) == 2
    bad = {
        "did you mean 'convergence'": ["convergnce"],
        "norm '3'": ["--norm", "3"],
        "cannot write": ["witness", "--out", str(tmp_path / "a" / "witness.csv" / "x")],
    }
    for words, extra in bad.items():
        assert main(["paper", "figures", *extra]) == 2
        err = capsys.readouterr().err
        assert words in err and err.startswith("wassail: ") and err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["paper", "figures", "--out", str(tmp_path / "b")]) == 2
    assert (
        'pip install "wassail[plot]"' in capsys.readouterr().err and not (tmp_path / "b").exists()
    )
