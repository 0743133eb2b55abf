"""Requirements: what they ask, what they answer, and where the answer is written."""

from __future__ import annotations

import dataclasses
import json
import math
from xml.etree import ElementTree

import jsonschema
import pytest
import torch

import wassail as ws
from wassail.cli.parser import main
from wassail.evaluation.landmarks import Landmark
from wassail.evaluation.requirement import parse_requirement
from wassail.evaluation.signoff import costs, population_sentence
from wassail.report.card import model_card
from wassail.report.machine import SCHEMA, as_json, as_junit, schema_text
from wassail.report.population import advice, population_panel
from wassail.testing import LinearClassifier
from wassail.transport.confidence import proportion_at_least

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ws.Evaluation:
    """100 points of a line in (0, 1) that flip at 1/2: half of them of each class, ten wrong."""
    torch.manual_seed(0)
    model = LinearClassifier(torch.tensor([[-1.0], [1.0]]), torch.tensor([0.5, -0.5]))
    x = (torch.arange(100, dtype=torch.float32)[:, None] + 0.5) / 100
    y = (x[:, 0] > 0.5).long()
    y[:10] = 1
    out = tmp_path_factory.mktemp("signoff") / "run"
    threats = [ws.Threat("inf", p, "0.1") for p in (1, "inf")]
    return ws.evaluate(
        model, (x, y), threats, ("nearest",), out=out, certify="crown", look=False, passes=10
    )


def test_a_sentence_is_read_word_by_word() -> None:
    asked = parse_requirement("accuracy >= 50% at eps 2/255, order 2 confidence 0.9 class 3 proved")
    assert (asked.accuracy, asked.side, asked.eps) == (0.5, "proved", 2 / 255)
    assert (asked.order, asked.confidence, asked.label) == (2, 0.9, 3)
    clean = parse_requirement("accuracy>=0.9 clean")
    assert (clean.eps, clean.order, clean.confidence, clean.label) == (None,) * 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("robustness>=0.5 at eps 1 proved", "cannot read the requirement"),
        ("accuracy>=0.5 at eps 1", "needs one of the words"),
        ("accuracy>=0.5 at eps 1 proved attacked", "needs one of the words"),
        ("accuracy>=0.5 proved", "has no eps"),
        ("accuracy>=0.5 eps 1 clean", "has no eps"),
        ("accuracy>=50 eps 1 proved", "between 0 and 1"),
        ("accuracy>=0.5 eps 1 budget 3 proved", "cannot read 'budget'"),
        ("accuracy>=0.5 eps 1 confidence 95 proved", "confidence"),
        ("accuracy>=0.5 eps -1 proved", "positive"),
        ("accuracy>=0.5 eps 1 eps 2 proved", "cannot read 'eps'"),
    ],
)
def test_bad_sentences_are_refused(text: str, words: str) -> None:
    with pytest.raises(ws.InputError, match=words):
        parse_requirement(text)


def test_clean_is_counted_and_limited(run) -> None:
    assert run.require("accuracy>=0.9 clean")
    assert not run.require("accuracy>=0.9001 clean")
    sure = run.require("accuracy>=0.5 confidence 0.95 clean")
    assert sure.value == proportion_at_least(90, 100, 0.95)


def test_proved_attacked_and_their_confidence(run) -> None:
    # 10 on each side of 1/2 are within 0.1 of it and ten are wrong: 70 of 100 are left.
    assert run.require("accuracy>=0.7 at eps 0.1 order inf attacked")
    assert run.require("accuracy>=0.7 at eps 0.1 order inf proved")
    assert not run.require("accuracy>=0.72 at eps 0.1 order inf proved")
    sure = run.require("accuracy>=0.7 at eps 0.1 order inf confidence 0.9 proved")
    assert not sure
    assert sure.value == pytest.approx(proportion_at_least(70, 100, 0.9), abs=1e-9)
    below = run.require("accuracy>=0.1 at eps 0.1 order 1 confidence 0.9 attacked").value
    assert below < run.curve(1)(0.1)[1]
    assert "with 90 % confidence" in sure.sentence and "FAILS" in str(sure)


def test_one_class_has_a_budget_of_its_own(run) -> None:
    alone = run.require("accuracy>=0.5 at eps 0.1 order inf class 0 proved")
    assert alone.value == pytest.approx(0.75)  # 40 samples of class 0, 10 of them within 0.1
    assert "class 0" in alone.sentence
    with pytest.raises(ws.InputError, match="of that class"):
        run.require("accuracy>=0.5 at eps 0.1 class 7 proved")
    curve = run.population(math.inf, 0.9, label=0)
    assert curve.samples == 40 and curve(0.1)[0] < 0.75


