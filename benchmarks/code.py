"""The hash of code that a result depends on.

It is taken from the syntax tree without docstrings and without what only a type checker reads, so
comments, formatting, annotations and the version of Python do not change it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "wassail"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# `from __future__ import annotations` is on: they are never evaluated. Only `dataclass` looks for
# ClassVar in them, and a change of that alone is not seen.
TYPES = ("annotation", "returns")
SKIPPED = ("ctx", "kind", *TYPES)


def digest(modules: Iterable[str], own: Iterable[Path] = ()) -> str:
    """SHA-256 of the code of some files and folders.

    Args:
        modules: files and folders below src/wassail, as "attacks" or "network.py".
        own: files of this folder that measure; default none.

    Returns:
        64 hexadecimal digits.
    """
    total = hashlib.sha256()
    for path in [*files_of(modules), *sorted(own)]:
        total.update(path.relative_to(ROOT).as_posix().encode())
        total.update(digest_of_file(path).encode())
    return total.hexdigest()


@cache
def digest_of_file(path: Path) -> str:
    """SHA-256 of the code of one file."""
    return hashlib.sha256(structure(path.read_text()).encode()).hexdigest()


def files_of(modules: Iterable[str]) -> list[Path]:
    """The Python files of the modules, in a fixed order."""
    found: set[Path] = set()
    for module in modules:
        path = SOURCE / module
        if not path.exists():
            raise FileNotFoundError(
                f"src/wassail/{module} is gone: name what replaces it in benchmarks/rooms.py."
            )
        found.update(path.rglob("*.py") if path.is_dir() else [path])
    return sorted(found)


def structure(text: str) -> str:
    """The syntax tree of a file as text, without docstrings and types."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and getattr(node.annotation, "id", "") == "TypeAlias":
            node.value = None
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return "".join(_written(tree))


def _written(node: object) -> Iterator[str]:
    """A tree as text; fields that are empty in one version and absent in another are left out."""
    if isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            if value is not None and value != [] and name not in SKIPPED:
                yield f"{name}="
                yield from _written(value)
        yield ")"
    elif isinstance(node, list):
        for item in node:
            yield from _written(item)
            yield ","
    else:
        yield repr(node)
