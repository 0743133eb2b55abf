"""`wassail completion SHELL`: a script for bash, zsh or fish, printed from the parser.

It needs no program but the shell: the words stand in the script, so nothing runs while one types.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
BASH = """\
# wassail completion bash > ~/.local/share/bash-completion/completions/wassail
_wassail() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" path="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${{COMP_WORDS[i]}}" in -*) break ;; *) path="$path ${{COMP_WORDS[i]}}" ;; esac
    done
    local words=""
    case "$path" in
{cases}
    esac
    if [[ "$word" == -* || "$words" != -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    fi
    [[ ${{#COMPREPLY[@]}} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _wassail wassail
"""
ZSH = "# wassail completion zsh > ~/.wassail.zsh, and source that file in ~/.zshrc\n"
ZSH += "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The parser and all below it, each with the words that lead there."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*path, name))


def words_of(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """What may follow: commands if there are some, else long options, each with its help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return [(name, about.get(name, "")) for name in action.choices]
    return [
        (word, (action.help or "") % {**vars(action), "prog": parser.prog})
        for action in parser._actions
        for word in action.option_strings
        if word.startswith("--")
    ]


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script.

    Args:
        parser: of the whole command line.
        shell: "bash", "zsh" or "fish".
    """
    found = list(commands(parser))
    if shell == "fish":
        return "\n".join(_fish(found)) + "\n"
    cases = []
    for path, child in sorted(found, key=lambda item: -len(item[0])):
        pattern = f'" {" ".join(path)}"*' if path else '""'
        words = " ".join(word for word, _ in words_of(child))
        cases.append(f'        {pattern}) words="{words}" ;;')
    return (ZSH if shell == "zsh" else "") + BASH.format(cases="\n".join(cases))


def _fish(
    found: list[tuple[tuple[str, ...], argparse.ArgumentParser]],
) -> Iterator[str]:
    yield "# wassail completion fish > ~/.config/fish/completions/wassail.fish"
    for path, child in found:
        when = [f"__fish_seen_subcommand_from {word}" for word in path] or ["__fish_use_subcommand"]
        for word, about in words_of(child):
            said = re.sub(r"[^\w .,:;()/+-]", "", about)[:60]
            name = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            yield f"complete -c wassail -n '{'; and '.join(when)}' {name} -d '{said}'"
