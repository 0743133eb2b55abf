"""Properties of distributions: closed forms, forged answers, hostile files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.omega.answer import OmegaAnswer, read_answer
from wassail.omega.check import check_answer
from wassail.omega.decide import decide_omega
from wassail.omega.property import read_omega, schema_text
from wassail.transport.curve import RiskCurve

onnx = pytest.importorskip("onnx")

ROW = [1.5, -2.0, 0.5, 1.0]  # of the linear network: class 1 above class 0 by ROW x - 0.4
X = [[0.5, 0.2, 0.3, 0.4], [0.1, 0.6, 0.5, 0.2], [0.9, 0.3, 0.2, 0.1], [0.4, 0.4, 0.4, 0.4]]
Y = [1, 0, 1, 0]


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear network and one with ReLUs."""
    from onnx import TensorProto, helper, numpy_helper

    folder = tmp_path_factory.mktemp("nets")
    rng = np.random.default_rng(0)
    linear = {"w": np.array([[0.0] * 4, ROW]), "b": np.array([0.4, 0.0])}
    deep = {
        "v": rng.normal(size=(8, 4)),
        "c": 0.1 * rng.normal(size=8),
        "w": rng.normal(size=(3, 8)),
        "b": np.zeros(3),
    }
    for name, held in (("linear", linear), ("deep", deep)):
        last = "h" if name == "deep" else "x"
        nodes = [helper.make_node("Gemm", [last, "w", "b"], ["z"], transB=1)]
        if name == "deep":
            first = helper.make_node("Gemm", ["x", "v", "c"], ["a"], transB=1)
            nodes = [first, helper.make_node("Relu", ["a"], ["h"]), *nodes]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
        z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, len(held["b"])])
        tensors = [numpy_helper.from_array(v.astype(np.float32), k) for k, v in held.items()]
        graph = helper.make_graph(nodes, "g", [x], [z], tensors)
        opset = [helper.make_opsetid("", 17)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=8)
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    return folder


def content(net: str = "linear", **threat: Any) -> dict[str, Any]:
    return {
        "format": "omega/1",
        "network": {"onnx": f"{net}.onnx"},
        "samples": {"x": X, "y": Y},
        "threat": {"norm": "inf", "order": 1, "eps": 0.01, "domain": None} | threat,
        "claim": {"measure": "accuracy", "at_least": 0.5},
    }


def decided(nets: Path, given: dict[str, Any], **options: Any) -> tuple[Any, OmegaAnswer]:
    """The property and its answer, which went through a file."""
    (nets / "omega.json").write_text(json.dumps(given))
    property_ = read_omega(nets / "omega.json")
    answer = decide_omega(property_, **options)
    (nets / "answer.json").write_text(json.dumps(answer.as_json(property_)))
    return property_, answer


def truth(norm: float, order: float, eps: float, mu: list[float], **others: Any) -> float:
    """The worst accuracy of the linear network on R^4, in closed form."""
    row = torch.tensor(ROW, dtype=torch.float64)
    dual = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[norm]
    margin = (torch.tensor(X).double() @ row - 0.4) * torch.tensor([1.0, -1, 1, -1])
    distances = (margin / torch.linalg.vector_norm(row, dual)).clamp(min=0)
    return RiskCurve(distances, None, torch.tensor(mu) / sum(mu), order, **others)(eps)[1]


@pytest.mark.few(3)
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("others", [{}, {"label_cost": 0.06, "subpopulation": 0.7}])
def test_a_linear_network_in_closed_form(
    nets: Path, norm: float, order: float, others: dict[str, Any]
) -> None:
    mu = [1.0, 2.0, 1.0, 0.5]
    given = content(norm=str(norm), order=order, eps=0.02, **others)
    given["samples"]["weights"] = mu
    exact = truth(norm, order, 0.02, mu, **others)
    for shift, status in ((-1e-3, "holds"), (1e-3, "fails")):
        given["claim"]["at_least"] = exact + shift
        property_, answer = decided(nets, given)
        assert answer.status == status
        assert answer.bounds[0] <= exact + 1e-6 and answer.bounds[1] >= exact - 1e-6
        again = read_answer(nets / "answer.json", property_)
        assert check_answer(property_, again, again=None).confirmed


def test_at_order_inf_counts_are_exact(nets: Path) -> None:
    given = content(order="inf", eps=0.05)
    exact = truth(math.inf, math.inf, 0.05, [1.0] * 4)
    assert exact in (0.25, 0.5, 0.75)
    given["claim"]["at_least"] = exact
    assert decided(nets, given)[1].status == "holds"
    given["claim"]["at_least"] = math.nextafter(exact, 1)
    assert decided(nets, given)[1].status == "fails"


