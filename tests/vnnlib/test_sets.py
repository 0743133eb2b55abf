"""Whole sets and the command line: verdicts, exit codes, going on."""

from __future__ import annotations

from pathlib import Path

import pytest

from wassail import errors
from wassail.cli.parser import main
from wassail.vnnlib.sets import Instance, read_instances, read_results, run_instances, summary

onnx = pytest.importorskip("onnx")

TEXT = """(declare-const X_0 Real)(declare-const X_1 Real)
(declare-const Y_0 Real)(declare-const Y_1 Real)
(assert (>= X_0 0))(assert (<= X_0 1))(assert (>= X_1 0))(assert (<= X_1 1))
(assert (<= Y_0 {}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`y = (x0 - 2 x1, x1)` with two properties, one that it has, and a list of both."""
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
    onnx.save(model, tmp_path / "net.onnx")
    (tmp_path / "safe.vnnlib").write_text(TEXT.format(-2.01))
    (tmp_path / "unsafe.vnnlib").write_text(TEXT.format(-1.5))
    lines = ["net.onnx,safe.vnnlib,60", "net.onnx,unsafe.vnnlib,60", "net.onnx,none.vnnlib,60"]
    (tmp_path / "instances.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_one_property(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = str(folder / "net.onnx")
    assert main(["vnnlib", net, str(folder / "safe.vnnlib")]) == errors.HOLDS
    assert capsys.readouterr().out == "unsat\n"
    target = folder / "answer.txt"
    words = ["vnnlib", net, str(folder / "unsafe.vnnlib"), "-o", str(target)]
    assert main(words) == errors.FAILS
    said = capsys.readouterr()
    first, *rest = said.out.splitlines()
    assert first == "sat" and "checked in float64, float32" in said.err
    values = {name: float(v) for name, v in (line.strip("()").split() for line in rest)}
    assert list(values) == ["X_0", "X_1", "Y_0", "Y_1"]
    assert 0 <= values["X_0"] <= 1 and 0 <= values["X_1"] <= 1
    assert values["X_0"] - 2 * values["X_1"] == pytest.approx(values["Y_0"], abs=1e-6)
    assert values["Y_0"] <= -1.5
    assert target.read_text() == said.out


def test_what_is_unknown_has_a_code_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["vnnlib", str(folder / "net.onnx"), str(folder / "safe.vnnlib"), "--timeout", "1e-9"]
    assert main(words) == errors.UNKNOWN == 3
    said = capsys.readouterr()
    assert said.out == "unknown\n" and "the time was up" in said.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give a network and a property, or --csv"),
        (["a.onnx"], "give a network and a property, or --csv"),
        (["--csv", "i.csv"], "add --out DIR"),
        (["a.onnx", "b.vnnlib", "--csv", "i.csv"], "--csv names the files"),
        (["a.onnx", "b.vnnlib"], "b.vnnlib"),
        (["a.onnx", "b.vnnlib", "--timeout", "0"], "time limit"),
    ],
)
def test_bad_words(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vnnlib", *words]) == errors.BAD_INPUT
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1


def test_a_set_goes_on_where_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out"
    words = ["vnnlib", "--csv", str(folder / "instances.csv"), "--out", str(out)]
    assert main([*words, "--only", "unsafe"]) == errors.HOLDS
    assert [result.status for result in read_results(out)] == ["sat"]
    capsys.readouterr()
    assert main(words) == errors.BAD_INPUT  # one file is not there, and the others are answered
    said, told = capsys.readouterr()
    assert "unsafe.vnnlib:" not in said  # done already
    assert "2 of 2 decided: 1 unsat, 1 sat" in said
    assert "1 of 3 instances have files that are not there" in told and "none.vnnlib" in told
    results = {result.question: result for result in read_results(out)}
    assert results["safe.vnnlib"].status == "unsat"
    assert (out / "net_unsafe.counterexample").read_text().startswith("((X_0")
    assert (out / "solved.png").stat().st_size > 1000
    assert summary(list(results.values())).startswith("2 of 2 decided")
    (folder / "none.vnnlib").write_text(TEXT.format(-2.01))
    assert main(words) == errors.HOLDS
    assert "3 of 3 decided: 2 unsat, 1 sat" in capsys.readouterr().out


def test_a_set_without_its_files_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "net.onnx").unlink()
    out = folder / "out"
    assert main(["vnnlib", "--csv", str(folder / "instances.csv"), "--out", str(out)]) == 2
    assert "is there, the first is 'net.onnx'" in capsys.readouterr().err
    assert not read_results(out)


def test_some_of_a_set(folder: Path) -> None:
    out = folder / "few"
    out.mkdir()
    chosen = read_instances(folder / "instances.csv")[:2]
    found = [r.question for r in run_instances(chosen, folder, out)]
    assert found == ["safe.vnnlib", "unsafe.vnnlib"]


def test_files_that_are_no_lists(folder: Path) -> None:
    with pytest.raises(errors.InputError, match=r"line 1 of .* is no instance"):
        read_instances(folder / "safe.vnnlib")
    (folder / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(errors.InputError, match="holds no results"):
        read_results(folder)
    name = Instance("onnx/a.onnx", "vnnlib/b.vnnlib.gz", 1.0).name
    assert name == "a_b"
