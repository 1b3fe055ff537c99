"""`hami-agent completion bash|zsh`: prints a script that completes command lines of hami-agent."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
BASH_VALUE: Final = '        {keys}) COMPREPLY=($(compgen -W {words} -- "$cur")); return ;;'
BASH_ANY: Final = "        {keys}) return ;;"

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
ZSH_VALUE: Final = "        ({keys}) compadd -- {each}; return ;;"
ZSH_ANY: Final = "        ({keys}) _files; return ;;"


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
    actions = [one for one in _actions(parser) if one.help != argparse.SUPPRESS]
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


def _actions(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    return parser._actions  # noqa: SLF001 -- argparse has no public list


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `completion`."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes command lines",
        description="Prints a script for bash or zsh that completes the verbs, options and their "
        "values of this program.",
        epilog="example: source <(hami-agent completion bash)",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the script; return the exit code."""
    del environ
    commands = tuple(command_words(whole_parser()))
    if args.shell == "bash":
        text = BASH.format(
            paths=_paths(commands),
            values="\n".join(_values(commands, BASH_VALUE, BASH_ANY)),
            commands="\n".join(
                _cases(commands, "        {path}) options={options} words={words} ;;")
            ),
        )
    else:
        text = ZSH.format(
            paths=_paths(commands),
            values="\n".join(_values(commands, ZSH_VALUE, ZSH_ANY)),
            commands="\n".join(
                _cases(commands, "        ({path}) options={options} choices={words} ;;")
            ),
        )
    sys.stdout.write(text)
    return OK


def _paths(commands: Sequence[CommandWords]) -> str:
    """The pattern of a command and the verb that may follow it."""
    found = (f"{one.path} {verb}" for one in commands for verb in one.verbs)
    return "|".join(map(shlex.quote, found))


def _values(commands: Iterable[CommandWords], value: str, any_value: str) -> Iterator[str]:
    """A case for the options with choices of each command, and one for those with any value."""
    for command in commands:
        groups: dict[tuple[str, ...], list[str]] = {}
        for option, choices in command.options.items():
            groups.setdefault(choices, []).append(shlex.quote(f"{command.path}:{option}"))
        for choices, keys in groups.items():
            form = value if choices else any_value
            each = " ".join(map(shlex.quote, choices))
            yield form.format(keys="|".join(keys), words=_quoted(choices), each=each)


def _cases(commands: Iterable[CommandWords], form: str) -> Iterator[str]:
    """A case for the words and options of each command."""
    for command in commands:
        options = _quoted((*command.switches, *command.options))
        words = _quoted((*command.verbs, *command.places))
        yield form.format(path=_quoted((command.path,)), options=options, words=words)


def _quoted(words: Iterable[str]) -> str:
    return "'" + " ".join(words).replace("'", "'\\''") + "'"
