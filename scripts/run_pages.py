"""Run what stands on a page of the documentation, and compare it with what the page shows.

    python scripts/run_pages.py [--write] PAGE.md ...

A page is run from top to bottom in an empty folder:

- a block of `python` is executed, all blocks of a page in one namespace;
- a block of `text` below it is what it prints;
- a block of `console` has commands behind `$ ` and below each what it prints; `wassail` runs in
  this process, anything else by bash;
- a block with a title, as in `python title="nets.py"`, is written to that file;
- a picture below a block of Python is the one that its last value shows in a notebook.

In what a page shows, a line `...` stands for any lines and `...` within a line for any text. Words
must be the same and numbers near, since another processor may round and train differently.
`--write` puts what was printed, and the pictures, into the pages. A first line
`<!-- needs: zoo -->` says that a page needs the networks of $WASSAIL_ZOO.
"""

from __future__ import annotations

import ast
import base64
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<source>.*?)^```\n'
    r"|^!\[(?P<about>[^]]*)\]\((?P<picture>[^)]+\.png)\)\n",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
PROGRESS = re.compile(r"^.*: \d+ % after \d+ s")
SHOWN = re.compile(r'src="data:image/png;base64,([^"]+)"')
NEEDS = re.compile(r"^<!-- needs: (\w+) -->\n")
ANY = "..."
WIDTH = 100
# Figures of a page hold to 10 % or 0.02.
RELATIVE = 0.1
ABSOLUTE = 0.02


@dataclass
class Part:
    """A piece of a page.

    Attributes:
        kind: "markdown", "picture", or the language of a block.
        source: the text; of a picture its path.
        title: the file that a block is written to, or none; of a picture its description.
        printed: what a block of Python printed.
        value: what its last line gave.
        commands: of a console: each command, and what it printed.
    """

    kind: str
    source: str
    title: str | None = None
    printed: str = ""
    value: Any = None
    commands: list[tuple[str, str]] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether it is executed."""
        return self.title is None and self.kind in ("python", "console")

    @property
    def blank(self) -> bool:
        """Whether there is nothing in it."""
        return not self.source.strip()


def parts(text: str) -> list[Part]:
    """The pieces of a page in their order.

    Args:
        text: of the page.
    """
    found = []
    end = 0
    for block in BLOCK.finditer(text):
        found.append(Part("markdown", text[end : block.start()]))
        if block["picture"]:
            found.append(Part("picture", block["picture"], block["about"]))
        else:
            found.append(Part(block["kind"], block["source"], block["title"]))
        end = block.end()
    found.append(Part("markdown", text[end:]))
    return [part for part in found if part.source]


def written(pieces: list[Part]) -> str:
    """A page of its pieces.

    Args:
        pieces: as `parts` gives them.
    """
    text = ""
    for piece in pieces:
        if piece.kind == "markdown":
            text += piece.source
        elif piece.kind == "picture":
            text += f"![{piece.title}]({piece.source})\n"
        else:
            title = f' title="{piece.title}"' if piece.title else ""
            text += f"```{piece.kind}{title}\n{piece.source}```\n"
    return text


def needs(text: str) -> str | None:
    """What a page needs beside the package: "zoo", or nothing.

    Args:
        text: of the page.
    """
    found = NEEDS.match(text)
    return found[1] if found else None


def run_page(text: str) -> list[Part]:
    """The pieces of a page, with what they print.

    Args:
        text: of the page.
    """
    pieces = parts(text)
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        for piece in pieces:
            if piece.title is not None and piece.kind != "picture":
                Path(piece.title).parent.mkdir(parents=True, exist_ok=True)
                Path(piece.title).write_text(piece.source)
            elif piece.kind == "python":
                piece.printed, piece.value = run_cell(piece.source, names)
            elif piece.kind == "console":
                for command, _ in commands(piece.source):
                    piece.commands.append((command, run_command(command)))
    return pieces


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a block of Python prints, and the value of its last line if that is an expression.

    Args:
        source: of the block.
        names: of the page; the block adds its own.
    """
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with redirect_stdout(printed):
        exec(compile(tree, "block", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "block", "eval"), names)
    return printed.getvalue(), value


def commands(source: str) -> list[tuple[str, str]]:
    """Each command of a console with what is shown below it.

    Args:
        source: of the block.
    """
    found: list[tuple[str, str]] = []
    goes_on = False
    for line in source.splitlines(keepends=True):
        if line.startswith("$ ") or goes_on:
            said, shown = found.pop() if goes_on else ("", "")
            found.append((said + line.removeprefix("$ "), shown))
            goes_on = line.rstrip("\n").endswith("\\")
        else:
            command, shown = found.pop()
            found.append((command, shown + line))
    return [(command.rstrip("\n"), shown) for command, shown in found]


def run_command(command: str) -> str:
    """What a command prints, both streams, without lines of progress.

    Args:
        command: as it is typed. `; echo $?` behind a command of `wassail` prints its exit code.
    """
    plain = command.replace("\\\n", " ")
    if not plain.startswith("wassail "):
        done = subprocess.run(["bash", "-c", plain], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr
    from wassail.cli import main as wassail

    plain, asked, _ = plain.partition("; echo $?")
    plain = os.path.expandvars(plain)
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            code = wassail(shlex.split(plain, comments=True)[1:])
        except SystemExit as end:
            code = end.code
    said = "".join(line for line in printed.getvalue().splitlines(True) if not PROGRESS.match(line))
    return said + (f"{code}\n" if asked else "")


def agree(printed: str, shown: str) -> bool:
    """Whether what was printed is what a page shows.

    Args:
        printed: the whole of it.
        shown: perhaps with `...`.
    """
    return _match([*map(_plain, _lines(shown))], [*map(_plain, _lines(printed))])


def refreshed(printed: str, shown: str) -> str:
    """What a page shows, with the numbers of now: all of it, or the lines around each `...`.

    Args:
        printed: the whole of what was printed.
        shown: by the page.
    """
    if ANY not in shown:
        return "".join(f"{line.rstrip()}\n" for line in _lines(printed))
    left = _lines(printed)
    if not _match([*map(_plain, _lines(shown))], [*map(_plain, left)], near=False):
        return shown
    new = []
    for line in _lines(shown):
        if _plain(line) == ANY:
            new.append(line)
            continue
        while (now := _numbers(_plain(left[0]), _plain(line))) is None:
            left.pop(0)
        here = left.pop(0)
        if ANY in line:
            numbers = iter(now)
            here = NUMBER.sub(lambda _, numbers=numbers: next(numbers), line)  # type: ignore[misc]
        new.append(here)
    return "".join(f"{line}\n" for line in new)


def picture_of(value: Any) -> bytes | None:
    """The picture that a value shows in a notebook, as PNG.

    Args:
        value: of the last line of a block.
    """
    found = SHOWN.search(value._repr_html_()) if hasattr(value, "_repr_html_") else None
    return base64.b64decode(found[1]) if found else None


def compare(pieces: list[Part]) -> list[str]:
    """What a page shows that is not so, one sentence each.

    Args:
        pieces: of a page that was run.
    """
    wrong = []
    solid = [piece for piece in pieces if not piece.blank]
    for piece, below in zip(solid, [*solid[1:], Part("markdown", "")]):
        if piece.kind == "python" and piece.runs:
            shown = below.source if below.kind == "text" else ""
            if not agree(piece.printed, shown):
                wrong.append(f"{piece.source}prints\n{piece.printed}")
        shown_below = commands(piece.source) if piece.commands else []
        for (command, printed), (_, shown) in zip(piece.commands, shown_below):
            if not agree(printed, shown):
                wrong.append(f"{command}\nprints\n{printed}")
    return wrong


def refresh(pieces: list[Part]) -> list[Part]:
    """The pieces of a page with what was printed.

    Args:
        pieces: of a page that was run.
    """
    new: list[Part] = []
    above: Part | None = None  # a block of Python whose output was not placed yet
    for piece in pieces:
        if piece.blank:
            new.append(piece)
            continue
        if above is not None and piece.kind == "text":
            piece.source = refreshed(above.printed, piece.source)
        elif above is not None and above.printed:
            place = new.index(above) + 1
            new[place:place] = [Part("markdown", "\n"), Part("text", refreshed(above.printed, ""))]
        if piece.commands:
            both = zip(piece.commands, commands(piece.source))
            lines = (f"$ {said}\n{refreshed(now, shown)}" for (said, now), (_, shown) in both)
            piece.source = "".join(lines)
        new.append(piece)
        above = piece if piece.kind == "python" and piece.runs else None
    return new


def draw(pieces: list[Part], folder: Path) -> None:
    """Write the pictures of a page.

    Args:
        pieces: of a page that was run.
        folder: of the page.
    """
    value = None
    for piece in pieces:
        if piece.runs:
            value = piece.value
        image = picture_of(value) if piece.kind == "picture" else None
        if image is not None:
            (folder / piece.source).write_bytes(image)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _plain(line: str) -> str:
    return " ".join(line.split())


def _match(shown: list[str], printed: list[str], near: bool = True) -> bool:
    """All lines; numbers may be any if `near` is not asked for."""
    if not shown:
        return not printed
    if shown[0] == ANY:
        rests = (printed[skip:] for skip in range(len(printed) + 1))
        return any(_match(shown[1:], rest, near) for rest in rests)
    if not printed:
        return False
    now = _numbers(printed[0], shown[0])
    if now is None or (near and not _near(now, NUMBER.findall(shown[0]))):
        return False
    return _match(shown[1:], printed[1:], near)


def _near(now: Sequence[str], then: Sequence[str]) -> bool:
    pairs = zip(map(float, now), map(float, then), strict=True)
    return all(abs(a - b) <= max(RELATIVE * abs(b), ABSOLUTE) for a, b in pairs)


def _numbers(printed: str, shown: str) -> tuple[str, ...] | None:
    """The numbers of a line that has the words of another one, or None."""
    pattern = ""
    for place, text in enumerate(shown.split(ANY)):
        pattern += ".*" if place else ""
        end = 0
        for number in NUMBER.finditer(text):
            pattern += re.escape(text[end : number.start()]) + f"({NUMBER.pattern})"
            end = number.end()
        pattern += re.escape(text[end:])
    found = re.fullmatch(pattern, printed)
    return None if found is None else found.groups()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, with lines of one width; modules that were imported from it are dropped."""
    before = Path.cwd()
    path = list(sys.path)
    environment = dict(os.environ)
    bin_folder = str(Path(sys.executable).parent)
    os.environ["COLUMNS"] = str(WIDTH)
    os.environ["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(ROOT)]  # tutorials of real networks take benchmarks.networks
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        for name, module in list(sys.modules.items()):
            place = getattr(module, "__file__", None)
            if place and Path(place).is_relative_to(folder):
                del sys.modules[name]


def main(arguments: list[str]) -> int:
    """Run pages; print what is not so, or write it into them."""
    wrong = 0
    for name in arguments:
        if name == "--write":
            continue
        page = Path(name).resolve()
        pieces = run_page(page.read_text())
        if "--write" in arguments:
            pieces = refresh(pieces)
            draw(pieces, page.parent)
            page.write_text(written(pieces))
        for sentence in compare(pieces):
            print(f"{page.name}: {sentence}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
