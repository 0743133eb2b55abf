"""The command line as a person uses it: a process of its own, exit codes, one sentence on
stderr, no traceback.
"""

import json
import math
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.cli.certificate import rounded_down, rounded_up
from wassail.cli.commands import attack_options
from wassail.cli.options import CHUNK
from wassail.cli.parser import main
from wassail.evaluation import protocol
from wassail.names import SLOPES
from wassail.threat import ceil_percent, floor_percent


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    x, y = (t.numpy() for t in ws.zoo.data())
    x = x[:20]
    y = y[:20]
    np.savez(folder / "good.npz", x=x, y=y)
    np.savez(folder / "bytes.npz", x=x * 255, y=y)
    np.savez(folder / "nan.npz", x=x * np.nan, y=y)
    np.savez(folder / "labels.npz", x=x, y=y + 5)
    np.savez(folder / "short.npz", x=x, y=y[:3])
    np.savez(folder / "names.npz", data=x, target=y)
    np.savez(folder / "vectors.npz", x=x.reshape(20, -1)[:, :63], y=y)
    (folder / "junk.npz").write_bytes(b"this is not a zip file")
    np.savez(folder / "pickle.npz", x=np.array([{"a": 1}], dtype=object), y=y)
    (folder / "mine.py").write_text(
        "import wassail, wassail.zoo.digits\n"
        "def net(): return wassail.zoo.digits.ARCHITECTURES['mlp']()\n"
        "def softmax():\n    model = wassail.zoo.load('digits-mlp')\n    return lambda x: "
        "model(x).softmax(1)\n"
        "import torch\n"
        "def kink():\n"  # theta = (0, relu(x) - 3 relu(-x))
        "    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), "
        "torch.nn.Linear(2, 2)).double()\n"
        "    values = ([[1.0], [-1.0]], [0.0, 0.0], [[0.0, 0.0], [1.0, -3.0]], [0.0, 0.0])\n"
        "    for p, v in zip(model.parameters(), values): p.data.copy_(torch.tensor(v))\n"
        "    return model\n"
        "def line():\n"  # theta = (0, x - 0.75)
        "    model = torch.nn.Sequential(torch.nn.Linear(1, 2)).double()\n"
        "    for p, v in zip(model.parameters(), ([[0.0], [1.0]], [0.0, -0.75])): "
        "p.data.copy_(torch.tensor(v))\n"
        "    return model\n"
        # attention of two tokens, x and 2 x, to each other, normalised after it: bounded, not
        # Lipschitz
        "def attend():\n"
        "    def logits(x):\n        t = torch.cat([x, 2 * x], 1)[:, :, None]\n"
        "        return torch.nn.functional.layer_norm(((t @ t.mT).softmax(-1) @ t).flatten(1), "
        "(2,))\n"
        "    return logits\n"
        "def softsign():\n"
        "    layers = torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Softsign()\n"
        "    return torch.nn.Sequential(*layers)\n"
    )
    np.savez(folder / "kink.npz", x=np.array([[-0.5]]), y=np.array([0]))
    np.savez(folder / "line.npz", x=np.array([[0.25], [0.5]]), y=np.array([0, 0]))
    return folder


