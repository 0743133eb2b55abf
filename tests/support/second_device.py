"""A second device made of Python: what a GPU refuses, it refuses; where the host would wait for a
GPU, it counts.

    with second_device() as second:
        model.to(second.device)
        ...
    second.total            # how often the host waited
    second.waits            # where: "item at network.py:12" -> how often
    assert not second.draws # random numbers that were drawn on the device

A tensor on it says that it lives on "elsewhere:0". Its numbers are in a tensor on the CPU,
`tensor.inside`, so results are those of the CPU to the last bit and every difference is a mistake
of the code under test. Like CUDA it refuses:

- operations on tensors of two devices; a tensor without dimensions on the CPU may join elementwise
  operations;
- an index on the device for a tensor on the CPU;
- a generator of the CPU for a tensor on the device;
- `.numpy()` of a tensor on the device;
- with `float64=False`, as on Apple's MPS, any tensor in float64 on the device.

A wait is counted for every read on the host (`item`, `if tensor`, `tolist`, `cpu()`), for every
operation whose result has a size that depends on values (`nonzero`, boolean indices, `unique`, ...)
and for every copy to the device that is not `non_blocking`. Autograd, views, in-place operations
and modules work as on any device. In-place changes of a shape (`unsqueeze_`, `resize_`) are refused
because this device cannot do them.
"""

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
DEVICE = torch.device("cpu")  # the device itself, once it is registered
SOURCE = (
    "/wassail/"  # waits are charged to the innermost line of a file below a folder of this name
)

# The result, or its size, is read on the host.
READS = {"_local_scalar_dense", "equal", "is_nonzero"}
SIZED = {
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
    "_linalg_check_errors",
    "_linalg_svd",
    "_linalg_eigh",
    "linalg_eig",
    "linalg_eigvals",
    "linalg_lstsq",
    "multinomial",
}
INDEXED = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}
COPIES = {"copy_", "copy", "_to_copy", "_copy_from"}
# Operations for which CUDA wants every tensor on the device, those without dimensions too.
STRICT = {
    "cat",
    "stack",
    "gather",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "scatter_reduce_",
    "index_select",
    "index_add",
    "index_add_",
    "index_copy",
    "index_copy_",
    "index_fill",
    "index_fill_",
    "take",
    "equal",
    "bmm",
    "mm",
    "addmm",
    "baddbmm",
    "mv",
    "dot",
    "addmv",
    "convolution",
    "embedding",
    "searchsorted",
    "bucketize",
}
DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal",
    "normal_", "uniform", "uniform_", "bernoulli", "bernoulli_", "exponential_", "cauchy_",
    "geometric_", "log_normal_", "random_", "multinomial", "native_dropout",
}  # fmt: skip


@dataclass
class Second:
    """The device and what happened on it since the `with` began."""

    float64: bool = True
    waits: collections.Counter[str] = field(default_factory=collections.Counter)
    draws: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def total(self) -> int:
        """How often the host waited."""
        return self.waits.total()

    def worst(self, count: int = 10) -> str:
        """The places with the most waits, a line each."""
        return "\n".join(f"{times:6d}  {place}" for place, times in self.waits.most_common(count))


_now = Second()


@contextlib.contextmanager
def second_device(float64: bool = True) -> Iterator[Second]:
    """Inside, the device exists and its counters run from zero.

    Args:
        float64: whether the device has it; without, it refuses such tensors as MPS does.
    """
    global _now
    registered()
    before = _now
    _now = Second(float64)
    try:
        with _Mode():
            yield _now
    finally:
        _now = before


class SecondTensor(torch.Tensor):
    """A tensor on the second device; `inside` holds its numbers."""

    inside: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> "SecondTensor":
        if not _now.float64 and inside.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                f"Cannot convert a {NAME} Tensor to {inside.dtype}: the device does not support "
                f"it ({place()})"
            )
        layout: dict[str, Any] = {
            "strides": inside.stride(),
            "storage_offset": inside.storage_offset(),
        }
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, **layout, dtype=inside.dtype, device=DEVICE
        )
        made.inside = inside
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{NAME}({self.inside})"

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if self.dim() == 0 else repr(self)

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inside.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first. "
            f"({place()})"
        )

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


