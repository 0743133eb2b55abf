"""Classifiers exported with `torch.export.save`, without the loader that goes with it.

>>> from wassail.zoo.exported import load_exported
>>> model = load_exported("network.pt2")  # doctest: +SKIP

`torch.export.load` trusts its file: it unpickles sample inputs, constants and some weights, and
hands sizes to `sympy.sympify`, which evaluates them. Either runs code out of the file. What a
classifier needs of it is plain: a list of operators, written in JSON, and weights, written as
bytes. That is all that is read here. Operators are looked up in a list of those that a classifier
in eval mode needs (`wassail.zoo.operators`), and for every size of a batch the whole program is
first gone through without memory, each argument and each shape compared with what its operator
assumes. Nothing is unpickled but by torch's restricted unpickler (files of torch 2.8 and before
keep their weights in a `.pt`), and nothing is evaluated.

Exports have a batch of any size or of one that is fixed. A fixed one is made batchable: the
operators are tried on several rows at once, and kept that way if the logits are those of the rows
alone; else the rows run one by one (`torch.vmap` where it can).

Long because files of this format are read, checked and run in one place.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wassail.errors import InputError, reason_of
from wassail.zoo import operators
from wassail.zoo.operators import Arithmetic, Operator
from wassail.zoo.rules import LARGEST
from wassail.zoo.weights import load_tensors, plain_tensors, regular

__all__ = ["ExportedClassifier", "load_exported"]


def load_exported(path: str | Path) -> ExportedClassifier:
    """The classifier in a `.pt2` file, in eval mode: a batch `(n, *shape)` of any size -> logits
    `(n, K)`.

    The graph must have one tensor as its input; the logits are its first output of two dimensions.
    Weights ask for no gradient.
    """
    path = Path(path)
    regular(path, "a model")
    try:
        with zipfile.ZipFile(path) as archive:
            program, weights = _read(archive, path)
        model = _build(program, weights, path).eval()
        model.decide()
    except InputError:
        raise
    except (OSError, zipfile.BadZipFile) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise InputError(
            f"cannot read {str(path)!r}: {reason}; write it with torch.export.save."
        ) from None
    except (
        Exception
    ) as error:  # a damaged or hostile graph can fail anywhere, in torch's operators too
        reason = reason_of(error)
        raise InputError(
            f"{str(path)!r} is no graph that can be run: {reason}; export the classifier again."
        ) from error
    return model


# ---- The archive
# --------------------------------------------------------------------------------------------------

_DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
# by which a result may grow faster than the batch, and the numbers that do not matter
GROWTH = 2
SMALL = 1 << 12
REPEATED = (
    1 << 20
)  # numbers of a weight that says the same bytes over and over, as expanded tensors do
_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}


def _read(archive: zipfile.ZipFile, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The program and all tensors by name, from the layout of torch 2.8 and after, or the one
    before.
    """
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise InputError(
            f"{str(path)!r} has two members of one name: no program writes such archives."
        )
    if "serialized_exported_program.json" in names:  # torch 2.7 and before
        program = json.loads(_bytes(archive, "serialized_exported_program.json", path))
        parts = [
            _plain(archive, f"serialized_{part}.pt", path) for part in ("state_dict", "constants")
        ]
        return program, {**parts[0], **parts[1]}
    programs = [name for name in names if re.fullmatch(r"[^/]+/models/[^/]+\.json", name)]
    if len(programs) != 1:
        what = (
            "compiled code, which is never run"
            if any("aotinductor/" in name for name in names)
            else "no exported program"
        )
        raise InputError(
            f"{str(path)!r} holds {what if not programs else 'several programs'}: save one with "
            "torch.export.save."
        )
    root = programs[0].split("/")[0]
    model = programs[0].split("/")[2].removesuffix(".json")
    program = json.loads(_bytes(archive, programs[0], path))
    weights: dict[str, Tensor] = {}
    for kind in ("weights", "constants"):
        folder = f"{root}/data/{kind}/"
        if f"{folder}{model}.pt" in names:  # torch 2.8
            weights.update(_plain(archive, f"{folder}{model}.pt", path))
            continue
        config = json.loads(_bytes(archive, f"{folder}{model}_{kind}_config.json", path))["config"]
        weights.update(
            {name: _payload(archive, folder, name, meta, path) for name, meta in config.items()}
        )
    return program, weights


