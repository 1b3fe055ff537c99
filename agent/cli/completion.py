"""`hami-agent completion bash|zsh`: prints a script that completes command lines of hami-agent."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from agent.cli.main import OK, Subparsers, whole_parser

BASH: Final = """\
# Completes hami-agent in bash. Load it with: source <(hami-agent completion bash)
_hami_agent() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} path="" word
    COMPREPLY=()
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $word" in
            {paths}) path="${{path:+$path }}$word" ;;
        esac
    done
    case "$path:$prev" in
{values}
    esac
    local options="" words=""
    case "$path" in
{commands}
    esac
    if [[ $cur == -* ]]; then words=$options; fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _hami_agent hami-agent
"""
ZSH: Final = """\
#compdef hami-agent
# Completes hami-agent in zsh. Load it with: source <(hami-agent completion zsh)
_hami_agent() {{
    local cur=${{words[CURRENT]}} prev=${{words[CURRENT-1]}} at="" word options="" choices=""
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$at $word" in
            ({paths}) at="${{at:+$at }}$word" ;;
        esac
    done
    case "$at:$prev" in
{values}
    esac
    case "$at" in
{commands}
    esac
    if [[ $cur == -* ]]; then choices=$options; fi
    if [[ -n $choices ]]; then compadd -- ${{=choices}}; else _files; fi
}}
compdef _hami_agent hami-agent
"""
SHELLS: Final = {
    "bash": (
        BASH,
        '        {keys}) COMPREPLY=($(compgen -W {words} -- "$cur")); return ;;',
        "        {keys}) return ;;",
        "        {path}) options={options} words={words} ;;",
    ),
    "zsh": (
        ZSH,
        "        ({keys}) compadd -- {each}; return ;;",
        "        ({keys}) _files; return ;;",
        "        ({path}) options={options} choices={words} ;;",
    ),
}
"""Of each shell: the script, and its cases for options with choices, with any value, for words."""


class CommandWords(msgspec.Struct, frozen=True):
    """The words after one command. `path`: its verbs, for example `config show`; empty: none yet.

    - `verbs`: the verbs that may follow. `places`: the values of its arguments that have choices.
    - `switches`: options that may stand alone.
    - `options`: those that need a value, each with its choices; none: any value.
    """

    path: str
    verbs: tuple[str, ...]
    places: tuple[str, ...]
    switches: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]


def command_words(parser: argparse.ArgumentParser, path: str = "") -> Iterator[CommandWords]:
    """The words of the parser's command, then those of each command below it."""
    every = parser._actions  # noqa: SLF001 -- argparse has no public list
    actions = [one for one in every if one.help != argparse.SUPPRESS]
    below = [one for one in actions if isinstance(one, argparse._SubParsersAction)]  # noqa: SLF001 -- argparse names no public type
    verbs = {name: verb for action in below for name, verb in action.choices.items()}
    options: dict[str, tuple[str, ...]] = {}
    switches: list[str] = []
    places: list[str] = []
    for action in actions:
        choices = () if action in below else tuple(map(str, action.choices or ()))
        if not action.option_strings:
            places += choices
        elif action.nargs == 0 or (action.nargs == "?" and not choices):
            switches += action.option_strings
        else:
            options |= dict.fromkeys(action.option_strings, choices)
    yield CommandWords(path, tuple(verbs), tuple(places), tuple(switches), options)
    for name, verb in verbs.items():
        yield from command_words(verb, f"{path} {name}".lstrip())


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `completion`."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes command lines",
        description="Prints a script for bash or zsh that completes the verbs, options and their "
        "values of this program.",
        epilog="example: source <(hami-agent completion bash)",
    )
    parser.add_argument("shell", choices=tuple(SHELLS))


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the script; return the exit code."""
    del environ
    script, choices_case, value_case, words_case = SHELLS[args.shell]
    paths, values, cases = [], [], []
    for command in command_words(whole_parser()):
        # A command, and the verb that may follow it.
        paths += [shlex.quote(f"{command.path} {verb}") for verb in command.verbs]
        groups: dict[tuple[str, ...], list[str]] = {}
        for option, choices in command.options.items():
            groups.setdefault(choices, []).append(shlex.quote(f"{command.path}:{option}"))
        for choices, keys in groups.items():
            each = " ".join(map(shlex.quote, choices))
            form = choices_case if choices else value_case
            values.append(form.format(keys="|".join(keys), words=_quoted(choices), each=each))
        options = _quoted((*command.switches, *command.options))
        words = _quoted((*command.verbs, *command.places))
        path = _quoted((command.path,))
        cases.append(words_case.format(path=path, options=options, words=words))
    sys.stdout.write(
        script.format(paths="|".join(paths), values="\n".join(values), commands="\n".join(cases))
    )
    return OK


def _quoted(words: Iterable[str]) -> str:
    return "'" + " ".join(words).replace("'", "'\\''") + "'"
