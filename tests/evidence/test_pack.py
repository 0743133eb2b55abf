"""Packs: what is in them follows from the run, and repeats to the byte."""

import html
import json
import math
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch

import wassail as ws
from support.forged import boxed, network, samples
from support.forged_packs import HOSTILE, WORDS, good_pack
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.evaluation.reproving import DRAWN, few, most_false
from wassail.evaluation.sealing import SEAL
from wassail.evidence import pack
from wassail.evidence.clauses import NOT_COVERED, PARTS, clauses, mapped
from wassail.evidence.document import document, schema_text
from wassail.evidence.page import page
from wassail.evidence.statement import Statement, read_statement
from wassail.evidence.verify import (
    LATER,
    OTHER_LATER,
    SAME_LATER,
    check_files,
    load,
    verify_pack,
)
from wassail.zoo.models import open_model

SMALL = "-n 6 --eps 0.05 --order 1 inf --attacks fgsm --certify crown --no-look --quiet"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return good_pack(tmp_path_factory.mktemp("made") / "pack")


@pytest.mark.slow
def test_a_good_pack_holds(made: Path) -> None:
    found, known = verify_pack(made, network(), samples(), 1.0, seed=0)
    assert found and known and known.signer is None, found
    told = str(found)
    assert "were computed anew" in told and "all 11 radii" in told
    assert "not checked: what the author states" in told and LATER in found.unchecked


def test_later_samples_are_those_that_the_reader_has(made: Path) -> None:
    """Swapped samples are sealed like true ones: the reader's own tell."""
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(7))
    y = torch.arange(30) % 3
    run = load(made)
    found, _ = verify_pack(made, network(), radii=0, seed=0, run=run, later=(x, y))
    assert found and SAME_LATER in found.checked and LATER not in found.unchecked
    found, _ = verify_pack(made, network(), radii=0, seed=0, run=run, later=(x, (y + 1) % 3))
    assert found.problems == (OTHER_LATER,)


def test_few_radii_are_proved_again() -> None:
    """A tenth, and of many 45: if these are true, at most 6.5 % are false."""
    for n, count in ((0, 0), (40, 4), (171, 18), (450, 45), (913, 45), (10**6, 45)):
        run = SimpleNamespace(radii=torch.ones(n))
        assert math.ceil(few(run) * n - 1e-9) == count  # type: ignore[arg-type]
    assert most_false(10**4, DRAWN) <= 650


def test_the_record_fits_its_schema(made: Path) -> None:
    record = json.loads((made / pack.RECORD).read_text())
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(record)
    kinds = {figure["kind"] for figure in record["figures"]}
    assert {"clean", "certified", "attacked", "population", "subpopulation"} <= kinds
    assert {"class", "landmark", "requirement"} <= kinds
    commands = set(record["commands"])
    assert all(figure["command"] in commands for figure in record["figures"])
    why = {line["kind"] for line in record["question"]["why"]}
    assert why == {"known shifts", "measured shift", "stated by the author"}


def test_figures_are_those_of_the_run(made: Path) -> None:
    run = ws.Evaluation.load(made / "run")
    record = json.loads((made / pack.RECORD).read_text())
    figures = {figure["id"]: figure for figure in record["figures"]}
    certified, attacked = run.curve(1)(0.05)
    assert figures["certified@1@0.05"]["least"] == certified
    assert figures["attacked@1@0.05"]["most"] == attacked
    low, high = run.curve(1).population(0.95)(0.05)
    assert (figures["population@1@0.05"]["least"], figures["population@1@0.05"]["most"]) == (
        low,
        high,
    )
    mine = run.y == 0
    alone = ws.RiskCurve(
        run.distances[mine],
        run.radii[mine],
        torch.full((int(mine.sum()),), 1 / int(mine.sum())).double(),
        1.0,
    )
    assert figures["class@0"]["least"] == pytest.approx(alone(0.05)[0], abs=1e-12)


def test_the_page_escapes_all_that_it_is_given(made: Path) -> None:
    run = ws.Evaluation.load(made / "run")
    hostile = "<script>alert(1)</script>{{ 7 * 7 }}\u202e"
    words = Statement(hostile, hostile, hostile, hostile, (hostile,))
    text = page(document(run, words), run)
    assert "<script" not in text and "&lt;script&gt;" in text and "\u202e" not in text
    assert "{{ 7 * 7 }}" in text  # a template does not read what it prints