def _bytes(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """One member; torch does not compress its archives, so none can be larger than the file."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise InputError(
            f"{str(path)!r} lacks {name!r}: write it with torch.export.save."
        ) from None
    if info.file_size > path.stat().st_size:
        raise InputError(
            f"{name!r} in {str(path)!r} would unpack to more than the whole file: export the "
            "model again."
        )
    return archive.read(info)


def _plain(archive: zipfile.ZipFile, name: str, path: Path) -> dict[str, Tensor]:
    """A state dict in a `.pt` member, by the unpickler that knows tensors only."""
    data = _bytes(archive, name, path)
    if not data:
        return {}
    try:
        with tempfile.TemporaryDirectory(prefix="wassail-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "state.pt")
            file.write_bytes(data)
            state = load_tensors(file)
            if not isinstance(state, Mapping) or not all(
                isinstance(value, Tensor) for value in state.values()
            ):
                raise ValueError("it is no state dict")
            plain_tensors(state)
            return {str(key): value.clone() for key, value in state.items()}
    except Exception:
        raise InputError(
            f"{name!r} in {str(path)!r} holds more than tensors, and code in a file is never "
            "run: export it again."
        ) from None


def _payload(
    archive: zipfile.ZipFile, folder: str, name: str, meta: Mapping[str, Any], path: Path
) -> Tensor:
    """A tensor from the bytes of one member."""
    member = str(meta["path_name"])
    about = meta.get("tensor_meta")
    if meta.get("use_pickle") or about is None or not re.fullmatch(r"(weight|tensor)_\d+", member):
        raise InputError(
            f"{name!r} in {str(path)!r} is a pickle, and code in a file is never run: export "
            "plain tensors."
        )
    if about["dtype"] not in _DTYPES:
        raise InputError(
            f"{name!r} in {str(path)!r} has a number type that is not supported: export the "
            "model in float32."
        )
    data = _bytes(archive, folder + member, path)
    size, stride = (
        tuple(int(part["as_int"]) for part in about[key]) for key in ("sizes", "strides")
    )
    start = int(about["storage_offset"]["as_int"])
    dtype = _DTYPES[about["dtype"]]
    count = math.prod(size)
    held = len(data) // dtype.itemsize
    if len(size) != len(stride) or min((*size, *stride, start), default=0) < 0:
        raise InputError(
            f"{name!r} in {str(path)!r} has shape {size} and strides {stride}: the file is damaged."
        )
    if not count:
        if max(size, default=0) > LARGEST:
            raise InputError(f"{name!r} in {str(path)!r} has shape {size}: the file is damaged.")
        return torch.zeros(size, dtype=dtype)
    last = start + sum((s - 1) * step for s, step in zip(size, stride))
    if last >= held or (count > held and count > REPEATED):
        raise InputError(
            f"{name!r} in {str(path)!r} has shape {size} but no bytes for it ({len(data)}): the "
            "file is damaged."
        )
    flat = torch.frombuffer(bytearray(data), dtype=dtype, count=held)
    return flat.as_strided(size, stride, start).clone()


# ---- The graph
# --------------------------------------------------------------------------------------------------

_ASSERTIONS = re.compile(
    r"torch\.ops\.aten\.(_assert\w*|sym_constrain_range\w*)\.\w+"
)  # they hold for the export's own types


@dataclass(frozen=True)
class _Name:
    """The place of a value that is computed when the graph runs."""

    name: str


class _Device:
    """Where the samples are: an export's own device is not the reader's."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One operator: what it is called with, the names of its results, and the values that
    nobody needs after it.
    """

    what: Operator | Arithmetic
    positional: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[
        Any, ...
    ]  # names; None for a result that is not used; a tuple of names for a list
    finished: tuple[str, ...] = ()
    keeps: str | None = (
        None  # the argument whose shape and type the result must have, as it took its place
    )


class ExportedClassifier(nn.Module):
    """The operators of an exported program, `(n, *shape) -> (n, K)`. Made by `load_exported`.

    shape: of one sample; batch: the size the export was fixed to, None if it takes any; rows: how
    more of them are run, "together", "vmap" or "one by one"; version: of the torch that exported
    it.
    """

    def __init__(
        self,
        calls: list[_Call],
        tensors: Mapping[str, Tensor],
        sample: tuple[str, tuple[int, ...], torch.dtype],
        logits: str,
        batch: int | None,
        version: str,
    ) -> None:
        super().__init__()
        self.calls = calls
        self.logits = logits
        self.batch = batch
        self.version = version
        self.sample, self.shape, self.kind = sample
        self.rows = "together"
        self.approved: set[tuple[int, torch.dtype]] = (
            set()
        )  # batches for which every call was looked at
        self.measured: dict[int, tuple[int, int]] = {}  # by call: rows, and numbers of its results
        self.places: dict[str, str] = {}
        for place, (name, value) in enumerate(tensors.items()):
            self.places[name] = f"tensor_{place}"
            if value.is_floating_point():
                self.register_parameter(self.places[name], nn.Parameter(value, requires_grad=False))
            else:
                self.register_buffer(self.places[name], value)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the samples, `(n, *shape) -> (n, K)`."""
        x = x.reshape(
            x.shape[0], *self.shape
        )  # with the batch written out: half a sample must not pass for one
        if self.batch is None or self.rows == "together" or x.shape[0] == self.batch:
            self._approve(x, len(x))
            return self._run(x)
        if self.rows == "vmap" and len(x):
            self._approve(x, 1)
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
                logits: Tensor = torch.vmap(lambda row: self._run(row[None])[0])(x)
            return logits
        self._approve(x, self.batch)
        short = -len(x) % self.batch  # the last group is filled up with rows that are cut off again
        filled = torch.cat([x, x.new_zeros(short, *self.shape)]) if short else x
        groups = [
            self._run(filled[start : start + self.batch])
            for start in range(0, len(filled), self.batch)
        ]
        return (
            torch.cat(groups)[: len(x)]
            if groups
            else self._run(x.new_zeros(self.batch, *self.shape))[:0]
        )

    def decide(self) -> None:
        """Find out how a fixed batch can take more rows: together only if that gives the logits
        of the rows alone.
        """
        if self.batch is None:
            with torch.no_grad():
                self(torch.zeros(2, *self.shape, dtype=self.kind))
            with contextlib.suppress(Exception):  # an export may need two rows
                self._approve(torch.zeros(1, *self.shape, dtype=self.kind), 1)
            return
        for rows in ("together", "vmap") if self.batch == 1 else ("together",):
            self.rows = rows
            if all(self._same(size) for size in (2, 3, 5)):
                return
        self.rows = "one by one"
        with torch.no_grad():
            self(torch.zeros(self.batch + 1, *self.shape, dtype=self.kind))

    @torch.no_grad()
    def _same(self, size: int) -> bool:
        x = torch.rand(
            size * (self.batch or 1) + (self.batch != 1),
            *self.shape,
            generator=torch.Generator().manual_seed(size),
        )
        x = x.to(self.kind)
        how = self.rows
        self.rows = "one by one"
        alone = self(x)
        self.rows = how
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it would be as slow as one by one
                found = self(x)
        except Exception:  # a size that is written into the graph
            return False
        return found.shape == alone.shape and bool(
            (found - alone).abs().max() <= 1e-4 * alone.abs().max()
        )

    @torch.no_grad()
    def _approve(self, x: Tensor, rows: int) -> None:
        """Go through the program without memory for a batch of that many rows: every argument,
        shape and size is looked at.

        Nothing in the program depends on the values of the samples, so once for each number of rows
        is enough.
        """
        if (rows, x.dtype) in self.approved or type(x) not in (
            Tensor,
            nn.Parameter,
        ):  # what traces the model computes nothing
            return
        try:
            self._run(torch.empty(rows, *self.shape, dtype=x.dtype, device="meta"), check=True)
        except (
            Exception
        ) as error:  # torch's operators raise whatever hostile arguments make them stumble over
            reason = reason_of(error)
            raise InputError(
                f"the exported program cannot run on a batch of {rows}: {reason}."
            ) from error
        self.approved.add((rows, x.dtype))

    def _run(self, x: Tensor, check: bool = False) -> Tensor:
        """The logits at samples; check: look at every value on the way.

        Long because every call is run, checked and measured in one pass.
        """
        values: dict[str, Any] = {self.sample: x}
        for place, call in enumerate(self.calls):
            positional = [self._value(argument, values, x) for argument in call.positional]
            named = {
                name: self._value(argument, values, x) for name, argument in call.named.items()
            }
            if check and isinstance(call.what, Operator):
                names = call.results[0] if call.results else ()
                call.what.check(named, len(names) if isinstance(names, tuple) else 1)
            found = call.what.run(*positional, **named)
            if check:
                self._look(call, found, named, len(x))
                self._measure(place, found, len(x))
            if len(call.results) == 1:
                found = (found,)
            for names, result in zip(call.results, found):
                values.update(
                    zip(names, result) if isinstance(names, tuple) else {names: result}.items()
                )
            for name in (
                call.finished
            ):  # else every activation would stay in memory, even without gradients
                values.pop(name, None)
        logits: Tensor = (
            values[self.logits]
            if self.logits in values
            else getattr(self, self.places[self.logits])
        )
        if check and (not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x)):
            raise ValueError(f"the logits have shape {tuple(logits.shape)} for {len(x)} samples")
        return logits

    def _look(self, call: _Call, found: Any, named: Mapping[str, Any], rows: int) -> None:
        """Raise ValueError where a result is too large, or is not what the program says."""
        operators.limit(found, rows, str(getattr(call.what, "target", "")))
        several = len(call.results) > 1 or (
            len(call.results) == 1 and isinstance(call.results[0], tuple)
        )
        if several != isinstance(found, (list, tuple)):
            raise ValueError("an operator has other results than the program says")
        expected = call.results[0] if len(call.results) == 1 and several else call.results
        if several and len(found) != len(expected):
            raise ValueError("an operator has other results than the program says")
        if call.keeps is not None:
            before = named[call.keeps]
            if found.shape != before.shape or found.dtype != before.dtype:
                raise ValueError("an operator that writes into its argument changes its shape")

    def _measure(self, place: int, found: Any, rows: int) -> None:
        """Raise ValueError where a result grows faster than the batch: the batch that was tried
        says nothing then.
        """
        tensors = found if isinstance(found, (list, tuple)) else (found,)
        numbers = sum(math.prod(value.shape) for value in tensors if isinstance(value, Tensor))
        first, then = self.measured.setdefault(place, (max(rows, 1), numbers))
        if numbers > GROWTH * then * max(rows / first, 1) + SMALL:
            raise ValueError(
                f"a value has {then} numbers for {first} samples and would have {numbers} for "
                f"{rows}"
            )

    def _value(self, argument: Any, values: Mapping[str, Any], x: Tensor) -> Any:
        if isinstance(argument, _Name):
            if argument.name in values:
                return values[argument.name]
            held = getattr(self, self.places[argument.name])
            return held.to("meta") if x.is_meta else held
        if isinstance(argument, list):
            return [self._value(entry, values, x) for entry in argument]
        return x.device if isinstance(argument, _Device) else argument


