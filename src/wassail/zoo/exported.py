"""Classifiers exported with `torch.export.save`, without the loader that goes with it.

>>> from wassail.zoo.exported import load_exported
>>> model = load_exported("network.pt2")  # doctest: +SKIP

`torch.export.load` trusts its file: it unpickles sample inputs, constants and some weights, and hands sizes to `sympy.sympify`,
which evaluates them. Either runs code out of the file. What a classifier needs of it is plain: a list of operators, written in
JSON, and weights, written as bytes. That is all that is read here. Operators are looked up in a list of those that compute
tensors from tensors; nothing is unpickled but by torch's restricted unpickler (files of torch 2.8 and before keep their weights
in a `.pt`), and nothing is evaluated.

Exports have a batch of any size or of one that is fixed. A fixed one is made batchable: the operators are tried on several rows
at once, and kept that way if the logits are those of the rows alone; else the rows run one by one (`torch.vmap` where it can).
"""

from __future__ import annotations

import io
import json
import math
import operator
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wassail.errors import InputError

__all__ = ["ExportedClassifier", "load_exported"]


def load_exported(path: str | Path) -> ExportedClassifier:
    """The classifier in a `.pt2` file, in eval mode: a batch `(n, *shape)` of any size -> logits `(n, K)`.

    The graph must have one tensor as its input; the logits are its first output of two dimensions. Weights ask for no gradient.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            program, weights = _read(archive, path)
        model = _build(program, weights, path).eval()
        model.decide()
    except InputError:
        raise
    except (OSError, zipfile.BadZipFile) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise InputError(f"cannot read {str(path)!r}: {reason}; write it with torch.export.save.") from None
    except Exception as error:  # a damaged or hostile graph can fail anywhere, in torch's operators too
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"{str(path)!r} is no graph that can be run: {reason}; export the classifier again.") from error
    return model


# ---- The archive ---------------------------------------------------------------------------------------------------------

_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}


def _read(archive: zipfile.ZipFile, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The program and all tensors by name, from the layout of torch 2.8 and after, or the one before."""
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise InputError(f"{str(path)!r} has two members of one name: no program writes such archives.")
    if "serialized_exported_program.json" in names:  # torch 2.7 and before
        program = json.loads(_bytes(archive, "serialized_exported_program.json", path))
        parts = [_plain(archive, f"serialized_{part}.pt", path) for part in ("state_dict", "constants")]
        return program, {**parts[0], **parts[1]}
    programs = [name for name in names if re.fullmatch(r"[^/]+/models/[^/]+\.json", name)]
    if len(programs) != 1:
        what = "compiled code, which is never run" if any("aotinductor/" in name for name in names) else "no exported program"
        raise InputError(
            f"{str(path)!r} holds {what if not programs else 'several programs'}: save one with torch.export.save."
        )
    root, model = programs[0].split("/")[0], programs[0].split("/")[2].removesuffix(".json")
    program = json.loads(_bytes(archive, programs[0], path))
    weights: dict[str, Tensor] = {}
    for kind in ("weights", "constants"):
        folder = f"{root}/data/{kind}/"
        if f"{folder}{model}.pt" in names:  # torch 2.8
            weights.update(_plain(archive, f"{folder}{model}.pt", path))
            continue
        config = json.loads(_bytes(archive, f"{folder}{model}_{kind}_config.json", path))["config"]
        weights.update({name: _payload(archive, folder, name, meta, path) for name, meta in config.items()})
    return program, weights


