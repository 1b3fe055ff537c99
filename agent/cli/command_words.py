"""Reads from the parser which words can follow on a command line."""

import argparse
from collections.abc import Iterator, Mapping, Sequence

import msgspec


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