def test_the_clause_map_names_kinds_that_exist(made: Path) -> None:
    record = json.loads((made / pack.RECORD).read_text())
    kinds = set(
        json.loads(schema_text())["properties"]["figures"]["items"]["properties"]["kind"]["enum"]
    )
    lines = [line for framework in clauses()["frameworks"] for line in framework["lines"]]
    assert {kind for line in lines for kind in line["answers"]} <= kinds | set(PARTS)
    assert (
        "not conformity" in record["notice"] and record["notice"] in (made / pack.PAGE).read_text()
    )
    shown = html.unescape((made / pack.PAGE).read_text())
    for framework in clauses()["frameworks"]:
        assert "compared with" in framework["compared"] and framework["compared"] in shown
    answers = [line["answer"] for line in record["clauses"]]
    assert len(answers) == len(lines) and NOT_COVERED in answers
    for given, line in zip(lines, mapped([])):  # a pack without figures answers nothing with them
        parts = [kind for kind in given["answers"] if kind in PARTS]
        assert (line["answer"] == NOT_COVERED) == (not parts)


def test_the_same_pack_is_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again = good_pack(tmp_path / "pack")
    assert (made.parent / "pack.zip").read_bytes() == (tmp_path / "pack.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "pack.zip") as archive:
        names = archive.namelist()
        assert names == sorted(names) and {entry.date_time for entry in archive.infolist()} == {
            (1980, 1, 1, 0, 0, 0)
        }
    assert set(names) == set(pack.listed(again))


def test_a_zip_is_verified_as_its_folder(made: Path) -> None:
    with pack.opened(made.parent / "pack.zip") as place:
        found, known = verify_pack(place, network(), None, 0.1, seed=0)
    assert found and known


def test_a_pack_of_another_version_is_told_so(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "pack"
    shutil.copytree(made, place)
    (place / pack.PAGE).write_text((place / pack.PAGE).read_text() + " ")
    known = ws.network.versions()
    for theirs, told in ((known["wassail"], "writes it."), ("9.9", "verify it with that version")):
        monkeypatch.setattr("wassail.evidence.verify.versions", lambda v=theirs: {"wassail": v})
        found, _ = verify_pack(place, network(), None, 0.1, seed=0)
        assert not found and told in str(found)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_zip_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "pack.zip"
    path.parent.mkdir()
    path.write_bytes(HOSTILE[name])
    with pytest.raises(InputError) as caught, pack.opened(path):
        pass
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert not list(tmp_path.rglob("escaped*")) and not Path("/tmp/escaped.txt").exists()


def test_statements_of_strangers_are_checked() -> None:
    assert read_statement(WORDS.plain) == WORDS
    for values in (None, {}, WORDS.plain | {"more": 1}, WORDS.plain | {"limits": "x"}):
        with pytest.raises(InputError):
            read_statement(values)
    with pytest.raises(InputError):
        Statement("x" * 5000)
    with pytest.raises(InputError):
        Statement(require=("be good",))


def test_a_signed_pack_and_a_signed_record(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (tmp_path / "key").write_bytes(pem)
    place = Path(shutil.copytree(made, tmp_path / "pack"))
    pack.seal_again(place, tmp_path / "key")
    run = ws.Evaluation.load(place / "run")
    known = pack.check_pack_seal(place, run)
    assert known and known.signer is not None
    assert not pack.check_pack_seal(place, run, "SHA256:other")
    from wassail.evidence.verify import record_text

    found, known = verify_pack(place, network(), None, 0.0, seed=0)
    content = json.loads(record_text(found, known, 0.0, tmp_path / "key"))
    assert content["claim"]["pack"] == known.digest and content["signature"] is not None
    assert content["claim"]["holds"] is True and content["claim"]["not_checked"]


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["evidence", "digits-mlp", *SMALL.split(), "--out", "pack", "--purpose", "digits"]
    require = ["--require", "accuracy>=0.99 at eps 0.05 order 1 proved"]
    assert main([*words, *require]) == 1  # the pack is made, and says that it fails
    record = json.loads(Path("pack/evidence.json").read_text())
    assert record["holds"] is False and Path("pack.zip").is_file()
    assert main(words) == 2 and "holds a pack already" in capsys.readouterr().err
    assert main(["verify", "pack.zip", "--seed", "0", "--data", "digits"]) == 0
    verified = json.loads(Path("pack.verified.json").read_text())["claim"]
    assert verified["holds"] and verified["share_of_radii"] == "0.1"
    capsys.readouterr()
    assert main(["verify", "pack", "--seed", "0", "--radii", "0", "--quiet"]) == 0
    Path("pack/evidence.html").write_text("<h1>all is well</h1>")
    assert main(["verify", "pack", "--seed", "0", "--radii", "0", "--quiet"]) == 1
    assert capsys.readouterr().out == ""
    assert main(["recheck", "pack", "--data", "digits"]) == 2
    assert "the pack was changed: its seal does not fit" in capsys.readouterr().err
    settings = ["--config", "pack/settings.toml", "--out", "again"]
    assert main(["evidence", "digits-mlp", "--data", "digits", *settings, "--quiet"]) == 1
    first, second = (
        json.loads(Path(f"{name}/evidence.json").read_text()) for name in ("pack", "again")
    )
    assert first["figures"] == second["figures"]


@pytest.mark.slow
def test_a_pack_with_its_model_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx")
    from fuzz.build import onnx_model

    monkeypatch.chdir(tmp_path)
    onnx_model(tmp_path / "net.onnx", "dense")
    x = np.random.default_rng(0).random((6, 4), dtype=np.float32)
    np.savez("d.npz", x=x, y=np.arange(6) % 3)
    words = (
        "evidence net.onnx --data d.npz --eps 0.05 --attacks fgsm --certify crown --no-look --quiet"
    )
    assert main([*words.split(), "--include-model", "--out", "pack"]) == 0
    assert main(["verify", "pack", "--seed", "0"]) == 0
    Path("pack", SEAL).unlink()
    assert main(["verify", "pack", "--seed", "0"]) == 2


def test_help_needs_no_torch() -> None:
    code = "import sys; from wassail.cli.parser import main; main(['models']); "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


BAD = {
    "evidence digits-mlp --eps 0.1": "add --out PACK",
    "evidence digits-mlp --eps 0.1 --out p --include-model": "for .onnx files",
    "evidence digits-mlp --eps 0.1 --out p --require nonsense": "cannot read the requirement",
    "verify missing.zip": "is no pack that can be read",
    "verify run": "wassail verify RUN MODEL",
    "verify run digits-mlp --record r.json": "are for packs",
    "recheck missing.zip": "add --data NEW",
    "recheck empty --data digits": "is no pack",
    "init box.csv --box-of digits": "is for tables",
    "seal missing.zip": "unpack it",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_sentence(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and BAD[command] in said


def test_a_box_file_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("a,b,label\n1,0.5,x\n-2,3.25,y\n")
    assert main(["init", "box.csv", "--box-of", "t.csv"]) == 0
    assert Path("box.csv").read_text() == "feature,low,high,scale\na,-2.0,1.0,\nb,0.5,3.25,\n"
    Path("r.csv").write_text("a,price,b\n1,0.5,3\n-2,3.25,4\n")  # the target is not the last
    assert main(["init", "two.csv", "--box-of", "r.csv", "--target", "price"]) == 0
    assert Path("two.csv").read_text() == "feature,low,high,scale\na,-2.0,1.0,\nb,3.0,4.0,\n"


def test_a_pack_has_the_boxes_of_its_features(tmp_path: Path) -> None:
    """With them the evaluation can be made again; a box file of another origin is refused."""
    place = tmp_path / "pack"
    (place / "run").mkdir(parents=True)
    boxed(True)(place / "run")
    pack.write_pack(place, WORDS)
    text = "feature,low,high,scale\nage,0.0,1.0,0.0\ndose,0.0,1.0,1.0\n"
    assert (place / "box.csv").read_text() == text
    record = pack.read_record(place)
    assert "--box PACK/box.csv" in record["commands"]["make"]["words"]
    run = load(place)
    assert check_files(place, run)[0] == []
    (place / "box.csv").write_text("feature,low,high,scale\nage,0,1,1\ndose,0,1,1\n")
    assert "box.csv does not say what the run says" in check_files(place, run)[0][0]


def test_a_box_file_in_a_pack_without_boxes(made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "pack"))
    (place / "box.csv").write_text("feature,low,high,scale\n")
    assert check_files(place, load(place))[0] == ["'box.csv' is no part of a pack."]


@pytest.mark.slow
def test_a_pack_keeps_the_order_of_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """New samples with names of classes are numbered as those of the pack."""
    pytest.importorskip("onnx")
    from fuzz.build import onnx_model

    monkeypatch.chdir(tmp_path)
    onnx_model(tmp_path / "net.onnx", "dense")
    x = torch.rand(30, 4, generator=torch.Generator().manual_seed(0))
    y = open_model("net.onnx").model(x).argmax(1)
    names = [f"class {9 - label}" for label in y.tolist()]  # the alphabet has them the other way
    rows = [",".join([*map(str, sample), name]) for sample, name in zip(x.tolist(), names)]
    Path("d.csv").write_text("\n".join(["a,b,c,d,label", *rows]) + "\n")
    words = "evidence net.onnx --data d.csv --eps 0.01 --attacks fgsm --certify crown --no-look"
    order = ["--classes", "class 9,class 8,class 7", "--include-model", "--quiet"]
    assert main([*words.split(), *order, "--out", "pack"]) == 0
    capsys.readouterr()
    assert main(["verify", "pack", "--data", "d.csv", "--seed", "0"]) == 0
    assert "the order of the classes: that of the pack" in capsys.readouterr().out
    assert main(["recheck", "pack", "--data", "d.csv"]) == 0
    assert "100.00 % of 30 new samples" in capsys.readouterr().out


def test_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "nowhere"]) == 2
    assert "'nowhere' is not there" in capsys.readouterr().err
