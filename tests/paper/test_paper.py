"""The figures of the attacks: their data against closed forms, an exact transport solver and
the attacks themselves.
"""

import csv
import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from wassail import zoo
from wassail.attacks.wda import Walk, algorithm_1
from wassail.attacks.wda_pp import wda_pp
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.network import Network
from wassail.paper import figures, sweeps
from wassail.paper import pages as pages_module
from wassail.paper import runtime as runtime_module
from wassail.paper import step as step_module
from wassail.paper.inclusion import ball, inclusion
from wassail.paper.runtime import Case, curve, draw_runtime, runtime
from wassail.paper.step import step
from wassail.paper.sweeps import kappa, steps
from wassail.paper.table import Line, Table, table
from wassail.threat import dual
from wassail.transport.distribution import allocate

PNG = b"\x89PNG\r\n\x1a\n"
ORDERS = (1.0, 2.0, math.inf)


@pytest.fixture(scope="module")
def case() -> Case:
    x, y = zoo.data("digits")
    return Case(zoo.load("digits-mlp"), x[:12], y[:12], "digits-mlp on digits", math.inf, 0.05)


def transport(points: list[float], masses: list[float], labels: list[int], order: float) -> float:
    """W_p between atoms on a line and the samples 0 (label 0) and 10 (label 1), one half each,
    by linear programming.
    """
    far = np.array(
        [
            [abs(p - s) if a == b else 1e6 for s, b in ((0.0, 0), (10.0, 1))]
            for p, a in zip(points, labels)
        ]
    )
    m, n = far.shape
    rows = [np.eye(m * n).reshape(m, n, -1)[i].sum(0) for i in range(m)]
    columns = [np.eye(m * n).reshape(m, n, -1)[:, j].sum(0) for j in range(n)]
    found = linprog(
        (far**order).ravel(),
        A_eq=np.stack(rows + columns),
        b_eq=[*masses, 0.5, 0.5],
        method="highs",
    )
    return float(found.fun) ** (1 / order)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("order", [1.0, 2.0])
def test_the_sets_end_at_eps_by_an_exact_solver(order, share) -> None:
    for t in ball(0.7, order, share)[::45].tolist():
        points = [0.0, 10.0, t[0], 10.0 + t[1]]
        labels = [0, 1, 0, 1]
        masses = [(1 - share) / 2] * 2 + [share / 2] * 2
        assert transport(points, masses, labels, order) == pytest.approx(0.7, rel=1e-6)


def test_inclusion_in_closed_form() -> None:
    data = inclusion(1.0, (1.2, 2.2))
    for sets in (data.whole, data.half):
        one, two, square = (sets[order].abs() for order in ORDERS)
        share = 1.0 if sets is data.whole else 0.5
        assert torch.allclose(one.sum(1), torch.full_like(one[:, 0], 2 / share), rtol=1e-12)
        assert torch.allclose((two**2).sum(1), torch.full_like(one[:, 0], 2 / share), rtol=1e-12)
        assert torch.allclose(square.amax(1), torch.ones_like(one[:, 0]), rtol=1e-12)
        # Each set lies in the next: on every ray it ends sooner.
        assert (square.norm(dim=1) <= two.norm(dim=1) + 1e-12).all() and (
            two.norm(dim=1) <= one.norm(dim=1) + 1e-12
        ).all()

    def at(values, eps: float) -> float:
        return float(values[int((data.budgets - eps).abs().argmin())])

    truth = {
        1.0: (0.5, 1 - (1 + 0.8 / 2.2) / 2),
        2.0: (0.5, 1 - (1 + 0.56 / 4.84) / 2),
        math.inf: (1.0, 1.0),
    }
    assert float((data.budgets - 1).abs().min()) < 1e-9
    for order, (whole, split) in truth.items():
        assert at(data.points_n[order], 1.0) == whole and at(
            data.points_2n[order], 1.0
        ) == pytest.approx(split, abs=1e-9)
        assert (data.points_2n[order] <= data.points_n[order] + 1e-12).all()
    for order, bend in (
        (1.0, 0.6),
        (math.inf, 1.2),
    ):  # the sets are closed: a flip that costs exactly eps is bought
        place = int((data.budgets == bend).nonzero())
        assert data.points_n[order][place - 1] == 1 and data.points_n[order][place] == 0.5
    for small, large in itertools.pairwise(ORDERS):
        for values in (data.points_n, data.points_2n):
            assert (values[small] <= values[large] + 1e-12).all()


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_a_step_is_the_attacks_own(norm) -> None:
    data = step(0, norm, tries=8)
    network = data.network
    y = torch.tensor([data.y])

    def model(x: torch.Tensor) -> torch.Tensor:
        return (x @ network.A.T + network.c).relu() @ network.D.T + network.e

    point = data.x.clone().requires_grad_()
    for j, phi in zip(data.rivals.tolist(), data.candidates):  # the candidates by autograd
        z = model(point[None])[0]
        g = torch.autograd.grad(z[j] - z[data.y], point)[0]
        best = {1.0: g.abs().max(), 2.0: g.norm(), math.inf: g.abs().sum()}[norm]
        assert float(g @ (phi - data.x)) == pytest.approx(data.alpha * float(best), rel=1e-9)
        assert float(torch.linalg.vector_norm(phi - data.x, norm)) == pytest.approx(
            data.alpha, rel=1e-9
        )
    z = model(data.candidates)
    assert torch.allclose(data.gaps, z.gather(1, data.rivals[:, None])[:, 0] - z[:, data.y])
    taken = data.candidates[data.chosen]
    walk = Walk(norm, math.inf, data.alpha, maxiter=1, probe=1, topk=3, select="margin")
    network_of = Network(model, torch.tensor([0]))
    moved, _ = algorithm_1(network_of, data.x[None], y, lambda share: None, walk, None)
    lead = [
        float((model(point[None])[0, data.rivals] - model(point[None])[0, data.y]).max())
        for point in (data.x, taken)
    ]
    assert torch.allclose(moved[0], taken if lead[1] > lead[0] else data.x, atol=1e-12)
    # Every walk that ends with a flip ends no nearer than the nearest flip, which is exact.
    assert (
        int(model(data.flip[None]).argmax()) != data.y
        or float(model(data.flip[None])[0].topk(2).values.diff()) > -1e-9
    )
    for path in data.walks.values():
        if int(model(path[-1:]).argmax()) != data.y:
            assert float(torch.linalg.vector_norm(path[-1] - data.x, norm)) >= data.distance * (
                1 - 1e-9
            )
    f, g = step_module._margins(data.network, data.x, data.y)
    crossed = f + g @ (data.deepfool - data.x)
    near = (-f / torch.linalg.vector_norm(g, dual(norm), dim=1)).min()
    assert float(torch.linalg.vector_norm(data.deepfool - data.x, norm)) == pytest.approx(
        1.02 * float(near), rel=1e-9
    )
    assert float(crossed.max()) == pytest.approx(0.02 * float(-f[crossed.argmax()]), rel=1e-9)


