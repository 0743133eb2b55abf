"""The run store: what is written comes back, what is damaged is found, what is foreign is
refused, and nothing is ever lost.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wassail.errors import InputError
from wassail.evaluation.store import encoding
from wassail.evaluation.store.store import Store

CONFIG: dict[str, Any] = {
    "eps": 0.03,
    "seed": 0,
    "model": {"name": "net.onnx", "sha256": "ab" * 32},
    "attacks": {"wda": {}, "nearest": {"passes": 100}},
    "threats": [{"order": 1, "eps": 8 / 255}, {"order": math.inf, "eps": 8 / 255}],
    "command": "wassail evaluate net.onnx",
}
TENSORS = {
    "distances": torch.tensor([0.5, math.inf, 0.0], dtype=torch.float64),
    "labels": torch.tensor([3, 1, 2]),
}
FIELDS = {"forwards": 12, "best": math.inf}
FILE = "results/wda/000000.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "run", CONFIG) as store:
        store.put("wda", 0, TENSORS, FIELDS)
        yield store


def changed(**values: Any) -> dict[str, Any]:
    return {**CONFIG, **values}


def state(path: Path) -> tuple[int, ...]:
    """What changes when a file is written, and not when it is read."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def in_child(work: Callable[[], str]) -> tuple[str, int]:
    """What `work` returned in a process of its own, and how that ended."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of a fork beside threads: the child uses none
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    return text, os.waitpid(child, 0)[1]


# What is written comes back.


def test_every_type_and_shape_comes_back(run: Store) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, generator=generator) * 50
    dtypes = [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    ]
    tensors = {name: values.to(getattr(torch, name)) for name in dtypes}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 150_528),
        "turned": values.T,
        "parameter": values.requires_grad_(),
    }
    run.put("types", 7, tensors, {})
    found, _ = run.get("types", 7)
    assert set(found) == set(tensors)
    assert all(
        torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype
        for name in tensors
    )
    with Store.open(run.folder) as reader:
        assert reader.has(
            "types", 7
        )  # the checksum agrees with what another reader of the file sees
    plain = load_file(run.folder / "results/types/000007.safetensors")
    assert all(torch.equal(plain[name], tensors[name]) for name in tensors)


def test_fields_come_back_with_their_infinities(run: Store) -> None:
    fields = {
        "inf": math.inf,
        "low": -math.inf,
        "pair": (1, math.inf),
        "deep": [{"x": [-math.inf, 0.1, -0.0]}],
        "none": None,
        "yes": True,
        "text": "κ \x1f \udcff </script>",
        "numpy": np.float32(0.5),
        "count": np.int64(3),
        "float": "inf",
    }
    run.put("fields", 0, {}, {**fields, "nan": math.nan})
    _, found = run.get("fields", 0)
    assert math.isnan(found.pop("nan"))
    assert found == {**fields, "pair": [1, math.inf]}
    assert (
        math.copysign(1, found["deep"][0]["x"][2]) == -1
        and type(found["count"]) is int
        and found["yes"] is True
    )
    assert "Infinity" not in (run.folder / "results/fields/000000.safetensors").read_bytes().decode(
        "latin-1"
    )


@pytest.mark.parametrize(
    "value", [torch.tensor(1.0), {1: 2}, {"float": "nan"}, b"x", {1, 2}], ids=str
)
def test_fields_that_json_cannot_hold_are_refused(run: Store, value: Any) -> None:
    with pytest.raises(InputError, match=r"fields\.a\[0\] cannot be stored"):
        run.put("fields", 0, {}, {"a": [value]})
    assert not run.has("fields", 0)


def test_tensors_that_the_format_cannot_hold_are_refused(run: Store) -> None:
    with pytest.raises(InputError, match=r"tensor 'z' of type torch.complex64 cannot be stored"):
        run.put("wda", 1, {"z": torch.zeros(1, dtype=torch.complex64)}, {})


def test_some_tensors_and_some_rows(run: Store) -> None:
    points = torch.arange(24.0).reshape(4, 2, 3)
    run.put("wda", 1, {"points": points, "index": torch.arange(4)}, {})
    tensors, _ = run.get("wda", 1, ["index"])
    assert list(tensors) == ["index"]
    assert torch.equal(run.rows("wda", 1, "points", [3, 0, 3]), points[[3, 0, 3]])
    assert run.rows("wda", 1, "points", []).shape == (0, 2, 3)
    with pytest.raises(InputError, match="no tensor 'radii' in the chunk: it has index, points"):
        run.get("wda", 1, ["radii"])
    for row in (4, -1):
        with pytest.raises(InputError, match=f"has 4 rows: there is no row {row}"):
            run.rows("wda", 1, "points", [0, row])


def test_the_bytes_depend_on_the_content_alone(run: Store, tmp_path: Path) -> None:
    other = changed(attacks={"wda": {}}, command="another")
    with Store.create(tmp_path / "other", other) as store:
        store.put("wda", 0, dict(reversed(TENSORS.items())), dict(reversed(FIELDS.items())))
    assert (tmp_path / "other" / FILE).read_bytes() == (run.folder / FILE).read_bytes()
    assert sorted(path.name for path in (run.folder / "results/wda").iterdir()) == [
        "000000.safetensors"
    ]


def test_tensors_begin_at_a_multiple_of_their_elements(run: Store) -> None:
    run.put(
        "mixed",
        0,
        {
            "a": torch.ones(3, dtype=torch.uint8),
            "b": torch.ones(5),
            "c": torch.ones(1, dtype=torch.float64),
        },
        {},
    )
    data = (run.folder / "results/mixed/000000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and list(header["__metadata__"]) == [
        "chunk",
        "fields",
        "format",
        "run",
        "sha256",
        "unit",
    ]
    assert {name: header[name]["data_offsets"] for name in "abc"} == {
        "c": [0, 8],
        "b": [8, 28],
        "a": [28, 31],
    }


def test_a_run_is_read_without_wassail(run: Store) -> None:
    with safe_open(run.folder / FILE, "np") as file:
        distances = file.get_tensor("distances")
        fields = json.loads(file.metadata()["fields"])
    assert distances.tolist() == [0.5, math.inf, 0.0]
    assert fields == {"best": {"float": "inf"}, "forwards": 12}


def test_the_store_only_grows(run: Store) -> None:
    before = state(run.folder / FILE)
    run.put("wda", 0, TENSORS, FIELDS)
    assert state(run.folder / FILE) == before
    with pytest.raises(
        InputError,
        match=r"chunk 0 of 'wda' is in .* already and was computed differently this time",
    ):
        run.put("wda", 0, {**TENSORS, "labels": torch.tensor([3, 1, 1])}, FIELDS)
    assert state(run.folder / FILE) == before
    run.put("wda", 12, TENSORS, FIELDS)
    assert [run.has("wda", chunk) for chunk in (0, 1, 12)] == [True, False, True]
    assert not run.has("nothing", 0)


def test_texts_and_events(run: Store) -> None:
    assert run.read("summary.json") is None
    run.write("summary.json", "{}\n")
    before = state(run.folder / "results/summary.json")
    run.write("summary.json", "{}\n")
    assert (
        run.read("summary.json") == "{}\n" and state(run.folder / "results/summary.json") == before
    )
    run.write("summary.json", "caf\udce9\n")
    assert run.read("summary.json") == "caf\udce9\n"
    run.log({"event": "chunk", "seconds": math.inf})
    with (run.folder / "log/events.jsonl").open("a") as file:
        file.write('{"event": "to')  # killed here
    run.log({"event": "later"})
    events = run.events()
    assert [event["event"] for event in events] == ["created", "chunk", "later"]
    assert events[1]["seconds"] == math.inf and events[1]["time"].startswith("20")
    with pytest.raises(InputError, match=r"cannot be called 'a\.tmp'"):
        run.write("a.tmp", "")


# What is damaged is found.


def test_every_flipped_bit_is_found(run: Store) -> None:
    path = run.folder / FILE
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        assert not Store.open(run.folder).has("wda", 0), f"bit {place % 8} of byte {place}"
    path.write_bytes(good)
    assert Store.open(run.folder).has("wda", 0)


def test_every_other_length_is_found(run: Store) -> None:
    path = run.folder / FILE
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert not Store.open(run.folder).has("wda", 0), f"cut to {length} bytes"
    path.write_bytes(good + b"\0")
    assert not Store.open(run.folder).has("wda", 0)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _other_writer(path: Path) -> None:
    save_file(TENSORS, path, metadata={"fields": "{}"})


def _other_run(path: Path) -> None:
    with Store.create(path.parents[3] / "foreign", changed(eps=0.04)) as store:
        store.put("wda", 0, TENSORS, FIELDS)
    shutil.copy(path.parents[3] / "foreign" / FILE, path)


def _other_place(path: Path) -> None:
    with Store.create(path.parents[3] / "foreign", CONFIG) as store:
        store.put("wda", 1, TENSORS, FIELDS)
    shutil.copy(path.parents[3] / "foreign/results/wda/000001.safetensors", path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [
    (_flip, "its checksum is wrong"),
    (lambda path: path.write_bytes(b""), "cut short"),
    (_other_writer, "not one of ours"),
    (_other_run, "belongs to another run or place"),
    (_other_place, "belongs to another run or place"),
    (_pipe, "no regular file"),
    (_folder, "no regular file"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGE, ids=[problem for _, problem in DAMAGE])
def test_damage_is_refused_set_aside_and_repaired(
    run: Store, damage: Callable[[Path], Any], problem: str
) -> None:
    path = run.folder / FILE
    good = path.read_bytes()
    damage(path)
    reader = Store.open(run.folder)
    for use in (lambda: reader.get("wda", 0), lambda: reader.rows("wda", 0, "labels", [0])):
        with pytest.raises(
            InputError,
            match=rf"^chunk 0 of 'wda' in '.*' .*{problem}.*: compute it again with --resume\.$",
        ):
            use()
    assert not reader.has("wda", 0) and path.exists()  # a reader leaves it alone
    run.close()
    with Store.resume(run.folder, CONFIG) as store:
        assert not store.has("wda", 0) and not path.exists()
        assert problem in store.events()[-1]["problem"]
        store.put("wda", 0, TENSORS, FIELDS)
        assert path.read_bytes() == good
    _flip(path)
    bad = path.read_bytes()
    with Store.resume(run.folder, CONFIG) as store:
        store.put("wda", 0, TENSORS, FIELDS)  # a damaged file does not stand in the way
    assert path.read_bytes() == good
    names = [f"wda@000000-{number}.safetensors" for number in range(2)]
    assert sorted(os.listdir(run.folder / "log/corrupt")) == names
    assert (run.folder / "log/corrupt" / names[1]).read_bytes() == bad


def test_a_missing_chunk_is_said_to_be_missing(run: Store) -> None:
    assert not run.has("wda", 1) and not (run.folder / "log/corrupt").exists()
    with pytest.raises(
        InputError, match=r"chunk 1 of 'wda' in .* is missing: compute it again with --resume"
    ):
        run.get("wda", 1)


def _headed(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        (1 << 62).to_bytes(8, "little") + b"{}",
        _headed(
            {
                "__metadata__": {},
                "x": {"dtype": "F64", "shape": [1 << 50], "data_offsets": [0, 8 << 50]},
            }
        ),
        _headed(
            {"__metadata__": {}, "x": {"dtype": "F64", "shape": [-1], "data_offsets": [0, -8]}}
        ),
        _headed(
            {"__metadata__": {}, "x": {"dtype": ["F64"], "shape": "", "data_offsets": [0, 8]}},
            b"12345678",
        ),
        _headed({"__metadata__": {"fields": 3}}),
        _headed({"__metadata__": []}),
        _headed([]),
        _headed(b"[" * 100_000),
        _headed(b'{"__metadata__":{},"x":NaN}'),
        _headed(b"{" + b'"x":1,' * 10 + b'"x":' + b"9" * 5000 + b"}"),
        b"\x80\x04cos\nsystem\n(S'false'\ntR.",
    ],
    ids=lambda content: repr(content[8:40]),
)
def test_hostile_chunks_are_damaged_chunks(run: Store, content: bytes) -> None:
    (run.folder / FILE).write_bytes(content)
    reader = Store.open(run.folder)
    assert not reader.has("wda", 0)
    with pytest.raises(InputError, match="is damaged"):
        reader.get("wda", 0)


@pytest.mark.parametrize(
    "shape", [[-1], [-1, -1], [True], "", [1, 1 << 48, 0], [1] * 17, [0, 1 << 40, 1 << 40]], ids=str
)
def test_shapes_that_no_tensor_has(run: Store, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with the right checksum: whoever sends a run can compute one."""
    header = encoding.header_of
    monkeypatch.setattr(
        encoding, "header_of", lambda layout, metadata: header([("x", "U8", shape)], metadata)
    )
    monkeypatch.setattr(encoding, "_sorted", lambda layout: [("x", "U8", [])])
    run.put("hostile", 0, {"x": torch.zeros(abs(math.prod(shape)), dtype=torch.uint8)}, {})
    monkeypatch.undo()
    reader = Store.open(run.folder)
    assert not reader.has("hostile", 0)
    with pytest.raises(InputError, match="is damaged"):
        reader.get("hostile", 0)


