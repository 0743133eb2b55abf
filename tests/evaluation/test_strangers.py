"""Runs from strangers: nothing of the reader's is written to, whatever links a run holds."""

import csv
import inspect
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import wassail as ws
from support.processes import fork, wait
from wassail import writing
from wassail.attacks.catalogue import find
from wassail.cli import commands, parser
from wassail.errors import InputError
from wassail.evaluation.reading import Reading
from wassail.evaluation.store.store import Store
from wassail.names import ATTACKS
from wassail.report import export
from wassail.report.export import write
from wassail.report.html import duration
from wassail.report.page import report

COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "report": lambda run: ["report", str(run)],
    "samples": lambda run: ["export", str(run), "samples"],
    "robustbench": lambda run: ["export", str(run), "robustbench", "--dataset", "cifar10"],
    "pt": lambda run: ["export", str(run), "pt"],
    "npz": lambda run: ["export", str(run), "npz"],
    "png": lambda run: ["export", str(run), "png"],
    "compare": lambda run: ["compare", str(run), "-o", str(run / "export" / "compare.html")],
}
PLACES = {
    "report": "report.html",
    "samples": "export/samples.csv",
    "robustbench": "export/robustbench.json",
    "pt": "export/adversarial.pt",
    "npz": "export/flips.npz",
    "png": "export/png",
    "compare": "export/compare.html",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on four samples, one of which is called `$(command)`."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("made") / "run"
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3, 4))
        model[1].bias.zero_()
    x = torch.tensor(
        [[0.9, 0.1, 0, 0], [0, 0.9, 0.1, 0], [0.1, 0, 0.9, 0], [0.2, 0.8, 0.1, 0]]
    ).reshape(4, 1, 2, 2)
    data = ws.zoo.open_data((x, torch.tensor([0, 1, 2, 1])))
    hostile = ["$(touch run)\n", "=1+1", "-1", "@SUM(A1)"]
    data.ids = lambda start, stop: hostile[start:stop]  # type: ignore[method-assign]
    ws.evaluate(
        model,
        data,
        [ws.Threat("inf", p, "8/255") for p in (1, "inf")],
        ["fgsm"],
        out=run,
        look=False,
    )
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("ending", ["", ".part", ".tmp"])
def test_a_link_in_the_way_is_never_written_into(
    run: Path, victim: Path, name: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    link = run / (PLACES[name] + ending)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("../victim" if link.parent == run else "../../victim")
    os.link(victim, victim.with_name("second"))
    code = parser.main(COMMANDS[name](run))
    assert victim.read_text() == "precious" and not victim.is_symlink()
    if ending == "":
        said = capsys.readouterr().err
        assert (
            code == 2
            and said.count("\n") == 1
            and "is a symbolic link, which a run has none of" in said
        )
        assert link.is_symlink()
        return
    place = run / PLACES[name]
    assert code == 0 and not place.is_symlink() and place.exists()
    assert not os.path.lexists(run / (PLACES[name] + ".tmp"))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "report"])
