"""Runs whose checksums are right and whose numbers are not: what a reader with the model finds
out.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import wassail as ws
from support.forged import (
    THREATS,
    Edit,
    dear,
    forge,
    free,
    logits,
    nearer,
    network,
    other_samples,
    refuted,
    samples,
    shared,
    without_flips,
)
from wassail.cli import parser
from wassail.errors import InputError
from wassail.evaluation.reproving import most_false
from wassail.evaluation.store.store import Store
from wassail.report.page import report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("made") / "run"
    ws.evaluate(
        network(),
        samples(),
        THREATS,
        ("fgsm", "wda", "nearest"),
        certify="auto",
        chunk=5,
        passes=30,
        out=out,
    )
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
def test_an_honest_run_holds_and_says_what_was_not_checked(made: Path) -> None:
    run = ws.Evaluation.load(made)
    model = network()
    found = run.verify(model)
    assert found and found.problems == ()
    text = str(found)
    assert (
        "not checked: whether the samples are those of 'data in memory': give data (--data)."
        in text
    )
    assert (
        "not checked: 11 certified radii: none was proved again" in text
        and "not checked: the other attacks" in text
    )
    found = run.verify(model, samples(), True, batch_size=3)
    assert found and "checked: all 11 radii above 0 were proved again." in str(found)
    assert "the samples are those of the data" in str(found) and "give data" not in str(found)
    assert forge(shutil.copytree(made, made.parent / "same"), lambda *_: None).verify(
        model, samples(), True
    )


@pytest.mark.parametrize("options", [{"steps": 10**9}, {"steps": 10**4, "restarts": 10**4}])
def test_options_that_would_keep_the_reader_waiting(
    tmp_path: Path, options: dict[str, int]
) -> None:
    """The attacks of a configuration are run again: not for a billion steps."""
    model = network()
    place = tmp_path / "run"
    ws.evaluate(model, samples(), [ws.Threat("inf", "inf", 0.01)], ["pgd"], out=place, look=False)
    content = json.loads((place / "config.json").read_text())
    content["config"]["attacks"][0] |= options
    (place / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    found = ws.Evaluation.load(place).verify(model)
    assert "too many steps" in str(found) and "run again on samples" not in str(found)


def test_radii_that_meet_the_flips_of_a_larger_network() -> None:
    """No search finds the distance again: that the flip is as near as claimed is enough."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 310), torch.nn.ReLU(), torch.nn.Linear(310, 3))
    with torch.no_grad():
        model[0].bias[6:] = 9.0
        model[2].bias -= model(torch.rand(200, 3)).mean(0)
    model = model.double()
    x = torch.rand(2, 3).double()
    y = model(x).argmax(1)
    threat = ws.Threat("inf", 1, 0.1)
    kept: dict[str, Any] = {"certify": "auto", "gap": 1e-4, "passes": 60, "look": False}
    run = ws.evaluate(model, (x, y), [threat], ("fgsm", "nearest"), **kept)
    assert run.exact is not None and run.exact.all()
    assert run.radii is not None and (run.radii < run.distances * (1 - 1e-4)).any()
    found = run.verify(model, (x, y), radii=True)
    assert found, str(found)