def _build(
    program: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path
) -> ExportedClassifier:
    """The module from the program, everything in it looked at once."""
    module = program["graph_module"]
    graph = module["graph"]
    signature = module["signature"]
    metas = graph["tensor_values"]
    name, tensors = _inputs(signature["input_specs"], weights, path)
    logits = _logits(signature["output_specs"], metas, path)
    batch, shape = _sizes(metas[name]["sizes"], path)
    if name in tensors or _DTYPES.get(metas[name]["dtype"], torch.bool) == torch.bool:
        raise InputError(
            f"{str(path)!r} takes samples of an unknown number type: export the classifier in "
            "float32."
        )
    nodes, logits = _without_writing(graph["nodes"], logits, set(tensors), path)
    calls = _free([call for node in nodes if (call := _call(node, path)) is not None], logits)
    sample = (name, shape, _DTYPES[metas[name]["dtype"]])
    return ExportedClassifier(
        calls, tensors, sample, logits, batch, str(program.get("torch_version", "unknown"))
    )


def _inputs(
    specs: Sequence[Mapping[str, Any]], weights: Mapping[str, Tensor], path: Path
) -> tuple[str, dict[str, Tensor]]:
    """The name of the samples, and the weights by the names that the graph has for them."""
    tensors: dict[str, Tensor] = {}
    samples: list[str] = []
    for spec in specs:
        ((kind, entry),) = spec.items()
        if kind in _HELD:
            if entry[_HELD[kind]] not in weights:
                raise InputError(
                    f"{str(path)!r} lacks the weights {entry[_HELD[kind]]!r}: export the model "
                    "again."
                )
            tensors[entry["arg"]["name"]] = weights[entry[_HELD[kind]]]
        elif kind == "user_input" and "as_tensor" in entry["arg"]:
            samples.append(entry["arg"]["as_tensor"]["name"])
        else:
            raise InputError(
                f"{str(path)!r} takes an input of kind {kind!r}: export a classifier of one tensor."
            )
    if len(samples) != 1:
        raise InputError(
            f"{str(path)!r} takes {len(samples)} inputs: export a classifier of one tensor."
        )
    return samples[0], tensors