def test_the_manifest(run: Store) -> None:
    assert run.verify() == ["results/manifest.json is missing: the run is not finished."]
    run.write("summary.json", "{}")
    (run.folder / "results/.DS_Store").touch()
    run.seal()
    manifest = json.loads(run.read("manifest.json") or "")
    assert list(manifest["files"]) == ["summary.json", "wda/000000.safetensors"]
    assert manifest["files"]["summary.json"] == {
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "size": 2,
    }
    assert run.verify() == ["results/ has a file '.DS_Store' that the manifest has not."]
    (run.folder / "results/.DS_Store").unlink()
    assert run.verify() == [] == Store.open(run.folder).verify()
    run.put("wda", 1, TENSORS, FIELDS)
    (run.folder / "results/summary.json").unlink()
    _flip(run.folder / FILE)
    assert Store.open(run.folder).verify() == [
        "results/ has no file 'summary.json'.",
        "results/ has a file 'wda/000001.safetensors' that the manifest has not.",
        "results/wda/000000.safetensors is not the file of which the manifest has the checksum.",
    ]
    (run.folder / "results/wda/000001.safetensors").unlink()
    run.write("summary.json", "{}")
    run.seal()  # of a damaged chunk: the file is what the manifest says, and yet no chunk
    assert Store.open(run.folder).verify() == [
        "results/wda/000000.safetensors is damaged (its checksum is wrong)."
    ]
    for text in ("[]", '{"files": 3}', "{", '{"files": {"../../x": 1, "summary.json": NaN}}'):
        run.write("manifest.json", text)
        assert run.verify() == ["results/manifest.json is not a manifest."]
    run.write("manifest.json", '{"files": {"../../x": 1, "summary.json": {}}}')
    assert "results/ has no file '../../x'." in run.verify()


