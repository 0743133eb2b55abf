"""`wassail init` and `evaluate --config`: the options of an evaluation in a TOML file.

The file is written from the parser and read back into it, so both know every option.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wassail.cli.options import refuse_gone, settings_of
from wassail.cli.shared import FOLDER, ROBUSTBENCH, writing
from wassail.cli.task import names_in
from wassail.errors import InputError, unknown
from wassail.writing import read_small, save

MOST = 1 << 16  # bytes of a file
DOTS = 200  # of one line: a key of thousands of parts takes gigabytes to read
CODE = ("model", "data")  # options that may name a function
NO_CODE = ("robustbench", "timm", "hf", "huggingface")  # what stands before other names
TRUSTING = ("trust", "ray")  # options that let others run code
PLACES = ("out", "write")  # options that name what is written
WITHOUT = {"help", "config", "key"}  # options that make no sense in the file
HEAD = """\
# An evaluation: {command} --config {name}
# Every line that begins with "# " and holds "=" is an option with its default: take the "# " away
# to change it. What stands on the command line goes first.
"""


def actions(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The options of a parser with the titles of their groups, in the order of its help."""
    for group in parser._action_groups:
        for action in group._group_actions:
            if key_of(action) not in WITHOUT:
                yield group.title or "", action


def key_of(action: argparse.Action) -> str:
    """What an option is called in the file: its long name without dashes."""
    long = [word for word in action.option_strings if word.startswith("--")]
    return (long or action.option_strings or [action.dest])[0].lstrip("-")


def init_text(parser: argparse.ArgumentParser, name: str) -> str:
    """The commented file.

    parser: of `evaluate`.
    """
    lines = [HEAD.format(name=name, command=parser.prog)]
    title = None
    for group, action in actions(parser):
        if group != title:
            title = group
            lines.append(f"\n## {group}")
        about = (action.help or "") % {**vars(action), "prog": parser.prog}
        lines.append(f"# {about}" if about else "#")
        needed = action.required and not action.option_strings
        value = "digits-cnn-adv" if needed else _default(action)
        mark = "" if action.required else "# "
        lines.append(f"{mark}{key_of(action)} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _default(action: argparse.Action) -> Any:
    if action.nargs == 0:
        return False
    if action.required:
        return ["8/255"]
    if action.default is None:
        return [] if action.nargs in ("+", "*", 2) else ""
    return action.default


def read_config(path: str) -> dict[str, Any]:
    """The options in a file."""
    try:
        text = read_small(path, MOST, "a configuration").decode()
    except InputError as error:
        said = str(error).rstrip(".")
        raise InputError(f"{said}; `wassail init {path}` writes a file.") from None
    except ValueError:
        raise InputError(f"{path!r} is no TOML file: it is not in UTF-8.") from None
    if any(line.count(".") > DOTS for line in text.splitlines()):
        raise InputError(f"{path!r} nests its keys, and options have none within: repair it.")
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or ["no TOML"])[0].rstrip(".")
        raise InputError(
            f"{path!r} is no TOML file: {reason}; see `wassail init` for one."
        ) from None
    return found


def apply_config(parser: argparse.ArgumentParser, path: str, trusted: bool = False) -> None:
    """Make what a file says the defaults of a parser.

    parser: of `evaluate`; trusted: whether `--trust` stands on the command line: then the file may
    name code.
    """
    known = {key_of(action): action for _, action in actions(parser)}
    for key, value in read_config(path).items():
        refuse_gone([f"--{key}"])
        if key not in known:
            raise unknown(f"option of {path!r},", key, known)
        if not trusted:
            _refuse_code(key, value, path)
        if key in PLACES and value != "":
            for place in value if isinstance(value, list) else [value]:
                _refuse_place(key, place, path)
        action = known[key]
        if value in ("", []):
            continue
        action.default = _value(action, key, value, path)
        action.required = False
        if not action.option_strings:
            action.nargs = "?"