def _logits(specs: Sequence[Mapping[str, Any]], metas: Mapping[str, Any], path: Path) -> str:
    """The name of the first output of two dimensions."""
    outputs: list[str] = []
    for spec in specs:
        ((kind, entry),) = spec.items()
        if kind != "user_output":
            raise InputError(
                f"{str(path)!r} changes its own weights ({kind}): export the model in eval mode."
            )
        outputs += [entry["arg"]["as_tensor"]["name"]] if "as_tensor" in entry["arg"] else []
    found = next((name for name in outputs if len(metas[name]["sizes"]) == 2), None)
    if found is None:
        raise InputError(
            f"{str(path)!r} has no output of two dimensions: a classifier's logits have shape "
            "(N, classes)."
        )
    return found


def _sizes(dims: Sequence[Mapping[str, Any]], path: Path) -> tuple[int | None, tuple[int, ...]]:
    """The size of a batch, None where any is taken, and the shape of a sample."""
    sizes: list[Any] = [size.get("as_int") for size in dims]
    if len(sizes) < 2 or None in sizes[1:]:
        raise InputError(
            f"{str(path)!r} takes samples of any size: export it with only the batch dynamic."
        )
    shape = tuple(int(size) for size in sizes[1:])
    numbers = math.prod(shape)
    if min(shape) < 1 or numbers > LARGEST or not 0 < int(sizes[0] or 1) * numbers <= LARGEST:
        raise InputError(
            f"{str(path)!r} takes samples of shape {tuple(sizes)}, which no data set has: export "
            "it again."
        )
    return sizes[0], shape


