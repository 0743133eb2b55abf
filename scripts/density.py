"""How dense the code is: tokens a line, long lines, parallel assignments, long functions, large
files, import cycles, private names that cross a file.

    python scripts/density.py [FOLDER] [--check]

FOLDER: the package to read, by default src/wassail. `--check`: exit code 1 if a limit is passed.
The figures of other projects were measured with this script on their package folders, on the
commits named in `ANCHORS`. Their cycles are not counted, since most of their imports are relative
and this script follows absolute ones.

A function above 60 lines (its docstring left out) or complexity 15, or a file above 500 lines, is
excused by a sentence of its docstring that begins with "Long because".
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENS_MEAN = "tokens a line, mean"
TOKENS_MEDIAN = "tokens a line, median"
LONG_LINES = "lines above 100 columns"
LONG_SHARE = "lines above 100 columns, %"
LONG_ELSEWHERE = "lines above 100 columns in tests, scripts, benchmarks and examples"
EXCUSED_FILES = "files above 500 lines, with no reason"
EXCUSED_FUNCTIONS = "functions above the limits, with no reason"
PARALLEL = "parallel assignments, %"
LONG_FILES = "files above 500 lines, %"
HARD_FUNCTIONS = "functions above 60 lines or 15 paths, %"
COMPARED = (TOKENS_MEAN, TOKENS_MEDIAN, LONG_SHARE, PARALLEL, LONG_FILES, HARD_FUNCTIONS)
# project: figures in the order of COMPARED, of that package at that commit
ANCHORS = {
    "optimistix": (7.2, 6.0, 0.1, 0.0, 5.9, 8.7),  # optimistix at 6415ab1
    "captum": (5.9, 4.0, 0.0, 0.8, 17.9, 13.7),  # captum at faac087
    "rich": (6.1, 5.0, 1.1, 0.1, 26.0, 5.6),  # rich at 42899d8
    "POT": (7.5, 5.0, 1.5, 2.3, 47.2, 21.6),  # ot at aed0120
    "einops": (8.8, 7.0, 2.6, 0.2, 11.1, 4.1),  # einops at ccb89f2
    "auto_LiRPA": (10.0, 8.0, 3.7, 3.1, 25.8, 8.0),  # auto_LiRPA at a050a3d
    "adversarial-library": (12.7, 11.0, 5.1, 2.1, 2.1, 15.5),  # adv_lib at 9dec220
}
COLUMNS = 100
FILE_LINES = 500
FUNCTION_LINES = 60
COMPLEXITY = 15
REASON = "Long because"
ELSEWHERE = ("tests", "scripts", "benchmarks", "examples")
LIMITS = {
    TOKENS_MEDIAN: 10.0,
    LONG_LINES: 0.0,
    LONG_ELSEWHERE: 0.0,
    EXCUSED_FILES: 0.0,
    EXCUSED_FUNCTIONS: 0.0,
    PARALLEL: 4.0,
    "cycles": 0.0,
    "private names across files": 0.0,
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

    @cached_property
    def lines(self) -> list[str]:
        """Its lines, remarks to a tool at their ends included."""
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of its syntax."""
        return list(ast.walk(self.tree))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        for node in self.nodes:
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
    figures[LONG_ELSEWHERE] = long_lines(
        path for folder in ELSEWHERE for path in (ROOT / folder).rglob("*.py")
    )
    for name, value in figures.items():
        limit = f"   (limit {LIMITS[name]:g})" if name in LIMITS else ""
        digits = 0 if value == int(value) else 1
        print(f"{name:70} {value:10.{digits}f}{limit}")
    print_anchors(figures)
    for title, rows in (
        ("long files without a reason", long_files(sources)),
        ("long or complex functions without a reason", hard_functions(sources)),
        ("private names across files", private_imports(sources, options.folder.name)),
        ("cycles", [", ".join(cycle) for cycle in cycles(sources, options.folder.name)]),
    ):
        print(f"\n{title}: {len(rows)}" + "".join(f"\n  {row}" for row in rows))
    passed = [name for name, limit in LIMITS.items() if figures[name] > limit]
    if options.check and passed:
        sys.exit("above the limit: " + ", ".join(passed))


