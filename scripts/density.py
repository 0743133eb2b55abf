"""What ruff does not look at: tokens a line, long files, private names that cross a file.

    python scripts/density.py [--check]

`--check`: exit code 1 if a limit is passed. A file above 700 lines is named in `LONG`.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "wassail"
TOKENS = 10.0  # on a line of code in a function, the median
FILE_LINES = 700
LONG = {  # files that may be longer
    "evaluation/reading.py",  # one class turns all files of a run into one record
    "zoo/onnx_operators.py",  # a list, a few lines each
}
SILENT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    name: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of its syntax."""
        return list(ast.walk(ast.parse(self.text)))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is passed")
    options = parser.parse_args()
    sources = [
        Source(path.relative_to(PACKAGE).as_posix(), path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    ]
    tokens = [count for source in sources for count in tokens_in_functions(source)]
    lines = {source.name: len(source.text.splitlines()) for source in sources}
    print(f"{len(sources)} files, {sum(lines.values())} lines")
    median = statistics.median(tokens)
    print(f"tokens a line: mean {statistics.fmean(tokens):.1f}, median {median:.1f}")
    found = [f"tokens a line: {median:.1f} is above {TOKENS:g}"] if median > TOKENS else []
    found += [
        f"{name}: {count} lines"
        for name, count in lines.items()
        if count > FILE_LINES and name not in LONG
    ]
    found += private_imports(sources)
    for finding in found:
        print(finding)
    if options.check and found:
        sys.exit(f"above the limits: {'; '.join(found)}")


def tokens_in_functions(source: Source) -> Iterator[int]:
    """Tokens on each line of code inside functions, docstrings and comments left out."""
    inside: set[int] = set()
    for function in source.nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = function.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        start = (first.end_lineno or 0) + 1 if documented else first.lineno
        inside.update(range(start, (function.end_lineno or 0) + 1))
    counts: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in SILENT and token.start[0] in inside:
            counts[token.start[0]] = counts.get(token.start[0], 0) + 1
    yield from counts.values()


def private_imports(sources: list[Source]) -> list[str]:
    """Names with a leading underscore that one file takes from another, and attributes of other
    objects of the package that no line of the file defines.
    """
    found = []
    own = {name for source in sources for name in defined_names(source)}
    for source in sources:
        here = defined_names(source)
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom) and _inside(node.module, node.level):
                names = [alias.name for alias in node.names if _private(alias.name)]
            elif isinstance(node, ast.Attribute) and _private(node.attr):
                # A name that no file of the package defines belongs to a library.
                names = [node.attr] if node.attr in own and node.attr not in here else []
            else:
                continue
            found += [f"{source.name}:{node.lineno} takes {name}" for name in names]
    return found


def defined_names(source: Source) -> set[str]:
    """Every name that a file defines: functions, classes, variables and attributes."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _inside(module: str | None, level: int) -> bool:
    return level > 0 or (module or "").split(".")[0] == PACKAGE.name


if __name__ == "__main__":
    main()
