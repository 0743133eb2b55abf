"""Forged packs: the digests fit, and something in the pack is not true.

`PACKS` are the forgeries, by name: what changes a good pack in place. `FORGED_RUNS` are those of
`support.forged` that make a run false: the pack around such a run is written anew, so that every
page and figure in it follows from the forged run. `HOSTILE` are zip files that a reader must not
unpack, and `REWRITTEN` what makes the zip file of a good pack say more than the pack.
"""

import hashlib
import io
import json
import shutil
import stat
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.forged import RUNS, configured, good_run
from wassail.errors import InputError
from wassail.evaluation.run import Evaluation
from wassail.evaluation.sealing import SEAL, sealed
from wassail.evaluation.store.encoding import checksum
from wassail.evidence import pack
from wassail.evidence.statement import Statement

Change = Callable[[Path], Any]
WORDS = Statement(
    "sorts points of the plane",
    "drawn uniformly with seed 1",
    "a twentieth of the box",
    "the side of the square",
    ("points outside the unit square were not looked at",),
    ("accuracy>=0.2 at eps 0.05 order inf proved",),
)


def good_pack(folder: Path) -> Path:
    """A pack of the plane's network, with later samples."""
    folder.mkdir(parents=True, exist_ok=True)
    good_run(folder / "run")
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(7))
    pack.write_pack(folder, WORDS, (x, torch.arange(30) % 3))
    return folder


def resealed(place: Path) -> None:
    """A seal that fits, whatever is there; none where the run cannot be read."""
    with suppress(InputError):
        run = Evaluation.load(place / "run")
        (place / SEAL).write_text(sealed(pack.claim_of(place, run)))


def in_record(change: Callable[[dict[str, Any]], Any]) -> Change:
    """A forgery of `evidence.json`, sealed anew; the page is left as it was."""

    def forge(place: Path) -> None:
        path = place / pack.RECORD
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record, indent=1))
        resealed(place)

    return forge


def in_record_and_page(change: Callable[[dict[str, Any]], Any]) -> Change:
    """The same, and the page follows from the forged record."""

    def forge(place: Path) -> None:
        in_record(change)(place)
        record = json.loads((place / pack.RECORD).read_text())
        run = Evaluation.load(place / "run")
        (place / pack.PAGE).write_text(pack.page(record, run))
        resealed(place)

    return forge


def in_text(name: str, old: str, new: str) -> Change:
    def forge(place: Path) -> None:
        text = (place / name).read_text()
        assert old in text, (name, old)
        (place / name).write_text(text.replace(old, new))
        resealed(place)

    return forge


def in_results(name: str, old: str, new: str) -> Change:
    """The same below `run/results`, with its checksum."""

    def forge(place: Path) -> None:
        path = place / "run/results" / name
        text = path.read_text()
        assert old in text, (name, old)
        path.write_text(text.replace(old, new, 1))
        manifest = path.with_name("manifest.json")
        content = json.loads(manifest.read_text())
        content["files"][name] = checksum(path)
        manifest.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        resealed(place)

    return forge