def _bytes(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """One member; torch does not compress its archives, so none can be larger than the file."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise InputError(f"{str(path)!r} lacks {name!r}: write it with torch.export.save.") from None
    if info.file_size > path.stat().st_size:
        raise InputError(f"{name!r} in {str(path)!r} would unpack to more than the whole file: export the model again.")
    return archive.read(info)


def _plain(archive: zipfile.ZipFile, name: str, path: Path) -> dict[str, Tensor]:
    """A state dict in a `.pt` member, by the unpickler that knows tensors only."""
    data = _bytes(archive, name, path)
    if not data:
        return {}
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:
        state = None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(
            f"{name!r} in {str(path)!r} holds more than tensors, and code in a file is never run: export it again."
        )
    return dict(state)


def _payload(archive: zipfile.ZipFile, folder: str, name: str, meta: Mapping[str, Any], path: Path) -> Tensor:
    """A tensor from the bytes of one member."""
    member, about = str(meta["path_name"]), meta.get("tensor_meta")
    if meta.get("use_pickle") or about is None or not re.fullmatch(r"(weight|tensor)_\d+", member):
        raise InputError(f"{name!r} in {str(path)!r} is a pickle, and code in a file is never run: export plain tensors.")
    if about["dtype"] not in _DTYPES:
        raise InputError(f"{name!r} in {str(path)!r} has a number type that is not supported: export the model in float32.")
    data = _bytes(archive, folder + member, path)
    size, stride = (tuple(int(part["as_int"]) for part in about[key]) for key in ("sizes", "strides"))
    dtype = _DTYPES[about["dtype"]]
    if not data or not math.prod(size):
        if math.prod(size):
            raise InputError(f"{name!r} in {str(path)!r} has shape {size} but no bytes: the file is damaged.")
        return torch.zeros(size, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return flat.as_strided(size, stride, int(about["storage_offset"]["as_int"])).clone()


# ---- The graph -----------------------------------------------------------------------------------------------------------

_SIZES: dict[str, Callable[..., Any]] = {  # arithmetic on sizes
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge", "getitem")
}
_ASSERTIONS = re.compile(r"torch\.ops\.aten\.(_assert\w*|sym_constrain_range\w*)\.\w+")  # they hold for the export's own types
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")
# Those that compute tensors from tensors. Not all do: some write files (save), some open them (from_file).
_OPERATORS = frozenset(
    """
    abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d add
    add_ addbmm addcdiv addcmul addmm addmv alias all alpha_dropout amax amin any arange argmax argmin as_strided asin asinh
    atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bilinear bitwise_and bitwise_not bitwise_or bmm
    broadcast_tensors broadcast_to bucketize cat ceil celu celu_ chunk clamp clamp_ clamp_max clamp_min clone
    constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d convolution copy cos cosh cumprod
    cumsum detach detach_ diag diagonal div div_ dot dropout dropout_ einsum elu elu_ embedding empty empty_like eq erf erfc
    exp exp2 expand expand_as expm1 eye feature_dropout fill flatten flip floor floor_divide fmod full full_like gather ge
    gelu gelu_ glu grid_sampler grid_sampler_2d group_norm gt hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_
    hardtanh hardtanh_ hstack im2col index index_add index_copy index_put index_select instance_norm isfinite isinf isnan
    layer_norm le leaky_relu leaky_relu_ lerp lift_fresh_copy linalg_norm linalg_vector_norm linear linspace log log10 log1p
    log2 log_sigmoid log_softmax logical_and logical_not logical_or logical_xor logsumexp lt masked_fill masked_fill_ matmul
    max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d maximum mean min minimum mish mish_ mm movedim mul mul_ mv
    nan_to_num narrow native_batch_norm native_dropout native_group_norm native_layer_norm ne neg new_empty new_full
    new_ones new_zeros norm numpy_T one_hot ones ones_like outer pad permute pixel_shuffle pixel_unshuffle pow prelu prod
    reciprocal reflection_pad1d reflection_pad2d relu relu6 relu6_ relu_ remainder repeat repeat_interleave
    replication_pad1d replication_pad2d reshape reshape_as rms_norm roll round rrelu rsqrt rsub scalar_tensor
    scaled_dot_product_attention scatter scatter_add select select_scatter selu selu_ sigmoid sigmoid_ sign silu silu_ sin
    sinh slice slice_scatter softmax softplus softshrink sort split split_with_sizes sqrt square squeeze stack std sub sub_
    sum sym_numel sym_size t tan tanh tanh_ tensor_split tile to topk transpose tril triu true_divide unbind unflatten
    unfold unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_nearest2d var var_mean view view_as vstack where zeros
    zeros_like _adaptive_avg_pool2d _log_softmax _native_batch_norm_legit_no_training _softmax _to_copy _unsafe_view
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class _Name:
    """The place of a value that is computed when the graph runs."""

    name: str


class _Device:
    """Where the samples are: an export's own device is not the reader's."""


@dataclass(frozen=True, eq=False)
class _Step:
    """One operator: what it is called with, the names of its results, and the values that nobody needs after it."""

    run: Callable[..., Any]
    positional: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[Any, ...]  # names; None for a result that is not used; a tuple of names for a list
    finished: tuple[str, ...] = ()


class ExportedClassifier(nn.Module):
    """The operators of an exported program, `(n, *shape) -> (n, K)`. Made by `load_exported`.

    shape: of one sample; batch: the size the export was fixed to, None if it takes any; rows: how more of them are run,
    "together", "vmap" or "one by one"; version: of the torch that exported it.
    """

    def __init__(
        self,
        steps: list[_Step],
        tensors: Mapping[str, Tensor],
        sample: tuple[str, tuple[int, ...], torch.dtype],
        logits: str,
        batch: int | None,
        version: str,
    ) -> None:
        super().__init__()
        self.steps, self.logits, self.batch, self.version = steps, logits, batch, version
        self.sample, self.shape, self.kind = sample
        self.rows = "together"
        self.places: dict[str, str] = {}
        for place, (name, value) in enumerate(tensors.items()):
            self.places[name] = f"tensor_{place}"
            if value.is_floating_point():
                self.register_parameter(self.places[name], nn.Parameter(value, requires_grad=False))
            else:
                self.register_buffer(self.places[name], value)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the samples, `(n, *shape) -> (n, K)`."""
        x = x.reshape(x.shape[0], *self.shape)  # with the batch written out: half a sample must not pass for one
        if self.batch is None or self.rows == "together" or x.shape[0] == self.batch:
            return self._run(x)
        if self.rows == "vmap" and len(x):
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
                logits: Tensor = torch.vmap(lambda row: self._run(row[None])[0])(x)
            return logits
        short = -len(x) % self.batch  # the last group is filled up with rows that are cut off again
        filled = torch.cat([x, x.new_zeros(short, *self.shape)]) if short else x
        groups = [self._run(filled[start : start + self.batch]) for start in range(0, len(filled), self.batch)]
        return torch.cat(groups)[: len(x)] if groups else self._run(x.new_zeros(self.batch, *self.shape))[:0]

    def decide(self) -> None:
        """Find out how a fixed batch can take more rows: together only if that gives the logits of the rows alone."""
        if self.batch is None:
            self._run(torch.zeros(2, *self.shape, dtype=self.kind))
            return
        for rows in ("together", "vmap") if self.batch == 1 else ("together",):
            self.rows = rows
            if all(self._same(size) for size in (2, 3, 5)):
                return
        self.rows = "one by one"
        self(torch.zeros(self.batch + 1, *self.shape, dtype=self.kind))

    @torch.no_grad()
    def _same(self, size: int) -> bool:
        x = torch.rand(size * (self.batch or 1) + (self.batch != 1), *self.shape, generator=torch.Generator().manual_seed(size))
        x = x.to(self.kind)
        how, self.rows = self.rows, "one by one"
        alone, self.rows = self(x), how
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it would be as slow as one by one
                found = self(x)
        except Exception:  # a size that is written into the graph
            return False
        return found.shape == alone.shape and bool((found - alone).abs().max() <= 1e-4 * alone.abs().max())

    def _run(self, x: Tensor) -> Tensor:
        # Operators may write in place, and the samples are the caller's.
        values: dict[str, Any] = {self.sample: x.clone()}
        for step in self.steps:
            positional = [self._value(argument, values, x) for argument in step.positional]
            named = {name: self._value(argument, values, x) for name, argument in step.named.items()}
            found = step.run(*positional, **named)
            if len(step.results) == 1:
                found = (found,)
            for names, result in zip(step.results, found):
                values.update(zip(names, result) if isinstance(names, tuple) else {names: result}.items())
            for name in step.finished:  # else every activation would stay in memory, even without gradients
                values.pop(name, None)
        logits: Tensor = values[self.logits] if self.logits in values else getattr(self, self.places[self.logits])
        return logits

    def _value(self, argument: Any, values: Mapping[str, Any], x: Tensor) -> Any:
        if isinstance(argument, _Name):
            return values[argument.name] if argument.name in values else getattr(self, self.places[argument.name])
        if isinstance(argument, list):
            return [self._value(entry, values, x) for entry in argument]
        return x.device if isinstance(argument, _Device) else argument


def _build(program: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path) -> ExportedClassifier:
    """The module from the program, everything in it looked at once."""
    module = program["graph_module"]
    graph, signature = module["graph"], module["signature"]
    tensors: dict[str, Tensor] = {}
    samples: list[str] = []
    for spec in signature["input_specs"]:
        ((kind, entry),) = spec.items()
        if kind in _HELD:
            if entry[_HELD[kind]] not in weights:
                raise InputError(f"{str(path)!r} lacks the weights {entry[_HELD[kind]]!r}: export the model again.")
            tensors[entry["arg"]["name"]] = weights[entry[_HELD[kind]]]
        elif kind == "user_input" and "as_tensor" in entry["arg"]:
            samples.append(entry["arg"]["as_tensor"]["name"])
        else:
            raise InputError(f"{str(path)!r} takes an input of kind {kind!r}: export a classifier of one tensor.")
    if len(samples) != 1:
        raise InputError(f"{str(path)!r} takes {len(samples)} inputs: export a classifier of one tensor.")
    outputs = []
    for spec in signature["output_specs"]:
        ((kind, entry),) = spec.items()
        if kind != "user_output":
            raise InputError(f"{str(path)!r} changes its own weights ({kind}): export the model in eval mode.")
        outputs += [entry["arg"]["as_tensor"]["name"]] if "as_tensor" in entry["arg"] else []
    metas = graph["tensor_values"]
    logits = next((name for name in outputs if len(metas[name]["sizes"]) == 2), None)
    if logits is None:
        raise InputError(f"{str(path)!r} has no output of two dimensions: a classifier's logits have shape (N, classes).")
    sizes = [size.get("as_int") for size in metas[samples[0]]["sizes"]]
    if len(sizes) < 2 or None in sizes[1:]:
        raise InputError(f"{str(path)!r} takes samples of any size: export it with only the batch dynamic.")
    steps = _free([step for node in graph["nodes"] if (step := _step(node, tensors, path)) is not None], logits)
    sample = (samples[0], tuple(int(size) for size in sizes[1:]), _DTYPES[metas[samples[0]]["dtype"]])
    return ExportedClassifier(steps, tensors, sample, logits, sizes[0], str(program.get("torch_version", "unknown")))


_HELD = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}


def _step(node: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> _Step | None:
    target = str(node["target"])
    if _ASSERTIONS.fullmatch(target):
        return None
    arguments = [(str(entry["name"]), _argument(entry["arg"], target, path)) for entry in node["inputs"]]
    results = tuple(name for entry in node["outputs"] for name in _results(entry, target, path))
    if target in _SIZES:
        return _Step(_SIZES[target], tuple(value for _, value in arguments), {}, results)
    match = _ATEN.fullmatch(target)
    if match is None or match[1] not in _OPERATORS or not hasattr(getattr(torch.ops.aten, match[1], None), match[2]):
        raise InputError(f"{str(path)!r} uses the operator {target!r}, which this loader does not know: export it without.")
    run: Any = getattr(getattr(torch.ops.aten, match[1]), match[2])
    for name, value in arguments:
        written = any(a.name == name and a.alias_info is not None and a.alias_info.is_write for a in run._schema.arguments)
        if written and isinstance(value, _Name) and value.name in tensors:
            raise InputError(f"{str(path)!r} writes to its own weights ({target}): export the model in eval mode.")
    return _Step(run, (), dict(arguments), results)


def _argument(argument: Mapping[str, Any], target: str, path: Path) -> Any:
    """A plain value, or the name of one that is computed."""
    ((kind, value),) = argument.items()
    if kind == "as_none":
        return None
    if kind == "as_tensor":
        return _Name(str(value["name"]))
    if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
        return _Name(str(value["as_name"])) if "as_name" in value else next(iter(value.values()))
    if kind in ("as_tensors", "as_sym_ints", "as_sym_bools", "as_sym_floats", "as_optional_tensors"):
        inner = {"as_tensors": "as_tensor", "as_optional_tensors": ""}.get(kind, kind.removesuffix("s"))
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
        f"{str(path)!r} gives {target!r} an argument {kind!r}, which this loader does not know: export it without."
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
        raise InputError(f"{target!r} in {str(path)!r} returns {kind!r}, which this loader does not know: export it without.")


def _free(steps: list[_Step], logits: str) -> list[_Step]:
    """The steps, each with the values that are not needed after it."""
    used, found = {logits}, []
    for step in reversed(steps):
        mentioned = [*_mentioned(list(step.positional)), *_mentioned(list(step.named.values()))]
        made = [name for names in step.results for name in (names if isinstance(names, tuple) else (names,)) if name]
        finished = tuple(dict.fromkeys(name for name in (*mentioned, *made) if name not in used))
        used.update(mentioned)
        found.append(_Step(step.run, step.positional, step.named, step.results, finished))
    return found[::-1]


def _mentioned(arguments: list[Any]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, _Name):
            yield argument.name
        elif isinstance(argument, list):
            yield from _mentioned(argument)