# What is foreign is refused.


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc",
        "a/../b",
        "",
        "a//b",
        ".hidden",
        "A",
        "a b",
        "a\n",
        "x" * 101,
        "<b>",
        "a\\b",
        "a/",
    ],
)
def test_names_that_lead_elsewhere_are_refused(run: Store, name: str) -> None:
    for use in (
        lambda: run.has(name, 0),
        lambda: run.get(name, 0),
        lambda: run.put(name, 0, {}, {}),
        lambda: run.rows(name, 0, "x", []),
        lambda: run.read(name),
        lambda: run.write(name, ""),
    ):
        with pytest.raises(InputError, match="is no name of a result"):
            use()
    with pytest.raises(InputError, match="chunk -1 of 'wda' is out of range"):
        run.has("wda", -1)
    assert not run.has("attack@wda++@inf@0.03/p=1", 0)


@pytest.mark.parametrize(
    "name", ["config.json", "log", "log/events.jsonl", "results", "results/wda", FILE]
)
def test_links_below_a_run_are_refused(run: Store, tmp_path: Path, name: str) -> None:
    run.close()
    outside = tmp_path / "outside"
    (run.folder / name).rename(outside)
    (run.folder / name).symlink_to(outside)
    unfinished = outside / "unfinished.tmp"
    if outside.is_dir():
        unfinished.touch()

    def use(store: Store) -> None:
        store.events()
        store.get("wda", 0)

    for start in (Store.open, lambda folder: Store.resume(folder, CONFIG)):
        with pytest.raises(
            InputError, match=r"^'.*' in '.*' is a symbolic link, which a run has none of"
        ):
            use(start(run.folder))
    assert unfinished.exists() == outside.is_dir()
    (run.folder / name).unlink()
    (run.folder / name).symlink_to(run.folder / name)  # in a circle
    with pytest.raises(InputError, match="is a symbolic link"):
        use(Store.open(run.folder))
    (run.folder / name).unlink()
    outside.rename(run.folder / "inside")
    (run.folder / name).symlink_to(
        run.folder / "inside"
    )  # one that stays in the run is one too many as well
    with pytest.raises(InputError, match="is a symbolic link"):
        use(Store.open(run.folder))


