"""Weights from a file, and what a model is known by. Nothing here runs code out of a file.

`.safetensors` holds tensors only. A `.pt` file is a pickle, which can name any function to be
called on loading: it is read by torch's restricted unpickler, which knows tensors and containers
and refuses everything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickletools
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from wassail.checks import fingerprint as fingerprint  # of weights in memory
from wassail.errors import InputError, reason_of

# Where training scripts put their state dict.
_HOLDERS = ("state_dict", "model_state_dict", "model", "net", "last")
# Numbers of a tensor that says the same bytes over and over, as expanded ones do.
_REPEATED = 1 << 20
_PREFIXES = ("module.", "model.")  # left behind by DataParallel and by wrappers that normalise
_EXPANDED = 1 << 22  # values of a pickle if those that it uses again were written out each time
_LONG = 1 << 14  # integers beyond 32 bits: as keys, they can be chosen to have one hash
_COPIED = 64 << 20  # bytes that are made out of text
# Called with a number: memory, as it is found.
_MAKERS = ("torch Tensor", "builtins bytearray", "__builtin__ bytearray")
_OLD_PICKLES = (
    5  # of a file without an archive: three about the file, the object, the names of its storages
)


def regular(path: str | Path, what: str) -> None:
    """Raise unless the path is an ordinary file: a pipe would be waited for, a device read
    without end.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file can have this name"
        raise InputError(
            f"cannot read {what} from {str(path)!r}: {reason}; check the name."
        ) from None
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or a device"
        raise InputError(f"cannot read {what} from {str(path)!r}: it is a {kind}, so give a file.")