@pytest.mark.few(1)
@pytest.mark.parametrize("order", [1, "inf"])
def test_the_margin_loss_of_a_linear_network(nets: Path, order: float | str) -> None:
    # On R^n the loss of every sample grows by the same slope.
    given = content(norm="inf", order=order, eps=0.05)
    row = torch.tensor(ROW, dtype=torch.float64)
    margin = (torch.tensor(X).double() @ row - 0.4) * torch.tensor([1.0, -1, 1, -1])
    worst = float(-margin.mean() + 0.05 * row.abs().sum())
    for shift, status in ((1e-4, "holds"), (-1e-4, "fails")):
        given["claim"] = {"measure": "margin", "at_most": worst + shift}
        property_, answer = decided(nets, given)
        assert answer.status == status
        again = read_answer(nets / "answer.json", property_)
        assert check_answer(property_, again).confirmed


@pytest.mark.few(1)
@pytest.mark.slow_cases("others1-claim1")
@pytest.mark.parametrize(
    "claim",
    [{"measure": "accuracy", "at_least": 0.5}, {"measure": "cross_entropy", "at_most": 1.5}],
)
@pytest.mark.parametrize("others", [{}, {"label_cost": 0.3, "subpopulation": 0.75}])
def test_both_verdicts_of_a_network_with_relus(
    nets: Path, claim: dict[str, Any], others: dict[str, Any]
) -> None:
    given = content("deep", order=2, eps=0.03, domain=[0, 1], **others)
    model = read_model(nets)
    given["samples"]["y"] = model(torch.tensor(X)).argmax(1).tolist()
    side = "at_least" if claim["measure"] == "accuracy" else "at_most"
    seen = set()
    for bound in (0.02, 0.3, 0.6, 0.97, 1.5, 4.0):
        if side == "at_least" and bound > 1:
            continue
        given["claim"] = {**claim, side: bound}
        property_, answer = decided(nets, given)
        seen.add(answer.status)
        again = read_answer(nets / "answer.json", property_)
        found = check_answer(property_, again, again=None)
        assert found.confirmed or answer.status == "unknown", found
    assert {"holds", "fails"} <= seen


def read_model(nets: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    return ws.zoo.load_onnx(nets / "deep.onnx")


@pytest.mark.slow
def test_files_fit_their_schemas(nets: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for measure, side in (("accuracy", "at_least"), ("margin", "at_most")):
        for bound in (0.05, 0.95):
            given = content(eps=0.02, label_cost="inf", subpopulation="9/10")
            given["claim"] = {"measure": measure, side: bound - (measure == "margin")}
            decided(nets, given)
            jsonschema.validate(given, json.loads(schema_text()))
            answer = json.loads((nets / "answer.json").read_text())
            jsonschema.validate(answer, json.loads(schema_text("answer")))


def forged(nets: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    answer = json.loads((nets / "answer.json").read_text())
    change(answer)
    (nets / "forged.json").write_text(json.dumps(answer))
    return answer


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["rows"][0].update(share=1.1), "more than all of a sample"),
        (lambda p: p["rows"].append({**p["rows"][0], "share": 0.9}), "more than all of a sample"),
        (lambda p: p["rows"][0].update(point=[9.0] * 4), "outside the box"),
        (lambda p: p["rows"][0].update(point=[1.0] * 4, share=1.0), "than eps"),
        (lambda p: p["rows"][0].update(label=1 - Y[p["rows"][0]["sample"]]), "than eps"),
        (lambda p: p["rows"][0].update(label=7), "a label that there is not"),
        (lambda p: p["rows"][0].update(sample=17), "a sample that there is not"),
        (lambda p: p.update(density=[4.0, 0.0, 0.0, 0.0]), "weighs more than the subpopulation"),
        (lambda p: p.update(rows=[]), "does not refute the claim"),
        (lambda p: [row.update(point=X[row["sample"]]) for row in p["rows"]], "does not refute"),
    ],
)
def test_a_forged_plan_is_found(nets: Path, change: Callable[[Any], Any], words: str) -> None:
    given = content(eps=0.03, domain=[0, 1])
    given["claim"]["at_least"] = 0.7  # 0.75 where nothing moves
    property_, answer = decided(nets, given)
    assert answer.status == "fails"
    forged(nets, lambda a: change(a["plan"]))
    found = check_answer(property_, read_answer(nets / "forged.json", property_))
    assert any(words in problem for problem in found.problems), found
    assert main(["omega", str(nets / "omega.json"), "--check", str(nets / "forged.json")]) == 1


