"""Every point at which a command may be stopped, by a kill or by a power cut: run again, it ends in
the same bytes.

One run of the command is watched. Before every open, write, fsync, rename, unlink, mkdir and rmdir
below its folder, and amid every write, the disk is copied as a kill would leave it there, and twice
as a power cut may leave it: what was not flushed is lost in files, and in folders either lost or
kept. The command is then run again on each copy. Equal copies are tried once.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wassail as ws
from wassail.cli import commands
from wassail.errors import InputError
from wassail.evaluation import reading
from wassail.evaluation.store.store import Store
from wassail.evaluation.work import Local
from wassail.report.compare import write_comparison
from wassail.report.export import write
from wassail.report.page import write_report

THREATS = [ws.Threat("inf", order, 0.6) for order in (1, "inf")]
FORMATS = ("samples", "robustbench", "pt", "npz", "png")
Tree = dict[str, bytes | None]  # files by name, None for a folder
CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir")


class Disk:
    """Watches a folder: what is in it, and what of that a power cut would leave."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.points = 0
        self.kinds: dict[str, int] = {}
        self.states: dict[
            str, tuple[int, str, Tree]
        ] = {}  # by content: the first point that leaves it, and how
        self.content: dict[int, bytes] = {}  # of files by inode, when they were last flushed
        self.names: dict[
            int, dict[str, int]
        ] = {}  # of folders by inode, when they were last flushed
        self.held: list[
            int
        ] = []  # open descriptors of everything that was made: no inode is used twice
        self.real = {name: getattr(os, name) for name in CALLS}
        for folder, inner, files in os.walk(root):
            self.names[os.stat(folder).st_ino] = {
                name: os.stat(Path(folder, name)).st_ino for name in [*inner, *files]
            }
            self.content |= {
                os.stat(Path(folder, name)).st_ino: Path(folder, name).read_bytes()
                for name in files
            }

    # States.

    def point(self, kind: str) -> None:
        """The process may stop here."""
        self.points += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        for how, tree in (
            ("killed", self.killed()),
            ("cut, names lost", self.cut(False)),
            ("cut, names kept", self.cut(True)),
        ):
            name = _digest(tree)
            self.states.setdefault(name, (self.points, f"{how} before {kind}", tree))

    def killed(self) -> Tree:
        """All that was written is there."""
        return snapshot(self.root)

    def cut(self, names_kept: bool) -> Tree:
        """What was flushed is there. In folders, what was not flushed is there too, or not."""
        tree: Tree = {}
        self._cut(os.stat(self.root).st_ino, self.root, "", names_kept, tree)
        return tree

    def _cut(self, inode: int, place: Path, prefix: str, kept: bool, tree: Tree) -> None:
        now = (
            {name: os.stat(place / name).st_ino for name in os.listdir(place)}
            if kept
            else self.names.get(inode, {})
        )
        for name, inner in now.items():
            if inner in self.names:
                tree[prefix + name] = None
                self._cut(inner, place / name, f"{prefix}{name}/", kept, tree)
            else:
                tree[prefix + name] = self.content.get(inner, b"")

    # Calls.

    def mine(self, path: Any, folder: int | None) -> bool:
        base = Path(os.readlink(f"/proc/self/fd/{folder}")) if folder is not None else Path.cwd()
        return (base / os.fspath(path)).is_relative_to(self.root)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not self.mine(path, dir_fd):
            return self.real["open"](path, flags, mode, dir_fd=dir_fd)
        self.point("open")
        number = self.real["open"](path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT and os.fstat(number).st_ino not in self.content:
            self.held.append(os.dup(number))
            self.content[os.fstat(number).st_ino] = b""
        return number

    def write(self, number: int, data: Any) -> int:
        if not self._below(number):
            return self.real["write"](number, data)
        self.point("write")
        done = self.real["write"](number, data[: len(data) // 2])
        if done:
            self.point("half of a write")
        return done + self.real["write"](number, data[done:])

    def fsync(self, number: int) -> None:
        if not self._below(number):
            return
        self.point("fsync")
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            place = Path(os.readlink(f"/proc/self/fd/{number}"))
            self.names[status.st_ino] = {
                name: os.stat(place / name).st_ino for name in os.listdir(place)
            }
        else:
            self.content[status.st_ino] = Path(f"/proc/self/fd/{number}").read_bytes()

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if self.mine(path, dir_fd):
            self.point("mkdir")
        self.real["mkdir"](path, mode, dir_fd=dir_fd)
        if self.mine(path, dir_fd):
            self.names[os.stat(path, dir_fd=dir_fd).st_ino] = {}

    def replace(self, old: Any, new: Any, **how: Any) -> None:
        if self.mine(old, how.get("src_dir_fd")):
            self.point("rename")
        self.real["replace"](old, new, **how)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        if self.mine(path, dir_fd):
            self.point("unlink")
        self.real["unlink"](path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        if self.mine(path, dir_fd):
            self.point("rmdir")
        self.real["rmdir"](path, dir_fd=dir_fd)

    def _below(self, number: int) -> bool:
        return Path(os.readlink(f"/proc/self/fd/{number}")).is_relative_to(self.root)


def snapshot(root: Path) -> Tree:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def lay_out(tree: Tree, root: Path) -> None:
    root.mkdir(parents=True)
    for name in sorted(tree):
        if tree[name] is None:
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(tree[name] or b"")


def _digest(tree: Tree) -> str:
    """Of the log only whether its last line is torn: what it says plays no part."""
    found = hashlib.sha256()
    for name in sorted(tree):
        content = tree[name]
        if name.endswith("log/events.jsonl") and content:
            content = content[-1:]
        found.update(repr((name, content)).encode())
    return found.hexdigest()


@contextlib.contextmanager
def watched(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(root)
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, getattr(disk, name))
        patch.setattr(os, "supports_dir_fd", os.supports_dir_fd)
        yield disk
    for number in disk.held:
        os.close(number)


# The commands.


class Once(Local):
    """Does each task once in the life of this module: what is tried here is the disk."""

    known: dict[Any, Any] = {}  # noqa: RUF012

    def run(self, worker: Any, tasks: Any, tick: Any) -> Iterator[Any]:
        for task in tasks:
            place = task.place
            key = (type(task), place.key, place.chunk, len(worker.settings.attacks))
            if key not in self.known:
                self.known[key] = worker.run(task)
            yield task, self.known[key], 0.0


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    return x, network()(x).argmax(1)


def evaluate(run: Path, attacks: tuple[str, ...] = ("fgsm",), **more: Any) -> ws.Evaluation:
    return ws.evaluate(
        network(),
        samples(),
        THREATS,
        attacks,
        out=run,
        chunk=2,
        look=False,
        runner=Once(),
        certify="crown",
        **more,
    )


def pages(run: Path) -> None:
    commands._write_pages(ws.Evaluation.load(run), run)


def export(run: Path) -> None:
    (run / "export").mkdir(exist_ok=True)
    for name in FORMATS:
        if (
            name != "png" or not (run / "export/png").exists()
        ):  # a folder that is there is whole, and refused
            write(ws.Evaluation.load(run), name, run / "export", network(), "cifar10")


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "evaluate": lambda run: evaluate(run, resume=True),
    "add-attack": lambda run: evaluate(run, ("fgsm", "deepfool"), resume=True, add=True),
    "report": pages,
    "export": export,
    "compare": lambda run: write_comparison([ws.Evaluation.load(run)] * 2, run / "compare.html"),
    "report over an older one": lambda run: write_report(ws.Evaluation.load(run), run / "old.html"),
}


LARGE = {
    "evaluate": 12,
    "add-attack": 12,
    "export": 6,
}  # those with many points: of these every so-many-th here, all if slow


def results(run: Path) -> Tree:
    """All files of a run but its log; a leftover of an unfinished write counts."""
    return {
        name: content
        for name, content in snapshot(run).items()
        if not name.startswith("log") and content is not None
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("finished") / "run"
    evaluate(run)
    return run


def tried(
    name: str, finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> tuple[Disk, int]:
    """The command once with all points, and again on every so-many-th of the disks they leave."""
    monkeypatch.setattr(
        reading, "guaranteed_interval", lambda *_, **__: (0.0, 1.0)
    )  # arithmetic, and most of the time
    command = COMMANDS[name]
    root = place / "disk"
    root.mkdir()
    if name != "evaluate":
        shutil.copytree(finished, root / "run")
        (root / "run/old.html").write_text("an older page")
    with watched(root, monkeypatch) as disk:
        command(root / "run")
    whole = results(root / "run")
    monkeypatch.setattr(os, "fsync", lambda number: None)
    states = list(disk.states.values())[::every]
    for k, (point, how, tree) in enumerate(states):
        again = place / f"again-{k}"
        lay_out(tree, again)
        old = tree.get("run/old.html")
        assert name == "evaluate" or old in (b"an older page", whole["old.html"]), (
            f"point {point}, {how}"
        )
        command(again / "run")
        assert results(again / "run") == whole, f"point {point}, {how}"
        assert Store.open(again / "run").verify() == []
        shutil.rmtree(again)
    return disk, len(states)


@pytest.mark.slow_cases("add-attack", "export", "report")
@pytest.mark.parametrize("name", COMMANDS)
def test_some_points_of_every_command(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, states = tried(name, finished, tmp_path, monkeypatch, every=LARGE.get(name, 1))
    assert disk.points >= 9 and states > 2
    assert {"open", "write", "half of a write", "fsync", "rename"} <= set(disk.kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_point_of_every_command(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, states = tried(name, finished, tmp_path, monkeypatch, every=1)
    print(
        f"\n| `{name}` | {disk.points} | "
        f"{', '.join(f'{n} {k}' for k, n in sorted(disk.kinds.items()))} | {states} |"
    )


def test_the_shim_finds_a_writer_that_does_not_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the test: a rename before the flush leaves an empty file in the place after a
    power cut.
    """
    (tmp_path / "disk").mkdir()
    with watched(tmp_path / "disk", monkeypatch) as disk:
        number = os.open(tmp_path / "disk/new", os.O_WRONLY | os.O_CREAT)
        os.write(number, b"text")
        os.replace(tmp_path / "disk/new", tmp_path / "disk/page")
        disk.point("end")
        os.fsync(number)
        disk.point("end")
        os.close(number)
        folder = os.open(tmp_path / "disk", os.O_RDONLY)
        os.fsync(folder)
        disk.point("end")
        os.close(folder)
    trees = [tree for _, _, tree in disk.states.values()]
    assert trees == [
        {},
        {"new": b""},
        {"new": b"te"},
        {"new": b"text"},
        {"page": b"text"},
        {"page": b""},
    ]


def test_a_png_folder_is_whole_or_refused(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    export(run)
    with pytest.raises(InputError, match="is not empty"):
        write(ws.Evaluation.load(run), "png", run / "export", network())
