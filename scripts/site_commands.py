"""The reference of the command line, from the parser itself: a hook of mkdocs.

`docs/reference/command-line.md` has a line `<!-- commands -->`. When the site is built, every
command with its options stands there, so that the page cannot be older than the program.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

PAGE = "reference/command-line.md"
MARK = "<!-- commands -->\n"
LINES = 3  # a longer usage is left out: the tables say it better


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page: mkdocs calls this for each.

    Args:
        markdown: text of the file in docs/.
        page: mkdocs' page; `page.file.src_uri` is its path in docs/.
    """
    return markdown.replace(MARK, reference()) if page.file.src_uri == PAGE else markdown


def reference() -> str:
    """Every command, in the order of `wassail --help`, as Markdown."""
    from wassail.cli import parser as command_line

    whole = command_line._parser()
    found = []
    for path, parser in command_line.commands(whole):
        if path and not _children(parser):
            found.append(section(path, parser, _help(whole, path)))
    return "\n".join(found)


def section(path: tuple[str, ...], parser: argparse.ArgumentParser, about: str) -> str:
    """One command: what it is for, how it is called, and its options by group.

    Args:
        path: the words of the command.
        parser: of the command.
        about: what it is for.
    """
    usage = parser.format_usage().removeprefix("usage: ").strip()
    text = f"## wassail {' '.join(path)}\n\n{about}.\n"
    if usage.count("\n") < LINES:
        text += f"\n```text\n{usage}\n```\n"
    for group in parser._action_groups:
        rows = [_row(parser, action) for action in group._group_actions if _shown(action)]
        if rows:
            title = (group.title or "").capitalize()
            text += f"\n| {title} | |\n|---|---|\n{''.join(rows)}"
    return text


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    said = formatter._expand_help(action) if action.help else ""
    names = ", ".join(action.option_strings) or _plain(action.metavar or action.dest)
    takes = formatter._format_args(action, action.dest.upper()) if action.option_strings else ""
    name = f"{names} {takes}".strip()
    return f"| `{_plain(name)}` | {_plain(said)} |\n"


def _plain(value: Any) -> str:
    """On one line, without what a table takes for its own."""
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def _shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and "--help" not in action.option_strings


def _children(parser: argparse.ArgumentParser) -> bool:
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def _help(whole: argparse.ArgumentParser, path: tuple[str, ...]) -> str:
    """What `--help` of the command above says about a command."""
    parser = whole
    about = ""
    for word in path:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {child.dest: child.help or "" for child in action._choices_actions}
                about, parser = helps[word], action.choices[word]
                break
    return about[:1].upper() + about[1:]


if __name__ == "__main__":
    print(reference())