def test_a_folder_that_is_a_link_is_refused(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / "export").symlink_to("../outside")
    assert parser.main(COMMANDS[name](run)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'export' in " in said and "is a symbolic link" in said
    assert list(outside.iterdir()) == []
    with pytest.raises(
        InputError, match=r"'export' in '.*' is a symbolic link"
    ):  # a library call finds the run by itself
        writing.save(run / "export" / "samples.csv", "")
    with pytest.raises(InputError, match=r"'export' in '.*' is a symbolic link"):
        writing.make(run / "export" / "deeper")
    assert list(outside.iterdir()) == []


def test_a_start_up_file_is_not_written_by_an_export(run: Path, tmp_path: Path) -> None:
    """The whole of the attack: a link to what a shell reads, and a sample whose name is a
    command.
    """
    start = tmp_path / ".bashrc"
    start.write_text("# mine\n")
    (run / "export").mkdir()
    for ending in ("", ".part", ".tmp"):
        (run / "export" / f"samples.csv{ending}").symlink_to(start)
    assert parser.main(["export", str(run), "samples"]) == 2
    assert start.read_text() == "# mine\n"
    (run / "export/samples.csv").unlink()
    assert parser.main(["export", str(run), "samples"]) == 0
    assert start.read_text() == "# mine\n"
    with (run / "export/samples.csv").open(newline="", encoding="utf-8") as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    assert ids == ["$(touch run)\\n", "'=1+1", "'-1", "'@SUM(A1)"]


def test_the_pages_of_evaluate_follow_no_link(run: Path, victim: Path) -> None:
    for name in ("report.html.part", "report.html.tmp", "sandwich.svg", "sandwich.svg.tmp"):
        (run / name).symlink_to("../victim")
    with pytest.raises(InputError, match=r"^'sandwich.svg' in '.*' is a symbolic link"):
        commands._write_pages(ws.Evaluation.load(run), run)
    assert victim.read_text() == "precious"
    (run / "sandwich.svg").unlink()
    commands._write_pages(ws.Evaluation.load(run), run)
    assert victim.read_text() == "precious"
    assert (run / "sandwich.svg").read_text().startswith("<svg ")
    assert not (run / "sandwich.svg").is_symlink()


@pytest.mark.parametrize(
    "name",
    [
        "results",
        "results/clean",
        "results/clean/000000.safetensors",
        "config.json",
        "log/events.jsonl",
    ],
)
def test_links_are_refused_in_what_is_read(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).rename(tmp_path / "outside")
    (run / name).symlink_to(tmp_path / "outside")
    for command in (
        ["report", str(run)],
        ["export", str(run), "samples"],
        ["compare", str(run), "-o", str(tmp_path / "c.html")],
    ):
        assert parser.main(command) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "is a symbolic link, which a run has none of" in said, said


# The writer itself.


def test_a_file_is_new_synced_renamed_and_its_folder_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    opening = os.open
    fsync = os.fsync
    replace = os.replace

    def opened(name: Any, flags: int, *more: Any, **how: Any) -> int:
        number = opening(name, flags, *more, **how)
        if flags & os.O_CREAT:
            calls.append(("new", name, bool(flags & os.O_EXCL), bool(flags & os.O_NOFOLLOW)))
        return number

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(
        os, "fsync", lambda n: (calls.append(stat.S_ISDIR(os.fstat(n).st_mode)), fsync(n))
    )
    monkeypatch.setattr(
        os, "replace", lambda a, b, **how: (calls.append((a, b)), replace(a, b, **how))
    )
    writing.save(tmp_path / "page", "text")
    assert calls == [("new", "page.tmp", True, True), False, ("page.tmp", "page"), True]
    assert (tmp_path / "page").read_text() == "text"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o666 & ~mask


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    def both() -> None:
        with writing.replacing(tmp_path / "page") as first:
            first.write(b"one")
            writing.save(tmp_path / "page", "two")

    with pytest.raises(InputError, match=r"another process is writing '.*', too"):
        both()
    assert (tmp_path / "page").read_text() == "two" and os.listdir(tmp_path) == ["page"]


def test_the_users_own_links_are_folders(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    writing.make(tmp_path / "link" / "deeper")
    writing.save(tmp_path / "link" / "deeper" / "page", "text")
    assert (tmp_path / "real/deeper/page").read_text() == "text"


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def half_of_it() -> None:
        with writing.saving_folder(tmp_path / "png") as half:
            writing.save(half / "a", "1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half_of_it()
    assert os.listdir(tmp_path) == []
    (tmp_path / "png.tmp").mkdir()
    (tmp_path / "png.tmp" / "left").write_text("by a kill")
    with writing.saving_folder(tmp_path / "png") as half:
        writing.save(half / "a", "1")
        assert not (tmp_path / "png").exists()
    assert [path.as_posix() for path in tmp_path.rglob("*")] == [
        f"{tmp_path}/png",
        f"{tmp_path}/png/a",
    ]
    with pytest.raises(InputError, match="is not empty"), writing.saving_folder(tmp_path / "png"):
        pass


def test_the_configuration_names_no_file_to_be_written(run: Path, victim: Path) -> None:
    """`state` of AutoAttack is a file that is kept; verifying a run asks the attacks of its
    configuration for their titles.
    """
    text = (run / "config.json").read_text()
    place = victim.with_name("new")
    forged = text.replace('"name": "fgsm"', f'"name": "autoattack", "state": "{place}"')
    assert forged != text
    (run / "config.json").write_text(forged)
    with pytest.raises(InputError, match="state"):
        Reading(Store.open(run))
    assert not place.exists()


def test_no_other_attack_of_the_catalogue_writes_files() -> None:
    for name in ATTACKS:
        found = [
            key
            for key, value in inspect.signature(find(name).run).parameters.items()
            if "Path" in str(value.annotation)
        ]
        assert set(found) <= {"state"}, name


@pytest.mark.parametrize("versions", ["2.0", 0.5, ["torch"]])
def test_versions_without_names_are_refused(run: Path, versions: object) -> None:
    store = Store.open(run)
    store.config["versions"] = versions
    with pytest.raises(InputError, match=r"'versions without names'.* in its config.json"):
        Reading(store)


def test_an_id_that_would_fill_the_memory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ws.Evaluation.load(run)
    monkeypatch.setattr(export, "ID_BYTES", 100)
    with pytest.raises(InputError, match="too long for an array"):
        write(loaded, "npz", tmp_path)
    assert not list(tmp_path.glob("*.npz*"))


def test_a_record_replaces_a_link(tmp_path: Path, victim: Path) -> None:
    curve = ws.RiskCurve(torch.ones(1).double(), None, torch.ones(1).double(), 1.0)
    (tmp_path / "curve").symlink_to(victim)
    curve.save(tmp_path / "curve")
    assert victim.read_text() == "precious" and ws.RiskCurve.load(tmp_path / "curve").order == 1.0


def test_nothing_else_in_the_package_writes_files() -> None:
    """Every way to write a file that is not the one writer's, by its spelling; `log_path` is
    the user's own file.
    """
    words = (
        ".write_text(",
        ".write_bytes(",
        "save_file(",
        "np.save",
        "shutil.copy",
        '.open("w',
        '.open("x',
        '.open("a',
        ', "w")',
        ', "wb")',
    )
    # A log that the user names; members of an archive; a network, into a temporary folder.
    allowed = {"attacks/autoattack.py": 1, "report/export.py": 3, "vnnlib/network.py": 1}
    allowed |= {"evidence/pack.py": 4}  # members of archives, in files of the one writer
    root = Path(ws.__file__).parent
    found = {
        path.relative_to(root).as_posix(): count
        for path in root.rglob("*.py")
        if (count := sum(path.read_text().count(word) for word in words))
    }
    assert found == allowed


# Errors that are none of ours.


@pytest.mark.parametrize(
    "fields",
    [
        "[]",
        "3",
        "{",
        "",
        "[" * 5000,
        '{"order": "x"}',
        '{"order": true}',
        '{"order": null, "radii": 3}',
        '{"order": [1]}',
        '{"order": {"Threat": 3}}',
        '{"order": {"Threat": {"norm": "x"}}}',
        '{"a/": "RiskCurve", "a/order": 1}',
        '{"order/": "None"}',
        '{"order": 1, "radii": "x"}',
        '{"order": 1, "mu": null}',
        '{"' + "a/" * 3000 + '": "RiskCurve"}',
        '{"order": 1, "more": 2}',
    ],
    ids=lambda text: text[:30],
)
def test_a_record_with_malformed_fields_is_one_sentence(tmp_path: Path, fields: str) -> None:
    tensors = {"distances": torch.ones(1).double(), "mu": torch.ones(1).double()}
    save_file(tensors, tmp_path / "curve", metadata={"wassail": "RiskCurve", "fields": fields})
    with pytest.raises(
        InputError, match=r"^'.*' is not a complete RiskCurve: .*; save it again\.$"
    ) as error:
        ws.RiskCurve.load(tmp_path / "curve")
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_no_record(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match=r"^cannot read"):
            ws.RiskCurve.load(path)


def test_every_record_comes_back(tmp_path: Path) -> None:
    """The check of the fields refuses nothing that is saved."""
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
    ).eval()
    x = torch.rand(4, 2)
    y = model(x).argmax(1)
    flips = ws.nearest(model, x, y, "inf", passes=5)
    radii = ws.radii(model, x, y, method="crown")
    for record in (flips, ws.allocate(flips, 0.1, 1), radii, ws.risk_curve(flips, radii, order=1)):
        record.save(tmp_path / "record")
        assert repr(type(record).load(tmp_path / "record")) == repr(record)


@pytest.mark.parametrize(
    "seconds",
    ["1e308", '{"float":"inf"}', '{"float":"nan"}', "-1", "1" + "0" * 400, "1e30", "true"],
)
def test_absurd_times_are_no_times(run: Path, seconds: str) -> None:
    line = (
        f'{{"event":"done","unit":"attack@fgsm@inf@{8 / 255!r}","chunk":0,"seconds":{seconds}}}\n'
    )
    with (run / "log/events.jsonl").open("a") as file:
        file.write(line)
    assert "Attacks" in report(ws.Evaluation.load(run))
    assert duration(float("inf")) == duration(float("nan")) == "–"


@pytest.mark.parametrize("command", ["models", "evaluate", "help"])
def test_a_reader_that_has_seen_enough(
    tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """`| head -0`: nothing on stderr, exit code 0, and all the files."""
    evaluate = [
        "evaluate",
        "digits-mlp",
        "-n",
        "3",
        "--eps",
        "0.1",
        "--attacks",
        "fgsm",
        "--no-look",
        "--threads",
        "1",
    ]
    words = {"models": ["models"], "help": ["--help"]}.get(command) or [
        *evaluate,
        "--out",
        str(tmp_path / "run"),
    ]

    def work() -> int:
        reading, writing_ = os.pipe()
        os.close(reading)
        os.dup2(writing_, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        try:
            code = parser.main(words)
        except SystemExit as error:
            code = int(error.code or 0)
        sys.stdout.flush()
        return code

    assert wait(fork(work, failed=99)) == 0
    assert capfd.readouterr().err == ""
    if command == "evaluate":
        assert {"report.html", "sandwich.svg", "results"} <= set(os.listdir(tmp_path / "run"))


# Work that grows with the number of samples, and no faster.


def test_an_export_is_linear_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False)).eval()
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    model[1].weight.data.copy_(torch.stack([signs, -signs]))  # a step across the box flips them all
    names = ("samples", "pt", "npz", "png", "load", "report")
    looks: dict[str, list[int]] = {name: [] for name in names}
    for n in (8, 32):
        x = torch.rand(n, 1, 2, 2, generator=torch.Generator().manual_seed(0))
        out = tmp_path / str(n)
        threat = ws.Threat("inf", "inf", 1.0)
        ws.evaluate(model, (x, model(x).argmax(1)), threat, ["fgsm"], chunk=1, look=False, out=out)
        run = ws.Evaluation.load(out)
        count = [0]
        (out / "export").mkdir()
        work: dict[str, Callable[[], Any]] = {
            name: lambda name=name, run=run, out=out: write(run, name, out / "export")
            for name in names
        }
        work |= {
            "report": lambda run=run: report(run),
            "load": lambda out=out: ws.Evaluation.load(out),
        }
        with monkeypatch.context() as patch:
            for method in ("_problem", "_chunk", "_file"):
                patch.setattr(Store, method, _counted(getattr(Store, method), count))
            for name in names:
                count[0] = 0
                work[name]()
                looks[name].append(count[0])
    assert all(many <= 4.2 * few + 8 for few, many in looks.values()), looks


def _counted(call: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return call(*arguments)

    return counted
