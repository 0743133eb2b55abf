"""A fingerprint of all that a module computes with: equal fingerprints, equal functions.

Parameters and buffers count by their bytes, because `tensor.data.copy_` changes no version number.
Attributes, hooks, submodules and the code of classes outside torch count too, with the globals that
the code names. Where something is found whose state is not known, there is no fingerprint: a model
without one is exported each time.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

# Libraries whose own functions and classes do not change while a program runs.
STILL = ("torch", "builtins", "math", "functools", "collections", "typing", "types", "abc", "enum")
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
TENSORS = (Tensor, nn.Parameter, nn.Buffer)
SKIPPED = ("__dict__", "__weakref__", "__doc__", "__annotations__", "__module__", "_abc_impl")
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class _Unknown(Exception):
    """Something whose state cannot be told."""


def fingerprint(model: nn.Module) -> bytes | None:
    """Of a module, its state and its code; None where something in it is not understood."""
    if any(getattr(torch_module, name, ()) for name in GLOBAL_HOOKS):
        return None
    print_ = _Print()
    try:
        print_.add(model)
    except _Unknown:
        return None
    return print_.digest()


def program_print(program: Any) -> bytes | None:
    """Of a program that `torch.export` returned: its operations and its constants."""
    signature = program.graph_signature
    print_ = _Print()
    try:
        print_.add(str(program.graph))
        print_.add(str(signature))
        print_.add(dict(program.state_dict))
        print_.add(dict(program.constants))
    except _Unknown:
        return None
    return print_.digest()


class _Print:
    """A hash that values are added to. A value that was added before counts as a reference."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no number of `id` is used twice

    def digest(self) -> bytes:
        """Of all that was added."""
        return self._hash.digest()

    def add(self, value: Any) -> None:
        """Add a value, with all that it refers to."""
        kind = type(value)
        if value is None or kind in PLAIN:
            self._word(f"{kind.__name__} {value!r}")
            return
        if id(value) in self._seen:
            self._word(f"seen {self._seen[id(value)]}")
            return
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if kind in TENSORS:
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._word("module")
            self.add(kind)
            self.add(vars(value))
        elif isinstance(value, type):
            self._class(value)
        elif kind in (list, tuple, torch.Size):
            self._many(kind.__name__, value)
        elif kind in (dict, OrderedDict, types.MappingProxyType):
            self._many(kind.__name__, [part for pair in value.items() for part in pair])
        elif kind in (set, frozenset) and all(type(v) is str for v in value):
            self._many(kind.__name__, sorted(value))
        else:
            self._callable(value)

    def _word(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self._hash.update(len(data).to_bytes(8, "little") + data)

    def _many(self, name: str, values: Iterable[Any]) -> None:
        values = list(values)
        self._word(f"{name} {len(values)}")
        for value in values:
            self.add(value)

    def _tensor(self, value: Tensor) -> None:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise _Unknown
        own = value.detach().cpu().contiguous()
        self._word(f"tensor {tuple(value.shape)} {value.dtype} {value.device}")
        self._hash.update(own.reshape(-1).view(torch.uint8).numpy().data)

    def _class(self, kind: type) -> None:
        """Classes of torch by name, with their own `forward`; others with all that they hold."""
        self._word(f"class {kind.__module__}.{kind.__qualname__}")
        if _still(kind.__module__):
            forward = vars(kind).get("forward")
            if isinstance(forward, types.FunctionType):
                self.add(forward)
        else:
            for name, value in vars(kind).items():
                if name not in SKIPPED:
                    self._word(name)
                    self.add(value)
        self._many("bases", kind.__bases__)

    def _callable(self, value: Any) -> None:
        match value:
            case types.FunctionType():
                self._function(value)
            case types.MethodType():
                self._many("method", (value.__func__, value.__self__))
            case types.BuiltinFunctionType() if value.__self__ is None or _is_library(value):
                self._word(f"builtin {value.__module__} {value.__qualname__}")
            case functools.partial():
                self._many("partial", (value.func, value.args, value.keywords))
            case staticmethod() | classmethod():
                self._many(type(value).__name__, (value.__func__,))
            case property():
                self._many("property", (value.fget, value.fset))
            case types.ModuleType() if _still(value.__name__):
                self._word(f"library {value.__name__}")
            case types.CodeType():
                self._code(value)
            case _:
                raise _Unknown

    def _function(self, value: types.FunctionType) -> None:
        """Its code, and every value that the code can reach by a name."""
        self._word(f"function {value.__module__} {value.__qualname__}")
        if _still(value.__module__ or ""):
            return
        self.add(value.__code__)
        self.add(value.__defaults__)
        self.add(value.__kwdefaults__)
        self.add(vars(value))
        for cell in value.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not filled yet
                raise _Unknown from None
        for name in sorted(_names(value.__code__)):
            if name in value.__globals__:
                self._word(name)
                self.add(value.__globals__[name])

    def _code(self, code: types.CodeType) -> None:
        self._word(f"code {code.co_code.hex()} {code.co_names} {code.co_varnames}")
        self._many("consts", code.co_consts)


def _still(module: str) -> bool:
    return module.split(".")[0] in STILL


def _is_library(value: types.BuiltinFunctionType) -> bool:
    owner = value.__self__
    return isinstance(owner, type | types.ModuleType) and _still(
        owner.__module__ if isinstance(owner, type) else owner.__name__
    )


def _names(code: types.CodeType) -> set[str]:
    """The names that some code and the functions inside it use."""
    found = set(code.co_names)
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            found |= _names(value)
    return found
