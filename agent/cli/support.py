"""What helps with this program: `runbook`, `bundle` for support, and `completion`."""

import argparse
import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.cli.connections import add_socket, ask, call, connection_of
from agent.cli.main import VERBS, Exit, NotThere, Subparsers, Unreachable, fail, parser_of
from agent.kit.timing import SystemClock
from agent.kit.units import by_number
from agent.kube.client import KubeSession
from agent.kube.reader import ClusterReader
from agent.web.runbook import entries, runbook_text


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `runbook`, `bundle` and `completion`."""
    parser = subparsers.add_parser(
        "runbook",
        description="Prints what the runbook says of the id in a message: of a refusal (HA-4002), "
        "a line of doctor (P-DRIVER) or explain (E-LOCK), a GPU's fault (H-079) or an Event; or of "
        "an alert. Exits 4 if there is no such id.",
        epilog="example: hami-agent runbook HA-4002",
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="without it: list all ids")

    parser = subparsers.add_parser(
        "bundle",
        description="Writes an archive for support: status with the refusals and changes of the "
        "last 24 hours, settings with origins, readiness and metrics. `status --from` "
        "reads it. It names pods, GPUs and files, but has no token, no environment of a container "
        "and no log. Exits 3 if no agent answers, and 5 if a part is missing.",
        epilog="example: hami-agent bundle --file node-1.tgz",
    )
    told = "the archive; it must not exist yet (default hami-agent-TIME.tgz)"
    parser.add_argument("--file", type=Path, metavar="PATH", help=told)
    add_socket(parser)

    parser = subparsers.add_parser(
        "completion",
        description="Prints a script for bash, zsh or fish that completes verbs, options and "
        "their values, also GPUs, pods and nodes that `status` shows, and pending pods. At each "
        "tab it asks the program that is installed.",
        epilog="example: source <(hami-agent completion bash)",
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS))
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run one of the verbs; return the exit code."""
    verbs = {"completion": _complete, "bundle": _bundle, "runbook": _runbook}
    return verbs[args.verb](args, environ)


# The runbook.

HINT: Final = "`hami-agent runbook ID` prints what the runbook says of an id"
"""The line below answers that have ids."""