def test_a_link_to_the_run_is_no_link_below_it(run: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.folder)
    assert Store.open(tmp_path / "link").has("wda", 0)
    run.close()
    with Store.resume(tmp_path / "link", CONFIG) as store:  # the user's own choice of a place
        store.put("wda", 1, TENSORS, FIELDS)
    assert Store.open(run.folder).has("wda", 1)


@pytest.mark.parametrize("name", ["log/lock", "log/events.jsonl"])
def test_a_second_name_of_a_file_elsewhere_is_not_written_to(
    run: Store, tmp_path: Path, name: str
) -> None:
    run.close()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run.folder / name).unlink()
    os.link(victim, run.folder / name)
    with pytest.raises(
        InputError, match=r"has a second name \(a hard link\): put a copy in its place"
    ):
        Store.resume(run.folder, CONFIG)
    (run.folder / name).unlink()
    os.mkfifo(run.folder / name)
    with pytest.raises(InputError, match="is no regular file"):
        Store.resume(run.folder, CONFIG)
    assert victim.read_text() == "precious"


def test_a_link_in_the_results_is_a_problem(run: Store) -> None:
    run.seal()
    (run.folder / "results/more").symlink_to(run.folder / "results/wda")
    assert run.verify() == ["results/ has a file 'more' that the manifest has not."]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "list indices"),
        ("NaN", "NaN is no JSON"),
        ('{"config": {"eps": 1e999}}', "1e999 is no JSON"),
        ('{"config": {}}', "'format'"),
        ('{"config": 3, "format": "wassail run 1", "run": ""}', "format"),
        ('{"config": {}, "format": "wassail run 9", "run": ""}', "format 'wassail run 9'"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"config": {"a": '
            + "[" * 400
            + "]" * 400
            + '}, "format": "wassail run 1", "run": ""}',
            "",
        ),
        ('{"config": ' + "9" * 5000 + "}", "digits"),
    ],
    ids=lambda value: value[:40],
)
def test_configurations_that_are_none(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=rf"^config\.json in '.*' is not .*{problem}"):
        Store.open(tmp_path)


