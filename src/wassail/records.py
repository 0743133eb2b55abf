"""Frozen results that save and load themselves: tensors and plain values in one safetensors
file, never a pickle.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from os import PathLike
from stat import S_ISREG
from typing import Any, ClassVar, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from wassail import writing
from wassail.errors import InputError
from wassail.notebook import card, verbatim
from wassail.specification import Specification
from wassail.threat import Boxes, Groups, Threat, boxes_of, parse_groups

_AnyRecord = TypeVar("_AnyRecord", bound="Record")
LOW, HIGH = ":low", ":high"  # of a threat with boxes of its own
_TENSORS: dict[str, type[Specification | Boxes]] = {"Specification": Specification, "Boxes": Boxes}
# What a file that makes no sense makes its reader stumble over.
ODD = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
_PARTS = re.compile(r"\[.*\]")  # what stands in brackets of an annotation is not looked at


class Record:
    """Base of the result dataclasses. A field is a tensor, None, a `Threat`, `Groups`, another
    record, or anything JSON can hold.
    """

    kinds: ClassVar[dict[str, type[Record]]] = {}

    def __init_subclass__(cls) -> None:
        Record.kinds[cls.__name__] = cls

    def save(self, path: str | PathLike[str]) -> None:
        """Write the record to `path`, a safetensors file with the plain fields in its header."""
        values = _flat(self)
        tensors = {
            k: v.detach().cpu().contiguous() for k, v in values.items() if isinstance(v, Tensor)
        }
        plain = {k: _plain(v) for k, v in values.items() if not isinstance(v, Tensor)}
        # clone(): two fields may share memory (a sample that did not move), which the format
        # refuses.
        tensors = {k: v.clone() for k, v in tensors.items()}
        metadata = {"wassail": type(self).__name__, "fields": json.dumps(plain)}
        writing.save(path, _ordered(save(tensors, metadata=metadata)))

    def _repr_html_(self) -> str:
        return card(type(self).__name__, verbatim(str(self)))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what `save` wrote. Runs no code from the file."""
        try:
            if not S_ISREG(os.stat(path).st_mode):
                raise OSError("it is no regular file")
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                names = list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {str(path)!r}: {_line(error)}.") from None
        if header.get("wassail") != cls.__name__:
            raise InputError(
                f"{str(path)!r} holds {header.get('wassail', 'something else')}, not "
                f"{cls.__name__}: load it with the class that saved it."
            )
        try:
            plain = {name: _rich(value) for name, value in json.loads(header["fields"]).items()}
            return _made(cls, _nested({**tensors, **plain}))
        except ODD as error:
            raise InputError(
                f"{str(path)!r} is not a complete {cls.__name__}: {_line(error)}; save it again."
            ) from None


def _ordered(file: bytes) -> bytes:
    """A safetensors file with its header in order: the library writes it in any order."""
    size = int.from_bytes(file[:8], "little")
    fields = json.loads(file[8 : 8 + size])
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    header = text.encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + file[8 + size :]


def check_equal(name: str, ours: Any, theirs: Any) -> None:
    """Refuse to combine results that were computed for different things."""
    tensors = [isinstance(value, Tensor) for value in (ours, theirs)]
    if all(tensors):
        same = torch.equal(ours.cpu(), theirs.cpu())
    else:
        same = not any(tensors) and ours == theirs
    if not same:
        detail = "" if any(tensors) else f" ({ours} and {theirs})"
        raise InputError(
            f"the two results differ in {name}{detail}: combine results for the same samples and "
            "threat."
        )


def _flat(record: Record | Specification | Boxes, prefix: str = "") -> dict[str, Any]:
    """The fields of a record and, named `field/name`, those of the records in it."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        boxes = boxes_of(value.domain) if isinstance(value, Threat) else None
        if boxes is not None:  # tensors, beside the other fields of the threat
            low, high = boxes
            values |= {prefix + field.name + LOW: low, prefix + field.name + HIGH: high}
            values[prefix + field.name] = dataclasses.replace(value, domain=None)
        elif isinstance(value, Record | Specification | Boxes):
            values |= {
                prefix + field.name + "/": type(value).__name__,
                **_flat(value, prefix + field.name + "/"),
            }
        else:
            values[prefix + field.name] = value
    return values


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """What `_flat` took apart, put together."""
    for name in [name for name in values if name.endswith(LOW)]:
        owner = name.removesuffix(LOW)
        boxes: Any = Boxes(values.pop(name), values.pop(owner + HIGH))
        values[owner] = dataclasses.replace(values[owner], domain=boxes)
    inner: dict[str, dict[str, Any]] = {}
    for name in [name for name in values if "/" in name]:
        owner, _, rest = name.partition("/")
        inner.setdefault(owner, {})[rest] = values.pop(name)
    for owner, fields in inner.items():
        kind = fields.pop("")
        parts = _nested(fields)
        if kind in _TENSORS:
            values[owner] = _TENSORS[kind](**parts)
        else:
            values[owner] = _made(Record.kinds[kind], parts)
    return values


def _made(kind: type[_AnyRecord], values: dict[str, Any]) -> _AnyRecord:
    """A record of values out of a file, each of which is what its field says."""
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in values and not _fits(str(field.type), values[field.name]):
            raise TypeError(
                f"{field.name} is {type(values[field.name]).__name__}, not {field.type}"
            )
    return kind(**values)


def _fits(wanted: str, value: Any) -> bool:
    """Whether a value is of the type that an annotation names; what we have no word for fits."""
    return any(
        _is(kind.partition("[")[0].strip(), value) for kind in _PARTS.sub("", wanted).split("|")
    )


def _is(kind: str, value: Any) -> bool:
    if kind == "Domain":
        numbers = isinstance(value, (tuple, list)) and all(_is("float", item) for item in value)
        return value is None or isinstance(value, Boxes) or (numbers and len(value) == 2)
    if kind in ("float", "int"):
        return isinstance(value, (int, float) if kind == "float" else int) and not isinstance(
            value, bool
        )
    kinds = (Tensor, str, bool, Threat, Groups, Specification, Mapping, tuple)
    known: dict[str, type] = {each.__name__: each for each in kinds} | {"None": type(None)}
    expected = known.get(kind) or Record.kinds.get(kind)
    return expected is None or isinstance(value, expected)


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _plain(value: Any) -> Any:
    if isinstance(value, (Threat, Groups)):
        return {type(value).__name__: dataclasses.asdict(value)}
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"Threat"}:
        return Threat(**value["Threat"])
    if isinstance(value, dict) and set(value) == {"Groups"}:
        return parse_groups(value["Groups"])
    return tuple(value) if isinstance(value, list) else value
