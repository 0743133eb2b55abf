"""How dense the code is: tokens a line, long lines, parallel assignments, long functions, large
files, import cycles.

    python scripts/density.py [FOLDER] [--check]

FOLDER: the package to read, by default src/wassail. `--check`: exit code 1 if a limit is passed.
The figures of other projects were measured with the same rules on their newest versions.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ANCHORS = {
    "optimistix": 6.8,
    "captum": 6.4,
    "rich": 6.4,
    "POT": 8.1,
    "einops": 8.7,
    "auto_LiRPA": 9.9,
    "adversarial-library": 12.3,
}
COLUMNS = 100
FILE_LINES = 500
FUNCTION_LINES = 60
COMPLEXITY = 15
LIMITS = {
    "tokens a line, median": 10.0,
    "lines above 100 columns, %": 0.0,
    "parallel assignments, %": 4.0,
    "cycles": 0.0,
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
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.BoolOp,
    ast.comprehension,
    ast.match_case,
    ast.Assert,
)


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its lines."""
        return self.text.splitlines()

    @property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "src" / "wassail")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is passed")
    options = parser.parse_args()
    sources = [
        Source(str(p.relative_to(options.folder)), p.read_text())
        for p in sorted(options.folder.rglob("*.py"))
    ]
    figures = measure(sources, options.folder.name)
    for name, value in figures.items():
        limit = f"   (limit {LIMITS[name]:g})" if name in LIMITS else ""
        print(f"{name:40} {value:10.1f}{limit}")
    print(
        "tokens a line elsewhere: "
        + ", ".join(f"{name} {value}" for name, value in ANCHORS.items())
    )
    for title, rows in (
        ("long files", long_files(sources)),
        ("long or complex functions", hard_functions(sources)),
    ):
        print(f"\n{title}:" + "".join(f"\n  {row}" for row in rows))
    for cycle in cycles(sources, options.folder.name):
        print("cycle: " + ", ".join(cycle))
    passed = [name for name, limit in LIMITS.items() if figures[name] > limit]
    if options.check and passed:
        sys.exit("above the limit: " + ", ".join(passed))


def measure(sources: list[Source], package: str) -> dict[str, float]:
    """The figures of a package."""
    tokens = [count for source in sources for count in tokens_in_functions(source)]
    lines = [line for source in sources for line in source.lines]
    assignments = [
        node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.Assign)
    ]
    parallel = [
        node
        for node in assignments
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    return {
        "files": len(sources),
        "lines": len(lines),
        "tokens a line, mean": statistics.fmean(tokens),
        "tokens a line, median": statistics.median(tokens),
        "lines above 100 columns, %": 100 * sum(len(line) > COLUMNS for line in lines) / len(lines),
        "parallel assignments, %": 100 * len(parallel) / len(assignments),
        "files above 500 lines": len(long_files(sources)),
        "functions above 60 lines or complexity 15": len(hard_functions(sources)),
        "cycles": len(cycles(sources, package)),
    }


def tokens_in_functions(source: Source) -> Iterator[int]:
    """Tokens on each line of code inside functions, docstrings and comments left out."""
    inside: set[int] = set()
    for function in source.functions():
        first = function.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        start = (first.end_lineno or 0) + 1 if documented else first.lineno
        inside.update(range(start, (function.end_lineno or 0) + 1))
    counts: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in SILENT and token.start[0] in inside:
            counts[token.start[0]] = counts.get(token.start[0], 0) + 1
    yield from counts.values()


def long_files(sources: list[Source]) -> list[str]:
    """Files above the limit, longest first."""
    found = [
        (len(source.lines), source.name) for source in sources if len(source.lines) > FILE_LINES
    ]
    return [f"{name}: {count} lines" for count, name in sorted(found, reverse=True)]


def hard_functions(sources: list[Source]) -> list[str]:
    """Functions that are too long or branch too often."""
    found = []
    for source in sources:
        for function in source.functions():
            length = (function.end_lineno or 0) - function.lineno + 1
            paths = 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))
            if length > FUNCTION_LINES or paths > COMPLEXITY:
                found.append(
                    f"{source.name}:{function.lineno} {function.name}: {length} lines, "
                    f"complexity {paths}"
                )
    return found


def cycles(sources: list[Source], package: str) -> list[list[str]]:
    """Groups of modules that import each other, lazy imports included."""
    modules = {
        source.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): source
        for source in sources
    }
    arrows = {name: sorted(imported(source, modules, package)) for name, source in modules.items()}
    return [sorted(group) for group in components(arrows) if len(group) > 1]


def imported(source: Source, modules: dict[str, Source], package: str) -> set[str]:
    """The modules of the package that a file imports, for type checking only left out."""
    hidden = {
        node.lineno
        for block in ast.walk(source.tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
    }
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.lineno not in hidden:
            home = node.module.removeprefix(package).removeprefix(".")
            if node.module.split(".")[0] != package:
                continue
            for alias in node.names:
                inner = f"{home}.{alias.name}".removeprefix(".")
                if inner in modules:
                    found.add(inner)
                elif home in modules:
                    found.add(home)
    return found


def components(arrows: dict[str, list[str]]) -> list[set[str]]:
    """The strongly connected components: modules that reach each other."""
    reach = {name: reachable(name, arrows) for name in arrows}
    found: list[set[str]] = []
    seen: set[str] = set()
    for name in arrows:
        if name not in seen:
            group = {other for other in reach[name] if name in reach[other]} | {name}
            seen |= group
            found.append(group)
    return found


def reachable(start: str, arrows: dict[str, list[str]]) -> set[str]:
    """Everything that a module imports, directly or not."""
    found: set[str] = set()
    open_ = list(arrows[start])
    while open_:
        name = open_.pop()
        if name not in found:
            found.add(name)
            open_ += arrows[name]
    return found


if __name__ == "__main__":
    main()