def place() -> str:
    """The innermost line of the library under test that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if SOURCE in name:
            return f"{name.rsplit(SOURCE, 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


def _wait(kind: str) -> None:
    _now.waits[f"{kind} at {place()}"] += 1


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with every tensor in it changed; torch's own tree_map takes most of the time of
    a small operation.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map(change, part) for part in value])
    if isinstance(value, dict):
        return {name: _map(change, part) for name, part in value.items()}
    return value


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    name = function._schema.name.split("::")[1]
    there: list[SecondTensor] = []
    here: list[torch.Tensor] = []

    def open_(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, SecondTensor):
            there.append(tensor)
            return tensor.inside
        here.append(tensor)
        return tensor

    inside = _map(open_, args)
    options = _map(open_, kwargs)
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    sent = asked is not None and asked.type == NAME
    fetched = asked is not None and asked.type != NAME
    if not there and not sent:
        return function(*args, **kwargs)

    _refuse(name, args, kwargs, there, here)
    _count(name, args, kwargs, there, here, sent, fetched)
    if name in DRAWS:
        _now.draws[f"{name} at {place()}"] += 1

    if sent:
        options["device"] = torch.device("cpu")
    out = function(*inside, **options)
    if function._schema.is_mutable and name.endswith("_") and isinstance(args[0], torch.Tensor):
        if isinstance(args[0], SecondTensor) and args[0].shape != args[0].inside.shape:
            raise NotImplementedError(
                f"{name} changes a shape in place, which this device cannot do ({place()})"
            )
        return args[0]
    if fetched or name in READS:
        return out
    # An operation that returns its argument returns the same tensor.
    known = {id(tensor.inside): tensor for tensor in there}
    return _map(
        lambda tensor: known[id(tensor)] if id(tensor) in known else SecondTensor(tensor), out
    )


def _refuse(name: str, args: Any, kwargs: Any, there: list[Any], here: list[Any]) -> None:
    """Raise what CUDA raises for tensors and generators of two devices."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found '{generator.device}' "
            f"({name}, {place()})"
        )
    if not there or not here or name in COPIES:
        return
    if name in INDEXED:
        if not isinstance(args[0], SecondTensor):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"(cpu) ({name}, {place()})"
            )
        index = {id(i) for i in args[1] if i is not None}
        here = [tensor for tensor in here if id(tensor) not in index]
    target = name.endswith("_") and not isinstance(args[0], SecondTensor)
    if target or any(tensor.dim() or name in STRICT for tensor in here):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE} and cpu! "
            f"({name}, {place()})"
        )


def _count(
    name: str, args: Any, kwargs: Any, there: list[Any], here: list[Any], sent: bool, fetched: bool
) -> None:
    """Count the operation if the host waits for it."""
    if there and (name in READS or name in SIZED):
        _wait({"_local_scalar_dense": "item"}.get(name, name))
    elif there and name == "repeat_interleave" and kwargs.get("output_size") is None:
        _wait(name)
    elif there and name in INDEXED:
        index = [i for i in args[1] if i is not None]
        if any(i.dtype in (torch.bool, torch.uint8) for i in index):
            _wait("boolean index")
        if any(not isinstance(i, SecondTensor) for i in index):
            _wait("index from the host")
    elif there and fetched:
        _wait("fetch")
    elif there and name == "lift_fresh":  # what `torch.tensor(numbers, device=...)` ends with
        _wait("send")
    elif name == "copy_" and there and here:
        kind = "send" if isinstance(args[0], SecondTensor) else "fetch"
        if kind == "fetch" or not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            _wait(kind)
    elif sent and not there and here and not kwargs.get("non_blocking"):
        _wait("send")


class _Backend:
    """What torch asks of the module of a backend."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, *_: Any) -> None:
        _wait("synchronize")

    def manual_seed_all(self, seed: int) -> None:
        """The device draws from the generator of the CPU, which is seeded anyway."""

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        """As for the seed."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> SecondTensor:
    return SecondTensor(
        torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    )


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> SecondTensor:
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Any, target: Any, non_blocking: bool = False):
    plain = [t.inside if isinstance(t, SecondTensor) else t for t in (source, target)]
    plain[1].copy_(plain[0])
    return target


def _local_scalar_dense(tensor: Any) -> Any:
    _wait("item")
    return tensor.inside.item()


@cache
def registered() -> list[torch.library.Library]:
    """Tell torch about the device, once, when it is first used: autograd starts a thread for every
    device there is.

    A process that is forked after that cannot differentiate, so tests that fork must come first.
    """
    global DEVICE
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    DEVICE = torch.device(NAME, 0)
    autocast = torch.library.Library(
        "_", "IMPL", "AutocastPrivateUse1"
    )  # allowed, and casts nothing
    autocast.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL")  # what torch calls below its dispatch of Python
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")
    return [autocast, library]