def long_lines(paths: Iterable[Path]) -> int:
    """How many lines of these files are too long."""
    return sum(len(line) > COLUMNS for path in paths for line in path.read_text().splitlines())


def print_anchors(figures: dict[str, float]) -> None:
    """Our figures beside those of other projects."""
    print("\nbeside other projects:")
    names = ("here", *ANCHORS)
    print(f"{'':40}" + "".join(f"{name[:12]:>13}" for name in names))
    for place, title in enumerate(COMPARED):
        values = (figures[title], *(row[place] for row in ANCHORS.values()))
        print(f"{title:40}" + "".join(f"{value:13.1f}" for value in values))


def measure(sources: list[Source], package: str) -> dict[str, float]:
    """The figures of a package."""
    tokens = [count for source in sources for count in tokens_in_functions(source)]
    lines = [line for source in sources for line in source.lines]
    assignments = [
        node for source in sources for node in source.nodes if isinstance(node, ast.Assign)
    ]
    parallel = [
        node
        for node in assignments
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    functions = sum(len(list(source.functions())) for source in sources)
    long_ones = long_files(sources, excused=True)
    hard_ones = hard_functions(sources, excused=True)
    return {
        "files": len(sources),
        "lines": len(lines),
        TOKENS_MEAN: statistics.fmean(tokens),
        TOKENS_MEDIAN: statistics.median(tokens),
        LONG_LINES: sum(len(line) > COLUMNS for line in lines),
        LONG_SHARE: 100 * sum(len(line) > COLUMNS for line in lines) / len(lines),
        PARALLEL: 100 * len(parallel) / len(assignments),
        LONG_FILES: 100 * len(long_ones) / len(sources),
        HARD_FUNCTIONS: 100 * len(hard_ones) / functions,
        EXCUSED_FILES: len(long_files(sources)),
        EXCUSED_FUNCTIONS: len(hard_functions(sources)),
        "cycles": len(cycles(sources, package)),
        "private names across files": len(private_imports(sources, package)),
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


def long_files(sources: list[Source], excused: bool = False) -> list[str]:
    """Files above the limit, longest first. excused: also those that give a reason."""
    found = [
        (len(source.lines), source.name)
        for source in sources
        if len(source.lines) > FILE_LINES
        and (excused or REASON not in (ast.get_docstring(source.tree) or ""))
    ]
    return [f"{name}: {count} lines" for count, name in sorted(found, reverse=True)]


def hard_functions(sources: list[Source], excused: bool = False) -> list[str]:
    """Functions that are too long or branch too often. excused: also those that give a reason."""
    found = []
    for source in sources:
        for function in source.functions():
            length = (function.end_lineno or 0) - function.lineno + 1 - docstring_lines(function)
            paths = 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))
            hard = length > FUNCTION_LINES or paths > COMPLEXITY
            if hard and (excused or REASON not in (ast.get_docstring(function) or "")):
                found.append(
                    f"{source.name}:{function.lineno} {function.name}: {length} lines, "
                    f"complexity {paths}"
                )
    return found


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a docstring, which do not count as length: a parameter has a line of its own."""
    first = function.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return 0
    return (first.end_lineno or 0) - first.lineno + 1


def private_imports(sources: list[Source], package: str) -> list[str]:
    """Names with a leading underscore that one file takes from another, and attributes of other
    objects of the package that no line of the file defines.
    """
    found = []
    own = {name for source in sources for name in defined_names(source)}
    for source in sources:
        here = defined_names(source)
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom) and _inside(node.module, node.level, package):
                names = [alias.name for alias in node.names if _private(alias.name)]
            elif isinstance(node, ast.Attribute) and _private(node.attr):
                # A name that no file of the package defines belongs to a library.
                names = [node.attr] if node.attr in own and node.attr not in here else []
            else:
                continue
            found += [f"{source.name}:{node.lineno} {name}" for name in names]
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


def _inside(module: str | None, level: int, package: str) -> bool:
    return level > 0 or (module or "").split(".")[0] == package


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
        for block in source.nodes
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
    }
    found: set[str] = set()
    for node in source.nodes:
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