def test_a_configuration_that_was_edited_or_is_huge_or_missing(run: Store) -> None:
    path = run.folder / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"eps": 0.03', '"eps": 0.01'))
    with pytest.raises(InputError, match="is not as the run wrote it"):
        Store.open(run.folder)
    with path.open("r+b") as file:
        file.truncate(100 << 20)
    with pytest.raises(InputError, match="it has more than 64 MB"):
        Store.open(run.folder)
    path.unlink()
    with pytest.raises(InputError, match=r"holds no run, for there is no config\.json in it"):
        Store.open(run.folder)
    run.close()
    with pytest.raises(InputError, match=r"has files in results/ and no config\.json"):
        Store.resume(run.folder, CONFIG)


# Starting, resuming, extending.


def test_a_run_is_not_written_over(run: Store) -> None:
    with pytest.raises(
        InputError,
        match=r"holds a run already: add --resume to go on with it, or choose another --out\.$",
    ):
        Store.create(run.folder, CONFIG)
    run.close()
    with pytest.raises(InputError, match="open for reading only"):
        run.put("wda", 1, TENSORS, FIELDS)


def test_the_configuration_comes_back(run: Store) -> None:
    run.close()
    assert Store.open(run.folder).config == CONFIG == run.config
    assert list(Store.open(run.folder).config) == list(CONFIG)
    with Store.resume(run.folder, changed(command="wassail evaluate --resume")) as store:
        assert store.config == CONFIG
        assert store.events()[-1]["command"] == "wassail evaluate --resume"
    with Store.resume(
        run.folder, changed(eps=np.float64(0.03), seed=0.0, threats=tuple(CONFIG["threats"]))
    ) as store:
        assert store.has("wda", 0)