def _runbook(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Print the entry, or the ids; return the exit code."""
    if args.id is None:
        known = entries()
        width = max(map(len, known))
        sys.stdout.writelines(f"{name:<{width}}  {title}\n" for name, (title, _) in known.items())
        return Exit.OK

    try:
        sys.stdout.write(runbook_text(args.id))
    except LookupError as error:
        raise NotThere(error.args[0]) from error

    return Exit.OK


# The archive.

DEADLINE: Final = 10.0
"""Seconds for the agent to answer each part."""

PARTS: Final[Mapping[str, str]] = {
    "status.json": "/api/v1/status",
    "settings.json": "/api/v1/settings",
    "readyz.txt": "/readyz?verbose",
    "metrics.txt": "/metrics",
}
"""The files of the archive, each with the path that it is read from."""


def _bundle(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Write the archive and print its name; return the exit code."""
    now = SystemClock().now()
    path = args.file or Path(f"hami-agent-{now:%Y%m%dT%H%M%SZ}.tgz")
    files: dict[str, str] = {}
    missing: list[str] = []
    for name, target in PARTS.items():
        status, text = call(args.socket, "GET", target, DEADLINE)
        if status in {200, 503}:  # the second of /readyz
            files[name] = text
        else:
            missing.append(f"missing: {name}: {target} answered {status}")

    try:
        # Never over an archive that is there, and for its owner alone: it names pods.
        with (
            open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, text in files.items():
                member, content = tarfile.TarInfo(f"hami-agent/{name}"), text.encode()
                member.size, member.mtime, member.mode = len(content), int(now.timestamp()), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        said = f"{path} cannot be written: {error.strerror}; choose another --file"
        return fail("bundle", said, Exit.UNWRITTEN)

    sys.stdout.write(f"{path}: {', '.join(files)}\n")
    for said in missing:
        fail("bundle", said, Exit.INCOMPLETE)

    return Exit.INCOMPLETE if missing else Exit.OK


# Completion.

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
"""Each passes the typed words to `completion SHELL -- -- WORDS`."""


def _complete(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the script, or what may stand for the last of the words; return the exit code."""
    # argparse removes the first `--` of the words, or none in later versions of Python.
    words = args.words[args.words[:1] == ["--"] :]
    found = may_follow(words, environ) if words else ()
    sys.stdout.write("".join(f"{word}\n" for word in found) if words else SCRIPTS[args.shell])
    return Exit.OK


def may_follow(words: Sequence[str], environ: Mapping[str, str]) -> Iterable[str]:
    """What may stand for the last of the words that are typed; nothing: any value, or a file."""
    *before, typed = words
    if not before:
        return VERBS
    if before[0] not in VERBS:
        return ()

    actions = parser_of(before[0])._actions  # noqa: SLF001 -- argparse has no public list
    for word in before:
        for action in actions:
            # Only the parser of a verb of two words has other parsers for choices.
            if isinstance(action.choices, dict) and word in action.choices:
                actions = action.choices[word]._actions  # noqa: SLF001

    shown = [action for action in actions if action.help != argparse.SUPPRESS]
    for action in shown:
        # A switch may stand alone, so another word may follow it.
        takes_value = action.nargs != 0 and (action.nargs != "?" or action.choices)
        if before[-1] in action.option_strings and takes_value:
            return _values(action, environ)

    if typed.startswith("-"):
        return [option for action in shown for option in action.option_strings]

    return [value for one in shown if not one.option_strings for value in _values(one, environ)]


NAMED: Final[Mapping[str, Callable[[Any], Iterable[object]]]] = {
    "GPU": lambda one: (gpu["uuid" if gpu["index"] is None else "index"] for gpu in one["gpus"]),
    "POD": lambda one: (
        f"{row['namespace']}/{row['pod']}" for row in one["allocations"] or () if row["pod"]
    ),
    "--node": lambda one: (one["node"]["name"],),
}
"""What the status of a node has for the values of an argument or option."""


def _values(action: argparse.Action, environ: Mapping[str, str]) -> Iterable[str]:
    if action.metavar == "ID":
        return entries()

    for name in (str(action.metavar), *action.option_strings):
        if read := NAMED.get(name):
            found = {str(value) for one in _seen() for value in read(one)}
            if name == "POD":
                with contextlib.suppress(Unreachable, TimeoutError):
                    found |= ask(connection_of(None, "", environ), "completion", _pending)

            # Bash would expand others, and so run what a name says.
            harmless = filter(re.compile(r"[\w./-]+").fullmatch, found)
            return sorted(harmless, key=by_number)

    return map(str, action.choices or ())


async def _pending(session: KubeSession) -> set[str]:
    """The pending pods that ask for devices. Raises ApiError; TimeoutError: not told within 3 s."""
    async with asyncio.timeout(3):
        pods = await ClusterReader(session).read_list("pods", dict, fields="status.phase=Pending")

    found = set[str]()
    for metadata, spec in ((pod["metadata"], pod["spec"]) for pod in pods):
        limits = [one.get("resources", {}).get("limits", {}) for one in spec["containers"]]
        if "/" in str(limits):  # a device's resource has a domain, unlike cpu and memory
            found.add(f"{metadata['namespace']}/{metadata['name']}")
    return found


def _seen() -> list[Any]:
    """The status of this node, else of the cluster's; nothing if none is told within 3 s."""
    command = [sys.executable, "-Pm", "agent", "status", "-o", "json"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, msgspec.DecodeError):
        told = subprocess.run(command, capture_output=True, timeout=3, check=False)  # noqa: S603 -- this program
        data = msgspec.json.decode(told.stdout)["data"]
        return data if isinstance(data, list) else [data]

    return []
