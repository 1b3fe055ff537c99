"""`hami-agent completion bash|zsh|fish`: completes command lines of hami-agent.

The script asks this verb at each tab, so that it fits the program whatever its version.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from agent.cli.main import OK, VERBS, Subparsers, parser_of
from agent.cli.runbook import entries

SCRIPTS: Final = {
    "bash": """\
# Completes hami-agent in bash. Load it with: source <(hami-agent completion bash)
_hami_agent() {
    local typed=("${COMP_WORDS[@]:1:COMP_CWORD}") found
    found=$("${COMP_WORDS[0]}" completion bash -- -- "${typed[@]}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _hami_agent hami-agent
""",
    "zsh": """\
#compdef hami-agent
# Completes hami-agent in zsh. Load it with: source <(hami-agent completion zsh)
_hami_agent() {
    local found=$("${words[1]}" completion zsh -- -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    if [[ -n $found ]]; then compadd -- "${(@f)found}"; else _files; fi
}
compdef _hami_agent hami-agent
""",
    "fish": """\
# Completes hami-agent in fish. Load it with: hami-agent completion fish | source
function __hami_agent
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion fish -- -- $words[2..] 2>/dev/null
end
complete -c hami-agent -a '(__hami_agent)'
""",
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `completion`."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes command lines",
        description="Prints a script for bash, zsh or fish that completes the verbs, options and "
        "their values of this program. At each tab it calls the program.",
        epilog="example: source <(hami-agent completion bash)",
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS))
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the script, or what may stand for the last of the words; return the exit code."""
    del environ
    # argparse removes the first `--` of the words, or none in later versions of Python.
    if words := args.words[args.words[:1] == ["--"] :]:
        sys.stdout.writelines(f"{word}\n" for word in may_follow(words))
    else:
        sys.stdout.write(SCRIPTS[args.shell])
    return OK


def may_follow(words: Sequence[str]) -> list[str]:
    """What may stand for the last of the words that are typed; nothing: any value, or a file."""
    *before, typed = words
    if not before:
        return list(VERBS)
    if before[0] not in VERBS:
        return []
    if before == ["runbook"]:
        return list(entries())
    actions = _shown(parser_of(before[0]))
    for word in before:
        sub = [one for one in actions if isinstance(one, argparse._SubParsersAction)]  # noqa: SLF001 -- argparse names no public type
        if sub and word in sub[0].choices:
            actions = _shown(sub[0].choices[word])
    for action in actions:
        choices = [str(choice) for choice in action.choices or ()]
        # A switch may stand alone, so another word may follow it.
        takes_value = action.nargs != 0 and (action.nargs != "?" or choices)
        if before[-1] in action.option_strings and takes_value:
            return choices
    if typed.startswith("-"):
        return [option for action in actions for option in action.option_strings]
    places = [action.choices or () for action in actions if not action.option_strings]
    return [str(choice) for choices in places for choice in choices]


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options and arguments in the help of the parser."""
    every = parser._actions  # noqa: SLF001 -- argparse has no public list
    return [action for action in every if action.help != argparse.SUPPRESS]