DIFFERENCES = [
    ({"eps": 0.05}, "with eps 0.03 and you ask for 0.05"),
    ({"eps": 0.0300000001}, "with eps 0.03 and you ask for 0.0300000001"),
    ({"seed": False}, "with seed 0 and you ask for False"),
    (
        {"model": {"name": "net.onnx", "sha256": "cd" * 32}},
        "with model sha256 abababababab... and you ask for cdcdcdcdcdcd...",
    ),
    (
        {"threats": CONFIG["threats"][:1]},
        "with threats [order 1 eps 8/255, order inf eps 8/255] and you ask for [order 1 eps 8/255]",
    ),
    (
        {"threats": [CONFIG["threats"][0], {"order": math.inf, "eps": 4 / 255}]},
        "with eps 8/255 and you ask for 4/255: ",
    ),
    (
        {"threats": [{"order": p, "eps": 4 / 255} for p in (1, math.inf)]},
        "made with eps 8/255 and you ask for 4/255: ",
    ),
    (
        {"attacks": {"wda": {}, "nearest": {"passes": 50}}},
        "with attack nearest passes 100 and you ask for 50",
    ),
    (
        {"attacks": {"wda": {"kappa": 2}, "nearest": {"passes": 100}}},
        "without attack wda kappa and you ask for 2",
    ),
    ({"attacks": {"wda": {}}}, "with attack nearest and you leave it out"),
    (
        {"attacks": None},
        "with attack wda and you leave it out, with attack nearest and you leave it out",
    ),
    ({"box": None}, "without box and you ask for None"),
    ({"eps": 1, "seed": 1, "model": 1, "threats": 1, "box": 1}, ", and 2 more differences: "),
]


@pytest.mark.parametrize(("change", "words"), DIFFERENCES, ids=[words for _, words in DIFFERENCES])
def test_a_changed_configuration_is_refused_in_words(
    run: Store, change: dict[str, Any], words: str
) -> None:
    run.close()
    files = {
        path: state(path)
        for path in run.folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }
    for grow in ((), ("attacks",)):
        with pytest.raises(InputError) as error:
            Store.resume(run.folder, changed(**change), grow=grow)
        assert words in str(error.value)
        assert str(error.value).startswith(f"the run in '{run.folder}' was made with")
        assert str(error.value).endswith(
            ": give the same settings to go on with it, or choose another --out for a new run."
        )
    assert files == {path: state(path) for path in files}