def test_the_population_is_said_in_one_sentence(run) -> None:
    low = run.population(1)(0.1)[0]
    text = population_sentence(run)
    assert text is not None and "95 % confidence" in text and f"{100 * low:.1f}"[:3] in text
    sampling, proof = costs(run.curve(1), 0.1, 0.95)
    assert sampling == pytest.approx(run.curve(1)(0.1)[0] - low)
    assert proof == pytest.approx(run.curve(1).gap(0.1))
    said = advice(run)
    assert said is not None and ("samples would halve it" in said) == (sampling >= proof)
    panel = population_panel(run)
    assert panel is not None and text in str(panel)


def test_the_json_has_a_version_and_stable_keys(run) -> None:
    verdicts = [run.require("accuracy>=0.95 clean"), run.require("accuracy>=0.5 clean")]
    found = json.loads(json.dumps(as_json(run, verdicts), allow_nan=False))
    assert found["schema"] == SCHEMA == "wassail/evaluation/1"
    assert set(found) == {
        *("schema", "model", "data", "samples", "headline", "clean", "threats", "population"),
        *("requirements", "holds", "landmarks", "findings", "versions", "seed", "classes"),
        "others",
        *("conditions", "verification", "task", "units"),
    }
    assert set(found["threats"][0]) == {
        *("norm", "order", "eps", "domain", "attacked", "certified", "population")
    }
    assert set(found["threats"][0]["population"]) == {
        *("confidence", "attacked", "certified", "sampling_costs", "proof_gap_costs")
    }
    assert set(found["requirements"][0]) == {
        *("requirement", "holds", "accuracy", "at_least", "side", "eps", "order", "confidence"),
        *("class", "sentence", "subpopulation", "label_cost", "groups"),
    }
    assert found["threats"][1]["order"] == "inf"
    assert [entry["holds"] for entry in found["requirements"]] == [False, True]
    assert found["holds"] is False


# keys that came after version 1, which readers need not expect
LATER = {"classes", "others", "conditions", "verification", "task", "units"}


def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_json_is_what_the_schema_says(run) -> None:
    verdicts = [run.require("accuracy>=0.95 clean"), run.require("accuracy>=0.5 eps 0.1 proved")]
    found = json.loads(json.dumps(as_json(run, verdicts), allow_nan=False))
    check = validator()
    check.validate(found)
    mark = Landmark("jpeg-50", math.inf, {1.0: 0.1, math.inf: 0.2}, {1.0: None}, 0.5)
    weights = torch.arange(100, dtype=torch.float64) / 4950
    for other in ({"landmarks": (mark,)}, {"radii": None, "mu": weights}):
        check.validate(json.loads(json.dumps(as_json(dataclasses.replace(run, **other)))))
    assert check.is_valid(found | {"new": 1})  # readers must accept keys that they do not know
    for key in set(found) - LATER:
        assert not check.is_valid({k: v for k, v in found.items() if k != key})
    assert not check.is_valid(found | {"schema": "wassail/evaluation/2"})
    assert not check.is_valid(found | {"clean": 1.5})
    assert not check.is_valid(found | {"holds": "yes"})


def test_the_schema_of_a_version_does_not_change() -> None:
    """Who changes what version 1 requires has to call it version 2."""
    schema = json.loads(schema_text())
    assert schema["$id"] == SCHEMA
    assert schema["required"] == sorted(set(schema["properties"]) - LATER)
    assert ",".join(schema["required"]) == (
        "clean,data,findings,headline,holds,landmarks,model,population,requirements,samples,"
        "schema,seed,threats,versions"
    )
    threat = schema["properties"]["threats"]["items"]
    assert threat["required"] == sorted(
        ["attacked", "certified", "domain", "eps", "norm", "order", "population"]
    )


def test_junit_and_card_say_what_failed(run) -> None:
    verdicts = [run.require("accuracy>=0.95 clean"), run.require("accuracy>=0.5 clean")]
    suite = ElementTree.fromstring(as_junit(run, verdicts).encode())
    assert suite.attrib["tests"] == "2" and suite.attrib["failures"] == "1"
    cases = suite.findall("testcase")
    assert [case.find("failure") is not None for case in cases] == [True, False]
    card = model_card(run, verdicts)
    for word in ("**Definition.**", "**Conditions.**", "**Not checked.**", "FAILS", "holds"):
        assert word in card