def test_radii_just_below_the_flips(run: Path) -> None:
    """Radii that an attack suggests and nobody proved, called exact."""
    honest = ws.Evaluation.load(run)
    start = {"k": 0}

    def edit(unit: str, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> None:
        if unit.startswith("radii@"):
            n = len(tensors["values"])
            upper = honest.distances[start["k"] : start["k"] + n]
            tensors["values"] = torch.where(torch.isfinite(upper), 0.999 * upper, 0.0)
            tensors["exact"] = torch.ones(n, dtype=torch.bool)
            start["k"] += n

    forged = forge(run, edit)
    assert forged.headline.startswith("Between")
    assert forged.verify(network()) and "11 certified radii: none was proved again" in str(
        forged.verify(network())
    )
    found = forged.verify(network(), radii=True)
    assert not found and re.search(
        r"\d+ of 11 radii are called exact and are not the distance", str(found)
    )
    share = forged.verify(network(), radii=0.3, seed=1)
    assert not share and "of 4 radii" in str(share)


def test_radii_beyond_what_is_true(run: Path) -> None:
    """Flips are taken away, so that radii have room, and the radii are doubled."""

    def edit(unit: str, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> None:
        without_flips(unit, tensors, fields)
        if unit.startswith("radii@"):
            tensors["values"] *= 2
            tensors["exact"] = torch.zeros_like(tensors["exact"])

    found = forge(run, edit).verify(network(), radii=True)
    assert "11 of 11 radii could not be proved again." in found.problems


def test_exact_radii_a_little_beyond_what_is_true(tmp_path: Path) -> None:
    """By a ten-millionth: no tolerance lets a false radius pass. In exact arithmetic, where an
    exact radius is the distance itself.
    """
    run = tmp_path / "exact"
    settings: dict[str, Any] = {
        "certify": "auto",
        "arithmetic": "exact",
        "passes": 30,
        "out": run,
    }
    ws.evaluate(network(), samples(), THREATS, ("nearest",), **settings)

    def edit(unit: str, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> None:
        without_flips(unit, tensors, fields)
        if unit.startswith("radii@"):
            tensors["values"] *= 1 + 1e-7

    forged = forge(run, edit)
    assert forged.exact is not None and forged.exact.all()
    assert (
        "11 of 11 radii could not be proved again." in forged.verify(network(), radii=True).problems
    )


def test_all_flips_deleted(run: Path) -> None:
    forged = forge(run, without_flips)
    assert forged.best[0].accuracy == forged.clean
    # The seed decides which of the three chunks is attacked, and in one of them FGSM finds none.
    found = [str(forged.verify(network(), seed=seed)) for seed in range(4)]
    told = (
        r"FGSM finds \d+ flips among samples \d+ to \d+ that the run does not have: "
        "flips were left out"
    )
    assert any(re.search(told, text) for text in found)


def test_all_weight_on_one_sample(run: Path) -> None:
    first = {"left": True}

    def edit(unit: str, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> None:
        if "mu" in tensors:
            tensors["mu"] = torch.zeros_like(tensors["mu"])
            tensors["mu"][0] = float(first["left"])
            first["left"] = False

    found = forge(run, edit).verify(network())
    assert found.problems == (
        "the samples' weights are not equal, and the configuration names none.",
    )


def test_a_title_that_nobody_earned(run: Path) -> None:
    def edit(unit: str, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> None:
        if unit.startswith("attack@nearest"):
            fields["title"] = "AutoAttack, 10 restarts"

    forged = forge(run, edit)
    assert "AutoAttack, 10 restarts" in {row.title for row in forged.rows}
    assert forged.verify(network()).problems == (
        "attack@nearest calls itself 'AutoAttack, 10 restarts', and the attack that was asked "
        "for is 'nearest'.",
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (shared, "attack@wda@1@0.05 moves another share of each sample than 'WDA, kappa 2' does"),
        (nearer, "distances are not as stated"),
        (refuted, "flips are called none and hold"),
        (logits, "chunks hold other logits than the model's"),
        (other_samples, "chunks name their samples otherwise than the data"),
        (free, "of attack@nearest: flips cost no pass"),
        (dear, "attack@nearest spent more passes than the 30 it was given"),
    ],
    ids=lambda value: getattr(value, "__name__", "-"),
)
def test_relatives(run: Path, edit: Edit, words: str) -> None:
    found = forge(run, edit).verify(network(), samples())
    assert not found and words in " ".join(found.problems), found


def test_other_models_data_and_files(run: Path) -> None:
    found = ws.Evaluation.load(run)
    other = network()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    assert "the model's weights are not those that the run names." in found.verify(other).problems
    x, y = samples()
    x[7] += 0.01
    assert "1 chunks hold other samples than the data" in found.verify(network(), (x, y)).problems
    assert (
        "the run has 12 samples and the data have 5."
        in found.verify(network(), (x[:5], y[:5])).problems
    )
    path = run / "results/summary.json"
    for text in (path.read_text().replace("0.0", "0.1"), "", "[" * 100_000, "{}"):
        path.write_text(text)
        with Store.resume(run, Store.open(run).config) as store:
            store.seal()
        assert (
            "results/summary.json does not say what the chunks say."
            in found.verify(network(), seed=0).problems
        )
    with pytest.raises(InputError, match="radii is 2: give True, False, or the share"):
        found.verify(network(), radii=2)


def test_what_a_share_proves() -> None:
    """Exactly, by counting: F false ones escape a draw of k of n with probability C(n - F, k) /
    C(n, k).
    """
    for n, k in ((10, 3), (100, 10), (100, 95), (1000, 30), (57, 57), (5, 0)):
        most = max(f for f in range(n - k + 1) if 20 * math.comb(n - f, k) >= math.comb(n, k))
        assert most_false(n, k) == most, (n, k)


def test_a_share_is_drawn_anew_and_can_be_drawn_again(made: Path) -> None:
    run = ws.Evaluation.load(made)
    first = run.verify(network(), radii=0.25)
    second = run.verify(network(), radii=0.25)
    assert first and first.seed != second.seed
    assert re.search(
        r"3 of 11 radii above 0, drawn at random, were proved again: at 95 % "
        r"confidence at most 6 of 11",
        str(first),
    )
    assert run.verify(network(), radii=0.25, seed=first.seed) == first


def test_the_page_says_whether_its_reader_looked(made: Path, run: Path) -> None:
    honest = ws.Evaluation.load(made)
    assert 'data-verified="no"' in report(honest) and "Not verified by its reader" in report(honest)
    page = report(honest, verified=honest.verify(network(), samples(), True, seed=0))
    assert 'data-verified="yes"' in page and "all 11 radii above 0 were proved again" in page
    forged = forge(run, shared)
    page = report(forged, verified=forged.verify(network()))
    assert 'data-verified="false"' in page and "moves another share of each sample" in page


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    threats = [
        "-n",
        "3",
        "--eps",
        "0.1",
        "--attacks",
        "fgsm",
        "--no-look",
        "--threads",
        "1",
        "--certify",
        "crown",
    ]
    assert parser.main(["evaluate", "digits-mlp", *threats, "--out", out, "--quiet"]) == 0
    capsys.readouterr()
    page = str(tmp_path / "page.html")
    words = ["verify", out, "digits-mlp", "--data", "digits", "--threads", "1"]
    assert parser.main([*words, "--radii", "-o", page]) == 0
    said = capsys.readouterr().out
    assert (
        "nothing that was checked is false" in said
        and "radii above 0 were proved again" in said
        and "--data" not in said
    )
    assert 'data-verified="yes"' in Path(page).read_text()
    assert parser.main([*words[:3], "--radii", "0.5", "--seed", "4"]) == 0
    said = capsys.readouterr().out
    assert (
        "at 95 % confidence at most" in said
        and "seed 4" in said
        and "not checked: whether the samples are those" in said
    )
    assert parser.main(["verify", out, "digits-cnn"]) == 1
    assert "FALSE: the model's weights are not those that the run names." in capsys.readouterr().out
    assert parser.main([*words, "--radii", "7"]) == 2
    assert "give the share to prove again" in capsys.readouterr().err