_HELD = {
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
}


def _call(node: Mapping[str, Any], path: Path) -> _Call | None:
    target = str(node["target"])
    if _ASSERTIONS.fullmatch(target):
        return None
    arguments = [
        (str(entry["name"]), _argument(entry["arg"], target, path)) for entry in node["inputs"]
    ]
    results = tuple(name for entry in node["outputs"] for name in _results(entry, target, path))
    if target in operators.ARITHMETIC:
        return _Call(Arithmetic(target), tuple(value for _, value in arguments), {}, results)
    what = operators.find(target)
    if what is None:
        raise InputError(
            f"{str(path)!r} uses the operator {target!r}, which this loader does not know: "
            "export it without."
        )
    what.check_names([name for name, _ in arguments])
    named = dict(arguments)
    if "device" in what.schema:
        named["device"] = _Device()
    return _Call(what, (), named, results, keeps=node.get("keeps"))


def _without_writing(
    nodes: list[Any], logits: str, weights: set[str], path: Path
) -> tuple[list[dict[str, Any]], str]:
    """The program with no operator that writes into its argument, and the name of its logits.

    Long because last uses, shared memory and new names are followed together.

    An activation in place becomes one that returns a new value, which takes the place of its
    argument from there on. That is the same program unless something else shares the memory of the
    argument and is used afterwards: such programs are refused.
    """
    last: dict[str, int] = {logits: len(nodes)}  # where each value is used last
    for place, node in enumerate(nodes):
        for name in _mentioned(
            [_argument(entry["arg"], str(node["target"]), path) for entry in node["inputs"]]
        ):
            last[name] = max(last.get(name, -1), place)
    shares: dict[str, set[str]] = {}  # names whose memory may be the same, one set for all of them
    renamed: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for place, node in enumerate(nodes):
        target = str(node["target"])
        inputs = [{**entry, "arg": _renamed(entry["arg"], renamed)} for entry in node["inputs"]]
        results = [name for entry in node["outputs"] for name in _results(entry, target, path)]
        names = [
            name
            for part in results
            for name in (part if isinstance(part, tuple) else (part,))
            if name
        ]
        plain = operators.functional(target)
        if plain is not None:
            written = node["inputs"][0]["arg"].get("as_tensor", {}).get("name")
            now = renamed.get(written, written)
            if (
                written is None
                or len(names) != 1
                or now in weights
                or not weights.isdisjoint(shares.get(now, ()))
            ):
                raise InputError(
                    f"{str(path)!r} writes to its own weights ({target}): export the model in "
                    "eval mode."
                )
            others = shares.get(now, set()) - {now}
            if any(last.get(origin, -1) > place for origin in others):
                raise InputError(
                    f"{str(path)!r} writes over a value that it uses again ({target}): export it "
                    "without."
                )
            found.append(
                {**node, "target": plain, "inputs": inputs, "keeps": str(node["inputs"][0]["name"])}
            )
            renamed.update(
                {name: names[0] for name, new in renamed.items() if new == now}
                | {written: names[0]}
            )
            last[names[0]] = max(last.get(names[0], -1), last.get(written, -1))
            continue
        found.append({**node, "inputs": inputs})
        what = operators.find(target)
        if target not in operators.ARITHMETIC and (what is None or what.aliases):
            mentioned = _mentioned([_argument(entry["arg"], target, path) for entry in inputs])
            group = set(names).union(*({name} | shares.get(name, set()) for name in mentioned))
            shares.update(dict.fromkeys(group, group))
    return found, renamed.get(logits, logits)