def load_tensors(path: str | Path) -> Any:
    """What torch's restricted unpickler reads from a `.pt` file.

    The archive's checksums are compared first. The file is mapped: a tensor that says it is larger
    than its bytes is refused then, and would else be filled up with whatever was in the memory.
    """
    if not zipfile.is_zipfile(path):  # as torch 1.5 and before wrote them
        with open(path, "rb") as file:
            for _ in range(_OLD_PICKLES):
                check_pickle(file)
        return torch.load(path, map_location="cpu", weights_only=True)
    with zipfile.ZipFile(path) as archive:
        # Torch would look for the directory elsewhere then.
        if archive.comment or min((info.header_offset for info in archive.infolist()), default=0):
            raise ValueError("it is no archive as torch.save writes them")
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{info.filename} in it is compressed, which torch.save does not do"
                )
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")
    check_pickle(io.BytesIO(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")))
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def check_pickle(file: IO[bytes]) -> None:
    """Raise ValueError where the restricted unpickler would take time or memory out of proportion
    to a pickle.

    It runs no code, but hashes a tuple of tuples of tuples for as long as that takes, and makes
    arrays of any size. What is followed here is how the values nest, and nothing is made of them.
    """
    # A number of values for each value, the name for a function, None for a mark.
    stack: list[Any] = []
    memory: dict[Any, Any] = {}
    expanded = long = copies = longest = 0
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memory[argument])
            expanded += stack[-1] if isinstance(stack[-1], int) else 1
        elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memory[len(memory) if argument is None else argument] = stack[-1]
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            before = opcode.stack_before
            taken: list[Any] = []
            if pickletools.stackslice in before:
                while (value := stack.pop()) is not None:
                    taken.append(value)
                before = before[: before.index(pickletools.markobject)]
            taken += [stack.pop() for _ in before]
            if opcode.name in ("REDUCE", "NEWOBJ") and taken[-1] in _MAKERS:
                raise ValueError("it makes an array of any size")
            copies += opcode.name == "REDUCE" and taken[-1] == "_codecs encode"
            long += opcode.name in ("LONG", "LONG1", "LONG4")
            longest = max(longest, len(argument) if isinstance(argument, (str, bytes)) else 0)
            size = (
                1 + sum(value for value in taken if isinstance(value, int))
                if "TUPLE" in opcode.name
                else 1
            )
            stack += [argument if opcode.name == "GLOBAL" else size] * len(opcode.stack_after)
        if expanded > _EXPANDED or long > _LONG or (copies > 1 and copies * longest > _COPIED):
            raise ValueError("it uses its values over and over, which no state dict does")


def plain_tensors(state: Mapping[Any, Any]) -> None:
    """Raise ValueError unless every tensor is dense and has its numbers in the file."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if (
            type(value) not in (Tensor, nn.Parameter)
            or value.layout != torch.strided
            or value.is_quantized
            or value.is_meta
        ):
            raise ValueError(f"{name} is no plain tensor")
        count = value.numel()
        size = value.untyped_storage().nbytes()
        if count * value.itemsize > max(size, _REPEATED * value.itemsize):
            raise ValueError(f"{name} has {count} numbers in {size} bytes")


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a `.safetensors` or `.pt` file, looked for under the keys that training
    scripts use.
    """
    path = Path(path)
    refuse_html(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state: Any = load_tensors(path)
    except Exception as error:
        # The restricted unpickler raises whatever a broken file makes it stumble over.
        reason = unread(error)
        raise InputError(
            f"cannot read weights from {str(path)!r}: {reason}; save model.state_dict() to it."
        ) from None
    while isinstance(state, Mapping) and (
        key := next((k for k in _HOLDERS if isinstance(state.get(k), Mapping)), None)
    ):
        state = state[key]
    if (
        not isinstance(state, Mapping)
        or not state
        or not all(isinstance(v, Tensor) for v in state.values())
    ):
        raise InputError(f"{str(path)!r} holds no state dict: save model.state_dict() to it.")
    try:
        plain_tensors(state)
    except ValueError as error:
        raise InputError(
            f"cannot read weights from {str(path)!r}: {error}; save model.state_dict() to it."
        ) from None
    return {str(key): value for key, value in state.items()}


def fill(model: Any, path: str | Path, name: str) -> None:
    """Load the weights into the model; prefixes that the model's own names lack are taken off."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the weights {str(path)!r} do not fit {name!r}: it is no torch module, so it takes "
            "none."
        )
    state = read_state(path)
    wanted = set(model.state_dict())
    state = {_strip(key, wanted): value for key, value in state.items()}
    # A counter that only training reads; older files lack it.
    lacking = [
        key for key in wanted if key not in state and not key.endswith("num_batches_tracked")
    ]
    foreign = [key for key in state if key not in wanted]
    if lacking or foreign:
        parts = [
            f"{what} {_some(keys)}"
            for what, keys in (("they lack", lacking), ("they have", foreign))
            if keys
        ]
        raise InputError(
            f"the weights {str(path)!r} do not fit {name!r}: {' and '.join(parts)}; check the "
            "architecture."
        )
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise InputError(f"the weights {str(path)!r} do not fit {name!r}: {reason}.") from None


def _strip(key: str, wanted: set[str]) -> str:
    name = key
    while name not in wanted:
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        if prefix is None:
            return key  # as it stands in the file, for the sentence that names it
        name = name.removeprefix(prefix)
    return name


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{min(keys)!r}{more}"


def unread(error: Exception) -> str:
    """Why a file of tensors cannot be read, in words for people."""
    said = str(error)
    if isinstance(error, IndexError):  # of the unpickler, which found no pickle
        return "it is no file of torch.save"
    if not said or (not isinstance(error, OSError) and "weights_only" in said):
        return "it holds more than tensors, and code in a file is never run"
    return reason_of(error)


def refuse_html(path: str | Path, what: str = "weights") -> None:
    """Raise where a web page was saved under the name of a checkpoint, as blocked downloads
    leave behind.

    Args:
        path: the file.
        what: it should hold; default "weights".
    """
    regular(path, what)
    try:
        with open(path, "rb") as file:
            start = file.read(512).lstrip().lower()
    except OSError as error:
        raise InputError(
            f"cannot read {what} from {str(path)!r}: {error.strerror or error}."
        ) from None
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        raise InputError(
            f"{str(path)!r} is a web page, not a checkpoint: the download was refused, so fetch "
            "the file in a browser and put it there."
        )


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """While other libraries load: their `torch.load` gets the restricted unpickler whatever
    they ask for.
    """
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    contrary = os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)
        if contrary is not None:
            os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = contrary