def _refuse_code(key: str, value: Any, path: str) -> None:
    """A file from elsewhere runs no code: neither by a name of a function nor by a cluster."""
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    code = key in CODE and any(_names_code(word) for word in words)
    if code or (key in TRUSTING and value not in ("", False)):
        what = f"is {words[0][:60]!r}, which runs code" if code else "asks for trust"
        raise InputError(
            f"{key} in {path!r} {what}: if the file is your own, add --trust on the command line "
            f"or give {key} there."
        )


def _names_code(word: str) -> bool:
    """Whether a model or data are made by a function that the word names."""
    word, _ = settings_of(word, (*FOLDER, *ROBUSTBENCH), path=True)
    if ":" not in word:
        return False
    from wassail.zoo import DATASETS
    from wassail.zoo.factory import is_call

    return is_call(word) and word.partition(":")[0] not in {*NO_CODE, *DATASETS}


def _refuse_place(key: str, value: Any, path: str) -> None:
    """What a file from elsewhere has written stays below the current folder."""
    here = Path.cwd().resolve()
    try:
        there = (here / str(value)).resolve()
    except (OSError, ValueError, RuntimeError):
        there = here
    if there == here or here not in there.parents:
        raise InputError(
            f"{key} in {path!r} is {str(value)[:60]!r}, which is not below the current folder: "
            f"give --{key} on the command line."
        )


def _value(action: argparse.Action, key: str, value: Any, path: str) -> Any:
    """A value of the file as the parser would have made it of words."""
    many = action.nargs in ("+", "*", 2) or isinstance(action, argparse._AppendAction)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{key} in {path!r} is {value!r}: write true or false.")
        return action.const if value else action.default
    if action.nargs == "?" and value is True:
        return action.const
    if action.type is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{key} in {path!r} is {value!r}: write a whole number.")
        return value
    if isinstance(value, (dict, bool)) or (isinstance(value, list) and not many):
        raise InputError(f"{key} in {path!r} is {value!r}: write one word or number.")
    return [str(v) for v in (value if isinstance(value, list) else [value])] if many else str(value)


def config_in(words: Sequence[str]) -> str | None:
    """The file that `--config` names, None without it."""
    for i, word in enumerate(words):
        if word.startswith("--config="):
            return word.partition("=")[2]
        if word == "--config" and i + 1 < len(words):
            return words[i + 1]
    return None


def init_command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """`wassail init`."""
    path = Path(options.file)
    if path.exists():
        raise InputError(f"{options.file!r} is there already: name another file, or remove it.")
    if options.box_of is not None:
        with writing(path):
            save(path, box_text(options.box_of, names_in(options.target)))
        print(f"wrote {path}: edit it, then give it as --box {path}")
        return 0
    with writing(path):
        save(path, init_text(parser, options.file))
    print(f"wrote {path}: edit it, then {parser.prog} --config {path}")
    return 0


def box_text(name: str, targets: Sequence[str] = ()) -> str:
    """A file for `--box` with the range of each feature in some data, to be edited.

    name: of the data, samples `(N, F)`; targets: columns that are no features.
    """
    from wassail.zoo.datasets import open_data
    from wassail.zoo.files import Targets

    data = open_data(name, targets=Targets(bool(targets), tuple(targets)))
    if len(data.shape) != 1:
        raise InputError(
            f"the samples of {name!r} have shape {tuple(data.shape)}: a box for each feature is "
            "for tables."
        )
    x, _ = data.read(0, len(data))
    names = data.info.get("features") or [f"feature {i}" for i in range(data.shape[0])]
    made = io.StringIO()
    lines = csv.writer(made, lineterminator="\n")
    lines.writerow(["feature", "low", "high", "scale"])
    # As short as the type of the data allows: 20.56, not 20.559999465942383.
    for feature, low, high in zip(names, x.amin(0).numpy(), x.amax(0).numpy()):
        lines.writerow([feature, str(low), str(high), ""])
    return made.getvalue()