def _renamed(argument: Any, names: Mapping[str, str]) -> Any:
    """An argument with other names for the tensors in it."""
    if isinstance(argument, Mapping):
        return {
            key: names.get(value, value)
            if key == "name" and isinstance(value, str)
            else _renamed(value, names)
            for key, value in argument.items()
        }
    return (
        [_renamed(entry, names) for entry in argument] if isinstance(argument, list) else argument
    )


def _argument(argument: Mapping[str, Any], target: str, path: Path) -> Any:
    """A plain value, or the name of one that is computed.

    Long because it has a case for each kind of argument of the format.
    """
    ((kind, value),) = argument.items()
    if kind == "as_none":
        return None
    if kind == "as_tensor":
        return _Name(str(value["name"]))
    if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
        return _Name(str(value["as_name"])) if "as_name" in value else next(iter(value.values()))
    if kind in (
        "as_tensors",
        "as_sym_ints",
        "as_sym_bools",
        "as_sym_floats",
        "as_optional_tensors",
    ):
        inner = {"as_tensors": "as_tensor", "as_optional_tensors": ""}.get(
            kind, kind.removesuffix("s")
        )
        return [_argument({inner: entry} if inner else entry, target, path) for entry in value]
    if kind == "as_optional_tensor":
        return _argument(value, target, path)
    if kind in ("as_int", "as_bool", "as_string", "as_ints", "as_bools", "as_strings"):
        return value
    if kind == "as_float":
        return float(value)  # infinities are written as words
    if kind == "as_floats":
        return [float(entry) for entry in value]
    if kind == "as_scalar_type" and value in _DTYPES:
        return _DTYPES[value]
    if kind == "as_memory_format" and value in _FORMATS:
        return _FORMATS[value]
    if kind == "as_layout" and value == 7:
        return torch.strided
    if kind == "as_device":
        return _Device()
    raise InputError(
        f"{str(path)!r} gives {target!r} an argument {kind!r}, which this loader does not know: "
        "export it without."
    )


def _results(entry: Mapping[str, Any], target: str, path: Path) -> Iterator[Any]:
    ((kind, value),) = entry.items()
    if kind in ("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float"):
        yield str(value.get("name", value.get("as_name")))
    elif kind == "as_tensors":
        yield tuple(str(one["name"]) for one in value)
    elif kind == "as_none":
        yield None
    else:
        raise InputError(
            f"{target!r} in {str(path)!r} returns {kind!r}, which this loader does not know: "
            "export it without."
        )


def _free(calls: list[_Call], logits: str) -> list[_Call]:
    """The calls, each with the values that are not needed after it."""
    used = {logits}
    found = []
    for call in reversed(calls):
        mentioned = [*_mentioned(list(call.positional)), *_mentioned(list(call.named.values()))]
        made = [
            name
            for names in call.results
            for name in (names if isinstance(names, tuple) else (names,))
            if name
        ]
        finished = tuple(dict.fromkeys(name for name in (*mentioned, *made) if name not in used))
        used.update(mentioned)
        found.append(replace(call, finished=finished))
    return found[::-1]


def _mentioned(arguments: list[Any]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, _Name):
            yield argument.name
        elif isinstance(argument, list):
            yield from _mentioned(argument)