def test_a_point_that_float32_cannot_hold_is_refused(nets: Path) -> None:
    given = content(eps=0.03)
    given["claim"]["at_least"] = 0.9
    property_, _ = decided(nets, given)
    forged(nets, lambda a: a["plan"]["rows"][0].update(point=[1e39] * 4))
    with pytest.raises(InputError, match="float32 cannot"):
        read_answer(nets / "forged.json", property_)


def test_a_forged_certificate_is_found(nets: Path) -> None:
    given = content(eps=0.01, domain=[0, 1])
    exact = truth(math.inf, 1, 0.01, [1.0] * 4)
    given["claim"]["at_least"] = exact - 0.01
    property_, answer = decided(nets, given)
    assert answer.status == "holds"

    def check(change: Callable[[Any], Any]) -> Any:
        forged(nets, lambda a: change(a["certificate"]))
        return check_answer(property_, read_answer(nets / "forged.json", property_), again=None)

    # Larger radii have a flip within them.
    found = check(lambda c: c.update(radii=[1.5 * r for r in c["radii"]]))
    assert any("are false" in problem for problem in found.problems)
    # Smaller ones and another multiplier prove less.
    found = check(lambda c: c.update(radii=[0.5 * r for r in c["radii"]]))
    assert any("does not prove the claim" in problem for problem in found.problems)
    found = check(lambda c: c.update(multiplier=0.0))
    assert any("does not prove the claim" in problem for problem in found.problems)


def test_a_bound_that_does_not_follow_is_false(nets: Path) -> None:
    exact = truth(math.inf, 1, 0.02, [1.0] * 4)
    for shift, side in ((-1e-3, 0), (1e-3, 1)):  # holds, fails
        given = content(eps=0.02)
        given["claim"]["at_least"] = exact + shift
        property_, answer = decided(nets, given)
        assert answer.status == ("holds", "fails")[side]
        stated = json.loads((nets / "answer.json").read_text())
        tight = stated["bounds"][side] + (0.01 if side == 0 else -0.01)
        stated["bounds"] = [tight, 1.0] if side == 0 else [0.0, tight]
        (nets / "forged.json").write_text(json.dumps(stated))
        found = check_answer(property_, read_answer(nets / "forged.json", property_))
        assert any("the answer says" in problem for problem in found.problems)
        stated["bounds"] = [1, 0]
        (nets / "forged.json").write_text(json.dumps(stated))
        with pytest.raises(InputError, match="the least first"):
            read_answer(nets / "forged.json", property_)


def test_forged_peaks_are_not_confirmed(nets: Path) -> None:
    given = content(eps=0.01, domain=[0, 1])
    given["claim"] = {"measure": "margin", "at_most": 0.2}
    property_, answer = decided(nets, given)
    assert answer.status == "holds"
    forged(nets, lambda a: a["certificate"].update(peaks=[-9.0] * 4))
    found = check_answer(property_, read_answer(nets / "forged.json", property_))
    assert not found.confirmed and "4 of 4 peaks" in found.open[0]


