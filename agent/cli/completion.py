"""Prints a script for bash, zsh or fish that completes command lines of this program.

It completes verbs, options and their values, the GPUs and pods that the agent of this machine
knows, and the Nodes of the kubeconfig's cluster. At each tab it calls the program, so that it fits
whatever version is installed.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from agent.cli.connections import DEFAULT_SOCKET, connection_of, open_session
from agent.cli.main import OK, VERBS, Subparsers, parser_of
from agent.cli.runbook import entries
from agent.cli.status import status_at
from agent.errors import AgentError
from agent.kube.reader import NodeReader
from agent.status import names_of

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
"""What the shell runs. Each passes the typed words to `completion SHELL -- -- WORDS`."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `completion`."""
    parser = subparsers.add_parser(
        "completion", description=__doc__, epilog="example: source <(hami-agent completion bash)"
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS))
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the script, or what may stand for the last of the words; return the exit code."""
    # argparse removes the first `--` of the words, or none in later versions of Python.
    if words := args.words[args.words[:1] == ["--"] :]:
        sys.stdout.writelines(f"{word}\n" for word in may_follow(words, environ))
    else:
        sys.stdout.write(SCRIPTS[args.shell])

    return OK


def may_follow(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What may stand for the last of the words that are typed; nothing: any value, or a file."""
    *before, typed = words
    if not before:
        return list(VERBS)

    if before[0] not in VERBS:
        return []

    actions = _shown(parser_of(before[0]))
    for word in before:
        sub = [one for one in actions if isinstance(one, argparse._SubParsersAction)]  # noqa: SLF001 -- argparse names no public type
        if sub and word in sub[0].choices:
            actions = _shown(sub[0].choices[word])

    for action in actions:
        # A switch may stand alone, so another word may follow it.
        takes_value = action.nargs != 0 and (action.nargs != "?" or action.choices)
        if before[-1] in action.option_strings and takes_value:
            return _values(action, environ)

    if typed.startswith("-"):
        return [option for action in actions for option in action.option_strings]

    places = [action for action in actions if not action.option_strings]
    return [value for action in places for value in _values(action, environ)]


def _values(action: argparse.Action, environ: Mapping[str, str]) -> list[str]:
    """What may be given, as far as the program, this node's agent and the cluster know it."""
    with contextlib.suppress(AgentError, TimeoutError):
        if action.metavar == "ID":
            return list(entries())

        if action.metavar == "GPU":
            gpus = status_at(DEFAULT_SOCKET).found.gpus
            return [name for gpu in gpus for name in sorted(names_of(gpu))]

        if action.metavar == "POD":
            held = status_at(DEFAULT_SOCKET).found.allocations or ()
            return list(dict.fromkeys(f"{one.namespace}/{one.pod}" for one in held if one.pod))

        if "--node" in action.option_strings:
            return asyncio.run(_nodes(environ))

    return [str(choice) for choice in action.choices or ()]


async def _nodes(environ: Mapping[str, str]) -> list[str]:
    """The names of the cluster's Nodes, which have 2 s."""
    connection = connection_of(None, "", environ)
    async with asyncio.timeout(2), open_session(connection, "hami-agent-completion") as session:
        return list(await NodeReader(session, "").names())


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    every = parser._actions  # noqa: SLF001 -- argparse has no public list
    return [action for action in every if action.help != argparse.SUPPRESS]