def test_runtime_counts_what_the_attacks_count(case) -> None:
    data = runtime(case, ("wda++", "nearest"))
    assert data.sizes == [3, 6, 12]
    for t, size in enumerate(data.sizes):
        alone = wda_pp(case.model, case.x[:size], case.y[:size], case.threat(1.0))
        assert data.passes("wda++")[t] == int(alone.forwards.sum() + alone.backwards.sum())
    assert all(seconds > 0 for row in data.seconds.values() for seconds in row)
    assert data.growth([5.0, 10.0, 20.0]) == pytest.approx(1.0)
    columns = runtime_module.runtime_tables(data)["runtime"][1]
    assert (
        list(columns["samples"]) == [3, 6, 12] * 2
        and columns["forwards"][:3] == data.forwards["wda++"]
    )
    assert len(draw_runtime(data).axes) == 2


def test_curve_is_the_allocation_at_every_eps(case) -> None:
    data = curve(case, points=7, budgets=2)
    flips = case.searches()
    for (name, order), line in data.lines.items():
        assert float(line[0]) == data.clean and (line.diff() <= 1e-12).all()
        assert float(line[3]) == pytest.approx(
            allocate(flips[name], float(data.eps[3]), order).accuracy, abs=1e-12
        )
    for name in flips:
        assert (data.lines[name, 1.0] <= data.lines[name, 2.0] + 1e-12).all()
        assert (data.lines[name, 2.0] <= data.lines[name, math.inf] + 1e-12).all()
    assert set(data.dots) == {("wda", order) for order in ORDERS} | {
        ("w-pgd", 2.0),
        ("w-pgd", math.inf),
    }
    assert float(data.dots["wda", 1.0][1]) == case.run("wda", 1.0, float(data.budgets[1])).accuracy
    assert len(runtime_module.draw_curve(data).axes) == 3


def test_kappa_one_has_no_order(case) -> None:
    data = kappa(case, (1.0, 2.0, 100.0))
    one = data.lines["wda_1"]
    two = data.lines["wda_2"]
    assert (
        one[0] == two[0] == case.run("wda", math.inf).accuracy
    )  # kappa = 1 is the point-wise attack, whatever the order
    for line in (one, two):
        assert (line >= data.clean * (1 - 1 / data.values) - 1e-12).all() and (
            line <= data.clean
        ).all()
    assert one[1] < two[1]  # its ball is the larger one
    assert float(two[1]) == case.run("wda", 2.0, kappa=2).accuracy
    assert float(one[2]) == pytest.approx(
        0.99 * data.clean
    )  # a hundredth of each sample moves anywhere in the box
    assert data.levels["wda++_1"] == wda_pp(case.model, case.x, case.y, case.threat(1.0)).accuracy
    assert len(sweeps.draw_kappa([data]).axes) == 1