def test_an_answer_to_another_question_is_refused(nets: Path) -> None:
    decided(nets, content())
    (nets / "omega.json").write_text(json.dumps(content(eps=0.011)))
    with pytest.raises(InputError, match="about another property"):
        read_answer(nets / "answer.json", read_omega(nets / "omega.json"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format="omega/2"), "this version reads 'omega/1'"),
        (lambda c: c.pop("claim"), "has no 'claim'"),
        (lambda c: c.update(more=1), "unknown key"),
        (lambda c: c["network"].update(onnx="../deep.onnx"), "in the folder of the property"),
        (lambda c: c["network"].update(onnx="/etc/passwd"), "in the folder of the property"),
        (lambda c: c["network"].update(onnx="C:\\net.onnx"), "in the folder of the property"),
        (lambda c: c["network"].update(onnx="none.onnx"), "cannot read"),
        (lambda c: c["network"].update(sha256="0" * 64), "another SHA-256"),
        (lambda c: c["samples"].update(x=[[1, 2], [3]]), "different lengths"),
        (lambda c: c["samples"].update(x=[[1, 2, 3]] * 4), "takes 4 numbers"),
        (lambda c: c["samples"].update(x=[[1e39] * 4] * 4), "float32"),
        (lambda c: c["samples"].update(x=[[10**400] * 4] * 4), "float64"),
        (lambda c: c["samples"].update(x=[["1"] * 4] * 4), "give numbers"),
        (lambda c: c["samples"].update(x=[]), "1 to 1000000 samples"),
        (lambda c: c["samples"].update(y=[0, 1]), "give one each"),
        (lambda c: c["samples"].update(y=[0, 1, 2, 3]), "2 classes"),
        (lambda c: c["samples"].update(y=[True] * 4), "whole numbers"),
        (lambda c: c["samples"].update(weights=[0, 0, 0, 0]), "not all zero"),
        (lambda c: c["samples"].update(weights=[1, -1, 1, 1]), "0 or more"),
        (lambda c: c["threat"].update(eps=0), "positive and finite"),
        (lambda c: c["threat"].update(eps="1/0"), "not a number"),
        (lambda c: c["threat"].update(order=0.5), "below 1"),
        (lambda c: c["threat"].update(norm=3), "not supported"),
        (lambda c: c["threat"].update(domain=[1, 0]), "empty"),
        (lambda c: c["threat"].update(domain=[[0, 0], [1, 1]]), "one an input"),
        (lambda c: c["threat"].update(subpopulation=0), "above 0 and at most 1"),
        (lambda c: c["threat"].update(label_cost=-1), "above 0"),
        (lambda c: c["claim"].update(measure="auc"), "unknown measure"),
        (lambda c: c["claim"].update(at_least=1.5), "from 0 to 1"),
        (lambda c: c["claim"].update(at_most=0.5), "nothing else"),
    ],
)
def test_a_bad_property_is_one_sentence(
    nets: Path, change: Callable[[Any], Any], words: str
) -> None:
    given = content()
    change(given)
    (nets / "bad.json").write_text(json.dumps(given))
    with pytest.raises(InputError) as found:
        read_omega(nets / "bad.json")
    assert words in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "no JSON"),
        ('{"format": NaN}', "no number of JSON"),
        ('{"format": "a", "format": "b"}', "stands twice"),
        ("[]", "give an object"),
        ("", "no JSON"),
        ("9" * 5000, "no JSON"),
    ],
)
def test_a_file_that_is_no_property(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "omega.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_omega(tmp_path / "omega.json")


def test_samples_beside_the_property(nets: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.tensor(X), "y": torch.tensor(Y)}, nets / "s.safetensors")
    given = content()
    inside = decided(nets, given)[1]
    given["samples"] = {"file": "s.safetensors"}
    beside = decided(nets, given)[1]
    assert beside.bounds == inside.bounds and beside.status == inside.status
    save_file({"x": torch.tensor(X).double(), "y": torch.tensor(Y)}, nets / "s.safetensors")
    with pytest.raises(InputError, match="float32"):
        decided(nets, given)


def test_boxes_of_inputs_are_kept(nets: Path) -> None:
    # The first input may not move, and the others only a little.
    given = content(order="inf", eps=1.0)
    low = [[0.0, 0.2, 0.2, 0.1], [1.0, 0.6, 0.5, 0.5]]
    given["threat"]["domain"] = low
    given["claim"]["at_least"] = 0.9
    property_, answer = decided(nets, given)
    assert answer.status == "fails" and answer.plan is not None
    inside = (answer.plan.points.double() >= torch.tensor(low[0]) - 1e-9).all()
    assert inside and check_answer(property_, answer).confirmed


def test_the_same_answer_twice(nets: Path) -> None:
    given = content("deep", eps=0.02, domain=[0, 1])
    pairs = [decided(nets, given) for _ in range(2)]
    first, second = (answer.as_json(property_) for property_, answer in pairs)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_the_command(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact = truth(math.inf, 1, 0.01, [1.0] * 4)
    for shift, word, code in ((-0.01, "holds", 0), (0.01, "fails", 1)):
        given = content()
        given["claim"]["at_least"] = exact + shift
        (nets / "omega.json").write_text(json.dumps(given))
        out = str(nets / "out.json")
        assert main(["omega", str(nets / "omega.json"), "-o", out, "--threads", "1"]) == code
        assert capsys.readouterr().out == f"{word}\n"
        assert main(["omega", str(nets / "omega.json"), "--check", out, "--again", "all"]) == 0
        assert capsys.readouterr().out == "confirmed\n"
    assert main(["omega", str(nets / "omega.json"), "--check", out, "--timeout", "3"]) == 2
    given["claim"]["at_least"] = exact
    (nets / "omega.json").write_text(json.dumps(given))
    assert main(["omega", str(nets / "omega.json"), "--timeout", "1"]) == 3
    assert "accuracy is between" in capsys.readouterr().err
