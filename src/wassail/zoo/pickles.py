"""Pickles of arrays, read without running anything."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from wassail.errors import InputError, reason_of
from wassail.zoo.weights import regular

LIMIT = 64 << 30  # bytes that one array may have

REST = (
    1 << 30
    # bytes after the samples that are asked for: they are unpacked too, up to here, to compare the
    # checksum
)


class _Array:
    """Stands in for numpy's array while a pickle is read: takes the state, and lets numpy make
    nothing of it unchecked.
    """

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        plain = (
            isinstance(dtype, _Dtype)
            and dtype.code in ("u1", "uint8", b"u1", b"uint8")
            and isinstance(data, bytes)
        )
        sizes = (
            isinstance(shape, tuple)
            and len(shape) <= 8
            and all(isinstance(s, int) and 0 <= s <= LIMIT for s in shape)
        )
        if not plain or fortran or not sizes or math.prod(shape) != len(data):
            raise pickle.UnpicklingError("it holds an array that is not one of bytes")
        self.value = np.frombuffer(data, np.uint8).reshape(shape)


class _Dtype:
    """Stands in for numpy's number type: keeps its code."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like, which bytes do not have


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into old pickles."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("it holds text in an unusual encoding")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}

# Numbers, text, bytes, lists, tuples, dicts, the five names above, and the memory of what came
# before.
_OPCODES = """
    MARK STOP PROTO FRAME NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES
    EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM
    SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE
"""

_PICKLER: Any = pickle._Unpickler  # in Python: it looks before it stores


class _Unpickler(_PICKLER):  # type: ignore[misc]
    """Reads a pickle by the opcodes above.

    Keys are text or bytes: the hash of nested tuples may never end, and integers can be chosen that
    have all the same one.

    Args:
        data: the pickle.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: _PICKLER.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _OPCODES.split())
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._left = len(data)  # bytes that text may turn into: each was written out once

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, and code in a file is never run"
            )
        found = _ALLOWED[module, name]
        return self._encode if found is _encode else found

    def _encode(self, text: str, encoding: str) -> bytes:
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it uses the same text over and over")
        return _encode(text, encoding)

    def load_put(self) -> None:
        place = int(self.readline()[:-1])
        if not 0 <= place < 1 << 32:
            raise pickle.UnpicklingError("it numbers its values as no program does")
        self.memo[place] = self.stack[-1]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside itself")

    def load_dict(self) -> None:
        items = self.pop_mark()
        _check_keys(items[::2])
        self.append({items[i]: items[i + 1] for i in range(0, len(items), 2)})

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _check_keys([key])
        self._target(dict)[key] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        _check_keys(items[::2])
        target = self._target(dict)
        for i in range(0, len(items), 2):
            target[items[i]] = items[i + 1]

    def load_append(self) -> None:
        value = self.stack.pop()
        self._target(list).append(value)

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._target(list).extend(items)

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (_Array, _Dtype)):
            raise pickle.UnpicklingError("it sets the state of something else than an array")
        self.stack[-1].__setstate__(state)

    def _target(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise pickle.UnpicklingError("it adds to something that takes nothing")
        return self.stack[-1]

    dispatch[pickle.PUT[0]] = load_put
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.APPEND[0]] = load_append
    dispatch[pickle.APPENDS[0]] = load_appends
    dispatch[pickle.BUILD[0]] = load_build


def _check_keys(keys: list[Any]) -> None:
    if not all(isinstance(key, (str, bytes)) for key in keys):
        raise pickle.UnpicklingError("a key of a dict in it is no text")


def restricted_unpickle(path: Path) -> Any:
    """A pickle of lists, dicts, strings, numbers and arrays of bytes; everything else is
    refused, and nothing is run.
    """
    regular(path, "data")
    if path.stat().st_size > REST:
        raise InputError(
            f"cannot read data from {str(path)!r}: no batch of CIFAR has {path.stat().st_size} "
            "bytes."
        )
    data = path.read_bytes()
    try:
        return _plain(_Unpickler(data).load())
    except InputError:
        raise
    except Exception as error:  # damaged pickles fail in every way there is
        raise InputError(f"cannot read data from {str(path)!r}: {reason_of(error)}.") from None


def _plain(value: Any) -> Any:
    """Arrays in place of what stood in for them, in the entries of a batch."""
    if isinstance(value, dict):
        return {
            key: entry.value if isinstance(entry, _Array) else entry for key, entry in value.items()
        }
    return value.value if isinstance(value, _Array) else value