def test_steps_that_are_too_short_do_nothing(case) -> None:
    data = steps(case, (1e-6, 0.64, 0.1))
    for name, line in data.lines.items():
        assert float(line[0]) == data.clean, name
    assert (
        float(data.lines["wda++_1_20"][1])
        == wda_pp(case.model, case.x, case.y, case.threat(1.0)).accuracy
        < data.clean
    )
    assert (data.lines["wda++_1_20"] <= data.lines["wda++_1_5"]).all()  # the same walk, longer
    assert (
        data.lines["wda++_1_20"][2] < data.lines["wda++_1_5"][2]
        and data.lines["wda_inf_20"][2] < data.lines["wda_inf_5"][2]
    )
    assert len(sweeps.draw_steps([data, data]).axes) == 2


def read(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.mark.slow
def test_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runtime_module, "curve", lambda case: curve(case, points=5, budgets=1))
    monkeypatch.setattr(step_module, "step", lambda seed, norm: step(seed, norm, tries=2))
    paths = figures.write(
        tmp_path, ["inclusion", "step", "curve"], norm="2", model="digits-mlp", n=3, eps="0.4"
    )
    names = [
        "inclusion.png",
        "inclusion-sets.csv",
        "inclusion-accuracy.csv",
        "step.png",
        "step-candidates.csv",
    ]
    assert [path.name for path in paths] == [
        *names,
        "step-walks.csv",
        "curve.png",
        "curve.csv",
        "curve-runs.csv",
    ]
    assert all(path.read_bytes()[:8] == PNG for path in paths if path.suffix == ".png")
    walks = read(tmp_path / "step-walks.csv")
    assert {row["method"] for row in walks} == {"wda", "pgd", "deepfool"} and walks[0][
        "step"
    ] == "0"
    found = inclusion()
    assert [
        float(row["2n_points_1"]) for row in read(tmp_path / "inclusion-accuracy.csv")
    ] == found.points_2n[1.0].tolist()
    head = (tmp_path / "curve.csv").read_text().splitlines()
    assert (
        head[0].startswith("# digits-mlp on digits, 3 samples, l2") and "--eps 0.4 " not in head[0]
    )
    assert (
        "wassail paper figures inclusion step curve --seed 0 --norm 2 --model digits-mlp -n 3 "
        "--eps 0.4;" in head[1]
    )
    assert set(read(tmp_path / "curve-runs.csv")[0]) == {
        "eps",
        "wda_1",
        "wda_2",
        "wda_inf",
        "w-pgd_2",
        "w-pgd_inf",
    }


def test_every_figure_has_a_maker() -> None:
    assert tuple(figures._MAKERS) == figures.FIGURES


def test_what_cannot_be_drawn_is_told(tmp_path, capsys) -> None:
    bad: dict[str, dict[str, Any]] = {
        "eps '0.1' is for one norm": {"eps": "0.1"},
        "n is 0": {"n": 0},
        "has no data of its own": {"model": "digits_mlp.onnx"},
        "no usual budget for 'x.onnx' at l1": {"model": "x.onnx", "data": "y.npz", "norm": 1},
    }
    for words, options in bad.items():
        with pytest.raises(InputError, match=words):
            figures.write(tmp_path, ["curve"], **options)
    with pytest.raises(InputError, match="at least one"):
        Case(zoo.load("digits-mlp"), torch.zeros(0, 1, 8, 8), torch.zeros(0), "nothing", 2, 1)
    assert (
        main(["paper", "figures", "kapa"]) == 2
        and "did you mean 'kappa'" in capsys.readouterr().err
    )


def test_pages_of_the_table(tmp_path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    found = table(["digits-mlp@inf=0.05"], None, ["inf"], folder=tmp_path, n=4, attacks=["wda++"])
    line = found.rows[0]
    bad = Line(evil, evil, 2.0, 0.5, problem=f"put the file at {evil}")
    pages = pages_module.write_pages(
        Table((replace(line, model=evil, published={"wda++-1": 48.4}), bad)), tmp_path
    )
    names = ["index.html", "digits-mlp-linf-0.05/report.html", "comparison.html"]
    assert [page.relative_to(tmp_path).as_posix() for page in pages] == names
    text = pages[0].read_text()
    assert (
        "<img src=x" not in text
        and "&lt;img" in text
        and "published 48.40" in text
        and "put the file at" in text
    )
    for link in re.findall(r'href="([^"#]+)"', text):
        assert (tmp_path / link).is_file(), link
    assert f"{100 * line.accuracies['wda++-1']:.2f}" in text
    assert "comparison.html" not in pages_module.index(Table((bad,)))  # there is none without a run
