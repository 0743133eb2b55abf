"""Results files are as new as their code, and the pages show what they hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from benchmarks import code, rooms, stage
from benchmarks.measure import INF, share
from benchmarks.networks import fetch as fetching
from benchmarks.networks.__main__ import main as networks
from benchmarks.networks.files import FOLDER, NETWORKS, Missing, digest_of
from benchmarks.pages import picture
from benchmarks.pages.__main__ import differences, filled, marked
from benchmarks.pages.tables import Results
from benchmarks.results import STAGES, stage_of
from benchmarks.stages import coverage

ROOT = Path(__file__).resolve().parents[1]
HAND_WRITTEN = re.compile(r"\d+(\.\d+)? ?%|\d+\.\d+ ?\.\. ?\d+\.\d+")

# ---- what is committed


def test_no_results_file_is_older_than_its_code() -> None:
    assert stage.stale() == []


def test_pages_show_what_the_results_files_hold() -> None:
    assert differences() == []


def test_readme_has_no_figure_outside_its_marks() -> None:
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"<!-- (results|figure):.*?<!-- /\1 -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    assert [match[0] for match in HAND_WRITTEN.finditer(text)] == []


def test_every_stage_names_rooms_that_exist_and_units_that_differ() -> None:
    for name in STAGES:
        found = stage_of(name)
        assert found.name == name and code.files_of(found.depends)
        keys = [unit.key for unit in found.units()]
        assert len(keys) == len(set(keys))
        assert found.tables({}) is not None


def test_results_are_nested_and_no_certificate_is_above_an_attack() -> None:
    results = Results()
    for row in results.table("board", "board"):
        attacked = [row[f"attacked_{order}"] for order in ("1", "2", "inf")]
        assert attacked == sorted(attacked) and attacked[-1] <= row["clean"] + 1e-9
        for order in ("1", "2", "inf") if row["certified_images"] else ():
            low, high = row[f"both_{order}"]
            assert low <= high
    for row in results.table("gaps", "brackets"):
        assert row["certified_1"] <= row["attacked_1"] <= row["attacked_inf"]


# ---- the hash of code


def test_hash_ignores_comments_docstrings_types_and_formatting_only() -> None:
    plain = "def f(x):\n    return {'a': x + 1}\n"
    same = '"""Doc."""\n\ndef f(x):  # why\n    """What."""\n    return {\n  "a": x + 1,\n    }\n'
    other = "def f(x):\n    return {'a': x + 2}\n"
    text = "def f(x):\n    'a string'\n    return 'a string'\n"
    assert code.structure(plain) == code.structure(same)
    assert code.structure(plain) != code.structure(other)
    assert code.structure(text) == code.structure("def f(x):\n    return 'a string'\n")
    assert code.structure("x = 1") != code.structure("x = 1.0")
    assert code.structure("def f(x: int) -> int: ...") == code.structure("def f(x): ...")
    assert (
        code.structure("x: int = 1")
        == code.structure("x: float = 1")
        != code.structure("x: int = 2")
    )
    assert code.structure("X: TypeAlias = 'int'") == code.structure("X: TypeAlias = 'str'")


VERDICT = """
import wassail.zoo.onnx
net = nn.Sequential(nn.Linear(1, 4), nn.Sigmoid(), nn.Linear(4, 1)).eval()
ws.Property.read(sys.argv[1]).decide(net, effort=1)
"""
DIGITS = """
model = ws.zoo.load("digits-mlp")
x, y = (part[:2] for part in ws.zoo.data("digits"))
"""
PROOF = """
for norm in (1, 2, "inf"):
    threat = ws.Threat(norm, 1, 0.05)
    ws.radii(model, x, y, norm, effort=0.1)
    ws.verify(model, x, y, threat, effort=0.1)
    ws.sandwich(model, x, y, threat, effort=0.1)
"""
CONSTANT = """
net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
for method in ("auto", "sdp", "exact"):
    ws.lipschitz(net, 2, (0, 1), shape=(4,), method=method)