def test_attacks_are_added_with_permission_only(run: Store) -> None:
    run.close()
    more = changed(attacks={"fab": {"steps": 3}, **CONFIG["attacks"]})
    with pytest.raises(
        InputError,
        match="was made without attack fab: add it with --add-attack, or leave it out to go on",
    ):
        Store.resume(run.folder, more)
    with Store.resume(run.folder, more, grow=("attacks",)) as store:
        assert list(store.config["attacks"].items()) == [
            *CONFIG["attacks"].items(),
            ("fab", {"steps": 3}),
        ]
        assert store.has("wda", 0) and store.events()[-1]["added"] == ["fab"]
    with Store.resume(run.folder, more) as store:
        assert store.config == Store.open(run.folder).config == more
    with pytest.raises(InputError, match="with attack fab and you leave it out"):
        Store.resume(run.folder, CONFIG)


def test_attacks_may_be_a_list(tmp_path: Path) -> None:
    Store.create(tmp_path, {"attacks": ["wda", {"name": "fab", "steps": 3}]}).close()
    Store.resume(tmp_path, {"attacks": [{"name": "fab", "steps": 3}, "wda"]}).close()
    with pytest.raises(InputError, match="with attack fab steps 3 and you ask for 4"):
        Store.resume(tmp_path, {"attacks": ["wda", {"name": "fab", "steps": 4}]})
    with Store.resume(
        tmp_path, {"attacks": ["cw", {"name": "fab", "steps": 3}, "wda"]}, grow=("attacks",)
    ) as store:
        assert store.config["attacks"] == ["wda", {"name": "fab", "steps": 3}, "cw"]


def test_leftovers_of_a_killed_process_are_removed_and_never_read(run: Store) -> None:
    run.close()
    leftovers = [
        run.folder / name for name in ("config.json.tmp", FILE + ".tmp", "results/summary.json.tmp")
    ]
    for path in leftovers:
        path.write_bytes((run.folder / FILE).read_bytes())
    assert Store.open(run.folder).has("wda", 0) and not Store.open(run.folder).has("wda", 1)
    assert all(path.exists() for path in leftovers)
    Store.resume(run.folder, CONFIG).close()
    assert not any(path.exists() for path in leftovers)


def test_resume_begins_what_was_killed_before_it_began(tmp_path: Path) -> None:
    Store.resume(tmp_path / "new", CONFIG).close()
    assert Store.open(tmp_path / "new").config == CONFIG
    (tmp_path / "new/config.json").rename(tmp_path / "new/config.json.tmp")
    with Store.resume(tmp_path / "new", CONFIG) as store:
        store.put("wda", 0, TENSORS, FIELDS)
    assert not (tmp_path / "new/config.json.tmp").exists()


def test_an_interrupt_leaves_nothing_unfinished(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **how: Any) -> None:
        raise KeyboardInterrupt

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.put("wda", 1, TENSORS, FIELDS)
        assert [path.name for path in (run.folder / "results/wda").iterdir()] == [
            "000000.safetensors"
        ]


def test_a_file_is_on_the_disk_before_it_is_in_its_place(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    fsync = os.fsync
    replace = os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (calls.append(os.fstat(number).st_ino), fsync(number))
    )
    monkeypatch.setattr(
        os, "replace", lambda old, new, **how: (calls.append("rename"), replace(old, new, **how))
    )
    run.put("wda", 1, TENSORS, FIELDS)
    folder = run.folder / "results/wda"
    assert calls == [(folder / "000001.safetensors").stat().st_ino, "rename", folder.stat().st_ino]


# One writer, many readers.


def test_a_second_writer_is_refused_and_readers_are_not(run: Store) -> None:
    with pytest.raises(
        InputError,
        match=f"^process {os.getpid()} is writing to '.*': wait for it, stop it, or choose "
        "another --out",
    ):
        Store.resume(run.folder, CONFIG)
    assert Store.open(run.folder).has("wda", 0)
    run.put("wda", 1, TENSORS, FIELDS)  # the first writer goes on
    run.close()
    Store.resume(run.folder, CONFIG).close()
    with pytest.raises(InputError, match="made with eps"):
        Store.resume(run.folder, changed(eps=1.0))
    Store.resume(run.folder, CONFIG).close()  # a refusal gives the lock back


