"""Verdicts: closed forms, a brute-force net, counterexamples that hold, proofs that cannot be
wrong.
"""

from __future__ import annotations

import gzip
import tempfile
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.errors import InputError
from wassail.vnnlib import decide as decide_module
from wassail.vnnlib.clauses import Clause, Part
from wassail.vnnlib.decide import decide
from wassail.vnnlib.network import Network
from wassail.zoo import runtime
from wassail.zoo.runtime import Runtime


def clause(rows: list[list[float]], offsets: list[float]) -> Clause:
    matrix = torch.tensor(rows, dtype=torch.float64)
    strict = torch.zeros(len(rows), dtype=torch.bool)
    return Clause(matrix, torch.tensor(offsets, dtype=torch.float64), strict)


def box(low: list[float], high: list[float], *clauses: Clause) -> ws.Property:
    part = Part(torch.tensor(low).double(), torch.tensor(high).double(), clauses)
    return ws.Property(len(low), clauses[0].rows.shape[1], (part,))


def dense(seed: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


@pytest.mark.parametrize("gap", [1e-3, -1e-3])
def test_a_linear_network_in_closed_form(gap: float) -> None:
    model = nn.Linear(3, 2)
    low, high = [-1.0, 0.0, 0.5], [1.0, 0.25, 0.5]
    row = torch.tensor([1.0, -2.0])
    w, b = row @ model.weight, row @ model.bias
    least = float((torch.minimum(w * torch.tensor(low), w * torch.tensor(high)).sum() + b).detach())
    answer = box(low, high, clause([row.tolist()], [least - gap])).decide(model, effort=1)
    assert answer.status == ("unsat" if gap > 0 else "sat")
    if gap < 0:
        assert answer.point is not None and answer.checked == ("float64", "float32")
        assert float(model(answer.point.float()).detach() @ row) <= least - gap


@pytest.mark.parametrize("neurons", [False, True])
def test_inequalities_that_exclude_each_other(
    neurons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # x0 <= -0.1 and -x0 <= -0.1: neither is excluded on the box, both together are. Where neurons
    # are split the maximum of both is made of ReLUs.
    inputs = 2
    if neurons:
        monkeypatch.setattr(decide_module, "FEW", 0)
        monkeypatch.setattr(decide_module, "FIRST", 0.0)
    model = nn.Linear(inputs, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[:, 0] = torch.tensor([1.0, -1.0])
    both = clause([[1.0, 0.0], [0.0, 1.0]], [-0.1, -0.1])
    property_ = box([-1.0] * inputs, [1.0] * inputs, both)
    answer = property_.decide(model, effort=1)
    assert answer.status == "unsat"
    assert answer.by == ("neuron split" if neurons else "crown")
    apart = clause([[1.0, 0.0], [0.0, 1.0]], [0.1, -0.05])
    answer = box([-1.0] * inputs, [1.0] * inputs, apart).decide(model, effort=1)
    assert answer.status == "sat" and answer.point is not None
    assert 0.05 <= float(answer.point[0]) <= 0.1


@pytest.mark.few(4)
@pytest.mark.parametrize("neurons", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_small_network_against_a_grid(
    seed: int, neurons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if neurons:
        monkeypatch.setattr(decide_module, "FEW", 0)
        monkeypatch.setattr(decide_module, "FIRST", 0.0)
    model = dense(seed, 2, 12, 12, 3)
    side = torch.linspace(-1, 1, 201)
    points = torch.cartesian_prod(side, side)
    z = model(points).detach().double()
    joint = torch.maximum(z[:, 0] - z[:, 1], z[:, 2])  # unsafe: both at most a constant
    single = z[:, 1] - z[:, 2]
    for shift, expected in ((-0.05, "unsat"), (0.05, "sat")):
        level = float(joint.min()) + shift
        other = float(single.min()) - 1.0  # never
        clauses = (
            clause([[1, -1, 0], [0, 0, 1]], [level, level]),
            clause([[0, 1, -1]], [other]),
        )
        answer = box([-1.0, -1.0], [1.0, 1.0], *clauses).decide(model, effort=5)
        assert answer.status == expected, answer


def test_several_boxes_and_held_inputs() -> None:
    model = dense(5, 4, 10, 2)
    z = model(torch.tensor([[0.5, 0.0, 1.0, -1.0], [0.5, 2.0, 1.0, -1.0]])).detach().double()
    first, second = (z[:, 0] - z[:, 1]).tolist()
    unsafe_ = clause([[1.0, -1.0]], [min(first, second) + 1e-3])
    parts = tuple(
        Part(
            torch.tensor([0.5, v, 1.0, -1.0]).double(),
            torch.tensor([0.5, v, 1.0, -1.0]).double(),
            (unsafe_,),
        )
        for v in (0.0, 2.0)
    )
    answer = ws.Property(4, 2, parts).decide(model, effort=1)
    assert answer.status == "sat" and answer.point is not None
    assert float(answer.point[1]) == (0.0 if first < second else 2.0)
    harder = tuple(
        Part(p.low, p.high, (clause([[1.0, -1.0]], [min(first, second) - 1e-3]),)) for p in parts
    )
    assert ws.Property(4, 2, harder).decide(model, effort=1).status == "unsat"


def test_no_box_and_no_inequality() -> None:
    model = dense(1, 2, 4, 2)
    assert ws.Property(2, 2, ()).decide(model).status == "unsat"
    nothing = clause([], []).rows.reshape(0, 2)
    free = Clause(nothing, torch.zeros(0).double(), torch.zeros(0, dtype=torch.bool))
    assert box([0.0, 0.0], [1.0, 1.0], free).decide(model).status == "sat"


def test_a_file_beside_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    path = linear_file(tmp_path)
    answer = box([0.0, 0.0], [1.0, 1.0], clause([[1.0, 0.0]], [-0.5])).decide(path, effort=1)
    assert answer.status == "sat" and answer.checked == ("float64", "float32", "onnxruntime")
    text = answer.counterexample(box([0.0], [1.0], clause([[1.0]], [0.0])))
    assert text.startswith("((X_0 ") and "(Y_1 " in text and text.endswith("))")
    # A runtime that sees something else: the point is no counterexample.
    monkeypatch.setattr(Runtime, "outputs", lambda self, points: [[9.0, 9.0]] * len(points))
    answer = box([0.0, 0.0], [1.0, 1.0], clause([[1.0, 0.0]], [-0.5])).decide(path, effort=0.01)
    assert answer.status == "unknown" and "one arithmetic only" in answer.reason


def test_one_network_for_several_properties(tmp_path: Path) -> None:
    """A network that stays open answers as one that is read anew."""
    path = linear_file(tmp_path)
    wanted = [
        box([0.0, 0.0], [1.0, 1.0], clause([[1.0, 0.0]], [-0.5])),
        box([0.0, 0.0], [1.0, 0.2], clause([[1.0, 0.0]], [-0.5])),
        box([0.0, 0.3], [1.0, 0.3], clause([[1.0, 0.0]], [-0.5])),
        box([0.0, 0.3], [1.0, 0.3], clause([[1.0, 0.0]], [-0.65])),
        box([0.0, 0.1], [1.0, 0.1], clause([[1.0, 0.0]], [-0.5])),
    ]
    with closing(Network(path)) as network:
        together = [decide(one, network, effort=1) for one in wanted]
    assert [answer.status for answer in together] == ["sat", "unsat", "sat", "unsat", "unsat"]
    for one, answer in zip(wanted, together):
        alone = one.decide(path, effort=1)
        assert (alone.status, alone.by, alone.checked) == (
            answer.status,
            answer.by,
            answer.checked,
        )
        if alone.point is None:
            assert answer.point is None
        else:
            assert answer.point is not None and torch.equal(alone.point, answer.point)


def test_a_runtime_that_crashes_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    with closing(Runtime(linear_file(tmp_path))) as good:
        assert good.outputs([[1.0, 0.5], [0.0, 1.0]]) == [[0.0, 0.5], [-2.0, 1.0]]
        assert good.outputs([[1.0, 0.0]]) == [[1.0, 0.0]]  # the same process
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no network")
    assert Runtime(broken).outputs([[1.0]]) is None
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(runtime, "__file__", str(slow))
    monkeypatch.setattr(runtime, "SECONDS", 0.2)
    hanging = Runtime(tmp_path / "linear.onnx")
    assert hanging.outputs([[1.0, 0.5]]) is None
    assert hanging.outputs([[1.0, 0.5]]) is None and not hanging.usable  # not asked again


def test_a_compressed_network_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "linear.onnx.gz"
    packed.write_bytes(gzip.compress(linear_file(tmp_path).read_bytes()))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    property_ = box([0.0, 0.0], [1.0, 1.0], clause([[1.0, 0.0]], [-0.5]))
    assert property_.decide(packed, effort=1).status == "sat"
    assert not list(scratch.iterdir())
    with pytest.raises(InputError, match=r"none\.onnx"):
        property_.decide(tmp_path / "none.onnx")


def linear_file(folder: Path) -> Path:
    """`y = (x0 - 2 x1, x1)` as an ONNX file."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = helper.make_tensor("w", kind, [2, 2], [1.0, 0.0, -2.0, 1.0])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"])],
        "g",
        [helper.make_tensor_value_info("x", kind, [1, 2])],
        [helper.make_tensor_value_info("z", kind, [1, 2])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    path = folder / "linear.onnx"
    onnx.save(model, path)
    return path


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    path = linear_file(tmp_path)
    with pytest.raises(InputError, match="takes 2 numbers, the property has 3"):
        box([0.0] * 3, [1.0] * 3, clause([[1.0, 0.0]], [0.0])).decide(path)
    with pytest.raises(InputError, match="gives outputs of shape"):
        box([0.0] * 2, [1.0] * 2, clause([[1.0, 0.0, 0.0]], [0.0])).decide(path)
    with pytest.raises(InputError, match="no torch module"):
        box([0.0] * 2, [1.0] * 2, clause([[1.0]], [0.0])).decide(3)  # type: ignore[arg-type]


def test_effort_ends_it_and_answers_repeat() -> None:
    model = dense(7, 6, 64, 64, 2)
    low, high = [-1.0] * 6, [1.0] * 6
    z = model(torch.rand(20000, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1).detach()
    least = float((z[:, 0] - z[:, 1]).min())
    property_ = box(low, high, clause([[1.0, -1.0]], [least - 0.1]))
    answers = [property_.decide(model, effort=0.05) for _ in range(2)]
    assert {a.status for a in answers} == {"unknown"}
    assert all("effort" in a.reason for a in answers)
    assert answers[0].info["boxes"] == answers[1].info["boxes"] > 1
    assert property_.decide(model, time_limit=1e-3).status == "unknown"


@pytest.mark.parametrize("seed", range(3))
def test_a_counterexample_on_a_side_is_found_where_the_gradient_is_zero_elsewhere(
    seed: int,
) -> None:
    # relu(x0 + x1 + x2 + x3 - 3.8 - |x4 - 0.5|) > 0.05: no corner, and 1e-6 of the box.
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1), nn.ReLU()).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
        model[0].weight[:4, :4] = torch.eye(4)
        model[0].weight[4:, 4] = torch.tensor([1.0, -1.0])
        model[0].bias[4:] = torch.tensor([-0.5, 0.5])
        model[2].weight[0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
        model[2].bias[0] = -3.8
    property_ = box([0.0] * 5, [1.0] * 5, clause([[-1.0]], [-0.05]))
    answer = property_.decide(model, effort=10, seed=seed)
    assert answer.status == "sat" and answer.by == "attack"


def test_a_network_that_bounds_do_not_know_is_still_attacked() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[:, 0] - x[:, 1].floor(), x[:, 1]], 1)

    sat = box([0.0, 0.0], [1.0, 0.9], clause([[1.0, 0.0]], [0.5]))
    assert sat.decide(Odd(), effort=0.1).status == "sat"
    answer = box([0.0, 0.0], [1.0, 0.9], clause([[1.0, 0.0]], [-0.5])).decide(Odd(), effort=0.1)
    assert answer.status == "unknown" and "floor" in answer.reason


def formula(seed: int, clauses: int) -> tuple[nn.Sequential, bool]:
    """A formula in six of 22 variables as a network of one layer, and whether it can be satisfied.

    The first output is minus what clauses lack, the second how far inputs are from 0 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(clauses)])
    signs = torch.randint(0, 2, (clauses, 3), generator=generator) * 2.0 - 1
    w, b = torch.zeros(clauses + 44, 22), torch.zeros(clauses + 44)
    for k in range(clauses):
        w[k, places[k]] = -signs[k]
        b[k] = 1.0 - float((signs[k] < 0).sum())
    w[clauses:-22], w[-22:], b[-22:] = torch.eye(22), 2 * torch.eye(22), -1.0
    v = torch.zeros(2, clauses + 44)
    v[0, :clauses], v[1, clauses:-22], v[1, -22:] = -1.0, 1.0, -1.0
    model = nn.Sequential(nn.Linear(22, clauses + 44), nn.ReLU(), nn.Linear(clauses + 44, 2))
    with torch.no_grad():
        for own, given in ((model[0].weight, w), (model[0].bias, b), (model[2].weight, v)):
            own.copy_(given)
        model[2].bias.zero_()
    every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 6)
    held = (every[:, places] == (signs + 1) / 2).any(2).all(1)
    return model.eval(), bool(held.any())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clauses", [20, 70])
def test_a_formula_as_one_layer_of_relus(seed: int, clauses: int) -> None:
    model, satisfied = formula(seed, clauses)
    assert satisfied == (clauses == 20)
    both = clause([[-1.0, 0.0], [0.0, 1.0]], [0.0, 0.0])  # nothing lacks, and all are 0 or 1
    answer = box([0.0] * 22, [1.0] * 22, both).decide(model, effort=5)
    assert answer.status == ("sat" if satisfied else "unsat")
    if not satisfied:
        assert answer.by == "neuron split" and answer.info["domains"] > 1