"""
NOISE = """
smooth = ws.smoothed(model, 0.25, 100)
smooth.certify(x, y, 0.9)
ws.attack_smoothed(smooth, x, y, confidence=0.9, passes=10, draws=100)
"""


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (VERDICT, rooms.VNNLIB),
        (DIGITS + PROOF, rooms.PROOFS),
        (CONSTANT, rooms.CONSTANTS),
        (DIGITS + NOISE, rooms.SMOOTHING),
    ],
    ids=["vnnlib", "proofs", "constants", "smoothing"],
)
def test_a_call_imports_nothing_beside_its_rooms(
    program: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    """What is imported beyond them words errors, shows progress, draws and writes files."""
    words = {"errors", "names", "progress", "writing", "checks", "records", "notebook", "plots"}
    words |= {"zoo/weights", "zoo/digits", "__init__"}
    (tmp_path / "p.vnnlib").write_text(
        "(declare-const X_0 Real)(declare-const Y_0 Real)"
        "(assert (>= X_0 0))(assert (<= X_0 1))(assert (>= Y_0 0.5))"
    )
    script = (
        f"import sys, torch, wassail as ws\nfrom torch import nn\n{program}\n"
        "print(*(n for n in sys.modules if n.startswith('wassail.')))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "p.vnnlib")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    files = {path.relative_to(code.SOURCE).as_posix() for path in code.files_of(named)}
    known = {name.removesuffix(".py").removesuffix("/__init__") for name in files} | words
    seen = {name.removeprefix("wassail.").replace(".", "/") for name in loaded}
    packages = {"certificates", "zoo", "vnnlib"}
    assert seen - known - packages == set()


def test_a_room_that_is_gone_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="name what replaces it"):
        code.digest(["no-such-room"])


def test_a_changed_room_makes_its_results_stale_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lipschitz", "attacks"):
        record = {"depends": {"sha256": stage_of(name).digest}}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert stage.stale(tmp_path) == []
    (tmp_path / "attacks.json").write_text(json.dumps({"depends": {"sha256": "0" * 64}}))
    (told,) = stage.stale(tmp_path)
    assert "python -m benchmarks.results attacks" in told


# ---- units


def make_stage(calls: list[str], folder: str = "a" * 64) -> stage.Stage:
    units = [
        stage.Unit(key, lambda key=key: calls.append(key) or {"value": len(key)})
        for key in ("one/x", "two/yy")
    ]
    found = stage.Stage("toy", "A toy.", (), lambda: units, lambda done: {"t": []}, Path(__file__))
    found.__dict__["digest"] = folder
    return found


def test_a_unit_that_is_done_is_kept_and_one_of_other_code_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "CACHE", tmp_path)
    calls: list[str] = []
    toy = make_stage(calls)
    first, _ = toy.units()
    toy.measure(first)
    again = make_stage(calls)
    assert again.answer(again.units()[0]) == {"value": 5}
    assert again.answer(again.units()[1]) is None
    assert again.record()["units"] == {"planned": 2, "done": 1}
    assert again.record()["open"] == ["two/yy"]
    changed = make_stage(calls, "b" * 64)
    assert changed.answer(changed.units()[0]) is None
    assert calls == ["one/x"]


def test_a_peer_that_is_not_installed_is_not_run_and_its_kept_answer_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "CACHE", tmp_path)
    toy = make_stage([])
    unit = stage.Unit("case/peer", lambda: {"value": 1}, peer="no-such-tool")
    assert not toy.runnable(unit) and toy.answer(unit) is None
    kept = tmp_path / "toy" / "peer-no-such-tool-1.0" / "case_peer.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"answer": {"value": 7}}))
    assert toy.answer(unit) == {"value": 7}


def test_confidence_limits_are_those_of_clopper_and_pearson() -> None:
    found = share(5, 10)  # Clopper and Pearson 1934: 0.187 to 0.813
    assert found["low"] == pytest.approx(18.71, abs=0.01)
    assert found["high"] == pytest.approx(81.29, abs=0.01)
    assert share(0, 10)["low"] == 0 and share(10, 10)["high"] == 100
    assert share(0, 10)["high"] == pytest.approx(30.85, abs=0.01)


# ---- figures on pages


@pytest.fixture
def results(tmp_path: Path) -> Results:
    row = {
        "id": "net-l2",
        "verified": {"percent": 51.04},
        "n": 200,
        "name": "FMN",
        "pair": [1.5, 2],
    }
    record = {"tables": {"rows": [row]}}
    (tmp_path / "toy.json").write_text(json.dumps(record))
    return Results(tmp_path)


def test_a_mark_is_filled_from_the_files(results: Results) -> None:
    page = "It is <!-- figure:toy.rows.net-l2.verified.percent:.1f -->99<!-- /figure --> %."
    assert ">51.0<" in filled(page, results)
    assert results.figure("toy.rows.net-l2.n") == "200"
    assert results.figure("toy.rows.net-l2.name") == "FMN"
    assert results.figure("toy.rows.net-l2.pair.0") == "1.5"


def test_a_figure_that_is_not_there_is_named(results: Results) -> None:
    with pytest.raises(KeyError, match=r"toy\.rows\.other\.n"):
        filled("<!-- figure:toy.rows.other.n -->1<!-- /figure -->", results)
    with pytest.raises(KeyError, match="results:other"):
        filled("<!-- results:other -->\n<!-- /results -->", results)


def test_glance_has_seven_rows_with_and_without_figures(results: Results) -> None:
    page = "<!-- results:glance -->\n<!-- /results -->"
    assert filled(page, results).count("\n| ") == 8  # with the titles
    assert filled(filled(page, results), results) == filled(page, results)


def test_a_page_with_another_figure_is_found(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "docs" / "results").mkdir(parents=True)
    page = tmp_path / "README.md"
    page.write_text("<!-- results:glance -->\n| 99 % |\n<!-- /results -->\n")
    assert marked(tmp_path) == [page]
    told = differences(tmp_path)
    assert any(line.startswith("README.md is not what results/*.json say") for line in told)


def test_a_picture_of_other_figures_is_found(tmp_path: Path) -> None:
    row = {"id": picture.NETWORK, "norm": "linf", "eps": "0.1", "images": 2}
    row |= {"distances": [0.1, 0.2], "radii": [0.05, 0.15]}
    results = Results(tmp_path)
    results.stages["gaps"] = {"tables": {"brackets": [row]}}
    (tmp_path / picture.FILE).parent.mkdir(parents=True)
    assert picture.differs(results, tmp_path)
    picture.draw(results, tmp_path)
    assert not picture.differs(results, tmp_path)
    row["radii"] = [0.05, 0.1]
    assert picture.differs(results, tmp_path)


# ---- networks


@pytest.fixture
def server() -> Iterator[str]:
    """A server on this machine that has the files of the zoo."""
    if not (FOLDER / "models" / "mnist_mlp_toy20.safetensors").exists():
        pytest.skip(f"no real networks at {FOLDER}: set WASSAIL_ZOO to a folder that has them")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            begin = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")
            path = Path(self.translate_path(self.path))
            if not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()[int(begin) :]
            self.send_response(206 if int(begin) else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    found = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(FOLDER)))
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def test_a_network_is_downloaded_checked_and_kept(server: str, tmp_path: Path) -> None:
    told: list[str] = []
    path = fetching.fetch("mnist_mlp_toy20", tmp_path, server, told.append)
    assert digest_of(path) == NETWORKS["mnist_mlp_toy20"].sha256
    again = fetching.fetch("mnist_mlp_toy20", tmp_path, "http://127.0.0.1:1", told.append)
    assert again == path and told[-1].endswith("is there")


def test_a_download_goes_on_where_it_stopped(server: str, tmp_path: Path) -> None:
    name = "mnist_mlp_toy20"
    whole = (FOLDER / NETWORKS[name].file).read_bytes()
    part = (tmp_path / NETWORKS[name].file).with_name(f"{name}.new.safetensors")
    part.parent.mkdir(parents=True)
    part.write_bytes(whole[:1000])
    told: list[str] = []
    path = fetching.fetch(name, tmp_path, server, told.append)
    assert path.read_bytes() == whole and "from byte 1000" in told[0]


def test_another_content_is_refused(server: str, tmp_path: Path, monkeypatch) -> None:
    wrong = NETWORKS["mnist_mlp_toy20"].__class__(
        **{**NETWORKS["mnist_mlp_toy20"].__dict__, "sha256": "0" * 64}
    )
    monkeypatch.setitem(NETWORKS, "mnist_mlp_toy20", wrong)
    with pytest.raises(Missing, match="another SHA-256"):
        fetching.fetch("mnist_mlp_toy20", tmp_path, server, lambda text: None)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_without_a_network_one_sentence_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "benchmarks.networks.__main__.fetch", partial(fetching.fetch, folder=tmp_path)
    )
    assert networks(["fetch", "mnist", "--from", "http://127.0.0.1:1"]) == 1
    told = capsys.readouterr().err
    assert "cannot be reached" in told and "run the same command again" in told
    assert len(told.strip().splitlines()) == 1


def test_what_has_no_public_address_says_so(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="yaodongyu/TRADES"):
        fetching.fetch("mnist_trades", tmp_path)
    with pytest.raises(Missing, match="no network or data set"):
        fetching.fetch("no-such-network", tmp_path)


def test_every_entry_says_where_it_is_from() -> None:
    for entry in NETWORKS.values():
        assert entry.licence and re.fullmatch("[0-9a-f]{64}", entry.sha256)
        assert entry.sources or entry.about
        for source in entry.sources:
            assert re.fullmatch("[0-9a-f]{64}", source["sha256"])
            assert fetching.address_of(source).startswith("https://")
        if entry.kind in ("network", "onnx"):
            assert entry.data in NETWORKS and len(entry.mean) == len(entry.std)


def test_pictures_are_read_from_public_formats(tmp_path: Path) -> None:
    """The binary files of CIFAR-10: a label, then the channels one after the other."""
    x = np.arange(2 * 3072, dtype=np.int64).reshape(2, 32, 32, 3) % 251
    rows = x.transpose(0, 3, 1, 2).reshape(2, -1)
    data = np.concatenate([np.array([[3], [7]]), rows], 1).astype(np.uint8).tobytes()
    part = tmp_path / "part"
    part.write_bytes(data)
    entry = NETWORKS["cifar10"].__class__(
        **{**NETWORKS["cifar10"].__dict__, "sources": ({"url": "https://x", "sha256": ""},)}
    )
    found = fetching.pictures(entry, [part])
    assert (found["images"] == x).all() and found["labels"].tolist() == [3, 7]


def test_a_pickle_that_is_no_array_is_refused() -> None:
    import io
    import pickle

    with pytest.raises(pickle.UnpicklingError, match="no array"):
        fetching.OnlyArrays(io.BytesIO(pickle.dumps(Path("x")))).load()


# ---- coverage


def test_the_population_of_the_simulation_in_closed_form() -> None:
    case = coverage.Case("inputs", 100, 1.0)
    density = (1 - coverage.WRONG - coverage.NEVER) * (1 + 1 / 2) / 2
    for eps in coverage.BUDGETS[:4]:  # all below t is bought, where density * t^2 / 2 = eps
        true = 1 - coverage.WRONG - density * (2 * eps / density) ** 0.5
        assert coverage.population(case)(eps) == pytest.approx((true, true), abs=1e-4)


def test_a_limit_that_is_too_narrow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "REPETITIONS", 30)
    case = coverage.Case("others", 100, INF, subpopulation=0.8)
    honest = coverage.simulated(case)
    assert honest["band"]["certified"]["percent"] >= 90
    monkeypatch.setattr(coverage, "CONFIDENCE", 0.05)
    narrow = coverage.simulated(case)
    assert narrow["band"]["certified"]["percent"] < 80
    assert narrow["band"]["width"] < honest["band"]["width"]
