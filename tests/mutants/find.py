"""Finds the rounding terms of a source file, and what the file is without each of them.

A mutant is one place of the source and the text that replaces it. Places are found in the syntax
tree, by what stands there and never by line number, so the list follows the code as it moves:

- a power `2.0**-k` with k >= 20, or a literal below 1e-9 in a sum or a product, becomes 0;
- a constant of the module that is such a number becomes 0 at each place that reads it, and one just
  above 1 becomes 1;
- a value that is rounded up by one unit in the last place (`_up`, `nextafter`) is left as it is;
- an interval that is widened (`outward`) is left as it is;
- a name like `slack`, or a part of it, becomes 0 at each place that reads it, one at a time.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SMALL = 1e-9  # literals below this in a sum or a product are rounding terms
TERMS = {"slack", "rounding", "residual", "tiny", "error", "ulp"}
RAISED = {"_up", "up", "rounded_up", "nextafter"}
REST = 80
CALLED = {"rounding_of", "gamma", "room_of"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: characters `start` to `end` become `text`."""

    file: str
    where: str
    line: int
    start: int
    end: int
    old: str
    text: str
    rest: str  # of the source from there, as far as an excuse may need it

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.where}: {self.old} -> {self.text}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def value(node: ast.AST) -> float | None:
    """The value of an expression of numbers, None if it is anything else."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id="UNIT"):  # of `wassail.rounding`
            return 2.0**-52
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            found = value(inner)
            return None if found is None else -found
        case ast.BinOp(left=left, op=op, right=right):
            a = value(left)
            b = value(right)
            if a is None or b is None:
                return None
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Pow():
                    return float(a**b)
    return None


def name(node: ast.AST) -> str:
    """The last word of `a` or `a.b.c`, empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def constants(tree: ast.Module) -> dict[str, str]:
    """Constants of a module that are rounding terms, and what they become."""
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            target = statement.targets[0].id
            number = value(statement.value)
            if number is not None and 0 < abs(number) < SMALL:
                found[target] = "0.0"
            elif number is not None and 0 < number - 1 < SMALL:
                found[target] = "1.0"
    return found


class Finder(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, file: str, source: str, shared: Mapping[str, Mapping[str, str]]) -> None:
        self.file = file
        self.source = source
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line.encode()))
        self.bytes = source.encode()
        tree = ast.parse(source)
        imported = {
            a.asname or a.name: shared[n.module or ""][a.name]
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom)
            for a in n.names
            if a.name in shared.get(n.module or "", {})
        }
        self.constants = {**imported, **constants(tree)}
        called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        parts = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and id(n) not in called]
        self.objects = {
            name(n.value) for n in parts
        } & TERMS  # terms that have parts: these are the numbers
        self.modules = {
            a.asname or a.name
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom) and n.module == "wassail"
            for a in n.names
        }  # a module is no number, whatever its name
        self.path: list[str] = []
        self.inner: list[ast.AST] = []
        self.reads: list[dict[str, int]] = []
        self.found: list[Mutant] = []
        self.visit(tree)

    def add(self, node: ast.expr, text: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.offsets[node.lineno - 1] + node.col_offset
        end = self.offsets[node.end_lineno - 1] + node.end_col_offset
        old = self.bytes[start:end].decode()
        first, last = (len(self.bytes[:k].decode()) for k in (start, end))
        rest = self.bytes[start:].decode()[:REST]
        self.found.append(
            Mutant(self.file, ".".join(self.path), node.lineno, first, last, old, text, rest)
        )

    def scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.path.append(node.name)
        reads: dict[str, int] = {}
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                reads[part.id] = reads.get(part.id, 0) + 1
        given = (
            {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
            if isinstance(node, ast.FunctionDef)
            else set()
        )
        self.reads.append({k: v + (k in given) for k, v in reads.items()})
        for part in node.body:
            self.visit(part)
        self.path.pop()
        self.reads.pop()

    visit_FunctionDef = scope
    visit_ClassDef = scope

    def visit_Assign(self, node: ast.Assign) -> None:
        if (
            self.path
            or not isinstance(node.targets[0], ast.Name)
            or node.targets[0].id not in self.constants
        ):
            self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        number = value(node)
        if isinstance(node.op, ast.Pow) and number is not None:
            if 0 < abs(number) <= 2.0**-20 and value(node.left) == 2:
                self.add(node, "0.0")
            return
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            for side in (node.left, node.right):
                found = value(side)
                if isinstance(side, ast.Constant) and found is not None and 0 < found < SMALL:
                    self.add(side, "0.0")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load) or node.id in self.modules:
            return
        if node.id in self.constants:
            self.add(node, self.constants[node.id])
        elif node.id in TERMS - self.objects and self.reads and self.reads[-1].get(node.id, 0) > 1:
            self.add(node, f"(0.0 * {node.id})")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(
            node.value, ast.Name
        ):  # a table of numbers: what is read from it has a name of its own
            self.visit(node.value)
        self.visit(node.slice)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and (
            node.attr in TERMS - self.objects or name(node.value) in TERMS - self.modules
        ):
            self.add(node, f"(0.0 * {ast.unparse(node)})")
        if name(node.value) not in TERMS:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = name(node.func)
        if called in RAISED and self.path[-1:] not in (["_up"], ["up"], ["rounded_up"]):
            self.add(node, f"({ast.unparse(node.args[0])})")
        if called == "outward" and self.path[-1:] != ["outward"]:
            self.add(node, f"({', '.join(map(ast.unparse, node.args[:2]))},)")
        if called in CALLED:
            self.add(node, "0.0")
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)  # a method is no number
        for argument in (*node.args, *node.keywords):
            self.visit(argument)


def module_of(file: str) -> str:
    """The name to import a file of the package by."""
    return "wassail." + file.removesuffix(".py").replace("/", ".")


def mutants(root: Path, sources: Mapping[str, str]) -> list[Mutant]:
    """The mutants of some files of a package, in order. root: where constants that they import
    are defined.
    """
    shared = {
        module_of(str(path.relative_to(root))): constants(ast.parse(path.read_text()))
        for path in root.rglob("*.py")
    }
    return [m for file, source in sources.items() for m in Finder(file, source, shared).found]
