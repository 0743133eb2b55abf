"""A fingerprint of an exported program: equal fingerprints, equal functions.

The export runs the model's own code, so it sees every state that the code looks at: attributes,
globals, hooks, files. Constants count by their bytes, because `tensor.data.copy_` changes no
version number.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


def program_print(program: Any) -> bytes | None:
    """Of a program that `torch.export` returned: its operations, those of its parts, and its
    constants; None where a constant is of a kind that has no plain bytes.
    """
    found = hashlib.blake2b(digest_size=32)
    words = [(name, str(part.graph)) for name, part in _parts(program)]
    words.append(("signature", str(program.graph_signature)))
    constants = {**program.state_dict, **program.constants}
    for name, value in constants.items():
        if not isinstance(value, Tensor) or not _is_plain(value):
            return None
        words.append((name, f"{type(value)} {tuple(value.shape)} {value.dtype} {value.device}"))
    for pair in words:
        for text in pair:
            _add(found, text.encode("utf-8", "surrogatepass"))
    for value in constants.values():
        _add(found, _bytes(value))
    return found.digest()


def _parts(program: Any) -> list[tuple[str, Any]]:
    """The program and the programs inside it, such as those under another mode of autograd."""
    found = program.graph_module.named_modules()
    return [(name, part) for name, part in found if hasattr(part, "graph")]


def _is_plain(value: Tensor) -> bool:
    return (
        value.layout == torch.strided
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and value.device.type != "meta"
    )


def _bytes(value: Tensor) -> bytes | memoryview:
    own = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return own.reshape(-1).view(torch.uint8).numpy().data if own.numel() else b""


def _add(found: Any, data: bytes | memoryview) -> None:
    found.update(len(data).to_bytes(8, "little"))
    found.update(data)