def test_the_command_line_answers_by_its_exit_code(tmp_path, capsys) -> None:
    base = ["evaluate", "digits-mlp-adv", "-n", "12", "--eps", "0.02", "--order", "1"]
    base += ["--attacks", "nearest", "--passes", "10", "--no-look", "--quiet"]
    with_files = ["--write", str(tmp_path / "j.xml"), "--write", str(tmp_path / "card.md")]
    code = main([*base, "--json", "--require", "accuracy>=0.99999 at eps 5 attacked", *with_files])
    out, err = capsys.readouterr()
    assert code == 1
    assert json.loads(out)["holds"] is False
    assert "FAILS" in err
    assert ElementTree.parse(tmp_path / "j.xml").getroot().attrib["failures"] == "1"
    assert "FAILS" in (tmp_path / "card.md").read_text()
    assert main([*base, "--require", "accuracy>=0.01 clean"]) == 0
    assert "holds: accuracy>=0.01 clean" in capsys.readouterr().out
    assert main([*base, "--require", "accuracy>=0.1 at eps 1 proved"]) == 2
    assert "add --certify" in capsys.readouterr().err


def test_the_pytest_plugin(pytester, run) -> None:
    pytester.makepyfile(
        """
        def test_holds(wassail_model):
            assert wassail_model.require("accuracy>=0.5 at eps 0.1 order inf proved").holds

        def test_fails(wassail_model):
            wassail_model.require("accuracy>=0.99 clean")
        """
    )
    # By its module, and not a second time where the package that is installed names it.
    plugin = ("-p", "no:wassail", "-p", "wassail.pytest_plugin", "-p", "no:cacheprovider")
    found = pytester.runpytest_inprocess(*plugin, f"--wassail-run={run.folder}")
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(["*FAILS: accuracy>=0.99 clean*"])
    missing = pytester.runpytest_inprocess(*plugin)
    missing.assert_outcomes(errors=2)
    missing.stdout.fnmatch_lines(["*there is no run*"])


ANSWERS = {
    "fails": ('wassail_model.require("accuracy>=0.99 clean")', 1),
    "own assertion": ("assert wassail_model is None", 1),
    "bad input": ('wassail_model.require("more")', 4),
    "internal": ("wassail_model.require(1 / 0)", 3),
    "both": (
        "wassail_model.require(1 / 0)\n\ndef test_b(wassail_model): wassail_model.require('')",
        3,
    ),
    "another test": ("pass\n\ndef test_b(): 1 / 0", 1),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_the_pytest_plugin_ends_with_another_code_without_an_answer(pytester, run, case) -> None:
    body, code = ANSWERS[case]
    pytester.makepyfile(f"def test_a(wassail_model):\n    {body}\n")
    plugin = ("-p", "no:wassail", "-p", "wassail.pytest_plugin", "-p", "no:cacheprovider")
    found = pytester.runpytest_inprocess(*plugin, f"--wassail-run={run.folder}")
    assert found.ret == code


def test_an_ordering_of_two_models_is_proved_or_not_claimed(run) -> None:
    threat = ws.Threat("inf", math.inf, "0.1")
    same = ws.compare(run, run, threat, resamples=20)
    assert same.guaranteed[0] <= 0 <= same.guaranteed[1] and same.ordering == ""
    far = torch.where(run.distances > 0, 9.0, 0.0).double()
    near = torch.full_like(far, 1e-3)
    better = dataclasses.replace(run, distances=far, radii=far * 0.999)
    worse = dataclasses.replace(run, distances=near, radii=near * 0.999)
    found = ws.compare(better, worse, threat, resamples=20)
    assert 0.5 < found.guaranteed[0] < found.difference
    assert "the first is better" in str(found)
    assert "the second is better" in str(ws.compare(worse, better, threat, resamples=20))
    blind = dataclasses.replace(better, radii=None)
    assert ws.compare(blind, worse, threat, resamples=20).guaranteed[0] == -1


def test_a_run_is_exported_as_json_and_as_a_card(run, tmp_path, capsys) -> None:
    assert main(["export", str(run.folder), "json", "card", "-o", str(tmp_path)]) == 0
    assert "evaluation.json" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluation.json").read_text()) == json.loads(
        json.dumps(as_json(run))
    )
    assert (tmp_path / "card.md").read_text() == model_card(run)


def test_attacks_that_miss_samples_have_a_limit_too(tmp_path) -> None:
    """No flip is known for most of 300 samples: their distance is infinite."""
    model = LinearClassifier(torch.tensor([[-1.0], [1.0]]), torch.tensor([3.0, -3.0]))
    x = torch.rand(300, 1, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(300, dtype=torch.int64)
    y[:30] = 1
    run = ws.evaluate(model, (x, y), ws.Threat("inf", 1, 0.01), ("nearest",), look=False, passes=5)
    found = run.require("accuracy>=0.8 at eps 0.01 order 1 confidence 0.95 attacked")
    assert 0.8 < found.value < 0.9
