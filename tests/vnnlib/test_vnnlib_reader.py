"""VNN-LIB files: what they mean, and what is refused with its line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

import wassail as ws
from wassail.errors import InputError
from wassail.vnnlib import syntax

DECLARED = """; two inputs, three outputs
(declare-const X_0 Real)
(declare-const X_1 Real)
(declare-const Y_0 Real)
(declare-const Y_1 Real)
(declare-const Y_2 Real)
"""
BOX = """(assert (>= X_0 -0.5))
(assert (<= X_0 1e-1))
(assert (>= X_1 0))
(assert (<= X_1 2.5))
"""
TENSORS = """(vnnlib-version <2.0>)
(declare-network f
    (declare-input X Real [1,2])
    (declare-output Y Real [3])
)
(assert (and (<= (* -2.0 X[0,0]) 1) (<= X[0,0] (- 0.3 0.2))))
(assert (and (>= X[0,1] 0.0) (<= (- X[0,1] 1 0.5) 1.0)))
"""


def read(tmp_path: Path, text: str) -> ws.Property:
    path = tmp_path / "p.vnnlib"
    path.write_text(text)
    return ws.Property.read(path)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", [DECLARED + BOX, TENSORS])
def test_a_box_and_or_of_and(tmp_path: Path, text: str) -> None:
    name = (lambda i: f"Y[{i}]") if text is TENSORS else (lambda i: f"Y_{i}")
    rows = f"""(assert (or
        (and (<= {name(0)} {name(1)}) (>= {name(2)} 0.25))
        (and (< (+ {name(0)} (* 2 {name(2)}) -1) 3))
    ))"""
    found = read(tmp_path, text + rows)
    assert (found.inputs, found.outputs, len(found.parts)) == (2, 3, 1)
    part = found.parts[0]
    assert part.low.tolist() == [-0.5, 0.0] and part.high.tolist() == [0.1, 2.5]
    first, second = part.clauses
    assert first.rows.tolist() == [[1, -1, 0], [0, 0, -1]]
    assert first.offsets.tolist() == [0, -0.25] and not first.strict.any()
    assert second.rows.tolist() == [[1, 0, 2]] and second.offsets.tolist() == [4]
    assert second.strict.tolist() == [True]
    assert str(found) == "1 box of 2 inputs, 3 outputs, 2 clauses"


def test_boxes_and_clauses_are_multiplied_out(tmp_path: Path) -> None:
    text = DECLARED + BOX + "(assert (or (<= X_0 -0.25) (and (>= X_0 0) (<= X_1 1)) (>= X_0 7)))"
    found = read(tmp_path, text + "(assert (or (<= Y_0 0) (<= Y_1 0)))(assert (= Y_2 1))")
    # The third box is empty.
    boxes = [(part.low.tolist(), part.high.tolist()) for part in found.parts]
    assert boxes == [([-0.5, 0], [-0.25, 2.5]), ([0, 0], [0.1, 1])]
    for part in found.parts:
        assert [clause.rows.tolist() for clause in part.clauses] == [
            [[0, 0, 1], [0, 0, -1], [1, 0, 0]],
            [[0, 0, 1], [0, 0, -1], [0, 1, 0]],
        ]
    assert len(found.groups) == 1


def test_numbers_are_exact_before_they_are_rounded(tmp_path: Path) -> None:
    found = read(tmp_path, DECLARED + BOX + "(assert (<= (* 0.1 0.1 Y_0) (- 0.3 0.1 0.2)))")
    assert found.parts[0].clauses[0].rows[0, 0] == 0.01  # 0.1 * 0.1 is another float
    assert found.parts[0].clauses[0].offsets[0] == 0.0


def test_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "p.vnnlib.gz"
    path.write_bytes(gzip.compress((DECLARED + BOX + "(assert (<= Y_0 0))").encode()))
    assert len(ws.Property.read(path).parts) == 1


def test_points_are_judged(tmp_path: Path) -> None:
    found = read(tmp_path, DECLARED + BOX + "(assert (<= Y_0 0))(assert (< Y_1 0))")
    points = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.2, 1.0], [0.1, 2.5]]).double()
    points[3, 0] = 0.1
    outputs = torch.tensor([[0.0, -1, 0], [0.0, 0, 0], [0.0, -1, 0], [-1.0, -1, 0]])
    assert found.violated(points, outputs).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(assert (<= X_0 Y_0))", "line 11: an inequality mixes inputs and outputs"),
        ("(assert (<= X_0 X_1))", "line 11: inputs are not in a box"),
        ("(assert (< X_0 0))", "line 11: a box is closed"),
        ("(assert (!= Y_0 0))", "line 11: != is no linear inequality"),
        ("(assert (<= (* Y_0 Y_1) 0))", "a product of two variables is not linear"),
        ("(assert (<= Y_3 0))", "line 11: 'Y_3' is not declared"),
        ("(assert (<= Z 0))", "line 11: 'Z' is not declared"),
        ("(assert (<= Y_0 1e99999))", "line 11: '1e99999' is no number"),
        ("(assert (<= Y_0 1e399))", "line 11: a number is too large"),
        ("(assert (not (<= Y_0 0)))", "line 11: 'not' is not expected here"),
        ("(assert (<= Y_0 0)", "the file ends in the middle of something"),
        ("(declare-const Z_0 Real)", "line 11: 'Z_0' is neither X_i nor Y_i"),
        ("(declare-const Y_9 Real)", "Y_3 is not declared"),
    ],
)
def test_what_is_refused_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(tmp_path, DECLARED + BOX + text)


def test_what_a_network_may_not_declare(tmp_path: Path) -> None:
    assert "line 4: only one network" in refused(
        tmp_path,
        TENSORS.replace("    (declare-output", "(declare-input Z Real [2])(declare-output"),
    )
    assert "line 4: declare-hidden is not supported" in refused(
        tmp_path,
        TENSORS.replace("(declare-output", '(declare-hidden H Real [2] "h")(declare-output'),
    )
    assert "shape [1, 2]" in refused(tmp_path, TENSORS + "(assert (<= X[0,2] 0))")
    assert "<3.0>" in refused(tmp_path, TENSORS.replace("2.0>", "3.0>"))
    assert "no lower bound" in refused(tmp_path, TENSORS.replace("(>= X[0,1] 0.0)", "(<= 0 1)"))


def test_hostile_files_are_refused_at_once(tmp_path: Path) -> None:
    deep = "(and " * 70 + "(<= Y_0 0)" + ")" * 70
    assert "64 deep" in refused(tmp_path, DECLARED + BOX + f"(assert {deep})")
    wide = "(assert (or (<= Y_0 0) (<= Y_1 0)))" * 60  # 2^60 cases
    assert "split the property" in refused(tmp_path, DECLARED + BOX + wide)
    long = "(* " + "1e300 " * 500 + "Y_0)"
    assert "too many digits" in refused(tmp_path, DECLARED + BOX + f"(assert (<= {long} 0))")
    huge = TENSORS.replace("[1,2]", "[99999,99999]")
    assert "cannot be right" in refused(tmp_path, huge)
    bomb = tmp_path / "bomb.vnnlib.gz"
    bomb.write_bytes(gzip.compress(b" " * ((1 << 26) + 1)))
    with pytest.raises(InputError, match="bytes unpacked"):
        ws.Property.read(bomb)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"(assert" * 99)[:-30])
    with pytest.raises(InputError, match="cannot be read"):
        ws.Property.read(broken)


def test_without_the_parser_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lark", None)
    syntax._parser.cache_clear()
    try:
        assert "wassail[vnnlib]" in refused(tmp_path, DECLARED)
    finally:
        syntax._parser.cache_clear()