BAD = {
    "eps zero": (["--eps", "0"], "eps is '0'"),
    "eps negative": (["--eps=-1/255"], "eps is '-1/255'"),
    "eps text": (["--eps", "small"], "eps 'small' is not a number"),
    "norm": (["--norm", "3"], "norm '3'"),
    "order": (["--order", "0.5"], "order '0.5'"),
    "attack": (["--attacks", "wda+"], "did you mean 'wda++'"),
    "model": (["-m", "digit-cnn"], "did you mean 'digits-cnn'"),
    "module": (["-m", "nowhere:net"], "No module named 'nowhere'"),
    "factory": (["-m", "mine:nothing"], "nothing"),
    "weights": (["-m", "mine:net", "--weights", "junk.npz"], "cannot read weights"),
    "weights missing": (["-m", "mine:net", "--weights", "no.safetensors"], "cannot read weights"),
    "probabilities": (["-m", "mine:softmax"], "probabilities"),
    "0..255": (["--data", "bytes.npz"], "save them as uint8, or divided by 255"),
    "NaN": (["--data", "nan.npz"], "NaN"),
    "labels": (["--data", "labels.npz"], "the model has 10 classes"),
    "lengths": (["--data", "short.npz"], "20 samples but 3 labels"),
    "array names": (["--data", "names.npz"], "data, target"),
    "shape": (["--data", "vectors.npz"], "does not accept samples of shape"),
    "junk": (["--data", "junk.npz"], "cannot read data"),
    "pickle": (["--data", "pickle.npz"], "objects could run code and are never read"),
    "missing": (["--data", "none.npz"], "No such file"),
    "unknown data": (["--data", "digit"], "did you mean 'digits'"),
    "n": (["-n", "0"], "-n is 0"),
    "domain": (["--domain", "1", "0"], "domain"),
    "out": (["--out", "good.npz/x"], "cannot write"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case, files, capsys, monkeypatch) -> None:
    monkeypatch.chdir(files)
    extra, words = BAD[case]
    model = "digits-mlp"
    if extra[0] == "-m":
        model = extra[1]
        extra = extra[2:]
    options = {"--eps": "0.1", "--data": "good.npz"}
    missing = [
        part
        for o, v in options.items()
        if not any(e.startswith(o) for e in extra)
        for part in (o, v)
    ]
    code = main(["evaluate", "--no-look", model, *missing, *extra])
    err = capsys.readouterr().err
    assert code == 2 and words in err, err
    assert err.startswith("wassail: ") and err.count("\n") == 1 and "Traceback" not in err


def test_attack_on_a_file_writes_results(files, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(files)
    out = tmp_path / "run"
    code = main(
        [
            "evaluate",
            "--no-look",
            "digits-mlp",
            "--data",
            "good.npz",
            "--eps",
            "8/255",
            "--norm",
            "2",
            "--order",
            "1",
            "inf",
            "--out",
            str(out),
        ]
    )
    text = capsys.readouterr().out
    assert code == 0 and "Accuracy is at most" in text and "eps 8/255" in text
    run = ws.Evaluation.load(out)
    flips = run.flips()
    assert len(flips) == 20 and {row.threat.order for row in run.rows} == {1.0, math.inf}
    for row in run.best:
        again = ws.allocate(flips, row.threat.eps, row.threat.order)
        assert (
            again.accuracy == pytest.approx(row.accuracy, abs=1e-12)
            and again.cost == row.cost <= row.threat.eps
        )
    assert (out / "report.html").read_text().lower().startswith("<!doctype html>")


def test_attacks_side_by_side(files, capsys, monkeypatch) -> None:
    """Each answers the orders it can: W-PGD none below 2, a ball for every sample only inf,
    nearest flips all of them.
    """
    monkeypatch.chdir(files)
    names = ["w-fgsm", "fgsm", "pgd", "apgd-ce", "deepfool"]
    code = main(
        [
            "evaluate",
            "--no-look",
            "digits-mlp",
            "--data",
            "good.npz",
            "--eps",
            "0.1",
            "--attacks",
            *names,
            "--order",
            "1",
            "2",
            "inf",
        ]
    )
    text = capsys.readouterr().out
    assert code == 0
    orders: dict[str, list[str]] = {}
    for title, _, rest in (
        row.partition(" p=") for row in text.split("all, pooled")[0].splitlines()
    ):
        if rest:
            orders.setdefault(title.strip(), []).append(rest.split()[0])
    assert orders == {
        "W-FGSM": ["2", "inf"],
        "FGSM": ["inf"],
        "PGD": ["inf"],
        "APGD-CE": ["inf"],
        "DeepFool": ["1", "2", "inf"],
    }
    assert (
        main(
            [
                "evaluate",
                "--no-look",
                "digits-mlp",
                "--data",
                "good.npz",
                "--eps",
                "0.1",
                "--attacks",
                "fgsm",
                "--order",
                "1",
            ]
        )
        == 2
    )
    assert "add --order inf" in capsys.readouterr().err


EVALUATE_BAD = {
    "method": (["--certify", "crow"], "did you mean 'crown'"),
    "precision": (["--gradients", "float8"], "unknown precision 'float8'"),
    "resume": (["--resume"], "need --out"),
    "threads": (["--threads", "0"], "--threads is 0"),
    "step": (["--attacks", "wda:step=tiny"], "step 'tiny' is not a number"),
    "workers": (["--ray", "workers=many"], "workers of --ray is 'many'"),
    "control": (["--attacks", "a\x1b[2J"], "unknown attack 'a"),
    "device": (["--device", "abacus"], "cannot use device 'abacus'"),
    "mean": (["--mean", "0.5", "half"], "mean 'half' is not a number"),
    "time": (["--time-limit", "0"], "the time limit is '0'"),
    "attack": (["--attacks", "nearset"], "did you mean 'nearest'"),
    "order": (["--order", "0.5"], "order '0.5'"),
    "n": (["-n", "0"], "-n is 0"),
    "layer": (["-m", "mine:softsign", "--certify"], "at '2' (Softsign) is not supported"),
    "out": (["--out", "good.npz/x"], "cannot write"),
}


@pytest.mark.parametrize("case", EVALUATE_BAD)
def test_evaluate_bad_input_is_one_sentence(case, files, capsys, monkeypatch) -> None:
    monkeypatch.chdir(files)
    extra, words = EVALUATE_BAD[case]
    model, extra = (extra[1], extra[2:]) if extra[0] == "-m" else ("digits-mlp", extra)
    code = main(["evaluate", model, "--eps", "0.1", *extra])
    out, err = capsys.readouterr()
    assert code == 2 and words in err, err
    assert (
        not out and err.startswith("wassail: ") and err.count("\n") == 1 and "Traceback" not in err
    )


def test_the_chunk_spelt_out_here_is_that_of_the_protocol() -> None:
    assert CHUNK == protocol.CHUNK


def test_evaluate_in_closed_form(files, capsys, monkeypatch, tmp_path) -> None:
    """Samples flipped at 1/2 and 1/4. Omega_1(0.1) buys 0.4 of the mass, of the nearer one;
    Omega_inf(0.3) all of that one.
    """
    monkeypatch.chdir(files)
    for eps, expected in (("0.1", {"1": 0.6, "inf": 1.0}), ("0.3", {"1": 0.15, "inf": 0.5})):
        out = tmp_path / eps
        code = main(
            [
                "evaluate",
                "mine:line",
                "--data",
                "line.npz",
                "--eps",
                eps,
                "--order",
                "1",
                "inf",
                "--certify",
                "--attacks",
                "nearest",
                "--out",
                str(out),
            ]
        )
        text = capsys.readouterr().out
        assert code == 0 and "radii by auto, executed arithmetic, 2 of 2 exact" in text
        for order, truth in expected.items():
            row = [
                line.split()
                for line in text.splitlines()
                if line.startswith("all, pooled") and f" p={order} " in line
            ]
            certified, attacked = (float(word) for word in row[0][3:5])
            assert certified <= 100 * truth + 1e-9 and attacked >= 100 * truth - 0.005
            assert certified > 100 * truth - 0.02 and attacked < 100 * truth + 0.02, (eps, order)
        headline = re.search(r"Between (\S+) % and (\S+) % stay correct over Omega_1\(", text)
        assert (
            headline is not None
            and float(headline[1]) <= 100 * expected["1"] <= float(headline[2]) + 0.005
        )
        assert (out / "sandwich.svg").read_text().startswith("<svg ")


def test_evaluate_writes_what_its_files_give_again(files, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(files)
    options = [
        "--data",
        "good.npz",
        "-n",
        "6",
        "--eps",
        "0.05",
        "0.1",
        "--certify",
        "crown",
        "--attacks",
        "nearest",
        "fgsm",
    ]
    assert main(["evaluate", "digits-mlp-adv", *options, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        "FGSM" in text
        and "radii by crown, executed arithmetic, 0 of 6 exact" in text
        and "certified: proved" in text
    )
    summary = json.loads(
        (tmp_path / "results" / "summary.json").read_text(), parse_constant=pytest.fail
    )
    run = ws.Evaluation.load(tmp_path)
    assert run.certificate["method"] == "crown" and len(summary["pooled"]) == 6 and len(run) == 6
    for row in run.best:
        certified, attacked = run.curve(row.threat.order)(row.threat.eps)
        assert certified <= attacked == pytest.approx(row.accuracy)
        assert ceil_percent(attacked) in text and floor_percent(certified) in text
    assert main(["evaluate", "digits-mlp-adv", *options, "--out", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err
    before = {
        path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()
    }
    assert main(["evaluate", "digits-mlp-adv", *options, "--out", str(tmp_path), "--resume"]) == 0
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()
    }
    assert (
        main(
            [
                "evaluate",
                "digits-mlp-adv",
                *options,
                "--out",
                str(tmp_path),
                "--add-attack",
                "wda++",
            ]
        )
        == 0
    )
    assert "WDA++" in capsys.readouterr().out


def test_evaluate_stops_at_its_time_limit(capsys) -> None:
    options = [
        "--eps",
        "0.05",
        "-n",
        "9",
        "--passes",
        "30",
        "--certify",
        "crown",
        "--time-limit",
        "0.001",
        "--order",
        "1",
        "--chunk",
        "3",
        "--attacks",
        "nearest",
    ]
    assert main(["evaluate", "digits-mlp-adv", *options]) == 0
    assert "The time limit left samples without a certificate" in capsys.readouterr().out


def test_evaluate_without_matplotlib(files, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(files)
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert (
        main(
            ["evaluate", "mine:line", "--data", "line.npz", "--eps", "0.1", "--out", str(tmp_path)]
        )
        == 0
    )
    assert (tmp_path / "report.html").exists() and (tmp_path / "sandwich.svg").exists()
    assert main(["export", str(tmp_path), "svg", "pdf"]) == 2
    assert "figures need matplotlib" in capsys.readouterr().err


def test_report_compare_and_export_of_runs(files, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(files)
    common = ["--data", "good.npz", "-n", "8", "--eps", "0.05", "--attacks", "wda++"]
    for name in ("digits-mlp", "digits-mlp-adv"):
        assert main(["evaluate", "--no-look", name, *common, "--out", str(tmp_path / name)]) == 0
    runs = [str(tmp_path / name) for name in ("digits-mlp", "digits-mlp-adv")]
    assert main(["report", runs[0], "-o", str(tmp_path / "page.html")]) == 0
    assert main(["compare", *runs, "-o", str(tmp_path / "board.html")]) == 0
    assert all(
        "digits-mlp" in (tmp_path / name).read_text() for name in ("page.html", "board.html")
    )
    assert (
        main(
            [
                "export",
                runs[0],
                "csv",
                "npz",
                "pt",
                "png",
                "--model",
                "digits-mlp",
                "-o",
                str(tmp_path / "files"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert len(list((tmp_path / "files").iterdir())) >= 4
    assert (
        main(["export", runs[0], "robustbench"]) == 2
        and "RobustBench has no board" in capsys.readouterr().err
    )
    assert (
        main(["export", runs[0], "xls"]) == 2 and "unknown format 'xls'" in capsys.readouterr().err
    )
    assert main(["report", str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("wassail: ") and err.count("\n") == 1


CERTIFY_BAD = {
    "slope": (["--slopes", "margin", "ancor"], "did you mean 'anchor'"),
    "dlr": (["--loss", "dlr"], "the DLR loss is a ratio of logit differences and not Lipschitz"),
    "loss": (["--loss", "crossentropy"], "did you mean 'cross_entropy'"),
    "eps": (["--eps", "0.1", "0"], "eps is '0'"),
    "eps text": (["--eps", "tiny"], "eps 'tiny' is not a number"),
    "norm": (["--norm", "3"], "norm '3'"),
    "time": (["--time-limit", "0"], "the time limit is '0'"),
    "time text": (["--time-limit", "soon"], "time limit 'soon' is not a number"),
    "n": (["-n", "0"], "-n is 0"),
    "domain": (["--domain", "1", "0"], "domain"),
    "outside the box": (["--data", "bytes.npz"], "save them as uint8, or divided by 255"),
    "activation": (["-m", "mine:softsign"], "at '2' (Softsign) is not supported"),
    "radius": (["--radius", "wide"], "'wide' is not a number"),
    "out": (
        ["-m", "mine:kink", "--data", "kink.npz", "--no-box", "--out", "good.npz/x"],
        "cannot write",
    ),
}


@pytest.mark.parametrize("case", CERTIFY_BAD)
def test_certify_bad_input_is_one_sentence(case, files, capsys, monkeypatch) -> None:
    monkeypatch.chdir(files)
    extra, words = CERTIFY_BAD[case]
    model, extra = (extra[1], extra[2:]) if extra[0] == "-m" else ("digits-mlp", extra)
    code = main(["certify", model, *extra])
    err = capsys.readouterr().err
    assert code == 2 and words in err, err
    assert err.startswith("wassail: ") and err.count("\n") == 1 and "Traceback" not in err


def test_certify_checks_its_arguments_before_torch() -> None:
    run = "main(['certify', 'no:net', '--loss', 'dlr'])"
    probe = f"import sys; from wassail.cli import main; {run}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0 and "not Lipschitz" in done.stderr


def test_certify_in_closed_form(files, capsys, monkeypatch, tmp_path) -> None:
    """One sample at -0.5, margin loss: slope 3 for half a unit, then 1; V(2) = -1.5 + 1.5 + 1.5."""
    monkeypatch.chdir(files)
    out = tmp_path / "run"
    code = main(
        [
            "certify",
            "mine:kink",
            "--data",
            "kink.npz",
            "--loss",
            "margin",
            "--no-box",
            "--norm",
            "inf",
            "--eps",
            "2",
            "0.25",
            "--out",
            str(out),
        ]
    )
    text = capsys.readouterr().out
    assert code == 0 and "no box" in text and "theorem for l = L does not hold here" in text
    rows = {
        words[1]: words
        for words in (line.split() for line in text.splitlines())
        if len(words) > 3 and words[1] in SLOPES
    }
    assert list(rows) == list(SLOPES) and [words[0] for words in rows.values()] == [
        symbol for symbol, _ in SLOPES.values()
    ]
    truth = {"infinity": 1.0, "anchor": 3.0, "margin": 3.0, "paper": 3.0}
    for name, slope in truth.items():
        low = float(rows[name][2])
        high = float(rows[name][3])
        assert low <= slope <= high and high - low <= 1e-4, name
    headline = re.search(
        r"expected loss is between (\S+) and (\S+) over Omega_1\(2\), .* \(on the data -1.5\)", text
    )
    assert (
        headline is not None and 0.5 <= float(headline[1]) <= 1.5 <= float(headline[2]) < 1.5001
    )  # 0.5 = E + l eps
    results = json.loads((out / "certificate.json").read_text())
    certificate = ws.Certificate.load(out / "certificate.safetensors")
    assert (
        results["empirical"] == certificate.empirical == -1.5
        and results["norm"] == "inf"
        and results["domain"] is None
    )
    assert [row["eps"] for row in results["bounds"]] == [0.25, 2.0]
    for row, value in zip(results["bounds"], (-0.75, 1.5)):
        assert (row["lower"], row["upper"]) == certificate.bounds(row["eps"])
        assert row["lower"] <= value <= row["upper"] < value + 1e-4
        assert row["witnessed"] == certificate.witness(row["eps"]).info["loss"] <= row["upper"]
    for name in SLOPES:
        assert results["slopes"][name]["upper"] == getattr(certificate, name).upper


@pytest.mark.slow
def test_certify_without_an_upper_slope(files, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(files)
    code = main(
        [
            "certify",
            "mine:attend",
            "--data",
            "kink.npz",
            "--no-box",
            "--slopes",
            "margin",
            "--time-limit",
            "1",
            "--out",
            str(tmp_path),
        ]
    )
    text = capsys.readouterr().out
    assert (
        code == 0
        and "and inf over Omega_1(1)" in text
        and "give a box, or add infinity to --slopes" in text
    )
    results = json.loads((tmp_path / "certificate.json").read_text(), parse_constant=pytest.fail)
    assert results["bounds"][0]["upper"] is None and list(results["slopes"]) == ["margin"]
    assert (
        main(["certify", "digits-mlp", "-n", "2", "--slopes", "anchor", "--out", str(tmp_path)])
        == 0
    )
    json.loads((tmp_path / "certificate.json").read_text(), parse_constant=pytest.fail)


def test_certify_a_built_in_network_within_its_time(capsys) -> None:
    start = time.perf_counter()
    code = main(
        [
            "certify",
            "digits-mlp",
            "-n",
            "10",
            "--time-limit",
            "2",
            "--slopes",
            "margin",
            "anchor",
            "--eps",
            "8/255",
        ]
    )
    spent = time.perf_counter() - start
    text = capsys.readouterr().out
    assert (
        code == 0
        and spent < 20
        and "The worst expected loss is between" in text
        and "box [0, 1]" in text
    )
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("8/255"))
    assert 0 < float(row[1]) < float(row[2]) < float(row[3]) and row[4:] == ["100", "%"]


def test_printed_bounds_are_rounded_outward() -> None:
    for value in (24.26274139, -0.3333333333, 1234567.8, 1e-9 / 3, 0.1, -2.0, 0.0):
        assert (
            float(rounded_down(value)) <= value <= float(rounded_up(value))
            and len(rounded_down(value)) <= 12
        )
        assert float(rounded_up(value)) - float(rounded_down(value)) <= 1.0001e-5 * abs(value)
    assert (rounded_down(0.0), rounded_up(3.0), rounded_up(math.inf)) == ("0", "3", "inf")


def test_own_model_with_weights(files, capsys, monkeypatch) -> None:
    monkeypatch.chdir(files)
    torch.save(ws.zoo.load("digits-mlp").state_dict(), files / "w.pt")
    common = ["--eps", "0.05", "--data", "good.npz", "--attacks", "wda++", "--order", "1"]
    assert main(["evaluate", "--no-look", "mine:net", "--weights", "w.pt", *common]) == 0
    mine = capsys.readouterr().out
    assert main(["evaluate", "--no-look", "digits-mlp", *common]) == 0
    assert "mine:net" in mine
    line = next(row for row in mine.splitlines() if "all, pooled" in row)
    assert line in capsys.readouterr().out


def children_seconds() -> float:
    """The processor time of the processes that were started here and have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def test_help_is_fast_and_the_demo_runs(tmp_path) -> None:
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = children_seconds()
        done = subprocess.run(
            [sys.executable, "-m", "wassail.cli", "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds.append(children_seconds() - start)
    assert "demo" in done.stdout and min(seconds) < 0.5
    probe = "import sys, wassail.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0, (
        "--help must not wait for torch"
    )
    command = [sys.executable, "-m", "wassail.cli", "demo", "--out", str(tmp_path)]
    command += ["-n", "20", "--time-limit", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ("none (clean)", "WDA, kappa 2", "WDA, kappa 1", "WDA++", "nearest", "all, pooled")
    for words in (
        *names,
        "on 20 samples of digits",
        "radii by ",
        "stay correct over Omega_1(0.05)",
        "The first 20 of 500 samples",
        "torch",
    ):
        assert words in done.stdout
    assert (tmp_path / "sandwich.svg").exists() and (tmp_path / "report.html").exists()
    table = done.stdout.partition("three trainings")[2].splitlines()[1:5]
    assert table[0].split() == ["training", "clean", "certified", "attacked"]
    rows = {row.split()[0]: [float(cell) for cell in row.split()[1:]] for row in table[1:]}
    assert list(rows) == ["standard", "adversarial", "certified"]
    for clean, low, high in rows.values():
        assert low <= high <= clean
    # each training raises what is left, and the certified one what is proved
    assert rows["standard"][2] < rows["adversarial"][2]
    assert rows["adversarial"][1] + 10 < rows["certified"][1]


@pytest.mark.slow
def test_a_transformer_from_both_sides(capsys, tmp_path) -> None:
    extra = [
        "-n",
        "2",
        "--attacks",
        "wda++",
        "--eps",
        "0.01",
        "--certify",
        "--time-limit",
        "8",
        "--out",
        str(tmp_path),
    ]
    assert main(["evaluate", "digits-vit-adv", *extra]) == 0
    assert "stay correct over Omega_1(0.01)" in capsys.readouterr().out


def test_certify_a_transformer_prints_its_modules(capsys, tmp_path) -> None:
    extra = [
        "-n",
        "2",
        "--no-box",
        "--slopes",
        "infinity",
        "--eps",
        "0.1",
        "--radius",
        "0.001",
        "--quiet",
    ]
    assert main(["certify", "digits-vit", *extra, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for words in (
        "embedding",
        "LayerNorm",
        "attention",
        "feed-forward",
        "head",
        "Lambda: paper 10^",
        "times below",
    ):
        assert words in text
    modules = json.loads((tmp_path / "certificate.json").read_text())["modules"]
    assert modules["style"] == "pre-LN" and len(modules["rows"]) == 10
    sides = modules["log10_lambda"]
    assert sides["paper"] > sides["ours"] > sides["local"] > math.log10(modules["empirical"])


def test_models_are_listed(capsys) -> None:
    assert main(["models"]) == 0
    assert "digits-vit-adv" in capsys.readouterr().out


def test_no_words_print_help_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: wassail" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"wassail {ws.__version__}"


def test_the_help_of_evaluate_fits_three_screens(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 3 * 40
    titles = [line for line in lines if line and not line.startswith((" ", "usage"))]
    assert len(titles) >= 6 and lines[lines.index("options:") + 2] == ""  # all but --help in groups


def test_attacks_take_their_options_behind_a_colon(capsys: pytest.CaptureFixture[str]) -> None:
    assert attack_options(["wda:kappa=4,step=8/255", "nearest:passes=30", "wda:topk=3"]) == {
        "wda": {"kappa": 4, "step": 8 / 255, "topk": 3},
        "nearest": {"passes": 30},
    }
    words = ["evaluate", "digits-mlp", "--eps", "0.1", "-n", "3", "--quiet", "--order", "1"]
    assert main([*words, "--attacks", "wda:kappa=4"]) == 0
    assert "WDA, kappa 4" in capsys.readouterr().out
