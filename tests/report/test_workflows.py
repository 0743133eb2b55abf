"""What workflows read: SARIF for code scanning, the job summary."""

import json
import os
from pathlib import Path

import pytest
import torch

import wassail as ws
from support.forged import network, samples
from wassail.cli.parser import main
from wassail.report.card import job_summary
from wassail.report.sarif import as_sarif, lines_of

GOOD = "accuracy>=0.01 clean"
BAD = "accuracy>=0.99 at eps 0.2 order inf attacked"
CONFIG = f"""\
# {BAD}
model = "digits-mlp"
eps = ["0.2"]
require = [
  "{GOOD}",
  "{BAD}",
]
"""


@pytest.fixture(scope="module")
def run() -> ws.Evaluation:
    torch.set_num_threads(1)
    threat = ws.Threat("inf", "inf", 0.2)
    return ws.evaluate(network(), samples(), threat, ("fgsm",), look=False)


def test_a_requirement_that_fails_is_a_result_with_its_line(run: ws.Evaluation) -> None:
    verdicts = [run.require(GOOD), run.require(BAD)]
    places = lines_of(CONFIG, "conf/wassail.toml", [GOOD, BAD])
    assert places == {GOOD: ("conf/wassail.toml", 5), BAD: ("conf/wassail.toml", 6)}
    log = as_sarif(run, verdicts, None, places)
    assert log["version"] == "2.1.0"
    (made,) = log["runs"]
    (result,) = made["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "conf/wassail.toml"
    assert place["region"] == {"startLine": 6}
    assert result["level"] == "error" and BAD in result["message"]["text"]
    assert {rule["id"] for rule in made["tool"]["driver"]["rules"]} >= {result["ruleId"]}
    nowhere = as_sarif(run, verdicts)["runs"][0]["results"][0]["locations"]
    assert nowhere == [{"logicalLocations": [{"name": "the command line"}]}]


def test_it_fits_the_published_schema(run: ws.Evaluation) -> None:
    """The schema of OASIS is not ours to ship: $WASSAIL_SARIF_SCHEMA names a copy of
    sarif-schema-2.1.0.json.
    """
    jsonschema = pytest.importorskip("jsonschema")
    place = os.environ.get("WASSAIL_SARIF_SCHEMA")
    if place is None:
        pytest.skip("$WASSAIL_SARIF_SCHEMA is not set")
    schema = json.loads(Path(place).read_text())
    assert schema["title"] == "Static Analysis Results Format (SARIF) Version 2.1.0 JSON Schema"
    checker = jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())
    verdicts = [run.require(GOOD), run.require(BAD)]
    for places in ({BAD: ("conf/wassail.toml", 6)}, None):
        log = as_sarif(run, verdicts, None, places)
        assert not list(checker.iter_errors(log))
        assert list(checker.iter_errors(log | {"version": "2.0.0"}))


def test_the_summary_begins_with_the_answer(run: ws.Evaluation) -> None:
    text = job_summary(run, [run.require(GOOD), run.require(BAD)])
    assert text.startswith("# wassail: 1 of 2 requirements FAIL\n") and BAD in text
    assert job_summary(run, [run.require(GOOD)]).startswith("# wassail: 1 requirements hold\n")


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wassail.toml").write_text(CONFIG)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    Path("step.md").write_text("before\n")
    words = "evaluate --config wassail.toml -n 6 --order inf --attacks fgsm --no-look --quiet"
    assert main([*words.split(), "--write", "log.sarif", "--write", "job-summary"]) == 1
    (result,) = json.loads(Path("log.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "wassail.toml" and place["region"]["startLine"] == 6
    said = Path("step.md").read_text()
    assert said.startswith("before\n# wassail: 1 of 2 requirements FAIL")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert main([*words.split(), "--write", "job-summary"]) == 2
