"""The fuzzer itself: what it is there to find, it finds, and the same input is the same bytes."""

import argparse
import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fuzz import run
from fuzz.run import Reader
from wassail.errors import InputError
from wassail.evaluation.store.store import Store


def crash(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def raise_key(path: Path) -> None:
    raise KeyError("x")


def refuse(path: Path) -> None:
    raise InputError("no.")


def burn(path: Path) -> None:
    begun = time.process_time()
    while time.process_time() < begun + 1.2:
        pass


def resident(what: str) -> int:
    """Bytes of this process in memory: ``VmRSS`` all, ``RssFile`` those of mapped files, which
    a fork does not inherit.
    """
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) * 1024


MAPPED = resident("RssFile")


def grow(path: Path) -> None:
    held = bytearray((120 << 20) + MAPPED)
    held[:: 1 << 12] = bytes([1]) * len(held[:: 1 << 12])


def write(folder: Path) -> Path:
    (folder / "file").write_bytes(b"good")
    return folder / "file"


def test_every_end_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reader(use: Any, limits: str = "", weight: float = 1.0) -> Reader:
        return Reader([write], lambda path, rng: None, use, limits, weight)

    readers = {
        "accepted": reader(lambda path: None),
        "refused": reader(refuse),
        "foreign": reader(raise_key),
    }
    readers |= {"signal": reader(crash), "contained": reader(crash, "contained")}
    readers |= {"slow": reader(burn, weight=0.3), "large": reader(grow, weight=0.3)}
    monkeypatch.setattr(run, "READERS", readers)
    monkeypatch.setattr(run, "SECONDS", 1.0)
    monkeypatch.setattr(run, "MEMORY", resident("VmRSS") + (60 << 20))
    monkeypatch.setitem(globals(), "MAPPED", resident("RssFile"))
    monkeypatch.setattr(run, "CORPUS", tmp_path / "corpus")
    for kind in readers:
        folder = tmp_path / "corpus" / kind / "0"
        folder.mkdir(parents=True)
        write(folder)
    options = argparse.Namespace(
        seconds=120.0, seed=1, first=1, count=50, only=None, jobs=1, keep=tmp_path / "kept"
    )
    tallies = run.fuzz(options, tmp_path)
    assert (
        set(tallies) == set(readers)
        and sum(sum(tally.ends.values()) for tally in tallies.values()) == 50
    )
    for kind, tally in tallies.items():
        assert set(tally.ends) == {kind}
    shown = capsys.readouterr().out
    assert "KeyError" in shown and "--seed 1 --first" in shown
    kept = {path.name.split("-")[0] for path in (tmp_path / "kept").iterdir()}
    assert kept == {"signal", "foreign", "slow", "large"}


def test_an_input_is_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CORPUS", tmp_path / "corpus")
    monkeypatch.setattr(
        run,
        "READERS",
        {kind: run.READERS[kind] for kind in ("npz", "cifar pickles", "weights .pt")},
    )
    run.write_corpus(None)

    def files(folder: Path) -> dict[str, Any]:
        folder.mkdir()
        for index in range(12):
            (folder / str(index)).mkdir()
            run.prepare(index, 3, folder / str(index), None)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    first = files(tmp_path / "a")
    assert first == files(tmp_path / "b") and len(first) >= 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CORPUS", folder)
        run.write_corpus("run")
    return folder


def test_forged_runs_have_the_right_checksums(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed run that its checksums give away is refused before anything is read: most must
    get past them.
    """
    monkeypatch.setattr(run, "CORPUS", corpus)
    past = 0
    for index in range(60):
        (tmp_path / str(index)).mkdir()
        _, path, changed = run.prepare(index, 0, tmp_path / str(index), "run")
        with suppress(InputError):
            past += changed and Store.open(path).verify() == []
    assert past >= 20, past


def test_forging_is_not_silently_dead(corpus: Path, tmp_path: Path) -> None:
    folder = run.copy(corpus / "run" / "0" / "run", tmp_path)
    content = json.loads((folder / "config.json").read_text())
    content["config"]["seed"] = 7
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="not as the run wrote it"):
        Store.open(folder)
    assert run.forge(folder) and Store.open(folder).verify() == []
    for unreadable in ("[", '{"config": 1.5}', "[]"):
        (folder / "config.json").write_text(unreadable)
        assert not run.forge(folder)


def test_a_mistake_of_the_fuzzer_is_no_silence(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CORPUS", corpus)

    def gone(folder: Path) -> bool:
        raise AttributeError("a function that is no more")

    monkeypatch.setattr(run, "forge", gone)

    def all_of_them() -> None:
        for index in range(20):
            (tmp_path / str(index)).mkdir()
            run.prepare(index, 0, tmp_path / str(index), "run")

    with pytest.raises(AttributeError, match="no more"):
        all_of_them()


def test_a_fuzzer_that_does_nothing_fails() -> None:
    good = run.Tally(Counter(accepted=40, refused=20), changed=55)
    assert run.idle({"a": good}, ["a"]) == []
    assert run.idle({"a": good}, ["a", "b"]) == ["b"]
    for lazy in (
        run.Tally(Counter(accepted=40, refused=20), changed=3),
        run.Tally(Counter(accepted=60), changed=60),
        run.Tally(Counter(refused=60), changed=60),
        run.Tally(),
    ):
        assert run.idle({"a": lazy}, ["a"]) == ["a"]