def test_a_killed_writer_leaves_no_lock(run: Store) -> None:
    run.close()

    def die() -> str:
        store = Store.resume(run.folder, CONFIG)
        store.put("wda", 1, TENSORS, FIELDS)
        os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    assert in_child(die) == ("", signal.SIGKILL)
    with Store.resume(run.folder, CONFIG) as store:
        assert store.has("wda", 1)


# A disk that is full, or read-only.


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_limit_on_the_size_of_files(run: Store) -> None:
    import resource

    run.close()
    before = _files(run.folder / "results")

    def fill() -> str:
        with Store.resume(run.folder, CONFIG) as store:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            try:
                store.put("wda", 1, {"points": torch.zeros(100, 100)}, {})
            except InputError as error:
                return str(error)
        return "no error"

    text, status = in_child(fill)
    assert status == 0
    assert text == (
        f"cannot write 'results/wda/000001.safetensors' in '{run.folder}', a file may not be "
        "that large (file too large): "
        "what was written before is safe (1 chunk); raise the limit and go on with --resume."
    )
    assert _files(run.folder / "results") == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("no small disk: a tmpfs can be mounted by root only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "run"
    tensors = {"points": torch.zeros(100, 100)}

    def fill() -> tuple[int, str]:
        with Store.create(folder, CONFIG) as store:
            for chunk in range(100):
                try:
                    store.put("wda", chunk, tensors, {})
                except InputError as error:
                    return chunk, str(error)
        return 100, "no error"

    full, text = fill()
    assert 2 <= full <= 6
    assert text == (
        f"cannot write 'results/wda/{full:06d}.safetensors' in '{folder}', the disk is full (no "
        "space left on device): "
        f"what was written before is safe ({full} chunks); free some space and go on with --resume."
    )
    reader = Store.open(folder)
    assert [reader.has("wda", chunk) for chunk in range(full + 1)] == [True] * full + [False]
    assert not list(small_disk.rglob("*.tmp"))
    state = os.statvfs(small_disk)
    (small_disk / "rest").write_bytes(bytes(state.f_bfree * state.f_bsize))
    long = "x" * 10_000
    with Store.resume(folder, CONFIG) as store:
        for write in (
            lambda: store.log({"event": long}),
            lambda: store.write("summary.json", long),
            store.seal,
        ):
            with pytest.raises(
                InputError, match=r"the disk is full .* is safe .* go on with --resume"
            ):
                write()
    (small_disk / "rest").unlink()
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    with Store.resume(folder, CONFIG) as store:
        store.put("wda", full, tensors, {})
        assert all(store.has("wda", chunk) for chunk in range(full + 1))
        store.log({"event": "done"})
        assert [event["event"] for event in store.events()] == [
            "created",
            "resumed",
            "resumed",
            "done",
        ]


def test_a_disk_that_becomes_read_only(small_disk: Path) -> None:
    with Store.create(small_disk / "run", CONFIG) as store:
        store.put("wda", 0, TENSORS, FIELDS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        InputError,
        match=r"^cannot write to '.*' \(Read-only file system\): make it writable or "
        r"choose another --out",
    ):
        Store.resume(small_disk / "run", CONFIG)
    assert Store.open(small_disk / "run").has("wda", 0)


def test_a_folder_that_cannot_be_made(tmp_path: Path, run: Store) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to '.*/file/run' \(File exists\)"):
        Store.create(tmp_path / "file/run", CONFIG)
    run.write("table", "")
    with pytest.raises(
        InputError,
        match=r"cannot write 'results/table/000000.safetensors' in .*: what was written before is "
        r"safe \(1",
    ):
        run.put("table", 0, TENSORS, FIELDS)