def figure(kind: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        mine = [one for one in record["figures"] if one["kind"] == kind]
        assert mine, kind
        mine[0].update(values)

    return change


def without_figures(kind: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        record["figures"] = [one for one in record["figures"] if one["kind"] != kind]

    return change


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        inner: Any = record
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def covered(record: dict[str, Any]) -> None:
    for line in record["clauses"]:
        line["answer"] = "clean"


def beside(name: str, data: bytes = b"x") -> Change:
    def forge(place: Path) -> None:
        (place / name).write_bytes(data)
        resealed(place)

    return forge


def without(name: str) -> Change:
    def forge(place: Path) -> None:
        (place / name).unlink()
        resealed(place)

    return forge


def in_bytes(name: str, before: bytes) -> Change:
    def forge(place: Path) -> None:
        (place / name).write_bytes(before + (place / name).read_bytes())
        resealed(place)

    return forge


def unsealed(name: str) -> Change:
    """A change after which the seal was not made again."""

    def forge(place: Path) -> None:
        path = place / name
        path.write_bytes(path.read_bytes() + b" ")

    return forge


def other_seal(change: Callable[[dict[str, Any]], Any]) -> Change:
    def forge(place: Path) -> None:
        path = place / SEAL
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return forge


def nearer_shift(place: Path) -> None:
    """Later samples that are those of the pack: the page keeps the old sentence."""
    run = Evaluation.load(place / "run")
    x, _ = run.images(range(len(run)))
    np.savez(place / pack.SHIFT, x=x.numpy(), y=run.y.numpy())
    resealed(place)


def around(change: Change) -> Change:
    """A forged run with a pack that follows from it."""

    def forge(place: Path) -> None:
        change(place / "run")
        pack._tidy(place / "run")
        words = pack.statement_of(place)
        run = Evaluation.load(place / "run")
        pack.write_report(run, place / "run" / "report.html")
        has_model = (place / pack.MODEL).exists()
        for name, text in pack.texts(run, words, pack.measured(place, run), has_model).items():
            (place / name).write_text(text)
        resealed(place)

    return forge


def more_arrays(place: Path) -> None:
    """Later samples with something beside them."""
    with np.load(place / pack.SHIFT) as kept:
        np.savez(place / pack.SHIFT, x=kept["x"], y=kept["y"], approved=kept["y"])
    resealed(place)


def another_model(place: Path) -> None:
    """Another file as the model of the pack, which the configuration names."""
    data = b"another model"
    (place / pack.MODEL).write_bytes(data)
    files = {"net.onnx": hashlib.sha256(data).hexdigest()}
    around(configured("model", "files", value=files))(place)


def linked(place: Path) -> None:
    shutil.copy(place / pack.PAGE, place.parent / "outside.html")
    (place / pack.PAGE).unlink()
    (place / pack.PAGE).symlink_to(place.parent / "outside.html")


# Those that need no proof: fast.
PACKS: dict[str, Change] = {
    "a certified figure": in_record(figure("certified", least=0.99)),
    "a certified figure, page too": in_record_and_page(figure("certified", least=0.99)),
    "a certified sentence": in_record_and_page(figure("certified", sentence="99 % are proved.")),
    "a certified figure, a little": in_record_and_page(figure("certified", least=0.333334)),
    "an attacked figure": in_record_and_page(figure("attacked", most=1.0)),
    "a figure of the population": in_record_and_page(figure("population", least=0.9)),
    "a confidence": in_record_and_page(figure("population", confidence=0.999)),
    "a subpopulation": in_record_and_page(figure("subpopulation", least=0.9)),
    "a class": in_record_and_page(figure("class", least=1.0, most=1.0)),
    "a class left out": in_record_and_page(without_figures("class")),
    "a known shift": in_record_and_page(figure("landmark", least=1.0)),
    "a known shift left out": in_record_and_page(without_figures("landmark")),
    "a requirement that holds": in_record_and_page(figure("requirement", sentence="holds: all.")),
    "another number of samples": in_record_and_page(figure("clean", samples=10_000)),
    "the headline": in_record_and_page(put("headline", value="99 % stay correct.")),
    "all clauses covered": in_record_and_page(covered),
    "no notice": in_record_and_page(put("notice", value="This pack is conformity.")),
    "no limits": in_record_and_page(put("limits", value=[])),
    "nothing unchecked": in_record_and_page(put("not_checked", value=[])),
    "checked by others": in_record_and_page(
        lambda record: record["checked"].append(
            {"level": "ok", "text": "Verified by a laboratory.", "command": "verify"}
        )
    ),
    "another question": in_record_and_page(put("question", "meaning", value="All may move.")),
    "another reason": in_record_and_page(
        put("question", "why", value=[{"kind": "measured shift", "sentence": "eps 0.01"}])
    ),
    "other digests of the data": in_record_and_page(put("data", "files", value={"d": "ab" * 32})),
    "more samples": in_record_and_page(put("data", "samples", value=100_000)),
    "other weights": in_record_and_page(put("model", "weights", value="ab" * 32)),
    "other versions in the record": in_record_and_page(
        put("environment", "versions", value={"wassail": "9.9"})
    ),
    "another command": in_record_and_page(put("commands", "verify", "words", value="rm -rf PACK")),
    "a model that is not there": in_record_and_page(put("included_model", value="model.onnx")),
    "the evaluation inside": in_record_and_page(put("evaluation", "headline", value="99 %")),
    "words that the record does not follow": in_record(
        put("statement", "why", value="ISO says so")
    ),
    "a requirement that was easier": in_record(
        put("statement", "require", value=["accuracy>=0.9 at eps 0.05 order inf proved"])
    ),
    "the page alone": in_text("evidence.html", "not conformity", "conformity"),
    "a figure of the page": in_text("evidence.html", "Between", "At least 99.99 % and"),
    "the settings": in_text("settings.toml", 'eps = ["0.05"]', 'eps = ["0.5"]'),
    "the page of the run": in_text("run/report.html", "Between", "At least 99.99 % and"),
    "other later samples": nearer_shift,
    "no later samples": without("shift.npz"),
    "no page": without("evidence.html"),
    "no settings": without("settings.toml"),
    "a file beside it": beside("approval.pdf"),
    "a file in the run": beside("run/notes.txt"),
    "a model that is none": beside("model.onnx"),
    "a changed page": unsealed("evidence.html"),
    "a changed record": unsealed("evidence.json"),
    "a changed result": unsealed("run/results/landmarks.json"),
    "another digest in the seal": other_seal(lambda seal: seal.update(digest="0" * 64)),
    "a signature that is none": other_seal(
        lambda seal: seal.update(signature={"algorithm": "ed25519", "key": "AAAA", "value": "AAAA"})
    ),
    "a seal of another kind": other_seal(lambda seal: seal["claim"].update(kind="evaluation")),
    "no seal": lambda place: (place / SEAL).unlink(),
    "a link": linked,
    "a name twice in the record": in_text(
        "evidence.json", '{\n "schema"', '{\n "headline": "99 %",\n "schema"'
    ),
    "a name twice in the configuration": in_text(
        "run/config.json", '{\n "config"', '{\n "format": "2",\n "config"'
    ),
    "more than a configuration": in_text(
        "run/config.json", '{\n "config"', '{\n "approved": true,\n "config"'
    ),
    "a name twice in the summary": in_results("summary.json", '"clean":', '"clean": 1, "clean":'),
    "a name twice in a known shift": in_results(
        "landmarks.json", '"accuracy":', '"accuracy": 1, "accuracy":'
    ),
    "more than a known shift": in_results(
        "landmarks.json", '"accuracy":', '"approved": true, "accuracy":'
    ),
    "a name twice in the manifest": in_text(
        "run/results/manifest.json", '"format"', '"format": 2, "format"'
    ),
    "more than a manifest": in_text(
        "run/results/manifest.json", '"format"', '"approved": true, "format"'
    ),
    "a name twice in the seal": lambda place: (place / SEAL).write_text(
        (place / SEAL).read_text().replace('"digest"', '"digest": "ab", "digest"')
    ),
    "more than a seal": other_seal(lambda seal: seal.update(approved="by a laboratory")),
    "a name that begins as another": beside("run/report.html.pdf"),
    "another that does": beside("run/config.json.html"),
    "a file among the results": beside("run/results/clean/approved.html"),
    "a folder of nothing": lambda place: (place / "APPROVED").mkdir(),
    "later samples and more": more_arrays,
    "later samples after other bytes": in_bytes("shift.npz", b"%PDF"),
    "a clause that nothing answers": in_record_and_page(
        lambda record: next(
            line for line in record["clauses"] if line["answer"] == "not covered"
        ).update(answer="clean")
    ),
    "a bound 0.1 % higher": in_record_and_page(
        lambda record: [
            one.update(least=1.001 * one["least"]) for one in record["figures"] if one["least"]
        ]
    ),
    "a limit left out": in_record_and_page(lambda record: record["limits"].pop()),
    "no number": in_text("evidence.json", '"confidence": null', '"confidence": NaN'),
    "a number without end": in_text("evidence.json", '"confidence": null', '"confidence": 1e999'),
    "a number of 5,000 digits": in_text(
        "evidence.json", '"confidence": null', f'"confidence": {"9" * 5000}'
    ),
    "a comment in the page": in_text("evidence.html", "</body>", "</body><!-- approved -->"),
}
# Forged runs, which the pack around them follows.
FORGED_RUNS: dict[str, Change] = {
    f"{name}, in a pack": around(change)
    for name, (change, expected) in RUNS.items()
    if expected in ("false", "refused")
}


# ---- Zip files that are no packs


def archive(
    *entries: tuple[str, bytes], compress: int = zipfile.ZIP_STORED, mode: int = 0
) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, data in entries:
            about = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            about.external_attr = mode << 16
            about.compress_type = compress
            file.writestr(about, data)
    return made.getvalue()


def overlapping() -> bytes:
    """Two names for the same bytes: the sum of the sizes is more than the file has."""
    data = bytearray(archive(*((f"f{k}", b"x" * 4000) for k in range(2))))
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    for place in (first, second):
        for offset in (20, 24):
            data[place + offset : place + offset + 4] = (1 << 30).to_bytes(4, "little")
    return bytes(data)


HOSTILE: dict[str, bytes] = {
    "a bomb": archive(("evidence.json", b"0" * 50_000_000), compress=zipfile.ZIP_DEFLATED),
    "a path that climbs": archive(("../escaped.txt", b"x")),
    "a path that climbs later": archive(("run/../../escaped.txt", b"x")),
    "an absolute path": archive(("/tmp/escaped.txt", b"x")),
    "a path of Windows": archive(("..\\escaped.txt", b"x")),
    "a drive": archive(("C:escaped.txt", b"x")),
    "a link": archive(("evidence.json", b"/etc/passwd"), mode=stat.S_IFLNK | 0o777),
    "a device": archive(("evidence.json", b""), mode=stat.S_IFCHR | 0o666),
    "a folder": archive(("run/", b"")),
    "sizes that lie": overlapping(),
    "no zip at all": b"PK\x03\x04 nothing",
    "empty": b"",
}


# ---- Zip files of a good pack that say more than the pack


def commented(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"approved by a laboratory"


def commented_parts(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        parts = [(entry.filename, file.read(entry)) for entry in file.infolist()]
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts:
            entry = zipfile.ZipInfo(name, pack.DATE)
            entry.comment = b"approved"
            file.writestr(entry, data)


def hidden_part(path: Path) -> None:
    """A page before all parts, which only programs see that read from the start."""
    made = archive(("evidence.html", b"99 % are proved."))
    path.write_bytes(made[: made.index(b"PK\x01\x02")] + path.read_bytes())


def added(name: str) -> Change:
    def change(path: Path) -> None:
        with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
            warnings.simplefilter("ignore")  # of a name that is there already
            file.writestr(name, "99 % are proved.")

    return change


REWRITTEN: dict[str, Change] = {
    "a comment": commented,
    "comments of parts": commented_parts,
    "bytes before it": lambda path: path.write_bytes(b"%PDF-1.7" + path.read_bytes()),
    "bytes after it": lambda path: path.write_bytes(path.read_bytes() + b"approved"),
    "a hidden part": hidden_part,
    "a part twice": added("evidence.html"),
    "a part in capitals": added("EVIDENCE.html"),
    "other times": lambda path: path.write_bytes(
        path.read_bytes().replace(b"\x00\x00\x21\x00", b"\x00\x00\x22\x00")
    ),
}
